//! What a request may ask of the sampler, on a real model: bias, penalties, log-probabilities, constraints.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use troika_engine::api::{
    ConstraintState, Delivery, Event, EventSink, FinishReason, GenerateRequest, Generator, Logprobs, MAX_TOP_LOGPROBS,
    Sampling, SubmitError, TokenConstraint, TokenSet,
};
use troika_engine::{Engine, EngineOptions};

use crate::serving::LIMITS;
use crate::support::{one_shot, open, options};

const VOCAB: u32 = 384;

struct Channel(Sender<Event>);

impl EventSink for Channel {
    fn offer(&mut self, event: &Event) -> Delivery {
        if self.0.send(event.clone()).is_ok() { Delivery::Taken } else { Delivery::Gone }
    }
}

fn start() -> Engine {
    let limits = EngineOptions { chunk_tokens: 16, max_running: 8, max_queued: 16, max_context_tokens: 256, ..LIMITS };
    Engine::start(open("tiny", options()), limits).expect("the engine starts")
}

/// What a request heard.
#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    logprobs: Vec<Option<Box<Logprobs>>>,
    /// The reason, or the message of a failure.
    end: Result<FinishReason, String>,
}

fn submit(engine: &Engine, request: GenerateRequest) -> Receiver<Event> {
    let (sender, events) = channel();
    engine.submit(request, Box::new(Channel(sender))).expect("accepted");
    events
}

fn answer(events: &Receiver<Event>) -> Answer {
    let mut answer = Answer { tokens: Vec::new(), logprobs: Vec::new(), end: Err(String::new()) };
    loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("the engine goes on") {
            Event::Prefilled { .. } => {}
            Event::Token { token, logprobs } => {
                answer.tokens.push(token);
                answer.logprobs.push(logprobs);
            }
            Event::Finished { reason, .. } => return Answer { end: Ok(reason), ..answer },
            Event::Failed { message } => return Answer { end: Err(message), ..answer },
        }
    }
}

fn ask(engine: &Engine, request: GenerateRequest) -> Answer {
    answer(&submit(engine, request))
}

fn request(max_new_tokens: usize, sampling: Sampling) -> GenerateRequest {
    GenerateRequest::new(vec![5, 17, 200, 3, 42, 42, 7], max_new_tokens, sampling)
}

fn greedy(max_new_tokens: usize) -> GenerateRequest {
    request(max_new_tokens, Sampling::GREEDY)
}

const RANDOM: Sampling = Sampling { temperature: 1.0, seed: 9, ..Sampling::GREEDY };

#[test]
fn bias_forces_and_forbids() {
    let engine = start();
    let plain = ask(&engine, greedy(6));
    assert_eq!(plain.tokens.len(), 6);
    let forced = ask(&engine, GenerateRequest { logit_bias: vec![(99, 100.0)], ..greedy(6) });
    assert_eq!(forced.tokens, [99; 6]);
    let forced = ask(&engine, GenerateRequest { logit_bias: vec![(99, 100.0)], ..request(6, RANDOM) });
    assert_eq!(forced.tokens, [99; 6]);
    // The greedy tokens are forbidden one by one: another comes at each place.
    let first = plain.tokens[0];
    let forbidden = ask(&engine, GenerateRequest { logit_bias: vec![(first, -100.0)], ..greedy(6) });
    assert_ne!(forbidden.tokens[0], first);
    assert!(!forbidden.tokens.contains(&first));
    // All but two are forbidden: only those two are drawn.
    let others = (0..VOCAB).filter(|token| ![7, 8].contains(token));
    let bias: Vec<(u32, f32)> = others.map(|token| (token, -1000.0)).collect();
    let drawn = ask(&engine, GenerateRequest { logit_bias: bias, ..request(40, RANDOM) });
    assert!(drawn.tokens.iter().all(|token| [7, 8].contains(token)));
    // A stop token can be forced, too.
    let stopped = GenerateRequest { logit_bias: vec![(99, 100.0)], stop_tokens: vec![99], ..greedy(6) };
    assert_eq!(ask(&engine, stopped).end, Ok(FinishReason::StopToken(99)));
}

/// The greedy continuation by hand: logits of the whole text so far, changed by `change`, at every step.
fn by_hand(num_tokens: usize, change: impl Fn(&mut [f32], &[u32], &[u32])) -> Vec<u32> {
    let mut runner = open("tiny", options());
    let prompt = greedy(1).prompt;
    let mut generated: Vec<u32> = Vec::new();
    for _ in 0..num_tokens {
        let tokens = [&prompt[..], &generated].concat();
        let mut logits = one_shot(&mut runner, &tokens, 1);
        change(&mut logits, &prompt, &generated);
        let best = (0..logits.len()).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("a vocabulary");
        generated.push(best as u32);
    }
    generated
}

#[test]
fn penalties_change_the_continuation_as_they_say() {
    let engine = start();
    let n = 12;
    let plain = ask(&engine, greedy(n)).tokens;
    assert_eq!(plain, by_hand(n, |_, _, _| {}));
    let count = |tokens: &[u32], token: u32| tokens.iter().filter(|t| **t == token).count() as f32;

    // A negative penalty asks for repetition: the same token over and over.
    let sampling = Sampling { frequency_penalty: -2.0, presence_penalty: -2.0, ..Sampling::GREEDY };
    let repeated = ask(&engine, request(n, sampling)).tokens;
    let want = by_hand(n, |logits, _, generated| {
        for token in 0..VOCAB {
            let count = count(generated, token);
            logits[token as usize] += 2.0 * count + if count > 0.0 { 2.0 } else { 0.0 };
        }
    });
    assert_eq!(repeated, want);
    // Against it, most are new.
    let sampling = Sampling { frequency_penalty: 2.0, presence_penalty: 2.0, ..Sampling::GREEDY };
    let varied = ask(&engine, request(n, sampling)).tokens;
    let want = by_hand(n, |logits, _, generated| {
        for token in 0..VOCAB {
            let count = count(generated, token);
            logits[token as usize] -= 2.0 * count + if count > 0.0 { 2.0 } else { 0.0 };
        }
    });
    assert_eq!(varied, want);
    let distinct = |tokens: &[u32]| tokens.iter().collect::<BTreeSet<_>>().len();
    assert!(distinct(&repeated) < distinct(&plain) && distinct(&plain) <= distinct(&varied), "{repeated:?} {varied:?}");
    // Repetition counts the prompt.
    let sampling = Sampling { repetition_penalty: 0.25, ..Sampling::GREEDY };
    let echoed = ask(&engine, request(n, sampling)).tokens;
    let want = by_hand(n, |logits, prompt, generated| {
        for token in (0..VOCAB).filter(|token| prompt.contains(token) || generated.contains(token)) {
            let logit = &mut logits[token as usize];
            *logit = if *logit > 0.0 { *logit / 0.25 } else { *logit * 0.25 };
        }
    });
    assert_eq!(echoed, want);
}

#[test]
fn log_probabilities_are_those_of_the_model() {
    let engine = start();
    // Whatever else is asked for, they are of the model's own distribution.
    let sampling = Sampling { temperature: 0.7, top_k: 50, presence_penalty: 1.0, ..RANDOM };
    let got = ask(&engine, GenerateRequest { logprobs: Some(5), logit_bias: vec![(99, 3.0)], ..request(8, sampling) });
    let mut runner = open("tiny", options());
    let mut tokens = greedy(1).prompt;
    for (token, logprobs) in got.tokens.iter().zip(&got.logprobs) {
        let logits = one_shot(&mut runner, &tokens, 1);
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - best).exp()).sum();
        let want = |token: u32| f64::from(logits[token as usize] - best) - sum.ln();
        let close = |got: f32, want: f64| (f64::from(got) - want).abs() < 1e-5;
        let logprobs = logprobs.as_deref().expect("asked for");
        assert!(close(logprobs.chosen, want(*token)));
        let mut ranked: Vec<u32> = (0..VOCAB).collect();
        ranked.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
        assert_eq!(logprobs.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), ranked[..5]);
        assert!(logprobs.top.iter().all(|(token, got)| close(*got, want(*token))));
        tokens.push(*token);
    }
    let none = ask(&engine, greedy(2));
    assert_eq!(none.logprobs, [None, None]);
    let zero = ask(&engine, GenerateRequest { logprobs: Some(0), ..greedy(2) });
    assert!(zero.logprobs.iter().all(|logprobs| logprobs.as_deref().is_some_and(|l| l.top.is_empty())));
    assert_eq!(zero.tokens, none.tokens, "asking changes nothing");
}

/// Token `n` must leave the rest `n % 7` by 7, for so many tokens; then a stop token may come, then nothing else can.
#[derive(Clone)]
struct Remainders {
    at: usize,
    may_end: usize,
    must_end: usize,
}

const STOP: u32 = 1;

impl TokenConstraint for Remainders {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<(), String> {
        if self.at == 1000 {
            return Err("lost count".to_owned());
        }
        let at = self.at as u32;
        // One past the vocabulary is no harm.
        (2..=VOCAB).filter(|token| token % 7 == at % 7).for_each(|token| allowed.insert(token));
        if self.at >= self.may_end {
            allowed.insert(STOP);
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<ConstraintState, String> {
        assert_eq!(token % 7, self.at as u32 % 7);
        self.at += 1;
        Ok(if self.at == self.must_end { ConstraintState::Complete } else { ConstraintState::Open })
    }

    fn boxed_clone(&self) -> Box<dyn TokenConstraint> {
        Box::new(self.clone())
    }
}

pub(crate) fn remainders(may_end: usize, must_end: usize) -> Option<Box<dyn TokenConstraint>> {
    Some(Box::new(Remainders { at: 0, may_end, must_end }))
}

#[test]
fn constraints_hold_token_by_token() {
    let engine = start();
    for seed in 0..4 {
        let sampling = Sampling { seed, ..RANDOM };
        let got = ask(&engine, GenerateRequest { constraint: remainders(99, 99), ..request(20, sampling) });
        assert_eq!(got.end, Ok(FinishReason::Length));
        let expected: Vec<u32> = (0..20).map(|at| at % 7).collect();
        assert_eq!(got.tokens.iter().map(|token| token % 7).collect::<Vec<_>>(), expected);
    }
    let complete = ask(&engine, GenerateRequest { constraint: remainders(99, 5), ..greedy(20) });
    assert_eq!((complete.tokens.len(), complete.end), (5, Ok(FinishReason::ConstraintComplete)));
    // A stop token comes only where it may, however likely it is.
    let bias = vec![(STOP, 100.0)];
    let stopping =
        GenerateRequest { constraint: remainders(3, 99), logit_bias: bias, stop_tokens: vec![STOP], ..greedy(20) };
    let stopped = ask(&engine, stopping);
    assert_eq!((stopped.tokens.len(), stopped.end), (3, Ok(FinishReason::StopToken(STOP))));
}

/// Allows nothing, or what it then refuses, or gives up.
#[derive(Clone, Copy)]
enum Broken {
    Empty,
    Refuses,
    GivesUp,
}

impl TokenConstraint for Broken {
    fn allow(&mut self, allowed: &mut TokenSet) -> Result<(), String> {
        match self {
            Self::Empty => Ok(()),
            Self::Refuses => {
                allowed.insert(5);
                Ok(())
            }
            Self::GivesUp => Err("it gave up".to_owned()),
        }
    }

    fn accept(&mut self, token: u32) -> Result<ConstraintState, String> {
        Err(format!("{token} cannot follow"))
    }

    fn boxed_clone(&self) -> Box<dyn TokenConstraint> {
        Box::new(*self)
    }
}

#[test]
fn a_broken_constraint_fails_its_request_alone() {
    let engine = start();
    let plain = ask(&engine, greedy(6)).tokens;
    let neighbour = submit(&engine, greedy(6));
    let cases =
        [(Broken::Empty, "no token can follow"), (Broken::Refuses, "5 cannot follow"), (Broken::GivesUp, "it gave up")];
    for (broken, reason) in cases {
        let got = ask(&engine, GenerateRequest { constraint: Some(Box::new(broken)), ..greedy(6) });
        assert!(got.tokens.is_empty());
        assert!(got.end.as_ref().is_err_and(|message| message.contains(reason)), "{got:?}");
    }
    assert_eq!(answer(&neighbour).tokens, plain);
    assert_eq!(ask(&engine, greedy(6)).tokens, plain);
}

/// Whatever a request asks for, it says the same alone and among others.
#[test]
fn neighbours_change_nothing() {
    let engine = start();
    let requests: Vec<GenerateRequest> = (0..8u64)
        .map(|seed| {
            let sampling = Sampling {
                seed,
                frequency_penalty: if seed % 2 == 0 { 0.8 } else { 0.0 },
                repetition_penalty: if seed % 3 == 0 { 1.3 } else { 1.0 },
                ..RANDOM
            };
            GenerateRequest {
                logit_bias: vec![(seed as u32 * 3 + 10, 4.0)],
                logprobs: (seed % 2 == 1).then_some(3),
                constraint: if seed % 4 == 1 { remainders(99, 99) } else { None },
                ..GenerateRequest::new((0..10 + 7 * seed as u32).collect(), 10, sampling)
            }
        })
        .collect();
    let alone: Vec<Answer> = requests.iter().map(|request| ask(&engine, request.clone())).collect();
    for _ in 0..3 {
        let events: Vec<Receiver<Event>> = requests.iter().map(|request| submit(&engine, request.clone())).collect();
        let together: Vec<Answer> = events.iter().map(answer).collect();
        assert_eq!(together, alone);
    }
}

#[test]
fn bad_values_are_named() {
    let engine = start();
    let refused = |request: GenerateRequest, names: &[&str]| {
        let (sender, _events) = channel();
        let Err(SubmitError::Invalid { reason }) = engine.submit(request, Box::new(Channel(sender))) else {
            panic!("{names:?} was accepted");
        };
        assert!(names.iter().all(|name| reason.contains(name)), "{reason:?} lacks one of {names:?}");
    };
    for value in [-2.1, 2.1, f32::NAN, f32::INFINITY] {
        let written = &value.to_string();
        let sampling = Sampling { frequency_penalty: value, ..Sampling::GREEDY };
        refused(request(1, sampling), &["frequency_penalty", written, "-2 to 2"]);
        let sampling = Sampling { presence_penalty: value, ..Sampling::GREEDY };
        refused(request(1, sampling), &["presence_penalty", written, "-2 to 2"]);
    }
    for value in [0.0, -1.0, f32::NAN, 1e9] {
        let sampling = Sampling { repetition_penalty: value, ..Sampling::GREEDY };
        refused(request(1, sampling), &["repetition_penalty", &value.to_string()]);
    }
    refused(GenerateRequest { logit_bias: vec![(VOCAB, 1.0)], ..greedy(1) }, &["logit_bias", "384"]);
    for bias in [1001.0, -1001.0, f32::NAN, f32::NEG_INFINITY] {
        refused(GenerateRequest { logit_bias: vec![(5, bias)], ..greedy(1) }, &["logit_bias", "5", &bias.to_string()]);
    }
    let logprobs = Some(MAX_TOP_LOGPROBS + 1);
    refused(GenerateRequest { logprobs, ..greedy(1) }, &["logprobs", "20", "21"]);
}
