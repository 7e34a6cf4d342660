//! What engines are to do of each operation, and the runtime's plan that comes of it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use troika_base::{Format, SharedBytes, StoredTensor};
use troika_device::npu::{Body, ChannelWeights, Procedure, ProcedureId, Product};
use troika_graph::{Op, StepGraph, WeightKey, WeightRef, WeightSource};
use troika_model::emit::official_format;
use troika_runtime::eligibility::{Eligibility, eligibility};
use troika_runtime::partition::{Alignment, Partition};
use troika_runtime::plan::{PlannedProjection, Shares, projection_key};
use troika_runtime::{DeviceId, Plan};

use crate::SimError;
use crate::faults::Faults;
use crate::form::Projection;
use crate::profile::{Formats, Profile};

/// Where an operation is done.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Placement {
    /// On the primary device alone.
    #[default]
    Off,
    /// All of it on the engines, beside what the primary device does meanwhile.
    Whole,
    /// These fractions of the output channels on all engines together and on the CPU, the rest on the primary device.
    Split { engines: f64, cpu: f64 },
}

/// Placements of all operations, and the tile.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PlanSpec {
    /// Rows of a tile.
    pub tile: usize,
    /// Least rows that are worth a padded tile, 0 = none are; without it, as the prices say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tail_threshold: Option<usize>,
    /// The primary device waits for the parts of a split operation and does nothing else, as the published build did; without
    /// it, it does meanwhile what does not depend on them, as Troika's executor does.
    #[serde(default)]
    pub blocking: bool,
    /// Operations that are not named are off.
    #[serde(default)]
    pub place: BTreeMap<Projection, Placement>,
}

impl PlanSpec {
    /// Names of [`Self::named`].
    pub const NAMES: [&'static str; 4] = ["default", "published-2026-08", "published-27b", "off"];

    /// Everything on the primary device.
    pub fn primary(tile: usize) -> Self {
        Self { tile, tail_threshold: None, blocking: false, place: BTreeMap::new() }
    }

    /// A plan of section 4.5 of the hybrid spec: `default`, or `published-2026-08`, which splits `wo_a` too; `off` has nothing
    /// placed. `published-27b` is the plan of section 12.4.
    ///
    /// # Errors
    ///
    /// If there is none of that name.
    pub fn named(name: &str) -> Result<Self, SimError> {
        let split = |engines| Placement::Split { engines, cpu: 0.0 };
        if name == "published-27b" {
            let place = [(Projection::Mlp, split(0.47)), (Projection::AttentionInput, split(0.375))].into();
            return Ok(Self { tile: 2048, tail_threshold: None, blocking: true, place });
        }
        let mut plan = Self::primary(4096);
        if name == "off" {
            return Ok(plan);
        }
        plan.place.extend([
            (Projection::Query, split(0.5)),
            (Projection::Mlp, split(0.5)),
            (Projection::MlpDown, split(0.65)),
            (Projection::AttentionInput, split(0.5)),
            (Projection::AttentionInputSparse, split(0.6)),
        ]);
        match name {
            "default" => {}
            "published-2026-08" => {
                plan.blocking = true;
                plan.place.insert(Projection::WoA, split(0.5));
            }
            _ => {
                let (name, known) = (name.to_owned(), Self::NAMES.join(", "));
                return Err(SimError::UnknownName { what: "plan", name, known });
            }
        }
        Ok(plan)
    }

    /// Reads a plan file; `origin` is where the text comes from, for messages.
    ///
    /// # Errors
    ///
    /// If it is malformed.
    pub fn parse(text: &str, origin: &str) -> Result<Self, SimError> {
        toml::from_str(text)
            .map_err(|error| SimError::Malformed { origin: origin.to_owned(), reason: error.to_string() })
    }

    /// The placement of an operation.
    pub fn of(&self, projection: Projection) -> Placement {
        self.place.get(&projection).copied().unwrap_or_default()
    }

    /// With another placement of one operation.
    #[must_use]
    pub fn with(mut self, projection: Projection, placement: Placement) -> Self {
        self.place.insert(projection, placement);
        self
    }

    /// Operations that engines are to take part in.
    pub fn placed(&self) -> impl Iterator<Item = (Projection, Placement)> + '_ {
        self.place.iter().map(|(projection, placement)| (*projection, *placement)).filter(|(_, p)| *p != Placement::Off)
    }

    /// True if the shared expert is to be two operations.
    pub(crate) fn cuts_shared(&self) -> bool {
        [Projection::Mlp, Projection::MlpDown].iter().any(|part| self.of(*part) != Placement::Off)
    }

    pub(crate) fn check(&self, profile: &Profile) -> Result<(), SimError> {
        let refuse = |reason: String| Err(SimError::Plan(reason));
        if self.cuts_shared() && self.of(Projection::Shared) != Placement::Off {
            return refuse("the shared expert is either whole (shared) or in two parts (mlp, mlp_down)".to_owned());
        }
        let engines = &profile.engines;
        if self.tile < engines.min_tile || !self.tile.is_multiple_of(engines.tile_multiple) {
            let (least, multiple) = (engines.min_tile, engines.tile_multiple);
            return refuse(format!(
                "tile {}: {} takes multiples of {multiple} from {least} on",
                self.tile, engines.name
            ));
        }
        for (projection, _) in self.placed() {
            profile.projection(projection)?;
        }
        for (projection, placement) in &self.place {
            let Placement::Split { engines, cpu } = *placement else { continue };
            if *projection == Projection::Shared {
                return refuse("shared is whole or off; mlp and mlp_down can be split".to_owned());
            }
            if !(engines > 0.0 && engines < 1.0 && (0.0..0.5).contains(&cpu) && engines + cpu < 1.0) {
                return refuse(format!(
                    "{projection}: engines get more than 0 and less than 1, the CPU less than 0.5, both less than 1 \
                     together; got {engines} and {cpu}"
                ));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Whole => f.write_str("whole"),
            Self::Split { engines, cpu: 0.0 } => write!(f, "split:{engines}"),
            Self::Split { engines, cpu } => write!(f, "split:{engines}+{cpu}"),
        }
    }
}

impl FromStr for Placement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let grammar = || format!("{text} is not off, whole, split:ENGINES or split:ENGINES+CPU");
        let number = |text: &str| text.parse::<f64>().map_err(|_| grammar());
        match text {
            "off" => Ok(Self::Off),
            "whole" => Ok(Self::Whole),
            _ => {
                let fractions = text.strip_prefix("split:").ok_or_else(grammar)?;
                let (engines, cpu) = fractions.split_once('+').unwrap_or((fractions, "0"));
                Ok(Self::Split { engines: number(engines)?, cpu: number(cpu)? })
            }
        }
    }
}

impl Serialize for Placement {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Placement {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// An operation of a layer that is not placed as the plan says, or not quite.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    pub projection: Projection,
    /// How many layers.
    pub layers: usize,
    pub reason: String,
}

/// The devices of a simulated machine, as the plan numbers them: primary, instances, CPU.
pub(crate) fn cpu_device(instances: usize) -> DeviceId {
    DeviceId(1 + instances as u16)
}

/// A plan that can run, and what of the wish is not in it.
pub(crate) struct Built {
    pub(crate) plan: Plan,
    pub(crate) left_out: Vec<LeftOut>,
}

/// Weights without numbers: forms and shapes, and memory that nobody ever touches.
pub(crate) struct Shapes {
    weights: BTreeMap<WeightKey, WeightRef>,
    formats: Formats,
}

impl Shapes {
    pub(crate) fn of(graph: &StepGraph, formats: Formats) -> Self {
        let weights = graph.nodes().iter().filter(|node| projection_key(&node.op).is_some());
        let weights = weights.flat_map(|node| node.op.weights()).map(|weight| (weight.key, weight)).collect();
        Self { weights, formats }
    }

    fn format(&self, weight: &WeightRef) -> Format {
        match self.formats {
            Formats::Official => official_format(weight.key.role),
            Formats::Affine4 => Format::Affine { bits: 4, group: 64, scale: troika_base::storage::ScaleFormat::Bf16 },
        }
    }
}

impl WeightSource for Shapes {
    fn tensor(&self, key: WeightKey) -> Option<StoredTensor> {
        let weight = self.weights.get(&key)?;
        let format = self.format(weight);
        let lengths = format.byte_lengths(weight.rows, weight.cols)?;
        // Zeroed memory is not there before somebody writes to it, which nobody does.
        StoredTensor::new(format, weight.rows, weight.cols, lengths.map(|bytes| SharedBytes::new(vec![0u8; bytes])))
            .ok()
    }

    fn keys(&self) -> Vec<WeightKey> {
        self.weights.keys().copied().collect()
    }
}

/// Rounds weights for engines: really, or shapes alone.
pub(crate) type Pack<'a> = dyn FnMut(&WeightRef) -> Arc<ChannelWeights> + 'a;

/// Shapes of rounded weights, one for all weights of a shape.
pub(crate) fn pack_shapes() -> impl FnMut(&WeightRef) -> Arc<ChannelWeights> {
    let mut known: BTreeMap<(usize, usize), Arc<ChannelWeights>> = BTreeMap::new();
    move |weight| {
        let shape = (weight.rows, weight.cols);
        Arc::clone(known.entry(shape).or_insert_with(|| {
            let lengths = Format::Mxfp4.byte_lengths(shape.0, shape.1).expect("eligible inputs fill groups");
            let parts = lengths.map(|bytes| SharedBytes::new(vec![0u8; bytes]));
            let tensor = StoredTensor::new(Format::Mxfp4, shape.0, shape.1, parts).expect("of that length");
            Arc::new(ChannelWeights::refer(&tensor).expect("of that format"))
        }))
    }
}

/// Cuts the operations of `graph` as `spec` says. If they are to be computed, members of a stack that are too narrow to be cut
/// keep all of it on the primary device: a procedure has an output for each.
#[expect(clippy::too_many_arguments, reason = "each is another thing, and there are two callers")]
pub(crate) fn build(
    graph: &StepGraph,
    spec: &PlanSpec,
    tail_threshold: usize,
    profile: &Profile,
    source: &dyn WeightSource,
    faults: &Faults,
    computes: bool,
    pack: &mut Pack<'_>,
) -> Built {
    let limits = profile.limits();
    let cutter = Cutter { graph, spec, profile, faults, computes };
    let kinds: BTreeMap<WeightKey, Projection> =
        graph.nodes().iter().filter_map(|node| projection_key(&node.op).zip(Projection::of(node))).collect();
    let mut projections = BTreeMap::new();
    let mut left_out: Vec<LeftOut> = Vec::new();
    let mut note = |projection: Projection, reason: String| match left_out
        .iter_mut()
        .find(|other| other.projection == projection && other.reason == reason)
    {
        Some(known) => known.layers += 1,
        None => left_out.push(LeftOut { projection, layers: 1, reason }),
    };
    let mut next_id = 0;
    let mut bank_bytes = 0;
    for candidate in eligibility(graph, source, &limits) {
        let Some(projection) = kinds.get(&candidate.key).copied() else { continue };
        let placement = spec.of(projection);
        if placement == Placement::Off {
            continue;
        }
        let refused = candidate.reason.clone().or_else(|| mixed_formats(&candidate, source));
        if let Some(reason) = refused {
            note(projection, format!("ineligible_weight: {reason}"));
            continue;
        }
        match cutter.cut(&candidate, projection, placement, &mut next_id, pack) {
            Err(reason) => note(projection, reason),
            Ok(Cut { shares, bytes, without_cpu }) => {
                if bank_bytes + bytes > cutter.bank_limit() {
                    note(projection, format!("bank_budget: an instance takes {} bytes", cutter.bank_limit()));
                    continue;
                }
                bank_bytes += bytes;
                if let Some(reason) = without_cpu {
                    note(projection, reason);
                }
                projections.insert(candidate.key, PlannedProjection { kind: candidate.kind, shares });
            }
        }
    }
    let plan = match projections.is_empty() {
        true => Plan::primary(),
        false => Plan::new(spec.tile, tail_threshold, projections, "simulated"),
    };
    Built { plan, left_out }
}

fn mixed_formats(candidate: &Eligibility, source: &dyn WeightSource) -> Option<String> {
    let format = |weight: &WeightRef| source.tensor(weight.key).map(|tensor| tensor.format());
    let first = candidate.weights.first().and_then(format);
    let other = candidate.weights.iter().map(format).find(|other| *other != first)?;
    Some(format!("a stack of {} and {} is no one procedure", first?, other?))
}

struct Cutter<'a> {
    graph: &'a StepGraph,
    spec: &'a PlanSpec,
    profile: &'a Profile,
    faults: &'a Faults,
    computes: bool,
}

struct Cut {
    shares: Shares,
    /// On the fullest instance.
    bytes: u64,
    /// Why the CPU has no share although it should.
    without_cpu: Option<String>,
}

impl Cutter<'_> {
    fn bank_limit(&self) -> u64 {
        self.faults.bank_limit_bytes.unwrap_or(u64::MAX).min(self.profile.limits().bank_bytes)
    }

    fn cut(
        &self,
        candidate: &Eligibility,
        projection: Projection,
        placement: Placement,
        next_id: &mut u32,
        pack: &mut Pack<'_>,
    ) -> Result<Cut, String> {
        let instances = self.profile.engines.instances;
        let tile = self.spec.tile;
        let mut procedure = |name: String, body: Body| {
            let id = ProcedureId(*next_id);
            *next_id += 1;
            Arc::new(Procedure { id, name, tile, body })
        };
        let key = candidate.key;
        if projection == Projection::Shared {
            let node = self.graph.nodes().iter().find(|node| projection_key(&node.op) == Some(key));
            let Some(Op::SharedExpert { limit, .. }) = node.map(|node| &node.op) else { unreachable!("of this graph") };
            let [w1, w2, w3] = [0, 1, 2].map(|i| pack(&candidate.weights[i]));
            let whole = procedure(key.to_string(), Body::SharedExpert { w1, w2, w3, limit: *limit });
            self.check_compiler(&whole)?;
            let bytes = whole.weight_bytes();
            return Ok(Cut { shares: Shares::turns(key, instances, whole), bytes, without_cpu: None });
        }
        let cuts: Vec<Option<Channels>> =
            candidate.weights.iter().map(|weight| self.partition(weight.rows / candidate.groups, placement)).collect();
        let num_uncut = cuts.iter().filter(|cut| cut.is_none()).count();
        if num_uncut == cuts.len() || (self.computes && num_uncut > 0) {
            return Err(self.too_few(placement));
        }
        // Members of a stack that are too narrow to be cut stay with the primary device.
        let uncut = |weight: &WeightRef| Channels::primary(weight.rows / candidate.groups, instances);
        let pairs = candidate.weights.iter().zip(cuts);
        let cuts: Vec<Channels> = pairs.map(|(weight, cut)| cut.unwrap_or_else(|| uncut(weight))).collect();
        let packed: Vec<Arc<ChannelWeights>> = candidate.weights.iter().map(pack).collect();
        let mut part = |of: &dyn Fn(&Channels) -> Range<usize>| {
            let parts = packed.iter().zip(&cuts);
            let products: Vec<Product> = parts
                .map(|(weights, cut)| Product { weights: Arc::clone(weights), channels: of(cut) })
                .filter(|product| !product.channels.is_empty())
                .collect();
            let channels = products.iter().map(|p| format!("{}..{}", p.channels.start, p.channels.end));
            let name = format!("{key}[{}]", channels.collect::<Vec<_>>().join(","));
            procedure(name, Body::Products { groups: candidate.groups, products })
        };
        let mut shares = Vec::new();
        let mut bytes = 0;
        for instance in 0..instances {
            if cuts.iter().all(|cut| cut.instances[instance].is_empty()) {
                continue;
            }
            let own = part(&|cut| cut.instances[instance].clone());
            self.check_compiler(&own)?;
            bytes = own.weight_bytes().max(bytes);
            shares.push((DeviceId(1 + instance as u16), own));
        }
        let mut without_cpu = None;
        if let Placement::Split { cpu, .. } = placement
            && cpu > 0.0
        {
            match cuts.iter().any(|cut| !cut.cpu.is_empty()) {
                true => shares.push((cpu_device(instances), part(&|cut| cut.cpu.clone()))),
                false => without_cpu = Some(self.no_cpu(projection)),
            }
        }
        if cuts.iter().any(|cut| !cut.primary.is_empty()) {
            shares.push((DeviceId::PRIMARY, part(&|cut| cut.primary.clone())));
        }
        Ok(Cut { shares: Shares::Channels(shares), bytes, without_cpu })
    }

    fn no_cpu(&self, projection: Projection) -> String {
        match () {
            () if self.faults.missing_cpu_symbol => {
                "missing_symbol: the CPU's product is not in its library".to_owned()
            }
            () if self.profile.cpu.is_none() => "no CPU share: the profile has no CPU".to_owned(),
            () => format!("no CPU share: too few channels of {projection}"),
        }
    }

    fn too_few(&self, placement: Placement) -> String {
        let multiple = self.profile.engines.channel_alignment;
        format!("no valid cut: {placement} leaves an instance no multiple of {multiple} output channels")
    }

    fn check_compiler(&self, procedure: &Procedure) -> Result<(), String> {
        match self.faults.compile_limit_bytes {
            Some(limit) if procedure.weight_bytes() > limit => {
                Err(format!("compile: {} bytes of weights, more than {limit}", procedure.weight_bytes()))
            }
            _ => Ok(()),
        }
    }

    /// Channels of each group: instances first, then CPU, then primary device.
    fn partition(&self, out: usize, placement: Placement) -> Option<Channels> {
        let engines = &self.profile.engines;
        let alignment = Alignment { engine: engines.channel_alignment, primary: 8 };
        match placement {
            Placement::Off => None,
            Placement::Whole => {
                let Partition { mut instances, .. } = Partition::whole(out, engines.instances, alignment)?;
                instances.resize(engines.instances, out..out);
                Some(Channels { instances, cpu: out..out, primary: out..out })
            }
            Placement::Split { engines: fraction, cpu } => {
                let split = Partition::split(out, fraction, engines.instances, alignment)?;
                let Partition { instances, primary } = split;
                let aligned = self.profile.cpu.as_ref().filter(|_| !self.faults.missing_cpu_symbol);
                let cpu = aligned
                    .map_or(0, |own| (out as f64 * cpu) as usize / own.channel_alignment * own.channel_alignment);
                let middle = primary.start + cpu.min(primary.len());
                Some(Channels { instances, cpu: primary.start..middle, primary: middle..primary.end })
            }
        }
    }
}

struct Channels {
    /// One for each instance, maybe empty.
    instances: Vec<Range<usize>>,
    cpu: Range<usize>,
    primary: Range<usize>,
}

impl Channels {
    fn primary(out: usize, instances: usize) -> Self {
        Self { instances: vec![0..0; instances], cpu: 0..0, primary: 0..out }
    }
}
