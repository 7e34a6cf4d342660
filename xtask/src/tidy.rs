//! The rules that no compiler checks. Each rule is a function from texts to [`Violation`]s; only this file reads.
//!
//! Read `docs/architecture.md` for the arrows and `deny.toml` for licences, sources and bans.

mod arrows;
pub(crate) mod checksums;
mod deny;
mod links;
mod lints;
mod mask;
mod rust_source;
mod text;

use std::fmt;

use crate::repo::Repo;

/// One broken rule, with what to do about it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    path: String,
    /// 1-based.
    line: usize,
    what: String,
    remedy: String,
}

impl Violation {
    fn new(path: &str, line: usize, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}; {}", self.path, self.line, self.what, self.remedy)
    }
}

/// Crates that may contain `unsafe`.
const UNSAFE_ROOMS: [&str; 2] = ["kernels", "device"];
/// Texts written by others, or by the programs under `tools/` and `oracle/`: only their checksums are ours to check.
const DATA_FOLDERS: [&str; 4] = ["models/", "oracle/tiny/", "oracle/tiny-bf16/", "oracle/tiny-mlx/"];

/// Checks everything, prints one line for each violation. True if there is none.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<bool> {
    let mut violations = check(repo)?;
    violations.sort();
    for violation in &violations {
        println!("{violation}");
    }
    match violations.len() {
        0 => println!("tidy: no violations"),
        1 => println!("tidy: 1 violation"),
        n => println!("tidy: {n} violations"),
    }
    Ok(violations.is_empty())
}

fn check(repo: &Repo) -> anyhow::Result<Vec<Violation>> {
    let files = repo.files()?;
    let metadata = repo.metadata()?;
    let (ours, theirs): (Vec<_>, Vec<_>) = metadata.packages.into_iter().partition(|package| package.source.is_none());

    let manifest_text = |path: &str| repo.read(path).unwrap_or_default();
    let mut violations = arrows::check(arrows::DOCUMENT, &repo.read(arrows::DOCUMENT)?, &ours, manifest_text);
    violations.extend(deny::check(&deny::Policy::parse(&repo.read(deny::FILE)?)?, &theirs, &repo.read(deny::LOCK)?));
    violations.extend(lints::check_workspace(&repo.read("Cargo.toml")?)?);
    for package in &ours {
        let path = package.manifest();
        let may_be_unsafe = UNSAFE_ROOMS.contains(&package.room());
        violations.extend(lints::check_crate(&path, &repo.read(&path)?, may_be_unsafe)?);
    }
    for path in files.iter().filter(|path| !DATA_FOLDERS.iter().any(|folder| path.starts_with(folder))) {
        if !text::is_ours(path) {
            continue;
        }
        let content = repo.read(path)?;
        violations.extend(text::check(path, &content));
        if path.ends_with(".rs") {
            let may_be_unsafe = UNSAFE_ROOMS.iter().any(|room| path.starts_with(&format!("crates/{room}/")));
            violations.extend(rust_source::check(path, &content, may_be_unsafe));
        }
        if path.ends_with(".md") {
            let headings = |target: &str| {
                let text = if target.ends_with(".md") { repo.read(target).ok()? } else { String::new() };
                repo.root().join(target).exists().then(|| links::anchors(&text))
            };
            violations.extend(links::check(path, &content, headings));
        }
    }
    violations.extend(text::check_test_command(&repo.read("README.md")?, &repo.read(".ci/run")?));
    violations.extend(checksums::check(repo, &files)?);
    Ok(violations)
}

/// The 1-based line on which `needle` first stands in `text`; 1 if it does not.
fn line_of(text: &str, needle: &str) -> usize {
    text.lines().position(|line| line.contains(needle)).map_or(1, |index| index + 1)
}
