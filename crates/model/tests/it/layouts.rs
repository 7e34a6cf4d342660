//! Every layout gives the same weights.

use std::collections::BTreeMap;

use serde_json::json;
use troika_base::storage::ScaleFormat;
use troika_base::{Format, StoredTensor};
use troika_graph::{Role, Scope, WeightKey, WeightSource};
use troika_model::checkpoint::layout::Layout;
use troika_model::checkpoint::safetensors::Dtype;
use troika_model::{Checkpoint, DrafterStatus, ModelConfig, WeightTable, read_file};

use crate::support::{Parts, Raw, decode, open, oracle, safetensors, write};

fn format_of(weights: &WeightTable, key: WeightKey) -> Format {
    weights.tensor(key).map(|tensor| tensor.format()).expect("the table has the weight")
}

/// Asserts that two tables hold the same numbers, whatever their formats, in `scopes` where given.
fn assert_same_numbers(a: &WeightTable, b: &WeightTable, with_stages: bool) {
    let trunk = |table: &WeightTable| -> Vec<WeightKey> {
        table.keys().into_iter().filter(|key| with_stages || !matches!(key.scope, Scope::Stage(_))).collect()
    };
    assert_eq!(trunk(a), trunk(b));
    for key in trunk(a) {
        let (a, b) = (a.tensor(key).expect("listed"), b.tensor(key).expect("listed"));
        assert_eq!((a.rows(), a.cols()), (b.rows(), b.cols()), "{key}");
        assert!(decode(&a) == decode(&b), "{key}: {} and {} differ", a.format(), b.format());
    }
}

#[test]
fn three_layouts_hold_equal_numbers() {
    let (_, official) = open(&oracle("tiny")).expect("opens");
    let (_, bf16) = open(&oracle("tiny-bf16")).expect("opens");
    let (_, mlx) = open(&oracle("tiny-mlx")).expect("opens");
    assert_eq!(official.layout(), Layout::Official);
    assert_eq!(bf16.layout(), Layout::Official);
    assert_eq!(mlx.layout(), Layout::Mlx);
    assert_same_numbers(&official, &bf16, false);
    assert_same_numbers(&official, &mlx, false);

    let wq_b = WeightKey::layer(1, Role::WqB);
    let expert = WeightKey::layer(3, Role::ExpertW2(7));
    assert_eq!(format_of(&official, wq_b), Format::Fp8Tile { scale: ScaleFormat::E8m0 });
    assert_eq!(format_of(&bf16, wq_b), Format::Bf16);
    assert_eq!(format_of(&mlx, wq_b), Format::Mxfp8);
    assert_eq!(format_of(&official, expert), Format::Mxfp4);
    assert_eq!(format_of(&bf16, expert), Format::Bf16);
    assert_eq!(format_of(&mlx, expert), Format::Mxfp4);
    for table in [&official, &bf16, &mlx] {
        assert_eq!(table.hash_layers(), [true, true, false, false]);
        assert_eq!(table.extra(), [] as [String; 0]);
    }
}

#[test]
fn only_tiny_has_a_drafter() {
    let (_, official) = open(&oracle("tiny")).expect("opens");
    assert_eq!(official.drafter(), &DrafterStatus::Available { num_stages: 3 });
    let stage = |stage, role| official.tensor(WeightKey { scope: Scope::Stage(stage), role });
    let dims = |tensor: Option<StoredTensor>| tensor.map(|tensor| (tensor.rows(), tensor.cols()));
    assert_eq!(dims(stage(0, Role::MainProj)), Some((128, 384)));
    assert_eq!(dims(stage(1, Role::MainProj)), None);
    assert_eq!(dims(stage(2, Role::MarkovW2)), Some((384, 32)));
    assert_eq!(dims(stage(2, Role::ConfidenceProj)), Some((1, 160)));
    assert_eq!(dims(stage(1, Role::GateBias)), Some((1, 8)));

    for name in ["tiny-bf16", "tiny-mlx"] {
        let (_, weights) = open(&oracle(name)).expect("opens");
        assert_eq!(weights.drafter().to_string(), "mtp: unavailable: no mtp.* tensors");
    }
}

/// Keys that no layer needs may be absent or out of place, as in configurations cut down from larger ones.
#[test]
fn configurations_say_no_more_than_the_layers_need() {
    let tiny = Parts::read(&oracle("tiny")).config;
    let read = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let mut config = tiny.clone();
        change(config.as_object_mut().expect("an object"));
        ModelConfig::from_json(&config.to_string())
    };
    let cut = read(&|config| {
        config.insert("num_hidden_layers".to_owned(), json!(1));
        for key in ["compress_rope_theta", "index_n_heads", "index_head_dim", "index_topk"] {
            config.remove(key);
        }
    })
    .expect("a window-only layer needs none of these");
    assert_eq!(cut.num_hash_layers, 1, "two of one layer");
    assert_eq!(cut.dspark, None, "its targets are layers that are gone");
    let scaling = read(&|config| drop(config.insert("rope_scaling".to_owned(), json!({"rope_type": "default"}))));
    assert_eq!(scaling.expect("default is none").rope_scaling, None);
    let want = "config lacks `index_topk`: it decides shapes or numbers and has no safe default";
    let missing = read(&|config| drop(config.remove("index_topk"))).expect_err("the CSA layers need it");
    assert_eq!(missing.to_string(), want);
}

#[test]
fn an_unusable_drafter_is_named_and_the_trunk_still_opens() {
    let mut parts = Parts::read(&oracle("tiny"));
    parts.tensors.remove("mtp.1.ffn.gate.bias");
    parts.tensors.remove("mtp.2.norm.weight");
    let (_, weights) = parts.open().expect("the trunk is whole");
    let reason = "mtp: unavailable: 2 tensors are missing, first `mtp.1.ffn.gate.bias`";
    assert_eq!(weights.drafter().to_string(), reason);
    assert!(weights.keys().iter().all(|key| !matches!(key.scope, Scope::Stage(_))));

    let mut parts = Parts::read(&oracle("tiny"));
    parts.config.as_object_mut().expect("an object").remove("dspark_block_size");
    let (_, weights) = parts.open().expect("the trunk is whole");
    assert_eq!(
        weights.drafter().to_string(),
        "mtp: unavailable: config.json has no dspark_block_size or no dspark_target_layer_ids"
    );

    let faults = [
        (
            json!([1, 4]),
            "config: `dspark_target_layer_ids[1]` is 4, must be a layer number below `num_hidden_layers` (4)",
        ),
        (json!([]), "config.json has no dspark_block_size or no dspark_target_layer_ids"),
    ];
    for (targets, want) in faults {
        let mut parts = Parts::read(&oracle("tiny"));
        parts.config["dspark_target_layer_ids"] = targets;
        let (_, weights) = parts.open().expect("the trunk is whole");
        assert_eq!(weights.drafter().to_string(), format!("mtp: unavailable: {want}"));
    }

    let mut parts = Parts::read(&oracle("tiny"));
    let proj = parts.tensor("mtp.0.main_proj.weight").clone();
    parts.tensors.retain(|name, _| !name.starts_with("mtp."));
    parts.tensors.insert("mtp.0.e_proj.weight".to_owned(), proj);
    let (_, weights) = parts.open().expect("the trunk is whole");
    let reason = "mtp: unavailable: the MTP module of the April release (`mtp.0.e_proj.weight`), not a DSpark drafter";
    assert_eq!(weights.drafter().to_string(), reason);
    assert_eq!(weights.extra(), ["mtp.0.e_proj.weight"]);
}

#[test]
fn other_spellings_and_scale_types_are_read() {
    let (_, want) = open(&oracle("tiny")).expect("opens");
    let mut parts = Parts::read(&oracle("tiny"));
    let spelled = |name: &str| name.replace(".scale", ".weight_scale_inv");
    parts.tensors = parts.tensors.iter().map(|(name, raw)| (spelled(name), raw.clone())).collect();
    // fp8 scales as other engines store them; fp4 scales are always e8m0.
    for (i, name) in ["wq_a", "wq_b", "wkv"].iter().enumerate() {
        let scale = parts.tensor(&format!("layers.0.attn.{name}.weight_scale_inv"));
        // 2^(b-127) as f32 has the exponent field b; bf16 is its upper half.
        let float = |byte: &u8| (u32::from(*byte) << 23).to_le_bytes();
        (scale.dtype, scale.bytes) = match i {
            0 => (Dtype::F32, scale.bytes.iter().flat_map(float).collect()),
            1 => (Dtype::BF16, scale.bytes.iter().flat_map(|byte| float(byte)[2..].to_vec()).collect()),
            _ => (Dtype::U8, scale.bytes.clone()),
        };
    }
    let table = parts.tensor("layers.0.ffn.gate.tid2eid");
    table.dtype = Dtype::I32;
    table.bytes = table.bytes.chunks(8).flat_map(|number| number[..4].to_vec()).collect();
    let (_, got) = parts.open().expect("opens");
    assert_same_numbers(&want, &got, true);
    let wq_a = format_of(&got, WeightKey::layer(0, Role::WqA));
    assert_eq!(wq_a, Format::Fp8Tile { scale: ScaleFormat::F32 });
    assert_eq!(format_of(&got, WeightKey::layer(0, Role::GateTid2eid)), Format::I32);
}

/// Splits `tiny` in three by name.
fn shards() -> (Parts, [BTreeMap<String, Raw>; 3]) {
    let parts = Parts::read(&oracle("tiny"));
    let mut shards = [BTreeMap::new(), BTreeMap::new(), BTreeMap::new()];
    for (i, (name, raw)) in parts.tensors.iter().enumerate() {
        shards[i % 3].insert(name.clone(), raw.clone());
    }
    (parts, shards)
}

#[test]
fn shards_are_read_with_and_without_an_index() {
    let (_, want) = open(&oracle("tiny")).expect("opens");
    let (parts, shards) = shards();
    let dir = tempfile::tempdir().expect("a temporary directory");
    write(&dir.path().join("config.json"), parts.config.to_string().as_bytes());
    let mut weight_map = BTreeMap::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-00003.safetensors", i + 1);
        weight_map.extend(shard.keys().map(|tensor| (tensor.clone(), name.clone())));
        write(&dir.path().join(name), &safetensors(shard));
    }
    let (_, without) = open(dir.path()).expect("opens");
    assert_same_numbers(&want, &without, true);

    // With an index, other files of the directory are none of our business.
    write(&dir.path().join("other.safetensors"), b"not one");
    let index = json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
    write(&dir.path().join("model.safetensors.index.json"), index.to_string().as_bytes());
    let (_, with) = open(dir.path()).expect("opens");
    assert_same_numbers(&want, &with, true);
}

#[test]
fn a_single_file_can_be_named() {
    let checkpoint = Checkpoint::open(&oracle("tiny").join("model.safetensors"), &read_file).expect("opens");
    assert_eq!(checkpoint.files().paths().len(), 1);
}
