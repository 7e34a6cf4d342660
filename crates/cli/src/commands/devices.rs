//! `troika devices`: what could compute here, and what each can do.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use troika_base::units::human_bytes;
use troika_device::cpu::CpuLevel;
use troika_device::npu::NpuBackend;
use troika_device::npu::cache::contents;

use crate::hybrid::{NpuSpec, program_dir};
use crate::report;

/// Show the devices of this machine that a model can run on, and what each can do.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A neural engine with settings, as for the commands that use it: whether it can be had, or why not. Without it, `soft`
    /// and `ort` as they are by default.
    #[arg(long, value_name = "ENGINE")]
    npu: Option<NpuSpec>,
    /// Folder of what engines have compiled, as for the commands that use them.
    #[arg(long, value_name = "DIR")]
    plan_dir: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut text = format!("cpu   {cores} cores, {:?}; computes every operation\n", CpuLevel::best());
    let usual = || ["soft", "ort"].map(|name| name.parse().expect("a name alone is right")).to_vec();
    for spec in args.npu.clone().map_or_else(usual, |spec| vec![spec]) {
        let name = spec.name();
        text += &match spec.start(None) {
            Ok((engine, _)) => format!("{name:<6}{}\n", describe(&*engine)),
            Err(error) => format!("{name:<6}unavailable: {error}\n"),
        };
    }
    if let Some(dir) = program_dir(args.plan_dir.as_deref()) {
        let (programs, bytes) = contents(&dir);
        text +=
            &format!("{programs} programs that engines have compiled, {}, in {}\n", human_bytes(bytes), dir.display());
    }
    text += "No other kind of device is supported by this build.\n";
    report::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn describe(engine: &dyn NpuBackend) -> String {
    let limits = engine.limits();
    let repeated = match limits.repeatable {
        true => "repeated bit by bit by the cpu",
        false => "not repeated bit by bit by the cpu, so prompts computed with it are not kept for others",
    };
    format!(
        "a neural engine: {}; tiles are multiples of {} rows from {} on, channels of {}; {repeated}",
        engine.description(),
        limits.tile_multiple,
        limits.min_tile,
        limits.channel_alignment
    )
}
