//! Real HTTP over loopback against a scripted engine.

mod access;
mod answers;
mod anthropic;
mod client;
mod diagnosis;
mod lifecycle;
mod page;
mod parameters;
mod refusals;
mod responses;
mod streams;
mod tools;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};
use troika_prompt::{FixedTexts, Tokenizer};
use troika_server::parameters::Endpoint;
use troika_server::{Access, Limits, SamplingDefaults, ServerError, ServerState, serve};
use troika_testkit::{
    scripted::{Act, Outcome, ScriptedEngine},
    tokenizer::TokenizerSpec,
};

use crate::client::{Reply, Stream};

/// Longer than anything takes that works.
const PATIENCE: Duration = Duration::from_secs(60);
const BOS: u32 = 256;
const EOS: u32 = 257;

/// A running server and its engine.
struct World {
    engine: Arc<ScriptedEngine>,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    server: JoinHandle<Result<(), ServerError>>,
}

impl World {
    async fn saying(text: &str) -> Self {
        Self::start(says(text)).await
    }

    async fn start(script: Vec<Act>) -> Self {
        Self::with(script, |_| {}).await
    }

    async fn with(script: Vec<Act>, change: impl FnOnce(&mut ServerState)) -> Self {
        let engine = Arc::new(ScriptedEngine::new(script));
        let tokenizer = Tokenizer::from_bytes("tokenizer.json", &TokenizerSpec::plain().to_json());
        let mut state = ServerState {
            generator: engine.clone(),
            tokenizer: Arc::new(tokenizer.expect("the test tokenizer loads")),
            texts: Arc::new(FixedTexts::from_source("texts.py".into(), "")),
            model_id: "troika/nano".into(),
            created_unix_s: 1_700_000_000,
            defaults: SamplingDefaults { temperature: 0.25, top_p: 0.75 },
            max_context_tokens: 4096,
            stop_tokens: vec![EOS],
            numeric_class: "exact".into(),
            devices: vec!["a scripted engine".into()],
            degraded: None,
            access: Access::default(),
            limits: Limits { grace: Duration::from_millis(300), ..Limits::default() },
        };
        change(&mut state);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback is there");
        let address = listener.local_addr().expect("a bound socket has an address");
        let (stop, stopped) = oneshot::channel::<()>();
        let server = tokio::spawn(serve(listener, state, async {
            let _ = stopped.await;
        }));
        Self { engine, address, stop: Some(stop), server }
    }

    async fn get(&self, path: &str) -> Reply {
        client::send(self.address, "GET", path, &[], b"").await
    }

    async fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_bytes(path, body.to_string().as_bytes()).await
    }

    async fn post_bytes(&self, path: &str, body: &[u8]) -> Reply {
        client::send(self.address, "POST", path, &[("content-type", "application/json")], body).await
    }

    async fn stream(&self, path: &str, body: &Value) -> Stream {
        Stream::open(self.address, path, body.to_string().as_bytes()).await
    }

    async fn shut_down(mut self) {
        self.stop.take().expect("only once").send(()).expect("the server runs");
        tokio::time::timeout(PATIENCE, self.server)
            .await
            .expect("the server ends")
            .expect("no panic")
            .expect("no error");
    }
}

/// Waits until so many requests have ended.
async fn outcomes(engine: &ScriptedEngine, count: usize) -> Vec<Outcome> {
    let waited = tokio::time::timeout(PATIENCE, async {
        while engine.outcomes().len() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        engine.outcomes()
    });
    waited.await.expect("the requests end")
}

/// A script that says this, one byte a token, and ends by itself.
fn says(text: &str) -> Vec<Act> {
    text.bytes().map(|byte| Act::Token(byte.into())).collect()
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hello"}]}), more)
}

fn completion(more: Value) -> Value {
    with(json!({"prompt": "hello", "max_tokens": 1000}), more)
}

/// A usage, and what it says of the request beyond other servers, of which the times differ every time.
fn split_usage(usage: &Value) -> (Value, Value) {
    let mut usage = usage.clone();
    let extension = usage.as_object_mut().and_then(|usage| usage.remove("troika")).expect("the extension is there");
    for time in ["queue_ms", "prefill_ms", "decode_ms"] {
        assert!(extension[time].as_f64().is_some_and(|ms| ms >= 0.0), "{extension}");
    }
    (usage, extension)
}

fn with(mut body: Value, more: Value) -> Value {
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    body
}

/// The least that each route answers.
fn minimal(endpoint: Endpoint) -> Value {
    let messages = json!([{"role": "user", "content": "hello"}]);
    match endpoint {
        Endpoint::Chat => json!({"messages": messages}),
        Endpoint::Completions => json!({"prompt": "hello"}),
        Endpoint::Messages => json!({"messages": messages, "max_tokens": 1000}),
        Endpoint::Responses => json!({"input": "hello"}),
    }
}
