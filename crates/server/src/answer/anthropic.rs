//! Answers of `/v1/messages`.

use serde_json::{Value, json};

use super::{Answer, EventQueue, Format, extension};
use crate::{
    error::ApiError,
    generation::{Ending, Piece, Usage},
};

/// Clients must send back a thinking block with the signature it came with. We check none, so all have the same.
const SIGNATURE: &str = "unsigned";

/// One message, and how much of it has been streamed.
pub(crate) struct Anthropic {
    id: String,
    model_id: String,
    stops: Vec<String>,
    /// The block that is being streamed.
    open: Option<Block>,
    num_blocks: usize,
    ending: Option<Ending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    ToolUse,
}

fn usage_json(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt - usage.served.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.served.cached_tokens,
        "output_tokens": usage.completion,
    })
}

/// Of an answer that is complete.
fn final_usage_json(id: &str, usage: Usage) -> Value {
    let mut json = usage_json(usage);
    json["troika"] = extension(id, usage);
    json
}

impl Anthropic {
    pub(crate) fn new(id: String, model_id: String, stops: Vec<String>) -> Self {
        Self { id, model_id, stops, open: None, num_blocks: 0, ending: None }
    }

    fn message(&self, content: &[Value], ending: Option<Ending>, usage: &Value) -> Value {
        let (stop_reason, stop_sequence) = self.stop(ending);
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model_id,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        })
    }

    fn stop(&self, ending: Option<Ending>) -> (Option<&'static str>, Option<&str>) {
        match ending {
            None => (None, None),
            Some(Ending::Stop) => (Some("end_turn"), None),
            Some(Ending::StopText(idx)) => (Some("stop_sequence"), self.stops.get(idx).map(String::as_str)),
            Some(Ending::Calls) => (Some("tool_use"), None),
            Some(Ending::Length) => (Some("max_tokens"), None),
        }
    }

    /// Opens a block of this kind unless the open one is; a tool use is always a new one.
    fn enter(&mut self, block: Block, start: &Value, events: &mut EventQueue) {
        if self.open == Some(block) && block != Block::ToolUse {
            return;
        }
        self.leave(events);
        let index = self.num_blocks;
        events.named(
            "content_block_start",
            &json!({"type": "content_block_start", "index": index, "content_block": start}),
        );
        self.open = Some(block);
    }

    fn delta(&self, delta: &Value, events: &mut EventQueue) {
        let event = json!({"type": "content_block_delta", "index": self.num_blocks, "delta": delta});
        events.named("content_block_delta", &event);
    }

    fn leave(&mut self, events: &mut EventQueue) {
        let Some(block) = self.open.take() else { return };
        if block == Block::Thinking {
            self.delta(&json!({"type": "signature_delta", "signature": SIGNATURE}), events);
        }
        events.named("content_block_stop", &json!({"type": "content_block_stop", "index": self.num_blocks}));
        self.num_blocks += 1;
    }
}

impl Format for Anthropic {
    fn whole(&mut self, answers: &[Answer], usage: Usage) -> Value {
        let Some(answer) = answers.first() else { unreachable!("there is one choice") };
        self.message(&blocks(answer), answer.ending(), &final_usage_json(&self.id, usage))
    }

    fn open(&mut self, _: usize, usage: Usage, events: &mut EventQueue) {
        let message = self.message(&[], None, &usage_json(usage));
        events.named("message_start", &json!({"type": "message_start", "message": message}));
    }

    fn piece(&mut self, _: usize, piece: Piece, events: &mut EventQueue) {
        match piece {
            Piece::Reasoning(text) => {
                self.enter(Block::Thinking, &json!({"type": "thinking", "thinking": "", "signature": ""}), events);
                self.delta(&json!({"type": "thinking_delta", "thinking": text}), events);
            }
            Piece::Content { text, .. } => {
                if !text.is_empty() {
                    self.enter(Block::Text, &json!({"type": "text", "text": ""}), events);
                    self.delta(&json!({"type": "text_delta", "text": text}), events);
                }
            }
            Piece::Call { id, name } => {
                let start = json!({"type": "tool_use", "id": format!("toolu_{id}"), "name": name, "input": {}});
                self.enter(Block::ToolUse, &start, events);
            }
            Piece::Arguments(text) => self.delta(&json!({"type": "input_json_delta", "partial_json": text}), events),
            Piece::End(ending) => {
                self.leave(events);
                self.ending = Some(ending);
            }
        }
    }

    fn close(&mut self, usage: Usage, events: &mut EventQueue) {
        let (stop_reason, stop_sequence) = self.stop(self.ending);
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let usage = final_usage_json(&self.id, usage);
        events.named("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage}));
        events.named("message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, _: Usage, events: &mut EventQueue) {
        events.named("error", &error.anthropic_body());
    }
}

fn blocks(answer: &Answer) -> Vec<Value> {
    let mut blocks: Vec<Value> = Vec::new();
    for piece in answer.pieces() {
        match piece {
            Piece::Reasoning(text) => {
                blocks.push(json!({"type": "thinking", "thinking": text, "signature": SIGNATURE}));
            }
            Piece::Content { text, .. } if !text.is_empty() => blocks.push(json!({"type": "text", "text": text})),
            Piece::Call { id, name } => {
                blocks.push(json!({"type": "tool_use", "id": format!("toolu_{id}"), "name": name, "input": {}}));
            }
            Piece::Arguments(text) => {
                if let Some(block) = blocks.last_mut() {
                    block["input"] = complete(text);
                }
            }
            Piece::Content { .. } | Piece::End(_) => {}
        }
    }
    blocks
}

/// The object that these arguments are, or begin to be: clients that read a stream make the same of arguments that broke
/// off.
fn complete(json: &str) -> Value {
    let mut open = Vec::new();
    let (mut in_string, mut escaped) = (false, false);
    for letter in json.chars() {
        match letter {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            '{' if !in_string => open.push('}'),
            '[' if !in_string => open.push(']'),
            '}' | ']' if !in_string => drop(open.pop()),
            _ => {}
        }
    }
    let quote = if in_string { "\"" } else { "" };
    let closed = format!("{json}{quote}{}", open.iter().rev().collect::<String>());
    let object = serde_json::from_str(&closed).ok().filter(Value::is_object);
    object.unwrap_or_else(|| json!({}))
}
