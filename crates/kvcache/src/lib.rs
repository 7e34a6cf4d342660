//! Which block of a prefix is kept, where a sequence may resume, and what goes when room is short: decisions only.
//!
//! A *block* is a fixed run of tokens' append-only rows, named by a hash chained from the start of the sequence; a *boundary*
//! is what a sequence must carry besides to resume at the end of a block. Pure: no bytes, files, clocks. Read [`Cache`].

mod cache;
mod hash;

pub use cache::{BlockId, Cache, Counters, Evicted, Found, LeaseId, Skip};
pub use hash::{BlockHash, Identity, chain};
