//! A small HTTP/1.1 client that shows what is really on the wire.

use std::net::SocketAddr;

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::PATIENCE;

/// One whole answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The JSON of a success.
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        self.json()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }

    /// Checks that this is an error in OpenAI's shape.
    pub(crate) fn refuses(&self, status: u16, code: &str, param: Option<&str>) {
        let body = self.json();
        let error = &body["error"];
        assert_eq!(self.status, status, "{body}");
        assert_eq!((error["code"].as_str(), error["param"].as_str()), (Some(code), param), "{body}");
        assert!(!error["message"].as_str().unwrap_or_default().is_empty(), "{body}");
        assert!(error["type"].is_string(), "{body}");
        let mut members: Vec<&String> = error.as_object().expect("an object").keys().collect();
        members.sort();
        assert_eq!(members, ["code", "message", "param", "type"]);
        assert_eq!(self.header("content-type"), Some("application/json"));
    }
}

pub(crate) fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let lines = head.lines().filter_map(|line| line.split_once(": "));
    lines.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

fn request_head(method: &str, path: &str, headers: &[(&str, &str)], body_len: usize) -> String {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {body_len}\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    head + "\r\n"
}

/// Sends one request on a connection of its own.
pub(crate) async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    let headers: Vec<_> = headers.iter().copied().chain([("connection", "close")]).collect();
    let head = request_head(method, path, &headers, body.len());
    raw(address, &[head.as_bytes(), body].concat()).await
}

/// Sends these bytes and reads what comes until the server closes.
pub(crate) async fn raw(address: SocketAddr, bytes: &[u8]) -> Reply {
    let exchange = async {
        let mut socket = TcpStream::connect(address).await.expect("the server listens");
        socket.write_all(bytes).await.expect("the server reads");
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).await.expect("the server answers");
        answer
    };
    let answer = timeout(PATIENCE, exchange).await.expect("an answer in time");
    let end = find(&answer, b"\r\n\r\n").expect("a whole head");
    let head = String::from_utf8(answer[..end].to_vec()).expect("a head of text");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let mut body = answer[end + 4..].to_vec();
    if header(&head, "transfer-encoding") == Some("chunked") {
        let mut rest = body.as_slice();
        let mut whole = Vec::new();
        while let Some((chunk, after)) = split_chunk(rest) {
            whole.extend_from_slice(chunk);
            rest = after;
        }
        body = whole;
    }
    Reply { status, head, body }
}

/// First chunk of a chunked body and what follows; `None` if it has not come whole, or is the end.
fn split_chunk(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let line = find(bytes, b"\r\n")?;
    let len = usize::from_str_radix(std::str::from_utf8(&bytes[..line]).ok()?, 16).ok().filter(|len| *len > 0)?;
    let chunk = bytes.get(line + 2..line + 2 + len)?;
    Some((chunk, bytes.get(line + 2 + len + 2..)?))
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

/// A stream of server-sent events being read.
pub(crate) struct Stream {
    socket: TcpStream,
    pub(crate) head: String,
    /// Bytes as they came, chunk frames included.
    wire: Vec<u8>,
    text: String,
}

impl Stream {
    pub(crate) async fn open(address: SocketAddr, path: &str, body: &[u8]) -> Self {
        let mut socket = TcpStream::connect(address).await.expect("the server listens");
        let headers = [("content-type", "application/json"), ("connection", "close")];
        let head = request_head("POST", path, &headers, body.len());
        socket.write_all(&[head.as_bytes(), body].concat()).await.expect("the server reads");
        let mut stream = Self { socket, head: String::new(), wire: Vec::new(), text: String::new() };
        loop {
            if let Some(end) = find(&stream.wire, b"\r\n\r\n") {
                stream.head = String::from_utf8(stream.wire.drain(..end + 4).collect()).expect("a head of text");
                return stream;
            }
            assert!(stream.read().await, "the server closed before it answered");
        }
    }

    async fn read(&mut self) -> bool {
        let mut buffer = [0; 4096];
        let len = timeout(PATIENCE, self.socket.read(&mut buffer)).await.expect("more in time").unwrap_or(0);
        self.wire.extend_from_slice(&buffer[..len]);
        len > 0
    }

    /// The next event or comment, without the empty line after it. `None` at the end.
    pub(crate) async fn block(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let block = self.text[..end].to_owned();
                self.text.drain(..end + 2);
                return Some(block);
            }
            if let Some((chunk, rest)) = split_chunk(&self.wire) {
                self.text.push_str(std::str::from_utf8(chunk).expect("whole characters"));
                self.wire = rest.to_vec();
            } else if !self.read().await {
                assert_eq!(self.text, "", "the stream ends with a whole event");
                return None;
            }
        }
    }

    /// The data of the next event that is not a comment.
    pub(crate) async fn data(&mut self) -> Option<String> {
        loop {
            let block = self.block().await?;
            if !block.starts_with(':') {
                return Some(block.strip_prefix("data: ").expect("an event is data").to_owned());
            }
        }
    }

    pub(crate) async fn rest(&mut self) -> Vec<String> {
        let mut rest = Vec::new();
        while let Some(data) = self.data().await {
            rest.push(data);
        }
        rest
    }

    /// The whole stream, put together.
    pub(crate) async fn collect(mut self) -> Collected {
        assert!(self.head.starts_with("HTTP/1.1 200"), "{}", self.head);
        let mut collected = Collected::default();
        for data in self.rest().await {
            collected.add(&data);
        }
        collected
    }
}

/// What a stream said.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub(crate) text: String,
    pub(crate) finish_reason: Option<String>,
    pub(crate) usage: Option<Value>,
    pub(crate) error: Option<Value>,
    pub(crate) is_done: bool,
    pub(crate) ids: Vec<String>,
}

impl Collected {
    fn add(&mut self, data: &str) {
        assert!(!self.is_done && self.error.is_none(), "nothing follows the end: {data}");
        if data == "[DONE]" {
            self.is_done = true;
            return;
        }
        let event: Value = serde_json::from_str(data).expect("an event is JSON");
        if event["error"].is_object() {
            self.error = Some(event["error"].clone());
            return;
        }
        self.ids.push(event["id"].as_str().expect("an id").to_owned());
        for choice in event["choices"].as_array().expect("choices") {
            let piece = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str()).unwrap_or_default();
            assert!(self.finish_reason.is_none(), "nothing follows the finish reason");
            self.text.push_str(piece);
            self.finish_reason = choice["finish_reason"].as_str().map(str::to_owned);
        }
        if event["usage"].is_object() {
            self.usage = Some(event["usage"].clone());
        }
    }
}
