//! The model we ship, in the class it is served in: the same tokens with the same probabilities, however they come about.

use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use troika_base::NumericClass;
use troika_engine::api::{Event, GenerateRequest, Generator};
use troika_engine::{DiskTier, Engine, EngineOptions, StepRunner};
use troika_kvstore::Store;
use troika_testkit::{repo_root, scratch_dir};

use crate::cache::{CACHED, answer, begin, hear, request, tokens};
use crate::serving::{Channel, wait_until};
use crate::support::{open_path, options_for};

/// Three blocks and five tokens.
const PROMPT: usize = 3 * 128 + 5;

fn nano(options: EngineOptions, cache_dir: Option<&Path>) -> Engine {
    let tier = cache_dir.map(|dir| {
        let (store, items) = Store::open(dir, 1 << 30).expect("opens");
        DiskTier { store, items, weights: b"nano".to_vec(), tokenizer: b"t".to_vec() }
    });
    Engine::start_with_disk(runner(), options, tier).expect("starts")
}

fn runner() -> troika_engine::Runner {
    open_path(&repo_root().join("models/nano"), options_for(NumericClass::Fast))
}

/// Hears the first token of a request and goes away.
fn cancel_after_the_first_token(engine: &Engine, request: GenerateRequest) {
    let (sender, events) = channel();
    let id = engine.submit(request, Box::new(Channel(sender))).expect("accepted");
    while !matches!(events.recv_timeout(Duration::from_secs(60)).expect("answers"), Event::Token { .. }) {}
    engine.cancel(id);
}

#[test]
fn the_same_tokens_however_they_come_about() {
    let ask = || request(tokens(1, PROMPT), 12);
    let cold = answer(&nano(EngineOptions { cache_bytes: 0, chunk_tokens: 512, ..CACHED }, None), ask()).0;
    // From memory; chunked otherwise.
    let running = nano(EngineOptions { chunk_tokens: 100, ..CACHED }, None);
    for cached in [0, 384] {
        let (said, usage) = answer(&running, ask());
        assert_eq!((usage.cached_tokens, &said), (cached, &cold));
    }
    // Among others, one of which goes away.
    let running = nano(EngineOptions { chunk_tokens: 64, ..CACHED }, None);
    std::thread::scope(|scope| {
        for seed in 2..4 {
            scope.spawn({
                let running = &running;
                move || answer(running, request(tokens(seed, 50 + 70 * seed as usize), 12))
            });
        }
        let leaving = scope.spawn(|| cancel_after_the_first_token(&running, request(tokens(1, 300), 200)));
        assert_eq!(answer(&running, ask()).0, cold);
        leaving.join().expect("answers");
    });
    // From disk, after a restart, by way of the first one's files.
    let dir = scratch_dir();
    let small = EngineOptions { cache_bytes: 1 << 24, ..CACHED };
    assert_eq!(answer(&nano(small, Some(dir.path())), ask()).0, cold);
    let running = nano(small, Some(dir.path()));
    let (said, usage) = answer(&running, ask());
    assert_eq!((usage.cached_tokens, said), (384, cold));
    assert_eq!(running.status().cache.disk_read, 4, "three blocks and a boundary");
}

#[test]
fn preempted_ones_say_the_same() {
    let roomy = EngineOptions { memory_bytes: 1 << 32, chunk_tokens: 64, ..CACHED };
    let ask = |seed| request(tokens(seed, 100), 45);
    let alone = nano(EngineOptions { max_running: 1, cache_bytes: 0, ..roomy }, None);
    let want: Vec<_> = (0..2).map(|seed| answer(&alone, ask(seed)).0).collect();
    let values_bytes = roomy.memory_bytes - nano(roomy, None).status().state_bytes_limit;
    let runner = runner();
    let shape = runner.state_shape();
    // Both prompts fit, and the second block of one of them.
    let memory_bytes = values_bytes + 2 * shape.fixed_bytes() + 3 * shape.bytes_per_block();
    let running = nano(EngineOptions { memory_bytes, ..roomy }, None);
    // Side by side from the start, or the one would be through before the other needs its room.
    let both = [0, 1].map(|seed| begin(&running, ask(seed)));
    assert_eq!(both.each_ref().map(|events| hear(events).0).as_slice(), want);
    assert!(running.status().preemptions_total > 0, "{:?}", running.status());
}

#[test]
fn three_blocks_and_five_tokens_twice() {
    let dir = scratch_dir();
    for cache_dir in [None, Some(dir.path())] {
        let again = |engine: &Engine, seed| answer(engine, request(tokens(seed, PROMPT), 2)).1.cached_tokens;
        let running = nano(CACHED, cache_dir);
        assert_eq!([again(&running, 1), again(&running, 1)], [0, 384]);
        cancel_after_the_first_token(&running, request(tokens(2, PROMPT), 300));
        assert_eq!(again(&running, 2), 384, "the first was cancelled");
        cancel_after_the_first_token(&running, request(tokens(3, PROMPT), 300));
        wait_until("all have ended", || running.status().requests_total == 5);
        drop(running);
        let running = nano(CACHED, cache_dir);
        let kept = if cache_dir.is_some() { 384 } else { 0 };
        assert_eq!([1, 2, 3].map(|seed| again(&running, seed)), [kept; 3], "after a restart");
    }
}
