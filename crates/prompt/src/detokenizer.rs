//! Tokens to text as they come, never half a character.

use std::sync::Arc;

use crate::{MarkerText, Tokenizer};

/// Turns one sequence's tokens into text, piece by piece. All pieces joined equal [`Tokenizer::decode`] of all tokens,
/// however the tokens were spread over calls.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    markers: MarkerText,
    /// The start of a character whose other bytes have not come: at most three bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Starts at an empty text.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, markers: MarkerText) -> Self {
        Self { tokenizer, markers, pending: Vec::new() }
    }

    /// Text that this token completes; may be empty. A byte that can no longer become part of a character is U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        self.pending.extend_from_slice(self.tokenizer.visible_bytes(id, self.markers));
        let (text, rest_len) = decode_complete(&self.pending);
        self.pending.drain(..self.pending.len() - rest_len);
        text
    }

    /// What an unfinished character amounts to, now that no more tokens come: one U+FFFD, or nothing.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Text of `bytes` up to an unfinished character at their end, and the length of that.
fn decode_complete(bytes: &[u8]) -> (String, usize) {
    let mut text = String::new();
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return (text, 0);
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                let Some(invalid_len) = error.error_len() else { return (text, after.len()) };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = &after[invalid_len..];
            }
        }
    }
}
