//! Reports made of a record, and of nothing else: a table for the terminal, Markdown, a page with plots, a trace.

mod drafts;
pub mod html;
pub mod markdown;
pub mod plot;
pub mod table;
pub mod trace;

use crate::arm::ArmName;
use crate::evidence::Engagement;
use crate::host::HostState;
use crate::record::{ArmRecord, Cell, Experiment, Fit, Record, Regime};
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
    let number = |value: f64| match *median < 100.0 {
        true => format!("{value:.1}"),
        false => thousands(value.round() as usize),
    };
    format!("{} ({} to {})", number(*median), number(*low), number(*high))
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
        for arm in cell.arms.iter().filter(|arm| arm.unstable && cell.void.is_none()) {
            caveats.push(format!("{}: arm {} gave other tokens in a later round.", length(cell), arm.arm.letter()));
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
    let samples = || experiment.cells.iter().flat_map(|cell| &cell.arms).flat_map(|arm| &arm.samples);
    if record.settings.regime == Regime::Service && samples().next().is_some() {
        let none = experiment
            .cells
            .iter()
            .filter(|cell| cell.arms.iter().flat_map(|arm| &arm.samples).all(|sample| sample.cached_tokens == 0));
        caveats.extend(none.map(|cell| {
            let what = "no prompt found what an earlier one left, for the half that they share is too short to be kept";
            format!("{}: {what}.", length(cell))
        }));
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
    let shares: Vec<f64> = samples().filter_map(|sample| sample.others_cpu_share).collect();
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

/// What was found, in words, length by length.
pub(crate) fn in_words(experiment: &Experiment) -> Vec<String> {
    let has_feature = experiment.arms.iter().any(|arm| arm.arm.name == ArmName::C);
    let line = |cell: &Cell| {
        let length = length(cell);
        if cell.void.is_some() {
            return Some(format!("{length}: VOID, nothing can be said."));
        }
        let makes = |difference: &Difference| match difference.verdict {
            Verdict::Faster | Verdict::Slower => {
                let (percent, ratio) = ((difference.ratio.median - 1.0) * 100.0, difference.ratio.median);
                let weak = if difference.is_weak { " (few rounds: weak)" } else { "" };
                format!("makes prompts {:.1} % {}{weak}", percent.abs(), if ratio > 1.0 { "faster" } else { "slower" })
            }
            Verdict::NoDifference => "makes no difference that could be seen".to_owned(),
            Verdict::TooFewSamples => "had too few rounds to be judged".to_owned(),
        };
        let geometry = format!("the width of the chunks alone {}", makes(cell.geometry_gain.as_ref()?));
        if !has_feature {
            return Some(format!("{length}: {geometry}."));
        }
        let gain = cell.feature_gain.as_ref()?;
        let feature = match &cell.engagement {
            Some(engagement) if !engagement.is_hybrid() => {
                format!("the feature is {}, so what it gained is not its own", engagement.label())
            }
            _ => format!("the feature {}", makes(gain)),
        };
        let cores = match cell.against_every_core.map(|difference| difference.verdict) {
            Some(Verdict::Slower) => "; its cores would have gained more without it",
            _ => "",
        };
        Some(format!("{length}: {feature}; {geometry}{cores}."))
    };
    experiment.cells.iter().filter_map(line).collect()
}

/// What helps to understand the numbers, in whole sentences.
pub(crate) fn notes(experiment: &Experiment, record: &Record) -> Vec<String> {
    let mut notes = Vec::new();
    let arm = |name| experiment.arms.iter().find(|arm: &&ArmRecord| arm.arm.name == name);
    if let (Some(a), Some(b)) = (arm(ArmName::A), arm(ArmName::B))
        && a.arm.args == b.arm.args
    {
        notes.push("A and B are started alike, for stock chunks hold a tile: width can make no difference.".to_owned());
    }
    if arm(ArmName::C).is_none() {
        let cores = match record.host.facts.cores {
            1 => " This machine has one core, and a soft engine needs one of its own.",
            _ => " Name engines with --npu.",
        };
        notes.push(format!("There is no arm C, since no engine takes part: only chunks were compared.{cores}"));
    }
    let is_one_chunk = |cell: &&Cell| {
        let evidence = cell.arm(ArmName::C).and_then(|arm| arm.evidence.as_ref());
        let is_hybrid = cell.engagement.as_ref().is_some_and(Engagement::is_hybrid);
        is_hybrid && evidence.is_some_and(crate::evidence::Evidence::is_one_chunk_each)
    };
    let one_chunk: Vec<String> = experiment.cells.iter().filter(is_one_chunk).map(length).collect();
    if !one_chunk.is_empty() {
        notes.push(format!(
            "{}: one chunk: nothing in flight beside it. While engines compute for it, the primary device has other work of this \
             chunk alone; longer prompts, or a smaller --tile, show more.",
            one_chunk.join(", ")
        ));
    }
    if record.settings.regime == Regime::Service {
        notes.push(
            "Two prompts at a time: the rate is that of both, until the later one has its first token, and tokens after it are \
             counted while both are under way."
                .to_owned(),
        );
    }
    notes
}

/// Which token ids were sent: the same to all arms.
pub(crate) fn ids(experiment: &Experiment) -> String {
    let of = |cell: &Cell| format!("{} {}", length(cell), start(&cell.ids_sha256));
    let ids: Vec<String> = experiment.cells.iter().map(of).collect();
    format!("Token ids, the same in all arms (start of their SHA-256): {}.", ids.join("; "))
}

/// Enough of a digest to tell it from others.
pub(crate) fn start(digest: &str) -> &str {
    digest.get(..16).unwrap_or(digest)
}

/// The machine, the program and what else the machine did.
pub(crate) fn circumstances(record: &Record) -> String {
    let (facts, program) = (&record.host.facts, &record.program);
    let label = record.label.as_ref().map_or_else(String::new, |label| format!("{label}: "));
    format!(
        "{label}{} core{}, {}, {}; troika {} ({} build, SHA-256 {}). Host at the start: {}; at the end: {}.",
        facts.cores,
        if facts.cores == 1 { "" } else { "s" },
        facts.cpu.as_deref().unwrap_or("unknown CPU"),
        facts.os,
        program.version,
        program.build,
        start(&program.sha256),
        state(&record.host.start),
        state(&record.host.end)
    )
}

/// Load, frequency and memory in a few words.
fn state(state: &HostState) -> String {
    let parts = [
        state.load_1m.map(|load| format!("load {load:.1}")),
        state.cpu_mhz.map(|mhz| format!("{mhz:.0} MHz")),
        state.available_memory_bytes.map(|bytes| format!("{} MB of memory free", thousands((bytes >> 20) as usize))),
        state.memory_pressure.map(|share| format!("memory pressure {:.1} %", share * 100.0)),
        state.cpu_pressure.map(|share| format!("CPU pressure {:.1} %", share * 100.0)),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "unknown".to_owned() } else { parts.join(", ") }
}

/// A table with a heading; its first row names the columns.
pub(crate) struct Table {
    pub(crate) heading: &'static str,
    pub(crate) rows: Vec<Vec<String>>,
}

/// All tables of an experiment, in the order in which they should be read.
pub(crate) fn tables(experiment: &Experiment) -> Vec<Table> {
    let tables = [what_ran(experiment), rates(experiment), differences(experiment), latencies(experiment)];
    tables.into_iter().chain(kept(experiment)).chain(drafts::table(experiment)).collect()
}

fn what_ran(experiment: &Experiment) -> Table {
    let mut rows = vec![["arm", "what it is", "devices", "ready after", "memory at most"].map(str::to_owned).to_vec()];
    rows.extend(experiment.arms.iter().map(|arm| {
        vec![
            arm.arm.name.letter().to_owned(),
            arm.arm.label.clone(),
            if arm.devices.is_empty() { "not run".to_owned() } else { arm.devices.join(" + ") },
            median(&arm.load_s).map_or_else(|| "-".to_owned(), |load| format!("{load:.1} s")),
            arm.peak_memory_bytes.map_or_else(|| "-".to_owned(), |bytes| memory(bytes, arm.engine_memory_bytes)),
        ]
    }));
    Table { heading: "What ran where", rows }
}

fn memory(peak_bytes: u64, engine_bytes: Option<u64>) -> String {
    let engines = engine_bytes.map_or_else(String::new, |bytes| format!(", {} of engines", bytes >> 20));
    format!("{} MB{engines}", thousands((peak_bytes >> 20) as usize))
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
        let gain = |difference| match &cell.void {
            Some(_) => "VOID".to_owned(),
            None => gain(difference),
        };
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
    Table { heading: "What makes the difference (B over A: wider chunks; C over B: the feature)", rows }
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

/// Where prompts found something: how much of them, and what that is worth.
fn kept(experiment: &Experiment) -> Option<Table> {
    let mut rows = vec![vec!["prompt".to_owned()]];
    rows[0].extend(experiment.arms.iter().map(|arm| format!("{}: kept, all tokens/s", arm.arm.name.letter())));
    let mut found = false;
    for cell in &experiment.cells {
        let mut row = vec![length(cell)];
        row.extend(cell.arms.iter().map(|arm| {
            let sum = |of: fn(&crate::record::Sample) -> usize| arm.samples.iter().map(of).sum::<usize>();
            let (cached, all) = (sum(|s| s.cached_tokens), sum(|s| s.prompt_tokens));
            let rates: Vec<f64> = arm.samples.iter().filter_map(|sample| sample.effective_prompt_tps).collect();
            let Some(tps) = median(&rates) else { return "-".to_owned() };
            found = true;
            format!("{:.0} %, {}", cached as f64 / all.max(1) as f64 * 100.0, thousands(tps.round() as usize))
        }));
        rows.push(row);
    }
    found.then_some(Table { heading: "With what was kept from earlier prompts (no rate of computing)", rows })
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
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A record of one prompt in three arms, five rounds, B a tenth faster than A and C a tenth faster than B.
    pub(crate) fn record(change: impl FnOnce(&mut Value)) -> Record {
        let sample = |tps: f64, round: usize| {
            json!({
                "round": round, "place": 0, "prefill_tps": tps + round as f64, "prompt_tokens": 513, "cached_tokens": 0,
                "prefill_ms": 51.3, "queue_ms": 0.1, "ttft_ms": 52.0, "other_ms": 0.6, "decode_tps": 30.0, "tpot_ms": 33.3,
                "answer_ms": 100.0, "longest_gap_ms": 40.0, "others_cpu_share": null
            })
        };
        let rates = |tps: f64| (0..5).map(|round| tps + f64::from(round)).collect::<Vec<_>>();
        let gain = |rate: f64, base: f64| Difference::of_rounds(&rates(rate), &rates(base));
        let interval = |tps| json!({"median": tps, "low": tps, "high": tps});
        let evidence = json!({
            "requests": 5, "planned": {"query": 5}, "dispatched": {"query": 5}, "fallbacks": {}, "widths": {"512": 5},
            "narrowed_by": {}, "tiles_in_prompts": 5, "tiles_in_chunks": 5, "missing": 0, "deviating": 0
        });
        let cell_arm = |(name, tps): (&str, f64)| {
            let samples: Vec<Value> = (0..5).map(|round| sample(tps, round)).collect();
            json!({"arm": name, "samples": samples, "prefill_tps": interval(tps), "ttft_ms": interval(52.0),
                   "decode_tps": interval(30.0), "evidence": evidence})
        };
        let arm = |(name, args): (&str, &str)| {
            json!({"arm": {"name": name, "label": "x", "args": [args]}, "devices": ["cpu"], "load_s": [0.5],
                   "peak_memory_bytes": 3 << 20})
        };
        let cell_arms = [("A", 1000.0), ("B", 1100.0), ("C", 1210.0)].map(cell_arm);
        let arms = [("A", "--chunk=256"), ("B", "--chunk=512"), ("C", "--npu=soft")].map(arm);
        let state = json!({"load_1m": 0.5, "cpu_mhz": null, "available_memory_bytes": 5000u64 << 20,
                           "memory_pressure": null, "cpu_pressure": null});
        let mut value = json!({
            "schema": "troika-bench", "version": crate::record::VERSION, "created_unix_s": 0,
            "program": {"version": "1.0", "sha256": "0123456789abcdef0123", "build": "release"},
            "host": {"facts": {"os": "linux", "arch": "x", "cpu": "cpu", "cores": 2, "memory_bytes": null, "governor": null},
                     "start": state, "end": state},
            "settings": {"preset": null, "regime": "lab", "corpus": "prose_en", "generate": 4, "rounds": 5, "max_rounds": 5,
                         "repeats": 1, "geometry": {"tile": 512, "stock_step": 256, "plan_step": 512},
                         "feature": {"name": "widen_only"}},
            "experiments": [{
                "model": {"name": "m", "args": [], "weights_sha256": "w", "tokenizer_sha256": "t", "class": "fast"},
                "drafter": false,
                "arms": arms,
                "cells": [{
                    "length": {"tokens": 513, "fit": "aligned"}, "ids_sha256": "fedcba9876543210fedc",
                    "arms": cell_arms,
                    "geometry_gain": gain(1100.0, 1000.0), "feature_gain": gain(1210.0, 1100.0),
                    "total_gain": gain(1210.0, 1000.0), "against_every_core": null, "tokens": [],
                    "engagement": {"state": "hybrid"}
                }]
            }]
        });
        change(&mut value);
        Record::parse(&value.to_string()).expect("a record")
    }

    #[test]
    fn a_report_says_in_words_what_was_found() {
        let text = table::render(&record(|_| {}), false);
        for part in [
            "513 aligned: the feature makes prompts 10.0 % faster; the width of the chunks alone makes prompts 10.0 % faster.",
            "513 aligned: one chunk: nothing in flight beside it.",
            "513 aligned fedcba9876543210.",
            "SHA-256 0123456789abcdef). Host at the start: load 0.5, 5,000 MB of memory free; at the end: load 0.5",
        ] {
            assert!(text.contains(part), "no `{part}` in:\n{text}");
        }
        let weak = |value: &mut Value| value["experiments"][0]["cells"][0]["feature_gain"]["is_weak"] = true.into();
        assert!(
            table::render(&record(weak), false).contains("makes prompts 10.0 % faster (few rounds: weak); the width")
        );
        let several = record(|value| {
            value["experiments"][0]["cells"][0]["arms"][2]["evidence"]["widths"] = json!({"512": 10});
        });
        assert!(!table::render(&several, false).contains("one chunk"));
        let page = html::render(&record(|_| {})).expect("drawn");
        assert!(
            page.contains("<li>513 aligned: the feature makes prompts 10.0 % faster") && page.contains("<svg"),
            "{page}"
        );
    }

    #[test]
    fn what_is_no_feature_is_not_praised() {
        let idle = |value: &mut Value| {
            value["experiments"][0]["cells"][0]["engagement"] = json!({"state": "not_engaged", "reasons": ["r"]});
        };
        let text = table::render(&record(idle), false);
        assert!(text.contains("the feature is NOT ENGAGED, so what it gained is not its own"), "{text}");
        assert!(!text.contains("one chunk"), "{text}");
        let void = record(|value| value["experiments"][0]["cells"][0]["void"] = "arms A and B differ".into());
        let text = table::render(&void, false);
        assert!(text.contains("513 aligned: VOID, nothing can be said.") && !text.contains("10.0 %"), "{text}");
        assert_eq!((void.num_void(), record(|_| {}).num_void()), (1, 0));
    }

    #[test]
    fn a_missing_arm_is_explained() {
        let two = |cores: usize| {
            record(|value| {
                value["host"]["facts"]["cores"] = cores.into();
                let experiment = &mut value["experiments"][0];
                experiment["arms"].as_array_mut().expect("arms").pop();
                experiment["cells"][0]["arms"].as_array_mut().expect("arms").pop();
                experiment["cells"][0]["feature_gain"] = Value::Null;
                experiment["cells"][0]["engagement"] = Value::Null;
            })
        };
        let text = table::render(&two(1), false);
        assert!(text.contains("There is no arm C") && text.contains("one core, and a soft engine needs one"), "{text}");
        assert!(table::render(&two(2), false).contains("Name engines with --npu."));
    }

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
