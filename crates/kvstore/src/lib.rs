//! Where the bytes of kept prefixes are: one file for each block's rows and each boundary, under one directory.
//!
//! Moves bytes and decides nothing: what is kept and what goes is `kvcache`'s business. The store may forget; it may never
//! lie, so everything is checked when it is read. The format is described in `docs/formats/kvstore.md`; [`format`] has it.

mod accounts;
mod breaker;
mod closed;
mod directory;
pub mod files;
pub mod format;
mod store;

pub use directory::{Item, Usage, clear, usage, verify};
pub use format::{Header, Kind, Name};
pub use store::{Hands, Read, Status, Store, StoreError};
