//! Writing protocol buffers, as much of it as ONNX graphs need. Nothing is read here.

/// A message under construction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Message(Vec<u8>);

/// A number of variable length.
const VARINT: u64 = 0;
/// Bytes behind their length.
const BYTES: u64 = 2;

impl Message {
    /// Sets or appends a whole number; negative ones are not needed.
    pub(super) fn int(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3 | VARINT);
        self.varint(value);
        self
    }

    /// Sets or appends bytes.
    pub(super) fn bytes(mut self, field: u64, bytes: &[u8]) -> Self {
        self.varint(field << 3 | BYTES);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    /// Sets or appends text.
    pub(super) fn text(self, field: u64, text: &str) -> Self {
        self.bytes(field, text.as_bytes())
    }

    /// Sets or appends a message.
    pub(super) fn message(self, field: u64, message: &Self) -> Self {
        self.bytes(field, &message.0)
    }

    /// Appends several messages.
    pub(super) fn messages(self, field: u64, messages: impl IntoIterator<Item = Self>) -> Self {
        messages.into_iter().fold(self, |all, message| all.message(field, &message))
    }

    /// The bytes of the message.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of the format's own description.
    #[test]
    fn messages_have_the_bytes_of_the_format() {
        assert_eq!(Message::default().int(1, 150).into_bytes(), [0x08, 0x96, 0x01]);
        let testing = Message::default().text(2, "testing").into_bytes();
        assert_eq!(testing, [0x12, 0x07, 0x74, 0x65, 0x73, 0x74, 0x69, 0x6e, 0x67]);
        let inner = Message::default().int(1, 150);
        assert_eq!(Message::default().message(3, &inner).into_bytes(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        assert_eq!(Message::default().int(16, 0).into_bytes(), [0x80, 0x01, 0x00], "a field of two bytes");
        let long = Message::default().bytes(1, &[7; 300]).into_bytes();
        assert_eq!((&long[..3], long.len()), (&[0x0a, 0xac, 0x02][..], 303));
        let several = Message::default().messages(1, [Message::default().int(1, 1), Message::default()]).into_bytes();
        assert_eq!(several, [0x0a, 0x02, 0x08, 0x01, 0x0a, 0x00]);
    }
}
