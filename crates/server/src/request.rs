//! A request body, checked: from JSON to what the engine is asked.

use axum::http::StatusCode;
use serde_json::{Map, Value};
use troika_engine::api::Sampling;
use troika_prompt::{Message, UserBlock};

use crate::{
    ServerState,
    error::{ApiError, quote},
    parameters::{Handling, PARAMETERS},
};

/// Most stop strings of a request.
const MAX_STOPS: usize = 16;
/// Longest stop string; text of this length may be held back.
const MAX_STOP_BYTES: usize = 4096;
/// Temperatures below this are the limit itself, the most likely token: dividing by them would overflow.
const MIN_TEMPERATURE: f32 = 1e-6;
/// What `/v1/completions` generates unless asked otherwise.
const DEFAULT_COMPLETION_TOKENS: usize = 16;

/// Which of the generating routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
}

/// What a client asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) prompt: Prompt,
    pub(crate) sampling: Sampling,
    /// `None`: as many as fit.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stops: Vec<String>,
    pub(crate) delivery: Delivery,
}

#[derive(Debug)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Messages(Vec<Message>),
}

impl Prompt {
    /// Bytes of text that have to be encoded, all of them or fewer.
    pub(crate) fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(_) => 0,
            Self::Messages(messages) => messages.iter().map(message_bytes).sum(),
        }
    }
}

/// Reasoning does not count: the prompt encoding may drop it.
fn block_bytes(block: &UserBlock) -> usize {
    match block {
        UserBlock::Text(content) | UserBlock::ToolResult { content, .. } => content.len(),
    }
}

fn message_bytes(message: &Message) -> usize {
    match message {
        Message::System { content } | Message::Assistant { content, .. } | Message::LatestReminder { content } => {
            content.len()
        }
        Message::User { blocks } => blocks.iter().map(block_bytes).sum(),
    }
}

/// How the answer travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Whole,
    Stream { include_usage: bool },
}

impl Asked {
    /// Reads a request body.
    pub(crate) fn parse(endpoint: Endpoint, body: &[u8], state: &ServerState) -> Result<Self, ApiError> {
        let fields: Value = serde_json::from_slice(body).map_err(|error| {
            let message = format!("The request body is not valid JSON: {error}");
            ApiError::request(StatusCode::BAD_REQUEST, "invalid_json", message)
        })?;
        let Value::Object(fields) = fields else {
            let message = "The request body must be a JSON object.";
            return Err(ApiError::request(StatusCode::BAD_REQUEST, "invalid_json", message));
        };
        let mut fields = Fields { path: String::new(), fields };
        check_model(&mut fields, &state.model_id)?;
        let prompt = match endpoint {
            Endpoint::Chat => Prompt::Messages(parse_messages(fields.take("messages"))?),
            Endpoint::Completions => parse_prompt(fields.take("prompt"))?,
        };
        let asked = Self {
            prompt,
            sampling: parse_sampling(&mut fields, state)?,
            max_tokens: parse_max_tokens(&mut fields, endpoint)?,
            stops: parse_stops(fields.take("stop"))?,
            delivery: parse_delivery(&mut fields)?,
        };
        fields.refuse_the_rest(endpoint)?;
        Ok(asked)
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
    let temperature = fields.number("temperature", 2.0)?.unwrap_or(state.defaults.temperature);
    let top_p = fields.number("top_p", 1.0)?.unwrap_or(state.defaults.top_p);
    Ok(Sampling {
        temperature: if temperature < MIN_TEMPERATURE { 0.0 } else { temperature },
        // At 0 the smallest set that reaches it still has one token.
        top_p: top_p.max(f32::MIN_POSITIVE),
        top_k: parse_top_k(fields)?,
        min_p: fields.number("min_p", 1.0)?.unwrap_or(0.0),
        seed: parse_seed(fields)?.unwrap_or_else(random_seed),
        ..Sampling::GREEDY
    })
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

/// The standard library keys its hash maps with fresh randomness; that is all a seed needs.
pub(crate) fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

fn parse_max_tokens(fields: &mut Fields, endpoint: Endpoint) -> Result<Option<usize>, ApiError> {
    let max_tokens = fields.count("max_tokens")?;
    match endpoint {
        Endpoint::Completions => Ok(max_tokens.or(Some(DEFAULT_COMPLETION_TOKENS))),
        Endpoint::Chat => match (max_tokens, fields.count("max_completion_tokens")?) {
            (Some(old), Some(new)) if old != new => {
                let message = "`max_tokens` is the old name of `max_completion_tokens`, and they differ. Give one.";
                Err(ApiError::invalid("max_tokens", message))
            }
            (old, new) => Ok(new.or(old)),
        },
    }
}

fn parse_stops(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let invalid = || {
        let message = format!("`stop` must be a text or up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_BYTES} bytes.");
        ApiError::invalid("stop", message)
    };
    let stops = match value {
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

fn parse_delivery(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.flag("stream")?.unwrap_or(false);
    let options = match fields.take("stream_options") {
        None => None,
        Some(Value::Object(options)) => Some(Fields { path: "stream_options.".into(), fields: options }),
        Some(_) => return Err(ApiError::invalid("stream_options", "`stream_options` must be an object.")),
    };
    match (stream, options) {
        (false, None) => Ok(Delivery::Whole),
        (false, Some(_)) => {
            Err(ApiError::invalid("stream_options", "`stream_options` can only be given when `stream` is true."))
        }
        (true, None) => Ok(Delivery::Stream { include_usage: false }),
        (true, Some(mut options)) => {
            let include_usage = options.flag("include_usage")?.unwrap_or(false);
            // Padding against traffic analysis: not having it is what we do.
            if options.flag("include_obfuscation")? == Some(true) {
                return Err(options.unsupported("include_obfuscation"));
            }
            options.refuse_unknown()?;
            Ok(Delivery::Stream { include_usage })
        }
    }
}

/// A text or token ids; a list with one such prompt is that prompt.
fn parse_prompt(value: Option<Value>) -> Result<Prompt, ApiError> {
    let invalid = || ApiError::invalid("prompt", "`prompt` must be one text or one list of token ids, not empty.");
    match value {
        Some(Value::String(text)) => Ok(Prompt::Text(text)),
        Some(Value::Array(mut values)) => {
            if let [Value::String(_) | Value::Array(_)] = &values[..] {
                return match values.pop() {
                    Some(Value::String(text)) => Ok(Prompt::Text(text)),
                    Some(Value::Array(tokens)) => Ok(Prompt::Tokens(parse_tokens(&tokens).ok_or_else(invalid)?)),
                    _ => Err(invalid()),
                };
            }
            Ok(Prompt::Tokens(parse_tokens(&values).ok_or_else(invalid)?))
        }
        _ => Err(invalid()),
    }
}

fn parse_tokens(values: &[Value]) -> Option<Vec<u32>> {
    let tokens: Vec<u32> = values.iter().map(|value| u32::try_from(value.as_u64()?).ok()).collect::<Option<_>>()?;
    (!tokens.is_empty()).then_some(tokens)
}

/// System messages, then turns, the last of them the user's: what the prompt encoding can express so far.
fn parse_messages(value: Option<Value>) -> Result<Vec<Message>, ApiError> {
    let Some(Value::Array(values)) = value else {
        return Err(ApiError::invalid("messages", "`messages` must be a list of messages."));
    };
    let messages = values.into_iter().enumerate().map(|(idx, value)| parse_message(idx, value));
    let messages: Vec<Message> = messages.collect::<Result<_, _>>()?;
    if !matches!(messages.last(), Some(Message::User { .. })) {
        return Err(ApiError::invalid("messages", "The last of `messages` must have the role `user`."));
    }
    let num_leading = messages.iter().take_while(|message| is_system(message)).count();
    if let Some(late) = messages.iter().skip(num_leading).position(is_system) {
        let param = format!("messages[{}].role", num_leading + late);
        return Err(ApiError::invalid(
            param,
            "A `system` message can only stand before all others in this model's prompt.",
        ));
    }
    Ok(messages)
}

fn is_system(message: &Message) -> bool {
    matches!(message, Message::System { .. })
}

fn parse_message(idx: usize, value: Value) -> Result<Message, ApiError> {
    let path = format!("messages[{idx}].");
    let Value::Object(fields) = value else {
        return Err(ApiError::invalid(format!("messages[{idx}]"), format!("`messages[{idx}]` must be an object.")));
    };
    let mut fields = Fields { path, fields };
    let role = match fields.text("role")?.as_deref() {
        Some("system") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        other => {
            let role = quote(other.unwrap_or_default());
            let message = format!("The role `{role}` is not one of `system`, `user`, `assistant`.");
            return Err(ApiError::invalid(fields.name("role"), message));
        }
    };
    let blocks = parse_content(&mut fields)?;
    let reasoning = if role == Role::Assistant { fields.text("reasoning_content")? } else { None };
    // Clients send an answer back as they got it, with lists that are empty.
    fields.fields.retain(|_, value| !matches!(value, Value::Array(list) if list.is_empty()));
    fields.refuse_unknown()?;
    let blocks = fields.require("content", blocks)?;
    Ok(match role {
        Role::System => Message::System { content: blocks.join("\n\n") },
        Role::User => Message::User { blocks: blocks.into_iter().map(UserBlock::Text).collect() },
        Role::Assistant => Message::Assistant { reasoning, content: blocks.join("\n\n"), tool_calls: Vec::new() },
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    System,
    User,
    Assistant,
}

/// Text blocks of a message.
fn parse_content(fields: &mut Fields) -> Result<Option<Vec<String>>, ApiError> {
    let parts = match fields.take("content") {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(vec![text])),
        Some(Value::Array(parts)) => parts,
        Some(_) => {
            let name = fields.name("content");
            let message = format!("`{name}` must be a text or a list of parts of type `text`.");
            return Err(ApiError::invalid(name, message));
        }
    };
    let name = fields.name("content");
    let part = |(idx, part): (usize, Value)| {
        let path = format!("{name}[{idx}].");
        let Value::Object(part) = part else {
            return Err(ApiError::invalid(format!("{name}[{idx}]"), format!("`{name}[{idx}]` must be an object.")));
        };
        let mut part = Fields { path, fields: part };
        let kind = part.text("type")?.unwrap_or_default();
        if kind != "text" {
            let message = format!("Content of the type `{}` is not supported; `text` is.", quote(&kind));
            return Err(ApiError::invalid(part.name("type"), message));
        }
        let text = part.text("text")?;
        let text = part.require("text", text)?;
        part.refuse_unknown()?;
        Ok(text)
    };
    parts.into_iter().enumerate().map(part).collect::<Result<_, _>>().map(Some)
}

/// Members of a JSON object, taken out one by one so that what is left over can be refused. `null` is as good as absent.
struct Fields {
    /// What precedes a member's name in errors.
    path: String,
    fields: Map<String, Value>,
}

impl Fields {
    fn name(&self, name: &str) -> String {
        format!("{}{}", self.path, quote(name))
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    fn must_be(&self, name: &str, what: &str) -> ApiError {
        let name = self.name(name);
        let message = format!("`{name}` must be {what}.");
        ApiError::invalid(name, message)
    }

    fn require<T>(&self, name: &str, value: Option<T>) -> Result<T, ApiError> {
        value.ok_or_else(|| self.must_be(name, "given"))
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.must_be(name, "a text")),
        }
    }

    fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.must_be(name, "true or false")),
        }
    }

    /// A number from 0 to `max`.
    fn number(&mut self, name: &str, max: f32) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        #[expect(clippy::cast_possible_truncation, reason = "the range is checked before the value is used")]
        let number =
            value.as_f64().filter(|number| (0.0..=f64::from(max)).contains(number)).map(|number| number as f32);
        number.map(Some).ok_or_else(|| self.must_be(name, &format!("a number from 0 to {max}")))
    }

    /// A whole number from 1.
    fn count(&mut self, name: &str) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let count = value.as_u64().filter(|count| *count > 0).map(|count| usize::try_from(count).unwrap_or(usize::MAX));
        count.map(Some).ok_or_else(|| self.must_be(name, "a whole number from 1 to 2^64 - 1"))
    }

    fn unsupported(&self, name: &str) -> ApiError {
        let name = self.name(name);
        let message = format!("`{name}` is not supported with this value.");
        ApiError::request(StatusCode::BAD_REQUEST, "unsupported_value", message).about(name)
    }

    /// Refuses whatever is left.
    fn refuse_unknown(&self) -> Result<(), ApiError> {
        match self.fields.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let name = self.name(name);
                let message = format!("`{name}` is not supported.");
                Err(ApiError::request(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(name))
            }
        }
    }

    /// Refuses whatever is left, except what the table of parameters lets pass.
    fn refuse_the_rest(mut self, endpoint: Endpoint) -> Result<(), ApiError> {
        for row in PARAMETERS {
            let handling = match endpoint {
                Endpoint::Chat => row.chat,
                Endpoint::Completions => row.completions,
            };
            match handling {
                Handling::Applied | Handling::Refused => {}
                Handling::NoOp => drop(self.take(row.name)),
                Handling::Only(allowed) => match self.take(row.name) {
                    Some(value) if !allowed.iter().any(|allowed| is_same(&value, allowed)) => {
                        return Err(self.unsupported(row.name));
                    }
                    _ => {}
                },
            }
        }
        self.refuse_unknown()
    }
}

/// Whether a value is that JSON; 0 and 0.0 are the same number.
fn is_same(value: &Value, json: &str) -> bool {
    serde_json::from_str(json).is_ok_and(|allowed: Value| match (value.as_f64(), allowed.as_f64()) {
        (Some(value), Some(allowed)) => value == allowed,
        _ => *value == allowed,
    })
}
