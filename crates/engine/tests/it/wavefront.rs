//! Several prefill steps in flight: the bits of one after another, whoever computes, fails or is cancelled.

use std::collections::VecDeque;

use troika_base::{NumericClass, SequenceId};
use troika_device::state::Snapshot;
use troika_engine::api::{Event, FinishReason, GenerateRequest, Generator};
use troika_engine::{Chunk, Engine, EngineOptions, Priority, Runner, RunnerError, StepRunner, WantLogits};
use troika_graph::{Acceptance, Scope};
use troika_runtime::Ticket;
use troika_testkit::compare::assert_same_bits;

use crate::cache::CACHED;
use crate::hybrid::{TILE, assert_books_balance, everything, nano, soft, tokens, wish};
use crate::serving::{LIMITS, collect, request, start, wait_until};
use crate::support::{open, options_for};

/// Logits of all rows of some sequences, and their states, from steps of at most `depth` in flight. Each step has the next
/// chunk of each sequence named.
pub(crate) fn feed_wave(
    runner: &mut Runner,
    prompts: &[Vec<u32>],
    steps: &[(&[usize], usize)],
    depth: usize,
) -> Vec<(Vec<f32>, Snapshot)> {
    let sequences: Vec<SequenceId> = prompts.iter().map(|_| runner.new_sequence()).collect();
    let mut fed = vec![0; prompts.len()];
    let mut logits = vec![Vec::new(); prompts.len()];
    let mut in_flight: VecDeque<(Ticket, &[usize])> = VecDeque::new();
    let mut take = |runner: &mut Runner, in_flight: &mut VecDeque<(Ticket, &[usize])>| {
        let (ticket, forward) = runner.next_done().expect("it runs");
        let index = in_flight.iter().position(|(other, _)| *other == ticket).expect("it was submitted");
        let (_, whose) = in_flight.remove(index).expect("found above");
        assert!(in_flight.iter().take(index).all(|(_, other)| other.iter().all(|id| !whose.contains(id))), "in order");
        for (chunk, prompt) in whose.iter().enumerate() {
            logits[*prompt].extend(forward.logits(chunk));
        }
        runner.recycle(forward);
    };
    for (whose, width) in steps {
        if in_flight.len() == depth {
            take(runner, &mut in_flight);
        }
        let chunks: Vec<Chunk<'_>> = whose
            .iter()
            .map(|prompt| {
                let tokens = &prompts[*prompt][fed[*prompt]..][..*width];
                fed[*prompt] += width;
                let (sequence, logits) = (sequences[*prompt], WantLogits::Last(usize::MAX));
                Chunk { sequence, tokens, logits, acceptance: Acceptance::Whole }
            })
            .collect();
        in_flight.push_back((runner.submit(&chunks, Priority::Prefill).expect("accepted"), whose));
    }
    while !in_flight.is_empty() {
        take(runner, &mut in_flight);
    }
    let results = sequences.iter().zip(logits);
    let results = results.map(|(sequence, logits)| (logits, runner.snapshot(*sequence).expect("it is live"))).collect();
    sequences.into_iter().for_each(|sequence| runner.drop_sequence(sequence));
    results
}

/// Chunks of one prompt, of several, and of both in one step.
pub(crate) fn assert_depth_changes_nothing(what: &str, runner: &mut Runner, width: usize) {
    let prompts: Vec<Vec<u32>> =
        (0..2).map(|i| tokens(8 * width).into_iter().map(|token| token % 383 + i).collect()).collect();
    let (first, second, both) = (&[0][..], &[1][..], &[0, 1][..]);
    let (wide, tail) = (width, width / 2 + 3);
    let steps =
        [(first, wide), (first, wide), (first, tail), (second, wide), (both, wide), (second, tail), (first, wide)];
    let want = feed_wave(runner, &prompts, &steps, 1);
    for depth in [2, 3, steps.len()] {
        let got = feed_wave(runner, &prompts, &steps, depth);
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            let what = format!("{what}, {depth} in flight, prompt {index}");
            assert_same_bits(&what, &got.0, &want.0);
            assert_eq!(got.1, want.1, "{what}: state");
        }
    }
}

#[test]
fn steps_in_flight_have_the_bits_of_steps_one_after_another() {
    for class in [NumericClass::Exact, NumericClass::Fast] {
        let mut runner = open("tiny", options_for(class));
        assert_depth_changes_nothing(&format!("tiny, {class}"), &mut runner, 24);
    }
    assert_depth_changes_nothing("nano", &mut nano(None), TILE);
}

/// What builds on a failed step fails with it, whatever was done of it; others go on.
#[test]
fn a_failed_step_takes_later_chunks_with_it() {
    let mut runner = nano(Some((soft(1), wish(everything(), 0))));
    let tokens = tokens(3 * TILE);
    let want = feed_wave(&mut runner, std::slice::from_ref(&tokens), &[(&[0][..], TILE); 3], 1);
    let [failing, other] = [runner.new_sequence(), runner.new_sequence()];
    let submit = |runner: &mut Runner, sequence, chunk: usize| {
        let (tokens, logits) = (&tokens[chunk * TILE..][..TILE], WantLogits::Last(usize::MAX));
        let chunk = Chunk { sequence, tokens, logits, acceptance: Acceptance::Whole };
        runner.submit(&[chunk], Priority::Prefill).expect("accepted")
    };
    let first = submit(&mut runner, failing, 0);
    let state = runner.sequence_state(failing).expect("it is live");
    {
        let mut layer = state.layer(Scope::Layer(3));
        let pool = layer.compressed.as_mut().expect("layer 3 of nano compresses");
        pool.append(&vec![0.0; pool.width()], &vec![0.0; pool.width()]);
    }
    let tickets = [first, submit(&mut runner, failing, 1), submit(&mut runner, failing, 2)];
    let others: Vec<Ticket> = (0..3).map(|chunk| submit(&mut runner, other, chunk)).collect();
    let (mut failed, mut done, mut logits) = (Vec::new(), Vec::new(), Vec::new());
    while failed.len() + done.len() < 6 {
        match runner.next_done() {
            Ok((ticket, forward)) => {
                done.push(ticket);
                logits.extend(forward.logits(0));
            }
            Err(RunnerError::Executor(troika_runtime::ExecutorError::Node { step, .. })) => failed.push(Ticket(step)),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(failed, tickets);
    assert_eq!(done, others);
    assert_same_bits("the other sequence", &logits, &want[0].0);
    assert!(runner.num_computed_tokens(failing).is_err(), "its state is given up");
    assert_books_balance(&runner.totals().total_operations());
}

/// Requests of several chunks, some cancelled, on an engine that keeps prefixes. Answers of those that are not.
fn answers(engine: &Engine, requests: &[GenerateRequest]) -> Vec<Vec<u32>> {
    let mut answers = Vec::new();
    // The second time, a part of each prompt is kept.
    for round in 0..2 {
        let mut events = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            let (sender, doomed) = std::sync::mpsc::channel();
            let mut other = request.clone();
            other.prompt.rotate_left(7);
            let id = engine.submit(other, Box::new(crate::serving::Channel(sender))).expect("accepted");
            events.push(start(engine, request.clone()));
            if (index + round) % 2 == 0 {
                // In some step, or between two.
                std::thread::sleep(std::time::Duration::from_millis(3 * index as u64));
            }
            engine.cancel(id);
            let ended = collect(&doomed).1;
            assert!(
                matches!(ended, Event::Finished { reason: FinishReason::Cancelled | FinishReason::Length, .. }),
                "{ended:?}"
            );
        }
        answers.extend(events.iter().map(|events| collect(events).0));
    }
    wait_until("nothing is left", || {
        let status = engine.status();
        status.running == 0 && status.queued == 0 && status.state_bytes_reserved == 0
    });
    answers
}

#[test]
fn an_engine_gives_the_same_answers_at_every_depth() {
    let limits = EngineOptions { max_queued: 32, max_context_tokens: 1024, chunk_tokens: TILE, ..CACHED };
    let requests: Vec<GenerateRequest> = (0..4).map(|i| request(i, 200 + 90 * i as usize, 4)).collect();
    let tiny = |wavefront, cache_bytes| {
        let options = EngineOptions { wavefront, cache_bytes, ..limits };
        Engine::start(open("tiny-bf16", options_for(NumericClass::Exact)), options).expect("starts")
    };
    let want = answers(&tiny(1, 0), &requests);
    for wavefront in [2, 3] {
        for cache_bytes in [0, 1 << 30] {
            let engine = tiny(wavefront, cache_bytes);
            assert_eq!(answers(&engine, &requests), want, "{wavefront} in flight, {cache_bytes} bytes of cache");
            assert_eq!(engine.status().cached_tokens_total > 0, cache_bytes > 0);
        }
    }
}

#[test]
fn an_engine_with_neural_engines_gives_the_same_answers_at_every_depth() {
    let requests: Vec<GenerateRequest> = (0..3).map(|i| request(i, 3 * TILE + 50 * i as usize, 3)).collect();
    let answers = |wavefront| {
        let options =
            EngineOptions { wavefront, chunk_tokens: TILE, max_queued: 32, max_context_tokens: 1024, ..LIMITS };
        let runner = nano(Some((soft(1), wish(everything(), 0))));
        answers(&Engine::start(runner, options).expect("starts"), &requests)
    };
    let want = answers(1);
    for wavefront in [2, 3] {
        assert_eq!(answers(wavefront), want, "{wavefront} in flight");
    }
}

/// Each step in flight has values of its own, which the state of sequences cannot have.
#[test]
fn memory_is_reckoned_for_every_step_in_flight() {
    let limit = |wavefront| {
        let options = EngineOptions { memory_bytes: 1 << 30, wavefront, ..LIMITS };
        let status =
            Engine::start(open("tiny-bf16", options_for(NumericClass::Exact)), options).expect("starts").status();
        (status.state_bytes_limit, status.step_bytes)
    };
    let [one, two, three] = [1, 2, 3].map(limit);
    let values = two.1 - one.1;
    assert!(values > 0);
    assert_eq!(three.1 - two.1, values);
    assert_eq!([one.0 - two.0, two.0 - three.0], [values; 2]);
}
