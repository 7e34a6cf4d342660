//! DeepSeek-V4's prompt encoding: messages to token ids.
//!
//! Markers are inserted as ids and everything a client wrote is encoded as plain text between them, so no content can
//! pretend to be a turn of its own. Tools, effort prefixes and response formats come later: their fixed texts are the
//! checkpoint's data.

use crate::{PromptError, Tokenizer};

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";
const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const THINK: &str = "<think>";
const END_THINK: &str = "</think>";

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Rendered as it is, without a marker.
    System { content: String },
    /// What the person said. Blocks are joined by a blank line, and so are user messages that follow each other.
    User { blocks: Vec<String> },
    /// What the model said, with its reasoning where that is known.
    Assistant { reasoning: Option<String>, content: String },
}

/// Whether the model reasons before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThinkingMode {
    /// It answers at once: its turn opens with `</think>`.
    Chat,
    /// It reasons first: its turn opens with `<think>`.
    Thinking,
}

/// What becomes of the reasoning of turns before the last user message, in thinking mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldReasoning {
    /// It is left out, the way the model was trained.
    Drop,
    /// It stays, so that the encoded history only grows.
    Keep,
}

/// How a conversation is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatOptions {
    pub mode: ThinkingMode,
    pub old_reasoning: OldReasoning,
}

/// Encodes a whole conversation. If it ends with a user message, the model's turn is opened.
///
/// # Errors
///
/// If the tokenizer lacks a marker that the conversation needs.
pub fn encode_chat(tokenizer: &Tokenizer, messages: &[Message], options: ChatOptions) -> Result<Vec<u32>, PromptError> {
    let messages = merge_users(messages);
    let last_user = messages.iter().rposition(|message| matches!(message, Message::User { .. }));
    let is_reasoned = |idx: usize| {
        options.mode == ThinkingMode::Thinking
            && (options.old_reasoning == OldReasoning::Keep || last_user.is_none_or(|last| idx >= last))
    };

    let mut out = Encoder::new(tokenizer);
    out.marker(BOS)?;
    for (idx, message) in messages.iter().enumerate() {
        match message {
            Message::System { content } => out.text(content),
            Message::User { blocks } => {
                out.marker(USER)?;
                out.text(&blocks.join("\n\n"));
                if matches!(messages.get(idx + 1), None | Some(Message::Assistant { .. })) {
                    out.marker(ASSISTANT)?;
                    out.marker(if is_reasoned(idx) { THINK } else { END_THINK })?;
                }
            }
            Message::Assistant { reasoning, content } => {
                // The turn was opened at the message before; `idx` is after the last user message exactly if that was it.
                if is_reasoned(idx) {
                    out.text(reasoning.as_deref().unwrap_or_default());
                    out.marker(END_THINK)?;
                }
                out.text(content);
                out.marker(EOS)?;
            }
        }
    }
    out.finish()
}

/// Encodes a text for the model to continue.
///
/// # Errors
///
/// If the tokenizer has no begin-of-sentence token.
pub fn encode_completion(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, PromptError> {
    let mut out = Encoder::new(tokenizer);
    out.marker(BOS)?;
    out.text(text);
    out.finish()
}

fn merge_users(messages: &[Message]) -> Vec<Message> {
    let mut merged: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        match (merged.last_mut(), message) {
            (Some(Message::User { blocks }), Message::User { blocks: more }) => blocks.extend_from_slice(more),
            _ => merged.push(message.clone()),
        }
    }
    merged
}

/// Collects text between markers, so that neighbouring texts are encoded as one.
struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    text: String,
}

impl<'a> Encoder<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), text: String::new() }
    }

    fn text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn marker(&mut self, name: &str) -> Result<(), PromptError> {
        self.flush()?;
        self.ids.push(self.tokenizer.require_special(name)?);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), PromptError> {
        self.ids.extend(self.tokenizer.encode(&std::mem::take(&mut self.text))?);
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<u32>, PromptError> {
        self.flush()?;
        Ok(self.ids)
    }
}
