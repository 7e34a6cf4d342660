//! Weights as the integer kernels read them, in strips of eight outputs.

use std::ops::Range;

use troika_base::{Format, StoredTensor};

use super::{GROUP, STRIP};
use crate::Ctx;
use crate::formats::{Matrix, bf16_to_f32};
use crate::parallel::for_each_row2;

/// Which column of a group stands at each place. A lane of 32 bits holds the low nibbles of four bytes of fp4 codes, the
/// even columns, or their high nibbles, the odd ones; everything else follows this order.
pub(super) const ORDER: [usize; GROUP] = order();

const fn order() -> [usize; GROUP] {
    let mut order = [0; GROUP];
    let mut i = 0;
    while i < GROUP {
        order[i] = i / 8 * 8 + i % 4 * 2 + i % 8 / 4;
        i += 1;
    }
    order
}

/// A weight for integer products, `[rows, cols]`.
#[derive(Clone, Debug)]
pub struct Int8Matrix {
    rows: usize,
    cols: usize,
    form: Form,
}

#[derive(Clone, Debug)]
enum Form {
    /// As stored; nothing is copied.
    Fp4(StoredTensor),
    /// `codes` `[strip][group][8 places of 4 columns][8 outputs][4 columns]`, `scales` `[strip][group][8 outputs]` in bf16.
    Packed { codes: Vec<[i8; STRIP * GROUP]>, scales: Vec<[u16; STRIP]> },
}

/// Eight outputs, fewer at the end of a matrix.
#[expect(clippy::large_enum_variant, reason = "made and used on the stack, strip by strip")]
pub(super) enum Strip<'a> {
    Fp4 {
        /// Codes of each output; the last one repeated where there are fewer.
        rows: [&'a [u8]; STRIP],
        /// Scales of each output.
        scales: [&'a [u8]; STRIP],
    },
    Packed {
        codes: &'a [[i8; STRIP * GROUP]],
        scales: &'a [[u16; STRIP]],
    },
}

impl Int8Matrix {
    /// Refers to a tensor whose codes are integers already ([`Format::Mxfp4`]); `None` for other formats.
    pub fn refer(w: &StoredTensor) -> Option<Self> {
        let form = (w.format() == Format::Mxfp4).then(|| Form::Fp4(w.clone()))?;
        Some(Self { rows: w.rows(), cols: w.cols(), form })
    }

    /// Rounds a tensor of any float format to eight bits per output and group of 32 columns: a copy of 17/16 bytes per
    /// number. A group that holds a number which is not finite becomes NaN. The result depends on `w` alone.
    ///
    /// # Panics
    ///
    /// If `w` is a table of integers.
    pub fn pack(ctx: Ctx, w: &StoredTensor) -> Self {
        Self::pack_groups(ctx, w, 1)
    }

    /// As [`Self::pack`] with one scale per output, as fixed-shape engines want it. An output that holds a number which is
    /// not finite becomes NaN.
    ///
    /// # Panics
    ///
    /// If `w` is a table of integers.
    pub fn pack_channels(ctx: Ctx, w: &StoredTensor) -> Self {
        Self::pack_groups(ctx, w, w.cols().div_ceil(GROUP).max(1))
    }

    /// `shared` groups of an output have one scale.
    fn pack_groups(ctx: Ctx, w: &StoredTensor, shared: usize) -> Self {
        let (rows, cols) = (w.rows(), w.cols());
        let (strips, groups) = (rows.div_ceil(STRIP), cols.div_ceil(GROUP));
        let mut codes = vec![[0; STRIP * GROUP]; strips * groups];
        let mut scales = vec![[0; STRIP]; strips * groups];
        let source = Matrix::stored(w);
        for_each_row2(ctx, &mut codes, groups, &mut scales, groups, |strip, codes, scales| {
            let mut row = vec![0.0; groups * GROUP];
            for (lane, output) in (strip * STRIP..rows.min((strip + 1) * STRIP)).enumerate() {
                source.decode(ctx.level, output, 0, &mut row[..cols]);
                let runs = row.as_chunks::<GROUP>().0.chunks(shared);
                for ((run, codes), scales) in runs.zip(codes.chunks_mut(shared)).zip(scales.chunks_mut(shared)) {
                    let scale = common_scale(run.as_flattened());
                    for ((x, codes), scales) in run.iter().zip(codes).zip(scales) {
                        round_group(x, scale, |place, code| codes[place / 4 * 32 + lane * 4 + place % 4] = code);
                        scales[lane] = scale;
                    }
                }
            }
        });
        Self { rows, cols, form: Form::Packed { codes, scales } }
    }

    /// Output channels.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input channels.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes that [`Self::pack`] allocates for `[rows, cols]` numbers.
    pub fn packed_bytes(rows: usize, cols: usize) -> u64 {
        let groups = rows.div_ceil(STRIP) * cols.div_ceil(GROUP);
        (groups * (size_of::<[i8; STRIP * GROUP]>() + size_of::<[u16; STRIP]>())) as u64
    }

    /// The numbers that products use, `[rows, cols]`.
    pub fn to_f32(&self) -> Vec<f32> {
        match &self.form {
            Form::Fp4(w) => crate::to_f32(w),
            Form::Packed { codes, scales } => {
                let groups = self.cols.div_ceil(GROUP);
                let place_of = |column: usize| ORDER.iter().position(|c| *c == column).expect("a permutation");
                let places: Vec<usize> = (0..GROUP).map(place_of).collect();
                let number = |row: usize, col: usize| {
                    let (at, lane, place) = (row / STRIP * groups + col / GROUP, row % STRIP, places[col % GROUP]);
                    f32::from(codes[at][place / 4 * 32 + lane * 4 + place % 4]) * bf16_to_f32(scales[at][lane])
                };
                (0..self.rows)
                    .flat_map(|row| (0..self.cols).map(move |col| (row, col)))
                    .map(|(r, c)| number(r, c))
                    .collect()
            }
        }
    }

    /// Codes `[outputs, cols]` and scales of some outputs, if each has one scale for all its columns, as
    /// [`Self::pack_channels`] makes them; `None` otherwise. An output with a NaN scale has codes of 0.
    ///
    /// # Panics
    ///
    /// If there are no such outputs.
    pub fn channel_codes(&self, outputs: Range<usize>) -> Option<(Vec<i8>, Vec<f32>)> {
        assert!(outputs.start <= outputs.end && outputs.end <= self.rows, "{outputs:?} of {} outputs", self.rows);
        let Form::Packed { codes, scales } = &self.form else { return None };
        let groups = self.cols.div_ceil(GROUP);
        let (mut rows, mut factors) = (vec![0; outputs.len() * self.cols], Vec::with_capacity(outputs.len()));
        for (output, row) in outputs.zip(rows.chunks_exact_mut(self.cols.max(1))) {
            let (strip, lane) = (output / STRIP * groups, output % STRIP);
            let scale = scales[strip][lane];
            if scales[strip..strip + groups].iter().any(|other| other[lane] != scale) {
                return None;
            }
            for (group, row) in row.chunks_mut(GROUP).enumerate() {
                let codes = &codes[strip + group];
                for (place, &column) in ORDER.iter().enumerate() {
                    if let Some(code) = row.get_mut(column) {
                        *code = codes[place / 4 * 32 + lane * 4 + place % 4];
                    }
                }
            }
            factors.push(bf16_to_f32(scale));
        }
        Some((rows, factors))
    }

    pub(super) fn strip(&self, strip: usize) -> Strip<'_> {
        match &self.form {
            Form::Fp4(w) => {
                let (groups, data, scales) = (self.cols / GROUP, w.data(), w.scales());
                let row = |lane: usize| (strip * STRIP + lane).min(self.rows - 1);
                Strip::Fp4 {
                    rows: std::array::from_fn(|lane| &data[row(lane) * groups * 16..(row(lane) + 1) * groups * 16]),
                    scales: std::array::from_fn(|lane| &scales[row(lane) * groups..(row(lane) + 1) * groups]),
                }
            }
            Form::Packed { codes, scales } => {
                let groups = self.cols.div_ceil(GROUP);
                let range = strip * groups..(strip + 1) * groups;
                Strip::Packed { codes: &codes[range.clone()], scales: &scales[range] }
            }
        }
    }
}

impl Strip<'_> {
    pub(super) fn groups(&self) -> usize {
        match self {
            Self::Fp4 { scales, .. } => scales[0].len(),
            Self::Packed { codes, .. } => codes.len(),
        }
    }
}

/// The bf16 step that rounds every number of `x` to at most 127 steps; NaN if one is not finite, 0 if all are tiny.
fn common_scale(x: &[f32]) -> u16 {
    /// bf16's quiet NaN.
    const NAN: u16 = 0x7fc0;
    let amax = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    if !x.iter().all(|x| x.is_finite()) {
        return NAN;
    }
    // Rounded up, so that no code exceeds 127.
    let scale = ((amax / 127.0).to_bits().wrapping_add(0xffff) >> 16) as u16;
    if bf16_to_f32(scale).is_normal() { scale } else { 0 }
}

/// Rounds 32 weights to multiples of `scale` and calls `put` with the place and code of each.
fn round_group(x: &[f32; GROUP], scale: u16, mut put: impl FnMut(usize, i8)) {
    /// 1.5 · 2^23.
    const ROUND: f32 = 12_582_912.0;
    let step = bf16_to_f32(scale);
    if step.is_normal() {
        for (place, &column) in ORDER.iter().enumerate() {
            // Rounds to the nearest integer, which is left in the low mantissa bits.
            put(place, (x[column] / step + ROUND).to_bits() as i8);
        }
    }
}

#[cfg(test)]
mod tests {
    use troika_base::SharedBytes;

    use super::*;

    fn numbers(rows: usize, cols: usize) -> StoredTensor {
        let number = |i: usize| ((i * 7919 % 1021) as f32 - 510.0) / 100.0;
        let bytes: Vec<u8> = (0..rows * cols).flat_map(|i| number(i).to_le_bytes()).collect();
        let parts = [SharedBytes::new(bytes), SharedBytes::empty(), SharedBytes::empty()];
        StoredTensor::new(Format::F32, rows, cols, parts).expect("the parts fit")
    }

    #[test]
    fn codes_of_channels_are_the_numbers_of_products() {
        for (rows, cols) in [(1, 1), (8, 32), (19, 70), (40, 128)] {
            let w = Int8Matrix::pack_channels(Ctx::serial(), &numbers(rows, cols));
            let (codes, scales) = w.channel_codes(rows / 2..rows).expect("one scale per output");
            let scaled =
                codes.chunks_exact(cols).zip(&scales).flat_map(|(row, s)| row.iter().map(move |c| f32::from(*c) * s));
            assert_eq!(scaled.collect::<Vec<_>>(), w.to_f32()[rows / 2 * cols..], "{rows} x {cols}");
            assert!(codes.iter().any(|code| code.unsigned_abs() > 120), "the range is used");
        }
        let grouped = Int8Matrix::pack(Ctx::serial(), &numbers(4, 64));
        assert_eq!(grouped.channel_codes(0..4), None, "a scale for each group");
    }

    #[test]
    fn packing_allocates_what_was_foreseen() {
        for (rows, cols) in [(1, 1), (8, 32), (9, 33), (40, 100), (0, 5)] {
            let numbers = SharedBytes::new(vec![0u8; 4 * rows * cols]);
            let parts = [numbers, SharedBytes::empty(), SharedBytes::empty()];
            let w = StoredTensor::new(Format::F32, rows, cols, parts).expect("the parts fit");
            let Form::Packed { codes, scales } = Int8Matrix::pack(Ctx::serial(), &w).form else {
                panic!("packing packs");
            };
            let bytes =
                codes.capacity() * size_of_val(&[0i8; STRIP * GROUP]) + scales.capacity() * size_of_val(&[0u16; STRIP]);
            assert_eq!(bytes as u64, Int8Matrix::packed_bytes(rows, cols), "{rows} x {cols}");
        }
    }
}
