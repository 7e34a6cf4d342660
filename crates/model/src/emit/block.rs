//! One block, trunk layer or drafter stage: hyper-connections around attention and feed-forward (model spec, sections
//! 5 to 10).

use std::sync::Arc;

use troika_graph::op::{
    Attention, AttentionPattern, Compressor, HcWeights, Indexer, Rope, Router, RowRounding, Scoring,
};
use troika_graph::{Access, Element, Kind, Node, Op, Role, Scope, StateEdge, StatePart, ValueId, WeightRef};

use super::{EXPERT_NODES, MAX_DECODE_ROWS, StepEmitter, vector, weight};
use crate::config::{LayerKind, ScoringFunc};

/// The roles of the two hyper-connections of a block.
struct HcRoles {
    fn_: Role,
    base: Role,
    scale: Role,
    /// Norm of the sublayer behind it.
    norm: Role,
    /// Names of the taps.
    taps: [&'static str; 3],
}

const ATTN: HcRoles = HcRoles {
    fn_: Role::HcAttnFn,
    base: Role::HcAttnBase,
    scale: Role::HcAttnScale,
    norm: Role::AttnNorm,
    taps: ["attn_hc_pre", "attn_hc_mix", "attn_in"],
};
const FFN: HcRoles = HcRoles {
    fn_: Role::HcFfnFn,
    base: Role::HcFfnBase,
    scale: Role::HcFfnScale,
    norm: Role::FfnNorm,
    taps: ["ffn_hc_pre", "ffn_hc_mix", "ffn_in"],
};

/// Queries of a block.
struct Queries {
    /// Rotated, `[T, H·d]`.
    rotated: ValueId,
    /// The indexer's, as projected, `[T, Hi·di]`; none if it has no choice.
    index: Option<ValueId>,
}

impl StepEmitter<'_> {
    pub(super) fn trunk_layer(&mut self, layer: usize, streams: ValueId) -> ValueId {
        let scope = Scope::Layer(layer as u16);
        let kind = self.config.layer_kind(layer);
        let (input, mix) = self.sublayer_input(scope, &ATTN, streams);
        let output = self.trunk_attention(scope, kind, input);
        let streams = self.merge(scope, streams, output, mix);
        let (input, mix) = self.sublayer_input(scope, &FFN, streams);
        let hashed = self.emitter.facts.hash_layers[layer];
        let output = self.feed_forward(scope, hashed, input);
        let streams = self.merge(scope, streams, output, mix);
        self.tap_streams(scope, streams);
        streams
    }

    /// An ordinary block, except that its attention has no causal mask and routing is always by score.
    pub(super) fn draft_stage(&mut self, stage: usize, streams: ValueId) -> ValueId {
        let scope = Scope::Stage(stage as u16);
        let (input, mix) = self.sublayer_input(scope, &ATTN, streams);
        let output = self.draft_attention(scope, input);
        let streams = self.merge(scope, streams, output, mix);
        let (input, mix) = self.sublayer_input(scope, &FFN, streams);
        let output = self.feed_forward(scope, false, input);
        let streams = self.merge(scope, streams, output, mix);
        self.tap_streams(scope, streams);
        streams
    }

    /// The drafter's key/value rows of the step's tokens, from the outputs of its target layers.
    pub(super) fn draft_context(&mut self, targets: &[ValueId]) {
        let dim = self.config.hidden_size;
        let stage0 = Scope::Stage(0);
        let width = targets.len() * dim;
        let joined = self.unary(stage0, Kind::Drafter, Op::ConcatColumns, targets, width);
        self.debug_tap(stage0, "target_hidden", joined);
        let projected = self.linear(stage0, joined, &[weight(stage0, Role::MainProj, dim, width)])[0];
        let main = self.norm(stage0, Role::MainNorm, projected);
        for stage in 0..self.emitter.facts.num_stages {
            let scope = Scope::Stage(stage as u16);
            let rows = self.kv_rows(scope, main, &Arc::clone(&self.emitter.plain_freqs));
            self.append_window(scope, rows);
        }
    }

    /// Mixes the streams into a sublayer's normalised input; also returns the weights of the later merge.
    fn sublayer_input(&mut self, scope: Scope, roles: &HcRoles, streams: ValueId) -> (ValueId, ValueId) {
        let (s, dim) = (self.config.hc_mult, self.config.hidden_size);
        let mixes = (2 + s) * s;
        let weights = HcWeights {
            fn_: weight(scope, roles.fn_, mixes, s * dim),
            base: vector(scope, roles.base, mixes),
            scale: vector(scope, roles.scale, 3),
        };
        let collapsed = self.builder.value(dim, Element::F32);
        let mix = self.builder.value(s + s * s, Element::F32);
        let mut outputs = vec![collapsed, mix];
        if self.signature.debug_blocks.is_some() {
            outputs.push(self.builder.value(s, Element::F32));
        }
        let op = Op::HcPre { hc: self.hyper_connection(), weights };
        self.node(scope, Kind::HyperConnection, op, &[streams], &outputs);
        if let Some(pre) = outputs.get(2) {
            self.debug_tap(scope, roles.taps[0], *pre);
        }
        self.debug_tap(scope, roles.taps[1], mix);
        let input = self.norm(scope, roles.norm, collapsed);
        self.debug_tap(scope, roles.taps[2], input);
        (input, mix)
    }

    fn merge(&mut self, scope: Scope, streams: ValueId, output: ValueId, mix: ValueId) -> ValueId {
        let op = Op::HcPost { hc: self.hyper_connection() };
        self.in_place(scope, Kind::HyperConnection, op, &[streams, output, mix])
    }

    fn tap_streams(&mut self, scope: Scope, streams: ValueId) {
        if self.signature.debug_blocks.is_some() {
            // The next merge overwrites the streams.
            let cols = self.builder.cols(streams);
            let copy = self.unary(scope, Kind::HyperConnection, Op::Copy, &[streams], cols);
            self.builder.tap(scope, "streams", copy);
        }
    }

    fn norm(&mut self, scope: Scope, role: Role, input: ValueId) -> ValueId {
        let cols = self.builder.cols(input);
        let op = Op::RmsNorm { weight: vector(scope, role, cols), eps: self.config.rms_norm_eps as f32 };
        self.unary(scope, Kind::Norm, op, &[input], cols)
    }

    /// Products of `input` with weights that share it; the kind is that of the first.
    fn linear(&mut self, scope: Scope, input: ValueId, weights: &[WeightRef]) -> Vec<ValueId> {
        let kind = match weights[0].key.role {
            Role::CompressorWkv if self.is_csa(scope) => Kind::CsaCompressor,
            Role::CompressorWkv => Kind::HcaCompressor,
            role => Kind::of_projection(role),
        };
        let outputs: Vec<ValueId> = weights.iter().map(|w| self.builder.value(w.rows, Element::F32)).collect();
        self.node(scope, kind, Op::Linear { weights: weights.to_vec() }, &[input], &outputs);
        outputs
    }

    fn is_csa(&self, scope: Scope) -> bool {
        matches!(scope, Scope::Layer(layer) if self.config.layer_kind(usize::from(layer)) == LayerKind::Csa)
    }

    fn trunk_attention(&mut self, scope: Scope, kind: LayerKind, input: ValueId) -> ValueId {
        let emitter = self.emitter;
        let freqs = if kind == LayerKind::Swa { &emitter.plain_freqs } else { &emitter.compress_freqs };
        let chooses = kind == LayerKind::Csa && self.signature.select;
        let queries = self.queries(scope, input, freqs, chooses);
        let rows = self.kv_rows(scope, input, freqs);
        self.append_window(scope, rows);
        let mut ids = None;
        let ratio = match kind {
            LayerKind::Swa => 0,
            LayerKind::Csa => {
                self.compress(scope, input, 4);
                ids = self.select(scope, input, queries.index);
                4
            }
            LayerKind::Hca { ratio } => {
                self.compress(scope, input, ratio);
                ratio
            }
        };
        let inputs: Vec<ValueId> = std::iter::once(queries.rotated).chain(ids).collect();
        self.attend(scope, &inputs, ratio, AttentionPattern::Causal, freqs)
    }

    fn draft_attention(&mut self, scope: Scope, input: ValueId) -> ValueId {
        let freqs = &self.emitter.plain_freqs;
        let queries = self.queries(scope, input, freqs, false);
        let rows = self.kv_rows(scope, input, freqs);
        self.attend(scope, &[queries.rotated, rows], 0, AttentionPattern::Block, freqs)
    }

    /// With `chooses` also the indexer's, from the same input: one operation for both (a stack).
    fn queries(&mut self, scope: Scope, input: ValueId, freqs: &Arc<[f64]>, chooses: bool) -> Queries {
        let c = self.config;
        let (heads, width) = (c.num_attention_heads, c.num_attention_heads * c.head_dim);
        let low = self.linear(scope, input, &[weight(scope, Role::WqA, c.q_lora_rank, c.hidden_size)])[0];
        let low_rank = self.norm(scope, Role::QNorm, low);
        self.debug_tap(scope, "q_lora", low_rank);
        let mut weights = vec![weight(scope, Role::WqB, width, c.q_lora_rank)];
        if chooses {
            weights.push(weight(scope, Role::IndexerWqB, c.index_n_heads * c.index_head_dim, c.q_lora_rank));
        }
        let outputs = self.linear(scope, low_rank, &weights);
        let (raw, index) = (outputs[0], outputs.get(1).copied());
        let op = Op::Rope {
            heads,
            rope: Rope { freqs: Arc::clone(freqs), inverse: false },
            head_norm_eps: Some(c.rms_norm_eps as f32),
            rounding: RowRounding::None,
        };
        let rotated = self.in_place(scope, Kind::Norm, op, &[raw]);
        self.debug_tap(scope, "q", rotated);
        Queries { rotated, index }
    }

    /// Rotated key/value rows `[T, d]`.
    fn kv_rows(&mut self, scope: Scope, input: ValueId, freqs: &Arc<[f64]>) -> ValueId {
        let c = self.config;
        let raw = self.linear(scope, input, &[weight(scope, Role::Wkv, c.head_dim, c.hidden_size)])[0];
        let normed = self.norm(scope, Role::KvNorm, raw);
        let op = Op::Rope {
            heads: 1,
            rope: Rope { freqs: Arc::clone(freqs), inverse: false },
            head_norm_eps: None,
            rounding: self.kv_rounding(),
        };
        let rows = self.in_place(scope, Kind::Norm, op, &[normed]);
        self.debug_tap(scope, "kv", rows);
        rows
    }

    fn append_window(&mut self, scope: Scope, rows: ValueId) {
        let state = vec![edge(scope, StatePart::Window, Access::Write)];
        let (inputs, outputs, kind) = (vec![rows], Vec::new(), Kind::Attention);
        self.builder.push(Node { op: Op::AppendWindow, inputs, outputs, scope, kind, state });
    }

    /// The layer's own compressor.
    fn compress(&mut self, scope: Scope, input: ValueId, ratio: usize) {
        let roles = [Role::CompressorWkv, Role::CompressorWgate, Role::CompressorApe, Role::CompressorNorm];
        self.compressor(scope, input, ratio, self.config.head_dim, roles, StatePart::Compressed);
    }

    fn compressor(
        &mut self,
        scope: Scope,
        input: ValueId,
        ratio: usize,
        dim: usize,
        [wkv, wgate, ape, norm]: [Role; 4],
        part: StatePart,
    ) {
        let overlap = ratio == 4;
        let width = if overlap { 2 * dim } else { dim };
        let hidden = self.config.hidden_size;
        let pair = [weight(scope, wkv, width, hidden), weight(scope, wgate, width, hidden)];
        let projected = self.linear(scope, input, &pair);
        let rounding = if part == StatePart::Index { self.index_rounding() } else { self.kv_rounding() };
        let compressor = Compressor {
            ratio,
            overlap,
            dim,
            ape: weight(scope, ape, ratio, width),
            norm: vector(scope, norm, dim),
            norm_eps: self.config.rms_norm_eps as f32,
            freqs: Arc::clone(&self.emitter.compress_freqs),
            rounding,
        };
        let kind = match part {
            StatePart::Index => Kind::IndexerCompressor,
            _ if overlap => Kind::CsaCompressor,
            _ => Kind::HcaCompressor,
        };
        let state = vec![edge(scope, part, Access::Write)];
        self.builder.push(Node {
            op: Op::Compress { compressor },
            inputs: projected,
            outputs: Vec::new(),
            scope,
            kind,
            state,
        });
    }

    /// The indexer: its compressor always runs, since later queries need its rows; scores only if there is a choice.
    fn select(&mut self, scope: Scope, input: ValueId, queries: Option<ValueId>) -> Option<ValueId> {
        let c = self.config;
        let roles = [
            Role::IndexerCompressorWkv,
            Role::IndexerCompressorWgate,
            Role::IndexerCompressorApe,
            Role::IndexerCompressorNorm,
        ];
        self.compressor(scope, input, 4, c.index_head_dim, roles, StatePart::Index);
        let raw = queries?;
        let (heads, dim) = (c.index_n_heads, c.index_head_dim);
        let op = Op::Rope {
            heads,
            rope: Rope { freqs: Arc::clone(&self.emitter.compress_freqs), inverse: false },
            head_norm_eps: None,
            rounding: self.index_rounding(),
        };
        let queries = self.in_place(scope, Kind::Norm, op, &[raw]);
        self.debug_tap(scope, "index_q", queries);
        let weights = self.linear(scope, input, &[weight(scope, Role::IndexerWeightsProj, heads, c.hidden_size)])[0];
        let ids = self.builder.value(c.index_topk, Element::I32);
        let mut outputs = vec![ids];
        if let Some(blocks) = self.signature.debug_blocks {
            let scores = self.builder.value(blocks, Element::F32);
            self.builder.tap(scope, "index_scores", scores);
            outputs.push(scores);
        }
        self.debug_tap(scope, "index_topk", ids);
        let indexer = Indexer { heads, dim, top_k: c.index_topk, ratio: 4 };
        self.builder.push(Node {
            op: Op::IndexTopk { indexer },
            inputs: vec![queries, weights],
            outputs,
            scope,
            kind: Kind::IndexScores,
            state: vec![edge(scope, StatePart::Index, Access::Read)],
        });
        Some(ids)
    }

    /// Attention core, inverse rotation at the query's position, grouped output projection.
    fn attend(
        &mut self,
        scope: Scope,
        inputs: &[ValueId],
        ratio: usize,
        pattern: AttentionPattern,
        freqs: &Arc<[f64]>,
    ) -> ValueId {
        let c = self.config;
        let (heads, head_dim) = (c.num_attention_heads, c.head_dim);
        let sink = vector(scope, Role::AttnSink, heads);
        let attention = Attention { heads, head_dim, window: c.sliding_window, ratio, sink, pattern };
        let mut state = vec![edge(scope, StatePart::Window, Access::Read)];
        if ratio > 0 {
            state.push(edge(scope, StatePart::Compressed, Access::Read));
        }
        let output = self.builder.value(heads * head_dim, Element::F32);
        self.builder.push(Node {
            op: Op::Attend { attention },
            inputs: inputs.to_vec(),
            outputs: vec![output],
            scope,
            kind: Kind::Attention,
            state,
        });
        let op = Op::Rope {
            heads,
            rope: Rope { freqs: Arc::clone(freqs), inverse: true },
            head_norm_eps: None,
            rounding: RowRounding::None,
        };
        let output = self.in_place(scope, Kind::Attention, op, &[output]);
        self.debug_tap(scope, "attn_heads", output);
        let (groups, rank) = (c.o_groups, c.o_groups * c.o_lora_rank);
        let wo_a = weight(scope, Role::WoA, rank, heads * head_dim / groups);
        let op = Op::GroupedLinear { weight: wo_a, groups };
        let low_rank = self.unary(scope, Kind::WoA, op, &[output], rank);
        let output = self.linear(scope, low_rank, &[weight(scope, Role::WoB, c.hidden_size, rank)])[0];
        self.debug_tap(scope, "attn_out", output);
        output
    }

    fn feed_forward(&mut self, scope: Scope, hashed: bool, input: ValueId) -> ValueId {
        let c = self.config;
        let (experts, top_k, dim) = (c.n_routed_experts, c.num_experts_per_tok, c.hidden_size);
        // Before the router and the routed experts, so that its memory makes it wait for neither: it may run beside them.
        let shared = self.shared_expert(scope, input);
        let logits = self.linear(scope, input, &[weight(scope, Role::Gate, experts, dim)])[0];
        let router = Router {
            scoring: match c.scoring_func {
                ScoringFunc::SqrtSoftplus => Scoring::SqrtSoftplus,
                ScoringFunc::Sigmoid => Scoring::Sigmoid,
                ScoringFunc::Softmax => Scoring::Softmax,
            },
            experts,
            top_k,
            bias: (!hashed).then(|| vector(scope, Role::GateBias, experts)),
            table: hashed.then(|| weight(scope, Role::GateTid2eid, c.vocab_size, top_k)),
            normalise: c.norm_topk_prob,
            scaling: c.routed_scaling_factor as f32,
        };
        let ids = self.builder.value(top_k, Element::I32);
        let weights = self.builder.value(top_k, Element::F32);
        let mut outputs = vec![ids, weights];
        if self.signature.debug_blocks.is_some() {
            let scores = self.builder.value(experts, Element::F32);
            self.builder.tap(scope, "router_scores", scores);
            outputs.push(scores);
        }
        self.node(scope, Kind::Gate, Op::Route { router }, &[logits], &outputs);
        self.debug_tap(scope, "expert_ids", ids);
        self.debug_tap(scope, "expert_weights", weights);
        let routed = self.routed_experts(scope, [input, ids, weights]);
        let output = self.in_place(scope, Kind::SharedExpert, Op::Add, &[routed, shared]);
        self.debug_tap(scope, "ffn_out", output);
        output
    }

    /// Several nodes that continue one accumulator, so that other work can run between them.
    fn routed_experts(&mut self, scope: Scope, inputs: [ValueId; 3]) -> ValueId {
        let c = self.config;
        let (experts, dim, inner) = (c.n_routed_experts, c.hidden_size, c.moe_intermediate_size);
        let nodes = if self.signature.rows <= MAX_DECODE_ROWS { 1 } else { EXPERT_NODES.min(experts) };
        let mut sum = None;
        for part in 0..nodes {
            let range = part * experts / nodes..(part + 1) * experts / nodes;
            let refs = |role: fn(u16) -> Role, rows, cols| -> Vec<WeightRef> {
                range.clone().map(|expert| weight(scope, role(expert as u16), rows, cols)).collect()
            };
            let op = Op::Experts {
                first: range.start,
                w1: refs(Role::ExpertW1, inner, dim),
                w2: refs(Role::ExpertW2, dim, inner),
                w3: refs(Role::ExpertW3, inner, dim),
                top_k: c.num_experts_per_tok,
                limit: c.swiglu_limit.map(|limit| limit as f32),
            };
            let inputs: Vec<ValueId> = inputs.into_iter().chain(sum).collect();
            sum = Some(self.unary(scope, Kind::RoutedExperts, op, &inputs, dim));
        }
        sum.expect("a layer has at least one expert")
    }

    fn shared_expert(&mut self, scope: Scope, input: ValueId) -> ValueId {
        let (dim, inner) = (self.config.hidden_size, self.config.moe_intermediate_size);
        let op = Op::SharedExpert {
            w1: weight(scope, Role::SharedW1, inner, dim),
            w2: weight(scope, Role::SharedW2, dim, inner),
            w3: weight(scope, Role::SharedW3, inner, dim),
            limit: self.config.swiglu_limit.map(|limit| limit as f32),
        };
        self.unary(scope, Kind::SharedExpert, op, &[input], dim)
    }
}

fn edge(scope: Scope, part: StatePart, access: Access) -> StateEdge {
    StateEdge { scope, part, access }
}
