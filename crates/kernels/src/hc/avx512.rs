//! Products with the mixing matrix with AVX-512: 6 rows by 4 outputs at a time, two outputs in a register, each with the eight
//! lanes that it has with AVX2.

use std::arch::x86_64::*;

use super::{OUTPUTS, ROWS, Sums, avx2};

/// As [`avx2::dots`], the same bits.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
pub(super) fn dots(x: &[&[f32]; ROWS], rows: usize, w: &[&[f32]; OUTPUTS], out: &mut Sums) {
    match rows {
        ..=3 => tile::<3>(x, w, out),
        4 => tile::<4>(x, w, out),
        5 => tile::<5>(x, w, out),
        _ => tile::<6>(x, w, out),
    }
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn tile<const A: usize>(x: &[&[f32]; ROWS], w: &[&[f32]; OUTPUTS], out: &mut Sums) {
    let x: &[&[f32]; A] = x.first_chunk().expect("at most all rows");
    let whole = x[0].len() - x[0].len() % 8;
    for ((acc, x), out) in lanes(x, w, whole).into_iter().zip(x).zip(out) {
        let halves = |both: __m512| {
            let both = _mm512_castps_pd(both);
            [_mm512_castpd512_pd256(both), _mm512_extractf64x4_pd::<1>(both)].map(|half| _mm256_castpd_ps(half))
        };
        let [[a, b], [c, d]] = [halves(acc[0]), halves(acc[1])];
        *out = avx2::finish([a, b, c, d], x, w, whole);
    }
}

/// The loop where the time goes. On its own, so that the compiler keeps the sums in registers.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn lanes<const A: usize>(x: &[&[f32]; A], w: &[&[f32]; OUTPUTS], whole: usize) -> [[__m512; 2]; A] {
    assert!(x.iter().all(|x| x.len() >= whole) && w.iter().all(|w| w.len() >= whole) && whole.is_multiple_of(8));
    let mut acc = [[_mm512_setzero_ps(); 2]; A];
    for k in (0..whole).step_by(8) {
        // SAFETY: k + 8 <= whole, at most the length of each slice (asserted above).
        let half = |row: &[f32]| _mm256_castps_pd(unsafe { _mm256_loadu_ps(row.as_ptr().add(k)) });
        let pair = |a, b| _mm512_castpd_ps(_mm512_insertf64x4::<1>(_mm512_castpd256_pd512(half(a)), half(b)));
        let w = [pair(w[0], w[1]), pair(w[2], w[3])];
        for (acc, x) in acc.iter_mut().zip(x) {
            let x = _mm512_castpd_ps(_mm512_broadcast_f64x4(half(x)));
            for (acc, w) in acc.iter_mut().zip(w) {
                *acc = _mm512_fmadd_ps(x, w, *acc);
            }
        }
    }
    acc
}
