//! Products with the mixing matrix with AVX2 and FMA: 3 rows by 4 outputs at a time, 12 sums in registers.

use std::arch::x86_64::*;

use super::{OUTPUTS, ROWS, Sums};

/// Rows of a tile.
const TILE: usize = 3;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dots(x: &[&[f32]; ROWS], rows: usize, w: &[&[f32]; OUTPUTS], out: &mut Sums) {
    let (x, _) = x.as_chunks::<TILE>();
    for (i, (x, out)) in x.iter().zip(out.as_chunks_mut::<TILE>().0).enumerate() {
        *out = match rows.saturating_sub(i * TILE) {
            0 => return,
            1 => tile::<1>(&[x[0]], w),
            2 => tile::<2>(&[x[0], x[1]], w),
            _ => tile::<3>(x, w),
        };
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const A: usize>(x: &[&[f32]; A], w: &[&[f32]; OUTPUTS]) -> [[f32; OUTPUTS]; TILE] {
    let d = x[0].len();
    let whole = d - d % 8;
    let acc = lanes(x, w, whole);
    let mut sums = [[0.0; OUTPUTS]; TILE];
    for (i, acc) in acc.into_iter().enumerate() {
        sums[i] = finish(acc, x[i], w, whole);
    }
    sums
}

/// Sums of the lanes of one row, and what comes after the first `whole` channels.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn finish(acc: [__m256; OUTPUTS], x: &[f32], w: &[&[f32]; OUTPUTS], whole: usize) -> [f32; OUTPUTS] {
    let mut row = reduce(acc);
    for (sum, w) in row.iter_mut().zip(w) {
        *sum = (whole..x.len()).fold(*sum, |sum, k| x[k].mul_add(w[k], sum));
    }
    row
}

/// The loop where the time goes. On its own, so that the compiler keeps the sums in registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn lanes<const A: usize>(x: &[&[f32]; A], w: &[&[f32]; OUTPUTS], whole: usize) -> [[__m256; OUTPUTS]; A] {
    assert!(x.iter().all(|x| x.len() >= whole) && w.iter().all(|w| w.len() >= whole) && whole.is_multiple_of(8));
    let mut acc = [[_mm256_setzero_ps(); OUTPUTS]; A];
    for k in (0..whole).step_by(8) {
        let mut row = [_mm256_setzero_ps(); OUTPUTS];
        for (row, w) in row.iter_mut().zip(w) {
            // SAFETY: k + 8 <= whole, at most the length of each slice (asserted above).
            *row = unsafe { _mm256_loadu_ps(w.as_ptr().add(k)) };
        }
        for (acc, x) in acc.iter_mut().zip(x) {
            // SAFETY: as above.
            let x = unsafe { _mm256_loadu_ps(x.as_ptr().add(k)) };
            for (acc, &row) in acc.iter_mut().zip(&row) {
                *acc = _mm256_fmadd_ps(x, row, *acc);
            }
        }
    }
    acc
}

/// Sums of the lanes of four registers, each `((0+1)+(2+3)) + ((4+5)+(6+7))`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn reduce(acc: [__m256; OUTPUTS]) -> [f32; OUTPUTS] {
    let pairs = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
    let sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
    let mut out = [0.0; OUTPUTS];
    // SAFETY: `out` is 4 numbers and `storeu` has no alignment requirement.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    out
}
