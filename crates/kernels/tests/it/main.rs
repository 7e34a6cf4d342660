//! Kernels against their reference loops, against golden files, and against themselves (the row contract).

mod contract;
mod formats;
mod golden;
mod ops;
mod products;
mod support;
