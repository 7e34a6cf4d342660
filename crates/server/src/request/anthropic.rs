//! `/v1/messages` and `/v1/messages/count_tokens`.

use serde_json::Value;
use troika_prompt::{Conversation, Effort, LastAssistant, Message, ToolCall, UserBlock};

use super::{
    Asked, Chat, Prompt, ReplyFormat, Thinking, append, ends_with_user, model_turn, parse_stops, parse_stream,
    parse_text_part, parse_texts,
    tools::{parse_anthropic_choice, parse_anthropic_tools, parse_format},
    unsupported_type,
};
use crate::{ServerState, error::ApiError, fields::Fields};

const USER_TYPES: [&str; 2] = ["text", "tool_result"];
const MODEL_TYPES: [&str; 4] = ["text", "thinking", "redacted_thinking", "tool_use"];

pub(super) fn parse(fields: &mut Fields, state: &ServerState) -> Result<Asked, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = parse_texts(fields, "system", &["text"])? {
        messages.push(Message::system(system.join("\n\n")));
    }
    parse_messages(fields, &mut messages)?;
    let (tools, names) = parse_anthropic_tools(fields)?;
    let offer = parse_anthropic_choice(fields, tools, &names)?;
    let (effort, format) = parse_output_config(fields)?;
    let thinking = match parse_thinking(fields)? {
        true => effort.unwrap_or(Thinking::with_effort(Effort::Low)),
        false => Thinking::NONE,
    };
    // A model's message at the end is the beginning of its answer.
    let last_assistant = match messages.last() {
        Some(Message::Assistant { .. }) => LastAssistant::Continued,
        _ if ends_with_user(&messages) => LastAssistant::Closed,
        _ => return Err(fields.must_be("messages", "a list with a message of the user's")),
    };
    let conversation = Conversation { messages, tools: offer.tools.clone(), response_format: format.schema().cloned() };
    let asked = Asked::new(fields, state, Prompt::Chat(Chat { conversation, thinking, last_assistant, offer }))?;
    Ok(Asked {
        format,
        format_name: "output_config",
        max_tokens: fields.count("max_tokens")?,
        stops: parse_stops(fields, "stop_sequences")?,
        delivery: parse_stream(fields)?,
        ..asked
    })
}

/// Whether the model thinks. A budget bounds nothing here; `max_tokens` does.
fn parse_thinking(fields: &mut Fields) -> Result<bool, ApiError> {
    let Some(mut thinking) = fields.object("thinking")? else { return Ok(false) };
    thinking.count("budget_tokens")?;
    // Whether clients see the thinking: they always do.
    thinking.text("display")?;
    let kind = thinking.text("type")?;
    thinking.refuse_unknown()?;
    match kind.as_deref() {
        Some("enabled" | "adaptive") => Ok(true),
        Some("disabled") => Ok(false),
        _ => Err(thinking.must_be("type", "`enabled`, `adaptive` or `disabled`")),
    }
}

fn parse_output_config(fields: &mut Fields) -> Result<(Option<Thinking>, ReplyFormat), ApiError> {
    let Some(mut config) = fields.object("output_config")? else { return Ok((None, ReplyFormat::Text)) };
    let effort = Thinking::from_effort(&mut config, "effort")?;
    let format = parse_format(&mut config, "format")?;
    config.refuse_unknown()?;
    Ok((effort, format))
}

fn parse_messages(fields: &mut Fields, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let values = fields.list("messages")?;
    let values = fields.require("messages", values)?;
    if values.is_empty() {
        return Err(fields.must_be("messages", "a list with at least one message"));
    }
    for (idx, value) in values.into_iter().enumerate() {
        let mut message = Fields::of(&format!("messages[{idx}]"), value)?;
        let role = message.text("role")?;
        match role.as_deref() {
            Some("user") => {
                let blocks = parse_user_blocks(&mut message)?;
                messages.push(Message::User { blocks });
            }
            Some("assistant") => parse_model_blocks(&mut message, messages)?,
            Some("system") => {
                let texts = parse_texts(&mut message, "content", &["text"])?;
                messages.push(Message::system(message.require("content", texts)?.join("\n\n")));
            }
            _ => return Err(message.must_be("role", "`user`, `assistant` or `system`")),
        }
        message.refuse_unknown()?;
    }
    Ok(())
}

/// The blocks of a message; a text is one block.
fn content_blocks(message: &mut Fields) -> Result<Vec<(Fields, String)>, ApiError> {
    let path = message.name("content");
    let blocks = match message.take("content") {
        Some(Value::String(text)) => vec![serde_json::json!({"type": "text", "text": text})],
        Some(Value::Array(blocks)) => blocks,
        _ => return Err(message.must_be("content", "a text or a list of blocks")),
    };
    let block = |(idx, block): (usize, Value)| {
        let kind = block.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
        let mut block = Fields::of(&format!("{path}[{idx}]"), block)?;
        block.ignore(&["cache_control"]);
        Ok((block, kind))
    };
    blocks.into_iter().enumerate().map(block).collect()
}

fn parse_user_blocks(message: &mut Fields) -> Result<Vec<UserBlock>, ApiError> {
    let block = |(mut block, kind): (Fields, String)| match kind.as_str() {
        "text" => parse_text_part(block, &["text"]).map(UserBlock::Text),
        "tool_result" => {
            block.ignore(&["type"]);
            let call_id = block.required_text("tool_use_id")?;
            let content = parse_texts(&mut block, "content", &["text"])?.unwrap_or_default().join("\n\n");
            // The prompt has no place for it; the text of the result says what went wrong.
            block.flag("is_error")?;
            block.refuse_unknown()?;
            Ok(UserBlock::ToolResult { call_id, content })
        }
        _ => Err(unsupported_type(&block, &kind, &USER_TYPES)),
    };
    content_blocks(message)?.into_iter().map(block).collect()
}

fn parse_model_blocks(message: &mut Fields, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let blocks = content_blocks(message)?;
    let (reasoning, content, calls) = model_turn(messages);
    for (mut block, kind) in blocks {
        match kind.as_str() {
            "text" => content.push_str(&parse_text_part(block, &["text"])?),
            "thinking" => {
                block.ignore(&["type", "signature"]);
                append(reasoning, &block.required_text("thinking")?);
                block.refuse_unknown()?;
            }
            // Thinking that another server has made unreadable.
            "redacted_thinking" => {}
            "tool_use" => {
                block.ignore(&["type", "caller"]);
                let (id, name) = (block.required_text("id")?, block.required_text("name")?);
                let input = block.take("input");
                let input = block.require("input", input.filter(Value::is_object))?;
                block.refuse_unknown()?;
                calls.push(ToolCall { id, name, arguments: input.to_string() });
            }
            _ => return Err(unsupported_type(&block, &kind, &MODEL_TYPES)),
        }
    }
    Ok(())
}
