//! Attention with queries, rows and shares rounded ([`crate::int16`]): class `fast`.
//!
//! As in `f32`, each query is done alone in blocks of 60 rows counted from its first. Rows come rounded.

use std::ops::Range;

use super::{BLOCK, CHANNELS, FEW, QUERIES, finish, scale, softmax, start};
use crate::heads::{CHAIN, LANES, padded, panels};
use crate::int16::{CodedRows, PAIRS, Query, STEP, Shares, add_weighted, line_offset, pairs_of, prefetch, products};
use crate::parallel::{Disjoint, run_tasks};
use crate::scratch::Scratch;
use crate::{CpuLevel, Ctx};

/// The rows that queries see.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The windows of all queries.
    pub near: CodedRows<'a>,
    /// Rows of the same width.
    pub far: CodedRows<'a>,
}

/// Which of the rows one query sees, in the order in which they are summed.
#[derive(Clone, Debug)]
pub struct Seen<'a> {
    /// Of the near ones.
    pub near: Range<usize>,
    /// Of the far ones, after those.
    pub far: Far<'a>,
}

/// Which far rows a query sees.
#[derive(Clone, Copy, Debug)]
pub enum Far<'a> {
    /// So many, from the oldest on.
    First(usize),
    /// Those numbers, up to the first negative one.
    Chosen(&'a [i32]),
}

impl Seen<'_> {
    fn len(&self) -> usize {
        self.near.len()
            + match self.far {
                Far::First(n) => n,
                Far::Chosen(ids) => ids.iter().take_while(|&&id| id >= 0).count(),
            }
    }

    /// Calls `body` with each of the rows `range` of those and its place in the range.
    #[inline(always)]
    fn each_row<'a>(&self, rows: &Rows<'a>, range: Range<usize>, mut body: impl FnMut(usize, &'a [u32], &'a [f32])) {
        let (first, near) = (range.start, self.near.len());
        let split = near.clamp(range.start, range.end);
        for i in first..split {
            let (row, scales) = rows.near.row(self.near.start + i);
            body(i - first, row, scales);
        }
        match self.far {
            Far::First(_) => {
                for i in split..range.end {
                    let (row, scales) = rows.far.row(i - near);
                    body(i - first, row, scales);
                }
            }
            Far::Chosen(ids) => {
                for (i, id) in (split..range.end).zip(&ids[split - near.min(split)..]) {
                    let (row, scales) = rows.far.row(*id as usize);
                    body(i - first, row, scales);
                }
            }
        }
    }
}

/// As [`super::attend`], rounded.
///
/// - `q`    `[T, H·d]`, unscaled, rotated
/// - `sink` `[H]`
/// - `seen` the rows of query `t`
/// - `out`  `[T, H·d]`, overwritten
///
/// Accuracy: each output within `max|rows| · (e^(2δ) - 1 + 1/4094 + 60/32766)` of what [`super::attend`] promises, where `δ` is
/// the largest error of a score: the sum of `(max|row| / 4094 · Σ|q| + max|q| / 8190 · Σ|row|) / √d` over chains of 256
/// channels, and a little more.
///
/// # Panics
///
/// If the lengths disagree with the shapes above, a chosen row does not exist, or this CPU lacks the level.
pub fn attend_rounded<'a>(
    ctx: Ctx,
    q: &[f32],
    sink: &[f32],
    rows: &Rows,
    seen: impl Fn(usize) -> Seen<'a> + Sync,
    out: &mut [f32],
) {
    let d = rows.far.width();
    let (heads, width) = (sink.len(), sink.len() * d);
    assert!(width > 0 && q.len().is_multiple_of(width), "q must be [T, {heads} x {d}]");
    assert_eq!(out.len(), q.len(), "out must be [T, {heads} x {d}]");
    assert_eq!(rows.near.width(), d, "numbers of near and far rows");
    let (count, threads) = (q.len() / width, ctx.par.threads());
    if count < FEW * threads {
        return (0..count).for_each(|t| {
            let row = t * width..(t + 1) * width;
            attend_divided(ctx, &q[row.clone()], sink, rows, &seen(t), &mut out[row]);
        });
    }
    let queries = QUERIES.min(count / (4 * threads)).max(1);
    let out = Disjoint::new(out);
    run_tasks(ctx, count.div_ceil(queries), |task| {
        for t in task * queries..((task + 1) * queries).min(count) {
            let range = t * width..(t + 1) * width;
            // SAFETY: each task index is given out once, and tasks have different queries.
            let out = unsafe { out.piece(range.clone()) };
            attend_query(ctx.level, &q[range], sink, rows, &seen(t), out);
        }
    });
}

/// Up to [`BLOCK`] rounded rows, one after another.
struct Block<'a> {
    /// If there is an odd number of them, the last one comes twice.
    rows: [&'a [u32]; BLOCK],
    scales: [&'a [f32]; BLOCK],
    len: usize,
}

impl<'a> Block<'a> {
    /// The rows from `first` on that `seen` has, at most those before `end`.
    fn new(rows: &Rows<'a>, seen: &Seen, first: usize, end: usize) -> Self {
        const { assert!(BLOCK.is_multiple_of(2)) };
        let len = BLOCK.min(end - first);
        let mut block = Self { rows: [&[]; BLOCK], scales: [&[]; BLOCK], len };
        seen.each_row(rows, first..first + len, |i, row, scales| (block.rows[i], block.scales[i]) = (row, scales));
        if !len.is_multiple_of(2) {
            block.rows[len] = block.rows[len - 1];
        }
        block
    }

    fn rows(&self) -> &[&'a [u32]] {
        &self.rows[..self.len]
    }

    /// A whole number of pairs.
    fn row_pairs(&self) -> &[&'a [u32]] {
        &self.rows[..self.len.next_multiple_of(2)]
    }

    /// `[chains][BLOCK]`
    fn scales_of_chains(&self, out: &mut [f32]) {
        for (i, scales) in self.scales[..self.len].iter().enumerate() {
            out[i..].iter_mut().step_by(BLOCK).zip(*scales).for_each(|(out, scale)| *out = *scale);
        }
    }

    fn scales(&self, chain: usize) -> [f32; BLOCK] {
        let mut of_chain = [0.0; BLOCK];
        of_chain.iter_mut().zip(&self.scales[..self.len]).for_each(|(scale, scales)| *scale = scales[chain]);
        of_chain
    }
}

/// One query on the caller's thread.
fn attend_query(level: CpuLevel, q: &[f32], sink: &[f32], rows: &Rows, seen: &Seen, out: &mut [f32]) {
    let (d, n) = (rows.far.width(), seen.len());
    let (heads, padded, stride) = (sink.len(), padded(sink.len()), 2 * pairs_of(d));
    let query = Query::new(level, d, q);
    let mut state = Scratch::new(2 * padded);
    let (max, sum) = state.split_at_mut(padded);
    start(sink, max, sum);
    let mut total = Scratch::new(heads * stride + STEP);
    let offset = line_offset(&total);
    let total = &mut total[offset..offset + heads * stride];
    total.fill(0.0);
    let (mut shares, mut space, mut fade) = (Shares::default(), [0.0; BLOCK * LANES], [0.0; LANES]);
    let chains = d.div_ceil(CHAIN);
    let mut scales = Scratch::new(chains * BLOCK);
    for first in (0..n).step_by(BLOCK) {
        let block = Block::new(rows, seen, first, n);
        block.scales_of_chains(&mut scales);
        for (head, lanes) in panels(padded) {
            let scores = &mut space[..block.len * lanes];
            for (chain, scales) in scales.chunks_exact(BLOCK).enumerate() {
                let scales = &scales[..block.len];
                products(level, query.panel(head, lanes, chain), block.rows(), chain * PAIRS, scales, scores);
            }
            softmax(
                level,
                scores,
                lanes,
                scale(d),
                &mut max[head..head + lanes],
                &mut sum[head..head + lanes],
                &mut fade,
            );
            let total = &mut total[head * stride..heads.min(head + lanes) * stride];
            for (chain, scales) in scales.chunks_exact(BLOCK).enumerate() {
                let scales = &scales[..block.len];
                let pairs = chain * PAIRS..(stride / 2).min((chain + 1) * PAIRS);
                let total = &mut total[chain * CHAIN..];
                add_weighted(level, scores, block.row_pairs(), pairs, scales, &fade, &mut shares, stride, total);
            }
        }
    }
    for ((out, total), sum) in out.chunks_exact_mut(d).zip(total.chunks_exact(stride)).zip(sum) {
        let share = 1.0 / *sum;
        out.iter_mut().zip(total).for_each(|(out, total)| *out = total * share);
    }
}

/// One query on all threads: rows are divided for the scores, channels for the sums.
fn attend_divided(ctx: Ctx, q: &[f32], sink: &[f32], all: &Rows, seen: &Seen, out: &mut [f32]) {
    /// Rows of a task: two tiles. The second is asked for while the first is multiplied.
    const ROWS: usize = 2 * TILE;
    const TILE: usize = 12;
    let (heads, n, d, threads) = (sink.len(), seen.len(), all.far.width(), ctx.par.threads());
    let (padded, stride, chains) = (padded(heads), 2 * pairs_of(d), d.div_ceil(CHAIN));
    let query = Query::new(ctx.level, d, q);

    // `[panel][row][lane]`
    let mut scores = Scratch::new(padded * n);
    let pieces = Disjoint::new(&mut scores);
    run_tasks(ctx, n.div_ceil(ROWS), |task| {
        let end = n.min((task + 1) * ROWS);
        seen.each_row(all, task * ROWS..end, |_, row, _| prefetch(row));
        for first in (task * ROWS..end).step_by(TILE) {
            let block = Block::new(all, seen, first, end.min(first + TILE));
            for (head, lanes) in panels(padded) {
                let start = head * n + first * lanes;
                // SAFETY: each task index is given out once; tasks differ in their rows, panels do not overlap.
                let scores = unsafe { pieces.piece(start..start + block.len * lanes) };
                for chain in 0..chains {
                    let scales = &block.scales(chain)[..block.len];
                    products(ctx.level, query.panel(head, lanes, chain), block.rows(), chain * PAIRS, scales, scores);
                }
            }
        }
    });

    let (count, panel) = (padded.div_ceil(LANES), |i: usize| (i * LANES, LANES.min(padded - i * LANES)));
    let width = (CHAIN / threads.div_ceil(chains * count).next_power_of_two()).max(CHANNELS);
    let parts = stride.div_ceil(width);
    let out = Disjoint::new(out);
    run_tasks(ctx, parts * count, |task| {
        let (part, (head, lanes)) = (task % parts, panel(task / parts));
        let channels = part * width..stride.min((part + 1) * width);
        let (width, chain) = (channels.len(), channels.start / CHAIN);
        let sink = &sink[head..heads.min(head + lanes)];
        let (mut max, mut sum) = ([0.0; LANES], [0.0; LANES]);
        let (max, sum) = (&mut max[..lanes], &mut sum[..lanes]);
        start(sink, max, sum);
        let mut total = Scratch::new(sink.len() * width);
        total.fill(0.0);
        let mut shares = Shares::default();
        for first in (0..n).step_by(BLOCK) {
            let block = Block::new(all, seen, first, n);
            let mut p = [0.0; BLOCK * LANES];
            let p = &mut p[..block.len * lanes];
            p.copy_from_slice(&scores[head * n + first * lanes..][..block.len * lanes]);
            let mut fade = [0.0; LANES];
            softmax(ctx.level, p, lanes, scale(d), max, sum, &mut fade);
            let (pairs, scales) = (channels.start / 2..channels.end / 2, &block.scales(chain)[..block.len]);
            add_weighted(ctx.level, p, block.row_pairs(), pairs, scales, &fade, &mut shares, width, &mut total);
        }
        finish(sum, width, &mut total);
        for (h, total) in total.chunks_exact(width).enumerate() {
            let (first, end) = ((head + h) * d, channels.end.min(d));
            // SAFETY: each task index is given out once; tasks differ in their heads or in their channels.
            let out = unsafe { out.piece(first + channels.start..first + end) };
            out.copy_from_slice(&total[..end - channels.start]);
        }
    });
}
