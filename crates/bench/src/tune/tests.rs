//! The tuner on a machine in closed form: the rates of section 12.3 of the hybrid spec, no clock and no schedule.

use std::collections::BTreeMap;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::journal::Journaled;
use super::search::{Options, Outcome, Reference, tune};
use super::width::Point;
use super::{Arm, Candidate, Gate, KindFacts, Pass, Placement, Probe, Rig, Sample};
use crate::BenchError;

/// Milliseconds for a tile of one layer: on the primary device, on the engines, on the CPU, to merge.
const KINDS: [(&str, f64, f64, Option<f64>, f64); 6] = [
    ("query", 12.60, 12.50, Some(53.9), 1.23),
    ("wo_a", 11.55, 23.10, None, 2.28),
    ("wo_b", 12.0, 14.0, None, 0.77),
    ("mlp", 5.74, 8.90, None, 0.71),
    ("mlp_down", 2.98, 3.52, None, 0.77),
    ("shared", 8.72, 12.42, None, 0.77),
];
/// Everything else at 16K, wo_b not among it.
const OTHERS_MS: f64 = 118.3 - 12.0;
const LAYERS: usize = 43;
const TILE: usize = 4096;
const HANDOVER_AND_SYNC_MS: f64 = 0.22 + 0.65;

struct Machine {
    /// Relative noise of a sample.
    noise: f64,
    random: ChaCha8Rng,
    /// Of every engine.
    slowness: f64,
    /// The plan of this kind is never carried out.
    broken: Option<&'static str>,
    /// The numbers of this kind are wrong, which shows in whole texts.
    wrong: Option<&'static str>,
    passes: usize,
    /// It is interrupted before this pass.
    interrupted_at: Option<usize>,
}

impl Machine {
    fn new(noise: f64, seed: u64) -> Self {
        Self {
            noise,
            random: ChaCha8Rng::seed_from_u64(seed),
            slowness: 1.0,
            broken: None,
            wrong: None,
            passes: 0,
            interrupted_at: None,
        }
    }

    /// Of one layer and tile.
    fn ms(&self, candidate: &Candidate) -> f64 {
        let (mut primary, mut engines, mut waiting) = (OTHERS_MS, 0.0, 0.0);
        let shared = candidate.placement("shared");
        for (name, primary_ms, engine_ms, cpu_ms, merge_ms) in KINDS {
            let is_part = ["mlp", "mlp_down"].contains(&name);
            if (name == "shared" && shared == Placement::Primary) || (is_part && shared != Placement::Primary) {
                continue;
            }
            let engine_ms = engine_ms * self.slowness;
            match candidate.placement(name) {
                Placement::Primary => primary += primary_ms,
                Placement::Split { engine, cpu } => {
                    let region = (0.033 + engine_ms * engine)
                        .max(primary_ms * (1.0 - engine - cpu))
                        .max(cpu_ms.unwrap_or(0.0) * cpu);
                    primary += region + merge_ms + HANDOVER_AND_SYNC_MS;
                }
                Placement::Whole => {
                    primary += merge_ms + HANDOVER_AND_SYNC_MS;
                    engines += engine_ms;
                    // Routed experts run beside the shared one; for the others one waits.
                    waiting += if name == "shared" { (engine_ms - 56.0).max(0.0) } else { engine_ms };
                }
            }
        }
        match candidate.wavefront {
            1 => primary + waiting,
            2 => 1.03 * primary.max(engines),
            _ => 1.01 * primary.max(engines),
        }
    }

    fn tps(&mut self, arm: &Arm) -> f64 {
        let ms = match arm {
            Arm::Stock => self.ms(&Candidate::off()) * 1.022,
            Arm::Matched => self.ms(&Candidate::off()),
            Arm::Reference => self.ms(&published()),
            Arm::Candidate(candidate) => self.ms(candidate),
        };
        let mut uniform = || (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let normal = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        TILE as f64 / (ms / 1e3 * LAYERS as f64) * (1.0 + self.noise * normal)
    }
}

impl Rig for Machine {
    fn kinds(&self) -> Vec<KindFacts> {
        let facts = |(name, _, _, cpu_ms, _): (&str, f64, f64, Option<f64>, f64)| KindFacts {
            name: name.to_owned(),
            layers: LAYERS,
            step: match name {
                "query" => Some(256.0 / 32_768.0),
                "wo_a" => Some(0.25),
                "shared" => None,
                _ => Some(0.0625),
            },
            cpu_step: cpu_ms.map(|_| 64.0 / 32_768.0),
            can_be_whole: !["mlp", "mlp_down"].contains(&name),
            parts: if name == "shared" { vec!["mlp".to_owned(), "mlp_down".to_owned()] } else { Vec::new() },
        };
        KINDS.map(facts).to_vec()
    }

    fn probe(&mut self, kind: &str) -> Result<Probe, BenchError> {
        let (_, primary_ms, engine_ms, cpu_ms, merge_ms) =
            KINDS.into_iter().find(|(name, ..)| *name == kind).expect("it is asked for its own kinds");
        let engine_ms = engine_ms * self.slowness;
        let engine = [0.25, 0.5, 0.75].map(|fraction| Point { fraction, ms: 0.033 + engine_ms * fraction });
        let cpu = cpu_ms.map(|ms| [0.05, 0.125, 0.25].map(|fraction| Point { fraction, ms: ms * fraction }));
        Ok(Probe {
            primary_ms,
            primary_part: None,
            engine: engine.to_vec(),
            cpu: cpu.map_or(Vec::new(), |points| points.to_vec()),
            merge_ms,
            whole_ms: Some(0.033 + engine_ms),
            refused: None,
        })
    }

    fn pass(&mut self, pass: &Pass) -> Result<Vec<Vec<Sample>>, BenchError> {
        if self.interrupted_at == Some(self.passes) {
            return Err(BenchError::Interrupted);
        }
        self.passes += 1;
        let sample = |machine: &mut Self, arm: &Arm| {
            let is_broken = |arm: &Arm| matches!(arm, Arm::Candidate(candidate) if machine.broken.is_some_and(|kind| candidate.kinds.contains_key(kind)));
            let void = is_broken(arm).then(|| "DEGRADED 50.0 %".to_owned());
            Sample { tps: machine.tps(arm), void, digest: Some("d".to_owned()), load_s: 10.0, measure_s: 60.0 }
        };
        Ok(pass.arms.iter().map(|arm| pass.prompts.iter().map(|_| sample(self, arm)).collect()).collect())
    }

    fn gate(&mut self, candidate: &Candidate) -> Result<Gate, BenchError> {
        Ok(match self.wrong.filter(|kind| candidate.kinds.contains_key(*kind)) {
            Some(_) => Gate::Failed { reasons: vec!["mean KL is 1.00e-1".to_owned()] },
            None => Gate::Passed { summary: "mean KL 1.0e-4".to_owned() },
        })
    }
}

/// All kinds but wo_b and the whole shared expert, wo_a at .50 and an eighth of the query on the CPU.
fn published() -> Candidate {
    let split = Placement::split;
    Candidate::off()
        .with("query", Placement::Split { engine: 0.5, cpu: 0.125 })
        .with("wo_a", split(0.5))
        .with("mlp", split(0.5))
        .with("mlp_down", split(0.625))
}

fn options(overlap: bool, max_wavefront: usize) -> Options {
    Options {
        tile: TILE,
        tiles: 4,
        split: true,
        overlap,
        max_wavefront,
        search_rounds: 3,
        verify_rounds: [5, 9],
        reference: Some(Reference { name: "published-2026-08".to_owned(), kinds: published() }),
        max_estimate_s: None,
    }
}

fn run(machine: &mut Machine, options: &Options) -> Outcome {
    tune(machine, options, &mut |_| {}).expect("the machine answers")
}

fn median(outcome: &Outcome, name: &str) -> f64 {
    outcome.verified.iter().find(|verified| verified.name == name).expect("it was verified").tps[0].median
}

fn recommended(outcome: &Outcome) -> (Candidate, f64) {
    let verified = outcome.recommended().unwrap_or_else(|| panic!("{}", outcome.why));
    let Arm::Candidate(candidate) = &verified.arm else { panic!("{:?}", verified.arm) };
    (candidate.clone(), verified.tps[0].median)
}

#[test]
fn splits_that_do_not_pay_and_the_cpus_share_go_off() {
    let outcome = run(&mut Machine::new(0.0, 1), &options(false, 1));
    let (candidate, tps) = recommended(&outcome);
    // 12.3: query in halves, gate and up at .39; wo_a at .33 is .25 in steps of alignment, and down gains less than it costs.
    assert_eq!(candidate.label(), "mlp split 0.375; query split 0.500; wo_b split 0.438");
    assert!(tps > 1.02 * median(&outcome, "published-2026-08"), "{}", outcome.why);
    let lines = |kind: &str| outcome.kinds[kind].lines.join("\n");
    assert!(lines("wo_a").contains("does not pay"), "{}", lines("wo_a"));
    assert!(lines("mlp_down").contains("synchronization 0.8"), "{}", lines("mlp_down"));
    assert!(
        lines("wo_a").contains("split 0.500 as in published-2026-08: 14.73 ms, 128 % of 11.55 ms: does not pay, off")
    );
    assert!(
        lines("query").contains("7.97 ms with it, 7.53 ms without: the CPU's share goes off"),
        "{}",
        lines("query")
    );
    assert!(lines("query").contains("cpu 0.104: prompts 0.4 % faster than without the CPU"), "{}", lines("query"));
}

#[test]
fn overlap_and_chunks_in_flight_are_found() {
    let outcome = run(&mut Machine::new(0.0, 1), &options(true, 1));
    let (candidate, tps) = recommended(&outcome);
    assert_eq!(candidate.placement("shared"), Placement::Whole);
    assert_eq!((candidate.placement("mlp"), candidate.placement("mlp_down")), (Placement::Primary, Placement::Primary));
    assert!(tps > 1.04 * median(&outcome, "matched"), "{}", outcome.why);
    let outcome = run(&mut Machine::new(0.0, 1), &options(true, 3));
    let (candidate, tps) = recommended(&outcome);
    assert_eq!(candidate.wavefront, 3);
    assert!(tps > 1.2 * median(&outcome, "matched"), "{}", outcome.why);
    assert!((tps / median(&outcome, "matched") - 1.28).abs() < 0.1, "{tps}");
}

/// On a machine with noise the plan is nearly as good as without.
#[test]
fn noise_does_not_lead_far_astray() {
    let machine = Machine::new(0.0, 1);
    let best = machine.ms(&recommended(&run(&mut Machine::new(0.0, 1), &options(true, 3))).0);
    for seed in 0..10 {
        let (candidate, _) = recommended(&run(&mut Machine::new(0.01, seed), &options(true, 3)));
        let ms = machine.ms(&candidate);
        assert!(ms < 1.03 * best, "seed {seed}: {ms} against {best}: {}", candidate.label());
    }
}

/// Engines that are no use are not recommended, however the noise falls.
#[test]
fn what_gains_nothing_is_not_recommended() {
    for seed in 0..20 {
        let mut machine = Machine::new(0.02, seed);
        machine.slowness = 12.0;
        let outcome = run(&mut machine, &options(false, 1));
        assert!(outcome.recommended().is_none(), "seed {seed}: {}", outcome.why);
    }
}

#[test]
fn what_was_not_carried_out_is_void_and_what_is_wrong_is_refused() {
    let mut machine = Machine::new(0.0, 1);
    (machine.broken, machine.wrong) = (Some("shared"), Some("query"));
    let outcome = run(&mut machine, &options(true, 3));
    let (candidate, _) = recommended(&outcome);
    assert_eq!((candidate.placement("shared"), candidate.placement("query")), Default::default());
    assert!(outcome.kinds["shared"].lines.iter().any(|line| line.contains("void, DEGRADED 50.0 %")));
    assert!(outcome.kinds["query"].lines.iter().any(|line| line.contains("refused by the numeric gate: mean KL")));
    // Numbers of a probe that are far off keep a kind out from the start.
    struct Off(Machine);
    impl Rig for Off {
        fn kinds(&self) -> Vec<KindFacts> {
            self.0.kinds()
        }
        fn probe(&mut self, kind: &str) -> Result<Probe, BenchError> {
            Ok(Probe { refused: Some("off by 3.00 %".to_owned()), ..self.0.probe(kind)? })
        }
        fn pass(&mut self, pass: &Pass) -> Result<Vec<Vec<Sample>>, BenchError> {
            self.0.pass(pass)
        }
        fn gate(&mut self, candidate: &Candidate) -> Result<Gate, BenchError> {
            self.0.gate(candidate)
        }
    }
    let outcome = tune(&mut Off(Machine::new(0.0, 1)), &options(true, 3), &mut |_| {}).expect("it answers");
    assert!(outcome.recommended().is_none() && outcome.why.contains("no kind of projection pays"), "{}", outcome.why);
}

#[test]
fn a_long_run_needs_consent() {
    let limited = Options { max_estimate_s: Some(600.0), ..options(true, 3) };
    let error = tune(&mut Machine::new(0.0, 1), &limited, &mut |_| {}).expect_err("too long");
    assert!(error.to_string().contains("minutes: --yes goes ahead"), "{error}");
}

/// Cut short and taken up again, a run asks nothing twice and comes to the same end.
#[test]
fn a_run_goes_on_from_its_journal() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("journal");
    let key = serde_json::json!({"weights": "w"});
    let all = options(true, 3);
    let mut whole = Machine::new(0.0, 1);
    let want = run(&mut whole, &all);
    let open = |machine| Journaled::open(machine, &path, &key);
    let mut first = Machine::new(0.0, 1);
    first.interrupted_at = Some(7);
    let error = tune(&mut open(first).expect("new"), &all, &mut |_| {}).expect_err("interrupted");
    assert!(matches!(error, BenchError::Interrupted));
    // The last line was being written when the light went out.
    let text = std::fs::read_to_string(&path).expect("written");
    std::fs::write(&path, &text[..text.len() - 5]).expect("writable");
    let mut second = open(Machine::new(0.0, 1)).expect("goes on");
    // Of seven passes, the last is only half written.
    assert_eq!(second.num_known(), KINDS.len() + 6);
    assert_eq!(tune(&mut second, &all, &mut |_| {}).expect("it answers"), want);
    assert!(second.num_asked() > 0);
    // Everything is there: the third time nothing is asked.
    let mut nothing = Machine::new(0.0, 1);
    nothing.interrupted_at = Some(0);
    let mut nothing = open(nothing).expect("goes on");
    assert_eq!(tune(&mut nothing, &all, &mut |_| {}).expect("it knows"), want);
    assert_eq!((nothing.num_asked(), nothing.num_known()), (0, 0));
    let other = Journaled::open(Machine::new(0.0, 1), &path, &serde_json::json!({"weights": "v"}));
    let error = other.err().expect("of other weights").to_string();
    assert!(error.contains("journal") && error.contains("\"w\"") && error.contains("\"v\""), "{error}");
}

#[test]
fn a_tuning_file_says_what_to_set_and_for_what_it_holds() {
    use super::file::{Key, Source, TuningFile};
    let key = Key { weights: "w".into(), engines: "soft".into(), primary: "cpu".into(), threads: 1, build: "1".into() };
    let outcome = run(&mut Machine::new(0.0, 1), &options(false, 1));
    let file = TuningFile::new(Source::Measured, 0, "v4".into(), key.clone(), "soft", outcome);
    let settings = file.settings.as_ref().expect("recommended");
    let place: BTreeMap<&str, &str> =
        settings.place.iter().map(|(kind, place)| (kind.as_str(), place.as_str())).collect();
    assert_eq!((place["query"], place["wo_a"], place["shared"]), ("split:0.5", "primary", "primary"));
    // H is 1.06 times G or so: tails of less than a tile are padded from 0.94 of it on.
    assert_eq!(settings.tail, (4096.0 * settings.primary_tps / settings.hybrid_tps) as usize + 1);
    let text = serde_json::to_string(&file).expect("JSON");
    assert_eq!(TuningFile::parse(&text).expect("our own").settings, file.settings);
    assert!(TuningFile::parse(r#"{"schema": "troika-tuning", "version": 9}"#).is_err());
    let other = Key { threads: 2, weights: "v".into(), ..key.clone() };
    assert_eq!(key.differences(&key), Vec::<String>::new());
    assert_eq!(
        key.differences(&other),
        ["weights: w in the file, v here", "threads beside the engines: 1 in the file, 2 here"]
    );
    let page = super::report::render(&file, true);
    for part in ["Recommended: found", "query: split 0.500", "numeric gate passed", "each kind alone", "over matched"] {
        assert!(page.contains(part), "no `{part}` in:\n{page}");
    }
    assert!(!page.contains("PREDICT"));
    let predicted = TuningFile { source: Source::Prediction, ..file };
    assert!(super::report::render(&predicted, false).starts_with("PREDICTION, nothing was measured"));
}
