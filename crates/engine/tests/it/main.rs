//! The engine against the oracle, and against itself under other chunkings, neighbours and threads.

mod contract;
mod golden;
mod sampling;
mod serving;
mod support;
