//! What an answer must look like, token by token: JSON schemas, grammars, regular expressions, tool calls.
//!
//! A thin layer over llguidance. It knows tokens and bytes and nothing of the engine: whoever has both adapts a
//! [`Constraint`] to the engine's trait. Building the table of tokens takes a moment, so it is done once, at the first use.

mod tool_calls;

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use llguidance::{
    Matcher, ParserFactory,
    api::{ParserLimits, StopReason, TopLevelGrammar},
    toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};
use serde_json::{Value, json};

use crate::{
    Opens, Tokenizer,
    chat::{DSML, END_THINK},
};

pub use tool_calls::NumCalls;

/// Longest grammar, and longest JSON schema as text.
const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Deepest brackets of a grammar: its parser calls itself for each.
const MAX_DEPTH: usize = 64;
/// Longest white space between parts of a JSON text, so that a model cannot go on with it for ever.
const JSON_SPACE: &str = r"[ \n\r\t]{0,64}";

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// JSON of this schema.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A text that matches this regular expression as a whole.
    Regex(String),
    /// A text of this grammar, in llguidance's variant of Lark.
    Lark(String),
    /// One or more calls of tools, and nothing else. As in [`Conversation::tools`](crate::Conversation::tools), each is the
    /// `function` object; its `parameters` say what the arguments are. Parameters come in the order of `properties`, those
    /// that are not listed never; of strings only `enum` and `const` are enforced.
    ToolCalls { tools: Vec<Value>, num_calls: NumCalls },
}

/// Why there is no constraint, or why it cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConstraintError {
    /// The client's grammar cannot be used.
    #[error("{reason}")]
    Unsupported { reason: String },
    /// This model's tokens cannot be constrained.
    #[error("answers of this model cannot be constrained: {reason}")]
    Unavailable { reason: String },
    /// The constraint met what it cannot deal with.
    #[error("the constraint gave up: {reason}")]
    Failed { reason: String },
}

/// Makes constraints for one model.
pub struct ConstraintCompiler {
    tokenizer: Arc<Tokenizer>,
    stop_tokens: Vec<u32>,
    factory: OnceLock<Result<ParserFactory, ConstraintError>>,
}

impl fmt::Debug for ConstraintCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConstraintCompiler").field("is_ready", &self.factory.get().is_some()).finish_non_exhaustive()
    }
}

impl ConstraintCompiler {
    /// Nothing is built yet. `stop_tokens` are those that end an answer.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, stop_tokens: Vec<u32>) -> Self {
        Self { tokenizer, stop_tokens, factory: OnceLock::new() }
    }

    /// The constraint of one answer. If that opens with reasoning, it is free until `</think>`.
    ///
    /// Takes from a millisecond to a second for large grammars, and longer the first time: not for a thread that serves
    /// sockets.
    ///
    /// # Errors
    ///
    /// If the grammar cannot be used; the text says why.
    pub fn compile(&self, grammar: &Grammar, opens: Opens) -> Result<Constraint, ConstraintError> {
        let top = self.top_level(grammar)?;
        let factory = self.factory.get_or_init(|| self.build()).as_ref().map_err(Clone::clone)?;
        let mut matcher = Matcher::new(factory.create_parser(top));
        if let Some(reason) = matcher.get_error() {
            return Err(unsupported(reason));
        }
        if let Some(warning) = matcher.grammar_warnings().into_iter().next() {
            return Err(unsupported(warning));
        }
        let mask = match opens {
            Opens::Content => Vec::new(),
            Opens::Reasoning => self.all_but_stops(),
        };
        let free_until = match opens {
            Opens::Content => None,
            Opens::Reasoning => Some(self.special(END_THINK)?),
        };
        Ok(Constraint { matcher, free_until, mask })
    }

    fn top_level(&self, grammar: &Grammar) -> Result<TopLevelGrammar, ConstraintError> {
        match grammar {
            Grammar::JsonSchema(schema) => json_grammar(schema.clone()),
            Grammar::JsonObject => json_grammar(json!({"type": "object"})),
            Grammar::Regex(regex) => {
                check_size("regular expression", regex).map(|()| TopLevelGrammar::from_regex(regex))
            }
            Grammar::Lark(lark) => check_size("grammar", lark).map(|()| TopLevelGrammar::from_lark(lark.clone())),
            Grammar::ToolCalls { tools, num_calls } => {
                let lark = tool_calls::grammar(tools, *num_calls, self.special(DSML)?)?;
                if lark.len() > MAX_GRAMMAR_BYTES {
                    return Err(unsupported(format!("the tools are longer than {MAX_GRAMMAR_BYTES} bytes")));
                }
                Ok(TopLevelGrammar::from_lark(lark))
            }
        }
    }

    fn special(&self, name: &str) -> Result<u32, ConstraintError> {
        let id = self.tokenizer.special(name);
        id.ok_or_else(|| ConstraintError::Unavailable { reason: format!("there is no special token `{name}`") })
    }

    fn build(&self) -> Result<ParserFactory, ConstraintError> {
        let unavailable = |reason: String| ConstraintError::Unavailable { reason };
        let vocab_size = u32::try_from(self.tokenizer.vocab_size()).map_err(|e| unavailable(e.to_string()))?;
        let stops: Vec<u32> = self.stop_tokens.iter().copied().filter(|token| *token < vocab_size).collect();
        let Some(first) = stops.first() else {
            return Err(unavailable("no token ends an answer".to_owned()));
        };
        let words: Vec<Vec<u8>> = (0..vocab_size).map(|id| self.word(id)).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, *first), &words).with_eos_tokens(&stops);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let capabilities = InferenceCapabilities::default();
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, capabilities, &slices);
        let mut factory = factory.map_err(|error| unavailable(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits { verbose_errors: false, ..ParserLimits::default() };
        Ok(factory)
    }

    /// A token as llguidance wants it: special ones are marked by a byte that no text has.
    fn word(&self, id: u32) -> Vec<u8> {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        if self.tokenizer.is_added(id) { [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat() } else { bytes.to_vec() }
    }

    fn all_but_stops(&self) -> Vec<u32> {
        let vocab_size = self.tokenizer.vocab_size();
        let mut words = vec![0u32; vocab_size.div_ceil(32)];
        for id in (0..vocab_size as u32).filter(|id| self.tokenizer.token_bytes(*id).is_some()) {
            if !self.stop_tokens.contains(&id) {
                words[id as usize / 32] |= 1 << (id % 32);
            }
        }
        words
    }
}

fn unsupported(reason: impl Into<String>) -> ConstraintError {
    ConstraintError::Unsupported { reason: reason.into() }
}

fn json_grammar(mut schema: Value) -> Result<TopLevelGrammar, ConstraintError> {
    let len = schema.to_string().len();
    if len > MAX_GRAMMAR_BYTES {
        return Err(unsupported(format!("the schema has {len} bytes, at most {MAX_GRAMMAR_BYTES} are possible")));
    }
    if let Value::Object(fields) = &mut schema {
        fields.insert("x-guidance".to_owned(), json!({"whitespace_pattern": JSON_SPACE}));
    } else if !schema.is_boolean() {
        return Err(unsupported("the schema is not a JSON object"));
    }
    Ok(TopLevelGrammar::from_json_schema(schema))
}

fn check_size(what: &str, text: &str) -> Result<(), ConstraintError> {
    if text.trim().is_empty() {
        return Err(unsupported(format!("the {what} is empty")));
    }
    if text.len() > MAX_GRAMMAR_BYTES {
        return Err(unsupported(format!(
            "the {what} has {} bytes, at most {MAX_GRAMMAR_BYTES} are possible",
            text.len()
        )));
    }
    let mut depth = 0usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(unsupported(format!("the {what} has brackets more than {MAX_DEPTH} deep")));
        }
    }
    Ok(())
}

/// The constraint of one answer, and how far that has come.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    /// Everything goes until this token.
    free_until: Option<u32>,
    mask: Vec<u32>,
}

/// What may follow a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More may follow.
    Open,
    /// The answer is complete and nothing can follow.
    Complete,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("free_until", &self.free_until).finish_non_exhaustive()
    }
}

impl Constraint {
    /// The tokens that may come next, a bit for each: bit `i` of word `w` is token `32 * w + i`. Stop tokens are among them
    /// exactly if the answer may end here.
    ///
    /// # Errors
    ///
    /// If there is no telling, for the grammar is too ambiguous.
    pub fn allowed(&mut self) -> Result<&[u32], ConstraintError> {
        if self.free_until.is_none() {
            let mask = self.matcher.compute_mask_or_eos().map_err(failed)?;
            self.mask.clear();
            self.mask.extend_from_slice(mask.as_slice());
        }
        Ok(&self.mask)
    }

    /// Takes the token that came, which is not a stop token.
    ///
    /// # Errors
    ///
    /// If it was not allowed.
    pub fn accept(&mut self, token: u32) -> Result<Progress, ConstraintError> {
        if let Some(end) = self.free_until {
            if token == end {
                self.free_until = None;
            }
            return Ok(Progress::Open);
        }
        self.matcher.consume_token(token).map_err(failed)?;
        match self.matcher.stop_reason() {
            StopReason::NotStopped => Ok(Progress::Open),
            reason if reason.is_ok() => Ok(Progress::Complete),
            reason => Err(failed(format!("{reason:?}"))),
        }
    }
}

fn failed(error: impl fmt::Display) -> ConstraintError {
    ConstraintError::Failed { reason: error.to_string() }
}
