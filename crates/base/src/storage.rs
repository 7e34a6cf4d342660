//! Stored tensors: bytes of a checkpoint together with how to read them (model spec, section 4).

use std::fmt;

use crate::SharedBytes;

/// How the numbers of a stored matrix are encoded. A format says nothing about who wrote the file: the official
/// layout and MLX conversions share [`Format::Mxfp4`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE single precision, little-endian.
    F32,
    /// IEEE half precision.
    F16,
    /// Upper half of an `f32`.
    Bf16,
    /// Signed integers, 8 bytes each.
    I64,
    /// Signed integers, 4 bytes each.
    I32,
    /// e4m3 bytes, one multiplier per 128 x 128 tile; ragged edge tiles have their own. `scales` is
    /// `[ceil(rows/128), ceil(cols/128)]`.
    Fp8Tile {
        /// How the multipliers are stored.
        scale: ScaleFormat,
    },
    /// e4m3 bytes, one e8m0 multiplier per row and 32 columns. `scales` is `[rows, cols/32]`.
    Mxfp8,
    /// Two e2m1 codes a byte, low nibble the even column; one e8m0 multiplier per row and 32 columns.
    Mxfp4,
    /// `scale * q + bias` per row and group of `group` columns; `q` is unsigned, `bits` wide, packed little-endian
    /// without gaps from the start of each row. `scales` and `biases` are `[rows, cols/group]`.
    Affine {
        /// Width of one code: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Columns that share a scale and a bias: 32, 64 or 128.
        group: u16,
        /// How scales and biases are stored.
        scale: ScaleFormat,
    },
}

/// How the scales of a quantised format are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleFormat {
    /// One byte `b`, value `2^(b-127)`; 255 is NaN.
    E8m0,
    /// IEEE single precision.
    F32,
    /// Upper half of an `f32`.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl ScaleFormat {
    /// Bytes of one scale.
    pub fn bytes(self) -> usize {
        match self {
            Self::E8m0 => 1,
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// Columns that share a scale in the mx formats.
pub const MX_GROUP: usize = 32;
/// Side of a tile of [`Format::Fp8Tile`].
pub const FP8_TILE: usize = 128;

impl Format {
    /// Bytes of `[data, scales, biases]` for a `[rows, cols]` matrix, or `None` if the format cannot hold that shape
    /// or a size overflows.
    pub fn byte_lengths(self, rows: usize, cols: usize) -> Option<[usize; 3]> {
        let elements = rows.checked_mul(cols)?;
        let plain = |width: usize| Some([elements.checked_mul(width)?, 0, 0]);
        match self {
            Self::F32 | Self::I32 => plain(4),
            Self::F16 | Self::Bf16 => plain(2),
            Self::I64 => plain(8),
            Self::Fp8Tile { scale } => {
                let tiles = rows.div_ceil(FP8_TILE).checked_mul(cols.div_ceil(FP8_TILE))?;
                Some([elements, tiles.checked_mul(scale.bytes())?, 0])
            }
            Self::Mxfp8 => cols.is_multiple_of(MX_GROUP).then_some([elements, elements / MX_GROUP, 0]),
            Self::Mxfp4 => cols.is_multiple_of(MX_GROUP).then_some([elements / 2, elements / MX_GROUP, 0]),
            Self::Affine { bits, group, scale } => {
                let (bits, group) = (usize::from(bits), usize::from(group));
                if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8)
                    || !matches!(group, 32 | 64 | 128)
                    || !cols.is_multiple_of(group)
                {
                    return None;
                }
                let scales = (elements / group).checked_mul(scale.bytes())?;
                // A group of 32 codes fills whole 32-bit words at every width.
                Some([rows.checked_mul(cols / 8 * bits)?, scales, scales])
            }
        }
    }

    /// True for formats with scales.
    pub fn is_quantised(self) -> bool {
        matches!(self, Self::Fp8Tile { .. } | Self::Mxfp8 | Self::Mxfp4 | Self::Affine { .. })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::F16 => f.write_str("f16"),
            Self::Bf16 => f.write_str("bf16"),
            Self::I64 => f.write_str("i64"),
            Self::I32 => f.write_str("i32"),
            Self::Fp8Tile { scale: ScaleFormat::E8m0 } => f.write_str("fp8 (128x128 e8m0)"),
            Self::Fp8Tile { scale } => write!(f, "fp8 (128x128 {scale:?})"),
            Self::Mxfp8 => f.write_str("mxfp8"),
            Self::Mxfp4 => f.write_str("fp4 (mxfp4)"),
            Self::Affine { bits, group, .. } => write!(f, "affine{bits} g{group}"),
        }
    }
}

/// A matrix `[rows, cols]` as a checkpoint stores it; vectors are matrices of one row.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    format: Format,
    rows: usize,
    cols: usize,
    data: SharedBytes,
    scales: SharedBytes,
    biases: SharedBytes,
}

/// The parts of a stored tensor do not fit its shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StorageError {
    /// The format cannot hold this shape: columns are not a multiple of its group, or a size overflows.
    #[error("{format} cannot hold a [{rows}, {cols}] matrix")]
    Shape {
        /// The format asked for.
        format: Format,
        /// Rows (outputs).
        rows: usize,
        /// Columns (inputs).
        cols: usize,
    },
    /// A part has another length than the shape needs.
    #[error("{part} of a [{rows}, {cols}] {format} matrix must have {want} bytes, got {got}")]
    Length {
        /// `data`, `scales` or `biases`.
        part: &'static str,
        /// The format asked for.
        format: Format,
        /// Rows (outputs).
        rows: usize,
        /// Columns (inputs).
        cols: usize,
        /// Bytes needed.
        want: usize,
        /// Bytes given.
        got: usize,
    },
}

impl StoredTensor {
    /// Puts the parts together; `scales` and `biases` are empty where the format has none.
    ///
    /// # Errors
    ///
    /// If the format cannot hold the shape, or a part has the wrong length. So whoever holds a `StoredTensor` may
    /// index its parts by shape without further checks.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        [data, scales, biases]: [SharedBytes; 3],
    ) -> Result<Self, StorageError> {
        let want = format.byte_lengths(rows, cols).ok_or(StorageError::Shape { format, rows, cols })?;
        for (part, bytes, want) in
            [("data", &data, want[0]), ("scales", &scales, want[1]), ("biases", &biases, want[2])]
        {
            if bytes.len() != want {
                return Err(StorageError::Length { part, format, rows, cols, want, got: bytes.len() });
            }
        }
        Ok(Self { format, rows, cols, data, scales, biases })
    }

    /// Number format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Rows: output channels of a projection.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: input channels of a projection.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Codes or plain numbers.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Scales, empty if the format has none.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// Biases of affine groups, empty otherwise.
    pub fn biases(&self) -> &[u8] {
        &self.biases
    }

    /// Says that the bytes will not be read soon; see [`SharedBytes::release`].
    pub fn release(&self) {
        [&self.data, &self.scales, &self.biases].into_iter().for_each(SharedBytes::release);
    }

    /// Bytes of all parts.
    pub fn num_bytes(&self) -> u64 {
        (self.data.len() + self.scales.len() + self.biases.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_follow_the_shape() {
        let fp8 = Format::Fp8Tile { scale: ScaleFormat::E8m0 };
        assert_eq!(fp8.byte_lengths(130, 257), Some([130 * 257, 2 * 3, 0]));
        assert_eq!(Format::Mxfp4.byte_lengths(3, 64), Some([96, 6, 0]));
        assert_eq!(Format::Mxfp4.byte_lengths(3, 40), None, "not a multiple of the group");
        let affine = Format::Affine { bits: 3, group: 32, scale: ScaleFormat::F16 };
        assert_eq!(affine.byte_lengths(2, 64), Some([2 * 24, 8, 8]));
        assert_eq!(Format::F32.byte_lengths(usize::MAX, 2), None, "overflow");
    }

    #[test]
    fn parts_must_fit() {
        let part = |n: usize| SharedBytes::new(vec![0u8; n]);
        let build = |data, scales| StoredTensor::new(Format::Mxfp8, 2, 32, [part(data), part(scales), part(0)]);
        assert_eq!(build(64, 2).expect("fits").num_bytes(), 66);
        let error = build(63, 2).expect_err("one byte short");
        assert_eq!(error.to_string(), "data of a [2, 32] mxfp8 matrix must have 64 bytes, got 63");
        assert!(build(64, 3).is_err());
    }
}
