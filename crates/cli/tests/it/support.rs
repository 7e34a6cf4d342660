//! Running the command.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use troika_model::synth::{Preset, synth};

/// What a run left behind.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
        let code = output.status.code().expect("the process was not killed");
        Self { code, stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Ran {
    /// # Panics
    ///
    /// If the command failed.
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.stderr);
        self
    }

    /// # Panics
    ///
    /// If the command did not fail with `code` and a message that holds every part.
    pub(crate) fn fails(self, code: i32, parts: &[&str]) -> Self {
        assert_eq!(self.code, code, "{}{}", self.stdout, self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "no `{part}` in: {}", self.stderr);
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_troika"));
    command.args(args).stdin(Stdio::null()).env_remove("TROIKA_LOG");
    command
}

pub(crate) fn troika(args: &[&str]) -> Ran {
    command(args).output().expect("the command starts").into()
}

/// A scratch folder with a synthetic checkpoint of 5 MB under `model`.
pub(crate) struct Scratch {
    dir: TempDir,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        let dir = troika_testkit::scratch_dir();
        synth(Preset::Tiny, &dir.path().join("model"), 7, &mut |_, _| {}).expect("written");
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The path of the checkpoint, or of `name` in the folder, as an argument.
    pub(crate) fn arg(&self, name: &str) -> String {
        text(&self.path(name))
    }

    pub(crate) fn write(&self, name: &str, content: &[u8]) -> String {
        std::fs::write(self.path(name), content).expect("writable");
        self.arg(name)
    }
}

pub(crate) fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}
