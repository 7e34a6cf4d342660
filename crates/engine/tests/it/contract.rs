//! The row contract: chunking, neighbours, threads, steps in flight and roll-backs never change a bit.

use std::cell::RefCell;

use proptest::prelude::*;
use troika_base::{NumericClass, SequenceId};
use troika_engine::{Chunk, RunnerOptions, WantLogits};
use troika_graph::Acceptance;
use troika_runtime::Priority;
use troika_testkit::compare::assert_same_bits;

use crate::support::{CLASSES, chunked, feed, one_shot, open, options, options_for};

fn tokens(seed: u64, n: usize) -> Vec<u32> {
    // A few lines of a splitmix generator; any spread of ids will do.
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            ((mixed ^ (mixed >> 27)) % 383) as u32
        })
        .collect()
}

#[test]
fn chunking_changes_no_bit() {
    CLASSES.into_iter().for_each(chunking);
}

fn chunking(class: NumericClass) {
    let mut runner = open("tiny", options_for(class));
    let tokens = tokens(1, 300);
    let want = one_shot(&mut runner, &tokens, 300);
    for sizes in [vec![1], vec![128], vec![127, 1, 1, 127, 4, 4, 3, 33], vec![100, 3, 1, 24, 64, 5, 2, 1, 100]] {
        assert_same_bits(&format!("chunks {sizes:?}"), &chunked(&mut runner, &tokens, &sizes), &want);
    }
    let runner = RefCell::new(runner);
    proptest!(ProptestConfig::with_cases(24), |(sizes in prop::collection::vec(1usize..90, 1..12))| {
        let mut runner = runner.borrow_mut();
        assert_same_bits(&format!("chunks {sizes:?}"), &chunked(&mut runner, &tokens, &sizes), &want);
    });
}

#[test]
fn thread_counts_change_no_bit() {
    CLASSES.into_iter().for_each(thread_counts);
}

fn thread_counts(class: NumericClass) {
    let tokens = tokens(2, 200);
    let mut want: Option<Vec<f32>> = None;
    for threads in [1, 2, 3, 5] {
        let mut options = options_for(class);
        options.cpu.threads = threads;
        let got = one_shot(&mut open("tiny", options), &tokens, 200);
        assert_same_bits(&format!("{threads} threads"), &got, want.get_or_insert_with(|| got.clone()));
    }
}

#[test]
fn layouts_change_no_bit() {
    let tokens = tokens(3, 150);
    let want = one_shot(&mut open("tiny", options()), &tokens, 150);
    for name in ["tiny-bf16", "tiny-mlx"] {
        assert_same_bits(name, &one_shot(&mut open(name, options()), &tokens, 150), &want);
    }
}

#[test]
fn neighbours_in_a_step_change_no_bit() {
    CLASSES.into_iter().for_each(neighbours);
}

fn neighbours(class: NumericClass) {
    let mut runner = open("tiny", options_for(class));
    let prompts = [(4, 200), (5, 131), (6, 9)].map(|(seed, n)| tokens(seed, n));
    let want: Vec<Vec<f32>> = prompts.iter().map(|p| one_shot(&mut runner, p, p.len())).collect();
    let runner = RefCell::new(runner);
    proptest!(ProptestConfig::with_cases(16), |(sizes in prop::collection::vec(0usize..60, 3..40))| {
        let mut runner = runner.borrow_mut();
        let sequences: Vec<SequenceId> = prompts.iter().map(|_| runner.new_sequence()).collect();
        let mut got = vec![Vec::new(); prompts.len()];
        let mut fed = [0; 3];
        let mut turn = 0;
        while fed.iter().zip(&prompts).any(|(fed, prompt)| *fed < prompt.len()) {
            // A chunk of some of the sequences, of any size. Every fourth turn feeds each at least one token: the
            // sizes repeat, and those that fall to one sequence may all be nought.
            let least = usize::from(turn % 4 == 3);
            let mut parts = Vec::new();
            for index in 0..prompts.len() {
                let size = sizes[(turn * 3 + index) % sizes.len()].max(least);
                let end = (fed[index] + size).min(prompts[index].len());
                if end > fed[index] {
                    parts.push((index, fed[index]..end));
                    fed[index] = end;
                }
            }
            turn += 1;
            if parts.is_empty() {
                continue;
            }
            let chunks: Vec<Chunk<'_>> = parts
                .iter()
                .map(|(index, range)| Chunk {
                    sequence: sequences[*index],
                    tokens: &prompts[*index][range.clone()],
                    logits: WantLogits::Last(range.len()),
                    acceptance: Acceptance::Whole,
                })
                .collect();
            let forward = runner.forward(&chunks).expect("the step runs");
            for (chunk, (index, _)) in parts.iter().enumerate() {
                got[*index].extend(forward.logits(chunk));
            }
        }
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_same_bits(&format!("sequence {index}"), got, want);
        }
        sequences.into_iter().for_each(|sequence| runner.drop_sequence(sequence));
    });
}

/// Two and more chunks of one prompt in flight, and another prompt beside them.
#[test]
fn steps_in_flight_change_no_bit() {
    CLASSES.into_iter().for_each(in_flight);
}

fn in_flight(class: NumericClass) {
    let mut runner = open("tiny", options_for(class));
    let (long, short) = (tokens(7, 260), tokens(8, 40));
    let want = [one_shot(&mut runner, &long, 260), one_shot(&mut runner, &short, 40)];
    for round in 0..8 {
        let sequences = [runner.new_sequence(), runner.new_sequence()];
        let width = 20 + 9 * round;
        let mut order = Vec::new();
        for (which, tokens) in [(0, &long), (1, &short)] {
            for chunk in tokens.chunks(width) {
                let (sequence, logits) = (sequences[which], WantLogits::Last(chunk.len()));
                let chunk = Chunk { sequence, tokens: chunk, logits, acceptance: Acceptance::Whole };
                let priority = if which == 0 { Priority::Prefill } else { Priority::Decode };
                order.push((runner.submit(&[chunk], priority).expect("accepted"), which));
            }
        }
        let mut results = Vec::new();
        for _ in 0..order.len() {
            let (ticket, forward) = runner.next_done().expect("the step runs");
            results.push((ticket, forward.logits(0)));
        }
        results.sort_by_key(|(ticket, _)| *ticket);
        for (which, want) in want.iter().enumerate() {
            let of_sequence = results.iter().zip(&order).filter(|(_, (_, w))| *w == which);
            let got: Vec<f32> = of_sequence.flat_map(|((_, logits), _)| logits.clone()).collect();
            assert_same_bits(&format!("round {round}, sequence {which}"), &got, want);
        }
    }
}

/// Verification of drafts: whatever part of a chunk is kept, what follows is as if the rest had never been there.
#[test]
fn rolled_back_rows_leave_no_trace() {
    CLASSES.into_iter().for_each(roll_backs);
}

fn roll_backs(class: NumericClass) {
    let mut runner = open("tiny", RunnerOptions { draft_context: true, ..options_for(class) });
    let tokens = tokens(9, 160);
    for start in [1, 3, 63, 125, 127, 128, 130] {
        let rest = &tokens[start + 6..];
        for accepted in 0..=6 {
            let sequence = runner.new_sequence();
            feed(&mut runner, sequence, &tokens[..start], 0);
            // The right tokens up to `accepted`, then wrong ones.
            let mut guess = tokens[start..start + accepted].to_vec();
            guess.extend(tokens[start + accepted..start + 6].iter().map(|token| (token + 1) % 383));
            let chunk =
                Chunk { sequence, tokens: &guess, logits: WantLogits::Last(6), acceptance: Acceptance::Partial };
            runner.forward(&[chunk]).expect("the step runs");
            runner.commit(sequence, accepted).expect("live");
            feed(&mut runner, sequence, &tokens[start + accepted..start + 6 + 1], 0);
            let got = feed(&mut runner, sequence, &rest[1..], rest.len() - 1).logits(0);
            let draft = runner.draft(sequence, 5).expect("there is a drafter");

            let plain = runner.new_sequence();
            feed(&mut runner, plain, &tokens[..start + 7], 0);
            let want = feed(&mut runner, plain, &rest[1..], rest.len() - 1).logits(0);
            assert_same_bits(&format!("{accepted} of 6 kept after {start}"), &got, &want);
            let want = runner.draft(plain, 5).expect("there is a drafter");
            assert_same_bits("draft", &draft.logits, &want.logits);
            [sequence, plain].into_iter().for_each(|s| runner.drop_sequence(s));
        }
    }
}

/// Not the contract, but why there are several classes: how far the fast ones are from `exact`. The tiny model's weights are
/// noise, so its logits (standard deviation about 2) are the worst case: nothing averages out.
#[test]
fn fast_stays_near_exact() {
    let tokens = tokens(10, 256);
    let [exact, fast, fp8_exact] = CLASSES.map(|class| one_shot(&mut open("tiny", options_for(class)), &tokens, 256));
    let square = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>();
    let error = |got: &[f32]| {
        let error = square(&mut exact.iter().zip(got).map(|(a, b)| a - b)) / square(&mut exact.iter().copied());
        error.sqrt()
    };
    let (fast, fp8_exact) = (error(&fast), error(&fp8_exact));
    println!("relative error of the logits: fast {fast:.4}, fast-fp8-exact {fp8_exact:.4}");
    assert!(fast < 0.1, "{fast}");
    assert!(fp8_exact < fast, "{fp8_exact} against {fast}");
}
