//! What goes wrong, on demand. Everything happens at the same place in each run with the same settings.

use serde::{Deserialize, Serialize};

/// The default is a machine that works.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// Procedures with more bytes of weights are not compiled.
    pub compile_limit_bytes: Option<u64>,
    /// An instance takes no more bytes of programs.
    pub bank_limit_bytes: Option<u64>,
    /// No bank is loaded; the code is what the engine says.
    pub load_error: Option<i32>,
    /// The submission to an engine with this number fails, counted from 0 over all instances.
    pub failing_dispatch: Option<u64>,
    /// An instance takes so many times as long: its number, from 0, and the factor.
    pub slow_instance: Option<(usize, f64)>,
    /// The CPU's product is not there.
    pub missing_cpu_symbol: bool,
    /// What engines compute is off, where anything is computed at all.
    pub corrupt: bool,
    /// Times vary by this part of themselves, up and down, evenly.
    pub jitter: f64,
    /// Of the jitter and of the corruption.
    pub seed: u64,
}

/// A number from 0 to 1 that looks random, the same for the same arguments.
pub(crate) fn noise(seed: u64, number: u64) -> f64 {
    // SplitMix64.
    let mut z = seed.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}
