//! What a report says of speculative decoding.

use super::{Table, length, rate};
use crate::record::{Cell, CellArm, Experiment};

/// How fast tokens came with the drafter and without, and how often it was right.
pub(super) fn table(experiment: &Experiment) -> Option<Table> {
    let row = |cell: &Cell, arm: &CellArm| {
        let drafts = arm.drafts.as_ref()?;
        let without = drafts.without.as_ref();
        let same = match without.map(|without| &without.tokens) {
            None => "-".to_owned(),
            Some(check) => format!("{} of {}", check.equal, check.prompts),
        };
        Some(vec![
            length(cell),
            arm.arm.letter().to_owned(),
            rate(&without.and_then(|without| without.decode_tps)),
            rate(&arm.decode_tps),
            drafts.describe(),
            same,
        ])
    };
    let rows = experiment.cells.iter().flat_map(|cell| cell.arms.iter().filter_map(move |arm| row(cell, arm)));
    let columns = ["prompt", "arm", "without", "with drafter", "accepted", "answers with the same tokens"];
    let rows: Vec<Vec<String>> = std::iter::once(columns.map(str::to_owned).to_vec()).chain(rows).collect();
    let heading = "Tokens after the first per second (median, 95 % interval; two experiments, one after the other)";
    (rows.len() > 1).then_some(Table { heading, rows })
}
