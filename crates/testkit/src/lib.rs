//! What tests share: golden files, comparisons that say where, checkpoints damaged on purpose.
//!
//! For tests only, so everything here panics with a message instead of returning an error. Must not know a model: what a
//! tensor means is the test's business. Read [`golden`] first.

pub mod compare;
pub mod damage;
#[cfg(feature = "store")]
pub mod disk;
pub mod golden;
#[cfg(feature = "engine")]
pub mod hash_model;
mod safetensors;
#[cfg(feature = "engine")]
pub mod scripted;
#[cfg(feature = "engine")]
pub mod sim;
pub mod tokenizer;

use std::path::{Path, PathBuf};

pub use compare::{argmax, assert_close, assert_equal};
pub use damage::{CheckpointCopy, TensorFile};
pub use golden::{Array, Golden};

/// The root of this repository.
pub fn repo_root() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().and_then(Path::parent);
    crates.expect("testkit lies two folders below the root").to_owned()
}

/// The oracle: golden files and the tiny checkpoints `tiny`, `tiny-bf16` and `tiny-mlx`.
pub fn oracle_dir() -> PathBuf {
    repo_root().join("oracle")
}

/// One round of splitmix64.
#[cfg(feature = "store")]
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// A new empty folder, removed when the value is dropped.
pub fn scratch_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("troika-test-").tempdir().expect("the temporary folder is writable")
}
