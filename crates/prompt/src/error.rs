//! Why text could not become tokens.

use std::path::PathBuf;

/// Why the tokenizer could not be loaded or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PromptError {
    /// The file is missing or unreadable.
    #[error("cannot read the tokenizer {}: {reason}", path.display())]
    Read { path: PathBuf, reason: std::io::Error },
    /// The file is not a tokenizer that we can use.
    #[error("{file} is not a usable tokenizer: {reason}")]
    Malformed { file: String, reason: String },
    /// The prompt needs a special token that this tokenizer does not have.
    #[error("the tokenizer has no special token `{name}`, which this prompt needs")]
    MissingSpecial { name: String },
    /// The prompt needs a text that this checkpoint does not have.
    #[error("this checkpoint has no {what}: {}: {reason}", file.display())]
    MissingText { what: &'static str, file: PathBuf, reason: String },
    /// The tokenizer gave up on a text.
    #[error("the tokenizer cannot encode this text: {reason}")]
    Encode { reason: String },
}
