//! What every neural engine has to do, whoever makes it: what is planned is dispatched, and no width, tail, failure, neighbour or
//! number of steps in flight changes the result. Tests of a back end are these cases on a [`Subject`], by [`engine_tests`].
//! Numbers in the names are those of the hybrid spec's section 13.

use std::collections::BTreeMap;
use std::sync::Arc;

use troika_device::npu::NpuBackend;
use troika_device::npu::sim::{Sim, SimFaults};
use troika_engine::{
    Chunk, DeviceId, FeatureState, HybridOptions, Ledger, Operations, Placement, Runner, StepRunner, WantLogits,
};
use troika_graph::{Acceptance, Kind, Scope};
use troika_runtime::{Fallback, Priority};
use troika_testkit::compare::assert_same_bits;

use crate::hybrid::{TILE, assert_books_balance, assert_within_the_gate, distance, everything, nano, tokens, wish};
use crate::support::{chunked, feed, one_shot};
use crate::wavefront::{assert_depth_changes_nothing, feed_wave};

/// An engine under test.
pub(crate) struct Subject {
    /// Starts it, with so many instances.
    pub(crate) start: fn(usize) -> Arc<dyn NpuBackend>,
    /// Logits of a prompt may differ by so much from those of the same prompt with other rows on the engine, root mean square over
    /// root mean square. At 0 the bits are equal.
    pub(crate) tolerance: f32,
    /// What is added to results so that they are wrong.
    pub(crate) noise: f32,
    /// Requests that are cancelled.
    pub(crate) cancels: u64,
}

impl Subject {
    /// Nano with every projection on the engine.
    fn hybrid(&self, tail_threshold: usize) -> Runner {
        nano(Some(((self.start)(1), wish(everything(), tail_threshold))))
    }

    /// The engine with faults.
    fn sim(&self, faults: SimFaults) -> Arc<Sim> {
        Arc::new(Sim::new((self.start)(1), faults))
    }

    fn assert_same(&self, what: &str, got: &[f32], want: &[f32]) {
        if self.tolerance == 0.0 {
            return assert_same_bits(what, got, want);
        }
        assert_eq!(got.len(), want.len(), "{what}");
        let square = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let difference = square(&mut got.iter().zip(want).map(|(a, b)| a - b)) / square(&mut want.iter().copied());
        let difference = difference.sqrt() as f32;
        // Written so that what is no number fails.
        let is_near = difference <= self.tolerance;
        assert!(is_near, "{what}: off by {difference}");
    }
}

/// Makes each case a test of `$subject`.
macro_rules! engine_tests {
    ($(#[$attribute:meta])* $subject:ident) => {
        crate::engines::engine_tests! { @each [$(#[$attribute])*] $subject
            acceptance_01_and_08_what_is_planned_is_dispatched
            acceptance_01_matrix_of_tiles_and_steps
            acceptance_03_and_04_tails_go_by_the_rule
            acceptance_05_padded_rows_are_no_tokens
            acceptance_05_tiles_tails_and_narrow_chunks_are_one_arithmetic
            acceptance_07_decode_is_a_bypass_and_no_fallback
            acceptance_09_a_failed_run_costs_time_and_no_result
            acceptance_10_an_engine_that_refuses_leaves_a_model_that_serves
            acceptance_18_a_corrupt_engine_is_found_before_anything_is_stored
            acceptance_20_cancelled_requests_leave_nothing_behind
            a_failed_run_among_several_steps_costs_no_result
            checks_are_counted_and_catch_the_first_wrong_part
            engines_may_work_on_several_steps
            instances_take_turns_from_layer_to_layer
            operations_of_a_failed_step_are_cancelled
            prefill_is_close_to_fast
            stacked_inputs_are_one_operation
            verification_is_a_bypass
        }
    };
    (@each $attributes:tt $subject:ident $($case:ident)*) => {
        $(crate::engines::engine_tests! { @one $attributes $subject $case })*
    };
    (@one [$($attributes:tt)*] $subject:ident $case:ident) => {
        #[test]
        $($attributes)*
        fn $case() {
            crate::engines::$case(&$subject);
        }
    };
}
pub(crate) use engine_tests;

pub(crate) fn acceptance_01_and_08_what_is_planned_is_dispatched(on: &Subject) {
    let mut runner = on.hybrid(0);
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

pub(crate) fn acceptance_03_and_04_tails_go_by_the_rule(on: &Subject) {
    let rows = 5 * TILE / 2;
    for (threshold, padded) in [(0, false), (TILE / 2, true), (TILE / 2 + 1, false)] {
        let mut runner = on.hybrid(threshold);
        let projections = num_projections(&runner);
        let operations = ledger_of(&mut runner, rows).total_operations();
        assert_eq!(operations.exact, 2 * projections, "threshold {threshold}");
        assert_eq!(operations.padded, if padded { projections } else { 0 }, "threshold {threshold}");
        assert_eq!(operations.padded_rows, operations.padded * (TILE / 2) as u64);
        assert_eq!(operations.planned, operations.dispatched());
        assert_eq!(operations.fallbacks.is_empty(), padded);
    }
    // A prompt of S tokens has S - 1 to prefill; one of S + 1 has a tile.
    for (rows, threshold, want) in [(TILE - 1, TILE - 1, (0, 1)), (TILE - 1, 0, (0, 0)), (TILE, 0, (1, 0))] {
        let mut runner = on.hybrid(threshold);
        let projections = num_projections(&runner);
        let operations = ledger_of(&mut runner, rows).total_operations();
        assert_eq!((operations.exact, operations.padded), (want.0 * projections, want.1 * projections), "{rows} rows");
    }
}

/// Every way to compute a row gives the same bits: full tiles, padded ones, the primary device alone, any chunking, several
/// instances, other sequences in the tile.
pub(crate) fn acceptance_05_tiles_tails_and_narrow_chunks_are_one_arithmetic(on: &Subject) {
    let tokens = tokens(4 * TILE + 37);
    let mut runner = on.hybrid(0);
    let want = one_shot(&mut runner, &tokens, tokens.len());
    assert!(runner.totals().total_operations().dispatched() > 0);
    let class = runner.numeric_class();
    // Chunks of one token would be decode steps, which are the primary device's own.
    for sizes in [vec![TILE], vec![TILE / 2], vec![3, 100, 2, 64, 5], vec![2 * TILE + 7]] {
        on.assert_same(&format!("chunks {sizes:?}"), &chunked(&mut runner, &tokens, &sizes), &want);
    }
    let sequence = [runner.new_sequence(), runner.new_sequence()];
    let chunk = |sequence, tokens| Chunk {
        sequence,
        tokens,
        logits: WantLogits::Last(usize::MAX),
        acceptance: Acceptance::Whole,
    };
    let forward = runner.forward(&[chunk(sequence[0], &tokens[..40]), chunk(sequence[1], &tokens)]).expect("it runs");
    on.assert_same("behind another sequence", &forward.logits(1), &want);

    let mut padding = on.hybrid(2);
    on.assert_same("padded tails", &one_shot(&mut padding, &tokens, tokens.len()), &want);
    assert_eq!(padding.totals().total_operations().padded, num_projections(&padding));
    assert_ne!(padding.numeric_class(), class, "the tail threshold is part of the plan");
    for instances in [2, 3] {
        let mut several = nano(Some(((on.start)(instances), wish(everything(), 0))));
        on.assert_same(&format!("{instances} instances"), &one_shot(&mut several, &tokens, tokens.len()), &want);
        assert_eq!(several.feature(), FeatureState::Engaged);
    }
    let mut wide = nano(Some(((on.start)(1), HybridOptions { tile: 4096, ..wish(everything(), 0) })));
    on.assert_same("no tile at all", &one_shot(&mut wide, &tokens, tokens.len()), &want);
    assert!(matches!(wide.feature(), FeatureState::Idle { .. }), "{}", wide.feature());
}

/// State that was computed with engines and resumed without a full tile.
pub(crate) fn acceptance_05_padded_rows_are_no_tokens(on: &Subject) {
    let tokens = tokens(TILE + 40);
    let [mut plain, mut padding] = [on.hybrid(0), on.hybrid(2)];
    let mut continued = Vec::new();
    for runner in [&mut plain, &mut padding] {
        let sequence = runner.new_sequence();
        feed(runner, sequence, &tokens, 0);
        assert_eq!(runner.num_computed_tokens(sequence).expect("it is live"), tokens.len());
        let state = runner.snapshot(sequence).expect("it is live");
        continued.push((feed(runner, sequence, &[17], 1).logits(0), runner.state_bytes(), state));
    }
    on.assert_same("after padded tails", &continued[1].0, &continued[0].0);
    assert_eq!(continued[0].1, continued[1].1, "bytes of state");
    if on.tolerance == 0.0 {
        assert!(continued[0].2 == continued[1].2, "what others would find in the cache");
    }
}

/// Projections that share a layer's input as one: fewer operations, the same numbers, in every lane.
pub(crate) fn stacked_inputs_are_one_operation(on: &Subject) {
    let tokens = tokens(2 * TILE + 9);
    let separate = [Kind::WqA, Kind::Wkv, Kind::CsaCompressor, Kind::HcaCompressor, Kind::IndexerCompressor]
        .map(|kind| (kind, Placement::Whole));
    let mut separate = nano(Some(((on.start)(1), wish(BTreeMap::from(separate), 0))));
    let want = one_shot(&mut separate, &tokens, tokens.len());
    let layers = separate.config().num_hidden_layers as u64;
    for (instances, placement) in [(1, Placement::Whole), (1, Placement::Split(0.5)), (2, Placement::Split(0.5))] {
        let place = BTreeMap::from([(Kind::AttentionInput, placement)]);
        let options = HybridOptions { stack_inputs: true, ..wish(place, 0) };
        let mut stacked = nano(Some(((on.start)(instances), options)));
        let what = format!("{placement:?}, {instances} instances");
        on.assert_same(&what, &one_shot(&mut stacked, &tokens, tokens.len()), &want);
        let operations = stacked.totals().operations()[&Kind::AttentionInput].clone();
        assert_eq!((operations.planned, operations.merged), (2 * layers, 2 * layers), "{what}");
        assert!(num_projections(&separate) > 2 * num_projections(&stacked), "{what}");
        // Decode is as without engines.
        let decoded = [&mut stacked, &mut nano(None)].map(|runner| one_shot(runner, &[17], 1));
        assert_same_bits(&what, &decoded[0], &decoded[1]);
    }
}

/// A shared expert's tiles go to the instances in turn, and with one tile in a step each instance has every other layer's.
pub(crate) fn instances_take_turns_from_layer_to_layer(on: &Subject) {
    let shared = BTreeMap::from([(Kind::SharedExpert, Placement::Whole)]);
    for (instances, rows, want) in [(2, TILE, vec![3, 3]), (3, TILE, vec![2, 2, 2]), (2, 3 * TILE, vec![9, 9])] {
        let mut runner = nano(Some(((on.start)(instances), wish(shared.clone(), 0))));
        let ledger = ledger_of(&mut runner, rows);
        let device = |instance: usize| DeviceId(1 + instance as u16);
        let parts = (0..instances).map(|instance| ledger.entry(Kind::SharedExpert, device(instance)).completed);
        assert_eq!(parts.collect::<Vec<_>>(), want, "{instances} instances, {rows} rows, six layers");
    }
}

pub(crate) fn acceptance_07_decode_is_a_bypass_and_no_fallback(on: &Subject) {
    let mut runner = on.hybrid(0);
    let projections = num_projections(&runner);
    let mut primary = nano(None);
    let logits: Vec<Vec<f32>> = [&mut runner, &mut primary]
        .into_iter()
        .map(|runner| {
            let sequence = runner.new_sequence();
            (0..200).flat_map(|i| feed(runner, sequence, &[20 + i], 1).logits(0)).collect()
        })
        .collect();
    on.assert_same("decode is the primary device's own arithmetic", &logits[0], &logits[1]);
    let operations = runner.totals().total_operations();
    assert_eq!(operations.bypass_decode, 200 * projections);
    assert_eq!((operations.planned, operations.dispatched(), operations.fallbacks.len()), (0, 0, 0));
    assert_eq!(runner.feature(), FeatureState::Ready);
}

pub(crate) fn verification_is_a_bypass(on: &Subject) {
    let mut runner = on.hybrid(0);
    let sequence = runner.new_sequence();
    let tokens = tokens(2 * TILE);
    let chunk = Chunk { sequence, tokens: &tokens, logits: WantLogits::Last(1), acceptance: Acceptance::Partial };
    let ledger = runner.forward(&[chunk]).expect("it runs").ledger;
    let operations = ledger.total_operations();
    assert_eq!((operations.bypass_verify, operations.bypass_decode), (num_projections(&runner), 0));
    assert_eq!((operations.planned, operations.dispatched()), (0, 0));
}

/// Whichever run fails, the request is completed with the same bits and the projection stays off the engine.
pub(crate) fn acceptance_09_a_failed_run_costs_time_and_no_result(on: &Subject) {
    let tokens = tokens(2 * TILE);
    let want = one_shot(&mut on.hybrid(0), &tokens, tokens.len());
    for failing in [0, 1, 40, 87] {
        let faults = SimFaults { failing_run: Some(failing), ..SimFaults::default() };
        let backend = on.sim(faults);
        let mut runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(everything(), 0))));
        let projections = num_projections(&runner);
        assert!(failing < 2 * projections, "the run is one of the prompt's");
        backend.arm();
        on.assert_same(&format!("run {failing} failed"), &one_shot(&mut runner, &tokens, tokens.len()), &want);
        let operations = runner.totals().total_operations();
        assert_eq!(operations.runtime_failures, 1);
        assert_eq!(operations.dispatched(), 2 * projections);
        assert_books_balance(&operations);
        assert_eq!(runner.executor().latched().len(), 1);
        on.assert_same("afterwards", &one_shot(&mut runner, &tokens, tokens.len()), &want);
        let operations = runner.totals().total_operations();
        assert_eq!(operations.fallbacks.get(&Fallback::Latched), Some(&1), "one projection, one step");
        assert_eq!(operations.planned - operations.dispatched(), 2);
        assert_books_balance(&operations);
    }
    // With a single projection in the plan half of the operations are missing then.
    let faults = SimFaults { failing_run: Some(0), ..SimFaults::default() };
    let backend = on.sim(faults);
    let few = BTreeMap::from([(Kind::SharedExpert, Placement::Whole)]);
    let mut runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(few, 0))));
    backend.arm();
    (0..2).for_each(|_| drop(one_shot(&mut runner, &tokens, 1)));
    let FeatureState::Degraded { reason, ratio } = runner.feature() else { panic!("{}", runner.feature()) };
    assert_eq!(reason, "latched");
    assert!((0.9..0.95).contains(&ratio), "{ratio}");
}

pub(crate) fn acceptance_10_an_engine_that_refuses_leaves_a_model_that_serves(on: &Subject) {
    let tokens = tokens(3 * TILE);
    let plain = one_shot(&mut nano(None), &tokens, 1);
    let start = |faults: SimFaults| {
        let backend = on.sim(faults);
        let runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(everything(), 0))));
        (backend, runner)
    };
    let all = num_projections(&on.hybrid(0));
    // Nothing compiles.
    let (_, mut runner) = start(SimFaults { compile_limit: Some(0), ..SimFaults::default() });
    let FeatureState::Unavailable { reason } = runner.feature() else { panic!("{}", runner.feature()) };
    assert!(reason.starts_with("compile: "), "{reason}");
    assert_eq!(runner.numeric_class(), "fast");
    on.assert_same("without engines", &one_shot(&mut runner, &tokens, 1), &plain);
    // Large ones do not compile: each says so, the others run.
    let (_, mut runner) = start(SimFaults { compile_limit: Some(16 << 10), ..SimFaults::default() });
    let left_out: Vec<&String> = runner.records().iter().filter_map(|record| record.left_out.as_ref()).collect();
    assert!(!left_out.is_empty() && left_out.iter().all(|reason| reason.starts_with("compile: ")), "{left_out:?}");
    assert_eq!(num_projections(&runner) + left_out.len() as u64, all);
    one_shot(&mut runner, &tokens, 1);
    assert_eq!(runner.feature(), FeatureState::Engaged);
    // Loads fail: one to three times, and smaller banks are tried; more often, and projections are dropped; always.
    for failing_loads in [1, 3, 4, 6] {
        let (backend, mut runner) = start(SimFaults { failing_loads, ..SimFaults::default() });
        let dropped = u64::from(failing_loads.saturating_sub(3));
        assert_eq!(num_projections(&runner), all - dropped, "{failing_loads} loads fail");
        let reasons = runner.records().iter().filter_map(|record| record.left_out.as_ref());
        assert_eq!(reasons.filter(|reason| reason.starts_with("bank_budget: ")).count() as u64, dropped);
        assert!(backend.num_banks() > 0);
        one_shot(&mut runner, &tokens, 1);
        assert_eq!(runner.feature(), FeatureState::Engaged);
    }
    let (backend, mut runner) = start(SimFaults { bank_limit: Some(0), ..SimFaults::default() });
    let FeatureState::Unavailable { reason } = runner.feature() else { panic!("{}", runner.feature()) };
    assert!(reason.starts_with("load: ") && backend.num_banks() == 0, "{reason}");
    on.assert_same("without banks", &one_shot(&mut runner, &tokens, 1), &plain);
}

/// The probe at load compares numbers, so a wrong engine never sees a prompt.
pub(crate) fn acceptance_18_a_corrupt_engine_is_found_before_anything_is_stored(on: &Subject) {
    let faults = SimFaults { noise: on.noise, ..SimFaults::default() };
    let mut runner = nano(Some((on.sim(faults), wish(everything(), 0))));
    let FeatureState::Unavailable { reason } = runner.feature() else { panic!("{}", runner.feature()) };
    assert!(reason.starts_with("quarantined: "), "{reason}");
    assert_eq!(runner.numeric_class(), "fast", "nothing is kept under the name of the plan");
    let tokens = tokens(2 * TILE);
    on.assert_same("quarantined", &one_shot(&mut runner, &tokens, 1), &one_shot(&mut nano(None), &tokens, 1));
    assert_eq!(runner.totals().total_operations(), Operations::default());
}

/// What the engine does with a request that is cancelled: its sequence is given up while the step runs.
pub(crate) fn acceptance_20_cancelled_requests_leave_nothing_behind(on: &Subject) {
    let placements = BTreeMap::from([(Kind::SharedExpert, Placement::Whole), (Kind::WqB, Placement::Split(0.5))]);
    let backend = Arc::new(Sim::new((on.start)(2), SimFaults::default()));
    let mut runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(placements, 0))));
    let banks = backend.num_banks();
    let tokens = tokens(TILE + 3);
    for round in 0..on.cancels {
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
    assert_eq!(operations.dispatched(), on.cancels * num_projections(&runner));
    assert_books_balance(&operations);
    for (kind, device, entry) in runner.totals().entries() {
        assert_eq!(entry.submitted, entry.completed, "{kind:?} on {device:?}");
    }
    assert_eq!((runner.state_bytes(), backend.num_banks()), (0, banks));
}

/// A step that fails takes its operations with it, and the books say so.
pub(crate) fn operations_of_a_failed_step_are_cancelled(on: &Subject) {
    let mut runner = on.hybrid(0);
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

/// Every tile with every step width: planned is what the widths say, and all of it is dispatched.
pub(crate) fn acceptance_01_matrix_of_tiles_and_steps(on: &Subject) {
    let tokens = tokens(1200);
    let placements = BTreeMap::from([(Kind::SharedExpert, Placement::Whole), (Kind::WoB, Placement::Split(0.5))]);
    let mut want = None;
    for tile in [64, 128, 256, 512, 1024] {
        for step in [tile / 2, tile - 1, tile, 2 * tile + 64] {
            let options = HybridOptions { tile, ..wish(placements.clone(), 0) };
            let mut runner = nano(Some(((on.start)(1), options)));
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
            on.assert_same(&format!("tile {tile}, step {step}"), &last, want.get_or_insert_with(|| last.clone()));
        }
    }
}

/// The gate of the hybrid spec's section 9.5 for every projection on the engine.
pub(crate) fn prefill_is_close_to_fast(on: &Subject) {
    assert_within_the_gate(&distance((on.start)(1), 512, everything(), 1024));
}

/// What one prefill step of `rows` rows did.
pub(crate) fn ledger_of(runner: &mut Runner, rows: usize) -> Ledger {
    let sequence = runner.new_sequence();
    let ledger = feed(runner, sequence, &tokens(rows), 1).ledger;
    runner.drop_sequence(sequence);
    ledger
}

/// Projections in the plan.
pub(crate) fn num_projections(runner: &Runner) -> u64 {
    runner.executor().plan().projections().len() as u64
}

/// What checks find, they also put right, if they look at everything; and what they cost is in the ledger.
pub(crate) fn checks_are_counted_and_catch_the_first_wrong_part(on: &Subject) {
    let tokens = tokens(3 * TILE + 5);
    let mut runner = on.hybrid(0);
    runner.check_engines_every(5);
    let want = one_shot(&mut runner, &tokens, tokens.len());
    let operations = runner.totals().total_operations();
    // With one instance every operation is one part of the engine.
    assert_eq!((operations.checks, operations.failed_checks), (operations.dispatched() / 5, 0));
    assert!(operations.check_ns > 0 && operations.checks > 10, "{operations:?}");
    let backend = on.sim(SimFaults { noise: on.noise, noise_from: Some(20), ..SimFaults::default() });
    let mut runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(everything(), 0))));
    runner.check_engines_every(1);
    backend.arm();
    on.assert_same("put right", &one_shot(&mut runner, &tokens, tokens.len()), &want);
    let FeatureState::Quarantined { reason } = runner.feature() else { panic!("{}", runner.feature()) };
    assert!(reason.starts_with("sim0: "), "{reason}");
    let operations = runner.totals().total_operations();
    assert_eq!((operations.checks, operations.failed_checks, operations.runtime_failures), (21, 1, 0));
    assert!(operations.fallbacks[&Fallback::Quarantined] > 0 && operations.dispatched() < operations.planned);
    assert_books_balance(&operations);
    on.assert_same("afterwards", &one_shot(&mut runner, &tokens, tokens.len()), &want);
}

pub(crate) fn engines_may_work_on_several_steps(on: &Subject) {
    for instances in [1, 2] {
        let mut runner = nano(Some(((on.start)(instances), wish(everything(), 0))));
        assert_depth_changes_nothing(&format!("{instances} instances"), &mut runner, TILE);
        let operations = runner.totals().total_operations();
        assert!(operations.planned > 0 && operations.planned == operations.dispatched());
        assert_books_balance(&operations);
    }
}

/// Whichever run fails, of whichever step in flight.
pub(crate) fn a_failed_run_among_several_steps_costs_no_result(on: &Subject) {
    let prompt = vec![tokens(4 * TILE)];
    let steps = [(&[0][..], TILE); 4];
    let want = feed_wave(&mut nano(Some(((on.start)(1), wish(everything(), 0)))), &prompt, &steps, 1);
    for failing in [0, 41, 60, 100, 150] {
        let faults = SimFaults { failing_run: Some(failing), ..SimFaults::default() };
        let backend = on.sim(faults);
        let mut runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(everything(), 0))));
        backend.arm();
        let got = feed_wave(&mut runner, &prompt, &steps, 3);
        on.assert_same(&format!("run {failing} failed"), &got[0].0, &want[0].0);
        let operations = runner.totals().total_operations();
        assert_eq!((operations.runtime_failures, runner.executor().latched().len()), (1, 1));
        assert_books_balance(&operations);
    }
}
