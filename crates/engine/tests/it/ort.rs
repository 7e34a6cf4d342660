//! nano with engines that ONNX Runtime knows: the tests of `hybrid.rs` that hold for engines whose bits nobody repeats.
//! `cargo xtask ort` installs the library and runs these tests.

use std::path::PathBuf;
use std::sync::Arc;

use troika_device::npu::NpuBackend;
use troika_device::npu::ort::{Ort, OrtOptions, Provider};
use troika_engine::FeatureState;
use troika_runtime::Fallback;
use troika_testkit::npu::{FaultyNpu, NpuFaults};

use crate::hybrid::{
    TILE, assert_books_balance, assert_within_the_gate, distance, everything, nano, soft, tails_go_by_the_rule, tokens,
    what_is_planned_is_dispatched, wish,
};
use crate::support::one_shot;

fn ort(provider: Provider) -> Arc<dyn NpuBackend> {
    let place =
        std::env::var_os("TROIKA_TEST_ORT").expect("TROIKA_TEST_ORT names a Python environment with onnxruntime");
    let options = OrtOptions { places: vec![PathBuf::from(place)], provider, ..OrtOptions::default() };
    Arc::new(Ort::start(&options).expect("the engine starts"))
}

/// Largest difference over the largest number.
fn largest_difference(got: &[f32], want: &[f32]) -> f32 {
    let difference = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    difference / want.iter().copied().map(f32::abs).fold(0.0, f32::max)
}

#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn the_cpu_provider_does_what_is_planned() {
    what_is_planned_is_dispatched(ort(Provider::Cpu));
    tails_go_by_the_rule(&ort(Provider::Cpu));
}

/// The gate of the hybrid spec's section 9.5, with every projection on the engine.
#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn nano_on_the_cpu_provider_is_close_to_fast() {
    assert_within_the_gate(&distance(ort(Provider::Cpu), 512, everything(), 1024));
}

#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn nano_on_the_htp_emulator_is_close_to_fast() {
    assert_within_the_gate(&distance(ort(Provider::Qnn), TILE, everything(), 4 * TILE));
}

/// Whichever run fails, the request is completed, with the CPU's own rounding where the engine's is missing.
#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn a_failed_run_costs_time_and_no_result() {
    let tokens = tokens(2 * TILE);
    let want = one_shot(&mut nano(Some((ort(Provider::Cpu), wish(everything(), 0)))), &tokens, tokens.len());
    let soft = one_shot(&mut nano(Some((soft(1), wish(everything(), 0)))), &tokens, tokens.len());
    let from_soft = largest_difference(&soft, &want);
    assert!(from_soft > 0.0 && from_soft < 0.1, "two engines round differently: {from_soft}");
    for failing in [0, 40] {
        let faults = NpuFaults { failing_run: Some(failing), ..NpuFaults::default() };
        let backend = Arc::new(FaultyNpu::new(ort(Provider::Cpu), faults));
        let mut runner = nano(Some((Arc::clone(&backend) as Arc<dyn NpuBackend>, wish(everything(), 0))));
        backend.arm();
        let got = one_shot(&mut runner, &tokens, tokens.len());
        let difference = largest_difference(&got, &want);
        assert!(difference < 0.1, "run {failing} failed: {difference}");
        let operations = runner.totals().total_operations();
        assert_eq!((operations.runtime_failures, runner.executor().latched().len()), (1, 1));
        assert_books_balance(&operations);
        one_shot(&mut runner, &tokens, 1);
        assert_eq!(runner.totals().total_operations().fallbacks.get(&Fallback::Latched), Some(&1));
        assert_eq!(runner.feature(), FeatureState::Engaged, "all but one projection");
    }
}
