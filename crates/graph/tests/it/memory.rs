//! Whatever order a device chooses among those the predecessors allow, a node reads what was written for it.

use proptest::prelude::*;
use troika_graph::{
    Access, Element, GraphBuilder, Kind, Node, NodeId, Op, Scope, StateEdge, StatePart, StepGraph, ValueId,
};

const ROWS: usize = 3;

/// Choices that make up a random graph: per node, an operation, its inputs (counted back), and a width.
#[derive(Clone, Debug)]
struct Choice {
    op: u8,
    inputs: [usize; 2],
    cols: usize,
    state: Option<(u16, bool)>,
}

fn choices() -> impl Strategy<Value = Vec<Choice>> {
    let state = prop::option::of((0u16..3, any::<bool>()));
    let choice = (0u8..4, [0usize..8, 0usize..8], 1usize..5, state);
    prop::collection::vec(choice.prop_map(|(op, inputs, cols, state)| Choice { op, inputs, cols, state }), 1..40)
}

/// A graph of copies, joins and in-place additions. In-place operations take values nobody needs any more.
fn graph(choices: &[Choice], taps: &[usize]) -> StepGraph {
    let mut builder = GraphBuilder::new(ROWS, 0);
    let mut values: Vec<ValueId> = Vec::new();
    let mut readable: Vec<ValueId> = Vec::new();
    for (index, choice) in choices.iter().enumerate() {
        let pick = |back: usize| readable[readable.len() - 1 - back % readable.len()];
        let state = choice.state.map(|(layer, write)| StateEdge {
            scope: Scope::Layer(layer),
            part: StatePart::Window,
            access: if write { Access::Write } else { Access::Read },
        });
        // Taps count values by age, and a tapped value must not be overwritten.
        let tapped = |value: ValueId| taps.contains(&(value.0 as usize % choices.len()));
        let (op, inputs) = match choice.op {
            _ if readable.is_empty() => (Op::GatherRows, Vec::new()),
            0 => (Op::Copy, vec![pick(choice.inputs[0])]),
            1 => (Op::ConcatColumns, vec![pick(choice.inputs[0]), pick(choice.inputs[1])]),
            2 if !tapped(pick(choice.inputs[0])) && pick(choice.inputs[0]) != pick(choice.inputs[1]) => {
                let (a, b) = (pick(choice.inputs[0]), pick(choice.inputs[1]));
                readable.retain(|value| *value != a);
                (Op::Add, vec![a, b])
            }
            _ => (Op::GatherRows, Vec::new()),
        };
        let cols = if matches!(op, Op::Add) { builder.cols(inputs[0]) } else { choice.cols };
        let element = if index % 5 == 4 && !matches!(op, Op::Add) { Element::I32 } else { Element::F32 };
        let output = builder.value(cols, element);
        let kind = Kind::Norm;
        let (scope, state) = (Scope::Model, state.into_iter().collect());
        builder.push(Node { op, inputs, outputs: vec![output], scope, kind, state });
        values.push(output);
        if element == Element::F32 {
            readable.push(output);
        }
    }
    for tap in taps {
        let value = values[tap % values.len()];
        if readable.contains(&value) {
            builder.tap(Scope::Layer(*tap as u16), "kept", value);
        }
    }
    builder.build()
}

/// Runs the nodes in an order chosen by `luck` and checks every read against the writer that was meant.
fn run(graph: &StepGraph, luck: &[usize]) -> Result<(), TestCaseError> {
    let plan = graph.memory();
    let mut held: Vec<Option<ValueId>> = vec![None; plan.slots().len()];
    let mut done = vec![false; graph.nodes().len()];
    let mut state_order: Vec<Vec<NodeId>> = vec![Vec::new(); 3];
    for turn in 0..done.len() {
        let ready: Vec<usize> = (0..done.len())
            .filter(|node| !done[*node])
            .filter(|node| graph.predecessors(NodeId(*node as u32)).iter().all(|p| done[p.0 as usize]))
            .collect();
        let node_index = ready[luck[turn % luck.len()] % ready.len()];
        let node = &graph.nodes()[node_index];
        for input in &node.inputs {
            prop_assert_eq!(held[plan.slot_of(*input).0 as usize], Some(*input), "node {} reads another value", node_index);
        }
        for output in &node.outputs {
            let slot = plan.slot_of(*output);
            held[slot.0 as usize] = Some(*output);
            let value = graph.value(*output);
            prop_assert!(plan.slots()[slot.0 as usize].elements >= value.len());
            prop_assert_eq!(plan.slots()[slot.0 as usize].element, value.element);
        }
        for edge in &node.state {
            if let Scope::Layer(layer) = edge.scope {
                state_order[layer as usize].push(NodeId(node_index as u32));
            }
        }
        done[node_index] = true;
    }
    for value in graph.taps().values() {
        prop_assert_eq!(held[plan.slot_of(*value).0 as usize], Some(*value), "a kept value was overwritten");
    }
    for order in state_order {
        check_state_order(graph, &order)?;
    }
    Ok(())
}

/// Of two users of a state, at least one of them writing, the earlier in the list of nodes ran first.
fn check_state_order(graph: &StepGraph, order: &[NodeId]) -> Result<(), TestCaseError> {
    let writes = |node: &NodeId| graph.node(*node).state.iter().any(|edge| edge.access == Access::Write);
    for (at, first) in order.iter().enumerate() {
        for second in &order[at + 1..] {
            prop_assert!(first < second || !(writes(first) || writes(second)), "{:?} ran before {:?}", first, second);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn every_allowed_order_reads_what_was_written(
        choices in choices(),
        taps in prop::collection::vec(0usize..40, 0..4),
        luck in prop::collection::vec(0usize..1000, 1..20),
    ) {
        run(&graph(&choices, &taps), &luck)?;
    }
}

#[test]
fn slots_are_reused() {
    let mut builder = GraphBuilder::new(ROWS, 0);
    let mut last = None;
    for _ in 0..10 {
        let output = builder.value(7, Element::F32);
        let op = if last.is_some() { Op::Copy } else { Op::GatherRows };
        let inputs = last.into_iter().collect();
        let (scope, kind, state) = (Scope::Model, Kind::Norm, Vec::new());
        builder.push(Node { op, inputs, outputs: vec![output], scope, kind, state });
        last = Some(output);
    }
    let graph = builder.build();
    assert_eq!(graph.memory().slots().len(), 2, "a chain of copies needs two");
    assert_eq!(graph.memory().peak_bytes(), 2 * 7 * ROWS as u64 * 4);
}

#[test]
#[should_panic(expected = "overwrites a value that is used later")]
fn an_in_place_operation_must_not_destroy_what_is_needed() {
    let mut builder = GraphBuilder::new(ROWS, 0);
    let [a, b, sum, again] = std::array::from_fn(|_| builder.value(1, Element::F32));
    let mut push = |op, inputs: &[ValueId], output| {
        let (inputs, outputs) = (inputs.to_vec(), vec![output]);
        let (scope, kind, state) = (Scope::Model, Kind::Norm, Vec::new());
        builder.push(Node { op, inputs, outputs, scope, kind, state });
    };
    push(Op::GatherRows, &[], a);
    push(Op::GatherRows, &[], b);
    push(Op::Add, &[a, b], sum);
    push(Op::Copy, &[a], again);
    builder.build();
}
