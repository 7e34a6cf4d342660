//! The tables for the terminal.

use super::{caveats, circumstances, ids, in_words, notes, same_tokens, tables, title};
use crate::record::{Experiment, Record};

const RED: &str = "\x1b[31;1m";
const PLAIN: &str = "\x1b[0m";

/// The whole report. With `color`, what is not as it should be is red.
pub fn render(record: &Record, color: bool) -> String {
    let text = record.experiments.iter().map(|experiment| one(experiment, record)).collect::<Vec<_>>().join("\n");
    let text = format!("{text}\n{}\n", circumstances(record));
    if color { redden(&text) } else { text }
}

fn one(experiment: &Experiment, record: &Record) -> String {
    let lines = |lines: &[String]| lines.iter().map(|line| format!("  {line}\n")).collect::<String>();
    let mut text = format!("{}\n", title(experiment, record));
    if let Some(why) = &experiment.unavailable {
        return text + &format!("  {why}\n");
    }
    for table in tables(experiment) {
        text += &format!("\n{}\n{}", table.heading, align(&table.rows));
    }
    text += &lines(&same_tokens(experiment));
    text += &format!("  {}\n\nIn words\n", ids(experiment));
    text += &lines(&in_words(experiment));
    text += &lines(&notes(experiment, record));
    let caveats = caveats(experiment, record);
    if !caveats.is_empty() {
        text += &format!("\nBefore you believe it\n{}", lines(&caveats));
    }
    text
}

/// Columns as wide as their widest cell.
pub(crate) fn align(rows: &[Vec<String>]) -> String {
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
    let words = ["NOT ENGAGED", "DEGRADED", "SIMULATED", "VOID", "INCOMPLETE"];
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
