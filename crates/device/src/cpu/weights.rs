//! Weights as the CPU uses them: matrices stay as stored or are packed for integer products, small vectors become `f32`
//! once.

use std::collections::HashMap;

use troika_base::{Format, NumericClass, StoredTensor};
use troika_graph::{Role, Scope, WeightKey, WeightRef, WeightSource};
use troika_kernels::int8::{Int8Expert, Int8Matrix};
use troika_kernels::{Ctx, ExpertWeights, to_f32, to_i32};

use crate::DeviceError;

/// One routed expert.
struct Expert {
    w1: StoredTensor,
    w2: StoredTensor,
    w3: StoredTensor,
}

/// A matrix in the form its products want.
pub(super) enum Weight {
    /// As stored; products in `f32`.
    Float(StoredTensor),
    /// Integer products.
    Int8(Int8Matrix),
}

impl Weight {
    /// Class `fast` has integer products with fp4 weights, which stay as they are, and with fp8 weights, which are copied
    /// into rounded and packed form. A shared expert is packed whatever its format, since its three products are one
    /// operation, and so are the head and the compressors, which are what a decoded token reads most of after the experts.
    /// Other formats belong to small or sensitive weights (router, indexer weights). `fast-fp8-exact` rounds no weight.
    fn new(ctx: Ctx, class: NumericClass, role: Role, tensor: StoredTensor) -> Self {
        match weight_form(class, role, tensor.format()) {
            WeightForm::Stored => Self::Float(tensor),
            WeightForm::StoredIntegers => Self::Int8(Int8Matrix::refer(&tensor).expect("its codes are integers")),
            WeightForm::Packed => {
                let packed = Int8Matrix::pack(ctx, &tensor);
                // Nothing reads the stored numbers again, so they need not take up memory a second time.
                tensor.release();
                Self::Int8(packed)
            }
        }
    }

    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Float(w) => (w.rows(), w.cols()),
            Self::Int8(w) => (w.rows(), w.cols()),
        }
    }
}

/// The form in which the CPU keeps a matrix other than a routed expert's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightForm {
    /// As stored; products in `f32`.
    Stored,
    /// As stored; integer products.
    StoredIntegers,
    /// Copied into rounded form; integer products.
    Packed,
}

/// What becomes of a matrix of `format` in class `class`. Shared experts are one operation, so their three parts agree.
pub fn weight_form(class: NumericClass, role: Role, format: Format) -> WeightForm {
    let looked_up = matches!(role, Role::Embed | Role::MarkovW1 | Role::MarkovW2 | Role::ConfidenceProj);
    let shared = matches!(role, Role::SharedW1 | Role::SharedW2 | Role::SharedW3);
    let compressor = matches!(
        role,
        Role::CompressorWkv | Role::CompressorWgate | Role::IndexerCompressorWkv | Role::IndexerCompressorWgate
    );
    match (class, format) {
        (NumericClass::Exact | NumericClass::Official, _) => WeightForm::Stored,
        _ if looked_up => WeightForm::Stored,
        (NumericClass::FastFp8Exact, Format::Mxfp4) if !shared => WeightForm::StoredIntegers,
        (NumericClass::FastFp8Exact, _) => WeightForm::Stored,
        (NumericClass::Fast, Format::Mxfp4) => WeightForm::StoredIntegers,
        (NumericClass::Fast, Format::Fp8Tile { .. } | Format::Mxfp8) => WeightForm::Packed,
        (NumericClass::Fast, _) if shared || compressor || role == Role::Head => WeightForm::Packed,
        (NumericClass::Fast, _) => WeightForm::Stored,
    }
}

/// What a weight takes up once the CPU has loaded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightMemory {
    /// Whether the stored bytes are read again with every step.
    pub stays_mapped: bool,
    /// Bytes of memory beside the stored ones.
    pub copied_bytes: u64,
}

/// What becomes of a weight in class `class`.
pub fn weight_memory(class: NumericClass, role: Role, tensor: &StoredTensor) -> WeightMemory {
    let numbers = (tensor.rows() * tensor.cols()) as u64;
    match role {
        Role::ExpertW1(_) | Role::ExpertW2(_) | Role::ExpertW3(_) => {
            WeightMemory { stays_mapped: true, copied_bytes: 0 }
        }
        Role::GateTid2eid => WeightMemory { stays_mapped: false, copied_bytes: numbers * 4 },
        role if is_vector(role) => WeightMemory { stays_mapped: false, copied_bytes: numbers * 4 },
        role => match weight_form(class, role, tensor.format()) {
            WeightForm::Stored | WeightForm::StoredIntegers => WeightMemory { stays_mapped: true, copied_bytes: 0 },
            WeightForm::Packed => WeightMemory {
                stays_mapped: false,
                copied_bytes: Int8Matrix::packed_bytes(tensor.rows(), tensor.cols()),
            },
        },
    }
}

/// The routed experts of a layer.
enum ExpertBank {
    Float(Vec<Expert>),
    /// `w1`, `w2`, `w3` of each, read as stored.
    Int8(Vec<[Int8Matrix; 3]>),
}

/// Routed experts of one node.
pub(super) enum Experts<'a> {
    Float(Vec<ExpertWeights<'a>>),
    Int8(Vec<Int8Expert<'a>>),
}

/// Every weight of a model.
pub(super) struct CpuWeights {
    class: NumericClass,
    matrices: HashMap<WeightKey, Weight>,
    vectors: HashMap<WeightKey, Vec<f32>>,
    tables: HashMap<WeightKey, Vec<i32>>,
    experts: HashMap<Scope, ExpertBank>,
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
    pub(super) fn load(ctx: Ctx, source: &dyn WeightSource, class: NumericClass) -> Result<Self, DeviceError> {
        let mut banks: HashMap<Scope, Vec<Expert>> = HashMap::new();
        let mut loaded = Self {
            class,
            matrices: HashMap::new(),
            vectors: HashMap::new(),
            tables: HashMap::new(),
            experts: HashMap::new(),
        };
        for key in source.keys() {
            let missing = || DeviceError::Weight { key, reason: "announced but not there".to_owned() };
            let tensor = source.tensor(key).ok_or_else(missing)?;
            match key.role {
                Role::ExpertW1(expert) => {
                    let part = |role| source.tensor(WeightKey { scope: key.scope, role }).ok_or_else(missing);
                    let (w2, w3) = (part(Role::ExpertW2(expert))?, part(Role::ExpertW3(expert))?);
                    let experts = banks.entry(key.scope).or_default();
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
                    tensor.release();
                }
                Role::GateTid2eid => {
                    let table = to_i32(&tensor).map_err(|e| DeviceError::Weight { key, reason: e.to_string() })?;
                    loaded.tables.insert(key, table);
                    tensor.release();
                }
                _ => {
                    float(key, &tensor)?;
                    loaded.matrices.insert(key, Weight::new(ctx, class, key.role, tensor));
                }
            }
        }
        loaded.experts = banks.into_iter().map(|(scope, experts)| (scope, ExpertBank::new(class, experts))).collect();
        Ok(loaded)
    }

    /// Whether attention and index scores round queries and rows to integers.
    pub(super) fn rounds_rows(&self) -> bool {
        self.class.rounds_rows()
    }

    /// # Panics
    ///
    /// If the model has no such matrix or it has another shape: graph and weights come from the same configuration.
    pub(super) fn matrix(&self, weight: &WeightRef) -> &Weight {
        let matrix = self.matrices.get(&weight.key).unwrap_or_else(|| panic!("no matrix {}", weight.key));
        assert_eq!(matrix.shape(), (weight.rows, weight.cols), "shape of {}", weight.key);
        matrix
    }

    /// A matrix whose rows are looked up, or which is multiplied in `f32` in every class.
    ///
    /// # Panics
    ///
    /// As [`Self::matrix`].
    pub(super) fn table_of_rows(&self, weight: &WeightRef) -> &StoredTensor {
        match self.matrix(weight) {
            Weight::Float(tensor) => tensor,
            Weight::Int8(_) => panic!("{} was packed", weight.key),
        }
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
    pub(super) fn experts(&self, scope: Scope, first: usize, count: usize) -> Experts<'_> {
        let range = first..first + count;
        match self.experts.get(&scope).unwrap_or_else(|| panic!("no experts in {scope:?}")) {
            ExpertBank::Float(experts) => {
                let part = experts[range].iter();
                Experts::Float(part.map(|Expert { w1, w2, w3 }| ExpertWeights { w1, w2, w3 }).collect())
            }
            ExpertBank::Int8(experts) => {
                Experts::Int8(experts[range].iter().map(|[w1, w2, w3]| Int8Expert { w1, w2, w3 }).collect())
            }
        }
    }
}

impl ExpertBank {
    /// Routed experts are most of a model, so they are never copied: integer products only where the stored form allows it.
    fn new(class: NumericClass, experts: Vec<Expert>) -> Self {
        let refer =
            |e: &Expert| Some([Int8Matrix::refer(&e.w1)?, Int8Matrix::refer(&e.w2)?, Int8Matrix::refer(&e.w3)?]);
        let int8 =
            class.has_integer_products().then(|| experts.iter().map(refer).collect::<Option<Vec<_>>>()).flatten();
        int8.map_or(Self::Float(experts), Self::Int8)
    }
}

fn float(key: WeightKey, tensor: &StoredTensor) -> Result<(), DeviceError> {
    match tensor.format() {
        Format::I32 | Format::I64 => Err(DeviceError::Weight { key, reason: "holds integers, not numbers".to_owned() }),
        _ => Ok(()),
    }
}
