//! The file format, version 1: a header of 160 bytes, then the payload.

use std::fmt;

use sha2::{Digest, Sha256};
use troika_kvcache::BlockHash;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 160;
/// Version of this format.
pub const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"TroikaKV";
/// The header's checksum covers the bytes before it.
const CHECKED_BYTES: usize = HEADER_BYTES - 32;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Append-only rows of a block.
    Rows,
    /// What a sequence must carry across the end of a block.
    Boundary,
}

impl Kind {
    fn number(self) -> u32 {
        match self {
            Self::Rows => 1,
            Self::Boundary => 2,
        }
    }

    /// Behind the dot of a file's name.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Boundary => "boundary",
        }
    }
}

/// Name of a file: what it holds of which block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    pub kind: Kind,
    pub hash: BlockHash,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.hash, self.kind.extension())
    }
}

impl Name {
    /// The name that a file has, if it is one of ours.
    pub fn parse(text: &str) -> Option<Self> {
        let (hex, extension) = text.split_once('.')?;
        let kind = [Kind::Rows, Kind::Boundary].into_iter().find(|kind| kind.extension() == extension)?;
        if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) {
            return None;
        }
        let mut hash = [0; 32];
        for (index, byte) in hash.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(index * 2..index * 2 + 2)?, 16).ok()?;
        }
        Some(Self { kind, hash: BlockHash(hash) })
    }
}

/// What a file says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub name: Name,
    /// Version of the payload's layout.
    pub layout: u32,
    /// Blocks from the start of the sequence to this one, itself included.
    pub depth: u32,
    /// Name of the block before; that of the empty prefix if there is none.
    pub parent: BlockHash,
    pub payload_bytes: u64,
}

impl Header {
    /// The header's bytes for a payload.
    pub fn encode(&self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.name.kind.number().to_le_bytes());
        bytes[16..20].copy_from_slice(&self.layout.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.depth.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[32..64].copy_from_slice(&self.name.hash.0);
        bytes[64..96].copy_from_slice(&self.parent.0);
        bytes[96..128].copy_from_slice(&Sha256::digest(payload));
        let checksum = Sha256::digest(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&checksum);
        bytes
    }

    /// The header of a file called `name` that is `file_bytes` long.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn decode(name: Name, bytes: &[u8], file_bytes: u64) -> Result<Self, &'static str> {
        let Some(bytes) = bytes.get(..HEADER_BYTES) else { return Err("the header is cut off") };
        if Sha256::digest(&bytes[..CHECKED_BYTES])[..] != bytes[CHECKED_BYTES..] {
            return Err("the header's checksum differs");
        }
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let hash = |at: usize| BlockHash(bytes[at..at + 32].try_into().expect("32 bytes"));
        if bytes[..8] != MAGIC || word(8) != VERSION {
            return Err("another format");
        }
        if word(12) != name.kind.number() || hash(32) != name.hash {
            return Err("the name is another's");
        }
        let payload_bytes = u64::from_le_bytes(bytes[24..32].try_into().expect("eight bytes"));
        if file_bytes.checked_sub(HEADER_BYTES as u64) != Some(payload_bytes) {
            return Err("the length differs");
        }
        Ok(Self { name, layout: word(16), depth: word(20), parent: hash(64), payload_bytes })
    }

    /// Header and payload of a whole file.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn split(name: Name, file: &[u8]) -> Result<(Self, &[u8]), &'static str> {
        let header = Self::decode(name, file, file.len() as u64)?;
        let payload = &file[HEADER_BYTES..];
        if Sha256::digest(payload)[..] != file[96..128] {
            return Err("the payload's checksum differs");
        }
        Ok((header, payload))
    }
}
