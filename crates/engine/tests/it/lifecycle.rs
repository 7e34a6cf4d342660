//! What becomes of neural engines while they serve: banks given up for want of memory, wrong numbers found by spot checks,
//! failures, cancels, streams beside prompts. Numbers in the names of tests are those of the hybrid spec's section 13.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use troika_base::{RequestId, SequenceId};
use troika_device::npu::sim::{Sim, SimFaults};
use troika_device::npu::{Limits, NpuBackend};
use troika_device::state::Packing;
use troika_device::{SequenceState, StateShape};
use troika_engine::api::{EngineStatus, Event, FinishReason, GenerateRequest, Generator, RequestRecord, Rule};
use troika_engine::{
    Chunk, Core, DiskTier, Engine, EngineOptions, HybridOptions, HybridStatus, Placement, Priority, Runner,
    RunnerError, StepResult, StepRunner, Submission, foresee_engines,
};
use troika_graph::Kind;
use troika_kvstore::Store;
use troika_runtime::{Fallback, Ticket};
use troika_testkit::scratch_dir;

use crate::cache::{CACHED, answer, record, request, tokens};
use crate::hybrid::{TILE, assert_books_balance, everything, nano, soft, wish};
use crate::serving::{Channel, wait_until};
use crate::support::forward_sequences;

/// A block of nano.
const BLOCK: usize = 128;

const LIMITS: EngineOptions = EngineOptions { max_context_tokens: 1 << 14, chunk_tokens: TILE, ..CACHED };
const UNCACHED: EngineOptions = EngineOptions { cache_bytes: 0, ..LIMITS };

fn faulty(faults: SimFaults) -> Arc<Sim> {
    Arc::new(Sim::new(soft(1), faults))
}

/// Banks of a few hundred kilobytes that are copies of the weights, so that giving one up frees memory.
fn copying() -> Arc<Sim> {
    let inner = soft(1);
    let limits = Limits { bank_bytes: 200_000, ..inner.limits().clone() };
    let faults = SimFaults { copies_weights: true, ..SimFaults::default() };
    Arc::new(Sim::new(inner, faults).with_limits(limits))
}

fn on(backend: &Arc<Sim>, placements: BTreeMap<Kind, Placement>) -> Runner {
    nano(Some((Arc::clone(backend) as Arc<dyn NpuBackend>, wish(placements, 0))))
}

fn few() -> BTreeMap<Kind, Placement> {
    BTreeMap::from([(Kind::SharedExpert, Placement::Whole), (Kind::WqB, Placement::Split(0.5))])
}

fn hybrid(engine: &Engine) -> HybridStatus {
    engine.status().hybrid.expect("engines were asked for")
}

/// Limits that leave `state_bytes` for sequences beside what engines hold and steps of a tile.
fn limited(backend: &Arc<Sim>, state_bytes: u64) -> EngineOptions {
    let runner = on(backend, everything());
    let engines = runner.engine_bytes().0;
    let roomy = EngineOptions { memory_bytes: 1 << 40, ..UNCACHED };
    let steps = Engine::start(runner, roomy).expect("starts").status().step_bytes;
    EngineOptions { memory_bytes: engines + steps + state_bytes, ..UNCACHED }
}

fn widths(record: &RequestRecord) -> Vec<usize> {
    record.chunks.iter().map(|chunk| chunk.width).collect()
}

/// Prompts that need more and more: banks go one after another, then steps are half as wide, and are whole again afterwards.
/// None of it changes a bit.
#[test]
fn acceptance_12_banks_go_before_chunks_are_narrowed() {
    let roomy = Engine::start(on(&copying(), everything()), UNCACHED).expect("starts");
    let backend = copying();
    let runner = on(&backend, everything());
    let (shape, (_, banks)) = (runner.state_shape().clone(), runner.engine_bytes());
    assert_eq!((banks, backend.num_banks() > 8), (backend.bank_bytes(), true));
    let (block, fixed) = (shape.bytes_per_block(), shape.fixed_bytes());
    let engine = Engine::start(runner, limited(&copying(), fixed + 6 * block)).expect("starts");
    let ask = |prompt: usize| {
        let request = request(tokens(prompt as u64, prompt), 4);
        let (said, record) = answer_and_record(&engine, request.clone());
        let want: Vec<u32> = answer(&roomy, request).0.into_iter().map(|(token, _)| token).collect();
        assert_eq!(said, want, "{prompt} tokens");
        (record, hybrid(&engine))
    };
    let (fits, status) = ask(5 * BLOCK);
    assert_eq!((status.state.as_str(), status.shed.len()), ("engaged", 0));
    assert!(!fits.ledger.total_operations().fallbacks.contains_key(&Fallback::Memory));

    // Six blocks more than there is room for.
    let (large, status) = ask(12 * BLOCK - 10);
    let freed = banks - status.bytes.banks;
    assert!(freed >= 6 * block && freed < banks, "{freed} of {banks} bytes");
    wait_until("the engine has let go of them", || backend.bank_bytes() == status.bytes.banks);
    assert!(status.state.starts_with("degraded(memory, "), "{}", status.state);
    let operations = large.ledger.total_operations();
    assert!(widths(&large)[..20].iter().all(|width| *width == TILE), "as wide as before: {:?}", large.chunks);
    assert!(operations.dispatched() > 0 && operations.dispatched() < operations.planned);
    let steps = operations.planned / runner_projections(&status);
    let left_out = status.shed.len() as u64 * steps;
    assert!(operations.planned - operations.dispatched() <= left_out, "what was not dispatched was given up");
    assert!(operations.fallbacks[&Fallback::Memory] > 0);
    assert_books_balance(&operations);

    // More than all banks: only now are steps narrower, and never between half a tile and a tile.
    let blocks = 6 + banks / block + 3;
    let (larger, status) = ask(blocks as usize * BLOCK - 10);
    assert_eq!((status.bytes.banks, status.bytes.weights > 0), (0, true));
    let (last, others) = larger.chunks.split_last().expect("chunks");
    assert!(others.iter().all(|chunk| chunk.width == TILE / 2), "{:?}", widths(&larger));
    let rules = last.narrowed_by.iter().map(|narrowing| (narrowing.rule, narrowing.before)).collect::<Vec<_>>();
    assert_eq!(rules, [(Rule::Memory, TILE), (Rule::Remaining, TILE / 2)]);
    assert_eq!(larger.ledger.total_operations().dispatched(), 0);

    let (small, status) = ask(3 * BLOCK);
    assert_eq!(widths(&small), [vec![TILE; 5], vec![TILE - 1]].concat(), "the width has recovered");
    assert!(small.ledger.total_operations().planned >= 5 * runner_projections(&status));
    wait_until("nothing is left", || engine.status().state_bytes_reserved == 0);
}

/// What was given up comes back when it has not been missed for 64 steps, a bank at a time; and goes again if need be.
#[test]
fn acceptance_12_banks_come_back() {
    let roomy = Engine::start(on(&copying(), everything()), UNCACHED).expect("starts");
    let backend = copying();
    let runner = on(&backend, everything());
    let (shape, banks) = (runner.state_shape().clone(), runner.engine_bytes().1);
    let room = shape.fixed_bytes() + 6 * shape.bytes_per_block();
    let engine = Engine::start(runner, limited(&copying(), room)).expect("starts");
    let ask = |prompt: usize| {
        let request = request(tokens(prompt as u64, prompt), 4);
        let (said, record) = answer_and_record(&engine, request.clone());
        let want: Vec<u32> = answer(&roomy, request).0.into_iter().map(|(token, _)| token).collect();
        assert_eq!(said, want, "{prompt} tokens");
        (record.ledger.total_operations(), hybrid(&engine))
    };
    let steps = || engine.status().prefill.steps + engine.status().decode.steps;
    let (_, status) = ask(12 * BLOCK - 10);
    let (given_up, before) = (status.banks.given_up, steps());
    assert!(given_up > 1 && status.banks.returned == 0 && status.bytes.banks < banks, "{status:?}");
    let mut status = status;
    while status.banks.returned < given_up {
        status = ask(BLOCK).1;
        let taken = steps() - before;
        assert!(taken >= 64 * status.banks.returned, "not before its time: {} in {taken} steps", status.banks.returned);
        assert!(taken < 20_000, "{taken} steps: {:?}", status.banks);
    }
    assert_eq!((status.bytes.banks, backend.bank_bytes(), status.shed.len()), (banks, banks, 0));
    // The state looks back on 64 prefill steps; a block is two.
    (0..32).for_each(|_| drop(ask(BLOCK)));
    let last = ask(BLOCK);
    assert_eq!((last.1.state.as_str(), last.0.planned), ("engaged", last.0.dispatched()));
    assert_eq!(last.0.fallbacks.get(&Fallback::Memory), None, "{:?}", last.0);
    let (_, again) = ask(12 * BLOCK - 10);
    assert_eq!((again.banks.given_up, again.banks.returned), (2 * given_up, given_up));
}

/// A bank that the engine does not take again, or whose numbers are wrong now, stays away, and its memory goes to the sequences.
#[test]
fn a_bank_that_is_refused_does_not_come_back() {
    let inner = soft(1);
    let limits = Limits { bank_bytes: 200_000, ..inner.limits().clone() };
    let faults = SimFaults { copies_weights: true, noise: 1e-3, noise_from: Some(0), ..SimFaults::default() };
    let backend = Arc::new(Sim::new(inner, faults).with_limits(limits));
    let mut runner = on(&backend, everything());
    let (banks, executor) = (runner.engine_bytes().1, |runner: &Runner| runner.executor().bank_counts());
    let freed = runner.shed().expect("there are banks");
    assert_eq!((runner.engine_bytes().1, executor(&runner).given_up), (banks - freed, 1));
    backend.arm();
    assert_eq!((runner.reload(), runner.reload()), (Some(freed), None), "one at a time");
    assert_eq!(runner.engine_bytes().1, banks, "reckoned with from now on");
    let mut reloaded = None;
    wait_until("the engine has answered", || backend.num_runs() > 0);
    while reloaded.is_none() {
        reloaded = runner.take_reloaded();
        std::thread::yield_now();
    }
    assert_eq!((reloaded, runner.engine_bytes().1), (Some(false), banks - freed));
    assert_eq!((executor(&runner).returned, executor(&runner).refused, runner.reload()), (0, 1, None));
    wait_until("the engine has let go of it", || backend.bank_bytes() == banks - freed);
}

/// Projections of the plan that a step of few tokens has: the indexer chooses only where there is a choice.
fn runner_projections(status: &HybridStatus) -> u64 {
    status.plan.iter().filter(|(kind, _)| **kind != Kind::IndexerWqB.name()).map(|(_, plan)| plan.layers).sum()
}

/// What a dry run says that engines will hold is what they hold.
#[test]
fn what_engines_hold_is_foreseen() {
    for (instances, copies_weights) in [(1, false), (1, true), (2, true), (3, false)] {
        let faults = SimFaults { copies_weights, ..SimFaults::default() };
        let backend = Arc::new(Sim::new(soft(instances), faults));
        let runner = on(&backend, everything());
        let (held, loaded) = (runner.executor().engine_bytes(), backend.bank_bytes());
        assert_eq!(foresee_engines(runner.records(), &*backend, TILE), held, "{instances} instances");
        assert_eq!(held.banks, if copies_weights { loaded } else { 0 });
        assert!(held.weights > 0 && held.surfaces > 0 && loaded > 0, "{held:?}");
        // Each projection is admitted with all that it would take alone.
        let alone: u64 = runner.records().iter().map(|record| record.estimated_bytes).sum();
        assert!(alone > held.total(), "{alone} bytes, {held:?}");
    }
}

/// At the start too: banks are given up so that a tile fits.
#[test]
fn acceptance_12_a_tile_is_worth_more_than_banks() {
    let backend = copying();
    let runner = on(&backend, everything());
    let shape = runner.state_shape().clone();
    let options = limited(&copying(), shape.fixed_bytes() / 4);
    let engine = Engine::start(runner, options).expect("starts");
    let status = hybrid(&engine);
    assert!(status.state.starts_with("degraded(memory, ") && !status.shed.is_empty(), "{}", status.state);
    let geometry = engine.status().geometry;
    assert!(geometry.contains("reachable=yes") && geometry.contains("step 64→64"), "{geometry}");
    assert!(engine.status().step_bytes * 2 + status.bytes.banks <= options.memory_bytes);
}

/// An engine that shares its weights with the primary device has nothing to give up: then steps are narrower, and say why.
#[test]
fn what_frees_nothing_is_not_given_up() {
    let backend = faulty(SimFaults::default());
    let runner = on(&backend, everything());
    let shape = runner.state_shape().clone();
    let (block, fixed) = (shape.bytes_per_block(), shape.fixed_bytes());
    let engine = Engine::start(runner, limited(&backend, fixed + 6 * block)).expect("starts");
    let roomy = Engine::start(on(&backend, everything()), UNCACHED).expect("starts");
    let request = request(tokens(1, 9 * BLOCK - 10), 4);
    assert_eq!(answer(&engine, request.clone()).0, answer(&roomy, request.clone()).0);
    let record = record(&engine, request);
    let operations = record.ledger.total_operations();
    assert_eq!((operations.planned, hybrid(&engine).shed.len()), (0, 0));
    let reasons: Vec<Fallback> = operations.fallbacks.keys().copied().collect();
    assert_eq!(reasons, [Fallback::Throttle]);
    assert_eq!(hybrid(&engine).last_request.as_deref(), Some("idle(throttle)"));
}

fn with_disk(runner: Runner, limits: EngineOptions, dir: &Path) -> Engine {
    let (store, items) = Store::open(dir, 1 << 30).expect("opens");
    let tier = DiskTier { store, items, weights: b"nano".to_vec(), tokenizer: b"t".to_vec() };
    Engine::start_with_disk(runner, limits, Some(tier)).expect("starts")
}

/// An engine that begins to give wrong numbers is found, nothing that it touched is used, and what was asked is answered as if
/// nothing had happened.
#[test]
fn acceptance_13_and_18_the_class_is_closed_at_once_and_stays_so() {
    let dir = scratch_dir();
    let healthy = Engine::start(on(&faulty(SimFaults::default()), everything()), UNCACHED).expect("starts");
    let ask = |engine: &Engine, seed| {
        let prompt = request(tokens(seed, 3 * BLOCK), 8);
        let (said, usage) = answer(engine, prompt.clone());
        assert_eq!(said, answer(&healthy, prompt).0, "prompt {seed}");
        usage.cached_tokens
    };
    let backend = faulty(SimFaults { noise: 1e-3, noise_from: Some(0), ..SimFaults::default() });
    let mut runner = on(&backend, everything());
    runner.check_engines_every(7);
    let engine = with_disk(runner, LIMITS, dir.path());
    assert_eq!([ask(&engine, 1), ask(&engine, 1), ask(&engine, 2)], [0, 2 * BLOCK, 0]);
    assert_eq!((hybrid(&engine).state.as_str(), engine.status().cache.closed), ("engaged", 0));
    backend.arm();
    assert_eq!(ask(&engine, 3), 0);
    let status = hybrid(&engine);
    assert!(
        status.state.starts_with("quarantined(sim0: ") && status.state.contains(" instead of "),
        "{}",
        status.state
    );
    assert_eq!(status.kinds.values().map(|kind| kind.failed_checks).sum::<u64>(), 1);
    assert_eq!(engine.status().cache.closed, 1);
    let runs = backend.num_runs();
    // What was kept is not found any more, and computed once more it is kept again.
    assert_eq!([ask(&engine, 1), ask(&engine, 1)], [0, 2 * BLOCK]);
    let again = record(&engine, request(tokens(4, 3 * BLOCK), 8));
    assert_eq!((again.restarts, again.stored_blocks), (0, 2));
    let operations = again.ledger.total_operations();
    assert_eq!((operations.dispatched(), backend.num_runs()), (0, runs), "nothing is given to the engine");
    assert!(operations.planned > 0 && operations.fallbacks[&Fallback::Quarantined] > 0);
    drop(engine);

    // After a restart the engine is tried again; what was stored before the closing stays closed.
    let engine = with_disk(on(&faulty(SimFaults::default()), everything()), LIMITS, dir.path());
    assert_eq!([ask(&engine, 1), ask(&engine, 2), ask(&engine, 4)], [2 * BLOCK, 0, 2 * BLOCK]);
    assert_eq!((hybrid(&engine).state.as_str(), engine.status().cache.closed), ("engaged", 1));
}

/// A stream is decoded while the prompt of another finds the engine out: both are computed again, and say what they would have
/// said.
#[test]
fn requests_in_flight_survive_a_quarantine() {
    for (wavefront, cache_bytes) in [(1, 0), (2, 1 << 30), (3, 0)] {
        let backend = faulty(SimFaults { noise: 1e-3, noise_from: Some(0), ..SimFaults::default() });
        let mut runner = on(&backend, everything());
        runner.check_engines_every(5);
        let options = EngineOptions { wavefront, cache_bytes, ..LIMITS };
        let engine = Engine::start(runner, options).expect("starts");
        let healthy = Engine::start(on(&faulty(SimFaults::default()), everything()), UNCACHED).expect("starts");
        let (streaming, prompt) = (request(tokens(1, 2 * TILE + 9), 120), request(tokens(2, 9 * TILE), 8));
        let (events, records) = listen(&engine, streaming.clone());
        let mut said = Vec::new();
        while said.len() < 3 {
            said.extend(next_token(&events).expect("it has just begun"));
        }
        backend.arm();
        assert_eq!(answer(&engine, prompt.clone()).0, answer(&healthy, prompt).0, "{wavefront} in flight");
        while let Some(token) = next_token(&events) {
            said.extend(token);
        }
        let want: Vec<u32> = answer(&healthy, streaming).0.into_iter().map(|(token, _)| token).collect();
        assert_eq!(said, want, "{wavefront} in flight");
        let record = records.recv_timeout(Duration::from_secs(60)).expect("it ends");
        assert_eq!((record.restarts, record.preemptions), (1, 0));
        assert!(hybrid(&engine).state.starts_with("quarantined("));
        wait_until("nothing is left", || {
            let status = engine.status();
            status.running == 0 && status.queued == 0 && status.state_bytes_reserved == 0
        });
    }
}

/// Hears everything.
struct Both(Sender<Event>, Sender<RequestRecord>);

impl troika_engine::api::EventSink for Both {
    fn offer(&mut self, event: &Event) -> troika_engine::api::Delivery {
        let _ = self.0.send(event.clone());
        troika_engine::api::Delivery::Taken
    }

    fn ended(&mut self, record: &RequestRecord) {
        let _ = self.1.send(record.clone());
    }
}

fn listen(engine: &Engine, request: GenerateRequest) -> (Receiver<Event>, Receiver<RequestRecord>) {
    let ((events, heard), (records, told)) = (channel(), channel());
    engine.submit(request, Box::new(Both(events, records))).expect("accepted");
    (heard, told)
}

/// The next event: no token in it, or one; `None` at the end.
fn next_token(events: &Receiver<Event>) -> Option<Option<u32>> {
    match events.recv_timeout(Duration::from_secs(60)).expect("the engine answers") {
        Event::Token { token, .. } => Some(Some(token)),
        Event::Prefilled { .. } => Some(None),
        Event::Finished { reason: FinishReason::Length, .. } => None,
        end => panic!("ended with {end:?}"),
    }
}

fn answer_and_record(engine: &Engine, request: GenerateRequest) -> (Vec<u32>, RequestRecord) {
    let (events, records) = listen(engine, request);
    let said = std::iter::from_fn(|| next_token(&events)).flatten().collect();
    (said, records.recv_timeout(Duration::from_secs(60)).expect("it ends"))
}

/// Whichever dispatch of a request fails, with one, two or three chunks in flight: the answer is the same.
#[test]
fn acceptance_09_a_failure_at_every_dispatch_of_a_request() {
    let prompt = request(tokens(7, 3 * TILE + 1), 2);
    let healthy = faulty(SimFaults::default());
    let runner = on(&healthy, few());
    healthy.arm();
    let want = answer(&Engine::start(runner, UNCACHED).expect("starts"), prompt.clone()).0;
    let dispatches = healthy.num_runs();
    assert_eq!(dispatches, 3 * 12, "three tiles of two projections in six layers");
    for failing in 0..dispatches {
        let backend = faulty(SimFaults { failing_run: Some(failing), ..SimFaults::default() });
        let runner = on(&backend, few());
        let wavefront = 1 + failing as usize % 3;
        let engine = Engine::start(runner, EngineOptions { wavefront, ..UNCACHED }).expect("starts");
        backend.arm();
        let record = record(&engine, prompt.clone());
        let operations = record.ledger.total_operations();
        let what = format!("dispatch {failing}, {wavefront} in flight: {operations:?}");
        assert_eq!((operations.runtime_failures, operations.planned), (1, dispatches), "{what}");
        // The chunks after the failing one do without the engine for that projection.
        let missing = operations.planned - operations.dispatched();
        assert_eq!(operations.fallbacks.get(&Fallback::Latched).copied().unwrap_or(0), missing, "{what}");
        assert!(missing <= 2, "{what}");
        assert_books_balance(&operations);
        assert_eq!(hybrid(&engine).latched.len(), 1, "{what}");
        assert_eq!(answer(&engine, prompt.clone()).0, want, "{what}");
    }
}

/// Cancelled in the queue, in any chunk, between two of them or in decode.
#[test]
fn acceptance_20_a_thousand_cancelled_requests_leave_nothing_behind() {
    let backend = copying();
    let runner = on(&backend, few());
    let options = EngineOptions { wavefront: 2, max_queued: 32, ..UNCACHED };
    let engine = Engine::start(runner, options).expect("starts");
    let baseline = hybrid(&engine).bytes;
    assert!(baseline.banks > 0 && baseline.surfaces > 0 && baseline.weights > 0, "{baseline:?}");
    assert_eq!(baseline.banks, backend.bank_bytes());
    for round in 0..100u64 {
        let requests: Vec<(RequestId, Receiver<Event>)> = (0..10)
            .map(|index| {
                let (sender, events) = channel();
                let request = request(tokens(round * 10 + index, 2 * TILE + 1), 50);
                (engine.submit(request, Box::new(Channel(sender))).expect("accepted"), events)
            })
            .collect();
        for (index, (id, events)) in requests.iter().enumerate() {
            // Some have begun, some have answered.
            if index as u64 == round % 10 {
                let event = events.recv_timeout(Duration::from_secs(60)).expect("it gets through");
                assert!(matches!(event, Event::Prefilled { .. }), "{event:?}");
            }
            engine.cancel(*id);
        }
        for (_, events) in requests {
            let end = events.iter().last().expect("an end");
            assert!(matches!(end, Event::Finished { reason: FinishReason::Cancelled, .. }), "{end:?}");
        }
    }
    wait_until("nothing is left", || {
        let status = engine.status();
        status.requests_total == 1000 && status.running == 0 && status.queued == 0 && status.state_bytes_reserved == 0
    });
    let (status, hybrid) = (engine.status(), hybrid(&engine));
    assert_eq!((status.cancelled_total, status.failed_total), (1000, 0));
    let sum = |of: fn(&troika_engine::KindCounts) -> u64| hybrid.kinds.values().map(of).sum::<u64>();
    let dispatched = sum(|kind| kind.exact + kind.padded);
    assert!(dispatched > 100, "some got that far: {dispatched}");
    assert_eq!(dispatched, sum(|kind| kind.merged + kind.cancelled));
    assert_eq!(dispatched, sum(|kind| kind.planned), "a step that is handed over is done");
    assert!(status.nodes.iter().all(|node| node.submitted == node.completed && node.failed == 0));
    assert_eq!((hybrid.bytes, backend.bank_bytes()), (baseline, baseline.banks));
}

/// A chunk that begins where a kept prefix ends is as short as it takes to be at an edge again, and says so.
#[test]
fn a_hit_between_edges_is_labelled() {
    let backend = faulty(SimFaults::default());
    let wide = HybridOptions { tile: 2 * BLOCK, ..wish(few(), 0) };
    let runner = nano(Some((backend as Arc<dyn NpuBackend>, wide)));
    let engine = Engine::start(runner, EngineOptions { chunk_tokens: 2 * BLOCK, ..LIMITS }).expect("starts");
    let first = record(&engine, request(tokens(1, BLOCK + 5), 2));
    assert!(!first.is_shifted && !first.ledger.total_operations().fallbacks.contains_key(&Fallback::SuffixAfterHit));
    let prompt = [tokens(1, BLOCK + 5), tokens(2, 4 * BLOCK)].concat();
    let second = record(&engine, request(prompt, 2));
    assert_eq!((second.usage.cached_tokens, second.is_shifted), (BLOCK, true));
    assert_eq!(widths(&second), [BLOCK, 2 * BLOCK, BLOCK + 4]);
    let operations = second.ledger.total_operations();
    assert_eq!((operations.planned, operations.dispatched()), (12, 12), "{operations:?}");
    let fallbacks = [(Fallback::RowsBelowTailThreshold, 12), (Fallback::SuffixAfterHit, 12)];
    assert_eq!(operations.fallbacks, BTreeMap::from(fallbacks));
    let steps: Vec<(usize, usize)> = second.steps.iter().map(|step| (step.rows, step.tiled_rows)).collect();
    assert_eq!(steps, [(BLOCK, 0), (2 * BLOCK, 2 * BLOCK), (BLOCK + 4, 0)]);
    assert!(second.steps.iter().all(|step| step.model_us > 0 && step.model_us <= step.total_us));
}

/// Real steps on a clock of their own: a row takes a millisecond, and the longest node a quarter of its step. A decode step
/// waits for the node that has begun.
struct Timed {
    inner: Runner,
    now_us: u64,
    in_flight: Vec<InFlight>,
    results: BTreeMap<Ticket, StepResult>,
}

struct InFlight {
    ticket: Ticket,
    priority: Priority,
    rows: u64,
    done_us: u64,
}

const ROW_US: u64 = 1000;
const NODES: u64 = 4;

impl StepRunner for Timed {
    forward_sequences!();

    fn packing(&self) -> Packing {
        self.inner.packing()
    }

    fn note_narrowed(&mut self, rule: Rule, after_hit: bool) {
        self.inner.note_narrowed(rule, after_hit);
    }

    fn submit(&mut self, chunks: &[Chunk<'_>], priority: Priority) -> Result<Ticket, RunnerError> {
        let ticket = self.inner.submit(chunks, priority)?;
        let rows = chunks.iter().map(|chunk| chunk.tokens.len() as u64).sum::<u64>();
        let node_us = |rows: u64| rows * ROW_US / NODES;
        let wait_us = match priority {
            Priority::Decode => self.in_flight.iter().map(|step| node_us(step.rows)).max().unwrap_or(0),
            Priority::Prefill => 0,
        };
        if priority == Priority::Decode {
            self.in_flight.iter_mut().for_each(|step| step.done_us += rows * ROW_US);
        }
        let done_us = self.now_us + wait_us + rows * ROW_US;
        self.in_flight.push(InFlight { ticket, priority, rows, done_us });
        Ok(ticket)
    }

    fn submit_draft(&mut self, newest: &[(SequenceId, u32)]) -> Result<Ticket, RunnerError> {
        self.inner.submit_draft(newest)
    }

    fn commit(&mut self, sequence: SequenceId, rows: usize) -> Result<(), RunnerError> {
        self.inner.commit(sequence, rows)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<StepResult>, RunnerError> {
        let order = |index: &usize| (self.in_flight[*index].done_us, self.in_flight[*index].priority);
        let first = (0..self.in_flight.len()).min_by_key(order).expect("something is in flight");
        let until = timeout.map_or(u64::MAX, |timeout| self.now_us + timeout.as_micros() as u64);
        if until < self.in_flight[first].done_us {
            self.now_us = until;
            return Ok(None);
        }
        let InFlight { ticket, rows, done_us, .. } = self.in_flight.remove(first);
        self.now_us = self.now_us.max(done_us);
        loop {
            if let Some(result) = self.results.remove(&ticket) {
                let (elapsed_us, longest_node_us) = (rows * ROW_US, rows * ROW_US / NODES);
                return Ok(Some(StepResult { elapsed_us, longest_node_us, ..result }));
            }
            let result = StepRunner::wait(&mut self.inner, None)?.expect("without an end, a step ends the wait");
            self.results.insert(result.ticket, result);
        }
    }
}

/// A stream, and a prompt beside it. If streams can wait for the nodes of a tile, prompts get tiles; if not, chunks are
/// narrower, the ledger says `contention`, and the stream's tokens come in time.
#[test]
fn acceptance_11_tiles_or_contention_beside_a_stream() {
    for (max_itl_ms, width) in [(40, TILE), (10, TILE / 2)] {
        let options = EngineOptions { max_itl: Duration::from_millis(max_itl_ms), ..UNCACHED };
        let inner = on(&faulty(SimFaults::default()), few());
        let timed = Timed { inner, now_us: 0, in_flight: Vec::new(), results: BTreeMap::new() };
        let mut core = Core::new(timed, &options, Arc::new(Mutex::new(EngineStatus::default())));
        let submit = |core: &mut Core<Timed>, id: u64, prompt: usize, max_new_tokens: usize| {
            let ((events, heard), (records, told)) = (channel(), channel());
            let request = request(tokens(id, prompt), max_new_tokens);
            let sink = Box::new(Both(events, records));
            let now = core.runner().now_us;
            core.submit(Submission { id: RequestId(id), request, sink, submitted_us: now }, now);
            (heard, told)
        };
        let advance = |core: &mut Core<Timed>| {
            core.turn(core.runner().now_us);
            core.check_invariants();
            let now = core.runner().now_us;
            let until = core.next_due_us().map(|due| Duration::from_micros(due.saturating_sub(now)));
            core.wait(until, |timed| timed.now_us);
        };
        // So that it is known how long nodes take.
        let (_, told) = submit(&mut core, 1, 2 * TILE + 1, 1);
        while told.try_recv().is_err() {
            advance(&mut core);
            core.turn(core.runner().now_us);
        }
        let (stream, _) = submit(&mut core, 2, 3, 400);
        let mut times = VecDeque::new();
        let listen = |core: &Core<Timed>, times: &mut VecDeque<u64>| {
            let tokens = stream.try_iter().filter(|event| matches!(event, Event::Token { .. })).count();
            times.extend(vec![core.runner().now_us; tokens]);
        };
        while times.len() < 3 {
            advance(&mut core);
            listen(&core, &mut times);
        }
        let (_, told) = submit(&mut core, 3, 6 * TILE + 1, 1);
        let record = loop {
            if let Ok(record) = told.try_recv() {
                break record;
            }
            advance(&mut core);
            listen(&core, &mut times);
            core.turn(core.runner().now_us);
        };
        assert!(times.len() > 10, "the stream went on: {times:?}");
        let gaps = times.iter().zip(times.iter().skip(1)).map(|(a, b)| b - a);
        let longest = gaps.max().expect("tokens");
        assert!(longest <= max_itl_ms * 1000, "{longest} microseconds, {max_itl_ms} ms are allowed");
        assert_eq!(widths(&record), vec![width; 6 * TILE / width]);
        let operations = record.ledger.total_operations();
        assert_eq!(operations.planned, operations.dispatched());
        let contention = operations.fallbacks.get(&Fallback::Contention).copied().unwrap_or(0);
        let want = if width == TILE { (6 * 12, 0) } else { (0, 12 * 12) };
        assert_eq!((operations.planned, contention), want, "{max_itl_ms} ms: {operations:?}");
    }
}
