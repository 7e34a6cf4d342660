//! Rust source without its comments and literals, so that a word can be searched in code alone.

/// `source` with every character of comments, strings and character literals replaced by a space. Lines stay lines.
///
/// Knows nested block comments, raw strings, byte and C strings, and tells lifetimes from character literals.
pub(super) fn code_only(source: &str) -> String {
    let chars: Vec<char> = source.chars().collect();
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    while at < chars.len() {
        let end = token_end(&chars, at);
        if end > at {
            out.extend(chars[at..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
            at = end;
        } else if is_word(chars[at]) {
            // A whole word at once, so that the `r` of `for"` is not taken for a raw string's.
            let word = chars[at..].iter().take_while(|&&c| is_word(c)).count();
            out.extend(&chars[at..at + word]);
            at += word;
        } else {
            out.push(chars[at]);
            at += 1;
        }
    }
    out
}

/// True if `code` contains `word` with no word character beside it.
pub(super) fn contains_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

/// Where the comment or literal that starts at `at` ends; `at` if none starts there.
fn token_end(chars: &[char], at: usize) -> usize {
    let next = |offset: usize| chars.get(at + offset).copied();
    match chars[at] {
        '/' if next(1) == Some('/') => {
            chars[at..].iter().position(|&c| c == '\n').map_or(chars.len(), |length| at + length)
        }
        '/' if next(1) == Some('*') => block_comment_end(chars, at),
        '"' => string_end(chars, at + 1),
        '\'' => char_end(chars, at),
        'b' if next(1) == Some('\'') => char_end(chars, at + 1),
        'b' | 'c' if next(1) == Some('"') => string_end(chars, at + 2),
        'b' | 'c' if next(1) == Some('r') => raw_string_end(chars, at + 2).unwrap_or(at),
        'r' => raw_string_end(chars, at + 1).unwrap_or(at),
        _ => at,
    }
}

fn block_comment_end(chars: &[char], at: usize) -> usize {
    let (mut depth, mut index) = (0usize, at);
    while index + 1 < chars.len() {
        match (chars[index], chars[index + 1]) {
            ('/', '*') => {
                depth += 1;
                index += 2;
            }
            ('*', '/') => {
                depth -= 1;
                index += 2;
                if depth == 0 {
                    return index;
                }
            }
            _ => index += 1,
        }
    }
    chars.len()
}

/// `at` is the first character after the opening quote.
fn string_end(chars: &[char], at: usize) -> usize {
    let mut index = at;
    while index < chars.len() {
        match chars[index] {
            '\\' => index += 2,
            '"' => return index + 1,
            _ => index += 1,
        }
    }
    chars.len()
}

/// `at` is the first character after `r`. `None` if this is a raw identifier or no string at all.
fn raw_string_end(chars: &[char], at: usize) -> Option<usize> {
    let hashes = chars[at.min(chars.len())..].iter().take_while(|&&c| c == '#').count();
    if chars.get(at + hashes) != Some(&'"') {
        return None;
    }
    let mut index = at + hashes + 1;
    while index < chars.len() {
        let closes =
            chars[index] == '"' && chars[index + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes;
        if closes {
            return Some(index + 1 + hashes);
        }
        index += 1;
    }
    Some(chars.len())
}

/// `at` is the quote. A lifetime is no literal, so it ends where it starts.
fn char_end(chars: &[char], at: usize) -> usize {
    match (chars.get(at + 1), chars.get(at + 2)) {
        (Some('\\'), _) => {
            // The character after the backslash may itself be a quote.
            let rest = chars.get(at + 3..).unwrap_or_default();
            rest.iter().position(|&c| c == '\'').map_or(chars.len(), |length| at + 3 + length + 1)
        }
        (Some(_), Some('\'')) => at + 3,
        _ => at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(source: &str) -> bool {
        contains_word(&code_only(source), "unsafe")
    }

    #[test]
    fn words_in_code_are_seen() {
        assert!(has("unsafe { f() }"));
        assert!(has("fn f<'a>(x: &'a u8) { unsafe { g(x) } }"), "a lifetime opens no literal");
        assert!(has("let c = '\"'; unsafe {} let d = '\"';"));
        assert!(has("let c = '\\''; unsafe {}"));
        assert!(has("let c = b'\\\\'; unsafe {}"));
        assert!(has("/* a /* nested */ comment */ unsafe fn f() {}"));
        assert!(has("let s = r#\"a \" b\"#; unsafe {}"));
        assert!(has("let s = \"a \\\" b\"; unsafe {}"));
        assert!(has("let r#type = 1; unsafe {}"), "a raw identifier opens no string");
    }

    #[test]
    fn words_in_comments_and_literals_are_not() {
        assert!(!has("// unsafe\nfn f() {}"));
        assert!(!has("/* unsafe */ fn f() {}"));
        assert!(!has("let s = \"unsafe\";"));
        assert!(!has("let s = \"say \\\"unsafe\\\"\";"));
        assert!(!has("let s = r##\"x \"# unsafe\"##;"));
        assert!(!has("let s = br\"unsafe\"; let t = c\"unsafe\";"));
        assert!(!has("#![forbid(unsafe_code)]"), "part of a longer word");
        assert!(!has("for\"unsafe\""));
    }

    #[test]
    fn lines_keep_their_numbers() {
        let source = "a /* x\ny */ b\n\"s\nt\" c\n";
        assert_eq!(code_only(source).lines().count(), source.lines().count());
        assert!(code_only(source).lines().nth(3).is_some_and(|line| line.contains('c')));
    }

    #[test]
    fn unfinished_input_ends() {
        for source in ["\"abc", "r#\"abc", "/* abc", "'\\", "'", "b'", "r", "br#", "\"\\"] {
            assert_eq!(code_only(source).chars().count(), source.chars().count(), "{source:?}");
        }
    }
}
