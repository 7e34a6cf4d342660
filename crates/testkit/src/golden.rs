//! Golden files: tensors that another implementation computed. What each holds is in `oracle/README.md`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::oracle_dir;
use crate::safetensors::{self, Entry};

/// A dense array, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    pub shape: Vec<usize>,
    pub data: Vec<T>,
}

impl<T> Array<T> {
    /// Length of one entry of the leading dimension.
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Entry `index` of the leading dimension.
    ///
    /// # Panics
    ///
    /// If there is no such entry.
    pub fn row(&self, index: usize) -> &[T] {
        assert!(index < self.shape.first().copied().unwrap_or(0), "row {index} of shape {:?}", self.shape);
        let len = self.row_len();
        &self.data[index * len..(index + 1) * len]
    }
}

/// One file of tensors, read whole.
pub struct Golden {
    path: PathBuf,
    tensors: BTreeMap<String, Entry>,
}

impl Golden {
    /// `oracle/{name}.safetensors`, for example `golden_logits`.
    ///
    /// # Panics
    ///
    /// If the file is missing or malformed.
    pub fn open(name: &str) -> Self {
        Self::open_path(&oracle_dir().join(format!("{name}.safetensors")))
    }

    /// Any file in the same form, for example one that `troika logits` wrote.
    ///
    /// # Panics
    ///
    /// If the file is missing or malformed.
    pub fn open_path(path: &Path) -> Self {
        let tensors = safetensors::read(path).into_iter().map(|entry| (entry.name.clone(), entry)).collect();
        Self { path: path.to_owned(), tensors }
    }

    /// Every tensor's name, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// True if there is a tensor `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Tensor `name`, stored as `F32`.
    ///
    /// # Panics
    ///
    /// If it is missing or stored as another type; so do the others.
    pub fn f32(&self, name: &str) -> Array<f32> {
        self.numbers(name, "F32", f32::from_le_bytes)
    }

    /// Tensor `name`, stored as `F64`.
    pub fn f64(&self, name: &str) -> Array<f64> {
        self.numbers(name, "F64", f64::from_le_bytes)
    }

    /// Tensor `name`, stored as `I64`.
    pub fn i64(&self, name: &str) -> Array<i64> {
        self.numbers(name, "I64", i64::from_le_bytes)
    }

    /// Token ids, stored as `I64`.
    pub fn tokens(&self, name: &str) -> Vec<u32> {
        let token = |&id: &i64| u32::try_from(id).unwrap_or_else(|_| panic!("{}: {id} is no token", self.place(name)));
        self.i64(name).data.iter().map(token).collect()
    }

    fn numbers<T, const N: usize>(&self, name: &str, dtype: &str, read: fn([u8; N]) -> T) -> Array<T> {
        let entry = self.tensors.get(name).unwrap_or_else(|| {
            let prefix = name.split('.').next().unwrap_or(name);
            let near: Vec<&str> = self.names().filter(|known| known.starts_with(prefix)).take(8).collect();
            panic!("{} does not exist; similar: {near:?}", self.place(name))
        });
        assert_eq!(entry.dtype, dtype, "{} is stored as {}, not {dtype}", self.place(name), entry.dtype);
        let (words, rest) = entry.bytes.as_chunks::<N>();
        let shape: Vec<usize> = entry.shape.iter().map(|&size| usize::try_from(size).expect("fits memory")).collect();
        let whole = rest.is_empty() && words.len() == shape.iter().product::<usize>();
        assert!(whole, "{} has {} bytes for shape {shape:?}", self.place(name), entry.bytes.len());
        Array { shape, data: words.iter().map(|&word| read(word)).collect() }
    }

    fn place(&self, name: &str) -> String {
        format!("tensor `{name}` of {}", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_files_are_read() {
        let golden = Golden::open("golden_logits");
        let tokens = golden.tokens("n5.tokens");
        let logits = golden.f32("n5.logits");
        assert_eq!(tokens.len(), 5);
        assert_eq!(logits.shape, [5, 384]);
        assert_eq!(logits.row(4).len(), 384);
        // The file's own argmax ties ids, logits and layout together.
        let argmax = golden.i64("n5.argmax");
        for (row, &want) in argmax.data.iter().enumerate() {
            assert_eq!(crate::compare::argmax(logits.row(row)) as i64, want, "row {row}");
        }
    }

    #[test]
    fn doubles_are_read() {
        let golden = Golden::open("golden_units");
        let frequencies = golden.f64("rope.inv_freq_plain");
        assert_eq!(frequencies.shape, [32]);
        assert_eq!(frequencies.data[0], 1.0);
    }

    #[test]
    #[should_panic(expected = "tensor `n5.logit` of ")]
    fn a_missing_tensor_is_named() {
        Golden::open("golden_logits").f32("n5.logit");
    }

    #[test]
    #[should_panic(expected = "is stored as I64, not F32")]
    fn a_wrong_type_is_named() {
        Golden::open("golden_logits").f32("n5.tokens");
    }

    #[test]
    #[should_panic(expected = "cannot read ")]
    fn a_missing_file_is_named() {
        Golden::open("golden_nothing");
    }
}
