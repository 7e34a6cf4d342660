//! What the model says, split into reasoning, content and tool calls while it comes.
//!
//! A pure state machine over pieces of text and markers. Its result depends on the whole of them and never on how the text
//! was cut, nor on why the output ended; and whatever the model says ends up somewhere. Whole answers are read by the same
//! machine in one piece.
//!
//! **Markers are tokens.** `<think>`, `</think>` and `｜DSML｜` count only as the special tokens that they are. The same
//! letters spelled out by ordinary tokens are text, for a model that quotes a file must not call a tool by it. A special
//! token at a place where it means nothing is spelled out as text, except for the two of thinking, which always switch.
//!
//! **What is accepted.** The format of section 13.2 of the model spec, and beyond it: a block that breaks off at any place, any
//! white space between tags, closing tags left out, several blocks, parameters without `string`, a JSON object or any other
//! text instead of parameters. What cannot be read is content before the first call of a block, and the parameter `arguments`
//! inside a call. A value marked as JSON that is none is a string; a parameter that occurs twice is in the arguments twice.
//! String values are taken to the letter, since a newline at their edge may be meant. Only white space between tags and an
//! unfinished closing tag at the very end, which counts as finished, belong to nobody.

mod tags;

use std::sync::Arc;

use serde::de::IgnoredAny;

use crate::{
    Detokenizer, MarkerText, Opens, Tokenizer,
    chat::{DSML, END_THINK, THINK},
    json::escape,
};
use tags::{DSML_BYTE, END_THINK_BYTE, Miss, Opening, THINK_BYTE, Tag, is_closing_remnant};

/// What the next part of an output is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputEvent {
    ReasoningDelta(String),
    ContentDelta(String),
    /// A call begins. Calls are numbered from 0 and come one after the other.
    ToolCallStart {
        index: usize,
        name: String,
    },
    /// More of the arguments: all of them joined are a JSON object, unless the output broke off inside a value.
    ToolCallArgumentsDelta {
        index: usize,
        json: String,
    },
    ToolCallEnd {
        index: usize,
        /// False if the output broke off inside a value. The arguments are left as they are then, for a value cut short
        /// must not look like one that was meant.
        is_whole: bool,
    },
}

/// A marker of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// `<think>`
    Think,
    /// `</think>`
    EndThink,
    /// `｜DSML｜`, the mark of a tool call's tags.
    Dsml,
}

/// Whether tool calls are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolSyntax {
    Calls,
    /// They are content like any other.
    Text,
}

/// Splits one output. See the top of this file.
#[derive(Debug)]
pub struct OutputParser {
    syntax: ToolSyntax,
    state: State,
    /// What could still become a tag, markers as bytes that no text has. At most a tag long.
    held: Vec<u8>,
    /// The call that is open, or the number of calls.
    call: usize,
    num_parameters: usize,
    /// Text inside a call that is in no parameter.
    stray: String,
    /// A value that is not a string, until it is complete.
    value: String,
    events: Vec<OutputEvent>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Reasoning,
    Content,
    /// Inside a call, between parameters.
    Call,
    /// Inside a value that is passed on as a string.
    Text,
    /// Inside a value that is JSON, or should be.
    Json,
}

impl OutputParser {
    #[must_use]
    pub fn new(opens: Opens, syntax: ToolSyntax) -> Self {
        let state = match opens {
            Opens::Reasoning => State::Reasoning,
            Opens::Content => State::Content,
        };
        let (held, stray, value, events) = (Vec::new(), String::new(), String::new(), Vec::new());
        Self { syntax, state, held, call: 0, num_parameters: 0, stray, value, events }
    }

    /// True while the output is reasoning.
    #[must_use]
    pub fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Takes more text.
    pub fn push_text(&mut self, text: &str) -> Vec<OutputEvent> {
        self.held.extend_from_slice(text.as_bytes());
        self.run(false);
        std::mem::take(&mut self.events)
    }

    /// Takes a marker.
    pub fn push_marker(&mut self, marker: Marker) -> Vec<OutputEvent> {
        self.held.push(match marker {
            Marker::Think => THINK_BYTE,
            Marker::EndThink => END_THINK_BYTE,
            Marker::Dsml => DSML_BYTE,
        });
        self.run(false);
        std::mem::take(&mut self.events)
    }

    /// What is left, now that no more comes.
    pub fn finish(&mut self) -> Vec<OutputEvent> {
        self.run(true);
        match self.state {
            State::Reasoning | State::Content => {}
            State::Call => self.end_call(true),
            State::Text => self.end_call(false),
            State::Json => {
                let value = std::mem::take(&mut self.value);
                self.arguments(&value);
                self.end_call(false);
            }
        }
        std::mem::take(&mut self.events)
    }

    /// Works off what is held as far as it is certain what it is.
    fn run(&mut self, is_end: bool) {
        let held = std::mem::take(&mut self.held);
        let mut rest = &held[..];
        while !rest.is_empty() {
            let len = match self.state {
                State::Reasoning | State::Content => self.read_text(rest, is_end),
                State::Call => self.read_call(rest, is_end),
                State::Text | State::Json => self.read_value(rest, is_end),
            };
            let Some(len) = len else { break };
            rest = &rest[len..];
        }
        self.held = rest.to_vec();
    }

    /// Reads some of `rest` outside of calls. `None`: more is needed to tell what it is.
    fn read_text(&mut self, rest: &[u8], is_end: bool) -> Option<usize> {
        let after_call = self.call > 0;
        let is_plain = |byte: &u8| match byte {
            b'<' | b'\n' => self.syntax == ToolSyntax::Text,
            b' ' | b'\t' | b'\r' => !after_call,
            byte => !matches!(*byte, THINK_BYTE | END_THINK_BYTE | DSML_BYTE),
        };
        let num_plain = rest.iter().take_while(|byte| is_plain(byte)).count();
        if num_plain > 0 {
            self.say(text_of(&rest[..num_plain]));
            return Some(num_plain);
        }
        match rest[0] {
            THINK_BYTE => self.state = State::Reasoning,
            END_THINK_BYTE => self.state = State::Content,
            DSML_BYTE => self.say(DSML),
            first => {
                let opening = match (self.syntax, self.state) {
                    (ToolSyntax::Text, _) => Err(Miss::No),
                    (_, State::Reasoning) => tags::opening_in_reasoning(rest),
                    _ if after_call => tags::opening_after_call(rest),
                    _ => tags::opening(rest),
                };
                match opening {
                    Ok((Opening::Call { name }, len)) => {
                        self.start_call(name);
                        return Some(len);
                    }
                    Ok((Opening::EndBlock, len)) => return Some(len),
                    Err(Miss::Partial) if !is_end => return None,
                    Err(Miss::Partial) if after_call && self.state == State::Content && is_closing_remnant(rest) => {
                        return Some(rest.len());
                    }
                    _ => self.say(text_of(&[first])),
                }
            }
        }
        Some(1)
    }

    /// Reads some of `rest` inside a call, between parameters.
    fn read_call(&mut self, rest: &[u8], is_end: bool) -> Option<usize> {
        let num_plain = rest.iter().take_while(|byte| is_plain_in_call(**byte)).count();
        if num_plain > 0 {
            let text = text_of(&rest[..num_plain]);
            self.stray.push_str(if self.stray.is_empty() { text.trim_ascii_start() } else { text });
            return Some(num_plain);
        }
        match tags::tag(rest) {
            Ok((Tag::Parameter { key, is_string }, len)) => {
                let separator = if self.num_parameters == 0 { "{" } else { ", " };
                self.num_parameters += 1;
                let quote = if is_string { "\"" } else { "" };
                self.arguments(&format!("{separator}\"{}\": {quote}", escape(key)));
                self.state = if is_string { State::Text } else { State::Json };
                Some(len)
            }
            // A closing tag left over from a value that another tag ended.
            Ok((Tag::EndParameter, len)) => Some(len),
            Ok((Tag::Call { name }, len)) => {
                self.end_call(true);
                self.start_call(name);
                Some(len)
            }
            Ok((Tag::EndCall | Tag::EndBlock, len)) => {
                self.end_call(true);
                Some(len)
            }
            Err(Miss::Partial) if !is_end => None,
            Err(Miss::Partial) if is_closing_remnant(rest) => Some(rest.len()),
            Err(_) => {
                self.stray.push_str(spell(rest[0]));
                Some(1)
            }
        }
    }

    /// Reads some of `rest` inside a value.
    fn read_value(&mut self, rest: &[u8], is_end: bool) -> Option<usize> {
        let num_plain = rest.iter().take_while(|byte| is_plain_in_call(**byte)).count();
        if num_plain > 0 {
            self.add_to_value(text_of(&rest[..num_plain]));
            return Some(num_plain);
        }
        match tags::tag(rest) {
            Ok((Tag::EndParameter, len)) => {
                self.end_value();
                Some(len)
            }
            // The closing tag was left out; the other one is read next.
            Ok(_) => {
                self.end_value();
                Some(0)
            }
            Err(Miss::Partial) if !is_end => None,
            Err(Miss::Partial) if is_closing_remnant(rest) => {
                self.end_value();
                Some(rest.len())
            }
            Err(_) => {
                self.add_to_value(spell(rest[0]));
                Some(1)
            }
        }
    }

    fn add_to_value(&mut self, text: &str) {
        if self.state == State::Text {
            self.arguments(&escape(text));
        } else {
            self.value.push_str(text);
        }
    }

    fn end_value(&mut self) {
        if self.state == State::Text {
            self.arguments("\"");
        } else {
            let value = std::mem::take(&mut self.value);
            match serde_json::from_str::<IgnoredAny>(&value) {
                Ok(_) => self.arguments(value.trim()),
                Err(_) => self.arguments(&format!("\"{}\"", escape(&value))),
            }
        }
        self.state = State::Call;
    }

    fn start_call(&mut self, name: &str) {
        self.events.push(OutputEvent::ToolCallStart { index: self.call, name: name.to_owned() });
        self.num_parameters = 0;
        self.state = State::Call;
    }

    fn end_call(&mut self, is_whole: bool) {
        let stray = std::mem::take(&mut self.stray);
        let stray = stray.trim_ascii_end();
        let is_object = || stray.starts_with('{') && serde_json::from_str::<IgnoredAny>(stray).is_ok();
        if is_whole {
            match (self.num_parameters, stray) {
                (0, "") => self.arguments("{}"),
                (0, _) if is_object() => self.arguments(stray),
                (0, _) => self.arguments(&format!("{{\"arguments\": \"{}\"}}", escape(stray))),
                (_, "") => self.arguments("}"),
                (_, _) => self.arguments(&format!(", \"arguments\": \"{}\"}}", escape(stray))),
            }
        }
        self.events.push(OutputEvent::ToolCallEnd { index: self.call, is_whole });
        self.call += 1;
        self.state = State::Content;
        if !is_whole {
            // There is no room left for it in the arguments.
            self.say(stray);
        }
    }

    fn say(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let is_reasoning = self.state == State::Reasoning;
        match self.events.last_mut() {
            Some(OutputEvent::ReasoningDelta(said)) if is_reasoning => said.push_str(text),
            Some(OutputEvent::ContentDelta(said)) if !is_reasoning => said.push_str(text),
            _ if is_reasoning => self.events.push(OutputEvent::ReasoningDelta(text.to_owned())),
            _ => self.events.push(OutputEvent::ContentDelta(text.to_owned())),
        }
    }

    fn arguments(&mut self, more: &str) {
        match self.events.last_mut() {
            _ if more.is_empty() => {}
            Some(OutputEvent::ToolCallArgumentsDelta { json, .. }) => json.push_str(more),
            _ => self.events.push(OutputEvent::ToolCallArgumentsDelta { index: self.call, json: more.to_owned() }),
        }
    }
}

fn is_plain_in_call(byte: u8) -> bool {
    !matches!(byte, b'<' | THINK_BYTE | END_THINK_BYTE | DSML_BYTE)
}

/// Text between markers, cut before or after a letter of ASCII.
fn text_of(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("pieces are text, cut at letters")
}

/// A byte that is no part of a tag, as text.
fn spell(byte: u8) -> &'static str {
    match byte {
        THINK_BYTE => THINK,
        END_THINK_BYTE => END_THINK,
        DSML_BYTE => DSML,
        _ => "<",
    }
}

/// Turns the tokens of one output into events: detokenizer and parser in one.
#[derive(Debug)]
pub struct OutputDecoder {
    detokenizer: Detokenizer,
    parser: OutputParser,
    markers: Vec<(u32, Marker)>,
}

impl OutputDecoder {
    /// Starts where the prompt left off. Special tokens other than the markers have no text.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, opens: Opens, syntax: ToolSyntax) -> Self {
        let all = [(THINK, Marker::Think), (END_THINK, Marker::EndThink), (DSML, Marker::Dsml)];
        let markers = all.into_iter().filter_map(|(name, marker)| Some((tokenizer.special(name)?, marker))).collect();
        let detokenizer = Detokenizer::new(tokenizer, MarkerText::Hidden);
        Self { detokenizer, parser: OutputParser::new(opens, syntax), markers }
    }

    /// True while the output is reasoning. Ask before a token is pushed to know where it belongs.
    #[must_use]
    pub fn is_reasoning(&self) -> bool {
        self.parser.is_reasoning()
    }

    /// What this token completes; often nothing.
    pub fn push(&mut self, token: u32) -> Vec<OutputEvent> {
        match self.markers.iter().find(|(id, _)| *id == token) {
            Some((_, marker)) => {
                let rest = self.detokenizer.finish();
                let mut events = self.parser.push_text(&rest);
                join(&mut events, self.parser.push_marker(*marker));
                events
            }
            None => {
                let text = self.detokenizer.push(token);
                self.parser.push_text(&text)
            }
        }
    }

    /// What is left, now that no more tokens come.
    pub fn finish(&mut self) -> Vec<OutputEvent> {
        let rest = self.detokenizer.finish();
        let mut events = self.parser.push_text(&rest);
        join(&mut events, self.parser.finish());
        events
    }
}

/// Appends events; deltas of the same thing become one.
pub(crate) fn join(events: &mut Vec<OutputEvent>, more: Vec<OutputEvent>) {
    for event in more {
        match (events.last_mut(), event) {
            (Some(OutputEvent::ReasoningDelta(said)), OutputEvent::ReasoningDelta(more))
            | (Some(OutputEvent::ContentDelta(said)), OutputEvent::ContentDelta(more))
            | (
                Some(OutputEvent::ToolCallArgumentsDelta { json: said, .. }),
                OutputEvent::ToolCallArgumentsDelta { json: more, .. },
            ) => said.push_str(&more),
            (_, event) => events.push(event),
        }
    }
}

/// An output as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    pub reasoning: String,
    pub content: String,
    pub tool_calls: Vec<OutputCall>,
}

/// A call as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputCall {
    pub name: String,
    /// A JSON object if `is_whole`.
    pub arguments: String,
    pub is_whole: bool,
}

impl Output {
    /// Adds what an event says. All events of an output, in order, give the whole of it.
    pub fn add(&mut self, event: OutputEvent) {
        match event {
            OutputEvent::ReasoningDelta(text) => self.reasoning.push_str(&text),
            OutputEvent::ContentDelta(text) => self.content.push_str(&text),
            OutputEvent::ToolCallStart { name, .. } => {
                self.tool_calls.push(OutputCall { name, arguments: String::new(), is_whole: false });
            }
            OutputEvent::ToolCallArgumentsDelta { index, json } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.arguments.push_str(&json);
                }
            }
            OutputEvent::ToolCallEnd { index, is_whole } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.is_whole = is_whole;
                }
            }
        }
    }
}
