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

/// For each output of `expert(x)` how far it may be off (the bounds of the three products and of the activation,
/// carried through), and the sum of the magnitudes of its terms.
fn expert_bound(level: CpuLevel, x: &[f32], w: &ExpertWeights, limit: Option<f32>) -> Vec<(f64, f64)> {
    let (dim, inner) = (w.w1.cols(), w.w1.rows());
    let limit = f64::from(limit.unwrap_or(f32::INFINITY));
    let [gates, ups, downs] = [w.w1, w.w3, w.w2].map(to_f32);
    let chain = |k: usize| (256.0f64.min(k as f64) + k as f64 / 256.0 + 1.0) * EPS * roundings(level);
    let products = |w: &[f32]| {
        let terms = || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
        (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>() * chain(dim))
    };
    let hidden: Vec<(f64, f64)> = (0..inner)
        .map(|i| {
            let (g, g_error) = products(&gates[i * dim..(i + 1) * dim]);
            let (u, u_error) = products(&ups[i * dim..(i + 1) * dim]);
            let (g, u) = (g.min(limit), u.clamp(-limit, limit));
            let silu = g / (1.0 + (-g).exp());
            // The slope of silu is at most 1.1.
            let error = 1.1 * g_error * u.abs() + silu.abs() * u_error + 1.1 * g_error * u_error;
            (silu * u, error + 10.0 * EPS * (silu * u).abs())
        })
        .collect();
    let sum = |w: &[f32]| {
        let terms = || hidden.iter().zip(w).map(|((h, error), w)| (f64::from(w.abs()), h.abs(), *error));
        let size: f64 = terms().map(|(w, h, error)| w * (h + error)).sum();
        (terms().map(|(w, _, error)| w * error).sum::<f64>() + size * chain(inner), size)
    };
    downs.chunks(inner).map(sum).collect()
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
    fn grouped_matmul_matches_reference(
        t in 1usize..15,
        groups in 1usize..5,
        r in 1usize..40,
        k in 1usize..300,
        seed: u64,
    ) {
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
        for level in CpuLevel::available() {
            let ctx = Ctx { level, par: &Serial };
            let bounds = |e: usize, t: usize| expert_bound(level, &x[t * dim..(t + 1) * dim], &experts[e], limit);
            let mut got = start.clone();
            routed_experts(ctx, &x, &ids, &shares, top_k, 3, &experts, limit, &mut got);
            let mut errors = vec![0.0; t * dim];
            let mut sizes: Vec<f64> = start.iter().map(|x| f64::from(x.abs())).collect();
            for (i, &id) in ids.iter().enumerate().filter(|&(_, &id)| (3..3 + count as i32).contains(&id)) {
                let (t, share) = (i / top_k, f64::from(shares[i].abs()));
                for (c, (error, size)) in bounds(id as usize - 3, t).into_iter().enumerate() {
                    errors[t * dim + c] += share * error;
                    sizes[t * dim + c] += share * size;
                }
            }
            // Each addition, here and in the reference, rounds a partial sum.
            let routed: Vec<f64> =
                errors.iter().zip(sizes).map(|(error, size)| error + 2.0 * (top_k + 1) as f64 * EPS * size).collect();
            within(&got, &want, |i| routed[i]).map_err(TestCaseError::fail)?;
            let mut got = vec![f32::NAN; t * dim];
            shared_expert(ctx, &x, &experts[0], limit, &mut got);
            let shared: Vec<f64> = (0..t).flat_map(|t| bounds(0, t)).map(|(error, _)| error).collect();
            within(&got, &want_one, |i| shared[i]).map_err(TestCaseError::fail)?;
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
