//! The CPU as a device: one queue, worked off by a pool of threads that share each operation.
//!
//! `weights.rs` has the loaded weights, `ops.rs` what each operation does.

mod ops;
mod weights;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use rayon::ThreadPoolBuilder;
use rayon::prelude::*;
use troika_base::NumericClass;
use troika_graph::{NodeId, WeightSource};
pub use troika_kernels::CpuLevel;
use troika_kernels::{Ctx, Parallel};

use crate::run::StepRun;
use crate::{Capabilities, Completion, Device, DeviceError, DeviceKind, Work};
use weights::CpuWeights;

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
        let pool = ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .thread_name(|index| format!("cpu-{index}"))
            .build()
            .map_err(|e| failed(e.to_string()))?;
        let threads = pool.current_num_threads();
        let description = format!("{threads} threads, {:?}", options.level);
        let capabilities = Capabilities { name: "cpu".to_owned(), kind: DeviceKind::Cpu, description, threads };
        let weights = Arc::new(OnceLock::new());
        let (queue, work) = channel();
        let worker = Worker { weights: Arc::clone(&weights), level: options.level, threads };
        // The queue is worked off by a thread of its own that hands each operation to the pool, so that a pool of one thread
        // works too.
        std::thread::Builder::new()
            .name("cpu-queue".to_owned())
            .spawn(move || pool.install(move || worker.work_off(&work)))
            .map_err(|e| failed(e.to_string()))?;
        Ok(Self { capabilities, weights, class, queue })
    }
}

impl Device for CpuDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn load(&self, source: &dyn WeightSource) -> Result<(), DeviceError> {
        let loaded = CpuWeights::load(source, self.class)?;
        assert!(self.weights.set(loaded).is_ok(), "weights are loaded once");
        Ok(())
    }

    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        self.queue.send(work).map_err(|_| DeviceError::Stopped { name: self.capabilities.name.clone() })
    }
}

/// Lives on one thread of the pool and takes part in every operation.
struct Worker {
    weights: Arc<OnceLock<CpuWeights>>,
    level: CpuLevel,
    threads: usize,
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
        let parallel = PoolThreads { threads: self.threads };
        let ctx = Ctx { level: self.level, par: &parallel };
        // A panic is a defect of ours; it ends the step, not the process.
        catch_unwind(AssertUnwindSafe(|| ops::execute(ctx, weights, run, node))).map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            let op = run.graph().node(node).op.name();
            format!("operation {op} failed: {}", text.unwrap_or("no message"))
        })
    }
}

/// Spreads tasks over the pool whose thread calls it.
struct PoolThreads {
    threads: usize,
}

impl Parallel for PoolThreads {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        if tasks == 1 {
            body(0);
        } else {
            (0..tasks).into_par_iter().with_max_len(1).for_each(body);
        }
    }
}
