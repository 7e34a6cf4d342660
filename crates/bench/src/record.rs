//! The record of a run: everything a report is made of, as JSON. Described in `docs/formats/bench-record.md`.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::BenchError;
use crate::arm::{Arm, ArmName, Feature, Geometry};
use crate::corpus::{Corpus, hex};
use crate::drafts::Drafts;
use crate::evidence::{Engagement, Evidence};
use crate::host::{HostFacts, HostState};
use crate::stats::{Difference, Interval};

/// What `schema` says.
pub const SCHEMA: &str = "troika-bench";
/// Goes up when a member changes its meaning or goes away.
pub const VERSION: u32 = 2;

/// One run of the matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub schema: String,
    pub version: u32,
    pub created_unix_s: u64,
    /// Why there is less than was asked for; absent if there is not.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub incomplete: Option<String>,
    /// What the user calls it, such as a commit.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub label: Option<String>,
    pub program: Program,
    pub host: Host,
    pub settings: Settings,
    pub experiments: Vec<Experiment>,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    pub version: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// `release` or `debug`.
    pub build: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Host {
    pub facts: HostFacts,
    pub start: HostState,
    pub end: HostState,
}

/// Under which rules requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Regime {
    /// One request at a time, nothing kept: differences are easiest to see, and kinder than service.
    Lab,
    /// Two at a time, prefixes kept as in service, half of the prompts share their first half with an earlier one.
    Service,
}

impl Regime {
    pub fn name(self) -> &'static str {
        match self {
            Self::Lab => "lab",
            Self::Service => "service",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub preset: Option<String>,
    pub regime: Regime,
    pub corpus: Corpus,
    /// Tokens generated after each prompt, greedily.
    pub generate: usize,
    /// Rounds at least, and at most while intervals are wide.
    pub rounds: usize,
    pub max_rounds: usize,
    /// Prompts of each length in one process; the median of all that were computed there is one sample.
    pub repeats: usize,
    /// They are computed again until computing them took so long, but not in the regime `service`, where they would be kept.
    #[serde(default)]
    pub min_sample_ms: u64,
    pub geometry: Geometry,
    pub feature: Feature,
}

/// One checkpoint, with or without drafter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Experiment {
    pub model: ModelFacts,
    pub drafter: bool,
    /// Why there is nothing to measure.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub unavailable: Option<String>,
    pub arms: Vec<ArmRecord>,
    pub cells: Vec<Cell>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelFacts {
    pub name: String,
    /// Flags of `serve` that all arms have.
    pub args: Vec<String>,
    /// Digests of weights and tokenizer.
    pub weights_sha256: String,
    pub tokenizer_sha256: String,
    /// Numeric class of the primary.
    pub class: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmRecord {
    pub arm: Arm,
    /// What the server said of its devices.
    pub devices: Vec<String>,
    /// From the start of each process until it answered, loading and compiling included. Never part of a rate.
    pub load_s: Vec<f64>,
    pub peak_memory_bytes: Option<u64>,
    /// Of that, what engines hold: programs, weights in their form, surfaces.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub engine_memory_bytes: Option<u64>,
    /// Where the time of one prompt goes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub profile: Option<Profile>,
    /// One prefill step, node by node, computed in a process of its own after the rounds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub step: Option<StepTimeline>,
    /// What the server's log warned of last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub warning: Option<String>,
}

/// Device time of one prompt and the token after it, from the counters of the server before and after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    pub prompt_tokens: usize,
    pub entries: Vec<ProfileEntry>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileEntry {
    /// Number of the device; 0 is the primary one.
    pub device: String,
    /// Kind of operation.
    pub kind: String,
    pub ms: f64,
}

/// When the nodes of one step ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTimeline {
    /// Tokens of the step, and the position of the first.
    pub tokens: usize,
    pub position: usize,
    pub spans: Vec<StepSpan>,
}

/// One node. Times are microseconds since the step was submitted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepSpan {
    /// Number of the device; 0 is the primary one.
    pub device: u16,
    pub kind: String,
    /// Absent for what belongs to no layer.
    pub layer: Option<u16>,
    pub start_us: f64,
    pub end_us: f64,
}

/// How a length was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// As asked for.
    Natural,
    /// A whole number of tiles and the token that starts decoding.
    Aligned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Length {
    pub tokens: usize,
    pub fit: Fit,
}

/// One length in all arms.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    pub length: Length,
    /// Digest of the token ids of all its prompts; the same in every arm and round.
    pub ids_sha256: String,
    pub arms: Vec<CellArm>,
    /// B over A.
    pub geometry_gain: Option<Difference>,
    /// C over B.
    pub feature_gain: Option<Difference>,
    /// C over A; to be read beside the other two.
    pub total_gain: Option<Difference>,
    /// C over P.
    pub against_every_core: Option<Difference>,
    pub tokens: Vec<TokenCheck>,
    /// Arms that must give the same tokens did not, so their rates prove nothing.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub void: Option<String>,
    /// What arm C may be called.
    pub engagement: Option<Engagement>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellArm {
    pub arm: ArmName,
    pub samples: Vec<Sample>,
    pub prefill_tps: Option<Interval>,
    pub ttft_ms: Option<Interval>,
    pub decode_tps: Option<Interval>,
    /// What ran where, all samples together; absent where the server keeps no such record.
    pub evidence: Option<Evidence>,
    /// What became of drafts, all samples together; absent without a drafter.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub drafts: Option<Drafts>,
    /// It gave other tokens to some prompt in a later round.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub unstable: bool,
}

/// One process's median of one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub round: usize,
    /// Its place in the round; arms take turns.
    pub place: usize,
    /// Prompt tokens that were computed, per second of computing them.
    pub prefill_tps: f64,
    /// The same of all prompt tokens, where some were kept: what keeping them is worth, and no rate of computing.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub effective_prompt_tps: Option<f64>,
    /// Tokens of the prompt, and of them those that were kept from before; the latter are in no rate.
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    /// From the first step of the prompt to the first token; of two prompts at once, until both have theirs.
    pub prefill_ms: f64,
    /// Before that, in the engine's queue; of two prompts at once, while neither was computed.
    pub queue_ms: f64,
    /// By the client's clock, from sending the request to the first piece of text, of the later one of two.
    pub ttft_ms: f64,
    /// Of `ttft_ms`, what is neither queue nor prompt: HTTP and JSON. Prompts are sent as ids, so nothing is tokenized.
    pub other_ms: f64,
    /// Tokens after the first, per second; of two answers at once, while both are under way. 0 if that were fewer than eight.
    pub decode_tps: f64,
    pub tpot_ms: f64,
    /// From the first piece of text to the end of the answer.
    pub answer_ms: f64,
    /// Longest gap between pieces.
    pub longest_gap_ms: f64,
    /// Share of all CPUs that other processes took meanwhile.
    pub others_cpu_share: Option<f64>,
}

/// Greedy tokens of one arm against those of another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenCheck {
    pub arm: ArmName,
    pub against: ArmName,
    /// Prompts compared, and those with all tokens equal.
    pub prompts: usize,
    pub equal: usize,
    /// The earliest place at which any of them differed.
    pub first_divergence: Option<usize>,
    /// Share of the tokens that come before the first difference, of all prompts.
    pub agreement: f64,
}

impl Program {
    /// The program at `path`, which was built with this crate.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    pub fn at(path: &Path) -> Result<Self, BenchError> {
        let bytes = std::fs::read(path).map_err(|source| BenchError::Start { program: path.to_owned(), source })?;
        Ok(Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            sha256: hex(&Sha256::digest(bytes)),
            build: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
        })
    }
}

impl Record {
    /// Reads a record.
    ///
    /// # Errors
    ///
    /// If it is something else, or of another version.
    pub fn parse(json: &str) -> Result<Self, BenchError> {
        let value: Value = serde_json::from_str(json).map_err(|e| BenchError::Record(e.to_string()))?;
        let (schema, version) = (value["schema"].as_str().unwrap_or_default(), value["version"].as_u64());
        if schema != SCHEMA || version != Some(u64::from(VERSION)) {
            let found = version.map_or_else(|| "no version".to_owned(), |version| format!("version {version}"));
            let why = format!("schema `{schema}`, {found}; this program reads `{SCHEMA}`, version {VERSION}");
            return Err(BenchError::Record(why));
        }
        serde_json::from_value(value).map_err(|e| BenchError::Record(e.to_string()))
    }

    /// The engagement of every cell with an arm C.
    pub fn engagements(&self) -> impl Iterator<Item = &Engagement> {
        self.experiments.iter().flat_map(|experiment| &experiment.cells).filter_map(|cell| cell.engagement.as_ref())
    }

    /// Cells that prove nothing.
    pub fn num_void(&self) -> usize {
        let cells = self.experiments.iter().flat_map(|experiment| &experiment.cells);
        cells.filter(|cell| cell.void.is_some()).count()
    }

    /// True if arm C may be called hybrid everywhere.
    pub fn is_hybrid(&self) -> bool {
        let mut engagements = self.engagements().peekable();
        engagements.peek().is_some() && engagements.all(Engagement::is_hybrid)
    }
}

impl Cell {
    pub fn arm(&self, name: ArmName) -> Option<&CellArm> {
        self.arms.iter().find(|arm| arm.arm == name)
    }
}

impl CellArm {
    /// Before anything is measured.
    pub fn new(arm: ArmName) -> Self {
        Self {
            arm,
            samples: Vec::new(),
            prefill_tps: None,
            ttft_ms: None,
            decode_tps: None,
            evidence: None,
            drafts: None,
            unstable: false,
        }
    }

    pub fn prefill_rates(&self) -> Vec<f64> {
        self.samples.iter().map(|sample| sample.prefill_tps).collect()
    }
}
