//! A cheap, shareable view of bytes that somebody else owns: a mapped file, a static, a vector.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A range of bytes and the owner that keeps them alive. Cloning copies two words and a counter.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// All bytes of `owner`.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let len = owner.as_ref().len();
        Self { owner: Arc::new(owner), range: 0..len }
    }

    /// No bytes.
    pub fn empty() -> Self {
        Self::new([])
    }

    /// The part `range` of this view, or `None` if it does not lie inside.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Self { owner: Arc::clone(&self.owner), range: start..start + range.len() })
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.range.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_stay_inside() {
        let bytes = SharedBytes::new(vec![0u8, 1, 2, 3, 4]);
        let part = bytes.slice(1..4).expect("inside");
        assert_eq!(&*part, &[1, 2, 3]);
        assert_eq!(&*part.slice(1..2).expect("inside"), &[2]);
        assert!(part.slice(1..4).is_none(), "reaches past the view, though not past the owner");
        #[expect(clippy::reversed_empty_ranges, reason = "the point of the test")]
        let reversed = 2..1;
        assert!(bytes.slice(reversed).is_none());
    }
}
