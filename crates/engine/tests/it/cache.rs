//! Nothing is computed twice, and nobody can tell by the tokens: cold, cached, chunked otherwise, preempted, among others.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use proptest::prelude::*;
use troika_engine::api::{
    Delivery, Event, EventSink, FinishReason, GenerateRequest, Generator, RequestRecord, Rule, Sampling, Usage,
};
use troika_engine::{Engine, EngineOptions, StepRunner};

use crate::serving::{Channel, LIMITS, wait_until};
use crate::support::{open, options};

pub(crate) const CACHED: EngineOptions = EngineOptions { cache_bytes: 1 << 30, chunk_tokens: 256, ..LIMITS };

fn engine(limits: EngineOptions) -> Engine {
    Engine::start(open("tiny-bf16", options()), limits).expect("starts")
}

pub(crate) fn tokens(seed: u64, count: usize) -> Vec<u32> {
    (0..count as u64).map(|i| ((i * i * 7 + i * 31 + seed * 1009) % 383) as u32).collect()
}

/// Sampled, so that a wrong bit in the logits soon shows, and with the probabilities themselves.
pub(crate) fn request(prompt: Vec<u32>, max_new_tokens: usize) -> GenerateRequest {
    let sampling = Sampling { temperature: 1.0, seed: 5, ..Sampling::GREEDY };
    GenerateRequest { logprobs: Some(2), ..GenerateRequest::new(prompt, max_new_tokens, sampling) }
}

/// Tokens with the bits of their probabilities, and the usage.
pub(crate) fn answer(engine: &Engine, request: GenerateRequest) -> (Vec<(u32, u32)>, Usage) {
    hear(&begin(engine, request))
}

pub(crate) fn begin(engine: &Engine, request: GenerateRequest) -> Receiver<Event> {
    let (sender, events) = channel();
    engine.submit(request, Box::new(Channel(sender))).expect("accepted");
    events
}

/// As [`answer`], of one that has begun.
pub(crate) fn hear(events: &Receiver<Event>) -> (Vec<(u32, u32)>, Usage) {
    let mut tokens = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("the engine answers") {
            Event::Token { token, logprobs } => tokens.push((token, logprobs.expect("asked for").chosen.to_bits())),
            Event::Prefilled { .. } => {}
            Event::Finished { reason: FinishReason::Length, usage } => return (tokens, usage),
            end => panic!("ended with {end:?}"),
        }
    }
}

/// Hears nothing but how a request was served.
struct Recorder(Sender<RequestRecord>);

impl EventSink for Recorder {
    fn offer(&mut self, _: &Event) -> Delivery {
        Delivery::Taken
    }

    fn ended(&mut self, record: &RequestRecord) {
        let _ = self.0.send(record.clone());
    }
}

pub(crate) fn record(engine: &Engine, request: GenerateRequest) -> RequestRecord {
    let (sender, records) = channel();
    let id = engine.submit(request, Box::new(Recorder(sender))).expect("accepted");
    let record = records.recv_timeout(Duration::from_secs(60)).expect("it ends");
    assert_eq!(record.request, Some(id));
    assert_eq!(records.recv().ok(), None, "it is told once");
    record
}

#[test]
fn the_same_prompt_again_is_three_blocks_shorter() {
    let engine = engine(CACHED);
    let prompt = tokens(1, 3 * 128 + 5);
    let (cold, usage) = answer(&engine, request(prompt.clone(), 20));
    assert_eq!(usage.cached_tokens, 0);
    let (cached, usage) = answer(&engine, request(prompt.clone(), 20));
    assert_eq!((usage.cached_tokens, usage.prompt_tokens), (384, 389));
    assert_eq!(cached, cold);
    let status = engine.status();
    assert_eq!((status.cached_tokens_total, status.cache.hits, status.cache.lookups), (384, 1, 2));
    assert!(status.cache.used_bytes > 0 && status.cache.blocks == 3, "{:?}", status.cache);
    let mut other = request(prompt, 20);
    other.service.tenant = "somebody else".to_owned();
    let (theirs, usage) = answer(&engine, other);
    assert_eq!((usage.cached_tokens, theirs), (0, cold), "tenants share nothing");
}

#[test]
fn a_stream_cancelled_after_its_first_token_leaves_its_prompt() {
    let engine = engine(CACHED);
    let prompt = tokens(2, 3 * 128 + 5);
    let (sender, events) = channel();
    let id = engine.submit(request(prompt.clone(), 300), Box::new(Channel(sender))).expect("accepted");
    while !matches!(events.recv_timeout(Duration::from_secs(60)).expect("answers"), Event::Token { .. }) {}
    engine.cancel(id);
    drop(events);
    let (_, usage) = answer(&engine, request(prompt, 4));
    assert_eq!(usage.cached_tokens, 384);
}

#[test]
fn a_conversation_resumes_where_it_ended() {
    let limits = EngineOptions { max_context_tokens: 4096, ..CACHED };
    let (engine, cold) = (engine(limits), engine(EngineOptions { cache_bytes: 0, ..limits }));
    let mut conversation = Vec::new();
    for turn in 0..20 {
        conversation.extend(tokens(100 + turn, 40 + turn as usize * 3));
        let before = conversation.len();
        let (said, usage) = answer(&engine, request(conversation.clone(), 30 + turn as usize));
        if turn % 5 == 0 {
            assert_eq!(said, answer(&cold, request(conversation.clone(), 30 + turn as usize)).0, "turn {turn}");
        }
        let last_turn = before - (40 + turn as usize * 3);
        assert!(usage.cached_tokens + 128 >= last_turn, "turn {turn}: {} of {last_turn}", usage.cached_tokens);
        conversation.extend(said.iter().map(|(token, _)| *token));
    }
}

#[test]
fn a_prefix_that_two_prompts_share_serves_the_third() {
    let engine = engine(CACHED);
    let shared = tokens(3, 300);
    let prompt = |seed| [shared.clone(), tokens(seed, 200)].concat();
    assert_eq!(answer(&engine, request(prompt(11), 2)).1.cached_tokens, 0);
    // Its rows are found, but there is no place to resume at; this one leaves it.
    answer(&engine, request(prompt(12), 2));
    assert_eq!(answer(&engine, request(prompt(13), 2)).1.cached_tokens, 256);
}

#[test]
fn a_record_says_how_a_request_was_served() {
    let engine = engine(CACHED);
    let shared = tokens(3, 300);
    let records = [11, 12, 13].map(|seed| record(&engine, request([shared.clone(), tokens(seed, 200)].concat(), 2)));
    let edges = |record: &RequestRecord| record.chunks.iter().map(|c| (c.start, c.width)).collect::<Vec<_>>();
    assert_eq!(edges(&records[0]), [(0, 256), (256, 244)]);
    assert_eq!(edges(&records[1]), edges(&records[0]));
    assert_eq!(edges(&records[2]), [(256, 244)]);
    let third = &records[2];
    assert_eq!(third.chunks[0].narrowed_by.last().map(|n| (n.rule, n.after)), Some((Rule::Remaining, 244)));
    let diverged = records.each_ref().map(|record| record.diverged.map(|at| at.position));
    assert_eq!(diverged, [None, Some(300), Some(300)]);
    assert_eq!(third.diverged.map(|at| at.token), Some(tokens(13, 1)[0]));
    assert_eq!(records.each_ref().map(|record| record.usage.cached_tokens), [0, 0, 256]);
    assert_eq!(records.each_ref().map(|record| record.finish), [Some(FinishReason::Length); 3]);
    assert_eq!((third.stored_blocks, third.skipped_because, third.preemptions), (3, None, 0));
    let status = engine.status();
    assert_eq!(status.narrowed_total.get(&Rule::Remaining), Some(&3));
    // The third resumed after 256. Each answer has two tokens, the first of which comes with the last chunk.
    assert_eq!((status.prefill.steps, status.prefill.tokens), (5, 500 + 500 + 244));
    assert_eq!((status.decode.steps, status.decode.tokens), (3, 3));
    assert!(status.prefill.busy_us > 0 && status.decode.busy_us > 0);
    assert!(status.nodes.iter().any(|node| node.kind == "embed" && node.completed == 8), "{:?}", status.nodes);
    assert!(status.nodes.iter().all(|node| node.submitted == node.completed && node.failed == 0));
}

/// To the token, also within the first block, and not where the kept prefix or the prompt merely ends.
#[test]
fn where_a_prompt_parts_from_what_is_kept() {
    let engine = engine(CACHED);
    let kept = tokens(21, 300);
    let at = |position: usize| {
        let mut prompt = kept.clone();
        prompt[position] = (prompt[position] + 1) % 383;
        prompt
    };
    let prompts = [kept.clone(), at(200), at(7), kept[..200].to_vec(), [kept.clone(), tokens(22, 100)].concat(), at(0)];
    let diverged = |prompt: &Vec<u32>| record(&engine, request(prompt.clone(), 1)).diverged;
    let found: Vec<_> = prompts.iter().map(|prompt| diverged(prompt).map(|at| (at.position, at.token))).collect();
    assert_eq!(found, [None, Some((200, prompts[1][200])), Some((7, prompts[2][7])), None, None, None]);
}

#[test]
fn a_small_cache_keeps_its_limit() {
    let engine = engine(EngineOptions { cache_bytes: 3_000_000, ..CACHED });
    for seed in 0..12 {
        answer(&engine, request(tokens(seed, 400), 2));
        let cache = engine.status().cache;
        assert!(cache.used_bytes <= cache.limit_bytes, "{cache:?}");
    }
    assert!(engine.status().cache.evicted > 0, "{:?}", engine.status().cache);
}

#[test]
fn what_is_not_stored_has_a_reason() {
    // Not even one block fits.
    let tiny = engine(EngineOptions { cache_bytes: 1000, ..CACHED });
    let skipped = record(&tiny, request(tokens(1, 400), 2));
    assert_eq!((skipped.stored_blocks, skipped.skipped_blocks, skipped.skipped_because), (0, 3, Some("no_room")));
    assert_eq!((tiny.status().cache.skipped_no_parent, tiny.status().cache.used_bytes), (0, 0));
    assert!(tiny.status().cache.skipped_no_room >= 2, "{:?}", tiny.status().cache);
    let without = record(&engine(LIMITS), request(tokens(1, 400), 2));
    assert_eq!((without.stored_blocks, without.skipped_because), (0, Some("no_cache")));
}

#[test]
fn preempted_sequences_say_the_same() {
    let alone = engine(EngineOptions { max_running: 1, ..LIMITS });
    let roomy = EngineOptions { memory_bytes: 1 << 30, chunk_tokens: 16, ..LIMITS };
    let values_bytes = roomy.memory_bytes - engine(roomy).status().state_bytes_limit;
    let runner = open("tiny-bf16", options());
    let shape = runner.state_shape();
    // Four prompts fit, and the first block of each answer; the rest does not.
    let memory_bytes = values_bytes + 4 * shape.fixed_bytes() + 12 * shape.bytes_per_block();
    let prompts: Vec<Vec<u32>> = (0..4).map(|seed| tokens(seed, 100)).collect();
    let want: Vec<_> = prompts.iter().map(|prompt| answer(&alone, request(prompt.clone(), 400)).0).collect();
    for cache_bytes in [0, 1 << 30] {
        let engine = engine(EngineOptions { memory_bytes, cache_bytes, ..roomy });
        let (handles, engine) = (0..4usize, &engine);
        std::thread::scope(|scope| {
            let prompts = &prompts;
            let threads: Vec<_> =
                handles.map(|i| scope.spawn(move || answer(engine, request(prompts[i].clone(), 400)).0)).collect();
            for (thread, want) in threads.into_iter().zip(&want) {
                assert_eq!(&thread.join().expect("answers"), want);
            }
        });
        wait_until("gauges return to zero", || engine.status().running == 0);
        let status = engine.status();
        assert!(status.preemptions_total > 0, "{status:?}");
        // Every token of every prompt, and what was preempted again.
        assert!(status.state_bytes_reserved == 0, "{status:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    /// Any chunking, any cache, any order of prompts that share prefixes: the same tokens with the same probabilities.
    #[test]
    fn luck_changes_no_bit(
        chunk_tokens in prop::sample::select(vec![32usize, 100, 128, 256]),
        cache_bytes in prop::sample::select(vec![0u64, 2_000_000, 1 << 30]),
        prompts in prop::collection::vec((1usize..450, 0u64..2, 1usize..60), 2..6),
    ) {
        let cold = engine(EngineOptions { max_running: 1, chunk_tokens: 512, ..LIMITS });
        let warm = engine(EngineOptions { chunk_tokens, cache_bytes, snapshot_spacing: 128, ..LIMITS });
        for (shared, stem, own) in prompts {
            let mut prompt = tokens(stem, shared);
            prompt.extend(tokens(50 + own as u64, own.min(511 - shared)));
            let request = request(prompt, 6.min(512 - shared - own));
            prop_assert_eq!(answer(&warm, request.clone()).0, answer(&cold, request).0);
        }
    }
}
