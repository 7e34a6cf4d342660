//! One answer, from the engine's events to pieces of it. Every route and both ways of delivery are made of these pieces.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use tokio::sync::{mpsc, watch};
use troika_base::RequestId;
use troika_engine::api::{
    Delivery, Event, EventSink, FinishReason, GenerateRequest, Generator, Logprobs, RequestRecord, Usage as Served,
};
use troika_prompt::{OutputEvent, StopMatcher, Tokenizer};

use crate::{
    access::Tenant,
    activity::{Activity, Entry, tier},
    connections::Phase,
    error::ApiError,
    metrics::Metrics,
    reader::{Reader, Reading},
    routes::App,
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
    pub(crate) completion: usize,
    /// Those of `completion` that were reasoning.
    pub(crate) reasoning: usize,
    /// What the engine says: cached tokens and times. Of several choices the most of each.
    pub(crate) served: Served,
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
    pub(crate) tenant: Tenant,
}

/// A running generation. Dropping it cancels it.
pub(crate) struct Generation {
    generator: Arc<dyn Generator>,
    tokenizer: Arc<Tokenizer>,
    activity: Arc<Activity>,
    metrics: Arc<Metrics>,
    events: mpsc::Receiver<(usize, Event)>,
    phase: watch::Receiver<Phase>,
    choices: Vec<Choice>,
    ready: VecDeque<(usize, Piece)>,
    prompt_tokens: usize,
    id: Arc<str>,
    route: &'static str,
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
    progress: Arc<Mutex<Progress>>,
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

/// What the engine's thread has said of a choice.
struct Progress {
    submitted: Instant,
    served: Served,
    /// The engine has ended the answer and knows all times itself.
    is_final: bool,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// How the answer ended, if we ended it and cancelled the rest.
    ending: Option<&'static str>,
}

impl Progress {
    /// Counts and times so far. The engine's own once it has ended the answer.
    fn served(&self) -> Served {
        let Some((first, last)) = self.first_token.zip(self.last_token).filter(|_| !self.is_final) else {
            return self.served;
        };
        let waited = micros(first - self.submitted);
        let prefill_us = waited.saturating_sub(self.served.queue_us);
        Served { prefill_us, decode_us: micros(last - first), ..self.served }
    }
}

impl Generation {
    /// Queues the request at the engine, once for each choice.
    pub(crate) fn start(app: &App, phase: watch::Receiver<Phase>, job: Job) -> Result<Self, ApiError> {
        let (state, id) = (&app.state, Arc::from(job.id));
        app.activity.begin(Entry {
            id: String::from(&*id),
            route: job.route,
            started_unix_s: crate::unix_time_s(),
            prompt_tokens: job.request.prompt.len(),
            completion_tokens: 0,
            first_token_us: None,
            total_us: 0,
            ending: None,
            tenant: job.tenant.clone(),
            records: vec![None; job.num_choices],
        });
        let (sender, events) = mpsc::channel(state.limits.max_waiting_tokens.max(1));
        let mut generation = Self {
            generator: Arc::clone(&state.generator),
            tokenizer: Arc::clone(&state.tokenizer),
            activity: Arc::clone(&app.activity),
            metrics: Arc::clone(&app.metrics),
            events,
            phase,
            choices: Vec::with_capacity(job.num_choices),
            ready: VecDeque::new(),
            prompt_tokens: job.request.prompt.len(),
            id,
            route: job.route,
            started: Instant::now(),
            first_token: None,
            ending: "left",
        };
        let stop_texts: Arc<[String]> = job.stops.into();
        for choice in 0..job.num_choices {
            let mut request = job.request.clone();
            request.sampling.seed = request.sampling.seed.wrapping_add(choice as u64);
            request.service.tenant.clone_from(&job.tenant.0);
            let progress = Arc::new(Mutex::new(Progress {
                submitted: Instant::now(),
                served: Served { prompt_tokens: request.prompt.len(), ..Served::default() },
                is_final: false,
                first_token: None,
                last_token: None,
                ending: None,
            }));
            let sink = Sink {
                choice,
                id: Arc::clone(&generation.id),
                route: job.route,
                sender: sender.clone(),
                progress: Arc::clone(&progress),
                activity: Arc::clone(&app.activity),
                metrics: Arc::clone(&app.metrics),
                full_since: None,
                unread_timeout: state.limits.unread_timeout,
                has_started: false,
            };
            // If this fails, dropping the generation cancels the choices before.
            let request = state.generator.submit(request, Box::new(sink)).map_err(|error| {
                generation.ending = "refused";
                ApiError::refused(error, state.generator.status().retry_after_s)
            })?;
            generation.choices.push(Choice {
                request,
                reader: Reader::new(job.reading, &state.tokenizer),
                stops: StopMatcher::new(&stop_texts),
                stop_texts: Arc::clone(&stop_texts),
                progress,
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
        let served = self.choices.iter().map(|choice| lock(&choice.progress).served());
        let most = |a: Served, b: Served| Served {
            cached_tokens: a.cached_tokens.max(b.cached_tokens),
            cached_tokens_from_disk: a.cached_tokens_from_disk.max(b.cached_tokens_from_disk),
            queue_us: a.queue_us.max(b.queue_us),
            prefill_us: a.prefill_us.max(b.prefill_us),
            decode_us: a.decode_us.max(b.decode_us),
            ..a
        };
        Usage {
            prompt: self.prompt_tokens,
            served: served.reduce(most).unwrap_or_default(),
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
            Err(error) if error.is_deadline() => self.ending = "expired",
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
                    if let Some(Piece::End(ending)) = out.last() {
                        lock(&choice.progress).ending = Some(ending.name());
                    }
                    self.generator.cancel(choice.request);
                }
            }
            Event::Finished { reason, usage } => {
                choice.is_over = true;
                let mut progress = lock(&choice.progress);
                (progress.served, progress.is_final) = (usage, true);
                drop(progress);
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
            FinishReason::Length | FinishReason::ContextFull | FinishReason::MemoryFull => Ending::Length,
            FinishReason::DeadlinePassed => return Err(ApiError::deadline_exceeded()),
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
        self.metrics.ended(self.route, self.ending);
        self.activity.update(&self.id, |entry| {
            entry.completion_tokens = usage.completion;
            entry.first_token_us = self.first_token.map(micros);
            entry.total_us = micros(elapsed);
            entry.ending = Some(self.ending);
            // Of choices that the engine refused there will be none.
            entry.records.truncate(self.choices.len());
        });
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The engine's end of the channel to one client.
struct Sink {
    choice: usize,
    id: Arc<str>,
    route: &'static str,
    sender: mpsc::Sender<(usize, Event)>,
    progress: Arc<Mutex<Progress>>,
    activity: Arc<Activity>,
    metrics: Arc<Metrics>,
    full_since: Option<Instant>,
    unread_timeout: Duration,
    has_started: bool,
}

impl Sink {
    /// Takes the time of an event, once however often it is offered.
    fn note(&mut self, event: &Event) {
        let mut progress = lock(&self.progress);
        match event {
            Event::Prefilled { usage, .. } => {
                progress.served = *usage;
                if !std::mem::replace(&mut self.has_started, true) {
                    self.metrics.started(usage.queue_us);
                }
            }
            Event::Token { .. } if self.full_since.is_none() => {
                let now = Instant::now();
                match progress.last_token.replace(now) {
                    Some(last) => self.metrics.next_token(now - last),
                    None => {
                        progress.first_token = Some(now);
                        self.metrics.first_token(now - progress.submitted);
                    }
                }
            }
            Event::Token { .. } | Event::Finished { .. } | Event::Failed { .. } => {}
        }
    }
}

impl EventSink for Sink {
    fn offer(&mut self, event: &Event) -> Delivery {
        self.note(event);
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

    fn ended(&mut self, record: &RequestRecord) {
        let RequestRecord { usage, diverged, stored_blocks, skipped_because, preemptions, drafts, .. } = record;
        let ending = lock(&self.progress).ending.unwrap_or(match record.finish {
            Some(FinishReason::StopToken(_) | FinishReason::ConstraintComplete) => "stop",
            Some(FinishReason::Length | FinishReason::ContextFull | FinishReason::MemoryFull) => "length",
            Some(FinishReason::DeadlinePassed) => "expired",
            Some(FinishReason::Shutdown) => "failed",
            Some(FinishReason::Cancelled) => "left",
            None => record.failure.as_ref().map_or("left", |_| "failed"),
        });
        tracing::info!(
            request_id = &*self.id,
            choice = self.choice,
            route = self.route,
            ending,
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.cached_tokens,
            tier = tier(usage),
            diverged_at = diverged.map(|at| at.position),
            completion_tokens = usage.completion_tokens,
            stored_blocks,
            skipped_because,
            chunks = record.chunks.len(),
            preemptions,
            drafted = drafts.as_ref().map(|drafts| drafts.drafted),
            accepted = drafts.as_ref().map(|drafts| drafts.accepted),
            queue_us = usage.queue_us,
            prefill_us = usage.prefill_us,
            decode_us = usage.decode_us,
            "request ended"
        );
        self.activity.update(&self.id, |entry| entry.records[self.choice] = Some(record.clone()));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
