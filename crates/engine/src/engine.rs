//! Many requests at once: one thread that forms steps, samples, and tells each request what happened.
//!
//! A decode step with the next token of every running sequence and a prefill step with prompt chunks are in flight side by
//! side; the executor lets the decode step's nodes go first. By the row contract neither can change the other's numbers.

mod live;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use troika_base::RequestId;
use troika_graph::Acceptance;
use troika_runtime::{Priority, Ticket};

use crate::api::{EngineStatus, EventSink, FinishReason, GenerateRequest, Generator, MAX_TOP_LOGPROBS, SubmitError};
use crate::runner::{Chunk, Forward, Runner, RunnerError, WantLogits};
use live::{Live, Phase};

/// How often a request whose listener has no room is offered its event again.
const RETRY_PAUSED: Duration = Duration::from_millis(2);

/// Beyond this a bias is a mistake: a tenth of it already forces or forbids a token.
const MAX_LOGIT_BIAS: f32 = 1000.0;

/// Limits of an [`Engine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Prompt tokens in one prefill step.
    pub chunk_tokens: usize,
    /// Requests computed at once; the others wait.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_queued: usize,
    /// Tokens of a sequence, prompt and answer; at most the model's own limit.
    pub max_context_tokens: usize,
}

enum Command {
    Submit(Box<Live>),
    Cancel(RequestId),
}

/// Serves requests on one model.
pub struct Engine {
    /// `None` once the engine is told to stop.
    commands: Mutex<Option<Sender<Command>>>,
    status: Arc<Mutex<EngineStatus>>,
    next_request: AtomicU64,
    options: EngineOptions,
    vocab_size: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the engine's thread.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn start(runner: Runner, options: EngineOptions) -> std::io::Result<Self> {
        let max_context_tokens = options.max_context_tokens.min(runner.config().max_position_embeddings);
        let options = EngineOptions { max_context_tokens, ..options };
        let vocab_size = runner.config().vocab_size;
        let status = Arc::new(Mutex::new(EngineStatus::default()));
        let (commands, received) = channel();
        let shared = Arc::clone(&status);
        let run = move || {
            let mut engine = Loop::new(runner, options, received, shared);
            // A broken invariant ends the engine: every stream hears of it, and nothing more is served.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| engine.run())) {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                engine.fail(&format!("internal error: {}", text.unwrap_or_else(|| "no message".to_owned())));
            }
        };
        let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(run)?;
        Ok(Self {
            commands: Mutex::new(Some(commands)),
            status,
            next_request: AtomicU64::new(1),
            options,
            vocab_size,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The limits in force.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Ends every request with [`FinishReason::Shutdown`], refuses new ones, and waits for the engine's thread.
    pub fn shutdown(&self) {
        lock(&self.commands).take();
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("the engine's thread ended with a panic");
        }
    }

    fn check(&self, request: &GenerateRequest) -> Result<(), SubmitError> {
        let invalid = |reason: String| Err(SubmitError::Invalid { reason });
        if request.prompt.is_empty() {
            return invalid("the prompt is empty: at least one token is needed".to_owned());
        }
        if request.max_new_tokens == 0 {
            return invalid("max_new_tokens must be at least 1".to_owned());
        }
        if let Some(token) = request.prompt.iter().find(|token| **token as usize >= self.vocab_size) {
            return invalid(format!("token {token} is not in the vocabulary of {}", self.vocab_size));
        }
        let sampling = &request.sampling;
        let ranges = [
            ("temperature", sampling.temperature, 0.0..=f32::MAX),
            ("top_p", sampling.top_p, 0.0..=1.0),
            ("min_p", sampling.min_p, 0.0..=1.0),
            ("frequency_penalty", sampling.frequency_penalty, -2.0..=2.0),
            ("presence_penalty", sampling.presence_penalty, -2.0..=2.0),
            ("repetition_penalty", sampling.repetition_penalty, 0.01..=100.0),
        ];
        for (name, value, range) in ranges {
            if !range.contains(&value) {
                let (least, most) = range.into_inner();
                return invalid(format!("{name} must be a number from {least} to {most}, not {value}"));
            }
        }
        for (token, bias) in &request.logit_bias {
            if *token as usize >= self.vocab_size {
                return invalid(format!(
                    "logit_bias names token {token}, not in the vocabulary of {}",
                    self.vocab_size
                ));
            }
            if bias.abs() > MAX_LOGIT_BIAS || bias.is_nan() {
                return invalid(format!(
                    "logit_bias of token {token} must be a number from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, not {bias}"
                ));
            }
        }
        if let Some(top) = request.logprobs
            && top > MAX_TOP_LOGPROBS
        {
            return invalid(format!("logprobs must be at most {MAX_TOP_LOGPROBS}, not {top}"));
        }
        let max_context_tokens = self.options.max_context_tokens;
        if request.prompt.len() >= max_context_tokens {
            return Err(SubmitError::TooLong { prompt_tokens: request.prompt.len(), max_context_tokens });
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Generator for Engine {
    fn submit(&self, request: GenerateRequest, sink: Box<dyn EventSink>) -> Result<RequestId, SubmitError> {
        self.check(&request)?;
        let commands = lock(&self.commands);
        let mut status = lock(&self.status);
        let stopped = || status.failure.clone().unwrap_or_else(|| "it is shutting down".to_owned());
        let (Some(sender), None) = (commands.as_ref(), &status.failure) else {
            return Err(SubmitError::Stopped { reason: stopped() });
        };
        if status.queued >= self.options.max_queued {
            return Err(SubmitError::QueueFull { queued: status.queued, limit: self.options.max_queued });
        }
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let live = Box::new(Live::new(id, request, sink));
        if sender.send(Command::Submit(live)).is_err() {
            return Err(SubmitError::Stopped { reason: stopped() });
        }
        status.queued += 1;
        Ok(id)
    }

    fn cancel(&self, request: RequestId) {
        if let Some(sender) = lock(&self.commands).as_ref() {
            // If the engine is gone, so is the request.
            let _ = sender.send(Command::Cancel(request));
        }
    }

    fn status(&self) -> EngineStatus {
        lock(&self.status).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a step in flight was made of.
struct InFlight {
    priority: Priority,
    /// Request and tokens, in the order of the step's chunks.
    parts: Vec<(RequestId, usize)>,
}

/// The engine's thread.
struct Loop {
    runner: Runner,
    options: EngineOptions,
    commands: Receiver<Command>,
    /// False once nobody can send commands any more.
    open: bool,
    status: Arc<Mutex<EngineStatus>>,
    /// In order of arrival, since ids ascend.
    requests: BTreeMap<RequestId, Live>,
    in_flight: BTreeMap<Ticket, InFlight>,
    /// The last look found nothing to compute.
    idle: bool,
}

impl Loop {
    fn new(
        runner: Runner,
        options: EngineOptions,
        commands: Receiver<Command>,
        status: Arc<Mutex<EngineStatus>>,
    ) -> Self {
        let (requests, in_flight) = (BTreeMap::new(), BTreeMap::new());
        Self { runner, options, commands, open: true, status, requests, in_flight, idle: true }
    }

    fn run(&mut self) {
        loop {
            self.take_commands();
            if !self.open {
                self.finish_all(FinishReason::Shutdown);
            }
            self.deliver_pending();
            self.publish();
            if !self.open && self.requests.is_empty() && self.in_flight.is_empty() {
                return;
            }
            self.submit_steps();
            self.idle = self.in_flight.is_empty();
            if !self.idle {
                self.wait_for_step();
            }
        }
    }

    /// Takes what has come in; waits if there is nothing else to do.
    fn take_commands(&mut self) {
        if self.idle && self.open {
            let command = if self.requests.is_empty() {
                self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                // All that is left waits for listeners to make room.
                self.commands.recv_timeout(RETRY_PAUSED)
            };
            match command {
                Ok(command) => self.take_command(command),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.open = false,
            }
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.take_command(command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.open = false;
                    return;
                }
            }
        }
    }

    fn take_command(&mut self, command: Command) {
        match command {
            Command::Submit(live) => {
                self.requests.insert(live.id, *live);
            }
            Command::Cancel(id) => {
                if let Some(live) = self.requests.get_mut(&id) {
                    live.finish(FinishReason::Cancelled);
                }
            }
        }
    }

    fn finish_all(&mut self, reason: FinishReason) {
        self.requests.values_mut().for_each(|live| live.finish(reason));
    }

    /// Offers what could not be delivered before; forgets requests that are through.
    fn deliver_pending(&mut self) {
        let shutting_down = !self.open;
        let mut through = Vec::new();
        for (id, live) in &mut self.requests {
            live.deliver();
            if live.phase == Phase::Ended {
                if let Some(sequence) = live.sequence.take_if(|_| !live.in_flight) {
                    self.runner.drop_sequence(sequence);
                }
                // A listener that never makes room must not hold up the end of the engine.
                if !live.in_flight && (live.pending.is_empty() || shutting_down) {
                    through.push(*id);
                }
            }
        }
        for id in through {
            let live = self.requests.remove(&id).expect("listed above");
            let mut status = lock(&self.status);
            status.requests_total += 1;
            if live.started.is_none() {
                status.queued -= 1;
            }
        }
    }

    fn publish(&self) {
        let running = self.requests.values().filter(|live| live.sequence.is_some()).count();
        lock(&self.status).running = running;
    }

    fn submit_steps(&mut self) {
        for priority in [Priority::Decode, Priority::Prefill] {
            if self.in_flight.values().any(|step| step.priority == priority) {
                continue;
            }
            let parts = match priority {
                Priority::Decode => self.decode_parts(),
                Priority::Prefill => self.prefill_parts(),
            };
            if !parts.is_empty() {
                self.submit_step(priority, parts);
            }
        }
    }

    fn decode_parts(&self) -> Vec<(RequestId, usize)> {
        let decoding = self.requests.values().filter(|live| live.phase == Phase::Decode && live.can_run());
        decoding.map(|live| (live.id, 1)).collect()
    }

    /// The oldest prompts first; what one leaves of the step's budget goes to the next.
    fn prefill_parts(&mut self) -> Vec<(RequestId, usize)> {
        let mut running = self.requests.values().filter(|live| live.sequence.is_some()).count();
        let mut budget = self.options.chunk_tokens;
        let mut parts = Vec::new();
        for live in self.requests.values_mut().filter(|live| live.phase == Phase::Prefill && live.can_run()) {
            if budget == 0 {
                break;
            }
            if live.sequence.is_none() {
                if running >= self.options.max_running {
                    continue;
                }
                running += 1;
                live.sequence = Some(self.runner.new_sequence());
                live.started = Some(Instant::now());
                lock(&self.status).queued -= 1;
            }
            let tokens = budget.min(live.request.prompt.len() - live.num_computed_tokens);
            budget -= tokens;
            parts.push((live.id, tokens));
        }
        parts
    }

    fn submit_step(&mut self, priority: Priority, parts: Vec<(RequestId, usize)>) {
        let chunks: Vec<Chunk<'_>> = parts
            .iter()
            .map(|(id, tokens)| {
                let live = &self.requests[id];
                let (tokens, logits) = live.next_tokens(*tokens);
                let logits = if logits { WantLogits::Last(1) } else { WantLogits::No };
                let sequence = live.sequence.expect("a part of a step has a sequence");
                Chunk { sequence, tokens, logits, acceptance: Acceptance::Whole }
            })
            .collect();
        match self.runner.submit(&chunks, priority) {
            Ok(ticket) => {
                for (id, _) in &parts {
                    self.requests.get_mut(id).expect("taken from the table").in_flight = true;
                }
                self.in_flight.insert(ticket, InFlight { priority, parts });
            }
            Err(error) => {
                for (id, _) in &parts {
                    self.requests.get_mut(id).expect("taken from the table").fail(&error.to_string());
                }
            }
        }
    }

    fn wait_for_step(&mut self) {
        match self.runner.next_done() {
            Ok((ticket, forward)) => {
                let step = self.in_flight.remove(&ticket).expect("every step in flight is noted");
                self.take_results(&step, &forward);
                self.runner.recycle(forward);
            }
            Err(RunnerError::Executor(troika_runtime::ExecutorError::Node { step, reason })) => {
                tracing::error!(%step, reason, "a step failed");
                let failed = self.in_flight.remove(&Ticket(step)).expect("every step in flight is noted");
                for (id, _) in failed.parts {
                    let live = self.requests.get_mut(&id).expect("requests outlive their steps");
                    live.in_flight = false;
                    // The runner has dropped its state.
                    live.sequence = None;
                    live.fail(&format!("the computation failed: {reason}"));
                }
            }
            Err(error) => panic!("the devices are gone: {error}"),
        }
    }

    fn take_results(&mut self, step: &InFlight, forward: &Forward) {
        for (chunk, (id, tokens)) in step.parts.iter().enumerate() {
            let live = self.requests.get_mut(id).expect("requests outlive their steps");
            live.in_flight = false;
            live.num_computed_tokens += tokens;
            if step.priority == Priority::Prefill {
                lock(&self.status).prompt_tokens_total += *tokens as u64;
            }
            if live.phase == Phase::Ended {
                continue;
            }
            let mut logits = forward.logits(chunk);
            if live.phase == Phase::Prefill {
                live.report_prefill();
            }
            if !logits.is_empty() && live.draw(&mut logits, self.options.max_context_tokens) {
                lock(&self.status).completion_tokens_total += 1;
            }
        }
    }

    fn fail(&mut self, message: &str) {
        tracing::error!(message, "the engine stopped");
        {
            let mut status = lock(&self.status);
            status.failure = Some(message.to_owned());
            (status.queued, status.running) = (0, 0);
        }
        for live in self.requests.values_mut() {
            live.fail(message);
            live.deliver();
        }
        // Requests that came in meanwhile hear it too.
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(mut live) = command {
                live.fail(message);
                live.deliver();
            }
        }
    }
}
