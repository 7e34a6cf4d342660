//! Sizes as people write them.

use std::fmt;
use std::str::FromStr;

/// Bytes, written as a number with K, M, G or T (powers of 1024) behind it or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = text.split_at(text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).len());
        let shift = match unit.trim_end_matches(['B', 'b', 'i']).to_ascii_uppercase().as_str() {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            "T" => 40,
            _ => return Err(format!("{unit} is no unit: use K, M, G or T")),
        };
        let number: u64 = number.trim().parse().map_err(|_| format!("{text} is no size: write e.g. 512M or 4G"))?;
        number
            .checked_shl(shift)
            .filter(|bytes| bytes >> shift == number)
            .map(Self)
            .ok_or(format!("{text} is too large"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes < 10 << 10 => write!(f, "{bytes} B"),
            bytes if bytes < 10 << 20 => write!(f, "{} KiB", bytes >> 10),
            bytes if bytes < 10 << 30 => write!(f, "{} MiB", bytes >> 20),
            bytes => write!(f, "{} GiB", bytes >> 30),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let table =
            [("0", 0), ("512", 512), ("10K", 10 << 10), ("512M", 512 << 20), ("4GiB", 4 << 30), ("1t", 1 << 40)];
        for (text, bytes) in table {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "1X", "99999999999T", "ä"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
