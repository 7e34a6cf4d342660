//! Tools, reasoning, several answers and log-probabilities in OpenAI's chat.

use std::sync::Arc;

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use serde_json::{Value, json};
use troika_prompt::FixedTexts;
use troika_testkit::{scripted::Act, tokenizer::MARKERS};

use crate::{CHAT, COMPLETIONS, World, chat, completion, outcomes, says, with};

const DSML: u32 = 262;

/// Texts that a checkpoint could have.
pub(crate) fn texts() -> Arc<FixedTexts> {
    let source = "TOOLS_TEMPLATE = \"\"\"Tools: {tool_schemas} {dsml_token} {thinking_start_token}\"\"\"\n\
                  response_format_template = \"\"\"Form: {schema}\"\"\"\n";
    Arc::new(FixedTexts::from_source("texts.py".into(), source))
}

/// A prompt as text, markers spelled out.
pub(crate) fn spelled(prompt: &[u32]) -> String {
    let merged = ["he", "ll", "hell", "hello", " w"];
    let bytes = prompt.iter().flat_map(|token| match *token {
        byte @ 0..=255 => vec![byte as u8],
        marker @ 256..=262 => MARKERS[marker as usize - 256].as_bytes().to_vec(),
        merge => merged.get(merge as usize - 263).copied().unwrap_or("\u{FFFD}").as_bytes().to_vec(),
    });
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

fn tagged(text: &str) -> Vec<Act> {
    let pieces: Vec<Vec<Act>> = text.split('§').map(says).collect();
    pieces.join(&Act::Token(DSML))
}

/// What the model says to call a tool.
pub(crate) fn dsml_call(name: &str, parameters: &[(&str, &str, &str)]) -> Vec<Act> {
    let parameters: String = parameters
        .iter()
        .map(|(key, string, value)| format!("<§parameter name=\"{key}\" string=\"{string}\">{value}</§parameter>\n"))
        .collect();
    tagged(&format!("\n\n<§tool_calls>\n<§invoke name=\"{name}\">\n{parameters}</§invoke>\n</§tool_calls>"))
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}})
}

/// A chat's stream, put together like the client libraries do.
async fn streamed_message(world: &World, body: &Value) -> Value {
    let mut stream = world.stream(CHAT, &with(body.clone(), json!({"stream": true}))).await;
    let mut message = json!({"role": null, "content": "", "reasoning_content": "", "tool_calls": []});
    let mut finish_reason = Value::Null;
    for data in stream.rest().await {
        if data == "[DONE]" {
            continue;
        }
        let event: Value = serde_json::from_str(&data).unwrap();
        let Some(choice) = event["choices"].get(0) else { continue };
        finish_reason = choice["finish_reason"].clone();
        for (name, value) in choice["delta"].as_object().unwrap() {
            match (name.as_str(), value) {
                ("tool_calls", calls) => {
                    let call = &calls[0];
                    let list = message["tool_calls"].as_array_mut().unwrap();
                    let idx = call["index"].as_u64().unwrap() as usize;
                    if idx == list.len() {
                        assert!(call["id"].as_str().unwrap().starts_with("call_"));
                        list.push(json!({"type": call["type"], "function": call["function"]}));
                    } else {
                        assert_eq!(idx + 1, list.len());
                        let arguments = &mut list[idx]["function"]["arguments"];
                        let more = call["function"]["arguments"].as_str().unwrap();
                        *arguments = format!("{}{more}", arguments.as_str().unwrap()).into();
                    }
                }
                ("role", role) => message["role"] = role.clone(),
                (name, more) => {
                    message[name] = format!("{}{}", message[name].as_str().unwrap(), more.as_str().unwrap()).into();
                }
            }
        }
    }
    json!({"message": message, "finish_reason": finish_reason})
}

/// A whole answer in the form of [`streamed_message`].
fn whole_message(reply: &Value) -> Value {
    let choice = &reply["choices"][0];
    let given = &choice["message"];
    let text = |name: &str| given[name].as_str().unwrap_or_default();
    let mut calls = given["tool_calls"].as_array().cloned().unwrap_or_default();
    for call in &mut calls {
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        call.as_object_mut().unwrap().remove("id");
    }
    let message = json!({
        "role": given["role"], "content": text("content"), "reasoning_content": text("reasoning_content"), "tool_calls": calls,
    });
    json!({"message": message, "finish_reason": choice["finish_reason"]})
}

async fn world_with_texts(script: Vec<Act>) -> World {
    World::with(script, |state| state.texts = texts()).await
}

#[tokio::test]
async fn a_call() {
    let script =
        [says("Let me see."), dsml_call("look", &[("at", "true", "a \"b\""), ("n", "false", "[1, 2]")])].concat();
    let world = world_with_texts(script).await;
    let body = chat(json!({"tools": [tool("look")]}));
    let reply = world.post(CHAT, &body).await.ok();
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Let me see.");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("look")));
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"at": "a \"b\"", "n": [1, 2]}));
    assert_eq!(streamed_message(&world, &body).await, whole_message(&reply));
    assert!(spelled(&world.engine.requests()[0].prompt).contains("Tools: {\"name\": \"look\", \"description\": \"d\""));
}

/// Wherever the output breaks off, what streams is what comes whole, and nothing is a server error.
#[tokio::test]
async fn every_prefix_streams_as_it_comes_whole() {
    let script = [
        says("Look: "),
        dsml_call("f", &[("a", "true", "é<x>"), ("b", "false", "{\"c\": null}")]),
        tagged("\n\n<§tool_calls>\n<§invoke name=\"g\">\n</§invoke>\n</§tool_calls>"),
    ]
    .concat();
    let world = world_with_texts(Vec::new()).await;
    for len in 0..=script.len() {
        world.engine.play(script[..len].to_vec());
        let body = chat(json!({"tools": [tool("f"), tool("g")], "seed": 1}));
        let whole = world.post(CHAT, &body).await.ok();
        assert_eq!(streamed_message(&world, &body).await, whole_message(&whole), "after {len}");
    }
}

#[tokio::test]
async fn one_call_at_a_time() {
    let script = [
        dsml_call("f", &[]),
        dsml_call("g", &[]),
        vec![Act::Forever(b'x'.into(), std::time::Duration::from_millis(5))],
    ];
    let world = world_with_texts(script.concat()).await;
    let body = chat(json!({"tools": [tool("f"), tool("g")], "parallel_tool_calls": false}));
    let reply = world.post(CHAT, &body).await.ok();
    assert_eq!(reply["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls");
    outcomes(&world.engine, 1).await;
}

#[tokio::test]
async fn tools_that_are_not_offered_are_text() {
    let world = world_with_texts(dsml_call("f", &[])).await;
    for more in [json!({}), json!({"tools": [tool("f")], "tool_choice": "none"})] {
        let reply = world.post(CHAT, &chat(more)).await.ok();
        assert!(reply["choices"][0]["message"]["content"].as_str().unwrap().contains("invoke name="), "{reply}");
        assert!(!spelled(&world.engine.requests()[0].prompt).contains("Tools:"));
    }
}

#[tokio::test]
async fn a_checkpoint_without_the_texts_says_so() {
    let world = World::saying("x").await;
    let reply = world.post(CHAT, &chat(json!({"tools": [tool("f")]}))).await;
    reply.refuses(400, "unsupported_by_model", None);
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("texts.py"));
}

#[tokio::test]
async fn tool_calls_in_the_history() {
    let world = world_with_texts(says("x")).await;
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"k\": \"v\"}"}, "index": 0});
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
    ]);
    world.post(CHAT, &json!({"messages": messages})).await.ok();
    let text = spelled(&world.engine.requests()[0].prompt);
    assert!(text.contains("name=\"k\" string=\"true\">v<") && text.contains("<tool_result>r</tool_result>"), "{text}");
}

#[tokio::test]
async fn tools_that_are_wrong() {
    let world = world_with_texts(says("x")).await;
    for (more, param) in [
        (json!({"tools": "f"}), "tools"),
        (json!({"tools": [5]}), "tools[0]"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name"),
        (json!({"tools": [tool("f"), tool("f")]}), "tools[1].function.name"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}),
            "tools[0].function.parameters",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool("f")]}), "tool_choice"),
        (json!({"parallel_tool_calls": 1}), "parallel_tool_calls"),
        (json!({"reasoning_effort": "extreme"}), "reasoning_effort"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.schema"),
        (json!({"n": 0}), "n"),
        (json!({"n": 17}), "n"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"frequency_penalty": 2.1}), "frequency_penalty"),
    ] {
        world.post(CHAT, &chat(more)).await.refuses(400, "invalid_value", Some(param));
    }
    let echo = completion(json!({"echo": true, "logprobs": 1}));
    world.post(COMPLETIONS, &echo).await.refuses(400, "invalid_value", Some("echo"));
    assert!(world.engine.requests().is_empty());
}

#[tokio::test]
async fn reasoning_stands_apart() {
    let world = World::start([says("hm"), vec![Act::Token(261)], says("yes")].concat()).await;
    for more in [json!({"reasoning_effort": "low"}), json!({"thinking": {"type": "enabled"}})] {
        let reply = world.post(CHAT, &chat(more.clone())).await.ok();
        let message = &reply["choices"][0]["message"];
        assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("hm"), &json!("yes")));
        assert_eq!(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 3);
        assert_eq!(streamed_message(&world, &chat(more)).await, whole_message(&reply));
    }
    // Thinking that does not end is no answer.
    world.engine.play(says("hmmm"));
    let reply = world.post(CHAT, &chat(json!({"reasoning_effort": "low", "max_tokens": 2}))).await.ok();
    let choice = &reply["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["message"]["reasoning_content"]), (&json!(""), &json!("hm")));
    assert_eq!(choice["finish_reason"], "length");
}

#[tokio::test]
async fn several_answers() {
    let world = World::saying("ab").await;
    let reply = world.post(CHAT, &chat(json!({"n": 3, "seed": u64::MAX}))).await.ok();
    let indices: Vec<&Value> = reply["choices"].as_array().unwrap().iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indices, [0, 1, 2]);
    let seeds: Vec<u64> = world.engine.requests().iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds, [u64::MAX, 0, 1]);
    assert_eq!((&reply["usage"]["prompt_tokens"], &reply["usage"]["completion_tokens"]), (&json!(5), &json!(6)));

    let body = completion(json!({"n": 2, "stream": true, "echo": true, "stream_options": {"include_usage": true}}));
    let mut stream = world.stream(COMPLETIONS, &body).await;
    let mut texts = [String::new(), String::new()];
    let mut num_ended = 0;
    for data in stream.rest().await {
        let Ok(event) = serde_json::from_str::<Value>(&data) else { continue };
        for choice in event["choices"].as_array().unwrap() {
            texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
            num_ended += usize::from(choice["finish_reason"] == "stop");
        }
    }
    assert_eq!((texts, num_ended), (["helloab".to_owned(), "helloab".to_owned()], 2));

    // If there is no room for all, there is none for any.
    world.engine.limit_requests(1);
    world.engine.play(vec![Act::Forever(b'x'.into(), std::time::Duration::from_millis(5))]);
    world.post(CHAT, &chat(json!({"n": 2}))).await.refuses(429, "queue_full", None);
    assert_eq!(outcomes(&world.engine, 6).await.len(), 6, "the first was cancelled");
}

#[tokio::test]
async fn log_probabilities() {
    let world = World::saying("aé").await;
    let reply = world.post(CHAT, &chat(json!({"logprobs": true, "top_logprobs": 2}))).await.ok();
    let tokens = reply["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 3, "one for each token, parts of a letter too");
    assert_eq!((&tokens[0]["token"], &tokens[0]["bytes"]), (&json!("a"), &json!([97])));
    assert_eq!(tokens[1]["bytes"], json!([0xC3]));
    assert_eq!(tokens[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert!((tokens[0]["logprob"].as_f64().unwrap() + std::f64::consts::LN_2).abs() < 1e-6);

    let mut stream = world.stream(CHAT, &chat(json!({"logprobs": true, "top_logprobs": 2, "stream": true}))).await;
    let mut streamed = Vec::new();
    for data in stream.rest().await {
        let Ok(event) = serde_json::from_str::<Value>(&data) else { continue };
        streamed.extend(event["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default());
    }
    assert_eq!(&streamed, tokens);

    let reply = world.post(COMPLETIONS, &completion(json!({"logprobs": 1}))).await.ok();
    let logprobs = &reply["choices"][0]["logprobs"];
    assert_eq!(logprobs["text_offset"].as_array().unwrap().len(), 3);
    assert_eq!((&logprobs["tokens"][0], &logprobs["top_logprobs"][0].as_object().unwrap().len()), (&json!("a"), &1));
    let silent = world.post(CHAT, &chat(json!({}))).await.ok();
    assert_eq!(silent["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn penalties_and_bias_reach_the_engine() {
    let world = World::saying("x").await;
    let more = json!({
        "frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.25, "logit_bias": {"7": -100, "8": 2},
    });
    for (path, body) in [(CHAT, chat(more.clone())), (COMPLETIONS, completion(more))] {
        world.post(path, &body).await.ok();
        let request = world.engine.requests().pop().unwrap();
        let sampling = request.sampling;
        let penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty);
        assert_eq!(penalties, (0.5, -1.0, 1.25));
        assert_eq!(request.logit_bias, [(7, -100.0), (8, 2.0)]);
    }
}

/// The form is the engine's to enforce; the scripted one takes only what the constraint takes.
#[tokio::test]
async fn answers_of_a_form() {
    let world = world_with_texts(Vec::new()).await;
    let object = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": object}});
    for (format, good, bad) in [
        (schema.clone(), "{\"a\": 1}", "{\"b\": 1}"),
        (json!({"type": "json_object"}), "{\"b\": [1]}", "[1]"),
        (json!({"type": "grammar", "grammar": "start: \"yes\" | \"no\""}), "no", "maybe"),
    ] {
        for (path, body, place) in [
            (CHAT, chat(json!({"response_format": format})), "/choices/0/message/content"),
            (COMPLETIONS, completion(json!({"response_format": format})), "/choices/0/text"),
        ] {
            world.engine.play(says(good));
            let reply = world.post(path, &body).await.ok();
            assert_eq!(reply.pointer(place), Some(&json!(good)), "{format}");
            assert_eq!(reply["choices"][0]["finish_reason"], "stop");
            world.engine.play(says(bad));
            world.post(path, &body).await.refuses(500, "engine_error", None);
        }
    }
    // The model is told of the schema; and it may think first.
    world.engine.play([says("hm"), vec![Act::Token(261)], says("{\"a\": 1}")].concat());
    let reply = world.post(CHAT, &chat(json!({"response_format": schema, "reasoning_effort": "low"}))).await.ok();
    assert_eq!(reply["choices"][0]["message"]["content"], "{\"a\": 1}");
    assert!(spelled(&world.engine.requests().pop().unwrap().prompt).contains("Form: {\"type\": \"object\""));
}

#[tokio::test]
async fn calls_that_must_be() {
    let world = world_with_texts(dsml_call("f", &[])).await;
    let tools = json!([tool("f"), tool("g")]);
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    for choice in [json!("required"), named("f")] {
        let body = chat(json!({"tools": tools, "tool_choice": choice}));
        let reply = world.post(CHAT, &body).await.ok();
        assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!(streamed_message(&world, &body).await, whole_message(&reply));
    }
    let body = chat(json!({"tools": tools, "tool_choice": named("g")}));
    world.post(CHAT, &body).await.refuses(500, "engine_error", None);
    world.engine.play(says("no"));
    let body = chat(json!({"tools": tools, "tool_choice": "required"}));
    world.post(CHAT, &body).await.refuses(500, "engine_error", None);
}

#[tokio::test]
async fn forms_that_cannot_be() {
    let world = world_with_texts(says("x")).await;
    let format = |format: Value| chat(json!({"response_format": format}));
    let schema = |schema: Value| format(json!({"type": "json_schema", "json_schema": {"schema": schema}}));
    for body in [
        format(json!({"type": "grammar", "grammar": "start: ("})),
        format(json!({"type": "grammar", "grammar": ""})),
        format(json!({"type": "grammar", "grammar": "(".repeat(10_000)})),
        schema(json!({"type": "impossible"})),
        schema(json!({"$ref": "http://example.com/schema"})),
    ] {
        world.post(CHAT, &body).await.refuses(400, "unsupported_value", Some("response_format"));
    }
    let both = chat(json!({"response_format": {"type": "json_object"}, "tools": [tool("f")]}));
    world.post(CHAT, &both).await.refuses(400, "invalid_value", Some("response_format"));
    assert!(world.engine.requests().is_empty());
}

/// Any output of text and markers streams as it comes whole.
#[test]
fn any_output_streams_as_it_comes_whole() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let world = runtime.block_on(world_with_texts(Vec::new()));
    let piece = prop_oneof![
        4 => prop::sample::select(vec!["<", "/", "\n\n", "tool_calls>", "invoke name=\"f\">", "parameter name=\"k\" string=\"true\">", "parameter>", "invoke>", "é", "{}", " "]).prop_map(says),
        3 => Just(vec![Act::Token(DSML)]),
        1 => (260u32..262).prop_map(|token| vec![Act::Token(token)]),
    ];
    let script = proptest::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat());
    let mut runner = TestRunner::new(Config::with_cases(200));
    let result = runner.run(&(script, any::<bool>()), |(script, thinks)| {
        world.engine.play(script);
        let effort = if thinks { "low" } else { "none" };
        let body = chat(json!({"tools": [tool("f")], "reasoning_effort": effort}));
        let (whole, streamed) =
            runtime.block_on(async { (world.post(CHAT, &body).await.ok(), streamed_message(&world, &body).await) });
        prop_assert_eq!(streamed, whole_message(&whole));
        Ok(())
    });
    result.unwrap();
}
