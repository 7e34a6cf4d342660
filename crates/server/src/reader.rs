//! How the model's output is read: as one text, or as reasoning, content and tool calls.

use std::sync::Arc;

use troika_prompt::{Detokenizer, MarkerText, Opens, OutputDecoder, OutputEvent, Tokenizer, ToolSyntax};

/// What an output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Text that goes on.
    Plain,
    /// The model's turn of a conversation.
    Turn(Opens, ToolSyntax),
}

/// Reads one output, token by token. Special tokens have no text.
pub(crate) enum Reader {
    Plain(Detokenizer),
    Turn(Box<OutputDecoder>),
}

impl Reader {
    pub(crate) fn new(reading: Reading, tokenizer: &Arc<Tokenizer>) -> Self {
        let tokenizer = Arc::clone(tokenizer);
        match reading {
            Reading::Plain => Self::Plain(Detokenizer::new(tokenizer, MarkerText::Hidden)),
            Reading::Turn(opens, syntax) => Self::Turn(Box::new(OutputDecoder::new(tokenizer, opens, syntax))),
        }
    }

    /// Whether the next token belongs to the reasoning.
    pub(crate) fn is_reasoning(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Turn(decoder) => decoder.is_reasoning(),
        }
    }

    pub(crate) fn push(&mut self, token: u32) -> Vec<OutputEvent> {
        match self {
            Self::Plain(detokenizer) => content(detokenizer.push(token)),
            Self::Turn(decoder) => decoder.push(token),
        }
    }

    pub(crate) fn finish(&mut self) -> Vec<OutputEvent> {
        match self {
            Self::Plain(detokenizer) => content(detokenizer.finish()),
            Self::Turn(decoder) => decoder.finish(),
        }
    }
}

fn content(text: String) -> Vec<OutputEvent> {
    if text.is_empty() { Vec::new() } else { vec![OutputEvent::ContentDelta(text)] }
}
