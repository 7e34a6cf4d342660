//! `docs/api.md` against the server: each row of the parameter table is tried.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Value, json};
use troika_server::parameters::{Handling, PARAMETERS};

use crate::{CHAT, COMPLETIONS, World, chat, completion, with};

/// Values of applied parameters. Those of the others must not matter, or are in the table.
fn example(name: &str) -> Value {
    match name {
        "model" => json!("troika/nano"),
        "messages" => json!([{"role": "user", "content": "x"}]),
        "prompt" | "stop" => json!("x"),
        "max_tokens" | "max_completion_tokens" | "top_k" | "seed" => json!(3),
        "temperature" | "top_p" | "min_p" => json!(0.5),
        "stream" => json!(true),
        "stream_options" => json!({"include_usage": true}),
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
        .map(|(name, cells)| (name, cells.trim_end_matches('|').split('|').map(str::trim).take(2).collect()))
        .collect();
    let real: BTreeMap<&str, Vec<String>> =
        PARAMETERS.iter().map(|row| (row.name, vec![describe(row.chat), describe(row.completions)])).collect();
    for (name, cells) in &real {
        assert_eq!(documented.get(name).map(|cells| cells.join(" | ")), Some(cells.join(" | ")), "row of `{name}`");
    }
    let extra: Vec<_> = documented.keys().filter(|name| !real.contains_key(*name)).collect();
    assert!(extra.is_empty(), "documented, but unknown: {extra:?}");
}

#[tokio::test]
async fn each_row_is_as_it_says() {
    let world = World::saying("x").await;
    for row in PARAMETERS {
        for (path, body, handling) in
            [(CHAT, chat(json!({})), row.chat), (COMPLETIONS, completion(json!({})), row.completions)]
        {
            let name = row.name;
            let send = |value: Value| {
                let mut body = with(body.clone(), json!({name: value}));
                if name == "stream_options" {
                    body = with(body, json!({"stream": true}));
                }
                let world = &world;
                async move { world.post(path, &body).await }
            };
            match handling {
                Handling::Applied | Handling::NoOp => assert_eq!(send(example(name)).await.status, 200, "{name}"),
                Handling::Refused => {
                    for value in [example(name), json!(0), json!(true), json!([]), json!("x")] {
                        send(value).await.refuses(400, "unsupported_parameter", Some(name));
                    }
                    assert_eq!(send(Value::Null).await.status, 200, "null is as good as absent: {name}");
                }
                Handling::Only(values) => {
                    for value in values {
                        assert_eq!(send(serde_json::from_str(value).unwrap()).await.status, 200, "{name} = {value}");
                    }
                    for value in [example(name), json!(0.5), json!(17), json!("x"), json!(["x"])] {
                        send(value).await.refuses(400, "unsupported_value", Some(name));
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn unknown_parameters_are_named() {
    let world = World::saying("x").await;
    for name in ["temprature", "Temperature", "ignore_eos", "", "a b", "é"] {
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
