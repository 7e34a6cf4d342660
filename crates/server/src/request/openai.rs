//! `/v1/chat/completions` and `/v1/completions`.

use serde_json::Value;
use troika_engine::api::Service;
use troika_prompt::{Conversation, LastAssistant, Message, ToolCall, UserBlock};

use super::{
    Asked, Chat, DEFAULT_COMPLETION_TOKENS, Delivery, MAX_CHOICES, MAX_TOP_LOGPROBS, Prompt, Thinking, ends_with_user,
    parse_service_tier, parse_stops, parse_texts,
    tools::{ReplyFormat, parse_format, parse_openai_choice, parse_openai_tools},
};
use crate::{
    ServerState,
    error::{ApiError, quote},
    fields::Fields,
};

pub(super) fn parse_chat(fields: &mut Fields, state: &ServerState) -> Result<Asked, ApiError> {
    let messages = parse_messages(fields.take("messages"))?;
    let (tools, names) = parse_openai_tools(fields)?;
    let offer = parse_openai_choice(fields, tools, &names)?;
    let format = parse_format(fields, "response_format")?;
    let conversation = Conversation { messages, tools: offer.tools.clone(), response_format: format.schema().cloned() };
    let thinking = parse_thinking(fields)?;
    let chat = Chat { conversation, thinking, last_assistant: LastAssistant::Closed, offer };
    let asked = Asked::new(fields, state, Prompt::Chat(chat))?;
    let max_tokens = match (fields.count("max_tokens")?, fields.count("max_completion_tokens")?) {
        (Some(old), Some(new)) if old != new => {
            let message = "`max_tokens` is the old name of `max_completion_tokens`, and they differ. Give one.";
            return Err(ApiError::invalid("max_tokens", message));
        }
        (old, new) => new.or(old),
    };
    let urgency = parse_service_tier(fields)?;
    let top_logprobs = fields.count_to("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
    let logprobs = match (fields.flag("logprobs")?.unwrap_or(false), top_logprobs) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(ApiError::invalid("top_logprobs", "`top_logprobs` can only be given when `logprobs` is true."));
        }
    };
    Ok(Asked {
        max_tokens,
        logprobs,
        ignore_eos: parse_ignore_eos(fields, &format, asked.offers_tools())?,
        format,
        stops: parse_stops(fields, "stop")?,
        num_choices: fields.count_to("n", 1, MAX_CHOICES)?.unwrap_or(1),
        delivery: parse_delivery(fields)?,
        service: Service { urgency, ..asked.service },
        ..asked
    })
}

pub(super) fn parse_completion(fields: &mut Fields, state: &ServerState) -> Result<Asked, ApiError> {
    let prompt = parse_prompt(fields.take("prompt"))?;
    let asked = Asked::new(fields, state, prompt)?;
    let logprobs = fields.count_to("logprobs", 0, MAX_TOP_LOGPROBS)?;
    let echo = fields.flag("echo")?.unwrap_or(false);
    if echo && logprobs.is_some() {
        let message = "`echo` cannot be combined with `logprobs`: the prompt's tokens have none.";
        return Err(ApiError::invalid("echo", message));
    }
    let format = parse_format(fields, "response_format")?;
    Ok(Asked {
        logprobs,
        echo,
        ignore_eos: parse_ignore_eos(fields, &format, false)?,
        format,
        max_tokens: Some(fields.count("max_tokens")?.unwrap_or(DEFAULT_COMPLETION_TOKENS)),
        stops: parse_stops(fields, "stop")?,
        num_choices: fields.count_to("n", 1, MAX_CHOICES)?.unwrap_or(1),
        delivery: parse_delivery(fields)?,
        ..asked
    })
}

/// vLLM's and llama.cpp's word for answers of a known length. What has a form has an end.
fn parse_ignore_eos(fields: &mut Fields, format: &ReplyFormat, offers_tools: bool) -> Result<bool, ApiError> {
    let ignore = fields.flag("ignore_eos")?.unwrap_or(false);
    if ignore && (offers_tools || !matches!(format, ReplyFormat::Text)) {
        let message =
            "`ignore_eos` cannot be combined with `tools` or a `response_format`: their answers end by themselves.";
        return Err(ApiError::invalid("ignore_eos", message));
    }
    Ok(ignore)
}

/// OpenAI's word for it, or DeepSeek's.
fn parse_thinking(fields: &mut Fields) -> Result<Thinking, ApiError> {
    let effort = Thinking::from_effort(fields, "reasoning_effort")?;
    let Some(mut thinking) = fields.object("thinking")? else { return Ok(effort.unwrap_or(Thinking::NONE)) };
    let kind = thinking.text("type")?;
    thinking.refuse_unknown()?;
    match kind.as_deref() {
        Some("disabled") => Ok(Thinking::NONE),
        Some("enabled") => Ok(effort.unwrap_or(Thinking::with_effort(troika_prompt::Effort::Low))),
        _ => Err(thinking.must_be("type", "`enabled` or `disabled`")),
    }
}

fn parse_delivery(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.flag("stream")?.unwrap_or(false);
    match (stream, fields.object("stream_options")?) {
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

/// The last message must be one that the model can answer.
fn parse_messages(value: Option<Value>) -> Result<Vec<Message>, ApiError> {
    let Some(Value::Array(values)) = value else {
        return Err(ApiError::invalid("messages", "`messages` must be a list of messages."));
    };
    let messages = values.into_iter().enumerate().map(|(idx, value)| parse_message(idx, value));
    let messages: Vec<Message> = messages.collect::<Result<_, _>>()?;
    if !ends_with_user(&messages) {
        return Err(ApiError::invalid("messages", "The last of `messages` must have the role `user` or `tool`."));
    }
    Ok(messages)
}

fn parse_message(idx: usize, value: Value) -> Result<Message, ApiError> {
    let mut fields = Fields::of(&format!("messages[{idx}]"), value)?;
    let role = fields.text("role")?.unwrap_or_default();
    if !["system", "developer", "user", "assistant", "tool"].contains(&role.as_str()) {
        let role = quote(&role);
        let message = format!("The role `{role}` is not one of `system`, `developer`, `user`, `assistant`, `tool`.");
        return Err(ApiError::invalid(fields.name("role"), message));
    }
    let types: &[&str] = if role == "assistant" { &["text", "refusal"] } else { &["text"] };
    let blocks = parse_texts(&mut fields, "content", types)?;
    // Clients send an answer back as they got it, with lists that are empty.
    fields.ignore_empty_lists();
    let message = match role.as_str() {
        "system" | "developer" => Message::system(fields.require("content", blocks)?.join("\n\n")),
        "user" => {
            let blocks = fields.require("content", blocks)?;
            Message::User { blocks: blocks.into_iter().map(UserBlock::Text).collect() }
        }
        "tool" => {
            let call_id = fields.required_text("tool_call_id")?;
            Message::tool_result(call_id, fields.require("content", blocks)?.join("\n\n"))
        }
        _ => {
            let tool_calls = parse_calls(&mut fields)?;
            let reasoning = fields.text("reasoning_content")?;
            let content = match blocks {
                None if !tool_calls.is_empty() => String::new(),
                blocks => fields.require("content", blocks)?.join("\n\n"),
            };
            Message::Assistant { reasoning, content, tool_calls }
        }
    };
    fields.refuse_unknown()?;
    Ok(message)
}

fn parse_calls(fields: &mut Fields) -> Result<Vec<ToolCall>, ApiError> {
    let path = fields.name("tool_calls");
    let calls = fields.list("tool_calls")?.unwrap_or_default();
    let call = |(idx, call): (usize, Value)| {
        let mut call = Fields::of(&format!("{path}[{idx}]"), call)?;
        let id = call.text("id")?.unwrap_or_default();
        // Some clients keep the index of a streamed call.
        call.ignore(&["index"]);
        if call.text("type")?.is_some_and(|kind| kind != "function") {
            return Err(call.must_be("type", "`function`"));
        }
        let function = call.object("function")?;
        let mut function = call.require("function", function)?;
        call.refuse_unknown()?;
        let (name, arguments) = (function.required_text("name")?, function.text("arguments")?.unwrap_or_default());
        function.refuse_unknown()?;
        Ok(ToolCall { id, name, arguments })
    };
    calls.into_iter().enumerate().map(call).collect()
}
