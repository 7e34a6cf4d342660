//! String constants of a Python file, read as data. Nothing is executed and nothing but constants is understood.
//!
//! A constant is a line `NAME = value` or `NAME: type = value` that begins in the first column. A value is a string, a name
//! of an earlier constant, several of them in a row or joined by `+`, in brackets or not, or a dictionary of such. All else
//! (imports, functions, f-strings, numbers, calls) is skipped. Python's own rules decide what a string is, so text that
//! merely looks like an assignment inside a longer string is no constant.

use std::collections::BTreeMap;

/// Longest file worth reading; published ones have about 30 KiB.
pub(crate) const MAX_FILE_BYTES: u64 = 1 << 20;
/// Most bytes of all values together: names that repeat earlier constants could otherwise double them without end.
const MAX_VALUE_BYTES: usize = 4 << 20;
/// Deepest brackets that are followed.
const MAX_DEPTH: usize = 16;

/// Value of a constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Constant {
    Text(String),
    /// In the order of the file; a key that occurs twice counts once, with its last value.
    Table(Vec<(String, String)>),
}

/// All constants of a file, each with its last value.
pub(crate) fn read_constants(source: &str) -> BTreeMap<String, Constant> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut reader = Reader { tokens: Lexer::new(&source).collect(), at: 0, constants: BTreeMap::new(), bytes: 0 };
    while reader.at < reader.tokens.len() {
        reader.statement();
    }
    reader.constants
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Name(String),
    /// `None`: a string whose value cannot be known without running the file, or that Python would refuse.
    Text(Option<String>),
    /// Any other character.
    Sign(char),
    /// End of a logical line: newlines inside brackets and after backslashes are not.
    End,
    /// White space at the start of a logical line.
    Indent,
}

struct Lexer<'a> {
    rest: &'a str,
    depth: usize,
    is_line_start: bool,
}

impl<'a> Lexer<'a> {
    fn new(source: &'a str) -> Self {
        Self { rest: source.strip_prefix('\u{FEFF}').unwrap_or(source), depth: 0, is_line_start: true }
    }

    /// A string that begins here, after its prefix letters.
    fn string(&mut self, prefix: &str) -> Token {
        let quote = if self.rest.starts_with("\"\"\"") {
            "\"\"\""
        } else if self.rest.starts_with("'''") {
            "'''"
        } else {
            &self.rest[..1]
        };
        let body = &self.rest[quote.len()..];
        let mut letters = body.char_indices();
        let mut end = None;
        while let Some((at, letter)) = letters.next() {
            if letter == '\\' {
                letters.next();
            } else if body[at..].starts_with(quote) {
                end = Some(at);
                break;
            } else if letter == '\n' && quote.len() == 1 {
                // Python refuses this; what follows is read as a new line.
                self.rest = &body[at..];
                return Token::Text(None);
            }
        }
        let Some(end) = end else {
            self.rest = "";
            return Token::Text(None);
        };
        self.rest = &body[end + quote.len()..];
        let is = |letter: char| prefix.chars().any(|p| p.eq_ignore_ascii_case(&letter));
        Token::Text(match () {
            () if is('b') || is('f') || is('t') => None,
            () if is('r') => Some(body[..end].to_owned()),
            () => unescape(&body[..end]),
        })
    }
}

impl Iterator for Lexer<'_> {
    type Item = Token;

    fn next(&mut self) -> Option<Token> {
        loop {
            let letter = self.rest.chars().next()?;
            let was_line_start = std::mem::replace(&mut self.is_line_start, false);
            match letter {
                ' ' | '\t' | '\u{C}' => {
                    self.rest = self.rest.trim_start_matches([' ', '\t', '\u{C}']);
                    if was_line_start {
                        return Some(Token::Indent);
                    }
                }
                '#' => self.rest = &self.rest[self.rest.find('\n').unwrap_or(self.rest.len())..],
                '\n' => {
                    self.rest = &self.rest[1..];
                    if self.depth == 0 {
                        self.is_line_start = true;
                        return Some(Token::End);
                    }
                }
                '\\' if self.rest[1..].starts_with('\n') => self.rest = &self.rest[2..],
                '"' | '\'' => return Some(self.string("")),
                _ if letter == '_' || letter.is_alphabetic() => {
                    let is_inside = |c: char| c == '_' || c.is_alphanumeric();
                    let len = self.rest.find(|c| !is_inside(c)).unwrap_or(self.rest.len());
                    let (name, rest) = self.rest.split_at(len);
                    self.rest = rest;
                    let is_prefix = len <= 2 && name.chars().all(|c| "rRbBuUfFtT".contains(c));
                    if is_prefix && rest.starts_with(['"', '\'']) {
                        return Some(self.string(name));
                    }
                    return Some(Token::Name(name.to_owned()));
                }
                _ => {
                    match letter {
                        '(' | '[' | '{' => self.depth += 1,
                        ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
                        _ => {}
                    }
                    self.rest = &self.rest[letter.len_utf8()..];
                    return Some(Token::Sign(letter));
                }
            }
        }
    }
}

/// Value of a string's inside. `None` if Python would refuse it, or a name of a character (`\N{...}`) is used.
fn unescape(body: &str) -> Option<String> {
    let mut out = String::with_capacity(body.len());
    let mut rest = body;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let letter = rest.chars().next()?;
        rest = &rest[letter.len_utf8()..];
        let plain = match letter {
            '\n' => continue,
            '\\' | '\'' | '"' => letter,
            'a' => '\u{7}',
            'b' => '\u{8}',
            'f' => '\u{C}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\u{B}',
            'N' => return None,
            '0'..='7' => {
                let more = rest.bytes().take(2).take_while(|byte| matches!(byte, b'0'..=b'7')).count();
                let mut code = u32::from(letter) - u32::from('0');
                for digit in rest[..more].bytes() {
                    code = code * 8 + u32::from(digit - b'0');
                }
                rest = &rest[more..];
                char::from_u32(code)?
            }
            'x' | 'u' | 'U' => {
                let len = match letter {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let digits = rest.get(..len).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))?;
                rest = &rest[len..];
                char::from_u32(u32::from_str_radix(digits, 16).ok()?)?
            }
            _ => {
                // Python keeps the backslash of an escape that it does not know.
                out.push('\\');
                letter
            }
        };
        out.push(plain);
    }
    out.push_str(rest);
    Some(out)
}

struct Reader {
    tokens: Vec<Token>,
    at: usize,
    constants: BTreeMap<String, Constant>,
    /// Of all values made so far, kept or not.
    bytes: usize,
}

impl Reader {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at)
    }

    fn take(&mut self, wanted: char) -> bool {
        let is_it = self.peek() == Some(&Token::Sign(wanted));
        self.at += usize::from(is_it);
        is_it
    }

    /// Reads one logical line.
    fn statement(&mut self) {
        if let [Token::Name(name), Token::Sign('+'), Token::Sign('='), ..] = &self.tokens[self.at..] {
            self.constants.remove(name);
        } else if let Some(name) = self.target() {
            let value = self.value();
            match value.filter(|_| matches!(self.peek(), None | Some(Token::End))) {
                Some(value) => self.constants.insert(name, value),
                // It has another value from here on, and not one that we know.
                None => self.constants.remove(&name),
            };
        }
        while let Some(token) = self.peek() {
            let is_end = *token == Token::End;
            self.at += 1;
            if is_end {
                break;
            }
        }
    }

    /// `NAME =` or `NAME: anything =` at the start of a line.
    fn target(&mut self) -> Option<String> {
        let Some(Token::Name(name)) = self.peek() else { return None };
        let name = name.clone();
        self.at += 1;
        if self.take(':') {
            while !matches!(self.peek()?, Token::End | Token::Sign('=')) {
                self.at += 1;
            }
        }
        (self.take('=') && self.peek() != Some(&Token::Sign('='))).then_some(name)
    }

    fn value(&mut self) -> Option<Constant> {
        if self.peek() == Some(&Token::Sign('{')) {
            return self.table().map(Constant::Table);
        }
        if let (Some(Token::Name(name)), Some(Token::End)) = (self.peek(), self.tokens.get(self.at + 1)) {
            let value = self.constants.get(name)?.clone();
            self.at += 1;
            self.count(match &value {
                Constant::Text(text) => text.len(),
                Constant::Table(table) => table.iter().map(|(key, text)| key.len() + text.len()).sum(),
            })?;
            return Some(value);
        }
        self.text(0).map(Constant::Text)
    }

    fn table(&mut self) -> Option<Vec<(String, String)>> {
        let mut table: Vec<(String, String)> = Vec::new();
        self.at += 1;
        while !self.take('}') {
            let key = self.text(1)?;
            if !self.take(':') {
                return None;
            }
            let text = self.text(1)?;
            match table.iter_mut().find(|(other, _)| *other == key) {
                Some((_, old)) => *old = text,
                None => table.push((key, text)),
            }
            if !self.take(',') && self.peek() != Some(&Token::Sign('}')) {
                return None;
            }
        }
        Some(table)
    }

    /// Strings and names, in a row or joined by `+`.
    fn text(&mut self, depth: usize) -> Option<String> {
        let mut out = String::new();
        loop {
            match self.peek()? {
                Token::Text(_) => {
                    while let Some(Token::Text(piece)) = self.tokens.get(self.at) {
                        out.push_str(piece.as_ref()?);
                        self.at += 1;
                    }
                }
                Token::Name(name) => {
                    let Some(Constant::Text(piece)) = self.constants.get(name) else { return None };
                    out.push_str(piece);
                    self.at += 1;
                }
                Token::Sign('(') if depth < MAX_DEPTH => {
                    self.at += 1;
                    out.push_str(&self.text(depth + 1)?);
                    if !self.take(')') {
                        return None;
                    }
                }
                _ => return None,
            }
            if out.len() > MAX_VALUE_BYTES {
                return None;
            }
            if !self.take('+') {
                self.count(out.len())?;
                return Some(out);
            }
        }
    }

    fn count(&mut self, bytes: usize) -> Option<()> {
        self.bytes = self.bytes.saturating_add(bytes);
        (self.bytes <= MAX_VALUE_BYTES).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(source: &str) -> Option<String> {
        match read_constants(source).remove("x") {
            Some(Constant::Text(text)) => Some(text),
            Some(Constant::Table(table)) => Some(format!("{table:?}")),
            None => None,
        }
    }

    #[test]
    fn strings_are_pythons() {
        let cases = [
            (r#"x = "a""#, "a"),
            ("x: str = 'a\"b'", "a\"b"),
            ("x : Optional[Dict[str, str]] = 'a'", "a"),
            ("x = '''a\nb''c'''", "a\nb''c"),
            ("x = \"\"\"a\\\nb\"\"\" # why", "ab"),
            (r#"x = "\n\t\\\"\'\x41\u4e2d\U0001F600\101\0\q""#, "\n\t\\\"'A中😀A\0\\q"),
            (r#"x = r"\n\"" "#, "\\n\\\""),
            (r#"x = u"a" 'b' R'\c'"#, "ab\\c"),
            ("x = (\n  'a'  # one\n\n  'b'\n)", "ab"),
            ("x = 'a' \\\n 'b'", "ab"),
            ("y = 'b'\nx = 'a' + y + (('c'))", "abc"),
            ("y = 'b'\nx = y\n", "b"),
            ("x = {'low': '', \"high\": ('a' 'b'), 'low': 'c',}", "[(\"low\", \"c\"), (\"high\", \"ab\")]"),
            ("x = 'a'\r\ny = 1\r\n", "a"),
            ("x = '''a\r\nb'''", "a\nb"),
            ("\u{FEFF}x = ''", ""),
            ("if True:\n    x = 'b'\nx = 'a'", "a"),
            ("x = 'b'\nx = 'a'", "a"),
            ("f(\nx == 'b')\nx = 'a'", "a"),
            ("'''\nx = 'b'\n'''\nx = 'a'\n\"\"\"\nx = 'c'\n\"\"\"", "a"),
            ("# '''\nx = 'a'", "a"),
            ("y = 'unfinished\nx = 'a'", "a"),
        ];
        for (source, want) in cases {
            assert_eq!(text(source).as_deref(), Some(want), "{source:?}");
        }
    }

    #[test]
    fn what_is_no_constant_is_none() {
        let sources = [
            "",
            "x",
            "x =",
            "x = 1",
            "x = f'{y}'",
            "x = b'a'",
            "x = 'a'.upper()",
            "x = 'a' % y",
            "x = 'a' if y else 'b'",
            "x = 'a',",
            "x = ['a']",
            "x = ('a', 'b')",
            "x = unknown",
            "x = 'a' + unknown",
            "x == 'a'",
            "x += 'a'",
            "x.y = 'a'",
            "x, y = 'a'",
            "  x = 'a'",
            "def f():\n    x = 'a'",
            "x = 'a'\nx = f()",
            "x = 'a'\nx += 'b'",
            "x = '''unfinished",
            "x = 'unfinished",
            "x = ('a'",
            "x = {'a': 1}",
            "x = {'a'}",
            "x = {**y}",
            r"x = '\x4'",
            r"x = '\ud83d'",
            r"x = '\N{BULLET}'",
            "'''\nx = 'a'\n'''",
            "y = '''\nx = 'a'",
        ];
        for source in sources {
            assert_eq!(text(source), None, "{source:?}");
        }
    }

    #[test]
    fn size_and_depth_are_bounded() {
        let doubling: String = (0..64).map(|i| format!("a{} = a{i} + a{i}\n", i + 1)).collect();
        let constants = read_constants(&format!("a0 = 'ab'\n{doubling}"));
        let Some(Constant::Text(last)) = constants.values().max_by_key(|c| format!("{c:?}").len()) else { panic!() };
        assert!(last.len() <= MAX_VALUE_BYTES);
        assert_eq!(text(&format!("x = {}'a'{}", "(".repeat(100_000), ")".repeat(100_000))), None);
        assert_eq!(text(&format!("x = {}'a'{}", "(".repeat(9), ")".repeat(9))), Some("a".into()));
    }

    proptest! {
        /// Any text, and any damage to a sensible one, is read without a panic.
        #[test]
        fn no_source_panics(
            pieces in proptest::collection::vec(0usize..26, 0..60),
            noise in "\\PC{0,8}",
        ) {
            const PIECES: [&str; 25] = [
                "x", " = ", "'", "\"", "'''", "\"\"\"", "\\", "\n", "(", ")", "{", "}", ":", ",", "+", "f", "r", "#",
                "\\x4", "\\u12", "\\N", "é", " ", "\r", "\\777",
            ];
            let source: String = pieces.iter().map(|idx| PIECES.get(*idx).copied().unwrap_or(&noise)).collect();
            read_constants(&source);
        }

        /// What Python's `repr` and friends could write comes back as it was.
        #[test]
        fn written_strings_come_back(value in "\\PC{0,30}|[\\\\'\"\n\t a]{0,20}") {
            let escaped: String = value.chars().map(|c| format!("\\U{:08x}", u32::from(c))).collect();
            prop_assert_eq!(text(&format!("x = '{escaped}'")), Some(value.clone()));
            let quoted = value.replace('\\', "\\\\").replace('"', "\\\"");
            prop_assert_eq!(text(&format!("x = \"\"\"{quoted}\"\"\"")), Some(value));
        }
    }
}
