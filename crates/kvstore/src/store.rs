//! A store that is open: writes, removals and reads wait in bounded queues and are done by two threads of its own, or, where
//! time is virtual, by whoever has its [`Hands`].

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::accounts::Accounts;
use crate::breaker::Breaker;
use crate::closed::{Closed, MAX_ATTEMPTS};
use crate::directory::{CLOSED, Item, LOCK, TEMPORARY, scan, set_aside};
use crate::files::{FileSystem, Lock, Native};
use crate::format::{HEADER_BYTES, Header, Name};

/// Writes that may wait; more are dropped and counted.
const MAX_QUEUED_WRITES: usize = 256;
/// Jobs of reading that may wait; more are refused and counted.
const MAX_QUEUED_READS: usize = 64;
/// A store that closes waits so long for its disk.
const MAX_CLOSING: Duration = Duration::from_secs(20);

/// Why a store does not open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another process has it open.
    #[error("{} is in use by another process: end that one first, or name another folder", dir.display())]
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
    /// Writes dropped because the queue was full, there was no room or nothing to write, or writing is off.
    pub dropped: u64,
    /// Jobs of reading refused because the queue was full or reading is off.
    pub refused_reads: u64,
    /// Damaged files set aside.
    pub quarantined: u64,
    pub failed_writes: u64,
    pub failed_reads: u64,
    /// Why nothing more is written, if so.
    pub write_failure: Option<String>,
    /// Why nothing more is read, if so.
    pub read_failure: Option<String>,
}

type Payload = Box<dyn FnOnce() -> Option<Vec<u8>> + Send>;
type Job = Box<dyn FnOnce(&dyn Fn(Name) -> Read) + Send>;

#[derive(Default)]
struct Shared {
    writes: VecDeque<(Header, Payload)>,
    removals: VecDeque<Name>,
    /// The writer is busy with it.
    busy: Option<Name>,
    jobs: VecDeque<(u32, Job)>,
    /// Writes that came to nothing, for the caller to forget.
    lost: Vec<Name>,
    status: Status,
    accounts: Accounts,
    writing: Breaker,
    reading: Breaker,
    closed: Closed,
    /// Temporary names given so far.
    temporaries: u64,
    stopping: bool,
    /// The disk has not done in time what it was given; nobody waits for it any more.
    given_up: bool,
}

struct Inner {
    files: Arc<dyn FileSystem>,
    dir: PathBuf,
    lock: Box<dyn Lock>,
    shared: Mutex<Shared>,
    changed: Condvar,
    idle: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Files under one directory, of which this process alone has charge.
pub struct Store {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

/// What does a store's work: one thing at a time.
pub struct Hands(Arc<Inner>);

impl Store {
    /// Opens `dir`, creating it if need be, and lists what is there, parents first. What is beyond `limit_bytes` is for the
    /// caller to remove.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used.
    pub fn open(dir: &Path, limit_bytes: u64) -> Result<(Self, Vec<Item>), StoreError> {
        Self::open_on(Arc::new(Native), dir, limit_bytes)
    }

    /// As [`Self::open`], on another file system.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used.
    pub fn open_on(files: Arc<dyn FileSystem>, dir: &Path, limit_bytes: u64) -> Result<(Self, Vec<Item>), StoreError> {
        let (mut store, items, _) = Self::open_idle(files, dir, limit_bytes)?;
        for (name, work) in [("kvstore", Hands::write_all as fn(&Hands)), ("kvstore-read", Hands::read_all)] {
            let hands = Hands(Arc::clone(&store.inner));
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&hands));
            store.threads.push(thread.map_err(io_error("start a thread for", dir))?);
        }
        Ok((store, items))
    }

    /// As [`Self::open_on`], without threads: nothing is done but by the hands.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used.
    pub fn open_idle(
        files: Arc<dyn FileSystem>,
        dir: &Path,
        limit_bytes: u64,
    ) -> Result<(Self, Vec<Item>, Hands), StoreError> {
        files.create_dir(dir).map_err(io_error("create", dir))?;
        let path = dir.join(LOCK);
        let lock = files.lock(&path).map_err(io_error("lock", &path))?;
        let lock = lock.ok_or_else(|| StoreError::InUse { dir: dir.to_owned() })?;
        let mut status = Status { limit_bytes, ..Status::default() };
        let items = scan(&*files, dir, &mut status.quarantined).map_err(io_error("read", dir))?;
        let (mut accounts, start) = (Accounts::new(&items), Instant::now());
        let entries = files.list(dir).map_err(io_error("read", dir))?;
        accounts.take_listing(&entries, start);
        // Without that list nobody knows what is to be trusted.
        let has_closed = entries.iter().any(|entry| entry.name.as_deref() == Some(CLOSED));
        let closed = Closed::read(&*files, dir, has_closed).map_err(io_error("read", &dir.join(CLOSED)))?;
        let shared = Mutex::new(Shared { status, accounts, closed, ..Shared::default() });
        let inner = Arc::new(Inner {
            files,
            dir: dir.to_owned(),
            lock,
            shared,
            changed: Condvar::new(),
            idle: OnceLock::new(),
        });
        let hands = Hands(Arc::clone(&inner));
        Ok((Self { inner, threads: Vec::new() }, items, hands))
    }

    /// Calls `told` on the thread that writes whenever nothing more is to be written. The first one stays.
    pub fn when_idle(&self, told: impl Fn() + Send + Sync + 'static) {
        // A second one has nothing to add.
        let _ = self.inner.idle.set(Box::new(told));
    }

    /// How often [`Self::close_class`] was called for a class, by this process and those before it.
    pub fn times_closed(&self, class: &str) -> usize {
        self.inner.lock().closed.times(class)
    }

    /// What was stored of a class is not to be trusted: whoever uses it later learns of it by [`Self::times_closed`].
    ///
    /// # Panics
    ///
    /// If its name is more than a line.
    pub fn close_class(&self, class: &str) {
        self.inner.lock().closed.close(class);
        self.inner.changed.notify_all();
    }

    /// Queues a file to be written; `payload` is called when its turn comes, and may find that there is nothing to write.
    /// False if it is dropped.
    pub fn put(&self, header: Header, payload: impl FnOnce() -> Option<Vec<u8>> + Send + 'static) -> bool {
        let mut shared = self.inner.lock();
        if shared.writes.len() >= MAX_QUEUED_WRITES || !shared.writing.admits() {
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

    /// Queues a job that reads files of `layout`; when its turn comes it is called with what reads one. False if it is
    /// refused.
    pub fn fetch(&self, layout: u32, job: impl FnOnce(&dyn Fn(Name) -> Read) + Send + 'static) -> bool {
        let mut shared = self.inner.lock();
        if shared.jobs.len() >= MAX_QUEUED_READS || !shared.reading.admits() {
            shared.status.refused_reads += 1;
            return false;
        }
        shared.jobs.push_back((layout, Box::new(job)));
        self.inner.changed.notify_all();
        true
    }

    /// Reads a file whole and checks it, at once.
    pub fn read(&self, name: Name, layout: u32) -> Read {
        self.inner.read(name, layout)
    }

    /// Files that were to be written and are not, since the last call.
    pub fn take_lost(&self) -> Vec<Name> {
        std::mem::take(&mut self.inner.lock().lost)
    }

    /// Counts and gauges.
    pub fn status(&self) -> Status {
        let shared = self.inner.lock();
        let (write_failure, read_failure) = (shared.writing.reason().cloned(), shared.reading.reason().cloned());
        let foreign_bytes = shared.accounts.foreign_bytes();
        Status { write_failure, read_failure, foreign_bytes, ..shared.status.clone() }
    }

    /// Waits until everything queued to be written or removed is done, but not for ever: after `patience` what is left is
    /// dropped and counted, and the store can only be closed.
    pub fn flush(&self, patience: Duration) {
        let start = Instant::now();
        let mut shared = self.inner.lock();
        // Without threads nobody would ever do it.
        while !self.threads.is_empty() && !shared.given_up && (shared.has_writes() || shared.busy.is_some()) {
            let left = patience.saturating_sub(start.elapsed());
            shared.given_up = left.is_zero();
            shared = self.inner.changed.wait_timeout(shared, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if shared.given_up && shared.has_writes() {
            tracing::warn!(
                dir = %self.inner.dir.display(),
                "the disk is too slow: {} blocks are not stored, {} files not removed",
                shared.writes.len(),
                shared.removals.len()
            );
            shared.status.dropped += shared.writes.len() as u64;
            shared.writes.clear();
            shared.removals.clear();
            shared.closed.unwritten = None;
        }
    }

    /// As [`Self::flush`], as long as a store may take to close.
    pub fn finish(&self) {
        self.flush(MAX_CLOSING);
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let start = Instant::now();
        self.flush(MAX_CLOSING);
        let mut shared = self.inner.lock();
        shared.stopping = true;
        shared.jobs.clear();
        let patience = if shared.given_up { Duration::ZERO } else { MAX_CLOSING };
        drop(shared);
        self.inner.changed.notify_all();
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && start.elapsed() < patience {
                std::thread::sleep(Duration::from_micros(100));
            }
            if !thread.is_finished() {
                // In a call of the operating system that does not return. It ends with the process.
                tracing::warn!(dir = %self.inner.dir.display(), "the disk does not answer");
            } else if thread.join().is_err() {
                tracing::error!("a thread of the store ended with a panic");
            }
        }
    }
}

impl Hands {
    /// True if something is to be written or removed.
    pub fn has_writes(&self) -> bool {
        self.0.lock().has_writes()
    }

    /// True if something is to be read.
    pub fn has_reads(&self) -> bool {
        !self.0.lock().jobs.is_empty()
    }

    /// Removes or writes the file whose turn it is; removals first, since they make room.
    pub fn write_one(&self) {
        let mut shared = self.0.lock();
        if shared.closed.unwritten.is_some() {
            let text = shared.closed.text();
            drop(shared);
            self.0.write_closed(&text);
        } else if let Some(name) = shared.removals.pop_front() {
            shared.busy = Some(name);
            drop(shared);
            let removed = self.0.files.remove(&self.0.dir.join(name.to_string()));
            let mut shared = self.0.lock();
            // What is gone already is as good, and what cannot go is not ours any more.
            let was_there = shared.accounts.removed(name);
            if removed.is_err_and(|error| was_there || error.kind() != io::ErrorKind::NotFound) {
                shared.accounts.distrust();
            }
        } else if let Some((header, payload)) = shared.writes.pop_front() {
            shared.busy = Some(header.name);
            drop(shared);
            self.0.write_and_note(&header, payload);
        }
        let mut shared = self.0.lock();
        shared.busy = None;
        let is_idle = !shared.has_writes();
        drop(shared);
        self.0.changed.notify_all();
        if let Some(told) = self.0.idle.get().filter(|_| is_idle) {
            told();
        }
    }

    /// Does the job of reading whose turn it is.
    pub fn read_one(&self) {
        let job = self.0.lock().jobs.pop_front();
        if let Some((layout, job)) = job {
            job(&|name| self.0.read(name, layout));
        }
    }

    /// A thread's life: ends when everything is done and nothing more will come.
    fn write_all(&self) {
        while self.0.wait_for(Shared::has_writes) {
            self.write_one();
        }
    }

    fn read_all(&self) {
        while self.0.wait_for(|shared| !shared.jobs.is_empty()) {
            self.read_one();
        }
    }
}

impl Shared {
    fn has_writes(&self) -> bool {
        !(self.writes.is_empty() && self.removals.is_empty() && self.closed.unwritten.is_none())
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, shared: MutexGuard<'a, Shared>) -> MutexGuard<'a, Shared> {
        self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for work; false if there is none and the store closes.
    fn wait_for(&self, work: impl Fn(&Shared) -> bool) -> bool {
        let mut shared = self.lock();
        while !work(&shared) {
            if shared.stopping {
                return false;
            }
            shared = self.wait(shared);
        }
        true
    }

    fn read(&self, name: Name, layout: u32) -> Read {
        let file = match self.files.read(&self.dir.join(name.to_string()), u64::MAX) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Read::Missing,
            Err(error) => {
                let mut shared = self.lock();
                shared.status.failed_reads += 1;
                tracing::warn!(file = %name, %error, "a stored block cannot be read");
                if shared.reading.failed(error.to_string(), false) {
                    tracing::warn!(dir = %self.dir.display(), "the disk does not give back what is stored: it is asked seldom");
                }
                return Read::Missing;
            }
        };
        let checked = Header::split(name, &file);
        let mut shared = self.lock();
        if shared.reading.succeeded() {
            tracing::info!(dir = %self.dir.display(), "the disk gives back what is stored again");
        }
        match checked {
            Ok((header, payload)) if header.layout == layout => {
                shared.status.read += 1;
                drop(shared);
                Read::Found(payload.to_vec())
            }
            Ok(_) => Read::Missing,
            Err(reason) => {
                shared.status.quarantined += 1;
                shared.accounts.set_aside(name, file.len() as u64);
                drop(shared);
                set_aside(&*self.files, &self.dir, name, reason);
                Read::Damaged
            }
        }
    }

    fn write_closed(&self, text: &str) {
        let written = match self.lock.is_in_place() {
            true => self.replace_file(CLOSED, &[text.as_bytes()]),
            false => Err(replaced()),
        };
        let mut shared = self.lock();
        // A listing sees how long it is now.
        shared.accounts.distrust();
        // Another class may have been closed meanwhile.
        let is_all = shared.closed.text() == text;
        match written {
            Ok(()) => shared.closed.unwritten = if is_all { None } else { Some(0) },
            Err(error) => {
                let failed = shared.closed.unwritten.unwrap_or(0) + 1;
                shared.closed.unwritten = (failed < MAX_ATTEMPTS).then_some(failed);
                if failed == MAX_ATTEMPTS {
                    let dir = self.dir.display();
                    tracing::error!(%dir, %error, "prefixes with wrong numbers may be used after a restart: run `troika cache clear`");
                }
            }
        }
    }

    /// Writes a file so that it is there whole or not at all.
    fn replace_file(&self, name: &str, parts: &[&[u8]]) -> io::Result<()> {
        let count = {
            let mut shared = self.lock();
            shared.temporaries += 1;
            shared.temporaries
        };
        let temporary = self.dir.join(format!("{TEMPORARY}{}-{count}", std::process::id()));
        let written = self.files.write(&temporary, parts);
        let renamed = written.and_then(|()| self.files.rename(&temporary, &self.dir.join(name)));
        if renamed.is_err() {
            let _ = self.files.remove(&temporary);
        }
        renamed?;
        // So that the name outlives a loss of power. Where directories cannot be synced, the name may be lost.
        let _ = self.files.sync_dir(&self.dir);
        Ok(())
    }

    fn write_and_note(&self, header: &Header, payload: Payload) {
        let done = self.write(header, payload);
        let is_ours = done.is_ok() || self.lock.is_in_place();
        let mut shared = self.lock();
        match done {
            Ok(true) => {
                shared.status.written += 1;
                if shared.writing.succeeded() {
                    tracing::info!(dir = %self.dir.display(), "blocks are stored on disk again");
                }
            }
            Ok(false) => {
                shared.status.dropped += 1;
                shared.lost.push(header.name);
            }
            Err(error) => {
                shared.status.failed_writes += 1;
                shared.accounts.distrust();
                shared.lost.push(header.name);
                tracing::warn!(file = %header.name, %error, "a block cannot be stored");
                if shared.writing.failed(error.to_string(), !is_ours) {
                    let until = if is_ours { "until the disk takes one again" } else { "until the next start" };
                    tracing::warn!(dir = %self.dir.display(), "nothing more is stored on disk {until}");
                    let waiting: Vec<Name> = shared.writes.drain(..).map(|(header, _)| header.name).collect();
                    shared.lost.extend(waiting);
                }
            }
        }
    }

    /// Writes one file so that it is there whole or not at all. False if there is no room, or nothing to write.
    fn write(&self, header: &Header, payload: Payload) -> io::Result<bool> {
        if !self.lock.is_in_place() {
            return Err(replaced());
        }
        let is_due = self.lock().accounts.is_due();
        if is_due {
            let start = Instant::now();
            let entries = self.files.list(&self.dir)?;
            self.lock().accounts.take_listing(&entries, start);
        }
        let (limit, used) = {
            let shared = self.lock();
            (shared.status.limit_bytes, shared.accounts.total_bytes())
        };
        let file_bytes = HEADER_BYTES as u64 + header.payload_bytes;
        if used.saturating_add(file_bytes) > limit {
            return Ok(false);
        }
        let Some(payload) = payload() else { return Ok(false) };
        debug_assert_eq!(payload.len() as u64, header.payload_bytes, "the payload is as long as announced");
        self.replace_file(&header.name.to_string(), &[&header.encode(&payload), &payload])?;
        self.lock().accounts.written(header.name, file_bytes);
        Ok(true)
    }
}

fn replaced() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the directory was removed or replaced")
}

pub(crate) fn io_error(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |reason| StoreError::Io { op, path, reason }
}
