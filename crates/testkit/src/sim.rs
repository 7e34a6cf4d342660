//! A scripted world around the engine's core: requests, cancels, listeners without room, failing steps, tiny budgets, a slow
//! and failing disk, crashes and restarts with the same or other weights, all on one virtual clock and from one seed. What
//! must hold: luck may change when a token arrives, never which token it is.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use troika_base::RequestId;
use troika_engine::api::{Delivery, EngineStatus, Event, EventSink, FinishReason, GenerateRequest, Sampling};
use troika_engine::{Core, DiskTier, EngineOptions, Submission};
use troika_kvstore::{Hands, Store};

use crate::disk::{FakeDisk, Faults, Lie};
use crate::hash_model::{Bug, Drafter, HashModel, Kinds, VOCAB_SIZE};
use crate::mix;

const DIR: &str = "cache";

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = mix(self.0);
        self.0 % sides
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.roll(n) == 0
    }
}

/// What a request heard.
#[derive(Debug, Default)]
struct Heard {
    tokens: Vec<u32>,
    end: Option<Event>,
    /// Events after the end.
    late: usize,
    /// Of the model it was sent to; `None` before.
    weights: Option<u64>,
    /// The process ended before it did.
    cut_off: bool,
}

/// A listener that has no room now and then, and may go away.
struct Listener {
    heard: Arc<Mutex<Heard>>,
    dice: Dice,
    full_one_in: u64,
    gone_after: Option<usize>,
}

impl EventSink for Listener {
    fn offer(&mut self, event: &Event) -> Delivery {
        let mut heard = lock(&self.heard);
        if self.gone_after.is_some_and(|tokens| heard.tokens.len() >= tokens) {
            return Delivery::Gone;
        }
        if self.full_one_in > 0 && self.dice.one_in(self.full_one_in) {
            return Delivery::Full;
        }
        heard.late += usize::from(heard.end.is_some());
        match event {
            Event::Token { token, .. } => heard.tokens.push(*token),
            Event::Prefilled { .. } => {}
            Event::Finished { .. } | Event::Failed { .. } => heard.end = Some(event.clone()),
        }
        Delivery::Taken
    }
}

struct Client {
    prompt: Vec<u32>,
    max_new_tokens: usize,
    heard: Arc<Mutex<Heard>>,
    gone_after: Option<usize>,
}

/// What happened in a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Tokens that were heard.
    pub tokens: u64,
    /// Rows that were computed.
    pub rows: u64,
    /// Prompt tokens that were not.
    pub cached_tokens: u64,
    /// Sequences that gave their state back.
    pub preemptions: u64,
    /// Files that were read and sound.
    pub files_read: u64,
    /// Reads and writes that failed.
    pub failed_files: u64,
    /// Damaged files set aside.
    pub quarantined: u64,
    /// Prefixes computed since the disk was not asked, or did not answer.
    pub not_asked: u64,
    /// Ends of a process, in good order or not.
    pub restarts: u64,
    /// How often what was computed was said to be wrong.
    pub doubts: u64,
    /// Drafts that were verified.
    pub drafted: u64,
    /// Those of them that held.
    pub accepted: u64,
}

impl Report {
    /// Both together.
    pub fn add(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.rows += other.rows;
        self.cached_tokens += other.cached_tokens;
        self.preemptions += other.preemptions;
        self.files_read += other.files_read;
        self.failed_files += other.failed_files;
        self.quarantined += other.quarantined;
        self.not_asked += other.not_asked;
        self.restarts += other.restarts;
        self.doubts += other.doubts;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }
}

/// Lives one world. `Err` says what went wrong.
///
/// # Errors
///
/// If a token depended on luck, an event was lost, or something was left behind.
///
/// # Panics
///
/// If an invariant of the engine is broken.
pub fn live(seed: u64, bug: Option<Bug>) -> Result<Report, String> {
    let mut dice = Dice(mix(seed));
    let kinds = [Kinds::Window, Kinds::Index, Kinds::Compressed, Kinds::Boundary, Kinds::All][dice.roll(5) as usize];
    let fails_in = dice.one_in(4).then(|| dice.roll(60) as u32);
    let shape = kinds.shape();
    // Room for a few short sequences with a little left for them to grow, or for all.
    let (few, block) = (1 + dice.roll(4), shape.bytes_per_block());
    let tight = few * (shape.fixed_bytes() + 2 * block) + dice.roll(4) * block;
    let one = shape.fixed_bytes() + 9 * block;
    let has_disk = !dice.one_in(3);
    let options = EngineOptions {
        chunk_tokens: [16, 64, 100, 128, 256, 512][dice.roll(6) as usize],
        honour_chunk: false,
        wavefront: 1 + (seed % 3) as usize,
        max_running: 1 + dice.roll(6) as usize,
        max_queued: 16,
        max_context_tokens: 900,
        max_itl: Duration::from_millis(1 + dice.roll(20)),
        memory_bytes: if dice.one_in(2) { tight } else { u64::MAX },
        cache_bytes: if has_disk { [one, one, 2 * one, 1 << 40] } else { [0, one, 3 * one, 1 << 40] }
            [dice.roll(4) as usize],
        snapshot_spacing: [128, 256, 2048][dice.roll(3) as usize],
    };
    let disk = has_disk.then(|| {
        let limit_bytes = [3 * one + 4000, 10 * one + 20_000, 1 << 40][dice.roll(3) as usize];
        // Fast, slow, or so slow that nobody should wait for it.
        let slowest_us = [100, 1_000, 20_000, 60_000_000][dice.roll(4) as usize];
        SimDisk { disk: FakeDisk::new(dice.roll(u64::MAX)), limit_bytes, slowest_us, dice: Dice(mix(!seed)) }
    });
    // Half of the worlds have a drafter; some are nearly always right, others nearly never.
    let mut more_dice = Dice(mix(seed ^ 0xd4af));
    let drafter = more_dice.one_in(2).then(|| Drafter {
        block: 1 + more_dice.roll(6) as usize,
        wrong_one_in: [2, 4, 50][more_dice.roll(3) as usize],
        unsure_one_in: [2, 20][more_dice.roll(2) as usize],
    });
    let mut world = World { seed, kinds, bug, drafter, options, disk, clients: Vec::new(), script: Vec::new() };
    world.write_script(&mut dice);
    let doubted_in = more_dice.one_in(6).then(|| 1 + more_dice.roll(60) as u32);
    let mut report = world.run(fails_in, doubted_in)?;
    report.tokens = world.check()?;
    Ok(report)
}

enum Act {
    Submit(usize),
    Cancel(usize),
    /// From now on, the disk fails in this way.
    Fail(Faults),
    /// The directory is replaced by an empty one.
    Replace,
    /// The process ends, with everything written that waits, or in the middle of it; another starts, with these weights.
    Restart {
        in_good_order: bool,
        weights: u64,
    },
}

struct SimDisk {
    disk: Arc<FakeDisk>,
    limit_bytes: u64,
    slowest_us: u64,
    dice: Dice,
}

struct World {
    seed: u64,
    kinds: Kinds,
    bug: Option<Bug>,
    drafter: Option<Drafter>,
    options: EngineOptions,
    disk: Option<SimDisk>,
    clients: Vec<Client>,
    /// When, what; in order of time.
    script: Vec<(u64, Act)>,
}

/// One process: what runs, and the disk's work that is under way.
struct Process {
    core: Core<HashModel>,
    status: Arc<Mutex<EngineStatus>>,
    weights: u64,
    hands: Option<Hands>,
    write_due_us: Option<u64>,
    read_due_us: Option<u64>,
}

impl World {
    fn write_script(&mut self, dice: &mut Dice) {
        let stems: Vec<Vec<u32>> = (0..2).map(|_| random_tokens(dice, 400)).collect();
        // In some worlds everybody asks little and hears much, so that sequences outgrow the memory together.
        let chatty = dice.one_in(3);
        let mut now = 0;
        // A world with a disk lasts longer and repeats itself more, so that something is there when it is asked.
        let (most, alike, pause_us) = if self.disk.is_some() { (10, 5, 150_000) } else { (6, 2, 40_000) };
        for client in 0..2 + dice.roll(most) as usize {
            // Prompts share a stem up to some point, or repeat one that was there before.
            let mut prompt = match self.clients.len() {
                before @ 1.. if dice.roll(6) < alike => {
                    let other = &self.clients[dice.roll(before as u64) as usize].prompt;
                    let mut prompt = other.clone();
                    if dice.one_in(2) {
                        prompt.truncate(1 + dice.roll(other.len() as u64) as usize);
                    }
                    let more = dice.roll(120);
                    prompt.extend(random_tokens(dice, more));
                    prompt
                }
                _ => {
                    let stem = &stems[dice.roll(2) as usize];
                    let shared = dice.roll(400) as usize;
                    let own = 1 + dice.roll(150);
                    [stem[..shared].to_vec(), random_tokens(dice, own)].concat()
                }
            };
            prompt.truncate(if chatty { 100 } else { 500 });
            let longest = match chatty {
                true => 600,
                false if dice.one_in(3) => 200,
                false => 20,
            };
            let max_new_tokens = 1 + dice.roll(longest) as usize;
            let gone_after = dice.one_in(8).then(|| dice.roll(10) as usize);
            self.clients.push(Client { prompt, max_new_tokens, heard: Arc::default(), gone_after });
            // Bursts, and pauses in between.
            now += if dice.one_in(2) { 0 } else { dice.roll(pause_us) };
            self.script.push((now, Act::Submit(client)));
            if dice.one_in(5) {
                self.script.push((now + dice.roll(60_000), Act::Cancel(client)));
            }
            if self.disk.is_some() {
                self.write_misfortune(dice, now);
            }
        }
        self.script.sort_by_key(|(at, _)| *at);
    }

    fn write_misfortune(&mut self, dice: &mut Dice, now: u64) {
        let mut soon = || now + dice.roll(80_000);
        let (at, later) = (soon(), soon());
        if dice.one_in(4) {
            let weights = dice.roll(5) / 4;
            self.script.push((at, Act::Restart { in_good_order: dice.one_in(2), weights }));
        }
        if dice.one_in(8) {
            let mut often = || if dice.one_in(2) { 1 + dice.roll(6) } else { 0 };
            let (read_error_one_in, write_error_one_in, flip_one_in) = (often(), often(), often());
            let capacity_bytes = dice.one_in(4).then(|| dice.roll(60_000));
            let read_only = dice.one_in(6);
            let faults = Faults {
                read_error_one_in,
                write_error_one_in,
                flip_one_in,
                capacity_bytes,
                read_only,
                ..Faults::default()
            };
            self.script.push((at.min(later), Act::Fail(faults)));
            self.script.push((at.max(later), Act::Fail(Faults::default())));
        }
        if dice.one_in(40) {
            self.script.push((at, Act::Replace));
        }
    }

    fn lie(&self) -> Option<Lie> {
        match self.bug? {
            Bug::PayloadUnchecked => Some(Lie::Payload),
            Bug::NamesConfused => Some(Lie::OtherPayload),
            _ => None,
        }
    }

    /// Starts a process.
    fn start(&self, now_us: u64, weights: u64) -> Process {
        let mut model = HashModel::new(self.kinds, weights, self.bug, self.drafter);
        model.now_us = now_us;
        let status = Arc::new(Mutex::new(EngineStatus::default()));
        let mut core = Core::new(model, &self.options, Arc::clone(&status));
        let mut hands = None;
        if let Some(SimDisk { disk, limit_bytes, .. }) = &self.disk
            // As the server does, without the tier if it cannot be had.
            && let Ok((store, items, its_hands)) = Store::open_idle(disk.clone(), Path::new(DIR), *limit_bytes)
        {
            let digest = if self.bug == Some(Bug::WeightsNotNamed) { 0 } else { weights };
            let weights = digest.to_le_bytes().to_vec();
            core.set_disk(DiskTier { store, items, weights, tokenizer: Vec::new() }, || {});
            hands = Some(its_hands);
        }
        Process { core, status, weights, hands, write_due_us: None, read_due_us: None }
    }

    /// Lives until everything that was to happen has.
    fn run(&mut self, fails_in: Option<u32>, doubted_in: Option<u32>) -> Result<Report, String> {
        let mut report = Report::default();
        if let Some(SimDisk { disk, .. }) = &self.disk {
            disk.set_faults(Faults { lie: self.lie(), ..Faults::default() });
        }
        let mut process = self.start(0, 0);
        process.core.runner_mut().fails_in = fails_in;
        process.core.runner_mut().doubted_in = doubted_in;
        let script = std::mem::take(&mut self.script);
        let mut script = script.into_iter().peekable();
        for _ in 0..200_000 {
            let now = process.core.runner().now_us;
            while let Some((_, act)) = script.next_if(|(at, _)| *at <= now) {
                match act {
                    Act::Submit(client) => {
                        let submission = self.submission(client, process.weights, now);
                        process.core.submit(submission, now);
                    }
                    Act::Cancel(client) => process.core.cancel(id_of(client), now),
                    Act::Fail(faults) => {
                        let lie = self.lie();
                        self.disk.iter().for_each(|it| it.disk.set_faults(Faults { lie, ..faults.clone() }));
                    }
                    Act::Replace => self.disk.iter().for_each(|it| it.disk.replace_directory()),
                    Act::Restart { in_good_order, weights } => {
                        report.add(process.report());
                        self.end(process, in_good_order);
                        report.restarts += 1;
                        process = self.start(now, weights);
                    }
                }
            }
            process.core.turn(now);
            process.core.check_invariants();
            let disk_due = self.work_on_disk(&mut process, now);
            let next_act = script.peek().map(|(at, _)| *at);
            let core = &mut process.core;
            if core.is_idle() {
                let next = [next_act, disk_due].into_iter().flatten().min();
                match (next, core.is_empty()) {
                    (None, true) => {
                        // What was read last, and for nobody.
                        core.turn(now);
                        core.check_invariants();
                        process.leaves_nothing()?;
                        report.add(process.report());
                        return Ok(report);
                    }
                    (Some(at), true) => core.runner_mut().now_us = at.max(now),
                    // Listeners make room some time.
                    (next, false) => core.runner_mut().now_us = next.map_or(now + 2000, |at| at.clamp(now, now + 2000)),
                }
                continue;
            }
            let until = [next_act, core.next_due_us(), disk_due].into_iter().flatten().min();
            core.wait(until.map(|at| Duration::from_micros(at.saturating_sub(now))), |runner| runner.now_us);
            core.check_invariants();
        }
        Err("it goes round in circles".to_owned())
    }

    /// Does what the disk has done by now; says when it will have done more.
    fn work_on_disk(&mut self, process: &mut Process, now_us: u64) -> Option<u64> {
        let (hands, disk) = (process.hands.as_ref()?, self.disk.as_mut()?);
        let mut due = |due_us: &mut Option<u64>, has_work: bool, work: &dyn Fn()| {
            if due_us.is_some_and(|at| at <= now_us) {
                *due_us = None;
                work();
            } else if has_work && due_us.is_none() {
                *due_us = Some(now_us + 1 + disk.dice.roll(disk.slowest_us));
            }
        };
        due(&mut process.write_due_us, hands.has_writes(), &|| hands.write_one());
        due(&mut process.read_due_us, hands.has_reads(), &|| hands.read_one());
        // Whatever was done may have left more to do, which begins now.
        let again = |due_us: Option<u64>, has_work: bool| due_us.or(has_work.then_some(now_us));
        let (write, read) =
            (again(process.write_due_us, hands.has_writes()), again(process.read_due_us, hands.has_reads()));
        [write, read].into_iter().flatten().min()
    }

    /// Ends a process, and cuts off who listens to it.
    fn end(&self, process: Process, in_good_order: bool) {
        if let Some(hands) = &process.hands {
            while in_good_order && hands.has_writes() {
                hands.write_one();
            }
        }
        if let Some(SimDisk { disk, .. }) = self.disk.as_ref().filter(|_| !in_good_order) {
            disk.crash();
        }
        drop(process);
        for client in &self.clients {
            let mut heard = lock(&client.heard);
            heard.cut_off |= heard.weights.is_some() && heard.end.is_none();
        }
    }

    fn submission(&self, client: usize, weights: u64, now_us: u64) -> Submission {
        let Client { prompt, max_new_tokens, heard, gone_after } = &self.clients[client];
        lock(heard).weights = Some(weights);
        let request = GenerateRequest::new(prompt.clone(), *max_new_tokens, Sampling::GREEDY);
        let mut dice = Dice(mix(self.seed ^ client as u64));
        let full_one_in = if dice.one_in(3) { 2 + dice.roll(20) } else { 0 };
        let sink = Listener { heard: Arc::clone(heard), dice, full_one_in, gone_after: *gone_after };
        Submission { id: id_of(client), request, sink: Box::new(sink), submitted_us: now_us }
    }

    /// Tokens that were heard, all of them right.
    fn check(&self) -> Result<u64, String> {
        let (kinds, mut tokens) = (self.kinds, 0);
        for (index, client) in self.clients.iter().enumerate() {
            let heard = lock(&client.heard);
            let weights = heard.weights.ok_or_else(|| format!("request {index} was never sent"))?;
            let expected = HashModel::expected(kinds, weights, &client.prompt, client.max_new_tokens);
            if !expected.starts_with(&heard.tokens) {
                let at = heard.tokens.iter().zip(&expected).position(|(a, b)| a != b);
                return Err(format!("{kinds:?}, request {index}: token {at:?} of {} differs", heard.tokens.len()));
            }
            let complete = heard.tokens.len() == expected.len();
            match &heard.end {
                Some(Event::Finished { reason: FinishReason::Length, .. }) if complete => {}
                Some(Event::Finished { reason: FinishReason::Cancelled, .. } | Event::Failed { .. }) => {}
                Some(Event::Finished { reason: FinishReason::ContextFull | FinishReason::MemoryFull, .. }) => {}
                None if client.gone_after.is_some() || heard.cut_off => {}
                end => return Err(format!("request {index} ended with {end:?} after {} tokens", heard.tokens.len())),
            }
            if heard.late > 0 {
                return Err(format!("request {index} heard something after its end"));
            }
            tokens += heard.tokens.len() as u64;
        }
        Ok(tokens)
    }
}

impl Process {
    fn report(&self) -> Report {
        let status = lock(&self.status);
        let drafts = status.drafts.clone().unwrap_or_default();
        Report {
            tokens: 0,
            rows: self.core.runner().num_rows,
            cached_tokens: status.cached_tokens_total,
            preemptions: status.preemptions_total,
            files_read: status.cache.disk_read,
            failed_files: status.cache.disk_failed_reads + status.cache.disk_failed_writes,
            quarantined: status.cache.disk_quarantined,
            not_asked: status.cache.disk_not_asked,
            restarts: 0,
            doubts: self.core.runner().num_doubts,
            drafted: drafts.drafted,
            accepted: drafts.accepted,
        }
    }

    fn leaves_nothing(&self) -> Result<(), String> {
        let (status, sequences) = (lock(&self.status), self.core.runner().num_sequences());
        let left = status.running + status.queued + status.cache.disk_loading + sequences;
        if left > 0 || status.state_bytes_reserved > 0 {
            return Err(format!("something is left behind: {status:?}, {sequences} sequences"));
        }
        Ok(())
    }
}

fn random_tokens(dice: &mut Dice, count: u64) -> Vec<u32> {
    (0..count).map(|_| dice.roll(VOCAB_SIZE as u64) as u32).collect()
}

fn id_of(client: usize) -> RequestId {
    RequestId(client as u64 + 1)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
