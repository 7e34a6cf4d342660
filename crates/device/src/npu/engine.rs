//! One instance of a neural engine as a device: a queue, a thread that waits for the engine, and its banks.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use troika_graph::{NodeId, WeightSource};

use super::banks::InstanceBanks;
use super::procedure::ProcedureId;
use super::{Bank, NpuBackend, NpuError, Procedure, Program};
use crate::run::StepRun;
use crate::slot::Output;
use crate::{Capabilities, Device, DeviceError, DeviceKind, Part, Probe, Reloaded, Report, Work};

/// See the module.
pub struct NpuDevice {
    capabilities: Capabilities,
    queue: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Bytes of the worker's surfaces.
    surface_bytes: Arc<AtomicU64>,
}

enum Job {
    Part(Work),
    /// Run a procedure on these rows, outside of any step.
    Probe(Arc<Procedure>, Vec<f32>, Sender<Result<Vec<f32>, NpuError>>),
    /// Give up the banks whose procedures are all among these.
    Shed(Vec<ProcedureId>),
    /// Load the bank of these procedures again.
    Reload(Vec<Arc<Procedure>>, Probe, Sender<Reloaded>),
}

impl NpuDevice {
    /// Starts the thread of instance `instance`, which owns `banks` from now on.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn start(backend: Arc<dyn NpuBackend>, instance: usize, banks: InstanceBanks) -> Result<Self, DeviceError> {
        let name = format!("{}{instance}", backend.name());
        let description = backend.description();
        let capabilities = Capabilities { name: name.clone(), kind: DeviceKind::Npu, description, threads: 1 };
        let (queue, jobs) = channel();
        let mut worker = Worker::new(Arc::clone(&backend), instance, banks);
        let surface_bytes = Arc::clone(&worker.surface_bytes);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                backend.enter(instance);
                worker.work_off(&jobs);
            })
            .map_err(|e| DeviceError::Threads { threads: 1, reason: e.to_string() })?;
        Ok(Self { capabilities, queue: Some(queue), thread: Some(thread), surface_bytes })
    }

    /// Runs `procedure` on a tile `x` and waits for its outputs, one after another.
    ///
    /// # Errors
    ///
    /// If the engine failed.
    pub fn probe(&self, procedure: &Arc<Procedure>, x: &[f32]) -> Result<Vec<f32>, NpuError> {
        let gone = || NpuError::Run { procedure: procedure.name.clone(), reason: "the engine has stopped".to_owned() };
        let (done, result) = channel();
        self.send(Job::Probe(Arc::clone(procedure), x.to_vec(), done)).map_err(|_| gone())?;
        result.recv().map_err(|_| gone())?
    }

    fn send(&self, job: Job) -> Result<(), DeviceError> {
        let stopped = || DeviceError::Stopped { name: self.capabilities.name.clone() };
        self.queue.as_ref().ok_or_else(stopped)?.send(job).map_err(|_| stopped())
    }
}

impl Device for NpuDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Its weights are in its procedures.
    fn load(&self, _: &dyn WeightSource) -> Result<(), DeviceError> {
        Ok(())
    }

    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        if work.part.is_none() || work.nodes.len() != 1 {
            let (name, reason) = (self.capabilities.name.clone(), "runs compiled procedures only".to_owned());
            return Err(DeviceError::Refused { name, reason });
        }
        self.send(Job::Part(work))
    }

    /// Frees the banks that hold none but these procedures.
    fn shed(&self, procedures: Vec<ProcedureId>) -> Result<(), DeviceError> {
        self.send(Job::Shed(procedures))
    }

    fn reload(&self, procedures: Vec<Arc<Procedure>>, probe: Probe, done: Sender<Reloaded>) -> Result<(), DeviceError> {
        self.send(Job::Reload(procedures, probe, done))
    }

    fn surface_bytes(&self) -> u64 {
        self.surface_bytes.load(Ordering::Relaxed)
    }

    /// It has a processor of its own.
    fn drive(&self, _: &mut dyn FnMut(Instant) -> bool) -> bool {
        false
    }
}

impl Drop for NpuDevice {
    fn drop(&mut self) {
        self.queue.take();
        if let Some(thread) = self.thread.take() {
            // The worker catches what back ends throw.
            let _ = thread.join();
        }
    }
}

struct Worker {
    backend: Arc<dyn NpuBackend>,
    instance: usize,
    banks: Vec<Option<Box<dyn Bank>>>,
    procedures: Vec<Vec<ProcedureId>>,
    /// Bank and index of each procedure.
    places: HashMap<ProcedureId, (usize, usize)>,
    /// Memory for padded tiles.
    input: Vec<f32>,
    output: Vec<f32>,
    surface_bytes: Arc<AtomicU64>,
}

impl Worker {
    fn new(backend: Arc<dyn NpuBackend>, instance: usize, banks: InstanceBanks) -> Self {
        let (procedures, banks): (Vec<_>, Vec<_>) = banks.into_iter().map(|(ids, bank)| (ids, Some(bank))).unzip();
        let places = procedures.iter().enumerate();
        let places = places.flat_map(|(bank, ids)| ids.iter().enumerate().map(move |(index, id)| (*id, (bank, index))));
        let places = places.collect();
        let surface_bytes = Arc::default();
        let (input, output) = (Vec::new(), Vec::new());
        Self { backend, instance, banks, procedures, places, input, output, surface_bytes }
    }

    fn work_off(&mut self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            match job {
                Job::Part(work) => self.do_part(work),
                Job::Probe(procedure, x, done) => {
                    // Whoever asked may have gone.
                    let _ = done.send(self.run_tile(&procedure, &x));
                }
                Job::Reload(procedures, probe, done) => {
                    let _ = done.send(self.reload(&procedures, &probe));
                }
                Job::Shed(ids) => {
                    for (bank, procedures) in self.banks.iter_mut().zip(&self.procedures) {
                        if procedures.iter().all(|id| ids.contains(id)) {
                            bank.take();
                        }
                    }
                }
            }
        }
    }

    fn do_part(&mut self, work: Work) {
        let Work { run, nodes, part, done, .. } = work;
        let part = part.expect("checked when it was queued");
        let start = Instant::now();
        let result = self.catch(&part.procedure, |worker| worker.run_part(&run, nodes[0], &part));
        let elapsed_ns = start.elapsed().as_nanos() as u64;
        let step = run.id();
        // Whoever takes the report wants the step for itself.
        drop(run);
        let elapsed_ns = if result.is_ok() { vec![elapsed_ns] } else { Vec::new() };
        let failure = result.err().map(|error| error.to_string());
        // If nobody waits for the step any more, nobody misses the report.
        let _ = done.send(Report { step, nodes, part: Some(part.id), elapsed_ns, failure });
    }

    /// Runs a procedure outside of any step.
    fn run_tile(&mut self, procedure: &Procedure, x: &[f32]) -> Result<Vec<f32>, NpuError> {
        self.catch(procedure, |worker| {
            worker.surfaces(procedure);
            worker.input.copy_from_slice(x);
            worker.run_surfaces(procedure)
        })?;
        Ok(self.output[..procedure.tile * procedure.output_cols()].to_vec())
    }

    fn reload(&mut self, procedures: &[Arc<Procedure>], probe: &Probe) -> Reloaded {
        let has_all = |ids: &Vec<ProcedureId>| ids.iter().copied().eq(procedures.iter().map(|procedure| procedure.id));
        let Some(place) = self.procedures.iter().position(has_all) else {
            return Err("no bank of these procedures was ever loaded".to_owned());
        };
        let (backend, instance) = (Arc::clone(&self.backend), self.instance);
        let compile = |procedure: &Arc<Procedure>| Ok((Arc::clone(procedure), Arc::new(backend.compile(procedure)?)));
        let load = || {
            let programs: Vec<Program> = procedures.iter().map(compile).collect::<Result<_, NpuError>>()?;
            backend.load(instance, &programs)
        };
        let bank = catch_unwind(AssertUnwindSafe(load)).map_err(|panic| message(&*panic))?;
        self.banks[place] = Some(bank.map_err(|error| error.to_string())?);
        let mut tried = procedures.iter().map(|procedure| probe(procedure, &mut |x| self.run_tile(procedure, x)));
        let result = tried.find(Result::is_err).unwrap_or(Ok(()));
        drop(tried);
        if result.is_err() {
            self.banks[place] = None;
        }
        result
    }

    /// A back end that panics has failed, no more.
    fn catch(
        &mut self,
        procedure: &Procedure,
        body: impl FnOnce(&mut Self) -> Result<(), NpuError>,
    ) -> Result<(), NpuError> {
        catch_unwind(AssertUnwindSafe(|| body(self)))
            .unwrap_or_else(|panic| Err(NpuError::Run { procedure: procedure.name.clone(), reason: message(&*panic) }))
    }

    fn bank(&mut self, procedure: &Procedure) -> Result<(&mut Box<dyn Bank>, usize), NpuError> {
        let place = self.places.get(&procedure.id).copied();
        let found = place.and_then(|(bank, index)| Some((self.banks[bank].as_mut()?, index)));
        found.ok_or_else(|| NpuError::Run {
            procedure: procedure.name.clone(),
            reason: "it is in no loaded bank".to_owned(),
        })
    }

    fn run_part(&mut self, run: &StepRun, node: NodeId, part: &Part) -> Result<(), NpuError> {
        let (procedure, rows) = (&part.procedure, &part.rows);
        let node = run.graph().node(node);
        let cols = procedure.input_cols();
        let x = run.read_f32(node.inputs[0]);
        let x = &x[rows.start * cols..rows.end * cols];
        let places = procedure.outputs(rows);
        let mut guards: Vec<_> =
            places.iter().zip(&node.outputs).map(|(place, value)| run.write_columns(*value, place.clone())).collect();
        let mut outputs: Vec<Output<'_>> = guards.iter_mut().map(|guard| guard.output()).collect();
        if rows.len() == procedure.tile && outputs.len() == places.len() {
            let (bank, index) = self.bank(procedure)?;
            return bank.run(index, x, &mut outputs);
        }
        // A tail, or a step that wants less than the whole stack: rows of zeros fill the tile, and what is too much is cut off.
        self.surfaces(procedure);
        self.input[..x.len()].copy_from_slice(x);
        self.run_surfaces(procedure)?;
        let mut surface = &self.output[..];
        for (place, output) in places.iter().zip(&mut outputs) {
            let width = place.groups * place.channels.len();
            let (own, rest) = surface.split_at(procedure.tile * width);
            surface = rest;
            match output {
                Output::Rows(out) => out.copy_from_slice(&own[..rows.len() * width]),
                Output::Pieces(pieces) => {
                    pieces.iter_mut().zip(own.chunks_exact(place.channels.len())).for_each(|(out, own)| {
                        out.copy_from_slice(own);
                    });
                }
            }
        }
        Ok(())
    }

    /// Makes the surfaces large enough, the input all zeros.
    fn surfaces(&mut self, procedure: &Procedure) {
        // Not a byte more than the largest procedure needs, for that is what is foreseen.
        let resize = |surface: &mut Vec<f32>, numbers: usize| {
            surface.reserve_exact(numbers.saturating_sub(surface.len()));
            surface.resize(numbers, 0.0);
        };
        self.input.clear();
        resize(&mut self.input, procedure.tile * procedure.input_cols());
        resize(&mut self.output, procedure.tile * procedure.output_cols());
        let numbers = self.input.capacity() + self.output.capacity();
        self.surface_bytes.store((numbers * size_of::<f32>()) as u64, Ordering::Relaxed);
    }

    /// Runs a whole tile from the input surface to the output surface.
    fn run_surfaces(&mut self, procedure: &Procedure) -> Result<(), NpuError> {
        let (input, mut output) = (std::mem::take(&mut self.input), std::mem::take(&mut self.output));
        let mut outputs = procedure.surfaces(procedure.tile, &mut output);
        let result = self.bank(procedure).and_then(|(bank, index)| bank.run(index, &input, &mut outputs));
        drop(outputs);
        (self.input, self.output) = (input, output);
        result
    }
}

/// What a back end said when it panicked.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}
