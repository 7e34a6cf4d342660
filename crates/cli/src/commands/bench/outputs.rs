//! Where reports of a benchmark go: tried before anything is measured, and written whatever becomes of the others.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use troika_bench::record::Record;
use troika_bench::report;

use crate::report::{check_writable, print, write_json, write_record, write_whole};

/// Reports that can be made of a record at any time.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Pages {
    /// Write the report as Markdown.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write the report as one HTML page with plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the phases of requests as a trace for Chrome or Perfetto.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl Pages {
    /// Each flag, and where it writes.
    fn targets(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let all = [("--markdown", &self.markdown), ("--html", &self.html), ("--trace", &self.trace)];
        all.into_iter().filter_map(|(flag, path)| path.as_deref().map(|path| (flag, path)))
    }

    /// Writes them all; those that cannot be written are errors, which keep no other from being written.
    fn write(&self, record: &Record) -> Vec<anyhow::Error> {
        let markdown = |path: &PathBuf| write_whole(path, report::markdown::render(record).as_bytes());
        let html = |path: &PathBuf| write_whole(path, report::html::render(record)?.as_bytes());
        let trace = |path: &PathBuf| write_json(path, &report::trace::render(record));
        let written =
            [self.markdown.as_ref().map(markdown), self.html.as_ref().map(html), self.trace.as_ref().map(trace)];
        written.into_iter().flatten().filter_map(Result::err).collect()
    }

    /// The reports of a record that was measured before; the table goes to standard output.
    ///
    /// # Errors
    ///
    /// If two are to go to one file, or any cannot be written.
    pub(super) fn of_record(&self, record: &Record) -> Result<()> {
        check(self.targets())?;
        let mut errors = self.write(record);
        errors.extend(print_table(record).err());
        one_error(&errors)
    }
}

/// Reports, and the record they are made of.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Outputs {
    /// Write the record as JSON to FILE, or to standard output with `-`, then without the table.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    pages: Pages,
}

impl Outputs {
    /// Fails if anything cannot be written, so that hours of measuring are not lost to a folder that is not there.
    pub(super) fn check(&self) -> Result<()> {
        let json = self.json.as_deref().filter(|path| *path != Path::new("-")).map(|path| ("--json", path));
        check(json.into_iter().chain(self.pages.targets()))
    }

    /// Writes everything that was asked for.
    ///
    /// # Errors
    ///
    /// If any cannot be written; the others are.
    pub(super) fn write(&self, record: &Record) -> Result<()> {
        let mut errors = Vec::new();
        let to_stdout = self.json.as_deref() == Some(Path::new("-"));
        errors.extend(self.json.as_ref().and_then(|path| write_record(path, record).err()));
        errors.extend(self.pages.write(record));
        if !to_stdout {
            errors.extend(print_table(record).err());
        }
        one_error(&errors)
    }
}

fn print_table(record: &Record) -> Result<()> {
    print(&report::table::render(record, std::io::stdout().is_terminal()))
}

/// Fails if a file cannot be created, or two reports are to go to the same.
fn check<'a>(targets: impl Iterator<Item = (&'static str, &'a Path)>) -> Result<()> {
    let mut seen: Vec<(&str, PathBuf)> = Vec::new();
    for (flag, path) in targets {
        check_writable(flag, path)?;
        let place = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if let Some((other, _)) = seen.iter().find(|(_, other)| *other == place) {
            bail!("{other} and {flag} both name {}", path.display());
        }
        seen.push((flag, place));
    }
    Ok(())
}

/// All errors in one.
fn one_error(errors: &[anyhow::Error]) -> Result<()> {
    if errors.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = errors.iter().map(|error| format!("{error:#}")).collect();
    bail!("{}", lines.join("\n"))
}
