//! Simulated devices on a virtual clock: how fast a machine would be that is not here.
//!
//! A [`Machine`] is a [`Profile`] (what operations cost, as data) with a model and the way it is stored. [`Machine::prefill`]
//! runs prompts through the same scheduler, geometry, plan, executor and ledger as a server does, on devices that take no
//! time but say how much they would have taken. No weights are needed. What comes out is a [`Prediction`], a type of its own
//! so that it is never mixed with what was measured.
//!
//! ```
//! use troika_hwsim::{Arm, Machine, Placement, PlanSpec, Profile, Projection, Run};
//!
//! let machine = Machine::new(Profile::named("m3-ultra-512")?, "v4-flash-0731", "fp8")?;
//! let matched = machine.prefill(&Run::new(8193, Arm::Matched, PlanSpec::primary(4096)))?;
//! let plan = PlanSpec::primary(4096)
//!     .with(Projection::Shared, Placement::Whole)
//!     .with(Projection::Query, Placement::Split { engines: 0.5, cpu: 0.0 });
//! let hybrid = machine.prefill(&Run { wavefront: 1, ..Run::new(8193, Arm::Hybrid, plan) })?;
//! assert!(hybrid.prefill_tps > matched.prefill_tps);
//! assert_eq!(hybrid.planned, hybrid.dispatched);
//! # Ok::<(), troika_hwsim::SimError>(())
//! ```
//!
//! `profile.rs` has the numbers, `price.rs` what a node costs by them, `form.rs` the graph in the operations that were
//! measured, `world.rs` devices and clock, `machine.rs` the runs, `sweep.rs` many of them, `observed.rs` this machine as it was observed,
//! `written.rs` the profile that comes of that.

mod arithmetic;
mod faults;
mod form;
mod machine;
mod observed;
mod plan;
mod prediction;
mod price;
mod profile;
mod sweep;
mod world;
mod written;

pub use faults::Faults;
pub use form::Projection;
pub use machine::{Arm, Computed, Machine, Run, STOCK_BLOCK, STOCK_STEP, Small};
pub use observed::{Observed, Observer, Replay, SeenSpan, SeenStep};
pub use plan::{LeftOut, Placement, PlanSpec};
pub use prediction::{DeviceUse, OperationRecord, Predicted, Prediction, RecordKind};
pub use profile::{Basis, Checkpoint, Origin, Profile, ProjectionCost};
pub use sweep::{Axis, Knob, Point, Sweep};
// What is replayed.
pub use troika_runtime::Plan;
pub use world::Slowdown;
pub use written::About;

/// Why nothing was simulated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// No such profile, model, checkpoint or plan.
    #[error("no {what} {name}; there are {known}")]
    UnknownName { what: &'static str, name: String, known: String },
    /// A file that cannot be read as what it should be.
    #[error("{origin}: {reason}")]
    Malformed { origin: String, reason: String },
    /// Prices of one model say nothing about another.
    #[error("profile {profile} has the prices of {priced}, not of {model}")]
    OtherModel { profile: String, priced: String, model: String },
    /// An operation of the model that the profile does not know.
    #[error("profile {profile} has no price of {operation}")]
    Unpriced { profile: String, operation: String },
    /// A plan that these engines cannot carry out.
    #[error("plan: {0}")]
    Plan(String),
    /// A run that makes no sense.
    #[error("{0}")]
    Run(String),
    /// A plot that cannot be drawn.
    #[error("plot: {0}")]
    Plot(String),
    /// The device that computes cannot take the model.
    #[error(transparent)]
    Device(#[from] troika_device::DeviceError),
    /// A step failed.
    #[error(transparent)]
    Executor(#[from] troika_runtime::ExecutorError),
}
