//! Every operation as a plain loop: read next to the model spec, never optimised, what everything else is tested
//! against. Sums run in `f64` and are rounded to `f32` once, so a bound against these loops bounds the true error.
//!
//! Arguments and panics are those of the operations of the same name in the crate's root.

use troika_base::StoredTensor;
use troika_base::storage::{FP8_TILE, Format, MX_GROUP, ScaleFormat};

use crate::formats::{E2M1, E4M3, bf16_to_f32, e8m0_to_f32, f16_to_f32};
use crate::{ExpertWeights, HcParams, RouteParams, Scoring};

/// Element `(row, col)` of a stored tensor.
///
/// # Panics
///
/// If there is no such element, or the tensor holds integers.
pub fn decode(w: &StoredTensor, row: usize, col: usize) -> f32 {
    assert!(row < w.rows() && col < w.cols(), "no such element");
    let (data, i) = (w.data(), row * w.cols() + col);
    let per_row = |group: usize| row * (w.cols() / group) + col / group;
    match w.format() {
        Format::F32 => scale(data, ScaleFormat::F32, i),
        Format::F16 => scale(data, ScaleFormat::F16, i),
        Format::Bf16 => scale(data, ScaleFormat::Bf16, i),
        Format::Fp8Tile { scale: format } => {
            let tile = row / FP8_TILE * w.cols().div_ceil(FP8_TILE) + col / FP8_TILE;
            E4M3[usize::from(data[i])] * scale(w.scales(), format, tile)
        }
        Format::Mxfp8 => E4M3[usize::from(data[i])] * scale(w.scales(), ScaleFormat::E8m0, per_row(MX_GROUP)),
        Format::Mxfp4 => {
            let code = if col.is_multiple_of(2) { data[i / 2] & 15 } else { data[i / 2] >> 4 };
            E2M1[usize::from(code)] * scale(w.scales(), ScaleFormat::E8m0, per_row(MX_GROUP))
        }
        Format::Affine { bits, group, scale: format } => {
            let bits = usize::from(bits);
            let first = row * (w.cols() * bits / 8) * 8 + col * bits;
            let q = (0..bits).map(|b| u32::from(data[(first + b) / 8] >> ((first + b) % 8) & 1) << b).sum::<u32>();
            let g = per_row(usize::from(group));
            // The product is rounded before the bias is added.
            let product = scale(w.scales(), format, g) * q as f32;
            product + scale(w.biases(), format, g)
        }
        Format::I64 | Format::I32 => panic!("a table of integers has no float elements"),
    }
}

fn scale(bytes: &[u8], format: ScaleFormat, i: usize) -> f32 {
    match format {
        ScaleFormat::E8m0 => e8m0_to_f32(bytes[i]),
        ScaleFormat::F32 => f32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]),
        ScaleFormat::Bf16 => bf16_to_f32(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])),
        ScaleFormat::F16 => f16_to_f32(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])),
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// `out[t] = x[t] · wᵀ`.
pub fn matmul(x: &[f32], w: &StoredTensor, out: &mut [f32]) {
    grouped_matmul(x, 1, w, out);
}

/// Block-diagonal product.
pub fn grouped_matmul(x: &[f32], groups: usize, w: &StoredTensor, out: &mut [f32]) {
    let (n, k) = (w.rows(), w.cols());
    for (i, out) in out.iter_mut().enumerate() {
        let (t, row) = (i / n, i % n);
        let group = row / (n / groups);
        let x = &x[t * groups * k + group * k..][..k];
        *out = (0..k).map(|c| f64::from(x[c]) * f64::from(decode(w, row, c))).sum::<f64>() as f32;
    }
}

/// Rows of `cols` numbers rounded to eight bits per group of 32: `round(x · 127 / max|x|) · max|x| / 127`.
pub fn round_int8(x: &mut [f32], cols: usize) {
    for group in x.chunks_mut(cols).flat_map(|row| row.chunks_mut(32)) {
        let amax = amax(group);
        let (factor, scale) = if amax > 1e-30 { (127.0 / amax, amax / 127.0) } else { (0.0, 0.0) };
        group.iter_mut().for_each(|x| *x = (*x * factor).round_ties_even() * scale);
    }
}

/// `x / s` rounded to the nearest entry of an ascending table (ties: the even index), times `s`.
fn round_to(table: &[f32], x: f32, scale: f64) -> f32 {
    let a = (f64::from(x) / scale).abs();
    let distance = |i: usize| (f64::from(table[i]) - a).abs();
    let mut best = 0;
    for i in 1..table.len() {
        if distance(i) < distance(best) || (distance(i) == distance(best) && i.is_multiple_of(2)) {
            best = i;
        }
    }
    ((f64::from(table[best]) * scale) as f32).copysign(x)
}

/// Smallest power of two that is not below `v`.
fn power_of_two(v: f32) -> f64 {
    (-400..400).map(|e| 2f64.powi(e)).find(|&p| p >= f64::from(v)).expect("a finite number")
}

fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |max, x| x.abs().max(max))
}

/// Dynamic rounding to e4m3.
pub fn fake_fp8(x: &mut [f32], group: usize) {
    for group in x.chunks_mut(group) {
        let scale = power_of_two(amax(group).max(1e-4) * (1.0f32 / 448.0));
        group.iter_mut().for_each(|x| *x = round_to(&E4M3[..127], *x, scale));
    }
}

/// Dynamic rounding to e2m1.
pub fn fake_fp4(x: &mut [f32], group: usize) {
    for group in x.chunks_mut(group) {
        let scale = power_of_two(amax(group).max(6.0 * f32::MIN_POSITIVE) * (1.0f32 / 6.0));
        group.iter_mut().for_each(|x| *x = round_to(&E2M1[..8], *x, scale));
    }
}

/// Orthonormal Walsh-Hadamard transform: entry `(i, j)` of the matrix is `±1/√n`, negative if `i & j` has an odd number
/// of ones.
pub fn hadamard(x: &mut [f32]) {
    let old = x.to_vec();
    for (i, x) in x.iter_mut().enumerate() {
        let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        let sum: f64 = old.iter().enumerate().map(|(j, &x)| sign(j) * f64::from(x)).sum();
        *x = (sum / (old.len() as f64).sqrt()) as f32;
    }
}

/// Token embeddings, copied to each stream.
pub fn embed(table: &StoredTensor, tokens: &[i32], streams: usize, out: &mut [f32]) {
    let d = table.cols();
    for (i, out) in out.iter_mut().enumerate() {
        *out = decode(table, tokens[i / (streams * d)] as usize, i % d);
    }
}

/// `x / √(mean(x²) + eps) · weight`.
pub fn rms_norm(x: &[f32], dim: usize, weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    for (x, out) in x.chunks(dim).zip(out.chunks_mut(dim)) {
        let factor = 1.0 / (dot(x, x) / dim as f64 + f64::from(eps)).sqrt();
        for c in 0..dim {
            out[c] = (f64::from(x[c]) * factor * f64::from(weight.map_or(1.0, |w| w[c]))) as f32;
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Logits of a hyper-connection for one token, scaled and biased: output `i` uses `scale[group(i)]`.
fn hc_logits(p: &HcParams, x: &[f32], group: impl Fn(usize) -> usize) -> Vec<f64> {
    let factor = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(p.norm_eps)).sqrt();
    (0..p.base.len())
        .map(|i| {
            let m = dot(x, &p.fn_[i * x.len()..(i + 1) * x.len()]) * factor;
            m * f64::from(p.scale[group(i)]) + f64::from(p.base[i])
        })
        .collect()
}

/// Sinkhorn normalisation of logits `[S, S]` (spec 5.1).
pub fn sinkhorn(comb: &mut [f64], s: usize, iters: usize, eps: f64) {
    for row in comb.chunks_mut(s) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|c| (c - max).exp()).sum();
        row.iter_mut().for_each(|c| *c = (*c - max).exp() / sum + eps);
    }
    for i in 0..iters {
        if i > 0 {
            for row in comb.chunks_mut(s) {
                let sum: f64 = row.iter().sum();
                row.iter_mut().for_each(|c| *c /= sum + eps);
            }
        }
        for k in 0..s {
            let sum: f64 = (0..s).map(|j| comb[j * s + k]).sum();
            (0..s).for_each(|j| comb[j * s + k] /= sum + eps);
        }
    }
}

/// The coefficients of a hyper-connection.
pub fn hc_mix(p: &HcParams, x: &[f32], pre: &mut [f32], mix: &mut [f32]) {
    let s = p.streams;
    let tokens = x.chunks(s * p.dim).zip(pre.chunks_mut(s).zip(mix.chunks_mut(s + s * s)));
    for (x, (pre, mix)) in tokens {
        let logits = hc_logits(p, x, |i| (i / s).min(2));
        for i in 0..s {
            pre[i] = (sigmoid(logits[i]) + f64::from(p.hc_eps)) as f32;
            mix[i] = (2.0 * sigmoid(logits[s + i])) as f32;
        }
        let mut comb = logits[2 * s..].to_vec();
        sinkhorn(&mut comb, s, p.sinkhorn_iters, f64::from(p.hc_eps));
        for (mix, comb) in mix[s..].iter_mut().zip(comb) {
            *mix = comb as f32;
        }
    }
}

/// What enters a layer, and the coefficients of the merge.
pub fn hc_pre(p: &HcParams, x: &[f32], collapsed: &mut [f32], mix: &mut [f32]) {
    let (s, d) = (p.streams, p.dim);
    let mut pre = vec![0.0; collapsed.len() / d * s];
    hc_mix(p, x, &mut pre, mix);
    for (i, out) in collapsed.iter_mut().enumerate() {
        let (t, c) = (i / d, i % d);
        *out = (0..s).map(|j| f64::from(pre[t * s + j]) * f64::from(x[(t * s + j) * d + c])).sum::<f64>() as f32;
    }
}

/// Merges the result of a layer into the streams.
pub fn hc_post(streams: usize, dim: usize, y: &[f32], mix: &[f32], x: &mut [f32]) {
    let (s, old) = (streams, x.to_vec());
    for (i, x) in x.iter_mut().enumerate() {
        let (t, k, c) = (i / (s * dim), i / dim % s, i % dim);
        let mix = &mix[t * (s + s * s)..];
        let mut sum = f64::from(mix[k]) * f64::from(y[t * dim + c]);
        for j in 0..s {
            sum += f64::from(mix[s + j * s + k]) * f64::from(old[(t * s + j) * dim + c]);
        }
        *x = sum as f32;
    }
}

/// Collapses the streams before the head.
pub fn hc_head(p: &HcParams, x: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks(p.streams * p.dim).zip(out.chunks_mut(p.dim)) {
        let logits = hc_logits(p, x, |_| 0);
        for (c, out) in out.iter_mut().enumerate() {
            let term = |s: usize| (sigmoid(logits[s]) + f64::from(p.hc_eps)) * f64::from(x[s * p.dim + c]);
            *out = (0..p.streams).map(term).sum::<f64>() as f32;
        }
    }
}

/// Mean over the streams.
pub fn stream_mean(streams: usize, dim: usize, x: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks(streams * dim).zip(out.chunks_mut(dim)) {
        for (c, out) in out.iter_mut().enumerate() {
            *out = ((0..streams).map(|s| f64::from(x[s * dim + c])).sum::<f64>() / streams as f64) as f32;
        }
    }
}

/// Rotates the last `2 · freqs.len()` channels of one head.
pub fn rope_row(x: &mut [f32], position: i64, freqs: &[f64], inverse: bool) {
    let first = x.len() - 2 * freqs.len();
    for (j, freq) in freqs.iter().enumerate() {
        let angle = position as f64 * freq * if inverse { -1.0 } else { 1.0 };
        let (a, b) = (f64::from(x[first + 2 * j]), f64::from(x[first + 2 * j + 1]));
        x[first + 2 * j] = (a * angle.cos() - b * angle.sin()) as f32;
        x[first + 2 * j + 1] = (a * angle.sin() + b * angle.cos()) as f32;
    }
}

/// Softmax over the gates of each channel, then the weighted sum.
pub fn pool(entries: &[(&[f32], &[f32])], out: &mut [f32]) {
    for (c, out) in out.iter_mut().enumerate() {
        let max = entries.iter().map(|(_, gate)| f64::from(gate[c])).fold(f64::NEG_INFINITY, f64::max);
        let weight = |gate: &[f32]| (f64::from(gate[c]) - max).exp();
        let sum: f64 = entries.iter().map(|(_, gate)| weight(gate)).sum();
        *out = (entries.iter().map(|(kv, gate)| weight(gate) * f64::from(kv[c])).sum::<f64>() / sum) as f32;
    }
}

/// Scores of one index query.
pub fn index_scores(iq: &[f32], iw: &[f32], keys: &[&[f32]], out: &mut [f32]) {
    for (key, out) in keys.iter().zip(out) {
        let score = |(iq, &iw): (&[f32], &f32)| f64::from(iw) * dot(iq, key).max(0.0);
        *out = iq.chunks(key.len()).zip(iw).map(score).sum::<f64>() as f32;
    }
}

/// Ids of the `k` best scores, ascending; ties: lower id.
pub fn top_k(scores: &[f32], k: usize) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..scores.len() as i32).collect();
    let score = |id: i32| if scores[id as usize].is_nan() { f32::NEG_INFINITY } else { scores[id as usize] };
    // The sort is stable, so equal scores stay in order of their ids.
    ids.sort_by(|&a, &b| score(b).partial_cmp(&score(a)).expect("no NaN is left"));
    ids.truncate(k);
    ids.sort_unstable();
    ids
}

/// Attention of one query over gathered rows, with a sink.
pub fn attend_row(q: &[f32], heads: usize, rows: &[&[f32]], sink: &[f32], out: &mut [f32]) {
    let d = q.len() / heads;
    for h in 0..heads {
        let scores: Vec<f64> = rows.iter().map(|row| dot(&q[h * d..(h + 1) * d], row) / (d as f64).sqrt()).collect();
        let max = scores.iter().copied().fold(f64::from(sink[h]), f64::max);
        let sum = scores.iter().map(|s| (s - max).exp()).sum::<f64>() + (f64::from(sink[h]) - max).exp();
        for c in 0..d {
            let weighted = scores.iter().zip(rows).map(|(s, row)| (s - max).exp() / sum * f64::from(row[c]));
            out[h * d + c] = weighted.sum::<f64>() as f32;
        }
    }
}

/// Chooses experts by a full stable sort.
pub fn route(p: &RouteParams, logits: &[f32], tokens: &[i32], ids: &mut [i32], weights: &mut [f32]) {
    let (e, k) = (p.experts, p.top_k);
    for (t, logits) in logits.chunks(e).enumerate() {
        let total: f64 = logits.iter().map(|&z| f64::from(z).exp()).sum();
        let score = |z: f32| match p.scoring {
            Scoring::SqrtSoftplus => f64::from(z).exp().ln_1p().sqrt(),
            Scoring::Sigmoid => sigmoid(f64::from(z)),
            Scoring::Softmax => f64::from(z).exp() / total,
        };
        let scores: Vec<f64> = logits.iter().map(|&z| score(z)).collect();
        let mut chosen: Vec<i32> = match p.table {
            Some(table) => table[tokens[t] as usize * k..][..k].to_vec(),
            None => {
                // Ranked in `f32`, where scores that the kernels cannot tell apart are equal.
                let rank = |id: i32| scores[id as usize] as f32 + p.bias.map_or(0.0, |bias| bias[id as usize]);
                let mut all: Vec<i32> = (0..e as i32).collect();
                all.sort_by(|&a, &b| rank(b).partial_cmp(&rank(a)).expect("finite scores"));
                all[..k].to_vec()
            }
        };
        chosen.sort_unstable();
        let sum: f64 = if p.normalise { chosen.iter().map(|&id| scores[id as usize]).sum() } else { 1.0 };
        for (j, &id) in chosen.iter().enumerate() {
            ids[t * k + j] = id;
            weights[t * k + j] = (scores[id as usize] / sum * f64::from(p.scaling)) as f32;
        }
    }
}

/// `silu(min(gate, limit)) · clamp(up, -limit, limit)`.
pub fn swiglu(gate: &[f32], up: &[f32], limit: Option<f32>, out: &mut [f32]) {
    let limit = f64::from(limit.unwrap_or(f32::INFINITY));
    for (out, (&gate, &up)) in out.iter_mut().zip(gate.iter().zip(up)) {
        let g = f64::from(gate).min(limit);
        *out = (g * sigmoid(g) * f64::from(up).clamp(-limit, limit)) as f32;
    }
}

/// One expert.
pub fn shared_expert(x: &[f32], w: &ExpertWeights, limit: Option<f32>, out: &mut [f32]) {
    let rows = x.len() / w.w1.cols();
    let [mut gate, mut up] = [(); 2].map(|()| vec![0.0; rows * w.w1.rows()]);
    matmul(x, w.w1, &mut gate);
    matmul(x, w.w3, &mut up);
    let mut hidden = vec![0.0; gate.len()];
    swiglu(&gate, &up, limit, &mut hidden);
    matmul(&hidden, w.w2, out);
}

/// Adds `weight · expert(x)` of a range of experts to the tokens routed to them.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
pub fn routed_experts(
    x: &[f32],
    ids: &[i32],
    weights: &[f32],
    top_k: usize,
    first: usize,
    experts: &[ExpertWeights],
    limit: Option<f32>,
    acc: &mut [f32],
) {
    for (e, expert) in experts.iter().enumerate() {
        let dim = expert.w2.rows();
        for (i, _) in ids.iter().enumerate().filter(|&(_, &id)| id as usize == first + e) {
            let t = i / top_k;
            let mut y = vec![0.0; dim];
            shared_expert(&x[t * dim..(t + 1) * dim], expert, limit, &mut y);
            for (acc, y) in acc[t * dim..(t + 1) * dim].iter_mut().zip(y) {
                *acc += weights[i] * y;
            }
        }
    }
}
