//! The weighted sum with AVX2 and FMA: 6 heads by 16 channels at a time, the sums in registers.

use std::arch::x86_64::*;

use crate::heads::LANES;

/// `out[h] = fade[h] · out[h] + Σ_i p[i][h] · rows[i]`, the sum one chain per output.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn add_weighted(p: &[f32], lanes: usize, rows: &[&[f32]], d: usize, fade: &[f32; LANES], out: &mut [f32]) {
    let heads = out.len() / d;
    for c in (0..d - d % 16).step_by(16) {
        let mut h = 0;
        while h < heads {
            let (p, fade, out) = (&p[h..], &fade[h..], &mut out[h * d..]);
            h += match heads - h {
                1 => tile::<1>(p, lanes, rows, c, fade, d, out),
                2 => tile::<2>(p, lanes, rows, c, fade, d, out),
                3 => tile::<3>(p, lanes, rows, c, fade, d, out),
                // 8 heads are two tiles of 4, and 16 are 6, 6 and 4: fewer than 8 sums cannot hide their latency.
                4 | 7 | 8 => tile::<4>(p, lanes, rows, c, fade, d, out),
                5 => tile::<5>(p, lanes, rows, c, fade, d, out),
                _ => tile::<6>(p, lanes, rows, c, fade, d, out),
            };
        }
    }
    for c in d - d % 16..d {
        for h in 0..heads {
            let sum = p.iter().skip(h).step_by(lanes).zip(rows).fold(0.0f32, |sum, (p, row)| p.mul_add(row[c], sum));
            out[h * d + c] = fade[h].mul_add(out[h * d + c], sum);
        }
    }
}

/// Channels `c..c + 16` of the first `H` heads; returns `H`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const H: usize>(
    p: &[f32],
    lanes: usize,
    rows: &[&[f32]],
    c: usize,
    fade: &[f32],
    d: usize,
    out: &mut [f32],
) -> usize {
    assert!(c + 16 <= d && out.len() >= H * d && fade.len() >= H);
    assert!(rows.is_empty() || p.len() >= (rows.len() - 1) * lanes + H);
    let mut acc = [[_mm256_setzero_ps(); 2]; H];
    for (i, row) in rows.iter().enumerate() {
        assert!(row.len() == d);
        // SAFETY: c + 16 <= d, the length of the row.
        let x = unsafe { [_mm256_loadu_ps(row.as_ptr().add(c)), _mm256_loadu_ps(row.as_ptr().add(c + 8))] };
        for (h, acc) in acc.iter_mut().enumerate() {
            // SAFETY: h < H and i < rows.len(), so the index lies inside `p` (asserted above).
            let p = unsafe { _mm256_broadcast_ss(p.get_unchecked(i * lanes + h)) };
            acc[0] = _mm256_fmadd_ps(p, x[0], acc[0]);
            acc[1] = _mm256_fmadd_ps(p, x[1], acc[1]);
        }
    }
    for (h, acc) in acc.into_iter().enumerate() {
        for (half, acc) in acc.into_iter().enumerate() {
            // SAFETY: channels c..c + 16 of head h < H lie inside `out` (asserted above).
            unsafe {
                let out = out.as_mut_ptr().add(h * d + c + 8 * half);
                _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_set1_ps(fade[h]), _mm256_loadu_ps(out), acc));
            }
        }
    }
    H
}
