//! The directory as a whole: what is in it, what of it is ours, what is damaged.

use std::io;
use std::path::Path;

use crate::files::{FileSystem, Native};
use crate::format::{HEADER_BYTES, Header, Kind, Name};
use crate::store::{StoreError, io_error};

/// Files looked at when a store opens; whatever is beyond counts as foreign.
pub(crate) const MAX_FILES: usize = 200_000;
pub(crate) const TEMPORARY: &str = "tmp-";
pub(crate) const DAMAGED: &str = "damaged";
pub(crate) const LOCK: &str = "lock";
pub(crate) const CLOSED: &str = "troika-closed-classes";

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
    /// The list of closed classes.
    Closed,
    Foreign,
}

/// By the whole name: in a folder that was named by mistake, `tmp-letter` or `photo.damaged` are somebody's.
fn classify(name: Option<&str>) -> Found {
    let Some(name) = name else { return Found::Foreign };
    if name == CLOSED {
        return Found::Closed;
    }
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let temporary = name.strip_prefix(TEMPORARY).and_then(|rest| rest.split_once('-'));
    let damaged = name.strip_suffix(DAMAGED).and_then(|rest| Name::parse(rest.strip_suffix('.')?));
    match (temporary, damaged) {
        (Some((process, count)), _) if is_number(process) && is_number(count) => Found::Temporary,
        (_, Some(_)) => Found::Damaged,
        _ => Name::parse(name).map_or(Found::Foreign, Found::Ours),
    }
}

/// Counts every byte under `dir`.
///
/// # Errors
///
/// If the directory cannot be read.
pub fn usage(dir: &Path) -> io::Result<Usage> {
    let mut usage = Usage::default();
    // The lock is ours too, and empty.
    for entry in Native.list(dir)?.into_iter().filter(|entry| entry.name.as_deref() != Some(LOCK) || entry.bytes > 0) {
        let (files, sum) = match classify(entry.name.as_deref()) {
            Found::Ours(_) | Found::Closed => (&mut usage.files, &mut usage.bytes),
            Found::Damaged => (&mut usage.damaged_files, &mut usage.damaged_bytes),
            Found::Temporary => (&mut usage.temporary_files, &mut usage.temporary_bytes),
            Found::Foreign => (&mut usage.foreign_files, &mut usage.foreign_bytes),
        };
        *files += 1;
        *sum += entry.bytes;
    }
    Ok(usage)
}

/// Removes what a stopped process left half-written and what was found damaged before; reads the headers of the rest. Files
/// whose header is damaged are set aside; `quarantined` counts them.
pub(crate) fn scan(files: &dyn FileSystem, dir: &Path, quarantined: &mut u64) -> io::Result<Vec<Item>> {
    let (mut names, mut stale) = (Vec::new(), Vec::new());
    for entry in files.list(dir)? {
        match classify(entry.name.as_deref()) {
            Found::Ours(name) if names.len() < MAX_FILES => names.push((name, entry.bytes)),
            Found::Damaged | Found::Temporary => stale.extend(entry.name),
            Found::Ours(_) | Found::Closed | Found::Foreign => {}
        }
    }
    for name in stale {
        files.remove(&dir.join(name))?;
    }
    let mut items = Vec::new();
    for (name, file_bytes) in names {
        let header = files.read(&dir.join(name.to_string()), HEADER_BYTES as u64);
        match header.map_err(|_| "the header cannot be read").and_then(|bytes| Header::decode(name, &bytes, file_bytes))
        {
            Ok(header) => items.push(Item { header, file_bytes }),
            Err(reason) => {
                *quarantined += 1;
                set_aside(files, dir, name, reason);
            }
        }
    }
    // Parents before children, rows before boundaries.
    items.sort_by_key(|item| (item.header.depth, item.header.name.kind == Kind::Boundary, item.header.name.hash));
    Ok(items)
}

/// Takes a damaged file out of service.
pub(crate) fn set_aside(files: &dyn FileSystem, dir: &Path, name: Name, reason: &str) {
    tracing::warn!(file = %name, reason, "a stored block is damaged and set aside");
    let from = dir.join(name.to_string());
    if files.rename(&from, &dir.join(format!("{name}.{DAMAGED}"))).is_err() {
        // What cannot be renamed may at least not be read again.
        let _ = files.remove(&from);
    }
}

/// Reads every file whole; returns how many are sound and the names of those that are not, with the reason.
///
/// # Errors
///
/// If the directory cannot be read.
pub fn verify(dir: &Path) -> io::Result<(u64, Vec<(Name, &'static str)>)> {
    let entries = Native.list(dir)?.into_iter();
    let mut names: Vec<Name> = entries.filter_map(|entry| Name::parse(&entry.name?)).collect();
    names.sort_unstable();
    let (mut sound, mut damaged) = (0, Vec::new());
    for name in names {
        let checked = Native
            .read(&dir.join(name.to_string()), u64::MAX)
            .map_err(|_| "it cannot be read")
            .and_then(|file| Header::split(name, &file).map(|_| ()));
        match checked {
            Ok(()) => sound += 1,
            Err(reason) => damaged.push((name, reason)),
        }
    }
    Ok((sound, damaged))
}

/// Removes everything that is ours, closed classes included, of which nothing is left then; returns the number of files.
///
/// # Errors
///
/// If a process has the directory open, or a file cannot be removed.
pub fn clear(dir: &Path) -> Result<u64, StoreError> {
    let path = dir.join(LOCK);
    // Where there is no such file no store was ever open, and none is made.
    let _held = if path.exists() {
        let lock = Native.lock(&path).map_err(io_error("lock", &path))?;
        Some(lock.ok_or_else(|| StoreError::InUse { dir: dir.to_owned() })?)
    } else {
        None
    };
    let entries = Native.list(dir).map_err(io_error("read", dir))?.into_iter();
    let ours = entries.filter(|entry| !matches!(classify(entry.name.as_deref()), Found::Foreign));
    let ours: Vec<String> = ours.filter_map(|entry| entry.name).collect();
    for path in ours.iter().map(|name| dir.join(name)) {
        Native.remove(&path).map_err(io_error("remove", &path))?;
    }
    Ok(ours.len() as u64)
}
