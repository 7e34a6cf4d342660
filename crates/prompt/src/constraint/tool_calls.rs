//! A grammar for tool calls in the format of section 13.2 of the model spec.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::{ConstraintError, unsupported};

/// How many tools an answer may call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumCalls {
    One,
    Many,
}

/// References followed in a row before a schema is taken as any.
const MAX_REFERENCES: usize = 16;

/// The grammar of an answer that calls tools, in Lark. `dsml` is the id of the marker `｜DSML｜`.
pub(super) fn grammar(tools: &[Value], num_calls: NumCalls, dsml: u32) -> Result<String, ConstraintError> {
    if tools.is_empty() {
        return Err(unsupported("there is no tool to call"));
    }
    let calls = match num_calls {
        NumCalls::One => "call",
        NumCalls::Many => "call+",
    };
    let choices: Vec<String> = (0..tools.len()).map(|idx| format!("call_{idx}")).collect();
    // `d` is a rule and not a terminal, since special tokens cannot stand in terminals. A marker is no text, so the last
    // `</` of TEXT is that of the closing tag.
    let mut lark = format!(
        "start: \"\\n\\n<\" d \"tool_calls>\\n\" {calls} \"</\" d \"tool_calls>\"\n\
         call: {}\n\
         d: <[{dsml}]>\n\
         TEXT: /(?s:.*)<\\//\n\
         KEY: /[^\"<>\\\\\\x00-\\x1f]{{1,64}}/\n\
         any: %json {}\n",
        choices.join(" | "),
        with_options(json!({})),
    );
    for (idx, tool) in tools.iter().enumerate() {
        let Some(name) = tool.get("name").and_then(Value::as_str) else {
            return Err(unsupported(format!("tool {idx} has no name")));
        };
        let empty = json!({});
        let parameters = tool.get("parameters").filter(|value| !value.is_null()).unwrap_or(&empty);
        let header = quote(&format!("invoke name=\"{name}\">\n"));
        let _ = writeln!(lark, "call_{idx}: \"<\" d {header} args_{idx} \"</\" d \"invoke>\\n\"");
        arguments(&mut lark, idx, parameters);
    }
    Ok(lark)
}

/// Rule `args_IDX`: the parameters of one tool.
fn arguments(lark: &mut String, idx: usize, parameters: &Value) {
    let schema = resolve(parameters, parameters);
    let Some(properties) = schema.get("properties").and_then(Value::as_object).filter(|p| !p.is_empty()) else {
        let nothing_else = schema.get("additionalProperties") == Some(&Value::Bool(false));
        let body = if nothing_else { "" } else { "any_parameter*" };
        let _ = writeln!(lark, "args_{idx}: {body} \"\\n\"?");
        if !nothing_else && !lark.contains("\nany_parameter:") {
            lark.push_str(
                "any_parameter: \"<\" d \"parameter name=\\\"\" KEY any_value d \"parameter>\\n\"\n\
                 any_value: \"\\\" string=\\\"true\\\">\" TEXT | \"\\\" string=\\\"false\\\">\" any \"</\"\n",
            );
        }
        return;
    };
    let required: Vec<&str> =
        schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let mut body = String::new();
    for (at, (key, property)) in properties.iter().enumerate() {
        let suffix = if required.contains(&key.as_str()) { "" } else { "?" };
        let _ = write!(body, " p_{idx}_{at}{suffix}");
        parameter(lark, &format!("p_{idx}_{at}"), key, property, parameters);
    }
    let _ = writeln!(lark, "args_{idx}:{body} \"\\n\"?");
}

fn parameter(lark: &mut String, rule: &str, key: &str, property: &Value, root: &Value) {
    let Kinds { strings, others } = kinds(property, root, 0);
    let mut values = Vec::new();
    match &strings {
        Strings::None => {}
        Strings::Any => values.push("\"\\\" string=\\\"true\\\">\" TEXT".to_owned()),
        Strings::These(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| quote(&format!("\" string=\"true\">{text}</"))).collect();
            values.extend(texts);
        }
    }
    if others || values.is_empty() {
        let _ = writeln!(lark, "{rule}_json: %json {}", with_options(with_definitions(property, root)));
        values.push(format!("\"\\\" string=\\\"false\\\">\" {rule}_json \"</\""));
    }
    let start = quote(&format!("parameter name=\"{key}"));
    let _ = writeln!(lark, "{rule}: \"<\" d {start} {rule}_value d \"parameter>\\n\"");
    let _ = writeln!(lark, "{rule}_value: {}", values.join(" | "));
}

/// Which values a schema allows.
struct Kinds {
    strings: Strings,
    others: bool,
}

enum Strings {
    None,
    Any,
    These(Vec<String>),
}

fn kinds(schema: &Value, root: &Value, depth: usize) -> Kinds {
    let any = Kinds { strings: Strings::Any, others: true };
    let schema = resolve(schema, root);
    let Some(fields) = schema.as_object().filter(|_| depth < MAX_REFERENCES) else { return any };
    let listed = match (fields.get("const"), fields.get("enum").and_then(Value::as_array)) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(values)) => Some(values.iter().collect()),
        (None, None) => None,
    };
    if let Some(values) = listed {
        let texts: Vec<String> = values.iter().filter_map(|value| value.as_str().map(str::to_owned)).collect();
        let others = texts.len() < values.len();
        return Kinds { strings: if texts.is_empty() { Strings::None } else { Strings::These(texts) }, others };
    }
    let choices = fields.get("anyOf").or_else(|| fields.get("oneOf")).and_then(Value::as_array);
    if let Some(choices) = choices.filter(|choices| !choices.is_empty() && choices.len() <= 64) {
        return choices.iter().map(|choice| kinds(choice, root, depth + 1)).reduce(either).unwrap_or(any);
    }
    let is_string = |kind: &Value| kind == "string";
    match fields.get("type") {
        Some(kind) if is_string(kind) => Kinds { strings: Strings::Any, others: false },
        Some(Value::Array(types)) => {
            let strings = if types.iter().any(is_string) { Strings::Any } else { Strings::None };
            Kinds { strings, others: types.iter().any(|kind| !is_string(kind)) }
        }
        Some(_) => Kinds { strings: Strings::None, others: true },
        None => any,
    }
}

fn either(one: Kinds, other: Kinds) -> Kinds {
    let strings = match (one.strings, other.strings) {
        (Strings::Any, _) | (_, Strings::Any) => Strings::Any,
        (Strings::None, strings) | (strings, Strings::None) => strings,
        (Strings::These(mut texts), Strings::These(more)) => {
            texts.extend(more);
            Strings::These(texts)
        }
    };
    Kinds { strings, others: one.others || other.others }
}

/// What a chain of references within the schema leads to.
fn resolve<'a>(mut schema: &'a Value, root: &'a Value) -> &'a Value {
    for _ in 0..MAX_REFERENCES {
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|reference| reference.strip_prefix('#'));
        match target.and_then(|pointer| root.pointer(pointer)) {
            Some(found) => schema = found,
            None => break,
        }
    }
    schema
}

/// A part of a schema that still finds what it refers to.
fn with_definitions(part: &Value, root: &Value) -> Value {
    let Value::Object(fields) = part else { return part.clone() };
    let mut fields = fields.clone();
    for name in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(name) {
            fields.entry(name).or_insert_with(|| definitions.clone());
        }
    }
    Value::Object(fields)
}

/// JSON as the prompt has it.
fn with_options(schema: Value) -> Value {
    let options = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    match schema {
        Value::Object(mut fields) => {
            fields.insert("x-guidance".to_owned(), options);
            Value::Object(fields)
        }
        // `true` allows anything; `false` nothing, which no rule can say, so it is left to fail.
        Value::Bool(true) => Value::Object(Map::from_iter([("x-guidance".to_owned(), options)])),
        other => other,
    }
}

/// A text as a literal of the grammar, which are JSON strings.
fn quote(text: &str) -> String {
    Value::from(text).to_string()
}
