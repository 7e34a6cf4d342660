//! What callers say to the engine and hear back. Token ids only: text, stop strings included, is the caller's.

use troika_base::RequestId;

/// How the next token is drawn from the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 = the most likely token.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probability reaches this; 1 = all.
    pub top_p: f32,
    /// Keep this many tokens; 0 = all.
    pub top_k: usize,
    /// Keep tokens at least this fraction as likely as the best; 0 = all.
    pub min_p: f32,
    /// Randomness is keyed by this and the position, so neighbours in a batch cannot change a token.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token; ties go to the lowest id.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 };
}

/// One generation.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, at least one.
    pub max_new_tokens: usize,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Tokens that end the generation; the token that did is not delivered.
    pub stop_tokens: Vec<u32>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn.
    StopToken(u32),
    /// `max_new_tokens` were delivered.
    Length,
    /// The model's context is full.
    ContextFull,
    /// The caller cancelled, or its sink was gone.
    Cancelled,
    /// The engine is shutting down.
    Shutdown,
}

/// Counts and times of one generation, filled by the engine loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens delivered.
    pub completion_tokens: usize,
    /// From submission to the first step with a token of this request, microseconds.
    pub queue_us: u64,
    /// From the start of the first step to the first generated token, microseconds.
    pub prefill_us: u64,
    /// From the first to the last generated token, microseconds.
    pub decode_us: u64,
}

/// What a request hears. After [`Event::Finished`] or [`Event::Failed`] nothing follows.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// So many prompt tokens are computed; sent after each prefill step.
    Prefilled {
        /// Prompt tokens whose KV exists.
        num_computed_tokens: usize,
    },
    /// The next generated token.
    Token(u32),
    /// The generation ended in an ordinary way.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Counts and times.
        usage: Usage,
    },
    /// The engine could not go on with this request.
    Failed {
        /// What a person can read.
        message: String,
    },
}

/// How an event was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Taken.
    Taken,
    /// No room now: the engine keeps the event, pauses the sequence and offers it again.
    Full,
    /// Nobody listens any more: the engine cancels the request.
    Gone,
}

/// Where the events of one request go. Called on the engine's thread: must not block.
pub trait EventSink: Send {
    /// Offers the next event.
    fn offer(&mut self, event: &Event) -> Delivery;
}

/// Why the engine refused a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The request is malformed; `reason` names what and the limit.
    #[error("{reason}")]
    Invalid {
        /// What is wrong.
        reason: String,
    },
    /// The prompt leaves no room in the context.
    #[error("prompt of {prompt_tokens} tokens does not fit the context of {max_context_tokens}")]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// The engine's limit.
        max_context_tokens: usize,
    },
    /// Too many requests wait already.
    #[error("the queue is full: {queued} requests wait (limit {limit})")]
    QueueFull {
        /// Requests waiting.
        queued: usize,
        /// The bound.
        limit: usize,
    },
    /// The engine has stopped; `reason` says why.
    #[error("the engine is not running: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },
}

/// A snapshot of the engine's load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Requests that have not started.
    pub queued: usize,
    /// Requests that have started.
    pub running: usize,
    /// Prompt tokens computed since the start.
    pub prompt_tokens_total: u64,
    /// Tokens generated since the start.
    pub completion_tokens_total: u64,
    /// Requests that ended, by any reason.
    pub requests_total: u64,
    /// Why the engine stopped, if it did.
    pub failure: Option<String>,
}

/// The engine as callers see it, usable from any thread.
pub trait Generator: Send + Sync {
    /// Queues a request. Its events go to `sink`, in order.
    ///
    /// # Errors
    ///
    /// If the request cannot be served; nothing is queued then and `sink` hears nothing.
    fn submit(&self, request: GenerateRequest, sink: Box<dyn EventSink>) -> Result<RequestId, SubmitError>;

    /// Ends a request early; its sink hears `Finished { reason: Cancelled }`. Unknown ids are ignored, since a request may
    /// end at the same moment.
    fn cancel(&self, request: RequestId);

    /// Load and totals now.
    fn status(&self) -> EngineStatus;
}
