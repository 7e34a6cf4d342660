//! Attention of one query position over gathered rows that are key and value at once (model spec, section 6).

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;

use crate::CpuLevel;
use crate::dot::dots;
use crate::level::{compiled_per_level, dispatch};
use crate::math::{exp, lane_max, lane_sum};

/// Visible rows that are summed in one chain; sums of blocks are added in order.
const BLOCK: usize = 256;

/// `out[h] = Σ_i p[h, i] · rows[i]` with `p[h] = softmax` of `q[h] · rows[i] / √d` over all rows and the sink together,
/// whose share is dropped. Heads are independent: a caller may split them over threads.
///
/// - `q`       `[H, d]`, unscaled, rotated
/// - `rows`    the visible rows of `d` numbers, in the order in which they are to be summed (window rows by position,
///   then compressed rows); an empty list gives zeros
/// - `sink`    `[H]`
/// - `scratch` grown as needed, contents irrelevant
/// - `out`     `[H, d]`, overwritten
///
/// Accuracy: each output within `4 · (n/256 + 256 + d/8 + 4) · ε · max|rows| · (1 + max_i Σ|q·rows[i]|/√d)` of
/// [`crate::reference::attend_row`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above, or this CPU lacks `level`.
pub fn attend_row(
    level: CpuLevel,
    q: &[f32],
    heads: usize,
    rows: &[&[f32]],
    sink: &[f32],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    assert!(heads > 0 && q.len().is_multiple_of(heads) && !q.is_empty(), "q must be [{heads}, d]");
    let d = q.len() / heads;
    assert_eq!(sink.len(), heads, "sink must be [H]");
    assert_eq!(out.len(), q.len(), "out must be [H, d]");
    assert!(rows.iter().all(|row| row.len() == d), "rows must have {d} numbers");
    level.assert_available();
    out.fill(0.0);
    if rows.is_empty() {
        return;
    }
    let n = rows.len();
    // Only the numbers written below are read.
    if scratch.len() < heads * (n + 1) {
        scratch.resize(heads * (n + 1), 0.0);
    }
    let (scores, rest) = scratch.split_at_mut(heads * n);
    let shares = &mut rest[..heads];
    dots(level, q, d, rows, scores, n);
    softmax_rows(level, scores, n, (1.0 / (d as f64).sqrt()) as f32, sink, shares);
    for (block, rows) in rows.chunks(BLOCK).enumerate() {
        let scores = &scores[block * BLOCK..];
        dispatch!(level, scalar::add_weighted(scores, n, rows, d, out), avx2::add_weighted(scores, n, rows, d, out));
    }
    for (out, &share) in out.chunks_exact_mut(d).zip(&*shares) {
        out.iter_mut().for_each(|x| *x *= share);
    }
}

compiled_per_level!(
    /// Replaces each row `x` of `scores` `[H, n]` by `e^(x·scale - max)` and writes `1 / (their sum + sink term)`.
    fn softmax_rows(scores: &mut [f32], n: usize, scale: f32, sink: &[f32], shares: &mut [f32]) => softmax_body
);

#[inline(always)]
fn softmax_body<const FMA: bool>(scores: &mut [f32], n: usize, scale: f32, sink: &[f32], shares: &mut [f32]) {
    for ((scores, &sink), share) in scores.chunks_exact_mut(n).zip(sink).zip(shares) {
        for x in scores.iter_mut() {
            *x *= scale;
        }
        let max = lane_max(scores).max(sink);
        for x in scores.iter_mut() {
            *x = exp::<FMA>(*x - max);
        }
        *share = 1.0 / (lane_sum(scores, |sum, x| sum + x) + exp::<FMA>(sink - max));
    }
}
