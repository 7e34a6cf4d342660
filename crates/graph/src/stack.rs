//! Products that share an input, as one operation: a *stack* is handed over once, and waits once for all its parts.

use std::collections::BTreeMap;

use crate::op::{Kind, Op};
use crate::step::{GraphBuilder, Node, NodeId, StepGraph, ValueId};
use crate::weights::{Role, Scope, WeightRef};

/// A product with fewer outputs is cheaper alone: engines cannot cut it, and it is no work to speak of.
const LEAST_OUTPUTS: usize = 64;

/// `graph` with products of a layer that share an input as one operation, if `stack_of` the first weight of each says the same: the
/// kind that it is then. The first of them stands for all; work, values and dependencies are those of `graph`.
pub fn stack_products(graph: &StepGraph, stack_of: &dyn Fn(&WeightRef) -> Option<Kind>) -> StepGraph {
    let key = |node: &Node| -> Option<(Scope, ValueId, Kind)> {
        let Op::Linear { weights } = &node.op else { return None };
        let kind = stack_of(&weights[0]).filter(|_| matches!(node.scope, Scope::Layer(_)))?;
        Some((node.scope, node.inputs[0], kind))
    };
    let mut stacks: BTreeMap<(Scope, ValueId, Kind), Vec<NodeId>> = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        if let Some(key) = key(node) {
            stacks.entry(key).or_default().push(NodeId(index as u32));
        }
    }
    let mut builder = GraphBuilder::new(graph.num_rows(), graph.num_logit_rows());
    for value in graph.values() {
        builder.value_of(value.rows, value.cols, value.element);
    }
    for (index, node) in graph.nodes().iter().enumerate() {
        match key(node) {
            None => builder.push(node.clone()),
            Some(key) if stacks[&key][0] == NodeId(index as u32) => {
                let mut all = Node { kind: key.2, op: Op::Linear { weights: Vec::new() }, ..node.clone() };
                all.outputs.clear();
                for member in stacks[&key].iter().map(|id| graph.node(*id)) {
                    all.outputs.extend(&member.outputs);
                    if let (Op::Linear { weights }, Op::Linear { weights: own }) = (&mut all.op, &member.op) {
                        weights.extend(own);
                    }
                }
                builder.push(all);
            }
            Some(_) => {}
        }
    }
    for (tap, value) in graph.taps() {
        builder.tap(tap.scope, tap.name, *value);
    }
    builder.build()
}

/// The stack of a layer's inputs (hybrid spec 4.5), for [`stack_products`]: `wq_a`, `wkv`, the compressors' pairs and the indexer's
/// weights, as far as they are wide enough.
pub fn attention_inputs(weight: &WeightRef) -> Option<Kind> {
    (is_attention_input(weight.key.role) && weight.rows >= LEAST_OUTPUTS).then_some(Kind::AttentionInput)
}

/// Whether a weight multiplies what a layer's attention is given (hybrid spec 4.3).
pub fn is_attention_input(role: Role) -> bool {
    matches!(
        role,
        Role::WqA
            | Role::Wkv
            | Role::CompressorWkv
            | Role::CompressorWgate
            | Role::IndexerCompressorWkv
            | Role::IndexerCompressorWgate
            | Role::IndexerWeightsProj
    )
}
