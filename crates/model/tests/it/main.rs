//! Tests of the checkpoint half of the crate against the oracle's three tiny checkpoints.

mod layouts;
mod support;
