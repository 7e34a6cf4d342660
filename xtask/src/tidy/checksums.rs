//! `SHA256SUMS` files: sidecars of data that programs wrote, in the form of `sha256sum`, with comment lines that name the
//! command and the seed.

use std::fmt::Write;

use anyhow::Context;
use sha2::{Digest, Sha256};

use super::Violation;
use crate::repo::Repo;

const FILE: &str = "SHA256SUMS";

/// Compares every sidecar among `files` with the files it names.
pub(super) fn check(repo: &Repo, files: &[String]) -> anyhow::Result<Vec<Violation>> {
    let mut violations = Vec::new();
    for sidecar in files.iter().filter(|path| path.rsplit('/').next() == Some(FILE)) {
        let folder = sidecar.strip_suffix(FILE).unwrap_or_default();
        let digest_of =
            |name: &str| std::fs::read(repo.root().join(folder).join(name)).ok().map(|bytes| digest(&bytes));
        violations.extend(compare(sidecar, &repo.read(sidecar)?, &covered(folder, files), digest_of));
    }
    Ok(violations)
}

/// Writes the sidecar of `folder` for the files it must cover, keeping its comment lines.
pub(crate) fn write(repo: &Repo, folder: &str) -> anyhow::Result<()> {
    let folder = format!("{}/", folder.trim_end_matches('/'));
    let path = repo.root().join(&folder).join(FILE);
    let old = std::fs::read_to_string(&path).unwrap_or_default();
    let mut text: String =
        old.lines().filter(|line| line.starts_with('#')).fold(String::new(), |text, line| text + line + "\n");
    for name in covered(&folder, &repo.files()?) {
        let bytes = std::fs::read(repo.root().join(&folder).join(name))
            .with_context(|| format!("cannot read {folder}{name}"))?;
        writeln!(text, "{}  {name}", digest(&bytes))?;
    }
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Data below `folder` that its sidecar must cover. Scripts and documents beside it change by hand and are left out.
fn covered<'a>(folder: &str, files: &'a [String]) -> Vec<&'a str> {
    let is_data = |name: &&str| name.ends_with(".safetensors") || name.rsplit('/').next() == Some("config.json");
    files.iter().filter_map(|path| path.strip_prefix(folder)).filter(is_data).collect()
}

/// `digest_of` is `None` for a file that cannot be read.
fn compare(path: &str, text: &str, covered: &[&str], digest_of: impl Fn(&str) -> Option<String>) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut named = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
        let mut report = |what: String, remedy: &str| violations.push(Violation::new(path, index + 1, what, remedy));
        let Some((want, name)) = line.split_once("  ") else {
            report(format!("cannot read `{line}`"), "write a digest, two spaces and a name");
            continue;
        };
        named.push(name);
        match digest_of(name) {
            None => report(format!("`{name}` is missing"), "restore it, or make it again"),
            Some(got) if got != want => report(
                format!("`{name}` has changed"),
                "restore it; if the change is meant, make the data again with its own command and write the sums",
            ),
            Some(_) => {}
        }
    }
    for name in covered.iter().filter(|name| !named.contains(name)) {
        let what = format!("`{name}` has no checksum");
        violations.push(Violation::new(path, 1, what, "cargo xtask checksums writes them"));
    }
    violations
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_sha256sum() {
        assert_eq!(digest(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn every_difference_is_named() {
        let sums = "# made by hand\naa  same.safetensors\nbb  changed.safetensors\ncc  gone.safetensors\nnonsense\n";
        let digest_of = |name: &str| match name {
            "same.safetensors" => Some("aa".to_owned()),
            "changed.safetensors" => Some("00".to_owned()),
            _ => None,
        };
        let covered = ["same.safetensors", "changed.safetensors", "new/config.json"];
        let found: Vec<String> = compare("SUMS", sums, &covered, digest_of).iter().map(Violation::to_string).collect();
        assert_eq!(found.len(), 4, "{found:#?}");
        assert!(found[0].starts_with("SUMS:3: `changed.safetensors` has changed"), "{}", found[0]);
        assert!(found[1].starts_with("SUMS:4: `gone.safetensors` is missing"), "{}", found[1]);
        assert!(found[2].starts_with("SUMS:5: cannot read `nonsense`"), "{}", found[2]);
        assert!(found[3].starts_with("SUMS:1: `new/config.json` has no checksum"), "{}", found[3]);
    }
}
