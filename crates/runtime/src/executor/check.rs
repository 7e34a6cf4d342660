//! Spot checks: now and then the primary device repeats a few rows of what an engine has done and compares. The first
//! difference puts the engines in quarantine: from then on the primary device does everything, in the plan's arithmetic.

use std::ops::Range;

use troika_device::npu::Procedure;
use troika_device::{Output, Part, StepRun};
use troika_graph::NodeId;

use crate::cost::Error;

/// Parts of engines from one check to the next, unless somebody says otherwise. A prime, so that over time every projection of
/// a step has its turn.
const EVERY: u64 = 61;
/// Rows that are compared: few, since one wrong bit is enough to tell, or as many as it takes to judge a mean error.
const ROWS: usize = 4;
const ROWS_OF_A_MEAN: usize = 16;

/// A few rows of a prompt scatter more than the noise of the probe at load, so the bounds are wider than its 2 % and 0.999: an
/// engine that is off by more has not just rounded in its own way. What is no number is not near.
fn is_near(error: &Error) -> bool {
    error.relative <= 0.05 && error.cosine >= 0.995
}

/// Which parts are checked, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checks {
    pub(super) every: u64,
    /// Engines give the bits of [`Procedure::compute`].
    pub(super) repeatable: bool,
    /// Parts of engines since the last check.
    pub(super) since: u64,
    /// Checks so far.
    done: u64,
}

impl Checks {
    pub(super) fn new(repeatable: bool) -> Self {
        Self { every: EVERY, repeatable, since: 0, done: 0 }
    }

    /// Takes note of a part that an engine has done; the rows of it to check, if it is its turn.
    pub(super) fn next(&mut self, part: &Part) -> Option<Range<usize>> {
        self.since += 1;
        if self.since < self.every {
            return None;
        }
        let rows = if self.repeatable { ROWS } else { ROWS_OF_A_MEAN }.min(part.rows.len());
        // Others each time.
        let places = part.rows.len() - rows + 1;
        let start = part.rows.start + self.done as usize * ROWS % places;
        self.done += 1;
        Some(start..start + rows)
    }
}

/// What is wrong with `rows` of a part that is done, if anything is.
pub(super) fn check(run: &StepRun, node: NodeId, part: &Part, rows: Range<usize>, repeatable: bool) -> Option<String> {
    let node = run.graph().node(node);
    let cols = part.procedure.input_cols();
    let x = run.read_f32(node.inputs[0]);
    let want = part.procedure.compute_alone(&x[rows.start * cols..rows.end * cols]);
    let mut got = Vec::with_capacity(want.len());
    for (place, value) in part.procedure.outputs(&rows).into_iter().zip(&node.outputs) {
        // Other parts of the node may still be written: these columns of these rows are nobody else's.
        match run.write_columns(*value, place).output() {
            Output::Rows(numbers) => got.extend_from_slice(numbers),
            Output::Pieces(pieces) => pieces.iter().for_each(|piece| got.extend_from_slice(piece)),
        }
    }
    difference(&part.procedure, &got, &want, (!repeatable).then_some(is_near))
}

/// How an engine's numbers differ from those that its procedure should give, if they do: by more than `admits` lets pass, or
/// without it by any bit.
pub(crate) fn difference(
    procedure: &Procedure,
    got: &[f32],
    want: &[f32],
    admits: Option<fn(&Error) -> bool>,
) -> Option<String> {
    let name = &procedure.name;
    let Some(admits) = admits else {
        let mut pairs = got.iter().zip(want);
        let (got, want) = pairs.find(|(got, want)| got.to_bits() != want.to_bits())?;
        return Some(format!("{name} gives {got} instead of {want}"));
    };
    let error = Error::between(got, want);
    let far = || format!("{name} is off by {:.1} %, cosine {:.4}", error.relative * 100.0, error.cosine);
    (!admits(&error)).then(far)
}
