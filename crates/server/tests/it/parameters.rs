//! `docs/api.md` against the server: each row of the parameter table is tried.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Value, json};
use troika_server::{
    openapi,
    parameters::{Endpoint, Handling, PARAMETERS},
};

use crate::{CHAT, COMPLETIONS, Reply, World, chat, completion, minimal, with};

/// Values of applied parameters. Those of the others must not matter, or are in the table.
fn example(name: &str, endpoint: Endpoint) -> Value {
    match (name, endpoint) {
        ("model", _) => json!("troika/nano"),
        ("messages", _) => json!([{"role": "user", "content": "x"}]),
        ("max_tokens" | "max_completion_tokens" | "max_output_tokens" | "top_k" | "seed" | "n", _)
        | ("logprobs" | "timeout", Endpoint::Completions) => json!(3),
        ("timeout", _) => json!(30.5),
        ("service_tier", _) => json!("priority"),
        ("temperature" | "top_p" | "min_p" | "frequency_penalty" | "presence_penalty" | "repetition_penalty", _) => {
            json!(0.5)
        }
        ("logit_bias", _) => json!({"7": -100, "8": 1.5}),
        ("stream" | "echo" | "ignore_eos" | "logprobs" | "parallel_tool_calls" | "store", _) => json!(true),
        ("stream_options", _) => json!({"include_usage": true}),
        ("top_logprobs", _) => json!(2),
        ("tools", _) => json!([]),
        ("tool_choice", Endpoint::Messages) => json!({"type": "auto"}),
        ("tool_choice", _) => json!("auto"),
        ("reasoning_effort", _) => json!("low"),
        ("thinking", Endpoint::Messages) => json!({"type": "enabled", "budget_tokens": 1024}),
        ("thinking", _) => json!({"type": "enabled"}),
        ("reasoning" | "output_config", _) => json!({"effort": "low"}),
        ("response_format", _) => json!({"type": "text"}),
        ("text", _) => json!({"format": {"type": "text"}}),
        ("prompt" | "stop" | "input" | "instructions" | "system" | "stop_sequences", _) => json!("x"),
        _ => json!({"any": ["thing", 1]}),
    }
}

/// One cell of the table: `applied`, `no-op`, `refused`, or ``only `VALUE`, `VALUE` ``.
fn describe(handling: Handling) -> String {
    match handling {
        Handling::Applied => "applied".into(),
        Handling::NoOp => "no-op".into(),
        Handling::Refused => "refused".into(),
        Handling::Only(values) => {
            let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
            format!("only {}", values.join(", "))
        }
    }
}

#[test]
fn the_documented_table_is_the_real_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
    let docs = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let table = docs.split_once("## Parameters").and_then(|(_, rest)| rest.split("\n## ").next()).expect("the section");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    let documented: BTreeMap<&str, Vec<&str>> = rows
        .map(|(name, cells)| (name, cells.trim_end_matches('|').split('|').map(str::trim).take(4).collect()))
        .collect();
    let real = PARAMETERS.iter().map(|row| (row.name, row.handlings.map(describe)));
    let real: BTreeMap<&str, [String; 4]> = real.collect();
    for (name, cells) in &real {
        assert_eq!(documented.get(name).map(|cells| cells.join(" | ")), Some(cells.join(" | ")), "row of `{name}`");
    }
    let extra: Vec<_> = documented.keys().filter(|name| !real.contains_key(*name)).collect();
    assert!(extra.is_empty(), "documented, but unknown: {extra:?}");
}

/// Checks an error's parameter, in whichever shape it comes.
fn refuses(reply: &Reply, endpoint: Endpoint, code: &str, name: &str) {
    if endpoint == Endpoint::Messages {
        assert_eq!(reply.status, 400, "{}", reply.json());
        let error = &reply.json()["error"];
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains(&format!("`{name}`")), "{error}");
    } else {
        reply.refuses(400, code, Some(name));
    }
}

#[tokio::test]
async fn each_row_is_as_it_says() {
    let world = World::saying("x").await;
    for row in PARAMETERS {
        for endpoint in Endpoint::ALL {
            let name = row.name;
            let send = |value: Value| {
                let mut body = with(minimal(endpoint), json!({name: value}));
                if name == "stream_options" {
                    body = with(body, json!({"stream": true}));
                }
                if name == "top_logprobs" && endpoint == Endpoint::Chat {
                    body = with(body, json!({"logprobs": true}));
                }
                let world = &world;
                async move { world.post(endpoint.path(), &body).await }
            };
            match row.handling(endpoint) {
                Handling::Applied if name == "previous_response_id" => {
                    send(json!("x")).await.refuses(404, "response_not_found", Some(name));
                }
                Handling::Applied | Handling::NoOp => {
                    let reply = send(example(name, endpoint)).await;
                    assert_eq!(reply.status, 200, "{name}: {}", String::from_utf8_lossy(&reply.body));
                }
                Handling::Refused => {
                    for value in [example(name, endpoint), json!(0), json!(true), json!([]), json!("x")] {
                        refuses(&send(value).await, endpoint, "unsupported_parameter", name);
                    }
                    assert_eq!(send(Value::Null).await.status, 200, "null is as good as absent: {name}");
                }
                Handling::Only(values) => {
                    for value in values {
                        assert_eq!(send(serde_json::from_str(value).unwrap()).await.status, 200, "{name} = {value}");
                    }
                    for value in [json!({"any": ["thing", 1]}), json!(0.5), json!(17), json!("x"), json!(["x"])] {
                        refuses(&send(value).await, endpoint, "unsupported_value", name);
                    }
                }
            }
        }
    }
}

/// The document for programs says what the table says, and every example is of the kind that it asks for.
#[tokio::test]
async fn the_served_description_agrees() {
    let world = World::saying("x").await;
    let document = world.get("/openapi.json").await.ok();
    assert_eq!(document, openapi::document());
    for endpoint in Endpoint::ALL {
        let operation = &document["paths"][endpoint.path()]["post"];
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        assert_eq!(schema["additionalProperties"], false);
        for row in PARAMETERS {
            let property = schema["properties"].get(row.name);
            assert_eq!(property.is_none(), row.handling(endpoint) == Handling::Refused, "{} {endpoint:?}", row.name);
            let (Some(property), Handling::Applied) = (property, row.handling(endpoint)) else { continue };
            let value = example(row.name, endpoint);
            let kind = match &value {
                Value::Bool(_) => "boolean",
                Value::Number(_) => "integer number",
                Value::String(_) => "string",
                Value::Array(_) => "array",
                _ => "object",
            };
            let text = property.to_string();
            let fits = property["enum"].as_array().is_some_and(|values| values.contains(&value))
                || kind.split(' ').any(|kind| text.contains(&format!("\"{kind}\"")));
            assert!(fits || row.name == "previous_response_id", "{}: {value} is none of {property}", row.name);
        }
        for name in schema["required"].as_array().unwrap() {
            assert!(minimal(endpoint).get(name.as_str().unwrap()).is_some());
        }
    }
}

#[tokio::test]
async fn unknown_parameters_are_named() {
    let world = World::saying("x").await;
    for name in ["temprature", "Temperature", "use_beam_search", "", "a b", "é"] {
        for (path, body) in [(CHAT, chat(json!({name: 1}))), (COMPLETIONS, completion(json!({name: 1})))] {
            world.post(path, &body).await.refuses(400, "unsupported_parameter", Some(name));
        }
    }
    let long = "x".repeat(1_000_000);
    let reply = world.post(CHAT, &chat(json!({long: 1}))).await;
    assert_eq!(reply.status, 400);
    assert!(reply.body.len() < 1000);
    assert!(world.engine.requests().is_empty());
}

#[tokio::test]
async fn neutral_numbers_may_be_floats() {
    let world = World::saying("x").await;
    world.post(CHAT, &chat(json!({"n": 1.0, "frequency_penalty": 0.0, "presence_penalty": -0.0}))).await.ok();
}
