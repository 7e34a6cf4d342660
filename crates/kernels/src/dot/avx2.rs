//! Dot products with AVX2 and FMA: 3 vectors by 4 rows at a time, 12 sums in registers.

use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dots(a: &[f32], d: usize, b: &[&[f32]], out: &mut [f32], stride: usize) {
    let (quads, singles) = b.as_chunks::<4>();
    for (j, quad) in quads.iter().enumerate() {
        columns(a, d, quad, &mut out[4 * j..], stride);
    }
    for (j, row) in singles.iter().enumerate() {
        columns(a, d, &[*row], &mut out[4 * quads.len() + j..], stride);
    }
}

/// All of `a` with the rows `b`.
#[target_feature(enable = "avx2,fma,f16c")]
fn columns<const B: usize>(a: &[f32], d: usize, b: &[&[f32]; B], out: &mut [f32], stride: usize) {
    let count = a.len() / d;
    let mut i = 0;
    while i + 3 <= count {
        tile::<3, B>(&a[i * d..(i + 3) * d], d, b, &mut out[i * stride..], stride);
        i += 3;
    }
    match count - i {
        2 => tile::<2, B>(&a[i * d..], d, b, &mut out[i * stride..], stride),
        1 => tile::<1, B>(&a[i * d..], d, b, &mut out[i * stride..], stride),
        _ => {}
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const A: usize, const B: usize>(a: &[f32], d: usize, b: &[&[f32]; B], out: &mut [f32], stride: usize) {
    assert!(a.len() == A * d && b.iter().all(|row| row.len() == d));
    let mut acc = [[_mm256_setzero_ps(); B]; A];
    let whole = d - d % 8;
    for k in (0..whole).step_by(8) {
        let mut rows = [_mm256_setzero_ps(); B];
        for (row, b) in rows.iter_mut().zip(b) {
            // SAFETY: k + 8 <= whole <= d, the length of each row (asserted above).
            *row = unsafe { _mm256_loadu_ps(b.as_ptr().add(k)) };
        }
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: i < A and k + 8 <= d, so the lanes lie inside `a` (asserted above).
            let a = unsafe { _mm256_loadu_ps(a.as_ptr().add(i * d + k)) };
            for (acc, &row) in acc.iter_mut().zip(&rows) {
                *acc = _mm256_fmadd_ps(a, row, *acc);
            }
        }
    }
    for (i, acc) in acc.iter().enumerate() {
        // One row alone takes the same tree, with itself for neighbours.
        let sums = reduce(std::array::from_fn(|j| acc[j.min(B - 1)]));
        for (j, b) in b.iter().enumerate() {
            let mut sum = sums[j];
            for k in whole..d {
                sum = a[i * d + k].mul_add(b[k], sum);
            }
            out[i * stride + j] = sum;
        }
    }
}

/// Sums of the lanes of four registers, each `((0+1)+(2+3)) + ((4+5)+(6+7))`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn reduce(acc: [__m256; 4]) -> [f32; 4] {
    let pairs = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
    let sums = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
    let mut out = [0.0; 4];
    // SAFETY: `out` is 4 numbers and `storeu` has no alignment requirement.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    out
}
