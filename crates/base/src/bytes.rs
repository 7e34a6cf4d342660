//! A cheap, shareable view of bytes that somebody else owns: a mapped file, a static, a vector.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Who keeps bytes that can be fetched again, such as a mapped file.
pub trait BytesOwner: AsRef<[u8]> + Send + Sync {
    /// The bytes of `range` will not be read soon: the owner may give their memory back. Reading them later must still give
    /// the same bytes.
    fn release(&self, range: Range<usize>);
}

/// A range of bytes and the owner that keeps them alive. Cloning copies two words and a counter.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn BytesOwner>,
    range: Range<usize>,
}

/// An owner that has the bytes nowhere else.
struct Held<T>(T);

impl<T: AsRef<[u8]>> AsRef<[u8]> for Held<T> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

impl<T: AsRef<[u8]> + Send + Sync> BytesOwner for Held<T> {
    fn release(&self, _: Range<usize>) {}
}

impl SharedBytes {
    /// All bytes of `owner`.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self::owned_by(Held(owner))
    }

    /// All bytes of an owner that can fetch them again.
    pub fn owned_by(owner: impl BytesOwner + 'static) -> Self {
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

    /// Says that these bytes will not be read soon, so that an owner who can fetch them again may give their memory back.
    pub fn release(&self) {
        self.owner.release(self.range.clone());
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.owner.as_ref().as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.range.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    struct Noting(Vec<u8>, Arc<Mutex<Vec<Range<usize>>>>);

    impl AsRef<[u8]> for Noting {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl BytesOwner for Noting {
        fn release(&self, range: Range<usize>) {
            self.1.lock().expect("no panic").push(range);
        }
    }

    #[test]
    fn release_names_the_part_to_its_owner() {
        let released = Arc::new(Mutex::new(Vec::new()));
        let bytes = SharedBytes::owned_by(Noting(vec![7; 10], Arc::clone(&released)));
        bytes.slice(2..8).and_then(|part| part.slice(1..3)).expect("inside").release();
        let released: Vec<_> = released.lock().expect("no panic").iter().map(|r| (r.start, r.end)).collect();
        assert_eq!(released, [(3, 5)]);
    }

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
