//! The tuner: which kinds of projections engines should take part in, and how (section 9 of the hybrid spec).
//!
//! It is a search over [`Candidate`]s against a [`Rig`] that measures them: server processes ([`served`]), a simulated machine, or
//! numbers made up in a test. The tuner asks and compares, and has no clock of its own: the same answers give the same outcome, so
//! a run that was cut short goes on from the [`journal`] of its answers. Read [`search`] next. It changes no settings; what it
//! finds goes into a file ([`file`]).

pub mod file;
pub mod journal;
pub mod report;
pub mod search;
pub mod served;
#[cfg(test)]
mod tests;
mod verify;
pub mod width;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::BenchError;
use crate::tune::width::Point;

/// What engines do of a kind of projection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Nothing.
    #[default]
    Primary,
    /// Some output channels: `engine` of them on the engines, `cpu` of them on a helping CPU, the rest on the primary device.
    Split { engine: f64, cpu: f64 },
    /// All of it, beside whatever does not wait for it.
    Whole,
}

impl Placement {
    pub fn split(engine: f64) -> Self {
        Self::Split { engine, cpu: 0.0 }
    }

    /// For people.
    pub fn label(&self) -> String {
        match self {
            Self::Primary => "off".to_owned(),
            Self::Whole => "whole".to_owned(),
            Self::Split { engine, cpu } if *cpu > 0.0 => format!("split {engine:.3}, cpu {cpu:.3}"),
            Self::Split { engine, .. } => format!("split {engine:.3}"),
        }
    }
}

/// One way to use the engines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// By kind; the others are the primary device's.
    pub kinds: BTreeMap<String, Placement>,
    /// Prompt chunks in flight.
    pub wavefront: usize,
    /// Least rows of a padded tile; 0 = none is padded.
    pub tail: usize,
}

impl Candidate {
    /// No engine.
    pub fn off() -> Self {
        Self { kinds: BTreeMap::new(), wavefront: 1, tail: 0 }
    }

    pub fn placement(&self, kind: &str) -> Placement {
        self.kinds.get(kind).copied().unwrap_or_default()
    }

    /// The same but for one kind.
    #[must_use]
    pub fn with(&self, kind: &str, placement: Placement) -> Self {
        let mut changed = self.clone();
        match placement {
            Placement::Primary => changed.kinds.remove(kind),
            placement => changed.kinds.insert(kind.to_owned(), placement),
        };
        changed
    }

    /// The same with another number of chunks in flight.
    #[must_use]
    pub fn in_flight(&self, wavefront: usize) -> Self {
        Self { wavefront, ..self.clone() }
    }

    pub fn label(&self) -> String {
        let kinds: Vec<String> = self.kinds.iter().map(|(kind, place)| format!("{kind} {}", place.label())).collect();
        let kinds = if kinds.is_empty() { "no engine".to_owned() } else { kinds.join("; ") };
        if self.wavefront > 1 { format!("{kinds}; {} chunks in flight", self.wavefront) } else { kinds }
    }
}

/// What is known of a kind before anything is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindFacts {
    pub name: String,
    /// Projections of the kind: operations per tile.
    pub layers: usize,
    /// Fractions come in steps of this, by the alignment of engines and primary device; `None` if it cannot be split.
    pub step: Option<f64>,
    /// Steps of the CPU's fraction; `None` if no CPU helps.
    pub cpu_step: Option<f64>,
    /// Engines can do all of it.
    pub can_be_whole: bool,
    /// Kinds that are parts of this one: either they are placed or it is.
    pub parts: Vec<String>,
}

/// What one operation of a kind costs by itself, milliseconds for one tile of one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// All of it on the primary device.
    pub primary_ms: f64,
    /// A part on the primary device; `None` if it cannot be cut.
    pub primary_part: Option<Point>,
    /// Parts on the engines together, three widths at least.
    pub engine: Vec<Point>,
    /// Parts on a helping CPU.
    pub cpu: Vec<Point>,
    /// Joining the parts, where that is a step of its own.
    pub merge_ms: f64,
    /// All of it on the engines.
    pub whole_ms: Option<f64>,
    /// Why engines must not do it, if their result is too far from the primary device's.
    pub refused: Option<String>,
}

/// What is measured in turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// The primary device as it is served.
    Stock,
    /// The same in the geometry that the engines need.
    Matched,
    /// The plan that is compared with, just as it is.
    Reference,
    Candidate(Candidate),
}

/// One pass over some arms, in turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    pub arms: Vec<Arm>,
    /// Tokens of the prompts.
    pub prompts: Vec<usize>,
    /// The last arm first.
    pub reversed: bool,
    /// Each arm in a process of its own that is started for it. Otherwise it may have been measured before.
    pub fresh: bool,
}

/// One arm, one prompt length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Prompt tokens per second of computing.
    pub tps: f64,
    /// Why it does not count: not everything that was planned was dispatched.
    pub void: Option<String>,
    /// Of the plan, as the server says.
    pub digest: Option<String>,
    /// Seconds that loading took for it, and measuring.
    pub load_s: f64,
    pub measure_s: f64,
}

/// Whether the numbers are near enough to the primary device's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Gate {
    Passed {
        summary: String,
    },
    Failed {
        reasons: Vec<String>,
    },
    /// Nobody could compare: a prediction computes nothing.
    NotRun {
        why: String,
    },
}

/// Measures what the tuner asks for.
pub trait Rig {
    /// What can be placed.
    fn kinds(&self) -> Vec<KindFacts>;

    /// # Errors
    ///
    /// If it cannot be measured.
    fn probe(&mut self, kind: &str) -> Result<Probe, BenchError>;

    /// A sample for every arm, in the order of the arms, and every prompt.
    ///
    /// # Errors
    ///
    /// If an arm cannot be measured at all; one whose plan was not carried out is void instead.
    fn pass(&mut self, pass: &Pass) -> Result<Vec<Vec<Sample>>, BenchError>;

    /// # Errors
    ///
    /// If there is nothing to compare.
    fn gate(&mut self, candidate: &Candidate) -> Result<Gate, BenchError>;
}
