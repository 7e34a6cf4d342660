//! Measuring what projections cost before a model is loaded: with the weights of one projection of each kind and shape, then
//! in the running model, its first layers, by switching the engines on and off.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use troika_base::{NumericClass, SequenceId, StoredTensor};
use troika_device::Device;
use troika_device::cpu::{CpuDevice, CpuOptions};
use troika_device::npu::NpuBackend;
use troika_graph::{Acceptance, Kind, Role, Scope, WeightKey, WeightSource};
use troika_model::{Emitter, ModelConfig, ModelFacts};
use troika_runtime::cost::{Bench, CalibrationError, CostTable, Running, Seen, calibrate, representatives};
use troika_runtime::{Choice, HybridOptions, Placement, Priority, choose};

use crate::runner::{Chunk, Engines, Runner, RunnerError, RunnerOptions, WantLogits, tile_graph};

/// Some weights of a source.
struct Only<'a> {
    source: &'a dyn WeightSource,
    keys: BTreeSet<WeightKey>,
}

impl WeightSource for Only<'_> {
    fn tensor(&self, key: WeightKey) -> Option<StoredTensor> {
        self.keys.contains(&key).then(|| self.source.tensor(key)).flatten()
    }

    fn keys(&self) -> Vec<WeightKey> {
        self.source.keys().into_iter().filter(|key| self.keys.contains(key)).collect()
    }
}

/// Who is to be measured.
pub struct Calibration<'a> {
    /// The engines.
    pub backend: &'a Arc<dyn NpuBackend>,
    /// Rows of a tile.
    pub tile: usize,
    /// Whether the projections that share a layer's input are one operation.
    pub stack_inputs: bool,
    /// The primary device beside the engines.
    pub cpu: CpuOptions,
    /// The primary device if engines take no part.
    pub cpu_alone: CpuOptions,
}

/// Measures every kind and shape of projection in class `fast`, the one that engines go with, and then the running model.
/// `progress` hears how many of how many are done.
///
/// # Errors
///
/// If a device cannot be started, or cannot do what it is to be measured with.
pub fn calibrate_engines(
    config: &ModelConfig,
    facts: &ModelFacts,
    weights: &dyn WeightSource,
    calibration: &Calibration<'_>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<CostTable, CalibrationError> {
    let Calibration { backend, tile, stack_inputs, cpu, cpu_alone } = calibration;
    let emitter = Emitter::new(config.clone(), facts.clone()).stacking_inputs(*stack_inputs);
    let graph = tile_graph(&emitter, NumericClass::Fast, *tile);
    let measured = representatives(&graph, weights, &***backend);
    let keys = measured.iter().flat_map(|(projection, _)| projection.weights.iter().map(|weight| weight.key)).collect();
    let primary = CpuDevice::start(*cpu, NumericClass::Fast)?;
    primary.load(&Only { source: weights, keys })?;
    let alone = CpuDevice::start(*cpu_alone, NumericClass::Fast)?;
    alone.load(&Only { source: weights, keys: BTreeSet::new() })?;
    let pack = |tensor: &StoredTensor| primary.pack_channels(tensor);
    let mut table =
        calibrate(&graph, weights, &Bench { primary: &primary, alone: &alone, backend, pack: &pack }, progress)?;
    table.stack_inputs = *stack_inputs;
    drop((primary, alone));
    table.running = Some(run_model(config, facts, weights, calibration, &table)?);
    Ok(table)
}

/// What is best to be done with engines by what was measured. `said` are placements that the user insists on, and `wavefront`
/// the chunks in flight.
pub fn choose_engines(
    config: &ModelConfig,
    facts: &ModelFacts,
    table: &CostTable,
    said: &BTreeMap<Kind, Placement>,
    wavefront: Option<usize>,
) -> Choice {
    let emitter = Emitter::new(config.clone(), facts.clone()).stacking_inputs(table.stack_inputs);
    let graph = tile_graph(&emitter, NumericClass::Fast, table.tile);
    choose(table, &Arc::new(graph), said, wavefront)
}

/// Tiles of a prompt in the running model: enough for chunks to meet.
const TILES: usize = 3;
/// Prompts with engines off and on, in turn; more of a model whose tile takes less than [`LONG_MS`]. The fastest of each
/// counts: what disturbs only ever slows.
const ROUNDS: usize = 2;
const SHORT_ROUNDS: usize = 9;
const LONG_MS: f64 = 300.0;

/// Runs the first layers, of each kind one at least, with the engines off and on.
fn run_model(
    config: &ModelConfig,
    facts: &ModelFacts,
    weights: &dyn WeightSource,
    calibration: &Calibration<'_>,
    table: &CostTable,
) -> Result<Running, CalibrationError> {
    let (config, facts) = first_layers(config, facts);
    let class = NumericClass::Fast;
    let emitter = Emitter::new(config.clone(), facts.clone()).stacking_inputs(table.stack_inputs);
    let graph = Arc::new(tile_graph(&emitter, class, table.tile));
    let choice = choose(table, &graph, &BTreeMap::new(), None);
    let shapes = choice.placements();
    let is_run = |key: &WeightKey| match key.scope {
        Scope::Layer(layer) => usize::from(layer) < config.num_hidden_layers,
        Scope::Model => key.role == Role::Embed,
        Scope::Stage(_) => false,
    };
    let keys = weights.keys().into_iter().filter(is_run).collect();
    let (tile, stack_inputs) = (table.tile, table.stack_inputs);
    let options = HybridOptions {
        tile,
        tail_threshold: 0,
        placements: BTreeMap::new(),
        shapes,
        memory_bytes: u64::MAX,
        stack_inputs,
    };
    let engines = Engines { backend: Arc::clone(calibration.backend), options, progress: &mut |_, _, _| () };
    let runner_options = RunnerOptions { cpu: calibration.cpu, ..RunnerOptions::new(class) };
    let source = Only { source: weights, keys };
    let failed = |error: RunnerError| CalibrationError::Step { reason: error.to_string() };
    let mut runner = Runner::with_engines(config, facts, &source, runner_options, Some(engines)).map_err(failed)?;
    runner.keep_spans(true);
    let mut pass = |priority, tiles, depth| prompt(&mut runner, table.tile, priority, tiles, depth);
    let off = Priority::Decode;
    let warm_up = pass(off, 1, 1).map_err(failed)?;
    pass(Priority::Prefill, 1, 1).map_err(failed)?;
    let rounds = if warm_up.tile_ms < LONG_MS { SHORT_ROUNDS } else { ROUNDS };
    let mut best: [Option<Seen>; 2] = [None, None];
    for _ in 0..rounds {
        let seen =
            [pass(off, 1, 1).map_err(failed)?, pass(Priority::Prefill, TILES, choice.wavefront).map_err(failed)?];
        for (best, seen) in best.iter_mut().zip(seen) {
            if best.as_ref().is_none_or(|best| seen.tile_ms < best.tile_ms) {
                *best = Some(seen);
            }
        }
    }
    let [Some(off), Some(on)] = best else { unreachable!("there are rounds") };
    Ok(Running::of(&graph, table, &choice, &off, &on, TILES))
}

/// The same model with as many layers as it takes to have each kind of layer once.
fn first_layers(config: &ModelConfig, facts: &ModelFacts) -> (ModelConfig, ModelFacts) {
    let kinds =
        |layers: usize| (0..layers).map(|layer| format!("{:?}", config.layer_kind(layer))).collect::<BTreeSet<_>>();
    let all = kinds(config.num_hidden_layers);
    let layers =
        (1..=config.num_hidden_layers).find(|layers| kinds(*layers) == all).unwrap_or(config.num_hidden_layers);
    let hash_layers = facts.hash_layers[..layers].to_vec();
    (ModelConfig { num_hidden_layers: layers, ..config.clone() }, ModelFacts { hash_layers, num_stages: 0 })
}

/// Computes a prompt of `tiles` tiles and says what devices took. Steps of `Priority::Decode` leave engines off.
fn prompt(
    runner: &mut Runner,
    tile: usize,
    priority: Priority,
    tiles: usize,
    depth: usize,
) -> Result<Seen, RunnerError> {
    let vocab_size = runner.config().vocab_size;
    let tokens: Vec<u32> = (0..tile * tiles).map(|i| (i * 7919 % vocab_size) as u32).collect();
    let sequence: SequenceId = runner.new_sequence();
    let (mut seen, start) = (Seen::default(), Instant::now());
    let (mut chunks, mut in_flight) = (tokens.chunks(tile), 0);
    loop {
        while in_flight < depth
            && let Some(tokens) = chunks.next()
        {
            let chunk = Chunk { sequence, tokens, logits: WantLogits::No, acceptance: Acceptance::Whole };
            runner.submit(&[chunk], priority)?;
            in_flight += 1;
        }
        if in_flight == 0 {
            break;
        }
        let (_, forward) = runner.next_done()?;
        in_flight -= 1;
        for span in &forward.spans {
            seen.add(forward.graph().node(span.node), span.device, (span.end_ns - span.start_ns) as f64 / 1e6);
        }
        runner.recycle(forward);
    }
    seen.tile_ms = start.elapsed().as_secs_f64() * 1e3 / tiles as f64;
    runner.drop_sequence(sequence);
    Ok(seen)
}
