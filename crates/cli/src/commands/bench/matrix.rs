//! The matrix of checkpoints, drafter, lengths and arms: flags to settings, and reports to where they are wanted.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, anyhow, bail, ensure};
use troika_base::NumericClass;
use troika_bench::arm::{Arm, Feature, Geometry};
use troika_bench::corpus::Corpus;
use troika_bench::record::{Fit, Length, Record, Regime, Settings};
use troika_bench::report;
use troika_bench::run::{self, Setup, Subject};

use super::{ending, stop_flag, subject};
use crate::hybrid::NpuSpec;
use crate::report::{check_writable, print, write_json, write_record, write_whole};
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
    /// are several. `paper`: 16K and 32K, 128 tokens after them, tiles of 4,096; with --npu it has three arms.
    #[arg(long)]
    preset: Option<Preset>,
    /// Tokens of the prompts.
    #[arg(long, value_delimiter = ',', value_name = "N,N,...", value_parser = clap::value_parser!(u32).range(2..))]
    prompt_lengths: Vec<u32>,
    /// Prompts exactly so long, cut to whole tiles, at least one, and one token more (which starts decoding), or both.
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
    #[arg(long, value_enum, default_value_t = Drafters::Off)]
    drafter: Drafters,
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
    /// Write the record as JSON to FILE, or to standard output with `-`, then without the table.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
    /// What to call this run in its record, such as a commit; `compare` shows it.
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    #[command(flatten)]
    outputs: Outputs,
}

/// Reports for people.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Outputs {
    /// Write the report as Markdown.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write the report as one HTML page with plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write one step of each arm, device by device, and the phases of requests as a trace for Chrome or Perfetto.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl Outputs {
    fn paths(&self) -> impl Iterator<Item = &Path> {
        [&self.markdown, &self.html, &self.trace].into_iter().flatten().map(PathBuf::as_path)
    }

    /// Whether they can be written, and each to a place of its own.
    pub(super) fn check(&self) -> Result<()> {
        let paths: Vec<&Path> = self.paths().collect();
        for (index, path) in paths.iter().enumerate() {
            ensure!(!paths[..index].contains(path), "two reports cannot both be {}", path.display());
            check_writable(path)?;
        }
        Ok(())
    }

    /// Writes all that can be written; the error is that of the first that could not.
    pub(super) fn write(&self, record: &Record) -> Result<()> {
        let markdown = self.markdown.iter().map(|path| write_whole(path, report::markdown::render(record).as_bytes()));
        let html = self.html.iter().map(|path| write_whole(path, report::html::render(record)?.as_bytes()));
        let trace = self.trace.iter().map(|path| write_json(path, &report::trace::render(record)));
        let done: Vec<Result<()>> = markdown.chain(html).chain(trace).collect();
        done.into_iter().collect()
    }
}

pub(super) fn print_table(record: &Record) -> Result<()> {
    print(&report::table::render(record, std::io::stdout().is_terminal()))
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
enum Drafters {
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
    let to_stdout = args.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    if let Some(path) = &args.json {
        check_writable(path)?;
        ensure!(!args.outputs.paths().any(|other| other == path), "two reports cannot both be {}", path.display());
    }
    args.outputs.check()?;
    let setup = setup(args)?;
    let stop = stop_flag()?;
    let mut steps = progress::Steps::new();
    let mut tell = |progress: &run::Progress| steps.show(progress.done, progress.of, &progress.what);
    let record = run::run(&setup, &stop, &mut tell)?;
    steps.end();
    // The table first, and then all that can be written: it took hours, and a disk may be full.
    if !to_stdout {
        print_table(&record)?;
    }
    let json = args.json.as_ref().map_or(Ok(()), |path| write_record(path, &record));
    let others = args.outputs.write(&record);
    json.and(others)?;
    code(args, &record, stop.load(Ordering::Relaxed))
}

fn code(args: &Args, record: &Record, interrupted: bool) -> Result<ExitCode> {
    if interrupted {
        return Ok(ending());
    }
    if let Some(why) = &record.incomplete {
        bail!("the run is incomplete: {why}");
    }
    if record.num_void() > 0 {
        bail!("{} of the lengths are VOID: arms that must give the same tokens did not", record.num_void());
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
    // Not only when the first server of arm C refuses it.
    let spec = npu.as_deref().map(str::parse::<NpuSpec>).transpose().map_err(|why| anyhow!("--npu: {why}"))?;
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
        (0, None) => threads_beside(spec.as_ref()),
        (threads, _) => usize::from(threads),
    };
    let models: Vec<Option<PathBuf>> =
        if args.model.is_empty() { vec![None] } else { args.model.iter().cloned().map(Some).collect() };
    let drafters: &[bool] = match args.drafter {
        Drafters::Off => &[false],
        Drafters::On => &[true],
        Drafters::Both => &[false, true],
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
            unavailable: opened.drafter_unavailable.clone().filter(|_| *drafter),
            tokens: opened.tokens.clone(),
        }));
    }
    let program = std::env::current_exe().context("cannot find the program that runs")?;
    let arms = Arm::of(&settings.feature, geometry, threads);
    let max_estimate_s = (!args.yes).then_some(UNASKED_S);
    Ok(Setup { program, label: args.label.clone(), settings, arms, lengths, subjects, max_estimate_s })
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
    // A length that is aligned as it is, is measured once.
    lengths.sort_by_key(|length| (length.tokens, length.fit == Fit::Natural));
    lengths.dedup_by_key(|length| length.tokens);
    lengths
}

/// Threads that soft engines leave to the primary device; 0 = all.
fn threads_beside(npu: Option<&NpuSpec>) -> usize {
    match npu.map_or(0, NpuSpec::soft_cores) {
        0 => 0,
        taken => cores().saturating_sub(taken).max(1),
    }
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
        assert_eq!(
            lengths(&[1025], Fits::Both, 512),
            [Length { tokens: 1025, fit: Fit::Aligned }],
            "the same prompts are not measured twice"
        );
    }

    #[test]
    fn soft_engines_take_cores_from_the_primary() {
        let of = |spec: &str| threads_beside(Some(&spec.parse().expect("valid")));
        assert_eq!((threads_beside(None), of("ort:lib=x")), (0, 0));
        assert_eq!((of("soft"), of("soft:cores=1")), (cores().saturating_sub(1).max(1), of("sim")));
        assert_eq!(of("soft:cores=2,instances=512"), 1, "each instance has cores of its own");
    }
}
