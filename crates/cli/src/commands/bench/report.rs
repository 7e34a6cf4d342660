//! `troika bench report`: reports of a record that was measured before.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use troika_bench::record::Record;

use super::outputs::Pages;

/// Make reports of a record of `troika bench --json`, without measuring anything.
///
/// The table is printed; pages are written where the flags say.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The record.
    record: PathBuf,
    #[command(flatten)]
    pages: Pages,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    args.pages.of_record(&read(&args.record)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Reads a record that `troika bench --json` wrote.
pub(super) fn read(path: &Path) -> Result<Record> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Record::parse(&text).with_context(|| path.display().to_string())
}
