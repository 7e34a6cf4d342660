//! `troika explain`: what one step computes, from the configuration alone.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde::Serialize;
use troika_base::units::human_bytes;
use troika_base::{NumericClass, SequenceId};
use troika_graph::{Acceptance, Cost, Segment, cost};
use troika_model::emit::official_bytes;
use troika_model::{ConfigFile, Emitter, ModelFacts, StepSignature};

use crate::report;

/// Show what one step of a model computes: nodes, floating-point operations, bytes and memory, by kind of operation.
///
/// Needs config.json only: weights are counted in the formats of the official release (fp4 experts, fp8 projections, bf16 and
/// f32 for the rest). One floating-point operation is half a multiply-add; element-wise work is left out.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// config.json of the model, or the folder that holds it.
    #[arg(long, value_name = "CONFIG")]
    config: PathBuf,
    /// Tokens in the step, all of one sequence.
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    rows: u32,
    /// Tokens that the sequence already holds.
    #[arg(long, default_value_t = 0, value_name = "N")]
    position: u32,
    /// Write the numbers as JSON to FILE, or to standard output with `-`.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    rows: usize,
    position: usize,
    kinds: Vec<Row>,
    total: Row,
    /// Memory of the step's values, known before it runs.
    peak_activation_bytes: u64,
    emission_ms: f64,
}

#[derive(Debug, Serialize)]
struct Row {
    kind: &'static str,
    nodes: u64,
    gflop: f64,
    mflop_per_token: f64,
    weight_bytes: u64,
    activation_bytes: u64,
    state_bytes: u64,
    /// Of the step's floating-point operations.
    share: f64,
}

impl Row {
    fn new(kind: &'static str, cost: &Cost, total: &Cost, rows: usize) -> Self {
        Self {
            kind,
            nodes: cost.nodes,
            gflop: cost.flops / 1e9,
            mflop_per_token: cost.flops / 1e6 / rows as f64,
            weight_bytes: cost.weight_bytes as u64,
            activation_bytes: cost.activation_bytes as u64,
            state_bytes: cost.state_bytes as u64,
            share: cost.flops / total.flops,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let report = explain(&args.config, args.rows as usize, args.position as usize)?;
    match &args.json {
        Some(target) => report::write_json(target, &report)?,
        None => report::print(&table(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn explain(config: &Path, rows: usize, position: usize) -> Result<Report> {
    let path = if config.is_dir() { config.join("config.json") } else { config.to_owned() };
    let config = ConfigFile::read(&path)?.model;
    let max = config.max_position_embeddings;
    ensure!(position + rows <= max, "{position} + {rows} tokens do not fit the model's context of {max}");
    let facts = ModelFacts::expected(&config);
    let emitter = Emitter::new(config, facts);
    let signature = StepSignature {
        rows,
        logit_rows: 1,
        select: emitter.needs_selection(position + rows),
        class: NumericClass::Exact,
        draft_context: false,
        debug_blocks: None,
    };
    let start = Instant::now();
    let graph = emitter.trunk(&signature);
    let emission_ms = start.elapsed().as_secs_f64() * 1e3;
    let segment = Segment { sequence: SequenceId(0), row: 0, rows, position, acceptance: Acceptance::Whole };
    let costs = cost::costs(&graph, &[segment], &official_bytes);
    Ok(Report {
        rows,
        position,
        kinds: costs.by_kind.iter().map(|(kind, cost)| Row::new(kind.name(), cost, &costs.total, rows)).collect(),
        total: Row::new("total", &costs.total, &costs.total, rows),
        peak_activation_bytes: graph.memory().peak_bytes(),
        emission_ms,
    })
}

fn table(report: &Report) -> String {
    let mut text = format!("step of {} tokens after {}\n\n", report.rows, report.position);
    let columns = ["kind", "nodes", "GFLOP", "MFLOP/token", "share", "weights", "activations", "state"];
    let [kind, nodes, gflop, per_token, share, weights, activations, state] = columns;
    let _ = writeln!(
        text,
        "{kind:<22}{nodes:>6}{gflop:>12}{per_token:>13}{share:>8}{weights:>12}{activations:>13}{state:>12}"
    );
    for row in report.kinds.iter().chain([&report.total]) {
        let _ = writeln!(
            text,
            "{:<22}{:>6}{:>12.1}{:>13.2}{:>7.1}%{:>12}{:>13}{:>12}",
            row.kind,
            row.nodes,
            row.gflop,
            row.mflop_per_token,
            row.share * 100.0,
            human_bytes(row.weight_bytes),
            human_bytes(row.activation_bytes),
            human_bytes(row.state_bytes),
        );
    }
    let _ = writeln!(text, "\npeak activation memory: {}", human_bytes(report.peak_activation_bytes));
    let _ = writeln!(text, "emitted in {:.2} ms", report.emission_ms);
    text
}
