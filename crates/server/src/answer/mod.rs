//! Answers: one JSON document, or server-sent events. What they say comes in pieces from [`Generation`]; how it is put
//! is a [`Format`], one for each API.

mod anthropic;
mod openai;
mod responses;

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use axum::{
    Json,
    body::{Body, Bytes},
    http::header,
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    activity::{millis, tier},
    error::ApiError,
    generation::{Ending, Generation, Piece, TokenLogprobs, Usage},
};

pub(crate) use anthropic::Anthropic;
pub(crate) use openai::OpenAi;
pub(crate) use responses::{Echo, Keep, Responses};

/// One API's way to put an answer.
pub(crate) trait Format: Send {
    /// The whole answer in one document; one of `answers` for each choice.
    fn whole(&mut self, answers: &[Answer], usage: Usage) -> Value;

    /// What a stream says before the first piece.
    fn open(&mut self, num_choices: usize, usage: Usage, events: &mut EventQueue);

    fn piece(&mut self, choice: usize, piece: Piece, events: &mut EventQueue);

    /// What a stream says after every choice has ended.
    fn close(&mut self, usage: Usage, events: &mut EventQueue);

    /// What a stream says instead if there is no more. It must not look like an answer's end.
    fn fail(&mut self, error: &ApiError, usage: Usage, events: &mut EventQueue);
}

/// What we say of an answer beyond other servers: `troika` in its usage.
fn extension(id: &str, usage: Usage) -> Value {
    let served = &usage.served;
    json!({
        "request_id": id,
        "cached_tokens": served.cached_tokens,
        "cached_tier": tier(served),
        "queue_ms": millis(served.queue_us),
        "prefill_ms": millis(served.prefill_us),
        "decode_ms": millis(served.decode_us),
    })
}

/// One choice, put together: its pieces, neighbours of a kind joined.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer(Vec<Piece>);

/// A tool call.
#[derive(Clone, Debug)]
pub(crate) struct Call<'a> {
    pub(crate) id: &'a str,
    pub(crate) name: &'a str,
    pub(crate) arguments: &'a str,
}

impl Answer {
    fn add(&mut self, piece: Piece) {
        match (self.0.last_mut(), piece) {
            (Some(Piece::Reasoning(text)), Piece::Reasoning(more))
            | (Some(Piece::Arguments(text)), Piece::Arguments(more)) => text.push_str(&more),
            (Some(Piece::Content { text, logprobs }), Piece::Content { text: more, logprobs: more_logprobs }) => {
                text.push_str(&more);
                logprobs.extend(more_logprobs);
            }
            (_, piece) => self.0.push(piece),
        }
    }

    fn pieces(&self) -> &[Piece] {
        &self.0
    }

    fn reasoning(&self) -> String {
        let texts =
            self.0.iter().filter_map(|piece| if let Piece::Reasoning(text) = piece { Some(&**text) } else { None });
        texts.collect()
    }

    fn content(&self) -> String {
        let texts = self
            .0
            .iter()
            .filter_map(|piece| if let Piece::Content { text, .. } = piece { Some(&**text) } else { None });
        texts.collect()
    }

    fn logprobs(&self) -> Vec<TokenLogprobs> {
        let lists = self
            .0
            .iter()
            .filter_map(|piece| if let Piece::Content { logprobs, .. } = piece { Some(logprobs) } else { None });
        lists.flatten().cloned().collect()
    }

    fn calls(&self) -> Vec<Call<'_>> {
        let mut calls: Vec<Call<'_>> = Vec::new();
        for piece in &self.0 {
            match (piece, calls.last_mut()) {
                (Piece::Call { id, name }, _) => calls.push(Call { id, name, arguments: "" }),
                (Piece::Arguments(text), Some(call)) => call.arguments = text,
                _ => {}
            }
        }
        calls
    }

    fn ending(&self) -> Option<Ending> {
        if let Some(Piece::End(ending)) = self.0.last() { Some(*ending) } else { None }
    }
}

/// The whole answer in one document.
pub(crate) async fn whole(mut generation: Generation, mut format: Box<dyn Format>) -> Result<Response, ApiError> {
    let mut answers = vec![Answer::default(); generation.num_choices()];
    while let Some((choice, piece)) = generation.next().await? {
        answers[choice].add(piece);
    }
    Ok(Json(format.whole(&answers, generation.usage())).into_response())
}

/// The answer as server-sent events, as it comes.
pub(crate) fn streamed(generation: Generation, mut format: Box<dyn Format>, keep_alive: Duration) -> Response {
    let mut ready = EventQueue::default();
    format.open(generation.num_choices(), generation.usage(), &mut ready);
    let events = Events { generation, format, keep_alive, ready, is_over: false };
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
    format: Box<dyn Format>,
    keep_alive: Duration,
    ready: EventQueue,
    is_over: bool,
}

impl Events {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.ready.0.pop_front() {
                return Some(event);
            }
            if self.is_over {
                return None;
            }
            match timeout(self.keep_alive, self.generation.next()).await {
                Err(_) => return Some(Bytes::from_static(b": keep-alive\n\n")),
                Ok(Ok(Some((choice, piece)))) => self.format.piece(choice, piece, &mut self.ready),
                Ok(Ok(None)) => {
                    self.is_over = true;
                    self.format.close(self.generation.usage(), &mut self.ready);
                }
                Ok(Err(error)) => {
                    self.is_over = true;
                    error.log();
                    self.format.fail(&error, self.generation.usage(), &mut self.ready);
                }
            }
        }
    }
}

/// Events on their way to a client.
#[derive(Default)]
pub(crate) struct EventQueue(VecDeque<Bytes>);

impl EventQueue {
    /// An event without a name. JSON has no line breaks of its own, so one `data` line holds it.
    fn data(&mut self, document: &impl Serialize) {
        self.0.push_back(format!("data: {}\n\n", to_json(document)).into());
    }

    fn named(&mut self, name: &str, document: &impl Serialize) {
        self.0.push_back(format!("event: {name}\ndata: {}\n\n", to_json(document)).into());
    }

    /// The last event of OpenAI's older streams.
    fn done(&mut self) {
        self.0.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
    }
}

fn to_json(document: &impl Serialize) -> String {
    serde_json::to_string(document).unwrap_or_else(|error| unreachable!("plain structs serialize: {error}"))
}
