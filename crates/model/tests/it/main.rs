//! Checkpoints in every layout, sound and damaged; emitted graphs against the tables of the model spec.

mod affine;
mod emit;
mod inspection;
mod layouts;
mod malformed;
mod mutations;
mod support;
mod synthesis;
