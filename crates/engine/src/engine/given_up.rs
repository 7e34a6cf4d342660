//! When what engines have given up for want of memory may come back: not before it could have been there all the time for many
//! steps, and the more often it had to go again, the later.

/// Steps in a row in which the bytes were spare.
const PATIENCE: u32 = 64;
/// Patience doubles so often at most.
const DOUBLINGS: u32 = 6;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct GivenUp {
    /// Bytes of each bank, in the order in which they went while requests were served. What had to go at the start, for steps
    /// to be wide enough, never fits.
    banks: Vec<u64>,
    /// Bytes of the one on its way back.
    coming: Option<u64>,
    /// One has come back, and nothing had to go since.
    has_returned: bool,
    /// Steps since the bytes of the last bank were missed.
    calm: u32,
    /// How often a bank that had come back had to go again.
    relapses: u32,
}

impl GivenUp {
    /// A bank was given up.
    pub(super) fn note(&mut self, bytes: u64) {
        self.banks.push(bytes);
        self.calm = 0;
        if std::mem::take(&mut self.has_returned) {
            self.relapses = (self.relapses + 1).min(DOUBLINGS);
        }
    }

    /// A step is done, at whose end `spare` bytes were spare.
    pub(super) fn step_done(&mut self, spare: u64) {
        let fits = self.banks.last().is_some_and(|bytes| *bytes <= spare);
        self.calm = if fits { self.calm.saturating_add(1) } else { 0 };
    }

    /// True if the bank that went last may come back where `spare` bytes are spare now: a request may have come since the last
    /// step.
    pub(super) fn may_return(&self, spare: u64) -> bool {
        self.banks.last().is_some_and(|bytes| *bytes <= spare) && self.calm >= PATIENCE << self.relapses
    }

    /// It is on its way.
    pub(super) fn returns(&mut self) {
        self.coming = self.banks.pop();
        self.calm = 0;
    }

    /// It is back, or never will be. Returns the bytes that it does not take.
    pub(super) fn settled(&mut self, is_back: bool) -> u64 {
        self.has_returned |= is_back;
        self.coming.take().filter(|_| !is_back).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps_until_return(given_up: &mut GivenUp, spare: u64) -> u32 {
        let mut steps = 0;
        while !given_up.may_return(u64::MAX) {
            given_up.step_done(spare);
            steps += 1;
            assert!(steps < 10_000, "{given_up:?}");
        }
        steps
    }

    #[test]
    fn banks_come_back_the_later_the_more_often_they_go() {
        let mut given_up = GivenUp::default();
        (0..1000).for_each(|_| given_up.step_done(u64::MAX));
        assert!(!given_up.may_return(u64::MAX), "nothing was given up");
        given_up.note(100);
        given_up.note(300);
        (0..1000).for_each(|_| given_up.step_done(299));
        assert!(!given_up.may_return(u64::MAX), "a byte is missing for the one that went last");
        assert_eq!(steps_until_return(&mut given_up, 300), PATIENCE);
        given_up.returns();
        assert_eq!(given_up.settled(true), 0);
        assert_eq!(steps_until_return(&mut given_up, 100), PATIENCE, "the other one");
        given_up.step_done(99);
        assert_eq!(steps_until_return(&mut given_up, 100), PATIENCE, "all over again");
        given_up.returns();
        assert_eq!(given_up.settled(true), 0);
        for relapses in 1..10 {
            given_up.note(100);
            let want = PATIENCE << relapses.min(DOUBLINGS);
            assert_eq!(steps_until_return(&mut given_up, 100), want, "{relapses} times it had to go again");
            given_up.returns();
            assert_eq!(given_up.settled(true), 0);
        }
        given_up.note(50);
        steps_until_return(&mut given_up, 50);
        given_up.returns();
        assert_eq!(given_up.settled(false), 50);
        (0..10_000).for_each(|_| given_up.step_done(u64::MAX));
        assert!(!given_up.may_return(u64::MAX), "nobody tries again");
    }
}
