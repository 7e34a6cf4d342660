//! Memory that a kernel needs for the length of a call: taken from what the thread has kept, and given back when dropped.
//! After the first steps no kernel allocates; `tests/it/allocations.rs` counts.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut, Range};
use std::thread::LocalKey;

use crate::int8::GROUP;
use crate::matmul::Tile;

/// `len` numbers of this thread. They hold whatever the last user left: write before reading.
pub(crate) struct Scratch<T: Keep> {
    buffer: Vec<T>,
    len: usize,
}

/// Vectors that a thread keeps.
type Kept<T> = RefCell<Vec<Vec<T>>>;

/// A type of which threads keep vectors.
pub(crate) trait Keep: Clone + Default + 'static {
    fn kept() -> &'static LocalKey<Kept<Self>>;
}

macro_rules! keep {
    ($($type:ty),*) => {$(
        impl Keep for $type {
            fn kept() -> &'static LocalKey<Kept<Self>> {
                thread_local! {
                    static KEPT: Kept<$type> = const { RefCell::new(Vec::new()) };
                }
                &KEPT
            }
        }
    )*};
}
keep!(f32, u32, i32, usize, (f32, f32), [i8; GROUP], [i32; 2], Range<usize>, Tile);

impl<T: Keep> Scratch<T> {
    pub(crate) fn new(len: usize) -> Self {
        let mut buffer = T::kept().with_borrow_mut(|kept| {
            // The smallest that is large enough; else the largest grows, so that few vectors serve all kernels.
            let fits = (0..kept.len()).filter(|&i| kept[i].len() >= len).min_by_key(|&i| kept[i].len());
            let place = fits.or_else(|| (0..kept.len()).max_by_key(|&i| kept[i].len()));
            place.map_or_else(Vec::new, |i| kept.swap_remove(i))
        });
        if buffer.len() < len {
            buffer.resize(len, T::default());
        }
        Self { buffer, len }
    }

    /// The items, which are counted first.
    pub(crate) fn collect(items: impl Iterator<Item = T> + Clone) -> Self {
        let mut list = Self::new(items.clone().count());
        list.iter_mut().zip(items).for_each(|(place, item)| *place = item);
        list
    }
}

impl<T: Keep> Deref for Scratch<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.buffer[..self.len]
    }
}

impl<T: Keep> DerefMut for Scratch<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.buffer[..self.len]
    }
}

impl<T: Keep> Drop for Scratch<T> {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        // A thread that is ending keeps nothing any more.
        let _ = T::kept().try_with(|kept| kept.borrow_mut().push(buffer));
    }
}
