//! `troika sim` as scripts and people use it.

use crate::support::{Scratch, troika};

/// The command of the acceptance test: a record whose first word is that nobody measured it.
#[test]
fn a_script_gets_a_prediction() {
    let sim = |arm: &str| {
        let prompt = ["--prompt", "16385", "--plan", "published-2026-08", "--json", "-"];
        let args = [&["sim", "--profile", "m3-ultra-512", "--model", "v4-flash-0731", "--arm", arm][..], &prompt];
        troika(&args.concat()).ok().json()
    };
    for (arm, want) in [("stock", 615.2), ("matched", 628.8), ("hybrid", 629.5)] {
        let record = sim(arm);
        assert_eq!((&record["kind"], &record["arm"]), (&"prediction".into(), &arm.into()));
        let rate = record["prefill_tps"].as_f64().expect("a number");
        assert!((rate / want - 1.0).abs() < 0.01, "{arm}: {rate}");
    }
}

/// Acceptance test 16 on the virtual clock: a feature that has the wide chunks and nothing else gains exactly nothing.
#[test]
fn wide_chunks_alone_are_geometry() {
    let record = troika(&["sim", "--prompt", "16385", "--plan", "off", "--json", "-"]).ok().json();
    let rate = |arm: usize| record["arms"][arm]["prefill_tps"].as_f64().expect("a number");
    assert!(rate(1) > 1.01 * rate(0), "B over A: {record}");
    assert!(rate(2) == rate(1), "C over B: {record}");
}

#[test]
fn a_person_reads_that_it_is_a_prediction() {
    let args = ["sim", "--prompt", "8193", "--plan", "off", "--place", "shared=whole,query=split:0.5+0.125"];
    let table = troika(&args).ok().stdout;
    assert!(table.starts_with("PREDICTION by simulation, nothing was measured."), "{table}");
    assert!(table.contains("172 / 172  engaged") && table.contains("predicted gain of the engines"), "{table}");
    let details = troika(&[&args[..], &["--arm", "hybrid", "--fault", "load-error=-7"]].concat()).ok().stdout;
    assert!(details.contains("0 dispatched, 0 planned: unavailable(load: code -7)"), "{details}");
}

/// A small model under the times of a large one: numbers are real, and those of a corrupt engine are wrong.
#[test]
fn numbers_are_computed_with_weights() {
    let place = ["--plan", "off", "--tile", "1024", "--place", "query=split:0.5,shared=whole", "--prompt", "1025"];
    let run = |fault: &[&str]| {
        let compute = ["sim", "--compute", "nano", "--json", "-"];
        troika(&[&compute[..], &place, fault].concat()).ok().json()
    };
    let (healthy, corrupt) = (run(&[]), run(&["--fault", "corrupt"]));
    assert_eq!(healthy["prediction"]["kind"], "prediction");
    assert!(healthy["prediction"]["dispatched"].as_u64().is_some_and(|n| n > 0), "{healthy}");
    assert_eq!(healthy["computed"]["same_bits"], true);
    let distance = |record: &serde_json::Value| record["computed"]["distance_from_fast"].as_f64().expect("a number");
    assert!(distance(&healthy) < 0.2, "{}", distance(&healthy));
    assert_eq!(corrupt["computed"]["same_bits"], false);
    assert_ne!(distance(&corrupt), distance(&healthy));
}

#[test]
fn a_sweep_is_drawn() {
    let scratch = Scratch::new();
    let plot = scratch.arg("plot.svg");
    let vary = ["--what-if", "wavefront=1,2", "--what-if", "engine-rate=1,2", "--plot", &plot];
    let args = ["sim", "--prompt", "8193", "--plan", "off", "--place", "shared=whole,query=whole"];
    let table = troika(&[&args[..], &vary].concat()).ok().stdout;
    assert!(table.starts_with("PREDICTIONS") && table.lines().count() == 8, "{table}");
    let svg = std::fs::read_to_string(&plot).expect("written");
    assert!(svg.contains("PREDICTED") && svg.contains("engine-rate 2"));
}

/// The machine of our own figures, by its name or file, with its own plan; its model by name.
#[test]
fn this_machine_is_a_profile_like_the_others() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../profiles/epyc-2vcpu.toml");
    let settings = ["--model", "flash-slice", "--prompt", "513", "--step", "128", "--wavefront", "2", "--json", "-"];
    let record = troika(&[&["sim", "--profile", "epyc-2vcpu"][..], &settings].concat()).ok().json();
    assert_eq!(troika(&[&["sim", "--profile", file][..], &settings].concat()).ok().json(), record);
    // Four tiles of four layers with six operations, and the compressors of three.
    let hybrid = &record["arms"][2];
    assert_eq!((&hybrid["planned"], &hybrid["dispatched"]), (&108.into(), &108.into()));
    let rate = |arm: usize| record["arms"][arm]["prefill_tps"].as_f64().expect("a number");
    assert!(rate(2) > rate(1), "{record}");
    // The tuner compares with the plan in the profile.
    let scratch = Scratch::new();
    let out = scratch.arg("tuning.json");
    let modes = ["--tiles", "1", "--rounds", "3", "--modes", "overlap", "--out", &out];
    let report = troika(&[&["tune", "--simulate", "epyc-2vcpu"][..], &modes].concat()).ok().stdout;
    assert!(report.contains("the profile's plan"), "{report}");
    let nano =
        ["sim", "--profile", "epyc-2vcpu-nano", "--prompt", "769", "--what-if", "engine-rate=1,2", "--json", "-"];
    assert_eq!(troika(&nano).ok().json()["points"].as_array().map(Vec::len), Some(2));
}

#[test]
fn nonsense_is_refused_by_name() {
    let scratch = Scratch::new();
    troika(&["sim", "--profile", "m4"]).fails(1, &["no profile m4", "m3-ultra-512", "epyc-2vcpu"]);
    troika(&["sim", "--profile", "epyc-2vcpu", "--plan", "default"]).fails(1, &["epyc-2vcpu has no price of"]);
    troika(&["sim", "--prompt", "1000000000000"]).fails(1, &["a prompt has 2 to 1048576 tokens, not 1000000000000"]);
    troika(&["sim", "--prompt", "1048576", "--concurrency", "256"]).fails(1, &["steps of 2048", "2048 at most"]);
    troika(&["sim", "--tile", "1000000000000"]).fails(1, &["a tile has 1 to 1048576 tokens"]);
    let negative = include_str!("../../../../profiles/epyc-2vcpu.toml").replacen("primary_ms = ", "primary_ms = -", 1);
    let negative = scratch.write("negative.toml", negative.as_bytes());
    troika(&["sim", "--profile", &negative]).fails(1, &["negative.toml", "primary_ms of", "0 at least"]);
    troika(&["sim", "--model", "./nowhere"]).fails(1, &["./nowhere/config.json"]);
    troika(&["sim", "--model", "v5"]).fails(1, &["has the prices of v4-flash-0731, not of v5"]);
    troika(&["sim", "--checkpoint", "q4"]).fails(1, &["no checkpoint q4", "fp8"]);
    troika(&["sim", "--plan", "best"]).fails(1, &["no plan best", "published-2026-08"]);
    troika(&["sim", "--place", "wq=whole"]).fails(2, &["no operation wq", "query"]);
    troika(&["sim", "--place", "shared=whole"]).fails(1, &["either whole (shared) or in two parts"]);
    troika(&["sim", "--prompt", "1"]).fails(1, &["a prompt has 2 to"]);
    troika(&["sim", "--fault", "gremlins"]).fails(1, &["--fault gremlins: no such fault"]);
    troika(&["sim", "--what-if", "speed=1"]).fails(2, &["speed cannot be varied"]);
    let record = scratch.arg("prediction.json");
    troika(&["sim", "--prompt", "4097", "--arm", "stock", "--json", &record]).ok();
    troika(&["bench", "compare", &record, &record]).fails(1, &["prediction.json"]);
    let plan = scratch.write("plan.toml", b"tile = 4096\n[place]\nquery = \"half\"\n");
    troika(&["sim", "--plan", &plan]).fails(1, &["plan.toml", "half is not off, whole"]);
    let profile = scratch.write("machine.toml", b"name = 1\n");
    troika(&["sim", "--profile", &profile]).fails(1, &["machine.toml"]);
}
