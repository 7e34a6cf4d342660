//! How kernels use several threads without knowing whose they are.
//!
//! A kernel cuts its *output* into disjoint pieces and hands each piece to one task. No result is ever combined across
//! tasks, so the number of threads and the order of tasks cannot change a bit.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::CpuLevel;

/// Threads that a kernel may use.
pub trait Parallel: Sync {
    /// How many tasks can run at once; kernels use it to choose how many tasks to make.
    fn threads(&self) -> usize;

    /// Runs `tasks` bodies, maybe in parallel; returns when all are done. Bodies run in any order.
    ///
    /// `body` must be called `tasks` times; kernels panic if it was called less often. The argument names the task
    /// and may be ignored by the body.
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync));
}

/// One thread: the caller's.
#[derive(Clone, Copy, Debug, Default)]
pub struct Serial;

impl Parallel for Serial {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        for task in 0..tasks {
            body(task);
        }
    }
}

/// Where a kernel runs: which instructions, which threads.
#[derive(Clone, Copy)]
pub struct Ctx<'a> {
    /// Instructions to use; the CPU must have them.
    pub level: CpuLevel,
    /// Threads to use.
    pub par: &'a dyn Parallel,
}

impl Ctx<'static> {
    /// The best level of this CPU on the caller's thread.
    pub fn serial() -> Self {
        Self { level: CpuLevel::best(), par: &Serial }
    }
}

impl Ctx<'_> {
    /// The same, on the caller's thread only if there are too few numbers to be worth waking other threads: about ten
    /// microseconds of element-wise work.
    pub(crate) fn light(self, numbers: usize) -> Self {
        if numbers < 1 << 15 { Self { par: &Serial, ..self } } else { self }
    }
}

/// Runs `body(0..tasks)`, each index exactly once, whatever `ctx.par` does: soundness of the disjoint outputs must not
/// hang on somebody else's trait implementation, so indices are claimed here.
pub(crate) fn run_tasks(ctx: Ctx, tasks: usize, body: impl Fn(usize) + Sync) {
    if tasks <= 1 {
        if tasks == 1 {
            body(0);
        }
        return;
    }
    let next = AtomicUsize::new(0);
    ctx.par.run(tasks, &|_| {
        let task = next.fetch_add(1, Ordering::Relaxed);
        if task < tasks {
            body(task);
        }
    });
    assert!(next.into_inner() >= tasks, "Parallel::run must call the body once for every task");
}

/// Threads that [`run_in_order`] gives shares of their own.
const MAX_SHARES: usize = 32;

/// Pieces of one share that nobody has taken: the first in the low half, the end in the high half.
#[repr(align(128))]
struct Share(AtomicU64);

impl Share {
    fn new(pieces: Range<usize>) -> Self {
        Self(AtomicU64::new(pieces.start as u64 | ((pieces.end as u64) << 32)))
    }

    /// Takes the first piece, or the last one.
    fn take(&self, last: bool) -> Option<usize> {
        let cut = |word: u64| {
            let (first, end) = (word & u64::from(u32::MAX), word >> 32);
            (first < end).then(|| if last { first | ((end - 1) << 32) } else { (first + 1) | (end << 32) })
        };
        let word = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, cut).ok()?;
        Some(if last { (word >> 32) as usize - 1 } else { (word & u64::from(u32::MAX)) as usize })
    }
}

/// Runs `body(0..pieces)`, each index exactly once. Each thread walks through a share of neighbouring pieces in ascending
/// order, so that what they read streams; who is done early takes pieces from the ends of the other shares.
pub(crate) fn run_in_order(ctx: Ctx, pieces: usize, body: impl Fn(usize) + Sync) {
    let shares = ctx.par.threads().min(pieces).min(MAX_SHARES);
    if shares <= 1 {
        return (0..pieces).for_each(body);
    }
    assert!(u32::try_from(pieces).is_ok(), "{pieces} pieces are too many");
    let queue: [Share; MAX_SHARES] = std::array::from_fn(|i| Share::new(row_range(pieces, shares, i.min(shares - 1))));
    let queue = &queue[..shares];
    run_tasks(ctx, shares, |own| {
        while let Some(piece) = queue[own].take(false) {
            body(piece);
        }
        for other in 1..shares {
            while let Some(piece) = queue[(own + other) % shares].take(true) {
                body(piece);
            }
        }
    });
}

/// A mutable slice that tasks cut into pieces which do not overlap.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Disjoint` only hands out pieces through `piece`, whose callers promise that they do not overlap; then each
// element is reached by one thread at a time, as if the slice had been split with `split_at_mut`.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as above; it stands for a `&mut [T]`, which may be sent if `T` may.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The elements `range`.
    ///
    /// # Safety
    ///
    /// While the result lives, no other live result of this method on this value may overlap `range`.
    #[expect(clippy::mut_from_ref, reason = "like split_at_mut; the caller promises that pieces do not overlap")]
    pub(crate) unsafe fn piece(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "piece outside of the slice");
        // SAFETY: inside the slice (just checked), which is mutably borrowed for `'a`; not aliased (caller).
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

/// Into how many tasks `rows` equal rows go.
fn row_tasks(ctx: Ctx, rows: usize) -> usize {
    let threads = ctx.par.threads();
    if threads <= 1 { rows.min(1) } else { rows.min(threads * 4) }
}

/// Rows of task `task` of `tasks`.
fn row_range(rows: usize, tasks: usize, task: usize) -> Range<usize> {
    rows * task / tasks..rows * (task + 1) / tasks
}

/// Calls `body(t, out_row)` for every row `t` of `out` `[T, width]`, in parallel.
///
/// # Panics
///
/// If `width` is 0 while `out` is not empty, or does not divide its length.
pub fn for_each_row<T: Send>(ctx: Ctx, out: &mut [T], width: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    for_each_row_with(ctx, out, width, || (), |(), t, row| body(t, row));
}

/// [`for_each_row`] with scratch space: `scratch` is made once per task and handed to each of its rows in turn, so the
/// body must not read what an earlier row left there.
///
/// # Panics
///
/// As [`for_each_row`].
pub fn for_each_row_with<T: Send, S>(
    ctx: Ctx,
    out: &mut [T],
    width: usize,
    scratch: impl Fn() -> S + Sync,
    body: impl Fn(&mut S, usize, &mut [T]) + Sync,
) {
    let rows = num_rows(out.len(), width);
    for_each_pair(ctx, rows, out, width, &mut [] as &mut [()], 0, scratch, |scratch, t, row, _| body(scratch, t, row));
}

/// Calls `body(t, a_row, b_row)` for every row `t` of `a` `[T, a_width]` and `b` `[T, b_width]`, in parallel.
///
/// # Panics
///
/// If the two have different numbers of rows, a width is 0 while its slice is not empty, or does not divide its length.
pub fn for_each_row2<A: Send, B: Send>(
    ctx: Ctx,
    a: &mut [A],
    a_width: usize,
    b: &mut [B],
    b_width: usize,
    body: impl Fn(usize, &mut [A], &mut [B]) + Sync,
) {
    let rows = num_rows(a.len(), a_width);
    assert_eq!(rows, num_rows(b.len(), b_width), "both outputs must have the same number of rows");
    for_each_pair(ctx, rows, a, a_width, b, b_width, || (), |(), t, a, b| body(t, a, b));
}

fn num_rows(len: usize, width: usize) -> usize {
    if len == 0 {
        return 0;
    }
    assert!(width > 0 && len.is_multiple_of(width), "rows of {width} must fill the {len} elements");
    len / width
}

#[expect(clippy::too_many_arguments, reason = "private; the three public helpers name their arguments")]
fn for_each_pair<A: Send, B: Send, S>(
    ctx: Ctx,
    rows: usize,
    a: &mut [A],
    a_width: usize,
    b: &mut [B],
    b_width: usize,
    scratch: impl Fn() -> S + Sync,
    body: impl Fn(&mut S, usize, &mut [A], &mut [B]) + Sync,
) {
    let tasks = row_tasks(ctx, rows);
    let (a, b) = (Disjoint::new(a), Disjoint::new(b));
    run_tasks(ctx, tasks, |task| {
        let mut scratch = scratch();
        for t in row_range(rows, tasks, task) {
            // SAFETY: each task index is given out once and row ranges of tasks do not overlap, so row `t` of `a` is
            // borrowed here only.
            let a_row = unsafe { a.piece(t * a_width..(t + 1) * a_width) };
            // SAFETY: the same for `b`.
            let b_row = unsafe { b.piece(t * b_width..(t + 1) * b_width) };
            body(&mut scratch, t, a_row, b_row);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls the body with the same index every time, and once too often.
    struct Careless;

    impl Parallel for Careless {
        fn threads(&self) -> usize {
            3
        }

        fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
            for _ in 0..=tasks {
                body(0);
            }
        }
    }

    #[test]
    fn every_row_is_visited_once() {
        for par in [&Serial as &dyn Parallel, &Careless] {
            let ctx = Ctx { level: CpuLevel::Scalar, par };
            for rows in [0, 1, 2, 13, 40] {
                let mut out = vec![0usize; rows * 3];
                for_each_row(ctx, &mut out, 3, |t, row| row.iter_mut().for_each(|x| *x += t + 1));
                assert!(out.iter().enumerate().all(|(i, &x)| x == i / 3 + 1), "{rows} rows");
                let (mut a, mut b) = (vec![0usize; rows * 2], vec![0u8; rows]);
                for_each_row2(ctx, &mut a, 2, &mut b, 1, |t, a, b| {
                    a[1] = t;
                    b[0] += 1;
                });
                assert!(a.chunks(2).enumerate().all(|(t, row)| row == [0, t]) && b.iter().all(|&n| n == 1));
            }
        }
    }

    #[test]
    #[should_panic(expected = "once for every task")]
    fn a_lazy_implementation_is_noticed() {
        struct Lazy;
        impl Parallel for Lazy {
            fn threads(&self) -> usize {
                2
            }
            fn run(&self, _: usize, body: &(dyn Fn(usize) + Sync)) {
                body(0);
            }
        }
        for_each_row(Ctx { level: CpuLevel::Scalar, par: &Lazy }, &mut [0; 4], 1, |_, _| ());
    }
}
