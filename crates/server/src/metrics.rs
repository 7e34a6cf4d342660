//! `GET /metrics`: what Prometheus reads. Counts of requests and distributions of times are kept here; everything else is
//! the engine's own status at the moment of the scrape.

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use prometheus_client::{
    encoding::text::encode,
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::Registry,
};
use troika_engine::{
    BankEvents, HybridBytes, HybridStatus, Programs,
    api::{CacheStatus, DraftCounts, EngineStatus, NodeTotals, StepTotals},
};

use crate::{ServerState, error::ApiError, routes::App};

/// OpenMetrics, which Prometheus has read since version 2.5.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels = Vec<(&'static str, String)>;

/// Counted as requests go by.
pub(crate) struct Metrics {
    requests: Family<Labels, Counter>,
    queue: Histogram,
    first_token: Histogram,
    token_gap: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Family::default(),
            // To 131 seconds, 164 seconds, and 16 seconds.
            queue: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
            first_token: Histogram::new(exponential_buckets(0.005, 2.0, 16)),
            token_gap: Histogram::new(exponential_buckets(0.001, 2.0, 15)),
        }
    }
}

impl Metrics {
    /// A request has ended.
    pub(crate) fn ended(&self, route: &str, outcome: &str) {
        let labels = vec![("route", route.to_owned()), ("outcome", outcome.to_owned())];
        self.requests.get_or_create(&labels).inc();
    }

    /// A request has started after it waited so long.
    pub(crate) fn started(&self, queue_us: u64) {
        self.queue.observe(queue_us as f64 / 1e6);
    }

    /// Its first token came so long after the request.
    pub(crate) fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    /// Another token came so long after the one before.
    pub(crate) fn next_token(&self, after: Duration) {
        self.token_gap.observe(after.as_secs_f64());
    }

    fn text(&self, state: &ServerState, status: &EngineStatus) -> Result<String, std::fmt::Error> {
        let mut registry = Registry::with_prefix("troika");
        let build = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        registry.register("build", "What is running", Info::new(build));
        let model = vec![("id", state.model_id.clone()), ("numeric_class", state.numeric_class.clone())];
        registry.register("model", "What is served", Info::new(model));
        registry.register("requests", "Requests that ended, by route and outcome", self.requests.clone());
        registry.register("request_queue_seconds", "From a request to its first step", self.queue.clone());
        let help = "From a request to its first token";
        registry.register("time_to_first_token_seconds", help, self.first_token.clone());
        registry.register("inter_token_latency_seconds", "Between two tokens of an answer", self.token_gap.clone());
        describe_engine(&mut registry, status);
        describe_cache(&mut registry, &status.cache, status.kept_bytes_per_block);
        describe_nodes(&mut registry, &status.nodes);
        if let Some(drafts) = &status.drafts {
            describe_drafts(&mut registry, drafts);
        }
        if let Some(hybrid) = &status.hybrid {
            describe_hybrid(&mut registry, hybrid);
        }
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

fn describe_engine(registry: &mut Registry, status: &EngineStatus) {
    gauge(registry, "up", "1 while the engine serves, 0 after it failed", u64::from(status.failure.is_none()));
    gauge(registry, "queued_requests", "Requests that have not started", status.queued as u64);
    gauge(registry, "running_requests", "Sequences with state", status.running as u64);
    let sequences = [
        ("ended", status.requests_total),
        ("cancelled", status.cancelled_total),
        ("failed", status.failed_total),
        ("expired", status.expired_total),
        ("preempted", status.preemptions_total),
    ];
    count_each(registry, "sequences", "What became of sequences, choices one by one", "event", sequences);
    let from_disk = status.cached_tokens_from_disk_total;
    let tiers = [("ram", status.cached_tokens_total - from_disk), ("disk", from_disk)];
    count_each(registry, "cached_prompt_tokens", "Prompt tokens that need not be computed", "tier", tiers);
    count(registry, "prompt_tokens", "Prompt tokens computed", status.prompt_tokens_total);
    count(registry, "completion_tokens", "Tokens generated", status.completion_tokens_total);
    let lanes = [("prefill", status.prefill), ("decode", status.decode), ("draft", status.draft)];
    let of = |pick: fn(&StepTotals) -> u64| lanes.map(|(lane, totals)| (lane, pick(&totals)));
    count_each(registry, "steps", "Steps done", "lane", of(|totals| totals.steps));
    let help = "Tokens computed in steps, those of preempted sequences again, and tokens proposed by the drafter";
    count_each(registry, "step_tokens", help, "lane", of(|totals| totals.tokens));
    let seconds = lanes.map(|(lane, totals)| (vec![("lane", lane.to_owned())], totals.busy_us));
    count_seconds(registry, "step_seconds", "Time in steps, several of which may run at once", seconds);
    let narrowed = status.narrowed_total.iter().map(|(rule, count)| (rule.name(), *count));
    count_each(registry, "narrowed_chunks", "Prompt chunks made narrower by a rule", "rule", narrowed);
    gauge(registry, "state_bytes", "Set aside for the state of running sequences", status.state_bytes_reserved);
    gauge(registry, "step_bytes", "Set aside for the values of steps", status.step_bytes);
    let block = status.state_bytes_per_block.max(1);
    gauge(registry, "state_used_blocks", "Blocks of state that are set aside", status.state_bytes_reserved / block);
    if status.state_bytes_limit < u64::MAX {
        gauge(registry, "state_limit_bytes", "Most bytes for the state of sequences", status.state_bytes_limit);
        let free = status.state_bytes_limit.saturating_sub(status.state_bytes_reserved) / block;
        gauge(registry, "state_free_blocks", "Blocks of state for which there is room", free);
    }
}

fn describe_cache(registry: &mut Registry, cache: &CacheStatus, block_bytes: u64) {
    let per_tier = |ram: u64, disk: u64| [("ram", ram), ("disk", disk)];
    let used = per_tier(cache.used_bytes, cache.disk_used_bytes);
    gauge_each(registry, "cache_bytes", "Bytes of kept prefixes, on disk of all files", "tier", used);
    let limits = per_tier(cache.limit_bytes, cache.disk_limit_bytes);
    gauge_each(registry, "cache_limit_bytes", "Most bytes of kept prefixes", "tier", limits);
    let blocks = per_tier(cache.blocks as u64, cache.disk_blocks as u64);
    gauge_each(registry, "cache_blocks", "Blocks that are kept", "tier", blocks);
    let free = cache.limit_bytes.saturating_sub(cache.used_bytes) / block_bytes.max(1);
    gauge(registry, "cache_free_blocks", "Blocks for which memory has room", free);
    let lookups = [("hit", cache.hits), ("miss", cache.lookups - cache.hits)];
    count_each(registry, "cache_lookups", "Prompts looked up", "result", lookups);
    count(registry, "cache_stored_blocks", "Blocks stored in memory", cache.stored);
    count(registry, "cache_evicted_blocks", "Blocks that had to go", cache.evicted);
    let skipped =
        [("no_parent", cache.skipped_no_parent), ("no_room", cache.skipped_no_room), ("mixed", cache.skipped_mixed)];
    count_each(registry, "cache_skipped_blocks", "Blocks and boundaries that were not stored", "reason", skipped);
    let help = "How often all that was kept was given up since an engine's numbers were wrong";
    gauge(registry, "cache_closed_classes", help, cache.closed as u64);
    count(registry, "cache_disk_read_files", "Files read and found sound", cache.disk_read);
    count(registry, "cache_disk_written_files", "Files written", cache.disk_written);
    let help = "Writes dropped because too many waited or there was no room";
    count(registry, "cache_disk_dropped_writes", help, cache.disk_dropped);
    count(registry, "cache_disk_quarantined_files", "Damaged files set aside", cache.disk_quarantined);
    let failed = [("read", cache.disk_failed_reads), ("write", cache.disk_failed_writes)];
    count_each(registry, "cache_disk_failed_files", "Files that the disk refused", "op", failed);
    let help = "Prefixes computed although the disk had them: too many waited, or it failed or was silent";
    count(registry, "cache_disk_not_asked_prefixes", help, cache.disk_not_asked);
    let help = "Sequences that wait for files of their prefix";
    gauge(registry, "cache_disk_loading_requests", help, cache.disk_loading as u64);
    let help = "1 while the disk keeps refusing to write or to read and is asked seldom or not at all";
    gauge(registry, "cache_disk_failed", help, u64::from(cache.disk_failed));
}

/// What became of what the drafter proposed.
fn describe_drafts(registry: &mut Registry, drafts: &DraftCounts) {
    let help = "Shares of decode steps that verify drafts of a sequence";
    count(registry, "draft_verifications", help, drafts.verifications);
    let places: Vec<String> = (1..=drafts.by_place.len()).map(|place| place.to_string()).collect();
    let of =
        |which: usize| places.iter().map(String::as_str).zip(drafts.by_place.iter().map(move |counts| counts[which]));
    count_each(registry, "drafted_tokens", "Drafts that were verified, by place in their block", "place", of(0));
    count_each(registry, "accepted_tokens", "Those of them that were the next tokens", "place", of(1));
    let help = "Proposals too unlikely to be verified";
    count(registry, "withheld_drafts", help, drafts.withheld);
    let skipped = drafts.skipped.iter().map(|(reason, count)| (*reason, *count));
    count_each(registry, "draft_skips", "Shares of decode steps without drafts", "reason", skipped);
}

fn describe_nodes(registry: &mut Registry, nodes: &[NodeTotals]) {
    let labels = |node: &NodeTotals| vec![("device", node.device.to_string()), ("kind", node.kind.to_owned())];
    let family = Family::<Labels, Counter>::default();
    for node in nodes {
        for (state, count) in [("submitted", node.submitted), ("completed", node.completed), ("failed", node.failed)] {
            let mut labels = labels(node);
            labels.push(("state", state.to_owned()));
            family.get_or_create(&labels).inc_by(count);
        }
    }
    registry.register("nodes", "The ledger: nodes of steps by device, kind and state", family);
    let seconds = nodes.iter().map(|node| (labels(node), node.busy_us));
    count_seconds(registry, "node_seconds", "Time on the device", seconds);
}

/// What neural engines do: the state, and counts by kind of projection.
fn describe_hybrid(registry: &mut Registry, hybrid: &HybridStatus) {
    let state = Family::<Labels, Gauge>::default();
    let labels = [
        ("state", hybrid.state.clone()),
        ("digest", hybrid.plan_digest.clone()),
        ("numeric_class", hybrid.numeric_class.clone()),
        ("tile", hybrid.tile.to_string()),
    ];
    state.get_or_create(&labels.to_vec()).set(1);
    registry.register("hybrid_state", "What neural engines do in prefill, and by which plan", state);
    let [operations, fallbacks, bypasses, parts, failures, checks] =
        std::array::from_fn(|_| Family::<Labels, Counter>::default());
    let mut seconds = Vec::new();
    for (kind, counts) in &hybrid.kinds {
        let count = |family: &Family<Labels, Counter>, label: &'static str, of: &str, count: u64| {
            let labels = vec![("kind", (*kind).to_owned()), (label, of.to_owned())];
            family.get_or_create(&labels).inc_by(count);
        };
        let states = [
            ("planned", counts.planned),
            ("exact", counts.exact),
            ("padded", counts.padded),
            ("merged", counts.merged),
            ("cancelled", counts.cancelled),
        ];
        states.into_iter().for_each(|(state, n)| count(&operations, "state", state, n));
        counts.fallbacks.iter().for_each(|(reason, n)| count(&fallbacks, "reason", reason, *n));
        count(&bypasses, "lane", "decode", counts.bypass_decode);
        count(&bypasses, "lane", "verify", counts.bypass_verify);
        counts.dispatched.iter().for_each(|(device, n)| count(&parts, "device", device, *n));
        failures.get_or_create(&vec![("kind", (*kind).to_owned())]).inc_by(counts.runtime_failures);
        count(&checks, "result", "good", counts.checks - counts.failed_checks);
        count(&checks, "result", "wrong", counts.failed_checks);
        let times = [
            ("input_ready", counts.input_ready_ms),
            ("region", counts.region_ms),
            ("gap", counts.gap_ms),
            ("check", counts.check_ms),
        ];
        let labels = |of: &str| vec![("kind", (*kind).to_owned()), ("of", of.to_owned())];
        seconds.extend(times.map(|(of, ms)| (labels(of), (ms * 1e3) as u64)));
    }
    registry.register("hybrid_operations", "Projections on tiles of rows, by what became of them", operations);
    registry.register("hybrid_fallbacks", "Projections of prefill rows that the primary did alone", fallbacks);
    registry.register("hybrid_bypasses", "Projections of steps that no plan gives to engines", bypasses);
    registry.register("hybrid_parts", "Parts of operations handed to each device", parts);
    registry.register("hybrid_failures", "Parts that failed on an engine", failures);
    registry.register("hybrid_checks", "Parts of which the primary has repeated some rows", checks);
    count_seconds(registry, "hybrid_seconds", "Times of operations, those of several at once added up", seconds);
    let HybridBytes { weights, banks, surfaces } = hybrid.bytes;
    let bytes = [("weights", weights), ("banks", banks), ("surfaces", surfaces)];
    gauge_each(registry, "hybrid_bytes", "Held for engines beside the model's own weights", "of", bytes);
    let aside = [("latched", hybrid.latched.len() as u64), ("shed", hybrid.shed.len() as u64)];
    gauge_each(registry, "hybrid_projections", "Projections that engines had and have no more", "state", aside);
    let BankEvents { given_up, returned, refused } = hybrid.banks;
    let banks = [("given_up", given_up), ("returned", returned), ("refused", refused)];
    count_each(registry, "hybrid_banks", "Banks of procedures, by what memory made of them", "event", banks);
    if let Some(programs) = hybrid.programs {
        let Programs { compiled, from_disk, damaged, not_kept, evicted, refused } = programs;
        let programs = [
            ("compiled", compiled),
            ("from_disk", from_disk),
            ("damaged", damaged),
            ("not_kept", not_kept),
            ("evicted", evicted),
            ("refused", refused),
        ];
        count_each(
            registry,
            "hybrid_programs",
            "Procedures that engines have compiled or found on disk",
            "event",
            programs,
        );
    }
    if let Some(simulated) = &hybrid.simulated_ms {
        let times = simulated.iter().map(|(device, ms)| (vec![("device", device.clone())], (ms * 1e3) as u64));
        let help = "Predicted, not measured: what simulated engines would have taken";
        count_seconds(registry, "hybrid_simulated_seconds", help, times);
    }
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register(name, help, ConstGauge::new(value));
}

fn count(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register(name, help, ConstCounter::new(value));
}

fn gauge_each<'a>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    label: &'static str,
    values: impl IntoIterator<Item = (&'a str, u64)>,
) {
    let family = Family::<Labels, Gauge>::default();
    for (key, value) in values {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        family.get_or_create(&vec![(label, key.to_owned())]).set(value);
    }
    registry.register(name, help, family);
}

fn count_each<'a>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    label: &'static str,
    values: impl IntoIterator<Item = (&'a str, u64)>,
) {
    let family = Family::<Labels, Counter>::default();
    for (key, value) in values {
        family.get_or_create(&vec![(label, key.to_owned())]).inc_by(value);
    }
    registry.register(name, help, family);
}

fn count_seconds(registry: &mut Registry, name: &str, help: &str, values_us: impl IntoIterator<Item = (Labels, u64)>) {
    let family = Family::<Labels, Counter<f64, AtomicU64>>::default();
    for (labels, us) in values_us {
        family.get_or_create(&labels).inc_by(us as f64 / 1e6);
    }
    registry.register(name, help, family);
}

pub(crate) async fn serve(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let text = app.metrics.text(&app.state, &app.state.generator.status()).map_err(|error| {
        let message = format!("The metrics cannot be written: {error}");
        ApiError::server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    })?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}
