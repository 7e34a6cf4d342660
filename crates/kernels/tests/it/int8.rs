//! Integer products against plain loops, and their row contract.

use std::ops::Range;

use proptest::prelude::*;
use troika_base::{Format, StoredTensor};
use troika_kernels::int8::{Int8Expert, Int8Matrix, Product, grouped_matmul, matmul, routed_experts, shared_expert};
use troika_kernels::{CpuLevel, Ctx, Serial, reference, to_f32};

use crate::support::{EPS, Noise, Threads, fit_cols, formats, roundings, same_bits, stored, tensor, within};

fn matrix(w: &StoredTensor) -> Int8Matrix {
    Int8Matrix::refer(w).unwrap_or_else(|| Int8Matrix::pack(Ctx::serial(), w))
}

/// The numbers that the products use, as a tensor for the reference loops.
fn rounded(w: &Int8Matrix) -> StoredTensor {
    let bytes = w.to_f32().iter().flat_map(|x| x.to_le_bytes()).collect();
    stored(Format::F32, w.rows(), w.cols(), [bytes, Vec::new(), Vec::new()])
}

/// `Σ|x·w|` of every output of a product with `groups` groups.
fn magnitudes(x: &[f32], w: &StoredTensor, groups: usize) -> Vec<f64> {
    let (n, k) = (w.rows(), w.cols());
    let weights = to_f32(w);
    let output = |i: usize| -> f64 {
        let (t, row) = (i / n, i % n);
        let x = &x[t * groups * k + row / (n / groups) * k..][..k];
        x.iter().zip(&weights[row * k..]).map(|(x, w)| f64::from((x * w).abs())).sum()
    };
    (0..x.len() / (groups * k) * n).map(output).collect()
}

fn chain(level: CpuLevel, k: usize) -> f64 {
    (k as f64 / 32.0 + 4.0) * EPS * roundings(level)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Weights are off by at most half a step, and those that are integers already by nothing. Who packs does not matter.
    #[test]
    fn packing_rounds_to_half_a_step(n in 1usize..40, k in 1usize..200, seed: u64) {
        let mut noise = Noise::new(seed);
        for format in formats() {
            let w = tensor(&mut noise, format, n, fit_cols(format, k));
            let (want, got) = (to_f32(&w), matrix(&w).to_f32());
            for level in CpuLevel::available() {
                let by_three = Int8Matrix::pack(Ctx { level, par: &Threads(3) }, &w).to_f32();
                let alone = Int8Matrix::pack(Ctx::serial(), &w).to_f32();
                same_bits(&by_three, &alone).map_err(|e| TestCaseError::fail(format!("{format}, {level:?}: {e}")))?;
            }
            for (want, got) in want.chunks(w.cols()).zip(got.chunks(w.cols())) {
                for (want, got) in want.chunks(32).zip(got.chunks(32)) {
                    let amax = want.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                    // The scale is rounded up to eight bits.
                    let bound = if format == Format::Mxfp4 { 0.0 } else { f64::from(amax) / 254.0 * (1.0 + 1.0 / 127.0) };
                    within(got, want, |_| bound).map_err(|e| TestCaseError::fail(format!("{format}: {e}")))?;
                }
            }
        }
    }

    /// Against the same rounding in plain loops: nothing but the chain of sums may differ.
    #[test]
    fn products_match_rounded_reference(t in 1usize..80, n in 1usize..60, k in 1usize..400, seed: u64) {
        let mut noise = Noise::new(seed);
        for format in [Format::Mxfp4, Format::Mxfp8, Format::Bf16] {
            let stored = tensor(&mut noise, format, n, fit_cols(format, k));
            let w = matrix(&stored);
            let x = noise.numbers(t * w.cols());
            let (mut x_rounded, w_rounded) = (x.clone(), rounded(&w));
            reference::round_int8(&mut x_rounded, w.cols());
            let mut want = vec![0.0; t * n];
            reference::matmul(&x_rounded, &w_rounded, &mut want);
            let sizes = magnitudes(&x_rounded, &w_rounded, 1);
            let mut exact = vec![0.0; t * n];
            reference::matmul(&x, &w_rounded, &mut exact);
            let weights = to_f32(&w_rounded);
            let rounding = |i: usize| -> f64 {
                let x = &x[i / n * w.cols()..][..w.cols()];
                let w = &weights[i % n * w.cols()..][..w.cols()];
                let group = |(x, w): (&[f32], &[f32])| {
                    let amax = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                    f64::from(amax) / 253.0 * w.iter().map(|w| f64::from(w.abs())).sum::<f64>()
                };
                x.chunks(32).zip(w.chunks(32)).map(group).sum()
            };
            for level in CpuLevel::available() {
                let mut got = vec![f32::NAN; t * n];
                matmul(Ctx { level, par: &Serial }, &x, &mut [Product::new(&w, &mut got)]);
                within(&got, &want, |i| sizes[i] * chain(level, w.cols()))
                    .map_err(|e| TestCaseError::fail(format!("{level:?} {format}: {e}")))?;
                within(&got, &exact, |i| sizes[i] * chain(level, w.cols()) + rounding(i))
                    .map_err(|e| TestCaseError::fail(format!("{level:?} {format}, promised: {e}")))?;
            }
        }
    }

    #[test]
    fn grouped_products_match(t in 1usize..70, groups in 1usize..5, strips in 1usize..5, k in 1usize..100, seed: u64) {
        let mut noise = Noise::new(seed);
        let w = matrix(&tensor(&mut noise, Format::Mxfp8, groups * strips * 8, fit_cols(Format::Mxfp8, k)));
        let x = noise.numbers(t * groups * w.cols());
        let (mut x_rounded, w_rounded) = (x.clone(), rounded(&w));
        reference::round_int8(&mut x_rounded, w.cols());
        let mut want = vec![0.0; t * w.rows()];
        reference::grouped_matmul(&x_rounded, groups, &w_rounded, &mut want);
        let sizes = magnitudes(&x_rounded, &w_rounded, groups);
        for level in CpuLevel::available() {
            let mut got = vec![f32::NAN; want.len()];
            grouped_matmul(Ctx { level, par: &Serial }, &x, groups, &w, &mut got);
            within(&got, &want, |i| sizes[i] * chain(level, w.cols())).map_err(TestCaseError::fail)?;
        }
    }

    /// Hidden rows are rounded too, and a sum that falls to the other side of a tie moves one of them by a step.
    #[test]
    fn experts_match_rounded_reference(t in 1usize..90, count in 1usize..5, top_k in 1usize..4, seed: u64) {
        let mut noise = Noise::new(seed);
        let (dim, inner) = (32 + 32 * noise.below(4), 32 + 32 * noise.below(4));
        let (limit, first) = (Some(2.5), 3);
        let weights = expert_weights(&mut noise, count, dim, inner);
        let experts: Vec<Int8Expert> = weights.iter().map(|[w1, w2, w3]| Int8Expert { w1, w2, w3 }).collect();
        let plain: Vec<[StoredTensor; 3]> = weights.iter().map(|w| w.each_ref().map(rounded)).collect();
        let x = noise.numbers(t * dim);
        let ids: Vec<i32> = (0..t * top_k).map(|_| noise.below(count + 6) as i32).collect();
        let shares = noise.numbers(t * top_k);
        let start = noise.numbers(t * dim);
        let mut x_rounded = x.clone();
        reference::round_int8(&mut x_rounded, dim);
        // One expert, one token: the result and how far it may be off.
        let expert = |e: usize, t: usize, share: f32| {
            let [w1, w2, w3] = &plain[e];
            let (mut gate, mut up, mut hidden) = (vec![0.0; inner], vec![0.0; inner], vec![0.0; inner]);
            reference::matmul(&x_rounded[t * dim..(t + 1) * dim], w1, &mut gate);
            reference::matmul(&x_rounded[t * dim..(t + 1) * dim], w3, &mut up);
            reference::swiglu(&gate, &up, limit, &mut hidden);
            hidden.iter_mut().for_each(|x| *x *= share);
            let steps: Vec<f32> = hidden.chunks(32).flat_map(|group| {
                let amax = group.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                vec![amax / 126.0; group.len()]
            }).collect();
            reference::round_int8(&mut hidden, inner);
            let mut out = vec![0.0; dim];
            reference::matmul(&hidden, w2, &mut out);
            (out, magnitudes(&steps, w2, 1))
        };
        let mut want: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
        let mut bound: Vec<f64> = start.iter().map(|x| 8.0 * EPS * f64::from(x.abs())).collect();
        for (i, &id) in ids.iter().enumerate().filter(|&(_, &id)| (first..first + count as i32).contains(&id)) {
            let (out, off) = expert((id - first) as usize, i / top_k, shares[i]);
            for (c, (out, off)) in out.iter().zip(off).enumerate() {
                want[i / top_k * dim + c] += f64::from(*out);
                bound[i / top_k * dim + c] += off + 1e-4 * f64::from(out.abs());
            }
        }
        let want: Vec<f32> = want.iter().map(|x| *x as f32).collect();
        for level in CpuLevel::available() {
            let mut got = start.clone();
            let ctx = Ctx { level, par: &Serial };
            routed_experts(ctx, &x, &ids, &shares, top_k, first as usize, &experts, limit, &mut got);
            within(&got, &want, |i| bound[i]).map_err(TestCaseError::fail)?;
            let mut got = vec![f32::NAN; t * dim];
            shared_expert(ctx, &x, &experts[0], limit, &mut got);
            for (t, got) in got.chunks(dim).enumerate() {
                let (want, bound) = expert(0, t, 1.0);
                within(got, &want, |i| bound[i] + 1e-4 * f64::from(want[i].abs())).map_err(TestCaseError::fail)?;
            }
        }
    }

    /// The row contract: pieces of rows on 1 to 3 threads give the bits of all rows at once on one.
    #[test]
    fn rows_have_the_same_bits_alone(t in 1usize..150, count in 1usize..6, n in 1usize..70, top_k in 1usize..4, seed: u64) {
        let mut noise = Noise::new(seed);
        let (dim, inner) = (32 + 32 * noise.below(8), 32 + 32 * noise.below(8));
        let weights = expert_weights(&mut noise, count, dim, inner);
        let experts: Vec<Int8Expert> = weights.iter().map(|[w1, w2, w3]| Int8Expert { w1, w2, w3 }).collect();
        let products = [Format::Mxfp4, Format::Mxfp8].map(|format| matrix(&tensor(&mut noise, format, n, dim)));
        let (x, start) = (noise.numbers(t * dim), noise.numbers(t * dim));
        let ids: Vec<i32> = (0..t * top_k).map(|_| noise.below(count) as i32).collect();
        let shares = noise.numbers(t * top_k);
        let cut = noise.below(count + 1);
        let run = |ctx: Ctx, rows: Range<usize>| {
            let span = |width: usize| rows.start * width..rows.end * width;
            let (x, ids, shares) = (&x[span(dim)], &ids[span(top_k)], &shares[span(top_k)]);
            let mut acc = start[span(dim)].to_vec();
            // One call or two: the split of the range of experts must not matter either.
            let cut = if ctx.par.threads() == 1 { 0 } else { cut };
            routed_experts(ctx, x, ids, shares, top_k, 0, &experts[..cut], Some(2.5), &mut acc);
            routed_experts(ctx, x, ids, shares, top_k, cut, &experts[cut..], Some(2.5), &mut acc);
            let mut one = vec![f32::NAN; acc.len()];
            shared_expert(ctx, x, &experts[0], Some(2.5), &mut one);
            let outs = products.each_ref().map(|w| {
                let mut out = vec![f32::NAN; rows.len() * n];
                matmul(ctx, x, &mut [Product::new(w, &mut out)]);
                out
            });
            let row = |r: usize| {
                let parts = [&acc[r * dim..(r + 1) * dim], &one[r * dim..(r + 1) * dim]];
                [parts.concat(), outs[0][r * n..(r + 1) * n].to_vec(), outs[1][r * n..(r + 1) * n].to_vec()].concat()
            };
            (0..rows.len()).flat_map(row).collect::<Vec<f32>>()
        };
        let mut fused = None;
        for level in CpuLevel::available() {
            let want = run(Ctx { level, par: &Serial }, 0..t);
            if level != CpuLevel::Scalar {
                // Wider registers are the same arithmetic.
                same_bits(&want, fused.get_or_insert_with(|| want.clone()))
                    .map_err(|e| TestCaseError::fail(format!("{level:?}: {e}")))?;
            }
            for threads in 1..=3 {
                let par = Threads(threads);
                let (mut got, mut first) = (Vec::new(), 0);
                while first < t {
                    let rows = if noise.below(2) == 0 { 1 } else { 1 + noise.below(t - first) };
                    got.extend(run(Ctx { level, par: &par }, first..first + rows));
                    first += rows;
                }
                same_bits(&got, &want).map_err(|e| TestCaseError::fail(format!("{level:?}, {threads} threads: {e}")))?;
            }
        }
    }
}

fn expert_weights(noise: &mut Noise, count: usize, dim: usize, inner: usize) -> Vec<[Int8Matrix; 3]> {
    let shapes = [(inner, dim), (dim, inner), (inner, dim)];
    (0..count).map(|_| shapes.map(|(n, k)| matrix(&tensor(noise, Format::Mxfp4, n, k)))).collect()
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let mut noise = Noise::new(2);
    for format in [Format::Mxfp4, Format::Mxfp8] {
        let w = matrix(&tensor(&mut noise, format, 20, 320));
        let mut x = noise.numbers(8 * 320);
        x[3 * 320 + 7] = f32::NAN;
        x[5 * 320] = f32::INFINITY;
        x[6 * 320..7 * 320].fill(1e-35);
        for level in CpuLevel::available() {
            let mut out = vec![0.0; 8 * 20];
            matmul(Ctx { level, par: &Serial }, &x, &mut [Product::new(&w, &mut out)]);
            for (t, row) in out.chunks(20).enumerate() {
                match t {
                    3 | 5 => assert!(row.iter().all(|x| x.is_nan())),
                    6 => assert!(row.iter().all(|x| *x == 0.0), "too small to be seen"),
                    _ => assert!(row.iter().all(|x| x.is_finite())),
                }
            }
        }
    }
}

/// Every scale of fp4 groups: the smallest is subnormal, the last code is NaN; row counts that do not fill strips.
#[test]
fn every_scale_of_fp4() {
    let (rows, groups) = (13, 20);
    let scales: Vec<u8> = (0..rows * groups).map(|i| i as u8).collect();
    let codes: Vec<u8> = (0..rows * groups * 16).map(|i| (i * 37 % 251) as u8).collect();
    let stored = stored(Format::Mxfp4, rows, groups * 32, [codes, scales, Vec::new()]);
    let w = matrix(&stored);
    let weights = to_f32(&stored);
    for g in 0..groups {
        // One group at a time, so that large scales do not hide small ones.
        let mut x = vec![0.0; groups * 32];
        x[g * 32..(g + 1) * 32].fill(127.0);
        for level in CpuLevel::available() {
            let mut out = vec![0.0; rows];
            matmul(Ctx { level, par: &Serial }, &x, &mut [Product::new(&w, &mut out)]);
            for (row, out) in out.iter().enumerate() {
                let sum: f32 = weights[row * groups * 32 + g * 32..][..32].iter().sum();
                let want = 127.0 * sum;
                if stored.scales()[row * groups + g] == 255 {
                    assert!(out.is_nan(), "{level:?}: row {row}, group {g}");
                } else if stored.scales().iter().skip(row * groups).take(groups).all(|scale| *scale != 255) {
                    assert!(*out == want || (out - want).abs() <= want.abs() * 1e-6, "{level:?}: {out} for {want}");
                }
            }
        }
    }
}
