//! MLX's affine formats: every width, group and scale type, alone and mixed in one checkpoint.
//!
//! The vectors are MLX's own, made by `oracle/make_affine.py`; `tests/data/SHA256SUMS` has command and versions.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;
use troika_base::storage::ScaleFormat;
use troika_base::{Format, SharedBytes, StoredTensor};
use troika_graph::{Role, WeightKey, WeightSource};
use troika_model::checkpoint::safetensors::{Dtype, read_header};

use crate::support::{Parts, Raw, decode, oracle};

/// The vectors by name.
fn vectors() -> BTreeMap<String, Raw> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/affine.safetensors");
    let file = std::fs::read(path).expect("part of the repository");
    let entries = read_header(&file).expect("sound");
    let raw = |entry: troika_model::checkpoint::safetensors::HeaderEntry| {
        (entry.name, Raw { dtype: entry.dtype, shape: entry.shape, bytes: file[entry.bytes].to_vec() })
    };
    entries.into_iter().map(raw).collect()
}

#[test]
fn every_width_and_group_decodes_as_in_mlx() {
    let vectors = vectors();
    let mut num_cases = 0;
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            for (kind, scale) in [("f32", ScaleFormat::F32), ("f16", ScaleFormat::F16), ("bf16", ScaleFormat::Bf16)] {
                let part = |part: &str| &vectors[&format!("b{bits}.g{group}.{kind}.{part}")];
                let bytes = |name: &str| SharedBytes::new(part(name).bytes.clone());
                let [rows, cols] = part("values").shape[..] else { panic!("not a matrix") };
                let format = Format::Affine { bits, group, scale };
                let parts = [bytes("weight"), bytes("scales"), bytes("biases")];
                let got = decode(&StoredTensor::new(format, rows, cols, parts).expect("the parts fit"));
                let want = part("values").bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                for (i, (got, want)) in got.into_iter().zip(want).enumerate() {
                    // MLX multiplies and adds with one rounding, we with two.
                    assert!((got - want).abs() <= 1e-6, "b{bits}.g{group}.{kind} [{i}]: {got}, MLX has {want}");
                }
                num_cases += 1;
            }
        }
    }
    assert_eq!(num_cases * 4, vectors.len());
}

/// Numbers as an affine matrix of MLX: `.weight`, `.scales`, `.biases` of module `module`. The last axis of `shape` is
/// quantised in groups; scales are f16.
fn quantise(parts: &mut Parts, module: &str, bits: usize, group: usize) {
    let (shape, numbers) = {
        let raw = &parts.tensors[&format!("{module}.weight")];
        let halves = raw.bytes.as_chunks().0.iter().map(|bytes| u32::from(u16::from_le_bytes(*bytes)) << 16);
        (raw.shape.clone(), halves.map(f32::from_bits).collect::<Vec<f32>>())
    };
    let (mut words, mut scales, mut biases) = (Vec::new(), Vec::new(), Vec::new());
    let half = |x: f32| troika_kernels::formats::f32_to_f16(x).to_le_bytes();
    for numbers in numbers.chunks(group) {
        let low = numbers.iter().copied().fold(f32::INFINITY, f32::min);
        let high = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = (high - low) / ((1 << bits) - 1) as f32;
        let mut packed = vec![0u8; group * bits / 8];
        for (i, x) in numbers.iter().enumerate() {
            let code = ((x - low) / scale).round() as usize;
            for bit in (0..bits).filter(|bit| code >> bit & 1 == 1) {
                packed[(i * bits + bit) / 8] |= 1 << ((i * bits + bit) % 8);
            }
        }
        words.extend(packed);
        scales.extend(half(scale));
        biases.extend(half(low));
    }
    let with_last = |last: usize| {
        let mut shape = shape.clone();
        *shape.last_mut().expect("a matrix") = last;
        shape
    };
    let cols = shape[shape.len() - 1];
    let mut add = |part: &str, dtype: Dtype, shape: Vec<usize>, bytes: Vec<u8>| {
        parts.tensors.insert(format!("{module}.{part}"), Raw { dtype, shape, bytes });
    };
    add("weight", Dtype::U32, with_last(cols * bits / 32), words);
    add("scales", Dtype::F16, with_last(cols / group), scales);
    add("biases", Dtype::F16, with_last(cols / group), biases);
}

/// A checkpoint of MLX names in which every module has a width of its own, as oQ conversions have.
fn mixed() -> Parts {
    let mut parts = Parts::read(&oracle("tiny-bf16"));
    let mlx = Parts::read(&oracle("tiny-mlx"));
    // Take all that MLX stores plainly, and decode the rest from the bf16 twin.
    let proj = [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")];
    let mut tensors = BTreeMap::new();
    for (name, raw) in &mlx.tensors {
        if raw.dtype != Dtype::U32 && raw.dtype != Dtype::U8 {
            tensors.insert(name.clone(), raw.clone());
        } else if let Some(module) = name.strip_suffix(".weight") {
            let mut official = module.strip_prefix("model.").expect("MLX names start so").to_owned();
            let mut twin = |name: &str| parts.tensor(&format!("{name}.weight")).clone();
            let raw = if let Some((layer, part)) = official.split_once(".switch_mlp.") {
                let (w, _) = proj.iter().find(|(_, mlx)| *mlx == part).expect("one of three");
                let mut experts = (0..8).map(|expert| twin(&format!("{layer}.experts.{expert}.{w}")));
                let mut stack = experts.next().expect("eight");
                experts.for_each(|expert| stack.bytes.extend(expert.bytes));
                stack.shape.insert(0, 8);
                stack
            } else {
                for (w, mlx) in proj {
                    official = official.replace(&format!(".shared_experts.{mlx}"), &format!(".shared_experts.{w}"));
                }
                twin(&official)
            };
            tensors.insert(format!("{module}.weight"), raw);
        }
    }
    parts.tensors = tensors;
    parts.config["quantization"] = json!({"group_size": 64, "bits": 4, "mode": "affine"});
    parts
}

#[test]
fn modules_may_differ_in_width_and_group() {
    let mut parts = mixed();
    let (_, plain_weights) = parts.open().expect("a plain MLX checkpoint");

    let expert = |name: &str| format!("model.layers.2.ffn.switch_mlp.{name}");
    let overrides = [
        ("model.embed_tokens".to_owned(), 6, 64, WeightKey::model(Role::Embed)),
        ("lm_head".to_owned(), 8, 128, WeightKey::model(Role::Head)),
        ("model.layers.0.attn.wq_a".to_owned(), 5, 32, WeightKey::layer(0, Role::WqA)),
        ("model.layers.1.attn.wo_b".to_owned(), 8, 32, WeightKey::layer(1, Role::WoB)),
        ("model.layers.3.attn.compressor.wkv".to_owned(), 4, 64, WeightKey::layer(3, Role::CompressorWkv)),
        ("model.layers.2.ffn.gate".to_owned(), 8, 64, WeightKey::layer(2, Role::Gate)),
        (expert("gate_proj"), 2, 64, WeightKey::layer(2, Role::ExpertW1(7))),
        (expert("up_proj"), 3, 128, WeightKey::layer(2, Role::ExpertW3(4))),
    ];
    for (module, bits, group, _) in &overrides {
        quantise(&mut parts, module, *bits, *group);
        parts.config["quantization"][module] = json!({"group_size": group, "bits": bits});
    }
    // A module of the default width needs no entry, and one said to be plain must be.
    quantise(&mut parts, "model.layers.1.attn.wkv", 4, 64);
    parts.config["quantization"]["model.layers.0.attn.wkv"] = json!(false);

    let (_, weights) = parts.open().expect("opens");
    assert_eq!(weights.extra(), [] as [String; 0]);
    for (module, bits, group, key) in &overrides {
        let tensor = weights.tensor(*key).expect("there");
        let format = Format::Affine { bits: *bits as u8, group: *group as u16, scale: ScaleFormat::F16 };
        assert_eq!(tensor.format(), format, "{module}");
        let got = decode(&tensor);
        let want = decode(&plain_weights.tensor(*key).expect("there"));
        let range = want.iter().fold(0f32, |range, x| range.max(x.abs())) * 2.0;
        let step = range / ((1 << bits) - 1) as f32;
        let worst = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0f32, f32::max);
        assert!(worst <= step * 0.6, "{module}: {worst} off, codes are {step} apart");
        assert!(worst > 0.0, "{module} is not what was quantised");
    }

    parts.config["quantization"].as_object_mut().expect("a map").remove("lm_head");
    let (_, weights) = parts.open().expect("the tensors decide");
    let want = "`lm_head` holds mode affine, 8 bits, group 128, though config.json says mode affine, 4 bits, group 64; the \
                tensors decide";
    assert_eq!(weights.notes(), [want]);
}
