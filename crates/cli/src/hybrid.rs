//! Neural engines on the command line: which, for what, and whether they must really run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use troika_base::NumericClass;
use troika_device::DeviceError;
use troika_device::npu::cache::Cached;
use troika_device::npu::ort::{Form, LIBRARY_NAME, Ort, OrtOptions, Provider};
use troika_device::npu::sim::{Sim, SimFaults, SimRates};
use troika_device::npu::soft::{Soft, SoftOptions};
use troika_device::npu::{NpuBackend, NpuError};
use troika_engine::{Choice, CostTable, FeatureState, HybridOptions, HybridStatus, Placement};
use troika_graph::Kind;

use crate::plan_file;
use crate::size::Size;

/// Which engines take part in prefill, and how.
#[derive(Clone, Debug, Args)]
pub(crate) struct HybridArgs {
    /// A neural engine beside the CPU: `soft`, which computes on cores of its own, optionally with `:cores=N,instances=N`; or
    /// `ort`, one that ONNX Runtime knows, optionally with
    /// `:lib=PATH,provider=cpu|qnn|openvino|coreml|vitis,plugin=PATH,form=qdq|float,instances=N,threads=N,set.NAME=VALUE`; or
    /// `sim`, a simulated one that computes like `soft` and fails on demand, with --hybrid on and optionally with
    /// `:cores=N,instances=N,tops=X,launch-us=X,compile-limit=SIZE,fail-loads=N,bank-limit=SIZE,copies=on,fail-at=N,corrupt=X,corrupt-from=N`.
    #[arg(long, value_name = "ENGINE")]
    npu: Option<NpuSpec>,
    /// Whether the engines of --npu take part in prefill: `auto` if prompts are predicted to be shorter with them, `on`
    /// always, `off` never.
    #[arg(long, value_enum, default_value_t = Hybrid::Auto)]
    hybrid: Hybrid,
    /// Rows of a tile: engines compute prefill steps of at least this many tokens.
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    tile: u32,
    /// Least tokens that fill a tile up with zeros instead of going to the CPU; 0 = never. Without it, as measured.
    #[arg(long, value_name = "N")]
    tail: Option<u32>,
    /// What engines do of a kind of projection, such as `wq_b=split:0.5,wo_b=whole`; others as measured. With `--hybrid on`
    /// nothing is measured: then others are the CPU's, but for the shared expert (whole) and wq_b (split in half).
    #[arg(long, value_delimiter = ',', value_name = "KIND=PLACEMENT,...")]
    place: Vec<PlaceSpec>,
    /// Hand over the projections that share a layer's input (wq_a, wkv, compressors, the indexer's weights) as one, which --place calls
    /// attention_input.
    #[arg(long)]
    stack_inputs: bool,
    /// Measure again what projections cost on each device, even if it is known from an earlier start.
    #[arg(long)]
    calibrate: bool,
    /// Folder of what was measured, so that a restart has the same plan, and of what engines have compiled, so that it need not
    /// be compiled again. Without it `troika/plans` in $XDG_CACHE_HOME, or in ~/.cache.
    #[arg(long, value_name = "DIR")]
    plan_dir: Option<PathBuf>,
    /// Most that compiled programs take in that folder, such as 8G; those used longest ago go first. 0 keeps none.
    #[arg(long, default_value = "16G", value_name = "SIZE")]
    program_limit: Size,
    /// Fail if engines cannot take part; `bench` also fails unless they did what was planned for them.
    #[arg(long)]
    require_engaged: bool,
}

/// How many chunks of prompts are computed side by side.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WavefrontArgs {
    /// Prompt chunks in flight at once, of one prompt or of several: while engines compute projections of one, the CPU goes on
    /// with another. Results are the same; each chunk takes memory for its values. Without it, as many as measurements say
    /// are worth it, and 1 if nothing was measured.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3))]
    wavefront: Option<u8>,
}

impl WavefrontArgs {
    /// Steps of prompts that may be in flight, if that was said.
    pub(crate) fn steps(self) -> Option<usize> {
        self.wavefront.map(usize::from)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Hybrid {
    Auto,
    Off,
    On,
}

/// An engine, as it is named on the command line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum NpuSpec {
    Soft(SoftOptions),
    /// What computes, what goes wrong, how long it would take.
    Sim(SoftOptions, SimFaults, SimRates),
    /// Without places if no library is named.
    Ort(OrtOptions),
}

impl FromStr for NpuSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let settings = settings.split(',').filter(|setting| !setting.is_empty());
        let pairs = settings.map(|setting| setting.split_once('=').unwrap_or((setting, "")));
        match name {
            "soft" => soft_options(pairs).map(Self::Soft),
            "ort" => ort_options(pairs).map(Self::Ort),
            "sim" => sim_options(pairs),
            _ => Err(format!("unknown engine `{name}`: expected `soft`, `ort` or `sim`")),
        }
    }
}

fn soft_options<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Result<SoftOptions, String> {
    let mut options = SoftOptions::default();
    for (key, value) in pairs {
        match key {
            "cores" => options.cores = count(key, value)?,
            "instances" => options.instances = count(key, value)?,
            _ => return Err(format!("unknown setting `{key}`: expected `cores` or `instances`")),
        }
    }
    Ok(options)
}

fn sim_options<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Result<NpuSpec, String> {
    let (mut soft, mut faults, mut rates) = (SoftOptions::default(), SimFaults::default(), SimRates::default());
    for (key, value) in pairs {
        let run = || value.parse::<u64>().map_err(|_| format!("{key} must be the number of a run, not `{value}`"));
        let bytes = || value.parse::<Size>().map(|size| size.0).map_err(|error| format!("{key}: {error}"));
        let number = || match value.parse::<f64>() {
            Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
            _ => Err(format!("{key} must be a number above 0, not `{value}`")),
        };
        match key {
            "cores" => soft.cores = count(key, value)?,
            "instances" => soft.instances = count(key, value)?,
            "tops" => rates.tops = number()?,
            "launch-us" => rates.launch_us = number()?,
            "compile-limit" => faults.compile_limit = Some(bytes()?),
            "bank-limit" => faults.bank_limit = Some(bytes()?),
            "fail-loads" => faults.failing_loads = count(key, value)? as u32,
            "fail-at" => faults.failing_run = Some(run()?),
            "corrupt" => faults.noise = number()? as f32,
            "corrupt-from" => faults.noise_from = Some(run()?),
            "copies" if value == "on" => faults.copies_weights = true,
            "copies" => return Err(format!("copies is `on` or left out, not `{value}`")),
            _ => {
                return Err(format!(
                    "unknown setting `{key}`: expected cores, instances, tops, launch-us, compile-limit, fail-loads, \
                     bank-limit, copies, fail-at, corrupt or corrupt-from"
                ));
            }
        }
    }
    if faults.noise_from.is_some() && faults.noise == 0.0 {
        return Err("corrupt-from needs corrupt, what is added to results from there on".to_owned());
    }
    Ok(NpuSpec::Sim(soft, faults, rates))
}

fn ort_options<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Result<OrtOptions, String> {
    let mut options = OrtOptions::default();
    for (key, value) in pairs {
        let path = || if value.is_empty() { Err(format!("{key} needs a path")) } else { Ok(PathBuf::from(value)) };
        match (key, key.strip_prefix("set.")) {
            ("lib", _) => options.places = vec![path()?],
            ("provider", _) => options.provider = value.parse()?,
            ("plugin", _) => options.plugin = Some(path()?),
            ("form", _) => {
                options.form = Some(match value {
                    "qdq" => Form::Quantized,
                    "float" => Form::Float,
                    _ => return Err(format!("unknown form `{value}`: expected `qdq` or `float`")),
                });
            }
            ("instances", _) => options.instances = count(key, value)?,
            ("threads", _) => options.threads = count(key, value)?,
            (_, Some(name)) => drop(options.settings.insert(name.to_owned(), value.to_owned())),
            _ => {
                return Err(format!(
                    "unknown setting `{key}`: expected lib, provider, plugin, form, instances, threads or set.NAME"
                ));
            }
        }
    }
    let refuse = |what: &str| Err(format!("{what} means nothing to provider {}", options.provider));
    match options.provider {
        Provider::Cpu if options.plugin.is_some() => refuse("plugin"),
        Provider::Cpu if !options.settings.is_empty() => refuse("set.NAME"),
        Provider::Cpu => Ok(options),
        _ if options.threads != 1 => refuse("threads"),
        _ => Ok(options),
    }
}

fn count(key: &str, value: &str) -> Result<usize, String> {
    match value.parse() {
        Ok(number @ 1..=1024) => Ok(number),
        _ => Err(format!("{key} must be a number from 1 to 1024, not `{value}`")),
    }
}

/// Where ONNX Runtime is looked for if its place is not named: the one that $ORT_DYLIB_PATH names, or else the Python
/// environment that is active, and the system's search.
fn usual_places() -> Vec<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    match set("ORT_DYLIB_PATH") {
        Some(path) => vec![path],
        None => set("VIRTUAL_ENV").into_iter().chain([PathBuf::from(LIBRARY_NAME)]).collect(),
    }
}

/// Where an engine's compiled programs are kept, and how many bytes of them at most.
pub(crate) struct ProgramStore {
    pub(crate) dir: PathBuf,
    pub(crate) limit_bytes: u64,
}

/// The programs' folder in the one of plans.
pub(crate) fn program_dir(plan_dir: Option<&Path>) -> Option<PathBuf> {
    plan_file::folder(plan_dir).map(|dir| dir.join("programs"))
}

impl NpuSpec {
    /// Of the engine.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Soft(_) => "soft",
            Self::Ort(_) => "ort",
            Self::Sim(..) => "sim",
        }
    }

    /// Cores that it takes from the CPU, as far as its name says: those of ONNX Runtime are known when it runs.
    pub(crate) fn soft_cores(&self) -> usize {
        match self {
            Self::Soft(options) | Self::Sim(options, ..) => options.cores * options.instances,
            Self::Ort(_) => 0,
        }
    }

    /// True if no time with it is an engine's.
    pub(crate) fn is_simulated(&self) -> bool {
        matches!(self, Self::Sim(..))
    }

    fn start_soft(&self, options: SoftOptions) -> Result<Arc<dyn NpuBackend>, NpuError> {
        let unavailable = |error: DeviceError| {
            let (name, reason) = (self.name().to_owned(), error.to_string());
            NpuError::Unavailable { name, reason }
        };
        Ok(Arc::new(Soft::start(options).map_err(unavailable)?))
    }

    /// Starts the engine; also returns the cores that it takes from the CPU. What it compiles is kept in `store`, if that is
    /// worth while.
    pub(crate) fn start(&self, store: Option<ProgramStore>) -> Result<(Arc<dyn NpuBackend>, usize), NpuError> {
        match self {
            Self::Soft(options) => Ok((self.start_soft(*options)?, options.cores * options.instances)),
            Self::Sim(soft, faults, rates) => {
                let sim = Sim::new(self.start_soft(*soft)?, faults.clone()).with_rates(*rates);
                // The warm-up counts too, so that it can fail.
                sim.arm();
                Ok((Arc::new(sim), soft.cores * soft.instances))
            }
            Self::Ort(options) => {
                let mut options = options.clone();
                if options.places.is_empty() {
                    options.places = usual_places();
                }
                let ort = Ort::start(&options)?;
                let (cores, keeps) = (ort.num_cores(), ort.compiles_ahead());
                let backend: Arc<dyn NpuBackend> = Arc::new(ort);
                let Some(ProgramStore { dir, limit_bytes }) = store.filter(|store| keeps && store.limit_bytes > 0)
                else {
                    return Ok((backend, cores));
                };
                Ok(match Cached::open(Arc::clone(&backend), &dir, limit_bytes) {
                    Ok(cached) => (Arc::new(cached), cores),
                    Err(error) => {
                        let dir = dir.display();
                        tracing::warn!(%dir, %error, "what is compiled is not kept; --plan-dir names another folder");
                        (backend, cores)
                    }
                })
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct PlaceSpec(Kind, Placement);

/// Kinds of projections, by the names that they have on the command line.
const KINDS: [(&str, Kind); 9] = [
    ("attention_input", Kind::AttentionInput),
    ("wq_a", Kind::WqA),
    ("wq_b", Kind::WqB),
    ("wkv", Kind::Wkv),
    ("wo_a", Kind::WoA),
    ("wo_b", Kind::WoB),
    ("compressor", Kind::CsaCompressor),
    ("indexer_compressor", Kind::IndexerCompressor),
    ("shared", Kind::SharedExpert),
];

impl FromStr for PlaceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, placement) = text.split_once('=').ok_or("expected KIND=PLACEMENT")?;
        let kind = KINDS.iter().find(|(other, _)| *other == name).map(|(_, kind)| *kind).ok_or_else(|| {
            format!("unknown kind `{name}`: expected one of {}", KINDS.map(|(name, _)| name).join(", "))
        })?;
        let placement = match placement.split_once(':') {
            None if placement == "primary" => Placement::Primary,
            None if placement == "whole" => Placement::Whole,
            None if placement == "split" => Placement::Split(0.5),
            Some(("split", fraction)) => match fraction.parse() {
                Ok(fraction) if fraction > 0.0 && fraction < 1.0 => Placement::Split(fraction),
                _ => return Err(format!("a fraction lies between 0 and 1, not at `{fraction}`")),
            },
            _ => return Err(format!("unknown placement `{placement}`: expected primary, whole or split:FRACTION")),
        };
        Ok(Self(kind, placement))
    }
}

/// What the command line asks for, and whether it can be had.
pub(crate) enum Wished {
    /// No engine.
    Nothing,
    /// One that is not there; why.
    Unavailable(String),
    Engines(Wish),
}

impl Wished {
    /// The engines, where nothing can be done without.
    pub(crate) fn engines(self) -> Result<Wish> {
        match self {
            Self::Engines(wish) => Ok(wish),
            Self::Unavailable(reason) => anyhow::bail!(reason),
            Self::Nothing => anyhow::bail!("no engine is named: name one with --npu, such as --npu soft"),
        }
    }
}

/// An engine that is there, and what it is to do.
pub(crate) struct Wish {
    pub(crate) backend: Arc<dyn NpuBackend>,
    pub(crate) options: HybridOptions,
    /// Placements that were said.
    pub(crate) said: BTreeMap<Kind, Placement>,
    /// Cores that the engine takes from the CPU.
    pub(crate) cores: usize,
}

/// The name that a kind has on the command line.
pub(crate) fn name_of(kind: Kind) -> Option<&'static str> {
    let kind = if kind == Kind::HcaCompressor { Kind::CsaCompressor } else { kind };
    KINDS.iter().find(|(_, other)| *other == kind).map(|(name, _)| *name)
}

impl HybridArgs {
    /// As if all of it had been said on the command line.
    pub(crate) fn of(npu: &str, tile: usize, tail: usize, place: &BTreeMap<String, String>) -> Result<Self> {
        let parsed = |what: &str, error: String| anyhow::anyhow!("{what}: {error}");
        let place = place.iter().map(|(kind, placement)| format!("{kind}={placement}"));
        let place = place.map(|text| text.parse().map_err(|error| parsed(&text, error))).collect::<Result<_>>()?;
        Ok(Self {
            npu: Some(npu.parse().map_err(|error| parsed(npu, error))?),
            hybrid: Hybrid::On,
            tile: u32::try_from(tile)?,
            tail: Some(u32::try_from(tail)?),
            place,
            stack_inputs: false,
            calibrate: false,
            plan_dir: None,
            program_limit: Size(16 << 30),
            require_engaged: false,
        })
    }

    /// The same without engines.
    pub(crate) fn without_engines(&self) -> Self {
        Self { npu: None, hybrid: Hybrid::Off, ..self.clone() }
    }

    /// The same for engines that must take part if it was said so here.
    pub(crate) fn required_as(mut self, other: &Self) -> Self {
        self.require_engaged = other.require_engaged;
        self
    }

    /// True if there is an engine to take part.
    pub(crate) fn names_engine(&self) -> bool {
        self.npu.is_some() && self.hybrid != Hybrid::Off
    }

    /// True if the engine that takes part is simulated.
    pub(crate) fn is_simulated(&self) -> bool {
        self.names_engine() && self.npu.as_ref().is_some_and(NpuSpec::is_simulated)
    }

    /// Starts the engine that was named, if it is to take part.
    pub(crate) fn wish(&self) -> Result<Wished> {
        let Some(spec) = &self.npu else {
            ensure!(self.hybrid != Hybrid::On, "--hybrid on needs an engine: name one with --npu, such as --npu soft");
            ensure!(
                !self.require_engaged,
                "--require-engaged needs an engine: name one with --npu, such as --npu soft"
            );
            return Ok(Wished::Nothing);
        };
        if self.hybrid == Hybrid::Off {
            ensure!(!self.require_engaged, "--require-engaged contradicts --hybrid off");
            return Ok(Wished::Nothing);
        }
        ensure!(
            !spec.is_simulated() || (self.hybrid == Hybrid::On && !self.calibrate),
            "--npu sim is a simulated engine, with no times to choose by: say --hybrid on; `troika sim` predicts times"
        );
        let mut said = BTreeMap::new();
        for PlaceSpec(kind, placement) in &self.place {
            let name = name_of(*kind).unwrap_or_default();
            match kind {
                Kind::AttentionInput => {
                    ensure!(self.stack_inputs, "--place {name}: these are one projection with --stack-inputs alone");
                }
                Kind::WqA | Kind::Wkv | Kind::CsaCompressor | Kind::IndexerCompressor => {
                    ensure!(!self.stack_inputs, "--place {name}: with --stack-inputs it is a part of attention_input");
                }
                _ => {}
            }
            said.insert(*kind, *placement);
            if *kind == Kind::CsaCompressor {
                said.insert(Kind::HcaCompressor, *placement);
            }
        }
        let mut placements = HybridOptions::default_placements();
        placements.extend(said.iter().map(|(kind, placement)| (*kind, *placement)));
        let options = HybridOptions {
            tile: self.tile as usize,
            tail_threshold: self.tail.unwrap_or(0) as usize,
            placements,
            shapes: BTreeMap::new(),
            memory_bytes: u64::MAX,
            stack_inputs: self.stack_inputs,
        };
        let dir = program_dir(self.plan_dir.as_deref());
        let store = dir.map(|dir| ProgramStore { dir, limit_bytes: self.program_limit.0 });
        Ok(match spec.start(store) {
            Ok((backend, cores)) => Wished::Engines(Wish { backend, options, said, cores }),
            Err(error) => Wished::Unavailable(error.to_string()),
        })
    }

    /// True if what is not said is to be measured.
    fn measures(&self, wish: &Wish, class: NumericClass) -> bool {
        let limits = wish.backend.limits();
        let tile = wish.options.tile;
        // What cannot be is found out, with its reason, when engines are prepared.
        let is_possible = class == NumericClass::Fast
            && tile >= limits.min_tile
            && tile.is_multiple_of(limits.tile_multiple)
            && wish.backend.simulated_ns().is_none();
        is_possible && (self.hybrid == Hybrid::Auto || self.place.is_empty())
    }

    /// Completes the wish by what was measured, and returns what is expected of it; `None` if all was said. `measure` is
    /// asked for the costs, given the folder where they are kept and whether to measure afresh; `choose` makes of them what
    /// is best, given what was said.
    pub(crate) fn complete(
        &self,
        wish: &mut Wish,
        class: NumericClass,
        measure: impl FnOnce(Option<&Path>, bool) -> Result<CostTable>,
        choose: impl FnOnce(&CostTable, &BTreeMap<Kind, Placement>) -> Choice,
    ) -> Result<Option<Choice>> {
        if !self.measures(wish, class) {
            return Ok(None);
        }
        let choice = choose(&measure(self.plan_dir.as_deref(), self.calibrate)?, &wish.said);
        let refused = choice.operations.iter().filter_map(|(key, choice)| Some((*key, choice.refused.as_ref()?)));
        for ((kind, [out, cols]), reason) in refused {
            let kind_name = kind.name();
            tracing::warn!(kind = kind_name, out, cols, reason, "the engine's numbers are wrong; the CPU does it");
            wish.options.shapes.insert((kind, [out, cols]), Placement::Primary);
        }
        if choice.places_any() {
            (wish.options.placements, wish.options.shapes) = (BTreeMap::new(), choice.placements());
        } else {
            tracing::warn!("no projection is faster with the engines; they get what they have by default");
        }
        if self.tail.is_none() {
            wish.options.tail_threshold = choice.tail_threshold;
        }
        Ok(Some(choice))
    }

    /// Why engines are better left out, by what is expected of them.
    pub(crate) fn decline(&self, choice: &Choice, threads: usize) -> Option<String> {
        (self.hybrid == Hybrid::Auto && !choice.pays()).then(|| {
            let (hybrid, alone) = (choice.hybrid_ms, choice.alone_ms);
            if !choice.places_any() {
                return format!("auto: no projection is predicted to be worth it, a tile takes {alone:.1} ms; --hybrid on insists");
            }
            let threads = if threads == 1 { "its thread".to_owned() } else { format!("all {threads} threads") };
            format!(
                "auto: a tile would take {hybrid:.1} ms with engines and takes {alone:.1} ms on the CPU with {threads}; \
                 --hybrid on insists"
            )
        })
    }

    /// Fails if engines must take part and cannot.
    pub(crate) fn check_available(&self, state: &FeatureState) -> Result<()> {
        match state {
            FeatureState::Unavailable { reason } if self.require_engaged => {
                bail!("hybrid: NOT ENGAGED: the engines are unavailable: {reason}")
            }
            _ => Ok(()),
        }
    }

    /// Fails if engines must take part and no step can reach them.
    pub(crate) fn check_reachable(&self, status: Option<&HybridStatus>) -> Result<()> {
        match status.filter(|status| self.require_engaged && status.state.starts_with("idle")) {
            Some(status) => {
                bail!("hybrid: NOT ENGAGED: the engines are {}; the log says what would cure it", status.state)
            }
            None => Ok(()),
        }
    }

    /// Fails if engines had to run and did not, or are none.
    pub(crate) fn check_engaged(&self, state: &FeatureState) -> Result<()> {
        if self.require_engaged && self.is_simulated() {
            bail!("hybrid: SIMULATED: no time of this is an engine's");
        }
        if self.require_engaged && *state != FeatureState::Engaged {
            bail!("hybrid: NOT ENGAGED: the engines are {state}");
        }
        Ok(())
    }
}

/// What engines did, as a table for people.
pub(crate) fn table(hybrid: &HybridStatus) -> String {
    let mut text = format!("\nhybrid: {}; class {}, tile {}\n", hybrid.state, hybrid.numeric_class, hybrid.tile);
    if let Some(simulated) = &hybrid.simulated_ms {
        let times = simulated.iter().map(|(device, ms)| format!("{device} {ms:.1} ms"));
        let times = times.collect::<Vec<_>>().join(", ");
        text += &format!("SIMULATED: no time here is an engine's; predicted for what they were given: {times}\n");
    }
    if hybrid.kinds.is_empty() {
        return text;
    }
    text += &format!(
        "{:<22}{:>9}{:>9}{:>9}{:>9}{:>11}{:>9}  {}\n",
        "projection", "planned", "exact", "padded", "merged", "region ms", "decode", "device ms (parts)"
    );
    for (kind, k) in &hybrid.kinds {
        let devices = k.device_ms.iter().map(|(device, ms)| format!("{device} {ms:.0} ({})", k.dispatched[device]));
        text += &format!(
            "{kind:<22}{:>9}{:>9}{:>9}{:>9}{:>11.0}{:>9}  {}\n",
            k.planned,
            k.exact,
            k.padded,
            k.merged,
            k.region_ms,
            k.bypass_decode,
            devices.collect::<Vec<_>>().join(", ")
        );
        for (reason, count) in &k.fallbacks {
            text += &format!("{:<22}{count} on the CPU alone: {reason}\n", "");
        }
    }
    text
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_named_with_their_settings() {
        let soft = |cores, instances| NpuSpec::Soft(SoftOptions { cores, instances, ..SoftOptions::default() });
        assert_eq!("soft:cores=2,instances=3".parse(), Ok(soft(2, 3)));
        assert_eq!("soft".parse(), Ok(soft(1, 1)));
        let text = "sim:instances=2,tops=6,fail-at=40,corrupt=0.5,corrupt-from=90,bank-limit=2M,copies=on";
        let faults = SimFaults {
            failing_run: Some(40),
            noise: 0.5,
            noise_from: Some(90),
            bank_limit: Some(2 << 20),
            copies_weights: true,
            ..SimFaults::default()
        };
        let two = SoftOptions { instances: 2, ..SoftOptions::default() };
        assert_eq!(text.parse(), Ok(NpuSpec::Sim(two, faults, SimRates { tops: 6.0, ..SimRates::default() })));
        for wrong in ["sim:corrupt-from=3", "sim:tops=0", "sim:copies=off", "sim:fail-at=x", "sim:threads=1"] {
            assert!(wrong.parse::<NpuSpec>().is_err(), "{wrong}");
        }
        for wrong in ["ane", "soft:cores=0", "soft:cores", "soft:threads=2"] {
            assert!(wrong.parse::<NpuSpec>().is_err(), "{wrong}");
        }
        let Ok(NpuSpec::Ort(options)) = "ort".parse() else { panic!("it is right") };
        assert_eq!((options.provider, options.places, options.form), (Provider::Cpu, vec![], None));
        let text = "ort:lib=/a/b,provider=qnn,plugin=/c,form=float,instances=2,set.soc_model=60,set.backend_path=/d=e";
        let Ok(NpuSpec::Ort(options)) = text.parse() else { panic!("it is right") };
        assert_eq!((options.provider, options.places), (Provider::Qnn, vec![PathBuf::from("/a/b")]));
        assert_eq!((options.plugin, options.form, options.instances), (Some("/c".into()), Some(Form::Float), 2));
        let settings = [("backend_path", "/d=e"), ("soc_model", "60")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!(options.settings, BTreeMap::from(settings));
        for wrong in ["ort:provider=npu", "ort:lib", "ort:cores=1", "ort:form=int8", "ort:plugin=/c", "ort:set.a=b"] {
            assert!(wrong.parse::<NpuSpec>().is_err(), "{wrong}");
        }
        let text = "ort:provider=openvino,threads=2";
        assert_eq!(text.parse::<NpuSpec>().err().as_deref(), Some("threads means nothing to provider openvino"));
    }

    #[test]
    fn placements_are_named_by_kind() {
        assert_eq!("wq_b=split:0.25".parse(), Ok(PlaceSpec(Kind::WqB, Placement::Split(0.25))));
        assert_eq!("shared=whole".parse(), Ok(PlaceSpec(Kind::SharedExpert, Placement::Whole)));
        for wrong in ["wq_b", "head=whole", "wq_b=split:1", "wq_b=half"] {
            assert!(wrong.parse::<PlaceSpec>().is_err(), "{wrong}");
        }
    }
}
