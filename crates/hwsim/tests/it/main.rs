//! The simulator against what was published, and against itself.

mod faults;
mod published;
mod schedule;
