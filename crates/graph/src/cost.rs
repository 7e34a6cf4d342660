//! What a step costs: floating-point operations of its products, and bytes of weights, activations and state. Counted
//! from the graph alone, so it holds for hardware we do not own (model spec, section 12: FLOP = 2 x multiply-adds; element-wise
//! arithmetic is left out of the FLOPs and shows in the bytes).

use std::collections::BTreeMap;
use std::ops::AddAssign;

use crate::op::{AttentionPattern, Kind, Op};
use crate::step::{Node, Segment, StepGraph};
use crate::weights::{Role, WeightRef};

/// Cost of a node or of many.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub nodes: u64,
    pub flops: f64,
    /// Weights read once per step. Of routed experts, the expected part that is touched by at least one token.
    pub weight_bytes: f64,
    /// Inputs read and outputs written.
    pub activation_bytes: f64,
    /// State rows read and written.
    pub state_bytes: f64,
}

impl Cost {
    /// All bytes moved.
    pub fn bytes(&self) -> f64 {
        self.weight_bytes + self.activation_bytes + self.state_bytes
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.nodes += other.nodes;
        self.flops += other.flops;
        self.weight_bytes += other.weight_bytes;
        self.activation_bytes += other.activation_bytes;
        self.state_bytes += other.state_bytes;
    }
}

/// Costs of a step by kind, and in all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Costs {
    pub by_kind: BTreeMap<Kind, Cost>,
    pub total: Cost,
}

/// Costs of `graph` run on `segments`; `weight_bytes` tells the stored size of a weight.
pub fn costs(graph: &StepGraph, segments: &[Segment], weight_bytes: &dyn Fn(&WeightRef) -> u64) -> Costs {
    let mut costs = Costs::default();
    for node in graph.nodes() {
        let mut cost = node_cost(graph, node, segments, weight_bytes);
        costs.total += cost;
        // What is stacked with another kind's weight counts as its own.
        for weight in stacked(node) {
            let part = product(&weight, graph.value(node.inputs[0]).rows, weight_bytes);
            *costs.by_kind.entry(Kind::of_projection(weight.key.role)).or_default() += part;
            cost.flops -= part.flops;
            cost.weight_bytes -= part.weight_bytes;
            cost.activation_bytes -= part.activation_bytes;
        }
        *costs.by_kind.entry(node.kind).or_default() += cost;
    }
    costs
}

/// Weights of a query stack that belong to the indexer.
fn stacked(node: &Node) -> Vec<WeightRef> {
    match &node.op {
        Op::Linear { weights } if node.kind == Kind::WqB => {
            weights.iter().filter(|weight| weight.key.role == Role::IndexerWqB).copied().collect()
        }
        _ => Vec::new(),
    }
}

/// One more product with an input that is read anyway.
fn product(weight: &WeightRef, rows: usize, weight_bytes: &dyn Fn(&WeightRef) -> u64) -> Cost {
    Cost {
        nodes: 0,
        flops: 2.0 * (rows * weight.rows * weight.cols) as f64,
        weight_bytes: weight_bytes(weight) as f64,
        activation_bytes: (rows * weight.rows * 4) as f64,
        state_bytes: 0.0,
    }
}

/// Costs of one node of `graph`; see [`costs`].
pub fn node_cost(
    graph: &StepGraph,
    node: &Node,
    segments: &[Segment],
    weight_bytes: &dyn Fn(&WeightRef) -> u64,
) -> Cost {
    let rows = graph.num_rows() as f64;
    let product = |weight: &WeightRef, rows: f64| 2.0 * rows * weight.rows as f64 * weight.cols as f64;
    let stored = |weights: &[WeightRef]| weights.iter().map(|w| weight_bytes(w) as f64).sum::<f64>();
    let value_bytes = node.inputs.iter().chain(&node.outputs).map(|v| graph.value(*v).len() as f64 * 4.0).sum();
    let mut cost = Cost { nodes: 1, activation_bytes: value_bytes, ..Cost::default() };
    cost.weight_bytes = stored(&node.op.weights());
    match &node.op {
        Op::Embed { table, .. } => cost.weight_bytes *= (rows / table.rows as f64).min(1.0),
        Op::HcPre { weights, .. } => cost.flops = product(&weights.fn_, rows),
        Op::HcHead { weights, .. } => cost.flops = product(&weights.fn_, graph.num_logit_rows() as f64),
        Op::Linear { weights } => {
            let rows = graph.value(node.inputs[0]).rows as f64;
            cost.flops = weights.iter().map(|w| product(w, rows)).sum();
        }
        Op::GroupedLinear { weight, .. } => cost.flops = product(weight, rows),
        Op::SharedExpert { w1, w2, w3, .. } => cost.flops = product(w1, rows) + product(w2, rows) + product(w3, rows),
        Op::Experts { w1, w2, w3, top_k, .. } => {
            // The router spreads `top_k` of `experts` evenly as far as anybody knows before running it.
            let experts = expert_count(graph, node);
            let share = *top_k as f64 / experts;
            let touched = 1.0 - (1.0 - share).powf(rows);
            cost.weight_bytes *= touched;
            cost.flops = w1.iter().chain(w2).chain(w3).map(|w| product(w, rows * share)).sum();
        }
        Op::IndexTopk { indexer } => {
            let visible: f64 = each_position(segments, |t| visible_rows(t, indexer.ratio));
            cost.flops = 2.0 * (indexer.heads * indexer.dim) as f64 * visible;
            cost.state_bytes = rows_read_once(segments, indexer.ratio) * indexer.dim as f64 * 4.0;
        }
        Op::Attend { attention } => {
            let selected = node.inputs.get(1).filter(|_| attention.pattern == AttentionPattern::Causal);
            let most = selected.map_or(usize::MAX, |ids| graph.value(*ids).cols);
            let visible = match attention.pattern {
                AttentionPattern::Causal => each_position(segments, |t| {
                    let compressed = if attention.ratio == 0 { 0 } else { visible_rows(t, attention.ratio).min(most) };
                    (t + 1).min(attention.window) + compressed
                }),
                AttentionPattern::Block => {
                    segments.iter().map(|s| (s.rows * (s.position.min(attention.window) + s.rows)) as f64).sum()
                }
            };
            let width = (attention.heads * attention.head_dim) as f64;
            cost.flops = 4.0 * width * visible;
            let rows = if attention.ratio == 0 { 0.0 } else { rows_read_once(segments, attention.ratio) };
            let window = segments.iter().map(|s| (s.rows + attention.window) as f64).sum::<f64>();
            cost.state_bytes = (rows + window) * attention.head_dim as f64 * 4.0;
        }
        Op::AppendWindow | Op::Compress { .. } => cost.state_bytes = value_bytes,
        Op::MarkovDraft { w2, .. } => cost.flops = product(w2, rows),
        _ => {}
    }
    cost
}

/// Routed experts of the layer: the routing weights are `[T, k]`, so the count comes from the layer's router.
fn expert_count(graph: &StepGraph, node: &Node) -> f64 {
    let router = graph.nodes().iter().find_map(|other| match &other.op {
        Op::Route { router } if other.scope == node.scope => Some(router.experts),
        _ => None,
    });
    router.expect("an experts node has a router in its layer") as f64
}

/// Compressed rows of `ratio` tokens that the token at position `t` sees.
fn visible_rows(t: usize, ratio: usize) -> usize {
    (t + 1) / ratio
}

fn each_position(segments: &[Segment], rows: impl Fn(usize) -> usize) -> f64 {
    segments.iter().flat_map(|s| s.position..s.position + s.rows).map(|t| rows(t) as f64).sum()
}

fn rows_read_once(segments: &[Segment], ratio: usize) -> f64 {
    segments.iter().map(|s| ((s.position + s.rows) / ratio) as f64).sum()
}
