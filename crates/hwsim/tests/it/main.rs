//! The simulator against what was published, and against itself.

mod arithmetic;
mod faults;
mod published;
mod schedule;
