//! What a tuning run found, for people.

use std::fmt::Write as _;

use super::file::{Source, TuningFile};
use super::search::label;
use super::{Arm, Gate};

/// The outcome in a page; with `explain` also the way there, kind by kind and step by step.
pub fn render(file: &TuningFile, explain: bool) -> String {
    let outcome = &file.outcome;
    let mut text = String::new();
    let (title, rates) = match file.source {
        Source::Measured => (file.subject.clone(), "Prompt tokens computed per second (median, 95 % interval)"),
        Source::Prediction => (
            format!("PREDICTION, nothing was measured: {}", file.subject),
            "PREDICTED prompt tokens per second of a simulated machine",
        ),
    };
    let samples = outcome.num_samples;
    let _ = writeln!(text, "{title}\n{samples} samples, tiles of {} rows\n", outcome.options.tile);
    if explain {
        explanation(file, &mut text);
    }
    let _ = writeln!(text, "{rates}");
    let lengths: Vec<String> = outcome.prompts.iter().map(|tokens| format!("{tokens} tokens")).collect();
    let _ = writeln!(text, "  {:<26}{:<54}over matched", "", lengths.join(", "));
    for verified in &outcome.verified {
        let rates: Vec<String> =
            verified.tps.iter().map(|tps| format!("{:.1} ({:.1} to {:.1})", tps.median, tps.low, tps.high)).collect();
        let gains: Vec<String> =
            verified.gain.iter().map(|gain| format!("{:+.1} %", (gain.ratio.median - 1.0) * 100.0)).collect();
        let _ = writeln!(text, "  {:<26}{:<54}{}", verified.name, rates.join(", "), gains.join(", "));
    }
    text += "\nWhat the names mean\n";
    for verified in &outcome.verified {
        let gate = match &verified.gate {
            None => String::new(),
            Some(Gate::Passed { summary }) => format!("\n{:28}numeric gate passed: {summary}", ""),
            Some(Gate::Failed { reasons }) => format!("\n{:28}numeric gate NOT passed: {}", "", reasons.join("; ")),
            Some(Gate::NotRun { why }) => format!("\n{:28}numeric gate not run: {why}", ""),
        };
        let void = verified.void.as_ref().map_or_else(String::new, |why| format!("\n{:28}VOID: {why}", ""));
        let meaning = match (&verified.arm, &outcome.options.reference) {
            (Arm::Reference, Some(reference)) => reference.kinds.label(),
            (arm, _) => label(arm),
        };
        let _ = writeln!(text, "  {:<26}{meaning}{gate}{void}", verified.name);
    }
    match (&file.settings, outcome.recommended()) {
        (Some(settings), Some(verified)) => {
            let tail = match settings.tail {
                0 => "tails go to the primary device".to_owned(),
                tail => format!("tails of {tail} rows and more fill up a tile"),
            };
            let name = &verified.name;
            let _ = writeln!(text, "\nRecommended: {name}: {}; {tail}.\n{}.", label(&verified.arm), outcome.why);
        }
        _ => {
            let _ = writeln!(text, "\nNo engine is recommended: {}.", outcome.why);
        }
    }
    text
}

fn explanation(file: &TuningFile, text: &mut String) {
    let outcome = &file.outcome;
    let of = if outcome.recommended().is_some() { "what is recommended" } else { "the best that was found" };
    let _ = writeln!(text, "Kind by kind, in {of}");
    for (name, kind) in &outcome.kinds {
        let _ = writeln!(text, "  {name}: {}", kind.chosen.label());
        for line in &kind.lines {
            let _ = writeln!(text, "    {line}");
        }
    }
    text.push_str("\nStep by step (over the first of each)\n");
    for step in &outcome.steps {
        let _ = writeln!(text, "  {}", step.what);
        for row in &step.rows {
            let change = (row.ratio - 1.0) * 100.0;
            let _ = writeln!(text, "    {:>10.1} tok/s {change:>+7.1} %  {}  {}", row.tps, row.label, row.note);
        }
    }
    text.push('\n');
}
