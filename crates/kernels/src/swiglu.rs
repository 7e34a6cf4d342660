//! The gated activation of a feed-forward expert (model spec, 9.3).

use crate::level::compiled_per_level;
use crate::math::{exp, max_nan, min_nan};
use crate::parallel::for_each_row;
use crate::{CpuLevel, Ctx};

/// `out = silu(min(gate, limit)) · clamp(up, -limit, limit)`; no clamping for `None`.
///
/// All three have the same length, any shape.
///
/// Accuracy: within `8 · ε` of its own magnitude in [`crate::reference::swiglu`], or `1e-36 · (1 + |up|)` where that is
/// more (gates below -88).
///
/// # Panics
///
/// If the lengths differ.
pub fn swiglu(ctx: Ctx, gate: &[f32], up: &[f32], limit: Option<f32>, out: &mut [f32]) {
    /// Numbers per task.
    const PIECE: usize = 4096;
    assert!(gate.len() == out.len() && up.len() == out.len(), "gate, up and out must have the same length");
    let whole = out.len() - out.len() % PIECE;
    let (body, tail) = out.split_at_mut(whole);
    for_each_row(ctx.light(body.len()), body, PIECE, |i, out| {
        let range = i * PIECE..(i + 1) * PIECE;
        out.copy_from_slice(&gate[range.clone()]);
        swiglu_in_place(ctx.level, out, &up[range], limit, 1.0);
    });
    tail.copy_from_slice(&gate[whole..]);
    swiglu_in_place(ctx.level, tail, &up[whole..], limit, 1.0);
}

/// [`swiglu`] with `out` in the place of `gate`, times `factor`.
pub(crate) fn swiglu_in_place(level: CpuLevel, gate: &mut [f32], up: &[f32], limit: Option<f32>, factor: f32) {
    activate(level, gate, up, limit.unwrap_or(f32::INFINITY), factor);
}

compiled_per_level!(
    fn activate(gate: &mut [f32], up: &[f32], limit: f32, factor: f32) => activate_body
);

#[inline(always)]
fn activate_body<const FMA: bool>(gate: &mut [f32], up: &[f32], limit: f32, factor: f32) {
    for (gate, &up) in gate.iter_mut().zip(up) {
        let g = min_nan(*gate, limit);
        let u = max_nan(min_nan(up, limit), -limit);
        *gate = g / (1.0 + exp::<FMA>(-g)) * u * factor;
    }
}
