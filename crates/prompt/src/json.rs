//! JSON the way Python's `json.dumps(value, ensure_ascii=False)` writes it, since prompts were trained on that.

use std::io;

use serde::Serialize;
use serde_json::{Serializer, Value, ser::Formatter};

/// `value` in one line: `", "` and `": "` between, keys in their order, no letter escaped that need not be.
pub(crate) fn to_json(value: &Value) -> String {
    let mut out = Vec::new();
    let written = value.serialize(&mut Serializer::with_formatter(&mut out, Python));
    written.expect("a value can be written to memory");
    String::from_utf8(out).expect("JSON is UTF-8")
}

/// A text as a JSON string, without the quotes around it. The parts of a text give the parts of the whole.
pub(crate) fn escape(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

struct Python;

impl Formatter for Python {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
    }
}

/// Python's `repr` of a finite number: the shortest digits that mean it, with an exponent below 1e-4 and from 1e16 on.
fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("it is a number");
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_python_writes_it() {
        let source = r#"{"b": [1, 2.0, -0.0, 1e16, 1.5e300, 1e-5, 0.0001, 123456789012345.6, true, null], "a": {}, "é": [],
            "t": "\u00e9中😀\"\\/\n\r\t\b\f\u0000\u001f\u007f\u2028"}"#;
        let value: Value = serde_json::from_str(source).expect("JSON");
        let want = "{\"b\": [1, 2.0, -0.0, 1e+16, 1.5e+300, 1e-05, 0.0001, 123456789012345.6, true, null], \"a\": {}, \
                    \"é\": [], \"t\": \"é中😀\\\"\\\\/\\n\\r\\t\\b\\f\\u0000\\u001f\u{7f}\u{2028}\"}";
        assert_eq!(to_json(&value), want);
    }
}
