//! DeepSeek-V4: configuration, checkpoints in every published layout, and the graph emitter.
//!
//! Must not know devices and threads. Read [`config`] first, then [`checkpoint`] and [`weights`].

pub mod checkpoint;
pub mod config;
pub mod inspect;
pub mod synth;
pub mod weights;

pub use checkpoint::{Checkpoint, CheckpointError, OpenBytes, read_file};
pub use config::{ConfigError, ConfigFile, ModelConfig};
pub use inspect::{Inspection, inspect};
pub use synth::{Preset, SynthError, Synthesized, synth};
pub use weights::{DrafterStatus, ScaleCheck, WeightError, WeightTable};
