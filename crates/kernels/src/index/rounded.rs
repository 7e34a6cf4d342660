//! Scores of keys and queries rounded to eight bits (class `fast`).
//!
//! A key has one scale, a head of a query another. Keys lie in panels of 32 side by side, so that no sum crosses lanes: the sum
//! over heads is one chain in their order, and the key's scale comes last. Integer sums are exact; levels other than scalar
//! give equal bits.

use super::{Index, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, vnni};
use crate::level::dispatch;
use crate::parallel::{Disjoint, run_tasks};
use crate::rounding::{codes_of, factor_of, largest_of};
use crate::scratch::Scratch;
use crate::{CpuLevel, Ctx};

/// Keys of a panel.
pub(super) const PANEL: usize = 32;
/// Heads that are taken together; queries are filled up with zeros.
pub(super) const HEADS: usize = 8;
/// Most channels: with them sums fit into 32 bits.
const CHANNELS: usize = 1 << 15;

/// Keys rounded once and kept for as long as the keys themselves, oldest first. They are derived: whoever changes or drops
/// keys drops their codes too, and rounds again.
#[derive(Clone, Debug)]
pub struct KeyCodes {
    width: usize,
    panels: Vec<Panel>,
    len: usize,
}

#[derive(Clone, Debug)]
struct Panel {
    /// `[4 channels][32 keys][4]`, 128 too large.
    codes: Vec<[i8; PANEL]>,
    scales: [f32; PANEL],
}

/// The keys of [`KeyCodes`]. Copying it copies a few words.
#[derive(Clone, Copy, Debug)]
pub struct CodedKeys<'a> {
    width: usize,
    panels: &'a [Panel],
    len: usize,
}

impl KeyCodes {
    /// No keys, of `width` numbers.
    pub fn new(width: usize) -> Self {
        assert!((1..=CHANNELS).contains(&width), "keys of {width} channels");
        Self { width, panels: Vec::new(), len: 0 }
    }

    /// Bytes of one key of `width` numbers.
    pub fn key_bytes(width: usize) -> usize {
        width.next_multiple_of(4) + 4
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.panels.len() * PANEL * Self::key_bytes(self.width)
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Rounds `count` keys and appends them; `key(i)` is the `i`-th of them.
    ///
    /// # Panics
    ///
    /// If a key has another width.
    pub fn extend<'a>(&mut self, ctx: Ctx, count: usize, key: impl Fn(usize) -> &'a [f32] + Sync) {
        let (start, end, width) = (self.len, self.len + count, self.width);
        // Places without a key are zeros.
        let empty = || Panel { codes: vec![[i8::MIN; PANEL]; width.next_multiple_of(4)], scales: [0.0; PANEL] };
        self.panels.resize_with(end.div_ceil(PANEL), empty);
        let first = start / PANEL;
        let panels = Disjoint::new(&mut self.panels[first..]);
        run_tasks(ctx.light(count * width), panels.len(), |task| {
            // SAFETY: each task index is given out once and each task has a panel of its own.
            let panel = unsafe { &mut panels.piece(task..task + 1)[0] };
            let at = (first + task) * PANEL;
            for place in start.max(at)..end.min(at + PANEL) {
                let key = key(place - start);
                assert_eq!(key.len(), width, "numbers of a key");
                panel.round(ctx.level, place - at, key);
            }
        });
        self.len = end;
    }

    /// Drops keys after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.panels.truncate(self.len.div_ceil(PANEL));
    }

    /// All keys.
    pub fn keys(&self) -> CodedKeys<'_> {
        CodedKeys { width: self.width, panels: &self.panels, len: self.len }
    }
}

impl Panel {
    /// Writes the codes of the key in one of the places.
    fn round(&mut self, level: CpuLevel, place: usize, key: &[f32]) {
        let mut row = Scratch::<[i8; PANEL]>::new(key.len().div_ceil(PANEL));
        row.as_flattened_mut().fill(0);
        let (factor, step) = factor_of(largest_of(level, key), 127.0);
        self.scales[place] = step;
        codes_of(level, key, factor, &mut row.as_flattened_mut()[..key.len()]);
        let (words, _) = self.codes.as_flattened_mut().as_chunks_mut::<{ 4 * PANEL }>();
        for (word, four) in words.iter_mut().zip(row.as_flattened().as_chunks::<4>().0) {
            word.as_chunks_mut::<4>().0[place] = four.map(|code| code ^ i8::MIN);
        }
    }
}

impl CodedKeys<'_> {
    /// Numbers in a key.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
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
    pub(super) fn score(&self, level: CpuLevel, keys: CodedKeys, first: usize, out: &mut [f32]) {
        assert!(first.is_multiple_of(PANEL), "key {first} is inside of a panel");
        assert!(first + out.len() <= keys.len, "keys up to {} of {}", first + out.len(), keys.len);
        for (panel, out) in keys.panels[first / PANEL..].iter().zip(out.chunks_mut(PANEL)) {
            let mut sums = [0.0; PANEL];
            let (codes, q, weights) = (&panel.codes, &self.codes, &self.weights);
            assert!(q.len() * 4 == weights.len() * codes.len() && weights.len().is_multiple_of(HEADS), "whole heads");
            dispatch!(
                level,
                scalar::weighted_sums(codes, q, weights, &mut sums),
                avx2::weighted_sums(codes, q, weights, &mut sums),
                avx2::weighted_sums(codes, q, weights, &mut sums),
                vnni::weighted_sums(codes, q, &self.zeros, weights, &mut sums)
            );
            out.iter_mut().zip(sums).zip(panel.scales).for_each(|((out, sum), scale)| *out = sum * scale);
        }
    }
}
