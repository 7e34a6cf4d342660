//! Order, priority, failure and counting, with completions in the test's hand.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use troika_base::{SequenceId, StepId};
use troika_device::{Capabilities, Device, DeviceError, DeviceKind, Report, SequenceState, StateShape, Work};
use troika_graph::{
    Acceptance, Access, Element, GraphBuilder, Kind, Node, NodeId, Op, Scope, Segment, StateEdge, StatePart, StepGraph,
    StepRows, WeightSource,
};
use troika_runtime::{DeviceId, Executor, ExecutorError, Lane, Plan, Priority, Step, Template, Ticket};

/// Takes work and does it when the test says so, on a thread of the test.
struct Recorder {
    capabilities: Capabilities,
    /// Work and how many of its nodes are done.
    queue: Mutex<VecDeque<(Work, usize)>>,
    started: Mutex<Vec<(StepId, NodeId)>>,
}

impl Recorder {
    fn new() -> Arc<Self> {
        let (name, description) = ("recorder".to_owned(), "remembers".to_owned());
        let capabilities = Capabilities { name, kind: DeviceKind::Cpu, description, threads: 1 };
        Arc::new(Self { capabilities, queue: Mutex::default(), started: Mutex::default() })
    }

    /// Does the next node of the most urgent work in the queue.
    fn step(&self, result: Result<(), String>) -> Option<(StepId, NodeId)> {
        let mut queue = self.queue.lock().expect("not poisoned");
        let most_urgent = (0..queue.len()).min_by_key(|index| queue[*index].0.priority)?;
        let (work, num_done) = &mut queue[most_urgent];
        let (step, node) = (work.run.id(), work.nodes[*num_done]);
        self.started.lock().expect("not poisoned").push((step, node));
        *num_done += usize::from(result.is_ok());
        if result.is_err() || *num_done == work.nodes.len() {
            let (work, num_done) = queue.remove(most_urgent).expect("it is there");
            let (nodes, elapsed_ns) = (work.nodes, vec![7; num_done]);
            // A failed step may have been forgotten.
            let _ = work.done.send(Report { step, nodes, part: None, elapsed_ns, failure: result.err() });
        }
        Some((step, node))
    }

    /// True if the oldest node in the queue is of `step`.
    fn next_is(&self, step: StepId) -> bool {
        self.queue.lock().expect("not poisoned").front().is_some_and(|(work, _)| work.run.id() == step)
    }

    fn queued(&self) -> usize {
        self.queue.lock().expect("not poisoned").iter().map(|(work, num_done)| work.nodes.len() - num_done).sum()
    }
}

impl Device for Recorder {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn load(&self, _: &dyn WeightSource) -> Result<(), DeviceError> {
        Ok(())
    }

    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        self.queue.lock().expect("not poisoned").push_back((work, 0));
        Ok(())
    }

    fn drive(&self, _: &mut dyn FnMut(Instant) -> bool) -> bool {
        false
    }
}

/// Does work on a thread of its own until the executor is gone.
fn work_off(device: &Arc<Recorder>, until: usize) -> std::thread::JoinHandle<()> {
    let device = Arc::clone(device);
    std::thread::spawn(move || {
        while device.started.lock().expect("not poisoned").len() < until {
            if device.step(Ok(())).is_none() {
                std::thread::yield_now();
            }
        }
    })
}

/// Per layer: a write of the layer's window, then a read of it, then a node without state.
fn graph(layers: u16) -> StepGraph {
    let mut builder = GraphBuilder::new(1, 0);
    let mut value = builder.value(1, Element::F32);
    let (inputs, state, scope) = (Vec::new(), Vec::new(), Scope::Model);
    builder.push(Node { op: Op::GatherRows, inputs, outputs: vec![value], scope, kind: Kind::Embed, state });
    for layer in 0..layers {
        let scope = Scope::Layer(layer);
        let edge = |access| vec![StateEdge { scope, part: StatePart::Window, access }];
        let mut push = |op, state, kind| {
            let output = builder.value(1, Element::F32);
            builder.push(Node { op, inputs: vec![value], outputs: vec![output], scope, kind, state });
            value = output;
        };
        push(Op::Copy, edge(Access::Write), Kind::Wkv);
        push(Op::Copy, edge(Access::Read), Kind::Attention);
        push(Op::Copy, Vec::new(), Kind::Gate);
    }
    builder.build()
}

fn step(template: &Arc<Template>, sequence: u64, priority: Priority) -> Step {
    let segment =
        Segment { sequence: SequenceId(sequence), row: 0, rows: 1, position: 0, acceptance: Acceptance::Whole };
    let rows = StepRows { tokens: vec![0], segments: vec![segment], logit_rows: Vec::new() };
    let states = vec![Arc::new(SequenceState::new(&StateShape::default()))];
    Step { template: Arc::clone(template), rows, states, priority }
}

fn executor(device: &Arc<Recorder>) -> Executor {
    Executor::new(vec![Arc::clone(device) as Arc<dyn Device>], Plan::primary())
}

#[test]
fn every_node_runs_once_and_is_counted() {
    let device = Recorder::new();
    let mut executor = executor(&device);
    let template = executor.template(graph(5), Lane::Prefill);
    let nodes = template.graph().nodes().len();
    let ticket = executor.submit(step(&template, 0, Priority::Prefill)).expect("accepted");
    assert_eq!(device.queued(), nodes, "a step is one piece of work");
    let worker = work_off(&device, nodes);
    let done = executor.next_done().expect("finishes");
    worker.join().expect("ends");
    assert_eq!(done.ticket, ticket);
    let order: Vec<u32> = device.started.lock().expect("not poisoned").iter().map(|(_, node)| node.0).collect();
    assert_eq!(order, (0..nodes as u32).collect::<Vec<_>>(), "a chain runs in order");
    let entry = done.ledger.entry(Kind::Attention, DeviceId::PRIMARY);
    assert_eq!((entry.submitted, entry.completed, entry.failed, entry.rows, entry.busy_ns), (5, 5, 0, 5, 35));
    let total = executor.totals().total();
    assert_eq!((total.submitted, total.completed), (nodes as u64, nodes as u64));
    assert!(matches!(executor.next_done(), Err(ExecutorError::Idle)));
}

/// A decode step is not held up by prefill steps of others, and never overtakes one of its own sequence.
#[test]
fn decode_steps_wait_for_their_own_sequence_alone() {
    for same in [true, false] {
        let device = Recorder::new();
        let mut executor = executor(&device);
        let template = executor.template(graph(6), Lane::Prefill);
        let nodes = template.graph().nodes().len();
        let prefill = executor.submit(step(&template, 0, Priority::Prefill)).expect("accepted");
        (0..5).for_each(|_| assert!(device.step(Ok(())).is_some()));
        let decode = executor.submit(step(&template, u64::from(!same), Priority::Decode)).expect("accepted");
        let worker = work_off(&device, 2 * nodes);
        let first = executor.next_done().expect("finishes").ticket;
        executor.next_done().expect("finishes");
        worker.join().expect("ends");
        let order = device.started.lock().expect("not poisoned").clone();
        let at = |ticket: Ticket, node: usize| {
            order.iter().position(|done| *done == (ticket.0, NodeId(node as u32))).expect("ran")
        };
        if same {
            assert_eq!(first, prefill);
            for layer in 0..6 {
                // Nodes of a layer: write, read, none; the first node of all is the embedding.
                let (write, read) = (1 + 3 * layer, 2 + 3 * layer);
                assert!(at(decode, write) > at(prefill, read), "layer {layer}");
            }
        } else {
            assert_eq!(first, decode);
            assert_eq!(at(decode, nodes - 1), 5 + nodes - 1, "no prefill node came between");
        }
    }
}

/// Steps of one lane are queued at once and done in order, whoever's they are.
#[test]
fn steps_of_one_lane_follow_each_other() {
    for same in [true, false] {
        let device = Recorder::new();
        let mut executor = executor(&device);
        let template = executor.template(graph(6), Lane::Prefill);
        let nodes = template.graph().nodes().len();
        let sequence = |i: u64| if same { 0 } else { i };
        let tickets: Vec<_> = (0..3u64)
            .map(|i| executor.submit(step(&template, sequence(i), Priority::Prefill)).expect("accepted"))
            .collect();
        assert_eq!(device.queued(), 3 * nodes, "nothing waits for a report");
        let worker = work_off(&device, 3 * nodes);
        let done: Vec<_> = (0..3).map(|_| executor.next_done().expect("finishes").ticket).collect();
        worker.join().expect("ends");
        assert_eq!(done, tickets);
    }
}

#[test]
fn a_failed_node_ends_its_step_and_no_other() {
    let device = Recorder::new();
    let mut executor = executor(&device);
    let template = executor.template(graph(3), Lane::Prefill);
    let failing = executor.submit(step(&template, 0, Priority::Decode)).expect("accepted");
    assert!(device.step(Ok(())).is_some());
    assert!(device.step(Err("the cable is out".to_owned())).is_some());
    match executor.next_done() {
        Err(ExecutorError::Node { step, reason }) => {
            assert_eq!((step, reason.as_str()), (failing.0, "the cable is out"));
        }
        other => panic!("not an error: {other:?}"),
    }
    // What the device still had queued of it comes in and is ignored.
    while device.step(Ok(())).is_some() {}
    let other = executor.submit(step(&template, 0, Priority::Decode)).expect("accepted");
    let until = device.started.lock().expect("not poisoned").len() + template.graph().nodes().len();
    let worker = work_off(&device, until);
    assert_eq!(executor.next_done().expect("finishes").ticket, other);
    worker.join().expect("ends");
    let total = executor.totals().total();
    assert_eq!(total.failed, 1);
    assert!(total.submitted > total.completed, "what was given up is not counted as done");
}

/// Whoever builds on the state of a failed step fails with it; nobody waits for ever, and others go on.
#[test]
fn a_failure_reaches_the_later_steps_of_its_sequence() {
    let device = Recorder::new();
    let mut executor = executor(&device);
    let template = executor.template(graph(3), Lane::Prefill);
    let mut submit = |sequence| executor.submit(step(&template, sequence, Priority::Prefill)).expect("accepted");
    let (failing, dependents, other) = (submit(0), [submit(0), submit(0)], submit(1));
    while !device.next_is(failing.0) {
        device.step(Ok(()));
    }
    device.step(Err("broken".to_owned()));
    for want in [failing, dependents[0], dependents[1]] {
        match executor.next_done() {
            Err(ExecutorError::Node { step, .. }) => assert_eq!(step, want.0),
            other => panic!("not an error: {other:?}"),
        }
    }
    std::thread::scope(|scope| {
        let done = scope.spawn(|| executor.next_done().expect("finishes").ticket);
        while !done.is_finished() {
            device.step(Ok(()));
            std::thread::yield_now();
        }
        assert_eq!(done.join().expect("ends"), other);
    });
}
