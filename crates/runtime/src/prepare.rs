//! From a wish ("engines, please") to a plan that can run: dry run, admission, packing, compilation, banks, warm-up.
//!
//! Nothing here fails for good: what cannot be prepared is left to the primary device, with a reason.

use std::collections::BTreeMap;
use std::sync::Arc;

use troika_base::{NumericClass, StoredTensor};
use troika_device::RunTile;
use troika_device::npu::{
    BankOptions, Banks, Body, ChannelWeights, Compiled, Limits, NpuBackend, NpuDevice, NpuError, Procedure,
    ProcedureId, Product, Program, load_banks,
};
use troika_graph::{Kind, Op, StepGraph, WeightKey, WeightRef, WeightSource};

use crate::cost::{Error, shape_of};
use crate::eligibility::{Eligibility, eligibility};
use crate::executor::check::difference;
use crate::executor::{EngineBytes, LoadedBank};
use crate::partition::{Alignment, Partition};
use crate::plan::{DeviceId, Plan, PlannedProjection, Shares, projection_key};

/// What an engine is to do of a kind of projection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Placement {
    /// Nothing.
    Primary,
    /// All of it, beside what the primary device does meanwhile.
    Whole,
    /// This fraction of the output channels, all instances together.
    Split(f64),
}

/// A kind of projection with its shape: output channels of all weights, input channels of one group.
pub type OperationKey = (Kind, [usize; 2]);

/// The wish.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridOptions {
    /// Rows of a tile.
    pub tile: usize,
    /// Least rows that are worth a padded tile; 0 = none are.
    pub tail_threshold: usize,
    /// Kinds that are not named stay with the primary device.
    pub placements: BTreeMap<Kind, Placement>,
    /// Of operations that are not placed like others of their kind.
    pub shapes: BTreeMap<OperationKey, Placement>,
    /// Bytes that engines may use.
    pub memory_bytes: u64,
    /// The projections that share a layer's input are one operation, of [`Kind::AttentionInput`].
    pub stack_inputs: bool,
}

impl HybridOptions {
    /// Placements that hold for the family before anything was measured: what runs beside something else goes whole, what
    /// would be waited for is split. `wo_a` and `wo_b` cost more to join than they save; gates are small and sensitive.
    pub fn default_placements() -> BTreeMap<Kind, Placement> {
        BTreeMap::from([(Kind::SharedExpert, Placement::Whole), (Kind::WqB, Placement::Split(0.5))])
    }
}

/// How far a preparation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Packing,
    Compiling,
    WarmingUp,
}

impl Stage {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Packing => "packing",
            Self::Compiling => "compiling",
            Self::WarmingUp => "warming up",
        }
    }
}

/// A projection in the record of a preparation.
#[derive(Clone, Debug)]
pub struct Record {
    pub eligibility: Eligibility,
    pub placement: Placement,
    /// What the instances have of the output channels, really.
    pub effective_fraction: f64,
    /// Bytes on all engines, estimated before anything was prepared.
    pub estimated_bytes: u64,
    /// Why it is not in the plan although it was wished for.
    pub left_out: Option<String>,
}

/// What came of the wish.
pub struct Prepared {
    /// One per instance; the first is device 1 of the executor.
    pub devices: Vec<Arc<NpuDevice>>,
    /// What engines take part in.
    pub plan: Plan,
    /// One per projection of the model.
    pub records: Vec<Record>,
    /// What can be given up if memory is short.
    pub banks: Vec<LoadedBank>,
    /// Why no engine takes part.
    pub unavailable: Option<String>,
}

/// Works out what would be done, without touching a weight: the dry run.
pub fn dry_run(
    graph: &StepGraph,
    source: &dyn WeightSource,
    backend: &dyn NpuBackend,
    options: &HybridOptions,
) -> Vec<Record> {
    let limits = backend.limits();
    let mut records: Vec<Record> = eligibility(graph, source, limits)
        .into_iter()
        .map(|eligibility| {
            let own = options.shapes.get(&(eligibility.kind, shape_of(&eligibility.weights)));
            let of_kind = || options.placements.get(&eligibility.kind);
            let wish = own.or_else(of_kind).copied().unwrap_or(Placement::Primary);
            let (mut left_out, mut effective_fraction) = (None, 0.0);
            if wish != Placement::Primary {
                match (&eligibility.reason, partitions(&eligibility, wish, limits)) {
                    (Some(reason), _) => left_out = Some(format!("ineligible_weight: {reason}")),
                    (None, None) => left_out = Some("ineligible_weight: too few output channels to cut".to_owned()),
                    (None, Some(cuts)) => effective_fraction = cuts.first().map_or(1.0, Partition::effective_fraction),
                }
            }
            let mut record = Record { eligibility, placement: wish, effective_fraction, estimated_bytes: 0, left_out };
            if effective_fraction > 0.0 {
                record.estimated_bytes = foresee([&record], backend, options.tile).total();
            }
            record
        })
        .collect();
    admit(&mut records, options.memory_bytes);
    records
}

/// Bytes that engines hold once all of this is prepared, as [`crate::Executor::engine_bytes`] says then: packed weights (all
/// channels, since the primary device repeats what an engine does), programs if they are copies of their part of those, and for each
/// instance the widest tile of 32-bit numbers that goes in and the widest that comes out.
pub fn foresee<'a>(
    records: impl IntoIterator<Item = &'a Record>,
    backend: &dyn NpuBackend,
    tile: usize,
) -> EngineBytes {
    let instances = backend.limits().instances;
    let (mut bytes, mut widest) = (EngineBytes::default(), vec![(0, 0); instances]);
    for record in records.into_iter().filter(|record| record.effective_fraction > 0.0) {
        let Eligibility { kind, weights, groups, .. } = &record.eligibility;
        let cuts = partitions(&record.eligibility, record.placement, backend.limits()).unwrap_or_default();
        let inputs = weights.first().map_or(0, |weight| weight.cols * groups);
        bytes.weights += weights.iter().map(|w| ChannelWeights::packed_bytes(w.rows, w.cols)).sum::<u64>();
        for (instance, widest) in widest.iter_mut().enumerate() {
            // An instance without channels of its own has the last one's.
            let own = |cut: &Partition| cut.instances[instance.min(cut.instances.len() - 1)].len() * groups;
            // A number is a byte, and each channel has a scale.
            let (program, outputs): (usize, usize) = match kind {
                Kind::SharedExpert => (weights.iter().map(|w| w.rows * (w.cols + 4)).sum(), inputs),
                _ => (
                    weights.iter().zip(&cuts).map(|(weight, cut)| own(cut) * (weight.cols + 4)).sum(),
                    cuts.iter().map(own).sum(),
                ),
            };
            bytes.banks += if backend.shares_weights() { 0 } else { program as u64 };
            *widest = (inputs.max(widest.0), outputs.max(widest.1));
        }
    }
    let numbers = widest.iter().map(|(inputs, outputs)| tile * (inputs + outputs)).sum::<usize>();
    EngineBytes { surfaces: (numbers * size_of::<f32>()) as u64, ..bytes }
}

/// Room for what is only there while weights are prepared.
const PREPARATION: f64 = 1.15;

/// What saves most per byte first, until the memory is used up.
fn admit(records: &mut [Record], memory_bytes: u64) {
    let mut order: Vec<usize> = (0..records.len()).filter(|i| records[*i].estimated_bytes > 0).collect();
    let per_byte = |record: &Record| record.eligibility.work() as f64 / record.estimated_bytes as f64;
    order.sort_by(|a, b| per_byte(&records[*b]).total_cmp(&per_byte(&records[*a])).then(a.cmp(b)));
    let mut left = memory_bytes;
    for index in order {
        let record = &mut records[index];
        let need = (record.estimated_bytes as f64 * PREPARATION) as u64;
        if need <= left {
            left -= need;
        } else {
            record.left_out = Some(format!("memory: {need} bytes are needed, {left} are left"));
            record.effective_fraction = 0.0;
        }
    }
}

/// One cut per weight; a shared expert has none, since its tiles go to the instances in turn.
pub(crate) fn partitions(eligibility: &Eligibility, wish: Placement, limits: &Limits) -> Option<Vec<Partition>> {
    if eligibility.kind == Kind::SharedExpert {
        return (wish == Placement::Whole).then(Vec::new);
    }
    let alignment = Alignment { engine: limits.channel_alignment, primary: 8 };
    let cut = |weight: &WeightRef| {
        let per_group = weight.rows / eligibility.groups;
        match wish {
            Placement::Primary => None,
            Placement::Whole => Partition::whole(per_group, limits.instances, alignment),
            Placement::Split(fraction) => Partition::split(per_group, fraction, limits.instances, alignment),
        }
    };
    let cuts: Vec<Partition> = eligibility.weights.iter().map(cut).collect::<Option<_>>()?;
    // All weights of a stack go to the same devices.
    cuts.iter().all(|cut| cut.instances.len() == cuts[0].instances.len()).then_some(cuts)
}

/// Projections on their way onto the engines.
struct Candidate {
    record: usize,
    key: WeightKey,
    kind: Kind,
    /// What each instance loads; shared procedures come once per instance.
    engine: Vec<Arc<Procedure>>,
    /// The primary device's part of a split.
    primary: Option<Arc<Procedure>>,
    turns: bool,
    compiled: Vec<Arc<Compiled>>,
}

/// Carries the wish out as far as possible. `pack` rounds a tensor to one scale per output channel; `progress` hears of each stage how many of how many projections are done.
pub fn prepare(
    graph: &StepGraph,
    source: &dyn WeightSource,
    class: NumericClass,
    backend: &Arc<dyn NpuBackend>,
    options: &HybridOptions,
    pack: &dyn Fn(&StoredTensor) -> ChannelWeights,
    progress: &mut dyn FnMut(Stage, usize, usize),
) -> Prepared {
    let limits = backend.limits().clone();
    let mut records = dry_run(graph, source, &**backend, options);
    let none = |records, reason: String| {
        let (devices, plan) = (Vec::new(), Plan::primary());
        Prepared { devices, plan, records, banks: Vec::new(), unavailable: Some(reason) }
    };
    if class != NumericClass::Fast {
        return none(records, format!("class: engines go with class fast, not {class}"));
    }
    if options.tile < limits.min_tile || !options.tile.is_multiple_of(limits.tile_multiple) {
        let (tile, least, multiple) = (options.tile, limits.min_tile, limits.tile_multiple);
        return none(
            records,
            format!("tile: {tile} rows; {} takes multiples of {multiple} from {least} on", backend.name()),
        );
    }
    let mut candidates = pack_all(graph, source, &records, &limits, options.tile, pack, progress);
    compile(&mut candidates, &mut records, &**backend, progress);
    if candidates.is_empty() {
        let reason = records.iter().find_map(|record| record.left_out.clone());
        return none(records, reason.unwrap_or_else(|| "no projection was wished for".to_owned()));
    }
    let work = |candidate: &Candidate| candidate.engine.iter().map(|p| p.work()).sum::<u64>() as f64;
    let programs = |instance: usize| -> Vec<Program> {
        candidates.iter().map(|c| (Arc::clone(&c.engine[instance]), Arc::clone(&c.compiled[instance]))).collect()
    };
    let bank_options = BankOptions {
        programs: (0..limits.instances).map(programs).collect(),
        benefits: candidates.iter().map(work).collect(),
    };
    let Banks { instances, dropped, last_error, spans, .. } = load_banks(&**backend, &bank_options);
    let loaded: Vec<LoadedBank> = spans.iter().map(|span| loaded_bank(&candidates, span, &**backend)).collect();
    let error = || last_error.as_ref().map_or_else(String::new, NpuError::to_string);
    for place in &dropped {
        let record = &mut records[candidates[*place].record];
        record.left_out = Some(format!("bank_budget: {}", error()));
        record.effective_fraction = 0.0;
    }
    let mut place = 0;
    candidates.retain(|_| {
        place += 1;
        !dropped.contains(&(place - 1))
    });
    if candidates.is_empty() {
        return none(records, format!("load: {}", error()));
    }
    let start = |(instance, banks)| NpuDevice::start(Arc::clone(backend), instance, banks).map(Arc::new);
    let devices: Result<Vec<_>, _> = instances.into_iter().enumerate().map(start).collect();
    let devices = match devices {
        Ok(devices) => devices,
        Err(error) => return none(records, error.to_string()),
    };
    let total = candidates.len();
    for (index, candidate) in candidates.iter().enumerate() {
        progress(Stage::WarmingUp, index, total);
        for (device, procedure) in devices.iter().zip(&candidate.engine) {
            if let Err(reason) = probe(procedure, limits.repeatable, &mut |x| device.probe(procedure, x)) {
                return none(records, reason);
            }
        }
    }
    progress(Stage::WarmingUp, total, total);
    let projections = candidates.into_iter().map(|candidate| (candidate.key, candidate.planned())).collect();
    // What a simulated engine computes may be wrong on purpose: nobody else's prompts begin with it.
    let is_known = limits.repeatable && backend.simulated_ns().is_none();
    let arithmetic = if is_known { "int8 per channel, groups of 32".to_owned() } else { backend.version() };
    let plan = Plan::new(options.tile, options.tail_threshold, projections, &arithmetic);
    let plan = if limits.repeatable { plan } else { plan.unrepeatable() };
    Prepared { devices, plan, records, banks: loaded, unavailable: None }
}

/// The bank that holds the candidates of `span` on each instance.
fn loaded_bank(candidates: &[Candidate], span: &[usize], backend: &dyn NpuBackend) -> LoadedBank {
    let places = || span.iter().map(|place| &candidates[*place]);
    let own = |instance: usize| places().map(|candidate| Arc::clone(&candidate.engine[instance])).collect();
    let instances = 0..backend.limits().instances;
    let bytes = places().flat_map(|candidate| &candidate.compiled).map(|compiled| compiled.resident_bytes).sum();
    LoadedBank {
        keys: places().map(|candidate| candidate.key).collect(),
        procedures: instances.map(|instance| (DeviceId(1 + instance as u16), own(instance))).collect(),
        bytes: if backend.shares_weights() { 0 } else { bytes },
        benefit: places().flat_map(|candidate| &candidate.engine).map(|procedure| procedure.work() as f64).sum(),
    }
}

/// Packs the weights of every admitted projection, one after another.
fn pack_all(
    graph: &StepGraph,
    source: &dyn WeightSource,
    records: &[Record],
    limits: &Limits,
    tile: usize,
    pack: &dyn Fn(&StoredTensor) -> ChannelWeights,
    progress: &mut dyn FnMut(Stage, usize, usize),
) -> Vec<Candidate> {
    let admitted: Vec<usize> = (0..records.len()).filter(|i| records[*i].effective_fraction > 0.0).collect();
    let mut candidates = Vec::with_capacity(admitted.len());
    let mut next_id = 0;
    for (done, index) in admitted.iter().enumerate() {
        progress(Stage::Packing, done, admitted.len());
        let Record { eligibility, placement, .. } = &records[*index];
        let Eligibility { key, kind, weights, .. } = eligibility;
        let packed: Vec<Arc<ChannelWeights>> = weights
            .iter()
            .map(|weight| source.tensor(weight.key).expect("the dry run has seen it"))
            .map(|tensor| Arc::new(pack(&tensor)))
            .collect();
        let cut = cut_into_procedures(graph, eligibility, *placement, &packed, limits, tile, &mut next_id);
        let Cut { engine, primary, turns } = cut.expect("the dry run has seen it");
        candidates.push(Candidate {
            record: *index,
            key: *key,
            kind: *kind,
            engine,
            primary,
            turns,
            compiled: Vec::new(),
        });
    }
    progress(Stage::Packing, admitted.len(), admitted.len());
    candidates
}

/// The procedures of one projection.
pub(crate) struct Cut {
    /// What each instance loads.
    pub(crate) engine: Vec<Arc<Procedure>>,
    /// The primary device's part of a split.
    pub(crate) primary: Option<Arc<Procedure>>,
    /// Tiles go to the instances in turn.
    pub(crate) turns: bool,
}

/// Cuts a projection with these packed weights as `placement` says; `None` if that is no valid cut.
pub(crate) fn cut_into_procedures(
    graph: &StepGraph,
    eligibility: &Eligibility,
    placement: Placement,
    packed: &[Arc<ChannelWeights>],
    limits: &Limits,
    tile: usize,
    next_id: &mut u32,
) -> Option<Cut> {
    let Eligibility { key, kind, groups, .. } = eligibility;
    let cuts = partitions(eligibility, placement, limits)?;
    let mut procedure = |name: String, body: Body| {
        let id = ProcedureId(*next_id);
        *next_id += 1;
        Arc::new(Procedure { id, name, tile, body })
    };
    if *kind == Kind::SharedExpert {
        let node = graph.nodes().iter().find(|node| projection_key(&node.op) == Some(*key));
        let Some(Op::SharedExpert { limit, .. }) = node.map(|node| &node.op) else { unreachable!("of this graph") };
        let [w1, w2, w3] = [0, 1, 2].map(|i| Arc::clone(&packed[i]));
        let whole = procedure(key.to_string(), Body::SharedExpert { w1, w2, w3, limit: *limit });
        return Some(Cut { engine: vec![whole; limits.instances], primary: None, turns: true });
    }
    let mut part = |of: &dyn Fn(&Partition) -> std::ops::Range<usize>| {
        let products: Vec<Product> = packed
            .iter()
            .zip(&cuts)
            .map(|(weights, cut)| Product { weights: Arc::clone(weights), channels: of(cut) })
            .collect();
        let channels = products.iter().map(|p| format!("{}..{}", p.channels.start, p.channels.end));
        let name = format!("{key}[{}]", channels.collect::<Vec<_>>().join(","));
        procedure(name, Body::Products { groups: *groups, products })
    };
    let engine = (0..cuts[0].instances.len()).map(|i| part(&|cut| cut.instances[i].clone())).collect();
    let has_rest = cuts.iter().any(|cut| !cut.primary.is_empty());
    let primary = has_rest.then(|| part(&|cut| cut.primary.clone()));
    Some(Cut { engine, primary, turns: false })
}

/// Compiles everything now, so that no prompt waits for it; what the engine refuses is left out.
fn compile(
    candidates: &mut Vec<Candidate>,
    records: &mut [Record],
    backend: &dyn NpuBackend,
    progress: &mut dyn FnMut(Stage, usize, usize),
) {
    let (total, mut done) = (candidates.len(), 0);
    candidates.retain_mut(|candidate| {
        progress(Stage::Compiling, done, total);
        done += 1;
        // An instance without channels of its own has the last one's, unused.
        while candidate.engine.len() < backend.limits().instances {
            candidate.engine.push(Arc::clone(candidate.engine.last().expect("at least one")));
        }
        let compiled = candidate.engine.iter().map(|p| backend.compile(p).map(Arc::new)).collect();
        match compiled {
            Ok(compiled) => {
                candidate.compiled = compiled;
                true
            }
            Err(error) => {
                let error: NpuError = error;
                records[candidate.record].left_out = Some(format!("compile: {error}"));
                records[candidate.record].effective_fraction = 0.0;
                false
            }
        }
    });
    progress(Stage::Compiling, total, total);
}

/// Rows of a probe that the primary device's arithmetic is compared on.
const PROBED_ROWS: usize = 16;

/// Runs a procedure once, so that the first prompt does not pay for what engines do once, on noise, since zeros hide wrong
/// numbers. An engine whose arithmetic can be repeated must give the same bits; others must be within 2 % and 0.999 of
/// cosine (section 9.5 of the hybrid spec).
pub(crate) fn probe(procedure: &Procedure, repeatable: bool, run: &mut RunTile<'_>) -> Result<(), String> {
    let x = noise(procedure.tile * procedure.input_cols());
    let got = run(&x).map_err(|error| format!("warm-up: {error}"))?;
    let rows = PROBED_ROWS.min(procedure.tile);
    let want = procedure.compute_alone(&x[..rows * procedure.input_cols()]);
    let mut compared = Vec::new();
    let mut got = &got[..];
    for place in procedure.outputs(&(0..rows)) {
        let width = place.groups * place.channels.len();
        compared.extend_from_slice(&got[..rows * width]);
        got = &got[procedure.tile * width..];
    }
    let admits = (!repeatable).then_some(Error::is_small as fn(&Error) -> bool);
    difference(procedure, &compared, &want, admits).map_or(Ok(()), |what| Err(format!("quarantined: {what}")))
}

/// Roughly normal numbers, always the same.
pub(crate) fn noise(len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| next() + next() + next() + next()).collect()
}

impl Candidate {
    fn planned(self) -> PlannedProjection {
        let device = |instance: usize| DeviceId(1 + instance as u16);
        let shares = if self.turns {
            Shares::turns(self.key, self.engine.len(), Arc::clone(&self.engine[0]))
        } else {
            let mut shares: Vec<(DeviceId, Arc<Procedure>)> = Vec::new();
            for (instance, procedure) in self.engine.into_iter().enumerate() {
                if shares.iter().all(|(_, other)| other.id != procedure.id) {
                    shares.push((device(instance), procedure));
                }
            }
            shares.extend(self.primary.map(|procedure| (DeviceId::PRIMARY, procedure)));
            Shares::Channels(shares)
        };
        PlannedProjection { kind: self.kind, shares }
    }
}
