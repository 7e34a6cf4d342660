//! Rows that lie in several contiguous pieces, as the blocks of a KV store do.

use std::sync::Arc;

/// A list of rows of `width` numbers in one or more pieces, oldest first. Copying it copies a few words.
///
/// Finding a row by number takes constant time if all pieces but the last hold the same number of rows, as blocks of a
/// store do, and a walk over the pieces otherwise.
#[derive(Clone, Copy, Debug)]
pub struct RowList<'a> {
    width: usize,
    pieces: Pieces<'a>,
    len: usize,
    /// Rows of every piece but the last; 0 if they differ.
    per_piece: usize,
}

/// The pieces, as their owner has them: to list them anew for each call would cost an allocation.
#[derive(Clone, Copy, Debug)]
enum Pieces<'a> {
    Borrowed(&'a [&'a [f32]]),
    Shared(&'a [Arc<Vec<f32>>]),
}

impl<'a> Pieces<'a> {
    fn len(self) -> usize {
        match self {
            Self::Borrowed(pieces) => pieces.len(),
            Self::Shared(pieces) => pieces.len(),
        }
    }

    fn get(self, i: usize) -> &'a [f32] {
        match self {
            Self::Borrowed(pieces) => pieces[i],
            Self::Shared(pieces) => &pieces[i],
        }
    }

    fn iter(self) -> impl Iterator<Item = &'a [f32]> {
        (0..self.len()).map(move |i| self.get(i))
    }
}

impl<'a> RowList<'a> {
    /// Rows of `width` numbers in `pieces`, which may be empty.
    ///
    /// # Panics
    ///
    /// If `width` is 0 or a piece does not hold whole rows.
    pub fn new(width: usize, pieces: &'a [&'a [f32]]) -> Self {
        Self::of(width, Pieces::Borrowed(pieces))
    }

    /// [`Self::new`] of pieces that several lists share.
    ///
    /// # Panics
    ///
    /// As [`Self::new`].
    pub fn shared(width: usize, pieces: &'a [Arc<Vec<f32>>]) -> Self {
        Self::of(width, Pieces::Shared(pieces))
    }

    fn of(width: usize, pieces: Pieces<'a>) -> Self {
        assert!(width > 0, "rows must have a width");
        let mut len = 0;
        for piece in pieces.iter() {
            assert!(
                piece.len().is_multiple_of(width),
                "a piece of {} numbers does not hold whole rows of {width}",
                piece.len()
            );
            len += piece.len() / width;
        }
        let per_piece = match pieces.len() {
            0 => 0,
            count => {
                let first = pieces.get(0).len();
                let equal = pieces.iter().take(count - 1).all(|piece| piece.len() == first);
                if equal && pieces.get(count - 1).len() <= first { first / width } else { 0 }
            }
        };
        Self { width, pieces, len, per_piece }
    }

    /// Numbers in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Row `i`, counted from the oldest.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn row(&self, i: usize) -> &'a [f32] {
        assert!(i < self.len, "row {i} of {}", self.len);
        let (piece, i) = match i.checked_div(self.per_piece) {
            Some(piece) => (self.pieces.get(piece), i % self.per_piece),
            None => self.find(i),
        };
        &piece[i * self.width..(i + 1) * self.width]
    }

    fn find(&self, mut i: usize) -> (&'a [f32], usize) {
        for piece in self.pieces.iter() {
            let rows = piece.len() / self.width;
            if i < rows {
                return (piece, i);
            }
            i -= rows;
        }
        unreachable!("the caller has checked the number")
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_in_any_layout() {
        let numbers: Vec<f32> = (0..24).map(|i| i as f32).collect();
        for cuts in [vec![], vec![4], vec![4, 4], vec![2, 6, 2], vec![0, 2, 10], vec![4, 4, 4, 4, 4, 4], vec![12, 0]] {
            let mut rest = &numbers[..];
            let mut pieces = Vec::new();
            for cut in cuts {
                let (piece, tail) = rest.split_at(cut);
                pieces.push(piece);
                rest = tail;
            }
            pieces.push(rest);
            let list = RowList::new(2, &pieces);
            assert_eq!(list.len(), 12);
            assert!((0..12).all(|i| list.row(i) == &numbers[2 * i..2 * i + 2]), "{pieces:?}");
            assert_eq!(list.first(5).len(), 5);
        }
        assert!(RowList::new(3, &[]).is_empty());
        let shared = [Arc::new(numbers[..8].to_vec()), Arc::new(numbers[8..].to_vec())];
        let list = RowList::shared(2, &shared);
        assert!(list.len() == 12 && (0..12).all(|i| list.row(i) == &numbers[2 * i..2 * i + 2]));
    }
}
