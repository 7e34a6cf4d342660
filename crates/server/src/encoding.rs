//! From what a client asked to what the engine is given: the prompt's tokens, and how the answer will be read.

use troika_engine::api::GenerateRequest;
use troika_prompt::{
    ChatOptions, ConstraintCompiler, Conversation, MarkerText, OldReasoning, Opens, PromptError, ToolSyntax,
    encode_chat, encode_completion,
};

use crate::{
    ServerState,
    constraint::constraint,
    error::ApiError,
    reader::Reading,
    request::{Asked, Chat, Prompt},
};

/// A request ready for the engine.
pub(crate) struct Encoded {
    pub(crate) request: GenerateRequest,
    pub(crate) reading: Reading,
    /// What the answer begins with, if the client wants its prompt back.
    pub(crate) echo: String,
}

pub(crate) fn encode(
    state: &ServerState,
    constraints: &ConstraintCompiler,
    asked: &Asked,
) -> Result<Encoded, ApiError> {
    let tokenizer = &state.tokenizer;
    // A text that is too long in any case is not worth the memory that encoding it takes.
    let min_tokens = tokenizer.min_tokens(asked.prompt.text_bytes());
    if min_tokens >= state.max_context_tokens {
        return Err(ApiError::prompt_too_long(format!("at least {min_tokens}"), state.max_context_tokens));
    }
    let (prompt, reading) = match &asked.prompt {
        Prompt::Text(text) => (encode_completion(tokenizer, text)?, Reading::Plain),
        Prompt::Tokens(tokens) => (tokens.clone(), Reading::Plain),
        Prompt::Chat(chat) => encode_conversation(state, chat)?,
    };
    let room = state.max_context_tokens.saturating_sub(prompt.len());
    if room == 0 {
        return Err(ApiError::prompt_too_long(prompt.len(), state.max_context_tokens));
    }
    let echo = match (&asked.prompt, asked.echo) {
        (Prompt::Text(text), true) => text.clone(),
        (Prompt::Tokens(tokens), true) => tokenizer.decode(tokens, MarkerText::Hidden),
        _ => String::new(),
    };
    let opens = match reading {
        Reading::Turn(opens, _) => opens,
        Reading::Plain => Opens::Content,
    };
    let max_new_tokens = asked.max_tokens.map_or(room, |max_tokens| max_tokens.min(room));
    let request = GenerateRequest {
        stop_tokens: if asked.ignore_eos { Vec::new() } else { state.stop_tokens.clone() },
        logit_bias: asked.logit_bias.clone(),
        logprobs: asked.logprobs,
        constraint: constraint(constraints, asked, opens)?,
        service: asked.service.clone(),
        ..GenerateRequest::new(prompt, max_new_tokens, asked.sampling)
    };
    Ok(Encoded { request, reading, echo })
}

fn encode_conversation(state: &ServerState, chat: &Chat) -> Result<(Vec<u32>, Reading), ApiError> {
    let options = ChatOptions {
        mode: chat.thinking.mode,
        old_reasoning: OldReasoning::Drop,
        effort: chat.thinking.effort,
        last_assistant: chat.last_assistant,
    };
    let encode = |conversation: &Conversation| encode_chat(&state.tokenizer, &state.texts, conversation, options);
    let prompt = match encode(&chat.conversation) {
        // The form of the reply is enforced in any case; telling the model of it only helps.
        Err(PromptError::MissingText { .. }) if chat.conversation.response_format.is_some() => {
            encode(&Conversation { response_format: None, ..chat.conversation.clone() })
        }
        encoded => encoded,
    }?;
    let syntax = if chat.offer.tools.is_empty() { ToolSyntax::Text } else { ToolSyntax::Calls };
    Ok((prompt.ids, Reading::Turn(prompt.opens, syntax)))
}
