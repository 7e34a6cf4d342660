//! Every crate takes the workspace's lints, which forbid `unsafe`; the crates that need it state their own.

use anyhow::Context;
use toml::Table;

use super::{Violation, line_of};

/// The workspace's lints forbid `unsafe`.
pub(super) fn check_workspace(manifest: &str) -> anyhow::Result<Vec<Violation>> {
    let table: Table = manifest.parse().context("cannot read Cargo.toml")?;
    let level = get(&table, &["workspace", "lints", "rust", "unsafe_code"]).and_then(toml::Value::as_str);
    if level == Some("forbid") {
        return Ok(Vec::new());
    }
    let line = line_of(manifest, "[workspace.lints");
    let what = "the workspace's lints do not forbid `unsafe_code`";
    Ok(vec![Violation::new("Cargo.toml", line, what, "write `unsafe_code = \"forbid\"` under [workspace.lints.rust]")])
}

/// `path` is the manifest of one of our crates.
pub(super) fn check_crate(path: &str, manifest: &str, may_be_unsafe: bool) -> anyhow::Result<Vec<Violation>> {
    let table: Table = manifest.parse().with_context(|| format!("cannot read {path}"))?;
    let inherits = get(&table, &["lints", "workspace"]).and_then(toml::Value::as_bool) == Some(true);
    let line = line_of(manifest, "[lints");
    if inherits {
        return Ok(Vec::new());
    }
    if !may_be_unsafe {
        let what = "the crate does not take the workspace's lints";
        return Ok(vec![Violation::new(path, line, what, "write `[lints]` and `workspace = true`")]);
    }
    // Cargo cannot inherit lints and change one, so these crates repeat the list. One entry must not get lost.
    if get(&table, &["lints", "clippy", "undocumented_unsafe_blocks"]).is_some() {
        return Ok(Vec::new());
    }
    let what = "the crate may use `unsafe` but does not turn on `undocumented_unsafe_blocks`";
    Ok(vec![Violation::new(path, line, what, "add it under [lints.clippy], so that every block says why it is sound")])
}

fn get<'a>(table: &'a Table, keys: &[&str]) -> Option<&'a toml::Value> {
    let (first, rest) = keys.split_first()?;
    let value = table.get(*first)?;
    if rest.is_empty() { Some(value) } else { get(value.as_table()?, rest) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_forbids_unsafe() {
        let good = "[workspace.lints.rust]\nunsafe_code = \"forbid\"\n";
        assert!(check_workspace(good).expect("readable").is_empty());
        assert_eq!(check_workspace("\n[workspace.lints.rust]\nunsafe_code = \"warn\"\n").expect("readable")[0].line, 2);
        assert_eq!(check_workspace("").expect("readable").len(), 1);
    }

    #[test]
    fn crates_take_the_lints() {
        let inherits = "[package]\nname = \"a\"\n[lints]\nworkspace = true\n";
        let own = "[lints.clippy]
undocumented_unsafe_blocks = \"warn\"
";
        let check =
            |text: &str, may_be_unsafe| check_crate("a/Cargo.toml", text, may_be_unsafe).expect("readable").len();
        assert_eq!(check(inherits, false), 0);
        assert_eq!(check(inherits, true), 0);
        assert_eq!(check(own, false), 1);
        assert_eq!(check(own, true), 0);
        assert_eq!(check("[lints]\nworkspace = false\n", true), 1);
    }
}
