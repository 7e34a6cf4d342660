//! Integer products in plain Rust.

use super::pack::Strip;
use super::{STRIP, XBlock};
use crate::formats::{E2M1, bf16_to_f32, e8m0_to_f32};

pub(super) fn multiply(w: &Strip, x: XBlock, sums: &mut [[f32; STRIP]]) {
    let n = sums.len();
    for g in 0..w.groups() {
        let (codes, scales) = group(w, g);
        for (r, sums) in sums.iter_mut().enumerate() {
            let (x, x_scale) = (&x.codes[g * n + r], x.scales[g * n + r]);
            for (lane, sum) in sums.iter_mut().enumerate() {
                let terms = x
                    .iter()
                    .enumerate()
                    .map(|(place, x)| i32::from(*x) * i32::from(codes[place / 4 * 32 + lane * 4 + place % 4]));
                *sum += terms.sum::<i32>() as f32 * (scales[lane] * x_scale);
            }
        }
    }
}

/// Codes of one group in the packed order, and their scales.
fn group(w: &Strip, g: usize) -> ([i8; 256], [f32; STRIP]) {
    match w {
        Strip::Packed { codes, scales } => (codes[g], scales[g].map(bf16_to_f32)),
        Strip::Fp4 { rows, scales } => {
            let mut codes = [0; 256];
            for (lane, row) in rows.iter().enumerate() {
                for (i, byte) in row[16 * g..16 * g + 16].iter().enumerate() {
                    for (high, code) in [byte & 15, byte >> 4].into_iter().enumerate() {
                        codes[(i / 4 * 2 + high) * 32 + lane * 4 + i % 4] = (E2M1[usize::from(code)] * 2.0) as i8;
                    }
                }
            }
            (codes, scales.map(|scales| e8m0_to_f32(scales[g]) * 0.5))
        }
    }
}
