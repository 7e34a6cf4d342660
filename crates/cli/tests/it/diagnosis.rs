//! What a server says of its work, who shares what, and limits: real servers on a real, tiny model.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use troika_base::NumericClass;
use troika_device::map_file;
use troika_engine::{Runner, RunnerOptions, StepRunner};
use troika_model::{Checkpoint, ScaleCheck, WeightTable};

use crate::serving::Server;
use crate::support::{Scratch, text, troika};

/// Three blocks of 128 tokens and five tokens.
const PROMPT_TOKENS: usize = 3 * 128 + 5;

fn prompt(seed: usize, count: usize) -> Vec<usize> {
    (0..count).map(|i| (i * i * 7 + i * 31 + seed * 101) % 251).collect()
}

fn ask(prompt: &[usize], max_tokens: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "seed": 5, "temperature": 1, "logprobs": 1})
}

/// The JSON of a success.
pub(crate) fn post(server: &Server, key: &str, body: &Value) -> Value {
    let (status, body) = server.request_as(key, "POST", "/v1/completions", &body.to_string());
    assert!(status.contains("200"), "{status} {body}");
    serde_json::from_str(&body).expect("JSON")
}

pub(crate) fn get(server: &Server, path: &str) -> Value {
    let (status, body) = server.request("GET", path, "");
    assert!(status.contains("200"), "{status} {body}");
    serde_json::from_str(&body).expect("JSON")
}

fn cached(reply: &Value) -> (u64, &Value) {
    let extension = &reply["usage"]["troika"];
    assert_eq!(extension["cached_tokens"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]);
    (extension["cached_tokens"].as_u64().expect("a count"), &extension["cached_tier"])
}

/// How a request was served, once the engine has let go of it.
pub(crate) fn record(server: &Server, reply: &Value) -> Value {
    let path = format!("/troika/requests/{}", reply["id"].as_str().expect("an id"));
    let start = Instant::now();
    loop {
        let record = get(server, &path);
        if record["state"] == "ended" {
            return record;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{record}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Samples of a scrape by name and labels.
pub(crate) fn metrics(server: &Server) -> BTreeMap<String, f64> {
    let (status, body) = server.request("GET", "/metrics", "");
    assert!(status.contains("200"), "{status}");
    let samples = body.lines().filter(|line| line.starts_with("troika_")).map(|line| {
        let (name, value) = line.rsplit_once(' ').expect("a name and a value");
        (name.to_owned(), value.parse().expect("a number"))
    });
    samples.collect()
}

#[test]
fn metrics_and_records_tell_what_was_done() {
    let scratch = Scratch::new();
    let (model, dir) = (scratch.arg("model"), scratch.arg("cache"));
    let server = Server::with(&model, &["--cache-dir", &dir, "--chunk", "256"]);
    let cold = post(&server, "", &ask(&prompt(1, PROMPT_TOKENS), 4));
    assert_eq!(cached(&cold), (0, &Value::Null));
    let warm = post(&server, "", &ask(&prompt(1, PROMPT_TOKENS), 4));
    assert_eq!(cached(&warm), (384, &json!("ram")));
    assert_eq!(warm["choices"], cold["choices"]);
    let mut other = prompt(1, PROMPT_TOKENS);
    other[300] = 255;
    let parted = post(&server, "", &ask(&other, 4));

    let first = record(&server, &cold);
    assert_eq!(
        (&first["ending"], &first["numeric_class"], &first["route"]),
        (&json!("length"), &json!("fast"), &json!("/v1/completions"))
    );
    let choice = &first["choices"][0];
    let chunk = |start: usize, tokens: usize, narrowed_by: Value| {
        let done = json!({"path": "primary", "tiles": 0, "padded_rows": 0});
        json!({"start": start, "tokens": tokens, "narrowed_by": narrowed_by, "done": done})
    };
    let narrowed = json!([{"rule": "remaining", "before": 256, "after": 133}]);
    let chunks = choice["chunks"].as_array().expect("a list").iter().map(|of| {
        let times = ["model_ms", "total_ms"].map(|name| of[name].as_f64().expect("a time"));
        assert!(0.0 < times[0] && times[0] <= times[1], "{of}");
        let done = json!({"path": of["path"], "tiles": of["tiles"], "padded_rows": of["padded_rows"]});
        json!({"start": of["start"], "tokens": of["tokens"], "narrowed_by": of["narrowed_by"], "done": done})
    });
    assert_eq!(chunks.collect::<Vec<_>>(), [chunk(0, 256, json!([])), chunk(256, 133, narrowed)]);
    assert_eq!((&choice["alignment"], &choice["restarts"]), (&json!("aligned"), &json!(0)));
    assert_eq!(
        (&choice["stored_blocks"], &choice["skipped_because"], &choice["diverged"]),
        (&json!(3), &Value::Null, &Value::Null)
    );
    assert_eq!((&choice["cached_tokens"], &choice["completion_tokens"]), (&json!(0), &json!(4)));
    for time in ["prefill_ms", "decode_ms"] {
        assert!(choice[time].as_f64().is_some_and(|ms| ms > 0.0), "{choice}");
    }
    let diverged = &record(&server, &parted)["choices"][0]["diverged"];
    assert_eq!((&diverged["position"], &diverged["token"]), (&json!(300), &json!(255)));

    let samples = metrics(&server);
    let sample = |name: &str| *samples.get(name).unwrap_or_else(|| panic!("no {name} in {samples:#?}"));
    let parted_at = cached(&parted).0;
    let computed = (2 * PROMPT_TOKENS + 5) as f64 - parted_at as f64;
    for (name, value) in [
        ("troika_requests_total{route=\"/v1/completions\",outcome=\"length\"}", 3.0),
        ("troika_sequences_total{event=\"ended\"}", 3.0),
        ("troika_sequences_total{event=\"preempted\"}", 0.0),
        ("troika_queued_requests", 0.0),
        ("troika_running_requests", 0.0),
        ("troika_state_bytes", 0.0),
        ("troika_prompt_tokens_total", computed),
        ("troika_completion_tokens_total", 12.0),
        ("troika_cached_prompt_tokens_total{tier=\"ram\"}", 384.0 + parted_at as f64),
        ("troika_cached_prompt_tokens_total{tier=\"disk\"}", 0.0),
        // All but the last token of each answer.
        ("troika_step_tokens_total{lane=\"decode\"}", 9.0),
        ("troika_step_tokens_total{lane=\"prefill\"}", computed),
        ("troika_request_queue_seconds_count", 3.0),
        ("troika_time_to_first_token_seconds_count", 3.0),
        ("troika_inter_token_latency_seconds_count", 9.0),
        ("troika_cache_lookups_total{result=\"miss\"}", if parted_at == 0 { 2.0 } else { 1.0 }),
        // Three of the first prompt, one more of the last.
        ("troika_cache_blocks{tier=\"ram\"}", 4.0),
        ("troika_cache_blocks{tier=\"disk\"}", 4.0),
        ("troika_cache_skipped_blocks_total{reason=\"no_room\"}", 0.0),
        ("troika_cache_disk_dropped_writes_total", 0.0),
        ("troika_cache_disk_quarantined_files_total", 0.0),
        ("troika_cache_disk_failed_files_total{op=\"read\"}", 0.0),
        ("troika_cache_disk_failed_files_total{op=\"write\"}", 0.0),
        ("troika_cache_disk_not_asked_prefixes_total", 0.0),
        ("troika_cache_disk_loading_requests", 0.0),
        ("troika_cache_disk_failed", 0.0),
        ("troika_up", 1.0),
    ] {
        assert_eq!(sample(name), value, "{name}");
    }
    assert!(sample("troika_narrowed_chunks_total{rule=\"remaining\"}") >= 2.0);
    assert!(sample("troika_step_seconds_total{lane=\"prefill\"}") > 0.0);
    assert!(sample("troika_cache_bytes{tier=\"ram\"}") < sample("troika_cache_limit_bytes{tier=\"ram\"}"));
    assert!(
        samples.keys().any(|name| name.starts_with("troika_model_info") && name.contains("numeric_class=\"fast\""))
    );
    let nodes = |state: &str| -> f64 {
        let of_state =
            samples.iter().filter(|(name, _)| name.starts_with("troika_nodes_total") && name.contains(state));
        of_state.map(|(_, count)| count).sum()
    };
    assert!(nodes("submitted") > 100.0 && nodes("submitted") == nodes("completed") && nodes("failed") == 0.0);

    let log = server.stop();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("request ended")).collect();
    assert_eq!(lines.len(), 3, "{log}");
    assert!(lines[1].contains("cached_tokens=384") && lines[2].contains("diverged_at=300"), "{log}");
    assert!(lines.iter().all(|line| line.contains("INFO")), "{log}");

    // What is on disk serves the next process.
    let server = Server::with(&model, &["--cache-dir", &dir, "--chunk", "256"]);
    let again = post(&server, "", &ask(&prompt(1, PROMPT_TOKENS), 4));
    assert_eq!((cached(&again), &again["choices"]), ((384, &json!("disk")), &cold["choices"]));
    assert_eq!(record(&server, &again)["choices"][0]["cached_tokens_from_disk"], 384);
    assert_eq!(metrics(&server)["troika_cached_prompt_tokens_total{tier=\"disk\"}"], 384.0);
}

/// In memory and on disk, before and after a restart.
#[test]
fn keys_share_no_prefix_unless_told_to() {
    let scratch = Scratch::new();
    let (model, dir) = (scratch.arg("model"), scratch.arg("cache"));
    let args = ["--cache-dir", &dir, "--api-key", "one", "--api-key", "two"];
    let body = ask(&prompt(2, PROMPT_TOKENS), 2);
    let server = Server::with(&model, &args);
    let tokens = |server: &Server, key| cached(&post(server, key, &body)).0;
    assert_eq!(["one", "two", "one", "two"].map(|key| tokens(&server, key)), [0, 0, 384, 384]);
    server.stop();
    let server = Server::with(&model, &["--cache-dir", &dir, "--api-key", "two", "--api-key", "three"]);
    assert_eq!(["three", "two"].map(|key| tokens(&server, key)), [0, 384]);
    server.stop();
    let server = Server::with(&model, &["--api-key", "one", "--api-key", "two", "--share-between-keys"]);
    assert_eq!(["one", "two"].map(|key| tokens(&server, key)), [0, 384]);
}

/// The runner that `serve --chunk 16 --max-running 4` has.
fn runner(dir: &Path) -> Runner {
    let checkpoint = Checkpoint::open(dir, &map_file).expect("it opens");
    let weights = WeightTable::build(&checkpoint, ScaleCheck::All).expect("it is complete");
    let (config, options) = (checkpoint.config().model.clone(), RunnerOptions::new(NumericClass::Fast));
    Runner::new(config, weights.facts(), &weights, options).expect("it loads")
}

#[test]
fn a_small_memory_preempts_and_changes_no_token() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let runner = runner(&scratch.path("model"));
    let shape = runner.state_shape();
    let steps = runner.step_bytes(16, 0) + runner.step_bytes(4, 4);
    // Four prompts fit, and the first block of each answer; the rest does not.
    let state = 4 * shape.fixed_bytes() + 12 * shape.bytes_per_block();
    // No answer is to end by itself.
    let checkpoint = Checkpoint::open(&scratch.path("model"), &map_file).expect("it opens");
    let ends = checkpoint.config().eos_token_ids.iter().map(|token| (token.to_string(), json!(-100)));
    let bias = Value::Object(ends.collect());
    let body = |seed| {
        let mut body = ask(&prompt(seed, 100), 400);
        body["logit_bias"] = bias.clone();
        body
    };
    let bodies: Vec<Value> = (0..4).map(body).collect();
    let roomy = Server::with(&model, &["--no-cache"]);
    let want: Vec<Value> = bodies.iter().map(|body| post(&roomy, "", body)["choices"].clone()).collect();
    assert!(metrics(&roomy)["troika_state_limit_bytes"] > 1e6, "a limit is found");
    drop(roomy);

    let limit = (steps + state).to_string();
    let args = ["--memory-limit", &limit, "--chunk", "16", "--max-running", "4", "--no-cache"];
    let server = Server::with(&model, &args);
    std::thread::scope(|scope| {
        let answers: Vec<_> =
            bodies.iter().map(|body| scope.spawn(|| post(&server, "", body)["choices"].clone())).collect();
        for (answer, want) in answers.into_iter().zip(&want) {
            assert_eq!(&answer.join().expect("answers"), want);
        }
    });
    let samples = metrics(&server);
    assert!(samples["troika_sequences_total{event=\"preempted\"}"] > 0.0, "{samples:#?}");
    let limit = samples["troika_state_limit_bytes"];
    assert!(limit >= state as f64 && limit <= (steps + state) as f64, "{limit} of {state}");

    let log = server.stop();
    assert!(!log.contains("ERROR"), "{log}");
}

#[test]
fn memory_that_holds_nothing_is_refused() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    troika(&["serve", "--model", &model, "--port", "0", "--memory-limit", "10K"])
        .fails(1, &["--memory-limit 10.0 KiB"]);
    troika(&["run", "x", "--model", &model, "--memory-limit", "10K"]).fails(1, &["--memory-limit 10.0 KiB"]);
    troika(&["run", "x", "--model", &model, "--memory-limit", "1 apple"]).fails(2, &["--memory-limit"]);
    let long = "word ".repeat(2000);
    let runner = runner(&scratch.path("model"));
    let shape = runner.state_shape();
    let one_block =
        2 * (runner.step_bytes(16, 0) + runner.step_bytes(1, 1)) + shape.fixed_bytes() + shape.bytes_per_block();
    let limit = one_block.to_string();
    let server = Server::with(&model, &["--memory-limit", &limit, "--max-running", "1", "--no-cache"]);
    post(&server, "", &ask(&prompt(1, 100), 2));
    let tokens = prompt(1, 3840);
    let (status, body) = server.request("POST", "/v1/completions", &ask(&tokens, 2).to_string());
    assert!(status.contains("400"), "{status} {body}");
    for part in ["memory_limit_exceeded", "3840 tokens", "--memory-limit"] {
        assert!(body.contains(part), "no {part} in {body}");
    }
    let small = ["run", &long, "--model", &model, "--memory-limit", &limit];
    troika(&small).fails(1, &["tokens needs", "larger --memory-limit"]);
}

/// `plan` reckons with the model's own sizes; `stat`, `verify` and `clear` see what a server left, and damage to it.
#[test]
fn the_cache_folder_is_looked_after() {
    let scratch = Scratch::new();
    let (model, dir) = (scratch.arg("model"), scratch.arg("cache"));
    let runner = runner(&scratch.path("model"));
    let (block, boundary) =
        (runner.state_shape().kept_bytes_per_block(), runner.state_shape().boundary_bytes(runner.packing()));
    let header = troika_kvstore::format::HEADER_BYTES as u64;
    let plan = troika(&["cache", "plan", "--model", &model, "--cache-disk-limit", "1G"]).ok().stdout;
    for part in [
        format!("({} bytes)", block + header),
        format!("({} bytes)", boundary + header),
        "block of 128 tokens".to_owned(),
    ] {
        assert!(plan.contains(&part), "no {part} in {plan}");
    }

    let server = Server::with(&model, &["--cache-dir", &dir]);
    post(&server, "", &ask(&prompt(3, PROMPT_TOKENS), 2));
    troika(&["cache", "clear", &dir]).fails(1, &["in use by another process", &dir]);
    server.stop();
    let files: Vec<_> =
        std::fs::read_dir(scratch.path("cache")).expect("there").map(|file| file.expect("there").path()).collect();
    let ours: Vec<_> = files.iter().filter(|path| path.file_name().is_some_and(|name| name != "lock")).collect();
    let bytes: u64 = ours.iter().map(|path| path.metadata().expect("there").len()).sum();
    let boundaries = (bytes - 3 * (block + header)) / (boundary + header);
    assert_eq!((ours.len() as u64, bytes), (3 + boundaries, 3 * (block + header) + boundaries * (boundary + header)));
    assert!(boundaries >= 1, "there is a place to resume at");
    let stat = troika(&["cache", "stat", &dir]).ok().stdout;
    let kept = stat.lines().find(|line| line.starts_with("kept")).expect("the line").to_owned();
    assert!(kept.contains(&format!("{} files", ours.len())), "{stat}");
    assert!(stat.contains(&format!("{bytes} bytes in all")), "{stat}");
    let verified = troika(&["cache", "verify", &dir]).ok().stdout;
    assert!(verified.contains(&format!("{} sound, 0 damaged", ours.len())), "{verified}");

    let mut damaged = std::fs::read(ours[0]).expect("readable");
    *damaged.last_mut().expect("not empty") ^= 1;
    std::fs::write(ours[0], damaged).expect("writable");
    let foreign = scratch.path("cache").join("notes.txt");
    std::fs::write(&foreign, "mine").expect("writable");
    let verified = troika(&["cache", "verify", &dir]).fails(1, &[]).stdout;
    let name = ours[0].file_name().expect("a name").to_str().expect("UTF-8");
    assert!(
        verified.contains(name) && verified.contains(&format!("{} sound, 1 damaged", ours.len() - 1)),
        "{verified}"
    );

    let cleared = troika(&["cache", "clear", &dir]).ok().stdout;
    assert!(cleared.contains(&format!("{} files removed", ours.len())), "{cleared}");
    assert!(foreign.exists() && ours.iter().all(|path| !path.exists()), "only ours are gone");
    for command in ["stat", "verify", "clear"] {
        troika(&["cache", command, "/no/such/dir"]).fails(1, &["/no/such/dir"]);
    }
    troika(&["cache", "plan", "--model", "/no/such/dir"]).fails(1, &["/no/such/dir"]);
    let wrong = text(&foreign);
    troika(&["cache", "stat", &wrong]).fails(1, &["notes.txt"]);
}
