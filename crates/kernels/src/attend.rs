//! Attention over rows that are key and value at once and shared by all heads (model spec, section 6).
//!
//! Each query is done alone, block by block of what it sees, with all its heads: a row that came to the cache with the
//! scores of its block is still there for the weighted sums. With all heads on it a row is used often enough that taking
//! several queries together gains nothing more; neighbouring queries find their window in the cache.
//!
//! Blocks of 60 rows are counted from the query's own first row, so its bits depend on nothing else.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use std::array;

use crate::heads::{LANES, pack, padded, panels, products};
use crate::level::{compiled_per_level, dispatch};
use crate::math::{exp, mul_add};
use crate::parallel::{Disjoint, run_tasks};
use crate::scratch::Scratch;
use crate::{CpuLevel, Ctx, RowList};

/// Rows of a block: sums over them are one chain. A multiple of the rows of a tile, 6 or 12.
const BLOCK: usize = 60;
/// Queries of a task: neighbours, which see nearly the same rows.
const QUERIES: usize = 8;

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
    let (groups, queries) = cut(ctx.par.threads(), rows, heads);
    let group = heads / groups;
    let out = Disjoint::new(out);
    run_tasks(ctx, rows.div_ceil(queries) * groups, |task| {
        let (first, group_idx) = (task / groups * queries, task % groups);
        for t in first..(first + queries).min(rows) {
            let start = t * width + group_idx * group * d;
            let range = start..start + group * d;
            // SAFETY: each task index is given out once; tasks differ in their queries or in their group of heads.
            let out = unsafe { out.piece(range.clone()) };
            let sink = &sink[group_idx * group..(group_idx + 1) * group];
            attend_heads(ctx.level, d, &q[range], sink, &visible(t), out);
        }
    });
}

/// Into how many groups heads are cut, and how many queries are one task. Heads of one query are divided only where
/// queries are too few for the threads, for each group reads all the rows.
fn cut(threads: usize, rows: usize, heads: usize) -> (usize, usize) {
    let wanted = 4 * threads;
    if threads <= 1 || rows >= wanted {
        return (1, QUERIES.min(rows / wanted).max(1));
    }
    let enough = (1..=heads / 8).find(|&groups| heads.is_multiple_of(groups) && groups * rows >= threads);
    (enough.unwrap_or(1), 1)
}

/// Some heads of one query.
fn attend_heads(level: CpuLevel, d: usize, q: &[f32], sink: &[f32], visible: &Visible, out: &mut [f32]) {
    assert!(visible.far.width() == d && visible.near.len().is_multiple_of(d), "visible rows must have {d} numbers");
    out.fill(0.0);
    let (heads, n) = (sink.len(), visible.len());
    if n == 0 {
        return;
    }
    let padded = padded(heads);
    let mut packed = Scratch::new(padded * d);
    pack(level, q, d, &mut packed);
    // Of each head: the largest score so far and the sum of the exponentials against it. The sink comes first.
    let mut state = Scratch::new(2 * padded);
    let (max, sum) = state.split_at_mut(padded);
    max[..heads].copy_from_slice(sink);
    max[heads..].fill(0.0);
    sum.fill(1.0);
    let scale = (1.0 / (d as f64).sqrt()) as f32;
    for first in (0..n).step_by(BLOCK) {
        let count = BLOCK.min(n - first);
        let rows: [&[f32]; BLOCK] = array::from_fn(|i| if i < count { visible.row(first + i) } else { &[] });
        let rows = &rows[..count];
        for (head, lanes) in panels(padded) {
            let (mut shares, mut fade) = ([0.0; BLOCK * LANES], [0.0; LANES]);
            let shares = &mut shares[..count * lanes];
            products(level, &packed[head * d..(head + lanes) * d], lanes, rows, shares);
            softmax(level, shares, lanes, scale, &mut max[head..head + lanes], &mut sum[head..head + lanes], &mut fade);
            let out = &mut out[head * d..heads.min(head + lanes) * d];
            dispatch!(
                level,
                scalar::add_weighted(shares, lanes, rows, d, &fade, out),
                avx2::add_weighted(shares, lanes, rows, d, &fade, out),
                avx512::add_weighted(shares, lanes, rows, d, &fade, out)
            );
        }
    }
    for (out, &sum) in out.chunks_exact_mut(d).zip(&*sum) {
        let share = 1.0 / sum;
        out.iter_mut().for_each(|x| *x *= share);
    }
}

compiled_per_level!(
    /// Takes one block of scores `[rows][lanes]` into the softmax of each lane: replaces `x` by `e^(x·scale - max)` with the
    /// new `max`, adds that to `sum`, and writes to `fade` by how much what was summed before is to be multiplied.
    fn softmax(
        scores: &mut [f32],
        lanes: usize,
        scale: f32,
        max: &mut [f32],
        sum: &mut [f32],
        fade: &mut [f32; LANES],
    ) => softmax_body
);

#[inline(always)]
fn softmax_body<const FMA: bool>(
    scores: &mut [f32],
    lanes: usize,
    scale: f32,
    max: &mut [f32],
    sum: &mut [f32],
    fade: &mut [f32; LANES],
) {
    let octets = max.as_chunks_mut::<8>().0.iter_mut().zip(sum.as_chunks_mut::<8>().0).zip(fade.as_chunks_mut::<8>().0);
    for (v, ((max, sum), fade)) in octets.enumerate() {
        let mut new = *max;
        for row in scores.as_chunks_mut::<8>().0.iter_mut().skip(v).step_by(lanes / 8) {
            for (x, new) in row.iter_mut().zip(&mut new) {
                *x *= scale;
                *new = if *x > *new { *x } else { *new };
            }
        }
        let mut added = [0.0f32; 8];
        for row in scores.as_chunks_mut::<8>().0.iter_mut().skip(v).step_by(lanes / 8) {
            for ((x, new), added) in row.iter_mut().zip(&new).zip(&mut added) {
                *x = exp::<FMA>(*x - new);
                *added += *x;
            }
        }
        for l in 0..8 {
            fade[l] = exp::<FMA>(max[l] - new[l]);
            sum[l] = mul_add::<FMA>(sum[l], fade[l], added[l]);
        }
        *max = new;
    }
}
