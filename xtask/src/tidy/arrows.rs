//! Who may depend on whom: the block ```` ```arrows ```` of `docs/architecture.md` against the manifests.
//!
//! A line `room: a, b` allows the arrows to `a` and `b`; `room (tests): c` allows one more for tests only. Tests of any
//! crate may use `testkit` and `kernels`. An arrow that is allowed but absent is a violation too, so that the picture
//! stays true.

use std::collections::{BTreeMap, BTreeSet};

use super::{Violation, line_of};
use crate::repo::Package;

pub(super) const DOCUMENT: &str = "docs/architecture.md";
const FENCE: &str = "```arrows";
/// What tests of every crate may use: what compares, and the reference to compare with.
const FREE_IN_TESTS: [&str; 2] = ["testkit", "kernels"];

/// One room's line in the document.
#[derive(Debug, Default, PartialEq, Eq)]
struct Allowed {
    line: usize,
    normal: BTreeSet<String>,
    tests: BTreeSet<String>,
}

/// Compares the block in `document`, found at `path`, with the manifests of `packages`, whose texts `manifest_text` gives.
pub(super) fn check(
    path: &str,
    document: &str,
    packages: &[Package],
    manifest_text: impl Fn(&str) -> String,
) -> Vec<Violation> {
    let (allowed, mut violations) = parse(path, document);
    for package in packages {
        let room = package.room();
        let manifest = package.manifest();
        let Some(rule) = allowed.get(room) else {
            let remedy = format!("add a line `{room}: ...` to the arrows of {path}, with its reason");
            violations.push(Violation::new(&manifest, 1, format!("crate `{room}` is not in the picture"), remedy));
            continue;
        };
        let mut used = Allowed::default();
        for dependency in &package.dependencies {
            let Some(target) = dependency.room() else { continue };
            let is_test = dependency.kind.as_deref() == Some("dev");
            let fine = rule.normal.contains(target)
                || (is_test && (rule.tests.contains(target) || FREE_IN_TESTS.contains(&target)));
            if !fine {
                let suffix = if is_test { " (tests)" } else { "" };
                let remedy =
                    format!("a new arrow is a design change: add it to `{room}{suffix}` in {path} with its reason");
                let what = format!("arrow `{room}{suffix} -> {target}` is not allowed");
                let line = line_of(&manifest_text(&manifest), &format!("troika-{target}"));
                violations.push(Violation::new(&manifest, line, what, remedy));
            }
            let set = if is_test { &mut used.tests } else { &mut used.normal };
            set.insert(target.to_owned());
        }
        let absent = rule.normal.difference(&used.normal).map(|target| (room.to_owned(), target));
        let absent_tests = rule.tests.difference(&used.tests).map(|target| (format!("{room} (tests)"), target));
        for (from, target) in absent.chain(absent_tests) {
            let what = format!("arrow `{from} -> {target}` is in the picture but not in {manifest}");
            violations.push(Violation::new(path, rule.line, what, "take it out"));
        }
    }
    for (room, rule) in &allowed {
        if !packages.iter().any(|package| package.room() == room) {
            let what = format!("the picture has a crate `{room}` that does not exist");
            violations.push(Violation::new(
                path,
                rule.line,
                what,
                "take it out, or name it as later work outside the block",
            ));
        }
    }
    violations
}

fn parse(path: &str, document: &str) -> (BTreeMap<String, Allowed>, Vec<Violation>) {
    let mut allowed: BTreeMap<String, Allowed> = BTreeMap::new();
    let mut violations = Vec::new();
    let lines = document.lines().enumerate().skip_while(|(_, line)| line.trim() != FENCE).skip(1);
    for (index, line) in lines.take_while(|(_, line)| !line.trim_start().starts_with("```")) {
        let text = line.split('#').next().unwrap_or("").trim();
        if text.is_empty() {
            continue;
        }
        let Some((from, targets)) = text.split_once(':') else {
            violations.push(Violation::new(path, index + 1, format!("cannot read `{text}`"), "write `room: a, b`"));
            continue;
        };
        let (room, is_tests) = match from.trim().strip_suffix("(tests)") {
            Some(room) => (room.trim(), true),
            None => (from.trim(), false),
        };
        let rule = allowed.entry(room.to_owned()).or_insert_with(|| Allowed { line: index + 1, ..Allowed::default() });
        let set = if is_tests { &mut rule.tests } else { &mut rule.normal };
        set.extend(targets.split(',').map(str::trim).filter(|target| !target.is_empty()).map(str::to_owned));
    }
    if allowed.is_empty() {
        let remedy = format!("the document needs a block {FENCE} with lines `room: a, b`");
        violations.push(Violation::new(path, 1, "no arrows found", remedy));
    }
    (allowed, violations)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repo::Dependency;

    fn package(room: &str, arrows: &[(&str, Option<&str>)]) -> Package {
        let dependency = |&(target, kind): &(&str, Option<&str>)| Dependency {
            kind: kind.map(str::to_owned),
            path: Some(format!("repo/crates/{target}").into()),
        };
        Package {
            name: format!("troika-{room}"),
            version: "0.1.0".to_owned(),
            license: None,
            source: None,
            dependencies: arrows.iter().map(dependency).collect(),
            manifest_path: format!("repo/crates/{room}/Cargo.toml").into(),
        }
    }

    fn whats(document: &str, packages: &[Package]) -> Vec<String> {
        check("a.md", document, packages, |_| "[dependencies]\ntroika-extra = 1".to_owned())
            .iter()
            .map(Violation::to_string)
            .collect()
    }

    const PICTURE: &str = "# Rooms\n\n```arrows\nbase:\ngraph: base  # pure\ngraph (tests): extra\nextra:\n```\n";

    #[test]
    fn an_agreeing_picture_passes() {
        let graph = package("graph", &[("base", None), ("extra", Some("dev")), ("testkit", Some("dev"))]);
        assert_eq!(whats(PICTURE, &[package("base", &[]), graph, package("extra", &[])]), [""; 0]);
    }

    #[test]
    fn differences_are_named_in_both_directions() {
        let graph = package("graph", &[("extra", None)]);
        let found = whats(PICTURE, &[package("base", &[]), graph, package("new", &[])]);
        assert_eq!(found.len(), 5, "{found:#?}");
        assert!(
            found[0].starts_with("crates/graph/Cargo.toml:2: arrow `graph -> extra` is not allowed"),
            "{}",
            found[0]
        );
        assert!(found[1].starts_with("a.md:5: arrow `graph -> base` is in the picture but not in"), "{}", found[1]);
        assert!(found[2].starts_with("a.md:5: arrow `graph (tests) -> extra`"), "{}", found[2]);
        assert!(found[3].starts_with("crates/new/Cargo.toml:1: crate `new` is not in the picture"), "{}", found[3]);
        assert!(found[4].starts_with("a.md:7: the picture has a crate `extra` that does not exist"), "{}", found[4]);
    }

    #[test]
    fn a_test_arrow_does_not_allow_a_normal_one() {
        let found =
            whats("```arrows\na:\nkernels:\n```\n", &[package("a", &[("kernels", None)]), package("kernels", &[])]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("arrow `a -> kernels`"), "{}", found[0]);
    }

    #[test]
    fn an_unreadable_picture_is_a_violation() {
        assert_eq!(whats("no block", &[]).len(), 1);
        let found = whats("```arrows\nbase\ngraph:\n```\n", &[package("graph", &[])]);
        assert!(found[0].starts_with("a.md:2: cannot read `base`"), "{found:?}");
    }
}
