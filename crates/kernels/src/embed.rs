//! Token embeddings.

use troika_base::StoredTensor;

use crate::Ctx;
use crate::formats::Matrix;
use crate::parallel::for_each_row;

/// Row `tokens[t]` of the table, copied to each residual stream.
///
/// - `table`  `[V, D]`, any float format
/// - `tokens` `[T]`
/// - `out`    `[T, streams·D]`, overwritten
///
/// Exact.
///
/// # Panics
///
/// If a token is not in the table, or the lengths disagree with the shapes above.
pub fn embed(ctx: Ctx, table: &StoredTensor, tokens: &[i32], streams: usize, out: &mut [f32]) {
    let (dim, view) = (table.cols(), Matrix::stored(table));
    assert!(streams > 0, "at least one stream");
    assert_eq!(out.len(), tokens.len() * streams * dim, "out must be [T, {streams} x {dim}]");
    for_each_row(ctx.light(out.len()), out, streams * dim, |t, out| {
        let token = usize::try_from(tokens[t]).ok().filter(|&token| token < table.rows());
        let row = token.unwrap_or_else(|| panic!("token {} is not in a vocabulary of {}", tokens[t], table.rows()));
        let (first, others) = out.split_at_mut(dim);
        view.decode(ctx.level, row, 0, first);
        others.chunks_exact_mut(dim).for_each(|stream| stream.copy_from_slice(first));
    });
}
