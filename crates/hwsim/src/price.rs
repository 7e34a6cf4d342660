//! What each node of a graph costs on each device, by the numbers of a profile: `t = a + work · m` (hybrid spec, 12.3).

use std::collections::BTreeMap;

use troika_device::Part;
use troika_device::npu::Body;
use troika_graph::op::AttentionPattern;
use troika_graph::{Node, NodeId, Op, Segment, StepGraph, WeightKey};
use troika_runtime::plan::projection_key;

use crate::SimError;
use crate::form::{Projection, operation_name};
use crate::profile::{Checkpoint, Profile};

/// What the nodes of a graph cost, milliseconds.
pub(crate) trait Prices: Send + Sync {
    /// What a node's times are added up under.
    fn name(&self, node: NodeId) -> &'static str;
    /// A whole node on the primary device.
    fn primary_ms(&self, node: NodeId, segments: &[Segment]) -> f64;
    /// A part on the primary device.
    fn primary_part_ms(&self, node: NodeId, part: &Part) -> f64;
    /// A part on the CPU.
    fn cpu_part_ms(&self, node: NodeId, part: &Part) -> f64;
    /// A part on one instance, which always does a whole tile.
    fn engine_part_ms(&self, node: NodeId, part: &Part) -> f64;
    /// Until it is known that the last part is done.
    fn handover_ms(&self) -> f64;
    /// What joining the parts of an operation costs the primary device; so many rows of it lie in several parts that have to be merged.
    fn join_ms(&self, node: NodeId, rows: usize) -> f64;
}

/// Less than this share of an operation is a part of a split one.
const WHOLE: f64 = 0.999;

/// Prices by a profile.
#[derive(Debug)]
pub(crate) struct ProfilePrices {
    nodes: Vec<Price>,
    tile: f64,
    instances: f64,
    launch_ms: f64,
    handover_ms: f64,
    sync_ms: f64,
    resumed_after: usize,
    /// How many times as long parts of a split operation take, on the primary device and on engines.
    split: [f64; 2],
}

#[derive(Debug)]
struct Price {
    /// What times are added up under.
    name: &'static str,
    /// Of a tile on the primary device.
    primary_ms: f64,
    /// Once per step.
    call_ms: f64,
    resumed_ms: f64,
    /// Of a tile on all instances together.
    engine_ms: f64,
    cpu_ms: f64,
    merge_ms: f64,
    /// Multiply-adds per row, of a projection.
    work: f64,
    /// What grows with the context.
    seen: Option<Seen>,
}

/// Work that depends on how many rows of state a token sees.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// Floating-point operations per visible row, milliseconds each.
    ms_per_row: f64,
    /// Rows of the window, 0 = none.
    window: usize,
    /// Tokens of a row, 0 = none.
    ratio: usize,
    /// Rows that were chosen; as many are read, visible or not.
    chosen: usize,
}

/// What the nodes of a step in which everything happens share among them.
#[derive(Debug)]
pub(crate) struct Totals {
    layers: f64,
    /// Weights of the nodes that times are added up for, by [`weight_of`].
    weights: BTreeMap<&'static str, f64>,
    /// Multiply-adds per row of each projection.
    work: BTreeMap<WeightKey, f64>,
}

impl Totals {
    /// Of a step that selects: others lack the nodes of the selection, and cost less by their price.
    pub(crate) fn of(graph: &StepGraph) -> Self {
        let layers = graph.nodes().iter().filter_map(layer_of).max().map_or(1, |last| last + 1).into();
        let (mut weights, mut work) = (BTreeMap::new(), BTreeMap::new());
        for node in graph.nodes() {
            *weights.entry(name_of(node)).or_insert(0.0) += weight_of(graph, node);
            work.extend(projection_key(&node.op).map(|key| (key, work_of(node))));
        }
        Self { layers, weights, work }
    }

    pub(crate) fn layers(&self) -> f64 {
        self.layers
    }

    /// 0 if there is no such node.
    pub(crate) fn weight(&self, name: &str) -> f64 {
        self.weights.get(name).copied().unwrap_or_default()
    }
}

impl ProfilePrices {
    /// Prices of the nodes of `graph`.
    ///
    /// # Errors
    ///
    /// If the profile has no price of an operation.
    pub(crate) fn of(
        graph: &StepGraph,
        totals: &Totals,
        profile: &Profile,
        checkpoint: &Checkpoint,
    ) -> Result<Self, SimError> {
        // Steps of decode have nodes of their own.
        let own = Totals::of(graph);
        // Times are averages over the layers: of a kind, all nodes together cost so many times what the profile says.
        let scale_of = |node: &Node, name: &str| {
            let all = totals.weights.get(name).or_else(|| own.weights.get(name)).expect("one of them has the node");
            totals.layers * weight_of(graph, node) / all
        };
        let nodes = graph.nodes().iter().map(|node| {
            let name = name_of(node);
            let scale = scale_of(node, name);
            let extra = checkpoint.extra_ms.get(name).copied().unwrap_or(0.0);
            let price = match Projection::of(node) {
                Some(projection) => {
                    let cost = profile.projection(projection)?;
                    Price {
                        name,
                        primary_ms: scale * (cost.primary_ms + extra),
                        call_ms: 0.0,
                        resumed_ms: 0.0,
                        engine_ms: scale * cost.engine_ms,
                        cpu_ms: scale * cost.cpu_ms.unwrap_or_default(),
                        merge_ms: scale * cost.merge_ms,
                        work: projection_key(&node.op)
                            .and_then(|key| totals.work.get(&key))
                            .copied()
                            .unwrap_or_default(),
                        seen: None,
                    }
                }
                None => {
                    let cost = profile.operation(name)?;
                    Price {
                        name,
                        primary_ms: scale * (cost.ms + extra),
                        call_ms: scale * cost.call_ms,
                        resumed_ms: scale * cost.resumed_ms,
                        engine_ms: 0.0,
                        cpu_ms: 0.0,
                        merge_ms: 0.0,
                        work: 0.0,
                        seen: cost.tflops.and_then(|rate| seen(graph, node, rate)),
                    }
                }
            };
            Ok(price)
        });
        Ok(Self {
            nodes: nodes.collect::<Result<_, SimError>>()?,
            tile: profile.tile as f64,
            instances: profile.engines.instances as f64,
            launch_ms: profile.engines.launch_ms,
            handover_ms: profile.join.handover_ms,
            sync_ms: profile.join.sync_ms,
            resumed_after: profile.calls.resumed_after,
            split: profile.slowdown.map_or([1.0; 2], |slowdown| [slowdown.split_primary, slowdown.split_engines]),
        })
    }

    fn price(&self, node: NodeId) -> &Price {
        &self.nodes[node.0 as usize]
    }

    /// What part of the node's multiply-adds.
    fn share(&self, price: &Price, part: &Part) -> f64 {
        let work = match &part.procedure.body {
            Body::SharedExpert { .. } => price.work,
            Body::Products { .. } => part.procedure.work() as f64,
        };
        work / price.work
    }
}

impl Prices for ProfilePrices {
    fn name(&self, node: NodeId) -> &'static str {
        self.price(node).name
    }

    fn primary_ms(&self, node: NodeId, segments: &[Segment]) -> f64 {
        let price = self.price(node);
        let rows: usize = segments.iter().map(|segment| segment.rows).sum();
        let resumed = segments.iter().any(|segment| segment.position > self.resumed_after);
        let seen = price.seen.map_or(0.0, |seen| segments.iter().map(|segment| seen.ms(segment)).sum());
        let call = price.call_ms + if resumed { price.resumed_ms } else { 0.0 };
        price.primary_ms * rows as f64 / self.tile + call + seen
    }

    fn primary_part_ms(&self, node: NodeId, part: &Part) -> f64 {
        let price = self.price(node);
        let share = self.share(price, part);
        let slowdown = if share < WHOLE { self.split[0] } else { 1.0 };
        slowdown * price.primary_ms * share * part.rows.len() as f64 / self.tile
    }

    fn cpu_part_ms(&self, node: NodeId, part: &Part) -> f64 {
        let price = self.price(node);
        price.cpu_ms * self.share(price, part) * part.rows.len() as f64 / self.tile
    }

    fn engine_part_ms(&self, node: NodeId, part: &Part) -> f64 {
        let price = self.price(node);
        let tiles = part.procedure.tile as f64 / self.tile;
        // Of what one instance would do if all of them had all of it.
        let share = self.instances * self.share(price, part);
        let slowdown = if share < WHOLE { self.split[1] } else { 1.0 };
        self.launch_ms + slowdown * price.engine_ms * share * tiles
    }

    fn handover_ms(&self) -> f64 {
        self.handover_ms
    }

    fn join_ms(&self, node: NodeId, rows: usize) -> f64 {
        self.sync_ms + self.price(node).merge_ms * rows as f64 / self.tile
    }
}

impl Seen {
    pub(crate) fn ms(&self, segment: &Segment) -> f64 {
        let (first, last) = (segment.position + 1, segment.position + segment.rows);
        let mut rows = (segment.rows * self.chosen) as f64;
        if self.window > 0 {
            let full = last.saturating_sub(self.window.max(first - 1));
            let growing = segment.rows - full;
            rows += (full * self.window) as f64 + growing as f64 * (2 * first + growing).saturating_sub(1) as f64 / 2.0;
        }
        if self.ratio > 0 {
            rows += blocks_up_to(last, self.ratio) - blocks_up_to(first - 1, self.ratio);
        }
        rows * self.ms_per_row
    }
}

/// Sum of `t div ratio` for `t` from 1 to `last`.
fn blocks_up_to(last: usize, ratio: usize) -> f64 {
    let whole = last / ratio;
    (ratio * whole * whole.saturating_sub(1) / 2 + whole * (last + 1 - whole * ratio)) as f64
}

/// What of a node grows with the context, at a rate.
pub(crate) fn seen(graph: &StepGraph, node: &Node, tflops: f64) -> Option<Seen> {
    let ms_per_flop = 1e-9 / tflops;
    match &node.op {
        Op::IndexTopk { indexer } => {
            let flops = 2.0 * (indexer.heads * indexer.dim) as f64;
            Some(Seen { ms_per_row: flops * ms_per_flop, window: 0, ratio: indexer.ratio, chosen: 0 })
        }
        Op::Attend { attention } if attention.pattern == AttentionPattern::Causal => {
            let flops = 4.0 * (attention.heads * attention.head_dim) as f64;
            let ids = node.inputs.get(1).map(|ids| graph.value(*ids).cols);
            Some(Seen {
                ms_per_row: flops * ms_per_flop,
                window: attention.window,
                ratio: if ids.is_some() { 0 } else { attention.ratio },
                chosen: ids.unwrap_or(0),
            })
        }
        _ => None,
    }
}

/// What a node's price is called.
pub(crate) fn name_of(node: &Node) -> &'static str {
    Projection::of(node).map_or_else(|| operation_name(node), Projection::name)
}

fn layer_of(node: &Node) -> Option<u16> {
    match node.scope {
        troika_graph::Scope::Layer(layer) => Some(layer),
        _ => None,
    }
}

/// Multiply-adds per row.
fn work_of(node: &Node) -> f64 {
    node.op.weights().iter().map(|weight| (weight.rows * weight.cols) as f64).sum()
}

/// How the time of a kind of node is distributed over its nodes.
fn weight_of(graph: &StepGraph, node: &Node) -> f64 {
    match &node.op {
        Op::Linear { .. } | Op::GroupedLinear { .. } | Op::SharedExpert { .. } => work_of(node),
        Op::Experts { w1, .. } => w1.len() as f64,
        _ => {
            let numbers: usize = node.inputs.iter().chain(&node.outputs).map(|value| graph.value(*value).len()).sum();
            numbers as f64 / graph.num_rows() as f64
        }
    }
}

#[cfg(test)]
mod tests {
    use troika_base::SequenceId;
    use troika_graph::Acceptance;

    use super::*;

    #[test]
    fn visible_rows_are_those_of_a_plain_loop() {
        let seen = Seen { ms_per_row: 1.0, window: 128, ratio: 4, chosen: 512 };
        for (position, rows) in [(0, 1), (0, 127), (0, 128), (0, 4096), (100, 50), (126, 3), (4096, 4096), (5, 7)] {
            let segment = Segment { sequence: SequenceId(0), row: 0, rows, position, acceptance: Acceptance::Whole };
            let want: usize = (position..position + rows).map(|t| (t + 1).min(128) + (t + 1) / 4 + 512).sum();
            assert_eq!(seen.ms(&segment), want as f64, "{rows} rows after {position}");
        }
    }
}
