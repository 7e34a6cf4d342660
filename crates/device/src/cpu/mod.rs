//! The CPU as a device: one queue, worked off by a pool of threads that share each operation.
//!
//! `weights.rs` has the loaded weights, `ops.rs` what each operation does, `pool.rs` the threads.

mod ops;
#[expect(unsafe_code, reason = "tasks borrow from their caller, which the type of a thread cannot say")]
mod pool;
mod weights;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use troika_base::NumericClass;
use troika_graph::{NodeId, WeightSource};
pub use troika_kernels::CpuLevel;
use troika_kernels::{Ctx, Parallel};

use crate::run::StepRun;
use crate::{Capabilities, Completion, Device, DeviceError, DeviceKind, Work};
use pool::Pool;
use weights::CpuWeights;
pub use weights::{WeightForm, WeightMemory, weight_form, weight_memory};

/// Settings of a [`CpuDevice`].
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Worker threads; 0 = one per core.
    pub threads: usize,
    /// Instruction set, at most what the CPU has.
    pub level: CpuLevel,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self { threads: 0, level: CpuLevel::best() }
    }
}

/// The primary device: runs every operation.
pub struct CpuDevice {
    capabilities: Capabilities,
    weights: Arc<OnceLock<CpuWeights>>,
    class: NumericClass,
    level: CpuLevel,
    pool: Arc<Pool>,
    queue: Sender<Work>,
}

impl CpuDevice {
    /// Starts the worker threads. `class` says in which form weights are kept, and so which products are integer ones.
    ///
    /// # Errors
    ///
    /// If they cannot be started.
    pub fn start(options: CpuOptions, class: NumericClass) -> Result<Self, DeviceError> {
        let failed = |reason: String| DeviceError::Threads { threads: options.threads, reason };
        let pool = Arc::new(Pool::new(options.threads).map_err(|e| failed(e.to_string()))?);
        let threads = pool.threads();
        let description = format!("{threads} threads, {:?}", options.level);
        let capabilities = Capabilities { name: "cpu".to_owned(), kind: DeviceKind::Cpu, description, threads };
        let weights = Arc::new(OnceLock::new());
        let (queue, work) = channel();
        let worker = Worker { weights: Arc::clone(&weights), level: options.level, pool: Arc::clone(&pool) };
        // The thread that works off the queue is the first of the pool.
        std::thread::Builder::new()
            .name("cpu-0".to_owned())
            .spawn(move || worker.work_off(&work))
            .map_err(|e| failed(e.to_string()))?;
        Ok(Self { capabilities, weights, class, level: options.level, pool, queue })
    }
}

impl Device for CpuDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn load(&self, source: &dyn WeightSource) -> Result<(), DeviceError> {
        let ctx = Ctx { level: self.level, par: &*self.pool };
        let loaded = CpuWeights::load(ctx, source, self.class)?;
        assert!(self.weights.set(loaded).is_ok(), "weights are loaded once");
        Ok(())
    }

    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        self.queue.send(work).map_err(|_| DeviceError::Stopped { name: self.capabilities.name.clone() })
    }
}

/// Lives on the first thread of the pool and takes part in every operation.
struct Worker {
    weights: Arc<OnceLock<CpuWeights>>,
    level: CpuLevel,
    pool: Arc<Pool>,
}

impl Worker {
    fn work_off(&self, queue: &Receiver<Work>) {
        while let Ok(work) = queue.recv() {
            for node in &work.nodes {
                let start = Instant::now();
                let result = self.execute(&work.run, *node);
                let elapsed_us = start.elapsed().as_micros() as u64;
                let failed = result.is_err();
                let completion = Completion { step: work.run.id(), node: *node, elapsed_us, result };
                // A step that failed, or that nobody waits for any more, needs no further node.
                if work.done.send(completion).is_err() || failed {
                    break;
                }
            }
        }
    }

    fn execute(&self, run: &StepRun, node: NodeId) -> Result<(), String> {
        let weights = self.weights.get().ok_or("no weights are loaded")?;
        let ctx = Ctx { level: self.level, par: &*self.pool };
        // A panic is a defect of ours; it ends the step, not the process.
        catch_unwind(AssertUnwindSafe(|| ops::execute(ctx, weights, run, node))).map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            let op = run.graph().node(node).op.name();
            format!("operation {op} failed: {}", text.unwrap_or("no message"))
        })
    }
}
