//! The router: which experts a token goes to, with which weights (model spec, 9.1).

use crate::Ctx;
use crate::index::better;
use crate::parallel::{for_each_row, for_each_row2};
use crate::scratch::Scratch;

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// `√(ln(1 + e^z))`
    SqrtSoftplus,
    /// `1 / (1 + e^-z)`
    Sigmoid,
    /// `e^z` over the sum of all experts'.
    Softmax,
}

/// Parameters of a router.
#[derive(Clone, Copy, Debug)]
pub struct RouteParams<'a> {
    /// How logits become scores.
    pub scoring: Scoring,
    /// `E`
    pub experts: usize,
    /// `k`, experts per token.
    pub top_k: usize,
    /// `[E]`, added to the scores for choosing only.
    pub bias: Option<&'a [f32]>,
    /// `[V, k]`: the experts of each token, instead of a choice by score.
    pub table: Option<&'a [i32]>,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// Factor of all weights.
    pub scaling: f32,
}

/// Chooses `k` experts for each token. Of equal scores the lower expert is better; NaN is worse than everything else.
///
/// - `logits`  `[T, E]`
/// - `tokens`  `[T]`, read only if there is a table
/// - `ids`     `[T, k]`, overwritten, ascending
/// - `weights` `[T, k]`, overwritten, matching `ids`
///
/// The same code at every level. Accuracy of weights: within `16 · ε` of their magnitude in
/// [`crate::reference::route`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above, `k` is larger than `E`, a token is not in the table, or the table
/// names an expert that does not exist.
pub fn route(ctx: Ctx, p: &RouteParams, logits: &[f32], tokens: &[i32], ids: &mut [i32], weights: &mut [f32]) {
    let mut scores = Scratch::new(logits.len());
    route_with_scores(ctx, p, logits, tokens, ids, weights, &mut scores);
}

/// [`route`] that also writes the scores `[T, E]`, without bias.
///
/// # Panics
///
/// As [`route`].
pub fn route_with_scores(
    ctx: Ctx,
    p: &RouteParams,
    logits: &[f32],
    tokens: &[i32],
    ids: &mut [i32],
    weights: &mut [f32],
    scores: &mut [f32],
) {
    let (e, k) = (p.experts, p.top_k);
    assert!(0 < k && k <= e, "{k} of {e} experts");
    let rows = ids.len() / k;
    assert!(ids.len() == rows * k && weights.len() == rows * k, "ids and weights must be [T, {k}]");
    assert_eq!(logits.len(), rows * e, "logits must be [T, {e}]");
    assert_eq!(scores.len(), rows * e, "scores must be [T, {e}]");
    assert!(p.bias.is_none_or(|bias| bias.len() == e), "bias must be [{e}]");
    if p.table.is_some() {
        assert_eq!(tokens.len(), rows, "tokens must be [T]");
    }
    // A score costs as much as a dozen plain numbers.
    let ctx = ctx.light(12 * logits.len());
    for_each_row(ctx, scores, e, |t, scores| score(p.scoring, &logits[t * e..(t + 1) * e], scores));
    for_each_row2(ctx, ids, k, weights, k, |t, ids, weights| {
        let scores = &scores[t * e..(t + 1) * e];
        match p.table {
            Some(table) => look_up(table, tokens[t], e, ids),
            None => choose(scores, p.bias, ids),
        }
        for (weight, &id) in weights.iter_mut().zip(&*ids) {
            *weight = scores[id as usize];
        }
        // An all-zero choice must not become NaN.
        let sum = if p.normalise { weights.iter().sum::<f32>() + 1e-20 } else { 1.0 };
        weights.iter_mut().for_each(|weight| *weight = *weight / sum * p.scaling);
    });
}

fn score(scoring: Scoring, logits: &[f32], scores: &mut [f32]) {
    let each = scores.iter_mut().zip(logits);
    match scoring {
        Scoring::SqrtSoftplus => each.for_each(|(s, &z)| *s = (z.max(0.0) + (-z.abs()).exp().ln_1p()).sqrt()),
        Scoring::Sigmoid => each.for_each(|(s, &z)| *s = 1.0 / (1.0 + (-z).exp())),
        Scoring::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            each.for_each(|(s, &z)| *s = (z - max).exp());
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|s| *s /= sum);
        }
    }
}

/// The experts of a token, from the table.
fn look_up(table: &[i32], token: i32, experts: usize, ids: &mut [i32]) {
    let rows = table.len() / ids.len();
    let token = usize::try_from(token).ok().filter(|&token| token < rows);
    let token = token.unwrap_or_else(|| panic!("a token is not in the table of {rows}"));
    ids.copy_from_slice(&table[token * ids.len()..(token + 1) * ids.len()]);
    assert!(ids.iter().all(|&id| (0..experts as i32).contains(&id)), "the table names an expert that does not exist");
    ids.sort_unstable();
}

/// The experts with the highest scores: a short list kept in order of rank, then sorted by id.
fn choose(scores: &[f32], bias: Option<&[f32]>, ids: &mut [i32]) {
    let rank = |id: i32| scores[id as usize] + bias.map_or(0.0, |bias| bias[id as usize]);
    let mut found = 0;
    for id in 0..scores.len() as i32 {
        // Ids come in ascending order, so an equal score does not displace an earlier one.
        let place = ids[..found].partition_point(|&other| better(rank(other), rank(id)).is_le());
        if place < ids.len() {
            found = (found + 1).min(ids.len());
            ids.copy_within(place..found - 1, place + 1);
            ids[place] = id;
        }
    }
    ids.sort_unstable();
}
