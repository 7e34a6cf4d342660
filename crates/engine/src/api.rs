//! What callers say to the engine and hear back. Token ids only: text, stop strings included, is the caller's.

use std::collections::BTreeMap;
use std::time::Duration;

use troika_base::RequestId;
use troika_runtime::Ledger;

use crate::hybrid::HybridStatus;
pub use troika_scheduler::{ChunkRecord, Narrowing, Rule, Urgency};

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
    /// Taken off a token's logit for every time it was generated; -2 to 2, 0 = off.
    pub frequency_penalty: f32,
    /// Taken off a token's logit if it was generated at all; -2 to 2, 0 = off.
    pub presence_penalty: f32,
    /// What the logit of a token of the prompt or the answer is divided by if positive, multiplied by if negative; 0.01 to
    /// 100, 1 = off.
    pub repetition_penalty: f32,
}

impl Sampling {
    /// Always the most likely token; ties go to the lowest id.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        seed: 0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        repetition_penalty: 1.0,
    };
}

/// Most alternatives that [`GenerateRequest::logprobs`] may ask for.
pub const MAX_TOP_LOGPROBS: usize = 20;

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
    /// Added to these tokens' logits, after the penalties and before everything else. A token named twice gets both.
    pub logit_bias: Vec<(u32, f32)>,
    /// `Some(n)`: say how likely each token was, and the `n` most likely ones; at most [`MAX_TOP_LOGPROBS`].
    pub logprobs: Option<usize>,
    /// What the answer must look like.
    pub constraint: Option<Box<dyn TokenConstraint>>,
    /// Whose it is and how it stands among others.
    pub service: Service,
}

/// How a request is served; changes no token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Requests of different tenants share no prefix.
    pub tenant: String,
    /// More urgent ones go first.
    pub urgency: Urgency,
    /// A request that is not done so long after it came in is given up.
    pub deadline: Option<Duration>,
}

impl GenerateRequest {
    /// A request without stop tokens, bias, log-probabilities and constraint.
    #[must_use]
    pub fn new(prompt: Vec<u32>, max_new_tokens: usize, sampling: Sampling) -> Self {
        Self {
            prompt,
            max_new_tokens,
            sampling,
            stop_tokens: Vec::new(),
            logit_bias: Vec::new(),
            logprobs: None,
            constraint: None,
            service: Service::default(),
        }
    }
}

/// Which tokens may come next. Its state belongs to one answer and follows that answer's tokens; it is called on the
/// engine's thread, so it must neither block nor panic.
pub trait TokenConstraint: Send {
    /// Allows the tokens that may come next, a stop token among them exactly if the answer may end here. `allowed` comes
    /// empty.
    ///
    /// # Errors
    ///
    /// A text for the client if there is no telling; the request fails with it.
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<(), String>;

    /// Takes the token that came; never a stop token.
    ///
    /// # Errors
    ///
    /// A text for the client if the token cannot follow; the request fails with it.
    fn accept(&mut self, token: u32) -> Result<ConstraintState, String>;

    /// A constraint in the same state that goes its own way from here.
    fn boxed_clone(&self) -> Box<dyn TokenConstraint>;
}

impl Clone for Box<dyn TokenConstraint> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

impl std::fmt::Debug for dyn TokenConstraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TokenConstraint")
    }
}

/// What a [`TokenConstraint`] expects after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConstraintState {
    /// Something may follow.
    Open,
    /// The answer is complete and nothing can follow.
    Complete,
}

/// A set of tokens of one vocabulary, a bit for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u32>,
    vocab_size: usize,
}

impl TokenSet {
    /// The empty set over the tokens below `vocab_size`.
    #[must_use]
    pub fn new(vocab_size: usize) -> Self {
        Self { words: vec![0; vocab_size.div_ceil(32)], vocab_size }
    }

    /// Tokens are below this.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Puts a token in; one outside the vocabulary is ignored, for the model cannot say it.
    pub fn insert(&mut self, token: u32) {
        if (token as usize) < self.vocab_size {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Puts in the tokens whose bits are set: bit `i` of word `w` is token `32 * w + i`. What is outside the vocabulary is
    /// ignored.
    pub fn insert_words(&mut self, words: &[u32]) {
        self.words.iter_mut().zip(words).for_each(|(to, from)| *to |= from);
        if let (Some(last), rest @ 1..) = (self.words.last_mut(), self.vocab_size % 32) {
            *last &= (1 << rest) - 1;
        }
    }

    /// Whether a token is in.
    #[must_use]
    pub fn contains(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Takes all tokens out.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }
}

/// How likely a token was. Natural logarithms, of the model's own distribution over the whole vocabulary: before
/// penalties, bias, constraint, temperature and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token that came.
    pub chosen: f32,
    /// The most likely tokens, best first, equally likely ones by id. The chosen one need not be among them.
    pub top: Vec<(u32, f32)>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn.
    StopToken(u32),
    /// The request's constraint is fulfilled and lets nothing follow.
    ConstraintComplete,
    /// `max_new_tokens` were delivered.
    Length,
    /// The model's context is full.
    ContextFull,
    /// The memory is, even for this request alone.
    MemoryFull,
    /// [`Service::deadline`] has passed.
    DeadlinePassed,
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
    /// Leading ones of them that need not be computed.
    pub cached_tokens: usize,
    /// Those of the cached ones whose rows came from disk.
    pub cached_tokens_from_disk: usize,
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
    /// So many prompt tokens are computed; sent after each step with some of them, and so before the first token.
    Prefilled {
        /// Prompt tokens whose KV exists.
        num_computed_tokens: usize,
        /// Counts and times so far.
        usage: Usage,
    },
    /// The next generated token.
    Token {
        /// Its id.
        token: u32,
        /// How likely it was, if the request asked.
        logprobs: Option<Box<Logprobs>>,
    },
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

    /// The request is through, and this is how it was served. Called once, after the last event.
    fn ended(&mut self, record: &RequestRecord) {
        let _ = record;
    }
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
    /// The memory would not hold the prompt, even if nothing else ran.
    #[error("the prompt of {prompt_tokens} tokens needs {need_bytes} bytes of memory; the limit leaves {limit_bytes}")]
    NeverFits {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Bytes of its state.
        need_bytes: u64,
        /// Bytes there are for state.
        limit_bytes: u64,
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
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// Those of them that were cancelled, or whose listener had gone.
    pub cancelled_total: u64,
    /// Those that ended with an error.
    pub failed_total: u64,
    /// Those whose deadline passed.
    pub expired_total: u64,
    /// Steps of prompt chunks.
    pub prefill: StepTotals,
    /// Steps of newest tokens, and of drafts that are verified with them.
    pub decode: StepTotals,
    /// Steps of the drafter; its tokens are proposals.
    pub draft: StepTotals,
    /// What became of drafts; `None` without a drafter.
    pub drafts: Option<DraftCounts>,
    /// Chunks that each rule has narrowed.
    pub narrowed_total: BTreeMap<Rule, u64>,
    /// The ledger: what devices were given and what they did.
    pub nodes: Vec<NodeTotals>,
    /// What neural engines do and did; `None` if none were wished for.
    pub hybrid: Option<HybridStatus>,
    /// Tile, step, block and granule, and what limits them, in one line.
    pub geometry: String,
    /// How often a sequence gave its state back to others and was computed again.
    pub preemptions_total: u64,
    /// Bytes set aside for the state of running sequences.
    pub state_bytes_reserved: u64,
    /// Most bytes that may be; `u64::MAX` = no limit.
    pub state_bytes_limit: u64,
    /// Bytes that the state grows by with each block of tokens.
    pub state_bytes_per_block: u64,
    /// Bytes of a block of kept prefixes, which has no rounded rows.
    pub kept_bytes_per_block: u64,
    /// Bytes set aside for the values of the largest steps.
    pub step_bytes: u64,
    /// Seconds after which a request that is refused now may be tried again.
    pub retry_after_s: u64,
    /// Prompt tokens that need not be computed, since the start.
    pub cached_tokens_total: u64,
    /// Those of them whose rows came from disk.
    pub cached_tokens_from_disk_total: u64,
    /// The prefix cache.
    pub cache: CacheStatus,
    /// Why the engine stopped, if it did.
    pub failure: Option<String>,
}

/// Counts of one kind of step since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTotals {
    /// Steps done.
    pub steps: u64,
    /// Their tokens.
    pub tokens: u64,
    /// From submission to the last node, all steps together, microseconds.
    pub busy_us: u64,
}

/// What became of what the drafter proposed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Shares of decode steps with drafts: each computes the newest token of a sequence and some that may follow it.
    pub verifications: u64,
    /// Drafts in them.
    pub drafted: u64,
    /// Drafts that were the next tokens.
    pub accepted: u64,
    /// The same two numbers by place in the block, first place first.
    pub by_place: Vec<[u64; 2]>,
    /// Proposals that were too unlikely to be verified.
    pub withheld: u64,
    /// Shares of decode steps without drafts, by reason.
    pub skipped: BTreeMap<&'static str, u64>,
}

/// Nodes of one kind on one device since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeTotals {
    /// Number of the device.
    pub device: u16,
    /// What the nodes compute.
    pub kind: &'static str,
    /// Nodes handed to the device.
    pub submitted: u64,
    /// Nodes it has done.
    pub completed: u64,
    /// Nodes it failed to do.
    pub failed: u64,
    /// Time on the device, microseconds.
    pub busy_us: u64,
}

/// Where a prompt parted from everything that was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// Tokens in common; also the position of the first that differs.
    pub position: usize,
    /// The prompt's own token there.
    pub token: u32,
}

/// How one request was served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestRecord {
    /// Which.
    pub request: Option<RequestId>,
    /// Counts and times.
    pub usage: Usage,
    /// How it ended; `None` if with [`Self::failure`], or without a word since its listener had gone.
    pub finish: Option<FinishReason>,
    /// The error it ended with.
    pub failure: Option<String>,
    /// Where the prompt parted from what memory held of others, if it did.
    pub diverged: Option<Divergence>,
    /// Whole blocks of prompt and answer that were left to others, found ones included.
    pub stored_blocks: usize,
    /// Whole blocks that were not.
    pub skipped_blocks: usize,
    /// Why not, if so.
    pub skipped_because: Option<&'static str>,
    /// Chunks in which known tokens were computed, those of a preempted sequence twice; at most [`MAX_CHUNK_RECORDS`].
    pub chunks: Vec<ChunkRecord>,
    /// The steps that computed them, in the same order.
    pub steps: Vec<StepNote>,
    /// It resumed from a kept prefix that does not end where a chunk ends.
    pub is_shifted: bool,
    /// How often the sequence gave its state back to others.
    pub preemptions: u32,
    /// How often it was computed again since an engine's numbers were wrong. Tokens that it had heard stay as they are.
    pub restarts: u32,
    /// What became of its drafts; `None` without a drafter.
    pub drafts: Option<DraftCounts>,
    /// What neural engines did in its steps; of a step that several requests share, each has all. Empty without engines.
    pub ledger: Ledger,
}

/// The step that computed a chunk, perhaps with chunks of others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepNote {
    /// Tokens of all.
    pub rows: usize,
    /// Rows of the tiles that engines were given of each projection, rows of zeros included; 0 = the primary device did it.
    pub tiled_rows: usize,
    /// Time of the step that was not that of the step before, microseconds.
    pub model_us: u64,
    /// From its submission to its end, microseconds.
    pub total_us: u64,
}

/// Most chunks that a [`RequestRecord`] lists.
pub const MAX_CHUNK_RECORDS: usize = 256;

/// A snapshot of the prefix cache; all zero without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// Most bytes it may hold.
    pub limit_bytes: u64,
    /// Bytes it holds.
    pub used_bytes: u64,
    /// Blocks it holds.
    pub blocks: usize,
    /// Prefixes looked up since the start.
    pub lookups: u64,
    /// Lookups that found a place to resume.
    pub hits: u64,
    /// Blocks stored since the start.
    pub stored: u64,
    /// Blocks and boundaries not stored because the block before them was gone.
    pub skipped_no_parent: u64,
    /// Blocks and boundaries not stored because there was no room.
    pub skipped_no_room: u64,
    /// Blocks not stored because decode steps wrote some of their rows, which are of another numeric class.
    pub skipped_mixed: u64,
    /// Blocks that had to go.
    pub evicted: u64,
    /// How often all that was kept was given up since an engine's numbers were wrong; on disk, by earlier processes too.
    pub closed: usize,
    /// Most bytes under the directory on disk; 0 = there is none.
    pub disk_limit_bytes: u64,
    /// Bytes under it, foreign files included.
    pub disk_used_bytes: u64,
    /// Blocks on disk.
    pub disk_blocks: usize,
    /// Files read and found sound since the start.
    pub disk_read: u64,
    /// Files written since the start.
    pub disk_written: u64,
    /// Writes dropped because too many waited or there was no room.
    pub disk_dropped: u64,
    /// Damaged files set aside.
    pub disk_quarantined: u64,
    /// Files that could not be read since the start.
    pub disk_failed_reads: u64,
    /// Files that could not be written since the start.
    pub disk_failed_writes: u64,
    /// Prefixes computed although the disk had them, since the start: too many waited to be read, reading had failed again
    /// and again, or no file arrived for a long time.
    pub disk_not_asked: u64,
    /// Sequences that wait for files of their prefix.
    pub disk_loading: usize,
    /// The disk refused to write or to read again and again, and is asked seldom or not at all.
    pub disk_failed: bool,
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
