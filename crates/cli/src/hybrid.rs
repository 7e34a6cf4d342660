//! Neural engines on the command line: which, for what, and whether they must really run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use troika_base::NumericClass;
use troika_device::npu::NpuBackend;
use troika_device::npu::soft::{Soft, SoftOptions};
use troika_engine::{Choice, CostTable, FeatureState, HybridOptions, HybridStatus, Placement};
use troika_graph::Kind;

/// Which engines take part in prefill, and how.
#[derive(Clone, Debug, Args)]
pub(crate) struct HybridArgs {
    /// A neural engine beside the CPU: `soft`, which computes on cores of its own, optionally with `:cores=N,instances=N`.
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
    /// Measure again what projections cost on each device, even if it is known from an earlier start.
    #[arg(long)]
    calibrate: bool,
    /// Folder of what was measured, so that a restart has the same plan. Without it `troika/plans` in $XDG_CACHE_HOME, or in
    /// ~/.cache.
    #[arg(long, value_name = "DIR")]
    plan_dir: Option<PathBuf>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NpuSpec(SoftOptions);

impl FromStr for NpuSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        if name != "soft" {
            return Err(format!("unknown engine `{name}`: expected `soft`"));
        }
        let mut options = SoftOptions::default();
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
            let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
            let number = match value.parse() {
                Ok(number @ 1..=1024) => number,
                _ => return Err(format!("{key} must be a number from 1 to 1024, not `{value}`")),
            };
            match key {
                "cores" => options.cores = number,
                "instances" => options.instances = number,
                _ => return Err(format!("unknown setting `{key}`: expected `cores` or `instances`")),
            }
        }
        Ok(Self(options))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct PlaceSpec(Kind, Placement);

/// Kinds of projections, by the names that they have on the command line.
const KINDS: [(&str, Kind); 8] = [
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

/// What the command line asks for.
pub(crate) struct Wish {
    pub(crate) backend: Arc<dyn NpuBackend>,
    pub(crate) options: HybridOptions,
    /// Placements that were said.
    pub(crate) said: BTreeMap<Kind, Placement>,
    /// Cores that the engine takes from the CPU.
    pub(crate) cores: usize,
}

impl HybridArgs {
    /// True if there is an engine to take part.
    pub(crate) fn names_engine(&self) -> bool {
        self.npu.is_some() && self.hybrid != Hybrid::Off
    }

    /// Starts the engine that was named, if it is to take part.
    pub(crate) fn wish(&self) -> Result<Option<Wish>> {
        let Some(NpuSpec(soft)) = self.npu else {
            ensure!(self.hybrid != Hybrid::On, "--hybrid on needs an engine: name one with --npu, such as --npu soft");
            ensure!(
                !self.require_engaged,
                "--require-engaged needs an engine: name one with --npu, such as --npu soft"
            );
            return Ok(None);
        };
        if self.hybrid == Hybrid::Off {
            ensure!(!self.require_engaged, "--require-engaged contradicts --hybrid off");
            return Ok(None);
        }
        let mut said = BTreeMap::new();
        for PlaceSpec(kind, placement) in &self.place {
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
            memory_bytes: u64::MAX,
        };
        let backend = Arc::new(Soft::start(soft).context("the soft engine does not start")?);
        Ok(Some(Wish { backend, options, said, cores: soft.cores * soft.instances }))
    }

    /// True if what is not said is to be measured.
    fn measures(&self, wish: &Wish, class: NumericClass) -> bool {
        let limits = wish.backend.limits();
        let tile = wish.options.tile;
        // What cannot be is found out, with its reason, when engines are prepared.
        let is_possible =
            class == NumericClass::Fast && tile >= limits.min_tile && tile.is_multiple_of(limits.tile_multiple);
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
        for (kind, refused) in choice.kinds.iter().filter_map(|(kind, choice)| Some((kind, choice.refused.as_ref()?))) {
            tracing::warn!(kind = kind.name(), reason = refused, "the engine's numbers are wrong; the CPU does it");
            wish.options.placements.remove(kind);
        }
        let placements = choice.placements();
        if placements.is_empty() {
            tracing::warn!("no projection is faster with the engines; they get what they have by default");
        } else {
            wish.options.placements = placements;
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
            if choice.placements().is_empty() {
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

    /// Fails if engines had to run and did not.
    pub(crate) fn check_engaged(&self, state: &FeatureState) -> Result<()> {
        if self.require_engaged && *state != FeatureState::Engaged {
            bail!("hybrid: NOT ENGAGED: the engines are {state}");
        }
        Ok(())
    }
}

/// What engines did, as a table for people.
pub(crate) fn table(hybrid: &HybridStatus) -> String {
    let mut text = format!("\nhybrid: {}; class {}, tile {}\n", hybrid.state, hybrid.numeric_class, hybrid.tile);
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
        let NpuSpec(options) = "soft:cores=2,instances=3".parse().expect("it is right");
        assert_eq!((options.cores, options.instances), (2, 3));
        assert_eq!("soft".parse(), Ok(NpuSpec(SoftOptions::default())));
        for wrong in ["ane", "soft:cores=0", "soft:cores", "soft:threads=2"] {
            assert!(wrong.parse::<NpuSpec>().is_err(), "{wrong}");
        }
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
