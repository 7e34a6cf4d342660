//! `troika bench` on itself: does it see what is there, and nothing that is not? Real processes, a tiny model.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Ran, Scratch, command, troika};

/// Three arms, one length of whole tiles, few tokens, each prompt once.
const SHORT: [&str; 14] = [
    "--prompt-lengths",
    "257",
    "--fit",
    "aligned",
    "--tile",
    "128",
    "--chunk",
    "64",
    "--generate",
    "4",
    "--threads",
    "1",
    "--min-sample-ms",
    "0",
];

fn bench(scratch: &Scratch, self_test: &str, more: &[&str]) -> Ran {
    let model = scratch.arg("model");
    let args = ["bench", "--model", &model, "--self-test", self_test, "--json", "-"];
    troika(&[&args[..], &SHORT, more].concat())
}

fn verdict<'a>(record: &'a Value, gain: &str) -> &'a str {
    record["experiments"][0]["cells"][0][gain]["verdict"].as_str().expect("a verdict")
}

/// Acceptance test 17: what was planned and never ran is not called hybrid, whatever it gained.
#[test]
fn a_feature_that_never_runs_is_not_engaged() {
    let scratch = Scratch::new();
    let ran = bench(&scratch, "never-runs", &["--rounds", "3", "--max-rounds", "3", "--repeats", "1"]).ok();
    let record = ran.json();
    assert_eq!((record["schema"].as_str(), record["version"].as_u64()), (Some("troika-bench"), Some(2)));
    let cell = &record["experiments"][0]["cells"][0];
    assert_eq!(cell["engagement"]["state"], "not_engaged", "{cell}");
    let reasons = cell["engagement"]["reasons"].to_string();
    // 257 tokens: two tiles of 128, three prompts.
    assert!(reasons.contains("query: 0 of 6 planned operations"), "{reasons}");
    assert_eq!(cell["length"]["tokens"], 257);
    for (arm, width) in cell["arms"].as_array().expect("arms").iter().zip(["64", "128", "128"]) {
        assert_eq!(arm["evidence"]["widths"].as_object().expect("widths").keys().collect::<Vec<_>>(), [width], "{arm}");
        let samples = arm["samples"].as_array().expect("samples");
        assert_eq!(samples.len(), 3);
        assert!(
            samples.iter().all(|sample| sample["cached_tokens"] == 0 && sample["prefill_tps"].as_f64() > Some(0.0))
        );
    }
    assert!(
        cell["tokens"].as_array().expect("checks").iter().all(|check| check["equal"] == check["prompts"]),
        "{cell}"
    );
    assert_eq!(cell["feature_gain"]["is_weak"], true);
    let profile = &record["experiments"][0]["arms"][0]["profile"]["entries"];
    assert!(profile.as_array().is_some_and(|entries| entries.len() > 5), "{profile}");
    let few = ["--rounds", "3", "--max-rounds", "3", "--repeats", "1", "--require-engaged"];
    bench(&scratch, "never-runs", &few).fails(1, &["--require-engaged", "NOT ENGAGED"]);
}

/// The same of a real engine: it is compiled and loaded, and no prompt has a tile for it.
#[test]
fn an_engine_that_nothing_comes_to_is_not_engaged() {
    let scratch = Scratch::new();
    let json = scratch.arg("idle.json");
    let lengths = ["bench", "--prompt-lengths", "100", "--fit", "natural", "--tile", "128", "--chunk", "128"];
    let few = ["--generate", "2", "--rounds", "3", "--max-rounds", "3", "--repeats", "1", "--min-sample-ms", "0"];
    let engine = ["--npu", "soft:cores=1", "--require-engaged", "--json", &json];
    let ran = troika(&[&lengths[..], &few, &engine].concat()).fails(1, &["--require-engaged", "NOT ENGAGED"]);
    assert!(ran.stdout.contains("the feature is NOT ENGAGED, so what it gained is not its own"), "{}", ran.stdout);
    let record = record(&json);
    let cell = &record["experiments"][0]["cells"][0];
    assert_eq!(cell["arms"][2]["evidence"]["dispatched"], serde_json::json!({}), "{cell}");
    assert!(cell["engagement"]["reasons"].to_string().contains("no prompt had a whole tile"), "{cell}");
    assert!(record["experiments"][0]["arms"][2]["engine_memory_bytes"].as_u64() > Some(0), "{record}");
}

/// Acceptance test 16: what only widens chunks gains geometry at most. Here, that arm C is started as B is and does the same work, so that
/// nothing is left to be credited to it; what times say of such arms is on a virtual clock in `simulation.rs`, on made-up noise in the
/// statistics, and in the long form below.
#[test]
fn a_feature_that_only_widens_chunks_gains_nothing() {
    let scratch = Scratch::new();
    let few = ["--rounds", "3", "--max-rounds", "3", "--repeats", "1"];
    let record = bench(&scratch, "widen-only", &few).ok().json();
    let (arms, cell) = (&record["experiments"][0]["arms"], &record["experiments"][0]["cells"][0]);
    assert_eq!(arms[1]["arm"]["args"], arms[2]["arm"]["args"]);
    assert_ne!(arms[0]["arm"]["args"], arms[1]["arm"]["args"]);
    let evidence = |arm: usize| &cell["arms"][arm]["evidence"];
    // 256 tokens and the last one, which decodes; three rounds.
    assert_eq!(evidence(0)["widths"], serde_json::json!({"64": 12}), "{cell}");
    assert_eq!(evidence(1)["widths"], serde_json::json!({"128": 6}), "{cell}");
    assert_eq!(evidence(1), evidence(2));
    assert_eq!(evidence(2)["planned"], serde_json::json!({}));
    let equal: Vec<_> = cell["tokens"].as_array().expect("checks").iter().map(|check| &check["equal"]).collect();
    assert_eq!(equal, [1, 1], "{cell}");
    assert_eq!((&cell["void"], &cell["engagement"]["state"]), (&Value::Null, &"not_engaged".into()));
    assert!(cell["engagement"]["reasons"].to_string().contains("nothing was planned"), "{cell}");
}

/// The long form, some minutes: `cargo nextest run --release -p troika --run-ignored only real_processes --no-capture`, on a quiet
/// machine. Prompts are longer than in the short forms, so that a sample is no matter of milliseconds.
#[test]
#[ignore = "takes minutes and a quiet machine"]
fn equal_arms_are_equal_and_a_slow_down_is_found_through_real_processes() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let lengths = ["--prompt-lengths", "1025", "--fit", "aligned", "--tile", "256", "--chunk", "128"];
    let rounds = ["--generate", "2", "--threads", "1", "--repeats", "3", "--min-sample-ms", "300"];
    let count = |self_test: &str, wanted: &str| {
        let args = ["bench", "--model", &model, "--self-test", self_test, "--json", "-"];
        let verdicts = (0..20).map(|_| troika(&[&args[..], &lengths, &rounds].concat()).ok().json()).map(|record| {
            let gain = &record["experiments"][0]["cells"][0]["feature_gain"];
            println!("{self_test}: {gain}");
            verdict(&record, "feature_gain") == wanted
        });
        verdicts.filter(|is_wanted| *is_wanted).count()
    };
    let equal = count("widen-only", "no_difference");
    println!("{equal} of 20 pairs of equal arms were found equal");
    let slower = count("slower", "slower");
    println!("{slower} of 20 slow-downs of 5 % were found");
    assert!(equal >= 19 && slower >= 18, "{equal} of 20 equal pairs, {slower} of 20 slow-downs of 5 %");
}

#[test]
fn reports_are_written_and_compared() {
    let scratch = Scratch::new();
    let (model, json, html, markdown, trace) = (
        scratch.arg("model"),
        scratch.arg("a.json"),
        scratch.arg("a.html"),
        scratch.arg("a.md"),
        scratch.arg("a.trace"),
    );
    let args =
        ["bench", "--model", &model, "--rounds", "3", "--max-rounds", "3", "--repeats", "1", "--drafter", "both"];
    let outputs = ["--json", &json, "--html", &html, "--markdown", &markdown, "--trace", &trace];
    let table = troika(&[&args[..], &SHORT, &outputs].concat()).ok().stdout;
    for part in ["What ran where", "geometry alone (B/A)", "257 aligned", "same tokens, B = A", "MTP unavailable"] {
        assert!(table.contains(part), "no `{part}` in:\n{table}");
    }
    // Which tokens, on what machine in what state, and why there is no arm C.
    let ids = record(&json)["experiments"][0]["cells"][0]["ids_sha256"].as_str().expect("a digest")[..16].to_owned();
    for part in [&ids, "Host at the start: ", "There is no arm C", "the width of the chunks alone"] {
        assert!(table.contains(part), "no `{part}` in:\n{table}");
    }
    let read = |path: &str| std::fs::read_to_string(path).expect("written");
    let page = read(&html);
    // Rates, profile, a step, phases; nothing from elsewhere.
    assert_eq!(page.matches("<svg").count(), 4, "{page}");
    assert!(!page.contains("src=") && !page.contains("<script"), "{page}");
    assert!(read(&markdown).contains("| 257 aligned |"));
    let events: Value = serde_json::from_str(&read(&trace)).expect("JSON");
    let spans = |name: &str| {
        let events = events["traceEvents"].as_array().expect("events").iter();
        events.filter(|event| event["ph"] == "X" && event["name"] == name).count()
    };
    // Two arms, and in each a step with a shared expert in every layer.
    assert_eq!((spans("prompt"), spans("answer")), (2, 2), "{events}");
    assert!(spans("shared expert") >= 2 && spans("shared expert").is_multiple_of(2), "{events}");
    let document = include_str!("../../../../docs/formats/bench-record.md");
    members(&record(&json), &mut |name| assert!(document.contains(&format!("{name}`")), "{name} is not described"));
    // The same page again, of the record alone.
    let again = scratch.arg("again.html");
    assert_eq!(troika(&["bench", "report", &json, "--html", &again]).ok().stdout, table);
    assert_eq!(read(&again), page);
    let compared = troika(&["bench", "compare", &json, &json, "--fail-if-slower"]).ok().stdout;
    assert!(compared.contains("no difference (") && compared.contains("The program is the same"), "{compared}");
    let mut service = record(&json);
    service["settings"]["regime"] = "service".into();
    let service = scratch.write("service.json", service.to_string().as_bytes());
    let unlike = ["bench", "compare", &json, &service, "--fail-if-slower"];
    troika(&unlike).fails(1, &["nothing of", "service.json", "could be compared"]);
    let other = scratch.write("other.json", br#"{"schema": "troika-bench", "version": 99}"#);
    troika(&["bench", "compare", &json, &other]).fails(1, &["other.json", "version 99"]);
}

/// Calls `see` with every member's name; those of maps are keys of another kind.
fn members(value: &Value, see: &mut impl FnMut(&str)) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                see(name);
                if !["planned", "dispatched", "fallbacks", "widths", "narrowed_by", "refused"].contains(&name.as_str())
                {
                    members(value, see);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| members(value, see)),
        _ => {}
    }
}

fn record(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("written")).expect("JSON")
}

/// What cannot be, is said before anything is measured: nothing is lost, and nobody waits for it.
#[test]
fn what_cannot_be_is_said_at_once() {
    let scratch = Scratch::new();
    let (model, nowhere, same) = (scratch.arg("model"), scratch.arg("nowhere/a.html"), scratch.arg("a.json"));
    let bench = |more: &[&str]| {
        let ran = troika(&[&["bench", "--model", &model][..], &SHORT, more].concat());
        assert!(!ran.stderr.contains("round 1"), "{}", ran.stderr);
        ran
    };
    bench(&["--html", &nowhere]).fails(1, &["cannot write", "nowhere/a.html"]);
    bench(&["--json", &model]).fails(1, &["cannot write", "it is a folder"]);
    bench(&["--json", &same, "--markdown", &same]).fails(1, &["two reports cannot both be", "a.json"]);
    assert!(!std::path::Path::new(&same).exists(), "trying leaves nothing behind");
    bench(&["--npu", "ane"]).fails(1, &["--npu: unknown engine `ane`"]);
    let load = ["bench", "load", "--model", &model, "--agents", "1", "--instructions", "9000000"];
    troika(&load).fails(1, &["1 agent, 9000000 shared tokens", "do not fit the context of model"]);
    std::fs::remove_file(scratch.path("model/tokenizer.json")).expect("it was there");
    bench(&[]).fails(1, &["tokenizer.json"]);
}

/// The environment of an office: requests to this machine go to no proxy.
#[test]
fn a_proxy_of_the_environment_is_not_used() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let load = ["bench", "load", "--model", &model, "--clients", "1", "--requests", "1", "--prompt-lengths", "20"];
    let mut command = command(&[&load[..], &["--generate", "2", "--json", "-"]].concat());
    // Nobody listens there.
    let ran: Ran = command.env("http_proxy", "http://127.0.0.1:9").output().expect("starts").into();
    assert_eq!(ran.ok().json()["levels"][0]["completed"], 1);
}

/// The servers of a benchmark, by the folder of their model.
#[cfg(target_os = "linux")]
fn servers(model: &str) -> Vec<u32> {
    let is_server = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let args: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        args.contains(&&b"serve"[..]) && args.contains(&model.as_bytes())
    };
    let pids =
        std::fs::read_dir("/proc").expect("Linux").filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(is_server).collect()
}

#[cfg(target_os = "linux")]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = std::time::Instant::now();
    while !is_so() {
        assert!(started.elapsed().as_secs() < 300, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Killed or asked twice to end, it leaves no server behind; and a server that is killed is named as what ended the run.
#[cfg(target_os = "linux")]
#[test]
fn no_server_outlives_its_benchmark() {
    let scratch = Scratch::new();
    let (model, temp) = (scratch.arg("model"), scratch.path("temp"));
    std::fs::create_dir(&temp).expect("a folder");
    let kill = |signal: &str, pid: u32| {
        assert!(Command::new("kill").args([signal, &pid.to_string()]).status().expect("kill is there").success());
    };
    // Long answers: it is under way when the signals come.
    let long = ["--regime", "service", "--prompt-lengths", "40", "--generate", "2000", "--rounds", "50"];
    let start = || {
        let mut command = command(&[&["bench", "--model", &model][..], &long].concat());
        command.env("TMPDIR", &temp).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts")
    };
    let mut child = start();
    until("a server starts", || !servers(&model).is_empty());
    kill("-KILL", child.id());
    child.wait().expect("ends");
    until("its server ends", || servers(&model).is_empty());
    std::fs::remove_dir_all(&temp).and_then(|()| std::fs::create_dir(&temp)).expect("emptied");

    let mut child = start();
    until("a server starts", || !servers(&model).is_empty());
    let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines().map(|line| line.expect("UTF-8"));
    assert!(lines.any(|line| line.contains("round 1, arm A")));
    kill("-TERM", child.id());
    assert!(lines.any(|line| line.contains("a second signal ends at once")));
    kill("-TERM", child.id());
    lines.for_each(drop);
    assert_eq!(child.wait().expect("ends").code(), Some(143));
    until("its server ends", || servers(&model).is_empty());
    assert_eq!(std::fs::read_dir(&temp).expect("there").count(), 0, "its folder is gone too");

    let child = start();
    until("a server starts", || !servers(&model).is_empty());
    kill("-KILL", servers(&model)[0]);
    let ran: Ran = child.wait_with_output().expect("ends").into();
    ran.fails(1, &["the run is incomplete: the server ended with signal: 9 (SIGKILL)", "serve --class fast"]);
}

/// Two experiments: the same tokens, and the server's own count of drafts.
#[test]
fn with_and_without_the_drafter() {
    let args = ["bench", "--drafter", "both", "--rounds", "3", "--max-rounds", "3", "--repeats", "1", "--json", "-"];
    let few = ["--prompt-lengths", "129", "--fit", "natural", "--generate", "20", "--min-sample-ms", "0"];
    let record = troika(&[&args[..], &few, &["--threads", "1"]].concat()).ok().json();
    let experiments = record["experiments"].as_array().expect("experiments");
    assert_eq!(experiments.iter().map(|e| e["drafter"] == true).collect::<Vec<_>>(), [false, true]);
    let cells = experiments.iter().map(|experiment| &experiment["cells"][0]);
    let [without, with] = cells.collect::<Vec<_>>()[..] else { panic!("two of them") };
    assert!(with["void"].is_null() && with["ids_sha256"] == without["ids_sha256"], "{with}");
    let arms = |cell: &Value| cell["arms"].as_array().expect("arms").clone();
    for (arm, plain) in arms(with).iter().zip(arms(without)) {
        let drafts = &arm["drafts"];
        let count = |count: &Value| count.as_u64().expect("a count");
        let skipped: u64 = drafts["skipped"].as_object().expect("reasons").values().map(count).sum();
        // Of three answers the first token is the prompt's.
        let steps = count(&drafts["verifications"]) + skipped;
        assert_eq!(3 * 20, 3 + steps + count(&drafts["accepted"]), "{drafts}");
        let tokens = &drafts["without"]["tokens"];
        assert_eq!((&tokens["prompts"], &tokens["equal"]), (&Value::from(1), &Value::from(1)), "{drafts}");
        assert_eq!(drafts["without"]["decode_tps"], plain["decode_tps"]);
        assert!(plain["drafts"].is_null(), "{plain}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_keeps_what_it_has_and_says_so() {
    let scratch = Scratch::new();
    let (model, json) = (scratch.arg("model"), scratch.arg("partial.json"));
    let args = ["bench", "--model", &model, "--rounds", "500", "--repeats", "1", "--json", &json];
    let mut command = command(&[&args[..], &SHORT].concat());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
    let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines().map(|line| line.expect("UTF-8"));
    // Then every arm has a sample.
    assert!(lines.any(|line| line.contains("round 2, arm B")));
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill is there");
    assert!(sent.success());
    assert!(lines.any(|line| line.contains("what was measured so far is kept")));
    // A pipe that nobody reads would stop it.
    lines.for_each(drop);
    assert_eq!(child.wait().expect("ends").code(), Some(130));
    let record: Value = serde_json::from_str(&std::fs::read_to_string(&json).expect("written")).expect("JSON");
    assert_eq!(record["incomplete"], "interrupted");
    for arm in record["experiments"][0]["cells"][0]["arms"].as_array().expect("arms") {
        assert!(arm["samples"].as_array().is_some_and(|samples| !samples.is_empty()), "{arm}");
    }
}

#[test]
fn traffic_is_measured_and_kept_prefixes_are_counted() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let args = [
        "bench",
        "load",
        "--model",
        &model,
        "--rate",
        "20",
        "--clients",
        "2",
        "--agents",
        "2",
        "--turns",
        "2",
        "--requests",
        "6",
        "--instructions",
        "300",
        "--prompt-lengths",
        "20,40",
        "--generate",
        "3",
        "--max-ttft",
        "3600000",
        "--max-tpot",
        "3600000",
        "--json",
        "-",
        "--",
        "--threads",
        "1",
    ];
    let record = troika(&args).ok().json();
    let document = include_str!("../../../../docs/formats/bench-record.md");
    members(&record, &mut |name| assert!(document.contains(&format!("{name}`")), "{name} is not described"));
    let levels = record["levels"].as_array().expect("levels");
    let completed: Vec<_> = levels.iter().map(|level| level["completed"].as_u64()).collect();
    assert_eq!(completed, [Some(6), Some(6), Some(4)], "{record}");
    assert!(levels.iter().all(|level| level["met"] == level["completed"] && level["failed"] == 0), "{record}");
    assert_eq!(levels[0]["cached_tokens"], 0, "prompts that share nothing");
    // The second turn of each agent finds at least its own first turn, of which two blocks are whole.
    assert!(levels[2]["cached_tokens"].as_u64() >= Some(512), "{}", levels[2]);
}

/// What is compared, and that predictions come from nodes that were seen; how near they are is a matter of times, so of no test.
#[test]
fn predictions_for_this_machine_stand_beside_its_times() {
    let scratch = Scratch::new();
    let (model, profiles) = (scratch.arg("model"), scratch.arg("profiles"));
    let few = ["--tile", "64", "--tiles", "3", "--rounds", "1", "--profiles", &profiles, "--json", "-"];
    let record = troika(&[&["bench", "cross-check", "--model", &model][..], &few].concat()).ok().json();
    let rows = record["rows"].as_array().expect("rows");
    let combinations: std::collections::BTreeSet<String> =
        rows.iter().map(|row| format!("{} {} {}", row["tokens"], row["engines"], row["wavefront"])).collect();
    assert_eq!((rows.len(), combinations.len()), (9, 9), "{record}");
    let number = |of: &Value, name: &str| of[name].as_f64().expect("a number");
    let mut errors: Vec<f64> =
        rows.iter().map(|row| (number(row, "predicted_ms") / number(row, "measured_ms") - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    assert!((errors[4] - number(&record, "median_error")).abs() < 1e-9, "{record}");
    assert!((errors[8] - number(&record, "worst_error")).abs() < 1e-9, "{record}");
    let seen: Value =
        serde_json::from_slice(&std::fs::read(scratch.path("profiles/model.json")).expect("written")).expect("JSON");
    assert_eq!((&seen["observed"]["model"], &seen["observed"]["tile"]), (&"model".into(), &64.into()));
    // The same numbers come of the file alone, and the machine's profile, which knows this model and no other.
    let machine = scratch.arg("machine.toml");
    let again = ["bench", "cross-check", "--model", &model, "--from", &profiles, "--write-profile", &machine];
    assert_eq!(troika(&[&again[..], &["--json", "-"]].concat()).ok().json(), record);
    let simulate = ["sim", "--profile", &machine, "--prompt", "129", "--step", "64", "--arm", "hybrid", "--json", "-"];
    let prediction = troika(&[&simulate[..], &["--model", &model]].concat()).ok().json();
    assert_eq!((&prediction["kind"], &prediction["model"]), (&"prediction".into(), &"model".into()));
    assert_eq!((&prediction["profile"], &prediction["verdict"]), (&"machine".into(), &"engaged".into()));
    troika(&simulate).fails(1, &["no model model", "by its folder"]);
    troika(&[&again[..], &["--model", "nano"]].concat()).fails(1, &["--write-profile", "2 are named"]);
    let seen = &seen["observed"];
    // Three layers, two and a half tiles with engines off, and shared experts on the engine alone.
    let shared: Vec<&Value> =
        seen["nodes"].as_array().expect("nodes").iter().filter(|node| node["op"] == "swiglu").collect();
    assert_eq!(shared.len(), 3);
    for node in shared {
        let at: Vec<_> = node["primary"]
            .as_array()
            .expect("times")
            .iter()
            .map(|time| (time["rows"].as_u64(), time["position"].as_u64()))
            .collect();
        assert_eq!(at, [(Some(32), Some(128)), (Some(64), Some(0)), (Some(64), Some(64))], "{node}");
        let parts = |name: &str| node[name].as_array().map(Vec::len);
        assert_eq!((parts("engine_parts"), parts("primary_parts")), (Some(1), Some(0)), "{node}");
    }
}

/// What was observed of nano on a quiet machine with two cores, and how near predictions from it come to what was measured there.
#[test]
fn recorded_predictions_are_near_what_was_measured() {
    let recorded = concat!(env!("CARGO_MANIFEST_DIR"), "/../../profiles/epyc-2vcpu");
    let record = troika(&["bench", "cross-check", "--from", recorded, "--json", "-"]).ok().json();
    assert_eq!(record["rows"].as_array().map(Vec::len), Some(9), "{record}");
    let error = |name: &str| record[name].as_f64().expect("a number");
    assert!(error("median_error") <= 0.05 && error("worst_error") <= 0.12, "{record}");
}

/// On one device, nodes run one after the other.
#[test]
fn a_timeline_has_every_node_once_and_in_order() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let few =
        ["--prompt-lengths", "48", "--chunk", "16", "--generate", "2", "--rounds", "1", "--json", "-", "--timeline"];
    let report = troika(&[&["bench", "in-process", "--model", &model][..], &few].concat()).ok().json();
    let step = &report["step"];
    assert_eq!((step["tokens"].as_u64(), step["position"].as_u64()), (Some(16), Some(32)));
    let spans = step["spans"].as_array().expect("spans");
    let time = |span: &Value, name: &str| span[name].as_f64().expect("a time");
    assert!(spans.iter().all(|span| span["device"] == 0 && time(span, "start_us") <= time(span, "end_us")), "{step}");
    assert!(spans.windows(2).all(|pair| time(&pair[0], "end_us") <= time(&pair[1], "start_us")), "{step}");
    let layers = spans.iter().filter(|span| span["kind"] == "attention core").map(|span| span["layer"].as_u64());
    let mut layers: Vec<_> = layers.collect();
    assert!(layers.is_sorted(), "{layers:?}");
    layers.dedup();
    assert_eq!(layers, [Some(0), Some(1), Some(2)]);
}
