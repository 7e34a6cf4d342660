//! CPU kernels: one operation per file, a reference loop for each, and faster versions per [`CpuLevel`].
//!
//! Knows neither models nor requests: arguments are slices, [`StoredTensor`](troika_base::StoredTensor)s and integers.
//! Matrices are row-major; `T` is the number of rows (tokens of a step). Accumulation is in `f32` (class `exact`), but for
//! [`mod@int8`] (class `fast`).
//!
//! **Row contract.** At one level, a kernel gives a row the same bits whatever the number of rows, threads, neighbours
//! and chunks: every output is computed in an order of operations that depends on its own row and on absolute sizes
//! only. `tests/it/contract.rs` checks it bit by bit. Bounds in the documentation are for finite numbers and use
//! `ε = 2^-24`, the relative error of one rounding.
//!
//! [`mod@reference`] has the loops that everything is tested against; [`parallel`] says how threads are used;
//! [`mod@matmul`] is where the time goes.

#![warn(missing_docs)]

pub mod attend;
pub mod elementwise;
pub mod embed;
pub mod experts;
pub mod formats;
pub mod hc;
mod heads;
pub mod index;
mod int16;
pub mod int8;
mod level;
mod math;
pub mod matmul;
pub mod norm;
pub mod parallel;
pub mod pool;
pub mod reference;
pub mod rope;
mod rounding;
pub mod route;
mod rows;
mod scratch;
pub mod swiglu;

pub use attend::{CodedRows, Far, RowCodes, Rows, Seen, Visible, attend, attend_rounded};
pub use elementwise::{add, argmax};
pub use embed::embed;
pub use experts::{ExpertWeights, routed_experts, shared_expert};
pub use formats::{TableError, fake_fp4, fake_fp8, hadamard, has_nan_scale, row_to_f32, to_f32, to_i32};
pub use hc::{HcParams, hc_head, hc_mix, hc_post, hc_pre, sinkhorn, stream_mean};
pub use index::{CodedKeys, Index, KeyCodes, Keys, index_scores, index_topk, top_k};
pub use level::{CpuLevel, REVISION};
pub use matmul::{grouped_matmul, matmul};
pub use norm::{rms_norm, rms_norm_in_place};
pub use parallel::{Ctx, Parallel, Serial, for_each_row, for_each_row_with, for_each_row2};
pub use pool::pool;
pub use rope::{rope, rope_row};
pub use route::{RouteParams, Scoring, route, route_with_scores};
pub use rows::RowList;
pub use swiglu::swiglu;
