//! What the server says of requests: usage, records by id, metrics; and how a request stands among others.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Value, json};
use troika_engine::api::{FinishReason, Urgency};
use troika_engine::{BankEvents, HybridBytes, HybridStatus, KindCounts, KindPlan, Programs};
use troika_server::Access;
use troika_testkit::scripted::Act;

use crate::{CHAT, COMPLETIONS, Reply, World, chat, client, completion, minimal, outcomes, says, split_usage, with};
use troika_server::parameters::Endpoint;

/// Two of the prompt's tokens were there, then it speaks.
fn cached(text: &str) -> Vec<Act> {
    [vec![Act::Prefilled(2)], says(text)].concat()
}

/// Samples of a scrape by name and labels.
fn samples(reply: &Reply) -> BTreeMap<String, f64> {
    assert_eq!(reply.status, 200);
    assert!(reply.header("content-type").expect("a type").starts_with("application/openmetrics-text; version=1.0.0"));
    let text = String::from_utf8(reply.body.clone()).expect("text");
    assert!(text.ends_with("# EOF\n"), "{text}");
    let mut samples = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').expect("a name and a value");
        assert!(name.starts_with("troika_"), "{line}");
        assert!(samples.insert(name.to_owned(), value.parse().expect("a number")).is_none(), "{name} twice");
    }
    samples
}

/// Also if a stop string ended the answer, which the engine never hears of.
#[tokio::test]
async fn usage_says_what_was_cached() {
    let world = World::start(cached("ab END and more")).await;
    let places = [
        (Endpoint::Chat, "stop", "/prompt_tokens_details/cached_tokens"),
        (Endpoint::Completions, "stop", "/prompt_tokens_details/cached_tokens"),
        (Endpoint::Messages, "stop_sequences", "/cache_read_input_tokens"),
        (Endpoint::Responses, "", "/input_tokens_details/cached_tokens"),
    ];
    for (endpoint, stop, place) in places {
        for stops in [json!({}), json!({stop: ["END"]})].into_iter().filter(|stops| stops.get("").is_none()) {
            let body = with(with(minimal(endpoint), json!({"metadata": null})), stops);
            let reply = world.post(endpoint.path(), &body).await.ok();
            assert_eq!(reply["usage"].pointer(place), Some(&json!(2)), "{reply}");
            let (_, extension) = split_usage(&reply["usage"]);
            assert_eq!(extension["request_id"], reply["id"]);
            assert_eq!((&extension["cached_tokens"], &extension["cached_tier"]), (&json!(2), &json!("ram")));
        }
    }
    let stream = json!({"stream": true, "stop": "END", "stream_options": {"include_usage": true}});
    let streamed = world.stream(CHAT, &chat(stream)).await.collect().await;
    let usage = streamed.usage.expect("asked for");
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 2);
    assert_eq!(split_usage(&usage).1["cached_tier"], "ram");
}

#[tokio::test]
async fn a_request_is_found_by_the_id_of_its_answer() {
    let world = World::start(cached("ab END")).await;
    let prefixes = ["chatcmpl-", "cmpl-", "msg_", "resp_"];
    for (index, (endpoint, prefix)) in Endpoint::ALL.into_iter().zip(prefixes).enumerate() {
        let id = world.post(endpoint.path(), &minimal(endpoint)).await.ok()["id"].as_str().expect("an id").to_owned();
        let bare = id.strip_prefix(prefix).expect("the API's prefix");
        outcomes(&world.engine, index + 1).await;
        let found = world.get(&format!("/troika/requests/{id}")).await.ok();
        assert_eq!(world.get(&format!("/troika/requests/{bare}")).await.ok(), found);
        assert_eq!((&found["id"], &found["route"]), (&json!(id), &json!(endpoint.path())));
        assert_eq!((&found["ending"], &found["numeric_class"]), (&json!("stop"), &json!("exact")));
        assert!(found["first_token_ms"].as_f64().expect("a time") <= found["total_ms"].as_f64().expect("a time"));
    }
    let id = world.post(CHAT, &chat(json!({"n": 2, "stop": "END"}))).await.ok()["id"].clone();
    outcomes(&world.engine, 6).await;
    let found = world.get(&format!("/troika/requests/{}", id.as_str().expect("an id"))).await.ok();
    assert_eq!((&found["state"], &found["ending"]), (&json!("ended"), &json!("stop")));
    let choices = found["choices"].as_array().expect("a list");
    assert_eq!(choices.len(), 2);
    for choice in choices {
        let cached = (&choice["cached_tokens"], &choice["cached_tier"], &choice["cached_tokens_from_disk"]);
        assert_eq!(cached, (&json!(2), &json!("ram"), &json!(0)));
        assert_eq!(
            (&choice["diverged"], &choice["chunks"], &choice["failure"]),
            (&Value::Null, &json!([]), &Value::Null)
        );
    }
    world.get("/troika/requests/chatcmpl-nobody").await.refuses(404, "request_not_found", None);
}

#[tokio::test]
async fn a_request_that_runs_says_so() {
    let world = World::start([says("a"), vec![Act::Pause(Duration::from_secs(60))]].concat()).await;
    let mut stream = world.stream(CHAT, &chat(json!({"stream": true}))).await;
    let first: Value = serde_json::from_str(&stream.data().await.expect("an event")).expect("JSON");
    let path = format!("/troika/requests/{}", first["id"].as_str().expect("an id"));
    let running = world.get(&path).await.ok();
    assert_eq!(
        (&running["state"], &running["ending"], &running["choices"]),
        (&json!("running"), &Value::Null, &json!([null]))
    );
    drop(stream);
    outcomes(&world.engine, 1).await;
    let left = world.get(&path).await.ok();
    assert_eq!((&left["state"], &left["ending"]), (&json!("ended"), &json!("left")));
}

#[tokio::test]
async fn several_keys_are_kept_apart() {
    let two = |shared: bool| {
        World::with(cached("x"), move |state| {
            let access = Access::new(["one", "two"], []).expect("good keys");
            state.access = if shared { access.shared_between_keys() } else { access };
        })
    };
    let post = async |world: &World, key| {
        let headers = [("content-type", "application/json"), ("x-api-key", key)];
        let reply = client::send(world.address, "POST", CHAT, &headers, chat(json!({})).to_string().as_bytes()).await;
        (reply.ok()["id"].as_str().expect("an id").to_owned(), world.engine.requests().pop().expect("it came").service)
    };
    let get = async |world: &World, key, path: &str| {
        client::send(world.address, "GET", path, &[("x-api-key", key)], b"").await
    };

    let world = two(false).await;
    let ((id, first), (_, second), (_, again)) =
        (post(&world, "one").await, post(&world, "two").await, post(&world, "one").await);
    assert!(first == again && first.tenant != second.tenant && !first.tenant.is_empty(), "{first:?} {second:?}");
    let path = format!("/troika/requests/{id}");
    get(&world, "one", &path).await.ok();
    get(&world, "two", &path).await.refuses(404, "request_not_found", None);
    get(&world, "three", &path).await.refuses(401, "invalid_api_key", None);
    for (key, count) in [("one", 2), ("two", 1)] {
        let status = get(&world, key, "/troika/status").await.ok();
        assert_eq!(status["requests"].as_array().expect("a list").len(), count, "{key}");
    }

    let headers = [("content-type", "application/json"), ("x-api-key", "one")];
    let body = minimal(Endpoint::Responses).to_string();
    let response = client::send(world.address, "POST", "/v1/responses", &headers, body.as_bytes()).await.ok();
    let path = format!("/v1/responses/{}", response["id"].as_str().expect("an id"));
    assert_eq!(get(&world, "one", &path).await.ok(), response);
    get(&world, "two", &path).await.refuses(404, "response_not_found", None);

    let world = two(true).await;
    let ((id, first), (_, second)) = (post(&world, "one").await, post(&world, "two").await);
    assert!(first.tenant.is_empty() && second.tenant.is_empty());
    get(&world, "two", &format!("/troika/requests/{id}")).await.ok();
}

#[tokio::test]
async fn urgency_and_time_reach_the_engine() {
    let world = World::saying("x").await;
    for (tier, urgency) in [
        (Value::Null, Urgency::Normal),
        (json!("auto"), Urgency::Normal),
        (json!("default"), Urgency::Normal),
        (json!("flex"), Urgency::Low),
        (json!("priority"), Urgency::High),
    ] {
        for endpoint in [Endpoint::Chat, Endpoint::Responses] {
            let more = json!({"service_tier": tier, "timeout": 1.5});
            world.post(endpoint.path(), &with(minimal(endpoint), more)).await.ok();
            let service = world.engine.requests().pop().expect("it came").service;
            assert_eq!((service.urgency, service.deadline), (urgency, Some(Duration::from_millis(1500))));
        }
    }
    world.post(CHAT, &chat(json!({"service_tier": "scale"}))).await.refuses(
        400,
        "unsupported_value",
        Some("service_tier"),
    );
    world.post(CHAT, &chat(json!({}))).await.ok();
    assert_eq!(world.engine.requests().pop().expect("it came").service.deadline, None);
}

#[tokio::test]
async fn a_request_whose_time_is_over() {
    let world = World::start([says("ab"), vec![Act::Finish(FinishReason::DeadlinePassed)]].concat()).await;
    let late = world.post(CHAT, &chat(json!({"timeout": 1}))).await;
    late.refuses(408, "deadline_exceeded", None);
    assert_eq!(late.header("x-should-retry"), Some("false"), "asking again would take as long");
    let streamed = world.stream(COMPLETIONS, &completion(json!({"timeout": 1, "stream": true}))).await.collect().await;
    assert_eq!((streamed.text.as_str(), streamed.is_done), ("ab", false));
    assert_eq!(streamed.error.expect("an error")["code"], "deadline_exceeded");
    let late = world.post("/v1/messages", &minimal(Endpoint::Messages)).await;
    assert_eq!((late.status, &late.json()["error"]["type"]), (408, &json!("timeout_error")));
}

#[tokio::test]
async fn metrics_count_requests_and_times() {
    let world = World::start(cached("abc")).await;
    let before = samples(&world.get("/metrics").await);
    assert_eq!(before["troika_up"], 1.0);
    assert_eq!(before["troika_request_queue_seconds_count"], 0.0);
    world.post(CHAT, &chat(json!({}))).await.ok();
    world.post(CHAT, &chat(json!({"max_tokens": 2}))).await.ok();
    world.post(COMPLETIONS, &completion(json!({}))).await.ok();
    world.engine.limit_requests(0);
    world.post(CHAT, &chat(json!({}))).await.refuses(429, "queue_full", None);
    let refused = &world.get("/troika/status").await.ok()["requests"][0];
    let record = world.get(&format!("/troika/requests/{}", refused["id"].as_str().expect("an id"))).await.ok();
    let (state, ending) = (&record["state"], &record["ending"]);
    assert_eq!((state, ending, &record["choices"]), (&json!("ended"), &json!("refused"), &json!([])));
    let after = samples(&world.get("/metrics").await);
    for (route, outcome, count) in
        [(CHAT, "stop", 1.0), (CHAT, "length", 1.0), (CHAT, "refused", 1.0), (COMPLETIONS, "stop", 1.0)]
    {
        let name = format!("troika_requests_total{{route=\"{route}\",outcome=\"{outcome}\"}}");
        assert_eq!(after.get(&name), Some(&count), "{after:?}");
    }
    assert_eq!(after["troika_request_queue_seconds_count"], 3.0);
    assert_eq!(after["troika_time_to_first_token_seconds_count"], 3.0);
    assert_eq!(after["troika_inter_token_latency_seconds_count"], 2.0 + 1.0 + 2.0);
    assert_eq!(after["troika_model_info{id=\"troika/nano\",numeric_class=\"exact\"}"], 1.0);
    world.engine.stop("out of luck");
    assert_eq!(samples(&world.get("/metrics").await)["troika_up"], 0.0);
}

/// What the status says of neural engines is in `/metrics`, `/troika/status` and `/health`, number by number.
#[tokio::test]
async fn what_engines_do_is_shown() {
    let world = World::saying("x").await;
    assert!(!samples(&world.get("/metrics").await).keys().any(|name| name.contains("hybrid")), "no engine, no line");
    assert_eq!(world.get("/health").await.ok()["hybrid"], Value::Null);
    let counts = KindCounts {
        planned: 40,
        exact: 30,
        padded: 2,
        merged: 31,
        cancelled: 1,
        fallbacks: BTreeMap::from([("memory", 8), ("contention", 3)]),
        bypass_decode: 5,
        bypass_verify: 6,
        runtime_failures: 7,
        checks: 10,
        failed_checks: 1,
        check_ms: 1.5,
        input_ready_ms: 250.0,
        region_ms: 500.0,
        gap_ms: 125.0,
        dispatched: BTreeMap::from([("soft0".to_owned(), 32)]),
        ..KindCounts::default()
    };
    let hybrid = |state: &str| HybridStatus {
        state: state.to_owned(),
        numeric_class: "fast+hybrid:abc".to_owned(),
        plan_digest: "abc".to_owned(),
        tile: 512,
        devices: vec!["cpu".to_owned(), "soft0".to_owned()],
        programs: Some(Programs { compiled: 11, from_disk: 12, damaged: 1, not_kept: 2, evicted: 3, refused: 4 }),
        plan: BTreeMap::from([("wq_b", KindPlan { layers: 6, fraction_effective: 0.5 })]),
        kinds: BTreeMap::from([("wq_b", counts.clone())]),
        bytes: HybridBytes { weights: 1000, banks: 200, surfaces: 30 },
        latched: BTreeMap::from([("layers.1.wq_b".to_owned(), "run 3 fails".to_owned())]),
        shed: vec!["layers.2.wq_b".to_owned(), "layers.3.wq_b".to_owned()],
        last_request: Some("engaged".to_owned()),
        banks: BankEvents { given_up: 9, returned: 6, refused: 1 },
        simulated_ms: Some(BTreeMap::from([("soft0".to_owned(), 1500.0)])),
    };
    world.engine.set_hybrid(hybrid("degraded(memory, 80.0 %)"));
    let samples = samples(&world.get("/metrics").await);
    let state = "state=\"degraded(memory, 80.0 %)\",digest=\"abc\",numeric_class=\"fast+hybrid:abc\",tile=\"512\"";
    for (name, value) in [
        (format!("troika_hybrid_state{{{state}}}"), 1.0),
        ("troika_hybrid_operations_total{kind=\"wq_b\",state=\"planned\"}".to_owned(), 40.0),
        ("troika_hybrid_operations_total{kind=\"wq_b\",state=\"exact\"}".to_owned(), 30.0),
        ("troika_hybrid_operations_total{kind=\"wq_b\",state=\"padded\"}".to_owned(), 2.0),
        ("troika_hybrid_operations_total{kind=\"wq_b\",state=\"merged\"}".to_owned(), 31.0),
        ("troika_hybrid_operations_total{kind=\"wq_b\",state=\"cancelled\"}".to_owned(), 1.0),
        ("troika_hybrid_fallbacks_total{kind=\"wq_b\",reason=\"memory\"}".to_owned(), 8.0),
        ("troika_hybrid_fallbacks_total{kind=\"wq_b\",reason=\"contention\"}".to_owned(), 3.0),
        ("troika_hybrid_bypasses_total{kind=\"wq_b\",lane=\"decode\"}".to_owned(), 5.0),
        ("troika_hybrid_bypasses_total{kind=\"wq_b\",lane=\"verify\"}".to_owned(), 6.0),
        ("troika_hybrid_parts_total{kind=\"wq_b\",device=\"soft0\"}".to_owned(), 32.0),
        ("troika_hybrid_failures_total{kind=\"wq_b\"}".to_owned(), 7.0),
        ("troika_hybrid_checks_total{kind=\"wq_b\",result=\"good\"}".to_owned(), 9.0),
        ("troika_hybrid_checks_total{kind=\"wq_b\",result=\"wrong\"}".to_owned(), 1.0),
        ("troika_hybrid_seconds_total{kind=\"wq_b\",of=\"input_ready\"}".to_owned(), 0.25),
        ("troika_hybrid_seconds_total{kind=\"wq_b\",of=\"region\"}".to_owned(), 0.5),
        ("troika_hybrid_seconds_total{kind=\"wq_b\",of=\"gap\"}".to_owned(), 0.125),
        ("troika_hybrid_seconds_total{kind=\"wq_b\",of=\"check\"}".to_owned(), 0.0015),
        ("troika_hybrid_bytes{of=\"weights\"}".to_owned(), 1000.0),
        ("troika_hybrid_bytes{of=\"banks\"}".to_owned(), 200.0),
        ("troika_hybrid_bytes{of=\"surfaces\"}".to_owned(), 30.0),
        ("troika_hybrid_projections{state=\"latched\"}".to_owned(), 1.0),
        ("troika_hybrid_projections{state=\"shed\"}".to_owned(), 2.0),
        ("troika_hybrid_banks_total{event=\"given_up\"}".to_owned(), 9.0),
        ("troika_hybrid_banks_total{event=\"returned\"}".to_owned(), 6.0),
        ("troika_hybrid_banks_total{event=\"refused\"}".to_owned(), 1.0),
        ("troika_hybrid_programs_total{event=\"compiled\"}".to_owned(), 11.0),
        ("troika_hybrid_programs_total{event=\"from_disk\"}".to_owned(), 12.0),
        ("troika_hybrid_programs_total{event=\"refused\"}".to_owned(), 4.0),
        ("troika_hybrid_simulated_seconds_total{device=\"soft0\"}".to_owned(), 1.5),
    ] {
        assert_eq!(samples.get(&name), Some(&value), "{name} in {samples:#?}");
    }
    let status = world.get("/troika/status").await.ok();
    assert_eq!(status["hybrid"], serde_json::to_value(hybrid("degraded(memory, 80.0 %)")).expect("JSON"));
    let health = world.get("/health").await.ok();
    assert_eq!((&health["status"], &health["hybrid"]), (&json!("ok"), &json!("degraded(memory, 80.0 %)")));
    // Wrong numbers are a matter for a person.
    world.engine.set_hybrid(hybrid("quarantined(soft0: wrong)"));
    let health = world.get("/health").await.ok();
    assert_eq!((&health["status"], &health["reason"]), (&json!("degraded"), &json!("quarantined(soft0: wrong)")));
}
