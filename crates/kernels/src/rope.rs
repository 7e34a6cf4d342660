//! Rotary positions (model spec, 6.3). Angles are computed and reduced in `f64`, so that position 1,000,000 is as exact
//! as position 1; sines are then rounded to `f32`.

use crate::Ctx;
use crate::parallel::for_each_row_with;
use crate::scratch::Scratch;

/// Rotates adjacent pairs of the last `2 · freqs.len()` channels of each head: `(a, b)` becomes
/// `(a cos - b sin, a sin + b cos)` with the angle `positions[t] · freqs[j]`.
///
/// - `x`         `[T, heads·d]`, in place
/// - `positions` `[T]`
/// - `freqs`     radians per position, one per pair
/// - `inverse`   negates the angle
///
/// Every level gives the same bits. Accuracy: `3 · ε · (|a| + |b|)` of [`crate::reference::rope_row`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above, or a head is narrower than the rotated channels.
pub fn rope(ctx: Ctx, x: &mut [f32], heads: usize, positions: &[i64], freqs: &[f64], inverse: bool) {
    if positions.is_empty() {
        assert!(x.is_empty(), "x must be [T, heads x d] with T = 0");
        return;
    }
    assert!(
        heads > 0 && x.len().is_multiple_of(positions.len() * heads),
        "x must be [{}, {heads} x d]",
        positions.len()
    );
    let width = x.len() / positions.len();
    let head = width / heads;
    assert!(2 * freqs.len() <= head, "{} pairs do not fit into a head of {head}", freqs.len());
    if width == 0 {
        return;
    }
    for_each_row_with(
        ctx.light(x.len()),
        x,
        width,
        || Scratch::new(freqs.len()),
        |turns, t, x| {
            fill_turns(turns, positions[t], freqs, inverse);
            x.chunks_exact_mut(head).for_each(|head| rotate(head, turns));
        },
    );
}

/// [`rope`] of one head of one token: the same bits.
///
/// # Panics
///
/// If `x` is narrower than the rotated channels.
pub fn rope_row(x: &mut [f32], position: i64, freqs: &[f64], inverse: bool) {
    assert!(2 * freqs.len() <= x.len(), "{} pairs do not fit into {} channels", freqs.len(), x.len());
    let mut turns = Scratch::new(freqs.len());
    fill_turns(&mut turns, position, freqs, inverse);
    rotate(x, &turns);
}

/// Cosine and sine of each pair.
fn fill_turns(turns: &mut [(f32, f32)], position: i64, freqs: &[f64], inverse: bool) {
    for (turn, freq) in turns.iter_mut().zip(freqs) {
        let (sin, cos) = (position as f64 * freq).sin_cos();
        *turn = (cos as f32, if inverse { -sin as f32 } else { sin as f32 });
    }
}

fn rotate(x: &mut [f32], turns: &[(f32, f32)]) {
    let first = x.len() - 2 * turns.len();
    for ([a, b], &(cos, sin)) in x[first..].as_chunks_mut::<2>().0.iter_mut().zip(turns) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}
