//! The [`Device`] trait and its implementations: `cpu` and fixed-shape neural engines today, GPUs later.
//!
//! Must not know models or the scheduler: a device gets nodes of a step graph and does them. Read [`Device`], then
//! [`run`] for what a running step is made of, [`state`] for the memory of sequences, [`cpu`] for the primary device, [`npu`]
//! for neural engines.

#![warn(missing_docs)]

pub mod cpu;
mod mapped;
pub mod npu;
pub mod run;
#[expect(unsafe_code, reason = "devices that share an operation write one value at the same time")]
mod slot;
pub mod state;

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use troika_base::StepId;
use troika_graph::{NodeId, WeightKey, WeightSource};

pub use mapped::map_file;
use npu::{NpuError, Procedure, ProcedureId};
pub use run::StepRun;
pub use slot::{Columns, Output, ReadSlot, WriteColumns, WriteSlot};
pub use state::{SequenceState, StateShape};

/// What kind of engine a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceKind {
    /// General-purpose cores.
    Cpu,
    /// A fixed-shape neural engine.
    Npu,
}

/// What a device is and can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Name in plans, ledgers and logs, unique on this machine.
    pub name: String,
    /// Its kind.
    pub kind: DeviceKind,
    /// What a person wants to know: cores, instruction set.
    pub description: String,
    /// Worker threads.
    pub threads: usize,
}

/// Which work goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Somebody waits for the next token.
    Decode,
    /// Prompt processing.
    Prefill,
}

/// Nodes of one step for one device, to be done in the order given and reported together.
#[derive(Debug)]
pub struct Work {
    /// The step they belong to.
    pub run: Arc<StepRun>,
    /// Which nodes, at least one; each one's predecessors are done, or come earlier on the same device.
    pub nodes: Vec<NodeId>,
    /// What to do of the one node of this work, if several devices share it; its predecessors are done.
    pub part: Option<Part>,
    /// How soon.
    pub priority: Priority,
    /// Another device will soon have work by it: among the prefill work of several steps it goes first.
    pub feeds: bool,
    /// Where to report.
    pub done: Sender<Report>,
}

/// What one device does of a node that several share: a procedure on some of its rows.
#[derive(Clone, Debug)]
pub struct Part {
    /// Its number among the parts of the node; comes back with the report.
    pub id: u32,
    /// Which weights and output channels.
    pub procedure: Arc<Procedure>,
    /// Which rows of the step; on an engine at most a tile of them.
    pub rows: Range<usize>,
}

/// What became of a piece of work.
#[derive(Debug)]
pub struct Report {
    /// The step.
    pub step: StepId,
    /// The nodes of the work.
    pub nodes: Vec<NodeId>,
    /// The number of the part, if it was one.
    pub part: Option<u32>,
    /// Time of each node that was done, in their order, nanoseconds.
    pub elapsed_ns: Vec<u64>,
    /// What went wrong with the node after those, for people; what it should have written is then worthless.
    pub failure: Option<String>,
}

/// Why a device cannot do as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A weight the graph names is not there, or has another shape.
    #[error("weight {key}: {reason}")]
    Weight {
        /// Which.
        key: WeightKey,
        /// What is wrong.
        reason: String,
    },
    /// Threads could not be started.
    #[error("cannot start {threads} worker threads: {reason}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
    /// It does not do such work.
    #[error("device {name} {reason}")]
    Refused {
        /// Which.
        name: String,
        /// What it said.
        reason: String,
    },
    /// The device has stopped.
    #[error("device {name} has stopped")]
    Stopped {
        /// Which.
        name: String,
    },
}

/// Runs a procedure on the tile that it is given.
pub type RunTile<'a> = dyn FnMut(&[f32]) -> Result<Vec<f32>, NpuError> + 'a;

/// Tries out a loaded procedure, and says what is wrong with it.
pub type Probe = Arc<dyn Fn(&Procedure, &mut RunTile<'_>) -> Result<(), String> + Send + Sync>;

/// What came of [`Device::reload`], or why nothing.
pub type Reloaded = Result<(), String>;

/// An engine that executes nodes.
pub trait Device: Send + Sync {
    /// What it is.
    fn capabilities(&self) -> &Capabilities;

    /// Takes every weight of `source` into its own form. Called once, before any work.
    ///
    /// # Errors
    ///
    /// If a weight cannot be taken.
    fn load(&self, source: &dyn WeightSource) -> Result<(), DeviceError>;

    /// Queues work and returns at once. Between two nodes the device turns to the most urgent work that it has; work of
    /// the same priority and step runs in the order of submission, and of the primary's steps the older first.
    ///
    /// # Errors
    ///
    /// If the device has stopped, or does no such work; nothing is queued then.
    fn submit(&self, work: Work) -> Result<(), DeviceError>;

    /// Frees the memory of the loaded programs that hold none but these procedures, once what is queued is done; none of them is
    /// submitted any more. A device without programs has nothing to free.
    ///
    /// # Errors
    ///
    /// If the device has stopped.
    fn shed(&self, procedures: Vec<ProcedureId>) -> Result<(), DeviceError> {
        drop(procedures);
        Ok(())
    }

    /// Loads programs that it has freed again, one that holds exactly `procedures`, with the work that is queued before it. Each of
    /// them goes through `probe`, and what came of it all goes to `done`.
    ///
    /// # Errors
    ///
    /// If the device has stopped, or has no programs.
    fn reload(&self, procedures: Vec<Arc<Procedure>>, probe: Probe, done: Sender<Reloaded>) -> Result<(), DeviceError> {
        drop((procedures, probe, done));
        let (name, reason) = (self.capabilities().name.clone(), "has no programs to load".to_owned());
        Err(DeviceError::Refused { name, reason })
    }

    /// Bytes of the memory between which and the steps' values a device copies tiles.
    fn surface_bytes(&self) -> u64 {
        0
    }

    /// Lends the caller's thread to a device that computes on cores: it does queued nodes until `pause` says so, which is
    /// asked after each node and told the time, or nothing is queued. True if it did any. Whoever waits for a step calls
    /// it, so no thread has to be woken for a step, nor at its end. A device with a processor of its own returns at once.
    fn drive(&self, pause: &mut dyn FnMut(Instant) -> bool) -> bool;
}
