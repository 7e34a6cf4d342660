//! Weighted sums over heads with AVX2: two heads by 32 keys.

use std::arch::x86_64::*;

use super::rounded::{HEADS, PANEL};

/// `sums[key] = Σ_h weights[h] · max(0, q[h] · key)`. Magnitudes of keys are multiplied by queries that take over their signs:
/// 2 · 127 · 127 fits into 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn weighted_sums(keys: &[[i8; PANEL]], q: &[u32], weights: &[f32], sums: &mut [f32; PANEL]) {
    const TWO: usize = 2;
    const { assert!(HEADS.is_multiple_of(TWO)) };
    let words = keys.len() / 4;
    let mut total = [_mm256_setzero_ps(); 4];
    for (q, weights) in q.chunks_exact(TWO * words).zip(weights.chunks_exact(TWO)) {
        let mut acc = [[_mm256_setzero_si256(); 4]; TWO];
        for (j, keys) in keys.as_chunks::<4>().0.iter().enumerate() {
            for (v, key) in keys.iter().enumerate() {
                // SAFETY: `key` is 32 readable bytes and `loadu` has no alignment requirement.
                let key = unsafe { _mm256_loadu_si256(key.as_ptr().cast()) };
                let key = _mm256_xor_si256(key, _mm256_set1_epi8(-128));
                let magnitude = _mm256_abs_epi8(key);
                for (h, acc) in acc.iter_mut().enumerate() {
                    let x = _mm256_sign_epi8(_mm256_set1_epi32(q[h * words + j] as i32), key);
                    let sum = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, x), _mm256_set1_epi16(1));
                    acc[v] = _mm256_add_epi32(acc[v], sum);
                }
            }
        }
        for (acc, weight) in acc.into_iter().zip(weights) {
            for (total, acc) in total.iter_mut().zip(acc) {
                let product = _mm256_cvtepi32_ps(_mm256_max_epi32(acc, _mm256_setzero_si256()));
                *total = _mm256_fmadd_ps(_mm256_set1_ps(*weight), product, *total);
            }
        }
    }
    for (sums, total) in sums.as_chunks_mut::<8>().0.iter_mut().zip(total) {
        // SAFETY: `sums` is 32 writable bytes and `storeu` has no alignment requirement.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), total) };
    }
}
