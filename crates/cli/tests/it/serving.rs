//! `troika serve` and signals.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::{Scratch, command, troika};

/// A server on a free port, ended when dropped.
pub(crate) struct Server {
    child: Child,
    address: String,
    /// What it has logged since it began to serve, once it has ended.
    log: Option<JoinHandle<String>>,
}

impl Server {
    pub(crate) fn start(model: &str) -> Self {
        Self::with(model, &[])
    }

    pub(crate) fn with(model: &str, more: &[&str]) -> Self {
        Self::start_with(&[&["--model", model], more].concat())
    }

    pub(crate) fn start_with(args: &[&str]) -> Self {
        let args = [&["serve", "--port", "0"], args].concat();
        let mut child = command(&args).stderr(Stdio::piped()).spawn().expect("starts");
        let mut log = BufReader::new(child.stderr.take().expect("piped"));
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert!(log.read_line(&mut line).expect("readable") > 0, "the server ended before it served");
            if let Some((_, address)) = line.split_once("http://") {
                break address.split_whitespace().next().expect("an address").to_owned();
            }
        };
        // Somebody has to read the log, or the server would stop at a full pipe.
        let log = std::thread::spawn(move || {
            let mut rest = String::new();
            log.read_to_string(&mut rest).expect("the log is UTF-8");
            rest
        });
        Self { child, address, log: Some(log) }
    }

    /// Ends it in good order; returns its log.
    pub(crate) fn stop(mut self) -> String {
        self.signal("TERM");
        assert_eq!(code_within(&mut self.child, Duration::from_secs(30)), Some(0));
        self.log.take().expect("only once").join().expect("readable")
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).expect("the server listens")
    }

    /// Status line and body of one request.
    pub(crate) fn request(&self, method: &str, path: &str, body: &str) -> (String, String) {
        self.request_as("", method, path, body)
    }

    /// As [`Self::request`], with a key.
    pub(crate) fn request_as(&self, key: &str, method: &str, path: &str, body: &str) -> (String, String) {
        let mut stream = self.connect();
        let address = &self.address;
        let head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nx-api-key: {key}\r\nconnection: close\r\n");
        let content = format!("content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(format!("{head}{content}").as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a whole answer");
        (head.lines().next().expect("a status").to_owned(), body.to_owned())
    }

    fn signal(&self, name: &str) {
        signal(&self.child, name);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(child: &Child, name: &str) {
    let sent =
        Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().expect("kill is there");
    assert!(sent.success());
}

fn code_within(child: &mut Child, limit: Duration) -> Option<i32> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it is our child") {
            return status.code();
        }
        assert!(start.elapsed() < limit, "the process does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_server_answers_and_ends_in_good_order() {
    let scratch = Scratch::new();
    let mut server = Server::start(&scratch.arg("model"));
    let (status, body) = server.request("GET", "/health", "");
    assert!(status.contains("200") && body.contains("ok"), "{status} {body}");
    let (_, models) = server.request("GET", "/v1/models", "");
    assert!(models.contains("\"model\""), "{models}");
    let ask = r#"{"prompt": "hello", "max_tokens": 5, "seed": 3}"#;
    let (status, first) = server.request("POST", "/v1/completions", ask);
    assert!(status.contains("200"), "{status} {first}");
    let text =
        |body: &str| serde_json::from_str::<serde_json::Value>(body).expect("JSON")["choices"][0]["text"].clone();
    assert_eq!(text(&first), text(&server.request("POST", "/v1/completions", ask).1), "the same seed, the same text");
    let (status, body) = server.request("POST", "/v1/completions", r#"{"prompt": "x", "best_of": 3}"#);
    assert!(status.contains("400") && body.contains("best_of"), "{status} {body}");
    server.signal("TERM");
    assert_eq!(code_within(&mut server.child, Duration::from_secs(30)), Some(0));
}

/// A folder for prefixes that goes away while the server runs, and one that cannot be had: it serves without, and says so.
#[test]
fn a_server_without_its_cache_folder_says_so() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let dir = scratch.arg("cache");
    let health = |server: &Server| {
        let (status, body) = server.request("GET", "/health", "");
        assert!(status.contains("200"), "{status}");
        let health: serde_json::Value = serde_json::from_str(&body).expect("JSON");
        ["status", "reason"].map(|name| health[name].as_str().unwrap_or_default().to_owned())
    };
    let server = Server::start_with(&["--model", &model, "--cache-dir", &dir]);
    assert_eq!(health(&server), ["ok", ""]);
    let second = Server::start_with(&["--model", &model, "--cache-dir", &dir]);
    let [status, reason] = health(&second);
    assert!(status == "degraded" && reason.contains("in use by another process"), "{status}: {reason}");
    std::fs::remove_dir_all(&dir).expect("removable");
    let start = Instant::now();
    while health(&server)[0] == "ok" {
        assert!(start.elapsed() < Duration::from_secs(60), "it never says so");
        let prompt = format!("{:?} {}", start.elapsed(), "one two three four ".repeat(40));
        let ask = serde_json::json!({"prompt": prompt, "max_tokens": 2}).to_string();
        let (status, body) = server.request("POST", "/v1/completions", &ask);
        assert!(status.contains("200"), "{status} {body}");
    }
    let [status, reason] = health(&server);
    assert!(status == "degraded" && reason.contains("prefixes are not kept on disk"), "{status}: {reason}");
}

#[test]
fn addresses_that_cannot_be_served_are_refused() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    troika(&["serve", "--model", &model, "--host", "0.0.0.0"]).fails(1, &["0.0.0.0", "other machines"]);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    troika(&["serve", "--model", &model, "--port", &port]).fails(1, &["cannot listen", &port]);
}

#[test]
fn an_interrupted_run_keeps_its_text_and_says_so() {
    let scratch = Scratch::new();
    for (name, want) in [("INT", 130), ("TERM", 143)] {
        let args = ["run", "hello", "--model", &scratch.arg("model"), "-n", "100000", "--temperature", "1"];
        let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
        let mut some = [0; 16];
        child.stdout.as_mut().expect("piped").read_exact(&mut some).expect("text comes");
        signal(&child, name);
        let mut rest = Vec::new();
        child.stdout.take().expect("piped").read_to_end(&mut rest).expect("ends");
        assert_eq!(code_within(&mut child, Duration::from_secs(30)), Some(want), "{name}");
        let mut summary = String::new();
        child.stderr.take().expect("piped").read_to_string(&mut summary).expect("UTF-8");
        assert!(summary.contains("ended by interrupted") || summary.contains("interrupted"), "{summary}");
    }
}
