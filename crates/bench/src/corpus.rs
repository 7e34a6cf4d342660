//! Texts that prompts are cut from, counted with the model's own tokens. Nothing is repeated to make a prompt longer.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use troika_prompt::Tokenizer;

use crate::BenchError;

const CODE_PYTHON: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano/held-out.txt"));
const PROSE_EN: &str = include_str!("../corpora/prose_en.txt");
const CHAT_MULTI: &str = include_str!("../corpora/chat_multi.txt");

/// Random ids there are; enough for any prompt that a CPU finishes.
const RANDOM_TOKENS: usize = 1 << 20;
/// Prompts that must not share a prefix start this many tokens apart.
const STRIDE: usize = 61;

/// What prompts are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Corpus {
    /// Python's standard library, modules that nano has not seen.
    CodePython,
    /// English prose about programming.
    ProseEn,
    /// A conversation of many turns.
    ChatMulti,
    /// Random token ids, for models without a tokenizer of their own.
    Random,
}

impl Corpus {
    pub const ALL: [Self; 4] = [Self::CodePython, Self::ProseEn, Self::ChatMulti, Self::Random];

    pub fn name(self) -> &'static str {
        match self {
            Self::CodePython => "code_python",
            Self::ProseEn => "prose_en",
            Self::ChatMulti => "chat_multi",
            Self::Random => "random",
        }
    }
}

impl std::str::FromStr for Corpus {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|corpus| corpus.name() == name).ok_or(format!("`{name}` is not one of {names}"))
    }
}

/// All tokens of a corpus.
#[derive(Clone, Debug)]
pub struct Tokens {
    pub corpus: Corpus,
    ids: Vec<u32>,
}

impl Tokens {
    /// Reads the whole corpus with `tokenizer`.
    ///
    /// # Errors
    ///
    /// If the tokenizer gives up.
    pub fn read(corpus: Corpus, tokenizer: &Tokenizer) -> Result<Self, BenchError> {
        let ids = match corpus {
            Corpus::CodePython => tokenizer.encode(CODE_PYTHON)?,
            Corpus::ProseEn => tokenizer.encode(PROSE_EN)?,
            Corpus::ChatMulti => conversation(tokenizer)?,
            Corpus::Random => {
                let mut random = ChaCha8Rng::seed_from_u64(20_260_801);
                let vocab = tokenizer.vocab_size().max(1) as u64;
                (0..RANDOM_TOKENS).map(|_| (random.next_u64() % vocab) as u32).collect()
            }
        };
        Ok(Self { corpus, ids })
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Prompt number `idx` of `len` tokens. Prompts of different numbers begin differently, so that none is a prefix of
    /// another, but they overlap.
    ///
    /// # Errors
    ///
    /// If the corpus is too short; the error says how much there is.
    pub fn prompt(&self, idx: usize, len: usize) -> Result<&[u32], BenchError> {
        let start = idx * STRIDE;
        self.ids.get(start..start + len).ok_or_else(|| BenchError::CorpusTooShort {
            corpus: self.corpus.name(),
            wanted: len,
            available: self.ids.len().saturating_sub(start),
        })
    }
}

/// The conversation with the model's own markers, or with words where it has none.
fn conversation(tokenizer: &Tokenizer) -> Result<Vec<u32>, BenchError> {
    let marker = |special: &str, words: &str| match tokenizer.special(special) {
        Some(id) => Ok(vec![id]),
        None => tokenizer.encode(words),
    };
    let user = marker("<｜User｜>", "\n\nUser: ")?;
    let assistant = marker("<｜Assistant｜>", "\n\nAssistant: ")?;
    let mut ids = Vec::new();
    for turn in CHAT_MULTI.split('\u{1}').filter(|turn| !turn.is_empty()) {
        let (question, answer) = turn.split_once('\u{2}').unwrap_or((turn, ""));
        ids.extend_from_slice(&user);
        ids.extend(tokenizer.encode(question)?);
        ids.extend_from_slice(&assistant);
        ids.extend(tokenizer.encode(answer)?);
    }
    Ok(ids)
}

/// SHA-256 of token ids as little-endian 32-bit numbers, in hexadecimal.
pub fn ids_digest<'a>(prompts: impl IntoIterator<Item = &'a [u32]>) -> String {
    let mut hasher = Sha256::new();
    for id in prompts.into_iter().flatten() {
        hasher.update(id.to_le_bytes());
    }
    hex(&hasher.finalize())
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        let bytes = include_bytes!("../../../models/nano/tokenizer.json");
        Tokenizer::from_bytes("tokenizer.json of nano", bytes).expect("nano has one")
    }

    #[test]
    fn every_corpus_is_long_enough_for_16k_and_says_so_when_it_is_not() {
        let tokenizer = tokenizer();
        for corpus in Corpus::ALL {
            let tokens = Tokens::read(corpus, &tokenizer).expect("readable");
            assert_eq!(tokens.prompt(20, 16_385).expect("enough").len(), 16_385, "{}", corpus.name());
            let available = tokens.len();
            let error = tokens.prompt(0, available + 1).expect_err("too long").to_string();
            assert!(error.contains(corpus.name()) && error.contains(&available.to_string()), "{error}");
        }
    }

    #[test]
    fn prompts_share_no_prefix() {
        let tokens = Tokens::read(Corpus::ChatMulti, &tokenizer()).expect("readable");
        let prompts: Vec<&[u32]> = (0..20).map(|idx| tokens.prompt(idx, 128).expect("enough")).collect();
        for (idx, prompt) in prompts.iter().enumerate() {
            assert!(prompts[..idx].iter().all(|other| other[..16] != prompt[..16]), "prompt {idx}");
        }
    }

    #[test]
    fn a_conversation_has_the_markers_of_the_model() {
        let tokenizer = tokenizer();
        let tokens = Tokens::read(Corpus::ChatMulti, &tokenizer).expect("readable");
        let user = tokenizer.special("<｜User｜>").expect("nano has it");
        assert_eq!(tokens.ids[0], user);
        assert!(tokens.ids.iter().filter(|id| **id == user).count() > 50);
    }

    #[test]
    fn digests_know_every_id() {
        let digest = ids_digest([&[1, 2, 3][..]]);
        assert_eq!(digest.len(), 64);
        assert_eq!(digest, ids_digest([&[1, 2][..], &[3][..]]));
        assert_ne!(digest, ids_digest([&[1, 2, 4][..]]));
    }
}
