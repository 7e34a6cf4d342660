//! The step as data: operations, values, state edges, costs and the memory plan.
//!
//! Pure: must not know devices, weights' bytes or clocks. Read [`weights`] for the names operations use.

pub mod weights;

pub use weights::{Role, Scope, WeightKey, WeightSource};
