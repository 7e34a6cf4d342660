//! `troika eval`: how well a model predicts a text.

use std::f64::consts::LN_2;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use troika_base::{NumericClass, SequenceId};
use troika_engine::{Chunk, Runner, WantLogits};
use troika_graph::Acceptance;
use troika_prompt::{Tokenizer, encode_completion};

use crate::hybrid::HybridArgs;
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
    #[command(flatten)]
    hybrid: HybridArgs,
    /// Tokens of a window.
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,
    /// Stop after so many tokens of each file; 0 = all.
    #[arg(long, default_value_t = 0, value_name = "N")]
    max_tokens: usize,
    /// Also compute the texts in this class, and show how far the distributions of the two are apart.
    #[arg(long, value_name = "CLASS")]
    against: Option<NumericClass>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Distance>,
}

/// How far two classes are apart over the same tokens.
#[derive(Debug, Serialize)]
struct Distance {
    class: &'static str,
    /// Of the other class.
    perplexity: f64,
    /// Mean of `Σ p log(p / q)`, `p` of the other class, nats.
    mean_kl: f64,
    max_kl: f64,
    /// Share of tokens with the same most likely next token.
    same_top1: f64,
}

/// Another runner and the sums of its distances.
struct Other {
    runner: Runner,
    nats: f64,
    kl: f64,
    max_kl: f64,
    same: usize,
    tokens: usize,
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
    let class = args.model.class_or(NumericClass::Exact);
    let model = args.model.open()?;
    let tokenizer = model.tokenizer()?;
    let (mut runner, _) = model.hybrid_runner(args.model.runner_options(class), &args.hybrid, Some(1), u64::MAX)?;
    let mut other = match args.against {
        None => None,
        Some(class) => {
            let runner = model.runner(args.model.runner_options(class))?;
            Some(Other { runner, nats: 0.0, kl: 0.0, max_kl: 0.0, same: 0, tokens: 0 })
        }
    };
    let context = args.context as usize;
    let mut files = Vec::new();
    for path in &args.files {
        files.push(score_file(&mut runner, other.as_mut(), &tokenizer, path, context, args.max_tokens)?);
    }
    let (nats, bytes, tokens) =
        files.iter().fold((0.0, 0, 0), |(n, b, t), file| (n + file.nats, b + file.bytes, t + file.tokens));
    let report = Report {
        model: model.name,
        class: class.name(),
        context,
        files,
        bits_per_byte: nats / LN_2 / bytes as f64,
        perplexity: (nats / tokens as f64).exp(),
        against: args.against.zip(other).map(|(class, other)| other.distance(class)),
    };
    match &args.json {
        Some(target) => report::write_json(target, &report)?,
        None => report::print(&table(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

impl Other {
    /// Runs the same tokens and compares rows of logits.
    fn compare(&mut self, sequence: SequenceId, tokens: &[u32], targets: &[u32], logits: &[f32]) -> Result<()> {
        let want = WantLogits::Last(tokens.len());
        let chunk = Chunk { sequence, tokens, logits: want, acceptance: Acceptance::Whole };
        let forward = self.runner.forward(&[chunk])?;
        let own = forward.logits(0);
        let vocab_size = self.runner.config().vocab_size;
        for ((p, q), target) in own.chunks_exact(vocab_size).zip(logits.chunks_exact(vocab_size)).zip(targets) {
            let kl = divergence(p, q);
            self.nats += surprise(p, *target as usize);
            self.kl += kl;
            self.max_kl = self.max_kl.max(kl);
            self.same += usize::from(most_likely(p) == most_likely(q));
            self.tokens += 1;
        }
        self.runner.recycle(forward);
        Ok(())
    }

    fn distance(&self, class: NumericClass) -> Distance {
        let tokens = self.tokens.max(1) as f64;
        Distance {
            class: class.name(),
            perplexity: (self.nats / tokens).exp(),
            mean_kl: self.kl / tokens,
            max_kl: self.max_kl,
            same_top1: self.same as f64 / tokens,
        }
    }
}

fn score_file(
    runner: &mut Runner,
    mut other: Option<&mut Other>,
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
        nats += score_window(runner, other.as_deref_mut(), &ids[start..=end], &mut |tokens| bar.inc(tokens as u64))?;
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
fn score_window(
    runner: &mut Runner,
    mut other: Option<&mut Other>,
    ids: &[u32],
    done: &mut dyn FnMut(usize),
) -> Result<f64> {
    let sequence = runner.new_sequence();
    let other_sequence = other.as_mut().map(|other| other.runner.new_sequence());
    let mut nats = 0.0;
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[1..]);
    for (tokens, targets) in inputs.chunks(CHUNK).zip(targets.chunks(CHUNK)) {
        let logits = WantLogits::Last(tokens.len());
        let forward = runner.forward(&[Chunk { sequence, tokens, logits, acceptance: Acceptance::Whole }])?;
        let logits = forward.logits(0);
        let rows = logits.chunks_exact(runner.config().vocab_size).zip(targets);
        nats += rows.map(|(row, target)| surprise(row, *target as usize)).sum::<f64>();
        if let Some((other, sequence)) = other.as_mut().zip(other_sequence) {
            other.compare(sequence, tokens, targets, &logits)?;
        }
        runner.recycle(forward);
        done(tokens.len());
    }
    if let Some((other, sequence)) = other.zip(other_sequence) {
        other.runner.drop_sequence(sequence);
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

/// `Σ p log(p / q)` of the softmax of two rows of logits.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let normaliser = |row: &[f32]| surprise(row, 0) + f64::from(row[0]);
    let (p_sum, q_sum) = (normaliser(p), normaliser(q));
    let term = |(p, q): (&f32, &f32)| {
        let (p, q) = (f64::from(*p) - p_sum, f64::from(*q) - q_sum);
        p.exp() * (p - q)
    };
    p.iter().zip(q).map(term).sum()
}

fn most_likely(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, id| if logits[id] > logits[best] { id } else { best })
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
    if let Some(other) = &report.against {
        text += &format!(
            "against {}: perplexity {:.3}, KL {:.2e} nats (most {:.2e}), same most likely token {:.2} %\n",
            other.class,
            other.perplexity,
            other.mean_kl,
            other.max_kl,
            other.same_top1 * 100.0
        );
    }
    text
}
