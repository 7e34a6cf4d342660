//! A checkpoint on disk: `config.json` and the tensors of its safetensors files, by name.
//!
//! Files are opened by the caller (see [`OpenBytes`]), because mapping one into memory is unsafe and lives in `device`.
//! What a tensor means is decided in [`layout`] and [`crate::weights`].

pub mod layout;
pub mod safetensors;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use troika_base::SharedBytes;

use crate::config::{ConfigError, ConfigFile};
use safetensors::{Dtype, HeaderError};

/// Opens the file at a path and gives all its bytes: mapped, or read by [`read_file`].
pub type OpenBytes<'a> = &'a dyn Fn(&Path) -> io::Result<SharedBytes>;

/// Reads a whole file into memory. For tests and small files; mapping opens a large one at once.
pub fn read_file(path: &Path) -> io::Result<SharedBytes> {
    std::fs::read(path).map(SharedBytes::new)
}

/// Why a checkpoint cannot be opened. The message is whole: it includes the reasons underneath.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    #[error("there is no checkpoint at {}: no such file or directory", path.display())]
    NotFound { path: PathBuf },
    #[error("cannot read {}: {reason}", path.display())]
    Io { path: PathBuf, reason: io::Error },
    #[error("{} is not a checkpoint: give a directory with config.json and *.safetensors files", path.display())]
    NotACheckpoint { path: PathBuf },
    #[error(
        "{} has no config.json; it belongs beside the weights and comes with the original checkpoint",
        dir.display()
    )]
    NoConfig { dir: PathBuf },
    #[error("{} has no *.safetensors files{}", dir.display(), hint(*has_partial))]
    NoTensors { dir: PathBuf, has_partial: bool },
    #[error("{}: {reason}", path.display())]
    Config { path: PathBuf, reason: ConfigError },
    #[error("{}: {reason}", path.display())]
    Header { path: PathBuf, reason: HeaderError },
    #[error("{}: {reason}", path.display())]
    Index { path: PathBuf, reason: String },
    #[error("{}: missing shard `{shard}`{}", dir.display(), of_first(first))]
    MissingShard {
        dir: PathBuf,
        shard: String,
        /// A tensor that the index places there.
        first: Option<String>,
    },
    #[error("{}: the index says it holds tensor `{tensor}`, but it does not", path.display())]
    NotInShard { path: PathBuf, tensor: String },
    #[error("tensor `{tensor}` occurs in two shards, {} and {}", first.display(), second.display())]
    InTwoShards { tensor: String, first: PathBuf, second: PathBuf },
}

fn hint(has_partial: bool) -> &'static str {
    if has_partial { ", only an unfinished download or synthesis (*.partial, *.incomplete)" } else { "" }
}

fn of_first(first: &Option<String>) -> String {
    first
        .as_ref()
        .map_or_else(String::new, |tensor| format!(" (the index places tensor `{tensor}` there); download it"))
}

impl CheckpointError {
    /// True where one file or tensor is damaged, absent or given twice, so that the rest can still be looked at.
    pub(crate) fn leaves_a_rest(&self) -> bool {
        matches!(
            self,
            Self::MissingShard { .. } | Self::NotInShard { .. } | Self::InTwoShards { .. } | Self::Header { .. }
        )
    }
}

/// A tensor of a file, not yet interpreted.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Index into [`TensorFiles::paths`].
    pub file: usize,
    pub bytes: SharedBytes,
}

/// Every tensor of a checkpoint by name.
#[derive(Clone, Debug, Default)]
pub struct TensorFiles {
    paths: Vec<PathBuf>,
    num_file_bytes: u64,
    tensors: BTreeMap<String, Tensor>,
}

impl TensorFiles {
    /// The files, in the order they were opened.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Bytes of all files, headers included.
    pub fn num_file_bytes(&self) -> u64 {
        self.num_file_bytes
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// As [`Self::get`], with the name as it is kept here.
    pub(crate) fn get_named(&self, name: &str) -> Option<(&str, &Tensor)> {
        self.tensors.get_key_value(name).map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Every tensor, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// True if there is no tensor at all.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The file that holds `tensor`.
    pub fn path_of(&self, tensor: &Tensor) -> &Path {
        self.paths.get(tensor.file).map_or(Path::new("?"), PathBuf::as_path)
    }

    /// Adds the tensors of one file. Returns the names that an earlier file has already, which stay as they were.
    fn add(&mut self, path: &Path, bytes: &SharedBytes) -> Result<Vec<CheckpointError>, CheckpointError> {
        let header = |reason| CheckpointError::Header { path: path.to_owned(), reason };
        let entries = safetensors::read_header(bytes).map_err(header)?;
        let file = self.paths.len();
        self.paths.push(path.to_owned());
        self.num_file_bytes += bytes.len() as u64;
        let mut twice = Vec::new();
        for entry in entries {
            if let Some(earlier) = self.tensors.get(&entry.name) {
                twice.push(CheckpointError::InTwoShards {
                    first: self.path_of(earlier).to_owned(),
                    second: path.to_owned(),
                    tensor: entry.name,
                });
                continue;
            }
            let bytes = bytes.slice(entry.bytes).expect("read_header keeps ranges inside the file");
            self.tensors.insert(entry.name, Tensor { dtype: entry.dtype, shape: entry.shape, file, bytes });
        }
        Ok(twice)
    }
}

/// An opened checkpoint: every header is sound and every shard is there. Weights are checked by
/// [`crate::weights::WeightTable::build`].
#[derive(Clone, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ConfigFile,
    files: TensorFiles,
}

impl Checkpoint {
    /// Opens the checkpoint in directory `path`: one `model.safetensors`, or shards with or without
    /// `model.safetensors.index.json`. The path of a single safetensors file beside its `config.json` will do too.
    pub fn open(path: &Path, open: OpenBytes<'_>) -> Result<Self, CheckpointError> {
        let place = Place::find(path)?;
        let config = place.read_config()?;
        let files = place.read_tensors(open, &mut Err)?;
        Ok(Self { path: path.to_owned(), config, files })
    }

    /// A checkpoint that is not on disk: the text of its `config.json`, and safetensors files with a name each for
    /// messages.
    pub fn from_parts(config: &str, files: &[(String, SharedBytes)]) -> Result<Self, CheckpointError> {
        let path = PathBuf::from("config.json");
        let config = ConfigFile::from_json(config).map_err(|reason| CheckpointError::Config { path, reason })?;
        let mut tensors = TensorFiles::default();
        for (name, bytes) in files {
            if let Some(error) = tensors.add(Path::new(name), bytes)?.into_iter().next() {
                return Err(error);
            }
        }
        Ok(Self { path: PathBuf::new(), config, files: tensors })
    }

    /// What was opened; empty for [`Self::from_parts`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn config(&self) -> &ConfigFile {
        &self.config
    }

    pub fn files(&self) -> &TensorFiles {
        &self.files
    }
}

/// Name of the index that says which shard holds which tensor.
const INDEX_NAME: &str = "model.safetensors.index.json";
/// Longest index accepted; that of V4-Flash has about 8 MB.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Where the parts of a checkpoint lie.
pub(crate) struct Place {
    dir: PathBuf,
    /// Set if a single file was asked for.
    only: Option<PathBuf>,
}

/// Takes an error of [`Place::read_tensors`]: gives it back to stop, or notes it to go on without the part.
pub(crate) type OnError<'a> = &'a mut dyn FnMut(CheckpointError) -> Result<(), CheckpointError>;

impl Place {
    pub(crate) fn find(path: &Path) -> Result<Self, CheckpointError> {
        let metadata = std::fs::metadata(path).map_err(|reason| match reason.kind() {
            io::ErrorKind::NotFound => CheckpointError::NotFound { path: path.to_owned() },
            _ => CheckpointError::Io { path: path.to_owned(), reason },
        })?;
        if metadata.is_dir() {
            return Ok(Self { dir: path.to_owned(), only: None });
        }
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            return Err(CheckpointError::NotACheckpoint { path: path.to_owned() });
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok(Self { dir: dir.to_owned(), only: Some(path.to_owned()) })
    }

    pub(crate) fn read_config(&self) -> Result<ConfigFile, CheckpointError> {
        let path = self.dir.join("config.json");
        ConfigFile::read(&path).map_err(|reason| match reason {
            ConfigError::Io { reason, .. } if reason.kind() == io::ErrorKind::NotFound => {
                CheckpointError::NoConfig { dir: self.dir.clone() }
            }
            ConfigError::Io { path, reason } => CheckpointError::Io { path, reason },
            reason => CheckpointError::Config { path, reason },
        })
    }

    pub(crate) fn read_tensors(
        &self,
        open: OpenBytes<'_>,
        on_error: OnError<'_>,
    ) -> Result<TensorFiles, CheckpointError> {
        let index = self.dir.join(INDEX_NAME);
        let listed = if self.only.is_none() && index.exists() { Some(read_index(&index)?) } else { None };
        let shards = match (&self.only, &listed) {
            (Some(file), _) => vec![file.clone()],
            (None, Some(by_shard)) => by_shard.keys().map(|shard| self.dir.join(shard)).collect(),
            (None, None) => self.find_shards(on_error)?,
        };
        let mut files = TensorFiles::default();
        for path in &shards {
            let bytes = match open(path) {
                Ok(bytes) => bytes,
                Err(reason) if reason.kind() == io::ErrorKind::NotFound => {
                    let shard = file_name(path);
                    let first = listed.as_ref().and_then(|listed| listed.get(&shard)?.first().cloned());
                    on_error(CheckpointError::MissingShard { dir: self.dir.clone(), shard, first })?;
                    continue;
                }
                Err(reason) => return Err(CheckpointError::Io { path: path.clone(), reason }),
            };
            let twice = files.add(path, &bytes).or_else(|error| {
                // A damaged shard must not hide what the others hold.
                on_error(error).map(|()| Vec::new())
            })?;
            twice.into_iter().try_for_each(&mut *on_error)?;
            if let Some(names) = listed.as_ref().and_then(|listed| listed.get(&file_name(path))) {
                let here = |name: &String| files.get(name).is_some_and(|tensor| files.path_of(tensor) == path);
                for tensor in names.iter().filter(|name| !here(name)) {
                    on_error(CheckpointError::NotInShard { path: path.clone(), tensor: tensor.clone() })?;
                }
            }
        }
        Ok(files)
    }

    /// The safetensors files of a directory without index, in order of their names.
    fn find_shards(&self, on_error: OnError<'_>) -> Result<Vec<PathBuf>, CheckpointError> {
        let io = |reason| CheckpointError::Io { path: self.dir.clone(), reason };
        let mut names = Vec::new();
        let mut has_partial = false;
        for entry in std::fs::read_dir(&self.dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let name = file_name(&path);
            has_partial |= name.ends_with(".partial") || name.ends_with(".incomplete");
            if name.ends_with(".safetensors") && !name.starts_with('.') {
                names.push(name);
            }
        }
        names.sort_unstable();
        if names.is_empty() {
            return Err(CheckpointError::NoTensors { dir: self.dir.clone(), has_partial });
        }
        // `model-00001-of-00003.safetensors` tells how many there must be.
        if let Some((prefix, count)) = names.iter().find_map(|name| numbered(name)) {
            for i in 1..=count {
                let shard = format!("{prefix}-{i:05}-of-{count:05}.safetensors");
                if !names.contains(&shard) {
                    on_error(CheckpointError::MissingShard { dir: self.dir.clone(), shard, first: None })?;
                }
            }
        }
        Ok(names.iter().map(|name| self.dir.join(name)).collect())
    }
}

/// Prefix and count of a shard name such as `model-00001-of-00003.safetensors`.
fn numbered(name: &str) -> Option<(&str, u32)> {
    let stem = name.strip_suffix(".safetensors")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(count) || !digits(number) {
        return None;
    }
    Some((prefix, count.parse().ok()?))
}

/// Tensor names by shard.
fn read_index(path: &Path) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let io = |reason| CheckpointError::Io { path: path.to_owned(), reason };
    let fail = |reason| CheckpointError::Index { path: path.to_owned(), reason };
    let bytes = std::fs::metadata(path).map_err(io)?.len();
    if bytes > MAX_INDEX_BYTES {
        return Err(fail(format!("the index has {bytes} bytes, more than the {MAX_INDEX_BYTES} allowed")));
    }
    let text = std::fs::read(path).map_err(io)?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|error| fail(format!("not an index of shards ({{\"weight_map\": {{tensor: file}}}}): {error}")))?;
    let mut by_shard: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in index.weight_map {
        let plain = !shard.is_empty() && !shard.contains(['/', '\\', '\0']) && shard != "." && shard != "..";
        if !plain {
            return Err(fail(format!("tensor `{tensor}` is placed in `{shard}`, which is not a file name")));
        }
        by_shard.entry(shard).or_default().push(tensor);
    }
    if by_shard.is_empty() {
        return Err(fail("the index lists no tensors".to_owned()));
    }
    Ok(by_shard)
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
