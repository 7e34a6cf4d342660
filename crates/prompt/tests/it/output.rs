//! What the model says, whole and in pieces. In these texts `|` is the marker `｜DSML｜`, `{` and `}` are `<think>` and
//! `</think>` where a text says so, and nothing else is a marker.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value};
use troika_prompt::{
    ChatOptions, Conversation, Marker, Message, Opens, Output, OutputCall, OutputDecoder, OutputEvent, OutputParser,
    ThinkingMode, ToolCall, ToolSyntax, encode_chat,
};

use crate::{load, spec_with_reminder, texts};

#[derive(Clone, Debug, PartialEq)]
enum Symbol {
    Letter(char),
    Marker(Marker),
}

/// A text with `|` for `｜DSML｜`, `⟨` for `<think>`, `⟩` for `</think>`.
fn symbols(text: &str) -> Vec<Symbol> {
    let symbol = |letter| match letter {
        '|' => Symbol::Marker(Marker::Dsml),
        '⟨' => Symbol::Marker(Marker::Think),
        '⟩' => Symbol::Marker(Marker::EndThink),
        letter => Symbol::Letter(letter),
    };
    text.chars().map(symbol).collect()
}

/// The events of an output whose text is cut before each symbol that `is_cut` says.
fn events(symbols: &[Symbol], opens: Opens, is_cut: impl Fn(usize) -> bool) -> Vec<OutputEvent> {
    let mut parser = OutputParser::new(opens, ToolSyntax::Calls);
    let mut events = Vec::new();
    let mut text = String::new();
    for (idx, symbol) in symbols.iter().enumerate() {
        if is_cut(idx) || matches!(symbol, Symbol::Marker(_)) {
            events.extend(parser.push_text(&std::mem::take(&mut text)));
        }
        match symbol {
            Symbol::Letter(letter) => text.push(*letter),
            Symbol::Marker(marker) => events.extend(parser.push_marker(*marker)),
        }
    }
    events.extend(parser.push_text(&text));
    events.extend(parser.finish());
    assert!(parser.finish().is_empty());
    check_order(&events);
    events
}

/// Starts, arguments and ends of calls come in order, and nothing is empty.
fn check_order(events: &[OutputEvent]) {
    let (mut next, mut open) = (0, None);
    for event in events {
        match event {
            OutputEvent::ReasoningDelta(text) | OutputEvent::ContentDelta(text) => {
                assert!(open.is_none() && !text.is_empty(), "{events:?}");
            }
            OutputEvent::ToolCallStart { index, name } => {
                assert!(open.is_none() && *index == next && !name.is_empty(), "{events:?}");
                open = Some(*index);
            }
            OutputEvent::ToolCallArgumentsDelta { index, json } => {
                assert!(open == Some(*index) && !json.is_empty(), "{events:?}");
            }
            OutputEvent::ToolCallEnd { index, .. } => {
                assert_eq!(open.take(), Some(*index), "{events:?}");
                next += 1;
            }
        }
    }
    assert_eq!(open, None, "{events:?}");
}

/// Neighbouring deltas of the same thing as one.
fn joined(events: Vec<OutputEvent>) -> Vec<OutputEvent> {
    let mut joined: Vec<OutputEvent> = Vec::new();
    for event in events {
        match (joined.last_mut(), event) {
            (Some(OutputEvent::ReasoningDelta(said)), OutputEvent::ReasoningDelta(more)) => said.push_str(&more),
            (Some(OutputEvent::ContentDelta(said)), OutputEvent::ContentDelta(more)) => said.push_str(&more),
            (
                Some(OutputEvent::ToolCallArgumentsDelta { json, .. }),
                OutputEvent::ToolCallArgumentsDelta { json: more, .. },
            ) => json.push_str(&more),
            (_, event) => joined.push(event),
        }
    }
    joined
}

fn output(events: Vec<OutputEvent>) -> Output {
    let mut output = Output::default();
    events.into_iter().for_each(|event| output.add(event));
    output
}

/// The whole output, after a check that cuts do not matter: none, everywhere, every single one, and those of `ways`.
fn whole(symbols: &[Symbol], opens: Opens, ways: &[u64]) -> Output {
    let want = joined(events(symbols, opens, |_| false));
    assert_eq!(joined(events(symbols, opens, |_| true)), want, "cut everywhere: {symbols:?}");
    for cut in 0..symbols.len() {
        assert_eq!(joined(events(symbols, opens, |idx| idx == cut)), want, "cut at {cut}: {symbols:?}");
    }
    for way in ways {
        let is_cut = |idx: usize| way.rotate_left((idx % 64) as u32) & 1 == 1;
        assert_eq!(joined(events(symbols, opens, is_cut)), want, "cut {way:b}: {symbols:?}");
    }
    output(want)
}

/// Reasoning, content and calls of a text.
type Parts<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)]);

fn check(opens: Opens, text: &str, (reasoning, content, calls): Parts<'_>) {
    let got = whole(&symbols(text), opens, &[0x5555, 0x1234_5678_9ABC_DEF0]);
    let calls = calls.iter().map(|(name, arguments)| OutputCall {
        name: (*name).into(),
        arguments: (*arguments).into(),
        is_whole: serde_json::from_str::<Map<String, Value>>(arguments).is_ok(),
    });
    let want = Output { reasoning: reasoning.into(), content: content.into(), tool_calls: calls.collect() };
    assert_eq!(got, want, "{text:?}");
}

fn content(text: &str, content: &str, calls: &[(&str, &str)]) {
    check(Opens::Content, text, ("", content, calls));
}

const TWO_CALLS: &str = "Look.\n\n<|tool_calls>\n<|invoke name=\"get_weather\">\n\
    <|parameter name=\"city\" string=\"true\">São \"Paulo\"\n</|parameter>\n\
    <|parameter name=\"days\" string=\"false\">[1, {\"a\": 2.5}]</|parameter>\n</|invoke>\n\
    <|invoke name=\"now\">\n\n</|invoke>\n</|tool_calls>";

#[test]
fn reasoning_and_content() {
    check(Opens::Reasoning, "why⟩because", ("why", "because", &[]));
    check(Opens::Reasoning, "why\n⟩\nbecause\n", ("why\n", "\nbecause\n", &[]));
    check(Opens::Reasoning, "why", ("why", "", &[]));
    check(Opens::Reasoning, "", ("", "", &[]));
    check(Opens::Content, "plain < text\n\n\n<b> </b>\n", ("", "plain < text\n\n\n<b> </b>\n", &[]));
    // Markers of thinking switch wherever they stand, and twice is once.
    check(Opens::Content, "a⟨b⟩c⟩d⟨⟨e", ("be", "acd", &[]));
    // Spelled out they are text.
    check(Opens::Reasoning, "a</think>b", ("a</think>b", "", &[]));
    // A call ends the reasoning, if it stands where calls stand.
    let call = "<|tool_calls>\n<|invoke name=\"f\">\n</|invoke>\n</|tool_calls>";
    check(Opens::Reasoning, &format!("a\n\n{call}"), ("a", "", &[("f", "{}")]));
    let spelled = call.replace('|', "｜DSML｜");
    check(Opens::Reasoning, &format!("like {call}\n⟩b"), (&format!("like {spelled}\n"), "b", &[]));
}

#[test]
fn calls_as_they_should_be() {
    let weather = r#"{"city": "São \"Paulo\"\n", "days": [1, {"a": 2.5}]}"#;
    content(TWO_CALLS, "Look.", &[("get_weather", weather), ("now", "{}")]);
    let all = format!("think⟩{TWO_CALLS}");
    check(Opens::Reasoning, &all, ("think", "Look.", &[("get_weather", weather), ("now", "{}")]));
    // Values to the letter, markup included; keys and names with odd letters.
    content(
        "<|tool_calls>\n<|invoke name=\"f\">\n<|parameter name=\"a > \\b\" string=\"true\"></p> &amp; </\n</|parameter>\n</|invoke>\n</|tool_calls>",
        "",
        &[("f", r#"{"a > \\b": "</p> &amp; </\n"}"#)],
    );
    // Another newline before the block is content, and so is what comes after.
    let block = "<|tool_calls>\n<|invoke name=\"f\">\n</|invoke>\n</|tool_calls>";
    content(&format!("a\n\n\n{block}\nb\n"), "a\n\nb", &[("f", "{}")]);
    content(&format!("a\n{block} {block}"), "a", &[("f", "{}"), ("f", "{}")]);
}

#[test]
fn calls_as_they_come() {
    let parameter = "<|parameter name=\"a\" string=\"true\">x";
    let start = "<|tool_calls>\n<|invoke name=\"f\">\n";
    let one = &[("f", r#"{"a": "x"}"#)][..];
    // Closing tags left out.
    for end in ["</|parameter>\n</|invoke>\n</|tool_calls>", "</|parameter>\n</|invoke>", "</|parameter>", "</|invoke>"]
    {
        content(&format!("{start}{parameter}{end}"), "", one);
    }
    for end in ["</|", "</|para", "</|parameter", "</|parameter>\n</|tool", "</|tool_calls"] {
        content(&format!("{start}{parameter}{end}"), "", one);
    }
    content(&format!("{start}{parameter}<|invoke name=\"g\">"), "", &[("f", r#"{"a": "x"}"#), ("g", "{}")]);
    content(&format!("{start}{parameter}{parameter}</|parameter>"), "", &[("f", r#"{"a": "x", "a": "x"}"#)]);
    // Broken off inside a value.
    content(&format!("{start}{parameter}"), "", &[("f", r#"{"a": "x"#)]);
    content(&format!("{start}{parameter}\\</"), "", &[("f", r#"{"a": "x\\</"#)]);
    content(&format!("{start}<|parameter name=\"a\" string=\"false\">[1, 2"), "", &[("f", r#"{"a": [1, 2"#)]);
    // Before anything is certain, it is text.
    content("a\n\n<|tool_calls>\n<|invoke name=\"f", "a\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f", &[]);
    content("a\n\n<|tool_calls>\n</|tool_calls>", "a\n\n<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>", &[]);
    content("a | b", "a ｜DSML｜ b", &[]);
    content("<|invoke name=\"f\">", "<｜DSML｜invoke name=\"f\">", &[]);
    // White space is free; JSON is trimmed; what is no JSON is a string; no word of it, and the value decides.
    let json =
        |flag: &str, value: &str| format!("{start}\n \n<|parameter name=\"a\"{flag}>{value}</|parameter> </|invoke>");
    content(&json(" string=\"false\"", "\n3\n"), "", &[("f", r#"{"a": 3}"#)]);
    content(&json(" string=\"false\"", " True "), "", &[("f", r#"{"a": " True "}"#)]);
    content(&json(" string=\"false\"", ""), "", &[("f", r#"{"a": ""}"#)]);
    content(&json("", "3"), "", &[("f", r#"{"a": 3}"#)]);
    content(&json("", "three"), "", &[("f", r#"{"a": "three"}"#)]);
    // Arguments without parameters.
    let bare = |text: &str| format!("{start}{text}\n</|invoke>\n</|tool_calls>");
    content(&bare("{\"a\": [1]}"), "", &[("f", r#"{"a": [1]}"#)]);
    content(&bare("[1]"), "", &[("f", r#"{"arguments": "[1]"}"#)]);
    content(&bare("{\"a\": "), "", &[("f", r#"{"arguments": "{\"a\":"}"#)]);
    content(&bare(&format!("x{parameter}</|parameter>y < z")), "", &[("f", r#"{"a": "x", "arguments": "xy < z"}"#)]);
    content(&format!("{start}{{\"a\""), "", &[("f", r#"{"arguments": "{\"a\""}"#)]);
    content(&format!("{start}x{parameter}"), "x", &[("f", r#"{"a": "x"#)]);
    // Markers where they mean nothing.
    content(&format!("{start}{parameter}⟨|y⟩</|parameter>"), "", &[("f", "{\"a\": \"x<think>｜DSML｜y</think>\"}")]);
}

#[test]
fn tool_syntax_can_be_text() {
    let mut parser = OutputParser::new(Opens::Reasoning, ToolSyntax::Text);
    let mut events = Vec::new();
    for symbol in symbols(&format!("a⟩{TWO_CALLS}")) {
        events.extend(match symbol {
            Symbol::Letter(letter) => parser.push_text(letter.encode_utf8(&mut [0; 4])),
            Symbol::Marker(marker) => parser.push_marker(marker),
        });
    }
    assert!(parser.finish().is_empty(), "nothing is held back");
    let got = output(events);
    assert_eq!((got.reasoning.as_str(), got.content), ("a", TWO_CALLS.replace('|', "｜DSML｜")));
}

/// Names that are too long are text, and what is held meanwhile is bounded.
#[test]
fn little_is_held() {
    for start in ["<|tool_calls>\n<|invoke name=\"", "<|tool_calls>\n", "\n\n"] {
        let mut parser = OutputParser::new(Opens::Content, ToolSyntax::Calls);
        let (mut pushed, mut said) = (0, 0);
        for symbol in symbols(start).into_iter().chain(std::iter::repeat_n(Symbol::Letter(' '), 10_000)) {
            let events = match symbol {
                Symbol::Letter(letter) => parser.push_text(letter.encode_utf8(&mut [0; 4])),
                Symbol::Marker(marker) => parser.push_marker(marker),
            };
            pushed += 1;
            said += output(events).content.chars().count();
        }
        assert!(said + 1000 > pushed, "{start:?}: {said} of {pushed}");
    }
}

/// Every prefix of a valid text, used as a complete output: streamed and whole are equal, and nothing is lost.
#[test]
fn prefixes_of_calls() {
    let text = format!("think\n\nhard\n⟩{TWO_CALLS}");
    let all = symbols(&text);
    let mut before = String::new();
    for len in 0..=all.len() {
        let got = whole(&all[..len], Opens::Reasoning, &[0x9E37_79B9_7F4A_7C15]);
        let calls: String = got.tool_calls.iter().map(|call| format!("{} {}", call.name, call.arguments)).collect();
        let seen = format!("{} {} {calls}", got.reasoning, got.content);
        // What was inside a value or said as text stays, whatever comes.
        for word in ["think", "hard", "Look", "get_weather", "city", "São", "Paulo", "days", "2.5", "now"] {
            assert!(!before.contains(word) || seen.contains(word), "{word} is lost after {len}: {seen}");
            let is_complete = text.chars().take(len).collect::<String>().contains(word);
            assert!(!is_complete || seen.contains(word), "{word} is missing after {len}: {seen}");
        }
        before = seen;
        // Where reasoning goes does not depend on where it broke off.
        assert!("think\n\nhard\n".starts_with(&got.reasoning));
    }
}

/// Tokens of a reply by the tokenizer, with the marker in front: what the model would say to have said this.
fn reply_tokens(content: &str, calls: &[ToolCall]) -> (Arc<troika_prompt::Tokenizer>, Vec<u32>) {
    let tokenizer = load(&spec_with_reminder());
    let assistant = Message::Assistant { reasoning: None, content: content.to_owned(), tool_calls: calls.to_vec() };
    let conversation = Conversation { messages: vec![Message::user("q"), assistant], ..Conversation::default() };
    let prompt = encode_chat(&tokenizer, &texts(), &conversation, ChatOptions::new(ThinkingMode::Chat)).unwrap();
    let opened = prompt.ids.iter().position(|id| Some(*id) == tokenizer.special("</think>")).unwrap();
    let (eos, reply) = prompt.ids[opened + 1..].split_last().unwrap();
    assert_eq!(Some(*eos), tokenizer.special("<｜end▁of▁sentence｜>"));
    (tokenizer, reply.to_vec())
}

fn decode(tokenizer: &Arc<troika_prompt::Tokenizer>, tokens: &[u32]) -> Output {
    let mut decoder = OutputDecoder::new(Arc::clone(tokenizer), Opens::Content, ToolSyntax::Calls);
    let mut events: Vec<OutputEvent> = tokens.iter().flat_map(|token| decoder.push(*token)).collect();
    events.extend(decoder.finish());
    check_order(&events);
    output(events)
}

#[test]
fn tokens_of_the_decoder() {
    let (tokenizer, mut tokens) = reply_tokens("a｜DSML｜b</think>c", &[]);
    assert_eq!(decode(&tokenizer, &tokens).content, "a｜DSML｜b</think>c");
    // Half a letter before a marker, hidden tokens, and an id that has no token.
    tokens = vec![0xE4, 261, 257, u32::from(b'x'), 9999, 262, 0xE4];
    assert_eq!(decode(&tokenizer, &tokens).content, "\u{FFFD}x｜DSML｜\u{FFFD}");
    let mut decoder = OutputDecoder::new(Arc::clone(&tokenizer), Opens::Reasoning, ToolSyntax::Calls);
    assert!(decoder.is_reasoning());
    assert_eq!(decoder.push(u32::from(b'r')), [OutputEvent::ReasoningDelta("r".into())]);
    assert_eq!(decoder.push(261), []);
    assert!(!decoder.is_reasoning());
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e9..1e9f64).prop_map(Value::from),
        "\\PC{0,8}|[<>/|\\\\\"\n ]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::vec(("[a-zé\"<]{0,4}", inner), 0..4)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Calls that were encoded into the history come back as they were.
    #[test]
    fn encoded_calls_come_back(
        content in "[a-z\n<]{0,6}",
        calls in proptest::collection::vec(
            ("[a-zA-Z0-9_-]{1,9}", proptest::collection::vec(("[a-zé\"=/<| ]{0,5}", json_value()), 0..4)), 1..4,
        ),
    ) {
        let calls: Vec<ToolCall> = calls
            .into_iter()
            .map(|(name, parameters)| {
                // `">` would end a key, so keys have no `>` here.
                let parameters = Map::from_iter(parameters);
                ToolCall { id: String::new(), name, arguments: Value::Object(parameters).to_string() }
            })
            .collect();
        let (tokenizer, tokens) = reply_tokens(&content, &calls);
        let got = decode(&tokenizer, &tokens);
        prop_assert_eq!(got.content, content);
        prop_assert_eq!(got.tool_calls.len(), calls.len());
        for (got, want) in got.tool_calls.iter().zip(&calls) {
            prop_assert_eq!(&got.name, &want.name);
            prop_assert!(got.is_whole);
            let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            prop_assert_eq!(parse(&got.arguments), parse(&want.arguments));
        }
    }

    /// Any mixture of tags, parts of tags and words: no panic, no dependence on cuts, no word lost or doubled, and every
    /// call that is whole has a JSON object.
    #[test]
    fn nothing_is_lost(
        pieces in proptest::collection::vec(0usize..26, 0..30), ways: [u64; 3], reasoning: bool,
    ) {
        const PIECES: [&str; 22] = [
            "<|tool_calls>", "<|tool_calls>\n<|invoke name=\"", "<|invoke name=\"", "\">", "</|invoke>", "</|tool_calls>",
            "<|parameter name=\"", "\" string=\"true\">", "\" string=\"false\">", "</|parameter>", "\n", "\n\n", " ",
            "<", "|", "</", "/", "⟨", "⟩", "{\"a\": 1}", "\"", "é",
        ];
        let mut text = String::new();
        let mut words = Vec::new();
        for (idx, piece) in pieces.iter().enumerate() {
            match PIECES.get(*piece) {
                Some(piece) => text.push_str(piece),
                None => {
                    let word = format!("w{idx}w");
                    text.push_str(&word);
                    words.push(word);
                }
            }
        }
        let opens = if reasoning { Opens::Reasoning } else { Opens::Content };
        let got = whole(&symbols(&text), opens, &ways);
        let mut seen = format!("{} {}", got.reasoning, got.content);
        for call in &got.tool_calls {
            seen.push_str(&format!(" {} {}", call.name, call.arguments));
            let object = serde_json::from_str::<Map<String, Value>>(&call.arguments);
            prop_assert!(object.is_ok() || !call.is_whole, "{text:?}: {call:?}");
        }
        for word in &words {
            prop_assert_eq!(seen.matches(word.as_str()).count(), 1, "{} in {:?} of {:?}", word, seen, text);
        }
    }

    /// Damage to a valid text.
    #[test]
    fn damaged_calls(at: prop::sample::Index, len in 0usize..12, with in "[<|/>\"\\n⟩a]{0,3}", ways: [u64; 2]) {
        let mut damaged = symbols(TWO_CALLS);
        let start = at.index(damaged.len());
        let end = (start + len).min(damaged.len());
        damaged.splice(start..end, symbols(&with));
        let got = whole(&damaged, Opens::Content, &ways);
        for call in got.tool_calls.iter().filter(|call| call.is_whole) {
            prop_assert!(serde_json::from_str::<Map<String, Value>>(&call.arguments).is_ok(), "{call:?}");
        }
    }
}

#[test]
fn outputs_gather_events() {
    let mut output = Output::default();
    output.add(OutputEvent::ToolCallArgumentsDelta { index: 3, json: "{}".into() });
    output.add(OutputEvent::ToolCallEnd { index: 3, is_whole: true });
    assert_eq!(output, Output::default(), "events of a call that never began");
}
