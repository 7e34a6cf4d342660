//! Number formats of checkpoints (model spec, section 4): tables, decoding of stored tensors, rounding.
//!
//! Decoding is exact: every level gives the same bits, those of [`crate::reference::decode`]. Where a code is
//! multiplied by a scale the product is rounded once to `f32`; affine codes are multiplied, rounded, biased, rounded.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod encode;
mod round;
mod scalar;
mod tables;

use std::ops::Range;

use troika_base::StoredTensor;
use troika_base::storage::{FP8_TILE, Format, MX_GROUP, ScaleFormat};

pub use encode::{f32_to_bf16, f32_to_e2m1, f32_to_e4m3, f32_to_f16};
pub use round::{fake_fp4, fake_fp8, hadamard, power_of_two_scale};
pub use tables::{E2M1, E4M3, bf16_to_f32, e8m0_to_f32, f16_to_f32};

use crate::CpuLevel;
use crate::level::dispatch;

/// A stored matrix as operand of a product.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a>(View<'a>);

impl<'a> Matrix<'a> {
    pub(crate) fn stored(w: &'a StoredTensor) -> Self {
        Self(View::new(w))
    }

    pub(crate) fn rows(&self) -> usize {
        self.0.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.0.cols
    }

    /// Asks for the memory that decoding `cols` columns of one row from `first_col` on will read; nothing else changes.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn prefetch(&self, row: usize, first_col: usize, cols: usize) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for line in self.0.codes(row, first_col, cols).chunks(64) {
            // SAFETY: a prefetch reads nothing that the program can see, and the address is a valid one.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }

    /// Columns `first_col..first_col + out.len()` of one row. `first_col` is a multiple of 128, so that groups start at
    /// group edges.
    pub(crate) fn decode(&self, level: CpuLevel, row: usize, first_col: usize, out: &mut [f32]) {
        decode(level, &self.0, row, first_col, out);
    }
}

/// The parts of a stored tensor, looked up once: each look-up asks the owner of the bytes.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    format: Format,
    rows: usize,
    cols: usize,
    data: &'a [u8],
    scales: &'a [u8],
    biases: &'a [u8],
}

impl<'a> View<'a> {
    pub(crate) fn new(w: &'a StoredTensor) -> Self {
        Self {
            format: w.format(),
            rows: w.rows(),
            cols: w.cols(),
            data: w.data(),
            scales: w.scales(),
            biases: w.biases(),
        }
    }

    /// Bytes of the codes of up to `cols` columns of one row, if there are such.
    #[cfg(target_arch = "x86_64")]
    fn codes(&self, row: usize, first_col: usize, cols: usize) -> &'a [u8] {
        let bits = match self.format {
            Format::F32 | Format::I32 => 32,
            Format::F16 | Format::Bf16 => 16,
            Format::I64 => 64,
            Format::Fp8Tile { .. } | Format::Mxfp8 => 8,
            Format::Mxfp4 => 4,
            Format::Affine { bits, .. } => usize::from(bits),
        };
        let start = (row * self.cols + first_col) * bits / 8;
        let end = start + cols.min(self.cols.saturating_sub(first_col)) * bits / 8;
        self.data.get(start..end.min(self.data.len())).unwrap_or_default()
    }
}

/// The bytes of some columns of one row, and their scales: what a decoding loop needs.
#[derive(Clone, Copy)]
enum RowCodes<'a> {
    F32(&'a [u8]),
    F16(&'a [u8]),
    Bf16(&'a [u8]),
    /// One scale per `group` columns, except that the last group may be short.
    E4m3 {
        codes: &'a [u8],
        scales: Scales<'a>,
        group: usize,
    },
    E2m1 {
        codes: &'a [u8],
        scales: Scales<'a>,
    },
    Affine {
        codes: &'a [u8],
        bits: u8,
        group: usize,
        scales: Scales<'a>,
        biases: Scales<'a>,
    },
}

/// Scales in storage order.
#[derive(Clone, Copy)]
struct Scales<'a> {
    bytes: &'a [u8],
    format: ScaleFormat,
}

impl Scales<'_> {
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        let two = || u16::from_le_bytes([self.bytes[2 * i], self.bytes[2 * i + 1]]);
        match self.format {
            ScaleFormat::E8m0 => e8m0_to_f32(self.bytes[i]),
            ScaleFormat::F32 => f32::from_le_bytes(std::array::from_fn(|b| self.bytes[4 * i + b])),
            ScaleFormat::Bf16 => bf16_to_f32(two()),
            ScaleFormat::F16 => f16_to_f32(two()),
        }
    }

    fn len(&self) -> usize {
        self.bytes.len() / self.format.bytes()
    }
}

impl<'a> RowCodes<'a> {
    /// Columns `cols` of row `row` of `w`. `cols.start` is a multiple of 128.
    fn new(w: &View<'a>, row: usize, cols: Range<usize>) -> Self {
        assert!(row < w.rows && cols.start <= cols.end && cols.end <= w.cols, "columns outside of the matrix");
        assert!(cols.start.is_multiple_of(FP8_TILE), "decoding must start at a group edge");
        let (data, width) = (w.data, w.cols);
        let plain = |bytes: usize| &data[(row * width + cols.start) * bytes..(row * width + cols.end) * bytes];
        // Scales of a row that has one per `group` columns.
        let grouped = |bytes: &'a [u8], format: ScaleFormat, group: usize| {
            // Groups are powers of two; shifts, since this runs for every row of every block.
            let shift = group.trailing_zeros();
            let first = row * (width >> shift);
            let range = first + (cols.start >> shift)..first + ((cols.end + group - 1) >> shift);
            Scales { bytes: &bytes[range.start * format.bytes()..range.end * format.bytes()], format }
        };
        match w.format {
            Format::F32 => Self::F32(plain(4)),
            Format::F16 => Self::F16(plain(2)),
            Format::Bf16 => Self::Bf16(plain(2)),
            Format::Fp8Tile { scale } => {
                let first = row / FP8_TILE * width.div_ceil(FP8_TILE);
                let range = first + cols.start / FP8_TILE..first + cols.end.div_ceil(FP8_TILE);
                let bytes = &w.scales[range.start * scale.bytes()..range.end * scale.bytes()];
                Self::E4m3 { codes: plain(1), scales: Scales { bytes, format: scale }, group: FP8_TILE }
            }
            Format::Mxfp8 => {
                let scales = grouped(w.scales, ScaleFormat::E8m0, MX_GROUP);
                Self::E4m3 { codes: plain(1), scales, group: MX_GROUP }
            }
            Format::Mxfp4 => {
                let codes = &data[(row * width + cols.start) / 2..(row * width + cols.end).div_ceil(2)];
                Self::E2m1 { codes, scales: grouped(w.scales, ScaleFormat::E8m0, MX_GROUP) }
            }
            Format::Affine { bits, group, scale } => {
                let group = usize::from(group);
                let row_bytes = width / 8 * usize::from(bits);
                let start = row * row_bytes + cols.start / 8 * usize::from(bits);
                let end = row * row_bytes + cols.end.div_ceil(8) * usize::from(bits);
                Self::Affine {
                    codes: &data[start..end],
                    bits,
                    group,
                    scales: grouped(w.scales, scale, group),
                    biases: grouped(w.biases, scale, group),
                }
            }
            format @ (Format::I32 | Format::I64) => panic!("{format} is a table of integers, not of numbers"),
        }
    }
}

/// Columns `first_col..first_col + out.len()` of row `row` of `w`.
pub(crate) fn decode(level: CpuLevel, w: &View, row: usize, first_col: usize, out: &mut [f32]) {
    let codes = RowCodes::new(w, row, first_col..first_col + out.len());
    dispatch!(level, scalar::decode(codes, out), avx2::decode(codes, out));
}

/// Row `row` of `w` as `f32`, into `out` `[w.cols()]`.
///
/// # Panics
///
/// If there is no such row, `out` has another length, or `w` is a table of integers.
pub fn row_to_f32(w: &StoredTensor, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), w.cols(), "out must be [w.cols()]");
    decode(CpuLevel::best(), &View::new(w), row, 0, out);
}

/// The whole tensor as `f32` `[w.rows(), w.cols()]`, row-major.
///
/// # Panics
///
/// If `w` is a table of integers.
pub fn to_f32(w: &StoredTensor) -> Vec<f32> {
    let mut out = vec![0.0; w.rows() * w.cols()];
    if w.cols() > 0 {
        for (row, out) in out.chunks_exact_mut(w.cols()).enumerate() {
            row_to_f32(w, row, out);
        }
    }
    out
}

/// Why a tensor is not a table of small integers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// An entry does not fit into an `i32`.
    #[error("entry {index} of the table is {value}, which does not fit into 32 bits")]
    OutOfRange {
        /// Its place, row-major.
        index: usize,
        /// The entry.
        value: i64,
    },
    /// The tensor holds no integers.
    #[error("a table of integers is expected, not {format}")]
    NotIntegers {
        /// What it holds instead.
        format: Format,
    },
}

/// A table of integers (`i64` or `i32`), row-major.
///
/// # Errors
///
/// If an entry does not fit, or the tensor holds something else than integers.
pub fn to_i32(w: &StoredTensor) -> Result<Vec<i32>, TableError> {
    match w.format() {
        Format::I32 => Ok(w.data().as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect()),
        Format::I64 => {
            let entries = w.data().as_chunks().0.iter().map(|&b| i64::from_le_bytes(b));
            entries
                .enumerate()
                .map(|(index, value)| i32::try_from(value).map_err(|_| TableError::OutOfRange { index, value }))
                .collect()
        }
        format => Err(TableError::NotIntegers { format }),
    }
}

/// Index of the first scale that is NaN (code 255 of e8m0) or infinite; for affine formats also of the first such bias.
/// Such a scale poisons its whole group, so a loader refuses the file. `None` if all are finite or there are none.
pub fn has_nan_scale(w: &StoredTensor) -> Option<usize> {
    let format = match w.format() {
        Format::Fp8Tile { scale } | Format::Affine { scale, .. } => scale,
        Format::Mxfp8 | Format::Mxfp4 => ScaleFormat::E8m0,
        Format::F32 | Format::F16 | Format::Bf16 | Format::I64 | Format::I32 => return None,
    };
    let first = |bytes| {
        let scales = Scales { bytes, format };
        (0..scales.len()).find(|&i| !scales.get(i).is_finite())
    };
    match (first(w.scales()), first(w.biases())) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
