//! When sequences are drafted for, and how much of a draft is verified. Decisions only: times and counts come in as arguments.
//!
//! Whatever is decided here, the tokens are the same: every one is drawn from the model's own logits. A draft only says what is
//! computed in advance. What it may cost is bounded: if drafted steps bring too few tokens for their time, steps go without for a
//! while, twice as long each time, and every share of a step without drafts is counted with its reason.

use std::collections::VecDeque;

use super::core::Proposal;

/// Most sequences of a decode step that is drafted for. With more, the rows of the others keep the machine as busy.
pub(super) const MAX_DRAFTING: usize = 4;

/// Least chance of a draft, and of all before it, to be right. A row more makes a verification of DeepSeek-V4-Flash read 0.29 times
/// the weights of a token, since it has experts of its own (section 12 of the model spec): a less likely draft costs more than it
/// brings.
const MIN_CHANCE: f32 = 0.3;

/// Drafted steps until it is decided whether they pay, and until they may be found hopeless: if they bring less than two thirds of what
/// they must.
const TRIAL: u32 = 8;
const LEAST_TRIAL: u32 = 4;

/// Steps without drafts after a trial that did not pay: the first time, and at most.
const RESTS: [u32; 2] = [64, 512];

/// Steps without drafts that are compared with: the fastest counts, since the first ones also touch what was never used.
const PLAIN_STEPS: usize = 4;

/// Drafted steps after which one goes without, to learn again what that takes.
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
    /// Drafts have cost more time than they saved.
    Unprofitable,
    /// Beside prompts, where a step's time says nothing: only drafts that have paid before.
    Prompts,
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
            Self::Prompts => "prompts",
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

/// What decode steps of so many sequences took lately, with and without drafts.
#[derive(Clone, Debug, Default)]
struct Price {
    /// Of the last [`PLAIN_STEPS`], microseconds.
    plain_us: VecDeque<u64>,
    /// Drafted steps since the last plain one.
    since_plain: u32,
}

/// Whether drafts pay, all sequences together: they share the steps, and the drafter's.
#[derive(Debug, Default)]
pub(super) struct Drafting {
    /// By number of sequences.
    prices: [Price; MAX_DRAFTING],
    /// Drafted steps of the trial so far.
    steps: u32,
    /// Tokens that they brought, and that as long without drafts would have.
    brought: f64,
    needed: f64,
    /// Steps that still go without drafts.
    rest: u32,
    /// Trials in a row that did not pay.
    failed: u32,
    /// The last trial paid.
    pays: bool,
}

impl Drafting {
    /// Whether steps go without drafts for a while.
    pub(super) fn is_resting(&self) -> bool {
        self.rest > 0
    }

    /// Why the next step of so many sequences is to have no drafts, if it is not.
    pub(super) fn bars(&self, sequences: usize, is_beside_prompts: bool) -> Option<Skip> {
        match sequences.checked_sub(1).and_then(|index| self.prices.get(index)) {
            None => Some(Skip::Batch),
            Some(_) if self.is_resting() => Some(Skip::Unprofitable),
            Some(_) if is_beside_prompts && !self.pays => Some(Skip::Prompts),
            Some(Price { plain_us, since_plain }) => {
                (plain_us.len() < PLAIN_STEPS || *since_plain >= REMEASURE).then_some(Skip::Measuring)
            }
        }
    }

    /// A step of so many sequences without drafts has taken so long; `None` if there is no saying.
    pub(super) fn went_without(&mut self, sequences: usize, us: Option<u64>) {
        self.rest = self.rest.saturating_sub(1);
        let Some(price) = sequences.checked_sub(1).and_then(|index| self.prices.get_mut(index)) else { return };
        price.since_plain = 0;
        price.plain_us.extend(us);
        if price.plain_us.len() > PLAIN_STEPS {
            price.plain_us.pop_front();
        }
    }

    /// A drafted step of so many sequences has brought so many tokens and taken so long, the drafter's part included; `None` if
    /// there is no saying.
    pub(super) fn brought(&mut self, sequences: usize, tokens: usize, us: Option<u64>) {
        let Some(price) = sequences.checked_sub(1).and_then(|index| self.prices.get_mut(index)) else { return };
        price.since_plain += 1;
        let Some((us, plain_us)) = us.zip(price.plain_us.iter().min().copied()) else { return };
        self.steps += 1;
        self.brought += tokens as f64;
        self.needed += sequences as f64 * us as f64 / plain_us.max(1) as f64;
        let is_hopeless = self.steps >= LEAST_TRIAL && 1.5 * self.brought < self.needed;
        if self.steps < TRIAL && !is_hopeless {
            return;
        }
        self.pays = self.brought >= self.needed;
        if !self.pays {
            self.rest = (RESTS[0] << self.failed.min(16)).min(RESTS[1]);
            self.failed += 1;
        } else {
            self.failed = 0;
        }
        (self.steps, self.brought, self.needed) = (0, 0.0, 0.0);
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

    /// One that knows what a step of a sequence takes without drafts: 1000 microseconds.
    fn measured() -> Drafting {
        let mut drafting = Drafting::default();
        for us in [5000, 1200, 1000, 1100] {
            assert_eq!(drafting.bars(1, false), Some(Skip::Measuring));
            drafting.went_without(1, Some(us));
        }
        assert_eq!(drafting.bars(1, false), None);
        drafting
    }

    #[test]
    fn steps_without_drafts_are_measured_now_and_then() {
        let mut drafting = measured();
        assert_eq!([2, MAX_DRAFTING, MAX_DRAFTING + 1].map(|n| drafting.bars(n, false)), {
            [Some(Skip::Measuring), Some(Skip::Measuring), Some(Skip::Batch)]
        });
        for _ in 0..REMEASURE {
            assert_eq!(drafting.bars(1, false), None);
            drafting.brought(1, 2, Some(2000));
        }
        assert_eq!(drafting.bars(1, false), Some(Skip::Measuring));
        drafting.went_without(1, None);
        assert_eq!(drafting.bars(1, false), None, "one beside a prompt says nothing, and is not waited for");
    }

    /// Steps without drafts after a trial whose steps bring so many tokens.
    fn rest_after(drafting: &mut Drafting, tokens: usize) -> u32 {
        for _ in 0..TRIAL {
            assert_eq!(drafting.bars(1, false), None);
            drafting.brought(1, tokens, Some(1500));
        }
        let mut rest = 0;
        while drafting.bars(1, false) == Some(Skip::Unprofitable) {
            drafting.went_without(1, Some(1000));
            rest += 1;
        }
        rest
    }

    #[test]
    fn what_does_not_pay_is_tried_less_and_less() {
        let mut drafting = measured();
        assert_eq!([1, 1, 1, 1, 1].map(|tokens| rest_after(&mut drafting, tokens)), [64, 128, 256, 512, 512]);
        assert_eq!([2, 1, 1].map(|tokens| rest_after(&mut drafting, tokens)), [0, 64, 128]);
    }

    #[test]
    fn what_is_hopeless_is_tried_half_as_long() {
        let mut drafting = measured();
        for _ in 0..LEAST_TRIAL {
            assert_eq!(drafting.bars(1, false), None);
            drafting.brought(1, 1, Some(1501));
        }
        assert_eq!(drafting.bars(1, false), Some(Skip::Unprofitable));
    }

    #[test]
    fn beside_prompts_there_are_only_drafts_that_have_paid() {
        let mut drafting = measured();
        assert_eq!(drafting.bars(1, true), Some(Skip::Prompts), "nothing is known");
        assert_eq!(rest_after(&mut drafting, 2), 0);
        assert_eq!(drafting.bars(1, true), None);
        assert_eq!(rest_after(&mut drafting, 1), 64);
        assert_eq!(drafting.bars(1, true), Some(Skip::Prompts));
    }

    #[test]
    fn sequences_are_judged_together() {
        let mut drafting = measured();
        (0..PLAIN_STEPS).for_each(|_| drafting.went_without(2, Some(1200)));
        // One token more for the two of them, and a third more time.
        (0..TRIAL).for_each(|_| drafting.brought(2, 3, Some(1600)));
        assert_eq!(drafting.bars(2, false), None);
        (0..TRIAL).for_each(|_| drafting.brought(2, 2, Some(1300)));
        assert_eq!(drafting.bars(2, false), Some(Skip::Unprofitable));
    }
}
