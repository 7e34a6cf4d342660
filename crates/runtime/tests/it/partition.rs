//! Cuts of output channels: what must hold for each, and the numbers of the hybrid spec.

use proptest::prelude::*;
use troika_runtime::partition::{Alignment, Partition};

/// The reference engines of the hybrid spec, section 4.3.
const REFERENCE: Alignment = Alignment { engine: 128, primary: 64 };

proptest! {
    /// Acceptance test 6 of the hybrid spec; that merged products are equal is tested with the kernels.
    #[test]
    fn acceptance_06_partitions_cover_every_channel_once(
        out in 1usize..5000, fraction in 0.0f64..1.0, instances in 1usize..5, engine in 0usize..8, primary in 0usize..7,
    ) {
        let alignment = Alignment { engine: 1 << engine, primary: 1 << primary };
        let cuts = [Partition::split(out, fraction, instances, alignment), Partition::whole(out, instances, alignment)];
        for cut in cuts.into_iter().flatten() {
            let mut next = 0;
            for range in &cut.instances {
                prop_assert_eq!(range.start, next, "instances first, in their order");
                prop_assert!(!range.is_empty() && range.len().is_multiple_of(alignment.engine));
                next = range.end;
            }
            prop_assert_eq!(&cut.primary, &(next..out));
            prop_assert!(next == out || next.is_multiple_of(alignment.primary));
            prop_assert!(cut.instances.len() <= instances);
            prop_assert_eq!(cut.effective_fraction(), next as f64 / out as f64);
        }
        if let Some(cut) = Partition::split(out, fraction, instances, alignment) {
            prop_assert!(cut.effective_fraction() <= fraction && !cut.primary.is_empty());
            prop_assert!(cut.instances.windows(2).all(|pair| pair[0].len() == pair[1].len()));
        }
    }
}

#[test]
fn the_reference_engines_get_the_fractions_of_the_spec() {
    let effective = |out, fraction| Partition::split(out, fraction, 2, REFERENCE).map(|cut| cut.effective_fraction());
    assert_eq!(effective(32_768, 0.5), Some(0.5), "query");
    assert_eq!(effective(4096, 0.65), Some(0.625), "mlp_down");
    assert_eq!(effective(4160, 0.6), Some(2304.0 / 4160.0), "attention_input_sparse");
    assert_eq!(effective(256, 0.5), None, "fewer channels than two instances want");
    let whole = Partition::whole(4096, 2, REFERENCE).expect("it fits");
    assert_eq!((whole.instances, whole.primary), (vec![0..2048, 2048..4096], 4096..4096));
    assert_eq!(Partition::whole(4160, 2, REFERENCE), None, "the second instance would have 1,984 channels");
}
