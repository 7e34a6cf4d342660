//! `troika gate`: whether prompts computed with neural engines are near enough to those without.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use serde::Serialize;
use troika_base::NumericClass;
use troika_bench::corpus::{Corpus, Tokens};
use troika_engine::{Distance, FeatureState, RunnerOptions, distance};

use crate::hybrid::HybridArgs;
use crate::model_source::ModelArgs;
use crate::{progress, report};

/// Compare prefill with neural engines to the CPU's on texts that come along: code, prose, a conversation.
///
/// Passes if the mean KL divergence is at most 0.002 nats, the most likely token is the same at 99.5 % of the positions where
/// the two best are more than 0.1 nats apart, 98 % of the choices of experts are the same, every logit is a number, and no
/// continuation repeats one token over and over where the CPU's does not. The model is loaded twice. Exit code 1 if it fails.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    hybrid: HybridArgs,
    /// Texts; each is cut from one of the corpora in turn.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100))]
    texts: u16,
    /// Tiles of each text.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    tiles: u16,
    /// Write the numbers as JSON to FILE, or to standard output with `-`.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    numeric_class: String,
    texts: usize,
    tokens: usize,
    distance: Distance,
    failures: Vec<String>,
}

const CORPORA: [Corpus; 3] = [Corpus::CodePython, Corpus::ProseEn, Corpus::ChatMulti];

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    ensure!(args.hybrid.names_engine(), "no engine is named: use --npu, such as --npu soft");
    let model = args.model.open()?;
    let tokenizer = model.tokenizer()?;
    let options = RunnerOptions { debug: true, ..args.model.runner_options(NumericClass::Fast) };
    let (mut hybrid, _) = model.hybrid_runner(options, &args.hybrid, None, u64::MAX)?;
    if let state @ (FeatureState::Unavailable { .. } | FeatureState::Off) = hybrid.feature() {
        bail!("there is nothing to compare: the engines are {state}");
    }
    let mut primary = model.runner(options)?;
    let tile = hybrid.executor().plan().tile();
    let len = tile * usize::from(args.tiles);
    let corpora = CORPORA.map(|corpus| Tokens::read(corpus, &tokenizer));
    let corpora = corpora.into_iter().collect::<Result<Vec<_>, _>>()?;
    let texts = (0..usize::from(args.texts)).map(|i| corpora[i % corpora.len()].prompt(i, len));
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    let bar = progress::tokens("comparing", (len * texts.len()) as u64);
    let distance = distance(&mut primary, &mut hybrid, &texts, tile, &mut |tokens| bar.inc(tokens as u64))?;
    bar.finish_and_clear();
    let mut failures = distance.failures();
    if hybrid.feature() != FeatureState::Engaged {
        failures.push(format!("the engines did not do what was planned: {}", hybrid.feature()));
    }
    let numeric_class = hybrid.numeric_class();
    let (texts, tokens) = (texts.len(), len * texts.len());
    let report = Report { model: model.name, numeric_class, texts, tokens, distance, failures };
    match &args.json {
        Some(target) => report::write_json(target, &report)?,
        None => report::print(&table(&report))?,
    }
    Ok(if report.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn table(report: &Report) -> String {
    let Report { model, numeric_class, texts, tokens, distance, failures } = report;
    let mut text = format!(
        "{model}, {numeric_class}: {texts} texts, {tokens} tokens\nmean KL {:.2e} nats; same most likely token {:.2} % of \
         {} clear positions; same experts {:.2} %\n",
        distance.mean_kl(),
        distance.same_top1() * 100.0,
        distance.clear,
        distance.same_experts() * 100.0
    );
    for failure in failures {
        text += &format!("failed: {failure}\n");
    }
    text + if failures.is_empty() { "the gate is passed\n" } else { "the gate is NOT passed\n" }
}
