//! Reports for scripts (JSON to a file or standard output), and facts about this process.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
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

/// As [`write_json`], of what took long to measure: if it cannot be written where it should go, it is left in the folder for
/// temporary files, and the error says where.
pub(crate) fn write_record(target: &Path, record: &impl Serialize) -> Result<()> {
    write_json(target, record).map_err(|error| {
        let path = std::env::temp_dir().join(format!("troika-record-{}.json", std::process::id()));
        match write_json(&path, record) {
            Ok(()) => error.context(format!("the record is in {} instead", path.display())),
            Err(second) => error.context(format!("the record is lost: {second:#}")),
        }
    })
}

/// Whether `target` can be written, before the work whose result is to go there: nothing of it is there afterwards that was
/// not before.
pub(crate) fn check_writable(target: &Path) -> Result<()> {
    if target == Path::new("-") {
        return Ok(());
    }
    ensure!(!target.is_dir(), "cannot write {}: it is a folder", target.display());
    // Who reads a pipe would take it for the end.
    if target.exists() && !target.is_file() { Ok(()) } else { WholeFile::create(target).map(drop) }
}

/// Writes a file so that nobody ever sees half of it.
pub(crate) fn write_whole(target: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = WholeFile::create(target)?;
    file.write(bytes)?;
    file.finish()
}

/// A file that appears under its name when it is finished, and not at all if it never is. What exists and is no ordinary
/// file (a pipe, a device) is written to as it is.
pub(crate) struct WholeFile {
    target: PathBuf,
    /// Where it is written until it is finished; `None` for what cannot be replaced.
    part: Option<PathBuf>,
    /// `None` once it is finished.
    file: Option<BufWriter<fs::File>>,
}

impl WholeFile {
    pub(crate) fn create(target: &Path) -> Result<Self> {
        let cannot = || format!("cannot write {}", target.display());
        // The file that a link leads to is what is replaced, not the link.
        let place = target.canonicalize().unwrap_or_else(|_| target.to_owned());
        if place.metadata().is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir()) {
            let file = fs::OpenOptions::new().write(true).open(&place).with_context(cannot)?;
            return Ok(Self { target: place, part: None, file: Some(BufWriter::new(file)) });
        }
        let mut name =
            place.file_name().with_context(|| format!("{} is not a file name", target.display()))?.to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let part = place.with_file_name(name);
        let file = fs::File::create(&part).with_context(cannot)?;
        Ok(Self { target: place, part: Some(part), file: Some(BufWriter::new(file)) })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let file = self.file.as_mut().expect("only `finish` takes it, and the file with it");
        file.write_all(bytes).with_context(|| format!("cannot write {}", self.target.display()))
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        let file = self.file.take().expect("it is finished once");
        let flushed = file.into_inner().map_err(std::io::IntoInnerError::into_error);
        let written = flushed.and_then(|file| match &self.part {
            None => Ok(()),
            Some(part) => file.sync_all().and_then(|()| fs::rename(part, &self.target)),
        });
        if written.is_err() {
            self.remove();
        }
        written.with_context(|| format!("cannot write {}", self.target.display()))
    }

    fn remove(&self) {
        // Whatever went wrong before is what the user should hear of.
        let _ = self.part.as_ref().map(fs::remove_file);
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            self.remove();
        }
    }
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

// There is a device that is always full.
#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_a_full_disk() {
        let error = format!("{:#}", write_record(Path::new("/dev/full"), &[1, 2]).expect_err("the device is full"));
        let (_, rest) = error.split_once("the record is in ").expect(&error);
        let (path, rest) = rest.split_once(" instead: ").expect(&error);
        assert!(rest.starts_with("cannot write /dev/full"), "{error}");
        let record: Vec<u32> = serde_json::from_str(&fs::read_to_string(path).expect("written")).expect("JSON");
        fs::remove_file(path).expect("it is there");
        assert_eq!(record, [1, 2]);
    }
}
