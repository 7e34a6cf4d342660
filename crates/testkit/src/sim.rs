//! A scripted world around the engine's core: requests, cancels, listeners without room, failing steps, tiny budgets, all on
//! one virtual clock and from one seed. What must hold: luck may change when a token arrives, never which token it is.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use troika_base::RequestId;
use troika_engine::api::{Delivery, EngineStatus, Event, EventSink, FinishReason, GenerateRequest, Sampling};
use troika_engine::{Core, EngineOptions, Submission};

use crate::hash_model::{Bug, HashModel, Kinds, VOCAB_SIZE, mix};

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
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Tokens that were heard.
    pub tokens: u64,
    /// Rows that were computed.
    pub rows: u64,
    /// Prompt tokens that were not.
    pub cached_tokens: u64,
    /// Sequences that gave their state back.
    pub preemptions: u64,
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
    let kinds = [Kinds::Window, Kinds::Index, Kinds::Compressed, Kinds::All][dice.roll(4) as usize];
    let mut model = HashModel::new(kinds, bug);
    model.fails_in = dice.one_in(4).then(|| dice.roll(60) as u32);
    let shape = kinds.shape();
    // Room for a few short sequences with a little left for them to grow, or for all.
    let (few, block) = (1 + dice.roll(4), shape.bytes_per_block());
    let tight = few * (shape.fixed_bytes() + 2 * block) + dice.roll(4) * block;
    let one = shape.fixed_bytes() + 9 * block;
    let options = EngineOptions {
        chunk_tokens: [16, 64, 100, 128, 256, 512][dice.roll(6) as usize],
        max_running: 1 + dice.roll(6) as usize,
        max_queued: 16,
        max_context_tokens: 900,
        max_itl: Duration::from_millis(1 + dice.roll(20)),
        memory_bytes: if dice.one_in(2) { tight } else { u64::MAX },
        cache_bytes: [0, one, 3 * one, 1 << 40][dice.roll(4) as usize],
        snapshot_spacing: [128, 256, 2048][dice.roll(3) as usize],
    };
    let status = Arc::new(Mutex::new(EngineStatus::default()));
    let mut core = Core::new(model, &options, Arc::clone(&status));
    let mut world = World { clients: Vec::new(), script: Vec::new() };
    world.write_script(&mut dice);
    world.run(&mut core, seed)?;
    let report = world.check(kinds)?;
    let status = lock(&status).clone();
    if status.running + status.queued > 0 || core.runner().num_sequences() > 0 || status.state_bytes_reserved > 0 {
        return Err(format!("something is left behind: {status:?}, {} sequences", core.runner().num_sequences()));
    }
    let rows = core.runner().num_rows;
    Ok(Report { rows, preemptions: status.preemptions_total, cached_tokens: status.cached_tokens_total, ..report })
}

enum Act {
    Submit(usize),
    Cancel(usize),
}

struct World {
    clients: Vec<Client>,
    /// When, what; in order of time.
    script: Vec<(u64, Act)>,
}

impl World {
    fn write_script(&mut self, dice: &mut Dice) {
        let stems: Vec<Vec<u32>> = (0..2).map(|_| random_tokens(dice, 400)).collect();
        // In some worlds everybody asks little and hears much, so that sequences outgrow the memory together.
        let chatty = dice.one_in(3);
        let mut now = 0;
        for client in 0..2 + dice.roll(6) as usize {
            // Prompts share a stem up to some point, or repeat one that was there before.
            let mut prompt = match self.clients.len() {
                before @ 1.. if dice.one_in(3) => {
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
            now += if dice.one_in(2) { 0 } else { dice.roll(40_000) };
            self.script.push((now, Act::Submit(client)));
            if dice.one_in(5) {
                self.script.push((now + dice.roll(60_000), Act::Cancel(client)));
            }
        }
        self.script.sort_by_key(|(at, _)| *at);
    }

    fn run(&self, core: &mut Core<HashModel>, seed: u64) -> Result<(), String> {
        let mut script = self.script.iter().peekable();
        for _ in 0..200_000 {
            let now = core.runner().now_us;
            while let Some((_, act)) = script.next_if(|(at, _)| *at <= now) {
                match act {
                    Act::Submit(client) => core.submit(self.submission(*client, seed, now), now),
                    Act::Cancel(client) => core.cancel(id_of(*client), now),
                }
            }
            core.turn(now);
            core.check_invariants();
            let next_act = script.peek().map(|(at, _)| *at);
            if core.is_idle() {
                match (next_act, core.is_empty()) {
                    (None, true) => return Ok(()),
                    (Some(at), true) => core.runner_mut().now_us = at,
                    // Listeners make room some time.
                    (_, false) => core.runner_mut().now_us = now + 2000,
                }
                continue;
            }
            let until = [next_act, core.next_due_us()].into_iter().flatten().min();
            core.wait(until.map(|at| Duration::from_micros(at.saturating_sub(now))), |runner| runner.now_us);
            core.check_invariants();
        }
        Err("it goes round in circles".to_owned())
    }

    fn submission(&self, client: usize, seed: u64, now_us: u64) -> Submission {
        let Client { prompt, max_new_tokens, heard, gone_after } = &self.clients[client];
        let request = GenerateRequest::new(prompt.clone(), *max_new_tokens, Sampling::GREEDY);
        let mut dice = Dice(mix(seed ^ client as u64));
        let full_one_in = if dice.one_in(3) { 2 + dice.roll(20) } else { 0 };
        let sink = Listener { heard: Arc::clone(heard), dice, full_one_in, gone_after: *gone_after };
        Submission { id: id_of(client), request, sink: Box::new(sink), submitted_us: now_us }
    }

    fn check(&self, kinds: Kinds) -> Result<Report, String> {
        let mut report = Report::default();
        for (index, client) in self.clients.iter().enumerate() {
            let heard = lock(&client.heard);
            let expected = HashModel::expected(kinds, &client.prompt, client.max_new_tokens);
            if !expected.starts_with(&heard.tokens) {
                let at = heard.tokens.iter().zip(&expected).position(|(a, b)| a != b);
                return Err(format!("{kinds:?}, request {index}: token {at:?} of {} differs", heard.tokens.len()));
            }
            let complete = heard.tokens.len() == expected.len();
            match &heard.end {
                Some(Event::Finished { reason: FinishReason::Length, .. }) if complete => {}
                Some(Event::Finished { reason: FinishReason::Cancelled, .. } | Event::Failed { .. }) => {}
                Some(Event::Finished { reason: FinishReason::ContextFull | FinishReason::MemoryFull, .. }) => {}
                None if client.gone_after.is_some() => {}
                end => return Err(format!("request {index} ended with {end:?} after {} tokens", heard.tokens.len())),
            }
            if heard.late > 0 {
                return Err(format!("request {index} heard something after its end"));
            }
            report.tokens += heard.tokens.len() as u64;
        }
        Ok(report)
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
