//! Clients that leave at any moment, and clients that must not hear each other, over HTTP.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::serving::Server;
use crate::support::Scratch;

/// For what takes a moment, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn completion(server: &Server, body: &Value) -> String {
    let (status, body) = server.request("POST", "/v1/completions", &body.to_string());
    assert!(status.contains("200"), "{status} {body}");
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    answer["choices"][0]["text"].as_str().expect("text").to_owned()
}

fn long_answer(prompt: &str) -> Value {
    json!({"prompt": prompt, "max_tokens": 4000, "temperature": 1})
}

/// Starts a stream.
fn begin(server: &Server, body: &Value) -> TcpStream {
    let mut body = body.clone();
    body["stream"] = true.into();
    let body = body.to_string();
    let mut socket = server.connect();
    let length = body.len();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ";
    socket.write_all(format!("{head}{length}\r\n\r\n{body}").as_bytes()).expect("sent");
    socket
}

/// Starts a stream, reads `events` of it, waits, and goes away.
fn leave(server: &Server, body: &Value, events: usize, pause: Duration) {
    let mut socket = begin(server, body);
    for _ in 0..events {
        let mut some = [0; 64];
        let _ = socket.read(&mut some).expect("the stream goes on");
    }
    std::thread::sleep(pause);
    let _ = socket.shutdown(Shutdown::Both);
}

fn wait_until<T: Debug>(look: impl Fn() -> T, is_there: impl Fn(&T) -> bool) {
    let start = Instant::now();
    loop {
        let seen = look();
        if is_there(&seen) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{seen:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What is not as it was before anybody came.
fn left_behind(server: &Server) -> Vec<String> {
    let metrics = server.request("GET", "/metrics", "").1;
    let gauges =
        ["queued_requests", "running_requests", "state_bytes", "state_used_blocks", "cache_disk_loading_requests"];
    let lines = gauges.map(|name| {
        let line = metrics.lines().find(|line| line.starts_with(&format!("troika_{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {metrics}")).to_owned()
    });
    lines.into_iter().filter(|line| !line.ends_with(" 0")).collect()
}

/// Whoever goes away, queued, in prefill or in decode, leaves the server as it was.
#[test]
fn two_hundred_clients_leave_nothing_behind() {
    let scratch = Scratch::new();
    let server = Server::start_with(&["--model", &scratch.arg("model"), "--max-running", "2", "--chunk", "64"]);
    let mut dice = Dice(11);
    let long = "one two three four five six seven eight nine ten ".repeat(60);
    // The gauges do count.
    let look = || {
        let _socket = begin(&server, &long_answer("hello"));
        left_behind(&server)
    };
    wait_until(look, |shown| shown.len() >= 3);
    for round in 0..200 {
        let pause = Duration::from_micros(dice.roll(8000));
        match dice.roll(3) {
            // Two have the places, the third is queued.
            0 => std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| leave(&server, &long_answer("hello"), 0, pause));
                }
            }),
            1 => leave(&server, &long_answer(&long[..500 + dice.roll(2000) as usize]), 0, pause),
            _ => leave(&server, &long_answer("hello"), 1 + dice.roll(5) as usize, pause),
        }
        completion(&server, &json!({"prompt": "x", "max_tokens": 2}));
        if round % 50 == 49 {
            wait_until(|| left_behind(&server), Vec::is_empty);
        }
    }
}

const WORDS: [&str; 8] = ["apple", "violin", "harbor", "copper", "meadow", "lantern", "pepper", "glacier"];

/// Drawn by chance from the model's own probabilities, with the same seed each time: a wrong bit soon shows.
fn ask(word: &str) -> Value {
    let prompt = format!("The secret word of this letter is {word}. I say it again: {word}. The secret word is");
    json!({"prompt": prompt, "max_tokens": 24, "temperature": 1, "seed": 7})
}

/// Eight at once, each with a word of its own: each says what it says alone.
fn foreign_words(rounds: u64) {
    let server = Server::start_with(&["--chunk", "32"]);
    let alone = WORDS.map(|word| completion(&server, &ask(word)));
    let different: BTreeSet<&String> = alone.iter().collect();
    assert_eq!(different.len(), WORDS.len(), "what they say depends on the word: {alone:?}");
    for round in 0..rounds {
        std::thread::scope(|scope| {
            for (index, word) in WORDS.into_iter().enumerate() {
                let (server, alone) = (&server, &alone);
                scope.spawn(move || {
                    let mut dice = Dice(round * 8 + index as u64);
                    std::thread::sleep(Duration::from_micros(dice.roll(5000)));
                    // Every third goes away early; the others must not hear what it would have said.
                    if dice.roll(3) == 0 {
                        leave(server, &ask(word), dice.roll(3) as usize, Duration::from_micros(dice.roll(5000)));
                    } else {
                        assert_eq!(completion(server, &ask(word)), alone[index], "round {round}");
                    }
                });
            }
        });
    }
}

#[test]
fn no_foreign_word() {
    foreign_words(12);
}

#[test]
#[ignore = "takes half a minute; the 12 rounds of the test above are among these"]
fn no_foreign_word_in_a_hundred_rounds() {
    foreign_words(100);
}
