//! Forward passes for one caller: sequences, chunks in, logits out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::NodeTotals;
use crate::engine::core::{StepResult, StepRunner};
use crate::hybrid::HybridStatus;
pub use draft::Draft;
use troika_base::{NumericClass, SequenceId, StoredTensor};
use troika_device::cpu::{CpuDevice, CpuOptions, REVISION};
use troika_device::npu::{CompileCounts, NpuBackend};
use troika_device::state::{LayerShape, Packing, PoolShape, Snapshot};
use troika_device::{Device, DeviceError, SequenceState, StateShape, StepRun};
use troika_graph::{Acceptance, Kind, Scope, Segment, StepGraph, StepRows, WeightSource};
use troika_model::config::LayerKind;
use troika_model::{Emitter, ModelConfig, ModelFacts, StepSignature};
use troika_runtime::prepare::{Record, Stage, dry_run};
use troika_runtime::{
    DeviceId, EngineBytes, Executor, ExecutorError, Fallback, FeatureState, FinishedStep, HybridOptions, Lane, Ledger,
    Plan, Prepared, Priority, Span, Step, Template, Ticket, prepare,
};
use troika_scheduler::Rule;

mod draft;

pub(crate) use draft::draft_bytes;

/// Settings of a [`Runner`].
#[derive(Clone, Copy, Debug)]
pub struct RunnerOptions {
    /// The arithmetic.
    pub class: NumericClass,
    /// The primary device.
    pub cpu: CpuOptions,
    /// Compute the drafter's context with every step, so that it can draft.
    pub draft_context: bool,
    /// Keep every intermediate value of a step readable through [`Forward::tap`]. Costs memory.
    pub debug: bool,
}

impl RunnerOptions {
    /// All cores, no drafter, no debugging.
    pub fn new(class: NumericClass) -> Self {
        Self { class, cpu: CpuOptions::default(), draft_context: false, debug: false }
    }
}

/// Neural engines that are to take part in prefill.
pub struct Engines<'a> {
    /// Which.
    pub backend: Arc<dyn NpuBackend>,
    /// In what.
    pub options: HybridOptions,
    /// Hears of each stage of the preparation how many of how many projections are done.
    pub progress: &'a mut dyn FnMut(Stage, usize, usize),
}

/// Why a forward pass was refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunnerError {
    /// The device cannot take the model.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A step failed. The sequences it held are gone.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// The `official` class turns index rows by a Hadamard transform, which exists for powers of two only.
    #[error("class official needs an `index_head_dim` that is a power of two; this model has {index_head_dim}")]
    IndexWidth {
        /// Width of an index row.
        index_head_dim: usize,
    },
    /// A token id the vocabulary does not have.
    #[error("token {token} is not in the vocabulary of {vocab_size}")]
    Token {
        /// The id.
        token: u32,
        /// Tokens of the model.
        vocab_size: usize,
    },
    /// The sequence would leave the model's context.
    #[error("{tokens} tokens do not fit the model's context of {max}")]
    ContextFull {
        /// Tokens the sequence would have.
        tokens: usize,
        /// The model's limit.
        max: usize,
    },
    /// A chunk without tokens, or a step without chunks.
    #[error("a step needs at least one token of every sequence it names")]
    Empty,
    /// A sequence that is not there, or named twice in one step.
    #[error("{0} is not a live sequence, or is named twice in one step")]
    Sequence(SequenceId),
    /// Rows of an earlier `Partial` chunk wait for [`Runner::commit`].
    #[error("{0} has rows that are neither accepted nor given up")]
    Uncommitted(SequenceId),
    /// The model has no drafter.
    #[error("no drafter: {reason}")]
    NoDrafter {
        /// Why.
        reason: &'static str,
    },
}

/// Which rows of a chunk want logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WantLogits {
    /// None.
    No,
    /// The last `n` rows, or all if there are fewer.
    Last(usize),
}

/// Tokens of one sequence for one step.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// Whose.
    pub sequence: SequenceId,
    /// The next tokens, at least one.
    pub tokens: &'a [u32],
    /// Rows whose logits are wanted.
    pub logits: WantLogits,
    /// Whether part of the rows may be given up later.
    pub acceptance: Acceptance,
}

/// A finished forward pass.
#[derive(Debug)]
pub struct Forward {
    run: StepRun,
    /// What it did.
    pub ledger: Ledger,
    /// Rows of the tiles that engines were given of each projection, rows of zeros included.
    pub tiled_rows: usize,
    /// When each node ran; empty unless [`Runner::keep_spans`] asked for it.
    pub spans: Vec<Span>,
    /// From submission to the last node.
    pub elapsed: Duration,
    vocab_size: usize,
    /// Logit rows of each chunk.
    logit_rows: Vec<usize>,
}

impl Forward {
    /// Logits of chunk `chunk`, `[rows, vocab_size]`.
    ///
    /// # Panics
    ///
    /// If there is no such chunk.
    pub fn logits(&self, chunk: usize) -> Vec<f32> {
        let rows = self.logit_rows[chunk];
        let Some(value) = self.run.graph().tap(Scope::Model, "logits") else { return Vec::new() };
        let first: usize = self.logit_rows[..chunk].iter().sum();
        self.run.read_f32(value)[first * self.vocab_size..][..rows * self.vocab_size].to_vec()
    }

    /// What was computed; spans name its nodes.
    pub fn graph(&self) -> &Arc<StepGraph> {
        self.run.graph()
    }

    /// A kept value, `[rows, cols]`; see [`RunnerOptions::debug`].
    pub fn tap(&self, scope: Scope, name: &'static str) -> Option<Vec<f32>> {
        Some(self.run.copy_f32(self.run.graph().tap(scope, name)?))
    }

    /// As [`Self::tap`], for integers.
    pub fn tap_i32(&self, scope: Scope, name: &'static str) -> Option<Vec<i32>> {
        Some(self.run.copy_i32(self.run.graph().tap(scope, name)?))
    }
}

/// Templates kept for reuse. With a drafter, decode steps are of many widths.
const MAX_TEMPLATES: usize = 32;

/// Runs forward passes on this machine's devices.
pub struct Runner {
    emitter: Emitter,
    options: RunnerOptions,
    executor: Executor,
    device: Arc<CpuDevice>,
    shape: StateShape,
    sequences: BTreeMap<SequenceId, Arc<SequenceState>>,
    next_sequence: u64,
    templates: Vec<((StepSignature, Lane), Arc<Template>)>,
    /// The drafter's blocks, by number of sequences, once they were asked for.
    draft_templates: BTreeMap<usize, Arc<Template>>,
    /// Chunks of the steps in flight.
    pending: BTreeMap<Ticket, Pending>,
    /// Sequences with a `Partial` chunk that is not yet committed, from its submission on.
    uncommitted: BTreeSet<SequenceId>,
    /// What was found out about projections when engines were prepared.
    records: Vec<Record>,
    /// The engines', if any were wished for.
    backend: Option<Arc<dyn NpuBackend>>,
}

#[derive(Debug)]
struct Pending {
    /// Sequence, rows, whether to commit them when the step is done. A step that drafts leaves no rows.
    chunks: Vec<(SequenceId, usize, Acceptance)>,
    logit_rows: Vec<usize>,
}

impl Runner {
    /// Loads a model onto the devices.
    ///
    /// # Errors
    ///
    /// If a device cannot be started or refuses the weights, or the model is of a shape that `class` cannot compute.
    pub fn new(
        config: ModelConfig,
        facts: ModelFacts,
        weights: &dyn WeightSource,
        options: RunnerOptions,
    ) -> Result<Self, RunnerError> {
        Self::with_engines(config, facts, weights, options, None)
    }

    /// As [`Self::new`], with neural engines that take part in prefill. What they cannot do, the primary device does:
    /// [`Self::feature`] says why.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn with_engines(
        config: ModelConfig,
        facts: ModelFacts,
        weights: &dyn WeightSource,
        options: RunnerOptions,
        engines: Option<Engines<'_>>,
    ) -> Result<Self, RunnerError> {
        let has_csa = (0..config.num_hidden_layers).any(|layer| config.layer_kind(layer) == LayerKind::Csa);
        if options.class == NumericClass::Official && has_csa && !config.index_head_dim.is_power_of_two() {
            return Err(RunnerError::IndexWidth { index_head_dim: config.index_head_dim });
        }
        if options.draft_context && facts.num_stages == 0 {
            return Err(RunnerError::NoDrafter { reason: "no mtp.* tensors" });
        }
        if options.draft_context && config.dspark.is_none() {
            return Err(RunnerError::NoDrafter { reason: "no dspark_* keys" });
        }
        let device = Arc::new(CpuDevice::start(options.cpu, options.class)?);
        device.load(weights)?;
        let shape = state_shape(&config, &facts, options.class, options.draft_context);
        let stack_inputs = engines.as_ref().is_some_and(|engines| engines.options.stack_inputs);
        let emitter = Emitter::new(config, facts).stacking_inputs(stack_inputs);
        let backend = engines.as_ref().map(|engines| Arc::clone(&engines.backend));
        let (executor, records) = start_executor(&device, &emitter, weights, options.class, engines);
        if let Some(counts) = backend.as_ref().and_then(|backend| backend.compile_counts()) {
            let CompileCounts { compiled, from_disk, damaged, not_kept, evicted, refused, .. } = counts;
            tracing::info!(compiled, from_disk, damaged, not_kept, evicted, refused, "programs of the engines");
        }
        Ok(Self {
            emitter,
            options,
            executor,
            records,
            backend,
            device,
            shape,
            sequences: BTreeMap::new(),
            next_sequence: 0,
            templates: Vec::new(),
            draft_templates: BTreeMap::new(),
            pending: BTreeMap::new(),
            uncommitted: BTreeSet::new(),
        })
    }

    /// The model.
    pub fn config(&self) -> &ModelConfig {
        self.emitter.config()
    }

    /// What the checkpoint said beyond its configuration.
    pub fn facts(&self) -> &ModelFacts {
        self.emitter.facts()
    }

    /// The primary device, for people.
    pub fn device_description(&self) -> &str {
        &self.device.capabilities().description
    }

    /// Whether neural engines really take part in prefill.
    pub fn feature(&self) -> FeatureState {
        self.executor.feature().state()
    }

    /// Takes note that engines were wished for and take no part.
    pub fn set_unavailable(&mut self, reason: String) {
        self.executor.set_unavailable(reason);
    }

    /// What was found out about each projection when engines were prepared; empty if none were wished for.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// What became of compilations, if what is compiled is kept on disk.
    pub fn compile_counts(&self) -> Option<CompileCounts> {
        self.backend.as_ref()?.compile_counts()
    }

    /// If engines are simulated, nanoseconds that each instance would have taken so far.
    pub fn simulated_ns(&self) -> Option<Vec<u64>> {
        self.backend.as_ref()?.simulated_ns()
    }

    /// The executor: its plan, its devices, what failed.
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Compares one in so many parts that engines compute with what they should be.
    pub fn check_engines_every(&mut self, parts: u64) {
        self.executor.check_every(parts);
    }

    /// Engines have nothing to do, since no step can hold a tile; `reason` says why.
    pub(crate) fn set_idle(&mut self, reason: &'static str) {
        self.executor.set_idle(reason);
    }

    /// Counts of all steps so far.
    pub fn totals(&self) -> &Ledger {
        self.executor.totals()
    }

    /// Starts an empty sequence.
    pub fn new_sequence(&mut self) -> SequenceId {
        self.adopt(SequenceState::new(&self.shape))
    }

    /// Starts a sequence from a snapshot.
    pub fn restore(&mut self, snapshot: &Snapshot) -> SequenceId {
        self.adopt(SequenceState::restore(&self.shape, snapshot))
    }

    fn adopt(&mut self, state: SequenceState) -> SequenceId {
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        self.sequences.insert(id, Arc::new(state));
        id
    }

    /// A copy of the sequence's state.
    ///
    /// # Errors
    ///
    /// If there is no such sequence.
    pub fn snapshot(&self, sequence: SequenceId) -> Result<Snapshot, RunnerError> {
        Ok(self.state(sequence)?.snapshot())
    }

    /// Committed tokens of a sequence.
    ///
    /// # Errors
    ///
    /// If there is no such sequence.
    pub fn num_computed_tokens(&self, sequence: SequenceId) -> Result<usize, RunnerError> {
        Ok(self.state(sequence)?.len())
    }

    /// Bytes of all sequences' states.
    pub fn state_bytes(&self) -> u64 {
        self.sequences.values().map(|state| state.bytes()).sum()
    }

    /// Forgets a sequence and frees its state. Unknown ids are ignored.
    pub fn drop_sequence(&mut self, sequence: SequenceId) {
        self.sequences.remove(&sequence);
        self.uncommitted.remove(&sequence);
    }

    fn state(&self, sequence: SequenceId) -> Result<&Arc<SequenceState>, RunnerError> {
        self.sequences.get(&sequence).ok_or(RunnerError::Sequence(sequence))
    }

    /// Runs one step and waits for it. Rows of `Whole` chunks are committed; of `Partial` ones the caller commits what it
    /// accepts.
    ///
    /// # Errors
    ///
    /// If a chunk is malformed (nothing has changed then) or the step failed.
    ///
    /// # Panics
    ///
    /// If other steps are in flight, whose results nobody would see: use [`Self::submit`] and [`Self::next_done`] then.
    pub fn forward(&mut self, chunks: &[Chunk<'_>]) -> Result<Forward, RunnerError> {
        assert!(self.pending.is_empty(), "`forward` needs an idle runner");
        // One token of each sequence is a decode step, as the scheduler has it.
        let decodes = chunks.iter().all(|chunk| chunk.tokens.len() == 1);
        self.submit(chunks, if decodes { Priority::Decode } else { Priority::Prefill })?;
        Ok(self.next_done()?.1)
    }

    /// Queues one step. A sequence may be in several steps in flight; they run in the order of submission.
    ///
    /// # Errors
    ///
    /// If a chunk is malformed; nothing has changed then.
    pub fn submit(&mut self, chunks: &[Chunk<'_>], priority: Priority) -> Result<Ticket, RunnerError> {
        let mut rows = StepRows::default();
        let mut states = Vec::with_capacity(chunks.len());
        let mut logit_rows = Vec::with_capacity(chunks.len());
        for (index, chunk) in chunks.iter().enumerate() {
            if chunks[..index].iter().any(|other| other.sequence == chunk.sequence) {
                return Err(RunnerError::Sequence(chunk.sequence));
            }
            if self.uncommitted.contains(&chunk.sequence) {
                return Err(RunnerError::Uncommitted(chunk.sequence));
            }
            let state = self.state(chunk.sequence)?;
            let position = state.len() + self.rows_in_flight(chunk.sequence);
            self.check_tokens(chunk.tokens, position)?;
            let (row, count) = (rows.tokens.len(), chunk.tokens.len());
            rows.tokens.extend(chunk.tokens.iter().map(|token| *token as i32));
            let (sequence, acceptance) = (chunk.sequence, chunk.acceptance);
            rows.segments.push(Segment { sequence, row, rows: count, position, acceptance });
            let wanted = match chunk.logits {
                WantLogits::No => 0,
                WantLogits::Last(n) => n.min(count),
            };
            rows.logit_rows.extend(row + count - wanted..row + count);
            logit_rows.push(wanted);
            states.push(Arc::clone(state));
        }
        if rows.tokens.is_empty() {
            return Err(RunnerError::Empty);
        }
        let lane = match priority {
            _ if chunks.iter().any(|chunk| chunk.acceptance == Acceptance::Partial) => Lane::Verify,
            Priority::Decode => Lane::Decode,
            Priority::Prefill => Lane::Prefill,
        };
        let template = self.template(&rows, lane);
        let partial = chunks.iter().filter(|chunk| chunk.acceptance == Acceptance::Partial);
        self.uncommitted.extend(partial.map(|chunk| chunk.sequence));
        let chunks = chunks.iter().map(|c| (c.sequence, c.tokens.len(), c.acceptance)).collect();
        let ticket = self.executor.submit(Step { template, rows, states, priority })?;
        self.pending.insert(ticket, Pending { chunks, logit_rows });
        Ok(ticket)
    }

    /// Waits for any step in flight.
    ///
    /// # Errors
    ///
    /// If a step failed. Its sequences are dropped, since their state is no longer to be trusted.
    pub fn next_done(&mut self) -> Result<(Ticket, Forward), RunnerError> {
        let finished = self.executor.next_done();
        self.finish(finished)
    }

    /// As [`Self::next_done`], but gives up at `until`.
    ///
    /// # Errors
    ///
    /// If a step failed. Its sequences are dropped, since their state is no longer to be trusted.
    pub fn next_done_until(&mut self, until: Instant) -> Result<Option<(Ticket, Forward)>, RunnerError> {
        match self.executor.next_done_until(until).transpose() {
            Some(finished) => self.finish(finished).map(Some),
            None => Ok(None),
        }
    }

    fn finish(&mut self, finished: Result<FinishedStep, ExecutorError>) -> Result<(Ticket, Forward), RunnerError> {
        let finished = match finished {
            Ok(finished) => finished,
            Err(error) => {
                if let ExecutorError::Node { step, .. } = &error
                    && let Some(pending) = self.pending.remove(&Ticket(*step))
                {
                    pending.chunks.iter().for_each(|(sequence, ..)| self.drop_sequence(*sequence));
                }
                return Err(error.into());
            }
        };
        let pending = self.pending.remove(&finished.ticket).expect("every step in flight is noted");
        for (sequence, rows, acceptance) in &pending.chunks {
            // The sequence may have been dropped meanwhile.
            if let (1.., Acceptance::Whole, Some(state)) = (*rows, acceptance, self.sequences.get(sequence)) {
                state.commit(*rows);
            }
        }
        let forward = Forward {
            run: finished.run,
            ledger: finished.ledger,
            tiled_rows: finished.tiled_rows,
            spans: finished.spans,
            elapsed: finished.elapsed,
            vocab_size: self.config().vocab_size,
            logit_rows: pending.logit_rows,
        };
        Ok((finished.ticket, forward))
    }

    /// Keeps the first `rows` staged rows of a sequence's `Partial` chunk and takes the others back.
    ///
    /// # Errors
    ///
    /// If there is no such sequence.
    ///
    /// # Panics
    ///
    /// If its step is still in flight, or staged fewer rows.
    pub fn commit(&mut self, sequence: SequenceId, rows: usize) -> Result<(), RunnerError> {
        assert_eq!(self.rows_in_flight(sequence), 0, "{sequence} is in a step in flight");
        let state = self.state(sequence)?;
        state.commit(rows);
        state.roll_back();
        self.uncommitted.remove(&sequence);
        Ok(())
    }

    /// From now on, steps say when each of their nodes ran, or no longer do.
    pub fn keep_spans(&mut self, keep: bool) {
        self.executor.keep_spans(keep);
    }

    /// Takes back the memory of a pass that nobody reads any more.
    pub fn recycle(&self, forward: Forward) {
        self.executor.recycle(forward.run);
    }

    fn check_tokens(&self, tokens: &[u32], position: usize) -> Result<(), RunnerError> {
        let config = self.config();
        if tokens.is_empty() {
            return Err(RunnerError::Empty);
        }
        if let Some(token) = tokens.iter().copied().find(|token| *token as usize >= config.vocab_size) {
            return Err(RunnerError::Token { token, vocab_size: config.vocab_size });
        }
        let (tokens, max) = (position + tokens.len(), config.max_position_embeddings);
        if tokens > max { Err(RunnerError::ContextFull { tokens, max }) } else { Ok(()) }
    }

    fn rows_in_flight(&self, sequence: SequenceId) -> usize {
        let chunks = self.pending.values().flat_map(|pending| &pending.chunks);
        chunks.filter(|(other, ..)| *other == sequence).map(|(_, rows, _)| rows).sum()
    }

    fn template(&mut self, rows: &StepRows, lane: Lane) -> Arc<Template> {
        let signature = StepSignature {
            rows: rows.num_rows(),
            logit_rows: rows.logit_rows.len(),
            // Debugging looks at scores even where there is no choice.
            select: self.options.debug || self.emitter.needs_selection(rows.max_context()),
            class: self.options.class,
            draft_context: self.options.draft_context,
            debug_blocks: self.options.debug.then(|| rows.max_context() / 4),
        };
        let key = (signature, lane);
        if let Some(index) = self.templates.iter().position(|(other, _)| *other == key) {
            // The one used last is at the end.
            self.templates[index..].rotate_left(1);
        } else {
            if self.templates.len() == MAX_TEMPLATES {
                self.templates.remove(0);
            }
            self.templates.push((key, self.executor.template(self.emitter.trunk(&signature), lane)));
        }
        Arc::clone(&self.templates.last().expect("found or pushed").1)
    }

    /// Name of the arithmetic of prompts: the class of the primary device, and the plan's digest if engines take part.
    pub fn numeric_class(&self) -> String {
        match self.executor.plan().digest() {
            "" => self.options.class.to_string(),
            digest => format!("{}+hybrid:{digest}", self.options.class),
        }
    }
}

impl StepRunner for Runner {
    fn state_shape(&self) -> &StateShape {
        &self.shape
    }

    fn arithmetic(&self) -> String {
        format!("{} {} {REVISION}", self.numeric_class(), self.options.cpu.level.arithmetic())
    }

    fn tile(&self) -> Option<usize> {
        let plan = self.executor.plan();
        (!plan.is_primary()).then(|| plan.tile())
    }

    fn repeats_rows(&self) -> bool {
        self.executor.plan().repeats_rows()
    }

    fn note_narrowed(&mut self, rule: Rule, after_hit: bool) {
        let because = match rule {
            Rule::MaxItl => Some(Fallback::Contention),
            Rule::Memory | Rule::UserLimit => Some(Fallback::Throttle),
            Rule::Alignment => after_hit.then_some(Fallback::SuffixAfterHit),
            Rule::Remaining => None,
        };
        self.executor.note_narrowed(rule.name(), because);
    }

    fn engine_bytes(&self) -> (u64, u64) {
        let bytes = self.executor.engine_bytes();
        (bytes.total(), bytes.banks)
    }

    fn shed(&mut self) -> Option<u64> {
        self.executor.shed()
    }

    fn reload(&mut self) -> Option<u64> {
        self.executor.reload()
    }

    fn take_reloaded(&mut self) -> Option<bool> {
        self.executor.take_reloaded()
    }

    fn release_buffers(&self) {
        self.executor.release_buffers();
    }

    fn take_quarantine(&mut self) -> Option<String> {
        self.executor.take_quarantine()
    }

    fn packing(&self) -> Packing {
        match self.options.class {
            NumericClass::Official => Packing::Official { rotary: self.config().qk_rope_head_dim },
            NumericClass::Exact | NumericClass::Fast | NumericClass::FastFp8Exact => Packing::Floats,
        }
    }

    fn step_bytes(&self, rows: usize, logit_rows: usize) -> u64 {
        step_bytes(&self.emitter, self.options.class, self.options.draft_context, rows, logit_rows)
    }

    fn block_of_drafts(&self) -> usize {
        Self::block_of_drafts(self)
    }

    fn draft_bytes(&self, sequences: usize) -> u64 {
        draft_bytes(&self.emitter, self.options.class, sequences)
    }

    fn submit_draft(&mut self, newest: &[(SequenceId, u32)]) -> Result<Ticket, RunnerError> {
        Self::submit_draft(self, newest)
    }

    fn commit(&mut self, sequence: SequenceId, rows: usize) -> Result<(), RunnerError> {
        Self::commit(self, sequence, rows)
    }

    fn node_totals(&self, totals: &mut Vec<NodeTotals>) {
        totals.clear();
        totals.extend(self.totals().entries().map(|(kind, device, entry)| NodeTotals {
            device: device.0,
            kind: kind.name(),
            submitted: entry.submitted,
            completed: entry.completed,
            failed: entry.failed,
            busy_us: entry.busy_ns / 1000,
        }));
    }

    fn report_hybrid(&self, status: &mut Option<HybridStatus>) {
        match status {
            Some(status) => status.refresh(self),
            None => *status = HybridStatus::of(self),
        }
    }

    fn new_sequence(&mut self) -> SequenceId {
        Self::new_sequence(self)
    }

    fn adopt(&mut self, state: SequenceState) -> SequenceId {
        Self::adopt(self, state)
    }

    fn sequence_state(&self, sequence: SequenceId) -> Result<Arc<SequenceState>, RunnerError> {
        self.state(sequence).cloned()
    }

    fn drop_sequence(&mut self, sequence: SequenceId) {
        Self::drop_sequence(self, sequence);
    }

    fn submit(&mut self, chunks: &[Chunk<'_>], priority: Priority) -> Result<Ticket, RunnerError> {
        Self::submit(self, chunks, priority)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<StepResult>, RunnerError> {
        let done = match timeout {
            Some(timeout) => self.next_done_until(Instant::now() + timeout)?,
            None => Some(self.next_done()?),
        };
        Ok(done.map(|(ticket, forward)| {
            let logits = (0..forward.logit_rows.len()).map(|chunk| forward.logits(chunk)).collect();
            let drafts = self.drafts(&forward);
            let elapsed_us = forward.elapsed.as_micros() as u64;
            // The head takes as long for a short chunk as for a long one, which is no measure of the others.
            let of_primary =
                |(kind, device, _): &(Kind, DeviceId, _)| *device == DeviceId::PRIMARY && *kind != Kind::Head;
            let nodes = forward.ledger.entries().filter(of_primary).map(|(.., entry)| entry.longest_ns);
            let longest_node_us = nodes.max().unwrap_or(0) / 1000;
            let (ledger, tiled_rows) = (forward.ledger.of_engines(), forward.tiled_rows);
            self.recycle(forward);
            StepResult { ticket, logits, drafts, elapsed_us, longest_node_us, ledger, tiled_rows }
        }))
    }
}

/// What engines would do, without touching a weight.
pub fn plan_engines(
    config: ModelConfig,
    facts: ModelFacts,
    weights: &dyn WeightSource,
    backend: &dyn NpuBackend,
    options: &HybridOptions,
) -> Vec<Record> {
    let emitter = Emitter::new(config, facts).stacking_inputs(options.stack_inputs);
    let graph = tile_graph(&emitter, NumericClass::Fast, options.tile);
    dry_run(&graph, weights, backend, options)
}

/// A prefill step of one tile with every projection there is.
pub(crate) fn tile_graph(emitter: &Emitter, class: NumericClass, tile: usize) -> StepGraph {
    let (rows, debug_blocks) = (tile.max(1), None);
    emitter.trunk(&StepSignature { rows, logit_rows: 0, select: true, class, draft_context: false, debug_blocks })
}

/// The executor of the primary device and of what engines there are.
fn start_executor(
    primary: &Arc<CpuDevice>,
    emitter: &Emitter,
    weights: &dyn WeightSource,
    class: NumericClass,
    engines: Option<Engines<'_>>,
) -> (Executor, Vec<Record>) {
    let pack = |tensor: &StoredTensor| primary.pack_channels(tensor);
    let primary: Arc<dyn Device> = Arc::clone(primary) as Arc<dyn Device>;
    let Some(Engines { backend, options, progress }) = engines else {
        return (Executor::new(vec![primary], Plan::primary()), Vec::new());
    };
    let graph = tile_graph(emitter, class, options.tile);
    let Prepared { devices, plan, records, banks, unavailable } =
        prepare(&graph, weights, class, &backend, &options, &pack, progress);
    let engines = devices.into_iter().map(|device| device as Arc<dyn Device>);
    let (tile, digest, projections) = (plan.tile(), plan.digest().to_owned(), plan.projections().len());
    let mut executor = Executor::new(std::iter::once(primary).chain(engines).collect(), plan);
    executor.set_banks(banks);
    let EngineBytes { weights, banks, surfaces } = executor.engine_bytes();
    match unavailable {
        Some(reason) => {
            tracing::warn!(reason, "engines take no part");
            executor.set_unavailable(reason);
        }
        None => {
            tracing::info!(tile, digest, projections, weights, banks, surfaces, "engines take part in prefill");
            if backend.simulated_ns().is_some() {
                tracing::warn!("the engines are simulated: no time of theirs is measured");
            }
        }
    }
    (executor, records)
}

/// Bytes of the values of a step of `rows` rows, of which `logit_rows` want logits.
pub(crate) fn step_bytes(
    emitter: &Emitter,
    class: NumericClass,
    draft_context: bool,
    rows: usize,
    logit_rows: usize,
) -> u64 {
    let signature = StepSignature { rows, logit_rows, select: true, class, draft_context, debug_blocks: None };
    emitter.trunk(&signature).memory().peak_bytes()
}

/// What each layer keeps per sequence (model spec 11.1), and each stage of the drafter if its context is computed.
pub(crate) fn state_shape(
    config: &ModelConfig,
    facts: &ModelFacts,
    class: NumericClass,
    draft_context: bool,
) -> StateShape {
    let window_only =
        LayerShape { head_dim: config.head_dim, window: config.sliding_window, compressed: None, index: None };
    let pool = |ratio, dim, overlap| Some(PoolShape { ratio, dim, overlap });
    let trunk = (0..config.num_hidden_layers).map(|layer| {
        let shape = match config.layer_kind(layer) {
            LayerKind::Swa => window_only,
            LayerKind::Csa => LayerShape {
                compressed: pool(4, config.head_dim, true),
                index: pool(4, config.index_head_dim, true),
                ..window_only
            },
            LayerKind::Hca { ratio } => LayerShape { compressed: pool(ratio, config.head_dim, false), ..window_only },
        };
        (Scope::Layer(layer as u16), shape)
    });
    let stages = if draft_context { facts.num_stages } else { 0 };
    let stages = (0..stages).map(|stage| (Scope::Stage(stage as u16), window_only));
    StateShape { layers: trunk.chain(stages).collect(), rounded: class.rounds_rows() }
}
