//! Decoding with AVX2 and F16C: codes are turned into IEEE halves by shifts or byte look-ups, then into `f32` by the
//! conversion instruction, which is exact for subnormals too.

use std::arch::x86_64::*;

use troika_base::storage::MX_GROUP;

use super::{RowCodes, Scales, scalar};

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode(row: RowCodes, out: &mut [f32]) {
    match row {
        RowCodes::F32(bytes) => scalar::plain_f32(bytes, out),
        RowCodes::Bf16(bytes) => scalar::plain_bf16(bytes, out),
        RowCodes::F16(bytes) => {
            let (halves, rest) = bytes.as_chunks::<16>();
            let (lanes, tail) = out.as_chunks_mut::<8>();
            for (halves, out) in halves.iter().zip(lanes) {
                store(out, _mm256_cvtph_ps(load16(halves)));
            }
            scalar::decode(RowCodes::F16(rest), tail);
        }
        // NaN codes would need work in the inner loop; nobody writes them, but they must not become numbers.
        RowCodes::E4m3 { codes, .. } if has_nan_code(codes) => scalar::decode(row, out),
        RowCodes::E4m3 { codes, scales, group: MX_GROUP } => {
            let ((codes, rest), (whole, tail)) = (codes.as_chunks::<MX_GROUP>(), out.as_chunks_mut::<MX_GROUP>());
            for (g, (out, codes)) in whole.iter_mut().zip(codes).enumerate() {
                e4m3_group(codes, scales.get(g), out);
            }
            if !tail.is_empty() {
                e4m3_group(rest, scales.get(whole.len()), tail);
            }
        }
        RowCodes::E4m3 { codes, scales, group } => {
            for (g, (out, codes)) in out.chunks_mut(group).zip(codes.chunks(group)).enumerate() {
                e4m3_group(codes, scales.get(g), out);
            }
        }
        RowCodes::E2m1 { codes, scales } => {
            let (codes, (whole, tail)) = (codes.chunks(MX_GROUP / 2), out.as_chunks_mut::<MX_GROUP>());
            let mut groups = codes.enumerate();
            for (out, (g, codes)) in whole.iter_mut().zip(&mut groups) {
                e2m1_group(codes.try_into().expect("a whole group"), scales.get(g), out);
            }
            if let (false, Some((g, codes))) = (tail.is_empty(), groups.next()) {
                let mut group = [0.0; MX_GROUP];
                let mut padded = [0; MX_GROUP / 2];
                padded[..codes.len()].copy_from_slice(codes);
                e2m1_group(&padded, scales.get(g), &mut group);
                tail.copy_from_slice(&group[..tail.len()]);
            }
        }
        RowCodes::Affine { codes, bits, group, scales, biases } => match bits {
            2 => affine::<2>(codes, group, scales, biases, out),
            3 => affine::<3>(codes, group, scales, biases, out),
            4 => affine::<4>(codes, group, scales, biases, out),
            5 => affine::<5>(codes, group, scales, biases, out),
            6 => affine::<6>(codes, group, scales, biases, out),
            8 => affine::<8>(codes, group, scales, biases, out),
            bits => unreachable!("a stored tensor has no {bits}-bit codes"),
        },
    }
}

/// Scales up to this size can be multiplied by 256 without overflow.
const LARGE_SCALE: f32 = 1e35;

/// Whether one of the codes is `0x7f` or `0xff`.
#[target_feature(enable = "avx2,fma,f16c")]
fn has_nan_code(codes: &[u8]) -> bool {
    let (whole, tail) = codes.as_chunks::<16>();
    let magnitude = _mm_set1_epi8(0x7f);
    let largest =
        whole.iter().fold(_mm_setzero_si128(), |max, codes| _mm_max_epu8(max, _mm_and_si128(load16(codes), magnitude)));
    _mm_movemask_epi8(_mm_cmpeq_epi8(largest, magnitude)) != 0 || tail.iter().any(|code| code & 0x7f == 0x7f)
}

/// Codes of one scale; none is NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn e4m3_group(codes: &[u8], scale: f32, out: &mut [f32]) {
    if scale.abs() > LARGE_SCALE {
        return scalar::e4m3_group(codes, scale, out);
    }
    // A code moved into a half has an exponent that is 8 too small (bias 15 against 7).
    let scale_256 = _mm256_set1_ps(scale * 256.0);
    let (codes, rest) = codes.as_chunks::<16>();
    let (lanes, tail) = out.as_chunks_mut::<16>();
    for (codes, out) in codes.iter().zip(lanes) {
        // The sign arrives in bits 15 and 14, of which the second belongs to the exponent.
        let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(load16(codes)));
        let half = _mm256_andnot_si256(_mm256_set1_epi16(0x4000), wide);
        let (low, high) = halves(out);
        store(low, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale_256));
        store(high, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half)), scale_256));
    }
    scalar::e4m3_group(rest, scale, tail);
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn e2m1_group(codes: &[u8; MX_GROUP / 2], scale: f32, out: &mut [f32; MX_GROUP]) {
    let scale = _mm256_set1_ps(scale);
    let bytes = load16(codes);
    let nibble = _mm_set1_epi8(15);
    let even = _mm_and_si128(bytes, nibble);
    let odd = _mm_and_si128(_mm_srli_epi16::<4>(bytes), nibble);
    // High bytes of the values as halves; their low bytes are zero.
    let table = _mm_setr_epi8(
        0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, -0x80, -0x48, -0x44, -0x42, -0x40, -0x3e, -0x3c, -0x3a,
    );
    let zero = _mm_setzero_si128();
    let (even, odd) = (_mm_shuffle_epi8(table, even), _mm_shuffle_epi8(table, odd));
    let (low, high) = (_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd));
    let halves = [
        _mm_unpacklo_epi8(zero, low),
        _mm_unpackhi_epi8(zero, low),
        _mm_unpacklo_epi8(zero, high),
        _mm_unpackhi_epi8(zero, high),
    ];
    for (out, half) in out.as_chunks_mut::<8>().0.iter_mut().zip(halves) {
        store(out, _mm256_mul_ps(_mm256_cvtph_ps(half), scale));
    }
}

/// For each of 8 codes of `bits` bits, the two bytes it lies in, in 16 bytes that hold the 8 codes twice.
const fn byte_pairs(bits: usize) -> [u8; 32] {
    let mut pairs = [0x80; 32];
    let mut i = 0;
    while i < 8 {
        pairs[4 * i] = (i * bits / 8) as u8;
        pairs[4 * i + 1] = (i * bits / 8 + 1) as u8;
        i += 1;
    }
    pairs
}

#[target_feature(enable = "avx2,fma,f16c")]
fn affine<const BITS: usize>(codes: &[u8], group: usize, scales: Scales, biases: Scales, out: &mut [f32]) {
    let b = BITS as i32;
    let [low, high] = const { byte_pairs(BITS) }.as_chunks::<16>().0 else { unreachable!("32 is two times 16") };
    let pairs = _mm256_set_m128i(load16(high), load16(low));
    let shifts = _mm256_setr_epi32(0, b % 8, 2 * b % 8, 3 * b % 8, 4 * b % 8, 5 * b % 8, 6 * b % 8, 7 * b % 8);
    let mask = _mm256_set1_epi32((1 << b) - 1);
    // Eight codes fill BITS whole bytes, and eight bytes are read; the last ones are padded.
    let word = |i: usize| match codes.get(i * BITS..i * BITS + 8) {
        Some(bytes) => u64::from_le_bytes(bytes.try_into().expect("8 bytes")),
        None => codes[i * BITS..(i + 1) * BITS].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)),
    };
    for (g, out) in out.chunks_mut(group).enumerate() {
        let (scale, bias) = (_mm256_set1_ps(scales.get(g)), _mm256_set1_ps(biases.get(g)));
        let first = g * group / 8;
        let eight = |i: usize| {
            let bytes = _mm256_shuffle_epi8(_mm256_set1_epi64x(word(first + i) as i64), pairs);
            let q = _mm256_and_si256(_mm256_srlv_epi32(bytes, shifts), mask);
            // Not fused: the product is rounded, as everywhere.
            _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(q), scale), bias)
        };
        let (whole, tail) = out.as_chunks_mut::<8>();
        for (i, out) in whole.iter_mut().enumerate() {
            store(out, eight(i));
        }
        if !tail.is_empty() {
            let mut lanes = [0.0; 8];
            store(&mut lanes, eight(whole.len()));
            tail.copy_from_slice(&lanes[..tail.len()]);
        }
    }
}

/// The two halves of 16 lanes.
#[inline(always)]
fn halves(out: &mut [f32; 16]) -> (&mut [f32; 8], &mut [f32; 8]) {
    let [low, high] = out.as_chunks_mut::<8>().0 else { unreachable!("16 is two times 8") };
    (low, high)
}

#[inline]
#[target_feature(enable = "avx2")]
fn load16(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: `bytes` is 16 readable bytes and `loadu` has no alignment requirement.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(lanes: &mut [f32; 8], value: __m256) {
    // SAFETY: `lanes` is 32 writable bytes and `storeu` has no alignment requirement.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), value) }
}
