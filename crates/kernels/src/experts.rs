//! Feed-forward experts: the shared one and the routed ones (model spec, section 9).

use std::ops::Range;

use troika_base::StoredTensor;

use crate::Ctx;
use crate::formats::Matrix;
use crate::matmul::{Job, run_jobs};
use crate::parallel::{Disjoint, for_each_row};
use crate::scratch::Scratch;
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
    fn shapes(&self) -> Shapes {
        [self.w1, self.w3, self.w2].map(|w| (w.rows(), w.cols()))
    }
}

/// Rows and columns of `w1`, `w3` and `w2`.
pub(crate) type Shapes = [(usize, usize); 3];

/// `D` and `I` of an expert.
///
/// # Panics
///
/// If the shapes do not belong to one expert.
pub(crate) fn widths(shapes: Shapes) -> (usize, usize) {
    let (dim, inner) = shapes[2];
    assert_eq!(shapes, [(inner, dim), (inner, dim), (dim, inner)], "w1 and w3 must be [I, {dim}], w2 [{dim}, I]");
    (dim, inner)
}

/// `D` and `I` of routed experts, or `None` if there are none.
///
/// # Panics
///
/// If the lengths of the operands disagree with them, or the experts have different shapes.
pub(crate) fn routed_widths(
    mut experts: impl Iterator<Item = Shapes>,
    x: &[f32],
    ids: &[i32],
    weights: &[f32],
    top_k: usize,
    acc: &[f32],
) -> Option<(usize, usize)> {
    assert_eq!(x.len(), acc.len(), "x and acc must be [T, D]");
    assert!(ids.len() == weights.len(), "ids and weights must be [T, {top_k}]");
    let (dim, inner) = widths(experts.next()?);
    let tokens = acc.len().checked_div(dim).unwrap_or(0);
    assert_eq!(acc.len(), tokens * dim, "acc must be [T, {dim}]");
    assert_eq!(ids.len(), tokens * top_k, "ids must be [{tokens}, {top_k}]");
    experts.for_each(|shapes| assert_eq!(widths(shapes), (dim, inner), "experts must have one shape"));
    Some((dim, inner))
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
    let (dim, inner) = widths(w.shapes());
    assert_eq!(x.len(), out.len(), "x and out must be [T, {dim}]");
    let rows = out.len().checked_div(dim).unwrap_or(0);
    let starts = [0, rows];
    let parts = Parts::new(std::slice::from_ref(w), &starts);
    let mut hidden = Scratch::new(rows * inner);
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
    let shapes = experts.iter().map(|expert| expert.shapes());
    let Some((_, inner)) = routed_widths(shapes, x, ids, weights, top_k, acc) else { return };
    let routes = Sorted::by_expert(ids, first, experts.len());
    for batch in routes.batches(BATCH) {
        let entries = routes.entries(batch.clone());
        let parts = Parts::new(&experts[batch.clone()], &routes.starts[batch.start..=batch.end]);
        run_batch(ctx, x, weights, entries, &parts, inner, top_k, limit, acc);
    }
}

/// Things sorted by what they belong to.
pub(crate) struct Sorted {
    things: Scratch<usize>,
    /// `things[starts[k]..starts[k + 1]]` belong to `k`.
    pub(crate) starts: Scratch<usize>,
}

impl Sorted {
    /// Sorts `0..` by their owners, of which there are `owners`; those without one are left out. (A counting sort, so
    /// things of one owner stay in order.)
    fn new(owner_of: impl Iterator<Item = Option<usize>> + Clone, owners: usize) -> Self {
        let mut starts = Scratch::new(owners + 1);
        starts.fill(0);
        for owner in owner_of.clone().flatten() {
            starts[owner + 1] += 1;
        }
        for owner in 0..owners {
            starts[owner + 1] += starts[owner];
        }
        let mut next = Scratch::collect(starts.iter().copied());
        let mut things = Scratch::new(starts[owners]);
        for (thing, owner) in owner_of.enumerate().filter_map(|(thing, owner)| Some((thing, owner?))) {
            things[next[owner]] = thing;
            next[owner] += 1;
        }
        Self { things, starts }
    }

    /// Which (token, choice) pairs, indices into `ids`, go to each of the experts `first..first + experts`.
    pub(crate) fn by_expert(ids: &[i32], first: usize, experts: usize) -> Self {
        let local = |id: &i32| usize::try_from(*id).ok()?.checked_sub(first).filter(|&e| e < experts);
        Self::new(ids.iter().map(local), experts)
    }

    /// Ranges of owners that have at least one thing, of up to `most` things each where one owner alone has no more.
    pub(crate) fn batches(&self, most: usize) -> impl Iterator<Item = Range<usize>> {
        let (starts, owners) = (&*self.starts, self.starts.len() - 1);
        let mut first = 0;
        let ranges = std::iter::from_fn(move || {
            let start = first;
            (start < owners).then(|| {
                first += 1;
                while first < owners && starts[first + 1] - starts[start] <= most {
                    first += 1;
                }
                start..first
            })
        });
        ranges.filter(|range| starts[range.end] > starts[range.start])
    }

    /// Things of a range of owners.
    pub(crate) fn entries(&self, owners: Range<usize>) -> &[usize] {
        &self.things[self.starts[owners.start]..self.starts[owners.end]]
    }
}

/// Adds to each token the `results` of its entries, `[entries.len(), D]`, in ascending order of experts.
pub(crate) fn add_results(ctx: Ctx, entries: &[usize], top_k: usize, results: &[f32], dim: usize, acc: &mut [f32]) {
    let rows_of = Sorted::new(entries.iter().map(|entry| Some(entry / top_k)), acc.len() / dim);
    for_each_row(ctx.light(entries.len() * dim), acc, dim, |t, acc| {
        for &r in rows_of.entries(t..t + 1) {
            acc.iter_mut().zip(&results[r * dim..(r + 1) * dim]).for_each(|(acc, y)| *acc += y);
        }
    });
}

/// The rows of a batch that belong to one expert; those of several follow one another from 0.
pub(crate) struct Part<'a, W> {
    pub(crate) weights: &'a W,
    pub(crate) rows: Range<usize>,
}

/// The parts of a batch that have rows.
pub(crate) struct Parts<'a, W> {
    experts: &'a [W],
    /// Rows `starts[e] - starts[0]..starts[e + 1] - starts[0]` belong to expert `e`.
    starts: &'a [usize],
    used: Scratch<usize>,
}

impl<'a, W> Parts<'a, W> {
    pub(crate) fn new(experts: &'a [W], starts: &'a [usize]) -> Self {
        debug_assert_eq!(starts.len(), experts.len() + 1);
        Self { experts, starts, used: Scratch::collect((0..experts.len()).filter(|&e| starts[e] < starts[e + 1])) }
    }

    pub(crate) fn len(&self) -> usize {
        self.used.len()
    }

    pub(crate) fn get(&self, i: usize) -> Part<'a, W> {
        let e = self.used[i];
        let rows = self.starts[e] - self.starts[0]..self.starts[e + 1] - self.starts[0];
        Part { weights: &self.experts[e], rows }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Part<'a, W>> + Clone {
        (0..self.len()).map(|i| self.get(i))
    }
}

#[expect(clippy::too_many_arguments, reason = "the second half of `routed_experts`")]
fn run_batch(
    ctx: Ctx,
    x: &[f32],
    weights: &[f32],
    entries: &[usize],
    parts: &Parts<ExpertWeights>,
    inner: usize,
    top_k: usize,
    limit: Option<f32>,
    acc: &mut [f32],
) {
    let dim = parts.get(0).weights.w2.rows();
    let mut gathered = Scratch::new(entries.len() * dim);
    for_each_row(ctx.light(entries.len() * dim), &mut gathered, dim, |r, row| {
        let t = entries[r] / top_k;
        row.copy_from_slice(&x[t * dim..(t + 1) * dim]);
    });
    let mut hidden = Scratch::new(entries.len() * inner);
    hidden_rows(ctx, &gathered, parts, inner, limit, |r| weights[entries[r]], &mut hidden);
    // The gathered inputs are no longer needed: their place takes the results.
    let mut results = gathered;
    down_rows(ctx, &hidden, parts, inner, dim, &mut results);
    add_results(ctx, entries, top_k, &results, dim, acc);
}

/// `hidden[r] = swiglu(w1 · x[r], w3 · x[r]) · factor(r)` with the weights of the part that `r` belongs to.
fn hidden_rows(
    ctx: Ctx,
    x: &[f32],
    parts: &Parts<ExpertWeights>,
    inner: usize,
    limit: Option<f32>,
    factor: impl Fn(usize) -> f32 + Sync,
    hidden: &mut [f32],
) {
    let mut up = Scratch::new(hidden.len());
    {
        let (gate, up) = (Disjoint::new(hidden), Disjoint::new(&mut up));
        let job = |i: usize| {
            let part = parts.get(i / 2);
            if i.is_multiple_of(2) { part.job(x, part.weights.w1, &gate) } else { part.job(x, part.weights.w3, &up) }
        };
        // SAFETY: parts have disjoint rows, and the two products of a part write to different vectors.
        unsafe { run_jobs(ctx, 2 * parts.len(), &job) };
    }
    for_each_row(ctx.light(hidden.len()), hidden, inner, |r, gate| {
        swiglu_in_place(ctx.level, gate, &up[r * inner..(r + 1) * inner], limit, factor(r));
    });
}

/// `out[r] = w2 · hidden[r]` with the weights of the part that `r` belongs to.
fn down_rows(ctx: Ctx, hidden: &[f32], parts: &Parts<ExpertWeights>, inner: usize, dim: usize, out: &mut [f32]) {
    debug_assert_eq!(hidden.len() * dim, out.len() * inner);
    let out = Disjoint::new(out);
    let job = |i: usize| {
        let part = parts.get(i);
        part.job(hidden, part.weights.w2, &out)
    };
    // SAFETY: parts have disjoint rows.
    unsafe { run_jobs(ctx, parts.len(), &job) };
}

impl Part<'_, ExpertWeights<'_>> {
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
