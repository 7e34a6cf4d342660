//! Fixed-shape neural engines: what one is asked for, and the device around it.
//!
//! An engine runs *procedures* ([`procedure`]) that were compiled at load for tiles of one row count. What differs between
//! engines is behind [`NpuBackend`]; [`banks`] brings the compiled procedures onto them, `engine.rs` has the queue and the
//! thread of each instance, [`soft`] the back end that computes on ordinary cores and is the reference for the others, [`ort`]
//! the one for engines of other makers, [`sim`] the one that fails on demand; [`cache`] keeps compiled procedures on disk.
//!
//! Must not know which operations a plan gives to an engine, nor why.

pub mod banks;
pub mod cache;
mod engine;
pub mod ort;
pub mod procedure;
pub mod sim;
pub mod soft;

use std::sync::Arc;

/// Weights of an engine: eight bits, one scale per output channel.
pub use troika_kernels::int8::Int8Matrix as ChannelWeights;

pub use banks::{BankOptions, Banks, load_banks};
pub use cache::CompileCounts;
pub use engine::NpuDevice;
pub use procedure::{Body, Procedure, ProcedureId, Product};

use crate::slot::Output;

/// What a back end can do. Nothing above it has these numbers as constants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Least rows of a tile.
    pub min_tile: usize,
    /// A tile is a multiple of this.
    pub tile_multiple: usize,
    /// Output channels of an instance are a multiple of this.
    pub channel_alignment: usize,
    /// Input channels are a multiple of this.
    pub input_alignment: usize,
    /// Most bytes of programs that an instance maps at once.
    pub bank_bytes: u64,
    /// Engines of the same kind that work at the same time.
    pub instances: usize,
    /// Its arithmetic is that of [`Procedure::compute`] bit by bit, so the primary device can repeat it.
    pub repeatable: bool,
}

/// Why an engine cannot do as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NpuError {
    /// It is not there, or not usable.
    #[error("engine {name}: {reason}")]
    Unavailable {
        /// Which back end.
        name: String,
        /// Why.
        reason: String,
    },
    /// It refuses a procedure.
    #[error("{procedure} was not compiled: {reason}")]
    Compile {
        /// Which.
        procedure: String,
        /// What the compiler said.
        reason: String,
    },
    /// It does not take a bank.
    #[error("a bank of {bytes} bytes was not loaded on instance {instance}: {reason}")]
    Load {
        /// Where.
        instance: usize,
        /// How large the bank is.
        bytes: u64,
        /// What the engine said.
        reason: String,
    },
    /// It failed while it ran.
    #[error("{procedure} failed: {reason}")]
    Run {
        /// Which.
        procedure: String,
        /// What the engine said.
        reason: String,
    },
}

/// A procedure as a back end's compiler leaves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The program, for the cache on disk; empty where there is nothing to keep.
    pub blob: Vec<u8>,
    /// Bytes that it occupies once loaded.
    pub resident_bytes: u64,
}

/// A compiled procedure and what it was compiled from.
pub type Program = (Arc<Procedure>, Arc<Compiled>);

/// One kind of neural engine.
pub trait NpuBackend: Send + Sync {
    /// Its name on the command line, in plans and reports.
    fn name(&self) -> &str;

    /// What a person wants to know: cores, library, driver.
    fn description(&self) -> String;

    /// Part of the key of compiled procedures.
    fn version(&self) -> String;

    /// What it can do.
    fn limits(&self) -> &Limits;

    /// Compiles one procedure.
    ///
    /// # Errors
    ///
    /// If the engine cannot run it.
    fn compile(&self, procedure: &Procedure) -> Result<Compiled, NpuError>;

    /// Loads procedures onto an instance as one program.
    ///
    /// # Errors
    ///
    /// If the engine does not take them.
    fn load(&self, instance: usize, programs: &[Program]) -> Result<Box<dyn Bank>, NpuError>;

    /// What became of compilations, if they are kept on disk.
    fn compile_counts(&self) -> Option<CompileCounts> {
        None
    }

    /// Loaded programs compute with the weights of their procedures, which the primary device holds too: giving one up frees
    /// nothing.
    fn shares_weights(&self) -> bool {
        false
    }

    /// If it is no engine but a model of one: nanoseconds that each instance would have taken so far. No time that was measured
    /// with it is an engine's.
    fn simulated_ns(&self) -> Option<Vec<u64>> {
        None
    }

    /// Called on the thread that drives an instance, before anything runs there.
    fn enter(&self, _instance: usize) {}
}

/// A loaded program with several procedures.
pub trait Bank: Send {
    /// Runs procedure `index` of the bank on one tile.
    ///
    /// - `x`   `[tile, input_cols]`
    /// - `out` one per product of the procedure, `[tile, channels]`, overwritten
    ///
    /// # Errors
    ///
    /// If the engine failed; `out` is then worthless.
    fn run(&mut self, index: usize, x: &[f32], out: &mut [Output<'_>]) -> Result<(), NpuError>;
}
