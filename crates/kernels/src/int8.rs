//! Integer products: activations rounded to eight bits per row and group of 32 columns (class `fast`).
//!
//! Arithmetic of one output: columns are cut in absolute groups of 32. In a group, activations are `scale · q` with
//! `q` in -127..=127 ([`quantize`]), weights are integers times one scale per output; the integer sum is exact, whatever
//! the level, and `sum · (weight scale · activation scale)` is added to one `f32` chain in group order. So a row has the
//! same bits alone and among others.
//!
//! | stored weights | as integers | error of the weights |
//! |---|---|---|
//! | [`Mxfp4`](troika_base::Format::Mxfp4) | codes doubled, -12..=12, read as stored | none |
//! | any other float format | -127..=127 per output and 32 columns, packed by [`Int8Matrix::pack`] | half a step: 1/254 of the largest of the 32 |
//!
//! A strip of eight outputs by 32 columns stays in eight registers while all rows of a block pass by: weights are
//! unpacked once per block of rows. `pack.rs` has the layouts, `channel.rs` products of some output channels, `experts.rs` the feed-forward experts.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod channel;
mod experts;
mod pack;
mod scalar;

use std::ops::Range;

pub use channel::{channels_matmul, is_cut};
pub use experts::{Int8Expert, routed_experts, shared_expert};
pub use pack::Int8Matrix;

use crate::Ctx;
use crate::level::{compiled_per_level, dispatch};
use crate::parallel::{Disjoint, run_tasks};
use pack::Strip;

/// Columns that share a scale.
pub const GROUP: usize = 32;
/// Outputs of a strip.
const STRIP: usize = 8;
/// Rows that pass by while a strip stays in registers: with 4096 columns they fill half of a small L2.
const ROW_BLOCK: usize = 64;

/// `out[t] = x[t] · wᵀ` with activations rounded to eight bits.
///
/// - `x`   `[T, w.cols()]`
/// - `out` `[T, w.rows()]`, overwritten; NaN where a group of `x` holds a number that is not finite
///
/// Accuracy: each output within `Σ_g |w|·max_g|x|/253` (rounded activations) plus `Σ|x|·e_w` (rounded weights, see the
/// table above) plus `(K/32 + 4) · ε · Σ|x·w|` of [`crate::reference::matmul`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn matmul(ctx: Ctx, x: &[f32], w: &Int8Matrix, out: &mut [f32]) {
    grouped_matmul(ctx, x, 1, w, out);
}

/// Block-diagonal product: `out[t, g·r .. (g+1)·r] = x[t, g·K .. (g+1)·K] · w[g·r .. (g+1)·r]ᵀ` for each group `g`.
///
/// - `x`   `[T, groups·w.cols()]`
/// - `w`   `[groups·r, w.cols()]`
/// - `out` `[T, groups·r]`, overwritten
///
/// Accuracy as [`matmul`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above.
pub fn grouped_matmul(ctx: Ctx, x: &[f32], groups: usize, w: &Int8Matrix, out: &mut [f32]) {
    assert!(groups > 0 && w.rows().is_multiple_of(groups), "{} rows do not make {groups} groups", w.rows());
    let (width, outputs) = (groups * w.cols(), w.rows());
    let rows = out.len().checked_div(outputs).or(x.len().checked_div(width)).unwrap_or(0);
    assert_eq!(x.len(), rows * width, "x must be [T, {width}] with T = {rows}");
    assert_eq!(out.len(), rows * outputs, "out must be [T, {outputs}] with T = {rows}");
    if rows == 0 || outputs == 0 || width == 0 {
        out.fill(0.0);
        return;
    }
    let per_group = outputs / groups;
    assert!(groups == 1 || per_group.is_multiple_of(STRIP), "groups of {per_group} outputs do not fill strips");
    let blocks: Vec<Range<usize>> = row_blocks(0..rows).collect();
    let quantized = Quantized::new(ctx, &blocks, groups, w.cols(), |t| &x[t * width..(t + 1) * width]);
    let out = Disjoint::new(out);
    let strips = outputs.div_ceil(STRIP);
    let tasks = strip_tasks(ctx, strips, rows * width);
    run_tasks(ctx, tasks, |task| {
        let mut sums = [[0.0; STRIP]; ROW_BLOCK];
        for block in &blocks {
            for strip in strips * task / tasks..strips * (task + 1) / tasks {
                let first = strip * STRIP;
                let sums = &mut sums[..block.len()];
                multiply(ctx, &w.strip(strip), quantized.block(block.clone(), first / per_group), sums);
                let count = STRIP.min(outputs - first);
                for (t, sums) in block.clone().zip(&*sums) {
                    // SAFETY: each strip belongs to one task, and a strip of a row is written once.
                    let out = unsafe { out.piece(t * outputs + first..t * outputs + first + count) };
                    copy_strip(sums, out);
                }
            }
        }
    });
}

/// The first `out.len()` sums; a whole strip is one store.
#[inline(always)]
fn copy_strip(sums: &[f32; STRIP], out: &mut [f32]) {
    match <&mut [f32; STRIP]>::try_from(&mut *out) {
        Ok(out) => *out = *sums,
        Err(_) => out.copy_from_slice(&sums[..out.len()]),
    }
}

/// Into how many tasks `strips` go, of `work` multiply-adds for one output each.
fn strip_tasks(ctx: Ctx, strips: usize, work: usize) -> usize {
    /// Multiply-adds that are not worth waking another thread for.
    const SMALL: usize = 1 << 16;
    let threads = ctx.par.threads();
    if threads <= 1 || strips * STRIP * work <= SMALL { 1 } else { strips.min(8 * threads) }
}

fn row_blocks(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    rows.clone().step_by(ROW_BLOCK).map(move |first| first..(first + ROW_BLOCK).min(rows.end))
}

/// Sums of one strip for the rows of a block.
fn multiply(ctx: Ctx, w: &Strip, x: XBlock, sums: &mut [[f32; STRIP]]) {
    assert!(x.is_sound(w.groups(), sums.len()), "a block of rows by the strip's groups");
    sums.fill([0.0; STRIP]);
    dispatch!(ctx.level, scalar::multiply(w, x, sums), avx2::multiply(w, x, sums));
}

/// Rows rounded to eight bits. Rows come in blocks of up to `ROW_BLOCK`; in a block the order is `[group][row]`, so that
/// rows which meet the same weights lie side by side.
struct Quantized {
    /// Groups of a section.
    groups: usize,
    sections: usize,
    /// `[32]` per group and row, columns in the order of [`pack::ORDER`].
    codes: Vec<[i8; GROUP]>,
    scales: Vec<f32>,
    /// Minus twelve times the sum of the codes: what the offset of fp4 codes adds too much.
    zeros: Vec<i32>,
}

/// A block of rows in one section.
#[derive(Clone, Copy)]
struct XBlock<'a> {
    codes: &'a [[i8; GROUP]],
    scales: &'a [f32],
    zeros: &'a [i32],
}

impl XBlock<'_> {
    fn is_sound(&self, groups: usize, rows: usize) -> bool {
        let n = groups * rows;
        self.codes.len() == n && self.scales.len() == n && self.zeros.len() == n
    }
}

impl Quantized {
    /// Rounds the rows of `blocks`, which follow one another from 0; row `t` is `row(t)`, `sections` times `cols` numbers.
    fn new<'a>(
        ctx: Ctx,
        blocks: &[Range<usize>],
        sections: usize,
        cols: usize,
        row: impl Fn(usize) -> &'a [f32] + Sync,
    ) -> Self {
        let groups = cols.div_ceil(GROUP);
        let rows = blocks.last().map_or(0, |block| block.end);
        let n = rows * sections * groups;
        let (mut codes, mut scales, mut zeros) = (vec![[0; GROUP]; n], vec![0.0; n], vec![0; n]);
        {
            let (codes, scales, zeros) =
                (Disjoint::new(&mut codes), Disjoint::new(&mut scales), Disjoint::new(&mut zeros));
            run_tasks(ctx.light(rows * sections * cols), blocks.len(), |i| {
                let block = &blocks[i];
                let place = block.start * sections * groups..block.end * sections * groups;
                // SAFETY: blocks do not overlap and each is a task of its own.
                let codes = unsafe { codes.piece(place.clone()) };
                // SAFETY: the same.
                let scales = unsafe { scales.piece(place.clone()) };
                // SAFETY: the same.
                let zeros = unsafe { zeros.piece(place) };
                for (r, t) in block.clone().enumerate() {
                    let row = row(t);
                    assert_eq!(row.len(), sections * cols, "rows must have {sections} x {cols} numbers");
                    for (s, x) in row.chunks_exact(cols).enumerate() {
                        let first = s * groups * block.len() + r;
                        quantize_row(ctx.level, x, first, block.len(), codes, scales, zeros);
                    }
                }
            });
        }
        Self { groups, sections, codes, scales, zeros }
    }

    fn block(&self, rows: Range<usize>, section: usize) -> XBlock<'_> {
        let start = rows.start * self.sections * self.groups + section * self.groups * rows.len();
        let range = start..start + self.groups * rows.len();
        XBlock { codes: &self.codes[range.clone()], scales: &self.scales[range.clone()], zeros: &self.zeros[range] }
    }
}

compiled_per_level!(
    /// Rounds one row; group `g` goes to place `first + g · stride`.
    fn quantize_row(
        x: &[f32],
        first: usize,
        stride: usize,
        codes: &mut [[i8; GROUP]],
        scales: &mut [f32],
        zeros: &mut [i32],
    ) => quantize_row_body
);

#[inline(always)]
fn quantize_row_body<const FMA: bool>(
    x: &[f32],
    first: usize,
    stride: usize,
    codes: &mut [[i8; GROUP]],
    scales: &mut [f32],
    zeros: &mut [i32],
) {
    let (whole, tail) = x.as_chunks::<GROUP>();
    let mut place = first;
    let mut group = |x: &[f32; GROUP]| {
        let (scale, sum) = quantize(x, &mut codes[place]);
        scales[place] = scale;
        zeros[place] = -12 * sum;
        place += stride;
    };
    whole.iter().for_each(&mut group);
    if !tail.is_empty() {
        let mut padded = [0.0; GROUP];
        padded[..tail.len()].copy_from_slice(tail);
        group(&padded);
    }
}

/// Largest magnitude that is rounded to zero: its reciprocal would overflow.
const TINY: f32 = 1e-30;

/// `x ≈ scale · codes`, columns in the order of [`pack::ORDER`]; returns the scale, NaN if a number is not finite, and
/// the sum of the codes. Each number is off by at most `max|x| / 253`.
#[inline(always)]
fn quantize(x: &[f32; GROUP], codes: &mut [i8; GROUP]) -> (f32, i32) {
    /// Adding this rounds to an integer (ties to even) and leaves it in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    // As integers NaN and infinity are larger than every number.
    let bits = x.iter().fold(0i32, |max, x| max.max((x.to_bits() & 0x7fff_ffff) as i32));
    let amax = f32::from_bits(bits as u32);
    let usable = amax.is_finite() && amax > TINY;
    let factor = if usable { 127.0 / amax } else { 0.0 };
    let mut rounded = [0i32; GROUP];
    let mut sum = 0;
    for (rounded, &x) in rounded.iter_mut().zip(x) {
        *rounded = ((x * factor + ROUND).to_bits() as i32) - ROUND.to_bits() as i32;
        sum += *rounded;
    }
    if !usable {
        *codes = [0; GROUP];
        return (if amax.is_finite() { 0.0 } else { f32::NAN }, 0);
    }
    for (code, &place) in codes.iter_mut().zip(&pack::ORDER) {
        *code = rounded[place] as i8;
    }
    (amax / 127.0, sum)
}
