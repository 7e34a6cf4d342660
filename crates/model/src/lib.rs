//! DeepSeek-V4: configuration, checkpoints in every published layout, and the graph emitter.
//!
//! Must not know devices and threads. Read [`config`] first, then [`checkpoint`] and [`weights`].

pub mod checkpoint;
pub mod config;
pub mod weights;

pub use checkpoint::{Checkpoint, CheckpointError, OpenBytes, read_file};
pub use config::{ConfigError, ConfigFile, ModelConfig};
pub use weights::{DrafterStatus, ScaleCheck, WeightError, WeightTable};
