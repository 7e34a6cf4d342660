//! The graph in the operations that were measured: projections of a layer that share an input are one *stack* and are handed
//! over once, and a shared expert that is to be split is two operations, gate with up and down.
//!
//! Only operations are regrouped. Work, values and dependencies are those of the emitted graph.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use troika_graph::op::{Attention, AttentionPattern};
use troika_graph::stack::{is_attention_input, stack_products};
use troika_graph::{
    Access, Element, GraphBuilder, Kind, Node, Op, Role, Scope, StateEdge, StatePart, StepGraph, ValueId, WeightKey,
    WeightRef,
};

use crate::profile::Chain;

/// Operations that engines may take part in, in the spelling of the hybrid spec (4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Projection {
    /// `wq_b`, with the indexer's in layers that have one.
    Query,
    WoA,
    WoB,
    /// Gate and up of the shared expert.
    Mlp,
    /// Down of the shared expert.
    MlpDown,
    /// The whole shared expert as one procedure.
    Shared,
    /// `wq_a` and `wkv`, with the compressor's pair in layers that have one.
    AttentionInput,
    /// The same in layers with an indexer, with its projections.
    AttentionInputSparse,
    /// Their members, on machines that are handed each by itself.
    WqA,
    Wkv,
    /// The compressor's pair.
    Compressor,
    IndexerCompressor,
}

impl Projection {
    pub const ALL: [Self; 12] = [
        Self::Query,
        Self::WoA,
        Self::WoB,
        Self::Mlp,
        Self::MlpDown,
        Self::Shared,
        Self::AttentionInput,
        Self::AttentionInputSparse,
        Self::WqA,
        Self::Wkv,
        Self::Compressor,
        Self::IndexerCompressor,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Query => "query",
            Self::WoA => "wo_a",
            Self::WoB => "wo_b",
            Self::Mlp => "mlp",
            Self::MlpDown => "mlp_down",
            Self::Shared => "shared",
            Self::AttentionInput => "attention_input",
            Self::AttentionInputSparse => "attention_input_sparse",
            Self::WqA => "wq_a",
            Self::Wkv => "wkv",
            Self::Compressor => "compressor",
            Self::IndexerCompressor => "indexer_compressor",
        }
    }

    /// What a node of a regrouped graph is, if engines may take part in it.
    pub fn of(node: &Node) -> Option<Self> {
        if !matches!(node.scope, Scope::Layer(_)) {
            return None;
        }
        match &node.op {
            Op::GroupedLinear { .. } => Some(Self::WoA),
            Op::SharedExpert { .. } => Some(Self::Shared),
            Op::Linear { weights } if node.kind == Kind::AttentionInput => {
                let has_indexer = weights.iter().any(|weight| weight.key.role == Role::IndexerWeightsProj);
                Some(if has_indexer { Self::AttentionInputSparse } else { Self::AttentionInput })
            }
            Op::Linear { weights } => match weights[0].key.role {
                Role::WqB => Some(Self::Query),
                Role::WoB => Some(Self::WoB),
                Role::SharedW1 => Some(Self::Mlp),
                Role::SharedW2 => Some(Self::MlpDown),
                Role::WqA => Some(Self::WqA),
                Role::Wkv => Some(Self::Wkv),
                Role::CompressorWkv => Some(Self::Compressor),
                Role::IndexerCompressorWkv => Some(Self::IndexerCompressor),
                _ => None,
            },
            _ => None,
        }
    }
}

impl fmt::Display for Projection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Projection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|projection| projection.name() == text).ok_or_else(|| {
            let known: Vec<&str> = Self::ALL.iter().map(|projection| projection.name()).collect();
            format!("no operation {text}; there are {}", known.join(", "))
        })
    }
}

/// A step of a model of which times are known and not operations: in each layer inputs, attention with everything else, MLP.
pub(crate) fn chain(chain: &Chain, rows: usize) -> StepGraph {
    let mut builder = GraphBuilder::new(rows, 0);
    let mut stream = builder.value(chain.hidden, Element::F32);
    let weight = |scope, role, rows, cols| WeightRef { key: WeightKey { scope, role }, rows, cols };
    let table = weight(Scope::Model, Role::Embed, 1, chain.hidden);
    let (inputs, outputs, state) = (Vec::new(), vec![stream], Vec::new());
    let (scope, kind) = (Scope::Model, Kind::Embed);
    builder.push(Node { op: Op::Embed { table, streams: 1 }, inputs, outputs, scope, kind, state });
    for layer in 0..chain.layers {
        let scope = Scope::Layer(layer as u16);
        let linear = |role, rows| Op::Linear { weights: vec![weight(scope, role, rows, chain.hidden)] };
        let sink = weight(scope, Role::AttnSink, 1, chain.heads);
        let (heads, head_dim, window, pattern) = (chain.heads, chain.head_dim, 0, AttentionPattern::Causal);
        let attend = Op::Attend { attention: Attention { heads, head_dim, window, ratio: 1, sink, pattern } };
        let nodes = [
            (linear(Role::WqA, chain.inputs), Kind::AttentionInput, chain.inputs),
            (attend, Kind::Attention, chain.hidden),
            (linear(Role::SharedW1, chain.mlp), Kind::SharedExpert, chain.mlp),
            (Op::ConcatColumns, Kind::SharedExpert, chain.hidden),
        ];
        for (op, kind, cols) in nodes {
            let output = builder.value(cols, Element::F32);
            let access = [Access::Read, Access::Write].into_iter().filter(|_| kind == Kind::Attention);
            let state = access.map(|access| StateEdge { scope, part: StatePart::Window, access }).collect();
            builder.push(Node { op, inputs: vec![stream], outputs: vec![output], scope, kind, state });
            stream = output;
        }
    }
    builder.build()
}

/// What a price is called that is no projection's.
pub(crate) fn operation_name(node: &Node) -> &'static str {
    match node.op {
        Op::Linear { .. } => node.kind.name(),
        _ => node.op.name(),
    }
}

/// Which stack a product belongs to, by the kind of its first member.
fn stack_of(weight: &WeightRef) -> Option<Kind> {
    match weight.key.role {
        Role::WqB | Role::IndexerWqB => Some(Kind::WqB),
        role => is_attention_input(role).then_some(Kind::AttentionInput),
    }
}

/// `graph` in the operations that were measured: what a layer's attention is given as one product if `stack_inputs`, and
/// `cut_shared` makes two of each shared expert.
pub(crate) fn regroup(graph: &StepGraph, stack_inputs: bool, cut_shared: bool) -> StepGraph {
    let graph = stack_products(graph, &|weight| stack_of(weight).filter(|kind| stack_inputs || *kind == Kind::WqB));
    if !cut_shared {
        return graph;
    }
    let mut builder = GraphBuilder::new(graph.num_rows(), graph.num_logit_rows());
    for value in graph.values() {
        builder.value_of(value.rows, value.cols, value.element);
    }
    for node in graph.nodes() {
        let Op::SharedExpert { w1, w2, w3, .. } = &node.op else {
            builder.push(node.clone());
            continue;
        };
        let inner = [*w1, *w3].map(|weight| builder.value(weight.rows, Element::F32)).to_vec();
        let mut push = |weights: Vec<WeightRef>, inputs: &[ValueId], outputs: &[ValueId]| {
            let (inputs, outputs, state) = (inputs.to_vec(), outputs.to_vec(), Vec::new());
            let (op, scope, kind) = (Op::Linear { weights }, node.scope, Kind::SharedExpert);
            builder.push(Node { op, inputs, outputs, scope, kind, state });
        };
        push(vec![*w1, *w3], &node.inputs, &inner);
        push(vec![*w2], &inner, &node.outputs);
    }
    for (tap, value) in graph.taps() {
        builder.tap(tap.scope, tap.name, *value);
    }
    builder.build()
}
