//! Who runs which node, and proof that it did: the [`Plan`], the [`Executor`] and the [`Ledger`].
//!
//! Must not know tokens' meaning, requests or HTTP. Read [`executor`] next.

pub mod executor;
pub mod ledger;
pub mod plan;
pub mod span;
mod template;

pub use executor::{Executor, ExecutorError, FinishedStep, Step, Ticket};
pub use ledger::{Entry, Ledger};
pub use plan::{DeviceId, Plan};
pub use span::Span;
pub use template::Template;
pub use troika_device::Priority;
