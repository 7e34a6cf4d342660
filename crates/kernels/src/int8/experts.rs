//! Feed-forward experts with integer products: gate, up and activation in one pass, tokens sorted by expert.

use std::ops::Range;

use super::{
    Int8Matrix, Quantized, ROW_BLOCK, STRIP, copy_strip, for_strips, multiply_two, num_pieces, row_blocks, share,
};
use crate::Ctx;
use crate::experts::{Part, Parts, Shapes, Sorted, add_results, routed_widths, widths};
use crate::parallel::{Disjoint, run_in_order, run_tasks};
use crate::scratch::Scratch;
use crate::swiglu::swiglu_in_place;

/// Weights of one expert: `expert(x) = w2 · swiglu(w1 · x, w3 · x)`.
#[derive(Clone, Copy, Debug)]
pub struct Int8Expert<'a> {
    /// Gate, `[I, D]`.
    pub w1: &'a Int8Matrix,
    /// Down, `[D, I]`.
    pub w2: &'a Int8Matrix,
    /// Up, `[I, D]`.
    pub w3: &'a Int8Matrix,
}

impl Int8Expert<'_> {
    fn shapes(&self) -> Shapes {
        [self.w1, self.w3, self.w2].map(|w| (w.rows(), w.cols()))
    }
}

/// `out[t] = expert(x[t])` with activations and hidden rows rounded to eight bits.
///
/// - `x`   `[T, D]`
/// - `out` `[T, D]`, overwritten
///
/// Accuracy: that of its three products ([`super::matmul`]) and of [`crate::swiglu()`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn shared_expert(ctx: Ctx, x: &[f32], w: &Int8Expert, limit: Option<f32>, out: &mut [f32]) {
    let (dim, inner) = widths(w.shapes());
    assert_eq!(x.len(), out.len(), "x and out must be [T, {dim}]");
    let rows = out.len().checked_div(dim).unwrap_or(0);
    let starts = [0, rows];
    let parts = Parts::new(std::slice::from_ref(w), &starts);
    let row = |t: usize| &x[t * dim..(t + 1) * dim];
    run_parts(ctx, &parts, inner, dim, limit, row, |_| 1.0, out);
}

/// Adds `weight · expert(x)` of the experts `first..first + experts.len()` to the tokens routed to them, experts in
/// ascending order: a range of experts split over several calls gives the same bits. The weight is multiplied in
/// before `w2`, as in the official code.
///
/// - `x`       `[T, D]`
/// - `ids`     `[T, top_k]`; other experts' entries are skipped
/// - `weights` `[T, top_k]`
/// - `acc`     `[T, D]`, added to
///
/// Accuracy: that of the products and of [`crate::swiglu()`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above, or the experts have different shapes.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
pub fn routed_experts(
    ctx: Ctx,
    x: &[f32],
    ids: &[i32],
    weights: &[f32],
    top_k: usize,
    first: usize,
    experts: &[Int8Expert],
    limit: Option<f32>,
    acc: &mut [f32],
) {
    /// Rows (token and expert) computed together: bounds the scratch space while many experts keep all threads busy.
    const BATCH: usize = 1024;
    let shapes = experts.iter().map(|expert| expert.shapes());
    let Some((dim, inner)) = routed_widths(shapes, x, ids, weights, top_k, acc) else { return };
    let routes = Sorted::by_expert(ids, first, experts.len());
    for batch in routes.batches(BATCH) {
        let entries = routes.entries(batch.clone());
        let parts = Parts::new(&experts[batch.clone()], &routes.starts[batch.start..=batch.end]);
        let row = |r: usize| {
            let t = entries[r] / top_k;
            &x[t * dim..(t + 1) * dim]
        };
        let mut results = Scratch::new(entries.len() * dim);
        run_parts(ctx, &parts, inner, dim, limit, row, |r| weights[entries[r]], &mut results);
        add_results(ctx, entries, top_k, &results, dim, acc);
    }
}

/// Calls `body(part, strips)` for pieces of all parts. One part streams as any product does; several lie apart in memory,
/// so there threads take large pieces as they come.
fn for_pieces<'a>(
    ctx: Ctx,
    parts: &Parts<Int8Expert<'a>>,
    outputs: usize,
    cols: usize,
    body: impl Fn(Part<Int8Expert<'a>>, Range<usize>) + Sync,
) {
    let (count, strips) = (parts.len(), outputs.div_ceil(STRIP));
    let rows: usize = parts.iter().map(|part| part.rows.len()).sum();
    let all = num_pieces(ctx, strips * count, cols, rows * outputs * cols);
    if count == 1 {
        run_in_order(ctx, all, |i| body(parts.get(0), share(strips, all, i)));
    } else {
        // Few parts are cut more finely than many.
        let each = all.min(8 * ctx.par.threads()).div_ceil(count).clamp(1, strips.div_ceil(2).max(1));
        run_tasks(ctx, each * count, |i| body(parts.get(i / each), share(strips, each, i % each)));
    }
}

/// `out[r] = w2 · (factor(r) · swiglu(w1 · row(r), w3 · row(r)))` with the weights of the part that `r` belongs to.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
fn run_parts<'a>(
    ctx: Ctx,
    parts: &Parts<Int8Expert>,
    inner: usize,
    dim: usize,
    limit: Option<f32>,
    row: impl Fn(usize) -> &'a [f32] + Sync,
    factor: impl Fn(usize) -> f32 + Sync,
    out: &mut [f32],
) {
    let blocks = Scratch::collect(parts.iter().flat_map(|part| row_blocks(part.rows)));
    let rows = blocks.last().map_or(0, |block| block.end);
    if rows == 0 || dim == 0 {
        return;
    }
    let x = Quantized::new(ctx, &blocks, 1, dim, row);
    let mut hidden = Scratch::new(rows * inner);
    {
        let hidden = Disjoint::new(&mut hidden);
        for_pieces(ctx, parts, inner, 2 * dim, |Part { weights, rows }, strips| {
            let (mut gate, mut up) = ([[0.0; STRIP]; ROW_BLOCK], [[0.0; STRIP]; ROW_BLOCK]);
            for block in row_blocks(rows) {
                let (gate, up) = (&mut gate[..block.len()], &mut up[..block.len()]);
                for strip in strips.clone() {
                    let x = x.block(block.clone(), 0);
                    multiply_two(ctx, [&weights.w1.strip(strip), &weights.w3.strip(strip)], x, gate, up);
                    swiglu_in_place(ctx.level, gate.as_flattened_mut(), up.as_flattened(), limit, 1.0);
                    let first = strip * STRIP;
                    let count = STRIP.min(inner - first);
                    for (r, gate) in block.clone().zip(&*gate) {
                        // SAFETY: each strip of a part belongs to one piece, and parts have disjoint rows.
                        let hidden = unsafe { hidden.piece(r * inner + first..r * inner + first + count) };
                        hidden.iter_mut().zip(gate).for_each(|(hidden, x)| *hidden = x * factor(r));
                    }
                }
            }
        });
    }
    let x = Quantized::new(ctx, &blocks, 1, inner, |r| &hidden[r * inner..(r + 1) * inner]);
    let out = Disjoint::new(out);
    for_pieces(ctx, parts, dim, inner, |Part { weights, rows }, strips| {
        for block in row_blocks(rows) {
            for_strips(
                ctx,
                strips.clone(),
                &x,
                &block,
                |strip| (weights.w2.strip(strip), 0),
                |strip, sums| {
                    let first = strip * STRIP;
                    let count = STRIP.min(dim - first);
                    for (r, sums) in block.clone().zip(sums) {
                        // SAFETY: each strip of a part belongs to one piece, and parts have disjoint rows.
                        let out = unsafe { out.piece(r * dim + first..r * dim + first + count) };
                        copy_strip(sums, out);
                    }
                },
            );
        }
    });
}
