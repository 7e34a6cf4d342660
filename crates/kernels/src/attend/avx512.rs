//! The weighted sum with AVX-512: 8 heads by 32 channels at a time, the chains of AVX2 in wider registers.

use std::arch::x86_64::*;

use crate::heads::LANES;

/// As `add_weighted` with AVX2, the same bits.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
pub(super) fn add_weighted(p: &[f32], lanes: usize, rows: &[&[f32]], d: usize, fade: &[f32; LANES], out: &mut [f32]) {
    let heads = out.len() / d;
    for c in (0..d - d % 32).step_by(32) {
        let mut h = 0;
        while h < heads {
            let (p, fade, out) = (&p[h..], &fade[h..], &mut out[h * d..]);
            h += match heads - h {
                1 => tile::<1>(p, lanes, rows, c, fade, d, out),
                2 | 3 => tile::<2>(p, lanes, rows, c, fade, d, out),
                4..8 => tile::<4>(p, lanes, rows, c, fade, d, out),
                _ => tile::<8>(p, lanes, rows, c, fade, d, out),
            };
        }
    }
    for c in d - d % 32..d {
        for h in 0..heads {
            let sum = p.iter().skip(h).step_by(lanes).zip(rows).fold(0.0f32, |sum, (p, row)| p.mul_add(row[c], sum));
            out[h * d + c] = fade[h].mul_add(out[h * d + c], sum);
        }
    }
}

/// Channels `c..c + 32` of the first `H` heads; returns `H`.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn tile<const H: usize>(
    p: &[f32],
    lanes: usize,
    rows: &[&[f32]],
    c: usize,
    fade: &[f32],
    d: usize,
    out: &mut [f32],
) -> usize {
    assert!(c + 32 <= d && out.len() >= H * d && fade.len() >= H);
    assert!(rows.is_empty() || p.len() >= (rows.len() - 1) * lanes + H);
    let mut acc = [[_mm512_setzero_ps(); 2]; H];
    for (i, row) in rows.iter().enumerate() {
        assert!(row.len() == d);
        // SAFETY: c + 32 <= d, the length of the row.
        let x = unsafe { [_mm512_loadu_ps(row.as_ptr().add(c)), _mm512_loadu_ps(row.as_ptr().add(c + 16))] };
        for (h, acc) in acc.iter_mut().enumerate() {
            // SAFETY: h < H and i < rows.len(), so the index lies inside `p` (asserted above).
            let p = _mm512_set1_ps(unsafe { *p.get_unchecked(i * lanes + h) });
            acc[0] = _mm512_fmadd_ps(p, x[0], acc[0]);
            acc[1] = _mm512_fmadd_ps(p, x[1], acc[1]);
        }
    }
    for (h, acc) in acc.into_iter().enumerate() {
        for (half, acc) in acc.into_iter().enumerate() {
            // SAFETY: channels c..c + 32 of head h < H lie inside `out` (asserted above).
            unsafe {
                let out = out.as_mut_ptr().add(h * d + c + 16 * half);
                _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_set1_ps(fade[h]), _mm512_loadu_ps(out), acc));
            }
        }
    }
    H
}
