//! Kernels against their reference loops, against golden files, and against themselves (the row contract).

mod allocations;
mod channels;
mod contract;
mod formats;
mod golden;
mod int8;
mod ops;
mod products;
mod support;
