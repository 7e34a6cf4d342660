//! Sums and the largest element.

use crate::Ctx;
use crate::parallel::for_each_row;

/// `a += b`. Exact to the rounding of one addition.
///
/// # Panics
///
/// If the lengths differ.
pub fn add(ctx: Ctx, a: &mut [f32], b: &[f32]) {
    /// Numbers per task.
    const PIECE: usize = 16384;
    assert_eq!(a.len(), b.len(), "a and b must have the same length");
    let sum = |a: &mut [f32], b: &[f32]| a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
    let (body, tail) = a.split_at_mut(b.len() - b.len() % PIECE);
    for_each_row(ctx.light(body.len()), body, PIECE, |i, a| sum(a, &b[i * PIECE..(i + 1) * PIECE]));
    sum(tail, &b[body.len()..]);
}

/// Index of the largest element, the lowest of several; NaN never wins. 0 if there is nothing else.
pub fn argmax(x: &[f32]) -> usize {
    let mut best: Option<(usize, f32)> = None;
    for (i, &x) in x.iter().enumerate() {
        if !x.is_nan() && best.is_none_or(|(_, max)| x > max) {
            best = Some((i, x));
        }
    }
    best.map_or(0, |(i, _)| i)
}
