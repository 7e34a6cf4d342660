//! The weighted sum in plain Rust.

/// `out[h] += Σ_i p[h · stride + i] · rows[i]`, one chain per output, added at the end.
pub(super) fn add_weighted(p: &[f32], stride: usize, rows: &[&[f32]], d: usize, out: &mut [f32]) {
    const CHANNELS: usize = 64;
    for (h, out) in out.chunks_exact_mut(d).enumerate() {
        let p = &p[h * stride..][..rows.len()];
        for (c, out) in out.chunks_mut(CHANNELS).enumerate() {
            let mut sum = [0.0f32; CHANNELS];
            for (p, row) in p.iter().zip(rows) {
                for (sum, x) in sum.iter_mut().zip(&row[c * CHANNELS..][..out.len()]) {
                    *sum += p * x;
                }
            }
            out.iter_mut().zip(sum).for_each(|(out, sum)| *out += sum);
        }
    }
}
