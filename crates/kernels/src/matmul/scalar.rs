//! Panels and tiles in plain Rust.

use std::ops::Range;

use super::{BLOCK, STRIP, Sums, XBlock};
use crate::CpuLevel;
use crate::formats::Matrix;

/// Decodes rows `w_rows` (at most 16) of `w` from `first_col` on into `panel` `[columns][16]`; missing rows are zero.
pub(super) fn fill_panel(w: Matrix, w_rows: Range<usize>, first_col: usize, decoded: &mut [f32], panel: &mut [f32]) {
    let cols = panel.len() / STRIP;
    let decoded = &mut decoded[..cols];
    for j in 0..STRIP {
        if j < w_rows.len() {
            w.decode(CpuLevel::Scalar, w_rows.start + j, first_col, decoded);
        } else {
            decoded.fill(0.0);
        }
        for (out, &w) in panel[j..].iter_mut().step_by(STRIP).zip(&*decoded) {
            *out = w;
        }
    }
}

/// `sums[r][n] = Σ x[r] · panel[n]` over one block of columns, for `rows` rows and `strips` panels.
pub(super) fn multiply(x: XBlock, rows: usize, cols: usize, panels: &[f32], strips: usize, sums: &mut Sums) {
    for (r, sums) in sums.0[..rows].iter_mut().enumerate() {
        let (sums, _) = sums.as_chunks_mut::<STRIP>();
        for (sum, panel) in sums[..strips].iter_mut().zip(panels.chunks_exact(BLOCK * STRIP)) {
            *sum = [0.0; STRIP];
            for (k, w) in panel.as_chunks::<STRIP>().0[..cols].iter().enumerate() {
                let x = x.numbers[x.stride.map_or(k * rows + r, |stride| r * stride + k)];
                for (sum, w) in sum.iter_mut().zip(w) {
                    *sum += x * w;
                }
            }
        }
    }
}

/// The sums of one block of columns for a few rows of `x` and up to 32 rows `w_rows` of `w`: the same chains as
/// [`multiply`], without a panel.
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
    let stride = x.stride.expect("few rows are not packed");
    let decoded = &mut decoded[..cols];
    for (j, row) in w_rows.enumerate() {
        w.decode(CpuLevel::Scalar, row, first_col, decoded);
        for (r, sums) in sums.0[..rows].iter_mut().enumerate() {
            let x = &x.numbers[r * stride..][..cols];
            sums[j] = x.iter().zip(&*decoded).fold(0.0, |sum, (x, w)| sum + x * w);
        }
    }
}
