//! Dot products of all heads of a query with scattered rows, each of which is key of all heads: attention and index scores.
//!
//! The query is packed once with its heads side by side, `[channel][heads]`, so that a row is read where it lies, once for
//! all heads, and its numbers are broadcast to their lanes. No sum crosses lanes.
//!
//! Arithmetic of one product, whatever its neighbours: channels are cut in absolute blocks of 256; a block is one chain of
//! multiply-adds from zero in channel order; block sums are added in order. Levels other than scalar give equal bits.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use crate::CpuLevel;
use crate::level::dispatch;

/// Heads of a panel; the last one has 8 if that is enough.
pub(crate) const LANES: usize = 16;
/// Channels of a chain.
pub(crate) const CHAIN: usize = 256;

/// Heads with those added that fill up the last panel.
pub(crate) fn padded(heads: usize) -> usize {
    heads.next_multiple_of(8)
}

/// The panels of `padded` heads: first head and lanes of each.
pub(crate) fn panels(padded: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..padded).step_by(LANES).map(move |first| (first, LANES.min(padded - first)))
}

/// Packs `q` `[H, d]` to `out` `[padded(H)·d]`: panels of `[d][lanes]` one after another, missing heads zero.
pub(crate) fn pack(level: CpuLevel, q: &[f32], d: usize, out: &mut [f32]) {
    assert!(d > 0 && q.len().is_multiple_of(d), "q must be [H, {d}]");
    let padded = padded(q.len() / d);
    assert_eq!(out.len(), padded * d, "room for {padded} heads");
    for (first, lanes) in panels(padded) {
        let (q, panel) = (&q[first * d..q.len().min((first + lanes) * d)], &mut out[first * d..(first + lanes) * d]);
        dispatch!(level, scalar::pack(q, d, lanes, panel), avx2::pack(q, d, lanes, panel));
    }
}

/// `out[i][lane] = panel[·][lane] · rows[i]`.
///
/// - `panel` `[d][lanes]`, one panel of [`pack`]
/// - `rows`  of `d`
/// - `out`   `[rows][lanes]`, overwritten
///
/// Accuracy: `(256 + d/256) · ε · Σ|q·row|` (twice that for [`CpuLevel::Scalar`]).
pub(crate) fn products(level: CpuLevel, panel: &[f32], lanes: usize, rows: &[&[f32]], out: &mut [f32]) {
    assert!((lanes == 8 || lanes == LANES) && panel.len().is_multiple_of(lanes), "a panel has 8 or {LANES} lanes");
    let d = panel.len() / lanes;
    assert!(rows.iter().all(|row| row.len() == d), "rows must have {d} numbers");
    assert_eq!(out.len(), rows.len() * lanes, "out must be [rows][{lanes}]");
    for first in (0..d).step_by(CHAIN) {
        let channels = first..(first + CHAIN).min(d);
        dispatch!(
            level,
            scalar::products(panel, lanes, channels, rows, out),
            avx2::products(panel, lanes, channels, rows, out),
            avx512::products(panel, lanes, channels, rows, out)
        );
    }
}
