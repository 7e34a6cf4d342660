//! The two published layouts: how each names a weight, and the shape a configuration demands of it (model spec, 3.1 and
//! 3.3).
//!
//! Names and shapes only; bytes are looked at in [`crate::weights`].

use std::borrow::Cow;
use std::fmt;

use troika_graph::{Role, Scope, WeightKey};

use super::TensorFiles;
use crate::config::{LayerKind, ModelConfig};

/// Who named the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// As DeepSeek publishes: `embed.weight`, `layers.0.attn.wq_a.weight`.
    Official,
    /// As MLX conversions: `model.embed_tokens.weight`, stacked experts.
    Mlx,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Official => "official",
            Self::Mlx => "MLX",
        })
    }
}

impl Layout {
    /// The layout of `files`, by the names of their tensors; an error says why none fits.
    pub fn detect(files: &TensorFiles) -> Result<Self, String> {
        let has = |prefix: &str| files.iter().any(|(name, _)| name.starts_with(prefix));
        match (has("layers.") || has("embed."), has("model.layers.") || has("model.embed_tokens.")) {
            (true, true) => {
                Err("tensors of two layouts are mixed: some start with `layers.`, others with `model.layers.`; \
                                 remove the files that do not belong"
                    .to_owned())
            }
            (true, false) => Ok(Self::Official),
            (false, true) if files.iter().any(|(name, _)| name.contains(".self_attn.")) => {
                Err("tensors have the in-memory names of transformers (`self_attn`); Troika reads the official layout \
                     and MLX conversions"
                    .to_owned())
            }
            (false, true) => Ok(Self::Mlx),
            (false, false) => {
                let some: Vec<String> = files.iter().take(3).map(|(name, _)| format!("`{name}`")).collect();
                Err(format!(
                    "no tensor is named as in a DeepSeek-V4 checkpoint (`layers.0...` or `model.layers.0...`); found \
                     {}",
                    if some.is_empty() { "none at all".to_owned() } else { some.join(", ") }
                ))
            }
        }
    }
}

/// The shape of a weight and which formats it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `[n]`, plain floats.
    Vector(usize),
    /// `[rows, cols]`, plain floats.
    Plain(usize, usize),
    /// `[rows, cols]`, plain floats or any quantised format.
    Matrix(usize, usize),
    /// `[rows, cols]`, integers.
    Table(usize, usize),
}

impl Form {
    /// `[rows, cols]`; a vector is one row.
    pub fn dims(self) -> [usize; 2] {
        match self {
            Self::Vector(n) => [1, n],
            Self::Plain(rows, cols) | Self::Matrix(rows, cols) | Self::Table(rows, cols) => [rows, cols],
        }
    }
}

/// Where a layout keeps a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the tensor with the numbers.
    pub tensor: String,
    /// Set if the tensor stacks several matrices along a leading axis.
    pub stack: Option<Stack>,
}

/// A leading axis of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    /// `[count, rows, cols]`: the weight is matrix `idx`.
    Pick { idx: usize, count: usize },
    /// `[groups, rows / groups, cols]`, or the two axes joined: the weight is all of it.
    Join { groups: usize },
}

impl Place {
    /// Module path, which siblings (`.scale`, `.scales`) and the `quantization` map use: the tensor without `.weight`.
    pub fn module(&self) -> &str {
        self.tensor.strip_suffix(".weight").unwrap_or(&self.tensor)
    }
}

/// Where `layout` keeps `key`.
pub fn place(layout: Layout, config: &ModelConfig, key: WeightKey) -> Place {
    let local = match layout {
        Layout::Official => official(key.role),
        Layout::Mlx => mlx(key.role),
    };
    let tensor = match (layout, key.scope) {
        (Layout::Official, Scope::Model) => local.into_owned(),
        (Layout::Mlx, Scope::Model) if key.role == Role::Head => local.into_owned(),
        (Layout::Mlx, Scope::Model) => format!("model.{local}"),
        (Layout::Official, Scope::Layer(layer)) => format!("layers.{layer}.{local}"),
        (Layout::Mlx, Scope::Layer(layer)) => format!("model.layers.{layer}.{local}"),
        (_, Scope::Stage(stage)) => format!("mtp.{stage}.{local}"),
    };
    let stack = match (layout, key.role) {
        (Layout::Mlx, Role::ExpertW1(idx) | Role::ExpertW2(idx) | Role::ExpertW3(idx)) => {
            Some(Stack::Pick { idx: idx.into(), count: config.n_routed_experts })
        }
        (Layout::Mlx, Role::WoA) => Some(Stack::Join { groups: config.o_groups }),
        _ => None,
    };
    Place { tensor, stack }
}

/// Name in the official layout, inside its scope.
fn official(role: Role) -> Cow<'static, str> {
    let fixed = match role {
        Role::ExpertW1(expert) => return format!("ffn.experts.{expert}.w1.weight").into(),
        Role::ExpertW2(expert) => return format!("ffn.experts.{expert}.w2.weight").into(),
        Role::ExpertW3(expert) => return format!("ffn.experts.{expert}.w3.weight").into(),
        Role::Embed => "embed.weight",
        Role::Head => "head.weight",
        Role::Norm => "norm.weight",
        Role::HcHeadFn => "hc_head_fn",
        Role::HcHeadBase => "hc_head_base",
        Role::HcHeadScale => "hc_head_scale",
        Role::AttnNorm => "attn_norm.weight",
        Role::FfnNorm => "ffn_norm.weight",
        Role::HcAttnFn => "hc_attn_fn",
        Role::HcAttnBase => "hc_attn_base",
        Role::HcAttnScale => "hc_attn_scale",
        Role::HcFfnFn => "hc_ffn_fn",
        Role::HcFfnBase => "hc_ffn_base",
        Role::HcFfnScale => "hc_ffn_scale",
        Role::AttnSink => "attn.attn_sink",
        Role::WqA => "attn.wq_a.weight",
        Role::QNorm => "attn.q_norm.weight",
        Role::WqB => "attn.wq_b.weight",
        Role::Wkv => "attn.wkv.weight",
        Role::KvNorm => "attn.kv_norm.weight",
        Role::WoA => "attn.wo_a.weight",
        Role::WoB => "attn.wo_b.weight",
        Role::CompressorWkv => "attn.compressor.wkv.weight",
        Role::CompressorWgate => "attn.compressor.wgate.weight",
        Role::CompressorApe => "attn.compressor.ape",
        Role::CompressorNorm => "attn.compressor.norm.weight",
        Role::IndexerWqB => "attn.indexer.wq_b.weight",
        Role::IndexerWeightsProj => "attn.indexer.weights_proj.weight",
        Role::IndexerCompressorWkv => "attn.indexer.compressor.wkv.weight",
        Role::IndexerCompressorWgate => "attn.indexer.compressor.wgate.weight",
        Role::IndexerCompressorApe => "attn.indexer.compressor.ape",
        Role::IndexerCompressorNorm => "attn.indexer.compressor.norm.weight",
        Role::Gate => "ffn.gate.weight",
        Role::GateBias => "ffn.gate.bias",
        Role::GateTid2eid => "ffn.gate.tid2eid",
        Role::SharedW1 => "ffn.shared_experts.w1.weight",
        Role::SharedW2 => "ffn.shared_experts.w2.weight",
        Role::SharedW3 => "ffn.shared_experts.w3.weight",
        Role::MainProj => "main_proj.weight",
        Role::MainNorm => "main_norm.weight",
        Role::MarkovW1 => "markov_head.markov_w1.weight",
        Role::MarkovW2 => "markov_head.markov_w2.weight",
        Role::ConfidenceProj => "confidence_head.proj.weight",
    };
    fixed.into()
}

/// Name in the MLX layout, inside its scope. Where it is silent, the official one.
fn mlx(role: Role) -> Cow<'static, str> {
    let renamed = match role {
        Role::Embed => "embed_tokens.weight",
        Role::Head => "lm_head.weight",
        Role::HcHeadFn => "hc_head.fn",
        Role::HcHeadBase => "hc_head.base",
        Role::HcHeadScale => "hc_head.scale",
        Role::HcAttnFn => "attn_hc.fn",
        Role::HcAttnBase => "attn_hc.base",
        Role::HcAttnScale => "attn_hc.scale",
        Role::HcFfnFn => "ffn_hc.fn",
        Role::HcFfnBase => "ffn_hc.base",
        Role::HcFfnScale => "ffn_hc.scale",
        Role::GateBias => "ffn.gate.e_score_correction_bias",
        Role::SharedW1 => "ffn.shared_experts.gate_proj.weight",
        Role::SharedW2 => "ffn.shared_experts.down_proj.weight",
        Role::SharedW3 => "ffn.shared_experts.up_proj.weight",
        Role::ExpertW1(_) => "ffn.switch_mlp.gate_proj.weight",
        Role::ExpertW2(_) => "ffn.switch_mlp.down_proj.weight",
        Role::ExpertW3(_) => "ffn.switch_mlp.up_proj.weight",
        _ => return official(role),
    };
    renamed.into()
}

/// The shape that `config` demands of a weight.
///
/// # Panics
///
/// If the key names a layer that `config` does not have.
pub fn form(config: &ModelConfig, key: WeightKey) -> Form {
    let c = config;
    let (d, hd, di) = (c.hidden_size, c.head_dim, c.index_head_dim);
    let heads_width = c.num_attention_heads * hd;
    let streams_width = c.hc_mult * d;
    let num_mixes = (2 + c.hc_mult) * c.hc_mult;
    let ff = c.moe_intermediate_size;
    let experts = c.n_routed_experts;
    // Ratio and number of lanes of the layer's compressor.
    let (ratio, lanes) = match key.scope {
        Scope::Layer(layer) => match c.layer_kind(layer.into()) {
            LayerKind::Swa => (0, 1),
            LayerKind::Csa => (4, 2),
            LayerKind::Hca { ratio } => (ratio, 1),
        },
        Scope::Model | Scope::Stage(_) => (0, 1),
    };
    let (num_targets, markov_rank) = c.dspark.as_ref().map_or((0, 0), |d| (d.target_layer_ids.len(), d.markov_rank));
    match key.role {
        Role::Embed | Role::Head => Form::Matrix(c.vocab_size, d),
        Role::Norm | Role::AttnNorm | Role::FfnNorm | Role::MainNorm => Form::Vector(d),
        Role::HcHeadFn => Form::Plain(c.hc_mult, streams_width),
        Role::HcHeadBase => Form::Vector(c.hc_mult),
        Role::HcHeadScale => Form::Vector(1),
        Role::HcAttnFn | Role::HcFfnFn => Form::Plain(num_mixes, streams_width),
        Role::HcAttnBase | Role::HcFfnBase => Form::Vector(num_mixes),
        Role::HcAttnScale | Role::HcFfnScale => Form::Vector(3),
        Role::AttnSink => Form::Vector(c.num_attention_heads),
        Role::WqA => Form::Matrix(c.q_lora_rank, d),
        Role::QNorm => Form::Vector(c.q_lora_rank),
        Role::WqB => Form::Matrix(heads_width, c.q_lora_rank),
        Role::Wkv => Form::Matrix(hd, d),
        Role::KvNorm | Role::CompressorNorm => Form::Vector(hd),
        Role::WoA => Form::Matrix(c.o_groups * c.o_lora_rank, heads_width / c.o_groups),
        Role::WoB => Form::Matrix(d, c.o_groups * c.o_lora_rank),
        Role::CompressorWkv | Role::CompressorWgate => Form::Matrix(lanes * hd, d),
        Role::CompressorApe => Form::Plain(ratio, lanes * hd),
        Role::IndexerWqB => Form::Matrix(c.index_n_heads * di, c.q_lora_rank),
        Role::IndexerWeightsProj => Form::Matrix(c.index_n_heads, d),
        Role::IndexerCompressorWkv | Role::IndexerCompressorWgate => Form::Matrix(lanes * di, d),
        Role::IndexerCompressorApe => Form::Plain(ratio, lanes * di),
        Role::IndexerCompressorNorm => Form::Vector(di),
        Role::Gate => Form::Matrix(experts, d),
        Role::GateBias => Form::Vector(experts),
        Role::GateTid2eid => Form::Table(c.vocab_size, c.num_experts_per_tok),
        Role::SharedW1 | Role::SharedW3 | Role::ExpertW1(_) | Role::ExpertW3(_) => Form::Matrix(ff, d),
        Role::SharedW2 | Role::ExpertW2(_) => Form::Matrix(d, ff),
        Role::MainProj => Form::Matrix(d, d * num_targets),
        Role::MarkovW1 | Role::MarkovW2 => Form::Matrix(c.vocab_size, markov_rank),
        Role::ConfidenceProj => Form::Matrix(1, d + markov_rank),
    }
}

/// The weights of the whole model.
pub const MODEL_ROLES: &[Role] =
    &[Role::Embed, Role::Head, Role::Norm, Role::HcHeadFn, Role::HcHeadBase, Role::HcHeadScale];

/// The weights that every block has, in trunk and drafter, but for the choice of experts.
const BLOCK_ROLES: &[Role] = &[
    Role::AttnNorm,
    Role::FfnNorm,
    Role::HcAttnFn,
    Role::HcAttnBase,
    Role::HcAttnScale,
    Role::HcFfnFn,
    Role::HcFfnBase,
    Role::HcFfnScale,
    Role::AttnSink,
    Role::WqA,
    Role::QNorm,
    Role::WqB,
    Role::Wkv,
    Role::KvNorm,
    Role::WoA,
    Role::WoB,
    Role::Gate,
    Role::SharedW1,
    Role::SharedW2,
    Role::SharedW3,
];
const COMPRESSOR_ROLES: &[Role] =
    &[Role::CompressorWkv, Role::CompressorWgate, Role::CompressorApe, Role::CompressorNorm];
const INDEXER_ROLES: &[Role] = &[
    Role::IndexerWqB,
    Role::IndexerWeightsProj,
    Role::IndexerCompressorWkv,
    Role::IndexerCompressorWgate,
    Role::IndexerCompressorApe,
    Role::IndexerCompressorNorm,
];

/// The weights of a trunk layer. `is_hash`: experts are chosen by token id.
pub fn layer_roles(config: &ModelConfig, layer: u16, is_hash: bool) -> Vec<Role> {
    let mut roles = BLOCK_ROLES.to_vec();
    roles.push(if is_hash { Role::GateTid2eid } else { Role::GateBias });
    match config.layer_kind(layer.into()) {
        LayerKind::Swa => {}
        LayerKind::Csa => roles.extend(COMPRESSOR_ROLES.iter().chain(INDEXER_ROLES)),
        LayerKind::Hca { .. } => roles.extend(COMPRESSOR_ROLES),
    }
    roles.extend(expert_roles(config));
    roles
}

/// The weights of drafter stage `stage` of `num_stages`.
pub fn stage_roles(config: &ModelConfig, stage: u16, num_stages: u16) -> Vec<Role> {
    let mut roles = BLOCK_ROLES.to_vec();
    roles.push(Role::GateBias);
    roles.extend(expert_roles(config));
    if stage == 0 {
        roles.extend([Role::MainProj, Role::MainNorm]);
    }
    if stage + 1 == num_stages {
        roles.extend([Role::Norm, Role::HcHeadFn, Role::HcHeadBase, Role::HcHeadScale]);
        roles.extend([Role::MarkovW1, Role::MarkovW2, Role::ConfidenceProj]);
    }
    roles
}

fn expert_roles(config: &ModelConfig) -> impl Iterator<Item = Role> {
    let num_experts = u16::try_from(config.n_routed_experts).unwrap_or(u16::MAX);
    (0..num_experts).flat_map(|expert| [Role::ExpertW1(expert), Role::ExpertW2(expert), Role::ExpertW3(expert)])
}
