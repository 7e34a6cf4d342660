//! The table for the terminal: what ran where, how fast, and what may be concluded.

use super::{caveats, gain, length, rate, title};
use crate::arm::ArmName;
use crate::evidence::Engagement;
use crate::record::{ArmRecord, Cell, Experiment, Record};
use crate::stats::median;

const RED: &str = "\x1b[31;1m";
const PLAIN: &str = "\x1b[0m";

/// The whole report. With `color`, what is not as it should be is red.
pub fn render(record: &Record, color: bool) -> String {
    record.experiments.iter().map(|experiment| one(experiment, record, color)).collect::<Vec<_>>().join("\n\n")
}

fn one(experiment: &Experiment, record: &Record, color: bool) -> String {
    let mut text = format!("{}\n", title(experiment, record));
    if let Some(why) = &experiment.unavailable {
        return text + &format!("  {why}\n");
    }
    text += "\nWhat ran where\n";
    for arm in &experiment.arms {
        text += &format!("  {}  {}\n     {}\n", arm.arm.name.letter(), arm.arm.label, machine(arm));
    }
    let has = |name| experiment.arms.iter().any(|arm| arm.arm.name == name);
    text += "\nPrompt tokens computed per second (median, 95 % interval)\n";
    let mut rows = vec![vec!["prompt".to_owned()]];
    rows[0].extend(experiment.arms.iter().map(|arm| arm.arm.name.letter().to_owned()));
    for cell in &experiment.cells {
        let mut row = vec![length(cell)];
        row.extend(cell.arms.iter().map(|arm| rate(&arm.prefill_tps)));
        rows.push(row);
    }
    text += &align(&rows);
    text += "\nWhat makes the difference\n";
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
    text += &align(&rows);
    text += "\nAs a client sees it (medians)\n";
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
    text += &align(&rows);
    for cell in &experiment.cells {
        text += &tokens(cell);
    }
    let notes: Vec<String> = caveats(experiment, record).iter().map(|caveat| format!("  {caveat}\n")).collect();
    if !notes.is_empty() {
        text += &format!("\nRead this first\n{}", notes.concat());
    }
    if color { redden(&text) } else { text }
}

/// Devices, load time and memory of an arm.
fn machine(arm: &ArmRecord) -> String {
    let devices = if arm.devices.is_empty() { "not run".to_owned() } else { arm.devices.join(" + ") };
    let load = median(&arm.load_s).map_or_else(String::new, |load| format!("; ready after {load:.1} s"));
    let memory = arm.peak_memory_bytes.map_or_else(String::new, |bytes| format!(", {} MB at most", bytes >> 20));
    format!("{devices}{load}{memory}")
}

fn tokens(cell: &Cell) -> String {
    let equal = cell.tokens.iter().filter(|check| check.equal == check.prompts).map(|check| {
        format!("{} = {}", check.arm.letter(), check.against.letter())
    });
    let equal: Vec<String> = equal.collect();
    if equal.is_empty() { String::new() } else { format!("  {}: same tokens, {}\n", length(cell), equal.join(", ")) }
}

/// Columns as wide as their widest cell.
fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text += &format!("  {}\n", cells.join("   ").trim_end());
    }
    text
}

/// Puts the words that a reader must not miss in red.
fn redden(text: &str) -> String {
    let words = ["NOT ENGAGED", "DEGRADED", "VOID", "INCOMPLETE"];
    words.iter().fold(text.to_owned(), |text, word| text.replace(word, &format!("{RED}{word}{PLAIN}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".to_owned(), "bb".to_owned()], vec!["ccc".to_owned(), "d".to_owned()]];
        assert_eq!(align(&rows), "  a     bb\n  ccc   d\n");
    }

    #[test]
    fn what_must_not_be_missed_is_red() {
        assert_eq!(redden("arm C: NOT ENGAGED"), "arm C: \u{1b}[31;1mNOT ENGAGED\u{1b}[0m");
    }
}
