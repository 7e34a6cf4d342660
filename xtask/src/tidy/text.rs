//! Rules for any text we write: length, reminders and merges left behind, paths of one machine.

use super::{Violation, line_of};

/// Longest source file. Longer ones hide two subjects.
const MAX_LINES: usize = 900;
/// Starts of paths that exist on one machine only, spelt so that this file does not contain them.
const MACHINE_PATHS: [&str; 6] = [
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("/tm", "p/"),
    concat!("C:", "\\"),
];
const REMINDERS: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
/// How git begins and ends what it could not merge.
const UNMERGED: [&str; 2] = ["<<<<<<< ", ">>>>>>> "];

/// True for files whose text we answer for.
pub(super) fn is_ours(path: &str) -> bool {
    let extension = path.rsplit_once('.').map_or("", |(_, extension)| extension);
    matches!(extension, "rs" | "md" | "toml" | "py" | "sh" | "js" | "yml" | "c") || path == ".ci/run"
}

pub(super) fn check(path: &str, content: &str) -> Vec<Violation> {
    let mut violations = Vec::new();
    let num_lines = content.lines().count();
    if !path.ends_with(".md") && num_lines > MAX_LINES {
        let what = format!("{num_lines} lines, at most {MAX_LINES} are allowed");
        violations.push(Violation::new(path, MAX_LINES + 1, what, "give each subject its own file"));
    }
    for (index, line) in content.lines().enumerate() {
        for start in MACHINE_PATHS {
            if has_path(line, start) {
                let what = format!("a path of one machine (`{start}`)");
                violations.push(Violation::new(
                    path,
                    index + 1,
                    what,
                    "take it from an argument or the temporary folder",
                ));
            }
        }
        if UNMERGED.iter().any(|marker| line.starts_with(marker)) {
            violations.push(Violation::new(path, index + 1, "a merge left behind", "keep the one or the other"));
        }
        for reminder in REMINDERS {
            if super::mask::contains_word(line, reminder) {
                let what = format!("`{reminder}` left behind");
                violations.push(Violation::new(path, index + 1, what, "do it, or say what is absent and why"));
            }
        }
    }
    violations
}

/// True if a path starting with `start` begins in `line`, as opposed to `start` inside a longer path or address.
fn has_path(line: &str, start: &str) -> bool {
    line.match_indices(start).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "./_-}~$*".contains(c))
    })
}

/// `.ci/run` must end with the command that the README gives for the tests.
pub(super) fn check_test_command(readme: &str, ci_run: &str) -> Vec<Violation> {
    let last = ci_run.lines().map(str::trim).rfind(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or("");
    let command = last.strip_prefix("exec ").unwrap_or(last);
    if !command.is_empty() && readme.contains(command) {
        return Vec::new();
    }
    let what = format!("the last command `{command}` is not in README.md");
    vec![Violation::new(".ci/run", line_of(ci_run, last), what, "run what the README tells people to run")]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(content: &str) -> Vec<usize> {
        check("a.rs", content).into_iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn long_sources_are_found_and_long_documents_are_not() {
        let long = "x\n".repeat(MAX_LINES + 1);
        assert_eq!(lines(&long), [MAX_LINES + 1]);
        assert_eq!(lines(&"x\n".repeat(MAX_LINES)), [0; 0]);
        assert!(check("a.md", &long).is_empty());
    }

    #[test]
    fn machine_paths_are_found() {
        let [home, _, _, _, temporary, drive] = MACHINE_PATHS;
        assert_eq!(lines(&format!("open(\"{home}me/x\")")), [1]);
        assert_eq!(lines(&format!("{drive}models")), [1]);
        assert_eq!(lines(&format!("ok\nlet dir = \"{temporary}x\";")), [2]);
        assert_eq!(lines(&format!("https://example.org{home}page")), [0; 0], "part of an address");
        assert_eq!(lines(&format!("$ROOT{temporary}x target{temporary}x")), [0; 0], "below another folder");
    }

    #[test]
    fn reminders_are_found() {
        assert_eq!(lines(&format!("// {}: later", REMINDERS[0])), [1]);
        assert_eq!(lines("TODOS.len()"), [0; 0]);
    }

    #[test]
    fn merges_are_found() {
        assert_eq!(lines("a\n<<<<<<< HEAD\nb\n=======\nc\n>>>>>>> other\n"), [2, 6]);
        assert_eq!(lines("1 <<<<<<< 2"), [0; 0]);
    }

    #[test]
    fn ci_runs_what_the_readme_says() {
        let readme = "To test:\n\n    cargo xtask ci\n";
        assert!(check_test_command(readme, "#!/bin/bash\nset -e\nexec cargo xtask ci\n").is_empty());
        let wrong = check_test_command(readme, "#!/bin/bash\ncargo test\n");
        assert_eq!(wrong.len(), 1);
        assert_eq!(wrong[0].line, 2);
        assert_eq!(check_test_command(readme, "").len(), 1);
    }
}
