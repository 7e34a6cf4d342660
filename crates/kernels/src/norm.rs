//! RMS norms.

use crate::Ctx;
use crate::level::compiled_per_level;
use crate::math::{lane_sum, mul_add};
use crate::parallel::for_each_row;

/// `out[t] = x[t] / √(mean(x[t]²) + eps) · weight`.
///
/// - `x`      `[T, dim]`; to normalise heads one by one pass `[T·H, d]`
/// - `weight` `[dim]`, or `None` for ones
/// - `out`    `[T, dim]`, overwritten
///
/// Accuracy: each output within `(dim/32 + 16) · ε` of its own magnitude in [`crate::reference::rms_norm`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn rms_norm(ctx: Ctx, x: &[f32], dim: usize, weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "out must be [T, dim]");
    check(dim, weight);
    for_each_row(ctx.light(x.len()), out, dim, |t, out| {
        out.copy_from_slice(&x[t * dim..(t + 1) * dim]);
        norm_row(ctx.level, out, weight, eps);
    });
}

/// [`rms_norm`] in place, the same bits.
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn rms_norm_in_place(ctx: Ctx, x: &mut [f32], dim: usize, weight: Option<&[f32]>, eps: f32) {
    check(dim, weight);
    for_each_row(ctx.light(x.len()), x, dim, |_, x| norm_row(ctx.level, x, weight, eps));
}

fn check(dim: usize, weight: Option<&[f32]>) {
    assert!(weight.is_none_or(|weight| weight.len() == dim), "weight must be [{dim}]");
}

compiled_per_level!(
    fn norm_row(x: &mut [f32], weight: Option<&[f32]>, eps: f32) => norm_row_body
);

#[inline(always)]
fn norm_row_body<const FMA: bool>(x: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let factor = rms_factor::<FMA>(x, eps);
    match weight {
        Some(weight) => x.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * factor * w),
        None => x.iter_mut().for_each(|x| *x *= factor),
    }
}

/// `1 / √(mean(x²) + eps)`.
#[inline(always)]
pub(crate) fn rms_factor<const FMA: bool>(x: &[f32], eps: f32) -> f32 {
    let squares = lane_sum(x, |sum, x| mul_add::<FMA>(x, x, sum));
    1.0 / (squares / x.len() as f32 + eps).sqrt()
}
