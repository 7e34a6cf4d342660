//! `/v1/responses`.

use axum::http::StatusCode;
use serde_json::{Value, json};
use troika_engine::api::Service;
use troika_prompt::{Conversation, LastAssistant, Message, ToolCall, UserBlock};

use super::{
    Asked, Chat, Prompt, ReplyFormat, ResponseAsked, Thinking, append, ends_with_user, model_turn, parse_service_tier,
    parse_stream, parse_texts,
    tools::{parse_flat_tools, parse_format, parse_openai_choice},
};
use crate::{
    ServerState,
    answer::Echo,
    error::{ApiError, quote},
    fields::Fields,
    store::{ItemText, ResponseStore},
};

/// Members of the request that the response repeats, each with what stands there if the client said nothing.
const REPEATED: [(&str, &str); 13] = [
    ("instructions", "null"),
    ("max_output_tokens", "null"),
    ("metadata", "{}"),
    ("parallel_tool_calls", "true"),
    ("previous_response_id", "null"),
    ("reasoning", "{\"effort\":null,\"summary\":null}"),
    ("store", "true"),
    ("temperature", "null"),
    ("text", "{\"format\":{\"type\":\"text\"}}"),
    ("tool_choice", "\"auto\""),
    ("tools", "[]"),
    ("top_p", "null"),
    ("user", "null"),
];

pub(super) fn parse(fields: &mut Fields, state: &ServerState, store: &ResponseStore) -> Result<Asked, ApiError> {
    let mut echo = repeat(fields);
    let old_text = match fields.text("previous_response_id")? {
        None => ItemText::default(),
        Some(id) => store.get(&id).ok_or_else(|| response_not_found(&id).about("previous_response_id"))?.items,
    };
    let old_items = old_text.parse().map_err(|error| unreadable(&error))?;
    let new_items = parse_input(fields)?;
    let item_text = old_text.followed_by(&new_items);
    let mut messages = Vec::new();
    if let Some(instructions) = fields.text("instructions")? {
        messages.push(Message::system(instructions));
    }
    for (list, items) in [("previous_response_id.input", old_items), ("input", new_items)] {
        for (idx, item) in items.into_iter().enumerate() {
            parse_item(Fields::of(&format!("{list}[{idx}]"), item)?, &mut messages)?;
        }
    }
    if !ends_with_user(&messages) {
        return Err(fields.must_be("input", "a text, or items of which the last is a user's or a tool's"));
    }
    let (tools, names) = parse_flat_tools(fields)?;
    let offer = parse_openai_choice(fields, tools, &names)?;
    let format = match fields.object("text")? {
        None => ReplyFormat::Text,
        Some(mut text) => {
            let format = parse_format(&mut text, "format")?;
            if text.text("verbosity")?.is_some_and(|verbosity| verbosity != "medium") {
                return Err(text.unsupported("verbosity"));
            }
            text.refuse_unknown()?;
            format
        }
    };
    let thinking = parse_reasoning(fields)?;
    let conversation = Conversation { messages, tools: offer.tools.clone(), response_format: format.schema().cloned() };
    let chat = Chat { conversation, thinking, last_assistant: LastAssistant::Closed, offer };
    let asked = Asked::new(fields, state, Prompt::Chat(chat))?;
    let store = fields.flag("store")?.unwrap_or(true);
    echo.insert("store".into(), store.into());
    for (name, value) in [("temperature", asked.sampling.temperature), ("top_p", asked.sampling.top_p)] {
        if echo[name].is_null() {
            echo.insert(name.into(), value.into());
        }
    }
    Ok(Asked {
        format,
        format_name: "text",
        max_tokens: fields.count("max_output_tokens")?,
        delivery: parse_stream(fields)?,
        service: Service { urgency: parse_service_tier(fields)?, ..asked.service },
        response: Some(ResponseAsked { echo, store, items: item_text }),
        ..asked
    })
}

fn repeat(fields: &Fields) -> Echo {
    let default = |json: &str| serde_json::from_str(json).unwrap_or(Value::Null);
    REPEATED
        .iter()
        .map(|(name, json)| ((*name).into(), fields.peek(name).cloned().unwrap_or_else(|| default(json))))
        .collect()
}

fn unreadable(error: &serde_json::Error) -> ApiError {
    let message = format!("The stored response cannot be read: {error}");
    ApiError::server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
}

pub(crate) fn response_not_found(id: &str) -> ApiError {
    let message = format!(
        "There is no response `{}`. The last responses are kept in memory, for as long as there is room and the server runs.",
        quote(id)
    );
    ApiError::request(StatusCode::NOT_FOUND, "response_not_found", message)
}

/// Input items; a text is one message.
fn parse_input(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    match fields.take("input") {
        Some(Value::String(text)) => Ok(vec![json!({"type": "message", "role": "user", "content": text})]),
        Some(Value::Array(items)) => Ok(items),
        _ => Err(fields.must_be("input", "a text or a list of items")),
    }
}

/// Effort, and a summary: reasoning is always given whole.
fn parse_reasoning(fields: &mut Fields) -> Result<Thinking, ApiError> {
    let Some(mut reasoning) = fields.object("reasoning")? else { return Ok(Thinking::NONE) };
    let thinking = Thinking::from_effort(&mut reasoning, "effort")?;
    for name in ["summary", "generate_summary"] {
        reasoning.text(name)?;
    }
    reasoning.refuse_unknown()?;
    Ok(thinking.unwrap_or(Thinking::NONE))
}

fn parse_item(mut item: Fields, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let kind = item.text("type")?.unwrap_or_else(|| "message".to_owned());
    // What an output item has beside what it says; clients send it back.
    item.ignore(&["id", "status", "phase"]);
    match kind.as_str() {
        "message" => parse_message(&mut item, messages)?,
        "function_call" => {
            let id = item.required_text("call_id")?;
            let (name, arguments) = (item.required_text("name")?, item.text("arguments")?.unwrap_or_default());
            model_turn(messages).2.push(ToolCall { id, name, arguments });
        }
        "function_call_output" => {
            let call_id = item.required_text("call_id")?;
            let output = parse_texts(&mut item, "output", &["input_text", "output_text", "text"])?;
            let content = item.require("output", output)?.join("\n\n");
            messages.push(Message::User { blocks: vec![UserBlock::ToolResult { call_id, content }] });
        }
        "reasoning" => {
            item.ignore(&["encrypted_content"]);
            let summary = parse_texts(&mut item, "summary", &["summary_text"])?.unwrap_or_default();
            let content = parse_texts(&mut item, "content", &["reasoning_text", "text"])?.unwrap_or_default();
            let text = if content.is_empty() { summary } else { content }.join("\n\n");
            append(model_turn(messages).0, &text);
        }
        _ => {
            let message = format!(
                "Items of the type `{}` are not supported; `message`, `function_call`, `function_call_output` and \
                 `reasoning` are.",
                quote(&kind)
            );
            return Err(ApiError::invalid(item.name("type"), message));
        }
    }
    item.refuse_unknown()
}

fn parse_message(item: &mut Fields, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let role = item.text("role")?;
    let types: &[&str] = if role.as_deref() == Some("assistant") {
        &["output_text", "refusal", "text"]
    } else {
        &["input_text", "text"]
    };
    let texts = parse_texts(item, "content", types)?;
    let texts = item.require("content", texts)?;
    match role.as_deref() {
        Some("system" | "developer") => messages.push(Message::system(texts.join("\n\n"))),
        Some("user") => messages.push(Message::User { blocks: texts.into_iter().map(UserBlock::Text).collect() }),
        Some("assistant") => model_turn(messages).1.push_str(&texts.join("\n\n")),
        _ => return Err(item.must_be("role", "`user`, `assistant`, `system` or `developer`")),
    }
    Ok(())
}
