//! HTTP to the server under test, as any client would speak it: completions as a stream of events, and the status pages.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::Agent;

use crate::BenchError;

/// One answer may take so long before a run is given up: long prompts on a slow machine take hours, and a server that ends
/// is noticed at once.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// Speaks to one server. Clones share connections.
#[derive(Clone, Debug)]
pub struct Client {
    agent: Agent,
    base: String,
}

/// Seconds by device and kind of operation.
pub type NodeSeconds = BTreeMap<(String, String), f64>;

/// A line such as `troika_node_seconds_total{device="0",kind="gate"} 1.5`.
fn node_seconds(line: &str) -> Option<((String, String), f64)> {
    let (labels, seconds) = line.strip_prefix("troika_node_seconds_total{")?.split_once("} ")?;
    let label = |name: &str| {
        let (_, rest) = labels.split_once(&format!("{name}=\""))?;
        rest.split_once('"').map(|(value, _)| value.to_owned())
    };
    Some(((label("device")?, label("kind")?), seconds.trim().parse().ok()?))
}

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    pub prompt: &'a [u32],
    /// Exactly so many tokens, even if the model would end earlier.
    pub generate: usize,
}

/// An answer as the client saw it. Times are seconds after the request was sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub id: String,
    /// When each piece of text came, and the piece: one token, or several that make up a character.
    pub pieces: Vec<(f64, String)>,
    pub total_s: f64,
    pub usage: Usage,
}

/// What the server counted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// Everything else that the server says of its own accord.
    pub all: Value,
}

impl Answer {
    /// Time to the first piece.
    pub fn ttft_s(&self) -> Option<f64> {
        self.pieces.first().map(|(at, _)| *at)
    }

    /// Mean time of a token after the first. The end of the stream stands for the last token, which may have no text.
    pub fn tpot_s(&self) -> Option<f64> {
        let after = self.usage.completion_tokens.checked_sub(1).filter(|after| *after > 0)?;
        Some((self.total_s - self.ttft_s()?) / after as f64)
    }

    /// Gaps between pieces.
    pub fn gaps_s(&self) -> Vec<f64> {
        self.pieces.windows(2).map(|pair| pair[1].0 - pair[0].0).collect()
    }

    /// All of it.
    pub fn text(&self) -> String {
        self.pieces.iter().map(|(_, text)| text.as_str()).collect()
    }
}

impl Client {
    /// Of a server at `address`, host and port.
    pub fn new(address: &str) -> Self {
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE));
        // The server is on this machine, whatever proxy the environment names.
        let config = config.proxy(None).build();
        Self { agent: config.new_agent(), base: format!("http://{address}") }
    }

    /// A JSON document of the server's.
    ///
    /// # Errors
    ///
    /// If there is none, or its status is not 200.
    pub fn get(&self, path: &str) -> Result<Value, BenchError> {
        let mut response = self.agent.get(format!("{}{path}", self.base)).call().map_err(|e| fault(path, &e))?;
        let status = response.status().as_u16();
        let text = response.body_mut().read_to_string().map_err(|e| fault(path, &e))?;
        if status != 200 {
            return Err(BenchError::Refused { path: path.to_owned(), status, body: text });
        }
        serde_json::from_str(&text).map_err(|e| fault(path, &e))
    }

    /// Seconds that nodes of each kind have taken on each device since the server started, from its metrics.
    ///
    /// # Errors
    ///
    /// If it does not answer with metrics.
    pub fn node_seconds(&self) -> Result<NodeSeconds, BenchError> {
        let path = "/metrics";
        let mut response = self.agent.get(format!("{}{path}", self.base)).call().map_err(|e| fault(path, &e))?;
        let text = response.body_mut().read_to_string().map_err(|e| fault(path, &e))?;
        Ok(text.lines().filter_map(node_seconds).collect())
    }

    /// Generates greedily from token ids and notes when each piece came.
    ///
    /// # Errors
    ///
    /// If the server refuses, fails, or ends the answer early.
    pub fn complete(&self, ask: &Ask) -> Result<Answer, BenchError> {
        let path = "/v1/completions";
        let body = json!({
            "prompt": ask.prompt,
            "max_tokens": ask.generate,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
            "ignore_eos": true,
        });
        let body = body.to_string();
        let sent = Instant::now();
        let request = self.agent.post(format!("{}{path}", self.base)).header("content-type", "application/json");
        let mut response = request.send(body).map_err(|e| fault(path, &e))?;
        let status = response.status().as_u16();
        if status != 200 {
            let body = response.body_mut().read_to_string().unwrap_or_default();
            return Err(BenchError::Refused { path: path.to_owned(), status, body });
        }
        let mut answer = Answer::default();
        for line in BufReader::new(response.body_mut().as_reader()).lines() {
            let line = line.map_err(|e| fault(path, &e))?;
            let at = sent.elapsed().as_secs_f64();
            match line.strip_prefix("data: ") {
                None => {}
                Some("[DONE]") => answer.total_s = at,
                Some(data) => answer.hear(at, &serde_json::from_str(data).map_err(|e| fault(path, &e))?)?,
            }
        }
        if answer.total_s == 0.0 || answer.usage.completion_tokens != ask.generate {
            let why = format!("{} of {} tokens came", answer.usage.completion_tokens, ask.generate);
            return Err(BenchError::Http { path: path.to_owned(), why });
        }
        Ok(answer)
    }
}

impl Answer {
    /// One event of the stream.
    fn hear(&mut self, at: f64, event: &Value) -> Result<(), BenchError> {
        if let Some(error) = event.get("error") {
            return Err(BenchError::Http { path: "/v1/completions".to_owned(), why: error.to_string() });
        }
        if let Some(id) = event["id"].as_str().filter(|_| self.id.is_empty()) {
            id.clone_into(&mut self.id);
        }
        if let Some(text) = event["choices"][0]["text"].as_str().filter(|text| !text.is_empty()) {
            self.pieces.push((at, text.to_owned()));
        }
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            let count = |value: &Value| value.as_u64().unwrap_or(0) as usize;
            self.usage = Usage {
                prompt_tokens: count(&usage["prompt_tokens"]),
                cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
                completion_tokens: count(&usage["completion_tokens"]),
                all: usage.clone(),
            };
        }
        Ok(())
    }
}

fn fault(path: &str, error: &dyn std::error::Error) -> BenchError {
    BenchError::Http { path: path.to_owned(), why: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_line_by_line() {
        let line = r#"troika_node_seconds_total{device="1",kind="shared_expert"} 0.25"#;
        assert_eq!(node_seconds(line), Some((("1".to_owned(), "shared_expert".to_owned()), 0.25)));
        assert_eq!(node_seconds("# TYPE troika_node_seconds counter"), None);
        assert_eq!(node_seconds(r#"troika_nodes_total{device="1",kind="gate",state="failed"} 3"#), None);
    }

    #[test]
    fn an_answer_is_read_event_by_event() {
        let mut answer = Answer::default();
        let text = |text: &str| json!({"id": "cmpl-1", "choices": [{"text": text}], "usage": null});
        answer.hear(0.5, &text("a")).expect("no error");
        answer.hear(0.6, &text("")).expect("no error");
        answer.hear(0.7, &text("bc")).expect("no error");
        let usage = json!({"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}});
        answer.hear(0.7, &json!({"id": "cmpl-1", "choices": [], "usage": usage})).expect("no error");
        assert_eq!((answer.id.as_str(), answer.text().as_str()), ("cmpl-1", "abc"));
        assert_eq!(answer.ttft_s(), Some(0.5));
        answer.total_s = 0.7;
        assert!((answer.tpot_s().expect("three tokens") - 0.1).abs() < 1e-12);
        assert_eq!(answer.gaps_s().len(), 1);
        assert_eq!((answer.usage.prompt_tokens, answer.usage.cached_tokens), (9, 4));
        let error = answer.hear(0.8, &json!({"error": {"message": "no more"}})).expect_err("an error");
        assert!(error.to_string().contains("no more"), "{error}");
    }
}
