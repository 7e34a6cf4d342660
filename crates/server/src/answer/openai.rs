//! Answers of `/v1/chat/completions` and `/v1/completions`.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{Answer, Call, EventQueue, Format, extension};
use crate::{
    error::ApiError,
    generation::{Ending, Piece, TokenChance, TokenLogprobs, Usage},
};

/// What all documents of one answer share.
pub(crate) struct OpenAi {
    id: String,
    is_chat: bool,
    created_unix_s: u64,
    model_id: String,
    /// Whether a stream ends with the usage.
    include_usage: bool,
    /// What has been streamed of each choice.
    progress: Vec<Progress>,
}

#[derive(Clone, Default)]
struct Progress {
    /// Calls begun.
    num_calls: usize,
    /// Letters of text.
    num_letters: usize,
}

#[derive(Serialize)]
struct Document<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice>,
    /// Outer `None`: no such member. Inner: `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Value>>,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    #[serde(flatten)]
    said: Said,
    logprobs: Value,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Said {
    Text(String),
    Message(Value),
    Delta(Value),
}

/// Token counts as OpenAI's clients see them.
fn usage_json(id: &str, usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.served.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        "troika": extension(id, usage),
    })
}

impl OpenAi {
    pub(crate) fn new(id: String, is_chat: bool, created_unix_s: u64, model_id: String, include_usage: bool) -> Self {
        Self { id, is_chat, created_unix_s, model_id, include_usage, progress: Vec::new() }
    }

    fn document(&self, object: &'static str, choices: Vec<Choice>, usage: Option<Option<Value>>) -> Document<'_> {
        Document { id: &self.id, object, created: self.created_unix_s, model: &self.model_id, choices, usage }
    }

    fn say(&mut self, index: usize, delta: Value, logprobs: Value, ending: Option<Ending>, events: &mut EventQueue) {
        let said = if self.is_chat {
            Said::Delta(delta)
        } else {
            Said::Text(delta["content"].as_str().unwrap_or_default().to_owned())
        };
        let choice = Choice { index, said, logprobs, finish_reason: ending.map(Ending::name) };
        let usage = self.include_usage.then_some(None);
        events.data(&self.document(self.chunk_name(), vec![choice], usage));
    }

    fn chunk_name(&self) -> &'static str {
        if self.is_chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn logprobs(&self, logprobs: &[TokenLogprobs], text_start: usize) -> Value {
        match (logprobs.is_empty(), self.is_chat) {
            (true, _) => Value::Null,
            (false, true) => {
                json!({"content": logprobs.iter().map(chat_logprobs).collect::<Vec<_>>(), "refusal": null})
            }
            (false, false) => completion_logprobs(logprobs, text_start),
        }
    }
}

impl Format for OpenAi {
    fn whole(&mut self, answers: &[Answer], usage: Usage) -> Value {
        let choice = |(index, answer): (usize, &Answer)| Choice {
            index,
            said: if self.is_chat { Said::Message(message(answer)) } else { Said::Text(answer.content()) },
            logprobs: self.logprobs(&answer.logprobs(), 0),
            finish_reason: answer.ending().map(Ending::name),
        };
        let choices = answers.iter().enumerate().map(choice).collect();
        let object = if self.is_chat { "chat.completion" } else { "text_completion" };
        json!(self.document(object, choices, Some(Some(usage_json(&self.id, usage)))))
    }

    /// The first event of a chat names the role.
    fn open(&mut self, num_choices: usize, _: Usage, events: &mut EventQueue) {
        self.progress = vec![Progress::default(); num_choices];
        for index in 0..num_choices {
            if self.is_chat {
                self.say(index, json!({"role": "assistant", "content": ""}), Value::Null, None, events);
            }
        }
    }

    fn piece(&mut self, choice: usize, piece: Piece, events: &mut EventQueue) {
        let progress = &mut self.progress[choice];
        let call = |progress: &Progress, rest: Value| {
            let index = progress.num_calls.saturating_sub(1);
            let mut call = Map::from_iter([("index".to_owned(), index.into())]);
            call.extend(rest.as_object().cloned().unwrap_or_default());
            json!({"tool_calls": [call]})
        };
        let (delta, logprobs, ending) = match piece {
            Piece::Reasoning(text) => (json!({"reasoning_content": text}), Value::Null, None),
            Piece::Content { text, logprobs } => {
                let start = progress.num_letters;
                progress.num_letters += text.chars().count();
                (json!({"content": text}), self.logprobs(&logprobs, start), None)
            }
            Piece::Call { id, name } => {
                progress.num_calls += 1;
                let function = json!({"name": name, "arguments": ""});
                let opening = json!({"id": format!("call_{id}"), "type": "function", "function": function});
                (call(progress, opening), Value::Null, None)
            }
            Piece::Arguments(text) => (call(progress, json!({"function": {"arguments": text}})), Value::Null, None),
            Piece::End(ending) => (json!({}), Value::Null, Some(ending)),
        };
        self.say(choice, delta, logprobs, ending, events);
    }

    fn close(&mut self, usage: Usage, events: &mut EventQueue) {
        if self.include_usage {
            events.data(&self.document(self.chunk_name(), Vec::new(), Some(Some(usage_json(&self.id, usage)))));
        }
        events.done();
    }

    fn fail(&mut self, error: &ApiError, _: Usage, events: &mut EventQueue) {
        events.data(&error.body());
    }
}

fn message(answer: &Answer) -> Value {
    let (content, reasoning, calls) = (answer.content(), answer.reasoning(), answer.calls());
    let content = (!content.is_empty() || calls.is_empty()).then_some(content);
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.iter().map(tool_call).collect();
    }
    message
}

fn tool_call(call: &Call<'_>) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": format!("call_{}", call.id), "type": "function", "function": function})
}

fn chance(chance: &TokenChance) -> Value {
    json!({"token": text_of(chance), "logprob": chance.logprob, "bytes": chance.bytes})
}

fn text_of(chance: &TokenChance) -> String {
    String::from_utf8_lossy(&chance.bytes).into_owned()
}

fn chat_logprobs(token: &TokenLogprobs) -> Value {
    let mut json = chance(&token.chosen);
    json["top_logprobs"] = token.top.iter().map(chance).collect();
    json
}

/// The older form: lists side by side. `text_start` is where the first of the tokens begins, in letters.
fn completion_logprobs(logprobs: &[TokenLogprobs], text_start: usize) -> Value {
    let mut offset = text_start;
    let mut offsets = Vec::new();
    for token in logprobs {
        offsets.push(offset);
        offset += text_of(&token.chosen).chars().count();
    }
    let top = |token: &TokenLogprobs| -> Map<String, Value> {
        // Tokens that are parts of letters may share a spelling; the more likely one stays.
        token.top.iter().rev().map(|chance| (text_of(chance), chance.logprob.into())).collect()
    };
    json!({
        "tokens": logprobs.iter().map(|token| text_of(&token.chosen)).collect::<Vec<_>>(),
        "token_logprobs": logprobs.iter().map(|token| token.chosen.logprob).collect::<Vec<_>>(),
        "top_logprobs": logprobs.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
