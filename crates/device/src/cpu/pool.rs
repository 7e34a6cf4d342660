//! The device's threads: a fork-join pool for regions of some microseconds, several hundred of them per decoded token.
//!
//! A region is opened by its caller, who works on it too; workers join while it is open and leave when no task is left;
//! the caller closes it and waits for those inside. A worker that comes too late is not waited for, so a core that somebody
//! else uses costs its share and no more. Workers spin while a step is computed and a moment after it, for the next one
//! mostly follows at once; then they sleep: an idle device uses no processor time.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use troika_kernels::Parallel;

use super::cores;

/// How long a worker spins after a step before it sleeps: longer than what lies between two decode steps.
const SPIN: Duration = Duration::from_micros(200);
/// How long a worker spins within a step before it also offers its core to others: longer than the serial work between two
/// regions mostly is.
const POLITE: Duration = Duration::from_micros(50);

/// Bits of [`Shared::gate`]: workers inside, whether the region is closed, and above them the number of the region.
const INSIDE: u64 = (1 << 16) - 1;
const CLOSED: u64 = 1 << 16;
const REGION: u64 = 1 << 17;

/// One caller and some workers.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller of a region. A region inside a region runs on its caller's thread alone.
    caller: Mutex<()>,
    /// The core for callers, and who is on it.
    pin_caller: Option<usize>,
    pinned: Mutex<Option<ThreadId>>,
}

/// Alone on its cache lines (two of them, since they are fetched in pairs).
#[repr(align(128))]
struct Alone<T>(T);

struct Shared {
    /// What waiting workers look at.
    gate: Alone<AtomicU64>,
    /// What busy ones change.
    next: Alone<AtomicUsize>,
    /// What the open region does; written by its caller while nobody is inside.
    job: UnsafeCell<Option<Job>>,
    /// A step is being computed.
    awake: AtomicBool,
    sleeping: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct Job {
    tasks: usize,
    body: *const (dyn Fn(usize) + Sync),
}

// SAFETY: `job` is written only by the caller of a region before it opens the gate, and read only by workers inside, whom
// the caller waits for before it writes again. What it points at is `Sync` and outlives the region.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is only followed inside of a region.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads, of which the caller is one; 0 = one per physical core. With `pin` each stays on a core
    /// of its own, callers included from [`Self::stay_awake`] on.
    pub(crate) fn new(threads: usize, pin: bool) -> io::Result<Self> {
        let cores = cores::physical();
        let threads = match threads {
            // The system may grant less time than it shows cores.
            0 => std::thread::available_parallelism().map_or(1, usize::from).min(cores.len().max(1)),
            threads => threads,
        };
        if pin && cores.len() < threads {
            let reason = format!("cannot pin {threads} threads to {} physical cores", cores.len());
            return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
        }
        let shared = Arc::new(Shared {
            gate: Alone(AtomicU64::new(CLOSED)),
            next: Alone(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            awake: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let pin_caller = pin.then(|| cores[0]);
        let mut pool =
            Self { shared, workers: Vec::new(), caller: Mutex::new(()), pin_caller, pinned: Mutex::new(None) };
        let (ready, is_ready) = channel();
        for index in 1..threads {
            let (shared, ready) = (Arc::clone(&pool.shared), ready.clone());
            let core = cores.get(index).copied().filter(|_| pin);
            let work = move || {
                // The pool is not made before every worker has said this.
                let _ = ready.send(core.map_or(Ok(()), cores::pin));
                shared.work();
            };
            pool.workers.push(std::thread::Builder::new().name(format!("cpu-{index}")).spawn(work)?);
        }
        is_ready.into_iter().take(threads - 1).collect::<io::Result<()>>()?;
        Ok(pool)
    }

    /// Pins the caller's thread, unless it was the last to be.
    fn pin_caller(&self) {
        let (Some(core), caller) = (self.pin_caller, std::thread::current().id()) else { return };
        if lock(&self.pinned).replace(caller) != Some(caller)
            && let Err(error) = cores::pin(core)
        {
            tracing::warn!(core, %error, "the thread that computes could not be pinned");
        }
    }

    /// Wakes the workers and keeps them awake as long as the result lives.
    pub(super) fn stay_awake(&self) -> Awake<'_> {
        self.pin_caller();
        self.shared.awake.store(true, Ordering::SeqCst);
        if self.shared.sleeping.load(Ordering::SeqCst) > 0 {
            self.shared.wake_sleepers();
        }
        Awake(&self.shared)
    }
}

/// See [`Pool::stay_awake`].
pub(super) struct Awake<'a>(&'a Shared);

impl Drop for Awake<'_> {
    fn drop(&mut self) {
        self.0.awake.store(false, Ordering::SeqCst);
    }
}

impl Parallel for Pool {
    fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        let caller = self.caller.try_lock();
        if tasks <= 1 || self.workers.is_empty() || caller.is_err() {
            (0..tasks).for_each(body);
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Nobody follows the pointer after `close` below, which runs before this
        // function returns or unwinds.
        let body = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(body)
        };
        let job = Job { tasks, body };
        // SAFETY: the last region is closed and empty, and `caller` keeps others from opening one.
        unsafe { *shared.job.get() = Some(job) };
        shared.next.0.store(0, Ordering::Relaxed);
        shared.open();
        let result = catch_unwind(AssertUnwindSafe(|| shared.take_tasks(job)));
        shared.close();
        let panic = lock(&shared.panic).take();
        drop(caller);
        if let Some(panic) = result.err().or(panic) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake_sleepers();
        for worker in self.workers.drain(..) {
            // Workers catch what tasks throw.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn open(&self) {
        let region = self.gate.0.load(Ordering::Relaxed) / REGION;
        self.gate.0.store(region.wrapping_add(1).wrapping_mul(REGION), Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            self.wake_sleepers();
        }
    }

    fn wake_sleepers(&self) {
        // A worker counts itself as sleeping and looks again while it holds the lock, so it is either asleep or has seen
        // what we wrote.
        drop(lock(&self.sleep));
        self.wake.notify_all();
    }

    /// Lets nobody in any more and waits for those inside.
    fn close(&self) {
        let mut gate = self.gate.0.fetch_or(CLOSED, Ordering::SeqCst);
        let mut spins = 0u32;
        while gate & INSIDE > 0 {
            spins += 1;
            // Whoever is inside may have lost its core to somebody else.
            if spins.is_multiple_of(1024) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            gate = self.gate.0.load(Ordering::Acquire);
        }
    }

    fn take_tasks(&self, job: Job) {
        loop {
            let task = self.next.0.fetch_add(1, Ordering::Relaxed);
            if task >= job.tasks {
                return;
            }
            // SAFETY: the region is open or waits for this thread, so the body is still borrowed by its caller.
            unsafe { (*job.body)(task) };
        }
    }

    fn work(&self) {
        let mut seen = self.gate.0.load(Ordering::Acquire) / REGION;
        while let Some(gate) = self.next_region(seen) {
            seen = gate / REGION;
            // The number of the region is part of the word, so this cannot let us into a later one.
            if self.gate.0.compare_exchange(gate, gate + 1, Ordering::SeqCst, Ordering::Relaxed).is_err() {
                // Somebody else went in or the gate closed: look again at the same region.
                seen = seen.wrapping_sub(1);
                continue;
            }
            // SAFETY: inside of an open region the job is not written.
            let job = unsafe { (*self.job.get()).expect("an open region has a job") };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_tasks(job))) {
                *lock(&self.panic) = Some(panic);
            }
            self.gate.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The gate of an open region other than `seen`; `None` when the pool ends.
    fn next_region(&self, seen: u64) -> Option<u64> {
        loop {
            if let Some(gate) = self.spin(seen) {
                return Some(gate);
            }
            let mut guard = lock(&self.sleep);
            self.sleeping.fetch_add(1, Ordering::SeqCst);
            while self.open_region(seen).is_none()
                && !self.awake.load(Ordering::SeqCst)
                && !self.stop.load(Ordering::SeqCst)
            {
                guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleeping.fetch_sub(1, Ordering::SeqCst);
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
        }
    }

    fn open_region(&self, seen: u64) -> Option<u64> {
        let gate = self.gate.0.load(Ordering::SeqCst);
        (gate & CLOSED == 0 && gate / REGION != seen).then_some(gate)
    }

    /// Waits for a region as long as a step is computed, and a moment longer.
    fn spin(&self, seen: u64) -> Option<u64> {
        let start = Instant::now();
        let mut sleep_at = start + SPIN;
        loop {
            for _ in 0..64 {
                if let Some(gate) = self.open_region(seen) {
                    return Some(gate);
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            if self.awake.load(Ordering::SeqCst) {
                sleep_at = now + SPIN;
            } else if now >= sleep_at || self.stop.load(Ordering::SeqCst) {
                return None;
            }
            if now - start > POLITE {
                std::thread::yield_now();
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can be left half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads, false).expect("threads start");
            assert_eq!(pool.threads(), threads);
            for round in 0..2000 {
                let tasks = round % 40;
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.into_iter().all(|n| n.into_inner() == 1), "{threads} threads, {tasks} tasks");
                if round % 500 == 0 {
                    std::thread::sleep(2 * SPIN); // workers fall asleep
                }
            }
        }
    }

    #[test]
    fn pinned_threads_have_a_core_each() {
        let cores = cores::physical();
        assert!(Pool::new(cores.len() + 1, true).is_err(), "more threads than cores");
        let Ok(pool) = Pool::new(cores.len(), true) else {
            assert!(cores.is_empty(), "where cores are known, threads can be pinned");
            return;
        };
        // On a thread of its own, for it stays pinned.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _awake = pool.stay_awake();
                assert_eq!(cores::physical(), cores[..1], "all that the caller may use");
            });
        });
    }

    #[test]
    fn regions_nest_on_one_thread() {
        let pool = Pool::new(3, false).expect("threads start");
        let count = AtomicUsize::new(0);
        pool.run(8, &|_| {
            pool.run(5, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 40);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_leaves_the_pool_usable() {
        let pool = Pool::new(4, false).expect("threads start");
        for _ in 0..50 {
            let result = catch_unwind(AssertUnwindSafe(|| pool.run(16, &|task| assert!(task != 7, "task seven"))));
            assert!(result.is_err());
            let count = AtomicUsize::new(0);
            pool.run(16, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 16);
        }
    }
}
