//! A machine with a model, and runs on it: the scheduler's chunks through the executor's schedule on simulated devices.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use troika_base::{NumericClass, RequestId, SequenceId};
use troika_device::cpu::{CpuDevice, CpuOptions};
use troika_device::state::{LayerShape, PoolShape};
use troika_device::{Device, SequenceState, StateShape};
use troika_graph::op::Compressor;
use troika_graph::{Acceptance, Op, Scope, Segment, StatePart, StepGraph, StepRows, WeightRef, WeightSource};
use troika_model::synth::Preset;
use troika_model::{Emitter, ModelConfig, ModelFacts, StepSignature};
use troika_runtime::plan::Lane as StepLane;
use troika_runtime::{DeviceId, Executor, Plan, Priority, Step, Template};
use troika_scheduler::{
    Geometry, GeometryRequest, Lane, Limits, NARROWINGS, NewSequence, Part, Scheduler, StateCost, Urgency,
};

use crate::SimError;
use crate::arithmetic::Arithmetic;
use crate::faults::Faults;
use crate::form::{Projection, chain, regroup};
use crate::plan::{Built, LeftOut, Placement, PlanSpec, Shapes, build, pack_shapes};
use crate::prediction::{DeviceUse, OperationRecord, Predicted, Prediction, RecordKind, SCHEMA};
use crate::price::Totals;
use crate::profile::{Chain, Checkpoint, Profile};
use crate::world::{Machinery, Usage, World};

/// A machine, a model on it, and the way it is stored.
pub struct Machine {
    profile: Profile,
    checkpoint: Checkpoint,
    model: String,
    graph: GraphSource,
    /// Emission takes longer than a run.
    graphs: Graphs,
}

/// Where steps come from.
#[derive(Clone)]
enum GraphSource {
    Emitter(Box<Emitter>),
    Chain(Chain),
}

/// What a graph depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Form {
    rows: usize,
    /// Of every layer that has a choice, not only where some row sees more than is chosen.
    selects: bool,
    /// What a layer's attention is given is one operation.
    stacks_inputs: bool,
    /// Shared experts are two operations.
    cuts_shared: bool,
}

impl GraphSource {
    fn of(config: ModelConfig) -> Self {
        let facts = ModelFacts::expected(&config);
        Self::Emitter(Box::new(Emitter::new(config, facts)))
    }

    fn max_tokens(&self) -> usize {
        match self {
            Self::Emitter(emitter) => emitter.config().max_position_embeddings,
            Self::Chain(chain) => chain.max_tokens,
        }
    }

    /// True if a step that sees so many tokens has to choose among them.
    fn needs_selection(&self, context: usize) -> bool {
        match self {
            Self::Emitter(emitter) => emitter.needs_selection(context),
            Self::Chain(_) => false,
        }
    }

    fn step(&self, form: Form) -> StepGraph {
        let Form { rows, selects: select, stacks_inputs, cuts_shared } = form;
        match self {
            Self::Emitter(emitter) => {
                let (class, debug_blocks) = (NumericClass::Fast, None);
                let signature =
                    StepSignature { rows, logit_rows: 0, select, class, draft_context: false, debug_blocks };
                regroup(&emitter.trunk(&signature), stacks_inputs, cuts_shared)
            }
            Self::Chain(own) => chain(own, rows),
        }
    }
}

type Graphs = Arc<Mutex<BTreeMap<Form, Arc<StepGraph>>>>;

/// Which of the three that a benchmark compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arm {
    /// A: the primary device in stock geometry.
    Stock,
    /// B: the primary device in the plan's geometry.
    Matched,
    /// C: with engines.
    Hybrid,
}

/// One run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Tokens of each prompt, at least 2; the last one belongs to decode.
    pub prompt_tokens: usize,
    pub arm: Arm,
    /// What engines do in the hybrid arm; its tile also is the geometry of the matched arm.
    pub plan: PlanSpec,
    /// Configured width of a step.
    pub step: usize,
    /// Not to be widened to the tile.
    pub honour_step: bool,
    /// Tokens of a cache block.
    pub block: usize,
    /// Prefill steps in flight.
    pub wavefront: usize,
    /// Prompts at once, all alike.
    pub concurrency: usize,
    /// Rows of several prompts may share a step; otherwise each step has one prompt's.
    pub packed: bool,
    pub faults: Faults,
}

impl Run {
    /// One prompt, stock settings, nothing in flight beside it.
    pub fn new(prompt_tokens: usize, arm: Arm, plan: PlanSpec) -> Self {
        Self {
            prompt_tokens,
            arm,
            plan,
            step: STOCK_STEP,
            honour_step: false,
            block: STOCK_BLOCK,
            wavefront: 1,
            concurrency: 1,
            packed: true,
            faults: Faults::default(),
        }
    }
}

/// A model of the family that is small enough to be computed while time is simulated, and a prompt for it.
pub struct Small<'a> {
    pub config: ModelConfig,
    pub facts: ModelFacts,
    pub weights: &'a dyn WeightSource,
    pub tokens: &'a [u32],
}

/// A simulated run and what it computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Computed {
    pub prediction: Prediction,
    /// After the last token of the prompt, of the small model; nothing about them is simulated.
    pub logits: Vec<f32>,
}

/// Width of a step and tokens of a block unless somebody says otherwise (hybrid spec, 12.1: arm A).
pub const STOCK_STEP: usize = 2048;
pub const STOCK_BLOCK: usize = 256;
/// More steps in flight than any server keeps.
const MAX_WAVEFRONT: usize = 16;
const MAX_CONCURRENCY: usize = 256;
/// Steps of a run: some seconds.
const MAX_STEPS: usize = 2048;

/// Models that come along, and their configurations.
const MODELS: [(&str, &str); 2] = [
    ("v4-flash-0731", include_str!("../../../models/configs/deepseek-v4-flash.json")),
    ("nano", include_str!("../../../models/nano/config.json")),
];

pub(crate) fn known_config(model: &str) -> Result<ModelConfig, SimError> {
    let preset = Preset::ALL.into_iter().find(|preset| preset.name() == model);
    let text = MODELS.iter().find(|(name, _)| *name == model).map(|(_, text)| *text);
    let config = preset.map(Preset::config).or_else(|| text.map(ModelConfig::from_json)).ok_or_else(|| {
        let known = format!("{}, and any other by its folder", Machine::models().join(", "));
        SimError::UnknownName { what: "model", name: model.to_owned(), known }
    })?;
    config.map_err(|error| SimError::Malformed { origin: model.to_owned(), reason: error.to_string() })
}

impl Machine {
    /// `profile` with the model that it has prices of, which is one of [`Self::models`] or a chain, stored as `checkpoint`.
    ///
    /// # Errors
    ///
    /// If model or checkpoint are unknown to the profile, or nobody knows what the model is made of.
    pub fn new(profile: Profile, model: &str, checkpoint: &str) -> Result<Self, SimError> {
        let graph = match profile.chain.filter(|_| profile.model == model) {
            Some(chain) => Ok(GraphSource::Chain(chain)),
            None => known_config(model).map(GraphSource::of),
        };
        // That it is another model than the profile's says more than that it is unknown.
        match graph {
            Err(unknown) if profile.model == model => Err(unknown),
            graph => Self::with_graph(profile, model, checkpoint, graph.ok()),
        }
    }

    /// The same of a model with this configuration.
    ///
    /// # Errors
    ///
    /// If model or checkpoint are unknown to the profile.
    pub fn with_config(profile: Profile, model: &str, checkpoint: &str, config: ModelConfig) -> Result<Self, SimError> {
        Self::with_graph(profile, model, checkpoint, Some(GraphSource::of(config)))
    }

    /// Prices of one model say nothing about another.
    fn with_graph(
        profile: Profile,
        model: &str,
        checkpoint: &str,
        graph: Option<GraphSource>,
    ) -> Result<Self, SimError> {
        match graph.filter(|_| profile.model == model) {
            Some(graph) => {
                let checkpoint = profile.checkpoint(checkpoint)?.clone();
                Ok(Self { profile, checkpoint, model: model.to_owned(), graph, graphs: Graphs::default() })
            }
            None => {
                let (profile, priced) = (profile.name, profile.model);
                Err(SimError::OtherModel { profile, priced, model: model.to_owned() })
            }
        }
    }

    /// Names of the models that can be simulated without a folder: those that come along and those that `troika synth` makes up.
    pub fn models() -> Vec<&'static str> {
        MODELS.iter().map(|(name, _)| *name).chain(Preset::ALL.map(Preset::name)).collect()
    }

    /// The same with engines that are so many times as fast.
    ///
    /// # Errors
    ///
    /// If that is no positive number.
    pub fn with_engine_rate(&self, factor: f64) -> Result<Self, SimError> {
        if !(factor > 0.0 && factor.is_finite()) {
            return Err(SimError::Run(format!("engines cannot be {factor} times as fast")));
        }
        let mut profile = self.profile.clone();
        profile.projections.iter_mut().for_each(|cost| cost.engine_ms /= factor);
        Ok(self.with_profile(profile))
    }

    /// The same where joining parts costs so many milliseconds of synchronization.
    ///
    /// # Errors
    ///
    /// If that is no time.
    pub fn with_sync_ms(&self, ms: f64) -> Result<Self, SimError> {
        if !(ms >= 0.0 && ms.is_finite()) {
            return Err(SimError::Run(format!("synchronization cannot take {ms} ms")));
        }
        let mut profile = self.profile.clone();
        profile.join.sync_ms = ms;
        Ok(self.with_profile(profile))
    }

    fn with_profile(&self, profile: Profile) -> Self {
        let (checkpoint, model) = (self.checkpoint.clone(), self.model.clone());
        Self { profile, checkpoint, model, graph: self.graph.clone(), graphs: Arc::clone(&self.graphs) }
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Operations that engines may take part in: those that have a price.
    pub fn projections(&self) -> Vec<Projection> {
        self.profile.projections.iter().map(|cost| cost.name).collect()
    }

    /// Output channels of an operation: of its smallest weight and group, which is cut most coarsely. `None` without it.
    pub fn channels(&self, projection: Projection) -> Option<usize> {
        let cut_shared = matches!(projection, Projection::Mlp | Projection::MlpDown);
        let graph = self.graph(self.profile.tile, cut_shared);
        let nodes = graph.nodes().iter().filter(|node| Projection::of(node) == Some(projection));
        let channels = nodes.flat_map(|node| {
            let groups = if let Op::GroupedLinear { groups, .. } = node.op { groups } else { 1 };
            node.op.weights().into_iter().map(move |weight| weight.rows / groups)
        });
        channels.min()
    }

    /// Predicted milliseconds of an operation on one tile, averaged over the layers: on the primary device, and as placed, join
    /// included, with nothing beside it.
    ///
    /// # Errors
    ///
    /// If the profile lacks it.
    pub fn operation_ms(
        &self,
        projection: Projection,
        placement: Placement,
        tile: usize,
    ) -> Result<(Predicted<f64>, Predicted<f64>), SimError> {
        let cost = self.profile.projection(projection)?;
        let scale = tile as f64 / self.profile.tile as f64;
        // Instances take whole experts in turn, so there is nothing to merge.
        let merge = if projection == Projection::Shared { 0.0 } else { cost.merge_ms * scale };
        let join = self.profile.join.handover_ms + self.profile.join.sync_ms + merge;
        let launch = self.profile.engines.launch_ms;
        let placed = match placement {
            Placement::Off => cost.primary_ms * scale,
            Placement::Whole => launch + cost.engine_ms * scale + join,
            Placement::Split { engines, cpu } => {
                let branches = [
                    launch + cost.engine_ms * engines * scale,
                    cost.cpu_ms.unwrap_or_default() * cpu * scale,
                    cost.primary_ms * (1.0 - engines - cpu) * scale,
                ];
                branches.into_iter().fold(0.0, f64::max) + join
            }
        };
        Ok((Predicted(cost.primary_ms * scale), Predicted(placed)))
    }

    /// Least rows that are worth a padded tile (hybrid spec, 4.4), 0 if none are: those that keep the primary device as long
    /// as a tile with engines does.
    fn tail_threshold(&self, run: &Run) -> Result<usize, SimError> {
        if let Some(threshold) = run.plan.tail_threshold {
            return Ok(threshold);
        }
        let tile = run.plan.tile;
        let (mut alone, mut hybrid) = (0.0, 0.0);
        for (projection, placement) in run.plan.placed() {
            let (primary, mut placed) = self.operation_ms(projection, placement, tile)?;
            // The shared expert runs beside the routed ones: it costs the primary device its join alone. Others may be waited
            // for, even with several steps in flight, and a padded tile keeps the engines as long as a full one.
            if placement == Placement::Whole && projection == Projection::Shared {
                let cost = self.profile.projection(projection)?;
                placed.0 -= self.profile.engines.launch_ms + cost.engine_ms * tile as f64 / self.profile.tile as f64;
            }
            alone += primary.0;
            hybrid += placed.0;
        }
        let threshold = (tile as f64 * hybrid / alone).ceil();
        Ok(if threshold < tile as f64 { threshold.max(2.0) as usize } else { 0 })
    }

    /// Simulates one run.
    ///
    /// # Errors
    ///
    /// If the run makes no sense on this machine, or the profile lacks an operation.
    pub fn prefill(&self, run: &Run) -> Result<Prediction, SimError> {
        if run.faults.corrupt {
            return Err(SimError::Run("no weights, no numbers: nothing to corrupt".to_owned()));
        }
        Ok(self.simulate(run, None)?.0)
    }

    /// Simulates one prompt and computes it too, with other prices for none of its operations: a layer of the small model costs
    /// what a layer of the profile's model does.
    ///
    /// # Errors
    ///
    /// If the run makes no sense on this machine, or a device cannot take the weights.
    pub fn compute(&self, run: &Run, small: &Small<'_>) -> Result<Computed, SimError> {
        let refuse = |reason: &str| Err(SimError::Run(reason.to_owned()));
        if run.concurrency != 1 || run.prompt_tokens != small.tokens.len() {
            return refuse("one prompt is computed, of as many tokens as there are");
        }
        if run.plan.cuts_shared() {
            return refuse("a shared expert in two parts (mlp, mlp_down) cannot be computed; shared can");
        }
        let vocab = small.config.vocab_size;
        if let Some(token) = small.tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(SimError::Run(format!("token {token} is not in the vocabulary of {vocab}")));
        }
        let emitter = Emitter::new(small.config.clone(), small.facts.clone());
        let machine = Self {
            graph: GraphSource::Emitter(Box::new(emitter)),
            graphs: Graphs::default(),
            ..self.with_profile(self.profile.clone())
        };
        let cpu = CpuDevice::start(CpuOptions { threads: 1, ..CpuOptions::default() }, NumericClass::Fast)?;
        cpu.load(small.weights)?;
        let (prediction, logits) = machine.simulate(run, Some((small, &Arc::new(cpu))))?;
        Ok(Computed { prediction, logits })
    }

    fn simulate(
        &self,
        run: &Run,
        compute: Option<(&Small<'_>, &Arc<CpuDevice>)>,
    ) -> Result<(Prediction, Vec<f32>), SimError> {
        self.check(run)?;
        let is_hybrid = run.arm == Arm::Hybrid;
        let cut_shared = is_hybrid && run.plan.cuts_shared();
        let spec = if is_hybrid { run.plan.clone() } else { PlanSpec::primary(run.plan.tile) };
        let mut unavailable = None;
        let Built { plan, left_out } = match (is_hybrid, run.faults.load_error) {
            (true, None) => {
                let graph = self.graph(run.plan.tile, cut_shared);
                let (threshold, faults) = (self.tail_threshold(run)?, &run.faults);
                match compute {
                    None => {
                        let source = Shapes::of(&graph, self.checkpoint.formats);
                        build(&graph, &spec, threshold, &self.profile, &source, faults, false, &mut pack_shapes())
                    }
                    Some((small, cpu)) => {
                        let mut pack = |weight: &WeightRef| {
                            let tensor = small.weights.tensor(weight.key).expect("an eligible weight is there");
                            Arc::new(cpu.pack_channels(&tensor))
                        };
                        build(&graph, &spec, threshold, &self.profile, small.weights, faults, true, &mut pack)
                    }
                }
            }
            (true, Some(code)) => {
                let reason = format!("load: code {code}");
                unavailable = Some(reason.clone());
                let left =
                    spec.placed().map(|(projection, _)| LeftOut { projection, layers: 0, reason: reason.clone() });
                Built { plan: Plan::primary(), left_out: left.collect() }
            }
            (false, _) => Built { plan: Plan::primary(), left_out: Vec::new() },
        };
        if is_hybrid && plan.is_primary() && unavailable.is_none() {
            unavailable = Some(left_out.first().map_or("nothing is placed".to_owned(), |left| left.reason.clone()));
        }
        let geometry = self.geometry(run);
        let arithmetic = compute.map(|(_, cpu)| Arithmetic(Arc::clone(cpu)));
        let totals = Totals::of(&self.graph(self.profile.tile, cut_shared));
        let machinery = Machinery::of_profile(&self.profile, &self.checkpoint, totals);
        let world = World::new(machinery, &run.faults, run.plan.blocking, arithmetic);
        let clock = {
            let world = Arc::clone(&world);
            Arc::new(move || world.now())
        };
        let mut executor = Executor::with_clock(world.devices(), plan, clock);
        // Nothing is computed, so there are no numbers to check.
        executor.check_every(u64::MAX);
        if let Some(reason) = unavailable {
            executor.set_unavailable(reason);
        } else if !geometry.reachable {
            executor.set_idle("step_limit");
        }
        let mut session = Session {
            machine: self,
            run,
            cut_shared,
            world: &world,
            executor,
            templates: BTreeMap::new(),
            widths: BTreeMap::new(),
            narrowed_by: BTreeMap::new(),
            tokens: compute.map(|(small, _)| small.tokens),
            states: Vec::new(),
        };
        session.compute_prompts(geometry)?;
        let prediction = session.prediction(geometry, spec, left_out);
        let logits = if compute.is_some() { session.last_token()? } else { Vec::new() };
        Ok((prediction, logits))
    }

    fn check(&self, run: &Run) -> Result<(), SimError> {
        let refuse = |reason: String| Err(SimError::Run(reason));
        if run.prompt_tokens < 2 || run.prompt_tokens > self.graph.max_tokens() {
            let most = self.graph.max_tokens();
            return refuse(format!("a prompt has 2 to {most} tokens, not {}", run.prompt_tokens));
        }
        let most = self.graph.max_tokens();
        for (what, tokens) in [("step", run.step), ("block", run.block), ("tile", run.plan.tile)] {
            if !(1..=most).contains(&tokens) {
                return refuse(format!("a {what} has 1 to {most} tokens, like the longest prompt, not {tokens}"));
            }
        }
        if !(1..=MAX_WAVEFRONT).contains(&run.wavefront) {
            return refuse(format!("1 to {MAX_WAVEFRONT} steps are in flight, not {}", run.wavefront));
        }
        if !(1..=MAX_CONCURRENCY).contains(&run.concurrency) {
            return refuse(format!("1 to {MAX_CONCURRENCY} prompts at once, not {}", run.concurrency));
        }
        let width = self.geometry(run).step;
        let steps = run.concurrency * run.prompt_tokens / width;
        if steps > MAX_STEPS {
            return refuse(format!(
                "{} times {} tokens are {steps} steps of {width}, and {MAX_STEPS} at most are simulated",
                run.concurrency, run.prompt_tokens
            ));
        }
        if let Some((instance, factor)) = run.faults.slow_instance
            && (instance >= self.profile.engines.instances || !(factor > 0.0 && factor.is_finite()))
        {
            return refuse(format!("instance {instance} cannot be {factor} times as slow"));
        }
        if !(0.0..1.0).contains(&run.faults.jitter) {
            return refuse(format!("times vary by less than all of them, not by {}", run.faults.jitter));
        }
        run.plan.check(&self.profile)
    }

    fn geometry(&self, run: &Run) -> Geometry {
        let request = GeometryRequest {
            tile: (run.arm != Arm::Stock).then_some(run.plan.tile),
            step: run.step,
            honour_step: run.honour_step,
            block: run.block,
            cache: true,
            snapshot_spacing: run.plan.tile,
        };
        Geometry::resolve(&request, |_| true)
    }

    /// Of steps in which everything happens.
    fn graph(&self, rows: usize, cuts_shared: bool) -> Arc<StepGraph> {
        self.graph_of(rows, cuts_shared, true)
    }

    fn graph_of(&self, rows: usize, cuts_shared: bool, selects: bool) -> Arc<StepGraph> {
        let form = Form { rows, selects, stacks_inputs: self.profile.stacks_inputs(), cuts_shared };
        let mut graphs = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(graphs.entry(form).or_insert_with(|| Arc::new(self.graph.step(form))))
    }
}

/// A run under way.
struct Session<'a> {
    machine: &'a Machine,
    run: &'a Run,
    cut_shared: bool,
    world: &'a Arc<World>,
    executor: Executor,
    /// By rows, and by whether the step selects.
    templates: BTreeMap<(usize, bool), Arc<Template>>,
    widths: BTreeMap<usize, u64>,
    narrowed_by: BTreeMap<&'static str, u64>,
    /// Of the prompt, if it is computed.
    tokens: Option<&'a [u32]>,
    /// One per prompt.
    states: Vec<Arc<SequenceState>>,
}

impl Session<'_> {
    fn compute_prompts(&mut self, geometry: Geometry) -> Result<(), SimError> {
        let run = self.run;
        let mut scheduler = Scheduler::new(Limits {
            geometry,
            budget_tokens: geometry.step,
            wavefront: run.wavefront,
            max_running: run.concurrency,
            max_queued: run.concurrency,
            // Nobody waits for tokens here.
            max_itl_us: u64::MAX / 4,
            state_bytes: u64::MAX,
            reserve_bytes: 0,
            narrowing_frees: [0; NARROWINGS],
            state_cost: StateCost::default(),
            // The machines that are simulated leave the last token of a prompt to a step of its own.
            two_classes: true,
        });
        let ids = || (0..run.concurrency as u64).map(RequestId);
        for id in ids() {
            let new = NewSequence { tokens: run.prompt_tokens, urgency: Urgency::Normal, deadline_us: None };
            scheduler.submit(id, new).expect("the queue holds all of them");
        }
        for id in scheduler.admit() {
            scheduler.attached(id, 0);
        }
        // Rows that nobody computes are kept nowhere.
        let shape = match self.tokens {
            Some(_) => state_shape(&self.machine.graph(run.plan.tile, self.cut_shared)),
            None => StateShape::default(),
        };
        self.states = ids().map(|_| Arc::new(SequenceState::new(&shape))).collect();
        // Of each planned step: model calls that are not done, and when the first began.
        let mut planned: BTreeMap<u64, (usize, u64)> = BTreeMap::new();
        let mut waiting: VecDeque<(u64, Vec<Part>)> = VecDeque::new();
        let mut calls = BTreeMap::new();
        loop {
            while scheduler.has_room(Lane::Prefill) {
                let plan = scheduler.plan(Lane::Prefill, self.world.now_ns() / 1000);
                if plan.parts.is_empty() {
                    break;
                }
                for narrowing in plan.parts.iter().flat_map(|part| &part.chunk.narrowed_by) {
                    *self.narrowed_by.entry(narrowing.rule.name()).or_default() += 1;
                    self.executor.note_narrowed(narrowing.rule.name(), None);
                }
                let groups: Vec<Vec<Part>> = match run.packed {
                    true => vec![plan.parts],
                    false => plan.parts.into_iter().map(|part| vec![part]).collect(),
                };
                planned.insert(plan.number, (groups.len(), self.world.now_ns()));
                waiting.extend(groups.into_iter().map(|group| (plan.number, group)));
            }
            while self.executor.num_in_flight() < run.wavefront
                && let Some((number, parts)) = waiting.pop_front()
            {
                let step = self.step(&parts)?;
                calls.insert(self.executor.submit(step)?, number);
            }
            if calls.is_empty() {
                return Ok(());
            }
            let finished = self.executor.next_done()?;
            let number = calls.remove(&finished.ticket).expect("every call is noted");
            let longest_us = finished.ledger.device_total(DeviceId::PRIMARY).longest_ns / 1000;
            if self.tokens.is_some() {
                finished.run.states().iter().zip(&finished.run.rows().segments).for_each(|(state, segment)| {
                    state.commit(segment.rows);
                });
            }
            self.executor.recycle(finished.run);
            let (left, start_ns) = planned.get_mut(&number).expect("every step is noted");
            *left -= 1;
            if *left == 0 {
                let now_ns = self.world.now_ns();
                let elapsed_us = (now_ns - *start_ns) / 1000;
                scheduler.complete(number, now_ns / 1000, elapsed_us, longest_us);
                planned.remove(&number);
                for id in ids() {
                    if scheduler.num_computed_tokens(id) + 1 == run.prompt_tokens {
                        scheduler.end(id);
                    }
                }
            }
        }
    }

    fn step(&mut self, parts: &[Part]) -> Result<Step, SimError> {
        let mut rows = StepRows::default();
        for Part { request, chunk, .. } in parts {
            let (row, sequence) = (rows.tokens.len(), SequenceId(request.0));
            match self.tokens {
                Some(tokens) => {
                    rows.tokens.extend(tokens[chunk.start..chunk.start + chunk.width].iter().map(|id| *id as i32));
                }
                None => rows.tokens.resize(row + chunk.width, 0),
            }
            let acceptance = Acceptance::Whole;
            rows.segments.push(Segment { sequence, row, rows: chunk.width, position: chunk.start, acceptance });
        }
        let width = rows.num_rows();
        *self.widths.entry(width).or_default() += 1;
        let machine = self.machine;
        let selects = machine.profile.calls.always_selects || machine.graph.needs_selection(rows.max_context());
        let template = match self.templates.get(&(width, selects)) {
            Some(known) => Arc::clone(known),
            None => {
                let graph = machine.graph_of(width, self.cut_shared, selects);
                let template = self.executor.template(StepGraph::clone(&graph), StepLane::Prefill);
                self.world.price(template.graph())?;
                self.templates.insert((width, selects), Arc::clone(&template));
                template
            }
        };
        let states = parts.iter().map(|part| Arc::clone(&self.states[part.request.0 as usize])).collect();
        Ok(Step { template, rows, states, priority: Priority::Prefill })
    }

    /// Logits after the prompt's last token, computed as a decode step is: on the primary device, in its own arithmetic.
    fn last_token(&mut self) -> Result<Vec<f32>, SimError> {
        let (Some(tokens), GraphSource::Emitter(emitter)) = (self.tokens, &self.machine.graph) else {
            unreachable!("only models with a graph are computed")
        };
        let (class, debug_blocks) = (NumericClass::Fast, None);
        let signature =
            StepSignature { rows: 1, logit_rows: 1, select: true, class, draft_context: false, debug_blocks };
        let graph = regroup(&emitter.trunk(&signature), self.machine.profile.stacks_inputs(), self.cut_shared);
        let logits = graph.tap(Scope::Model, "logits").expect("a step with logit rows taps them");
        let template = self.executor.template(graph, StepLane::Decode);
        self.world.price(template.graph())?;
        let position = tokens.len() - 1;
        let (sequence, acceptance) = (SequenceId(0), Acceptance::Whole);
        let segments = vec![Segment { sequence, row: 0, rows: 1, position, acceptance }];
        let rows = StepRows { tokens: vec![tokens[position] as i32], segments, logit_rows: vec![0] };
        let states = self.states.clone();
        self.executor.submit(Step { template, rows, states, priority: Priority::Decode })?;
        Ok(self.executor.next_done()?.run.copy_f32(logits))
    }

    fn prediction(&mut self, geometry: Geometry, spec: PlanSpec, left_out: Vec<LeftOut>) -> Prediction {
        let (machine, run, world, executor) = (self.machine, self.run, self.world, &self.executor);
        let (widths, narrowed_by) = (std::mem::take(&mut self.widths), std::mem::take(&mut self.narrowed_by));
        let Usage { busy_ms, by_operation } = world.usage();
        let total_ms = world.now_ns() as f64 / 1e6;
        let operations = executor.totals().total_operations();
        let names = executor.devices().iter().map(|device| device.capabilities().name.clone());
        let devices = names.zip(&busy_ms).map(|(name, ms)| DeviceUse {
            name,
            busy_ms: Predicted(*ms),
            duty: Predicted(if total_ms > 0.0 { ms / total_ms } else { 0.0 }),
        });
        let instances = machine.profile.engines.instances;
        let operation_records = by_operation.iter().map(|(operation, usage)| OperationRecord {
            operation,
            basis: machine.profile.basis(operation).expect("what was charged has a price"),
            primary_ms: Predicted(usage.device_ms[0]),
            engines_ms: Predicted(usage.device_ms[1..=instances].iter().sum()),
            cpu_ms: Predicted(usage.device_ms.get(1 + instances).copied().unwrap_or_default()),
            join_ms: Predicted(usage.join_ms),
        });
        let prefill_tokens = (run.prompt_tokens - 1) * run.concurrency;
        Prediction {
            kind: RecordKind::Prediction,
            schema: SCHEMA,
            profile: machine.profile.name.clone(),
            model: machine.model.clone(),
            checkpoint: machine.checkpoint.name.clone(),
            arm: run.arm,
            prompt_tokens: run.prompt_tokens,
            concurrency: run.concurrency,
            packed: run.packed,
            wavefront: run.wavefront,
            plan: (run.arm == Arm::Hybrid).then_some(spec),
            faults: (run.faults != Faults::default()).then(|| run.faults.clone()),
            geometry: geometry.to_string(),
            prefill_tokens,
            prefill_tps: Predicted(prefill_tokens as f64 / total_ms * 1e3),
            prefill_ms: Predicted(total_ms),
            planned: operations.planned,
            dispatched: operations.dispatched(),
            verdict: if run.arm == Arm::Hybrid { executor.feature().state().to_string() } else { "off".to_owned() },
            widths,
            narrowed_by,
            devices: devices.collect(),
            operations: operation_records.collect(),
            left_out,
        }
    }
}

/// What the steps of a graph keep of a sequence.
fn state_shape(graph: &StepGraph) -> StateShape {
    let mut shape = StateShape::default();
    let empty = LayerShape { head_dim: 0, window: 0, compressed: None, index: None };
    for node in graph.nodes() {
        match &node.op {
            Op::Attend { attention } => {
                let layer = shape.layers.entry(node.scope).or_insert(empty);
                (layer.head_dim, layer.window) = (attention.head_dim, attention.window);
            }
            Op::Compress { compressor } => {
                let Compressor { ratio, dim, overlap, .. } = *compressor;
                let pool = Some(PoolShape { ratio, dim, overlap });
                let layer = shape.layers.entry(node.scope).or_insert(empty);
                match node.state[0].part {
                    StatePart::Index => layer.index = pool,
                    _ => layer.compressed = pool,
                }
            }
            _ => {}
        }
    }
    shape
}
