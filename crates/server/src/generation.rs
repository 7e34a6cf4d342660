//! One generation, from the engine's events to pieces of text. Streamed and whole answers are made of the same pieces.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use tokio::sync::{mpsc, watch};
use troika_base::RequestId;
use troika_engine::api::{Delivery, Event, EventSink, FinishReason, GenerateRequest, Generator};
use troika_prompt::{Detokenizer, MarkerText, StopMatcher};

use crate::{ServerState, connections::Phase, error::ApiError};

/// What a generation says next.
#[derive(Debug)]
pub(crate) enum Piece {
    /// More of the answer, never empty.
    Text(String),
    /// The answer is complete.
    End(Ending),
    /// It never will be. Nothing follows.
    Failed(ApiError),
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The model or a stop string ended it.
    Stop,
    /// There was no room for more.
    Length,
}

/// A running generation. Dropping it cancels it.
pub(crate) struct Generation {
    generator: Arc<dyn Generator>,
    id: RequestId,
    events: mpsc::Receiver<Event>,
    phase: watch::Receiver<Phase>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    prompt_tokens: usize,
    completion_tokens: usize,
    /// What comes after the last text.
    next: Option<Piece>,
    /// The engine is done with it, or has been told to be.
    is_over: bool,
}

impl Generation {
    /// Queues the request at the engine.
    pub(crate) fn start(
        state: &ServerState,
        phase: watch::Receiver<Phase>,
        request: GenerateRequest,
        stops: &[String],
    ) -> Result<Self, ApiError> {
        let (sender, events) = mpsc::channel(state.limits.max_waiting_tokens.max(1));
        let sink = Sink { sender, full_since: None, unread_timeout: state.limits.unread_timeout };
        let prompt_tokens = request.prompt.len();
        let id = state.generator.submit(request, Box::new(sink))?;
        Ok(Self {
            generator: Arc::clone(&state.generator),
            id,
            events,
            phase,
            detokenizer: Detokenizer::new(Arc::clone(&state.tokenizer), MarkerText::Hidden),
            stops: StopMatcher::new(stops),
            prompt_tokens,
            completion_tokens: 0,
            next: None,
            is_over: false,
        })
    }

    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Tokens of the answer so far, those of a stop string included.
    pub(crate) fn completion_tokens(&self) -> usize {
        self.completion_tokens
    }

    /// Waits for the next piece. Nothing is lost if the wait is given up. Not to be called after the last piece.
    pub(crate) async fn next(&mut self) -> Piece {
        if let Some(piece) = self.next.take() {
            return piece;
        }
        loop {
            let event = tokio::select! {
                biased;
                _ = self.phase.wait_for(|phase| *phase == Phase::Ending) => return Piece::Failed(ApiError::shutting_down()),
                event = self.events.recv() => event,
            };
            let piece = match event {
                Some(Event::Prefilled { .. }) => None,
                Some(Event::Token { token, .. }) => {
                    self.completion_tokens += 1;
                    let text = self.detokenizer.push(token);
                    self.text(&text, None)
                }
                Some(Event::Finished { reason, .. }) => {
                    self.is_over = true;
                    Some(self.finish(reason))
                }
                Some(Event::Failed { message }) => {
                    self.is_over = true;
                    Some(failed("engine_error", message))
                }
                None => Some(failed(
                    "generation_lost",
                    "The engine gave up this generation, perhaps because nobody read it.",
                )),
            };
            if let Some(piece) = piece {
                return piece;
            }
        }
    }

    /// What a piece of text turns into; `ending` is set if it is the last one.
    fn text(&mut self, text: &str, ending: Option<Ending>) -> Option<Piece> {
        let mut checked = self.stops.push(text);
        let ending = if checked.stop.is_some() {
            self.cancel();
            Some(Ending::Stop)
        } else {
            if ending.is_some() {
                checked.text.push_str(&self.stops.finish());
            }
            ending
        };
        let end = ending.map(Piece::End);
        if checked.text.is_empty() {
            return end;
        }
        self.next = end;
        Some(Piece::Text(checked.text))
    }

    fn finish(&mut self, reason: FinishReason) -> Piece {
        let ending = match reason {
            FinishReason::StopToken(_) | FinishReason::ConstraintComplete => Ending::Stop,
            FinishReason::Length | FinishReason::ContextFull => Ending::Length,
            FinishReason::Shutdown => return Piece::Failed(ApiError::shutting_down()),
            FinishReason::Cancelled => return failed("cancelled", "The generation was cancelled."),
        };
        let rest = self.detokenizer.finish();
        self.text(&rest, Some(ending)).unwrap_or(Piece::End(ending))
    }

    fn cancel(&mut self) {
        if !self.is_over {
            self.is_over = true;
            self.generator.cancel(self.id);
        }
    }
}

fn failed(code: &'static str, message: impl Into<String>) -> Piece {
    Piece::Failed(ApiError::server(StatusCode::INTERNAL_SERVER_ERROR, code, message))
}

impl Drop for Generation {
    fn drop(&mut self) {
        let (prompt_tokens, completion_tokens, is_over) = (self.prompt_tokens, self.completion_tokens, self.is_over);
        tracing::debug!(request_id = %self.id, prompt_tokens, completion_tokens, is_over, "request ended");
        self.cancel();
    }
}

/// The engine's end of the channel to one client.
struct Sink {
    sender: mpsc::Sender<Event>,
    full_since: Option<Instant>,
    unread_timeout: Duration,
}

impl EventSink for Sink {
    fn offer(&mut self, event: &Event) -> Delivery {
        if matches!(event, Event::Prefilled { .. }) {
            // Only a sign that somebody may have left.
            return if self.sender.is_closed() { Delivery::Gone } else { Delivery::Taken };
        }
        match self.sender.try_send(event.clone()) {
            Ok(()) => {
                self.full_since = None;
                Delivery::Taken
            }
            Err(mpsc::error::TrySendError::Closed(_)) => Delivery::Gone,
            Err(mpsc::error::TrySendError::Full(_)) => {
                let full_since = *self.full_since.get_or_insert_with(Instant::now);
                // A client that stays connected and reads nothing must not hold its place for ever.
                if full_since.elapsed() < self.unread_timeout { Delivery::Full } else { Delivery::Gone }
            }
        }
    }
}
