//! Every command but `serve`: what it prints, and what it says when it is given nonsense.

use std::io::Write;
use std::process::Stdio;

use troika_device::cpu::CpuLevel;
use troika_testkit::golden::Golden;
use troika_testkit::{assert_close, oracle_dir};

use crate::support::{Ran, Scratch, command, text, troika};

const COMMANDS: [&str; 12] =
    ["run", "serve", "bench", "eval", "logits", "inspect", "explain", "devices", "plan", "sim", "synth", "cache"];

#[test]
fn help_teaches_every_command() {
    let help = troika(&["--help"]).ok().stdout;
    for name in COMMANDS {
        assert!(help.contains(&format!("  {name} ")), "{name} is not in: {help}");
        let own = troika(&[name, "--help"]).ok().stdout;
        assert!(own.lines().next().is_some_and(|line| line.ends_with('.') || line.len() > 20), "{own}");
    }
    assert!(help.contains("Exit codes"));
    troika(&["run", "--no-such-flag"]).fails(2, &["--no-such-flag"]);
    troika(&["bench", "--rounds", "0"]).fails(2, &["--rounds"]);
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let run = |seed: &str| troika(&["run", "hello", "--model", &model, "-n", "12", "--seed", seed]).ok();
    let first = run("1");
    assert_eq!(first.stdout, run("1").stdout);
    assert_ne!(first.stdout, run("2").stdout);
    for part in
        ["prompt 6 tokens", "generated 12 tokens", "tok/s", "first token after", "peak memory", "ended by token limit"]
    {
        assert!(first.stderr.contains(part), "no `{part}` in: {}", first.stderr);
    }
    // The same prompt from a file and from standard input.
    let file = scratch.write("prompt.txt", b"hello");
    let args = ["run", "--file", &file, "--model", &model, "-n", "12", "--seed", "1"];
    assert_eq!(troika(&args).ok().stdout, first.stdout);
    let mut child = command(&["run", "--model", &model, "-n", "12", "--seed", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    child.stdin.take().expect("piped").write_all(b"hello").expect("read");
    assert_eq!(Ran::from(child.wait_with_output().expect("ends")).ok().stdout, first.stdout);
    // A stop string ends the text before itself.
    let stop: String = first.stdout.chars().skip(3).take(2).collect();
    let stopped = troika(&["run", "hello", "--model", &model, "-n", "12", "--seed", "1", "--stop", &stop]).ok();
    let before = &first.stdout[..first.stdout.find(&stop).expect("taken from it")];
    assert_eq!(stopped.stdout.trim_end_matches('\n'), before.trim_end_matches('\n'));
    assert!(stopped.stderr.contains("ended by stop string"), "{}", stopped.stderr);
    // A conversation needs the markers, which this tokenizer has.
    troika(&["run", "--chat", "hello", "--model", &model, "-n", "3"]).ok();
}

#[test]
fn wrong_input_gets_a_clear_error() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    troika(&["run", "x", "--model", "/no/such/dir"]).fails(1, &["/no/such/dir"]);
    troika(&["run", "--file", "/no/such/file", "--model", &model]).fails(1, &["/no/such/file"]);
    troika(&["run", "x", "--model", &model, "--temperature", "-1"]).fails(1, &["temperature"]);
    troika(&["run", "x", "--model", &model, "--stop", ""]).fails(1, &["--stop"]);
    troika(&["run", "x", "--model", &model, "--class", "quick"]).fails(2, &["exact", "official", "fast"]);
    troika(&["run", "x", "--model", &model, "--cpu-level", "sse2"]).fails(2, &["`sse2`", "scalar", "avx512"]);
    troika(&["eval", "/no/such/file", "--model", &model]).fails(1, &["/no/such/file"]);
    let latin1 = scratch.write("latin1.txt", b"caf\xe9");
    troika(&["eval", &latin1, "--model", &model]).fails(1, &["latin1.txt", "UTF-8"]);
    let empty = scratch.write("empty.txt", b"");
    troika(&["eval", &empty, "--model", &model]).fails(1, &["empty.txt", "no text"]);
    troika(&["explain", "--config", "/no/such/config.json"]).fails(1, &["/no/such/config.json"]);
    troika(&["bench", "in-process", "--model", &model, "--prompt-lengths", "99999999"])
        .fails(1, &["tokens do not fit", "context"]);
    troika(&["synth", "--preset", "mini", &model]).fails(1, &["not an empty directory"]);
    troika(&["synth", "--preset", "huge", "x"]).fails(2, &["mini", "true2", "flash-slice"]);
}

#[test]
fn damaged_checkpoints_are_named_and_the_weights_come_before_the_tokenizer() {
    let scratch = Scratch::new();
    let (model, weights) = (scratch.arg("model"), scratch.path("model").join("model.safetensors"));
    std::fs::remove_file(scratch.path("model").join("tokenizer.json")).expect("it was there");
    troika(&["run", "x", "--model", &model]).fails(1, &["tokenizer.json"]);
    let whole = std::fs::read(&weights).expect("readable");
    std::fs::write(&weights, &whole[..whole.len() - 100]).expect("writable");
    troika(&["run", "x", "--model", &model]).fails(1, &["model.safetensors"]);
    troika(&["inspect", &model]);
    std::fs::write(&weights, b"not a checkpoint").expect("writable");
    troika(&["run", "x", "--model", &model]).fails(1, &["model.safetensors"]);
    std::fs::write(&weights, &whole).expect("writable");
    std::fs::write(scratch.path("model").join("config.json"), "{").expect("writable");
    troika(&["run", "x", "--model", &model]).fails(1, &["config.json"]);
    let report = troika(&["inspect", &model]).fails(1, &[]);
    assert!(report.stdout.contains("config.json"), "{}", report.stdout);
}

/// Tensors of a safetensors file of ours, as `(dtype, shape, bytes)`.
fn tensor(path: &std::path::Path, name: &str) -> (String, Vec<u64>, Vec<u8>) {
    let bytes = std::fs::read(path).expect("written");
    let len = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).expect("JSON");
    let entry = &header[name];
    let number = |value: &serde_json::Value| value.as_u64().expect("a number");
    let [start, end] = [0, 1].map(|i| 8 + len + number(&entry["data_offsets"][i]) as usize);
    let shape = entry["shape"].as_array().expect("a list").iter().map(number).collect();
    (entry["dtype"].as_str().expect("text").to_owned(), shape, bytes[start..end].to_vec())
}

#[test]
fn logits_are_the_oracles_however_the_input_is_cut() {
    let scratch = Scratch::new();
    let golden = Golden::open("golden_logits");
    let ids = golden.tokens("n129.tokens");
    let tokens = scratch.write("tokens.json", format!("{{\"tokens\": {ids:?}}}").as_bytes());
    let model = text(&oracle_dir().join("tiny"));
    let logits = |extra: &[&str]| {
        let out = scratch.path("logits.safetensors");
        let target = text(&out);
        let args = ["logits", "--model", &model, "--tokens", &tokens, "--out", &target];
        troika(&[&args, extra].concat()).ok();
        let (dtype, shape, bytes) = tensor(&out, "logits");
        assert_eq!(dtype, "F32");
        (shape, bytes)
    };
    let (shape, bytes) = logits(&[]);
    assert_eq!(shape, [129, 384]);
    let floats: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes"))).collect();
    assert_close("logits", &floats, &golden.f32("n129.logits").data, 2e-4);
    for chunks in ["1", "1,7,128", "127,1"] {
        assert!(logits(&["--chunks", chunks]).1 == bytes, "chunks {chunks} changed a bit");
    }
    let (shape, last) = logits(&["--last", "3", "--threads", "1"]);
    assert_eq!(shape, [3, 384]);
    assert!(bytes.ends_with(&last), "the last rows are the last rows");
    let (_, official) = logits(&["--class", "official"]);
    assert!(official != bytes, "the class is applied");
}

#[test]
fn token_files_are_checked() {
    let scratch = Scratch::new();
    let (model, out) = (text(&oracle_dir().join("tiny")), scratch.arg("out.safetensors"));
    for (content, want) in [
        ("", "not valid JSON"),
        ("{\"ids\": []}", "list of token ids"),
        ("[]", "no tokens"),
        ("[1, -2]", "entry 1 is -2"),
        ("[1.5]", "entry 0 is 1.5"),
        ("[\"a\"]", "entry 0"),
        ("[99999999999999999999]", "entry 0"),
        ("[384]", "token 384 is not in the vocabulary of 384"),
    ] {
        let tokens = scratch.write("tokens.json", content.as_bytes());
        troika(&["logits", "--model", &model, "--tokens", &tokens, "--out", &out]).fails(1, &[want]);
        assert!(!scratch.path("out.safetensors").exists(), "nothing is written");
    }
    let tokens = scratch.write("tokens.json", b"[1, 2]");
    troika(&["logits", "--model", &model, "--tokens", &tokens, "--out", &out, "--chunks", "0"]).fails(2, &["--chunks"]);
    troika(&["logits", "--model", &model, "--tokens", &tokens, "--out", "/no/such/dir/x"])
        .fails(1, &["/no/such/dir/x"]);
}

#[test]
fn reports_are_json_with_the_promised_keys() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let corpus = scratch.write("text.txt", "def f(x):\n    return x * 2  # naïve\n".repeat(20).as_bytes());
    let eval = troika(&["eval", &corpus, "--model", &model, "--json", "-", "--context", "100"]).ok().json();
    let bits = eval["bits_per_byte"].as_f64().expect("a number");
    // Random weights over 512 tokens of one byte each: about the 9 bits of a blind guess.
    assert!((7.0..12.0).contains(&bits), "{bits}");
    assert_eq!(eval["files"][0]["bytes"].as_u64(), Some(std::fs::metadata(&corpus).expect("there").len()));
    let wider = troika(&["eval", &corpus, "--model", &model, "--json", "-"]).ok().json();
    assert_ne!(wider["bits_per_byte"], eval["bits_per_byte"], "the window is applied");

    let out = scratch.arg("bench.json");
    let args = [
        "bench",
        "in-process",
        "--model",
        &model,
        "--prompt-lengths",
        "20,40",
        "--generate",
        "4",
        "--rounds",
        "2",
        "--json",
        &out,
    ];
    troika(&args).ok();
    let bench: serde_json::Value = serde_json::from_slice(&std::fs::read(&out).expect("written")).expect("JSON");
    assert_eq!(bench["cpu_level"], CpuLevel::best().name());
    let scalar = [
        "bench",
        "in-process",
        "--model",
        &model,
        "--prompt-lengths",
        "4",
        "--generate",
        "2",
        "--rounds",
        "1",
        "--json",
        "-",
    ];
    let scalar = troika(&[&scalar[..], &["--cpu-level", "scalar"]].concat()).ok().json();
    assert_eq!(
        (&scalar["cpu_level"], scalar["device"].as_str().map(|name| name.ends_with("scalar"))),
        (&"scalar".into(), Some(true))
    );
    let results = bench["results"].as_array().expect("a list");
    assert_eq!(results.len(), 2);
    for (row, tokens) in results.iter().zip([20, 40]) {
        assert_eq!(row["prompt_tokens"], tokens);
        assert_eq!(row["arm"], "fast");
        for key in ["prefill_tps", "decode_tps", "ttft_ms"] {
            assert!(row[key].as_f64().expect("a number") > 0.0, "{key}");
        }
    }

    let inspect = troika(&["inspect", &model, "--json", "-"]).ok().json();
    assert!(inspect.is_object());
    let shown = troika(&["inspect", &model]).ok().stdout;
    assert!(shown.contains("mtp: unavailable: no mtp.* tensors"), "{shown}");

    let explain = troika(&["explain", "--config", &model, "--rows", "64", "--json", "-"]).ok().json();
    let kinds = explain["kinds"].as_array().expect("a list");
    let sum: f64 = kinds.iter().map(|row| row["gflop"].as_f64().expect("a number")).sum();
    assert!((sum - explain["total"]["gflop"].as_f64().expect("a number")).abs() < 1e-9 * sum);
    assert!(explain["peak_activation_bytes"].as_u64().expect("a number") > 0);
}

/// What is no ordinary file is written to, not replaced; a link is followed.
#[test]
fn output_goes_where_it_was_sent() {
    let scratch = Scratch::new();
    let model = scratch.arg("model");
    let target = scratch.write("target.json", b"old");
    std::os::unix::fs::symlink(&target, scratch.path("link.json")).expect("a link");
    troika(&["inspect", &model, "--json", &scratch.arg("link.json")]).ok();
    assert!(scratch.path("link.json").is_symlink(), "the link is still one");
    assert!(std::fs::read_to_string(&target).expect("readable").starts_with('{'));
    let pipe = scratch.arg("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo is there").success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read_to_string(pipe).expect("readable")
    });
    troika(&["inspect", &model, "--json", &pipe]).ok();
    assert!(reader.join().expect("ends").starts_with('{'));
    troika(&["explain", "--config", &model, "--json", "/dev/null"]).ok();
    assert!(!std::path::Path::new("/dev/null").metadata().expect("there").is_file(), "/dev/null is still a device");
}
