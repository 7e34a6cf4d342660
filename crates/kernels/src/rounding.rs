//! Rounding a group of numbers to integers with one scale.

use crate::CpuLevel;
use crate::level::compiled_per_level;

/// Largest magnitude that is rounded to zero: its reciprocal would overflow.
const TINY: f32 = 1e-30;
/// Adding this rounds to an integer (ties to even) and leaves it in the low mantissa bits: 1.5 · 2^23.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// What numbers up to `amax` are multiplied with to become codes up to `largest`, and what codes are multiplied with again.
/// If `amax` is not finite, codes are zero and stand for NaN.
#[inline(always)]
pub(crate) fn factor_of(amax: f32, largest: f32) -> (f32, f32) {
    let usable = amax > TINY && amax < f32::INFINITY;
    let step = if amax <= TINY { 0.0 } else { f32::NAN };
    (if usable { largest / amax } else { 0.0 }, if usable { amax / largest } else { step })
}

/// The largest magnitude; infinity or NaN if one is not finite.
pub(crate) fn largest_of(level: CpuLevel, x: &[f32]) -> f32 {
    let mut most = [0; 16];
    magnitudes(level, x, &mut most);
    f32::from_bits(most.into_iter().fold(0, u32::max))
}

compiled_per_level!(fn magnitudes(x: &[f32], most: &mut [u32; 16]) => magnitudes_body);

#[inline(always)]
fn magnitudes_body<const FMA: bool>(x: &[f32], most: &mut [u32; 16]) {
    let (whole, tail) = x.as_chunks::<16>();
    // As integers NaN and infinity are larger than every number.
    for x in whole {
        for (most, x) in most.iter_mut().zip(x) {
            *most = (*most).max(x.to_bits() & 0x7fff_ffff);
        }
    }
    for (most, x) in most.iter_mut().zip(tail) {
        *most = (*most).max(x.to_bits() & 0x7fff_ffff);
    }
}

compiled_per_level!(
    /// `codes[i] = round(x[i] · factor)`, up to 127; zeros if the factor is.
    fn codes_of(x: &[f32], factor: f32, codes: &mut [i8]) => codes_body
);

#[inline(always)]
fn codes_body<const FMA: bool>(x: &[f32], factor: f32, codes: &mut [i8]) {
    if factor == 0.0 {
        codes.fill(0);
    } else {
        codes.iter_mut().zip(x).for_each(|(code, x)| *code = (x * factor + ROUND).to_bits() as i8);
    }
}
