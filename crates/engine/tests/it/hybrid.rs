//! Neural engines in prefill, with the soft engine on nano: what is planned is dispatched, and no width, tail, failure or
//! neighbour changes a bit of the result. Numbers in the names of tests are those of the hybrid spec's section 13.

use std::collections::BTreeMap;
use std::sync::Arc;

use troika_base::NumericClass;
use troika_device::map_file;
use troika_device::npu::NpuBackend;
use troika_device::npu::soft::{Soft, SoftOptions};
use troika_engine::{
    Chunk, DeviceId, Distance, Engines, FeatureState, HybridOptions, Ledger, Operations, Placement, Runner,
    RunnerOptions, StepRunner, WantLogits,
};
use troika_graph::{Acceptance, Kind, Scope};
use troika_model::{Checkpoint, ScaleCheck, WeightTable};
use troika_prompt::Tokenizer;
use troika_runtime::{Fallback, Priority};
use troika_testkit::compare::assert_same_bits;
use troika_testkit::npu::{FaultyNpu, NpuFaults};
use troika_testkit::repo_root;

use crate::support::{chunked, feed, one_shot};

pub(crate) const TILE: usize = 64;

pub(crate) fn soft(instances: usize) -> Arc<dyn NpuBackend> {
    let options = SoftOptions { instances, ..SoftOptions::default() };
    Arc::new(Soft::start(options).expect("the soft engine starts"))
}

/// Every kind of projection takes part, in every way.
pub(crate) fn everything() -> BTreeMap<Kind, Placement> {
    BTreeMap::from([
        (Kind::WqA, Placement::Split(0.4)),
        (Kind::WqB, Placement::Split(0.5)),
        (Kind::Wkv, Placement::Whole),
        (Kind::WoA, Placement::Split(0.5)),
        (Kind::WoB, Placement::Whole),
        (Kind::CsaCompressor, Placement::Split(0.3)),
        (Kind::HcaCompressor, Placement::Whole),
        (Kind::IndexerCompressor, Placement::Split(0.5)),
        (Kind::SharedExpert, Placement::Whole),
    ])
}

pub(crate) fn wish(placements: BTreeMap<Kind, Placement>, tail_threshold: usize) -> HybridOptions {
    HybridOptions { tile: TILE, tail_threshold, placements, memory_bytes: u64::MAX }
}

pub(crate) fn nano(engines: Option<(Arc<dyn NpuBackend>, HybridOptions)>) -> Runner {
    nano_with(NumericClass::Fast, false, engines)
}

fn nano_with(class: NumericClass, debug: bool, engines: Option<(Arc<dyn NpuBackend>, HybridOptions)>) -> Runner {
    let checkpoint = Checkpoint::open(&repo_root().join("models/nano"), &map_file).expect("nano opens");
    let weights = WeightTable::build(&checkpoint, ScaleCheck::All).expect("it is complete");
    let mut options = RunnerOptions { debug, ..RunnerOptions::new(class) };
    options.cpu.threads = 1;
    let mut progress = |_, _, _| ();
    let engines = engines.map(|(backend, options)| Engines { backend, options, progress: &mut progress });
    let config = checkpoint.config().model.clone();
    Runner::with_engines(config, weights.facts(), &weights, options, engines).expect("nano loads")
}

fn hybrid(tail_threshold: usize) -> Runner {
    hybrid_on(soft(1), tail_threshold)
}

fn hybrid_on(engine: Arc<dyn NpuBackend>, tail_threshold: usize) -> Runner {
    nano(Some((engine, wish(everything(), tail_threshold))))
}

pub(crate) fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(|i| (i * 7919 % 1021 + 16) as u32).collect()
}

/// Projections in the plan.
fn num_projections(runner: &Runner) -> u64 {
    runner.executor().plan().projections().len() as u64
}

/// What one prefill step of `rows` rows did.
fn ledger_of(runner: &mut Runner, rows: usize) -> Ledger {
    let sequence = runner.new_sequence();
    let ledger = feed(runner, sequence, &tokens(rows), 1).ledger;
    runner.drop_sequence(sequence);
    ledger
}

pub(crate) fn assert_books_balance(operations: &Operations) {
    assert_eq!(operations.dispatched(), operations.merged + operations.cancelled, "{operations:?}");
}

#[test]
fn acceptance_01_and_08_what_is_planned_is_dispatched() {
    what_is_planned_is_dispatched(soft(1));
}

pub(crate) fn what_is_planned_is_dispatched(engine: Arc<dyn NpuBackend>) {
    let mut runner = hybrid_on(engine, 0);
    assert!(num_projections(&runner) > 40, "six layers with all their projections");
    for rows in [TILE / 2, TILE - 1, TILE, TILE + 1, 2 * TILE, 5 * TILE + 3, 512] {
        let ledger = ledger_of(&mut runner, rows);
        let (operations, projections) = (ledger.total_operations(), num_projections(&runner));
        assert_eq!(operations.planned, operations.dispatched(), "{rows} rows");
        assert_eq!(operations.planned, (rows / TILE) as u64 * projections, "{rows} rows");
        assert_eq!(operations.logical_rows, operations.planned * TILE as u64, "no tile is padded");
        assert_books_balance(&operations);
        let narrow = if rows % TILE > 0 { projections } else { 0 };
        assert_eq!(operations.fallbacks.get(&Fallback::RowsBelowTailThreshold).copied().unwrap_or(0), narrow);
    }
    assert_eq!(runner.feature(), FeatureState::Engaged);
    let (mut planned, mut engine) = (0, 0);
    for (kind, device, entry) in runner.totals().entries() {
        assert_eq!(entry.submitted, entry.completed, "{kind:?} on {device:?}");
        engine += if device == DeviceId(1) { entry.submitted } else { 0 };
    }
    runner.totals().operations().values().for_each(|operations| planned += operations.planned);
    assert_eq!(engine, planned, "one instance has a part of every operation");
}

#[test]
fn acceptance_03_and_04_tails_go_by_the_rule() {
    tails_go_by_the_rule(&soft(1));
    // A prompt of S tokens has S - 1 to prefill; one of S + 1 has a tile.
    for (rows, threshold, want) in [(TILE - 1, TILE - 1, (0, 1)), (TILE - 1, 0, (0, 0)), (TILE, 0, (1, 0))] {
        let mut runner = hybrid(threshold);
        let projections = num_projections(&runner);
        let operations = ledger_of(&mut runner, rows).total_operations();
        assert_eq!((operations.exact, operations.padded), (want.0 * projections, want.1 * projections), "{rows} rows");
    }
}

pub(crate) fn tails_go_by_the_rule(engine: &Arc<dyn NpuBackend>) {
    let rows = 5 * TILE / 2;
    for (threshold, padded) in [(0, false), (TILE / 2, true), (TILE / 2 + 1, false)] {
        let mut runner = hybrid_on(Arc::clone(engine), threshold);
        let projections = num_projections(&runner);
        let operations = ledger_of(&mut runner, rows).total_operations();
        assert_eq!(operations.exact, 2 * projections, "threshold {threshold}");
        assert_eq!(operations.padded, if padded { projections } else { 0 }, "threshold {threshold}");
        assert_eq!(operations.padded_rows, operations.padded * (TILE / 2) as u64);
        assert_eq!(operations.planned, operations.dispatched());
        assert_eq!(operations.fallbacks.is_empty(), padded);
    }
}

/// Every way to compute a row gives the same bits: full tiles, padded ones, the primary device alone, any chunking, several
/// instances, other sequences in the tile.
#[test]
fn acceptance_05_tiles_tails_and_narrow_chunks_are_one_arithmetic() {
    let tokens = tokens(4 * TILE + 37);
    let mut runner = hybrid(0);
    let want = one_shot(&mut runner, &tokens, tokens.len());
    assert!(runner.totals().total_operations().dispatched() > 0);
    let class = runner.numeric_class();
    // Chunks of one token would be decode steps, which are the primary device's own.
    for sizes in [vec![TILE], vec![TILE / 2], vec![3, 100, 2, 64, 5], vec![2 * TILE + 7]] {
        assert_same_bits(&format!("chunks {sizes:?}"), &chunked(&mut runner, &tokens, &sizes), &want);
    }
    let sequence = [runner.new_sequence(), runner.new_sequence()];
    let chunk = |sequence, tokens| Chunk {
        sequence,
        tokens,
        logits: WantLogits::Last(usize::MAX),
        acceptance: Acceptance::Whole,
    };
    let forward = runner.forward(&[chunk(sequence[0], &tokens[..40]), chunk(sequence[1], &tokens)]).expect("it runs");
    assert_same_bits("behind another sequence", &forward.logits(1), &want);

    let mut padding = hybrid(2);
    assert_same_bits("padded tails", &one_shot(&mut padding, &tokens, tokens.len()), &want);
    assert_eq!(padding.totals().total_operations().padded, num_projections(&padding));
    assert_ne!(padding.numeric_class(), class, "the tail threshold is part of the plan");
    for instances in [2, 3] {
        let mut several = nano(Some((soft(instances), wish(everything(), 0))));
        assert_same_bits(&format!("{instances} instances"), &one_shot(&mut several, &tokens, tokens.len()), &want);
        assert_eq!(several.feature(), FeatureState::Engaged);
    }
    let mut wide = nano(Some((soft(1), HybridOptions { tile: 4096, ..wish(everything(), 0) })));
    assert_same_bits("no tile at all", &one_shot(&mut wide, &tokens, tokens.len()), &want);
    assert!(matches!(wide.feature(), FeatureState::Idle { .. }), "{}", wide.feature());
}

/// State that was computed with engines and resumed without a full tile.
#[test]
fn padded_rows_are_no_tokens() {
    let tokens = tokens(TILE + 40);
    let [mut plain, mut padding] = [hybrid(0), hybrid(2)];
    let mut continued = Vec::new();
    for runner in [&mut plain, &mut padding] {
        let sequence = runner.new_sequence();
        feed(runner, sequence, &tokens, 0);
        assert_eq!(runner.num_computed_tokens(sequence).expect("it is live"), tokens.len());
        continued.push((feed(runner, sequence, &[17], 1).logits(0), runner.state_bytes()));
    }
    assert_same_bits("after padded tails", &continued[1].0, &continued[0].0);
    assert_eq!(continued[0].1, continued[1].1, "bytes of state");
}

/// A shared expert's tiles go to the instances in turn, and with one tile in a step each instance has every other layer's.
#[test]
fn instances_take_turns_from_layer_to_layer() {
    let shared = BTreeMap::from([(Kind::SharedExpert, Placement::Whole)]);
    for (instances, rows, want) in [(2, TILE, vec![3, 3]), (3, TILE, vec![2, 2, 2]), (2, 3 * TILE, vec![9, 9])] {
        let mut runner = nano(Some((soft(instances), wish(shared.clone(), 0))));
        let ledger = ledger_of(&mut runner, rows);
        let device = |instance: usize| DeviceId(1 + instance as u16);
        let parts = (0..instances).map(|instance| ledger.entry(Kind::SharedExpert, device(instance)).completed);
        assert_eq!(parts.collect::<Vec<_>>(), want, "{instances} instances, {rows} rows, six layers");
    }
}

#[test]
fn acceptance_07_decode_is_a_bypass_and_no_fallback() {
    let mut runner = hybrid(0);
    let projections = num_projections(&runner);
    let mut primary = nano(None);
    let logits: Vec<Vec<f32>> = [&mut runner, &mut primary]
        .into_iter()
        .map(|runner| {
            let sequence = runner.new_sequence();
            (0..200).flat_map(|i| feed(runner, sequence, &[20 + i], 1).logits(0)).collect()
        })
        .collect();
    assert_same_bits("decode is the primary device's own arithmetic", &logits[0], &logits[1]);
    let operations = runner.totals().total_operations();
    assert_eq!(operations.bypass_decode, 200 * projections);
    assert_eq!((operations.planned, operations.dispatched(), operations.fallbacks.len()), (0, 0, 0));
    assert_eq!(runner.feature(), FeatureState::Ready);
}

#[test]
fn verification_is_a_bypass() {
    let mut runner = hybrid(0);
    let sequence = runner.new_sequence();
    let tokens = tokens(2 * TILE);
    let chunk = Chunk { sequence, tokens: &tokens, logits: WantLogits::Last(1), acceptance: Acceptance::Partial };
    let ledger = runner.forward(&[chunk]).expect("it runs").ledger;
    let operations = ledger.total_operations();
    assert_eq!((operations.bypass_verify, operations.bypass_decode), (num_projections(&runner), 0));
    assert_eq!((operations.planned, operations.dispatched()), (0, 0));
}

/// Whichever run fails, the request is completed with the same bits and the projection stays off the engine.
#[test]
fn acceptance_09_a_failed_run_costs_time_and_no_result() {
    let tokens = tokens(2 * TILE);
    let want = one_shot(&mut hybrid(0), &tokens, tokens.len());
    for failing in [0, 1, 40, 87] {
        let faults = NpuFaults { failing_run: Some(failing), ..NpuFaults::default() };
        let backend = Arc::new(FaultyNpu::new(soft(1), faults));
        let mut runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(everything(), 0))));
        let projections = num_projections(&runner);
        assert!(failing < 2 * projections, "the run is one of the prompt's");
        backend.arm();
        assert_same_bits(&format!("run {failing} failed"), &one_shot(&mut runner, &tokens, tokens.len()), &want);
        let operations = runner.totals().total_operations();
        assert_eq!(operations.runtime_failures, 1);
        assert_eq!(operations.dispatched(), 2 * projections);
        assert_books_balance(&operations);
        assert_eq!(runner.executor().latched().len(), 1);
        assert_same_bits("afterwards", &one_shot(&mut runner, &tokens, tokens.len()), &want);
        let operations = runner.totals().total_operations();
        assert_eq!(operations.fallbacks.get(&Fallback::Latched), Some(&1), "one projection, one step");
        assert_eq!(operations.planned - operations.dispatched(), 2);
        assert_books_balance(&operations);
    }
    // With a single projection in the plan half of the operations are missing then.
    let faults = NpuFaults { failing_run: Some(0), ..NpuFaults::default() };
    let backend = Arc::new(FaultyNpu::new(soft(1), faults));
    let few = BTreeMap::from([(Kind::SharedExpert, Placement::Whole)]);
    let mut runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(few, 0))));
    backend.arm();
    (0..2).for_each(|_| drop(one_shot(&mut runner, &tokens, 1)));
    let FeatureState::Degraded { reason, ratio } = runner.feature() else { panic!("{}", runner.feature()) };
    assert_eq!(reason, "latched");
    assert!((0.9..0.95).contains(&ratio), "{ratio}");
}

#[test]
fn acceptance_10_an_engine_that_refuses_leaves_a_model_that_serves() {
    let tokens = tokens(3 * TILE);
    let plain = one_shot(&mut nano(None), &tokens, 1);
    let start = |faults: NpuFaults| {
        let backend = Arc::new(FaultyNpu::new(soft(1), faults));
        let runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(everything(), 0))));
        (backend, runner)
    };
    let all = num_projections(&hybrid(0));
    // Nothing compiles.
    let (_, mut runner) = start(NpuFaults { compile_limit: Some(0), ..NpuFaults::default() });
    let FeatureState::Unavailable { reason } = runner.feature() else { panic!("{}", runner.feature()) };
    assert!(reason.starts_with("compile: "), "{reason}");
    assert_eq!(runner.numeric_class(), "fast");
    assert_same_bits("without engines", &one_shot(&mut runner, &tokens, 1), &plain);
    // Large ones do not compile: each says so, the others run.
    let (_, mut runner) = start(NpuFaults { compile_limit: Some(16 << 10), ..NpuFaults::default() });
    let left_out: Vec<&String> = runner.records().iter().filter_map(|record| record.left_out.as_ref()).collect();
    assert!(!left_out.is_empty() && left_out.iter().all(|reason| reason.starts_with("compile: ")), "{left_out:?}");
    assert_eq!(num_projections(&runner) + left_out.len() as u64, all);
    one_shot(&mut runner, &tokens, 1);
    assert_eq!(runner.feature(), FeatureState::Engaged);
    // Loads fail: one to three times, and smaller banks are tried; more often, and projections are dropped; always.
    for failing_loads in [1, 3, 4, 6] {
        let (backend, mut runner) = start(NpuFaults { failing_loads, ..NpuFaults::default() });
        let dropped = (failing_loads - 3).max(0) as u64;
        assert_eq!(num_projections(&runner), all - dropped, "{failing_loads} loads fail");
        let reasons = runner.records().iter().filter_map(|record| record.left_out.as_ref());
        assert_eq!(reasons.filter(|reason| reason.starts_with("bank_budget: ")).count() as u64, dropped);
        assert!(backend.num_banks() > 0);
        one_shot(&mut runner, &tokens, 1);
        assert_eq!(runner.feature(), FeatureState::Engaged);
    }
    let (backend, mut runner) = start(NpuFaults { bank_limit: Some(0), ..NpuFaults::default() });
    let FeatureState::Unavailable { reason } = runner.feature() else { panic!("{}", runner.feature()) };
    assert!(reason.starts_with("load: ") && backend.num_banks() == 0, "{reason}");
    assert_same_bits("without banks", &one_shot(&mut runner, &tokens, 1), &plain);
}

/// The probe at load compares numbers, so a wrong engine never sees a prompt.
#[test]
fn acceptance_18_a_corrupt_engine_is_found_before_anything_is_stored() {
    let faults = NpuFaults { noise: 1e-3, ..NpuFaults::default() };
    let mut runner = nano(Some((Arc::new(FaultyNpu::new(soft(1), faults)), wish(everything(), 0))));
    let FeatureState::Unavailable { reason } = runner.feature() else { panic!("{}", runner.feature()) };
    assert!(reason.starts_with("quarantined: "), "{reason}");
    assert_eq!(runner.numeric_class(), "fast", "nothing is kept under the name of the plan");
    let tokens = tokens(2 * TILE);
    assert_same_bits("quarantined", &one_shot(&mut runner, &tokens, 1), &one_shot(&mut nano(None), &tokens, 1));
    assert_eq!(runner.totals().total_operations(), Operations::default());
}

#[test]
fn other_classes_and_wrong_tiles_are_refused_with_a_reason() {
    for (class, tile, want) in [(NumericClass::Exact, TILE, "class: "), (NumericClass::Fast, 100, "tile: ")] {
        let options = HybridOptions { tile, ..wish(everything(), 0) };
        let runner = nano_with(class, false, Some((soft(1), options)));
        let FeatureState::Unavailable { reason } = runner.feature() else { panic!("{}", runner.feature()) };
        assert!(reason.starts_with(want), "{reason}");
    }
    let options = HybridOptions { memory_bytes: 700_000, ..wish(everything(), 0) };
    let runner = nano(Some((soft(1), options)));
    let left_out: Vec<&String> = runner.records().iter().filter_map(|record| record.left_out.as_ref()).collect();
    assert!(
        num_projections(&runner) > 0 && left_out.iter().any(|reason| reason.starts_with("memory: ")),
        "{left_out:?}"
    );
}

/// What the engine does with a request that is cancelled: its sequence is given up while the step runs.
#[test]
fn acceptance_20_cancelled_requests_leave_nothing_behind() {
    let placements = BTreeMap::from([(Kind::SharedExpert, Placement::Whole), (Kind::WqB, Placement::Split(0.5))]);
    let backend = Arc::new(FaultyNpu::new(soft(2), NpuFaults::default()));
    let mut runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(placements, 0))));
    let banks = backend.num_banks();
    let tokens = tokens(TILE + 3);
    for round in 0..1000 {
        let sequence = runner.new_sequence();
        let chunk = Chunk { sequence, tokens: &tokens, logits: WantLogits::No, acceptance: Acceptance::Whole };
        runner.submit(&[chunk], Priority::Prefill).expect("accepted");
        // Some wait a moment for the engine to begin.
        if round % 5 == 0 {
            std::thread::yield_now();
        }
        runner.drop_sequence(sequence);
        let (_, forward) = runner.next_done().expect("the step ends");
        runner.recycle(forward);
    }
    let operations = runner.totals().total_operations();
    assert_eq!(operations.dispatched(), 1000 * num_projections(&runner));
    assert_books_balance(&operations);
    for (kind, device, entry) in runner.totals().entries() {
        assert_eq!(entry.submitted, entry.completed, "{kind:?} on {device:?}");
    }
    assert_eq!((runner.state_bytes(), backend.num_banks()), (0, banks));
}

/// A step that fails takes its operations with it, and the books say so.
#[test]
fn operations_of_a_failed_step_are_cancelled() {
    let mut runner = hybrid(0);
    let sequence = runner.new_sequence();
    let tokens = tokens(TILE);
    // The state of the sequence is a token further than the step believes.
    let state = runner.sequence_state(sequence).expect("it is live");
    let chunk = Chunk { sequence, tokens: &tokens, logits: WantLogits::No, acceptance: Acceptance::Whole };
    runner.submit(&[chunk], Priority::Prefill).expect("accepted");
    let mut layer = state.layer(Scope::Layer(3));
    let pool = layer.compressed.as_mut().expect("layer 3 of nano compresses");
    pool.append(&vec![0.0; pool.width()], &vec![0.0; pool.width()]);
    drop(layer);
    assert!(runner.next_done().is_err(), "the layer finds a token that it did not write");
    let operations = runner.totals().total_operations();
    assert!(operations.dispatched() > 0 && operations.fallbacks.get(&Fallback::Cancelled) > Some(&0), "{operations:?}");
    assert_books_balance(&operations);
}

/// Of class `fast` on the engine's tiles of `tile` rows, in texts of two.
pub(crate) fn distance(
    engine: Arc<dyn NpuBackend>,
    tile: usize,
    placements: BTreeMap<Kind, Placement>,
    num_tokens: usize,
) -> Distance {
    let path = repo_root().join("models/nano");
    let tokenizer = Tokenizer::from_file(&path.join("tokenizer.json")).expect("it opens");
    let text = std::fs::read_to_string(path.join("held-out.txt")).expect("it is there");
    let mut ids = tokenizer.encode(&text[..num_tokens * 8]).expect("it is text");
    ids.truncate(num_tokens);
    assert_eq!(ids.len(), num_tokens);
    let options = HybridOptions { tile, ..wish(placements, 0) };
    let mut fast = nano_with(NumericClass::Fast, true, None);
    let mut hybrid = nano_with(NumericClass::Fast, true, Some((engine, options)));
    // Windows of two chunks, so that the second sees what the first wrote.
    let texts: Vec<&[u32]> = ids.chunks(2 * tile).collect();
    let distance = troika_engine::distance(&mut fast, &mut hybrid, &texts, tile, &mut |_| ()).expect("it runs");
    assert_eq!(hybrid.feature(), FeatureState::Engaged);
    distance
}

pub(crate) fn assert_within_the_gate(distance: &Distance) {
    assert_eq!(distance.failures(), Vec::<String>::new(), "{distance:?}");
    assert!(distance.clear * 2 > distance.positions, "most positions are clear: {distance:?}");
}

/// The gate of the hybrid spec's section 9.5 for every projection on the engine.
#[test]
fn soft_hybrid_is_close_to_fast() {
    assert_within_the_gate(&distance(soft(1), 512, everything(), 1024));
}

#[test]
#[ignore = "minutes without optimisation: the same on 16,384 tokens"]
fn soft_hybrid_is_close_to_fast_on_a_long_text() {
    for placements in [everything(), HybridOptions::default_placements()] {
        let distance = distance(soft(1), 512, placements, 16_384);
        println!("{distance:?}: mean KL {:.2e}", distance.mean_kl());
        assert_within_the_gate(&distance);
    }
}

/// Every tile with every step width: planned is what the widths say, and all of it is dispatched.
#[test]
fn acceptance_01_matrix_of_tiles_and_steps() {
    let tokens = tokens(1200);
    let placements = BTreeMap::from([(Kind::SharedExpert, Placement::Whole), (Kind::WoB, Placement::Split(0.5))]);
    let mut want = None;
    for tile in [64, 128, 256, 512, 1024] {
        for step in [tile / 2, tile - 1, tile, 2 * tile + 64] {
            let options = HybridOptions { tile, ..wish(placements.clone(), 0) };
            let mut runner = nano(Some((soft(1), options)));
            let sequence = runner.new_sequence();
            let mut last = Vec::new();
            for chunk in tokens.chunks(step) {
                last = feed(&mut runner, sequence, chunk, 1).logits(0);
            }
            let tiles: usize = tokens.chunks(step).map(|chunk| chunk.len() / tile).sum();
            let operations = runner.totals().total_operations();
            assert_eq!(operations.planned, tiles as u64 * num_projections(&runner), "tile {tile}, step {step}");
            assert_eq!(operations.planned, operations.dispatched(), "tile {tile}, step {step}");
            assert_eq!(runner.feature() == FeatureState::Engaged, tiles > 0, "tile {tile}, step {step}");
            assert_same_bits(&format!("tile {tile}, step {step}"), &last, want.get_or_insert_with(|| last.clone()));
        }
    }
}
