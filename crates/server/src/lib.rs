//! HTTP over a [`Generator`], in the words of OpenAI's and Anthropic's clients.
//!
//! A request walks through the modules in this order: `connections` (sockets, time limits, shutdown), `access` (keys,
//! hosts, origins), `routes` (which path), `body` (size), `request` with `fields` and `parameters` (what is asked,
//! checked), `encoding` and `constraint` (to tokens, and which may come), `generation` (engine events to pieces), `answer` (pieces to JSON and server-sent
//! events, one format for each API). Only this crate turns errors into HTTP: `error`. Nothing here logs what a client wrote
//! or what the model said.

mod access;
mod activity;
mod answer;
mod body;
mod connections;
mod constraint;
mod encoding;
mod error;
mod fields;
mod generation;
mod metrics;
pub mod openapi;
mod page;
pub mod parameters;
mod reader;
mod request;
mod routes;
mod store;

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use troika_engine::api::Generator;
use troika_prompt::{FixedTexts, Tokenizer};

pub use access::{Access, AccessError};
pub use connections::serve;

/// What is served.
#[derive(Clone)]
pub struct ServerState {
    pub generator: Arc<dyn Generator>,
    pub tokenizer: Arc<Tokenizer>,
    /// Texts of the checkpoint that its prompts are made of.
    pub texts: Arc<FixedTexts>,
    /// Name that clients ask for and see.
    pub model_id: String,
    /// When the model was made or loaded, in seconds since 1970; clients see it in the model list.
    pub created_unix_s: u64,
    pub defaults: SamplingDefaults,
    /// Most tokens of a prompt and its answer together.
    pub max_context_tokens: usize,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<u32>,
    /// The arithmetic.
    pub numeric_class: String,
    /// What computes, in a person's words.
    pub devices: Vec<String>,
    /// Why less is served than was asked for; `/health` says it.
    pub degraded: Option<String>,
    pub access: Access,
    pub limits: Limits,
}

/// How tokens are drawn unless the client says otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: f32,
    pub top_p: f32,
}

/// Bounds on what a client can make the server hold and wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest request body.
    pub max_body_bytes: usize,
    /// Bytes that all request bodies take together until they are understood; more are refused.
    pub max_bodies_bytes: usize,
    /// Open connections; more wait to be accepted.
    pub max_connections: usize,
    /// Time for a request's headers to arrive, and for a connection to stay idle.
    pub header_timeout: Duration,
    /// Time for a request's body to arrive.
    pub body_timeout: Duration,
    /// Tokens that may wait for a client to read them. After that its generation pauses.
    pub max_waiting_tokens: usize,
    /// How long a client may leave its answer unread before its generation ends.
    pub unread_timeout: Duration,
    /// Silence in a stream after which a comment shows that it is alive.
    pub keep_alive: Duration,
    /// Time for running answers to finish once the server is told to stop.
    pub grace: Duration,
    /// Responses that `/v1/responses` keeps; the oldest go first.
    pub max_stored_responses: usize,
    /// Bytes that they take together.
    pub max_stored_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body_bytes: 16 << 20,
            max_bodies_bytes: 64 << 20,
            max_connections: 1024,
            header_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(120),
            max_waiting_tokens: 256,
            unread_timeout: Duration::from_secs(60),
            keep_alive: Duration::from_secs(10),
            grace: Duration::from_secs(10),
            max_stored_responses: 256,
            max_stored_bytes: 64 << 20,
        }
    }
}

/// Why the server ended before it was told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The listening socket is broken.
    #[error("cannot accept connections: {reason}")]
    Accept { reason: std::io::Error },
}

fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The standard library keys its hash maps with fresh randomness; that is all a seed needs.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A name that nobody else has.
fn random_name() -> String {
    format!("{:016x}{:016x}", random_seed(), random_seed())
}
