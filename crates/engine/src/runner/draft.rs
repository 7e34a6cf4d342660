//! Drafts (model spec 10.2): a step that reads the drafter's context of some sequences and leaves no state.

use std::sync::Arc;

use troika_base::{NumericClass, SequenceId};
use troika_graph::{Acceptance, Scope, Segment, StepRows};
use troika_model::Emitter;
use troika_runtime::{Lane, Priority, Step, Ticket};

use super::{Forward, Pending, Runner, RunnerError};
use crate::engine::core::Proposal;

/// What the drafter proposes after the newest token.
#[derive(Debug)]
pub struct Draft {
    /// Proposed tokens, in order.
    pub tokens: Vec<u32>,
    /// Logits they were taken from, Markov correction included, `[block, vocab_size]`.
    pub logits: Vec<f32>,
    /// Raw confidence of each.
    pub confidence: Vec<f32>,
    /// The pass, for its taps and ledger.
    pub forward: Forward,
}

impl Runner {
    /// Tokens that the drafter proposes at once; 0 if its context is not computed.
    pub fn block_of_drafts(&self) -> usize {
        let dspark = self.config().dspark.as_ref().filter(|_| self.options.draft_context);
        dspark.map_or(0, |dspark| dspark.block_size)
    }

    /// Queues a step that drafts what may follow the newest token of each of these sequences, which is not yet part of it.
    ///
    /// # Errors
    ///
    /// If there is no drafter, a token or sequence is unknown, or rows of a sequence wait for [`Self::commit`].
    pub fn submit_draft(&mut self, newest: &[(SequenceId, u32)]) -> Result<Ticket, RunnerError> {
        let Some(dspark) = self.config().dspark.clone().filter(|_| self.options.draft_context) else {
            return Err(RunnerError::NoDrafter { reason: "its context is not being computed" });
        };
        if newest.is_empty() {
            return Err(RunnerError::Empty);
        }
        let (mut rows, mut states) = (StepRows::default(), Vec::with_capacity(newest.len()));
        for (sequence, token) in newest.iter().copied() {
            let state = self.state(sequence)?;
            if self.uncommitted.contains(&sequence) {
                return Err(RunnerError::Uncommitted(sequence));
            }
            let (position, row) = (state.len(), rows.tokens.len());
            self.check_tokens(&[token], position)?;
            rows.tokens.push(token as i32);
            rows.tokens.resize(row + dspark.block_size, dspark.noise_token_id as i32);
            let (rows_of_it, acceptance) = (dspark.block_size, Acceptance::Whole);
            rows.segments.push(Segment { sequence, row, rows: rows_of_it, position, acceptance });
            states.push(Arc::clone(state));
        }
        rows.logit_rows = (0..rows.tokens.len()).collect();
        let (emitter, options, executor) = (&self.emitter, &self.options, &self.executor);
        let emit = || executor.template(emitter.draft(options.class, newest.len(), options.debug), Lane::Decode);
        let template = Arc::clone(self.draft_templates.entry(newest.len()).or_insert_with(emit));
        let ticket = self.executor.submit(Step { template, rows, states, priority: Priority::Decode })?;
        // If it fails, its sequences are given up like those of any step.
        let chunks = newest.iter().map(|(sequence, _)| (*sequence, 0, Acceptance::Whole)).collect();
        self.pending.insert(ticket, Pending { chunks, logit_rows: Vec::new() });
        Ok(ticket)
    }

    /// What the drafter proposes to follow `newest`, with everything there is to see of it.
    ///
    /// # Errors
    ///
    /// As [`Self::submit_draft`], or if the step fails.
    ///
    /// # Panics
    ///
    /// If other steps are in flight.
    pub fn draft(&mut self, sequence: SequenceId, newest: u32) -> Result<Draft, RunnerError> {
        let ticket = self.submit_draft(&[(sequence, newest)])?;
        let (done, forward) = self.next_done()?;
        assert_eq!(done, ticket, "`draft` needs an idle runner");
        let proposals = self.drafts(&forward).remove(0);
        let logits = forward.tap(self.last_stage(), "draft_logits").expect("a draft keeps its logits");
        Ok(Draft {
            tokens: proposals.iter().map(|proposal| proposal.token).collect(),
            confidence: proposals.iter().map(|proposal| proposal.confidence).collect(),
            logits,
            forward,
        })
    }

    fn last_stage(&self) -> Scope {
        Scope::Stage((self.facts().num_stages as u16).saturating_sub(1))
    }

    /// What a pass proposes for each of its sequences; nothing if it was none of the drafter.
    pub(super) fn drafts(&self, forward: &Forward) -> Vec<Vec<Proposal>> {
        let last = self.last_stage();
        let taps = (forward.tap_i32(last, "draft_ids"), forward.tap(last, "confidence"));
        let (Some(ids), Some(confidences)) = taps else { return Vec::new() };
        let proposals = ids.iter().zip(confidences);
        let proposals: Vec<Proposal> =
            proposals.map(|(id, confidence)| Proposal { token: *id as u32, confidence }).collect();
        proposals.chunks(self.block_of_drafts()).map(<[Proposal]>::to_vec).collect()
    }
}

/// Bytes of the values of a step that drafts for so many sequences.
pub(crate) fn draft_bytes(emitter: &Emitter, class: NumericClass, sequences: usize) -> u64 {
    emitter.draft(class, sequences, false).memory().peak_bytes()
}
