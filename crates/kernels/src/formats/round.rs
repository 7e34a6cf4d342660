//! The dynamic rounding of the official code (model spec, section 4): values are rounded to a short format and written
//! back as `f32`. Exact, so every CPU and level gives the same bits.

/// Rounds each group of `group` values to e4m3 with a power-of-two scale, in place: the smallest scale `s` for which
/// `max(amax, 1e-4) / 448 <= s`, ties to even. A shorter last group has its own scale.
///
/// # Panics
///
/// If `group` is 0.
pub fn fake_fp8(x: &mut [f32], group: usize) {
    for group in x.chunks_mut(group) {
        let scale = power_of_two_scale(amax(group).max(1e-4), 1.0 / 448.0);
        for x in group {
            *x = round_e4m3((*x / scale).clamp(-448.0, 448.0)) * scale;
        }
    }
}

/// Rounds each group of `group` values to e2m1 with a power-of-two scale, in place: the smallest scale `s` for which
/// `max(amax, 6 * 2^-126) / 6 <= s`, ties to the even code. A shorter last group has its own scale.
///
/// # Panics
///
/// If `group` is 0.
pub fn fake_fp4(x: &mut [f32], group: usize) {
    for group in x.chunks_mut(group) {
        let scale = power_of_two_scale(amax(group).max(6.0 * f32::MIN_POSITIVE), 1.0 / 6.0);
        for x in group {
            *x = round_e2m1((*x / scale).clamp(-6.0, 6.0)) * scale;
        }
    }
}

/// Multiplies `x` by the orthonormal Walsh-Hadamard matrix in Sylvester order, in place: the transform is its own
/// inverse. Additions run in the order of the fast transform, the scale `1/sqrt(n)` is applied last; within
/// `log2(n) * epsilon` of the largest magnitude that occurs.
///
/// # Panics
///
/// If the length is not a power of two.
pub fn hadamard(x: &mut [f32]) {
    assert!(x.len().is_power_of_two(), "the Hadamard transform needs a power of two, not {}", x.len());
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (a, b) = pair.split_at_mut(half);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let scale = (1.0 / (x.len() as f64).sqrt()) as f32;
    for x in x {
        *x *= scale;
    }
}

fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0f32, |max, x| max.max(x.abs()))
}

/// Smallest power of two that is at least `amax * factor`, the product rounded to `f32`.
pub fn power_of_two_scale(amax: f32, factor: f32) -> f32 {
    let bits = (amax * factor).to_bits();
    let exponent = (bits >> 23) + u32::from(bits & 0x007f_ffff != 0);
    f32::from_bits(exponent << 23)
}

/// Nearest e4m3 value of `x` in -448..=448, ties to even.
fn round_e4m3(x: f32) -> f32 {
    let bits = x.to_bits();
    if x.is_nan() {
        x
    } else if x.abs() < 0.015_625 {
        // Below 2^-6 the grid is 2^-9.
        ((x * 512.0).round_ties_even() / 512.0).copysign(x)
    } else {
        // Keep three bits of mantissa; a carry moves into the exponent.
        f32::from_bits((bits + 0x7_ffff + ((bits >> 20) & 1)) & !0xf_ffff)
    }
}

/// Nearest e2m1 value of `x` in -6..=6, ties to the even code.
fn round_e2m1(x: f32) -> f32 {
    let a = x.abs();
    // The grid is 0.5 up to 2, then 1 up to 4, then 2; even multiples of the step are even codes.
    let step = if a < 2.0 {
        0.5
    } else if a < 4.0 {
        1.0
    } else {
        2.0
    };
    ((a / step).round_ties_even() * step).copysign(x)
}
