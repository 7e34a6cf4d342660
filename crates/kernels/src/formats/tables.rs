//! Values of codes.

/// Value of every e4m3 code: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, `0x7f` and `0xff` are
/// NaN, the largest value is 448.
pub const E4M3: [f32; 256] = e4m3_table();

/// Value of every e2m1 code; bit 3 is the sign.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
        let magnitude = if exponent == 0 {
            mantissa as f32 / 512.0
        } else if exponent == 15 && mantissa == 7 {
            f32::NAN
        } else {
            f32::from_bits(((exponent as u32 + 120) << 23) | ((mantissa as u32) << 20))
        };
        table[code] = if code & 128 != 0 { -magnitude } else { magnitude };
        code += 1;
    }
    table
}

/// Value of an e8m0 code: `2^(code - 127)`, NaN for 255.
#[inline]
pub const fn e8m0_to_f32(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000), // 2^-127 is subnormal
        255 => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

/// Value of a bf16 number.
#[inline]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Value of an IEEE half.
#[inline]
pub const fn f16_to_f32(bits: u16) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let magnitude = (bits as u32 & 0x7fff) << 13;
    let value = if magnitude >= 0x7c00 << 13 {
        // Infinity or NaN: the exponent becomes all ones.
        f32::from_bits(magnitude | 0x7f80_0000)
    } else {
        // The exponent's bias differs by 112; a multiplication also normalises subnormals.
        f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)
    };
    f32::from_bits(value.to_bits() | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves() {
        assert_eq!(f16_to_f32(0x3c00), 1.0);
        assert_eq!(f16_to_f32(0xc000), -2.0);
        assert_eq!(f16_to_f32(0x7bff), 65504.0);
        assert_eq!(f16_to_f32(1), 2.0f32.powi(-24));
        assert_eq!(f16_to_f32(0x03ff), 1023.0 * 2.0f32.powi(-24));
        assert_eq!(f16_to_f32(0x7c00), f32::INFINITY);
        assert!(f16_to_f32(0x7e01).is_nan());
        assert_eq!(f16_to_f32(0x8000).to_bits(), (-0.0f32).to_bits());
    }
}
