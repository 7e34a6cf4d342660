//! The report as one page that needs nothing else: tables, plots as SVG, no script.

use std::fmt::Write;

use super::{Table, caveats, circumstances, ids, in_words, notes, plot, same_tokens, tables, title};
use crate::BenchError;
use crate::record::{Experiment, Record};

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#222;--paper:#fff;--line:#ddd;--dim:#666;--mind:#fdf3f3;--bad:#c00}\
@media(prefers-color-scheme:dark){:root{--ink:#ddd;--paper:#181818;--line:#444;--dim:#999;--mind:#331c1c;--bad:#ff6b6b}}\
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:var(--ink);background:var(--paper)}\
.wide{overflow-x:auto}table{border-collapse:collapse;margin:.5rem 0 1.5rem}\
th,td{padding:.25rem .9rem .25rem 0;text-align:left;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums}\
.mind{border-left:4px solid var(--bad);padding:.2rem .8rem;background:var(--mind)}.bad{color:var(--bad);font-weight:700}\
h2{margin-top:2.5rem}svg{max-width:100%;height:auto}footer,figcaption{color:var(--dim)}figure{margin:1rem 0}\
svg text{fill:var(--ink)}svg [stroke=\"#000000\"]{stroke:var(--dim)}svg [stroke=\"#FFFFFF\"]{stroke:none}\
svg [fill=\"#FFFFFF\"]{fill:var(--paper)}";

/// How to read a page, for whoever sees the first.
const HOW_TO_READ: &str = "Each arm is a server of its own, started afresh for every round, and all get the same prompts. \
A is the machine as it is, B the same with the chunks that the feature needs, C the feature, and P, if it is there, all cores \
without it. What B gains over A is due to wider chunks, what C gains over B to the feature alone.";

/// The whole page.
///
/// # Errors
///
/// If a plot cannot be drawn.
pub fn render(record: &Record) -> Result<String, BenchError> {
    let mut body = format!("<h1>troika bench</h1>\n<p>{HOW_TO_READ}</p>\n");
    for experiment in &record.experiments {
        one(experiment, record, &mut body)?;
    }
    let _ = writeln!(body, "<footer><p>{}</p></footer>", escape(&circumstances(record)));
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>troika bench</title><style>{STYLE}</style>\
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
    let lines: String = in_words(experiment).iter().map(|line| format!("<li>{}</li>", marked(line))).collect();
    let _ = writeln!(body, "<h3>In words</h3>\n<ul>{lines}</ul>");
    for table in tables(experiment) {
        html_table(&table, body);
    }
    for line in same_tokens(experiment).into_iter().chain(notes(experiment, record)).chain([ids(experiment)]) {
        let _ = writeln!(body, "<p>{}</p>", escape(&line));
    }
    let plots = [
        ("Rate by length of the prompt", "Higher is better. Bars are 95 % intervals.", plot::rates(experiment)?),
        (
            "Time of one prompt by operation and device",
            "Added up over the prompt. What engines do overlaps in time with what the primary device does.",
            plot::profile(experiment)?,
        ),
        (
            "One prefill step of each arm, device by device",
            "Left to right as it ran, in a process of its own after the rounds. Where bars of two devices overlap, both worked.",
            plot::steps(experiment)?,
        ),
        (
            "One request of each arm, phase by phase",
            "The sample in the middle, of the longest prompt. Only \"prompt\" is in the rates above.",
            plot::timeline(experiment)?,
        ),
    ];
    for (heading, caption, svg) in plots {
        if let Some(svg) = svg {
            let _ = writeln!(
                body,
                "<h3>{heading}</h3>\n<figure>{svg}<figcaption>{}</figcaption></figure>",
                escape(caption)
            );
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
    let _ = writeln!(
        body,
        "<h3>{}</h3>\n<div class=\"wide\"><table>{}{rows}</table></div>",
        escape(table.heading),
        row("th", head)
    );
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
