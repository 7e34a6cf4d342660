//! Finds the tensors of every weight, decides its format by their dtypes and shapes, and checks them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use indexmap::IndexSet;
use troika_base::storage::{FP8_TILE, MX_GROUP, ScaleFormat};
use troika_base::{Format, SharedBytes, StoredTensor};
use troika_graph::{Role, Scope, WeightKey};

use super::{DrafterStatus, MissingSummary, ScaleCheck, WeightError};
use crate::checkpoint::layout::{self, Form, Layout, Place, Stack};
use crate::checkpoint::safetensors::Dtype;
use crate::checkpoint::{Tensor, TensorFiles};
use crate::config::{ConfigFile, ModelConfig, QuantSpec};

/// What was found of a checkpoint, sound or not. [`super::WeightTable`] is a survey without faults.
pub(crate) struct Survey {
    pub(crate) layout: Layout,
    pub(crate) found: BTreeMap<WeightKey, StoredTensor>,
    pub(crate) missing: MissingSummary,
    pub(crate) broken: Vec<WeightError>,
    pub(crate) extra: Vec<String>,
    /// Where config.json says otherwise than the tensors.
    pub(crate) notes: Vec<String>,
    pub(crate) hash_layers: Vec<bool>,
    pub(crate) drafter: DrafterStatus,
}

impl Survey {
    /// Looks for every weight. `Err` if no layout fits.
    pub(crate) fn take(files: &TensorFiles, config: &ConfigFile, check: ScaleCheck) -> Result<Self, String> {
        let layout = Layout::detect(files)?;
        let mut finder = Finder {
            files,
            config,
            layout,
            check,
            used: BTreeSet::new(),
            notes: BTreeSet::new(),
            empty: SharedBytes::empty(),
        };
        let model = &config.model;
        let hash_layers: Vec<bool> = (0..layer_count(model)).map(|layer| finder.is_hash(layer)).collect();
        let mut keys: Vec<WeightKey> = layout::MODEL_ROLES.iter().map(|&role| WeightKey::model(role)).collect();
        for (layer, &is_hash) in (0..).zip(&hash_layers) {
            let roles = layout::layer_roles(model, layer, is_hash);
            keys.extend(roles.into_iter().map(|role| WeightKey::layer(layer, role)));
        }
        let mut survey = Self {
            layout,
            found: BTreeMap::new(),
            missing: MissingSummary::default(),
            broken: Vec::new(),
            extra: Vec::new(),
            notes: Vec::new(),
            hash_layers,
            drafter: DrafterStatus::Unavailable { reason: String::new() },
        };
        // One stacked tensor is missed by every expert in it.
        let mut missed = BTreeSet::new();
        for key in keys {
            match finder.find(key) {
                Ok(Found::Weight(tensor)) => {
                    survey.found.insert(key, tensor);
                }
                Ok(Found::Missing(tensor)) if missed.contains(&tensor) => {}
                Ok(Found::Missing(tensor)) => {
                    survey.missing.add(key, tensor.clone());
                    missed.insert(tensor);
                }
                Err(error) => survey.broken.push(error),
            }
        }
        survey.drafter = survey.take_drafter(&mut finder);
        survey.extra =
            files.iter().filter(|(name, _)| !finder.used.contains(name)).map(|(name, _)| name.to_owned()).collect();
        survey.notes = finder.notes.into_iter().collect();
        Ok(survey)
    }

    fn take_drafter(&mut self, finder: &mut Finder<'_>) -> DrafterStatus {
        let num_stages = match finder.drafter_stages() {
            Ok(num_stages) => num_stages,
            Err(reason) => return DrafterStatus::Unavailable { reason },
        };
        let mut stages = BTreeMap::new();
        let mut missing = IndexSet::new();
        for stage in 0..num_stages {
            for role in layout::stage_roles(&finder.config.model, stage, num_stages) {
                let key = WeightKey { scope: Scope::Stage(stage), role };
                match finder.find(key) {
                    Ok(Found::Weight(tensor)) => {
                        stages.insert(key, tensor);
                    }
                    Ok(Found::Missing(tensor)) => {
                        missing.insert(tensor);
                    }
                    Err(error) => self.broken.push(error),
                }
            }
        }
        if let Some(first) = missing.first() {
            let count = missing.len();
            return DrafterStatus::Unavailable { reason: format!("{count} tensors are missing, first `{first}`") };
        }
        self.found.append(&mut stages);
        DrafterStatus::Available { num_stages }
    }
}

fn layer_count(config: &ModelConfig) -> u16 {
    u16::try_from(config.num_hidden_layers).expect("config limits the number of layers")
}

/// A weight, or the name of the tensor that it lacks.
enum Found {
    Weight(StoredTensor),
    Missing(String),
}

struct Finder<'a> {
    files: &'a TensorFiles,
    config: &'a ConfigFile,
    layout: Layout,
    check: ScaleCheck,
    /// Names of the tensors that some weight needs.
    used: BTreeSet<&'a str>,
    notes: BTreeSet<String>,
    empty: SharedBytes,
}

/// Most drafter stages; 0731 has three.
const MAX_STAGES: u16 = 16;

/// A tensor under its name.
#[derive(Clone, Copy)]
struct Named<'a> {
    name: &'a str,
    tensor: &'a Tensor,
}

impl<'a> Finder<'a> {
    fn is_hash(&self, layer: u16) -> bool {
        let name = |role| layout::place(self.layout, &self.config.model, WeightKey::layer(layer, role)).tensor;
        let has = |role| self.files.get(&name(role)).is_some();
        // With neither, the configuration says which of the two to miss.
        has(Role::GateTid2eid) || (!has(Role::GateBias) && usize::from(layer) < self.config.model.num_hash_layers)
    }

    /// How many stages of the 0731 drafter the tensors have, or why there is no such drafter.
    fn drafter_stages(&self) -> Result<u16, String> {
        let names: Vec<&str> =
            self.files.iter().map(|(name, _)| name).filter(|name| name.starts_with("mtp.")).collect();
        if names.is_empty() {
            return Err("no mtp.* tensors".to_owned());
        }
        let old = [".e_proj.", ".h_proj.", ".block."];
        if let Some(name) = names.iter().find(|name| old.iter().any(|part| name.contains(part))) {
            return Err(format!("the MTP module of the April release (`{name}`), not a DSpark drafter"));
        }
        let mut num_stages = 0;
        for name in names {
            let stage =
                name.split('.').nth(1).and_then(|stage| stage.parse::<u16>().ok()).filter(|&stage| stage < MAX_STAGES);
            let Some(stage) = stage else { return Err(format!("unknown tensor `{name}`")) };
            num_stages = num_stages.max(stage + 1);
        }
        let model = &self.config.model;
        if model.dspark.is_none() {
            let fault = self.config.drafter_fault.clone();
            return Err(fault
                .unwrap_or_else(|| "config.json has no dspark_block_size or no dspark_target_layer_ids".to_owned()));
        }
        let ratios = model.compress_ratios.iter().skip(model.num_hidden_layers).take(num_stages.into());
        if let Some(ratio) = ratios.into_iter().find(|&&ratio| ratio != 0) {
            return Err(format!("compress_ratios gives a stage the ratio {ratio}, only 0 is known"));
        }
        Ok(num_stages)
    }

    fn get(&mut self, name: &str) -> Option<Named<'a>> {
        let (name, tensor) = self.files.get_named(name)?;
        self.used.insert(name);
        Some(Named { name, tensor })
    }

    fn find(&mut self, key: WeightKey) -> Result<Found, WeightError> {
        let place = layout::place(self.layout, &self.config.model, key);
        let form = layout::form(&self.config.model, key);
        let Some(named) = self.get(&place.tensor) else { return Ok(Found::Missing(place.tensor)) };
        match form {
            Form::Vector(n) => self.plain(named, &[n], [1, n]),
            Form::Plain(rows, cols) => self.plain(named, &[rows, cols], [rows, cols]),
            Form::Table(rows, cols) => self.table(named, [rows, cols]),
            Form::Matrix(rows, cols) => {
                self.matrix(named, &place, [rows, cols]).inspect_err(|_| self.use_siblings(&place))
            }
        }
    }

    /// The scales of a matrix that cannot be read are not to spare; they belong to it.
    fn use_siblings(&mut self, place: &Place) {
        for suffix in [".scale", ".weight_scale_inv", ".scales", ".biases"] {
            self.get(&format!("{}{suffix}", place.module()));
        }
    }

    fn plain(&self, named: Named<'a>, shape: &[usize], dims: [usize; 2]) -> Result<Found, WeightError> {
        let format = plain_format(named.tensor.dtype).ok_or_else(|| self.dtype(named, "F32, BF16 or F16"))?;
        if named.tensor.shape != shape {
            return Err(self.shape(named, format!("{shape:?}")));
        }
        self.store(named, format, dims, [named.tensor.bytes.clone(), self.empty.clone(), self.empty.clone()])
    }

    fn table(&self, named: Named<'a>, dims: [usize; 2]) -> Result<Found, WeightError> {
        let format = match named.tensor.dtype {
            Dtype::I64 => Format::I64,
            Dtype::I32 => Format::I32,
            _ => return Err(self.dtype(named, "I64 or I32")),
        };
        if named.tensor.shape != dims {
            return Err(self.shape(named, format!("{dims:?}")));
        }
        let num_experts = self.config.model.n_routed_experts;
        let bytes = &named.tensor.bytes;
        let bad = match format {
            Format::I64 => find_outside(bytes.as_chunks().0, |bytes| i64::from_le_bytes(*bytes), num_experts),
            _ => find_outside(bytes.as_chunks().0, |bytes| i32::from_le_bytes(*bytes).into(), num_experts),
        };
        if let Some((at, value)) = bad {
            let token = at / dims[1];
            return Err(WeightError::Table {
                file: self.file(named),
                tensor: named.name.to_owned(),
                token,
                value,
                num_experts,
            });
        }
        self.store(named, format, dims, [bytes.clone(), self.empty.clone(), self.empty.clone()])
    }

    fn matrix(&mut self, named: Named<'a>, place: &Place, [rows, cols]: [usize; 2]) -> Result<Found, WeightError> {
        let dtype = named.tensor.dtype;
        let width = match dtype {
            Dtype::U32 => return self.words(named, place, [rows, cols]),
            Dtype::I8 if !cols.is_multiple_of(MX_GROUP) => {
                return Err(
                    self.format(named, format!("fp4 needs a multiple of 32 columns, the config demands {cols}"))
                );
            }
            Dtype::I8 => cols / 2,
            Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F8_E4M3 => cols,
            _ => {
                return Err(self.dtype(named, "F32, BF16, F16, F8_E4M3 (fp8), I8 (fp4) or U32 (an MLX format)"));
            }
        };
        let (_, data) = rows_of(named.tensor, place.stack, rows)
            .filter(|(got, _)| *got == width)
            .ok_or_else(|| self.shape(named, wanted(place.stack, rows, &width.to_string())))?;
        if let Some(format) = plain_format(dtype) {
            return self.store(named, format, [rows, cols], [data, self.empty.clone(), self.empty.clone()]);
        }

        let siblings = [".scale", ".weight_scale_inv"].map(|suffix| format!("{}{suffix}", place.module()));
        let Some(scales) = siblings.iter().find_map(|name| self.get(name)) else {
            let [first, _] = siblings;
            return Ok(Found::Missing(first));
        };
        let scale = match scales.tensor.dtype {
            Dtype::F8_E8M0 | Dtype::U8 => ScaleFormat::E8m0,
            _ if dtype == Dtype::I8 => return Err(self.dtype(scales, "F8_E8M0")),
            Dtype::F32 => ScaleFormat::F32,
            Dtype::BF16 => ScaleFormat::Bf16,
            Dtype::F16 => ScaleFormat::F16,
            _ => return Err(self.dtype(scales, "F8_E8M0, F32, BF16 or F16")),
        };
        let [tile_rows, tile_cols] = [rows, cols].map(|n| n.div_ceil(FP8_TILE));
        let fits = |rows, cols| rows_of(scales.tensor, place.stack, rows).filter(|(got, _)| *got == cols);
        let (format, scale_cols, scale_bytes) = if dtype == Dtype::I8 {
            let (_, bytes) = fits(rows, cols / MX_GROUP).ok_or_else(|| {
                let want = wanted(place.stack, rows, &(cols / MX_GROUP).to_string());
                self.shape(scales, format!("{want}, one scale for each row and 32 columns"))
            })?;
            (Format::Mxfp4, cols / MX_GROUP, bytes)
        } else if let Some((_, bytes)) = fits(tile_rows, tile_cols) {
            (Format::Fp8Tile { scale }, tile_cols, bytes)
        } else if let Some((_, bytes)) = fits(rows, cols / MX_GROUP)
            && scale == ScaleFormat::E8m0
            && cols.is_multiple_of(MX_GROUP)
        {
            (Format::Mxfp8, cols / MX_GROUP, bytes)
        } else {
            let want = wanted(place.stack, tile_rows, &tile_cols.to_string());
            return Err(self.shape(scales, format!("{want}, one scale for each tile of 128 x 128")));
        };
        self.check_scales(scales, scale, &scale_bytes, scale_cols, place.stack)?;
        self.store(named, format, [rows, cols], [data, scale_bytes, self.empty.clone()])
    }

    /// A matrix of MLX: codes packed in 32-bit words, with `.scales` and, for affine, `.biases`. The width of a code and
    /// the group follow from the shapes.
    fn words(&mut self, named: Named<'a>, place: &Place, [rows, cols]: [usize; 2]) -> Result<Found, WeightError> {
        let (num_words, data) = rows_of(named.tensor, place.stack, rows)
            .ok_or_else(|| self.shape(named, wanted(place.stack, rows, "words")))?;
        let bits = num_words.saturating_mul(32) / cols;
        if bits.saturating_mul(cols) != num_words.saturating_mul(32) || !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
            let reason = format!(
                "a row has {num_words} words of 32 bits, which is not 2, 3, 4, 5, 6 or 8 bits for each of the {cols} \
                 columns"
            );
            return Err(self.format(named, reason));
        }
        let scales_name = format!("{}.scales", place.module());
        let Some(scales) = self.get(&scales_name) else { return Ok(Found::Missing(scales_name)) };
        let (scale_cols, scale_bytes) = rows_of(scales.tensor, place.stack, rows)
            .filter(|(got, _)| *got > 0 && cols.is_multiple_of(*got))
            .ok_or_else(|| {
                self.shape(scales, wanted(place.stack, rows, &format!("one scale per group of {cols} columns")))
            })?;
        let group = cols / scale_cols;

        let scale = match scales.tensor.dtype {
            Dtype::U8 | Dtype::F8_E8M0 => ScaleFormat::E8m0,
            Dtype::F32 => ScaleFormat::F32,
            Dtype::BF16 => ScaleFormat::Bf16,
            Dtype::F16 => ScaleFormat::F16,
            _ => return Err(self.dtype(scales, "U8 (mxfp4, mxfp8) or F32, BF16, F16 (affine)")),
        };
        let (format, mode) = match (scale, bits, group) {
            (ScaleFormat::E8m0, 4, MX_GROUP) => (Format::Mxfp4, "mxfp4"),
            (ScaleFormat::E8m0, 8, MX_GROUP) => (Format::Mxfp8, "mxfp8"),
            (ScaleFormat::F32 | ScaleFormat::Bf16 | ScaleFormat::F16, _, 32 | 64 | 128) => {
                (Format::Affine { bits: bits as u8, group: group as u16, scale }, "affine")
            }
            _ => {
                let reason = format!(
                    "{bits} bits in groups of {group} with {} scales is none of mxfp4 and mxfp8 (U8 scales, groups of \
                     32) and affine (groups of 32, 64 or 128)",
                    scales.tensor.dtype
                );
                return Err(self.format(named, reason));
            }
        };
        self.compare_with_config(place.module(), mode, [bits, group]);
        self.check_scales(scales, scale, &scale_bytes, scale_cols, place.stack)?;
        let bias_bytes = if matches!(format, Format::Affine { .. }) {
            let biases_name = format!("{}.biases", place.module());
            let Some(biases) = self.get(&biases_name) else { return Ok(Found::Missing(biases_name)) };
            if biases.tensor.dtype != scales.tensor.dtype {
                return Err(self.dtype(biases, "that of its scales"));
            }
            let (_, bytes) = rows_of(biases.tensor, place.stack, rows)
                .filter(|(got, _)| *got == scale_cols)
                .ok_or_else(|| self.shape(biases, wanted(place.stack, rows, &scale_cols.to_string())))?;
            self.check_scales(biases, scale, &bytes, scale_cols, place.stack)?;
            bytes
        } else {
            self.empty.clone()
        };
        self.store(named, format, [rows, cols], [data, scale_bytes, bias_bytes])
    }

    /// Tensors decide. A `quantization` map that says otherwise is worth a word, since one of the two may be from elsewhere.
    fn compare_with_config(&mut self, module: &str, mode: &str, [bits, group]: [usize; 2]) {
        let Some(map) = &self.config.quantization else { return };
        let said = match map.modules.get(module) {
            Some(said) => said.as_ref(),
            None => Some(&map.default),
        };
        let agrees = said.is_some_and(|QuantSpec { mode: said_mode, bits: said_bits, group_size }| {
            said_mode.as_deref().is_none_or(|said| said == mode)
                && said_bits.is_none_or(|said| said == bits as u64)
                && group_size.is_none_or(|said| said == group as u64)
        });
        if !agrees {
            let says = said.map_or_else(|| "no quantisation".to_owned(), ToString::to_string);
            self.notes.insert(format!(
                "`{module}` holds mode {mode}, {bits} bits, group {group}, though config.json says {says}; the tensors decide"
            ));
        }
    }

    fn check_scales(
        &self,
        named: Named<'a>,
        scale: ScaleFormat,
        bytes: &[u8],
        cols: usize,
        stack: Option<Stack>,
    ) -> Result<(), WeightError> {
        if self.check == ScaleCheck::Skip {
            return Ok(());
        }
        let Some((at, value)) = find_not_finite(scale, bytes) else { return Ok(()) };
        let mut place = vec![at / cols, at % cols];
        if let Some(Stack::Pick { idx, .. }) = stack {
            place.insert(0, idx);
        }
        Err(WeightError::Scale { file: self.file(named), tensor: named.name.to_owned(), value, at: place })
    }

    fn store(
        &self,
        named: Named<'a>,
        format: Format,
        [rows, cols]: [usize; 2],
        parts: [SharedBytes; 3],
    ) -> Result<Found, WeightError> {
        let wrong = |reason| WeightError::Parts { file: self.file(named), tensor: named.name.to_owned(), reason };
        StoredTensor::new(format, rows, cols, parts).map(Found::Weight).map_err(wrong)
    }

    fn file(&self, named: Named<'a>) -> PathBuf {
        self.files.path_of(named.tensor).to_owned()
    }

    fn dtype(&self, named: Named<'a>, want: &'static str) -> WeightError {
        WeightError::Dtype { file: self.file(named), tensor: named.name.to_owned(), got: named.tensor.dtype, want }
    }

    fn shape(&self, named: Named<'a>, want: String) -> WeightError {
        let Tensor { dtype, shape, .. } = named.tensor;
        let tensor = named.name.to_owned();
        WeightError::Shape { file: self.file(named), tensor, dtype: *dtype, got: shape.clone(), want }
    }

    fn format(&self, named: Named<'a>, reason: String) -> WeightError {
        WeightError::Format { file: self.file(named), tensor: named.name.to_owned(), reason }
    }
}

fn plain_format(dtype: Dtype) -> Option<Format> {
    match dtype {
        Dtype::F32 => Some(Format::F32),
        Dtype::BF16 => Some(Format::Bf16),
        Dtype::F16 => Some(Format::F16),
        _ => None,
    }
}

/// Elements per row and bytes of the weight's part of `tensor`, or `None` if the axes before the last are not as the
/// `rows` of the weight demand.
fn rows_of(tensor: &Tensor, stack: Option<Stack>, rows: usize) -> Option<(usize, SharedBytes)> {
    match (stack, tensor.shape.as_slice()) {
        (Some(Stack::Pick { idx, count }), &[n, each, width]) if n == count && each == rows => {
            let each_bytes = tensor.bytes.len() / count;
            Some((width, tensor.bytes.slice(each_bytes * idx..each_bytes * (idx + 1))?))
        }
        (Some(Stack::Join { groups }), &[n, each, width]) if n == groups && n.checked_mul(each) == Some(rows) => {
            Some((width, tensor.bytes.clone()))
        }
        (None | Some(Stack::Join { .. }), &[n, width]) if n == rows => Some((width, tensor.bytes.clone())),
        _ => None,
    }
}

/// The shape that [`rows_of`] accepts, for messages.
fn wanted(stack: Option<Stack>, rows: usize, width: &str) -> String {
    match stack {
        None => format!("[{rows}, {width}]"),
        Some(Stack::Pick { count, .. }) => format!("[{count}, {rows}, {width}]"),
        Some(Stack::Join { groups }) => format!("[{groups}, {}, {width}] or [{rows}, {width}]", rows / groups),
    }
}

/// Place and value of the first number that is no expert.
fn find_outside<const N: usize>(
    numbers: &[[u8; N]],
    decode: impl Fn(&[u8; N]) -> i64,
    num_experts: usize,
) -> Option<(usize, i64)> {
    let values = numbers.iter().map(decode).enumerate();
    values.into_iter().find(|&(_, value)| usize::try_from(value).map_or(true, |value| value >= num_experts))
}

/// Place and value of the first scale that is NaN or infinite.
fn find_not_finite(scale: ScaleFormat, bytes: &[u8]) -> Option<(usize, f32)> {
    let halves = || bytes.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
    let words = || bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    // All bits of the exponent set: infinite if the rest (without the sign) is 0, else NaN.
    let value = |is_infinite: bool| if is_infinite { f32::INFINITY } else { f32::NAN };
    match scale {
        ScaleFormat::E8m0 => bytes.iter().position(|&byte| byte == u8::MAX).map(|at| (at, f32::NAN)),
        ScaleFormat::Bf16 => {
            let at = halves().position(|bits| bits & 0x7f80 == 0x7f80)?;
            Some((at, f32::from_bits(u32::from(halves().nth(at)?) << 16)))
        }
        ScaleFormat::F16 => {
            let at = halves().position(|bits| bits & 0x7c00 == 0x7c00)?;
            Some((at, value(halves().nth(at)? & 0x03ff == 0)))
        }
        ScaleFormat::F32 => {
            let at = words().position(|bits| bits & 0x7f80_0000 == 0x7f80_0000)?;
            Some((at, f32::from_bits(words().nth(at)?)))
        }
    }
}
