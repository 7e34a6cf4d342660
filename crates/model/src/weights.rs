//! From named tensors to weights: every weight the configuration demands is found, its format read off its tensors, and
//! its shape and scales checked. Whoever holds a [`WeightTable`] can run the model without meeting a malformed weight.
//!
//! Names and shapes come from [`crate::checkpoint::layout`]; `find.rs` does the finding. Nothing here copies or decodes
//! the numbers of a matrix.

mod find;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use troika_base::StoredTensor;
use troika_base::storage::StorageError;
use troika_graph::{Role, Scope, WeightKey, WeightSource};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::layout::Layout;
use crate::checkpoint::safetensors::Dtype;
use crate::emit::ModelFacts;

pub(crate) use find::Survey;

/// Why the weights of a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    #[error("{}: {reason}", path.display())]
    Layout { path: PathBuf, reason: String },
    #[error("{}: {summary}", path.display())]
    Missing { path: PathBuf, summary: MissingSummary },
    #[error("{}: tensor `{tensor}` has dtype {got}, must be {want}", file.display())]
    Dtype { file: PathBuf, tensor: String, got: Dtype, want: &'static str },
    #[error("{}: tensor `{tensor}` ({dtype}) has shape {got:?}, must be {want}", file.display())]
    Shape { file: PathBuf, tensor: String, dtype: Dtype, got: Vec<usize>, want: String },
    #[error("{}: tensor `{tensor}` cannot be read: {reason}", file.display())]
    Format { file: PathBuf, tensor: String, reason: String },
    #[error("{}: the parts of tensor `{tensor}` do not fit: {reason}", file.display())]
    Parts { file: PathBuf, tensor: String, reason: StorageError },
    #[error(
        "{}: tensor `{tensor}` has the scale {value} at {at:?}; scales must be finite, the file is damaged",
        file.display()
    )]
    Scale { file: PathBuf, tensor: String, value: f32, at: Vec<usize> },
    #[error(
        "{}: tensor `{tensor}` maps token {token} to expert {value}; there are {num_experts} experts",
        file.display()
    )]
    Table { file: PathBuf, tensor: String, token: usize, value: i64, num_experts: usize },
}

/// Whether to look at every scale. They are a sixteenth to a thirty-second of the weights and lie between them, so on a
/// checkpoint that does not fit in memory this reads most of the disk's pages: minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleCheck {
    /// Refuse NaN and infinite scales.
    All,
    /// Trust them.
    Skip,
}

impl ScaleCheck {
    /// All scales of a checkpoint of up to 16 GiB: a quarter of a second for 7 GB in memory.
    pub fn for_size(file_bytes: u64) -> Self {
        if file_bytes <= 16 << 30 { Self::All } else { Self::Skip }
    }
}

/// What a weight is part of, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightClass {
    Embed,
    Head,
    Norms,
    HyperConnections,
    Attention,
    Compressor,
    Indexer,
    Router,
    SharedExperts,
    RoutedExperts,
    Drafter,
}

impl WeightClass {
    /// The class of `key`. Everything of the drafter is [`Self::Drafter`].
    pub fn of(key: WeightKey) -> Self {
        if let Scope::Stage(_) = key.scope {
            return Self::Drafter;
        }
        match key.role {
            Role::Embed => Self::Embed,
            Role::Head => Self::Head,
            Role::Norm | Role::AttnNorm | Role::FfnNorm | Role::QNorm | Role::KvNorm | Role::MainNorm => Self::Norms,
            Role::HcHeadFn | Role::HcHeadBase | Role::HcHeadScale => Self::HyperConnections,
            Role::HcAttnFn | Role::HcAttnBase | Role::HcAttnScale => Self::HyperConnections,
            Role::HcFfnFn | Role::HcFfnBase | Role::HcFfnScale => Self::HyperConnections,
            Role::AttnSink | Role::WqA | Role::WqB | Role::Wkv | Role::WoA | Role::WoB => Self::Attention,
            Role::CompressorWkv | Role::CompressorWgate | Role::CompressorApe | Role::CompressorNorm => {
                Self::Compressor
            }
            Role::IndexerWqB | Role::IndexerWeightsProj => Self::Indexer,
            Role::IndexerCompressorWkv | Role::IndexerCompressorWgate => Self::Indexer,
            Role::IndexerCompressorApe | Role::IndexerCompressorNorm => Self::Indexer,
            Role::Gate | Role::GateBias | Role::GateTid2eid => Self::Router,
            Role::SharedW1 | Role::SharedW2 | Role::SharedW3 => Self::SharedExperts,
            Role::ExpertW1(_) | Role::ExpertW2(_) | Role::ExpertW3(_) => Self::RoutedExperts,
            Role::MainProj | Role::MarkovW1 | Role::MarkovW2 | Role::ConfidenceProj => Self::Drafter,
        }
    }
}

impl fmt::Display for WeightClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Embed => "embed",
            Self::Head => "head",
            Self::Norms => "norms",
            Self::HyperConnections => "hyper-connections",
            Self::Attention => "attention",
            Self::Compressor => "compressor",
            Self::Indexer => "indexer",
            Self::Router => "router",
            Self::SharedExperts => "shared experts",
            Self::RoutedExperts => "routed experts",
            Self::Drafter => "drafter",
        })
    }
}

/// Tensors that the configuration demands and no file has, by class.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MissingSummary {
    /// Class, number of tensors, name of the first.
    pub classes: BTreeMap<WeightClass, (usize, String)>,
}

impl MissingSummary {
    fn add(&mut self, key: WeightKey, tensor: String) {
        self.classes.entry(WeightClass::of(key)).or_insert((0, tensor)).0 += 1;
    }

    pub fn count(&self) -> usize {
        self.classes.values().map(|(count, _)| count).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }
}

impl fmt::Display for MissingSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count() {
            1 => f.write_str("1 tensor is missing")?,
            count => write!(f, "{count} tensors are missing")?,
        }
        for (i, (class, (count, first))) in self.classes.iter().enumerate() {
            let open = if i == 0 { ':' } else { ',' };
            match count {
                1 => write!(f, "{open} {class} `{first}`")?,
                _ => write!(f, "{open} {count} of {class} (first `{first}`)")?,
            }
        }
        Ok(())
    }
}

/// Whether the checkpoint brings a drafter that we can run.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "status", rename_all = "lowercase")]
pub enum DrafterStatus {
    Available { num_stages: u16 },
    Unavailable { reason: String },
}

impl fmt::Display for DrafterStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Available { num_stages } => write!(f, "mtp: available, {num_stages} stages"),
            Self::Unavailable { reason } => write!(f, "mtp: unavailable: {reason}"),
        }
    }
}

/// Every weight of a checkpoint, checked. Cloning shares the bytes.
#[derive(Clone, Debug)]
pub struct WeightTable {
    tensors: BTreeMap<WeightKey, StoredTensor>,
    layout: Layout,
    hash_layers: Vec<bool>,
    drafter: DrafterStatus,
    extra: Vec<String>,
    notes: Vec<String>,
}

impl WeightTable {
    /// Finds and checks every weight that the configuration of `checkpoint` demands. A drafter that is absent or
    /// incomplete is no error (see [`Self::drafter`]), nor are tensors that nothing needs (see [`Self::extra`]).
    ///
    /// Reads no matrix; tables of experts are read, and scales if `check` says so.
    pub fn build(checkpoint: &Checkpoint, check: ScaleCheck) -> Result<Self, WeightError> {
        let path = || match checkpoint.path() {
            path if path.as_os_str().is_empty() => PathBuf::from("checkpoint"),
            path => path.to_owned(),
        };
        let survey = Survey::take(checkpoint.files(), checkpoint.config(), check)
            .map_err(|reason| WeightError::Layout { path: path(), reason })?;
        if let Some(error) = survey.broken.into_iter().next() {
            return Err(error);
        }
        if !survey.missing.is_empty() {
            return Err(WeightError::Missing { path: path(), summary: survey.missing });
        }
        Ok(Self {
            tensors: survey.found,
            layout: survey.layout,
            hash_layers: survey.hash_layers,
            drafter: survey.drafter,
            extra: survey.extra,
            notes: survey.notes,
        })
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// For each trunk layer, whether it chooses experts by token id.
    pub fn hash_layers(&self) -> &[bool] {
        &self.hash_layers
    }

    pub fn drafter(&self) -> &DrafterStatus {
        &self.drafter
    }

    /// What the emitter has to know of the tensors.
    pub fn facts(&self) -> ModelFacts {
        let num_stages = match self.drafter {
            DrafterStatus::Available { num_stages } => num_stages.into(),
            DrafterStatus::Unavailable { .. } => 0,
        };
        ModelFacts { hash_layers: self.hash_layers.clone(), num_stages }
    }

    /// Names of tensors that no weight uses.
    pub fn extra(&self) -> &[String] {
        &self.extra
    }

    /// Where config.json says otherwise than the tensors, which decide.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Every weight in the order of [`WeightSource::keys`].
    pub fn iter(&self) -> impl Iterator<Item = (WeightKey, &StoredTensor)> {
        self.tensors.iter().map(|(&key, tensor)| (key, tensor))
    }
}

impl WeightSource for WeightTable {
    fn tensor(&self, key: WeightKey) -> Option<StoredTensor> {
        self.tensors.get(&key).cloned()
    }

    fn keys(&self) -> Vec<WeightKey> {
        self.tensors.keys().copied().collect()
    }
}
