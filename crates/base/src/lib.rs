//! What every other crate shares: stored tensors and their number formats, ids, units, numeric classes.
//!
//! Must not do I/O and must not know models, devices or requests. Read [`storage`] next.

#![warn(missing_docs)]

mod bytes;
mod class;
mod ids;
pub mod storage;
pub mod units;

pub use bytes::{BytesOwner, SharedBytes};
pub use class::NumericClass;
pub use ids::{RequestId, SequenceId, StepId};
pub use storage::{Format, StoredTensor};
