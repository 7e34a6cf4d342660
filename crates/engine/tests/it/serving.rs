//! Many requests at once: the same tokens as alone, and nothing left behind by those that end early.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use troika_engine::api::{Delivery, Event, EventSink, FinishReason, GenerateRequest, Generator, Sampling, SubmitError};
use troika_engine::{Engine, EngineOptions, StepRunner};

use crate::support::{open, options};

pub(crate) const LIMITS: EngineOptions = EngineOptions {
    chunk_tokens: 48,
    honour_chunk: false,
    wavefront: 1,
    max_running: 4,
    max_queued: 8,
    max_context_tokens: 512,
    max_itl: EngineOptions::DEFAULT_MAX_ITL,
    memory_bytes: u64::MAX,
    cache_bytes: 0,
    snapshot_spacing: EngineOptions::DEFAULT_SNAPSHOT_SPACING,
};

fn engine(limits: EngineOptions) -> Engine {
    Engine::start(open("tiny-bf16", options()), limits).expect("starts")
}

pub(crate) struct Channel(pub(crate) Sender<Event>);

impl EventSink for Channel {
    fn offer(&mut self, event: &Event) -> Delivery {
        if self.0.send(event.clone()).is_ok() { Delivery::Taken } else { Delivery::Gone }
    }
}

pub(crate) fn request(seed: u64, prompt: usize, max_new_tokens: usize) -> GenerateRequest {
    let prompt = (0..prompt).map(|i| ((i as u64 * 31 + seed * 17) % 383) as u32).collect();
    let sampling = Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
    GenerateRequest::new(prompt, max_new_tokens, sampling)
}

pub(crate) fn start(engine: &Engine, request: GenerateRequest) -> Receiver<Event> {
    let (sender, receiver) = channel();
    engine.submit(request, Box::new(Channel(sender))).expect("accepted");
    receiver
}

/// Tokens up to the end, and the end.
pub(crate) fn collect(events: &Receiver<Event>) -> (Vec<u32>, Event) {
    let mut tokens = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("the engine answers") {
            Event::Token { token, .. } => tokens.push(token),
            Event::Prefilled { .. } => {}
            end => return (tokens, end),
        }
    }
}

pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn neighbours_do_not_change_a_token() {
    let requests: Vec<GenerateRequest> =
        (0..8).map(|i| request(i, 5 + 37 * i as usize % 150, 12 + i as usize)).collect();
    let alone: Vec<Vec<u32>> =
        requests.iter().map(|request| collect(&start(&engine(LIMITS), request.clone())).0).collect();
    let engine = engine(LIMITS);
    let events: Vec<Receiver<Event>> = requests.iter().map(|request| start(&engine, request.clone())).collect();
    for ((events, want), request) in events.iter().zip(&alone).zip(&requests) {
        let (tokens, end) = collect(events);
        assert_eq!(&tokens, want);
        let Event::Finished { reason, usage } = end else { panic!("ended with {end:?}") };
        assert_eq!(reason, FinishReason::Length);
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (request.prompt.len(), request.max_new_tokens));
        assert!(usage.prefill_us > 0 && usage.decode_us > 0);
    }
    wait_until("gauges return to zero", || {
        let status = engine.status();
        status.running == 0 && status.queued == 0 && status.requests_total == 8
    });
    let status = engine.status();
    assert_eq!(status.completion_tokens_total, requests.iter().map(|r| r.max_new_tokens as u64).sum::<u64>());
    assert_eq!(status.prompt_tokens_total, requests.iter().map(|r| r.prompt.len() as u64).sum::<u64>());
}

#[test]
fn stop_tokens_end_without_being_delivered() {
    let engine = engine(LIMITS);
    let (tokens, _) = collect(&start(&engine, request(3, 20, 10)));
    let stopping = GenerateRequest { stop_tokens: vec![tokens[4]], ..request(3, 20, 10) };
    let (got, end) = collect(&start(&engine, stopping));
    let until = tokens.iter().position(|token| *token == tokens[4]).expect("it is there");
    assert_eq!(got, tokens[..until]);
    assert!(matches!(end, Event::Finished { reason: FinishReason::StopToken(token), .. } if token == tokens[4]));
}

#[test]
fn the_context_is_a_limit() {
    let engine = engine(EngineOptions { max_context_tokens: 64, ..LIMITS });
    let (tokens, end) = collect(&start(&engine, request(1, 60, 100)));
    assert_eq!(tokens.len(), 4, "60 and 4 tokens fill a context of 64");
    assert!(matches!(end, Event::Finished { reason: FinishReason::ContextFull, .. }));
    let (sender, _receiver) = channel();
    let refused = engine.submit(request(1, 64, 1), Box::new(Channel(sender)));
    assert_eq!(refused, Err(SubmitError::TooLong { prompt_tokens: 64, max_context_tokens: 64 }));
}

/// Whether it waits or runs, a request ends when its time is over, and what it has is freed.
#[test]
fn deadlines_end_requests() {
    let engine = engine(EngineOptions { max_running: 1, ..LIMITS });
    let mut running = request(1, 50, 400);
    running.service.deadline = Some(Duration::from_millis(5));
    let (running, waiting) = (start(&engine, running), {
        let mut waiting = request(2, 50, 4);
        waiting.service.deadline = Some(Duration::ZERO);
        start(&engine, waiting)
    });
    let ends_late = |events: &Receiver<Event>| match collect(events) {
        (tokens, Event::Finished { reason: FinishReason::DeadlinePassed, usage }) => (tokens.len(), usage),
        end => panic!("ended with {end:?}"),
    };
    assert_eq!(ends_late(&waiting).0, 0);
    let (tokens, usage) = ends_late(&running);
    assert!(tokens < 400 && usage.completion_tokens == tokens, "{usage:?}");
    assert_eq!(collect(&start(&engine, request(3, 50, 2))).0.len(), 2, "the place is free");
    wait_until("gauges return to zero", || engine.status().running == 0 && engine.status().requests_total == 3);
    assert_eq!((engine.status().expired_total, engine.status().cancelled_total), (2, 0));
}

/// A prompt that no memory would hold is refused with the numbers; an answer that outgrows it ends as at the context's end.
#[test]
fn memory_is_a_limit() {
    let roomy = EngineOptions { memory_bytes: 1 << 30, max_running: 1, max_context_tokens: 4096, ..LIMITS };
    let values_bytes = engine(roomy).status().step_bytes;
    let runner = open("tiny-bf16", options());
    let shape = runner.state_shape();
    let state_bytes = shape.fixed_bytes() + 2 * shape.bytes_per_block();
    // What the values of the narrowest steps leave over.
    let width = LIMITS.chunk_tokens;
    let limit_bytes = state_bytes + runner.step_bytes(width, 0) - runner.step_bytes(width / 16, 0);
    let blocks = (limit_bytes - shape.fixed_bytes()) / shape.bytes_per_block();
    let engine = engine(EngineOptions { memory_bytes: values_bytes + state_bytes, ..roomy });
    assert_eq!(engine.status().state_bytes_limit, state_bytes);
    let prompt_tokens = blocks as usize * shape.block_tokens();
    assert_eq!(engine.max_prompt_tokens(), prompt_tokens - 1, "with room for a token of the answer");
    let (sender, _receiver) = channel();
    let refused = engine.submit(request(1, prompt_tokens, 1), Box::new(Channel(sender)));
    let need_bytes = shape.fixed_bytes() + (blocks + 1) * shape.bytes_per_block();
    assert_eq!(refused, Err(SubmitError::NeverFits { prompt_tokens, need_bytes, limit_bytes }));
    let (tokens, end) = collect(&start(&engine, request(1, 100, 4000)));
    assert!(matches!(end, Event::Finished { reason: FinishReason::MemoryFull, .. }), "{end:?}");
    assert_eq!(tokens.len(), prompt_tokens - 100, "all blocks are full");
    wait_until("its state is freed", || engine.status().state_bytes_reserved == 0);
}

#[test]
fn malformed_requests_are_refused_by_name() {
    let engine = engine(LIMITS);
    let good = request(0, 3, 1);
    let sampling = |change: fn(&mut Sampling)| {
        let mut request = good.clone();
        change(&mut request.sampling);
        request
    };
    let table = [
        (GenerateRequest { prompt: Vec::new(), ..good.clone() }, "the prompt is empty"),
        (GenerateRequest { prompt: vec![384], ..good.clone() }, "token 384 is not in the vocabulary of 384"),
        (GenerateRequest { max_new_tokens: 0, ..good.clone() }, "max_new_tokens must be at least 1"),
        (sampling(|s| s.temperature = f32::NAN), "temperature must be a number"),
        (sampling(|s| s.temperature = -1.0), "temperature must be a number"),
        (sampling(|s| s.top_p = 1.5), "top_p must be a number from 0 to 1, not 1.5"),
        (sampling(|s| s.min_p = -0.1), "min_p must be a number"),
    ];
    for (request, want) in table {
        let (sender, _receiver) = channel();
        let error = engine.submit(request, Box::new(Channel(sender))).expect_err(want).to_string();
        assert!(error.contains(want), "{error}");
    }
    assert_eq!(engine.status().queued, 0);
}

#[test]
fn a_full_queue_is_an_answer() {
    let engine = engine(EngineOptions { max_running: 1, max_queued: 2, max_context_tokens: 1 << 14, ..LIMITS });
    let mut running = Vec::new();
    let full = loop {
        let (sender, receiver) = channel();
        // So long that none ends by itself meanwhile.
        match engine.submit(request(running.len() as u64, 100, 10_000), Box::new(Channel(sender))) {
            Ok(id) => running.push((id, receiver)),
            Err(error) => break error,
        }
        assert!(running.len() <= 4, "one runs and two wait, give or take the moment");
    };
    assert_eq!(full, SubmitError::QueueFull { queued: 2, limit: 2 });
    for (id, events) in &running {
        engine.cancel(*id);
        let (_, end) = collect(events);
        assert!(matches!(end, Event::Finished { reason: FinishReason::Cancelled, .. }), "{end:?}");
    }
    wait_until("gauges return to zero", || engine.status().running == 0 && engine.status().queued == 0);
}

#[test]
fn listeners_that_go_away_free_their_place() {
    let engine = engine(EngineOptions { max_running: 2, ..LIMITS });
    let (want, _) = collect(&start(&engine, request(9, 50, 8)));
    for round in 0..60u64 {
        let events = start(&engine, request(round, 100 + round as usize, 300));
        // Gone while it waits, while its prompt is computed, or after some tokens.
        for _ in 0..round % 4 {
            let _ = events.recv_timeout(Duration::from_millis(20));
        }
        drop(events);
        assert_eq!(collect(&start(&engine, request(9, 50, 8))).0, want, "round {round}");
    }
    wait_until("gauges return to zero", || {
        let status = engine.status();
        status.running == 0 && status.queued == 0 && status.requests_total == 121
    });
}

/// Takes events only while it is told to.
#[derive(Clone, Default)]
struct Gate(Arc<Mutex<(bool, Vec<Event>)>>);

impl EventSink for Gate {
    fn offer(&mut self, event: &Event) -> Delivery {
        let mut gate = self.0.lock().expect("not poisoned");
        if !gate.0 {
            return Delivery::Full;
        }
        gate.1.push(event.clone());
        Delivery::Taken
    }
}

#[test]
fn a_listener_without_room_pauses_its_own_request_only() {
    let engine = engine(LIMITS);
    let (want, _) = collect(&start(&engine, request(5, 30, 20)));
    let gate = Gate::default();
    engine.submit(request(5, 30, 20), Box::new(gate.clone())).expect("accepted");
    for seed in 0..5 {
        collect(&start(&engine, request(seed, 30, 10)));
    }
    assert!(gate.0.lock().expect("not poisoned").1.is_empty());
    assert!(engine.status().completion_tokens_total < 20 + 50 + 3, "the paused request does not run ahead");
    gate.0.lock().expect("not poisoned").0 = true;
    let ended = |events: &[Event]| matches!(events.last(), Some(Event::Finished { .. }));
    wait_until("it goes on", || ended(&gate.0.lock().expect("not poisoned").1));
    let events = &gate.0.lock().expect("not poisoned").1;
    let tokens: Vec<u32> = events
        .iter()
        .filter_map(|event| if let Event::Token { token, .. } = event { Some(*token) } else { None })
        .collect();
    assert_eq!(tokens, want, "in order, none lost");
}

#[test]
fn shutdown_tells_everybody() {
    let engine = engine(EngineOptions { max_running: 1, max_context_tokens: 1 << 14, ..LIMITS });
    let events: Vec<Receiver<Event>> = (0..3).map(|seed| start(&engine, request(seed, 40, 10_000))).collect();
    engine.shutdown();
    for events in &events {
        let (_, end) = collect(events);
        assert!(matches!(end, Event::Finished { reason: FinishReason::Shutdown, .. }), "{end:?}");
    }
    let (sender, _receiver) = channel();
    let refused = engine.submit(request(0, 3, 1), Box::new(Channel(sender)));
    assert!(matches!(refused, Err(SubmitError::Stopped { .. })), "{refused:?}");
}
