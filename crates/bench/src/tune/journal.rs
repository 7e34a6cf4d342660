//! What a tuning run has measured so far, line by line in a file, so that one that was cut short goes on where it stopped.
//!
//! A question that was answered before is not asked again. What is compared with each other is measured in one pass, and a pass is
//! there whole or not at all, so answers of two sittings do not mix in it. The format is in `docs/formats/tuning.md`.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Candidate, Gate, KindFacts, Pass, Probe, Rig, Sample};
use crate::BenchError;

/// What `schema` of the first line says.
pub const SCHEMA: &str = "troika-tuning-journal";
pub const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    schema: String,
    version: u32,
    /// Model, devices and build that the answers hold for.
    key: Value,
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    question: Value,
    answer: Value,
}

/// A rig that remembers.
pub struct Journaled<R> {
    rig: R,
    path: PathBuf,
    file: File,
    /// Answers of earlier runs that were not used yet.
    known: VecDeque<Line>,
    /// Answers that were not known.
    num_asked: usize,
}

impl<R: Rig> Journaled<R> {
    /// Goes on with the journal at `path`, or begins one. A last line that was cut short is dropped.
    ///
    /// # Errors
    ///
    /// If it cannot be read or written, or holds for another `key`.
    pub fn open(rig: R, path: &Path, key: &Value) -> Result<Self, BenchError> {
        let fault = |why: String| BenchError::Journal { path: path.to_owned(), why };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(fault(error.to_string())),
        };
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        let mut lines = whole.lines();
        let mut known = VecDeque::new();
        if let Some(first) = lines.next() {
            let header: Header = serde_json::from_str(first).map_err(|e| fault(format!("its first line: {e}")))?;
            if header.schema != SCHEMA || header.version != VERSION {
                let (schema, version) = (header.schema, header.version);
                return Err(fault(format!("it is of schema {schema}, version {version}, not {SCHEMA} {VERSION}")));
            }
            if header.key != *key {
                return Err(fault(format!("it holds for {}, and this is {key}", header.key)));
            }
            for (index, line) in lines.enumerate() {
                let line = serde_json::from_str(line).map_err(|e| fault(format!("line {}: {e}", index + 2)))?;
                known.push_back(line);
            }
        }
        let io = |error: std::io::Error| fault(error.to_string());
        let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(io)?;
        if whole.len() < text.len() {
            file.set_len(whole.len() as u64).map_err(io)?;
        }
        if whole.is_empty() {
            let header = Header { schema: SCHEMA.to_owned(), version: VERSION, key: key.clone() };
            write(&mut file, &header).map_err(|error| fault(error.to_string()))?;
        }
        Ok(Self { rig, path: path.to_owned(), file, known, num_asked: 0 })
    }

    /// Answers that are there already.
    pub fn num_known(&self) -> usize {
        self.known.len()
    }

    /// Answers that this run had to measure.
    pub fn num_asked(&self) -> usize {
        self.num_asked
    }

    fn answer<T: Serialize + DeserializeOwned>(
        &mut self,
        question: Value,
        ask: impl FnOnce(&mut R) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        let path = self.path.clone();
        let fault = |why: String| BenchError::Journal { path: path.clone(), why };
        let place = self.known.iter().position(|line| line.question == question);
        let line = match place.and_then(|place| self.known.remove(place)) {
            Some(line) => line,
            None => {
                let answer = ask(&mut self.rig)?;
                self.num_asked += 1;
                let answer = serde_json::to_value(&answer).map_err(|error| fault(error.to_string()))?;
                let line = Line { question, answer };
                write(&mut self.file, &line).map_err(|error| fault(error.to_string()))?;
                line
            }
        };
        serde_json::from_value(line.answer).map_err(|error| fault(error.to_string()))
    }
}

fn write(file: &mut File, line: &impl Serialize) -> std::io::Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    file.write_all(text.as_bytes())?;
    file.sync_data()
}

fn question(name: &str, of: &impl Serialize) -> Value {
    serde_json::json!({ name: of })
}

impl<R: Rig> Rig for Journaled<R> {
    fn kinds(&self) -> Vec<KindFacts> {
        self.rig.kinds()
    }

    fn probe(&mut self, kind: &str) -> Result<Probe, BenchError> {
        self.answer(question("probe", &kind), |rig| rig.probe(kind))
    }

    fn pass(&mut self, pass: &Pass) -> Result<Vec<Vec<Sample>>, BenchError> {
        self.answer(question("pass", pass), |rig| rig.pass(pass))
    }

    fn gate(&mut self, candidate: &Candidate) -> Result<Gate, BenchError> {
        self.answer(question("gate", candidate), |rig| rig.gate(candidate))
    }
}
