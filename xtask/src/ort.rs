//! Tests through ONNX Runtime: its CPU provider, and Qualcomm's neural-engine compiler with its emulator. Both come from the
//! Python registry into `target/`, for the tests alone; nothing of them is shipped.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context;

use crate::repo::{Repo, cargo};

/// What the tests are known to pass with. Nothing that these packages depend on is needed: the library is opened by our program.
const PACKAGES: [&str; 2] = ["onnxruntime==1.32.0", "onnxruntime-qnn==2.7.0"];
/// Crates that have such tests, all of them ignored elsewhere and with `ort` in their name.
const CRATES: [&str; 3] = ["troika-device", "troika-engine", "troika"];

/// How the tests went.
pub(crate) enum Tested {
    Passed,
    Failed,
    Skipped(&'static str),
}

/// Installs the packages, unless an earlier run did, and runs the tests.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<Tested> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Ok(Tested::Skipped("the emulator comes for Linux on x86-64 only"));
    }
    let environment = repo.root().join("target").join("onnxruntime");
    if let Err(why) = install(&environment)? {
        return Ok(Tested::Skipped(why));
    }
    let has_nextest = quiet(Command::new(cargo()).args(["nextest", "--version"]));
    let mut command = Command::new(cargo());
    match has_nextest {
        true => command.args(["nextest", "run", "--run-ignored", "ignored-only", "-E", "test(/^ort::/)"]),
        false => command.args(["test", "--test", "it"]),
    };
    command.args(["--locked"]).args(CRATES.iter().flat_map(|name| ["--package", name]));
    if !has_nextest {
        command.args(["--", "--ignored", "ort::"]);
    }
    command.env("TROIKA_TEST_ORT", &environment).current_dir(repo.root());
    let status = command.status().context("cannot run cargo")?;
    Ok(if status.success() { Tested::Passed } else { Tested::Failed })
}

/// Makes a Python environment with the packages; the inner error is why that is not possible here.
fn install(environment: &Path) -> anyhow::Result<Result<(), &'static str>> {
    let (done, wanted) = (environment.join("installed"), PACKAGES.join("\n"));
    if std::fs::read_to_string(&done).is_ok_and(|installed| installed == wanted) {
        return Ok(Ok(()));
    }
    if !quiet(Command::new("python3").args(["-m", "venv", "--clear"]).arg(environment)) {
        return Ok(Err("`python3 -m venv` does not work: install python3 and python3-venv"));
    }
    let mut pip = Command::new(environment.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]);
    // What pip says of a failure is shown.
    if !pip.args(PACKAGES).status().is_ok_and(|status| status.success()) {
        return Ok(Err("pip cannot install onnxruntime and onnxruntime-qnn; see above for what it said"));
    }
    std::fs::write(&done, wanted).with_context(|| format!("cannot write {}", done.display()))?;
    Ok(Ok(()))
}

/// True if the command can be run and succeeds.
fn quiet(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
