//! The CPU as a device: a queue, worked off by whoever waits for a step together with a pool of threads; they share each
//! operation.
//!
//! `weights.rs` has the loaded weights, `ops.rs` what each operation does, `pool.rs` the threads, `cores.rs` where they run.

pub(crate) mod cores;
mod ops;
#[expect(unsafe_code, reason = "tasks borrow from their caller, which the type of a thread cannot say")]
pub(crate) mod pool;
mod weights;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use troika_base::{NumericClass, StoredTensor};
use troika_graph::{NodeId, WeightSource};
pub use troika_kernels::{CpuLevel, REVISION};
use troika_kernels::{Ctx, Parallel};

use crate::npu::ChannelWeights;
use crate::run::StepRun;
use crate::{Capabilities, Device, DeviceError, DeviceKind, Output, Part, Priority, Report, Work};
use pool::Pool;
use weights::CpuWeights;
pub use weights::{WeightForm, WeightMemory, weight_form, weight_memory};

/// Settings of a [`CpuDevice`].
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Worker threads; 0 = one per physical core.
    pub threads: usize,
    /// Keep each on a core of its own.
    pub pin: bool,
    /// Instruction set, at most what the CPU has.
    pub level: CpuLevel,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self { threads: 0, pin: false, level: CpuLevel::best() }
    }
}

/// The primary device: runs every operation.
pub struct CpuDevice {
    capabilities: Capabilities,
    weights: OnceLock<CpuWeights>,
    class: NumericClass,
    level: CpuLevel,
    queue: Mutex<Queue>,
    /// Held by the thread that computes.
    pool: Mutex<Pool>,
}

/// What is to be done, by priority.
#[derive(Default)]
struct Queue {
    decode: VecDeque<Job>,
    prefill: VecDeque<Job>,
}

/// Work, perhaps begun.
struct Job {
    work: Work,
    elapsed_ns: Vec<u64>,
}

impl Queue {
    fn of(&mut self, priority: Priority) -> &mut VecDeque<Job> {
        match priority {
            Priority::Decode => &mut self.decode,
            Priority::Prefill => &mut self.prefill,
        }
    }

    fn take(&mut self) -> Option<Job> {
        self.decode.pop_front().or_else(|| self.next_prefill().and_then(|index| self.prefill.remove(index)))
    }

    /// Of several steps, one whose turn it is to do what engines wait for, so that these are never idle for want of input;
    /// then the oldest, so that its results come first. Work of one step is done in order.
    fn next_prefill(&self) -> Option<usize> {
        let id = |index: usize| self.prefill[index].work.run.id();
        let firsts = (0..self.prefill.len()).filter(|index| (0..*index).all(|before| id(before) != id(*index)));
        firsts.min_by_key(|index| (!self.prefill[*index].work.feeds, id(*index)))
    }
}

impl CpuDevice {
    /// Starts the worker threads. `class` says in which form weights are kept, and so which products are integer ones.
    ///
    /// # Errors
    ///
    /// If they cannot be started.
    pub fn start(options: CpuOptions, class: NumericClass) -> Result<Self, DeviceError> {
        let failed = |reason: String| DeviceError::Threads { threads: options.threads, reason };
        let pool = Pool::new(options.threads, options.pin).map_err(|e| failed(e.to_string()))?;
        let threads = pool.threads();
        let plural = if threads == 1 { "" } else { "s" };
        let description = format!("{threads} CPU thread{plural}, {}", options.level.name());
        let capabilities = Capabilities { name: "cpu".to_owned(), kind: DeviceKind::Cpu, description, threads };
        let (queue, pool) = (Mutex::default(), Mutex::new(pool));
        Ok(Self { capabilities, weights: OnceLock::new(), class, level: options.level, queue, pool })
    }

    /// Rounds a tensor to one scale per output channel, on the device's threads.
    pub fn pack_channels(&self, tensor: &StoredTensor) -> ChannelWeights {
        let pool = lock(&self.pool);
        ChannelWeights::pack_channels(Ctx { level: self.level, par: &*pool }, tensor)
    }

    fn execute(&self, pool: &Pool, run: &StepRun, node: NodeId, part: Option<&Part>) -> Result<(), String> {
        let weights = self.weights.get().ok_or("no weights are loaded")?;
        let ctx = Ctx { level: self.level, par: pool };
        let body = || match part {
            Some(part) => compute_part(ctx, run, node, part),
            None => ops::execute(ctx, weights, run, node),
        };
        // A panic is a defect of ours; it ends the step, not the process.
        catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            let op = run.graph().node(node).op.name();
            format!("operation {op} failed: {}", text.unwrap_or("no message"))
        })
    }
}

impl Device for CpuDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn load(&self, source: &dyn WeightSource) -> Result<(), DeviceError> {
        let pool = lock(&self.pool);
        let ctx = Ctx { level: self.level, par: &*pool };
        let loaded = CpuWeights::load(ctx, source, self.class)?;
        assert!(self.weights.set(loaded).is_ok(), "weights are loaded once");
        Ok(())
    }

    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        let job = Job { elapsed_ns: Vec::with_capacity(work.nodes.len()), work };
        lock(&self.queue).of(job.work.priority).push_back(job);
        Ok(())
    }

    fn drive(&self, pause: &mut dyn FnMut(Instant) -> bool) -> bool {
        let pool = lock(&self.pool);
        let Some(mut job) = lock(&self.queue).take() else { return false };
        let _busy = pool.stay_awake();
        let mut start = Instant::now();
        loop {
            let node = job.work.nodes[job.elapsed_ns.len()];
            let result = self.execute(&pool, &job.work.run, node, job.work.part.as_ref());
            let end = Instant::now();
            let failure = result.err();
            if failure.is_none() {
                job.elapsed_ns.push((end - start).as_nanos() as u64);
            }
            start = end;
            if failure.is_some() || job.elapsed_ns.len() == job.work.nodes.len() {
                job.report(failure);
                if pause(end) {
                    return true;
                }
                let Some(next) = lock(&self.queue).take() else { return true };
                job = next;
            } else if pause(end) {
                lock(&self.queue).of(job.work.priority).push_front(job);
                return true;
            } else if job.work.priority != Priority::Decode {
                let mut queue = lock(&self.queue);
                if let Some(urgent) = queue.decode.pop_front() {
                    queue.of(job.work.priority).push_front(std::mem::replace(&mut job, urgent));
                }
            }
        }
    }
}

impl Job {
    fn report(self, failure: Option<String>) {
        let Self { work: Work { run, nodes, part, done, .. }, elapsed_ns } = self;
        let report = Report { step: run.id(), nodes, part: part.map(|part| part.id), elapsed_ns, failure };
        // Whoever takes the report wants the step for itself.
        drop(run);
        // If nobody waits for the step any more, nobody misses the report.
        let _ = done.send(report);
    }
}

/// Does a part in the arithmetic of its procedure, any number of rows.
fn compute_part(ctx: Ctx<'_>, run: &StepRun, node: NodeId, part: &Part) {
    let node = run.graph().node(node);
    let cols = part.procedure.input_cols();
    let x = run.read_f32(node.inputs[0]);
    let x = &x[part.rows.start * cols..part.rows.end * cols];
    let places = part.procedure.outputs(&part.rows).into_iter();
    let mut guards: Vec<_> = places.zip(&node.outputs).map(|(place, value)| run.write_columns(*value, place)).collect();
    let mut outputs: Vec<Output<'_>> = guards.iter_mut().map(|guard| guard.output()).collect();
    part.procedure.compute(ctx, x, &mut outputs);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can be left half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use troika_base::{SequenceId, StepId};
    use troika_graph::{
        Acceptance, Element, GraphBuilder, Kind, Node, Op, Scope, Segment, StepRows, ValueId, WeightKey,
    };

    use super::*;
    use crate::run::BufferPool;
    use crate::{SequenceState, StateShape};

    struct NoWeights;

    impl WeightSource for NoWeights {
        fn keys(&self) -> Vec<WeightKey> {
            Vec::new()
        }

        fn tensor(&self, _: WeightKey) -> Option<StoredTensor> {
            None
        }
    }

    /// A step that copies rows `nodes - 1` times.
    fn step(id: u64, nodes: u32) -> Arc<StepRun> {
        let mut builder = GraphBuilder::new(1, 0);
        for index in 0..nodes {
            let output = builder.value(1, Element::F32);
            let (op, inputs) = match index {
                0 => (Op::ConcatColumns, Vec::new()),
                _ => (Op::Copy, vec![ValueId(index - 1)]),
            };
            let (outputs, scope, kind, state) = (vec![output], Scope::Model, Kind::Gate, Vec::new());
            builder.push(Node { op, inputs, outputs, scope, kind, state });
        }
        let segment = Segment { sequence: SequenceId(id), row: 0, rows: 1, position: 0, acceptance: Acceptance::Whole };
        let rows = StepRows { tokens: vec![0], segments: vec![segment], logit_rows: Vec::new() };
        let states = vec![Arc::new(SequenceState::new(&StateShape::default()))];
        Arc::new(StepRun::new(StepId(id), Arc::new(builder.build()), rows, states, &BufferPool::default()))
    }

    #[test]
    fn decode_nodes_go_before_the_next_prefill_node() {
        let options = CpuOptions { threads: 2, ..CpuOptions::default() };
        let device = CpuDevice::start(options, NumericClass::Exact).expect("threads start");
        device.load(&NoWeights).expect("nothing to refuse");
        let (done, reports) = channel();
        let submit = |id: u64, count: u32, priority, feeds| {
            let nodes = (0..count).map(NodeId).collect();
            let work = Work { run: step(id, count), nodes, part: None, priority, feeds, done: done.clone() };
            device.submit(work).expect("it runs");
        };
        let drive = |max_nodes: usize| {
            let mut num_nodes = 0;
            device.drive(&mut |_| {
                num_nodes += 1;
                num_nodes == max_nodes
            })
        };
        submit(0, 10, Priority::Prefill, false);
        submit(1, 4, Priority::Prefill, false);
        assert!(drive(3));
        submit(2, 5, Priority::Decode, false);
        assert!(drive(5));
        let report = reports.try_recv().expect("the decode step is done");
        assert_eq!((report.step, report.elapsed_ns.len(), report.failure), (StepId(2), 5, None));
        assert!(reports.try_recv().is_err(), "one report for one piece of work");
        assert!(drive(7));
        let report = reports.try_recv().expect("what was begun first goes on first");
        assert_eq!((report.step, report.elapsed_ns.len(), report.nodes.len()), (StepId(0), 10, 10));
        assert!(drive(usize::MAX));
        assert_eq!(reports.try_recv().expect("nothing is left").step, StepId(1));
        assert!(!drive(usize::MAX), "nothing was queued");

        // Of two steps the older goes first, unless engines wait for the other; a step's own work stays in order.
        submit(3, 3, Priority::Prefill, false);
        submit(3, 1, Priority::Prefill, true);
        submit(4, 3, Priority::Prefill, true);
        submit(4, 2, Priority::Prefill, false);
        assert!(drive(1));
        assert!(drive(usize::MAX));
        let done: Vec<(u64, usize)> = reports.try_iter().map(|report| (report.step.0, report.nodes.len())).collect();
        assert_eq!(done, [(4, 3), (3, 3), (3, 1), (4, 2)]);
    }
}
