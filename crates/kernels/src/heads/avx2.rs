//! Packing and products with AVX2 and FMA: 6 rows by 16 heads, or 12 rows by 8 heads, with 12 sums in registers.

use std::arch::x86_64::*;
use std::ops::Range;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack(q: &[f32], d: usize, lanes: usize, panel: &mut [f32]) {
    assert!(panel.len() == lanes * d && lanes.is_multiple_of(8));
    let heads = q.len() / d;
    let whole = d - d % 8;
    for first in (0..lanes).step_by(8) {
        if first + 8 <= heads {
            for k in (0..whole).step_by(8) {
                // SAFETY: heads first..first + 8 have channels k..k + 8.
                let columns = unsafe { eight_columns(q.as_ptr().add(first * d + k), d) };
                for (i, column) in columns.into_iter().enumerate() {
                    // SAFETY: channel k + i < d and first + 8 <= lanes, so the lanes lie inside `panel`.
                    unsafe { _mm256_storeu_ps(panel.as_mut_ptr().add((k + i) * lanes + first), column) };
                }
            }
        }
        let plain = if first + 8 <= heads { whole } else { 0 };
        for k in plain..d {
            for h in first..first + 8 {
                panel[k * lanes + h] = if h < heads { q[h * d + k] } else { 0.0 };
            }
        }
    }
}

/// Columns of 8 rows by 8 columns; rows are `stride` numbers apart.
///
/// # Safety
///
/// All 64 numbers must be readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn eight_columns(start: *const f32, stride: usize) -> [__m256; 8] {
    // Rows j and j + 4 share a register from the start, so that only shuffles inside of 4 lanes remain.
    let quad = |k: usize| {
        let [a, b, c, d] = std::array::from_fn(|j| {
            // SAFETY: the caller's promise; k is 0 or 4.
            unsafe { _mm256_loadu2_m128(start.add((j + 4) * stride + k), start.add(j * stride + k)) }
        });
        let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        [
            _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
            _mm256_shuffle_ps::<0xee>(ab_low, cd_low),
            _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
            _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
        ]
    };
    let ([a, b, c, d], [e, f, g, h]) = (quad(0), quad(4));
    [a, b, c, d, e, f, g, h]
}

/// The chains of one block of channels, written or (after the first block) added to `out`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn products(panel: &[f32], lanes: usize, channels: Range<usize>, rows: &[&[f32]], out: &mut [f32]) {
    let mut i = 0;
    while i < rows.len() {
        let (rows, out) = (&rows[i..], &mut out[i * lanes..]);
        i += match (lanes, rows.len()) {
            (8, 12..) => tile::<1, 12>(panel, &channels, rows, out),
            (8, 6..) => tile::<1, 6>(panel, &channels, rows, out),
            (8, 3..) => tile::<1, 3>(panel, &channels, rows, out),
            (8, _) => tile::<1, 1>(panel, &channels, rows, out),
            (_, 6..) => tile::<2, 6>(panel, &channels, rows, out),
            (_, 4..) => tile::<2, 4>(panel, &channels, rows, out),
            (_, 2..) => tile::<2, 2>(panel, &channels, rows, out),
            _ => tile::<2, 1>(panel, &channels, rows, out),
        };
    }
}

/// The first `ROWS` rows by `8 · VECS` heads; returns `ROWS`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const VECS: usize, const ROWS: usize>(
    panel: &[f32],
    channels: &Range<usize>,
    rows: &[&[f32]],
    out: &mut [f32],
) -> usize {
    let rows = rows.first_chunk().expect("the caller has counted them");
    let sums = chains::<VECS, ROWS>(panel, channels.clone(), rows);
    assert!(out.len() >= ROWS * 8 * VECS);
    for (i, sums) in sums.into_iter().enumerate() {
        for (v, sum) in sums.into_iter().enumerate() {
            // SAFETY: `out` has ROWS · VECS · 8 numbers (asserted above).
            unsafe {
                let out = out.as_mut_ptr().add((i * VECS + v) * 8);
                let sum = if channels.start == 0 { sum } else { _mm256_add_ps(_mm256_loadu_ps(out), sum) };
                _mm256_storeu_ps(out, sum);
            }
        }
    }
    ROWS
}

/// The loop where the time goes. On its own, so that the compiler keeps the sums in registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn chains<const VECS: usize, const ROWS: usize>(
    panel: &[f32],
    channels: Range<usize>,
    rows: &[&[f32]; ROWS],
) -> [[__m256; VECS]; ROWS] {
    assert!(panel.len() >= channels.end * 8 * VECS && rows.iter().all(|row| row.len() >= channels.end));
    let mut acc = [[_mm256_setzero_ps(); VECS]; ROWS];
    for k in channels {
        let mut q = [_mm256_setzero_ps(); VECS];
        for (v, q) in q.iter_mut().enumerate() {
            // SAFETY: channel k < channels.end, so its lanes lie inside `panel` (asserted above).
            *q = unsafe { _mm256_loadu_ps(panel.as_ptr().add((k * VECS + v) * 8)) };
        }
        for (acc, row) in acc.iter_mut().zip(rows) {
            // SAFETY: k < channels.end, at most the length of the row (asserted above).
            let x = unsafe { _mm256_broadcast_ss(row.get_unchecked(k)) };
            for (acc, &q) in acc.iter_mut().zip(&q) {
                *acc = _mm256_fmadd_ps(x, q, *acc);
            }
        }
    }
    acc
}
