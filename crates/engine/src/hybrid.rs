//! What neural engines are to do and did, by kind of projection: for status, records and reports. Counts come from the
//! ledger alone.

use std::collections::BTreeMap;

use serde::Serialize;
use troika_device::npu::CompileCounts;
use troika_runtime::plan::Shares;
use troika_runtime::{BankCounts, DeviceId, EngineBytes, FeatureState, Ledger};

use crate::runner::Runner;

/// Whether engines really take part, and in what.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HybridStatus {
    /// The feature's state with its reason, such as `engaged` or `idle(step_limit)`.
    pub state: String,
    /// Of prefill rows.
    pub numeric_class: String,
    /// Names tile, tail threshold and partition; empty if no engine takes part.
    pub plan_digest: String,
    /// Rows of a tile.
    pub tile: usize,
    /// The devices, the primary first.
    pub devices: Vec<String>,
    /// What became of compilations; none if nothing that was compiled is kept on disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub programs: Option<Programs>,
    /// What engines are to do of each kind of projection.
    pub plan: BTreeMap<&'static str, KindPlan>,
    /// What was done since the start.
    pub kinds: BTreeMap<&'static str, KindCounts>,
    /// What engines hold in memory.
    pub bytes: HybridBytes,
    /// Projections that failed on an engine, and how.
    pub latched: BTreeMap<String, String>,
    /// Projections whose banks were given up for want of memory and have not come back.
    pub shed: Vec<String>,
    /// How often that happened.
    pub banks: BankEvents,
    /// What engines did in the steps of the request that ended last.
    pub last_request: Option<String>,
    /// If engines are simulated, milliseconds that each would have taken since the start: a prediction. Times elsewhere are
    /// those of the cores that stand in for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated_ms: Option<BTreeMap<String, f64>>,
}

/// Bytes that engines hold beside the model's own weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HybridBytes {
    /// Weights in the engines' form, which the primary device computes with too.
    pub weights: u64,
    /// Loaded programs, as far as they are not those weights.
    pub banks: u64,
    /// What tiles are copied to and from.
    pub surfaces: u64,
}

impl From<EngineBytes> for HybridBytes {
    fn from(bytes: EngineBytes) -> Self {
        let EngineBytes { weights, banks, surfaces } = bytes;
        Self { weights, banks, surfaces }
    }
}

/// What became of banks since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BankEvents {
    /// Given up for want of memory.
    pub given_up: u64,
    /// Of those, how many have come back.
    pub returned: u64,
    /// Of those, how many the engines would not have again.
    pub refused: u64,
}

impl From<BankCounts> for BankEvents {
    fn from(counts: BankCounts) -> Self {
        let BankCounts { given_up, returned, refused } = counts;
        Self { given_up, returned, refused }
    }
}

/// Procedures that were compiled since the start, and what is kept of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Programs {
    /// Compiled, those with damaged files included.
    pub compiled: u64,
    /// Found on disk.
    pub from_disk: u64,
    /// Files that were damaged, and are gone.
    pub damaged: u64,
    /// Not kept, for want of room or because the disk refused.
    pub not_kept: u64,
    /// Files that went to make room.
    pub evicted: u64,
    /// Found on disk and not taken by the engine any more; compiled again.
    pub refused: u64,
}

impl From<CompileCounts> for Programs {
    fn from(counts: CompileCounts) -> Self {
        let CompileCounts { compiled, from_disk, damaged, not_kept, evicted, refused, .. } = counts;
        Self { compiled, from_disk, damaged, not_kept, evicted, refused }
    }
}

/// What engines are to do of a kind of projection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct KindPlan {
    /// Projections of the kind.
    pub layers: u64,
    /// Share of their output channels that engines compute.
    pub fraction_effective: f64,
}

/// What was done of a kind of projection. An operation is one projection on one tile.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KindCounts {
    /// Operations that plan and widths ask for.
    pub planned: u64,
    /// Handed over with a full tile.
    pub exact: u64,
    /// Handed over with a tile that zeros fill up.
    pub padded: u64,
    /// Complete, parts that the primary device had to repeat included.
    pub merged: u64,
    /// Given up with their step.
    pub cancelled: u64,
    /// Projections of prefill rows that the primary device computed alone, by reason.
    pub fallbacks: BTreeMap<&'static str, u64>,
    /// Projections of decode steps.
    pub bypass_decode: u64,
    /// Projections of steps that verify drafts.
    pub bypass_verify: u64,
    /// Parts that failed on an engine.
    pub runtime_failures: u64,
    /// Rows of the operations.
    pub logical_rows: u64,
    /// Rows of zeros beside them.
    pub padded_rows: u64,
    /// Parts of engines of which some rows were compared.
    pub checks: u64,
    /// Those that were wrong.
    pub failed_checks: u64,
    /// Time that the comparisons took.
    pub check_ms: f64,
    /// From the end of the planned projection before it in the step, or the step's start, to the first hand-over, summed.
    pub input_ready_ms: f64,
    /// From the first hand-over of a projection to its last part, summed.
    pub region_ms: f64,
    /// What of that the device that worked longest did not work.
    pub gap_ms: f64,
    /// Time on each device.
    pub device_ms: BTreeMap<String, f64>,
    /// Parts handed to each device.
    pub dispatched: BTreeMap<String, u64>,
    /// How often each device was the last to be done.
    pub last: BTreeMap<String, u64>,
}

impl HybridStatus {
    /// Of a runner; `None` if no engine was wished for.
    pub fn of(runner: &Runner) -> Option<Self> {
        if runner.feature() == FeatureState::Off {
            return None;
        }
        let executor = runner.executor();
        let devices = executor.devices().iter().map(|device| device.capabilities().name.clone()).collect();
        let mut channels: BTreeMap<&'static str, (u64, usize, usize)> = BTreeMap::new();
        for projection in executor.plan().projections().values() {
            let (layers, engines, all) = channels.entry(projection.kind.name()).or_default();
            let width = |procedure: &troika_device::npu::Procedure| -> usize {
                procedure.outputs(&(0..1)).iter().map(|columns| columns.groups * columns.channels.len()).sum()
            };
            *layers += 1;
            match &projection.shares {
                Shares::Channels(shares) => {
                    for (device, procedure) in shares {
                        *engines += if *device == DeviceId::PRIMARY { 0 } else { width(procedure) };
                        *all += width(procedure);
                    }
                }
                Shares::Turns { procedure, .. } => {
                    *engines += width(procedure);
                    *all += width(procedure);
                }
            }
        }
        let plan = channels.into_iter().map(|(kind, (layers, engines, all))| {
            (kind, KindPlan { layers, fraction_effective: engines as f64 / all.max(1) as f64 })
        });
        let mut status = Self {
            state: String::new(),
            numeric_class: runner.numeric_class(),
            plan_digest: executor.plan().digest().to_owned(),
            tile: executor.plan().tile(),
            devices,
            programs: None,
            plan: plan.collect(),
            kinds: BTreeMap::new(),
            bytes: HybridBytes::default(),
            latched: BTreeMap::new(),
            shed: Vec::new(),
            banks: BankEvents::default(),
            last_request: None,
            simulated_ms: None,
        };
        status.refresh(runner);
        Some(status)
    }

    /// Takes in what has happened since.
    pub(crate) fn refresh(&mut self, runner: &Runner) {
        self.state = runner.feature().to_string();
        self.kinds = self.counts(runner.totals());
        let executor = runner.executor();
        self.bytes = executor.engine_bytes().into();
        self.latched = executor.latched().iter().map(|(key, reason)| (key.to_string(), reason.clone())).collect();
        self.programs = runner.compile_counts().map(Programs::from);
        self.simulated_ms = runner.simulated_ns().map(|ns| {
            let engines = self.devices.iter().skip(1).cloned();
            engines.zip(ns).map(|(device, ns)| (device, ns as f64 / 1e6)).collect()
        });
        self.banks = executor.bank_counts().into();
        self.shed = executor.shed_projections().iter().map(ToString::to_string).collect();
    }

    /// A request has ended, in whose steps that was done.
    pub(crate) fn note_request(&mut self, ledger: &Ledger) {
        if !self.plan.is_empty() {
            self.last_request = Some(FeatureState::of(&ledger.total_operations()).to_string());
        }
    }

    /// The counts of a ledger, with the names of the devices.
    pub fn counts(&self, ledger: &Ledger) -> BTreeMap<&'static str, KindCounts> {
        let name = |device: &DeviceId| self.devices[usize::from(device.0)].clone();
        let of_kind = |(kind, ops): (&_, &troika_runtime::Operations)| {
            let is_meant = |device: DeviceId| device != DeviceId::PRIMARY || ops.planned > 0;
            let entries: Vec<_> =
                ledger.entries().filter(|(other, device, _)| other == kind && is_meant(*device)).collect();
            KindCounts {
                planned: ops.planned,
                exact: ops.exact,
                padded: ops.padded,
                merged: ops.merged,
                cancelled: ops.cancelled,
                fallbacks: ops.fallbacks.iter().map(|(reason, count)| (reason.name(), *count)).collect(),
                bypass_decode: ops.bypass_decode,
                bypass_verify: ops.bypass_verify,
                runtime_failures: ops.runtime_failures,
                logical_rows: ops.logical_rows,
                padded_rows: ops.padded_rows,
                checks: ops.checks,
                failed_checks: ops.failed_checks,
                check_ms: ops.check_ns as f64 / 1e6,
                input_ready_ms: ops.input_ready_ns as f64 / 1e6,
                region_ms: ops.region_ns as f64 / 1e6,
                gap_ms: ops.gap_ns as f64 / 1e6,
                device_ms: entries.iter().map(|(_, device, e)| (name(device), e.busy_ns as f64 / 1e6)).collect(),
                dispatched: entries.iter().map(|(_, device, e)| (name(device), e.submitted)).collect(),
                last: ops.last.iter().map(|(device, count)| (name(device), *count)).collect(),
            }
        };
        ledger.operations().iter().map(|entry| (entry.0.name(), of_kind(entry))).collect()
    }
}
