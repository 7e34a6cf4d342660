//! Text to token ids and back: the tokenizer, DeepSeek-V4's prompt encoding, the incremental detokenizer, the parser of what
//! the model says, stop strings.
//!
//! Knows nothing of requests, HTTP or the engine. Start with [`Tokenizer`], then [`encode_chat`] on the way in and
//! [`OutputDecoder`] and [`StopMatcher`] on the way out.

mod chat;
mod constraint;
mod detokenizer;
mod error;
mod json;
mod output;
mod python;
mod stop;
mod texts;
mod tokenizer;

pub use chat::{
    ChatOptions, Conversation, LastAssistant, Message, OldReasoning, Opens, Prompt, ThinkingMode, ToolCall, UserBlock,
    encode_chat, encode_completion,
};
pub use constraint::{Constraint, ConstraintCompiler, ConstraintError, Grammar, NumCalls, Progress};
pub use detokenizer::Detokenizer;
pub use error::PromptError;
pub use output::{Marker, Output, OutputCall, OutputDecoder, OutputEvent, OutputParser, ToolSyntax};
pub use stop::{Checked, StopMatcher};
pub use texts::{Effort, FixedTexts};
pub use tokenizer::{MarkerText, Tokenizer};
