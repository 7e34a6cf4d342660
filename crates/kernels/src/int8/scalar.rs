//! Integer products in plain Rust.

use super::pack::{ORDER, Strip};
use super::{GROUP, STRIP, TINY, XBlock};
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

/// `x ≈ scale · codes`, columns in the order of [`ORDER`]; returns the scale, NaN if a number is not finite, and
/// the sum of the codes. Each number is off by at most `max|x| / 253`.
pub(super) fn quantize(x: &[f32; GROUP], codes: &mut [i8; GROUP]) -> (f32, i32) {
    /// Adding this rounds to an integer (ties to even) and leaves it in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    // As integers NaN and infinity are larger than every number.
    let bits = x.iter().fold(0i32, |max, x| max.max((x.to_bits() & 0x7fff_ffff) as i32));
    let amax = f32::from_bits(bits as u32);
    let usable = amax.is_finite() && amax > TINY;
    let factor = if usable { 127.0 / amax } else { 0.0 };
    let mut rounded = [0i32; GROUP];
    let mut sum = 0;
    for (rounded, &x) in rounded.iter_mut().zip(x) {
        *rounded = ((x * factor + ROUND).to_bits() as i32) - ROUND.to_bits() as i32;
        sum += *rounded;
    }
    if !usable {
        *codes = [0; GROUP];
        return (if amax.is_finite() { 0.0 } else { f32::NAN }, 0);
    }
    for (code, &place) in codes.iter_mut().zip(&ORDER) {
        *code = rounded[place] as i8;
    }
    (amax / 127.0, sum)
}
