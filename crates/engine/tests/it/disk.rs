//! The tier on disk through the engine: after a restart, under a limit, with damage, with nowhere to write.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use troika_base::NumericClass;
use troika_engine::api::{Event, Generator};
use troika_engine::{DiskTier, Engine, EngineOptions};
use troika_kvstore::{Store, usage};
use troika_testkit::disk::{FakeDisk, Faults};
use troika_testkit::scratch_dir;

use crate::cache::{CACHED, answer, request, tokens};
use crate::serving::{Channel, wait_until};
use crate::support::{open, options, options_for};

/// An engine on `dir`; `weights` stands for the model's digest.
fn engine(dir: &Path, limit: u64, weights: &str, options_of_engine: EngineOptions) -> Engine {
    let (store, items) = Store::open(dir, limit).expect("opens");
    let tier = DiskTier { store, items, weights: weights.into(), tokenizer: b"t".to_vec() };
    Engine::start_with_disk(open("tiny-bf16", options()), options_of_engine, Some(tier)).expect("starts")
}

/// Rows of `official` lie packed: about half of the bytes in this model, and not one bit differs.
#[test]
fn official_rows_are_packed_and_come_back_equal() {
    let prompt = tokens(1, 3 * 128 + 5);
    let mut bytes = Vec::new();
    for class in [NumericClass::Official, NumericClass::Fast] {
        let dir = scratch_dir();
        let mut answers = Vec::new();
        for cached in [0, 384] {
            let (store, items) = Store::open(dir.path(), 1 << 30).expect("opens");
            let tier = DiskTier { store, items, weights: b"w".to_vec(), tokenizer: b"t".to_vec() };
            let runner = open("tiny-bf16", options_for(class));
            let running = Engine::start_with_disk(runner, CACHED, Some(tier)).expect("starts");
            let (said, usage) = answer(&running, request(prompt.clone(), 20));
            assert_eq!(usage.cached_tokens, cached, "{class}");
            answers.push(said);
            running.shutdown();
            assert_eq!(running.status().cache.disk_dropped, 0, "{class}: every row is on the grid");
        }
        assert_eq!(answers[0], answers[1], "{class}");
        bytes.push(usage(dir.path()).expect("readable").bytes);
    }
    assert!(bytes[0] * 10 < bytes[1] * 6, "{bytes:?}");
}

/// An engine on a disk that fails when told to.
fn engine_on(disk: &Arc<FakeDisk>, options_of_engine: EngineOptions) -> Engine {
    let (store, items) = Store::open_on(disk.clone(), Path::new("cache"), 1 << 30).expect("opens");
    let tier = DiskTier { store, items, weights: b"w".to_vec(), tokenizer: b"t".to_vec() };
    Engine::start_with_disk(open("tiny-bf16", options()), options_of_engine, Some(tier)).expect("starts")
}

/// While the prefix of one is read, slowly, the others go on.
#[test]
fn a_slow_disk_holds_up_nobody_else() {
    let disk = FakeDisk::new(1);
    let prompt = tokens(1, 3 * 128 + 5);
    let (cold, _) = answer(&engine_on(&disk, CACHED), request(prompt.clone(), 8));
    let running = engine_on(&disk, CACHED);
    let slow = Faults { read_takes: Duration::from_secs(60), ..Faults::default() };
    disk.set_faults(slow.clone());
    let (sender, events) = channel();
    let stream = running.submit(request(tokens(2, 5), 500), Box::new(Channel(sender))).expect("accepted");
    let next = || loop {
        match events.recv_timeout(Duration::from_secs(60)).expect("answers") {
            Event::Token { .. } => return,
            Event::Prefilled { .. } => {}
            end => panic!("ended with {end:?}"),
        }
    };
    next();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| answer(&running, request(prompt.clone(), 8)));
        wait_until("its prefix is being read", || running.status().cache.disk_loading == 1);
        (0..5).for_each(|_| next());
        assert_eq!(running.status().cache.disk_loading, 1);
        disk.set_faults(Faults::default());
        let (warm, usage) = second.join().expect("answers");
        assert_eq!((usage.cached_tokens, warm), (384, cold));
    });
    // One that goes away while it waits leaves nothing behind.
    let small = EngineOptions { cache_bytes: 1, ..CACHED };
    running.cancel(stream);
    drop(running);
    let running = engine_on(&disk, small);
    disk.set_faults(slow);
    let (sender, _events) = channel();
    let id = running.submit(request(prompt, 8), Box::new(Channel(sender))).expect("accepted");
    wait_until("its prefix is being read", || running.status().cache.disk_loading == 1);
    running.cancel(id);
    wait_until("it is gone", || running.status().requests_total == 1);
    let status = running.status();
    disk.set_faults(Faults::default());
    assert_eq!((status.cache.disk_loading, status.running, status.state_bytes_reserved), (0, 0, 0), "{status:?}");
}

/// Whatever the disk does, answers are those of an engine without one, and the status says so.
#[test]
fn a_failing_disk_changes_no_answer() {
    let disk = FakeDisk::new(2);
    let ask = |engine: &Engine, seed| answer(engine, request(tokens(seed, 300), 4)).0;
    // More than memory holds, so that the disk is asked again and again.
    let small = EngineOptions { cache_bytes: 2_000_000, ..CACHED };
    let healthy = engine_on(&disk, small);
    let cold: Vec<_> = (0..8).map(|seed| ask(&healthy, seed)).collect();
    drop(healthy);
    let unreadable = Faults { read_error_one_in: 1, ..Faults::default() };
    let full = Faults { capacity_bytes: Some(100_000), ..Faults::default() };
    let unwritable = Faults { read_only: true, ..Faults::default() };
    for (round, faults) in [unreadable, full, unwritable].into_iter().enumerate() {
        let running = engine_on(&disk, small);
        disk.set_faults(faults.clone());
        for seed in (0..8).chain(0..8) {
            assert_eq!(ask(&running, seed), cold[seed as usize], "{faults:?}");
            ask(&running, 100 * (1 + round as u64) + seed);
        }
        running.shutdown();
        let cache = running.status().cache;
        let failed = cache.disk_failed_writes + cache.disk_failed_reads;
        assert!(cache.disk_failed && failed >= 3, "{faults:?}: {cache:?}");
        disk.set_faults(Faults::default());
    }
}

#[test]
fn a_restart_forgets_nothing() {
    let dir = scratch_dir();
    let prompt = tokens(1, 3 * 128 + 5);
    let first = engine(dir.path(), 1 << 30, "w", CACHED);
    let (cold, usage) = answer(&first, request(prompt.clone(), 20));
    assert_eq!(usage.cached_tokens, 0);
    wait_until("the status has what was written meanwhile", || first.status().cache.disk_written == 4);
    first.shutdown();
    assert!(first.status().cache.disk_blocks == 3, "{:?}", first.status().cache);
    drop(first);
    let second = engine(dir.path(), 1 << 30, "w", CACHED);
    let (warm, usage) = answer(&second, request(prompt.clone(), 20));
    assert_eq!((usage.cached_tokens, warm), (384, cold.clone()));
    let cache = second.status().cache;
    assert_eq!((cache.disk_read, cache.disk_quarantined), (4, 0), "three blocks and a boundary");
    drop(second);
    let other = engine(dir.path(), 1 << 30, "other weights", CACHED);
    let (again, usage) = answer(&other, request(prompt, 20));
    assert_eq!((usage.cached_tokens, again), (0, cold), "of other weights nothing is used");
}

#[test]
fn a_conversation_survives_restarts_with_little_memory() {
    let dir = scratch_dir();
    let limits = EngineOptions { max_context_tokens: 4096, cache_bytes: 4_000_000, ..CACHED };
    let mut running = engine(dir.path(), 1 << 30, "w", limits);
    let mut conversation = Vec::new();
    for turn in 0..20 {
        if turn % 4 == 3 {
            drop(running);
            running = engine(dir.path(), 1 << 30, "w", limits);
        }
        let before = conversation.len();
        conversation.extend(tokens(100 + turn, 40 + turn as usize * 3));
        let (said, usage) = answer(&running, request(conversation.clone(), 30 + turn as usize));
        assert!(usage.cached_tokens + 128 >= before, "turn {turn}: {} of {before}", usage.cached_tokens);
        conversation.extend(said.iter().map(|(token, _)| *token));
    }
}

#[test]
fn damage_is_a_miss() {
    let dir = scratch_dir();
    let prompt = tokens(1, 3 * 128 + 5);
    let first = engine(dir.path(), 1 << 30, "w", CACHED);
    let (cold, _) = answer(&first, request(prompt.clone(), 20));
    drop(first);
    let mut files: Vec<_> = fs::read_dir(dir.path()).expect("readable").flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.retain(|path| path.extension().is_some());
    assert!(files.len() >= 4);
    for (index, path) in files.iter().enumerate() {
        let Ok(good) = fs::read(path) else { continue };
        let mut bad = good.clone();
        // Header, payload, or the end.
        match index % 3 {
            0 => bad[40] ^= 1,
            1 => bad[5000] ^= 0x80,
            _ => bad.truncate(good.len() - 1),
        }
        fs::write(path, &bad).expect("writable");
        let running = engine(dir.path(), 1 << 30, "w", CACHED);
        assert_eq!(answer(&running, request(prompt.clone(), 20)).0, cold, "{}", path.display());
        assert_eq!(running.status().cache.disk_quarantined, 1, "{}", path.display());
        drop(running);
        // What it computed again is there again.
    }
}

#[test]
fn ten_megabytes_are_ten_megabytes() {
    let dir = scratch_dir();
    let limit = 10_000_000;
    let total = || usage(dir.path()).expect("readable").total_bytes();
    for (round, weights) in ["a", "b"].into_iter().enumerate() {
        if round == 1 {
            fs::write(dir.path().join("tmp-1-1"), vec![0; 3_000_000]).expect("writable");
            fs::write(dir.path().join("foreign"), vec![0; 2_000_000]).expect("writable");
        }
        let running = engine(dir.path(), limit, weights, CACHED);
        for seed in 0..25 {
            answer(&running, request(tokens(seed + 1000 * round as u64, 500), 2));
            if round == 0 || seed > 0 {
                assert!(total() <= limit, "{} bytes in round {round}", total());
            }
        }
        assert!(running.status().cache.disk_written > 0, "{:?}", running.status().cache);
        drop(running);
        assert!(total() <= limit && total() > limit / 2, "{} bytes", total());
    }
}

/// Found in memory again and again, a prefix is not what goes from the disk.
#[test]
fn use_in_memory_is_use_on_disk() {
    let dir = scratch_dir();
    let (limit, prompt) = (5_000_000, tokens(1, 3 * 128 + 5));
    let running = engine(dir.path(), limit, "w", CACHED);
    for seed in 2..40 {
        answer(&running, request(prompt.clone(), 2));
        answer(&running, request(tokens(seed, 500), 2));
    }
    assert!(running.status().cache.disk_used_bytes > limit / 2 && running.status().cache.blocks > 39 * 3 / 2);
    drop(running);
    let again = engine(dir.path(), limit, "w", CACHED);
    assert_eq!(answer(&again, request(prompt, 2)).1.cached_tokens_from_disk, 384);
    assert_eq!(answer(&again, request(tokens(2, 500), 2)).1.cached_tokens, 0, "that one had to go");
}

#[test]
fn a_folder_that_vanishes_ends_the_tier_and_nothing_else() {
    let dir = scratch_dir();
    let inner = dir.path().join("cache");
    let running = engine(&inner, 1 << 30, "w", CACHED);
    let (cold, _) = answer(&running, request(tokens(1, 300), 4));
    // The writer may still add files while they are removed; it never makes the folder again.
    while let Err(error) = fs::remove_dir_all(&inner) {
        assert_eq!(error.kind(), ErrorKind::DirectoryNotEmpty, "{error}");
    }
    for seed in 2..6 {
        answer(&running, request(tokens(seed, 300), 4));
    }
    assert_eq!(answer(&running, request(tokens(1, 300), 4)).0, cold);
    running.shutdown();
    assert!(running.status().cache.disk_failed);
}

/// Prints how long the first token takes for 4,096 tokens, cold and with all but the last 100 kept.
#[test]
#[ignore = "measures; run it alone, optimised"]
fn time_to_first_token_of_a_warm_prefix() {
    let dir = scratch_dir();
    let limits = EngineOptions { max_context_tokens: 8192, chunk_tokens: 512, ..CACHED };
    let shared = tokens(1, 3996);
    let prompt = |seed| [shared.clone(), tokens(seed, 100)].concat();
    let first = engine(dir.path(), 1 << 30, "w", limits);
    let time = |engine: &Engine, seed| {
        let (_, usage) = answer(engine, request(prompt(seed), 2));
        (usage.cached_tokens, usage.queue_us + usage.prefill_us)
    };
    let cold = time(&first, 11);
    let second = time(&first, 12);
    let ram = time(&first, 13);
    drop(first);
    let disk = time(&engine(dir.path(), 1 << 30, "w", limits), 14);
    for (what, (cached, us)) in [("cold", cold), ("parting", second), ("memory", ram), ("disk", disk)] {
        println!("{what:>8}: {cached:>5} tokens cached, {us:>8} us, {:>5.1} %", 100.0 * us as f64 / cold.1 as f64);
    }
}
