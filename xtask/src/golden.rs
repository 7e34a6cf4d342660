//! Makes the oracle's files again with the oracle's own scripts and compares them with the committed ones.
//!
//! The scripts need numpy; where the system's Python lacks it, a virtual environment below the target folder gets the
//! version that `oracle/requirements.txt` names.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use crate::repo::Repo;
use crate::tidy;

/// How to make the files, and whether to keep them.
#[derive(Clone, Copy, Default)]
pub(crate) struct Options {
    /// Logits from transformers instead of the numpy reference.
    hf: bool,
    /// Copy the new files over the committed ones.
    write: bool,
}

impl Options {
    pub(crate) fn parse(args: &[&str]) -> anyhow::Result<Self> {
        let mut options = Self::default();
        for arg in args {
            match *arg {
                "--hf" => options.hf = true,
                // The default, for people who type what the oracle's script calls it.
                "--no-hf" => options.hf = false,
                "--write" => options.write = true,
                other => bail!("`golden` does not know `{other}`: --hf, --write"),
            }
        }
        Ok(options)
    }
}

/// True if the new files agree with the committed ones, or were written over them.
pub(crate) fn run(repo: &Repo, options: Options) -> anyhow::Result<bool> {
    let target = repo.metadata()?.target_directory;
    let oracle = repo.root().join("oracle");
    let python = python(&target, &oracle, options.hf)?;
    let made = target.join("golden");
    std::fs::create_dir_all(&made).with_context(|| format!("cannot create {}", made.display()))?;

    println!("making the files in {} (2 to 5 minutes with --hf, less without)", made.display());
    let mut command = Command::new(&python);
    command.arg(oracle.join("make_golden.py")).arg("--root").arg(&made);
    if !options.hf {
        command.arg("--no-hf");
    }
    let log = made.join("make_golden.log");
    command.stdout(std::fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?);
    ensure!(status(&mut command)?, "oracle/make_golden.py failed; see above");
    let mut command = Command::new(&python);
    command.arg(oracle.join("make_variants.py")).arg("--root").arg(&made);
    ensure!(status(&mut command)?, "oracle/make_variants.py failed; see above");

    let same = status(Command::new(&python).arg(oracle.join("compare.py")).arg(&oracle).arg(&made))?;
    if !options.write {
        return Ok(same);
    }
    take_over(&made, &oracle, options.hf)?;
    tidy::checksums::write(repo, "oracle")?;
    println!("wrote the new files and oracle/SHA256SUMS; `git diff --stat oracle` shows what changed");
    Ok(true)
}

fn take_over(made: &Path, oracle: &Path, hf: bool) -> anyhow::Result<()> {
    let mut names: Vec<String> = ["golden_debug", "golden_draft", "golden_state", "golden_units", "golden_variants"]
        .map(|name| format!("{name}.safetensors"))
        .to_vec();
    for folder in ["tiny", "tiny-bf16", "tiny-mlx", "variant-pro"] {
        names.extend([format!("{folder}/config.json"), format!("{folder}/model.safetensors")]);
    }
    names.push("variant-mixed/config.json".to_owned());
    names.extend([1, 2].map(|part| format!("variant-mixed/model-0000{part}-of-00002.safetensors")));
    if hf {
        names.extend(["golden_logits.safetensors".to_owned(), "report.json".to_owned()]);
    } else {
        println!("golden_logits.safetensors stays: its worth is the second source, which only --hf has");
    }
    for name in names {
        std::fs::copy(made.join(&name), oracle.join(&name)).with_context(|| format!("cannot copy {name}"))?;
    }
    Ok(())
}

/// A Python that can run the scripts.
fn python(target: &Path, oracle: &Path, hf: bool) -> anyhow::Result<PathBuf> {
    let system = PathBuf::from(std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned()));
    let needed = if hf { "import numpy, torch, transformers" } else { "import numpy" };
    let has = |python: &Path| Command::new(python).args(["-c", needed]).output().is_ok_and(|out| out.status.success());
    if has(&system) {
        return Ok(system);
    }
    let venv = target.join("golden-venv");
    let python = venv.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
    if has(&python) {
        return Ok(python);
    }
    println!("installing the oracle's Python packages in {}", venv.display());
    let made = status(Command::new(&system).args(["-m", "venv"]).arg(&venv))?;
    ensure!(made, "cannot make a virtual environment with {} (on Debian: apt install python3-venv)", system.display());
    let requirements = oracle.join("requirements.txt");
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet"]);
    if hf {
        pip.arg("--requirement").arg(&requirements);
    } else {
        let text = std::fs::read_to_string(&requirements).context("cannot read oracle/requirements.txt")?;
        pip.arg(text.lines().find(|line| line.starts_with("numpy")).context("oracle/requirements.txt names no numpy")?);
    }
    ensure!(status(&mut pip)?, "pip could not install the oracle's packages");
    Ok(python)
}

fn status(command: &mut Command) -> anyhow::Result<bool> {
    let program = command.get_program().to_string_lossy().into_owned();
    Ok(command.status().with_context(|| format!("cannot run {program}"))?.success())
}

#[cfg(test)]
mod tests {
    use super::Options;

    #[test]
    fn options_are_read() {
        let options = Options::parse(&["--hf", "--write"]).expect("known");
        assert!(options.hf && options.write);
        assert!(!Options::parse(&["--no-hf"]).expect("known").hf);
        assert!(Options::parse(&["--now"]).is_err());
    }
}
