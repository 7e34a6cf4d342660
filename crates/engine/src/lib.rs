//! The step loop and the sampler: the public library API. Token ids in, token ids out; must not know text or HTTP.
//!
//! [`Runner`] does forward passes for one caller: logits, evaluation, benchmarks. [`Engine`] serves many requests at once
//! on top of it. [`api`] has what callers of the engine say and hear.

#![warn(missing_docs)]

pub mod api;
mod calibration;
mod engine;
mod gate;
mod hybrid;
mod memory;
mod runner;
mod sampler;

pub use calibration::{Calibration, calibrate_engines, choose_engines};
pub use engine::core::{Core, Proposal, StepResult, StepRunner, Submission};
pub use engine::disk::DiskTier;
pub use engine::{Engine, EngineOptions};
pub use gate::{Distance, distance};
pub use hybrid::{BankEvents, HybridBytes, HybridStatus, KindCounts, KindPlan, Programs};
pub use memory::{MemorySettings, ModelMemory};
pub use runner::{Chunk, Draft, Engines, Forward, Runner, RunnerError, RunnerOptions, WantLogits, plan_engines};
pub use sampler::{SampleError, sample};
// What callers say about neural engines, and hear of them.
pub use troika_runtime::cost::OperationCost;
pub use troika_runtime::prepare::{Record, Stage, foresee as foresee_engines};
pub use troika_runtime::{
    CalibrationError, Choice, CostTable, DeviceId, EngineBytes, FeatureState, HybridOptions, Ledger, OperationChoice,
    OperationKey, Operations, Placement, Priority, Span,
};
