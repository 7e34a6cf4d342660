//! Answers of `/v1/responses`.

use serde_json::{Map, Value, json};

use super::{Answer, EventQueue, Format, extension};
use crate::{
    body::BodyShare,
    error::ApiError,
    generation::{Ending, Piece, Usage},
    store::{ItemText, ResponseStore},
};

/// What the document repeats of its request.
pub(crate) type Echo = Map<String, Value>;

/// Where a response will be kept, and what came before it.
pub(crate) struct Keep {
    pub(crate) store: ResponseStore,
    pub(crate) items: ItemText,
}

/// One response, and how much of it has come.
pub(crate) struct Responses {
    id: String,
    model_id: String,
    created_unix_s: u64,
    echo: Echo,
    keep: Option<Keep>,
    _share: BodyShare,
    /// Items that are complete.
    output: Vec<Value>,
    open: Option<Item>,
    num_events: u64,
    ending: Option<Ending>,
}

/// The item that is being streamed.
struct Item {
    id: String,
    kind: ItemKind,
    text: String,
}

#[derive(Clone, PartialEq, Eq)]
enum ItemKind {
    Reasoning,
    Message,
    Call { call_id: String, name: String },
}

impl Item {
    fn new(kind: ItemKind) -> Self {
        let prefix = match kind {
            ItemKind::Reasoning => "rs",
            ItemKind::Message => "msg",
            ItemKind::Call { .. } => "fc",
        };
        Self { id: format!("{prefix}_{}", crate::random_name()), kind, text: String::new() }
    }

    fn json(&self, status: &str, parts: &[Value]) -> Value {
        let (id, text) = (&self.id, &self.text);
        match &self.kind {
            ItemKind::Reasoning => {
                json!({"id": id, "type": "reasoning", "summary": [], "content": parts, "status": status})
            }
            ItemKind::Message => {
                json!({"id": id, "type": "message", "role": "assistant", "content": parts, "status": status})
            }
            ItemKind::Call { call_id, name } => json!({
                "id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": text, "status": status,
            }),
        }
    }

    /// The one part of a reasoning or message item.
    fn part(&self) -> Option<Value> {
        match self.kind {
            ItemKind::Reasoning => Some(json!({"type": "reasoning_text", "text": self.text})),
            ItemKind::Message => {
                Some(json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}))
            }
            ItemKind::Call { .. } => None,
        }
    }
}

fn usage_json(id: &str, usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.served.cached_tokens},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
        "troika": extension(id, usage),
    })
}

impl Responses {
    pub(crate) fn new(
        id: String,
        model_id: String,
        created_unix_s: u64,
        echo: Echo,
        keep: Option<Keep>,
        share: BodyShare,
    ) -> Self {
        Self {
            _share: share,
            id,
            model_id,
            created_unix_s,
            echo,
            keep,
            output: Vec::new(),
            open: None,
            num_events: 0,
            ending: None,
        }
    }

    fn document(&self, status: &str, usage: Option<Usage>, error: Option<&ApiError>) -> Value {
        let reason = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let mut document = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_unix_s,
            "status": status,
            "background": false,
            "error": error.map(|error| json!({"code": "server_error", "message": error.message()})),
            "incomplete_details": reason,
            "model": self.model_id,
            "output": self.output,
            "truncation": "disabled",
            "usage": usage.map(|usage| usage_json(&self.id, usage)),
        });
        if let Some(document) = document.as_object_mut() {
            document.extend(self.echo.clone());
        }
        document
    }

    fn send(&mut self, kind: &str, more: Value, events: &mut EventQueue) {
        let mut event = json!({"type": kind, "sequence_number": self.num_events});
        if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
            event.extend(more);
        }
        self.num_events += 1;
        events.named(kind, &event);
    }

    /// Opens an item of this kind unless the open one is.
    fn enter(&mut self, kind: ItemKind, events: &mut EventQueue) {
        if self.open.as_ref().is_some_and(|item| item.kind == kind) {
            return;
        }
        self.leave("completed", events);
        let (item, index) = (Item::new(kind), self.output.len());
        self.send(
            "response.output_item.added",
            json!({"output_index": index, "item": item.json("in_progress", &[])}),
            events,
        );
        if let Some(part) = item.part() {
            let more = json!({"item_id": item.id, "output_index": index, "content_index": 0, "part": part});
            self.send("response.content_part.added", more, events);
        }
        self.open = Some(item);
    }

    fn say(&mut self, text: &str, events: &mut EventQueue) {
        let index = self.output.len();
        let Some(item) = &mut self.open else { return };
        item.text.push_str(text);
        let id = item.id.clone();
        let (kind, more) = match item.kind {
            ItemKind::Reasoning => (
                "response.reasoning_text.delta",
                json!({"item_id": id, "output_index": index, "content_index": 0, "delta": text}),
            ),
            ItemKind::Message => (
                "response.output_text.delta",
                json!({"item_id": id, "output_index": index, "content_index": 0, "delta": text, "logprobs": []}),
            ),
            ItemKind::Call { .. } => {
                ("response.function_call_arguments.delta", json!({"item_id": id, "output_index": index, "delta": text}))
            }
        };
        self.send(kind, more, events);
    }

    fn leave(&mut self, status: &str, events: &mut EventQueue) {
        let Some(item) = self.open.take() else { return };
        let (id, index, text) = (&item.id, self.output.len(), &item.text);
        let (kind, more) = match &item.kind {
            ItemKind::Reasoning => (
                "response.reasoning_text.done",
                json!({"item_id": id, "output_index": index, "content_index": 0, "text": text}),
            ),
            ItemKind::Message => (
                "response.output_text.done",
                json!({"item_id": id, "output_index": index, "content_index": 0, "text": text, "logprobs": []}),
            ),
            ItemKind::Call { name, .. } => (
                "response.function_call_arguments.done",
                json!({"item_id": id, "output_index": index, "name": name, "arguments": text}),
            ),
        };
        self.send(kind, more, events);
        let part = item.part();
        if let Some(part) = &part {
            let more = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            self.send("response.content_part.done", more, events);
        }
        let json = item.json(status, part.as_slice());
        self.send("response.output_item.done", json!({"output_index": index, "item": json}), events);
        self.output.push(json);
    }

    /// The finished document, kept if it is to be.
    fn finish(&mut self, usage: Usage) -> Value {
        let status = if self.ending == Some(Ending::Length) { "incomplete" } else { "completed" };
        let document = self.document(status, Some(usage), None);
        if let Some(Keep { store, items }) = self.keep.take() {
            store.put(&self.id, &document, &items.followed_by(&self.output));
        }
        document
    }
}

impl Format for Responses {
    fn whole(&mut self, answers: &[Answer], usage: Usage) -> Value {
        let Some(answer) = answers.first() else { unreachable!("there is one choice") };
        // The same items as in a stream, made the same way.
        let mut unsent = EventQueue::default();
        for piece in answer.pieces() {
            self.piece(0, piece.clone(), &mut unsent);
        }
        self.finish(usage)
    }

    fn open(&mut self, _: usize, _: Usage, events: &mut EventQueue) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.document("in_progress", None, None);
            self.send(kind, json!({"response": response}), events);
        }
    }

    fn piece(&mut self, _: usize, piece: Piece, events: &mut EventQueue) {
        match piece {
            Piece::Reasoning(text) => {
                self.enter(ItemKind::Reasoning, events);
                self.say(&text, events);
            }
            Piece::Content { text, .. } => {
                if !text.is_empty() {
                    self.enter(ItemKind::Message, events);
                    self.say(&text, events);
                }
            }
            Piece::Call { id, name } => self.enter(ItemKind::Call { call_id: format!("call_{id}"), name }, events),
            Piece::Arguments(text) => self.say(&text, events),
            Piece::End(ending) => {
                self.leave(if ending == Ending::Length { "incomplete" } else { "completed" }, events);
                self.ending = Some(ending);
            }
        }
    }

    fn close(&mut self, usage: Usage, events: &mut EventQueue) {
        let document = self.finish(usage);
        let is_incomplete = self.ending == Some(Ending::Length);
        let kind = if is_incomplete { "response.incomplete" } else { "response.completed" };
        self.send(kind, json!({"response": document}), events);
    }

    /// Twice: some clients listen for the one event, some for the other.
    fn fail(&mut self, error: &ApiError, usage: Usage, events: &mut EventQueue) {
        let more = json!({"code": error.code(), "message": error.message(), "param": error.param()});
        self.send("error", more, events);
        let response = self.document("failed", Some(usage), Some(error));
        self.send("response.failed", json!({"response": response}), events);
    }
}
