//! Serving under load, as users meet it: requests that come when they come, more and more clients, agents that share a
//! prefix. Latencies by percentile, and how many requests met an objective.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::BenchError;
use crate::client::{Answer, Ask, Client};
use crate::corpus::Tokens;
use crate::host::{HostFacts, HostState};
use crate::record::{ModelFacts, Program};
use crate::report::table::align;
use crate::stats::quantile;

/// What `schema` says.
pub const SCHEMA: &str = "troika-bench-load";
/// Goes up when a member changes its meaning or goes away.
pub const VERSION: u32 = 1;

/// More requests than that are never on their way at once: each has a connection, and systems allow a thousand or so.
const MAX_IN_FLIGHT: usize = 512;
/// Reasons for failures that a level lists; further ones are counted together.
const MAX_REASONS: usize = 8;

/// How requests come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Traffic {
    /// At random moments, so many a second on average, whether or not earlier ones are done.
    Arrivals { per_second: f64 },
    /// So many clients, each of which asks again as soon as it has its answer.
    Clients { count: usize },
    /// So many agents at once: all start with the same long instructions, and each turn adds to what was said before.
    Agents { count: usize, instructions: usize, turns: usize },
}

impl Traffic {
    pub fn label(&self) -> String {
        match self {
            Self::Arrivals { per_second } => format!("{per_second} requests/s"),
            Self::Clients { count } => several(*count, "client"),
            Self::Agents { count, instructions, turns } => {
                let (agents, turns) = (several(*count, "agent"), several(*turns, "turn"));
                format!("{agents}, {instructions} shared tokens, {turns}")
            }
        }
    }
}

fn several(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// What a user would be content with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Objective {
    pub ttft_ms: f64,
    pub tpot_ms: f64,
}

/// Sizes of the requests of one level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// Requests of a level; agents have as many as they have turns.
    pub requests: usize,
    /// Lengths of prompts, drawn at random; of agents, what a turn adds.
    pub prompt_tokens: Vec<usize>,
    pub generate: usize,
    pub seed: u64,
    pub objective: Objective,
}

/// All levels of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadRecord {
    pub schema: String,
    pub version: u32,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub incomplete: Option<String>,
    pub program: Program,
    pub model: ModelFacts,
    pub devices: Vec<String>,
    pub host: HostFacts,
    pub host_start: HostState,
    pub host_end: HostState,
    pub shape: Shape,
    pub levels: Vec<Level>,
}

/// What one level of traffic came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Level {
    pub traffic: Traffic,
    pub completed: usize,
    /// Refused with a status, which an overloaded server should do.
    pub refused: BTreeMap<u16, usize>,
    /// Broken in any other way, and by reason.
    pub failed: usize,
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub failures: BTreeMap<String, usize>,
    /// From the first request to the last answer.
    pub seconds: f64,
    pub ttft_ms: Option<Percentiles>,
    /// Gaps between tokens.
    pub itl_ms: Option<Percentiles>,
    /// Mean time of a token after the first, request by request.
    pub tpot_ms: Option<Percentiles>,
    /// How much later than planned requests were sent: the benchmark's own fault, to be near zero.
    pub late_ms: Option<Percentiles>,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// Requests that met the objective, and how many of them a second.
    pub met: usize,
    pub goodput_per_second: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Percentiles {
    /// `None` of no values.
    pub fn of(values: &[f64]) -> Option<Self> {
        let at = |q| quantile(values, q);
        Some(Self { p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)?, max: at(1.0)? })
    }
}

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
struct Planned {
    /// When it is sent, seconds after the start; `None` = when its client is free.
    at: Option<f64>,
    prompt: Vec<u32>,
}

/// A generator of random numbers that are the same everywhere.
struct Random(ChaCha8Rng);

impl Random {
    /// Above 0, at most 1.
    fn uniform(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    fn pick(&mut self, values: &[usize]) -> usize {
        values[(self.0.next_u64() % values.len() as u64) as usize]
    }
}

impl Traffic {
    /// Tokens of the longest prompt that it has, and its answer.
    pub fn longest(&self, shape: &Shape) -> usize {
        let one = shape.prompt_tokens.iter().max().copied().unwrap_or(0);
        shape.generate
            + match self {
                Self::Arrivals { .. } | Self::Clients { .. } => one,
                Self::Agents { instructions, turns, .. } => instructions + turns * one,
            }
    }

    /// Whether the corpus has enough for it, before anything is started.
    ///
    /// # Errors
    ///
    /// If it is too short.
    pub fn check(&self, shape: &Shape, tokens: &Tokens) -> Result<(), BenchError> {
        plan(self, shape, tokens).map(drop)
    }
}

/// What each of the parallel clients of `traffic` sends; a client sends one thing after the other unless it has times.
fn plan(traffic: &Traffic, shape: &Shape, tokens: &Tokens) -> Result<Vec<Vec<Planned>>, BenchError> {
    let mut random = Random(ChaCha8Rng::seed_from_u64(shape.seed));
    let mut next_prompt = 0;
    let mut fresh = |len: usize| {
        next_prompt += 1;
        tokens.prompt(next_prompt, len).map(<[u32]>::to_vec)
    };
    match traffic {
        Traffic::Arrivals { per_second } => {
            let mut at = 0.0;
            (0..shape.requests)
                .map(|_| {
                    at -= random.uniform().ln() / per_second;
                    Ok(vec![Planned { at: Some(at), prompt: fresh(random.pick(&shape.prompt_tokens))? }])
                })
                .collect()
        }
        Traffic::Clients { count } => {
            let mut clients = vec![Vec::new(); *count];
            for idx in 0..shape.requests {
                let prompt = fresh(random.pick(&shape.prompt_tokens))?;
                clients[idx % count].push(Planned { at: None, prompt });
            }
            Ok(clients)
        }
        Traffic::Agents { count, instructions, turns } => {
            let shared = tokens.prompt(0, *instructions)?.to_vec();
            let agent = |_| {
                let mut prompt = shared.clone();
                let turn = |_| {
                    // What the agent said and what it was told since, as far as prompts go.
                    prompt.extend(fresh(random.pick(&shape.prompt_tokens))?);
                    Ok(Planned { at: None, prompt: prompt.clone() })
                };
                (0..*turns).map(turn).collect::<Result<Vec<_>, BenchError>>()
            };
            (0..*count).map(agent).collect()
        }
    }
}

/// How one request went.
enum Outcome {
    Done { answer: Box<Answer>, late_s: f64 },
    Refused(u16),
    Failed(String),
    Stopped,
}

/// Sends one level of traffic to a server that runs.
///
/// # Errors
///
/// If the corpus is too short, or `stop` becomes true.
pub fn level(
    client: &Client,
    traffic: &Traffic,
    shape: &Shape,
    tokens: &Tokens,
    stop: &AtomicBool,
) -> Result<Level, BenchError> {
    let clients = plan(traffic, shape, tokens)?;
    let (sender, outcomes) = channel();
    let start = Instant::now();
    let in_flight = &AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for requests in clients {
            // One that comes at a time of its own is not there before.
            if requests.first().is_some_and(|first| !wait_until(first.at, start, stop)) {
                break;
            }
            let sender = sender.clone();
            if in_flight.load(Ordering::Relaxed) == MAX_IN_FLIGHT {
                // To wait for one to end would be traffic that slows down with the server.
                let _ = sender.send(Outcome::Failed(format!("not sent: {MAX_IN_FLIGHT} are on their way")));
                continue;
            }
            in_flight.fetch_add(1, Ordering::Relaxed);
            scope.spawn(move || {
                for request in requests {
                    let outcome = send(client, &request, shape.generate, start, stop);
                    let stopped = matches!(outcome, Outcome::Stopped);
                    // The receiver outlives every client.
                    let _ = sender.send(outcome);
                    if stopped {
                        break;
                    }
                }
                in_flight.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    drop(sender);
    let seconds = start.elapsed().as_secs_f64();
    let outcomes: Vec<Outcome> = outcomes.iter().collect();
    if stop.load(Ordering::Relaxed) {
        return Err(BenchError::Interrupted);
    }
    Ok(summarize(traffic.clone(), shape.objective, seconds, &outcomes))
}

/// Until a request is to be sent; false if it must not be any more.
fn wait_until(at: Option<f64>, start: Instant, stop: &AtomicBool) -> bool {
    while !stop.load(Ordering::Relaxed) {
        let wait = at.map_or(0.0, |at| at - start.elapsed().as_secs_f64());
        if wait <= 0.0 {
            return true;
        }
        std::thread::sleep(Duration::from_secs_f64(wait.min(0.1)));
    }
    false
}

fn send(client: &Client, request: &Planned, generate: usize, start: Instant, stop: &AtomicBool) -> Outcome {
    if stop.load(Ordering::Relaxed) {
        return Outcome::Stopped;
    }
    let late_s = request.at.map_or(0.0, |at| (start.elapsed().as_secs_f64() - at).max(0.0));
    match client.complete(&Ask { prompt: &request.prompt, generate }) {
        Ok(answer) => Outcome::Done { answer: Box::new(answer), late_s },
        Err(BenchError::Refused { status, .. }) => Outcome::Refused(status),
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

fn summarize(traffic: Traffic, objective: Objective, seconds: f64, outcomes: &[Outcome]) -> Level {
    let (mut refused, mut failures, mut met) = (BTreeMap::new(), BTreeMap::new(), 0);
    let (mut ttft, mut itl, mut tpot, mut late) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let [mut prompt_tokens, mut cached_tokens, mut completion_tokens] = [0; 3];
    for outcome in outcomes {
        match outcome {
            Outcome::Refused(status) => *refused.entry(*status).or_default() += 1,
            Outcome::Failed(why) => {
                let is_listed = failures.len() < MAX_REASONS || failures.contains_key(why);
                *failures.entry(if is_listed { why.clone() } else { "other reasons".to_owned() }).or_default() += 1;
            }
            Outcome::Stopped => {}
            Outcome::Done { answer, late_s } => {
                let first_ms = answer.ttft_s().unwrap_or(answer.total_s) * 1e3;
                let token_ms = answer.tpot_s().unwrap_or(0.0) * 1e3;
                met += usize::from(first_ms <= objective.ttft_ms && token_ms <= objective.tpot_ms);
                ttft.push(first_ms);
                tpot.push(token_ms);
                itl.extend(answer.gaps_s().iter().map(|gap| gap * 1e3));
                late.push(late_s * 1e3);
                prompt_tokens += answer.usage.prompt_tokens;
                cached_tokens += answer.usage.cached_tokens;
                completion_tokens += answer.usage.completion_tokens;
            }
        }
    }
    Level {
        traffic,
        completed: ttft.len(),
        refused,
        failed: failures.values().sum(),
        failures,
        seconds,
        ttft_ms: Percentiles::of(&ttft),
        itl_ms: Percentiles::of(&itl),
        tpot_ms: Percentiles::of(&tpot),
        late_ms: Percentiles::of(&late),
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        met,
        goodput_per_second: met as f64 / seconds,
    }
}

impl LoadRecord {
    /// For the terminal.
    pub fn table(&self) -> String {
        let (model, objective) = (&self.model, self.shape.objective);
        let incomplete = self.incomplete.as_ref().map_or_else(String::new, |why| format!("INCOMPLETE: {why}\n"));
        let devices = if self.devices.is_empty() { "no server".to_owned() } else { self.devices.join(" + ") };
        format!(
            "{} ({}) on {devices}; {} tokens an answer; objective: first token within {} ms, {} ms per token\n{}{}{incomplete}",
            model.name,
            model.class,
            self.shape.generate,
            objective.ttft_ms,
            objective.tpot_ms,
            align(&self.rows()),
            self.not_answered()
        )
    }

    /// Why requests have no answer.
    fn not_answered(&self) -> String {
        let mut text = String::new();
        for level in &self.levels {
            let label = level.traffic.label();
            let line = |(why, count): (String, &usize)| format!("  {label}: {count} requests {why}\n");
            text.extend(level.refused.iter().map(|(status, count)| line((format!("refused with {status}"), count))));
            text.extend(level.failures.iter().map(|(why, count)| line((format!("FAILED: {why}"), count))));
        }
        text
    }

    /// Requests that failed, not counting those that the server refused.
    pub fn num_failed(&self) -> usize {
        self.levels.iter().map(|level| level.failed).sum()
    }

    /// The first row names the columns.
    fn rows(&self) -> Vec<Vec<String>> {
        let head = [
            "traffic",
            "done",
            "first token ms: p50, p90, p99",
            "gap ms: p50, p99",
            "per token ms: p50, p99",
            "tok/s",
            "kept",
            "goodput",
        ];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for level in &self.levels {
            let pair =
                |p: &Option<Percentiles>| p.map_or_else(|| "-".to_owned(), |p| format!("{:.1}, {:.1}", p.p50, p.p99));
            let ttft =
                level.ttft_ms.map_or_else(|| "-".to_owned(), |p| format!("{:.0}, {:.0}, {:.0}", p.p50, p.p90, p.p99));
            let asked = level.completed + level.failed + level.refused.values().sum::<usize>();
            let tokens = level.prompt_tokens - level.cached_tokens + level.completion_tokens;
            rows.push(vec![
                level.traffic.label(),
                format!("{} of {asked}", level.completed),
                ttft,
                pair(&level.itl_ms),
                pair(&level.tpot_ms),
                format!("{:.0}", tokens as f64 / level.seconds),
                format!("{:.0} %", level.cached_tokens as f64 / level.prompt_tokens.max(1) as f64 * 100.0),
                format!("{:.2}/s, {} met", level.goodput_per_second, level.met),
            ]);
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use troika_prompt::Tokenizer;

    use super::*;
    use crate::corpus::Corpus;

    fn shape() -> Shape {
        let objective = Objective { ttft_ms: 100.0, tpot_ms: 20.0 };
        Shape { requests: 400, prompt_tokens: vec![16, 32], generate: 4, seed: 7, objective }
    }

    fn tokens() -> Tokens {
        let bytes = include_bytes!("../../../models/nano/tokenizer.json");
        Tokens::read(Corpus::Random, &Tokenizer::from_bytes("nano", bytes).expect("nano has one")).expect("readable")
    }

    #[test]
    fn arrivals_come_at_their_rate_and_the_same_for_a_seed() {
        let traffic = Traffic::Arrivals { per_second: 20.0 };
        let (shape, tokens) = (shape(), tokens());
        let clients = plan(&traffic, &shape, &tokens).expect("enough");
        let times: Vec<f64> = clients.iter().map(|requests| requests[0].at.expect("a time")).collect();
        assert!(times.is_sorted());
        // 400 gaps of mean 1/20: the sum is 20 s, its deviation 1 s.
        assert!((17.0..23.0).contains(&times[399]), "{}", times[399]);
        assert_eq!(clients, plan(&traffic, &shape, &tokens).expect("enough"));
        let other = Shape { seed: 8, ..shape };
        assert_ne!(clients, plan(&traffic, &other, &tokens).expect("enough"));
    }

    #[test]
    fn what_does_not_fit_is_known_before() {
        let (shape, tokens) = (shape(), tokens());
        assert_eq!(Traffic::Clients { count: 2 }.longest(&shape), 36);
        assert_eq!([1, 2].map(|count| Traffic::Clients { count }.label()), ["1 client", "2 clients"]);
        let agents = Traffic::Agents { count: 2, instructions: 64, turns: 3 };
        assert_eq!(agents.longest(&shape), 64 + 3 * 32 + 4);
        assert!(agents.check(&shape, &tokens).is_ok());
        let long = Traffic::Agents { count: 1, instructions: tokens.len() + 1, turns: 1 };
        assert!(matches!(long.check(&shape, &tokens), Err(BenchError::CorpusTooShort { .. })));
    }

    #[test]
    fn agents_share_their_instructions_and_grow() {
        let traffic = Traffic::Agents { count: 3, instructions: 64, turns: 4 };
        let agents = plan(&traffic, &shape(), &tokens()).expect("enough");
        assert_eq!(agents.len(), 3);
        for turns in &agents {
            assert_eq!(turns.len(), 4);
            assert_eq!(turns[0].prompt[..64], agents[0][0].prompt[..64]);
            assert!(turns.windows(2).all(|pair| pair[1].prompt.starts_with(&pair[0].prompt)));
        }
        assert_ne!(agents[0][0].prompt[64..80], agents[1][0].prompt[64..80]);
    }

    #[test]
    fn only_requests_within_the_objective_are_good() {
        let answer = |ttft: f64, gap: f64| {
            let pieces = (0..3).map(|i| (ttft + gap * f64::from(i), "x".to_owned())).collect();
            let usage = crate::client::Usage {
                prompt_tokens: 10,
                cached_tokens: 4,
                completion_tokens: 3,
                ..Default::default()
            };
            let answer = Box::new(Answer { id: "a".into(), pieces, total_s: ttft + 2.0 * gap, usage });
            Outcome::Done { answer, late_s: 0.0 }
        };
        let failed = || Outcome::Failed("broken pipe".to_owned());
        let outcomes = [answer(0.05, 0.01), answer(0.2, 0.01), answer(0.05, 0.05), Outcome::Refused(429), failed()];
        let level = summarize(Traffic::Clients { count: 1 }, shape().objective, 2.0, &outcomes);
        assert_eq!((level.completed, level.failed, level.met), (3, 1, 1));
        assert_eq!(level.refused, BTreeMap::from([(429, 1)]));
        assert_eq!(level.failures, BTreeMap::from([("broken pipe".to_owned(), 1)]));
        assert_eq!((level.goodput_per_second, level.cached_tokens), (0.5, 12));
        assert!((level.ttft_ms.expect("three").p50 - 50.0).abs() < 1e-9);
    }

    #[test]
    fn reasons_are_few_and_every_failure_is_counted() {
        let outcomes: Vec<Outcome> = (0..20).map(|n| Outcome::Failed(n.to_string())).collect();
        let level = summarize(Traffic::Clients { count: 2 }, shape().objective, 1.0, &outcomes);
        assert_eq!((level.failed, level.failures.len()), (20, MAX_REASONS + 1));
        assert_eq!(level.failures["other reasons"], 20 - MAX_REASONS);
    }

    #[test]
    fn what_is_not_answered_has_a_reason() {
        // A server that hangs up on everybody.
        let server = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = Client::new(&server.local_addr().expect("an address").to_string());
        std::thread::spawn(move || server.incoming().for_each(drop));
        let shape = Shape { requests: 3, ..shape() };
        for traffic in [Traffic::Arrivals { per_second: 1000.0 }, Traffic::Clients { count: 2 }] {
            let level = level(&client, &traffic, &shape, &tokens(), &AtomicBool::new(false)).expect("a level");
            assert_eq!((level.completed, level.failed), (0, 3));
            assert!(level.failures.keys().all(|why| why.contains("/v1/completions")), "{:?}", level.failures);
        }
        let stopped = level(&client, &Traffic::Clients { count: 1 }, &shape, &tokens(), &AtomicBool::new(true));
        assert!(matches!(stopped, Err(BenchError::Interrupted)));
    }
}
