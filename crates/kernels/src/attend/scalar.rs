//! The weighted sum in plain Rust.

use crate::heads::LANES;

/// `out[h] = fade[h] · out[h] + Σ_i p[i][h] · rows[i]`, the sum one chain per output.
pub(super) fn add_weighted(p: &[f32], lanes: usize, rows: &[&[f32]], d: usize, fade: &[f32; LANES], out: &mut [f32]) {
    const CHANNELS: usize = 64;
    for (h, out) in out.chunks_exact_mut(d).enumerate() {
        for (c, out) in out.chunks_mut(CHANNELS).enumerate() {
            let mut sum = [0.0f32; CHANNELS];
            for (p, row) in p.chunks_exact(lanes).zip(rows) {
                for (sum, x) in sum.iter_mut().zip(&row[c * CHANNELS..][..out.len()]) {
                    *sum += p[h] * x;
                }
            }
            out.iter_mut().zip(sum).for_each(|(out, sum)| *out = fade[h] * *out + sum);
        }
    }
}
