//! Weighted sums over heads in plain Rust.

use super::rounded::PANEL;

/// `sums[key] = Σ_h weights[h] · max(0, q[h] · key)`.
pub(super) fn weighted_sums(keys: &[[i8; PANEL]], q: &[u32], weights: &[f32], sums: &mut [f32; PANEL]) {
    let words = keys.len() / 4;
    let (keys, _) = keys.as_flattened().as_chunks::<4>();
    for (q, weight) in q.chunks_exact(words).zip(weights) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            let word = |(i, q): (usize, &u32)| -> i32 {
                let pairs = keys[i * PANEL + lane].into_iter().zip(q.to_le_bytes());
                pairs.map(|(key, q)| i32::from(key ^ i8::MIN) * i32::from(q as i8)).sum()
            };
            let product: i32 = q.iter().enumerate().map(word).sum();
            *sum += weight * product.max(0) as f32;
        }
    }
}
