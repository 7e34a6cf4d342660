//! `troika devices`: what could compute here, and what each can do.

use std::process::ExitCode;

use anyhow::Result;
use troika_device::cpu::CpuLevel;
use troika_device::npu::NpuBackend;
use troika_device::npu::soft::{Soft, SoftOptions};

use crate::report;

/// Show the devices of this machine that a model can run on, and what each can do.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut text = format!("cpu   {cores} cores, {:?}; computes every operation\n", CpuLevel::best());
    let soft = Soft::start(SoftOptions::default())?;
    let limits = soft.limits();
    text += &format!(
        "soft  a neural engine on cores of its own ({}, --npu soft:cores=N,instances=N); tiles are multiples of {} rows from \
         {} on, channels of {}; repeated bit by bit by the cpu\n",
        soft.description(),
        limits.tile_multiple,
        limits.min_tile,
        limits.channel_alignment
    );
    text += "No other kind of device is supported by this build.\n";
    report::print(&text)?;
    Ok(ExitCode::SUCCESS)
}
