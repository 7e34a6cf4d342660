//! The index alone: names, leases, what goes first, and books that add up.

use std::collections::BTreeSet;

use proptest::prelude::*;
use troika_kvcache::{BlockHash, BlockId, Cache, Evicted, Identity, Skip, chain};

const IDENTITY: Identity<'static> =
    Identity { weights: b"w", tokenizer: b"t", layout: 1, arithmetic: "exact", tenant: b"" };

fn names(tokens: &[u32]) -> Vec<BlockHash> {
    chain(IDENTITY.root(), tokens, 4)
}

/// Puts in the blocks of `tokens` of 10 bytes each, and boundaries of 20 bytes after the blocks `boundaries`.
fn put(cache: &mut Cache, tokens: &[u32], boundaries: &[usize]) -> Vec<Result<BlockId, Skip>> {
    let (mut parent, mut evicted, mut ids) = (None, Vec::new(), Vec::new());
    for (index, name) in names(tokens).into_iter().enumerate() {
        let id = cache.insert(parent, name, 10, &mut evicted).map(|(id, _)| id);
        if let Ok(id) = id {
            parent = Some(id);
            if boundaries.contains(&index) {
                let _ = cache.insert_boundary(id, 20, &mut evicted);
            }
        }
        ids.push(id);
        cache.check_invariants();
        if id.is_err() {
            break;
        }
    }
    ids
}

#[test]
fn names_cover_everything_the_rows_depend_on() {
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let base = names(&tokens);
    assert_eq!(base.len(), 2, "whole blocks only");
    assert_eq!(names(&tokens[..4])[..], base[..1], "a prefix has the same names");
    assert_ne!(names(&[0, 2, 3, 4, 5, 6, 7, 8])[1], base[1], "an earlier token changes every later name");
    let others = [
        Identity { weights: b"x", ..IDENTITY },
        Identity { tokenizer: b"x", ..IDENTITY },
        Identity { layout: 2, ..IDENTITY },
        Identity { arithmetic: "official", ..IDENTITY },
        Identity { tenant: b"x", ..IDENTITY },
        Identity { weights: b"wt", tokenizer: b"", ..IDENTITY },
    ];
    for other in others {
        assert_ne!(other.root(), IDENTITY.root(), "{other:?}");
    }
}

#[test]
fn a_sequence_resumes_at_the_last_boundary_only() {
    let mut cache = Cache::new(1000);
    let tokens: Vec<u32> = (0..20).collect();
    put(&mut cache, &tokens, &[1, 3]);
    let found = cache.lookup(&names(&tokens));
    assert_eq!((found.blocks.len(), found.matched), (4, 5));
    let shorter = cache.lookup(&names(&tokens[..12]));
    assert_eq!((shorter.blocks.len(), shorter.matched), (2, 3));
    let other: Vec<u32> = (100..120).collect();
    let missing = cache.lookup(&names(&other));
    assert_eq!((missing.lease, missing.blocks.len(), missing.matched), (None, 0, 0));
    for found in [found, shorter] {
        cache.release(found.lease.expect("resumes"));
    }
    cache.check_invariants();
}

#[test]
fn leased_blocks_stay() {
    let mut cache = Cache::new(70);
    let tokens: Vec<u32> = (0..12).collect();
    put(&mut cache, &tokens, &[2]);
    let found = cache.lookup(&names(&tokens));
    let other: Vec<u32> = (100..120).collect();
    let put_while_leased = put(&mut cache, &other, &[]);
    assert_eq!(put_while_leased.iter().filter(|id| id.is_ok()).count(), 2, "what is left of 70 bytes");
    assert_eq!(put_while_leased.last(), Some(&Err(Skip::NoRoom)));
    cache.release(found.lease.expect("resumes"));
    put(&mut cache, &other, &[4]);
    assert!(cache.block(&names(&tokens)[2]).is_none(), "now it had to go");
}

#[test]
fn what_is_used_stays_longer() {
    let mut cache = Cache::new(120);
    let (used, unused): (Vec<u32>, Vec<u32>) = ((0..8).collect(), (100..108).collect());
    put(&mut cache, &used, &[1]);
    put(&mut cache, &unused, &[1]);
    for _ in 0..20 {
        let lease = cache.lookup(&names(&used)).lease.expect("resumes");
        cache.release(lease);
    }
    let third: Vec<u32> = (200..212).collect();
    put(&mut cache, &third, &[2]);
    assert_eq!(cache.lookup(&names(&used)).blocks.len(), 2);
    assert_eq!(cache.lookup(&names(&unused)).blocks.len(), 0);
}

/// A full disk of a small model has as many blocks, and each one stored makes room for itself on the engine's thread.
#[test]
#[expect(clippy::disallowed_types, reason = "a bound on time")]
fn room_among_many_blocks_is_found_fast() {
    const BLOCKS: u32 = 100_000;
    let mut cache = Cache::new(u64::from(BLOCKS) * 10);
    let (mut evicted, parent) = (Vec::new(), names(&[1, 2, 3, 4])[0]);
    let root = cache.insert(None, parent, 10, &mut evicted).expect("room").0;
    let mut insert = |number: u32, evicted: &mut Vec<Evicted>| {
        let (id, _) = cache.insert(Some(root), parent.child(&[number]), 10, evicted).expect("room");
        id
    };
    let ids: Vec<BlockId> = (1..BLOCKS).map(|number| insert(number, &mut evicted)).collect();
    assert!(evicted.is_empty());
    let start = std::time::Instant::now();
    for number in BLOCKS..BLOCKS + 2000 {
        insert(number, &mut evicted);
    }
    assert!(start.elapsed() < std::time::Duration::from_secs(20), "{:?}", start.elapsed());
    // Those used longest ago, as far as powers of two tell.
    let old: BTreeSet<&BlockId> = ids[..ids.len() / 2].iter().collect();
    assert_eq!(evicted.len(), 2000);
    assert!(evicted.iter().all(|gone| matches!(gone, Evicted::Block(id) if old.contains(id))));
    cache.check_invariants();
}

#[test]
fn forgetting_a_block_forgets_what_follows() {
    let mut cache = Cache::new(1000);
    let tokens: Vec<u32> = (0..16).collect();
    let ids = put(&mut cache, &tokens, &[3]);
    let lease = cache.lookup(&names(&tokens)).lease.expect("resumes");
    let mut evicted = Vec::new();
    cache.forget(ids[1].expect("kept"), &mut evicted);
    cache.check_invariants();
    assert_eq!((evicted.len(), cache.num_blocks(), cache.used_bytes()), (3, 1, 10));
    cache.release(lease);
    cache.check_invariants();
}

proptest! {
    /// Whatever is put, looked up, leased and forgotten: the limit holds, and a hit is what was put.
    #[test]
    fn books_add_up(
        limit in 1u64..300,
        ops in prop::collection::vec((0u8..4, 0u32..6, 0u32..6, 1usize..8), 1..80),
    ) {
        let mut cache = Cache::new(limit);
        let mut leases = Vec::new();
        for (op, stem, branch, blocks) in ops {
            let tokens: Vec<u32> = (0..blocks as u32 * 4).map(|i| if i < 8 { stem } else { branch + 10 }).collect();
            match op {
                0 => drop(put(&mut cache, &tokens, &[blocks - 1])),
                1 => {
                    let found = cache.lookup(&names(&tokens));
                    prop_assert!(found.blocks.len() <= found.matched && found.matched <= blocks);
                    leases.extend(found.lease);
                }
                2 => if let Some(lease) = leases.pop() { cache.release(lease) },
                _ => if let Some(id) = cache.block(&names(&tokens)[blocks - 1]) {
                    let mut evicted: Vec<Evicted> = Vec::new();
                    cache.forget(id, &mut evicted);
                    prop_assert!(evicted.contains(&Evicted::Block(id)));
                }
            }
            cache.check_invariants();
        }
    }
}
