//! Neural engines behind the engine loop: rows of prefill and of decode steps are of two classes, which the cache must not
//! mix, and chunks must really be as wide as tiles. Numbers in the names of tests are those of the hybrid spec's section 13.

use std::path::Path;
use std::sync::Arc;

use troika_device::npu::NpuBackend;
use troika_engine::api::Generator;
use troika_engine::{DiskTier, Engine, EngineOptions, HybridOptions, Runner, StepRunner};
use troika_kvstore::Store;
use troika_testkit::npu::{FaultyNpu, NpuFaults};
use troika_testkit::scratch_dir;

use crate::cache::{CACHED, answer, record, request, tokens};
use crate::hybrid::{everything, nano, soft, wish};

/// A block of nano, and a tile.
const BLOCK: usize = 128;

const LIMITS: EngineOptions = EngineOptions { max_context_tokens: 2048, ..CACHED };

fn hybrid_on(backend: Arc<dyn NpuBackend>, tile: usize) -> Runner {
    nano(Some((backend, HybridOptions { tile, ..wish(everything(), 0) })))
}

fn start(runner: Runner, limits: EngineOptions, dir: Option<&Path>) -> Engine {
    let tier = dir.map(|dir| {
        let (store, items) = Store::open(dir, 1 << 30).expect("opens");
        DiskTier { store, items, weights: b"nano".to_vec(), tokenizer: b"t".to_vec() }
    });
    Engine::start_with_disk(runner, limits, tier).expect("starts")
}

fn hybrid(limits: EngineOptions) -> Engine {
    start(hybrid_on(soft(1), BLOCK), limits, None)
}

/// The prompt's last token and the answer are decoded, so the block that holds them is of neither class: were it kept, the
/// second turn would say something else than a cold run.
#[test]
fn acceptance_13_what_was_decoded_is_kept_for_nobody() {
    let (engine, cold) = (hybrid(LIMITS), hybrid(EngineOptions { cache_bytes: 0, ..LIMITS }));
    let mut conversation = tokens(1, 2 * BLOCK + 44);
    let first = record(&engine, request(conversation.clone(), 200));
    assert_eq!((first.stored_blocks, first.skipped_blocks, first.skipped_because), (2, 1, Some("mixed")));
    assert_eq!(engine.status().cache.skipped_mixed, 1);
    let (said, usage) = answer(&engine, request(conversation.clone(), 200));
    assert_eq!((usage.cached_tokens, &said), (2 * BLOCK, &answer(&cold, request(conversation.clone(), 200)).0));
    conversation.extend(said.iter().map(|(token, _)| *token));
    conversation.extend(tokens(2, 40));
    let (said, usage) = answer(&engine, request(conversation.clone(), 30));
    assert_eq!((usage.cached_tokens, said), (2 * BLOCK, answer(&cold, request(conversation.clone(), 30)).0));
    // Now it is all of one class.
    let (said, usage) = answer(&engine, request(conversation.clone(), 30));
    assert_eq!((usage.cached_tokens, said), (4 * BLOCK, answer(&cold, request(conversation, 30)).0));
}

/// On disk too, after restarts with and without engines, and with one whose numbers are wrong.
#[test]
fn acceptance_13_classes_share_nothing_on_disk() {
    let dir = scratch_dir();
    let ask = |runner: Runner| {
        let (said, usage) = answer(&start(runner, LIMITS, Some(dir.path())), request(tokens(3, 3 * BLOCK), 8));
        (said, usage.cached_tokens)
    };
    let (with, cached) = ask(hybrid_on(soft(1), BLOCK));
    assert_eq!(cached, 0);
    let (without, cached) = ask(nano(None));
    assert_eq!(cached, 0, "the primary device's class sees nothing of the engines'");
    assert_ne!(with, without, "or this test shows nothing");
    let corrupt = Arc::new(FaultyNpu::new(soft(1), NpuFaults { noise: 1e-3, ..NpuFaults::default() }));
    let found = ask(hybrid_on(corrupt, BLOCK));
    assert_eq!(found, (without.clone(), 2 * BLOCK), "in quarantine the class is closed, and the primary's goes on");
    assert_eq!(ask(hybrid_on(soft(1), 2 * BLOCK)).1, 0, "another plan");
    assert_eq!(ask(hybrid_on(soft(1), BLOCK)), (with, 2 * BLOCK));
    assert_eq!(ask(nano(None)), (without, 2 * BLOCK));
}

#[test]
fn acceptance_14_cold_and_restored_are_equal_at_every_boundary() {
    let prompt = tokens(4, 4 * BLOCK + 5);
    let cold = answer(&hybrid(EngineOptions { cache_bytes: 0, ..LIMITS }), request(prompt.clone(), 8)).0;
    for blocks in 1..=4 {
        let engine = hybrid(LIMITS);
        answer(&engine, request(prompt[..=blocks * BLOCK].to_vec(), 2));
        let (restored, usage) = answer(&engine, request(prompt.clone(), 8));
        assert_eq!((usage.cached_tokens, restored), (blocks * BLOCK, cold.clone()));
    }
}

/// What was decoded before a preemption is decoded again, not prefilled.
#[test]
fn preempted_ones_say_the_same() {
    let roomy = EngineOptions { memory_bytes: 1 << 32, ..LIMITS };
    let ask = |seed| request(tokens(seed, 100), 45);
    let alone = hybrid(EngineOptions { max_running: 1, cache_bytes: 0, ..roomy });
    let want: Vec<_> = (0..2).map(|seed| answer(&alone, ask(seed)).0).collect();
    let runner = hybrid_on(soft(1), BLOCK);
    let shape = runner.state_shape();
    let state_bytes = 2 * shape.fixed_bytes() + 3 * shape.bytes_per_block();
    let values_bytes = roomy.memory_bytes - hybrid(roomy).status().state_bytes_limit;
    let running = start(runner, EngineOptions { memory_bytes: values_bytes + state_bytes, ..roomy }, None);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| answer(&running, ask(1)).0);
        assert_eq!(answer(&running, ask(0)).0, want[0]);
        assert_eq!(other.join().expect("answers"), want[1]);
    });
    assert!(running.status().preemptions_total > 0, "{:?}", running.status());
}
