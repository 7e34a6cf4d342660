//! The lightning indexer: scores of compressed rows and the choice of the best (model spec, section 8).
//!
//! The work grows with the square of the context, so keys are read block by block for several queries at a time, and what
//! is kept of a block is one score for each query and key.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod rounded;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod vnni;

use std::array;
use std::cmp::Ordering;

use crate::heads::{LANES, pack, padded, panels, products};
use crate::level::compiled_per_level;
use crate::math::{max_nan, mul_add};
use crate::parallel::{Disjoint, for_each_row, run_tasks};
use crate::scratch::Scratch;
use crate::{CpuLevel, Ctx, RowList};
pub use rounded::{CodedKeys, KeyCodes};
use rounded::{PANEL, RoundedQuery};

/// Keys scored together. A multiple of the rows of a tile, 6 or 12.
const BLOCK: usize = 60;
/// Queries of a task, which read a block of keys one after another.
const QUERIES: usize = 4;
/// Blocks of a task where there are too few queries for the threads.
const SPAN: usize = 4;

/// The indexer of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Index<'a> {
    /// `Hi`
    pub heads: usize,
    /// How many keys are chosen, `k`.
    pub top_k: usize,
    /// Factor of the head weights: `1 / √(Hi · di)`.
    pub scale: f32,
    /// Rows of `di` numbers, oldest first.
    pub keys: Keys<'a>,
}

/// The keys in the form in which they are multiplied.
#[derive(Clone, Copy, Debug)]
pub enum Keys<'a> {
    /// Scores are computed in `f32`.
    Plain(RowList<'a>),
    /// Queries are rounded as the keys are: to eight bits, with one scale for each key and each head.
    Rounded(CodedKeys<'a>),
}

impl Keys<'_> {
    fn width(&self) -> usize {
        match self {
            Self::Plain(keys) => keys.width(),
            Self::Rounded(keys) => keys.width(),
        }
    }

    /// Keys scored together.
    fn block(&self) -> usize {
        match self {
            Self::Plain(_) => BLOCK,
            Self::Rounded(_) => 2 * PANEL,
        }
    }
}

/// For each query the best keys, as [`top_k`] of [`index_scores`].
///
/// - `iq`      `[T, Hi·di]`, rotated
/// - `iw`      `[T, Hi]`
/// - `visible` how many of the keys query `t` sees
/// - `ids`     `[T, k]`, overwritten
///
/// # Panics
///
/// If the lengths disagree with the shapes above, or there are fewer keys than a query sees.
pub fn index_topk(
    ctx: Ctx,
    index: &Index,
    iq: &[f32],
    iw: &[f32],
    visible: impl Fn(usize) -> usize + Sync,
    ids: &mut [i32],
) {
    let (heads, d, k) = (index.heads, index.keys.width(), index.top_k);
    let rows = ids.len() / k;
    assert_eq!(ids.len(), rows * k, "ids must be [T, {k}]");
    assert!(iq.len() == rows * heads * d && iw.len() == rows * heads, "iq must be [T, {heads} x {d}], iw [T, {heads}]");
    let most = (0..rows).map(&visible).max().unwrap_or(0);
    let query = |t: usize| Query::new(ctx.level, index, &iq[t * heads * d..][..heads * d], &iw[t * heads..][..heads]);
    let (block, span) = (index.keys.block(), SPAN * index.keys.block());
    if rows < ctx.par.threads() && most > span {
        // Too few queries: the keys are divided.
        let mut scores = Scratch::new(rows * most);
        let spans = most.div_ceil(span);
        let pieces = Disjoint::new(&mut scores);
        for t in 0..rows {
            let query = query(t);
            run_tasks(ctx, spans, |task| {
                let first = task * span;
                let end = visible(t).min(first + span);
                if first < end {
                    // SAFETY: each task index is given out once for each query, and tasks differ in their keys.
                    let out = unsafe { pieces.piece(t * most + first..t * most + end) };
                    query.score(ctx.level, &index.keys, first, out);
                }
            });
        }
        for_each_row(ctx, ids, k, |t, ids| top_k(&scores[t * most..][..visible(t)], ids));
        return;
    }
    let ids = Disjoint::new(ids);
    run_tasks(ctx, rows.div_ceil(QUERIES), |task| {
        let first = task * QUERIES;
        let count = QUERIES.min(rows - first);
        let seen: [usize; QUERIES] = array::from_fn(|i| if i < count { visible(first + i) } else { 0 });
        let most = seen.into_iter().max().unwrap_or(0);
        let mut scores = Scratch::new(count * most);
        // What all see needs no scores.
        if most > k {
            let queries: [Option<Query>; QUERIES] = array::from_fn(|i| (i < count).then(|| query(first + i)));
            for key in (0..most).step_by(block) {
                for (i, query) in queries.iter().enumerate() {
                    let end = seen[i].min(key + block);
                    if let Some(query) = query.as_ref().filter(|_| key < end) {
                        query.score(ctx.level, &index.keys, key, &mut scores[i * most + key..i * most + end]);
                    }
                }
            }
        }
        for i in 0..count {
            let t = first + i;
            // SAFETY: each task index is given out once, and tasks have different queries.
            let ids = unsafe { ids.piece(t * k..(t + 1) * k) };
            top_k(&scores[i * most..][..seen[i]], ids);
        }
    });
}

/// `out[w] = Σ_h iw[h] · scale · max(0, iq[h] · keys[w])` for one query: lane `h mod 8` of one sum each, then the lanes as a
/// tree.
///
/// - `iq`  `[Hi, di]`, rotated
/// - `iw`  `[Hi]`
/// - `out` one score for each of the first keys, overwritten
///
/// Accuracy: within `(256 + di/256 + Hi/8 + 8) · ε · Σ_h |iw[h] · scale| · Σ|iq·key|` of
/// [`crate::reference::index_scores`] (twice that for [`CpuLevel::Scalar`]).
///
/// # Panics
///
/// If the lengths disagree with the shapes above, or this CPU lacks `level`.
pub fn index_scores(level: CpuLevel, index: &Index, iq: &[f32], iw: &[f32], out: &mut [f32]) {
    let d = index.keys.width();
    assert!(iq.len() == index.heads * d && iw.len() == index.heads, "iq must be [{}, {d}], iw [Hi]", index.heads);
    Query::new(level, index, iq, iw).score(level, &index.keys, 0, out);
}

/// A query in the form in which it is multiplied.
enum Query {
    Plain { packed: Scratch<f32>, weights: Scratch<f32> },
    Rounded(RoundedQuery),
}

impl Query {
    fn new(level: CpuLevel, index: &Index, iq: &[f32], iw: &[f32]) -> Self {
        if matches!(index.keys, Keys::Rounded(_)) {
            return Self::Rounded(RoundedQuery::new(level, index, iq, iw));
        }
        let padded = padded(index.heads);
        let mut packed = Scratch::new(padded * index.keys.width());
        pack(level, iq, index.keys.width(), &mut packed);
        let mut weights = Scratch::new(padded);
        weights[index.heads..].fill(0.0);
        weights.iter_mut().zip(iw).for_each(|(weight, iw)| *weight = iw * index.scale);
        Self::Plain { packed, weights }
    }

    /// Scores of the keys from `first` on.
    fn score(&self, level: CpuLevel, keys: &Keys, first: usize, out: &mut [f32]) {
        match (self, keys) {
            (Self::Plain { packed, weights }, Keys::Plain(keys)) => score(level, packed, weights, *keys, first, out),
            (Self::Rounded(query), Keys::Rounded(keys)) => query.score(level, *keys, first, out),
            _ => unreachable!("queries and keys are made from one index"),
        }
    }
}

/// Scores of a packed query and the keys from `first` on.
fn score(level: CpuLevel, packed: &[f32], weights: &[f32], keys: RowList, first: usize, out: &mut [f32]) {
    let d = keys.width();
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let first = first + block * BLOCK;
        let rows: [&[f32]; BLOCK] = array::from_fn(|i| if i < out.len() { keys.row(first + i) } else { &[] });
        let mut sums = [[0.0; 8]; BLOCK];
        let mut space = [0.0; BLOCK * LANES];
        for (head, lanes) in panels(weights.len()) {
            let space = &mut space[..out.len() * lanes];
            products(level, &packed[head * d..(head + lanes) * d], lanes, &rows[..out.len()], space);
            weigh(level, space, &weights[head..head + lanes], &mut sums);
        }
        for (out, s) in out.iter_mut().zip(&sums) {
            *out = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
        }
    }
}

compiled_per_level!(
    /// `sums[w][h mod 8] += weights[h] · max(0, products[w][h])`, heads in order.
    fn weigh(products: &[f32], weights: &[f32], sums: &mut [[f32; 8]; BLOCK]) => weigh_body
);

#[inline(always)]
fn weigh_body<const FMA: bool>(products: &[f32], weights: &[f32], sums: &mut [[f32; 8]; BLOCK]) {
    for (products, sums) in products.chunks_exact(weights.len()).zip(sums) {
        for (products, weights) in products.as_chunks::<8>().0.iter().zip(weights.as_chunks::<8>().0) {
            for l in 0..8 {
                sums[l] = mul_add::<FMA>(max_nan(products[l], 0.0), weights[l], sums[l]);
            }
        }
    }
}

/// Fills `ids` with the numbers of the best scores, ascending; with all numbers and then -1 if there are not enough. Of
/// equal scores the lower number is better, which keeps the choice independent of chunking; NaN is worse than everything
/// else.
pub fn top_k(scores: &[f32], ids: &mut [i32]) {
    let (n, k) = (scores.len(), ids.len());
    assert!(i32::try_from(n).is_ok(), "ids must fit into 32 bits");
    if n <= k {
        ids.iter_mut().enumerate().for_each(|(i, id)| *id = if i < n { i as i32 } else { -1 });
        return;
    }
    if k == 0 {
        return;
    }
    let mut ranks = Scratch::new(n);
    ranks.iter_mut().zip(scores).for_each(|(rank, score)| *rank = sortable(*score));
    // Only what may be among the best is looked at closely.
    let mut close = Scratch::new(n);
    let mut count = above(&ranks, likely_bound(&ranks, k), &mut close);
    if count < k {
        count = above(&ranks, 0, &mut close);
    }
    let close = &close[..count];
    let mut sorted = Scratch::new(count);
    sorted.iter_mut().zip(close).for_each(|(place, &i)| *place = ranks[i as usize]);
    let (_, &mut last, better) = sorted.select_nth_unstable(count - k);
    let mut equal = k - better.iter().filter(|rank| **rank > last).count();
    let mut place = 0;
    for &i in close {
        // No branch on the rank, which nobody can predict: what is not taken is overwritten by the next.
        let Some(id) = ids.get_mut(place) else { break };
        *id = i;
        let rank = ranks[i as usize];
        let tie = usize::from(rank == last) & usize::from(equal > 0);
        place += usize::from(rank > last) | tie;
        equal -= tie;
    }
}

/// Writes the numbers of the ranks that are at least `bound` to `close` and returns how many they are.
fn above(ranks: &[u32], bound: u32, close: &mut [i32]) -> usize {
    let mut count = 0;
    for (i, &rank) in ranks.iter().enumerate() {
        close[count] = i as i32;
        count += usize::from(rank >= bound);
    }
    count
}

/// A rank that most likely more than `k` ranks reach, but not many more: from a sample, with three deviations to spare.
fn likely_bound(ranks: &[u32], k: usize) -> u32 {
    const SAMPLE: usize = 256;
    if ranks.len() < 2 * SAMPLE {
        return 0;
    }
    let mut sample: [u32; SAMPLE] = array::from_fn(|i| ranks[i * ranks.len() / SAMPLE]);
    let share = k as f32 / ranks.len() as f32;
    let reached = (share * SAMPLE as f32 + 3.0 * (share * (1.0 - share) * SAMPLE as f32).sqrt()) as usize + 1;
    if reached >= SAMPLE {
        return 0;
    }
    *sample.select_nth_unstable(SAMPLE - reached).1
}

/// An integer that is the larger the better the score.
fn sortable(score: f32) -> u32 {
    // Zeros of both signs are equal.
    let bits = (score + 0.0).to_bits();
    match bits {
        _ if score.is_nan() => 0,
        _ if bits >> 31 == 1 => !bits,
        _ => bits | 1 << 31,
    }
}

/// `Less` if `a` is the better score.
pub(crate) fn better(a: f32, b: f32) -> Ordering {
    b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}
