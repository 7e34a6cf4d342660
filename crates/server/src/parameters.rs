//! What becomes of every request parameter. A parameter is applied, or documented to do nothing, or refused by name:
//! never silently ignored. `docs/api.md` shows this table and a test compares the two.

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
    /// In `/v1/chat/completions`.
    pub chat: Handling,
    /// In `/v1/completions`.
    pub completions: Handling,
}

use Handling::{Applied, NoOp, Only, Refused};

const fn row(name: &'static str, chat: Handling, completions: Handling) -> Parameter {
    Parameter { name, chat, completions }
}

/// Parameters that are known. Others are refused as unknown.
pub const PARAMETERS: &[Parameter] = &[
    row("model", Applied, Applied),
    row("messages", Applied, Refused),
    row("prompt", Refused, Applied),
    row("max_tokens", Applied, Applied),
    row("max_completion_tokens", Applied, Refused),
    row("temperature", Applied, Applied),
    row("top_p", Applied, Applied),
    row("top_k", Applied, Applied),
    row("min_p", Applied, Applied),
    row("seed", Applied, Applied),
    row("stop", Applied, Applied),
    row("stream", Applied, Applied),
    row("stream_options", Applied, Applied),
    row("user", NoOp, NoOp),
    row("metadata", NoOp, NoOp),
    row("store", NoOp, NoOp),
    row("n", Only(&["1"]), Only(&["1"])),
    row("best_of", Refused, Only(&["1"])),
    row("echo", Refused, Only(&["false"])),
    row("suffix", Refused, Only(&["\"\""])),
    row("logprobs", Only(&["false"]), Refused),
    row("top_logprobs", Refused, Refused),
    row("logit_bias", Only(&["{}"]), Only(&["{}"])),
    row("frequency_penalty", Only(&["0"]), Only(&["0"])),
    row("presence_penalty", Only(&["0"]), Only(&["0"])),
    row("repetition_penalty", Only(&["1"]), Only(&["1"])),
    row("response_format", Only(&["{\"type\":\"text\"}"]), Refused),
    row("reasoning_effort", Only(&["\"none\""]), Refused),
    row("tools", Only(&["[]"]), Refused),
    row("tool_choice", Only(&["\"none\"", "\"auto\""]), Refused),
    row("parallel_tool_calls", Only(&["true", "false"]), Refused),
    row("functions", Only(&["[]"]), Refused),
    row("function_call", Only(&["\"none\"", "\"auto\""]), Refused),
    row("modalities", Only(&["[\"text\"]"]), Refused),
    row("audio", Refused, Refused),
    row("prediction", Refused, Refused),
    row("service_tier", Only(&["\"auto\"", "\"default\""]), Refused),
    row("verbosity", Refused, Refused),
    row("web_search_options", Refused, Refused),
    row("safety_identifier", Refused, Refused),
    row("prompt_cache_key", Refused, Refused),
    row("prompt_cache_retention", Refused, Refused),
];
