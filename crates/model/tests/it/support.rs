//! Shared by the tests: the oracle's checkpoints, and a safetensors writer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use troika_base::{Format, SharedBytes, StoredTensor};
use troika_model::checkpoint::safetensors::{Dtype, read_header};
use troika_model::{Checkpoint, ScaleCheck, WeightTable, read_file};

/// One of the oracle's checkpoints: `tiny`, `tiny-bf16` or `tiny-mlx`.
pub(crate) fn oracle(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../oracle").join(name)
}

pub(crate) fn open(dir: &Path) -> anyhow::Result<(Checkpoint, WeightTable)> {
    let checkpoint = Checkpoint::open(dir, &read_file)?;
    let weights = WeightTable::build(&checkpoint, ScaleCheck::All)?;
    Ok((checkpoint, weights))
}

/// A tensor to be written.
#[derive(Clone, Debug)]
pub(crate) struct Raw {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A checkpoint in memory, to be damaged.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Raw>,
}

impl Parts {
    pub(crate) fn read(dir: &Path) -> Self {
        let config = std::fs::read_to_string(dir.join("config.json")).expect("the oracle has a config");
        let file = std::fs::read(dir.join("model.safetensors")).expect("the oracle has a model");
        let entries = read_header(&file).expect("the oracle is sound");
        let raw = |entry: &troika_model::checkpoint::safetensors::HeaderEntry| Raw {
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            bytes: file[entry.bytes.clone()].to_vec(),
        };
        Self {
            config: serde_json::from_str(&config).expect("the oracle is sound"),
            tensors: entries.iter().map(|entry| (entry.name.clone(), raw(entry))).collect(),
        }
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut Raw {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("no tensor `{name}`"))
    }

    /// The checkpoint, opened without going through files.
    pub(crate) fn open(&self) -> anyhow::Result<(Checkpoint, WeightTable)> {
        let file = SharedBytes::new(safetensors(&self.tensors));
        let checkpoint = Checkpoint::from_parts(&self.config.to_string(), &[("model.safetensors".to_owned(), file)])?;
        let weights = WeightTable::build(&checkpoint, ScaleCheck::All)?;
        Ok((checkpoint, weights))
    }

    pub(crate) fn write(&self, dir: &Path) {
        write(&dir.join("config.json"), self.config.to_string().as_bytes());
        write(&dir.join("model.safetensors"), &safetensors(&self.tensors));
    }
}

pub(crate) fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}

/// The bytes of a safetensors file. Tensors lie in the order of their names, so most are not aligned.
pub(crate) fn safetensors(tensors: &BTreeMap<String, Raw>) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut at = 0;
    for (name, Raw { dtype, shape, bytes }) in tensors {
        let entry = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [at, at + bytes.len()]});
        header.insert(name.clone(), entry);
        at += bytes.len();
    }
    let mut file = with_header(&Value::Object(header).to_string());
    for tensor in tensors.values() {
        file.extend_from_slice(&tensor.bytes);
    }
    file
}

/// The start of a file: length and header.
pub(crate) fn with_header(header: &str) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file
}

/// Every number of `tensor`, row by row.
pub(crate) fn decode(tensor: &StoredTensor) -> Vec<f32> {
    match tensor.format() {
        Format::I64 | Format::I32 => {
            let numbers = troika_kernels::to_i32(tensor).expect("a table of small numbers");
            numbers.into_iter().map(|number| number as f32).collect()
        }
        _ => troika_kernels::to_f32(tensor),
    }
}
