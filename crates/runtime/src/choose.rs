//! Who does what of each operation (a kind of projection of one shape, in all layers that have it), and how many chunks are in
//! flight, chosen from the [`CostTable`] (section 9 of the hybrid spec): candidates are played through by [`crate::estimate`],
//! and the one that makes prompts shortest is taken. The same table always gives the same choice.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use serde::Serialize;
use troika_graph::{Kind, Node, StepGraph};

use crate::cost::{CostTable, OperationCost, line};
use crate::estimate::{Estimate, NodeCost, estimate};
use crate::prepare::{OperationKey, Placement};

/// An operation is split only if that takes at most this part of its time on the primary device.
const NET_BENEFIT: f64 = 0.97;
/// Engines take part, or one more chunk is in flight, only if a tile is predicted to take less than this part of its time
/// without.
const WORTH_IT: f64 = 0.99;
/// Tiles of the prompt that candidates are compared on: its start and end, where devices wait for each other, count too.
const TILES: usize = 8;
/// With several chunks in flight a split operation waits until both devices have come to it, each of which may be in the middle
/// of a long operation of another chunk: splitting 1 % of the work of two chunks made them 17 % slower where the estimate saw
/// them 1 % faster (`flash-slice`, one core and one engine). So a split has to promise more than that.
const SPLIT_RISK: f64 = 1.03;
/// Most chunks in flight.
const MAX_DEPTH: usize = 3;
/// Times that every kind is looked at again, now that the others have changed.
const MAX_PASSES: usize = 4;

/// What was chosen for an operation, and why: milliseconds for one tile of all its layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperationChoice {
    /// Layers that have it.
    pub layers: usize,
    /// As chosen, or what the user said.
    #[serde(skip)]
    pub placement: Placement,
    /// On the primary device.
    pub primary_ms: f64,
    /// All on the engines.
    pub whole_ms: Option<f64>,
    /// Both in balance, synchronization included.
    pub split_ms: Option<f64>,
    /// As placed, what runs beside it left aside.
    pub expected_ms: f64,
    /// Why no engine gets it, whatever it would save and whoever wants it.
    pub refused: Option<String>,
}

/// Everything that was chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// Layers of different shapes may be placed differently.
    #[serde(skip)]
    pub operations: BTreeMap<OperationKey, OperationChoice>,
    /// Chunks in flight.
    pub wavefront: usize,
    /// Least rows that are worth a padded tile, 0 if none are.
    pub tail_threshold: usize,
    /// A tile with engines, milliseconds.
    pub hybrid_ms: f64,
    /// Of that, what the primary device computes.
    pub primary_busy_ms: f64,
    /// Of that, what the engines compute.
    pub engines_busy_ms: f64,
    /// A tile on the primary device with all threads that it has without engines.
    pub alone_ms: f64,
    /// A tile on the primary device with the threads that it has beside engines.
    pub primary_ms: f64,
    /// A tile if work could be cut anywhere, nobody ever waited and nobody were in another's way: the bound that the table
    /// allows for.
    pub ideal_ms: f64,
}

impl Choice {
    /// True if engines make prompts shorter.
    pub fn pays(&self) -> bool {
        self.places_any() && self.hybrid_ms < WORTH_IT * self.alone_ms
    }

    /// True if engines get anything.
    pub fn places_any(&self) -> bool {
        self.operations.values().any(|choice| choice.placement != Placement::Primary)
    }

    /// Placements of all operations.
    pub fn placements(&self) -> BTreeMap<OperationKey, Placement> {
        self.operations.iter().map(|(key, choice)| (*key, choice.placement)).collect()
    }

    /// What engines take for the projection `node` as chosen, nobody beside them; none if they have no part in it.
    pub(crate) fn engine_ms(&self, table: &CostTable, node: &Node) -> Option<f64> {
        let cost = &table.operations[table.operation(node)?];
        match self.operations.get(&(node.kind, cost.shape))?.placement {
            Placement::Primary => None,
            Placement::Whole => cost.whole_ms,
            Placement::Split(fraction) => parts(cost, fraction)?.engine_ms,
        }
    }
}

/// Chooses for every operation that was measured. `graph` is a tile of the model; `said` are placements that the user insists on,
/// and `wavefront` the chunks in flight.
pub fn choose(
    table: &CostTable,
    graph: &Arc<StepGraph>,
    said: &BTreeMap<Kind, Placement>,
    wavefront: Option<usize>,
) -> Choice {
    let search = Search::new(table, graph, said);
    let depths = wavefront.map_or(1..=MAX_DEPTH, |depth| depth..=depth);
    let (depth, picks, best) = search.best(depths);
    let operations = search.operations.iter().zip(&picks).map(|(ways, pick)| {
        let Way { placement, alone_ms, .. } = ways.options[*pick];
        (ways.key, OperationChoice { placement, expected_ms: alone_ms, ..ways.choice.clone() })
    });
    let operations: BTreeMap<OperationKey, OperationChoice> = operations.collect();
    let primary_ms: f64 = search.node_ms.iter().sum();
    // The rows that take the primary device as long as a tile takes both (spec 4.4).
    let threshold = (table.tile as f64 * best.tile_ms / primary_ms).floor() + 1.0;
    let is_hybrid = operations.values().any(|choice| choice.placement != Placement::Primary);
    let is_padded = is_hybrid && threshold < table.tile as f64;
    Choice {
        operations,
        wavefront: depth,
        tail_threshold: if is_padded { threshold.max(2.0) as usize } else { 0 },
        hybrid_ms: best.tile_ms,
        primary_busy_ms: best.primary_ms,
        engines_busy_ms: best.engine_ms,
        alone_ms: primary_ms / table.speedup_alone,
        primary_ms,
        ideal_ms: search.ideal_ms(),
    }
}

/// One way to do an operation.
struct Way {
    placement: Placement,
    /// Of one layer.
    cost: NodeCost,
    /// All layers, nothing beside them.
    alone_ms: f64,
}

struct Ways {
    key: OperationKey,
    /// The first is the primary device, unless the user said otherwise: then there is one.
    options: Vec<Way>,
    choice: OperationChoice,
}

struct Search<'a> {
    table: &'a CostTable,
    graph: &'a Arc<StepGraph>,
    operations: Vec<Ways>,
    /// On the primary device.
    node_ms: Vec<f64>,
    /// Per node: index into `operations`.
    projections: Vec<Option<usize>>,
}

impl<'a> Search<'a> {
    fn new(table: &'a CostTable, graph: &'a Arc<StepGraph>, said: &BTreeMap<Kind, Placement>) -> Self {
        let sync_ms = table.running.as_ref().map_or(0.0, |running| running.sync_ms);
        let mut operations: Vec<Ways> = Vec::new();
        for cost in &table.operations {
            if let Some(kind) = Kind::projections().into_iter().find(|kind| kind.name() == cost.kind) {
                operations.push(Ways::new(cost, kind, sync_ms, said.get(&kind).copied()));
            }
        }
        operations.sort_by_key(|ways| ways.key);
        let projection = |node: &Node| {
            let key = (node.kind, table.operations[table.operation(node)?].shape);
            operations.iter().position(|ways| ways.key == key)
        };
        let projections = graph.nodes().iter().map(projection).collect();
        Self { table, graph, node_ms: table.node_ms(graph), operations, projections }
    }

    /// What a tile takes if operation `i` is done in way `picks[i]`.
    fn estimate(&self, picks: &[usize], depth: usize) -> Estimate {
        let shared = |projection: &Option<usize>| -> Option<NodeCost> {
            let index = (*projection)?;
            let cost = self.operations[index].options[picks[index]].cost;
            cost.engine_ms.is_some().then_some(cost)
        };
        let is_hybrid = self.projections.iter().any(|node| shared(node).is_some());
        let running = self.table.running.as_ref().filter(|_| is_hybrid);
        let (primary, engine, sync_ms) = running
            .map_or((1.0, 1.0, 0.0), |running| (running.primary_slowdown, running.engine_slowdown, running.sync_ms));
        let costs = self.node_ms.iter().zip(&self.projections).map(|(ms, projection)| match shared(projection) {
            Some(cost) => NodeCost {
                primary_ms: cost.primary_ms * primary,
                engine_ms: cost.engine_ms.map(|engine_ms| engine_ms * engine),
            },
            None => NodeCost { primary_ms: ms * primary, engine_ms: None },
        });
        estimate(self.graph, &costs.collect::<Vec<_>>(), sync_ms, depth, TILES)
    }

    /// Depth, ways and time of the best candidate. One more chunk in flight has to be worth its memory.
    fn best(&self, depths: RangeInclusive<usize>) -> (usize, Vec<usize>, Estimate) {
        let candidates = depths.map(|depth| {
            let (picks, feared_ms) = self.best_at(depth);
            (depth, picks, feared_ms)
        });
        let best = candidates.reduce(|best, next| if next.2 < WORTH_IT * best.2 { next } else { best });
        let (depth, picks, _) = best.expect("there is a depth");
        let estimate = self.estimate(&picks, depth);
        (depth, picks, estimate)
    }

    /// From the best of some starting points, operation by operation to what is better with the others as they are.
    fn best_at(&self, depth: usize) -> (Vec<usize>, f64) {
        let mut best: Option<(Vec<usize>, f64)> = None;
        for picks in self.starts() {
            let feared_ms = self.feared_ms(&picks, depth);
            if best.as_ref().is_none_or(|(_, other)| feared_ms < *other) {
                best = Some((picks, feared_ms));
            }
        }
        let (mut picks, mut least_ms) = best.expect("one start at least");
        for _ in 0..MAX_PASSES {
            let before = least_ms;
            for operation in 0..self.operations.len() {
                for way in 0..self.operations[operation].options.len() {
                    let mut other = picks.clone();
                    other[operation] = way;
                    let tried = self.feared_ms(&other, depth);
                    if tried < least_ms {
                        (picks, least_ms) = (other, tried);
                    }
                }
            }
            // A difference of a thousandth is not worth another look.
            if least_ms > 0.999 * before {
                break;
            }
        }
        (picks, least_ms)
    }

    /// The estimate of a tile, and what splits may cost beyond it: see [`SPLIT_RISK`].
    fn feared_ms(&self, picks: &[usize], depth: usize) -> f64 {
        let tile_ms = self.estimate(picks, depth).tile_ms;
        if depth == 1 {
            return tile_ms;
        }
        let is_split = |(ways, pick): &(&Ways, &usize)| matches!(ways.options[**pick].placement, Placement::Split(_));
        let splits = self.operations.iter().zip(picks).filter(is_split).count();
        tile_ms * SPLIT_RISK.powi(splits as i32)
    }

    /// Nothing on engines; each operation in its fastest way; whole ones, one more at a time, the most worthwhile first.
    fn starts(&self) -> Vec<Vec<usize>> {
        let fastest = |ways: &Ways| {
            let ms = |way: &usize| ways.options[*way].alone_ms;
            (0..ways.options.len()).min_by(|a, b| ms(a).total_cmp(&ms(b))).expect("one way at least")
        };
        let mut starts = vec![vec![0; self.operations.len()], self.operations.iter().map(fastest).collect()];
        let mut wholes: Vec<(f64, usize, usize)> = Vec::new();
        for (index, ways) in self.operations.iter().enumerate() {
            if let Some(way) = ways.options.iter().position(|way| way.placement == Placement::Whole) {
                wholes.push((ways.choice.primary_ms / ways.options[way].alone_ms, index, way));
            }
        }
        wholes.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut picks = vec![0; self.operations.len()];
        for (_, operation, way) in wholes {
            picks[operation] = way;
            starts.push(picks.clone());
        }
        starts
    }

    /// The busier device under the best assignment, any part of any operation on either.
    fn ideal_ms(&self) -> f64 {
        let whole = |ways: &Ways| {
            let way = ways.options.iter().find(|way| way.cost.engine_ms.is_some())?;
            let whole_ms = ways.choice.whole_ms.unwrap_or(way.alone_ms);
            Some((ways.choice.primary_ms, whole_ms))
        };
        let mut movable: Vec<(f64, f64)> = self.operations.iter().filter_map(whole).collect();
        movable.sort_by(|a, b| (b.0 / b.1).total_cmp(&(a.0 / a.1)));
        let (mut primary, mut engine) = (self.node_ms.iter().sum::<f64>(), 0.0);
        for (of_primary, of_engine) in movable {
            let part = ((primary - engine) / (of_primary + of_engine)).clamp(0.0, 1.0);
            primary -= part * of_primary;
            engine += part * of_engine;
        }
        primary.max(engine)
    }
}

impl Ways {
    fn new(cost: &OperationCost, kind: Kind, sync_ms: f64, said: Option<Placement>) -> Self {
        let layers = cost.layers as f64;
        // Wrong is worse than slow.
        let refused = cost.error.and_then(|error| error.refusal());
        let way = |placement, cost: NodeCost| {
            let alone_ms = cost.engine_ms.unwrap_or(0.0).max(cost.primary_ms) * layers;
            Way { placement, cost, alone_ms }
        };
        let primary = || way(Placement::Primary, NodeCost { primary_ms: cost.primary_ms, engine_ms: None });
        let whole_cost = |engine_ms| NodeCost { primary_ms: 0.0, engine_ms: Some(engine_ms) };
        let whole = || cost.whole_ms.map(|ms| way(Placement::Whole, whole_cost(ms)));
        let split = |fraction| parts(cost, fraction).map(|cost| way(Placement::Split(fraction), cost));
        let split_ms = cost.region.map(|region| (region.ms + sync_ms) * layers);
        let options = match (&refused, said) {
            (Some(_), _) | (None, Some(Placement::Primary)) => vec![primary()],
            (None, Some(Placement::Whole)) => vec![whole().unwrap_or_else(primary)],
            (None, Some(Placement::Split(fraction))) => vec![split(fraction).unwrap_or_else(primary)],
            (None, None) => {
                let pays = |ms| ms <= NET_BENEFIT * cost.primary_ms * layers;
                let balanced =
                    cost.region.filter(|_| split_ms.is_some_and(pays)).and_then(|region| split(region.fraction));
                [Some(primary()), whole(), balanced].into_iter().flatten().collect()
            }
        };
        let primary_ms = cost.primary_ms * layers;
        let choice = OperationChoice {
            layers: cost.layers,
            placement: Placement::Primary,
            primary_ms,
            whole_ms: cost.whole_ms.map(|ms| ms * layers),
            split_ms,
            expected_ms: primary_ms,
            refused,
        };
        Self { key: (kind, cost.shape), options, choice }
    }
}

/// What both devices take of an operation whose first `fraction` of channels is the engines', by the lines through what was
/// measured.
fn parts(cost: &OperationCost, fraction: f64) -> Option<NodeCost> {
    let (launch, per_all) = line(&cost.engine)?;
    let part = cost.primary_part?;
    let primary_ms = part.ms / part.fraction * (1.0 - fraction);
    Some(NodeCost { primary_ms, engine_ms: Some(launch + per_all * fraction) })
}

#[cfg(test)]
mod tests {
    use troika_graph::{
        Access, Element, GraphBuilder, Op, Role, Scope, StateEdge, StatePart, ValueId, WeightKey, WeightRef,
    };

    use super::*;
    use crate::cost::{Error, NodeTime, Point, Running};

    const WQ_B: OperationKey = (Kind::WqB, [8, 8]);
    const SHARED: OperationKey = (Kind::SharedExpert, [24, 8]);

    /// Two layers: projection, attention, then routed experts beside a shared one.
    fn graph() -> Arc<StepGraph> {
        let mut builder = GraphBuilder::new(100, 0);
        let mut last = builder.value(8, Element::F32);
        let weight = |scope, role| WeightRef { key: WeightKey { scope, role }, rows: 8, cols: 8 };
        let push = |builder: &mut GraphBuilder, op, inputs: &[ValueId], scope, kind, state: Option<StateEdge>| {
            let output = builder.value(8, Element::F32);
            let (inputs, outputs) = (inputs.to_vec(), vec![output]);
            builder.push(Node { op, inputs, outputs, scope, kind, state: state.into_iter().collect() });
            // Kept, so that memory orders nothing.
            if kind != Kind::RoutedExperts {
                builder.tap(scope, kind.name(), output);
            }
            output
        };
        builder.push(Node {
            op: Op::ConcatColumns,
            inputs: Vec::new(),
            outputs: vec![last],
            scope: Scope::Model,
            kind: Kind::Embed,
            state: Vec::new(),
        });
        for layer in 0..2 {
            let scope = Scope::Layer(layer);
            let edge = StateEdge { scope, part: StatePart::Window, access: Access::Write };
            let weights = vec![weight(scope, Role::WqB)];
            let queries = push(&mut builder, Op::Linear { weights }, &[last], scope, Kind::WqB, None);
            let attention = push(&mut builder, Op::Copy, &[queries], scope, Kind::Attention, Some(edge));
            let [w1, w2, w3] = [Role::SharedW1, Role::SharedW2, Role::SharedW3].map(|role| weight(scope, role));
            let op = Op::SharedExpert { w1, w2, w3, limit: None };
            let shared = push(&mut builder, op, &[attention], scope, Kind::SharedExpert, None);
            let routed = push(&mut builder, Op::Copy, &[attention], scope, Kind::RoutedExperts, None);
            last = push(&mut builder, Op::Add, &[routed, shared], scope, Kind::Gate, None);
        }
        Arc::new(builder.build())
    }

    fn operation(
        kind: Kind,
        outputs: usize,
        primary_ms: f64,
        whole_ms: f64,
        split: Option<(f64, f64)>,
    ) -> OperationCost {
        OperationCost {
            kind: kind.name().to_owned(),
            shape: [outputs, 8],
            layers: 2,
            primary_ms,
            primary_part: Some(Point { fraction: 0.5, ms: primary_ms / 2.0 }),
            engine: vec![Point { fraction: 0.25, ms: 3.0 }, Point { fraction: 0.5, ms: 5.0 }],
            whole_ms: Some(whole_ms),
            region: split.map(|(fraction, ms)| Point { fraction, ms }),
            error: Some(Error { relative: 0.004, cosine: 0.99999 }),
        }
    }

    fn table(sync_ms: f64) -> CostTable {
        let time = |kind: Kind, op: &str, ms| NodeTime { kind: kind.name().to_owned(), op: op.to_owned(), ms };
        let nodes = vec![
            time(Kind::Embed, "concat", 0.0),
            time(Kind::Attention, "copy", 5.0),
            time(Kind::RoutedExperts, "copy", 15.0),
            time(Kind::Gate, "add", 0.0),
        ];
        let (primary_slowdown, engine_slowdown, off_ms, on_ms) = (1.0, 1.0, 0.0, 0.0);
        CostTable {
            stack_inputs: false,
            tile: 100,
            threads: 1,
            threads_alone: 1,
            speedup_alone: 1.0,
            ms_per_gflop: 1.0,
            operations: vec![
                operation(Kind::WqB, 8, 10.0, 9.0, Some((0.5, 6.0))),
                operation(Kind::SharedExpert, 24, 10.0, 16.0, None),
            ],
            running: Some(Running { nodes, primary_slowdown, engine_slowdown, sync_ms, off_ms, on_ms }),
        }
    }

    fn assert_near(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-6, "{got} instead of {want}");
    }

    #[test]
    fn one_chunk_at_a_time_gains_by_splits_and_by_what_runs_beside() {
        let choice = choose(&table(0.0), &graph(), &BTreeMap::new(), Some(1));
        assert_eq!(choice.placements(), BTreeMap::from([(WQ_B, Placement::Split(0.5)), (SHARED, Placement::Whole)]));
        assert_eq!(choice.alone_ms, 2.0 * (10.0 + 5.0 + 10.0 + 15.0));
        // 5 ms each half of the projection, 5 ms attention, 16 ms the shared expert beside 15 ms of routed ones.
        assert_near(choice.hybrid_ms, 2.0 * (5.0 + 5.0 + 16.0));
        assert!(choice.pays());
        // 52 of 80 ms: a tail of 66 rows takes the primary device longer than a tile.
        assert_eq!(choice.tail_threshold, 66);
        // 20 ms of projections become 18 on the engine, then 81 % of the shared experts.
        assert_near(choice.ideal_ms, 80.0 - 20.0 - 20.0 * (60.0 - 18.0) / 52.0);
    }

    #[test]
    fn chunks_in_flight_are_as_many_as_pay() {
        let [one, two, three] =
            [1, 2, 3].map(|depth| choose(&table(0.0), &graph(), &BTreeMap::new(), Some(depth)).hybrid_ms);
        assert!(two < 0.99 * one, "{one} {two} {three}");
        let choice = choose(&table(0.0), &graph(), &BTreeMap::new(), None);
        assert_eq!((choice.wavefront, choice.hybrid_ms), if three < 0.99 * two { (3, three) } else { (2, two) });
        assert!(choice.hybrid_ms >= choice.ideal_ms);
        assert_eq!(choice, choose(&table(0.0), &graph(), &BTreeMap::new(), None));
    }

    #[test]
    fn synchronization_makes_splits_a_loss() {
        let choice = choose(&table(4.0), &graph(), &BTreeMap::new(), Some(1));
        assert!(!matches!(choice.operations[&WQ_B].placement, Placement::Split(_)), "{choice:?}");
        assert_eq!(choice.operations[&WQ_B].split_ms, Some(2.0 * 10.0));
        let choice = choose(&table(1000.0), &graph(), &BTreeMap::new(), None);
        assert_eq!((choice.places_any(), choice.pays(), choice.tail_threshold), (false, false, 0));
    }

    #[test]
    fn a_primary_device_with_all_cores_may_be_faster() {
        let choice = choose(&CostTable { speedup_alone: 2.0, ..table(0.0) }, &graph(), &BTreeMap::new(), None);
        assert_eq!(choice.alone_ms, 40.0);
        assert!(choice.hybrid_ms < 52.0 && !choice.pays());
        // So may one that engines get in the way of.
        let mut table = table(0.0);
        table.running.as_mut().expect("it is there").primary_slowdown = 2.0;
        assert!(!choose(&table, &graph(), &BTreeMap::new(), None).pays());
    }

    #[test]
    fn what_the_user_says_is_done_and_predicted() {
        let said = BTreeMap::from([(Kind::WqB, Placement::Split(0.75)), (Kind::SharedExpert, Placement::Primary)]);
        let choice = choose(&table(0.0), &graph(), &said, Some(1));
        let want = [(WQ_B, Placement::Split(0.75)), (SHARED, Placement::Primary)];
        assert_eq!(choice.placements(), BTreeMap::from(want));
        assert_eq!(choice.operations[&WQ_B].expected_ms, 14.0, "1 ms and 8 ms for everything, twice");
    }

    #[test]
    fn wrong_numbers_are_refused_whatever_they_save() {
        let mut table = table(0.0);
        table.operations[0].error = Some(Error { relative: 0.03, cosine: 0.9995 });
        for said in [BTreeMap::new(), BTreeMap::from([(Kind::WqB, Placement::Whole)])] {
            let choice = choose(&table, &graph(), &said, Some(1));
            let want = [(WQ_B, Placement::Primary), (SHARED, Placement::Whole)];
            assert_eq!(choice.placements(), BTreeMap::from(want));
            assert!(choice.operations[&WQ_B].refused.as_ref().is_some_and(|reason| reason.contains("3.00 %")));
        }
    }
    /// Layers of one kind and two shapes: where the engine is slow, the primary device keeps its layers.
    #[test]
    fn layers_of_other_shapes_are_placed_by_their_own_costs() {
        let graph = {
            let graph = graph();
            let mut builder = GraphBuilder::new(graph.num_rows(), 0);
            for value in graph.values() {
                builder.value_of(value.rows, value.cols, value.element);
            }
            for node in graph.nodes() {
                let mut node = node.clone();
                if let (Op::Linear { weights }, Scope::Layer(1)) = (&mut node.op, node.scope) {
                    weights[0].rows = 16;
                }
                builder.push(node);
            }
            Arc::new(builder.build())
        };
        let mut table = table(0.0);
        let wide = OperationCost { layers: 1, whole_ms: Some(1000.0), region: None, ..table.operations[0].clone() };
        table.operations[0].layers = 1;
        table.operations.push(OperationCost { shape: [16, 8], ..wide });
        let choice = choose(&table, &graph, &BTreeMap::new(), Some(1));
        let want =
            [(WQ_B, Placement::Split(0.5)), ((Kind::WqB, [16, 8]), Placement::Primary), (SHARED, Placement::Whole)];
        assert_eq!(choice.placements(), BTreeMap::from(want));
        assert_near(choice.hybrid_ms, (5.0 + 5.0 + 16.0) + (10.0 + 5.0 + 16.0));
        let said = BTreeMap::from([(Kind::WqB, Placement::Whole)]);
        let choice = choose(&table, &graph, &said, Some(1));
        assert_eq!(choice.operations[&(Kind::WqB, [16, 8])].placement, Placement::Whole, "the user's word is for all");
    }
}
