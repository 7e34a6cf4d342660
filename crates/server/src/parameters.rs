//! What becomes of every request parameter. A parameter is applied, or documented to do nothing, or refused by name:
//! never silently ignored. `docs/api.md` shows this table and a test compares the two.

/// Which of the generating routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/messages`, and `/v1/messages/count_tokens`, which generates nothing but takes the same parameters.
    Messages,
    /// `/v1/responses`.
    Responses,
}

impl Endpoint {
    /// All of them, in the order of the table's columns.
    pub const ALL: [Self; 4] = [Self::Chat, Self::Completions, Self::Messages, Self::Responses];

    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
        }
    }
}

/// What becomes of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handling {
    /// It does what its name says.
    Applied,
    /// Accepted with any value, and changes nothing.
    NoOp,
    /// Accepted with any of these JSON values, which ask for what happens anyway. Refused with others.
    Only(&'static [&'static str]),
    /// Refused.
    Refused,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    pub name: &'static str,
    /// A column for each of [`Endpoint::ALL`].
    pub handlings: [Handling; 4],
}

impl Parameter {
    #[must_use]
    pub fn handling(&self, endpoint: Endpoint) -> Handling {
        self.handlings[endpoint as usize]
    }
}

use Handling::{Applied as A, NoOp as N, Only, Refused as R};

const fn row(name: &'static str, handlings: [Handling; 4]) -> Parameter {
    Parameter { name, handlings }
}

/// Parameters that are known. Others are refused as unknown.
pub const PARAMETERS: &[Parameter] = &[
    row("model", [A, A, A, A]),
    row("messages", [A, R, A, R]),
    row("prompt", [R, A, R, R]),
    row("input", [R, R, R, A]),
    row("system", [R, R, A, R]),
    row("instructions", [R, R, R, A]),
    row("previous_response_id", [R, R, R, A]),
    row("max_tokens", [A, A, A, R]),
    row("max_completion_tokens", [A, R, R, R]),
    row("max_output_tokens", [R, R, R, A]),
    row("temperature", [A, A, A, A]),
    row("top_p", [A, A, A, A]),
    row("top_k", [A, A, A, A]),
    row("min_p", [A, A, A, A]),
    row("seed", [A, A, A, A]),
    row("frequency_penalty", [A, A, A, A]),
    row("presence_penalty", [A, A, A, A]),
    row("repetition_penalty", [A, A, A, A]),
    row("logit_bias", [A, A, A, A]),
    row("stop", [A, A, R, R]),
    row("stop_sequences", [R, R, A, R]),
    row("stream", [A, A, A, A]),
    row("stream_options", [A, A, R, Only(&["{}", "{\"include_obfuscation\":false}"])]),
    row("n", [A, A, R, R]),
    row("best_of", [R, Only(&["1"]), R, R]),
    row("echo", [R, A, R, R]),
    row("ignore_eos", [A, A, R, R]),
    row("suffix", [R, Only(&["\"\""]), R, R]),
    row("logprobs", [A, A, R, R]),
    row("top_logprobs", [A, R, R, Only(&["0"])]),
    row("tools", [A, R, A, A]),
    row("tool_choice", [A, R, A, A]),
    row("parallel_tool_calls", [A, R, R, A]),
    row("reasoning_effort", [A, R, R, R]),
    row("thinking", [A, R, A, R]),
    row("reasoning", [R, R, R, A]),
    row("output_config", [R, R, A, R]),
    row("response_format", [A, A, R, R]),
    row("text", [R, R, R, A]),
    row("store", [N, N, R, A]),
    row("user", [N, N, R, N]),
    row("metadata", [N, N, N, N]),
    row("client_metadata", [R, R, R, N]),
    row("prompt_cache_key", [N, N, R, N]),
    row("prompt_cache_retention", [N, N, R, N]),
    row("safety_identifier", [N, N, R, N]),
    row("cache_control", [R, R, N, R]),
    row("context_management", [R, R, N, R]),
    row("include", [R, R, R, Only(&["[]", "[\"reasoning.encrypted_content\"]"])]),
    row("truncation", [R, R, R, Only(&["\"disabled\""])]),
    row("background", [R, R, R, Only(&["false"])]),
    row("service_tier", [A, R, Only(&["\"auto\"", "\"standard_only\""]), A]),
    row("timeout", [A, A, A, A]),
    row("functions", [Only(&["[]"]), R, R, R]),
    row("function_call", [Only(&["\"none\"", "\"auto\""]), R, R, R]),
    row("modalities", [Only(&["[\"text\"]"]), R, R, R]),
    row("audio", [R, R, R, R]),
    row("prediction", [R, R, R, R]),
    row("verbosity", [R, R, R, R]),
    row("web_search_options", [R, R, R, R]),
    row("conversation", [R, R, R, R]),
    row("max_tool_calls", [R, R, R, R]),
    row("container", [R, R, R, R]),
    row("mcp_servers", [R, R, Only(&["[]"]), R]),
];
