//! A report on a checkpoint: what it is, what it holds, and whether it is whole.
//!
//! Goes as far as it can: what is missing or wrong is written down, and only files that cannot be read at all are an
//! error. Whether a model can be *run* is decided by [`crate::weights`], with the same code.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use troika_base::units::{human_bytes, human_count};
use troika_graph::Role;

use crate::checkpoint::layout::Layout;
use crate::checkpoint::{CheckpointError, OpenBytes, Place, TensorFiles};
use crate::config::{LayerKind, ModelConfig};
use crate::weights::{DrafterStatus, MissingSummary, ScaleCheck, Survey, WeightClass};

/// What [`inspect`] found. Serialises for `troika inspect --json`, displays as a table.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Inspection {
    pub path: PathBuf,
    pub num_files: usize,
    pub num_tensors: usize,
    /// Headers included.
    pub file_bytes: u64,
    /// Tensors as the headers describe them, by dtype.
    pub stored: BTreeMap<&'static str, Amount>,
    pub layout: Option<Layout>,
    pub model: Option<ModelSummary>,
    /// Weights that were found, sound and recognised, by class.
    pub classes: BTreeMap<WeightClass, ClassSummary>,
    pub parameters: Parameters,
    pub drafter: Option<DrafterStatus>,
    /// False for a checkpoint too large to read all its scales; see [`ScaleCheck::for_size`].
    pub scales_checked: bool,
    pub missing: MissingSummary,
    /// Tensors that no weight uses: name with numbers replaced by `N`, how many, and their bytes.
    pub extra: BTreeMap<String, Amount>,
    /// Everything else that is wrong, one message each.
    pub problems: Vec<String>,
    /// What is odd but does no harm, one message each.
    pub notes: Vec<String>,
}

/// A number of tensors and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Amount {
    pub count: usize,
    pub bytes: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
    }
}

/// The weights of one class.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct ClassSummary {
    pub count: usize,
    pub parameters: u64,
    /// Scales included.
    pub bytes: u64,
    /// By number format.
    pub formats: BTreeMap<String, Amount>,
}

/// Numbers that training set; scales of quantised formats and tables of experts are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Parameters {
    pub trunk: u64,
    /// Parameters of the trunk that one token multiplies: all but the embedding and the experts not chosen.
    pub active: u64,
    pub drafter: u64,
}

/// The configuration in short.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ModelSummary {
    pub hidden_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub head_dim: usize,
    pub sliding_window: usize,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub moe_intermediate_size: usize,
    pub max_position_embeddings: usize,
    pub num_swa_layers: usize,
    pub num_csa_layers: usize,
    pub num_hca_layers: usize,
    /// Ratios of the HCA layers.
    pub hca_ratios: Vec<usize>,
    /// Layers that choose experts by token id, judged by their tensors.
    pub num_hash_layers: usize,
}

impl ModelSummary {
    fn new(config: &ModelConfig, hash_layers: &[bool]) -> Self {
        let kinds: Vec<LayerKind> = (0..config.num_hidden_layers).map(|layer| config.layer_kind(layer)).collect();
        let mut hca_ratios: Vec<usize> = kinds
            .iter()
            .filter_map(|kind| if let LayerKind::Hca { ratio } = kind { Some(*ratio) } else { None })
            .collect();
        let num_hca_layers = hca_ratios.len();
        hca_ratios.sort_unstable();
        hca_ratios.dedup();
        let count = |wanted: LayerKind| kinds.iter().filter(|&&kind| kind == wanted).count();
        Self {
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            head_dim: config.head_dim,
            sliding_window: config.sliding_window,
            n_routed_experts: config.n_routed_experts,
            num_experts_per_tok: config.num_experts_per_tok,
            moe_intermediate_size: config.moe_intermediate_size,
            max_position_embeddings: config.max_position_embeddings,
            num_swa_layers: count(LayerKind::Swa),
            num_csa_layers: count(LayerKind::Csa),
            num_hca_layers,
            hca_ratios,
            num_hash_layers: hash_layers.iter().filter(|&&is_hash| is_hash).count(),
        }
    }
}

/// Looks at the checkpoint at `path`, as [`crate::Checkpoint::open`] takes it.
///
/// # Errors
///
/// If there is nothing to read, or a file cannot be read at all. Everything else is part of the report.
pub fn inspect(path: &Path, open: OpenBytes<'_>) -> Result<Inspection, CheckpointError> {
    let place = Place::find(path)?;
    let mut problems = Vec::new();
    let files = place.read_tensors(open, &mut |error| {
        if !error.leaves_a_rest() {
            return Err(error);
        }
        problems.push(error.to_string());
        Ok(())
    })?;
    let mut report = Inspection {
        path: path.to_owned(),
        num_files: files.paths().len(),
        num_tensors: files.len(),
        file_bytes: files.num_file_bytes(),
        stored: stored(&files),
        layout: None,
        model: None,
        classes: BTreeMap::new(),
        parameters: Parameters::default(),
        drafter: None,
        scales_checked: false,
        missing: MissingSummary::default(),
        extra: BTreeMap::new(),
        notes: Vec::new(),
        problems,
    };
    let config = match place.read_config() {
        Ok(config) => config,
        Err(error @ CheckpointError::Io { .. }) => return Err(error),
        Err(error) => {
            report.layout = Layout::detect(&files).ok();
            report.problems.push(error.to_string());
            return Ok(report);
        }
    };
    let check = ScaleCheck::for_size(files.num_file_bytes());
    report.scales_checked = check == ScaleCheck::All;
    match Survey::take(&files, &config, check) {
        Ok(survey) => report.add_survey(&config.model, &files, survey),
        Err(reason) => {
            report.model = Some(ModelSummary::new(&config.model, &[]));
            report.problems.push(reason);
        }
    }
    Ok(report)
}

fn stored(files: &TensorFiles) -> BTreeMap<&'static str, Amount> {
    let mut stored: BTreeMap<_, Amount> = BTreeMap::new();
    for (_, tensor) in files.iter() {
        stored.entry(tensor.dtype.name()).or_default().add(tensor.bytes.len() as u64);
    }
    stored
}

impl Inspection {
    /// True if the model can be run: nothing of the trunk is missing or wrong. It may lack a drafter and have tensors
    /// to spare.
    pub fn is_complete(&self) -> bool {
        self.problems.is_empty() && self.missing.is_empty() && self.layout.is_some()
    }

    fn add_survey(&mut self, config: &ModelConfig, files: &TensorFiles, survey: Survey) {
        self.layout = Some(survey.layout);
        self.model = Some(ModelSummary::new(config, &survey.hash_layers));
        let mut routed = 0;
        let mut embed = 0;
        for (&key, tensor) in &survey.found {
            let parameters = if key.role == Role::GateTid2eid { 0 } else { (tensor.rows() * tensor.cols()) as u64 };
            let class = WeightClass::of(key);
            let summary = self.classes.entry(class).or_default();
            summary.count += 1;
            summary.parameters += parameters;
            summary.bytes += tensor.num_bytes();
            summary.formats.entry(tensor.format().to_string()).or_default().add(tensor.num_bytes());
            match class {
                WeightClass::Drafter => self.parameters.drafter += parameters,
                _ => self.parameters.trunk += parameters,
            }
            match class {
                WeightClass::RoutedExperts => routed += parameters,
                WeightClass::Embed => embed += parameters,
                _ => {}
            }
        }
        let chosen = routed / config.n_routed_experts as u64 * config.num_experts_per_tok as u64;
        self.parameters.active = self.parameters.trunk - routed - embed + chosen;
        self.drafter = Some(survey.drafter);
        self.notes = survey.notes;
        if config.swiglu_limit.is_none() {
            self.notes.push("config.json has no swiglu_limit: gate and up projections are not clamped".to_owned());
        }
        if config.rope_scaling.is_none() {
            self.notes.push("config.json has no rope_scaling: long contexts are not stretched (YaRN)".to_owned());
        }
        self.missing = survey.missing;
        for name in &survey.extra {
            let bytes = files.get(name).map_or(0, |tensor| tensor.bytes.len() as u64);
            self.extra.entry(pattern(name)).or_default().add(bytes);
        }
        // One stacked tensor troubles every expert in it.
        let mut told = BTreeSet::new();
        let new = |message: &String| told.insert(message.clone());
        self.problems.extend(survey.broken.iter().map(ToString::to_string).filter(new));
    }
}

/// `name` with every run of digits between dots replaced by `N`.
fn pattern(name: &str) -> String {
    let part = |part: &str| match part.bytes().all(|byte| byte.is_ascii_digit()) && !part.is_empty() {
        true => "N".to_owned(),
        false => part.to_owned(),
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// Most lines of a list in the report.
const MAX_LISTED: usize = 20;

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = self.layout.map_or_else(|| "unknown".to_owned(), |layout| layout.to_string());
        let files = if self.num_files == 1 { "1 file".to_owned() } else { format!("{} files", self.num_files) };
        writeln!(f, "checkpoint  {}", self.path.display())?;
        writeln!(f, "layout      {layout}: {files}, {} tensors, {}", self.num_tensors, human_bytes(self.file_bytes))?;
        if let Some(model) = &self.model {
            fmt_model(f, model)?;
            let Parameters { trunk, active, drafter } = self.parameters;
            write!(f, "parameters  {}, {} active per token", human_count(trunk), human_count(active))?;
            writeln!(f, "{}", if drafter > 0 { format!("; drafter {}", human_count(drafter)) } else { String::new() })?;
        }
        if let Some(drafter) = &self.drafter {
            writeln!(f, "drafter     {drafter}")?;
        }
        if self.classes.is_empty() {
            writeln!(f, "\n{:<18} {:>8} {:>10}", "stored as", "tensors", "bytes")?;
            for (dtype, Amount { count, bytes }) in &self.stored {
                writeln!(f, "{dtype:<18} {count:>8} {:>10}", human_bytes(*bytes))?;
            }
        } else {
            self.fmt_classes(f)?;
        }
        self.fmt_verdict(f)
    }
}

fn fmt_model(f: &mut fmt::Formatter<'_>, model: &ModelSummary) -> fmt::Result {
    writeln!(
        f,
        "model       {} layers, hidden {}, {} heads of {}, {} experts of {} ({} + 1 used), vocabulary {}, context {}",
        model.num_hidden_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.head_dim,
        model.n_routed_experts,
        model.moe_intermediate_size,
        model.num_experts_per_tok,
        model.vocab_size,
        model.max_position_embeddings
    )?;
    let ratios: Vec<String> = model.hca_ratios.iter().map(ToString::to_string).collect();
    let ratios = if ratios.is_empty() { String::new() } else { format!(" (ratio {})", ratios.join(", ")) };
    let num_scored = model.num_hidden_layers - model.num_hash_layers;
    writeln!(
        f,
        "layers      {} SWA (window {}), {} CSA, {} HCA{ratios}; experts by token id in {}, by score in {num_scored}",
        model.num_swa_layers, model.sliding_window, model.num_csa_layers, model.num_hca_layers, model.num_hash_layers
    )
}

impl Inspection {
    fn fmt_classes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{:<18} {:>8} {:>10} {:>10}  formats", "class", "weights", "params", "bytes")?;
        for (class, summary) in &self.classes {
            let format = |(format, amount): (&String, &Amount)| format!("{} x {format}", amount.count);
            let formats: Vec<String> = summary.formats.iter().map(format).collect();
            let (params, bytes) = (human_count(summary.parameters), human_bytes(summary.bytes));
            writeln!(f, "{class:<18} {:>8} {params:>10} {bytes:>10}  {}", summary.count, formats.join(", "))?;
        }
        let count: usize = self.classes.values().map(|class| class.count).sum();
        let params = human_count(self.classes.values().map(|class| class.parameters).sum());
        let bytes = human_bytes(self.classes.values().map(|class| class.bytes).sum());
        writeln!(f, "{:<18} {count:>8} {params:>10} {bytes:>10}", "total")
    }

    fn fmt_verdict(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f)?;
        for problem in self.problems.iter().take(MAX_LISTED) {
            writeln!(f, "problem     {problem}")?;
        }
        if let more @ 1.. = self.problems.len().saturating_sub(MAX_LISTED) {
            writeln!(f, "problem     {more} more")?;
        }
        if !self.missing.is_empty() {
            writeln!(f, "missing     {}", self.missing)?;
        }
        for (pattern, Amount { count, bytes }) in self.extra.iter().take(MAX_LISTED) {
            writeln!(f, "extra       {count} x `{pattern}` ({}), not used", human_bytes(*bytes))?;
        }
        if let more @ 1.. = self.extra.len().saturating_sub(MAX_LISTED) {
            writeln!(f, "extra       {more} more kinds of tensors, not used")?;
        }
        for note in self.notes.iter().take(MAX_LISTED) {
            writeln!(f, "note        {note}")?;
        }
        if let more @ 1.. = self.notes.len().saturating_sub(MAX_LISTED) {
            writeln!(f, "note        {more} more")?;
        }
        if !self.classes.is_empty() && !self.scales_checked {
            writeln!(f, "scales      not looked at, there are too many to read")?;
        }
        let verdict = match (self.is_complete(), self.extra.is_empty()) {
            (true, true) => "complete: every tensor is there and of use",
            (true, false) => "complete, with tensors to spare",
            (false, _) => "not usable",
        };
        writeln!(f, "verdict     {verdict}")
    }
}
