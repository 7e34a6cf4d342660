//! Speed of the kernels on one thread at the best level. `item/s` of the products are multiply-adds (twice that is
//! FLOP/s), `B/s` are stored weight bytes. `cargo bench -p troika-kernels -- matmul` picks a group.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use troika_base::storage::ScaleFormat;
use troika_base::{Format, SharedBytes, StoredTensor};
use troika_kernels::int8::{self, Int8Matrix};
use troika_kernels::{
    Ctx, ExpertWeights, HcParams, Index, RowList, Visible, attend, hc_post, hc_pre, index_topk, matmul, routed_experts,
};

fn main() {
    divan::main();
}

/// Numbers in -1..1 from a generator; the exact values do not matter for speed.
fn numbers(n: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// A weight with codes of small magnitude and scales near 1.
fn weight(format: Format, rows: usize, cols: usize) -> StoredTensor {
    let [data, scales, biases] = format.byte_lengths(rows, cols).expect("the shape fits");
    let fill =
        |n: usize, pattern: &[u8]| SharedBytes::new(pattern.iter().copied().cycle().take(n).collect::<Vec<u8>>());
    let (data_pattern, scale_pattern): (&[u8], &[u8]) = match format {
        Format::F32 => (&[0, 0, 0x80, 0x3f, 0, 0, 0, 0xbf], &[]),
        Format::F16 => (&[0, 0x3c, 0, 0xb8], &[]),
        Format::Bf16 => (&[0x80, 0x3f, 0, 0xbf], &[]),
        Format::Affine { .. } => (&[0x12, 0x9a, 0x57, 0xe3, 0x0c], &[0x80, 0x3c]),
        _ => (&[0x12, 0xaa, 0x57, 0xe3, 0x0c], &[127, 126]),
    };
    let parts = [fill(data, data_pattern), fill(scales, scale_pattern), fill(biases, scale_pattern)];
    StoredTensor::new(format, rows, cols, parts).expect("parts fit")
}

fn format(name: &str) -> Format {
    match name {
        "f32" => Format::F32,
        "f16" => Format::F16,
        "bf16" => Format::Bf16,
        "fp8" => Format::Fp8Tile { scale: ScaleFormat::E8m0 },
        "mxfp8" => Format::Mxfp8,
        "mxfp4" => Format::Mxfp4,
        "affine4" => Format::Affine { bits: 4, group: 64, scale: ScaleFormat::Bf16 },
        "affine3" => Format::Affine { bits: 3, group: 64, scale: ScaleFormat::Bf16 },
        name => panic!("no format {name}"),
    }
}

const FORMATS: [&str; 8] = ["f32", "f16", "bf16", "fp8", "mxfp8", "mxfp4", "affine4", "affine3"];

#[divan::bench(args = FORMATS, consts = [1, 4, 8, 64, 512], sample_count = 12)]
fn matmul_1024x2048<const T: usize>(bencher: Bencher, name: &str) {
    let (k, n) = (1024, 2048);
    let w = weight(format(name), n, k);
    let x = numbers(T * k);
    let mut out = vec![0.0; T * n];
    bencher
        .counter(ItemsCount::new(T * n * k))
        .counter(BytesCount::new(w.num_bytes()))
        .bench_local(|| matmul(Ctx::serial(), black_box(&x), &w, &mut out));
}

/// Integer products: fp8 packed, fp4 as stored.
#[divan::bench(args = ["fp8", "mxfp4"], consts = [1, 4, 8, 64, 512], sample_count = 12)]
fn int8_matmul_1024x2048<const T: usize>(bencher: Bencher, name: &str) {
    let (k, n) = (1024, 2048);
    let stored = weight(format(name), n, k);
    let w = Int8Matrix::refer(&stored).unwrap_or_else(|| Int8Matrix::pack(Ctx::serial(), &stored));
    let x = numbers(T * k);
    let mut out = vec![0.0; T * n];
    bencher
        .counter(ItemsCount::new(T * n * k))
        .counter(BytesCount::new(stored.num_bytes()))
        .bench_local(|| int8::matmul(Ctx::serial(), black_box(&x), &mut [(&w, &mut out)]));
}

/// One query, 64 heads of 512, a window of 128 and as many compressed rows again as the argument says.
#[divan::bench(args = [0, 512, 4096], sample_count = 20)]
fn attention(bencher: Bencher, compressed: usize) {
    let (heads, d) = (64, 512);
    let (q, near, far, sink) = (numbers(heads * d), numbers(128 * d), numbers(compressed * d), numbers(heads));
    let (pieces, mut out) = ([&far[..]], vec![0.0; heads * d]);
    let visible = |_| Visible { near: &near, far: RowList::new(d, &pieces), chosen: None };
    bencher
        .counter(ItemsCount::new(2 * heads * d * (128 + compressed)))
        .bench_local(|| attend(Ctx::serial(), d, black_box(&q), &sink, visible, &mut out));
}

/// Sixteen neighbouring queries, 16 heads of 512, a window of 128 and 512 chosen rows of as many as the argument says.
#[divan::bench(args = [512, 1024, 4096], sample_count = 20)]
fn attention_chosen(bencher: Bencher, compressed: usize) {
    let (t, heads, d, k) = (16, 16, 512, 512);
    let (q, far, sink) = (numbers(t * heads * d), numbers(compressed * d), numbers(heads));
    let near = numbers((128 + t) * d);
    // As a real choice, rows of both parities: one alone would have all rows in the same sets of the cache.
    let ids: Vec<i32> =
        (0..k).map(|i| (i * compressed / k + (i * i / 3 % 2) * (compressed / k).min(2) / 2) as i32).collect();
    let (pieces, mut out) = ([&far[..]], vec![0.0; t * heads * d]);
    let visible = |t| Visible { near: &near[t * d..(t + 128) * d], far: RowList::new(d, &pieces), chosen: Some(&ids) };
    bencher
        .counter(ItemsCount::new(2 * t * heads * d * (128 + k)))
        .bench_local(|| attend(Ctx::serial(), d, black_box(&q), &sink, visible, &mut out));
}

/// Four queries of 64 heads of 128 choose 512 keys.
#[divan::bench(args = [1024, 4096], sample_count = 20)]
fn index(bencher: Bencher, n: usize) {
    let (t, heads, d, top_k) = (4, 64, 128, 512);
    let (q, iw, keys) = (numbers(t * heads * d), numbers(t * heads), numbers(n * d));
    let (pieces, mut ids) = ([&keys[..]], vec![0; t * top_k]);
    let index = Index { heads, top_k, scale: 1.0, keys: RowList::new(d, &pieces) };
    bencher
        .counter(ItemsCount::new(t * heads * d * n))
        .bench_local(|| index_topk(Ctx::serial(), &index, black_box(&q), &iw, |_| n, &mut ids));
}

/// 6 of 32 experts of 1024 x 512 for each token.
#[divan::bench(args = [1, 8, 64, 512], sample_count = 12)]
fn experts(bencher: Bencher, t: usize) {
    let (dim, inner, count, top_k) = (1024, 512, 32, 6);
    let weights: Vec<[StoredTensor; 3]> = (0..count)
        .map(|_| [(inner, dim), (dim, inner), (inner, dim)].map(|(n, k)| weight(Format::Mxfp4, n, k)))
        .collect();
    let experts: Vec<ExpertWeights> = weights.iter().map(|[w1, w2, w3]| ExpertWeights { w1, w2, w3 }).collect();
    let ids: Vec<i32> = (0..t * top_k).map(|i| ((i / top_k * 7 + i % top_k * 5) % count) as i32).collect();
    let (x, shares) = (numbers(t * dim), numbers(t * top_k));
    let mut acc = vec![0.0; t * dim];
    bencher.counter(ItemsCount::new(t * top_k * 3 * dim * inner)).bench_local(|| {
        routed_experts(Ctx::serial(), black_box(&x), &ids, &shares, top_k, 0, &experts, Some(10.0), &mut acc);
    });
}

/// Four streams of 4096 channels; items are tokens.
#[divan::bench(args = [1, 64], sample_count = 20)]
fn hyper_connections(bencher: Bencher, t: usize) {
    let (s, d) = (4, 4096);
    let (fn_, base, scale) = (numbers(24 * s * d), numbers(24), numbers(3));
    let p = HcParams {
        streams: s,
        dim: d,
        sinkhorn_iters: 20,
        hc_eps: 1e-6,
        norm_eps: 1e-6,
        fn_: &fn_,
        base: &base,
        scale: &scale,
    };
    let mut x = numbers(t * s * d);
    let (mut y, mut mix) = (vec![0.0; t * d], vec![0.0; t * (s + s * s)]);
    bencher.counter(ItemsCount::new(t)).bench_local(|| {
        hc_pre(Ctx::serial(), black_box(&p), &x, &mut y, &mut mix);
        hc_post(Ctx::serial(), s, d, &y, &mix, &mut x);
    });
}
