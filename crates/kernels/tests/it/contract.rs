//! The row contract: a row has the same bits alone and among others, on one thread and on several.

use std::ops::Range;

use proptest::prelude::*;
use troika_base::{Format, StoredTensor};
use troika_kernels::{
    CpuLevel, Ctx, ExpertWeights, Far, HcParams, Index, Keys, RouteParams, RowList, Rows, Scoring, Seen, Visible, add,
    attend, attend_rounded, embed, for_each_row_with, grouped_matmul, hc_head, hc_post, hc_pre, index_scores,
    index_topk, matmul, rms_norm, rms_norm_in_place, rope, route, routed_experts, shared_expert, stream_mean, swiglu,
};

use crate::support::{Noise, Threads, fit_cols, formats, key_codes, row_codes, same_bits, tensor};

/// Calls `run` for all rows at once on one thread, then for pieces of rows on 1 to 3 threads, and compares the bits.
/// `run(ctx, rows)` returns the output of these rows.
fn check(noise: &mut Noise, rows: usize, run: impl Fn(Ctx, Range<usize>) -> Vec<f32>) -> Result<(), TestCaseError> {
    for level in CpuLevel::available() {
        let want = run(Ctx { level, par: &Threads(1) }, 0..rows);
        for threads in 1..=3 {
            let par = Threads(threads);
            let mut got = Vec::new();
            let mut first = 0;
            while first < rows {
                // Often a single row, sometimes all of them.
                let count = if noise.below(2) == 0 { 1 } else { 1 + noise.below(rows - first) };
                got.extend(run(Ctx { level, par: &par }, first..first + count));
                first += count;
            }
            same_bits(&got, &want).map_err(|e| TestCaseError::fail(format!("{level:?}, {threads} threads: {e}")))?;
            let whole = run(Ctx { level, par: &par }, 0..rows);
            same_bits(&whole, &want).map_err(|e| TestCaseError::fail(format!("{level:?}, {threads} threads: {e}")))?;
        }
    }
    Ok(())
}

/// Elements of rows of `width`.
fn span(rows: &Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]

    #[test]
    fn products(t in 1usize..40, n in 1usize..200, k in 1usize..700, seed: u64) {
        let mut noise = Noise::new(seed);
        for format in formats() {
            let w = tensor(&mut noise, format, n, fit_cols(format, k));
            let x = noise.numbers(t * w.cols());
            check(&mut noise, t, |ctx, rows| {
                let mut out = vec![f32::NAN; rows.len() * n];
                matmul(ctx, &x[span(&rows, w.cols())], &w, &mut out);
                out
            })?;
        }
    }

    #[test]
    fn grouped_products(t in 1usize..40, groups in 1usize..5, r in 1usize..70, k in 1usize..500, seed: u64) {
        let mut noise = Noise::new(seed);
        let w = tensor(&mut noise, Format::Bf16, groups * r, k);
        let x = noise.numbers(t * groups * k);
        check(&mut noise, t, |ctx, rows| {
            let mut out = vec![f32::NAN; rows.len() * groups * r];
            grouped_matmul(ctx, &x[span(&rows, groups * k)], groups, &w, &mut out);
            out
        })?;
    }

    #[test]
    fn experts(t in 1usize..50, count in 1usize..7, top_k in 1usize..4, seed: u64) {
        let mut noise = Noise::new(seed);
        let (dim, inner) = (32 + 32 * noise.below(12), 32 + 32 * noise.below(12));
        let weights: Vec<[StoredTensor; 3]> = (0..count)
            .map(|_| [(inner, dim), (dim, inner), (inner, dim)].map(|(n, k)| tensor(&mut noise, Format::Mxfp4, n, k)))
            .collect();
        let experts: Vec<ExpertWeights> = weights.iter().map(|[w1, w2, w3]| ExpertWeights { w1, w2, w3 }).collect();
        let (x, start) = (noise.numbers(t * dim), noise.numbers(t * dim));
        let ids: Vec<i32> = (0..t * top_k).map(|_| noise.below(count) as i32).collect();
        let shares = noise.numbers(t * top_k);
        let cut = noise.below(count + 1);
        check(&mut noise, t, |ctx, rows| {
            let (x, ids, shares) = (&x[span(&rows, dim)], &ids[span(&rows, top_k)], &shares[span(&rows, top_k)]);
            let mut acc = start[span(&rows, dim)].to_vec();
            // One call or two: the split of the range of experts must not matter either.
            let cut = if ctx.par.threads() == 1 { 0 } else { cut };
            routed_experts(ctx, x, ids, shares, top_k, 0, &experts[..cut], Some(2.5), &mut acc);
            routed_experts(ctx, x, ids, shares, top_k, cut, &experts[cut..], Some(2.5), &mut acc);
            let mut one = vec![f32::NAN; acc.len()];
            shared_expert(ctx, x, &experts[0], Some(2.5), &mut one);
            acc.iter().zip(one).flat_map(|(&a, b)| [a, b]).collect()
        })?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn rows_of_everything_else(
        t in 1usize..40,
        // Small rows stay on one thread.
        dim in prop_oneof![3 => 1usize..150, 2 => 2000usize..2100],
        seed: u64,
    ) {
        let mut noise = Noise::new(seed);
        let (x, y, weight) = (noise.numbers(t * dim), noise.numbers(t * dim), noise.numbers(dim));
        check(&mut noise, t, |ctx, rows| {
            let (x, y) = (&x[span(&rows, dim)], &y[span(&rows, dim)]);
            let mut out = vec![f32::NAN; x.len()];
            rms_norm(ctx, x, dim, Some(&weight), 1e-6, &mut out);
            let mut other = x.to_vec();
            rms_norm_in_place(ctx, &mut other, dim, None, 1e-6);
            add(ctx, &mut out, &other);
            swiglu(ctx, x, y, Some(1.0), &mut other);
            add(ctx, &mut out, &other);
            out
        })?;

        let s = 1 + noise.below(4);
        let outputs = (2 + s) * s;
        let (fn_, base, scale) = (noise.numbers(outputs * s * dim), noise.numbers(outputs), noise.numbers(3));
        let (fn_, base, scale) = (&fn_[..], &base[..], &scale[..]);
        let p = HcParams { streams: s, dim, sinkhorn_iters: 20, hc_eps: 1e-6, norm_eps: 1e-6, fn_, base, scale };
        let head = HcParams { fn_: &fn_[..s * s * dim], base: &base[..s], scale: &scale[..1], ..p };
        let streams = noise.numbers(t * s * dim);
        check(&mut noise, t, |ctx, rows| {
            let mut x = streams[span(&rows, s * dim)].to_vec();
            let (mut y, mut mix) = (vec![f32::NAN; rows.len() * dim], vec![f32::NAN; rows.len() * (s + s * s)]);
            hc_pre(ctx, &p, &x, &mut y, &mut mix);
            hc_post(ctx, s, dim, &y, &mix, &mut x);
            let (mut a, mut b) = (vec![f32::NAN; y.len()], vec![f32::NAN; y.len()]);
            hc_head(ctx, &head, &x, &mut a);
            stream_mean(ctx, s, dim, &x, &mut b);
            add(ctx, &mut a, &b);
            a
        })?;

        let table = tensor(&mut noise, Format::Bf16, 9, dim);
        let tokens: Vec<i32> = (0..t).map(|_| noise.below(9) as i32).collect();
        let positions: Vec<i64> = (0..t).map(|_| noise.below(1 << 20) as i64).collect();
        let freqs: Vec<f64> = (0..dim / 2).map(|j| 1.0 / (j + 1) as f64).collect();
        let bias = noise.numbers(dim);
        let k = 1 + noise.below(dim.min(6));
        let p = RouteParams {
            scoring: Scoring::SqrtSoftplus,
            experts: dim,
            top_k: k,
            bias: Some(&bias),
            table: None,
            normalise: true,
            scaling: 1.5,
        };
        check(&mut noise, t, |ctx, rows| {
            let mut out = vec![f32::NAN; rows.len() * 2 * dim];
            embed(ctx, &table, &tokens[rows.clone()], 2, &mut out);
            rope(ctx, &mut out, 2, &positions[rows.clone()], &freqs, false);
            let (mut ids, mut weights) = (vec![0; rows.len() * k], vec![f32::NAN; rows.len() * k]);
            route(ctx, &p, &x[span(&rows, dim)], &[], &mut ids, &mut weights);
            // Row by row, as the caller concatenates rows.
            let row = |t: usize| {
                let mut row = out[2 * t * dim..2 * (t + 1) * dim].to_vec();
                row.extend(ids[t * k..(t + 1) * k].iter().map(|&id| id as f32));
                row.extend(&weights[t * k..(t + 1) * k]);
                row
            };
            (0..rows.len()).flat_map(row).collect()
        })?;
    }

    /// Heads are independent, and so are queries: any grouping, any number of threads and any cut of the stored rows gives
    /// the same bits.
    #[test]
    fn attention(t in 1usize..40, far in 0usize..300, heads in 1usize..40, d in 1usize..70, seed: u64) {
        let mut noise = Noise::new(seed);
        let (q, window, keys) = (noise.numbers(t * heads * d), noise.numbers((t + 130) * d), noise.numbers(far * d));
        let (sink, iw) = (noise.numbers(heads), noise.numbers(t * heads));
        let ids: Vec<i32> = (0..far as i32).step_by(2).collect();
        let cuts: Vec<usize> = (0..t).map(|_| noise.below(far + 1)).collect();
        check(&mut noise, t, |ctx, rows| {
            let (a, b) = keys.split_at(cuts[rows.start] * d);
            let pieces = [a, b];
            let far = RowList::new(d, &pieces);
            let visible = |i: usize| {
                let at = rows.start + i;
                let near = &window[at.saturating_sub(5) * d..(at + 130) * d];
                Visible { near, far: if at.is_multiple_of(3) { far.first(far.len() / 2) } else { far }, chosen: (at % 3 == 1).then_some(&ids) }
            };
            let q = &q[span(&rows, heads * d)];
            let mut plain = vec![f32::NAN; rows.len() * heads * d];
            attend(ctx, d, q, &sink, visible, &mut plain);
            let (near_codes, far_codes) = (row_codes(ctx, d, &window), row_codes(ctx, d, &keys));
            let all = Rows { near: near_codes.rows(0..t + 130), far: far_codes.rows(0..far.len()) };
            let seen = |i: usize| {
                let at = rows.start + i;
                let far = match at % 3 {
                    0 => Far::First(far.len() / 2),
                    1 => Far::Chosen(&ids),
                    _ => Far::First(far.len()),
                };
                Seen { near: at.saturating_sub(5)..at + 130, far }
            };
            let mut rounded = vec![f32::NAN; rows.len() * heads * d];
            attend_rounded(ctx, q, &sink, &all, seen, &mut rounded);
            let iw = &iw[span(&rows, heads)];
            let codes = key_codes(ctx, d, &keys);
            let chosen = [Keys::Plain(far), Keys::Rounded(codes.keys())].map(|keys| {
                let mut chosen = vec![0; rows.len() * 7];
                let index = Index { heads, top_k: 7, scale: 1.0, keys };
                index_topk(ctx, &index, q, iw, |i| (rows.start + i) * 8 % (far.len() + 1), &mut chosen);
                chosen.into_iter().map(|id| id as f32).collect::<Vec<f32>>()
            });
            let row = |i: usize| {
                let span = |width: usize| i * width..(i + 1) * width;
                let out = [&plain[span(heads * d)], &rounded[span(heads * d)], &chosen[0][span(7)], &chosen[1][span(7)]];
                out.concat()
            };
            (0..rows.len()).flat_map(row).collect()
        })?;
        let rows: Vec<&[f32]> = window.chunks(d).collect();
        let far = RowList::new(d, &rows);
        check(&mut noise, heads, |ctx, h| {
            let mut out = vec![f32::NAN; h.len() * d];
            attend(ctx, d, &q[span(&h, d)], &sink[h], |_| Visible { near: &[], far, chosen: None }, &mut out);
            out
        })?;
        check(&mut noise, rows.len(), |ctx, w| {
            // A key has the same score whichever piece it lies in, and however many keys are scored with it.
            let keys = &window[span(&w, d)];
            let (a, b) = keys.split_at(w.len() / 2 * d);
            let pieces = [a, b];
            let mut out = vec![f32::NAN; 2 * w.len()];
            let codes = key_codes(ctx, d, keys);
            let forms = [Keys::Plain(RowList::new(d, &pieces)), Keys::Rounded(codes.keys())];
            for (keys, out) in forms.into_iter().zip(out.chunks_exact_mut(w.len())) {
                let index = Index { heads, top_k: 1, scale: 1.0, keys };
                index_scores(ctx.level, &index, &q[..heads * d], &iw[..heads], out);
            }
            let (plain, rounded) = out.split_at(w.len());
            plain.iter().zip(rounded).flat_map(|(plain, rounded)| [*plain, *rounded]).collect()
        })?;
    }

    #[test]
    fn scratch_rows(t in 1usize..60, width in 1usize..5, seed: u64) {
        check(&mut Noise::new(seed), t, |ctx, rows| {
            let mut out = vec![0.0; rows.len() * width];
            for_each_row_with(ctx, &mut out, width, Vec::new, |scratch: &mut Vec<f32>, t, row| {
                scratch.clear();
                scratch.extend((0..width).map(|c| ((rows.start + t) * width + c) as f32));
                row.copy_from_slice(scratch);
            });
            out
        })?;
    }
}

/// Enough rows that blocks of rows and batches of experts are cut: 1100 rows alone, in pieces and at once.
#[test]
fn many_rows() {
    let mut noise = Noise::new(5);
    let (t, dim, inner, top_k) = (1100, 64, 32, 2);
    let w = tensor(&mut noise, Format::Mxfp8, 40, 288);
    let x = noise.numbers(t * w.cols());
    check(&mut noise, t, |ctx, rows| {
        let mut out = vec![f32::NAN; rows.len() * w.rows()];
        matmul(ctx, &x[span(&rows, w.cols())], &w, &mut out);
        out
    })
    .expect("products");

    let weights: Vec<[StoredTensor; 3]> = (0..5)
        .map(|_| [(inner, dim), (dim, inner), (inner, dim)].map(|(n, k)| tensor(&mut noise, Format::Mxfp4, n, k)))
        .collect();
    let experts: Vec<ExpertWeights> = weights.iter().map(|[w1, w2, w3]| ExpertWeights { w1, w2, w3 }).collect();
    let x = noise.numbers(t * dim);
    // Most tokens go to expert 1, which then has a batch of its own.
    let ids: Vec<i32> = (0..t * top_k).map(|_| [1, 1, 1, 0, 2, 3, 4, 9][noise.below(8)]).collect();
    let shares = noise.numbers(t * top_k);
    check(&mut noise, t, |ctx, rows| {
        let mut acc = vec![0.5; rows.len() * dim];
        let (ids, shares) = (&ids[span(&rows, top_k)], &shares[span(&rows, top_k)]);
        routed_experts(ctx, &x[span(&rows, dim)], ids, shares, top_k, 0, &experts, Some(2.5), &mut acc);
        acc
    })
    .expect("experts");
}
