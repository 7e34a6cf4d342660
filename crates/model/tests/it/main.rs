//! Tests of the checkpoint half of the crate against the oracle's three tiny checkpoints.

mod affine;
mod inspection;
mod layouts;
mod malformed;
mod mutations;
mod support;
mod synthesis;
