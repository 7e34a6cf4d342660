//! Conversations as token ids.

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};
use troika_prompt::{
    ChatOptions, Conversation, Effort, FixedTexts, LastAssistant, MarkerText, Message, OldReasoning, Opens,
    PromptError, ThinkingMode, ToolCall, UserBlock, encode_chat, encode_completion,
};
use troika_testkit::tokenizer::{MARKERS, TokenizerSpec};

use crate::{library_ids, load, spec_with_reminder, texts};

fn chat() -> ChatOptions {
    ChatOptions::new(ThinkingMode::Chat)
}

fn thinking() -> ChatOptions {
    ChatOptions::new(ThinkingMode::Thinking)
}

fn keeping() -> ChatOptions {
    ChatOptions { old_reasoning: OldReasoning::Keep, ..thinking() }
}

fn system(content: &str) -> Message {
    Message::system(content)
}

fn user(content: &str) -> Message {
    Message::user(content)
}

fn assistant(reasoning: &str, content: &str) -> Message {
    called(reasoning, content, &[])
}

/// Each call: id, name, arguments.
fn called(reasoning: &str, content: &str, calls: &[(&str, &str, &str)]) -> Message {
    let call = |(id, name, arguments): &(&str, &str, &str)| ToolCall {
        id: (*id).into(),
        name: (*name).into(),
        arguments: (*arguments).into(),
    };
    let reasoning = (!reasoning.is_empty()).then(|| reasoning.to_owned());
    Message::Assistant { reasoning, content: content.into(), tool_calls: calls.iter().map(call).collect() }
}

fn of(messages: &[Message]) -> Conversation {
    Conversation { messages: messages.to_vec(), ..Conversation::default() }
}

/// The prompt as text. Its ids are those of the whole rendered text, since nobody forges anything in these tests.
fn render(conversation: &Conversation, options: ChatOptions) -> String {
    let spec = TokenizerSpec { split: true, ..spec_with_reminder() };
    let tokenizer = load(&spec);
    let prompt = encode_chat(&tokenizer, &texts(), conversation, options).unwrap();
    let text = tokenizer.decode(&prompt.ids, MarkerText::Shown);
    assert_eq!(prompt.ids, library_ids(&spec, &text));
    assert_eq!(prompt.opens == Opens::Reasoning, text.ends_with("<think>"));
    text
}

fn check(messages: &[Message], options: ChatOptions, rendered: &str) {
    let readable = render(&of(messages), options)
        .replace("<｜begin▁of▁sentence｜>", "<B>")
        .replace("<｜end▁of▁sentence｜>", "<E>")
        .replace("<｜User｜>", "<U>")
        .replace("<｜Assistant｜>", "<A>")
        .replace("<｜latest_reminder｜>", "<R>")
        .replace("｜DSML｜", "|");
    assert_eq!(readable, rendered);
}

/// The vectors of `encoding/tests`, byte for byte.
#[test]
fn the_checkpoints_own_vectors() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/encoding/tests");
    for number in 1..=4 {
        let read = |name: String| std::fs::read_to_string(folder.join(name)).unwrap();
        let input: Value = serde_json::from_str(&read(format!("test_input_{number}.json"))).unwrap();
        let (conversation, options) = parse_vector(&input);
        let want = read(format!("test_output_{number}.txt"));
        assert_eq!(render(&conversation, options), want, "vector {number}");
    }
}

fn parse_vector(input: &Value) -> (Conversation, ChatOptions) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut conversation = Conversation::default();
    for message in input["messages"].as_array().unwrap() {
        let content = text(&message["content"]);
        conversation.messages.push(match message["role"].as_str().unwrap() {
            "system" => {
                let tools = message["tools"].as_array().into_iter().flatten();
                conversation.tools.extend(tools.map(|tool| tool["function"].clone()));
                conversation.response_format = message.get("response_format").cloned();
                Message::System { content }
            }
            "user" => Message::user(content),
            "tool" => Message::tool_result(text(&message["tool_call_id"]), content),
            "latest_reminder" => Message::LatestReminder { content },
            "assistant" => {
                let calls = message["tool_calls"].as_array().into_iter().flatten();
                let tool_calls = calls.map(|call| ToolCall {
                    id: text(&call["id"]),
                    name: text(&call["function"]["name"]),
                    arguments: text(&call["function"]["arguments"]),
                });
                let reasoning = message["reasoning_content"].as_str().map(str::to_owned);
                Message::Assistant { reasoning, content, tool_calls: tool_calls.collect() }
            }
            other => panic!("role {other}"),
        });
    }
    let is_thinking = input["thinking_mode"] == "thinking";
    let mode = if is_thinking { ThinkingMode::Thinking } else { ThinkingMode::Chat };
    let effort = input["reasoning_effort"].as_str().map_or(Effort::Low, |name| Effort::from_name(name).unwrap());
    (conversation, ChatOptions { effort, ..ChatOptions::new(mode) })
}

#[test]
fn one_turn() {
    check(&[user("hello")], chat(), "<B><U>hello<A></think>");
    check(&[user("hello")], thinking(), "<B><U>hello<A><think>");
    check(&[system("Be brief."), user("hello")], chat(), "<B>Be brief.<U>hello<A></think>");
    check(&[], chat(), "<B>");
}

#[test]
fn several_turns() {
    let messages = [user("1"), assistant("why", "2"), user("3"), assistant("because", "4"), user("5")];
    check(&messages, chat(), "<B><U>1<A></think>2<E><U>3<A></think>4<E><U>5<A></think>");
    check(&messages, thinking(), "<B><U>1<A></think>2<E><U>3<A></think>4<E><U>5<A><think>");
    check(&messages, keeping(), "<B><U>1<A><think>why</think>2<E><U>3<A><think>because</think>4<E><U>5<A><think>");
}

#[test]
fn a_conversation_that_ends_with_the_model() {
    let messages = [user("1"), assistant("why", "2"), user("3"), assistant("because", "4")];
    check(&messages, chat(), "<B><U>1<A></think>2<E><U>3<A></think>4<E>");
    check(&messages, thinking(), "<B><U>1<A></think>2<E><U>3<A><think>because</think>4<E>");
    check(&[user("1"), assistant("", "2")], thinking(), "<B><U>1<A><think></think>2<E>");
    let continued = |options| ChatOptions { last_assistant: LastAssistant::Continued, ..options };
    check(&messages, continued(chat()), "<B><U>1<A></think>2<E><U>3<A></think>4");
    check(&messages, continued(thinking()), "<B><U>1<A></think>2<E><U>3<A><think>because</think>4");
    check(&messages[..3], continued(chat()), "<B><U>1<A></think>2<E><U>3<A></think>");
}

#[test]
fn user_messages_in_a_row_are_one() {
    let blocks = Message::User { blocks: vec![UserBlock::Text("b".into()), UserBlock::Text("c".into())] };
    check(&[user("a"), blocks, user("d")], chat(), "<B><U>a\n\nb\n\nc\n\nd<A></think>");
}

#[test]
fn late_system_messages_are_reminders() {
    check(&[system("s"), system("t"), user("a")], chat(), "<B>st<U>a<A></think>");
    // In a user turn, before it, after it, and twice.
    check(&[user("a"), system("s"), user("b")], chat(), "<B><R>s<U>a\n\nb<A></think>");
    let turn = [user("a"), assistant("", "b"), system("s"), user("c")];
    check(&turn, chat(), "<B><U>a<A></think>b<E><R>s<U>c<A></think>");
    let turn = [user("a"), assistant("", "b"), user("c"), system("s"), system("t")];
    check(&turn, chat(), "<B><U>a<A></think>b<E><R>s\n\nt<U>c<A></think>");
    // No user turn follows: the model is still asked.
    check(&[user("a"), assistant("", "b"), system("s")], chat(), "<B><U>a<A></think>b<E><R>s<U><A></think>");
    let explicit = Message::LatestReminder { content: "s".into() };
    check(&[user("a"), assistant("", "b"), explicit, user("c")], chat(), "<B><U>a<A></think>b<E><R>s<U>c<A></think>");
}

#[test]
fn calls_and_results() {
    let calls = [
        ("1", "f", r#"{"b": "x\ny", "a": {"k": [1, 2.50, "é"]}, "n": null, "s": ""}"#),
        ("2", "g", ""),
        ("3", "h", "{}"),
        ("4", "i", "[1]"),
        ("5", "j", "{oops"),
    ];
    let block = concat!(
        "\n\n<|tool_calls>\n<|invoke name=\"f\">\n<|parameter name=\"b\" string=\"true\">x\ny</|parameter>\n",
        "<|parameter name=\"a\" string=\"false\">{\"k\": [1, 2.5, \"é\"]}</|parameter>\n",
        "<|parameter name=\"n\" string=\"false\">null</|parameter>\n",
        "<|parameter name=\"s\" string=\"true\"></|parameter>\n</|invoke>\n",
        "<|invoke name=\"g\">\n\n</|invoke>\n<|invoke name=\"h\">\n\n</|invoke>\n",
        "<|invoke name=\"i\">\n<|parameter name=\"arguments\" string=\"true\">[1]</|parameter>\n</|invoke>\n",
        "<|invoke name=\"j\">\n<|parameter name=\"arguments\" string=\"true\">{oops</|parameter>\n</|invoke>\n",
        "</|tool_calls>",
    );
    check(&[user("q"), called("", "", &calls)], chat(), &format!("<B><U>q<A></think>{block}<E>"));

    // Results take the order of their calls; text keeps its place; unknown ids count as the first call.
    let result = Message::tool_result;
    let two = called("", "", &[("1", "f", ""), ("2", "f", "")]);
    let turn = [user("q"), two, result("2", "B"), user("and?"), result("1", "A"), result("9", "C")];
    let rendered = render(&of(&turn), chat());
    let tail = "<tool_result>A</tool_result>\n\nand?\n\n<tool_result>C</tool_result>\n\n<tool_result>B</tool_result>";
    assert!(rendered.contains(tail), "{rendered}");
    // Results that answer no calls keep their order.
    let rendered = render(&of(&[user("q"), result("2", "B"), result("1", "A")]), chat());
    assert!(rendered.contains("<tool_result>B</tool_result>\n\n<tool_result>A</tool_result>"), "{rendered}");
}

fn with_tools(messages: &[Message]) -> Conversation {
    Conversation { tools: vec![json!({"name": "f", "parameters": {"z": 1, "a": "中"}})], ..of(messages) }
}

#[test]
fn tools_keep_all_reasoning() {
    let messages = [user("1"), assistant("why", "2"), user("3")];
    assert!(!render(&of(&messages), thinking()).contains("why"));
    let rendered = render(&with_tools(&messages), thinking());
    assert!(rendered.contains("<｜Assistant｜><think>why</think>2<｜end▁of▁sentence｜>"), "{rendered}");
    // A response format alone changes nothing about it.
    let conversation = Conversation { response_format: Some(json!({})), ..of(&messages) };
    assert!(!render(&conversation, thinking()).contains("why"));
}

#[test]
fn tools_stand_behind_the_system_messages() {
    let offer = "\n\n## Functions";
    let json = "\n{\"name\": \"f\", \"parameters\": {\"z\": 1, \"a\": \"中\"}}\n";
    let rendered = render(&with_tools(&[system("one"), system("two"), user("q")]), chat());
    assert!(rendered.starts_with(&format!("<｜begin▁of▁sentence｜>onetwo{offer}")), "{rendered}");
    assert!(rendered.contains(json));
    let rendered = render(&with_tools(&[user("q")]), chat());
    assert!(rendered.starts_with(&format!("<｜begin▁of▁sentence｜>{offer}")), "{rendered}");
    let formatted = Conversation { response_format: Some(json!({"type": "object"})), ..with_tools(&[user("q")]) };
    let rendered = render(&formatted, ChatOptions { effort: Effort::High, ..thinking() });
    assert!(rendered.starts_with("<｜begin▁of▁sentence｜>Effort: high."), "{rendered}");
    assert!(rendered.contains("request asks for it.\n\n\n## Reply format"), "{rendered}");
    assert!(rendered.contains("nothing else:\n{\"type\": \"object\"}<｜User｜>q"), "{rendered}");
    // No effort prefix without thinking.
    assert!(!render(&formatted, ChatOptions { effort: Effort::Max, ..chat() }).contains("Effort"));
}

/// A checkpoint without the file chats; what needs a text says which file it misses.
#[test]
fn missing_texts_are_named() {
    let tokenizer = load(&spec_with_reminder());
    let folder = tempfile::tempdir().unwrap();
    let none = FixedTexts::from_checkpoint(folder.path());
    assert_eq!(none.missing().len(), 4);
    let plain = of(&[system("s"), user("q"), called("", "", &[("1", "f", "{}")]), Message::tool_result("1", "r")]);
    encode_chat(&tokenizer, &none, &plain, chat()).unwrap();
    encode_chat(&tokenizer, &none, &plain, thinking()).unwrap();
    let file = folder.path().join("encoding/encoding_dsv4.py").display().to_string();
    let refused = |conversation: &Conversation, options: ChatOptions, texts: &FixedTexts, reason: &str| {
        let error = encode_chat(&tokenizer, texts, conversation, options).unwrap_err();
        assert!(matches!(error, PromptError::MissingText { .. }));
        let error = error.to_string();
        assert!(error.contains(&file) && error.contains(reason), "{error}");
    };
    let formatted = Conversation { response_format: Some(json!({})), ..plain.clone() };
    let efforts = [Effort::High, Effort::Max].map(|effort| ChatOptions { effort, ..thinking() });
    for reason in ["the file is missing", "it is not UTF-8", "no such text", "longer than"] {
        let texts = FixedTexts::from_checkpoint(folder.path());
        refused(&with_tools(&[user("q")]), chat(), &texts, reason);
        refused(&formatted, chat(), &texts, reason);
        efforts.into_iter().for_each(|options| refused(&plain, options, &texts, reason));
        std::fs::create_dir_all(folder.path().join("encoding")).unwrap();
        let content = match reason {
            "the file is missing" => b"\xFF".to_vec(),
            "it is not UTF-8" => b"x = 'y'".to_vec(),
            _ => vec![b' '; (1 << 20) + 1],
        };
        std::fs::write(&file, content).unwrap();
    }
}

#[test]
fn texts_are_found_by_name_or_by_content() {
    let tokenizer = load(&spec_with_reminder());
    let texts = |source: &str| FixedTexts::from_source("f.py".into(), source);
    let effort = |source: &str, effort: Effort| {
        let options = ChatOptions { effort, ..thinking() };
        let prompt = encode_chat(&tokenizer, &texts(source), &of(&[user("q")]), options).ok()?;
        let text = tokenizer.decode(&prompt.ids, MarkerText::Shown);
        Some(
            text.strip_prefix("<｜begin▁of▁sentence｜>")?.strip_suffix("<｜User｜>q<｜Assistant｜><think>")?.to_owned(),
        )
    };
    let table = "REASONING_EFFORT_PROMPTS = {'low': '', 'high': 'H', 'max': 'M'}";
    let other_table = "anything: dict = {'max': 'M', 'high': 'H'}";
    let constants = "REASONING_EFFORT_HIGH = 'H'\nREASONING_EFFORT_MAX = 'M'";
    for source in [table, other_table, constants] {
        assert_eq!(effort(source, Effort::Low).as_deref(), Some(""));
        assert_eq!(effort(source, Effort::High).as_deref(), Some("H"), "{source}");
        assert_eq!(effort(source, Effort::Max).as_deref(), Some("M"), "{source}");
    }
    // The family's first file.
    assert_eq!(effort("REASONING_EFFORT_MAX = 'M'", Effort::Max).as_deref(), Some("M"));
    assert_eq!(effort("REASONING_EFFORT_MAX = 'M'", Effort::High).as_deref(), Some(""));
    assert_eq!(effort("x = 'M'", Effort::High), None);

    let tools = |source: &str| {
        let prompt = encode_chat(&tokenizer, &texts(source), &with_tools(&[user("q")]), chat()).ok()?;
        let text = tokenizer.decode(&prompt.ids, MarkerText::Shown);
        Some(text.strip_prefix("<｜begin▁of▁sentence｜>\n\n")?.split_once("<｜User｜>")?.0.to_owned())
    };
    let json = "{\"name\": \"f\", \"parameters\": {\"z\": 1, \"a\": \"中\"}}";
    assert_eq!(
        tools("T = '<{dsml_token}> {{x}} {other} {tool_schemas} }'"),
        Some(format!("<｜DSML｜> {{x}} {{other}} {json} }}"))
    );
    assert_eq!(tools("TOOLS_TEMPLATE = 'a {tool_schemas}'\nB = 'b {tool_schemas}'"), Some(format!("a {json}")));
    assert_eq!(tools("A = 'a {tool_schemas}'\nB = 'b {tool_schemas}'"), None, "which of them?");
    assert_eq!(tools("TOOLS_TEMPLATE = 'no place'"), None);
    assert_eq!(
        tools("T = '{thinking_start_token}{thinking_end_token}{tool_schemas}'"),
        Some(format!("<think></think>{json}"))
    );

    assert_eq!(texts("TOOLS_TEMPLATE = '{tool_schemas}'").unpublished(), ["tools block"]);
    assert!(texts("REASONING_EFFORT_PROMPTS = {'low': '', 'high': 'H', 'max': 'M'}").unpublished().len() == 2);
}

#[test]
fn efforts_have_many_names() {
    let named = ["none", "minimal", "low", "medium", "high", "xhigh", "max", "", "HIGH"].map(Effort::from_name);
    let [low, high, max] = [Effort::Low, Effort::High, Effort::Max].map(Some);
    assert_eq!(named, [low, low, low, high, high, max, max, None, None]);
}

#[test]
fn completions_begin_with_bos() {
    let tokenizer = load(&TokenizerSpec::plain());
    assert_eq!(encode_completion(&tokenizer, "hello").unwrap(), [256, 266]);
    assert_eq!(encode_completion(&tokenizer, "").unwrap(), [256]);
}

#[test]
fn a_missing_marker_is_named() {
    for missing in ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"] {
        let markers = MARKERS.into_iter().filter(|marker| *marker != missing).collect();
        let tokenizer = load(&TokenizerSpec { markers, ..TokenizerSpec::plain() });
        let error = encode_chat(&tokenizer, &texts(), &of(&[user("hello")]), chat()).unwrap_err();
        assert!(matches!(&error, PromptError::MissingSpecial { name } if name == missing), "{error}");
        assert!(error.to_string().contains(missing));
    }
    // What is not needed is not asked for.
    let tokenizer = load(&TokenizerSpec { markers: MARKERS[..1].to_vec(), ..TokenizerSpec::plain() });
    assert!(encode_completion(&tokenizer, "hello").is_ok());
}

proptest! {
    /// Hostile content keeps its bytes and leaves the markers where the roles put them.
    #[test]
    fn content_cannot_forge_turns(pieces in proptest::collection::vec(0usize..12, 1..6), special: bool) {
        let spec = TokenizerSpec { markers_are_special: special, split: true, ..spec_with_reminder() };
        let tokenizer = load(&spec);
        let piece = |idx: usize| spec.markers.get(idx).copied().unwrap_or(["\n", "x", " ", "{schema}"][idx % 4]);
        let content: String = pieces.into_iter().map(piece).collect();
        let conversation = |text: &str| {
            let arguments = json!({text: text, "n": {text: [text]}}).to_string();
            let broken = format!("{{{text}");
            let calls = [(text, text, arguments.as_str()), ("2", "g", broken.as_str())];
            let messages = [
                system(text),
                user(text),
                called(text, text, &calls),
                Message::tool_result(text, text),
                user(text),
                system(text),
                called(text, text, &[]),
                user(text),
            ];
            let schema = json!({"title": text, text: text});
            Conversation { tools: vec![schema.clone(); 2], response_format: Some(schema), ..of(&messages) }
        };
        for options in [chat(), thinking(), keeping()] {
            let options = ChatOptions { effort: Effort::High, ..options };
            let ids = |text: &str| encode_chat(&tokenizer, &texts(), &conversation(text), options).unwrap().ids;
            let markers_of = |ids: &[u32]| -> Vec<u32> {
                ids.iter().copied().filter(|id| (256..264).contains(id)).collect()
            };
            let got = ids(&content);
            prop_assert_eq!(markers_of(&got), markers_of(&ids("harmless")));
            let text = tokenizer.decode(&got, MarkerText::Shown);
            prop_assert!(text.matches(&content).count() >= 10);
        }
    }
}
