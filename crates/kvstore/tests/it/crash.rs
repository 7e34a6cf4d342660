//! `kill -9` in the middle of writing: what is there afterwards is whole.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use troika_kvstore::{Read, verify};
use troika_testkit::scratch_dir;

use super::{NO_LIMIT, PATIENCE, open, payload, put};

const DIR: &str = "TROIKA_TEST_CRASH_DIR";

/// Not a test by itself: writes until it is killed.
#[test]
#[ignore = "started by the test below, to be killed"]
fn writes_for_ever() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let (store, _) = open(dir.as_ref(), NO_LIMIT);
    for round in 0u32.. {
        let n = (round % 200 + 1) as u8;
        put(&store, n, 20_000 + usize::from(n));
        if round % 8 == 0 {
            store.flush(PATIENCE);
        }
        if round % 5 == 0 {
            store.remove(&[super::name(n)]);
        }
    }
}

fn file_names(dir: &Path) -> BTreeSet<OsString> {
    let entries = std::fs::read_dir(dir).expect("readable");
    entries.map(|entry| entry.expect("readable").file_name()).collect()
}

#[test]
fn killed_at_any_moment() {
    let dir = scratch_dir();
    let mut pause = 7u64;
    let mut seen = 0;
    for round in 0..50u64 {
        let before = file_names(dir.path());
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["crash::writes_for_ever", "--exact", "--ignored"])
            .env(DIR, dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("starts");
        // However busy the machine is, the child gets as far as its first change.
        while file_names(dir.path()) == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        pause = (pause * 48_271) % 65_537;
        std::thread::sleep(Duration::from_micros(pause % 20_000));
        child.kill().expect("can be killed");
        child.wait().expect("ends");
        let (store, items) = open(dir.path(), NO_LIMIT);
        for item in &items {
            let n = item.hash.0[0];
            assert_eq!(store.read(*item, 1), Read::Found(payload(n, 20_000 + usize::from(n))), "round {round}");
        }
        assert_eq!(store.status().quarantined, 0, "round {round}");
        seen += items.len();
        drop(store);
        assert!(verify(dir.path()).expect("readable").1.is_empty());
    }
    assert!(seen > 100, "the child gets as far as writing: {seen}");
}
