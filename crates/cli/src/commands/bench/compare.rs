//! `troika bench compare`: two records side by side.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use troika_bench::compare::Comparison;
use troika_bench::record::Record;

use crate::report::print;

/// Compare two records of `troika bench --json`, across commits or machines.
///
/// Only prompts of the same token ids are compared, and arm C only if it is hybrid in both. Records are never measured in
/// turn, so a small difference may be the machine's.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The earlier one.
    first: PathBuf,
    /// The later one.
    second: PathBuf,
    /// Print Markdown.
    #[arg(long)]
    markdown: bool,
    /// Fail if any rate of the second is lower, or none could be compared.
    #[arg(long)]
    fail_if_slower: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let comparison = Comparison::of(&read(&args.first)?, &read(&args.second)?);
    print(&if args.markdown { comparison.markdown() } else { comparison.table() })?;
    if args.fail_if_slower && comparison.is_empty() {
        bail!("--fail-if-slower: nothing of {} could be compared", args.second.display());
    }
    if args.fail_if_slower && comparison.any_slower {
        bail!("--fail-if-slower: {} is slower in some rate", args.second.display());
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn read(path: &Path) -> Result<Record> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Record::parse(&text).with_context(|| path.display().to_string())
}
