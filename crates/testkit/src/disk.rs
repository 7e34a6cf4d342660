//! A disk that fails when told to: files in memory, with the faults that real ones have. Same seed, same faults.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use troika_kvstore::files::{Entry, FileSystem, Lock};

/// What goes wrong. Nothing by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Of so many reads one fails; 0 = none.
    pub read_error_one_in: u64,
    /// Of so many writes one fails, with half of the file written.
    pub write_error_one_in: u64,
    /// Of so many reads one finds a flipped bit, which stays.
    pub flip_one_in: u64,
    /// Bytes of all files together; what is beyond fails for want of space.
    pub capacity_bytes: Option<u64>,
    /// Nothing can be changed.
    pub read_only: bool,
    /// Each read takes so long.
    pub read_takes: Duration,
    /// Each write takes so long.
    pub write_takes: Duration,
    /// Each listing takes so long.
    pub list_takes: Duration,
    /// Reads come back changed in this way, for tests that must notice.
    pub lie: Option<Lie>,
}

/// Changes that checksums do not show: as if the store did not check, or took one file for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Payloads differ in one bit and have the right checksum.
    Payload,
    /// The payload is that of another file of the same kind and length, if there is one.
    OtherPayload,
}

/// Files in memory.
#[derive(Default)]
pub struct FakeDisk(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    files: BTreeMap<PathBuf, Vec<u8>>,
    /// Names given since the directory was last synced, with what they named before.
    unsynced: Vec<(PathBuf, Option<Vec<u8>>)>,
    /// How often the directory was listed.
    listings: u64,
    /// Counts directories: a new one is not the old one.
    generation: u64,
    locked: bool,
    faults: Faults,
    dice: u64,
}

impl FakeDisk {
    /// An empty disk without faults.
    pub fn new(seed: u64) -> Arc<Self> {
        let disk = Self::default();
        disk.state().dice = seed;
        Arc::new(disk)
    }

    /// From now on, this goes wrong.
    pub fn set_faults(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// The directory goes, with everything in it, and an empty one is in its place.
    pub fn replace_directory(&self) {
        let state = &mut *self.state();
        state.files.clear();
        state.generation += 1;
    }

    /// The machine stops: names that were not synced may be as before, and a file may be half-written.
    pub fn crash(&self) {
        let state = &mut *self.state();
        if let Some((path, bytes)) = state.files.iter().next_back() {
            let (path, half) = (path.with_file_name("tmp-0-0"), bytes[..bytes.len() / 2].to_vec());
            state.files.insert(path, half);
        }
        for (path, before) in std::mem::take(&mut state.unsynced).into_iter().rev() {
            if state.one_in(2) {
                match before {
                    Some(bytes) => state.files.insert(path, bytes),
                    None => state.files.remove(&path),
                };
            }
        }
    }

    /// Names and bytes of all files.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        self.state().files.clone()
    }

    /// How often the directory was listed.
    pub fn listings(&self) -> u64 {
        self.state().listings
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    /// Takes as long as the faults say; whoever sets others meanwhile ends the wait.
    fn hang(&self, takes: impl Fn(&Faults) -> Duration) {
        const NAP: Duration = Duration::from_millis(1);
        let mut waited = Duration::ZERO;
        loop {
            let left = takes(&self.state().faults).saturating_sub(waited);
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(NAP));
            waited += NAP;
        }
    }
}

impl State {
    fn roll(&mut self) -> u64 {
        self.dice = crate::mix(self.dice);
        self.dice
    }

    fn one_in(&mut self, n: u64) -> bool {
        n > 0 && self.roll().is_multiple_of(n)
    }

    fn may_change(&self) -> io::Result<()> {
        if self.faults.read_only { Err(io::ErrorKind::ReadOnlyFilesystem.into()) } else { Ok(()) }
    }

    fn get(&self, path: &Path) -> io::Result<&Vec<u8>> {
        self.files.get(path).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Takes a payload for another's where the format has it, and makes the checksums fit.
    fn lie(&mut self, lie: Lie, path: &Path, file: &mut Vec<u8>) {
        use troika_kvstore::format::{HEADER_BYTES, Header, Name};
        let name = path.file_name().and_then(|name| Name::parse(&name.to_string_lossy()));
        let Some((name, (header, payload))) = name.and_then(|name| Some((name, Header::split(name, file).ok()?)))
        else {
            return;
        };
        let mut payload = payload.to_vec();
        match lie {
            Lie::Payload if payload.is_empty() => {}
            Lie::Payload => {
                let at = self.roll() as usize % payload.len();
                payload[at] ^= 4;
            }
            Lie::OtherPayload => {
                let same = |other: &&Vec<u8>| other.len() == file.len() && *other != file;
                let of_same_kind = self
                    .files
                    .iter()
                    .filter(|(path, _)| path.extension().is_some_and(|extension| extension == name.kind.extension()));
                if let Some(other) = of_same_kind.map(|(_, bytes)| bytes).find(same) {
                    payload = other[HEADER_BYTES..].to_vec();
                }
            }
        }
        *file = [&header.encode(&payload)[..], &payload].concat();
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn input_output_error() -> io::Error {
    io::Error::other("input/output error")
}

impl FileSystem for FakeDisk {
    fn create_dir(&self, _dir: &Path) -> io::Result<()> {
        Ok(())
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Lock>>> {
        let state = &mut *self.state();
        if state.locked {
            return Ok(None);
        }
        state.may_change()?;
        state.locked = true;
        state.files.entry(path.to_owned()).or_default();
        let (generation, disk) = (state.generation, Arc::clone(&self.0));
        Ok(Some(Box::new(FakeLock { generation, disk })))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        self.hang(|faults| faults.list_takes);
        let state = &mut *self.state();
        state.listings += 1;
        let files = state.files.iter().filter(|(path, _)| path.parent() == Some(dir));
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(files.map(|(path, bytes)| Entry { name: name(path), bytes: bytes.len() as u64 }).collect())
    }

    fn read(&self, path: &Path, most: u64) -> io::Result<Vec<u8>> {
        self.hang(|faults| faults.read_takes);
        let state = &mut *self.state();
        if state.one_in(state.faults.read_error_one_in) {
            return Err(input_output_error());
        }
        if state.one_in(state.faults.flip_one_in) {
            let at = state.roll() as usize;
            if let Some(bytes) = state.files.get_mut(path).filter(|bytes| !bytes.is_empty()) {
                let len = bytes.len();
                bytes[at % len] ^= 1 << (at / len % 8);
            }
        }
        let mut bytes = state.get(path)?.clone();
        if let Some(lie) = state.faults.lie {
            state.lie(lie, path, &mut bytes);
        }
        bytes.truncate(most.try_into().unwrap_or(usize::MAX));
        Ok(bytes)
    }

    fn write(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        self.hang(|faults| faults.write_takes);
        let state = &mut *self.state();
        state.may_change()?;
        let mut bytes = parts.concat();
        let used: u64 = state.files.values().map(|file| file.len() as u64).sum();
        let left = state.faults.capacity_bytes.map_or(u64::MAX, |capacity| capacity.saturating_sub(used));
        let result = if state.one_in(state.faults.write_error_one_in) {
            bytes.truncate(bytes.len() / 2);
            Err(input_output_error())
        } else if bytes.len() as u64 > left {
            bytes.truncate(left as usize);
            Err(io::ErrorKind::StorageFull.into())
        } else {
            Ok(())
        };
        state.files.insert(path.to_owned(), bytes);
        result
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let state = &mut *self.state();
        state.may_change()?;
        let bytes = state.files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        let before = state.files.insert(to.to_owned(), bytes);
        state.unsynced.push((to.to_owned(), before));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let state = &mut *self.state();
        state.may_change()?;
        let before = state.files.remove(path).ok_or(io::ErrorKind::NotFound)?;
        state.unsynced.push((path.to_owned(), Some(before)));
        Ok(())
    }

    fn sync_dir(&self, _dir: &Path) -> io::Result<()> {
        self.state().unsynced.clear();
        Ok(())
    }
}

struct FakeLock {
    generation: u64,
    disk: Arc<Mutex<State>>,
}

impl Lock for FakeLock {
    fn is_in_place(&self) -> bool {
        lock(&self.disk).generation == self.generation
    }
}

impl Drop for FakeLock {
    fn drop(&mut self) {
        lock(&self.disk).locked = false;
    }
}
