//! Blocks that are not kept although they could be found again: seldom is fine, often is a setting that does not fit (section
//! 10.5 of the hybrid spec).

use std::collections::{BTreeMap, VecDeque};

use crate::api::RequestRecord;

/// Requests that are looked back on.
pub(super) const WINDOW: usize = 100;
/// Somebody is told above this share of skipped blocks, percent.
const MOST_PERCENT: usize = 20;

/// What became of the blocks of the last requests.
#[derive(Debug, Default)]
pub(super) struct Skips {
    /// Stored blocks, skipped ones, and why.
    window: VecDeque<(usize, usize, Option<&'static str>)>,
    /// The reason that somebody was told.
    told: Option<&'static str>,
}

/// What somebody is to be told.
#[derive(Debug, PartialEq)]
pub(super) struct SkipWarning {
    /// Share of the blocks.
    pub(super) percent: usize,
    /// Why most of them were skipped.
    pub(super) reason: &'static str,
    /// The setting that would change it.
    pub(super) cure: &'static str,
}

impl Skips {
    /// Takes note of a request that has ended; a warning once for each reason, and again after it was better.
    pub(super) fn take(&mut self, record: &RequestRecord) -> Option<SkipWarning> {
        self.window.push_back((record.stored_blocks, record.skipped_blocks, record.skipped_because));
        if self.window.len() > WINDOW {
            self.window.pop_front();
        }
        if self.window.len() < WINDOW {
            return None;
        }
        let mut by_reason: BTreeMap<&'static str, usize> = BTreeMap::new();
        let (mut all, mut skipped) = (0, 0);
        for (stored, skips, reason) in &self.window {
            all += stored + skips;
            skipped += skips;
            reason.iter().for_each(|reason| *by_reason.entry(reason).or_default() += skips);
        }
        let percent = skipped * 100 / all.max(1);
        if percent <= MOST_PERCENT {
            self.told = None;
            return None;
        }
        let reason = by_reason.into_iter().max_by_key(|(_, count)| *count).map_or("unknown", |(reason, _)| reason);
        if self.told.replace(reason) == Some(reason) {
            return None;
        }
        let cure = match reason {
            "no_room" => "more memory for kept prefixes (--cache-ram-limit)",
            "no_parent" => "more memory for kept prefixes (--cache-ram-limit): what sequences build on is evicted",
            // Long answers, and with engines their rows are of another class than those of prompts.
            "mixed" => "--hybrid off, if conversations matter more than the speed of prompts",
            _ => "none is known",
        };
        Some(SkipWarning { percent, reason, cure })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(stored_blocks: usize, skipped_blocks: usize, reason: &'static str) -> RequestRecord {
        let skipped_because = (skipped_blocks > 0).then_some(reason);
        RequestRecord { stored_blocks, skipped_blocks, skipped_because, ..RequestRecord::default() }
    }

    #[test]
    fn a_fifth_is_too_much() {
        let mut skips = Skips::default();
        for _ in 0..WINDOW - 1 {
            assert_eq!(skips.take(&record(0, 10, "no_room")), None, "too few to tell");
        }
        let warning = skips.take(&record(0, 10, "no_room")).expect("all of them");
        assert_eq!((warning.percent, warning.reason), (100, "no_room"));
        assert!(warning.cure.contains("--cache-ram-limit"));
        assert_eq!(skips.take(&record(0, 10, "no_room")), None, "it was said");
        for _ in 0..WINDOW {
            assert_eq!(skips.take(&record(8, 2, "no_room")), None, "a fifth is not above a fifth");
        }
        let told = (0..WINDOW).filter_map(|_| skips.take(&record(7, 3, "mixed"))).collect::<Vec<_>>();
        let [first, second] = &told[..] else { panic!("once for each reason: {told:?}") };
        assert_eq!((first.reason, first.percent, second.reason), ("no_room", 21, "mixed"));
    }

    #[test]
    fn requests_without_whole_blocks_do_not_count() {
        let mut skips = Skips::default();
        assert!((0..3 * WINDOW).all(|_| skips.take(&record(0, 0, "no_room")).is_none()));
    }
}
