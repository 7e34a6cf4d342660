//! Panels and tiles with AVX2 and FMA. A tile of 6 rows by 16 outputs keeps its 12 sums in registers.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{BLOCK, STRIP, STRIPS, TILE_ROWS, XBlock};
use crate::CpuLevel;
use crate::formats::Matrix;

type Sums = [[f32; STRIPS * STRIP]; TILE_ROWS];

/// Decodes rows `w_rows` (at most 16) of `w` from `first_col` on into `panel` `[columns][16]`; missing rows are zero.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fill_panel(w: Matrix, w_rows: Range<usize>, first_col: usize, decoded: &mut [f32], panel: &mut [f32]) {
    let cols = panel.len() / STRIP;
    for half in 0..2 {
        for (j, row) in decoded.chunks_exact_mut(BLOCK).enumerate() {
            let j = half * 8 + j;
            if j < w_rows.len() {
                w.decode(CpuLevel::Avx2, w_rows.start + j, first_col, &mut row[..cols]);
            } else {
                row[..cols].fill(0.0);
            }
        }
        transpose(decoded, cols, half, panel);
    }
}

/// Writes `decoded` `[8][BLOCK]` to columns `8·half..8·half + 8` of `panel` `[cols][16]`.
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose(decoded: &[f32], cols: usize, half: usize, panel: &mut [f32]) {
    assert!(decoded.len() == 8 * BLOCK && panel.len() == cols * STRIP && cols <= BLOCK && half < 2);
    let mut k = 0;
    while k + 8 <= cols {
        // Rows j and j + 4 share a register from the start, so that only 4-lane shuffles remain.
        let load = |j: usize, k: usize| {
            // SAFETY: j + 4 < 8 and k + 4 <= BLOCK, so both quads lie inside `decoded`.
            unsafe {
                _mm256_loadu2_m128(decoded.as_ptr().add((j + 4) * BLOCK + k), decoded.as_ptr().add(j * BLOCK + k))
            }
        };
        for quad in [k, k + 4] {
            let [a, b, c, d] = [load(0, quad), load(1, quad), load(2, quad), load(3, quad)];
            let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let columns = [
                _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
                _mm256_shuffle_ps::<0xee>(ab_low, cd_low),
                _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
            ];
            for (i, column) in columns.into_iter().enumerate() {
                // SAFETY: column quad + i < cols, half < 2, so the 8 lanes lie inside `panel`.
                unsafe { _mm256_storeu_ps(panel.as_mut_ptr().add((quad + i) * STRIP + half * 8), column) };
            }
        }
        k += 8;
    }
    for k in k..cols {
        for j in 0..8 {
            panel[k * STRIP + half * 8 + j] = decoded[j * BLOCK + k];
        }
    }
}

/// `sums[r][n] = Σ x[r] · panel[n]` over one block of columns, for `rows` rows and `strips` panels.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply(x: XBlock, rows: usize, cols: usize, panels: &[f32], strips: usize, sums: &mut Sums) {
    match rows {
        1 => tiles::<1, 4>(x, cols, panels, strips, sums),
        2 => tiles::<2, 2>(x, cols, panels, strips, sums),
        3 => tiles::<3, 2>(x, cols, panels, strips, sums),
        4 => tiles::<4, 1>(x, cols, panels, strips, sums),
        5 => tiles::<5, 1>(x, cols, panels, strips, sums),
        6 => tiles::<6, 1>(x, cols, panels, strips, sums),
        _ => unreachable!("a tile has 1 to 6 rows"),
    }
}

/// Walks over the strips, `WIDE` at a time where there are enough: with few rows one strip has too few sums in flight
/// to hide the latency of a multiply-add.
#[target_feature(enable = "avx2,fma,f16c")]
fn tiles<const ROWS: usize, const WIDE: usize>(x: XBlock, cols: usize, panels: &[f32], strips: usize, sums: &mut Sums) {
    let mut strip = 0;
    while strip < strips {
        if strip + WIDE <= strips {
            tile::<ROWS, WIDE>(x, cols, &panels[strip * BLOCK * STRIP..], strip, sums);
            strip += WIDE;
        } else {
            tile::<ROWS, 1>(x, cols, &panels[strip * BLOCK * STRIP..], strip, sums);
            strip += 1;
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const ROWS: usize, const WIDE: usize>(x: XBlock, cols: usize, panels: &[f32], strip: usize, sums: &mut Sums) {
    let acc = match x.stride {
        None => chains::<ROWS, WIDE, true>(x.numbers, 0, cols, panels),
        Some(stride) => chains::<ROWS, WIDE, false>(x.numbers, stride, cols, panels),
    };
    for (sums, acc) in sums.iter_mut().zip(&acc) {
        for (s, acc) in acc.iter().enumerate() {
            for (half, &acc) in acc.iter().enumerate() {
                let lanes = &mut sums[(strip + s) * STRIP + 8 * half..][..8];
                // SAFETY: `lanes` is 8 numbers and `storeu` has no alignment requirement.
                unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), acc) };
            }
        }
    }
}

/// The chains of one block: the loop where the time goes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn chains<const ROWS: usize, const WIDE: usize, const PACKED: bool>(
    x: &[f32],
    stride: usize,
    cols: usize,
    panels: &[f32],
) -> [[[__m256; 2]; WIDE]; ROWS] {
    assert!(cols > 0 && panels.len() >= ((WIDE - 1) * BLOCK + cols) * STRIP);
    assert!(x.len() >= if PACKED { cols * ROWS } else { (ROWS - 1) * stride + cols });
    let mut acc = [[[_mm256_setzero_ps(); 2]; WIDE]; ROWS];
    for k in 0..cols {
        let mut w = [[_mm256_setzero_ps(); 2]; WIDE];
        for (s, w) in w.iter_mut().enumerate() {
            // SAFETY: s < WIDE and k < cols <= BLOCK, so the 16 numbers lie inside `panels` (asserted above).
            unsafe {
                let start = panels.as_ptr().add((s * BLOCK + k) * STRIP);
                *w = [_mm256_loadu_ps(start), _mm256_loadu_ps(start.add(8))];
            }
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            let i = if PACKED { k * ROWS + r } else { r * stride + k };
            // SAFETY: r < ROWS and k < cols, so `i` lies inside `x` (asserted above).
            let x = unsafe { _mm256_broadcast_ss(x.get_unchecked(i)) };
            for (acc, w) in acc.iter_mut().zip(&w) {
                acc[0] = _mm256_fmadd_ps(x, w[0], acc[0]);
                acc[1] = _mm256_fmadd_ps(x, w[1], acc[1]);
            }
        }
    }
    acc
}
