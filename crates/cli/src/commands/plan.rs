//! `troika plan`: what neural engines would do of a model, before any weight is prepared.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context, Result};
use troika_base::units::human_bytes;
use troika_engine::{Placement, Record};

use crate::hybrid::HybridArgs;
use crate::model_source::ModelArgs;
use crate::report;

/// Show which projections neural engines would take part in, with how many channels and bytes, and why not in others.
///
/// Nothing is prepared: the table comes from the shapes and formats of the stored tensors.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    hybrid: HybridArgs,
}

/// Projections of one kind with the same shape and fate.
#[derive(Default)]
struct Row {
    layers: usize,
    bytes: u64,
    /// Of one layer and tile.
    multiply_adds: u64,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let wish = args.hybrid.wish()?.context("no engine is named: use --npu, such as --npu soft")?;
    let records = args.model.open()?.plan_engines(&wish);
    let (tile, instances) = (wish.options.tile, wish.backend.limits().instances);
    let mut rows: BTreeMap<[String; 5], Row> = BTreeMap::new();
    for record in &records {
        let row = rows.entry(cells(record, instances)).or_default();
        row.layers += 1;
        row.bytes += record.estimated_bytes;
        row.multiply_adds = record.eligibility.work() * tile as u64;
    }
    let mut text = format!("{} x {instances}, tiles of {tile} rows\n\n", wish.backend.name());
    text += &format!(
        "{:<22}{:>8}{:>18}{:>10}{:>10}{:>12}{:>14}  {}\n",
        "projection", "layers", "out x in", "engines", "cpu", "memory", "GFLOP / tile", "note"
    );
    for ([kind, shape, engines, cpu, note], row) in &rows {
        text += &format!(
            "{kind:<22}{:>8}{shape:>18}{engines:>10}{cpu:>10}{:>12}{:>14.2}  {note}\n",
            row.layers,
            human_bytes(row.bytes),
            row.multiply_adds as f64 * 2e-9
        );
    }
    report::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Kind, shape, channels of all engines, channels of the CPU, note.
fn cells(record: &Record, instances: usize) -> [String; 5] {
    let weights = &record.eligibility.weights;
    let out: usize = weights.iter().map(|weight| weight.rows).sum();
    let engines = (out as f64 * record.effective_fraction).round() as usize;
    let note = match (&record.left_out, record.placement) {
        (Some(reason), _) => reason.clone(),
        (None, Placement::Primary) => match &record.eligibility.reason {
            Some(reason) => reason.clone(),
            None => "stays with the CPU by default".to_owned(),
        },
        (None, Placement::Whole) if record.eligibility.kind == troika_graph::Kind::SharedExpert && instances > 1 => {
            "whole; tiles go to the instances in turn".to_owned()
        }
        (None, Placement::Whole) => "whole".to_owned(),
        (None, Placement::Split(_)) => format!("split: {:.3}", record.effective_fraction),
    };
    let shape = format!("{out} x {}", weights.first().map_or(0, |weight| weight.cols));
    [record.eligibility.kind.name().to_owned(), shape, engines.to_string(), (out - engines).to_string(), note]
}
