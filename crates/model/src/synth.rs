//! Random-weight checkpoints in the official layout, for speed, memory and parity work.
//!
//! The weights are noise of sensible size: activations stay finite and experts are spread, but the model says nothing.
//! Names and shapes come from [`crate::checkpoint::layout`], so what is written here is what is read there.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use troika_base::storage::{FP8_TILE, MX_GROUP};
use troika_graph::{Role, Scope, WeightKey};

use crate::checkpoint::layout::{self, Form, Layout};
use crate::checkpoint::safetensors::Dtype;
use crate::config::{ConfigError, ModelConfig};

/// Which model to make up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// Every kind of layer at a thousandth of the size; for tests, 5 MB.
    Tiny,
    /// 374 M parameters in six layers, three of them with hash routing; 0.3 GB.
    Mini,
    /// Two layers at the real sizes of V4-Flash; 7.3 GB.
    True2,
    /// Four layers at the real sizes of V4-Flash, but for 32 experts; 2.5 GB.
    FlashSlice,
}

impl Preset {
    /// Those shown to people.
    pub const ALL: [Self; 3] = [Self::Mini, Self::True2, Self::FlashSlice];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Mini => "mini",
            Self::True2 => "true2",
            Self::FlashSlice => "flash-slice",
        }
    }

    fn sizes(self) -> Sizes {
        let flash = Sizes {
            hidden: 4096,
            heads: 64,
            q_lora: 1024,
            o_groups: 8,
            o_lora: 1024,
            experts: 256,
            experts_per_tok: 6,
            intermediate: 2048,
            index_heads: 64,
            ratios: &[4, 128],
            hash_layers: 0,
            vocab: 8192,
        };
        match self {
            Self::Tiny => Sizes {
                hidden: 256,
                heads: 4,
                q_lora: 64,
                o_groups: 2,
                o_lora: 64,
                experts: 8,
                experts_per_tok: 2,
                intermediate: 96,
                index_heads: 4,
                ratios: &[0, 4, 128],
                hash_layers: 1,
                vocab: 512,
            },
            Self::Mini => Sizes {
                hidden: 1024,
                heads: 16,
                q_lora: 256,
                o_groups: 4,
                o_lora: 256,
                experts: 32,
                intermediate: 512,
                index_heads: 16,
                ratios: &[0, 0, 4, 128, 4, 128],
                hash_layers: 3,
                ..flash
            },
            Self::True2 => flash,
            Self::FlashSlice => Sizes { experts: 32, ratios: &[0, 4, 128, 4], ..flash },
        }
    }

    /// The configuration of the model that is made up.
    ///
    /// # Errors
    ///
    /// If it is wrong.
    pub fn config(self) -> Result<ModelConfig, ConfigError> {
        ModelConfig::from_json(&self.config_json().to_string())
    }

    fn config_json(self) -> Value {
        let c = self.sizes();
        let mut config: Value = serde_json::from_str(COMMON_CONFIG).expect("our own text");
        let sizes = json!({
            "hidden_size": c.hidden,
            "num_attention_heads": c.heads,
            "q_lora_rank": c.q_lora,
            "o_groups": c.o_groups,
            "o_lora_rank": c.o_lora,
            "n_routed_experts": c.experts,
            "num_experts_per_tok": c.experts_per_tok,
            "moe_intermediate_size": c.intermediate,
            "index_n_heads": c.index_heads,
            "num_hidden_layers": c.ratios.len(),
            // One entry more than layers, as published: it belongs to a drafter.
            "compress_ratios": ([c.ratios, &[0]].concat()),
            "num_hash_layers": c.hash_layers,
            "vocab_size": c.vocab,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
        });
        if let (Value::Object(config), Value::Object(sizes)) = (&mut config, sizes) {
            config.extend(sizes);
        }
        config
    }
}

/// What every preset has in common with V4-Flash.
const COMMON_CONFIG: &str = r#"{
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": false,
    "attention_dropout": 0.0,
    "compress_rope_theta": 160000,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "norm_topk_prob": true,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128]
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn"
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": false,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": true
}"#;

impl std::fmt::Display for Preset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Preset {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [Self::Tiny, Self::Mini, Self::True2, Self::FlashSlice];
        let found = known.into_iter().find(|preset| preset.name() == text);
        found.ok_or_else(|| format!("unknown preset `{text}`: expected `mini`, `true2` or `flash-slice`"))
    }
}

/// What presets differ in. Heads are 512 wide and index heads 128 in all of them.
struct Sizes {
    hidden: usize,
    heads: usize,
    q_lora: usize,
    o_groups: usize,
    o_lora: usize,
    experts: usize,
    experts_per_tok: usize,
    intermediate: usize,
    index_heads: usize,
    ratios: &'static [usize],
    hash_layers: usize,
    vocab: usize,
}

/// Why no checkpoint was made. Nothing half-done is left that looks like one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    #[error("{} exists and is not an empty directory; give a new name or remove it", path.display())]
    NotEmpty { path: PathBuf },
    #[error(
        "the disk is full: {} needs {} in all, {} were written (and removed again)",
        path.display(),
        troika_base::units::human_bytes(*need_bytes),
        troika_base::units::human_bytes(*written_bytes)
    )]
    DiskFull { path: PathBuf, need_bytes: u64, written_bytes: u64 },
    #[error("cannot write {}: {reason}", path.display())]
    Io { path: PathBuf, reason: io::Error },
    #[error("the preset has a wrong configuration: {0}")]
    Config(ConfigError),
}

/// What [`synth`] wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synthesized {
    pub num_tensors: usize,
    /// Bytes of the safetensors file.
    pub num_bytes: u64,
}

/// Writes a checkpoint of random weights to `out_dir`, which must not exist or be empty: `model.safetensors`,
/// `config.json`, `tokenizer.json` (bytes are tokens) and `tokenizer_config.json`. The same seed gives the same bytes.
///
/// The weights go to a file of another name first, and `config.json` is written last, so that an interrupted run leaves
/// no checkpoint that looks whole. Needs a few megabytes of memory. `progress` is told bytes done and bytes in all.
pub fn synth(
    preset: Preset,
    out_dir: &Path,
    seed: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Synthesized, SynthError> {
    let (config_json, config) = (preset.config_json(), preset.config().map_err(SynthError::Config)?);
    let made_dir = prepare(out_dir)?;
    let create = |path: &Path| -> io::Result<Box<dyn Write>> { Ok(Box::new(File::create_new(path)?)) };
    let written = write_all(out_dir, &config, &config_json, seed, &create, progress);
    if written.is_err() && made_dir {
        // Only if it is empty; and if that fails, the first error is the one to tell.
        let _ = std::fs::remove_dir(out_dir);
    }
    written
}

/// Makes `out_dir`, or finds it empty. True if it was made.
fn prepare(out_dir: &Path) -> Result<bool, SynthError> {
    let io = |reason| SynthError::Io { path: out_dir.to_owned(), reason };
    match std::fs::read_dir(out_dir) {
        Ok(mut entries) => match entries.next() {
            Some(_) => Err(SynthError::NotEmpty { path: out_dir.to_owned() }),
            None => Ok(false),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            std::fs::create_dir_all(out_dir).map_err(io).map(|()| true)
        }
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            Err(SynthError::NotEmpty { path: out_dir.to_owned() })
        }
        Err(error) => Err(io(error)),
    }
}

fn write_all(
    out_dir: &Path,
    config: &ModelConfig,
    config_json: &Value,
    seed: u64,
    create: &dyn Fn(&Path) -> io::Result<Box<dyn Write>>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Synthesized, SynthError> {
    let tensors = plan(config);
    let header = header(&tensors);
    let data_bytes: u64 = tensors.iter().map(|tensor| tensor.num_bytes).sum();
    let num_bytes = header.len() as u64 + data_bytes;
    let mut done_bytes = 0;
    let mut weights = |path: &Path| -> io::Result<()> {
        let mut file = create(path)?;
        file.write_all(&header)?;
        done_bytes = header.len() as u64;
        write_data(&tensors, seed, &mut |part| {
            file.write_all(part)?;
            done_bytes += part.len() as u64;
            progress(done_bytes, num_bytes);
            Ok(())
        })?;
        file.flush()?;
        // On disk before it gets its name.
        File::open(path)?.sync_all()
    };
    let text = |text: Value| move |path: &Path| std::fs::write(path, format!("{text:#}\n"));

    let result = finish(out_dir, "model.safetensors", &mut weights)
        .and_then(|()| finish(out_dir, "tokenizer_config.json", &mut text(tokenizer_config())))
        .and_then(|()| finish(out_dir, "tokenizer.json", &mut text(tokenizer(config.vocab_size))))
        // Last, for a directory without it is no checkpoint.
        .and_then(|()| finish(out_dir, "config.json", &mut text(config_json.clone())));
    match result {
        Ok(()) => Ok(Synthesized { num_tensors: tensors.len(), num_bytes }),
        Err((path, reason)) if is_full(&reason) => {
            Err(SynthError::DiskFull { path, need_bytes: num_bytes, written_bytes: done_bytes })
        }
        Err((path, reason)) => Err(SynthError::Io { path, reason }),
    }
}

fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), FileTooLarge | QuotaExceeded | StorageFull)
}

/// Writes file `name` under another name and renames it when it is whole. On failure, no part of it stays.
fn finish(dir: &Path, name: &str, write: &mut dyn FnMut(&Path) -> io::Result<()>) -> Result<(), (PathBuf, io::Error)> {
    let partial = dir.join(format!("{name}.partial"));
    let path = dir.join(name);
    write(&partial).and_then(|()| std::fs::rename(&partial, &path)).map_err(|error| {
        // If this fails, too, the first error is the one to tell.
        let _ = std::fs::remove_file(&partial);
        (path, error)
    })
}

/// Makes the bytes of every tensor, in the order of the file and a part at a time.
fn write_data(tensors: &[Planned], seed: u64, sink: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    for (i, tensor) in (0..).zip(tensors) {
        // Each tensor has its own stream, so that one can be checked without making those before it.
        let mut noise = Noise::new(seed, i);
        let mut left = tensor.num_bytes;
        while left > 0 {
            let part = &mut chunk[..left.min(CHUNK_BYTES as u64) as usize];
            tensor.fill.fill(&mut noise, part);
            sink(part)?;
            left -= part.len() as u64;
        }
    }
    Ok(())
}

/// Bytes made at a time. A multiple of every number of bytes that a [`Fill`] makes at once.
const CHUNK_BYTES: usize = 3 << 20;

/// A tensor to be written.
struct Planned {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    num_bytes: u64,
    fill: Fill,
}

/// Every tensor of a checkpoint, in the order of the file.
fn plan(config: &ModelConfig) -> Vec<Planned> {
    let mut keys: Vec<WeightKey> = layout::MODEL_ROLES.iter().map(|&role| WeightKey::model(role)).collect();
    for layer in 0..config.num_hidden_layers as u16 {
        let is_hash = usize::from(layer) < config.num_hash_layers;
        keys.extend(layout::layer_roles(config, layer, is_hash).into_iter().map(|role| WeightKey::layer(layer, role)));
    }
    let mut tensors = Vec::new();
    for key in keys {
        let place = layout::place(Layout::Official, config, key);
        let mut add = |name: String, dtype: Dtype, shape: &[usize], fill: Fill| {
            let elements: usize = shape.iter().product();
            let num_bytes = elements as u64 * dtype.bits() / 8;
            tensors.push(Planned { name, dtype, shape: shape.to_owned(), num_bytes, fill });
        };
        let scale_name = || format!("{}.scale", place.module());
        match (layout::form(config, key), storage(key)) {
            (Form::Matrix(rows, cols), Storage::Fp4) => {
                add(scale_name(), Dtype::F8_E8M0, &[rows, cols / MX_GROUP], Fill::Byte(127 - 7));
                add(place.tensor, Dtype::I8, &[rows, cols / 2], Fill::Bits);
            }
            (Form::Matrix(rows, cols), Storage::Fp8) => {
                let tiles = [rows.div_ceil(FP8_TILE), cols.div_ceil(FP8_TILE)];
                add(scale_name(), Dtype::F8_E8M0, &tiles, Fill::Byte(127 - 6));
                add(place.tensor, Dtype::F8_E4M3, &[rows, cols], Fill::E4m3);
            }
            (Form::Matrix(rows, cols), Storage::Plain { std }) => {
                add(place.tensor, Dtype::BF16, &[rows, cols], Fill::Bf16 { std });
            }
            (Form::Vector(n), Storage::Ones { dtype }) => {
                let one = if dtype == Dtype::BF16 { Fill::Bf16One } else { Fill::F32One };
                add(place.tensor, dtype, &[n], one);
            }
            (Form::Vector(n), Storage::Plain { std }) => add(place.tensor, Dtype::F32, &[n], Fill::F32 { std }),
            (Form::Plain(rows, cols), _) => add(place.tensor, Dtype::F32, &[rows, cols], Fill::F32 { std: 0.02 }),
            (Form::Table(rows, cols), _) => {
                assert!(CHUNK_BYTES.is_multiple_of(8 * cols), "rows of a table must not be cut");
                let experts = Fill::Experts { num_experts: config.n_routed_experts, per_token: cols };
                add(place.tensor, Dtype::I64, &[rows, cols], experts);
            }
            (form, _) => unreachable!("{key} is {form:?}"),
        }
    }
    tensors
}

/// How the official layout stores a weight.
enum Storage {
    Fp4,
    Fp8,
    Plain { std: f32 },
    Ones { dtype: Dtype },
}

fn storage(key: WeightKey) -> Storage {
    debug_assert!(!matches!(key.scope, Scope::Stage(_)), "no preset has a drafter");
    match key.role {
        Role::ExpertW1(_) | Role::ExpertW2(_) | Role::ExpertW3(_) => Storage::Fp4,
        Role::WqA | Role::WqB | Role::Wkv | Role::WoA | Role::WoB | Role::IndexerWqB => Storage::Fp8,
        Role::SharedW1 | Role::SharedW2 | Role::SharedW3 => Storage::Fp8,
        Role::Norm | Role::AttnNorm | Role::FfnNorm | Role::QNorm | Role::KvNorm => {
            Storage::Ones { dtype: Dtype::BF16 }
        }
        Role::CompressorNorm | Role::IndexerCompressorNorm => Storage::Ones { dtype: Dtype::BF16 },
        Role::HcHeadScale | Role::HcAttnScale | Role::HcFfnScale => Storage::Ones { dtype: Dtype::F32 },
        Role::Embed => Storage::Plain { std: 1.0 },
        Role::GateBias => Storage::Plain { std: 0.001 },
        _ => Storage::Plain { std: 0.02 },
    }
}

/// The start of the file: length and header.
fn header(tensors: &[Planned]) -> Vec<u8> {
    // Not through a JSON map, whose order depends on a feature that other crates may turn on.
    let mut text = br#"{"__metadata__":{"format":"pt"}"#.to_vec();
    let mut at = 0;
    for Planned { name, dtype, shape, num_bytes, .. } in tensors {
        let end = at + num_bytes;
        let entry = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [at, end]});
        text.extend_from_slice(format!(",{}:{entry}", json!(name)).as_bytes());
        at = end;
    }
    text.push(b'}');
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// What the bytes of a tensor are.
#[derive(Clone, Copy)]
enum Fill {
    /// The same byte throughout: e8m0 scales.
    Byte(u8),
    /// Any bits: two e2m1 codes a byte, all of which are numbers.
    Bits,
    /// e4m3 of magnitude 0.25 to 3.75, either sign.
    E4m3,
    Bf16One,
    F32One,
    /// About normal, mean 0.
    Bf16 {
        std: f32,
    },
    F32 {
        std: f32,
    },
    /// Rows of distinct experts.
    Experts {
        num_experts: usize,
        per_token: usize,
    },
}

impl Fill {
    /// Fills `out` with the next bytes of a tensor.
    fn fill(self, noise: &mut Noise, out: &mut [u8]) {
        match self {
            Self::Byte(byte) => out.fill(byte),
            Self::Bits => each(out, |chunk: &mut [u8; 8]| *chunk = noise.next().to_le_bytes()),
            Self::E4m3 => each(out, |chunk: &mut [u8; 8]| {
                // Sign and mantissa as they fall; the exponent field is 5 plus two random bits (bias 7).
                let bits = noise.next();
                let exponent = ((bits >> 3) & 0x0303_0303_0303_0303) + 0x0505_0505_0505_0505;
                *chunk = (bits & 0x8787_8787_8787_8787 | exponent << 3).to_le_bytes();
            }),
            Self::Bf16One => each(out, |chunk: &mut [u8; 2]| *chunk = BF16_ONE.to_le_bytes()),
            Self::F32One => each(out, |chunk: &mut [u8; 4]| *chunk = 1f32.to_le_bytes()),
            Self::Bf16 { std } => each(out, |chunk: &mut [u8; 2]| {
                // Cut, not rounded: as good for noise.
                *chunk = ((noise.normal(std).to_bits() >> 16) as u16).to_le_bytes();
            }),
            Self::F32 { std } => each(out, |chunk: &mut [u8; 4]| *chunk = noise.normal(std).to_le_bytes()),
            Self::Experts { num_experts, per_token } => {
                for row in out.chunks_mut(8 * per_token) {
                    let mut experts: Vec<u64> = (0..num_experts as u64).collect();
                    for (i, slot) in row.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                        let other = i + noise.below(num_experts - i);
                        experts.swap(i, other);
                        *slot = experts[i].to_le_bytes();
                    }
                }
            }
        }
    }
}

const BF16_ONE: u16 = 0x3f80;

/// Calls `make` for every `N` bytes of `out`; a last shorter part gets the first of what is made.
fn each<const N: usize>(out: &mut [u8], mut make: impl FnMut(&mut [u8; N])) {
    let (chunks, rest) = out.as_chunks_mut();
    chunks.iter_mut().for_each(&mut make);
    if !rest.is_empty() {
        let mut last = [0; N];
        make(&mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014): a few operations for 8 bytes, and any two streams are far apart.
struct Noise(u64);

impl Noise {
    fn new(seed: u64, stream: u64) -> Self {
        let mut mix = Self(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        Self(mix.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// About uniform below `n`.
    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// About normal: the sum of four uniform numbers, scaled. Never beyond 3.47 standard deviations.
    fn normal(&mut self, std: f32) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
        // Each has the variance 2^32 / 12.
        (sum as f32 - 131_070.0) * (std * (3f32.sqrt() / 65_536.0))
    }
}

const BOS_ID: usize = 256;
const EOS_ID: usize = 257;

/// Tokens after the 256 bytes.
const SPECIAL: [&str; 7] = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
];

/// A byte-level tokenizer: token `b` is the byte `b`, then come the special tokens, then words that no text has.
fn tokenizer(vocab_size: usize) -> Value {
    let mut vocab = Map::new();
    let mut spare = 256;
    for byte in 0..=255u8 {
        // The printable stand-ins of byte-level BPE; the other bytes take characters from 256 on.
        let stands_for_itself = matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let code = if stands_for_itself { u32::from(byte) } else { spare };
        spare += u32::from(!stands_for_itself);
        let stand_in = char::from_u32(code).expect("below the surrogates");
        vocab.insert(stand_in.to_string(), byte.into());
    }
    let mut added = Vec::new();
    for special in SPECIAL {
        added.push(json!({
            "id": vocab.len(), "content": special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
        vocab.insert(special.to_owned(), vocab.len().into());
    }
    // Some readers refuse a tokenizer without merges: one, of letters that nobody writes side by side.
    vocab.insert("QX".to_owned(), vocab.len().into());
    while vocab.len() < vocab_size {
        vocab.insert(format!("w{}", vocab.len()), vocab.len().into());
    }
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [["Q", "X"]],
        },
    })
}

fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[1],
        "model_max_length": 1_048_576,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for `room` bytes.
    struct Disk {
        file: File,
        room: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.room == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let written = self.file.write(&bytes[..bytes.len().min(self.room)])?;
            self.room -= written;
            Ok(written)
        }

        fn flush(&mut self) -> io::Result<()> {
            self.file.flush()
        }
    }

    #[test]
    fn a_full_disk_leaves_nothing() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let config_json = Preset::Tiny.config_json();
        let config = ModelConfig::from_json(&config_json.to_string()).expect("sound");
        let create = |path: &Path| -> io::Result<Box<dyn Write>> {
            Ok(Box::new(Disk { file: File::create_new(path)?, room: 1_000_000 }))
        };
        let written = write_all(dir.path(), &config, &config_json, 1, &create, &mut |_, _| ());
        let message = written.expect_err("full").to_string();
        assert!(message.starts_with("the disk is full: ") && message.contains("model.safetensors needs"), "{message}");
        assert_eq!(std::fs::read_dir(dir.path()).expect("there").count(), 0);
    }

    #[test]
    fn chunks_do_not_show() {
        let per_token = 6;
        let fills = [
            Fill::Bits,
            Fill::E4m3,
            Fill::Bf16 { std: 1.0 },
            Fill::F32 { std: 1.0 },
            Fill::Experts { num_experts: 32, per_token },
        ];
        for fill in fills {
            assert!(CHUNK_BYTES.is_multiple_of(8 * per_token));
            let mut whole = vec![0; 48 * 40];
            fill.fill(&mut Noise::new(1, 2), &mut whole);
            let mut parts = vec![0; whole.len()];
            let mut noise = Noise::new(1, 2);
            parts.chunks_mut(48 * 8).for_each(|part| fill.fill(&mut noise, part));
            assert!(whole == parts);
        }
    }
}
