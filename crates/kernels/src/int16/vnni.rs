//! Products of rounded rows with AVX-512 VNNI: 24 rows by 16 heads, or 8 heads by 32 channels, at a time; sums and scales of
//! AVX2 in wider registers.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{LANES, SHARE_MAX, STEP, Shares, avx2};
use crate::rounding::{ROUND, factor_of};

/// As [`avx2::products`], the same bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
pub(super) fn products(
    panel: &[u32],
    q_scales: &[f32],
    rows: &[&[u32]],
    pairs: Range<usize>,
    scales: &[f32],
    out: &mut [f32],
) {
    if q_scales.len() != LANES {
        return avx2::products(panel, q_scales, rows, pairs, scales, out);
    }
    let mut i = 0;
    while i < rows.len() {
        let (rows, scales, out) = (&rows[i..], &scales[i..], &mut out[i * LANES..]);
        i += match rows.len() {
            24.. => tile::<24>(panel, q_scales, rows, pairs.clone(), scales, out),
            12.. => tile::<12>(panel, q_scales, rows, pairs.clone(), scales, out),
            8.. => tile::<8>(panel, q_scales, rows, pairs.clone(), scales, out),
            4.. => tile::<4>(panel, q_scales, rows, pairs.clone(), scales, out),
            _ => tile::<1>(panel, q_scales, rows, pairs.clone(), scales, out),
        };
    }
}

/// The first `ROWS` rows by 16 heads; returns `ROWS`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
fn tile<const ROWS: usize>(
    panel: &[u32],
    q_scales: &[f32],
    rows: &[&[u32]],
    pairs: Range<usize>,
    scales: &[f32],
    out: &mut [f32],
) -> usize {
    let sums = chains::<ROWS>(panel, rows.first_chunk().expect("the caller has counted them"), pairs.clone());
    assert!(out.len() >= ROWS * LANES && q_scales.len() == LANES && scales.len() >= ROWS);
    for (i, sum) in sums.into_iter().enumerate() {
        // SAFETY: `out` has ROWS · 16 numbers and `q_scales` 16 (asserted above).
        unsafe {
            let out = out.as_mut_ptr().add(i * LANES);
            let scale = _mm512_mul_ps(_mm512_set1_ps(scales[i]), _mm512_loadu_ps(q_scales.as_ptr()));
            let sum = _mm512_cvtepi32_ps(sum);
            let score = match pairs.start == 0 {
                true => _mm512_mul_ps(sum, scale),
                false => _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(out)),
            };
            _mm512_storeu_ps(out, score);
        }
    }
    ROWS
}

/// The loop where the time goes. On its own, so that the compiler keeps the sums in registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
fn chains<const ROWS: usize>(panel: &[u32], rows: &[&[u32]; ROWS], pairs: Range<usize>) -> [__m512i; ROWS] {
    assert!(panel.len() == pairs.len() * LANES && rows.iter().all(|row| row.len() >= pairs.end));
    let mut acc = [_mm512_setzero_si512(); ROWS];
    for k in 0..pairs.len() {
        // SAFETY: pair k < pairs.len(), so its lanes lie inside `panel` (asserted above).
        let q = unsafe { _mm512_loadu_si512(panel.as_ptr().add(k * LANES).cast()) };
        for (acc, row) in acc.iter_mut().zip(rows) {
            // SAFETY: pairs.start + k < pairs.end, at most the length of the row (asserted above).
            let x = unsafe { *row.get_unchecked(pairs.start + k) };
            *acc = _mm512_dpwssd_epi32(*acc, q, _mm512_set1_epi32(x as i32));
        }
    }
    acc
}

/// As plain Rust does for 16 lanes, the same bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
pub(super) fn round_shares(p: &[[f32; LANES]], scales: &[f32], shares: &mut Shares) {
    let row = |i: usize| {
        // SAFETY: a row is 64 readable bytes and `loadu` has no alignment requirement.
        let p = unsafe { _mm512_loadu_ps(p[i].as_ptr()) };
        _mm512_mul_ps(p, _mm512_set1_ps(scales[i]))
    };
    let mut most = _mm512_setzero_si512();
    for i in 0..scales.len() {
        let magnitude = _mm512_and_si512(_mm512_castps_si512(row(i)), _mm512_set1_epi32(0x7fff_ffff));
        most = _mm512_max_epu32(most, magnitude);
    }
    let (mut largest, mut factors) = ([0.0; LANES], [0.0; LANES]);
    // SAFETY: `largest` is 64 writable bytes and `storeu` has no alignment requirement.
    unsafe { _mm512_storeu_ps(largest.as_mut_ptr(), _mm512_castsi512_ps(most)) };
    for (largest, (factor, step)) in largest.iter().zip(factors.iter_mut().zip(&mut shares.steps)) {
        (*factor, *step) = factor_of(*largest, SHARE_MAX);
    }
    // SAFETY: `factors` is 64 readable bytes and `loadu` has no alignment requirement.
    let factors = unsafe { _mm512_loadu_ps(factors.as_ptr()) };
    let usable = _mm512_cmpneq_ps_mask(factors, _mm512_setzero_ps());
    let code = |row| _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(row, factors), _mm512_set1_ps(ROUND)));
    for (i, pairs) in shares.pairs.as_chunks_mut::<LANES>().0.iter_mut().enumerate().take(scales.len().div_ceil(2)) {
        let low = _mm512_and_si512(code(row(2 * i)), _mm512_set1_epi32(0xffff));
        let high = if 2 * i + 1 < scales.len() { row(2 * i + 1) } else { _mm512_setzero_ps() };
        let both = _mm512_maskz_or_epi32(usable, low, _mm512_slli_epi32::<16>(code(high)));
        // SAFETY: `pairs` is 64 writable bytes and `storeu` has no alignment requirement.
        unsafe { _mm512_storeu_si512(pairs.as_mut_ptr().cast(), both) };
    }
}

/// As [`avx2::add_weighted`], the same bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
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
    for c in (0..pairs.len()).step_by(STEP) {
        let mut h = 0;
        while h < heads {
            let out = &mut out[h * stride..];
            h += match heads - h {
                1 => weighted::<1>(shares, h, lanes, rows, pairs.start, c, fade, stride, out),
                2 | 3 => weighted::<2>(shares, h, lanes, rows, pairs.start, c, fade, stride, out),
                4..8 => weighted::<4>(shares, h, lanes, rows, pairs.start, c, fade, stride, out),
                _ => weighted::<8>(shares, h, lanes, rows, pairs.start, c, fade, stride, out),
            };
        }
    }
}

/// Of the pairs from `start` on, `c..c + 16` of `H` heads from `first` on; returns `H`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
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
        out.len() >= (H - 1) * stride + 2 * c + 32 && first + H <= lanes && rows.len() * lanes <= shares.pairs.len()
    );
    let mut acc = [[_mm512_setzero_si512(); 2]; H];
    for (i, [a, b]) in rows.iter().enumerate() {
        assert!(start + c + 16 <= a.len() && start + c + 16 <= b.len());
        // SAFETY: start + c + 16 is at most the length of both rows (asserted above).
        let (a, b) = unsafe {
            (_mm512_loadu_si512(a.as_ptr().add(start + c).cast()), _mm512_loadu_si512(b.as_ptr().add(start + c).cast()))
        };
        let x = [_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)];
        for (h, acc) in acc.iter_mut().enumerate() {
            // SAFETY: first + h < lanes and i < rows.len(), so the index lies inside of the pairs (asserted above).
            let share = _mm512_set1_epi32(unsafe { *shares.pairs.get_unchecked(i * lanes + first + h) } as i32);
            acc[0] = _mm512_dpwssd_epi32(acc[0], x[0], share);
            acc[1] = _mm512_dpwssd_epi32(acc[1], x[1], share);
        }
    }
    // Of each eight channels, one register has the first four and the other the rest.
    let order = [
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31),
    ];
    for (h, [low, high]) in acc.into_iter().enumerate() {
        let (step, fade) = (_mm512_set1_ps(shares.steps[first + h]), _mm512_set1_ps(fade[first + h]));
        for (half, order) in order.into_iter().enumerate() {
            // SAFETY: channels 2c..2c + 32 of head h < H lie inside `out` (asserted above).
            unsafe {
                let out = out.as_mut_ptr().add(h * stride + 2 * c + 16 * half);
                let sum = _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(low, order, high));
                let sum = _mm512_mul_ps(sum, step);
                _mm512_storeu_ps(out, _mm512_fmadd_ps(fade, _mm512_loadu_ps(out), sum));
            }
        }
    }
    H
}
