//! Products with AVX-512: 12 rows by 16 heads, the chains of AVX2 two registers at a time.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{LANES, avx2};

/// As [`avx2::products`], the same bits.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
pub(super) fn products(panel: &[f32], lanes: usize, channels: Range<usize>, rows: &[&[f32]], out: &mut [f32]) {
    if lanes != LANES {
        avx2::products(panel, lanes, channels, rows, out);
        return;
    }
    let mut i = 0;
    while i < rows.len() {
        let (rows, out) = (&rows[i..], &mut out[i * LANES..]);
        i += match rows.len() {
            12.. => tile::<12>(panel, &channels, rows, out),
            8.. => tile::<8>(panel, &channels, rows, out),
            4.. => tile::<4>(panel, &channels, rows, out),
            2.. => tile::<2>(panel, &channels, rows, out),
            _ => tile::<1>(panel, &channels, rows, out),
        };
    }
}

/// The first `ROWS` rows by 16 heads; returns `ROWS`.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn tile<const ROWS: usize>(panel: &[f32], channels: &Range<usize>, rows: &[&[f32]], out: &mut [f32]) -> usize {
    let rows = rows.first_chunk().expect("the caller has counted them");
    let sums = chains::<ROWS>(panel, channels.clone(), rows);
    assert!(out.len() >= ROWS * LANES);
    for (i, sum) in sums.into_iter().enumerate() {
        // SAFETY: `out` has ROWS · LANES numbers (asserted above).
        unsafe {
            let out = out.as_mut_ptr().add(i * LANES);
            let sum = if channels.start == 0 { sum } else { _mm512_add_ps(_mm512_loadu_ps(out), sum) };
            _mm512_storeu_ps(out, sum);
        }
    }
    ROWS
}

/// The loop where the time goes. On its own, so that the compiler keeps the sums in registers.
#[inline]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn chains<const ROWS: usize>(panel: &[f32], channels: Range<usize>, rows: &[&[f32]; ROWS]) -> [__m512; ROWS] {
    assert!(panel.len() >= channels.end * LANES && rows.iter().all(|row| row.len() >= channels.end));
    let mut acc = [_mm512_setzero_ps(); ROWS];
    for k in channels {
        // SAFETY: channel k < channels.end, so its lanes lie inside `panel` (asserted above).
        let q = unsafe { _mm512_loadu_ps(panel.as_ptr().add(k * LANES)) };
        for (acc, row) in acc.iter_mut().zip(rows) {
            // SAFETY: k < channels.end, at most the length of the row (asserted above).
            let x = unsafe { *row.get_unchecked(k) };
            *acc = _mm512_fmadd_ps(_mm512_set1_ps(x), q, *acc);
        }
    }
    acc
}
