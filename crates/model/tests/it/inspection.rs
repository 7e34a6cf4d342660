//! Reports on whole and damaged checkpoints.

use serde_json::json;
use troika_model::checkpoint::layout::Layout;
use troika_model::{Inspection, inspect, read_file};

use crate::support::{Parts, oracle, safetensors, write};

fn report(parts: &Parts) -> Inspection {
    let dir = tempfile::tempdir().expect("a temporary directory");
    parts.write(dir.path());
    let mut report = inspect(dir.path(), &read_file).expect("a report");
    let dir = dir.path().display().to_string();
    report.problems.iter_mut().for_each(|problem| *problem = problem.replace(&dir, "DIR"));
    report
}

#[test]
fn a_whole_checkpoint_reads_like_this() {
    let mut report = inspect(&oracle("tiny"), &read_file).expect("a report");
    assert!(report.is_complete());
    report.path = "oracle/tiny".into();
    let want = "\
checkpoint  oracle/tiny
layout      official: 1 file, 581 tensors, 2.8 MiB
model       4 layers, hidden 128, 4 heads of 128, 8 experts of 32 (3 + 1 used), vocabulary 384, context 1048576
layers      1 SWA (window 128), 2 CSA, 1 HCA (ratio 128); experts by token id in 2, by score in 2
parameters  1.4 M, 1.1 M active per token; drafter 732 K
drafter     mtp: available, 3 stages

class               weights     params      bytes  formats
embed                     1     49.2 K   96.0 KiB  1 x bf16
head                      1     49.2 K   96.0 KiB  1 x bf16
norms                    17      1.9 K    3.8 KiB  17 x bf16
hyper-connections        27      101 K    393 KiB  27 x f32
attention                24      328 K    320 KiB  4 x f32, 20 x fp8 (128x128 e8m0)
compressor               12      183 K    393 KiB  9 x bf16, 3 x f32
indexer                  12      266 K    397 KiB  8 x bf16, 2 x f32, 2 x fp8 (128x128 e8m0)
router                    8      4.1 K   26.1 KiB  4 x bf16, 2 x f32, 2 x i64
shared experts           12     49.2 K   48.0 KiB  12 x fp8 (128x128 e8m0)
routed experts           96      393 K    204 KiB  96 x fp4 (mxfp4)
drafter                 144      732 K    831 KiB  20 x bf16, 27 x f32, 72 x fp4 (mxfp4), 25 x fp8 (128x128 e8m0)
total                   354      2.2 M    2.7 MiB

verdict     complete: every tensor is there and of use
";
    assert_eq!(report.to_string(), want);
}

#[test]
fn other_layouts_count_the_same_parameters() {
    let [official, mlx] = ["tiny", "tiny-mlx"].map(|name| inspect(&oracle(name), &read_file).expect("a report"));
    assert!(mlx.is_complete());
    assert_eq!(mlx.layout, Some(Layout::Mlx));
    assert_eq!(official.parameters.trunk, mlx.parameters.trunk);
    assert_eq!(official.parameters.active, mlx.parameters.active);
    assert!(mlx.to_string().contains("drafter     mtp: unavailable: no mtp.* tensors\n"));
    let json = serde_json::to_value(&mlx).expect("serialises");
    assert_eq!(json["layout"], "mlx");
    assert_eq!(json["drafter"], json!({"status": "unavailable", "reason": "no mtp.* tensors"}));
    assert_eq!(json["classes"]["routed_experts"]["count"], 96);
}

#[test]
fn everything_wrong_is_reported_at_once() {
    let mut parts = Parts::read(&oracle("tiny"));
    parts.tensors.retain(|name, _| !name.starts_with("layers.3.ffn.experts.") && name != "norm.weight");
    let spare = parts.tensor("hc_head_base").clone();
    for i in 0..3 {
        parts.tensors.insert(format!("layers.{i}.attn.rotary.inv_freq"), spare.clone());
    }
    parts.tensor("layers.0.attn.wkv.scale").bytes[0] = 255;
    parts.tensor("layers.2.attn.wq_a.weight").shape = vec![128, 64];
    let report = report(&parts);
    assert!(!report.is_complete());
    let text = report.to_string();
    let verdict = text.split("\n\n").nth(2).expect("a verdict");
    let want = "\
problem     DIR/model.safetensors: tensor `layers.0.attn.wkv.scale` has the scale NaN at [0, 0]; scales must be finite, \
the file is damaged
problem     DIR/model.safetensors: tensor `layers.2.attn.wq_a.weight` (F8_E4M3) has shape [128, 64], must be [64, 128]
missing     25 tensors are missing: norms `norm.weight`, 24 of routed experts (first `layers.3.ffn.experts.0.w1.weight`)
extra       3 x `layers.N.attn.rotary.inv_freq` (48 B), not used
verdict     not usable
";
    assert_eq!(verdict, want);
}

#[test]
fn a_report_needs_neither_a_sound_config_nor_every_shard() {
    let mut without_ratios = Parts::read(&oracle("tiny"));
    without_ratios.config["compress_ratios"] = json!(null);
    let report = report(&without_ratios);
    assert_eq!(report.layout, Some(Layout::Official));
    assert_eq!(report.stored["F8_E4M3"].count, 59);
    assert!(report.problems[0].starts_with("DIR/config.json: config lacks `compress_ratios`: "), "{report}");
    assert!(report.to_string().ends_with("verdict     not usable\n"));

    let parts = Parts::read(&oracle("tiny"));
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut first = parts.tensors.clone();
    first.retain(|name, _| !name.starts_with("mtp."));
    write(&dir.path().join("config.json"), parts.config.to_string().as_bytes());
    write(&dir.path().join("model-00001-of-00002.safetensors"), &safetensors(&first));
    let report = inspect(dir.path(), &read_file).expect("a report");
    assert_eq!(
        report.problems,
        [format!("{}: missing shard `model-00002-of-00002.safetensors`", dir.path().display())]
    );
    assert!(report.missing.is_empty() && !report.is_complete());
}

#[test]
fn a_stacked_tensor_counts_once() {
    let mut parts = Parts::read(&oracle("tiny-mlx"));
    parts.tensors.remove("model.layers.2.ffn.switch_mlp.up_proj.weight");
    parts.tensors.remove("model.layers.3.ffn.switch_mlp.up_proj.scales");
    parts.tensor("model.layers.1.ffn.switch_mlp.down_proj.weight").shape = vec![4, 256, 4];
    let report = report(&parts);
    assert_eq!(
        report.problems,
        [
            "DIR/model.safetensors: tensor `model.layers.1.ffn.switch_mlp.down_proj.weight` (U32) has shape [4, 256, 4], must \
          be [8, 128, words]"
        ]
    );
    assert_eq!(
        report.missing.to_string(),
        "2 tensors are missing: 2 of routed experts (first `model.layers.2.ffn.switch_mlp.up_proj.weight`)"
    );
}
