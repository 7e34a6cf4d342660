//! `--npu ort`: without the library everything serves; with it (`cargo xtask ort`) nano runs on it.

use crate::serving::Server;
use crate::support::troika;

const BENCH: [&str; 9] =
    ["bench", "in-process", "--prompt-lengths", "129", "--rounds", "1", "--generate", "2", "--threads=1"];
/// Nothing is measured.
const PLACED: [&str; 6] = ["--hybrid", "on", "--place", "shared=whole", "--tile", "64"];

fn bench<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&BENCH[..], &PLACED, &["--chunk", "64"], more].concat()
}

#[test]
fn a_missing_library_is_a_state_and_no_failure() {
    let missing = ["--npu", "ort:lib=/nowhere/libonnxruntime.so"];
    let json = troika(&bench(&[&missing[..], &["--json", "-"]].concat())).ok().json();
    let state = json["hybrid"]["state"].as_str().expect("a state");
    for part in ["unavailable(", "/nowhere/libonnxruntime.so", "pip install onnxruntime", "--npu ort:lib=PATH"] {
        assert!(state.contains(part), "{state}");
    }
    troika(&bench(&[&missing[..], &["--require-engaged"]].concat())).fails(1, &["NOT ENGAGED", "/nowhere"]);
    troika(&[&["plan"][..], &missing].concat()).fails(1, &["/nowhere/libonnxruntime.so"]);
    let devices = troika(&[&["devices"][..], &missing].concat()).ok().stdout;
    assert!(devices.contains("ort   unavailable: ") && !devices.contains("soft"), "{devices}");
    // A library that is none.
    let program = format!("ort:lib={}", std::env::current_exe().expect("this program").display());
    let devices = troika(&["devices", "--npu", &program]).ok().stdout;
    for part in ["ort   unavailable: ", "cannot dynamically load"] {
        assert!(devices.contains(part), "{devices}");
    }
}

#[test]
fn a_server_without_the_library_serves() {
    let server = Server::start_with(&["--npu", "ort:lib=/nowhere/libonnxruntime.so", "--hybrid", "on"]);
    let (head, health) = server.request("GET", "/health", "");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}{health}");
    let (_, status) = server.request("GET", "/troika/status", "");
    assert!(status.contains("unavailable(engine ort: ONNX Runtime cannot be opened"), "{status}");
    let body = r#"{"model": "nano", "prompt": "Once", "max_tokens": 2, "temperature": 0}"#;
    let (head, answer) = server.request("POST", "/v1/completions", body);
    assert!(head.starts_with("HTTP/1.1 200") && answer.contains("\"completion_tokens\":2"), "{head}{answer}");
}

fn installed(settings: &str) -> String {
    let place = std::env::var("TROIKA_TEST_ORT").expect("TROIKA_TEST_ORT names a Python environment with onnxruntime");
    format!("ort:lib={place}{settings}")
}

#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn nano_runs_on_engines_of_onnx_runtime() {
    let dir = tempfile::tempdir().expect("a folder");
    for settings in ["", ",form=float,instances=2", ",provider=qnn"] {
        let engine = installed(settings);
        // To a file: Qualcomm's emulator writes to the standard output.
        let file = dir.path().join("bench.json");
        let file_name = file.to_str().expect("a name of letters");
        let plans = dir.path().to_str().expect("a name of letters");
        let own = ["--npu", &engine, "--plan-dir", plans, "--require-engaged", "--json", file_name];
        troika(&bench(&own)).ok();
        let text = std::fs::read_to_string(&file).expect("readable");
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let (hybrid, shared) = (&json["hybrid"], &json["hybrid"]["kinds"]["shared expert"]);
        assert_eq!(hybrid["state"], "engaged", "{settings}: {hybrid}");
        // In each of six layers two tiles, in a warm-up and in a counted round.
        assert_eq!((&shared["planned"], &shared["exact"]), (&24.into(), &24.into()), "{settings}: {shared}");
    }
}

/// What a neural engine's compiler has made once is found by the next start; one damaged file costs one compilation.
#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn a_restart_compiles_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let plans = dir.path().to_str().expect("a name of letters");
    let engine = installed(",provider=qnn");
    let file = dir.path().join("bench.json");
    let programs = |more: &[&str]| {
        let own = ["--npu", &engine, "--plan-dir", plans, "--json", file.to_str().expect("letters")];
        troika(&bench(&[&own[..], more].concat())).ok();
        let text = std::fs::read_to_string(&file).expect("readable");
        let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(json["hybrid"]["state"], "engaged");
        json["hybrid"]["programs"].take()
    };
    let want = |compiled: u64, from_disk: u64, damaged: u64| {
        serde_json::json!({
            "compiled": compiled, "from_disk": from_disk, "damaged": damaged, "not_kept": 0, "evicted": 0, "refused": 0,
        })
    };
    // The shared expert and a half of wq_b of each of six layers.
    assert_eq!(programs(&[]), want(12, 0, 0));
    assert_eq!(programs(&[]), want(0, 12, 0));
    let folder = std::fs::read_dir(dir.path().join("programs")).expect("readable");
    let files: Vec<_> =
        folder.map(|file| file.expect("there").path()).filter(|path| path.extension().is_some()).collect();
    assert_eq!(files.len(), 12, "{files:?}");
    let mut bytes = std::fs::read(&files[5]).expect("readable");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&files[5], bytes).expect("writable");
    assert_eq!(programs(&[]), want(1, 11, 1));
    let devices = troika(&["devices", "--plan-dir", plans]).ok().stdout;
    assert!(devices.contains("12 programs that engines have compiled"), "{devices}");
    assert_eq!(programs(&["--program-limit", "0"]), serde_json::Value::Null);
}

#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn devices_say_what_the_library_has() {
    let devices = |settings: &str| troika(&["devices", "--npu", &installed(settings)]).ok().stdout;
    let cpu = devices("");
    assert!(cpu.contains("ONNX Runtime at ") && cpu.contains("provider cpu (1 x 1 cores)"), "{cpu}");
    assert!(devices(",provider=qnn").contains("emulated on the CPU"));
    let openvino = devices(",provider=openvino");
    assert!(openvino.contains("unavailable") && openvino.contains("onnxruntime-ep-openvino"), "{openvino}");
}

#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn the_gate_is_passed_by_the_cpu_provider() {
    let args = ["gate", "--tile", "128", "--texts", "4", "--json", "-", "--hybrid", "on", "--place", "shared=whole"];
    let report = troika(&[&args[..], &["--npu", &installed("")]].concat()).ok().json();
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{report}");
}
