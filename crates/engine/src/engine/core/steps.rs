//! Steps on their way: what a plan becomes, what is waited for, and what its results mean for each request.
//!
//! A decode step that is drafted for goes twice: the drafter's block first, then the newest token with the drafts that are worth
//! it. To the scheduler that is one step. Tokens are drawn row by row as if each had been computed alone; the first that is not
//! the draft ends it, and the rows after it are taken back.

use std::borrow::Cow;
use std::time::Duration;

use troika_base::RequestId;
use troika_graph::Acceptance;
use troika_runtime::{ExecutorError, Priority, Ticket};
use troika_scheduler::{Lane, Part, StepPlan};

use super::{Core, StepResult, StepRunner, lock};
use crate::api::{DraftCounts, EngineStatus, FinishReason, MAX_CHUNK_RECORDS, StepNote, StepTotals};
use crate::engine::live::Live;
use crate::engine::speculate::{Skip, worth_verifying};
use crate::runner::{Chunk, RunnerError, WantLogits};

/// A step in flight.
pub(super) struct InFlight {
    lane: Lane,
    /// The scheduler's number of it.
    number: u64,
    /// In the order of its chunks.
    shares: Vec<Share>,
    /// The drafter works on it; the model's turn comes after.
    is_drafting: bool,
    /// What the drafter took.
    draft_us: u64,
}

/// What a request has in a step.
struct Share {
    request: RequestId,
    /// Position of the first token.
    start: usize,
    /// Known tokens.
    width: usize,
    /// Drafts that there may be after them.
    max_drafts: usize,
    drafts: Vec<u32>,
}

impl Share {
    fn rows(&self) -> usize {
        self.width + self.drafts.len()
    }
}

impl<R: StepRunner> Core<R> {
    pub(super) fn carry_out(&mut self, lane: Lane, plan: StepPlan) {
        for id in plan.preempted {
            let live = self.requests.get_mut(&id).expect("the scheduler knows live requests only");
            match (live.sequence.take(), live.load.take(), &mut self.prefixes) {
                (Some(sequence), _, _) => self.runner.drop_sequence(sequence),
                (None, Some(load), Some(prefixes)) => prefixes.abandon(load),
                _ => panic!("a preempted sequence has state or is about to get it"),
            }
            live.num_computed_tokens = 0;
            live.notes.preemptions += 1;
            tracing::debug!(request_id = %id, "preempted");
        }
        for id in plan.exhausted {
            let live = self.requests.get_mut(&id).expect("the scheduler knows live requests only");
            live.finish(FinishReason::MemoryFull);
        }
        if plan.parts.is_empty() {
            return;
        }
        let share = |part: &Part| Share {
            request: part.request,
            start: part.chunk.start,
            width: part.chunk.width,
            max_drafts: part.drafts,
            drafts: Vec::new(),
        };
        let shares = plan.parts.iter().map(share).collect();
        let step = InFlight { lane, number: plan.number, shares, is_drafting: false, draft_us: 0 };
        match lane {
            Lane::Decode => self.decode(step),
            Lane::Prefill => self.prefill(step, plan.parts),
        }
    }

    fn prefill(&mut self, step: InFlight, parts: Vec<Part>) {
        for part in &parts {
            let after_hit = part.chunk.start > 0 && part.chunk.start == self.requests[&part.request].resumed_at;
            part.chunk.narrowed_by.iter().for_each(|narrowing| self.runner.note_narrowed(narrowing.rule, after_hit));
        }
        if !self.compute(step) {
            return;
        }
        for part in parts {
            let mut status = lock(&self.status);
            for narrowing in &part.chunk.narrowed_by {
                *status.narrowed_total.entry(narrowing.rule).or_default() += 1;
            }
            drop(status);
            let live = self.requests.get_mut(&part.request).expect("taken from the table");
            if live.notes.chunks.len() < MAX_CHUNK_RECORDS {
                live.notes.chunks.push(part.chunk);
            }
        }
    }

    /// With drafts where they are wanted and may be.
    fn decode(&mut self, mut step: InFlight) {
        if self.block_of_drafts > 0 {
            self.choose_drafts(&mut step.shares);
        }
        let drafted = step.shares.iter().filter(|share| share.max_drafts > 0).map(|share| {
            let live = &self.requests[&share.request];
            (live.sequence.expect("a part of a step has a sequence"), live.tokens[share.start])
        });
        let newest: Vec<_> = drafted.collect();
        if newest.is_empty() {
            self.compute(step);
            return;
        }
        match self.runner.submit_draft(&newest) {
            Ok(ticket) => {
                step.is_drafting = true;
                self.in_flight.insert(ticket, step);
            }
            Err(error) => self.refuse(step, &error),
        }
    }

    /// Says how many drafts each sequence wants.
    pub(super) fn wish_for_drafts(&mut self) {
        if self.block_of_drafts == 0 {
            return;
        }
        for (id, live) in self.requests.iter().filter(|(_, live)| live.sequence.is_some()) {
            // Memory is not set aside for drafts that there will not be.
            let wish = match wish(live, self.block_of_drafts, self.max_context_tokens) {
                Ok(drafts) if !self.drafting.is_resting() => drafts,
                _ => 0,
            };
            self.scheduler.set_drafts(*id, wish);
        }
    }

    /// Strikes the drafts that there are not to be, and counts why.
    fn choose_drafts(&mut self, shares: &mut [Share]) {
        let is_beside_prompts = self.in_flight.values().any(|step| step.lane == Lane::Prefill);
        let barred = self.drafting.bars(shares.len(), is_beside_prompts);
        for share in shares {
            let live = self.requests.get_mut(&share.request).expect("taken from the table");
            let wish = wish(live, self.block_of_drafts, self.max_context_tokens);
            let no_room = (share.max_drafts == 0).then_some(Skip::Memory);
            if let Some(skip) = wish.err().or(barred).or(no_room) {
                share.max_drafts = 0;
                count(&self.status, live, |counts| *counts.skipped.entry(skip.name()).or_default() += 1);
            }
        }
    }

    /// Hands a step to the model. False if it was refused.
    fn compute(&mut self, step: InFlight) -> bool {
        self.want_boundaries(&step.shares);
        let tokens: Vec<Cow<'_, [u32]>> =
            step.shares.iter().map(|share| tokens_of(&self.requests[&share.request], share)).collect();
        let chunk = |(share, tokens): (&Share, _)| {
            let live = &self.requests[&share.request];
            // Where a prompt ends its answer begins, whichever the lane.
            let is_newest = share.start + share.width == live.tokens.len();
            let logits = if step.lane == Lane::Decode || is_newest {
                WantLogits::Last(1 + share.drafts.len())
            } else {
                WantLogits::No
            };
            let sequence = live.sequence.expect("a part of a step has a sequence");
            let acceptance = if share.drafts.is_empty() { Acceptance::Whole } else { Acceptance::Partial };
            Chunk { sequence, tokens, logits, acceptance }
        };
        let chunks: Vec<Chunk<'_>> = step.shares.iter().zip(tokens.iter().map(|tokens| &**tokens)).map(chunk).collect();
        let priority = if step.lane == Lane::Decode { Priority::Decode } else { Priority::Prefill };
        let submitted = self.runner.submit(&chunks, priority);
        match submitted {
            Ok(ticket) => {
                self.in_flight.insert(ticket, step);
                true
            }
            Err(error) => {
                self.refuse(step, &error);
                false
            }
        }
    }

    /// A step that could not be submitted.
    fn refuse(&mut self, step: InFlight, error: &RunnerError) {
        self.scheduler.abandon(step.number);
        for share in step.shares {
            self.requests.get_mut(&share.request).expect("taken from the table").fail(&error.to_string());
        }
    }

    fn want_boundaries(&self, shares: &[Share]) {
        let Some(prefixes) = &self.prefixes else { return };
        for share in shares {
            let live = &self.requests[&share.request];
            let (Some(thread), Some(sequence)) = (&live.thread, live.sequence) else { continue };
            let wanted = prefixes.wanted(thread, share.start, share.rows(), live.tokens.len(), live.prompt_tokens);
            if !wanted.is_empty()
                && let Ok(state) = self.runner.sequence_state(sequence)
            {
                state.want_boundaries(&wanted);
            }
        }
    }

    /// Leaves what a sequence has computed to others.
    fn store(&mut self, id: RequestId) {
        let Some(live) = self.requests.get_mut(&id) else { return };
        let (Some(prefixes), Some(thread), Some(sequence)) = (&mut self.prefixes, &mut live.thread, live.sequence)
        else {
            return;
        };
        if let Ok(state) = self.runner.sequence_state(sequence) {
            prefixes.store(thread, &live.tokens, live.prompt_tokens, &state);
        }
    }

    /// Waits for a step in flight, at most for `timeout`, and takes its results at the time `now_us` then says.
    ///
    /// # Panics
    ///
    /// If nothing is in flight, or the devices are gone.
    pub fn wait(&mut self, timeout: Option<Duration>, now_us: impl Fn(&R) -> u64) {
        let mut timeout = timeout;
        self.turn_is_due = true;
        // With a step fail those that build on it, and nothing is planned before all of them are known.
        while self.wait_once(timeout, &now_us) && !self.in_flight.is_empty() {
            timeout = Some(Duration::ZERO);
        }
    }

    /// As [`Self::wait`]; true if a step failed.
    fn wait_once(&mut self, timeout: Option<Duration>, now_us: &impl Fn(&R) -> u64) -> bool {
        match self.runner.wait(timeout) {
            Ok(None) => {
                self.note_quarantine();
                false
            }
            Ok(Some(result)) => {
                self.note_quarantine();
                self.publish_nodes();
                let step = self.in_flight.remove(&result.ticket).expect("every step in flight is noted");
                if step.is_drafting {
                    self.verify(step, result);
                } else {
                    let now_us = now_us(&self.runner);
                    self.take_results(&step, result, now_us);
                }
                false
            }
            Err(RunnerError::Executor(ExecutorError::Node { step, reason })) => {
                tracing::error!(%step, reason, "a step failed");
                self.note_quarantine();
                self.publish_nodes();
                let failed = self.in_flight.remove(&Ticket(step)).expect("every step in flight is noted");
                self.scheduler.abandon(failed.number);
                for share in failed.shares {
                    let live = self.requests.get_mut(&share.request).expect("requests outlive their steps");
                    // The runner has dropped its state, unless the drafter's block was of others.
                    if let Some(sequence) = live.sequence.take() {
                        self.runner.drop_sequence(sequence);
                    }
                    live.fail(&format!("the computation failed: {reason}"));
                }
                true
            }
            Err(error) => panic!("the devices are gone: {error}"),
        }
    }

    /// The drafter is done with a step: the drafts that are likely enough are verified.
    fn verify(&mut self, mut step: InFlight, result: StepResult) {
        let proposals: usize = result.drafts.iter().map(Vec::len).sum();
        add(&mut lock(&self.status).draft, proposals, result.elapsed_us);
        (step.is_drafting, step.draft_us) = (false, result.elapsed_us);
        let drafted = step.shares.iter_mut().filter(|share| share.max_drafts > 0);
        for (share, block) in drafted.zip(result.drafts) {
            let live = self.requests.get_mut(&share.request).expect("requests outlive their steps");
            if live.ended || live.is_untrusted {
                continue;
            }
            let block = &block[..share.max_drafts.min(block.len())];
            let verified = worth_verifying(block);
            share.drafts = block[..verified].iter().map(|proposal| proposal.token).collect();
            count(&self.status, live, |counts| {
                counts.withheld += (block.len() - verified) as u64;
                if verified == 0 {
                    *counts.skipped.entry(Skip::Unsure.name()).or_default() += 1;
                }
            });
        }
        self.compute(step);
    }

    fn take_results(&mut self, step: &InFlight, result: StepResult, now_us: u64) {
        let (mut elapsed_us, total_us) = (result.elapsed_us, result.elapsed_us);
        if step.lane == Lane::Prefill {
            // What it waited for the step before it is that one's time.
            elapsed_us = elapsed_us.min(now_us.saturating_sub(self.last_prefill_us));
            self.last_prefill_us = now_us;
        }
        let rows: usize = step.shares.iter().map(Share::rows).sum();
        {
            let EngineStatus { decode, prefill, .. } = &mut *lock(&self.status);
            add(if step.lane == Lane::Decode { decode } else { prefill }, rows, elapsed_us);
        }
        let note = StepNote { rows, tiled_rows: result.tiled_rows, model_us: elapsed_us, total_us };
        let mut go_on = Vec::new();
        let mut accepted = Vec::new();
        for (share, logits) in step.shares.iter().zip(result.logits) {
            let live = self.requests.get_mut(&share.request).expect("requests outlive their steps");
            live.notes.ledger.merge(&result.ledger);
            if step.lane == Lane::Prefill && live.notes.steps.len() < MAX_CHUNK_RECORDS {
                live.notes.steps.push(note);
            }
            let drawn = self.take_rows(share, logits, now_us);
            accepted.push(drawn.accepted);
            if drawn.goes_on {
                go_on.push(share.request);
            }
            if !self.requests[&share.request].is_untrusted {
                self.store(share.request);
            }
        }
        let us = step.draft_us + elapsed_us;
        if step.lane == Lane::Decode && self.block_of_drafts > 0 {
            self.judge_drafts(step, &accepted, us);
        }
        self.scheduler.complete(step.number, now_us, us, result.longest_node_us);
        self.given_up.step_done(self.scheduler.bytes_spare());
        go_on.into_iter().for_each(|id| self.scheduler.push_token(id));
    }

    /// Draws what the rows of a share say, and keeps those that hold.
    fn take_rows(&mut self, share: &Share, mut logits: Vec<f32>, now_us: u64) -> Drawn {
        let live = self.requests.get_mut(&share.request).expect("requests outlive their steps");
        let before = live.num_computed_tokens;
        live.num_computed_tokens += share.width;
        let of_prompt = live.num_computed_tokens.min(live.prompt_tokens).saturating_sub(before);
        lock(&self.status).prompt_tokens_total += of_prompt as u64;
        let is_heard = !live.ended && !live.is_untrusted;
        if is_heard && of_prompt > 0 {
            live.report_prefill();
        }
        // One that was decoded before a preemption, and is decoded again, has its next token already.
        let is_newest = is_heard && live.num_computed_tokens == live.tokens.len();
        let (mut tokens, mut accepted) = (0, 0);
        if is_newest && !logits.is_empty() {
            let vocab_size = logits.len() / (1 + share.drafts.len());
            for logits in logits.chunks_exact_mut(vocab_size) {
                if live.ended {
                    break;
                }
                tokens += u64::from(live.draw(logits, self.max_context_tokens, now_us));
                if live.ended || share.drafts.get(accepted) != live.tokens.last() {
                    break;
                }
                // The next row is that of the token just drawn.
                live.num_computed_tokens += 1;
                accepted += 1;
            }
        }
        let goes_on = is_newest && !live.ended;
        if tokens > 0 {
            lock(&self.status).completion_tokens_total += tokens;
        }
        if !share.drafts.is_empty() {
            let sequence = live.sequence.expect("a part of a step has a sequence");
            self.runner.commit(sequence, share.width + accepted).expect("sequences outlive their steps");
            self.scheduler.accept_drafts(share.request, accepted);
        }
        Drawn { accepted, goes_on }
    }

    /// Counts what became of drafts, and learns from it.
    fn judge_drafts(&mut self, step: &InFlight, accepted: &[usize], us: u64) {
        let sequences = step.shares.len();
        // Beside prompts a step also waits for nodes of theirs.
        let us = self.in_flight.is_empty().then_some(us);
        if step.shares.iter().any(|share| share.max_drafts > 0) {
            self.drafting.brought(sequences, sequences + accepted.iter().sum::<usize>(), us);
        } else {
            self.drafting.went_without(sequences, us);
        }
        for (share, accepted) in step.shares.iter().zip(accepted.iter().copied()) {
            let live = self.requests.get_mut(&share.request).expect("requests outlive their steps");
            if share.drafts.is_empty() {
                continue;
            }
            count(&self.status, live, |counts| {
                counts.verifications += 1;
                counts.drafted += share.drafts.len() as u64;
                counts.accepted += accepted as u64;
                counts.by_place.resize(counts.by_place.len().max(share.drafts.len()), [0; 2]);
                for (place, [drafted, of_them]) in counts.by_place[..share.drafts.len()].iter_mut().enumerate() {
                    *drafted += 1;
                    *of_them += u64::from(place < accepted);
                }
            });
        }
    }
}

/// Known tokens and drafts of a share.
fn tokens_of<'a>(live: &'a Live, share: &Share) -> Cow<'a, [u32]> {
    let known = &live.tokens[share.start..share.start + share.width];
    if share.drafts.is_empty() { Cow::Borrowed(known) } else { Cow::Owned([known, &share.drafts].concat()) }
}

/// What came of a share.
struct Drawn {
    /// Drafts that were the next tokens.
    accepted: usize,
    /// There is a newest token to compute.
    goes_on: bool,
}

/// Drafts that are welcome in a sequence's next decode step. A token is drawn beside each and one after them.
fn wish(live: &Live, block: usize, max_context_tokens: usize) -> Result<usize, Skip> {
    if live.num_computed_tokens + 1 < live.tokens.len() {
        return Err(Skip::Known);
    }
    let of_answer = (live.request.max_new_tokens - live.num_generated()).saturating_sub(1);
    let of_context = max_context_tokens.saturating_sub(live.tokens.len() + 1);
    match block.min(of_answer).min(of_context) {
        0 => Err(Skip::Ending),
        drafts => Ok(drafts),
    }
}

fn add(totals: &mut StepTotals, tokens: usize, us: u64) {
    let StepTotals { steps, tokens: all, busy_us } = totals;
    *steps += 1;
    *all += tokens as u64;
    *busy_us += us;
}

/// Changes the counts of a request and of the engine.
fn count(status: &std::sync::Mutex<EngineStatus>, live: &mut Live, change: impl Fn(&mut DraftCounts)) {
    [&mut live.notes.drafts, &mut lock(status).drafts].into_iter().flatten().for_each(change);
}
