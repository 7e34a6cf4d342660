//! The index: blocks by name, a tree by parent, what each costs, and which go first.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use crate::hash::BlockHash;

/// Place of a block in the pool. Says nothing about its content; see [`BlockHash`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u64);

/// Blocks that must stay: from a lookup until the caller holds their bytes itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

/// What a lookup found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Release it once the bytes are attached. `None` if there is nowhere to resume.
    pub lease: Option<LeaseId>,
    /// Blocks up to the last boundary; the last one has it.
    pub blocks: Vec<BlockId>,
    /// Leading blocks whose rows are here, with or without a boundary.
    pub matched: usize,
}

/// Why something is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Skip {
    /// The block before it is not here.
    NoParent,
    /// Larger than everything that may go.
    NoRoom,
}

impl Skip {
    /// For records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoParent => "no_parent",
            Self::NoRoom => "no_room",
        }
    }
}

/// What the caller must forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evicted {
    /// Rows and boundary.
    Block(BlockId),
    /// The boundary alone.
    Boundary(BlockId),
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub lookups: u64,
    pub hits: u64,
    pub blocks_stored: u64,
    pub boundaries_stored: u64,
    pub blocks_evicted: u64,
    pub boundaries_evicted: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    hash: BlockHash,
    parent: Option<BlockId>,
    /// Blocks from the start to this one, itself included.
    depth: u32,
    children: u32,
    leases: u32,
    bytes: u64,
    /// 0 = none.
    boundary_bytes: u64,
    last_used: u64,
    boundary_used: u64,
}

/// Lower goes first: seldom used before often used, then little gained per byte before much.
type Worth = (Reverse<u32>, u64, Reverse<u32>, BlockId);

/// Victims are looked for anew after as many operations as this part of the blocks: so one costs little, however many blocks
/// there are. In between their ages are as they were, which powers of two forgive, and what has come in is no victim.
const STALE_PART: u64 = 8;

/// Decides what is kept under a limit of bytes.
#[derive(Debug)]
pub struct Cache {
    limit_bytes: u64,
    used_bytes: u64,
    entries: BTreeMap<BlockId, Entry>,
    by_hash: BTreeMap<BlockHash, BlockId>,
    leases: BTreeMap<LeaseId, Vec<BlockId>>,
    next: u64,
    /// Ticks at every lookup and store.
    clock: u64,
    counters: Counters,
    /// What may go, by its worth when it was looked at.
    victims: BinaryHeap<Reverse<Worth>>,
    /// The clock when all of them were.
    looked: u64,
}

impl Cache {
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            used_bytes: 0,
            entries: BTreeMap::new(),
            by_hash: BTreeMap::new(),
            leases: BTreeMap::new(),
            next: 0,
            clock: 0,
            counters: Counters::default(),
            victims: BinaryHeap::new(),
            looked: 0,
        }
    }

    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Bytes of everything kept.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub fn num_blocks(&self) -> usize {
        self.entries.len()
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The block of a name.
    pub fn block(&self, hash: &BlockHash) -> Option<BlockId> {
        self.by_hash.get(hash).copied()
    }

    pub fn has_boundary(&self, id: BlockId) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.boundary_bytes > 0)
    }

    /// Blocks of `chain` up to the last boundary that is here. Changes nothing.
    pub fn peek(&self, chain: &[BlockHash]) -> usize {
        let ids = chain.iter().map_while(|hash| self.by_hash.get(hash));
        ids.enumerate().filter(|(_, id)| self.has_boundary(**id)).map(|(index, _)| index + 1).last().unwrap_or(0)
    }

    /// From now on no more than `bytes` are kept.
    pub fn set_limit(&mut self, bytes: u64, evicted: &mut Vec<Evicted>) {
        self.limit_bytes = bytes;
        while self.used_bytes > self.limit_bytes {
            // Leases are short: what they hold goes next time.
            let Some(one) = self.evict_one(None) else { return };
            evicted.push(one);
        }
    }

    /// The longest prefix of `chain` that a sequence can resume after. Its blocks stay until the lease is released.
    pub fn lookup(&mut self, chain: &[BlockHash]) -> Found {
        self.clock += 1;
        self.counters.lookups += 1;
        let mut blocks: Vec<BlockId> = chain.iter().map_while(|hash| self.by_hash.get(hash).copied()).collect();
        let matched = blocks.len();
        let last = blocks.iter().rposition(|id| self.has_boundary(*id));
        blocks.truncate(last.map_or(0, |last| last + 1));
        for id in &blocks {
            self.entries.get_mut(id).expect("found above").last_used = self.clock;
        }
        let Some(last) = blocks.last() else { return Found { lease: None, blocks, matched } };
        self.entries.get_mut(last).expect("found above").boundary_used = self.clock;
        self.counters.hits += 1;
        Found { lease: Some(self.lease(&blocks)), blocks, matched }
    }

    /// Keeps blocks until the lease is released.
    ///
    /// # Panics
    ///
    /// If one of them is not here.
    pub fn lease(&mut self, blocks: &[BlockId]) -> LeaseId {
        let lease = LeaseId(self.next);
        self.next += 1;
        for id in blocks {
            self.entries.get_mut(id).expect("only what is here is leased").leases += 1;
        }
        self.leases.insert(lease, blocks.to_vec());
        lease
    }

    /// Leases that are not released.
    pub fn num_leases(&self) -> usize {
        self.leases.len()
    }

    /// # Panics
    ///
    /// If there is no such lease.
    pub fn release(&mut self, lease: LeaseId) {
        for id in self.leases.remove(&lease).expect("a lease is released once") {
            self.entries.get_mut(&id).expect("leased blocks stay").leases -= 1;
        }
    }

    /// Keeps a block that follows `parent` (`None`: the first). What had to go for it is added to `evicted`, also if there
    /// was not enough. A block that is here already stays as it is.
    ///
    /// # Errors
    ///
    /// If it cannot be kept.
    pub fn insert(
        &mut self,
        parent: Option<BlockId>,
        hash: BlockHash,
        bytes: u64,
        evicted: &mut Vec<Evicted>,
    ) -> Result<(BlockId, bool), Skip> {
        self.clock += 1;
        if let Some(id) = self.by_hash.get(&hash) {
            let (id, clock) = (*id, self.clock);
            self.entries.get_mut(&id).expect("indexed").last_used = clock;
            return Ok((id, false));
        }
        let depth = match parent {
            None => 1,
            Some(parent) => self.entries.get(&parent).ok_or(Skip::NoParent)?.depth + 1,
        };
        self.make_room(bytes, parent, evicted)?;
        let id = BlockId(self.next);
        self.next += 1;
        let entry = Entry {
            hash,
            parent,
            depth,
            children: 0,
            leases: 0,
            bytes,
            boundary_bytes: 0,
            last_used: self.clock,
            boundary_used: 0,
        };
        self.entries.insert(id, entry);
        self.by_hash.insert(hash, id);
        self.used_bytes += bytes;
        self.counters.blocks_stored += 1;
        if let Some(parent) = parent {
            self.entries.get_mut(&parent).expect("it was kept").children += 1;
        }
        Ok((id, true))
    }

    /// Makes the end of a block a place to resume. False if it is one already.
    ///
    /// # Errors
    ///
    /// If it cannot be kept.
    pub fn insert_boundary(&mut self, id: BlockId, bytes: u64, evicted: &mut Vec<Evicted>) -> Result<bool, Skip> {
        self.clock += 1;
        let entry = self.entries.get(&id).ok_or(Skip::NoParent)?;
        if entry.boundary_bytes > 0 {
            return Ok(false);
        }
        self.make_room(bytes, Some(id), evicted)?;
        let entry = self.entries.get_mut(&id).expect("it was kept");
        entry.boundary_bytes = bytes.max(1);
        entry.boundary_used = self.clock;
        self.used_bytes += bytes.max(1);
        self.counters.boundaries_stored += 1;
        Ok(true)
    }

    /// Forgets a boundary that something better has made worthless, unless a lease holds it.
    pub fn drop_boundary(&mut self, id: BlockId) -> bool {
        let Some(entry) = self.entries.get_mut(&id).filter(|entry| entry.leases == 0) else { return false };
        self.used_bytes -= std::mem::take(&mut entry.boundary_bytes);
        self.note_victim(id);
        true
    }

    /// Forgets a block that turned out to be damaged, and everything that follows it. Leased ones too: who holds a lease has
    /// yet to attach, and will find nothing.
    pub fn forget(&mut self, id: BlockId, evicted: &mut Vec<Evicted>) {
        let children: Vec<BlockId> =
            self.entries.iter().filter(|(_, entry)| entry.parent == Some(id)).map(|(id, _)| *id).collect();
        for child in children {
            self.forget(child, evicted);
        }
        self.leases.values_mut().for_each(|blocks| blocks.retain(|other| *other != id));
        if self.entries.contains_key(&id) {
            self.remove(id);
            evicted.push(Evicted::Block(id));
        }
    }

    /// Evicts until `bytes` more fit; `keep` stays.
    fn make_room(&mut self, bytes: u64, keep: Option<BlockId>, evicted: &mut Vec<Evicted>) -> Result<(), Skip> {
        // At least one byte each, so that nothing is free.
        let bytes = bytes.max(1);
        while self.used_bytes.saturating_add(bytes) > self.limit_bytes {
            if bytes > self.limit_bytes {
                return Err(Skip::NoRoom);
            }
            evicted.push(self.evict_one(keep).ok_or(Skip::NoRoom)?);
        }
        Ok(())
    }

    /// Lets go of what is worth least, but for `keep` and what is leased.
    fn evict_one(&mut self, keep: Option<BlockId>) -> Option<Evicted> {
        let id = self.next_victim(keep)?;
        if self.entries.get(&id)?.children == 0 {
            self.remove(id);
            self.counters.blocks_evicted += 1;
            return Some(Evicted::Block(id));
        }
        let entry = self.entries.get_mut(&id)?;
        self.used_bytes -= std::mem::take(&mut entry.boundary_bytes);
        self.counters.boundaries_evicted += 1;
        Some(Evicted::Boundary(id))
    }

    /// What is worth least, but for `keep` and what is leased.
    fn next_victim(&mut self, keep: Option<BlockId>) -> Option<BlockId> {
        if self.clock - self.looked > self.entries.len() as u64 / STALE_PART {
            self.look_for_victims();
        }
        self.take_victim(keep).or_else(|| {
            self.look_for_victims();
            self.take_victim(keep)
        })
    }

    fn take_victim(&mut self, keep: Option<BlockId>) -> Option<BlockId> {
        let (mut stay, mut found) = (Vec::new(), None);
        while let Some(Reverse(noted)) = self.victims.pop() {
            // It may have gone since, or got children.
            let Some(now) = self.worth_of_victim(noted.3) else { continue };
            if now > noted {
                // Used since.
                self.victims.push(Reverse(now));
            } else if Some(now.3) == keep || self.entries[&now.3].leases > 0 {
                stay.push(Reverse(now));
            } else {
                found = Some(now.3);
                break;
            }
        }
        self.victims.extend(stay);
        found
    }

    fn look_for_victims(&mut self) {
        self.victims = self.entries.keys().filter_map(|id| self.worth_of_victim(*id)).map(Reverse).collect();
        self.looked = self.clock;
    }

    /// Its worth has become less, other than by age.
    fn note_victim(&mut self, id: BlockId) {
        self.victims.extend(self.worth_of_victim(id).map(Reverse));
    }

    fn worth_of_victim(&self, id: BlockId) -> Option<Worth> {
        let entry = self.entries.get(&id).filter(|entry| entry.children == 0 || entry.boundary_bytes > 0)?;
        Some(self.worth(id, entry))
    }

    fn remove(&mut self, id: BlockId) {
        let entry = self.entries.remove(&id).expect("it is here");
        self.by_hash.remove(&entry.hash);
        self.used_bytes -= entry.bytes + entry.boundary_bytes;
        if let Some(parent) = entry.parent
            && let Some(entry) = self.entries.get_mut(&parent)
        {
            entry.children -= 1;
            // Perhaps a leaf now.
            self.note_victim(parent);
        }
    }

    /// What losing a leaf, or the boundary of an inner block, would cost: the blocks to compute again from the boundary
    /// before it.
    fn worth(&self, id: BlockId, entry: &Entry) -> Worth {
        let used = if entry.boundary_bytes > 0 { entry.boundary_used } else { entry.last_used };
        let age = (self.clock.saturating_sub(used) + 1).ilog2();
        let freed = entry.boundary_bytes + if entry.children == 0 { entry.bytes } else { 0 };
        let blocks_lost = if entry.boundary_bytes > 0 { self.blocks_since_boundary(entry) } else { 0 };
        let gain = blocks_lost.saturating_mul(1 << 32) / freed.max(1);
        (Reverse(age), gain, Reverse(entry.depth), id)
    }

    fn blocks_since_boundary(&self, entry: &Entry) -> u64 {
        let (mut blocks, mut parent) = (1, entry.parent);
        while let Some(before) = parent.and_then(|id| self.entries.get(&id)) {
            if before.boundary_bytes > 0 {
                break;
            }
            (blocks, parent) = (blocks + 1, before.parent);
        }
        blocks
    }

    /// # Panics
    ///
    /// If the books do not add up.
    pub fn check_invariants(&self) {
        let used: u64 = self.entries.values().map(|entry| entry.bytes + entry.boundary_bytes).sum();
        assert_eq!(used, self.used_bytes, "bytes");
        assert!(used <= self.limit_bytes, "{used} bytes of {}", self.limit_bytes);
        assert_eq!(self.by_hash.len(), self.entries.len(), "one name each");
        let mut children: BTreeMap<BlockId, u32> = BTreeMap::new();
        for (id, entry) in &self.entries {
            assert_eq!(self.by_hash.get(&entry.hash), Some(id), "{id:?} by name");
            let leases = self.leases.values().flatten().filter(|leased| *leased == id).count();
            assert_eq!(leases, entry.leases as usize, "{id:?} leases");
            let depth = entry.parent.map_or(0, |parent| {
                *children.entry(parent).or_default() += 1;
                self.entries.get(&parent).expect("a parent stays as long as its children").depth
            });
            assert_eq!(entry.depth, depth + 1, "{id:?} depth");
        }
        for (id, entry) in &self.entries {
            assert_eq!(entry.children, children.get(id).copied().unwrap_or(0), "{id:?} children");
        }
    }
}
