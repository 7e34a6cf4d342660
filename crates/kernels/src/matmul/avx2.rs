//! Panels and tiles with AVX2 and FMA. A tile of 6 rows by 16 outputs keeps its 12 sums in registers.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{BLOCK, STRIP, STRIPS, Sums, XBlock};
use crate::CpuLevel;
use crate::formats::Matrix;

/// Decodes rows `w_rows` (at most 16) of `w` from `first_col` on into `panel` `[columns][16]`; missing rows are zero.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fill_panel(w: Matrix, w_rows: Range<usize>, first_col: usize, decoded: &mut [f32], panel: &mut [f32]) {
    let cols = panel.len() / STRIP;
    for half in 0..2 {
        for (j, row) in decoded.chunks_exact_mut(BLOCK).enumerate() {
            let j = half * 8 + j;
            if j < w_rows.len() {
                w.decode(CpuLevel::Avx2, w_rows.start + j, first_col, &mut row[..cols]);
                prefetch_next(w, w_rows.start + j, first_col, STRIPS * STRIP);
            } else {
                row[..cols].fill(0.0);
            }
        }
        transpose(decoded, cols, half, panel);
    }
}

/// Asks for what will be read in the place of this row next: the next block of columns, or after the last one the row
/// `rows` further down. Rows lie too far apart for the CPU to guess.
fn prefetch_next(w: Matrix, row: usize, first_col: usize, rows: usize) {
    if first_col + BLOCK < w.cols() {
        w.prefetch(row, first_col + BLOCK, BLOCK);
    } else {
        w.prefetch(row + rows, 0, BLOCK);
    }
}

/// Writes `decoded` `[8][BLOCK]` to columns `8·half..8·half + 8` of `panel` `[cols][16]`.
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose(decoded: &[f32], cols: usize, half: usize, panel: &mut [f32]) {
    assert!(panel.len() == cols * STRIP && cols <= BLOCK && half < 2);
    let (rows, _) = decoded.as_chunks::<BLOCK>();
    let rows: &[[f32; BLOCK]; 8] = rows.try_into().expect("8 rows");
    let whole = cols - cols % 8;
    for k in (0..whole).step_by(8) {
        for (i, column) in eight_columns(rows, k).into_iter().enumerate() {
            // SAFETY: column k + i < cols and half < 2, so the 8 lanes lie inside `panel` (asserted above).
            unsafe { _mm256_storeu_ps(panel.as_mut_ptr().add((k + i) * STRIP + half * 8), column) };
        }
    }
    for k in whole..cols {
        for (j, row) in rows.iter().enumerate() {
            panel[k * STRIP + half * 8 + j] = row[k];
        }
    }
}

/// Columns `k..k + 8` of 8 rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight_columns(rows: &[[f32; BLOCK]; 8], k: usize) -> [__m256; 8] {
    assert!(k + 8 <= BLOCK);
    // Rows j and j + 4 share a register from the start, so that only shuffles inside of 4 lanes remain.
    let load = |j: usize, k: usize| {
        let (low, high) = (&rows[j], &rows[j + 4]);
        // SAFETY: k + 4 <= BLOCK (asserted above), so both quads lie inside their rows.
        unsafe { _mm256_loadu2_m128(high.as_ptr().add(k), low.as_ptr().add(k)) }
    };
    let quad = |k: usize| {
        let [a, b, c, d] = [load(0, k), load(1, k), load(2, k), load(3, k)];
        let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        [
            _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
            _mm256_shuffle_ps::<0xee>(ab_low, cd_low),
            _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
            _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
        ]
    };
    let ([a, b, c, d], [e, f, g, h]) = (quad(k), quad(k + 4));
    [a, b, c, d, e, f, g, h]
}

/// The sums of one block of columns for one or two rows of `x` and up to 32 rows `w_rows` of `w`: the same chains as
/// [`multiply`], without a panel. `decoded` has room for `[32][BLOCK]`.
#[target_feature(enable = "avx2,fma,f16c")]
#[expect(clippy::too_many_arguments, reason = "decoding and multiplying in one step")]
pub(super) fn multiply_few(
    x: XBlock,
    rows: usize,
    cols: usize,
    w: Matrix,
    w_rows: Range<usize>,
    first_col: usize,
    decoded: &mut [f32],
    sums: &mut Sums,
) {
    let octets = w_rows.len().div_ceil(8);
    let (decoded, _) = decoded.as_chunks_mut::<BLOCK>();
    for (j, row) in decoded[..8 * octets].iter_mut().enumerate() {
        if j < w_rows.len() {
            w.decode(CpuLevel::Avx2, w_rows.start + j, first_col, &mut row[..cols]);
            prefetch_next(w, w_rows.start + j, first_col, 2 * STRIP);
        } else {
            row[..cols].fill(0.0);
        }
    }
    let stride = x.stride.expect("few rows are not packed");
    let (octets, _) = decoded[..8 * octets].as_chunks::<8>();
    match (rows, octets) {
        (1, [a, b, c, d]) => few_chains::<1, 4>(x.numbers, stride, cols, [a, b, c, d], 0, sums),
        (2, [a, b, c, d]) => few_chains::<2, 4>(x.numbers, stride, cols, [a, b, c, d], 0, sums),
        (1, octets) => {
            for (i, octet) in octets.iter().enumerate() {
                few_chains::<1, 1>(x.numbers, stride, cols, [octet], 8 * i, sums);
            }
        }
        (2, octets) => {
            for (i, octet) in octets.iter().enumerate() {
                few_chains::<2, 1>(x.numbers, stride, cols, [octet], 8 * i, sums);
            }
        }
        _ => unreachable!("one or two rows"),
    }
}

/// Chains of `OCTETS` times 8 outputs, from output `first` of `sums` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn few_chains<const ROWS: usize, const OCTETS: usize>(
    x: &[f32],
    stride: usize,
    cols: usize,
    octets: [&[[f32; BLOCK]; 8]; OCTETS],
    first: usize,
    sums: &mut Sums,
) {
    let x: [&[f32]; ROWS] = std::array::from_fn(|r| &x[r * stride..][..cols]);
    let mut acc = [[_mm256_setzero_ps(); OCTETS]; ROWS];
    let whole = cols - cols % 8;
    for k in (0..whole).step_by(8) {
        let x: [&[f32; 8]; ROWS] = std::array::from_fn(|r| x[r][k..].first_chunk().expect("k + 8 <= cols"));
        for (o, octet) in octets.iter().enumerate() {
            for (i, column) in eight_columns(octet, k).into_iter().enumerate() {
                for (acc, x) in acc.iter_mut().zip(x) {
                    acc[o] = _mm256_fmadd_ps(_mm256_broadcast_ss(&x[i]), column, acc[o]);
                }
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (o, &acc) in acc.iter().enumerate() {
            let out: &mut [f32; 8] = sums.0[r][first + 8 * o..].first_chunk_mut().expect("32 outputs");
            // SAFETY: `out` is 8 numbers and `storeu` has no alignment requirement.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), acc) };
            for k in whole..cols {
                for (out, row) in out.iter_mut().zip(octets[o]) {
                    *out = x[r][k].mul_add(row[k], *out);
                }
            }
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
    for (sums, acc) in sums.0.iter_mut().zip(&acc) {
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
