//! Random operands, threads and bounds.

use std::sync::atomic::{AtomicUsize, Ordering};

use troika_base::storage::ScaleFormat;
use troika_base::{Format, SharedBytes, StoredTensor};
use troika_kernels::formats::{f32_to_bf16, f32_to_f16};
use troika_kernels::{CpuLevel, Ctx, KeyCodes, Parallel, RowCodes};

/// Half a unit in the last place of 1: the relative error of one rounding.
pub(crate) const EPS: f64 = 1.0 / (1u64 << 24) as f64;

/// A small generator, so that operands are a function of a seed.
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub(crate) fn word(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    /// Roughly normal, with unit variance.
    pub(crate) fn number(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.word() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum();
        sum * 1.732
    }

    pub(crate) fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.number()).collect()
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.word() as u8).collect()
    }
}

/// Every float format, with every kind of scale.
pub(crate) fn formats() -> Vec<Format> {
    let mut all = vec![Format::F32, Format::F16, Format::Bf16, Format::Mxfp8, Format::Mxfp4];
    for scale in [ScaleFormat::E8m0, ScaleFormat::F32, ScaleFormat::Bf16, ScaleFormat::F16] {
        all.push(Format::Fp8Tile { scale });
    }
    for bits in [2, 3, 4, 5, 6, 8] {
        for (group, scale) in [(32, ScaleFormat::F16), (64, ScaleFormat::Bf16), (128, ScaleFormat::F32)] {
            all.push(Format::Affine { bits, group, scale });
        }
    }
    all
}

/// Columns nearest to `cols` that the format can hold.
pub(crate) fn fit_cols(format: Format, cols: usize) -> usize {
    let group = match format {
        Format::Mxfp8 | Format::Mxfp4 => 32,
        Format::Affine { group, .. } => usize::from(group),
        _ => 1,
    };
    cols.next_multiple_of(group)
}

/// A tensor of finite numbers of moderate size.
pub(crate) fn tensor(noise: &mut Noise, format: Format, rows: usize, cols: usize) -> StoredTensor {
    let [data, scales, biases] = format.byte_lengths(rows, cols).expect("the format fits the shape");
    let data = match format {
        Format::F32 => noise.numbers(data / 4).iter().flat_map(|x| x.to_le_bytes()).collect(),
        Format::F16 => noise.numbers(data / 2).iter().flat_map(|&x| f32_to_f16(x).to_le_bytes()).collect(),
        Format::Bf16 => noise.numbers(data / 2).iter().flat_map(|&x| f32_to_bf16(x).to_le_bytes()).collect(),
        // No NaN: clear one bit of the two NaN codes.
        Format::Fp8Tile { .. } | Format::Mxfp8 => {
            noise.bytes(data).into_iter().map(|b| if b & 0x7f == 0x7f { b & 0xfe } else { b }).collect()
        }
        _ => noise.bytes(data),
    };
    let scale_format = match format {
        Format::Fp8Tile { scale } | Format::Affine { scale, .. } => scale,
        _ => ScaleFormat::E8m0,
    };
    let mut encode = |bytes: usize, offset: f32| -> Vec<u8> {
        (0..bytes / scale_format.bytes())
            .flat_map(|_| {
                let x = noise.number() * 0.1 + offset;
                match scale_format {
                    ScaleFormat::E8m0 => vec![118 + noise.below(8) as u8],
                    ScaleFormat::F32 => x.to_le_bytes().to_vec(),
                    ScaleFormat::Bf16 => f32_to_bf16(x).to_le_bytes().to_vec(),
                    ScaleFormat::F16 => f32_to_f16(x).to_le_bytes().to_vec(),
                }
            })
            .collect()
    };
    let (scales, biases) = (encode(scales, 0.1), encode(biases, -0.5));
    stored(format, rows, cols, [data, scales, biases])
}

pub(crate) fn stored(format: Format, rows: usize, cols: usize, parts: [Vec<u8>; 3]) -> StoredTensor {
    StoredTensor::new(format, rows, cols, parts.map(SharedBytes::new)).expect("parts fit the shape")
}

/// Threads made for each call: tests only.
pub(crate) struct Threads(pub(crate) usize);

impl Parallel for Threads {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..self.0.min(tasks) {
                scope.spawn(|| {
                    loop {
                        let task = next.fetch_add(1, Ordering::Relaxed);
                        if task >= tasks {
                            break;
                        }
                        body(task);
                    }
                });
            }
        });
    }
}

/// Every level of this CPU on one thread.
pub(crate) fn serial_contexts() -> impl Iterator<Item = Ctx<'static>> {
    CpuLevel::available().map(|level| Ctx { level, ..Ctx::serial() })
}

/// How many roundings of `Scalar` count for one of a level that fuses multiply-adds.
pub(crate) fn roundings(level: CpuLevel) -> f64 {
    if level == CpuLevel::Scalar { 2.0 } else { 1.0 }
}

/// `|got - want| <= bound(i)` for every element; the message names the worst place.
pub(crate) fn within(got: &[f32], want: &[f32], bound: impl Fn(usize) -> f64) -> Result<(), String> {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - f64::from(want)).abs();
        // Half a unit of the wanted number is lost when the reference rounds it.
        let bound = bound(i) + EPS * f64::from(want).abs();
        if error.is_nan() || error > bound {
            return Err(format!("element {i} is {got}, not {want}: off by {error:e}, allowed {bound:e}"));
        }
    }
    Ok(())
}

/// The same bits.
pub(crate) fn same_bits(got: &[f32], want: &[f32]) -> Result<(), String> {
    assert_eq!(got.len(), want.len());
    match got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits()) {
        Some(i) => Err(format!("element {i} is {} instead of {}", got[i], want[i])),
        None => Ok(()),
    }
}

/// Rows of `d` rounded, in two goes.
pub(crate) fn row_codes(ctx: Ctx, d: usize, rows: &[f32]) -> RowCodes {
    let (mut codes, n) = (RowCodes::new(d), rows.len() / d);
    codes.extend(ctx, n / 3, |i| &rows[i * d..(i + 1) * d]);
    codes.extend(ctx, n - n / 3, |i| &rows[(n / 3 + i) * d..(n / 3 + i + 1) * d]);
    codes
}

/// Keys of `d` rounded, in two goes.
pub(crate) fn key_codes(ctx: Ctx, d: usize, keys: &[f32]) -> KeyCodes {
    let (mut codes, n) = (KeyCodes::new(d), keys.len() / d);
    codes.extend(ctx, n / 3, |i| &keys[i * d..(i + 1) * d]);
    codes.extend(ctx, n - n / 3, |i| &keys[(n / 3 + i) * d..(n / 3 + i + 1) * d]);
    codes
}
