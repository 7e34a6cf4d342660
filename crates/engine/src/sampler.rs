//! Drawing the next token from logits.

use std::collections::{BTreeMap, BTreeSet};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::api::{Logprobs, Sampling, TokenSet};

/// Why no token can be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The logits are not numbers.
    #[error("the model produced no finite logit: its weights or state are damaged")]
    NoFiniteLogit,
    /// The request's constraint lets nothing follow.
    #[error("no token can follow under the request's constraint")]
    NothingAllowed,
}

/// Tokens that penalties go by. Empty if the request has none.
#[derive(Debug)]
pub(crate) struct History {
    /// How often each token was generated.
    generated: BTreeMap<u32, u32>,
    /// Tokens of prompt and answer.
    seen: BTreeSet<u32>,
    is_needed: bool,
}

impl History {
    pub(crate) fn new(prompt: &[u32], sampling: &Sampling) -> Self {
        let repetition = sampling.repetition_penalty != 1.0;
        let is_needed = repetition || sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0;
        let seen = if repetition { prompt.iter().copied().collect() } else { BTreeSet::new() };
        Self { generated: BTreeMap::new(), seen, is_needed }
    }

    pub(crate) fn push(&mut self, token: u32) {
        if self.is_needed {
            *self.generated.entry(token).or_default() += 1;
            self.seen.insert(token);
        }
    }
}

/// Applies the repetition penalty, then frequency and presence penalty, then the bias: a bias that forces or forbids a
/// token does so whatever the penalties.
pub(crate) fn penalize(logits: &mut [f32], sampling: &Sampling, history: &History, logit_bias: &[(u32, f32)]) {
    let repetition = sampling.repetition_penalty;
    if repetition != 1.0 {
        for token in &history.seen {
            let logit = &mut logits[*token as usize];
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        }
    }
    for (token, count) in &history.generated {
        logits[*token as usize] -= sampling.frequency_penalty * *count as f32 + sampling.presence_penalty;
    }
    for (token, bias) in logit_bias {
        logits[*token as usize] += bias;
    }
}

/// Makes all other tokens impossible.
///
/// # Errors
///
/// If none is left that the model gives a finite logit.
pub(crate) fn allow_only(logits: &mut [f32], allowed: &TokenSet) -> Result<(), SampleError> {
    let mut is_any_left = false;
    let mut was_any_there = false;
    for (token, logit) in logits.iter_mut().enumerate() {
        was_any_there |= logit.is_finite();
        if allowed.contains(token as u32) {
            is_any_left |= logit.is_finite();
        } else {
            *logit = f32::NEG_INFINITY;
        }
    }
    match (is_any_left, was_any_there) {
        (true, _) => Ok(()),
        (false, true) => Err(SampleError::NothingAllowed),
        (false, false) => Err(SampleError::NoFiniteLogit),
    }
}

/// Log-probabilities of one row, before it is known which token will be drawn.
pub(crate) struct Likely {
    /// As they came from the model.
    logits: Vec<f32>,
    log_sum: f64,
    top: Vec<(u32, f32)>,
}

impl Likely {
    fn log_prob(&self, token: u32) -> f32 {
        (f64::from(self.logits[token as usize]) - self.log_sum) as f32
    }

    /// What the client hears if this token came.
    pub(crate) fn of(mut self, token: u32) -> Logprobs {
        Logprobs { chosen: self.log_prob(token), top: std::mem::take(&mut self.top) }
    }
}

/// Log-softmax of `logits [vocab_size]`, and its `num_top` best. Logits that are not finite count as impossible.
pub(crate) fn logprobs(logits: &[f32], num_top: usize) -> Likely {
    let finite = || logits.iter().enumerate().filter(|(_, logit)| logit.is_finite());
    let best = finite().map(|(_, logit)| f64::from(*logit)).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = finite().map(|(_, logit)| (f64::from(*logit) - best).exp()).sum();
    let mut ranked: Vec<u32> = finite().map(|(token, _)| token as u32).collect();
    let better = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if num_top < ranked.len() {
        ranked.select_nth_unstable_by(num_top, better);
        ranked.truncate(num_top);
    }
    ranked.sort_unstable_by(better);
    let mut likely = Likely { logits: logits.to_vec(), log_sum: best + sum.ln(), top: Vec::new() };
    likely.top = ranked.into_iter().map(|token| (token, likely.log_prob(token))).collect();
    likely
}

/// The token at `position` (of the token being drawn), from `logits [vocab_size]`.
///
/// Randomness depends on `sampling.seed` and `position` alone. Filters apply in the order top-k, top-p, min-p, after the
/// temperature; equally likely tokens rank by id.
///
/// # Errors
///
/// If no logit is finite.
pub fn sample(logits: &[f32], sampling: &Sampling, position: usize) -> Result<u32, SampleError> {
    let best = best_token(logits).ok_or(SampleError::NoFiniteLogit)?;
    if sampling.temperature <= 0.0 || sampling.top_k == 1 {
        return Ok(best as u32);
    }
    let (top, temperature) = (f64::from(logits[best]), f64::from(sampling.temperature));
    let mut candidates: Vec<(u32, f64)> = logits
        .iter()
        .enumerate()
        .filter(|(_, logit)| logit.is_finite())
        .map(|(id, logit)| (id as u32, ((f64::from(*logit) - top) / temperature).exp()))
        .collect();
    if sampling.top_k > 0 || sampling.top_p < 1.0 || sampling.min_p > 0.0 {
        filter(&mut candidates, sampling);
    }
    let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
    let mut left = uniform(sampling.seed, position) * total;
    for (id, weight) in &candidates {
        left -= weight;
        if left < 0.0 {
            return Ok(*id);
        }
    }
    // Rounding can leave a rest of the last weight.
    Ok(candidates.last().map_or(best as u32, |(id, _)| *id))
}

/// The first of the largest finite logits. In two passes that the compiler vectorises: every decoded token waits for it.
fn best_token(logits: &[f32]) -> Option<usize> {
    const LANES: usize = 16;
    let finite = |logit: f32| if logit.abs() < f32::INFINITY { logit } else { f32::NEG_INFINITY };
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (groups, rest) = logits.as_chunks::<LANES>();
    for group in groups {
        for (largest, logit) in largest.iter_mut().zip(group) {
            *largest = larger(*largest, finite(*logit));
        }
    }
    let best = largest.into_iter().chain(rest.iter().copied().map(finite)).fold(f32::NEG_INFINITY, larger);
    if best == f32::NEG_INFINITY {
        return None;
    }
    let group = groups.iter().position(|group| group.iter().fold(false, |any, logit| any | (*logit == best)));
    let first = group.unwrap_or(groups.len()) * LANES;
    logits[first..].iter().position(|logit| *logit == best).map(|index| first + index)
}

fn filter(candidates: &mut Vec<(u32, f64)>, sampling: &Sampling) {
    candidates.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if sampling.top_k > 0 {
        candidates.truncate(sampling.top_k);
    }
    let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
    if sampling.top_p < 1.0 {
        let mut sum = 0.0;
        let enough = candidates.iter().position(|(_, weight)| {
            sum += weight;
            sum >= f64::from(sampling.top_p) * total
        });
        candidates.truncate(enough.map_or(candidates.len(), |index| index + 1));
    }
    if sampling.min_p > 0.0 {
        let least = candidates[0].1 * f64::from(sampling.min_p);
        candidates.retain(|(_, weight)| *weight >= least);
    }
}

/// A number in `[0, 1)` that depends on its arguments alone.
fn uniform(seed: u64, position: usize) -> f64 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(position as u64);
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    fn draws(logits: &[f32], sampling: &Sampling, n: usize) -> Vec<u32> {
        (0..n).map(|position| sample(logits, sampling, position).expect("finite")).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        assert_eq!(sample(&[0.0, 3.0, 3.0, f32::NAN], &Sampling::GREEDY, 0), Ok(1));
        assert_eq!(sample(&[f32::NAN, f32::INFINITY], &Sampling::GREEDY, 0), Err(SampleError::NoFiniteLogit));
        assert_eq!(sample(&[f32::NEG_INFINITY, -5.0], &PLAIN, 0), Ok(1));
    }

    #[test]
    fn the_best_is_found_wherever_it_is() {
        for len in [1, 15, 16, 17, 32, 45] {
            for at in 0..len {
                let mut logits: Vec<f32> = (0..len).map(|i| -((i * 7 % 11) as f32) - 1.0).collect();
                logits[at] = -0.5;
                logits[len - 1 - at] = if len - 1 - at == at { -0.5 } else { f32::INFINITY };
                assert_eq!(best_token(&logits), Some(at), "{at} of {len}");
                logits[at..].fill(-0.5);
                assert_eq!(best_token(&logits), Some(at), "the first of several");
            }
        }
        assert_eq!(best_token(&[f32::NAN; 20]), None);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0f32, 2.0f32.ln(), 5.0f32.ln()];
        let draws = draws(&logits, &PLAIN, 20_000);
        for (token, share) in [(0, 0.125), (1, 0.25), (2, 0.625)] {
            let got = draws.iter().filter(|t| **t == token).count() as f64 / draws.len() as f64;
            // Four standard deviations of a share of 20,000 draws.
            assert!((got - share).abs() < 0.014, "token {token}: {got} against {share}");
        }
    }

    #[test]
    fn draws_depend_on_seed_and_position_alone() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let all = draws(&logits, &PLAIN, 64);
        assert_eq!(all[40], sample(&logits, &PLAIN, 40).expect("finite"), "no hidden state");
        assert_ne!(all, draws(&logits, &Sampling { seed: 1, ..PLAIN }, 64));
    }

    #[test]
    fn filters_keep_what_they_say() {
        let logits = [0.5f32.ln(), 0.2f32.ln(), 0.2f32.ln(), 0.1f32.ln()];
        let kept = |sampling: Sampling| {
            let mut kept = draws(&logits, &sampling, 500);
            kept.sort_unstable();
            kept.dedup();
            kept
        };
        assert_eq!(kept(PLAIN), [0, 1, 2, 3]);
        assert_eq!(kept(Sampling { top_k: 2, ..PLAIN }), [0, 1], "ties rank by id");
        assert_eq!(kept(Sampling { top_p: 0.49, ..PLAIN }), [0]);
        assert_eq!(kept(Sampling { top_p: 0.6, ..PLAIN }), [0, 1]);
        assert_eq!(kept(Sampling { min_p: 0.3, ..PLAIN }), [0, 1, 2]);
    }

    fn history(prompt: &[u32], generated: &[u32], sampling: &Sampling) -> History {
        let mut history = History::new(prompt, sampling);
        generated.iter().for_each(|token| history.push(*token));
        history
    }

    #[test]
    fn penalties_and_bias_change_what_they_say() {
        let penalized = |sampling: Sampling, bias: &[(u32, f32)]| {
            let mut logits = [2.0, -2.0, 1.0, 4.0, 0.0];
            penalize(&mut logits, &sampling, &history(&[3, 1], &[0, 1, 0], &sampling), bias);
            logits
        };
        assert_eq!(penalized(PLAIN, &[]), [2.0, -2.0, 1.0, 4.0, 0.0]);
        let frequency = Sampling { frequency_penalty: 0.5, ..PLAIN };
        assert_eq!(penalized(frequency, &[]), [1.0, -2.5, 1.0, 4.0, 0.0], "the prompt does not count");
        let presence = Sampling { presence_penalty: -1.5, ..PLAIN };
        assert_eq!(penalized(presence, &[]), [3.5, -0.5, 1.0, 4.0, 0.0]);
        let repetition = Sampling { repetition_penalty: 2.0, ..PLAIN };
        assert_eq!(penalized(repetition, &[]), [1.0, -4.0, 1.0, 2.0, 0.0], "the prompt counts");
        assert_eq!(penalized(repetition, &[(3, -7.0), (1, 1.0), (3, 1.0)]), [1.0, -3.0, 1.0, -4.0, 0.0]);
        let all = Sampling { frequency_penalty: 1.0, presence_penalty: 1.0, ..repetition };
        assert_eq!(penalized(all, &[]), [-2.0, -6.0, 1.0, 2.0, 0.0]);
    }

    /// Draws under penalties follow the distribution that results from them.
    #[test]
    fn penalized_draws_follow_the_distribution() {
        let sampling = Sampling { presence_penalty: 2.0f32.ln(), ..PLAIN };
        let mut logits = [0.0f32, 2.0f32.ln(), 5.0f32.ln()];
        penalize(&mut logits, &sampling, &history(&[], &[1], &sampling), &[(2, 0.4f32.ln())]);
        let draws = draws(&logits, &sampling, 20_000);
        for (token, share) in [(0, 0.25), (1, 0.25), (2, 0.5)] {
            let got = draws.iter().filter(|t| **t == token).count() as f64 / draws.len() as f64;
            assert!((got - share).abs() < 0.015, "token {token}: {got} against {share}");
        }
    }

    #[test]
    fn only_allowed_tokens_are_drawn() {
        let mut allowed = TokenSet::new(70);
        [3, 40, 69, 70, 1000].into_iter().for_each(|token| allowed.insert(token));
        let mut logits: Vec<f32> = (0..70).map(|i| (i as f32).sin()).collect();
        assert_eq!(allow_only(&mut logits, &allowed), Ok(()));
        let mut drawn = draws(&logits, &PLAIN, 300);
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn, [3, 40, 69]);
        allowed.clear();
        assert_eq!(allow_only(&mut [1.0; 70], &allowed), Err(SampleError::NothingAllowed));
        allowed.insert(1);
        assert_eq!(allow_only(&mut [f32::NAN; 70], &allowed), Err(SampleError::NoFiniteLogit));
        let mut logits = [f32::NEG_INFINITY; 70];
        logits[0] = 1.0;
        assert_eq!(
            allow_only(&mut logits, &allowed),
            Err(SampleError::NothingAllowed),
            "the only one left is impossible"
        );
    }

    #[test]
    fn token_sets_stay_in_their_vocabulary() {
        let mut set = TokenSet::new(40);
        set.insert_words(&[1, u32::MAX, u32::MAX]);
        let members: Vec<u32> = (0..200).filter(|token| set.contains(*token)).collect();
        assert_eq!(members, [0, 32, 33, 34, 35, 36, 37, 38, 39]);
        let mut set = TokenSet::new(64);
        set.insert_words(&[u32::MAX]);
        assert!(set.contains(31) && !set.contains(32) && !set.contains(u32::MAX));
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [1.0f32.ln(), 4.0f32.ln(), f32::NAN, 3.0f32.ln(), 4.0f32.ln(), f32::NEG_INFINITY];
        let got = logprobs(&logits, 3).of(0);
        let close = |got: f32, probability: f32| (got - probability.ln()).abs() < 1e-6;
        assert!(close(got.chosen, 1.0 / 12.0));
        assert_eq!(got.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 4, 3], "ties rank by id");
        assert!(close(got.top[0].1, 1.0 / 3.0) && close(got.top[2].1, 0.25));
        assert!(logprobs(&logits, 0).of(1).top.is_empty());
        assert_eq!(logprobs(&logits, 20).of(1).top.len(), 4, "there are no more");
        // Large and small logits neither overflow nor vanish.
        let got = logprobs(&[1000.0, 0.0, -1000.0], 1).of(2);
        assert_eq!((got.chosen, got.top), (-2000.0, vec![(0, 0.0)]));
    }
}
