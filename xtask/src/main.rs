//! Repository chores, run as `cargo xtask CHORE`. Knows the files of this repository and none of its crates' code.
//!
//! Read [`ci`] for what a change must pass, [`tidy`] for the rules that no compiler checks.

mod ci;
mod cross;
mod golden;
mod instructions;
mod ort;
mod repo;
mod tidy;

use std::process::ExitCode;

use cross::Checked;
use instructions::Counted;
use ort::Tested;
use repo::Repo;

const HELP: &str = "\
Usage: cargo xtask CHORE

  ci                      everything a change must pass: fmt, tidy, clippy, doc tests, tests, ort tests, counts, cross
  cross                   type-check and lint the workspace for aarch64-apple-darwin
  ort                     install ONNX Runtime and a neural engine's emulator under target/, and run the tests that need them
  tidy                    the rules that no compiler checks: crate arrows, licences, sources, files, links, checksums
  golden [--hf] [--write] make the oracle's files again and compare them with the committed ones
           --hf           with transformers as the second source of the logits (pulls torch); default: numpy only
           --write        take the new files over; the stored logits only together with --hf
  instructions [--bless]  count the instructions of two kernels under valgrind and compare them with the committed counts
           --bless        take the new counts over
  checksums DIR           write DIR/SHA256SUMS anew, keeping its comment lines
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// `Ok(false)` if the chore ran and found something wrong, which it has printed.
fn run(args: &[&str]) -> anyhow::Result<bool> {
    let (chore, rest) = args.split_first().unwrap_or((&"--help", &[]));
    match *chore {
        "ci" | "cross" | "ort" | "tidy" if !rest.is_empty() => {
            anyhow::bail!("`{chore}` takes no arguments, got `{}`", rest.join(" "))
        }
        "ci" => ci::run(&Repo::find()?),
        "cross" => Ok(match cross::run(&Repo::find()?)? {
            Checked::Clean => true,
            Checked::Wrong => false,
            Checked::Skipped(why) => {
                println!("skipped: {why}");
                true
            }
        }),
        "ort" => Ok(match ort::run(&Repo::find()?)? {
            Tested::Passed => true,
            Tested::Failed => false,
            Tested::Skipped(why) => {
                println!("skipped: {why}");
                true
            }
        }),
        "tidy" => tidy::run(&Repo::find()?),
        "golden" => golden::run(&Repo::find()?, golden::Options::parse(rest)?),
        "instructions" => {
            let bless = match rest {
                [] => false,
                ["--bless"] => true,
                _ => anyhow::bail!("`instructions` takes --bless or nothing, got `{}`", rest.join(" ")),
            };
            Ok(match instructions::run(&Repo::find()?, bless)? {
                Counted::Same => true,
                Counted::Differs => false,
                Counted::Skipped(why) => {
                    println!("skipped: {why}");
                    true
                }
            })
        }
        "checksums" => {
            let [dir] = rest else { anyhow::bail!("`checksums` takes one folder, for example `oracle`") };
            tidy::checksums::write(&Repo::find()?, dir)?;
            Ok(true)
        }
        "--help" | "-h" | "help" => {
            print!("{HELP}");
            Ok(true)
        }
        other => anyhow::bail!("no chore `{other}`\n\n{HELP}"),
    }
}
