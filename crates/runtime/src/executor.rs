//! The executor: runs the nodes of several steps on several devices, by dependencies alone.
//!
//! A node is handed to its device as soon as everything before it is done or queued earlier on the same device. Nodes of a
//! decode step go before the next node of a prefill step: no prefill node is handed over while a decode node is queued. Two steps are ordered only where they touch the state of the
//! same sequence: a node that touches a layer's state waits for the earlier step's nodes of that layer that do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use troika_base::StepId;
use troika_device::run::BufferPool;
use troika_device::{Completion, Device, DeviceError, SequenceState, StepRun, Work};
use troika_graph::{NodeId, Scope, StepGraph, StepRows};

use crate::ledger::Ledger;
use crate::plan::{DeviceId, Plan};

/// Which step's nodes go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Somebody waits for the next token.
    Decode,
    /// Prompt processing.
    Prefill,
}

impl Priority {
    /// Nodes of such a step that may be queued on a device at once. Decode nodes are short, so a deep queue hides the way
    /// there and back; prefill nodes are long, and what is queued delays a decode step that comes in.
    fn max_queued(self) -> usize {
        match self {
            Self::Decode => 64,
            Self::Prefill => 2,
        }
    }
}

/// One forward pass to do.
#[derive(Debug)]
pub struct Step {
    pub graph: Arc<StepGraph>,
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

struct InFlight {
    run: Arc<StepRun>,
    priority: Priority,
    placement: Vec<DeviceId>,
    /// Per node: predecessors that keep it from being queued.
    waiting_for: Vec<u32>,
    /// Per node: nodes that have it as a predecessor.
    successors: Vec<Vec<NodeId>>,
    /// Nodes that may be queued, but for earlier steps.
    ready: BTreeSet<NodeId>,
    /// Per layer: nodes touching its state that are not done.
    state_users_left: BTreeMap<Scope, u32>,
    /// Earlier steps with a sequence of this one.
    earlier: Vec<StepId>,
    queued: usize,
    left: usize,
    ledger: Ledger,
    start: Instant,
}

/// Runs steps on devices. Driven by one thread: [`Self::submit`] queues, [`Self::next_done`] waits.
pub struct Executor {
    devices: Vec<Arc<dyn Device>>,
    plan: Plan,
    buffers: BufferPool,
    steps: BTreeMap<StepId, InFlight>,
    next_step: u64,
    done: (Sender<Completion>, Receiver<Completion>),
    /// Steps that ended because an earlier one of the same sequence failed, not yet reported.
    given_up: VecDeque<(StepId, String)>,
    totals: Ledger,
}

impl Executor {
    /// `devices[0]` is the primary.
    ///
    /// # Panics
    ///
    /// Without a device.
    pub fn new(devices: Vec<Arc<dyn Device>>, plan: Plan) -> Self {
        assert!(!devices.is_empty(), "an executor needs a primary device");
        Self {
            devices,
            plan,
            buffers: BufferPool::default(),
            steps: BTreeMap::new(),
            next_step: 0,
            done: channel(),
            given_up: VecDeque::new(),
            totals: Ledger::default(),
        }
    }

    /// Queues a step.
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
        if let Err(error) = self.queue_ready() {
            self.steps.remove(&id);
            return Err(error);
        }
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

    /// Waits for the next step to finish.
    ///
    /// # Errors
    ///
    /// If a node failed or a device is gone. Later steps of the same sequences fail too, one call each, since they build on
    /// state that is not to be trusted; the others stay in flight.
    pub fn next_done(&mut self) -> Result<FinishedStep, ExecutorError> {
        if let Some((step, reason)) = self.given_up.pop_front() {
            return Err(ExecutorError::Node { step, reason });
        }
        if self.steps.is_empty() {
            return Err(ExecutorError::Idle);
        }
        loop {
            let completion = self.done.1.recv().expect("the executor holds a sender itself");
            if let Some(finished) = self.complete(completion)? {
                return Ok(finished);
            }
        }
    }

    /// As [`Self::next_done`], but gives up at `until`.
    ///
    /// # Errors
    ///
    /// As [`Self::next_done`].
    pub fn next_done_until(&mut self, until: Instant) -> Result<Option<FinishedStep>, ExecutorError> {
        if let Some((step, reason)) = self.given_up.pop_front() {
            return Err(ExecutorError::Node { step, reason });
        }
        if self.steps.is_empty() {
            return Err(ExecutorError::Idle);
        }
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.done.1.recv_timeout(left) {
                Ok(completion) => {
                    if let Some(finished) = self.complete(completion)? {
                        return Ok(Some(finished));
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => unreachable!("the executor holds a sender itself"),
            }
        }
    }

    /// Takes back the memory of a finished step.
    pub fn recycle(&self, run: StepRun) {
        run.recycle(&self.buffers);
    }

    fn prepare(&self, id: StepId, step: Step) -> InFlight {
        let Step { graph, rows, states, priority } = step;
        let placement = self.plan.place(&graph);
        let mut successors = vec![Vec::new(); graph.nodes().len()];
        let mut waiting_for = Vec::with_capacity(graph.nodes().len());
        let mut state_users_left = BTreeMap::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            let node_id = NodeId(index as u32);
            let before = graph.predecessors(node_id);
            waiting_for.push(before.len() as u32);
            before.iter().for_each(|p| successors[p.0 as usize].push(node_id));
            if !node.state.is_empty() {
                *state_users_left.entry(node.scope).or_insert(0) += 1;
            }
        }
        let ready = (0..waiting_for.len()).filter(|i| waiting_for[*i] == 0).map(|i| NodeId(i as u32)).collect();
        let shares_sequence = |other: &InFlight| {
            other.run.rows().segments.iter().any(|a| rows.segments.iter().any(|b| a.sequence == b.sequence))
        };
        let earlier = self.steps.iter().filter(|(_, other)| shares_sequence(other)).map(|(id, _)| *id).collect();
        let left = graph.nodes().len();
        let run = Arc::new(StepRun::new(id, graph, rows, states, &self.buffers));
        InFlight {
            run,
            priority,
            placement,
            waiting_for,
            successors,
            ready,
            state_users_left,
            earlier,
            queued: 0,
            left,
            ledger: Ledger::default(),
            start: Instant::now(),
        }
    }

    /// Hands over every node that may go, decode steps first, then older steps.
    fn queue_ready(&mut self) -> Result<(), ExecutorError> {
        let mut order: Vec<(Priority, StepId)> = self.steps.iter().map(|(id, step)| (step.priority, *id)).collect();
        order.sort_unstable();
        for (priority, id) in order {
            let decodes = |step: &InFlight| step.priority == Priority::Decode && step.queued > 0;
            if priority == Priority::Prefill && self.steps.values().any(decodes) {
                break;
            }
            self.queue_step(id)?;
        }
        Ok(())
    }

    fn queue_step(&mut self, id: StepId) -> Result<(), ExecutorError> {
        let mut batches: BTreeMap<DeviceId, Vec<NodeId>> = BTreeMap::new();
        loop {
            let step = &self.steps[&id];
            if step.queued >= step.priority.max_queued() {
                break;
            }
            let Some(node) = step.ready.iter().copied().find(|node| !self.waits_for_earlier_step(step, *node)) else {
                break;
            };
            let step = self.steps.get_mut(&id).expect("checked above");
            let device = step.placement[node.0 as usize];
            step.ready.remove(&node);
            step.queued += 1;
            step.ledger.at(step.run.graph().node(node).kind, device).submitted += 1;
            step.release_successors(node, |other| other == device);
            batches.entry(device).or_default().push(node);
        }
        for (device, nodes) in batches {
            let work = Work { run: Arc::clone(&self.steps[&id].run), nodes, done: self.done.0.clone() };
            self.devices[usize::from(device.0)].submit(work)?;
        }
        Ok(())
    }

    fn waits_for_earlier_step(&self, step: &InFlight, node: NodeId) -> bool {
        let node = step.run.graph().node(node);
        if node.state.is_empty() {
            return false;
        }
        let busy = |earlier: &StepId| {
            self.steps.get(earlier).is_some_and(|e| e.state_users_left.get(&node.scope).is_some_and(|left| *left > 0))
        };
        step.earlier.iter().any(busy)
    }

    /// Drops a failed step and every later step that builds on its sequences' state.
    fn give_up(&mut self, failed: StepId) {
        let step = self.steps.remove(&failed).expect("it is in flight");
        self.totals.merge(&step.ledger);
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
            self.totals.merge(&step.ledger);
            self.given_up.push_back((id, format!("{failed}, which computed the tokens before, failed")));
        }
    }

    fn complete(&mut self, completion: Completion) -> Result<Option<FinishedStep>, ExecutorError> {
        let Completion { step: id, node, elapsed_us, result } = completion;
        // A step that failed has been dropped; its last completions may still come in.
        let Some(step) = self.steps.get_mut(&id) else { return Ok(None) };
        let (device, kind) = (step.placement[node.0 as usize], step.run.graph().node(node).kind);
        if let Err(reason) = result {
            step.ledger.at(kind, device).failed += 1;
            self.give_up(id);
            self.queue_ready()?;
            return Err(ExecutorError::Node { step: id, reason });
        }
        let rows = step.run.rows().num_rows() as u64;
        let entry = step.ledger.at(kind, device);
        entry.completed += 1;
        entry.rows += rows;
        entry.busy_us += elapsed_us;
        entry.longest_us = entry.longest_us.max(elapsed_us);
        step.queued -= 1;
        step.left -= 1;
        let scope = step.run.graph().node(node).scope;
        if !step.run.graph().node(node).state.is_empty() {
            *step.state_users_left.get_mut(&scope).expect("counted at the start") -= 1;
        }
        step.release_successors(node, |other| other != device);
        if step.left > 0 {
            self.queue_ready()?;
            return Ok(None);
        }
        let step = self.steps.remove(&id).expect("present above");
        self.queue_ready()?;
        self.totals.merge(&step.ledger);
        Ok(Some(step.finish(id)))
    }
}

impl InFlight {
    /// `node` no longer keeps those of its successors waiting whose device `releases`.
    fn release_successors(&mut self, node: NodeId, releases: impl Fn(DeviceId) -> bool) {
        for successor in std::mem::take(&mut self.successors[node.0 as usize]) {
            let index = successor.0 as usize;
            if releases(self.placement[index]) {
                self.waiting_for[index] -= 1;
                if self.waiting_for[index] == 0 {
                    self.ready.insert(successor);
                }
            } else {
                self.successors[node.0 as usize].push(successor);
            }
        }
    }

    fn finish(self, id: StepId) -> FinishedStep {
        let elapsed = self.start.elapsed();
        let mut run = self.run;
        // The device drops its reference right after reporting the last node.
        let run = loop {
            match Arc::try_unwrap(run) {
                Ok(run) => break run,
                Err(shared) => {
                    run = shared;
                    std::thread::yield_now();
                }
            }
        };
        FinishedStep { ticket: Ticket(id), run, ledger: self.ledger, elapsed }
    }
}
