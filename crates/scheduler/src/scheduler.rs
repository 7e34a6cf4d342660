//! The scheduler: queues, admission, and what goes into the next step.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

use troika_base::RequestId;

use crate::geometry::Geometry;
use crate::pace::Pace;
use crate::{Narrowing, Rule};

/// A sequence with prompt left that was not in so many prefill steps in a row goes into the next, whatever its length.
pub const MAX_PASSED_OVER: u32 = 4;

/// How often a step may be halved for want of memory.
pub const NARROWINGS: usize = 4;

/// Which kind of step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// The newest token of each sequence, and what may have been drafted to follow it.
    Decode,
    /// Chunks of known tokens.
    Prefill,
}

/// How much a request matters; higher ones go first and are preempted last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Urgency {
    Low,
    #[default]
    Normal,
    High,
}

/// Bytes of state that a sequence of so many tokens holds at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCost {
    /// Windows, pending tokens: whatever the length.
    pub fixed_bytes: u64,
    /// Append-only rows of a block.
    pub bytes_per_block: u64,
}

impl StateCost {
    /// Bytes that a sequence of `tokens` tokens holds at most.
    pub fn bytes_of(&self, tokens: usize, block_tokens: usize) -> u64 {
        let blocks = tokens.div_ceil(block_tokens) as u64;
        self.fixed_bytes.saturating_add(blocks.saturating_mul(self.bytes_per_block))
    }
}

/// What the scheduler must keep to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub geometry: Geometry,
    /// Prompt tokens of one prefill step, all sequences together; at least the geometry's step.
    pub budget_tokens: usize,
    /// Prefill steps in flight at once, at least one.
    pub wavefront: usize,
    /// Sequences with state at once.
    pub max_running: usize,
    /// Sequences that may wait.
    pub max_queued: usize,
    /// Longest gap between the tokens of a running stream while prompts are computed, microseconds.
    pub max_itl_us: u64,
    /// Bytes for the state of all sequences; activations are not part of it.
    pub state_bytes: u64,
    /// Bytes that others give up before steps are narrowed or state is taken back, see [`Scheduler::bytes_short`].
    pub reserve_bytes: u64,
    /// Bytes of activations that are free for state if steps are half as wide, a quarter, and so on: all together, ascending.
    pub narrowing_frees: [u64; NARROWINGS],
    pub state_cost: StateCost,
    /// Prefill and decode steps are of two numeric classes, so that it matters which of them computes a token: the last token
    /// of a prompt is left to the decode lane (hybrid spec 10.3), and what was decoded once is decoded again after a
    /// preemption. With one class the last token goes with the last chunk where that has room, which saves a step.
    pub two_classes: bool,
}

impl Limits {
    /// Most bytes that there can be for state: with the reserve, and beside the narrowest steps.
    pub fn most_state_bytes(&self) -> u64 {
        let frees = self.narrowing_frees[NARROWINGS - 1];
        self.state_bytes.saturating_add(self.reserve_bytes).saturating_add(frees)
    }
}

/// A sequence that comes in.
#[derive(Clone, Copy, Debug)]
pub struct NewSequence {
    /// Tokens known, at least one.
    pub tokens: usize,
    pub urgency: Urgency,
    /// When it is given up, whether it has started or not.
    pub deadline_us: Option<u64>,
}

/// Why a sequence is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    QueueFull {
        queued: usize,
        limit: usize,
    },
    /// Even alone it would not fit the memory.
    NeverFits {
        need_bytes: u64,
        limit_bytes: u64,
    },
}

/// What a sequence gets of a prefill step, and why not more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkRecord {
    /// Position of its first token.
    pub start: usize,
    pub width: usize,
    pub narrowed_by: Vec<Narrowing>,
}

/// A sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub request: RequestId,
    pub chunk: ChunkRecord,
    /// Drafts that may be verified with it, in the decode lane.
    pub drafts: usize,
}

/// One step to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// What the step is called until it is done.
    pub number: u64,
    /// Nothing to do if empty.
    pub parts: Vec<Part>,
    /// Sequences that must give their state back first; they are recomputed later.
    pub preempted: Vec<RequestId>,
    /// Sequences that have outgrown the memory, even if they were alone. They are forgotten.
    pub exhausted: Vec<RequestId>,
}

#[derive(Clone, Debug)]
struct Entry {
    /// Order of arrival.
    arrival: u64,
    urgency: Urgency,
    deadline_us: Option<u64>,
    /// Tokens known.
    tokens: usize,
    /// Tokens from this one on are computed in the decode lane, one at a time.
    decoded_from: usize,
    /// Leading tokens whose KV exists.
    computed: usize,
    /// Has state, or is about to get it.
    admitted: bool,
    /// Has state. One that is admitted and not attached waits for what is kept of its prefix.
    attached: bool,
    /// Was admitted before.
    started: bool,
    /// Its steps in flight, oldest first, and its tokens in each.
    in_flight: VecDeque<(u64, usize)>,
    /// Drafts that are welcome in its next decode step.
    wanted_drafts: usize,
    /// Drafts that may be in its step in flight, and have room.
    drafts: usize,
    paused: bool,
    /// Loses its state once none of its steps is in flight, to be computed again.
    restarts: bool,
    /// Ended, or lost its state, while a step of it was in flight.
    ended: bool,
    passed_over: u32,
}

impl Entry {
    fn remaining(&self) -> usize {
        self.tokens - self.computed
    }

    /// Leading tokens that are computed or being computed.
    fn scheduled(&self) -> usize {
        self.computed + self.in_flight.iter().map(|(_, width)| width).sum::<usize>()
    }

    fn unscheduled(&self) -> usize {
        self.tokens - self.scheduled()
    }

    /// True if the next token is computed in the decode lane.
    fn decodes(&self) -> bool {
        self.remaining() == 1 || (self.remaining() > 1 && self.computed >= self.decoded_from)
    }

    fn is_active(&self) -> bool {
        self.attached && !self.ended && !self.paused && !self.restarts
    }

    fn can_run(&self, lane: Lane) -> bool {
        self.is_active()
            && match lane {
                Lane::Decode => self.decodes() && self.in_flight.is_empty(),
                Lane::Prefill => self.unscheduled() > 1 && self.scheduled() < self.decoded_from,
            }
    }
}

/// Decides which tokens of which sequences are computed next.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    sequences: BTreeMap<RequestId, Entry>,
    arrivals: u64,
    /// Steps by number: their lanes and whose tokens they compute.
    in_flight: BTreeMap<u64, (Lane, Vec<RequestId>)>,
    next_step: u64,
    pace: Pace,
    preemptions: u64,
}

impl Scheduler {
    /// # Panics
    ///
    /// If the limits allow nothing at all.
    pub fn new(limits: Limits) -> Self {
        assert!(limits.max_running > 0, "somebody must be allowed to run");
        assert!(limits.wavefront > 0, "a prefill step must be allowed");
        let limits = Limits { budget_tokens: limits.budget_tokens.max(limits.geometry.step), ..limits };
        let pace = Pace::new(limits.max_itl_us);
        let (sequences, in_flight) = (BTreeMap::new(), BTreeMap::new());
        Self { limits, sequences, arrivals: 0, in_flight, next_step: 0, pace, preemptions: 0 }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Sequences that wait for their first admission or, preempted, for the next.
    pub fn num_queued(&self) -> usize {
        self.sequences.values().filter(|entry| !entry.admitted && !entry.ended).count()
    }

    /// Sequences with state.
    pub fn num_running(&self) -> usize {
        self.sequences.values().filter(|entry| entry.admitted).count()
    }

    /// How often a sequence had to give its state back.
    pub fn num_preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Takes a sequence.
    ///
    /// # Errors
    ///
    /// If the queue is full, or the sequence could never run.
    ///
    /// # Panics
    ///
    /// If the id is taken or there is no token.
    pub fn submit(&mut self, id: RequestId, new: NewSequence) -> Result<(), Refusal> {
        assert!(new.tokens > 0, "a sequence has at least one token");
        let need_bytes = self.bytes_of(new.tokens + 1);
        let limit_bytes = self.limits.most_state_bytes();
        if need_bytes > limit_bytes {
            return Err(Refusal::NeverFits { need_bytes, limit_bytes });
        }
        // Those that were preempted have been let in once, and take nobody's place.
        let queued = self.sequences.values().filter(|entry| !entry.started && !entry.ended).count();
        if queued >= self.limits.max_queued {
            return Err(Refusal::QueueFull { queued, limit: self.limits.max_queued });
        }
        let entry = Entry {
            arrival: self.arrivals,
            urgency: new.urgency,
            deadline_us: new.deadline_us,
            tokens: new.tokens,
            decoded_from: if self.limits.two_classes { new.tokens - 1 } else { usize::MAX },
            computed: 0,
            admitted: false,
            attached: false,
            started: false,
            in_flight: VecDeque::new(),
            wanted_drafts: 0,
            drafts: 0,
            paused: false,
            restarts: false,
            ended: false,
            passed_over: 0,
        };
        self.arrivals += 1;
        assert!(self.sequences.insert(id, entry).is_none(), "{id} is here already");
        Ok(())
    }

    /// Seconds after which trying again may make sense for one who is refused now; at least 1.
    pub fn retry_after_s(&self) -> u64 {
        let waiting: usize =
            self.sequences.values().filter(|e| !e.ended).map(|e| e.remaining().saturating_sub(1)).sum();
        self.pace.prefill_us(waiting as u64).div_ceil(1_000_000).clamp(1, 600)
    }

    /// Sequences whose deadline has passed. The caller ends them.
    pub fn expired(&self, now_us: u64) -> Vec<RequestId> {
        let late = |e: &Entry| !e.ended && e.deadline_us.is_some_and(|deadline| now_us >= deadline);
        self.sequences.iter().filter(|(_, entry)| late(entry)).map(|(id, _)| *id).collect()
    }

    /// Starts as many waiting sequences as places and memory allow: urgent before others, then by ageing, then the
    /// shortest. Each is returned once; the caller looks its prefix up and reports [`Self::attached`], now or, if the prefix
    /// has to be fetched, later: until then the sequence has its place and its memory, and is in no step.
    pub fn admit(&mut self) -> Vec<RequestId> {
        let mut order: Vec<RequestId> =
            self.sequences.iter().filter(|(_, e)| !e.admitted && !e.ended).map(|(id, _)| *id).collect();
        order.sort_by_key(|id| Self::rank(&self.sequences[id]));
        let mut admitted = Vec::new();
        let mut free = self.state_limit().saturating_sub(self.reserved_bytes());
        for (running, id) in (self.num_running()..).zip(order) {
            let need = self.bytes_of(self.sequences[&id].tokens + 1);
            // Room for those who run to grow by a block, or they would soon take it back.
            let reserve = running as u64 * self.limits.state_cost.bytes_per_block;
            // Nobody overtakes for want of memory: a small one that slips in again and again would keep a large one out.
            if running >= self.limits.max_running || need.saturating_add(reserve) > free {
                break;
            }
            free -= need;
            let entry = self.sequences.get_mut(&id).expect("listed above");
            (entry.admitted, entry.started) = (true, true);
            admitted.push(id);
        }
        admitted
    }

    /// The state of an admitted sequence starts with `computed` tokens.
    ///
    /// # Panics
    ///
    /// If not at least one token is left to compute, or it has computed some already.
    pub fn attached(&mut self, id: RequestId, computed: usize) {
        let entry = self.sequences.get_mut(&id).expect("an admitted sequence");
        assert!(entry.admitted && !entry.attached && computed < entry.tokens, "{id} resumes at {computed}");
        (entry.attached, entry.computed) = (true, computed);
    }

    /// Whether one more step of a lane may be in flight.
    pub fn has_room(&self, lane: Lane) -> bool {
        let limit = match lane {
            Lane::Decode => 1,
            Lane::Prefill => self.limits.wavefront,
        };
        self.num_in_flight(lane) < limit
    }

    fn num_in_flight(&self, lane: Lane) -> usize {
        self.in_flight.values().filter(|(other, _)| *other == lane).count()
    }

    /// The next step of a lane. A prefill step may go on with sequences of which others are in flight.
    ///
    /// # Panics
    ///
    /// If [`Self::has_room`] says no.
    pub fn plan(&mut self, lane: Lane, now_us: u64) -> StepPlan {
        assert!(self.has_room(lane), "as many steps of {lane:?} are in flight as may be");
        let mut plan = match lane {
            Lane::Decode => self.plan_decode(now_us),
            Lane::Prefill => StepPlan { parts: self.plan_prefill(), ..StepPlan::default() },
        };
        plan.number = self.next_step;
        for part in &plan.parts {
            let entry = self.sequences.get_mut(&part.request).expect("planned above");
            entry.in_flight.push_back((plan.number, part.chunk.width));
        }
        if !plan.parts.is_empty() {
            self.in_flight.insert(plan.number, (lane, plan.parts.iter().map(|part| part.request).collect()));
            self.next_step += 1;
        }
        plan
    }

    /// When a decode step that [`Self::plan`] held back for the sake of a prefill step is due, if one is.
    pub fn next_due_us(&self) -> Option<u64> {
        let waits = self.sequences.values().any(|entry| entry.can_run(Lane::Decode));
        let due = waits && self.num_in_flight(Lane::Prefill) > 0 && self.num_in_flight(Lane::Decode) == 0;
        due.then(|| self.pace.decode_due_us(self.rows_of_prefill())).flatten()
    }

    /// Rows of the widest prefill step in flight: a decode step waits for one node that has begun, whichever step's it is.
    fn rows_of_prefill(&self) -> usize {
        let steps = self.in_flight.iter().filter(|(_, (lane, _))| *lane == Lane::Prefill);
        let rows = steps.map(|(number, (_, ids))| {
            let entries = ids.iter().filter_map(|id| self.sequences.get(id));
            let widths = entries.flat_map(|entry| &entry.in_flight).filter(|(other, _)| other == number);
            widths.map(|(_, width)| width).sum()
        });
        rows.max().unwrap_or(0)
    }

    fn plan_decode(&mut self, now_us: u64) -> StepPlan {
        let mut plan = StepPlan::default();
        if self.next_due_us().is_some_and(|due| now_us < due) {
            return plan;
        }
        self.make_room(&mut plan);
        for (id, entry) in self.sequences.iter().filter(|(_, entry)| entry.can_run(Lane::Decode)) {
            let chunk = ChunkRecord { start: entry.computed, width: 1, narrowed_by: Vec::new() };
            // What follows a token before the newest is known.
            let drafts = if entry.remaining() == 1 { entry.wanted_drafts } else { 0 };
            plan.parts.push(Part { request: *id, chunk, drafts });
        }
        self.make_room_for_drafts(&mut plan.parts);
        if plan.parts.is_empty() {
            self.pace.idle();
        } else if self.num_in_flight(Lane::Prefill) > 0 {
            self.pace.decoding(self.rows_of_prefill());
        }
        plan
    }

    /// Drafts have what memory is left: nobody gives anything up for them.
    fn make_room_for_drafts(&mut self, parts: &mut [Part]) {
        let mut free = self.limits.state_bytes.saturating_sub(self.reserved_bytes());
        for part in parts.iter_mut().filter(|part| part.drafts > 0) {
            let tokens = self.sequences[&part.request].tokens + 1;
            let more = |drafts: usize| self.bytes_of(tokens + drafts).saturating_sub(self.bytes_of(tokens));
            part.drafts = (0..=part.drafts).rev().find(|drafts| more(*drafts) <= free).unwrap_or(0);
            free -= more(part.drafts);
            self.sequences.get_mut(&part.request).expect("planned above").drafts = part.drafts;
        }
    }

    /// Takes state back until what the running sequences hold fits: least urgent first, then the youngest.
    fn make_room(&mut self, plan: &mut StepPlan) {
        while self.reserved_bytes() > self.state_limit() {
            let victims = self.sequences.iter().filter(|(_, e)| e.admitted && !e.ended && e.in_flight.is_empty());
            let victim = victims.min_by_key(|(_, e)| (e.urgency, Reverse(e.arrival))).map(|(id, _)| *id);
            let Some(id) = victim else { return };
            if self.bytes_of(self.sequences[&id].tokens + 1) > self.limits.most_state_bytes() {
                // It would never come back.
                self.sequences.remove(&id);
                plan.exhausted.push(id);
                continue;
            }
            let entry = self.sequences.get_mut(&id).expect("found above");
            (entry.admitted, entry.attached) = (false, false);
            entry.computed = 0;
            self.preemptions += 1;
            plan.preempted.push(id);
        }
    }

    fn plan_prefill(&mut self) -> Vec<Part> {
        let mut order: Vec<RequestId> =
            self.sequences.iter().filter(|(_, e)| e.can_run(Lane::Prefill)).map(|(id, _)| *id).collect();
        order.sort_by_key(|id| Self::rank(&self.sequences[id]));
        // Only streams that wait for tokens are a reason to narrow.
        let streams = self.sequences.values().any(|e| e.is_active() && e.decodes());
        let hurry = if streams { self.pace.halvings(self.limits.geometry.step) } else { 0 };
        let halvings = Halvings { throttle: self.throttle(), hurry };
        let mut budget = self.limits.budget_tokens >> halvings.throttle.max(hurry);
        let mut parts = Vec::new();
        for id in order {
            let entry = self.sequences.get_mut(&id).expect("listed above");
            let chunk = chunk_of(&self.limits.geometry, entry, halvings);
            // A chunk goes in whole or not at all: its edges are not to depend on its neighbours.
            if chunk.width <= budget {
                budget -= chunk.width;
                entry.passed_over = 0;
                parts.push(Part { request: id, chunk, drafts: 0 });
            } else {
                entry.passed_over += 1;
            }
        }
        parts
    }

    /// Urgent ones first; among them those passed over too often, oldest first; then the shortest remainder.
    fn rank(entry: &Entry) -> (Reverse<Urgency>, bool, u64, u64) {
        let aged = entry.passed_over >= MAX_PASSED_OVER;
        let length = if aged { 0 } else { entry.unscheduled() as u64 };
        (Reverse(entry.urgency), !aged, length, entry.arrival)
    }

    /// A step is done: the KV of its tokens exists. Sequences that ended meanwhile are forgotten with their last step; they
    /// are returned, since only now may their state be freed.
    ///
    /// # Panics
    ///
    /// If no such step is in flight, or an earlier one of the same sequence is.
    pub fn complete(&mut self, step: u64, now_us: u64, elapsed_us: u64, longest_node_us: u64) -> Vec<RequestId> {
        let (lane, ids) = self.in_flight.remove(&step).expect("a step in flight");
        let beside_prefill = self.num_in_flight(Lane::Prefill) > 0;
        let (mut gone, mut rows) = (Vec::new(), 0);
        for id in ids {
            let entry = self.sequences.get_mut(&id).expect("sequences outlive their steps");
            let (first, width) = entry.in_flight.pop_front().expect("in the step");
            assert_eq!(first, step, "{id}: its chunks are done in order");
            entry.computed += width;
            entry.drafts = 0;
            rows += width;
            if entry.ended && entry.in_flight.is_empty() {
                self.sequences.remove(&id);
                gone.push(id);
            }
        }
        match lane {
            Lane::Decode => self.pace.decoded(now_us, elapsed_us, beside_prefill),
            Lane::Prefill => self.pace.prefilled(rows, elapsed_us, longest_node_us),
        }
        gone
    }

    /// A step failed or was refused: its sequences get no further, whatever state they had, and are forgotten with their
    /// last step.
    ///
    /// # Panics
    ///
    /// If no such step is in flight.
    pub fn abandon(&mut self, step: u64) {
        let (_, ids) = self.in_flight.remove(&step).expect("a step in flight");
        for id in ids {
            let entry = self.sequences.get_mut(&id).expect("sequences outlive their steps");
            entry.in_flight.retain(|(other, _)| *other != step);
            entry.ended = true;
            if entry.in_flight.is_empty() {
                self.sequences.remove(&id);
            }
        }
    }

    /// So many drafts are welcome in the sequence's next decode steps.
    pub fn set_drafts(&mut self, id: RequestId, wanted: usize) {
        if let Some(entry) = self.sequences.get_mut(&id) {
            entry.wanted_drafts = wanted;
        }
    }

    /// The first `count` drafts in the sequence's step in flight are its next tokens, computed with the step that
    /// [`Self::complete`] is about to be called for.
    ///
    /// # Panics
    ///
    /// If there were fewer.
    pub fn accept_drafts(&mut self, id: RequestId, count: usize) {
        let entry = self.sequences.get_mut(&id).expect("sequences outlive their steps");
        assert!(count <= entry.drafts, "{id} has {} drafts, not {count}", entry.drafts);
        let (_, width) = entry.in_flight.back_mut().expect("drafts are in a step");
        *width += count;
        entry.tokens += count;
        entry.drafts = 0;
    }

    /// The sequence has one more token, which is not yet computed.
    ///
    /// # Panics
    ///
    /// If the token before it is not yet computed.
    pub fn push_token(&mut self, id: RequestId) {
        let entry = self.sequences.get_mut(&id).expect("a live sequence");
        assert_eq!(entry.computed, entry.tokens, "{id} gets tokens one at a time");
        entry.tokens += 1;
    }

    /// While paused, a sequence is in no step; it keeps its state unless memory runs out.
    pub fn set_paused(&mut self, id: RequestId, paused: bool) {
        if let Some(entry) = self.sequences.get_mut(&id) {
            entry.paused = paused;
        }
    }

    /// The sequence has ended, at any moment. True if its state may be freed now; otherwise [`Self::complete`] says when.
    pub fn end(&mut self, id: RequestId) -> bool {
        let Some(entry) = self.sequences.get_mut(&id) else { return true };
        entry.ended = true;
        if !entry.in_flight.is_empty() {
            return false;
        }
        self.sequences.remove(&id);
        true
    }

    /// Leading tokens of a sequence whose KV exists.
    pub fn num_computed_tokens(&self, id: RequestId) -> usize {
        self.sequences.get(&id).map_or(0, |entry| entry.computed)
    }

    /// Whether a sequence has state. Whether it has ever been forgotten is not remembered: false for unknown ids.
    pub fn is_attached(&self, id: RequestId) -> bool {
        self.sequences.get(&id).is_some_and(|entry| entry.attached)
    }

    /// True if no step is in flight and none can be planned until something comes in.
    pub fn is_idle(&self) -> bool {
        let runnable = |e: &Entry| e.can_run(Lane::Decode) || e.can_run(Lane::Prefill);
        self.in_flight.is_empty() && !self.sequences.values().any(runnable)
    }

    /// Bytes that are missing, if steps are to stay as wide as they are and everybody is to keep their state: before the next
    /// [`Self::admit`], whoever holds the reserve should give it up, and say so to [`Self::take_bytes`].
    pub fn bytes_short(&self) -> u64 {
        self.largest_need().max(self.reserved_bytes()).saturating_sub(self.limits.state_bytes)
    }

    /// Somebody has given up `bytes` of the reserve.
    pub fn take_bytes(&mut self, bytes: u64) {
        self.limits.state_bytes = self.limits.state_bytes.saturating_add(bytes);
        self.limits.reserve_bytes = self.limits.reserve_bytes.saturating_sub(bytes);
    }

    /// Bytes that nobody has missed for now: a block for each running sequence to grow is kept, and while somebody waits there
    /// are none. Of these the reserve may be filled up again, which [`Self::give_bytes`] is told.
    pub fn bytes_spare(&self) -> u64 {
        if self.num_queued() > 0 {
            return 0;
        }
        let growth = self.num_running() as u64 * self.limits.state_cost.bytes_per_block;
        let need = self.largest_need().max(self.reserved_bytes()).saturating_add(growth);
        self.limits.state_bytes.saturating_sub(need)
    }

    /// Somebody takes `bytes` of the spare ones for the reserve.
    pub fn give_bytes(&mut self, bytes: u64) {
        self.limits.state_bytes = self.limits.state_bytes.saturating_sub(bytes);
        self.limits.reserve_bytes = self.limits.reserve_bytes.saturating_add(bytes);
    }

    /// Bytes that the largest running sequence needs; if none runs, those of the one that waits to be the next.
    fn largest_need(&self) -> u64 {
        let running = self.sequences.values().filter(|e| e.admitted && !e.ended).map(|e| e.tokens).max();
        let next = || self.sequences.values().filter(|e| !e.admitted && !e.ended).min_by_key(|e| Self::rank(e));
        running.or_else(|| next().map(|entry| entry.tokens)).map_or(0, |tokens| self.bytes_of(tokens + 1))
    }

    /// How often the next prefill step is halved so that the largest sequence has room beside it.
    fn throttle(&self) -> u32 {
        let (need, limits) = (self.largest_need(), &self.limits);
        // What does not even fit beside the narrowest step is not helped by narrow ones.
        if need <= limits.state_bytes || need > limits.most_state_bytes() {
            return 0;
        }
        let fits = |frees: &u64| need <= limits.state_bytes.saturating_add(*frees);
        limits.narrowing_frees.iter().position(fits).map_or(0, |index| index as u32 + 1)
    }

    /// [`Self::throttle`] as far as steps in flight are that narrow already.
    pub fn throttle_in_force(&self) -> u32 {
        let (rows, budget) = (self.rows_of_prefill(), self.limits.budget_tokens);
        (0..=self.throttle()).rev().find(|times| rows <= budget >> times).unwrap_or(0)
    }

    /// Bytes for state now.
    pub fn state_limit(&self) -> u64 {
        let frees = match self.throttle_in_force() {
            0 => 0,
            times => self.limits.narrowing_frees[times as usize - 1],
        };
        self.limits.state_bytes.saturating_add(frees)
    }

    /// What was computed of these sequences is not to be trusted. Each loses its state once none of its steps is in flight.
    pub fn restart(&mut self, ids: impl IntoIterator<Item = RequestId>) {
        for id in ids {
            if let Some(entry) = self.sequences.get_mut(&id).filter(|entry| entry.admitted) {
                entry.restarts = true;
            }
        }
    }

    /// Sequences that [`Self::restart`] was called for and that lose their state now; they wait to be admitted again.
    pub fn take_restarted(&mut self) -> Vec<RequestId> {
        let mut restarted = Vec::new();
        for (id, entry) in &mut self.sequences {
            if entry.restarts && entry.in_flight.is_empty() && !entry.ended {
                (entry.restarts, entry.admitted, entry.attached, entry.computed) = (false, false, false, 0);
                restarted.push(*id);
            }
        }
        restarted
    }

    /// Bytes that a sequence of `tokens` tokens may hold.
    pub fn bytes_of(&self, tokens: usize) -> u64 {
        self.limits.state_cost.bytes_of(tokens, self.limits.geometry.block)
    }

    /// Bytes set aside for sequences with state. One token more than is known, since a step adds one, and the drafts in flight.
    pub fn reserved_bytes(&self) -> u64 {
        self.sequences.values().filter(|e| e.admitted).map(|e| self.bytes_of(e.tokens + 1 + e.drafts)).sum()
    }

    /// # Panics
    ///
    /// If the books do not add up.
    pub fn check_invariants(&self) {
        assert!(self.num_running() <= self.limits.max_running, "more run than may");
        for (id, entry) in &self.sequences {
            let limit = entry.tokens;
            assert!(entry.computed <= limit, "{id} has computed {} of {limit} tokens", entry.computed);
            assert!(entry.admitted || !entry.attached, "{id} has state without a place");
            assert!(entry.scheduled() <= limit, "{id} computes {} of {limit} tokens", entry.scheduled());
            assert!(entry.attached || entry.in_flight.is_empty(), "{id} computes without state");
            assert!(entry.attached || entry.computed == 0, "{id} has progress without state");
            assert!(entry.drafts == 0 || entry.in_flight.len() == 1, "{id} has drafts in no step");
            let listed = |number| self.in_flight.get(number).is_some_and(|(_, ids)| ids.contains(id));
            assert!(entry.in_flight.iter().all(|(number, _)| listed(number)), "{id} is in a step nobody knows");
            assert!(entry.in_flight.iter().is_sorted(), "{id} has its chunks in order");
            assert!(!entry.ended || !entry.in_flight.is_empty(), "{id} has ended and is still here");
        }
        for lane in [Lane::Decode, Lane::Prefill] {
            let limit = if lane == Lane::Decode { 1 } else { self.limits.wavefront };
            assert!(self.num_in_flight(lane) <= limit, "too many steps of {lane:?}");
        }
        for (number, (lane, ids)) in &self.in_flight {
            for id in ids {
                let entry = self.sequences.get(id).expect("sequences outlive their steps");
                let is_in = entry.in_flight.iter().any(|(other, _)| other == number);
                assert!(is_in, "{id} is not in the step that names it");
                assert!(*lane == Lane::Prefill || entry.in_flight.len() == 1, "{id} decodes beside its own prompt");
            }
        }
    }
}

/// How often a step is halved, and why.
#[derive(Clone, Copy)]
struct Halvings {
    /// Memory is short.
    throttle: u32,
    /// Streams wait for tokens.
    hurry: u32,
}

/// The next chunk of a sequence (hybrid spec 10.2): from the step's width, narrowed by one rule after another.
fn chunk_of(geometry: &Geometry, entry: &Entry, halvings: Halvings) -> ChunkRecord {
    let start = entry.scheduled();
    let mut chunk = ChunkRecord { start, width: geometry.step, narrowed_by: Vec::new() };
    let mut narrow = |rule, after: usize| {
        if after < chunk.width {
            chunk.narrowed_by.push(Narrowing { rule, before: chunk.width, after });
            chunk.width = after;
        }
    };
    narrow(Rule::Memory, geometry.narrowed(halvings.throttle));
    let step = geometry.narrowed(halvings.throttle.max(halvings.hurry));
    narrow(Rule::MaxItl, step);
    narrow(Rule::Alignment, step - start % step);
    // Without two classes nothing is left to the decode lane but a last token that would be a chunk of its own.
    narrow(Rule::Remaining, entry.unscheduled().min(entry.decoded_from - start));
    chunk
}
