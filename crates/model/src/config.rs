//! `config.json`, checked: after parsing, every number is in range and every shape derived from it fits (model spec,
//! section 2).
//!
//! Must not know tensors: what a checkpoint really holds is decided in [`crate::weights`].

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::ops::Bound::{self, Excluded, Included, Unbounded};
use std::ops::RangeBounds;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

/// Rotary scaling of the layers with compression (YaRN, model spec 6.3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    pub factor: f64,
    pub original_max_position_embeddings: usize,
    pub beta_fast: f64,
    pub beta_slow: f64,
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoringFunc {
    /// `sqrt(log(1 + e^z))`, the only one V4 uses.
    SqrtSoftplus,
    Sigmoid,
    Softmax,
}

/// What a layer attends to besides its window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Window only (ratio 0).
    Swa,
    /// Window and the selected rows of 4 tokens (ratio 4).
    Csa,
    /// Window and every finished row of `ratio` tokens.
    Hca { ratio: usize },
}

/// The drafter of the 0731 release (DSpark, model spec 10.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DsparkConfig {
    pub block_size: usize,
    pub markov_rank: usize,
    pub noise_token_id: u32,
    /// Trunk layers whose outputs feed the drafter, 0-based. One drafter stage each in 0731, but the stage count is
    /// taken from the tensors.
    pub target_layer_ids: Vec<u16>,
}

/// A DeepSeek-V4 configuration. Field names are the checkpoint's.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub q_lora_rank: usize,
    pub o_groups: usize,
    pub o_lora_rank: usize,
    pub sliding_window: usize,
    /// One entry for each trunk layer, then (if present) one for each drafter stage.
    pub compress_ratios: Vec<usize>,
    pub rope_theta: f64,
    pub compress_rope_theta: f64,
    pub rope_scaling: Option<RopeScaling>,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    pub hc_mult: usize,
    pub hc_sinkhorn_iters: usize,
    pub hc_eps: f64,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub moe_intermediate_size: usize,
    /// Leading layers that choose experts by token id. What decides is whether the layer has the table.
    pub num_hash_layers: usize,
    pub scoring_func: ScoringFunc,
    pub norm_topk_prob: bool,
    pub routed_scaling_factor: f64,
    /// Clamp of gate and up, `None` = no clamp.
    pub swiglu_limit: Option<f64>,
    pub rms_norm_eps: f64,
    pub max_position_embeddings: usize,
    pub bos_token_id: Option<u32>,
    pub eos_token_id: Option<u32>,
    pub dspark: Option<DsparkConfig>,
}

impl ModelConfig {
    /// Kind of trunk layer `layer`.
    pub fn layer_kind(&self, layer: usize) -> LayerKind {
        match self.compress_ratios[layer] {
            0 => LayerKind::Swa,
            4 => LayerKind::Csa,
            ratio => LayerKind::Hca { ratio },
        }
    }
}

impl ModelConfig {
    /// Reads and checks the text of a `config.json`. Unknown keys are ignored.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Ok(ConfigFile::from_json(text)?.model)
    }

    /// Reads and checks the file at `path`.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Ok(ConfigFile::read(path)?.model)
    }
}

/// Everything Troika takes from a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigFile {
    pub model: ModelConfig,
    /// Every token that ends a text, the first of them is [`ModelConfig::eos_token_id`].
    pub eos_token_ids: Vec<u32>,
    /// What an MLX conversion says about its modules. Tensors decide; this is only compared with them.
    pub quantization: Option<Quantization>,
    /// Why the `dspark_*` keys cannot be used, if they are there but wrong. The trunk needs none of them, so
    /// [`ModelConfig::dspark`] is then `None` and nothing else is refused.
    pub drafter_fault: Option<String>,
}

/// The `quantization` map of an MLX conversion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// For quantised modules without an entry of their own.
    pub default: QuantSpec,
    /// By module path; `None` = said to be unquantised.
    pub modules: BTreeMap<String, Option<QuantSpec>>,
}

/// What a `quantization` map says about a module. A part left out says nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuantSpec {
    /// `affine`, `mxfp4`, `mxfp8`, ...
    pub mode: Option<String>,
    pub bits: Option<u64>,
    pub group_size: Option<u64>,
}

impl fmt::Display for QuantSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), |value| value.to_string());
        let mode = self.mode.as_deref().unwrap_or("?");
        write!(f, "mode {mode}, {} bits, group {}", number(self.bits), number(self.group_size))
    }
}

/// Why a `config.json` was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {reason}", path.display())]
    Io { path: PathBuf, reason: std::io::Error },
    /// More text than any real configuration has.
    #[error("config has more than {max} bytes; a real one has a few thousand")]
    TooLong { max: u64 },
    /// Not JSON, or not UTF-8.
    #[error("config is not valid JSON: {reason}")]
    Json { reason: String },
    /// Valid JSON, but not `{...}`.
    #[error("config must be a JSON object, got {got}")]
    NotAnObject { got: &'static str },
    /// A key that decides shapes or numbers is absent.
    #[error("config lacks `{key}`: {help}")]
    Missing { key: String, help: String },
    /// A value of the wrong type or outside its range.
    #[error("config: `{key}` is {value}, must be {want}")]
    Value { key: String, value: String, want: String },
    /// Two values that cannot both be right.
    #[error("config: {what}")]
    Inconsistent { what: String },
}

/// Longest configuration accepted. Per-module maps of MLX conversions stay far below.
const MAX_CONFIG_BYTES: u64 = 32 << 20;

// Upper limits. They are several times what any published model has, so that a damaged number is caught here, and small
// enough that products of two or three of them stay far below 2^64.
const MAX_VOCAB: usize = 1 << 22;
const MAX_WIDTH: usize = 1 << 17;
const MAX_LAYERS: usize = 1 << 10;
const MAX_HEADS: usize = 1 << 10;
const MAX_HEAD_DIM: usize = 1 << 13;
const MAX_EXPERTS: usize = 1 << 12;
const MAX_EXPERTS_IN_ALL: usize = 1 << 18;
const MAX_RATIO: usize = 1 << 16;
const MAX_WINDOW: usize = 1 << 20;
const MAX_POSITIONS: usize = 1 << 30;
/// As many as the kernels can mix.
const MAX_STREAMS: usize = 8;

impl ConfigFile {
    /// Reads and checks the file at `path`.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let io = |reason| ConfigError::Io { path: path.to_owned(), reason };
        let file = std::fs::File::open(path).map_err(io)?;
        let mut text = Vec::new();
        file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut text).map_err(io)?;
        let text = String::from_utf8(text).map_err(|error| ConfigError::Json { reason: error.to_string() })?;
        Self::from_json(&text)
    }

    /// Reads and checks the text of a `config.json`. Unknown keys are ignored.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        if text.len() as u64 > MAX_CONFIG_BYTES {
            return Err(ConfigError::TooLong { max: MAX_CONFIG_BYTES });
        }
        let value: Value =
            serde_json::from_str(text).map_err(|error| ConfigError::Json { reason: error.to_string() })?;
        let Value::Object(map) = &value else { return Err(ConfigError::NotAnObject { got: type_name(&value) }) };
        let keys = Keys { map, prefix: "" };
        let (dspark, drafter_fault) = match dspark(keys) {
            Ok(dspark) => (dspark, None),
            Err(error) => (None, Some(error.to_string())),
        };
        let (model, eos_token_ids) = model_config(keys, dspark)?;
        Ok(Self { model, eos_token_ids, quantization: quantization(keys)?, drafter_fault })
    }
}

fn model_config(keys: Keys<'_>, dspark: Option<DsparkConfig>) -> Result<(ModelConfig, Vec<u32>), ConfigError> {
    let num_hidden_layers = keys.size("num_hidden_layers", 1, MAX_LAYERS)?;
    let vocab_size = keys.size("vocab_size", 1, MAX_VOCAB)?;
    let eos_token_ids = eos_token_ids(keys, vocab_size)?;
    let compress_ratios = compress_ratios(keys, num_hidden_layers)?;
    let trunk = &compress_ratios[..num_hidden_layers];
    // Keys of parts that no layer has may be absent, and mean nothing if they are not.
    let (compresses, has_csa) = (trunk.iter().any(|&ratio| ratio > 0), trunk.contains(&4));
    let rope_theta = keys.float("rope_theta", Excluded(1.0), 1e12)?;
    let index = |key, min, max, unused| if has_csa { keys.size(key, min, max) } else { Ok(unused) };
    let qk_rope_head_dim = keys.size("qk_rope_head_dim", 2, MAX_HEAD_DIM)?;
    let config = ModelConfig {
        vocab_size,
        hidden_size: keys.size("hidden_size", 1, MAX_WIDTH)?,
        num_hidden_layers,
        num_attention_heads: keys.size("num_attention_heads", 1, MAX_HEADS)?,
        head_dim: keys.size("head_dim", 2, MAX_HEAD_DIM)?,
        qk_rope_head_dim,
        q_lora_rank: keys.size("q_lora_rank", 1, MAX_WIDTH)?,
        o_groups: keys.size("o_groups", 1, MAX_HEADS)?,
        o_lora_rank: keys.size("o_lora_rank", 1, MAX_WIDTH)?,
        sliding_window: keys.size("sliding_window", 1, MAX_WINDOW)?,
        rope_theta,
        compress_rope_theta: if compresses {
            keys.float("compress_rope_theta", Excluded(1.0), 1e12)?
        } else {
            rope_theta
        },
        rope_scaling: rope_scaling(keys)?,
        index_n_heads: index("index_n_heads", 1, MAX_HEADS, 1)?,
        index_head_dim: index("index_head_dim", 2, MAX_HEAD_DIM, qk_rope_head_dim)?,
        index_topk: index("index_topk", 1, MAX_WINDOW, 1)?,
        hc_mult: keys.size("hc_mult", 1, MAX_STREAMS)?,
        hc_sinkhorn_iters: keys.size("hc_sinkhorn_iters", 1, 1000)?,
        hc_eps: keys.float("hc_eps", Included(0.0), 0.1)?,
        n_routed_experts: keys.size("n_routed_experts", 1, MAX_EXPERTS)?,
        num_experts_per_tok: keys.size("num_experts_per_tok", 1, MAX_EXPERTS)?,
        moe_intermediate_size: keys.size("moe_intermediate_size", 1, MAX_WIDTH)?,
        num_hash_layers: keys.size_or("num_hash_layers", 0, 0, MAX_LAYERS)?.min(num_hidden_layers),
        scoring_func: scoring_func(keys)?,
        norm_topk_prob: keys.flag_or("norm_topk_prob", true)?,
        routed_scaling_factor: keys.float("routed_scaling_factor", Excluded(0.0), 1e4)?,
        swiglu_limit: keys
            .optional("swiglu_limit")
            .map(|_| keys.float("swiglu_limit", Included(0.0), 1e6))
            .transpose()?,
        rms_norm_eps: keys.float("rms_norm_eps", Excluded(0.0), 0.1)?,
        max_position_embeddings: keys.size("max_position_embeddings", 1, MAX_POSITIONS)?,
        bos_token_id: keys
            .optional("bos_token_id")
            .map(|value| token_id("bos_token_id", value, vocab_size))
            .transpose()?,
        eos_token_id: eos_token_ids.first().copied(),
        dspark,
        compress_ratios,
    };
    let config = ModelConfig { swiglu_limit: config.swiglu_limit.filter(|&limit| limit > 0.0), ..config };
    unsupported_variants(keys)?;
    config.check_consistency()?;
    Ok((config, eos_token_ids))
}

impl ModelConfig {
    /// Relations between the numbers; each number alone is in range already.
    fn check_consistency(&self) -> Result<(), ConfigError> {
        let fail = |what: String| Err(ConfigError::Inconsistent { what });
        let rope = self.qk_rope_head_dim;
        if !rope.is_multiple_of(2) || rope > self.head_dim || rope > self.index_head_dim {
            return fail(format!(
                "`qk_rope_head_dim` is {rope}, must be even and at most `head_dim` ({}) and `index_head_dim` ({})",
                self.head_dim, self.index_head_dim
            ));
        }
        let heads_width = self.num_attention_heads * self.head_dim;
        if heads_width > MAX_WIDTH * 8 {
            return fail(format!(
                "`num_attention_heads` x `head_dim` is {heads_width}, must be at most {}",
                MAX_WIDTH * 8
            ));
        }
        if !heads_width.is_multiple_of(self.o_groups) {
            return fail(format!(
                "`num_attention_heads` x `head_dim` is {heads_width}, must be divisible by `o_groups` ({})",
                self.o_groups
            ));
        }
        if self.o_groups * self.o_lora_rank > MAX_WIDTH * 8 {
            let width = self.o_groups * self.o_lora_rank;
            return fail(format!("`o_groups` x `o_lora_rank` is {width}, must be at most {}", MAX_WIDTH * 8));
        }
        let num_experts = self.num_hidden_layers * self.n_routed_experts;
        if num_experts > MAX_EXPERTS_IN_ALL {
            return fail(format!(
                "`num_hidden_layers` x `n_routed_experts` is {num_experts}, must be at most {MAX_EXPERTS_IN_ALL}"
            ));
        }
        if self.num_experts_per_tok > self.n_routed_experts {
            return fail(format!(
                "`num_experts_per_tok` is {}, must be at most `n_routed_experts` ({})",
                self.num_experts_per_tok, self.n_routed_experts
            ));
        }
        Ok(())
    }
}

/// Switches of the configuration that name arithmetic we do not have; silence about them would give wrong answers.
fn unsupported_variants(keys: Keys<'_>) -> Result<(), ConfigError> {
    keys.size_or("num_key_value_heads", 1, 1, 1)?;
    keys.size_or("n_shared_experts", 1, 1, 1)?;
    if keys.flag_or("attention_bias", false)? {
        return Err(bad("attention_bias", &Value::Bool(true), "false: DeepSeek-V4 has no biases"));
    }
    match keys.optional("hidden_act") {
        Some(act) if act.as_str() != Some("silu") => Err(bad("hidden_act", act, "\"silu\"")),
        _ => Ok(()),
    }
}

fn compress_ratios(keys: Keys<'_>, num_hidden_layers: usize) -> Result<Vec<usize>, ConfigError> {
    const KEY: &str = "compress_ratios";
    let Some(value) = keys.optional(KEY) else {
        let model_type =
            keys.optional("model_type").map_or_else(String::new, |kind| format!(" (model_type is {kind})"));
        return Err(ConfigError::Missing {
            key: KEY.to_owned(),
            help: format!(
                "a DeepSeek-V4 configuration{model_type} lists the compression ratio of every layer (0, 4, 128, ...), \
                 and no default fits every model. Take config.json from the original checkpoint"
            ),
        });
    };
    const WANT: &str = "a list of ratios, each 0 (window only), 4 (CSA) or another from 2 to 65536 (HCA)";
    let list = value.as_array().ok_or_else(|| bad(KEY, value, WANT))?;
    if list.len() > 2 * MAX_LAYERS || list.len() < num_hidden_layers {
        return Err(ConfigError::Inconsistent {
            what: format!(
                "`compress_ratios` has {} entries, must have one for each of the {num_hidden_layers} layers of \
                 `num_hidden_layers` (and may have more for the drafter)",
                list.len()
            ),
        });
    }
    let ratio = |(i, value): (usize, &Value)| match value.as_u64().and_then(|ratio| usize::try_from(ratio).ok()) {
        Some(ratio) if ratio != 1 && ratio <= MAX_RATIO => Ok(ratio),
        _ => Err(bad(&format!("{KEY}[{i}]"), value, "0 (window only), 4 (CSA) or another from 2 to 65536 (HCA)")),
    };
    list.iter().enumerate().map(ratio).collect()
}

fn rope_scaling(keys: Keys<'_>) -> Result<Option<RopeScaling>, ConfigError> {
    let Some(value) = keys.optional("rope_scaling") else { return Ok(None) };
    let map = value.as_object().ok_or_else(|| bad("rope_scaling", value, "an object or null"))?;
    let keys = Keys { map, prefix: "rope_scaling." };
    let Some(kind) = keys.optional("type").or_else(|| keys.optional("rope_type")) else {
        return Err(keys.missing("type", "say \"yarn\", or make `rope_scaling` null for no scaling"));
    };
    if kind.as_str() == Some("default") {
        // How transformers writes that there is none.
        return Ok(None);
    }
    if kind.as_str() != Some("yarn") {
        return Err(bad("rope_scaling.type", kind, "\"yarn\" (or `rope_scaling` null)"));
    }
    let beta = |key, default| keys.optional(key).map_or(Ok(default), |_| keys.float(key, Included(1e-3), 1e6));
    Ok(Some(RopeScaling {
        factor: keys.float("factor", Included(1.0), 1e6)?,
        original_max_position_embeddings: keys.size("original_max_position_embeddings", 1, MAX_POSITIONS)?,
        beta_fast: beta("beta_fast", 32.0)?,
        beta_slow: beta("beta_slow", 1.0)?,
    }))
}

fn scoring_func(keys: Keys<'_>) -> Result<ScoringFunc, ConfigError> {
    let Some(value) = keys.optional("scoring_func") else { return Ok(ScoringFunc::SqrtSoftplus) };
    match value.as_str() {
        Some("sqrtsoftplus") => Ok(ScoringFunc::SqrtSoftplus),
        Some("sigmoid") => Ok(ScoringFunc::Sigmoid),
        Some("softmax") => Ok(ScoringFunc::Softmax),
        _ => Err(bad("scoring_func", value, "\"sqrtsoftplus\", \"sigmoid\" or \"softmax\"")),
    }
}

fn eos_token_ids(keys: Keys<'_>, vocab_size: usize) -> Result<Vec<u32>, ConfigError> {
    const KEY: &str = "eos_token_id";
    match keys.optional(KEY) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= 1024 => {
            list.iter().map(|value| token_id(KEY, value, vocab_size)).collect()
        }
        Some(value) => Ok(vec![token_id(KEY, value, vocab_size)?]),
    }
}

fn dspark(keys: Keys<'_>) -> Result<Option<DsparkConfig>, ConfigError> {
    const TARGETS: &str = "dspark_target_layer_ids";
    let block_size = keys.size_or("dspark_block_size", 0, 0, 64)?;
    let no_targets = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    if block_size == 0 || keys.optional(TARGETS).is_some_and(no_targets) {
        return Ok(None);
    }
    let num_hidden_layers = keys.size("num_hidden_layers", 1, MAX_LAYERS)?;
    let vocab_size = keys.size("vocab_size", 1, MAX_VOCAB)?;
    let value = keys.required(TARGETS)?;
    let list = value.as_array().filter(|list| (1..=num_hidden_layers).contains(&list.len()));
    let list = list.ok_or_else(|| bad(TARGETS, value, &format!("a list of 1 to {num_hidden_layers} layer numbers")))?;
    let layer = |(i, value): (usize, &Value)| {
        let layer = value.as_u64().filter(|&layer| layer < num_hidden_layers as u64);
        let want = || format!("a layer number below `num_hidden_layers` ({num_hidden_layers})");
        layer.and_then(|layer| u16::try_from(layer).ok()).ok_or_else(|| bad(&format!("{TARGETS}[{i}]"), value, &want()))
    };
    Ok(Some(DsparkConfig {
        block_size,
        markov_rank: keys.size("dspark_markov_rank", 1, MAX_WIDTH)?,
        noise_token_id: token_id("dspark_noise_token_id", keys.required("dspark_noise_token_id")?, vocab_size)?,
        target_layer_ids: list.iter().enumerate().map(layer).collect::<Result<_, _>>()?,
    }))
}

/// The MLX map under `quantization` or `quantization_config`. The latter also names other schemes, which have a
/// `quant_method`; those say nothing that tensors do not.
fn quantization(keys: Keys<'_>) -> Result<Option<Quantization>, ConfigError> {
    let found = ["quantization", "quantization_config"].into_iter().find_map(|key| {
        let map = keys.optional(key)?.as_object()?;
        (!map.contains_key("quant_method")).then_some((key, map))
    });
    let Some((key, map)) = found else { return Ok(None) };
    let default = quant_spec(key, map)?;
    let mut modules = BTreeMap::new();
    for (name, value) in map {
        let spec = match value {
            Value::Object(spec) => Some(quant_spec(&format!("{key}.{name}"), spec)?),
            Value::Bool(false) => None,
            Value::Bool(true) => Some(default.clone()),
            // `group_size`, `bits`, `mode` and whatever else a converter notes.
            _ => continue,
        };
        modules.insert(name.clone(), spec);
    }
    Ok(Some(Quantization { default, modules }))
}

fn quant_spec(path: &str, map: &Map<String, Value>) -> Result<QuantSpec, ConfigError> {
    let given = |key: &str| map.get(key).filter(|value| !value.is_null());
    let number = |key: &str| {
        let read = |value: &Value| value.as_u64().ok_or_else(|| bad(&format!("{path}.{key}"), value, "a whole number"));
        given(key).map(read).transpose()
    };
    let mode = |value: &Value| {
        value
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| bad(&format!("{path}.mode"), value, "a name such as \"affine\""))
    };
    Ok(QuantSpec {
        mode: given("mode").map(mode).transpose()?,
        bits: number("bits")?,
        group_size: number("group_size")?,
    })
}

fn token_id(key: &str, value: &Value, vocab_size: usize) -> Result<u32, ConfigError> {
    let id = value.as_u64().filter(|&id| id < vocab_size as u64).and_then(|id| u32::try_from(id).ok());
    id.ok_or_else(|| bad(key, value, &format!("a token id below `vocab_size` ({vocab_size})")))
}

/// The keys of one JSON object.
#[derive(Clone, Copy)]
struct Keys<'a> {
    map: &'a Map<String, Value>,
    /// Where the object lies, for messages: empty or `rope_scaling.`.
    prefix: &'static str,
}

impl<'a> Keys<'a> {
    /// `null` counts as absent, as the writers of these files mean it.
    fn optional(self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn required(self, key: &str) -> Result<&'a Value, ConfigError> {
        self.optional(key).ok_or_else(|| self.missing(key, "it decides shapes or numbers and has no safe default"))
    }

    fn missing(self, key: &str, help: &str) -> ConfigError {
        ConfigError::Missing { key: format!("{}{key}", self.prefix), help: help.to_owned() }
    }

    fn size(self, key: &str, min: usize, max: usize) -> Result<usize, ConfigError> {
        let value = self.required(key)?;
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|size| (min..=max).contains(size));
        let want = || if min == max { format!("{min}") } else { format!("a whole number from {min} to {max}") };
        size.ok_or_else(|| bad(&format!("{}{key}", self.prefix), value, &want()))
    }

    fn size_or(self, key: &str, default: usize, min: usize, max: usize) -> Result<usize, ConfigError> {
        self.optional(key).map_or(Ok(default), |_| self.size(key, min, max))
    }

    fn flag_or(self, key: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.optional(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| bad(&format!("{}{key}", self.prefix), value, "true or false"))
    }

    fn float(self, key: &str, min: Bound<f64>, max: f64) -> Result<f64, ConfigError> {
        let value = self.required(key)?;
        let number = value.as_f64().filter(|x| (min, Included(max)).contains(x));
        number.ok_or_else(|| {
            let want = match min {
                Excluded(min) => format!("a number above {min} and at most {max}"),
                Included(min) => format!("a number from {min} to {max}"),
                Unbounded => format!("a number of at most {max}"),
            };
            bad(&format!("{}{key}", self.prefix), value, &want)
        })
    }
}

fn bad(key: &str, value: &Value, want: &str) -> ConfigError {
    const MAX_SHOWN: usize = 60;
    let shown = match value {
        Value::Array(_) | Value::Object(_) => type_name(value).to_owned(),
        _ => value.to_string(),
    };
    let value = match shown.char_indices().nth(MAX_SHOWN) {
        Some((cut, _)) => format!("{}...", &shown[..cut]),
        None => shown,
    };
    ConfigError::Value { key: key.to_owned(), value, want: want.to_owned() }
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
