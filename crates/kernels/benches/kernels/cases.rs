//! What is measured: kernels with operands of the sizes that models have.

use std::hint::black_box;

use troika_base::storage::ScaleFormat;
use troika_base::{Format, SharedBytes, StoredTensor};
use troika_kernels::int8::{self, Int8Expert, Int8Matrix, Product};
use troika_kernels::{
    CpuLevel, Ctx, ExpertWeights, Far, HcParams, Index, KeyCodes, Keys, RouteParams, RowCodes, RowList, Rows, Scoring,
    Seen, Serial, Visible, add, attend, attend_rounded, embed, fake_fp4, fake_fp8, grouped_matmul, hadamard, hc_head,
    hc_post, hc_pre, index_scores, index_topk, matmul, pool, rms_norm, rope, route, routed_experts, shared_expert,
    stream_mean, swiglu,
};

use crate::ceilings::Ceiling;

/// One kernel with its operands.
pub(crate) struct Case {
    pub(crate) name: String,
    /// Bytes or operations of a call.
    pub(crate) amount: f64,
    pub(crate) ceiling: Ceiling,
    pub(crate) run: Box<dyn FnMut()>,
}

/// The cases of a group whose names contain the filter; others are not made.
type Group = fn(CpuLevel, &str) -> Vec<Case>;

pub(crate) const GROUPS: [Group; 7] = [
    |level, filter| products(level, filter, "bf16", Format::Bf16),
    |level, filter| products(level, filter, "affine4", Format::Affine { bits: 4, group: 64, scale: ScaleFormat::Bf16 }),
    |level, filter| int8_products(level, filter, "fp8 packed x int8", Format::Fp8Tile { scale: ScaleFormat::E8m0 }),
    |level, filter| int8_products(level, filter, "fp4 x int8", Format::Mxfp4),
    experts,
    sequence_wise,
    token_wise,
];

/// Rows of the products.
const ROWS: [usize; 4] = [1, 4, 64, 512];
/// Up to so many rows, reading the weights is what takes the time.
const FEW: usize = 4;
/// Weights that calls take in turn where they are to come from memory: more than the caches of most CPUs.
const STREAMED: usize = 96 << 20;

/// Which cases to make, and where they run.
struct Maker<'a> {
    ctx: Ctx<'static>,
    filter: &'a str,
    cases: Vec<Case>,
}

impl<'a> Maker<'a> {
    fn new(level: CpuLevel, filter: &'a str) -> Self {
        Self { ctx: Ctx { level, par: &Serial }, filter, cases: Vec::new() }
    }

    /// Adds a case if it is wanted; `make` makes its operands and what a call does.
    fn add<F: FnMut() + 'static>(
        &mut self,
        name: String,
        ceiling: Ceiling,
        amount: usize,
        make: impl FnOnce(Ctx<'static>) -> F,
    ) {
        if name.contains(self.filter) {
            let run = Box::new(make(self.ctx));
            self.cases.push(Case { name, amount: amount as f64, ceiling, run });
        }
    }
}

/// Numbers in -1..1; the exact values do not matter for speed.
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
        Format::Bf16 => (&[0x80, 0x3f, 0, 0xbf], &[]),
        Format::Affine { .. } => (&[0x12, 0x9a, 0x57, 0xe3, 0x0c], &[0x80, 0x3c]),
        _ => (&[0x12, 0xaa, 0x57, 0xe3, 0x0c], &[127, 126]),
    };
    let parts = [fill(data, data_pattern), fill(scales, scale_pattern), fill(biases, scale_pattern)];
    StoredTensor::new(format, rows, cols, parts).expect("parts fit")
}

/// Outputs, columns and number of the weights of a product of `t` rows.
fn shape(t: usize, format: Format) -> (usize, usize, usize) {
    if t > FEW {
        return (2048, 2048, 1);
    }
    let (n, k) = (2048, 4096);
    let bytes = format.byte_lengths(n, k).expect("the shape fits").iter().sum::<usize>();
    (n, k, STREAMED.div_ceil(bytes))
}

fn products(level: CpuLevel, filter: &str, name: &str, format: Format) -> Vec<Case> {
    let mut maker = Maker::new(level, filter);
    for t in ROWS {
        let (n, k, count) = shape(t, format);
        let bytes: usize = format.byte_lengths(n, k).expect("the shape fits").iter().sum();
        let (ceiling, amount) = if t <= FEW { (Ceiling::Read, bytes) } else { (Ceiling::F32, 2 * t * n * k) };
        maker.add(format!("{name} product T={t}"), ceiling, amount, |ctx| {
            let weights: Vec<StoredTensor> = (0..count).map(|_| weight(format, n, k)).collect();
            let (x, mut out, mut turn) = (numbers(t * k), vec![0.0; t * n], 0);
            move || {
                turn += 1;
                matmul(ctx, black_box(&x), &weights[turn % count], &mut out);
            }
        });
    }
    maker.cases
}

fn int8_products(level: CpuLevel, filter: &str, name: &str, format: Format) -> Vec<Case> {
    let mut maker = Maker::new(level, filter);
    let many = if format == Format::Mxfp4 { Ceiling::Int8Narrow } else { Ceiling::Int8 };
    for t in ROWS {
        let (n, k, count) = shape(t, format);
        let bytes = match format {
            Format::Mxfp4 => format.byte_lengths(n, k).expect("the shape fits").iter().sum(),
            _ => Int8Matrix::packed_bytes(n, k) as usize,
        };
        let (ceiling, amount) = if t <= FEW { (Ceiling::Read, bytes) } else { (many, 2 * t * n * k) };
        maker.add(format!("{name} product T={t}"), ceiling, amount, |ctx| {
            let integers = |w: &StoredTensor| Int8Matrix::refer(w).unwrap_or_else(|| Int8Matrix::pack(ctx, w));
            let weights: Vec<Int8Matrix> = match format {
                Format::Mxfp4 => (0..count).map(|_| integers(&weight(format, n, k))).collect(),
                // One is packed and copied, which is faster.
                _ => vec![integers(&weight(format, n, k)); count],
            };
            let (x, mut out, mut turn) = (numbers(t * k), vec![0.0; t * n], 0);
            move || {
                turn += 1;
                int8::matmul(ctx, black_box(&x), &mut [Product::new(&weights[turn % count], &mut out)]);
            }
        });
    }
    maker.cases
}

/// Six of 64 fp4 experts for each token; with few tokens, others in each call.
fn experts(level: CpuLevel, filter: &str) -> Vec<Case> {
    const COUNT: usize = 64;
    const TOP_K: usize = 6;
    const CALLS: usize = 11;
    let (dim, inner) = (2048, 512);
    let mut maker = Maker::new(level, filter);
    let make = |integers: bool, t: usize| {
        move |ctx: Ctx<'static>| {
            let weights: Vec<[StoredTensor; 3]> = (0..COUNT)
                .map(|_| [(inner, dim), (dim, inner), (inner, dim)].map(|(n, k)| weight(Format::Mxfp4, n, k)))
                .collect();
            let packed: Vec<[Int8Matrix; 3]> = weights
                .iter()
                .map(|weights| weights.each_ref().map(|w| Int8Matrix::refer(w).expect("fp4 codes are integers")))
                .collect();
            // Six experts of a token follow one another; 11 calls of a token see them all.
            let ids = |call: usize| (0..t * TOP_K).map(|i| ((call * t * TOP_K + i) % COUNT) as i32).collect();
            let ids: Vec<Vec<i32>> = (0..CALLS).map(ids).collect();
            let (x, shares, mut acc, mut turn) = (numbers(t * dim), numbers(t * TOP_K), vec![0.0; t * dim], 0);
            move || {
                turn += 1;
                let ids = &ids[turn % CALLS];
                if integers {
                    let experts: [Int8Expert; COUNT] = std::array::from_fn(|e| {
                        let [w1, w2, w3] = &packed[e];
                        Int8Expert { w1, w2, w3 }
                    });
                    int8::routed_experts(ctx, black_box(&x), ids, &shares, TOP_K, 0, &experts, Some(10.0), &mut acc);
                } else {
                    let experts: [ExpertWeights; COUNT] = std::array::from_fn(|e| {
                        let [w1, w2, w3] = &weights[e];
                        ExpertWeights { w1, w2, w3 }
                    });
                    routed_experts(ctx, black_box(&x), ids, &shares, TOP_K, 0, &experts, Some(10.0), &mut acc);
                }
            }
        }
    };
    let one: usize = Format::Mxfp4.byte_lengths(inner, dim).expect("the shape fits").iter().sum();
    for (name, integers, many) in
        [("fp4 x int8 experts", true, Ceiling::Int8Narrow), ("fp4 experts in f32", false, Ceiling::F32)]
    {
        for t in ROWS {
            let read = 3 * one * (t * TOP_K).min(COUNT);
            let (ceiling, amount) =
                if t <= FEW { (Ceiling::Read, read) } else { (many, 2 * t * TOP_K * 3 * dim * inner) };
            maker.add(format!("{name} T={t}"), ceiling, amount, make(integers, t));
        }
    }
    for t in ROWS {
        shared_expert_cases(&mut maker, t);
    }
    maker.cases
}

/// The expert of all tokens, three products of fp8 in one call; weights come from memory.
fn shared_expert_cases(maker: &mut Maker, t: usize) {
    let (dim, inner) = (2048, 2048);
    let fp8 = Format::Fp8Tile { scale: ScaleFormat::E8m0 };
    let stored = move || [weight(fp8, inner, dim), weight(fp8, dim, inner), weight(fp8, inner, dim)];
    let (x, out) = (move || numbers(t * dim), move || vec![0.0; t * dim]);
    let few = |bytes: usize, many| {
        if t <= FEW { (Ceiling::Read, 3 * bytes) } else { (many, 2 * t * 3 * dim * inner) }
    };
    let packed_bytes = Int8Matrix::packed_bytes(inner, dim) as usize;
    let (ceiling, amount) = few(packed_bytes, Ceiling::Int8);
    maker.add(format!("fp8 packed x int8 shared expert T={t}"), ceiling, amount, move |ctx| {
        let sets = vec![stored().each_ref().map(|w| Int8Matrix::pack(ctx, w)); STREAMED / (3 * packed_bytes) + 1];
        let (x, mut out, mut turn) = (x(), out(), 0);
        move || {
            turn += 1;
            let [w1, w2, w3] = &sets[turn % sets.len()];
            int8::shared_expert(ctx, black_box(&x), &Int8Expert { w1, w2, w3 }, Some(10.0), &mut out);
        }
    });
    let bytes = fp8.byte_lengths(inner, dim).expect("the shape fits").iter().sum();
    let (ceiling, amount) = few(bytes, Ceiling::F32);
    maker.add(format!("fp8 shared expert in f32 T={t}"), ceiling, amount, move |ctx| {
        let ([w1, w2, w3], x, mut out) = (stored(), x(), out());
        move || {
            let w = ExpertWeights { w1: &w1, w2: &w2, w3: &w3 };
            shared_expert(ctx, black_box(&x), &w, Some(10.0), &mut out);
        }
    });
}

/// `n` rows of `d` numbers, rounded.
fn row_codes(ctx: Ctx, d: usize, n: usize) -> RowCodes {
    let (x, mut codes) = (numbers(n * d), RowCodes::new(d));
    codes.extend(ctx, n, |i| &x[i * d..(i + 1) * d]);
    codes
}

/// Keys of `d` numbers, rounded.
fn key_codes(ctx: Ctx, d: usize, keys: &[f32]) -> KeyCodes {
    let mut codes = KeyCodes::new(d);
    codes.extend(ctx, keys.len() / d, |i| &keys[i * d..(i + 1) * d]);
    codes
}

/// Attention, index and compressors.
fn sequence_wise(level: CpuLevel, filter: &str) -> Vec<Case> {
    let mut maker = Maker::new(level, filter);
    let (heads, d, window) = (64, 512, 128);
    for far in [0, 512, 4096] {
        let amount = 4 * heads * d * (window + far);
        maker.add(format!("attention, 128 + {far} rows"), Ceiling::F32, amount, move |ctx| {
            let (q, near, rows, sink) = (numbers(heads * d), numbers(window * d), numbers(far * d), numbers(heads));
            let mut out = vec![0.0; heads * d];
            move || {
                let pieces = [&rows[..]];
                let visible = |_| Visible { near: &near, far: RowList::new(d, &pieces), chosen: None };
                attend(ctx, d, black_box(&q), &sink, visible, &mut out);
            }
        });
    }
    // Queries of 512 of 4096 rows, as an index chooses them, of rows that were rounded when they came.
    for queries in [1, 64] {
        let amount = queries * 4 * heads * d * (window + 512);
        let name = format!("rounded attention, 128 + 512 of 4096 rows T={queries}");
        maker.add(name, Ceiling::F32, amount, move |ctx| {
            let (near, rows, sink) = (row_codes(ctx, d, window), row_codes(ctx, d, 4096), numbers(heads));
            let (q, mut out) = (numbers(queries * heads * d), vec![0.0; queries * heads * d]);
            let chosen: Vec<i32> = (0..512).map(|i| i * 8).collect();
            move || {
                let rows = Rows { near: near.rows(0..window), far: rows.rows(0..4096) };
                let seen = |_| Seen { near: 0..window, far: Far::Chosen(&chosen) };
                attend_rounded(ctx, black_box(&q), &sink, &rows, seen, &mut out);
            }
        });
    }
    // Rows of the chunks of a prompt, rounded when they come; from memory.
    let (rows, chunk) = (STREAMED / (4 * d), 512);
    maker.add("rounding of rows".into(), Ceiling::Read, rows * d * 4, move |ctx| {
        let (x, mut codes) = (numbers(rows * d), RowCodes::new(d));
        move || {
            for x in black_box(&x).chunks_exact(chunk * d) {
                codes.truncate(0);
                codes.extend(ctx, chunk, |i| &x[i * d..(i + 1) * d]);
            }
        }
    });
    maker.add("rounding of keys".into(), Ceiling::Read, rows * d * 4, move |ctx| {
        let (x, mut codes) = (numbers(rows * d), KeyCodes::new(128));
        move || {
            for x in black_box(&x).chunks_exact(chunk * d) {
                codes.truncate(0);
                codes.extend(ctx, chunk * d / 128, |i| &x[i * 128..(i + 1) * 128]);
            }
        }
    });
    // 512 of 4096 rows, as an index chooses them.
    maker.add("attention, 128 + 512 of 4096 rows".into(), Ceiling::F32, 4 * heads * d * (window + 512), move |ctx| {
        let (q, near, rows, sink) = (numbers(heads * d), numbers(window * d), numbers(4096 * d), numbers(heads));
        let chosen: Vec<i32> = (0..512).map(|i| i * 8).collect();
        let mut out = vec![0.0; heads * d];
        move || {
            let pieces = [&rows[..]];
            let visible = |_| Visible { near: &near, far: RowList::new(d, &pieces), chosen: Some(&chosen) };
            attend(ctx, d, black_box(&q), &sink, visible, &mut out);
        }
    });
    let (heads, d, top_k) = (64, 128, 512);
    for n in [1024, 4096] {
        let amount = 2 * heads * d * n;
        for (name, rounded) in [("index", false), ("rounded index", true)] {
            maker.add(format!("{name} scores, {n} keys"), Ceiling::F32, amount, move |ctx| {
                let (q, weights, keys, mut out) = (numbers(heads * d), numbers(heads), numbers(n * d), vec![0.0; n]);
                let codes = key_codes(ctx, d, &keys);
                move || {
                    let pieces = [&keys[..]];
                    let plain = Keys::Plain(RowList::new(d, &pieces));
                    let keys = if rounded { Keys::Rounded(codes.keys()) } else { plain };
                    let index = Index { heads, top_k, scale: 1.0, keys };
                    index_scores(ctx.level, &index, black_box(&q), &weights, &mut out);
                }
            });
            maker.add(format!("{name} scores + top 512, {n} keys"), Ceiling::F32, 4 * amount, move |ctx| {
                let t = 4;
                let (q, weights, keys) = (numbers(t * heads * d), numbers(t * heads), numbers(n * d));
                let mut ids = vec![0; t * top_k];
                let codes = key_codes(ctx, d, &keys);
                move || {
                    let pieces = [&keys[..]];
                    let plain = Keys::Plain(RowList::new(d, &pieces));
                    let keys = if rounded { Keys::Rounded(codes.keys()) } else { plain };
                    let index = Index { heads, top_k, scale: 1.0, keys };
                    index_topk(ctx, &index, black_box(&q), &weights, |_| n, &mut ids);
                }
            });
        }
    }
    // Blocks of a prompt: eight entries (two lanes of four tokens) of 512 channels, from memory.
    let (d, entries) = (512, 8);
    let blocks = STREAMED / (8 * d * entries);
    maker.add("compressor pooling".into(), Ceiling::Read, blocks * entries * d * 8, move |ctx| {
        let (kv, gate, mut out) = (numbers(blocks * entries * d), numbers(blocks * entries * d), vec![0.0; d]);
        move || {
            let blocks = black_box(&kv).chunks_exact(entries * d).zip(gate.chunks_exact(entries * d));
            for (kv, gate) in blocks {
                let row = |i: usize| (&kv[i * d..(i + 1) * d], &gate[i * d..(i + 1) * d]);
                let entries: [(&[f32], &[f32]); 8] = std::array::from_fn(row);
                pool(ctx.level, &entries, &mut out);
            }
        }
    });
    // 8 groups of 1024 outputs, of a row that 64 heads of 512 fill.
    let (groups, k, outputs) = (8, 4096, 1024);
    let fp8 = Format::Fp8Tile { scale: ScaleFormat::E8m0 };
    let read: usize = fp8.byte_lengths(groups * outputs, k).expect("the shape fits").iter().sum();
    maker.add("fp8 grouped product T=1".into(), Ceiling::Read, read, move |ctx| {
        let (w, x, mut out) = (weight(fp8, groups * outputs, k), numbers(groups * k), vec![0.0; groups * outputs]);
        move || grouped_matmul(ctx, black_box(&x), groups, &w, &mut out)
    });
    let packed = Int8Matrix::packed_bytes(groups * outputs, k) as usize;
    maker.add("fp8 packed x int8 grouped product T=1".into(), Ceiling::Read, packed, move |ctx| {
        let weights = vec![Int8Matrix::pack(ctx, &weight(fp8, groups * outputs, k)); 3];
        let (x, mut out, mut turn) = (numbers(groups * k), vec![0.0; groups * outputs], 0);
        move || {
            turn += 1;
            int8::grouped_matmul(ctx, black_box(&x), groups, &weights[turn % 3], &mut out);
        }
    });
    maker.cases
}

/// Hyper-connections and what is done to each number; operands of many tokens, so that they come from memory.
fn token_wise(level: CpuLevel, filter: &str) -> Vec<Case> {
    let mut maker = Maker::new(level, filter);
    let (s, d) = (4, 4096);
    for (t, d) in [(1, 1024), (256, 1024), (1, 4096), (64, 4096)] {
        // The mix product; weighted sums before, and after for each stream.
        let amount = 2 * t * s * d * ((2 + s) * s + 1 + (s + 1));
        maker.add(format!("hyper-connections of {d} pre + post T={t}"), Ceiling::F32, amount, move |ctx| {
            let (fn_, base, scale) = (numbers((2 + s) * s * s * d), numbers((2 + s) * s), numbers(3));
            let (mut x, mut y, mut mix) = (numbers(t * s * d), vec![0.0; t * d], vec![0.0; t * (s + s * s)]);
            move || {
                let p = hc_params(s, d, &fn_, &base, &scale);
                hc_pre(ctx, &p, black_box(&x), &mut y, &mut mix);
                hc_post(ctx, s, d, &y, &mix, &mut x);
            }
        });
    }
    maker.add("hyper-connections head T=64".into(), Ceiling::F32, 2 * 64 * s * d * (s + 1), move |ctx| {
        let (fn_, base, scale) = (numbers(s * s * d), numbers(s), numbers(1));
        let (x, mut y) = (numbers(64 * s * d), vec![0.0; 64 * d]);
        move || hc_head(ctx, &hc_params(s, d, &fn_, &base, &scale), black_box(&x), &mut y)
    });
    maker.add("mean of 4 streams".into(), Ceiling::Read, 512 * d * (s + 1) * 4, move |ctx| {
        let (x, mut out) = (numbers(512 * s * d), vec![0.0; 512 * d]);
        move || stream_mean(ctx, s, d, black_box(&x), &mut out)
    });
    // What class `official` does to rows of 512, read and written, and what `fast` keeps of them.
    let rows = 4096 * 512;
    type Round = fn(&mut [f32]);
    let roundings: [(&str, Round); 3] = [
        ("rounding to fp8", |x| x.chunks_exact_mut(512).for_each(|row| fake_fp8(row, 64))),
        ("rounding to fp4", |x| x.chunks_exact_mut(512).for_each(|row| fake_fp4(row, 32))),
        ("Hadamard transform of 128", |x| x.chunks_exact_mut(128).for_each(hadamard)),
    ];
    for (name, round) in roundings {
        maker.add(name.into(), Ceiling::Read, rows * 8, move |_| {
            let mut x = numbers(rows);
            move || round(black_box(&mut x))
        });
    }
    maker.add("rounding of 4096 rows to 12 bits".into(), Ceiling::Read, rows * 6, move |ctx| {
        let x = numbers(rows);
        move || {
            let mut codes = RowCodes::new(512);
            codes.extend(ctx, 4096, |i| &black_box(&x)[i * 512..(i + 1) * 512]);
        }
    });
    let t = 2048;
    let bytes = t * d * 4;
    maker.add("swiglu".into(), Ceiling::Read, 3 * bytes, move |ctx| {
        let (gate, up, mut out) = (numbers(t * d), numbers(t * d), vec![0.0; t * d]);
        move || swiglu(ctx, black_box(&gate), &up, Some(10.0), &mut out)
    });
    maker.add("rms norm".into(), Ceiling::Read, 2 * bytes, move |ctx| {
        let (x, w, mut out) = (numbers(t * d), numbers(d), vec![0.0; t * d]);
        move || rms_norm(ctx, black_box(&x), d, Some(&w), 1e-6, &mut out)
    });
    maker.add("head norm".into(), Ceiling::Read, 2 * bytes, move |ctx| {
        let (x, mut out) = (numbers(t * d), vec![0.0; t * d]);
        move || rms_norm(ctx, black_box(&x), 512, None, 1e-6, &mut out)
    });
    // 64 of 512 channels of each of 64 heads; read and written.
    maker.add("rope".into(), Ceiling::Read, 512 * 64 * 64 * 4 * 2, move |ctx| {
        let (heads, head) = (64, 512);
        let (mut x, positions) = (numbers(512 * heads * head), (0..512).collect::<Vec<i64>>());
        let freqs: Vec<f64> = (0..32).map(|i| 0.1f64.powf(f64::from(i) / 8.0)).collect();
        move || rope(ctx, black_box(&mut x), heads, &positions, &freqs, false)
    });
    maker.add("add".into(), Ceiling::Read, 3 * bytes, move |ctx| {
        let (mut x, y) = (numbers(t * d), numbers(t * d));
        move || add(ctx, black_box(&mut x), &y)
    });
    maker.add("embedding in bf16, 4 streams".into(), Ceiling::Read, 512 * d * (2 + 4 * s), move |ctx| {
        let table = weight(Format::Bf16, 4096, d);
        let (ids, mut out): (Vec<i32>, _) = ((0..512).map(|i| i * 7).collect(), vec![0.0; 512 * s * d]);
        move || embed(ctx, &table, black_box(&ids), s, &mut out)
    });
    // A score takes an exponential and a logarithm; what is read and written is little.
    maker.add("routing to 6 of 256 experts".into(), Ceiling::Read, t * 256 * 8, move |ctx| {
        let (logits, bias) = (numbers(t * 256), numbers(256));
        let (mut ids, mut weights) = (vec![0; t * 6], vec![0.0; t * 6]);
        move || {
            let params = RouteParams {
                scoring: Scoring::SqrtSoftplus,
                experts: 256,
                top_k: 6,
                bias: Some(&bias),
                table: None,
                normalise: true,
                scaling: 1.5,
            };
            route(ctx, &params, black_box(&logits), &[], &mut ids, &mut weights);
        }
    });
    maker.cases
}

fn hc_params<'a>(streams: usize, dim: usize, fn_: &'a [f32], base: &'a [f32], scale: &'a [f32]) -> HcParams<'a> {
    HcParams { streams, dim, sinkhorn_iters: 20, hc_eps: 1e-6, norm_eps: 1e-6, fn_, base, scale }
}
