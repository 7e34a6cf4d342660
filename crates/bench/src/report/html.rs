//! The report as one page that needs nothing else: tables, plots as SVG, no script.

use std::fmt::Write;

use super::markdown::state;
use super::{Table, caveats, plot, same_tokens, tables, title};
use crate::BenchError;
use crate::record::{Experiment, Record};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222;\
background:#fff}table{border-collapse:collapse;margin:.5rem 0 1.5rem}th,td{padding:.25rem .9rem .25rem 0;text-align:left;\
border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}.mind{border-left:4px solid #c33;padding:.2rem .8rem;\
background:#fdf3f3}.bad{color:#c00;font-weight:700}h2{margin-top:2.5rem}svg{max-width:100%;height:auto}footer{color:#666}";

/// The whole page.
///
/// # Errors
///
/// If a plot cannot be drawn.
pub fn render(record: &Record) -> Result<String, BenchError> {
    let mut body = String::from("<h1>troika bench</h1>\n");
    for experiment in &record.experiments {
        one(experiment, record, &mut body)?;
    }
    let facts = &record.host.facts;
    let _ = writeln!(
        body,
        "<footer><p>{} cores, {}, {}. troika {} ({} build), SHA-256 {}.</p><p>Host at the start: {}. At the end: {}.</p>\
         </footer>",
        facts.cores,
        escape(facts.cpu.as_deref().unwrap_or("unknown CPU")),
        escape(&facts.os),
        escape(&record.program.version),
        escape(&record.program.build),
        escape(&record.program.sha256),
        state(&record.host.start),
        state(&record.host.end),
    );
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>troika bench</title><style>{STYLE}</style>\
         </head><body>\n{body}</body></html>\n"
    ))
}

fn one(experiment: &Experiment, record: &Record, body: &mut String) -> Result<(), BenchError> {
    let _ = writeln!(body, "<h2>{}</h2>", escape(&title(experiment, record)));
    if let Some(why) = &experiment.unavailable {
        let _ = writeln!(body, "<p>{}</p>", escape(why));
        return Ok(());
    }
    let caveats = caveats(experiment, record);
    if !caveats.is_empty() {
        let lines: String = caveats.iter().map(|caveat| format!("<li>{}</li>", marked(caveat))).collect();
        let _ = writeln!(body, "<div class=\"mind\"><p>Before you believe it:</p><ul>{lines}</ul></div>");
    }
    for table in tables(experiment) {
        html_table(&table, body);
    }
    for line in same_tokens(experiment) {
        let _ = writeln!(body, "<p>{}</p>", escape(&line));
    }
    let plots = [
        ("Rate by length of the prompt", plot::rates(experiment)?),
        ("Time of one prompt by operation and device", plot::profile(experiment)?),
        ("One prefill step of each arm, device by device", plot::steps(experiment)?),
        ("One request of each arm, phase by phase", plot::timeline(experiment)?),
    ];
    for (heading, svg) in plots {
        if let Some(svg) = svg {
            let _ = writeln!(body, "<h3>{heading}</h3>\n{svg}");
        }
    }
    Ok(())
}

fn html_table(table: &Table, body: &mut String) {
    let row = |tag: &str, row: &Vec<String>| {
        let cells: String = row.iter().map(|cell| format!("<{tag}>{}</{tag}>", marked(cell))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let Some((head, rest)) = table.rows.split_first() else { return };
    let rows: String = rest.iter().map(|cells| row("td", cells)).collect();
    let _ = writeln!(body, "<h3>{}</h3>\n<table>{}{rows}</table>", escape(table.heading), row("th", head));
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Escaped, with the words that must not be missed in red.
fn marked(text: &str) -> String {
    let words = ["NOT ENGAGED", "DEGRADED", "SIMULATED", "VOID", "INCOMPLETE"];
    let mark = |text: String, word: &&str| text.replace(word, &format!("<span class=\"bad\">{word}</span>"));
    words.iter().fold(escape(text), mark)
}
