//! Random-weight checkpoints are whole, repeatable, and never half there.

use std::path::Path;

use troika_graph::{Role, WeightKey, WeightSource};
use troika_model::{Preset, SynthError, inspect, read_file, synth};

use crate::support::{decode, open};

fn quietly(preset: Preset, dir: &Path, seed: u64) -> Result<(), SynthError> {
    synth(preset, dir, seed, &mut |_, _| ()).map(drop)
}

#[test]
fn a_synthetic_checkpoint_is_complete_and_sensible() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let out = dir.path().join("new/tiny");
    let mut last = (0, 0);
    let written = synth(Preset::Tiny, &out, 7, &mut |done, all| last = (done, all)).expect("written");
    assert_eq!(last, (written.num_bytes, written.num_bytes));
    assert_eq!(std::fs::metadata(out.join("model.safetensors")).expect("there").len(), written.num_bytes);

    let report = inspect(&out, &read_file).expect("a report");
    assert!(report.is_complete() && report.extra.is_empty(), "{report}");
    let (checkpoint, weights) = open(&out).expect("opens");
    assert_eq!(checkpoint.config().model.bos_token_id, Some(256));
    assert_eq!(weights.hash_layers(), [true, false, false]);

    let deviation = |key: WeightKey| {
        let numbers: Vec<f64> = decode(&weights.tensor(key).expect("there")).into_iter().map(f64::from).collect();
        let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
        assert!(mean.abs() < 0.02, "{key} has the mean {mean}");
        (numbers.iter().map(|x| x * x).sum::<f64>() / numbers.len() as f64).sqrt()
    };
    let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 0.1, "{got} is far from {want}");
    near(deviation(WeightKey::model(Role::Embed)), 1.0);
    near(deviation(WeightKey::model(Role::Head)), 0.02);
    near(deviation(WeightKey::layer(1, Role::HcAttnFn)), 0.02);
    near(deviation(WeightKey::layer(1, Role::WqB)), 0.026);
    near(deviation(WeightKey::layer(2, Role::ExpertW2(5))), 0.023);
}

#[test]
fn the_same_seed_gives_the_same_files() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let files = |name: &str, seed| {
        let out = dir.path().join(name);
        quietly(Preset::Tiny, &out, seed).expect("written");
        ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
            .map(|file| std::fs::read(out.join(file)).expect("written"))
    };
    let (first, again, other) = (files("a", 1), files("b", 1), files("c", 2));
    assert!(first == again);
    assert!(first[0] != other[0]);
    assert_eq!(std::fs::read_dir(dir.path().join("a")).expect("there").count(), 4, "no temporary file is left");
}

#[test]
fn the_tokenizer_maps_every_byte_to_itself() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    quietly(Preset::Tiny, &dir.path().join("a"), 1).expect("written");
    let text = std::fs::read_to_string(dir.path().join("a/tokenizer.json")).expect("written");
    let tokenizer: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let vocab = tokenizer["model"]["vocab"].as_object().expect("an object");
    assert_eq!(vocab.len(), 512);
    assert_eq!(vocab["A"], 65);
    assert_eq!(vocab["Ġ"], 32, "the stand-in of the space");
    assert_eq!(vocab["<think>"], 260);
    let mut ids: Vec<u64> = vocab.values().filter_map(serde_json::Value::as_u64).collect();
    ids.sort_unstable();
    assert!(ids.into_iter().eq(0..512));
}

#[test]
fn what_is_there_is_not_touched() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().display();
    std::fs::write(dir.path().join("notes.txt"), "mine").expect("written");
    let error = quietly(Preset::Tiny, dir.path(), 1).expect_err("not empty");
    let want = "exists and is not an empty directory; give a new name or remove it";
    assert_eq!(error.to_string(), format!("{path} {want}"));
    let error = quietly(Preset::Tiny, &dir.path().join("notes.txt"), 1).expect_err("a file");
    assert_eq!(error.to_string(), format!("{path}/notes.txt {want}"));
    assert_eq!(std::fs::read_dir(dir.path()).expect("there").count(), 1);
}
