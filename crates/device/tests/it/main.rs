//! Tests of devices from the outside.

mod ort;
