//! Products of rows that are keys and values at once, rounded to twelve bits (attention in class `fast`).
//!
//! Channels are cut in absolute chains of 256. In a chain, a number of a row is `scale · code` with codes in -2047..=2047, of a
//! query -4095..=4095, and the share of a row in a weighted sum is one of 0..=16383 times the largest of its block. Sums of a
//! chain of channels or of a block of up to 64 rows are exact in 32 bits, whatever the level; they are scaled and added to
//! `f32` in order. Levels other than scalar give equal bits.
//!
//! Codes go in pairs of neighbouring channels, the first in the low half of a word: so multiplications of two take them.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod codes;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod vnni;

pub use codes::{CodedRows, RowCodes};

use std::ops::Range;

use crate::CpuLevel;
use crate::heads::{self, CHAIN, LANES};
use crate::level::{compiled_per_level, dispatch};
use crate::rounding::{ROUND, factor_of, largest_of};
use crate::scratch::Scratch;

/// Pairs of a chain.
pub(crate) const PAIRS: usize = CHAIN / 2;
/// Pairs of one step of the kernels; rows are filled up to a multiple.
pub(crate) const STEP: usize = 16;
/// Largest code of a row: 256 · 2047 · 4095 and 64 · 2047 · 16383 are below 2^31.
const ROW_MAX: f32 = 2047.0;
/// Largest code of a query.
const QUERY_MAX: f32 = 4095.0;
/// Largest code of a share.
const SHARE_MAX: f32 = 16383.0;
/// Rows whose weighted sum is exact.
const MOST_ROWS: usize = 64;
/// Pairs of a row of `d` numbers.
pub(crate) fn pairs_of(d: usize) -> usize {
    d.div_ceil(2).next_multiple_of(STEP)
}

/// Pairs and chains, thus scales, of a row.
#[derive(Clone, Copy, Debug)]
struct Shape {
    width: usize,
    chains: usize,
}

impl Shape {
    /// Of a row of `d` numbers.
    fn of(d: usize) -> Self {
        Self { width: pairs_of(d), chains: d.div_ceil(CHAIN) }
    }
}

/// Rounds the chains of one row; places after its last channel become zero. A chain with a number that is not finite has the
/// scale NaN.
fn round(level: CpuLevel, x: &[f32], largest: f32, pairs: &mut [u32], scales: &mut [f32]) {
    for ((x, pairs), scale) in x.chunks(CHAIN).zip(pairs.chunks_mut(PAIRS)).zip(scales) {
        let (factor, step) = factor_of(largest_of(level, x), largest);
        *scale = step;
        if factor == 0.0 {
            pairs.fill(0);
        } else {
            dispatch!(level, scalar::round(x, factor, pairs), avx2::round(x, factor, pairs));
        }
    }
}

/// Asks for a row that is read soon. Chosen rows lie far apart, so that a single one's misses would follow each other.
#[inline]
pub(crate) fn prefetch(pairs: &[u32]) {
    #[cfg(target_arch = "x86_64")]
    for line in pairs.chunks(16) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that the program can see, and the address is a valid one.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = pairs;
}

/// A query with its heads side by side, in panels as [`heads::pack`] makes them.
pub(crate) struct Query {
    /// `[pair][lanes]` of each panel, from `start` on, which begins a line of the cache: a load that crosses two is two loads.
    packed: Scratch<u32>,
    start: usize,
    /// `[chain][padded heads]`.
    scales: Scratch<f32>,
    width: usize,
    padded: usize,
}

impl Query {
    /// - `q` `[H, d]`
    pub(crate) fn new(level: CpuLevel, d: usize, q: &[f32]) -> Self {
        let Shape { width, chains } = Shape::of(d);
        let heads = q.len() / d;
        let (mut pairs, mut steps) = (Scratch::new(heads * width), Scratch::new(heads * chains));
        let places = pairs.chunks_exact_mut(width).zip(steps.chunks_exact_mut(chains));
        q.chunks_exact(d).zip(places).for_each(|(q, (pairs, steps))| round(level, q, QUERY_MAX, pairs, steps));
        let padded = heads::padded(heads);
        let mut packed = Scratch::new(padded * width + STEP);
        let start = line_offset(&packed);
        heads::pack(level, words(&pairs), width, words_mut(&mut packed[start..start + padded * width]));
        let mut scales = Scratch::new(chains * padded);
        for (chain, scales) in scales.chunks_exact_mut(padded).enumerate() {
            let scale_of = |h: usize| if h < heads { steps[h * chains + chain] } else { 0.0 };
            scales.iter_mut().enumerate().for_each(|(h, scale)| *scale = scale_of(h));
        }
        Self { packed, start, scales, width, padded }
    }

    /// The panel of `lanes` heads from `head` on: pairs of a chain and scales.
    pub(crate) fn panel(&self, head: usize, lanes: usize, chain: usize) -> (&[u32], &[f32]) {
        let panel = &self.packed[self.start..][head * self.width..(head + lanes) * self.width];
        let pairs = chain * PAIRS * lanes..self.width.min((chain + 1) * PAIRS) * lanes;
        (&panel[pairs], &self.scales[chain * self.padded + head..][..lanes])
    }
}

/// Words before the first that begins a line of the cache, of at least [`STEP`].
pub(crate) fn line_offset<T>(words: &[T]) -> usize {
    const { assert!(size_of::<T>() == 4) };
    words.as_ptr().align_offset(4 * STEP).min(STEP)
}

/// Words that are moved about as if they were numbers.
fn words(pairs: &[u32]) -> &[f32] {
    // SAFETY: both types have the same size and alignment, and every pattern of bits is a number.
    unsafe { std::slice::from_raw_parts(pairs.as_ptr().cast(), pairs.len()) }
}

fn words_mut(pairs: &mut [u32]) -> &mut [f32] {
    // SAFETY: as above, and every number is a word.
    unsafe { std::slice::from_raw_parts_mut(pairs.as_mut_ptr().cast(), pairs.len()) }
}

/// Scores of one chain: `out[i][lane] = panel[·][lane] · rows[i][at..]`, added to what is there unless `at` is 0.
///
/// - `panel`  of [`Query::panel`], with its scales
/// - `rows`   whole ones; the pairs of the panel's chain begin at `at`
/// - `scales` of the rows in this chain
/// - `out`    `[rows][lanes]`
pub(crate) fn products(
    level: CpuLevel,
    (panel, q_scales): (&[u32], &[f32]),
    rows: &[&[u32]],
    at: usize,
    scales: &[f32],
    out: &mut [f32],
) {
    let lanes = q_scales.len();
    assert!((lanes == 8 || lanes == LANES) && panel.len().is_multiple_of(lanes), "a panel has 8 or {LANES} lanes");
    let pairs = at..at + panel.len() / lanes;
    assert!(pairs.len() <= PAIRS && rows.iter().all(|row| row.len() >= pairs.end), "pairs of one chain");
    assert!(rows.len() == scales.len() && out.len() == rows.len() * lanes, "out must be [rows][{lanes}]");
    dispatch!(
        level,
        scalar::products(panel, q_scales, rows, pairs, scales, out),
        avx2::products(panel, q_scales, rows, pairs, scales, out),
        avx2::products(panel, q_scales, rows, pairs, scales, out),
        vnni::products(panel, q_scales, rows, pairs, scales, out)
    );
}

/// The shares of a block's rows in the weighted sum, rounded: two rows in a word.
pub(crate) struct Shares {
    /// `[pair of rows][lanes]`
    pairs: [u32; MOST_ROWS / 2 * LANES],
    steps: [f32; LANES],
}

impl Default for Shares {
    fn default() -> Self {
        Self { pairs: [0; MOST_ROWS / 2 * LANES], steps: [0.0; LANES] }
    }
}

/// Rounds `p[i][lane] · scales[i]`, not negative, against the largest of each lane.
fn round_shares(level: CpuLevel, p: &[f32], scales: &[f32], lanes: usize, shares: &mut Shares) {
    #[cfg(target_arch = "x86_64")]
    if lanes == LANES && level == CpuLevel::Avx512Vnni {
        level.assert_available();
        // SAFETY: the assertion above saw the instructions of the level on this CPU.
        return unsafe { vnni::round_shares(p.as_chunks().0, scales, shares) };
    }
    round_octets(level, p, scales, lanes, shares);
}

compiled_per_level!(
    /// The same, eight lanes at a time.
    fn round_octets(p: &[f32], scales: &[f32], lanes: usize, shares: &mut Shares) => round_shares_body
);

#[inline(always)]
fn round_shares_body<const FMA: bool>(p: &[f32], scales: &[f32], lanes: usize, shares: &mut Shares) {
    let (p, octets) = (p.as_chunks::<8>().0, lanes / 8);
    let row = |i: usize, v: usize| -> [f32; 8] { std::array::from_fn(|l| p[i * octets + v][l] * scales[i]) };
    for v in 0..octets {
        let mut most = [0u32; 8];
        for i in 0..scales.len() {
            let row = row(i, v);
            for l in 0..8 {
                most[l] = most[l].max(row[l].to_bits() & 0x7fff_ffff);
            }
        }
        let mut factors = [0.0; 8];
        for l in 0..8 {
            (factors[l], shares.steps[8 * v + l]) = factor_of(f32::from_bits(most[l]), SHARE_MAX);
        }
        let code = |x: f32, factor: f32| if factor == 0.0 { 0 } else { (x * factor + ROUND).to_bits() & 0xffff };
        for (i, pairs) in shares.pairs.as_chunks_mut::<8>().0.iter_mut().skip(v).step_by(octets).enumerate() {
            if 2 * i >= scales.len() {
                break;
            }
            let low = row(2 * i, v);
            let high = if 2 * i + 1 < scales.len() { row(2 * i + 1, v) } else { [0.0; 8] };
            for l in 0..8 {
                pairs[l] = code(low[l], factors[l]) | code(high[l], factors[l]) << 16;
            }
        }
    }
}

/// `out[h] = fade[h] · out[h] + Σ_i p[i][h] · scales[i] · rows[i]` for the channels of `pairs`, which belong to one chain.
///
/// - `p`      `[rows][lanes]`, not negative
/// - `rows`   whole ones, up to 64; if their number is odd, any other row after them
/// - `pairs`  a multiple of [`STEP`]
/// - `scales` of the rows in this chain
/// - `shares` what is left from the last call
/// - `out`    heads, `stride` numbers apart
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
pub(crate) fn add_weighted(
    level: CpuLevel,
    p: &[f32],
    rows: &[&[u32]],
    pairs: Range<usize>,
    scales: &[f32],
    fade: &[f32; LANES],
    shares: &mut Shares,
    stride: usize,
    out: &mut [f32],
) {
    let lanes = p.len() / scales.len();
    assert!(rows.len() == scales.len().next_multiple_of(2) && rows.len() <= MOST_ROWS);
    assert!(p.len() == scales.len() * lanes && lanes <= LANES && stride >= 2 * pairs.len());
    assert!(pairs.len().is_multiple_of(STEP) && rows.iter().all(|row| row.len() >= pairs.end));
    round_shares(level, p, scales, lanes, shares);
    let (rows, _) = rows.as_chunks::<2>();
    dispatch!(
        level,
        scalar::add_weighted(shares, lanes, rows, pairs, fade, stride, out),
        avx2::add_weighted(shares, lanes, rows, pairs, fade, stride, out),
        avx2::add_weighted(shares, lanes, rows, pairs, fade, stride, out),
        vnni::add_weighted(shares, lanes, rows, pairs, fade, stride, out)
    );
}
