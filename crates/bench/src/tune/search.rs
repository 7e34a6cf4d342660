//! The search itself. Five steps: each kind by itself; those that pay together; single changes as long as any helps; more chunks in
//! flight; and at last what was found against both baselines, in turn, in fresh processes, behind the numeric gate.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::width::Model;
use super::{Arm, Candidate, Gate, KindFacts, Pass, Placement, Probe, Rig, Sample};
use crate::BenchError;
use crate::stats::{Difference, Interval, MIN_EFFECT, MIN_SAMPLES, Verdict, median};

/// An operation goes to engines only if it takes at most this part of its time on the primary device (spec, P5).
pub const NET_BENEFIT: f64 = 0.97;
/// A change that shortens a prompt by less is not made.
const MIN_STEP: f64 = 0.003;
/// What an operation costs in the running model is believed if it is known this well, as a part of its time on the primary device.
const RESOLVED: f64 = 0.1;
/// A change after which prompts are slower than this is not tried again.
const HOPELESS: f64 = 0.97;
/// Changes are looked for so many times in a row.
const MAX_REFINEMENTS: usize = 6;

/// What may be chosen from, and how much is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Options {
    /// Rows of a tile.
    pub tile: usize,
    /// Whole tiles of the prompts.
    pub tiles: usize,
    /// Operations cut between engines and primary device.
    pub split: bool,
    /// Whole operations beside others.
    pub overlap: bool,
    /// Most chunks in flight.
    pub max_wavefront: usize,
    /// Passes while searching, and at least and at most in the verification.
    pub search_rounds: usize,
    pub verify_rounds: [usize; 2],
    /// A plan to compare with.
    pub reference: Option<Reference>,
    /// Longest run without consent, seconds as estimated; `None` = consent was given.
    pub max_estimate_s: Option<f64>,
}

/// A plan that is there already.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    pub name: String,
    pub kinds: Candidate,
}

/// How far it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    pub step: String,
    /// Passes done and wanted of this step.
    pub done: usize,
    pub of: usize,
}

/// Everything that came of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub options: Options,
    /// Prompt lengths of the verification: whole tiles and a token, and half a tile more.
    pub prompts: Vec<usize>,
    /// Primary device in stock geometry, in the matched one, the reference plan if there is one, then what was found.
    pub verified: Vec<Verified>,
    /// Which of them is recommended.
    pub recommended: Option<usize>,
    /// Why it is, or why nothing is.
    pub why: String,
    /// Of each kind, what was found out.
    pub kinds: BTreeMap<String, KindReport>,
    /// The way there.
    pub steps: Vec<Step>,
    /// Arms times prompts times passes that the search and the verification took.
    pub num_samples: usize,
}

impl Outcome {
    pub fn recommended(&self) -> Option<&Verified> {
        self.recommended.map(|index| &self.verified[index])
    }
}

/// An arm of the verification.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    pub name: String,
    pub arm: Arm,
    /// Tokens per second, by prompt.
    pub tps: Vec<Interval>,
    /// Over the matched baseline, by prompt.
    pub gain: Vec<Difference>,
    /// Why its samples do not count.
    pub void: Option<String>,
    /// Of candidates.
    pub gate: Option<Gate>,
    /// Of the plan.
    pub digest: Option<String>,
}

/// A kind and what was found out about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindReport {
    pub facts: KindFacts,
    pub probe: Probe,
    pub model: Option<Model>,
    /// What the operation takes besides region and merge when it is split in the running model.
    pub synchronization_ms: Option<f64>,
    /// In the recommended plan, or the best one if none is.
    pub chosen: Placement,
    /// Why, in the order in which it was found out.
    pub lines: Vec<String>,
}

/// One comparison on the way, the incumbent first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    pub what: String,
    pub rows: Vec<StepRow>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRow {
    pub label: String,
    pub tps: f64,
    /// Over the first row.
    pub ratio: f64,
    pub note: String,
}

/// Searches. Never changes a setting.
///
/// # Errors
///
/// If the rig cannot measure, is interrupted, or the run would take longer than there is consent for.
pub fn tune(rig: &mut dyn Rig, options: &Options, tell: &mut dyn FnMut(&Progress)) -> Result<Outcome, BenchError> {
    let mut tuner = Tuner::new(rig, options, tell)?;
    tuner.estimate()?;
    tuner.kinds_alone()?;
    let together = tuner.together()?;
    let alone = tuner.refine(together, false)?;
    let deeper = tuner.deeper(&alone)?;
    tuner.verify(alone, deeper)
}

pub(super) struct Kind {
    pub(super) facts: KindFacts,
    pub(super) probe: Probe,
    pub(super) model: Option<Model>,
    /// Balanced, in the steps of the alignment.
    split: Option<Placement>,
    pub(super) synchronization_ms: Option<f64>,
    /// What pays by itself, and what an operation takes with it.
    pays: Vec<(Placement, f64)>,
    /// Why engines get nothing of it.
    refused: Option<String>,
    pub(super) lines: Vec<String>,
}

/// What an arm was measured with.
pub(super) struct Measured {
    arm: Arm,
    /// Relative to the first arm as it was just before and after, times that one's median.
    tps: Vec<f64>,
    void: Option<String>,
}

impl Measured {
    pub(super) fn tps(&self) -> f64 {
        median(&self.tps).unwrap_or(0.0)
    }

    fn over(&self, base: &Self) -> Option<Difference> {
        Difference::of(&self.tps, &base.tps)
    }

    fn is_better_than(&self, base: &Self) -> bool {
        self.void.is_none() && self.over(base).is_some_and(|d| d.ratio.median >= 1.0 + MIN_STEP && d.ratio.low > 1.0)
    }
}

pub(super) struct Tuner<'a> {
    pub(super) rig: &'a mut dyn Rig,
    pub(super) options: &'a Options,
    tell: &'a mut dyn FnMut(&Progress),
    /// How long it takes, in words.
    estimate: String,
    pub(super) kinds: Vec<Kind>,
    pub(super) steps: Vec<Step>,
    /// Candidates that are void, by their label.
    void: BTreeSet<String>,
    pub(super) num_samples: usize,
}

impl Kind {
    fn new(facts: KindFacts, probe: Probe) -> Self {
        let model = facts.step.and_then(|_| Model::of(&probe));
        let split = model.and_then(|model| model.snapped(&facts, false));
        let refused = probe.refused.as_ref().map(|reason| format!("refused: the engines' result is {reason}"));
        let mut kind =
            Self { facts, probe, model, split, synchronization_ms: None, pays: Vec::new(), refused, lines: Vec::new() };
        kind.lines.push(format!("{:.2} ms for a tile of one layer on the primary device", kind.probe.primary_ms));
        kind.lines.extend(kind.refused.clone());
        kind
    }

    fn total_ms(&self) -> f64 {
        self.probe.primary_ms * self.facts.layers as f64
    }

    /// Region and merge at a split, by what each part costs by itself.
    fn expected_ms(&self, placement: Placement) -> Option<f64> {
        match (placement, self.model) {
            (Placement::Split { engine, cpu }, Some(model)) => Some(model.region_ms(engine, cpu) + self.probe.merge_ms),
            _ => None,
        }
    }

    fn share(&self, ms: f64) -> String {
        format!("{:.0} % of {:.2} ms", ms / self.probe.primary_ms * 100.0, self.probe.primary_ms)
    }

    fn may_pay(&self, ms: f64) -> bool {
        ms <= NET_BENEFIT * self.probe.primary_ms
    }

    /// The balanced split, if it may pay by what its parts cost alone. Says why not.
    fn split_worth_trying(&mut self) -> Option<Placement> {
        let Some(placement) = self.split else {
            if self.facts.step.is_some() {
                self.lines.push("no split: its branches cannot be balanced".to_owned());
            }
            return None;
        };
        let ms = self.expected_ms(placement)?;
        if self.may_pay(ms) {
            return Some(placement);
        }
        self.lines.push(format!(
            "{}: {ms:.2} ms by itself, {}: does not pay, at most {:.0} % is allowed",
            placement.label(),
            self.share(ms),
            NET_BENEFIT * 100.0
        ));
        None
    }
}

impl<'a> Tuner<'a> {
    fn new(rig: &'a mut dyn Rig, options: &'a Options, tell: &'a mut dyn FnMut(&Progress)) -> Result<Self, BenchError> {
        let facts = rig.kinds();
        let mut kinds = Vec::new();
        for (done, of_kind) in facts.iter().enumerate() {
            tell(&Progress { step: format!("probing {}", of_kind.name), done, of: facts.len() });
            kinds.push(Kind::new(of_kind.clone(), rig.probe(&of_kind.name)?));
        }
        // What takes longest is looked at first.
        kinds.sort_by(|a, b| b.total_ms().total_cmp(&a.total_ms()));
        let estimate = String::new();
        Ok(Self { rig, options, tell, estimate, kinds, steps: Vec::new(), void: BTreeSet::new(), num_samples: 0 })
    }

    pub(super) fn progress(&mut self, step: &str, done: usize, of: usize) {
        (self.tell)(&Progress { step: format!("{}{step}", self.estimate), done, of });
    }

    /// Whole tiles and the token that starts decoding.
    fn aligned(&self) -> usize {
        self.options.tiles * self.options.tile + 1
    }

    /// Milliseconds of an aligned prompt.
    fn prompt_ms(&self, tps: f64) -> f64 {
        self.aligned() as f64 / tps * 1e3
    }

    /// Says how long a run will be, and asks for consent where that is long: the cost of a baseline's sample, and how many there
    /// may be.
    fn estimate(&mut self) -> Result<(), BenchError> {
        let pass =
            Pass { arms: vec![Arm::Stock, Arm::Matched], prompts: vec![self.aligned()], reversed: false, fresh: false };
        self.progress("how long a sample takes", 0, 1);
        let samples = self.rig.pass(&pass)?;
        let mean = |of: fn(&Sample) -> f64| samples.iter().flatten().map(of).sum::<f64>() / 2.0;
        let (load_s, measure_s) = (mean(|s| s.load_s), mean(|s| s.measure_s));
        // Kinds alone, three comparisons of single changes, the verification.
        let options = self.options;
        let changes = 2 * self.kinds.len() + 3;
        let arms = changes * if options.max_wavefront > 1 { 4 } else { 2 };
        let verification = (4 * 2 * options.verify_rounds[0]) as f64;
        let seconds =
            arms as f64 * (load_s + options.search_rounds as f64 * measure_s) + verification * (load_s + measure_s);
        let minutes = (seconds / 60.0).ceil() as u64;
        if options.max_estimate_s.is_some_and(|most| seconds > most) {
            return Err(BenchError::NeedsConsent { minutes });
        }
        self.estimate = if minutes > 0 { format!("about {minutes} minutes in all; ") } else { String::new() };
        Ok(())
    }

    /// Measures arms in turn on the aligned prompt, the first of them, which they are compared with, before and after every two of
    /// the others: a machine that is slower for some seconds is so for both. Those that turn out void are measured once.
    pub(super) fn measure(&mut self, what: &str, arms: &[Arm]) -> Result<Vec<Measured>, BenchError> {
        let mut measured: Vec<Measured> =
            arms.iter().map(|arm| Measured { arm: arm.clone(), tps: Vec::new(), void: None }).collect();
        let rounds = self.options.search_rounds.max(MIN_SAMPLES);
        let mut base_tps = Vec::new();
        for round in 0..rounds {
            self.progress(&format!("{what}: {} variants", arms.len()), round, rounds);
            let left: Vec<usize> = (1..arms.len()).filter(|index| measured[*index].void.is_none()).collect();
            let pairs = left.chunks(2).flat_map(|pair| pair.iter().copied().chain([0]));
            let order: Vec<usize> = [0].into_iter().chain(pairs).collect();
            let in_order = order.iter().map(|index| arms[*index].clone()).collect();
            let pass = Pass { arms: in_order, prompts: vec![self.aligned()], reversed: round % 2 == 1, fresh: false };
            let samples: Vec<Sample> = self.rig.pass(&pass)?.into_iter().flatten().collect();
            self.num_samples += samples.len();
            for (place, index) in order.iter().copied().enumerate() {
                let sample = &samples[place];
                measured[index].void = sample.void.clone().or(measured[index].void.take());
                if index == 0 {
                    base_tps.push(sample.tps);
                    continue;
                }
                let before = if order[place - 1] == 0 { place - 1 } else { place - 2 };
                let after = if order[place + 1] == 0 { place + 1 } else { place + 2 };
                measured[index].tps.push(2.0 * sample.tps / (samples[before].tps + samples[after].tps));
            }
        }
        // What counts is the ratio to the neighbours; it is given as a rate on a machine that is always as fast as usual.
        let base = median(&base_tps).unwrap_or(0.0);
        measured[0].tps = vec![base; rounds];
        measured[1..].iter_mut().flat_map(|arm| &mut arm.tps).for_each(|ratio| *ratio *= base);
        for arm in &measured {
            if let (Arm::Candidate(candidate), Some(_)) = (&arm.arm, &arm.void) {
                self.void.insert(candidate.label());
            }
        }
        let first = measured.first().map_or(0.0, Measured::tps);
        let row = |arm: &Measured| StepRow {
            label: label(&arm.arm),
            tps: arm.tps(),
            ratio: arm.tps() / first,
            note: arm.void.as_ref().map_or_else(String::new, |why| format!("void: {why}")),
        };
        self.steps.push(Step { what: what.to_owned(), rows: measured.iter().map(row).collect() });
        Ok(measured)
    }

    /// Each kind switched on by itself, against the matched baseline: that is where synchronization shows.
    fn kinds_alone(&mut self) -> Result<(), BenchError> {
        let mut tried = Vec::new();
        for (index, kind) in self.kinds.iter_mut().enumerate() {
            if kind.refused.is_some() {
                continue;
            }
            if self.options.split {
                tried.extend(kind.split_worth_trying().map(|placement| (index, placement)));
            }
            if self.options.overlap && kind.facts.can_be_whole {
                tried.push((index, Placement::Whole));
            }
        }
        let arm = |(index, placement): &(usize, Placement)| {
            Arm::Candidate(Candidate::off().with(&self.kinds[*index].facts.name, *placement))
        };
        let arms: Vec<Arm> = [Arm::Matched].into_iter().chain(tried.iter().map(arm)).collect();
        if tried.is_empty() {
            return Ok(());
        }
        let measured = self.measure("each kind alone", &arms)?;
        let (base, rest) = measured.split_first().expect("the matched baseline is there");
        let base_ms = self.prompt_ms(base.tps());
        let mut switched = Vec::new();
        for ((index, placement), arm) in tried.into_iter().zip(rest) {
            if let Some(why) = &arm.void {
                self.kinds[index].lines.push(format!("{}: void, {why}", placement.label()));
                continue;
            }
            let operations = (self.options.tiles * self.kinds[index].facts.layers) as f64;
            let ratio = arm.over(base).map_or(0.0, |difference| difference.ratio.half_width());
            switched.push(Switched {
                index,
                placement,
                change_ms: (self.prompt_ms(arm.tps()) - base_ms) / operations,
                unsure_ms: ratio * base_ms / operations,
            });
        }
        self.judge(&switched);
        Ok(())
    }

    /// The net-benefit test (spec 9.4).
    fn judge(&mut self, switched: &[Switched]) {
        let synchronization = |s: &Switched| {
            let kind = &self.kinds[s.index];
            let expected = kind.expected_ms(s.placement)?;
            Some(kind.probe.primary_ms + s.change_ms - expected)
        };
        let is_resolved = |s: &Switched| s.unsure_ms <= RESOLVED * self.kinds[s.index].probe.primary_ms;
        let known: Vec<f64> = switched.iter().filter(|s| is_resolved(s)).filter_map(synchronization).collect();
        let all: Vec<f64> = switched.iter().filter_map(synchronization).collect();
        let pooled = median(&known).or_else(|| median(&all));
        let found: Vec<_> = switched.iter().map(|s| (*s, synchronization(s), is_resolved(s))).collect();
        for (s, synchronization, is_resolved) in found {
            let kind = &mut self.kinds[s.index];
            let (net_ms, parts) = match (kind.expected_ms(s.placement), synchronization, pooled) {
                (Some(expected), Some(own), Some(pooled)) => {
                    let synchronization = if is_resolved { own } else { pooled };
                    kind.synchronization_ms = Some(synchronization);
                    let of = if is_resolved { "" } else { ", as of the others, for noise hides its own" };
                    let (region, merge) = (expected - kind.probe.merge_ms, kind.probe.merge_ms);
                    let parts =
                        format!("region {region:.2} + merge {merge:.2} + synchronization {synchronization:.2} ms{of}");
                    (expected + synchronization, parts)
                }
                _ => (kind.probe.primary_ms + s.change_ms, "in the running model".to_owned()),
            };
            // What is done beside other work has no time of its own to fall back on.
            let pays = kind.may_pay(net_ms) && (is_resolved || synchronization.is_some());
            let verdict = match pays {
                true => "pays",
                false if is_resolved || synchronization.is_some() => "does not pay",
                false => "lost in noise",
            };
            kind.lines.push(format!(
                "{} alone: {net_ms:.2} ms ({parts}), {}: {verdict}",
                s.placement.label(),
                kind.share(net_ms)
            ));
            if pays {
                kind.pays.push((s.placement, net_ms));
            }
        }
        self.judge_reference(pooled.unwrap_or(0.0));
    }

    /// What the plan that is compared with does of each kind, by the same test.
    fn judge_reference(&mut self, pooled_ms: f64) {
        let Some(reference) = &self.options.reference else { return };
        for kind in &mut self.kinds {
            let placement = reference.kinds.placement(&kind.facts.name);
            let (Some(expected), Placement::Split { engine, cpu }) = (kind.expected_ms(placement), placement) else {
                continue;
            };
            let net_ms = expected + kind.synchronization_ms.unwrap_or(pooled_ms);
            let verdict = if kind.may_pay(net_ms) { "pays" } else { "does not pay, off" };
            let (name, share) = (&reference.name, kind.share(net_ms));
            kind.lines.push(format!("{} as in {name}: {net_ms:.2} ms, {share}: {verdict}", placement.label()));
            let without = kind.expected_ms(Placement::split(engine)).filter(|_| cpu > 0.0);
            if let Some(without) = without.filter(|without| *without <= expected) {
                kind.lines.push(format!(
                    "cpu {cpu:.3} as in {name}: {expected:.2} ms with it, {without:.2} ms without: the CPU's share goes off"
                ));
            }
        }
    }

    /// Everything that pays, each kind as it is best; what would be placed twice goes where it saves more.
    fn together(&mut self) -> Result<Candidate, BenchError> {
        let mut best: Vec<(usize, Placement, f64)> = Vec::new();
        for (index, kind) in self.kinds.iter().enumerate() {
            if let Some((placement, ms)) = kind.pays.iter().min_by(|a, b| a.1.total_cmp(&b.1)) {
                best.push((index, *placement, (kind.probe.primary_ms - ms) * kind.facts.layers as f64));
            }
        }
        best.sort_by(|a, b| b.2.total_cmp(&a.2));
        let mut candidate = Candidate::off();
        for (index, placement, _) in best {
            let name = &self.kinds[index].facts.name;
            if !self.collides(&candidate, index) {
                candidate = candidate.with(name, placement);
            }
        }
        self.helpers(candidate)
    }

    fn collides(&self, candidate: &Candidate, index: usize) -> bool {
        let facts = &self.kinds[index].facts;
        let is_part_of_placed =
            |other: &Kind| other.facts.parts.contains(&facts.name) && candidate.kinds.contains_key(&other.facts.name);
        facts.parts.iter().any(|part| candidate.kinds.contains_key(part)) || self.kinds.iter().any(is_part_of_placed)
    }

    /// Changes one kind; what would be placed twice is taken off where it was.
    fn change(&self, candidate: &Candidate, index: usize, placement: Placement) -> Candidate {
        let facts = &self.kinds[index].facts;
        let mut changed = candidate.with(&facts.name, placement);
        if placement != Placement::Primary {
            let wholes = self.kinds.iter().filter(|other| other.facts.parts.contains(&facts.name));
            let others = facts.parts.iter().chain(wholes.map(|other| &other.facts.name));
            others.for_each(|other| {
                changed.kinds.remove(other);
            });
        }
        changed
    }

    /// A CPU that helps must make a difference that the benchmark would see: its threads are taken from everything else.
    fn helpers(&mut self, candidate: Candidate) -> Result<Candidate, BenchError> {
        let mut tried = Vec::new();
        for (index, kind) in self.kinds.iter_mut().enumerate() {
            let placed = candidate.placement(&kind.facts.name);
            let (Placement::Split { .. }, Some(_), Some(model)) = (placed, kind.facts.cpu_step, kind.model) else {
                continue;
            };
            match model.snapped(&kind.facts, true) {
                Some(Placement::Split { engine, cpu }) if cpu > 0.0 => {
                    tried.push((index, Placement::Split { engine, cpu }));
                }
                _ => kind.lines.push("no share for the CPU: it would be last in any case".to_owned()),
            }
        }
        if tried.is_empty() {
            return Ok(candidate);
        }
        let with = tried.iter().map(|(index, placement)| Arm::Candidate(self.change(&candidate, *index, *placement)));
        let arms: Vec<Arm> = [Arm::Candidate(candidate.clone())].into_iter().chain(with).collect();
        let measured = self.measure("a share for the CPU", &arms)?;
        let mut best = candidate;
        for ((index, placement), arm) in tried.into_iter().zip(&measured[1..]) {
            let difference = arm.over(&measured[0]).filter(|_| arm.void.is_none());
            let helps = difference.is_some_and(|difference| difference.verdict == Verdict::Faster);
            if helps {
                best = self.change(&best, index, placement);
            }
            let verdict = if helps { "stays" } else { "off" };
            self.kinds[index].lines.push(format!(
                "{}: prompts {} than without the CPU, and {:.0} % makes a difference: {verdict}",
                placement.label(),
                faster(arm.tps() / measured[0].tps()),
                MIN_EFFECT * 100.0
            ));
        }
        Ok(best)
    }

    /// Single changes, and then all that helped together, as long as anything helps.
    fn refine(&mut self, start: Candidate, in_flight: bool) -> Result<Candidate, BenchError> {
        let mut incumbent = start;
        let mut hopeless: Vec<Move> = Vec::new();
        for _ in 0..MAX_REFINEMENTS {
            let mut moves = self.moves(&incumbent, in_flight);
            moves.retain(|(change, _)| !hopeless.contains(change));
            if moves.is_empty() {
                break;
            }
            let arms: Vec<Arm> = [incumbent.clone()]
                .into_iter()
                .chain(moves.iter().map(|(_, candidate)| candidate.clone()))
                .map(Arm::Candidate)
                .collect();
            let measured = self.measure("single changes", &arms)?;
            let mut helped: Vec<(usize, f64)> = (0..moves.len())
                .filter(|index| measured[index + 1].is_better_than(&measured[0]))
                .map(|index| (index, measured[index + 1].tps()))
                .collect();
            for ((what, _), arm) in moves.iter().zip(&measured[1..]) {
                if arm.over(&measured[0]).is_some_and(|difference| difference.ratio.high < HOPELESS) {
                    hopeless.push(*what);
                }
                if let Move::Kind(index, placement) = what {
                    let change = faster(arm.tps() / measured[0].tps());
                    let flight = if incumbent.wavefront > 1 {
                        format!(" with {} chunks in flight", incumbent.wavefront)
                    } else {
                        String::new()
                    };
                    let before = incumbent.placement(&self.kinds[*index].facts.name).label();
                    self.kinds[*index]
                        .lines
                        .push(format!("from {before} to {}{flight}: prompts {change}", placement.label()));
                }
            }
            helped.sort_by(|a, b| b.1.total_cmp(&a.1));
            let Some((best, _)) = helped.first().copied() else { break };
            let together = helped.iter().rev().fold(incumbent.clone(), |candidate, (index, _)| match moves[*index].0 {
                Move::Kind(kind, placement) => self.change(&candidate, kind, placement),
                Move::InFlight(wavefront) => candidate.in_flight(wavefront),
            });
            let single = moves[best].1.clone();
            if together == single {
                incumbent = single;
                continue;
            }
            let arms = [incumbent.clone(), single, together].map(Arm::Candidate);
            let measured = self.measure("what helped, one and all", &arms)?;
            let better = measured.iter().filter(|arm| arm.void.is_none()).max_by(|a, b| a.tps().total_cmp(&b.tps()));
            match better.map(|arm| &arm.arm) {
                Some(Arm::Candidate(better)) if *better != incumbent => incumbent = better.clone(),
                _ => break,
            }
        }
        Ok(incumbent)
    }

    fn moves(&self, incumbent: &Candidate, in_flight: bool) -> Vec<(Move, Candidate)> {
        let mut moves = Vec::new();
        for (index, kind) in self.kinds.iter().enumerate().filter(|(_, kind)| kind.refused.is_none()) {
            let now = incumbent.placement(&kind.facts.name);
            let mut others = vec![Placement::Primary];
            if self.options.overlap && kind.facts.can_be_whole {
                others.push(Placement::Whole);
            }
            let split = kind
                .split
                .filter(|split| self.options.split && kind.expected_ms(*split).is_some_and(|ms| kind.may_pay(ms)));
            match (now, kind.facts.step) {
                (Placement::Split { engine, cpu }, Some(step)) => {
                    let neighbours = [engine - step, engine + step].into_iter();
                    let valid = neighbours.filter(|engine| *engine > step / 2.0 && engine + cpu < 1.0 - step / 2.0);
                    others.extend(valid.map(|engine| Placement::Split { engine, cpu }));
                }
                _ => others.extend(split),
            }
            for placement in others.into_iter().filter(|placement| *placement != now) {
                moves.push((Move::Kind(index, placement), self.change(incumbent, index, placement)));
            }
        }
        if in_flight {
            let depths = [incumbent.wavefront - 1, incumbent.wavefront + 1];
            let valid = depths.into_iter().filter(|depth| (1..=self.options.max_wavefront).contains(depth));
            moves.extend(valid.map(|depth| (Move::InFlight(depth), incumbent.in_flight(depth))));
        }
        moves.retain(|(_, candidate)| !candidate.kinds.is_empty() && !self.void.contains(&candidate.label()));
        moves
    }

    /// More chunks in flight: from what is best with one, from the same without splits, and from everything that can be whole.
    fn deeper(&mut self, alone: &Candidate) -> Result<Option<Candidate>, BenchError> {
        if self.options.max_wavefront < 2 || !self.options.overlap {
            return Ok(None);
        }
        let mut whole = Candidate::off();
        let mut unsplit = alone.clone();
        for (index, kind) in self.kinds.iter().enumerate() {
            if !kind.facts.can_be_whole || kind.refused.is_some() {
                continue;
            }
            if !self.collides(&whole, index) {
                whole = self.change(&whole, index, Placement::Whole);
            }
            if matches!(unsplit.placement(&kind.facts.name), Placement::Split { .. }) {
                unsplit = self.change(&unsplit, index, Placement::Whole);
            }
        }
        let mut starts: Vec<Candidate> = Vec::new();
        for depth in 2..=self.options.max_wavefront {
            for start in [alone, &unsplit, &whole].map(|start| start.in_flight(depth)) {
                if !start.kinds.is_empty() && !starts.contains(&start) {
                    starts.push(start);
                }
            }
        }
        let arms: Vec<Arm> = [alone.clone()].into_iter().chain(starts).map(Arm::Candidate).collect();
        let measured = self.measure("more chunks in flight", &arms)?;
        let best = measured[1..].iter().filter(|arm| arm.void.is_none()).max_by(|a, b| a.tps().total_cmp(&b.tps()));
        let Some(Arm::Candidate(best)) = best.map(|arm| arm.arm.clone()) else { return Ok(None) };
        self.refine(best, true).map(Some)
    }
}

/// A single change.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Move {
    Kind(usize, Placement),
    InFlight(usize),
}

/// A kind that was switched on by itself.
#[derive(Clone, Copy, Debug)]
struct Switched {
    index: usize,
    placement: Placement,
    /// What an operation takes more than on the primary device, and how unsure that is.
    change_ms: f64,
    unsure_ms: f64,
}

/// A ratio of rates, for people.
fn faster(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    format!("{:.1} % {}", percent.abs(), if percent < 0.0 { "slower" } else { "faster" })
}

pub(super) fn label(arm: &Arm) -> String {
    match arm {
        Arm::Stock => "primary device, stock chunks".to_owned(),
        Arm::Matched => "primary device, the same chunks as with engines".to_owned(),
        Arm::Reference => "the plan that is compared with".to_owned(),
        Arm::Candidate(candidate) => candidate.label(),
    }
}
