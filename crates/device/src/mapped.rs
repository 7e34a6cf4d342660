//! Memory-mapped files.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;
use troika_base::SharedBytes;

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
    Ok(SharedBytes::new(map))
}
