//! `tokenizer.json` as a two-way table between text and token ids.
//!
//! The tokenizers library matches a checkpoint's added tokens (`<｜User｜>`, `</think>`, ...) literally in any text, before
//! anything else. Text that comes from a client must never turn into them, and a library switch that covers only those
//! flagged `special` is not enough, since checkpoints leave the flag off. So we take all added tokens out of the file
//! before the library sees it, and hand out their ids by name: see [`Tokenizer::special`].

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde_json::{Map, Value};

use crate::PromptError;

/// Ids above this are a damaged file, not a vocabulary.
const MAX_TOKEN_ID: u64 = 1 << 21;

/// What text the markers of a conversation have in decoded output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkerText {
    /// None, for tokens that the checkpoint flags `special`; other added tokens show.
    Hidden,
    /// Their own spelling.
    Shown,
}

#[derive(Debug)]
struct Token {
    bytes: Box<[u8]>,
    is_special: bool,
    is_added: bool,
}

/// A byte-level BPE tokenizer.
pub struct Tokenizer {
    /// Without the added tokens.
    text_only: tokenizers::Tokenizer,
    /// Indexed by id; ids that the file leaves out are `None`.
    tokens: Vec<Option<Token>>,
    added: BTreeMap<String, u32>,
    max_token_bytes: usize,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).field("added", &self.added.len()).finish()
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is not a byte-level BPE tokenizer.
    pub fn from_file(path: &Path) -> Result<Self, PromptError> {
        let bytes = std::fs::read(path).map_err(|reason| PromptError::Read { path: path.to_owned(), reason })?;
        Self::from_bytes(&path.display().to_string(), &bytes)
    }

    /// Parses the content of a `tokenizer.json`; `file` is its name in errors.
    ///
    /// # Errors
    ///
    /// If it is not a byte-level BPE tokenizer.
    pub fn from_bytes(file: &str, bytes: &[u8]) -> Result<Self, PromptError> {
        Self::parse(bytes).map_err(|reason| PromptError::Malformed { file: file.to_owned(), reason })
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut root: Map<String, Value> = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if !["pre_tokenizer", "decoder"].iter().any(|part| root.get(*part).is_some_and(mentions_byte_level)) {
            return Err("neither `pre_tokenizer` nor `decoder` is ByteLevel; only byte-level BPE is supported".into());
        }
        let added_tokens = parse_added_tokens(root.remove("added_tokens"))?;
        let model = root.get_mut("model").and_then(Value::as_object_mut).ok_or("`model` is missing")?;
        let vocab = parse_vocab(model)?;

        let byte_of = byte_alphabet();
        let mut tokens = Vec::new();
        for (text, id) in &vocab {
            let bytes = token_text_bytes(&byte_of, text);
            put(&mut tokens, *id, Token { bytes, is_special: false, is_added: false })?;
        }
        for added in &added_tokens {
            let bytes = added.content.as_bytes().into();
            put(&mut tokens, added.id, Token { bytes, is_special: added.is_special, is_added: true })?;
        }
        for (letter, byte) in &byte_of {
            // Without all 256 of them some text would be dropped in silence.
            if !vocab.contains_key(letter.encode_utf8(&mut [0; 4]) as &str) {
                return Err(format!("`model.vocab` has no token for the byte {byte:#04x} ({letter:?})"));
            }
        }

        let names: BTreeSet<&str> = added_tokens.iter().map(|added| added.content.as_str()).collect();
        remove_from_model(model, &names);
        for part in ["post_processor", "truncation", "padding"] {
            root.insert(part.into(), Value::Null);
        }
        let stripped = serde_json::to_vec(&root).map_err(|e| e.to_string())?;
        let text_only = tokenizers::Tokenizer::from_bytes(stripped).map_err(|e| e.to_string())?;
        let added = added_tokens.into_iter().map(|added| (added.content, added.id)).collect();
        let max_token_bytes = tokens.iter().flatten().map(|token| token.bytes.len()).max().unwrap_or(1);
        Ok(Self { text_only, tokens, added, max_token_bytes })
    }

    /// Token ids of a text. Whatever the text says, none of them is a special or other added token.
    ///
    /// # Errors
    ///
    /// If the tokenizer gives up.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let encoding = self
            .text_only
            .encode_fast(text, false)
            .map_err(|source| PromptError::Encode { reason: source.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Fewest tokens that a text of so many bytes can have, known without encoding it.
    #[must_use]
    pub fn min_tokens(&self, text_bytes: usize) -> usize {
        text_bytes.div_ceil(self.max_token_bytes)
    }

    /// Id of an added token such as `<｜User｜>`.
    #[must_use]
    pub fn special(&self, name: &str) -> Option<u32> {
        self.added.get(name).copied()
    }

    /// Id of an added token that the caller cannot do without.
    ///
    /// # Errors
    ///
    /// If there is none of that name.
    pub fn require_special(&self, name: &str) -> Result<u32, PromptError> {
        self.special(name).ok_or_else(|| PromptError::MissingSpecial { name: name.to_owned() })
    }

    /// Bytes that a token stands for, which need not be whole UTF-8 characters. `None` for ids without a token.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.token(id).map(|token| &*token.bytes)
    }

    /// True for special and other added tokens, which no text is encoded to.
    pub(crate) fn is_added(&self, id: u32) -> bool {
        self.token(id).is_some_and(|token| token.is_added)
    }

    /// Bytes that a token adds to decoded text: none for ids without a token, nor for hidden markers.
    pub(crate) fn visible_bytes(&self, id: u32, markers: MarkerText) -> &[u8] {
        match self.token(id) {
            Some(token) if !token.is_special || markers == MarkerText::Shown => &token.bytes,
            _ => &[],
        }
    }

    /// Text of a sequence of tokens. Bytes that are not UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32], markers: MarkerText) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.visible_bytes(*id, markers)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// One more than the highest token id. A model's embedding may have more rows than that.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    fn token(&self, id: u32) -> Option<&Token> {
        self.tokens.get(usize::try_from(id).ok()?)?.as_ref()
    }
}

struct AddedToken {
    id: u32,
    content: String,
    is_special: bool,
}

fn mentions_byte_level(part: &Value) -> bool {
    let steps = ["pretokenizers", "decoders"].iter().filter_map(|key| part.get(*key)?.as_array()).flatten();
    steps.chain([part]).any(|step| step.get("type").and_then(Value::as_str) == Some("ByteLevel"))
}

fn parse_added_tokens(value: Option<Value>) -> Result<Vec<AddedToken>, String> {
    let entries = match value {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(entries)) => entries,
        Some(_) => return Err("`added_tokens` is not an array".into()),
    };
    let parse = |(index, entry): (usize, &Value)| {
        let id = parse_id(entry.get("id")).ok_or_else(|| format!("`added_tokens[{index}].id` is not a token id"))?;
        let content = entry.get("content").and_then(Value::as_str).filter(|content| !content.is_empty());
        let content = content.ok_or_else(|| format!("`added_tokens[{index}].content` is not a text"))?.to_owned();
        let is_special = entry.get("special").and_then(Value::as_bool).unwrap_or(false);
        Ok(AddedToken { id, content, is_special })
    };
    entries.iter().enumerate().map(parse).collect()
}

fn parse_vocab(model: &Map<String, Value>) -> Result<BTreeMap<String, u32>, String> {
    if model.get("type").is_some_and(|kind| kind != "BPE") {
        return Err("`model.type` is not BPE".into());
    }
    let vocab = model.get("vocab").and_then(Value::as_object).ok_or("`model.vocab` is not an object")?;
    let parse = |(text, id): (&String, &Value)| {
        let id = parse_id(Some(id)).ok_or_else(|| format!("`model.vocab` gives {text:?} the impossible id {id}"))?;
        Ok((text.clone(), id))
    };
    vocab.iter().map(parse).collect()
}

fn parse_id(value: Option<&Value>) -> Option<u32> {
    value?.as_u64().filter(|id| *id <= MAX_TOKEN_ID).and_then(|id| u32::try_from(id).ok())
}

fn put(tokens: &mut Vec<Option<Token>>, id: u32, token: Token) -> Result<(), String> {
    let index = usize::try_from(id).map_err(|e| e.to_string())?;
    if tokens.len() <= index {
        tokens.resize_with(index + 1, || None);
    }
    // An added token is usually in the vocabulary too, with the same id and, then, the added spelling.
    tokens[index] = Some(token);
    Ok(())
}

/// Takes `names` out of vocabulary and merges, so that no setting of the model (`ignore_merges`) can produce them.
fn remove_from_model(model: &mut Map<String, Value>, names: &BTreeSet<&str>) {
    if let Some(vocab) = model.get_mut("vocab").and_then(Value::as_object_mut) {
        vocab.retain(|text, _| !names.contains(text.as_str()));
    }
    if let Some(merges) = model.get_mut("merges").and_then(Value::as_array_mut) {
        merges.retain(|merge| {
            let pair = match merge {
                Value::String(pair) => pair.split_once(' '),
                _ => merge.get(0).and_then(Value::as_str).zip(merge.get(1).and_then(Value::as_str)),
            };
            // A malformed merge stays, for the library to complain about.
            pair.is_none_or(|(left, right)| {
                !names.contains(left) && !names.contains(right) && !names.contains(format!("{left}{right}").as_str())
            })
        });
    }
}

/// The letter that stands for each byte in a byte-level vocabulary: printable bytes stand for themselves, the others
/// take letters from U+0100 on, in order.
fn byte_alphabet() -> BTreeMap<char, u8> {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=255u8).filter(|byte| !is_printable(*byte)).zip('\u{100}'..).map(|(byte, letter)| (letter, byte));
    (0..=255u8).filter(|byte| is_printable(*byte)).map(|byte| (char::from(byte), byte)).chain(others).collect()
}

/// A token's bytes; a spelling outside the byte alphabet stands for itself.
fn token_text_bytes(byte_of: &BTreeMap<char, u8>, text: &str) -> Box<[u8]> {
    let bytes: Option<Box<[u8]>> = text.chars().map(|letter| byte_of.get(&letter).copied()).collect();
    bytes.unwrap_or_else(|| text.as_bytes().into())
}
