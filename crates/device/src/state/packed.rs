//! Rows as bytes, for a store: packed where the rounding of the numeric class makes that exact (model spec 11.2), as 32-bit
//! floats otherwise. What comes back is equal bit by bit; rows that a packing cannot hold are refused.

use troika_kernels::formats::{E2M1, E4M3, e8m0_to_f32, f32_to_e2m1, f32_to_e4m3, power_of_two_scale};

/// How the rows of a model lie in files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// As they are in memory.
    #[default]
    Floats,
    /// K=V rows as e4m3 with a scale for each 64 channels but for the last `rotary` ones, index rows as e2m1 with a scale for
    /// each 32: the grids of the class `official`. Lanes are not rounded, so they are floats.
    Official {
        /// Channels that are rotated, and not rounded.
        rotary: usize,
    },
}

/// How one row lies in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowFormat {
    F32,
    /// Codes, scales, and the last channels as floats.
    E4m3 {
        rotary: usize,
    },
    /// Codes, the even channel in the lower half, and scales.
    E2m1,
}

const E4M3_GROUP: usize = 64;
const E2M1_GROUP: usize = 32;

impl Packing {
    /// Version of the layout that a payload has.
    pub fn layout_version(self) -> u32 {
        match self {
            Self::Floats => 1,
            Self::Official { .. } => 2,
        }
    }

    pub(super) fn kv(self) -> RowFormat {
        match self {
            Self::Floats => RowFormat::F32,
            Self::Official { rotary } => RowFormat::E4m3 { rotary },
        }
    }

    pub(super) fn index(self) -> RowFormat {
        match self {
            Self::Floats => RowFormat::F32,
            Self::Official { .. } => RowFormat::E2m1,
        }
    }
}

impl RowFormat {
    /// Bytes of a row of `dim` channels.
    pub(super) fn bytes(self, dim: usize) -> usize {
        match self {
            Self::F32 => dim * 4,
            Self::E4m3 { rotary } => {
                let plain = dim.saturating_sub(rotary);
                plain + plain.div_ceil(E4M3_GROUP) + (dim - plain) * 4
            }
            Self::E2m1 => dim.div_ceil(2) + dim.div_ceil(E2M1_GROUP),
        }
    }

    /// Appends a row. False if the format cannot hold it; what was appended is worthless then.
    pub(super) fn pack(self, row: &[f32], out: &mut Vec<u8>) -> bool {
        match self {
            Self::F32 => {
                out.extend(row.iter().flat_map(|x| x.to_le_bytes()));
                true
            }
            Self::E4m3 { rotary } => {
                let (plain, rotated) = row.split_at(row.len().saturating_sub(rotary));
                let (mut codes, mut scales) = (Vec::with_capacity(plain.len()), Vec::new());
                for group in plain.chunks(E4M3_GROUP) {
                    let scale = power_of_two_scale(amax(group).max(1e-4), 1.0 / 448.0);
                    scales.push((scale.to_bits() >> 23) as u8);
                    codes.extend(group.iter().map(|x| f32_to_e4m3(x / scale)));
                    let decoded =
                        codes[codes.len() - group.len()..].iter().map(|code| E4M3[usize::from(*code)] * scale);
                    if !same_bits(group, decoded) {
                        return false;
                    }
                }
                out.extend(codes);
                out.extend(scales);
                Self::F32.pack(rotated, out)
            }
            Self::E2m1 => {
                let (mut codes, mut scales) = (Vec::with_capacity(row.len()), Vec::new());
                for group in row.chunks(E2M1_GROUP) {
                    let scale = power_of_two_scale(amax(group).max(6.0 * f32::MIN_POSITIVE), 1.0 / 6.0);
                    scales.push((scale.to_bits() >> 23) as u8);
                    codes.extend(group.iter().map(|x| f32_to_e2m1(x / scale)));
                    let decoded =
                        codes[codes.len() - group.len()..].iter().map(|code| E2M1[usize::from(*code)] * scale);
                    if !same_bits(group, decoded) {
                        return false;
                    }
                }
                out.extend(codes.chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 4));
                out.extend(scales);
                true
            }
        }
    }

    /// Appends the row of `dim` channels that `bytes` are, as many as [`Self::bytes`] says.
    pub(super) fn unpack(self, dim: usize, bytes: &[u8], out: &mut Vec<f32>) {
        match self {
            Self::F32 => out.extend(bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four))),
            Self::E4m3 { rotary } => {
                let plain = dim.saturating_sub(rotary);
                let (codes, rest) = bytes.split_at(plain);
                let (scales, rotated) = rest.split_at(plain.div_ceil(E4M3_GROUP));
                for (codes, scale) in codes.chunks(E4M3_GROUP).zip(scales) {
                    let scale = e8m0_to_f32(*scale);
                    out.extend(codes.iter().map(|code| E4M3[usize::from(*code)] * scale));
                }
                Self::F32.unpack(dim - plain, rotated, out);
            }
            Self::E2m1 => {
                let (codes, scales) = bytes.split_at(dim.div_ceil(2));
                let codes = codes.iter().flat_map(|pair| [pair & 15, pair >> 4]).take(dim);
                let scale = |channel: usize| e8m0_to_f32(scales[channel / E2M1_GROUP]);
                out.extend(codes.enumerate().map(|(channel, code)| E2M1[usize::from(code)] * scale(channel)));
            }
        }
    }
}

fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0f32, |max, x| max.max(x.abs()))
}

fn same_bits(row: &[f32], decoded: impl Iterator<Item = f32>) -> bool {
    row.iter().zip(decoded).all(|(x, y)| x.to_bits() == y.to_bits())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use troika_kernels::{fake_fp4, fake_fp8, hadamard};

    use super::*;

    fn round_trip(format: RowFormat, row: &[f32]) -> Option<Vec<f32>> {
        let (mut bytes, mut back) = (vec![9], Vec::new());
        if !format.pack(row, &mut bytes) {
            return None;
        }
        assert_eq!(bytes.len(), 1 + format.bytes(row.len()));
        format.unpack(row.len(), &bytes[1..], &mut back);
        Some(back)
    }

    fn bits(row: &[f32]) -> Vec<u32> {
        row.iter().map(|x| x.to_bits()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

        /// Any floats, NaN and infinities included.
        #[test]
        fn floats_come_back(row in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..90)) {
            prop_assert_eq!(bits(&round_trip(RowFormat::F32, &row).expect("holds everything")), bits(&row));
        }

        /// Rows rounded as the class `official` rounds them, large and tiny, with zeros of both signs.
        #[test]
        fn official_rows_come_back(
            mut row in prop::collection::vec((any::<i16>(), -40i32..40).prop_map(|(x, e)| f32::from(x) * 2f32.powi(e)), 1..200),
            spread in 0i32..3,
            rotary in 0usize..3,
        ) {
            // Mostly numbers of one size, as in real rows; sometimes not.
            row.iter_mut().for_each(|x| if spread < 2 { *x = (*x % 8.0) * 2f32.powi(spread * 3) });
            let rotary = (rotary * 32).min(row.len());
            let plain = row.len() - rotary;
            fake_fp8(&mut row[..plain], 64);
            let back = round_trip(RowFormat::E4m3 { rotary }, &row).expect("on the grid");
            prop_assert_eq!(bits(&back), bits(&row));
            row.truncate(row.len().next_power_of_two() / 2);
            if !row.is_empty() {
                hadamard(&mut row);
                fake_fp4(&mut row, 32);
                prop_assert_eq!(bits(&round_trip(RowFormat::E2m1, &row).expect("on the grid")), bits(&row));
            }
        }

        /// Rows that are not on the grid are refused, never changed.
        #[test]
        fn other_rows_are_refused_or_come_back(row in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 1..90)) {
            for format in [RowFormat::E4m3 { rotary: 4 }, RowFormat::E2m1] {
                if let Some(back) = round_trip(format, &row) {
                    prop_assert_eq!(bits(&back), bits(&row));
                }
            }
        }
    }

    #[test]
    fn sizes_are_those_of_the_model_spec() {
        // Here the rotated channels are floats of 32 bits.
        assert_eq!(RowFormat::E4m3 { rotary: 64 }.bytes(512), 448 + 7 + 64 * 4);
        assert_eq!(RowFormat::E2m1.bytes(128), 64 + 4);
        assert_eq!(round_trip(RowFormat::E2m1, &[0.3, 6.0]), None);
        assert_eq!(round_trip(RowFormat::E4m3 { rotary: 0 }, &[f32::INFINITY]), None);
    }
}
