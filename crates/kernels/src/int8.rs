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
#[cfg(target_arch = "x86_64")]
mod vnni;

use std::ops::Range;

pub use channel::{channels_matmul, is_cut};
pub use experts::{Int8Expert, routed_experts, shared_expert};
pub use pack::Int8Matrix;

use crate::level::dispatch;
use crate::parallel::{Disjoint, run_in_order, run_tasks};
use crate::scratch::Scratch;
use crate::{CpuLevel, Ctx};
use pack::Strip;

/// Columns that share a scale.
pub const GROUP: usize = 32;
/// Outputs of a strip.
const STRIP: usize = 8;
/// Rows that pass by while a strip stays in registers: with 4096 columns they fill half of a small L2.
const ROW_BLOCK: usize = 64;

/// A weight and where its product goes.
pub struct Product<'a> {
    w: &'a Int8Matrix,
    out: Disjoint<'a, f32>,
}

impl<'a> Product<'a> {
    /// - `out` `[T, w.rows()]`
    pub fn new(w: &'a Int8Matrix, out: &'a mut [f32]) -> Self {
        Self { w, out: Disjoint::new(out) }
    }
}

/// `out[t] = x[t] · wᵀ` with activations rounded to eight bits, for each product: the weights share one rounding of `x`
/// and one parallel region.
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
pub fn matmul(ctx: Ctx, x: &[f32], products: &mut [Product]) {
    let Some(Product { w, out }) = products.first() else { return };
    let cols = w.cols();
    let rows = out.len().checked_div(w.rows()).or(x.len().checked_div(cols)).unwrap_or(0);
    assert_eq!(x.len(), rows * cols, "x must be [T, {cols}] with T = {rows}");
    run_products(ctx, x, rows, 1, products);
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
    let per_group = outputs / groups;
    assert!(groups == 1 || per_group.is_multiple_of(STRIP), "groups of {per_group} outputs do not fill strips");
    run_products(ctx, x, rows, groups, &mut [Product::new(w, out)]);
}

/// The products of `rows` rows of `x` with weights of equal width, cut into pieces of some strips each.
fn run_products(ctx: Ctx, x: &[f32], rows: usize, groups: usize, products: &mut [Product]) {
    let cols = products[0].w.cols();
    let width = groups * cols;
    for Product { w, out } in &mut *products {
        assert_eq!(w.cols(), cols, "weights of one input must have one width");
        assert_eq!(out.len(), rows * w.rows(), "out must be [T, {}] with T = {rows}", w.rows());
        if width == 0 {
            // SAFETY: products are borrowed mutably, so nobody else has a piece of this one.
            unsafe { out.piece(0..out.len()) }.fill(0.0);
        }
    }
    if rows == 0 || width == 0 {
        return;
    }
    let products = &*products;
    let work: usize = products.iter().map(|product| product.w.rows()).sum::<usize>() * rows * cols;
    let pieces_of = |w: &Int8Matrix| num_pieces(ctx, w.rows().div_ceil(STRIP), cols, work);
    let pieces = products.iter().map(|product| pieces_of(product.w)).sum();
    let blocks = Scratch::collect(row_blocks(0..rows));
    let quantized = Quantized::new(ctx, &blocks, groups, cols, |t| &x[t * width..(t + 1) * width]);
    run_in_order(ctx, pieces, |mut piece| {
        let mut products = products.iter();
        let (w, out) = loop {
            let Product { w, out } = products.next().expect("every piece belongs to a product");
            match piece.checked_sub(pieces_of(w)) {
                Some(rest) => piece = rest,
                None => break (w, out),
            }
        };
        let (outputs, per_group) = (w.rows(), w.rows() / groups);
        for block in &*blocks {
            let strips = share(outputs.div_ceil(STRIP), pieces_of(w), piece);
            let strip_of = |strip: usize| (w.strip(strip), strip * STRIP / per_group);
            for_strips(ctx, strips, &quantized, block, strip_of, |strip, sums| {
                let first = strip * STRIP;
                let count = STRIP.min(outputs - first);
                for (t, sums) in block.clone().zip(sums) {
                    // SAFETY: each strip belongs to one piece, and a strip of a row is written once.
                    let out = unsafe { out.piece(t * outputs + first..t * outputs + first + count) };
                    copy_strip(sums, out);
                }
            });
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

/// Into how many pieces `strips` of `cols` columns go, where all products of the region are `work` multiply-adds: pieces
/// are small enough for all threads to stream weights to the end, and large enough that starting one costs little.
fn num_pieces(ctx: Ctx, strips: usize, cols: usize, work: usize) -> usize {
    /// Multiply-adds that are not worth waking another thread for.
    const SMALL: usize = 1 << 16;
    /// Weights of a piece.
    const PIECE: usize = 1 << 15;
    let threads = ctx.par.threads();
    if threads <= 1 || work <= SMALL {
        return strips.min(1);
    }
    strips.div_ceil(2).min((strips * STRIP * cols).div_ceil(PIECE).max(8 * threads))
}

/// Part `part` of `parts` of the strips `0..n`, in pairs.
fn share(n: usize, parts: usize, part: usize) -> Range<usize> {
    let pairs = n.div_ceil(2);
    2 * (pairs * part / parts)..n.min(2 * (pairs * (part + 1) / parts))
}

fn row_blocks(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + Clone {
    rows.clone().step_by(ROW_BLOCK).map(move |first| first..(first + ROW_BLOCK).min(rows.end))
}

/// Sums of one strip for the rows of a block.
fn multiply(ctx: Ctx, w: &Strip, x: XBlock, sums: &mut [[f32; STRIP]]) {
    assert!(x.is_sound(w.groups(), sums.len()), "a block of rows by the strip's groups");
    sums.fill([0.0; STRIP]);
    dispatch!(ctx.level, scalar::multiply(w, x, sums), avx2::multiply(w, x, sums));
}

/// [`multiply`] for two strips of equal width, which share the activations.
fn multiply_two(ctx: Ctx, w: [&Strip; 2], x: XBlock, a: &mut [[f32; STRIP]], b: &mut [[f32; STRIP]]) {
    #[cfg(target_arch = "x86_64")]
    if ctx.level == CpuLevel::Avx512Vnni {
        ctx.level.assert_available();
        assert!(a.len() == b.len() && w.iter().all(|w| x.is_sound(w.groups(), a.len())), "blocks of one size");
        // SAFETY: the assertion above saw AVX2, FMA, F16C, AVX-512F, AVX-512BW and VNNI on this CPU.
        if unsafe { vnni::multiply_two(w, x, a, b) } {
            return;
        }
    }
    multiply(ctx, w[0], x, a);
    multiply(ctx, w[1], x, b);
}

/// Calls `body` with each of `strips` and its sums for the rows of `block`, which are multiplied two strips at a time if
/// they meet the same section of the rows. `strip_of` gives the weights of a strip and the section.
fn for_strips<'a>(
    ctx: Ctx,
    strips: Range<usize>,
    x: &Quantized,
    block: &Range<usize>,
    strip_of: impl Fn(usize) -> (Strip<'a>, usize),
    mut body: impl FnMut(usize, &[[f32; STRIP]]),
) {
    let (mut a, mut b) = ([[0.0; STRIP]; ROW_BLOCK], [[0.0; STRIP]; ROW_BLOCK]);
    let (a, b) = (&mut a[..block.len()], &mut b[..block.len()]);
    let mut strips = strips.peekable();
    while let Some(strip) = strips.next() {
        let (w, section) = strip_of(strip);
        let x = x.block(block.clone(), section);
        match strips.peek().map(|&next| strip_of(next)).filter(|(_, other)| *other == section) {
            Some((next, _)) => {
                strips.next();
                multiply_two(ctx, [&w, &next], x, a, b);
                body(strip, a);
                body(strip + 1, b);
            }
            None => {
                multiply(ctx, &w, x, a);
                body(strip, a);
            }
        }
    }
}

/// Rows rounded to eight bits. Rows come in blocks of up to `ROW_BLOCK`; in a block the order is `[group][row]`, so that
/// rows which meet the same weights lie side by side.
struct Quantized {
    /// Groups of a section.
    groups: usize,
    sections: usize,
    /// `[32]` per group and row, columns in the order of [`pack::ORDER`].
    codes: Scratch<[i8; GROUP]>,
    scales: Scratch<f32>,
    /// Minus twelve times the sum of the codes, and minus 128 times: what the offsets of weights add too much that are made
    /// unsigned, fp4 codes and (for VNNI) packed ones.
    zeros: Scratch<[i32; 2]>,
}

/// A block of rows in one section.
#[derive(Clone, Copy)]
struct XBlock<'a> {
    codes: &'a [[i8; GROUP]],
    scales: &'a [f32],
    zeros: &'a [[i32; 2]],
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
        let mut rounded =
            Self { groups, sections, codes: Scratch::new(n), scales: Scratch::new(n), zeros: Scratch::new(n) };
        let codes = Disjoint::new(&mut rounded.codes);
        let scales = Disjoint::new(&mut rounded.scales);
        let zeros = Disjoint::new(&mut rounded.zeros);
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
        rounded
    }

    fn block(&self, rows: Range<usize>, section: usize) -> XBlock<'_> {
        let start = rows.start * self.sections * self.groups + section * self.groups * rows.len();
        let range = start..start + self.groups * rows.len();
        XBlock { codes: &self.codes[range.clone()], scales: &self.scales[range.clone()], zeros: &self.zeros[range] }
    }
}

/// Rounds one row; group `g` goes to place `first + g · stride`.
fn quantize_row(
    level: CpuLevel,
    x: &[f32],
    first: usize,
    stride: usize,
    codes: &mut [[i8; GROUP]],
    scales: &mut [f32],
    zeros: &mut [[i32; 2]],
) {
    let (whole, tail) = x.as_chunks::<GROUP>();
    let mut place = first;
    let mut group = |x: &[f32; GROUP]| {
        let (scale, sum) =
            dispatch!(level, scalar::quantize(x, &mut codes[place]), avx2::quantize(x, &mut codes[place]));
        scales[place] = scale;
        zeros[place] = [-12 * sum, -128 * sum];
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
