//! What else the machine is doing: load, frequency, memory pressure, other processes' share of the CPU. Read from `/proc`
//! and `/sys` where there are such; what cannot be read is absent, never guessed.

use std::fs;

use serde::{Deserialize, Serialize};

/// The machine at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostState {
    /// Runnable threads, mean of the last minute.
    pub load_1m: Option<f64>,
    /// Mean over the cores, MHz.
    pub cpu_mhz: Option<f64>,
    /// Memory that programs could still have.
    pub available_memory_bytes: Option<u64>,
    /// Share of the last ten seconds in which some thread waited for memory.
    pub memory_pressure: Option<f64>,
    /// The same of threads that waited for a CPU.
    pub cpu_pressure: Option<f64>,
}

/// What does not change while we look.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    pub os: String,
    pub arch: String,
    pub cpu: Option<String>,
    pub cores: usize,
    pub memory_bytes: Option<u64>,
    /// How the system picks frequencies.
    pub governor: Option<String>,
}

impl HostState {
    pub fn now() -> Self {
        Self {
            load_1m: read("/proc/loadavg").and_then(|text| text.split_whitespace().next()?.parse().ok()),
            cpu_mhz: cpu_mhz(),
            available_memory_bytes: meminfo("MemAvailable:"),
            memory_pressure: pressure("memory"),
            cpu_pressure: pressure("cpu"),
        }
    }
}

impl HostFacts {
    pub fn new() -> Self {
        let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
        Self {
            os: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            cpu: cpuinfo.lines().find_map(|line| field(line, "model name")),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: meminfo("MemTotal:"),
            governor: read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").map(|text| text.trim().to_owned()),
        }
    }
}

/// Time that the machine's CPUs have worked, and of it the time for some processes, in ticks of the system.
#[derive(Clone, Copy, Debug)]
pub struct CpuTime {
    busy: u64,
    all: u64,
    own: u64,
}

impl CpuTime {
    /// With `pids` as the processes that are ours.
    pub fn now(pids: &[u32]) -> Option<Self> {
        let stat = read("/proc/stat")?;
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        // user nice system idle iowait irq softirq steal; guests are in the first two already.
        let ticks: Vec<u64> = line.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        let all: u64 = ticks.iter().sum();
        let idle = ticks.get(3)? + ticks.get(4)?;
        let own = pids.iter().filter_map(|pid| process_ticks(*pid)).sum();
        Some(Self { busy: all - idle, all, own })
    }

    /// Share of all CPUs that others took since `earlier`; what a hypervisor withheld counts.
    pub fn others_since(&self, earlier: &Self) -> Option<f64> {
        let all = self.all.checked_sub(earlier.all).filter(|all| *all > 0)?;
        let busy = self.busy.saturating_sub(earlier.busy);
        Some(busy.saturating_sub(self.own.saturating_sub(earlier.own)) as f64 / all as f64)
    }
}

/// User and system time of a process with all its threads.
fn process_ticks(pid: u32) -> Option<u64> {
    let stat = read(&format!("/proc/{pid}/stat"))?;
    // The name may have spaces; what follows its bracket has none.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}

/// Most memory that a process ever had resident.
pub fn peak_memory_bytes(pid: u32) -> Option<u64> {
    let status = read(&format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn field(line: &str, name: &str) -> Option<String> {
    let (key, value) = line.split_once(':')?;
    (key.trim() == name).then(|| value.trim().to_owned())
}

fn cpu_mhz() -> Option<f64> {
    let cores = 0..std::thread::available_parallelism().map_or(1, usize::from);
    let scaling = |core| read(&format!("/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq"));
    let mut mhz: Vec<f64> = cores.filter_map(|core| Some(scaling(core)?.trim().parse::<f64>().ok()? / 1e3)).collect();
    if mhz.is_empty() {
        let cpuinfo = read("/proc/cpuinfo")?;
        mhz = cpuinfo.lines().filter_map(|line| field(line, "cpu MHz")?.parse().ok()).collect();
    }
    (!mhz.is_empty()).then(|| mhz.iter().sum::<f64>() / mhz.len() as f64)
}

fn meminfo(name: &str) -> Option<u64> {
    let text = read("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

fn pressure(what: &str) -> Option<f64> {
    let text = read(&format!("/proc/pressure/{what}"))?;
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let percent = some.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?;
    percent.parse::<f64>().ok().map(|percent| percent / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_what_is_left_of_the_busy_time() {
        let before = CpuTime { busy: 1000, all: 4000, own: 100 };
        let after = CpuTime { busy: 1180, all: 4200, own: 250 };
        assert_eq!(after.others_since(&before), Some(0.15));
        assert_eq!(before.others_since(&before), None);
        let ours_alone = CpuTime { busy: 1100, all: 4200, own: 205 };
        assert_eq!(ours_alone.others_since(&before), Some(0.0));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_says_something() {
        let (facts, state) = (HostFacts::new(), HostState::now());
        assert!(facts.cores > 0 && facts.memory_bytes.is_some());
        assert!(state.available_memory_bytes < facts.memory_bytes);
        assert!(peak_memory_bytes(std::process::id()).is_some_and(|bytes| bytes > 1 << 20));
        assert!(CpuTime::now(&[std::process::id()]).is_some());
    }
}
