//! What really ran: the server's own record of a request against what was planned. The word `hybrid` is earned here.
//!
//! The record is JSON, so this crate knows nothing of engines: chunks with their widths, a plan with operations per kind,
//! a ledger with what was dispatched per kind. See section 11 of `docs/spec/hybrid-prefill.md`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Reasons for an operation to run on the primary that a plan expects: the tail of a prompt, and rows after a hit.
const EXPECTED_FALLBACKS: [&str; 3] = ["rows_below_tail_threshold", "rows_zero", "suffix_after_hit"];

/// What one request, or many together, say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// Requests with a record.
    #[serde(default)]
    pub requests: u64,
    /// Operations that should have been dispatched, by kind of projection.
    pub planned: BTreeMap<String, u64>,
    /// Operations that were accepted by an engine.
    pub dispatched: BTreeMap<String, u64>,
    /// Operations at prefill width that ran on the primary alone, by reason.
    pub fallbacks: BTreeMap<String, u64>,
    /// How often chunks of each width were computed.
    pub widths: BTreeMap<usize, u64>,
    /// What narrowed chunks, and how often.
    pub narrowed_by: BTreeMap<String, u64>,
    /// Whole tiles that the prompts had.
    pub tiles_in_prompts: u64,
    /// Whole tiles in the chunks that were computed.
    pub tiles_in_chunks: u64,
    /// Requests without a record.
    pub missing: u64,
    /// Requests whose engines were simulated: no time of them is an engine's.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub simulated: u64,
    /// Requests of which not exactly what was planned was dispatched. A sum alone would let one make up for another.
    pub deviating: u64,
}

/// What a run may be called.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Engagement {
    /// Dispatched = planned for every kind, the tiles were there, and no fallback is unexplained.
    Hybrid,
    /// Some of it ran.
    Degraded { ratio: f64, reasons: Vec<String> },
    /// None of it ran.
    NotEngaged { reasons: Vec<String> },
    /// Engines were simulated, whatever ran: nothing was measured.
    Simulated { reasons: Vec<String> },
}

impl Engagement {
    /// The word for tables.
    pub fn label(&self) -> String {
        match self {
            Self::Hybrid => "hybrid".to_owned(),
            Self::Degraded { ratio, .. } => format!("DEGRADED {:.1} %", ratio * 100.0),
            Self::NotEngaged { .. } => "NOT ENGAGED".to_owned(),
            Self::Simulated { .. } => "SIMULATED".to_owned(),
        }
    }

    /// Why not.
    pub fn reasons(&self) -> &[String] {
        match self {
            Self::Hybrid => &[],
            Self::Degraded { reasons, .. } | Self::NotEngaged { reasons } | Self::Simulated { reasons } => reasons,
        }
    }

    pub fn is_hybrid(&self) -> bool {
        *self == Self::Hybrid
    }
}

impl Evidence {
    /// Of one request with a prompt of `tokens`, the last of which is decoded, `cached` of them kept from before; `record` is
    /// what the server answers for it.
    pub fn of_request(record: &Value, tokens: usize, cached: usize, tile: usize) -> Self {
        // Chunks end at multiples of a tile, also after a hit that does not.
        let tiles = (tokens.saturating_sub(1) / tile.max(1)).saturating_sub(cached.div_ceil(tile.max(1)));
        let mut evidence = Self { requests: 1, tiles_in_prompts: tiles as u64, ..Self::default() };
        // Chunks belong to an answer, of which a benchmark asks for one.
        for chunk in record["choices"][0]["chunks"].as_array().into_iter().flatten() {
            let width = chunk["tokens"].as_u64().unwrap_or(0) as usize;
            *evidence.widths.entry(width).or_default() += 1;
            evidence.tiles_in_chunks += (width / tile.max(1)) as u64;
            for narrowing in chunk["narrowed_by"].as_array().into_iter().flatten() {
                let rule = narrowing["rule"].as_str().unwrap_or("unnamed");
                *evidence.narrowed_by.entry(rule.to_owned()).or_default() += 1;
            }
        }
        evidence.simulated = u64::from(record["plan"]["simulated"] == true);
        for (kind, plan) in members(&record["plan"]["kinds"]) {
            evidence.planned.insert(kind.clone(), plan["planned_ops"].as_u64().unwrap_or(0));
        }
        for (kind, entry) in members(&record["ledger"]["kinds"]) {
            // A ledger that was given the plan's numbers says them itself.
            if let Some(planned) = entry["planned"].as_u64().filter(|planned| *planned > 0) {
                evidence.planned.entry(kind.clone()).or_insert(planned);
            }
            let ran = entry["exact"].as_u64().unwrap_or(0) + entry["padded"].as_u64().unwrap_or(0);
            if ran > 0 {
                evidence.dispatched.insert(kind.clone(), ran);
            }
            for (reason, count) in members(&entry["fallbacks"]) {
                *evidence.fallbacks.entry(reason.clone()).or_default() += count.as_u64().unwrap_or(0);
            }
        }
        evidence.deviating = u64::from(evidence.planned.iter().any(|(kind, planned)| evidence.ran(kind) != *planned));
        evidence
    }

    fn ran(&self, kind: &str) -> u64 {
        self.dispatched.get(kind).copied().unwrap_or(0)
    }

    /// Counts `other` in.
    pub fn add(&mut self, other: &Self) {
        let sum = |to: &mut BTreeMap<String, u64>, from: &BTreeMap<String, u64>| {
            from.iter().for_each(|(key, count)| *to.entry(key.clone()).or_default() += count);
        };
        sum(&mut self.planned, &other.planned);
        sum(&mut self.dispatched, &other.dispatched);
        sum(&mut self.fallbacks, &other.fallbacks);
        sum(&mut self.narrowed_by, &other.narrowed_by);
        other.widths.iter().for_each(|(width, count)| *self.widths.entry(*width).or_default() += count);
        self.requests += other.requests;
        self.tiles_in_prompts += other.tiles_in_prompts;
        self.tiles_in_chunks += other.tiles_in_chunks;
        self.missing += other.missing;
        self.simulated += other.simulated;
        self.deviating += other.deviating;
    }

    /// True if no prompt was computed in more than one chunk, so that none was in flight beside another.
    pub fn is_one_chunk_each(&self) -> bool {
        self.requests > 0 && self.widths.values().sum::<u64>() <= self.requests
    }

    /// What the runs that left this may be called.
    pub fn engagement(&self) -> Engagement {
        let (planned, dispatched): (u64, u64) = (self.planned.values().sum(), self.dispatched.values().sum());
        let mut reasons = Vec::new();
        if self.missing > 0 {
            reasons.push(format!("the server kept no record of {} requests", self.missing));
        }
        if planned == 0 {
            let short = if self.tiles_in_prompts == 0 { ": no prompt had a whole tile" } else { "" };
            reasons.push(format!("nothing was planned for the engines{short}"));
        }
        for (kind, planned) in &self.planned {
            if self.ran(kind) != *planned {
                reasons.push(format!("{kind}: {} of {planned} planned operations were dispatched", self.ran(kind)));
            }
        }
        if self.deviating > 0 && reasons.is_empty() {
            reasons.push(format!("{} requests did not dispatch what was planned for them", self.deviating));
        }
        for kind in self.dispatched.keys().filter(|kind| !self.planned.contains_key(*kind)) {
            reasons.push(format!("{kind}: dispatched without a plan"));
        }
        if self.tiles_in_chunks < self.tiles_in_prompts {
            let widths: Vec<String> = self.widths.iter().map(|(width, count)| format!("{width} x{count}")).collect();
            let rules: Vec<&str> = self.narrowed_by.keys().map(String::as_str).collect();
            reasons.push(format!(
                "chunks held {} of {} whole tiles: widths {}, narrowed by {}",
                self.tiles_in_chunks,
                self.tiles_in_prompts,
                widths.join(", "),
                if rules.is_empty() { "no rule".to_owned() } else { rules.join(", ") }
            ));
        }
        for (reason, count) in &self.fallbacks {
            if *count > 0 && !EXPECTED_FALLBACKS.contains(&reason.as_str()) {
                reasons.push(format!("{count} operations fell back: {reason}"));
            }
        }
        if self.simulated > 0 {
            reasons.push(format!("engines were simulated in {} requests: no time is theirs", self.simulated));
            Engagement::Simulated { reasons }
        } else if dispatched == 0 {
            Engagement::NotEngaged { reasons }
        } else if reasons.is_empty() {
            Engagement::Hybrid
        } else {
            Engagement::Degraded { ratio: dispatched.min(planned) as f64 / planned.max(1) as f64, reasons }
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn members(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record(width: u64, planned: u64, exact: u64, fallbacks: &Value) -> Value {
        json!({
            "choices": [{"chunks": [
                {"start": 0, "tokens": width, "narrowed_by": [{"rule": "max_itl", "before": 128, "after": width}]},
            ]}],
            "plan": {"kinds": {"query": {"planned_ops": planned}}},
            "ledger": {"kinds": {"query": {"exact": exact, "padded": 0, "fallbacks": fallbacks}}},
        })
    }

    #[test]
    fn hybrid_is_what_was_dispatched_as_planned() {
        let evidence = Evidence::of_request(&record(128, 4, 4, &json!({"rows_below_tail_threshold": 2})), 129, 0, 64);
        assert_eq!(evidence.engagement(), Engagement::Hybrid);
        assert_eq!((evidence.tiles_in_prompts, evidence.tiles_in_chunks), (2, 2));
    }

    #[test]
    fn a_hit_in_the_middle_of_a_tile_leaves_whole_tiles_after_it() {
        let tiles = |tokens, cached| Evidence::of_request(&json!({}), tokens, cached, 512).tiles_in_prompts;
        // 768 to 1,024, two tiles, and the rest.
        assert_eq!((tiles(2049, 0), tiles(2049, 768), tiles(2048, 768)), (4, 2, 1));
        assert_eq!((tiles(2049, 1024), tiles(2049, 2048), tiles(600, 599)), (2, 0, 0));
    }

    #[test]
    fn one_chunk_has_nothing_beside_it() {
        let mut evidence = Evidence::of_request(&record(128, 4, 4, &json!({})), 129, 0, 64);
        evidence.add(&Evidence::of_request(&record(128, 4, 4, &json!({})), 129, 0, 64));
        assert!(evidence.is_one_chunk_each() && !Evidence::default().is_one_chunk_each());
        let mut two = record(128, 4, 4, &json!({}));
        two["choices"][0]["chunks"] = json!([{"tokens": 128}, {"tokens": 128}]);
        evidence.add(&Evidence::of_request(&two, 257, 0, 64));
        assert!(!evidence.is_one_chunk_each());
    }

    #[test]
    fn what_did_not_run_is_named() {
        let of = |record: &Value, tokens| Evidence::of_request(record, tokens, 0, 64).engagement();
        let state = of(&record(128, 4, 0, &json!({})), 129);
        assert!(matches!(&state, Engagement::NotEngaged { reasons } if reasons[0].contains("0 of 4")), "{state:?}");
        let state = of(&record(128, 4, 3, &json!({"latched": 1})), 129);
        let Engagement::Degraded { ratio, reasons } = &state else { panic!("{state:?}") };
        assert_eq!((*ratio, reasons.len()), (0.75, 2), "{reasons:?}");
        // Everything that was planned ran, but the plan missed tiles that the prompt had.
        let state = of(&record(63, 4, 4, &json!({})), 129);
        assert!(state.reasons()[0].contains("63 x1, narrowed by max_itl"), "{state:?}");
        assert_eq!(of(&json!({}), 129).label(), "NOT ENGAGED");
        let mut simulated = record(128, 4, 4, &json!({}));
        simulated["plan"]["simulated"] = json!(true);
        let state = of(&simulated, 129);
        assert_eq!((state.label().as_str(), state.is_hybrid(), state.reasons().len()), ("SIMULATED", false, 1));
    }

    #[test]
    fn sums_hide_no_shortfall() {
        let mut sum = Evidence::of_request(&record(128, 4, 4, &json!({})), 129, 0, 64);
        sum.add(&Evidence::of_request(&record(128, 4, 0, &json!({})), 129, 0, 64));
        assert_eq!(sum.engagement().label(), "DEGRADED 50.0 %");
        let mut even = Evidence::of_request(&record(128, 4, 3, &json!({})), 129, 0, 64);
        even.add(&Evidence::of_request(&record(128, 4, 5, &json!({})), 129, 0, 64));
        assert_eq!(even.engagement().reasons(), ["2 requests did not dispatch what was planned for them"]);
        sum.missing = 1;
        assert!(sum.engagement().reasons()[0].contains("no record of 1"));
    }
}
