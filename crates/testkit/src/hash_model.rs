//! A model that computes nothing: its rows are hashes, and its next token hashes the rows it read back.
//!
//! The state is the real one, blocks, boundaries and all, so a row that is missing, stale or somebody else's changes the
//! tokens. Steps take time on a virtual clock, and fail when told to. Its drafter knows the right tokens and says wrong ones.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use troika_base::{SequenceId, StepId};
use troika_device::state::{LayerShape, LayerState, Pool, PoolShape};
use troika_device::{SequenceState, StateShape};
use troika_engine::{Chunk, Ledger, Proposal, RunnerError, StepResult, StepRunner, WantLogits};
use troika_graph::{Acceptance, Scope};
use troika_runtime::{ExecutorError, Priority, Ticket};

use crate::mix;

/// Tokens of the model.
pub const VOCAB_SIZE: usize = 64;
const WINDOW: usize = 24;
/// Compressed rows that a token looks at.
const NUM_READ: u64 = 6;

/// Which kinds of state the model has; one variant each, and all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kinds {
    /// Window rows only.
    Window,
    /// Rows of 4 tokens with an overlap lane, and index rows that choose among them.
    Index,
    /// Rows of 128 tokens.
    Compressed,
    /// Rows of 128 tokens with an overlap lane, and no window to speak of: what has to be carried across is all there is.
    Boundary,
    /// Everything.
    All,
}

impl Kinds {
    /// What such a model keeps.
    pub fn shape(self) -> StateShape {
        let pool = |ratio, overlap| Some(PoolShape { ratio, dim: 2, overlap });
        let window = LayerShape { head_dim: 2, window: WINDOW, compressed: None, index: None };
        let index = LayerShape { compressed: pool(4, true), index: pool(4, true), ..window };
        let compressed = LayerShape { compressed: pool(128, false), ..window };
        let boundary = LayerShape { window: 1, compressed: pool(128, true), ..window };
        let layers = match self {
            Self::Window => vec![window],
            Self::Index => vec![index, index],
            Self::Compressed => vec![compressed],
            Self::Boundary => vec![boundary],
            Self::All => vec![window, index, compressed],
        };
        let layers = layers.into_iter().enumerate().map(|(i, l)| (Scope::Layer(i as u16), l)).collect();
        StateShape { layers, rounded: false }
    }
}

/// A mistake in the plumbing, planted to see whether the simulation finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A sequence that resumes starts with an empty window.
    WindowNotRestored,
    /// A sequence that resumes lacks the overlap lane.
    LaneNotRestored,
    /// A new sequence gets the memory of one that is gone, uncleared.
    RecycledUncleared,
    /// The store does not compare the checksum of a payload.
    PayloadUnchecked,
    /// The store reads another block's file.
    NamesConfused,
    /// Blocks of other weights have the same names.
    WeightsNotNamed,
    /// Rows of drafts that did not hold stay where they are.
    DraftsNotTakenBack,
}

/// A drafter that knows the right tokens.
#[derive(Clone, Copy, Debug)]
pub struct Drafter {
    /// Tokens that it proposes at once.
    pub block: usize,
    /// From one in so many places on, its tokens are wrong.
    pub wrong_one_in: u64,
    /// It is not sure of one in so many.
    pub unsure_one_in: u64,
}

/// Steps of hashes on a virtual clock.
pub struct HashModel {
    shape: StateShape,
    /// Other weights, other tokens.
    weights: u64,
    bug: Option<Bug>,
    drafter: Option<Drafter>,
    sequences: BTreeMap<SequenceId, Arc<SequenceState>>,
    dropped: Vec<Arc<SequenceState>>,
    in_flight: Vec<Running>,
    next: u64,
    /// Microseconds.
    pub now_us: u64,
    /// Steps until one fails.
    pub fails_in: Option<u32>,
    /// Steps until what was computed so far is said to be wrong.
    pub doubted_in: Option<u32>,
    /// Tokens computed.
    pub num_rows: u64,
    /// How often that was said.
    pub num_doubts: u64,
}

struct Running {
    ticket: Ticket,
    priority: Priority,
    done_us: u64,
    took_us: u64,
    chunks: Vec<(SequenceId, usize, Acceptance)>,
    logits: Vec<Vec<f32>>,
    drafts: Vec<Vec<Proposal>>,
    fails: bool,
}

impl HashModel {
    /// A model at time 0.
    pub fn new(kinds: Kinds, weights: u64, bug: Option<Bug>, drafter: Option<Drafter>) -> Self {
        Self {
            shape: kinds.shape(),
            weights,
            bug,
            drafter,
            sequences: BTreeMap::new(),
            dropped: Vec::new(),
            in_flight: Vec::new(),
            next: 0,
            now_us: 0,
            fails_in: None,
            doubted_in: None,
            num_rows: 0,
            num_doubts: 0,
        }
    }

    fn rows_in_flight(&self, sequence: SequenceId) -> usize {
        let chunks = self.in_flight.iter().flat_map(|step| &step.chunks);
        chunks.filter(|(other, ..)| *other == sequence).map(|(_, rows, _)| rows).sum()
    }

    /// What follows `token` in a sequence, as far as the drafter knows or says.
    fn proposals(&self, drafter: Drafter, state: &SequenceState, token: u32) -> Vec<Proposal> {
        let (start, mut token, mut is_right) = (state.len(), token, true);
        let proposals = (0..drafter.block).map(|place| {
            let hash = compute(state, self.weights, start + place, token);
            is_right &= !mix(hash ^ 3).is_multiple_of(drafter.wrong_one_in);
            token = (hash.wrapping_add(u64::from(!is_right)) % VOCAB_SIZE as u64) as u32;
            let is_sure = !mix(hash ^ 4).is_multiple_of(drafter.unsure_one_in);
            Proposal { token, confidence: if is_sure { 3.0 } else { -3.0 } }
        });
        let proposals = proposals.collect();
        state.roll_back();
        proposals
    }

    fn start(
        &mut self,
        priority: Priority,
        took_us: u64,
        chunks: Vec<(SequenceId, usize, Acceptance)>,
        logits: Vec<Vec<f32>>,
        drafts: Vec<Vec<Proposal>>,
    ) -> Ticket {
        if priority == Priority::Decode {
            self.in_flight.iter_mut().for_each(|step| step.done_us += took_us);
        }
        let fails = self.fails_in == Some(0);
        self.fails_in = self.fails_in.map(|left| left.saturating_sub(1)).filter(|_| !fails);
        let ticket = Ticket(StepId(self.next));
        self.next += 1;
        // Steps of one sequence are done in order, those of others whenever they are.
        let shares = |step: &&Running| step.chunks.iter().any(|(id, ..)| chunks.iter().any(|(other, ..)| other == id));
        let before = self.in_flight.iter().filter(shares).map(|step| step.done_us).max();
        let done_us = before.unwrap_or(self.now_us) + took_us;
        self.in_flight.push(Running { ticket, priority, done_us, took_us, chunks, logits, drafts, fails });
        ticket
    }

    /// Sequences with state.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// What `prompt` is followed by if it is alone in the world.
    pub fn expected(kinds: Kinds, weights: u64, prompt: &[u32], max_new_tokens: usize) -> Vec<u32> {
        let state = SequenceState::new(&kinds.shape());
        let mut next = 0;
        for (position, token) in prompt.iter().enumerate() {
            next = compute(&state, weights, position, *token);
        }
        state.commit(prompt.len());
        let mut answer = Vec::new();
        while answer.len() < max_new_tokens {
            let token = (next % VOCAB_SIZE as u64) as u32;
            answer.push(token);
            next = compute(&state, weights, prompt.len() + answer.len() - 1, token);
            state.commit(1);
        }
        answer
    }
}

impl StepRunner for HashModel {
    fn state_shape(&self) -> &StateShape {
        &self.shape
    }

    fn arithmetic(&self) -> String {
        "hash".to_owned()
    }

    fn step_bytes(&self, _rows: usize, _logit_rows: usize) -> u64 {
        0
    }

    fn take_quarantine(&mut self) -> Option<String> {
        self.doubted_in.take_if(|left| *left == 0)?;
        self.num_doubts += 1;
        Some("told to doubt".to_owned())
    }

    fn new_sequence(&mut self) -> SequenceId {
        if self.bug == Some(Bug::RecycledUncleared)
            && let Some(state) = self.dropped.pop()
        {
            // Only the count is cleared: rows of the last owner stay in windows and tails.
            let old = SequenceState::new(&self.shape);
            for scope in self.shape.layers.keys() {
                *old.layer(*scope) = state.layer(*scope).clone();
            }
            return self.adopt(old);
        }
        self.adopt(SequenceState::new(&self.shape))
    }

    fn adopt(&mut self, state: SequenceState) -> SequenceId {
        for scope in self.shape.layers.keys() {
            let layer = &mut *state.layer(*scope);
            let len = state.len();
            if self.bug == Some(Bug::WindowNotRestored) && len > 0 {
                let first = layer.window.first();
                layer.window.append(first, &vec![0.0; (len - first) * 2]);
            }
            if self.bug == Some(Bug::LaneNotRestored) && len > 0 {
                pools(layer).for_each(|pool| pool.trim(len + 4));
            }
        }
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.insert(id, Arc::new(state));
        id
    }

    fn sequence_state(&self, sequence: SequenceId) -> Result<Arc<SequenceState>, RunnerError> {
        self.sequences.get(&sequence).cloned().ok_or(RunnerError::Sequence(sequence))
    }

    fn drop_sequence(&mut self, sequence: SequenceId) {
        if let Some(state) = self.sequences.remove(&sequence) {
            self.dropped.truncate(3);
            self.dropped.push(state);
        }
    }

    fn submit(&mut self, chunks: &[Chunk<'_>], priority: Priority) -> Result<Ticket, RunnerError> {
        let mut logits = Vec::new();
        let mut parts = Vec::new();
        let mut rows = 0;
        for chunk in chunks {
            let state = self.sequence_state(chunk.sequence)?;
            let start = state.len() + self.rows_in_flight(chunk.sequence);
            let wanted = match chunk.logits {
                WantLogits::No => 0,
                WantLogits::Last(last) => last.min(chunk.tokens.len()),
            };
            let mut of_chunk = vec![0.0; wanted * VOCAB_SIZE];
            for (index, token) in chunk.tokens.iter().enumerate() {
                let next = compute(&state, self.weights, start + index, *token) % VOCAB_SIZE as u64;
                if let Some(row) = (index + wanted).checked_sub(chunk.tokens.len()) {
                    of_chunk[row * VOCAB_SIZE + next as usize] = 1.0;
                }
            }
            let end = start + chunk.tokens.len();
            for scope in self.shape.layers.keys().filter(|_| chunk.acceptance == Acceptance::Whole) {
                pools(&mut state.layer(*scope)).for_each(|pool| pool.trim(end));
            }
            logits.push(of_chunk);
            parts.push((chunk.sequence, chunk.tokens.len(), chunk.acceptance));
            rows += chunk.tokens.len();
        }
        self.num_rows += rows as u64;
        Ok(self.start(priority, 1000 + 20 * rows as u64, parts, logits, Vec::new()))
    }

    fn block_of_drafts(&self) -> usize {
        self.drafter.map_or(0, |drafter| drafter.block)
    }

    fn submit_draft(&mut self, newest: &[(SequenceId, u32)]) -> Result<Ticket, RunnerError> {
        let drafter = self.drafter.ok_or(RunnerError::NoDrafter { reason: "the world has none" })?;
        let (mut parts, mut drafts) = (Vec::new(), Vec::new());
        for (sequence, token) in newest {
            let state = self.sequence_state(*sequence)?;
            assert_eq!(self.rows_in_flight(*sequence), 0, "{sequence} is in a step in flight");
            drafts.push(self.proposals(drafter, &state, *token));
            parts.push((*sequence, 0, Acceptance::Whole));
        }
        let took_us = 200 + 10 * (newest.len() * drafter.block) as u64;
        Ok(self.start(Priority::Decode, took_us, parts, Vec::new(), drafts))
    }

    fn commit(&mut self, sequence: SequenceId, rows: usize) -> Result<(), RunnerError> {
        let state = self.sequence_state(sequence)?;
        state.commit(rows);
        if self.bug != Some(Bug::DraftsNotTakenBack) {
            state.roll_back();
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<StepResult>, RunnerError> {
        let first = (0..self.in_flight.len()).min_by_key(|i| (self.in_flight[*i].done_us, self.in_flight[*i].priority));
        let Some(first) = first else { return Err(ExecutorError::Idle.into()) };
        if let Some(timeout) = timeout {
            let until = self.now_us + timeout.as_micros() as u64;
            if until < self.in_flight[first].done_us {
                self.now_us = until;
                return Ok(None);
            }
        }
        let step = self.in_flight.remove(first);
        self.now_us = self.now_us.max(step.done_us);
        self.doubted_in = self.doubted_in.map(|left| left.saturating_sub(1));
        if step.fails {
            step.chunks.iter().for_each(|(sequence, ..)| self.drop_sequence(*sequence));
            // Whatever builds on it fails with it, at once.
            let mut lost: Vec<SequenceId> = step.chunks.iter().map(|(sequence, ..)| *sequence).collect();
            self.in_flight.sort_by_key(|other| other.ticket);
            for other in self.in_flight.iter_mut().filter(|other| other.ticket > step.ticket) {
                if other.chunks.iter().any(|(sequence, ..)| lost.contains(sequence)) {
                    lost.extend(other.chunks.iter().map(|(sequence, ..)| *sequence));
                    (other.fails, other.done_us) = (true, self.now_us);
                }
            }
            return Err(ExecutorError::Node { step: step.ticket.0, reason: "told to fail".to_owned() }.into());
        }
        for (sequence, rows, acceptance) in &step.chunks {
            // A later step of it may have failed.
            if let (Acceptance::Whole, Some(state)) = (acceptance, self.sequences.get(sequence)) {
                state.commit(*rows);
            }
        }
        let (elapsed_us, longest_node_us) = (step.took_us, step.took_us / 10);
        Ok(Some(StepResult {
            ticket: step.ticket,
            logits: step.logits,
            drafts: step.drafts,
            elapsed_us,
            longest_node_us,
            ledger: Ledger::default(),
            tiled_rows: 0,
        }))
    }
}

fn pools(layer: &mut LayerState) -> impl Iterator<Item = &mut Pool> {
    [&mut layer.compressed, &mut layer.index].into_iter().flatten()
}

/// Appends the rows of one token and returns the hash of everything it saw.
fn compute(state: &SequenceState, weights: u64, position: usize, token: u32) -> u64 {
    let mut hidden = mix(weights ^ (u64::from(token) << 32 | position as u64));
    for layer in 0.. {
        if layer == usize::from(u16::MAX) || !state.has_layer(Scope::Layer(layer as u16)) {
            return hidden;
        }
        let layer = &mut *state.layer(Scope::Layer(layer as u16));
        layer.window.append(position, &row_of(hidden));
        for pool in pools(layer) {
            let (kv, gate) = (row_of(hidden ^ 1), row_of(hidden ^ 2));
            let lanes = pool.width() / 2;
            pool.append(&kv.repeat(lanes), &gate.repeat(lanes));
            if (position + 1).is_multiple_of(pool.ratio()) {
                let row = finish_row(pool, position + 1);
                pool.rows.push(&row);
            }
        }
        let window = layer.window.capacity();
        for seen in (position + 1).saturating_sub(window)..=position {
            let seen = seen.max(layer.window.first());
            hidden = fold(hidden, layer.window.rows(seen..seen + 1));
        }
        for pool in pools(layer) {
            let visible = (position + 1) / pool.ratio();
            for read in 0..NUM_READ.min(visible as u64) {
                let chosen = mix(hidden ^ read) as usize % visible;
                hidden = fold(hidden, pool.rows.row(chosen));
            }
        }
        hidden = mix(hidden);
    }
    hidden
}

/// The row of the block that ends at `end`: of its tokens, and of the block before if there is an overlap.
fn finish_row(pool: &Pool, end: usize) -> [f32; 2] {
    let ratio = pool.ratio();
    let first = end.saturating_sub(if pool.width() > 2 { 2 * ratio } else { ratio });
    let mut hash = 7;
    for position in first..end {
        if let Some((kv, gate)) = pool.token(position) {
            hash = fold(fold(hash, &kv[..2]), &gate[..2]);
        }
    }
    row_of(hash)
}

/// 48 bits of a hash as two floats that hold them exactly.
fn row_of(hash: u64) -> [f32; 2] {
    [(hash & 0xff_ffff) as f32, (hash >> 24 & 0xff_ffff) as f32]
}

fn fold(hash: u64, row: &[f32]) -> u64 {
    row.iter().fold(hash, |hash, x| mix(hash ^ u64::from(x.to_bits())))
}
