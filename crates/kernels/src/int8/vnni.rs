//! Integer products with AVX-512 VNNI: sixteen outputs, those of two strips, by four columns in a register. The
//! multiplication broadcasts the activations itself and adds four products to 32 bits, so weights are made unsigned by an
//! offset that the sum of the activations takes away again.
//!
//! Integer sums are exact and the rest is as with AVX2, so the bits are the same.

use std::arch::x86_64::*;

use super::avx2::{AHEAD, Fp4Ahead, fp4_scales, fp4_table, load, load_bf16, load_codes, prefetch_packed};
use super::pack::Strip;
use super::{GROUP, ROW_BLOCK, STRIP, XBlock};

/// Outputs of both strips.
const OUTPUTS: usize = 2 * STRIP;

/// Sums of both strips for one row. A register in memory, which must not lie across two cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sums([f32; OUTPUTS]);

const ZERO: Sums = Sums([0.0; OUTPUTS]);

/// Sums of both strips for the rows of a block, overwritten; false, and nothing is done, if the two are stored in
/// different ways.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
pub(super) fn multiply_two(w: [&Strip; 2], x: XBlock, a: &mut [[f32; STRIP]], b: &mut [[f32; STRIP]]) -> bool {
    assert!(a.len() == b.len() && a.len() <= ROW_BLOCK);
    if let ([a], [b]) = (&mut *a, &mut *b) {
        // One row: its sums stay in a register.
        let mut total = [ZERO];
        let done = add_products(w, x, &mut total);
        split(&total[0], a, b);
        return done;
    }
    let mut sums = [ZERO; ROW_BLOCK];
    let done = add_products(w, x, &mut sums[..a.len()]);
    for ((sums, a), b) in sums.iter().zip(a).zip(b) {
        split(sums, a, b);
    }
    done
}

fn split(Sums(sums): &Sums, a: &mut [f32; STRIP], b: &mut [f32; STRIP]) {
    let (low, high) = sums.split_at(STRIP);
    a.copy_from_slice(low);
    b.copy_from_slice(high);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
fn add_products(w: [&Strip; 2], x: XBlock, sums: &mut [Sums]) -> bool {
    match w {
        [Strip::Fp4 { rows: a, scales: a_scales }, Strip::Fp4 { rows: b, scales: b_scales }] => {
            fp4([a, b], [a_scales, b_scales], x, sums);
        }
        [Strip::Packed { codes: a, scales: a_scales }, Strip::Packed { codes: b, scales: b_scales }] => {
            packed([a, b], [a_scales, b_scales], x, sums);
        }
        _ => return false,
    }
    true
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
fn fp4(rows: [&[&[u8]; STRIP]; 2], scales: [&[&[u8]; STRIP]; 2], x: XBlock, sums: &mut [Sums]) {
    let groups = scales[0][0].len();
    assert!(scales.iter().all(|scales| scales.iter().all(|scales| scales.len() == groups)));
    assert!(rows.iter().all(|rows| rows.iter().all(|row| row.len() == groups * 16)));
    let ahead = [0, 1].map(|i| Fp4Ahead::new(rows[i], scales[i], 2));
    for first in (0..groups).step_by(8) {
        let count = 8.min(groups - first);
        let w_scales = [fp4_scales(scales[0], first, count), fp4_scales(scales[1], first, count)];
        ahead.iter().for_each(|ahead| ahead.prefetch_scales(first));
        for g in first..first + count {
            ahead.iter().for_each(|ahead| ahead.prefetch_codes(g));
            // SAFETY: g < groups, and every row holds 16 bytes per group (asserted above).
            let w = unsafe { fp4_group(rows, g) };
            let w_scale = join(load(&w_scales[0][g - first]), load(&w_scales[1][g - first]));
            add_group(&w, w_scale, 0, x, g, sums);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
fn packed(codes: [&[[i8; STRIP * GROUP]]; 2], scales: [&[[u16; STRIP]]; 2], x: XBlock, sums: &mut [Sums]) {
    let [a, b] = codes;
    let ahead = AHEAD + size_of_val(a);
    for (g, ((a, b), (a_scales, b_scales))) in a.iter().zip(b).zip(scales[0].iter().zip(scales[1])).enumerate() {
        prefetch_packed(a, a_scales, ahead);
        prefetch_packed(b, b_scales, ahead);
        let ((a, _), (b, _)) = (a.as_chunks::<32>(), b.as_chunks::<32>());
        let unsigned = |i: usize| {
            let codes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(load_codes(&a[i])), load_codes(&b[i]));
            _mm512_xor_si512(codes, _mm512_set1_epi8(-128))
        };
        let w = std::array::from_fn(unsigned);
        add_group(&w, join(load_bf16(a_scales), load_bf16(b_scales)), 1, x, g, sums);
    }
}

/// Adds the products of group `g`, whose weights are too large by the offset `zero`, to the sums of each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
fn add_group(w: &[__m512i; 8], w_scale: __m512, zero: usize, x: XBlock, g: usize, sums: &mut [Sums]) {
    let place = g * sums.len()..(g + 1) * sums.len();
    let rows = x.codes[place.clone()].iter().zip(&x.scales[place.clone()]).zip(&x.zeros[place]);
    for (Sums(sums), ((x, x_scale), zeros)) in sums.iter_mut().zip(rows) {
        let (x, _) = x.as_chunks::<4>();
        let x = |i: usize| _mm512_set1_epi32(i32::from_le_bytes(x[i].map(|x| x as u8)));
        let (mut even, mut odd) = (_mm512_set1_epi32(zeros[zero]), _mm512_setzero_si512());
        for i in (0..8).step_by(2) {
            even = _mm512_dpbusd_epi32(even, w[i], x(i));
            odd = _mm512_dpbusd_epi32(odd, w[i + 1], x(i + 1));
        }
        let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
        let scale = _mm512_mul_ps(w_scale, _mm512_set1_ps(*x_scale));
        // SAFETY: `sums` is 64 readable and writable bytes, and neither has an alignment requirement.
        unsafe {
            let total = _mm512_loadu_ps(sums.as_ptr());
            _mm512_storeu_ps(sums.as_mut_ptr(), _mm512_fmadd_ps(sum, scale, total));
        }
    }
}

/// As with AVX2, the codes of the second strip in the upper half.
///
/// # Safety
///
/// Every row must have at least `16 · (g + 1)` bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
unsafe fn fp4_group(rows: [&[&[u8]; STRIP]; 2], g: usize) -> [__m512i; 8] {
    // Outputs o and o + 4 share a half from the start, so that only shuffles inside of 16 bytes remain.
    let quad = |o: usize| {
        // SAFETY: the caller's promise; there is no alignment requirement.
        let [a, b] = rows.map(|rows| unsafe {
            _mm256_loadu2_m128i(rows[o + 4].as_ptr().add(16 * g).cast(), rows[o].as_ptr().add(16 * g).cast())
        });
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
    };
    let [a, b, c, d] = [quad(0), quad(1), quad(2), quad(3)];
    let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    let bytes = [
        _mm512_unpacklo_epi64(ab_low, cd_low),
        _mm512_unpackhi_epi64(ab_low, cd_low),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ];
    let nibble = _mm512_set1_epi8(15);
    let table = _mm512_broadcast_i64x4(fp4_table());
    let half = |i: usize| {
        let nibbles = if i.is_multiple_of(2) { bytes[i / 2] } else { _mm512_srli_epi16::<4>(bytes[i / 2]) };
        _mm512_shuffle_epi8(table, _mm512_and_si512(nibbles, nibble))
    };
    std::array::from_fn(half)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
fn join(low: __m256, high: __m256) -> __m512 {
    let (low, high) = (_mm256_castps_pd(low), _mm256_castps_pd(high));
    _mm512_castpd_ps(_mm512_insertf64x4::<1>(_mm512_castpd256_pd512(low), high))
}
