//! Numeric classes: the named arithmetic a result was computed in.

use std::fmt;
use std::str::FromStr;

/// The arithmetic of a forward pass. Part of every cache key, since results of two classes must never mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NumericClass {
    /// Weights dequantised, every product and sum in `f32`. What the golden tests use.
    Exact,
    /// As [`Self::Exact`], and cache rows rounded as published: K=V rows to fp8 in groups of 64, index rows and
    /// queries Hadamard-rotated and rounded to fp4 in groups of 32 (model spec, section 4).
    Official,
    /// Activations rounded to 8 bits per token and group of 32 channels before integer products; fp4 weights as they
    /// are, fp8 weights rounded to 8 bits per output and group of 32. Attention rounds queries and rows to 12 bits and more,
    /// index scores to 8. Everything else as [`Self::Exact`].
    Fast,
    /// As [`Self::Fast`], but only products with fp4 weights are integer ones; no weight and no row is rounded.
    FastFp8Exact,
}

impl NumericClass {
    /// Every class, in the order shown to people.
    pub const ALL: [Self; 4] = [Self::Exact, Self::Official, Self::Fast, Self::FastFp8Exact];

    /// Its name on the command line, in reports and in cache keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Official => "official",
            Self::Fast => "fast",
            Self::FastFp8Exact => "fast-fp8-exact",
        }
    }

    /// Whether some products are integer ones, with activations rounded.
    pub fn has_integer_products(self) -> bool {
        matches!(self, Self::Fast | Self::FastFp8Exact)
    }

    /// Whether attention and index scores round queries and what a sequence has kept.
    pub fn rounds_rows(self) -> bool {
        self == Self::Fast
    }
}

impl fmt::Display for NumericClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for NumericClass {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|class| class.name() == text).ok_or_else(|| {
            format!("unknown numeric class `{text}`: expected `exact`, `official`, `fast` or `fast-fp8-exact`")
        })
    }
}
