//! Decoding with AVX2 and F16C: codes are turned into IEEE halves by shifts or byte look-ups, then into `f32` by the
//! conversion instruction, which is exact for subnormals too.

use std::arch::x86_64::*;

use troika_base::storage::MX_GROUP;

use super::{E2M1, RowCodes, scalar};

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode(codes: RowCodes, out: &mut [f32]) {
    match codes {
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
        RowCodes::E4m3 { codes, scales, group } => {
            for (g, (out, codes)) in out.chunks_mut(group).zip(codes.chunks(group)).enumerate() {
                e4m3_group(codes, scales.get(g), out);
            }
        }
        RowCodes::E2m1 { codes, scales } => {
            for (g, (out, codes)) in out.chunks_mut(MX_GROUP).zip(codes.chunks(MX_GROUP / 2)).enumerate() {
                e2m1_group(codes, scales.get(g), out);
            }
        }
        RowCodes::Affine { codes, bits, group, scales, biases } => {
            let bytes = group / 8 * usize::from(bits);
            for (g, (out, codes)) in out.chunks_mut(group).zip(codes.chunks(bytes)).enumerate() {
                let (scale, bias) = (scales.get(g), biases.get(g));
                match bits {
                    2 => affine_group::<2>(codes, scale, bias, out),
                    3 => affine_group::<3>(codes, scale, bias, out),
                    4 => affine_group::<4>(codes, scale, bias, out),
                    5 => affine_group::<5>(codes, scale, bias, out),
                    6 => affine_group::<6>(codes, scale, bias, out),
                    8 => affine_group::<8>(codes, scale, bias, out),
                    bits => unreachable!("a stored tensor has no {bits}-bit codes"),
                }
            }
        }
    }
}

/// Scales up to this size can be multiplied by 256 without overflow.
const LARGE_SCALE: f32 = 1e35;

#[target_feature(enable = "avx2,fma,f16c")]
fn e4m3_group(codes: &[u8], scale: f32, out: &mut [f32]) {
    // An e4m3 code moved into a half has an exponent that is 8 too small (bias 15 against 7).
    if scale.abs() > LARGE_SCALE {
        return scalar::e4m3_group(codes, scale, out);
    }
    let scale_256 = _mm256_set1_ps(scale * 256.0);
    let (codes, rest) = codes.as_chunks::<16>();
    let (lanes, tail) = out.as_chunks_mut::<16>();
    for (codes, out) in codes.iter().zip(lanes) {
        let wide = _mm256_cvtepu8_epi16(load16(codes));
        let magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
        let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
        let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)));
        let half = _mm256_or_si256(_mm256_slli_epi16::<7>(magnitude), sign);
        let half = _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
        let (low, high) = halves(out);
        store(low, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale_256));
        store(high, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half)), scale_256));
    }
    scalar::e4m3_group(rest, scale, tail);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn e2m1_group(codes: &[u8], scale: f32, out: &mut [f32]) {
    let (Ok(codes), Ok(out)) = (<&[u8; 16]>::try_from(codes), <&mut [f32; 32]>::try_from(&mut *out)) else {
        // Fewer columns than a group were asked for.
        for (i, out) in out.iter_mut().enumerate() {
            *out = E2M1[usize::from((codes[i / 2] >> (4 * (i % 2))) & 15)] * scale;
        }
        return;
    };
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
    for (part, codes) in [_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)].into_iter().enumerate() {
        let high_bytes = _mm_shuffle_epi8(table, codes);
        for (quarter, half) in
            [_mm_unpacklo_epi8(zero, high_bytes), _mm_unpackhi_epi8(zero, high_bytes)].into_iter().enumerate()
        {
            let lanes = &mut out.as_chunks_mut::<8>().0[2 * part + quarter];
            store(lanes, _mm256_mul_ps(_mm256_cvtph_ps(half), scale));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn affine_group<const BITS: usize>(codes: &[u8], scale: f32, bias: f32, out: &mut [f32]) {
    let b = BITS as i32;
    let shifts = _mm256_setr_epi32(0, b, 2 * b, 3 * b, 0, b, 2 * b, 3 * b);
    let mask = _mm256_set1_epi32((1 << b) - 1);
    let (scales, biases) = (_mm256_set1_ps(scale), _mm256_set1_ps(bias));
    // Eight codes fill BITS whole bytes; the first four of them end at bit 4 * BITS <= 32.
    let (words, _) = codes.as_chunks::<BITS>();
    let mut words = words.iter();
    let (lanes, tail) = out.as_chunks_mut::<8>();
    let eight = |word: &[u8; BITS]| {
        let mut bytes = [0; 8];
        bytes[..BITS].copy_from_slice(word);
        let word = u64::from_le_bytes(bytes);
        let (low, high) = (_mm_set1_epi32(word as i32), _mm_set1_epi32((word >> (4 * BITS)) as i32));
        let q = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set_m128i(high, low), shifts), mask);
        // Not fused: the product is rounded, as everywhere.
        _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(q), scales), biases)
    };
    for (out, word) in lanes.iter_mut().zip(&mut words) {
        store(out, eight(word));
    }
    if let Some(word) = words.next().filter(|_| !tail.is_empty()) {
        let mut lanes = [0.0; 8];
        store(&mut lanes, eight(word));
        tail.copy_from_slice(&lanes[..tail.len()]);
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
