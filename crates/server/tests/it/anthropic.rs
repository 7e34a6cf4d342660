//! `/v1/messages` and its token counts.

use serde_json::{Value, json};
use troika_testkit::scripted::Act;

use crate::{BOS, EOS, World, says, split_usage, tools::dsml_call, with};

const MESSAGES: &str = "/v1/messages";

fn body(more: Value) -> Value {
    with(json!({"max_tokens": 1000, "messages": [{"role": "user", "content": "hello"}]}), more)
}

/// The events of a stream, each with its name.
async fn events(world: &World, body: &Value) -> Vec<Value> {
    let mut stream = world.stream(MESSAGES, &with(body.clone(), json!({"stream": true}))).await;
    let mut events = Vec::new();
    while let Some(block) = stream.block().await {
        let (name, data) = block.split_once('\n').expect("a named event");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        events.push(data);
    }
    events
}

/// Puts a stream together the way Anthropic's own clients do.
pub(crate) fn put_together(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    let mut input = String::new();
    for event in &events[1..] {
        let content = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(event["index"], content.len());
                content.push(event["content_block"].clone());
                input.clear();
            }
            "content_block_delta" => {
                let block = content.last_mut().unwrap();
                let delta = &event["delta"];
                let text = |name: &str| delta[name].as_str().unwrap();
                let (name, more) = match text("type") {
                    "text_delta" => ("text", text("text")),
                    "thinking_delta" => ("thinking", text("thinking")),
                    "signature_delta" => ("signature", text("signature")),
                    _ => {
                        input += text("partial_json");
                        continue;
                    }
                };
                block[name] = format!("{}{more}", block[name].as_str().unwrap()).into();
            }
            "content_block_stop" => {
                let block = content.last_mut().unwrap();
                if block["type"] == "tool_use" && !input.is_empty() {
                    block["input"] = serde_json::from_str(&input).unwrap();
                }
            }
            "message_delta" => {
                for (name, value) in event["delta"].as_object().unwrap() {
                    message[name] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            kind => assert_eq!(kind, "message_stop"),
        }
    }
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    message
}

/// The same, but for names that are new each time.
fn without_ids(mut message: Value) -> Value {
    message["id"] = Value::Null;
    message["usage"] = split_usage(&message["usage"]).0;
    for block in message["content"].as_array_mut().unwrap() {
        if let Some(block) = block.as_object_mut() {
            block.remove("id");
        }
    }
    message
}

#[tokio::test]
async fn a_message() {
    let world = World::saying("Hé").await;
    let reply = world
        .post(
            MESSAGES,
            &body(json!({"system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]})),
        )
        .await
        .ok();
    assert!(reply["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        (&reply["type"], &reply["role"], &reply["model"]),
        (&json!("message"), &json!("assistant"), &json!("troika/nano"))
    );
    assert_eq!(reply["content"], json!([{"type": "text", "text": "Hé"}]));
    assert_eq!((&reply["stop_reason"], &reply["stop_sequence"]), (&json!("end_turn"), &json!(null)));
    let usage = json!({
        "input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 3,
    });
    assert_eq!(split_usage(&reply["usage"]).0, usage);
    assert_eq!(world.engine.requests()[0].prompt, [BOS, u32::from(b'S'), 258, 266, 259, 261]);
}

#[tokio::test]
async fn the_events_of_a_message() {
    let world = World::start(vec![Act::Token(b'a'.into()), Act::Token(261), Act::Token(b'b'.into())]).await;
    let events = events(&world, &body(json!({"thinking": {"type": "enabled", "budget_tokens": 2000}}))).await;
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(kinds, expected);
    let message = put_together(&events);
    let thinking = json!({"type": "thinking", "thinking": "a", "signature": "unsigned"});
    assert_eq!(message["content"], json!([thinking, {"type": "text", "text": "b"}]));
    assert_eq!(message["usage"]["output_tokens"], 3);
    assert_eq!(world.engine.requests()[0].prompt.last(), Some(&260), "the turn opens with thinking");
}

#[tokio::test]
async fn streamed_equals_whole() {
    let tool = json!([{"name": "look", "input_schema": {"type": "object"}}]);
    let world = World::with(Vec::new(), |state| state.texts = crate::tools::texts()).await;
    for (script, more) in [
        (says("plain"), json!({})),
        (says("one END two"), json!({"stop_sequences": ["END"]})),
        (says("cut off"), json!({"max_tokens": 3})),
        ([says("thought"), vec![Act::Token(261)], says("said")].concat(), json!({"thinking": {"type": "adaptive"}})),
        (
            [says("So:"), dsml_call("look", &[("at", "true", "it \"all\""), ("n", "false", "3")])].concat(),
            json!({"tools": tool}),
        ),
        (vec![], json!({})),
    ] {
        world.engine.play(script);
        let whole = world.post(MESSAGES, &body(more.clone())).await.ok();
        let streamed = put_together(&events(&world, &body(more.clone())).await);
        assert_eq!(without_ids(streamed), without_ids(whole), "{more}");
    }
}

#[tokio::test]
async fn how_messages_end() {
    let world = World::saying("one END two").await;
    let ended = world.post(MESSAGES, &body(json!({"stop_sequences": ["x", "END"]}))).await.ok();
    assert_eq!((&ended["stop_reason"], &ended["stop_sequence"]), (&json!("stop_sequence"), &json!("END")));
    let ended = world.post(MESSAGES, &body(json!({"max_tokens": 2}))).await.ok();
    assert_eq!((&ended["stop_reason"], &ended["content"][0]["text"]), (&json!("max_tokens"), &json!("on")));
}

#[tokio::test]
async fn a_conversation_with_tools() {
    let world = World::with(says("x"), |state| state.texts = crate::tools::texts()).await;
    let request = body(json!({
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "zzz"},
                {"type": "text", "text": "b", "citations": null},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"k": "v"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "r"}], "is_error": false},
                {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}},
            ]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
    }));
    world.post(MESSAGES, &request).await.ok();
    let text = crate::tools::spelled(&world.engine.requests()[0].prompt);
    for part in [
        "{\"name\": \"f\", \"description\": \"d\"",
        "name=\"f\"",
        "name=\"k\" string=\"true\">v<",
        "<tool_result>r</tool_result>\n\nc",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    // A beginning of the answer is gone on with.
    let begun = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    world.post(MESSAGES, &body(begun)).await.ok();
    assert_eq!(world.engine.requests()[1].prompt.last(), Some(&u32::from(b'b')));
}

#[tokio::test]
async fn tokens_are_counted_without_an_answer() {
    let world = World::saying("x").await;
    let request = json!({"model": "troika/nano", "messages": [{"role": "user", "content": "hello"}]});
    assert_eq!(world.post("/v1/messages/count_tokens", &request).await.ok(), json!({"input_tokens": 5}));
    assert!(world.engine.requests().is_empty());
    let reply = world.post("/v1/messages/count_tokens", &json!({})).await;
    assert_eq!((reply.status, &reply.json()["type"]), (400, &json!("error")));
}

#[tokio::test]
async fn what_is_refused() {
    let world = World::saying("x").await;
    let user = json!({"role": "user", "content": "x"});
    for (more, status, kind, word) in [
        (json!({"max_tokens": null}), 400, "invalid_request_error", "max_tokens"),
        (json!({"messages": []}), 400, "invalid_request_error", "messages"),
        (json!({"messages": [{"role": "system", "content": "x"}]}), 400, "invalid_request_error", "`messages`"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
            400,
            "invalid_request_error",
            "image",
        ),
        (
            json!({"messages": [user, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 3}]}, user]}),
            400,
            "invalid_request_error",
            "input",
        ),
        (
            json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
            400,
            "invalid_request_error",
            "tools[0].type",
        ),
        (json!({"tool_choice": {"type": "any"}}), 400, "invalid_request_error", "tool_choice"),
        (json!({"thinking": {"type": "sometimes"}}), 400, "invalid_request_error", "thinking.type"),
        (json!({"model": "claude-x"}), 404, "not_found_error", "claude-x"),
    ] {
        let reply = world.post(MESSAGES, &body(more.clone())).await;
        let error = &reply.json()["error"];
        assert_eq!((reply.status, error["type"].as_str()), (status, Some(kind)), "{more}: {error}");
        assert!(error["message"].as_str().unwrap().contains(word), "{more}: {error}");
        assert_eq!(reply.header("content-type"), Some("application/json"));
    }
    let reply = world.get(MESSAGES).await;
    assert_eq!((reply.status, &reply.json()["type"]), (405, &json!("error")));
    assert!(world.engine.requests().is_empty());
}

#[tokio::test]
async fn an_error_after_the_status() {
    let world = World::start(vec![Act::Token(b'a'.into()), Act::Fail("the model broke".into())]).await;
    let events = events(&world, &body(json!({}))).await;
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["message"]), (&json!("error"), &json!("the model broke")));
    assert!(!events.iter().any(|event| event["type"] == "message_stop"));
    world.engine.play(vec![Act::Token(EOS)]);
    assert_eq!(world.post(MESSAGES, &body(json!({}))).await.ok()["content"], json!([]));
}
