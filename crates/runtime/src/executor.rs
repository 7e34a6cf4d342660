//! The executor: runs the nodes of several steps on several devices, by dependencies alone.
//!
//! A node is handed to its device as soon as everything before it is done or queued earlier on the same device, together
//! with all others that may go: a step whose nodes all belong to one device is one piece of work with one report. A piece
//! ends where another device waits for it. Devices see to it that nodes of a decode step go before the next node of a
//! prefill step. Two steps are ordered only where they touch the state of the same sequence: a node that touches a layer's
//! state comes after the earlier step's nodes of that layer that do.
//!
//! A node that engines take part in is cut into parts by the plan (`shared.rs`); those who wait for it wait for all of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use troika_base::StepId;
use troika_device::run::BufferPool;
use troika_device::{Device, DeviceError, Priority, Report, SequenceState, StepRun, Work};
use troika_graph::{Kind, NodeId, StepGraph, StepRows, WeightKey};

use crate::feature::{Feature, FeatureState};
use crate::ledger::{Entry, Fallback, Ledger, Operations};
use crate::plan::{DeviceId, Lane, Plan};
use crate::span::{self, Span};
use crate::template::{NodePlace, Place, Template};

mod banks;
pub(crate) mod check;
mod shared;

use banks::Returning;
pub use banks::{BankCounts, EngineBytes, LoadedBank};
use check::Checks;
use shared::SharedRun;

/// One forward pass to do.
#[derive(Debug)]
pub struct Step {
    /// Of the same executor.
    pub template: Arc<Template>,
    pub rows: StepRows,
    /// One per segment.
    pub states: Vec<Arc<SequenceState>>,
    pub priority: Priority,
}

/// A step that was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub StepId);

/// A step that is done. Its state writes are staged: the caller commits them.
#[derive(Debug)]
pub struct FinishedStep {
    pub ticket: Ticket,
    pub run: StepRun,
    pub ledger: Ledger,
    /// Rows of the tiles that engines were given of each projection, the rows of zeros in a padded one included.
    pub tiled_rows: usize,
    /// When each node ran; empty unless [`Executor::keep_spans`] asked for it.
    pub spans: Vec<Span>,
    pub elapsed: Duration,
}

/// Why a step could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// A device refused work or is gone.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A node failed. The state of the step's sequences is no longer to be trusted.
    #[error("{step}: {reason}")]
    Node { step: StepId, reason: String },

    /// [`Executor::next_done`] was called with nothing in flight.
    #[error("no step is in flight")]
    Idle,
}

/// Tells the time: the system's, or that of simulated devices.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// [`InFlight::waiting_for`] of a node that is queued or done.
const QUEUED: u32 = u32::MAX;

struct InFlight {
    run: Arc<StepRun>,
    template: Arc<Template>,
    priority: Priority,
    /// Per node: predecessors that keep it from being queued.
    waiting_for: Vec<u32>,
    /// All nodes before this one are queued.
    first_unqueued: usize,
    /// Per layer of the template: nodes touching its state that are not queued, and that are not done.
    state_users: Vec<StateUsers>,
    /// Earlier steps with a sequence of this one.
    earlier: Vec<StepId>,
    left: usize,
    /// Per counter of the template.
    entries: Vec<Entry>,
    spans: Vec<Span>,
    /// Counts of parts.
    part_entries: BTreeMap<(Kind, DeviceId), Entry>,
    operations: BTreeMap<Kind, Operations>,
    /// Nodes whose parts are not all in.
    shared: BTreeMap<NodeId, SharedRun>,
    /// Why it is narrower than a tile, if it is and a rule is to blame.
    short_because: Option<Fallback>,
    /// Rows of the tiles that were handed over for each of its projections, zeros included; the most of any.
    tiled_rows: usize,
    /// When the last shared node was complete.
    last_shared: Instant,
    start: Instant,
}

struct StateUsers {
    not_queued: u32,
    not_done: u32,
}

/// Runs steps on devices. Driven by one thread: [`Self::submit`] queues, [`Self::next_done`] waits.
pub struct Executor {
    devices: Vec<Arc<dyn Device>>,
    plan: Plan,
    buffers: BufferPool,
    steps: BTreeMap<StepId, InFlight>,
    next_step: u64,
    done: (Sender<Report>, Receiver<Report>),
    /// A report that came in while a device had this thread.
    reported: Option<Report>,
    /// Steps that ended because an earlier one of the same sequence failed, not yet reported.
    given_up: VecDeque<(StepId, String)>,
    totals: Ledger,
    keeps_spans: bool,
    clock: Clock,
    /// Projections that failed on an engine, and how: the primary device does them from then on.
    latched: BTreeMap<WeightKey, String>,
    /// Bytes of the weights in the engines' form.
    weight_bytes: u64,
    /// Banks that could be given up.
    banks: Vec<LoadedBank>,
    /// Projections whose banks were.
    shed: BTreeSet<WeightKey>,
    /// Those banks, in the order in which they were.
    shed_banks: Vec<LoadedBank>,
    returning: Option<Returning>,
    bank_counts: BankCounts,
    checks: Checks,
    /// What was wrong with an engine's numbers: the primary device does everything from then on.
    quarantine: Option<String>,
    /// [`Self::take_quarantine`] has something to say.
    quarantine_is_news: bool,
    /// Why the next prefill step may be narrower than a tile.
    next_short_because: Option<Fallback>,
    feature: Feature,
}

impl Executor {
    /// `devices[0]` is the primary.
    ///
    /// # Panics
    ///
    /// Without a device.
    pub fn new(devices: Vec<Arc<dyn Device>>, plan: Plan) -> Self {
        Self::with_clock(devices, plan, Arc::new(Instant::now))
    }

    /// As [`Self::new`], for devices whose time is told by `clock`.
    ///
    /// # Panics
    ///
    /// Without a device.
    pub fn with_clock(devices: Vec<Arc<dyn Device>>, plan: Plan, clock: Clock) -> Self {
        assert!(!devices.is_empty(), "an executor needs a primary device");
        Self {
            devices,
            feature: Feature::new(&plan),
            weight_bytes: banks::weight_bytes(&plan),
            checks: Checks::new(plan.repeats_rows()),
            plan,
            latched: BTreeMap::new(),
            banks: Vec::new(),
            shed: BTreeSet::new(),
            shed_banks: Vec::new(),
            returning: None,
            bank_counts: BankCounts::default(),
            quarantine: None,
            quarantine_is_news: false,
            next_short_because: None,
            buffers: BufferPool::default(),
            steps: BTreeMap::new(),
            next_step: 0,
            done: channel(),
            reported: None,
            given_up: VecDeque::new(),
            keeps_spans: false,
            clock,
            totals: Ledger::default(),
        }
    }

    /// Works out what all steps of a graph have in common.
    pub fn template(&self, graph: StepGraph, lane: Lane) -> Arc<Template> {
        Arc::new(Template::new(graph, &self.plan, lane))
    }

    /// What engines take part in.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The devices; the first is the primary.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// Projections that failed on an engine, and how.
    pub fn latched(&self) -> &BTreeMap<WeightKey, String> {
        &self.latched
    }

    /// Takes note that engines were wished for and none can take part.
    pub fn set_unavailable(&mut self, reason: String) {
        self.feature.close(FeatureState::Unavailable { reason });
    }

    /// Takes note that no step will be as wide as a tile, and why.
    pub fn set_idle(&mut self, reason: &'static str) {
        self.feature.idle = Some(reason);
    }

    /// Takes note that `rule` has narrowed a chunk of the next prefill step, and why that step is narrower than a tile if it is.
    pub fn note_narrowed(&mut self, rule: &'static str, because: Option<Fallback>) {
        self.feature.narrowed(rule);
        // The reasons are in the order of their weight: of several chunks the weightiest counts.
        self.next_short_because = [self.next_short_because, because].into_iter().flatten().min();
    }

    /// Checks one in so many parts of engines.
    pub fn check_every(&mut self, parts: u64) {
        self.checks.every = parts.max(1);
    }

    /// What was found wrong with an engine's numbers, once. What engines have computed since the last check that was good is
    /// not to be trusted: the caller gives it up.
    pub fn take_quarantine(&mut self) -> Option<String> {
        let is_news = std::mem::take(&mut self.quarantine_is_news);
        self.quarantine.clone().filter(|_| is_news)
    }

    /// Frees the memory of finished steps that was kept for the next ones.
    pub fn release_buffers(&self) {
        self.buffers.clear();
    }

    /// Whether engines really take part.
    pub fn feature(&self) -> &Feature {
        &self.feature
    }

    /// Queues a step. Devices that have no processor of their own compute while somebody waits in [`Self::next_done`].
    ///
    /// # Errors
    ///
    /// If a device refuses work.
    ///
    /// # Panics
    ///
    /// If the rows do not fit the template.
    pub fn submit(&mut self, step: Step) -> Result<Ticket, ExecutorError> {
        let id = StepId(self.next_step);
        self.next_step += 1;
        let in_flight = self.prepare(id, step);
        self.steps.insert(id, in_flight);
        self.queue_step(id)?;
        Ok(Ticket(id))
    }

    /// Steps in flight.
    pub fn num_in_flight(&self) -> usize {
        self.steps.len()
    }

    /// Counts of all finished steps.
    pub fn totals(&self) -> &Ledger {
        &self.totals
    }

    /// Waits for the next step to finish. Those that share a sequence finish in the order of submission.
    ///
    /// # Errors
    ///
    /// If a node failed or a device is gone. Later steps of the same sequences fail too, one call each, since they build on
    /// state that is not to be trusted; the others stay in flight.
    pub fn next_done(&mut self) -> Result<FinishedStep, ExecutorError> {
        Ok(self.wait(None)?.expect("without an end, a step ends the wait"))
    }

    /// As [`Self::next_done`], but gives up at `until`, or after the node that is being computed then.
    ///
    /// # Errors
    ///
    /// As [`Self::next_done`].
    pub fn next_done_until(&mut self, until: Instant) -> Result<Option<FinishedStep>, ExecutorError> {
        self.wait(Some(until))
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<Option<FinishedStep>, ExecutorError> {
        if let Some((step, reason)) = self.given_up.pop_front() {
            return Err(ExecutorError::Node { step, reason });
        }
        if self.steps.is_empty() {
            return Err(ExecutorError::Idle);
        }
        if let Some(finished) = self.take_finished() {
            return Ok(Some(finished));
        }
        let is_over = |now: Instant| until.is_some_and(|until| now >= until);
        loop {
            while let Some(report) = self.reported.take().or_else(|| self.done.1.try_recv().ok()) {
                if let Some(finished) = self.take_report(report)? {
                    return Ok(Some(finished));
                }
            }
            if until.is_some() && is_over((self.clock)()) {
                return Ok(None);
            }
            let (reported, reports) = (&mut self.reported, &self.done.1);
            let mut pause = |now| {
                *reported = reports.try_recv().ok();
                reported.is_some() || is_over(now)
            };
            if self.devices.iter().any(|device| device.drive(&mut pause)) {
                continue;
            }
            let left = until.map(|until| until.saturating_duration_since((self.clock)()));
            let report = match left {
                Some(left) => self.done.1.recv_timeout(left),
                None => self.done.1.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match report {
                Ok(report) => self.reported = Some(report),
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => unreachable!("the executor holds a sender itself"),
            }
        }
    }

    /// From now on, steps say when each of their nodes ran, or no longer do.
    pub fn keep_spans(&mut self, keep: bool) {
        self.keeps_spans = keep;
    }

    /// Takes back the memory of a finished step.
    pub fn recycle(&self, run: StepRun) {
        run.recycle(&self.buffers);
    }

    fn prepare(&mut self, id: StepId, step: Step) -> InFlight {
        let Step { template, rows, states, priority } = step;
        let start = (self.clock)();
        let shares_sequence = |other: &InFlight| {
            other.run.rows().segments.iter().any(|a| rows.segments.iter().any(|b| a.sequence == b.sequence))
        };
        let earlier = self.steps.iter().filter(|(_, other)| shares_sequence(other)).map(|(id, _)| *id).collect();
        let users = template.scopes.iter().map(|users| StateUsers { not_queued: users.nodes, not_done: users.nodes });
        let mut operations: BTreeMap<Kind, Operations> = BTreeMap::new();
        let planned = self.plan.num_operations(rows.num_rows()) as u64;
        for node in &template.shared {
            operations.entry(node.kind).or_default().planned += planned;
        }
        for (kind, nodes) in &template.bypassed {
            let operations = operations.entry(*kind).or_default();
            match template.lane {
                Lane::Verify => operations.bypass_verify += nodes,
                _ => operations.bypass_decode += nodes,
            }
        }
        let short_because = match template.lane {
            Lane::Prefill => self.next_short_because.take().or(self.feature.idle.map(|_| Fallback::Throttle)),
            Lane::Decode | Lane::Verify => None,
        };
        InFlight {
            short_because,
            tiled_rows: 0,
            last_shared: start,
            run: Arc::new(StepRun::new(id, Arc::clone(&template.graph), rows, states, &self.buffers)),
            priority,
            waiting_for: template.nodes.iter().map(|place| place.num_predecessors).collect(),
            first_unqueued: 0,
            state_users: users.collect(),
            earlier,
            left: template.nodes.len(),
            entries: vec![Entry::default(); template.counters.len()],
            part_entries: BTreeMap::new(),
            operations,
            shared: BTreeMap::new(),
            template,
            spans: Vec::new(),
            start,
        }
    }

    /// Hands over every node that may go, decode steps first, then older steps.
    fn queue_ready(&mut self) -> Result<(), ExecutorError> {
        let unqueued = self.steps.iter().filter(|(_, step)| step.first_unqueued < step.waiting_for.len());
        let mut order: Vec<(Priority, StepId)> = unqueued.map(|(id, step)| (step.priority, *id)).collect();
        order.sort_unstable();
        order.into_iter().try_for_each(|(_, id)| self.queue_step(id))
    }

    fn queue_step(&mut self, id: StepId) -> Result<(), ExecutorError> {
        let mut step = self.steps.remove(&id).expect("it is in flight");
        let template = Arc::clone(&step.template);
        let mut pieces: Vec<(DeviceId, Vec<NodeId>)> = Vec::new();
        let mut are_all_queued = true;
        // The order of nodes respects every dependency, so one pass finds all that may go.
        for index in step.first_unqueued..template.nodes.len() {
            let (node, place) = (NodeId(index as u32), &template.nodes[index]);
            if step.waiting_for[index] == 0 && !self.waits_for_earlier_step(&step, place) {
                step.waiting_for[index] = QUEUED;
                match place.at {
                    Place::Shared(shared) => self.queue_shared(&mut step, node, shared)?,
                    Place::Device(device) => {
                        step.queue(place);
                        step.release_successors(place, |other| other == place.at);
                        let piece = match pieces.iter_mut().find(|(other, _)| *other == device) {
                            Some(piece) => piece,
                            None => {
                                pieces.push((device, Vec::with_capacity(template.nodes.len() - index)));
                                pieces.last_mut().expect("just pushed")
                            }
                        };
                        piece.1.push(node);
                        if place.is_awaited {
                            self.hand_over(&step, device, std::mem::take(&mut piece.1))?;
                        }
                    }
                }
            }
            are_all_queued &= step.waiting_for[index] == QUEUED;
            if are_all_queued {
                step.first_unqueued = index + 1;
            }
        }
        for (device, nodes) in pieces.into_iter().filter(|(_, nodes)| !nodes.is_empty()) {
            self.hand_over(&step, device, nodes)?;
        }
        self.steps.insert(id, step);
        Ok(())
    }

    fn hand_over(&self, step: &InFlight, device: DeviceId, nodes: Vec<NodeId>) -> Result<(), DeviceError> {
        let (run, done) = (Arc::clone(&step.run), self.done.0.clone());
        let (priority, feeds) = (step.priority, step.template.place(nodes[0]).feeds);
        self.devices[usize::from(device.0)].submit(Work { run, nodes, part: None, priority, feeds, done })
    }

    fn waits_for_earlier_step(&self, step: &InFlight, place: &NodePlace) -> bool {
        let Some(scope) = place.scope else { return false };
        let scope = step.template.scopes[scope].scope;
        step.earlier.iter().filter_map(|id| self.steps.get(id)).any(|earlier| {
            let Some(index) = earlier.template.scope(scope) else { return false };
            let users = &earlier.state_users[index];
            // Work of one device is done in the order in which it is queued, but for urgent work and what feeds others.
            let comes_first = users.not_queued == 0
                && !step.template.feeds
                && earlier.priority <= step.priority
                && earlier.template.scopes[index].at == Some(place.at);
            users.not_done > 0 && !comes_first
        })
    }

    /// Drops a failed step and every later step that builds on its sequences' state.
    fn give_up(&mut self, failed: StepId) {
        let step = self.steps.remove(&failed).expect("it is in flight");
        self.totals.merge(&step.give_up());
        let mut lost = BTreeSet::from([failed]);
        // Steps are in order of submission, so one pass finds what depends on what was lost before it.
        for (id, step) in &self.steps {
            if step.earlier.iter().any(|earlier| lost.contains(earlier)) {
                lost.insert(*id);
            }
        }
        lost.remove(&failed);
        for id in lost {
            let step = self.steps.remove(&id).expect("found above");
            self.totals.merge(&step.give_up());
            self.given_up.push_back((id, format!("{failed}, which computed the tokens before, failed")));
        }
    }

    fn take_report(&mut self, report: Report) -> Result<Option<FinishedStep>, ExecutorError> {
        if report.part.is_some() {
            return self.take_part(report);
        }
        let Report { step: id, nodes, elapsed_ns, failure, .. } = report;
        // A step that failed has been dropped; its last reports may still come in.
        let Some(step) = self.steps.get_mut(&id) else { return Ok(None) };
        for (node, elapsed_ns) in nodes.iter().zip(&elapsed_ns) {
            step.complete(*node, *elapsed_ns);
        }
        if self.keeps_spans {
            let end_ns = ((self.clock)() - step.start).as_nanos() as u64;
            step.spans.extend(span::before(&step.template, &nodes, &elapsed_ns, end_ns));
        }
        if let Some(reason) = failure {
            let failed = step.template.place(nodes[elapsed_ns.len()]).counter.expect("it is no shared node");
            step.entries[failed].failed += 1;
            self.give_up(id);
            self.queue_ready()?;
            return Err(ExecutorError::Node { step: id, reason });
        }
        self.go_on()
    }

    /// After something was done: what may go now, and a step of which nothing is left.
    fn go_on(&mut self) -> Result<Option<FinishedStep>, ExecutorError> {
        self.queue_ready()?;
        Ok(self.take_finished())
    }

    /// The oldest step that is done, once all earlier ones of its sequences are: their rows are committed in order.
    fn take_finished(&mut self) -> Option<FinishedStep> {
        let is_through =
            |step: &InFlight| step.left == 0 && !step.earlier.iter().any(|earlier| self.steps.contains_key(earlier));
        let id = self.steps.iter().find(|(_, step)| is_through(step)).map(|(id, _)| *id)?;
        let step = self.steps.remove(&id).expect("found above");
        let (rows, lane) = (step.run.rows().num_rows(), step.template.lane);
        let finished = step.finish(id, (self.clock)());
        if lane == Lane::Prefill {
            self.feature.observe(rows, &finished.ledger.total_operations());
        }
        self.totals.merge(&finished.ledger);
        Some(finished)
    }
}

impl InFlight {
    fn queue(&mut self, place: &NodePlace) {
        self.entries[place.counter.expect("it is no shared node")].submitted += 1;
        if let Some(scope) = place.scope {
            self.state_users[scope].not_queued -= 1;
        }
    }

    fn complete(&mut self, node: NodeId, elapsed_ns: u64) {
        let template = Arc::clone(&self.template);
        let place = template.place(node);
        let entry = &mut self.entries[place.counter.expect("it is no shared node")];
        entry.completed += 1;
        entry.rows += self.run.rows().num_rows() as u64;
        entry.busy_ns += elapsed_ns;
        entry.longest_ns = entry.longest_ns.max(elapsed_ns);
        self.left -= 1;
        if let Some(scope) = place.scope {
            self.state_users[scope].not_done -= 1;
        }
        if place.is_awaited {
            self.release_successors(place, |other| other != place.at);
        }
    }

    /// `place` no longer keeps those of its successors waiting whose place `releases`.
    fn release_successors(&mut self, place: &NodePlace, releases: impl Fn(Place) -> bool) {
        for successor in self.template.successors(place) {
            if releases(self.template.place(*successor).at) {
                self.waiting_for[successor.0 as usize] -= 1;
            }
        }
    }

    fn take_ledger(&mut self) -> Ledger {
        let (parts, operations) = (std::mem::take(&mut self.part_entries), std::mem::take(&mut self.operations));
        Ledger::of_step(&self.template.counters, &self.entries, parts, operations)
    }

    /// The counts of a step that ends before it is done.
    fn give_up(mut self) -> Ledger {
        for shared in self.shared.values() {
            self.operations.entry(shared.kind).or_default().cancelled += shared.tiles_left();
        }
        for (place, waiting) in self.template.nodes.iter().zip(&self.waiting_for) {
            if let (Place::Shared(index), true) = (place.at, *waiting != QUEUED) {
                let operations = self.operations.entry(self.template.shared[index].kind).or_default();
                *operations.fallbacks.entry(Fallback::Cancelled).or_default() += 1;
            }
        }
        self.take_ledger()
    }

    fn finish(mut self, id: StepId, now: Instant) -> FinishedStep {
        let (ledger, elapsed) = (self.take_ledger(), now - self.start);
        let mut run = self.run;
        // Devices drop their references before they report, but for those with nothing left to report.
        let run = loop {
            match Arc::try_unwrap(run) {
                Ok(run) => break run,
                Err(shared) => {
                    run = shared;
                    std::thread::yield_now();
                }
            }
        };
        let (tiled_rows, spans) = (self.tiled_rows, self.spans);
        FinishedStep { ticket: Ticket(id), run, ledger, tiled_rows, spans, elapsed }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use troika_base::SequenceId;
    use troika_device::{Capabilities, DeviceKind, StateShape};
    use troika_graph::{
        Acceptance, Access, Element, GraphBuilder, Kind, Node, Op, Scope, Segment, StateEdge, StatePart, WeightSource,
    };

    use super::*;

    /// Keeps work until the test has it done.
    struct Shelf {
        capabilities: Capabilities,
        work: Mutex<VecDeque<Work>>,
    }

    impl Device for Shelf {
        fn capabilities(&self) -> &Capabilities {
            &self.capabilities
        }

        fn load(&self, _: &dyn WeightSource) -> Result<(), DeviceError> {
            Ok(())
        }

        fn submit(&self, work: Work) -> Result<(), DeviceError> {
            self.work.lock().expect("not poisoned").push_back(work);
            Ok(())
        }

        fn drive(&self, _: &mut dyn FnMut(Instant) -> bool) -> bool {
            false
        }
    }

    /// Two branches of three nodes from one node, joined by a last one; the branch on the second device writes state.
    fn branches() -> StepGraph {
        let mut builder = GraphBuilder::new(1, 0);
        let mut node = |inputs: &[u32], scope, state| {
            let output = builder.value(1, Element::F32);
            // Kept, so that no memory is reused and the branches do not wait for each other.
            builder.tap(Scope::Stage(output.0 as u16), "kept", output);
            let inputs = inputs.iter().map(|input| troika_graph::ValueId(*input)).collect();
            builder.push(Node { op: Op::Copy, inputs, outputs: vec![output], scope, kind: Kind::Gate, state });
        };
        let edge = || vec![StateEdge { scope: Scope::Layer(3), part: StatePart::Window, access: Access::Write }];
        node(&[], Scope::Model, Vec::new());
        for branch in 0..3 {
            node(&[if branch == 0 { 0 } else { 2 * branch - 1 }], Scope::Model, Vec::new());
            node(&[if branch == 0 { 0 } else { 2 * branch }], Scope::Layer(3), edge());
        }
        node(&[5, 6], Scope::Model, Vec::new());
        builder.build()
    }

    /// Pieces end where another device waits and begin when what they wait for is reported, and not before.
    #[test]
    fn work_is_cut_where_devices_wait_for_each_other() {
        let shelf = || {
            let (name, description) = ("shelf".to_owned(), String::new());
            let capabilities = Capabilities { name, kind: DeviceKind::Cpu, description, threads: 1 };
            Arc::new(Shelf { capabilities, work: Mutex::default() })
        };
        let (primary, second) = (shelf(), shelf());
        let devices: Vec<Arc<dyn Device>> = vec![Arc::<Shelf>::clone(&primary), Arc::<Shelf>::clone(&second)];
        let mut executor = Executor::new(devices, Plan::primary());
        let placement: Vec<DeviceId> = [0, 0, 1, 0, 1, 0, 1, 0].map(DeviceId).to_vec();
        let template = Arc::new(Template::placed(branches(), &placement));
        let mut submit = || {
            let segment =
                Segment { sequence: SequenceId(0), row: 0, rows: 1, position: 0, acceptance: Acceptance::Whole };
            let rows = StepRows { tokens: vec![0], segments: vec![segment], logit_rows: Vec::new() };
            let states = vec![Arc::new(SequenceState::new(&StateShape::default()))];
            let step = Step { template: Arc::clone(&template), rows, states, priority: Priority::Prefill };
            executor.submit(step).expect("accepted")
        };
        let nodes = |shelf: &Shelf| -> Vec<(u64, Vec<u32>)> {
            let work = shelf.work.lock().expect("not poisoned");
            work.iter().map(|work| (work.run.id().0, work.nodes.iter().map(|node| node.0).collect())).collect()
        };
        let (first, later) = (submit(), submit());
        let whole = |step: Ticket| [(step.0.0, vec![0]), (step.0.0, vec![1, 3, 5])];
        assert_eq!(nodes(&primary), [whole(first), whole(later)].concat());
        assert_eq!(nodes(&second), []);
        let mut report = |shelf: &Shelf| {
            let work = shelf.work.lock().expect("not poisoned").pop_front().expect("there is some");
            let (step, elapsed_ns) = (work.run.id(), vec![5; work.nodes.len()]);
            let report = Report { step, nodes: work.nodes, part: None, elapsed_ns, failure: None };
            drop(work.run);
            executor.take_report(report).expect("nothing fails").map(|finished| finished.ledger)
        };
        assert!(report(&primary).is_none());
        assert_eq!(nodes(&second), [(first.0.0, vec![2, 4, 6])]);
        assert!(report(&primary).is_none());
        assert!(report(&primary).is_none());
        // The state that the first step writes is not there yet, and what feeds another device may go before older work.
        assert_eq!(nodes(&second), [(first.0.0, vec![2, 4, 6])]);
        assert_eq!(nodes(&primary), [(later.0.0, vec![1, 3, 5])]);
        assert!(report(&second).is_none());
        assert_eq!(nodes(&second), [(later.0.0, vec![2, 4, 6])]);
        assert_eq!(nodes(&primary), [(later.0.0, vec![1, 3, 5]), (first.0.0, vec![7])]);
        assert!(report(&primary).is_none());
        let ledger = report(&primary).expect("the first step is done");
        let entry = |device| ledger.entry(Kind::Gate, DeviceId(device));
        assert_eq!((entry(0).submitted, entry(0).completed, entry(0).busy_ns), (5, 5, 25));
        assert_eq!((entry(1).submitted, entry(1).completed, entry(1).longest_ns), (3, 3, 5));
    }
}
