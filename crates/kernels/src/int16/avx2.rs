//! Products of rounded rows with AVX2: sums of two products at once.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{LANES, STEP, Shares};

/// As plain Rust does, whatever `x`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn round(x: &[f32], factor: f32, pairs: &mut [u32]) {
    assert!(2 * pairs.len() >= x.len());
    let (whole, tail) = x.as_chunks::<16>();
    let (places, rest) = pairs.split_at_mut(8 * whole.len());
    for (x, place) in whole.iter().zip(places.as_chunks_mut::<8>().0) {
        sixteen(x, factor, place);
    }
    rest.fill(0);
    if !tail.is_empty() {
        let mut padded = [0.0; 16];
        padded[..tail.len()].copy_from_slice(tail);
        sixteen(&padded, factor, rest.first_chunk_mut().expect("pairs come in multiples of eight"));
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sixteen(x: &[f32; 16], factor: f32, place: &mut [u32; 8]) {
    let factor = _mm256_set1_ps(factor);
    let half = |i: usize| {
        // SAFETY: i is 0 or 8, and `x` has 16 numbers.
        let x = unsafe { _mm256_loadu_ps(x.as_ptr().add(i)) };
        _mm256_cvtps_epi32(_mm256_mul_ps(x, factor))
    };
    let codes = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(half(0), half(8)));
    // SAFETY: `place` is 32 writable bytes and `storeu` has no alignment requirement.
    unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), codes) };
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn products(
    panel: &[u32],
    q_scales: &[f32],
    rows: &[&[u32]],
    pairs: Range<usize>,
    scales: &[f32],
    out: &mut [f32],
) {
    let lanes = q_scales.len();
    let mut i = 0;
    while i < rows.len() {
        let (rows, scales, out) = (&rows[i..], &scales[i..], &mut out[i * lanes..]);
        i += match (lanes, rows.len()) {
            (8, 6..) => tile::<1, 6>(panel, q_scales, rows, pairs.clone(), scales, out),
            (8, 3..) => tile::<1, 3>(panel, q_scales, rows, pairs.clone(), scales, out),
            (8, _) => tile::<1, 1>(panel, q_scales, rows, pairs.clone(), scales, out),
            (_, 5..) => tile::<2, 5>(panel, q_scales, rows, pairs.clone(), scales, out),
            (_, 2..) => tile::<2, 2>(panel, q_scales, rows, pairs.clone(), scales, out),
            _ => tile::<2, 1>(panel, q_scales, rows, pairs.clone(), scales, out),
        };
    }
}

/// The first `ROWS` rows by `8 · VECS` heads; returns `ROWS`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tile<const VECS: usize, const ROWS: usize>(
    panel: &[u32],
    q_scales: &[f32],
    rows: &[&[u32]],
    pairs: Range<usize>,
    scales: &[f32],
    out: &mut [f32],
) -> usize {
    let sums = chains::<VECS, ROWS>(panel, rows.first_chunk().expect("the caller has counted them"), pairs.clone());
    assert!(out.len() >= ROWS * 8 * VECS && q_scales.len() == 8 * VECS && scales.len() >= ROWS);
    for (i, sums) in sums.into_iter().enumerate() {
        for (v, sum) in sums.into_iter().enumerate() {
            // SAFETY: `out` has ROWS · VECS · 8 numbers and `q_scales` VECS · 8 (asserted above).
            unsafe {
                let out = out.as_mut_ptr().add((i * VECS + v) * 8);
                let scale = _mm256_mul_ps(_mm256_set1_ps(scales[i]), _mm256_loadu_ps(q_scales.as_ptr().add(8 * v)));
                let sum = _mm256_cvtepi32_ps(sum);
                let score = match pairs.start == 0 {
                    true => _mm256_mul_ps(sum, scale),
                    false => _mm256_fmadd_ps(sum, scale, _mm256_loadu_ps(out)),
                };
                _mm256_storeu_ps(out, score);
            }
        }
    }
    ROWS
}

/// The loop where the time goes. On its own, so that the compiler keeps the sums in registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn chains<const VECS: usize, const ROWS: usize>(
    panel: &[u32],
    rows: &[&[u32]; ROWS],
    pairs: Range<usize>,
) -> [[__m256i; VECS]; ROWS] {
    assert!(panel.len() == pairs.len() * 8 * VECS && rows.iter().all(|row| row.len() >= pairs.end));
    let mut acc = [[_mm256_setzero_si256(); VECS]; ROWS];
    for k in 0..pairs.len() {
        let mut q = [_mm256_setzero_si256(); VECS];
        for (v, q) in q.iter_mut().enumerate() {
            // SAFETY: pair k < pairs.len(), so its lanes lie inside `panel` (asserted above).
            *q = unsafe { _mm256_loadu_si256(panel.as_ptr().add((k * VECS + v) * 8).cast()) };
        }
        for (acc, row) in acc.iter_mut().zip(rows) {
            // SAFETY: pairs.start + k < pairs.end, at most the length of the row (asserted above).
            let x = _mm256_set1_epi32(unsafe { *row.get_unchecked(pairs.start + k) } as i32);
            for (acc, &q) in acc.iter_mut().zip(&q) {
                *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(x, q));
            }
        }
    }
    acc
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn add_weighted(
    shares: &Shares,
    lanes: usize,
    rows: &[[&[u32]; 2]],
    pairs: Range<usize>,
    fade: &[f32; LANES],
    stride: usize,
    out: &mut [f32],
) {
    let heads = out.len().div_ceil(stride);
    for c in (0..pairs.len()).step_by(STEP / 2) {
        let mut h = 0;
        while h < heads {
            let out = &mut out[h * stride..];
            h += match heads - h {
                1 => weighted::<1>(shares, h, lanes, rows, pairs.start, c, fade, stride, out),
                2 | 3 => weighted::<2>(shares, h, lanes, rows, pairs.start, c, fade, stride, out),
                _ => weighted::<4>(shares, h, lanes, rows, pairs.start, c, fade, stride, out),
            };
        }
    }
}

/// Of the pairs from `start` on, `c..c + 8` of `H` heads from `first` on; returns `H`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
fn weighted<const H: usize>(
    shares: &Shares,
    first: usize,
    lanes: usize,
    rows: &[[&[u32]; 2]],
    start: usize,
    c: usize,
    fade: &[f32; LANES],
    stride: usize,
    out: &mut [f32],
) -> usize {
    assert!(
        out.len() >= (H - 1) * stride + 2 * c + 16 && first + H <= lanes && rows.len() * lanes <= shares.pairs.len()
    );
    let mut acc = [[_mm256_setzero_si256(); 2]; H];
    for (i, [a, b]) in rows.iter().enumerate() {
        assert!(start + c + 8 <= a.len() && start + c + 8 <= b.len());
        // SAFETY: start + c + 8 is at most the length of both rows (asserted above).
        let (a, b) = unsafe {
            (_mm256_loadu_si256(a.as_ptr().add(start + c).cast()), _mm256_loadu_si256(b.as_ptr().add(start + c).cast()))
        };
        let x = [_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)];
        for (h, acc) in acc.iter_mut().enumerate() {
            // SAFETY: first + h < lanes and i < rows.len(), so the index lies inside of the pairs (asserted above).
            let share = _mm256_set1_epi32(unsafe { *shares.pairs.get_unchecked(i * lanes + first + h) } as i32);
            acc[0] = _mm256_add_epi32(acc[0], _mm256_madd_epi16(share, x[0]));
            acc[1] = _mm256_add_epi32(acc[1], _mm256_madd_epi16(share, x[1]));
        }
    }
    for (h, [low, high]) in acc.into_iter().enumerate() {
        // Of each eight channels, one register has the first four and the other the rest.
        let halves = [_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high)];
        let (step, fade) = (_mm256_set1_ps(shares.steps[first + h]), _mm256_set1_ps(fade[first + h]));
        for (half, sum) in halves.into_iter().enumerate() {
            // SAFETY: channels 2c..2c + 16 of head h < H lie inside `out` (asserted above).
            unsafe {
                let out = out.as_mut_ptr().add(h * stride + 2 * c + 8 * half);
                let sum = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), step);
                _mm256_storeu_ps(out, _mm256_fmadd_ps(fade, _mm256_loadu_ps(out), sum));
            }
        }
    }
    H
}
