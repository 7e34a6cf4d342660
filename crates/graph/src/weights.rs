//! Names of a model's weights, as operations refer to them.
//!
//! A checkpoint may call a tensor what it likes; `model` maps its names to these keys. Shapes are in section 3.1 of the
//! model spec.

use std::fmt;

use troika_base::StoredTensor;

/// Which part of the model a weight belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Shared by the whole model: embedding, head, final norm and collapse.
    Model,
    /// Trunk layer, 0-based.
    Layer(u16),
    /// Drafter stage, 0-based (`mtp.s`).
    Stage(u16),
}

/// What a weight is for, in the names of the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    Embed,
    Head,
    Norm,
    HcHeadFn,
    HcHeadBase,
    HcHeadScale,
    AttnNorm,
    FfnNorm,
    HcAttnFn,
    HcAttnBase,
    HcAttnScale,
    HcFfnFn,
    HcFfnBase,
    HcFfnScale,
    AttnSink,
    WqA,
    QNorm,
    WqB,
    Wkv,
    KvNorm,
    WoA,
    WoB,
    CompressorWkv,
    CompressorWgate,
    CompressorApe,
    CompressorNorm,
    IndexerWqB,
    IndexerWeightsProj,
    IndexerCompressorWkv,
    IndexerCompressorWgate,
    IndexerCompressorApe,
    IndexerCompressorNorm,
    Gate,
    GateBias,
    GateTid2eid,
    SharedW1,
    SharedW2,
    SharedW3,
    /// Routed expert, gate projection.
    ExpertW1(u16),
    /// Routed expert, down projection.
    ExpertW2(u16),
    /// Routed expert, up projection.
    ExpertW3(u16),
    MainProj,
    MainNorm,
    MarkovW1,
    MarkovW2,
    ConfidenceProj,
}

/// One weight of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WeightKey {
    /// Where it belongs.
    pub scope: Scope,
    /// What it is for.
    pub role: Role,
}

impl WeightKey {
    /// A weight of a trunk layer.
    pub fn layer(layer: u16, role: Role) -> Self {
        Self { scope: Scope::Layer(layer), role }
    }

    /// A weight shared by the whole model.
    pub fn model(role: Role) -> Self {
        Self { scope: Scope::Model, role }
    }
}

impl fmt::Display for WeightKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.scope {
            Scope::Model => {}
            Scope::Layer(layer) => write!(f, "layers.{layer}.")?,
            Scope::Stage(stage) => write!(f, "mtp.{stage}.")?,
        }
        write!(f, "{:?}", self.role)
    }
}

/// A weight as an operation uses it: its key and logical shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightRef {
    pub key: WeightKey,
    /// Output channels; 1 for vectors.
    pub rows: usize,
    /// Input channels.
    pub cols: usize,
}

/// Where a device gets the weights it loads.
pub trait WeightSource {
    /// The stored form of `key`, or `None` if the model has no such weight. Vectors come as one row.
    fn tensor(&self, key: WeightKey) -> Option<StoredTensor>;

    /// Every key the source holds, in a fixed order.
    fn keys(&self) -> Vec<WeightKey>;
}
