//! The last requests: how long they took, for the status page, and how each was served, by id. Says nothing of what was
//! asked or answered, but for the one token at which a prompt parted from what was kept.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::{
    Json,
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};
use troika_engine::{
    FeatureState, HybridStatus, KindPlan, Ledger,
    api::{ChunkRecord, DraftCounts, RequestRecord, StepNote, Usage},
};
use troika_prompt::Tokenizer;

use crate::{
    access::Tenant,
    error::{ApiError, quote},
    routes::App,
};

/// Requests that are remembered.
const MAX_REMEMBERED: usize = 512;
/// Those that the status page shows.
const MAX_SHOWN: usize = 50;
/// What ids of answers begin with.
const ID_PREFIXES: [&str; 4] = ["chatcmpl-", "cmpl-", "msg_", "resp_"];

/// One request.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Entry {
    pub(crate) id: String,
    pub(crate) route: &'static str,
    pub(crate) started_unix_s: u64,
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    /// From submission to the first token, if one came.
    pub(crate) first_token_us: Option<u64>,
    /// From submission to the end.
    pub(crate) total_us: u64,
    /// `stop`, `length`, `tool_calls`, `failed`, `expired`, `refused` by the engine, or `left`: the client did. `None`: it
    /// has not ended.
    pub(crate) ending: Option<&'static str>,
    #[serde(skip)]
    pub(crate) tenant: Tenant,
    /// What the engine says of each choice that it is done with.
    #[serde(skip)]
    pub(crate) records: Vec<Option<RequestRecord>>,
}

/// The last requests, oldest first.
#[derive(Default)]
pub(crate) struct Activity(Mutex<VecDeque<Entry>>);

impl Activity {
    /// A request has come in.
    pub(crate) fn begin(&self, entry: Entry) {
        let mut entries = self.lock();
        if entries.len() == MAX_REMEMBERED {
            entries.pop_front();
        }
        entries.push_back(entry);
    }

    /// Something is known of it; nothing happens if it is forgotten already.
    pub(crate) fn update(&self, id: &str, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.lock().iter_mut().rev().find(|entry| entry.id == id) {
            change(entry);
        }
    }

    /// Those of this tenant that have ended, newest first.
    pub(crate) fn snapshot(&self, tenant: &Tenant) -> Vec<Entry> {
        let entries = self.lock();
        let ended = entries.iter().rev().filter(|entry| entry.ending.is_some() && entry.tenant == *tenant);
        ended.take(MAX_SHOWN).cloned().collect()
    }

    /// The request of an id, with or without what the ids of its API begin with.
    fn find(&self, id: &str, tenant: &Tenant) -> Option<Entry> {
        let bare = |id: &str| ID_PREFIXES.iter().find_map(|prefix| id.strip_prefix(prefix)).unwrap_or(id).to_owned();
        let asked = bare(id);
        let entries = self.lock();
        entries.iter().rev().find(|entry| bare(&entry.id) == asked && entry.tenant == *tenant).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the cached tokens of a prompt came from: `disk` if any did.
pub(crate) fn tier(usage: &Usage) -> Option<&'static str> {
    match (usage.cached_tokens, usage.cached_tokens_from_disk) {
        (0, _) => None,
        (_, 0) => Some("ram"),
        _ => Some("disk"),
    }
}

pub(crate) fn millis(us: u64) -> f64 {
    us as f64 / 1e3
}

/// `GET /troika/requests/ID`.
pub(crate) async fn request(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let Some(entry) = app.activity.find(&id, &tenant) else {
        let message = format!(
            "No request `{}` is remembered here. The last {MAX_REMEMBERED} are, for the key that they came with.",
            quote(&id)
        );
        return Err(ApiError::request(StatusCode::NOT_FOUND, "request_not_found", message));
    };
    let status = app.state.generator.status();
    let (hybrid, geometry) = (status.hybrid, status.geometry);
    let tile = hybrid.as_ref().map_or(0, |hybrid| hybrid.tile);
    let choices = entry.records.iter().map(|record| match record {
        None => Value::Null,
        Some(record) => describe(record, &app.state.tokenizer, tile),
    });
    let mut ledger = Ledger::default();
    entry.records.iter().flatten().for_each(|record| ledger.merge(&record.ledger));
    let is_over = entry.ending.is_some() && entry.records.iter().all(Option::is_some);
    let body = json!({
        "id": entry.id,
        "state": if is_over { "ended" } else { "running" },
        "route": entry.route,
        "model": app.state.model_id,
        "numeric_class": app.state.numeric_class,
        "created": entry.started_unix_s,
        "ending": entry.ending,
        "prompt_tokens": entry.prompt_tokens,
        "completion_tokens": entry.completion_tokens,
        "first_token_ms": entry.first_token_us.map(millis),
        "total_ms": entry.ending.map(|_| millis(entry.total_us)),
        "geometry": geometry,
        "plan": hybrid.as_ref().map(|hybrid| plan(hybrid, &ledger)),
        "ledger": hybrid.as_ref().map(|hybrid| json!({"kinds": hybrid.counts(&ledger)})),
        "verdict": hybrid.as_ref().map(|hybrid| verdict(hybrid, &ledger)),
        "choices": choices.collect::<Vec<_>>(),
    });
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(body)).into_response())
}

/// What neural engines were to do in a request's steps.
fn plan(hybrid: &HybridStatus, ledger: &Ledger) -> Value {
    let planned = |kind: &str| {
        let operations = ledger.operations().iter().filter(|(other, _)| other.name() == kind);
        operations.map(|(_, operations)| operations.planned).sum::<u64>()
    };
    let kinds = hybrid.plan.iter().map(|(kind, plan)| {
        let KindPlan { layers, fraction_effective } = plan;
        let plan = json!({"layers": layers, "fraction_effective": fraction_effective, "planned_ops": planned(kind)});
        ((*kind).to_owned(), plan)
    });
    json!({
        "digest": hybrid.plan_digest,
        "numeric_class": hybrid.numeric_class,
        "tile": hybrid.tile,
        "simulated": hybrid.simulated_ms.is_some(),
        "kinds": kinds.collect::<serde_json::Map<_, _>>(),
    })
}

/// Whether engines did what was planned for a request.
fn verdict(hybrid: &HybridStatus, ledger: &Ledger) -> String {
    match hybrid.plan.is_empty() {
        true => hybrid.state.clone(),
        false => FeatureState::of(&ledger.total_operations()).to_string(),
    }
}

fn describe(record: &RequestRecord, tokenizer: &Tokenizer, tile: usize) -> Value {
    let usage = &record.usage;
    // A chunk whose step failed has none.
    let steps = record.steps.iter().map(Some).chain(std::iter::repeat(None));
    let diverged = record.diverged.map(|at| {
        let bytes = tokenizer.token_bytes(at.token).unwrap_or_default();
        json!({"position": at.position, "token": at.token, "text": String::from_utf8_lossy(bytes)})
    });
    json!({
        "failure": record.failure,
        "cached_tokens": usage.cached_tokens,
        "cached_tokens_from_disk": usage.cached_tokens_from_disk,
        "cached_tier": tier(usage),
        "alignment": if record.is_shifted { "shifted" } else { "aligned" },
        "diverged": diverged,
        "stored_blocks": record.stored_blocks,
        "skipped_blocks": record.skipped_blocks,
        "skipped_because": record.skipped_because,
        "drafts": record.drafts.as_ref().map(drafts),
        "preemptions": record.preemptions,
        "restarts": record.restarts,
        "chunks": record.chunks.iter().zip(steps).map(|(of, step)| chunk(of, step, tile)).collect::<Vec<_>>(),
        "completion_tokens": usage.completion_tokens,
        "queue_ms": millis(usage.queue_us),
        "prefill_ms": millis(usage.prefill_us),
        "decode_ms": millis(usage.decode_us),
    })
}

fn drafts(drafts: &DraftCounts) -> Value {
    let DraftCounts { verifications, drafted, accepted, by_place, withheld, skipped } = drafts;
    let by_place = by_place.iter().map(|[drafted, accepted]| json!({"drafted": drafted, "accepted": accepted}));
    json!({
        "verifications": verifications,
        "drafted": drafted,
        "accepted": accepted,
        "by_place": by_place.collect::<Vec<_>>(),
        "withheld": withheld,
        "skipped": skipped,
    })
}

fn chunk(chunk: &ChunkRecord, step: Option<&StepNote>, tile: usize) -> Value {
    let narrowed = chunk
        .narrowed_by
        .iter()
        .map(|narrowing| json!({"rule": narrowing.rule.name(), "before": narrowing.before, "after": narrowing.after}));
    let tiled_rows = step.map(|step| step.tiled_rows);
    json!({
        "start": chunk.start,
        "tokens": chunk.width,
        "narrowed_by": narrowed.collect::<Vec<_>>(),
        "path": tiled_rows.map(|rows| if rows > 0 { "engines" } else { "primary" }),
        "tiles": tiled_rows.map(|rows| rows / tile.max(1)),
        "padded_rows": step.map(|step| step.tiled_rows.saturating_sub(step.rows)),
        "model_ms": step.map(|step| millis(step.model_us)),
        "total_ms": step.map(|step| millis(step.total_us)),
    })
}
