//! Products of some output channels: any partition, merged, gives the bits of the whole product.

use proptest::prelude::*;
use troika_base::Format;
use troika_kernels::int8::{Int8Matrix, channels_matmul, grouped_matmul, is_cut};
use troika_kernels::{CpuLevel, Ctx, Parallel, Serial, to_f32};

use crate::support::{Noise, Threads, fit_cols, same_bits, tensor, within};

/// Ascending cuts of `0..outputs` where a product may be cut, `wanted` of them at most.
fn cuts(noise: &mut Noise, outputs: usize, wanted: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = (0..wanted).map(|_| noise.below(outputs / 8 + 1) * 8).collect();
    cuts.extend([0, outputs]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Acceptance test 6 of the hybrid spec.
    #[test]
    fn acceptance_06_merged_partitions_equal_the_whole(
        t in 1usize..150, groups in 1usize..4, strips in 1usize..9, tail in 0usize..8, k in 1usize..200,
        parts in 0usize..5, seed: u64,
    ) {
        let mut noise = Noise::new(seed);
        // Several groups must fill strips.
        let per_group = if groups == 1 { strips * 8 + tail } else { strips * 8 };
        for format in [Format::Bf16, Format::Mxfp8, Format::Mxfp4] {
            let w = Int8Matrix::pack_channels(Ctx::serial(), &tensor(&mut noise, format, groups * per_group, fit_cols(format, k)));
            let x = noise.numbers(t * groups * w.cols());
            let cuts = cuts(&mut noise, per_group, parts);
            for par in [&Serial as &dyn Parallel, &Threads(3)] {
                let ctx = Ctx { level: CpuLevel::best(), par };
                let mut want = vec![0.0; t * w.rows()];
                grouped_matmul(ctx, &x, groups, &w, &mut want);
                let mut got = vec![0.0; t * w.rows()];
                for cut in cuts.windows(2) {
                    let mut pieces: Vec<&mut [f32]> =
                        got.chunks_mut(per_group).map(|piece| &mut piece[cut[0]..cut[1]]).collect();
                    channels_matmul(ctx, &x, groups, &w, cut[0]..cut[1], &mut pieces);
                }
                same_bits(&got, &want).map_err(|e| TestCaseError::fail(format!("cuts {cuts:?}: {e}")))?;
            }
        }
    }

    /// One scale per output: off by half a step of the whole row.
    #[test]
    fn channels_round_to_half_a_step_of_their_row(n in 1usize..40, k in 1usize..200, seed: u64) {
        let mut noise = Noise::new(seed);
        let w = tensor(&mut noise, Format::Bf16, n, k);
        let packed = Int8Matrix::pack_channels(Ctx::serial(), &w);
        for (want, got) in to_f32(&w).chunks(k).zip(packed.to_f32().chunks(k)) {
            let amax = want.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            let bound = f64::from(amax) / 254.0 * (1.0 + 1.0 / 127.0);
            within(got, want, |_| bound).map_err(TestCaseError::fail)?;
        }
    }
}

#[test]
fn cuts_are_at_strips_and_at_the_end() {
    let allowed: Vec<usize> = (0..30).filter(|channel| is_cut(*channel, 20)).collect();
    assert_eq!(allowed, [0, 8, 16, 20]);
}
