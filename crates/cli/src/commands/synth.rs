//! `troika synth`: random-weight checkpoints of real shapes.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser;
use troika_base::units::human_bytes;
use troika_model::synth::{Preset, synth};

use crate::progress;

/// Write a random-weight checkpoint of real layer shapes, for speed and memory work.
///
/// The official layout: fp4 experts, fp8 projections, bf16 and f32 for the rest. The model says nothing sensible.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Sizes: mini (374 M parameters, 0.3 GB), true2 (two layers of V4-Flash, 7.3 GB), flash-slice (four layers with 32
    /// experts, 2.5 GB).
    #[arg(long, value_parser = PossibleValuesParser::new(Preset::ALL.map(Preset::name)).map(preset))]
    preset: Preset,
    /// Folder to write; must not exist or be empty.
    out: PathBuf,
    /// The same seed gives the same bytes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn preset(name: String) -> Preset {
    Preset::ALL.into_iter().find(|preset| preset.name() == name).expect("clap has checked the name")
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let bar = progress::bytes("writing", 0);
    let written = synth(args.preset, &args.out, args.seed, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    eprintln!("{}: {} tensors, {}", args.out.display(), written.num_tensors, human_bytes(written.num_bytes));
    Ok(ExitCode::SUCCESS)
}
