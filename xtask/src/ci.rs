//! What a change must pass, in the order that finds trouble soonest. Stops at the first failure.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::cross::{self, Checked};
use crate::instructions::{self, Counted};
use crate::ort::{self, Tested};
use crate::repo::{Repo, cargo};
use crate::tidy;

/// How one step went.
enum Outcome {
    Passed,
    Failed,
    Skipped(&'static str),
}

/// Runs every step; prints its name before and all times after.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<bool> {
    type Step = (&'static str, fn(&Repo) -> anyhow::Result<Outcome>);
    let steps: [Step; 8] = [
        ("fmt", fmt),
        ("tidy", tidy_up),
        ("clippy", clippy),
        ("doc tests", doc_tests),
        ("tests", tests),
        ("ort tests", ort_tests),
        ("counts", counts),
        ("cross", cross),
    ];
    let mut done: Vec<(&str, Outcome, Duration)> = Vec::new();
    let mut all_passed = true;
    for (name, step) in steps {
        println!("==> {name}");
        let start = Instant::now();
        let outcome = step(repo).with_context(|| format!("step `{name}` could not run"))?;
        all_passed = !matches!(outcome, Outcome::Failed);
        done.push((name, outcome, start.elapsed()));
        if !all_passed {
            break;
        }
    }
    println!();
    for (name, outcome, time) in &done {
        let word = match outcome {
            Outcome::Passed => "passed".to_owned(),
            Outcome::Failed => "FAILED".to_owned(),
            Outcome::Skipped(why) => format!("skipped: {why}"),
        };
        println!("{name:>10}  {:>7.1} s  {word}", time.as_secs_f64());
    }
    if let Some((name, ..)) = done.last().filter(|_| !all_passed) {
        println!("ci: FAILED at `{name}`; {} of {} steps ran", done.len(), steps.len());
    } else {
        println!("ci: passed");
    }
    Ok(all_passed)
}

fn fmt(repo: &Repo) -> anyhow::Result<Outcome> {
    run_cargo(repo, &["fmt", "--all", "--check"])
}

fn tidy_up(repo: &Repo) -> anyhow::Result<Outcome> {
    Ok(outcome(tidy::run(repo)?))
}

fn clippy(repo: &Repo) -> anyhow::Result<Outcome> {
    run_cargo(repo, &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])
}

/// Only of crates that have examples: rustdoc costs a second or more for each crate even if it finds none.
fn doc_tests(repo: &Repo) -> anyhow::Result<Outcome> {
    let mut rooms: Vec<String> = Vec::new();
    for path in repo.files()? {
        let Some((room, _)) = path.strip_prefix("crates/").and_then(|rest| rest.split_once("/src/")) else { continue };
        if path.ends_with(".rs") && !rooms.iter().any(|known| known == room) && has_doc_example(&repo.read(&path)?) {
            rooms.push(room.to_owned());
        }
    }
    if rooms.is_empty() {
        return Ok(Outcome::Skipped("no crate has an example in its documentation"));
    }
    let packages = repo.metadata()?.packages;
    let mut args = vec!["test", "--doc", "--locked"];
    for package in packages.iter().filter(|package| rooms.iter().any(|room| room == package.room())) {
        args.extend(["--package", &package.name]);
    }
    run_cargo(repo, &args)
}

/// True if a documentation comment opens a code block that rustdoc would compile.
fn has_doc_example(source: &str) -> bool {
    let mut inside = false;
    source.lines().filter_map(|line| line.trim_start().strip_prefix("//")).any(|line| {
        let Some(info) = line.strip_prefix(['/', '!']).and_then(|line| line.trim_start().strip_prefix("```")) else {
            return false;
        };
        inside = !inside;
        let compiled = ["rust", "no_run", "should_panic", "compile_fail"];
        inside && (info.is_empty() || info.split(',').any(|word| compiled.contains(&word.trim())))
    })
}

fn tests(repo: &Repo) -> anyhow::Result<Outcome> {
    let has_nextest = Command::new(cargo())
        .args(["nextest", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if has_nextest {
        return run_cargo(repo, &["nextest", "run", "--workspace", "--locked"]);
    }
    println!("cargo-nextest is not installed, so `cargo test` runs the tests instead, which is slower.");
    println!("To install it: cargo install --locked cargo-nextest");
    run_cargo(repo, &["test", "--workspace", "--lib", "--bins", "--tests", "--locked"])
}

fn ort_tests(repo: &Repo) -> anyhow::Result<Outcome> {
    Ok(match ort::run(repo)? {
        Tested::Passed => Outcome::Passed,
        Tested::Failed => Outcome::Failed,
        Tested::Skipped(why) => Outcome::Skipped(why),
    })
}

fn counts(repo: &Repo) -> anyhow::Result<Outcome> {
    Ok(match instructions::run(repo, false)? {
        Counted::Same => Outcome::Passed,
        Counted::Differs => Outcome::Failed,
        Counted::Skipped(why) => Outcome::Skipped(why),
    })
}

fn cross(repo: &Repo) -> anyhow::Result<Outcome> {
    Ok(match cross::run(repo)? {
        Checked::Clean => Outcome::Passed,
        Checked::Wrong => Outcome::Failed,
        Checked::Skipped(why) => Outcome::Skipped(why),
    })
}

fn run_cargo(repo: &Repo, args: &[&str]) -> anyhow::Result<Outcome> {
    let status = Command::new(cargo()).args(args).current_dir(repo.root()).status().context("cannot run cargo")?;
    Ok(outcome(status.success()))
}

fn outcome(passed: bool) -> Outcome {
    if passed { Outcome::Passed } else { Outcome::Failed }
}

#[cfg(test)]
mod tests {
    use super::has_doc_example;

    #[test]
    fn doc_examples_are_the_blocks_that_compile() {
        assert!(has_doc_example("/// Adds.\n///\n/// ```\n/// add(1, 2);\n/// ```\nfn add() {}"));
        assert!(has_doc_example("//! ```rust,no_run\n//! x();\n//! ```"));
        assert!(!has_doc_example("/// ```text\n/// a picture\n/// ```"));
        assert!(!has_doc_example("// ```\n// an ordinary comment\n// ```"));
        assert!(!has_doc_example("fn f() {}"));
    }
}
