//! Dot products between a few vectors and many scattered rows: attention and index scores.
//!
//! Arithmetic of one product, whatever its neighbours: element `i` of the first `d - d mod 8` goes to lane `i mod 8`,
//! each lane is one chain of multiply-adds; lanes are added as `((0+1)+(2+3)) + ((4+5)+(6+7))`; the remaining elements
//! are added in order.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;

use crate::CpuLevel;
use crate::level::dispatch;

/// `out[i * stride + j] = a[i] · b[j]`.
///
/// - `a` `[A, d]`
/// - `b` rows of `d`
///
/// Accuracy: `(d/8 + 4) · ε · Σ|a·b|` (twice that for [`CpuLevel::Scalar`]).
pub(crate) fn dots(level: CpuLevel, a: &[f32], d: usize, b: &[&[f32]], out: &mut [f32], stride: usize) {
    assert!(d > 0 && a.len().is_multiple_of(d), "a must be [A, {d}]");
    assert!(b.iter().all(|row| row.len() == d), "rows must have {d} numbers");
    let count = a.len() / d;
    assert!(b.len() <= stride && (count == 0 || out.len() >= (count - 1) * stride + b.len()), "out is too short");
    dispatch!(level, scalar::dots(a, d, b, out, stride), avx2::dots(a, d, b, out, stride));
}
