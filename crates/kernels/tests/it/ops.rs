//! The other operations against their reference loops.

use proptest::prelude::*;
use troika_base::Format;
use troika_kernels::{
    CpuLevel, Ctx, Far, HcParams, Index, Keys, RouteParams, RowList, Rows, Scoring, Seen, Visible, add, argmax, attend,
    attend_rounded, embed, fake_fp4, fake_fp8, hadamard, hc_head, hc_mix, hc_post, hc_pre, index_scores, index_topk,
    pool, reference, rms_norm, rms_norm_in_place, rope, rope_row, route, route_with_scores, stream_mean, swiglu, top_k,
};

use crate::support::{
    EPS, Noise, Threads, key_codes, roundings, row_codes, same_bits, serial_contexts, tensor, within,
};

fn fail(level: CpuLevel) -> impl Fn(String) -> TestCaseError {
    move |e| TestCaseError::fail(format!("{level:?}: {e}"))
}

/// Numbers of very different sizes.
fn wild(noise: &mut Noise, n: usize) -> Vec<f32> {
    (0..n).map(|_| noise.number() * 2.0f32.powi(noise.below(24) as i32 - 12)).collect()
}

/// `Σ|a·b|`
fn absolute_dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from((a * b).abs())).sum()
}

/// How far a product may be off if the query is rounded to 4095 steps and the row to 2047, chain by chain.
fn score_rounding(q: &[f32], row: &[f32]) -> f64 {
    let largest = |x: &[f32]| x.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
    let sum = |x: &[f32]| x.iter().map(|x| f64::from(x.abs())).sum::<f64>();
    let chain = |(q, row): (&[f32], &[f32])| {
        let (q_step, row_step) = (largest(q) / 8190.0, largest(row) / 4094.0);
        (sum(q) * row_step + sum(row) * q_step + q.len() as f64 * q_step * row_step) * (1.0 + 1e-6)
    };
    q.chunks(256).zip(row.chunks(256)).map(chain).sum()
}

/// Parameters of a hyper-connection with `outputs` outputs.
struct Hc {
    fn_: Vec<f32>,
    base: Vec<f32>,
    scale: Vec<f32>,
}

impl Hc {
    fn new(noise: &mut Noise, streams: usize, dim: usize, outputs: usize, scales: usize) -> Self {
        let small = 1.0 / ((streams * dim) as f32).sqrt();
        Self {
            fn_: noise.numbers(outputs * streams * dim).iter().map(|x| x * small).collect(),
            base: noise.numbers(outputs),
            scale: noise.numbers(scales),
        }
    }

    /// `1e-6 · (1 + max(Σ|rms(x)·fn|·|scale| + |base|))`: how far coefficients may be off, for tokens `x`.
    fn bound(&self, x: &[f32], width: usize) -> f64 {
        let scale = self.scale.iter().fold(0.0f32, |max, s| max.max(s.abs()));
        let mut size = 0.0f64;
        for x in x.chunks(width) {
            let rms = (x.iter().map(|x| x * x).sum::<f32>() / width as f32).sqrt();
            for (fn_, base) in self.fn_.chunks(width).zip(&self.base) {
                let sum: f32 = x.iter().zip(fn_).map(|(x, w)| (x * w).abs()).sum();
                size = size.max(f64::from(sum / rms * scale + base.abs()));
            }
        }
        1e-6 * (1.0 + size)
    }

    fn params(&self, streams: usize, dim: usize) -> HcParams<'_> {
        let Self { fn_, base, scale } = self;
        HcParams { streams, dim, sinkhorn_iters: 20, hc_eps: 1e-6, norm_eps: 1e-6, fn_, base, scale }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn norm_matches_reference(t in 0usize..6, dim in 1usize..400, weighted: bool, seed: u64) {
        let mut noise = Noise::new(seed);
        let (x, weight) = (wild(&mut noise, t * dim), noise.numbers(dim));
        let weight = weighted.then_some(&weight[..]);
        let mut want = vec![0.0; t * dim];
        reference::rms_norm(&x, dim, weight, 1e-6, &mut want);
        for ctx in serial_contexts() {
            let mut got = vec![f32::NAN; t * dim];
            rms_norm(ctx, &x, dim, weight, 1e-6, &mut got);
            let steps = dim as f64 / 32.0 + 16.0;
            within(&got, &want, |i| steps * EPS * f64::from(want[i].abs())).map_err(fail(ctx.level))?;
            let mut in_place = x.clone();
            rms_norm_in_place(ctx, &mut in_place, dim, weight, 1e-6);
            same_bits(&in_place, &got).map_err(fail(ctx.level))?;
        }
    }

    #[test]
    fn hyper_connections_match_reference(t in 0usize..5, s in 1usize..9, dim in 1usize..150, seed: u64) {
        let mut noise = Noise::new(seed);
        let outputs = (2 + s) * s;
        let hc = Hc::new(&mut noise, s, dim, outputs, 3);
        let p = hc.params(s, dim);
        let (x, y) = (noise.numbers(t * s * dim), noise.numbers(t * dim));
        let (mut want_in, mut want_mix) = (vec![0.0; t * dim], vec![0.0; t * (s + s * s)]);
        reference::hc_pre(&p, &x, &mut want_in, &mut want_mix);
        let mut want_pre = vec![0.0; t * s];
        reference::hc_mix(&p, &x, &mut want_pre, &mut vec![0.0; t * (s + s * s)]);
        let bound = hc.bound(&x, s * dim);
        // Σ_s |x[s]| of the largest channel, at most.
        let sizes = s as f64 * x.iter().fold(1.0f64, |max, x| max.max(f64::from(x.abs())));
        for ctx in serial_contexts() {
            let (mut collapsed, mut mix) = (vec![f32::NAN; t * dim], vec![f32::NAN; t * (s + s * s)]);
            hc_pre(ctx, &p, &x, &mut collapsed, &mut mix);
            within(&mix, &want_mix, |_| bound).map_err(fail(ctx.level))?;
            within(&collapsed, &want_in, |_| bound * sizes).map_err(fail(ctx.level))?;
            let (mut pre, mut mix2) = (vec![f32::NAN; t * s], vec![f32::NAN; t * (s + s * s)]);
            hc_mix(ctx, &p, &x, &mut pre, &mut mix2);
            same_bits(&mix, &mix2).map_err(fail(ctx.level))?;
            within(&pre, &want_pre, |_| bound).map_err(fail(ctx.level))?;

            let (mut got, mut want) = (x.clone(), x.clone());
            hc_post(ctx, s, dim, &y, &mix, &mut got);
            reference::hc_post(s, dim, &y, &mix, &mut want);
            let size = |i: usize| {
                let (t, c) = (i / (s * dim), i % dim);
                let terms = (0..s).map(|j| f64::from(x[(t * s + j) * dim + c].abs())).sum::<f64>();
                terms + 2.0 * f64::from(y[t * dim + c].abs())
            };
            within(&got, &want, |i| (s + 2) as f64 * EPS * roundings(ctx.level) * size(i)).map_err(fail(ctx.level))?;
        }
    }

    #[test]
    fn heads_of_streams_match_reference(t in 0usize..5, s in 1usize..9, dim in 1usize..150, seed: u64) {
        let mut noise = Noise::new(seed);
        let hc = Hc::new(&mut noise, s, dim, s, 1);
        let p = hc.params(s, dim);
        let x = noise.numbers(t * s * dim);
        let (mut want, mut want_mean) = (vec![0.0; t * dim], vec![0.0; t * dim]);
        reference::hc_head(&p, &x, &mut want);
        reference::stream_mean(s, dim, &x, &mut want_mean);
        let bound = hc.bound(&x, s * dim);
        let sizes = s as f64 * x.iter().fold(1.0f64, |max, x| max.max(f64::from(x.abs())));
        for ctx in serial_contexts() {
            let (mut got, mut mean) = (vec![f32::NAN; t * dim], vec![f32::NAN; t * dim]);
            hc_head(ctx, &p, &x, &mut got);
            within(&got, &want, |_| bound * sizes).map_err(fail(ctx.level))?;
            stream_mean(ctx, s, dim, &x, &mut mean);
            within(&mean, &want_mean, |_| s as f64 * EPS * 4.0).map_err(fail(ctx.level))?;
        }
    }

    #[test]
    fn rope_matches_reference(
        t in 0usize..5,
        heads in 1usize..4,
        pairs in 0usize..33,
        extra in 1usize..40,
        inverse: bool,
        seed: u64,
    ) {
        let mut noise = Noise::new(seed);
        let d = 2 * pairs + extra;
        let x = noise.numbers(t * heads * d);
        let positions: Vec<i64> = (0..t).map(|_| noise.below(1 << 20) as i64).collect();
        let freqs: Vec<f64> = (0..pairs).map(|j| 10000f64.powf(-(j as f64) / 32.0)).collect();
        let mut want = x.clone();
        for (row, head) in want.chunks_mut(d).enumerate() {
            reference::rope_row(head, positions[row / heads], &freqs, inverse);
        }
        // The channel and both of its neighbours, one of which is its partner.
        let around = |i: usize| &x[i.saturating_sub(1)..(i + 2).min(x.len())];
        let size = |i: usize| around(i).iter().map(|x| f64::from(x.abs())).sum::<f64>();
        let mut rows = x.clone();
        for (row, head) in rows.chunks_mut(d).enumerate() {
            rope_row(head, positions[row / heads], &freqs, inverse);
        }
        for ctx in serial_contexts() {
            let mut got = x.clone();
            rope(ctx, &mut got, heads, &positions, &freqs, inverse);
            within(&got, &want, |i| 3.0 * EPS * size(i)).map_err(fail(ctx.level))?;
            same_bits(&got, &rows).map_err(fail(ctx.level))?;
        }
    }

    #[test]
    fn pool_matches_reference(n in 1usize..130, d in 1usize..150, seed: u64) {
        let mut noise = Noise::new(seed);
        let kv = noise.numbers(n * d);
        let gate: Vec<f32> = noise.numbers(n * d).iter().map(|x| x * 8.0).collect();
        let entries: Vec<(&[f32], &[f32])> = kv.chunks(d).zip(gate.chunks(d)).collect();
        let mut want = vec![0.0; d];
        reference::pool(&entries, &mut want);
        for level in CpuLevel::available() {
            let mut got = vec![f32::NAN; d];
            pool(level, &entries, &mut got);
            // Gates up to 30: the difference to the maximum is rounded before the exponential.
            within(&got, &want, |_| (n + 64) as f64 * EPS * 4.0).map_err(fail(level))?;
        }
    }

    #[test]
    fn index_scores_match_reference(n in 0usize..150, heads in 1usize..40, d in 1usize..300, seed: u64) {
        let mut noise = Noise::new(seed);
        let (iq, iw, keys) = (noise.numbers(heads * d), noise.numbers(heads), noise.numbers(n * d));
        let cut = noise.below(n + 1) * d;
        let pieces = [&keys[..cut], &keys[cut..]];
        let rows: Vec<&[f32]> = keys.chunks(d).collect();
        let mut want = vec![0.0; n];
        reference::index_scores(&iq, &iw, &rows, &mut want);
        let size = |w: usize| -> f64 {
            iq.chunks(d).zip(&iw).map(|(q, iw)| f64::from(iw.abs()) * absolute_dot(q, rows[w])).sum()
        };
        let index = Index { heads, top_k: 1, scale: 0.5, keys: Keys::Plain(RowList::new(d, &pieces)) };
        // Rounded to eight bits: each number is off by at most 1/253 of the largest.
        let largest = |x: &[f32]| x.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs()))) / 253.0;
        let sum = |x: &[f32]| x.iter().map(|x| f64::from(x.abs())).sum::<f64>();
        let rounding = |w: usize| -> f64 {
            let key = rows[w];
            let one = |q: &[f32]| sum(q) * largest(key) + sum(key) * largest(q) + d as f64 * largest(key) * largest(q);
            iq.chunks(d).zip(&iw).map(|(q, iw)| f64::from(iw.abs()) * one(q)).sum()
        };
        let mut fused = None;
        for level in CpuLevel::available() {
            let scores = |index: &Index| {
                let mut got = vec![f32::NAN; n];
                index_scores(level, index, &iq, &iw, &mut got);
                got.iter_mut().for_each(|score| *score *= 2.0);
                got
            };
            let steps = d.min(256) as f64 + d as f64 / 256.0 + heads as f64 / 8.0 + 8.0;
            within(&scores(&index), &want, |w| steps * EPS * roundings(level) * size(w)).map_err(fail(level))?;
            let codes = key_codes(Ctx { level, par: &Threads(2) }, d, &keys);
            let got = scores(&Index { keys: Keys::Rounded(codes.keys()), ..index });
            let chain = (heads as f64 + 4.0) * EPS * roundings(level);
            within(&got, &want, |w| rounding(w) + chain * (size(w) + rounding(w))).map_err(fail(level))?;
            if level != CpuLevel::Scalar {
                same_bits(&got, fused.get_or_insert_with(|| got.clone())).map_err(fail(level))?;
            }
        }
    }

    /// Queries in tiles and keys in spans choose what each query chooses alone, from its scores of all keys.
    #[test]
    fn index_topk_chooses_by_scores(t in 1usize..14, n in 0usize..1400, k in 1usize..600, heads in 1usize..20, rounded: bool, seed: u64) {
        let mut noise = Noise::new(seed);
        let d = 8;
        let (iq, iw, keys) = (noise.numbers(t * heads * d), noise.numbers(t * heads), noise.numbers(n * d));
        let seen: Vec<usize> = (0..t).map(|_| noise.below(n + 1)).collect();
        let pieces = [&keys[..]];
        for level in CpuLevel::available() {
            let codes = key_codes(Ctx { level, par: &Threads(1) }, d, &keys);
            let keys = if rounded { Keys::Rounded(codes.keys()) } else { Keys::Plain(RowList::new(d, &pieces)) };
            let index = Index { heads, top_k: k, scale: 0.25, keys };
            let mut want = vec![0; t * k];
            for (i, ids) in want.chunks_mut(k).enumerate() {
                let mut scores = vec![f32::NAN; seen[i]];
                let (iq, iw) = (&iq[i * heads * d..(i + 1) * heads * d], &iw[i * heads..(i + 1) * heads]);
                index_scores(level, &index, iq, iw, &mut scores);
                top_k(&scores, ids);
            }
            for threads in [1, 2, 16] {
                let mut got = vec![7; t * k];
                let ctx = Ctx { level, par: &Threads(threads) };
                index_topk(ctx, &index, &iq, &iw, |i| seen[i], &mut got);
                prop_assert_eq!(&got, &want, "{:?} on {} threads", level, threads);
            }
        }
    }

    #[test]
    fn top_k_matches_a_stable_sort(
        n in prop_oneof![0usize..200, 200usize..3000],
        k in prop_oneof![0usize..60, 60usize..600],
        sorted in 0usize..3,
        seed: u64,
    ) {
        let mut noise = Noise::new(seed);
        // Few different values, so that ties are common; some NaN, both zeros. In order they mislead who takes a sample.
        let mut scores: Vec<f32> = (0..n)
            .map(|_| match noise.below(12) {
                0 => f32::NAN,
                1 => -0.0,
                2 => f32::NEG_INFINITY,
                i => i as f32 - 5.0,
            })
            .collect();
        match sorted {
            0 => {}
            1 => scores.sort_by(f32::total_cmp),
            _ => scores.iter_mut().enumerate().for_each(|(i, score)| *score = if i % 16 < 2 { *score } else { -9.0 }),
        }
        let mut got = vec![7; k];
        top_k(&scores, &mut got);
        let (chosen, missing) = got.split_at(k.min(n));
        prop_assert!(missing.iter().all(|&id| id == -1));
        prop_assert!(chosen.is_sorted_by(|a, b| a < b));
        // NaN loses even against negative infinity; the reference treats the two alike.
        if scores.iter().filter(|x| !x.is_nan() && **x > f32::NEG_INFINITY).count() >= k {
            prop_assert_eq!(chosen, &reference::top_k(&scores, k));
        }
    }

    /// Windows at the start, in the middle and at the end of what is kept, no compressed rows, all of them or some.
    #[test]
    fn attention_matches_reference(
        t in 1usize..7,
        near in 0usize..200,
        far in prop_oneof![1 => Just(0usize), 3 => 1usize..400],
        chosen: bool,
        heads in 1usize..40,
        d in prop_oneof![3 => 1usize..90, 1 => 250usize..530],
        seed: u64,
    ) {
        let mut noise = Noise::new(seed);
        let (window, keys, sink) = (noise.numbers((near + t) * d), noise.numbers(far * d), noise.numbers(heads));
        let q: Vec<f32> = noise.numbers(t * heads * d).iter().map(|x| x * 2.0).collect();
        let ids: Vec<Vec<i32>> = (0..t)
            .map(|_| {
                let keep = 1 + noise.below(4);
                let mut ids: Vec<i32> = (0..far as i32).filter(|_| noise.below(keep) == 0).collect();
                ids.extend([-1, 3]);
                ids
            })
            .collect();
        let cut = noise.below(far + 1) * d;
        let pieces = [&keys[..cut], &keys[cut..]];
        let visible = |i: usize| Visible {
            near: &window[i * d..(i + near) * d],
            far: RowList::new(d, &pieces).first(if chosen { far } else { far * (i + 1) / t }),
            chosen: chosen.then(|| &ids[i][..]),
        };
        let (mut want, mut bound, mut rounding) = (vec![0.0; t * heads * d], Vec::new(), Vec::new());
        for (i, want) in want.chunks_mut(heads * d).enumerate() {
            let mut rows: Vec<&[f32]> = window[i * d..(i + near) * d].chunks(d).collect();
            let all: Vec<&[f32]> = keys.chunks(d).collect();
            match chosen {
                true => rows.extend(ids[i][..ids[i].len() - 2].iter().map(|&id| all[id as usize])),
                false => rows.extend(&all[..far * (i + 1) / t]),
            }
            let q = &q[i * heads * d..(i + 1) * heads * d];
            reference::attend_row(q, heads, &rows, &sink, want);
            let largest = rows.iter().flat_map(|row| *row).fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
            let scores = q.chunks(d).flat_map(|q| rows.iter().map(move |row| absolute_dot(q, row)));
            let score = scores.fold(0.0, f64::max) / (d as f64).sqrt();
            let n = rows.len() as f64;
            let steps = 4.0 * (n / 16.0 + d.min(256) as f64 + d as f64 / 256.0 + 68.0f64.min(n + 4.0));
            bound.push(steps * EPS * largest * (1.0 + score));
            let moved = q.chunks(d).flat_map(|q| rows.iter().map(move |row| score_rounding(q, row)));
            let moved = moved.fold(0.0, f64::max) / (d as f64).sqrt();
            rounding.push(largest * ((2.0 * moved).exp_m1() + 1.0 / 4094.0 + 60.0 / 32766.0));
        }
        let mut avx2 = None;
        for level in CpuLevel::available() {
            for threads in [1, 2, 5] {
                let mut got = vec![f32::NAN; want.len()];
                attend(Ctx { level, par: &Threads(threads) }, d, &q, &sink, visible, &mut got);
                // Wider registers are the same arithmetic.
                match level {
                    CpuLevel::Scalar => {}
                    _ => same_bits(&got, avx2.get_or_insert_with(|| got.clone())).map_err(fail(level))?,
                }
                within(&got, &want, |i| roundings(level) * bound[i / (heads * d)]).map_err(fail(level))?;
            }
        }
        let seen = |i: usize| Seen {
            near: i..i + near,
            far: if chosen { Far::Chosen(&ids[i]) } else { Far::First(far * (i + 1) / t) },
        };
        let mut bits = [None, None];
        for level in CpuLevel::available() {
            for threads in [1, 2, 5] {
                let mut got = vec![f32::NAN; want.len()];
                let par = Threads(threads);
                let ctx = Ctx { level, par: &par };
                let (near, far) = (row_codes(ctx, d, &window), row_codes(ctx, d, &keys));
                let rows = Rows { near: near.rows(0..near.len()), far: far.rows(0..far.len()) };
                attend_rounded(ctx, &q, &sink, &rows, seen, &mut got);
                let bits = &mut bits[usize::from(level == CpuLevel::Scalar)];
                same_bits(&got, bits.get_or_insert_with(|| got.clone())).map_err(fail(level))?;
                let both = |i: usize| roundings(level) * bound[i / (heads * d)] + rounding[i / (heads * d)];
                within(&got, &want, both).map_err(fail(level))?;
            }
        }
    }

    #[test]
    fn routing_matches_reference(
        t in 0usize..6,
        e in 1usize..70,
        k in 1usize..8,
        kind in 0usize..3,
        biased: bool,
        table: bool,
        normalise: bool,
        seed: u64,
    ) {
        let mut noise = Noise::new(seed);
        let k = k.min(e);
        let scoring = [Scoring::SqrtSoftplus, Scoring::Sigmoid, Scoring::Softmax][kind];
        // Coarse numbers: equal scores are common, nearly equal ones (which rounding may order either way) are not.
        let logits: Vec<f32> = noise.numbers(t * e).iter().map(|x| (x * 24.0).round() / 8.0).collect();
        let bias: Vec<f32> = noise.numbers(e).iter().map(|x| (x * 4.0).round() / 4.0).collect();
        let ids: Vec<i32> = (0..10 * k).map(|_| noise.below(e) as i32).collect();
        let tokens: Vec<i32> = (0..t).map(|_| noise.below(10) as i32).collect();
        let p = RouteParams {
            scoring,
            experts: e,
            top_k: k,
            bias: biased.then_some(&bias[..]),
            table: table.then_some(&ids[..]),
            normalise,
            scaling: 1.5,
        };
        let (mut want_ids, mut want) = (vec![0; t * k], vec![0.0; t * k]);
        reference::route(&p, &logits, &tokens, &mut want_ids, &mut want);
        for ctx in serial_contexts() {
            let (mut got_ids, mut got) = (vec![-1; t * k], vec![f32::NAN; t * k]);
            let mut scores = vec![f32::NAN; t * e];
            route_with_scores(ctx, &p, &logits, &tokens, &mut got_ids, &mut got, &mut scores);
            prop_assert_eq!(&got_ids, &want_ids);
            within(&got, &want, |i| 32.0 * EPS * f64::from(want[i])).map_err(fail(ctx.level))?;
            let (mut ids2, mut got2) = (vec![-1; t * k], vec![f32::NAN; t * k]);
            route(ctx, &p, &logits, &tokens, &mut ids2, &mut got2);
            prop_assert_eq!(&ids2, &want_ids);
            same_bits(&got2, &got).map_err(fail(ctx.level))?;
        }
    }

    #[test]
    fn swiglu_matches_reference(n in 0usize..300, limited: bool, seed: u64) {
        let mut noise = Noise::new(seed);
        let (gate, up) = (wild(&mut noise, n), wild(&mut noise, n));
        let limit = limited.then_some(2.5);
        let mut want = vec![0.0; n];
        reference::swiglu(&gate, &up, limit, &mut want);
        for ctx in serial_contexts() {
            let mut got = vec![f32::NAN; n];
            swiglu(ctx, &gate, &up, limit, &mut got);
            // e^88.8 overflows, so that results of gates below are zero.
            let bound = |i: usize| 8.0 * EPS * f64::from(want[i].abs()) + 1e-36 * f64::from(1.0 + up[i].abs());
            within(&got, &want, bound).map_err(fail(ctx.level))?;
        }
    }

    #[test]
    fn embed_and_add_are_exact(t in 0usize..6, streams in 1usize..5, dim in 1usize..100, seed: u64) {
        let mut noise = Noise::new(seed);
        let table = tensor(&mut noise, Format::Bf16, 9, dim);
        let tokens: Vec<i32> = (0..t).map(|_| noise.below(9) as i32).collect();
        let mut want = vec![0.0; t * streams * dim];
        reference::embed(&table, &tokens, streams, &mut want);
        let b = noise.numbers(want.len());
        for ctx in serial_contexts() {
            let mut got = vec![f32::NAN; want.len()];
            embed(ctx, &table, &tokens, streams, &mut got);
            same_bits(&got, &want).map_err(fail(ctx.level))?;
            add(ctx, &mut got, &b);
            let sum: Vec<f32> = want.iter().zip(&b).map(|(a, b)| a + b).collect();
            same_bits(&got, &sum).map_err(fail(ctx.level))?;
        }
    }

    #[test]
    fn rounding_matches_reference(n in 1usize..300, group in 1usize..130, seed: u64) {
        let mut noise = Noise::new(seed);
        let mut x = wild(&mut noise, n);
        // Some exact ties, zeros and groups of tiny numbers.
        x.iter_mut().filter(|_| noise.below(4) == 0).for_each(|x| *x = (*x * 4.0).round() / 4.0);
        x.iter_mut().take(group).for_each(|x| *x *= 1e-20);
        type Round = fn(&mut [f32], usize);
        let pairs: [(Round, Round); 2] = [(fake_fp8, reference::fake_fp8), (fake_fp4, reference::fake_fp4)];
        for (round, reference) in pairs {
            let (mut got, mut want) = (x.clone(), x.clone());
            round(&mut got, group);
            reference(&mut want, group);
            same_bits(&got, &want).map_err(TestCaseError::fail)?;
        }
    }

    #[test]
    fn hadamard_matches_reference_and_is_its_own_inverse(log in 0u32..9, seed: u64) {
        let x = Noise::new(seed).numbers(1 << log);
        let (mut y, mut want) = (x.clone(), x.clone());
        hadamard(&mut y);
        reference::hadamard(&mut want);
        within(&y, &want, |_| 1e-6 * f64::from(log) * 4.0).map_err(TestCaseError::fail)?;
        let energy = |x: &[f32]| x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
        prop_assert!((energy(&x) - energy(&y)).abs() <= 1e-5 * energy(&x));
        hadamard(&mut y);
        within(&y, &x, |_| 2e-6 * energy(&x).sqrt()).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn argmax_takes_the_first_of_the_largest() {
    assert_eq!(argmax(&[1.0, 3.0, f32::NAN, 3.0]), 1);
    assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), 1);
    assert_eq!(argmax(&[f32::NAN]), 0);
    assert_eq!(argmax(&[-0.0, 0.0]), 0);
    assert_eq!(argmax(&[]), 0);
}

#[test]
fn swiglu_of_specials() {
    for ctx in serial_contexts() {
        let gate = [f32::NEG_INFINITY, -100.0, f32::INFINITY, f32::NAN, 1e30, 0.0];
        let mut out = [f32::NAN; 6];
        swiglu(ctx, &gate, &[1.0, 1.0, 100.0, 1.0, -100.0, f32::NAN], Some(10.0), &mut out);
        assert!(out[0].is_nan() || out[0] == 0.0, "minus infinity over infinity, or rounded to zero");
        assert!(out[1].abs() < 1e-40);
        assert!((out[2] - 99.9955).abs() < 1e-3 && (out[4] + 99.9955).abs() < 1e-3, "both are clamped");
        assert!(out[3].is_nan() && out[5].is_nan(), "NaN is not clamped away");
    }
}

#[test]
#[should_panic(expected = "not in a vocabulary")]
fn unknown_tokens_are_refused() {
    let table = tensor(&mut Noise::new(1), Format::Bf16, 4, 8);
    embed(serial_contexts().next().expect("a level"), &table, &[4], 1, &mut [0.0; 8]);
}
