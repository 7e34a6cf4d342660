//! Small arithmetic that kernels share. Everything is generic over `FMA`: with it multiply-adds are fused, which is
//! only cheap where the caller is compiled for a CPU that has the instruction.
//!
//! All functions are branch-free, element by element, and inlined, so that the compiler vectorises the loops around
//! them; a vector lane and a scalar tail then execute the same operations and give the same bits.

/// `a * b + c`.
#[inline(always)]
pub(crate) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `e^x` within 2 ULP of the exact value, subnormal results included; 0 below -104, infinity above 88.73.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    /// Adding this rounds to an integer (ties to even) and leaves it in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    // ln 2 in two parts: the first has 9 trailing zero bits, so `n * LN2_HI` is exact for |n| <= 150.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // The comparisons keep NaN, which neither clamp replaces.
    let c = if x < -105.0 { -105.0 } else { x };
    let c = if c > 89.0 { 89.0 } else { c };
    let shifted = mul_add::<FMA>(c, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = mul_add::<FMA>(n, -LN2_HI, c);
    let r = mul_add::<FMA>(n, -LN2_LO, r);
    // Cephes' minimax polynomial of (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2.
    let mut p = 1.987_569_1e-4;
    for k in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = mul_add::<FMA>(p, r, k);
    }
    let e = mul_add::<FMA>(p, r * r, r) + 1.0;
    // 2^n in two factors, since n runs from -152 to 129.
    let n = (shifted.to_bits().wrapping_sub(ROUND.to_bits())) as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    e * power(half) * power(n.wrapping_sub(half))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

/// The smaller one; NaN if `x` is NaN.
#[inline(always)]
pub(crate) fn min_nan(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// The larger one; NaN if `x` is NaN.
#[inline(always)]
pub(crate) fn max_nan(x: f32, limit: f32) -> f32 {
    if x < limit { limit } else { x }
}

/// Number of partial sums of [`lane_sum`].
const LANES: usize = 32;

/// Sum of `f(x)` over the slice: element `i` goes to partial sum `i mod 32`, the partial sums are added as a tree. The
/// order depends on indices only.
#[inline(always)]
pub(crate) fn lane_sum(x: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = f(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = f(*lane, x);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate() {
        let mut worst = [0.0f64; 2];
        for i in 0..2_000_000 {
            let x = -104.5 + f32::from_bits(0x3f80_0000) * (i as f32) * (193.5 / 2e6);
            let want = f64::from(x).exp();
            for (worst, got) in worst.iter_mut().zip([exp::<false>(x), exp::<true>(x)]) {
                let ulp = if want < f64::from(f32::MIN_POSITIVE) {
                    f64::from(f32::from_bits(1))
                } else {
                    f64::from((want as f32).next_up()) - f64::from(want as f32)
                };
                if want < f64::from(f32::MAX) {
                    *worst = worst.max((f64::from(got) - want).abs() / ulp);
                }
            }
        }
        assert!(worst.iter().all(|&w| w < 2.0), "{worst:?} ULP");
    }

    #[test]
    fn exp_of_specials() {
        for exp in [exp::<false>, exp::<true>] {
            assert_eq!(exp(0.0), 1.0);
            assert_eq!(exp(-0.0), 1.0);
            assert_eq!(exp(f32::NEG_INFINITY), 0.0);
            assert_eq!(exp(-200.0), 0.0);
            assert_eq!(exp(f32::INFINITY), f32::INFINITY);
            assert_eq!(exp(89.0), f32::INFINITY);
            assert!(exp(f32::NAN).is_nan());
        }
    }

    #[test]
    fn lanes_cover_everything() {
        for n in [0, 1, 31, 32, 33, 100] {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            assert_eq!(lane_sum(&x, |a, b| a + b), (0..n).sum::<i32>() as f32);
        }
    }
}
