//! Neural engines behind the engine loop: rows of prefill and of decode steps are of two classes, which the cache must not
//! mix, and chunks must really be as wide as tiles. Numbers in the names of tests are those of the hybrid spec's section 13.

use std::path::Path;
use std::sync::Arc;

use troika_device::npu::sim::{Sim, SimFaults};
use troika_device::npu::{Limits, NpuBackend};
use troika_engine::api::Generator;
use troika_engine::{DiskTier, Engine, EngineOptions, HybridOptions, Runner, StepRunner};
use troika_kvstore::Store;
use troika_testkit::scratch_dir;

use crate::cache::{CACHED, answer, begin, hear, record, request, tokens};
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

/// An engine whose bits the CPU cannot repeat computes a row as its tile has it, so nothing of it serves anybody else.
#[test]
fn rows_that_cannot_be_repeated_are_kept_for_nobody() {
    let backend = || {
        let limits = Limits { repeatable: false, ..soft(1).limits().clone() };
        Arc::new(Sim::new(soft(1), SimFaults::default()).with_limits(limits))
    };
    let dir = scratch_dir();
    for dir in [None, Some(dir.path()), Some(dir.path())] {
        let engine = start(hybrid_on(backend(), BLOCK), LIMITS, dir);
        let first = record(&engine, request(tokens(6, 3 * BLOCK + 1), 2));
        assert!(first.ledger.total_operations().dispatched() > 0, "the engine takes part");
        assert_eq!((first.stored_blocks, first.skipped_blocks, first.skipped_because), (0, 3, Some("mixed")));
        let (_, usage) = answer(&engine, request(tokens(6, 3 * BLOCK + 1), 2));
        assert_eq!((usage.cached_tokens, engine.status().cache.skipped_mixed), (0, 6));
    }
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
    let corrupt = Arc::new(Sim::new(soft(1), SimFaults { noise: 1e-3, ..SimFaults::default() }));
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
    // Side by side from the start, or the one would be through before the other needs its room.
    let both = [0, 1].map(|seed| begin(&running, ask(seed)));
    assert_eq!(both.each_ref().map(|events| hear(events).0).as_slice(), want);
    assert!(running.status().preemptions_total > 0, "{:?}", running.status());
}

/// A geometry, as the command line may ask for it.
#[derive(Clone, Copy, Debug)]
struct Ask {
    tile: usize,
    chunk_tokens: usize,
    honour_chunk: bool,
    snapshot_spacing: usize,
    cache_bytes: u64,
}

/// Dispatched is planned, and planned is what prompts of one tile and of two and a half have, unless the user forbids it.
fn assert_tiles_are_reached(ask: Ask) {
    let Ask { tile, chunk_tokens, honour_chunk, snapshot_spacing, cache_bytes } = ask;
    let max_context_tokens = 4 * tile + 64;
    let limits =
        EngineOptions { chunk_tokens, honour_chunk, snapshot_spacing, cache_bytes, max_context_tokens, ..LIMITS };
    let engine = start(hybrid_on(soft(1), tile), limits, None);
    let reaches = !honour_chunk || chunk_tokens >= tile;
    // The last token is decoded: one tile and nothing, two and a half.
    for (seed, rows) in [(1, tile), (2, 2 * tile + tile / 2)] {
        let record = record(&engine, request(tokens(seed, rows + 1), 2));
        let tiles: usize = record.chunks.iter().map(|chunk| chunk.width / tile).sum();
        assert_eq!(tiles, if reaches { rows / tile } else { 0 }, "{ask:?}, {rows} rows: {:?}", record.chunks);
        let operations = record.ledger.total_operations();
        assert_eq!(operations.planned, operations.dispatched(), "{ask:?}, {rows} rows");
        let least = 40 * tiles as u64;
        assert!(operations.planned >= least && (operations.planned > 0) == (tiles > 0), "{ask:?}: {operations:?}");
        let tail = operations.fallbacks.values().sum::<u64>() > 0;
        assert_eq!(tail, !reaches || rows % tile > 0, "{ask:?}, {rows} rows: {operations:?}");
        // A prefix that is found again is not computed again, and the tiles after it are as before.
        if cache_bytes > 0 {
            let again = self::record(&engine, request(tokens(seed, rows + 1), 2));
            let operations = again.ledger.total_operations();
            assert_eq!(again.usage.cached_tokens > 0, rows >= BLOCK, "{ask:?}");
            assert_eq!(operations.planned, operations.dispatched(), "{ask:?}");
        }
    }
    let status = engine.status().hybrid.expect("engines were asked for");
    let want = if reaches { "engaged" } else { "idle(step_limit)" };
    assert_eq!((status.state.as_str(), status.tile), (want, tile), "{ask:?}");
}

/// Chunks reach the tile through the scheduler, with and without a cache.
#[test]
fn acceptance_01_steps_are_as_wide_as_tiles() {
    for tile in [BLOCK / 2, BLOCK, 2 * BLOCK] {
        for chunk_tokens in [tile / 2, tile - 1, tile, 2 * tile] {
            for cache_bytes in [0, 1 << 30] {
                let snapshot_spacing = LIMITS.snapshot_spacing;
                let (honour_chunk, cache_bytes) = (chunk_tokens == tile - 1 && cache_bytes == 0, cache_bytes);
                assert_tiles_are_reached(Ask { tile, chunk_tokens, honour_chunk, snapshot_spacing, cache_bytes });
            }
        }
    }
}

/// Every step; with a cache if there is a distance of snapshots.
fn part_of_the_matrix(tile: usize, honour_chunk: bool, snapshot_spacing: Option<usize>) {
    let cache_bytes = if snapshot_spacing.is_some() { 1 << 32 } else { 0 };
    let snapshot_spacing = snapshot_spacing.unwrap_or(LIMITS.snapshot_spacing);
    for chunk_tokens in [tile / 2, tile - 1, tile, 2 * tile, 2 * tile + tile / 2] {
        assert_tiles_are_reached(Ask { tile, chunk_tokens, honour_chunk, snapshot_spacing, cache_bytes });
    }
}

/// Tests for each tile, without a cache and with one at each distance of snapshots, with and without a step that the user insists
/// on: each can be run by itself.
macro_rules! whole_matrix {
    ($($tile:literal $name:ident)*) => {
        mod the_whole_matrix {
            $(mod $name {
                whole_matrix! { @tests $tile
                    acceptance_01_uncached: false, None;
                    acceptance_01_cached_by_blocks: false, Some(super::super::BLOCK);
                    acceptance_01_cached_by_tiles: false, Some($tile);
                    acceptance_01_cached_by_2048: false, Some(2048);
                    acceptance_01_honoured_uncached: true, None;
                    acceptance_01_honoured_cached_by_blocks: true, Some(super::super::BLOCK);
                    acceptance_01_honoured_cached_by_tiles: true, Some($tile);
                    acceptance_01_honoured_cached_by_2048: true, Some(2048);
                }
            })*
        }
    };
    (@tests $tile:literal $($name:ident: $honour:literal, $spacing:expr;)*) => {
        $(
            #[test]
            #[ignore = "minutes for all tiles"]
            fn $name() {
                super::super::part_of_the_matrix($tile, $honour, $spacing);
            }
        )*
    };
}

whole_matrix! {
    64 tile_64
    128 tile_128
    256 tile_256
    512 tile_512
    1024 tile_1024
    2048 tile_2048
    4096 tile_4096
}

#[test]
fn acceptance_02_a_narrow_step_that_the_user_wants_leaves_engines_idle() {
    let limits = EngineOptions { chunk_tokens: BLOCK / 2, honour_chunk: true, ..LIMITS };
    let engine = hybrid(limits);
    let state = || engine.status().hybrid.expect("engines were asked for").state;
    assert_eq!(state(), "idle(step_limit)", "from the start");
    let record = record(&engine, request(tokens(1, 3 * BLOCK), 2));
    assert!(record.chunks.iter().all(|chunk| chunk.width <= BLOCK / 2), "{:?}", record.chunks);
    assert_eq!(record.ledger.total_operations().planned, 0);
    assert_eq!(state(), "idle(step_limit)");
}

/// Wide steps do not make the cache coarser: prompts of a third of a tile that share their first part are found.
#[test]
fn acceptance_15_short_prompts_hit_as_often_as_without_engines() {
    let shared = tokens(5, 2 * BLOCK + 9);
    let cached = |engine: Engine| {
        (0..4).for_each(|seed| drop(answer(&engine, request([&shared[..], &tokens(20 + seed, 70)].concat(), 2))));
        engine.status().cached_tokens_total
    };
    let with = cached(start(hybrid_on(soft(1), 8 * BLOCK), LIMITS, None));
    assert_eq!(with, cached(start(nano(None), LIMITS, None)));
    assert_eq!(with, 3 * 2 * BLOCK as u64, "of all but the first");
}
