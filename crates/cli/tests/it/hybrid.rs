//! Neural engines from the command line, on nano. Numbers in the names of tests are those of the hybrid spec's section 13.

use serde_json::json;

use crate::diagnosis::{get, metrics, post, record};
use crate::serving::Server;
use crate::support::troika;

const BENCH: [&str; 9] =
    ["bench", "in-process", "--prompt-lengths", "129", "--rounds", "1", "--generate", "2", "--threads=1"];

/// Nothing is measured.
const PLACED: [&str; 6] = ["--npu", "soft", "--hybrid", "on", "--place", "shared=whole"];

fn nano() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano")
}

fn bench(more: &[&str]) -> Vec<&'static str> {
    BENCH.into_iter().chain(more.iter().map(|arg| &*Box::leak(arg.to_string().into_boxed_str()))).collect()
}

#[test]
fn a_bench_with_engines_shows_what_they_did() {
    let args = bench(&[&PLACED[..], &["--tile", "64", "--chunk", "64", "--require-engaged", "--json", "-"]].concat());
    let json = troika(&args).ok().json();
    let hybrid = &json["hybrid"];
    assert_eq!(hybrid["state"], "engaged");
    assert!(hybrid["numeric_class"].as_str().is_some_and(|class| class.starts_with("fast+hybrid:")), "{hybrid}");
    let shared = &hybrid["kinds"]["shared expert"];
    // Two tiles of each of six layers, in a warm-up and a counted round; the last token and the next are decode steps.
    assert_eq!(
        (&shared["planned"], &shared["exact"], &shared["merged"]),
        (&24.into(), &24.into(), &24.into()),
        "{shared}"
    );
    assert_eq!(shared["bypass_decode"], 24, "{shared}");
    assert!(troika(&bench(&["--json", "-"])).ok().json().get("hybrid").is_none());
}

#[test]
fn acceptance_02_and_17_engines_that_never_run_are_not_engaged() {
    let narrow = [&PLACED[..], &["--tile", "128", "--chunk", "64"]].concat();
    troika(&bench(&narrow)).ok();
    let args = bench(&[&narrow[..], &["--require-engaged"]].concat());
    troika(&args).fails(1, &["NOT ENGAGED", "idle"]);
    let args = bench(&["--npu", "soft", "--class", "exact", "--require-engaged"]);
    troika(&args).fails(1, &["NOT ENGAGED", "unavailable", "class"]);
    troika(&bench(&["--hybrid", "on"])).fails(1, &["--npu"]);
    troika(&bench(&["--npu", "ane"])).fails(2, &["ane", "soft"]);
}

#[test]
fn devices_and_plans_are_shown() {
    let devices = troika(&["devices"]).ok().stdout;
    assert!(devices.contains("cpu ") && devices.contains("soft "), "{devices}");
    let said = ["plan", "--npu", "soft:instances=2", "--hybrid", "on", "--place", "wo_b=whole"];
    let plan = troika(&said).ok().stdout;
    for part in ["soft x 2", "wq_b", "split: 0.500", "shared expert", "in turn", "stays with", "nothing was measured"] {
        assert!(plan.contains(part), "no `{part}` in: {plan}");
    }
    // Engines get half of a limit that is said, and the rest stays with the CPU.
    let little = troika(&[&said[..], &["--memory-limit", "3M"]].concat()).ok().stdout;
    assert!(plan.contains("in memory: ") && !plan.contains(" bytes are needed, "), "{plan}");
    assert!(little.contains(" bytes are needed, "), "{little}");
    let stacked = ["plan", "--npu", "soft", "--hybrid", "on", "--stack-inputs", "--place"];
    let plan = troika(&[&stacked[..], &["attention_input=whole"]].concat()).ok().stdout;
    assert!(plan.contains("attention inputs") && !plan.contains("wkv"), "{plan}");
    troika(&[&stacked[..], &["wkv=whole"]].concat()).fails(1, &["attention_input"]);
    troika(&["plan", "--npu", "soft", "--place", "attention_input=whole"]).fails(1, &["--stack-inputs"]);
    troika(&["plan"]).fails(1, &["--npu"]);
    troika(&["inspect", nano(), "--memory", "--npu", "soft", "--class", "exact"]).fails(1, &["--class fast"]);
}

/// Arm C of a comparison is called hybrid only by what its server counted, request by request.
#[test]
fn a_comparison_with_engines_is_hybrid() {
    let lengths = ["--prompt-lengths", "257,300", "--fit", "natural", "--tile", "128", "--chunk", "64"];
    let few = [
        "--generate",
        "2",
        "--rounds",
        "3",
        "--max-rounds",
        "3",
        "--repeats",
        "1",
        "--min-sample-ms",
        "0",
        "--json",
        "-",
    ];
    let engine = ["--npu", "soft:cores=1", "--require-engaged"];
    let record = troika(&[&["bench"][..], &lengths, &few, &engine].concat()).ok().json();
    let cells = record["experiments"][0]["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 2);
    for cell in cells {
        assert_eq!(cell["engagement"]["state"], "hybrid", "{cell}");
        let evidence = &cell["arms"][2]["evidence"];
        // Two tiles of each of six layers, three prompts.
        assert_eq!(
            (&evidence["planned"]["shared expert"], &evidence["dispatched"]["shared expert"]),
            (&36.into(), &36.into())
        );
    }
}

/// What a server with an engine says of a prompt of two and a half tiles, in all places.
#[test]
fn a_server_shows_what_its_engine_did() {
    let server = Server::start_with(&[&PLACED[..], &["--tile", "64", "--chunk", "64", "--tail", "32"]].concat());
    let ready = get(&server, "/troika/status");
    assert_eq!(ready["hybrid"]["state"], "ready");
    assert!(ready["geometry"].as_str().expect("text").contains("tile 64, step 64→64, block 128"), "{ready}");
    // With the last token, which is decoded.
    let prompt: Vec<u32> = (0..161).map(|i| 20 + i % 200).collect();
    let reply = post(&server, "", &json!({"prompt": prompt, "max_tokens": 3, "temperature": 0}));
    let record = record(&server, &reply);
    assert_eq!((&record["verdict"], &record["geometry"]), (&json!("engaged"), &ready["geometry"]));
    let kind = &record["ledger"]["kinds"]["shared expert"];
    let counts = ["planned", "exact", "padded", "merged", "cancelled", "logical_rows", "padded_rows", "bypass_decode"];
    // Two tiles and one that is padded, in six layers; three decode steps.
    assert_eq!(counts.map(|name| kind[name].as_u64()), [18, 12, 6, 18, 0, 6 * 160, 6 * 32, 18].map(Some), "{kind}");
    assert_eq!((&kind["fallbacks"], &kind["dispatched"]["soft0"]), (&json!({}), &json!(18)), "{kind}");
    for time in ["input_ready_ms", "region_ms", "gap_ms"] {
        assert!(kind[time].as_f64().is_some_and(|ms| ms >= 0.0), "{time} of {kind}");
    }
    assert!(kind["region_ms"].as_f64() >= kind["device_ms"]["soft0"].as_f64(), "{kind}");
    let chunks = record["choices"][0]["chunks"].as_array().expect("a list").iter();
    let chunks =
        chunks.map(|chunk| ["tokens", "tiles", "padded_rows"].map(|name| chunk[name].as_u64().expect("a count")));
    assert_eq!(chunks.collect::<Vec<_>>(), [[64, 1, 0], [64, 1, 0], [32, 1, 32]]);
    assert_eq!(record["choices"][0]["chunks"][0]["path"], "engines");

    let status = get(&server, "/troika/status");
    assert_eq!((&status["hybrid"]["state"], &status["hybrid"]["last_request"]), (&json!("engaged"), &json!("engaged")));
    assert_eq!(status["hybrid"]["kinds"]["shared expert"]["merged"], 18);
    let bytes = &status["hybrid"]["bytes"];
    assert!(bytes["weights"].as_u64() > Some(0) && bytes["surfaces"].as_u64() > Some(0), "{bytes}");
    assert_eq!(bytes["banks"], 0, "the engine's programs are those weights");
    let inspect = ["inspect", nano(), "--memory", "--npu", "soft", "--tile", "64", "--json", "-"];
    let foreseen = troika(&inspect).ok().json();
    assert_eq!((&foreseen["engines"], &foreseen["chunk"]), (bytes, &json!(512)));
    assert_eq!(get(&server, "/health")["hybrid"], "engaged");
    let samples = metrics(&server);
    let sample = |name: &str| *samples.get(name).unwrap_or_else(|| panic!("no {name} in {samples:#?}"));
    let operations =
        |state: &str| format!("troika_hybrid_operations_total{{kind=\"shared expert\",state=\"{state}\"}}");
    assert_eq!(
        ["planned", "exact", "padded", "merged"].map(|state| sample(&operations(state))),
        [18.0, 12.0, 6.0, 18.0]
    );
    assert_eq!(sample("troika_hybrid_parts_total{kind=\"shared expert\",device=\"soft0\"}"), 18.0);
    assert_eq!(sample("troika_hybrid_projections{state=\"shed\"}"), 0.0);
    let state = samples.keys().find(|name| name.starts_with("troika_hybrid_state{state=\"engaged\"")).expect("a state");
    assert!(state.contains("tile=\"64\"") && state.contains("fast+hybrid:"), "{state}");
}

/// An engine that a narrow `--chunk` leaves without work does not pass for one that works.
#[test]
fn acceptance_02_a_server_whose_steps_are_narrower_than_tiles_says_so_at_once() {
    let args = [
        "serve",
        "--port",
        "0",
        "--npu",
        "soft",
        "--hybrid",
        "on",
        "--tile",
        "128",
        "--chunk",
        "64",
        "--require-engaged",
    ];
    let warning = ["WARN", "no step can hold a tile", "tile=128", "step=64", "cure="];
    let failed = troika(&args).fails(1, &[&["NOT ENGAGED", "idle(step_limit)"][..], &warning].concat());
    assert_eq!(failed.stderr.matches(warning[1]).count(), 1, "once: {}", failed.stderr);
}

#[test]
fn the_gate_is_passed_by_the_soft_engine() {
    let args = ["gate", "--tile", "128", "--texts", "4", "--json", "-"];
    let report = troika(&[&args[..], &PLACED].concat()).ok().json();
    assert_eq!((&report["tokens"], &report["distance"]["positions"]), (&1024.into(), &1024.into()), "{report}");
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{report}");
    troika(&["gate"]).fails(1, &["--npu"]);
    troika(&[&args[..], &PLACED, &["--tiles", "1000"]].concat()).fails(1, &["tokens", "wanted"]);
}

/// A plan that was measured once stays, and so does the class of what is kept.
#[test]
fn a_restart_has_the_same_plan() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir_name = dir.path().to_str().expect("a name of letters");
    let measured = ["--npu", "soft", "--hybrid", "on", "--tile", "64", "--chunk", "64", "--plan-dir", dir_name];
    let hybrid = || troika(&bench(&[&measured[..], &["--json", "-"]].concat())).ok().json()["hybrid"].clone();
    let first = hybrid();
    assert_eq!(first["state"], "engaged");
    assert_eq!(hybrid()["numeric_class"], first["numeric_class"]);
    let files: Vec<_> =
        std::fs::read_dir(dir.path()).expect("readable").map(|file| file.expect("there").path()).collect();
    let [file] = &files[..] else { panic!("one file per model, machine and tile: {files:?}") };
    let text = std::fs::read_to_string(file).expect("readable");
    // A CPU that is 100 times as fast without engines: `auto` leaves them out, and says why.
    let mut content: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    content["costs"]["speedup_alone"] = 100.into();
    std::fs::write(file, content.to_string()).expect("writable");
    let auto = measured.map(|arg| if arg == "on" { "auto" } else { arg });
    troika(&bench(&[&auto[..], &["--require-engaged"]].concat())).fails(1, &["NOT ENGAGED", "auto", "--hybrid on"]);
    let plan = ["plan", "--threads=1", "--npu", "soft", "--tile", "64", "--plan-dir", dir_name];
    let plan = troika(&plan).ok().stdout;
    for part in ["milliseconds of a tile", "wq_b", "predicted of a whole tile", "do not make it shorter", "ideal:"] {
        assert!(plan.contains(part), "no `{part}` in: {plan}");
    }
    // Measured afresh, the file is what it was: without the factor of 100.
    troika(&bench(&[&measured[..], &["--calibrate"]].concat())).ok();
    let text = std::fs::read_to_string(file).expect("readable");
    let content: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert!(content["costs"]["speedup_alone"].as_f64().is_some_and(|factor| factor < 50.0), "{text}");
}

fn simulated<'a>(engine: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let places = ["--hybrid", "on", "--place", "shared=whole", "--tile", "64"];
    [&["--npu", engine], &places[..], more].concat()
}

/// What a simulated engine does is counted as that of a real one, and no time of it is called measured.
#[test]
fn a_simulated_engine_is_never_measured() {
    let engine = simulated("sim:launch-us=1000,tops=1e6", &["--chunk", "64", "--json", "-"]);
    let json = troika(&[&BENCH[..], &engine].concat()).ok().json();
    assert_eq!((&json["results"][0]["arm"], &json["hybrid"]["state"]), (&json!("SIMULATED"), &json!("engaged")));
    let shared = &json["hybrid"]["kinds"]["shared expert"];
    assert_eq!((&shared["planned"], &shared["merged"]), (&24.into(), &24.into()), "{shared}");
    // A millisecond for each of 48 operations, and for each of twelve procedures at load.
    let ms = json["hybrid"]["simulated_ms"]["sim0"].as_f64().expect("a number");
    assert!((60.0..60.1).contains(&ms), "{ms}");
    let required = simulated("sim", &["--chunk", "64", "--require-engaged"]);
    troika(&[&BENCH[..], &required].concat()).fails(1, &["SIMULATED"]);
    troika(&bench(&["--npu", "sim"])).fails(1, &["--hybrid on", "troika sim"]);
    troika(&bench(&["--npu", "sim:fail"])).fails(2, &["unknown setting", "fail-at"]);
    troika(&["tune", "--npu", "sim", "--out", "tuning.json"]).fails(1, &["sim", "--simulate"]);

    let lengths =
        ["--prompt-lengths", "129", "--fit", "aligned", "--generate", "2", "--rounds", "3", "--max-rounds", "3"];
    let arms = ["--repeats", "1", "--tile", "64", "--chunk", "64", "--npu", "sim", "--json", "-"];
    let record = troika(&[&["bench"][..], &lengths, &arms].concat()).ok().json();
    let engagement = &record["experiments"][0]["cells"][0]["engagement"];
    assert_eq!(engagement["state"], "simulated", "{engagement}");
}

/// Each fault has the consequence that it should have; wrong numbers that begin after the warm-up fail the gate.
#[test]
fn acceptance_18_a_simulated_engine_fails_on_demand() {
    let hybrid = |engine: &str| {
        troika(&[&BENCH[..], &simulated(engine, &["--chunk", "64", "--json", "-"])].concat()).ok().json()["hybrid"]
            .clone()
    };
    // Twelve procedures, the shared experts and `wq_b`, are run once at load.
    for (engine, state) in [
        ("sim:compile-limit=1K", "unavailable(compile: "),
        ("sim:fail-loads=100", "unavailable(load: "),
        ("sim:bank-limit=1K", "unavailable(load: "),
        ("sim:fail-at=11", "unavailable(warm-up: "),
        ("sim:corrupt=0.5", "unavailable(quarantined: "),
    ] {
        let hybrid = hybrid(engine);
        assert!(hybrid["state"].as_str().is_some_and(|found| found.starts_with(state)), "{engine}: {hybrid}");
    }
    let failed = hybrid("sim:fail-at=12");
    let kinds = failed["kinds"].as_object().expect("an object").values();
    assert_eq!(kinds.filter_map(|kind| kind["runtime_failures"].as_u64()).sum::<u64>(), 1, "{failed}");
    assert_eq!(failed["latched"].as_object().map(serde_json::Map::len), Some(1), "{failed}");
    let gate = simulated("sim:corrupt=3,corrupt-from=12", &["--threads=1", "--texts", "6"]);
    troika(&[&["gate"][..], &gate].concat()).fails(1, &["wrong numbers"]);
}
