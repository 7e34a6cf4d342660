//! Prefixes that need not be computed again: the index decides ([`troika_kvcache`]), this module holds the rows.
//!
//! Blocks are stored as soon as their rows are committed, so that a request that is cancelled after its first token has left
//! its prompt behind. Boundaries are caught where resuming is worth while: at every granule, at the end of what is known of a
//! sequence, where an earlier prompt parted from this one, and at the end of the answer.

use std::collections::BTreeMap;
use std::sync::Arc;

use troika_device::state::{BlockRows, Boundary, Packing};
use troika_device::{SequenceState, StateShape};
use troika_kvcache::{BlockHash, BlockId, Cache, Evicted, Identity, LeaseId, Skip};

use super::disk::{Disk, DiskTier, LoadId, Loaded, Wanted};
use crate::api::{CacheStatus, Divergence, RequestRecord};

/// Where a sequence stands with the cache.
#[derive(Debug)]
pub(super) struct Thread {
    root: BlockHash,
    block_tokens: usize,
    /// Names of the whole blocks of its tokens, as far as they were needed.
    chain: Vec<BlockHash>,
    /// Leading blocks that are stored.
    stored: usize,
    last: Option<BlockId>,
    /// Leading blocks whose rows another sequence had left.
    matched: usize,
    /// Boundary within the answer; the next one makes it worthless.
    answer_boundary: Option<(BlockId, BlockHash)>,
    /// Why nothing more is stored.
    skipped: Option<Skip>,
    /// Blocks with rows that are of no single class: decode steps wrote some, or engines that cannot be repeated.
    mixed: usize,
    /// Blocks brought up from disk for it.
    from_disk: usize,
    /// Where the sequence parted from everything that others had left.
    diverged: Option<Divergence>,
}

/// A place to resume.
pub(super) struct Hit {
    pub(super) state: SequenceState,
    /// Tokens it has.
    pub(super) len: usize,
}

/// The rows of every block in the index.
pub(super) struct Prefixes {
    cache: Cache,
    block_tokens: usize,
    granule: usize,
    blocks: BTreeMap<BlockId, Kept>,
    /// Tokens of each block, by the name of the block before it: to say where a prompt parts from what is kept.
    tokens: BTreeMap<(BlockHash, BlockId), Box<[u32]>>,
    boundaries: BTreeMap<BlockId, Arc<Boundary>>,
    identity: CacheIdentity,
    disk: Option<Disk>,
    /// Blocks in memory that stay until what follows them has been read.
    loads: BTreeMap<LoadId, LeaseId>,
    status: CacheStatus,
}

/// What is held of a block.
struct Kept {
    rows: Arc<BlockRows>,
    parent: BlockHash,
}

/// What all blocks of an engine depend on.
#[derive(Clone, Debug, Default)]
pub(super) struct CacheIdentity {
    pub(super) weights: Vec<u8>,
    pub(super) tokenizer: Vec<u8>,
    pub(super) arithmetic: String,
    /// How often the class was closed since its rows were not to be trusted.
    pub(super) closed: usize,
    pub(super) packing: Packing,
    pub(super) sharing: Sharing,
}

/// Which rows of a sequence may serve another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Every one.
    #[default]
    All,
    /// Decode steps write rows of another class: blocks that hold any are not kept, and nothing after them.
    Prompts,
    /// Engines compute what the primary device cannot repeat: a row's bits depend on the tile that it met.
    Nothing,
}

impl Prefixes {
    pub(super) fn new(limit_bytes: u64, block_tokens: usize, granule: usize, identity: CacheIdentity) -> Self {
        Self {
            cache: Cache::new(limit_bytes),
            block_tokens,
            granule,
            blocks: BTreeMap::new(),
            tokens: BTreeMap::new(),
            boundaries: BTreeMap::new(),
            identity,
            disk: None,
            loads: BTreeMap::new(),
            status: CacheStatus { limit_bytes, ..CacheStatus::default() },
        }
    }

    /// Also keeps prefixes on disk; `wake` is called on another thread when [`Self::take_loaded`] has something. No sequence
    /// may have been looked up or stored before.
    pub(super) fn set_disk(&mut self, tier: DiskTier, shape: &StateShape, wake: impl Fn() + Send + Sync + 'static) {
        let packing = self.identity.packing;
        (self.identity.weights, self.identity.tokenizer) = (tier.weights, tier.tokenizer);
        self.identity.closed = tier.store.times_closed(&self.identity.arithmetic);
        self.disk = Some(Disk::new(tier.store, tier.items, shape, packing, wake));
        self.publish();
    }

    /// What was kept may be wrong: memory forgets all of it, and on disk it has names that nobody asks for any more, also after
    /// a restart, and goes when there is no room. What is stored from now on has other names. Nobody must be waiting for a
    /// load of before: it would bring up what is not to be trusted.
    pub(super) fn close_class(&mut self) {
        self.identity.closed += 1;
        if let Some(disk) = &self.disk {
            disk.close_class(&self.identity.arithmetic);
        }
        for id in self.loads.keys().copied().collect::<Vec<_>>() {
            self.abandon(id);
        }
        let (limit, mut evicted) = (self.cache.limit_bytes(), Vec::new());
        self.cache.set_limit(0, &mut evicted);
        self.cache.set_limit(limit, &mut evicted);
        self.drop_evicted(&evicted);
        self.publish();
    }

    /// Waits until everything is on disk that is to be, but not for ever.
    pub(super) fn flush(&self) {
        if let Some(disk) = &self.disk {
            disk.flush();
        }
    }

    /// A sequence of which nothing is stored yet.
    pub(super) fn thread(&self, tenant: &str) -> Thread {
        let arithmetic = match self.identity.closed {
            0 => self.identity.arithmetic.clone(),
            times => format!("{} closed {times}", self.identity.arithmetic),
        };
        let identity = Identity {
            weights: &self.identity.weights,
            tokenizer: &self.identity.tokenizer,
            layout: self.identity.packing.layout_version(),
            arithmetic: &arithmetic,
            tenant: tenant.as_bytes(),
        };
        Thread {
            root: identity.root(),
            block_tokens: self.block_tokens,
            chain: Vec::new(),
            stored: 0,
            last: None,
            matched: 0,
            answer_boundary: None,
            skipped: None,
            mixed: 0,
            from_disk: 0,
            diverged: None,
        }
    }

    /// Those of a sequence's leading tokens whose rows are of the class, and the one that is decoded in any case: all, or the
    /// prompt, whose last one is decoded, or the first.
    pub(super) fn of_class<'a>(&self, tokens: &'a [u32], prompt: usize) -> &'a [u32] {
        match self.identity.sharing {
            Sharing::All => tokens,
            Sharing::Prompts => &tokens[..prompt],
            Sharing::Nothing => &tokens[..1],
        }
    }

    /// Leading rows of a sequence that are of the class.
    fn rows_of_class(&self, prompt: usize) -> usize {
        match self.identity.sharing {
            Sharing::All => usize::MAX,
            Sharing::Prompts => prompt - 1,
            Sharing::Nothing => 0,
        }
    }

    /// The longest prefix of `tokens` in memory that leaves a token to compute.
    pub(super) fn lookup(&mut self, thread: &mut Thread, tokens: &[u32], shape: &StateShape) -> Option<Hit> {
        let wanted = (tokens.len() - 1) / self.block_tokens;
        thread.name_blocks(tokens, self.block_tokens, wanted);
        let found = self.cache.lookup(&thread.chain[..wanted]);
        thread.matched = found.matched;
        if thread.diverged.is_none() {
            thread.diverged = self.divergence(thread, tokens);
        }
        let lease = found.lease?;
        let hit = self.attach(&found.blocks, shape);
        self.cache.release(lease);
        if let Some(disk) = &mut self.disk {
            disk.touch(&thread.chain[..found.blocks.len()]);
        }
        self.publish();
        let hit = hit?;
        (thread.stored, thread.last) = (found.blocks.len(), found.blocks.last().copied());
        Some(hit)
    }

    /// Where `tokens` part from every block that memory has after those they matched; `None` if they do not, or there is
    /// none.
    fn divergence(&self, thread: &Thread, tokens: &[u32]) -> Option<Divergence> {
        let start = thread.matched * self.block_tokens;
        let (own, parent) = (&tokens[start..], thread.parent_of(thread.matched));
        let children = self.tokens.range((parent, BlockId(0))..=(parent, BlockId(u64::MAX)));
        let in_common = |kept: &[u32]| kept.iter().zip(own).take_while(|(kept, own)| kept == own).count();
        let longest = children.map(|(_, kept)| in_common(kept)).max()?;
        let (position, length) = (start + longest, own.len().min(self.block_tokens));
        (position > 0 && longest < length).then(|| Divergence { position, token: tokens[position] })
    }

    /// Tokens of the blocks that were brought up from disk for a sequence.
    pub(super) fn tokens_from_disk(&self, thread: &Thread) -> usize {
        thread.from_disk * self.block_tokens
    }

    /// Starts to bring into memory what only the disk has of a prefix of `tokens`, if the sequence can then resume later than
    /// otherwise. It is looked up when that is done.
    pub(super) fn load(&mut self, thread: &mut Thread, tokens: &[u32], now_us: u64) -> Option<LoadId> {
        let disk = self.disk.as_mut()?;
        let wanted = (tokens.len() - 1) / self.block_tokens;
        thread.name_blocks(tokens, self.block_tokens, wanted);
        let count = disk.peek(&thread.chain[..wanted]);
        let chain = &thread.chain[..count];
        if count <= self.cache.peek(chain) {
            return None;
        }
        let held: Vec<BlockId> = chain.iter().map_while(|name| self.cache.block(name)).collect();
        let boundary = held.len() < count || !self.cache.has_boundary(held[count - 1]);
        let wanted = Wanted { chain, in_memory: held.len(), boundary, len: count * self.block_tokens };
        let id = disk.load(&wanted, now_us)?;
        self.loads.insert(id, self.cache.lease(&held));
        self.publish();
        Some(id)
    }

    /// What has been read since the last call, or is not worth waiting for.
    pub(super) fn take_loaded(&mut self, now_us: u64) -> (Vec<Loaded>, Vec<LoadId>) {
        let Some(disk) = &mut self.disk else { return (Vec::new(), Vec::new()) };
        let loaded = disk.take_loaded();
        let silent = disk.take_silent(now_us);
        let done = loaded.iter().map(|loaded| loaded.id).chain(silent.iter().copied());
        done.for_each(|id| release(&mut self.loads, &mut self.cache, id));
        if !(loaded.is_empty() && silent.is_empty()) {
            self.publish();
        }
        (loaded, silent)
    }

    /// Nobody waits for it any more.
    pub(super) fn abandon(&mut self, id: LoadId) {
        if let Some(disk) = &mut self.disk {
            disk.abandon(id);
        }
        release(&mut self.loads, &mut self.cache, id);
        self.publish();
    }

    /// Takes into memory what was read for the sequence of `tokens`.
    pub(super) fn bring_up(&mut self, thread: &mut Thread, tokens: &[u32], loaded: Loaded) {
        let (mut parent, mut evicted) = (None, Vec::new());
        // What memory had when the reading began is there still; more may have come since.
        let Loaded { rows, boundary, first, .. } = loaded;
        let mut rows = rows.into_iter();
        for (index, (name, tokens)) in thread.chain.iter().zip(tokens.chunks(self.block_tokens)).enumerate() {
            let block = if index < first { None } else { rows.next() };
            let id = match (self.cache.block(name), block) {
                (Some(id), _) => id,
                (None, Some(rows)) => {
                    let bytes = bytes_of(&rows, tokens);
                    let Ok((id, _)) = self.cache.insert(parent, *name, bytes, &mut evicted) else { break };
                    let parent = thread.parent_of(index);
                    self.tokens.insert((parent, id), tokens.into());
                    self.blocks.insert(id, Kept { rows: Arc::new(rows), parent });
                    thread.from_disk += 1;
                    id
                }
                (None, None) => break,
            };
            parent = Some(id);
        }
        let last = boundary.as_ref().and_then(|boundary| thread.chain.get(boundary.len / self.block_tokens - 1));
        if let Some((id, boundary)) = last.and_then(|name| self.cache.block(name)).zip(boundary)
            && self.cache.insert_boundary(id, boundary.bytes(), &mut evicted) == Ok(true)
        {
            self.boundaries.insert(id, Arc::new(boundary));
        }
        self.drop_evicted(&evicted);
        self.publish();
    }

    fn attach(&self, ids: &[BlockId], shape: &StateShape) -> Option<Hit> {
        let blocks: Option<Vec<Arc<BlockRows>>> =
            ids.iter().map(|id| self.blocks.get(id).map(|kept| Arc::clone(&kept.rows))).collect();
        let boundary = self.boundaries.get(ids.last()?)?;
        match SequenceState::attach(shape, &blocks?, boundary) {
            Ok(state) => Some(Hit { state, len: boundary.len }),
            Err(error) => {
                tracing::warn!(%error, "a stored prefix is not used");
                None
            }
        }
    }

    /// Ends of blocks whose boundaries are wanted from a chunk of `width` tokens at `start`; `known` tokens of the sequence
    /// are there, `prompt` of them its prompt.
    pub(super) fn wanted(
        &self,
        thread: &Thread,
        start: usize,
        width: usize,
        known: usize,
        prompt: usize,
    ) -> Vec<usize> {
        let (block, end) = (self.block_tokens, (start + width).min(self.rows_of_class(prompt)));
        if thread.skipped.is_some() {
            return Vec::new();
        }
        let last_of = |tokens: usize| (tokens - 1) / block * block;
        let is_wanted = |at: usize| {
            at.is_multiple_of(self.granule)
                || at == last_of(known)
                || at == last_of(prompt)
                || at == thread.matched * block
                // The answer may end here, also among tokens that are only drafted.
                || (at >= known && at > prompt)
        };
        (start / block + 1..=end / block).map(|index| index * block).filter(|at| is_wanted(*at)).collect()
    }

    /// Stores what has been committed of a sequence: whole blocks, and the boundaries that were wanted.
    pub(super) fn store(&mut self, thread: &mut Thread, tokens: &[u32], prompt: usize, state: &SequenceState) {
        let whole = state.len().min(self.rows_of_class(prompt)) / self.block_tokens;
        let mixed = state.len() / self.block_tokens - whole;
        if mixed > thread.mixed {
            self.status.skipped_mixed += (mixed - thread.mixed) as u64;
            thread.mixed = mixed;
        }
        let boundaries = state.take_boundaries();
        if thread.skipped.is_some() || (whole == thread.stored && boundaries.is_empty()) {
            return;
        }
        thread.name_blocks(tokens, self.block_tokens, whole);
        let mut evicted = Vec::new();
        let mut result = self.store_blocks(thread, tokens, whole, state, &mut evicted);
        if result == Err(Skip::NoParent) {
            // What the sequence resumed from was evicted meanwhile, but it has all of it.
            (thread.stored, thread.last, thread.answer_boundary) = (0, None, None);
            result = self.store_blocks(thread, tokens, whole, state, &mut evicted);
        }
        if let Err(skip) = result {
            thread.skipped = Some(skip);
            self.count_skipped(skip, (whole - thread.stored) as u64);
            tracing::debug!(reason = skip.name(), "a sequence is no longer stored");
        }
        for boundary in boundaries {
            self.store_boundary(thread, boundary, prompt, &mut evicted);
        }
        self.drop_evicted(&evicted);
        self.publish();
    }

    fn store_blocks(
        &mut self,
        thread: &mut Thread,
        tokens: &[u32],
        whole: usize,
        state: &SequenceState,
        evicted: &mut Vec<Evicted>,
    ) -> Result<(), Skip> {
        while thread.stored < whole {
            let Some(rows) = state.block(thread.stored, self.block_tokens) else { return Ok(()) };
            let tokens = &tokens[thread.stored * self.block_tokens..][..self.block_tokens];
            let (name, parent) = (thread.chain[thread.stored], thread.parent_of(thread.stored));
            let (id, is_new) = self.cache.insert(thread.last, name, bytes_of(&rows, tokens), evicted)?;
            // At once, since making room may evict what has just come in.
            self.drop_evicted(evicted);
            evicted.clear();
            if is_new {
                let rows = Arc::new(rows);
                if let Some(disk) = &mut self.disk {
                    disk.put_rows(thread.stored as u32 + 1, parent, name, &rows);
                }
                self.tokens.insert((parent, id), tokens.into());
                self.blocks.insert(id, Kept { rows, parent });
            }
            thread.last = Some(id);
            thread.stored += 1;
        }
        Ok(())
    }

    fn store_boundary(&mut self, thread: &mut Thread, boundary: Boundary, prompt: usize, evicted: &mut Vec<Evicted>) {
        let Some(index) = (boundary.len / self.block_tokens).checked_sub(1) else { return };
        let Some(name) = thread.chain.get(index).copied() else { return };
        let Some(id) = self.cache.block(&name) else { return };
        let of_answer = boundary.len > prompt && !boundary.len.is_multiple_of(self.granule);
        match self.cache.insert_boundary(id, boundary.bytes(), evicted) {
            Ok(true) => {
                let boundary = Arc::new(boundary);
                if let Some(disk) = &mut self.disk {
                    disk.put_boundary(index as u32 + 1, thread.parent_of(index), name, &boundary);
                }
                self.boundaries.insert(id, boundary);
                let before = if of_answer { thread.answer_boundary.replace((id, name)) } else { None };
                if let Some((before, name)) = before.filter(|(before, _)| self.cache.drop_boundary(*before)) {
                    self.boundaries.remove(&before);
                    if let Some(disk) = &mut self.disk {
                        disk.drop_boundary(name);
                    }
                }
            }
            Ok(false) => {}
            Err(skip) => self.count_skipped(skip, 1),
        }
        self.drop_evicted(evicted);
        evicted.clear();
    }

    fn count_skipped(&mut self, skip: Skip, count: u64) {
        match skip {
            Skip::NoParent => self.status.skipped_no_parent += count,
            Skip::NoRoom => self.status.skipped_no_room += count,
        }
    }

    fn drop_evicted(&mut self, evicted: &[Evicted]) {
        for evicted in evicted {
            match evicted {
                Evicted::Block(id) => {
                    if let Some(kept) = self.blocks.remove(id) {
                        self.tokens.remove(&(kept.parent, *id));
                    }
                    self.boundaries.remove(id);
                }
                Evicted::Boundary(id) => {
                    self.boundaries.remove(id);
                }
            }
        }
    }

    fn publish(&mut self) {
        let counters = self.cache.counters();
        self.status.used_bytes = self.cache.used_bytes();
        self.status.blocks = self.cache.num_blocks();
        self.status.lookups = counters.lookups;
        self.status.hits = counters.hits;
        self.status.stored = counters.blocks_stored;
        self.status.evicted = counters.blocks_evicted;
        self.status.closed = self.identity.closed;
    }

    pub(super) fn status(&self) -> CacheStatus {
        let mut status = self.status;
        if let Some(disk) = &self.disk {
            disk.report(&mut status);
        }
        status
    }

    /// Sequences that wait for the disk.
    pub(super) fn num_loading(&self) -> usize {
        self.disk.as_ref().map_or(0, Disk::num_awaited)
    }

    /// # Panics
    ///
    /// If the books do not add up.
    pub(super) fn check_invariants(&self) {
        self.cache.check_invariants();
        if let Some(disk) = &self.disk {
            disk.check_invariants();
            assert_eq!(self.loads.len(), disk.num_awaited(), "blocks stay for those who wait, and for nobody else");
        }
        assert_eq!(self.cache.num_leases(), self.loads.len(), "no other leases between turns");
        assert_eq!(self.blocks.len(), self.cache.num_blocks(), "rows of every block, and no others");
        assert!(self.boundaries.keys().all(|id| self.cache.has_boundary(*id)), "a boundary the index does not know");
        let tokens_of = |id: &BlockId, kept: &Kept| self.tokens[&(kept.parent, *id)].len() as u64 * 4;
        let rows: u64 = self.blocks.iter().map(|(id, kept)| kept.rows.bytes() + tokens_of(id, kept)).sum();
        assert_eq!(self.tokens.len(), self.blocks.len(), "tokens of every block, and of no others");
        let boundaries: u64 = self.boundaries.values().map(|boundary| boundary.bytes()).sum();
        assert_eq!(rows + boundaries, self.cache.used_bytes(), "bytes held and bytes counted");
    }
}

fn release(loads: &mut BTreeMap<LoadId, LeaseId>, cache: &mut Cache, id: LoadId) {
    if let Some(lease) = loads.remove(&id) {
        cache.release(lease);
    }
}

impl Thread {
    /// What the cache knows of the sequence.
    pub(super) fn note(&self, computed: usize, record: &mut RequestRecord) {
        record.diverged = self.diverged;
        record.stored_blocks = self.stored;
        if let Some(skip) = self.skipped {
            record.skipped_blocks = (computed / self.block_tokens).saturating_sub(self.stored);
            record.skipped_because = Some(skip.name());
        } else if self.mixed > 0 {
            (record.skipped_blocks, record.skipped_because) = (self.mixed, Some("mixed"));
        }
    }

    /// Name of the block before block `index`.
    fn parent_of(&self, index: usize) -> BlockHash {
        index.checked_sub(1).map_or(self.root, |before| self.chain[before])
    }

    /// Names the first `count` blocks of `tokens`.
    fn name_blocks(&mut self, tokens: &[u32], block: usize, count: usize) {
        while self.chain.len() < count {
            let index = self.chain.len();
            let parent = self.chain.last().unwrap_or(&self.root);
            let name = parent.child(&tokens[index * block..(index + 1) * block]);
            self.chain.push(name);
        }
    }
}

/// Bytes that a block's rows and tokens take.
fn bytes_of(rows: &BlockRows, tokens: &[u32]) -> u64 {
    rows.bytes() + tokens.len() as u64 * 4
}
