//! When to leave a disk alone that keeps failing, and when to try it again.

/// Failures in a row after which nothing more is tried.
const MAX_FAILURES: u32 = 3;
/// Of the operations that are refused then, one in so many is tried nevertheless. Counted, not timed: a store that nobody
/// uses need not recover.
const PROBE_EVERY: u64 = 64;

/// One direction, reads or writes.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    failures: u32,
    refused: u64,
    reason: Option<String>,
    for_good: bool,
}

impl Breaker {
    /// Why it is off, if it is.
    pub(crate) fn reason(&self) -> Option<&String> {
        self.reason.as_ref()
    }

    /// Whether to try the next operation.
    pub(crate) fn admits(&mut self) -> bool {
        if self.reason.is_none() {
            return true;
        }
        self.refused += 1;
        !self.for_good && self.refused.is_multiple_of(PROBE_EVERY)
    }

    /// True if it was off and is on again.
    pub(crate) fn succeeded(&mut self) -> bool {
        self.failures = 0;
        self.reason.take().is_some()
    }

    /// True if it is off from now on and was not before.
    pub(crate) fn failed(&mut self, reason: String, for_good: bool) -> bool {
        self.failures += 1;
        self.for_good |= for_good;
        if self.reason.is_some() || (self.failures < MAX_FAILURES && !for_good) {
            return false;
        }
        self.reason = Some(reason);
        true
    }
}
