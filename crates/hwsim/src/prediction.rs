//! What a simulation says. Predictions have types of their own: nothing measured fits in, and they fit in no measurement.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};

use crate::faults::Faults;
use crate::machine::Arm;
use crate::plan::{LeftOut, PlanSpec};
use crate::profile::Basis;

/// A number that nobody has measured.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Predicted<T>(pub(crate) T);

impl<T: Copy> Predicted<T> {
    /// The number, for whoever compares predictions with each other or says beside it what it is.
    pub fn predicted(self) -> T {
        self.0
    }
}

impl<T: fmt::Display> fmt::Display for Predicted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: Serialize> Serialize for Predicted<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

/// The first field of each record, so that no reader takes it for a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum RecordKind {
    #[default]
    #[serde(rename = "prediction")]
    Prediction,
}

/// The version of the record's fields.
pub(crate) const SCHEMA: u32 = 1;

/// The outcome of one simulated run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    pub kind: RecordKind,
    pub schema: u32,
    /// What was simulated.
    pub profile: String,
    pub model: String,
    pub checkpoint: String,
    pub arm: Arm,
    pub prompt_tokens: usize,
    pub concurrency: usize,
    pub packed: bool,
    pub wavefront: usize,
    /// Of the hybrid arm.
    pub plan: Option<PlanSpec>,
    pub faults: Option<Faults>,
    /// As the geometry resolver says it.
    pub geometry: String,
    /// Tokens of all prompts that prefill computes: each prompt's last one belongs to decode.
    pub prefill_tokens: usize,
    /// Those over the time until the last of them is done.
    pub prefill_tps: Predicted<f64>,
    pub prefill_ms: Predicted<f64>,
    /// Operations that plan and widths ask for, and those that were handed over.
    pub planned: u64,
    pub dispatched: u64,
    /// Whether engines took part, as a server would say it.
    pub verdict: String,
    /// Rows of the steps, and how many there were.
    pub widths: BTreeMap<usize, u64>,
    /// Rules that narrowed chunks, and how many.
    pub narrowed_by: BTreeMap<&'static str, u64>,
    pub devices: Vec<DeviceUse>,
    pub operations: Vec<OperationRecord>,
    /// What is not placed as the plan says.
    pub left_out: Vec<LeftOut>,
}

/// A device and how busy it was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceUse {
    pub name: String,
    pub busy_ms: Predicted<f64>,
    /// Of the time of the run.
    pub duty: Predicted<f64>,
}

/// Where the time of one operation goes, all layers and steps together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperationRecord {
    pub operation: &'static str,
    /// Where its price comes from.
    pub basis: Basis,
    pub primary_ms: Predicted<f64>,
    /// All instances together.
    pub engines_ms: Predicted<f64>,
    pub cpu_ms: Predicted<f64>,
    /// Hand-over, merge and synchronization, on the primary device.
    pub join_ms: Predicted<f64>,
}

impl Prediction {
    /// The device that is busiest, which bounds what more overlap could give.
    pub fn bottleneck(&self) -> Option<&DeviceUse> {
        self.devices.iter().max_by(|a, b| a.busy_ms.0.total_cmp(&b.busy_ms.0))
    }
}
