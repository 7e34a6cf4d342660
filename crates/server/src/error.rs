//! Errors as a client sees them: in OpenAI's shape, and in Anthropic's on its own routes.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use troika_base::units::human_bytes;
use troika_engine::api::SubmitError;
use troika_prompt::PromptError;

/// Of a request whose time is over.
const TIMEOUT_KIND: &str = "timeout_error";
/// Longest piece of a client's own words in a message.
const MAX_QUOTE_LETTERS: usize = 64;

/// Why a request fails.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    retry_after_s: Option<u64>,
    /// Clients that try again by themselves should not.
    is_final: bool,
}

/// The JSON around an error.
#[derive(Serialize)]
pub(crate) struct ErrorBody<'a> {
    error: ErrorDetail<'a>,
}

#[derive(Serialize)]
struct ErrorDetail<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl ApiError {
    /// The client's mistake.
    pub(crate) fn request(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let (kind, message) = ("invalid_request_error", message.into());
        Self { status, kind, code: Some(code), param: None, message, retry_after_s: None, is_final: false }
    }

    /// A parameter with a value that it cannot have.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::request(StatusCode::BAD_REQUEST, "invalid_value", message).about(param)
    }

    /// Our own mistake or end.
    pub(crate) fn server(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { kind: "server_error", ..Self::request(status, code, message) }
    }

    /// Names the parameter.
    pub(crate) fn about(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    pub(crate) fn prompt_too_long(prompt_tokens: impl std::fmt::Display, max_context_tokens: usize) -> Self {
        let message = format!(
            "This model's context is {max_context_tokens} tokens, for the prompt and at least one token of the answer. \
             The prompt has {prompt_tokens}."
        );
        Self::request(StatusCode::BAD_REQUEST, "context_length_exceeded", message)
    }

    /// A key that is missing or wrong.
    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        let error = Self::request(StatusCode::UNAUTHORIZED, "invalid_api_key", message);
        Self { kind: "authentication_error", ..error }
    }

    /// Too much is going on; the client should come again after so many seconds.
    pub(crate) fn busy(code: &'static str, message: impl Into<String>, retry_after_s: u64) -> Self {
        let error = Self::request(StatusCode::TOO_MANY_REQUESTS, code, message);
        Self { kind: "rate_limit_error", retry_after_s: Some(retry_after_s), ..error }
    }

    /// The time that the client gave its request is over. Whoever wants to try again should give it more.
    pub(crate) fn deadline_exceeded() -> Self {
        let message = "The request was not done within its `timeout`.";
        // The status that OpenAI's own servers give when a request of the tier `flex` takes too long.
        let error = Self::request(StatusCode::REQUEST_TIMEOUT, "deadline_exceeded", message);
        Self { kind: TIMEOUT_KIND, is_final: true, ..error }
    }

    pub(crate) fn is_deadline(&self) -> bool {
        self.kind == TIMEOUT_KIND
    }

    /// Why the engine does not take a request; `retry_after_s` is when a full queue may have room.
    pub(crate) fn refused(error: SubmitError, retry_after_s: u64) -> Self {
        match error {
            SubmitError::Invalid { reason } => Self::request(StatusCode::BAD_REQUEST, "invalid_value", reason),
            SubmitError::TooLong { prompt_tokens, max_context_tokens } => {
                Self::prompt_too_long(prompt_tokens, max_context_tokens)
            }
            SubmitError::NeverFits { prompt_tokens, need_bytes, limit_bytes } => {
                let message = format!(
                    "The prompt of {prompt_tokens} tokens needs {} of memory for its state; {} are there for it. Shorten \
                     it, or start the server with a larger --memory-limit.",
                    human_bytes(need_bytes),
                    human_bytes(limit_bytes)
                );
                Self::request(StatusCode::BAD_REQUEST, "memory_limit_exceeded", message)
            }
            SubmitError::QueueFull { .. } => Self::busy("queue_full", error.to_string(), retry_after_s),
            SubmitError::Stopped { .. } => {
                Self::server(StatusCode::SERVICE_UNAVAILABLE, "engine_stopped", error.to_string())
            }
            other => Self::server(StatusCode::INTERNAL_SERVER_ERROR, "engine_error", other.to_string()),
        }
    }

    pub(crate) fn shutting_down() -> Self {
        Self::server(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "The server is shutting down.")
    }

    /// Says it in the log if a person should look. Refusing a client is everyday business, and so is shutting down.
    pub(crate) fn log(&self) {
        if self.status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(code = self.code, message = %self.message, "request failed");
        }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn code(&self) -> Option<&'static str> {
        self.code
    }

    pub(crate) fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// The JSON around this error for Anthropic's clients. They know no code and no parameter, so the message has to do.
    pub(crate) fn anthropic_body(&self) -> serde_json::Value {
        let kind = match self.status.as_u16() {
            _ if self.is_deadline() => self.kind,
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        serde_json::json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }

    pub(crate) fn body(&self) -> ErrorBody<'_> {
        let (message, param) = (self.message.as_str(), self.param.as_deref());
        ErrorBody { error: ErrorDetail { message, r#type: self.kind, param, code: self.code } }
    }
}

/// A client's own words, short enough to repeat.
pub(crate) fn quote(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTE_LETTERS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.log();
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        if self.is_final {
            // The header that OpenAI's and Anthropic's clients look for.
            response.headers_mut().insert("x-should-retry", HeaderValue::from_static("false"));
        }
        // For whoever puts it in another API's shape.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<PromptError> for ApiError {
    fn from(error: PromptError) -> Self {
        match error {
            PromptError::MissingSpecial { .. } | PromptError::MissingText { .. } => {
                Self::request(StatusCode::BAD_REQUEST, "unsupported_by_model", error.to_string())
            }
            other => Self::server(StatusCode::INTERNAL_SERVER_ERROR, "tokenizer_error", other.to_string()),
        }
    }
}
