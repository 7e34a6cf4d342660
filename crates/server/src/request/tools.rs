//! Tools that a client offers, and what it wants done with them; the form that a reply must have.

use serde_json::{Value, json};

use crate::{error::ApiError, fields::Fields};

/// Most tools of a request.
const MAX_TOOLS: usize = 512;
/// Longest name of a tool.
const MAX_NAME_BYTES: usize = 256;

/// Tools for the model, and whether it must use one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Offer {
    /// Function objects: `name`, `description`, `parameters`. None if the model must not call.
    pub(crate) tools: Vec<Value>,
    pub(crate) choice: ToolChoice,
    /// Whether one answer may make several calls.
    pub(crate) parallel: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// The model decides, if there are tools.
    #[default]
    Auto,
    /// Some call must be made.
    Required,
    /// This tool must be called.
    Named(String),
}

/// What the text of a reply must be.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum ReplyFormat {
    #[default]
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON of this schema.
    Schema(Value),
    /// Text of this grammar.
    Grammar(String),
}

impl ReplyFormat {
    pub(crate) fn schema(&self) -> Option<&Value> {
        match self {
            Self::Schema(schema) => Some(schema),
            _ => None,
        }
    }
}

/// Tools in the form of the prompt, and their names.
type Tools = (Vec<Value>, Vec<String>);

pub(super) fn parse_openai_tools(fields: &mut Fields) -> Result<Tools, ApiError> {
    parse_tools(fields, |mut tool, names| {
        if tool.text("type")?.as_deref() != Some("function") {
            return Err(tool.must_be("type", "`function`; no tools run on the server"));
        }
        let function = tool.object("function")?;
        let mut function = tool.require("function", function)?;
        tool.refuse_unknown()?;
        function_tool(&mut function, "parameters", names)
    })
}

/// The Responses API puts a function's members beside its type.
pub(super) fn parse_flat_tools(fields: &mut Fields) -> Result<Tools, ApiError> {
    parse_tools(fields, |mut tool, names| {
        if tool.text("type")?.as_deref() != Some("function") {
            return Err(tool.must_be("type", "`function`; no tools run on the server"));
        }
        function_tool(&mut tool, "parameters", names)
    })
}

pub(super) fn parse_anthropic_tools(fields: &mut Fields) -> Result<Tools, ApiError> {
    parse_tools(fields, |mut tool, names| {
        if tool.text("type")?.is_some_and(|kind| kind != "custom") {
            return Err(tool.must_be("type", "`custom` or absent; no tools run on the server"));
        }
        // Hints about caching and about when to send what: nothing here differs.
        tool.ignore(&["cache_control", "eager_input_streaming", "defer_loading", "input_examples", "allowed_callers"]);
        function_tool(&mut tool, "input_schema", names)
    })
}

fn parse_tools(
    fields: &mut Fields,
    parse: impl Fn(Fields, &mut Vec<String>) -> Result<Value, ApiError>,
) -> Result<Tools, ApiError> {
    let path = fields.name("tools");
    let tools = fields.list("tools")?.unwrap_or_default();
    if tools.len() > MAX_TOOLS {
        return Err(ApiError::invalid(path.clone(), format!("`{path}` may have at most {MAX_TOOLS} entries.")));
    }
    let mut names = Vec::new();
    let tools = tools.into_iter().enumerate().map(|(idx, tool)| {
        let tool = Fields::of(&format!("{path}[{idx}]"), tool)?;
        parse(tool, &mut names)
    });
    Ok((tools.collect::<Result<_, _>>()?, names))
}

/// The function object as the prompt shows it.
fn function_tool(function: &mut Fields, schema: &str, names: &mut Vec<String>) -> Result<Value, ApiError> {
    let name = function.required_text("name")?;
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_name) {
        let what = format!("1 to {MAX_NAME_BYTES} letters, digits, and `_`, `-`, `.`, `:`, `/`");
        return Err(function.must_be("name", &what));
    }
    if names.contains(&name) {
        return Err(function.must_be("name", "different from the names of the other tools"));
    }
    names.push(name.clone());
    let mut tool = json!({"name": name});
    if let Some(description) = function.text("description")? {
        tool["description"] = description.into();
    }
    tool["parameters"] = match function.take(schema) {
        None => json!({"type": "object", "properties": {}}),
        Some(Value::Object(parameters)) => Value::Object(parameters),
        Some(_) => return Err(function.must_be(schema, "a JSON schema")),
    };
    // Whether the arguments must follow the schema: they are never repaired, so this asks for what happens anyway.
    function.flag("strict")?;
    function.refuse_unknown()?;
    Ok(tool)
}

/// `tool_choice` as both of OpenAI's APIs have it, and `parallel_tool_calls`.
pub(super) fn parse_openai_choice(fields: &mut Fields, tools: Vec<Value>, names: &[String]) -> Result<Offer, ApiError> {
    let parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true);
    let choice = match fields.take("tool_choice") {
        None => "auto".to_owned().into(),
        Some(choice) => choice,
    };
    let what = "`none`, `auto`, `required` or a function";
    match choice {
        Value::String(word) => offer(fields, &word, None, what, tools, names, parallel),
        choice @ Value::Object(_) => {
            let path = fields.name("tool_choice");
            let mut choice = Fields::of(&path, choice)?;
            if choice.text("type")?.as_deref() != Some("function") {
                return Err(choice.must_be("type", "`function`"));
            }
            let name = match choice.object("function")? {
                Some(mut function) => {
                    let name = function.required_text("name")?;
                    function.refuse_unknown()?;
                    name
                }
                None => choice.required_text("name")?,
            };
            choice.refuse_unknown()?;
            offer(fields, "named", Some(name), what, tools, names, parallel)
        }
        _ => Err(fields.must_be("tool_choice", what)),
    }
}

pub(super) fn parse_anthropic_choice(
    fields: &mut Fields,
    tools: Vec<Value>,
    names: &[String],
) -> Result<Offer, ApiError> {
    let what = "of the type `auto`, `any`, `tool` or `none`";
    let Some(mut choice) = fields.object("tool_choice")? else {
        return offer(fields, "auto", None, what, tools, names, true);
    };
    let parallel = !choice.flag("disable_parallel_tool_use")?.unwrap_or(false);
    let name = choice.text("name")?;
    let word = match choice.text("type")?.as_deref() {
        Some("any") => "required",
        Some("tool") => "named",
        Some("auto") => "auto",
        Some("none") => "none",
        _ => return Err(choice.must_be("type", "`auto`, `any`, `tool` or `none`")),
    };
    choice.refuse_unknown()?;
    offer(fields, word, name, what, tools, names, parallel)
}

fn offer(
    fields: &Fields,
    word: &str,
    name: Option<String>,
    what: &str,
    tools: Vec<Value>,
    names: &[String],
    parallel: bool,
) -> Result<Offer, ApiError> {
    let choice = match (word, name) {
        ("none", None) => return Ok(Offer { parallel, ..Offer::default() }),
        ("auto", None) => ToolChoice::Auto,
        ("required", None) => ToolChoice::Required,
        ("named", Some(name)) if names.contains(&name) => ToolChoice::Named(name),
        ("named", _) => return Err(fields.must_be("tool_choice", "one of `tools`")),
        _ => return Err(fields.must_be("tool_choice", what)),
    };
    if choice != ToolChoice::Auto && tools.is_empty() {
        return Err(fields.must_be("tool_choice", "`none` or `auto` when there are no `tools`"));
    }
    Ok(Offer { tools, choice, parallel })
}

/// The form of a reply: `{"type": "text"}`, `json_object`, `json_schema`, or our own `grammar`.
pub(super) fn parse_format(fields: &mut Fields, name: &str) -> Result<ReplyFormat, ApiError> {
    let Some(mut format) = fields.object(name)? else { return Ok(ReplyFormat::Text) };
    let parsed = match format.text("type")?.as_deref() {
        Some("text") => ReplyFormat::Text,
        Some("json_object") => ReplyFormat::JsonObject,
        Some("grammar") => ReplyFormat::Grammar(format.required_text("grammar")?),
        Some("json_schema") => match format.object("json_schema")? {
            Some(mut inner) => {
                let schema = parse_schema(&mut inner)?;
                inner.refuse_unknown()?;
                schema
            }
            // The Responses API and Anthropic's put the schema beside the type.
            None => parse_schema(&mut format)?,
        },
        _ => return Err(format.must_be("type", "`text`, `json_object`, `json_schema` or `grammar`")),
    };
    format.refuse_unknown()?;
    Ok(parsed)
}

fn parse_schema(fields: &mut Fields) -> Result<ReplyFormat, ApiError> {
    // A name and a description are for people. A schema is always followed strictly.
    fields.text("name")?;
    fields.text("description")?;
    fields.flag("strict")?;
    match fields.take("schema") {
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(ReplyFormat::Schema(schema)),
        _ => Err(fields.must_be("schema", "a JSON schema")),
    }
}
