//! A disk that is full, fails, cannot be changed, or was replaced: the store goes on without it, says so, and comes back.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use troika_kvstore::files::FileSystem as _;
use troika_kvstore::format::HEADER_BYTES;
use troika_kvstore::{Hands, Read, Store, StoreError, usage};
use troika_testkit::disk::{FakeDisk, Faults};
use troika_testkit::scratch_dir;

use super::{NO_LIMIT, PATIENCE, name, open, payload, put};

const DIR: &str = "cache";

fn on(disk: &Arc<FakeDisk>) -> (Store, Hands) {
    let (store, _, hands) = Store::open_idle(disk.clone(), Path::new(DIR), NO_LIMIT).expect("opens");
    (store, hands)
}

fn work(hands: &Hands) {
    while hands.has_writes() {
        hands.write_one();
    }
    while hands.has_reads() {
        hands.read_one();
    }
}

fn write(store: &Store, hands: &Hands, n: u8) -> bool {
    let taken = put(store, n, 1000);
    work(hands);
    taken
}

/// After three failures one write of 64 is tried; when that works, so do the others.
#[test]
fn a_full_or_unwritable_disk_is_left_alone_and_tried_again() {
    let full = Faults { capacity_bytes: Some(2500), ..Faults::default() };
    let failing = Faults { write_error_one_in: 1, ..Faults::default() };
    let read_only = Faults { read_only: true, ..Faults::default() };
    for (faults, words) in [(full, "space"), (failing, "input/output"), (read_only, "read-only")] {
        let disk = FakeDisk::new(1);
        let (store, hands) = on(&disk);
        assert!(write(&store, &hands, 1));
        disk.set_faults(faults);
        for n in 2..=4 {
            write(&store, &hands, n);
        }
        // A full disk takes the second, but neither of the next.
        write(&store, &hands, 5);
        let status = store.status();
        let failure = status.write_failure.expect("writing is off");
        assert!(failure.contains(words), "{failure}");
        assert_eq!(status.failed_writes, 3);
        let before = status.dropped;
        let taken: Vec<u8> = (10..138).filter(|n| write(&store, &hands, *n)).collect();
        assert_eq!((taken.len(), store.status().failed_writes), (2, 5), "one of 64 is tried");
        assert_eq!(store.status().dropped, before + 126);
        assert_eq!(store.read(name(1), 1), Read::Found(payload(1, 1000)), "reading goes on");
        assert!(disk.files().keys().all(|path| !path.to_string_lossy().contains("tmp")) || words == "read-only");
        disk.set_faults(Faults::default());
        let taken: Vec<u8> = (10..138).filter(|n| write(&store, &hands, *n)).collect();
        assert!(taken.len() > 64, "back after the next try: {}", taken.len());
        let status = store.status();
        assert_eq!(
            (status.write_failure, status.failed_writes, status.written),
            (None, 5, 1 + taken.len() as u64 + u64::from(words == "space"))
        );
        assert_eq!(store.read(name(taken[9]), 1), Read::Found(payload(taken[9], 1000)));
    }
}

#[test]
fn an_unreadable_disk_is_left_alone_and_tried_again() {
    let disk = FakeDisk::new(1);
    let (store, hands) = on(&disk);
    write(&store, &hands, 1);
    disk.set_faults(Faults { read_error_one_in: 1, ..Faults::default() });
    let found = Arc::new(AtomicUsize::new(0));
    let fetch = |store: &Store| {
        let found = Arc::clone(&found);
        let taken = store.fetch(1, move |read| {
            if read(name(1)) == Read::Found(payload(1, 1000)) {
                found.fetch_add(1, Ordering::Relaxed);
            }
        });
        work(&hands);
        taken
    };
    assert_eq!((0..131).filter(|_| fetch(&store)).count(), 5, "three, and one of 64 after that");
    let status = store.status();
    assert!(status.read_failure.is_some() && status.write_failure.is_none(), "{status:?}");
    assert_eq!((status.failed_reads, status.refused_reads, found.load(Ordering::Relaxed)), (5, 126, 0));
    disk.set_faults(Faults::default());
    let taken = (0..128).filter(|_| fetch(&store)).count();
    assert!(taken > 64, "back after the next try: {taken}");
    assert_eq!((store.status().read_failure, found.load(Ordering::Relaxed)), (None, taken));
}

/// Between two listings the store counts for itself, exactly: what is dropped did not fit, and what is written did.
#[test]
fn a_large_directory_is_listed_seldom() {
    const LIMIT: u64 = 50_000;
    let disk = FakeDisk::new(1);
    let (store, _, hands) = Store::open_idle(disk.clone(), Path::new(DIR), LIMIT).expect("opens");
    let used = || disk.files().values().map(|file| file.len() as u64).sum::<u64>();
    let before = disk.listings();
    let list_takes = Duration::from_millis(50);
    disk.set_faults(Faults { list_takes, ..Faults::default() });
    let start = Instant::now();
    for n in 1..=200u8 {
        let (bytes, fits) = (u64::from(n) * 10, used() + u64::from(n) * 10 + HEADER_BYTES as u64 <= LIMIT);
        put(&store, n, bytes as usize);
        work(&hands);
        assert_eq!(store.read(name(n), 1) != Read::Missing, fits, "{n}");
        assert!(used() <= LIMIT);
        if !fits {
            // The second never was there.
            store.remove(&[name(n / 2), name(n)]);
            work(&hands);
        }
    }
    let most = 1 + (start.elapsed().as_millis() / (20 * list_takes.as_millis())) as u64;
    assert!((1..=most).contains(&(disk.listings() - before)), "{} listings", disk.listings() - before);
    assert!(store.status().dropped > 10);
    // What others put there is seen after a while, and so is what could not be removed.
    disk.write(&Path::new(DIR).join("foreign"), &[&[0; 45_000]]).expect("writable");
    let listings = disk.listings();
    while disk.listings() == listings {
        std::thread::sleep(list_takes);
        store.remove(&[name(210)]);
        assert!(write(&store, &hands, 210));
    }
    assert_eq!(store.read(name(210), 1), Read::Missing, "no room");
    assert_eq!((disk.listings() - listings, store.status().foreign_bytes), (1, 45_000));
    disk.set_faults(Faults { read_only: true, ..Faults::default() });
    let kept = (1..=200).find(|n| store.read(name(*n), 1) != Read::Missing).expect("some are there");
    store.remove(&[name(kept)]);
    work(&hands);
    disk.set_faults(Faults::default());
    write(&store, &hands, 211);
    assert_eq!(store.status().foreign_bytes, 45_000 + u64::from(kept) * 10 + HEADER_BYTES as u64);
}

/// Closing does not wait for a disk that hangs; what waited is counted.
#[test]
fn a_disk_that_hangs_is_not_waited_for() {
    let disk = FakeDisk::new(1);
    let (store, _) = Store::open_on(disk.clone(), Path::new(DIR), NO_LIMIT).expect("opens");
    let start = Instant::now();
    disk.set_faults(Faults { write_takes: Duration::from_secs(60), ..Faults::default() });
    (1..=5).for_each(|n| assert!(put(&store, n, 100)));
    store.flush(Duration::from_secs(2));
    assert_eq!(store.status().dropped, 4, "all but the one it hangs at");
    drop(store);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn queues_have_bounds() {
    let (store, hands) = on(&FakeDisk::new(1));
    assert_eq!((0..300).filter(|n| put(&store, (n % 250 + 1) as u8, 10)).count(), 256);
    assert_eq!((0..100).filter(|_| store.fetch(1, |_| {})).count(), 64);
    let status = store.status();
    assert_eq!((status.dropped, status.refused_reads), (44, 36));
    work(&hands);
    assert_eq!(store.status().written, 256);
}

#[test]
fn a_directory_that_was_replaced_is_not_ours() {
    let disk = FakeDisk::new(1);
    let (store, hands) = on(&disk);
    write(&store, &hands, 1);
    disk.replace_directory();
    assert!((2..200).filter(|n| write(&store, &hands, *n)).count() == 1, "it is never tried again");
    assert!(disk.files().is_empty());
    assert!(store.status().write_failure.expect("writing is off").contains("replaced"));
}

#[test]
fn a_directory_that_cannot_be_changed_does_not_open() {
    let disk = FakeDisk::new(1);
    disk.set_faults(Faults { read_only: true, ..Faults::default() });
    let error = Store::open_idle(disk, Path::new(DIR), NO_LIMIT).err().expect("cannot be locked");
    assert!(matches!(error, StoreError::Io { op: "lock", .. }), "{error}");
    assert!(error.to_string().contains("cache/lock"), "{error}");
}

/// A small file system of its own, unmounted when dropped.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(size: &str) -> Option<Self> {
        let dir = scratch_dir();
        mount(&["-t", "tmpfs", "-o", size, "none"], dir.path()).then_some(Self(dir))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

fn mount(args: &[&str], dir: &Path) -> bool {
    Command::new("mount").args(args).arg(dir).output().is_ok_and(|output| output.status.success())
}

/// As above, with a disk that really is full, and really cannot be changed.
#[test]
fn a_real_disk_that_is_full_and_then_read_only() {
    let Some(mounted) = Mount::new("size=64k") else {
        println!("skipped: mounting is not allowed here");
        return;
    };
    let dir = mounted.0.path();
    let (store, _) = open(dir, NO_LIMIT);
    let write = |n| {
        put(&store, n, 9000);
        store.flush(PATIENCE);
    };
    (1..=20).for_each(write);
    let status = store.status();
    assert!(status.written >= 3 && status.failed_writes >= 3, "{status:?}");
    assert!(status.write_failure.as_ref().is_some_and(|reason| reason.contains("space")), "{status:?}");
    assert_eq!(usage(dir).expect("readable").temporary_files, 0);
    store.remove(&[name(1), name(2)]);
    (30..=160).for_each(write);
    assert!(store.status().written > status.written, "there is room again: {:?}", store.status());
    if mount(&["-o", "remount,ro"], dir) {
        (1..=20).for_each(write);
        let reason = store.status().write_failure.expect("writing is off");
        assert!(reason.to_lowercase().contains("read-only"), "{reason}");
        assert!((30..=160).any(|n| store.read(name(n), 1) == Read::Found(payload(n, 9000))), "reading goes on");
    }
}
