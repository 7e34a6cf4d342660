//! Memory of one slot of a step, used by claim: whole for reading, whole for writing, or some columns of some rows for
//! writing. Several devices that share an operation thus write into one value at the same time, and nothing is copied when
//! their parts are joined.
//!
//! The dependencies of a step keep claims from meeting; one that meets another nevertheless is a defect, and panics.

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `rows` of a value of `groups` times `per_group` columns, and of each group the columns `channels`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    /// Which rows.
    pub rows: Range<usize>,
    /// Groups of columns, 1 for an ordinary product.
    pub groups: usize,
    /// Columns of a group.
    pub per_group: usize,
    /// Which of them.
    pub channels: Range<usize>,
}

impl Columns {
    fn overlaps(&self, other: &Self) -> bool {
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        let same_shape = (self.groups, self.per_group) == (other.groups, other.per_group);
        meet(&self.rows, &other.rows) && (!same_shape || meet(&self.channels, &other.channels))
    }

    fn is_whole_rows(&self) -> bool {
        self.channels == (0..self.per_group)
    }
}

#[derive(Clone, Debug)]
enum Use {
    Read,
    Write,
    Columns(Columns),
}

impl Use {
    fn excludes(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Read, Self::Read) => false,
            (Self::Columns(a), Self::Columns(b)) => a.overlaps(b),
            _ => true,
        }
    }
}

#[derive(Debug, Default)]
struct Claims {
    live: Vec<(u64, Use)>,
    next: u64,
}

/// The numbers of a slot.
pub(crate) struct Slot {
    /// Not touched while claims live, but through `start`.
    numbers: UnsafeCell<Vec<f32>>,
    start: *mut f32,
    len: usize,
    claims: Mutex<Claims>,
}

// SAFETY: the numbers are reached only through guards, whose claims do not overlap if one of them writes; `claims` has a lock.
unsafe impl Sync for Slot {}
// SAFETY: a slot owns its numbers, and `start` points at them wherever the slot goes.
unsafe impl Send for Slot {}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({} numbers)", self.len)
    }
}

impl Slot {
    pub(crate) fn new(mut numbers: Vec<f32>) -> Self {
        let (start, len) = (numbers.as_mut_ptr(), numbers.len());
        Self { numbers: UnsafeCell::new(numbers), start, len, claims: Mutex::default() }
    }

    pub(crate) fn into_numbers(self) -> Vec<f32> {
        self.numbers.into_inner()
    }

    pub(crate) fn read(&self) -> ReadSlot<'_> {
        ReadSlot(self.claim(Use::Read))
    }

    pub(crate) fn write(&self) -> WriteSlot<'_> {
        WriteSlot(self.claim(Use::Write))
    }

    pub(crate) fn columns(&self, columns: Columns) -> WriteColumns<'_> {
        let (width, channels) = (columns.groups * columns.per_group, &columns.channels);
        assert!(channels.start <= channels.end && channels.end <= columns.per_group, "no such columns: {columns:?}");
        assert!(columns.rows.start <= columns.rows.end, "no such rows: {columns:?}");
        assert!(columns.rows.end * width <= self.len, "{columns:?} leave a slot of {} numbers", self.len);
        WriteColumns { claim: self.claim(Use::Columns(columns.clone())), columns }
    }

    fn claim(&self, wanted: Use) -> Claim<'_> {
        let mut claims = lock(&self.claims);
        if let Some((_, other)) = claims.live.iter().find(|(_, other)| wanted.excludes(other)) {
            let text = format!("a slot is claimed for {wanted:?} while it is in use for {other:?}");
            drop(claims);
            panic!("{text}");
        }
        let id = claims.next;
        claims.next += 1;
        claims.live.push((id, wanted));
        Claim { slot: self, id }
    }
}

/// Keeps others out while it lives.
struct Claim<'a> {
    slot: &'a Slot,
    id: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        lock(&self.slot.claims).live.retain(|(id, _)| *id != self.id);
    }
}

fn lock(claims: &Mutex<Claims>) -> MutexGuard<'_, Claims> {
    // Nothing under this lock can be left half-changed.
    claims.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The numbers of a slot, to read.
pub struct ReadSlot<'a>(Claim<'a>);

impl Deref for ReadSlot<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: `start` and `len` are those of the slot's vector, which outlives the claim; the claim excludes writers.
        unsafe { std::slice::from_raw_parts(self.0.slot.start, self.0.slot.len) }
    }
}

/// The numbers of a slot, to write.
pub struct WriteSlot<'a>(Claim<'a>);

impl Deref for WriteSlot<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: as for `ReadSlot`; the claim excludes everybody else.
        unsafe { std::slice::from_raw_parts(self.0.slot.start, self.0.slot.len) }
    }
}

impl DerefMut for WriteSlot<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as for `ReadSlot`; the claim excludes everybody else, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.slot.start, self.0.slot.len) }
    }
}

/// Some columns of some rows, to write.
pub struct WriteColumns<'a> {
    claim: Claim<'a>,
    columns: Columns,
}

/// Where a part of an operation puts its result.
#[derive(Debug)]
pub enum Output<'a> {
    /// Whole rows, one after another.
    Rows(&'a mut [f32]),
    /// For each row and group a piece of its columns.
    Pieces(Vec<&'a mut [f32]>),
}

impl WriteColumns<'_> {
    /// The numbers, in the order of the rows.
    pub fn output(&mut self) -> Output<'_> {
        let Columns { rows, groups, per_group, channels } = &self.columns;
        let width = groups * per_group;
        // SAFETY: inside of the slot (checked when the claim was made), whose vector outlives the claim; nobody else has a
        // claim that overlaps these rows and columns.
        let piece =
            |first: usize, len: usize| unsafe { std::slice::from_raw_parts_mut(self.claim.slot.start.add(first), len) };
        if self.columns.is_whole_rows() {
            return Output::Rows(piece(rows.start * width, rows.len() * width));
        }
        let starts = (rows.start * groups..rows.end * groups).map(|i| i * per_group + channels.start);
        Output::Pieces(starts.map(|first| piece(first, channels.len())).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn columns(rows: Range<usize>, channels: Range<usize>) -> Columns {
        Columns { rows, groups: 2, per_group: 3, channels }
    }

    #[test]
    fn parts_of_a_value_are_written_at_once() {
        let slot = Slot::new(vec![0.0; 4 * 6]);
        std::thread::scope(|scope| {
            for (number, part) in [(1.0, columns(0..4, 0..1)), (2.0, columns(0..2, 1..3)), (3.0, columns(2..4, 1..3))] {
                let mut part = slot.columns(part);
                scope.spawn(move || match part.output() {
                    Output::Pieces(pieces) => pieces.into_iter().for_each(|piece| piece.fill(number)),
                    Output::Rows(_) => panic!("no part has whole rows"),
                });
            }
        });
        let [upper, lower] = [[1.0, 2.0, 2.0].repeat(4), [1.0, 3.0, 3.0].repeat(4)];
        assert_eq!(&slot.read()[..], [upper, lower].concat());
        match slot.columns(columns(1..3, 0..3)).output() {
            Output::Rows(rows) => assert_eq!(rows.len(), 12),
            Output::Pieces(_) => panic!("whole rows are one piece"),
        }
    }

    #[test]
    fn claims_that_meet_are_a_defect() {
        let slot = Slot::new(vec![0.0; 12]);
        let meets = |claim: &dyn Fn()| catch_unwind(AssertUnwindSafe(claim)).is_err();
        {
            let _reading = slot.read();
            assert!(!meets(&|| drop(slot.read())));
            assert!(meets(&|| drop(slot.write())) && meets(&|| drop(slot.columns(columns(0..1, 0..1)))));
        }
        {
            let _part = slot.columns(columns(0..1, 1..3));
            assert!(!meets(&|| drop(slot.columns(columns(0..2, 0..1)))));
            assert!(!meets(&|| drop(slot.columns(columns(1..2, 0..3)))));
            assert!(meets(&|| drop(slot.columns(columns(0..2, 2..3)))) && meets(&|| drop(slot.read())));
            // Of another shape, so nobody knows.
            assert!(meets(&|| drop(slot.columns(Columns { rows: 0..1, groups: 1, per_group: 6, channels: 0..1 }))));
        }
        assert!(!meets(&|| drop(slot.write())));
    }
}
