//! Decoding: exact at every level.

use proptest::prelude::*;
use troika_base::storage::ScaleFormat;
use troika_base::{Format, StoredTensor};
use troika_kernels::{CpuLevel, Ctx, Serial, TableError, embed, has_nan_scale, reference, to_f32, to_i32};

use crate::support::{Noise, fit_cols, formats, same_bits, stored, tensor};

/// All numbers of `w` at a level (a table of embeddings is decoded row by row).
fn decode_at(level: CpuLevel, w: &StoredTensor) -> Vec<f32> {
    let tokens: Vec<i32> = (0..w.rows() as i32).collect();
    let mut out = vec![0.0; w.rows() * w.cols()];
    embed(Ctx { level, par: &Serial }, w, &tokens, 1, &mut out);
    out
}

fn check(w: &StoredTensor) -> Result<(), String> {
    let all = (0..w.rows()).flat_map(|r| (0..w.cols()).map(move |c| (r, c)));
    let want: Vec<f32> = all.map(|(r, c)| reference::decode(w, r, c)).collect();
    // NaN of any payload counts as NaN.
    let plain = |x: Vec<f32>| x.into_iter().map(|x| if x.is_nan() { f32::NAN } else { x }).collect::<Vec<_>>();
    let want = plain(want);
    same_bits(&plain(to_f32(w)), &want)?;
    for level in CpuLevel::available() {
        same_bits(&plain(decode_at(level, w)), &want).map_err(|e| format!("{level:?} {}: {e}", w.format()))?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn decoding_is_exact(rows in 1usize..140, cols in 1usize..300, seed: u64) {
        let mut noise = Noise::new(seed);
        for format in formats() {
            let w = tensor(&mut noise, format, rows, fit_cols(format, cols));
            check(&w).map_err(TestCaseError::fail)?;
        }
    }

    /// Any bytes at all: NaN and extreme scales, subnormals, infinities.
    #[test]
    fn decoding_of_any_bytes_is_exact(rows in 1usize..4, cols in 1usize..260, seed: u64) {
        let mut noise = Noise::new(seed);
        for format in formats() {
            let cols = fit_cols(format, cols);
            let parts = format.byte_lengths(rows, cols).expect("fits").map(|n| noise.bytes(n));
            check(&stored(format, rows, cols, parts)).map_err(TestCaseError::fail)?;
        }
    }
}

#[test]
fn every_code_at_every_scale() {
    for scale in 0..=255u8 {
        let fp8 = stored(Format::Mxfp8, 8, 32, [(0..=255).collect(), vec![scale; 8], vec![]]);
        check(&fp8).expect("mxfp8");
        let fp4 = stored(Format::Mxfp4, 16, 32, [(0..=255).collect(), vec![scale; 16], vec![]]);
        check(&fp4).expect("mxfp4");
    }
    let halves = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    check(&stored(Format::F16, 256, 256, [halves, vec![], vec![]])).expect("f16");
}

#[test]
fn integer_tables() {
    let table = |values: &[i64]| {
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        stored(Format::I64, 1, values.len(), [data, vec![], vec![]])
    };
    assert_eq!(to_i32(&table(&[0, -1, 255, i64::from(i32::MAX)])), Ok(vec![0, -1, 255, i32::MAX]));
    let large = i64::from(i32::MAX) + 1;
    assert_eq!(to_i32(&table(&[3, large])), Err(TableError::OutOfRange { index: 1, value: large }));
    let short = stored(Format::I32, 1, 2, [[7i32, -8].iter().flat_map(|v| v.to_le_bytes()).collect(), vec![], vec![]]);
    assert_eq!(to_i32(&short), Ok(vec![7, -8]));
    assert!(to_i32(&stored(Format::Bf16, 1, 1, [vec![0; 2], vec![], vec![]])).is_err());
}

#[test]
fn bad_scales_are_found() {
    let mxfp4 = |scales: Vec<u8>| stored(Format::Mxfp4, 2, 64, [vec![0; 64], scales, vec![]]);
    assert_eq!(has_nan_scale(&mxfp4(vec![0, 1, 254, 127])), None);
    assert_eq!(has_nan_scale(&mxfp4(vec![0, 1, 255, 255])), Some(2));
    let affine = |scale: [f32; 2], bias: [f32; 2]| {
        let bytes = |x: [f32; 2]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        let format = Format::Affine { bits: 4, group: 32, scale: ScaleFormat::F32 };
        stored(format, 1, 64, [vec![0; 32], bytes(scale), bytes(bias)])
    };
    assert_eq!(has_nan_scale(&affine([1.0, 2.0], [0.0, -1.0])), None);
    assert_eq!(has_nan_scale(&affine([1.0, f32::INFINITY], [0.0, 0.0])), Some(1));
    assert_eq!(has_nan_scale(&affine([1.0, f32::INFINITY], [f32::NAN, 0.0])), Some(0));
}
