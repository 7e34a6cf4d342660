//! Hyper-connections: how the residual streams are mixed before and after a layer (model spec, 5.1 to 5.3).
//!
//! Streams are the widest rows of a step, so many tokens are done a few at a time, from the products to the collapsed row,
//! while they are in the cache. With few tokens the mixing matrix is what takes time, and its outputs are divided.
//!
//! Arithmetic of one product of the mixing matrix: channels are cut in absolute blocks of 1024; in a block, element `i`
//! goes to lane `i mod 8`, each lane is one chain of multiply-adds, lanes are added as a tree and the elements after the
//! last 8 in order; block sums are added in order.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use std::ops::Range;

use crate::level::{compiled_per_level, dispatch};
use crate::math::{exp, mul_add, sigmoid};
use crate::norm::rms_factor;
use crate::parallel::{Disjoint, for_each_row, run_tasks};
use crate::scratch::Scratch;
use crate::{CpuLevel, Ctx};

/// Most residual streams a model may have.
pub const MAX_STREAMS: usize = 8;
/// Channels of a block of a product.
const BLOCK: usize = 1024;
/// Rows and outputs of a tile of products.
const ROWS: usize = 6;
const OUTPUTS: usize = 4;
/// Tokens that a task takes from the products to the end.
const TOKENS: usize = 2 * ROWS;
/// Tokens whose coefficients are computed side by side.
const LANES: usize = 8;

/// The sums of a tile.
type Sums = [[f32; OUTPUTS]; ROWS];

/// Parameters of one hyper-connection. `S` streams of `D` channels.
#[derive(Clone, Copy, Debug)]
pub struct HcParams<'a> {
    /// `S`, at most [`MAX_STREAMS`].
    pub streams: usize,
    /// `D`.
    pub dim: usize,
    /// Column normalisations of the combination matrix, at least 1; row normalisations, after the softmax, are one
    /// fewer.
    pub sinkhorn_iters: usize,
    /// Added to `pre`, to the softmax and to its row and column sums.
    pub hc_eps: f32,
    /// Of the norm of all streams together.
    pub norm_eps: f32,
    /// `[(2 + S)·S, S·D]`; of the head `[S, S·D]`.
    pub fn_: &'a [f32],
    /// `[(2 + S)·S]`; of the head `[S]`.
    pub base: &'a [f32],
    /// `[3]`: of `pre`, `post`, `comb`; of the head `[1]`.
    pub scale: &'a [f32],
}

impl HcParams<'_> {
    fn check(&self, outputs: usize, scales: usize) {
        let (s, d) = (self.streams, self.dim);
        assert!(0 < s && s <= MAX_STREAMS && d > 0, "{s} streams of {d} channels");
        assert_eq!(self.fn_.len(), outputs * s * d, "fn must be [{outputs}, {s} x {d}]");
        assert_eq!(self.base.len(), outputs, "base must be [{outputs}]");
        assert_eq!(self.scale.len(), scales, "scale must be [{scales}]");
    }
}

/// What enters a layer, and how its result will be merged.
///
/// - `x`         `[T, S·D]`
/// - `collapsed` `[T, D]`, overwritten: `Σ_s pre[s] · x[s]`
/// - `mix`       `[T, S + S·S]`, overwritten: `post[k]`, then `comb[j, k]`, for [`hc_post`]
///
/// Accuracy: `mix` within `1e-6 · (1 + max(Σ|rms(x)·fn|·|scale| + |base|))` of [`crate::reference::hc_mix`],
/// `collapsed` within that times `Σ_s |x[s]|`.
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn hc_pre(ctx: Ctx, p: &HcParams, x: &[f32], collapsed: &mut [f32], mix: &mut [f32]) {
    let (s, d) = (p.streams, p.dim);
    let mut pre = Scratch::new(collapsed.len() / d * s);
    mix_and_collapse(ctx, p, x, &mut pre, mix, Some(collapsed));
}

/// The three groups of coefficients of [`hc_pre`], for looking at.
///
/// - `x`   `[T, S·D]`
/// - `pre` `[T, S]`, overwritten
/// - `mix` `[T, S + S·S]`, overwritten
///
/// Accuracy as `mix` of [`hc_pre`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn hc_mix(ctx: Ctx, p: &HcParams, x: &[f32], pre: &mut [f32], mix: &mut [f32]) {
    mix_and_collapse(ctx, p, x, pre, mix, None);
}

fn mix_and_collapse(
    ctx: Ctx,
    p: &HcParams,
    x: &[f32],
    pre: &mut [f32],
    mix: &mut [f32],
    collapsed: Option<&mut [f32]>,
) {
    let (s, d) = (p.streams, p.dim);
    let (outputs, mixes) = ((2 + s) * s, s + s * s);
    p.check(outputs, 3);
    assert!(p.sinkhorn_iters > 0, "at least one Sinkhorn iteration");
    let rows = pre.len() / s;
    assert_eq!(pre.len(), rows * s, "pre must be [T, {s}]");
    assert_eq!(mix.len(), rows * mixes, "mix must be [T, {s} + {s} x {s}]");
    assert_eq!(x.len(), rows * s * d, "x must be [T, {s} x {d}]");
    assert!(collapsed.as_ref().is_none_or(|out| out.len() == rows * d), "collapsed must be [T, {d}]");
    let (pre, mix) = (Disjoint::new(pre), Disjoint::new(mix));
    let collapsed = collapsed.map(Disjoint::new);
    each_logits(ctx, p, x, outputs, |tokens, logits| {
        let mut lanes = [[0.0; LANES]; (2 + MAX_STREAMS) * MAX_STREAMS];
        let lanes = &mut lanes[..outputs];
        for (first, logits) in tokens.clone().step_by(LANES).zip(logits.chunks(LANES * outputs)) {
            if logits.len() == outputs {
                // One token, as in a decode step: nothing is side by side.
                let mut one = [[0.0]; (2 + MAX_STREAMS) * MAX_STREAMS];
                coefficients_of(p, logits, &mut one[..outputs]);
                lanes.iter_mut().zip(one).for_each(|(lanes, [one])| lanes[0] = one);
            } else {
                coefficients(ctx.level, p, logits, lanes);
            }
            for (lane, t) in (first..tokens.end.min(first + LANES)).enumerate() {
                // SAFETY: each token is handed out once, so its rows are borrowed here only.
                let (pre, mix) = unsafe { (pre.piece(t * s..(t + 1) * s), mix.piece(t * mixes..(t + 1) * mixes)) };
                pre.iter_mut().chain(mix).zip(&*lanes).for_each(|(place, lanes)| *place = lanes[lane]);
                if let Some(collapsed) = &collapsed {
                    let x = &x[t * s * d..(t + 1) * s * d];
                    // SAFETY: as above.
                    weighted_sum(ctx.level, x, pre, unsafe { collapsed.piece(t * d..(t + 1) * d) });
                }
            }
        }
    });
}

/// Calls `body(tokens, logits)` for all tokens in pieces, maybe in parallel, with `rms(x) · fnᵀ` of these tokens,
/// `[tokens, outputs]`; the norm is folded into a factor.
fn each_logits(ctx: Ctx, p: &HcParams, x: &[f32], outputs: usize, body: impl Fn(Range<usize>, &[f32]) + Sync) {
    let width = p.streams * p.dim;
    let rows = x.len() / width;
    let scale = |tokens: Range<usize>, logits: &mut [f32]| {
        for (t, logits) in tokens.zip(logits.chunks_exact_mut(outputs)) {
            scale_by_rms(ctx.level, &x[t * width..(t + 1) * width], p.norm_eps, logits);
        }
    };
    if rows < TOKENS * ctx.par.threads() {
        let mut logits = Scratch::new(rows * outputs);
        logits.fill(0.0);
        let places = Disjoint::new(&mut logits);
        run_tasks(ctx, outputs.div_ceil(OUTPUTS), |quad| {
            let done = quad * OUTPUTS..outputs.min((quad + 1) * OUTPUTS);
            products(ctx, p, x, 0..rows, done, |t, done, sums| {
                let first = t * outputs;
                // SAFETY: each task index is given out once and has its own outputs.
                let logits = unsafe { places.piece(first + done.start..first + done.end) };
                logits.iter_mut().zip(sums).for_each(|(logit, sum)| *logit += sum);
            });
        });
        scale(0..rows, &mut logits);
        body(0..rows, &logits);
        return;
    }
    run_tasks(ctx, rows.div_ceil(TOKENS), |task| {
        let tokens = task * TOKENS..rows.min((task + 1) * TOKENS);
        let mut logits = Scratch::new(tokens.len() * outputs);
        logits.fill(0.0);
        products(ctx, p, x, tokens.clone(), 0..outputs, |t, done, sums| {
            let row = (t - tokens.start) * outputs;
            let logits = &mut logits[row + done.start..row + done.end];
            logits.iter_mut().zip(sums).for_each(|(logit, sum)| *logit += sum);
        });
        scale(tokens.clone(), &mut logits);
        body(tokens, &logits);
    });
}

/// Some outputs of the mixing matrix for some tokens: `add` gets a token, up to [`OUTPUTS`] outputs, and their sums over the next
/// block of channels. A few rows of the matrix stay in the cache while all tokens pass.
fn products(
    ctx: Ctx,
    p: &HcParams,
    x: &[f32],
    tokens: Range<usize>,
    outputs: Range<usize>,
    mut add: impl FnMut(usize, Range<usize>, &[f32]),
) {
    let width = p.streams * p.dim;
    for start in outputs.clone().step_by(OUTPUTS) {
        let done = start..outputs.end.min(start + OUTPUTS);
        for first in tokens.clone().step_by(ROWS) {
            let rows = ROWS.min(tokens.end - first);
            for block in (0..width).step_by(BLOCK) {
                let channels = block..width.min(block + BLOCK);
                let row = |i: usize| i * width + channels.start..i * width + channels.end;
                // A tile with fewer rows or outputs has the first one again in their place.
                let (mut tokens, mut w) = ([&x[row(first)]; ROWS], [&p.fn_[row(start)]; OUTPUTS]);
                tokens[..rows].iter_mut().enumerate().skip(1).for_each(|(i, token)| *token = &x[row(first + i)]);
                w[..done.len()].iter_mut().enumerate().skip(1).for_each(|(i, w)| *w = &p.fn_[row(start + i)]);
                let mut sums = Sums::default();
                // One or two tokens fill no wide registers.
                dispatch!(
                    if rows < 3 { ctx.level.min(CpuLevel::Avx2) } else { ctx.level },
                    scalar::dots(&tokens, rows, &w, &mut sums),
                    avx2::dots(&tokens, rows, &w, &mut sums),
                    avx512::dots(&tokens, rows, &w, &mut sums)
                );
                for (t, sums) in (first..first + rows).zip(&sums) {
                    add(t, done.clone(), &sums[..done.len()]);
                }
            }
        }
    }
}

compiled_per_level!(
    fn scale_by_rms(x: &[f32], eps: f32, logits: &mut [f32]) => scale_by_rms_body
);

#[inline(always)]
fn scale_by_rms_body<const FMA: bool>(x: &[f32], eps: f32, logits: &mut [f32]) {
    let factor = rms_factor::<FMA>(x, eps);
    logits.iter_mut().for_each(|x| *x *= factor);
}

compiled_per_level!(
    /// From the logits of up to [`LANES`] tokens, `[tokens, outputs]`, to `pre`, `post` and `comb`, `[outputs][LANES]`. The same
    /// arithmetic at every level: nothing is fused.
    fn coefficients(p: &HcParams, logits: &[f32], lanes: &mut [[f32; LANES]]) => coefficients_body
);

#[inline(always)]
fn coefficients_body<const FMA: bool>(p: &HcParams, logits: &[f32], lanes: &mut [[f32; LANES]]) {
    coefficients_of(p, logits, lanes);
}

#[inline(always)]
fn coefficients_of<const N: usize>(p: &HcParams, logits: &[f32], lanes: &mut [[f32; N]]) {
    let s = p.streams;
    for (i, lanes) in lanes.iter_mut().enumerate() {
        let (scale, base) = (p.scale[(i / s).min(2)], p.base[i]);
        for (lane, logits) in lanes.iter_mut().zip(logits.chunks_exact(p.base.len())) {
            *lane = logits[i] * scale + base;
        }
    }
    let (pre, rest) = lanes.split_at_mut(s);
    let (post, comb) = rest.split_at_mut(s);
    for (pre, post) in pre.iter_mut().zip(post) {
        for (pre, post) in pre.iter_mut().zip(post) {
            *pre = sigmoid::<false>(*pre) + p.hc_eps;
            *post = 2.0 * sigmoid::<false>(*post);
        }
    }
    balance(comb, s, p.sinkhorn_iters, p.hc_eps);
}

/// Turns logits `[S, S]` into a nearly doubly stochastic matrix, in place: softmax of each row plus `eps`, columns
/// divided by their sums, then `iters - 1` times rows and columns; each sum plus `eps`. Within 5e-7 of
/// [`crate::reference::sinkhorn`] for logits of a few units.
///
/// # Panics
///
/// If `comb` is not `[streams, streams]`.
pub fn sinkhorn(comb: &mut [f32], streams: usize, iters: usize, eps: f32) {
    assert_eq!(comb.len(), streams * streams, "comb must be [S, S]");
    balance(comb.as_chunks_mut::<1>().0, streams, iters, eps);
}

/// [`sinkhorn`] of `N` matrices side by side.
#[inline(always)]
fn balance<const N: usize>(comb: &mut [[f32; N]], s: usize, iters: usize, eps: f32) {
    for row in comb.chunks_exact_mut(s) {
        let mut max = [f32::NEG_INFINITY; N];
        for c in &*row {
            for (max, c) in max.iter_mut().zip(c) {
                *max = max.max(*c);
            }
        }
        for c in &mut *row {
            for (c, max) in c.iter_mut().zip(&max) {
                *c = exp::<false>(*c - max);
            }
        }
        let sum = sum_of(row, 1);
        for c in row {
            for (c, sum) in c.iter_mut().zip(&sum) {
                *c = *c / sum + eps;
            }
        }
    }
    divide_by_sums(comb, s, 1, s, eps);
    for _ in 1..iters {
        divide_by_sums(comb, s, s, 1, eps);
        divide_by_sums(comb, s, 1, s, eps);
    }
}

/// Divides the entries of rows, or of columns, by their sum plus `eps`: `groups` lists that begin `start` apart, of as many entries,
/// `step` apart.
#[inline(always)]
fn divide_by_sums<const N: usize>(comb: &mut [[f32; N]], groups: usize, start: usize, step: usize, eps: f32) {
    for group in 0..groups {
        let sum = sum_of(&comb[group * start..][..(groups - 1) * step + 1], step);
        for i in 0..groups {
            for (c, sum) in comb[group * start + i * step].iter_mut().zip(&sum) {
                *c /= sum + eps;
            }
        }
    }
}

#[inline(always)]
fn sum_of<const N: usize>(entries: &[[f32; N]], step: usize) -> [f32; N] {
    let mut sum = [-0.0; N];
    for i in (0..entries.len()).step_by(step) {
        for (sum, c) in sum.iter_mut().zip(&entries[i]) {
            *sum += c;
        }
    }
    sum
}

compiled_per_level!(
    /// `out = Σ_s factors[s] · x[s]`, streams in order.
    fn weighted_sum(x: &[f32], factors: &[f32], out: &mut [f32]) => weighted_sum_body
);

#[inline(always)]
fn weighted_sum_body<const FMA: bool>(x: &[f32], factors: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (x, &factor) in x.chunks_exact(out.len()).zip(factors) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = mul_add::<FMA>(factor, x, *out);
        }
    }
}

/// Merges the result of a layer into the streams, in place: `x[k] = post[k] · y + Σ_j comb[j, k] · x_old[j]`.
///
/// - `y`   `[T, D]`
/// - `mix` `[T, S + S·S]`, as [`hc_pre`] wrote it
/// - `x`   `[T, S·D]`
///
/// Accuracy: within `(S + 2) · ε · Σ|terms|` of [`crate::reference::hc_post`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn hc_post(ctx: Ctx, streams: usize, dim: usize, y: &[f32], mix: &[f32], x: &mut [f32]) {
    assert!(0 < streams && streams <= MAX_STREAMS, "{streams} streams");
    assert_eq!(x.len(), y.len() * streams, "x must be [T, {streams} x {dim}]");
    assert_eq!(mix.len() * dim, y.len() * (streams + streams * streams), "mix must be [T, {streams} + {streams}²]");
    for_each_row(ctx.light(x.len()), x, streams * dim, |t, x| {
        let mix = &mix[t * (streams + streams * streams)..(t + 1) * (streams + streams * streams)];
        merge(ctx.level, &y[t * dim..(t + 1) * dim], mix, x, streams);
    });
}

compiled_per_level!(
    fn merge(y: &[f32], mix: &[f32], x: &mut [f32], streams: usize) => merge_body
);

#[inline(always)]
fn merge_body<const FMA: bool>(y: &[f32], mix: &[f32], x: &mut [f32], streams: usize) {
    // Models have four; with their number known, old and new numbers stay in registers.
    match streams {
        4 => merge_streams::<FMA, 4>(y, mix, x, streams),
        _ => merge_streams::<FMA, MAX_STREAMS>(y, mix, x, streams),
    }
}

/// `streams` up to `S`.
#[inline(always)]
fn merge_streams<const FMA: bool, const S: usize>(y: &[f32], mix: &[f32], x: &mut [f32], streams: usize) {
    /// Channels at a time: all old streams are read before one is overwritten.
    const CHANNELS: usize = 16;
    let dim = y.len();
    let streams = streams.min(S);
    let (post, comb) = mix.split_at(streams);
    let whole = dim - dim % CHANNELS;
    for first in (0..dim).step_by(CHANNELS) {
        let count = if first < whole { CHANNELS } else { dim - whole };
        let (mut old, mut own) = ([[0.0f32; CHANNELS]; S], [0.0; CHANNELS]);
        for (j, old) in old.iter_mut().enumerate().take(streams) {
            old[..count].copy_from_slice(&x[j * dim + first..j * dim + first + count]);
        }
        own[..count].copy_from_slice(&y[first..first + count]);
        for k in 0..streams {
            let mut new = [0.0; CHANNELS];
            for (new, y) in new.iter_mut().zip(&own) {
                *new = post[k] * y;
            }
            for (j, old) in old.iter().enumerate().take(streams) {
                let c = comb[j * streams + k];
                for (new, &old) in new.iter_mut().zip(old) {
                    *new = mul_add::<FMA>(c, old, *new);
                }
            }
            x[k * dim + first..k * dim + first + count].copy_from_slice(&new[..count]);
        }
    }
}

/// Collapses the streams before the head: `out = Σ_s g[s] · x[s]`, `g[s] = sigmoid(rms(x) · fn[s] · scale + base[s]) +
/// hc_eps`.
///
/// - `p`   of the head: `fn` `[S, S·D]`, `base` `[S]`, `scale` `[1]`
/// - `x`   `[T, S·D]`
/// - `out` `[T, D]`, overwritten
///
/// Accuracy as `collapsed` of [`hc_pre`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn hc_head(ctx: Ctx, p: &HcParams, x: &[f32], out: &mut [f32]) {
    let s = p.streams;
    p.check(s, 1);
    let (d, width) = (p.dim, s * p.dim);
    assert_eq!(x.len(), out.len() * s, "x must be [T, {s} x {d}]");
    let out = Disjoint::new(out);
    each_logits(ctx, p, x, s, |tokens, logits| {
        for (t, logits) in tokens.zip(logits.chunks_exact(s)) {
            let mut factors = [0.0; MAX_STREAMS];
            for ((factor, logit), base) in factors.iter_mut().zip(logits).zip(p.base) {
                *factor = sigmoid::<false>(logit * p.scale[0] + base) + p.hc_eps;
            }
            // SAFETY: each token is handed out once, so its row is borrowed here only.
            let out = unsafe { out.piece(t * d..(t + 1) * d) };
            weighted_sum(ctx.level, &x[t * width..(t + 1) * width], &factors[..s], out);
        }
    });
}

/// `out[t] = mean over streams of x[t]`, what the drafter reads.
///
/// - `x`   `[T, S·D]`
/// - `out` `[T, D]`, overwritten
///
/// Accuracy: within `S · ε · Σ|x|` of [`crate::reference::stream_mean`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn stream_mean(ctx: Ctx, streams: usize, dim: usize, x: &[f32], out: &mut [f32]) {
    assert!(0 < streams && streams <= MAX_STREAMS, "{streams} streams");
    assert_eq!(x.len(), out.len() * streams, "x must be [T, {streams} x {dim}]");
    for_each_row(ctx.light(x.len()), out, dim, |t, out| {
        let x = &x[t * streams * dim..(t + 1) * streams * dim];
        weighted_sum(ctx.level, x, &[1.0; MAX_STREAMS][..streams], out);
        out.iter_mut().for_each(|x| *x /= streams as f32);
    });
}
