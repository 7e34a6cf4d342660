//! The benchmark: arms measured in turn through real server processes, statistics that do not see what is not there, a
//! check that a feature ran at all, and reports.
//!
//! It talks HTTP to `troika serve` like any client and must not know engines, models or devices. Read [`run`] next; the
//! method is in `docs/benchmarks.md`, the record in `docs/formats/bench-record.md`.

pub mod arm;
pub mod client;
pub mod compare;
pub mod corpus;
pub mod drafts;
pub mod evidence;
pub mod host;
pub mod load;
pub mod record;
pub mod report;
pub mod run;
pub mod server;
pub mod stats;
pub mod tune;

use std::path::PathBuf;

use troika_prompt::PromptError;

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    #[error(
        "{corpus} has {available} tokens from there on, {wanted} are wanted and none is repeated: take shorter prompts or another --corpus"
    )]
    CorpusTooShort { corpus: &'static str, wanted: usize, available: usize },
    #[error("cannot start {}", program.display())]
    Start { program: PathBuf, source: std::io::Error },
    #[error("cannot make a folder for a server's cache")]
    CacheDir(#[source] std::io::Error),
    #[error("the server {why}; it was started with `serve {args}` and its log ends with:{log}")]
    Server { args: String, why: String, log: String },
    #[error("{path}: {why}")]
    Http { path: String, why: String },
    #[error("{path} answered {status}: {body}")]
    Refused { path: String, status: u16, body: String },
    #[error("interrupted")]
    Interrupted,
    #[error("not a benchmark record: {0}")]
    Record(String),
    #[error("{}: {why}", path.display())]
    Journal { path: PathBuf, why: String },
    #[error("this would take about {minutes} minutes: --yes goes ahead, shorter prompts and fewer rounds take less")]
    NeedsConsent { minutes: u64 },
    #[error("a plot could not be drawn: {0}")]
    Plot(String),
    #[error(transparent)]
    Prompt(#[from] PromptError),
}
