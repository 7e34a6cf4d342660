//! `troika bench cross-check`: is the simulator right about this machine?

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use troika_base::NumericClass;
use troika_bench::host::HostFacts;
use troika_engine::{Chunk, Priority, Runner, RunnerOptions, Span, WantLogits};
use troika_graph::{Acceptance, StepGraph};
use troika_hwsim::{About, Observed, Observer, Origin, Plan, Predicted, Replay, SeenSpan, SeenStep};

use crate::hybrid::HybridArgs;
use crate::model_source::{ModelArgs, OpenModel, hex};
use crate::{builtin, progress, report};

/// Compare the simulator with this machine.
///
/// Of each model, some prompts are computed with engines off and on, one chunk after the other, and every node is timed. From these
/// times the executor predicts, on the simulator's clock, how long other prompts take: other lengths, other splits, several chunks
/// in flight. These are computed too, in turn with the former, and compared. Machines that change their speed are followed by a
/// yardstick, a short prompt with engines off and on, before and after everything that counts.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder of a checkpoint, or `nano`; may be given several times.
    #[arg(long, value_name = "DIR", default_value = builtin::NAME)]
    model: Vec<PathBuf>,
    /// The engine, as `troika serve` takes it.
    #[arg(long, value_name = "ENGINE", default_value = "soft:cores=1")]
    npu: String,
    /// Threads of the primary device.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Rows of a tile.
    #[arg(long, default_value_t = 256, value_name = "S", value_parser = clap::value_parser!(u32).range(64..=65536))]
    tile: u32,
    /// Tiles of the longest prompt, the last of which is a half.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u16).range(3..=1024))]
    tiles: u16,
    /// How often everything is measured; medians count.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Also write what was observed and measured of each model as DIR/MODEL.json.
    #[arg(long, value_name = "DIR")]
    profiles: Option<PathBuf>,
    /// Also write a profile of this machine with prices of the model, a TOML file that `troika sim --profile` takes. Of one model.
    #[arg(long, value_name = "FILE")]
    write_profile: Option<PathBuf>,
    /// Measure nothing: predict anew from what an earlier run with --profiles wrote there, on whatever machine.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["profiles", "tile", "tiles", "rounds", "threads"])]
    from: Option<PathBuf>,
    /// Write the comparison as JSON to FILE, or to standard output with `-`.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

/// What engines do in a run, by its name in the report.
struct Placements {
    name: &'static str,
    place: &'static [(&'static str, &'static str)],
    /// Chunks in flight, and whether the prompt ends with half a tile.
    runs: &'static [(usize, bool)],
    /// Nodes are timed in it; otherwise it is predicted from the others alone.
    is_observed: bool,
}

/// Whole operations, halves, and a mixture that is not observed at all.
const PLACEMENTS: [Placements; 3] = [
    Placements {
        name: "all whole",
        place: &[
            ("shared", "whole"),
            ("wq_b", "whole"),
            ("wo_a", "whole"),
            ("wo_b", "whole"),
            ("wq_a", "whole"),
            ("wkv", "whole"),
            ("compressor", "whole"),
            ("indexer_compressor", "primary"),
        ],
        runs: &[(1, false), (2, true), (3, true), (3, false)],
        is_observed: true,
    },
    Placements {
        name: "halves",
        place: &[
            ("shared", "whole"),
            ("wq_b", "split:0.5"),
            ("wo_a", "split:0.5"),
            ("wo_b", "split:0.5"),
            ("wq_a", "split:0.5"),
            ("wkv", "split:0.5"),
            ("compressor", "split:0.5"),
            ("indexer_compressor", "primary"),
        ],
        runs: &[(1, false), (2, true)],
        is_observed: true,
    },
    Placements {
        name: "shared, wo_a whole, wq_b .25, wo_b .75",
        place: &[
            ("shared", "whole"),
            ("wq_b", "split:0.25"),
            ("wo_a", "whole"),
            ("wo_b", "split:0.75"),
            ("wq_a", "primary"),
            ("wkv", "primary"),
            ("compressor", "primary"),
            ("indexer_compressor", "primary"),
        ],
        runs: &[(1, false), (1, true), (2, true)],
        is_observed: false,
    },
];

/// One combination. Never read the one number for the other.
#[derive(Debug, Serialize)]
struct Row {
    model: String,
    tokens: usize,
    engines: String,
    wavefront: usize,
    measured_ms: f64,
    /// Least and most of the rounds: some runs have two outcomes, since who comes first decides what is done beside what.
    measured_range_ms: [f64; 2],
    predicted_ms: Predicted<f64>,
}

impl Row {
    /// Of the prediction, relative to what was measured.
    fn error(&self) -> f64 {
        self.predicted_ms.predicted() / self.measured_ms - 1.0
    }
}

/// What a run leaves behind of a model (`docs/formats/observed.md`).
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Session {
    origin: Origin,
    observed: Observed,
    measured: Vec<MeasuredRun>,
}

/// How long a prompt took.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct MeasuredRun {
    engines: String,
    tokens: usize,
    wavefront: usize,
    ms: f64,
    /// Of each round, where they were kept; `ms` is their median.
    #[serde(default)]
    rounds_ms: Vec<f64>,
}

impl MeasuredRun {
    fn range_ms(&self) -> [f64; 2] {
        let rounds = || self.rounds_ms.iter().copied().chain([self.ms]);
        [rounds().fold(f64::INFINITY, f64::min), rounds().fold(0.0, f64::max)]
    }
}

#[derive(Debug, Serialize)]
struct CrossCheck {
    kind: &'static str,
    rows: Vec<Row>,
    median_error: f64,
    worst_error: f64,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    ensure!(
        args.write_profile.is_none() || args.model.len() == 1,
        "--write-profile: a profile has the prices of one model, and {} are named",
        args.model.len()
    );
    // What cannot be written is said before minutes of measuring.
    args.json.iter().chain(&args.write_profile).try_for_each(|path| report::check_writable(path))?;
    if let Some(dir) = &args.profiles {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let mut steps = progress::Steps::new();
    let mut rows = Vec::new();
    for (done, dir) in args.model.iter().enumerate() {
        let dir = (dir != Path::new(builtin::NAME)).then(|| dir.clone());
        let mut model_args = ModelArgs::of(dir, NumericClass::Fast);
        model_args.threads = args.threads;
        let model = model_args.open()?;
        let mut tell = |what: &str| steps.show(done, args.model.len(), &format!("{}: {what}", model.name));
        let options = model_args.runner_options(NumericClass::Fast);
        let file = |dir: &Path| dir.join(format!("{}.json", model.name));
        let (session, plans) = match &args.from {
            None => {
                let observer = Observer::default();
                let mut subject = Subject { args, model: &model, options, observer, yardstick: None, unsteady: 0 };
                let measured = PLACEMENTS.iter().map(|placements| subject.measure(placements, &mut tell));
                let measured: Vec<Measured> = measured.collect::<Result<_>>()?;
                if subject.unsteady > 0 {
                    let (model, runs) = (&model.name, subject.unsteady);
                    tracing::warn!(
                        model,
                        runs,
                        "the machine changed its speed meanwhile: have it do nothing else, and repeat"
                    );
                }
                (subject.session(&measured)?, measured.into_iter().map(|measured| measured.plan).collect())
            }
            Some(dir) => {
                let path = file(dir);
                let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                let session: Session = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
                session.observed.check().with_context(|| path.display().to_string())?;
                let (recorded, opened) = (&session.origin.model_digest, hex(&model.digests()?[0]));
                if *recorded != opened {
                    tracing::warn!(recorded, opened, "{} is of other weights", path.display());
                }
                let tile = session.observed.tile;
                let plan = |placements: &Placements| {
                    tell(&format!("{}, loading", placements.name));
                    Ok(load(&model, options, &args.npu, tile, placements)?.executor().plan().clone())
                };
                let plans = PLACEMENTS.iter().map(plan).collect::<Result<Vec<Plan>>>()?;
                (session, plans)
            }
        };
        if let Some(dir) = &args.profiles {
            report::write_record(&file(dir), &session)?;
        }
        if let Some(file) = &args.write_profile {
            report::write_whole(file, profile(args, &model, &session, file)?.as_bytes())?;
        }
        let observed = Arc::new(session.observed);
        for run in session.measured {
            let measured_range_ms = run.range_ms();
            let MeasuredRun { engines, tokens, wavefront, ms, .. } = run;
            let place = PLACEMENTS.iter().position(|placements| placements.name == engines);
            let plan = &plans[place.with_context(|| format!("{}: nobody places engines so: {engines}", model.name))?];
            let predicted_ms = replay(&model, plan, tokens, wavefront).predict(&observed)?;
            let model = model.name.clone();
            rows.push(Row { model, tokens, engines, wavefront, measured_ms: ms, measured_range_ms, predicted_ms });
        }
    }
    steps.end();
    let errors: Vec<f64> = rows.iter().map(|row| row.error().abs()).collect();
    let check = CrossCheck {
        kind: "cross-check of predictions with measurements",
        median_error: report::median(&errors).expect("there is a model at least"),
        worst_error: errors.iter().copied().fold(0.0, f64::max),
        rows,
    };
    match &args.json {
        Some(target) => report::write_record(target, &check)?,
        None => report::print(&table(&check))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn table(check: &CrossCheck) -> String {
    let mut text = "PREDICTED by the simulator from times of single nodes, beside what was measured\n\n".to_owned();
    text += &format!(
        "{:<14}{:>8}  {:<40}{:>10}{:>14}{:>18}{:>15}{:>9}\n",
        "model", "tokens", "on the engine", "in flight", "measured ms", "least to most", "PREDICTED ms", "error"
    );
    for row in &check.rows {
        text += &format!(
            "{:<14}{:>8}  {:<40}{:>10}{:>14.1}{:>18}{:>15.1}{:>+7.1} %\n",
            row.model,
            row.tokens,
            row.engines,
            row.wavefront,
            row.measured_ms,
            format!("{:.1} to {:.1}", row.measured_range_ms[0], row.measured_range_ms[1]),
            row.predicted_ms,
            row.error() * 100.0
        );
    }
    let (median, worst) = (check.median_error * 100.0, check.worst_error * 100.0);
    text + &format!("\n{} combinations: median error {median:.1} %, worst {worst:.1} %\n", check.rows.len())
}

/// Before and after a run, the yardstick may differ so much; else the machine has changed its speed meanwhile.
const STEADY: f64 = 0.04;
/// How often a run is made for that, at most.
const ATTEMPTS: usize = 4;
/// A yardstick takes so long at least.
const YARDSTICK_MS: f64 = 60.0;

/// A run on the devices of this machine.
struct Seen {
    ms: f64,
    steps: Vec<StepSeen>,
}

struct StepSeen {
    /// Since the run began.
    start_ms: f64,
    position: usize,
    rows: usize,
    graph: Arc<StepGraph>,
    /// Empty unless they are kept.
    spans: Vec<Span>,
}

/// Computes a prompt with so many chunks in flight, or with engines off.
fn compute(runner: &mut Runner, tile: usize, tokens: usize, wavefront: Option<usize>) -> Result<Seen> {
    let vocab_size = runner.config().vocab_size;
    let prompt: Vec<u32> = (0..tokens).map(|i| (i * 7919 % vocab_size) as u32).collect();
    let sequence = runner.new_sequence();
    // Engines take no part in decode steps.
    let priority = if wavefront.is_some() { Priority::Prefill } else { Priority::Decode };
    let (mut submitted, mut steps) = (VecDeque::new(), Vec::new());
    let mut chunks = prompt.chunks(tile);
    let (start, mut position) = (Instant::now(), 0);
    loop {
        while submitted.len() < wavefront.unwrap_or(1)
            && let Some(tokens) = chunks.next()
        {
            submitted.push_back((start.elapsed().as_secs_f64() * 1e3, tokens.len()));
            let chunk = Chunk { sequence, tokens, logits: WantLogits::No, acceptance: Acceptance::Whole };
            runner.submit(&[chunk], priority)?;
        }
        // Chunks of a sequence are done in order.
        let Some((start_ms, rows)) = submitted.pop_front() else { break };
        let (_, mut forward) = runner.next_done()?;
        let (graph, spans) = (Arc::clone(forward.graph()), std::mem::take(&mut forward.spans));
        runner.recycle(forward);
        steps.push(StepSeen { start_ms, position, rows, graph, spans });
        position += rows;
    }
    let ms = start.elapsed().as_secs_f64() * 1e3;
    runner.drop_sequence(sequence);
    Ok(Seen { ms, steps })
}

impl Seen {
    /// At the usual speed of the machine.
    fn steps(&self, scale: f64) -> Vec<SeenStep<'_>> {
        let steps = self.steps.iter().map(|step| {
            let at = |ns: u64| (step.start_ms + ns as f64 / 1e6) * scale;
            let spans = step.spans.iter().map(|span| SeenSpan {
                node: span.node,
                device: span.device,
                start_ms: at(span.start_ns),
                end_ms: at(span.end_ns),
            });
            SeenStep { graph: &step.graph, rows: step.rows, position: step.position, spans: spans.collect() }
        });
        steps.collect()
    }
}

/// A model on this machine.
struct Subject<'a> {
    args: &'a Args,
    model: &'a OpenModel,
    options: RunnerOptions,
    observer: Observer,
    /// Prompts of one tile, engines off and on; and what they usually take.
    yardstick: Option<(usize, f64)>,
    /// Runs that count although the machine changed its speed meanwhile.
    unsteady: usize,
}

/// What was measured with engines placed in some way.
struct Measured {
    plan: Plan,
    /// Of [`Placements::runs`], milliseconds of each round.
    runs: Vec<Vec<f64>>,
    /// The longest prompt with one chunk in flight, and one of two tiles with two, if they were observed.
    observed_ms: Option<[f64; 2]>,
}

impl Subject<'_> {
    fn tile(&self) -> usize {
        self.args.tile as usize
    }

    fn tokens(&self, with_half: bool) -> usize {
        let (tile, tiles) = (self.tile(), usize::from(self.args.tiles));
        if with_half { tiles * tile - tile / 2 } else { (tiles - 1) * tile }
    }

    fn measure(&mut self, placements: &Placements, tell: &mut dyn FnMut(&str)) -> Result<Measured> {
        tell(&format!("{}, loading", placements.name));
        let mut runner = load(self.model, self.options, &self.args.npu, self.tile(), placements)?;
        let plan = runner.executor().plan().clone();
        let (tile, longest) = (self.tile(), self.tokens(true));
        compute(&mut runner, tile, longest, Some(1))?;
        compute(&mut runner, tile, longest, None)?;
        let mut runs = vec![Vec::new(); placements.runs.len()];
        let mut observed_ms = [Vec::new(), Vec::new()];
        for round in 0..self.args.rounds {
            tell(&format!("{}, round {} of {}", placements.name, round + 1, self.args.rounds));
            runner.keep_spans(true);
            let (seen, scale) = self.timed(&mut runner, longest, None)?;
            self.observer.add_off(&seen.steps(scale), seen.ms * scale);
            if placements.is_observed {
                let (seen, scale) = self.timed(&mut runner, longest, Some(1))?;
                self.observer.add_on(&seen.steps(scale), &plan, tile);
                observed_ms[0].push(seen.ms * scale);
                let (seen, scale) = self.timed(&mut runner, 2 * tile, Some(2))?;
                self.observer.add_beside(&seen.steps(scale), &plan);
                observed_ms[1].push(seen.ms * scale);
            }
            runner.keep_spans(false);
            for ((wavefront, with_half), times) in placements.runs.iter().zip(&mut runs) {
                let (seen, scale) = self.timed(&mut runner, self.tokens(*with_half), Some(*wavefront))?;
                times.push(seen.ms * scale);
            }
        }
        let [alone, beside] = observed_ms.map(|times| report::median(&times));
        Ok(Measured { plan, runs, observed_ms: alone.zip(beside).map(|(alone, beside)| [alone, beside]) })
    }

    /// A run, and what its times are multiplied by so that they are at the usual speed of the machine.
    fn timed(&mut self, runner: &mut Runner, tokens: usize, wavefront: Option<usize>) -> Result<(Seen, f64)> {
        let mut before = self.yardstick(runner)?;
        let mut attempt = 0;
        loop {
            attempt += 1;
            let seen = compute(runner, self.tile(), tokens, wavefront)?;
            let after = self.yardstick(runner)?;
            let is_steady = (after / before - 1.0).abs() <= STEADY;
            if is_steady || attempt == ATTEMPTS {
                self.unsteady += usize::from(!is_steady);
                let (_, usual) = self.yardstick.expect("it was used just now");
                return Ok((seen, usual / ((before + after) / 2.0)));
            }
            before = after;
        }
    }

    fn yardstick(&mut self, runner: &mut Runner) -> Result<f64> {
        let tile = self.tile();
        // With engines on as well, or nobody would see that only their core is slow.
        let mut once = || anyhow::Ok(compute(runner, tile, tile, None)?.ms + compute(runner, tile, tile, Some(1))?.ms);
        let (times, _) = match self.yardstick {
            Some(known) => known,
            None => {
                let ms = once()?;
                let times = (YARDSTICK_MS / ms).ceil().max(1.0) as usize;
                let usual = (0..times).map(|_| once()).sum::<Result<f64>>()?;
                *self.yardstick.insert((times, usual))
            }
        };
        (0..times).map(|_| once()).sum()
    }

    /// Everything that was observed and measured.
    fn session(&self, measured: &[Measured]) -> Result<Session> {
        let (mut alone, mut beside, mut took) = (Vec::new(), Vec::new(), [0.0; 2]);
        let mut runs = Vec::new();
        for (Placements { name, runs: asked, .. }, one) in PLACEMENTS.iter().zip(measured) {
            runs.extend(asked.iter().zip(&one.runs).map(|((wavefront, with_half), rounds_ms)| MeasuredRun {
                engines: (*name).to_owned(),
                tokens: self.tokens(*with_half),
                wavefront: *wavefront,
                ms: report::median(rounds_ms).expect("there is a round at least"),
                rounds_ms: rounds_ms.clone(),
            }));
            let Some([alone_ms, beside_ms]) = one.observed_ms else { continue };
            alone.push(replay(self.model, &one.plan, self.tokens(true), 1));
            beside.push(replay(self.model, &one.plan, 2 * self.tile(), 2));
            took = [took[0] + alone_ms, took[1] + beside_ms];
        }
        let observed = self.observer.observed(&self.model.name, self.tile());
        let observed = observed.fitted((&alone, took[0]), (&beside, took[1]))?;
        Ok(Session { origin: self.origin()?, observed, measured: runs })
    }

    fn origin(&self) -> Result<Origin> {
        let HostFacts { os, arch, cpu, cores, .. } = HostFacts::new();
        let cpu = cpu.map_or_else(String::new, |cpu| format!("{cpu}, "));
        Ok(Origin {
            date: today()?,
            machine: format!("{cpu}{cores} cores, {os} {arch}; {} thread beside {}", self.args.threads, self.args.npu),
            build: format!("troika {}", env!("CARGO_PKG_VERSION")),
            model_digest: hex(&self.model.digests()?[0]),
        })
    }
}

/// UTC, as `2026-11-30`.
fn today() -> Result<String> {
    let days = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400;
    // Years begin in March here, so that the day too many is their last (H. Hinnant, days_from_civil).
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    Ok(format!("{year}-{month:02}-{day:02}"))
}

/// What was observed, as a profile for `troika sim`.
fn profile(args: &Args, model: &OpenModel, session: &Session, file: &Path) -> Result<String> {
    let wish = HybridArgs::of(&args.npu, session.observed.tile, 0, &BTreeMap::new())?.wish()?.engines()?;
    let name = file.file_stem().context("--write-profile: not the name of a file")?.to_string_lossy().into_owned();
    let Origin { machine, date, .. } = &session.origin;
    let comment = format!(
        "Written by `troika bench cross-check --model {} --write-profile`, from a run of {date}: how, and what each field means, is in \
         docs/simulator.md.",
        model.name
    );
    let about = About {
        name,
        title: machine.clone(),
        origin: session.origin.clone(),
        primary: "cpu".to_owned(),
        engine: wish.backend.name().to_owned(),
        limits: wish.backend.limits().clone(),
    };
    Ok(session.observed.profile(&model.config.model, model.facts(), about)?.to_toml(&comment)?)
}

fn replay<'a>(model: &'a OpenModel, plan: &'a Plan, tokens: usize, wavefront: usize) -> Replay<'a> {
    Replay { config: &model.config.model, facts: model.facts(), plan, tokens, wavefront }
}

/// The model on this machine's devices, with engines placed so.
fn load(model: &OpenModel, options: RunnerOptions, npu: &str, tile: usize, placements: &Placements) -> Result<Runner> {
    let place = placements.place.iter().map(|(kind, place)| ((*kind).to_owned(), (*place).to_owned())).collect();
    let hybrid = HybridArgs::of(npu, tile, 0, &place).context("--npu")?;
    let (runner, _) = model.hybrid_runner(options, &hybrid, Some(1), u64::MAX)?;
    ensure!(!runner.executor().plan().is_primary(), "{}: nothing is placed: {}", placements.name, runner.feature());
    Ok(runner)
}
