//! The numeric gate: how far prefill with engines is from the primary device on real text, and whether that is near enough
//! (section 9.5 of the hybrid spec).

use serde::Serialize;
use troika_base::SequenceId;
use troika_graph::{Acceptance, Scope};
use troika_runtime::FeatureState;

use crate::runner::{Chunk, Forward, Runner, RunnerError, WantLogits};

/// Most nats per position.
const MAX_MEAN_KL: f64 = 0.002;
/// Positions are clear where the two best logits of the primary device are this far apart, nats.
const CLEAR: f32 = 0.1;
/// Least share of clear positions with the same most likely token.
const MIN_SAME_TOP1: f64 = 0.995;
/// Least share of equal choices of experts.
const MIN_SAME_EXPERTS: f64 = 0.98;
/// Tokens that are generated after each text, and most equal ones in a row.
const CONTINUATION: usize = 64;
const MAX_REPEATS: usize = 8;

/// Distance of a runner with engines from one without, over the same texts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Distance {
    /// Predictions that were compared.
    pub positions: usize,
    /// Sum of `Σ p log(p / q)`, `p` of the primary device, nats.
    pub kl: f64,
    /// Clear positions.
    pub clear: usize,
    /// Those with the same most likely token.
    pub clear_same: usize,
    /// Choices of experts that were compared, one per token, layer and place.
    pub experts: usize,
    /// Those that both made.
    pub experts_same: usize,
    /// Logits that are no number.
    pub not_finite: usize,
    /// Texts after which only the runner with engines repeats one token over and over.
    pub degenerate: usize,
    /// What a check found wrong with an engine's numbers; what was computed after that says nothing about the engine.
    pub quarantine: Option<String>,
}

impl Distance {
    /// Nats per position.
    pub fn mean_kl(&self) -> f64 {
        self.kl / self.positions as f64
    }

    /// Share of clear positions with the same most likely token.
    pub fn same_top1(&self) -> f64 {
        self.clear_same as f64 / self.clear as f64
    }

    /// Share of equal choices of experts.
    pub fn same_experts(&self) -> f64 {
        self.experts_same as f64 / self.experts as f64
    }

    /// What is too far; empty if all is near enough. Nothing compared is not near.
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        // Written so that the quotient of nothing by nothing fails.
        let mut need = |holds: bool, text: String| {
            if !holds {
                failures.push(text);
            }
        };
        need(self.not_finite == 0, format!("{} logits are no numbers", self.not_finite));
        need(
            self.mean_kl() <= MAX_MEAN_KL,
            format!("mean KL is {:.2e}, at most {MAX_MEAN_KL} is allowed", self.mean_kl()),
        );
        let (top1, experts) = (self.same_top1(), self.same_experts());
        let percent = |share: f64| share * 100.0;
        need(
            top1 >= MIN_SAME_TOP1,
            format!(
                "the most likely token is the same at {:.2} % of clear positions, not at {} %",
                percent(top1),
                percent(MIN_SAME_TOP1)
            ),
        );
        need(
            experts >= MIN_SAME_EXPERTS,
            format!(
                "{:.2} % of the choices of experts are the same, not {} %",
                percent(experts),
                percent(MIN_SAME_EXPERTS)
            ),
        );
        let reason = self.quarantine.as_deref().unwrap_or_default();
        need(self.quarantine.is_none(), format!("the engines are in quarantine: {reason}"));
        need(self.degenerate == 0, format!("{} continuations repeat one token over and over", self.degenerate));
        failures
    }
}

/// Runs `texts` in chunks of `chunk` tokens on both runners, which keep their intermediate values
/// ([`crate::RunnerOptions::debug`]). `progress` hears of tokens done.
///
/// # Errors
///
/// If a step fails or a text does not fit the model.
pub fn distance(
    primary: &mut Runner,
    hybrid: &mut Runner,
    texts: &[&[u32]],
    chunk: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Distance, RunnerError> {
    let mut distance = Distance::default();
    for text in texts {
        let sequences = [primary.new_sequence(), hybrid.new_sequence()];
        let mut last = [0, 0];
        for tokens in text.chunks(chunk) {
            let p = forward(primary, sequences[0], tokens, tokens.len())?;
            let q = forward(hybrid, sequences[1], tokens, tokens.len())?;
            distance.compare(primary, &p, &q);
            for (last, (runner, forward)) in last.iter_mut().zip([(&*primary, &p), (&*hybrid, &q)]) {
                *last = best_two(forward.logits(0).chunks(runner.config().vocab_size).next_back().unwrap_or(&[])).0;
            }
            primary.recycle(p);
            hybrid.recycle(q);
            progress(tokens.len());
        }
        let mut repeats = [0, 0];
        for (index, runner) in [&mut *primary, &mut *hybrid].into_iter().enumerate() {
            repeats[index] = longest_run(&continuation(runner, sequences[index], last[index])?);
            runner.drop_sequence(sequences[index]);
        }
        // A model that does so by itself is no fault of the engine.
        distance.degenerate += usize::from(repeats[1] > MAX_REPEATS && repeats[0] <= MAX_REPEATS);
    }
    if let FeatureState::Quarantined { reason } = hybrid.feature() {
        distance.quarantine = Some(reason);
    }
    Ok(distance)
}

impl Distance {
    fn compare(&mut self, runner: &Runner, p: &Forward, q: &Forward) {
        let config = runner.config();
        let (p_logits, q_logits) = (p.logits(0), q.logits(0));
        for (p, q) in p_logits.chunks(config.vocab_size).zip(q_logits.chunks(config.vocab_size)) {
            self.positions += 1;
            self.not_finite += q.iter().filter(|logit| !logit.is_finite()).count();
            let (log_p, log_q) = (log_softmax(p), log_softmax(q));
            self.kl += log_p.iter().zip(&log_q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            let (best, first, second) = best_two(p);
            if first - second > CLEAR {
                self.clear += 1;
                self.clear_same += usize::from(best_two(q).0 == best);
            }
        }
        for layer in 0..config.num_hidden_layers {
            let ids = |forward: &Forward| forward.tap_i32(Scope::Layer(layer as u16), "expert_ids").unwrap_or_default();
            let k = config.num_experts_per_tok;
            for (p, q) in ids(p).chunks(k).zip(ids(q).chunks(k)) {
                self.experts += k;
                self.experts_same += p.iter().filter(|id| q.contains(id)).count();
            }
        }
    }
}

fn forward(runner: &mut Runner, sequence: SequenceId, tokens: &[u32], rows: usize) -> Result<Forward, RunnerError> {
    runner.forward(&[Chunk { sequence, tokens, logits: WantLogits::Last(rows), acceptance: Acceptance::Whole }])
}

/// The most likely tokens from `first` on.
fn continuation(runner: &mut Runner, sequence: SequenceId, first: usize) -> Result<Vec<usize>, RunnerError> {
    let mut tokens = vec![first];
    while tokens.len() < CONTINUATION {
        let pass = forward(runner, sequence, &[tokens[tokens.len() - 1] as u32], 1)?;
        tokens.push(best_two(&pass.logits(0)).0);
        runner.recycle(pass);
    }
    Ok(tokens)
}

fn longest_run(tokens: &[usize]) -> usize {
    tokens.chunk_by(|a, b| a == b).map(<[usize]>::len).max().unwrap_or(0)
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum = row.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln();
    row.iter().map(|x| f64::from(*x) - max - sum).collect()
}

/// Two best logits, the best with its index.
fn best_two(row: &[f32]) -> (usize, f32, f32) {
    row.iter().enumerate().fold((0, f32::NEG_INFINITY, f32::NEG_INFINITY), |(at, best, next), (i, x)| match x {
        x if *x > best => (i, *x, best),
        x => (at, best, next.max(*x)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_compared_is_not_near() {
        let near = Distance {
            positions: 1000,
            kl: 1.9,
            clear: 1000,
            clear_same: 995,
            experts: 100,
            experts_same: 98,
            ..Distance::default()
        };
        assert_eq!(near.failures(), Vec::<String>::new());
        assert_eq!(Distance::default().failures().len(), 3, "no position, no clear one, no expert");
        for (far, what) in [
            (Distance { kl: 2.1, ..near.clone() }, "mean KL is 2.10e-3"),
            (Distance { kl: f64::NAN, ..near.clone() }, "mean KL is NaN"),
            (Distance { clear_same: 994, ..near.clone() }, "99.40 %"),
            (Distance { experts_same: 97, ..near.clone() }, "97.00 %"),
            (Distance { quarantine: Some("soft0: off".to_owned()), ..near.clone() }, "soft0: off"),
            (Distance { not_finite: 1, ..near.clone() }, "1 logits"),
            (Distance { degenerate: 1, ..near }, "1 continuations"),
        ] {
            let failures = far.failures();
            assert!(matches!(&failures[..], [one] if one.contains(what)), "{what}: {failures:?}");
        }
        assert_eq!(longest_run(&[1, 2, 2, 2, 3, 3]), 3);
    }
}
