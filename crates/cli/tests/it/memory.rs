//! What `inspect --memory` foresees against a server that serves. Linux only: it reads /proc.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::serving::Server;
use crate::support::troika;

/// Resident bytes of a process now.
fn resident_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux says it");
    line.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number") << 10
}

/// Prompts whose ids spread over the vocabulary, so that every expert and every part of the embedding is read. What steps
/// needed and gave back is partly kept by the allocator, which makes some megabytes of the difference, and a program that
/// was built for tests is larger than one that serves.
///
/// Not run with the others: what a program built for tests has resident beside many others is not what `inspect` foresees.
#[test]
#[ignore = "resident memory of a release build on a quiet machine: cargo nextest run --release -p troika --run-ignored only memory"]
fn a_server_takes_the_memory_that_was_foreseen() {
    /// Most that the two may differ, of the larger one.
    const BOUND: f64 = 0.15;
    /// What an answer itself needed is given back a moment later.
    const PATIENCE: Duration = Duration::from_secs(60);
    let nano = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano");
    for class in ["fast", "exact"] {
        let args = ["inspect", nano, "--memory", "--class", class, "--tokens", "1024", "--threads", "2", "--json", "-"];
        let foreseen = troika(&args).ok().json()["resident_bytes"].as_u64().expect("a number");
        let server = Server::start_with(&["--model", nano, "--class", class, "--threads", "2", "--no-cache"]);
        for prompt in 0..3u64 {
            let ids: Vec<u64> = (0..1000).map(|i| (i * 7919 + prompt) % 4096).collect();
            let ask = json!({"prompt": ids, "max_tokens": 2}).to_string();
            let (status, body) = server.request("POST", "/v1/completions", &ask);
            assert!(status.contains("200"), "{status} {body}");
            let answer: Value = serde_json::from_str(&body).expect("JSON");
            assert_eq!(answer["usage"]["prompt_tokens"], 1000, "{body}");
        }
        let asked = Instant::now();
        loop {
            let measured = resident_bytes(server.pid());
            let difference = (foreseen as f64 - measured as f64) / foreseen.max(measured) as f64;
            println!("{class}: foreseen {foreseen}, measured {measured}: {:+.1} %", difference * 100.0);
            if difference.abs() < BOUND {
                break;
            }
            assert!(asked.elapsed() < PATIENCE, "{class}: {foreseen} bytes foreseen, {measured} measured");
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}
