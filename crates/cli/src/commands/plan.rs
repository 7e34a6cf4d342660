//! `troika plan`: what neural engines would do of a model, and what is expected of it.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use troika_base::NumericClass;
use troika_base::units::human_bytes;
use troika_engine::{Choice, EngineBytes, Placement, Record, foresee_engines};

use crate::hybrid::{HybridArgs, WavefrontArgs};
use crate::memory::MemoryArgs;
use crate::model_source::ModelArgs;
use crate::report;

/// Show which projections neural engines would take part in, with how many channels and bytes, and why not in others.
///
/// The table comes from the shapes and formats of the stored tensors; what they cost is measured on one projection of each
/// kind and in the model's first layers, unless an earlier start did that.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    hybrid: HybridArgs,
    #[command(flatten)]
    wavefront: WavefrontArgs,
    #[command(flatten)]
    memory: MemoryArgs,
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
    let mut wish = args.hybrid.wish()?.engines()?;
    let model = args.model.open()?;
    let options = args.model.runner_options(NumericClass::Fast);
    let choice = model.expect_of_engines(&args.hybrid, &mut wish, &options, args.wavefront.steps())?;
    wish.options.memory_bytes = args.memory.of_engines();
    let records = model.plan_engines(&wish);
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
    let EngineBytes { weights, banks, surfaces } = foresee_engines(&records, &*wish.backend, tile);
    let [weights, banks, surfaces] = [weights, banks, surfaces].map(human_bytes);
    text += &format!(
        "\nin memory: {weights} of weights, {banks} of programs that are copies of them, {surfaces} of surfaces\n"
    );
    text += &choice.map_or_else(
        || "\nnothing was measured: all placements were said\n".to_owned(),
        |choice| expectation(&choice, wish.options.tail_threshold),
    );
    report::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// What was measured and what is predicted of it, milliseconds of one tile.
fn expectation(choice: &Choice, tail_threshold: usize) -> String {
    let mut text = format!(
        "\nmilliseconds of a tile, all layers\n{:<22}{:>8}{:>18}{:>10}{:>10}{:>10}{:>10}  {}\n",
        "projection", "layers", "out x in", "cpu", "engines", "both", "expected", "placement"
    );
    let ms = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.2}"));
    for ((kind, [out, cols]), choice) in &choice.operations {
        let placement = match choice.placement {
            Placement::Primary => choice.refused.clone().unwrap_or_else(|| "cpu".to_owned()),
            Placement::Whole => "engines".to_owned(),
            Placement::Split(fraction) => format!("both, {:.1} % on engines", fraction * 100.0),
        };
        text += &format!(
            "{:<22}{:>8}{:>18}{:>10.2}{:>10}{:>10}{:>10.2}  {placement}\n",
            kind.name(),
            choice.layers,
            format!("{out} x {cols}"),
            choice.primary_ms,
            ms(choice.whole_ms),
            ms(choice.split_ms),
            choice.expected_ms
        );
    }
    let tail = match tail_threshold {
        0 => "remainders go to the CPU".to_owned(),
        threshold => format!("remainders of at least {threshold} tokens fill up a tile"),
    };
    let verdict = match choice.pays() {
        true => "engines make it shorter",
        false if !choice.places_any() => "engines do not make it shorter, whatever they do",
        false => "engines do not make it shorter",
    };
    let Choice { hybrid_ms, primary_busy_ms, engines_busy_ms, alone_ms, primary_ms, ideal_ms, wavefront, .. } = choice;
    text += &format!(
        "\npredicted of a whole tile, {wavefront} in flight: {hybrid_ms:.1} ms with engines, {alone_ms:.1} ms on the CPU \
         alone: {verdict}; {tail}\n"
    );
    text += &format!(
        "of that the CPU computes {primary_busy_ms:.1} ms and the engines {engines_busy_ms:.1} ms; the CPU with the threads that \
         it has beside them would take {primary_ms:.1} ms\n"
    );
    text + &format!(
        "ideal: {ideal_ms:.1} ms, if any part of any projection could be on either, nobody waited and nobody were in \
         another's way\n"
    )
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
            None => "stays with the CPU".to_owned(),
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
