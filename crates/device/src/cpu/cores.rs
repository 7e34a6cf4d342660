//! Processors for the pool's threads: which there are, and keeping a thread on one.

use std::io;

/// One processor of each physical core, of those that this process may use; empty where the system does not say. Two
/// threads on one core share its vector units, so a second one only takes from the first.
#[cfg(target_os = "linux")]
pub(crate) fn physical() -> Vec<usize> {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    let mut cores = std::collections::BTreeSet::new();
    let all = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    all.filter(|cpu| {
        let siblings = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        // Without a word about siblings it has none.
        cores.insert(std::fs::read_to_string(siblings).unwrap_or_else(|_| cpu.to_string()))
    })
    .collect()
}

/// Keeps the thread of an engine's instance, which has one, on a core: the last ones, so that the first stay with the primary
/// device.
pub(crate) fn pin_from_the_end(engine: &str, instance: usize) {
    let cores = physical();
    if instance + 1 >= cores.len() {
        return;
    }
    let core = cores[cores.len() - instance - 1];
    if let Err(error) = pin(core) {
        tracing::warn!(engine, core, %error, "an instance could not be pinned");
    }
}

/// Keeps the caller's thread on a processor.
#[cfg(target_os = "linux")]
pub(crate) fn pin(cpu: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn physical() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn pin(_: usize) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "threads can be pinned on Linux only"))
}
