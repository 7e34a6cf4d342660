//! The report as Markdown.

use super::{caveats, circumstances, ids, in_words, notes, same_tokens, tables, title};
use crate::record::{Experiment, Record};

/// The whole report.
pub fn render(record: &Record) -> String {
    let mut text = record.experiments.iter().map(|experiment| one(experiment, record)).collect::<Vec<_>>().join("\n");
    let settings = &record.settings;
    text += &format!(
        "\n{} At least {} rounds, prompts of each length in a sample: {}.\n",
        circumstances(record),
        settings.rounds,
        settings.repeats
    );
    text
}

fn one(experiment: &Experiment, record: &Record) -> String {
    let mut text = format!("### {}\n", title(experiment, record));
    if let Some(why) = &experiment.unavailable {
        return text + &format!("\n{why}\n");
    }
    for caveat in caveats(experiment, record) {
        text += &format!("\n> {caveat}\n");
    }
    text.push('\n');
    for line in in_words(experiment) {
        text += &format!("- {line}\n");
    }
    for table in tables(experiment) {
        text += &format!("\n**{}**\n\n{}", table.heading, markdown_table(&table.rows));
    }
    for line in same_tokens(experiment) {
        text += &format!("\n{line}\n");
    }
    for note in notes(experiment, record).into_iter().chain([ids(experiment)]) {
        text += &format!("\n{note}\n");
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
