//! Rows rounded once and kept for as long as the rows themselves: the state of a sequence has them beside its rows, so that a
//! step rounds what is new and no more.

use std::ops::Range;

use super::{ROW_MAX, STEP, Shape, round};
use crate::Ctx;
use crate::parallel::{Disjoint, run_tasks};

/// Rows of a piece, so that growing never copies what is there.
const PIECE: usize = 32;

/// Rounded rows, oldest first. They are derived: whoever changes or drops rows drops their codes too, and rounds again.
#[derive(Clone, Debug)]
pub struct RowCodes {
    width: usize,
    shape: Shape,
    pieces: Vec<Piece>,
    /// Places of the first piece whose rows were dropped.
    skip: usize,
    len: usize,
}

#[derive(Clone, Debug)]
struct Piece {
    /// `[PIECE, pairs]`
    pairs: Vec<Line>,
    /// `[PIECE, chains]`
    scales: Vec<f32>,
}

/// Pairs that one load of the widest registers takes, where it takes one line of the cache.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u32; STEP]);

/// The pairs of some lines.
#[inline(always)]
fn words(lines: &[Line]) -> &[u32] {
    const { assert!(size_of::<Line>() == 4 * STEP) };
    // SAFETY: a line is an array of words and nothing else (asserted above).
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * STEP) }
}

fn words_mut(lines: &mut [Line]) -> &mut [u32] {
    // SAFETY: as above, and any words are a line.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * STEP) }
}

/// Some rows of [`RowCodes`]. Copying it copies a few words.
#[derive(Clone, Copy, Debug)]
pub struct CodedRows<'a> {
    width: usize,
    shape: Shape,
    pieces: &'a [Piece],
    first: usize,
    len: usize,
}

impl RowCodes {
    /// No rows, of `width` numbers.
    pub fn new(width: usize) -> Self {
        assert!(width > 0, "rows must have a width");
        Self { width, shape: Shape::of(width), pieces: Vec::new(), skip: 0, len: 0 }
    }

    /// Bytes of one row of `width` numbers.
    pub fn row_bytes(width: usize) -> usize {
        let Shape { width, chains } = Shape::of(width);
        4 * (width + chains)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.pieces.len() * PIECE * Self::row_bytes(self.width)
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Rounds `count` rows and appends them; `row(i)` is the `i`-th of them.
    ///
    /// # Panics
    ///
    /// If a row has another width.
    pub fn extend<'a>(&mut self, ctx: Ctx, count: usize, row: impl Fn(usize) -> &'a [f32] + Sync) {
        let Shape { width, chains } = self.shape;
        let (start, end) = (self.skip + self.len, self.skip + self.len + count);
        let empty = || Piece { pairs: vec![Line([0; STEP]); PIECE * width / STEP], scales: vec![0.0; PIECE * chains] };
        self.pieces.resize_with(end.div_ceil(PIECE), empty);
        let first = start / PIECE;
        let pieces = Disjoint::new(&mut self.pieces[first..]);
        run_tasks(ctx.light(count * self.width), pieces.len(), |task| {
            // SAFETY: each task index is given out once and each task has a piece of its own.
            let piece = unsafe { &mut pieces.piece(task..task + 1)[0] };
            let at = (first + task) * PIECE;
            for place in start.max(at)..end.min(at + PIECE) {
                let (row, i) = (row(place - start), place - at);
                assert_eq!(row.len(), self.width, "numbers of a row");
                let pairs = &mut words_mut(&mut piece.pairs)[i * width..(i + 1) * width];
                round(ctx.level, row, ROW_MAX, pairs, &mut piece.scales[i * chains..(i + 1) * chains]);
            }
        });
        self.len += count;
    }

    /// Drops rows after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.pieces.truncate((self.skip + self.len).div_ceil(PIECE));
    }

    /// Drops the first `count` rows, or all if there are no more.
    pub fn drop_first(&mut self, count: usize) {
        let count = count.min(self.len);
        let places = self.skip + count;
        self.len -= count;
        self.pieces.drain(..places / PIECE);
        self.skip = places % PIECE;
    }

    /// The rows with the numbers `range`.
    ///
    /// # Panics
    ///
    /// If one does not exist.
    pub fn rows(&self, range: Range<usize>) -> CodedRows<'_> {
        assert!(range.start <= range.end && range.end <= self.len, "rows {range:?} of {}", self.len);
        let (width, shape) = (self.width, self.shape);
        CodedRows { width, shape, pieces: &self.pieces, first: self.skip + range.start, len: range.len() }
    }
}

impl<'a> CodedRows<'a> {
    /// No rows, of `width` numbers.
    pub fn none(width: usize) -> Self {
        Self { width, shape: Shape::of(width), pieces: &[], first: 0, len: 0 }
    }

    /// Numbers in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` rows.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    #[must_use]
    pub fn first(self, len: usize) -> Self {
        assert!(len <= self.len, "{len} of {} rows", self.len);
        Self { len, ..self }
    }

    /// Pairs of row `i` and its scales, one for each chain.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> (&'a [u32], &'a [f32]) {
        assert!(i < self.len, "row {i} of {}", self.len);
        let (place, Shape { width, chains }) = (self.first + i, self.shape);
        let (piece, i) = (&self.pieces[place / PIECE], place % PIECE);
        (&words(&piece.pairs)[i * width..(i + 1) * width], &piece.scales[i * chains..(i + 1) * chains])
    }
}
