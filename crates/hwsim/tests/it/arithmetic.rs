//! Simulated devices that compute: nano's numbers under the times of another machine.

use troika_device::map_file;
use troika_hwsim::{Arm, Computed, Faults, Machine, Placement, PlanSpec, Profile, Projection, Run, Small};
use troika_model::{Checkpoint, ScaleCheck, WeightTable};
use troika_testkit::repo_root;

const TILE: usize = 64;

/// Runs 300 tokens on engines that take tiles of 64 rows and cuts of 8 channels.
fn compute(change: impl FnOnce(&mut Run)) -> Computed {
    let mut profile = Profile::named("m3-ultra-512").expect("it comes along");
    (profile.engines.min_tile, profile.engines.channel_alignment, profile.engines.input_alignment) = (TILE, 8, 32);
    profile.cpu.as_mut().expect("it has one").channel_alignment = 8;
    let machine = Machine::new(profile, "v4-flash-0731", "fp8").expect("known");
    let checkpoint = Checkpoint::open(&repo_root().join("models/nano"), &map_file).expect("nano opens");
    let weights = WeightTable::build(&checkpoint, ScaleCheck::All).expect("it is complete");
    let tokens: Vec<u32> = (0..300).map(|i| i * 7919 % 1021 + 16).collect();
    let (config, facts) = (checkpoint.config().model.clone(), weights.facts());
    let split = |engines, cpu| Placement::Split { engines, cpu };
    let plan = PlanSpec { tail_threshold: Some(20), ..PlanSpec::primary(TILE) }
        .with(Projection::Query, split(0.5, 0.125))
        .with(Projection::WoA, split(0.5, 0.0))
        .with(Projection::WoB, Placement::Whole)
        .with(Projection::AttentionInput, split(0.4, 0.0))
        .with(Projection::Shared, Placement::Whole);
    let mut run = Run { step: 2 * TILE, ..Run::new(tokens.len(), Arm::Hybrid, plan) };
    change(&mut run);
    machine.compute(&run, &Small { config, facts, weights: &weights, tokens: &tokens }).expect("it runs")
}

/// Neither devices, widths nor failures change a bit of what is computed; a corrupt engine does.
#[test]
fn what_is_computed_does_not_depend_on_who_does_it() {
    let want = compute(|_| ());
    // Steps of 128, 128 and 43 rows: five tiles, the last one padded.
    let widths: Vec<(usize, u64)> = want.prediction.widths.iter().map(|(rows, steps)| (*rows, *steps)).collect();
    assert_eq!(widths, [(43, 1), (128, 2)]);
    assert!(want.prediction.planned >= 5 * 4 * 6 && want.prediction.planned == want.prediction.dispatched);
    assert!(want.logits.iter().all(|x| x.is_finite()) && !want.logits.is_empty());
    let narrow = compute(|run| {
        (run.step, run.honour_step, run.plan.tail_threshold) = (TILE / 2, true, Some(0));
    });
    assert_eq!(narrow.prediction.dispatched, 0);
    assert!(narrow.logits == want.logits, "the primary device repeats what engines compute");
    let wavefront = compute(|run| run.wavefront = 3);
    assert!(wavefront.logits == want.logits);
    assert!(wavefront.prediction.prefill_ms < want.prediction.prefill_ms);
    let failing = compute(|run| run.faults = Faults { failing_dispatch: Some(7), ..Faults::default() });
    assert!(failing.logits == want.logits);
    assert!(failing.prediction.dispatched < failing.prediction.planned);
    let corrupt = compute(|run| run.faults = Faults { corrupt: true, seed: 3, ..Faults::default() });
    assert!(corrupt.logits != want.logits);
}
