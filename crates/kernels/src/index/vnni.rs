//! Weighted sums over heads with AVX-512 VNNI: eight heads by 32 keys.

use std::arch::x86_64::*;

use super::rounded::{HEADS, PANEL};

/// As with AVX2, the same bits. Keys stay as they are stored, 128 too large, which `zeros` takes away.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
pub(super) fn weighted_sums(keys: &[[i8; PANEL]], q: &[u32], zeros: &[i32], weights: &[f32], sums: &mut [f32; PANEL]) {
    let words = keys.len() / 4;
    let mut total = [_mm512_setzero_ps(); 2];
    let heads = q.chunks_exact(HEADS * words).zip(zeros.as_chunks::<HEADS>().0).zip(weights.as_chunks::<HEADS>().0);
    for ((q, zeros), weights) in heads {
        let acc = products(keys, q, zeros);
        for (acc, weight) in acc.into_iter().zip(weights) {
            for (total, acc) in total.iter_mut().zip(acc) {
                let product = _mm512_cvtepi32_ps(_mm512_max_epi32(acc, _mm512_setzero_si512()));
                *total = _mm512_fmadd_ps(_mm512_set1_ps(*weight), product, *total);
            }
        }
    }
    for (sums, total) in sums.as_chunks_mut::<16>().0.iter_mut().zip(total) {
        // SAFETY: `sums` is 64 writable bytes and `storeu` has no alignment requirement.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), total) };
    }
}

/// The loop where the time goes. On its own, so that the compiler keeps the sums in registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
fn products(keys: &[[i8; PANEL]], q: &[u32], zeros: &[i32; HEADS]) -> [[__m512i; 2]; HEADS] {
    let (keys, _) = keys.as_chunks::<4>();
    assert!(q.len() == HEADS * keys.len());
    let mut acc = zeros.map(|zero| [_mm512_set1_epi32(zero); 2]);
    for (j, key) in keys.iter().enumerate() {
        // SAFETY: `key` is 128 readable bytes and `loadu` has no alignment requirement.
        let key = unsafe {
            let start: *const i8 = key.as_ptr().cast();
            [_mm512_loadu_si512(start.cast()), _mm512_loadu_si512(start.add(64).cast())]
        };
        for (h, acc) in acc.iter_mut().enumerate() {
            // SAFETY: h < HEADS and j < the words of a head, so the index lies inside of `q` (asserted above).
            let x = _mm512_set1_epi32(unsafe { *q.get_unchecked(h * keys.len() + j) } as i32);
            acc[0] = _mm512_dpbusd_epi32(acc[0], key[0], x);
            acc[1] = _mm512_dpbusd_epi32(acc[1], key[1], x);
        }
    }
    acc
}
