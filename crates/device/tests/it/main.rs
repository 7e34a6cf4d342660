//! Tests of devices from the outside.

mod cache;
mod ort;
