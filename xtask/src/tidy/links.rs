//! Links in Markdown files lead somewhere: relative ones to a file of the repository, `#` ones to a heading.

use super::Violation;

/// Checks the links of `content`. `headings` gives the anchors of a file by its path in the repository, none if it has no
/// headings, and `None` if there is no such file.
pub(super) fn check(path: &str, content: &str, headings: impl Fn(&str) -> Option<Vec<String>>) -> Vec<Violation> {
    let mut violations = Vec::new();
    let own_anchors = anchors(content);
    for (line, target) in links(content) {
        let (file, anchor) = match target.split_once('#') {
            Some((file, anchor)) => (file, Some(anchor)),
            None => (target.as_str(), None),
        };
        let mut report = |what: String| violations.push(Violation::new(path, line, what, "correct the link"));
        let known = if file.is_empty() {
            own_anchors.clone()
        } else {
            let Some(resolved) = resolve(path, file) else {
                report(format!("link `{target}` leaves the repository"));
                continue;
            };
            match headings(&resolved) {
                Some(anchors) => anchors,
                None => {
                    report(format!("link `{target}` leads nowhere"));
                    continue;
                }
            }
        };
        if let Some(anchor) = anchor.filter(|anchor| !known.iter().any(|known| known == anchor)) {
            report(format!("no heading `#{anchor}` for link `{target}`"));
        }
    }
    violations
}

/// The anchors that GitHub gives the headings of `content`.
pub(super) fn anchors(content: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    for (_, line) in prose(content) {
        let Some(heading) = line.strip_prefix('#').map(|rest| rest.trim_start_matches('#')) else { continue };
        let Some(heading) = heading.strip_prefix(' ') else { continue };
        let slug: String = heading
            .trim()
            .chars()
            .filter(|&c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .flat_map(char::to_lowercase)
            .collect();
        let repeats = anchors.iter().filter(|known| **known == slug).count();
        anchors.push(if repeats == 0 { slug } else { format!("{slug}-{repeats}") });
    }
    anchors
}

/// Lines outside fenced code, numbered from 1.
fn prose(content: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence: Option<&str> = None;
    content.lines().enumerate().filter_map(move |(index, line)| {
        let start = line.trim_start();
        let mark = ["```", "~~~"].into_iter().find(|mark| start.starts_with(mark));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (None, None) => return Some((index + 1, line)),
            _ => {}
        }
        None
    })
}

/// Targets of `[text](target)` and `[name]: target` that lie in the repository, with their lines.
fn links(content: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(content) {
        let line = without_inline_code(line);
        let definition = line.strip_prefix('[').and_then(|rest| rest.split_once("]: ")).map(|(_, target)| target);
        let inline = line.match_indices("](").map(|(at, _)| {
            let rest = &line[at + 2..];
            &rest[..rest.find(')').unwrap_or(rest.len())]
        });
        for target in inline.chain(definition) {
            // A title may follow the target.
            let target = target.split_whitespace().next().unwrap_or("").trim_matches(['<', '>']);
            if !target.contains(':') {
                found.push((number, target.to_owned()));
            }
        }
    }
    found
}

fn without_inline_code(line: &str) -> String {
    let mut parts = line.split('`');
    let mut out = parts.next().unwrap_or("").to_owned();
    for (index, part) in parts.enumerate() {
        if index % 2 == 1 {
            out.push_str(part);
        }
    }
    out
}

/// `target` as seen from the file `from`, relative to the root; `None` if it lies outside.
fn resolve(from: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(content: &str) -> Vec<String> {
        let headings = |path: &str| match path {
            "docs/a.md" => Some(vec!["one-two".to_owned()]),
            "LICENSE" | "docs" => Some(Vec::new()),
            _ => None,
        };
        check("docs/b.md", content, headings).iter().map(Violation::to_string).collect()
    }

    #[test]
    fn good_links_pass() {
        let good = "# My heading\n[a](a.md) [a](./a.md#one-two) [l](../LICENSE \"title\") [d](../docs/)\n\
            [x](https://example.org/x#y) <https://example.org> [h](#my-heading)\n[ref]: a.md\n";
        assert_eq!(found(good), [""; 0]);
    }

    #[test]
    fn broken_links_are_found() {
        assert_eq!(found("\n[a](b2.md)"), ["docs/b.md:2: link `b2.md` leads nowhere; correct the link"]);
        assert_eq!(found("[a](../../x)"), ["docs/b.md:1: link `../../x` leaves the repository; correct the link"]);
        assert_eq!(found("[a](a.md#three)").len(), 1);
        assert_eq!(found("[a](#nowhere)").len(), 1);
        assert_eq!(found("[ref]: gone.md").len(), 1);
        assert_eq!(found("[a](a.md) and [b](gone.md)").len(), 1);
    }

    #[test]
    fn code_is_no_link() {
        assert_eq!(found("`[a](gone.md)` and\n```text\n[b](gone.md)\n```\n"), [""; 0]);
        assert_eq!(found("`x` [b](gone.md) `y`").len(), 1);
    }

    #[test]
    fn anchors_are_those_of_github() {
        let text = "# The step: data & plan\n## `unsafe` code\n## Same\n## Same\n#hashtag\n```sh\n# comment\n```\n";
        assert_eq!(anchors(text), ["the-step-data--plan", "unsafe-code", "same", "same-1"]);
    }
}
