//! Reports made of a record, and of nothing else: a table for the terminal, Markdown, a page with plots, a trace.

pub mod html;
pub mod markdown;
pub mod plot;
pub mod table;
pub mod trace;

use crate::arm::ArmName;
use crate::evidence::Engagement;
use crate::record::{ArmRecord, Cell, Experiment, Fit, Record};
use crate::stats::{Difference, Interval, Verdict, WANTED_HALF_WIDTH, median};

/// Above this share, others may have disturbed a run.
const DISTURBED: f64 = 0.10;

/// `1234567` as `1,234,567`.
pub(crate) fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (idx, digit) in digits.chars().enumerate() {
        if idx > 0 && (digits.len() - idx).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A rate and its interval.
pub(crate) fn rate(interval: &Option<Interval>) -> String {
    let Some(Interval { median, low, high }) = interval else { return "-".to_owned() };
    let digits = usize::from(*median < 100.0);
    format!("{median:.digits$} ({low:.digits$} to {high:.digits$})")
}

fn percent(ratio: f64) -> String {
    format!("{:+.1} %", (ratio - 1.0) * 100.0)
}

/// What a comparison says, in words.
pub(crate) fn gain(difference: &Option<Difference>) -> String {
    let Some(Difference { ratio, verdict, is_weak }) = difference else { return "-".to_owned() };
    let interval = format!("{} to {}", percent(ratio.low), percent(ratio.high));
    let weak = if *is_weak { ", weak" } else { "" };
    match verdict {
        Verdict::Faster | Verdict::Slower => format!("{} ({interval}{weak})", percent(ratio.median)),
        Verdict::NoDifference => format!("no difference ({interval}{weak})"),
        Verdict::TooFewSamples => "too few rounds".to_owned(),
    }
}

/// The length of a prompt, and how it was chosen.
pub(crate) fn length(cell: &Cell) -> String {
    let fit = match cell.length.fit {
        Fit::Natural => "",
        Fit::Aligned => " aligned",
    };
    format!("{}{fit}", thousands(cell.length.tokens))
}

/// What is measured, in one line.
pub(crate) fn title(experiment: &Experiment, record: &Record) -> String {
    let drafter = if experiment.drafter { "with drafter" } else { "without drafter" };
    let settings = &record.settings;
    format!(
        "{} ({}), {drafter}; regime {}, corpus {}, {} tokens after each prompt",
        experiment.model.name,
        experiment.model.class,
        settings.regime.name(),
        settings.corpus.name(),
        settings.generate
    )
}

/// What a reader must know before believing a number, in whole sentences.
pub(crate) fn caveats(experiment: &Experiment, record: &Record) -> Vec<String> {
    let mut caveats = Vec::new();
    if let Some(why) = &record.incomplete {
        caveats.push(format!("INCOMPLETE ({why}): less was measured than was asked for."));
    }
    if record.program.build != "release" {
        caveats
            .push(format!("The program is a {} build: its speed says nothing about a release.", record.program.build));
    }
    for cell in &experiment.cells {
        if let Some(why) = &cell.void {
            caveats.push(format!("VOID, {}: {why}.", length(cell)));
        }
        for reason in cell.engagement.iter().flat_map(|engagement| engagement.reasons()) {
            caveats.push(format!("{}: {reason}.", length(cell)));
        }
        for check in cell.tokens.iter().filter(|check| check.equal < check.prompts) {
            caveats.push(format!(
                "{}: arm {} gave the tokens of arm {} for {} of {} prompts; they parted after {} tokens at the earliest, {:.1} % lie before that.",
                length(cell),
                check.arm.letter(),
                check.against.letter(),
                check.equal,
                check.prompts,
                check.first_divergence.unwrap_or(0),
                check.agreement * 100.0
            ));
        }
    }
    for cell in &experiment.cells {
        let gains = [cell.geometry_gain, cell.feature_gain];
        let widest = gains.iter().flatten().map(|gain| gain.ratio.half_width()).fold(0.0, f64::max);
        if widest > WANTED_HALF_WIDTH {
            let (length, percent) = (length(cell), widest * 100.0);
            caveats.push(format!("{length}: noisy; a difference below {percent:.0} % may have been missed."));
        }
    }
    for arm in &experiment.arms {
        if let Some(warning) = &arm.warning {
            caveats.push(format!("The server of arm {} warned: {}", arm.arm.name.letter(), warning.trim()));
        }
    }
    let samples = experiment.cells.iter().flat_map(|cell| &cell.arms).flat_map(|arm| &arm.samples);
    let shares: Vec<f64> = samples.filter_map(|sample| sample.others_cpu_share).collect();
    let disturbed = shares.iter().filter(|share| **share > DISTURBED).count();
    if disturbed > 0 {
        caveats.push(format!(
            "In {disturbed} of {} samples other processes took more than {:.0} % of the CPUs.",
            shares.len(),
            DISTURBED * 100.0
        ));
    }
    caveats
}

/// A table with a heading; its first row names the columns.
pub(crate) struct Table {
    pub(crate) heading: &'static str,
    pub(crate) rows: Vec<Vec<String>>,
}

/// All tables of an experiment, in the order in which they should be read.
pub(crate) fn tables(experiment: &Experiment) -> Vec<Table> {
    vec![what_ran(experiment), rates(experiment), differences(experiment), latencies(experiment)]
}

fn what_ran(experiment: &Experiment) -> Table {
    let mut rows = vec![["arm", "what it is", "devices", "ready after", "memory at most"].map(str::to_owned).to_vec()];
    rows.extend(experiment.arms.iter().map(|arm| {
        vec![
            arm.arm.name.letter().to_owned(),
            arm.arm.label.clone(),
            if arm.devices.is_empty() { "not run".to_owned() } else { arm.devices.join(" + ") },
            median(&arm.load_s).map_or_else(|| "-".to_owned(), |load| format!("{load:.1} s")),
            arm.peak_memory_bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{} MB", bytes >> 20)),
        ]
    }));
    Table { heading: "What ran where", rows }
}

fn rates(experiment: &Experiment) -> Table {
    let arms = experiment.arms.iter().map(|arm| arm.arm.name.letter().to_owned());
    let mut rows = vec![["prompt".to_owned()].into_iter().chain(arms).collect::<Vec<_>>()];
    for cell in &experiment.cells {
        let mut row = vec![length(cell)];
        row.extend(cell.arms.iter().map(|arm| rate(&arm.prefill_tps)));
        rows.push(row);
    }
    Table { heading: "Prompt tokens computed per second (median, 95 % interval)", rows }
}

fn differences(experiment: &Experiment) -> Table {
    let has = |name| experiment.arms.iter().any(|arm: &ArmRecord| arm.arm.name == name);
    let mut rows = vec![["prompt", "geometry alone (B/A)"].map(str::to_owned).to_vec()];
    if has(ArmName::C) {
        rows[0].extend(["feature alone (C/B)", "both (C/A)", "arm C is"].map(str::to_owned));
    }
    if has(ArmName::P) {
        rows[0].push("against every core (C/P)".to_owned());
    }
    for cell in &experiment.cells {
        let mut row = vec![length(cell), gain(&cell.geometry_gain)];
        if has(ArmName::C) {
            let state = cell.engagement.as_ref().map_or_else(|| "-".to_owned(), Engagement::label);
            row.extend([gain(&cell.feature_gain), gain(&cell.total_gain), state]);
        }
        if has(ArmName::P) {
            row.push(gain(&cell.against_every_core));
        }
        rows.push(row);
    }
    Table { heading: "What makes the difference", rows }
}

fn latencies(experiment: &Experiment) -> Table {
    let mut rows = vec![vec!["prompt".to_owned()]];
    rows[0].extend(experiment.arms.iter().map(|arm| format!("{}: first token, then tok/s", arm.arm.name.letter())));
    for cell in &experiment.cells {
        let mut row = vec![length(cell)];
        row.extend(cell.arms.iter().map(|arm| match (&arm.ttft_ms, &arm.decode_tps) {
            (Some(ttft), Some(decode)) => format!("{:.0} ms, {:.1}", ttft.median, decode.median),
            _ => "-".to_owned(),
        }));
        rows.push(row);
    }
    Table { heading: "As a client sees it (medians)", rows }
}

/// Which arms gave the same tokens, by length.
pub(crate) fn same_tokens(experiment: &Experiment) -> Vec<String> {
    let line = |cell: &Cell| {
        let equal = cell.tokens.iter().filter(|check| check.equal == check.prompts);
        let equal: Vec<String> =
            equal.map(|check| format!("{} = {}", check.arm.letter(), check.against.letter())).collect();
        (!equal.is_empty()).then(|| format!("{}: same tokens, {}", length(cell), equal.join(", ")))
    };
    experiment.cells.iter().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(thousands(7), "7");
        assert_eq!(thousands(16_385), "16,385");
        assert_eq!(thousands(1_234_567), "1,234,567");
        let interval = Interval { median: 99.96, low: 98.0, high: 101.25 };
        assert_eq!(rate(&Some(interval)), "100.0 (98.0 to 101.2)");
        let ratio = Interval { median: 1.164, low: 1.151, high: 1.179 };
        let faster = Difference { ratio, verdict: Verdict::Faster, is_weak: true };
        assert_eq!(gain(&Some(faster)), "+16.4 % (+15.1 % to +17.9 %, weak)");
        let ratio = Interval { median: 1.001, low: 0.99, high: 1.01 };
        let none = Difference { ratio, verdict: Verdict::NoDifference, is_weak: false };
        assert_eq!(gain(&Some(none)), "no difference (-1.0 % to +1.0 %)");
    }
}
