//! The simulator against what was published, and against itself.

mod published;
