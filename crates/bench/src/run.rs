//! The matrix: models, lengths and arms, in interleaved rounds, each arm of each round in a process of its own.
//!
//! Whatever stops it, what was measured so far is in the record, labelled. Nothing here decides what counts as a
//! difference: see [`crate::stats`].

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::BenchError;
use crate::arm::{Arm, ArmName, Feature, Geometry};
use crate::client::{Answer, Ask};
use crate::corpus::{Tokens, ids_digest};
use crate::drafts::{self, Drafts};
use crate::evidence::Evidence;
use crate::host::{CpuTime, HostFacts, HostState};
use crate::record::{
    ArmRecord, Cell, CellArm, Experiment, Host, Length, ModelFacts, Profile, ProfileEntry, Program, Record, Regime,
    SCHEMA, Sample, Settings, StepTimeline, TokenCheck, VERSION,
};
use crate::server::{LOAD_PATIENCE, Launch, Server, output};
use crate::stats::{Difference, interval, median};

/// Tokens of the discarded request, at most: every page of the weights is touched, every tile was computed once.
const WARM_UP_TOKENS: usize = 4097;

/// Tokens that make a rate, of two answers at once: the first few come at any moment.
const MIN_TOGETHER: f64 = 8.0;

/// How long the record of a request that has ended is waited for.
const RECORD_PATIENCE: Duration = Duration::from_secs(60);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The `troika` program.
    pub program: PathBuf,
    /// What the user calls this run.
    pub label: Option<String>,
    pub settings: Settings,
    pub arms: Vec<Arm>,
    pub lengths: Vec<Length>,
    pub subjects: Vec<Subject>,
    /// Longest run without consent, seconds as estimated; `None` = consent was given.
    pub max_estimate_s: Option<f64>,
}

/// One checkpoint with or without its drafter.
#[derive(Clone, Debug)]
pub struct Subject {
    pub facts: ModelFacts,
    pub drafter: bool,
    /// Why it cannot be measured.
    pub unavailable: Option<String>,
    pub tokens: Tokens,
}

/// How far it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Processes run, and most there will be.
    pub done: usize,
    pub of: usize,
    pub what: String,
}

/// Measures everything. Ends early when `stop` becomes true or something fails; the record says so.
///
/// # Errors
///
/// If nothing could be measured at all: the program or a corpus is not what it should be, or it would take longer than there
/// is consent for.
pub fn run(setup: &Setup, stop: &AtomicBool, tell: &mut dyn FnMut(&Progress)) -> Result<Record, BenchError> {
    let prompts: Vec<Prompts> = setup.subjects.iter().map(|s| Prompts::cut(s, setup)).collect::<Result<_, _>>()?;
    let (start, started) = (HostState::now(), Instant::now());
    let mut record = Record {
        schema: SCHEMA.to_owned(),
        version: VERSION,
        created_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
        incomplete: None,
        label: setup.label.clone(),
        program: Program::at(&setup.program)?,
        host: Host { facts: HostFacts::new(), start: start.clone(), end: start },
        settings: setup.settings.clone(),
        experiments: Vec::new(),
    };
    let measurable = setup.subjects.iter().filter(|subject| subject.unavailable.is_none()).count();
    let mut progress =
        Progress { done: 0, of: measurable * setup.arms.len() * setup.settings.max_rounds, what: String::new() };
    let mut plain = None;
    for (subject, prompts) in setup.subjects.iter().zip(&prompts) {
        let mut under_way = UnderWay::new(setup, subject, prompts, started);
        let ended = if subject.unavailable.is_none() { under_way.measure(stop, &mut progress, tell) } else { Ok(()) };
        let texts = under_way.texts.clone();
        let mut experiment = under_way.into_experiment();
        // Without the drafter comes first, if it comes at all.
        match (&plain, record.experiments.last()) {
            (Some(plain), Some(without))
                if subject.drafter && !without.drafter && without.model == experiment.model =>
            {
                drafts::compare(&mut experiment, &texts, without, plain);
            }
            _ => plain = Some(texts),
        }
        record.experiments.push(experiment);
        if let Err(error) = ended {
            // What was measured of other models is not thrown away.
            if matches!(error, BenchError::NeedsConsent { .. }) && record.experiments.len() == 1 {
                return Err(error);
            }
            record.incomplete = Some(error.to_string());
            break;
        }
    }
    record.host.end = HostState::now();
    Ok(record)
}

/// The prompts of one subject.
#[derive(Debug)]
struct Prompts {
    warm_up: Vec<u32>,
    profile: Vec<u32>,
    /// By length, then by repeat.
    cells: Vec<Vec<Repeat>>,
}

/// What one repeat sends.
#[derive(Debug)]
struct Repeat {
    prompt: Vec<u32>,
    /// In the regime `service`: an earlier prompt, and one that shares its first half.
    shared: Option<[Vec<u32>; 2]>,
}

impl Prompts {
    fn cut(subject: &Subject, setup: &Setup) -> Result<Self, BenchError> {
        let mut idx = 0;
        let mut next = |len: usize| {
            idx += 1;
            subject.tokens.prompt(idx - 1, len).map(<[u32]>::to_vec)
        };
        let longest = setup.lengths.iter().map(|length| length.tokens).max().unwrap_or(0);
        let long = longest.min(WARM_UP_TOKENS);
        let (warm_up, profile) = (next(long)?, next(long)?);
        let mut repeat = |len: usize| {
            let prompt = next(len)?;
            let shared = match setup.settings.regime {
                Regime::Lab => None,
                Regime::Service => {
                    let (earlier, other) = (next(len)?, next(len)?);
                    let later = [&earlier[..len / 2], &other[len / 2..]].concat();
                    Some([earlier, later])
                }
            };
            Ok(Repeat { prompt, shared })
        };
        let mut cell = |length: &Length| (0..setup.settings.repeats).map(|_| repeat(length.tokens)).collect();
        let cells = setup.lengths.iter().map(&mut cell).collect::<Result<_, BenchError>>()?;
        Ok(Self { warm_up, profile, cells })
    }
}

/// The arms of a round, in turn: ABC CBA, BCA ACB, CAB BAC. What drifts slowly touches all alike, and no arm has a place of its own,
/// such as the middle, where it would always follow the same arm.
pub(crate) fn turns(round: usize, num_arms: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..num_arms).collect();
    order.rotate_left(round / 2 % num_arms);
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// One subject while it is measured.
struct UnderWay<'a> {
    setup: &'a Setup,
    subject: &'a Subject,
    prompts: &'a Prompts,
    /// When the whole run began.
    started: Instant,
    arms: Vec<ArmRecord>,
    /// By length, then by arm.
    cells: Vec<Vec<CellArm>>,
    /// Pieces of the first answer to each prompt: by arm, length, and repeat, each of which asks two at most.
    texts: Texts,
}

/// Pieces of answers: by arm, length and prompt.
pub(crate) type Texts = Vec<Vec<Vec<Vec<String>>>>;

impl<'a> UnderWay<'a> {
    fn new(setup: &'a Setup, subject: &'a Subject, prompts: &'a Prompts, started: Instant) -> Self {
        let arm = |arm: &Arm| ArmRecord {
            arm: arm.clone(),
            devices: Vec::new(),
            load_s: Vec::new(),
            peak_memory_bytes: None,
            engine_memory_bytes: None,
            profile: None,
            step: None,
            warning: None,
        };
        let cell = |arm: &Arm| CellArm::new(arm.name);
        Self {
            setup,
            subject,
            prompts,
            started,
            arms: setup.arms.iter().map(arm).collect(),
            cells: setup.lengths.iter().map(|_| setup.arms.iter().map(cell).collect()).collect(),
            texts: vec![vec![vec![Vec::new(); 2 * setup.settings.repeats]; setup.lengths.len()]; setup.arms.len()],
        }
    }

    fn measure(
        &mut self,
        stop: &AtomicBool,
        progress: &mut Progress,
        tell: &mut dyn FnMut(&Progress),
    ) -> Result<(), BenchError> {
        let settings = &self.setup.settings;
        for round in 0..settings.max_rounds {
            if round >= settings.rounds && self.is_precise() {
                break;
            }
            for (place, arm) in turns(round, self.setup.arms.len()).into_iter().enumerate() {
                progress.what = format!(
                    "{}{}, round {}, arm {}",
                    self.subject.facts.name,
                    if self.subject.drafter { " with drafter" } else { "" },
                    round + 1,
                    self.setup.arms[arm].name.letter()
                );
                tell(progress);
                // A signal goes to the server as well, which then fails first.
                self.process(round, place, arm, stop).map_err(|error| match stop.load(Ordering::Relaxed) {
                    true => BenchError::Interrupted,
                    false => error,
                })?;
                progress.done += 1;
            }
        }
        "a timeline of one step".clone_into(&mut progress.what);
        tell(progress);
        for arm in &mut self.arms {
            if stop.load(Ordering::Relaxed) {
                return Err(BenchError::Interrupted);
            }
            arm.step = timeline(&self.setup.program, &self.subject.facts, &arm.arm, self.setup.settings.geometry)?;
        }
        Ok(())
    }

    /// One process: load, a discarded request, all lengths.
    fn process(&mut self, round: usize, place: usize, arm: usize, stop: &AtomicBool) -> Result<(), BenchError> {
        let settings = &self.setup.settings;
        let mut args = [self.subject.facts.args.clone(), self.setup.arms[arm].args.clone()].concat();
        if settings.regime == Regime::Lab {
            args.push("--no-cache".to_owned());
        }
        if self.subject.drafter {
            args.extend(["--drafter", "on"].map(str::to_owned));
        }
        let launch = Launch {
            program: self.setup.program.clone(),
            args,
            with_cache_dir: settings.regime == Regime::Service,
            patience: LOAD_PATIENCE,
        };
        let server = Server::start(&launch, stop)?;
        self.in_process(round, place, arm, &server, stop).map_err(|error| server.blame(error))
    }

    fn in_process(
        &mut self,
        round: usize,
        place: usize,
        arm: usize,
        server: &Server,
        stop: &AtomicBool,
    ) -> Result<(), BenchError> {
        let warm_up = Ask { prompt: &self.prompts.warm_up, generate: 4 };
        let answer = server.client.complete(&warm_up)?;
        if round == 0 && place == 0 {
            self.check_consent(server.load_s, &answer)?;
        }
        for cell in 0..self.setup.lengths.len() {
            self.length(round, place, arm, cell, server, stop)?;
        }
        let profile = if round == 0 { Some(self.profile(server)?) } else { None };
        let status = server.client.get("/troika/status")?;
        // The first of the engines' list is the primary device again.
        let engines = status["hybrid"]["devices"].as_array().into_iter().flatten().skip(1);
        let devices = status["devices"].as_array().into_iter().flatten().chain(engines);
        let record = &mut self.arms[arm];
        record.profile = profile.or(record.profile.take());
        record.devices = devices.map(|device| device.as_str().unwrap_or_default().to_owned()).collect();
        record.load_s.push(server.load_s);
        let held = status["hybrid"]["bytes"].as_object();
        record.engine_memory_bytes = held.map(|held| held.values().filter_map(Value::as_u64).sum());
        record.peak_memory_bytes = record.peak_memory_bytes.max(server.peak_memory_bytes());
        record.warning = server.warning().or(record.warning.take());
        Ok(())
    }

    /// Reckons from the first answer how long it will take at least: rounds and arms, each with its load and its prompts.
    fn check_consent(&self, load_s: f64, warm_up: &Answer) -> Result<(), BenchError> {
        let Some(most) = self.setup.max_estimate_s else { return Ok(()) };
        let settings = &self.setup.settings;
        let (token_s, next_s) =
            (engine_times(warm_up)?.prefill_s / self.prompts.warm_up.len() as f64, warm_up.tpot_s().unwrap_or(0.0));
        let answer = settings.generate as f64 * next_s;
        let cell = |length: &Length| {
            let asked = length.tokens as f64 * token_s;
            let once = settings.repeats as f64 * asked;
            (settings.min_sample_ms as f64 / 1e3 / once).max(1.0).ceil() * settings.repeats as f64 * (asked + answer)
        };
        let process = load_s + warm_up.total_s + self.setup.lengths.iter().map(cell).sum::<f64>();
        let seconds = process * (settings.rounds * self.setup.arms.len()) as f64 + self.started.elapsed().as_secs_f64();
        if seconds > most { Err(BenchError::NeedsConsent { minutes: (seconds / 60.0).ceil() as u64 }) } else { Ok(()) }
    }

    /// All prompts of one length; their medians are one sample.
    fn length(
        &mut self,
        round: usize,
        place: usize,
        arm: usize,
        cell: usize,
        server: &Server,
        stop: &AtomicBool,
    ) -> Result<(), BenchError> {
        let factor = match self.setup.arms[arm].name {
            ArmName::C => self.setup.settings.feature.time_factor(),
            _ => 1.0,
        };
        let pids = [server.pid(), std::process::id()];
        let before = CpuTime::now(&pids);
        let (mut samples, mut computing_s) = (Vec::new(), 0.0);
        loop {
            for (repeat, prompts) in self.prompts.cells[cell].iter().enumerate() {
                let measured = self.repeat(server, prompts)?;
                // A signal goes to the server as well, which may not live to say what it did.
                if stop.load(Ordering::Relaxed) {
                    return Err(BenchError::Interrupted);
                }
                self.witness(arm, cell, server, &measured.answers);
                for (which, answer) in measured.answers.iter().enumerate() {
                    self.compare_with_first(arm, cell, 2 * repeat + which, answer);
                }
                computing_s += measured.computing_s;
                samples.push(measured.sample(round, place, factor));
            }
            // The same prompts again are as good as others where nothing is kept.
            let settings = &self.setup.settings;
            if settings.regime == Regime::Service || 1e3 * computing_s >= settings.min_sample_ms as f64 {
                break;
            }
        }
        let mut sample = middle(&samples);
        sample.others_cpu_share =
            CpuTime::now(&pids).zip(before).and_then(|(after, before)| after.others_since(&before));
        self.cells[cell][arm].samples.push(sample);
        Ok(())
    }

    fn repeat(&self, server: &Server, repeat: &Repeat) -> Result<Measured, BenchError> {
        let ask = |prompt| Ask { prompt, generate: self.setup.settings.generate };
        let Some([earlier, later]) = &repeat.shared else {
            let answer = server.client.complete(&ask(&repeat.prompt))?;
            let EngineTimes { queue_s, prefill_s } = engine_times(&answer)?;
            return Ok(Measured { computing_s: prefill_s, queue_s, answers: vec![answer] });
        };
        server.client.complete(&Ask { generate: 1, ..ask(earlier) })?;
        let both: Result<Vec<Answer>, BenchError> = std::thread::scope(|scope| {
            let asked = [&repeat.prompt, later].map(|prompt| scope.spawn(move || server.client.complete(&ask(prompt))));
            asked.into_iter().map(|thread| thread.join().expect("a request does not panic")).collect()
        });
        let answers = both?;
        let times = answers.iter().map(engine_times).collect::<Result<Vec<_>, _>>()?;
        let (queue_s, computing_s) = together(&times);
        Ok(Measured { computing_s, queue_s, answers })
    }

    /// Device time of one long prompt, by operation.
    fn profile(&self, server: &Server) -> Result<Profile, BenchError> {
        let prompt = &self.prompts.profile;
        let before = server.client.node_seconds()?;
        server.client.complete(&Ask { prompt, generate: 1 })?;
        let after = server.client.node_seconds()?;
        let entries = after.into_iter().map(|((device, kind), seconds)| {
            let spent = seconds - before.get(&(device.clone(), kind.clone())).copied().unwrap_or(0.0);
            ProfileEntry { device, kind, ms: spent * 1e3 }
        });
        let entries = entries.filter(|entry| entry.ms > 0.0).collect();
        Ok(Profile { prompt_tokens: prompt.len(), entries })
    }

    /// Notes what the server says ran where.
    fn witness(&mut self, arm: usize, cell: usize, server: &Server, answers: &[Answer]) {
        let settings = &self.setup.settings;
        let tile = settings.geometry.tile;
        let CellArm { evidence, drafts, .. } = &mut self.cells[cell][arm];
        let evidence = evidence.get_or_insert_default();
        for answer in answers {
            let rows = answer.usage.prompt_tokens - answer.usage.cached_tokens;
            let Some(mut record) = request_record(server, &answer.id) else {
                evidence.missing += 1;
                continue;
            };
            if let Some(of_request) = Drafts::of_request(&record) {
                drafts.get_or_insert_default().add(&of_request);
            }
            if let Some(plan) = settings.feature.made_up_plan(rows, tile) {
                record["plan"] = plan;
            }
            let (tokens, cached) = (answer.usage.prompt_tokens, answer.usage.cached_tokens);
            evidence.add(&Evidence::of_request(&record, tokens, cached, tile));
        }
    }

    /// The same arm must say the same in every round.
    fn compare_with_first(&mut self, arm: usize, cell: usize, prompt: usize, answer: &Answer) {
        let pieces: Vec<String> = answer.pieces.iter().map(|(_, text)| text.clone()).collect();
        let first = &mut self.texts[arm][cell][prompt];
        if first.is_empty() {
            *first = pieces;
        } else {
            self.cells[cell][arm].unstable |= *first != pieces;
        }
    }

    /// Every comparison is as sure as wanted.
    fn is_precise(&self) -> bool {
        self.cells.iter().all(|arms| {
            arms.windows(2).all(|pair| {
                Difference::of_rounds(&pair[1].prefill_rates(), &pair[0].prefill_rates())
                    .is_none_or(|difference| difference.is_precise())
            })
        })
    }

    fn into_experiment(mut self) -> Experiment {
        let cells = std::mem::take(&mut self.cells);
        let cells = cells.into_iter().enumerate().map(|(idx, arms)| self.cell(idx, arms)).collect();
        Experiment {
            model: self.subject.facts.clone(),
            drafter: self.subject.drafter,
            unavailable: self.subject.unavailable.clone(),
            arms: self.arms,
            cells,
        }
    }

    fn cell(&self, idx: usize, mut arms: Vec<CellArm>) -> Cell {
        let of =
            |arm: &CellArm, value: fn(&Sample) -> f64| interval(&arm.samples.iter().map(value).collect::<Vec<_>>());
        for arm in &mut arms {
            arm.prefill_tps = of(arm, |sample| sample.prefill_tps);
            arm.ttft_ms = of(arm, |sample| sample.ttft_ms);
            let decode: Vec<f64> =
                arm.samples.iter().map(|sample| sample.decode_tps).filter(|tps| *tps > 0.0).collect();
            arm.decode_tps = interval(&decode);
        }
        let rates = |name| arms.iter().find(|arm| arm.arm == name).map(CellArm::prefill_rates);
        let gain = |arm, base| Difference::of_rounds(&rates(arm)?, &rates(base)?);
        let check = |arm, against| self.check_tokens(idx, arm, against);
        let tokens: Vec<TokenCheck> =
            [check(ArmName::B, ArmName::A), check(ArmName::C, ArmName::B), check(ArmName::P, ArmName::B)]
                .into_iter()
                .flatten()
                .collect();
        let void = void(&arms, &tokens);
        let engaged = arms.iter().find(|arm| arm.arm == ArmName::C).filter(|arm| !arm.samples.is_empty());
        // A slow-down for a self-test claims nothing.
        let claims = !matches!(self.setup.settings.feature, Feature::Slower { .. });
        Cell {
            length: self.setup.lengths[idx],
            ids_sha256: ids_digest(self.prompts.cells[idx].iter().flat_map(|repeat| {
                [&repeat.prompt].into_iter().chain(repeat.shared.iter().flatten()).map(Vec::as_slice)
            })),
            geometry_gain: gain(ArmName::B, ArmName::A),
            feature_gain: gain(ArmName::C, ArmName::B),
            total_gain: gain(ArmName::C, ArmName::A),
            against_every_core: gain(ArmName::C, ArmName::P),
            void,
            engagement: engaged.filter(|_| claims).map(|arm| arm.evidence.clone().unwrap_or_default().engagement()),
            tokens,
            arms,
        }
    }

    fn check_tokens(&self, cell: usize, arm: ArmName, against: ArmName) -> Option<TokenCheck> {
        let place = |name| self.setup.arms.iter().position(|arm| arm.name == name);
        let pairs = self.texts[place(arm)?][cell].iter().zip(&self.texts[place(against)?][cell]);
        check_texts(arm, against, pairs.map(|(own, other)| (own.as_slice(), other.as_slice())))
    }
}

/// Why a cell proves nothing: arms of the same arithmetic must give the same tokens, every time. Engines of arm C may have another.
fn void(arms: &[CellArm], tokens: &[TokenCheck]) -> Option<String> {
    let differing = tokens.iter().find(|check| check.arm != ArmName::C && check.equal < check.prompts);
    let differing = differing
        .map(|check| format!("arms {} and {} gave different tokens", check.against.letter(), check.arm.letter()));
    let unstable = arms.iter().find(|arm| arm.arm != ArmName::C && arm.unstable);
    differing.or(unstable.map(|arm| format!("arm {} gave other tokens in a later round", arm.arm.letter())))
}

/// Of requests that were sent at once: how long neither was computed, and from then until all have their first token.
fn together(times: &[EngineTimes]) -> (f64, f64) {
    let queue_s = times.iter().map(|times| times.queue_s).fold(f64::INFINITY, f64::min);
    let end_s = times.iter().map(|times| times.queue_s + times.prefill_s).fold(0.0, f64::max);
    (queue_s, end_s - queue_s)
}

/// Tokens per second while all answers are under way; what came before or after is not counted. `None` if there is no such time.
fn decoded_together(answers: &[Answer]) -> Option<f64> {
    let begin = answers.iter().map(Answer::ttft_s).collect::<Option<Vec<_>>>()?.into_iter().fold(0.0, f64::max);
    let end = answers.iter().map(|answer| answer.total_s).fold(f64::INFINITY, f64::min);
    let tokens = answers.iter().map(|answer| {
        let within = answer.pieces.iter().filter(|(at, _)| *at > begin && *at <= end).count();
        // A piece may be several tokens.
        within as f64 * answer.usage.completion_tokens as f64 / answer.pieces.len().max(1) as f64
    });
    let tokens: f64 = tokens.sum();
    (end > begin && tokens >= MIN_TOGETHER).then(|| tokens / (end - begin))
}

pub(crate) fn check_texts<'a>(
    arm: ArmName,
    against: ArmName,
    pairs: impl Iterator<Item = (&'a [String], &'a [String])>,
) -> Option<TokenCheck> {
    let mut check = TokenCheck { arm, against, prompts: 0, equal: 0, first_divergence: None, agreement: 1.0 };
    let (mut before, mut all) = (0, 0);
    for (own, other) in pairs.filter(|(own, other)| !own.is_empty() && !other.is_empty()) {
        let alike = own.iter().zip(other).take_while(|(own, other)| own == other).count();
        check.prompts += 1;
        if own == other {
            check.equal += 1;
        } else {
            check.first_divergence = Some(check.first_divergence.map_or(alike, |first| first.min(alike)));
        }
        before += alike;
        all += own.len().max(other.len());
    }
    check.agreement = before as f64 / all.max(1) as f64;
    (check.prompts > 0).then_some(check)
}

/// One repeat.
struct Measured {
    /// Time in which the prompt, or both of them, were computed.
    computing_s: f64,
    queue_s: f64,
    answers: Vec<Answer>,
}

impl Measured {
    fn sample(&self, round: usize, place: usize, factor: f64) -> Sample {
        let sum = |count: fn(&Answer) -> usize| self.answers.iter().map(count).sum::<usize>();
        let (prompt_tokens, cached_tokens) = (sum(|a| a.usage.prompt_tokens), sum(|a| a.usage.cached_tokens));
        let ttft_ms = 1e3 * factor * self.answers.iter().filter_map(Answer::ttft_s).fold(0.0, f64::max);
        let prefill_ms = 1e3 * factor * self.computing_s;
        let queue_ms = 1e3 * self.queue_s;
        let tpots: Vec<f64> = self.answers.iter().filter_map(Answer::tpot_s).collect();
        let tpot_s = factor * median(&tpots).unwrap_or(0.0);
        let decode_tps = match self.answers.as_slice() {
            [_] if tpot_s > 0.0 => 1.0 / tpot_s,
            [_] => 0.0,
            several => decoded_together(several).unwrap_or(0.0) / factor,
        };
        let longest_gap = self.answers.iter().flat_map(Answer::gaps_s).fold(0.0, f64::max);
        Sample {
            round,
            place,
            prefill_tps: (prompt_tokens - cached_tokens) as f64 / (prefill_ms / 1e3),
            effective_prompt_tps: (cached_tokens > 0).then(|| prompt_tokens as f64 / (prefill_ms / 1e3)),
            prompt_tokens,
            cached_tokens,
            prefill_ms,
            queue_ms,
            ttft_ms,
            other_ms: (ttft_ms - prefill_ms - queue_ms).max(0.0),
            decode_tps,
            tpot_ms: 1e3 * tpot_s,
            answer_ms: 1e3 * factor * self.answers.iter().map(|a| a.total_s).fold(0.0, f64::max) - ttft_ms,
            longest_gap_ms: 1e3 * longest_gap,
            others_cpu_share: None,
        }
    }
}

/// Each number's median over the repeats.
fn middle(samples: &[Sample]) -> Sample {
    let of = |value: fn(&Sample) -> f64| {
        median(&samples.iter().map(value).collect::<Vec<_>>()).expect("there is a repeat at least")
    };
    Sample {
        prefill_tps: of(|s| s.prefill_tps),
        effective_prompt_tps: median(&samples.iter().filter_map(|s| s.effective_prompt_tps).collect::<Vec<_>>()),
        prefill_ms: of(|s| s.prefill_ms),
        queue_ms: of(|s| s.queue_ms),
        ttft_ms: of(|s| s.ttft_ms),
        other_ms: of(|s| s.other_ms),
        decode_tps: of(|s| s.decode_tps),
        tpot_ms: of(|s| s.tpot_ms),
        answer_ms: of(|s| s.answer_ms),
        longest_gap_ms: samples.iter().map(|s| s.longest_gap_ms).fold(0.0, f64::max),
        ..samples[0].clone()
    }
}

/// The server's own clock of one request, as it comes with the usage.
pub(crate) struct EngineTimes {
    queue_s: f64,
    /// From the start of the first step to the first token.
    pub(crate) prefill_s: f64,
}

pub(crate) fn engine_times(answer: &Answer) -> Result<EngineTimes, BenchError> {
    let seconds = |name: &str| Some(answer.usage.all["troika"][name].as_f64()? / 1e3);
    match (seconds("queue_ms"), seconds("prefill_ms")) {
        (Some(queue_s), Some(prefill_s)) if prefill_s > 0.0 => Ok(EngineTimes { queue_s, prefill_s }),
        _ => {
            let why = format!("the usage of {} has no times of the engine: {}", answer.id, answer.usage.all);
            Err(BenchError::Http { path: "/v1/completions".to_owned(), why })
        }
    }
}

/// One step of an arm, node by node, from `bench in-process` with the same flags. Not part of any rate.
fn timeline(
    program: &Path,
    model: &ModelFacts,
    arm: &Arm,
    geometry: Geometry,
) -> Result<Option<StepTimeline>, BenchError> {
    let width = if arm.name == ArmName::A { geometry.stock_step } else { geometry.plan_step };
    let mut command = Command::new(program);
    command.args(["bench", "in-process"]).args(&model.args).args(&arm.args);
    command.args(["--rounds", "1", "--generate", "2", "--timeline", "--json", "-", "--prompt-lengths"]);
    // Two steps: the first of a sequence has nothing to attend to.
    let output = output(command.arg((2 * width).to_string()))
        .map_err(|source| BenchError::Start { program: program.to_owned(), source })?;
    if !output.status.success() {
        let (args, log) = (arm.args.join(" "), String::from_utf8_lossy(&output.stderr).into_owned());
        let why = format!("could not show a timeline: {}", output.status);
        return Err(BenchError::Server { args, why, log });
    }
    let report: Value = serde_json::from_slice(&output.stdout).map_err(|e| BenchError::Record(e.to_string()))?;
    serde_json::from_value(report["step"].clone()).map_err(|e| BenchError::Record(e.to_string()))
}

/// What the server says of how a request was served; `None` if it keeps no such record.
pub(crate) fn request_record(server: &Server, id: &str) -> Option<Value> {
    let asked = Instant::now();
    loop {
        let record = server.client.get(&format!("/troika/requests/{id}")).ok()?;
        // The engine lets go of a request a moment after its last token.
        if record["state"] != "running" || asked.elapsed() > RECORD_PATIENCE {
            return Some(record);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_compared_up_to_the_first_difference() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let (a, b) = ([words("a b c d"), words("e f g h")], [words("a b c d"), words("e x g h")]);
        let pairs = a.iter().zip(&b).map(|(a, b)| (a.as_slice(), b.as_slice()));
        let check = check_texts(ArmName::C, ArmName::B, pairs).expect("two prompts");
        assert_eq!((check.prompts, check.equal, check.first_divergence), (2, 1, Some(1)));
        assert!((check.agreement - 5.0 / 8.0).abs() < 1e-12);
        assert_eq!(check_texts(ArmName::C, ArmName::B, std::iter::empty()), None);
    }

    #[test]
    fn every_arm_has_every_place_and_every_neighbour() {
        let orders: Vec<String> =
            (0..6).map(|round| turns(round, 3).iter().map(|arm| "ABC".as_bytes()[*arm] as char).collect()).collect();
        assert_eq!(orders, ["ABC", "CBA", "BCA", "ACB", "CAB", "BAC"]);
        for num_arms in 2..=4 {
            let mut times = vec![vec![0; num_arms]; num_arms];
            for round in 0..2 * num_arms {
                turns(round, num_arms).into_iter().enumerate().for_each(|(place, arm)| times[place][arm] += 1);
            }
            assert_eq!(times, vec![vec![2; num_arms]; num_arms]);
        }
    }

    fn answer(first_s: f64, gap_s: f64, tokens: usize) -> Answer {
        let pieces: Vec<_> = (0..tokens).map(|idx| (first_s + gap_s * idx as f64, "x".to_owned())).collect();
        let usage = crate::client::Usage { completion_tokens: tokens, ..Default::default() };
        Answer { id: "x".into(), total_s: pieces[tokens - 1].0, pieces, usage }
    }

    #[test]
    fn two_at_once_are_rated_while_both_are_under_way() {
        // The first waits 10 ms and is computed for 50, the second waits until then and takes 30 more.
        let times = [(0.010, 0.050), (0.060, 0.030)].map(|(queue_s, prefill_s)| EngineTimes { queue_s, prefill_s });
        let (queue_s, computing_s) = together(&times);
        assert!((queue_s - 0.010).abs() < 1e-12 && (computing_s - 0.080).abs() < 1e-12, "{queue_s} {computing_s}");
        // One answers from 1 to 5 s, the other from 3 to 7 s: both do for two seconds, with two and eight tokens in them.
        let both = [answer(1.0, 1.0, 5), answer(3.0, 0.25, 17)];
        assert_eq!(decoded_together(&both), Some(5.0));
        assert_eq!(decoded_together(&[answer(1.0, 1.0, 5), answer(3.0, 0.5, 9)]), None, "six are too few");
        assert_eq!(decoded_together(&[answer(1.0, 0.1, 5), answer(3.0, 1.0, 5)]), None);
        let measured = Measured { computing_s: 2.99, queue_s: 0.01, answers: both.to_vec() };
        assert!((measured.sample(0, 0, 1.0).decode_tps - 5.0).abs() < 1e-12);
    }

    #[test]
    fn a_cell_is_void_unless_arms_of_one_arithmetic_agree() {
        let arm = |arm, unstable| CellArm { unstable, ..CellArm::new(arm) };
        let check = |arm, equal| TokenCheck {
            arm,
            against: ArmName::B,
            prompts: 3,
            equal,
            first_divergence: None,
            agreement: 0.5,
        };
        assert_eq!(void(&[arm(ArmName::A, false), arm(ArmName::C, true)], &[check(ArmName::C, 1)]), None);
        let unstable = void(&[arm(ArmName::A, false), arm(ArmName::B, true)], &[check(ArmName::B, 3)]);
        assert_eq!(unstable.as_deref(), Some("arm B gave other tokens in a later round"));
        let differing = void(&[arm(ArmName::B, true)], &[check(ArmName::C, 0), check(ArmName::P, 2)]);
        assert_eq!(differing.as_deref(), Some("arms B and P gave different tokens"));
    }

    #[test]
    fn kept_tokens_are_in_no_rate() {
        let usage =
            crate::client::Usage { prompt_tokens: 100, cached_tokens: 40, completion_tokens: 3, ..Default::default() };
        let pieces = [(0.30, "a"), (0.35, "b"), (0.40, "c")].map(|(at, text)| (at, text.to_owned())).to_vec();
        let answer = Answer { id: "x".into(), pieces, total_s: 0.4, usage };
        let measured = Measured { computing_s: 0.2, queue_s: 0.05, answers: vec![answer] };
        let sample = measured.sample(1, 2, 1.0);
        assert!((sample.prefill_tps - 300.0).abs() < 1e-6, "{sample:?}");
        assert!(sample.effective_prompt_tps.is_some_and(|tps| (tps - 500.0).abs() < 1e-6), "{sample:?}");
        assert!((sample.other_ms - 50.0).abs() < 1e-6 && (sample.decode_tps - 20.0).abs() < 1e-6, "{sample:?}");
        let slower = measured.sample(1, 2, 1.0 / 0.95);
        assert!((slower.prefill_tps - 285.0).abs() < 1e-6, "{slower:?}");
    }
}
