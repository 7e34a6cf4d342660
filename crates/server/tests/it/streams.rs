//! Streams say what whole answers say, and never end like an answer when they are none.

use std::time::Duration;

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use serde_json::{Value, json};
use troika_engine::api::FinishReason;
use troika_testkit::scripted::{Act, End};

use crate::{CHAT, COMPLETIONS, World, chat, completion, outcomes, says, split_usage, with};

#[tokio::test]
async fn the_events_of_a_chat() {
    let world = World::saying("Hé").await;
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let mut stream = world.stream(CHAT, &body).await;
    let head = stream.head.to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 200") && head.contains("content-type: text/event-stream\r\n"), "{head}");
    let mut events = stream.rest().await;
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    for event in &events {
        assert_eq!((&event["id"], &event["created"]), (&events[0]["id"], &events[0]["created"]));
        assert_eq!((&event["object"], &event["model"]), (&json!("chat.completion.chunk"), &json!("troika/nano")));
    }
    let choice = |delta: Value, finish_reason: Value| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason}]);
    let choices: Vec<&Value> = events.iter().map(|event| &event["choices"]).collect();
    let expected = [
        choice(json!({"role": "assistant", "content": ""}), json!(null)),
        choice(json!({"content": "H"}), json!(null)),
        choice(json!({"content": "é"}), json!(null)),
        choice(json!({}), json!("stop")),
        json!([]),
    ];
    assert_eq!(choices, expected.iter().collect::<Vec<_>>());
    assert!(events[..4].iter().all(|event| event.get("usage") == Some(&Value::Null)));
    assert_eq!(events[4]["usage"]["completion_tokens"], 3);
}

#[tokio::test]
async fn the_events_of_a_completion() {
    let world = World::saying("ab").await;
    let mut stream = world.stream(COMPLETIONS, &completion(json!({"stream": true}))).await;
    let events = stream.rest().await;
    assert_eq!(events.len(), 4);
    let event: Value = serde_json::from_str(&events[1]).unwrap();
    assert_eq!(event["object"], "text_completion");
    assert_eq!(event["choices"], json!([{"index": 0, "text": "b", "logprobs": null, "finish_reason": null}]));
    assert!(event.get("usage").is_none(), "nobody asked");
}

/// The same request, streamed and not, gives the same text, ending and counts, whatever tokens and stops it has.
#[test]
fn streamed_equals_whole() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let world = runtime.block_on(World::saying(""));
    let letters = prop_oneof![
        6 => "[ab é😀]".prop_map(|text: String| text.into_bytes().into_iter().map(u32::from).collect::<Vec<_>>()),
        1 => (0u32..280).prop_filter("not the end", |token| *token != crate::EOS).prop_map(|token| vec![token]),
    ];
    let tokens = proptest::collection::vec(letters, 0..24).prop_map(|tokens| tokens.concat());
    let stops = proptest::collection::vec("[ab é😀]{1,3}", 0..3);
    let mut runner = TestRunner::new(Config::with_cases(96));
    let result = runner.run(&(tokens, stops, 1usize..60, any::<bool>()), |(tokens, stops, max_tokens, is_chat)| {
        world.engine.play(tokens.iter().map(|token| Act::Token(*token)).collect());
        let more = json!({"stop": stops, "max_tokens": max_tokens});
        let (path, body) = if is_chat { (CHAT, chat(more)) } else { (COMPLETIONS, completion(more)) };
        let (whole, streamed) = runtime.block_on(async {
            let whole = world.post(path, &body).await.ok();
            let options = json!({"stream": true, "stream_options": {"include_usage": true}});
            (whole, world.stream(path, &with(body, options)).await.collect().await)
        });
        let choice = &whole["choices"][0];
        let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
        prop_assert!(streamed.is_done && streamed.error.is_none());
        prop_assert_eq!(Some(streamed.text.as_str()), text);
        prop_assert_eq!(streamed.finish_reason.as_deref(), choice["finish_reason"].as_str());
        prop_assert_eq!(
            streamed.usage.as_ref().map(|usage| split_usage(usage).0),
            Some(split_usage(&whole["usage"]).0)
        );
        prop_assert!(stops.iter().all(|stop| !streamed.text.contains(stop)));
        Ok(())
    });
    result.unwrap();
}

#[tokio::test]
async fn a_stop_string_ends_the_generation() {
    let mut script = says("abc");
    script.push(Act::Forever(b'x'.into(), Duration::from_millis(5)));
    let world = World::start(script).await;
    for stream in [false, true] {
        let body = chat(json!({"stop": "cx", "stream": stream}));
        let body = if stream { body } else { with(body, json!({"stream": null})) };
        if stream {
            let collected = world.stream(CHAT, &body).await.collect().await;
            assert_eq!((collected.text.as_str(), collected.finish_reason.as_deref()), ("ab", Some("stop")));
        } else {
            assert_eq!(world.post(CHAT, &body).await.ok()["choices"][0]["message"]["content"], "ab");
        }
        let outcome = *outcomes(&world.engine, 1 + usize::from(stream)).await.last().unwrap();
        assert!(matches!(outcome.end, End::Gone | End::Finished(FinishReason::Cancelled)), "{outcome:?}");
        assert!((4..=5).contains(&outcome.tokens_taken), "{outcome:?}");
    }
}

#[tokio::test]
async fn failures_after_the_status_are_error_events() {
    let world = World::saying("").await;
    for (act, code) in [
        (Act::Fail("the model broke".into()), "engine_error"),
        (Act::Finish(FinishReason::Cancelled), "cancelled"),
        (Act::Finish(FinishReason::Shutdown), "shutting_down"),
        (Act::Vanish, "generation_lost"),
    ] {
        world.engine.play(vec![Act::Token(b'a'.into()), act]);
        for (path, body) in [(CHAT, chat(json!({}))), (COMPLETIONS, completion(json!({})))] {
            let streamed = world.stream(path, &with(body.clone(), json!({"stream": true}))).await.collect().await;
            assert_eq!(streamed.text, "a");
            assert_eq!(streamed.error.expect("an error")["code"], code);
            assert_eq!((streamed.finish_reason, streamed.is_done), (None, false), "no normal finish");
            // Before the status is out it is the status.
            let status = if code == "shutting_down" { 503 } else { 500 };
            world.post(path, &body).await.refuses(status, code, None);
        }
    }
    world.engine.play(vec![Act::Fail("the model broke".into())]);
    let reply = world.post(CHAT, &chat(json!({}))).await;
    assert_eq!(reply.json()["error"]["message"], "the model broke");
}

#[tokio::test]
async fn silence_is_filled_with_comments() {
    let mut script = vec![Act::Prefilled(1), Act::Pause(Duration::from_secs(2)), Act::Prefilled(2)];
    script.extend(says("ok"));
    let world = World::with(script, |state| state.limits.keep_alive = Duration::from_millis(20)).await;
    let mut stream = world.stream(CHAT, &chat(json!({"stream": true}))).await;
    let mut comments = 0;
    let mut text = String::new();
    while let Some(block) = stream.block().await {
        match block.strip_prefix("data: ") {
            None => {
                assert_eq!(block, ": keep-alive");
                comments += 1;
            }
            Some("[DONE]") => break,
            Some(data) => {
                let event: Value = serde_json::from_str(data).unwrap();
                text += event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
            }
        }
    }
    assert!(comments >= 1, "{comments}");
    assert_eq!(text, "ok");
}
