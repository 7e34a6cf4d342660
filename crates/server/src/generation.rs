//! One answer, from the engine's events to pieces of it. Every route and both ways of delivery are made of these pieces.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use tokio::sync::{mpsc, watch};
use troika_base::RequestId;
use troika_engine::api::{Delivery, Event, EventSink, FinishReason, GenerateRequest, Generator, Logprobs};
use troika_prompt::{OutputEvent, StopMatcher, Tokenizer};

use crate::{
    ServerState,
    activity::{Activity, Entry},
    connections::Phase,
    error::ApiError,
    reader::{Reader, Reading},
};

/// What a generation says next, of one of its choices.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Piece {
    /// More of what the model thought before it answered.
    Reasoning(String),
    /// More of the answer, and what is known of its tokens. The text may be empty if there is something to know.
    Content { text: String, logprobs: Vec<TokenLogprobs> },
    /// A call of a tool begins. Letters and digits name it.
    Call { id: String, name: String },
    /// More of the JSON of the last call's arguments.
    Arguments(String),
    /// The choice is complete.
    End(Ending),
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The model ended it.
    Stop,
    /// The stop string of this number did.
    StopText(usize),
    /// The model ended it, having called tools.
    Calls,
    /// There was no room for more.
    Length,
}

impl Ending {
    /// OpenAI's word for it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stop | Self::StopText(_) => "stop",
            Self::Calls => "tool_calls",
            Self::Length => "length",
        }
    }
}

/// How likely a token was, and what it says.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenLogprobs {
    pub(crate) chosen: TokenChance,
    pub(crate) top: Vec<TokenChance>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenChance {
    pub(crate) bytes: Vec<u8>,
    pub(crate) logprob: f32,
}

/// Token counts of one answer, all choices together. Built in one place: [`Generation::usage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    /// Prompt tokens that did not have to be computed.
    pub(crate) cached: usize,
    pub(crate) completion: usize,
    /// Those of `completion` that were reasoning.
    pub(crate) reasoning: usize,
}

/// What to generate.
pub(crate) struct Job {
    pub(crate) request: GenerateRequest,
    /// Answers to the same prompt; the seed of each is one more than that of the one before.
    pub(crate) num_choices: usize,
    pub(crate) stops: Vec<String>,
    pub(crate) reading: Reading,
    /// Whether an answer may make several calls; otherwise it ends with the first.
    pub(crate) parallel_calls: bool,
    /// What the answers begin with.
    pub(crate) echo: String,
    pub(crate) id: String,
    pub(crate) route: &'static str,
}

/// A running generation. Dropping it cancels it.
pub(crate) struct Generation {
    generator: Arc<dyn Generator>,
    tokenizer: Arc<Tokenizer>,
    activity: Arc<Activity>,
    events: mpsc::Receiver<(usize, Event)>,
    phase: watch::Receiver<Phase>,
    choices: Vec<Choice>,
    ready: VecDeque<(usize, Piece)>,
    prompt_tokens: usize,
    id: String,
    route: &'static str,
    started_unix_s: u64,
    started: Instant,
    first_token: Option<Duration>,
    ending: &'static str,
}

/// One of the answers to the prompt.
struct Choice {
    request: RequestId,
    reader: Reader,
    stop_texts: Arc<[String]>,
    stops: StopMatcher,
    completion_tokens: usize,
    reasoning_tokens: usize,
    /// Of tokens whose text has not come out yet.
    logprobs: Vec<TokenLogprobs>,
    parallel_calls: bool,
    has_calls: bool,
    is_calling: bool,
    /// The engine is done with it, or has been told to be.
    is_over: bool,
}

impl Generation {
    /// Queues the request at the engine, once for each choice.
    pub(crate) fn start(
        state: &ServerState,
        activity: Arc<Activity>,
        phase: watch::Receiver<Phase>,
        job: Job,
    ) -> Result<Self, ApiError> {
        let (sender, events) = mpsc::channel(state.limits.max_waiting_tokens.max(1));
        let mut generation = Self {
            generator: Arc::clone(&state.generator),
            tokenizer: Arc::clone(&state.tokenizer),
            activity,
            events,
            phase,
            choices: Vec::with_capacity(job.num_choices),
            ready: VecDeque::new(),
            prompt_tokens: job.request.prompt.len(),
            id: job.id,
            route: job.route,
            started_unix_s: crate::unix_time_s(),
            started: Instant::now(),
            first_token: None,
            ending: "left",
        };
        let stop_texts: Arc<[String]> = job.stops.into();
        for choice in 0..job.num_choices {
            let mut request = job.request.clone();
            request.sampling.seed = request.sampling.seed.wrapping_add(choice as u64);
            let (sender, unread_timeout) = (sender.clone(), state.limits.unread_timeout);
            let sink = Sink { choice, sender, full_since: None, unread_timeout };
            // If this fails, dropping the generation cancels the choices before.
            let request =
                state.generator.submit(request, Box::new(sink)).inspect_err(|_| generation.ending = "refused")?;
            generation.choices.push(Choice {
                request,
                reader: Reader::new(job.reading, &state.tokenizer),
                stops: StopMatcher::new(&stop_texts),
                stop_texts: Arc::clone(&stop_texts),
                completion_tokens: 0,
                reasoning_tokens: 0,
                logprobs: Vec::new(),
                parallel_calls: job.parallel_calls,
                has_calls: false,
                is_calling: false,
                is_over: false,
            });
            if !job.echo.is_empty() {
                generation.ready.push_back((choice, Piece::Content { text: job.echo.clone(), logprobs: Vec::new() }));
            }
        }
        Ok(generation)
    }

    /// Tokens so far; those of a stop string are included.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt: self.prompt_tokens,
            cached: 0,
            completion: self.choices.iter().map(|choice| choice.completion_tokens).sum(),
            reasoning: self.choices.iter().map(|choice| choice.reasoning_tokens).sum(),
        }
    }

    pub(crate) fn num_choices(&self) -> usize {
        self.choices.len()
    }

    /// Waits for the next piece; `None` once every choice has ended. Nothing is lost if the wait is given up. After an
    /// error there is nothing more.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, Piece)>, ApiError> {
        let next = self.wait().await;
        match &next {
            Ok(Some((_, Piece::End(ending)))) => self.ending = ending.name(),
            Err(_) => self.ending = "failed",
            Ok(_) => {}
        }
        next
    }

    async fn wait(&mut self) -> Result<Option<(usize, Piece)>, ApiError> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Ok(Some(piece));
            }
            if self.choices.iter().all(|choice| choice.is_over) {
                return Ok(None);
            }
            let event = tokio::select! {
                biased;
                _ = self.phase.wait_for(|phase| *phase == Phase::Ending) => return Err(ApiError::shutting_down()),
                event = self.events.recv() => event,
            };
            let Some((idx, event)) = event else {
                let message = "The engine gave up this generation, perhaps because nobody read it.";
                return Err(failed("generation_lost", message));
            };
            if !self.choices[idx].is_over {
                self.hear(idx, event)?;
            }
        }
    }

    fn hear(&mut self, idx: usize, event: Event) -> Result<(), ApiError> {
        let choice = &mut self.choices[idx];
        let mut out = Vec::new();
        match event {
            Event::Prefilled { .. } => {}
            Event::Token { token, logprobs } => {
                self.first_token.get_or_insert_with(|| self.started.elapsed());
                let logprobs = logprobs.map(|logprobs| spell(&self.tokenizer, token, &logprobs));
                choice.token(token, logprobs, &mut out);
                if choice.is_over {
                    self.generator.cancel(choice.request);
                }
            }
            Event::Finished { reason, .. } => {
                choice.is_over = true;
                choice.finish(reason, &mut out)?;
            }
            Event::Failed { message } => {
                choice.is_over = true;
                return Err(failed("engine_error", message));
            }
        }
        self.ready.extend(out.into_iter().map(|piece| (idx, piece)));
        Ok(())
    }
}

impl Choice {
    fn token(&mut self, token: u32, logprobs: Option<TokenLogprobs>, out: &mut Vec<Piece>) {
        self.completion_tokens += 1;
        if self.reader.is_reasoning() {
            self.reasoning_tokens += 1;
        } else if !self.is_calling {
            // Clients have a place for the tokens of the answer's text alone.
            self.logprobs.extend(logprobs);
        }
        let events = self.reader.push(token);
        self.take(events, out);
    }

    fn finish(&mut self, reason: FinishReason, out: &mut Vec<Piece>) -> Result<(), ApiError> {
        let ending = match reason {
            FinishReason::StopToken(_) | FinishReason::ConstraintComplete => Ending::Stop,
            FinishReason::Length | FinishReason::ContextFull => Ending::Length,
            FinishReason::Shutdown => return Err(ApiError::shutting_down()),
            FinishReason::Cancelled => return Err(failed("cancelled", "The generation was cancelled.")),
        };
        let rest = self.reader.finish();
        if self.take(rest, out) {
            return Ok(());
        }
        let held = self.stops.finish();
        self.say(held, out);
        if !self.logprobs.is_empty() {
            out.push(Piece::Content { text: String::new(), logprobs: std::mem::take(&mut self.logprobs) });
        }
        out.push(Piece::End(if ending == Ending::Stop && self.has_calls { Ending::Calls } else { ending }));
        Ok(())
    }

    /// Passes on what was read; true if it ended the choice.
    fn take(&mut self, events: Vec<OutputEvent>, out: &mut Vec<Piece>) -> bool {
        for event in events {
            match event {
                OutputEvent::ReasoningDelta(text) => out.push(Piece::Reasoning(text)),
                OutputEvent::ContentDelta(text) => {
                    let checked = self.stops.push(&text);
                    self.say(checked.text, out);
                    if let Some(stop) = checked.stop {
                        return self.end(Ending::StopText(stop), out);
                    }
                }
                OutputEvent::ToolCallStart { name, .. } => {
                    // A stop string does not reach across a call.
                    let held = self.stops.finish();
                    self.say(held, out);
                    self.stops = StopMatcher::new(&self.stop_texts);
                    self.logprobs.clear();
                    (self.has_calls, self.is_calling) = (true, true);
                    out.push(Piece::Call { id: crate::random_name(), name });
                }
                OutputEvent::ToolCallArgumentsDelta { json, .. } => out.push(Piece::Arguments(json)),
                OutputEvent::ToolCallEnd { is_whole, .. } => {
                    self.is_calling = false;
                    if is_whole && !self.parallel_calls {
                        return self.end(Ending::Calls, out);
                    }
                }
            }
        }
        false
    }

    fn end(&mut self, ending: Ending, out: &mut Vec<Piece>) -> bool {
        self.is_over = true;
        out.push(Piece::End(ending));
        true
    }

    fn say(&mut self, text: String, out: &mut Vec<Piece>) {
        if !text.is_empty() {
            out.push(Piece::Content { text, logprobs: std::mem::take(&mut self.logprobs) });
        }
    }
}

fn spell(tokenizer: &Tokenizer, token: u32, logprobs: &Logprobs) -> TokenLogprobs {
    let chance = |token: u32, logprob: f32| TokenChance {
        bytes: tokenizer.token_bytes(token).unwrap_or_default().to_vec(),
        logprob: logprob.max(f32::MIN),
    };
    TokenLogprobs {
        chosen: chance(token, logprobs.chosen),
        top: logprobs.top.iter().map(|(token, logprob)| chance(*token, *logprob)).collect(),
    }
}

fn failed(code: &'static str, message: impl Into<String>) -> ApiError {
    ApiError::server(StatusCode::INTERNAL_SERVER_ERROR, code, message)
}

impl Drop for Generation {
    fn drop(&mut self) {
        for choice in self.choices.iter().filter(|choice| !choice.is_over) {
            self.generator.cancel(choice.request);
        }
        let (usage, elapsed) = (self.usage(), self.started.elapsed());
        tracing::debug!(
            request_id = self.id,
            prompt_tokens = usage.prompt,
            completion_tokens = usage.completion,
            elapsed_us = micros(elapsed),
            ending = self.ending,
            "request ended"
        );
        self.activity.add(Entry {
            id: std::mem::take(&mut self.id),
            route: self.route,
            started_unix_s: self.started_unix_s,
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            first_token_us: self.first_token.map(micros),
            total_us: micros(elapsed),
            ending: self.ending,
        });
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The engine's end of the channel to one client.
struct Sink {
    choice: usize,
    sender: mpsc::Sender<(usize, Event)>,
    full_since: Option<Instant>,
    unread_timeout: Duration,
}

impl EventSink for Sink {
    fn offer(&mut self, event: &Event) -> Delivery {
        if matches!(event, Event::Prefilled { .. }) {
            // Only a sign that somebody may have left.
            return if self.sender.is_closed() { Delivery::Gone } else { Delivery::Taken };
        }
        match self.sender.try_send((self.choice, event.clone())) {
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
