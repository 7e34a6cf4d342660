//! A machine that is here, as it was observed: what each node of a model took on the primary device and on one engine, and what a
//! schedule of these times predicts. The cross-check of the simulator (docs/simulator.md): prices are measured, the schedule, by
//! the executor on the virtual clock, is predicted.
//!
//! Nodes are called by layer, kind and operation. A step and a join cost what is left of a run when its nodes are subtracted.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use troika_base::{NumericClass, SequenceId};
use troika_device::npu::ProcedureId;
use troika_device::{Part, SequenceState, StateShape};
use troika_graph::{Acceptance, Node, NodeId, Scope, Segment, StepGraph, StepRows};
use troika_model::{Emitter, ModelConfig, ModelFacts, StepSignature};
use troika_runtime::plan::{Lane, PlannedProjection, Shares, projection_key};
use troika_runtime::{DeviceId, Executor, Plan, Priority, Step};

use crate::SimError;
use crate::faults::Faults;
use crate::prediction::Predicted;
use crate::price::Prices;
use crate::world::{Machinery, Slowdown, World};

/// What was observed of a model on a machine. Milliseconds.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Observed {
    pub model: String,
    /// Rows of a tile.
    pub tile: usize,
    /// Of each step besides its nodes.
    pub step_ms: f64,
    /// Of each operation with engines besides its parts: until the primary device hears of it, which does other work meanwhile unless it
    /// has a part of the operation; and what it takes the primary device itself.
    pub handover_ms: f64,
    pub sync_ms: f64,
    pub slowdown: Slowdown,
    pub nodes: Vec<ObservedNode>,
}

/// Most rows and the farthest position that are believed: that of the longest context.
const MAX_TOKENS: usize = 1 << 20;

impl Observed {
    /// Fails if a number cannot be of a run: a record comes from a file.
    ///
    /// # Errors
    ///
    /// [`SimError::Malformed`], with what it is.
    pub fn check(&self) -> Result<(), SimError> {
        let malformed = |reason: String| {
            Err(SimError::Malformed { origin: format!("what was observed of {}", self.model), reason })
        };
        if !(1..=MAX_TOKENS).contains(&self.tile) {
            return malformed(format!("tile is {}", self.tile));
        }
        let Slowdown { primary, engines } = self.slowdown;
        if [primary, engines].iter().any(|factor| !(1.0..1e3).contains(factor)) {
            return malformed(format!("slowdown is {primary} and {engines}"));
        }
        let is_time = |ms: f64| (0.0..1e9).contains(&ms);
        if ![self.step_ms, self.handover_ms, self.sync_ms].into_iter().all(is_time) {
            return malformed("step_ms, handover_ms or sync_ms is no time".to_owned());
        }
        for ObservedNode { key, primary, primary_parts, engine_parts } in &self.nodes {
            let whole = primary
                .iter()
                .all(|time| is_time(time.ms) && (1..=MAX_TOKENS).contains(&time.rows) && time.position <= MAX_TOKENS);
            let mut parts = primary_parts.iter().chain(engine_parts);
            if !whole || !parts.all(|time| is_time(time.ms) && time.share > 0.0 && time.share <= 1.0) {
                return malformed(format!(
                    "{} {} has a time, rows, a position or a share that cannot be",
                    key.kind, key.op
                ));
            }
        }
        Ok(())
    }
}

/// A node of the model's steps.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ObservedNode {
    #[serde(flatten)]
    pub key: NodeKey,
    /// All of it on the primary device, with engines off.
    pub primary: Vec<WholeTime>,
    /// Parts on the primary device, and on the engine, on one tile.
    pub primary_parts: Vec<PartTime>,
    pub engine_parts: Vec<PartTime>,
}

/// What a node is called.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
pub struct NodeKey {
    /// Absent for what belongs to no layer.
    pub layer: Option<u16>,
    /// By [`troika_graph::Kind::name`] and [`troika_graph::Op::name`].
    pub kind: String,
    pub op: String,
    /// Which of several.
    pub nth: usize,
}

/// A whole node: its rows, the position of the first, and how long they take.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct WholeTime {
    pub rows: usize,
    pub position: usize,
    pub ms: f64,
}

/// A part of a node on a tile: its share of the multiply-adds, and how long it takes.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct PartTime {
    pub share: f64,
    pub ms: f64,
}

/// Keys of the nodes of a graph, in its order.
fn keys(graph: &StepGraph) -> Vec<NodeKey> {
    let mut seen: BTreeMap<NodeKey, usize> = BTreeMap::new();
    let key = |node: &Node| {
        let layer = if let Scope::Layer(layer) = node.scope { Some(layer) } else { None };
        let first = NodeKey { layer, kind: node.kind.name().to_owned(), op: node.op.name().to_owned(), nth: 0 };
        let count = seen.entry(first.clone()).or_default();
        *count += 1;
        NodeKey { nth: *count - 1, ..first }
    };
    graph.nodes().iter().map(key).collect()
}

/// What share of its projection each procedure of a plan is, by multiply-adds.
fn shares(plan: &Plan) -> BTreeMap<ProcedureId, f64> {
    let of = |PlannedProjection { shares, .. }: &PlannedProjection| match shares {
        Shares::Channels(parts) => {
            let all: u64 = parts.iter().map(|(_, part)| part.work()).sum();
            parts.iter().map(|(_, part)| (part.id, part.work() as f64 / all as f64)).collect()
        }
        Shares::Turns { procedure, .. } => vec![(procedure.id, 1.0)],
    };
    plan.projections().values().flat_map(of).collect()
}

/// One span of a run: a node, or its part of an operation, on a device; milliseconds since the run began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeenSpan {
    pub node: NodeId,
    pub device: DeviceId,
    pub start_ms: f64,
    pub end_ms: f64,
}

/// A step of a run.
pub struct SeenStep<'a> {
    pub graph: &'a StepGraph,
    pub rows: usize,
    pub position: usize,
    pub spans: Vec<SeenSpan>,
}

/// Collects what devices took, by the executor's spans.
#[derive(Debug, Default)]
pub struct Observer {
    /// By node, rows and position.
    whole: BTreeMap<(NodeKey, usize, usize), Vec<f64>>,
    /// By share in millionths, which have an order; and by whether it was the engine's.
    parts: BTreeMap<(NodeKey, bool, u64), Vec<f64>>,
    /// What each step of a run took besides its nodes.
    rests: Vec<f64>,
    /// Of each run with several steps in flight.
    beside: Vec<Vec<Beside>>,
}

/// A device at work in a run with several steps in flight.
#[derive(Debug)]
struct Beside {
    key: NodeKey,
    /// Of an engine's part.
    share: Option<f64>,
    is_engine: bool,
    /// A part on the primary device: what it takes alone is not known.
    is_unknown: bool,
    rows: usize,
    position: usize,
    start_ms: f64,
    end_ms: f64,
}

impl Observer {
    /// A run with engines off, one step after the other, which took `ms` in all.
    pub fn add_off(&mut self, steps: &[SeenStep<'_>], ms: f64) {
        let mut explained = 0.0;
        for step in steps {
            let keys = keys(step.graph);
            for span in &step.spans {
                let key = (keys[span.node.0 as usize].clone(), step.rows, step.position);
                self.whole.entry(key).or_default().push(span.end_ms - span.start_ms);
                explained += span.end_ms - span.start_ms;
            }
        }
        self.rests.push((ms - explained) / steps.len() as f64);
    }

    /// A run with engines as `plan` has it, one step after the other: parts of operations on whole tiles of `tile` rows.
    pub fn add_on(&mut self, steps: &[SeenStep<'_>], plan: &Plan, tile: usize) {
        for step in steps.iter().filter(|step| step.rows == tile) {
            let keys = keys(step.graph);
            for span in &step.spans {
                let Some(share) = planned_share(step.graph.node(span.node), plan, span.device) else { continue };
                let share = (share * 1e6).round() as u64;
                let key = (keys[span.node.0 as usize].clone(), span.device != DeviceId::PRIMARY, share);
                self.parts.entry(key).or_default().push(span.end_ms - span.start_ms);
            }
        }
    }

    /// A run with several steps in flight: how devices slow each other down.
    pub fn add_beside(&mut self, steps: &[SeenStep<'_>], plan: &Plan) {
        let mut run = Vec::new();
        for step in steps {
            let keys = keys(step.graph);
            run.extend(step.spans.iter().map(|span| {
                let share = planned_share(step.graph.node(span.node), plan, span.device);
                let is_engine = span.device != DeviceId::PRIMARY;
                Beside {
                    key: keys[span.node.0 as usize].clone(),
                    share,
                    is_engine,
                    is_unknown: share.is_some() && !is_engine,
                    rows: step.rows,
                    position: step.position,
                    start_ms: span.start_ms,
                    end_ms: span.end_ms,
                }
            }));
        }
        self.beside.push(run);
    }

    /// What was observed, as medians. What an operation with engines costs besides its parts is not known yet.
    pub fn observed(&self, model: &str, tile: usize) -> Observed {
        let mut nodes: BTreeMap<&NodeKey, ObservedNode> = BTreeMap::new();
        let new = |key: &NodeKey| ObservedNode {
            key: key.clone(),
            primary: Vec::new(),
            primary_parts: Vec::new(),
            engine_parts: Vec::new(),
        };
        for ((key, rows, position), times) in &self.whole {
            let time = WholeTime { rows: *rows, position: *position, ms: median(times) };
            nodes.entry(key).or_insert_with(|| new(key)).primary.push(time);
        }
        for ((key, is_engine, share), times) in &self.parts {
            let node = nodes.entry(key).or_insert_with(|| new(key));
            let time = PartTime { share: *share as f64 / 1e6, ms: median(times) };
            if *is_engine { node.engine_parts.push(time) } else { node.primary_parts.push(time) }
        }
        let alone = |beside: &Beside| {
            let node = nodes.get(&beside.key).filter(|_| !beside.is_unknown)?;
            match beside.share {
                Some(share) => node.engine_part_ms(share),
                None => node.whole_ms(beside.rows, beside.position),
            }
        };
        let at_work = |beside: &Beside| AtWork {
            is_engine: beside.is_engine,
            start_ms: beside.start_ms,
            end_ms: beside.end_ms,
            alone_ms: alone(beside),
        };
        let runs: Vec<Vec<AtWork>> = self.beside.iter().map(|run| run.iter().map(at_work).collect()).collect();
        let step_ms = if self.rests.is_empty() { 0.0 } else { median(&self.rests).max(0.0) };
        let (slowdown, nodes) = (slowdown(&runs), nodes.into_values().collect());
        Observed { model: model.to_owned(), tile, step_ms, handover_ms: 0.0, sync_ms: 0.0, slowdown, nodes }
    }
}

/// A device at work on something, in a run with engines.
#[derive(Clone, Copy, Debug, PartialEq)]
struct AtWork {
    is_engine: bool,
    start_ms: f64,
    end_ms: f64,
    /// What it takes with nobody else at work; none if that is not known.
    alone_ms: Option<f64>,
}

/// How much devices slow each other down: what they took beyond what they take alone, over what of that lay beside work of the other.
fn slowdown(runs: &[Vec<AtWork>]) -> Slowdown {
    let of = |is_engine: bool| {
        let (mut longer, mut beside) = (0.0, 0.0);
        for run in runs {
            let others: Vec<&AtWork> = run.iter().filter(|span| span.is_engine != is_engine).collect();
            for span in run.iter().filter(|span| span.is_engine == is_engine) {
                let (Some(alone), took) = (span.alone_ms, span.end_ms - span.start_ms) else { continue };
                let common = |other: &&AtWork| span.end_ms.min(other.end_ms) - span.start_ms.max(other.start_ms);
                let common: f64 = others.iter().map(|other| common(other).max(0.0)).sum();
                longer += took - alone;
                // Of its own time, not of what it took because it was slow.
                beside += if took > 0.0 { alone * (common / took).min(1.0) } else { 0.0 };
            }
        }
        if beside > 0.0 { (1.0 + longer / beside).max(1.0) } else { 1.0 }
    };
    Slowdown { primary: of(false), engines: of(true) }
}

/// The share of a device of a node, if engines take part in it.
fn planned_share(node: &Node, plan: &Plan, device: DeviceId) -> Option<f64> {
    let PlannedProjection { shares: parts, .. } = plan.projections().get(&projection_key(&node.op)?)?;
    let procedure = match parts {
        Shares::Channels(parts) => &parts.iter().find(|(owner, _)| *owner == device)?.1,
        Shares::Turns { procedure, .. } => procedure,
    };
    shares(plan).get(&procedure.id).copied()
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// The value at `x` of the lines through points, and of the nearest point beyond them; none without points.
fn between(points: impl Iterator<Item = (f64, f64)>, x: f64) -> Option<f64> {
    let (mut below, mut above) = (None, None);
    for point in points {
        if point.0 <= x && below.is_none_or(|other: (f64, f64)| point.0 > other.0) {
            below = Some(point);
        }
        if point.0 >= x && above.is_none_or(|other: (f64, f64)| point.0 < other.0) {
            above = Some(point);
        }
    }
    match (below, above) {
        (Some(a), Some(b)) if b.0 > a.0 => Some(a.1 + (b.1 - a.1) * (x - a.0) / (b.0 - a.0)),
        (Some(a), _) => Some(a.1),
        (None, b) => b.map(|b| b.1),
    }
}

impl ObservedNode {
    /// Rows that were never observed are in proportion to the nearest number of rows that was.
    pub(crate) fn whole_ms(&self, rows: usize, position: usize) -> Option<f64> {
        let nearest = self.primary.iter().map(|time| time.rows).min_by_key(|known| known.abs_diff(rows))?;
        let points = self.primary.iter().filter(|time| time.rows == nearest);
        let ms = between(points.map(|time| (time.position as f64, time.ms)), position as f64)?;
        Some(ms * rows as f64 / nearest as f64)
    }

    /// In proportion to the nearest share that was observed.
    fn primary_part_ms(&self, share: f64) -> Option<f64> {
        let nearest = |a: &&PartTime, b: &&PartTime| (a.share - share).abs().total_cmp(&(b.share - share).abs());
        self.primary_parts.iter().min_by(nearest).map(|part| part.ms * share / part.share)
    }

    /// On the line through the least and the greatest share that were observed: an engine takes time for less than nothing, too.
    pub(crate) fn engine_part_ms(&self, share: f64) -> Option<f64> {
        let (first, last) = (self.engine_parts.first()?, self.engine_parts.last()?);
        if last.share <= first.share {
            return Some(first.ms * share / first.share);
        }
        let slope = (last.ms - first.ms) / (last.share - first.share);
        Some((first.ms + slope * (share - first.share)).max(0.0))
    }
}

/// Prices of a graph's nodes by what was observed.
struct ObservedPrices {
    observed: Arc<Observed>,
    /// Of [`Observed::nodes`], and the name that times are added up under.
    nodes: Vec<(usize, &'static str)>,
    shares: Arc<BTreeMap<ProcedureId, f64>>,
}

impl ObservedPrices {
    fn of(
        observed: &Arc<Observed>,
        shares: &Arc<BTreeMap<ProcedureId, f64>>,
        graph: &StepGraph,
    ) -> Result<Self, SimError> {
        let place = |key: &NodeKey| {
            observed.nodes.iter().position(|node| node.key == *key).ok_or_else(|| SimError::Unpriced {
                profile: format!("what was observed of {}", observed.model),
                operation: format!("{key:?}"),
            })
        };
        let names = graph.nodes().iter().map(|node| node.kind.name());
        let nodes = keys(graph).into_iter().zip(names).map(|(key, name)| Ok((place(&key)?, name)));
        let nodes = nodes.collect::<Result<_, SimError>>()?;
        Ok(Self { observed: Arc::clone(observed), nodes, shares: Arc::clone(shares) })
    }

    fn node(&self, node: NodeId) -> &ObservedNode {
        &self.observed.nodes[self.nodes[node.0 as usize].0]
    }

    fn share(&self, part: &Part) -> f64 {
        self.shares.get(&part.procedure.id).copied().expect("parts are of the plan")
    }
}

impl Prices for ObservedPrices {
    fn name(&self, node: NodeId) -> &'static str {
        self.nodes[node.0 as usize].1
    }

    fn primary_ms(&self, node: NodeId, segments: &[Segment]) -> f64 {
        let whole = |segment: &Segment| self.node(node).whole_ms(segment.rows, segment.position).unwrap_or(0.0);
        let nodes: f64 = segments.iter().map(whole).sum();
        nodes + if node.0 == 0 { self.observed.step_ms } else { 0.0 }
    }

    fn primary_part_ms(&self, node: NodeId, part: &Part) -> f64 {
        let (seen, share) = (self.node(node), self.share(part));
        let tile = self.observed.tile;
        let ms = seen.primary_part_ms(share);
        // In its own arithmetic, which is about as fast.
        let ms = ms.or_else(|| Some(seen.whole_ms(tile, 0)? * share));
        ms.unwrap_or(0.0) * part.rows.len() as f64 / tile as f64
    }

    fn cpu_part_ms(&self, _: NodeId, _: &Part) -> f64 {
        unreachable!("there is no CPU besides the primary device")
    }

    fn engine_part_ms(&self, node: NodeId, part: &Part) -> f64 {
        let (seen, share) = (self.node(node), self.share(part));
        seen.engine_part_ms(share).or_else(|| Some(seen.whole_ms(self.observed.tile, 0)? * share)).unwrap_or(0.0)
    }

    fn handover_ms(&self) -> f64 {
        self.observed.handover_ms
    }

    fn join_ms(&self, _: NodeId, _: usize) -> f64 {
        self.observed.sync_ms
    }
}

impl Observed {
    /// With the cost of operations besides their parts, which no span shows, so that two sums of runs come out: `alone`, with one step
    /// in flight, where the primary device waits for all of it, and `beside`, with several, where it does other work until it hears of an
    /// operation. Each is runs and what they took together, milliseconds.
    ///
    /// # Errors
    ///
    /// If a node was not observed.
    pub fn fitted(self, alone: (&[Replay<'_>], f64), beside: (&[Replay<'_>], f64)) -> Result<Self, SimError> {
        let with = |handover_ms: f64, sync_ms: f64| Arc::new(Self { handover_ms, sync_ms, ..self.clone() });
        let sum = |replays: &[Replay<'_>], observed: &Arc<Self>| {
            replays.iter().map(|replay| Ok(replay.predict(observed)?.predicted())).sum::<Result<f64, SimError>>()
        };
        let mut best: Option<(f64, Arc<Self>)> = None;
        for step in 0..=FIT_STEPS {
            let waited = f64::from(step) / f64::from(FIT_STEPS);
            let at = |ms: f64| with(waited * ms, (1.0 - waited) * ms);
            // Nearly a line, so its slope over a small cost tells the cost.
            let (none, some) = (sum(alone.0, &at(0.0))?, sum(alone.0, &at(FIT_MS))?);
            let cost_ms = if some > none { FIT_MS * ((alone.1 - none) / (some - none)).max(0.0) } else { 0.0 };
            let found = at(cost_ms);
            let error = (sum(beside.0, &found)? - beside.1).abs();
            if best.as_ref().is_none_or(|(least, _)| error < *least) {
                best = Some((error, found));
            }
        }
        Ok(Arc::unwrap_or_clone(best.expect("there are steps").1))
    }
}

/// Shares of the cost of an operation that are tried as hand-over, and the cost that tells a slope.
const FIT_STEPS: u32 = 10;
const FIT_MS: f64 = 0.1;

/// A prompt to be predicted.
pub struct Replay<'a> {
    pub config: &'a ModelConfig,
    pub facts: &'a ModelFacts,
    /// Of the real executor, whose primary device and engine are simulated.
    pub plan: &'a Plan,
    /// Of the prompt, the last one not counted: it belongs to decode.
    pub tokens: usize,
    /// Steps in flight.
    pub wavefront: usize,
}

impl Replay<'_> {
    /// Rows of the steps: whole tiles, then what is left.
    pub fn widths(tokens: usize, tile: usize) -> Vec<usize> {
        let tail = tokens % tile;
        std::iter::repeat_n(tile, tokens / tile).chain((tail > 0).then_some(tail)).collect()
    }

    /// Milliseconds until all of it is done, by the executor on a clock whose devices take what was observed.
    ///
    /// # Errors
    ///
    /// If a node was not observed.
    pub fn predict(&self, observed: &Arc<Observed>) -> Result<Predicted<f64>, SimError> {
        let prices = Arc::clone(observed);
        let shares = Arc::new(shares(self.plan));
        let price =
            move |graph: &StepGraph| Ok(Arc::new(ObservedPrices::of(&prices, &shares, graph)?) as Arc<dyn Prices>);
        let machinery = Machinery::pair(&observed.model, observed.slowdown, Box::new(price));
        let world = World::new(machinery, &Faults::default(), false, None);
        let clock = {
            let world = Arc::clone(&world);
            Arc::new(move || world.now())
        };
        let mut executor = Executor::with_clock(world.devices(), self.plan.clone(), clock);
        // Nothing is computed, so there are no numbers to check.
        executor.check_every(u64::MAX);
        let emitter = Emitter::new(self.config.clone(), self.facts.clone());
        let state = Arc::new(SequenceState::new(&StateShape::default()));
        let mut templates = BTreeMap::new();
        let mut position = 0;
        for width in Self::widths(self.tokens, observed.tile) {
            let select = emitter.needs_selection(position + width);
            let template = match templates.get(&(width, select)) {
                Some(known) => Arc::clone(known),
                None => {
                    let template = executor.template(emitter.trunk(&signature(width, select)), Lane::Prefill);
                    world.price(template.graph())?;
                    templates.insert((width, select), Arc::clone(&template));
                    template
                }
            };
            if executor.num_in_flight() == self.wavefront {
                let finished = executor.next_done()?;
                executor.recycle(finished.run);
            }
            let (sequence, acceptance) = (SequenceId(0), Acceptance::Whole);
            let segments = vec![Segment { sequence, row: 0, rows: width, position, acceptance }];
            let rows = StepRows { tokens: vec![0; width], segments, logit_rows: Vec::new() };
            executor.submit(Step { template, rows, states: vec![Arc::clone(&state)], priority: Priority::Prefill })?;
            position += width;
        }
        while executor.num_in_flight() > 0 {
            let finished = executor.next_done()?;
            executor.recycle(finished.run);
        }
        Ok(Predicted(world.now_ns() as f64 / 1e6))
    }
}

fn signature(rows: usize, select: bool) -> StepSignature {
    let class = NumericClass::Fast;
    StepSignature { rows, logit_rows: 0, select, class, draft_context: false, debug_blocks: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        let time = WholeTime { rows: 64, position: 0, ms: 1.0 };
        let key = NodeKey { layer: None, kind: "head".to_owned(), op: "linear".to_owned(), nth: 0 };
        let node = ObservedNode { key, primary: vec![time], primary_parts: Vec::new(), engine_parts: Vec::new() };
        let slowdown = Slowdown { primary: 1.0, engines: 1.0 };
        let (model, nodes) = ("made up".to_owned(), vec![node]);
        let observed = Observed { model, tile: 64, step_ms: 0.0, handover_ms: 0.0, sync_ms: 0.0, slowdown, nodes };
        assert!(observed.check().is_ok());
        let changes: [&dyn Fn(&mut Observed); 6] = [
            &|observed| observed.tile = 0,
            &|observed| observed.step_ms = -1.0,
            &|observed| observed.slowdown.engines = f64::NAN,
            &|observed| observed.nodes[0].primary[0].position = usize::MAX,
            &|observed| observed.nodes[0].primary[0].ms = f64::INFINITY,
            &|observed| observed.nodes[0].engine_parts.push(PartTime { share: 0.0, ms: 1.0 }),
        ];
        for change in changes {
            let mut broken = observed.clone();
            change(&mut broken);
            let error = broken.check().expect_err("it cannot be").to_string();
            assert!(error.starts_with("what was observed of made up: "), "{error}");
        }
    }
    use crate::form::Projection;
    use crate::plan::{Built, Placement, PlanSpec, Shapes, build, pack_shapes};
    use crate::profile::{Formats, Profile};

    const TILE: usize = 64;

    fn nano() -> (ModelConfig, ModelFacts) {
        let config = ModelConfig::from_json(include_str!("../../../models/nano/config.json")).expect("it comes along");
        let facts = ModelFacts::expected(&config);
        (config, facts)
    }

    fn graph((config, facts): &(ModelConfig, ModelFacts)) -> StepGraph {
        Emitter::new(config.clone(), facts.clone()).trunk(&signature(TILE, false))
    }

    fn plan(graph: &StepGraph, place: &[(Projection, Placement)]) -> Plan {
        let mut profile = Profile::named("m3-ultra-512").expect("it comes along");
        let engines = &mut profile.engines;
        (engines.instances, engines.min_tile, engines.channel_alignment, engines.input_alignment) = (1, TILE, 8, 32);
        let mut spec = PlanSpec::primary(TILE);
        spec.place.extend(place.iter().copied());
        let source = Shapes::of(graph, Formats::Official);
        let faults = Faults::default();
        let Built { plan, left_out } = build(graph, &spec, 0, &profile, &source, &faults, false, &mut pack_shapes());
        assert_eq!(left_out, []);
        plan
    }

    const HALF: Placement = Placement::Split { engines: 0.5, cpu: 0.0 };

    /// Each node takes 1 ms, and 0.1 ms more in the second tile; each step 0.5 ms more than its nodes. Halves of wo_b take 0.6 ms on the
    /// primary device and 0.8 ms on the engine, shared experts 3 ms there.
    fn observer(graph: &StepGraph) -> Observer {
        let mut observer = Observer::default();
        let span = |(index, ms): (usize, f64)| {
            let (node, start_ms) = (NodeId(index as u32), index as f64 * 10.0);
            SeenSpan { node, device: DeviceId::PRIMARY, start_ms, end_ms: start_ms + ms }
        };
        let nodes = graph.nodes().len();
        let step = |position: usize, ms: f64| {
            let spans = (0..nodes).map(|index| span((index, ms))).collect();
            SeenStep { graph, rows: TILE, position, spans }
        };
        observer.add_off(&[step(0, 1.0), step(TILE, 1.1)], nodes as f64 * 2.1 + 1.0);
        for place in [&[(Projection::WoB, HALF)][..], &[(Projection::Shared, Placement::Whole)]] {
            let plan = plan(graph, place);
            let planned = (0..nodes).filter(|index| {
                projection_key(&graph.nodes()[*index].op).is_some_and(|key| plan.projections().contains_key(&key))
            });
            let spans = planned.flat_map(|index| {
                let is_split = place[0].1 == HALF;
                let engine = SeenSpan { device: DeviceId(1), ..span((index, if is_split { 0.8 } else { 3.0 })) };
                [is_split.then(|| span((index, 0.6))), Some(engine)].into_iter().flatten()
            });
            observer.add_on(&[SeenStep { graph, rows: TILE, position: 0, spans: spans.collect() }], &plan, TILE);
        }
        observer
    }

    #[test]
    fn what_was_observed_is_predicted() {
        let model = nano();
        let graph = graph(&model);
        let (nodes, layers) = (graph.nodes().len() as f64, model.0.num_hidden_layers as f64);
        let observed = Arc::new(observer(&graph).observed("nano", TILE));
        assert!((observed.step_ms - 0.5).abs() < 1e-9, "{}", observed.step_ms);
        let predict = |observed: &Arc<Observed>, plan: &Plan, tokens, wavefront| {
            let replay = Replay { config: &model.0, facts: &model.1, plan, tokens, wavefront };
            replay.predict(observed).expect("every node was observed").predicted()
        };
        let near = |got: f64, want: f64| assert!((got - want).abs() < 0.01, "{got} instead of {want}");
        // Two tiles, and one and a half: half a tile takes half as long.
        near(predict(&observed, &Plan::primary(), 2 * TILE, 1), 2.1 * nodes + 1.0);
        near(predict(&observed, &Plan::primary(), TILE + TILE / 2, 1), nodes * (1.0 + 0.55) + 1.0);
        // The engine's half takes longest.
        let halves = plan(&graph, &[(Projection::WoB, HALF)]);
        near(predict(&observed, &halves, TILE, 1), nodes - 0.2 * layers + 0.5);
        // A quarter of the primary device's half, in proportion, is less than three quarters of the engine's.
        let quarter = plan(&graph, &[(Projection::WoB, Placement::Split { engines: 0.75, cpu: 0.0 })]);
        near(predict(&observed, &quarter, TILE, 1), nodes + 0.2 * layers + 0.5);
        // Beside the gate, the routed experts and the nodes between them.
        let shared = plan(&graph, &[(Projection::Shared, Placement::Whole)]);
        let alone = predict(&observed, &shared, TILE, 1);
        assert!(alone < nodes + 0.5 && alone > nodes + 0.5 - layers - 0.01, "{alone}");
        let (one, two) = (predict(&observed, &shared, 4 * TILE, 1), predict(&observed, &shared, 4 * TILE, 2));
        assert!(two <= one, "{two} with two chunks in flight, {one} with one");
        // Both are predicted anew from their file.
        let text = serde_json::to_string(&*observed).expect("it is plain data");
        let read: Arc<Observed> = Arc::new(serde_json::from_str(&text).expect("it was written"));
        assert_eq!(predict(&read, &shared, 4 * TILE, 2), two);
    }

    #[test]
    fn the_cost_of_an_operation_is_found_by_runs() {
        let model = nano();
        let graph = graph(&model);
        let plans = [HALF, Placement::Whole].map(|placement| plan(&graph, &[(Projection::WoB, placement)]));
        let bare = observer(&graph).observed("nano", TILE);
        let planted = Arc::new(Observed { handover_ms: 0.4, sync_ms: 0.1, ..bare.clone() });
        let replay = |plan, tokens, wavefront| Replay { config: &model.0, facts: &model.1, plan, tokens, wavefront };
        let alone = plans.each_ref().map(|plan| replay(plan, 3 * TILE, 1));
        let beside = plans.each_ref().map(|plan| replay(plan, 3 * TILE, 2));
        let sum = |replays: &[Replay<'_>]| -> f64 {
            replays.iter().map(|replay| replay.predict(&planted).expect("observed").predicted()).sum()
        };
        let (alone_ms, beside_ms) = (sum(&alone), sum(&beside));
        let fitted = bare.fitted((&alone, alone_ms), (&beside, beside_ms)).expect("observed");
        assert!((fitted.handover_ms - 0.4).abs() < 0.02 && (fitted.sync_ms - 0.1).abs() < 0.02, "{fitted:?}");
        // A node that was never seen is named.
        let none = Arc::new(Observed { nodes: Vec::new(), ..fitted });
        let error = alone[0].predict(&none).expect_err("nothing was observed").to_string();
        assert!(error.contains("embed"), "{error}");
    }

    #[test]
    fn devices_slow_each_other_down_by_what_lies_beside() {
        let span = |is_engine, start_ms, end_ms, alone_ms| AtWork { is_engine, start_ms, end_ms, alone_ms };
        // Of 12 ms half lies beside the engine, so that half was 40 % slower than alone.
        let run =
            vec![span(false, 0.0, 12.0, Some(10.0)), span(true, 6.0, 12.0, Some(6.0)), span(false, 20.0, 30.0, None)];
        assert_eq!(slowdown(&[run]), Slowdown { primary: 1.4, engines: 1.0 });
        assert_eq!(slowdown(&[]), Slowdown::NONE);
    }
}
