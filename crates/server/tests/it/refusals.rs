//! What is refused, and in which words. No request, however odd, is answered by a panic.

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use troika_server::parameters::{Endpoint, PARAMETERS};

use crate::{CHAT, COMPLETIONS, PATIENCE, World, chat, client, completion, says};

#[tokio::test]
async fn paths_and_methods() {
    let world = World::saying("").await;
    world.get("/v1/nothing").await.refuses(404, "not_found", None);
    world.get(&format!("/{}", "x".repeat(5000))).await.refuses(404, "not_found", None);
    let get = world.get(CHAT).await;
    get.refuses(405, "method_not_allowed", None);
    assert_eq!(get.header("allow"), Some("POST"));
    world.post("/v1/models", &json!({})).await.refuses(405, "method_not_allowed", None);
    client::send(world.address, "DELETE", "/health", &[], b"").await.refuses(405, "method_not_allowed", None);
}

#[tokio::test]
async fn bodies_that_are_not_requests() {
    let world = World::saying("").await;
    for path in [CHAT, COMPLETIONS] {
        let deep = "[".repeat(100_000);
        for body in ["", "{", "nonsense", "{\"messages\": [}", "\u{0}", "{\"seed\": 1e999}", deep.as_str()] {
            world.post_bytes(path, body.as_bytes()).await.refuses(400, "invalid_json", None);
        }
        for body in ["[]", "1", "null", "\"x\""] {
            world.post_bytes(path, body.as_bytes()).await.refuses(400, "invalid_json", None);
        }
        world.post_bytes(path, b"{\"prompt\": \"\xFF\xFE\"}").await.refuses(400, "invalid_json", None);
        for content_type in ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""] {
            let headers = [("content-type", content_type)];
            let reply = client::send(world.address, "POST", path, &headers, b"{}").await;
            reply.refuses(415, "unsupported_media_type", None);
        }
        client::send(world.address, "POST", path, &[], b"{}").await.refuses(415, "unsupported_media_type", None);
    }
    let headers = [("content-type", "Application/JSON; charset=utf-8")];
    let body = chat(json!({})).to_string();
    client::send(world.address, "POST", CHAT, &headers, body.as_bytes()).await.ok();
}

#[tokio::test]
async fn bodies_that_are_too_long() {
    let world = World::with(says("x"), |state| state.limits.max_body_bytes = 10_000).await;
    for len in [10_001, 30_000, 39_000] {
        let body = vec![b' '; len];
        world.post_bytes(CHAT, &body).await.refuses(413, "body_too_large", None);
    }
    let padded = format!("{}{}", chat(json!({})), " ".repeat(9000));
    world.post_bytes(CHAT, padded.as_bytes()).await.ok();
    // Without a length given, too.
    let chunk = format!("2710\r\n{}\r\n", " ".repeat(10_000));
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    );
    let reply = client::raw(world.address, format!("{head}{chunk}{chunk}0\r\n\r\n").as_bytes()).await;
    reply.refuses(413, "body_too_large", None);
}

#[tokio::test]
async fn bodies_that_do_not_come() {
    let world = World::with(says("x"), |state| state.limits.body_timeout = std::time::Duration::from_millis(50)).await;
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{");
    client::raw(world.address, head.as_bytes()).await.refuses(408, "timeout", None);
}

#[tokio::test]
async fn heads_that_are_too_long() {
    let world = World::saying("x").await;
    let head = format!("GET /health HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "y".repeat(500_000));
    // The server closes without reading on, and then the system may or may not deliver its 431.
    let mut socket = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let _ = socket.write_all(head.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut answer)).await.expect("closed in time");
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&answer));
    world.get("/health").await.ok();
}

#[tokio::test]
async fn values_that_are_wrong() {
    let world = World::saying("x").await;
    let huge: Value = serde_json::from_str("100000000000000000000000000").unwrap();
    let many = Value::from(vec!["x"; 17]);
    let long = Value::from("x".repeat(5000));
    let cases = [
        ("temperature", vec![json!(-0.1), json!(2.1), json!("1"), json!(true), huge.clone(), json!({})]),
        ("top_p", vec![json!(-0.1), json!(1.01), json!([])]),
        ("timeout", vec![json!(0), json!(-1), json!(86_401), json!("5")]),
        ("min_p", vec![json!(-0.1), json!(1.01)]),
        ("top_k", vec![json!(-2), json!(1.5), json!("1"), huge.clone()]),
        ("seed", vec![json!(1.5), json!("1"), huge.clone()]),
        ("max_tokens", vec![json!(0), json!(-1), json!(1.5), json!("9"), huge]),
        ("stop", vec![json!(1), json!(""), json!(["x", ""]), json!(["x", null]), json!({}), many, long]),
        ("stream", vec![json!("true"), json!(1)]),
        ("stream_options", vec![json!({}), json!({"include_usage": true})]),
        ("model", vec![json!(5), json!([])]),
    ];
    for (name, values) in cases {
        for value in values {
            for (path, body) in [(CHAT, chat(json!({name: value}))), (COMPLETIONS, completion(json!({name: value})))] {
                world.post(path, &body).await.refuses(400, "invalid_value", Some(name));
            }
        }
    }
    let max_tokens = json!({"max_tokens": 5, "max_completion_tokens": 6});
    world.post(CHAT, &chat(max_tokens)).await.refuses(400, "invalid_value", Some("max_tokens"));
    assert!(world.engine.requests().is_empty(), "nothing of this reached the engine");
}

#[tokio::test]
async fn stream_options_are_checked() {
    let world = World::saying("x").await;
    for (options, code, param) in [
        (json!(true), "invalid_value", "stream_options"),
        (json!({"include_usage": 1}), "invalid_value", "stream_options.include_usage"),
        (json!({"include_obfuscation": true}), "unsupported_value", "stream_options.include_obfuscation"),
        (json!({"other": true}), "unsupported_parameter", "stream_options.other"),
    ] {
        let body = chat(json!({"stream": true, "stream_options": options}));
        world.post(CHAT, &body).await.refuses(400, code, Some(param));
    }
}

#[tokio::test]
async fn other_models_are_not_here() {
    let world = World::saying("x").await;
    for model in ["gpt-4o", "", "troika/nano2"] {
        for (path, body) in [(CHAT, chat(json!({"model": model}))), (COMPLETIONS, completion(json!({"model": model})))]
        {
            world.post(path, &body).await.refuses(404, "model_not_found", Some("model"));
        }
    }
    let long = world.post(CHAT, &chat(json!({"model": "é".repeat(100_000)}))).await;
    long.refuses(404, "model_not_found", Some("model"));
    assert!(long.body.len() < 1000, "a message does not repeat megabytes");
}

#[tokio::test]
async fn prompts_that_are_wrong() {
    let world = World::saying("x").await;
    for prompt in [
        json!(null),
        json!(5),
        json!({}),
        json!([]),
        json!([[]]),
        json!(["a", "b"]),
        json!([[1], [2]]),
        json!([1, "a"]),
        json!([1, -1]),
        json!([1, 1.5]),
        json!([1, 4_294_967_296u64]),
        json!([[["a"]]]),
    ] {
        let reply = world.post(COMPLETIONS, &json!({"prompt": prompt})).await;
        reply.refuses(400, "invalid_value", Some("prompt"));
    }
    world.post(COMPLETIONS, &json!({})).await.refuses(400, "invalid_value", Some("prompt"));
}

#[tokio::test]
async fn messages_that_are_wrong() {
    let world = World::saying("x").await;
    let user = json!({"role": "user", "content": "x"});
    for (messages, code, param) in [
        (json!(null), "invalid_value", "messages"),
        (json!("x"), "invalid_value", "messages"),
        (json!([]), "invalid_value", "messages"),
        (json!([5]), "invalid_value", "messages[0]"),
        (json!([user, {"role": "assistant", "content": "x"}]), "invalid_value", "messages"),
        (json!([{"role": "system", "content": "x"}]), "invalid_value", "messages"),
        (json!([{"content": "x"}]), "invalid_value", "messages[0].role"),
        (json!([{"role": 5, "content": "x"}]), "invalid_value", "messages[0].role"),
        (json!([user, {"role": "function", "content": "x"}]), "invalid_value", "messages[1].role"),
        (json!([user, {"role": "tool", "content": "x"}]), "invalid_value", "messages[1].tool_call_id"),
        (json!([{"role": "developer", "content": "x"}]), "invalid_value", "messages"),
        (json!([{"role": "user"}]), "invalid_value", "messages[0].content"),
        (json!([{"role": "user", "content": null}]), "invalid_value", "messages[0].content"),
        (json!([{"role": "user", "content": 5}]), "invalid_value", "messages[0].content"),
        (json!([{"role": "user", "content": ["x"]}]), "invalid_value", "messages[0].content[0]"),
        (json!([{"role": "user", "content": [{"text": "x"}]}]), "invalid_value", "messages[0].content[0].type"),
        (json!([{"role": "user", "content": [{"type": "text"}]}]), "invalid_value", "messages[0].content[0].text"),
        (
            json!([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]}]),
            "invalid_value",
            "messages[0].content[1].type",
        ),
        (
            json!([{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]),
            "unsupported_parameter",
            "messages[0].content[0].more",
        ),
        (json!([{"role": "user", "content": "x", "name": "Jo"}]), "unsupported_parameter", "messages[0].name"),
        (
            json!([user, {"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}, user]),
            "invalid_value",
            "messages[1].tool_calls[0].function",
        ),
        (
            json!([{"role": "user", "content": "x", "reasoning_content": "x"}]),
            "unsupported_parameter",
            "messages[0].reasoning_content",
        ),
    ] {
        world.post(CHAT, &json!({"messages": messages})).await.refuses(400, code, Some(param));
    }
    assert!(world.engine.requests().is_empty());
}

#[tokio::test]
async fn prompts_that_do_not_fit() {
    let world = World::with(says("x"), |state| state.max_context_tokens = 10).await;
    world.post(COMPLETIONS, &json!({"prompt": "123456789"})).await.refuses(400, "context_length_exceeded", None);
    world.post(COMPLETIONS, &json!({"prompt": "1".repeat(100_000)})).await.refuses(
        400,
        "context_length_exceeded",
        None,
    );
    world.post(COMPLETIONS, &json!({"prompt": "12345678"})).await.ok();
    assert_eq!(world.engine.requests()[0].max_new_tokens, 1);
    let body = json!({"messages": [{"role": "user", "content": "123456"}]});
    world.post(CHAT, &body).await.refuses(400, "context_length_exceeded", None);
    // An engine with a smaller limit than we believe says so itself.
    let world = World::with(says("x"), |state| state.max_context_tokens = 100_000).await;
    let body = completion(json!({"prompt": "1".repeat(5000)}));
    world.post(COMPLETIONS, &body).await.refuses(400, "context_length_exceeded", None);
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_back() {
    let world = World::saying("x").await;
    world.engine.limit_requests(0);
    for body in [chat(json!({})), chat(json!({"stream": true}))] {
        let reply = world.post(CHAT, &body).await;
        reply.refuses(429, "queue_full", None);
        // What the engine reckons.
        assert_eq!(reply.header("retry-after"), Some("7"));
        assert!(reply.header("retry-after").unwrap().parse::<u32>().unwrap() > 0);
    }
    world.engine.limit_requests(9);
    world.post(CHAT, &chat(json!({}))).await.ok();
}

#[tokio::test]
async fn a_stopped_engine_is_unavailable() {
    let world = World::saying("x").await;
    world.engine.stop("the device is gone");
    let reply = world.post(CHAT, &chat(json!({}))).await;
    reply.refuses(503, "engine_stopped", None);
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("the device is gone"));
}

#[tokio::test]
async fn a_tokenizer_without_markers_cannot_chat() {
    use troika_prompt::Tokenizer;
    use troika_testkit::tokenizer::{MARKERS, TokenizerSpec};
    let spec = TokenizerSpec { markers: MARKERS[..2].to_vec(), ..TokenizerSpec::plain() };
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", &spec.to_json()).unwrap();
    let world = World::with(says("x"), |state| state.tokenizer = tokenizer.into()).await;
    let reply = world.post(CHAT, &chat(json!({}))).await;
    reply.refuses(400, "unsupported_by_model", None);
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("<｜User｜>"));
    world.post(COMPLETIONS, &completion(json!({}))).await.ok();
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![
            Just("text".to_owned()),
            Just("user".to_owned()),
            Just("assistant".to_owned()),
            Just("function".to_owned()),
            "\\PC{0,6}"
        ]
        .prop_map(Value::from),
    ];
    let name = prop_oneof![
        Just("role".to_owned()),
        Just("content".to_owned()),
        Just("type".to_owned()),
        Just("text".to_owned()),
        Just("name".to_owned()),
        Just("function".to_owned()),
        Just("input".to_owned()),
        "[a-z]{0,3}"
    ];
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(name.clone(), inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Any value for any parameter is served or refused, never a server error.
#[test]
fn odd_values_are_never_our_fault() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let world = runtime.block_on(World::saying("x"));
    let names = prop::sample::select(PARAMETERS).prop_map(|row| row.name);
    let fields = proptest::collection::vec((names, any_json()), 1..3);
    let endpoints = prop::sample::select(&Endpoint::ALL[..]);
    let mut runner = TestRunner::new(Config::with_cases(600));
    let result = runner.run(&(fields, endpoints), |(fields, endpoint)| {
        let more = Value::Object(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect());
        let body = crate::with(crate::minimal(endpoint), more);
        let reply = runtime.block_on(world.post(endpoint.path(), &body));
        prop_assert!([200, 400, 404].contains(&reply.status), "{} for {}", reply.status, body);
        Ok(())
    });
    result.unwrap();
}
