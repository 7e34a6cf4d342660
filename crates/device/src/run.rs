//! A running step: the template, what it is run on, its memory, and the state of its sequences.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use troika_base::StepId;
use troika_graph::{Element, StepGraph, StepRows, Value, ValueId};

use crate::slot::{Columns, ReadSlot, Slot, WriteColumns, WriteSlot};
use crate::state::SequenceState;

/// Memory of one slot.
#[derive(Debug)]
enum Buffer {
    F32(Slot),
    I32(RwLock<Vec<i32>>),
}

/// A step in flight. Devices claim its values to read and write them; the memory plan and the predecessors of each node see
/// to it that no two claims meet.
#[derive(Debug)]
pub struct StepRun {
    id: StepId,
    graph: Arc<StepGraph>,
    rows: StepRows,
    positions: Vec<i64>,
    /// One per segment.
    states: Vec<Arc<SequenceState>>,
    buffers: Vec<Buffer>,
}

/// Buffers of finished steps, kept for the next ones: allocating hundreds of megabytes per step costs more than many
/// operations do.
#[derive(Debug, Default)]
pub struct BufferPool {
    f32s: Mutex<Vec<Vec<f32>>>,
    i32s: Mutex<Vec<Vec<i32>>>,
}

impl BufferPool {
    /// Most buffers kept of each type; four steps of any model here have fewer slots.
    const MAX_KEPT: usize = 256;

    /// Frees everything that is kept.
    pub fn clear(&self) {
        lock(&self.f32s).clear();
        lock(&self.i32s).clear();
    }

    /// At least `elements` long, with whatever the last step left in it.
    fn take<T: Clone + Default>(kept: &Mutex<Vec<Vec<T>>>, elements: usize) -> Vec<T> {
        let mut kept = lock(kept);
        let length = |index: &usize| kept[*index].len();
        // The smallest that is large enough.
        let best = (0..kept.len()).filter(|index| length(index) >= elements).min_by_key(length);
        if let Some(index) = best {
            return kept.swap_remove(index);
        }
        // The largest makes way for a larger one, so that no more is kept than steps have ever held: the memory that
        // admission reckons with.
        let largest = (0..kept.len()).max_by_key(length);
        drop(largest.map(|index| kept.swap_remove(index)));
        drop(kept);
        vec![T::default(); elements]
    }

    fn give<T>(kept: &Mutex<Vec<Vec<T>>>, buffer: Vec<T>) {
        let mut kept = lock(kept);
        kept.push(buffer);
        if kept.len() > Self::MAX_KEPT {
            // The smallest is the cheapest to make again.
            let smallest = (0..kept.len()).min_by_key(|index| kept[*index].len());
            smallest.map(|index| kept.swap_remove(index));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while holding the lock leaves a list of buffers, which is never half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StepRun {
    /// Binds a template to tokens and sequences and takes memory for it.
    ///
    /// # Panics
    ///
    /// If the rows do not fit the template, or there is not one state per segment.
    pub fn new(
        id: StepId,
        graph: Arc<StepGraph>,
        rows: StepRows,
        states: Vec<Arc<SequenceState>>,
        pool: &BufferPool,
    ) -> Self {
        rows.check_invariants();
        assert_eq!(rows.num_rows(), graph.num_rows(), "the template is for another row count");
        assert_eq!(rows.logit_rows.len(), graph.num_logit_rows(), "the template is for another number of logit rows");
        assert_eq!(rows.segments.len(), states.len(), "one state per segment");
        let buffers = graph.memory().slots().iter().map(|slot| match slot.element {
            Element::F32 => Buffer::F32(Slot::new(BufferPool::take(&pool.f32s, slot.elements))),
            Element::I32 => Buffer::I32(RwLock::new(BufferPool::take(&pool.i32s, slot.elements))),
        });
        let buffers = buffers.collect();
        let positions = rows.positions();
        Self { id, graph, rows, positions, states, buffers }
    }

    /// Number of the step.
    pub fn id(&self) -> StepId {
        self.id
    }

    /// The template.
    pub fn graph(&self) -> &Arc<StepGraph> {
        &self.graph
    }

    /// What it runs on.
    pub fn rows(&self) -> &StepRows {
        &self.rows
    }

    /// Absolute position of every row.
    pub fn positions(&self) -> &[i64] {
        &self.positions
    }

    /// State of each segment's sequence.
    pub fn states(&self) -> &[Arc<SequenceState>] {
        &self.states
    }

    /// A value's slot, which may be longer than the value: use [`Self::len`].
    ///
    /// # Panics
    ///
    /// If the value holds integers, or somebody writes it.
    pub fn read_f32(&self, value: ValueId) -> ReadSlot<'_> {
        self.slot(value).read()
    }

    /// As [`Self::read_f32`], for writing.
    ///
    /// # Panics
    ///
    /// If the value holds integers, or somebody uses it.
    pub fn write_f32(&self, value: ValueId) -> WriteSlot<'_> {
        self.slot(value).write()
    }

    /// Some columns of some rows of a value, whose other parts others may write meanwhile.
    ///
    /// # Panics
    ///
    /// If the value holds integers, does not have the columns, or somebody uses a part of them.
    pub fn write_columns(&self, value: ValueId, columns: Columns) -> WriteColumns<'_> {
        let Value { rows, cols, .. } = self.graph.value(value);
        assert!(columns.rows.end <= rows, "{columns:?} of {rows} rows");
        assert_eq!(columns.groups * columns.per_group, cols, "columns of the value that {columns:?} belong to");
        self.slot(value).columns(columns)
    }

    /// As [`Self::read_f32`], for integers.
    ///
    /// # Panics
    ///
    /// If the value holds floats.
    pub fn read_i32(&self, value: ValueId) -> RwLockReadGuard<'_, Vec<i32>> {
        let Buffer::I32(buffer) = self.buffer(value) else { panic!("{value:?} holds floats") };
        buffer.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Self::read_i32`], for writing.
    ///
    /// # Panics
    ///
    /// If the value holds floats.
    pub fn write_i32(&self, value: ValueId) -> RwLockWriteGuard<'_, Vec<i32>> {
        let Buffer::I32(buffer) = self.buffer(value) else { panic!("{value:?} holds floats") };
        buffer.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Elements of a value.
    pub fn len(&self, value: ValueId) -> usize {
        self.graph.value(value).len()
    }

    /// A copy of a kept value.
    pub fn copy_f32(&self, value: ValueId) -> Vec<f32> {
        self.read_f32(value)[..self.len(value)].to_vec()
    }

    /// A copy of a kept integer value.
    pub fn copy_i32(&self, value: ValueId) -> Vec<i32> {
        self.read_i32(value)[..self.len(value)].to_vec()
    }

    /// Gives the step's memory back.
    pub fn recycle(self, pool: &BufferPool) {
        for buffer in self.buffers {
            match buffer {
                Buffer::F32(buffer) => {
                    BufferPool::give(&pool.f32s, buffer.into_numbers());
                }
                Buffer::I32(buffer) => {
                    BufferPool::give(&pool.i32s, buffer.into_inner().unwrap_or_else(PoisonError::into_inner));
                }
            }
        }
    }

    fn slot(&self, value: ValueId) -> &Slot {
        let Buffer::F32(slot) = self.buffer(value) else { panic!("{value:?} holds integers") };
        slot
    }

    fn buffer(&self, value: ValueId) -> &Buffer {
        &self.buffers[self.graph.memory().slot_of(value).0 as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of growing width, as prompts of different lengths make them.
    #[test]
    fn a_pool_keeps_no_more_than_the_widest_step_held() {
        let kept = Mutex::new(Vec::new());
        for width in [1, 2, 100, 7, 512, 300, 512, 1] {
            let step: Vec<Vec<f32>> = [10, 30, 20].map(|cols| BufferPool::take(&kept, width * cols)).into();
            assert!(step.iter().zip([10, 30, 20]).all(|(buffer, cols)| buffer.len() >= width * cols));
            step.into_iter().for_each(|buffer| BufferPool::give(&kept, buffer));
        }
        let kept = lock(&kept);
        assert_eq!(kept.len(), 3);
        assert!(kept.iter().map(Vec::len).sum::<usize>() <= 3 * 512 * 30);
    }
}
