//! The weighted sum with AVX2 and FMA: 6 heads by 16 channels at a time, the sums in registers.

use std::arch::x86_64::*;

/// `out[h] += Σ_i p[h · stride + i] · rows[i]`, one chain per output, added at the end.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn add_weighted(p: &[f32], stride: usize, rows: &[&[f32]], d: usize, out: &mut [f32]) {
    let heads = out.len() / d;
    for c in (0..d - d % 16).step_by(16) {
        let mut h = 0;
        while h < heads {
            let (p, out) = (&p[h * stride..], &mut out[h * d..]);
            h += match heads - h {
                1 => tile::<1>(p, stride, rows, d, c, out),
                2 => tile::<2>(p, stride, rows, d, c, out),
                3 => tile::<3>(p, stride, rows, d, c, out),
                4 => tile::<4>(p, stride, rows, d, c, out),
                5 => tile::<5>(p, stride, rows, d, c, out),
                _ => tile::<6>(p, stride, rows, d, c, out),
            };
        }
    }
    for c in d - d % 16..d {
        for h in 0..heads {
            let p = &p[h * stride..][..rows.len()];
            out[h * d + c] += p.iter().zip(rows).fold(0.0f32, |sum, (p, row)| p.mul_add(row[c], sum));
        }
    }
}

/// Channels `c..c + 16` of the first `H` heads; returns `H`.
#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const H: usize>(p: &[f32], stride: usize, rows: &[&[f32]], d: usize, c: usize, out: &mut [f32]) -> usize {
    assert!(c + 16 <= d && p.len() >= (H - 1) * stride + rows.len() && out.len() >= H * d);
    let mut acc = [[_mm256_setzero_ps(); 2]; H];
    for (i, row) in rows.iter().enumerate() {
        assert!(row.len() == d);
        // SAFETY: c + 16 <= d, the length of the row.
        let x = unsafe { [_mm256_loadu_ps(row.as_ptr().add(c)), _mm256_loadu_ps(row.as_ptr().add(c + 8))] };
        for (h, acc) in acc.iter_mut().enumerate() {
            // SAFETY: h < H and i < rows.len(), so the index lies inside `p` (asserted above).
            let p = unsafe { _mm256_broadcast_ss(p.get_unchecked(h * stride + i)) };
            acc[0] = _mm256_fmadd_ps(p, x[0], acc[0]);
            acc[1] = _mm256_fmadd_ps(p, x[1], acc[1]);
        }
    }
    for (h, acc) in acc.into_iter().enumerate() {
        for (half, acc) in acc.into_iter().enumerate() {
            // SAFETY: channels c..c + 16 of head h < H lie inside `out` (asserted above).
            unsafe {
                let out = out.as_mut_ptr().add(h * d + c + 8 * half);
                _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), acc));
            }
        }
    }
    H
}
