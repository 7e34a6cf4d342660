//! The simulated devices and the clock that they share. Nothing takes time here: whoever waits for a step lends its thread to
//! the primary device ([`Device::drive`]), which goes from one completion to the next and says what time it is then. So the
//! executor, its plan and its ledger are those of real runs.
//!
//! The last part of an operation that engines took part in is reported when the primary device has joined the parts. If it had a part
//! itself, it waits for the hand-over too, as was measured; of a whole operation it hears later, and does other work until then.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use troika_base::StepId;
use troika_device::{Capabilities, Device, DeviceError, DeviceKind, Priority, Report, Work};
use troika_graph::{NodeId, StepGraph, WeightSource};

use crate::SimError;
use crate::arithmetic::Arithmetic;
use crate::faults::{Faults, noise};
use crate::price::{Prices, ProfilePrices, Totals};
use crate::profile::{Checkpoint, Profile, Slowdowns};

/// Number of the primary device.
const PRIMARY: usize = 0;

/// What devices did with their time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    /// Per device.
    pub(crate) busy_ms: Vec<f64>,
    /// Per operation: on each device, then joining.
    pub(crate) by_operation: BTreeMap<&'static str, OperationUse>,
}

/// Milliseconds of one operation.
#[derive(Clone, Debug, Default)]
pub(crate) struct OperationUse {
    pub(crate) device_ms: Vec<f64>,
    pub(crate) join_ms: f64,
}

/// Which devices there are and what they cost.
pub(crate) struct Machinery {
    /// For people.
    title: String,
    primary: String,
    engines: Vec<String>,
    cpu: Option<String>,
    slowdown: Slowdown,
    price: Box<Pricing>,
}

/// Prices the nodes of a graph.
type Pricing = dyn Fn(&StepGraph) -> Result<Arc<dyn Prices>, SimError> + Send + Sync;

/// How much longer devices take while others work: they share the memory's bandwidth. 1 = not at all. Parts of one split operation were
/// measured side by side, so theirs is in their price.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct Slowdown {
    /// The primary device, while any engine works.
    pub primary: f64,
    /// An engine, while the primary device works.
    pub engines: f64,
}

impl Slowdown {
    pub(crate) const NONE: Self = Self { primary: 1.0, engines: 1.0 };
}

impl Machinery {
    /// As a profile has it; `totals` are of the model's steps.
    pub(crate) fn of_profile(profile: &Profile, checkpoint: &Checkpoint, totals: Totals) -> Self {
        let (own, checkpoint) = (profile.clone(), checkpoint.clone());
        Self {
            title: profile.title.clone(),
            primary: profile.primary.name.clone(),
            engines: (0..profile.engines.instances).map(|i| format!("{}{i}", profile.engines.name)).collect(),
            cpu: profile.cpu.as_ref().map(|cpu| cpu.name.clone()),
            slowdown: profile
                .slowdown
                .map_or(Slowdown::NONE, |Slowdowns { primary, engines, .. }| Slowdown { primary, engines }),
            price: Box::new(move |graph| Ok(Arc::new(ProfilePrices::of(graph, &totals, &own, &checkpoint)?))),
        }
    }

    /// A primary device and one engine.
    pub(crate) fn pair(title: &str, slowdown: Slowdown, price: Box<Pricing>) -> Self {
        let (primary, engines) = ("primary".to_owned(), vec!["engine".to_owned()]);
        Self { title: title.to_owned(), primary, engines, cpu: None, slowdown, price }
    }

    fn num_devices(&self) -> usize {
        1 + self.engines.len() + usize::from(self.cpu.is_some())
    }
}

/// Devices on one clock.
pub(crate) struct World {
    inner: Mutex<Inner>,
    /// When the clock stood at nought.
    origin: Instant,
}

struct Inner {
    machinery: Machinery,
    faults: Faults,
    /// The primary device waits for the parts of a split operation and does nothing else.
    blocking: bool,
    now_ns: u64,
    units: Vec<Unit>,
    /// Joins of whole operations that nobody has heard of yet, and when that will be.
    hand_overs: Vec<(u64, Task)>,
    /// Prices of the graphs in use, which are kept so that no other has their address.
    prices: Vec<(Arc<StepGraph>, Arc<dyn Prices>)>,
    /// Parts of operations that are not done.
    shared: BTreeMap<(StepId, NodeId), SharedOperation>,
    next_task: u64,
    dispatches: u64,
    usage: Usage,
    arithmetic: Option<Arithmetic>,
}

#[derive(Default)]
struct SharedOperation {
    left: usize,
    /// Rows of tiles that engines do; each counts once.
    tiles: Vec<Range<usize>>,
    /// Parts of these: if there are more of them than tiles, their results have to be merged.
    engine_parts: usize,
    /// The primary device has a part of it.
    is_split: bool,
}

/// One device.
struct Unit {
    queue: Vec<Task>,
    current: Option<Running>,
}

struct Task {
    number: u64,
    prices: Arc<dyn Prices>,
    what: What,
}

enum What {
    /// Nodes, perhaps begun.
    Work { work: Work, elapsed_ns: Vec<u64> },
    /// The parts of an operation are done; this report says so when they are joined.
    Join { step: StepId, priority: Priority, node: NodeId, ms: f64, report: Report, done: Sender<Report> },
}

struct Running {
    task: Task,
    start_ns: u64,
    /// What is left of it, if nothing slows the device down.
    left_ns: u64,
    failure: Option<String>,
}

impl Task {
    /// The shared operation that it is a part of.
    fn operation(&self) -> Option<(StepId, NodeId)> {
        match &self.what {
            What::Work { work, .. } => work.part.is_some().then(|| (work.run.id(), work.nodes[0])),
            What::Join { step, node, .. } => Some((*step, *node)),
        }
    }

    /// Its place among those of its step: joins first, then in order.
    fn place(&self) -> (StepId, bool, u64) {
        match &self.what {
            What::Work { work, .. } => (work.run.id(), true, self.number),
            What::Join { step, .. } => (*step, false, self.number),
        }
    }

    /// Of several steps' first tasks, as the CPU device has it: urgent ones, then what engines or others wait for, then those of
    /// older steps.
    fn rank(&self) -> (Priority, bool, StepId) {
        match &self.what {
            What::Work { work, .. } => (work.priority, !work.feeds, work.run.id()),
            What::Join { step, priority, .. } => (*priority, false, *step),
        }
    }
}

impl World {
    /// A machine without work. Its devices are the primary one, then the instances, then the CPU if there is one.
    pub(crate) fn new(
        machinery: Machinery,
        faults: &Faults,
        blocking: bool,
        arithmetic: Option<Arithmetic>,
    ) -> Arc<Self> {
        let devices = machinery.num_devices();
        let inner = Inner {
            machinery,
            faults: faults.clone(),
            blocking,
            now_ns: 0,
            units: (0..devices).map(|_| Unit { queue: Vec::new(), current: None }).collect(),
            hand_overs: Vec::new(),
            prices: Vec::new(),
            shared: BTreeMap::new(),
            next_task: 0,
            dispatches: 0,
            usage: Usage { busy_ms: vec![0.0; devices], by_operation: BTreeMap::new() },
            arithmetic,
        };
        Arc::new(Self { inner: Mutex::new(inner), origin: Instant::now() })
    }

    /// Its devices, for an executor.
    pub(crate) fn devices(self: &Arc<Self>) -> Vec<Arc<dyn Device>> {
        let inner = self.lock();
        let machinery = &inner.machinery;
        let mut names = vec![(machinery.primary.clone(), DeviceKind::Cpu)];
        names.extend(machinery.engines.iter().map(|name| (name.clone(), DeviceKind::Npu)));
        names.extend(machinery.cpu.iter().map(|name| (name.clone(), DeviceKind::Cpu)));
        let device = |(number, (name, kind)): (usize, (String, DeviceKind))| {
            let description = format!("simulated, {}", machinery.title);
            let capabilities = Capabilities { name, kind, description, threads: 1 };
            Arc::new(SimDevice { world: Arc::clone(self), number, capabilities }) as Arc<dyn Device>
        };
        names.into_iter().enumerate().map(device).collect()
    }

    /// What the clock says.
    pub(crate) fn now(&self) -> Instant {
        self.origin + Duration::from_nanos(self.lock().now_ns)
    }

    /// Nanoseconds since the start.
    pub(crate) fn now_ns(&self) -> u64 {
        self.lock().now_ns
    }

    pub(crate) fn usage(&self) -> Usage {
        self.lock().usage.clone()
    }

    /// Prices a graph before any step of it is submitted.
    ///
    /// # Errors
    ///
    /// If an operation has no price.
    pub(crate) fn price(&self, graph: &Arc<StepGraph>) -> Result<(), SimError> {
        let mut inner = self.lock();
        if inner.prices.iter().all(|(known, _)| !Arc::ptr_eq(known, graph)) {
            let prices = (inner.machinery.price)(graph)?;
            inner.prices.push((Arc::clone(graph), prices));
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn submit(&mut self, device: usize, work: Work) {
        let graph = work.run.graph();
        let known = self.prices.iter().find(|(known, _)| Arc::ptr_eq(known, graph));
        let prices = Arc::clone(&known.expect("the graph of a step is priced before it is submitted").1);
        if let Some(part) = &work.part {
            let shared = self.shared.entry((work.run.id(), work.nodes[0])).or_default();
            shared.left += 1;
            shared.is_split |= device == PRIMARY;
            if device != PRIMARY {
                shared.engine_parts += 1;
                if !shared.tiles.contains(&part.rows) {
                    shared.tiles.push(part.rows.clone());
                }
            }
        }
        let elapsed_ns = Vec::with_capacity(work.nodes.len());
        self.queue(device, prices, What::Work { work, elapsed_ns });
    }

    fn queue(&mut self, device: usize, prices: Arc<dyn Prices>, what: What) {
        let number = self.next_task;
        self.next_task += 1;
        self.units[device].queue.push(Task { number, prices, what });
    }

    /// Devices without work take the next they have.
    fn start(&mut self) {
        for device in 0..self.units.len() {
            if self.units[device].current.is_some() {
                continue;
            }
            let waits_for = match device {
                PRIMARY if self.blocking => self.split_operation(),
                _ => None,
            };
            let queue = &mut self.units[device].queue;
            let may_go = |task: &Task| waits_for.is_none_or(|operation| task.operation() == Some(operation));
            let ready = || (0..queue.len()).filter(|index| may_go(&queue[*index]));
            let next = match device {
                PRIMARY => {
                    let mut firsts: BTreeMap<StepId, usize> = BTreeMap::new();
                    for index in ready() {
                        let first = firsts.entry(queue[index].place().0).or_insert(index);
                        *first = if queue[index].place() < queue[*first].place() { index } else { *first };
                    }
                    firsts.into_values().min_by_key(|index| queue[*index].rank())
                }
                // Engines take what comes, in its order.
                _ => ready().min_by_key(|index| queue[*index].number),
            };
            let Some(next) = next else { continue };
            let task = queue.remove(next);
            let (ms, failure) = self.cost(device, &task);
            let (start_ns, left_ns) = (self.now_ns, (ms * 1e6).round() as u64);
            self.units[device].current = Some(Running { task, start_ns, left_ns, failure });
        }
    }

    /// A split operation whose parts are not all in.
    fn split_operation(&self) -> Option<(StepId, NodeId)> {
        let is_out = |shared: &SharedOperation| shared.is_split && !shared.tiles.is_empty();
        self.shared.iter().find(|(_, shared)| is_out(shared)).map(|(operation, _)| *operation)
    }

    fn cost(&mut self, device: usize, task: &Task) -> (f64, Option<String>) {
        let prices = &task.prices;
        let mut failure = None;
        let mut ms = match &task.what {
            What::Join { ms, .. } => *ms,
            What::Work { work, elapsed_ns } => {
                let node = work.nodes[elapsed_ns.len()];
                match &work.part {
                    None => prices.primary_ms(node, &work.run.rows().segments),
                    Some(part) if device == PRIMARY => prices.primary_part_ms(node, part),
                    Some(part) if device > self.machinery.engines.len() => prices.cpu_part_ms(node, part),
                    Some(part) => {
                        let number = self.dispatches;
                        self.dispatches += 1;
                        if self.faults.failing_dispatch == Some(number) {
                            failure = Some(format!("{}: submission {number} fails on demand", part.procedure.name));
                        }
                        prices.engine_part_ms(node, part)
                    }
                }
            }
        };
        if let Some((instance, factor)) = self.faults.slow_instance
            && device == 1 + instance
        {
            ms *= factor;
        }
        if self.faults.jitter > 0.0 {
            ms *= 1.0 + self.faults.jitter * (2.0 * noise(self.faults.seed, task.number) - 1.0);
        }
        (ms, failure)
    }

    /// How many times as long a device takes now.
    fn pace(&self, device: usize) -> f64 {
        let is_busy = |device: usize| self.units[device].current.is_some();
        let Some(Running { task, .. }) = &self.units[device].current else { return 1.0 };
        let part = task.operation().and_then(|operation| self.shared.get(&operation));
        if part.is_some_and(|shared| shared.is_split) {
            return 1.0;
        }
        let Slowdown { primary, engines } = self.machinery.slowdown;
        let mut instances = 1..=self.machinery.engines.len();
        match device {
            PRIMARY if instances.any(is_busy) => primary,
            _ if instances.contains(&device) && is_busy(PRIMARY) => engines,
            _ => 1.0,
        }
    }

    /// Lets time pass, in which nothing is done.
    fn pass(&mut self, ns: u64, paces: &[f64]) {
        for (unit, pace) in self.units.iter_mut().zip(paces) {
            if let Some(running) = &mut unit.current {
                running.left_ns = running.left_ns.saturating_sub((ns as f64 / pace).round() as u64);
            }
        }
        self.now_ns += ns;
    }

    /// Goes to the next completion. True if it was reported to somebody.
    fn advance(&mut self) -> bool {
        self.start();
        let paces: Vec<f64> = (0..self.units.len()).map(|device| self.pace(device)).collect();
        let left = |device: usize| self.units[device].current.as_ref().map(|running| running.left_ns);
        let end_ns = |device: usize| Some(((left(device)? as f64 * paces[device]).round() as u64, device));
        let next = (0..self.units.len()).filter_map(end_ns).min();
        let heard = (0..self.hand_overs.len()).min_by_key(|index| self.hand_overs[*index].0);
        let heard = heard.map(|index| (self.hand_overs[index].0 - self.now_ns, index));
        if let Some((passed_ns, index)) = heard
            && next.is_none_or(|(end_ns, _)| passed_ns <= end_ns)
        {
            let (_, task) = self.hand_overs.remove(index);
            self.pass(passed_ns, &paces);
            self.units[PRIMARY].queue.push(task);
            return false;
        }
        let (passed_ns, device) = next.expect("whoever waits has handed work over");
        let Running { task, start_ns, failure, .. } = self.units[device].current.take().expect("just found");
        self.pass(passed_ns, &paces);
        let elapsed = self.now_ns - start_ns;
        self.note(device, &task, elapsed as f64 / 1e6);
        let Task { number, prices, what } = task;
        match what {
            What::Join { report, done, .. } => {
                // If nobody waits for the step any more, nobody misses the report.
                let _ = done.send(report);
                true
            }
            What::Work { work, mut elapsed_ns } => {
                let node = work.nodes[elapsed_ns.len()];
                let failure = failure.or_else(|| self.compute(device, &work, node));
                if failure.is_none() {
                    elapsed_ns.push(elapsed);
                }
                if failure.is_some() || elapsed_ns.len() == work.nodes.len() {
                    return self.done(&prices, work, elapsed_ns, failure);
                }
                let what = What::Work { work, elapsed_ns };
                self.units[device].queue.push(Task { number, prices, what });
                false
            }
        }
    }

    fn compute(&self, device: usize, work: &Work, node: NodeId) -> Option<String> {
        let is_wrong = self.faults.corrupt && (1..=self.machinery.engines.len()).contains(&device);
        self.arithmetic.as_ref()?.compute(work, node, is_wrong.then_some(self.faults.seed))
    }

    fn done(&mut self, prices: &Arc<dyn Prices>, work: Work, elapsed_ns: Vec<u64>, failure: Option<String>) -> bool {
        let Work { run, nodes, part, priority, done, .. } = work;
        let step = run.id();
        // Whoever takes the report wants the step for itself.
        drop(run);
        let node = nodes[0];
        let has_failed = failure.is_some();
        let report = Report { step, nodes, part: part.map(|part| part.id), elapsed_ns, failure };
        if report.part.is_some() {
            let shared = self.shared.get_mut(&(step, node)).expect("entered with its first part");
            shared.left -= 1;
            if shared.left == 0 && !has_failed {
                let shared = self.shared.remove(&(step, node)).expect("just seen");
                let rows: usize = shared.tiles.iter().map(|rows| rows.len()).sum();
                if rows > 0 {
                    let is_divided = shared.is_split || shared.engine_parts > shared.tiles.len();
                    let join_ms = prices.join_ms(node, if is_divided { rows } else { 0 });
                    let handover_ms = prices.handover_ms();
                    let ms = if shared.is_split { handover_ms + join_ms } else { join_ms };
                    let what = What::Join { step, priority, node, ms, report, done };
                    match shared.is_split {
                        true => self.queue(PRIMARY, Arc::clone(prices), what),
                        false => {
                            let task = Task { number: self.next_task, prices: Arc::clone(prices), what };
                            self.next_task += 1;
                            self.hand_overs.push((self.now_ns + (handover_ms * 1e6).round() as u64, task));
                        }
                    }
                    return false;
                }
            }
        }
        let _ = done.send(report);
        true
    }

    fn note(&mut self, device: usize, task: &Task, ms: f64) {
        let (node, is_join) = match &task.what {
            What::Join { node, .. } => (*node, true),
            What::Work { work, elapsed_ns } => (work.nodes[elapsed_ns.len()], false),
        };
        self.usage.busy_ms[device] += ms;
        let devices = self.units.len();
        let usage = self.usage.by_operation.entry(task.prices.name(node)).or_default();
        usage.device_ms.resize(devices, 0.0);
        match is_join {
            true => usage.join_ms += ms,
            false => usage.device_ms[device] += ms,
        }
    }
}

/// A device of the world.
struct SimDevice {
    world: Arc<World>,
    number: usize,
    capabilities: Capabilities,
}

impl Device for SimDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// There are no weights, or they are where the arithmetic is.
    fn load(&self, _: &dyn WeightSource) -> Result<(), DeviceError> {
        Ok(())
    }

    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        if self.number != PRIMARY && work.part.is_none() {
            let (name, reason) = (self.capabilities.name.clone(), "runs parts of operations only".to_owned());
            return Err(DeviceError::Refused { name, reason });
        }
        self.world.lock().submit(self.number, work);
        Ok(())
    }

    fn drive(&self, pause: &mut dyn FnMut(Instant) -> bool) -> bool {
        if self.number != PRIMARY {
            return false;
        }
        loop {
            let reported = self.world.lock().advance();
            if pause(self.world.now()) || reported {
                return true;
            }
        }
    }
}
