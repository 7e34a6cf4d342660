//! Weights as the CPU uses them: matrices stay as stored, small vectors become `f32` once.

use std::collections::HashMap;

use troika_base::{Format, StoredTensor};
use troika_graph::{Role, Scope, WeightKey, WeightRef, WeightSource};
use troika_kernels::{ExpertWeights, to_f32, to_i32};

use crate::DeviceError;

/// One routed expert.
struct Expert {
    w1: StoredTensor,
    w2: StoredTensor,
    w3: StoredTensor,
}

/// Every weight of a model.
pub(super) struct CpuWeights {
    matrices: HashMap<WeightKey, StoredTensor>,
    vectors: HashMap<WeightKey, Vec<f32>>,
    tables: HashMap<WeightKey, Vec<i32>>,
    experts: HashMap<Scope, Vec<Expert>>,
}

/// True for weights that are used whole and element by element.
fn is_vector(role: Role) -> bool {
    matches!(
        role,
        Role::Norm
            | Role::HcHeadFn
            | Role::HcHeadBase
            | Role::HcHeadScale
            | Role::AttnNorm
            | Role::FfnNorm
            | Role::HcAttnFn
            | Role::HcAttnBase
            | Role::HcAttnScale
            | Role::HcFfnFn
            | Role::HcFfnBase
            | Role::HcFfnScale
            | Role::AttnSink
            | Role::QNorm
            | Role::KvNorm
            | Role::CompressorApe
            | Role::CompressorNorm
            | Role::IndexerCompressorApe
            | Role::IndexerCompressorNorm
            | Role::GateBias
            | Role::MainNorm
    )
}

impl CpuWeights {
    pub(super) fn load(source: &dyn WeightSource) -> Result<Self, DeviceError> {
        let mut loaded =
            Self { matrices: HashMap::new(), vectors: HashMap::new(), tables: HashMap::new(), experts: HashMap::new() };
        for key in source.keys() {
            let missing = || DeviceError::Weight { key, reason: "announced but not there".to_owned() };
            let tensor = source.tensor(key).ok_or_else(missing)?;
            match key.role {
                Role::ExpertW1(expert) => {
                    let part = |role| source.tensor(WeightKey { scope: key.scope, role }).ok_or_else(missing);
                    let (w2, w3) = (part(Role::ExpertW2(expert))?, part(Role::ExpertW3(expert))?);
                    let experts = loaded.experts.entry(key.scope).or_default();
                    if experts.len() != usize::from(expert) {
                        let reason = format!("experts must come in order, {} are there", experts.len());
                        return Err(DeviceError::Weight { key, reason });
                    }
                    experts.push(Expert { w1: tensor, w2, w3 });
                }
                Role::ExpertW2(_) | Role::ExpertW3(_) => {}
                role if is_vector(role) => {
                    float(key, &tensor)?;
                    loaded.vectors.insert(key, to_f32(&tensor));
                }
                Role::GateTid2eid => {
                    let table = to_i32(&tensor).map_err(|e| DeviceError::Weight { key, reason: e.to_string() })?;
                    loaded.tables.insert(key, table);
                }
                _ => {
                    float(key, &tensor)?;
                    loaded.matrices.insert(key, tensor);
                }
            }
        }
        Ok(loaded)
    }

    /// # Panics
    ///
    /// If the model has no such matrix or it has another shape: graph and weights come from the same configuration.
    pub(super) fn matrix(&self, weight: &WeightRef) -> &StoredTensor {
        let tensor = self.matrices.get(&weight.key).unwrap_or_else(|| panic!("no matrix {}", weight.key));
        assert_eq!((tensor.rows(), tensor.cols()), (weight.rows, weight.cols), "shape of {}", weight.key);
        tensor
    }

    /// # Panics
    ///
    /// As [`Self::matrix`].
    pub(super) fn vector(&self, weight: &WeightRef) -> &[f32] {
        let vector = self.vectors.get(&weight.key).unwrap_or_else(|| panic!("no vector {}", weight.key));
        assert_eq!(vector.len(), weight.rows * weight.cols, "length of {}", weight.key);
        vector
    }

    /// # Panics
    ///
    /// As [`Self::matrix`].
    pub(super) fn table(&self, weight: &WeightRef) -> &[i32] {
        let table = self.tables.get(&weight.key).unwrap_or_else(|| panic!("no table {}", weight.key));
        assert_eq!(table.len(), weight.rows * weight.cols, "length of {}", weight.key);
        table
    }

    /// Routed experts `first .. first + count` of a layer.
    ///
    /// # Panics
    ///
    /// As [`Self::matrix`].
    pub(super) fn experts(&self, scope: Scope, first: usize, count: usize) -> Vec<ExpertWeights<'_>> {
        let experts = self.experts.get(&scope).unwrap_or_else(|| panic!("no experts in {scope:?}"));
        let part = &experts[first..first + count];
        part.iter().map(|expert| ExpertWeights { w1: &expert.w1, w2: &expert.w2, w3: &expert.w3 }).collect()
    }
}

fn float(key: WeightKey, tensor: &StoredTensor) -> Result<(), DeviceError> {
    match tensor.format() {
        Format::I32 | Format::I64 => Err(DeviceError::Weight { key, reason: "holds integers, not numbers".to_owned() }),
        _ => Ok(()),
    }
}
