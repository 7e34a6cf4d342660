//! The bits of each class belong to a revision of the kernels, which is part of the names of kept prefixes. Only where the
//! C library is GNU's: exponentials come from it, and another one may give other bits.

use troika_base::NumericClass;
use troika_device::cpu::{CpuLevel, REVISION};

use crate::support::{chunked, open, options_for};

/// Logits of 300 tokens under that revision at level AVX2, as a number for each class.
const BITS: (u32, [u64; 4]) =
    (2, [8_270_970_594_854_773_071, 4_852_744_477_468_237_457, 7_440_897_195_360_438_814, 7_209_518_931_079_467_710]);

/// FNV-1a.
fn fingerprint(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|value| value.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn other_bits_are_another_revision() {
    if !CpuLevel::Avx2.is_available() {
        println!("skipped: no AVX2");
        return;
    }
    let tokens: Vec<u32> = (0..300).map(|i| (i * i * 7 + i * 31) % 383).collect();
    let bits = NumericClass::ALL.map(|class| {
        let mut options = options_for(class);
        options.cpu.level = CpuLevel::Avx2;
        fingerprint(&chunked(&mut open("tiny", options), &tokens, &[200, 1, 1, 98]))
    });
    assert_eq!(
        (REVISION, bits),
        BITS,
        "kernels give other bits than those of their revision: raise `REVISION` in crates/kernels/src/level.rs, so that \
         prefixes kept by older builds are not continued, and write the left side here"
    );
}
