//! The directory as a whole: what is in it, what of it is ours, what is damaged.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use crate::format::{HEADER_BYTES, Header, Kind, Name};

/// Files looked at when a store opens; whatever is beyond counts as foreign.
pub(crate) const MAX_FILES: usize = 200_000;
/// Folders inside the directory are looked into so deep.
const MAX_DEPTH: usize = 8;
pub(crate) const TEMPORARY: &str = "tmp-";
pub(crate) const DAMAGED: &str = "damaged";
pub(crate) const LOCK: &str = "lock";

/// A file that is whole as far as its header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    pub header: Header,
    pub file_bytes: u64,
}

/// Bytes and files under a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Rows and boundaries.
    pub files: u64,
    pub bytes: u64,
    /// Those found damaged and set aside.
    pub damaged_files: u64,
    pub damaged_bytes: u64,
    /// Half-written files of a process that was stopped.
    pub temporary_files: u64,
    pub temporary_bytes: u64,
    /// What is not ours.
    pub foreign_files: u64,
    pub foreign_bytes: u64,
}

impl Usage {
    /// Every byte under the directory.
    pub fn total_bytes(&self) -> u64 {
        self.bytes + self.damaged_bytes + self.temporary_bytes + self.foreign_bytes
    }
}

/// What a file is by its name.
enum Found {
    Ours(Name),
    Damaged,
    Temporary,
    Foreign,
}

fn classify(name: &str) -> Found {
    if name.starts_with(TEMPORARY) {
        Found::Temporary
    } else if name.ends_with(&format!(".{DAMAGED}")) {
        Found::Damaged
    } else {
        Name::parse(name).map_or(Found::Foreign, Found::Ours)
    }
}

/// Calls `each` for every file directly in `dir`, with its name and length; files in folders are foreign and counted by the
/// caller's `each` with an empty name.
fn walk(dir: &Path, each: &mut dyn FnMut(&str, u64)) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        // A file may go while we look.
        let Ok(metadata) = entry.metadata() else { continue };
        if metadata.is_dir() {
            each("", folder_bytes(&entry.path(), MAX_DEPTH));
        } else {
            each(&entry.file_name().to_string_lossy(), metadata.len());
        }
    }
    Ok(())
}

fn folder_bytes(dir: &Path, depth: usize) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() && depth > 0 => folder_bytes(&entry.path(), depth - 1),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// Counts every byte under `dir`.
///
/// # Errors
///
/// If the directory cannot be read.
pub fn usage(dir: &Path) -> io::Result<Usage> {
    let mut usage = Usage::default();
    walk(dir, &mut |name, bytes| {
        let (files, sum) = match classify(name) {
            Found::Ours(_) => (&mut usage.files, &mut usage.bytes),
            Found::Damaged => (&mut usage.damaged_files, &mut usage.damaged_bytes),
            Found::Temporary => (&mut usage.temporary_files, &mut usage.temporary_bytes),
            Found::Foreign => (&mut usage.foreign_files, &mut usage.foreign_bytes),
        };
        *files += 1;
        *sum += bytes;
    })?;
    Ok(usage)
}

/// Removes what a stopped process left half-written and what was found damaged before; reads the headers of the rest. Files
/// whose header is damaged are set aside; `quarantined` counts them.
pub(crate) fn scan(dir: &Path, quarantined: &mut u64) -> io::Result<Vec<Item>> {
    let (mut names, mut stale) = (Vec::new(), Vec::new());
    walk(dir, &mut |name, bytes| match classify(name) {
        Found::Ours(name) if names.len() < MAX_FILES => names.push((name, bytes)),
        Found::Damaged | Found::Temporary => stale.push(name.to_owned()),
        Found::Ours(_) | Found::Foreign => {}
    })?;
    for name in stale {
        fs::remove_file(dir.join(name))?;
    }
    let mut items = Vec::new();
    for (name, file_bytes) in names {
        let path = dir.join(name.to_string());
        let mut bytes = [0; HEADER_BYTES];
        let header = File::open(&path).and_then(|mut file| file.read_exact(&mut bytes));
        match header.map_err(|_| "the header cannot be read").and_then(|()| Header::decode(name, &bytes, file_bytes)) {
            Ok(header) => items.push(Item { header, file_bytes }),
            Err(reason) => {
                *quarantined += 1;
                set_aside(dir, name, reason);
            }
        }
    }
    // Parents before children, rows before boundaries.
    items.sort_by_key(|item| (item.header.depth, item.header.name.kind == Kind::Boundary, item.header.name.hash));
    Ok(items)
}

/// Takes a damaged file out of service.
pub(crate) fn set_aside(dir: &Path, name: Name, reason: &str) {
    tracing::warn!(file = %name, reason, "a stored block is damaged and set aside");
    let from = dir.join(name.to_string());
    if fs::rename(&from, dir.join(format!("{name}.{DAMAGED}"))).is_err() {
        // What cannot be renamed may at least not be read again.
        let _ = fs::remove_file(&from);
    }
}

/// Reads every file whole; returns how many are sound and the names of those that are not, with the reason.
///
/// # Errors
///
/// If the directory cannot be read.
pub fn verify(dir: &Path) -> io::Result<(u64, Vec<(Name, &'static str)>)> {
    let mut names = Vec::new();
    walk(dir, &mut |name, _| {
        if let Found::Ours(name) = classify(name) {
            names.push(name);
        }
    })?;
    names.sort_unstable();
    let (mut sound, mut damaged) = (0, Vec::new());
    for name in names {
        let checked = fs::read(dir.join(name.to_string()))
            .map_err(|_| "it cannot be read")
            .and_then(|file| Header::split(name, &file).map(|_| ()));
        match checked {
            Ok(()) => sound += 1,
            Err(reason) => damaged.push((name, reason)),
        }
    }
    Ok((sound, damaged))
}

/// Removes everything that is ours; returns the number of files.
///
/// # Errors
///
/// If a file cannot be removed.
pub fn clear(dir: &Path) -> io::Result<u64> {
    let mut ours = Vec::new();
    walk(dir, &mut |name, _| {
        if !matches!(classify(name), Found::Foreign) {
            ours.push(name.to_owned());
        }
    })?;
    for name in &ours {
        fs::remove_file(dir.join(name))?;
    }
    Ok(ours.len() as u64)
}
