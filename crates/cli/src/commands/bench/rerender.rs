//! `troika bench report`: a record once more, in any form.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use super::compare::read;
use super::matrix::{Outputs, print_table};

/// Make reports of a record that `troika bench --json` wrote. Nothing is measured.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The record.
    record: PathBuf,
    #[command(flatten)]
    outputs: Outputs,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    args.outputs.check()?;
    let record = read(&args.record)?;
    print_table(&record)?;
    args.outputs.write(&record)?;
    Ok(ExitCode::SUCCESS)
}
