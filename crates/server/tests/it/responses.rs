//! `/v1/responses`.

use serde_json::{Value, json};
use troika_testkit::scripted::Act;

use crate::{
    World, client, says, split_usage,
    tools::{dsml_call, spelled, texts},
    with,
};

const RESPONSES: &str = "/v1/responses";

fn body(more: Value) -> Value {
    with(json!({"input": "hello"}), more)
}

async fn events(world: &World, body: &Value) -> Vec<Value> {
    let mut stream = world.stream(RESPONSES, &with(body.clone(), json!({"stream": true}))).await;
    let mut events = Vec::new();
    while let Some(block) = stream.block().await {
        let (name, data) = block.split_once('\n').expect("a named event");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        assert_eq!(data["sequence_number"], events.len());
        events.push(data);
    }
    events
}

fn without_ids(mut response: Value) -> Value {
    for name in ["id", "created_at"] {
        response[name] = Value::Null;
    }
    if response["usage"].is_object() {
        response["usage"] = split_usage(&response["usage"]).0;
    }
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = Value::Null;
        item.as_object_mut().unwrap().remove("call_id");
    }
    response
}

#[tokio::test]
async fn a_response() {
    let world = World::saying("Hé").await;
    let reply = world.post(RESPONSES, &body(json!({"instructions": "S", "metadata": {"a": "b"}}))).await.ok();
    assert!(reply["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!((&reply["object"], &reply["status"]), (&json!("response"), &json!("completed")));
    let item = &reply["output"][0];
    assert_eq!(
        (&item["type"], &item["role"], &item["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    assert_eq!(item["content"], json!([{"type": "output_text", "text": "Hé", "annotations": [], "logprobs": []}]));
    assert_eq!((&reply["instructions"], &reply["metadata"]), (&json!("S"), &json!({"a": "b"})));
    assert_eq!((&reply["temperature"], &reply["tool_choice"]), (&json!(0.25), &json!("auto")));
    let usage = json!({
        "input_tokens": 6, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 9,
    });
    assert_eq!(split_usage(&reply["usage"]).0, usage);
}

#[tokio::test]
async fn streamed_equals_whole() {
    let world = World::with(Vec::new(), |state| state.texts = texts()).await;
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": false}]);
    for (script, more, kinds) in [
        (says("plain"), json!({}), vec!["message"]),
        (says("cut off"), json!({"max_output_tokens": 3}), vec!["message"]),
        (
            [says("t"), vec![Act::Token(261)], says("c")].concat(),
            json!({"reasoning": {"effort": "low", "summary": "auto"}}),
            vec!["reasoning", "message"],
        ),
        (
            [says("c"), dsml_call("f", &[("k", "true", "v")]), dsml_call("f", &[])].concat(),
            json!({"tools": tools}),
            vec!["message", "function_call", "function_call"],
        ),
        (vec![], json!({}), vec![]),
    ] {
        world.engine.play(script);
        let whole = world.post(RESPONSES, &body(more.clone())).await.ok();
        let events = events(&world, &body(more.clone())).await;
        let last = events.last().unwrap();
        let status = if more.get("max_output_tokens").is_some() { "incomplete" } else { "completed" };
        assert_eq!(last["type"], format!("response.{status}"));
        assert_eq!(
            (&events[0]["type"], &events[1]["type"]),
            (&json!("response.created"), &json!("response.in_progress"))
        );
        assert_eq!(without_ids(last["response"].clone()), without_ids(whole.clone()));
        let items: Vec<&str> =
            whole["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(items, kinds);
        // The pieces are the whole.
        for (idx, item) in last["response"]["output"].as_array().unwrap().iter().enumerate() {
            let deltas =
                events.iter().filter(|event| event["output_index"] == idx).filter_map(|event| event["delta"].as_str());
            let joined: String = deltas.collect();
            let text = item["content"][0]["text"].as_str().or(item["arguments"].as_str()).unwrap();
            assert_eq!(joined, text);
            assert!(events.iter().any(|event| event["type"] == "response.output_item.done" && event["item"] == *item));
        }
    }
}

#[tokio::test]
async fn stored_and_gone_on_from() {
    let world = World::saying("b").await;
    let first = world.post(RESPONSES, &body(json!({"input": "a", "instructions": "S"}))).await.ok();
    let path = format!("{RESPONSES}/{}", first["id"].as_str().unwrap());
    assert_eq!(world.get(&path).await.ok(), first);
    let next = body(
        json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "c"}]}], "previous_response_id": first["id"], "stream": true}),
    );
    let second = events(&world, &next).await.pop().unwrap()["response"].clone();
    assert_eq!(second["previous_response_id"], first["id"]);
    let text = spelled(&world.engine.requests()[1].prompt);
    assert!(
        text.ends_with("<｜User｜>a<｜Assistant｜></think>b<｜end▁of▁sentence｜><｜User｜>c<｜Assistant｜></think>"),
        "{text}"
    );
    assert!(!text.contains('S'), "instructions are not carried over");
    let third = world.post(RESPONSES, &body(json!({"previous_response_id": second["id"]}))).await.ok();
    assert_eq!(third["status"], "completed");
    assert!(spelled(&world.engine.requests()[2].prompt).contains("<｜User｜>c"));

    let deleted = client::send(world.address, "DELETE", &path, &[], b"").await.ok();
    assert_eq!((&deleted["id"], &deleted["deleted"]), (&first["id"], &json!(true)));
    world.get(&path).await.refuses(404, "response_not_found", None);
    client::send(world.address, "DELETE", &path, &[], b"").await.refuses(404, "response_not_found", None);
    let unstored = world.post(RESPONSES, &body(json!({"store": false}))).await.ok();
    world.get(&format!("{RESPONSES}/{}", unstored["id"].as_str().unwrap())).await.refuses(
        404,
        "response_not_found",
        None,
    );
}

#[tokio::test]
async fn a_conversation_of_items() {
    let world = World::with(says("x"), |state| state.texts = texts()).await;
    let input = json!([
        {"type": "message", "role": "developer", "content": "D"},
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}], "encrypted_content": null},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{\"k\": 1}", "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "r"},
    ]);
    world.post(RESPONSES, &json!({"input": input})).await.ok();
    let text = spelled(&world.engine.requests()[0].prompt);
    for part in
        ["D<｜User｜>a<｜Assistant｜></think>b", "name=\"k\" string=\"false\">1<", "<tool_result>r</tool_result>"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[tokio::test]
async fn what_is_refused() {
    let world = World::saying("x").await;
    for (more, code, param) in [
        (json!({"input": null}), "invalid_value", "input"),
        (json!({"input": []}), "invalid_value", "input"),
        (json!({"input": [{"role": "assistant", "content": "x"}]}), "invalid_value", "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "invalid_value", "input[0].type"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "invalid_value",
            "input[0].content[0].type",
        ),
        (json!({"tools": [{"type": "web_search"}]}), "invalid_value", "tools[0].type"),
        (json!({"text": {"verbosity": "high"}}), "unsupported_value", "text.verbosity"),
        (json!({"conversation": "x"}), "unsupported_parameter", "conversation"),
    ] {
        world.post(RESPONSES, &body(more)).await.refuses(400, code, Some(param));
    }
    let reply = world.post(RESPONSES, &body(json!({"previous_response_id": "resp_x"}))).await;
    reply.refuses(404, "response_not_found", Some("previous_response_id"));
}

#[tokio::test]
async fn an_error_after_the_status() {
    let world = World::start(vec![Act::Token(b'a'.into()), Act::Fail("the model broke".into())]).await;
    let events = events(&world, &body(json!({}))).await;
    let kinds: Vec<&str> = events.iter().rev().take(2).map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["response.failed", "error"]);
    assert_eq!(events.last().unwrap()["response"]["error"]["message"], "the model broke");
}
