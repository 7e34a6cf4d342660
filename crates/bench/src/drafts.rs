//! Speculative decoding: what the server says became of drafts, and whether they changed anything but the time.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::arm::ArmName;
use crate::record::{CellArm, Experiment, TokenCheck};
use crate::run::{Texts, check_texts};
use crate::stats::Interval;

/// Drafts of all requests of an arm and a length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Drafts {
    /// Decode steps that verified drafts.
    pub verifications: u64,
    /// Drafts in them.
    pub drafted: u64,
    /// Drafts that were the next tokens.
    pub accepted: u64,
    /// Decode steps without drafts, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// The same arm and length without a drafter, if that was measured before.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub without: Option<Without>,
}

/// What is compared of the two experiments. They do not take turns, so their rates are shown with their intervals, and no
/// difference is claimed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Without {
    pub decode_tps: Option<Interval>,
    /// Greedy tokens with the drafter against those without.
    pub tokens: TokenCheck,
}

impl Drafts {
    /// Of one request; `None` if its server does not draft. `record` is what the server answers for it.
    pub fn of_request(record: &Value) -> Option<Self> {
        let drafts = record["choices"][0]["drafts"].as_object()?;
        let count = |name: &str| drafts.get(name).and_then(Value::as_u64).unwrap_or(0);
        let skipped = drafts.get("skipped").and_then(Value::as_object).into_iter().flatten();
        Some(Self {
            verifications: count("verifications"),
            drafted: count("drafted"),
            accepted: count("accepted"),
            skipped: skipped.map(|(reason, count)| (reason.clone(), count.as_u64().unwrap_or(0))).collect(),
            without: None,
        })
    }

    /// Counts `other` in.
    pub fn add(&mut self, other: &Self) {
        self.verifications += other.verifications;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        other.skipped.iter().for_each(|(reason, count)| *self.skipped.entry(reason.clone()).or_default() += count);
    }

    /// In a few words.
    pub fn describe(&self) -> String {
        let skipped: u64 = self.skipped.values().sum();
        let share = |part: u64, all: u64| part as f64 / all.max(1) as f64 * 100.0;
        let accepted = match self.drafted {
            0 => "nothing drafted".to_owned(),
            drafted => format!("{:.0} % of {drafted} drafts", share(self.accepted, drafted)),
        };
        let most = self.skipped.iter().max_by_key(|(_, count)| **count).filter(|(_, count)| **count > 0);
        let most = most.map_or_else(String::new, |(reason, _)| format!(", mostly {reason}"));
        format!("{accepted}, {:.0} % of steps without{most}", share(skipped, skipped + self.verifications))
    }
}

/// Compares an experiment with a drafter with the same one without. Other tokens void a length, unless they are those of arm C:
/// its engines may have another arithmetic each time.
pub(crate) fn compare(with: &mut Experiment, texts: &Texts, without: &Experiment, plain: &Texts) {
    for (idx, cell) in with.cells.iter_mut().enumerate() {
        for (place, arm) in cell.arms.iter_mut().enumerate() {
            let pairs = texts[place][idx].iter().zip(&plain[place][idx]);
            let tokens = check_texts(arm.arm, arm.arm, pairs.map(|(own, other)| (own.as_slice(), other.as_slice())));
            let (Some(drafts), Some(tokens)) = (&mut arm.drafts, tokens) else { continue };
            if tokens.equal < tokens.prompts && arm.arm != ArmName::C {
                let why = format!("arm {} gave other tokens with the drafter than without", arm.arm.letter());
                cell.void.get_or_insert(why);
            }
            let decode_tps = without.cells[idx].arms.get(place).and_then(|arm: &CellArm| arm.decode_tps);
            drafts.without = Some(Without { decode_tps, tokens });
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn drafts_are_counted_and_described() {
        let of = |drafts: Value| Drafts::of_request(&json!({"choices": [{"drafts": drafts}]}));
        assert_eq!(of(Value::Null), None, "a server without a drafter");
        let some = json!({"verifications": 3, "drafted": 10, "accepted": 4, "skipped": {"ending": 1, "unsure": 2}});
        let mut drafts = of(some.clone()).expect("drafts");
        assert_eq!(drafts.describe(), "40 % of 10 drafts, 50 % of steps without, mostly unsure");
        drafts.add(&of(some).expect("drafts"));
        assert_eq!((drafts.verifications, drafts.drafted, drafts.accepted), (6, 20, 8));
        assert_eq!(drafts.skipped, BTreeMap::from([("ending".to_owned(), 2), ("unsure".to_owned(), 4)]));
        let none = of(json!({"verifications": 0, "drafted": 0, "accepted": 0, "skipped": {"unprofitable": 5}}));
        let described = none.expect("drafts").describe();
        assert_eq!(described, "nothing drafted, 100 % of steps without, mostly unprofitable");
    }
}
