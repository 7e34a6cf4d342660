//! An engine that fails on demand, around one that does not.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use troika_device::Output;
use troika_device::npu::{Bank, Compiled, Limits, NpuBackend, NpuError, Procedure, Program};

/// What goes wrong. The default is nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NpuFaults {
    /// Procedures with more bytes of weights are not compiled.
    pub compile_limit: Option<u64>,
    /// So many loads fail, the first ones.
    pub failing_loads: i64,
    /// Banks with more bytes are not loaded.
    pub bank_limit: Option<u64>,
    /// The run with this number fails, counted from 0 over all instances once [`FaultyNpu::arm`] was called.
    pub failing_run: Option<u64>,
    /// Every run adds this to its first output.
    pub noise: f32,
    /// Only runs from this number on do, counted as above.
    pub noise_from: Option<u64>,
    /// Banks are copies of their weights, so that unloading one frees memory.
    pub copies_weights: bool,
}

/// See the module.
pub struct FaultyNpu {
    inner: Arc<dyn NpuBackend>,
    limits: Limits,
    faults: NpuFaults,
    shared: Arc<Shared>,
    loads_left: AtomicI64,
}

#[derive(Default)]
struct Shared {
    /// Runs since [`FaultyNpu::arm`]; below zero before.
    runs: AtomicI64,
    banks: AtomicU64,
    bank_bytes: AtomicU64,
}

impl FaultyNpu {
    /// `inner` with `faults`.
    pub fn new(inner: Arc<dyn NpuBackend>, faults: NpuFaults) -> Self {
        let (limits, loads_left) = (inner.limits().clone(), AtomicI64::new(faults.failing_loads));
        let shared = Arc::new(Shared { runs: AtomicI64::new(i64::MIN / 2), ..Shared::default() });
        Self { inner, limits, faults, shared, loads_left }
    }

    /// With other limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// Counts runs from now on: those before warmed the engine up.
    pub fn arm(&self) {
        self.shared.runs.store(0, Ordering::SeqCst);
    }

    /// Banks that are loaded now.
    pub fn num_banks(&self) -> u64 {
        self.shared.banks.load(Ordering::SeqCst)
    }

    /// Their bytes.
    pub fn bank_bytes(&self) -> u64 {
        self.shared.bank_bytes.load(Ordering::SeqCst)
    }

    /// Runs since [`Self::arm`].
    pub fn num_runs(&self) -> u64 {
        self.shared.runs.load(Ordering::SeqCst).max(0) as u64
    }
}

impl NpuBackend for FaultyNpu {
    fn name(&self) -> &str {
        "faulty"
    }

    fn description(&self) -> String {
        format!("fails on demand, around {}", self.inner.description())
    }

    fn version(&self) -> String {
        self.inner.version()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn compile(&self, procedure: &Procedure) -> Result<Compiled, NpuError> {
        match self.faults.compile_limit {
            Some(limit) if procedure.weight_bytes() > limit => {
                let (procedure, reason) = (procedure.name.clone(), format!("more than {limit} bytes"));
                Err(NpuError::Compile { procedure, reason })
            }
            _ => self.inner.compile(procedure),
        }
    }

    fn load(&self, instance: usize, programs: &[Program]) -> Result<Box<dyn Bank>, NpuError> {
        let bytes = programs.iter().map(|(_, compiled)| compiled.resident_bytes).sum();
        let refuse = |reason: &str| Err(NpuError::Load { instance, bytes, reason: reason.to_owned() });
        if self.loads_left.fetch_sub(1, Ordering::SeqCst) > 0 {
            return refuse("not this time");
        }
        if self.faults.bank_limit.is_some_and(|limit| bytes > limit) {
            return refuse("too large");
        }
        let inner = self.inner.load(instance, programs)?;
        self.shared.banks.fetch_add(1, Ordering::SeqCst);
        self.shared.bank_bytes.fetch_add(bytes, Ordering::SeqCst);
        let (shared, faults) = (Arc::clone(&self.shared), self.faults.clone());
        Ok(Box::new(FaultyBank { inner, shared, faults, bytes }))
    }

    fn shares_weights(&self) -> bool {
        !self.faults.copies_weights && self.inner.shares_weights()
    }

    fn enter(&self, instance: usize) {
        self.inner.enter(instance);
    }
}

struct FaultyBank {
    inner: Box<dyn Bank>,
    shared: Arc<Shared>,
    faults: NpuFaults,
    bytes: u64,
}

impl Bank for FaultyBank {
    fn run(&mut self, index: usize, x: &[f32], out: &mut [Output<'_>]) -> Result<(), NpuError> {
        let run = self.shared.runs.fetch_add(1, Ordering::SeqCst);
        if self.faults.failing_run.is_some_and(|failing| run == failing as i64) {
            return Err(NpuError::Run { procedure: format!("procedure {index}"), reason: format!("run {run} fails") });
        }
        self.inner.run(index, x, out)?;
        let is_noisy = self.faults.noise_from.is_none_or(|first| run >= first as i64);
        if self.faults.noise != 0.0 && is_noisy {
            match &mut out[0] {
                Output::Rows(rows) => rows.iter_mut().step_by(7).for_each(|x| *x += self.faults.noise),
                Output::Pieces(pieces) => pieces.iter_mut().for_each(|piece| piece[0] += self.faults.noise),
            }
        }
        Ok(())
    }
}

impl Drop for FaultyBank {
    fn drop(&mut self) {
        self.shared.banks.fetch_sub(1, Ordering::SeqCst);
        self.shared.bank_bytes.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}
