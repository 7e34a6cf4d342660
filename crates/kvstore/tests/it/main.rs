//! Files under a directory: whole or not there, never wrong, never more than the limit.

mod crash;
mod damage;
mod faults;

use std::fs;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;
use troika_kvcache::BlockHash;
use troika_kvstore::format::HEADER_BYTES;
use troika_kvstore::{Header, Kind, Name, Read, Store, StoreError, clear, usage, verify};
use troika_testkit::scratch_dir;

const NO_LIMIT: u64 = 1 << 40;
const PATIENCE: Duration = Duration::from_secs(60);

fn name(n: u8) -> Name {
    Name { kind: Kind::Rows, hash: BlockHash([n; 32]) }
}

fn payload(n: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add(n)).collect()
}

fn put(store: &Store, n: u8, bytes: usize) -> bool {
    let header = Header {
        name: name(n),
        layout: 1,
        depth: u32::from(n),
        parent: BlockHash([n - 1; 32]),
        payload_bytes: bytes as u64,
    };
    store.put(header, move || Some(payload(n, bytes)))
}

fn open(dir: &Path, limit: u64) -> (Store, Vec<Name>) {
    let (store, items) = Store::open(dir, limit).expect("opens");
    (store, items.into_iter().map(|item| item.header.name).collect())
}

#[test]
fn what_was_put_is_there_after_a_restart() {
    let dir = scratch_dir();
    let (store, items) = open(dir.path(), NO_LIMIT);
    assert!(items.is_empty());
    (1..=5).for_each(|n| assert!(put(&store, n, 1000 * usize::from(n))));
    drop(store);
    let (store, items) = open(dir.path(), NO_LIMIT);
    assert_eq!(items, (1..=5).map(name).collect::<Vec<_>>(), "parents first");
    for n in 1..=5 {
        assert_eq!(store.read(name(n), 1), Read::Found(payload(n, 1000 * usize::from(n))));
    }
    assert_eq!(store.read(name(9), 1), Read::Missing);
    assert_eq!(store.read(name(1), 2), Read::Missing, "of another layout");
    store.remove(&[name(2), name(3)]);
    store.flush(PATIENCE);
    assert_eq!(store.read(name(2), 1), Read::Missing);
    drop(store);
    assert_eq!(usage(dir.path()).expect("readable").files, 3);
    assert_eq!(verify(dir.path()).expect("readable"), (3, Vec::new()));
    assert_eq!(clear(dir.path()).expect("removable"), 3);
}

#[test]
fn a_directory_has_one_owner() {
    let dir = scratch_dir();
    let (_store, _) = open(dir.path(), NO_LIMIT);
    assert!(matches!(Store::open(dir.path(), NO_LIMIT), Err(StoreError::InUse { .. })));
}

#[test]
fn half_written_files_go_and_foreign_ones_count() {
    let dir = scratch_dir();
    drop(open(dir.path(), NO_LIMIT));
    fs::write(dir.path().join("tmp-1-1"), vec![0; 5000]).expect("writable");
    fs::write(dir.path().join(format!("{}.damaged", name(3))), vec![0; 500]).expect("writable");
    fs::write(dir.path().join("holiday.jpg"), vec![0; 7000]).expect("writable");
    fs::create_dir(dir.path().join("folder")).expect("writable");
    fs::write(dir.path().join("folder/more"), vec![0; 3000]).expect("writable");
    let (store, _) = open(dir.path(), NO_LIMIT);
    assert_eq!(store.status().foreign_bytes, 10_000);
    assert!(!dir.path().join("tmp-1-1").exists());
    assert!(!dir.path().join(format!("{}.damaged", name(3))).exists());
    assert!(dir.path().join("holiday.jpg").exists());
}

/// A folder named by mistake: names that only look like ours are somebody's.
#[test]
fn foreign_files_are_never_touched() {
    let dir = scratch_dir();
    let names = ["tmp-letter.txt", "tmp-1", "tmp-1-x", "photo.damaged", ".damaged", "ab.rows", "x.rows.damaged"];
    for foreign in names {
        fs::write(dir.path().join(foreign), "mine").expect("writable");
    }
    let (store, items) = open(dir.path(), NO_LIMIT);
    assert_eq!((items.len(), store.status().foreign_bytes), (0, 4 * names.len() as u64));
    put(&store, 1, 100);
    drop(store);
    assert_eq!(clear(dir.path()).expect("nobody has it open"), 1);
    for foreign in names {
        assert_eq!(fs::read(dir.path().join(foreign)).expect(foreign), b"mine", "{foreign}");
    }
}

/// What was wrong stays so: also for processes that come later, also if the list of it is damaged.
#[test]
fn closed_classes_stay_closed() {
    let dir = scratch_dir();
    let (store, _) = open(dir.path(), 1 << 20);
    assert_eq!(store.times_closed("fast+hybrid:1"), 0);
    store.close_class("fast+hybrid:1");
    store.close_class("fast+hybrid:1");
    store.close_class("fast");
    assert_eq!((store.times_closed("fast+hybrid:1"), store.times_closed("fast")), (2, 1));
    drop(store);
    let (store, _) = open(dir.path(), 1 << 20);
    let times = ["fast+hybrid:1", "fast", "fast+hybrid:2"].map(|class| store.times_closed(class));
    assert_eq!(times, [2, 1, 0]);
    let usage = usage(dir.path()).expect("readable");
    assert_eq!((usage.files, usage.foreign_files), (1, 0));
    drop(store);
    let path = dir.path().join("troika-closed-classes");
    let mut bytes = fs::read(&path).expect("it is there");
    bytes[70] ^= 1;
    fs::write(&path, bytes).expect("writable");
    let Err(error) = Store::open(dir.path(), 1 << 20) else { panic!("nobody knows what is closed") };
    assert!(error.to_string().contains("troika cache clear"), "{error}");
    clear(dir.path()).expect("it goes");
    assert_eq!(open(dir.path(), 1 << 20).0.times_closed("fast+hybrid:1"), 0, "and all that it was about");
}

#[test]
fn what_is_open_is_not_cleared() {
    let dir = scratch_dir();
    let (store, _) = open(dir.path(), NO_LIMIT);
    put(&store, 1, 100);
    store.flush(PATIENCE);
    assert!(matches!(clear(dir.path()), Err(StoreError::InUse { .. })));
    assert_eq!(store.read(name(1), 1), Read::Found(payload(1, 100)));
    drop(store);
    assert_eq!(clear(dir.path()).expect("nobody has it open"), 1);
}

/// Opening a pipe would wait for ever.
#[cfg(unix)]
#[test]
fn pipes_and_links_are_foreign() {
    let dir = scratch_dir();
    let made = std::process::Command::new("mkfifo").arg(dir.path().join(name(1).to_string())).status();
    assert!(made.expect("mkfifo is there").success());
    std::os::unix::fs::symlink("/etc/hostname", dir.path().join(name(2).to_string())).expect("writable");
    let (store, items) = open(dir.path(), NO_LIMIT);
    assert!(items.is_empty() && store.status().quarantined == 0);
}

#[test]
fn the_limit_holds_whatever_else_is_there() {
    let dir = scratch_dir();
    let limit = 50_000;
    let (store, _) = open(dir.path(), limit);
    for n in 1..=60 {
        if n == 20 {
            fs::write(dir.path().join("foreign"), vec![0; 20_000]).expect("writable");
        }
        put(&store, n, 3000);
        store.flush(PATIENCE);
        let used = usage(dir.path()).expect("readable").total_bytes();
        assert!(used <= limit || n >= 20, "{used} bytes");
        if n == 30 {
            // Whoever decides makes room.
            store.remove(&(1..=16).map(name).collect::<Vec<_>>());
        }
    }
    let status = store.status();
    assert!(status.dropped > 0 && status.foreign_bytes >= 20_000, "{status:?}");
    assert_eq!(store.take_lost().len() as u64, status.dropped);
    assert!(usage(dir.path()).expect("readable").total_bytes() <= limit);
}

#[test]
fn a_vanished_directory_is_survived() {
    let dir = scratch_dir();
    let inner = dir.path().join("cache");
    let (store, _) = open(&inner, NO_LIMIT);
    put(&store, 1, 100);
    store.flush(PATIENCE);
    fs::remove_dir_all(&inner).expect("removable");
    assert_eq!(store.read(name(1), 1), Read::Missing);
    for n in 2..=6 {
        put(&store, n, 100);
        store.flush(PATIENCE);
    }
    let status = store.status();
    assert_eq!((status.failed_writes, status.dropped), (1, 4), "it is not ours any more");
    let reason = status.write_failure.expect("writing is off");
    assert!(reason.contains("removed or replaced"), "{reason}");
    assert_eq!(store.take_lost(), [name(2)]);
    // What is there later may belong to another process.
    fs::create_dir(&inner).expect("writable");
    for n in 1..=200 {
        put(&store, n, 100);
    }
    store.flush(PATIENCE);
    assert_eq!((store.status().written, fs::read_dir(&inner).expect("readable").count()), (1, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A byte flipped or a tail cut off anywhere: found, set aside, counted once, and never read.
    #[test]
    fn damage_is_found(at in 0usize..HEADER_BYTES + 600, bit in 0u8..8, cut: bool) {
        let dir = scratch_dir();
        let (store, _) = open(dir.path(), NO_LIMIT);
        put(&store, 1, 600);
        put(&store, 2, 600);
        drop(store);
        let path = dir.path().join(name(1).to_string());
        let mut bytes = fs::read(&path).expect("written");
        if cut { bytes.truncate(at) } else { bytes[at] ^= 1 << bit }
        fs::write(&path, bytes).expect("writable");
        prop_assert_eq!(verify(dir.path()).expect("readable").1.len(), 1);
        let (store, items) = open(dir.path(), NO_LIMIT);
        if items.contains(&name(1)) {
            prop_assert_eq!(store.read(name(1), 1), Read::Damaged);
        }
        prop_assert_eq!(store.read(name(1), 1), Read::Missing);
        prop_assert_eq!(store.read(name(2), 1), Read::Found(payload(2, 600)));
        prop_assert_eq!(store.status().quarantined, 1);
    }
}
