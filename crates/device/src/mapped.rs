//! Memory-mapped files.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;
use troika_base::{BytesOwner, SharedBytes};

/// A file, mapped privately and read-only.
struct MappedFile(Mmap);

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl BytesOwner for MappedFile {
    /// Takes the pages of `range` out of this process; the system keeps them as long as it has room.
    #[cfg(unix)]
    #[expect(unsafe_code, reason = "the advice is unsafe for memory that is not backed by a file")]
    fn release(&self, range: Range<usize>) {
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the mapping is backed by its file and never written to, so pages that are dropped come back as they were,
        // those at the edges included, which belong to neighbours too.
        if let Err(error) = unsafe { self.0.unchecked_advise_range(advice, range.start, range.len()) } {
            tracing::debug!("pages of a mapped file stay in memory: {error}");
        }
    }

    #[cfg(not(unix))]
    fn release(&self, _: Range<usize>) {}
}

/// Maps a file read-only. Pages are read when they are first touched.
///
/// The mapping shows the file as it is on disk: whoever truncates a checkpoint while it is being served ends the process.
///
/// # Errors
///
/// If the file cannot be opened or mapped.
#[expect(unsafe_code, reason = "mapping a file is unsafe by nature: another process may change it")]
pub fn map_file(path: &Path) -> io::Result<SharedBytes> {
    // Asked before opening: opening a pipe would wait for a writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not an ordinary file"));
    }
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(SharedBytes::empty());
    }
    // SAFETY: the mapping is private and read-only, and lives as long as the bytes that are handed out. Checkpoints are not
    // written to while they are served; the documentation above says what happens otherwise.
    let map = unsafe { Mmap::map(&file)? };
    Ok(SharedBytes::owned_by(MappedFile(map)))
}
