//! Instruction counts of two kernels under callgrind, compared with the committed ones: a guard against regressions that no
//! busy neighbour disturbs. Counts belong to a compiler, so under another one they are shown and not judged.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

use crate::repo::{Repo, cargo};

/// Where the counts are.
const FILE: &str = "crates/kernels/instructions.toml";
const KERNELS: [&str; 2] = ["fp4_gemv", "attention"];
/// Most that a count may differ, in percent.
const TOLERANCE: i64 = 5;

/// How the comparison went.
pub(crate) enum Counted {
    Same,
    /// Differences were printed.
    Differs,
    Skipped(&'static str),
}

#[derive(serde::Deserialize)]
struct Committed {
    rustc: String,
    fp4_gemv: i64,
    attention: i64,
}

/// Counts and compares, or with `bless` writes the file anew.
pub(crate) fn run(repo: &Repo, bless: bool) -> anyhow::Result<Counted> {
    let found = Command::new("valgrind").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        return Ok(Counted::Skipped("valgrind is not installed"));
    }
    #[cfg(target_arch = "x86_64")]
    let has_level = std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    let has_level = false;
    if !has_level {
        return Ok(Counted::Skipped("this CPU lacks AVX2"));
    }
    let rustc = Command::new("rustc").arg("--version").output().context("cannot run rustc")?.stdout;
    let rustc = String::from_utf8(rustc)?.trim().to_owned();
    let path = repo.root().join(FILE);
    let committed: Option<Committed> = match bless {
        true => None,
        false => {
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {FILE}"))?;
            Some(toml::from_str(&text).with_context(|| format!("{FILE} is not as `--bless` writes it"))?)
        }
    };
    if committed.as_ref().is_some_and(|committed| committed.rustc != rustc) {
        return Ok(Counted::Skipped("the committed counts are another compiler's; --bless makes new ones"));
    }
    let program = build(repo)?;
    let counts = KERNELS.map(|kernel| count(&program, kernel));
    let [fp4_gemv, attention] = counts;
    let got = Committed { rustc, fp4_gemv: fp4_gemv?, attention: attention? };
    let Some(committed) = committed else {
        let Committed { rustc, fp4_gemv, attention } = got;
        let head =
            "# Written by `cargo xtask instructions --bless`: instructions of crates/kernels/examples/instructions.rs.";
        fs::write(&path, format!("{head}\nrustc = \"{rustc}\"\nfp4_gemv = {fp4_gemv}\nattention = {attention}\n"))
            .with_context(|| format!("cannot write {FILE}"))?;
        println!("{FILE}: fp4_gemv {fp4_gemv}, attention {attention}");
        return Ok(Counted::Same);
    };
    let mut same = true;
    let pairs = [("fp4_gemv", committed.fp4_gemv, got.fp4_gemv), ("attention", committed.attention, got.attention)];
    for (kernel, want, got) in pairs {
        let within = (got - want).abs() * 100 <= want * TOLERANCE;
        let change = (got - want) as f64 / want as f64 * 100.0;
        println!("{kernel:<10} {got:>10} instructions, committed {want:>10}: {change:+.2} %");
        if !within {
            println!("           more than {TOLERANCE} %: if it is meant, `cargo xtask instructions --bless`");
        }
        same &= within;
    }
    Ok(if same { Counted::Same } else { Counted::Differs })
}

/// Builds the program and says where it is.
fn build(repo: &Repo) -> anyhow::Result<String> {
    let args = ["build", "--release", "--locked", "--package", "troika-kernels", "--example", "instructions"];
    let output = Command::new(cargo())
        .args(args)
        .arg("--message-format=json")
        .current_dir(repo.root())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "the program to count cannot be built");
    let messages = String::from_utf8(output.stdout)?;
    let program =
        messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()).find_map(|message| {
            match message["target"]["name"] == "instructions" {
                true => message["executable"].as_str().map(str::to_owned),
                false => None,
            }
        });
    program.context("cargo names no program `instructions`")
}

/// Instructions inside of `counted`.
fn count(program: &str, kernel: &str) -> anyhow::Result<i64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*instructions*counted*"])
        .arg("--callgrind-out-file=/dev/null")
        .args([program, kernel])
        .output()
        .context("cannot run valgrind")?;
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{} {kernel} failed under valgrind: {report}", Path::new(program).display());
    let collected = report.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok());
    let count = collected.with_context(|| format!("valgrind says nothing of its count: {report}"))?;
    ensure!(count > 0, "valgrind did not find `counted` in {program}");
    Ok(count)
}
