//! Many requests at once: the engine's thread, its commands and its clock. What happens on the thread is in [`core`].

pub(crate) mod core;
pub(crate) mod disk;
mod given_up;
mod live;
mod prefix;
mod skips;
pub(crate) mod speculate;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use troika_base::RequestId;
use troika_scheduler::{Geometry, Rule, StateCost};

use self::core::{Core, Submission};
use self::disk::DiskTier;
use crate::api::{EngineStatus, EventSink, FinishReason, GenerateRequest, Generator, MAX_TOP_LOGPROBS, SubmitError};
use crate::runner::Runner;

/// How often a request whose listener has no room is offered its event again.
const RETRY_PAUSED: Duration = Duration::from_millis(2);

/// Beyond this a bias is a mistake: a tenth of it already forces or forbids a token.
const MAX_LOGIT_BIAS: f32 = 1000.0;

/// Limits of an [`Engine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Prompt tokens in one prefill step. Chunks end at multiples of it, counted from position 0.
    pub chunk_tokens: usize,
    /// Steps are not widened above that, even if neural engines have nothing to do then.
    pub honour_chunk: bool,
    /// Prefill steps in flight at once, of one prompt or of several; 0 counts as 1.
    pub wavefront: usize,
    /// Requests computed at once; the others wait.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_queued: usize,
    /// Tokens of a sequence, prompt and answer; at most the model's own limit.
    pub max_context_tokens: usize,
    /// Longest gap between the tokens of a running stream while prompts are computed.
    pub max_itl: Duration,
    /// Bytes for the state of all sequences and the values of the steps; `u64::MAX` = no limit.
    pub memory_bytes: u64,
    /// Bytes for prefixes that need not be computed again; 0 = none are kept.
    pub cache_bytes: u64,
    /// Least distance between the regular places to resume at, tokens; others are at the ends of prompts and answers.
    pub snapshot_spacing: usize,
}

impl EngineOptions {
    /// What [`Self::max_itl`] is unless somebody knows better.
    pub const DEFAULT_MAX_ITL: Duration = Duration::from_millis(200);
    /// What [`Self::snapshot_spacing`] is unless somebody knows better.
    pub const DEFAULT_SNAPSHOT_SPACING: usize = 2048;
}

enum Command {
    Submit(Box<Submission>),
    Cancel(RequestId),
    /// Something has been read from disk.
    Wake,
}

/// Serves requests on one model.
pub struct Engine {
    /// `None` once the engine is told to stop.
    commands: Arc<Mutex<Option<Sender<Command>>>>,
    status: Arc<Mutex<EngineStatus>>,
    next_request: AtomicU64,
    options: EngineOptions,
    vocab_size: usize,
    clock: Clock,
    /// Bytes of state by tokens, and how many there are.
    state_cost: StateCost,
    block_tokens: usize,
    /// Most that there can be.
    state_bytes: u64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Microseconds since the engine started.
#[derive(Clone, Copy, Debug)]
struct Clock(Instant);

impl Clock {
    fn now_us(self) -> u64 {
        self.0.elapsed().as_micros() as u64
    }
}

impl Engine {
    /// Starts the engine's thread.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn start(runner: Runner, options: EngineOptions) -> std::io::Result<Self> {
        Self::start_with_disk(runner, options, None)
    }

    /// As [`Self::start`], with prefixes kept on disk too.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn start_with_disk(runner: Runner, options: EngineOptions, disk: Option<DiskTier>) -> std::io::Result<Self> {
        let max_context_tokens = options.max_context_tokens.min(runner.config().max_position_embeddings);
        let options = EngineOptions { max_context_tokens, ..options };
        let vocab_size = runner.config().vocab_size;
        let status = Arc::new(Mutex::new(EngineStatus::default()));
        let (sender, received) = channel();
        let commands = Arc::new(Mutex::new(Some(sender)));
        let clock = Clock(Instant::now());
        let mut core = Core::new(runner, &options, Arc::clone(&status));
        if let Some(disk) = disk {
            let commands = Arc::clone(&commands);
            core.set_disk(disk, move || {
                if let Some(sender) = lock(&commands).as_ref() {
                    // If the engine is gone, nobody waits.
                    let _ = sender.send(Command::Wake);
                }
            });
        }
        let Geometry { tile, step, reachable, limited_by, .. } = core.scheduler().limits().geometry;
        tracing::info!(geometry = %core.scheduler().limits().geometry, "steps");
        if !reachable {
            let (reason, cure) = match limited_by {
                Some(Rule::Memory) => ("memory", "a smaller tile (--tile) or more memory (--memory-limit)"),
                _ => ("step_limit", "wider steps (--chunk), or a tile at most as wide as they are (--tile)"),
            };
            core.runner_mut().set_idle(reason);
            tracing::warn!(tile, step, reason, cure, "no step can hold a tile: the engines have nothing to do");
        }
        if core.runner().block_of_drafts() > 0 {
            tracing::info!(block = core.runner().block_of_drafts(), "tokens are drafted, and verified by the model");
        }
        core.publish_nodes();
        let limits = core.scheduler().limits();
        let (state_cost, block_tokens, state_bytes) =
            (limits.state_cost, limits.geometry.block, limits.most_state_bytes());
        let run = move || {
            let mut engine = Loop { core, clock, commands: received, open: true };
            // A broken invariant ends the engine: every stream hears of it, and nothing more is served.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| engine.run())) {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                engine.stop(&format!("internal error: {}", text.unwrap_or_else(|| "no message".to_owned())));
            }
        };
        let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(run)?;
        Ok(Self {
            commands,
            status,
            next_request: AtomicU64::new(1),
            options,
            vocab_size,
            clock,
            state_cost,
            block_tokens,
            state_bytes,
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

    /// Tokens of the longest prompt that context and memory allow, even if nothing else runs; 0 = none.
    pub fn max_prompt_tokens(&self) -> usize {
        let StateCost { fixed_bytes, bytes_per_block } = self.state_cost;
        let blocks = self.state_bytes.saturating_sub(fixed_bytes) / bytes_per_block.max(1);
        let tokens = usize::try_from(blocks).unwrap_or(usize::MAX).saturating_mul(self.block_tokens);
        // With room for a token of the answer.
        tokens.min(self.options.max_context_tokens).saturating_sub(1)
    }

    /// Bytes a prompt needs and bytes there are, if it needs more.
    fn never_fits(&self, prompt_tokens: usize) -> Option<(u64, u64)> {
        let need = self.state_cost.bytes_of(prompt_tokens + 1, self.block_tokens);
        (need > self.state_bytes).then_some((need, self.state_bytes))
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
        if let Some((need_bytes, limit_bytes)) = self.never_fits(request.prompt.len()) {
            return Err(SubmitError::NeverFits { prompt_tokens: request.prompt.len(), need_bytes, limit_bytes });
        }
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let submission = Box::new(Submission { id, request, sink, submitted_us: self.clock.now_us() });
        if sender.send(Command::Submit(submission)).is_err() {
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

/// The engine's thread.
struct Loop {
    core: Core<Runner>,
    clock: Clock,
    commands: Receiver<Command>,
    /// False once nobody can send commands any more.
    open: bool,
}

impl Loop {
    fn run(&mut self) {
        loop {
            self.take_commands();
            let now = self.clock.now_us();
            if !self.open {
                self.core.finish_all(FinishReason::Shutdown, now);
            }
            self.core.turn(now);
            if !self.open && self.core.is_empty() {
                self.core.flush();
                return;
            }
            if !self.core.is_idle() {
                // The only place that waits for a step.
                let clock = self.clock;
                let left = |due: u64| Duration::from_micros(due.saturating_sub(clock.now_us()));
                self.core.wait(self.core.next_due_us().map(left), |_| clock.now_us());
            }
        }
    }

    /// Takes what has come in; waits if there is nothing else to do.
    fn take_commands(&mut self) {
        if self.core.is_idle() && self.open {
            let command = if self.core.is_empty() {
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
        let now = self.clock.now_us();
        match command {
            Command::Submit(submission) => self.core.submit(*submission, now),
            Command::Cancel(id) => self.core.cancel(id, now),
            // The next turn looks for it.
            Command::Wake => {}
        }
    }

    /// Ends everything with an error.
    fn stop(&mut self, message: &str) {
        tracing::error!(message, "the engine stopped");
        let now = self.clock.now_us();
        self.core.stop(message, now);
        // Requests that came in meanwhile hear it too.
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(submission) = command {
                submission.refuse(message);
            }
        }
    }
}
