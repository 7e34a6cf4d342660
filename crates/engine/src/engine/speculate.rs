//! When a sequence is drafted for, and how much of a draft is verified. Decisions only: times and counts come in as arguments.
//!
//! Whatever is decided here, the tokens are the same: every one is drawn from the model's own logits. A draft only says what is
//! computed in advance. What it may cost is bounded: a sequence whose drafted steps bring too few tokens for their time goes
//! without for a while, twice as long each time, and every step without drafts is counted with its reason.

use super::core::Proposal;

/// Most sequences of a decode step that is drafted for. With more, the rows of the others keep the machine as busy.
pub(super) const MAX_DRAFTING: usize = 4;

/// Least chance of a draft, and of all before it, to be right. A row more makes a verification of DeepSeek-V4-Flash read 0.29 times
/// the weights of a token, since it has experts of its own (section 12 of the model spec): a less likely draft costs more than it
/// brings.
const MIN_CHANCE: f32 = 0.3;

/// Drafted steps of a sequence until it is decided whether they pay.
const TRIAL: u32 = 8;

/// Steps without drafts after a trial that did not pay: the first time, and at most.
const RESTS: [u32; 2] = [32, 512];

/// Drafted steps after which a step goes without, to learn again what that takes.
const REMEASURE: u32 = 64;

/// Why a share of a decode step has no drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Skip {
    /// Nothing would be left for them to say: the answer or the context ends.
    Ending,
    /// What follows is known: the sequence is computed again.
    Known,
    /// Too many sequences decode side by side.
    Batch,
    /// No memory is left for their rows.
    Memory,
    /// It is measured what a step without drafts takes.
    Measuring,
    /// Its drafts have cost more time than they saved.
    Unprofitable,
    /// The drafter was not sure even of the first.
    Unsure,
}

impl Skip {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ending => "ending",
            Self::Known => "known",
            Self::Batch => "batch",
            Self::Memory => "memory",
            Self::Measuring => "measuring",
            Self::Unprofitable => "unprofitable",
            Self::Unsure => "unsure",
        }
    }
}

/// How many of a block's first drafts are worth a row.
pub(super) fn worth_verifying(block: &[Proposal]) -> usize {
    let chances = block.iter().scan(1.0, |chance: &mut f32, proposal| {
        *chance *= 1.0 / (1.0 + (-proposal.confidence).exp());
        Some(*chance)
    });
    chances.take_while(|chance| *chance >= MIN_CHANCE).count()
}

/// Bytes of the values of the largest decode step, or step of the drafter before it: `step` says those of rows and of logits among
/// them, `draft` those of a step of the drafter for so many sequences, whose blocks have `block` tokens; 0 = there is none.
pub(crate) fn decode_bytes(
    max_running: usize,
    block: usize,
    step: impl Fn(usize, usize) -> u64,
    draft: impl Fn(usize) -> u64,
) -> u64 {
    let plain = step(max_running, max_running);
    if block == 0 {
        return plain;
    }
    let few = max_running.min(MAX_DRAFTING);
    let rows = few * (1 + block);
    plain.max(step(rows, rows)).max(draft(few))
}

/// A running mean that forgets, in eighths.
#[derive(Clone, Copy, Debug, Default)]
struct Mean(Option<f32>);

impl Mean {
    fn add(&mut self, us: u64) {
        let us = us.max(1) as f32;
        self.0 = Some(self.0.map_or(us, |mean| mean + (us - mean) / 8.0));
    }
}

/// What decode steps of so many sequences took lately, with and without drafts.
#[derive(Clone, Copy, Debug, Default)]
struct Price {
    plain: Mean,
    drafted: Mean,
    /// Drafted steps since the last plain one.
    since_plain: u32,
}

/// What decode steps took lately, by number of sequences.
#[derive(Debug, Default)]
pub(super) struct Prices([Price; MAX_DRAFTING]);

impl Prices {
    /// True if the next step of so many sequences is to have no drafts, so that both kinds can be compared.
    pub(super) fn wants_plain(&self, sequences: usize) -> bool {
        self.of(sequences).is_some_and(|price| price.plain.0.is_none() || price.since_plain >= REMEASURE)
    }

    /// A step has taken so long, that of the drafter before it included.
    pub(super) fn add(&mut self, sequences: usize, is_drafted: bool, us: u64) {
        let Some(price) = sequences.checked_sub(1).and_then(|index| self.0.get_mut(index)) else { return };
        if is_drafted {
            price.drafted.add(us);
            price.since_plain += 1;
        } else {
            price.plain.add(us);
            price.since_plain = 0;
        }
    }

    /// Tokens of a sequence that a drafted step must bring for it to be as fast as plain ones, if both are known.
    pub(super) fn break_even(&self, sequences: usize) -> Option<f32> {
        let price = self.of(sequences)?;
        Some(price.drafted.0? / price.plain.0?)
    }

    fn of(&self, sequences: usize) -> Option<&Price> {
        self.0.get(sequences.checked_sub(1)?)
    }
}

/// How drafting goes for one sequence.
#[derive(Debug)]
pub(super) struct Drafting {
    /// Drafts that are welcome in its next decode step, or why none is.
    pub(super) wish: Result<usize, Skip>,
    /// Drafted steps since the last verdict, and their tokens.
    steps: u32,
    tokens: u32,
    /// Steps it still goes without.
    rest: u32,
    /// Trials in a row that did not pay.
    failed: u32,
}

impl Default for Drafting {
    fn default() -> Self {
        Self { wish: Err(Skip::Known), steps: 0, tokens: 0, rest: 0, failed: 0 }
    }
}

impl Drafting {
    /// True if the sequence goes without drafts for now.
    pub(super) fn rests(&self) -> bool {
        self.rest > 0
    }

    /// A step without drafts is done.
    pub(super) fn went_without(&mut self) {
        self.rest = self.rest.saturating_sub(1);
    }

    /// A drafted step has brought so many tokens.
    pub(super) fn brought(&mut self, tokens: usize, break_even: Option<f32>) {
        self.steps += 1;
        self.tokens += tokens as u32;
        if self.steps < TRIAL {
            return;
        }
        if break_even.is_some_and(|least| (self.tokens as f32) < least * self.steps as f32) {
            self.rest = (RESTS[0] << self.failed.min(16)).min(RESTS[1]);
            self.failed += 1;
        } else {
            self.failed = 0;
        }
        (self.steps, self.tokens) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_cut_where_it_becomes_unlikely() {
        let block = |chances: &[f32]| -> Vec<Proposal> {
            chances.iter().map(|p| Proposal { token: 0, confidence: (p / (1.0 - p)).ln() }).collect()
        };
        assert_eq!(worth_verifying(&block(&[0.9, 0.8, 0.7, 0.6, 0.9])), 4, "0.9 · 0.8 · 0.7 · 0.6 = 0.3024");
        assert_eq!(worth_verifying(&block(&[0.9, 0.3, 0.99])), 1);
        assert_eq!(worth_verifying(&block(&[0.29, 0.99])), 0);
        assert_eq!(worth_verifying(&block(&[0.99; 5])), 5);
        assert_eq!(worth_verifying(&[Proposal { token: 0, confidence: f32::NAN }]), 0);
        assert_eq!(worth_verifying(&[]), 0);
    }

    #[test]
    fn both_kinds_of_steps_are_measured() {
        let mut prices = Prices::default();
        assert!(prices.wants_plain(1) && prices.wants_plain(MAX_DRAFTING));
        assert!(!prices.wants_plain(MAX_DRAFTING + 1), "there are no drafts anyway");
        prices.add(1, false, 1000);
        assert!(!prices.wants_plain(1) && prices.wants_plain(2));
        assert_eq!(prices.break_even(1), None);
        for _ in 0..REMEASURE {
            assert!(!prices.wants_plain(1));
            prices.add(1, true, 1500);
        }
        assert_eq!((prices.wants_plain(1), prices.break_even(1)), (true, Some(1.5)));
        prices.add(1, false, 1800);
        assert_eq!((prices.wants_plain(1), prices.break_even(1)), (false, Some(1500.0 / 1100.0)));
    }

    #[test]
    fn what_does_not_pay_is_tried_less_and_less() {
        let mut drafting = Drafting::default();
        let mut trial = |tokens: usize| {
            for _ in 0..TRIAL {
                assert!(!drafting.rests());
                drafting.brought(tokens, Some(1.5));
            }
            let mut rest = 0;
            while drafting.rests() {
                drafting.went_without();
                rest += 1;
            }
            rest
        };
        assert_eq!([1, 1, 1, 1, 1, 1].map(&mut trial), [32, 64, 128, 256, 512, 512]);
        assert_eq!([2, 1, 1].map(&mut trial), [0, 32, 64]);
        let mut unpriced = Drafting::default();
        (0..TRIAL).for_each(|_| unpriced.brought(1, None));
        assert!(!unpriced.rests(), "nobody knows yet what it costs");
    }
}
