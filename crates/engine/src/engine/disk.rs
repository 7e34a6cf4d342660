//! The tier on disk, below the one in memory: what is stored in memory is written behind, what only the disk has is brought
//! up when a prefix is looked up.

use std::collections::BTreeMap;
use std::sync::Arc;

use troika_device::StateShape;
use troika_device::state::{BlockRows, Boundary};
use troika_kvcache::{BlockHash, BlockId, Cache, Evicted};
use troika_kvstore::format::HEADER_BYTES;
use troika_kvstore::{Header, Item, Kind, Name, Read, Store};

use super::prefix::LAYOUT_VERSION;
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

/// The store, and the index that decides what is in it.
pub(super) struct Disk {
    store: Store,
    index: Cache,
    names: BTreeMap<BlockId, BlockHash>,
    limit_bytes: u64,
}

impl Disk {
    /// Takes up what is there; what is beyond the limit or has lost its parent goes.
    pub(super) fn new(store: Store, items: Vec<Item>) -> Self {
        let status = store.status();
        let index = Cache::new(status.limit_bytes.saturating_sub(status.foreign_bytes));
        let mut disk = Self { store, index, names: BTreeMap::new(), limit_bytes: status.limit_bytes };
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
            self.forget(name.hash, &mut gone);
        }
        let mut evicted = Vec::new();
        let limit = self.limit_bytes.saturating_sub(self.store.status().foreign_bytes);
        self.index.set_limit(limit, &mut evicted);
        self.note_evicted(&evicted, &mut gone);
        self.store.remove(&gone);
    }

    fn forget(&mut self, hash: BlockHash, gone: &mut Vec<Name>) {
        if let Some(id) = self.index.block(&hash) {
            let mut evicted = Vec::new();
            self.index.forget(id, &mut evicted);
            self.note_evicted(&evicted, gone);
        }
    }

    pub(super) fn put_rows(&mut self, depth: u32, parent: BlockHash, hash: BlockHash, rows: &Arc<BlockRows>) {
        self.settle();
        let mut gone = Vec::new();
        let new = self.insert(depth, &parent, hash, HEADER_BYTES as u64 + rows.bytes(), &mut gone);
        self.store.remove(&gone);
        if new.is_some() {
            let rows = Arc::clone(rows);
            self.put(Kind::Rows, depth, parent, hash, rows.bytes(), move || bytes_of(rows.floats()));
        }
    }

    pub(super) fn put_boundary(&mut self, depth: u32, parent: BlockHash, hash: BlockHash, boundary: &Arc<Boundary>) {
        self.settle();
        let mut gone = Vec::new();
        let new = self.insert_boundary(hash, HEADER_BYTES as u64 + boundary.bytes(), &mut gone);
        self.store.remove(&gone);
        if new {
            let boundary = Arc::clone(boundary);
            self.put(Kind::Boundary, depth, parent, hash, boundary.bytes(), move || bytes_of(boundary.floats()));
        }
    }

    fn put(
        &mut self,
        kind: Kind,
        depth: u32,
        parent: BlockHash,
        hash: BlockHash,
        payload_bytes: u64,
        payload: impl FnOnce() -> Vec<u8> + Send + 'static,
    ) {
        let header = Header { name: Name { kind, hash }, layout: LAYOUT_VERSION, depth, parent, payload_bytes };
        if !self.store.put(header, payload) {
            let mut gone = Vec::new();
            self.forget(hash, &mut gone);
            self.store.remove(&gone);
        }
    }

    /// A boundary that something better has made worthless.
    pub(super) fn drop_boundary(&mut self, hash: BlockHash) {
        if let Some(id) = self.index.block(&hash)
            && self.index.drop_boundary(id)
        {
            self.store.remove(&[Name { kind: Kind::Boundary, hash }]);
        }
    }

    /// Blocks of `chain` after which a sequence could resume from here.
    pub(super) fn peek(&self, chain: &[BlockHash]) -> usize {
        self.index.peek(chain)
    }

    pub(super) fn read_rows(&mut self, hash: BlockHash, shape: &StateShape) -> Option<BlockRows> {
        let floats = self.read(Name { kind: Kind::Rows, hash })?;
        let rows = BlockRows::from_floats(shape, &floats);
        rows.inspect_err(|error| tracing::warn!(%error, block = %hash, "a stored block is of another model")).ok()
    }

    pub(super) fn read_boundary(&mut self, hash: BlockHash, len: usize, shape: &StateShape) -> Option<Boundary> {
        let floats = self.read(Name { kind: Kind::Boundary, hash })?;
        let boundary = Boundary::from_floats(shape, len, &floats);
        boundary.inspect_err(|error| tracing::warn!(%error, block = %hash, "a stored block is of another model")).ok()
    }

    /// What cannot be read is forgotten, with everything that follows it.
    fn read(&mut self, name: Name) -> Option<Vec<f32>> {
        match self.store.read(name, LAYOUT_VERSION) {
            Read::Found(bytes) => {
                let floats = bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
                Some(floats.collect())
            }
            Read::Missing | Read::Damaged => {
                let mut gone = Vec::new();
                self.forget(name.hash, &mut gone);
                self.store.remove(&gone);
                None
            }
        }
    }

    pub(super) fn report(&self, status: &mut CacheStatus) {
        let store = self.store.status();
        status.disk_limit_bytes = self.limit_bytes;
        status.disk_used_bytes = self.index.used_bytes() + store.foreign_bytes;
        status.disk_blocks = self.index.num_blocks();
        (status.disk_read, status.disk_written) = (store.read, store.written);
        (status.disk_dropped, status.disk_quarantined) = (store.dropped, store.quarantined);
        status.disk_failed = store.failure.is_some();
    }

    pub(super) fn flush(&self) {
        self.store.flush();
    }
}

fn bytes_of<'a>(floats: impl Iterator<Item = &'a [f32]>) -> Vec<u8> {
    floats.flatten().flat_map(|x| x.to_le_bytes()).collect()
}
