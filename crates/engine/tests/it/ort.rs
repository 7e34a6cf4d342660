//! Nano with engines that ONNX Runtime knows: everything that engines have to do, within a tolerance where bits depend on who
//! computed a row.
//! `cargo xtask ort` installs the library and runs these tests.

use std::path::PathBuf;
use std::sync::Arc;

use troika_device::npu::NpuBackend;
use troika_device::npu::ort::{Ort, OrtOptions, Provider};

use crate::engines::{Subject, engine_tests};
use crate::hybrid::{TILE, assert_within_the_gate, distance, everything};

fn ort(provider: Provider, instances: usize) -> Arc<dyn NpuBackend> {
    let place =
        std::env::var_os("TROIKA_TEST_ORT").expect("TROIKA_TEST_ORT names a Python environment with onnxruntime");
    let options = OrtOptions { places: vec![PathBuf::from(place)], provider, instances, ..OrtOptions::default() };
    Arc::new(Ort::start(&options).expect("the engine starts"))
}

/// The CPU repeats what the provider leaves out with roundings of its own. 0.02 is the most that was seen.
const CPU: Subject =
    Subject { start: |instances| ort(Provider::Cpu, instances), tolerance: 0.03, noise: 100.0, cancels: 1000 };

engine_tests! { #[ignore = "needs ONNX Runtime: cargo xtask ort"] CPU }

#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn nano_on_the_htp_emulator_is_close_to_fast() {
    assert_within_the_gate(&distance(ort(Provider::Qnn, 1), TILE, everything(), 4 * TILE));
}
