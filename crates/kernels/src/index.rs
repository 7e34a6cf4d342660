//! The lightning indexer: scores of compressed rows and the choice of the best (model spec, section 8).

use std::cmp::Ordering;

use crate::dot::dots;
use crate::level::compiled_per_level;
use crate::math::{max_nan, mul_add};
use crate::{CpuLevel, RowList};

/// Keys scored together.
const KEYS: usize = 64;

/// `out[w] = Σ_h iw[h] · max(0, iq[h] · keys[w])` for one query.
///
/// - `iq`   `[Hi, di]`, rotated
/// - `iw`   `[Hi]`, already scaled by `1 / √(Hi · di)`
/// - `keys` the visible rows of `di` numbers, oldest first
/// - `out`  one score for each key, overwritten
///
/// Accuracy: within `(di/8 + Hi + 8) · ε · Σ_h |iw[h]| · Σ|iq·key|` of [`crate::reference::index_scores`] (twice that
/// for [`CpuLevel::Scalar`]).
///
/// # Panics
///
/// If the lengths disagree with the shapes above, or this CPU lacks `level`.
pub fn index_scores(level: CpuLevel, iq: &[f32], iw: &[f32], keys: RowList, out: &mut [f32]) {
    let d = keys.width();
    assert_eq!(iq.len(), iw.len() * d, "iq must be [Hi, di]");
    assert_eq!(out.len(), keys.len(), "out must have a score for each key");
    let mut products = vec![0.0; iw.len() * KEYS.min(keys.len())];
    let mut rows: Vec<&[f32]> = Vec::with_capacity(KEYS);
    let mut all = keys.iter();
    for out in out.chunks_mut(KEYS) {
        rows.clear();
        rows.extend(all.by_ref().take(out.len()));
        dots(level, iq, d, &rows, &mut products, out.len());
        weigh(level, &products, iw, out);
    }
}

compiled_per_level!(
    /// `out[w] = Σ_h iw[h] · max(0, products[h, w])`, heads in order.
    fn weigh(products: &[f32], iw: &[f32], out: &mut [f32]) => weigh_body
);

#[inline(always)]
fn weigh_body<const FMA: bool>(products: &[f32], iw: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (products, &iw) in products.chunks_exact(out.len()).zip(iw) {
        for (out, &product) in out.iter_mut().zip(products) {
            *out = mul_add::<FMA>(max_nan(product, 0.0), iw, *out);
        }
    }
}

/// Ids of the `k` best scores, ascending; all ids if there are at most `k`. Of equal scores the lower id is better,
/// which keeps the choice independent of chunking; NaN is worse than everything else.
pub fn top_k(scores: &[f32], k: usize, out: &mut Vec<i32>) {
    let count = i32::try_from(scores.len()).expect("ids must fit into 32 bits");
    out.clear();
    out.extend(0..count);
    if k >= scores.len() {
        return;
    }
    if k > 0 {
        out.select_nth_unstable_by(k - 1, |&a, &b| better(scores[a as usize], scores[b as usize]).then(a.cmp(&b)));
    }
    out.truncate(k);
    out.sort_unstable();
}

/// `Less` if `a` is the better score.
pub(crate) fn better(a: f32, b: f32) -> Ordering {
    b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}
