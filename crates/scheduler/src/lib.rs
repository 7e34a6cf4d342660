//! Sequences in, step plans out: which tokens of which sequences are computed next, and where chunks end.
//!
//! Pure: time and results arrive as arguments, decisions leave as values. Must not know models, threads, files or clocks.
//! [`Scheduler`] decides; [`geometry`] says once, at load, how wide a chunk is.
//!
//! Two kinds of steps may be in flight side by side, one of each [`Lane`]. A sequence whose newest token alone is not yet
//! computed is in the decode lane; every other one is in the prefill lane, be it new, resumed from the cache, or preempted and on
//! its way back. The last token of a prompt is in the decode lane where the two are of different numeric classes (hybrid spec
//! 10.3); elsewhere it goes with the last chunk, which then has logits.

pub mod geometry;
mod pace;
mod scheduler;

pub use geometry::{Geometry, GeometryRequest};
pub use scheduler::{
    ChunkRecord, Lane, Limits, MAX_PASSED_OVER, NARROWINGS, NewSequence, Part, Refusal, Scheduler, StateCost, StepPlan,
    Urgency,
};

/// A reason why a chunk is narrower than it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// It ends at a multiple of the step width, counted from position 0.
    Alignment,
    /// The prompt ends, or all of it but the last token, which is left to the decode lane.
    Remaining,
    /// Its nodes would take so long that running streams would wait longer than allowed.
    MaxItl,
    /// Its activations would not fit the memory.
    Memory,
    /// A limit that the user set.
    UserLimit,
}

impl Rule {
    /// For logs and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Alignment => "alignment",
            Self::Remaining => "remaining",
            Self::MaxItl => "max_itl",
            Self::Memory => "memory",
            Self::UserLimit => "user_limit",
        }
    }
}

/// One narrowing: the rule and the width before and after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Narrowing {
    pub rule: Rule,
    pub before: usize,
    pub after: usize,
}
