//! `troika bench in-process`: prefill and decode rates of the engine alone, without a server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde::Serialize;
use troika_base::NumericClass;
use troika_bench::record::{StepSpan, StepTimeline};
use troika_engine::{Chunk, Forward, HybridStatus, Priority, Runner, WantLogits};
use troika_graph::{Acceptance, Kind, Scope};

use crate::hybrid::{self, HybridArgs, WavefrontArgs};
use crate::model_source::ModelArgs;
use crate::tuning::TuningArgs;
use crate::{progress, report};

/// Measure the engine alone, in this process: a quick look, and device time by operation.
///
/// One arm, no server and no text: to compare features, use `troika bench`. Each round runs every prompt length once, so that
/// a slow minute of the machine touches all of them; the first round is a warm-up and is thrown away. Rates are medians.
/// Loading and text handling are outside the clock.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    hybrid: HybridArgs,
    #[command(flatten)]
    wavefront: WavefrontArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    /// Tokens of the prompts.
    #[arg(long, value_delimiter = ',', default_value = "512,2048", value_name = "N,N,...", value_parser = clap::value_parser!(u32).range(1..))]
    prompt_lengths: Vec<u32>,
    /// Tokens to generate after each prompt, at least 2.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    generate: u32,
    /// Rounds that count.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Prompt tokens computed in one step.
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    /// Also show where the time goes: device time by kind of operation, from the ledger, and the rest.
    #[arg(long)]
    profile: bool,
    /// Also put into the JSON when each node of the last whole chunk of the longest prompt ran, and on which device.
    #[arg(long, requires = "json")]
    timeline: bool,
    /// Write the numbers as JSON to FILE, or to standard output with `-`.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    cpu_level: &'static str,
    rounds: u32,
    chunk: u32,
    wavefront: usize,
    generate: u32,
    peak_memory_bytes: Option<u64>,
    results: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<Vec<KindTime>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<StepTimeline>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hybrid: Option<HybridStatus>,
}

/// What the time between nodes is called: submission, reports, choosing the token.
const OUTSIDE: &str = "outside of nodes";

/// Device time of one kind of operation, or the rest.
#[derive(Debug, Serialize)]
struct KindTime {
    kind: &'static str,
    prefill_us_per_token: f64,
    decode_us_per_token: f64,
}

/// Where the time of prefill or decode went.
#[derive(Debug, Default)]
struct Phase {
    /// Device time by kind, nanoseconds.
    nodes_ns: BTreeMap<Kind, u64>,
    tokens: u64,
    /// All of it, by the clock on the wall.
    wall_s: f64,
}

impl Phase {
    fn count(&mut self, forward: &Forward, tokens: usize) {
        self.tokens += tokens as u64;
        for (kind, _, entry) in forward.ledger.entries() {
            *self.nodes_ns.entry(kind).or_default() += entry.busy_ns;
        }
    }

    fn us_per_token(&self, kind: Kind) -> f64 {
        let ns = self.nodes_ns.get(&kind).copied().unwrap_or(0);
        ns as f64 / 1e3 / self.tokens.max(1) as f64
    }

    fn outside_us_per_token(&self) -> f64 {
        let nodes_ns: u64 = self.nodes_ns.values().sum();
        (self.wall_s * 1e6 - nodes_ns as f64 / 1e3) / self.tokens.max(1) as f64
    }
}

#[derive(Debug, Default)]
struct Profile {
    prefill: Phase,
    decode: Phase,
}

impl Profile {
    fn rows(&self) -> Vec<KindTime> {
        let Self { prefill, decode } = self;
        let kinds = prefill.nodes_ns.keys().map(|kind| KindTime {
            kind: kind.name(),
            prefill_us_per_token: prefill.us_per_token(*kind),
            decode_us_per_token: decode.us_per_token(*kind),
        });
        let mut rows: Vec<KindTime> = kinds.collect();
        rows.sort_by(|a, b| b.prefill_us_per_token.total_cmp(&a.prefill_us_per_token));
        rows.push(KindTime {
            kind: OUTSIDE,
            prefill_us_per_token: prefill.outside_us_per_token(),
            decode_us_per_token: decode.outside_us_per_token(),
        });
        rows
    }
}

/// Medians under plain names; least and most under `_min` and `_max`.
#[derive(Debug, Serialize)]
struct Row {
    arm: &'static str,
    prompt_tokens: u32,
    prefill_tps: f64,
    prefill_tps_min: f64,
    prefill_tps_max: f64,
    decode_tps: f64,
    decode_tps_min: f64,
    decode_tps_max: f64,
    ttft_ms: f64,
    ttft_ms_min: f64,
    ttft_ms_max: f64,
}

/// Times of one prompt and what followed.
struct Sample {
    prefill_s: f64,
    decode_s: f64,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let class = args.model.class_or(NumericClass::Fast);
    let model = args.model.open()?;
    let longest = args.prompt_lengths.iter().max().copied().unwrap_or(0) as usize + args.generate as usize;
    let max = model.config.model.max_position_embeddings;
    ensure!(longest <= max, "{longest} tokens do not fit the model's context of {max}");
    let options = args.model.runner_options(class);
    let (hybrid, wavefront) = args.tuning.apply(&model, &options, &args.hybrid, args.wavefront.steps())?;
    let (mut runner, wavefront) = model.hybrid_runner(options, &hybrid, wavefront, u64::MAX)?;
    let tokens_per_round: u64 = args.prompt_lengths.iter().map(|n| u64::from(n + args.generate)).sum();
    let bar = progress::tokens("measuring", tokens_per_round * u64::from(args.rounds + 1));
    let mut samples: Vec<Vec<Sample>> = args.prompt_lengths.iter().map(|_| Vec::new()).collect();
    let mut profile = Profile::default();
    for round in 0..=args.rounds {
        for (length, samples) in args.prompt_lengths.iter().zip(&mut samples) {
            let counted = (round > 0).then_some(&mut profile);
            let sample = measure(&mut runner, args, *length as usize, wavefront, counted)?;
            bar.inc(u64::from(length + args.generate));
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    bar.finish_and_clear();
    let step = match args.prompt_lengths.iter().max() {
        Some(longest) if args.timeline => Some(timeline(&mut runner, *longest as usize, args.chunk as usize)?),
        _ => None,
    };
    let results = args.prompt_lengths.iter().zip(&samples);
    let arm = if hybrid.is_simulated() { "SIMULATED" } else { class.name() };
    let report = Report {
        model: model.name,
        device: runner.device_description().to_owned(),
        cpu_level: args.model.cpu_level().name(),
        rounds: args.rounds,
        chunk: args.chunk,
        wavefront,
        generate: args.generate,
        peak_memory_bytes: report::peak_memory_bytes(),
        results: results.map(|(length, samples)| row(arm, *length, args.generate, samples)).collect(),
        profile: args.profile.then(|| profile.rows()),
        step,
        hybrid: HybridStatus::of(&runner),
    };
    match &args.json {
        Some(target) => report::write_json(target, &report)?,
        None => report::print(&table(&report))?,
    }
    hybrid.check_engaged(&runner.feature())?;
    Ok(ExitCode::SUCCESS)
}

fn measure(
    runner: &mut Runner,
    args: &Args,
    prompt_tokens: usize,
    wavefront: usize,
    mut profile: Option<&mut Profile>,
) -> Result<Sample> {
    let (generate, chunk) = (args.generate as usize, args.chunk as usize);
    let prompt = prompt(runner, prompt_tokens);
    let sequence = runner.new_sequence();
    let start = Instant::now();
    let mut chunks = prompt.chunks(chunk).enumerate();
    let (mut num_done, mut in_flight, mut next) = (0, 0, 0);
    while num_done < prompt_tokens {
        while in_flight < wavefront
            && let Some((index, tokens)) = chunks.next()
        {
            let last = (index + 1) * chunk >= prompt_tokens;
            let logits = if last { WantLogits::Last(1) } else { WantLogits::No };
            // As the scheduler has it.
            let priority = if tokens.len() == 1 { Priority::Decode } else { Priority::Prefill };
            runner.submit(&[Chunk { sequence, tokens, logits, acceptance: Acceptance::Whole }], priority)?;
            in_flight += 1;
        }
        let (_, forward) = runner.next_done()?;
        in_flight -= 1;
        // Chunks of a sequence are done in order.
        let tokens = chunk.min(prompt_tokens - num_done);
        num_done += tokens;
        if let Some(profile) = profile.as_deref_mut() {
            profile.prefill.count(&forward, tokens);
        }
        if num_done == prompt_tokens {
            next = most_likely(&forward);
        }
        runner.recycle(forward);
    }
    let prefilled = Instant::now();
    for _ in 1..generate {
        let chunk = Chunk { sequence, tokens: &[next], logits: WantLogits::Last(1), acceptance: Acceptance::Whole };
        let forward = runner.forward(&[chunk])?;
        if let Some(profile) = profile.as_deref_mut() {
            profile.decode.count(&forward, 1);
        }
        next = most_likely(&forward);
        runner.recycle(forward);
    }
    let decode_s = prefilled.elapsed().as_secs_f64();
    let prefill_s = prefilled.duration_since(start).as_secs_f64();
    if let Some(profile) = profile {
        profile.prefill.wall_s += prefill_s;
        profile.decode.wall_s += decode_s;
    }
    runner.drop_sequence(sequence);
    Ok(Sample { prefill_s, decode_s })
}

/// When the nodes of the last whole chunk of a prompt ran.
fn timeline(runner: &mut Runner, prompt_tokens: usize, chunk: usize) -> Result<StepTimeline> {
    let prompt = prompt(runner, prompt_tokens);
    let sequence = runner.new_sequence();
    let last = (prompt_tokens / chunk).saturating_sub(1);
    let mut timeline = StepTimeline { tokens: 0, position: last * chunk, spans: Vec::new() };
    for (index, tokens) in prompt.chunks(chunk).take(last + 1).enumerate() {
        runner.keep_spans(index == last);
        let asked = Chunk { sequence, tokens, logits: WantLogits::No, acceptance: Acceptance::Whole };
        let forward = runner.forward(&[asked])?;
        timeline.tokens = tokens.len();
        let spans = forward.spans.iter().map(|span| StepSpan {
            device: span.device.0,
            kind: span.kind.name().to_owned(),
            layer: if let Scope::Layer(layer) = span.scope { Some(layer) } else { None },
            start_us: span.start_ns as f64 / 1e3,
            end_us: span.end_ns as f64 / 1e3,
        });
        timeline.spans = spans.collect();
        runner.recycle(forward);
    }
    runner.keep_spans(false);
    runner.drop_sequence(sequence);
    Ok(timeline)
}

/// Any spread of ids will do; the same in every round.
fn prompt(runner: &Runner, tokens: usize) -> Vec<u32> {
    let vocab_size = runner.config().vocab_size;
    (0..tokens).map(|i| (i * 7919 % vocab_size) as u32).collect()
}

fn most_likely(forward: &Forward) -> u32 {
    let logits = forward.logits(0);
    logits.iter().enumerate().fold(0, |best, (id, logit)| if *logit > logits[best] { id } else { best }) as u32
}

fn row(arm: &'static str, prompt_tokens: u32, generate: u32, samples: &[Sample]) -> Row {
    let spread = |value: &dyn Fn(&Sample) -> f64| {
        let values: Vec<f64> = samples.iter().map(value).collect();
        let median = report::median(&values).expect("at least one round");
        (median, values.iter().copied().fold(f64::MAX, f64::min), values.iter().copied().fold(0.0, f64::max))
    };
    let (prefill_tps, prefill_tps_min, prefill_tps_max) = spread(&|s| f64::from(prompt_tokens) / s.prefill_s);
    let (decode_tps, decode_tps_min, decode_tps_max) = spread(&|s| f64::from(generate - 1) / s.decode_s);
    let (ttft_ms, ttft_ms_min, ttft_ms_max) = spread(&|s| s.prefill_s * 1e3);
    Row {
        arm,
        prompt_tokens,
        prefill_tps,
        prefill_tps_min,
        prefill_tps_max,
        decode_tps,
        decode_tps_min,
        decode_tps_max,
        ttft_ms,
        ttft_ms_min,
        ttft_ms_max,
    }
}

fn table(report: &Report) -> String {
    let mut text =
        format!("{} on {}; median (least to most) of {} rounds\n\n", report.model, report.device, report.rounds);
    text +=
        &format!("{:<10}{:>8}{:>28}{:>28}{:>26}\n", "arm", "prompt", "prefill tok/s", "decode tok/s", "first token ms");
    let cell = |median: f64, least: f64, most: f64| format!("{median:.1} ({least:.1} to {most:.1})");
    for row in &report.results {
        text += &format!(
            "{:<10}{:>8}{:>28}{:>28}{:>26}\n",
            row.arm,
            row.prompt_tokens,
            cell(row.prefill_tps, row.prefill_tps_min, row.prefill_tps_max),
            cell(row.decode_tps, row.decode_tps_min, row.decode_tps_max),
            cell(row.ttft_ms, row.ttft_ms_min, row.ttft_ms_max),
        );
    }
    if let Some(profile) = &report.profile {
        let sum = |time: fn(&KindTime) -> f64| profile.iter().map(time).sum::<f64>().max(f64::MIN_POSITIVE);
        let (prefill, decode) = (sum(|t| t.prefill_us_per_token), sum(|t| t.decode_us_per_token));
        text += &format!("\n{:<24}{:>26}{:>26}\n", "time", "prefill us/token", "decode us/token");
        let cell = |time: f64, sum: f64| format!("{time:.1} ({:.0} %)", time / sum * 100.0);
        for time in profile {
            let cells = (cell(time.prefill_us_per_token, prefill), cell(time.decode_us_per_token, decode));
            text += &format!("{:<24}{:>26}{:>26}\n", time.kind, cells.0, cells.1);
        }
        text += &format!("{:<24}{:>26}{:>26}\n", "all", cell(prefill, prefill), cell(decode, decode));
    }
    if let Some(hybrid) = &report.hybrid {
        text += &hybrid::table(hybrid);
    }
    text
}
