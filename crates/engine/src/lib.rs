//! The step loop and the sampler: the public library API. Token ids in, token ids out.

#![warn(missing_docs)]

pub mod api;
