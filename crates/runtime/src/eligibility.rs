//! Which projections of a model an engine could take part in, and why not the others: a dry run over the graph and the forms
//! of the stored tensors, before any weight is prepared (section 4.1 of the hybrid spec).

use troika_base::Format;
use troika_device::npu::Limits;
use troika_graph::{Kind, Op, Scope, StepGraph, WeightKey, WeightRef, WeightSource};

use crate::plan::projection_key;

/// Output channels that the primary device computes together, so that a grouped product must fill them.
const STRIP: usize = 8;

/// What is known of one projection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Eligibility {
    /// Its name in plans: the first weight.
    pub key: WeightKey,
    pub kind: Kind,
    /// All its weights, in the order of the operation.
    pub weights: Vec<WeightRef>,
    /// Groups of a block-diagonal product, 1 otherwise.
    pub groups: usize,
    /// Why no engine may take part.
    pub reason: Option<String>,
}

impl Eligibility {
    /// True if an engine may take part.
    pub fn is_eligible(&self) -> bool {
        self.reason.is_none()
    }

    /// Multiply-adds per row.
    pub fn work(&self) -> u64 {
        self.weights.iter().map(|weight| (weight.rows * weight.cols) as u64).sum()
    }
}

/// The projections of `graph`, in its order.
pub fn eligibility(graph: &StepGraph, source: &dyn WeightSource, limits: &Limits) -> Vec<Eligibility> {
    let projections = graph.nodes().iter().filter_map(|node| projection_key(&node.op).map(|key| (key, node)));
    projections
        .map(|(key, node)| {
            let (weights, groups) = (
                node.op.weights(),
                match node.op {
                    Op::GroupedLinear { groups, .. } => groups,
                    _ => 1,
                },
            );
            let reason = match key.scope {
                Scope::Layer(_) => weights.iter().find_map(|weight| refusal(weight, groups, source, limits)),
                Scope::Model | Scope::Stage(_) => {
                    Some("only layers of the trunk: others do not belong to prefill".into())
                }
            };
            Eligibility { key, kind: node.kind, weights, groups, reason }
        })
        .collect()
}

fn refusal(weight: &WeightRef, groups: usize, source: &dyn WeightSource, limits: &Limits) -> Option<String> {
    let Some(tensor) = source.tensor(weight.key) else { return Some(format!("{} is not there", weight.key)) };
    if matches!(tensor.format(), Format::I32 | Format::I64) {
        return Some(format!("{} holds integers", weight.key));
    }
    if !weight.cols.is_multiple_of(limits.input_alignment) {
        let multiple = limits.input_alignment;
        return Some(format!("{} inputs of {} are no multiple of {multiple}", weight.cols, weight.key));
    }
    let per_group = weight.rows / groups;
    (groups > 1 && !per_group.is_multiple_of(STRIP))
        .then(|| format!("groups of {per_group} outputs of {} are no multiple of {STRIP}", weight.key))
}
