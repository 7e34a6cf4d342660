//! Integer products with AVX2: eight outputs by four columns in a register, activations broadcast.

use std::arch::x86_64::*;

use super::pack::{Strip, fp4_scale};
use super::{GROUP, STRIP, XBlock};

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply(w: &Strip, x: XBlock, sums: &mut [[f32; STRIP]]) {
    match w {
        Strip::Fp4 { rows, scales } => fp4(rows, scales, x, sums),
        Strip::Packed { codes, scales } => packed(codes, scales, x, sums),
    }
}

/// Codes 0..=24, twelve too large, so that four sums of two products fit into 16 bits: 4 · 2 · 24 · 127 = 24,384.
#[target_feature(enable = "avx2,fma,f16c")]
fn fp4(rows: &[&[u8]; STRIP], scales: &[&[u8]; STRIP], x: XBlock, sums: &mut [[f32; STRIP]]) {
    let ones = _mm256_set1_epi16(1);
    for g in 0..scales[0].len() {
        let w = fp4_group(rows, g);
        let w_scale = load(&scales.map(|scales| fp4_scale(scales[g])));
        let n = sums.len();
        let place = g * n..(g + 1) * n;
        let rows = x.codes[place.clone()].iter().zip(&x.scales[place.clone()]).zip(&x.zeros[place]);
        for (sums, ((x, x_scale), zero)) in sums.iter_mut().zip(rows) {
            let (x, _) = x.as_chunks::<4>();
            let four = |i: usize| {
                let pair = |i: usize| _mm256_maddubs_epi16(w[i], broadcast(&x[i]));
                let (a, b) = (_mm256_add_epi16(pair(i), pair(i + 1)), _mm256_add_epi16(pair(i + 2), pair(i + 3)));
                _mm256_madd_epi16(_mm256_add_epi16(a, b), ones)
            };
            let sum = _mm256_add_epi32(_mm256_add_epi32(four(0), four(4)), _mm256_set1_epi32(*zero));
            add_scaled(sum, w_scale, *x_scale, sums);
        }
    }
}

/// Products of magnitudes: weights give their sign to the activations, and 2 · 127 · 127 fits into 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
fn packed(codes: &[[i8; STRIP * GROUP]], scales: &[[u16; STRIP]], x: XBlock, sums: &mut [[f32; STRIP]]) {
    let ones = _mm256_set1_epi16(1);
    for (g, (codes, scales)) in codes.iter().zip(scales).enumerate() {
        let (codes, _) = codes.as_chunks::<32>();
        let magnitudes: [__m256i; 8] = std::array::from_fn(|i| _mm256_abs_epi8(load_codes(&codes[i])));
        let w_scale = load_bf16(scales);
        let n = sums.len();
        let place = g * n..(g + 1) * n;
        let rows = x.codes[place.clone()].iter().zip(&x.scales[place]);
        for (sums, (x, x_scale)) in sums.iter_mut().zip(rows) {
            let (x, _) = x.as_chunks::<4>();
            let term = |i: usize| {
                let x = _mm256_sign_epi8(broadcast(&x[i]), load_codes(&codes[i]));
                _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes[i], x), ones)
            };
            let two = |i: usize| _mm256_add_epi32(term(i), term(i + 1));
            let sum = _mm256_add_epi32(_mm256_add_epi32(two(0), two(2)), _mm256_add_epi32(two(4), two(6)));
            add_scaled(sum, w_scale, *x_scale, sums);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_scaled(sum: __m256i, w_scale: __m256, x_scale: f32, sums: &mut [f32; STRIP]) {
    let scale = _mm256_mul_ps(w_scale, _mm256_set1_ps(x_scale));
    let total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, load(sums));
    // SAFETY: `sums` is 32 writable bytes and `storeu` has no alignment requirement.
    unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), total) };
}

/// Codes of group `g` of eight outputs: lane `o` of register `2d` holds four even columns of output `o`, from byte `4d`
/// on, register `2d + 1` the odd ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fp4_group(rows: &[&[u8]; STRIP], g: usize) -> [__m256i; 8] {
    let row = |o: usize| -> &[u8; 16] { rows[o][16 * g..].first_chunk().expect("a whole group") };
    // Outputs o and o + 4 share a register from the start, so that only shuffles inside of 16 bytes remain.
    let pair = |o: usize| {
        let (low, high) = (row(o), row(o + 4));
        // SAFETY: both are 16 readable bytes and there is no alignment requirement.
        unsafe { _mm256_loadu2_m128i(high.as_ptr().cast(), low.as_ptr().cast()) }
    };
    let [a, b, c, d] = [pair(0), pair(1), pair(2), pair(3)];
    let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    let bytes = [
        _mm256_unpacklo_epi64(ab_low, cd_low),
        _mm256_unpackhi_epi64(ab_low, cd_low),
        _mm256_unpacklo_epi64(ab_high, cd_high),
        _mm256_unpackhi_epi64(ab_high, cd_high),
    ];
    let nibble = _mm256_set1_epi8(15);
    // Twice the value of each code, plus 12.
    let table = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    let half = |i: usize| {
        let nibbles = if i % 2 == 0 { bytes[i / 2] } else { _mm256_srli_epi16::<4>(bytes[i / 2]) };
        _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, nibble))
    };
    std::array::from_fn(half)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn broadcast(x: &[i8; 4]) -> __m256i {
    _mm256_set1_epi32(i32::from_le_bytes(x.map(|x| x as u8)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_codes(codes: &[i8; 32]) -> __m256i {
    // SAFETY: `codes` is 32 readable bytes and `loadu` has no alignment requirement.
    unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_bf16(scales: &[u16; STRIP]) -> __m256 {
    // SAFETY: `scales` is 16 readable bytes and `loadu` has no alignment requirement.
    let halves = unsafe { _mm_loadu_si128(scales.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load(lanes: &[f32; 8]) -> __m256 {
    // SAFETY: `lanes` is 32 readable bytes and `loadu` has no alignment requirement.
    unsafe { _mm256_loadu_ps(lanes.as_ptr()) }
}
