//! Parts of a sequence's state that other sequences, and later ones, can start from: the append-only rows of a block of
//! tokens, shared, and what has to be carried across the block's end besides (model spec 11.3).

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use troika_graph::Scope;

use super::packed::{Packing, RowFormat};
use super::{LayerState, Pool, PoolShape, SequenceState, StateShape};

/// Append-only rows of one block of tokens, all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockRows {
    layers: BTreeMap<Scope, [Option<Arc<Vec<f32>>>; 2]>,
}

/// State at the end of a block besides its rows: window rows and overlap lanes. Nothing is pending there.
#[derive(Clone, Debug, PartialEq)]
pub struct Boundary {
    /// Tokens before it.
    pub len: usize,
    layers: BTreeMap<Scope, BoundaryLayer>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct BoundaryLayer {
    /// The last rows, oldest first.
    window: Vec<f32>,
    /// Of the layer's compressor and of the indexer's.
    lanes: [Option<Lane>; 2],
}

/// Lane A of the last finished block of an overlapping compressor, `[ratio, dim]` each.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Lane {
    kv: Vec<f32>,
    gate: Vec<f32>,
}

impl Lane {
    /// The lane at `end`, if its tokens are still there.
    pub(super) fn of(pool: &Pool, end: usize) -> Option<Self> {
        let PoolShape { ratio, dim, .. } = pool.shape;
        let mut lane = Self::default();
        for position in end.checked_sub(ratio)?..end {
            let (kv, gate) = pool.token(position)?;
            lane.kv.extend_from_slice(&kv[..dim]);
            lane.gate.extend_from_slice(&gate[..dim]);
        }
        Some(lane)
    }
}

/// Why stored parts are not the state of a sequence of this model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stored state does not fit: {reason}")]
pub struct AttachError {
    /// What is wrong.
    pub reason: &'static str,
}

fn misfit<T>(reason: &'static str) -> Result<T, AttachError> {
    Err(AttachError { reason })
}

impl BlockRows {
    /// Bytes of the rows.
    pub fn bytes(&self) -> u64 {
        self.floats().map(|rows| rows.len() as u64 * 4).sum()
    }

    fn floats(&self) -> impl Iterator<Item = &[f32]> {
        self.layers.values().flatten().flatten().map(|rows| rows.as_slice())
    }

    /// Bytes of the file of such a block.
    pub fn packed_bytes(shape: &StateShape, packing: Packing) -> u64 {
        let block = shape.block_tokens();
        parts_of(shape, packing).map(|(_, pool, format)| block / pool.ratio * format.bytes(pool.dim)).sum::<usize>()
            as u64
    }

    /// The rows as bytes, in a fixed order: by layer, the layer's compressor before the indexer's. `None` if they are not
    /// of the class that `packing` is for.
    pub fn pack(&self, shape: &StateShape, packing: Packing) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(Self::packed_bytes(shape, packing) as usize);
        let rows = self.layers.values().flatten().flatten();
        let mut parts = rows.zip(parts_of(shape, packing));
        parts.all(|(rows, (_, pool, format))| pack_rows(format, pool.dim, rows, &mut out)).then_some(out)
    }

    /// Rows from the bytes of [`Self::pack`].
    ///
    /// # Errors
    ///
    /// If their number is another than a block of this shape has.
    pub fn unpack(shape: &StateShape, packing: Packing, bytes: &[u8]) -> Result<Self, AttachError> {
        let block = shape.block_tokens();
        let mut rest = bytes;
        let mut layers: BTreeMap<_, _> = shape.layers.keys().map(|scope| (*scope, [None, None])).collect();
        for ((scope, part), pool, format) in parts_of(shape, packing) {
            let Some(rows) = unpack_rows(format, pool.dim, block / pool.ratio, &mut rest) else {
                return misfit("too few rows");
            };
            layers.entry(scope).or_default()[part] = Some(Arc::new(rows));
        }
        if rest.is_empty() { Ok(Self { layers }) } else { misfit("too many rows") }
    }
}

/// The compressors of a shape with the place and the format of their rows.
fn parts_of(shape: &StateShape, packing: Packing) -> impl Iterator<Item = ((Scope, usize), PoolShape, RowFormat)> {
    let formats = [packing.kv(), packing.index()];
    shape.layers.iter().flat_map(move |(scope, layer)| {
        let pools = [layer.compressed, layer.index].into_iter().enumerate();
        pools.filter_map(move |(part, pool)| Some(((*scope, part), pool?, formats[part])))
    })
}

fn pack_rows(format: RowFormat, dim: usize, rows: &[f32], out: &mut Vec<u8>) -> bool {
    rows.chunks_exact(dim).all(|row| format.pack(row, out))
}

/// Takes `count` rows off the front of `bytes`; `None` if there are not so many.
fn unpack_rows(format: RowFormat, dim: usize, count: usize, bytes: &mut &[u8]) -> Option<Vec<f32>> {
    let row_bytes = format.bytes(dim);
    let (rows, rest) = bytes.split_at_checked(count * row_bytes)?;
    *bytes = rest;
    let mut out = Vec::with_capacity(count * dim);
    rows.chunks_exact(row_bytes).for_each(|row| format.unpack(dim, row, &mut out));
    Some(out)
}

impl Boundary {
    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.floats().map(|part| part.len() as u64 * 4).sum()
    }

    fn floats(&self) -> impl Iterator<Item = &[f32]> {
        self.layers.values().flat_map(|layer| {
            let lanes = layer.lanes.iter().flatten().flat_map(|lane| [lane.kv.as_slice(), lane.gate.as_slice()]);
            std::iter::once(layer.window.as_slice()).chain(lanes)
        })
    }

    /// Bytes of the file of such a boundary.
    pub fn packed_bytes(&self, shape: &StateShape, packing: Packing) -> u64 {
        let windows = self.layers.iter().map(|(scope, layer)| {
            let dim = shape.layers.get(scope).map_or(1, |shape| shape.head_dim);
            layer.window.len() / dim * packing.kv().bytes(dim)
        });
        let lanes = self.layers.values().flat_map(|layer| layer.lanes.iter().flatten());
        let lanes = lanes.map(|lane| (lane.kv.len() + lane.gate.len()) * 4);
        windows.chain(lanes).sum::<usize>() as u64
    }

    /// Everything as bytes, in a fixed order: by layer, the window, then of each compressor with overlap its lane's values
    /// and gates. `None` if the rows are not of the class that `packing` is for.
    pub fn pack(&self, shape: &StateShape, packing: Packing) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(self.packed_bytes(shape, packing) as usize);
        for (scope, layer) in &self.layers {
            let window = pack_rows(packing.kv(), shape.layers.get(scope)?.head_dim, &layer.window, &mut out);
            let lanes = layer.lanes.iter().flatten().flat_map(|lane| [&lane.kv, &lane.gate]);
            if !window || !lanes.into_iter().all(|lane| RowFormat::F32.pack(lane, &mut out)) {
                return None;
            }
        }
        Some(out)
    }

    /// A boundary after `len` tokens from the bytes of [`Self::pack`]. Windows are those of the trunk's layers; those of
    /// drafter stages are left out when storing and empty here.
    ///
    /// # Errors
    ///
    /// If their number is another than this shape has.
    pub fn unpack(shape: &StateShape, packing: Packing, len: usize, bytes: &[u8]) -> Result<Self, AttachError> {
        let mut rest = bytes;
        let mut layers = BTreeMap::new();
        for (scope, layer) in &shape.layers {
            let rows = if matches!(scope, Scope::Stage(_)) { 0 } else { layer.window.min(len) };
            let Some(window) = unpack_rows(packing.kv(), layer.head_dim, rows, &mut rest) else {
                return misfit("too little boundary");
            };
            let mut lanes = [None, None];
            for (lane, pool) in lanes.iter_mut().zip([layer.compressed, layer.index]) {
                let Some(pool) = pool.filter(|pool| pool.overlap) else { continue };
                let mut take = || unpack_rows(RowFormat::F32, pool.dim, pool.ratio, &mut rest);
                let (Some(kv), Some(gate)) = (take(), take()) else { return misfit("too little boundary") };
                *lane = Some(Lane { kv, gate });
            }
            layers.insert(*scope, BoundaryLayer { window, lanes });
        }
        if rest.is_empty() { Ok(Self { len, layers }) } else { misfit("too much boundary") }
    }
}

impl SequenceState {
    /// Also wants the boundaries after these numbers of tokens, each of which is a multiple of [`StateShape::block_tokens`] and
    /// in no step that is done or in flight.
    pub fn want_boundaries(&self, ends: &[usize]) {
        for layer in self.layers.values() {
            let layer = &mut *layer.lock().unwrap_or_else(PoisonError::into_inner);
            for pool in [&mut layer.compressed, &mut layer.index].into_iter().flatten() {
                if pool.shape.overlap {
                    pool.wanted.extend_from_slice(ends);
                }
            }
        }
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(ends);
    }

    /// Boundaries that were wanted and have been committed since.
    pub fn take_boundaries(&self) -> Vec<Boundary> {
        std::mem::take(&mut *self.boundaries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Called by a commit up to `end`, before old rows go.
    pub(super) fn catch_boundaries(&self, end: usize) {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let due: Vec<usize> = wanted.iter().copied().filter(|at| *at <= end).collect();
        wanted.retain(|at| *at > end);
        drop(wanted);
        let caught = due.into_iter().filter_map(|at| self.boundary(at));
        self.boundaries.lock().unwrap_or_else(PoisonError::into_inner).extend(caught);
        // Lanes of a boundary that could not be had.
        for layer in self.layers.values() {
            let layer = &mut *layer.lock().unwrap_or_else(PoisonError::into_inner);
            for pool in [&mut layer.compressed, &mut layer.index].into_iter().flatten() {
                pool.lanes.retain(|(at, _)| *at > end);
            }
        }
    }

    /// The boundary after `at` tokens, if everything it needs is still there.
    fn boundary(&self, at: usize) -> Option<Boundary> {
        let mut layers = BTreeMap::new();
        for (scope, layer) in &self.layers {
            let layer = &mut *layer.lock().unwrap_or_else(PoisonError::into_inner);
            // Stages can do without: the drafter's context fills again.
            let window = match scope {
                Scope::Stage(_) => Vec::new(),
                _ => window_rows(layer, at)?,
            };
            let mut lanes = [None, None];
            for (lane, pool) in lanes.iter_mut().zip([&mut layer.compressed, &mut layer.index]) {
                let Some(pool) = pool.as_mut().filter(|pool| pool.shape.overlap) else { continue };
                let kept = pool.lanes.iter().position(|(end, _)| *end == at).map(|i| pool.lanes.swap_remove(i).1);
                *lane = Some(kept.or_else(|| Lane::of(pool, at))?);
            }
            layers.insert(*scope, BoundaryLayer { window, lanes });
        }
        Some(Boundary { len: at, layers })
    }

    /// The rows of block `index`, shared as far as their pieces are whole; `None` before all of them are committed.
    pub fn block(&self, index: usize, block_tokens: usize) -> Option<BlockRows> {
        if (index + 1) * block_tokens > self.len() {
            return None;
        }
        let layers = self.layers.iter().map(|(scope, layer)| {
            let layer = layer.lock().unwrap_or_else(PoisonError::into_inner);
            let rows = |pool: &Option<Pool>| {
                let count = block_tokens / pool.as_ref()?.shape.ratio;
                pool.as_ref().map(|pool| pool.rows.share(index * count, count))
            };
            (*scope, [rows(&layer.compressed), rows(&layer.index)])
        });
        Some(BlockRows { layers: layers.collect() })
    }

    /// A sequence that continues after `blocks`, the last of which ends at `boundary`.
    ///
    /// # Errors
    ///
    /// If these are not parts of a sequence of this shape.
    pub fn attach(shape: &StateShape, blocks: &[Arc<BlockRows>], boundary: &Boundary) -> Result<Self, AttachError> {
        let block_tokens = shape.block_tokens();
        let len = boundary.len;
        if len != blocks.len() * block_tokens {
            return misfit("blocks and boundary end at different tokens");
        }
        let state = Self::new(shape);
        for (scope, layer_shape) in &shape.layers {
            let layer = &mut *state.layer(*scope);
            let Some(saved) = boundary.layers.get(scope) else { return misfit("a layer is missing") };
            if !saved.window.len().is_multiple_of(layer_shape.head_dim)
                || saved.window.len() > len * layer_shape.head_dim
            {
                return misfit("a window has another width");
            }
            layer.window.replace(len - saved.window.len() / layer_shape.head_dim, &saved.window);
            for (part, pool) in [&mut layer.compressed, &mut layer.index].into_iter().enumerate() {
                let Some(pool) = pool else { continue };
                for block in blocks {
                    let Some(rows) = block.layers.get(scope).and_then(|parts| parts[part].as_ref()) else {
                        return misfit("a block lacks rows");
                    };
                    if rows.len() != block_tokens / pool.shape.ratio * pool.shape.dim {
                        return misfit("a block has another number of rows");
                    }
                    pool.rows.append_shared(rows);
                }
                attach_lane(pool, saved.lanes[part].as_ref(), len)?;
            }
        }
        *state.len.lock().unwrap_or_else(PoisonError::into_inner) = len;
        Ok(state)
    }
}

fn window_rows(layer: &LayerState, at: usize) -> Option<Vec<f32>> {
    let first = at.saturating_sub(layer.window.capacity);
    let whole = first >= layer.window.first() && at <= layer.window.end();
    whole.then(|| layer.window.rows(first..at).to_vec())
}

fn attach_lane(pool: &mut Pool, lane: Option<&Lane>, len: usize) -> Result<(), AttachError> {
    let PoolShape { ratio, dim, overlap } = pool.shape;
    pool.tail_start = len;
    if !overlap {
        return Ok(());
    }
    let Some(lane) = lane else { return misfit("an overlap lane is missing") };
    if lane.kv.len() != ratio * dim || lane.gate.len() != ratio * dim {
        return misfit("an overlap lane has another width");
    }
    pool.tail_start = len - ratio;
    // Lane B of the block before has been used up.
    let unused = vec![0.0; dim];
    for (kv, gate) in lane.kv.chunks_exact(dim).zip(lane.gate.chunks_exact(dim)) {
        pool.append(&[kv, &unused].concat(), &[gate, &unused].concat());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{LayerShape, Rows};
    use super::*;

    fn shape() -> StateShape {
        let pool = |ratio, dim, overlap| Some(PoolShape { ratio, dim, overlap });
        let layer = LayerShape { head_dim: 2, window: 5, compressed: pool(4, 2, true), index: pool(4, 3, true) };
        let slow = LayerShape { head_dim: 2, window: 5, compressed: pool(128, 2, false), index: None };
        let plain = LayerShape { head_dim: 2, window: 5, compressed: None, index: None };
        let layers = [(Scope::Layer(0), plain), (Scope::Layer(1), layer), (Scope::Layer(2), slow)];
        StateShape { layers: layers.into_iter().collect(), rounded: false }
    }

    /// Appends tokens whose values are their positions, as the nodes of one step would, and keeps them.
    fn stage(state: &SequenceState, positions: std::ops::Range<usize>) {
        stage_drafts(state, positions.clone());
        for scope in [0, 1, 2].map(Scope::Layer) {
            let layer = &mut *state.layer(scope);
            for pool in [&mut layer.compressed, &mut layer.index].into_iter().flatten() {
                pool.trim(positions.end);
            }
        }
        state.commit(positions.len());
    }

    /// As [`stage`], but whether any are kept is left open.
    fn stage_drafts(state: &SequenceState, positions: std::ops::Range<usize>) {
        for scope in [0, 1, 2].map(Scope::Layer) {
            let layer = &mut *state.layer(scope);
            for p in positions.clone() {
                layer.window.append(p, &[p as f32; 2]);
                for pool in [&mut layer.compressed, &mut layer.index].into_iter().flatten() {
                    let width = pool.shape.width();
                    pool.append(&vec![p as f32; width], &vec![-(p as f32); width]);
                    if (p + 1) % pool.shape.ratio == 0 {
                        let row = vec![p as f32 + 0.5; pool.shape.dim];
                        pool.rows.push(&row);
                    }
                }
            }
        }
    }

    /// Those that are kept may end at the boundary or after it; of one among rows that are taken back nothing is left.
    #[test]
    fn boundaries_among_drafts_are_those_of_rows_that_are_kept() {
        let want = SequenceState::new(&shape());
        want.want_boundaries(&[128]);
        stage(&want, 0..128);
        let want = want.take_boundaries();
        for kept in 1..=6 {
            let state = SequenceState::new(&shape());
            stage(&state, 0..125);
            state.want_boundaries(&[128]);
            stage_drafts(&state, 125..131);
            state.commit(kept);
            state.roll_back();
            if kept < 3 {
                assert_eq!(state.take_boundaries(), [], "{kept} kept");
                state.want_boundaries(&[128]);
                stage(&state, 125 + kept..130);
            }
            assert_eq!(state.take_boundaries(), want, "{kept} kept");
            assert!(state.wanted.lock().expect("not poisoned").is_empty(), "{kept} kept");
        }
    }

    #[test]
    fn a_sequence_attached_inside_a_chunk_is_the_one_that_stopped_there() {
        for (first, second) in [(0, 700), (100, 300), (256, 700), (3, 257)] {
            let state = SequenceState::new(&shape());
            if first > 0 {
                stage(&state, 0..first);
            }
            let ends: Vec<usize> = (first / 128 + 1..=second / 128).map(|block| block * 128).collect();
            state.want_boundaries(&ends);
            stage(&state, first..second);
            let caught = state.take_boundaries();
            assert_eq!(caught.iter().map(|b| b.len).collect::<Vec<_>>(), ends);
            for boundary in caught {
                let want = SequenceState::new(&shape());
                stage(&want, 0..boundary.len);
                let block = |index| state.block(index, 128).map(Arc::new).expect("committed");
                let blocks: Vec<Arc<BlockRows>> = (0..boundary.len / 128).map(block).collect();
                // Through bytes, as a store would.
                let packing = Packing::Floats;
                let bytes = boundary.pack(&shape(), packing).expect("holds everything");
                assert_eq!([bytes.len() as u64, boundary.packed_bytes(&shape(), packing)], [boundary.bytes(); 2]);
                assert_eq!(boundary.bytes(), shape().boundary_bytes(packing));
                assert_eq!(Boundary::unpack(&shape(), packing, boundary.len, &bytes).expect("fits"), boundary);
                let bytes = blocks[0].pack(&shape(), packing).expect("holds everything");
                assert_eq!(
                    [bytes.len() as u64, BlockRows::packed_bytes(&shape(), packing)],
                    [shape().bytes_per_block(); 2]
                );
                assert_eq!(BlockRows::unpack(&shape(), packing, &bytes).expect("fits"), *blocks[0]);
                let attached = SequenceState::attach(&shape(), &blocks, &boundary).expect("fits");
                for s in [&want, &attached] {
                    let len = s.len();
                    stage(s, len..len + 130);
                }
                assert_eq!(attached.snapshot(), want.snapshot(), "after {}", boundary.len);
            }
        }
    }

    #[test]
    fn whole_pieces_are_shared() {
        let state = SequenceState::new(&shape());
        stage(&state, 0..300);
        let (a, b) = (state.block(1, 128).expect("committed"), state.block(1, 128).expect("committed"));
        let rows = |block: &BlockRows| Arc::clone(block.layers[&Scope::Layer(1)][0].as_ref().expect("has rows"));
        assert!(Arc::ptr_eq(&rows(&a), &rows(&b)));
        assert_eq!(rows(&a).len(), Rows::PIECE * 2);
        assert!(state.block(2, 128).is_none(), "not yet whole");
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let state = SequenceState::new(&shape());
        state.want_boundaries(&[128]);
        stage(&state, 0..128);
        let boundary = state.take_boundaries().remove(0);
        let block = Arc::new(state.block(0, 128).expect("committed"));
        assert!(SequenceState::attach(&shape(), &[], &boundary).is_err());
        let mut other = shape();
        other.layers.get_mut(&Scope::Layer(2)).expect("there").head_dim = 4;
        other.layers.get_mut(&Scope::Layer(1)).expect("there").index = None;
        assert!(SequenceState::attach(&other, &[block], &boundary).is_err());
        for packing in [Packing::Floats, Packing::Official { rotary: 1 }] {
            assert!(Boundary::unpack(&shape(), packing, 128, &[0; 12]).is_err());
            assert!(BlockRows::unpack(&shape(), packing, &[0; 12000]).is_err());
        }
        // Positions beyond 16 are not on the grid of e4m3.
        assert_eq!(boundary.pack(&shape(), Packing::Official { rotary: 0 }), None);
    }
}
