//! One request on its way through the engine.

use std::collections::VecDeque;

use troika_base::{RequestId, SequenceId};

use super::core::Submission;
use super::disk::LoadId;
use super::prefix::Thread;
use crate::api::{
    ConstraintState, Delivery, Event, EventSink, FinishReason, GenerateRequest, RequestRecord, TokenSet, Usage,
};
use crate::sampler::{History, allow_only, logprobs, penalize, sample};

pub(super) struct Live {
    pub(super) id: RequestId,
    pub(super) request: GenerateRequest,
    /// Prompt and answer so far. The prompt is taken out of the request.
    pub(super) tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub(super) prompt_tokens: usize,
    /// It gets no further tokens. Events may still wait for room.
    pub(super) ended: bool,
    pub(super) sequence: Option<SequenceId>,
    /// Leading tokens whose KV exists.
    pub(super) num_computed_tokens: usize,
    /// Those of them that were found when it last got state.
    pub(super) resumed_at: usize,
    /// What was computed of it may be wrong: it loses its state as soon as no step of it is in flight.
    pub(super) is_untrusted: bool,
    /// Events its listener had no room for.
    pub(super) pending: VecDeque<Event>,
    pub(super) started_us: Option<u64>,
    /// Has had state.
    pub(super) has_attached: bool,
    /// What is being read of its prefix; until then it has no state.
    pub(super) load: Option<LoadId>,
    /// Where it stands with the prefix cache, if there is one.
    pub(super) thread: Option<Thread>,
    /// Tokens it had when it first started.
    pub(super) cached_tokens: usize,
    /// Those of them that came from disk.
    pub(super) cached_tokens_from_disk: usize,
    /// Filled as it goes; see [`Self::report_end`].
    pub(super) notes: RequestRecord,
    sink: Box<dyn EventSink>,
    history: History,
    pub(super) submitted_us: u64,
    first_token_us: Option<u64>,
    last_token_us: Option<u64>,
}

impl Live {
    pub(super) fn new(submission: Submission) -> Self {
        let Submission { id, mut request, sink, submitted_us } = submission;
        let history = History::new(&request.prompt, &request.sampling);
        let tokens = std::mem::take(&mut request.prompt);
        Self {
            id,
            request,
            prompt_tokens: tokens.len(),
            tokens,
            ended: false,
            sequence: None,
            num_computed_tokens: 0,
            resumed_at: 0,
            is_untrusted: false,
            pending: VecDeque::new(),
            started_us: None,
            has_attached: false,
            load: None,
            thread: None,
            cached_tokens: 0,
            cached_tokens_from_disk: 0,
            notes: RequestRecord { request: Some(id), ..RequestRecord::default() },
            sink,
            history,
            submitted_us,
            first_token_us: None,
            last_token_us: None,
        }
    }

    pub(super) fn num_generated(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    pub(super) fn report_prefill(&mut self) {
        // Progress is news, not content: nobody waits for room for it.
        if self.pending.is_empty() {
            let event = Event::Prefilled { num_computed_tokens: self.num_computed_tokens, usage: self.usage() };
            if self.sink.offer(&event) == Delivery::Gone {
                self.end();
            }
        }
    }

    /// Draws the next token and reports it, or the end. `logits [vocab_size]` are changed. True if it was a token of the
    /// answer.
    pub(super) fn draw(&mut self, logits: &mut [f32], max_context_tokens: usize, now_us: u64) -> bool {
        // Of the model's own distribution, so before anything changes it.
        let likely = self.request.logprobs.map(|top| logprobs(logits, top));
        let token = match self.choose(logits) {
            Ok(token) => token,
            Err(message) => {
                self.fail(&message);
                return false;
            }
        };
        self.first_token_us.get_or_insert(now_us);
        self.last_token_us = Some(now_us);
        if self.request.stop_tokens.contains(&token) {
            self.finish(FinishReason::StopToken(token));
            return false;
        }
        let state = match self.request.constraint.as_mut().map(|constraint| constraint.accept(token)) {
            Some(Err(message)) => {
                self.fail(&message);
                return false;
            }
            Some(Ok(state)) => state,
            None => ConstraintState::Open,
        };
        self.history.push(token);
        self.tokens.push(token);
        self.send(Event::Token { token, logprobs: likely.map(|likely| Box::new(likely.of(token))) });
        if self.ended {
            // Nobody listens any more.
        } else if state == ConstraintState::Complete {
            self.finish(FinishReason::ConstraintComplete);
        } else if self.num_generated() == self.request.max_new_tokens {
            self.finish(FinishReason::Length);
        } else if self.num_computed_tokens + 1 >= max_context_tokens {
            self.finish(FinishReason::ContextFull);
        }
        true
    }

    /// The next token; it depends on this request alone.
    fn choose(&mut self, logits: &mut [f32]) -> Result<u32, String> {
        let request = &mut self.request;
        penalize(logits, &request.sampling, &self.history, &request.logit_bias);
        if let Some(constraint) = &mut request.constraint {
            let mut allowed = TokenSet::new(logits.len());
            constraint.allow(&mut allowed)?;
            allow_only(logits, &allowed).map_err(|error| error.to_string())?;
        }
        sample(logits, &request.sampling, self.num_computed_tokens).map_err(|error| error.to_string())
    }

    /// Ends the request in an ordinary way. A second end is ignored.
    pub(super) fn finish(&mut self, reason: FinishReason) {
        if !self.ended {
            self.ended = true;
            self.notes.finish = Some(reason);
            let usage = self.usage();
            self.send(Event::Finished { reason, usage });
        }
    }

    /// Ends the request with an error. A second end is ignored.
    pub(super) fn fail(&mut self, message: &str) {
        if !self.ended {
            self.ended = true;
            self.notes.failure = Some(message.to_owned());
            self.send(Event::Failed { message: message.to_owned() });
        }
    }

    /// Offers what waits, in order, as far as there is room.
    pub(super) fn deliver(&mut self) {
        while let Some(event) = self.pending.front() {
            match self.sink.offer(event) {
                Delivery::Taken => {
                    self.pending.pop_front();
                }
                Delivery::Full => return,
                Delivery::Gone => return self.end(),
            }
        }
    }

    fn send(&mut self, event: Event) {
        self.pending.push_back(event);
        self.deliver();
    }

    /// Ends without a word, since nobody listens.
    fn end(&mut self) {
        self.ended = true;
        self.pending.clear();
    }

    /// Says how it was served.
    pub(super) fn report_end(&mut self) {
        self.notes.usage = self.usage();
        match &self.thread {
            // The last token is known and not computed.
            Some(thread) => thread.note(self.tokens.len() - 1, &mut self.notes),
            None => self.notes.skipped_because = Some("no_cache"),
        }
        self.sink.ended(&self.notes);
    }

    fn usage(&self) -> Usage {
        let between = |from: Option<u64>, to: Option<u64>| from.zip(to).map_or(0, |(from, to)| to.saturating_sub(from));
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            cached_tokens_from_disk: self.cached_tokens_from_disk,
            completion_tokens: self.num_generated(),
            queue_us: between(Some(self.submitted_us), self.started_us),
            prefill_us: between(self.started_us, self.first_token_us),
            decode_us: between(self.first_token_us, self.last_token_us),
        }
    }
}
