//! A request body, checked: from JSON to what the engine is asked. What all APIs share is here, their own words in the
//! modules below.

mod anthropic;
mod openai;
mod responses;
mod tools;

use std::time::Duration;

use axum::http::StatusCode;
use serde_json::Value;
use troika_engine::api::{MAX_TOP_LOGPROBS, Sampling, Service, Urgency};
use troika_prompt::{Conversation, Effort, LastAssistant, Message, ThinkingMode, ToolCall, UserBlock};

use crate::{
    ServerState,
    answer::Echo,
    error::{ApiError, quote},
    fields::{Fields, in_range},
    parameters::Endpoint,
    store::{ItemText, ResponseStore},
};

pub(crate) use responses::response_not_found;
pub(crate) use tools::{Offer, ReplyFormat, ToolChoice};

/// Most stop strings of a request.
const MAX_STOPS: usize = 16;
/// Longest stop string; text of this length may be held back.
const MAX_STOP_BYTES: usize = 4096;
/// Temperatures below this are the limit itself, the most likely token: dividing by them would overflow.
const MIN_TEMPERATURE: f32 = 1e-6;
/// What `/v1/completions` generates unless asked otherwise.
const DEFAULT_COMPLETION_TOKENS: usize = 16;
/// Seconds that a client may give its request.
const MIN_TIMEOUT_S: f32 = 0.001;
const MAX_TIMEOUT_S: f32 = 86_400.0;
/// Most answers to one prompt.
const MAX_CHOICES: usize = 16;
/// Most tokens whose logits a request may change.
const MAX_BIASES: usize = 1024;

/// What a client asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) prompt: Prompt,
    pub(crate) sampling: Sampling,
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// How many of the likeliest tokens are named with each token, if anything is said of them.
    pub(crate) logprobs: Option<usize>,
    /// `None`: as many as fit.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stops: Vec<String>,
    pub(crate) num_choices: usize,
    /// The answer begins with the prompt.
    pub(crate) echo: bool,
    /// Tokens that end an answer are tokens like others.
    pub(crate) ignore_eos: bool,
    pub(crate) format: ReplyFormat,
    /// The parameter that says it.
    pub(crate) format_name: &'static str,
    pub(crate) delivery: Delivery,
    /// How it stands among others; the tenant is for whoever knows it to fill in.
    pub(crate) service: Service,
    /// What only the Responses API has.
    pub(crate) response: Option<ResponseAsked>,
}

#[derive(Debug)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Chat(Chat),
}

/// A conversation, and how it goes on.
#[derive(Debug)]
pub(crate) struct Chat {
    pub(crate) conversation: Conversation,
    pub(crate) thinking: Thinking,
    pub(crate) last_assistant: LastAssistant,
    pub(crate) offer: Offer,
}

/// Whether and how hard the model thinks before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Thinking {
    pub(crate) mode: ThinkingMode,
    pub(crate) effort: Effort,
}

/// What is repeated, and kept, of a request for a response.
#[derive(Debug)]
pub(crate) struct ResponseAsked {
    pub(crate) echo: Echo,
    /// Whether the response is kept.
    pub(crate) store: bool,
    /// Input items, those before included; as text, for they wait as long as the answer takes.
    pub(crate) items: ItemText,
}

/// How the answer travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Whole,
    Stream { include_usage: bool },
}

impl Prompt {
    /// Bytes of text that have to be encoded, all of them or fewer.
    pub(crate) fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(_) => 0,
            Self::Chat(chat) => chat.conversation.messages.iter().map(message_bytes).sum(),
        }
    }
}

/// Reasoning does not count: the prompt encoding may drop it.
fn message_bytes(message: &Message) -> usize {
    match message {
        Message::System { content } | Message::LatestReminder { content } => content.len(),
        Message::Assistant { content, tool_calls, .. } => {
            content.len() + tool_calls.iter().map(|call| call.name.len()).sum::<usize>()
        }
        Message::User { blocks } => blocks
            .iter()
            .map(|block| match block {
                UserBlock::Text(text) => text.len(),
                UserBlock::ToolResult { content, .. } => content.len(),
            })
            .sum(),
    }
}

impl Thinking {
    pub(crate) const NONE: Self = Self { mode: ThinkingMode::Chat, effort: Effort::Low };

    fn with_effort(effort: Effort) -> Self {
        Self { mode: ThinkingMode::Thinking, effort }
    }

    /// Reads a level of effort: `none`, or one of the names that the prompt encoding knows.
    fn from_effort(fields: &mut Fields, name: &str) -> Result<Option<Self>, ApiError> {
        match fields.text(name)?.as_deref() {
            None => Ok(None),
            Some("none") => Ok(Some(Self::NONE)),
            Some(level) => match Effort::from_name(level) {
                Some(effort) => Ok(Some(Self::with_effort(effort))),
                None => Err(fields.must_be(name, "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`")),
            },
        }
    }
}

impl Asked {
    /// Reads a request body.
    pub(crate) fn parse(
        endpoint: Endpoint,
        body: &[u8],
        state: &ServerState,
        store: &ResponseStore,
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        check_model(&mut fields, &state.model_id)?;
        let asked = match endpoint {
            Endpoint::Chat => openai::parse_chat(&mut fields, state),
            Endpoint::Completions => openai::parse_completion(&mut fields, state),
            Endpoint::Messages => anthropic::parse(&mut fields, state),
            Endpoint::Responses => responses::parse(&mut fields, state, store),
        }?;
        fields.refuse_the_rest(endpoint)?;
        Ok(asked)
    }

    /// Whether an answer may make several calls.
    pub(crate) fn parallel_calls(&self) -> bool {
        !matches!(&self.prompt, Prompt::Chat(chat) if !chat.offer.parallel)
    }

    /// Whether the model may call tools.
    pub(crate) fn offers_tools(&self) -> bool {
        matches!(&self.prompt, Prompt::Chat(chat) if !chat.offer.tools.is_empty())
    }

    /// What every API can ask for in the same words.
    fn new(fields: &mut Fields, state: &ServerState, prompt: Prompt) -> Result<Self, ApiError> {
        Ok(Self {
            prompt,
            sampling: parse_sampling(fields, state)?,
            logit_bias: parse_bias(fields)?,
            logprobs: None,
            max_tokens: None,
            stops: Vec::new(),
            num_choices: 1,
            echo: false,
            ignore_eos: false,
            format: ReplyFormat::Text,
            format_name: "response_format",
            delivery: Delivery::Whole,
            service: Service { deadline: parse_timeout(fields)?, ..Service::default() },
            response: None,
        })
    }
}

fn check_model(fields: &mut Fields, model_id: &str) -> Result<(), ApiError> {
    match fields.text("model")? {
        Some(asked) if asked != model_id => Err(model_not_found(&asked, model_id)),
        _ => Ok(()),
    }
}

pub(crate) fn model_not_found(asked: &str, model_id: &str) -> ApiError {
    let message = format!("The model `{}` is not served here; `{model_id}` is.", quote(asked));
    ApiError::request(StatusCode::NOT_FOUND, "model_not_found", message).about("model")
}

fn parse_sampling(fields: &mut Fields, state: &ServerState) -> Result<Sampling, ApiError> {
    let temperature = fields.number("temperature", 0.0, 2.0)?.unwrap_or(state.defaults.temperature);
    let top_p = fields.number("top_p", 0.0, 1.0)?.unwrap_or(state.defaults.top_p);
    Ok(Sampling {
        temperature: if temperature < MIN_TEMPERATURE { 0.0 } else { temperature },
        // At 0 the smallest set that reaches it still has one token.
        top_p: top_p.max(f32::MIN_POSITIVE),
        top_k: parse_top_k(fields)?,
        min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0),
        seed: parse_seed(fields)?.unwrap_or_else(crate::random_seed),
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        repetition_penalty: fields.number("repetition_penalty", 0.01, 100.0)?.unwrap_or(1.0),
    })
}

fn parse_timeout(fields: &mut Fields) -> Result<Option<Duration>, ApiError> {
    let seconds = fields.number("timeout", MIN_TIMEOUT_S, MAX_TIMEOUT_S)?;
    Ok(seconds.map(Duration::from_secs_f32))
}

/// OpenAI's names of how urgent a request is.
fn parse_service_tier(fields: &mut Fields) -> Result<Urgency, ApiError> {
    match fields.text("service_tier")?.as_deref() {
        None | Some("auto" | "default") => Ok(Urgency::Normal),
        Some("flex") => Ok(Urgency::Low),
        Some("priority") => Ok(Urgency::High),
        Some(_) => Err(fields.unsupported("service_tier")),
    }
}

/// 0 and -1 both mean all tokens: different servers taught clients different spellings.
fn parse_top_k(fields: &mut Fields) -> Result<usize, ApiError> {
    match fields.take("top_k") {
        None => Ok(0),
        Some(value) if value.as_i64() == Some(-1) => Ok(0),
        Some(value) => match value.as_u64() {
            Some(top_k) => Ok(usize::try_from(top_k).unwrap_or(usize::MAX)),
            None => Err(ApiError::invalid("top_k", "`top_k` must be a whole number, -1 or more.")),
        },
    }
}

fn parse_seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| ApiError::invalid("seed", "`seed` must be a whole number of at most 64 bits."))
}

/// An object from token ids to numbers.
fn parse_bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let invalid = || {
        let message = format!(
            "`logit_bias` must be an object from token ids to numbers from -100 to 100, with at most {MAX_BIASES} members."
        );
        ApiError::invalid("logit_bias", message)
    };
    match fields.take("logit_bias") {
        None => Ok(Vec::new()),
        Some(Value::Object(biases)) if biases.len() <= MAX_BIASES => {
            let bias = |(token, bias): (String, Value)| {
                let token = token.parse().map_err(|_| invalid())?;
                Ok((token, in_range(&bias, -100.0, 100.0).ok_or_else(invalid)?))
            };
            biases.into_iter().map(bias).collect()
        }
        Some(_) => Err(invalid()),
    }
}

fn parse_stops(fields: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
    let invalid = || {
        let message =
            format!("`{name}` must be a text or up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_BYTES} bytes.");
        ApiError::invalid(name, message)
    };
    let stops = match fields.take(name) {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(values)) if values.len() <= MAX_STOPS => {
            let texts = values.into_iter().map(|value| match value {
                Value::String(stop) => Ok(stop),
                _ => Err(invalid()),
            });
            texts.collect::<Result<_, _>>()?
        }
        Some(_) => return Err(invalid()),
    };
    if stops.iter().any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        return Err(invalid());
    }
    Ok(stops)
}

/// Streams of newer APIs always say the usage.
fn parse_stream(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.flag("stream")?.unwrap_or(false);
    Ok(if stream { Delivery::Stream { include_usage: true } } else { Delivery::Whole })
}

/// Text parts of these types, in a list or alone.
fn parse_texts(fields: &mut Fields, name: &str, types: &[&str]) -> Result<Option<Vec<String>>, ApiError> {
    let parts = match fields.take(name) {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(vec![text])),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(fields.must_be(name, &format!("a text or a list of parts of type {}", words(types)))),
    };
    let name = fields.name(name);
    let part = |(idx, part): (usize, Value)| parse_text_part(Fields::of(&format!("{name}[{idx}]"), part)?, types);
    parts.into_iter().enumerate().map(part).collect::<Result<_, _>>().map(Some)
}

fn parse_text_part(mut part: Fields, types: &[&str]) -> Result<String, ApiError> {
    let kind = part.text("type")?.unwrap_or_default();
    if !types.contains(&kind.as_str()) {
        return Err(unsupported_type(&part, &kind, types));
    }
    let text = part.required_text(if kind == "refusal" { "refusal" } else { "text" })?;
    // Marks of Anthropic's cache and of older answers: they ask for nothing.
    part.ignore(&["cache_control", "citations", "annotations", "logprobs"]);
    part.refuse_unknown()?;
    Ok(text)
}

fn unsupported_type(part: &Fields, kind: &str, types: &[&str]) -> ApiError {
    let message = format!("Content of the type `{}` is not supported here; {} is.", quote(kind), words(types));
    ApiError::invalid(part.name("type"), message)
}

fn words(types: &[&str]) -> String {
    types.iter().map(|kind| format!("`{kind}`")).collect::<Vec<_>>().join(", ")
}

/// Appends to what the model said last, or begins a message of the model's.
fn model_turn(messages: &mut Vec<Message>) -> (&mut Option<String>, &mut String, &mut Vec<ToolCall>) {
    if !matches!(messages.last(), Some(Message::Assistant { .. })) {
        messages.push(Message::assistant(""));
    }
    match messages.last_mut() {
        Some(Message::Assistant { reasoning, content, tool_calls }) => (reasoning, content, tool_calls),
        _ => unreachable!("pushed above"),
    }
}

/// Whether the model can answer: the last message is a user's or a tool's. System messages after it are reminders.
fn ends_with_user(messages: &[Message]) -> bool {
    let mut spoken = messages.iter().rev().skip_while(|message| matches!(message, Message::System { .. }));
    matches!(spoken.next(), Some(Message::User { .. }))
}

fn append(text: &mut Option<String>, more: &str) {
    text.get_or_insert_default().push_str(more);
}
