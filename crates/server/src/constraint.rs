//! What a client demands of an answer's form, as the engine enforces it token by token.

use axum::http::StatusCode;
use troika_engine::api::{ConstraintState, TokenConstraint, TokenSet};
use troika_prompt::{Constraint, ConstraintCompiler, ConstraintError, Grammar, NumCalls, Opens, Progress};

use crate::{
    error::ApiError,
    request::{Asked, Prompt, ReplyFormat, ToolChoice},
};

/// The constraint that a request asks for, if it asks for any. `opens` is where its answer begins.
pub(crate) fn constraint(
    compiler: &ConstraintCompiler,
    asked: &Asked,
    opens: Opens,
) -> Result<Option<Box<dyn TokenConstraint>>, ApiError> {
    let Some((grammar, param)) = grammar(asked)? else { return Ok(None) };
    match compiler.compile(&grammar, opens) {
        Ok(constraint) => Ok(Some(Box::new(Enforced(constraint)))),
        Err(ConstraintError::Unsupported { reason }) => {
            let message = format!("`{param}` cannot be enforced: {reason}.");
            Err(ApiError::request(StatusCode::BAD_REQUEST, "unsupported_value", message).about(param))
        }
        Err(error @ ConstraintError::Unavailable { .. }) => {
            Err(ApiError::request(StatusCode::BAD_REQUEST, "unsupported_by_model", error.to_string()).about(param))
        }
        Err(error) => Err(ApiError::server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", error.to_string())),
    }
}

/// What is demanded, and the parameter that demands it.
fn grammar(asked: &Asked) -> Result<Option<(Grammar, &'static str)>, ApiError> {
    let format = match &asked.format {
        ReplyFormat::Text => None,
        ReplyFormat::JsonObject => Some(Grammar::JsonObject),
        ReplyFormat::Schema(schema) => Some(Grammar::JsonSchema(schema.clone())),
        ReplyFormat::Grammar(grammar) => Some(Grammar::Lark(grammar.clone())),
    };
    let calls = match &asked.prompt {
        Prompt::Chat(chat) => calls(&chat.offer.tools, &chat.offer.choice, chat.offer.parallel),
        Prompt::Text(_) | Prompt::Tokens(_) => None,
    };
    match (format, calls) {
        (Some(_), _) if asked.offers_tools() => {
            let message = format!("`{0}` cannot be combined with `tools`: an answer has one form.", asked.format_name);
            Err(ApiError::invalid(asked.format_name, message))
        }
        (Some(grammar), _) => Ok(Some((grammar, asked.format_name))),
        (None, Some(grammar)) => Ok(Some((grammar, "tool_choice"))),
        (None, None) => Ok(None),
    }
}

fn calls(tools: &[serde_json::Value], choice: &ToolChoice, parallel: bool) -> Option<Grammar> {
    let num_calls = if parallel { NumCalls::Many } else { NumCalls::One };
    match choice {
        ToolChoice::Auto => None,
        ToolChoice::Required => Some(Grammar::ToolCalls { tools: tools.to_vec(), num_calls }),
        ToolChoice::Named(name) => {
            let tools = tools.iter().filter(|tool| tool["name"] == **name).cloned().collect();
            Some(Grammar::ToolCalls { tools, num_calls: NumCalls::One })
        }
    }
}

/// A constraint as the engine calls it.
#[derive(Clone)]
struct Enforced(Constraint);

impl TokenConstraint for Enforced {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<(), String> {
        allowed.insert_words(self.0.allowed().map_err(|error| error.to_string())?);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<ConstraintState, String> {
        match self.0.accept(token).map_err(|error| error.to_string())? {
            Progress::Open => Ok(ConstraintState::Open),
            Progress::Complete => Ok(ConstraintState::Complete),
        }
    }

    fn boxed_clone(&self) -> Box<dyn TokenConstraint> {
        Box::new(self.clone())
    }
}
