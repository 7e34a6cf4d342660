//! What happens on the engine's thread, without the thread: requests in, steps out, tokens drawn, events offered.
//!
//! Time arrives as an argument and steps are done by a [`StepRunner`], so the same code runs on a virtual clock with a model
//! whose next token hashes the rows it read. The scheduler decides what is computed; this module carries it out.
//!
//! A decode step with the next token of every running sequence and prefill steps with prompt chunks are in flight side by
//! side. By the row contract none can change another's numbers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use troika_base::{RequestId, SequenceId};
use troika_device::state::Packing;
use troika_device::{SequenceState, StateShape};
use troika_runtime::{Ledger, Priority, Ticket};
use troika_scheduler::{Geometry, GeometryRequest, Lane, Limits, NewSequence, Refusal, Rule, Scheduler, StateCost};

use self::steps::InFlight;
use super::EngineOptions;
use super::disk::DiskTier;
use super::given_up::GivenUp;
use super::live::Live;
use super::prefix::{CacheIdentity, Prefixes, Sharing};
use super::skips::{SkipWarning, Skips, WINDOW};
use super::speculate::{Drafting, decode_bytes};
use crate::api::{DraftCounts, EngineStatus, Event, EventSink, FinishReason, GenerateRequest, NodeTotals};
use crate::hybrid::HybridStatus;
use crate::runner::{Chunk, RunnerError};

mod steps;

/// Does forward passes. The engine's own is [`crate::Runner`]; tests have one that computes no model.
pub trait StepRunner {
    /// What a sequence keeps in each layer.
    fn state_shape(&self) -> &StateShape;

    /// Everything but weights and tokens that the bits of rows depend on: the numeric class, whether the CPU fuses, the
    /// kernels' revision. Rows of one arithmetic never meet those of another.
    fn arithmetic(&self) -> String;

    /// How rows of that class lie in files.
    fn packing(&self) -> Packing {
        Packing::Floats
    }

    /// Rows of a tile of the neural engines that take part in prefill, if any do. Rows of decode steps are of another class then.
    fn tile(&self) -> Option<usize> {
        None
    }

    /// True if a row of prefill has the same bits whoever computes it, so that it may serve other sequences.
    fn repeats_rows(&self) -> bool {
        true
    }

    /// The next prefill step has a chunk that `rule` has narrowed. `after_hit`: it begins where a kept prefix ends.
    fn note_narrowed(&mut self, rule: Rule, after_hit: bool) {
        let _ = (rule, after_hit);
    }

    /// Bytes that neural engines hold beside the model's own weights, and those of them that [`Self::shed`] would free.
    fn engine_bytes(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Has neural engines give up the part of their work that saves least per byte. Returns the bytes that frees; `None` if
    /// there is nothing to give up.
    fn shed(&mut self) -> Option<u64> {
        None
    }

    /// Begins to bring back what [`Self::shed`] has given up last. Returns the bytes that takes from now on; `None` if nothing can
    /// come back now.
    fn reload(&mut self) -> Option<u64> {
        None
    }

    /// What came of [`Self::reload`], once it is known: true if it is back, false if it never will be.
    fn take_reloaded(&mut self) -> Option<bool> {
        None
    }

    /// Frees memory that finished steps have left for the next ones.
    fn release_buffers(&self) {}

    /// What was found wrong with an engine's numbers since the last call: no state of any sequence is to be trusted, nor what
    /// was stored of any.
    fn take_quarantine(&mut self) -> Option<String> {
        None
    }

    /// Bytes that the values of a step of so many rows take at most, logits of `logit_rows` of them included.
    fn step_bytes(&self, rows: usize, logit_rows: usize) -> u64;

    /// Counts of all nodes so far, by kind and device, in place of what `totals` held.
    fn node_totals(&self, totals: &mut Vec<NodeTotals>) {
        totals.clear();
    }

    /// Brings up to date what is known of neural engines, if any were wished for.
    fn report_hybrid(&self, status: &mut Option<HybridStatus>) {
        let _ = status;
    }

    /// Starts an empty sequence.
    fn new_sequence(&mut self) -> SequenceId;

    /// Starts a sequence with a state.
    fn adopt(&mut self, state: SequenceState) -> SequenceId;

    /// A sequence's state.
    ///
    /// # Errors
    ///
    /// If there is no such sequence.
    fn sequence_state(&self, sequence: SequenceId) -> Result<Arc<SequenceState>, RunnerError>;

    /// Forgets a sequence and frees its state. Unknown ids are ignored.
    fn drop_sequence(&mut self, sequence: SequenceId);

    /// Queues one step.
    ///
    /// # Errors
    ///
    /// If a chunk is malformed; nothing has changed then.
    fn submit(&mut self, chunks: &[Chunk<'_>], priority: Priority) -> Result<Ticket, RunnerError>;

    /// Tokens that a drafter proposes at once; 0 = there is none.
    fn block_of_drafts(&self) -> usize {
        0
    }

    /// Bytes that the values of a step of the drafter take for so many sequences.
    fn draft_bytes(&self, sequences: usize) -> u64 {
        let _ = sequences;
        0
    }

    /// Queues a step of the drafter: what may follow the newest token of each sequence, none of whose steps are in flight.
    ///
    /// # Errors
    ///
    /// If there is no drafter or a token is malformed; nothing has changed then.
    fn submit_draft(&mut self, newest: &[(SequenceId, u32)]) -> Result<Ticket, RunnerError>;

    /// Keeps the first `rows` rows of a sequence's `Partial` chunk that is done, and takes the others back.
    ///
    /// # Errors
    ///
    /// If there is no such sequence.
    fn commit(&mut self, sequence: SequenceId, rows: usize) -> Result<(), RunnerError>;

    /// Waits for any step in flight, at most for `timeout`. Rows of `Whole` chunks are committed.
    ///
    /// # Errors
    ///
    /// If a step failed. Its sequences are dropped, since their state is no longer to be trusted.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<StepResult>, RunnerError>;
}

/// A step that is done.
#[derive(Debug)]
pub struct StepResult {
    /// Which.
    pub ticket: Ticket,
    /// Of each chunk, `[rows, vocab_size]`.
    pub logits: Vec<Vec<f32>>,
    /// Of each sequence, if it was a step of the drafter.
    pub drafts: Vec<Vec<Proposal>>,
    /// From submission to the last node, microseconds.
    pub elapsed_us: u64,
    /// The longest node, microseconds.
    pub longest_node_us: u64,
    /// What engines did of it; empty without any.
    pub ledger: Ledger,
    /// Rows of the tiles that engines were given of each projection, rows of zeros included.
    pub tiled_rows: usize,
}

/// A token that the drafter proposes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Proposal {
    /// Its id.
    pub token: u32,
    /// How sure the drafter is that it is right if those before it are: the logit of a chance.
    pub confidence: f32,
}

/// A request on its way to the core.
pub struct Submission {
    /// Its name, larger than that of any request before.
    pub id: RequestId,
    /// What is asked for.
    pub request: GenerateRequest,
    /// Who hears of it.
    pub sink: Box<dyn EventSink>,
    /// When it came in.
    pub submitted_us: u64,
}

impl Submission {
    pub(super) fn refuse(mut self, message: &str) {
        self.sink.offer(&Event::Failed { message: message.to_owned() });
    }
}

/// Requests, and what becomes of them.
pub struct Core<R> {
    runner: R,
    max_context_tokens: usize,
    status: Arc<Mutex<EngineStatus>>,
    scheduler: Scheduler,
    prefixes: Option<Prefixes>,
    /// In order of arrival, since ids ascend.
    requests: BTreeMap<RequestId, Live>,
    in_flight: BTreeMap<Ticket, InFlight>,
    /// When the last step of prompts was done.
    last_prefill_us: u64,
    /// How often steps are halved for want of memory.
    throttle: u32,
    skips: Skips,
    given_up: GivenUp,
    /// A step is done, and what follows from it is not yet planned.
    turn_is_due: bool,
    /// Tokens that the drafter proposes at once; 0 = there is none.
    block_of_drafts: usize,
    drafting: Drafting,
}

impl<R: StepRunner> Core<R> {
    /// Resolves the geometry and starts with no requests. Neural engines may have to give up some of their work for it.
    pub fn new(mut runner: R, options: &EngineOptions, status: Arc<Mutex<EngineStatus>>) -> Self {
        make_room_for_a_tile(&mut runner, options);
        let scheduler = Scheduler::new(limits(&runner, options));
        let Geometry { block, granule, .. } = scheduler.limits().geometry;
        let (arithmetic, packing) = (runner.arithmetic(), runner.packing());
        let sharing = match runner.tile() {
            None => Sharing::All,
            Some(_) if runner.repeats_rows() => Sharing::Prompts,
            Some(_) => Sharing::Nothing,
        };
        let identity = CacheIdentity { arithmetic, packing, sharing, ..CacheIdentity::default() };
        let prefixes = (options.cache_bytes > 0).then(|| Prefixes::new(options.cache_bytes, block, granule, identity));
        let (requests, in_flight) = (BTreeMap::new(), BTreeMap::new());
        let max_context_tokens = options.max_context_tokens;
        let block_of_drafts = runner.block_of_drafts();
        {
            let limits = scheduler.limits();
            let mut status = lock(&status);
            status.state_bytes_limit = limits.state_bytes;
            status.state_bytes_per_block = limits.state_cost.bytes_per_block;
            status.kept_bytes_per_block = runner.state_shape().kept_bytes_per_block();
            status.geometry = limits.geometry.to_string();
            status.drafts = (block_of_drafts > 0).then(DraftCounts::default);
            status.step_bytes = steps_bytes(&runner, limits.geometry.step, limits.max_running, limits.wavefront);
        }
        Self {
            runner,
            max_context_tokens,
            status,
            scheduler,
            prefixes,
            requests,
            in_flight,
            last_prefill_us: 0,
            throttle: 0,
            skips: Skips::default(),
            given_up: GivenUp::default(),
            turn_is_due: false,
            block_of_drafts,
            drafting: Drafting::default(),
        }
    }

    /// Also keeps prefixes on disk; `wake` is called on another thread when a turn would find something read. Without a
    /// cache in memory there is none on disk.
    pub fn set_disk(&mut self, tier: DiskTier, wake: impl Fn() + Send + Sync + 'static) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.set_disk(tier, self.runner.state_shape(), wake);
        }
        self.publish();
    }

    /// Waits until everything is on disk that is to be, but not for ever.
    pub fn flush(&self) {
        if let Some(prefixes) = &self.prefixes {
            prefixes.flush();
        }
    }

    /// The scheduler, to look at.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// What does the steps.
    pub fn runner(&self) -> &R {
        &self.runner
    }

    /// What does the steps.
    pub fn runner_mut(&mut self) -> &mut R {
        &mut self.runner
    }

    /// True if there is no request and no step.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.in_flight.is_empty()
    }

    /// True if no step is in flight and the last one was followed by a [`Self::turn`]: nothing happens until a command comes in or
    /// a listener makes room.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && !self.turn_is_due
    }

    /// When [`Self::turn`] wants to be called again, whatever happens meanwhile.
    pub fn next_due_us(&self) -> Option<u64> {
        self.scheduler.next_due_us()
    }

    /// Takes a request.
    pub fn submit(&mut self, submission: Submission, now_us: u64) {
        let mut live = Live::new(submission);
        live.notes.drafts = (self.block_of_drafts > 0).then(DraftCounts::default);
        live.thread = self.prefixes.as_ref().map(|prefixes| prefixes.thread(&live.request.service.tenant));
        let service = &live.request.service;
        let deadline_us =
            service.deadline.map(|deadline| live.submitted_us.saturating_add(deadline.as_micros() as u64));
        let new = NewSequence { tokens: live.tokens.len(), urgency: service.urgency, deadline_us };
        match self.scheduler.submit(live.id, new) {
            Ok(()) => {}
            Err(Refusal::QueueFull { queued, limit }) => {
                live.fail(&format!("the queue is full: {queued} requests wait (limit {limit})"));
            }
            Err(Refusal::NeverFits { need_bytes, limit_bytes }) => {
                live.fail(&format!("the prompt needs {need_bytes} bytes of state; the limit is {limit_bytes}"));
            }
        }
        self.requests.insert(live.id, live);
        self.forget_ended(now_us);
    }

    /// Ends a request early. Unknown ids are ignored.
    pub fn cancel(&mut self, id: RequestId, _now_us: u64) {
        if let Some(live) = self.requests.get_mut(&id) {
            live.finish(FinishReason::Cancelled);
        }
    }

    /// Ends every request.
    pub fn finish_all(&mut self, reason: FinishReason, _now_us: u64) {
        for live in self.requests.values_mut() {
            live.finish(reason);
            // A listener that never makes room must not hold up the end of the engine.
            live.deliver();
            live.pending.clear();
        }
    }

    /// Ends every request with an error; nothing is computed any more.
    pub fn stop(&mut self, message: &str, _now_us: u64) {
        {
            let mut status = lock(&self.status);
            status.failure = Some(message.to_owned());
            (status.queued, status.running) = (0, 0);
        }
        for live in self.requests.values_mut() {
            live.fail(message);
            live.deliver();
        }
    }

    /// Does everything that can be done without waiting.
    pub fn turn(&mut self, now_us: u64) {
        for id in self.scheduler.expired(now_us) {
            if let Some(live) = self.requests.get_mut(&id) {
                live.finish(FinishReason::DeadlinePassed);
            }
        }
        self.deliver_pending();
        self.forget_ended(now_us);
        self.give_up_untrusted();
        self.take_loaded(now_us);
        self.make_memory();
        self.admit(now_us);
        self.wish_for_drafts();
        for lane in [Lane::Decode, Lane::Prefill] {
            while self.scheduler.has_room(lane) {
                let plan = self.scheduler.plan(lane, now_us);
                let is_last = plan.parts.is_empty();
                self.carry_out(lane, plan);
                if is_last {
                    break;
                }
            }
        }
        self.turn_is_due = false;
        self.publish();
    }

    /// Offers what could not be delivered before.
    fn deliver_pending(&mut self) {
        for (id, live) in &mut self.requests {
            live.deliver();
            self.scheduler.set_paused(*id, !live.pending.is_empty());
        }
    }

    /// Frees the state of requests that have ended, and forgets those that are through.
    fn forget_ended(&mut self, _now_us: u64) {
        let mut through = Vec::new();
        for (id, live) in &mut self.requests {
            if live.ended && self.scheduler.end(*id) {
                if let Some(sequence) = live.sequence.take() {
                    self.runner.drop_sequence(sequence);
                }
                if let (Some(load), Some(prefixes)) = (live.load.take(), &mut self.prefixes) {
                    prefixes.abandon(load);
                }
                if live.pending.is_empty() {
                    through.push(*id);
                }
            }
        }
        for id in through {
            let mut live = self.requests.remove(&id).expect("listed above");
            let finish = live.notes.finish;
            let failed = live.notes.failure.is_some();
            let mut status = lock(&self.status);
            status.requests_total += 1;
            match finish {
                Some(FinishReason::DeadlinePassed) => status.expired_total += 1,
                Some(FinishReason::Cancelled) => status.cancelled_total += 1,
                Some(_) => {}
                None if failed => status.failed_total += 1,
                None => status.cancelled_total += 1,
            }
            if live.started_us.is_none() {
                status.queued = status.queued.saturating_sub(1);
            }
            if let Some(hybrid) = &mut status.hybrid {
                hybrid.note_request(&live.notes.ledger);
            }
            drop(status);
            live.report_end();
            if self.prefixes.is_some()
                && let Some(warning) = self.skips.take(&live.notes)
            {
                let SkipWarning { percent, reason, cure } = warning;
                tracing::warn!(percent, reason, cure, "of the last {WINDOW} requests many blocks were not kept");
            }
        }
    }

    /// If memory is short, engines give up banks before steps are narrowed and before anybody's state is taken; when it has not
    /// been for long, they get them back.
    fn make_memory(&mut self) {
        if let Some(is_back) = self.runner.take_reloaded() {
            self.scheduler.take_bytes(self.given_up.settled(is_back));
        }
        while self.scheduler.bytes_short() > 0 {
            let Some(bytes) = self.runner.shed() else { break };
            self.scheduler.take_bytes(bytes);
            self.given_up.note(bytes);
        }
        if self.given_up.may_return(self.scheduler.bytes_spare())
            && let Some(bytes) = self.runner.reload()
        {
            self.scheduler.give_bytes(bytes);
            self.given_up.returns();
        }
        let throttle = self.scheduler.throttle_in_force();
        if throttle != self.throttle {
            let step = self.scheduler.limits().geometry.narrowed(throttle);
            let (state, before) = (self.scheduler.state_limit(), self.throttle);
            if throttle > before {
                tracing::warn!(
                    step,
                    state,
                    "memory is short: steps of prompts are narrower, which leaves more for their state"
                );
                self.runner.release_buffers();
            } else {
                tracing::info!(step, state, "memory: steps of prompts are wider again");
            }
            self.throttle = throttle;
        }
    }

    /// If an engine's numbers were wrong: nothing that was stored is used any more, and every sequence is computed again.
    fn note_quarantine(&mut self) {
        let Some(reason) = self.runner.take_quarantine() else { return };
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.close_class();
        }
        let mut restarted = Vec::new();
        for live in self.requests.values_mut() {
            live.is_untrusted = live.sequence.is_some() || live.load.is_some();
            if !live.ended {
                live.thread = self.prefixes.as_ref().map(|prefixes| prefixes.thread(&live.request.service.tenant));
                restarted.extend(live.is_untrusted.then_some(live.id));
            }
        }
        tracing::warn!(reason, requests = restarted.len(), "what engines have computed is computed again");
        self.scheduler.restart(restarted);
        self.give_up_untrusted();
    }

    /// Takes the state of sequences that are computed again, as soon as none of their steps is in flight.
    fn give_up_untrusted(&mut self) {
        for id in self.scheduler.take_restarted() {
            let live = self.requests.get_mut(&id).expect("the scheduler knows live requests only");
            if let Some(sequence) = live.sequence.take() {
                self.runner.drop_sequence(sequence);
            }
            if let (Some(load), Some(prefixes)) = (live.load.take(), &mut self.prefixes) {
                prefixes.abandon(load);
            }
            (live.num_computed_tokens, live.is_untrusted) = (0, false);
            live.notes.restarts += 1;
        }
    }

    fn admit(&mut self, now_us: u64) {
        for id in self.scheduler.admit() {
            let live = self.requests.get_mut(&id).expect("the scheduler knows live requests only");
            if live.started_us.is_none() {
                live.started_us = Some(now_us);
                let mut status = lock(&self.status);
                status.queued = status.queued.saturating_sub(1);
            }
            live.load = match (&mut self.prefixes, &mut live.thread) {
                (Some(prefixes), Some(thread)) => {
                    let prefix = prefixes.of_class(&live.tokens, live.prompt_tokens);
                    prefixes.load(thread, prefix, now_us)
                }
                _ => None,
            };
            if live.load.is_none() {
                self.attach(id);
            }
        }
    }

    /// Goes on with the sequences whose prefixes have been read, or do not come.
    fn take_loaded(&mut self, now_us: u64) {
        let Some(prefixes) = &mut self.prefixes else { return };
        let (loaded, silent) = prefixes.take_loaded(now_us);
        let loaded = loaded.into_iter().map(|loaded| (loaded.id, Some(loaded)));
        for (load, loaded) in loaded.chain(silent.into_iter().map(|load| (load, None))) {
            // What nobody waits for any more is as well read again.
            let Some(live) = self.requests.values_mut().find(|live| live.load == Some(load)) else { continue };
            live.load = None;
            let id = live.id;
            if let (Some(prefixes), Some(thread), Some(loaded)) = (&mut self.prefixes, &mut live.thread, loaded) {
                prefixes.bring_up(thread, &live.tokens, loaded);
            }
            self.attach(id);
        }
    }

    /// Gives an admitted sequence its state, as far as memory has it.
    fn attach(&mut self, id: RequestId) {
        let live = self.requests.get_mut(&id).expect("the scheduler knows live requests only");
        let hit = match (&mut self.prefixes, &mut live.thread) {
            (Some(prefixes), Some(thread)) => {
                let prefix = prefixes.of_class(&live.tokens, live.prompt_tokens);
                prefixes.lookup(thread, prefix, self.runner.state_shape())
            }
            _ => None,
        };
        live.num_computed_tokens = hit.as_ref().map_or(0, |hit| hit.len);
        live.resumed_at = live.num_computed_tokens;
        self.scheduler.attached(id, live.num_computed_tokens);
        live.sequence = Some(match hit {
            Some(hit) => self.runner.adopt(hit.state),
            None => self.runner.new_sequence(),
        });
        if !live.has_attached {
            live.has_attached = true;
            live.cached_tokens = live.num_computed_tokens;
            live.cached_tokens_from_disk = match (&self.prefixes, &live.thread) {
                (Some(prefixes), Some(thread)) => prefixes.tokens_from_disk(thread).min(live.cached_tokens),
                _ => 0,
            };
            live.notes.is_shifted = !live.cached_tokens.is_multiple_of(self.scheduler.limits().geometry.step);
            let mut status = lock(&self.status);
            status.cached_tokens_total += live.cached_tokens as u64;
            status.cached_tokens_from_disk_total += live.cached_tokens_from_disk as u64;
        }
    }

    /// Says what devices did so far.
    pub(super) fn publish_nodes(&self) {
        let mut status = lock(&self.status);
        self.runner.node_totals(&mut status.nodes);
        self.runner.report_hybrid(&mut status.hybrid);
    }

    fn publish(&self) {
        let mut status = lock(&self.status);
        status.running = self.scheduler.num_running();
        status.preemptions_total = self.scheduler.num_preemptions();
        status.state_bytes_limit = self.scheduler.state_limit();
        status.retry_after_s = self.scheduler.retry_after_s();
        status.state_bytes_reserved = self.scheduler.reserved_bytes();
        status.cache = self.prefixes.as_ref().map(Prefixes::status).unwrap_or_default();
    }

    /// # Panics
    ///
    /// If the books do not add up.
    pub fn check_invariants(&self) {
        self.scheduler.check_invariants();
        if let Some(prefixes) = &self.prefixes {
            prefixes.check_invariants();
        }
        for (id, live) in &self.requests {
            if !live.ended {
                assert_eq!(live.sequence.is_some(), self.scheduler.is_attached(*id), "{id} and its state");
                assert!(live.sequence.is_none() || live.load.is_none(), "{id} waits for what it has");
                let computed = self.scheduler.num_computed_tokens(*id);
                assert_eq!(live.num_computed_tokens, computed, "{id} has computed");
            }
        }
        let loading = self.requests.values().filter(|live| live.load.is_some()).count();
        assert_eq!(
            loading,
            self.prefixes.as_ref().map_or(0, Prefixes::num_loading),
            "sequences that wait for the disk"
        );
        let holding = self.requests.values().filter(|live| live.sequence.is_some()).count();
        assert!(holding <= self.scheduler.limits().max_running, "{holding} sequences have state");
    }
}

/// Steps of a tile are worth more than banks: as many are given up as it takes for such a step to fit the memory.
fn make_room_for_a_tile(runner: &mut impl StepRunner, options: &EngineOptions) {
    let Some(tile) = runner.tile() else { return };
    let values = steps_bytes(runner, tile, options.max_running, options.wavefront.max(1));
    while options.memory_bytes < u64::MAX && values > memory_bytes(runner, options) / 2 && runner.shed().is_some() {}
}

/// Bytes for state and values: what engines hold is not there for them.
fn memory_bytes(runner: &impl StepRunner, options: &EngineOptions) -> u64 {
    match options.memory_bytes {
        u64::MAX => u64::MAX,
        bytes => bytes.saturating_sub(runner.engine_bytes().0),
    }
}

fn limits(runner: &impl StepRunner, options: &EngineOptions) -> Limits {
    let shape = runner.state_shape();
    let wavefront = options.wavefront.max(1);
    let request = GeometryRequest {
        tile: runner.tile(),
        step: options.chunk_tokens.max(1),
        honour_step: options.honour_chunk,
        block: shape.block_tokens(),
        cache: options.cache_bytes > 0,
        snapshot_spacing: options.snapshot_spacing,
    };
    let memory = memory_bytes(runner, options);
    // Half of the memory at most is for the values of steps.
    let fits =
        |rows: usize| memory == u64::MAX || steps_bytes(runner, rows, options.max_running, wavefront) <= memory / 2;
    let geometry = Geometry::resolve(&request, fits);
    let steps_of = |rows: usize| steps_bytes(runner, rows, options.max_running, wavefront);
    let steps = steps_of(geometry.step);
    // As wide as the scheduler's budget is then.
    let narrowing_frees = std::array::from_fn(|index| match geometry.step >> (index + 1) {
        _ if memory == u64::MAX => 0,
        rows => steps - steps_of(rows.max(1)).min(steps),
    });
    Limits {
        geometry,
        budget_tokens: geometry.step,
        wavefront,
        max_running: options.max_running.max(1),
        max_queued: options.max_queued,
        max_itl_us: options.max_itl.as_micros() as u64,
        state_bytes: if memory == u64::MAX { u64::MAX } else { memory.saturating_sub(steps) },
        reserve_bytes: runner.engine_bytes().1,
        narrowing_frees,
        state_cost: StateCost { fixed_bytes: shape.fixed_bytes(), bytes_per_block: shape.bytes_per_block() },
        two_classes: runner.tile().is_some(),
    }
}

/// Bytes of the values of the prefill steps and the decode step that may be in flight side by side.
fn steps_bytes(runner: &impl StepRunner, step: usize, max_running: usize, wavefront: usize) -> u64 {
    // Of each sequence that decodes there is one row, and its logits; in a prefill step logits are for prompts that end there,
    // of two tokens at least.
    let ends = if runner.tile().is_some() { 0 } else { max_running.min(step.div_ceil(2)) };
    let prefill = runner.step_bytes(step, ends).saturating_mul(wavefront as u64);
    let step = |rows, logit_rows| runner.step_bytes(rows, logit_rows);
    let draft = |sequences| runner.draft_bytes(sequences);
    prefill.saturating_add(decode_bytes(max_running, runner.block_of_drafts(), step, draft))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
