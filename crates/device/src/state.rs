//! The memory of a sequence: window rows, compressed rows and pending tokens of each layer (model spec, section 11).
//!
//! Writes are *staged*: nodes append rows and later nodes see them at once; [`SequenceState::commit`] keeps those of the
//! accepted tokens, [`SequenceState::roll_back`] takes the rest back. Nothing here computes rows; see [`crate::cpu`].
//!
//! Class `fast` multiplies rounded rows. Their codes are kept beside the rows they are made from ([`Window::codes`],
//! [`Rows::codes`], [`Rows::key_codes`]), up to a row that only rounding raises and whatever drops rows lowers. They are derived:
//! no store, snapshot or other sequence has them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use troika_graph::Scope;
use troika_kernels::{CodedKeys, CodedRows, Ctx, KeyCodes, RowCodes, RowList};

mod blocks;
mod packed;
#[cfg(test)]
mod rounding;

use blocks::Lane;
pub use blocks::{AttachError, BlockRows, Boundary};
pub use packed::Packing;

/// What a layer keeps per sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Width of a K=V row, `d`.
    pub head_dim: usize,
    /// Rows of the window.
    pub window: usize,
    /// The layer's compressor.
    pub compressed: Option<PoolShape>,
    /// The indexer's compressor.
    pub index: Option<PoolShape>,
}

/// What a compressor keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolShape {
    /// Tokens per row.
    pub ratio: usize,
    /// Width of a row.
    pub dim: usize,
    /// Rows also pool lane A of the block before; projections are `2 dim` wide.
    pub overlap: bool,
}

impl PoolShape {
    /// Width of a projected token.
    pub fn width(&self) -> usize {
        if self.overlap { 2 * self.dim } else { self.dim }
    }
}

/// What a model keeps per sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateShape {
    /// One entry per trunk layer and drafter stage.
    pub layers: BTreeMap<Scope, LayerShape>,
    /// Whether rounded rows are kept beside the rows.
    pub rounded: bool,
}

impl StateShape {
    /// Least number of tokens after which no compressor has a pending token, in multiples of 128.
    pub fn block_tokens(&self) -> usize {
        let pools = self.layers.values().flat_map(|layer| [layer.compressed, layer.index]).flatten();
        pools.fold(128, |block, pool| lcm(block, pool.ratio))
    }

    /// Most bytes that a sequence holds whatever its length, but for rows of the step in flight.
    pub fn fixed_bytes(&self) -> u64 {
        let bytes = self.layers.values().map(|layer| {
            let pools = [layer.compressed, layer.index].into_iter().enumerate();
            // Windows and tails are trimmed only after as much again has come in; the piece begun is reserve.
            let pools = pools.filter_map(|(part, pool)| {
                let pool = pool?;
                Some(2 * 2 * pool.ratio * pool.width() * 4 + Rows::PIECE * self.row_bytes(part, pool.dim))
            });
            let codes = if self.rounded { 2 * Rows::PIECE * RowCodes::row_bytes(layer.head_dim) } else { 0 };
            2 * layer.window * self.row_bytes(0, layer.head_dim) + codes + pools.sum::<usize>()
        });
        bytes.sum::<usize>() as u64
    }

    /// Bytes of a row in memory, of attention (part 0) or of the index: numbers and codes.
    fn row_bytes(&self, part: usize, dim: usize) -> usize {
        let codes = match (self.rounded, part) {
            (false, _) => 0,
            (true, 0) => RowCodes::row_bytes(dim),
            (true, _) => KeyCodes::key_bytes(dim),
        };
        4 * dim + codes
    }

    /// Bytes of the file of a boundary far from the start: windows and overlap lanes of the trunk.
    pub fn boundary_bytes(&self, packing: Packing) -> u64 {
        let trunk = self.layers.iter().filter(|(scope, _)| !matches!(scope, Scope::Stage(_)));
        let bytes = trunk.map(|(_, layer)| {
            let pools = [layer.compressed, layer.index].into_iter().flatten().filter(|pool| pool.overlap);
            let lanes = pools.map(|pool| 2 * pool.ratio * pool.dim * 4).sum::<usize>();
            layer.window * packing.kv().bytes(layer.head_dim) + lanes
        });
        bytes.sum::<usize>() as u64
    }

    /// Bytes of the append-only rows of [`Self::block_tokens`] tokens: what a kept block holds.
    pub fn kept_bytes_per_block(&self) -> u64 {
        Self { rounded: false, layers: self.layers.clone() }.bytes_per_block()
    }

    /// Bytes that a sequence holds for every [`Self::block_tokens`] tokens: append-only rows, and their codes.
    pub fn bytes_per_block(&self) -> u64 {
        let block = self.block_tokens();
        let parts = self.layers.values().flat_map(|layer| [layer.compressed, layer.index].into_iter().enumerate());
        let bytes =
            parts.filter_map(|(part, pool)| pool.map(|pool| block / pool.ratio * self.row_bytes(part, pool.dim)));
        bytes.sum::<usize>() as u64
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// Rows of equal width in pieces of [`Rows::PIECE`], so that growing never copies what is there, and sequences can share
/// what they have in common.
#[derive(Clone, Debug)]
pub struct Rows {
    dim: usize,
    len: usize,
    pieces: Vec<Arc<Vec<f32>>>,
    codes: Codes,
}

/// The first rows, rounded. Rows are only appended or dropped from the end, so codes are of what is there as long as there are no
/// more of them than rows.
#[derive(Clone, Debug)]
enum Codes {
    None,
    Rows(RowCodes),
    Keys(KeyCodes),
}

impl Rows {
    /// Rows per piece: those of 128 tokens in a layer of ratio 4.
    pub const PIECE: usize = 32;

    /// No rows.
    pub fn new(dim: usize) -> Self {
        Self { dim, len: 0, pieces: Vec::new(), codes: Codes::None }
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Row `index`, `[dim]`.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn row(&self, index: usize) -> &[f32] {
        assert!(index < self.len, "row {index} of {}", self.len);
        let start = index % Self::PIECE * self.dim;
        &self.pieces[index / Self::PIECE][start..start + self.dim]
    }

    /// The rows in order.
    pub fn list(&self) -> RowList<'_> {
        RowList::shared(self.dim, &self.pieces)
    }

    /// The rows rounded for attention; those that were not yet are rounded now.
    ///
    /// # Panics
    ///
    /// If they have been rounded as keys.
    pub fn codes(&mut self, ctx: Ctx) -> CodedRows<'_> {
        if matches!(self.codes, Codes::None) {
            self.codes = Codes::Rows(RowCodes::new(self.dim));
        }
        let Codes::Rows(codes) = &mut self.codes else { panic!("keys of an index are no rows of attention") };
        let (rows, done) = (RowList::shared(self.dim, &self.pieces), codes.len());
        codes.extend(ctx, self.len - done, |i| rows.row(done + i));
        codes.rows(0..self.len)
    }

    /// The rows rounded as keys of an index; those that were not yet are rounded now.
    ///
    /// # Panics
    ///
    /// If they have been rounded for attention.
    pub fn key_codes(&mut self, ctx: Ctx) -> CodedKeys<'_> {
        if matches!(self.codes, Codes::None) {
            self.codes = Codes::Keys(KeyCodes::new(self.dim));
        }
        let Codes::Keys(codes) = &mut self.codes else { panic!("rows of attention are no keys of an index") };
        let (rows, done) = (RowList::shared(self.dim, &self.pieces), codes.len());
        codes.extend(ctx, self.len - done, |i| rows.row(done + i));
        codes.keys()
    }

    /// Appends a row.
    ///
    /// # Panics
    ///
    /// If its width differs.
    pub fn push(&mut self, row: &[f32]) {
        assert_eq!(row.len(), self.dim, "row width");
        if self.len.is_multiple_of(Self::PIECE) {
            self.pieces.push(Arc::new(Vec::with_capacity(Self::PIECE * self.dim)));
        }
        // A piece that others share is whole, so this one is ours.
        Arc::make_mut(self.pieces.last_mut().expect("pushed above")).extend_from_slice(row);
        self.len += 1;
    }

    /// Rows `first..first + count`: the piece itself if they are one, else a copy.
    fn share(&self, first: usize, count: usize) -> Arc<Vec<f32>> {
        if count == Self::PIECE && first.is_multiple_of(Self::PIECE) {
            return Arc::clone(&self.pieces[first / Self::PIECE]);
        }
        Arc::new((first..first + count).flat_map(|row| self.row(row).iter().copied()).collect())
    }

    /// Appends rows that others have too: the piece itself if they are one.
    fn append_shared(&mut self, rows: &Arc<Vec<f32>>) {
        if self.len.is_multiple_of(Self::PIECE) && rows.len() == Self::PIECE * self.dim {
            self.pieces.push(Arc::clone(rows));
            self.len += Self::PIECE;
        } else {
            rows.chunks_exact(self.dim).for_each(|row| self.push(row));
        }
    }

    /// Keeps the first `len` rows.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len {
            return;
        }
        self.pieces.truncate(len.div_ceil(Self::PIECE));
        if let Some(last) = self.pieces.last_mut() {
            Arc::make_mut(last).truncate((len - (len - 1) / Self::PIECE * Self::PIECE) * self.dim);
        }
        self.len = len;
        match &mut self.codes {
            Codes::None => {}
            Codes::Rows(codes) => codes.truncate(len),
            Codes::Keys(codes) => codes.truncate(len),
        }
    }

    fn bytes(&self) -> u64 {
        let codes = match &self.codes {
            Codes::None => 0,
            Codes::Rows(codes) => codes.bytes(),
            Codes::Keys(codes) => codes.bytes(),
        };
        (self.pieces.len() * Self::PIECE * self.dim * 4 + codes) as u64
    }
}

/// The last K=V rows of a layer, oldest first.
#[derive(Clone, Debug)]
pub struct Window {
    dim: usize,
    capacity: usize,
    /// Position of the first row kept.
    first: usize,
    rows: Vec<f32>,
    /// The first of these rows, rounded.
    codes: RowCodes,
}

impl Window {
    fn new(dim: usize, capacity: usize) -> Self {
        Self { dim, capacity, first: 0, rows: Vec::new(), codes: RowCodes::new(dim) }
    }

    /// Has `rows` instead, the first of which belongs to `position`.
    fn replace(&mut self, position: usize, rows: &[f32]) {
        self.codes.truncate(0);
        self.rows.clear();
        self.rows.extend_from_slice(rows);
        self.first = position;
    }

    /// Position after the last row.
    pub fn end(&self) -> usize {
        self.first + self.rows.len() / self.dim
    }

    /// Rows that a token may see.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Position of the first row kept.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Appends rows `[n, dim]`, the first of which belongs to `position`. If that does not continue what is there (a
    /// drafter stage whose context was not computed for a while), the old rows are dropped.
    ///
    /// # Panics
    ///
    /// If they are not whole rows.
    pub fn append(&mut self, position: usize, rows: &[f32]) {
        assert!(rows.len().is_multiple_of(self.dim), "whole rows");
        if position != self.end() {
            return self.replace(position, rows);
        }
        self.rows.extend_from_slice(rows);
    }

    /// The rows of `positions`, rounded; all that were not yet are rounded now.
    ///
    /// # Panics
    ///
    /// If one is not kept.
    pub fn codes(&mut self, ctx: Ctx, positions: Range<usize>) -> CodedRows<'_> {
        if positions.is_empty() {
            return CodedRows::none(self.dim);
        }
        let (dim, done, first) = (self.dim, self.codes.len(), self.first);
        assert!(positions.start >= first, "row {} left the window, which starts at {first}", positions.start);
        let new = &self.rows[done * dim..];
        self.codes.extend(ctx, new.len() / dim, |i| &new[i * dim..(i + 1) * dim]);
        self.codes.rows(positions.start - first..positions.end - first)
    }

    /// The rows of `positions`, `[n, dim]`.
    ///
    /// # Panics
    ///
    /// If one is not kept.
    pub fn rows(&self, positions: Range<usize>) -> &[f32] {
        if positions.is_empty() {
            return &[];
        }
        let first = self.first;
        assert!(positions.start >= first, "row {} left the window, which starts at {first}", positions.start);
        &self.rows[(positions.start - first) * self.dim..(positions.end - first) * self.dim]
    }

    /// Drops rows at and after `end`.
    fn truncate(&mut self, end: usize) {
        let len = end.saturating_sub(self.first);
        self.rows.truncate(len * self.dim);
        self.codes.truncate(len);
    }

    /// Drops rows that nobody at or after `end` can see. Moving what stays is put off until as much would go.
    fn trim(&mut self, end: usize) {
        let unseen = end.saturating_sub(self.capacity).min(self.end());
        let drop = unseen.saturating_sub(self.first);
        if drop >= self.capacity {
            self.rows.drain(..drop * self.dim);
            self.codes.drop_first(drop);
            self.first = unseen;
        }
    }
}

/// A compressor's finished rows and the projected tokens it still needs.
#[derive(Clone, Debug)]
pub struct Pool {
    shape: PoolShape,
    /// Finished rows.
    pub rows: Rows,
    /// Position of the first projected token kept.
    tail_start: usize,
    /// Projected tokens `c`, `[n, width]`.
    tail_kv: Vec<f32>,
    /// Gates `z` with the position bias added, `[n, width]`.
    tail_gate: Vec<f32>,
    /// Ends of blocks whose overlap lane is to be kept when its tokens go.
    wanted: Vec<usize>,
    /// Those kept so far.
    lanes: Vec<(usize, Lane)>,
}

impl Pool {
    fn new(shape: PoolShape) -> Self {
        Self {
            shape,
            rows: Rows::new(shape.dim),
            tail_start: 0,
            tail_kv: Vec::new(),
            tail_gate: Vec::new(),
            wanted: Vec::new(),
            lanes: Vec::new(),
        }
    }

    /// Tokens per row.
    pub fn ratio(&self) -> usize {
        self.shape.ratio
    }

    /// Width of a projected token.
    pub fn width(&self) -> usize {
        self.shape.width()
    }

    /// Position after the last projected token.
    pub fn end(&self) -> usize {
        self.tail_start + self.tail_kv.len() / self.shape.width()
    }

    /// Appends projected tokens, `kv` and `gate` both `[n, width]`, bias added.
    ///
    /// # Panics
    ///
    /// If the two differ in length.
    pub fn append(&mut self, kv: &[f32], gate: &[f32]) {
        assert_eq!(kv.len(), gate.len(), "one gate per channel");
        self.tail_kv.extend_from_slice(kv);
        self.tail_gate.extend_from_slice(gate);
    }

    /// `(c, z)` of the token at `position`, `[width]` each; `None` before the first token kept.
    pub fn token(&self, position: usize) -> Option<(&[f32], &[f32])> {
        let start = position.checked_sub(self.tail_start)? * self.shape.width();
        let range = start..start + self.shape.width();
        Some((self.tail_kv.get(range.clone())?, self.tail_gate.get(range)?))
    }

    /// Drops projected tokens that no row after `end` tokens can need.
    pub fn trim(&mut self, end: usize) {
        while let Some(index) = self.wanted.iter().position(|wanted| *wanted <= end) {
            let at = self.wanted.swap_remove(index);
            self.lanes.extend(Lane::of(self, at).map(|lane| (at, lane)));
        }
        let ratio = self.shape.ratio;
        let block = end / ratio * ratio;
        let needed = if self.shape.overlap { block.saturating_sub(ratio) } else { block };
        let drop = needed.saturating_sub(self.tail_start) * self.shape.width();
        if drop > 0 {
            self.tail_kv.drain(..drop);
            self.tail_gate.drain(..drop);
            self.tail_start = needed;
        }
    }

    /// Drops tokens at and after `end`, and the rows they finished.
    fn truncate(&mut self, end: usize) {
        let width = self.shape.width();
        self.tail_kv.truncate(end.saturating_sub(self.tail_start) * width);
        self.tail_gate.truncate(self.tail_kv.len());
        self.rows.truncate(end / self.shape.ratio);
        self.wanted.retain(|at| *at <= end);
    }
}

/// State of one sequence in one layer.
#[derive(Clone, Debug)]
pub struct LayerState {
    /// Rotated K=V rows.
    pub window: Window,
    /// Rows of the layer's compressor.
    pub compressed: Option<Pool>,
    /// Rows of the indexer's compressor.
    pub index: Option<Pool>,
}

impl LayerState {
    fn new(shape: &LayerShape) -> Self {
        Self {
            window: Window::new(shape.head_dim, shape.window),
            compressed: shape.compressed.map(Pool::new),
            index: shape.index.map(Pool::new),
        }
    }

    fn trim(&mut self, end: usize) {
        self.window.trim(end);
        for pool in [&mut self.compressed, &mut self.index].into_iter().flatten() {
            pool.trim(end);
        }
    }

    fn truncate(&mut self, end: usize) {
        self.window.truncate(end);
        for pool in [&mut self.compressed, &mut self.index].into_iter().flatten() {
            pool.truncate(end);
        }
    }

    fn bytes(&self) -> u64 {
        let pools = [&self.compressed, &self.index].into_iter().flatten();
        let pools: u64 =
            pools.map(|p| p.rows.bytes() + (p.tail_kv.capacity() + p.tail_gate.capacity()) as u64 * 4).sum();
        (self.window.rows.capacity() * 4 + self.window.codes.bytes()) as u64 + pools
    }
}

/// State of one sequence in every layer.
#[derive(Debug)]
pub struct SequenceState {
    layers: BTreeMap<Scope, Mutex<LayerState>>,
    /// Committed tokens.
    len: Mutex<usize>,
    /// Ends of blocks whose boundary is to be kept.
    wanted: Mutex<Vec<usize>>,
    boundaries: Mutex<Vec<Boundary>>,
}

impl SequenceState {
    /// An empty sequence.
    pub fn new(shape: &StateShape) -> Self {
        let layers = shape.layers.iter().map(|(scope, shape)| (*scope, Mutex::new(LayerState::new(shape)))).collect();
        Self { layers, len: Mutex::new(0), wanted: Mutex::default(), boundaries: Mutex::default() }
    }

    /// State of a layer or stage. State edges order its users, so the lock is never waited for.
    ///
    /// # Panics
    ///
    /// If the model has no such layer.
    pub fn layer(&self, scope: Scope) -> MutexGuard<'_, LayerState> {
        let layer = self.layers.get(&scope).unwrap_or_else(|| panic!("no state for {scope:?}"));
        // After a panic the step has failed and the sequence is given up, so nobody relies on its rows.
        layer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the model has such a layer.
    pub fn has_layer(&self, scope: Scope) -> bool {
        self.layers.contains_key(&scope)
    }

    /// Committed tokens.
    pub fn len(&self) -> usize {
        *self.len.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if nothing is committed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keeps the rows of the first `rows` tokens staged since the last commit. What later steps have staged stays staged.
    ///
    /// # Panics
    ///
    /// If fewer rows were staged.
    pub fn commit(&self, rows: usize) {
        let end = self.len() + rows;
        self.catch_boundaries(end);
        for (scope, layer) in &self.layers {
            let mut layer = layer.lock().unwrap_or_else(PoisonError::into_inner);
            // Drafter stages get rows only in steps that compute the drafter's context.
            let staged = layer.window.end();
            assert!(matches!(scope, Scope::Stage(_)) || staged >= end, "{scope:?} has rows up to {staged}, not {end}");
            layer.trim(end);
        }
        *self.len.lock().unwrap_or_else(PoisonError::into_inner) = end;
    }

    /// Takes back every row that is staged but not committed, and the wish for boundaries among them. Possible only if all of
    /// them were staged as [`troika_graph::Acceptance::Partial`]; other steps drop at once what this would need.
    pub fn roll_back(&self) {
        let end = self.len();
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner).retain(|at| *at <= end);
        for layer in self.layers.values() {
            layer.lock().unwrap_or_else(PoisonError::into_inner).truncate(end);
        }
    }

    /// Bytes held, rows and reserve.
    pub fn bytes(&self) -> u64 {
        self.layers.values().map(|layer| layer.lock().unwrap_or_else(PoisonError::into_inner).bytes()).sum()
    }

    /// A copy of what section 11 of the model spec calls the state after [`Self::len`] tokens.
    pub fn snapshot(&self) -> Snapshot {
        let len = self.len();
        let layers = self.layers.keys().map(|scope| (*scope, LayerSnapshot::of(&self.layer(*scope), len))).collect();
        Snapshot { len, layers }
    }

    /// A sequence that continues from `snapshot`.
    ///
    /// # Panics
    ///
    /// If the snapshot has other layers or widths than `shape`.
    pub fn restore(shape: &StateShape, snapshot: &Snapshot) -> Self {
        let state = Self::new(shape);
        for (scope, saved) in &snapshot.layers {
            saved.write_to(&mut state.layer(*scope), snapshot.len);
        }
        *state.len.lock().unwrap_or_else(PoisonError::into_inner) = snapshot.len;
        state
    }
}

/// State of a sequence after `len` tokens, as plain arrays.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Tokens.
    pub len: usize,
    /// Per layer.
    pub layers: BTreeMap<Scope, LayerSnapshot>,
}

/// State of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerSnapshot {
    /// The last rows, oldest first, `[min(len, window), d]`.
    pub window: Vec<f32>,
    /// Of the layer's compressor.
    pub compressed: Option<PoolSnapshot>,
    /// Of the indexer's compressor.
    pub index: Option<PoolSnapshot>,
}

/// State of a compressor (model spec 7.1); gates have the position bias added.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolSnapshot {
    /// Finished rows, `[len / ratio, dim]`.
    pub rows: Vec<f32>,
    /// Tokens of the unfinished block, `[len % ratio, width]`.
    pub pending_kv: Vec<f32>,
    /// Their gates.
    pub pending_gate: Vec<f32>,
    /// Lane A of the last finished block, `[ratio, dim]`; only with overlap, and empty before the first block.
    pub previous_kv: Vec<f32>,
    /// Its gates.
    pub previous_gate: Vec<f32>,
}

impl LayerSnapshot {
    fn of(layer: &LayerState, len: usize) -> Self {
        let first = len.saturating_sub(layer.window.capacity).max(layer.window.first());
        // A stage may have fewer rows than tokens if the drafter's context was not always computed.
        let window = layer.window.rows(first..layer.window.end().min(len)).to_vec();
        let pool = |pool: &Option<Pool>| pool.as_ref().map(|pool| PoolSnapshot::of(pool, len));
        Self { window, compressed: pool(&layer.compressed), index: pool(&layer.index) }
    }

    fn write_to(&self, layer: &mut LayerState, len: usize) {
        layer.window.replace(len - self.window.len() / layer.window.dim, &self.window);
        for (pool, saved) in [(&mut layer.compressed, &self.compressed), (&mut layer.index, &self.index)] {
            assert_eq!(pool.is_some(), saved.is_some(), "the snapshot is of another layer kind");
            if let (Some(pool), Some(saved)) = (pool, saved) {
                saved.write_to(pool, len);
            }
        }
    }
}

impl PoolSnapshot {
    fn of(pool: &Pool, len: usize) -> Self {
        let PoolShape { ratio, dim, overlap } = pool.shape;
        // Rows that are staged but not committed are not part of it.
        let rows = (0..len / ratio).flat_map(|index| pool.rows.row(index).iter().copied()).collect();
        let mut saved = Self { rows, ..Self::default() };
        let block = len / ratio * ratio;
        for position in block..len {
            let (kv, gate) = pool.token(position).expect("pending tokens are kept");
            saved.pending_kv.extend_from_slice(kv);
            saved.pending_gate.extend_from_slice(gate);
        }
        if overlap {
            for position in block.saturating_sub(ratio)..block {
                let (kv, gate) = pool.token(position).expect("the block before is kept");
                saved.previous_kv.extend_from_slice(&kv[..dim]);
                saved.previous_gate.extend_from_slice(&gate[..dim]);
            }
        }
        saved
    }

    fn write_to(&self, pool: &mut Pool, len: usize) {
        let PoolShape { ratio, dim, .. } = pool.shape;
        for row in self.rows.chunks_exact(dim) {
            pool.rows.push(row);
        }
        assert_eq!(pool.rows.len(), len / ratio, "finished rows after {len} tokens");
        pool.tail_start = len / ratio * ratio;
        if !self.previous_kv.is_empty() {
            pool.tail_start -= ratio;
            // Lane B of the block before has been used up.
            for (kv, gate) in self.previous_kv.chunks_exact(dim).zip(self.previous_gate.chunks_exact(dim)) {
                pool.append(&[kv, &vec![0.0; dim]].concat(), &[gate, &vec![0.0; dim]].concat());
            }
        }
        pool.append(&self.pending_kv, &self.pending_gate);
        assert_eq!(pool.end(), len, "pending tokens after {len} tokens");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_grow_and_shrink_across_pieces() {
        let mut rows = Rows::new(2);
        for i in 0..70 {
            rows.push(&[i as f32, -(i as f32)]);
        }
        assert_eq!(rows.row(69), &[69.0, -69.0]);
        for len in [65, 64, 33, 32, 31, 1] {
            rows.truncate(len);
            assert_eq!(rows.len(), len);
            assert_eq!(rows.row(len - 1)[0], (len - 1) as f32);
            assert_eq!(rows.list().len(), len);
        }
        rows.push(&[7.0, 7.0]);
        assert_eq!(rows.row(1), &[7.0, 7.0]);
        rows.truncate(0);
        assert!(rows.is_empty());
        rows.push(&[8.0, 8.0]);
        assert_eq!(rows.row(0), &[8.0, 8.0]);
    }

    fn shape() -> StateShape {
        let pool = |dim| Some(PoolShape { ratio: 4, dim, overlap: true });
        let layer = LayerShape { head_dim: 2, window: 3, compressed: pool(2), index: None };
        StateShape { layers: BTreeMap::from([(Scope::Layer(0), layer)]), rounded: false }
    }

    /// Appends tokens whose values are their positions, as the append and compress nodes would.
    fn stage(state: &SequenceState, positions: Range<usize>, keep: bool) {
        let mut layer = state.layer(Scope::Layer(0));
        for p in positions.clone() {
            layer.window.append(p, &[p as f32; 2]);
            let pool = layer.compressed.as_mut().expect("has one");
            pool.append(&[p as f32; 4], &[p as f32; 4]);
            if (p + 1) % 4 == 0 {
                pool.rows.push(&[(p / 4) as f32; 2]);
            }
        }
        if !keep {
            layer.compressed.as_mut().expect("has one").trim(positions.end);
        }
    }

    #[test]
    fn a_roll_back_leaves_what_was_there_before() {
        for accepted in 0..=6 {
            let (state, want) = (SequenceState::new(&shape()), SequenceState::new(&shape()));
            stage(&state, 0..11, false);
            state.commit(11);
            stage(&state, 11..17, true);
            state.commit(accepted);
            state.roll_back();
            stage(&want, 0..11 + accepted, false);
            want.commit(11 + accepted);
            assert_eq!(state.snapshot(), want.snapshot(), "{accepted} accepted");
        }
    }

    #[test]
    fn snapshots_restore() {
        for len in [1, 3, 4, 5, 8, 11] {
            let state = SequenceState::new(&shape());
            stage(&state, 0..len, false);
            state.commit(len);
            let restored = SequenceState::restore(&shape(), &state.snapshot());
            assert_eq!(restored.snapshot(), state.snapshot());
            for s in [&state, &restored] {
                stage(s, len..len + 6, false);
                s.commit(6);
            }
            assert_eq!(restored.snapshot(), state.snapshot(), "after {len} and 6 more");
        }
    }
}
