//! DeepSeek-V4 as data: configuration, checkpoint reading in every layout, and the graph emitter.
//!
//! Must not know devices or threads, and maps no memory itself: bytes come from whoever opens a checkpoint. Read
//! [`config`], then [`emit`].

pub mod config;
pub mod emit;
mod rope;

pub use config::ModelConfig;
pub use emit::{Emitter, ModelFacts, StepSignature};
