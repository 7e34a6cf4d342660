//! CPU levels: which instructions a kernel may use. Detected once, when the program runs.

use std::str::FromStr;
use std::sync::LazyLock;

/// Of the bits that kernels give. Kept prefixes outlive the build that computed them, and one that gives other bits must not
/// go on from them. So whoever changes the order of a sum or a rounding, in any class, raises this number;
/// `crates/engine/tests/it/revision.rs` notices.
pub const REVISION: u32 = 2;

/// A set of CPU instructions. Each level has its own arithmetic: results of two levels agree within the bounds named
/// beside the kernels, results of one level agree bitwise (the row contract).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CpuLevel {
    /// Plain Rust, every CPU. Multiplies and adds are rounded separately.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C (Intel since 2013, AMD since 2015). Multiply-adds are fused.
    Avx2,
    /// The same with AVX-512F (Intel servers since 2017, AMD since 2022): wider registers where a kernel has a version for
    /// them, which gives the bits of [`Self::Avx2`].
    Avx512,
    /// The same with AVX-512BW and VNNI (Intel servers since 2019, AMD since 2022): integer products in one instruction,
    /// with the bits of [`Self::Avx2`], since integer sums are exact.
    Avx512Vnni,
}

impl CpuLevel {
    /// Every level, slowest first.
    const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Avx512Vnni];

    /// Levels that this CPU has, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|level| level.is_available())
    }

    /// The fastest level that this CPU has.
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self::Scalar)
    }

    /// Whether this CPU has the instructions of the level.
    #[inline]
    pub fn is_available(self) -> bool {
        /// Asked at every call of a kernel, so it must be one load.
        static LEVELS: LazyLock<[bool; 4]> = LazyLock::new(|| CpuLevel::ALL.map(CpuLevel::detect));
        LEVELS[self as usize]
    }

    fn detect(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Self::Avx2.detect() && is_x86_feature_detected!("avx512f"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                Self::Avx512.detect() && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Vnni => false,
        }
    }

    /// Name for logs and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512-vnni",
        }
    }

    /// Name of its arithmetic: levels of the same one give the same bits.
    pub fn arithmetic(self) -> &'static str {
        match self {
            Self::Scalar => "unfused",
            Self::Avx2 | Self::Avx512 | Self::Avx512Vnni => "fused",
        }
    }

    /// Panics if the CPU lacks this level. Every dispatch goes through here, so that a vector function is never
    /// reached on a CPU that cannot run it.
    pub(crate) fn assert_available(self) {
        assert!(self.is_available(), "{self:?} is not available on this CPU");
    }
}

impl FromStr for CpuLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|level| level.name() == text)
            .ok_or_else(|| format!("unknown CPU level `{text}`: expected `scalar`, `avx2`, `avx512` or `avx512-vnni`"))
    }
}

/// `dispatch!(level, scalar, avx2)` evaluates the expression of `level`. The `avx2` expression may call
/// `#[target_feature(enable = "avx2,fma,f16c")]` functions. A third one is for [`CpuLevel::Avx512`] and may use `avx512f`
/// too, a fourth for [`CpuLevel::Avx512Vnni`] and may use `avx512bw` and `avx512vnni`; a level without one does as the level
/// below.
macro_rules! dispatch {
    ($level:expr, $scalar:expr, $avx2:expr) => {{
        let level: crate::CpuLevel = $level;
        level.assert_available();
        match level {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the assertion above saw AVX2, FMA and F16C on this CPU.
            crate::CpuLevel::Avx2 | crate::CpuLevel::Avx512 | crate::CpuLevel::Avx512Vnni => unsafe { $avx2 },
            _ => $scalar,
        }
    }};
    ($level:expr, $scalar:expr, $avx2:expr, $avx512:expr) => {{
        let level: crate::CpuLevel = $level;
        level.assert_available();
        match level {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the assertion above saw AVX2, FMA and F16C on this CPU.
            crate::CpuLevel::Avx2 => unsafe { $avx2 },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the assertion above saw these and AVX-512F on this CPU.
            crate::CpuLevel::Avx512 | crate::CpuLevel::Avx512Vnni => unsafe { $avx512 },
            _ => $scalar,
        }
    }};
    ($level:expr, $scalar:expr, $avx2:expr, $avx512:expr, $vnni:expr) => {{
        let level: crate::CpuLevel = $level;
        level.assert_available();
        match level {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the assertion above saw AVX2, FMA and F16C on this CPU.
            crate::CpuLevel::Avx2 => unsafe { $avx2 },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the assertion above saw these and AVX-512F on this CPU.
            crate::CpuLevel::Avx512 => unsafe { $avx512 },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the assertion above saw these, AVX-512BW and VNNI on this CPU.
            crate::CpuLevel::Avx512Vnni => unsafe { $vnni },
            _ => $scalar,
        }
    }};
}
pub(crate) use dispatch;

/// `compiled_per_level!(fn name(args) => body)` makes `name(level, args)` run the generic straight-line function
/// `body::<FMA>` compiled once for plain Rust (`FMA = false`) and once with AVX2 and FMA (`FMA = true`), where the
/// compiler vectorises it. Element-wise arithmetic gives the same bits in a vector body and in its tail.
macro_rules! compiled_per_level {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) => $body:ident) => {
        $(#[$doc])*
        pub(crate) fn $name(level: crate::CpuLevel, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $type),*) {
                $body::<true>($($arg),*);
            }
            crate::level::dispatch!(level, $body::<false>($($arg),*), avx2($($arg),*));
        }
    };
}
pub(crate) use compiled_per_level;
