//! Type-checks and lints the workspace for a Mac, so that code for other platforms does not rot where nobody runs it.
//!
//! Nothing is linked, so no Apple file is needed. The standard library for the target comes from rustup where it is
//! installed, else from the sources that Debian packages beside its own compiler. That compiler is another version, so its
//! lints are other lints: it denies unused code, and the rest are shown.

use std::path::Path;
use std::process::Command;

use anyhow::Context;

use crate::repo::{Repo, cargo};

/// What is checked for.
const TARGET: &str = "aarch64-apple-darwin";
/// Debian's compiler, and the sources of its standard library.
const DEBIAN_CARGO: &str = "/usr/bin/cargo";
const DEBIAN_SOURCES: &str = "/usr/lib/rustlib/src/rust/library/std";
const HELP: &str = "no standard library for aarch64-apple-darwin: `rustup target add aarch64-apple-darwin`, or on Debian \
                    `apt install rustc-web cargo-web rust-web-src rust-web-clippy`";

/// How the check went.
pub(crate) enum Checked {
    Clean,
    /// What is wrong was printed.
    Wrong,
    Skipped(&'static str),
}

/// Checks every target of every crate.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<Checked> {
    let mut command = if rustup_has_target()? {
        let mut command = Command::new(cargo());
        command.args(["clippy", "--target", TARGET]);
        command
    } else if Path::new(DEBIAN_CARGO).exists() && Path::new(DEBIAN_SOURCES).exists() {
        debian()?
    } else {
        return Ok(Checked::Skipped(HELP));
    };
    // Crates with C code ask for a compiler of the target; a check never looks at what it makes.
    let target = TARGET.replace('-', "_");
    ["CC", "CXX", "AR"].iter().for_each(|tool| {
        command.env(format!("{tool}_{target}"), "true");
    });
    let target_dir = repo.root().join("target").join("cross");
    command.args(["--workspace", "--all-targets", "--locked", "--target-dir"]).arg(target_dir);
    // Line tables are of no use to a check and cost time.
    command.env("CARGO_PROFILE_DEV_DEBUG", "0").args(["--", "-D", "unused"]);
    let status = command.current_dir(repo.root()).status().context("cannot run cargo")?;
    Ok(if status.success() { Checked::Clean } else { Checked::Wrong })
}

fn rustup_has_target() -> anyhow::Result<bool> {
    let output = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", TARGET])
        .output()
        .context("cannot run rustc")?;
    Ok(output.status.success() && Path::new(String::from_utf8_lossy(&output.stdout).trim()).exists())
}

/// Debian's cargo, building the standard library from its sources, which it calls unstable.
fn debian() -> anyhow::Result<Command> {
    let mut command = Command::new(DEBIAN_CARGO);
    // Programs of rustup, which may have started this one, must not be found before Debian's.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once("/usr/bin".into()).chain(std::env::split_paths(&path));
    command.env("PATH", std::env::join_paths(paths)?).env("RUSTC_BOOTSTRAP", "1");
    ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "RUSTUP_HOME"].iter().for_each(|name| {
        command.env_remove(name);
    });
    command.args(["clippy", "-Zbuild-std=std,panic_abort", "--target", TARGET]);
    Ok(command)
}
