//! Order, priority, failure and counting, with completions in the test's hand.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use troika_base::{SequenceId, StepId};
use troika_device::{Capabilities, Completion, Device, DeviceError, DeviceKind, SequenceState, StateShape, Work};
use troika_graph::{
    Acceptance, Access, Element, GraphBuilder, Kind, Node, NodeId, Op, Scope, Segment, StateEdge, StatePart, StepGraph,
    StepRows, WeightSource,
};
use troika_runtime::{DeviceId, Executor, ExecutorError, Plan, Priority, Step};

/// Takes work and completes it when the test says so.
struct Recorder {
    capabilities: Capabilities,
    queue: Mutex<VecDeque<Work>>,
    started: Mutex<Vec<(StepId, NodeId)>>,
}

impl Recorder {
    fn new() -> Arc<Self> {
        let (name, description) = ("recorder".to_owned(), "remembers".to_owned());
        let capabilities = Capabilities { name, kind: DeviceKind::Cpu, description, threads: 1 };
        Arc::new(Self { capabilities, queue: Mutex::default(), started: Mutex::default() })
    }

    /// Does the oldest node in the queue.
    fn step(&self, result: Result<(), String>) -> Option<(StepId, NodeId)> {
        let mut queue = self.queue.lock().expect("not poisoned");
        let work = queue.front_mut()?;
        let (step, node) = (work.run.id(), work.nodes.remove(0));
        self.started.lock().expect("not poisoned").push((step, node));
        // A failed step may have been forgotten.
        let _ = work.done.send(Completion { step, node, elapsed_us: 7, result });
        if work.nodes.is_empty() {
            queue.pop_front();
        }
        Some((step, node))
    }

    /// True if the oldest node in the queue is of `step`.
    fn next_is(&self, step: StepId) -> bool {
        self.queue.lock().expect("not poisoned").front().is_some_and(|work| work.run.id() == step)
    }

    fn queued(&self) -> usize {
        self.queue.lock().expect("not poisoned").iter().map(|work| work.nodes.len()).sum()
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
        self.queue.lock().expect("not poisoned").push_back(work);
        Ok(())
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
fn graph(layers: u16) -> Arc<StepGraph> {
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
    Arc::new(builder.build())
}

fn step(graph: &Arc<StepGraph>, sequence: u64, priority: Priority) -> Step {
    let segment =
        Segment { sequence: SequenceId(sequence), row: 0, rows: 1, position: 0, acceptance: Acceptance::Whole };
    let rows = StepRows { tokens: vec![0], segments: vec![segment], logit_rows: Vec::new() };
    let states = vec![Arc::new(SequenceState::new(&StateShape::default()))];
    Step { graph: Arc::clone(graph), rows, states, priority }
}

fn executor(device: &Arc<Recorder>) -> Executor {
    Executor::new(vec![Arc::clone(device) as Arc<dyn Device>], Plan::Primary)
}

#[test]
fn every_node_runs_once_and_is_counted() {
    let (device, graph) = (Recorder::new(), graph(5));
    let mut executor = executor(&device);
    let nodes = graph.nodes().len();
    let worker = work_off(&device, nodes);
    let ticket = executor.submit(step(&graph, 0, Priority::Prefill)).expect("accepted");
    let done = executor.next_done().expect("finishes");
    worker.join().expect("ends");
    assert_eq!(done.ticket, ticket);
    let order: Vec<u32> = device.started.lock().expect("not poisoned").iter().map(|(_, node)| node.0).collect();
    assert_eq!(order, (0..nodes as u32).collect::<Vec<_>>(), "a chain runs in order");
    let entry = done.ledger.entry(Kind::Attention, DeviceId::PRIMARY);
    assert_eq!((entry.submitted, entry.completed, entry.failed, entry.rows, entry.busy_us), (5, 5, 0, 5, 35));
    let total = executor.totals().total();
    assert_eq!((total.submitted, total.completed), (nodes as u64, nodes as u64));
    assert!(matches!(executor.next_done(), Err(ExecutorError::Idle)));
}

#[test]
fn decode_nodes_go_before_the_next_prefill_node() {
    let (device, graph) = (Recorder::new(), graph(10));
    let mut executor = executor(&device);
    executor.submit(step(&graph, 0, Priority::Prefill)).expect("accepted");
    let ahead = device.queued();
    assert!(ahead <= 2, "{ahead} prefill nodes are queued and would delay a decode step");
    let decode = executor.submit(step(&graph, 1, Priority::Decode)).expect("accepted");
    let nodes = graph.nodes().len();
    let worker = work_off(&device, 2 * nodes);
    let first = executor.next_done().expect("finishes");
    assert_eq!(first.ticket, decode, "the decode step is done first");
    executor.next_done().expect("finishes");
    worker.join().expect("ends");
    let order = device.started.lock().expect("not poisoned");
    let last_decode = order.iter().rposition(|(step, _)| *step == decode.0).expect("it ran");
    let before = order[..last_decode].iter().filter(|(step, _)| *step != decode.0).count();
    assert!(before <= ahead, "{before} prefill nodes ran before the decode step was through");
}

/// Steps of one sequence overlap layer by layer: the later one may not touch a layer's state before the earlier one is through
/// with it. Steps of other sequences do not wait.
#[test]
fn steps_of_one_sequence_follow_each_other_layer_by_layer() {
    for same in [true, false] {
        let (device, graph) = (Recorder::new(), graph(6));
        let mut executor = executor(&device);
        let tickets: Vec<_> = (0..3u64)
            .map(|i| executor.submit(step(&graph, if same { 0 } else { i }, Priority::Prefill)).expect("accepted"))
            .collect();
        let nodes = graph.nodes().len();
        let worker = work_off(&device, 3 * nodes);
        for _ in 0..3 {
            executor.next_done().expect("finishes");
        }
        worker.join().expect("ends");
        let order = device.started.lock().expect("not poisoned").clone();
        let at = |ticket: usize, node: usize| {
            let wanted = (tickets[ticket].0, NodeId(node as u32));
            order.iter().position(|done| *done == wanted).expect("ran")
        };
        let mut overlaps = 0;
        for later in 1..3 {
            for layer in 0..6 {
                // Nodes of a layer: write, read, none; the first node of all is the embedding.
                let (write, read) = (1 + 3 * layer, 2 + 3 * layer);
                if same {
                    assert!(at(later, write) > at(later - 1, read), "step {later}, layer {layer}");
                }
                overlaps += usize::from(at(later, write) < at(later - 1, nodes - 1));
            }
        }
        assert!(overlaps > 0, "steps in flight overlap");
    }
}

#[test]
fn a_failed_node_ends_its_step_and_no_other() {
    let (device, graph) = (Recorder::new(), graph(3));
    let mut executor = executor(&device);
    let failing = executor.submit(step(&graph, 0, Priority::Decode)).expect("accepted");
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
    let other = executor.submit(step(&graph, 0, Priority::Decode)).expect("accepted");
    let until = device.started.lock().expect("not poisoned").len() + graph.nodes().len();
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
    let (device, graph) = (Recorder::new(), graph(3));
    let mut executor = executor(&device);
    let mut submit = |sequence| executor.submit(step(&graph, sequence, Priority::Prefill)).expect("accepted");
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
