//! What a node can do. Operations are coarse and few; every number an implementation needs is in the operation.
//!
//! Shapes: `T` rows of the step (tokens of all sequences together), `R` rows whose logits are wanted, `D` hidden
//! width, `S` residual streams, `H` heads of width `d`, `E` experts, `k` experts per token, `V` vocabulary. Section
//! numbers are those of the model spec.

use std::sync::Arc;

use crate::weights::{Role, WeightRef};

/// Sizes and constants of the hyper-connections (5.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HyperConnection {
    pub streams: usize,
    pub dim: usize,
    pub sinkhorn_iters: usize,
    pub hc_eps: f32,
    pub norm_eps: f32,
}

/// The three tensors of one hyper-connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HcWeights {
    pub fn_: WeightRef,
    pub base: WeightRef,
    pub scale: WeightRef,
}

/// Rounding of rows before they are stored or compared (section 4); only the class `official` uses any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowRounding {
    /// Values stay as computed.
    None,
    /// e4m3 in groups of 64 over all channels but the last `rope_dim`.
    Fp8NonRotary,
    /// Hadamard rotation of the row, then e2m1 in groups of 32.
    HadamardFp4,
}

/// Rotation of the last `2 * freqs.len()` channels of each head (6.3).
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Angle per position of each channel pair.
    pub freqs: Arc<[f64]>,
    /// Rotate backwards (attention output).
    pub inverse: bool,
}

/// A compressor (section 7).
#[derive(Clone, Debug, PartialEq)]
pub struct Compressor {
    /// Tokens per row.
    pub ratio: usize,
    /// Ratio 4: a row also pools lane A of the block before.
    pub overlap: bool,
    /// Width of a row, `d`; the projections are `2 d` wide with overlap.
    pub dim: usize,
    pub ape: WeightRef,
    pub norm: WeightRef,
    pub norm_eps: f32,
    pub freqs: Arc<[f64]>,
    pub rounding: RowRounding,
}

/// Attention over the window and, in layers with compression, compressed rows (section 6).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    pub heads: usize,
    pub head_dim: usize,
    /// Rows of the window, counting the query's own.
    pub window: usize,
    /// Tokens per compressed row; 0 = window only.
    pub ratio: usize,
    pub sink: WeightRef,
    pub pattern: AttentionPattern,
}

/// Who sees whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionPattern {
    /// Trunk: the window up to the query's own token and visible compressed rows.
    Causal,
    /// Drafter: every context row of the stage and every row of the block (10.2).
    Block,
}

/// The lightning indexer (section 8).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Indexer {
    pub heads: usize,
    pub dim: usize,
    pub top_k: usize,
    /// Tokens per index row.
    pub ratio: usize,
}

/// How router logits become scores (9.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    SqrtSoftplus,
    Sigmoid,
    Softmax,
}

/// The router (9.1). With `table`, experts are chosen by token id; otherwise by score plus `bias`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    pub scoring: Scoring,
    pub experts: usize,
    pub top_k: usize,
    pub bias: Option<WeightRef>,
    pub table: Option<WeightRef>,
    pub normalise: bool,
    pub scaling: f32,
}

/// One operation. Inputs and outputs are listed as `inputs -> outputs`.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `-> streams [T, S·D]`: the token's row, copied to each stream.
    Embed { table: WeightRef, streams: usize },
    /// `streams -> collapsed [T, D], mix [T, S + S·S]` (and, when debugging, `pre [T, S]`): mixing weights and the
    /// collapsed input of a sublayer (5.1). `mix` holds `post`, then `comb[j, k]`.
    HcPre { hc: HyperConnection, weights: HcWeights },
    /// `streams, y, mix -> streams` in place: the sublayer's output merged into the streams (5.2).
    HcPost { hc: HyperConnection },
    /// `streams [R, S·D] -> [R, D]` (5.3).
    HcHead { hc: HyperConnection, weights: HcWeights },
    /// `x -> x` of the same shape, normalised per row and weighted.
    RmsNorm { weight: WeightRef, eps: f32 },
    /// `x -> one output per weight`: products with several weights that share an input (a stack).
    Linear { weights: Vec<WeightRef> },
    /// `x [T, G·K] -> [T, G·r]`: block-diagonal product, group `g` sees its own `K` inputs only (6.1).
    GroupedLinear { weight: WeightRef, groups: usize },
    /// `x [T, heads·d] -> x` in place: optional weightless norm per head, rotation, rounding.
    Rope { heads: usize, rope: Rope, head_norm_eps: Option<f32>, rounding: RowRounding },
    /// `kv [T, d] -> `: rows appended to the window.
    AppendWindow,
    /// `c, z [T, lanes·d] -> `: finished rows appended to the state; the rest stays pending.
    Compress { compressor: Compressor },
    /// `iq [T, Hi·di], iw [T, Hi] -> ids [T, K]` (and, when debugging, `scores [T, blocks]`): the best visible rows per
    /// query, ascending, -1 = none.
    IndexTopk { indexer: Indexer },
    /// `q [T, H·d] (, ids [T, K]) (, kv [T, d]) -> o [T, H·d]`; `kv` are the block's own rows in the drafter.
    Attend { attention: Attention },
    /// `logits [T, E] -> ids [T, k], weights [T, k]` (and, when debugging, `scores [T, E]`), ids ascending.
    Route { router: Router },
    /// `x, ids, weights (, acc) -> acc [T, D]` in place: adds the routed experts `first .. first + w1.len()`, ascending,
    /// so that several nodes in order give the same bits as one.
    Experts {
        first: usize,
        w1: Vec<WeightRef>,
        w2: Vec<WeightRef>,
        w3: Vec<WeightRef>,
        top_k: usize,
        limit: Option<f32>,
    },
    /// `x -> y`: gate/up, clamp, SwiGLU, down (9.3).
    SharedExpert { w1: WeightRef, w2: WeightRef, w3: WeightRef, limit: Option<f32> },
    /// `a, b -> a` in place.
    Add,
    /// `x [T, n] -> [R, n]`: the rows whose logits are wanted.
    GatherRows,
    /// `streams -> [T, D]`: mean over the streams, what the drafter sees of a layer (10.2).
    StreamMean { streams: usize },
    /// `several [T, n_i] -> [T, Σ n_i]`.
    ConcatColumns,
    /// `x -> x`, a copy that later in-place operations leave alone.
    Copy,
    /// `logits [T, V], h [T, D] -> logits [T, V] in place, ids [T, 1], confidence [T, 1]`: the drafter's sequential Markov
    /// correction with greedy choice, starting from each sequence's first token (10.2). All have as many rows.
    MarkovDraft { w1: WeightRef, w2: WeightRef, confidence: WeightRef },
}

impl Op {
    /// The operation's name in plans and reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::HcPre { .. } => "hc_pre",
            Self::HcPost { .. } => "hc_post",
            Self::HcHead { .. } => "hc_head",
            Self::RmsNorm { .. } => "rms_norm",
            Self::Linear { .. } => "linear",
            Self::GroupedLinear { .. } => "grouped_linear",
            Self::Rope { .. } => "rope",
            Self::AppendWindow => "append_rows",
            Self::Compress { .. } => "compress",
            Self::IndexTopk { .. } => "index_topk",
            Self::Attend { .. } => "attend",
            Self::Route { .. } => "route",
            Self::Experts { .. } => "experts",
            Self::SharedExpert { .. } => "swiglu",
            Self::Add => "add",
            Self::GatherRows => "gather_rows",
            Self::StreamMean { .. } => "stream_mean",
            Self::ConcatColumns => "concat",
            Self::Copy => "copy",
            Self::MarkovDraft { .. } => "markov_draft",
        }
    }

    /// `(input, output)` that share memory because the operation overwrites its input.
    pub fn in_place(&self, num_inputs: usize) -> Option<(usize, usize)> {
        match self {
            Self::HcPost { .. } | Self::Rope { .. } | Self::Add | Self::MarkovDraft { .. } => Some((0, 0)),
            // The first experts node has no accumulator to continue.
            Self::Experts { .. } => (num_inputs == 4).then_some((3, 0)),
            _ => None,
        }
    }

    /// Every weight the operation reads.
    pub fn weights(&self) -> Vec<WeightRef> {
        match self {
            Self::Embed { table, .. } => vec![*table],
            Self::HcPre { weights, .. } | Self::HcHead { weights, .. } => {
                vec![weights.fn_, weights.base, weights.scale]
            }
            Self::RmsNorm { weight, .. } | Self::GroupedLinear { weight, .. } => vec![*weight],
            Self::Linear { weights } => weights.clone(),
            Self::Compress { compressor } => vec![compressor.ape, compressor.norm],
            Self::Attend { attention } => vec![attention.sink],
            Self::Route { router } => router.bias.into_iter().chain(router.table).collect(),
            Self::Experts { w1, w2, w3, .. } => w1.iter().chain(w2).chain(w3).copied().collect(),
            Self::SharedExpert { w1, w2, w3, .. } => vec![*w1, *w2, *w3],
            Self::MarkovDraft { w1, w2, confidence } => vec![*w1, *w2, *confidence],
            Self::HcPost { .. }
            | Self::Rope { .. }
            | Self::AppendWindow
            | Self::IndexTopk { .. }
            | Self::Add
            | Self::GatherRows
            | Self::StreamMean { .. }
            | Self::ConcatColumns
            | Self::Copy => Vec::new(),
        }
    }
}

/// What a node is for: the rows of the cost table (section 12) and of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Embed,
    HyperConnection,
    Norm,
    WqA,
    WqB,
    Wkv,
    WoA,
    WoB,
    CsaCompressor,
    HcaCompressor,
    IndexerWqB,
    IndexerCompressor,
    IndexerWeights,
    IndexScores,
    Attention,
    Gate,
    RoutedExperts,
    SharedExpert,
    Head,
    Drafter,
    /// Those of `WqA`, `Wkv`, compressors and indexer weights that are one operation ([`crate::stack`]).
    AttentionInput,
}

impl Kind {
    /// Its name in tables, in the spelling of the model spec where it has one.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::HyperConnection => "hyper-connections",
            Self::Norm => "norms, rope",
            Self::WqA => "wq_a",
            Self::WqB => "wq_b",
            Self::Wkv => "wkv",
            Self::WoA => "wo_a",
            Self::WoB => "wo_b",
            Self::CsaCompressor => "CSA compressor",
            Self::HcaCompressor => "HCA compressor",
            Self::IndexerWqB => "indexer wq_b",
            Self::IndexerCompressor => "indexer compressor",
            Self::IndexerWeights => "indexer weights_proj",
            Self::IndexScores => "index scores",
            Self::Attention => "attention core",
            Self::Gate => "gate",
            Self::RoutedExperts => "routed experts",
            Self::SharedExpert => "shared expert",
            Self::Head => "head",
            Self::Drafter => "drafter",
            Self::AttentionInput => "attention inputs",
        }
    }

    /// Kinds of projections that neural engines may take part in. The indexer's queries are stacked with `wq_b`.
    pub fn projections() -> [Self; 10] {
        use Kind::{
            AttentionInput, CsaCompressor, HcaCompressor, IndexerCompressor, SharedExpert, Wkv, WoA, WoB, WqA, WqB,
        };
        [AttentionInput, WqA, WqB, Wkv, WoA, WoB, CsaCompressor, HcaCompressor, IndexerCompressor, SharedExpert]
    }

    /// The kind of the projection with this weight.
    pub fn of_projection(role: Role) -> Self {
        match role {
            Role::WqA => Self::WqA,
            Role::WqB => Self::WqB,
            Role::Wkv => Self::Wkv,
            Role::WoA => Self::WoA,
            Role::WoB => Self::WoB,
            Role::IndexerWqB => Self::IndexerWqB,
            Role::IndexerWeightsProj => Self::IndexerWeights,
            Role::IndexerCompressorWkv | Role::IndexerCompressorWgate => Self::IndexerCompressor,
            Role::Gate | Role::GateBias | Role::GateTid2eid => Self::Gate,
            Role::ExpertW1(_) | Role::ExpertW2(_) | Role::ExpertW3(_) => Self::RoutedExperts,
            Role::SharedW1 | Role::SharedW2 | Role::SharedW3 => Self::SharedExpert,
            Role::Head => Self::Head,
            _ => Self::Drafter,
        }
    }
}
