//! Headers of safetensors files: an 8-byte little-endian length, that much JSON, then the data.
//!
//! Strict where a mistake would read wrong bytes: names once each, known dtypes, sizes that equal shape x dtype, ranges
//! inside the file and apart from each other. Must not know what the tensors mean; see [`super::layout`].

use std::fmt;
use std::ops::Range;

use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

/// Longest header accepted, as in the reference implementation. V4-Flash needs about 10 MB in all shards together.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most dimensions of a tensor.
const MAX_DIMS: usize = 8;

macro_rules! dtypes {
    ($($name:ident $text:literal $bits:literal,)*) => {
        /// Element type of a tensor, as headers spell it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[expect(non_camel_case_types, reason = "spelled as in the files")]
        pub enum Dtype { $($name,)* }

        impl Dtype {
            const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its name in a header.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Width of one element.
            pub fn bits(self) -> u64 {
                match self { $(Self::$name => $bits,)* }
            }
        }
    };
}

dtypes! {
    BOOL "BOOL" 8,
    F4 "F4" 4,
    F6_E2M3 "F6_E2M3" 6,
    F6_E3M2 "F6_E3M2" 6,
    U8 "U8" 8,
    I8 "I8" 8,
    F8_E5M2 "F8_E5M2" 8,
    F8_E4M3 "F8_E4M3" 8,
    F8_E8M0 "F8_E8M0" 8,
    F8_E4M3FNUZ "F8_E4M3FNUZ" 8,
    F8_E5M2FNUZ "F8_E5M2FNUZ" 8,
    I16 "I16" 16,
    U16 "U16" 16,
    F16 "F16" 16,
    BF16 "BF16" 16,
    I32 "I32" 32,
    U32 "U32" 32,
    F32 "F32" 32,
    C64 "C64" 64,
    F64 "F64" 64,
    I64 "I64" 64,
    U64 "U64" 64,
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One tensor of a file. Its bytes lie inside the file and there are as many as shape and dtype need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderEntry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Counted from the start of the file.
    pub bytes: Range<usize>,
}

/// Why a file is not a sound safetensors file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    #[error("the file has {bytes} bytes, too few for a safetensors file: it is empty or truncated")]
    TooShort { bytes: usize },
    #[error("this is a Git LFS pointer, not the data: fetch the file with `git lfs pull`")]
    LfsPointer,
    #[error("this is a GGUF file; Troika reads safetensors checkpoints")]
    Gguf,
    #[error(
        "the header is said to have {header_bytes} bytes, but the file has only {file_bytes}: it is truncated, or not \
         a safetensors file"
    )]
    HeaderPastEnd { header_bytes: u64, file_bytes: usize },
    #[error("the header is said to have {header_bytes} bytes, more than the {max} allowed: not a safetensors file")]
    HeaderTooLong { header_bytes: u64, max: u64 },
    #[error("the header is not a JSON object: {reason}")]
    Json { reason: String },
    #[error("the header entry of tensor `{tensor}` is wrong: {reason}")]
    Entry { tensor: String, reason: String },
    #[error("tensor `{tensor}` occurs twice in the header")]
    Duplicate { tensor: String },
    #[error("tensor `{tensor}` has the unknown dtype `{dtype}`")]
    Dtype { tensor: String, dtype: String },
    #[error("tensor `{tensor}` has data_offsets [{begin}, {end}], which run backwards")]
    Reversed { tensor: String, begin: u64, end: u64 },
    #[error(
        "tensor `{tensor}` ends at data byte {end}, but the file has only {data_bytes} bytes of data: it is truncated \
         (download it again)"
    )]
    PastEnd { tensor: String, end: u64, data_bytes: u64 },
    #[error("tensor `{tensor}` is {dtype} {shape:?}, more than any file can hold")]
    Overflow { tensor: String, dtype: Dtype, shape: Vec<u64> },
    #[error("tensor `{tensor}` is {dtype} {shape:?} and needs {want} bytes, but its data_offsets span {got}")]
    Size { tensor: String, dtype: Dtype, shape: Vec<u64>, want: u64, got: u64 },
    #[error("the data of tensors `{first}` and `{second}` overlap")]
    Overlap { first: String, second: String },
}

/// Reads and checks the header of a whole file, given as `file`. Entries come in the order of their data.
///
/// Time and memory are proportional to the header, which is at most 100 MB.
pub fn read_header(file: &[u8]) -> Result<Vec<HeaderEntry>, HeaderError> {
    if file.starts_with(b"version https://git-lfs") {
        return Err(HeaderError::LfsPointer);
    }
    if file.starts_with(b"GGUF") {
        return Err(HeaderError::Gguf);
    }
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(HeaderError::TooShort { bytes: file.len() });
    };
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(if header_bytes > file.len() as u64 {
            HeaderError::HeaderPastEnd { header_bytes, file_bytes: file.len() }
        } else {
            HeaderError::HeaderTooLong { header_bytes, max: MAX_HEADER_BYTES }
        });
    }
    let Some((header, data)) = rest.split_at_checked(header_bytes as usize) else {
        return Err(HeaderError::HeaderPastEnd { header_bytes, file_bytes: file.len() });
    };
    let raw = parse(header)?;
    let data_start = file.len() - data.len();
    let mut entries =
        raw.into_iter().map(|entry| check(entry, data_start, data.len())).collect::<Result<Vec<_>, _>>()?;

    entries.sort_by_key(|entry| (entry.bytes.start, entry.bytes.end));
    for pair in entries.windows(2) {
        let [a, b] = pair else { continue };
        if a.bytes.end > b.bytes.start {
            return Err(HeaderError::Overlap { first: a.name.clone(), second: b.name.clone() });
        }
    }
    let mut names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(HeaderError::Duplicate { tensor: twice[0].to_owned() });
    }
    Ok(entries)
}

fn check(raw: RawEntry, data_start: usize, data_len: usize) -> Result<HeaderEntry, HeaderError> {
    let RawEntry { name: tensor, dtype, shape, offsets: [begin, end] } = raw;
    let Some(&dtype) = Dtype::ALL.iter().find(|known| known.name() == dtype) else {
        return Err(HeaderError::Dtype { tensor, dtype: shorten(&dtype) });
    };
    if begin > end {
        return Err(HeaderError::Reversed { tensor, begin, end });
    }
    let elements = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let Some(bits) = elements.and_then(|elements| elements.checked_mul(dtype.bits())) else {
        return Err(HeaderError::Overflow { tensor, dtype, shape });
    };
    let want = bits.div_ceil(8);
    if end > data_len as u64 {
        return Err(HeaderError::PastEnd { tensor, end, data_bytes: data_len as u64 });
    }
    if want != end - begin {
        return Err(HeaderError::Size { tensor, dtype, shape, want, got: end - begin });
    }
    // A dimension may be absurd where another is 0; then it fits no wanted shape either.
    let dims = shape.iter().map(|&dim| usize::try_from(dim).unwrap_or(usize::MAX)).collect();
    Ok(HeaderEntry { name: tensor, dtype, shape: dims, bytes: data_start + begin as usize..data_start + end as usize })
}

fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}

/// An entry as the header says it, before any check.
struct RawEntry {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    offsets: [u64; 2],
}

fn parse(header: &[u8]) -> Result<Vec<RawEntry>, HeaderError> {
    let mut failed_at = None;
    let mut json = serde_json::Deserializer::from_slice(header);
    let entries = json
        .deserialize_map(EntriesVisitor { failed_at: &mut failed_at })
        // Only white space may follow: some writers pad the header to keep the data aligned.
        .and_then(|entries| json.end().map(|()| entries));
    entries.map_err(|error| match failed_at {
        Some(tensor) => HeaderError::Entry { tensor, reason: error.to_string() },
        None => HeaderError::Json { reason: error.to_string() },
    })
}

/// Reads the object entry by entry, so that a repeated name is seen and an error knows its tensor.
struct EntriesVisitor<'a> {
    failed_at: &'a mut Option<String>,
}

impl<'de> Visitor<'de> for EntriesVisitor<'_> {
    type Value = Vec<RawEntry>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<de::IgnoredAny>()?;
                continue;
            }
            match map.next_value::<RawTensor>() {
                Ok(RawTensor { dtype, shape: Dims(shape), data_offsets }) => {
                    entries.push(RawEntry { name, dtype, shape, offsets: data_offsets.map(|Whole(offset)| offset) });
                }
                Err(error) => {
                    *self.failed_at = Some(shorten(&name));
                    return Err(error);
                }
            }
        }
        Ok(entries)
    }
}

#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Dims,
    data_offsets: [Whole; 2],
}

/// At most [`MAX_DIMS`] dimensions; more would let a small file claim much memory.
struct Dims(Vec<u64>);

impl<'de> de::Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DimsVisitor;
        impl<'de> Visitor<'de> for DimsVisitor {
            type Value = Dims;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_DIMS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut dims = Vec::new();
                while let Some(Whole(dim)) = seq.next_element()? {
                    if dims.len() == MAX_DIMS {
                        return Err(de::Error::invalid_length(MAX_DIMS + 1, &self));
                    }
                    dims.push(dim);
                }
                Ok(Dims(dims))
            }
        }
        deserializer.deserialize_seq(DimsVisitor)
    }
}

/// A `u64` whose error says what is allowed.
struct Whole(u64);

impl<'de> de::Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WholeVisitor;
        impl Visitor<'_> for WholeVisitor {
            type Value = Whole;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number from 0 to 2^64 - 1")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Whole, E> {
                Ok(Whole(value))
            }
        }
        deserializer.deserialize_u64(WholeVisitor)
    }
}
