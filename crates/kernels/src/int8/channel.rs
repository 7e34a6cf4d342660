//! Products of some output channels, written where the channels of the whole product belong: what one of several engines
//! does of an operation that is shared among them.

use std::ops::Range;

use super::{Int8Matrix, Quantized, STRIP, copy_strip, for_strips, num_pieces, row_blocks, share};
use crate::Ctx;
use crate::parallel::{Disjoint, run_in_order};
use crate::scratch::Scratch;

/// True if a product of `outputs` channels may be cut before `channel`.
pub fn is_cut(channel: usize, outputs: usize) -> bool {
    channel == outputs || (channel < outputs && channel.is_multiple_of(STRIP))
}

/// The output channels `channels` of each group of [`super::grouped_matmul`], with the same bits.
///
/// - `x`   `[T, groups·w.cols()]`
/// - `w`   `[groups·r, w.cols()]`
/// - `out` `[T·groups]` pieces of `channels.len()` numbers, overwritten: piece `t·groups + g` holds `channels` of group `g`
///
/// Accuracy as [`super::matmul`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above, or the product may not be cut where `channels` begin or end
/// ([`is_cut`]).
pub fn channels_matmul(
    ctx: Ctx,
    x: &[f32],
    groups: usize,
    w: &Int8Matrix,
    channels: Range<usize>,
    out: &mut [&mut [f32]],
) {
    assert!(groups > 0 && w.rows().is_multiple_of(groups), "{} rows do not make {groups} groups", w.rows());
    let (width, per_group) = (groups * w.cols(), w.rows() / groups);
    let rows = out.len() / groups;
    assert_eq!(out.len(), rows * groups, "out must be [T, {groups}] pieces");
    assert_eq!(x.len(), rows * width, "x must be [T, {width}] with T = {rows}");
    assert!(groups == 1 || per_group.is_multiple_of(STRIP), "groups of {per_group} outputs do not fill strips");
    assert!(
        channels.start <= channels.end && is_cut(channels.start, per_group) && is_cut(channels.end, per_group),
        "no cut of {per_group} channels: {channels:?}"
    );
    assert!(out.iter().all(|piece| piece.len() == channels.len()), "pieces must hold {} channels", channels.len());
    if rows == 0 || channels.is_empty() {
        return;
    }
    let blocks = Scratch::collect(row_blocks(0..rows));
    let each = channels.len().div_ceil(STRIP);
    let strips = groups * each;
    let pieces = num_pieces(ctx, strips, w.cols(), groups * channels.len() * rows * w.cols());
    let out: Vec<Disjoint<f32>> = out.iter_mut().map(|piece| Disjoint::new(piece)).collect();
    let quantized = Quantized::new(ctx, &blocks, groups, w.cols(), |t| &x[t * width..(t + 1) * width]);
    run_in_order(ctx, pieces, |piece| {
        for block in &*blocks {
            let place = |strip: usize| (strip / each, strip % each * STRIP);
            let strip_of = |strip: usize| {
                let (group, first) = place(strip);
                (w.strip((group * per_group + channels.start + first) / STRIP), group)
            };
            for_strips(ctx, share(strips, pieces, piece), &quantized, block, strip_of, |strip, sums| {
                let (group, first) = place(strip);
                let count = STRIP.min(channels.len() - first);
                for (t, sums) in block.clone().zip(sums) {
                    // SAFETY: each strip of a group belongs to one piece, and a strip of a row is written once.
                    let out = unsafe { out[t * groups + group].piece(first..first + count) };
                    copy_strip(sums, out);
                }
            });
        }
    });
}
