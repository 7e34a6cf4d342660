//! How the output channels of a projection are cut (section 4.3 of the hybrid spec): first those of the engine's instances,
//! in their order, then the primary device's. Grouped projections are cut inside of each group.

use std::ops::Range;

/// Where an engine and the primary device allow a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Channels of an instance are a multiple of this.
    pub engine: usize,
    /// Channels of the primary device are a multiple of this, unless they reach to the last one.
    pub primary: usize,
}

/// Channels of each instance and of the primary device, of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// One per instance that gets any.
    pub instances: Vec<Range<usize>>,
    /// The rest, maybe empty.
    pub primary: Range<usize>,
}

impl Partition {
    /// Gives `fraction` of `out` channels to `instances` engines, each the same number. `None` if no valid cut comes of it.
    pub fn split(out: usize, fraction: f64, instances: usize, alignment: Alignment) -> Option<Self> {
        let step = lcm(alignment.engine, alignment.primary);
        let each = ((out as f64 * fraction / instances as f64) as usize / step) * step;
        let taken = each * instances;
        let valid = each > 0 && taken < out;
        valid.then(|| Self {
            instances: (0..instances).map(|i| i * each..(i + 1) * each).collect(),
            primary: taken..out,
        })
    }

    /// Gives all `out` channels to `instances` engines; the last may get fewer. `None` if the alignment forbids it.
    pub fn whole(out: usize, instances: usize, alignment: Alignment) -> Option<Self> {
        let step = lcm(alignment.engine, alignment.primary);
        let each = out.div_ceil(instances).next_multiple_of(step);
        let ranges = (0..instances).map(|i| (i * each).min(out)..((i + 1) * each).min(out));
        let ranges: Vec<Range<usize>> = ranges.filter(|range| !range.is_empty()).collect();
        let aligned = ranges.iter().all(|range| range.len().is_multiple_of(alignment.engine));
        (aligned && !ranges.is_empty()).then_some(Self { instances: ranges, primary: out..out })
    }

    /// What part of the channels the engines really have.
    pub fn effective_fraction(&self) -> f64 {
        self.primary.start as f64 / self.primary.end.max(1) as f64
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}
