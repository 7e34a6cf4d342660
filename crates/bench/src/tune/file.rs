//! The file that a tuning run leaves behind (`docs/formats/tuning.md`): what is recommended for which model, devices and build, and
//! the evidence. Whoever uses it names it; nothing looks for it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::search::Outcome;
use super::{Arm, Placement};
use crate::BenchError;

/// What `schema` says.
pub const SCHEMA: &str = "troika-tuning";
/// Goes up when a member changes its meaning or goes away.
pub const VERSION: u32 = 1;

/// Where the numbers come from. They are never of both kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Measured,
    /// Of a simulated machine. No server takes it.
    Prediction,
}

/// What a recommendation holds for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Digest of the weights.
    pub weights: String,
    /// The engines: back end, description, version.
    pub engines: String,
    /// The primary device.
    pub primary: String,
    /// Threads of the primary device beside the engines.
    pub threads: usize,
    /// The program that measured.
    pub build: String,
}

impl Key {
    /// What differs, the file's first; empty if nothing does.
    pub fn differences(&self, here: &Self) -> Vec<String> {
        let pairs = [
            ("weights", &self.weights, &here.weights),
            ("engines", &self.engines, &here.engines),
            ("primary device", &self.primary, &here.primary),
            ("threads beside the engines", &self.threads.to_string(), &here.threads.to_string()),
            ("build", &self.build, &here.build),
        ];
        let differing = pairs.into_iter().filter(|(_, file, here)| file != here);
        differing.map(|(what, file, here)| format!("{what}: {file} in the file, {here} here")).collect()
    }
}

/// What `serve`, `run` and `bench` do with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Rows of a tile.
    pub tile: usize,
    /// Least rows of a padded tile, 0 if none is padded: the threshold T of the spec.
    pub tail: usize,
    /// Prompt chunks in flight.
    pub wavefront: usize,
    /// Every kind that there is, as `--place` takes it.
    pub place: BTreeMap<String, String>,
    /// Of the plan that comes of it.
    pub digest: Option<String>,
    /// Tokens per second on whole tiles: the primary device in the same geometry (G), and with engines (H).
    pub primary_tps: f64,
    pub hybrid_tps: f64,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TuningFile {
    pub schema: String,
    pub version: u32,
    pub source: Source,
    pub created_unix_s: u64,
    /// What clients call the model, or the name of a simulated machine and its model.
    pub subject: String,
    pub key: Key,
    /// As `--npu` takes it.
    pub npu: String,
    /// Absent if nothing is recommended: then engines are better left out.
    pub settings: Option<Settings>,
    pub outcome: Outcome,
}

impl TuningFile {
    pub fn new(source: Source, created_unix_s: u64, subject: String, key: Key, npu: &str, outcome: Outcome) -> Self {
        let settings = outcome.recommended().and_then(|verified| {
            let Arm::Candidate(candidate) = &verified.arm else { return None };
            let place = outcome.kinds.keys().map(|kind| (kind.clone(), spelled(candidate.placement(kind))));
            Some(Settings {
                tile: outcome.options.tile,
                tail: candidate.tail,
                wavefront: candidate.wavefront,
                place: place.collect(),
                digest: verified.digest.clone(),
                primary_tps: outcome.verified[1].tps.first()?.median,
                hybrid_tps: verified.tps.first()?.median,
            })
        });
        let (schema, version, npu) = (SCHEMA.to_owned(), VERSION, npu.to_owned());
        Self { schema, version, source, created_unix_s, subject, key, npu, settings, outcome }
    }

    /// Reads one.
    ///
    /// # Errors
    ///
    /// If it is none, or of another version.
    pub fn parse(text: &str) -> Result<Self, BenchError> {
        let fault = |why: String| BenchError::Record(why);
        let value: serde_json::Value = serde_json::from_str(text).map_err(|error| fault(error.to_string()))?;
        let (schema, version) = (value["schema"].as_str(), value["version"].as_u64());
        if schema != Some(SCHEMA) || version != Some(VERSION.into()) {
            let (schema, version) = (schema.unwrap_or("no schema"), version.unwrap_or(0));
            return Err(fault(format!("it is of {schema}, version {version}, not of {SCHEMA}, version {VERSION}")));
        }
        serde_json::from_value(value).map_err(|error| fault(error.to_string()))
    }
}

/// As `--place` takes it.
pub fn spelled(placement: Placement) -> String {
    match placement {
        Placement::Primary => "primary".to_owned(),
        Placement::Whole => "whole".to_owned(),
        Placement::Split { engine, cpu: 0.0 } => format!("split:{engine}"),
        Placement::Split { engine, cpu } => format!("split:{engine}+{cpu}"),
    }
}
