//! DeepSeek-V4's prompt encoding: messages to token ids, as section 13.2 of the model spec has it.
//!
//! Markers are inserted as ids and everything a client wrote is encoded as plain text between them, so no content can
//! pretend to be a turn, a tool result's end or a call of its own. The checkpoint's [`FixedTexts`] are trusted: a marker
//! spelled out in them is one.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::{FixedTexts, PromptError, Tokenizer, json::to_json, texts::Effort};

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";
const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const REMINDER: &str = "<｜latest_reminder｜>";
pub(crate) const THINK: &str = "<think>";
pub(crate) const END_THINK: &str = "</think>";
pub(crate) const DSML: &str = "｜DSML｜";
/// What a trusted text may spell out.
const MARKERS: [&str; 8] = [BOS, EOS, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML];

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Rendered as it is, without a marker. One that comes after the conversation has begun becomes a
    /// [`Message::LatestReminder`]: there is no other place for it.
    System { content: String },
    /// What the person said and the tools answered. Blocks are joined by a blank line, and so are user messages that follow
    /// each other.
    User { blocks: Vec<UserBlock> },
    /// What the model said, with its reasoning where that is known, and the tools it called.
    Assistant { reasoning: Option<String>, content: String, tool_calls: Vec<ToolCall> },
    /// What the model should bear in mind at the next user turn.
    LatestReminder { content: String },
}

impl Message {
    #[must_use]
    pub fn system(content: impl Into<String>) -> Self {
        Self::System { content: content.into() }
    }

    #[must_use]
    pub fn user(content: impl Into<String>) -> Self {
        Self::User { blocks: vec![UserBlock::Text(content.into())] }
    }

    #[must_use]
    pub fn tool_result(call_id: impl Into<String>, content: impl Into<String>) -> Self {
        Self::User { blocks: vec![UserBlock::ToolResult { call_id: call_id.into(), content: content.into() }] }
    }

    #[must_use]
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::Assistant { reasoning: None, content: content.into(), tool_calls: Vec::new() }
    }
}

/// A part of a user message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserBlock {
    Text(String),
    /// What the call of this id gave. The results of one turn are put in the order of their calls.
    ToolResult {
        call_id: String,
        content: String,
    },
}

/// A call that the model made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Empty if the client has none.
    pub id: String,
    pub name: String,
    /// A JSON object as the model wrote it. Anything else becomes one parameter called `arguments`; nothing at all is a call
    /// without parameters.
    pub arguments: String,
}

/// All that a prompt is made of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    pub messages: Vec<Message>,
    /// The `function` object of each tool, keys in the client's order. They are offered behind the last system message at
    /// the start, or before everything.
    pub tools: Vec<Value>,
    /// The JSON schema that the reply should have, told to the model behind the tools.
    pub response_format: Option<Value>,
}

/// Whether the model reasons before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThinkingMode {
    /// It answers at once: its turn opens with `</think>`.
    Chat,
    /// It reasons first: its turn opens with `<think>`.
    Thinking,
}

/// What becomes of the reasoning of turns before the last user message, in thinking mode. With tools it always stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldReasoning {
    /// It is left out, the way the model was trained.
    Drop,
    /// It stays, so that the encoded history only grows.
    Keep,
}

/// What becomes of a model's message that ends the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastAssistant {
    /// It is complete.
    Closed,
    /// The model goes on with it.
    Continued,
}

/// How a conversation is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatOptions {
    pub mode: ThinkingMode,
    pub old_reasoning: OldReasoning,
    /// No effect in [`ThinkingMode::Chat`].
    pub effort: Effort,
    pub last_assistant: LastAssistant,
}

impl ChatOptions {
    /// The usual way: old reasoning goes, low effort, a model's message at the end is complete.
    #[must_use]
    pub fn new(mode: ThinkingMode) -> Self {
        Self { mode, old_reasoning: OldReasoning::Drop, effort: Effort::Low, last_assistant: LastAssistant::Closed }
    }
}

/// Where the model's output begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opens {
    /// In its reasoning: the prompt ends with `<think>`.
    Reasoning,
    /// In its answer.
    Content,
}

/// A prompt as token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub ids: Vec<u32>,
    pub opens: Opens,
}

/// Encodes a whole conversation. If it ends with a user message, the model's turn is opened.
///
/// # Errors
///
/// If the tokenizer lacks a marker, or the checkpoint a text, that the conversation needs.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    texts: &FixedTexts,
    conversation: &Conversation,
    options: ChatOptions,
) -> Result<Prompt, PromptError> {
    let has_offers = !conversation.tools.is_empty() || conversation.response_format.is_some();
    let messages = prepare(&conversation.messages, has_offers);
    let last_user = messages.iter().rposition(|message| matches!(message, Message::User { .. }));
    let keeps_all = options.old_reasoning == OldReasoning::Keep || !conversation.tools.is_empty();
    let is_reasoned =
        |idx: usize| options.mode == ThinkingMode::Thinking && (keeps_all || last_user.is_none_or(|last| idx >= last));
    let num_leading = messages.iter().take_while(|message| matches!(message, Message::System { .. })).count();

    let mut out = Encoder::new(tokenizer);
    out.marker(BOS)?;
    if options.mode == ThinkingMode::Thinking {
        out.trusted(texts.effort(options.effort)?)?;
    }
    let mut opens = Opens::Content;
    for (idx, message) in messages.iter().enumerate() {
        let next = messages.get(idx + 1);
        match message {
            Message::System { content } => {
                out.text(content);
                if idx + 1 == num_leading {
                    encode_offers(&mut out, texts, conversation)?;
                }
            }
            Message::User { blocks } => {
                out.marker(USER)?;
                out.text(&blocks.iter().map(render_block).collect::<Vec<_>>().join("\n\n"));
                if matches!(next, None | Some(Message::Assistant { .. } | Message::LatestReminder { .. })) {
                    out.marker(ASSISTANT)?;
                    out.marker(if is_reasoned(idx) { THINK } else { END_THINK })?;
                }
                if next.is_none() && is_reasoned(idx) {
                    opens = Opens::Reasoning;
                }
            }
            Message::Assistant { reasoning, content, tool_calls } => {
                // The turn was opened at the message before; `idx` is after the last user message exactly if that was it.
                if is_reasoned(idx) {
                    out.text(reasoning.as_deref().unwrap_or_default());
                    out.marker(END_THINK)?;
                }
                out.text(content);
                encode_calls(&mut out, tool_calls)?;
                if next.is_some() || options.last_assistant == LastAssistant::Closed {
                    out.marker(EOS)?;
                }
            }
            Message::LatestReminder { content } => {
                out.marker(REMINDER)?;
                out.text(content);
            }
        }
    }
    Ok(Prompt { ids: out.finish()?, opens })
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

/// The messages in the form that is rendered: user messages in a row are one, tool results stand in the order of their
/// calls, and system messages stand only at the start.
fn prepare(messages: &[Message], has_offers: bool) -> Vec<Message> {
    let mut prepared: Vec<Message> = Vec::with_capacity(messages.len() + 1);
    let mut has_begun = false;
    for message in messages {
        has_begun |= !matches!(message, Message::System { .. });
        match message {
            Message::System { content } if has_begun => remind(&mut prepared, content),
            Message::User { blocks } => match prepared.last_mut() {
                Some(Message::User { blocks: before }) => before.extend_from_slice(blocks),
                _ => prepared.push(message.clone()),
            },
            _ => prepared.push(message.clone()),
        }
    }
    if prepared.last().is_some_and(|last| matches!(last, Message::LatestReminder { .. })) {
        // A reminder belongs to a user turn. If the client left that out, it is an empty one.
        prepared.push(Message::User { blocks: Vec::new() });
    }
    if has_offers && !matches!(prepared.first(), Some(Message::System { .. })) {
        prepared.insert(0, Message::system(""));
    }
    sort_results(&mut prepared);
    prepared
}

/// Puts a late system message before the user turn that it belongs to: the one it stands in, or else the next.
fn remind(prepared: &mut Vec<Message>, content: &str) {
    let turn = match prepared.last() {
        Some(Message::User { .. }) => prepared.len() - 1,
        _ => prepared.len(),
    };
    match turn.checked_sub(1).map(|before| &mut prepared[before]) {
        Some(Message::LatestReminder { content: before }) => {
            before.push_str("\n\n");
            before.push_str(content);
        }
        _ => prepared.insert(turn, Message::LatestReminder { content: content.to_owned() }),
    }
}

/// Within each user message, the places of tool results are filled in the order of the calls before; a result of an
/// unknown call counts as one of the first.
fn sort_results(messages: &mut [Message]) {
    let mut order: BTreeMap<String, usize> = BTreeMap::new();
    for message in messages {
        match message {
            Message::Assistant { tool_calls, .. } if !tool_calls.is_empty() => {
                let numbered = tool_calls.iter().enumerate().filter(|(_, call)| !call.id.is_empty());
                order = numbered.map(|(idx, call)| (call.id.clone(), idx)).collect();
            }
            Message::User { blocks } => {
                let is_result = |block: &UserBlock| matches!(block, UserBlock::ToolResult { .. });
                let place = |block: &UserBlock| match block {
                    UserBlock::ToolResult { call_id, .. } => order.get(call_id).copied().unwrap_or(0),
                    UserBlock::Text(_) => 0,
                };
                let mut results: Vec<UserBlock> = blocks.iter().filter(|block| is_result(block)).cloned().collect();
                results.sort_by_key(place);
                blocks.iter_mut().filter(|block| is_result(block)).zip(results).for_each(|(to, from)| *to = from);
            }
            _ => {}
        }
    }
}

fn render_block(block: &UserBlock) -> String {
    match block {
        UserBlock::Text(text) => text.clone(),
        UserBlock::ToolResult { content, .. } => format!("<tool_result>{content}</tool_result>"),
    }
}

/// Tools and response format, behind the system message.
fn encode_offers(out: &mut Encoder<'_>, texts: &FixedTexts, conversation: &Conversation) -> Result<(), PromptError> {
    if !conversation.tools.is_empty() {
        let schemas: Vec<String> = conversation.tools.iter().map(to_json).collect();
        out.text("\n\n");
        out.template(texts.tools()?, "tool_schemas", &schemas.join("\n"))?;
    }
    if let Some(schema) = &conversation.response_format {
        out.text("\n\n");
        out.template(texts.response_format()?, "schema", &to_json(schema))?;
    }
    Ok(())
}

fn encode_calls(out: &mut Encoder<'_>, tool_calls: &[ToolCall]) -> Result<(), PromptError> {
    if tool_calls.is_empty() {
        return Ok(());
    }
    out.tag("\n\n<", "tool_calls>\n")?;
    for call in tool_calls {
        out.tag("<", "invoke name=\"")?;
        out.text(&call.name);
        out.text("\">\n");
        for (idx, (key, value)) in arguments_of(&call.arguments).iter().enumerate() {
            out.tag(if idx == 0 { "<" } else { "\n<" }, "parameter name=\"")?;
            out.text(key);
            match value {
                Value::String(text) => {
                    out.text("\" string=\"true\">");
                    out.text(text);
                }
                other => {
                    out.text("\" string=\"false\">");
                    out.text(&to_json(other));
                }
            }
            out.tag("</", "parameter>")?;
        }
        out.tag("\n</", "invoke>\n")?;
    }
    out.tag("</", "tool_calls>")
}

/// Parameters of a call, from the text of its arguments.
fn arguments_of(arguments: &str) -> Map<String, Value> {
    if arguments.trim().is_empty() {
        return Map::new();
    }
    match serde_json::from_str(arguments) {
        Ok(Value::Object(parameters)) => parameters,
        _ => Map::from_iter([("arguments".to_owned(), Value::from(arguments))]),
    }
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

    /// A part of a tag: its opening, the marker, its rest.
    fn tag(&mut self, before: &str, after: &str) -> Result<(), PromptError> {
        self.text(before);
        self.marker(DSML)?;
        self.text(after);
        Ok(())
    }

    /// A text of the checkpoint: markers spelled out in it are markers.
    fn trusted(&mut self, mut text: &str) -> Result<(), PromptError> {
        let first = |text: &str| MARKERS.iter().filter_map(|name| Some((text.find(name)?, *name))).min();
        while let Some((at, name)) = first(text) {
            self.text(&text[..at]);
            self.marker(name)?;
            text = &text[at + name.len()..];
        }
        self.text(text);
        Ok(())
    }

    /// A text of the checkpoint with `{name}` filled in by what a client wrote, and the marker's places by the markers.
    /// Doubled braces are single ones, as in Python's `format`.
    fn template(&mut self, template: &str, name: &str, value: &str) -> Result<(), PromptError> {
        let mut rest = template;
        while let Some(at) = rest.find(['{', '}']) {
            self.trusted(&rest[..at])?;
            rest = &rest[at..];
            let places = [("dsml_token", DSML), ("thinking_start_token", THINK), ("thinking_end_token", END_THINK)];
            let place = rest[1..].split_once('}').map(|(place, _)| place).filter(|_| rest.starts_with('{'));
            let marker = places.iter().find(|(marker, _)| place == Some(marker)).map(|(_, marker)| *marker);
            let brace_len = if rest.starts_with("{{") || rest.starts_with("}}") { 2 } else { 1 };
            let len = if let Some(marker) = marker {
                self.marker(marker)?;
                place.map_or(0, str::len) + 2
            } else if place == Some(name) {
                self.text(value);
                name.len() + 2
            } else {
                self.text(&rest[..1]);
                brace_len
            };
            rest = &rest[len..];
        }
        self.trusted(rest)
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
