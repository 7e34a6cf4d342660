//! Pooling of a compressor block (model spec, section 7).

use crate::CpuLevel;
use crate::level::compiled_per_level;
use crate::math::{exp, mul_add};

/// `out[c] = Σ_i softmax_i(gate[i][c]) · kv[i][c]`: per channel, one softmax over the entries.
///
/// - `entries` pairs of `kv` `[d]` and `gate` `[d]` (position bias added), oldest first; for the overlapping compressor
///   lane A of the block before, if there is one, then lane B of this block
/// - `out`     `[d]`, overwritten
///
/// Accuracy: within `(n + 8) · ε · max|kv|` of [`crate::reference::pool`].
///
/// # Panics
///
/// If there are no entries, a slice has another length than `out`, or this CPU lacks `level`.
pub fn pool(level: CpuLevel, entries: &[(&[f32], &[f32])], out: &mut [f32]) {
    assert!(!entries.is_empty(), "a block has at least one entry");
    assert!(
        entries.iter().all(|(kv, gate)| kv.len() == out.len() && gate.len() == out.len()),
        "entries must have {} channels",
        out.len()
    );
    pool_channels(level, entries, out);
}

compiled_per_level!(
    fn pool_channels(entries: &[(&[f32], &[f32])], out: &mut [f32]) => pool_body
);

#[inline(always)]
fn pool_body<const FMA: bool>(entries: &[(&[f32], &[f32])], out: &mut [f32]) {
    const CHANNELS: usize = 64;
    for (block, out) in out.chunks_mut(CHANNELS).enumerate() {
        let first = block * CHANNELS;
        let mut max = [f32::NEG_INFINITY; CHANNELS];
        for (_, gate) in entries {
            for (max, &gate) in max.iter_mut().zip(&gate[first..]) {
                *max = if gate > *max { gate } else { *max };
            }
        }
        let mut sum = [0.0f32; CHANNELS];
        out.fill(0.0);
        for (kv, gate) in entries {
            let channels = out.iter_mut().zip(&mut sum).zip(&max);
            for (((out, sum), max), (&kv, &gate)) in channels.zip(kv[first..].iter().zip(&gate[first..])) {
                let weight = exp::<FMA>(gate - max);
                *sum += weight;
                *out = mul_add::<FMA>(weight, kv, *out);
            }
        }
        out.iter_mut().zip(sum).for_each(|(out, sum)| *out /= sum);
    }
}
