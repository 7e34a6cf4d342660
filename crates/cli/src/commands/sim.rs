//! `troika sim`: how fast machines would be that are not here.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use troika_base::NumericClass;
use troika_hwsim::{
    Arm, Axis, Faults, Machine, Placement, PlanSpec, Prediction, Profile, Projection, Run, STOCK_BLOCK, STOCK_STEP,
    Sweep,
};
use troika_model::ModelConfig;

use crate::model_source::ModelArgs;
use crate::{builtin, report};

/// Predict the prefill rate of a machine that is not here, by simulating its devices.
///
/// Scheduler, geometry, plan, executor and ledger are those of a server; the devices take no time but say how much they would
/// have taken, by the prices of a profile. Needs no weights. Everything printed is a PREDICTION.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The machine: the name of a profile that comes along, or a file (format: docs/simulator.md).
    #[arg(long, default_value = "m3-ultra-512", value_name = "NAME|FILE")]
    profile: String,
    /// The model: a name, or a folder of which only config.json is read. Without it, the one that the profile has prices of, which
    /// a folder must be called after.
    #[arg(long, value_name = "NAME|DIR")]
    model: Option<String>,
    /// How the model is stored; without it, the profile's first.
    #[arg(long, value_name = "NAME")]
    checkpoint: Option<String>,
    /// Tokens of each prompt. The last one belongs to decode: k tiles and one token are k whole tiles.
    #[arg(long, default_value_t = 16385, value_name = "N")]
    prompt: usize,
    /// What is simulated: the primary device in stock geometry, the same in the geometry of the plan, or engines beside it.
    /// Without it, all three, compared.
    #[arg(long, value_enum)]
    arm: Option<ArmArg>,
    /// What engines do: `default`, `published-2026-08` (with wo_a, and the primary device waiting for engines), `published-27b`,
    /// `off` (nothing but what --place says) or a TOML file. Without it, the profile's own plan, or `default` if it has none.
    #[arg(long, value_name = "NAME|FILE")]
    plan: Option<String>,
    /// Where operations are done instead: `off`, `whole`, `split:ENGINES` or `split:ENGINES+CPU`, fractions of the output
    /// channels. Operations: query, wo_a, wo_b, mlp, mlp_down, shared (the latter two in one), attention_input,
    /// attention_input_sparse; of machines that are handed these one by one, wq_a, wkv, compressor and indexer_compressor.
    #[arg(long, value_name = "OPERATION=PLACEMENT", value_delimiter = ',', value_parser = place)]
    place: Vec<(Projection, Placement)>,
    /// Rows of a tile; without it, the plan's.
    #[arg(long, value_name = "N")]
    tile: Option<usize>,
    /// Least rows of a padded tile, 0 pads none; without it, as prices say.
    #[arg(long, value_name = "N")]
    tail: Option<usize>,
    /// Tokens of a step. A value that is given is kept to, even if no tile fits in; without it, 2048 or the tile.
    #[arg(long, value_name = "N")]
    step: Option<usize>,
    /// Tokens of a cache block.
    #[arg(long, default_value_t = STOCK_BLOCK, value_name = "N")]
    block: usize,
    /// Prefill steps in flight.
    #[arg(long, default_value_t = 1, value_name = "N")]
    wavefront: usize,
    /// Prompts at once, all of the same length.
    #[arg(long, default_value_t = 1, value_name = "N")]
    concurrency: usize,
    /// Rows of several prompts share steps and tiles. Without it, each step is of one prompt.
    #[arg(long)]
    packed: bool,
    /// What goes wrong: compile-limit=BYTES, bank-limit=BYTES, load-error=CODE, failing-dispatch=N, slow-instance=N:FACTOR,
    /// missing-cpu-symbol, jitter=FRACTION, seed=N, and with --compute corrupt.
    #[arg(long, value_name = "FAULT", value_delimiter = ',')]
    fault: Vec<String>,
    /// Also compute the prompt, of arbitrary tokens, with the weights in this folder (`nano`: the model that comes along), and
    /// compare the outcome with what the primary device computes alone. Times are those of the profile's model, layer by layer.
    #[arg(long, value_name = "DIR", conflicts_with = "what_if")]
    compute: Option<PathBuf>,
    /// Vary a setting, or two: step, tile, block, wavefront, concurrency, engine-rate, sync-ms, an operation (the fraction on
    /// engines, 0 = off, 1 = whole) or OPERATION.cpu. VALUES are V,V,... or FIRST..LAST/STEPS. The second setting makes lines.
    #[arg(long, value_name = "SETTING=VALUES", num_args = 1)]
    what_if: Vec<Axis>,
    /// Draw what --what-if says as SVG.
    #[arg(long, value_name = "FILE", requires = "what_if")]
    plot: Option<PathBuf>,
    /// Write the predictions as JSON to FILE, or to standard output with `-`.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum ArmArg {
    Stock,
    Matched,
    Hybrid,
}

impl From<ArmArg> for Arm {
    fn from(arm: ArmArg) -> Self {
        match arm {
            ArmArg::Stock => Self::Stock,
            ArmArg::Matched => Self::Matched,
            ArmArg::Hybrid => Self::Hybrid,
        }
    }
}

fn place(text: &str) -> Result<(Projection, Placement), String> {
    let (projection, placement) = text.split_once('=').ok_or_else(|| format!("{text} is not OPERATION=PLACEMENT"))?;
    Ok((projection.parse()?, placement.parse()?))
}

/// What simulated devices computed, against the primary device alone.
#[derive(Serialize)]
struct Check {
    model: String,
    /// In the plan's arithmetic, by the primary device alone.
    same_bits: bool,
    /// In class `fast`, without any plan: norm of the difference of the logits over their norm.
    distance_from_fast: f64,
}

/// A run that was computed too, for scripts.
#[derive(Serialize)]
struct ComputedRun {
    prediction: Prediction,
    computed: Check,
}

/// All three arms, for scripts.
#[derive(Serialize)]
struct Comparison {
    kind: troika_hwsim::RecordKind,
    arms: Vec<Prediction>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let machine = machine(profile(&args.profile)?, args.model.as_deref(), args.checkpoint.as_deref())?;
    let run = args.run(&machine)?;
    if !args.what_if.is_empty() {
        let [x, series @ ..] = &args.what_if[..] else { unreachable!("it is not empty") };
        if series.len() > 1 {
            bail!("--what-if takes two settings at most");
        }
        let sweep = Sweep::of(&machine, &run, x, series.first())?;
        if let Some(target) = &args.plot {
            report::write_whole(target, sweep.plot()?.as_bytes())?;
        }
        match &args.json {
            Some(target) => report::write_json(target, &sweep)?,
            None => report::print(&sweep_table(&sweep))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(model) = &args.compute {
        return compute(args, &machine, &run, model);
    }
    if args.arm.is_some() {
        let prediction = machine.prefill(&run)?;
        match &args.json {
            Some(target) => report::write_json(target, &prediction)?,
            None => report::print(&details(&prediction))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let arms = [Arm::Stock, Arm::Matched, Arm::Hybrid].map(|arm| Run { arm, ..run.clone() });
    let arms = arms.iter().map(|run| machine.prefill(run)).collect::<Result<Vec<_>, _>>()?;
    match &args.json {
        Some(target) => {
            report::write_json(target, &Comparison { kind: troika_hwsim::RecordKind::Prediction, arms })?;
        }
        None => report::print(&comparison(&arms))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn compute(args: &Args, machine: &Machine, run: &Run, model: &Path) -> Result<ExitCode> {
    let dir = (model != Path::new(builtin::NAME)).then(|| model.to_owned());
    let model = ModelArgs::of(dir, NumericClass::Fast).open()?;
    let vocab = model.config.model.vocab_size;
    let tokens: Vec<u32> = (0..run.prompt_tokens).map(|i| (i * 7919 % vocab) as u32).collect();
    let small = model.small(&tokens);
    let simulated = machine.compute(run, &small)?;
    // Steps without room for a tile: the primary device repeats what engines would compute.
    let healthy = Run { faults: Faults::default(), wavefront: 1, ..run.clone() };
    let narrow = Run { step: run.plan.tile / 2, honour_step: true, ..healthy.clone() };
    let narrow = Run { plan: PlanSpec { tail_threshold: Some(0), ..run.plan.clone() }, ..narrow };
    let same_bits = machine.compute(&narrow, &small)?.logits == simulated.logits;
    let fast = machine.compute(&Run { arm: Arm::Stock, ..healthy }, &small)?.logits;
    let norm = |of: &mut dyn Iterator<Item = f32>| of.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let difference = norm(&mut simulated.logits.iter().zip(&fast).map(|(a, b)| a - b));
    let distance_from_fast = difference / norm(&mut fast.iter().copied());
    let computed = Check { model: model.name.clone(), same_bits, distance_from_fast };
    match &args.json {
        Some(target) => report::write_json(target, &ComputedRun { prediction: simulated.prediction, computed })?,
        None => {
            let same = if same_bits { "the same bits as" } else { "OTHER NUMBERS than" };
            let text = format!(
                "computed with {}: {same} the primary device alone; {:.2} % from class fast\n",
                computed.model,
                distance_from_fast * 100.0
            );
            report::print(&(details(&simulated.prediction) + &text))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The machine of a profile with its model, or one that is named, or in a folder; stored as named, or in the first way it knows.
pub(super) fn machine(profile: Profile, model: Option<&str>, checkpoint: Option<&str>) -> Result<Machine> {
    let first = || profile.checkpoints.first().map(|checkpoint| checkpoint.name.clone());
    let checkpoint = checkpoint.map(str::to_owned).or_else(first);
    let checkpoint = checkpoint.with_context(|| format!("profile {} has no checkpoint", profile.name))?;
    let model = model.unwrap_or(&profile.model).to_owned();
    if Machine::models().contains(&&*model) || !looks_like_a_place(&model) {
        return Ok(Machine::new(profile, &model, &checkpoint)?);
    }
    let config = ModelConfig::read(&Path::new(&model).join("config.json"))?;
    let full = Path::new(&model).canonicalize().with_context(|| format!("cannot read {model}"))?;
    let name = full.file_name().with_context(|| format!("{model} has no name"))?.to_string_lossy();
    Ok(Machine::with_config(profile, &name, &checkpoint, config)?)
}

pub(super) fn profile(name: &str) -> Result<Profile> {
    if Profile::names().contains(&name) || !looks_like_a_place(name) {
        return Ok(Profile::named(name)?);
    }
    Ok(Profile::parse(&read(name)?, name)?)
}

fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

fn looks_like_a_place(name: &str) -> bool {
    Path::new(name).exists() || name.contains(std::path::MAIN_SEPARATOR) || name.ends_with(".toml")
}

impl Args {
    fn run(&self, machine: &Machine) -> Result<Run> {
        let mut plan = match (&self.plan, &machine.profile().plan) {
            (None, Some(own)) => own.clone(),
            (None, None) => PlanSpec::named("default")?,
            (Some(name), _) if PlanSpec::NAMES.contains(&&**name) || !looks_like_a_place(name) => {
                PlanSpec::named(name)?
            }
            (Some(file), _) => PlanSpec::parse(&read(file)?, file)?,
        };
        plan.place.extend(self.place.iter().copied());
        plan.tile = self.tile.unwrap_or(plan.tile);
        plan.tail_threshold = self.tail.or(plan.tail_threshold);
        let arm = self.arm.map_or(Arm::Hybrid, Arm::from);
        Ok(Run {
            step: self.step.unwrap_or(STOCK_STEP),
            honour_step: self.step.is_some(),
            block: self.block,
            wavefront: self.wavefront,
            concurrency: self.concurrency,
            packed: self.packed,
            faults: faults(&self.fault)?,
            ..Run::new(self.prompt, arm, plan)
        })
    }
}

fn faults(texts: &[String]) -> Result<Faults> {
    let mut faults = Faults::default();
    for text in texts {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        let wrong = || format!("--fault {text}: {value:?} is no value of {key}");
        match key {
            "compile-limit" => faults.compile_limit_bytes = Some(value.parse().with_context(wrong)?),
            "bank-limit" => faults.bank_limit_bytes = Some(value.parse().with_context(wrong)?),
            "load-error" => faults.load_error = Some(value.parse().with_context(wrong)?),
            "failing-dispatch" => faults.failing_dispatch = Some(value.parse().with_context(wrong)?),
            "slow-instance" => {
                let (instance, factor) = value.split_once(':').with_context(wrong)?;
                faults.slow_instance =
                    Some((instance.parse().with_context(wrong)?, factor.parse().with_context(wrong)?));
            }
            "corrupt" => faults.corrupt = true,
            "missing-cpu-symbol" => faults.missing_cpu_symbol = true,
            "jitter" => faults.jitter = value.parse().with_context(wrong)?,
            "seed" => faults.seed = value.parse().with_context(wrong)?,
            _ => bail!("--fault {text}: no such fault; `troika sim --help` lists them"),
        }
    }
    Ok(faults)
}

fn heading(one: &Prediction) -> String {
    let prompts = match one.concurrency {
        1 => "a prompt".to_owned(),
        n => format!("{n} prompts at once, {}", if one.packed { "packed, each" } else { "each" }),
    };
    format!(
        "PREDICTION by simulation, nothing was measured.\n{} on {}, checkpoint {}; {prompts} of {} tokens\n\n",
        one.model, one.profile, one.checkpoint, one.prompt_tokens
    )
}

fn comparison(arms: &[Prediction]) -> String {
    let mut text = heading(&arms[2]);
    let [arm, rate, operations, verdict] = ["arm", "predicted tok/s", "dispatched / planned", "engines"];
    let _ = writeln!(text, "{arm:<28}{rate:>16}{operations:>22}  {verdict}");
    let names = ["A  stock geometry", "B  geometry of the plan", "C  engines"];
    for (name, one) in names.iter().zip(arms) {
        let operations = format!("{} / {}", one.dispatched, one.planned);
        let _ = writeln!(text, "{name:<28}{:>16.1}{operations:>22}  {}", one.prefill_tps, one.verdict);
    }
    let gain = |a: usize, b: usize| (arms[b].prefill_tps.predicted() / arms[a].prefill_tps.predicted() - 1.0) * 100.0;
    let _ = writeln!(text, "\npredicted gain of the geometry (B over A): {:+.1} %", gain(0, 1));
    let _ = writeln!(text, "predicted gain of the engines  (C over B): {:+.1} %", gain(1, 2));
    text + &devices(&arms[2]) + &notes(&arms[2])
}

fn details(one: &Prediction) -> String {
    let mut text = heading(one);
    let _ = writeln!(text, "predicted prefill: {:.1} tok/s, {:.1} ms", one.prefill_tps, one.prefill_ms);
    let _ = writeln!(text, "geometry: {}", one.geometry);
    let widths: Vec<String> = one.widths.iter().map(|(rows, steps)| format!("{steps} of {rows} rows")).collect();
    let _ = writeln!(text, "steps: {}", widths.join(", "));
    let _ = writeln!(text, "operations: {} dispatched, {} planned: {}", one.dispatched, one.planned, one.verdict);
    let [operation, primary, engines, cpu, join] = ["predicted time", "primary ms", "engines ms", "cpu ms", "join ms"];
    let _ = writeln!(text, "\n{operation:<26}{primary:>12}{engines:>12}{cpu:>12}{join:>12}  price");
    for row in &one.operations {
        let _ = writeln!(
            text,
            "{:<26}{:>12.1}{:>12.1}{:>12.1}{:>12.1}  {}",
            row.operation, row.primary_ms, row.engines_ms, row.cpu_ms, row.join_ms, row.basis
        );
    }
    text + &devices(one) + &notes(one)
}

fn devices(one: &Prediction) -> String {
    let each = one.devices.iter().map(|d| format!("{} {:.0} %", d.name, d.duty.predicted() * 100.0));
    format!("predicted time at work: {}\n", each.collect::<Vec<_>>().join(", "))
}

fn notes(one: &Prediction) -> String {
    let mut text = String::new();
    for left in &one.left_out {
        let _ = writeln!(text, "left out: {} in {} layers ({})", left.projection, left.layers, left.reason);
    }
    text
}

fn sweep_table(sweep: &Sweep) -> String {
    let mut text = format!(
        "PREDICTIONS by simulation, nothing was measured.\n{} on {}\n\n{:>16}",
        sweep.model, sweep.profile, sweep.x
    );
    if let Some(series) = &sweep.series {
        let _ = write!(text, "{series:>24}");
    }
    let _ = writeln!(text, "{:>18}{:>12}  at work", "predicted tok/s", "dispatched");
    for point in &sweep.points {
        let _ = write!(text, "{:>16}", point.x);
        if let Some(series) = point.series {
            let _ = write!(text, "{series:>24}");
        }
        let duty: Vec<String> = point.duty.iter().map(|duty| format!("{:.0} %", duty.predicted() * 100.0)).collect();
        let _ = writeln!(text, "{:>18.1}{:>12}  {}", point.prefill_tps, point.dispatched, duty.join(", "));
    }
    for reason in &sweep.refused {
        let _ = writeln!(text, "not simulated: {reason}");
    }
    text
}
