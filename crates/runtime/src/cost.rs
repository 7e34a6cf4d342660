//! What each kind of projection costs on each device, measured once and kept: the [`CostTable`] (section 9 of the hybrid spec).
//!
//! Every point is measured the way steps run it, through the devices' queues, so launch and hand-over are in it. Read
//! [`crate::choose`] for what is made of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use troika_base::{StepId, StoredTensor};
use troika_device::npu::{
    BankOptions, ChannelWeights, NpuBackend, NpuDevice, NpuError, Procedure, Program, load_banks,
};
use troika_device::run::BufferPool;
use troika_device::{Device, DeviceError, Part, Priority, SequenceState, StateShape, StepRun, Work};
use troika_graph::cost::node_cost;
use troika_graph::{
    Acceptance, Element, GraphBuilder, Kind, Node, NodeId, Op, Scope, Segment, StepGraph, StepRows, ValueId, WeightRef,
    WeightSource,
};

use crate::choose::Choice;
use crate::eligibility::{Eligibility, eligibility};
use crate::estimate::{NodeCost, estimate};
use crate::plan::{DeviceId, projection_key};
use crate::prepare::{Cut, Placement, cut_into_procedures, noise};

/// Fractions of the output channels that engines are measured with.
const FRACTIONS: [f64; 3] = [0.25, 0.5, 0.75];
/// Warm-ups and samples of a short operation.
const SHORT: (usize, usize) = (3, 7);
/// Those of an operation that takes at least [`LONG_MS`]: it varies less, and a load should not take minutes.
const LONG: (usize, usize) = (1, 3);
const LONG_MS: f64 = 40.0;

/// A part of an operation and how long it takes, milliseconds for one tile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Of the output channels.
    pub fraction: f64,
    /// Median.
    pub ms: f64,
}

/// How far one result is from another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Error {
    /// Norm of the difference over the norm of what it should be.
    pub relative: f64,
    /// Of the angle between them.
    pub cosine: f64,
}

impl Error {
    pub(crate) fn between(got: &[f32], want: &[f32]) -> Self {
        let pairs = || got.iter().zip(want).map(|(a, b)| (f64::from(*a), f64::from(*b)));
        let sum = |term: fn(f64, f64) -> f64| pairs().map(|(a, b)| term(a, b)).sum::<f64>();
        let norms = sum(|a, _| a * a).sqrt() * sum(|_, b| b * b).sqrt();
        Self {
            relative: (sum(|a, b| (a - b) * (a - b)) / sum(|_, b| b * b).max(f64::MIN_POSITIVE)).sqrt(),
            cosine: sum(|a, b| a * b) / norms.max(f64::MIN_POSITIVE),
        }
    }

    /// Most, and the least cosine, that results of an operation may be off (spec 9.5).
    const LIMIT: Self = Self { relative: 0.02, cosine: 0.999 };

    /// Within the limits. What is no number is not.
    pub fn is_small(&self) -> bool {
        self.relative <= Self::LIMIT.relative && self.cosine >= Self::LIMIT.cosine
    }

    /// Why the engines must not do it, if they must not.
    pub fn refusal(&self) -> Option<String> {
        let Self { relative, cosine } = Self::LIMIT;
        (!self.is_small()).then(|| {
            format!(
                "off by {:.2} %, cosine {:.5}: {} % and {cosine} are allowed",
                self.relative * 100.0,
                self.cosine,
                relative * 100.0
            )
        })
    }
}

/// What projections of one kind and shape cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperationCost {
    /// [`Kind::name`].
    pub kind: String,
    /// Output channels of all weights, input channels of one group.
    pub shape: [usize; 2],
    /// Layers that have it.
    pub layers: usize,
    /// All of it on the primary device, in its own arithmetic.
    pub primary_ms: f64,
    /// A part on the primary device, in the engine's arithmetic; none if the operation cannot be cut.
    pub primary_part: Option<Point>,
    /// Parts on the engines, all instances together.
    pub engine: Vec<Point>,
    /// All of it on the engines; of several tiles in turn, one tile's share.
    pub whole_ms: Option<f64>,
    /// Engines and primary device together, in balance: from the hand-over to the last part.
    pub region: Option<Point>,
    /// How far the engines' numbers are from the primary device's; none if they do not do all of it.
    pub error: Option<Error>,
}

/// Everything that was measured for a model on a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    /// Rows of a tile.
    pub tile: usize,
    /// The projections that share a layer's input were measured as one.
    pub stack_inputs: bool,
    /// Threads of the primary device beside the engines.
    pub threads: usize,
    /// Threads that it has if engines take no part.
    pub threads_alone: usize,
    /// How much faster it is with those.
    pub speedup_alone: f64,
    /// What the primary device takes for 10^9 floating-point operations of a projection, milliseconds: the measure of
    /// operations that were not measured.
    pub ms_per_gflop: f64,
    /// One per kind and shape.
    pub operations: Vec<OperationCost>,
    /// What only the running model shows; none before it was run.
    pub running: Option<Running>,
}

/// What was measured in the running model, or its first layers, by switching the engines on and off (spec 9.4).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Running {
    /// What the primary device takes for a node with the engines off, by kind and operation.
    pub nodes: Vec<NodeTime>,
    /// How much longer it takes while engines work, which share the memory's bandwidth with it.
    pub primary_slowdown: f64,
    /// How much longer engines take than alone.
    pub engine_slowdown: f64,
    /// What else each operation with engines costs: hand-overs, reports and waiting that no device's time shows, milliseconds.
    pub sync_ms: f64,
    /// A tile of the layers that ran, engines off, milliseconds.
    pub off_ms: f64,
    /// The same with them on.
    pub on_ms: f64,
}

/// What the primary device takes for a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeTime {
    /// [`Kind::name`].
    pub kind: String,
    /// [`Op::name`].
    pub op: String,
    /// Milliseconds on a tile, on average.
    pub ms: f64,
}

/// What devices took for the nodes of some tiles in the running model.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// By kind, operation and device: how often, milliseconds in all.
    times: BTreeMap<(Kind, &'static str, DeviceId), (u32, f64)>,
    /// A tile by the clock on the wall, milliseconds.
    pub tile_ms: f64,
}

impl Seen {
    /// A device took `ms` for a node or its part of one.
    pub fn add(&mut self, node: &Node, device: DeviceId, ms: f64) {
        // All engines together are one: those that share a node work on it at the same time.
        let device = DeviceId(device.0.min(1));
        let (count, sum) = self.times.entry((node.kind, node.op.name(), device)).or_default();
        (*count, *sum) = (*count + 1, *sum + ms);
    }

    /// What the primary device or the engines take for a node like this one, on average.
    fn ms(&self, node: &Node, device: DeviceId) -> Option<f64> {
        let (count, sum) = self.times.get(&(node.kind, node.op.name(), device))?;
        Some(sum / f64::from(*count))
    }
}

impl Running {
    /// What the difference between engines off and on tells. `graph` is the tile that was run; with engines on, prompts of
    /// `tiles` tiles as `choice` has it.
    pub fn of(graph: &Arc<StepGraph>, table: &CostTable, choice: &Choice, off: &Seen, on: &Seen, tiles: usize) -> Self {
        let engines = DeviceId(1);
        let nodes = off.times.iter().filter(|((.., device), _)| *device == DeviceId::PRIMARY);
        let nodes = nodes.map(|((kind, op, _), (count, sum))| {
            let (kind, op) = (kind.name().to_owned(), (*op).to_owned());
            NodeTime { kind, op, ms: sum / f64::from(*count) }
        });
        // Same work off and on: neither cut nor longer where a prompt is.
        let [mut primary, mut engine] = [[0.0; 2]; 2];
        let (mut costs, mut shared) = (Vec::new(), 0);
        for node in graph.nodes() {
            let (off_ms, on_ms) = (off.ms(node, DeviceId::PRIMARY), on.ms(node, DeviceId::PRIMARY));
            let engine_ms = on.ms(node, engines);
            if let Some(engine_ms) = engine_ms {
                shared += 1;
                let alone = choice.engine_ms(table, node);
                engine = [engine[0] + alone.unwrap_or(engine_ms), engine[1] + engine_ms];
            } else if !matches!(node.kind, Kind::Attention | Kind::IndexScores)
                && let (Some(off_ms), Some(on_ms)) = (off_ms, on_ms)
            {
                primary = [primary[0] + off_ms, primary[1] + on_ms];
            }
            costs.push(NodeCost { primary_ms: on_ms.unwrap_or(0.0), engine_ms });
        }
        let ratio = |[alone, together]: [f64; 2]| if alone > 0.0 { (together / alone).max(1.0) } else { 1.0 };
        let explained = estimate(graph, &costs, 0.0, choice.wavefront, tiles).tile_ms;
        Self {
            nodes: nodes.collect(),
            primary_slowdown: ratio(primary),
            engine_slowdown: ratio(engine),
            sync_ms: if shared > 0 { (on.tile_ms - explained).max(0.0) / f64::from(shared) } else { 0.0 },
            off_ms: off.tile_ms,
            on_ms: on.tile_ms,
        }
    }
}

impl CostTable {
    /// What was measured of the projection `node`.
    pub(crate) fn operation(&self, node: &Node) -> Option<usize> {
        projection_key(&node.op)?;
        let shape = shape_of(&node.op.weights());
        self.operations.iter().position(|cost| cost.kind == node.kind.name() && cost.shape == shape)
    }

    /// What the primary device takes for each node of `graph`, milliseconds.
    pub(crate) fn node_ms(&self, graph: &StepGraph) -> Vec<f64> {
        let ms = |node: &Node| {
            if let Some(index) = self.operation(node) {
                return self.operations[index].primary_ms;
            }
            let measured = self.running.iter().flat_map(|running| &running.nodes);
            let mut same = measured.filter(|time| time.kind == node.kind.name() && time.op == node.op.name());
            let flops = || node_cost(graph, node, &[segment(graph.num_rows())], &|_| 0).flops;
            same.next().map_or_else(|| flops() * 1e-9 * self.ms_per_gflop, |time| time.ms)
        };
        graph.nodes().iter().map(ms).collect()
    }
}

/// Output channels of all weights, input channels of one group.
pub(crate) fn shape_of(weights: &[WeightRef]) -> [usize; 2] {
    [weights.iter().map(|weight| weight.rows).sum(), weights[0].cols]
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// A device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An engine refused.
    #[error(transparent)]
    Engine(#[from] NpuError),
    /// An operation failed while it was measured.
    #[error("{operation} failed while it was measured: {reason}")]
    Operation {
        /// Which.
        operation: String,
        /// What the device said.
        reason: String,
    },
    /// There is nothing to measure.
    #[error("no projection of this model can run on the engine")]
    Nothing,
    /// A step of the model failed.
    #[error("a step of the model failed while it was measured: {reason}")]
    Step {
        /// What the executor said.
        reason: String,
    },
}

/// Who computes.
pub struct Bench<'a> {
    /// The primary device with the threads that it has beside the engines, and the weights of [`representatives`].
    pub primary: &'a dyn Device,
    /// The same with the threads that it has without engines; needs no weights.
    pub alone: &'a dyn Device,
    /// The engines.
    pub backend: &'a Arc<dyn NpuBackend>,
    /// Rounds a tensor to one scale per output channel.
    pub pack: &'a dyn Fn(&StoredTensor) -> ChannelWeights,
}

/// One eligible projection of each kind and shape, and how many layers have it.
pub fn representatives(
    graph: &StepGraph,
    source: &dyn WeightSource,
    backend: &dyn NpuBackend,
) -> Vec<(Eligibility, usize)> {
    type Shapes = Vec<[usize; 2]>;
    let mut found: BTreeMap<(Kind, Shapes), (Eligibility, usize)> = BTreeMap::new();
    for projection in eligibility(graph, source, backend.limits()) {
        if projection.is_eligible() && Kind::projections().contains(&projection.kind) {
            let shapes = projection.weights.iter().map(|weight| [weight.rows, weight.cols]).collect();
            found.entry((projection.kind, shapes)).or_insert((projection, 0)).1 += 1;
        }
    }
    found.into_values().collect()
}

/// Measures every kind and shape of projection on a tile of noise. `progress` hears how many of how many are done.
///
/// # Errors
///
/// If a device cannot do what it is to be measured with.
pub fn calibrate(
    graph: &StepGraph,
    source: &dyn WeightSource,
    bench: &Bench<'_>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<CostTable, CalibrationError> {
    let tile = graph.num_rows();
    let projections = representatives(graph, source, &**bench.backend);
    let (mut operations, mut largest) = (Vec::new(), None);
    for (done, (projection, layers)) in projections.iter().enumerate() {
        progress(done, projections.len());
        let mut measured = Operation::new(graph, source, bench, projection)?;
        let cost = measured.cost(*layers)?;
        // How the primary device scales is told by what takes it longest; with the same threads it is the same device.
        if bench.primary.capabilities().threads != bench.alone.capabilities().threads
            && let Some((procedure, part)) = measured.sample_part()
            && largest.as_ref().is_none_or(|(ms, _)| part.ms > *ms)
        {
            let alone = measured.sample(|operation| operation.time(&[], Some((bench.alone, &procedure))))?;
            largest = Some((part.ms, part.ms / alone));
        }
        operations.push(cost);
    }
    progress(projections.len(), projections.len());
    if operations.is_empty() {
        return Err(CalibrationError::Nothing);
    }
    let gflop = |projection: &Eligibility| 2e-9 * (projection.work() as usize * tile) as f64;
    let gflops: f64 = projections.iter().map(|(projection, layers)| gflop(projection) * *layers as f64).sum();
    let ms: f64 = operations.iter().map(|cost| cost.primary_ms * cost.layers as f64).sum();
    Ok(CostTable {
        stack_inputs: false,
        tile,
        threads: bench.primary.capabilities().threads,
        threads_alone: bench.alone.capabilities().threads,
        // More threads are no slower: what says so is the noise of a short operation.
        speedup_alone: largest.map_or(1.0, |(_, speedup)| speedup.max(1.0)),
        ms_per_gflop: ms / gflops,
        operations,
        running: None,
    })
}

fn segment(rows: usize) -> Segment {
    let sequence = troika_base::SequenceId(0);
    Segment { sequence, row: 0, rows, position: 0, acceptance: Acceptance::Whole }
}

/// A projection that is being measured: a step with nothing else in it.
struct Operation<'a> {
    graph: &'a StepGraph,
    bench: &'a Bench<'a>,
    projection: &'a Eligibility,
    packed: Vec<Arc<ChannelWeights>>,
    run: Arc<StepRun>,
    next_id: u32,
    part: Option<(Arc<Procedure>, Point)>,
}

/// The node that makes the input, which is written instead, and the one that is measured.
const MEASURED: NodeId = NodeId(1);

impl<'a> Operation<'a> {
    fn new(
        graph: &'a StepGraph,
        source: &dyn WeightSource,
        bench: &'a Bench<'a>,
        projection: &'a Eligibility,
    ) -> Result<Self, CalibrationError> {
        let node = graph.nodes().iter().find(|node| projection_key(&node.op) == Some(projection.key));
        let node = node.expect("projections come from this graph");
        let tile = graph.num_rows();
        let mut builder = GraphBuilder::new(tile, 0);
        let input = builder.value(graph.value(node.inputs[0]).cols, Element::F32);
        let outputs: Vec<ValueId> =
            node.outputs.iter().map(|value| builder.value(graph.value(*value).cols, Element::F32)).collect();
        let (scope, kind) = (Scope::Model, node.kind);
        let source_node =
            Node { op: Op::ConcatColumns, inputs: vec![], outputs: vec![input], scope, kind, state: vec![] };
        builder.push(source_node);
        builder.push(Node { op: node.op.clone(), inputs: vec![input], outputs, scope, kind, state: vec![] });
        let rows = StepRows { tokens: vec![0; tile], segments: vec![segment(tile)], logit_rows: Vec::new() };
        let states = vec![Arc::new(SequenceState::new(&StateShape::default()))];
        let run = StepRun::new(StepId(0), Arc::new(builder.build()), rows, states, &BufferPool::default());
        let len = run.len(input);
        run.write_f32(input)[..len].copy_from_slice(&noise(len));
        let tensors = projection.weights.iter().map(|weight| source.tensor(weight.key).expect("it is eligible"));
        let packed = tensors.map(|tensor| Arc::new((bench.pack)(&tensor))).collect();
        Ok(Self { graph, bench, projection, packed, run: Arc::new(run), next_id: 0, part: None })
    }

    fn cost(&mut self, layers: usize) -> Result<OperationCost, CalibrationError> {
        let primary_ms = self.sample(|operation| operation.node())?;
        let want = self.outputs();
        let (mut whole_ms, mut error) = (None, None);
        if let Some(placed) = self.placed(Placement::Whole)? {
            whole_ms = Some(self.sample(|operation| operation.region(&placed))? / placed.tiles_at_once());
            error = Some(Error::between(&self.outputs(), &want));
        }
        let (mut engine, mut primary_part, mut region) = (Vec::new(), None, None);
        for fraction in FRACTIONS {
            let Some(placed) = self.placed(Placement::Split(fraction))? else { continue };
            let ms = self.sample(|operation| operation.time(&placed.engine_parts(), None))?;
            let share = placed.fraction(self.projection);
            engine.push(Point { fraction: share, ms });
            if fraction == 0.5
                && let Some(procedure) = &placed.cut.primary
            {
                let primary = self.bench.primary;
                let ms = self.sample(|operation| operation.time(&[], Some((primary, procedure))))?;
                let point = Point { fraction: 1.0 - share, ms };
                self.part = Some((Arc::clone(procedure), point));
                primary_part = Some(point);
            }
        }
        if let Some(fraction) = primary_part.and_then(|part| balance(&engine, part))
            && let Some(placed) = self.placed(Placement::Split(fraction))?
        {
            let ms = self.sample(|operation| operation.region(&placed))?;
            region = Some(Point { fraction: placed.fraction(self.projection), ms });
        }
        let shape = shape_of(&self.projection.weights);
        let kind = self.projection.kind.name().to_owned();
        Ok(OperationCost { kind, shape, layers, primary_ms, primary_part, engine, whole_ms, region, error })
    }

    /// Everything that the last run wrote.
    fn outputs(&self) -> Vec<f32> {
        self.run.graph().node(MEASURED).outputs.iter().flat_map(|value| self.run.copy_f32(*value)).collect()
    }

    fn sample_part(&self) -> Option<(Arc<Procedure>, Point)> {
        self.part.clone()
    }

    /// Loads the projection onto the engines; `None` if it cannot be cut so.
    fn placed(&mut self, placement: Placement) -> Result<Option<Placed>, CalibrationError> {
        let (backend, tile) = (self.bench.backend, self.graph.num_rows());
        let (limits, next_id) = (backend.limits(), &mut self.next_id);
        let cut = cut_into_procedures(self.graph, self.projection, placement, &self.packed, limits, tile, next_id);
        let Some(mut cut) = cut else { return Ok(None) };
        cut.engine.truncate(limits.instances);
        let program = |procedure: &Arc<Procedure>| -> Result<Program, NpuError> {
            Ok((Arc::clone(procedure), Arc::new(backend.compile(procedure)?)))
        };
        let programs: Vec<Vec<Program>> =
            cut.engine.iter().map(|procedure| Ok(vec![program(procedure)?])).collect::<Result<_, NpuError>>()?;
        let banks = load_banks(&**backend, &BankOptions { programs, benefits: vec![1.0] });
        if let (false, Some(error)) = (banks.dropped.is_empty(), banks.last_error) {
            return Err(error.into());
        }
        let start = |(instance, banks)| NpuDevice::start(Arc::clone(backend), instance, banks);
        let devices = banks.instances.into_iter().enumerate().map(start).collect::<Result<_, _>>()?;
        Ok(Some(Placed { cut, devices }))
    }

    /// Engines and primary device together.
    fn region(&self, placed: &Placed) -> Result<f64, CalibrationError> {
        let primary = self.bench.primary;
        self.time(&placed.engine_parts(), placed.cut.primary.as_ref().map(|procedure| (primary, procedure)))
    }

    /// All of it on the primary device.
    fn node(&self) -> Result<f64, CalibrationError> {
        self.run_all(&[(self.bench.primary, None)])
    }

    /// Parts on engines and maybe one on the primary device.
    fn time(
        &self,
        engines: &[(&NpuDevice, &Arc<Procedure>)],
        primary: Option<(&dyn Device, &Arc<Procedure>)>,
    ) -> Result<f64, CalibrationError> {
        let engines = engines.iter().map(|(device, procedure)| (*device as &dyn Device, Some(*procedure)));
        let all: Vec<_> = engines.chain(primary.map(|(device, procedure)| (device, Some(procedure)))).collect();
        self.run_all(&all)
    }

    /// Milliseconds from the first hand-over to the last report.
    fn run_all(&self, parts: &[(&dyn Device, Option<&Arc<Procedure>>)]) -> Result<f64, CalibrationError> {
        let (done, reports) = channel();
        let start = Instant::now();
        for (id, (device, procedure)) in parts.iter().enumerate() {
            let rows = 0..self.graph.num_rows();
            let part = procedure.map(|procedure| Part { id: id as u32, procedure: Arc::clone(procedure), rows });
            let (run, nodes, done) = (Arc::clone(&self.run), vec![MEASURED], done.clone());
            device.submit(Work { run, nodes, part, priority: Priority::Prefill, feeds: false, done })?;
        }
        drop(done);
        while parts.iter().any(|(device, _)| device.drive(&mut |_| false)) {}
        for report in reports {
            if let Some(reason) = report.failure {
                return Err(CalibrationError::Operation { operation: self.projection.key.to_string(), reason });
            }
        }
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    /// The median of some runs behind some warm-ups.
    fn sample(&self, run: impl Fn(&Self) -> Result<f64, CalibrationError>) -> Result<f64, CalibrationError> {
        let first = run(self)?;
        let (warm_ups, samples) = if first < LONG_MS { SHORT } else { LONG };
        for _ in 1..warm_ups {
            run(self)?;
        }
        let mut ms = (0..samples).map(|_| run(self)).collect::<Result<Vec<f64>, _>>()?;
        ms.sort_by(f64::total_cmp);
        Ok(ms[samples / 2])
    }
}

/// A projection on the engines.
struct Placed {
    cut: Cut,
    devices: Vec<NpuDevice>,
}

impl Placed {
    fn engine_parts(&self) -> Vec<(&NpuDevice, &Arc<Procedure>)> {
        // Of tiles that go to the instances in turn, only the first is measured: its outputs are all channels.
        let parts = if self.cut.turns { 1 } else { self.devices.len() };
        self.devices.iter().zip(&self.cut.engine).take(parts).collect()
    }

    fn tiles_at_once(&self) -> f64 {
        if self.cut.turns { self.devices.len() as f64 } else { 1.0 }
    }

    /// Of the work, what engines do.
    fn fraction(&self, projection: &Eligibility) -> f64 {
        self.cut.engine.iter().map(|procedure| procedure.work()).sum::<u64>() as f64 / projection.work() as f64
    }
}

/// The line through points, by least squares: what takes no time to speak of per channel, and per whole operation.
pub(crate) fn line(points: &[Point]) -> Option<(f64, f64)> {
    let n = points.len() as f64;
    let mean = |of: fn(&Point) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.fraction), mean(|p| p.ms));
    let spread: f64 = points.iter().map(|p| (p.fraction - x).powi(2)).sum();
    if points.is_empty() || spread <= 0.0 {
        return None;
    }
    let slope = points.iter().map(|p| (p.fraction - x) * (p.ms - y)).sum::<f64>() / spread;
    Some((y - slope * x, slope))
}

/// The fraction at which engines and primary device take the same time (spec 9.3).
pub(crate) fn balance(engine: &[Point], primary: Point) -> Option<f64> {
    let (launch, per_all) = line(engine)?;
    let primary_all = primary.ms / primary.fraction;
    let fraction = (primary_all - launch) / (per_all + primary_all);
    (fraction > 0.0 && fraction < 1.0).then_some(fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_balanced() {
        let point = |fraction, ms| Point { fraction, ms };
        // An engine of 2 ms launch and 8 ms for everything, a primary device of 10 ms for everything.
        let engine = [point(0.25, 4.0), point(0.5, 6.0), point(0.75, 8.0)];
        assert_eq!(line(&engine), Some((2.0, 8.0)));
        let fraction = balance(&engine, point(0.5, 5.0)).expect("they can be balanced");
        assert!((fraction - 8.0 / 18.0).abs() < 1e-12, "{fraction}");
        // An engine that needs longer to start than the primary device for everything.
        assert_eq!(balance(&[point(0.25, 22.0), point(0.5, 24.0)], point(0.5, 5.0)), None);
        assert_eq!(balance(&[point(0.5, 24.0)], point(0.5, 5.0)), None, "one point is no line");
    }

    #[test]
    fn errors_are_told_from_noise() {
        let want: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        let scaled = |factor: f32| want.iter().map(|x| x * factor).collect::<Vec<f32>>();
        assert_eq!(Error::between(&want, &want).relative, 0.0);
        assert!(Error::between(&scaled(1.019), &want).is_small());
        assert!(!Error::between(&scaled(1.021), &want).is_small());
        assert!(!Error::between(&scaled(-1.0), &want).is_small());
        assert!(!Error::between(&scaled(f32::NAN), &want).is_small());
    }
}
