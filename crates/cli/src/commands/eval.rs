//! `troika eval`: how well a model predicts a text.

use std::f64::consts::LN_2;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use troika_engine::{Chunk, Runner, WantLogits};
use troika_graph::Acceptance;
use troika_prompt::{Tokenizer, encode_completion};

use crate::model_source::ModelArgs;
use crate::{progress, report};

/// Tokens computed in one step.
const CHUNK: usize = 512;

/// Measure how well a model predicts texts: bits per byte and perplexity.
///
/// Each file is encoded as one text behind a begin-of-sentence token and cut into windows that start afresh. Every token of
/// the text is predicted exactly once, from the tokens before it in its window and the last one of the window before.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Text files, UTF-8.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of a window.
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,
    /// Stop after so many tokens of each file; 0 = all.
    #[arg(long, default_value_t = 0, value_name = "N")]
    max_tokens: usize,
    /// Write the numbers as JSON to FILE, or to standard output with `-`.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    class: &'static str,
    context: usize,
    files: Vec<FileScore>,
    bits_per_byte: f64,
    perplexity: f64,
}

#[derive(Debug, Serialize)]
struct FileScore {
    path: String,
    /// Bytes and tokens that were predicted.
    bytes: usize,
    tokens: usize,
    bits_per_byte: f64,
    perplexity: f64,
    #[serde(skip)]
    nats: f64,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let model = args.model.open()?;
    let tokenizer = model.tokenizer()?;
    let mut runner = model.runner(args.model.runner_options())?;
    let context = args.context as usize;
    let mut files = Vec::new();
    for path in &args.files {
        files.push(score_file(&mut runner, &tokenizer, path, context, args.max_tokens)?);
    }
    let (nats, bytes, tokens) =
        files.iter().fold((0.0, 0, 0), |(n, b, t), file| (n + file.nats, b + file.bytes, t + file.tokens));
    let report = Report {
        model: model.name,
        class: args.model.class.name(),
        context,
        files,
        bits_per_byte: nats / LN_2 / bytes as f64,
        perplexity: (nats / tokens as f64).exp(),
    };
    match &args.json {
        Some(target) => report::write_json(target, &report)?,
        None => report::print(&table(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn score_file(
    runner: &mut Runner,
    tokenizer: &Tokenizer,
    path: &Path,
    context: usize,
    max_tokens: usize,
) -> Result<FileScore> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = String::from_utf8(text).with_context(|| format!("{} is not UTF-8 text", path.display()))?;
    let mut ids = encode_completion(tokenizer, &text)?;
    if max_tokens > 0 {
        ids.truncate(max_tokens.saturating_add(1));
    }
    ensure!(ids.len() > 1, "{} holds no text", path.display());
    let bytes = match ids.len() - 1 {
        _ if max_tokens == 0 => text.len(),
        _ => ids[1..].iter().map(|id| tokenizer.token_bytes(*id).map_or(0, <[u8]>::len)).sum(),
    };
    let bar = progress::tokens("evaluating", ids.len() as u64 - 1);
    let mut nats = 0.0;
    for start in (0..ids.len() - 1).step_by(context) {
        let end = (start + context).min(ids.len() - 1);
        nats += score_window(runner, &ids[start..=end], &mut |tokens| bar.inc(tokens as u64))?;
    }
    bar.finish_and_clear();
    ensure!(nats.is_finite(), "{}: the model gave a logit that is not finite", path.display());
    let tokens = ids.len() - 1;
    Ok(FileScore {
        path: path.display().to_string(),
        bytes,
        tokens,
        bits_per_byte: nats / LN_2 / bytes as f64,
        perplexity: (nats / tokens as f64).exp(),
        nats,
    })
}

/// Negative log-likelihood of `ids[1..]`, in nats.
fn score_window(runner: &mut Runner, ids: &[u32], done: &mut dyn FnMut(usize)) -> Result<f64> {
    let sequence = runner.new_sequence();
    let mut nats = 0.0;
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[1..]);
    for (tokens, targets) in inputs.chunks(CHUNK).zip(targets.chunks(CHUNK)) {
        let logits = WantLogits::Last(tokens.len());
        let forward = runner.forward(&[Chunk { sequence, tokens, logits, acceptance: Acceptance::Whole }])?;
        let logits = forward.logits(0);
        let rows = logits.chunks_exact(runner.config().vocab_size).zip(targets);
        nats += rows.map(|(row, target)| surprise(row, *target as usize)).sum::<f64>();
        runner.recycle(forward);
        done(tokens.len());
    }
    runner.drop_sequence(sequence);
    Ok(nats)
}

/// `-log softmax(logits)[target]`.
fn surprise(logits: &[f32], target: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    sum.ln() - f64::from(logits[target] - max)
}

fn table(report: &Report) -> String {
    let mut text = String::new();
    for file in &report.files {
        text += &format!(
            "{}: {:.4} bits per byte, perplexity {:.3} ({} tokens, {} bytes)\n",
            file.path, file.bits_per_byte, file.perplexity, file.tokens, file.bytes
        );
    }
    if report.files.len() > 1 {
        text += &format!("all: {:.4} bits per byte, perplexity {:.3}\n", report.bits_per_byte, report.perplexity);
    }
    text
}
