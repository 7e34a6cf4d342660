//! Matrix products with stored weights, dequantised on the fly.
//!
//! Arithmetic of one output, the same for one row or a thousand: columns are cut in absolute blocks of 256; a block is
//! one chain of multiply-adds from zero in column order; block sums are added in order. Tiles, strips and tasks only
//! choose *when* an output is computed.
//!
//! Weights are decoded 16 output rows (a strip) by 256 columns at a time into an `f32` panel `[column][16]`, which a
//! register tile multiplies with up to six rows of `x`. With one or two rows the panel is not worth writing: columns go
//! from the transposition straight into the chains. Levels differ in the tile: `scalar`, `avx2`.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;

use std::cell::RefCell;
use std::ops::Range;

use troika_base::StoredTensor;

use crate::formats::Matrix;
use crate::level::dispatch;
use crate::parallel::{Disjoint, run_tasks};
use crate::scratch::Scratch;
use crate::{CpuLevel, Ctx};

/// Columns of a block: the length of one chain of multiply-adds.
pub(crate) const BLOCK: usize = 256;
/// Output rows of a strip.
const STRIP: usize = 16;
/// Strips decoded together.
const STRIPS: usize = 4;
/// Rows of `x` in a register tile.
const TILE_ROWS: usize = 6;
/// Up to so many rows of `x` are multiplied with decoded weights without writing a panel.
const FEW_ROWS: usize = 2;
/// Rows of `x` that a task takes at a time, a multiple of `TILE_ROWS`: their columns of one block stay in L2.
const ROW_BLOCK: usize = 480;
/// Numbers of `x` that a task packs at once.
const MAX_PACKED: usize = 1 << 20;

/// `out[t] = x[t] · wᵀ`: a linear layer.
///
/// - `x`   `[T, w.cols()]`
/// - `w`   `[w.rows(), w.cols()]`, any float format, decoded exactly
/// - `out` `[T, w.rows()]`, overwritten
///
/// Accuracy: each output within `(256 + K/256) · ε · Σ|x·w|` of [`crate::reference::matmul`] (twice that for
/// [`CpuLevel::Scalar`]).
///
/// # Panics
///
/// If the lengths disagree with the shapes above, or `w` is a table of integers.
pub fn matmul(ctx: Ctx, x: &[f32], w: &StoredTensor, out: &mut [f32]) {
    matmul_any(ctx, x, Matrix::stored(w), out);
}

/// [`matmul`] with a weight in any form.
pub(crate) fn matmul_any(ctx: Ctx, x: &[f32], w: Matrix, out: &mut [f32]) {
    let rows = num_rows(x.len(), w.cols(), out.len(), w.rows());
    let outputs = w.rows();
    let out = Disjoint::new(out);
    let job = Job { x, x_stride: w.cols(), rows, w, w_rows: 0..outputs, out: &out, out_start: 0, out_stride: outputs };
    // SAFETY: one job whose `[rows, outputs]` are exactly `out`.
    unsafe { run_jobs(ctx, 1, &|_| job.clone()) };
}

/// Block-diagonal product: `out[t, g·r .. (g+1)·r] = x[t, g·K .. (g+1)·K] · w[g·r .. (g+1)·r]ᵀ` for each group `g`.
///
/// - `x`   `[T, groups·w.cols()]`
/// - `w`   `[groups·r, w.cols()]`, any float format
/// - `out` `[T, groups·r]`, overwritten
///
/// Accuracy as [`matmul`].
///
/// # Panics
///
/// If the lengths disagree with the shapes above, or `w` is a table of integers.
pub fn grouped_matmul(ctx: Ctx, x: &[f32], groups: usize, w: &StoredTensor, out: &mut [f32]) {
    assert!(groups > 0 && w.rows().is_multiple_of(groups), "{} rows do not make {groups} groups", w.rows());
    let (width, outputs) = (groups * w.cols(), w.rows());
    let rows = num_rows(x.len(), width, out.len(), outputs);
    if rows == 0 {
        return;
    }
    let per_group = outputs / groups;
    let out = Disjoint::new(out);
    let matrix = Matrix::stored(w);
    let job = |g: usize| Job {
        x: &x[g * w.cols()..],
        x_stride: width,
        rows,
        w: matrix,
        w_rows: g * per_group..(g + 1) * per_group,
        out: &out,
        out_start: g * per_group,
        out_stride: outputs,
    };
    // SAFETY: the groups' columns of `out` do not overlap.
    unsafe { run_jobs(ctx, groups, &job) };
}

/// Rows of a product, from the lengths of its operands.
fn num_rows(x: usize, x_width: usize, out: usize, out_width: usize) -> usize {
    let rows = out.checked_div(out_width).or(x.checked_div(x_width)).unwrap_or(0);
    assert_eq!(x, rows * x_width, "x must be [T, {x_width}] with T = {rows}");
    assert_eq!(out, rows * out_width, "out must be [T, {out_width}] with T = {rows}");
    rows
}

/// One product of a batch: `out = x · w[w_rows]ᵀ`.
#[derive(Clone)]
pub(crate) struct Job<'a> {
    /// From the first column of the first row on.
    pub(crate) x: &'a [f32],
    /// Numbers from one row of `x` to the next.
    pub(crate) x_stride: usize,
    pub(crate) rows: usize,
    pub(crate) w: Matrix<'a>,
    pub(crate) w_rows: Range<usize>,
    pub(crate) out: &'a Disjoint<'a, f32>,
    /// Place of the first output of the first row.
    pub(crate) out_start: usize,
    /// Numbers from one row of outputs to the next.
    pub(crate) out_stride: usize,
}

impl Job<'_> {
    /// Multiply-adds.
    fn work(&self) -> usize {
        self.rows * self.w_rows.len() * self.w.cols()
    }

    fn check(&self) {
        let cols = self.w.cols();
        assert!(self.w_rows.start <= self.w_rows.end && self.w_rows.end <= self.w.rows(), "no such weight rows");
        if self.rows > 0 {
            assert!((self.rows - 1) * self.x_stride + cols <= self.x.len(), "x is too short");
            let end = self.out_start + (self.rows - 1) * self.out_stride + self.w_rows.len();
            assert!(self.w_rows.len() <= self.out_stride && end <= self.out.len(), "out is too short");
        }
    }

    /// Outputs `outputs` (relative to `w_rows`) of row `t`.
    ///
    /// # Safety
    ///
    /// No other live piece may overlap them.
    #[expect(clippy::mut_from_ref, reason = "a disjoint piece of the output, as the caller promises")]
    unsafe fn out_piece(&self, t: usize, outputs: Range<usize>) -> &mut [f32] {
        let start = self.out_start + t * self.out_stride;
        // SAFETY: the caller's promise.
        unsafe { self.out.piece(start + outputs.start..start + outputs.end) }
    }
}

/// One task: some outputs of some rows of a job.
#[derive(Clone, Default)]
pub(crate) struct Tile {
    job: usize,
    rows: Range<usize>,
    outputs: Range<usize>,
}

/// Multiply-adds below which more tasks cost more than they save.
const SMALL: usize = 1 << 16;

/// Runs the products `job(0..jobs)`, cut into tasks over outputs (and over rows where there are few outputs).
///
/// # Safety
///
/// `job` must give the same product for the same number, and the outputs of different ones must not overlap.
pub(crate) unsafe fn run_jobs<'a>(ctx: Ctx, jobs: usize, job: &(dyn Fn(usize) -> Job<'a> + Sync)) {
    (0..jobs).for_each(|j| job(j).check());
    ctx.level.assert_available();
    let total: usize = (0..jobs).map(|j| job(j).work()).sum();
    // A few tasks for each thread, so that a slow one can be made up for.
    let wanted = if ctx.par.threads() <= 1 || total <= SMALL { 1 } else { 8 * ctx.par.threads() };
    let tiles = Scratch::collect((0..jobs).flat_map(|j| tiles(j, &job(j), wanted, total)));
    run_tasks(ctx, tiles.len(), |i| {
        let tile = &tiles[i];
        // SAFETY: tiles of one job have disjoint outputs, different jobs too (caller), and each tile runs once.
        unsafe { run_tile(ctx.level, &job(tile.job), tile) }
    });
}

/// The tiles of job `index`, whose share of `wanted` is that of its work in `total`.
fn tiles(index: usize, job: &Job, wanted: usize, total: usize) -> impl Iterator<Item = Tile> + Clone + use<> {
    let (rows, outputs) = (job.rows, job.w_rows.len());
    let share = (job.work() * wanted).div_ceil(total.max(1)).max(1);
    let strips = outputs.div_ceil(STRIP);
    // Full groups of strips if there are enough of them.
    let unit = if strips >= share * STRIPS { STRIPS } else { 1 };
    let strips_each = strips.div_ceil(share).next_multiple_of(unit).max(1);
    let column_tasks = strips.div_ceil(strips_each).max(1);
    // Decoding is repeated for each block of rows, so blocks stay large.
    let row_tasks = share.div_ceil(column_tasks).min(rows.div_ceil(96)).max(1);
    let rows_each = rows.div_ceil(row_tasks).next_multiple_of(TILE_ROWS).max(1);
    (0..rows).step_by(rows_each).flat_map(move |first| {
        (0..strips).step_by(strips_each).map(move |strip| Tile {
            job: index,
            rows: first..(first + rows_each).min(rows),
            outputs: strip * STRIP..((strip + strips_each) * STRIP).min(outputs),
        })
    })
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    /// `[STRIPS][BLOCK][STRIP]`; with few rows of `x` decoded rows `[2·STRIP][BLOCK]` instead.
    panel: Vec<f32>,
    /// Decoded rows before they are transposed, `[8][BLOCK]`.
    decoded: Vec<f32>,
    /// For each block of columns of `x`, for each group of `TILE_ROWS` rows: `[columns][rows]`.
    packed: Vec<f32>,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// # Safety
///
/// Nothing else may touch the outputs of the tile meanwhile.
unsafe fn run_tile(level: CpuLevel, job: &Job, tile: &Tile) {
    BUFFERS.with_borrow_mut(|buffers| {
        buffers.panel.resize(STRIPS * BLOCK * STRIP, 0.0);
        buffers.decoded.resize(8 * BLOCK, 0.0);
        for first in tile.rows.clone().step_by(ROW_BLOCK) {
            let rows = first..(first + ROW_BLOCK).min(tile.rows.end);
            // SAFETY: the caller's promise, for a part of the tile.
            unsafe { run_row_block(level, job, rows, tile.outputs.clone(), buffers) };
        }
    });
}

/// # Safety
///
/// Nothing else may touch these outputs meanwhile.
unsafe fn run_row_block(level: CpuLevel, job: &Job, rows: Range<usize>, outputs: Range<usize>, buffers: &mut Buffers) {
    let cols = job.w.cols();
    if cols == 0 {
        for t in rows {
            // SAFETY: the caller's promise.
            unsafe { job.out_piece(t, outputs.clone()) }.fill(0.0);
        }
        return;
    }
    let places = || {
        (0..cols).step_by(BLOCK).map(|first_col| Place { level, job, first_col, block: BLOCK.min(cols - first_col) })
    };
    let pieces = |width: usize| {
        let Range { start, end } = outputs;
        (start..end).step_by(width).map(move |first| first..(first + width).min(end))
    };
    let Buffers { panel, decoded, packed } = buffers;
    // Weights are read row by row, all columns of a few rows after another: that is how memory likes it. Only where `x`
    // is too large to be packed at once, all rows of a block of columns come first.
    if rows.len() <= FEW_ROWS {
        for outputs in pieces(2 * STRIP) {
            for place in places() {
                // SAFETY: part of the caller's promise.
                unsafe { place.few_rows(rows.clone(), outputs.clone(), panel) };
            }
        }
    } else if rows.len() < 2 * TILE_ROWS {
        for outputs in pieces(STRIPS * STRIP) {
            for place in places() {
                // SAFETY: part of the caller's promise.
                unsafe { place.tiles(rows.clone(), outputs.clone(), None, panel, decoded) };
            }
        }
    } else if rows.len() * cols <= MAX_PACKED {
        for place in places() {
            place.pack(rows.clone(), packed, rows.len() * place.first_col);
        }
        for outputs in pieces(STRIPS * STRIP) {
            for place in places() {
                let x = Some(&packed[rows.len() * place.first_col..]);
                // SAFETY: part of the caller's promise.
                unsafe { place.tiles(rows.clone(), outputs.clone(), x, panel, decoded) };
            }
        }
    } else {
        for place in places() {
            place.pack(rows.clone(), packed, 0);
            for outputs in pieces(STRIPS * STRIP) {
                // SAFETY: part of the caller's promise.
                unsafe { place.tiles(rows.clone(), outputs, Some(packed), panel, decoded) };
            }
        }
    }
}

/// One block of columns of a job.
struct Place<'a> {
    level: CpuLevel,
    job: &'a Job<'a>,
    first_col: usize,
    block: usize,
}

impl Place<'_> {
    /// Up to 32 outputs of one or two rows.
    ///
    /// # Safety
    ///
    /// Nothing else may touch these outputs meanwhile.
    unsafe fn few_rows(&self, rows: Range<usize>, outputs: Range<usize>, decoded: &mut [f32]) {
        let (x, w, w_rows) = (self.strided(rows.clone()), self.job.w, self.weight_rows(&outputs));
        let mut sums = Sums::default();
        dispatch!(
            self.level,
            scalar::multiply_few(x, rows.len(), self.block, w, w_rows, self.first_col, decoded, &mut sums),
            avx2::multiply_few(x, rows.len(), self.block, w, w_rows, self.first_col, decoded, &mut sums)
        );
        // SAFETY: the caller's promise.
        unsafe { self.add_sums(rows, outputs, &sums) };
    }

    /// Up to 64 outputs of any number of rows, which lie in `packed` or in the job's `x`.
    ///
    /// # Safety
    ///
    /// Nothing else may touch these outputs meanwhile.
    unsafe fn tiles(
        &self,
        rows: Range<usize>,
        outputs: Range<usize>,
        packed: Option<&[f32]>,
        panels: &mut [f32],
        decoded: &mut [f32],
    ) {
        let mut strips = 0;
        for first in outputs.clone().step_by(STRIP) {
            let panel = &mut panels[strips * BLOCK * STRIP..][..self.block * STRIP];
            let (w, w_rows) = (self.job.w, self.weight_rows(&(first..(first + STRIP).min(outputs.end))));
            dispatch!(
                self.level,
                scalar::fill_panel(w, w_rows, self.first_col, decoded, panel),
                avx2::fill_panel(w, w_rows, self.first_col, decoded, panel)
            );
            strips += 1;
        }
        for t in rows.clone().step_by(TILE_ROWS) {
            let tile = t..(t + TILE_ROWS).min(rows.end);
            let x = match packed {
                Some(packed) => {
                    let start = (t - rows.start) * self.block;
                    XBlock { numbers: &packed[start..start + tile.len() * self.block], stride: None }
                }
                None => self.strided(tile.clone()),
            };
            let mut sums = Sums::default();
            dispatch!(
                self.level,
                scalar::multiply(x, tile.len(), self.block, panels, strips, &mut sums),
                avx2::multiply(x, tile.len(), self.block, panels, strips, &mut sums)
            );
            // SAFETY: the caller's promise.
            unsafe { self.add_sums(tile, outputs.clone(), &sums) };
        }
    }

    /// Rows of the weight that make `outputs`.
    fn weight_rows(&self, outputs: &Range<usize>) -> Range<usize> {
        let first = self.job.w_rows.start;
        first + outputs.start..first + outputs.end
    }

    /// These columns of some rows of `x`, where they lie.
    fn strided(&self, rows: Range<usize>) -> XBlock<'_> {
        let stride = self.job.x_stride;
        let start = rows.start * stride + self.first_col;
        let end = start + (rows.len() - 1) * stride + self.block;
        XBlock { numbers: &self.job.x[start..end], stride: Some(stride) }
    }

    /// Packs these columns of some rows of `x` to `packed[start..]`, which grows as needed.
    fn pack(&self, rows: Range<usize>, packed: &mut Vec<f32>, start: usize) {
        let end = start + rows.len() * self.block;
        if packed.len() < end {
            packed.resize(end, 0.0);
        }
        let stride = self.job.x_stride;
        let x = &self.job.x[rows.start * stride + self.first_col..];
        pack_rows(x, stride, rows.len(), self.block, &mut packed[start..end]);
    }

    /// Adds the sums of this block to the outputs; those of the first block are written.
    ///
    /// # Safety
    ///
    /// Nothing else may touch these outputs meanwhile.
    unsafe fn add_sums(&self, rows: Range<usize>, outputs: Range<usize>, sums: &Sums) {
        for (t, sums) in rows.zip(&sums.0) {
            // SAFETY: the caller's promise; the piece ends with this iteration.
            let out = unsafe { self.job.out_piece(t, outputs.clone()) };
            if self.first_col == 0 {
                out.copy_from_slice(&sums[..out.len()]);
            } else {
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
            }
        }
    }
}

/// Sums of a block of columns: rows of `x` by outputs.
struct Sums([[f32; STRIPS * STRIP]; TILE_ROWS]);

impl Default for Sums {
    fn default() -> Self {
        Self([[0.0; STRIPS * STRIP]; TILE_ROWS])
    }
}

/// Some columns of up to `TILE_ROWS` rows of `x`.
#[derive(Clone, Copy)]
struct XBlock<'a> {
    numbers: &'a [f32],
    /// Numbers from one row to the next; `None`: packed as `[column][row]`.
    stride: Option<usize>,
}

/// Copies `cols` columns of `rows` rows so that each group of `TILE_ROWS` rows is `[column][row]`.
fn pack_rows(x: &[f32], stride: usize, rows: usize, cols: usize, packed: &mut [f32]) {
    for (first, group) in (0..rows).step_by(TILE_ROWS).zip(packed.chunks_mut(TILE_ROWS * cols)) {
        let count = TILE_ROWS.min(rows - first);
        let row = |r: usize| &x[(first + r) * stride..][..cols];
        if count == TILE_ROWS {
            let rows: [&[f32]; TILE_ROWS] = std::array::from_fn(row);
            for (k, out) in group.as_chunks_mut::<TILE_ROWS>().0.iter_mut().enumerate() {
                *out = std::array::from_fn(|r| rows[r][k]);
            }
        } else {
            for r in 0..count {
                for (out, &x) in group[r..].iter_mut().step_by(count).zip(row(r)) {
                    *out = x;
                }
            }
        }
    }
}
