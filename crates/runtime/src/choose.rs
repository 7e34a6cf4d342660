//! Who does what of each kind of projection, chosen from the [`CostTable`] (section 9.3 and 9.4 of the hybrid spec): primary
//! device, engine, or both in balance; and what is to be expected of it. The same table always gives the same choice.

use std::collections::BTreeMap;

use serde::Serialize;
use troika_graph::Kind;

use crate::cost::{CostTable, OperationCost, line};
use crate::prepare::Placement;

/// An operation goes to engines only if it takes at most this part of its time on the primary device.
const NET_BENEFIT: f64 = 0.97;
/// Engines take part only if a tile is predicted to take less than this part of its time without them.
const WORTH_IT: f64 = 0.99;

/// What was chosen for a kind, and why: milliseconds for one tile of all its layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KindChoice {
    /// Fastest of the three, or what the user said.
    #[serde(skip)]
    pub placement: Placement,
    /// On the primary device.
    pub primary_ms: f64,
    /// All on the engines, what runs beside it already taken off.
    pub whole_ms: Option<f64>,
    /// Both in balance.
    pub split_ms: Option<f64>,
    /// As placed.
    pub expected_ms: f64,
    /// Why no engine gets it, whatever it would save and whoever wants it.
    pub refused: Option<String>,
}

/// Everything that was chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// By kind.
    #[serde(skip)]
    pub kinds: BTreeMap<Kind, KindChoice>,
    /// Least rows that are worth a padded tile, 0 if none are.
    pub tail_threshold: usize,
    /// A tile with engines, milliseconds.
    pub hybrid_ms: f64,
    /// A tile on the primary device with all threads that it has without engines.
    pub alone_ms: f64,
}

impl Choice {
    /// True if engines make prompts shorter.
    pub fn pays(&self) -> bool {
        !self.placements().is_empty() && self.hybrid_ms < WORTH_IT * self.alone_ms
    }

    /// Placements of all kinds that go to engines.
    pub fn placements(&self) -> BTreeMap<Kind, Placement> {
        let placed = self.kinds.iter().filter(|(_, choice)| choice.placement != Placement::Primary);
        placed.map(|(kind, choice)| (*kind, choice.placement)).collect()
    }
}

/// Chooses for every kind that was measured; `said` are placements that the user insists on.
pub fn choose(table: &CostTable, said: &BTreeMap<Kind, Placement>) -> Choice {
    let mut by_kind: BTreeMap<Kind, Vec<&OperationCost>> = BTreeMap::new();
    for cost in &table.operations {
        if let Some(kind) = Kind::projections().into_iter().find(|kind| kind.name() == cost.kind) {
            by_kind.entry(kind).or_default().push(cost);
        }
    }
    let kinds: BTreeMap<Kind, KindChoice> = by_kind
        .into_iter()
        .map(|(kind, costs)| (kind, choose_kind(table, kind, &costs, said.get(&kind).copied())))
        .collect();
    let placed = || kinds.values().filter(|choice| choice.placement != Placement::Primary);
    let sum = |of: fn(&KindChoice) -> f64| placed().map(of).sum::<f64>();
    let (primary, expected) = (sum(|choice| choice.primary_ms), sum(|choice| choice.expected_ms));
    let all: f64 = kinds.values().map(|choice| choice.primary_ms).sum::<f64>() + table.others_ms;
    // Per operation, the rows that take the primary device as long as a tile takes both (spec 4.4).
    let threshold = (table.tile as f64 * expected / primary).ceil();
    let tail_threshold =
        if threshold.is_finite() && threshold < table.tile as f64 { threshold.max(2.0) as usize } else { 0 };
    Choice { tail_threshold, hybrid_ms: all - primary + expected, alone_ms: all / table.speedup_alone, kinds }
}

fn choose_kind(table: &CostTable, kind: Kind, costs: &[&OperationCost], said: Option<Placement>) -> KindChoice {
    let total = |of: &dyn Fn(&OperationCost) -> Option<f64>| -> Option<f64> {
        costs.iter().map(|cost| of(cost).map(|ms| ms * cost.layers as f64)).sum()
    };
    let primary_ms = total(&|cost| Some(cost.primary_ms)).expect("every operation has one");
    // A shared expert is waited for only as long as it takes beyond the routed ones.
    let beside = if kind == Kind::SharedExpert { table.routed_ms } else { 0.0 };
    let whole_ms = total(&|cost| cost.whole_ms.map(|ms| (ms - beside).max(0.0)));
    let split_ms = total(&|cost| cost.region.map(|region| region.ms));
    let layers: usize = costs.iter().map(|cost| cost.layers).sum();
    let fractions = total(&|cost| cost.region.map(|region| region.fraction));
    let fraction = fractions.map(|sum| sum / layers as f64);
    let best = [(whole_ms, Some(Placement::Whole)), (split_ms, fraction.map(Placement::Split))]
        .into_iter()
        .filter_map(|(ms, placement)| ms.zip(placement))
        .filter(|(ms, _)| *ms <= NET_BENEFIT * primary_ms)
        .min_by(|a, b| a.0.total_cmp(&b.0));
    // Wrong is worse than slow.
    let far = costs.iter().filter_map(|cost| cost.error).find(|error| !error.is_small());
    let refused = far.map(|error| {
        format!("off by {:.2} %, cosine {:.5}: 2 % and 0.999 are allowed", error.relative * 100.0, error.cosine)
    });
    let (expected_ms, placement) = match said {
        _ if refused.is_some() => (primary_ms, Placement::Primary),
        None => best.unwrap_or((primary_ms, Placement::Primary)),
        Some(Placement::Primary) => (primary_ms, Placement::Primary),
        Some(Placement::Whole) => (whole_ms.unwrap_or(primary_ms), Placement::Whole),
        Some(Placement::Split(fraction)) => {
            let ms = total(&|cost| predict(cost, fraction)).unwrap_or(primary_ms);
            (ms, Placement::Split(fraction))
        }
    };
    KindChoice { placement, primary_ms, whole_ms, split_ms, expected_ms, refused }
}

/// The slower of both parts, by the lines through what was measured.
fn predict(cost: &OperationCost, fraction: f64) -> Option<f64> {
    let (launch, per_all) = line(&cost.engine)?;
    let part = cost.primary_part?;
    Some((launch + per_all * fraction).max(part.ms / part.fraction * (1.0 - fraction)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{Error, Point};

    fn operation(kind: Kind, primary_ms: f64, whole_ms: Option<f64>, split: Option<(f64, f64)>) -> OperationCost {
        OperationCost {
            kind: kind.name().to_owned(),
            shape: [512, 256],
            layers: 2,
            primary_ms,
            primary_part: Some(Point { fraction: 0.5, ms: primary_ms / 2.0 }),
            engine: vec![Point { fraction: 0.25, ms: 3.0 }, Point { fraction: 0.5, ms: 5.0 }],
            whole_ms,
            region: split.map(|(fraction, ms)| Point { fraction, ms }),
            error: Some(Error { relative: 0.004, cosine: 0.99999 }),
        }
    }

    fn table(speedup_alone: f64) -> CostTable {
        CostTable {
            tile: 100,
            threads: 1,
            threads_alone: 1,
            speedup_alone,
            others_ms: 40.0,
            routed_ms: 15.0,
            operations: vec![
                operation(Kind::WqB, 10.0, Some(9.0), Some((0.5, 6.0))),
                operation(Kind::Wkv, 1.0, Some(1.2), Some((0.5, 0.98))),
                operation(Kind::SharedExpert, 10.0, Some(16.0), None),
            ],
        }
    }

    #[test]
    fn each_kind_goes_where_it_is_fastest() {
        let choice = choose(&table(1.0), &BTreeMap::new());
        let want = BTreeMap::from([(Kind::WqB, Placement::Split(0.5)), (Kind::SharedExpert, Placement::Whole)]);
        assert_eq!(choice.placements(), want, "wkv would gain less than 3 %");
        assert_eq!(choice.alone_ms, 2.0 * (10.0 + 1.0 + 10.0) + 40.0);
        assert_eq!(choice.hybrid_ms, 2.0 * (6.0 + 1.0 + 1.0) + 40.0);
        assert!(choice.pays());
        // 14 of 40 ms: a tail of 35 rows takes the primary device as long as a tile.
        assert_eq!(choice.tail_threshold, 35);
    }

    #[test]
    fn a_primary_device_with_all_cores_may_be_faster() {
        let choice = choose(&table(2.0), &BTreeMap::new());
        assert_eq!((choice.hybrid_ms, choice.alone_ms), (56.0, 41.0));
        assert!(!choice.pays());
        let none = [Kind::WqB, Kind::SharedExpert].map(|kind| (kind, Placement::Primary));
        let choice = choose(&CostTable { speedup_alone: 0.5, ..table(1.0) }, &BTreeMap::from(none));
        assert!(!choice.pays(), "with nothing to do, engines gain nothing");
        assert_eq!(choice.tail_threshold, 0);
    }

    #[test]
    fn what_the_user_says_is_done_and_predicted() {
        let said = BTreeMap::from([(Kind::WqB, Placement::Split(0.75)), (Kind::SharedExpert, Placement::Primary)]);
        let choice = choose(&table(1.0), &said);
        assert_eq!(choice.placements(), BTreeMap::from([(Kind::WqB, Placement::Split(0.75))]));
        assert_eq!(choice.kinds[&Kind::WqB].expected_ms, 14.0, "1 ms and 8 ms for everything, twice");
    }

    #[test]
    fn wrong_numbers_are_refused_whatever_they_save() {
        let mut table = table(1.0);
        table.operations[0].error = Some(Error { relative: 0.03, cosine: 0.9995 });
        for said in [BTreeMap::new(), BTreeMap::from([(Kind::WqB, Placement::Whole)])] {
            let choice = choose(&table, &said);
            assert_eq!(choice.placements(), BTreeMap::from([(Kind::SharedExpert, Placement::Whole)]));
            assert!(choice.kinds[&Kind::WqB].refused.as_ref().is_some_and(|reason| reason.contains("3.00 %")));
        }
    }
}
