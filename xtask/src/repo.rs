//! The repository as the chores see it: where it is, which files belong to it, what cargo knows about it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use serde::Deserialize;

/// This repository on disk.
pub(crate) struct Repo {
    root: PathBuf,
}

impl Repo {
    /// The repository this program was built from.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the repository")?;
        ensure!(root.join("Cargo.lock").is_file(), "{} is no checkout of this repository any more", root.display());
        Ok(Self { root: root.to_owned() })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Files under version control and new ones that are not ignored, relative, with `/`, sorted.
    pub(crate) fn files(&self) -> anyhow::Result<Vec<String>> {
        let output = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&self.root)
            .output()
            .context("cannot run git, which knows the files of the repository")?;
        ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim());
        let names = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
        let mut files: Vec<String> =
            names.split('\0').filter(|name| self.root.join(name).is_file()).map(str::to_owned).collect();
        files.sort();
        files.dedup();
        Ok(files)
    }

    pub(crate) fn read(&self, path: &str) -> anyhow::Result<String> {
        std::fs::read_to_string(self.root.join(path)).with_context(|| format!("cannot read {path}"))
    }

    /// Every package of the lock file, our own included.
    pub(crate) fn metadata(&self) -> anyhow::Result<Metadata> {
        let output = Command::new(cargo())
            .args(["metadata", "--format-version", "1", "--locked"])
            .current_dir(&self.root)
            .output()
            .context("cannot run cargo")?;
        ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
        serde_json::from_slice(&output.stdout).context("cannot read the output of cargo metadata")
    }
}

/// The cargo that runs us, so that a chosen toolchain stays chosen.
pub(crate) fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// The part of `cargo metadata` that the chores use.
#[derive(Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) target_directory: PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    /// `None` for our own packages.
    pub(crate) source: Option<String>,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) manifest_path: PathBuf,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Dependency {
    /// `None` = normal, else `dev` or `build`.
    pub(crate) kind: Option<String>,
    /// Folder of a dependency inside the repository.
    pub(crate) path: Option<PathBuf>,
}

impl Package {
    /// Its manifest, relative to the repository; only for our own packages.
    pub(crate) fn manifest(&self) -> String {
        let room = self.room();
        if room == "xtask" { "xtask/Cargo.toml".to_owned() } else { format!("crates/{room}/Cargo.toml") }
    }

    /// What the documents call one of our crates: the name of its folder.
    pub(crate) fn room(&self) -> &str {
        folder_name(self.manifest_path.parent())
    }
}

impl Dependency {
    /// The room of a dependency inside the repository.
    pub(crate) fn room(&self) -> Option<&str> {
        self.path.as_deref().map(|path| folder_name(Some(path)))
    }
}

fn folder_name(path: Option<&Path>) -> &str {
    path.and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or("?")
}
