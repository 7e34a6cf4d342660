//! Tuning on this machine: what projections cost from the engines' calibration, everything else from server processes.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use troika_base::NumericClass;
use troika_bench::arm::Geometry;
use troika_bench::corpus::Corpus;
use troika_bench::tune::file::{Source, TuningFile};
use troika_bench::tune::journal::Journaled;
use troika_bench::tune::search::{Options, Progress, tune as search};
use troika_bench::tune::served::{Served, Setup};
use troika_bench::tune::width::Point;
use troika_bench::tune::{KindFacts, Probe};
use troika_device::npu::Limits;
use troika_engine::{Calibration, CostTable, OperationCost, Record};

use super::Args;
use crate::commands::bench::{stop_flag, subject};
use crate::hybrid::{HybridArgs, name_of};
use crate::model_source::{ModelArgs, beside};
use crate::tuning;

pub(super) fn tune(
    args: &Args,
    npu: &str,
    geometry: Geometry,
    options: &Options,
    tell: &mut dyn FnMut(&Progress),
) -> Result<TuningFile> {
    let subject = subject::open(args.model.clone(), NumericClass::Fast, Corpus::CodePython)?;
    let longest = (options.tiles + 1) * geometry.tile;
    let (most, name) = (subject.max_context_tokens, &subject.facts.name);
    ensure!(
        longest <= most,
        "--tiles {}: {longest} tokens do not fit the context of {name}, which is {most}",
        options.tiles
    );
    // Three prompts of the verification, each at a place of its own.
    subject.tokens.prompt(3, longest).with_context(|| format!("--tiles {}", options.tiles))?;
    let mut model_args = ModelArgs::of(args.model.clone(), NumericClass::Fast);
    model_args.threads = args.threads;
    let model = model_args.open()?;
    let hybrid = HybridArgs::of(npu, geometry.tile, 0, &BTreeMap::new()).context("--npu")?;
    ensure!(!hybrid.is_simulated(), "--npu sim cannot be tuned for: no time with it is an engine's; use --simulate");
    let wish = hybrid.wish()?.engines()?;
    let cpu_alone = model_args.runner_options(NumericClass::Fast).cpu;
    let cpu = beside(cpu_alone, &wish);
    let (backend, tile, stack_inputs) = (&wish.backend, geometry.tile, wish.options.stack_inputs);
    let calibration = Calibration { backend, tile, stack_inputs, cpu, cpu_alone };
    let table = model.measure_engines(&calibration, args.plan_dir.as_deref(), args.calibrate)?;
    let kinds = kinds(&table, &model.plan_engines(&wish), wish.backend.limits());
    let key = tuning::key(&model, &wish, cpu_alone)?;
    let stop = stop_flag()?;
    let served = Served::new(
        Setup {
            program: std::env::current_exe().context("cannot find the program that runs")?,
            model: subject.facts.args,
            npu: npu.to_owned(),
            geometry,
            threads: [cpu_alone.threads, cpu.threads],
            tokens: subject.tokens,
            kinds,
        },
        stop,
    );
    // Engines of this process would take memory and threads from those that are measured.
    drop(wish);
    let mut journal = args.output.out.clone().into_os_string();
    journal.push(".journal");
    let written = std::fs::metadata(&journal).and_then(|metadata| metadata.modified()).ok();
    let held = json!({"for": &key, "npu": npu, "tile": geometry.tile, "chunk": geometry.stock_step});
    let mut rig = Journaled::open(served, journal.as_ref(), &held)
        .context("the journal of an earlier run cannot be continued: remove it, or name another --out")?;
    if rig.num_known() > 0 {
        tracing::info!(answers = rig.num_known(), "going on with the run that was begun");
    }
    let outcome = search(&mut rig, options, tell)?;
    let mut created_unix_s = super::now_unix_s();
    if rig.num_asked() == 0 {
        let journal = journal.display();
        tracing::warn!(
            "nothing was measured: an earlier run left every answer in {journal}; remove it to measure again"
        );
        let since = written.and_then(|written| written.duration_since(std::time::UNIX_EPOCH).ok());
        created_unix_s = since.map_or(created_unix_s, |since| since.as_secs());
    }
    Ok(TuningFile::new(Source::Measured, created_unix_s, subject.facts.name, key, npu, outcome))
}

/// Kinds by their names on the command line, and what an operation of each costs: means over their shapes and layers.
fn kinds(table: &CostTable, records: &[Record], limits: &Limits) -> Vec<(KindFacts, Probe)> {
    let mut by_name: BTreeMap<&'static str, Vec<&OperationCost>> = BTreeMap::new();
    for cost in &table.operations {
        let record = records.iter().find(|record| record.eligibility.kind.name() == cost.kind);
        if let Some(name) = record.and_then(|record| name_of(record.eligibility.kind)) {
            by_name.entry(name).or_default().push(cost);
        }
    }
    let kind = |(name, costs): (&'static str, Vec<&OperationCost>)| {
        let layers: usize = costs.iter().map(|cost| cost.layers).sum();
        let mean = |of: &dyn Fn(&OperationCost) -> Option<f64>| -> Option<f64> {
            let sum: Option<f64> = costs.iter().map(|cost| Some(of(cost)? * cost.layers as f64)).sum();
            Some(sum? / layers as f64)
        };
        let point = |of: &dyn Fn(&OperationCost) -> Option<(f64, f64)>| {
            Some(Point { fraction: mean(&|cost| Some(of(cost)?.0))?, ms: mean(&|cost| Some(of(cost)?.1))? })
        };
        let engine = |index: usize| point(&|cost| cost.engine.get(index).map(|point| (point.fraction, point.ms)));
        let whole_ms = mean(&|cost| cost.whole_ms);
        let primary_part = point(&|cost| cost.primary_part.map(|part| (part.fraction, part.ms)));
        let facts = KindFacts {
            name: name.to_owned(),
            layers,
            step: primary_part.and_then(|_| step(records, name, limits)),
            cpu_step: None,
            can_be_whole: whole_ms.is_some(),
            parts: Vec::new(),
        };
        let probe = Probe {
            primary_ms: mean(&|cost| Some(cost.primary_ms)).expect("every operation has one"),
            primary_part,
            engine: (0..).map_while(engine).collect(),
            cpu: Vec::new(),
            // Parts are written where they belong.
            merge_ms: 0.0,
            whole_ms,
            refused: costs.iter().find_map(|cost| cost.error?.refusal()),
        };
        (facts, probe)
    };
    by_name.into_iter().map(kind).collect()
}

/// The least change of a fraction: of the weight that is cut most coarsely.
fn step(records: &[Record], name: &str, limits: &Limits) -> Option<f64> {
    let of_kind = records.iter().filter(|record| name_of(record.eligibility.kind) == Some(name));
    let cuts = of_kind.flat_map(|record| {
        let groups = record.eligibility.groups;
        record.eligibility.weights.iter().map(move |weight| weight.rows / groups)
    });
    // The primary device computes eight channels at a time.
    let channels = limits.channel_alignment.next_multiple_of(8) * limits.instances;
    cuts.min().map(|least| channels as f64 / least as f64)
}
