//! What was really done, counted where work is submitted and where it completes, and nowhere else.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use troika_graph::Kind;

use crate::plan::DeviceId;

/// Counts of one kind of node on one device. Of a node that several devices share, each part counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Nodes and parts handed to the device.
    pub submitted: u64,
    /// Those it reported as done.
    pub completed: u64,
    /// Those it reported as failed.
    pub failed: u64,
    /// Rows of the completed ones.
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

/// Why rows of prefill width that a plan gives to an engine were computed by the primary device alone (section 8 of the
/// hybrid spec).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fallback {
    /// Fewer rows than a tile, and too few to be worth a padded one.
    RowsBelowTailThreshold,
    /// The step is narrower than a tile so that streams beside it get their tokens in time.
    Contention,
    /// The step is narrower than a tile since memory is short, or since the user wants it so.
    Throttle,
    /// The step goes from where a kept prefix ends to the next edge of a chunk, and that is less than a tile.
    SuffixAfterHit,
    /// The projection failed on an engine before.
    Latched,
    /// Its banks were given up because memory was short.
    Memory,
    /// An engine's numbers were wrong.
    Quarantined,
    /// The step ended before the operation was handed over.
    Cancelled,
}

impl Fallback {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::RowsBelowTailThreshold => "rows_below_tail_threshold",
            Self::Contention => "contention",
            Self::Throttle => "throttle",
            Self::SuffixAfterHit => "suffix_after_hit",
            Self::Latched => "latched",
            Self::Memory => "memory",
            Self::Quarantined => "quarantined",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Counts of the operations of one kind that a plan gives to engines: an operation is one projection on one tile of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// What the plan wants, by the rows of the steps.
    pub planned: u64,
    /// Handed over with a full tile.
    pub exact: u64,
    /// Handed over with a tile that rows of zeros fill up.
    pub padded: u64,
    /// All parts are in, those that the primary device had to repeat included.
    pub merged: u64,
    /// Handed over, and given up with their step.
    pub cancelled: u64,
    /// Nodes with rows that the primary device computed alone, by reason.
    pub fallbacks: BTreeMap<Fallback, u64>,
    /// Nodes of decode steps, which no plan gives to engines.
    pub bypass_decode: u64,
    /// Nodes of steps that verify drafts.
    pub bypass_verify: u64,
    /// Parts that failed on an engine.
    pub runtime_failures: u64,
    /// Rows of the operations.
    pub logical_rows: u64,
    /// Rows of zeros beside them.
    pub padded_rows: u64,
    /// Parts of engines of which the primary device has repeated some rows to compare them.
    pub checks: u64,
    /// Those that were not what they should have been.
    pub failed_checks: u64,
    /// Time that the primary device took for that, nanoseconds.
    pub check_ns: u64,
    /// Time that a node's inputs took after the shared node before it was done, or the step began, nanoseconds: mostly what
    /// comes before it in the step.
    pub input_ready_ns: u64,
    /// Time from the first hand-over of a node to its last part, nanoseconds.
    pub region_ns: u64,
    /// What of that the device that worked longest did not work, nanoseconds: hand-over, and waiting for other work of it.
    pub gap_ns: u64,
    /// Nodes whose last part came from each device.
    pub last: BTreeMap<DeviceId, u64>,
}

impl Operations {
    /// Handed over to engines.
    pub fn dispatched(&self) -> u64 {
        self.exact + self.padded
    }

    /// The reason of most fallbacks.
    pub fn main_fallback(&self) -> Option<Fallback> {
        self.fallbacks.iter().max_by_key(|(_, count)| **count).map(|(reason, _)| *reason)
    }

    /// The reason for most of what was planned and not handed over, if anything was not.
    pub fn why_missing(&self) -> Option<Fallback> {
        let missing = [Fallback::Latched, Fallback::Memory, Fallback::Quarantined, Fallback::Cancelled];
        let counts = self.fallbacks.iter().filter(|(reason, _)| missing.contains(reason));
        counts.max_by_key(|(_, count)| **count).map(|(reason, _)| *reason).filter(|_| self.dispatched() < self.planned)
    }

    fn add(&mut self, other: &Self) {
        self.planned += other.planned;
        self.exact += other.exact;
        self.padded += other.padded;
        self.merged += other.merged;
        self.cancelled += other.cancelled;
        self.bypass_decode += other.bypass_decode;
        self.bypass_verify += other.bypass_verify;
        self.runtime_failures += other.runtime_failures;
        self.logical_rows += other.logical_rows;
        self.padded_rows += other.padded_rows;
        self.checks += other.checks;
        self.failed_checks += other.failed_checks;
        self.check_ns += other.check_ns;
        self.input_ready_ns += other.input_ready_ns;
        self.region_ns += other.region_ns;
        self.gap_ns += other.gap_ns;
        other.fallbacks.iter().for_each(|(reason, count)| *self.fallbacks.entry(*reason).or_default() += count);
        other.last.iter().for_each(|(device, count)| *self.last.entry(*device).or_default() += count);
    }
}

/// Counts by kind and device, of a step or of many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    entries: BTreeMap<(Kind, DeviceId), Entry>,
    operations: BTreeMap<Kind, Operations>,
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

    /// Sum over all kinds on one device.
    pub fn device_total(&self, device: DeviceId) -> Entry {
        let mut total = Entry::default();
        self.entries().filter(|(_, other, _)| *other == device).for_each(|(_, _, entry)| total += entry);
        total
    }

    /// Counts of the operations that the plan gives to engines, by kind.
    pub fn operations(&self) -> &BTreeMap<Kind, Operations> {
        &self.operations
    }

    /// Sum of [`Self::operations`].
    pub fn total_operations(&self) -> Operations {
        let mut total = Operations::default();
        self.operations.values().for_each(|operations| total.add(operations));
        total
    }

    /// What there is of the kinds that the plan gives to engines: their operations, and the parts of each device if there
    /// were any.
    #[must_use]
    pub fn of_engines(&self) -> Self {
        let is_shared = |kind: &Kind| self.operations.get(kind).is_some_and(|operations| operations.planned > 0);
        let entries = self.entries.iter().filter(|((kind, _), _)| is_shared(kind));
        Self { entries: entries.map(|(key, entry)| (*key, *entry)).collect(), operations: self.operations.clone() }
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (key, entry) in &other.entries {
            *self.entries.entry(*key).or_default() += *entry;
        }
        for (kind, operations) in &other.operations {
            self.operations.entry(*kind).or_default().add(operations);
        }
    }

    /// Counts of one step.
    pub(crate) fn of_step(
        counters: &[(Kind, DeviceId)],
        entries: &[Entry],
        shared: BTreeMap<(Kind, DeviceId), Entry>,
        operations: BTreeMap<Kind, Operations>,
    ) -> Self {
        let mut all = shared;
        for (key, entry) in counters.iter().zip(entries) {
            *all.entry(*key).or_default() += *entry;
        }
        Self { entries: all, operations }
    }
}
