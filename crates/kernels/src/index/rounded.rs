//! Scores of keys and queries rounded to eight bits (class `fast`).
//!
//! A key has one scale, a head of a query another. Keys lie in panels of 32 side by side, so that no sum crosses lanes: the sum
//! over heads is one chain in their order, and the key's scale comes last. Integer sums are exact; levels other than scalar
//! give equal bits.

use std::ops::Range;

use super::{Index, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, vnni};
use crate::level::dispatch;
use crate::parallel::{Disjoint, run_tasks};
use crate::rounding::{codes_of, factor_of, largest_of};
use crate::scratch::Scratch;
use crate::{CpuLevel, Ctx, RowList};

/// Keys of a panel.
pub(super) const PANEL: usize = 32;
/// Heads that are taken together; queries are filled up with zeros.
pub(super) const HEADS: usize = 8;
/// Most channels: with them sums fit into 32 bits.
const CHANNELS: usize = 1 << 15;

/// Rounded keys.
pub(super) struct RoundedKeys {
    /// `[panel][4 channels][32 keys][4]`, 128 too large.
    codes: Scratch<[i8; PANEL]>,
    /// `[panel][32 keys]`
    scales: Scratch<f32>,
    /// Rows of `codes` in a panel.
    width: usize,
    first: usize,
}

impl RoundedKeys {
    /// Those with the numbers `range`, in panels from its start on.
    pub(super) fn new(ctx: Ctx, keys: RowList, range: Range<usize>) -> Self {
        let d = keys.width();
        assert!(d <= CHANNELS, "keys of {d} channels are too wide");
        let (panels, width) = (range.len().div_ceil(PANEL), d.div_ceil(4) * 4);
        let (mut codes, mut scales) = (Scratch::new(panels * width), Scratch::new(panels * PANEL));
        {
            let (codes, scales) = (Disjoint::new(&mut codes), Disjoint::new(&mut scales));
            run_tasks(ctx.light(range.len() * d), panels, |panel| {
                // SAFETY: each task index is given out once and each task has a panel of its own.
                let codes = unsafe { codes.piece(panel * width..(panel + 1) * width) };
                // SAFETY: the same.
                let scales = unsafe { scales.piece(panel * PANEL..(panel + 1) * PANEL) };
                let first = range.start + panel * PANEL;
                round_panel(ctx.level, keys, first..range.end.min(first + PANEL), codes, scales);
            });
        }
        Self { codes, scales, width, first: range.start }
    }
}

fn round_panel(level: CpuLevel, keys: RowList, range: Range<usize>, codes: &mut [[i8; PANEL]], scales: &mut [f32]) {
    let d = keys.width();
    let mut row = Scratch::<[i8; PANEL]>::new(d.div_ceil(PANEL));
    row.as_flattened_mut().fill(0);
    codes.as_flattened_mut().fill(i8::MIN);
    scales.fill(0.0);
    for (lane, key) in range.enumerate() {
        let key = keys.row(key);
        let (factor, step) = factor_of(largest_of(level, key), 127.0);
        scales[lane] = step;
        codes_of(level, key, factor, &mut row.as_flattened_mut()[..d]);
        let (places, _) = codes.as_flattened_mut().as_chunks_mut::<{ 4 * PANEL }>();
        for (place, four) in places.iter_mut().zip(row.as_flattened().as_chunks::<4>().0) {
            place.as_chunks_mut::<4>().0[lane] = four.map(|code| code ^ i8::MIN);
        }
    }
}

/// A rounded query.
pub(super) struct RoundedQuery {
    /// `[heads][words of 4 channels]`
    codes: Scratch<u32>,
    /// What the offset of the keys adds too much, with its sign changed.
    zeros: Scratch<i32>,
    /// Weight of each head times its scale.
    weights: Scratch<f32>,
}

impl RoundedQuery {
    pub(super) fn new(level: CpuLevel, index: &Index, iq: &[f32], iw: &[f32]) -> Self {
        let (d, heads) = (index.keys.width(), index.heads.next_multiple_of(HEADS));
        let words = d.div_ceil(4);
        let mut query =
            Self { codes: Scratch::new(heads * words), zeros: Scratch::new(heads), weights: Scratch::new(heads) };
        let mut row = Scratch::<[i8; PANEL]>::new(d.div_ceil(PANEL));
        row.as_flattened_mut().fill(0);
        for h in 0..heads {
            let codes = &mut query.codes[h * words..(h + 1) * words];
            (query.zeros[h], query.weights[h]) = (0, 0.0);
            codes.fill(0);
            if h < index.heads {
                let head = &iq[h * d..(h + 1) * d];
                let (factor, step) = factor_of(largest_of(level, head), 127.0);
                codes_of(level, head, factor, &mut row.as_flattened_mut()[..d]);
                for (word, four) in codes.iter_mut().zip(row.as_flattened().as_chunks::<4>().0) {
                    *word = u32::from_le_bytes(four.map(|code| code as u8));
                }
                let sum: i32 = row.as_flattened()[..d].iter().map(|code| i32::from(*code)).sum();
                (query.zeros[h], query.weights[h]) = (-128 * sum, iw[h] * index.scale * step);
            }
        }
        query
    }

    /// Scores of the keys from number `first` on, which begins a panel.
    pub(super) fn score(&self, level: CpuLevel, keys: &RoundedKeys, first: usize, out: &mut [f32]) {
        assert!((first - keys.first).is_multiple_of(PANEL), "key {first} is inside of a panel");
        let start = (first - keys.first) / PANEL;
        for (panel, out) in out.chunks_mut(PANEL).enumerate() {
            let panel = start + panel;
            let codes = &keys.codes[panel * keys.width..(panel + 1) * keys.width];
            let mut sums = [0.0; PANEL];
            let (q, weights) = (&self.codes, &self.weights);
            assert!(q.len() * 4 == weights.len() * keys.width && weights.len().is_multiple_of(HEADS), "whole heads");
            dispatch!(
                level,
                scalar::weighted_sums(codes, q, weights, &mut sums),
                avx2::weighted_sums(codes, q, weights, &mut sums),
                avx2::weighted_sums(codes, q, weights, &mut sums),
                vnni::weighted_sums(codes, q, &self.zeros, weights, &mut sums)
            );
            let scales = &keys.scales[panel * PANEL..(panel + 1) * PANEL];
            out.iter_mut().zip(sums).zip(scales).for_each(|((out, sum), scale)| *out = sum * scale);
        }
    }
}
