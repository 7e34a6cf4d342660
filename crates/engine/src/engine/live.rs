//! One request on its way through the engine.

use std::collections::VecDeque;
use std::time::Instant;

use troika_base::{RequestId, SequenceId};

use crate::api::{ConstraintState, Delivery, Event, EventSink, FinishReason, GenerateRequest, TokenSet, Usage};
use crate::sampler::{History, allow_only, logprobs, penalize, sample};

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its prompt is not yet computed; it may not even have started.
    Prefill,
    /// It generates.
    Decode,
    /// It gets no further tokens. Events may still wait for room.
    Ended,
}

pub(super) struct Live {
    pub(super) id: RequestId,
    pub(super) request: GenerateRequest,
    pub(super) phase: Phase,
    pub(super) sequence: Option<SequenceId>,
    /// Tokens whose KV exists.
    pub(super) num_computed_tokens: usize,
    /// A step with its tokens is on its way.
    pub(super) in_flight: bool,
    /// Events its listener had no room for.
    pub(super) pending: VecDeque<Event>,
    pub(super) started: Option<Instant>,
    sink: Box<dyn EventSink>,
    newest: [u32; 1],
    num_generated: usize,
    history: History,
    submitted: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Live {
    pub(super) fn new(id: RequestId, request: GenerateRequest, sink: Box<dyn EventSink>) -> Self {
        let history = History::new(&request.prompt, &request.sampling);
        Self {
            id,
            request,
            phase: Phase::Prefill,
            sequence: None,
            num_computed_tokens: 0,
            in_flight: false,
            pending: VecDeque::new(),
            started: None,
            sink,
            newest: [0],
            num_generated: 0,
            history,
            submitted: Instant::now(),
            first_token: None,
            last_token: None,
        }
    }

    /// True if its next tokens may go into a step now.
    pub(super) fn can_run(&self) -> bool {
        self.phase != Phase::Ended && !self.in_flight && self.pending.is_empty()
    }

    /// The next `count` tokens to compute, and whether their last row's logits are wanted.
    pub(super) fn next_tokens(&self, count: usize) -> (&[u32], bool) {
        match self.phase {
            Phase::Prefill => {
                let end = self.num_computed_tokens + count;
                (&self.request.prompt[self.num_computed_tokens..end], end == self.request.prompt.len())
            }
            Phase::Decode | Phase::Ended => (&self.newest, true),
        }
    }

    pub(super) fn report_prefill(&mut self) {
        // Progress is news, not content: nobody waits for room for it.
        if self.pending.is_empty() {
            let event = Event::Prefilled { num_computed_tokens: self.num_computed_tokens };
            if self.sink.offer(&event) == Delivery::Gone {
                self.end();
            }
        }
    }

    /// Draws the next token and reports it, or the end. `logits [vocab_size]` are changed. True if it was a token of the
    /// answer.
    pub(super) fn draw(&mut self, logits: &mut [f32], max_context_tokens: usize) -> bool {
        // Of the model's own distribution, so before anything changes it.
        let likely = self.request.logprobs.map(|top| logprobs(logits, top));
        let token = match self.choose(logits) {
            Ok(token) => token,
            Err(message) => {
                self.fail(&message);
                return false;
            }
        };
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
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
        self.phase = Phase::Decode;
        self.newest = [token];
        self.num_generated += 1;
        self.send(Event::Token { token, logprobs: likely.map(|likely| Box::new(likely.of(token))) });
        if self.phase == Phase::Ended {
            // Nobody listens any more.
        } else if state == ConstraintState::Complete {
            self.finish(FinishReason::ConstraintComplete);
        } else if self.num_generated == self.request.max_new_tokens {
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
        if self.phase != Phase::Ended {
            self.phase = Phase::Ended;
            let usage = self.usage();
            self.send(Event::Finished { reason, usage });
        }
    }

    /// Ends the request with an error. A second end is ignored.
    pub(super) fn fail(&mut self, message: &str) {
        if self.phase != Phase::Ended {
            self.phase = Phase::Ended;
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
        self.phase = Phase::Ended;
        self.pending.clear();
    }

    fn usage(&self) -> Usage {
        let micros = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.duration_since(from).as_micros() as u64,
            _ => 0,
        };
        Usage {
            prompt_tokens: self.request.prompt.len(),
            completion_tokens: self.num_generated,
            queue_us: micros(Some(self.submitted), self.started),
            prefill_us: micros(self.started, self.first_token),
            decode_us: micros(self.first_token, self.last_token),
        }
    }
}
