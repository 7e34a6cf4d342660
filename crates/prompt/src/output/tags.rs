//! Recognising the tags of tool calls at the start of a text that may go on.

/// Markers inside held text: bytes that UTF-8 never has.
pub(super) const END_THINK_BYTE: u8 = 0xFD;
pub(super) const THINK_BYTE: u8 = 0xFE;
pub(super) const DSML_BYTE: u8 = 0xFF;

/// Longest name of a tool or parameter. Longer ones are text, so that what is held stays small.
const MAX_NAME_BYTES: usize = 512;
/// Longest white space between tags.
const MAX_SPACE_BYTES: usize = 128;

/// Why a text does not start with a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Miss {
    /// It starts with something else, whatever follows.
    No,
    /// It may be the beginning of one.
    Partial,
}

/// What begins outside of a call, with the length of the text that it takes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opening<'a> {
    Call { name: &'a str },
    EndBlock,
}

/// A tag inside a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tag<'a> {
    /// `is_string` is what the tag says; without a word of it, the value decides.
    Parameter {
        key: &'a str,
        is_string: bool,
    },
    EndParameter,
    Call {
        name: &'a str,
    },
    EndCall,
    EndBlock,
}

/// A block with its first call, and up to two newlines before.
pub(super) fn opening(text: &[u8]) -> Result<(Opening<'_>, usize), Miss> {
    let mut cursor = Cursor { text, at: 0 };
    for _ in 0..2 {
        if text.get(cursor.at) == Some(&b'\n') {
            cursor.at += 1;
        }
    }
    cursor.block()
}

/// The same, but the blank line must be there: while the model thinks about calls, it should not make them.
pub(super) fn opening_in_reasoning(text: &[u8]) -> Result<(Opening<'_>, usize), Miss> {
    let mut cursor = Cursor { text, at: 0 };
    cursor.literal(b"\n\n")?;
    cursor.block()
}

/// After a call there may be white space, the end of the block, another call or another block.
pub(super) fn opening_after_call(text: &[u8]) -> Result<(Opening<'_>, usize), Miss> {
    let mut cursor = Cursor { text, at: 0 };
    cursor.space()?;
    let start = cursor.at;
    let miss = match cursor.block() {
        Err(miss) => miss,
        found => return found,
    };
    cursor.at = start;
    match cursor.any_tag() {
        Ok(Tag::Call { name }) => Ok((Opening::Call { name }, cursor.at)),
        Ok(Tag::EndBlock | Tag::EndCall) => Ok((Opening::EndBlock, cursor.at)),
        Ok(_) | Err(Miss::No) => Err(miss),
        Err(Miss::Partial) => Err(Miss::Partial),
    }
}

/// Any tag inside a call.
pub(super) fn tag(text: &[u8]) -> Result<(Tag<'_>, usize), Miss> {
    let mut cursor = Cursor { text, at: 0 };
    let tag = cursor.any_tag()?;
    Ok((tag, cursor.at))
}

/// True for white space, and for a closing tag that has come as far as its marker: no text ends like that.
pub(super) fn is_closing_remnant(text: &[u8]) -> bool {
    let rest = text.trim_ascii_start();
    rest.is_empty() || rest.starts_with(&[b'<', b'/', DSML_BYTE])
}

struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn literal(&mut self, wanted: &[u8]) -> Result<(), Miss> {
        let rest = &self.text[self.at..];
        if rest.starts_with(wanted) {
            self.at += wanted.len();
            Ok(())
        } else if wanted.starts_with(rest) {
            Err(Miss::Partial)
        } else {
            Err(Miss::No)
        }
    }

    fn space(&mut self) -> Result<(), Miss> {
        let rest = &self.text[self.at..];
        let len = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        self.at += len;
        match len {
            _ if len > MAX_SPACE_BYTES => Err(Miss::No),
            _ if len == rest.len() => Err(Miss::Partial),
            _ => Ok(()),
        }
    }

    fn block(&mut self) -> Result<(Opening<'a>, usize), Miss> {
        self.literal(&[b'<', DSML_BYTE])?;
        self.literal(b"tool_calls>")?;
        self.space()?;
        self.literal(&[b'<', DSML_BYTE])?;
        self.literal(b"invoke")?;
        let name = self.call_name()?;
        Ok((Opening::Call { name }, self.at))
    }

    fn any_tag(&mut self) -> Result<Tag<'a>, Miss> {
        self.literal(b"<")?;
        let start = self.at;
        let mut miss = Miss::No;
        for (name, closing) in
            [(&b"parameter>"[..], Tag::EndParameter), (b"invoke>", Tag::EndCall), (b"tool_calls>", Tag::EndBlock)]
        {
            self.at = start;
            match self.literal(&[b'/', DSML_BYTE]).and_then(|()| self.literal(name)) {
                Ok(()) => return Ok(closing),
                Err(Miss::Partial) => miss = Miss::Partial,
                Err(Miss::No) => {}
            }
        }
        self.at = start;
        let marked = self.literal(&[DSML_BYTE]);
        let start = self.at;
        let call = marked.and_then(|()| self.literal(b"invoke")).and_then(|()| self.call_name());
        match call {
            Ok(name) => return Ok(Tag::Call { name }),
            Err(Miss::Partial) => miss = Miss::Partial,
            Err(Miss::No) => {}
        }
        self.at = start;
        match marked.and_then(|()| self.literal(b"parameter")).and_then(|()| self.parameter()) {
            Err(Miss::No) => Err(miss),
            found => found,
        }
    }

    /// ` name="NAME">`
    fn call_name(&mut self) -> Result<&'a str, Miss> {
        self.space()?;
        self.literal(b"name=\"")?;
        let name = self.quoted()?;
        if name.is_empty() { Err(Miss::No) } else { Ok(name) }
    }

    /// ` name="KEY" string="true|false">`, or the same without `string`.
    fn parameter(&mut self) -> Result<Tag<'a>, Miss> {
        self.space()?;
        self.literal(b"name=\"")?;
        let before = self.quoted()?;
        let flagged = |flag: &str| before.strip_suffix(flag).and_then(|before| before.strip_suffix("\" string=\""));
        Ok(match (flagged("true"), flagged("false")) {
            (Some(key), _) => Tag::Parameter { key, is_string: true },
            (_, Some(key)) => Tag::Parameter { key, is_string: false },
            _ => Tag::Parameter { key: before, is_string: false },
        })
    }

    /// Text before the first `">`.
    fn quoted(&mut self) -> Result<&'a str, Miss> {
        let rest = &self.text[self.at..];
        let window = &rest[..rest.len().min(MAX_NAME_BYTES)];
        for (at, byte) in window.iter().enumerate() {
            match byte {
                b'>' => {
                    if let Some(name) = window[..at].strip_suffix(b"\"") {
                        self.at += at + 1;
                        return std::str::from_utf8(name).map_err(|_| Miss::No);
                    }
                }
                END_THINK_BYTE.. => return Err(Miss::No),
                _ => {}
            }
        }
        Err(if window.len() < MAX_NAME_BYTES { Miss::Partial } else { Miss::No })
    }
}
