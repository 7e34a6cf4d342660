//! Numeric classes whose rows are not to be trusted any more. Files do not say of which class they are, so a class is closed
//! by giving its rows another name from then on: how often that has happened is kept beside them, and outlives the process.

use std::io;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::directory::CLOSED;
use crate::files::FileSystem;

/// A list longer than this is not ours.
const MAX_BYTES: u64 = 1 << 20;
/// Tries to write the list before it is given up.
pub(crate) const MAX_ATTEMPTS: u32 = 3;

/// Names of classes, one for each time that one was closed.
#[derive(Debug, Default)]
pub(crate) struct Closed {
    names: Vec<String>,
    /// Failed tries to write the list as it is now; `None` if it is written, or given up.
    pub(crate) unwritten: Option<u32>,
}

impl Closed {
    /// What is in `dir`; `is_there` if a list is.
    pub(crate) fn read(files: &dyn FileSystem, dir: &Path, is_there: bool) -> io::Result<Self> {
        if !is_there {
            return Ok(Self::default());
        }
        let bytes = files.read(&dir.join(CLOSED), MAX_BYTES)?;
        let text = String::from_utf8_lossy(&bytes);
        let list = text.split_once('\n').filter(|(sum, list)| *sum == checksum(list)).map(|(_, list)| list);
        let damaged = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "it is damaged; `troika cache clear` removes it with all it is for",
            )
        };
        let names = list.ok_or_else(damaged)?.lines().map(str::to_owned).collect();
        Ok(Self { names, unwritten: None })
    }

    /// How often a class was closed.
    pub(crate) fn times(&self, class: &str) -> usize {
        self.names.iter().filter(|name| *name == class).count()
    }

    pub(crate) fn close(&mut self, class: &str) {
        assert!(!class.contains('\n'), "the name of a class is one line");
        self.names.push(class.to_owned());
        self.unwritten = Some(0);
    }

    /// The list as it is on disk: a checksum, then the names.
    pub(crate) fn text(&self) -> String {
        let list: String = self.names.iter().map(|name| format!("{name}\n")).collect();
        format!("{}\n{list}", checksum(&list))
    }
}

fn checksum(list: &str) -> String {
    Sha256::digest(list).iter().map(|byte| format!("{byte:02x}")).collect()
}
