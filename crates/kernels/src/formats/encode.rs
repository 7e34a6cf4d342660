//! Rounding to storage formats: nearest, ties to even. Used by converters and tests, not by kernels.

use super::{E2M1, E4M3};

/// Nearest bf16; NaN stays NaN.
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Nearest half; overflow gives infinity, NaN stays NaN.
pub fn f32_to_f16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16) as u16 & 0x8000;
    let magnitude = x.abs();
    let half = if x.is_nan() {
        0x7e00
    } else if magnitude >= 65520.0 {
        0x7c00
    } else if magnitude < 6.103_515_6e-5 {
        // Subnormal halves are multiples of 2^-24.
        (f64::from(magnitude) * 16_777_216.0).round_ties_even() as u16
    } else {
        let bits = magnitude.to_bits() - (112 << 23);
        ((bits + 0xfff + ((bits >> 13) & 1)) >> 13) as u16
    };
    sign | half
}

/// Nearest e4m3 code; magnitudes above 448 saturate, NaN stays NaN.
pub fn f32_to_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7f;
    }
    sign | nearest(&E4M3[..127], x.abs()) as u8
}

/// Nearest e2m1 code; magnitudes above 6 saturate, NaN becomes 0.
pub fn f32_to_e2m1(x: f32) -> u8 {
    if x.is_nan() {
        return 0;
    }
    let sign = if x.is_sign_negative() { 8 } else { 0 };
    sign | nearest(&E2M1[..8], x.abs()) as u8
}

/// Index of the entry of an ascending table next to `x`; the even one of two equally near.
fn nearest(table: &[f32], x: f32) -> usize {
    let above = table.partition_point(|&value| value < x);
    if above == 0 || above == table.len() {
        return above.min(table.len() - 1);
    }
    // Exact: neighbours of short formats are small multiples of a power of two, and x lies between them.
    let (down, up) = (f64::from(x) - f64::from(table[above - 1]), f64::from(table[above]) - f64::from(x));
    if down < up || (down == up && above % 2 == 1) { above - 1 } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{bf16_to_f32, f16_to_f32};

    #[test]
    fn codes_survive_a_round_trip() {
        for code in 0..=255u8 {
            if code & 0x7f != 0x7f {
                assert_eq!(f32_to_e4m3(E4M3[usize::from(code)]), code);
            }
        }
        for code in 0..16u8 {
            assert_eq!(f32_to_e2m1(E2M1[usize::from(code)]), code);
        }
        for bits in 0..=u16::MAX {
            if !f16_to_f32(bits).is_nan() {
                assert_eq!(f32_to_f16(f16_to_f32(bits)), bits);
            }
            if !bf16_to_f32(bits).is_nan() {
                assert_eq!(f32_to_bf16(bf16_to_f32(bits)), bits);
            }
        }
    }

    #[test]
    fn ties_go_to_even() {
        assert_eq!(f32_to_e2m1(0.25), 0);
        assert_eq!(f32_to_e2m1(0.75), 2);
        assert_eq!(f32_to_e2m1(-5.0), 14);
        assert_eq!(f32_to_e4m3(1000.0), 0x7e);
        assert_eq!(f32_to_f16(1.0 + 2.0f32.powi(-11)), 0x3c00);
        assert_eq!(f32_to_f16(2.0f32.powi(-25)), 0);
        assert_eq!(f32_to_bf16(1.0 + 2.0f32.powi(-8)), 0x3f80);
        assert_eq!(f32_to_bf16(1.0 + 3.0 * 2.0f32.powi(-8)), 0x3f82);
    }
}
