//! The report as Markdown.

use super::{caveats, same_tokens, tables, title};
use crate::host::HostState;
use crate::record::{Experiment, Record};

/// The whole report.
pub fn render(record: &Record) -> String {
    let mut text = record.experiments.iter().map(|experiment| one(experiment, record)).collect::<Vec<_>>().join("\n");
    let (facts, settings) = (&record.host.facts, &record.settings);
    text += &format!(
        "\n{} cores, {}, {}; troika {} ({} build, SHA-256 {}); at least {} rounds, {} prompts a sample; state of the host: {} \
         at the start, {} at the end.\n",
        facts.cores,
        facts.cpu.as_deref().unwrap_or("unknown CPU"),
        facts.os,
        record.program.version,
        record.program.build,
        &record.program.sha256[..record.program.sha256.len().min(16)],
        settings.rounds,
        settings.repeats,
        state(&record.host.start),
        state(&record.host.end),
    );
    text
}

/// Load, frequency and pressure in a few words.
pub(crate) fn state(state: &HostState) -> String {
    let parts = [
        state.load_1m.map(|load| format!("load {load:.1}")),
        state.cpu_mhz.map(|mhz| format!("{mhz:.0} MHz")),
        state.memory_pressure.map(|share| format!("memory pressure {:.1} %", share * 100.0)),
        state.cpu_pressure.map(|share| format!("CPU pressure {:.1} %", share * 100.0)),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "unknown".to_owned() } else { parts.join(", ") }
}

fn one(experiment: &Experiment, record: &Record) -> String {
    let mut text = format!("### {}\n", title(experiment, record));
    if let Some(why) = &experiment.unavailable {
        return text + &format!("\n{why}\n");
    }
    for caveat in caveats(experiment, record) {
        text += &format!("\n> {caveat}\n");
    }
    for table in tables(experiment) {
        text += &format!("\n**{}**\n\n{}", table.heading, markdown_table(&table.rows));
    }
    for line in same_tokens(experiment) {
        text += &format!("\n{line}\n");
    }
    text
}

/// A table whose first row names the columns.
pub(crate) fn markdown_table(rows: &[Vec<String>]) -> String {
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().map(|cell| cell.replace('|', "\\|")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let Some((head, body)) = rows.split_first() else { return String::new() };
    let rule = format!("|{}\n", "---|".repeat(head.len()));
    line(head) + &rule + &body.iter().map(line).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_keep_their_cells() {
        let rows = [vec!["a".to_owned(), "b|c".to_owned()], vec!["1".to_owned(), "2".to_owned()]];
        assert_eq!(markdown_table(&rows), "| a | b\\|c |\n|---|---|\n| 1 | 2 |\n");
    }
}
