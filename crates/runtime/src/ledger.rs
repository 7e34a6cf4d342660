//! What was really done, counted where work is submitted and where it completes, and nowhere else.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use troika_graph::Kind;

use crate::plan::DeviceId;

/// Counts of one kind of node on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Nodes handed to the device.
    pub submitted: u64,
    /// Nodes it reported as done.
    pub completed: u64,
    /// Nodes it reported as failed.
    pub failed: u64,
    /// Rows of the completed nodes.
    pub rows: u64,
    /// Time on the device, nanoseconds.
    pub busy_ns: u64,
    /// The longest of them, nanoseconds.
    pub longest_ns: u64,
}

impl AddAssign for Entry {
    fn add_assign(&mut self, other: Self) {
        self.submitted += other.submitted;
        self.completed += other.completed;
        self.failed += other.failed;
        self.rows += other.rows;
        self.busy_ns += other.busy_ns;
        self.longest_ns = self.longest_ns.max(other.longest_ns);
    }
}

/// Counts by kind and device, of a step or of many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    entries: BTreeMap<(Kind, DeviceId), Entry>,
}

impl Ledger {
    /// Counts of each kind on each device.
    pub fn entries(&self) -> impl Iterator<Item = (Kind, DeviceId, Entry)> + '_ {
        self.entries.iter().map(|((kind, device), entry)| (*kind, *device, *entry))
    }

    /// Counts of one kind on one device.
    pub fn entry(&self, kind: Kind, device: DeviceId) -> Entry {
        self.entries.get(&(kind, device)).copied().unwrap_or_default()
    }

    /// Sum over everything.
    pub fn total(&self) -> Entry {
        let mut total = Entry::default();
        self.entries.values().for_each(|entry| total += *entry);
        total
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (key, entry) in &other.entries {
            *self.entries.entry(*key).or_default() += *entry;
        }
    }

    /// Counts of one step.
    pub(crate) fn of(counters: &[(Kind, DeviceId)], entries: &[Entry]) -> Self {
        Self { entries: counters.iter().copied().zip(entries.iter().copied()).collect() }
    }
}
