//! What each route answers.

use serde_json::{Value, json};
use troika_engine::api::FinishReason;
use troika_testkit::scripted::Act;

use crate::{BOS, CHAT, COMPLETIONS, EOS, World, chat, completion, says, split_usage};

#[tokio::test]
async fn models_are_listed() {
    let world = World::saying("").await;
    let model = json!({"id": "troika/nano", "object": "model", "created": 1_700_000_000, "owned_by": "troika"});
    assert_eq!(world.get("/v1/models").await.ok(), json!({"object": "list", "data": [model]}));
    assert_eq!(world.get("/v1/models/troika/nano").await.ok(), model);
    assert_eq!(world.get("/v1/models/troika%2Fnano").await.ok(), model);
    world.get("/v1/models/other").await.refuses(404, "model_not_found", Some("model"));
}

#[tokio::test]
async fn health_tells_the_truth() {
    let world = World::saying("").await;
    let ok = json!({"status": "ok", "reason": null, "model": "troika/nano", "queued": 0, "running": 0, "hybrid": null});
    assert_eq!(world.get("/health").await.ok(), ok);
    world.engine.stop("out of luck");
    let failed = world.get("/health").await;
    assert_eq!(
        (failed.status, &failed.json()["status"], &failed.json()["reason"]),
        (503, &json!("failed"), &json!("out of luck"))
    );

    let degraded = World::with(says(""), |state| state.degraded = Some("no NPU here".into())).await;
    let reply = degraded.get("/health").await.ok();
    assert_eq!((&reply["status"], &reply["reason"]), (&json!("degraded"), &json!("no NPU here")));
}

#[tokio::test]
async fn a_completion() {
    let world = World::saying("Grüße 😀").await;
    let reply = world.post(COMPLETIONS, &completion(json!({"model": "troika/nano"}))).await.ok();
    assert!(reply["id"].as_str().unwrap().starts_with("cmpl-"));
    assert!(reply["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!((&reply["object"], &reply["model"]), (&json!("text_completion"), &json!("troika/nano")));
    let choice = json!({"index": 0, "text": "Grüße 😀", "logprobs": null, "finish_reason": "stop"});
    assert_eq!(reply["choices"], json!([choice]));
    let usage = json!({
        "prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    });
    assert_eq!(split_usage(&reply["usage"]).0, usage);
    let request = &world.engine.requests()[0];
    assert_eq!(request.prompt, [BOS, 266]);
    assert_eq!(request.stop_tokens, [EOS]);
}

#[tokio::test]
async fn an_answer_that_no_token_ends() {
    let world = World::saying("Hi").await;
    world.post(COMPLETIONS, &completion(json!({"ignore_eos": true, "max_tokens": 3}))).await.ok();
    world.post(CHAT, &chat(json!({"ignore_eos": true, "max_tokens": 3}))).await.ok();
    assert!(world.engine.requests().iter().all(|request| request.stop_tokens.is_empty()));
    let format = json!({"ignore_eos": true, "response_format": {"type": "json_object"}});
    world.post(CHAT, &chat(format)).await.refuses(400, "invalid_value", Some("ignore_eos"));
}

#[tokio::test]
async fn a_chat() {
    let world = World::saying("Hi").await;
    let reply = world.post(CHAT, &chat(json!({}))).await.ok();
    assert!(reply["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(reply["object"], "chat.completion");
    let message = json!({"role": "assistant", "content": "Hi", "refusal": null});
    assert_eq!(reply["choices"], json!([{"index": 0, "message": message, "logprobs": null, "finish_reason": "stop"}]));
    assert_eq!(reply["usage"]["total_tokens"], 5 + 2);
    // BOS, user, "hello", assistant, end of thinking; and all the context that is left.
    let request = &world.engine.requests()[0];
    assert_eq!(request.prompt, [BOS, 258, 266, 259, 261]);
    assert_eq!(request.max_new_tokens, 4096 - 5);
}

#[tokio::test]
async fn a_conversation_is_encoded_turn_by_turn() {
    let world = World::saying("x").await;
    let messages = json!([
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "<think>", "reasoning_content": "gone", "refusal": null, "tool_calls": [], "audio": null},
        {"role": "user", "content": "<｜User｜>"},
    ]);
    world.post(CHAT, &json!({"messages": messages})).await.ok();
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let expected = [
        vec![BOS],
        bytes("S"),
        vec![258],
        bytes("a\n\nb"),
        vec![259, 261],
        bytes("<think>"),
        vec![EOS, 258],
        bytes("<｜User｜>"),
        vec![259, 261],
    ];
    // Bytes of the forged marker that the merges join: none.
    assert_eq!(world.engine.requests()[0].prompt, expected.concat());
}

#[tokio::test]
async fn prompts_of_tokens() {
    let world = World::saying("x").await;
    for (prompt, tokens) in [
        (json!([1, 2, 300]), vec![1, 2, 300]),
        (json!([[7]]), vec![7]),
        (json!(["hello"]), vec![BOS, 266]),
        (json!(""), vec![BOS]),
    ] {
        world.post(COMPLETIONS, &json!({"prompt": prompt})).await.ok();
        assert_eq!(world.engine.requests().pop().unwrap().prompt, tokens);
    }
    // The engine knows how many tokens there are.
    world.post(COMPLETIONS, &json!({"prompt": [1, 2_000_000]})).await.refuses(400, "invalid_value", None);
}

#[tokio::test]
async fn parameters_reach_the_engine() {
    let world = World::saying("x").await;
    world.post(COMPLETIONS, &json!({"prompt": "x"})).await.ok();
    let default = world.engine.requests().pop().unwrap();
    assert_eq!(default.max_new_tokens, 16);
    assert_eq!((default.sampling.temperature, default.sampling.top_p), (0.25, 0.75));
    assert_eq!((default.sampling.top_k, default.sampling.min_p), (0, 0.0));

    let asked = json!({"max_tokens": 7, "temperature": 1.5, "top_p": 0.5, "top_k": 40, "min_p": 0.125, "seed": 99});
    for (path, body) in [(CHAT, chat(asked.clone())), (COMPLETIONS, completion(asked))] {
        world.post(path, &body).await.ok();
        let request = world.engine.requests().pop().unwrap();
        assert_eq!(request.max_new_tokens, 7);
        let sampling = request.sampling;
        assert_eq!((sampling.temperature, sampling.top_p, sampling.min_p), (1.5, 0.5, 0.125));
        assert_eq!((sampling.top_k, sampling.seed), (40, 99));
    }

    let edges = json!({"temperature": 1e-30, "top_p": 0, "top_k": -1, "min_p": 1, "seed": -1, "max_completion_tokens": u64::MAX});
    world.post(CHAT, &chat(edges)).await.ok();
    let request = world.engine.requests().pop().unwrap();
    assert_eq!((request.sampling.temperature, request.sampling.top_k, request.sampling.seed), (0.0, 0, u64::MAX));
    assert!(request.sampling.top_p > 0.0, "a set of no tokens cannot be asked for");
    assert_eq!(request.max_new_tokens, 4096 - 5);

    world.post(CHAT, &chat(json!({"max_tokens": 5, "max_completion_tokens": 5}))).await.ok();
    assert_eq!(world.engine.requests().pop().unwrap().max_new_tokens, 5);
    let nulls =
        json!({"temperature": null, "seed": null, "stop": null, "tools": null, "stream_options": null, "model": null});
    world.post(CHAT, &chat(nulls)).await.ok();
}

#[tokio::test]
async fn seeds_are_fresh_unless_given() {
    let world = World::saying("x").await;
    for _ in 0..8 {
        world.post(CHAT, &chat(json!({}))).await.ok();
    }
    let mut seeds: Vec<u64> = world.engine.requests().iter().map(|request| request.sampling.seed).collect();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 8);
}

#[tokio::test]
async fn finish_reasons() {
    let finish = |reason| vec![Act::Token(b'x'.into()), Act::Finish(reason)];
    let world = World::saying("").await;
    for (script, more, text, reason) in [
        (says("abc"), json!({}), "abc", "stop"),
        (vec![Act::Token(b'a'.into()), Act::Token(EOS), Act::Token(b'b'.into())], json!({}), "a", "stop"),
        (says("abcdef"), json!({"max_tokens": 3}), "abc", "length"),
        (finish(FinishReason::Length), json!({}), "x", "length"),
        (finish(FinishReason::ContextFull), json!({}), "x", "length"),
        (says("ab, END and more"), json!({"stop": " END"}), "ab,", "stop"),
        (says("ab, END and more"), json!({"stop": ["more", "and", "b, E"]}), "a", "stop"),
        // Half a stop string, and half a character, are text when no more comes.
        (says("ab EN"), json!({"stop": "END"}), "ab EN", "stop"),
        (says("ab ENx"), json!({"stop": "END", "max_tokens": 5}), "ab EN", "length"),
        (says("😀"), json!({"max_tokens": 3}), "\u{FFFD}", "length"),
        (says("ab"), json!({"stop": "ab"}), "", "stop"),
        // Markers are not text.
        (vec![Act::Token(258), Act::Token(b'x'.into()), Act::Token(261)], json!({}), "x", "stop"),
        (vec![], json!({}), "", "stop"),
    ] {
        world.engine.play(script);
        for (path, body, place) in [
            (CHAT, chat(more.clone()), "/choices/0/message/content"),
            (COMPLETIONS, completion(more.clone()), "/choices/0/text"),
        ] {
            let reply = world.post(path, &body).await.ok();
            assert_eq!(reply.pointer(place), Some(&Value::from(text)), "{more}");
            assert_eq!(reply["choices"][0]["finish_reason"], reason, "{more}");
        }
    }
}

/// Connections are kept and used again.
#[tokio::test]
async fn one_connection_serves_many_requests() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let world = World::saying("x").await;
    let mut socket = tokio::net::TcpStream::connect(world.address).await.unwrap();
    for _ in 0..3 {
        socket.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let mut buffer = [0; 4096];
        let len = socket.read(&mut buffer).await.unwrap();
        assert!(buffer[..len].starts_with(b"HTTP/1.1 200"));
    }
}
