//! Attention over rows that are key and value at once and shared by all heads (model spec, section 6).
//!
//! Each query is done alone, block by block of what it sees, with all its heads: a row that came to the cache with the
//! scores of its block is still there for the weighted sums. With all heads on it a row is used often enough that taking
//! several queries together gains nothing more; neighbouring queries find their window in the cache.
//!
//! Blocks of 60 rows are counted from the query's own first row, so its bits depend on nothing else.
//!
//! Where queries are too few for the threads, as in a decode step, channels are divided instead: scores of each chain of
//! channels first, then each thread sums its channels of the rows, which it has in its cache from the scores. The
//! arithmetic is the same.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod rounded;
mod scalar;

pub use crate::int16::{CodedRows, RowCodes};
pub use rounded::{Far, Rows, Seen, attend_rounded};

use std::array;
use std::ops::Range;

use crate::heads::{CHAIN, LANES, pack, padded, panels, products};
use crate::level::dispatch;
use crate::math::{exp, mul_add};
use crate::parallel::{Disjoint, run_tasks};
use crate::scratch::Scratch;
use crate::{CpuLevel, Ctx, RowList};

/// Rows of a block: sums over them are one chain. A multiple of the rows of a tile, 6 or 12.
const BLOCK: usize = 60;
/// Queries of a task: neighbours, which see nearly the same rows.
const QUERIES: usize = 8;
/// Fewer queries than this for each thread are divided.
const FEW: usize = 2;
/// Fewest channels of a task.
const CHANNELS: usize = 64;

/// The rows that one query sees, in the order in which they are summed; there may be none.
#[derive(Clone, Copy, Debug)]
pub struct Visible<'a> {
    /// `[n, d]`: the window, oldest first.
    pub near: &'a [f32],
    /// Rows of `d` after those.
    pub far: RowList<'a>,
    /// Which of `far`: numbers up to the first negative one. All, if there is no such list.
    pub chosen: Option<&'a [i32]>,
}

impl<'a> Visible<'a> {
    fn len(&self) -> usize {
        let far = self.chosen.map_or(self.far.len(), |ids| ids.iter().take_while(|&&id| id >= 0).count());
        self.near.len() / self.far.width() + far
    }

    fn row(&self, i: usize) -> &'a [f32] {
        let d = self.far.width();
        match i.checked_sub(self.near.len() / d) {
            None => &self.near[i * d..(i + 1) * d],
            Some(i) => self.far.row(self.chosen.map_or(i, |ids| ids[i] as usize)),
        }
    }

    /// `channels` of a block's rows, the first of which is `first` of `n`; empty ones after the last.
    fn block(&self, first: usize, n: usize, channels: Range<usize>) -> [&'a [f32]; BLOCK] {
        array::from_fn(|i| if first + i < n { &self.row(first + i)[channels.clone()] } else { &[] })
    }
}

/// `out[t, h] = Σ_i p[t, h, i] · row[t, i]` with `p[t, h] = softmax` of `q[t, h] · row[t, i] / √d` over the rows that query
/// `t` sees and the sink together, whose share is dropped. Without rows the result is zero.
///
/// - `q`       `[T, H·d]`, unscaled, rotated
/// - `sink`    `[H]`
/// - `visible` the rows of query `t`
/// - `out`     `[T, H·d]`, overwritten
///
/// Accuracy: each output within `4 · (n/16 + 256 + d/256 + 68) · ε · max|rows| · (1 + max_i Σ|q·row|/√d)` of
/// [`crate::reference::attend_row`] for `n` visible rows (twice that for [`CpuLevel::Scalar`]).
///
/// # Panics
///
/// If the lengths disagree with the shapes above, a chosen row does not exist, or this CPU lacks the level.
pub fn attend<'a>(
    ctx: Ctx,
    d: usize,
    q: &[f32],
    sink: &[f32],
    visible: impl Fn(usize) -> Visible<'a> + Sync,
    out: &mut [f32],
) {
    let heads = sink.len();
    let width = heads * d;
    assert!(width > 0 && q.len().is_multiple_of(width), "q must be [T, {heads} x {d}]");
    assert_eq!(out.len(), q.len(), "out must be [T, {heads} x {d}]");
    let rows = q.len() / width;
    let seen = |t| {
        let visible = visible(t);
        assert!(visible.far.width() == d && visible.near.len().is_multiple_of(d), "visible rows must have {d} numbers");
        visible
    };
    let threads = ctx.par.threads();
    if threads > 1 && rows < FEW * threads {
        return (0..rows).for_each(|t| {
            let row = t * width..(t + 1) * width;
            attend_divided(ctx, d, &q[row.clone()], sink, &seen(t), &mut out[row]);
        });
    }
    let queries = QUERIES.min(rows / (4 * threads)).max(1);
    let out = Disjoint::new(out);
    run_tasks(ctx, rows.div_ceil(queries), |task| {
        for t in task * queries..((task + 1) * queries).min(rows) {
            let range = t * width..(t + 1) * width;
            // SAFETY: each task index is given out once, and tasks have different queries.
            let out = unsafe { out.piece(range.clone()) };
            attend_query(ctx.level, d, &q[range], sink, &seen(t), out);
        }
    });
}

/// One query on the caller's thread.
fn attend_query(level: CpuLevel, d: usize, q: &[f32], sink: &[f32], visible: &Visible, out: &mut [f32]) {
    let (heads, n) = (sink.len(), visible.len());
    let padded = padded(heads);
    let mut packed = Scratch::new(padded * d);
    pack(level, q, d, &mut packed);
    let mut state = Scratch::new(2 * padded);
    let (max, sum) = state.split_at_mut(padded);
    start(sink, max, sum);
    out.fill(0.0);
    for first in (0..n).step_by(BLOCK) {
        let rows = visible.block(first, n, 0..d);
        let rows = &rows[..BLOCK.min(n - first)];
        for (head, lanes) in panels(padded) {
            let mut scores = [0.0; BLOCK * LANES];
            let scores = &mut scores[..rows.len() * lanes];
            products(level, &packed[head * d..(head + lanes) * d], lanes, rows, scores);
            let (max, sum) = (&mut max[head..head + lanes], &mut sum[head..head + lanes]);
            add_block(level, scale(d), scores, max, sum, rows, &mut out[head * d..heads.min(head + lanes) * d]);
        }
    }
    finish(sum, d, out);
}

/// One query on all threads: chains of channels (and, if threads are more, rows) are divided for the scores, channels for
/// the sums.
fn attend_divided(ctx: Ctx, d: usize, q: &[f32], sink: &[f32], visible: &Visible, out: &mut [f32]) {
    let (heads, n, level, threads) = (sink.len(), visible.len(), ctx.level, ctx.par.threads());
    let padded = padded(heads);
    let (chains, panels) = (d.div_ceil(CHAIN), padded.div_ceil(LANES));
    let panel = |index: usize| (index * LANES, LANES.min(padded - index * LANES));
    let mut packed = Scratch::new(padded * d);
    pack(level, q, d, &mut packed);

    // `[chain][panel][row][lane]`
    let mut sums = Scratch::new(chains * padded * n);
    let blocks = n.div_ceil(BLOCK).max(1);
    let span = blocks.div_ceil(threads.div_ceil(chains * panels).min(blocks)) * BLOCK;
    let pieces = Disjoint::new(&mut sums);
    run_tasks(ctx, chains * panels * n.div_ceil(span), |task| {
        let (chain, (head, lanes), first) =
            (task % chains, panel(task / chains % panels), task / chains / panels * span);
        let channels = chain * CHAIN..d.min((chain + 1) * CHAIN);
        let packed = &packed[head * d + channels.start * lanes..head * d + channels.end * lanes];
        for first in (first..n.min(first + span)).step_by(BLOCK) {
            let rows = visible.block(first, n, channels.clone());
            let rows = &rows[..BLOCK.min(n - first)];
            let start = (chain * padded + head) * n + first * lanes;
            // SAFETY: each task index is given out once; tasks differ in their chain, their panel or their rows.
            let sums = unsafe { pieces.piece(start..start + rows.len() * lanes) };
            products(level, packed, lanes, rows, sums);
        }
    });

    let width = (CHAIN / threads.div_ceil(chains * panels).next_power_of_two()).max(CHANNELS);
    let parts = d.div_ceil(width);
    let out = Disjoint::new(out);
    run_tasks(ctx, parts * panels, |task| {
        let (part, (head, lanes)) = (task % parts, panel(task / parts));
        let channels = part * width..d.min((part + 1) * width);
        let width = channels.len();
        let sink = &sink[head..heads.min(head + lanes)];
        let (mut max, mut sum) = ([0.0; LANES], [0.0; LANES]);
        let (max, sum) = (&mut max[..lanes], &mut sum[..lanes]);
        start(sink, max, sum);
        let mut result = Scratch::new(sink.len() * width);
        result.fill(0.0);
        for first in (0..n).step_by(BLOCK) {
            let rows = visible.block(first, n, channels.clone());
            let rows = &rows[..BLOCK.min(n - first)];
            let mut scores = [0.0; BLOCK * LANES];
            let scores = &mut scores[..rows.len() * lanes];
            for chain in 0..chains {
                let sums = &sums[(chain * padded + head) * n + first * lanes..][..scores.len()];
                match chain {
                    0 => scores.copy_from_slice(sums),
                    _ => scores.iter_mut().zip(sums).for_each(|(score, sum)| *score += sum),
                }
            }
            add_block(level, scale(d), scores, max, sum, rows, &mut result);
        }
        finish(sum, width, &mut result);
        for (h, result) in result.chunks_exact(width).enumerate() {
            let first = (head + h) * d;
            // SAFETY: each task index is given out once; tasks differ in their heads or in their channels.
            let out = unsafe { out.piece(first + channels.start..first + channels.end) };
            out.copy_from_slice(result);
        }
    });
}

/// `1 / √d`
fn scale(d: usize) -> f32 {
    (1.0 / (d as f64).sqrt()) as f32
}

/// Of each head the largest score so far and the sum of the exponentials against it. The sink comes first.
fn start(sink: &[f32], max: &mut [f32], sum: &mut [f32]) {
    max[..sink.len()].copy_from_slice(sink);
    max[sink.len()..].fill(0.0);
    sum.fill(1.0);
}

/// Adds a block of rows with their scores `[rows][lanes]` to `out` `[heads of the panel][channels of the rows]`.
fn add_block(
    level: CpuLevel,
    scale: f32,
    scores: &mut [f32],
    max: &mut [f32],
    sum: &mut [f32],
    rows: &[&[f32]],
    out: &mut [f32],
) {
    let (lanes, d) = (max.len(), rows[0].len());
    let mut fade = [0.0; LANES];
    softmax(level, scores, lanes, scale, max, sum, &mut fade);
    dispatch!(
        level,
        scalar::add_weighted(scores, lanes, rows, d, &fade, out),
        avx2::add_weighted(scores, lanes, rows, d, &fade, out),
        avx512::add_weighted(scores, lanes, rows, d, &fade, out)
    );
}

/// Divides each row of `d` by its head's sum.
fn finish(sum: &[f32], d: usize, out: &mut [f32]) {
    for (out, &sum) in out.chunks_exact_mut(d).zip(sum) {
        let share = 1.0 / sum;
        out.iter_mut().for_each(|x| *x *= share);
    }
}

/// Takes one block of scores `[rows][lanes]` into the softmax of each lane: replaces `x` by `e^(x·scale - max)` with the
/// new `max`, adds that to `sum`, and writes to `fade` by how much what was summed before is to be multiplied.
fn softmax(
    level: CpuLevel,
    scores: &mut [f32],
    lanes: usize,
    scale: f32,
    max: &mut [f32],
    sum: &mut [f32],
    fade: &mut [f32; LANES],
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn eight(s: &mut [f32], lanes: usize, scale: f32, max: &mut [f32], sum: &mut [f32], fade: &mut [f32; LANES]) {
        softmax_body::<true, 8>(s, lanes, scale, max, sum, fade);
    }
    /// The same arithmetic for each lane.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    fn sixteen(s: &mut [f32], lanes: usize, scale: f32, max: &mut [f32], sum: &mut [f32], fade: &mut [f32; LANES]) {
        match lanes {
            LANES => softmax_body::<true, LANES>(s, lanes, scale, max, sum, fade),
            _ => softmax_body::<true, 8>(s, lanes, scale, max, sum, fade),
        }
    }
    dispatch!(
        level,
        softmax_body::<false, 8>(scores, lanes, scale, max, sum, fade),
        eight(scores, lanes, scale, max, sum, fade),
        sixteen(scores, lanes, scale, max, sum, fade)
    );
}

#[inline(always)]
fn softmax_body<const FMA: bool, const N: usize>(
    scores: &mut [f32],
    lanes: usize,
    scale: f32,
    max: &mut [f32],
    sum: &mut [f32],
    fade: &mut [f32; LANES],
) {
    let groups = max.as_chunks_mut::<N>().0.iter_mut().zip(sum.as_chunks_mut::<N>().0).zip(fade.as_chunks_mut::<N>().0);
    for (v, ((max, sum), fade)) in groups.enumerate() {
        let mut new = *max;
        for row in scores.as_chunks_mut::<N>().0.iter_mut().skip(v).step_by(lanes / N) {
            for (x, new) in row.iter_mut().zip(&mut new) {
                *x *= scale;
                *new = if *x > *new { *x } else { *new };
            }
        }
        let mut added = [0.0f32; N];
        for row in scores.as_chunks_mut::<N>().0.iter_mut().skip(v).step_by(lanes / N) {
            for ((x, new), added) in row.iter_mut().zip(&new).zip(&mut added) {
                *x = exp::<FMA>(*x - new);
                *added += *x;
            }
        }
        for l in 0..N {
            fade[l] = exp::<FMA>(max[l] - new[l]);
            sum[l] = mul_add::<FMA>(sum[l], fade[l], added[l]);
        }
        *max = new;
    }
}
