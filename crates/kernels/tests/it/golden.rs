//! `oracle/golden_units.safetensors`: number formats, rounding, Hadamard, RoPE, Sinkhorn.

use std::collections::BTreeMap;

use troika_kernels::formats::{E2M1, E4M3, e8m0_to_f32};
use troika_kernels::{fake_fp4, fake_fp8, hadamard, rope, rope_row, sinkhorn};

use crate::support::{same_bits, serial_contexts, within};

/// Tensors of the golden file by name.
struct Golden {
    header: BTreeMap<String, serde_json::Value>,
    body: Vec<u8>,
}

impl Golden {
    fn load() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../oracle/golden_units.safetensors");
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let (length, rest) = bytes.split_first_chunk::<8>().expect("a header");
        let (header, body) = rest.split_at(u64::from_le_bytes(*length) as usize);
        Self { header: serde_json::from_slice(header).expect("JSON"), body: body.to_vec() }
    }

    fn bytes(&self, name: &str, dtype: &str) -> &[u8] {
        let tensor = self.header.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        assert_eq!(tensor["dtype"], dtype, "{name}");
        let offset = |i: usize| tensor["data_offsets"][i].as_u64().expect("an offset") as usize;
        &self.body[offset(0)..offset(1)]
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        self.bytes(name, "F32").as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
    }

    fn f64(&self, name: &str) -> Vec<f64> {
        self.bytes(name, "F64").as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect()
    }

    fn i64(&self, name: &str) -> Vec<i64> {
        self.bytes(name, "I64").as_chunks().0.iter().map(|&b| i64::from_le_bytes(b)).collect()
    }
}

#[test]
fn golden_units_tables() {
    let golden = Golden::load();
    let e4m3 = golden.f32("tables.e4m3");
    assert_eq!(e4m3.len(), 256);
    for (code, (&got, &want)) in E4M3.iter().zip(&e4m3).enumerate() {
        assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "e4m3 code {code}: {got} {want}");
    }
    same_bits(&E2M1[..8], &golden.f32("tables.e2m1")).expect("e2m1");
    let e8m0: Vec<f32> = (0..255).map(e8m0_to_f32).collect();
    same_bits(&e8m0, &golden.f32("tables.e8m0")).expect("e8m0");
    assert!(e8m0_to_f32(255).is_nan());
}

#[test]
fn golden_units_quant() {
    let golden = Golden::load();
    type Round = fn(&mut [f32], usize);
    for (name, round, group) in
        [("quant.fp8_g64", fake_fp8 as Round, 64), ("quant.fp8_g128", fake_fp8, 128), ("quant.fp4_g32", fake_fp4, 32)]
    {
        let mut x = golden.f32("quant.x");
        round(&mut x, group);
        same_bits(&x, &golden.f32(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn golden_units_hadamard() {
    let golden = Golden::load();
    let mut x = golden.f32("hadamard.x");
    x.chunks_mut(128).for_each(hadamard);
    within(&x, &golden.f32("hadamard.y"), |_| 1e-6).expect("hadamard");
}

/// Also at position 1,000,000, where an angle in `f32` would be wrong in the second digit.
#[test]
fn golden_units_rope() {
    let golden = Golden::load();
    let (freqs, positions) = (golden.f64("rope.inv_freq_compress"), golden.i64("rope.pos"));
    assert_eq!(positions.last(), Some(&1_000_000));
    for (name, inverse) in [("rope.y", false), ("rope.y_inverse", true)] {
        let want = golden.f32(name);
        for ctx in serial_contexts() {
            let mut x = golden.f32("rope.x");
            rope(ctx, &mut x, 2, &positions, &freqs, inverse);
            within(&x, &want, |_| 6e-7).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        let mut x = golden.f32("rope.x");
        for (row, head) in x.chunks_mut(128).enumerate() {
            rope_row(head, positions[row / 2], &freqs, inverse);
        }
        within(&x, &want, |_| 6e-7).unwrap_or_else(|e| panic!("{name} by row: {e}"));
    }
}

#[test]
fn golden_units_sinkhorn() {
    let golden = Golden::load();
    let mut x = golden.f32("sinkhorn.logits");
    x.chunks_mut(16).for_each(|comb| sinkhorn(comb, 4, 20, 1e-6));
    within(&x, &golden.f32("sinkhorn.comb"), |_| 5e-7).expect("sinkhorn");
}
