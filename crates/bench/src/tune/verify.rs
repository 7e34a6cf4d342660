//! What was found against both baselines: numeric gate first, then fresh processes in turn, then the rule for a recommendation.

use std::collections::BTreeMap;

use super::search::{KindReport, Outcome, Tuner, Verified, label};
use super::{Arm, Candidate, Gate, Pass};
use crate::BenchError;
use crate::stats::{Difference, Interval, MIN_EFFECT, MIN_SAMPLES, interval};

/// An arm while it is verified.
struct Entry {
    name: String,
    arm: Arm,
    gate: Option<Gate>,
    /// By prompt.
    tps: Vec<Vec<f64>>,
    void: Option<String>,
    digest: Option<String>,
}

impl Entry {
    fn of(name: &str, arm: Arm, gate: Option<Gate>) -> Self {
        Self { name: name.to_owned(), arm, gate, tps: vec![Vec::new(); 2], void: None, digest: None }
    }

    fn over(&self, base: &Self, prompt: usize) -> Option<Difference> {
        Difference::of_rounds(&self.tps[prompt], &base.tps[prompt])
    }
}

/// Place of the matched baseline.
const MATCHED: usize = 1;

impl Tuner<'_> {
    /// What was found with one chunk in flight and with more.
    pub(super) fn verify(mut self, alone: Candidate, deeper: Option<Candidate>) -> Result<Outcome, BenchError> {
        let mut found: Vec<Candidate> = Vec::new();
        for candidate in deeper.into_iter().chain([alone]) {
            if !candidate.kinds.is_empty() && !found.contains(&candidate) {
                found.push(candidate);
            }
        }
        let mut entries = vec![Entry::of("stock", Arm::Stock, None), Entry::of("matched", Arm::Matched, None)];
        if let Some(reference) = &self.options.reference {
            entries.push(Entry::of(&reference.name, Arm::Reference, None));
        }
        for candidate in self.gated(&found)? {
            entries.push(candidate);
        }
        self.set_tails(&mut entries)?;
        self.measure_in_turn(&mut entries)?;
        Ok(self.conclude(&entries))
    }

    /// Each kind by itself, then all of them (spec 9.5). Kinds that fail are left out.
    fn gated(&mut self, found: &[Candidate]) -> Result<Vec<Entry>, BenchError> {
        let mut entries: Vec<Entry> = Vec::new();
        for candidate in found {
            let mut candidate = candidate.clone();
            for (name, placement) in candidate.kinds.clone() {
                self.progress(&format!("numeric gate: {name}"), 0, 1);
                let gate = self.rig.gate(&Candidate::off().with(&name, placement))?;
                let kind = self.kinds.iter_mut().find(|kind| kind.facts.name == name);
                let kind = kind.expect("candidates are made of kinds");
                match gate {
                    Gate::Failed { reasons } => {
                        kind.lines.push(format!("refused by the numeric gate: {}", reasons.join("; ")));
                        candidate.kinds.remove(&name);
                    }
                    Gate::Passed { summary } => kind.lines.push(format!("numeric gate passed: {summary}")),
                    Gate::NotRun { .. } => {}
                }
            }
            if candidate.kinds.is_empty() || entries.iter().any(|e| e.arm == Arm::Candidate(candidate.clone())) {
                continue;
            }
            self.progress("numeric gate: the whole plan", 0, 1);
            let gate = self.rig.gate(&candidate)?;
            let name = if candidate.wavefront > 1 { "found, chunks overlapping" } else { "found" };
            entries.push(Entry::of(name, Arm::Candidate(candidate), Some(gate)));
        }
        Ok(entries)
    }

    /// From how many rows on a tail is worth a padded tile (spec 4.4), by the rates on whole tiles.
    fn set_tails(&mut self, entries: &mut [Entry]) -> Result<(), BenchError> {
        let is_found = |entry: &&mut Entry| entry.gate.is_some();
        let found: Vec<&mut Entry> = entries.iter_mut().filter(is_found).collect();
        if found.is_empty() {
            return Ok(());
        }
        let arms: Vec<Arm> = [Arm::Matched].into_iter().chain(found.iter().map(|entry| entry.arm.clone())).collect();
        let measured = self.measure("finalists on whole tiles", &arms)?;
        for (entry, arm) in found.into_iter().zip(&measured[1..]) {
            if let Arm::Candidate(candidate) = &mut entry.arm {
                candidate.tail = tail(self.options.tile, measured[0].tps(), arm.tps());
            }
        }
        Ok(())
    }

    fn measure_in_turn(&mut self, entries: &mut [Entry]) -> Result<(), BenchError> {
        let [least, most] = self.options.verify_rounds;
        for round in 0..most.max(MIN_SAMPLES) {
            let found = || entries.iter().skip(MATCHED + 1).filter(|entry| entry.void.is_none());
            let is_precise = |entry: &Entry, prompt| {
                entry.over(&entries[MATCHED], prompt).is_none_or(|difference| difference.is_precise())
            };
            if round >= least.max(MIN_SAMPLES) && found().all(|entry| (0..2).all(|prompt| is_precise(entry, prompt))) {
                break;
            }
            self.progress(&format!("verifying {} variants in fresh processes", entries.len()), round, most);
            let arms = entries.iter().map(|entry| entry.arm.clone()).collect();
            let pass = Pass { arms, prompts: self.prompts(), reversed: round % 2 == 1, fresh: true };
            for (entry, samples) in entries.iter_mut().zip(self.rig.pass(&pass)?) {
                for (tps, sample) in entry.tps.iter_mut().zip(samples) {
                    self.num_samples += 1;
                    tps.push(sample.tps);
                    entry.void = sample.void.or(entry.void.take());
                    entry.digest = sample.digest.or(entry.digest.take());
                }
            }
        }
        Ok(())
    }

    fn conclude(self, entries: &[Entry]) -> Outcome {
        let prompts = self.prompts();
        let verified: Vec<Verified> = entries
            .iter()
            .map(|entry| Verified {
                name: entry.name.clone(),
                arm: entry.arm.clone(),
                tps: entry.tps.iter().filter_map(|tps| interval(tps)).collect(),
                gain: (0..2).filter_map(|prompt| entry.over(&entries[MATCHED], prompt)).collect(),
                void: entry.void.clone(),
                gate: entry.gate.clone(),
                digest: entry.digest.clone(),
            })
            .collect();
        let is_sound = |verified: &Verified| refusal(verified, &verified_matched(entries)).is_none();
        let total = |verified: &Verified| verified.gain.iter().map(|gain| gain.ratio.median.ln()).sum::<f64>();
        let by_gain = |a: &usize, b: &usize| total(&verified[*a]).total_cmp(&total(&verified[*b]));
        let found = || (0..verified.len()).filter(|index| verified[*index].gate.is_some());
        let recommended = found().filter(|index| is_sound(&verified[*index])).max_by(by_gain);
        let best = recommended.or_else(|| found().max_by(by_gain));
        let why = match (recommended, best) {
            (Some(index), _) => gains(&verified[index], &prompts),
            (None, Some(index)) => {
                let why = refusal(&verified[index], &verified_matched(entries)).expect("it was refused");
                format!("of what was found, the best is {}: {why}", label(&verified[index].arm))
            }
            (None, None) => "no kind of projection pays on the engines".to_owned(),
        };
        let chosen = |kind: &str| match best.map(|index| &verified[index].arm) {
            Some(Arm::Candidate(candidate)) => candidate.placement(kind),
            _ => super::Placement::Primary,
        };
        let kinds: BTreeMap<String, KindReport> = self
            .kinds
            .into_iter()
            .map(|kind| {
                let name = kind.facts.name.clone();
                let report = KindReport {
                    chosen: chosen(&name),
                    facts: kind.facts,
                    probe: kind.probe,
                    model: kind.model,
                    synchronization_ms: kind.synchronization_ms,
                    lines: kind.lines,
                };
                (name, report)
            })
            .collect();
        Outcome {
            options: self.options.clone(),
            prompts,
            verified,
            recommended,
            why,
            kinds,
            steps: self.steps,
            num_samples: self.num_samples,
        }
    }

    /// Whole tiles and a token, and half a tile more.
    fn prompts(&self) -> Vec<usize> {
        let (tile, tiles) = (self.options.tile, self.options.tiles);
        vec![tiles * tile + 1, tiles * tile + tile / 2]
    }
}

/// Least rows that are worth a padded tile: the primary device at `primary_tps`, with engines `hybrid_tps`. 0 if none are.
fn tail(tile: usize, primary_tps: f64, hybrid_tps: f64) -> usize {
    let threshold = (tile as f64 * primary_tps / hybrid_tps).floor() as usize + 1;
    if hybrid_tps > primary_tps && threshold < tile { threshold } else { 0 }
}

fn verified_matched(entries: &[Entry]) -> Vec<Interval> {
    entries[MATCHED].tps.iter().filter_map(|tps| interval(tps)).collect()
}

/// Why it is not recommended (spec 9.8).
fn refusal(verified: &Verified, matched: &[Interval]) -> Option<String> {
    if let Some(why) = &verified.void {
        return Some(format!("void, {why}"));
    }
    if let Some(Gate::Failed { reasons }) = &verified.gate {
        return Some(format!("the numeric gate is not passed: {}", reasons.join("; ")));
    }
    let mut pairs = verified.gain.iter().zip(verified.tps.iter().zip(matched));
    pairs.find_map(|(gain, (own, base))| {
        let percent = (gain.ratio.median - 1.0) * 100.0;
        if gain.ratio.median < 1.0 + MIN_EFFECT {
            Some(format!("{percent:+.1} % over the matched baseline, {:.0} % is the least", MIN_EFFECT * 100.0))
        } else if own.low <= base.high {
            Some(format!("{percent:+.1} % over the matched baseline, but the intervals overlap"))
        } else {
            None
        }
    })
}

fn gains(verified: &Verified, prompts: &[usize]) -> String {
    let percent = |ratio: f64| (ratio - 1.0) * 100.0;
    let gains = verified.gain.iter().zip(prompts).map(|(gain, prompt)| {
        let ratio = gain.ratio;
        format!(
            "{:+.1} % ({:+.1} to {:+.1}) at {prompt} tokens",
            percent(ratio.median),
            percent(ratio.low),
            percent(ratio.high)
        )
    });
    format!("{} over the same chunks without engines", gains.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_are_padded_from_where_it_pays() {
        // The spec's reference point: 2,048 rows, padded from 1,357 on, is a path that is 1.51 times as fast.
        assert_eq!(tail(2048, 300.0, 453.0), 1357);
        assert_eq!(tail(512, 100.0, 99.0), 0, "engines that are slower never pad");
        assert_eq!(tail(512, 1000.0, 1000.1), 0, "a tile is no tail");
    }
}
