//! The engine against the oracle, and against itself under other chunkings, neighbours and threads.

mod cache;
mod contract;
mod disk;
mod drafts;
mod engines;
mod errors;
mod golden;
mod hybrid;
mod hybrid_serving;
mod lifecycle;
mod nano;
mod ort;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod revision;
mod sampling;
mod serving;
mod sim;
mod support;
mod wavefront;
