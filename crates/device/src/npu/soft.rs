//! The soft engine: procedures on ordinary cores of their own, with our own integer kernels. Always there, deterministic,
//! and repeated bit by bit by the primary device, so it is what other engines are compared with.

use std::sync::Arc;

use troika_kernels::{CpuLevel, Ctx};

use super::{Bank, Compiled, Limits, NpuBackend, NpuError, Procedure, Program};
use crate::DeviceError;
use crate::cpu::cores;
use crate::cpu::pool::Pool;
use crate::slot::Output;

/// Settings of a [`Soft`] engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftOptions {
    /// Cores of each instance.
    pub cores: usize,
    /// Instances, each with cores of its own.
    pub instances: usize,
    /// Instruction set, at most what the CPU has.
    pub level: CpuLevel,
}

impl Default for SoftOptions {
    fn default() -> Self {
        Self { cores: 1, instances: 1, level: CpuLevel::best() }
    }
}

/// See the module.
pub struct Soft {
    options: SoftOptions,
    limits: Limits,
    /// One per instance.
    pools: Vec<Arc<Pool>>,
}

impl Soft {
    /// Starts the threads that its instances do not get from the outside.
    ///
    /// # Errors
    ///
    /// If they cannot be started.
    ///
    /// # Panics
    ///
    /// Without cores or instances.
    pub fn start(options: SoftOptions) -> Result<Self, DeviceError> {
        assert!(options.cores > 0 && options.instances > 0, "a soft engine needs cores and instances");
        let pool = |_| Pool::new(options.cores, false).map(Arc::new);
        let pools = (0..options.instances).map(pool).collect::<Result<_, _>>();
        let threads = options.cores * options.instances;
        let pools = pools.map_err(|e: std::io::Error| DeviceError::Threads { threads, reason: e.to_string() })?;
        let limits = Limits {
            min_tile: 64,
            tile_multiple: 64,
            channel_alignment: 8,
            input_alignment: 32,
            bank_bytes: u64::MAX,
            instances: options.instances,
            repeatable: true,
        };
        Ok(Self { options, limits, pools })
    }
}

impl NpuBackend for Soft {
    fn name(&self) -> &str {
        "soft"
    }

    fn description(&self) -> String {
        let SoftOptions { cores, instances, level } = self.options;
        format!("{instances} x {cores} cores, {level:?}")
    }

    fn version(&self) -> String {
        format!("soft-1-{}", env!("CARGO_PKG_VERSION"))
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    /// There is nothing to compile: the weights are packed already, and shared with the primary device.
    fn compile(&self, procedure: &Procedure) -> Result<Compiled, NpuError> {
        Ok(Compiled { blob: Vec::new(), resident_bytes: procedure.weight_bytes() })
    }

    fn load(&self, instance: usize, programs: &[Program]) -> Result<Box<dyn Bank>, NpuError> {
        let procedures = programs.iter().map(|(procedure, _)| Arc::clone(procedure)).collect();
        Ok(Box::new(SoftBank { procedures, pool: Arc::clone(&self.pools[instance]), level: self.options.level }))
    }

    fn shares_weights(&self) -> bool {
        true
    }

    fn enter(&self, instance: usize) {
        if self.options.cores == 1 {
            cores::pin_from_the_end("soft", instance);
        }
    }
}

struct SoftBank {
    procedures: Vec<Arc<Procedure>>,
    pool: Arc<Pool>,
    level: CpuLevel,
}

impl Bank for SoftBank {
    fn run(&mut self, index: usize, x: &[f32], out: &mut [Output<'_>]) -> Result<(), NpuError> {
        self.procedures[index].compute(Ctx { level: self.level, par: &*self.pool }, x, out);
        Ok(())
    }
}
