//! The executor on a device that does nothing but remember.

mod executor;
mod partition;
