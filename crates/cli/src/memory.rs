//! How much memory the state of sequences and the values of steps may take.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use troika_base::units::human_bytes;
use troika_engine::Engine;
use troika_engine::api::Generator;

use crate::size::Size;

/// The part of the free memory that is left to others, and to what is not reckoned.
const SPARE: u64 = 10;
/// The part of the free memory that is taken in any case, however large the weights are.
const LEAST: u64 = 8;

#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct MemoryArgs {
    /// Memory for the state of all sequences, the values of steps and what neural engines hold, e.g. 4G; weights and kept
    /// prefixes are not part of it.
    /// Neural engines get half of it at most; what they cannot hold stays with the CPU.
    /// Without it, what is free now less weights, kept prefixes and a tenth.
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<Size>,
}

impl MemoryArgs {
    /// Bytes, `u64::MAX` if neither the user nor the system says. Ask before the weights are loaded.
    pub(crate) fn resolve(self, weights_bytes: u64, cache_bytes: u64) -> u64 {
        match (self.memory_limit, free_bytes()) {
            (Some(Size(bytes)), _) => bytes,
            (None, Some(free)) => default_limit(free, weights_bytes, cache_bytes),
            (None, None) => u64::MAX,
        }
    }

    /// Most bytes that neural engines may hold: half of what the user said. What the system has free changes from start to start,
    /// and with it would the plan and the numeric class, so without a word of the user there is no limit.
    pub(crate) fn of_engines(self) -> u64 {
        self.memory_limit.map_or(u64::MAX, |Size(bytes)| bytes / 2)
    }
}

fn default_limit(free: u64, weights_bytes: u64, cache_bytes: u64) -> u64 {
    let rest = free.saturating_sub(weights_bytes).saturating_sub(cache_bytes);
    (rest - rest / SPARE).max(free / LEAST)
}

/// Says once what was resolved.
///
/// # Errors
///
/// If not even the shortest prompt would fit.
pub(crate) fn report(engine: &Engine) -> Result<()> {
    let status = engine.status();
    let max_prompt_tokens = engine.max_prompt_tokens();
    let limit = engine.options().memory_bytes;
    let steps = human_bytes(status.step_bytes);
    if limit == u64::MAX {
        tracing::info!(steps, max_prompt_tokens, "memory: no limit, since the system does not say what is free");
        return Ok(());
    }
    let limit = human_bytes(limit);
    let engines = status.hybrid.map_or(0, |hybrid| hybrid.bytes.weights + hybrid.bytes.banks + hybrid.bytes.surfaces);
    let held = if engines > 0 { format!(", neural engines hold {}", human_bytes(engines)) } else { String::new() };
    ensure!(
        max_prompt_tokens > 0,
        "--memory-limit {limit}: steps need {steps}{held}, and what is left does not hold a single sequence; give more"
    );
    tracing::info!(
        limit,
        steps,
        engines = human_bytes(engines),
        state = human_bytes(status.state_bytes_limit),
        max_prompt_tokens,
        "memory"
    );
    Ok(())
}

/// Memory that the system could give us now, where it tells: of the machine, and of the group of processes we belong to.
fn free_bytes() -> Option<u64> {
    let of_machine = meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let of_group = group(Path::new("/sys/fs/cgroup"));
    Some(of_group.map_or(of_machine, |group| group.min(of_machine)))
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn group(dir: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_is_read() {
        assert_eq!(meminfo("MemTotal: 9 kB\nMemAvailable:   24680 kB\n"), Some(24680 << 10));
        assert_eq!(meminfo("MemTotal: 9 kB\n"), None);
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(group(dir.path()), None);
        for (max, want) in [("max\n", None), ("1000\n", Some(700)), ("200\n", Some(0))] {
            fs::write(dir.path().join("memory.max"), max).expect("written");
            fs::write(dir.path().join("memory.current"), "300\n").expect("written");
            assert_eq!(group(dir.path()), want, "{max}");
        }
    }

    #[test]
    fn weights_and_prefixes_come_first() {
        assert_eq!(default_limit(1000, 300, 200), 450);
        assert_eq!(default_limit(1000, 5000, 200), 125, "larger than the memory: they are read again and again");
    }
}
