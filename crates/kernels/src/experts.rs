//! Feed-forward experts: the shared one and the routed ones (model spec, section 9).

use std::ops::Range;

use troika_base::StoredTensor;

use crate::Ctx;
use crate::formats::Matrix;
use crate::matmul::{Job, run_jobs};
use crate::parallel::{Disjoint, for_each_row};
use crate::swiglu::swiglu_in_place;

/// Weights of one expert: `expert(x) = w2 · swiglu(w1 · x, w3 · x)`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertWeights<'a> {
    /// Gate, `[I, D]`.
    pub w1: &'a StoredTensor,
    /// Down, `[D, I]`.
    pub w2: &'a StoredTensor,
    /// Up, `[I, D]`.
    pub w3: &'a StoredTensor,
}

impl ExpertWeights<'_> {
    fn check(&self, dim: usize) -> usize {
        hidden_width([self.w1, self.w3, self.w2].map(|w| (w.rows(), w.cols())), dim)
    }
}

/// `I` of an expert whose `w1`, `w3`, `w2` have these rows and columns.
///
/// # Panics
///
/// If they do not belong to one expert of width `dim`.
pub(crate) fn hidden_width(shapes: [(usize, usize); 3], dim: usize) -> usize {
    let inner = shapes[0].0;
    assert_eq!(shapes, [(inner, dim), (inner, dim), (dim, inner)], "w1 and w3 must be [I, {dim}], w2 [{dim}, I]");
    inner
}

/// `out[t] = expert(x[t])`.
///
/// - `x`   `[T, D]`
/// - `out` `[T, D]`, overwritten
///
/// Accuracy: that of its three products and of [`crate::swiglu()`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn shared_expert(ctx: Ctx, x: &[f32], w: &ExpertWeights, limit: Option<f32>, out: &mut [f32]) {
    let dim = w.w2.rows();
    let inner = w.check(dim);
    assert_eq!(x.len(), out.len(), "x and out must be [T, {dim}]");
    let rows = out.len().checked_div(dim).unwrap_or(0);
    let part = Part { weights: *w, rows: 0..rows };
    let mut hidden = vec![0.0; rows * inner];
    let parts = [part];
    hidden_rows(ctx, x, &parts, inner, limit, |_| 1.0, &mut hidden);
    down_rows(ctx, &hidden, &parts, inner, dim, out);
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
    experts: &[ExpertWeights],
    limit: Option<f32>,
    acc: &mut [f32],
) {
    /// Rows (token and expert) computed together: bounds the scratch space while many experts keep all threads busy.
    const BATCH: usize = 512;
    assert_eq!(x.len(), acc.len(), "x and acc must be [T, D]");
    assert!(ids.len() == weights.len(), "ids and weights must be [T, {top_k}]");
    let Some(expert) = experts.first() else { return };
    let dim = expert.w2.rows();
    let tokens = acc.len().checked_div(dim).unwrap_or(0);
    assert_eq!(acc.len(), tokens * dim, "acc must be [T, {dim}]");
    assert_eq!(ids.len(), tokens * top_k, "ids must be [{tokens}, {top_k}]");
    let inner = expert.check(dim);
    experts.iter().for_each(|expert| assert_eq!(expert.check(dim), inner, "experts must have one shape"));

    let routes = Routes::new(ids, top_k, first, experts.len());
    for batch in routes.batches(BATCH) {
        let (entries, start) = (routes.entries(batch.clone()), routes.starts[batch.start]);
        let parts: Vec<Part> = batch
            .map(|e| Part { weights: experts[e], rows: routes.starts[e] - start..routes.starts[e + 1] - start })
            .collect();
        run_batch(ctx, x, weights, entries, &parts, inner, top_k, limit, acc);
    }
}

/// Which (token, choice) pairs go to each expert.
pub(crate) struct Routes {
    /// Indices into `ids`, by expert, ascending.
    entries: Vec<usize>,
    /// `entries[starts[e]..starts[e + 1]]` belong to expert `first + e`.
    pub(crate) starts: Vec<usize>,
}

impl Routes {
    /// Sorts the choices by expert (a counting sort, so tokens stay in order).
    pub(crate) fn new(ids: &[i32], top_k: usize, first: usize, experts: usize) -> Self {
        debug_assert!(top_k == 0 || ids.len().is_multiple_of(top_k));
        let local = |id: i32| usize::try_from(id).ok().and_then(|id| id.checked_sub(first)).filter(|&e| e < experts);
        let mut starts = vec![0; experts + 1];
        for e in ids.iter().filter_map(|&id| local(id)) {
            starts[e + 1] += 1;
        }
        for e in 0..experts {
            starts[e + 1] += starts[e];
        }
        let mut next = starts.clone();
        let mut entries = vec![0; starts[experts]];
        for (i, e) in ids.iter().enumerate().filter_map(|(i, &id)| Some((i, local(id)?))) {
            entries[next[e]] = i;
            next[e] += 1;
        }
        Self { entries, starts }
    }

    /// Ranges of experts that have at least one entry, of up to `most` entries each where one expert alone has no more.
    pub(crate) fn batches(&self, most: usize) -> Vec<Range<usize>> {
        let experts = self.starts.len() - 1;
        let mut batches = Vec::new();
        let mut first = 0;
        while first < experts {
            let mut end = first + 1;
            while end < experts && self.starts[end + 1] - self.starts[first] <= most {
                end += 1;
            }
            if self.starts[end] > self.starts[first] {
                batches.push(first..end);
            }
            first = end;
        }
        batches
    }

    /// Entries of a range of experts.
    pub(crate) fn entries(&self, experts: Range<usize>) -> &[usize] {
        &self.entries[self.starts[experts.start]..self.starts[experts.end]]
    }
}

/// For each token its rows among `entries`, in ascending order of experts.
pub(crate) fn rows_of_tokens(entries: &[usize], top_k: usize, tokens: usize) -> Vec<Vec<usize>> {
    let mut rows_of = vec![Vec::new(); tokens];
    for (r, entry) in entries.iter().enumerate() {
        rows_of[entry / top_k].push(r);
    }
    rows_of
}

/// The rows of a batch that belong to one expert.
struct Part<'a> {
    weights: ExpertWeights<'a>,
    rows: Range<usize>,
}

#[expect(clippy::too_many_arguments, reason = "the second half of `routed_experts`")]
fn run_batch(
    ctx: Ctx,
    x: &[f32],
    weights: &[f32],
    entries: &[usize],
    parts: &[Part],
    inner: usize,
    top_k: usize,
    limit: Option<f32>,
    acc: &mut [f32],
) {
    let dim = parts[0].weights.w2.rows();
    let mut gathered = vec![0.0; entries.len() * dim];
    for_each_row(ctx.light(entries.len() * dim), &mut gathered, dim, |r, row| {
        let t = entries[r] / top_k;
        row.copy_from_slice(&x[t * dim..(t + 1) * dim]);
    });
    let mut hidden = vec![0.0; entries.len() * inner];
    hidden_rows(ctx, &gathered, parts, inner, limit, |r| weights[entries[r]], &mut hidden);
    // The gathered inputs are no longer needed: their place takes the results.
    let mut results = gathered;
    down_rows(ctx, &hidden, parts, inner, dim, &mut results);
    let rows_of = rows_of_tokens(entries, top_k, acc.len() / dim);
    for_each_row(ctx.light(entries.len() * dim), acc, dim, |t, acc| {
        for &r in &rows_of[t] {
            acc.iter_mut().zip(&results[r * dim..(r + 1) * dim]).for_each(|(acc, y)| *acc += y);
        }
    });
}

/// `hidden[r] = swiglu(w1 · x[r], w3 · x[r]) · factor(r)` with the weights of the part that `r` belongs to.
fn hidden_rows(
    ctx: Ctx,
    x: &[f32],
    parts: &[Part],
    inner: usize,
    limit: Option<f32>,
    factor: impl Fn(usize) -> f32 + Sync,
    hidden: &mut [f32],
) {
    let mut up = vec![0.0; hidden.len()];
    {
        let (gate, up) = (Disjoint::new(hidden), Disjoint::new(&mut up));
        let jobs: Vec<Job> = parts
            .iter()
            .flat_map(|part| [(part, part.weights.w1, &gate), (part, part.weights.w3, &up)])
            .map(|(part, w, out)| part.job(x, w, out))
            .collect();
        // SAFETY: parts have disjoint rows, and the two products of a part write to different vectors.
        unsafe { run_jobs(ctx, &jobs) };
    }
    for_each_row(ctx.light(hidden.len()), hidden, inner, |r, gate| {
        swiglu_in_place(ctx.level, gate, &up[r * inner..(r + 1) * inner], limit, factor(r));
    });
}

/// `out[r] = w2 · hidden[r]` with the weights of the part that `r` belongs to.
fn down_rows(ctx: Ctx, hidden: &[f32], parts: &[Part], inner: usize, dim: usize, out: &mut [f32]) {
    debug_assert_eq!(hidden.len() * dim, out.len() * inner);
    let out = Disjoint::new(out);
    let jobs: Vec<Job> = parts.iter().map(|part| part.job(hidden, part.weights.w2, &out)).collect();
    // SAFETY: parts have disjoint rows.
    unsafe { run_jobs(ctx, &jobs) };
}

impl Part<'_> {
    /// `out[r] = w · x[r]` for the rows of this part.
    fn job<'a>(&self, x: &'a [f32], w: &'a StoredTensor, out: &'a Disjoint<'a, f32>) -> Job<'a> {
        Job {
            x: &x[self.rows.start * w.cols()..],
            x_stride: w.cols(),
            rows: self.rows.len(),
            w: Matrix::stored(w),
            w_rows: 0..w.rows(),
            out,
            out_start: self.rows.start * w.rows(),
            out_stride: w.rows(),
        }
    }
}
