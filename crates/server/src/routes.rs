//! Paths, bodies, and the way from one to the other.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Path, Request, State},
    http::{HeaderMap, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::StreamExt;
use serde_json::json;
use tokio::{
    sync::{Semaphore, watch},
    task::spawn_blocking,
    time::timeout,
};
use troika_engine::api::GenerateRequest;
use troika_prompt::{ChatOptions, Conversation, ThinkingMode, encode_chat, encode_completion};

use crate::{
    ServerState, answer,
    connections::Phase,
    error::{ApiError, quote},
    generation::Generation,
    request::{Asked, Delivery, Endpoint, Prompt, model_not_found},
};

/// Requests whose JSON and text are worked on at a time: each may need a hundred times its size while that lasts.
const MAX_READERS: usize = 2;
/// A body over the limit is read on up to this many times the limit, so that its sender comes to read our answer.
const PATIENCE: usize = 4;

/// What the handlers share.
struct App {
    state: ServerState,
    phase: watch::Receiver<Phase>,
    readers: Arc<Semaphore>,
}

pub(crate) fn router(state: ServerState, phase: watch::Receiver<Phase>) -> Router {
    let app = Arc::new(App { state, phase, readers: Arc::new(Semaphore::new(MAX_READERS)) });
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(app)
}

async fn not_found(method: Method, uri: Uri) -> ApiError {
    let message = format!("There is no {method} {}.", quote(uri.path()));
    ApiError::request(StatusCode::NOT_FOUND, "not_found", message)
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not answer {method}.", quote(uri.path()));
    ApiError::request(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let engine = app.state.generator.status();
    let (code, status, reason) = match (&engine.failure, &app.state.degraded) {
        (Some(failure), _) => (StatusCode::SERVICE_UNAVAILABLE, "failed", Some(failure)),
        (None, _) if *app.phase.borrow() != Phase::Serving => (StatusCode::SERVICE_UNAVAILABLE, "stopping", None),
        (None, Some(degraded)) => (StatusCode::OK, "degraded", Some(degraded)),
        (None, None) => (StatusCode::OK, "ok", None),
    };
    let body = json!({
        "status": status,
        "reason": reason,
        "model": app.state.model_id,
        "queued": engine.queued,
        "running": engine.running,
    });
    (code, Json(body)).into_response()
}

fn describe_model(state: &ServerState) -> serde_json::Value {
    json!({"id": state.model_id, "object": "model", "created": state.created_unix_s, "owned_by": "troika"})
}

async fn models(State(app): State<Arc<App>>) -> Response {
    Json(json!({"object": "list", "data": [describe_model(&app.state)]})).into_response()
}

async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    if id != app.state.model_id {
        return Err(model_not_found(&id, &app.state.model_id));
    }
    Ok(Json(describe_model(&app.state)).into_response())
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    generate(&app, Endpoint::Completions, request).await
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    generate(&app, Endpoint::Chat, request).await
}

async fn generate(app: &Arc<App>, endpoint: Endpoint, request: Request) -> Result<Response, ApiError> {
    check_content_type(request.headers())?;
    let limits = app.state.limits;
    let body = timeout(limits.body_timeout, read_body(request.into_body(), limits.max_body_bytes));
    let body = body.await.map_err(|_| {
        ApiError::request(StatusCode::REQUEST_TIMEOUT, "timeout", "The request body did not arrive in time.")
    })??;
    let (asked, request) = prepare(app, endpoint, body).await?;
    let generation = Generation::start(&app.state, app.phase.clone(), request, &asked.stops)?;
    let head = answer::Head::new(endpoint, unix_time_s(), &app.state.model_id);
    match asked.delivery {
        Delivery::Whole => answer::whole(generation, &head).await,
        Delivery::Stream { include_usage } => Ok(answer::streamed(generation, head, include_usage, limits.keep_alive)),
    }
}

/// Anything but JSON is refused, also because a web page can send other types here without asking first.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("The request's content-type must be application/json, not `{}`.", quote(essence));
    Err(ApiError::request(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

async fn read_body(body: Body, max_bytes: usize) -> Result<Bytes, ApiError> {
    let mut stream = body.into_data_stream();
    let (mut bytes, mut num_bytes) = (Vec::new(), 0);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| {
            let message = format!("The request body broke off: {error}");
            ApiError::request(StatusCode::BAD_REQUEST, "incomplete_body", message)
        })?;
        num_bytes += chunk.len();
        if num_bytes <= max_bytes {
            bytes.extend_from_slice(&chunk);
        } else if num_bytes > max_bytes.saturating_mul(PATIENCE) {
            break;
        }
    }
    if num_bytes > max_bytes {
        let message = format!("The request body is longer than {max_bytes} bytes.");
        return Err(ApiError::request(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
    }
    Ok(bytes.into())
}

/// Parses and encodes away from the threads that serve sockets.
async fn prepare(app: &Arc<App>, endpoint: Endpoint, body: Bytes) -> Result<(Asked, GenerateRequest), ApiError> {
    let Ok(reader) = Arc::clone(&app.readers).acquire_owned().await else {
        return Err(ApiError::shutting_down());
    };
    let work = {
        let app = Arc::clone(app);
        spawn_blocking(move || {
            // Held until the work is done, even if the client is gone by then.
            let _reader = reader;
            let asked = Asked::parse(endpoint, &body, &app.state)?;
            let request = encode(&app.state, &asked)?;
            Ok((asked, request))
        })
    };
    work.await.unwrap_or_else(|error| {
        let message = format!("The request could not be read: {error}");
        Err(ApiError::server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message))
    })
}

fn encode(state: &ServerState, asked: &Asked) -> Result<GenerateRequest, ApiError> {
    let tokenizer = &state.tokenizer;
    let options = ChatOptions::new(ThinkingMode::Chat);
    // A text that is too long in any case is not worth the memory that encoding it takes.
    let min_tokens = tokenizer.min_tokens(asked.prompt.text_bytes());
    if min_tokens >= state.max_context_tokens {
        return Err(ApiError::prompt_too_long(format!("at least {min_tokens}"), state.max_context_tokens));
    }
    let prompt = match &asked.prompt {
        Prompt::Text(text) => encode_completion(tokenizer, text)?,
        Prompt::Tokens(tokens) => tokens.clone(),
        Prompt::Messages(messages) => {
            let conversation = Conversation { messages: messages.clone(), ..Conversation::default() };
            encode_chat(tokenizer, &state.texts, &conversation, options)?.ids
        }
    };
    let room = state.max_context_tokens.saturating_sub(prompt.len());
    if room == 0 {
        return Err(ApiError::prompt_too_long(prompt.len(), state.max_context_tokens));
    }
    let max_new_tokens = asked.max_tokens.map_or(room, |max_tokens| max_tokens.min(room));
    let request = GenerateRequest::new(prompt, max_new_tokens, asked.sampling);
    Ok(GenerateRequest { stop_tokens: state.stop_tokens.clone(), ..request })
}

fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
