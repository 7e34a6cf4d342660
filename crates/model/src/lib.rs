//! DeepSeek-V4 as data: configuration, checkpoints in every published layout, and the graph emitter.
//!
//! Must not know devices or threads, and maps no memory itself: bytes come from whoever opens a checkpoint. Read
//! [`config`] first, then [`checkpoint`] and [`weights`], then [`emit`].

pub mod checkpoint;
pub mod config;
pub mod emit;
pub mod inspect;
mod rope;
pub mod synth;
pub mod weights;

pub use checkpoint::{Checkpoint, CheckpointError, OpenBytes, read_file};
pub use config::{ConfigError, ConfigFile, ModelConfig};
pub use emit::{Emitter, ModelFacts, StepSignature};
pub use inspect::{Inspection, inspect};
pub use synth::{Preset, SynthError, Synthesized, synth};
pub use weights::{DrafterStatus, ScaleCheck, WeightError, WeightTable};
