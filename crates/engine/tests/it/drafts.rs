//! Speculative decoding: what is drafted changes when a token comes, never which one it is.
//!
//! The tiny model's drafter is noise, so here another one speaks in its place: it knows the answers, and how many of each block
//! it is to get right. Times are made up, so that counts are exact.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use troika_base::{NumericClass, RequestId, SequenceId};
use troika_device::{SequenceState, StateShape};
use troika_engine::api::{
    Delivery, DraftCounts, EngineStatus, Event, EventSink, FinishReason, GenerateRequest, Generator, Logprobs,
    RequestRecord, Sampling,
};
use troika_engine::{
    Chunk, Core, DiskTier, Engine, EngineOptions, HybridOptions, Priority, Proposal, Runner, RunnerError,
    RunnerOptions, StepResult, StepRunner, Submission,
};
use troika_graph::Acceptance;
use troika_kvstore::Store;
use troika_prompt::Tokenizer;
use troika_runtime::Ticket;
use troika_testkit::compare::assert_same_bits;
use troika_testkit::{repo_root, scratch_dir};

use crate::cache::{CACHED, answer, begin, hear, record, request as sampled, tokens};
use crate::hybrid::{everything, nano_with, soft, wish};
use crate::sampling::remainders;
use crate::serving::LIMITS;
use crate::support::{feed, forward_sequences, open, open_path, options, options_for};

/// Drafts in a block of the tiny model.
const BLOCK: usize = 5;

/// A drafter that knows what follows. A step takes a millisecond and a tenth for each row after the first, a step of the
/// drafter three tenths.
struct Oracle {
    inner: Runner,
    /// Prompts with their answers.
    texts: Vec<Vec<u32>>,
    /// How many drafts of a block are right, in turn.
    right: Vec<usize>,
    /// Position of the first token that was heard of each sequence, and the tokens since.
    heard: BTreeMap<SequenceId, (usize, Vec<u32>)>,
    uncommitted: BTreeMap<SequenceId, Vec<u32>>,
    drafts: BTreeMap<Ticket, Vec<Vec<Proposal>>>,
    elapsed_us: BTreeMap<Ticket, u64>,
}

impl Oracle {
    fn new(inner: Runner, texts: &[Vec<u32>], right: &[usize]) -> Self {
        Self {
            inner,
            texts: texts.to_vec(),
            right: right.to_vec(),
            heard: BTreeMap::new(),
            uncommitted: BTreeMap::new(),
            drafts: BTreeMap::new(),
            elapsed_us: BTreeMap::new(),
        }
    }

    fn hear(&mut self, sequence: SequenceId, tokens: &[u32]) {
        let start = self.inner.num_computed_tokens(sequence).expect("a live sequence");
        self.heard.entry(sequence).or_insert_with(|| (start, Vec::new())).1.extend(tokens);
    }

    fn proposals(&mut self, sequence: SequenceId, newest: u32) -> Vec<Proposal> {
        let (start, heard) = self.heard.get(&sequence).cloned().unwrap_or_default();
        let said = [heard.as_slice(), &[newest]].concat();
        let text = self.texts.iter().find(|text| text.get(start..).is_some_and(|text| text.starts_with(&said)));
        let text = text.expect("one of the texts goes on like this");
        self.right.rotate_left(1);
        let right = self.right[self.right.len() - 1];
        let next = |place: usize| text.get(start + said.len() + place).copied().unwrap_or(0);
        let token = |place: usize| if place < right { next(place) } else { (next(place) + 1) % 383 };
        (0..self.inner.block_of_drafts()).map(|place| Proposal { token: token(place), confidence: 9.0 }).collect()
    }
}

impl StepRunner for Oracle {
    forward_sequences!();

    fn report_hybrid(&self, status: &mut Option<troika_engine::HybridStatus>) {
        self.inner.report_hybrid(status);
    }

    fn block_of_drafts(&self) -> usize {
        self.inner.block_of_drafts()
    }

    fn draft_bytes(&self, sequences: usize) -> u64 {
        self.inner.draft_bytes(sequences)
    }

    fn submit(&mut self, chunks: &[Chunk<'_>], priority: Priority) -> Result<Ticket, RunnerError> {
        for chunk in chunks {
            match chunk.acceptance {
                Acceptance::Whole => self.hear(chunk.sequence, chunk.tokens),
                Acceptance::Partial => drop(self.uncommitted.insert(chunk.sequence, chunk.tokens.to_vec())),
            }
        }
        let ticket = self.inner.submit(chunks, priority)?;
        let rows = chunks.iter().map(|chunk| chunk.tokens.len() as u64).sum::<u64>();
        self.elapsed_us.insert(ticket, 900 + 100 * rows);
        Ok(ticket)
    }

    fn submit_draft(&mut self, newest: &[(SequenceId, u32)]) -> Result<Ticket, RunnerError> {
        let ticket = self.inner.submit_draft(newest)?;
        let drafts = newest.iter().map(|(sequence, newest)| self.proposals(*sequence, *newest)).collect();
        self.drafts.insert(ticket, drafts);
        self.elapsed_us.insert(ticket, 300);
        Ok(ticket)
    }

    fn commit(&mut self, sequence: SequenceId, rows: usize) -> Result<(), RunnerError> {
        let tokens = self.uncommitted.remove(&sequence).expect("a chunk of it is done");
        self.hear(sequence, &tokens[..rows]);
        self.inner.commit(sequence, rows)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<StepResult>, RunnerError> {
        let Some(result) = StepRunner::wait(&mut self.inner, timeout)? else { return Ok(None) };
        let elapsed_us = self.elapsed_us.remove(&result.ticket).expect("every step was noted");
        let drafts = match self.drafts.remove(&result.ticket) {
            Some(drafts) => {
                assert_eq!(result.drafts.len(), drafts.len(), "the model's own drafter says something too");
                assert!(result.drafts.iter().all(|block| block.len() == self.inner.block_of_drafts()));
                drafts
            }
            None => result.drafts,
        };
        Ok(Some(StepResult { elapsed_us, drafts, ..result }))
    }
}

struct Listener(Sender<Event>, Sender<RequestRecord>);

impl EventSink for Listener {
    fn offer(&mut self, event: &Event) -> Delivery {
        if self.0.send(event.clone()).is_ok() { Delivery::Taken } else { Delivery::Gone }
    }

    fn ended(&mut self, record: &RequestRecord) {
        let _ = self.1.send(record.clone());
    }
}

/// A token and how likely it was, if that was asked for.
type Said = (u32, Option<Box<Logprobs>>);

/// What a request heard, and how it was served.
struct Answer {
    tokens: Vec<Said>,
    reason: FinishReason,
    record: RequestRecord,
}

impl Answer {
    fn said(&self) -> (&[Said], FinishReason) {
        (&self.tokens, self.reason)
    }

    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|(token, _)| *token).collect()
    }

    fn drafts(&self) -> &DraftCounts {
        self.record.drafts.as_ref().expect("there is a drafter")
    }
}

/// The engine's core without its thread.
struct World<R: StepRunner> {
    core: Core<R>,
    status: Arc<Mutex<EngineStatus>>,
    next: u64,
    waiting: Vec<(Receiver<Event>, Receiver<RequestRecord>)>,
}

impl<R: StepRunner> World<R> {
    fn new(runner: R, options: &EngineOptions) -> Self {
        let status = Arc::new(Mutex::new(EngineStatus::default()));
        let core = Core::new(runner, options, Arc::clone(&status));
        Self { core, status, next: 1, waiting: Vec::new() }
    }

    fn submit(&mut self, requests: &[GenerateRequest]) -> Vec<RequestId> {
        let mut submit = |request: &GenerateRequest| {
            let ((events, heard), (records, told)) = (channel(), channel());
            let (id, request) = (RequestId(self.next), request.clone());
            self.next += 1;
            let sink = Box::new(Listener(events, records));
            self.core.submit(Submission { id, request, sink, submitted_us: 0 }, 0);
            self.waiting.push((heard, told));
            id
        };
        requests.iter().map(&mut submit).collect()
    }

    /// One turn, and one step if there is any; `before` happens while it is in flight. False if there is nothing to do.
    fn advance(&mut self, before: impl FnOnce(&mut Core<R>)) -> bool {
        self.core.turn(0);
        self.core.check_invariants();
        before(&mut self.core);
        if self.core.is_idle() {
            return false;
        }
        self.core.wait(None, |_| 0);
        self.core.check_invariants();
        // Or its loop would wait for commands, although the next step can begin.
        assert!(!self.core.is_idle(), "a turn is due");
        true
    }

    fn finish(&mut self) -> Vec<Answer> {
        while self.advance(|_| ()) {}
        assert!(self.core.is_empty(), "nobody waits for ever");
        let answers = self.waiting.drain(..).map(|(events, records)| {
            let (mut tokens, mut end) = (Vec::new(), None);
            for event in events.try_iter() {
                assert_eq!(end, None, "nothing follows the end");
                match event {
                    Event::Token { token, logprobs } => tokens.push((token, logprobs)),
                    Event::Prefilled { .. } => {}
                    Event::Finished { reason, .. } => end = Some(reason),
                    Event::Failed { message } => panic!("{message}"),
                }
            }
            let record = records.try_recv().expect("it was told how it was served");
            Answer { tokens, reason: end.expect("it has ended"), record }
        });
        answers.collect()
    }

    fn answer(&mut self, request: &GenerateRequest) -> Answer {
        self.submit(std::slice::from_ref(request));
        self.finish().remove(0)
    }
}

fn tiny(class: NumericClass, draft_context: bool) -> Runner {
    open("tiny", RunnerOptions { draft_context, ..options_for(class) })
}

/// Answers of requests that are alone in the world, without a drafter, and the texts they make.
fn plain(
    runner: impl Fn() -> Runner,
    limits: &EngineOptions,
    asks: &[GenerateRequest],
) -> (Vec<Answer>, Vec<Vec<u32>>) {
    let answer = |ask: &GenerateRequest| {
        let answer = World::new(runner(), limits).answer(ask);
        assert_eq!(answer.record.drafts, None);
        let stop = if let FinishReason::StopToken(token) = answer.reason { vec![token] } else { Vec::new() };
        let text = [ask.prompt.clone(), answer.ids(), stop].concat();
        (answer, text)
    };
    asks.iter().map(answer).unzip()
}

/// Prompts of different lengths, answered in all the ways there are.
fn asks(answer: usize) -> Vec<GenerateRequest> {
    let ask = |seed: u64, sampling| GenerateRequest::new(tokens(seed, 20 + 30 * seed as usize), answer, sampling);
    let random = Sampling { temperature: 1.0, top_p: 0.9, seed: 7, ..Sampling::GREEDY };
    let penalties = Sampling { frequency_penalty: 0.4, presence_penalty: 0.3, repetition_penalty: 1.2, ..random };
    let stopped = GenerateRequest { logprobs: Some(3), ..ask(4, Sampling::GREEDY) };
    let (alone, _) = plain(|| tiny(NumericClass::Exact, false), &LIMITS, std::slice::from_ref(&stopped));
    vec![
        ask(1, Sampling::GREEDY),
        GenerateRequest { logprobs: Some(2), ..ask(2, random) },
        GenerateRequest { logit_bias: vec![(77, 2.0)], logprobs: Some(0), ..ask(3, penalties) },
        GenerateRequest { stop_tokens: vec![alone[0].tokens[answer / 2].0], ..stopped },
        GenerateRequest { constraint: remainders(99, answer - 6), ..ask(5, random) },
    ]
}

/// The first token of an answer is the prompt's; every other is that of a decode step or a draft that held.
fn check_counts(answer: &Answer, steps: u64) {
    let DraftCounts { verifications, drafted, accepted, by_place, skipped, .. } = answer.drafts();
    let tokens = answer.tokens.len() as u64 + u64::from(matches!(answer.reason, FinishReason::StopToken(_)));
    assert_eq!(tokens, 1 + steps + accepted);
    assert_eq!(steps, verifications + skipped.values().sum::<u64>());
    let sums = by_place.iter().fold([0, 0], |sum, place| [sum[0] + place[0], sum[1] + place[1]]);
    assert_eq!(sums, [*drafted, *accepted]);
}

#[test]
fn no_draft_changes_a_token() {
    for class in [NumericClass::Exact, NumericClass::Official, NumericClass::Fast] {
        let asks = asks(30);
        let (want, texts) = plain(|| tiny(class, false), &LIMITS, &asks);
        for right in [&[5][..], &[1, 0, 3, 5, 2]] {
            for (ask, want) in asks.iter().zip(&want) {
                let mut world = World::new(Oracle::new(tiny(class, true), &texts, right), &LIMITS);
                let got = world.answer(ask);
                assert_eq!(got.said(), want.said(), "{class}, {right:?}");
                check_counts(&got, world.status.lock().expect("not poisoned").decode.steps);
            }
            // As many as are drafted for, then more.
            for beside in [2, 4, 5] {
                let limits = EngineOptions { max_running: 8, ..LIMITS };
                let mut world = World::new(Oracle::new(tiny(class, true), &texts, right), &limits);
                world.submit(&asks[..beside]);
                for (got, want) in world.finish().iter().zip(&want) {
                    assert_eq!(got.said(), want.said(), "{class}, {right:?}, {beside} side by side");
                    assert_eq!(got.drafts().skipped.contains_key("batch"), beside == 5, "{:?}", got.drafts());
                }
                assert_eq!(world.core.runner().inner.state_bytes(), 0, "nothing is left behind");
            }
        }
    }
}

#[test]
fn counts_are_exact() {
    let ask = GenerateRequest::new(tokens(1, 50), 40, Sampling::GREEDY);
    let (_, texts) = plain(|| tiny(NumericClass::Exact, false), &LIMITS, std::slice::from_ref(&ask));
    let counts = |right: &[usize]| {
        let oracle = Oracle::new(tiny(NumericClass::Exact, true), &texts, right);
        let mut world = World::new(oracle, &LIMITS);
        let answer = world.answer(&ask);
        let status = world.status.lock().expect("not poisoned");
        check_counts(&answer, status.decode.steps);
        assert_eq!(status.drafts.as_ref(), Some(answer.drafts()), "there was nobody else");
        assert_eq!(status.decode.tokens, status.decode.steps + answer.drafts().drafted);
        let DraftCounts { verifications, drafted, accepted, by_place, skipped, .. } = answer.drafts().clone();
        (verifications, drafted, accepted, by_place, skipped.into_iter().collect::<Vec<_>>(), status.draft.steps)
    };
    // The answer's first token, four steps that say what a step takes, then six tokens each; the last five need four drafts.
    let by_place = vec![[6, 6], [6, 6], [6, 6], [6, 6], [5, 5]];
    assert_eq!(counts(&[BLOCK]), (6, 29, 29, by_place, vec![("measuring", 4)], 6));
    // Four in vain, and the rest goes without; nothing could follow the last.
    let skipped = vec![("ending", 1), ("measuring", 4), ("unprofitable", 30)];
    assert_eq!(counts(&[0]), (4, 20, 0, vec![[4, 0]; BLOCK], skipped, 4));
    let by_place = vec![[11, 9], [11, 6], [10, 4], [10, 2], [10, 2]];
    assert_eq!(counts(&[1, 0, 3, 5, 2]), (11, 52, 23, by_place, vec![("ending", 1), ("measuring", 4)], 11));
}

/// Whenever one of two ends, before its drafts are there, while they are verified or after, the other goes on as if alone.
#[test]
fn whenever_one_is_cancelled_the_other_goes_on() {
    let asks = [1, 2].map(|seed| sampled(tokens(seed, 60), 24));
    let (want, texts) = plain(|| tiny(NumericClass::Fast, false), &LIMITS, &asks);
    let mut moments = 0;
    for moment in 0.. {
        let mut world = World::new(Oracle::new(tiny(NumericClass::Fast, true), &texts, &[2, 0, 5]), &LIMITS);
        let ids = world.submit(&asks);
        for _ in 0..moment {
            world.advance(|_| ());
        }
        let mut was_late = false;
        world.advance(|core| {
            was_late = core.is_idle();
            core.cancel(ids[moment % 2], 0);
        });
        let answers = world.finish();
        let (gone, other) = (moment % 2, 1 - moment % 2);
        assert_eq!(answers[other].said(), want[other].said(), "cancelled at {moment}");
        assert!(want[gone].tokens.starts_with(&answers[gone].tokens), "cancelled at {moment}");
        assert_eq!(world.core.runner().inner.state_bytes(), 0, "cancelled at {moment}");
        moments += usize::from(answers[gone].reason == FinishReason::Cancelled);
        if was_late {
            break;
        }
    }
    assert!(moments > 12, "{moments} moments");
}

#[test]
fn those_that_are_preempted_say_the_same() {
    let asks = [1, 2].map(|seed| sampled(tokens(seed, 100), 60));
    let (want, texts) = plain(|| tiny(NumericClass::Fast, false), &LIMITS, &asks);
    let oracle = || Oracle::new(tiny(NumericClass::Fast, true), &texts, &[5, 1, 3]);
    let shape = oracle().state_shape().clone();
    let roomy = World::new(oracle(), &EngineOptions { memory_bytes: 1 << 32, ..LIMITS });
    let values_bytes = (1 << 32) - roomy.status.lock().expect("not poisoned").state_bytes_limit;
    // Both prompts fit, and the second block of one of them.
    let memory_bytes = values_bytes + 2 * shape.fixed_bytes() + 3 * shape.bytes_per_block();
    let mut world = World::new(oracle(), &EngineOptions { memory_bytes, ..LIMITS });
    world.submit(&asks);
    for (got, want) in world.finish().iter().zip(&want) {
        assert_eq!(got.said(), want.said());
        assert!(got.drafts().accepted > 0);
    }
    let status = world.status.lock().expect("not poisoned");
    assert_eq!(status.preemptions_total, 1);
}

/// Drafts across the end of a block, right and wrong ones: the same blocks and boundaries are kept as without, and who resumes
/// from them, drafter or not, says the same.
#[test]
fn what_is_kept_is_the_same() {
    let limits = EngineOptions { max_context_tokens: 4096, ..CACHED };
    let first = sampled(tokens(1, 120), 160);
    let serve = |world: &mut dyn FnMut(&GenerateRequest) -> Answer| {
        let mut prompt = first.prompt.clone();
        let mut answers = vec![world(&first)];
        for turn in 2..4 {
            prompt.extend(answers.last().expect("begun").ids());
            prompt.extend(tokens(turn, 40));
            answers.push(world(&sampled(prompt.clone(), 130)));
        }
        answers
    };
    let mut without = World::new(tiny(NumericClass::Fast, false), &limits);
    let want = serve(&mut |ask| without.answer(ask));
    let kept = |answer: &Answer| {
        let RequestRecord { usage, stored_blocks, skipped_blocks, .. } = &answer.record;
        (usage.cached_tokens, *stored_blocks, *skipped_blocks)
    };
    assert_eq!(want.iter().map(kept).collect::<Vec<_>>(), [(0, 2, 0), (256, 3, 0), (384, 4, 0)]);
    let mut texts = vec![[first.prompt.clone(), want[0].ids()].concat()];
    for turn in 1..3 {
        texts.push([texts[turn - 1].clone(), tokens(turn as u64 + 1, 40), want[turn].ids()].concat());
    }
    texts.reverse();
    for right in [&[5][..], &[0, 5, 4], &[3, 2, 5]] {
        let oracle = Oracle::new(tiny(NumericClass::Fast, true), &texts, right);
        let mut world = World::new(oracle, &limits);
        let got = serve(&mut |ask| world.answer(ask));
        for (got, want) in got.iter().zip(&want) {
            assert_eq!((got.said(), kept(got)), (want.said(), kept(want)), "{right:?}");
            assert!(got.drafts().accepted > 50, "{:?}", got.drafts());
        }
        let [with, without] = [&world.status, &without.status].map(|s| s.lock().expect("not poisoned").cache);
        assert_eq!(with, without, "{right:?}");
    }
}

/// With engines, prompts are of another class than what is decoded, and drafts are verified in that of the latter.
#[test]
fn beside_engines_too() {
    let runner = |draft_context| {
        let engines = (soft(1), HybridOptions { tile: 128, ..wish(everything(), 0) });
        nano_with(RunnerOptions { draft_context, ..RunnerOptions::new(NumericClass::Fast) }, Some(engines))
    };
    let limits = EngineOptions { max_context_tokens: 2048, wavefront: 2, ..CACHED };
    let asks = [sampled(tokens(1, 300), 24)];
    let (want, texts) = plain(|| runner(false), &limits, &asks);
    let mut world = World::new(Oracle::new(runner(true), &texts, &[5, 2, 0]), &limits);
    let got = world.answer(&asks[0]);
    assert_eq!(got.said(), want[0].said());
    assert!(got.drafts().accepted >= 7, "{:?}", got.drafts());
    let bypassed = got.record.ledger.total_operations();
    assert!(bypassed.bypass_verify > 0 && bypassed.bypass_decode > 0, "{bypassed:?}");
    assert_eq!(bypassed.planned, bypassed.dispatched(), "prompts have their tiles all the same");
}

/// Several blocks in one step are the blocks of each.
#[test]
fn a_block_does_not_depend_on_its_neighbours() {
    for class in [NumericClass::Exact, NumericClass::Fast] {
        let mut runner = tiny(class, true);
        let sequences = [3, 64, 200].map(|length| {
            let sequence = runner.new_sequence();
            feed(&mut runner, sequence, &tokens(length as u64, length), 0);
            sequence
        });
        let alone = sequences.map(|sequence| runner.draft(sequence, 9).expect("there is a drafter"));
        let ticket = runner.submit_draft(&sequences.map(|sequence| (sequence, 9))).expect("queued");
        let together =
            StepRunner::wait(&mut runner, None).expect("done").expect("without an end, a step ends the wait");
        assert_eq!((together.ticket, together.drafts.len()), (ticket, 3));
        for (alone, together) in alone.iter().zip(&together.drafts) {
            let (ids, confidence): (Vec<u32>, Vec<f32>) = together.iter().map(|p| (p.token, p.confidence)).unzip();
            assert_eq!(ids, alone.tokens);
            assert_same_bits("confidence", &confidence, &alone.confidence);
        }
    }
}

#[test]
fn a_checkpoint_without_a_drafter_is_refused() {
    let refused = |name: &str| {
        let (config, weights) = crate::support::checkpoint(name);
        let options = RunnerOptions { draft_context: true, ..options() };
        Runner::new(config, weights.facts(), &weights, options).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(refused("tiny-bf16"), Err("no drafter: no mtp.* tensors".to_owned()));
    assert_eq!(refused("tiny"), Ok(()));
}

fn nano(draft_context: bool, cache_dir: Option<&Path>) -> Engine {
    let options = RunnerOptions { draft_context, ..options_for(NumericClass::Fast) };
    let tier = cache_dir.map(|dir| {
        let (store, items) = Store::open(dir, 1 << 30).expect("opens");
        DiskTier { store, items, weights: b"nano".to_vec(), tokenizer: b"t".to_vec() }
    });
    let runner = open_path(&repo_root().join("models/nano"), options);
    Engine::start_with_disk(runner, EngineOptions { max_context_tokens: 2048, ..CACHED }, tier).expect("starts")
}

/// The model we ship, its own drafter and real text.
#[test]
fn nano_drafts_and_says_the_same() {
    let dir = repo_root().join("models/nano");
    let tokenizer = Tokenizer::from_file(&dir.join("tokenizer.json")).expect("opens");
    let text = std::fs::read_to_string(dir.join("held-out.txt")).expect("readable");
    // A place where the drafter is sure of something.
    let text: String = text.chars().skip(17_500).take(2000).collect();
    let prompt = tokenizer.encode(&text).expect("encodes")[..300].to_vec();
    let cache = scratch_dir();
    for ask in [sampled(prompt.clone(), 60), GenerateRequest { sampling: Sampling::GREEDY, ..sampled(prompt, 60) }] {
        let (want, _) = answer(&nano(false, Some(cache.path())), ask.clone());
        // Two blocks that a process without a drafter has left.
        let engine = nano(true, Some(cache.path()));
        let (got, usage) = answer(&engine, ask.clone());
        assert_eq!((got, usage.cached_tokens), (want, 256));
        let record = record(&engine, ask);
        let drafts = record.drafts.expect("there is a drafter");
        assert_eq!(
            record.usage.completion_tokens as u64,
            1 + drafts.verifications + drafts.skipped.values().sum::<u64>() + drafts.accepted
        );
        // How many are verified depends on what steps took.
        let status = engine.status();
        let total = status.drafts.expect("there is a drafter");
        assert!(status.draft.steps > 0 && total.drafted >= total.accepted, "{total:?}");
    }
    // Side by side, one of which is not listened to for long.
    let asks = [1, 2, 3].map(|seed| sampled(tokens(seed, 50 * seed as usize), 40));
    let want = asks.clone().map(|ask| answer(&nano(false, None), ask).0);
    let engine = nano(true, None);
    drop(begin(&engine, sampled(tokens(4, 70), 200)));
    let heard = asks.map(|ask| begin(&engine, ask));
    assert_eq!(heard.each_ref().map(|events| hear(events).0), want);
}
