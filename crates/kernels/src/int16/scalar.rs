//! Products of rounded rows in plain Rust.

use std::ops::Range;

use super::{LANES, Shares};
use crate::rounding::ROUND;

fn parts(pair: u32) -> [i32; 2] {
    [i32::from(pair as i16), i32::from((pair >> 16) as i16)]
}

pub(super) fn round(x: &[f32], factor: f32, pairs: &mut [u32]) {
    let code = |x: Option<&f32>| x.map_or(0, |x| (x * factor + ROUND).to_bits() & 0xffff);
    for (i, pair) in pairs.iter_mut().enumerate() {
        *pair = code(x.get(2 * i)) | code(x.get(2 * i + 1)) << 16;
    }
}

pub(super) fn products(
    panel: &[u32],
    q_scales: &[f32],
    rows: &[&[u32]],
    pairs: Range<usize>,
    scales: &[f32],
    out: &mut [f32],
) {
    let lanes = q_scales.len();
    for ((row, scale), out) in rows.iter().zip(scales).zip(out.chunks_exact_mut(lanes)) {
        let mut sums = [0i32; LANES];
        for (&pair, column) in row[pairs.clone()].iter().zip(panel.chunks_exact(lanes)) {
            let [x, y] = parts(pair);
            for (sum, &q) in sums.iter_mut().zip(column) {
                let [a, b] = parts(q);
                *sum += x * a + y * b;
            }
        }
        for ((out, sum), q_scale) in out.iter_mut().zip(sums).zip(q_scales) {
            let product = sum as f32 * (scale * q_scale);
            *out = if pairs.start == 0 { product } else { *out + product };
        }
    }
}

pub(super) fn add_weighted(
    shares: &Shares,
    lanes: usize,
    rows: &[[&[u32]; 2]],
    pairs: Range<usize>,
    fade: &[f32; LANES],
    stride: usize,
    out: &mut [f32],
) {
    for (h, out) in out.chunks_mut(stride).enumerate() {
        for (c, pair) in pairs.clone().enumerate() {
            let mut sums = [0i32; 2];
            for ([a, b], shares) in rows.iter().zip(shares.pairs.chunks_exact(lanes)) {
                let [first, second] = parts(shares[h]);
                for (sum, (a, b)) in sums.iter_mut().zip(parts(a[pair]).into_iter().zip(parts(b[pair]))) {
                    *sum += first * a + second * b;
                }
            }
            for (out, sum) in out[2 * c..2 * c + 2].iter_mut().zip(sums) {
                *out = fade[h] * *out + sum as f32 * shares.steps[h];
            }
        }
    }
}
