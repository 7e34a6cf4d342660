//! Matrix products and experts against the reference.

use proptest::prelude::*;
use troika_base::{Format, StoredTensor};
use troika_kernels::{
    CpuLevel, Ctx, ExpertWeights, Serial, grouped_matmul, matmul, reference, routed_experts, shared_expert, to_f32,
};

use crate::support::{EPS, Noise, fit_cols, formats, roundings, tensor, within};

/// `(256 + K/256) · ε · Σ|x·w|` for output `i` of a product with `groups` groups.
fn bound(level: CpuLevel, x: &[f32], w: &StoredTensor, groups: usize) -> impl Fn(usize) -> f64 {
    let (n, k) = (w.rows(), w.cols());
    let weights = to_f32(w);
    let factor = (256.0f64.min(k as f64) + k as f64 / 256.0 + 1.0) * EPS * roundings(level);
    let x = x.to_vec();
    move |i| {
        let (t, row) = (i / n, i % n);
        let x = &x[t * groups * k + row / (n / groups) * k..][..k];
        let sum: f64 = x.iter().zip(&weights[row * k..]).map(|(x, w)| f64::from((x * w).abs())).sum();
        sum * factor
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn matmul_matches_reference(t in 1usize..20, n in 1usize..150, k in 1usize..600, seed: u64) {
        let mut noise = Noise::new(seed);
        for format in formats() {
            let w = tensor(&mut noise, format, n, fit_cols(format, k));
            let x = noise.numbers(t * w.cols());
            let mut want = vec![0.0; t * n];
            reference::matmul(&x, &w, &mut want);
            for level in CpuLevel::available() {
                let mut got = vec![f32::NAN; t * n];
                matmul(Ctx { level, par: &Serial }, &x, &w, &mut got);
                within(&got, &want, bound(level, &x, &w, 1))
                    .map_err(|e| TestCaseError::fail(format!("{level:?} {format}: {e}")))?;
            }
        }
    }

    #[test]
    fn grouped_matmul_matches_reference(t in 1usize..15, groups in 1usize..5, r in 1usize..40, k in 1usize..300, seed: u64) {
        let mut noise = Noise::new(seed);
        let w = tensor(&mut noise, Format::Bf16, groups * r, k);
        let x = noise.numbers(t * groups * k);
        let mut want = vec![0.0; t * groups * r];
        reference::grouped_matmul(&x, groups, &w, &mut want);
        for level in CpuLevel::available() {
            let mut got = vec![f32::NAN; want.len()];
            grouped_matmul(Ctx { level, par: &Serial }, &x, groups, &w, &mut got);
            within(&got, &want, bound(level, &x, &w, groups)).map_err(TestCaseError::fail)?;
        }
    }

    #[test]
    fn experts_match_reference(t in 1usize..12, count in 1usize..6, top_k in 1usize..4, limited: bool, seed: u64) {
        let mut noise = Noise::new(seed);
        let (dim, inner) = (32 + 32 * noise.below(5), 32 + 32 * noise.below(5));
        let limit = limited.then_some(1.0);
        let weights: Vec<[StoredTensor; 3]> = (0..count)
            .map(|_| [(inner, dim), (dim, inner), (inner, dim)].map(|(n, k)| tensor(&mut noise, Format::Mxfp4, n, k)))
            .collect();
        let experts: Vec<ExpertWeights> = weights.iter().map(|[w1, w2, w3]| ExpertWeights { w1, w2, w3 }).collect();
        let x: Vec<f32> = noise.numbers(t * dim);
        // Ids outside of the range 3..3 + count belong to another call.
        let ids: Vec<i32> = (0..t * top_k).map(|_| noise.below(count + 6) as i32).collect();
        let shares: Vec<f32> = noise.numbers(t * top_k);
        let start = noise.numbers(t * dim);
        let mut want = start.clone();
        reference::routed_experts(&x, &ids, &shares, top_k, 3, &experts, limit, &mut want);
        let mut want_one = vec![0.0; t * dim];
        reference::shared_expert(&x, &experts[0], limit, &mut want_one);
        // Three products deep, errors are compared with the largest result.
        let size = |x: &[f32]| x.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
        for level in CpuLevel::available() {
            let ctx = Ctx { level, par: &Serial };
            let mut got = start.clone();
            routed_experts(ctx, &x, &ids, &shares, top_k, 3, &experts, limit, &mut got);
            within(&got, &want, |_| 4e-6 * (1.0 + size(&want))).map_err(TestCaseError::fail)?;
            let mut got = vec![f32::NAN; t * dim];
            shared_expert(ctx, &x, &experts[0], limit, &mut got);
            within(&got, &want_one, |_| 4e-6 * (1.0 + size(&want_one))).map_err(TestCaseError::fail)?;
        }
    }
}

#[test]
fn nothing_to_multiply() {
    let mut noise = Noise::new(1);
    let w = tensor(&mut noise, Format::Bf16, 5, 7);
    matmul(Ctx::serial(), &[], &w, &mut []);
    grouped_matmul(Ctx::serial(), &[], 5, &w, &mut []);
    let narrow = tensor(&mut noise, Format::Bf16, 5, 0);
    let mut out = [f32::NAN; 5];
    matmul(Ctx::serial(), &[], &narrow, &mut out);
    assert_eq!(out, [0.0; 5], "a sum of nothing");
}

#[test]
fn infinities_and_nan_stay_in_their_row() {
    let mut noise = Noise::new(2);
    let w = tensor(&mut noise, Format::Bf16, 20, 300);
    let mut x = noise.numbers(8 * 300);
    x[3 * 300 + 7] = f32::NAN;
    x[5 * 300] = f32::INFINITY;
    for level in CpuLevel::available() {
        let mut out = vec![0.0; 8 * 20];
        matmul(Ctx { level, par: &Serial }, &x, &w, &mut out);
        for (t, row) in out.chunks(20).enumerate() {
            match t {
                3 => assert!(row.iter().all(|x| x.is_nan())),
                5 => assert!(row.iter().all(|x| !x.is_finite())),
                _ => assert!(row.iter().all(|x| x.is_finite())),
            }
        }
    }
}

#[test]
#[should_panic(expected = "x must be [T, 7]")]
fn wrong_shapes_are_refused() {
    let w = tensor(&mut Noise::new(3), Format::Bf16, 5, 7);
    matmul(Ctx::serial(), &[0.0; 13], &w, &mut [0.0; 10]);
}
