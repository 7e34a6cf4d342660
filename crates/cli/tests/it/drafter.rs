//! `--drafter on`: the same text, and what became of drafts is told everywhere.

use serde_json::{Value, json};

use crate::diagnosis::{get, metrics, post, record};
use crate::serving::Server;
use crate::support::{Scratch, troika};

const NANO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano");

#[test]
fn who_has_no_drafter_is_told_so() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let reason = format!("--drafter on: MTP unavailable: no mtp.* tensors in {model}");
    troika(&["run", "hello", "--model", &model, "--drafter", "on"]).fails(1, &[&reason]);
    troika(&["serve", "--model", &model, "--port", "0", "--drafter", "on"]).fails(1, &[&reason]);
    troika(&["inspect", &model, "--memory", "--drafter", "on"]).fails(1, &[&reason]);
    troika(&["run", "hello", "--drafter", "maybe"]).fails(2, &["--drafter"]);
}

#[test]
fn the_text_is_the_same() {
    let prompt = "def read_lines(path):\n    with open(path) as file:\n        return ";
    for more in [["--temperature", "0"], ["--seed", "3"]] {
        let run =
            |drafter: &str| troika(&[&["run", prompt, "-n", "40", "--drafter", drafter], &more[..]].concat()).ok();
        let (without, with) = (run("off"), run("on"));
        assert_eq!(with.stdout, without.stdout);
        assert!(with.stderr.contains(" drafts accepted | first token after"), "{}", with.stderr);
        assert!(!without.stderr.contains("drafts"), "{}", without.stderr);
    }
}

/// More is foreseen: weights that are read, windows of the stages, a step of the drafter.
#[test]
fn its_memory_is_foreseen() {
    let foresee = |drafter: &str| {
        let args = ["inspect", NANO, "--memory", "--running", "2", "--drafter", drafter, "--json", "-"];
        troika(&args).ok().json()
    };
    let (without, with) = (foresee("off"), foresee("on"));
    let more = |name: &str| with[name].as_u64().expect("a number") - without[name].as_u64().expect("a number");
    assert_eq!(more("state"), 2 * more("state_fixed"));
    // Windows of three stages, which are trimmed when they hold twice 128 rows of 128 numbers.
    assert!(more("state_fixed") >= 3 * 2 * 128 * 128 * 4, "{with}");
    assert!(more("resident_bytes") > more("state") && more("step_values") > 0, "{with}");
}

#[test]
fn records_and_metrics_agree() {
    let (with, without) =
        (Server::start_with(&["--model", NANO, "--drafter", "on"]), Server::start_with(&["--model", NANO]));
    let prompt = "class Reader:\n    def __init__(self, path):\n";
    let ask = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    let reply = post(&with, "", &ask);
    let plain = post(&without, "", &ask);
    assert_eq!(reply["choices"][0]["text"], plain["choices"][0]["text"]);
    assert_eq!(record(&without, &plain)["choices"][0]["drafts"], Value::Null);
    let drafts = &record(&with, &reply)["choices"][0]["drafts"];
    let count = |value: &Value| value.as_u64().expect("a count");
    let skipped: u64 = drafts["skipped"].as_object().expect("reasons").values().map(count).sum();
    let steps = count(&drafts["verifications"]) + skipped;
    assert_eq!(24, 1 + steps + count(&drafts["accepted"]), "{drafts}");
    assert_eq!(drafts["skipped"]["measuring"], 4, "{drafts}");
    let samples = metrics(&with);
    let sum =
        |name: &str| samples.iter().filter(|(key, _)| key.starts_with(name)).map(|(_, value)| *value).sum::<f64>();
    for (metric, of) in [
        ("troika_draft_verifications_total", "verifications"),
        ("troika_drafted_tokens_total", "drafted"),
        ("troika_accepted_tokens_total", "accepted"),
        ("troika_withheld_drafts_total", "withheld"),
    ] {
        assert_eq!(sum(metric), count(&drafts[of]) as f64, "{metric}");
    }
    assert_eq!(sum("troika_draft_skips_total"), skipped as f64);
    assert_eq!(samples["troika_steps_total{lane=\"decode\"}"], steps as f64);
    assert_eq!(samples["troika_step_tokens_total{lane=\"decode\"}"], (steps + count(&drafts["drafted"])) as f64);
    let blocks = samples["troika_steps_total{lane=\"draft\"}"];
    assert_eq!(samples["troika_step_tokens_total{lane=\"draft\"}"], 5.0 * blocks, "five tokens each");
    assert_eq!(metrics(&without).keys().find(|key| key.contains("accepted_tokens")), None);
    assert!(get(&with, "/troika/status")["completion_tokens_total"] == 24);
}
