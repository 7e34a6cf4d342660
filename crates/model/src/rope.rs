//! Rotary frequencies (model spec, section 6.3).

use std::f64::consts::PI;

use crate::config::RopeScaling;

/// Angle per position of each of the `dim / 2` channel pairs; with `scaling`, slow pairs are slowed further (YaRN).
pub(crate) fn inverse_frequencies(dim: usize, base: f64, scaling: Option<&RopeScaling>) -> Vec<f64> {
    let plain = (0..dim / 2).map(|pair| base.powf(-((2 * pair) as f64) / dim as f64));
    let Some(scaling) = scaling else { return plain.collect() };
    let original = scaling.original_max_position_embeddings as f64;
    // The pair that turns `rotations` times over the original context.
    let pair_of = |rotations: f64| dim as f64 * (original / (rotations * 2.0 * PI)).ln() / (2.0 * base.ln());
    let low = pair_of(scaling.beta_fast).floor().max(0.0);
    let high = pair_of(scaling.beta_slow).ceil().min(dim as f64 - 1.0);
    let span = if high == low { 1e-3 } else { high - low };
    plain
        .enumerate()
        .map(|(pair, frequency)| {
            let slowed = ((pair as f64 - low) / span).clamp(0.0, 1.0);
            frequency / scaling.factor * slowed + frequency * (1.0 - slowed)
        })
        .collect()
}
