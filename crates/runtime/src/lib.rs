//! Who runs which node, and proof that it did: the [`Plan`], the [`Executor`] and the [`Ledger`].
//!
//! Must not know tokens' meaning, requests or HTTP. Read [`executor`] next, then [`prepare`] for how a plan with neural
//! engines comes about and [`feature`] for how one sees that it runs.

pub mod choose;
pub mod cost;
pub mod eligibility;
pub mod estimate;
pub mod executor;
pub mod feature;
pub mod ledger;
pub mod partition;
pub mod plan;
pub mod prepare;
pub mod span;
mod template;

pub use choose::{Choice, OperationChoice, choose};
pub use cost::{CalibrationError, CostTable, calibrate};
pub use executor::{BankCounts, EngineBytes, Executor, ExecutorError, FinishedStep, LoadedBank, Step, Ticket};
pub use feature::{Feature, FeatureState};
pub use ledger::{Entry, Fallback, Ledger, Operations};
pub use plan::{DeviceId, Lane, Plan};
pub use prepare::{HybridOptions, OperationKey, Placement, Prepared, prepare};
pub use span::Span;
pub use template::Template;
pub use troika_device::Priority;
