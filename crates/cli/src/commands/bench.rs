//! `troika bench`: prefill and decode rates of a model on this machine.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde::Serialize;
use troika_engine::{Chunk, Forward, Runner, WantLogits};
use troika_graph::Acceptance;

use crate::model_source::ModelArgs;
use crate::{progress, report};

/// Measure prompt and generation speed.
///
/// Each round runs every prompt length once, so that a slow minute of the machine touches all of them; the first round is a
/// warm-up and is thrown away. Rates are medians. Loading and text handling are outside the clock.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
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
    /// Write the numbers as JSON to FILE, or to standard output with `-`.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    rounds: u32,
    chunk: u32,
    generate: u32,
    peak_memory_bytes: Option<u64>,
    results: Vec<Row>,
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
    let model = args.model.open()?;
    let longest = args.prompt_lengths.iter().max().copied().unwrap_or(0) as usize + args.generate as usize;
    let max = model.config.model.max_position_embeddings;
    ensure!(longest <= max, "{longest} tokens do not fit the model's context of {max}");
    let mut runner = model.runner(args.model.runner_options())?;
    let tokens_per_round: u64 = args.prompt_lengths.iter().map(|n| u64::from(n + args.generate)).sum();
    let bar = progress::tokens("measuring", tokens_per_round * u64::from(args.rounds + 1));
    let mut samples: Vec<Vec<Sample>> = args.prompt_lengths.iter().map(|_| Vec::new()).collect();
    for round in 0..=args.rounds {
        for (length, samples) in args.prompt_lengths.iter().zip(&mut samples) {
            let sample = measure(&mut runner, *length as usize, args.generate as usize, args.chunk as usize)?;
            bar.inc(u64::from(length + args.generate));
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    bar.finish_and_clear();
    let results = args.prompt_lengths.iter().zip(&samples);
    let report = Report {
        model: model.name,
        device: runner.device_description().to_owned(),
        rounds: args.rounds,
        chunk: args.chunk,
        generate: args.generate,
        peak_memory_bytes: report::peak_memory_bytes(),
        results: results
            .map(|(length, samples)| row(args.model.class.name(), *length, args.generate, samples))
            .collect(),
    };
    match &args.json {
        Some(target) => report::write_json(target, &report)?,
        None => report::print(&table(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(runner: &mut Runner, prompt_tokens: usize, generate: usize, chunk: usize) -> Result<Sample> {
    let vocab_size = runner.config().vocab_size;
    // Any spread of ids will do; the same in every round.
    let prompt: Vec<u32> = (0..prompt_tokens).map(|i| (i * 7919 % vocab_size) as u32).collect();
    let sequence = runner.new_sequence();
    let step = |runner: &mut Runner, tokens: &[u32], last: bool| -> Result<Option<u32>> {
        let logits = if last { WantLogits::Last(1) } else { WantLogits::No };
        let forward = runner.forward(&[Chunk { sequence, tokens, logits, acceptance: Acceptance::Whole }])?;
        let next = last.then(|| most_likely(&forward));
        runner.recycle(forward);
        Ok(next)
    };
    let start = Instant::now();
    let mut next = None;
    for (index, tokens) in prompt.chunks(chunk).enumerate() {
        next = step(runner, tokens, (index + 1) * chunk >= prompt_tokens)?;
    }
    let prefilled = Instant::now();
    for _ in 1..generate {
        let token = next.expect("the last step gave logits");
        next = step(runner, &[token], true)?;
    }
    let decode_s = prefilled.elapsed().as_secs_f64();
    runner.drop_sequence(sequence);
    Ok(Sample { prefill_s: prefilled.duration_since(start).as_secs_f64(), decode_s })
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
    text
}
