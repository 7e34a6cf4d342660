//! Which tokens may come next. The test tokenizer has a token for each byte, the markers from 256 on, and a few words.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use troika_prompt::{
    Constraint, ConstraintCompiler, ConstraintError, Grammar, MarkerText, NumCalls, Opens, Output, OutputDecoder,
    Progress, Tokenizer, ToolSyntax,
};

use crate::{load, spec_with_reminder};

const EOS: u32 = 257;
const END_THINK: u32 = 261;

fn compiler() -> ConstraintCompiler {
    ConstraintCompiler::new(load(&spec_with_reminder()), vec![EOS])
}

fn is_allowed(constraint: &mut Constraint, token: u32) -> bool {
    let words = constraint.allowed().expect("the constraint goes on");
    words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// The tokens of a text, where `|` is the marker.
fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    for (idx, part) in text.split('|').enumerate() {
        if idx > 0 {
            ids.push(tokenizer.special("｜DSML｜").unwrap());
        }
        ids.extend(tokenizer.encode(part).unwrap());
    }
    ids
}

/// How far a text gets: the number of tokens that were allowed, and whether it may end there.
fn walk(mut constraint: Constraint, tokens: &[u32]) -> (usize, bool) {
    for (idx, token) in tokens.iter().enumerate() {
        if !is_allowed(&mut constraint, *token) {
            return (idx, false);
        }
        if constraint.accept(*token).unwrap() == Progress::Complete {
            return (idx + 1, idx + 1 == tokens.len());
        }
    }
    let may_end = is_allowed(&mut constraint, EOS);
    (tokens.len(), may_end)
}

fn accepts(grammar: &Grammar, text: &str) -> bool {
    let tokenizer = load(&spec_with_reminder());
    let ids = tokens(&tokenizer, text);
    walk(compiler().compile(grammar, Opens::Content).unwrap(), &ids) == (ids.len(), true)
}

#[test]
fn json_of_a_schema() {
    let schema = Grammar::JsonSchema(json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"$ref": "#/$defs/n"}},
        "required": ["name"],
        "additionalProperties": false,
        "$defs": {"n": {"type": "integer", "minimum": 0}},
    }));
    for text in [r#"{"name":"a"}"#, r#"{"name": "hello", "n": 12}"#, "{\n  \"name\": \"é😀\"\n}"] {
        assert!(accepts(&schema, text), "{text}");
    }
    for text in
        ["", "{}", "{\"name\"", r#"{"name": 1}"#, r#"{"name": "hello!"}"#, r#"{"name": "a", "n": -1}"#, "x", " {}"]
    {
        assert!(!accepts(&schema, text), "{text}");
    }
    assert!(accepts(&Grammar::JsonObject, r#"{"a": [1, {"b": null}]}"#));
    assert!(!accepts(&Grammar::JsonObject, "[1]"));
    assert!(accepts(&Grammar::JsonSchema(json!(true)), "[1, \"a\"]"));
    // White space has an end.
    assert!(!accepts(&Grammar::JsonObject, &format!("{{{}}}", " ".repeat(200))));
}

#[test]
fn regular_expressions_and_grammars() {
    let regex = Grammar::Regex(r"[a-z]+-\d{2,3}".into());
    assert!(accepts(&regex, "hello-123") && accepts(&regex, "x-12"));
    assert!(!accepts(&regex, "x-1") && !accepts(&regex, "x-1234") && !accepts(&regex, "X-12"));
    let lark = Grammar::Lark("start: \"yes\" | \"no\" (\" \" WHY)?\nWHY: /[a-z ]+/".into());
    assert!(accepts(&lark, "yes") && accepts(&lark, "no") && accepts(&lark, "no for a reason"));
    assert!(!accepts(&lark, "maybe") && !accepts(&lark, "yes for a reason"));
}

#[test]
fn an_answer_that_can_only_end_is_complete() {
    let tokenizer = load(&spec_with_reminder());
    let mut constraint = compiler().compile(&Grammar::Regex("ab".into()), Opens::Content).unwrap();
    assert_eq!(constraint.accept(u32::from(b'a')), Ok(Progress::Open));
    let mut copy = constraint.clone();
    assert_eq!(constraint.accept(u32::from(b'b')), Ok(Progress::Complete));
    assert!(is_allowed(&mut constraint, EOS) && !is_allowed(&mut constraint, u32::from(b'b')));
    assert!(is_allowed(&mut copy, u32::from(b'b')), "copies go their own way");
    assert!(matches!(copy.accept(u32::from(b'x')), Err(ConstraintError::Failed { .. })));
    assert!(copy.allowed().is_err(), "there is no way back");
    // Longer tokens count where they fit, whole.
    let hello = tokenizer.encode("hello").unwrap();
    assert_eq!(hello.len(), 1);
    let mut constraint = compiler().compile(&Grammar::Regex("hello!".into()), Opens::Content).unwrap();
    assert!(is_allowed(&mut constraint, hello[0]) && is_allowed(&mut constraint, u32::from(b'h')));
    let mut constraint = compiler().compile(&Grammar::Regex("hell!".into()), Opens::Content).unwrap();
    assert!(!is_allowed(&mut constraint, hello[0]));
}

#[test]
fn reasoning_is_free() {
    let mut constraint = compiler().compile(&Grammar::Regex("ab".into()), Opens::Reasoning).unwrap();
    for token in [u32::from(b'x'), 260, u32::from(b'{'), 262] {
        assert!(is_allowed(&mut constraint, token));
        assert_eq!(constraint.accept(token), Ok(Progress::Open));
    }
    assert!(!is_allowed(&mut constraint, EOS), "the answer has not begun");
    assert!(!is_allowed(&mut constraint, 271) && !is_allowed(&mut constraint, 9999), "there is no such token");
    constraint.accept(END_THINK).unwrap();
    assert!(is_allowed(&mut constraint, u32::from(b'a')) && !is_allowed(&mut constraint, u32::from(b'x')));
    assert!(!is_allowed(&mut constraint, END_THINK));
}

#[test]
fn what_cannot_be_used_says_why() {
    let refused = |grammar: Grammar, why: &str| {
        let error = compiler().compile(&grammar, Opens::Content).unwrap_err();
        assert!(matches!(error, ConstraintError::Unsupported { .. }), "{error:?}");
        let error = error.to_string();
        assert!(error.contains(why) && !error.contains("backtrace"), "{error:?} lacks {why:?}");
    };
    refused(Grammar::JsonSchema(json!({"if": {}, "then": {}})), "if");
    refused(Grammar::JsonSchema(json!({"type": "nonsense"})), "nonsense");
    refused(Grammar::JsonSchema(json!({"$ref": "https://example.com/schema.json"})), "example.com");
    refused(Grammar::JsonSchema(json!({"$ref": "#/$defs/missing"})), "missing");
    refused(Grammar::JsonSchema(json!([])), "not a JSON object");
    refused(Grammar::JsonSchema(json!({"description": "x".repeat(300 << 10)})), "bytes");
    refused(Grammar::JsonSchema(json!({"type": "string", "minLength": 5, "maxLength": 2})), "");
    refused(Grammar::Regex("(".into()), "");
    refused(Grammar::Regex(String::new()), "empty");
    refused(Grammar::Regex("(".repeat(100_000)), "deep");
    refused(Grammar::Lark("begin: \"a\"".into()), "start");
    refused(Grammar::Lark("start: missing".into()), "missing");
    refused(Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))), "deep");
    refused(Grammar::ToolCalls { tools: Vec::new(), num_calls: NumCalls::Many }, "no tool");
    refused(Grammar::ToolCalls { tools: vec![json!({"name": 1})], num_calls: NumCalls::Many }, "no name");

    let unavailable = |compiler: &ConstraintCompiler, why: &str| {
        let error = compiler.compile(&Grammar::JsonObject, Opens::Reasoning).unwrap_err();
        assert!(matches!(error, ConstraintError::Unavailable { .. }), "{error:?}");
        assert!(error.to_string().contains(why), "{error}");
    };
    unavailable(&ConstraintCompiler::new(load(&spec_with_reminder()), Vec::new()), "ends");
    let mut spec = spec_with_reminder();
    spec.markers.retain(|marker| *marker != "</think>");
    unavailable(&ConstraintCompiler::new(load(&spec), vec![EOS]), "</think>");
}

/// Grammars made to cost: refused or slow, but neither for ever nor a crash.
#[test]
fn hostile_grammars_end() {
    let nested = |open: &str, inner: &str, close: &str, n: usize| {
        serde_json::from_str::<Value>(&format!("{}{inner}{}", open.repeat(n), close.repeat(n))).unwrap()
    };
    let grammars = [
        Grammar::Regex("(a*)*(a*)*(a*)*b{1000}{1000}".into()),
        Grammar::Regex("((((a{100}){100}){100}){100}){100}".into()),
        Grammar::Regex(r"(.*a.{200}){20}".into()),
        Grammar::Lark("start: start start | \"a\" | \"\"".into()),
        Grammar::Lark("start: a\na: b\nb: a".into()),
        Grammar::Lark(format!("start: {}", vec!["\"a\"?"; 5000].join(" "))),
        Grammar::JsonSchema(json!({"type": "string", "minLength": 1_000_000_000u64})),
        Grammar::JsonSchema(json!({"type": "array", "minItems": 1_000_000_000u64, "items": {"type": "null"}})),
        Grammar::JsonSchema(json!({"$ref": "#"})),
        Grammar::JsonSchema(json!({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]})),
        Grammar::JsonSchema(nested("{\"items\":", "{}", "}", 60)),
        Grammar::JsonSchema(nested("{\"anyOf\":[{},", "{}", "]}", 40)),
        Grammar::JsonSchema(json!({"type": "string", "pattern": "(a+)+(b+)+(.*)*$"})),
    ];
    let compiler = compiler();
    for grammar in grammars {
        let Ok(mut constraint) = compiler.compile(&grammar, Opens::Content) else { continue };
        for _ in 0..50 {
            let Ok(words) = constraint.allowed() else { break };
            let Some(token) = (0..256u32).find(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1) else { break };
            if constraint.accept(token) != Ok(Progress::Open) {
                break;
            }
        }
    }
}

fn weather() -> Vec<Value> {
    vec![
        json!({"name": "get_weather", "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["C", "F"]},
                "days": {"$ref": "#/$defs/days"},
                "note": {"type": ["string", "null"]},
            },
            "required": ["city"],
            "$defs": {"days": {"type": "array", "items": {"$ref": "#/$defs/day"}}, "day": {"type": "integer"}},
        }}),
        json!({"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}),
        json!({"name": "any"}),
    ]
}

fn call(name: &str, parameters: &[(&str, &str, &str)]) -> String {
    let parameters: Vec<String> = parameters
        .iter()
        .map(|(key, flag, value)| format!("<|parameter name=\"{key}\" string=\"{flag}\">{value}</|parameter>"))
        .collect();
    format!("<|invoke name=\"{name}\">\n{}\n</|invoke>\n", parameters.join("\n"))
}

fn block(calls: &[String]) -> String {
    format!("\n\n<|tool_calls>\n{}</|tool_calls>", calls.concat())
}

#[test]
fn calls_of_tools() {
    let many = Grammar::ToolCalls { tools: weather(), num_calls: NumCalls::Many };
    let one = Grammar::ToolCalls { tools: weather(), num_calls: NumCalls::One };
    let oslo = call("get_weather", &[("city", "true", "Oslo </b> ｜DSML｜\n")]);
    let all = [("city", "true", ""), ("unit", "true", "F"), ("days", "false", "[1, 22]"), ("note", "false", "null")];
    let now = call("now", &[]);
    let any = call("any", &[("a b", "true", "x"), ("c", "false", "{\"d\": [1.5]}")]);
    for calls in [vec![oslo.clone()], vec![call("get_weather", &all)], vec![now.clone()], vec![any.clone()]] {
        assert!(accepts(&many, &block(&calls)) && accepts(&one, &block(&calls)), "{calls:?}");
    }
    let several = block(&[oslo.clone(), now, any, call("any", &[])]);
    assert!(accepts(&many, &several) && !accepts(&one, &several));
    let refused = [
        String::new(),
        "Sure!".to_owned(),
        block(&[]),
        block(&[call("unknown", &[])]),
        block(&[call("get_weather", &[])]),
        block(&[call("get_weather", &[("city", "false", "\"Oslo\"")])]),
        block(&[call("get_weather", &[("city", "true", "Oslo"), ("unit", "true", "K")])]),
        block(&[call("get_weather", &[("city", "true", "Oslo"), ("days", "false", "[1.5]")])]),
        block(&[call("get_weather", &[("city", "true", "Oslo"), ("other", "true", "x")])]),
        block(&[call("now", &[("a", "true", "x")])]),
        block(std::slice::from_ref(&oslo)).replace('|', "｜DSML｜"),
    ];
    for text in refused {
        assert!(!accepts(&many, &text), "{text}");
    }
}

fn random_walk(compiler: &ConstraintCompiler, grammar: &Grammar, mut seed: u64) -> Option<Vec<u32>> {
    let mut constraint = compiler.compile(grammar, Opens::Content).unwrap();
    let mut ids = Vec::new();
    for step in 0..600u32 {
        let words = constraint.allowed().unwrap().to_vec();
        let allowed: Vec<u32> =
            (0..words.len() as u32 * 32).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        assert!(!allowed.is_empty());
        // Ever more in a hurry: take what ends things.
        let ends = [EOS, 262, u32::from(b'"'), u32::from(b'}'), u32::from(b']'), u32::from(b'<'), u32::from(b'/')];
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let hurry = (seed >> 33) % 100 < u64::from(step);
        let choice = ends.iter().find(|id| hurry && allowed.contains(id));
        let token = *choice.unwrap_or(&allowed[(seed >> 40) as usize % allowed.len()]);
        if token == EOS {
            return Some(ids);
        }
        ids.push(token);
        if constraint.accept(token).unwrap() == Progress::Complete {
            return Some(ids);
        }
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Whatever a model says under the constraint, the parser finds calls in it whose arguments fit.
    #[test]
    fn constrained_calls_are_calls(seed: u64) {
        let compiler = compiler();
        let grammar = Grammar::ToolCalls { tools: weather(), num_calls: NumCalls::Many };
        let Some(ids) = random_walk(&compiler, &grammar, seed) else { return Ok(()) };
        let mut decoder = OutputDecoder::new(load(&spec_with_reminder()), Opens::Content, ToolSyntax::Calls);
        let mut output = Output::default();
        ids.iter().flat_map(|id| decoder.push(*id)).for_each(|event| output.add(event));
        decoder.finish().into_iter().for_each(|event| output.add(event));
        prop_assert_eq!(&output.content, "");
        prop_assert!(!output.tool_calls.is_empty());
        for call in &output.tool_calls {
            prop_assert!(call.is_whole);
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
            let arguments = arguments.as_object().unwrap();
            match call.name.as_str() {
                "get_weather" => {
                    prop_assert!(arguments["city"].is_string());
                    prop_assert!(arguments.get("unit").is_none_or(|unit| unit == "C" || unit == "F"));
                    let days = arguments.get("days").map(|days| days.as_array().unwrap().iter().all(Value::is_i64));
                    prop_assert!(days.unwrap_or(true));
                }
                "now" => prop_assert!(arguments.is_empty()),
                name => prop_assert_eq!(name, "any"),
            }
        }
    }

    #[test]
    fn constrained_json_is_json(seed: u64) {
        let schema = json!({
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": ["integer", "null"], "minimum": -9, "maximum": 99}}, "s": {"type": "string"}},
            "required": ["a", "s"], "additionalProperties": false,
        });
        let compiler = compiler();
        if let Some(ids) = random_walk(&compiler, &Grammar::JsonSchema(schema), seed) {
            let text = load(&spec_with_reminder()).decode(&ids, MarkerText::Shown);
            let value: Value = serde_json::from_str(&text).unwrap();
            prop_assert!(value["a"].as_array().unwrap().iter().all(|a| a.is_number() || a.is_null()));
            prop_assert!(value["s"].is_string());
        }
    }

    /// Any text as a grammar: an error or a constraint, never a panic.
    #[test]
    fn no_grammar_panics(pieces in proptest::collection::vec(0usize..24, 0..25), noise in "\\PC{0,6}") {
        const PIECES: [&str; 23] = [
            "start", ":", " ", "\"a\"", "|", "(", ")", "[", "]", "?", "*", "+", "\n", "/", "{", "}", "%json ", "<[1]>",
            "%ignore ", "~2..3", "x", "\\", "A: /b/",
        ];
        let text: String = pieces.iter().map(|idx| PIECES.get(*idx).copied().unwrap_or(&noise)).collect();
        let compiler = compiler();
        for grammar in [Grammar::Lark(format!("start: {text}")), Grammar::Lark(text.clone()), Grammar::Regex(text)] {
            if let Ok(mut constraint) = compiler.compile(&grammar, Opens::Content) {
                let _ = constraint.allowed();
            }
        }
    }
}

#[test]
fn constraints_can_be_shared_and_sent() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Send + Sync>() {}
    is_send::<Constraint>();
    is_sync::<ConstraintCompiler>();
    let compiler = Arc::new(compiler());
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let compiler = Arc::clone(&compiler);
            std::thread::spawn(move || compiler.compile(&Grammar::JsonObject, Opens::Content).is_ok())
        })
        .collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
}
