//! Every byte under the directory: counted by listing it, and between two listings by what the store does itself.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::directory::Item;
use crate::files::Entry;
use crate::format::Name;

/// The directory is not listed again before so many times as long as that took have passed: a twentieth of the writer's
/// time at most, however many files there are.
const SHARE: u32 = 20;

/// Ours by name, and the sum of the rest.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    files: BTreeMap<Name, u64>,
    kept_bytes: u64,
    foreign_bytes: u64,
    /// Since when the sums are those of a listing, and how long it took; `None` if something went wrong since.
    listed: Option<(Instant, Duration)>,
}

impl Accounts {
    pub(crate) fn new(items: &[Item]) -> Self {
        let files = items.iter().map(|item| (item.header.name, item.file_bytes)).collect();
        Self { files, ..Self::default() }
    }

    /// Bytes of everything.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.kept_bytes.saturating_add(self.foreign_bytes)
    }

    /// Bytes of what the store has neither taken up nor written.
    pub(crate) fn foreign_bytes(&self) -> u64 {
        self.foreign_bytes
    }

    /// Whether the directory is to be listed before anything is written.
    pub(crate) fn is_due(&self) -> bool {
        self.listed.is_none_or(|(since, took)| since.elapsed() >= took * SHARE)
    }

    /// What is there, by a listing that began at `start`.
    pub(crate) fn take_listing(&mut self, entries: &[Entry], start: Instant) {
        let bytes_of = |entry: &Entry| Some((Name::parse(entry.name.as_deref()?)?, entry.bytes));
        let known = entries.iter().filter_map(bytes_of).filter(|(name, _)| self.files.contains_key(name));
        self.files = known.collect();
        self.kept_bytes = self.files.values().sum();
        let all: u64 = entries.iter().map(|entry| entry.bytes).sum();
        self.foreign_bytes = all.saturating_sub(self.kept_bytes);
        self.listed = Some((Instant::now(), start.elapsed()));
    }

    pub(crate) fn written(&mut self, name: Name, bytes: u64) {
        self.removed(name);
        self.files.insert(name, bytes);
        self.kept_bytes += bytes;
    }

    /// True if it was there.
    pub(crate) fn removed(&mut self, name: Name) -> bool {
        let bytes = self.files.remove(&name);
        self.kept_bytes -= bytes.unwrap_or(0);
        bytes.is_some()
    }

    /// The file is there under another name.
    pub(crate) fn set_aside(&mut self, name: Name, bytes: u64) {
        self.removed(name);
        self.foreign_bytes += bytes;
    }

    /// Something failed half-way: what is there shows at the next listing.
    pub(crate) fn distrust(&mut self) {
        self.listed = None;
    }
}
