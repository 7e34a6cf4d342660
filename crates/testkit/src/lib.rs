//! Development only: what tests of several crates share.

pub mod scripted;
pub mod tokenizer;
