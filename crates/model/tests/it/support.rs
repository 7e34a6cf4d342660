//! Shared by the tests: the oracle's checkpoints, a safetensors writer, and a plain decoder of every format.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use troika_base::storage::ScaleFormat;
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

/// Every number of `tensor`, row by row, by the definitions of section 4 of the model spec.
pub(crate) fn decode(tensor: &StoredTensor) -> Vec<f64> {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let mut out = Vec::with_capacity(rows * cols);
    for r in 0..rows {
        for c in 0..cols {
            let at = r * cols + c;
            let data = tensor.data();
            out.push(match tensor.format() {
                Format::F32 => f64::from(f32::from_le_bytes(take(data, at))),
                Format::F16 => f16(u16::from_le_bytes(take(data, at))),
                Format::Bf16 => bf16(u16::from_le_bytes(take(data, at))),
                Format::I64 => i64::from_le_bytes(take(data, at)) as f64,
                Format::I32 => f64::from(i32::from_le_bytes(take(data, at))),
                Format::Fp8Tile { scale } => {
                    e4m3(data[at]) * scale_at(tensor.scales(), scale, r / 128 * cols.div_ceil(128) + c / 128)
                }
                Format::Mxfp8 => e4m3(data[at]) * scale_at(tensor.scales(), ScaleFormat::E8m0, at / 32),
                Format::Mxfp4 => {
                    let code = data[at / 2] >> (4 * (at % 2)) & 15;
                    e2m1(code) * scale_at(tensor.scales(), ScaleFormat::E8m0, at / 32)
                }
                Format::Affine { bits, group, scale } => {
                    let bits = usize::from(bits);
                    let row = &data[r * cols * bits / 8..];
                    let code = (0..bits).map(|i| c * bits + i).enumerate();
                    let code: u32 = code.map(|(i, bit)| u32::from(row[bit / 8] >> (bit % 8) & 1) << i).sum();
                    let group = at / usize::from(group);
                    scale_at(tensor.scales(), scale, group) * f64::from(code) + scale_at(tensor.biases(), scale, group)
                }
            });
        }
    }
    out
}

fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at * N..][..N].try_into().expect("N bytes")
}

fn scale_at(bytes: &[u8], format: ScaleFormat, at: usize) -> f64 {
    match format {
        ScaleFormat::E8m0 => 2f64.powi(i32::from(bytes[at]) - 127),
        ScaleFormat::F32 => f64::from(f32::from_le_bytes(take(bytes, at))),
        ScaleFormat::Bf16 => bf16(u16::from_le_bytes(take(bytes, at))),
        ScaleFormat::F16 => f16(u16::from_le_bytes(take(bytes, at))),
    }
}

fn bf16(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

fn f16(bits: u16) -> f64 {
    small_float(bits.into(), 5, 10)
}

fn e4m3(bits: u8) -> f64 {
    small_float(bits.into(), 4, 3)
}

/// Sign, exponent, mantissa. Neither infinities nor NaN: no test has them.
fn small_float(bits: u32, exponent_bits: u32, mantissa_bits: u32) -> f64 {
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1u32 << mantissa_bits);
    let exponent = (bits >> mantissa_bits & ((1 << exponent_bits) - 1)) as i32;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let magnitude =
        if exponent == 0 { mantissa * 2f64.powi(1 - bias) } else { (1.0 + mantissa) * 2f64.powi(exponent - bias) };
    if bits >> (exponent_bits + mantissa_bits) & 1 == 1 { -magnitude } else { magnitude }
}

fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}
