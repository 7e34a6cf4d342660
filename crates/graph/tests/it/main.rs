//! The step as data: memory and order of random graphs.

mod memory;
