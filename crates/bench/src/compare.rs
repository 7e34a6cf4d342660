//! Two records side by side: across commits, settings or machines. A record of a failed feature is not compared as hybrid.

use crate::arm::ArmName;
use crate::record::{Cell, CellArm, Experiment, Record};
use crate::report::markdown::markdown_table;
use crate::report::table::align;
use crate::report::{gain, length, rate, start, thousands};
use crate::stats::{Difference, Verdict};

/// What a rate is of.
const PROMPT: &str = "prompt";
const ANSWER: &str = "answer";

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
        let head = ["model", "prompt", "arm", "tokens of the", "first", "second", "second over first"];
        let mut comparison =
            Self { rows: vec![head.map(str::to_owned).to_vec()], notes: notes(first, second), any_slower: false };
        let (tokens, others) = (first.settings.generate, second.settings.generate);
        // Answers of other lengths are at other positions.
        let rates: &[&str] = if tokens == others { &[PROMPT, ANSWER] } else { &[PROMPT] };
        if first.settings.regime == second.settings.regime {
            pairs(first, second).for_each(|(experiment, other)| comparison.experiment(experiment, other, rates));
        }
        if tokens != others {
            comparison.notes.push(format!("Answers of {tokens} against {others} tokens: left out."));
        }
        if comparison.is_empty() {
            comparison.notes.push("No model, length and arm is in both records.".to_owned());
        }
        comparison
    }

    fn experiment(&mut self, experiment: &Experiment, other: &Experiment, wanted: &[&str]) {
        let (model, with) = (&experiment.model, &other.model);
        if model.class != with.class {
            self.notes.push(format!("{}: class {} against {}, left out.", model.name, model.class, with.class));
            return;
        }
        if model.weights_sha256 != with.weights_sha256 {
            self.notes.push(format!(
                "{}: other weights, by their digests {} and {}. (Those of large checkpoints differ from disk to disk.)",
                model.name,
                start(&model.weights_sha256),
                start(&with.weights_sha256)
            ));
        }
        for arm in &experiment.arms {
            let Some(same) = other.arms.iter().find(|same| same.arm.name == arm.arm.name) else { continue };
            if arm.arm.args != same.arm.args {
                let (args, others) = (arm.arm.args.join(" "), same.arm.args.join(" "));
                let letter = arm.arm.name.letter();
                self.notes.push(format!("{}: arm {letter} was started with `{args}` and `{others}`.", model.name));
            }
        }
        for cell in &experiment.cells {
            if let Some(twin) = other.cells.iter().find(|twin| twin.length == cell.length) {
                self.cell(&model.name, cell, twin, wanted);
            }
        }
    }

    fn cell(&mut self, model: &str, cell: &Cell, other: &Cell, wanted: &[&str]) {
        let length = length(cell);
        if cell.ids_sha256 != other.ids_sha256 {
            self.notes.push(format!(
                "{model}, {length}: other prompts (another tokenizer, corpus or number of repeats), left out."
            ));
            return;
        }
        if cell.void.is_some() || other.void.is_some() {
            self.notes.push(format!("{model}, {length}: VOID, left out."));
            return;
        }
        for arm in &cell.arms {
            let Some(same) = other.arm(arm.arm) else { continue };
            if arm.arm == ArmName::C && !both_hybrid(cell, other) {
                self.notes.push(format!("{model}, {length}: arm C is not hybrid in both records, left out."));
                continue;
            }
            let decode = |arm: &CellArm| arm.samples.iter().map(|sample| sample.decode_tps).collect::<Vec<_>>();
            let rates = [
                (PROMPT, arm.prefill_rates(), same.prefill_rates(), arm.prefill_tps, same.prefill_tps),
                (ANSWER, decode(arm), decode(same), arm.decode_tps, same.decode_tps),
            ];
            for (what, of, others, tps, other_tps) in rates.into_iter().filter(|(what, ..)| wanted.contains(what)) {
                if [&of, &others].iter().any(|rates| rates.contains(&0.0)) {
                    let letter = arm.arm.letter();
                    self.notes.push(format!(
                        "{model}, {length}, arm {letter}: a sample has no rate of the {what}, left out."
                    ));
                    continue;
                }
                let difference = Difference::of(&others, &of);
                self.any_slower |= difference.is_some_and(|difference| difference.verdict == Verdict::Slower);
                let words = [model, &length, arm.arm.letter(), what].map(str::to_owned);
                self.rows.push([&words[..], &[rate(&tps), rate(&other_tps), gain(&difference)]].concat());
            }
        }
    }

    /// Nothing of one record is in the other.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// For the terminal.
    pub fn table(&self) -> String {
        let notes: String = self.notes.iter().map(|note| format!("  {note}\n")).collect();
        format!("Tokens per second (median, 95 % interval)\n{}{notes}", align(&self.rows))
    }

    /// As Markdown.
    pub fn markdown(&self) -> String {
        let notes: String = self.notes.iter().map(|note| format!("\n{note}\n")).collect();
        markdown_table(&self.rows) + &notes
    }
}

/// Experiments with the same model and drafter.
fn pairs<'a>(first: &'a Record, second: &'a Record) -> impl Iterator<Item = (&'a Experiment, &'a Experiment)> {
    first.experiments.iter().filter_map(|experiment| {
        let same =
            |other: &&Experiment| other.model.name == experiment.model.name && other.drafter == experiment.drafter;
        Some((experiment, second.experiments.iter().find(same)?))
    })
}

fn both_hybrid(cell: &Cell, other: &Cell) -> bool {
    [cell, other].iter().all(|cell| cell.engagement.as_ref().is_some_and(|engagement| engagement.is_hybrid()))
}

fn notes(first: &Record, second: &Record) -> Vec<String> {
    let called = |record: &Record| {
        let label = record.label.as_deref().unwrap_or("without a --label");
        format!("{label} ({}, {})", record.program.version, start(&record.program.sha256))
    };
    let mut notes = vec![format!("First: {}. Second: {}.", called(first), called(second))];
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
        notes.push(format!("Regime {regime} against {other}: not comparable, so nothing is."));
    }
    for record in [first, second] {
        notes.extend(record.incomplete.iter().map(|why| format!("INCOMPLETE: {why}.")));
    }
    notes
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::report::tests::record;

    fn of(change: impl FnOnce(&mut Value)) -> (Vec<String>, String, bool) {
        let comparison = Comparison::of(&record(|_| {}), &record(change));
        let rows = comparison.rows[1..].iter().map(|row| format!("{} {}: {}", row[2], row[3], row[6]));
        (rows.collect(), comparison.notes.join("\n"), comparison.any_slower)
    }

    #[test]
    fn prompts_and_answers_of_all_arms_are_compared() {
        let (rows, notes, slower) = of(|_| {});
        assert_eq!(rows.len(), 6);
        assert!(rows[0].starts_with("A prompt: no difference"), "{rows:?}");
        assert!(notes.contains("The program is the same") && !slower, "{notes}");
        let slow = |value: &mut Value| {
            for sample in value["experiments"][0]["cells"][0]["arms"][0]["samples"].as_array_mut().expect("samples") {
                sample["decode_tps"] = 20.0.into();
            }
        };
        let (rows, _, slower) = of(slow);
        assert_eq!((rows[1].as_str(), slower), ("A answer: -33.3 % (-33.3 % to -33.3 %)", true));
    }

    #[test]
    fn what_differs_is_said_or_left_out() {
        let (rows, notes, _) = of(|value| value["label"] = "abc123".into());
        assert!(notes.starts_with("First: without a --label (1.0, 0123456789abcdef). Second: abc123 ("), "{notes}");
        assert_eq!(rows.len(), 6);
        let (rows, notes, _) = of(|value| value["settings"]["generate"] = 8.into());
        assert!(rows.len() == 3 && notes.contains("Answers of 4 against 8 tokens: left out."), "{notes}");
        let (rows, notes, _) = of(|value| value["settings"]["regime"] = "service".into());
        assert!(rows.is_empty() && notes.contains("Regime lab against service"), "{notes}");
        let model = |name: &str, value: &str| {
            let (name, value) = (name.to_owned(), value.to_owned());
            of(move |record| record["experiments"][0]["model"][name.as_str()] = value.into())
        };
        let (rows, notes, _) = model("class", "exact");
        assert!(rows.is_empty() && notes.contains("class fast against exact, left out"), "{notes}");
        let (rows, notes, _) = model("weights_sha256", "v");
        assert!(rows.len() == 6 && notes.contains("m: other weights, by their digests w and v"), "{notes}");
        let (rows, notes, _) = of(|value| value["experiments"][0]["arms"][0]["arm"]["args"] = json!(["--chunk=64"]));
        let started = "m: arm A was started with `--chunk=256` and `--chunk=64`.";
        assert!(rows.len() == 6 && notes.contains(started), "{notes}");
        let (rows, notes, _) = of(|value| value["experiments"][0]["cells"][0]["void"] = "w".into());
        assert!(rows.is_empty() && notes.contains("m, 513 aligned: VOID, left out."), "{notes}");
        let idle = json!({"state": "not_engaged", "reasons": []});
        let (rows, notes, _) = of(|value| value["experiments"][0]["cells"][0]["engagement"] = idle);
        assert!(rows.len() == 4 && notes.contains("arm C is not hybrid in both records"), "{notes}");
    }
}
