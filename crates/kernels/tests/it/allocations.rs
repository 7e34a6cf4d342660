//! No kernel allocates once its thread has seen it: an allocator that counts per thread says so.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use troika_base::storage::ScaleFormat;
use troika_base::{Format, StoredTensor};
use troika_kernels::int8::{self, Int8Expert, Int8Matrix, Product};
use troika_kernels::{
    Ctx, ExpertWeights, Far, HcParams, Index, KeyCodes, Keys, RouteParams, RowCodes, RowList, Rows, Scoring, Seen,
    Visible, add, attend, attend_rounded, embed, grouped_matmul, hc_head, hc_mix, hc_post, hc_pre, index_scores,
    index_topk, matmul, pool, rms_norm, rms_norm_in_place, rope, rope_row, route, routed_experts, shared_expert,
    stream_mean, swiglu,
};

use crate::support::{Noise, key_codes, row_codes, serial_contexts, tensor};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more, and nobody asks for it.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// One step of `t` tokens through every kernel.
fn step(ctx: Ctx, t: usize, operands: &Operands, buffers: &mut Buffers) {
    let (o, b) = (operands, buffers);
    let (s, d) = (STREAMS, DIM);
    let p = HcParams {
        streams: s,
        dim: d,
        sinkhorn_iters: 20,
        hc_eps: 1e-6,
        norm_eps: 1e-6,
        fn_: &o.numbers[..(2 + s) * s * s * d],
        base: &o.numbers[..(2 + s) * s],
        scale: &o.numbers[..3],
    };
    let streams = &mut b.streams[..t * s * d];
    let (row, other, mix, pre) =
        (&mut b.row[..t * d], &mut b.other[..t * d], &mut b.mix[..t * (s + s * s)], &mut b.pre[..t * s]);
    embed(ctx, &o.table, &o.tokens[..t], s, streams);
    hc_pre(ctx, &p, streams, row, mix);
    hc_mix(ctx, &p, streams, pre, mix);
    rms_norm(ctx, row, d, Some(&o.numbers[..d]), 1e-6, other);
    rms_norm_in_place(ctx, other, d, None, 1e-6);
    rope(ctx, other, HEADS, &o.positions[..t], &o.freqs, false);
    rope_row(&mut other[..8], 77, &o.freqs, true);
    let keys = RowList::shared(WIDTH, &o.keys);
    let ids = &mut b.ids[..t * 16];
    for keys in [Keys::Plain(keys), Keys::Rounded(o.key_codes.keys())] {
        let index = Index { heads: HEADS, top_k: 16, scale: 0.1, keys };
        index_topk(ctx, &index, other, &o.numbers[..t * HEADS], |i| 40 + i, ids);
        index_scores(ctx.level, &index, &other[..d], &o.numbers[..HEADS], &mut b.scores);
    }
    let ids = &*ids;
    let visible =
        |i: usize| Visible { near: &o.numbers[..100 * WIDTH], far: keys, chosen: Some(&ids[i * 16..(i + 1) * 16]) };
    attend(ctx, WIDTH, other, &o.numbers[..HEADS], visible, row);
    let rows = Rows { near: o.row_codes.rows(28..128), far: o.row_codes.rows(0..128) };
    let seen = |i: usize| Seen { near: 0..100, far: Far::Chosen(&ids[i * 16..(i + 1) * 16]) };
    attend_rounded(ctx, other, &o.numbers[..HEADS], &rows, seen, row);
    let entries = [(&o.numbers[..WIDTH], &o.numbers[WIDTH..2 * WIDTH]); 2];
    pool(ctx.level, &entries, &mut row[..WIDTH]);
    swiglu(ctx, row, &o.numbers[..t * d], Some(10.0), other);
    add(ctx, row, other);
    hc_post(ctx, s, d, row, mix, streams);
    let head = HcParams { fn_: &p.fn_[..s * s * d], base: &p.base[..s], scale: &p.scale[..1], ..p };
    hc_head(ctx, &head, streams, row);
    stream_mean(ctx, s, d, streams, row);
    let route_params = RouteParams {
        scoring: Scoring::SqrtSoftplus,
        experts: EXPERTS,
        top_k: 3,
        bias: None,
        table: None,
        normalise: true,
        scaling: 1.0,
    };
    let (experts, weights) = (&mut b.experts[..t * 3], &mut b.weights[..t * 3]);
    route(ctx, &route_params, &row[..t * EXPERTS], &o.tokens[..t], experts, weights);
    for (w, packed) in o.products.iter().zip(&o.packed) {
        matmul(ctx, row, w, other);
        grouped_matmul(ctx, streams, s, &o.grouped, &mut b.scores_of_tokens[..t * s * GROUP_OUTPUTS]);
        int8::matmul(ctx, row, &mut [Product::new(packed, other), Product::new(packed, &mut streams[..t * d])]);
    }
    int8::grouped_matmul(ctx, streams, s, &o.grouped_packed, &mut b.scores_of_tokens[..t * s * GROUP_OUTPUTS]);
    let [w1, w2, w3] = &o.experts[0];
    shared_expert(ctx, row, &ExpertWeights { w1, w2, w3 }, Some(10.0), other);
    let [w1, w2, w3] = &o.experts_packed[0];
    int8::shared_expert(ctx, row, &Int8Expert { w1, w2, w3 }, Some(10.0), other);
    let of = |e: usize| ExpertWeights { w1: &o.experts[e][0], w2: &o.experts[e][1], w3: &o.experts[e][2] };
    let all: [ExpertWeights; EXPERTS] = std::array::from_fn(of);
    routed_experts(ctx, row, experts, weights, 3, 0, &all, Some(10.0), other);
    let of = |e: usize| {
        let [w1, w2, w3] = &o.experts_packed[e];
        Int8Expert { w1, w2, w3 }
    };
    let all: [Int8Expert; EXPERTS] = std::array::from_fn(of);
    int8::routed_experts(ctx, row, experts, weights, 3, 0, &all, Some(10.0), other);
}

const STREAMS: usize = 4;
const DIM: usize = 160;
const HEADS: usize = 10;
const WIDTH: usize = DIM / HEADS;
const EXPERTS: usize = 9;
const INNER: usize = 96;
const GROUP_OUTPUTS: usize = 16;
const TOKENS: usize = 70;

struct Operands {
    numbers: Vec<f32>,
    table: StoredTensor,
    tokens: Vec<i32>,
    positions: Vec<i64>,
    freqs: Vec<f64>,
    keys: Vec<std::sync::Arc<Vec<f32>>>,
    /// The same rounded, as rows and as keys.
    row_codes: RowCodes,
    key_codes: KeyCodes,
    /// `[DIM, DIM]` in several formats, and the same for integer products.
    products: Vec<StoredTensor>,
    packed: Vec<Int8Matrix>,
    grouped: StoredTensor,
    grouped_packed: Int8Matrix,
    experts: Vec<[StoredTensor; 3]>,
    experts_packed: Vec<[Int8Matrix; 3]>,
}

struct Buffers {
    streams: Vec<f32>,
    row: Vec<f32>,
    other: Vec<f32>,
    mix: Vec<f32>,
    pre: Vec<f32>,
    scores: Vec<f32>,
    scores_of_tokens: Vec<f32>,
    weights: Vec<f32>,
    ids: Vec<i32>,
    experts: Vec<i32>,
}

#[test]
fn a_warm_step_allocates_nothing() {
    let mut noise = Noise::new(5);
    let packed = |w: &StoredTensor| Int8Matrix::refer(w).unwrap_or_else(|| Int8Matrix::pack(Ctx::serial(), w));
    let affine = Format::Affine { bits: 4, group: 32, scale: ScaleFormat::Bf16 };
    let fp8 = Format::Fp8Tile { scale: ScaleFormat::E8m0 };
    let products: Vec<StoredTensor> =
        [Format::Bf16, Format::Mxfp4, fp8, affine].map(|format| tensor(&mut noise, format, DIM, DIM)).into();
    let grouped = tensor(&mut noise, fp8, STREAMS * GROUP_OUTPUTS, DIM);
    let shapes = [(INNER, DIM), (DIM, INNER), (INNER, DIM)];
    let experts: Vec<[StoredTensor; 3]> =
        (0..EXPERTS).map(|_| shapes.map(|(n, k)| tensor(&mut noise, Format::Mxfp4, n, k))).collect();
    let keys = noise.numbers(128 * WIDTH);
    let operands = Operands {
        packed: products.iter().map(packed).collect(),
        products,
        grouped_packed: packed(&grouped),
        grouped,
        experts_packed: experts.iter().map(|weights| weights.each_ref().map(packed)).collect(),
        experts,
        numbers: noise.numbers((2 + STREAMS) * STREAMS * STREAMS * DIM),
        table: tensor(&mut noise, Format::Bf16, 11, DIM),
        tokens: (0..TOKENS).map(|_| noise.below(11) as i32).collect(),
        positions: (0..TOKENS as i64).collect(),
        freqs: vec![1.0, 0.1, 0.01],
        row_codes: row_codes(Ctx::serial(), WIDTH, &keys),
        key_codes: key_codes(Ctx::serial(), WIDTH, &keys),
        keys: keys.chunks(32 * WIDTH).map(|piece| std::sync::Arc::new(piece.to_vec())).collect(),
    };
    let mut buffers = Buffers {
        streams: vec![0.0; TOKENS * STREAMS * DIM],
        row: vec![0.0; TOKENS * DIM],
        other: vec![0.0; TOKENS * DIM],
        mix: vec![0.0; TOKENS * (STREAMS + STREAMS * STREAMS)],
        pre: vec![0.0; TOKENS * STREAMS],
        scores: vec![0.0; 100],
        scores_of_tokens: vec![0.0; TOKENS * STREAMS * GROUP_OUTPUTS],
        weights: vec![0.0; TOKENS * 3],
        ids: vec![0; TOKENS * 16],
        experts: vec![0; TOKENS * 3],
    };
    for ctx in serial_contexts() {
        let mut counts = [TOKENS, 1, TOKENS, 1, 5].map(|t| {
            let before = ALLOCATIONS.get();
            step(ctx, t, &operands, &mut buffers);
            ALLOCATIONS.get() - before
        });
        // The first step is the one that warms up; it shows that the counter counts.
        if ctx.level == troika_kernels::CpuLevel::Scalar {
            assert!(counts[0] > 0, "{counts:?}");
        }
        counts[0] = 0;
        assert_eq!(counts, [0; 5], "{:?}", ctx.level);
    }
}
