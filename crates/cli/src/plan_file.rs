//! What was measured of a model's projections on this machine, kept as a file: a restart then has the same plan, and so the
//! same numeric class and the same kept prefixes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use troika_engine::{Calibration, CostTable};

use crate::report::write_whole;

/// Raised whenever the file or what is measured changes.
const VERSION: u32 = 3;

/// What the measurement depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Key {
    version: u32,
    /// Of this program, whose kernels were measured.
    build: String,
    weights: String,
    tile: usize,
    stack_inputs: bool,
    engine: String,
    cpu: String,
    /// Threads of the CPU beside engines and without.
    threads: [usize; 2],
}

impl Key {
    /// `weights` is their digest.
    pub(crate) fn new(weights: String, calibration: &Calibration<'_>) -> Self {
        let Calibration { backend, tile, stack_inputs, cpu, cpu_alone } = calibration;
        Self {
            version: VERSION,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            weights,
            tile: *tile,
            stack_inputs: *stack_inputs,
            engine: format!("{}, {}, {}", backend.name(), backend.description(), backend.version()),
            cpu: format!("{}, {:?}", cpu_name(), cpu.level),
            threads: [cpu.threads, cpu_alone.threads],
        }
    }

    fn file_name(&self) -> String {
        let text = serde_json::to_vec(self).expect("strings and numbers");
        let digest = Sha256::digest(text);
        format!("{}.json", digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect::<String>())
    }
}

/// As the system calls it; empty if it does not say.
pub(crate) fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("model name"));
    line.map(|line| line.trim_start_matches([' ', '\t', ':']).to_owned()).unwrap_or_default()
}

#[derive(Serialize, Deserialize)]
struct Content {
    key: Key,
    costs: CostTable,
}

/// See the module.
pub(crate) struct PlanFile {
    key: Key,
    path: PathBuf,
}

impl PlanFile {
    /// In `dir` or the user's cache folder; `None`, with a warning, if there is neither.
    pub(crate) fn of(dir: Option<&Path>, key: Key) -> Option<Self> {
        let Some(dir) = folder(dir) else {
            tracing::warn!(
                "neither XDG_CACHE_HOME nor HOME is set: what is measured is not kept; --plan-dir names a folder"
            );
            return None;
        };
        Some(Self { path: dir.join(key.file_name()), key })
    }

    /// What an earlier start measured, if it was on this machine, with this model and program.
    pub(crate) fn read(&self) -> Option<CostTable> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot read what was measured; measuring again");
                return None;
            }
        };
        let content = serde_json::from_slice(&text).context("it is damaged").and_then(|content: Content| {
            ensure!(content.key == self.key, "it is of another model or machine");
            Ok(content.costs)
        });
        content
            .map_err(|error| {
                let path = self.path.display();
                tracing::warn!(%path, "cannot use what was measured: {error:#}; measuring again");
            })
            .ok()
    }

    /// Keeps it; a start that cannot is worth a warning and no more.
    pub(crate) fn write(&self, costs: &CostTable) {
        if let Err(error) = self.try_write(costs) {
            let path = self.path.display();
            tracing::warn!(%path, "cannot keep what was measured: {error:#}; --plan-dir names another folder");
        }
    }

    /// Whole or not at all, whoever reads meanwhile.
    fn try_write(&self, costs: &CostTable) -> Result<()> {
        let dir = self.path.parent().expect("the path has a folder");
        fs::create_dir_all(dir)?;
        let content = Content { key: self.key.clone(), costs: costs.clone() };
        write_whole(&self.path, &serde_json::to_vec_pretty(&content)?)
    }
}

/// Where things about plans are kept: the folder that was named, or the user's cache folder if there is one.
pub(crate) fn folder(named: Option<&Path>) -> Option<PathBuf> {
    named.map(Path::to_owned).or_else(default_dir)
}

fn default_dir() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("troika").join("plans"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_found_again_by_its_key_alone() {
        let dir = tempfile::tempdir().expect("a folder");
        let key = |weights: &str| Key {
            version: VERSION,
            build: "1".to_owned(),
            weights: weights.to_owned(),
            tile: 64,
            stack_inputs: false,
            engine: "soft".to_owned(),
            cpu: "cpu".to_owned(),
            threads: [1, 2],
        };
        let file = PlanFile::of(Some(dir.path()), key("a")).expect("there is a folder");
        assert_eq!(file.read(), None);
        let costs = CostTable {
            stack_inputs: false,
            tile: 64,
            threads: 1,
            threads_alone: 2,
            speedup_alone: 1.9,
            ms_per_gflop: 1.0 / 3.0,
            operations: Vec::new(),
            running: None,
        };
        file.write(&costs);
        assert_eq!(file.read(), Some(costs));
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 1, "no part is left behind");
        let stacked = PlanFile::of(Some(dir.path()), Key { stack_inputs: true, ..key("a") });
        assert_eq!(stacked.expect("there is a folder").read(), None, "of other operations");
        let other = PlanFile::of(Some(dir.path()), key("b")).expect("there is a folder");
        assert_eq!(other.read(), None);
        fs::copy(&file.path, &other.path).expect("copied");
        assert_eq!(other.read(), None, "of other weights");
        fs::write(&file.path, "{").expect("written");
        assert_eq!(file.read(), None, "damaged");
    }
}
