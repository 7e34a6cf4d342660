//! The matrix of checkpoints, drafter, lengths and arms: flags to settings, and reports to where they are wanted.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use troika_base::NumericClass;
use troika_bench::arm::{Arm, Feature, Geometry};
use troika_bench::corpus::Corpus;
use troika_bench::record::{Fit, Length, Record, Regime, Settings};
use troika_bench::run::{self, Setup, Subject};

use super::outputs::Outputs;
use super::{stop_flag, subject};
use crate::{progress, tuning};

/// Prompt tokens in one step of `troika serve`, unless it is told otherwise.
const STOCK_STEP: u32 = 512;

/// Longest run that needs no consent.
const UNASKED_S: f64 = 3600.0;

/// Rows of a tile, unless a flag or a preset says otherwise.
const TILE: u32 = 512;

/// Measure the three arms.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(crate) struct Args {
    /// Folder of a checkpoint; may be given several times. Without it, the built-in model nano.
    #[arg(long, value_name = "DIR")]
    model: Vec<PathBuf>,
    /// Arithmetic of the primary device: `fast`, `exact` or `official`.
    #[arg(long, default_value_t = NumericClass::Fast, value_name = "CLASS")]
    class: NumericClass,
    /// Threads of the primary device in arms A, B and C; 0 = every core that the engines leave.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
    /// Settings for a purpose; flags beside it win. `quick`: nano in two minutes, with a soft engine on one of the cores if there
    /// are several. `paper`: 16K and 32K, 128 tokens after them.
    #[arg(long)]
    preset: Option<Preset>,
    /// Tokens of the prompts.
    #[arg(long, value_delimiter = ',', value_name = "N,N,...", value_parser = clap::value_parser!(u32).range(2..))]
    prompt_lengths: Vec<u32>,
    /// Prompts exactly so long, cut to whole tiles and one token (which starts decoding), or both.
    #[arg(long, value_enum, default_value_t = Fits::Both)]
    fit: Fits,
    /// Tokens to generate after each prompt, at least 2.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    generate: Option<u32>,
    /// Rounds over all arms, at least 3; fewer than 5 are labelled weak.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=1000))]
    rounds: Option<u32>,
    /// Rounds go on to this number while the intervals are wide.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=1000))]
    max_rounds: Option<u32>,
    /// Prompts of each length in one process; their median is one sample.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: Option<u32>,
    /// In the regime `lab`, they are computed again and again until that took so long: a sample of a few milliseconds is noise.
    #[arg(long, default_value_t = 500, value_name = "MS", value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    min_sample_ms: u64,
    /// `lab`: one request at a time, nothing kept. `service`: two at a time, half of them with a kept prefix.
    #[arg(long, value_enum, default_value_t = RegimeArg::Lab)]
    regime: RegimeArg,
    /// What prompts are made of: code_python, prose_en, chat_multi, or random token ids.
    #[arg(long, default_value = "code_python", value_name = "NAME")]
    corpus: Corpus,
    /// Speculative decoding: two experiments, never mixed.
    #[arg(long, value_enum, default_value_t = Drafter::Off)]
    drafter: Drafter,
    /// Neural engines of arm C, as `troika serve` takes them. Without it, and without a preset that has some, there are arms A
    /// and B.
    #[arg(long, value_name = "SPEC")]
    npu: Option<String>,
    /// Use them in arm C as `troika tune` found it best; FILE is what it wrote. It also says the tile and the threads.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["npu", "hybrid", "tile", "threads"])]
    tuning: Option<PathBuf>,
    /// How arm C uses them.
    #[arg(long, value_enum, default_value_t = Hybrid::On, requires = "npu")]
    hybrid: Hybrid,
    /// Rows of a tile. Decides the chunks of arms B and C, and the aligned lengths.
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(64..=65536))]
    tile: Option<u32>,
    /// Prompt tokens in one step of arm A.
    #[arg(long, default_value_t = STOCK_STEP, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    /// Fail unless arm C may be called hybrid everywhere.
    #[arg(long)]
    require_engaged: bool,
    /// Go ahead even if it takes longer than an hour.
    #[arg(long)]
    yes: bool,
    /// A made-up feature in place of arm C, to test the benchmark itself.
    #[arg(long, value_enum, hide = true, conflicts_with_all = ["npu", "tuning"])]
    self_test: Option<SelfTest>,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Preset {
    Quick,
    Paper,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Fits {
    Natural,
    Aligned,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RegimeArg {
    Lab,
    Service,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Drafter {
    Off,
    On,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Hybrid {
    Auto,
    On,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum SelfTest {
    WidenOnly,
    NeverRuns,
    Slower,
}

/// What a preset sets.
struct Defaults {
    name: Option<&'static str>,
    lengths: &'static [u32],
    generate: u32,
    max_rounds: u32,
    repeats: u32,
    tile: u32,
    npu: Option<&'static str>,
}

impl Defaults {
    fn of(preset: Option<Preset>) -> Self {
        let usual =
            Self { name: None, lengths: &[2048], generate: 128, max_rounds: 11, repeats: 3, tile: TILE, npu: None };
        match preset {
            None => usual,
            Some(Preset::Quick) => Self {
                name: Some("quick"),
                lengths: &[600, 1536],
                generate: 16,
                max_rounds: 7,
                // All arms are shown, and a core is left for the primary device.
                npu: (cores() > 1).then_some("soft:cores=1"),
                ..usual
            },
            Some(Preset::Paper) => {
                Self { name: Some("paper"), lengths: &[16_384, 32_768], repeats: 1, tile: 4096, ..usual }
            }
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    args.outputs.check()?;
    let setup = setup(args)?;
    let stop = stop_flag()?;
    let mut steps = progress::Steps::new();
    let mut tell = |progress: &run::Progress| steps.show(progress.done, progress.of, &progress.what);
    let record = run::run(&setup, &stop, &mut tell)?;
    steps.end();
    args.outputs.write(&record)?;
    code(args, &record, stop.load(Ordering::Relaxed))
}

fn code(args: &Args, record: &Record, interrupted: bool) -> Result<ExitCode> {
    if interrupted {
        return Ok(ExitCode::from(130));
    }
    if let Some(why) = &record.incomplete {
        bail!("the run is incomplete: {why}");
    }
    if args.require_engaged && !record.is_hybrid() {
        let states: Vec<String> = record.engagements().map(|engagement| engagement.label()).collect();
        let states = if states.is_empty() { "there is no arm C".to_owned() } else { states.join(", ") };
        bail!("--require-engaged: arm C may not be called hybrid: {states}");
    }
    Ok(ExitCode::SUCCESS)
}

fn setup(args: &Args) -> Result<Setup> {
    let defaults = Defaults::of(args.preset);
    let tuned = args.tuning.as_deref().map(Tuned::read).transpose()?;
    let npu = match (&args.npu, &tuned, args.self_test) {
        (Some(npu), ..) => Some(npu.clone()),
        (None, Some(tuned), _) => Some(tuned.npu.clone()),
        (None, None, None) => defaults.npu.map(str::to_owned),
        (None, None, Some(_)) => None,
    };
    let feature = match (&npu, args.self_test) {
        (Some(npu), _) => {
            let mode = if args.hybrid == Hybrid::Auto { "auto" } else { "on" };
            let tuning = tuned.as_ref().map(|tuned| tuned.path.clone());
            Feature::Hybrid { npu: npu.clone(), mode: mode.to_owned(), tuning }
        }
        (None, Some(SelfTest::WidenOnly)) => Feature::WidenOnly,
        (None, Some(SelfTest::NeverRuns)) => Feature::NeverRuns,
        (None, Some(SelfTest::Slower)) => Feature::Slower { share: 0.05 },
        (None, None) => Feature::None,
    };
    let geometry = {
        let tile = tuned.as_ref().map_or(args.tile.unwrap_or(defaults.tile) as usize, |tuned| tuned.tile);
        Geometry::new(tile, args.chunk as usize)
    };
    let rounds = args.rounds.unwrap_or(5) as usize;
    let settings = Settings {
        preset: defaults.name.map(str::to_owned),
        regime: if args.regime == RegimeArg::Lab { Regime::Lab } else { Regime::Service },
        corpus: args.corpus,
        generate: args.generate.unwrap_or(defaults.generate) as usize,
        rounds,
        max_rounds: args.max_rounds.map_or(rounds.max(defaults.max_rounds as usize), |max| max as usize),
        repeats: args.repeats.unwrap_or(defaults.repeats) as usize,
        min_sample_ms: args.min_sample_ms,
        geometry,
        feature,
    };
    ensure!(
        settings.max_rounds >= settings.rounds,
        "--max-rounds {} is less than --rounds {}",
        settings.max_rounds,
        settings.rounds
    );
    let asked = if args.prompt_lengths.is_empty() { defaults.lengths } else { &args.prompt_lengths };
    let lengths = lengths(asked, args.fit, geometry.tile);
    let threads = match (args.threads, &tuned) {
        (0, Some(tuned)) => tuned.threads,
        (0, None) => threads_beside(npu.as_deref()),
        (threads, _) => usize::from(threads),
    };
    let models: Vec<Option<PathBuf>> =
        if args.model.is_empty() { vec![None] } else { args.model.iter().cloned().map(Some).collect() };
    let drafters: &[bool] = match args.drafter {
        Drafter::Off => &[false],
        Drafter::On => &[true],
        Drafter::Both => &[false, true],
    };
    let mut subjects = Vec::new();
    for model in models {
        let opened = subject::open(model, args.class, args.corpus)?;
        let longest = lengths.iter().map(|length| length.tokens).max().unwrap_or(0) + settings.generate;
        let (most, name) = (opened.max_context_tokens, &opened.facts.name);
        ensure!(longest <= most, "{longest} tokens do not fit the context of {name}, which is {most}");
        subjects.extend(drafters.iter().map(|drafter| Subject {
            facts: opened.facts.clone(),
            drafter: *drafter,
            unavailable: drafter.then(|| opened.drafter_unavailable.to_owned()),
            tokens: opened.tokens.clone(),
        }));
    }
    let program = std::env::current_exe().context("cannot find the program that runs")?;
    let arms = Arm::of(&settings.feature, geometry, threads);
    let max_estimate_s = (!args.yes).then_some(UNASKED_S);
    Ok(Setup { program, settings, arms, lengths, subjects, max_estimate_s })
}

/// What a tuning file says of arm C.
struct Tuned {
    path: String,
    npu: String,
    tile: usize,
    threads: usize,
}

impl Tuned {
    fn read(path: &Path) -> Result<Self> {
        let file = tuning::read(path)?;
        let settings = file.settings.with_context(|| {
            format!("{} recommends no engine, so there is nothing to compare: {}", path.display(), file.outcome.why)
        })?;
        let path = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?.to_owned();
        Ok(Self { path, npu: file.npu, tile: settings.tile, threads: file.key.threads })
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Each length once, shortest first.
fn lengths(asked: &[u32], fit: Fits, tile: usize) -> Vec<Length> {
    let mut lengths = Vec::new();
    for tokens in asked.iter().map(|tokens| *tokens as usize) {
        if fit != Fits::Aligned {
            lengths.push(Length { tokens, fit: Fit::Natural });
        }
        if fit != Fits::Natural {
            lengths.push(Length { tokens: (tokens / tile).max(1) * tile + 1, fit: Fit::Aligned });
        }
    }
    lengths.sort_by_key(|length| (length.tokens, length.fit == Fit::Aligned));
    lengths.dedup();
    lengths
}

/// Threads that soft engines leave to the primary device; 0 = all.
fn threads_beside(npu: Option<&str>) -> usize {
    let Some(engines) = npu.and_then(|spec| spec.strip_prefix("soft").or(spec.strip_prefix("sim"))) else { return 0 };
    let taken = engines.split([':', ',']).find_map(|part| part.strip_prefix("cores="));
    let taken: usize = taken.and_then(|cores| cores.parse().ok()).unwrap_or(1);
    cores().saturating_sub(taken).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_prompts_are_whole_tiles_and_a_token() {
        let tokens = |fit| -> Vec<usize> { lengths(&[1000, 2048], fit, 512).iter().map(|l| l.tokens).collect() };
        assert_eq!(tokens(Fits::Natural), [1000, 2048]);
        assert_eq!(tokens(Fits::Aligned), [513, 2049]);
        assert_eq!(tokens(Fits::Both), [513, 1000, 2048, 2049]);
    }

    #[test]
    fn soft_engines_take_cores_from_the_primary() {
        assert_eq!(threads_beside(None), 0);
        assert_eq!(threads_beside(Some("ort:path=x")), 0);
        assert_eq!(threads_beside(Some("soft:cores=1")), (cores() - 1).max(1));
    }
}
