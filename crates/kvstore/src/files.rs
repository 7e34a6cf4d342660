//! What the store asks of a file system, and the real one. Tests have one that fails when told to.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

/// Folders inside the directory are looked into so deep.
const MAX_DEPTH: usize = 8;

/// A file directly in the directory, or a folder with everything in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// `None` for a folder, a link or a pipe.
    pub name: Option<String>,
    pub bytes: u64,
}

/// Operations on files, each as the operating system does it.
#[expect(clippy::missing_errors_doc, reason = "each fails as the operating system does")]
pub trait FileSystem: Send + Sync {
    /// Makes the directory if it is not there.
    fn create_dir(&self, dir: &Path) -> io::Result<()>;

    /// Locks a file, making it if need be; `None` if another process has it locked.
    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>>;

    /// Everything in the directory.
    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>>;

    /// The first bytes of a file, at most `most`.
    fn read(&self, path: &Path, most: u64) -> io::Result<Vec<u8>>;

    /// Makes a file of these parts; it is on the disk when this returns.
    fn write(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()>;

    /// Gives a file another name, whole or not at all.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes names outlive a loss of power.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
}

/// A lock that is held, given back when dropped.
pub trait Lock: Send + Sync {
    /// Whether the file that is locked is still the one of that name. If not, the directory was removed or replaced, and
    /// what is there now may be another's.
    fn is_in_place(&self) -> bool;
}

/// The machine's own files.
#[derive(Clone, Copy, Debug)]
pub struct Native;

impl FileSystem for Native {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>> {
        let file = File::options().create(true).write(true).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Box::new(FileLock { file, path: path.to_owned() }))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            // A file may go while we look.
            let Ok(metadata) = entry.metadata() else { continue };
            entries.push(if metadata.is_dir() {
                Entry { name: None, bytes: folder_bytes(&entry.path(), MAX_DEPTH) }
            } else if !metadata.is_file() {
                // A link or a pipe: none of ours, and whoever opened it might wait for ever.
                Entry { name: None, bytes: metadata.len() }
            } else {
                Entry { name: Some(entry.file_name().to_string_lossy().into_owned()), bytes: metadata.len() }
            });
        }
        Ok(entries)
    }

    fn read(&self, path: &Path, most: u64) -> io::Result<Vec<u8>> {
        let file = File::open(path)?;
        let mut bytes = Vec::with_capacity(file.metadata()?.len().min(most) as usize);
        file.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn write(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        let mut file = File::create(path)?;
        parts.iter().try_for_each(|part| file.write_all(part))?;
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }
}

fn folder_bytes(dir: &Path, depth: usize) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() && depth > 0 => folder_bytes(&entry.path(), depth - 1),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

struct FileLock {
    file: File,
    path: PathBuf,
}

impl Lock for FileLock {
    #[cfg(unix)]
    fn is_in_place(&self) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let (Ok(held), Ok(named)) = (self.file.metadata(), fs::metadata(&self.path)) else { return false };
        place(held) == place(named)
    }

    #[cfg(not(unix))]
    fn is_in_place(&self) -> bool {
        self.path.exists()
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Closing is not enough if a child that is just being started has the file open too.
        if let Err(error) = self.file.unlock() {
            tracing::warn!(%error, "the store's lock cannot be given back");
        }
    }
}
