//! Rules for one Rust source file: how it opens, what it must not contain.

use super::Violation;
use super::mask::{code_only, contains_word};

/// Macros that mark unfinished code.
const UNFINISHED: [&str; 2] = ["todo", "unimplemented"];

pub(super) fn check(path: &str, content: &str, may_be_unsafe: bool) -> Vec<Violation> {
    let mut violations = Vec::new();
    if !content.lines().find(|line| !line.trim().is_empty()).is_some_and(|line| line.starts_with("//!")) {
        violations.push(Violation::new(
            path,
            1,
            "the file does not open with `//!`",
            "say what lives here and what it must not know",
        ));
    }
    for (index, line) in code_only(content).lines().enumerate() {
        if !may_be_unsafe && contains_word(line, "unsafe") {
            violations.push(Violation::new(
                path,
                index + 1,
                "`unsafe` outside `kernels` and `device`",
                "move it there behind a safe function",
            ));
        }
        for name in UNFINISHED {
            if contains_word(line, name) && line.contains(&format!("{name}!")) {
                violations.push(Violation::new(path, index + 1, format!("`{name}!`"), "finish it or return an error"));
            }
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(content: &str) -> Vec<usize> {
        check("a.rs", content, false).into_iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn a_file_opens_with_its_purpose() {
        assert_eq!(lines("//! Purpose.\n\nfn f() {}\n"), [0; 0]);
        assert_eq!(lines("\n//! Purpose.\n"), [0; 0]);
        assert_eq!(lines("// Not a purpose.\n"), [1]);
        assert_eq!(lines(""), [1]);
    }

    #[test]
    fn unfinished_and_forbidden_code_is_found() {
        assert_eq!(lines("//! x\nfn f() {\n    todo!()\n}\n"), [3]);
        assert_eq!(lines("//! x\nfn f() { unimplemented!(\"later\") }\n"), [2]);
        assert_eq!(lines("//! x\nfn f() { todo_list() }\n"), [0; 0]);
        assert_eq!(lines("//! x\n// SAFETY\nfn f() { unsafe { g() } }\n"), [3]);
        assert!(check("a.rs", "//! x\nfn f() { unsafe { g() } }\n", true).is_empty());
    }
}
