//! Two records side by side: across commits, settings or machines. A record of a failed feature is not compared as hybrid.

use crate::arm::ArmName;
use crate::record::{Cell, Experiment, Record};
use crate::report::markdown::markdown_table;
use crate::report::table::align;
use crate::report::{gain, length, rate, thousands};
use crate::stats::{Difference, Verdict};

/// How two records differ.
#[derive(Debug)]
pub struct Comparison {
    rows: Vec<Vec<String>>,
    /// What makes the two unlike each other, in sentences.
    pub notes: Vec<String>,
    /// Some rate is lower in the second record.
    pub any_slower: bool,
}

impl Comparison {
    /// `second` over `first`, cell by cell.
    pub fn of(first: &Record, second: &Record) -> Self {
        let mut rows =
            vec![["model", "prompt", "arm", "first", "second", "second over first"].map(str::to_owned).to_vec()];
        let (mut notes, mut any_slower) = (notes(first, second), false);
        for (experiment, cell, other) in pairs(first, second) {
            if cell.ids_sha256 != other.ids_sha256 {
                let what = format!("{}, {}", experiment.model.name, length(cell));
                notes
                    .push(format!("{what}: other prompts (another tokenizer, corpus or number of repeats), left out."));
                continue;
            }
            for arm in &cell.arms {
                let Some(same) = other.arm(arm.arm) else { continue };
                if arm.arm == ArmName::C && !both_hybrid(cell, other) {
                    let what = format!("{}, {}", experiment.model.name, length(cell));
                    notes.push(format!("{what}: arm C is not hybrid in both records, left out."));
                    continue;
                }
                let difference = Difference::of(&same.prefill_rates(), &arm.prefill_rates());
                any_slower |= difference.is_some_and(|difference| difference.verdict == Verdict::Slower);
                rows.push(vec![
                    experiment.model.name.clone(),
                    length(cell),
                    arm.arm.letter().to_owned(),
                    rate(&arm.prefill_tps),
                    rate(&same.prefill_tps),
                    gain(&difference),
                ]);
            }
        }
        if rows.len() == 1 {
            notes.push("No model, length and arm is in both records.".to_owned());
        }
        Self { rows, notes, any_slower }
    }

    /// For the terminal.
    pub fn table(&self) -> String {
        let notes: String = self.notes.iter().map(|note| format!("  {note}\n")).collect();
        format!("Prompt tokens computed per second (median, 95 % interval)\n{}{notes}", align(&self.rows))
    }

    /// As Markdown.
    pub fn markdown(&self) -> String {
        let notes: String = self.notes.iter().map(|note| format!("\n{note}\n")).collect();
        markdown_table(&self.rows) + &notes
    }
}

/// Cells of the same model, drafter and length.
fn pairs<'a>(first: &'a Record, second: &'a Record) -> impl Iterator<Item = (&'a Experiment, &'a Cell, &'a Cell)> {
    let twin = |experiment: &Experiment| {
        let same =
            |other: &&Experiment| other.model.name == experiment.model.name && other.drafter == experiment.drafter;
        second.experiments.iter().find(same)
    };
    first.experiments.iter().filter_map(move |experiment| Some((experiment, twin(experiment)?))).flat_map(
        |(experiment, other)| {
            let cells = experiment.cells.iter().filter_map(|cell| {
                Some((experiment, cell, other.cells.iter().find(|twin| twin.length == cell.length)?))
            });
            cells.collect::<Vec<_>>()
        },
    )
}

fn both_hybrid(cell: &Cell, other: &Cell) -> bool {
    [cell, other].iter().all(|cell| cell.engagement.as_ref().is_some_and(|engagement| engagement.is_hybrid()))
}

fn notes(first: &Record, second: &Record) -> Vec<String> {
    let mut notes = Vec::new();
    let (facts, others) = (&first.host.facts, &second.host.facts);
    if facts != others {
        let cpu = |facts: &crate::host::HostFacts| {
            format!("{} cores, {}", facts.cores, facts.cpu.as_deref().unwrap_or("unknown CPU"))
        };
        notes.push(format!("Other machines: {} against {}.", cpu(facts), cpu(others)));
    } else {
        let apart = second.created_unix_s.abs_diff(first.created_unix_s);
        notes.push(format!(
            "The two were not measured in turn, but {} s apart: what the machine did meanwhile is in the difference.",
            thousands(apart as usize)
        ));
    }
    if first.program.sha256 == second.program.sha256 {
        notes.push("The program is the same.".to_owned());
    }
    if first.program.build != second.program.build {
        notes.push(format!("A {} build against a {} build.", first.program.build, second.program.build));
    }
    if first.settings.regime != second.settings.regime {
        let (regime, other) = (first.settings.regime.name(), second.settings.regime.name());
        notes.push(format!("Regime {regime} against {other}: not comparable."));
    }
    for record in [first, second] {
        notes.extend(record.incomplete.iter().map(|why| format!("INCOMPLETE: {why}.")));
    }
    notes
}
