//! An engine that says what a test tells it to, through the same interface as the real one.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use troika_base::RequestId;
use troika_engine::HybridStatus;
use troika_engine::api::{
    ConstraintState, Delivery, EngineStatus, Event, EventSink, FinishReason, GenerateRequest, Generator, Logprobs,
    RequestRecord, SubmitError, Usage,
};

/// How long the engine waits before it offers an event again that found no room.
const RETRY: Duration = Duration::from_millis(1);

/// What the engine says to those it refuses.
pub const SCRIPTED_RETRY_AFTER_S: u64 = 7;

/// One thing the engine does.
#[derive(Clone, Debug)]
pub enum Act {
    /// Offers a token.
    Token(u32),
    /// Offers this token until the request ends, with a pause before each.
    Forever(u32, Duration),
    /// Reports progress of the prefill, so many tokens of it found in the cache.
    Prefilled(usize),
    /// Does nothing for a while; a cancelled request wakes up.
    Pause(Duration),
    /// Fails this request.
    Fail(String),
    /// Ends this request.
    Finish(FinishReason),
    /// Forgets the request without a word, as a broken engine would.
    Vanish,
}

/// How a request ended, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub end: End,
    /// Tokens that the sink took.
    pub tokens_taken: usize,
    /// Times the sink had no room.
    pub times_full: usize,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Finished(FinishReason),
    Failed,
    /// The sink said that nobody listens.
    Gone,
    Vanished,
}

/// Plays one script for every request, each on its own thread.
pub struct ScriptedEngine {
    script: Mutex<Vec<Act>>,
    max_context_tokens: usize,
    max_requests: Mutex<usize>,
    failure: Mutex<Option<String>>,
    hybrid: Mutex<Option<HybridStatus>>,
    next_id: AtomicU64,
    tokens_taken: Arc<AtomicUsize>,
    log: Arc<Mutex<Log>>,
}

#[derive(Default)]
struct Log {
    requests: Vec<GenerateRequest>,
    running: BTreeMap<RequestId, Arc<AtomicBool>>,
    outcomes: Vec<Outcome>,
}

impl ScriptedEngine {
    /// Plays `script`. When it is over, the generation ends with a stop token, or by length if there is none.
    pub fn new(script: Vec<Act>) -> Self {
        Self {
            script: Mutex::new(script),
            max_context_tokens: 4096,
            max_requests: Mutex::new(usize::MAX),
            failure: Mutex::new(None),
            hybrid: Mutex::new(None),
            next_id: AtomicU64::new(1),
            tokens_taken: Arc::default(),
            log: Arc::default(),
        }
    }

    /// Offers these tokens.
    pub fn of_tokens(tokens: impl IntoIterator<Item = u32>) -> Self {
        Self::new(tokens.into_iter().map(Act::Token).collect())
    }

    /// From the next request on, plays another script.
    pub fn play(&self, script: Vec<Act>) {
        *lock(&self.script) = script;
    }

    /// From now on, refuses requests while so many run.
    pub fn limit_requests(&self, max_requests: usize) {
        *lock(&self.max_requests) = max_requests;
    }

    /// From now on, says this of neural engines.
    pub fn set_hybrid(&self, hybrid: HybridStatus) {
        *lock(&self.hybrid) = Some(hybrid);
    }

    /// From now on, refuses everything for this reason.
    pub fn stop(&self, reason: &str) {
        *lock(&self.failure) = Some(reason.to_owned());
    }

    /// Requests accepted so far.
    pub fn requests(&self) -> Vec<GenerateRequest> {
        lock(&self.log).requests.clone()
    }

    /// Tokens that sinks took so far, of all requests.
    pub fn tokens_taken(&self) -> usize {
        self.tokens_taken.load(Ordering::Relaxed)
    }

    /// Ends of requests so far, in order.
    pub fn outcomes(&self) -> Vec<Outcome> {
        lock(&self.log).outcomes.clone()
    }
}

impl Generator for ScriptedEngine {
    fn submit(&self, request: GenerateRequest, sink: Box<dyn EventSink>) -> Result<RequestId, SubmitError> {
        if let Some(reason) = lock(&self.failure).clone() {
            return Err(SubmitError::Stopped { reason });
        }
        if request.prompt.is_empty() || request.max_new_tokens == 0 {
            return Err(SubmitError::Invalid { reason: "a request needs a prompt token and a new token".into() });
        }
        if let Some(token) = request.prompt.iter().find(|token| **token >= 1024) {
            return Err(SubmitError::Invalid {
                reason: format!("token {token} is not below the vocabulary size 1024"),
            });
        }
        if request.prompt.len() + request.max_new_tokens > self.max_context_tokens {
            let prompt_tokens = request.prompt.len();
            return Err(SubmitError::TooLong { prompt_tokens, max_context_tokens: self.max_context_tokens });
        }
        let mut log = lock(&self.log);
        let (queued, limit) = (log.running.len(), *lock(&self.max_requests));
        if queued >= limit {
            return Err(SubmitError::QueueFull { queued, limit });
        }
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let cancelled = Arc::new(AtomicBool::new(false));
        log.requests.push(request.clone());
        log.running.insert(id, Arc::clone(&cancelled));
        let (script, shared, total) =
            (lock(&self.script).clone(), Arc::clone(&self.log), Arc::clone(&self.tokens_taken));
        thread::spawn(move || {
            let player = Player { request, sink, cancelled, total, tokens_taken: 0, cached_tokens: 0, times_full: 0 };
            let outcome = player.play(id, &script);
            let mut log = lock(&shared);
            log.running.remove(&id);
            log.outcomes.push(outcome);
        });
        Ok(id)
    }

    fn cancel(&self, request: RequestId) {
        if let Some(cancelled) = lock(&self.log).running.get(&request) {
            cancelled.store(true, Ordering::Relaxed);
        }
    }

    fn status(&self) -> EngineStatus {
        let running = lock(&self.log).running.len();
        let failure = lock(&self.failure).clone();
        let hybrid = lock(&self.hybrid).clone();
        EngineStatus { running, failure, hybrid, retry_after_s: SCRIPTED_RETRY_AFTER_S, ..EngineStatus::default() }
    }
}

/// One request being played.
struct Player {
    request: GenerateRequest,
    sink: Box<dyn EventSink>,
    cancelled: Arc<AtomicBool>,
    total: Arc<AtomicUsize>,
    tokens_taken: usize,
    cached_tokens: usize,
    times_full: usize,
}

impl Player {
    fn play(mut self, id: RequestId, script: &[Act]) -> Outcome {
        let end = script.iter().find_map(|act| self.act(act)).unwrap_or_else(|| {
            let stop = self.request.stop_tokens.first();
            self.finish(stop.map_or(FinishReason::Length, |token| FinishReason::StopToken(*token)))
        });
        let record = RequestRecord {
            request: Some(id),
            usage: self.usage(),
            finish: if let End::Finished(reason) = end { Some(reason) } else { None },
            failure: (end == End::Failed).then(|| "as told".to_owned()),
            ..RequestRecord::default()
        };
        self.sink.ended(&record);
        Outcome { end, tokens_taken: self.tokens_taken, times_full: self.times_full }
    }

    /// Does one thing; `Some` if the request ended.
    fn act(&mut self, act: &Act) -> Option<End> {
        match act {
            Act::Token(token) => self.token(*token),
            Act::Forever(token, pause) => loop {
                let end = self.pause(*pause).or_else(|| self.token(*token));
                if end.is_some() {
                    return end;
                }
            },
            Act::Prefilled(num_computed_tokens) => {
                self.cached_tokens = *num_computed_tokens;
                self.offer(&Event::Prefilled { num_computed_tokens: *num_computed_tokens, usage: self.usage() })
            }
            Act::Pause(pause) => self.pause(*pause),
            Act::Fail(message) => Some(self.offer(&Event::Failed { message: message.clone() }).unwrap_or(End::Failed)),
            Act::Finish(reason) => Some(self.finish(*reason)),
            Act::Vanish => Some(End::Vanished),
        }
    }

    fn token(&mut self, token: u32) -> Option<End> {
        if self.request.stop_tokens.contains(&token) {
            return Some(self.finish(FinishReason::StopToken(token)));
        }
        let state = match self.request.constraint.as_mut().map(|constraint| constraint.accept(token)) {
            Some(Err(message)) => return Some(self.offer(&Event::Failed { message }).unwrap_or(End::Failed)),
            Some(Ok(state)) => state,
            None => ConstraintState::Open,
        };
        let logprobs = self.request.logprobs.map(|top| Box::new(scripted_logprobs(token, top)));
        let end = self.offer(&Event::Token { token, logprobs });
        if end.is_some() {
            return end;
        }
        self.tokens_taken += 1;
        self.total.fetch_add(1, Ordering::Relaxed);
        if state == ConstraintState::Complete {
            return Some(self.finish(FinishReason::ConstraintComplete));
        }
        (self.tokens_taken == self.request.max_new_tokens).then(|| self.finish(FinishReason::Length))
    }

    fn pause(&mut self, pause: Duration) -> Option<End> {
        let mut left = pause;
        while !left.is_zero() && !self.is_cancelled() {
            let nap = left.min(RETRY);
            thread::sleep(nap);
            left -= nap;
        }
        self.is_cancelled().then(|| self.finish(FinishReason::Cancelled))
    }

    /// Offers an event until it is taken; `Some` if the request ended instead.
    fn offer(&mut self, event: &Event) -> Option<End> {
        loop {
            if self.is_cancelled() {
                return Some(self.finish(FinishReason::Cancelled));
            }
            match self.sink.offer(event) {
                Delivery::Taken => return None,
                Delivery::Gone => return Some(End::Gone),
                Delivery::Full => {
                    self.times_full += 1;
                    thread::sleep(RETRY);
                }
            }
        }
    }

    fn finish(&mut self, reason: FinishReason) -> End {
        let usage = self.usage();
        while self.sink.offer(&Event::Finished { reason, usage }) == Delivery::Full {
            self.times_full += 1;
            thread::sleep(RETRY);
        }
        End::Finished(reason)
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.request.prompt.len(),
            cached_tokens: self.cached_tokens,
            completion_tokens: self.tokens_taken,
            ..Usage::default()
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// The token that came is half as likely as can be, and each of the next `top - 1` ids half as likely as the one before.
pub fn scripted_logprobs(token: u32, top: usize) -> Logprobs {
    let log_prob = |rank: u32| -std::f32::consts::LN_2 * (rank + 1) as f32;
    Logprobs { chosen: log_prob(0), top: (0..top as u32).map(|rank| (token + rank, log_prob(rank))).collect() }
}

/// A test that panicked elsewhere must not hide its reason behind a poisoned lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
