//! The graph emitter: a DeepSeek-V4 step as a [`StepGraph`]. Pure and cheap; needs no weights, so the real model can be
//! emitted, costed and planned anywhere.
//!
//! [`Emitter::trunk`] is the model of section 5 of the spec, [`Emitter::draft`] the DSpark block of section 10.2.
//! `block.rs` has the parts that both share, `official.rs` the stored sizes of weights that are not at hand.

mod block;
mod official;

use std::sync::Arc;

use troika_base::NumericClass;
use troika_graph::op::{HyperConnection, RowRounding};
use troika_graph::stack::{attention_inputs, stack_products};
use troika_graph::{Element, GraphBuilder, Kind, Node, Op, Role, Scope, StepGraph, ValueId, WeightKey, WeightRef};

use crate::config::{LayerKind, ModelConfig};
use crate::rope::inverse_frequencies;

pub use official::{official_bytes, official_format};

/// Most rows of a step that counts as decode or verification; such a step has one routed-experts node per layer, since
/// there is nothing to run in between.
pub const MAX_DECODE_ROWS: usize = 8;
/// Routed-experts nodes per layer of a prefill step: what engines finish meanwhile is seen after a node.
const EXPERT_NODES: usize = 8;

/// What a checkpoint says beyond its configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// Per trunk layer: experts are chosen by token id.
    pub hash_layers: Vec<bool>,
    /// Drafter stages, 0 = none.
    pub num_stages: usize,
}

impl ModelFacts {
    /// What the configuration leads one to expect, for graphs without weights.
    pub fn expected(config: &ModelConfig) -> Self {
        Self {
            hash_layers: (0..config.num_hidden_layers).map(|layer| layer < config.num_hash_layers).collect(),
            num_stages: config.dspark.as_ref().map_or(0, |dspark| dspark.target_layer_ids.len()),
        }
    }
}

/// What a template depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepSignature {
    /// Rows of all sequences.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub logit_rows: usize,
    /// Some row sees more compressed rows than the indexer keeps, so that a selection is needed.
    pub select: bool,
    /// Rounding of cache rows.
    pub class: NumericClass,
    /// Also compute the drafter's context rows.
    pub draft_context: bool,
    /// Keep every intermediate value as a tap. `Some(blocks)` is the width of the kept index scores.
    pub debug_blocks: Option<usize>,
}

/// Emits steps of one model.
#[derive(Clone, Debug)]
pub struct Emitter {
    config: ModelConfig,
    facts: ModelFacts,
    plain_freqs: Arc<[f64]>,
    compress_freqs: Arc<[f64]>,
    stacks_inputs: bool,
}

impl Emitter {
    pub fn new(config: ModelConfig, facts: ModelFacts) -> Self {
        assert_eq!(facts.hash_layers.len(), config.num_hidden_layers, "one entry per layer");
        let dim = config.qk_rope_head_dim;
        let plain_freqs = inverse_frequencies(dim, config.rope_theta, None).into();
        let compress_freqs = inverse_frequencies(dim, config.compress_rope_theta, config.rope_scaling.as_ref()).into();
        Self { config, facts, plain_freqs, compress_freqs, stacks_inputs: false }
    }

    /// With the projections that share a layer's input as one operation, if that is wanted: for engines, which are handed each
    /// operation by itself.
    #[must_use]
    pub fn stacking_inputs(self, stacks_inputs: bool) -> Self {
        Self { stacks_inputs, ..self }
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    /// True if some row of a step that sees `context` tokens needs the indexer to choose (spec 8.2).
    pub fn needs_selection(&self, context: usize) -> bool {
        let has_csa = (0..self.config.num_hidden_layers).any(|layer| self.config.layer_kind(layer) == LayerKind::Csa);
        has_csa && context / 4 > self.config.index_topk
    }

    /// One forward pass of the trunk.
    pub fn trunk(&self, signature: &StepSignature) -> StepGraph {
        let mut step = self.step(signature);
        let mut streams = step.embed();
        let mut targets = Vec::new();
        for layer in 0..self.config.num_hidden_layers {
            streams = step.trunk_layer(layer, streams);
            if signature.draft_context && self.draft_targets().contains(&(layer as u16)) {
                targets.push(step.stream_mean(layer, streams));
            }
        }
        if !targets.is_empty() {
            step.draft_context(&targets);
        }
        if signature.logit_rows > 0 {
            let rows = step.gather_rows(streams);
            let collapsed = step.head_collapse(Scope::Model, rows);
            step.logits(Scope::Model, collapsed);
        }
        let graph = step.builder.build();
        if self.stacks_inputs { stack_products(&graph, &attention_inputs) } else { graph }
    }

    /// The drafter's blocks of so many sequences: the newest token and noise in, draft ids and confidence out (spec 10.2).
    ///
    /// # Panics
    ///
    /// If the model has no drafter.
    pub fn draft(&self, class: NumericClass, sequences: usize, debug: bool) -> StepGraph {
        let dspark = self.config.dspark.as_ref().expect("the model has a drafter");
        let rows = sequences * dspark.block_size;
        let debug_blocks = debug.then_some(0);
        let signature =
            StepSignature { rows, logit_rows: rows, select: false, class, draft_context: false, debug_blocks };
        let mut step = self.step(&signature);
        let mut streams = step.embed();
        for stage in 0..self.facts.num_stages {
            streams = step.draft_stage(stage, streams);
        }
        let last = Scope::Stage(self.facts.num_stages as u16 - 1);
        let hidden = step.head_collapse(last, streams);
        let logits = step.logits(last, hidden);
        step.markov(last, logits, hidden, dspark.markov_rank);
        step.builder.build()
    }

    fn draft_targets(&self) -> &[u16] {
        match &self.config.dspark {
            Some(dspark) if self.facts.num_stages > 0 => &dspark.target_layer_ids,
            _ => &[],
        }
    }

    fn step(&self, signature: &StepSignature) -> StepEmitter<'_> {
        StepEmitter {
            emitter: self,
            config: &self.config,
            signature: *signature,
            builder: GraphBuilder::new(signature.rows, signature.logit_rows),
        }
    }
}

/// One step in the making.
struct StepEmitter<'a> {
    emitter: &'a Emitter,
    config: &'a ModelConfig,
    signature: StepSignature,
    builder: GraphBuilder,
}

impl StepEmitter<'_> {
    fn hyper_connection(&self) -> HyperConnection {
        HyperConnection {
            streams: self.config.hc_mult,
            dim: self.config.hidden_size,
            sinkhorn_iters: self.config.hc_sinkhorn_iters,
            hc_eps: self.config.hc_eps as f32,
            norm_eps: self.config.rms_norm_eps as f32,
        }
    }

    fn kv_rounding(&self) -> RowRounding {
        match self.signature.class {
            NumericClass::Exact | NumericClass::Fast | NumericClass::FastFp8Exact => RowRounding::None,
            NumericClass::Official => RowRounding::Fp8NonRotary,
        }
    }

    fn index_rounding(&self) -> RowRounding {
        match self.signature.class {
            NumericClass::Exact | NumericClass::Fast | NumericClass::FastFp8Exact => RowRounding::None,
            NumericClass::Official => RowRounding::HadamardFp4,
        }
    }

    /// A node with any number of outputs and no state.
    fn node(&mut self, scope: Scope, kind: Kind, op: Op, inputs: &[ValueId], outputs: &[ValueId]) {
        let (inputs, outputs) = (inputs.to_vec(), outputs.to_vec());
        self.builder.push(Node { op, inputs, outputs, scope, kind, state: Vec::new() });
    }

    /// A node with one new f32 output of the step's rows.
    fn unary(&mut self, scope: Scope, kind: Kind, op: Op, inputs: &[ValueId], cols: usize) -> ValueId {
        let output = self.builder.value(cols, Element::F32);
        self.node(scope, kind, op, inputs, &[output]);
        output
    }

    /// As [`Self::unary`], overwriting its first input.
    fn in_place(&mut self, scope: Scope, kind: Kind, op: Op, inputs: &[ValueId]) -> ValueId {
        let cols = self.builder.cols(inputs[0]);
        self.unary(scope, kind, op, inputs, cols)
    }

    fn debug_tap(&mut self, scope: Scope, name: &'static str, value: ValueId) {
        if self.signature.debug_blocks.is_some() {
            self.builder.tap(scope, name, value);
        }
    }

    fn embed(&mut self) -> ValueId {
        let (streams, dim) = (self.config.hc_mult, self.config.hidden_size);
        let table = weight(Scope::Model, Role::Embed, self.config.vocab_size, dim);
        self.unary(Scope::Model, Kind::Embed, Op::Embed { table, streams }, &[], streams * dim)
    }

    fn gather_rows(&mut self, streams: ValueId) -> ValueId {
        let rows = self.builder.num_logit_rows();
        let gathered = self.builder.value_of(rows, self.builder.cols(streams), Element::F32);
        self.node(Scope::Model, Kind::Head, Op::GatherRows, &[streams], &[gathered]);
        gathered
    }

    fn head_collapse(&mut self, scope: Scope, streams: ValueId) -> ValueId {
        let (s, dim) = (self.config.hc_mult, self.config.hidden_size);
        let weights = troika_graph::op::HcWeights {
            fn_: weight(scope, Role::HcHeadFn, s, s * dim),
            base: vector(scope, Role::HcHeadBase, s),
            scale: vector(scope, Role::HcHeadScale, 1),
        };
        let hidden = self.builder.value_of(self.builder.num_logit_rows(), dim, Element::F32);
        let op = Op::HcHead { hc: self.hyper_connection(), weights };
        self.node(scope, Kind::Head, op, &[streams], &[hidden]);
        self.debug_tap(scope, "collapsed", hidden);
        hidden
    }

    /// Final norm and head; the logits are tapped as `logits`.
    fn logits(&mut self, scope: Scope, hidden: ValueId) -> ValueId {
        let (rows, dim) = (self.builder.num_logit_rows(), self.config.hidden_size);
        let normed = self.builder.value_of(rows, dim, Element::F32);
        let op = Op::RmsNorm { weight: vector(scope, Role::Norm, dim), eps: self.config.rms_norm_eps as f32 };
        self.node(scope, Kind::Norm, op, &[hidden], &[normed]);
        self.debug_tap(scope, "normed", normed);
        let logits = self.builder.value_of(rows, self.config.vocab_size, Element::F32);
        let head = weight(Scope::Model, Role::Head, self.config.vocab_size, dim);
        self.node(scope, Kind::Head, Op::Linear { weights: vec![head] }, &[normed], &[logits]);
        if scope == Scope::Model {
            self.builder.tap(scope, "logits", logits);
        }
        logits
    }

    fn stream_mean(&mut self, layer: usize, streams: ValueId) -> ValueId {
        let op = Op::StreamMean { streams: self.config.hc_mult };
        self.unary(Scope::Layer(layer as u16), Kind::Drafter, op, &[streams], self.config.hidden_size)
    }

    fn markov(&mut self, scope: Scope, logits: ValueId, hidden: ValueId, rank: usize) {
        let (vocab, dim) = (self.config.vocab_size, self.config.hidden_size);
        let op = Op::MarkovDraft {
            w1: weight(scope, Role::MarkovW1, vocab, rank),
            w2: weight(scope, Role::MarkovW2, vocab, rank),
            confidence: weight(scope, Role::ConfidenceProj, 1, dim + rank),
        };
        let corrected = self.builder.value(vocab, Element::F32);
        let ids = self.builder.value(1, Element::I32);
        let confidence = self.builder.value(1, Element::F32);
        self.node(scope, Kind::Drafter, op, &[logits, hidden], &[corrected, ids, confidence]);
        self.builder.tap(scope, "draft_logits", corrected);
        self.builder.tap(scope, "draft_ids", ids);
        self.builder.tap(scope, "confidence", confidence);
    }
}

fn weight(scope: Scope, role: Role, rows: usize, cols: usize) -> WeightRef {
    WeightRef { key: WeightKey { scope, role }, rows, cols }
}

fn vector(scope: Scope, role: Role, len: usize) -> WeightRef {
    weight(scope, role, 1, len)
}
