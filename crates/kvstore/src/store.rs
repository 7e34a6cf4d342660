//! A store that is open: reads on the caller's thread, writes and removals on its own.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::directory::{Item, LOCK, TEMPORARY, scan, set_aside, usage};
use crate::format::{HEADER_BYTES, Header, Name};

/// Writes that may wait; more are dropped and counted.
const MAX_QUEUED: usize = 256;
/// Failed writes in a row after which the store gives up.
const MAX_FAILURES: u32 = 3;

/// Why a store does not open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another process has it open.
    #[error("{} is in use by another process", dir.display())]
    InUse { dir: PathBuf },
    /// The operating system refused.
    #[error("cannot {op} {}: {reason}", path.display())]
    Io { op: &'static str, path: PathBuf, reason: io::Error },
}

/// What a read found.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// The payload, checked.
    Found(Vec<u8>),
    /// No such file, or it cannot be read.
    Missing,
    /// It was damaged and has been set aside.
    Damaged,
}

/// Counts and gauges of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub limit_bytes: u64,
    /// Bytes under the directory that no index of ours knows: foreign files, damaged ones.
    pub foreign_bytes: u64,
    pub written: u64,
    pub read: u64,
    /// Writes dropped because the queue was full or there was no room.
    pub dropped: u64,
    /// Damaged files set aside.
    pub quarantined: u64,
    pub failed_writes: u64,
    /// Why the store takes nothing more, if so.
    pub failure: Option<String>,
}

type Payload = Box<dyn FnOnce() -> Vec<u8> + Send>;

#[derive(Default)]
struct Shared {
    writes: VecDeque<(Header, Payload)>,
    removals: VecDeque<Name>,
    /// The writer is busy with it.
    busy: Option<Name>,
    /// Writes that came to nothing, for the caller to forget.
    lost: Vec<Name>,
    status: Status,
    stopping: bool,
}

struct Inner {
    dir: PathBuf,
    shared: Mutex<Shared>,
    changed: Condvar,
}

/// Files under one directory, of which this process alone has charge.
pub struct Store {
    inner: Arc<Inner>,
    writer: Option<JoinHandle<()>>,
    /// Locked as long as the store is open.
    lock: File,
}

impl Store {
    /// Opens `dir`, creating it if need be, and lists what is there, parents first. What is beyond `limit_bytes` is for the
    /// caller to remove.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used.
    pub fn open(dir: &Path, limit_bytes: u64) -> Result<(Self, Vec<Item>), StoreError> {
        let io = |op, path: &Path| {
            let path = path.to_owned();
            move |reason| StoreError::Io { op, path, reason }
        };
        fs::create_dir_all(dir).map_err(io("create", dir))?;
        let path = dir.join(LOCK);
        let lock = File::options().create(true).write(true).truncate(false).open(&path).map_err(io("open", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::InUse { dir: dir.to_owned() }),
            Err(TryLockError::Error(reason)) => return Err(io("lock", &path)(reason)),
        }
        let mut status = Status { limit_bytes, ..Status::default() };
        let items = scan(dir, &mut status.quarantined).map_err(io("read", dir))?;
        let known: u64 = items.iter().map(|item| item.file_bytes).sum();
        status.foreign_bytes = usage(dir).map_err(io("read", dir))?.total_bytes().saturating_sub(known);
        let shared = Mutex::new(Shared { status, ..Shared::default() });
        let inner = Arc::new(Inner { dir: dir.to_owned(), shared, changed: Condvar::new() });
        let of_writer = Arc::clone(&inner);
        let writer = std::thread::Builder::new().name("kvstore".to_owned()).spawn(move || of_writer.write_all());
        let writer = Some(writer.map_err(io("start a thread for", dir))?);
        Ok((Self { inner, writer, lock }, items))
    }

    /// Queues a file to be written; `payload` is called on the store's own thread. False if it is dropped.
    pub fn put(&self, header: Header, payload: impl FnOnce() -> Vec<u8> + Send + 'static) -> bool {
        let mut shared = self.inner.lock();
        if shared.writes.len() >= MAX_QUEUED || shared.status.failure.is_some() {
            shared.status.dropped += 1;
            return false;
        }
        shared.writes.push_back((header, Box::new(payload)));
        self.inner.changed.notify_all();
        true
    }

    /// Queues files to be removed. Writes of them that still wait are forgotten.
    pub fn remove(&self, names: &[Name]) {
        if names.is_empty() {
            return;
        }
        let gone: BTreeSet<&Name> = names.iter().collect();
        let mut shared = self.inner.lock();
        shared.writes.retain(|(header, _)| !gone.contains(&header.name));
        // As many as the caller's index can hold.
        shared.removals.extend(names);
        self.inner.changed.notify_all();
    }

    /// Reads a file whole and checks it.
    pub fn read(&self, name: Name, layout: u32) -> Read {
        let file = match fs::read(self.inner.dir.join(name.to_string())) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Read::Missing,
            Err(error) => {
                tracing::warn!(file = %name, %error, "a stored block cannot be read");
                return Read::Missing;
            }
        };
        let mut shared = self.inner.lock();
        match Header::split(name, &file) {
            Ok((header, payload)) if header.layout == layout => {
                shared.status.read += 1;
                Read::Found(payload.to_vec())
            }
            Ok(_) => Read::Missing,
            Err(reason) => {
                shared.status.quarantined += 1;
                shared.status.foreign_bytes += file.len() as u64;
                drop(shared);
                set_aside(&self.inner.dir, name, reason);
                Read::Damaged
            }
        }
    }

    /// Files that were to be written and are not, since the last call.
    pub fn take_lost(&self) -> Vec<Name> {
        std::mem::take(&mut self.inner.lock().lost)
    }

    /// Counts and gauges.
    pub fn status(&self) -> Status {
        self.inner.lock().status.clone()
    }

    /// Waits until everything queued is done.
    pub fn flush(&self) {
        let mut shared = self.inner.lock();
        while !(shared.writes.is_empty() && shared.removals.is_empty() && shared.busy.is_none()) {
            shared = self.inner.changed.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.inner.lock().stopping = true;
        self.inner.changed.notify_all();
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the store's thread ended with a panic");
        }
        // Closing is not enough if a child that is just being started has the file open too.
        if let Err(error) = self.lock.unlock() {
            tracing::warn!(%error, "the store's lock cannot be given back");
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store's thread: removals first, since they make room. Ends when everything is done.
    fn write_all(&self) {
        let (mut failures, mut count) = (0, 0u64);
        loop {
            let mut shared = self.lock();
            shared.busy = None;
            self.changed.notify_all();
            while shared.writes.is_empty() && shared.removals.is_empty() {
                if shared.stopping {
                    return;
                }
                shared = self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner);
            }
            if let Some(name) = shared.removals.pop_front() {
                shared.busy = Some(name);
                drop(shared);
                // What is gone already is as good.
                let _ = fs::remove_file(self.dir.join(name.to_string()));
                continue;
            }
            let Some((header, payload)) = shared.writes.pop_front() else { continue };
            shared.busy = Some(header.name);
            let limit = shared.status.limit_bytes;
            drop(shared);
            count += 1;
            let done = self.write(&header, payload, limit, count);
            let mut shared = self.lock();
            match done {
                Ok(true) => {
                    failures = 0;
                    shared.status.written += 1;
                }
                Ok(false) => {
                    shared.status.dropped += 1;
                    shared.lost.push(header.name);
                }
                Err(error) => {
                    failures += 1;
                    shared.status.failed_writes += 1;
                    shared.lost.push(header.name);
                    tracing::warn!(file = %header.name, %error, "a block cannot be stored");
                    if failures >= MAX_FAILURES && shared.status.failure.is_none() {
                        tracing::warn!(dir = %self.dir.display(), "nothing more is stored on disk until the next start");
                        shared.status.failure = Some(error.to_string());
                        let waiting: Vec<Name> = shared.writes.drain(..).map(|(header, _)| header.name).collect();
                        shared.lost.extend(waiting);
                    }
                }
            }
        }
    }

    /// Writes one file so that it is there whole or not at all. False if there is no room.
    fn write(&self, header: &Header, payload: Payload, limit: u64, count: u64) -> io::Result<bool> {
        let used = usage(&self.dir)?;
        self.lock().status.foreign_bytes = used.total_bytes().saturating_sub(used.bytes);
        if used.total_bytes().saturating_add(HEADER_BYTES as u64 + header.payload_bytes) > limit {
            return Ok(false);
        }
        let payload = payload();
        debug_assert_eq!(payload.len() as u64, header.payload_bytes, "the payload is as long as announced");
        let temporary = self.dir.join(format!("{TEMPORARY}{}-{count}", std::process::id()));
        let written = File::create(&temporary).and_then(|mut file| {
            file.write_all(&header.encode(&payload))?;
            file.write_all(&payload)?;
            file.sync_all()
        });
        let renamed = written.and_then(|()| fs::rename(&temporary, self.dir.join(header.name.to_string())));
        if renamed.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        renamed?;
        // So that the name outlives a loss of power. Where directories cannot be synced, the name may be lost.
        if let Ok(dir) = File::open(&self.dir) {
            let _ = dir.sync_all();
        }
        Ok(true)
    }
}
