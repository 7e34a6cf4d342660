//! Integer products with AVX2: eight outputs by four columns in a register, activations broadcast.

use std::arch::x86_64::*;

use super::pack::Strip;
use super::{GROUP, STRIP, TINY, XBlock};

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply(w: &Strip, x: XBlock, sums: &mut [[f32; STRIP]]) {
    match w {
        Strip::Fp4 { rows, scales } => match sums {
            [sums] => fp4_row(rows, scales, x, sums),
            _ => fp4(rows, scales, x, sums),
        },
        Strip::Packed { codes, scales } => match sums {
            [sums] => packed_row(codes, scales, x, sums),
            _ => packed(codes, scales, x, sums),
        },
    }
}

/// Codes 0..=24, twelve too large, so that four sums of two products fit into 16 bits: 4 · 2 · 24 · 127 = 24,384.
#[target_feature(enable = "avx2,fma,f16c")]
fn fp4(rows: &[&[u8]; STRIP], scales: &[&[u8]; STRIP], x: XBlock, sums: &mut [[f32; STRIP]]) {
    let (groups, n) = (scales[0].len(), sums.len());
    assert!(scales.iter().all(|scales| scales.len() == groups) && rows.iter().all(|row| row.len() == groups * 16));
    let ahead = Fp4Ahead::new(rows, scales, 1);
    for first in (0..groups).step_by(8) {
        let count = 8.min(groups - first);
        let w_scales = fp4_scales(scales, first, count);
        ahead.prefetch_scales(first);
        for (g, w_scale) in (first..first + count).zip(&w_scales) {
            ahead.prefetch_codes(g);
            // SAFETY: g < groups, and every row holds 16 bytes per group (asserted above).
            let w = unsafe { fp4_group(rows, g) };
            let w_scale = load(w_scale);
            let place = g * n..(g + 1) * n;
            let rows = x.codes[place.clone()].iter().zip(&x.scales[place.clone()]).zip(&x.zeros[place]);
            for (sums, ((x, x_scale), zero)) in sums.iter_mut().zip(rows) {
                store(sums, add_scaled(fp4_sum(&w, x, zero[0]), w_scale, *x_scale, load(sums)));
            }
        }
    }
}

/// [`fp4`] for one row, whose sums stay in a register. Two groups are read from each output at once; their products are
/// added up along the output, since a transposition as in [`fp4_group`] pays only where several rows use it.
#[target_feature(enable = "avx2,fma,f16c")]
fn fp4_row(rows: &[&[u8]; STRIP], scales: &[&[u8]; STRIP], x: XBlock, sums: &mut [f32; STRIP]) {
    let groups = scales[0].len();
    assert!(scales.iter().all(|scales| scales.len() == groups) && rows.iter().all(|row| row.len() == groups * 16));
    let ahead = Fp4Ahead::new(rows, scales, 1);
    let mut total = load(sums);
    for first in (0..groups).step_by(8) {
        let end = groups.min(first + 8);
        let w_scales = fp4_scales(scales, first, end - first);
        ahead.prefetch_scales(first);
        let mut add = |g: usize, sum: __m256i| {
            let sum = _mm256_add_epi32(sum, _mm256_set1_epi32(x.zeros[g][0]));
            total = add_scaled(sum, load(&w_scales[g - first]), x.scales[g], total);
        };
        for g in (first..end - end % 2).step_by(2) {
            ahead.prefetch_codes(g);
            ahead.prefetch_codes(g + 1);
            // SAFETY: g + 1 < groups, and every row holds 16 bytes per group (asserted above).
            let both = unsafe { fp4_two_groups(rows, g, &x.codes[g], &x.codes[g + 1]) };
            add(g, both[0]);
            add(g + 1, both[1]);
        }
        if end % 2 == 1 {
            let g = end - 1;
            ahead.prefetch_codes(g);
            // SAFETY: g < groups, and every row holds 16 bytes per group (asserted above).
            add(g, fp4_sum(&unsafe { fp4_group(rows, g) }, &x.codes[g], 0));
        }
    }
    store(sums, total);
}

/// Sums of the products of groups `g` and `g + 1` of eight outputs with one row.
///
/// # Safety
///
/// Every row must have at least `16 · (g + 2)` bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fp4_two_groups(rows: &[&[u8]; STRIP], g: usize, x0: &[i8; GROUP], x1: &[i8; GROUP]) -> [__m256i; 2] {
    // Even columns of a group in one half, odd ones in the other.
    let parted = |x| _mm256_permutevar8x32_epi32(load_codes(x), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    let (x0, x1) = (parted(x0), parted(x1));
    let (even, odd) = (_mm256_permute2x128_si256::<0x20>(x0, x1), _mm256_permute2x128_si256::<0x31>(x0, x1));
    let nibble = _mm256_set1_epi8(15);
    let table = fp4_table();
    let row = |o: usize| {
        // SAFETY: the caller's promise; there is no alignment requirement.
        let bytes = unsafe { _mm256_loadu_si256(rows[o].as_ptr().add(16 * g).cast()) };
        let low = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, nibble));
        let high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble));
        _mm256_add_epi16(_mm256_maddubs_epi16(low, even), _mm256_maddubs_epi16(high, odd))
    };
    // Four products in 16 bits, eight after one more sum: 8 · 24 · 127 = 24,384.
    let pair = |o: usize| {
        let (a, b) = (row(o), row(o + 1));
        let sums = _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
        _mm256_castsi256_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)))
    };
    let four = |o: usize| {
        let (a, b) = (pair(o), pair(o + 2));
        let (a, b) = (_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xdd>(a, b));
        _mm256_add_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))
    };
    let (a, b) = (four(0), four(4));
    [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)]
}

/// Twice the value of each code, plus 12.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fp4_table() -> __m256i {
    _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0))
}

/// Sums of the products of one group; `zero` takes away what the offset of the codes adds.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fp4_sum(w: &[__m256i; 8], x: &[i8; GROUP], zero: i32) -> __m256i {
    let (x, _) = x.as_chunks::<4>();
    let four = |i: usize| {
        let pair = |i: usize| _mm256_maddubs_epi16(w[i], broadcast(&x[i]));
        let (a, b) = (_mm256_add_epi16(pair(i), pair(i + 1)), _mm256_add_epi16(pair(i + 2), pair(i + 3)));
        _mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1))
    };
    _mm256_add_epi32(_mm256_add_epi32(four(0), four(4)), _mm256_set1_epi32(zero))
}

/// Bytes from what is multiplied to what is asked for from memory, about: some hundred nanoseconds of streaming.
pub(super) const AHEAD: usize = 8192;

/// Where the weights lie that a later strip will read while this one is at the same group: strips follow one another in
/// memory, but each is read along its eight rows at once.
pub(super) struct Fp4Ahead {
    codes: *const u8,
    scales: *const u8,
}

impl Fp4Ahead {
    /// At least `least` strips ahead.
    pub(super) fn new(rows: &[&[u8]; STRIP], scales: &[&[u8]; STRIP], least: usize) -> Self {
        let groups = scales[0].len();
        let strips = AHEAD.div_ceil((STRIP * groups * 16).max(1)).max(least);
        Self {
            codes: rows[0].as_ptr().wrapping_add(strips * STRIP * groups * 16),
            scales: scales[0].as_ptr().wrapping_add(strips * STRIP * groups),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn prefetch_codes(&self, g: usize) {
        for line in [0, 64] {
            _mm_prefetch::<_MM_HINT_T0>(self.codes.wrapping_add(g * 128 + line).cast());
        }
    }

    /// Those of the eight groups from `first` on.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn prefetch_scales(&self, first: usize) {
        _mm_prefetch::<_MM_HINT_T0>(self.scales.wrapping_add(first * 8).cast());
    }
}

/// Scales of up to eight groups from `first` on, `[group][output]`: half of 2^(b - 127), since codes are doubled.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn fp4_scales(scales: &[&[u8]; STRIP], first: usize, count: usize) -> [[f32; STRIP]; 8] {
    let mut out = [[0.0; STRIP]; 8];
    let word = |o: usize| match scales[o][first..first + count].try_into() {
        Ok(bytes) => i64::from_le_bytes(bytes),
        Err(_) => scales[o][first..first + count].iter().rev().fold(0, |word, byte| word << 8 | i64::from(*byte)),
    };
    let pair = |o: usize| _mm_unpacklo_epi8(_mm_cvtsi64_si128(word(o)), _mm_cvtsi64_si128(word(o + 1)));
    let [a, b, c, d] = [pair(0), pair(2), pair(4), pair(6)];
    let (ab, ab_high) = (_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b));
    let (cd, cd_high) = (_mm_unpacklo_epi16(c, d), _mm_unpackhi_epi16(c, d));
    let two_groups = [
        _mm_unpacklo_epi32(ab, cd),
        _mm_unpackhi_epi32(ab, cd),
        _mm_unpacklo_epi32(ab_high, cd_high),
        _mm_unpackhi_epi32(ab_high, cd_high),
    ];
    let wide = |i: usize| {
        let two = two_groups[i / 2];
        _mm256_cvtepu8_epi32(if i.is_multiple_of(2) { two } else { _mm_unpackhi_epi64(two, two) })
    };
    // Zero and one stand for subnormals (or are halved to one), 255 for NaN: hardly anybody writes them.
    let usual = two_groups.iter().fold(_mm_set1_epi8(-1), |usual, &two| {
        let clamped = _mm_min_epu8(_mm_max_epu8(two, _mm_set1_epi8(2)), _mm_set1_epi8(-2));
        _mm_and_si128(usual, _mm_cmpeq_epi8(two, clamped))
    });
    if _mm_movemask_epi8(usual) == 0xffff {
        for (i, out) in out.iter_mut().enumerate() {
            let half = _mm256_sub_epi32(wide(i), _mm256_set1_epi32(1));
            store(out, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(half)));
        }
        return out;
    }
    for (i, out) in out.iter_mut().enumerate() {
        let b = wide(i);
        let power = _mm256_max_epi32(_mm256_slli_epi32::<23>(b), _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_and_si256(_mm256_cmpeq_epi32(b, _mm256_set1_epi32(255)), _mm256_set1_epi32(0x0040_0000));
        let scale = _mm256_castsi256_ps(_mm256_or_si256(power, nan));
        store(out, _mm256_mul_ps(scale, _mm256_set1_ps(0.5)));
    }
    out
}

/// Products of magnitudes: weights give their sign to the activations, and 2 · 127 · 127 fits into 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
fn packed(codes: &[[i8; STRIP * GROUP]], scales: &[[u16; STRIP]], x: XBlock, sums: &mut [[f32; STRIP]]) {
    for (g, (codes, scales)) in codes.iter().zip(scales).enumerate() {
        prefetch_packed(codes, scales, AHEAD);
        let (codes, _) = codes.as_chunks::<32>();
        let magnitudes: [__m256i; 8] = std::array::from_fn(|i| _mm256_abs_epi8(load_codes(&codes[i])));
        let w_scale = load_bf16(scales);
        let n = sums.len();
        let place = g * n..(g + 1) * n;
        let rows = x.codes[place.clone()].iter().zip(&x.scales[place]);
        for (sums, (x, x_scale)) in sums.iter_mut().zip(rows) {
            let sum = packed_sum(|i| (magnitudes[i], load_codes(&codes[i])), x);
            store(sums, add_scaled(sum, w_scale, *x_scale, load(sums)));
        }
    }
}

/// [`packed`] for one row, whose sums stay in a register.
#[target_feature(enable = "avx2,fma,f16c")]
fn packed_row(codes: &[[i8; STRIP * GROUP]], scales: &[[u16; STRIP]], x: XBlock, sums: &mut [f32; STRIP]) {
    let mut total = load(sums);
    for ((codes, scales), (x, x_scale)) in codes.iter().zip(scales).zip(x.codes.iter().zip(x.scales)) {
        prefetch_packed(codes, scales, AHEAD);
        let (codes, _) = codes.as_chunks::<32>();
        let weights = |i: usize| {
            let codes = load_codes(&codes[i]);
            (_mm256_abs_epi8(codes), codes)
        };
        total = add_scaled(packed_sum(weights, x), load_bf16(scales), *x_scale, total);
    }
    store(sums, total);
}

/// Sums of the products of one group; `weights(i)` are the magnitudes and signs of the weights of place `i`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn packed_sum(weights: impl Fn(usize) -> (__m256i, __m256i), x: &[i8; GROUP]) -> __m256i {
    let (x, _) = x.as_chunks::<4>();
    let term = |i: usize| {
        let (magnitudes, signs) = weights(i);
        let x = _mm256_sign_epi8(broadcast(&x[i]), signs);
        _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, x), _mm256_set1_epi16(1))
    };
    let two = |i: usize| _mm256_add_epi32(term(i), term(i + 1));
    _mm256_add_epi32(_mm256_add_epi32(two(0), two(2)), _mm256_add_epi32(two(4), two(6)))
}

/// Asks for the weights that come `ahead` bytes after these: strips follow one another in memory.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn prefetch_packed(codes: &[i8; STRIP * GROUP], scales: &[u16; STRIP], ahead: usize) {
    let codes = codes.as_ptr().wrapping_add(ahead);
    for line in [0, 64, 128, 192] {
        _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(line));
    }
    _mm_prefetch::<_MM_HINT_T0>(scales.as_ptr().wrapping_add(ahead / GROUP).cast());
}

/// `total + sum · scales`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_scaled(sum: __m256i, w_scale: __m256, x_scale: f32, total: __m256) -> __m256 {
    let scale = _mm256_mul_ps(w_scale, _mm256_set1_ps(x_scale));
    _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, total)
}

/// The same numbers as [`super::scalar::quantize`], whatever `x`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantize(x: &[f32; GROUP], codes: &mut [i8; GROUP]) -> (f32, i32) {
    let (x, _) = x.as_chunks::<8>();
    let x: [__m256; 4] = std::array::from_fn(|i| load(&x[i]));
    // As integers NaN and infinity are larger than every number.
    let magnitude = |x: __m256| _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fff_ffff));
    let [a, b, c, d] = x.map(magnitude);
    let max = _mm256_max_epi32(_mm256_max_epi32(a, b), _mm256_max_epi32(c, d));
    let max = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    let max = _mm_max_epi32(max, _mm_shuffle_epi32::<0b01_00_11_10>(max));
    let max = _mm_max_epi32(max, _mm_shuffle_epi32::<0b10_11_00_01>(max));
    let amax = f32::from_bits(_mm_cvtsi128_si32(max) as u32);
    if !(amax.is_finite() && amax > TINY) {
        *codes = [0; GROUP];
        return (if amax.is_finite() { 0.0 } else { f32::NAN }, 0);
    }
    let factor = _mm256_set1_ps(127.0 / amax);
    let [a, b, c, d] = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, factor)));
    let sum = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
    let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
    let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b01_00_11_10>(sum));
    let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b10_11_00_01>(sum));
    // Packing leaves quads of columns in the order 0, 2, 4, 6 and 1, 3, 5, 7.
    let bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    let order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    // SAFETY: `codes` is 32 writable bytes and `storeu` has no alignment requirement.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), _mm256_shuffle_epi8(bytes, order)) };
    (amax / 127.0, _mm_cvtsi128_si32(sum))
}

/// Codes of group `g` of eight outputs: lane `o` of register `2d` holds four even columns of output `o`, from byte `4d`
/// on, register `2d + 1` the odd ones.
///
/// # Safety
///
/// Every row must have at least `16 · (g + 1)` bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fp4_group(rows: &[&[u8]; STRIP], g: usize) -> [__m256i; 8] {
    // Outputs o and o + 4 share a register from the start, so that only shuffles inside of 16 bytes remain.
    let pair = |o: usize| {
        // SAFETY: the caller's promise; there is no alignment requirement.
        unsafe { _mm256_loadu2_m128i(rows[o + 4].as_ptr().add(16 * g).cast(), rows[o].as_ptr().add(16 * g).cast()) }
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
    let table = fp4_table();
    let half = |i: usize| {
        let nibbles = if i.is_multiple_of(2) { bytes[i / 2] } else { _mm256_srli_epi16::<4>(bytes[i / 2]) };
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
pub(super) fn load_codes(codes: &[i8; 32]) -> __m256i {
    // SAFETY: `codes` is 32 readable bytes and `loadu` has no alignment requirement.
    unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load_bf16(scales: &[u16; STRIP]) -> __m256 {
    // SAFETY: `scales` is 16 readable bytes and `loadu` has no alignment requirement.
    let halves = unsafe { _mm_loadu_si128(scales.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load(lanes: &[f32; 8]) -> __m256 {
    // SAFETY: `lanes` is 32 readable bytes and `loadu` has no alignment requirement.
    unsafe { _mm256_loadu_ps(lanes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store(lanes: &mut [f32; 8], value: __m256) {
    // SAFETY: `lanes` is 32 writable bytes and `storeu` has no alignment requirement.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), value) };
}
