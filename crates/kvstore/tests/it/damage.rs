//! Many files, some of them damaged: each is found once, counted once, and never read.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use troika_kvcache::BlockHash;
use troika_kvstore::{Header, Name, Read, verify};
use troika_testkit::scratch_dir;

use super::{NO_LIMIT, name, open, payload};

const FILES: u8 = 250;

/// A file as the store writes it.
fn write(dir: &Path, name: Name, payload: &[u8]) -> PathBuf {
    let payload_bytes = payload.len() as u64;
    let header = Header { name, layout: 1, depth: 1, parent: BlockHash([0; 32]), payload_bytes };
    let path = dir.join(name.to_string());
    fs::write(&path, [&header.encode(payload)[..], payload].concat()).expect("writable");
    path
}

/// What happens to a file: bits flipped anywhere, a tail cut off, something put behind, another's content, nothing left.
fn damage(file: &mut Vec<u8>, kind: u8, at: usize, other: &[u8]) {
    let at = at % file.len();
    match kind {
        0 => file[at] ^= 1 << (at % 8),
        1 => file.truncate(at),
        2 => file.extend(vec![7; at % 100 + 1]),
        3 => *file = other.to_vec(),
        _ => file.clear(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn the_count_is_the_damage(hits in prop::collection::vec((1..FILES, 0u8..5, any::<usize>()), 0..120)) {
        let dir = scratch_dir();
        for n in 1..=FILES {
            write(dir.path(), name(n), &payload(n, 300 + usize::from(n)));
        }
        let mut damaged = BTreeSet::new();
        let other = fs::read(dir.path().join(name(FILES).to_string())).expect("written");
        for (n, kind, at) in hits {
            if damaged.insert(n) {
                let path = dir.path().join(name(n).to_string());
                let mut file = fs::read(&path).expect("written");
                damage(&mut file, kind, at, &other);
                fs::write(&path, file).expect("writable");
            }
        }
        prop_assert_eq!(verify(dir.path()).expect("readable").1.len(), damaged.len());
        let (store, _) = open(dir.path(), NO_LIMIT);
        for n in 1..=FILES {
            match store.read(name(n), 1) {
                Read::Found(bytes) => prop_assert!(!damaged.contains(&n) && bytes == payload(n, 300 + usize::from(n))),
                Read::Missing | Read::Damaged => prop_assert!(damaged.contains(&n), "{n} is lost"),
            }
        }
        prop_assert_eq!(store.status().quarantined, damaged.len() as u64);
        drop(store);
        // What was set aside goes at the next start, and is not counted again.
        let (store, items) = open(dir.path(), NO_LIMIT);
        prop_assert_eq!(items.len(), usize::from(FILES) - damaged.len());
        prop_assert_eq!((store.status().quarantined, store.status().foreign_bytes), (0, 0));
    }
}

/// As many files as a store of a few gigabytes has: a start reads 160 bytes of each.
#[test]
fn a_start_with_many_files_is_fast() {
    let dir = scratch_dir();
    for index in 0..5000u32 {
        let mut hash = [0; 32];
        hash[..4].copy_from_slice(&index.to_le_bytes());
        let path = write(dir.path(), Name { hash: BlockHash(hash), ..name(1) }, &[1; 100]);
        // Every tenth has a header that is damaged.
        if index % 10 == 0 {
            let mut file = fs::read(&path).expect("written");
            file[50] ^= 1;
            fs::write(&path, file).expect("writable");
        }
    }
    let start = Instant::now();
    let (store, items) = open(dir.path(), NO_LIMIT);
    let elapsed = start.elapsed();
    println!("{} files in {elapsed:?}", items.len());
    assert_eq!((items.len(), store.status().quarantined), (4500, 500));
    assert!(elapsed < Duration::from_secs(30), "{elapsed:?}");
}
