//! The safetensors container, as far as tests need it: an 8-byte length, a JSON header, the bytes.
//!
//! Deliberately not the reader of `model`, whose mistakes it would otherwise share.

use std::path::Path;

use serde_json::Value;

/// One tensor as the file states it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

/// Reads a well-formed file; tensors in the order of their bytes.
///
/// # Panics
///
/// If the file cannot be read or is malformed.
pub(crate) fn read(path: &Path) -> Vec<Entry> {
    let file = std::fs::read(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    parse(&file).unwrap_or_else(|| panic!("{} is no well-formed safetensors file", path.display()))
}

fn parse(file: &[u8]) -> Option<Vec<Entry>> {
    let (length, rest) = file.split_first_chunk::<8>()?;
    let (header, body) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let header: Value = serde_json::from_slice(header).ok()?;
    let mut entries = Vec::new();
    for (name, entry) in header.as_object()?.iter().filter(|(name, _)| *name != "__metadata__") {
        let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
        let (start, end) = (number(&entry["data_offsets"][0])?, number(&entry["data_offsets"][1])?);
        let tensor = Entry {
            name: name.clone(),
            dtype: entry["dtype"].as_str()?.to_owned(),
            shape: entry["shape"].as_array()?.iter().map(Value::as_u64).collect::<Option<_>>()?,
            bytes: body.get(start..end)?.to_vec(),
        };
        entries.push((start, tensor));
    }
    entries.sort_by_key(|(start, _)| *start);
    Some(entries.into_iter().map(|(_, entry)| entry).collect())
}
