//! `troika inspect`: what a checkpoint holds.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use troika_device::map_file;
use troika_model::inspect::inspect;

use crate::report;

/// Show what a checkpoint holds: configuration, layers, formats, sizes, drafter, and what is missing or too much.
///
/// Every problem is listed, not only the first. The exit code is 1 if the checkpoint cannot be served.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder of the checkpoint, or a single safetensors file beside its config.json.
    dir: PathBuf,
    /// Write the findings as JSON to FILE, or to standard output with `-`.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let inspection = inspect(&args.dir, &map_file)?;
    match &args.json {
        Some(target) => report::write_json(target, &inspection)?,
        None => report::print(&inspection.to_string())?,
    }
    Ok(if inspection.is_complete() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
