//! Answers in OpenAI's shape: one JSON document, or server-sent events.

use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Json,
    body::{Body, Bytes},
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Serialize;
use tokio::time::timeout;

use crate::{
    error::ApiError,
    generation::{Ending, Generation, Piece},
    request::{Endpoint, random_seed},
};

/// What all documents of one answer share.
#[derive(Clone)]
pub(crate) struct Head {
    id: String,
    endpoint: Endpoint,
    created_unix_s: u64,
    model_id: Arc<str>,
}

impl Head {
    pub(crate) fn new(endpoint: Endpoint, created_unix_s: u64, model_id: &str) -> Self {
        let prefix = match endpoint {
            Endpoint::Chat => "chatcmpl",
            Endpoint::Completions => "cmpl",
        };
        let id = format!("{prefix}-{:016x}{:016x}", random_seed(), random_seed());
        Self { id, endpoint, created_unix_s, model_id: model_id.into() }
    }

    fn document<'a>(
        &'a self,
        object: &'static str,
        choice: Option<Choice<'a>>,
        usage: Option<Option<Usage>>,
    ) -> Document<'a> {
        let (id, created, model) = (&self.id, self.created_unix_s, &self.model_id);
        Document { id, object, created, model, choices: choice.into_iter().collect(), usage }
    }
}

#[derive(Serialize)]
struct Document<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice<'a>>,
    /// Outer `None`: no such member. Inner: `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    #[serde(flatten)]
    said: Said<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Said<'a> {
    Text(&'a str),
    Message { role: &'static str, content: &'a str, refusal: Option<()> },
    Delta(Delta<'a>),
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

/// Token counts as clients see them.
#[derive(Clone, Copy, Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Serialize)]
struct PromptTokensDetails {
    cached_tokens: usize,
}

impl Usage {
    /// The one place that counts.
    fn of(generation: &Generation) -> Self {
        let (prompt_tokens, completion_tokens) = (generation.prompt_tokens(), generation.completion_tokens());
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: 0 },
        }
    }
}

impl Ending {
    fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// The whole answer in one document.
pub(crate) async fn whole(mut generation: Generation, head: &Head) -> Result<Response, ApiError> {
    let mut text = String::new();
    let ending = loop {
        match generation.next().await {
            Piece::Text(piece) => text.push_str(&piece),
            Piece::End(ending) => break ending,
            Piece::Failed(error) => return Err(error),
        }
    };
    let (object, said) = match head.endpoint {
        Endpoint::Chat => ("chat.completion", Said::Message { role: "assistant", content: &text, refusal: None }),
        Endpoint::Completions => ("text_completion", Said::Text(&text)),
    };
    let choice = Choice { index: 0, said, logprobs: None, finish_reason: Some(ending.name()) };
    Ok(Json(head.document(object, Some(choice), Some(Some(Usage::of(&generation))))).into_response())
}

/// The answer as server-sent events, as it comes.
pub(crate) fn streamed(generation: Generation, head: Head, include_usage: bool, keep_alive: Duration) -> Response {
    let mut events = Events { generation, head, include_usage, keep_alive, ready: VecDeque::new(), is_over: false };
    events.open();
    let body = stream::unfold(events, |mut events| async move {
        let event = events.next().await?;
        Some((Ok::<_, Infallible>(event), events))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        // Some proxies collect an answer before they pass it on, unless told not to.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(body)).into_response()
}

/// The events of one stream. Dropped with the response when the client leaves, and the generation with it.
struct Events {
    generation: Generation,
    head: Head,
    include_usage: bool,
    keep_alive: Duration,
    ready: VecDeque<Bytes>,
    is_over: bool,
}

impl Events {
    /// The first event of a chat names the role.
    fn open(&mut self) {
        if self.head.endpoint == Endpoint::Chat {
            self.say(Delta { role: Some("assistant"), content: Some("") }, None);
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.is_over {
                return None;
            }
            match timeout(self.keep_alive, self.generation.next()).await {
                Err(_) => return Some(Bytes::from_static(b": keep-alive\n\n")),
                Ok(Piece::Text(text)) => self.say(Delta { role: None, content: Some(&text) }, None),
                Ok(Piece::End(ending)) => self.close(ending),
                Ok(Piece::Failed(error)) => {
                    // The status is out. What must not happen now is that this looks like an answer's end.
                    error.log();
                    self.ready.push_back(sse(&error.body()));
                    self.is_over = true;
                }
            }
        }
    }

    fn close(&mut self, ending: Ending) {
        self.say(Delta::default(), Some(ending));
        if self.include_usage {
            let usage = Usage::of(&self.generation);
            self.ready.push_back(sse(&self.head.document(self.object(), None, Some(Some(usage)))));
        }
        self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.is_over = true;
    }

    fn say(&mut self, delta: Delta<'_>, ending: Option<Ending>) {
        let said = match self.head.endpoint {
            Endpoint::Chat => Said::Delta(delta),
            Endpoint::Completions => Said::Text(delta.content.unwrap_or_default()),
        };
        let choice = Choice { index: 0, said, logprobs: None, finish_reason: ending.map(Ending::name) };
        let usage = self.include_usage.then_some(None);
        let event = sse(&self.head.document(self.object(), Some(choice), usage));
        self.ready.push_back(event);
    }

    fn object(&self) -> &'static str {
        match self.head.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions => "text_completion",
        }
    }
}

/// One event. JSON has no line breaks of its own, so one `data` line holds it.
fn sse(document: &impl Serialize) -> Bytes {
    let json = serde_json::to_string(document).unwrap_or_else(|error| unreachable!("plain structs serialize: {error}"));
    format!("data: {json}\n\n").into()
}
