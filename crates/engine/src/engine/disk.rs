//! The tier on disk, below the one in memory: what is stored in memory is written behind, what only the disk has is brought
//! up when a prefix is looked up. Files are read on the store's thread; meanwhile other sequences go on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use troika_device::StateShape;
use troika_device::state::{AttachError, BlockRows, Boundary, Packing};
use troika_kvcache::{BlockHash, BlockId, Cache, Evicted, LeaseId};
use troika_kvstore::format::HEADER_BYTES;
use troika_kvstore::{Header, Item, Kind, Name, Read, Store};

use crate::api::CacheStatus;

/// A store that is open, and what the rows in it depend on.
pub struct DiskTier {
    /// The store.
    pub store: Store,
    /// What was there when it was opened.
    pub items: Vec<Item>,
    /// Digest of the weights.
    pub weights: Vec<u8>,
    /// Digest of the tokenizer.
    pub tokenizer: Vec<u8>,
}

/// A sequence does without what is kept of it if no file of it has arrived for so long.
const MAX_SILENCE_US: u64 = 10_000_000;
/// An engine that ends waits so long for what is to be written.
const MAX_FLUSH: Duration = Duration::from_secs(20);

/// Names what is being read for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LoadId(u64);

/// Files being read.
struct Load {
    lease: LeaseId,
    progress: Arc<Progress>,
    /// Files that had arrived when that was last looked at, and since when it was so many.
    seen: (usize, u64),
    /// Somebody waits for it.
    awaited: bool,
}

#[derive(Default)]
struct Progress {
    files: AtomicUsize,
    cancelled: AtomicBool,
}

/// What was read: the blocks of a prefix from some point on, as far as they could be.
pub(super) struct Loaded {
    pub(super) id: LoadId,
    /// The block of the sequence that comes first in `rows`.
    pub(super) first: usize,
    pub(super) rows: Vec<BlockRows>,
    pub(super) boundary: Option<Boundary>,
    /// Could not be read, or was damaged.
    failed: Option<Name>,
}

/// What to read.
pub(super) struct Wanted<'a> {
    /// Blocks up to the one after which the sequence can resume.
    pub(super) chain: &'a [BlockHash],
    /// Leading ones of them that memory has.
    pub(super) in_memory: usize,
    /// Whether the boundary after the last one is to be read too.
    pub(super) boundary: bool,
    /// Tokens before that boundary.
    pub(super) len: usize,
}

/// The store, and the index that decides what is in it.
pub(super) struct Disk {
    store: Store,
    index: Cache,
    names: BTreeMap<BlockId, BlockHash>,
    limit_bytes: u64,
    shape: Arc<StateShape>,
    packing: Packing,
    /// Everything being read, awaited or not.
    loads: BTreeMap<LoadId, Load>,
    next_load: u64,
    loaded: (Sender<Loaded>, Receiver<Loaded>),
    /// Called on the store's thread when something has been read.
    wake: Arc<dyn Fn() + Send + Sync>,
    /// Loads that took too long.
    num_silent: u64,
}

impl Disk {
    /// Takes up what is there; what is beyond the limit or has lost its parent goes.
    pub(super) fn new(
        store: Store,
        items: Vec<Item>,
        shape: &StateShape,
        packing: Packing,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let status = store.status();
        let index = Cache::new(status.limit_bytes.saturating_sub(status.foreign_bytes));
        let mut disk = Self {
            store,
            index,
            names: BTreeMap::new(),
            limit_bytes: status.limit_bytes,
            shape: Arc::new(shape.clone()),
            packing,
            loads: BTreeMap::new(),
            next_load: 0,
            loaded: channel(),
            wake: Arc::new(wake),
            num_silent: 0,
        };
        let mut gone = Vec::new();
        for Item { header, file_bytes } in items {
            let taken = match header.name.kind {
                Kind::Rows => {
                    disk.insert(header.depth, &header.parent, header.name.hash, file_bytes, &mut gone).is_some()
                }
                Kind::Boundary => disk.insert_boundary(header.name.hash, file_bytes, &mut gone),
            };
            if !taken {
                gone.push(header.name);
            }
        }
        disk.store.remove(&gone);
        // What the store counts shows in the status also if nobody asks for anything meanwhile.
        let wake = Arc::clone(&disk.wake);
        disk.store.when_idle(move || wake());
        disk
    }

    /// The block's place if it is new here.
    fn insert(
        &mut self,
        depth: u32,
        parent: &BlockHash,
        hash: BlockHash,
        bytes: u64,
        gone: &mut Vec<Name>,
    ) -> Option<BlockId> {
        let parent = if depth == 1 { None } else { Some(self.index.block(parent)?) };
        let mut evicted = Vec::new();
        let inserted = self.index.insert(parent, hash, bytes, &mut evicted);
        self.note_evicted(&evicted, gone);
        match inserted {
            Ok((id, true)) => {
                self.names.insert(id, hash);
                Some(id)
            }
            _ => None,
        }
    }

    /// Whether the boundary is new here.
    fn insert_boundary(&mut self, hash: BlockHash, bytes: u64, gone: &mut Vec<Name>) -> bool {
        let Some(id) = self.index.block(&hash) else { return false };
        let mut evicted = Vec::new();
        let inserted = self.index.insert_boundary(id, bytes, &mut evicted);
        self.note_evicted(&evicted, gone);
        inserted == Ok(true)
    }

    fn note_evicted(&mut self, evicted: &[Evicted], gone: &mut Vec<Name>) {
        for evicted in evicted {
            match evicted {
                Evicted::Block(id) => {
                    if let Some(hash) = self.names.remove(id) {
                        gone.extend([Kind::Boundary, Kind::Rows].map(|kind| Name { kind, hash }));
                    }
                }
                Evicted::Boundary(id) => {
                    gone.extend(self.names.get(id).map(|hash| Name { kind: Kind::Boundary, hash: *hash }));
                }
            }
        }
    }

    /// Keeps up with what the store has lost and with bytes of others under its directory.
    fn settle(&mut self) {
        let mut gone = Vec::new();
        for name in self.store.take_lost() {
            self.forget(name, &mut gone);
        }
        let mut evicted = Vec::new();
        let limit = self.limit_bytes.saturating_sub(self.store.status().foreign_bytes);
        self.index.set_limit(limit, &mut evicted);
        self.note_evicted(&evicted, &mut gone);
        self.store.remove(&gone);
    }

    /// Forgets a boundary, or a block with everything that follows it.
    fn forget(&mut self, name: Name, gone: &mut Vec<Name>) {
        let Some(id) = self.index.block(&name.hash) else { return };
        match name.kind {
            Kind::Boundary if self.index.drop_boundary(id) => gone.push(name),
            Kind::Boundary | Kind::Rows => {
                let mut evicted = Vec::new();
                self.index.forget(id, &mut evicted);
                self.note_evicted(&evicted, gone);
            }
        }
    }

    pub(super) fn put_rows(&mut self, depth: u32, parent: BlockHash, hash: BlockHash, rows: &Arc<BlockRows>) {
        self.settle();
        let mut gone = Vec::new();
        let bytes = BlockRows::packed_bytes(&self.shape, self.packing);
        let new = self.insert(depth, &parent, hash, HEADER_BYTES as u64 + bytes, &mut gone);
        self.store.remove(&gone);
        if new.is_some() {
            let (rows, shape, packing) = (Arc::clone(rows), Arc::clone(&self.shape), self.packing);
            self.put(Kind::Rows, depth, parent, hash, bytes, move || packed(hash, rows.pack(&shape, packing)));
        }
    }

    pub(super) fn put_boundary(&mut self, depth: u32, parent: BlockHash, hash: BlockHash, boundary: &Arc<Boundary>) {
        self.settle();
        let mut gone = Vec::new();
        let bytes = boundary.packed_bytes(&self.shape, self.packing);
        let new = self.insert_boundary(hash, HEADER_BYTES as u64 + bytes, &mut gone);
        self.store.remove(&gone);
        if new {
            let (boundary, shape, packing) = (Arc::clone(boundary), Arc::clone(&self.shape), self.packing);
            self.put(Kind::Boundary, depth, parent, hash, bytes, move || packed(hash, boundary.pack(&shape, packing)));
        }
    }

    fn put(
        &mut self,
        kind: Kind,
        depth: u32,
        parent: BlockHash,
        hash: BlockHash,
        payload_bytes: u64,
        payload: impl FnOnce() -> Option<Vec<u8>> + Send + 'static,
    ) {
        let layout = self.packing.layout_version();
        let header = Header { name: Name { kind, hash }, layout, depth, parent, payload_bytes };
        if !self.store.put(header, payload) {
            let mut gone = Vec::new();
            self.forget(Name { kind, hash }, &mut gone);
            self.store.remove(&gone);
        }
    }

    /// What is stored of an arithmetic is not to be trusted.
    pub(super) fn close_class(&self, arithmetic: &str) {
        self.store.close_class(arithmetic);
    }

    /// A boundary that something better has made worthless.
    pub(super) fn drop_boundary(&mut self, hash: BlockHash) {
        if let Some(id) = self.index.block(&hash)
            && self.index.drop_boundary(id)
        {
            self.store.remove(&[Name { kind: Kind::Boundary, hash }]);
        }
    }

    /// A sequence resumed after `chain` with what memory has: that is use, too.
    pub(super) fn touch(&mut self, chain: &[BlockHash]) {
        if let Some(lease) = self.index.lookup(chain).lease {
            self.index.release(lease);
        }
    }

    /// Blocks of `chain` after which a sequence could resume from here.
    pub(super) fn peek(&self, chain: &[BlockHash]) -> usize {
        self.index.peek(chain)
    }

    /// Starts to read what memory lacks. `None` if the store refuses: too many wait, or the disk keeps failing.
    pub(super) fn load(&mut self, wanted: &Wanted<'_>, now_us: u64) -> Option<LoadId> {
        let id = LoadId(self.next_load);
        let missing = wanted.chain.get(wanted.in_memory..).unwrap_or_default();
        let mut names: Vec<Name> = missing.iter().map(|hash| Name { kind: Kind::Rows, hash: *hash }).collect();
        if let Some(hash) = wanted.chain.last().filter(|_| wanted.boundary) {
            names.push(Name { kind: Kind::Boundary, hash: *hash });
        }
        let progress = Arc::new(Progress::default());
        let (sender, wake) = (self.loaded.0.clone(), Arc::clone(&self.wake));
        let (shape, watched) = (Arc::clone(&self.shape), Arc::clone(&progress));
        let (first, len, packing) = (wanted.in_memory, wanted.len, self.packing);
        let job = move |read: &dyn Fn(Name) -> Read| {
            let mut loaded = Loaded { id, first, rows: Vec::new(), boundary: None, failed: None };
            loaded.read(&names, read, (&shape, packing), len, &watched);
            // If the engine is gone, nobody waits.
            let _ = sender.send(loaded);
            wake();
        };
        if !self.store.fetch(packing.layout_version(), job) {
            return None;
        }
        self.next_load += 1;
        // Nothing of it is to go while it is read.
        let lease = self.index.lookup(wanted.chain).lease?;
        self.loads.insert(id, Load { lease, progress, seen: (0, now_us), awaited: true });
        Some(id)
    }

    /// Nobody waits for it any more.
    pub(super) fn abandon(&mut self, id: LoadId) {
        if let Some(load) = self.loads.get_mut(&id) {
            load.awaited = false;
            load.progress.cancelled.store(true, Ordering::Relaxed);
        }
    }

    /// What has been read since the last call. What could not be is forgotten, with everything that follows it.
    pub(super) fn take_loaded(&mut self) -> Vec<Loaded> {
        let loaded: Vec<Loaded> = self.loaded.1.try_iter().collect();
        for Loaded { id, failed, .. } in &loaded {
            if let Some(load) = self.loads.remove(id) {
                self.index.release(load.lease);
            }
            let mut gone = Vec::new();
            failed.iter().for_each(|name| self.forget(*name, &mut gone));
            self.store.remove(&gone);
        }
        loaded
    }

    /// Loads of which nothing has been heard for too long; nobody waits for them any more.
    pub(super) fn take_silent(&mut self, now_us: u64) -> Vec<LoadId> {
        let mut silent = Vec::new();
        for (id, load) in self.loads.iter_mut().filter(|(_, load)| load.awaited) {
            let files = load.progress.files.load(Ordering::Relaxed);
            if files != load.seen.0 {
                load.seen = (files, now_us);
            }
            if now_us.saturating_sub(load.seen.1) > MAX_SILENCE_US {
                tracing::warn!("the disk does not answer: a prefix is computed again");
                silent.push(*id);
            }
        }
        self.num_silent += silent.len() as u64;
        silent.iter().for_each(|id| self.abandon(*id));
        silent
    }

    /// Sequences that wait for files.
    pub(super) fn num_awaited(&self) -> usize {
        self.loads.values().filter(|load| load.awaited).count()
    }

    /// # Panics
    ///
    /// If the books do not add up.
    pub(super) fn check_invariants(&self) {
        self.index.check_invariants();
        assert_eq!(self.index.num_leases(), self.loads.len(), "a lease for each load");
    }

    pub(super) fn report(&self, status: &mut CacheStatus) {
        let store = self.store.status();
        status.disk_limit_bytes = self.limit_bytes;
        status.disk_used_bytes = self.index.used_bytes() + store.foreign_bytes;
        status.disk_blocks = self.index.num_blocks();
        (status.disk_read, status.disk_written) = (store.read, store.written);
        (status.disk_dropped, status.disk_quarantined) = (store.dropped, store.quarantined);
        (status.disk_failed_reads, status.disk_failed_writes) = (store.failed_reads, store.failed_writes);
        status.disk_not_asked = store.refused_reads + self.num_silent;
        status.disk_loading = self.num_awaited();
        status.disk_failed = store.write_failure.is_some() || store.read_failure.is_some();
    }

    pub(super) fn flush(&self) {
        self.store.flush(MAX_FLUSH);
    }
}

impl Loaded {
    /// Reads one file after the other until one fails or nobody waits any more. On the store's thread.
    fn read(
        &mut self,
        names: &[Name],
        read: &dyn Fn(Name) -> Read,
        (shape, packing): (&StateShape, Packing),
        len: usize,
        progress: &Progress,
    ) {
        for name in names {
            if progress.cancelled.load(Ordering::Relaxed) {
                return;
            }
            let Read::Found(bytes) = read(*name) else {
                self.failed = Some(*name);
                return;
            };
            let taken: Result<(), AttachError> = match name.kind {
                Kind::Rows => BlockRows::unpack(shape, packing, &bytes).map(|rows| self.rows.push(rows)),
                Kind::Boundary => Boundary::unpack(shape, packing, len, &bytes).map(|it| self.boundary = Some(it)),
            };
            if let Err(error) = taken {
                tracing::warn!(%error, file = %name, "a stored block is of another model");
                self.failed = Some(*name);
                return;
            }
            progress.files.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Says so if there is nothing to write, for then something is wrong with the rows.
fn packed(hash: BlockHash, bytes: Option<Vec<u8>>) -> Option<Vec<u8>> {
    if bytes.is_none() {
        tracing::warn!(block = %hash, "rows are not what the numeric class makes of them: the block is not stored on disk");
    }
    bytes
}
