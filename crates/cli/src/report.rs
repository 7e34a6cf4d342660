//! Reports for scripts (JSON to a file or standard output), and facts about this process.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// Writes `report` as JSON to `target`, where `-` is standard output.
pub(crate) fn write_json(target: &Path, report: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    if target == Path::new("-") {
        std::io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")
    } else {
        write_whole(target, text.as_bytes())
    }
}

/// Writes a file under a temporary name and renames it, so that nobody ever sees half of it.
pub(crate) fn write_whole(target: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = target.file_name().with_context(|| format!("{} is not a file name", target.display()))?.to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = target.with_file_name(name);
    let written = fs::File::create(&part)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&part, target));
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&part);
    }
    written.with_context(|| format!("cannot write {}", target.display()))
}

/// Most memory this process ever had resident, where the system tells.
pub(crate) fn peak_memory_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Median of `values`; `None` of none.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// Writes `text` to standard output.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to standard output")
}
