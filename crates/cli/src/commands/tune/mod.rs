//! `troika tune`: its flags, and what comes of a search.

mod measured;
mod simulated;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use troika_bench::BenchError;
use troika_bench::arm::Geometry;
use troika_bench::tune::file::TuningFile;
use troika_bench::tune::report;
use troika_bench::tune::search::{Options, Progress};
use troika_hwsim::PlanSpec;

use crate::commands::bench::ending;
use crate::progress;
use crate::report::{print, write_json};

/// Longest run that needs no consent.
const UNASKED_S: f64 = 900.0;

/// Find out how engines are best used for a model on this machine, and write that to a file.
///
/// Each kind of projection is probed and switched on by itself, then what pays is combined, changed kind by kind, and tried with
/// more chunks in flight. What was found is compared in fresh processes with the primary device in its usual and in the same
/// geometry. It is recommended if prompts are at least 1 % faster than in the same geometry, the intervals do not overlap, everything
/// that was planned really ran, and the numeric gate is passed. Nothing changes by itself: `serve`, `run` and `bench` take the
/// file with --tuning FILE. Ctrl-C ends a run, and the same command goes on with it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder of a checkpoint. Without it, the built-in model nano.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Engines to use, as `troika serve` takes them.
    #[arg(long, value_name = "ENGINE", required_unless_present = "simulate")]
    npu: Option<String>,
    /// Tune a simulated machine instead, named as in `troika sim --profile`. What comes of it is a prediction, and says so; no
    /// server takes it.
    #[arg(
        long,
        value_name = "NAME|FILE",
        conflicts_with_all = ["model", "npu", "threads", "tile", "chunk", "plan_dir", "calibrate", "yes"]
    )]
    simulate: Option<String>,
    /// Plan that a simulated machine's are compared with, named as in `troika sim --plan`. Without it, the plan in the profile, or
    /// `published-2026-08` if it has none.
    #[arg(long, value_name = "NAME", requires = "simulate")]
    reference: Option<String>,
    /// Threads of the primary device; 0 = every core, or, with engines that are made of cores, those that they leave.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
    /// Rows of a tile.
    #[arg(long, default_value_t = 512, value_name = "S", value_parser = clap::value_parser!(u32).range(64..=65536))]
    tile: u32,
    /// Prompt tokens in one step of the primary device as it is served.
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    #[command(flatten)]
    search: SearchArgs,
    /// Folder of what projections cost, as `troika serve` takes it.
    #[arg(long, value_name = "DIR")]
    plan_dir: Option<PathBuf>,
    /// Measure again what projections cost, even if it is known from an earlier start.
    #[arg(long)]
    calibrate: bool,
    /// Go ahead even if it takes longer than 15 minutes.
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// What may be chosen from, and how much is measured.
#[derive(Clone, Debug, clap::Args)]
struct SearchArgs {
    /// Ways to use engines: `split` operations between them and the primary device; `overlap`, whole operations beside others;
    /// `wavefront`, several chunks of prompts in flight, for which operations are whole.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "MODE,...", default_value = "split,overlap,wavefront")]
    modes: Vec<Mode>,
    /// Most chunks in flight.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3))]
    max_wavefront: u8,
    /// Whole tiles of the prompts.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    tiles: u16,
    /// Passes over all variants while searching, and at least in the verification.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u16).range(3..=100))]
    rounds: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    Split,
    Overlap,
    Wavefront,
}

#[derive(Clone, Debug, clap::Args)]
struct OutputArgs {
    /// Where the result is written.
    #[arg(long, default_value = "tuning.json", value_name = "FILE")]
    out: PathBuf,
    /// Say for each kind of projection why it is used as it is, and every comparison on the way.
    #[arg(long)]
    explain: bool,
}

impl SearchArgs {
    fn options(&self, tile: usize, max_estimate_s: Option<f64>) -> Result<Options> {
        let allows = |mode| self.modes.contains(&mode);
        ensure!(
            allows(Mode::Overlap) || !allows(Mode::Wavefront),
            "--modes wavefront needs overlap: chunks in flight pay where operations are whole"
        );
        let rounds = usize::from(self.rounds);
        Ok(Options {
            tile,
            tiles: self.tiles.into(),
            split: allows(Mode::Split),
            overlap: allows(Mode::Overlap),
            max_wavefront: if allows(Mode::Wavefront) { self.max_wavefront.into() } else { 1 },
            search_rounds: rounds,
            verify_rounds: [rounds, 2 * rounds - 1],
            reference: None,
            max_estimate_s,
        })
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut steps = progress::Steps::new();
    let mut tell = |progress: &Progress| steps.show(progress.done, progress.of, &progress.step);
    let found = match (&args.simulate, &args.npu) {
        (Some(profile), _) => simulate(args, profile, &mut tell),
        (None, npu) => {
            let geometry = Geometry::new(args.tile as usize, args.chunk as usize);
            let options = args.search.options(geometry.tile, (!args.yes).then_some(UNASKED_S))?;
            measured::tune(args, npu.as_deref().unwrap_or_default(), geometry, &options, &mut tell)
        }
    };
    steps.end();
    match found {
        Ok(file) => finish(&file, &args.output),
        Err(error) if matches!(error.downcast_ref(), Some(BenchError::Interrupted)) => {
            eprintln!("interrupted: the same command goes on where it stopped");
            Ok(ending())
        }
        Err(error) => Err(error),
    }
}

fn simulate(args: &Args, profile: &str, tell: &mut dyn FnMut(&Progress)) -> Result<TuningFile> {
    let machine = simulated::machine(profile)?;
    let (name, reference) = match (&args.reference, &machine.profile().plan) {
        (Some(name), _) => (name.as_str(), PlanSpec::named(name)?),
        (None, Some(own)) => ("the profile's plan", own.clone()),
        (None, None) => ("published-2026-08", PlanSpec::named("published-2026-08")?),
    };
    let options = args.search.options(reference.tile, None)?;
    simulated::tune(machine, reference, name, &options, tell)
}

fn finish(file: &TuningFile, output: &OutputArgs) -> Result<ExitCode> {
    write_json(&output.out, file)?;
    let mut text = report::render(file, output.explain);
    text += &format!("\nwritten to {}\n", output.out.display());
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}
