//! Licences, sources and bans of everything we build on: `deny.toml` against `cargo metadata`.
//!
//! The file is in cargo-deny's form, of which this is the small part we need without installing anything.

use anyhow::Context;
use serde::Deserialize;

use super::{Violation, line_of};
use crate::repo::Package;

pub(super) const FILE: &str = "deny.toml";
pub(super) const LOCK: &str = "Cargo.lock";

/// What `deny.toml` says.
#[derive(Deserialize)]
pub(super) struct Policy {
    licenses: Licenses,
    sources: Sources,
    bans: Bans,
}

#[derive(Deserialize)]
struct Licenses {
    /// SPDX names, with their exception where there is one.
    allow: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: Vec<String>,
}

#[derive(Deserialize)]
struct Bans {
    deny: Vec<Ban>,
}

#[derive(Deserialize)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
    reason: String,
}

impl Policy {
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        toml::from_str(text).with_context(|| format!("cannot read {FILE}"))
    }
}

/// `packages` are those that are not ours, `lock` is the text of the lock file.
pub(super) fn check(policy: &Policy, packages: &[Package], lock: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    for package in packages {
        let name = format!("{} {}", package.name, package.version);
        let mut report = |what: String, remedy: &str| {
            let line = line_of(lock, &format!("name = \"{}\"", package.name));
            violations.push(Violation::new(LOCK, line, what, remedy));
        };
        match package.license.as_deref() {
            None => report(format!("{name} states no licence"), "find a crate that does"),
            Some(license) => match allows(license, &policy.licenses.allow) {
                Ok(true) => {}
                Ok(false) => report(
                    format!("{name} has licence `{license}`, which is not allowed"),
                    "find another crate, or allow the licence in deny.toml if it suits an Apache-2.0 program",
                ),
                Err(why) => report(format!("{name} has licence `{license}`: {why}"), "read it and find another crate"),
            },
        }
        let source = package.source.as_deref().unwrap_or("none");
        let known =
            source.strip_prefix("registry+").is_some_and(|url| policy.sources.allow_registry.iter().any(|a| a == url));
        if !known {
            report(format!("{name} comes from `{source}`"), "use a release from crates.io");
        }
        if let Some(ban) = policy.bans.deny.iter().find(|ban| ban.name == package.name) {
            report(format!("{name} is banned: {}", ban.reason), "`cargo tree --invert` shows who brings it");
        }
    }
    violations
}

/// True if the SPDX expression can be met with the licences in `allowed`. A `/` is the old spelling of `OR`.
fn allows(expression: &str, allowed: &[String]) -> Result<bool, String> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words: Vec<&str> = spaced.split_whitespace().collect();
    words.reverse();
    let result = either(&mut words, allowed)?;
    match words.last() {
        None => Ok(result),
        Some(word) => Err(format!("cannot read `{word}`")),
    }
}

/// `words` holds what is left, the next word last.
fn either(words: &mut Vec<&str>, allowed: &[String]) -> Result<bool, String> {
    let mut result = both(words, allowed)?;
    while words.last() == Some(&"OR") {
        words.pop();
        // Not `||`: the right side must be read in any case.
        result |= both(words, allowed)?;
    }
    Ok(result)
}

fn both(words: &mut Vec<&str>, allowed: &[String]) -> Result<bool, String> {
    let mut result = one(words, allowed)?;
    while words.last() == Some(&"AND") {
        words.pop();
        result &= one(words, allowed)?;
    }
    Ok(result)
}

fn one(words: &mut Vec<&str>, allowed: &[String]) -> Result<bool, String> {
    match words.pop() {
        None => Err("it ends too early".to_owned()),
        Some("(") => {
            let result = either(words, allowed)?;
            if words.pop() == Some(")") { Ok(result) } else { Err("a parenthesis is missing".to_owned()) }
        }
        Some(word @ (")" | "OR" | "AND" | "WITH")) => Err(format!("cannot read `{word}`")),
        Some(license) => {
            let mut name = license.to_owned();
            if words.last() == Some(&"WITH") {
                words.pop();
                name = format!("{name} WITH {}", words.pop().ok_or("it ends too early")?);
            }
            Ok(allowed.contains(&name))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = r#"
        [licenses]
        allow = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"]
        [sources]
        unknown-git = "deny"
        allow-registry = ["https://registry.example/index"]
        [bans]
        deny = [{ crate = "bad", reason = "it builds C" }]
    "#;

    fn package(name: &str, license: Option<&str>, source: &str) -> Package {
        Package {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            license: license.map(str::to_owned),
            source: Some(source.to_owned()),
            dependencies: Vec::new(),
            manifest_path: "registry/Cargo.toml".into(),
        }
    }

    #[test]
    fn expressions_are_met_or_not() {
        let allowed: Vec<String> = ["MIT", "Apache-2.0", "X WITH Y"].map(str::to_owned).to_vec();
        for good in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-3.0/MIT",
            "GPL-3.0 / MIT",
            "(MIT OR Z) AND Apache-2.0",
            "X WITH Y",
            "Z OR MIT AND Apache-2.0",
        ] {
            assert_eq!(allows(good, &allowed), Ok(true), "{good}");
        }
        for bad in ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Z) AND Z", "X", "X WITH Z", "MIT AND (Z OR W)"] {
            assert_eq!(allows(bad, &allowed), Ok(false), "{bad}");
        }
        for broken in ["", "MIT OR", "(MIT", "MIT)", "MIT Apache-2.0", "X WITH", "OR"] {
            assert!(allows(broken, &allowed).is_err(), "{broken}");
        }
    }

    #[test]
    fn packages_are_checked_for_all_three() {
        let policy = Policy::parse(POLICY).expect("readable");
        let registry = "registry+https://registry.example/index";
        let count = |packages: &[Package]| check(&policy, packages, "").len();
        assert_eq!(count(&[package("good", Some("MIT"), registry)]), 0);
        assert_eq!(count(&[package("good", None, registry)]), 1);
        assert_eq!(count(&[package("good", Some("GPL-3.0"), registry)]), 1);
        assert_eq!(count(&[package("good", Some("MIT"), "git+https://git.example/good#1")]), 1);
        let worst = check(&policy, &[package("bad", Some("?("), "path")], "[[package]]\nname = \"bad\"");
        assert_eq!(worst.len(), 3);
        assert!(worst[2].to_string().starts_with("Cargo.lock:2: bad 1.0.0 is banned: it builds C"), "{}", worst[2]);
    }
}
