//! The simulated engine: another back end, most often [`super::soft`], with faults on demand and a time of its own. Results are
//! those of the back end within; how long an engine would have taken is charged to each instance by a rate, and whatever is
//! reported of that is a prediction ([`NpuBackend::simulated_ns`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::{Bank, Compiled, Limits, NpuBackend, NpuError, Procedure, Program};
use crate::slot::Output;

/// What goes wrong. The default is nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimFaults {
    /// Procedures with more bytes of weights are not compiled.
    pub compile_limit: Option<u64>,
    /// So many loads fail, the first ones.
    pub failing_loads: u32,
    /// Banks with more bytes are not loaded.
    pub bank_limit: Option<u64>,
    /// The run with this number fails, counted from 0 over all instances and from [`Sim::arm`] on.
    pub failing_run: Option<u64>,
    /// Every run adds this to some of its results.
    pub noise: f32,
    /// Only runs from this number on do, counted as above.
    pub noise_from: Option<u64>,
    /// Banks are copies of their weights, so that unloading one frees memory.
    pub copies_weights: bool,
}

/// How long an instance takes. The default is an instance of the hybrid spec's section 12.3 at its best operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimRates {
    /// Operations a second, two for a multiply-add.
    pub tops: f64,
    /// From the call to the start of the work.
    pub launch_us: f64,
}

impl Default for SimRates {
    fn default() -> Self {
        Self { tops: 11.5, launch_us: 33.0 }
    }
}

impl SimRates {
    /// One tile of a procedure, nanoseconds.
    fn run_ns(self, procedure: &Procedure) -> u64 {
        let operations = 2.0 * procedure.work() as f64 * procedure.tile as f64;
        (self.launch_us * 1e3 + operations / self.tops * 1e-3) as u64
    }
}

/// See the module.
pub struct Sim {
    inner: Arc<dyn NpuBackend>,
    limits: Limits,
    faults: SimFaults,
    rates: SimRates,
    shared: Arc<Shared>,
    loads_left: AtomicI64,
}

struct Shared {
    /// Runs since [`Sim::arm`]; below zero before.
    runs: AtomicI64,
    banks: AtomicU64,
    bank_bytes: AtomicU64,
    /// Time that each instance would have taken so far.
    busy_ns: Vec<AtomicU64>,
}

impl Sim {
    /// `inner` with `faults`. Nothing that is counted by runs goes wrong before [`Self::arm`].
    pub fn new(inner: Arc<dyn NpuBackend>, faults: SimFaults) -> Self {
        let limits = inner.limits().clone();
        let shared = Shared {
            runs: AtomicI64::new(i64::MIN / 2),
            banks: AtomicU64::new(0),
            bank_bytes: AtomicU64::new(0),
            busy_ns: (0..limits.instances).map(|_| AtomicU64::new(0)).collect(),
        };
        let loads_left = AtomicI64::new(i64::from(faults.failing_loads));
        Self { inner, limits, faults, rates: SimRates::default(), shared: Arc::new(shared), loads_left }
    }

    /// As fast as that.
    #[must_use]
    pub fn with_rates(self, rates: SimRates) -> Self {
        Self { rates, ..self }
    }

    /// With other limits, of as many instances.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// Counts runs from now on. The warm-up at load is one run of each procedure on each instance.
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

impl NpuBackend for Sim {
    fn name(&self) -> &str {
        "sim"
    }

    fn description(&self) -> String {
        let SimRates { tops, launch_us } = self.rates;
        format!(
            "simulated: {tops} TOP/s and {launch_us} us a call of each instance are predictions; faults on demand; computed by {} ({})",
            self.inner.name(),
            self.inner.description()
        )
    }

    /// Programs of its own: a fault may have touched them.
    fn version(&self) -> String {
        format!("sim {}", self.inner.version())
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn compile(&self, procedure: &Procedure) -> Result<Compiled, NpuError> {
        match self.faults.compile_limit {
            Some(limit) if procedure.weight_bytes() > limit => {
                let (procedure, reason) = (procedure.name.clone(), format!("simulated: more than {limit} bytes"));
                Err(NpuError::Compile { procedure, reason })
            }
            _ => self.inner.compile(procedure),
        }
    }

    fn load(&self, instance: usize, programs: &[Program]) -> Result<Box<dyn Bank>, NpuError> {
        let bytes = programs.iter().map(|(_, compiled)| compiled.resident_bytes).sum();
        let refuse = |reason: &str| Err(NpuError::Load { instance, bytes, reason: format!("simulated: {reason}") });
        if self.loads_left.fetch_sub(1, Ordering::SeqCst) > 0 {
            return refuse("not this time");
        }
        if self.faults.bank_limit.is_some_and(|limit| bytes > limit) {
            return refuse("too large");
        }
        let inner = self.inner.load(instance, programs)?;
        self.shared.banks.fetch_add(1, Ordering::SeqCst);
        self.shared.bank_bytes.fetch_add(bytes, Ordering::SeqCst);
        let run_ns = programs.iter().map(|(procedure, _)| self.rates.run_ns(procedure)).collect();
        let (shared, faults) = (Arc::clone(&self.shared), self.faults.clone());
        Ok(Box::new(SimBank { inner, instance, run_ns, shared, faults, bytes }))
    }

    fn compile_counts(&self) -> Option<super::CompileCounts> {
        self.inner.compile_counts()
    }

    fn shares_weights(&self) -> bool {
        !self.faults.copies_weights && self.inner.shares_weights()
    }

    fn simulated_ns(&self) -> Option<Vec<u64>> {
        Some(self.shared.busy_ns.iter().map(|ns| ns.load(Ordering::Relaxed)).collect())
    }

    fn enter(&self, instance: usize) {
        self.inner.enter(instance);
    }
}

struct SimBank {
    inner: Box<dyn Bank>,
    instance: usize,
    /// Of each procedure.
    run_ns: Vec<u64>,
    shared: Arc<Shared>,
    faults: SimFaults,
    bytes: u64,
}

impl Bank for SimBank {
    fn run(&mut self, index: usize, x: &[f32], out: &mut [Output<'_>]) -> Result<(), NpuError> {
        let run = self.shared.runs.fetch_add(1, Ordering::SeqCst);
        self.shared.busy_ns[self.instance].fetch_add(self.run_ns[index], Ordering::Relaxed);
        if self.faults.failing_run.is_some_and(|failing| run == failing as i64) {
            let (procedure, reason) = (format!("procedure {index}"), format!("simulated: run {run} fails"));
            return Err(NpuError::Run { procedure, reason });
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

impl Drop for SimBank {
    fn drop(&mut self) {
        self.shared.banks.fetch_sub(1, Ordering::SeqCst);
        self.shared.bank_bytes.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}
