//! Compiled procedures on disk, so that a restart does not compile them again: [`Cached`] around a back end.
//!
//! `docs/formats/compiled.md` has the layout of files. A file that is not as it was written is compiled anew; one that cannot
//! be written costs the next start its compilation, and nothing else.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::{Bank, Body, ChannelWeights, Compiled, Limits, NpuBackend, NpuError, Procedure, Program};

const MAGIC: &[u8; 8] = b"TroikaNP";
const VERSION: u32 = 1;
/// Bytes before a program.
const HEADER: usize = 96;
/// Of files that hold a program.
const SUFFIX: &str = "npu";
/// Locked for moments: by who makes a staging folder and by who clears them away.
const LOCK: &str = "lock";
const STAGING: &str = "staging-";

/// What became of compilations since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompileCounts {
    /// Procedures that were compiled, those with damaged files included.
    pub compiled: u64,
    /// Procedures that were not, since their programs were on disk.
    pub from_disk: u64,
    /// Files that were not as they had been written; they are gone.
    pub damaged: u64,
    /// Programs that could not be kept: larger than the limit, or the disk refused.
    pub not_kept: u64,
    /// Files that went to make room.
    pub evicted: u64,
    /// Programs from disk that the engine did not take any more, as after a change of its driver; compiled again.
    pub refused: u64,
    /// Staging folders of processes that have ended; they are gone.
    pub leftovers: u64,
}

/// A back end whose compiled procedures are kept in a folder.
pub struct Cached {
    inner: Arc<dyn NpuBackend>,
    dir: PathBuf,
    limit_bytes: u64,
    staging: Staging,
    counts: Mutex<CompileCounts>,
    /// Digests of programs that were not compiled now.
    from_disk: Mutex<BTreeSet<[u8; 32]>>,
}

impl Cached {
    /// Keeps programs of `inner` in `dir`, which is made if need be, at most `limit_bytes` of them.
    ///
    /// # Errors
    ///
    /// If the folder cannot be made or written to.
    pub fn open(inner: Arc<dyn NpuBackend>, dir: &Path, limit_bytes: u64) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let (staging, leftovers) = Staging::make(dir)?;
        if leftovers > 0 {
            tracing::info!(leftovers, dir = %dir.display(), "removed what processes that ended had begun to write");
        }
        let counts = Mutex::new(CompileCounts { leftovers, ..CompileCounts::default() });
        Ok(Self { inner, dir: dir.to_owned(), limit_bytes, staging, counts, from_disk: Mutex::default() })
    }

    fn count(&self, change: impl FnOnce(&mut CompileCounts)) {
        change(&mut lock(&self.counts));
    }

    /// The program with this name, if it is there and sound.
    fn read(&self, key: &[u8; 32]) -> Option<Compiled> {
        let path = self.path(key);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot read a compiled procedure; compiling it again");
                self.count(|counts| counts.damaged += 1);
                return None;
            }
        };
        let compiled = decode(&bytes, key);
        if compiled.is_none() {
            tracing::warn!(path = %path.display(), "a compiled procedure is damaged; compiling it again");
            self.count(|counts| counts.damaged += 1);
            // If it stays, the next one to write replaces it.
            let _ = fs::remove_file(&path);
        } else if let Ok(file) = File::open(&path) {
            // When it was used last; where that cannot be noted it goes early.
            let _ = file.set_modified(SystemTime::now());
        }
        compiled
    }

    fn write(&self, key: &[u8; 32], compiled: &Compiled) {
        let bytes = encode(key, compiled);
        if bytes.len() as u64 > self.limit_bytes {
            tracing::debug!(bytes = bytes.len(), limit = self.limit_bytes, "a compiled procedure is too large to keep");
            return self.count(|counts| counts.not_kept += 1);
        }
        let path = self.path(key);
        let written = self.make_room(bytes.len() as u64).and_then(|()| self.staging.write(&path, &bytes));
        if let Err(error) = written {
            tracing::warn!(path = %path.display(), %error, "a compiled procedure is not kept");
            self.count(|counts| counts.not_kept += 1);
        }
    }

    /// Removes what was used longest ago until `bytes` more fit.
    fn make_room(&self, bytes: u64) -> io::Result<()> {
        let mut files = programs(&self.dir)?;
        files.sort();
        let mut total: u64 = files.iter().map(|(_, len, _)| len).sum();
        for (_, len, path) in files {
            if total + bytes <= self.limit_bytes {
                break;
            }
            match fs::remove_file(path) {
                Ok(()) => self.count(|counts| counts.evicted += 1),
                // Another process has.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            total -= len;
        }
        Ok(())
    }

    fn path(&self, key: &[u8; 32]) -> PathBuf {
        self.dir.join(format!("{}.{SUFFIX}", hex(key)))
    }
}

impl NpuBackend for Cached {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn description(&self) -> String {
        self.inner.description()
    }

    fn version(&self) -> String {
        self.inner.version()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn compile(&self, procedure: &Procedure) -> Result<Compiled, NpuError> {
        let key = key(&*self.inner, procedure);
        if let Some(compiled) = key.and_then(|key| self.read(&key)) {
            self.count(|counts| counts.from_disk += 1);
            lock(&self.from_disk).insert(digest(&compiled.blob));
            return Ok(compiled);
        }
        let compiled = self.inner.compile(procedure)?;
        self.count(|counts| counts.compiled += 1);
        if let Some(key) = key.filter(|_| !compiled.blob.is_empty()) {
            self.write(&key, &compiled);
        }
        Ok(compiled)
    }

    fn shares_weights(&self) -> bool {
        self.inner.shares_weights()
    }

    fn load(&self, instance: usize, programs: &[Program]) -> Result<Box<dyn Bank>, NpuError> {
        let error = match self.inner.load(instance, programs) {
            Ok(bank) => return Ok(bank),
            Err(error) => error,
        };
        let is_from_disk = |compiled: &Compiled| lock(&self.from_disk).contains(&digest(&compiled.blob));
        if !programs.iter().any(|(_, compiled)| is_from_disk(compiled)) {
            return Err(error);
        }
        tracing::warn!(%error, "the engine does not take what was compiled earlier; compiling it again");
        let again = programs.iter().map(|(procedure, compiled)| {
            if !is_from_disk(compiled) {
                return Ok((Arc::clone(procedure), Arc::clone(compiled)));
            }
            lock(&self.from_disk).remove(&digest(&compiled.blob));
            let compiled = self.inner.compile(procedure)?;
            self.count(|counts| counts.refused += 1);
            if let Some(key) = key(&*self.inner, procedure) {
                self.write(&key, &compiled);
            }
            Ok((Arc::clone(procedure), Arc::new(compiled)))
        });
        self.inner.load(instance, &again.collect::<Result<Vec<Program>, NpuError>>()?)
    }

    fn enter(&self, instance: usize) {
        self.inner.enter(instance);
    }

    fn compile_counts(&self) -> Option<CompileCounts> {
        Some(*lock(&self.counts))
    }
}

/// Programs in a folder and their bytes; none if there is no such folder.
pub fn contents(dir: &Path) -> (usize, u64) {
    let programs = programs(dir).unwrap_or_default();
    (programs.len(), programs.iter().map(|(_, len, _)| len).sum())
}

/// Files with programs: when each was used last, how large it is.
fn programs(dir: &Path) -> io::Result<Vec<(SystemTime, u64, PathBuf)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        // Another process may have removed it.
        if let (true, Ok(metadata)) = (path.extension().is_some_and(|e| e == SUFFIX), path.metadata()) {
            files.push((metadata.modified()?, metadata.len(), path));
        }
    }
    Ok(files)
}

/// Names everything that a program depends on: back end and version, tile, partition, and every weight. `None` for weights
/// that are not in the form of engines.
fn key(backend: &dyn NpuBackend, procedure: &Procedure) -> Option<[u8; 32]> {
    let mut hasher = Sha256::new_with_prefix(MAGIC);
    let (name, version) = (backend.name(), backend.version());
    hasher.update(format!("{VERSION}\n{name}\n{version}\ntile {}\n", procedure.tile));
    let mut add = |weights: &ChannelWeights, outputs: std::ops::Range<usize>| {
        let (codes, scales) = weights.channel_codes(outputs)?;
        hasher.update(format!("{} x {}\n", scales.len(), weights.cols()));
        let codes: Vec<u8> = codes.into_iter().map(|code| code as u8).collect();
        hasher.update(codes);
        scales.iter().for_each(|scale| hasher.update(scale.to_le_bytes()));
        Some(())
    };
    let form = match &procedure.body {
        Body::Products { groups, products } => {
            for product in products {
                let per_group = product.weights.rows() / groups;
                for first in (0..*groups).map(|group| group * per_group) {
                    add(&product.weights, first + product.channels.start..first + product.channels.end)?;
                }
            }
            format!("{groups} groups of {} products\n", products.len())
        }
        Body::SharedExpert { w1, w2, w3, limit } => {
            [w1, w2, w3].iter().try_for_each(|weights| add(weights, 0..weights.rows()))?;
            format!("expert {:?}\n", limit.map(f32::to_bits))
        }
    };
    hasher.update(form);
    Some(hasher.finalize().into())
}

fn encode(key: &[u8; 32], compiled: &Compiled) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + compiled.blob.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(compiled.resident_bytes.to_le_bytes());
    bytes.extend((compiled.blob.len() as u64).to_le_bytes());
    bytes.extend(key);
    let digest = Sha256::new_with_prefix(&bytes).chain_update(&compiled.blob).finalize();
    bytes.extend(digest);
    bytes.extend(&compiled.blob);
    bytes
}

/// What [`encode`] was given; `None` if these are not its bytes, or not those of `key`.
fn decode(bytes: &[u8], key: &[u8; 32]) -> Option<Compiled> {
    let (header, blob) = bytes.split_at_checked(HEADER)?;
    let resident_bytes = u64::from_le_bytes(*header[16..].first_chunk()?);
    let compiled = Compiled { blob: blob.to_vec(), resident_bytes };
    (encode(key, &compiled)[..HEADER] == *header).then_some(compiled)
}

fn digest(blob: &[u8]) -> [u8; 32] {
    Sha256::digest(blob).into()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can be left half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A folder of this process for what is being written. It is locked as long as the process lives, so whoever can lock one
/// that is there may remove it.
struct Staging {
    dir: PathBuf,
    /// Locked.
    _lock: File,
}

impl Staging {
    /// Also removes those of processes that have ended, and says how many.
    fn make(parent: &Path) -> io::Result<(Self, u64)> {
        // While one process makes a folder and locks it, no other takes it for a leftover.
        let guard = File::create(parent.join(LOCK))?;
        guard.lock()?;
        let mut leftovers = 0;
        for entry in fs::read_dir(parent)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(STAGING) && !is_in_use(&entry.path())? {
                fs::remove_dir_all(entry.path())?;
                leftovers += 1;
            }
        }
        let pid = std::process::id();
        let mut names = (0..).map(|number: u64| parent.join(format!("{STAGING}{pid}-{number}")));
        let dir = loop {
            let dir = names.next().expect("numbers do not end");
            match fs::create_dir(&dir) {
                Ok(()) => break dir,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        };
        let lock = File::create(dir.join(LOCK))?;
        lock.lock()?;
        guard.unlock()?;
        Ok((Self { dir, _lock: lock }, leftovers))
    }

    /// A file appears at `path` whole or not at all, whoever reads meanwhile and whenever the machine stops.
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let part = self.dir.join(path.file_name().expect("it names a file"));
        let mut file = File::create(&part)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&part, path)?;
        // The folder's entry; systems that cannot sync a folder do it by themselves.
        if let Some(Ok(dir)) = path.parent().map(File::open) {
            let _ = dir.sync_all();
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // What is left behind, the next start removes.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// True if a process holds the lock of a staging folder.
fn is_in_use(dir: &Path) -> io::Result<bool> {
    match File::open(dir.join(LOCK)) {
        Ok(lock) => match lock.try_lock() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        },
        // It ended before it made one.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
