//! Using what `troika tune` found: a file that the user names, for the model, devices and build that it was found with.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use troika_base::NumericClass;
use troika_bench::record::Program;
use troika_bench::tune::file::{Key, Source, TuningFile};
use troika_device::cpu::CpuOptions;
use troika_engine::RunnerOptions;

use crate::hybrid::{HybridArgs, Wish};
use crate::model_source::{OpenModel, beside, hex};
use crate::plan_file::cpu_name;

/// In place of [`HybridArgs`] and the chunks in flight.
#[derive(Clone, Debug, Args)]
pub(crate) struct TuningArgs {
    /// Use engines as `troika tune` found it best; FILE is what it wrote, for this model, these devices and this program.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["npu", "hybrid", "tile", "tail", "place", "stack_inputs", "calibrate", "plan_dir", "wavefront"]
    )]
    tuning: Option<PathBuf>,
}

impl TuningArgs {
    /// Engines and chunks in flight: as the file says, or as they are given here if none is named.
    pub(crate) fn apply(
        &self,
        model: &OpenModel,
        options: &RunnerOptions,
        hybrid: &HybridArgs,
        wavefront: Option<usize>,
    ) -> Result<(HybridArgs, Option<usize>)> {
        let Some(path) = &self.tuning else { return Ok((hybrid.clone(), wavefront)) };
        let tuned = read(path)?;
        ensure!(
            options.class == NumericClass::Fast,
            "--tuning {}: engines go with class fast, not {}",
            path.display(),
            options.class
        );
        let (tile, tail, place) = match &tuned.settings {
            Some(settings) => (settings.tile, settings.tail, settings.place.clone()),
            None => (tuned.outcome.options.tile, 0, std::collections::BTreeMap::new()),
        };
        let found = HybridArgs::of(&tuned.npu, tile, tail, &place)
            .with_context(|| format!("{} cannot be used", path.display()))?;
        let wish = found.wish()?.engines()?;
        let differences = tuned.key.differences(&key(model, &wish, options.cpu)?);
        if !differences.is_empty() {
            bail!(
                "{} does not hold here ({}): run `troika tune` again, or do without --tuning",
                path.display(),
                differences.join("; ")
            );
        }
        match &tuned.settings {
            Some(settings) => {
                let path = path.display();
                tracing::info!(%path, gain = tuned.outcome.why, "engines take part as they were tuned");
                Ok((found.required_as(hybrid), Some(settings.wavefront)))
            }
            None => {
                tracing::info!(path = %path.display(), reason = tuned.outcome.why, "tuned: engines take no part");
                Ok((found.without_engines(), Some(1)))
            }
        }
    }
}

/// Reads a file that was measured. A prediction is refused.
pub(crate) fn read(path: &Path) -> Result<TuningFile> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = TuningFile::parse(&text).with_context(|| format!("{} is no tuning file", path.display()))?;
    ensure!(
        file.source == Source::Measured,
        "{} is a prediction for {}, not a measurement of this machine: `troika tune` without --simulate makes one",
        path.display(),
        file.subject
    );
    Ok(file)
}

/// What a tuning of `model` holds for, with `cpu` as it is without engines.
pub(crate) fn key(model: &OpenModel, wish: &Wish, cpu: CpuOptions) -> Result<Key> {
    let backend = &wish.backend;
    let program = std::env::current_exe().context("cannot find the program that runs")?;
    let program = Program::at(&program)?;
    Ok(Key {
        weights: hex(&model.digests()?[0]),
        engines: format!("{}, {}, {}", backend.name(), backend.description(), backend.version()),
        primary: format!("{}, {:?}", cpu_name(), cpu.level),
        threads: beside(cpu, wish).threads,
        build: format!("{} {} {}", program.version, program.build, &program.sha256[..16]),
    })
}
