//! Checkpoints changed on purpose: copies of good ones with tensors, headers, shards or configuration edited, to see that a
//! loader names what is wrong.
//!
//! ```text
//! let mut copy = CheckpointCopy::of("tiny");
//! copy.tensors(|file| file.get("norm.weight").dtype = "F16".to_owned());
//! let error = open(copy.path()).expect_err("bf16 bytes under another type");
//! ```

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::safetensors;
use crate::{oracle_dir, scratch_dir};

/// One tensor to be written. What is not overridden is stated truthfully.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
    /// Offsets that the header claims instead of the true ones.
    pub claimed_offsets: Option<[u64; 2]>,
}

/// A safetensors file to be written, well-formed unless told otherwise.
#[derive(Clone, Debug, Default)]
pub struct TensorFile {
    pub tensors: Vec<Tensor>,
    /// Header bytes instead of the ones made from `tensors`.
    pub raw_header: Option<Vec<u8>>,
    /// Header length that the file claims.
    pub claimed_header_len: Option<u64>,
    /// Cut the file after so many bytes.
    pub truncate_to: Option<usize>,
    /// Bytes after the last tensor.
    pub trailing: Vec<u8>,
}

impl TensorFile {
    /// Reads a well-formed file.
    ///
    /// # Panics
    ///
    /// If it is none.
    pub fn read(path: &Path) -> Self {
        let tensors = safetensors::read(path)
            .into_iter()
            .map(|e| Tensor { name: e.name, dtype: e.dtype, shape: e.shape, bytes: e.bytes, claimed_offsets: None })
            .collect();
        Self { tensors, ..Self::default() }
    }

    /// The tensor `name`, to be changed.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn get(&mut self, name: &str) -> &mut Tensor {
        let index = self.index(name);
        &mut self.tensors[index]
    }

    /// Takes a tensor out, header entry and bytes.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn remove(&mut self, name: &str) -> Tensor {
        let index = self.index(name);
        self.tensors.remove(index)
    }

    /// Appends a tensor.
    pub fn add(&mut self, name: &str, dtype: &str, shape: &[u64], bytes: Vec<u8>) {
        let (name, dtype) = (name.to_owned(), dtype.to_owned());
        self.tensors.push(Tensor { name, dtype, shape: shape.to_vec(), bytes, claimed_offsets: None });
    }

    /// True start and end of every tensor, in order.
    pub fn true_offsets(&self) -> Vec<[u64; 2]> {
        let mut end = 0;
        let span = |tensor: &Tensor| {
            let start = end;
            end += tensor.bytes.len() as u64;
            [start, end]
        };
        self.tensors.iter().map(span).collect()
    }

    /// The file's bytes, with everything that was asked for.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut header = Map::new();
        for (tensor, offsets) in self.tensors.iter().zip(self.true_offsets()) {
            let offsets = tensor.claimed_offsets.unwrap_or(offsets);
            let entry = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets });
            header.insert(tensor.name.clone(), entry);
        }
        let mut text = self.raw_header.clone().unwrap_or_else(|| Value::Object(header).to_string().into_bytes());
        if self.raw_header.is_none() {
            // Writers align the bytes to 8 with spaces.
            text.resize(text.len().next_multiple_of(8), b' ');
        }
        let length = self.claimed_header_len.unwrap_or(text.len() as u64);
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(text);
        for tensor in &self.tensors {
            bytes.extend(&tensor.bytes);
        }
        bytes.extend(&self.trailing);
        bytes.truncate(self.truncate_to.unwrap_or(usize::MAX));
        bytes
    }

    /// Writes the file.
    ///
    /// # Panics
    ///
    /// If the place is not writable.
    pub fn write(&self, path: &Path) {
        write(path, &self.to_bytes());
    }

    fn index(&self, name: &str) -> usize {
        let found = self.tensors.iter().position(|tensor| tensor.name == name);
        found.unwrap_or_else(|| panic!("no tensor `{name}` to change"))
    }
}

/// A copy of a checkpoint in a folder of its own, removed when the value is dropped.
pub struct CheckpointCopy {
    dir: tempfile::TempDir,
}

impl CheckpointCopy {
    /// Copies `oracle/{name}`: `tiny`, `tiny-bf16` or `tiny-mlx`.
    ///
    /// # Panics
    ///
    /// If that cannot be done; so do the others.
    pub fn of(name: &str) -> Self {
        Self::of_path(&oracle_dir().join(name))
    }

    /// Copies the files of any folder; folders inside are left out.
    pub fn of_path(source: &Path) -> Self {
        let dir = scratch_dir();
        let entries =
            std::fs::read_dir(source).unwrap_or_else(|error| panic!("cannot read {}: {error}", source.display()));
        for entry in entries {
            let file = entry.expect("the folder stays readable").path();
            if file.is_file() {
                let to = dir.path().join(file.file_name().expect("a file has a name"));
                std::fs::copy(&file, to).unwrap_or_else(|error| panic!("cannot copy {}: {error}", file.display()));
            }
        }
        Self { dir }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Changes `config.json`.
    pub fn config(&mut self, change: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.file("config.json");
        let text = std::fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        let mut config: Map<String, Value> = serde_json::from_slice(&text).expect("the good config is an object");
        change(&mut config);
        write(&path, Value::Object(config).to_string().as_bytes());
    }

    /// Changes `model.safetensors`.
    pub fn tensors(&mut self, change: impl FnOnce(&mut TensorFile)) {
        let path = self.file("model.safetensors");
        let mut file = TensorFile::read(&path);
        change(&mut file);
        file.write(&path);
    }

    /// Replaces `model.safetensors` by `num_shards` files of about equal numbers of tensors, with or without an index.
    /// Returns their names.
    pub fn shard(&mut self, num_shards: usize, with_index: bool) -> Vec<String> {
        let whole = self.file("model.safetensors");
        let mut tensors = TensorFile::read(&whole).tensors;
        std::fs::remove_file(&whole).expect("the copy is ours");
        let per_shard = tensors.len().div_ceil(num_shards);
        let mut weight_map = Map::new();
        let mut names = Vec::new();
        for shard in 1..=num_shards {
            let name = format!("model-{shard:05}-of-{num_shards:05}.safetensors");
            let rest = tensors.split_off(per_shard.min(tensors.len()));
            let file = TensorFile { tensors: std::mem::replace(&mut tensors, rest), ..TensorFile::default() };
            weight_map.extend(file.tensors.iter().map(|tensor| (tensor.name.clone(), json!(name))));
            file.write(&self.file(&name));
            names.push(name);
        }
        if with_index {
            let index = json!({ "metadata": {}, "weight_map": weight_map });
            write(&self.file("model.safetensors.index.json"), index.to_string().as_bytes());
        }
        names
    }

    /// Where `name` lies in the copy.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_left_alone_reads_the_same() {
        let mut copy = CheckpointCopy::of("tiny");
        copy.tensors(|_| {});
        let (before, after) =
            (TensorFile::read(&oracle_dir().join("tiny/model.safetensors")), copy.file("model.safetensors"));
        let after = TensorFile::read(&after);
        assert_eq!(before.tensors.len(), after.tensors.len());
        for (a, b) in before.tensors.iter().zip(&after.tensors) {
            assert_eq!((&a.name, &a.dtype, &a.shape), (&b.name, &b.dtype, &b.shape));
            assert!(a.bytes == b.bytes, "{}", a.name);
        }
    }

    #[test]
    fn changes_are_written() {
        let mut copy = CheckpointCopy::of("tiny-bf16");
        copy.config(|config| {
            config.remove("compress_ratios");
        });
        copy.tensors(|file| {
            file.remove("head.weight");
            file.get("norm.weight").shape = vec![1, 128];
            file.add("extra", "U8", &[3], vec![1, 2, 3]);
        });
        let text = std::fs::read_to_string(copy.file("config.json")).expect("written");
        assert!(!text.contains("compress_ratios"));
        let mut file = TensorFile::read(&copy.file("model.safetensors"));
        assert_eq!(file.get("norm.weight").shape, [1, 128]);
        assert_eq!(file.get("extra").bytes, [1, 2, 3]);
        assert!(file.tensors.iter().all(|tensor| tensor.name != "head.weight"));
    }

    #[test]
    fn lies_are_told() {
        let mut file = TensorFile::default();
        file.add("a", "U8", &[4], vec![9; 4]);
        file.get("a").claimed_offsets = Some([0, 40]);
        assert!(String::from_utf8_lossy(&file.to_bytes()).contains("[0,40]"));
        file.claimed_header_len = Some(u64::MAX);
        assert_eq!(file.to_bytes()[..8], [0xff; 8]);
        file.truncate_to = Some(11);
        assert_eq!(file.to_bytes().len(), 11);
        file.raw_header = Some(b"{".to_vec());
        assert_eq!(file.to_bytes()[8..], *b"{\x09\x09");
    }

    #[test]
    fn shards_hold_everything_once() {
        let mut copy = CheckpointCopy::of("tiny");
        let all = TensorFile::read(&copy.file("model.safetensors")).tensors.len();
        let names = copy.shard(3, true);
        let counts: Vec<usize> = names.iter().map(|name| TensorFile::read(&copy.file(name)).tensors.len()).collect();
        assert_eq!(counts.iter().sum::<usize>(), all);
        assert!(!copy.file("model.safetensors").exists());
        assert!(copy.file("model.safetensors.index.json").exists());
    }
}
