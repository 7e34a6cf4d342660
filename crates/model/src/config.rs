//! `config.json`, checked: after parsing, every number is in range and every shape derived from it fits (model spec,
//! section 2).

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
