//! Every malformed checkpoint gets one clear error that names file and tensor.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use troika_graph::{Role, WeightKey, WeightSource};
use troika_model::WeightTable;
use troika_model::checkpoint::safetensors::Dtype;

use crate::support::{Parts, open, oracle, safetensors, with_header, write};

/// Writes a checkpoint into a fresh directory with `damage`, opens it, and compares the error with `want`, in which
/// `DIR` stands for the directory. `damage` says what to open.
fn check(want: &str, damage: impl FnOnce(&Path, Parts) -> PathBuf) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = damage(dir.path(), Parts::read(&oracle("tiny")));
    let error = open(&path).map(drop).expect_err("the checkpoint is malformed");
    let got = format!("{error:#}").replace(&dir.path().display().to_string(), "DIR");
    assert_eq!(got, want);
}

/// As [`check`], for damage to the parts of a checkpoint in one file.
fn check_parts(want: &str, damage: impl FnOnce(&mut Parts)) {
    check(want, |dir, mut parts| {
        damage(&mut parts);
        parts.write(dir);
        dir.to_owned()
    });
}

/// As [`check`], for another value of one key of `config.json`. `null` removes it.
fn check_config(key: &str, value: Value, want: &str) {
    check_parts(want, |parts| parts.config[key] = value);
}

/// As [`check`], for a file of the given bytes.
fn check_file(want: &str, bytes: &[u8]) {
    check(want, |dir, parts| {
        parts.write(dir);
        write(&dir.join("model.safetensors"), bytes);
        dir.to_owned()
    });
}

#[test]
fn places() {
    check("there is no checkpoint at DIR/nowhere: no such file or directory", |dir, _| dir.join("nowhere"));
    check("DIR has no config.json; it belongs beside the weights and comes with the original checkpoint", |dir, _| {
        dir.to_owned()
    });
    check("DIR has no *.safetensors files", |dir, parts| {
        write(&dir.join("config.json"), parts.config.to_string().as_bytes());
        dir.to_owned()
    });
    check(
        "DIR has no *.safetensors files, only an unfinished download or synthesis (*.partial, *.incomplete)",
        |dir, parts| {
            write(&dir.join("config.json"), parts.config.to_string().as_bytes());
            write(&dir.join("model.safetensors.partial"), b"");
            dir.to_owned()
        },
    );
    check(
        "DIR/config.json is not a checkpoint: give a directory with config.json and *.safetensors files",
        |dir, parts| {
            parts.write(dir);
            dir.join("config.json")
        },
    );
}

#[test]
fn headers() {
    check_file(
        "DIR/model.safetensors: the file has 0 bytes, too few for a safetensors file: it is empty or truncated",
        b"",
    );
    check_file(
        "DIR/model.safetensors: the header is said to have 1000 bytes, but the file has only 10: it is truncated, or not \
         a safetensors file",
        b"\xe8\x03\0\0\0\0\0\0{}",
    );
    check_file(
        "DIR/model.safetensors: the header is said to have 18446744073709551615 bytes, but the file has only 10: it is \
         truncated, or not a safetensors file",
        b"\xff\xff\xff\xff\xff\xff\xff\xff{}",
    );
    check_file(
        "DIR/model.safetensors: this is a Git LFS pointer, not the data: fetch the file with `git lfs pull`",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    );
    check_file(
        "DIR/model.safetensors: the header is not a JSON object: expected value at line 1 column 1",
        &with_header("garbage!"),
    );
    check_file(
        "DIR/model.safetensors: the header is not a JSON object: invalid type: sequence, expected an object of tensors \
         at line 1 column 0",
        &with_header("[]"),
    );
    let tensor = |entry: &str| with_header(&format!("{{\"embed.weight\": {entry}}}"));
    let wrong = |reason: &str| {
        format!("DIR/model.safetensors: the header entry of tensor `embed.weight` is wrong: {reason} at line 1 column ")
    };
    check_file(
        &(wrong("invalid type: integer `-384`, expected a whole number from 0 to 2^64 - 1") + "49"),
        &tensor(r#"{"dtype": "BF16", "shape": [-384, 128], "data_offsets": [0, 98304]}"#),
    );
    check_file(
        &(wrong("invalid type: floating point `1e+20`, expected a whole number from 0 to 2^64 - 1") + "97"),
        &tensor(r#"{"dtype": "BF16", "shape": [384, 128], "data_offsets": [0, 100000000000000000000]}"#),
    );
    check_file(
        &(wrong("invalid length 9, expected a list of at most 8 dimensions") + "71"),
        &tensor(r#"{"dtype": "BF16", "shape": [1, 1, 1, 1, 1, 1, 1, 1, 1], "data_offsets": [0, 2]}"#),
    );
    check_file(&(wrong("missing field `shape`") + "58"), &tensor(r#"{"dtype": "BF16", "data_offsets": [0, 2]}"#));
    check_file(
        "DIR/model.safetensors: tensor `embed.weight` has the unknown dtype `Q4_K`",
        &tensor(r#"{"dtype": "Q4_K", "shape": [384, 128], "data_offsets": [0, 98304]}"#),
    );
    check_file(
        "DIR/model.safetensors: tensor `embed.weight` has data_offsets [8, 0], which run backwards",
        &tensor(r#"{"dtype": "BF16", "shape": [4], "data_offsets": [8, 0]}"#),
    );
    check_file(
        "DIR/model.safetensors: tensor `embed.weight` is BF16 [4294967296, 4294967296], more than any file can hold",
        &tensor(r#"{"dtype": "BF16", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}"#),
    );
    check_file(
        "DIR/model.safetensors: tensor `embed.weight` ends at data byte 98304, but the file has only 0 bytes of data: it \
         is truncated (download it again)",
        &tensor(r#"{"dtype": "BF16", "shape": [384, 128], "data_offsets": [0, 98304]}"#),
    );
    let mut short = tensor(r#"{"dtype": "BF16", "shape": [384, 128], "data_offsets": [0, 4]}"#);
    short.extend([0; 4]);
    check_file(
        "DIR/model.safetensors: tensor `embed.weight` is BF16 [384, 128] and needs 98304 bytes, but its data_offsets span \
         4",
        &short,
    );
    let pair = |first: &str, second: &str| {
        let entry =
            |name: &str, at: &str| format!(r#""{name}": {{"dtype": "U8", "shape": [4], "data_offsets": [{at}]}}"#);
        let mut file = with_header(&format!("{{{}, {}}}", entry(first, "0, 4"), entry(second, "2, 6")));
        file.extend([0; 6]);
        file
    };
    check_file("DIR/model.safetensors: the data of tensors `a` and `b` overlap", &pair("a", "b"));
    let mut twice = with_header(
        r#"{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}"#,
    );
    twice.extend([0; 2]);
    check_file("DIR/model.safetensors: tensor `a` occurs twice in the header", &twice);
}

#[test]
fn shards() {
    let split = |dir: &Path, parts: &Parts| {
        let (mut first, mut second) = (parts.tensors.clone(), parts.tensors.clone());
        first.retain(|name, _| name.starts_with("layers."));
        second.retain(|name, _| !name.starts_with("layers."));
        write(&dir.join("config.json"), parts.config.to_string().as_bytes());
        write(&dir.join("model-00001-of-00002.safetensors"), &safetensors(&first));
        write(&dir.join("model-00002-of-00002.safetensors"), &safetensors(&second));
    };
    let index = |dir: &Path, weight_map: Value| {
        let index = json!({"metadata": {}, "weight_map": weight_map});
        write(&dir.join("model.safetensors.index.json"), index.to_string().as_bytes());
    };
    check(
        "DIR/model-00001-of-00002.safetensors: tensor `layers.2.attn.compressor.wkv.weight` ends at data byte 32768, but \
         the file has only 1000 bytes of data: it is truncated (download it again)",
        |dir, mut parts| {
            parts
                .tensors
                .retain(|name, _| name == "layers.2.attn.compressor.wkv.weight" || !name.starts_with("layers."));
            split(dir, &parts);
            let path = dir.join("model-00001-of-00002.safetensors");
            let whole = std::fs::read(&path).expect("just written");
            write(
                &path,
                &whole[..whole.len() - parts.tensor("layers.2.attn.compressor.wkv.weight").bytes.len() + 1000],
            );
            dir.to_owned()
        },
    );
    check("DIR: missing shard `model-00001-of-00002.safetensors`", |dir, parts| {
        split(dir, &parts);
        std::fs::remove_file(dir.join("model-00001-of-00002.safetensors")).expect("just written");
        dir.to_owned()
    });
    check(
        "DIR: missing shard `model-00003.safetensors` (the index places tensor `embed.weight` there); download it",
        |dir, parts| {
            split(dir, &parts);
            index(
                dir,
                json!({"norm.weight": "model-00002-of-00002.safetensors", "embed.weight": "model-00003.safetensors"}),
            );
            dir.to_owned()
        },
    );
    check(
        "DIR/model-00001-of-00002.safetensors: the index says it holds tensor `embed.weight`, but it does not",
        |dir, parts| {
            split(dir, &parts);
            index(dir, json!({"embed.weight": "model-00001-of-00002.safetensors"}));
            dir.to_owned()
        },
    );
    check(
        "DIR/model.safetensors.index.json: tensor `embed.weight` is placed in `../model.safetensors`, which is not a file \
         name",
        |dir, parts| {
            split(dir, &parts);
            index(dir, json!({"embed.weight": "../model.safetensors"}));
            dir.to_owned()
        },
    );
    check(
        "DIR/model.safetensors.index.json: not an index of shards ({\"weight_map\": {tensor: file}}): missing field \
         `weight_map` at line 1 column 2",
        |dir, parts| {
            split(dir, &parts);
            write(&dir.join("model.safetensors.index.json"), b"{}");
            dir.to_owned()
        },
    );
    check(
        "tensor `embed.weight` occurs in two shards, DIR/model-00001-of-00002.safetensors and \
         DIR/model-00002-of-00002.safetensors",
        |dir, mut parts| {
            split(dir, &parts);
            parts.tensors.retain(|name, _| name.starts_with("layers.") || name == "embed.weight");
            write(&dir.join("model-00001-of-00002.safetensors"), &safetensors(&parts.tensors));
            dir.to_owned()
        },
    );
}

#[test]
fn configs() {
    check_config(
        "compress_ratios",
        Value::Null,
        "DIR/config.json: config lacks `compress_ratios`: a DeepSeek-V4 configuration (model_type is \"deepseek_v4\") lists \
         the compression ratio of every layer (0, 4, 128, ...), and no default fits every model. Take config.json from the \
         original checkpoint",
    );
    let cases = [
        ("hidden_size", json!(1e12), "`hidden_size` is 1000000000000.0, must be a whole number from 1 to 131072"),
        (
            "hidden_size",
            json!(1_000_000_000_000u64),
            "`hidden_size` is 1000000000000, must be a whole number from 1 to 131072",
        ),
        ("num_attention_heads", json!(0), "`num_attention_heads` is 0, must be a whole number from 1 to 1024"),
        ("vocab_size", json!(-1), "`vocab_size` is -1, must be a whole number from 1 to 4194304"),
        ("num_hidden_layers", json!("4"), "`num_hidden_layers` is \"4\", must be a whole number from 1 to 1024"),
        ("q_lora_rank", json!([64]), "`q_lora_rank` is a list, must be a whole number from 1 to 131072"),
        ("hc_mult", json!(1000), "`hc_mult` is 1000, must be a whole number from 1 to 8"),
        ("rms_norm_eps", json!(0), "`rms_norm_eps` is 0, must be a number above 0 and at most 0.1"),
        ("rope_theta", json!(-10000.0), "`rope_theta` is -10000.0, must be a number above 1 and at most 1000000000000"),
        ("num_key_value_heads", json!(8), "`num_key_value_heads` is 8, must be 1"),
        ("eos_token_id", json!([1, 384]), "`eos_token_id` is 384, must be a token id below `vocab_size` (384)"),
        (
            "scoring_func",
            json!("tanh"),
            "`scoring_func` is \"tanh\", must be \"sqrtsoftplus\", \"sigmoid\" or \"softmax\"",
        ),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 4}),
            "`rope_scaling.type` is \"linear\", must be \"yarn\" (or `rope_scaling` null)",
        ),
        (
            "compress_ratios",
            json!([0, 4, 1, 4]),
            "`compress_ratios[2]` is 1, must be 0 (window only), 4 (CSA) or another from 2 to 65536 (HCA)",
        ),
        (
            "compress_ratios",
            json!([0, 4]),
            "`compress_ratios` has 2 entries, must have one for each of the 4 layers of `num_hidden_layers` (and may have \
             more for the drafter)",
        ),
        ("o_groups", json!(3), "`num_attention_heads` x `head_dim` is 512, must be divisible by `o_groups` (3)"),
        (
            "qk_rope_head_dim",
            json!(130),
            "`qk_rope_head_dim` is 130, must be even and at most `head_dim` (128) and `index_head_dim` (128)",
        ),
        ("n_routed_experts", json!(100_000), "`n_routed_experts` is 100000, must be a whole number from 1 to 4096"),
        ("num_experts_per_tok", json!(9), "`num_experts_per_tok` is 9, must be at most `n_routed_experts` (8)"),
    ];
    for (key, value, want) in cases {
        check_config(key, value, &format!("DIR/config.json: config: {want}"));
    }
    check_config(
        "hc_eps",
        Value::Null,
        "DIR/config.json: config lacks `hc_eps`: it decides shapes or numbers and has no safe default",
    );
    let text = |text: &'static str| {
        move |dir: &Path, parts: Parts| {
            parts.write(dir);
            write(&dir.join("config.json"), text.as_bytes());
            dir.to_owned()
        }
    };
    check(
        "DIR/config.json: config is not valid JSON: EOF while parsing a value at line 1 column 16",
        text("{\"hidden_size\": "),
    );
    check("DIR/config.json: config must be a JSON object, got a list", text("[1]"));
}

#[test]
fn weights() {
    check_parts("DIR: 1 tensor is missing: attention `layers.1.attn.wq_a.weight`", |parts| {
        parts.tensors.remove("layers.1.attn.wq_a.weight");
    });
    check_parts("DIR: 1 tensor is missing: attention `layers.1.attn.wq_a.scale`", |parts| {
        parts.tensors.remove("layers.1.attn.wq_a.scale");
    });
    check_parts(
        "DIR: 26 tensors are missing: embed `embed.weight`, router `layers.0.ffn.gate.tid2eid`, 24 of routed experts \
         (first `layers.2.ffn.experts.0.w1.weight`)",
        |parts| {
            parts.tensors.retain(|name, _| !name.starts_with("layers.2.ffn.experts.") && name != "embed.weight");
            parts.tensors.remove("layers.0.ffn.gate.tid2eid");
        },
    );
    check_parts(
        "DIR/model.safetensors: tensor `layers.1.attn.wq_a.weight` has dtype I16, must be F32, BF16, F16, F8_E4M3 (fp8), I8 \
         (fp4) or U32 (an MLX format)",
        |parts| {
            let raw = parts.tensor("layers.1.attn.wq_a.weight");
            (raw.dtype, raw.shape) = (Dtype::I16, vec![64, 64]);
        },
    );
    check_parts("DIR/model.safetensors: tensor `norm.weight` has dtype I16, must be F32, BF16 or F16", |parts| {
        parts.tensor("norm.weight").dtype = Dtype::I16;
    });
    check_parts(
        "DIR/model.safetensors: tensor `layers.0.ffn.experts.3.w2.scale` has dtype I8, must be F8_E8M0",
        |parts| parts.tensor("layers.0.ffn.experts.3.w2.scale").dtype = Dtype::I8,
    );
    check_parts(
        "DIR/model.safetensors: tensor `layers.1.attn.wq_a.weight` (F8_E4M3) has shape [128, 64], must be [64, 128]",
        |parts| parts.tensor("layers.1.attn.wq_a.weight").shape = vec![128, 64],
    );
    check_parts("DIR/model.safetensors: tensor `norm.weight` (BF16) has shape [2, 64], must be [128]", |parts| {
        parts.tensor("norm.weight").shape = vec![2, 64];
    });
    check_parts(
        "DIR/model.safetensors: tensor `layers.0.attn.wq_b.scale` (F8_E8M0) has shape [2, 2], must be [4, 1], one scale for \
         each tile of 128 x 128",
        |parts| parts.tensor("layers.0.attn.wq_b.scale").shape = vec![2, 2],
    );
    check_parts(
        "DIR/model.safetensors: tensor `layers.0.ffn.experts.3.w1.scale` has the scale NaN at [2, 1]; scales must be \
         finite, the file is damaged",
        |parts| parts.tensor("layers.0.ffn.experts.3.w1.scale").bytes[9] = 255,
    );
    check_parts(
        "DIR/model.safetensors: tensor `layers.0.attn.wkv.scale` has the scale inf at [0, 0]; scales must be finite, the \
         file is damaged",
        |parts| {
            let raw = parts.tensor("layers.0.attn.wkv.scale");
            (raw.dtype, raw.bytes) = (Dtype::F32, f32::INFINITY.to_le_bytes().to_vec());
        },
    );
    check_parts(
        "DIR/model.safetensors: tensor `layers.1.ffn.gate.tid2eid` maps token 2 to expert 8; there are 8 experts",
        |parts| parts.tensor("layers.1.ffn.gate.tid2eid").bytes[7 * 8] = 8,
    );
    check_parts(
        "DIR/model.safetensors: tensor `layers.1.ffn.gate.tid2eid` maps token 0 to expert -1; there are 8 experts",
        |parts| parts.tensor("layers.1.ffn.gate.tid2eid").bytes[..8].fill(255),
    );
    check_parts(
        "DIR: no tensor is named as in a DeepSeek-V4 checkpoint (`layers.0...` or `model.layers.0...`); found \
         `transformer.wte`",
        |parts| {
            let embed = parts.tensor("embed.weight").clone();
            parts.tensors = [("transformer.wte".to_owned(), embed)].into();
        },
    );
    check_parts(
        "DIR: tensors of two layouts are mixed: some start with `layers.`, others with `model.layers.`; remove the files \
         that do not belong",
        |parts| {
            let embed = parts.tensor("embed.weight").clone();
            parts.tensors.insert("model.embed_tokens.weight".to_owned(), embed);
        },
    );
}

#[test]
fn mlx_weights() {
    let check_mlx = |want: &str, damage: &dyn Fn(&mut Parts)| {
        let mut parts = Parts::read(&oracle("tiny-mlx"));
        damage(&mut parts);
        let error = parts.open().map(drop).expect_err("the checkpoint is malformed");
        assert_eq!(error.to_string(), want);
    };
    check_mlx(
        "model.safetensors: tensor `model.layers.0.attn.wq_a.weight` cannot be read: a row has 28 words of 32 bits, which is \
         not 2, 3, 4, 5, 6 or 8 bits for each of the 128 columns",
        &|parts| {
            let raw = parts.tensor("model.layers.0.attn.wq_a.weight");
            raw.shape = vec![64, 28];
            raw.bytes.truncate(64 * 28 * 4);
        },
    );
    check_mlx(
        "model.safetensors: tensor `model.layers.0.attn.wo_a.weight` (U32) has shape [4, 16, 64], must be [2, 32, words] or \
         [64, words]",
        &|parts| parts.tensor("model.layers.0.attn.wo_a.weight").shape = vec![4, 16, 64],
    );
    check_mlx(
        "model.safetensors: tensor `model.layers.3.ffn.switch_mlp.up_proj.weight` (U32) has shape [4, 64, 16], must be [8, \
         32, words]",
        &|parts| parts.tensor("model.layers.3.ffn.switch_mlp.up_proj.weight").shape = vec![4, 64, 16],
    );
    check_mlx(
        "model.safetensors: tensor `model.layers.3.ffn.switch_mlp.up_proj.scales` has the scale NaN at [5, 0, 0]; scales \
         must be finite, the file is damaged",
        &|parts| parts.tensor("model.layers.3.ffn.switch_mlp.up_proj.scales").bytes[5 * 32 * 4] = 255,
    );
    check_mlx(
        "model.safetensors: tensor `model.layers.0.attn.wq_a.weight` cannot be read: 8 bits in groups of 16 with U8 scales \
         is none of mxfp4 and mxfp8 (U8 scales, groups of 32) and affine (groups of 32, 64 or 128)",
        &|parts| {
            let raw = parts.tensor("model.layers.0.attn.wq_a.scales");
            raw.shape = vec![64, 8];
            raw.bytes = [raw.bytes.clone(), raw.bytes.clone()].concat();
        },
    );
}

/// Tensors decide what they hold; a map that says otherwise is worth a note.
#[test]
fn a_quantization_map_of_another_model_does_no_harm() {
    let open = |said: Value| {
        let mut parts = Parts::read(&oracle("tiny-mlx"));
        parts.config["quantization"]["model.layers.0.attn.wq_a"] = said;
        parts.open().expect("the tensors are sound").1
    };
    let (_, sound) = Parts::read(&oracle("tiny-mlx")).open().expect("opens");
    assert_eq!(sound.notes(), [] as [String; 0]);
    let key = WeightKey::layer(0, Role::WqA);
    for (said, text) in [
        (json!({"group_size": 32, "bits": 4, "mode": "mxfp4"}), "mode mxfp4, 4 bits, group 32"),
        (json!(false), "no quantisation"),
    ] {
        let weights = open(said);
        let want = format!(
            "`model.layers.0.attn.wq_a` holds mode mxfp8, 8 bits, group 32, though config.json says {text}; the tensors decide"
        );
        assert_eq!(weights.notes(), [want]);
        let format = |weights: &WeightTable| weights.tensor(key).expect("there").format();
        assert_eq!(format(&weights), format(&sound));
    }
}
