//! Parts of a sequence's state that other sequences, and later ones, can start from: the append-only rows of a block of
//! tokens, shared, and what has to be carried across the block's end besides (model spec 11.3).

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use troika_graph::Scope;

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

    /// The rows in a fixed order: by layer, the layer's compressor before the indexer's.
    pub fn floats(&self) -> impl Iterator<Item = &[f32]> {
        self.layers.values().flatten().flatten().map(|rows| rows.as_slice())
    }

    /// Rows from the floats of [`Self::floats`], one after another.
    ///
    /// # Errors
    ///
    /// If their number is another than a block of this shape has.
    pub fn from_floats(shape: &StateShape, floats: &[f32]) -> Result<Self, AttachError> {
        let block = shape.block_tokens();
        let mut rest = floats;
        let mut layers = BTreeMap::new();
        for (scope, layer) in &shape.layers {
            let mut parts = [None, None];
            for (part, pool) in parts.iter_mut().zip([layer.compressed, layer.index]) {
                let Some(pool) = pool else { continue };
                let Some((rows, after)) = rest.split_at_checked(block / pool.ratio * pool.dim) else {
                    return misfit("too few rows");
                };
                (*part, rest) = (Some(Arc::new(rows.to_vec())), after);
            }
            layers.insert(*scope, parts);
        }
        if rest.is_empty() { Ok(Self { layers }) } else { misfit("too many rows") }
    }
}

impl Boundary {
    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.floats().map(|part| part.len() as u64 * 4).sum()
    }

    /// Everything in a fixed order: by layer, the window, then of each compressor with overlap its lane's values and gates.
    pub fn floats(&self) -> impl Iterator<Item = &[f32]> {
        self.layers.values().flat_map(|layer| {
            let lanes = layer.lanes.iter().flatten().flat_map(|lane| [lane.kv.as_slice(), lane.gate.as_slice()]);
            std::iter::once(layer.window.as_slice()).chain(lanes)
        })
    }

    /// A boundary after `len` tokens from the floats of [`Self::floats`]. Windows are those of the trunk's layers; those of
    /// drafter stages are left out when storing and empty here.
    ///
    /// # Errors
    ///
    /// If their number is another than this shape has.
    pub fn from_floats(shape: &StateShape, len: usize, floats: &[f32]) -> Result<Self, AttachError> {
        let mut rest = floats;
        let mut take = |count: usize| {
            let (part, after) = rest.split_at_checked(count)?;
            rest = after;
            Some(part.to_vec())
        };
        let mut layers = BTreeMap::new();
        for (scope, layer) in &shape.layers {
            let rows = if matches!(scope, Scope::Stage(_)) { 0 } else { layer.window.min(len) };
            let Some(window) = take(rows * layer.head_dim) else { return misfit("too little boundary") };
            let mut lanes = [None, None];
            for (lane, pool) in lanes.iter_mut().zip([layer.compressed, layer.index]) {
                let Some(pool) = pool.filter(|pool| pool.overlap) else { continue };
                let (Some(kv), Some(gate)) = (take(pool.ratio * pool.dim), take(pool.ratio * pool.dim)) else {
                    return misfit("too little boundary");
                };
                *lane = Some(Lane { kv, gate });
            }
            layers.insert(*scope, BoundaryLayer { window, lanes });
        }
        if rest.is_empty() { Ok(Self { len, layers }) } else { misfit("too much boundary") }
    }
}

impl SequenceState {
    /// Wants the boundaries after these numbers of tokens, none of which is computed yet and each of which is a multiple of
    /// [`StateShape::block_tokens`]; replaces what was wanted before. No step of the sequence may be in flight.
    pub fn want_boundaries(&self, ends: &[usize]) {
        for layer in self.layers.values() {
            let layer = &mut *layer.lock().unwrap_or_else(PoisonError::into_inner);
            for pool in [&mut layer.compressed, &mut layer.index].into_iter().flatten() {
                pool.wanted = if pool.shape.overlap { ends.to_vec() } else { Vec::new() };
                pool.lanes.clear();
            }
        }
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = ends.to_vec();
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
            layer.window.first = len - saved.window.len() / layer_shape.head_dim;
            layer.window.rows.clone_from(&saved.window);
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
        StateShape { layers: layers.into_iter().collect() }
    }

    /// Appends tokens whose values are their positions, as the nodes of one step would.
    fn stage(state: &SequenceState, positions: std::ops::Range<usize>) {
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
            for pool in [&mut layer.compressed, &mut layer.index].into_iter().flatten() {
                pool.trim(positions.end);
            }
        }
        state.commit(positions.len());
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
                // Through floats, as a store would.
                let floats: Vec<f32> = boundary.floats().flatten().copied().collect();
                assert_eq!(floats.len() as u64 * 4, boundary.bytes());
                assert_eq!(boundary.bytes(), shape().boundary_bytes());
                assert_eq!(Boundary::from_floats(&shape(), boundary.len, &floats).expect("fits"), boundary);
                let floats: Vec<f32> = blocks[0].floats().flatten().copied().collect();
                assert_eq!(floats.len() as u64 * 4, shape().bytes_per_block());
                assert_eq!(BlockRows::from_floats(&shape(), &floats).expect("fits"), *blocks[0]);
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
        assert!(Boundary::from_floats(&shape(), 128, &[0.0; 3]).is_err());
        assert!(BlockRows::from_floats(&shape(), &[0.0; 3000]).is_err());
    }
}
