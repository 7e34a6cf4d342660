//! The scheduler alone, on a virtual clock: a step of a lane takes as long as its rows.

use std::collections::BTreeMap;

use proptest::prelude::*;
use troika_base::RequestId;
use troika_scheduler::{
    Geometry, GeometryRequest, Lane, Limits, NARROWINGS, NewSequence, Refusal, Rule, Scheduler, StateCost, Urgency,
};

const STEP: usize = 512;
const CHUNK_US: u64 = 100_000;

fn geometry(step: usize) -> Geometry {
    let request =
        GeometryRequest { tile: None, step, honour_step: false, block: 128, cache: true, snapshot_spacing: 2048 };
    Geometry::resolve(&request, |_| true)
}

fn limits() -> Limits {
    Limits {
        geometry: geometry(STEP),
        budget_tokens: STEP,
        wavefront: 1,
        max_running: 16,
        max_queued: 64,
        max_itl_us: 200_000,
        state_bytes: u64::MAX,
        reserve_bytes: 0,
        narrowing_frees: [0; NARROWINGS],
        state_cost: StateCost { fixed_bytes: 1000, bytes_per_block: 100 },
        two_classes: false,
    }
}

fn new(tokens: usize) -> NewSequence {
    NewSequence { tokens, urgency: Urgency::Normal, deadline_us: None }
}

/// Whose, and how many drafts of it.
type Share = (RequestId, usize);

/// Sequences, each of which wants some tokens after its prompt, computed on a virtual clock.
struct World {
    scheduler: Scheduler,
    now_us: u64,
    wanted: BTreeMap<RequestId, usize>,
    /// Tokens of each, computed or not.
    known: BTreeMap<RequestId, usize>,
    /// Number, lane, time it is done, time it takes, and its shares.
    in_flight: Vec<(u64, Lane, u64, u64, Vec<Share>)>,
    first_token_us: BTreeMap<RequestId, u64>,
    gaps_us: Vec<u64>,
    last_token_us: BTreeMap<RequestId, u64>,
    chunks: Vec<(RequestId, troika_scheduler::ChunkRecord)>,
    /// Drafts that are made at once, and how many of them hold, in turn.
    drafts: usize,
    luck: Vec<usize>,
    /// How much longer each decode step takes beside a prefill step, in turn.
    delays_us: Vec<u64>,
}

impl World {
    fn new(limits: Limits) -> Self {
        Self {
            scheduler: Scheduler::new(limits),
            now_us: 0,
            wanted: BTreeMap::new(),
            known: BTreeMap::new(),
            in_flight: Vec::new(),
            first_token_us: BTreeMap::new(),
            gaps_us: Vec::new(),
            last_token_us: BTreeMap::new(),
            chunks: Vec::new(),
            drafts: 0,
            luck: vec![0],
            delays_us: vec![0],
        }
    }

    fn submit(&mut self, id: u64, tokens: usize, wanted: usize) {
        self.scheduler.submit(RequestId(id), new(tokens)).expect("taken");
        self.wanted.insert(RequestId(id), wanted);
        self.known.insert(RequestId(id), tokens);
    }

    /// Plans what can be planned, then lets the earliest step finish. False if nothing is left to do.
    fn advance(&mut self) -> bool {
        for id in self.scheduler.admit() {
            self.scheduler.attached(id, 0);
        }
        for (id, wanted) in &self.wanted {
            self.scheduler.set_drafts(*id, self.drafts.min(wanted - 1));
        }
        for lane in [Lane::Decode, Lane::Prefill, Lane::Prefill, Lane::Prefill] {
            if !self.scheduler.has_room(lane) {
                continue;
            }
            let plan = self.scheduler.plan(lane, self.now_us);
            self.scheduler.check_invariants();
            for id in &plan.exhausted {
                self.wanted.remove(id);
            }
            if plan.parts.is_empty() {
                continue;
            }
            let number = plan.number;
            let rows: usize = plan.parts.iter().map(|part| part.chunk.width).sum();
            let took = match lane {
                Lane::Decode if !self.in_flight.is_empty() => {
                    self.delays_us.rotate_left(1);
                    20_000 + self.delays_us[0]
                }
                Lane::Decode => 20_000,
                Lane::Prefill => CHUNK_US * rows as u64 / STEP as u64 + 1,
            };
            // A decode step in between pushes a prefill step back.
            if lane == Lane::Decode {
                self.in_flight.iter_mut().for_each(|(_, _, done, ..)| *done += took);
            }
            assert!(lane == Lane::Decode || plan.parts.iter().all(|part| part.drafts == 0));
            let ids = plan.parts.iter().map(|part| (part.request, part.drafts)).collect();
            if lane == Lane::Prefill {
                self.chunks.extend(plan.parts.into_iter().map(|part| (part.request, part.chunk)));
            }
            // One processor: prefill steps follow each other.
            let both = |other| [other, lane] == [Lane::Prefill; 2];
            let prefills = self.in_flight.iter().filter(|(_, other, ..)| both(*other));
            let start = prefills.map(|(_, _, done, ..)| *done).max().unwrap_or(self.now_us);
            self.in_flight.push((number, lane, start + took, took, ids));
        }
        let due = self.scheduler.next_due_us();
        let next = (0..self.in_flight.len()).min_by_key(|i| self.in_flight[*i].2);
        let Some(next) = next else { return false };
        if let Some(due) = due
            && due < self.in_flight[next].2
        {
            self.now_us = self.now_us.max(due);
            return true;
        }
        let (number, _, done, took, ids) = self.in_flight.remove(next);
        self.now_us = self.now_us.max(done);
        let node_us = took / 20;
        for (id, drafts) in &ids {
            self.luck.rotate_left(1);
            let accepted = self.luck[0].min(*drafts);
            self.scheduler.accept_drafts(*id, accepted);
            self.wanted.entry(*id).and_modify(|left| *left -= accepted);
            *self.known.get_mut(id).expect("submitted") += accepted;
        }
        self.scheduler.complete(number, self.now_us, took, node_us);
        for (id, _) in ids {
            if self.scheduler.num_computed_tokens(id) == self.known[&id] {
                self.token(id);
            }
        }
        self.scheduler.check_invariants();
        true
    }

    fn token(&mut self, id: RequestId) {
        self.first_token_us.entry(id).or_insert(self.now_us);
        if let Some(last) = self.last_token_us.insert(id, self.now_us) {
            self.gaps_us.push(self.now_us - last);
        }
        let Some(left) = self.wanted.get_mut(&id) else { return };
        *left -= 1;
        if *left == 0 {
            self.wanted.remove(&id);
            self.scheduler.end(id);
        } else {
            self.scheduler.push_token(id);
            *self.known.get_mut(&id).expect("submitted") += 1;
        }
    }
}

#[test]
fn chunks_end_at_multiples_of_the_step_also_after_a_hit() {
    let mut world = World::new(limits());
    world.submit(1, 1500, 1);
    assert_eq!(world.scheduler.admit(), [RequestId(1)]);
    world.scheduler.attached(RequestId(1), 384);
    while world.advance() {}
    let edges: Vec<(usize, usize)> = world.chunks.iter().map(|(_, chunk)| (chunk.start, chunk.width)).collect();
    assert_eq!(edges, [(384, 128), (512, 512), (1024, 476)], "the last token goes with the last chunk");
    let rules: Vec<Rule> = world.chunks.iter().flat_map(|(_, c)| c.narrowed_by.iter().map(|n| n.rule)).collect();
    assert_eq!(rules, [Rule::Alignment, Rule::Remaining]);
    let narrowing = world.chunks[0].1.narrowed_by[0];
    assert_eq!((narrowing.before, narrowing.after), (512, 128));
}

#[test]
fn a_prompt_may_have_several_chunks_in_flight() {
    let mut scheduler = Scheduler::new(Limits { wavefront: 3, ..limits() });
    scheduler.submit(RequestId(1), new(4 * STEP)).expect("taken");
    scheduler.submit(RequestId(2), new(5 * STEP)).expect("taken");
    for id in scheduler.admit() {
        scheduler.attached(id, 0);
    }
    let plan = |scheduler: &mut Scheduler| {
        let plan = scheduler.plan(Lane::Prefill, 0);
        scheduler.check_invariants();
        let parts: Vec<_> =
            plan.parts.iter().map(|part| (part.request.0, part.chunk.start, part.chunk.width)).collect();
        (plan.number, parts)
    };
    let steps: Vec<_> = (0..3).map(|_| plan(&mut scheduler)).collect();
    let parts: Vec<_> = steps.iter().flat_map(|(_, parts)| parts.clone()).collect();
    assert_eq!(parts, [(1, 0, STEP), (1, STEP, STEP), (1, 2 * STEP, STEP)]);
    assert!(!scheduler.has_room(Lane::Prefill));
    assert_eq!(scheduler.num_computed_tokens(RequestId(1)), 0);
    // Its state is needed until the last of its steps is done.
    assert!(!scheduler.end(RequestId(1)));
    assert_eq!(scheduler.complete(steps[0].0, 1, 1, 1), []);
    assert_eq!(scheduler.num_computed_tokens(RequestId(1)), STEP);
    let (other, parts) = plan(&mut scheduler);
    assert_eq!(parts, [(2, 0, STEP)], "nothing more is begun of a sequence that has ended");
    assert_eq!(scheduler.complete(steps[1].0, 2, 1, 1), []);
    assert_eq!(scheduler.complete(steps[2].0, 3, 1, 1), [RequestId(1)]);
    // A step that is refused leaves those before it to finish.
    let (refused, parts) = plan(&mut scheduler);
    assert_eq!(parts, [(2, STEP, STEP)]);
    scheduler.abandon(refused);
    scheduler.check_invariants();
    assert!(scheduler.plan(Lane::Prefill, 4).parts.is_empty());
    assert_eq!(scheduler.complete(other, 5, 1, 1), [RequestId(2)]);
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.reserved_bytes(), 0);
}

#[test]
fn short_prompts_overtake_a_long_one_and_streams_go_on() {
    let mut world = World::new(limits());
    world.submit(1, 10, 100_000);
    world.submit(2, 50 * STEP + 1, 2);
    let mut submitted = BTreeMap::new();
    let mut next = 10;
    while world.advance() {
        // Ten prompts of one chunk, one after another.
        let due = world.now_us > 450_000 * (next - 9);
        if next < 20 && due {
            submitted.insert(RequestId(next), world.now_us);
            world.submit(next, STEP, 4);
            next += 1;
        }
        if world.first_token_us.len() == 12 {
            break;
        }
    }
    let mut waits: Vec<u64> = submitted.iter().map(|(id, at)| world.first_token_us[id] - at).collect();
    waits.sort_unstable();
    assert!(waits[waits.len() / 2] <= 3 * CHUNK_US, "median {} us", waits[waits.len() / 2]);
    let mut gaps = world.gaps_us.clone();
    gaps.sort_unstable();
    let p99 = gaps[gaps.len() * 99 / 100];
    assert!(p99 <= 240_000, "{p99} us between tokens");
    assert!(world.chunks.iter().all(|(_, chunk)| chunk.narrowed_by.iter().all(|n| n.rule != Rule::MaxItl)));
}

/// Other programs take the cores now and then: what the nodes say is not what happens.
#[test]
fn a_stream_on_a_crowded_machine_is_given_more_time() {
    let mut world = World::new(Limits { max_itl_us: 80_000, ..limits() });
    world.delays_us = vec![1_000, 28_000, 5_000, 20_000, 0, 24_000, 12_000];
    world.submit(1, 10, 100_000);
    world.submit(2, 200 * STEP + 1, 1);
    while world.advance() && !world.first_token_us.contains_key(&RequestId(2)) {}
    let mut gaps = world.gaps_us.clone();
    assert!(gaps.len() >= 190, "{} tokens", gaps.len());
    gaps.sort_unstable();
    let p99 = gaps[gaps.len() * 99 / 100];
    assert!(p99 <= 96_000, "{p99} us between tokens");
    let chunks_us = 200 * CHUNK_US;
    assert!(world.now_us < 2 * chunks_us, "prefill goes on: {} us for {chunks_us} us of chunks", world.now_us);
}

#[test]
fn a_node_that_would_break_the_bound_narrows_the_chunk() {
    let limits = Limits { max_itl_us: 30_000, ..limits() };
    let mut scheduler = Scheduler::new(limits);
    scheduler.submit(RequestId(1), new(1)).expect("taken");
    scheduler.submit(RequestId(2), new(4 * STEP)).expect("taken");
    for id in scheduler.admit() {
        assert_eq!(scheduler.plan(Lane::Prefill, 0).parts, [], "what is kept of it is not here yet");
        scheduler.check_invariants();
        scheduler.attached(id, 0);
    }
    let plan = scheduler.plan(Lane::Prefill, 0);
    assert_eq!(plan.parts[0].chunk.width, STEP, "nothing is known yet");
    scheduler.complete(plan.number, 100_000, 100_000, 60_000);
    let chunk = &scheduler.plan(Lane::Prefill, 100_000).parts[0].chunk;
    assert_eq!((chunk.start, chunk.width), (STEP, STEP / 2));
    assert_eq!(chunk.narrowed_by[0].rule, Rule::MaxItl);
}

/// However many short prompts keep coming, a long one is in every fifth step at least.
#[test]
fn nobody_starves() {
    let mut world = World::new(limits());
    world.submit(1, 20 * STEP, 1);
    let mut id = 2;
    for _ in 0..400 {
        while world.scheduler.num_queued() + world.scheduler.num_running() < 6 {
            world.submit(id, 400, 1);
            id += 1;
        }
        if !world.advance() || world.first_token_us.contains_key(&RequestId(1)) {
            break;
        }
    }
    assert!(world.first_token_us.contains_key(&RequestId(1)), "after 400 events the long prompt is through");
}

#[test]
fn a_full_queue_and_a_hopeless_prompt_are_answers() {
    let limits = Limits { max_queued: 2, state_bytes: 2000, ..limits() };
    let mut scheduler = Scheduler::new(limits);
    assert_eq!(
        scheduler.submit(RequestId(1), new(128 * 11)),
        Err(Refusal::NeverFits { need_bytes: 2200, limit_bytes: 2000 })
    );
    for id in 2..4 {
        scheduler.submit(RequestId(id), new(10)).expect("taken");
    }
    assert_eq!(scheduler.submit(RequestId(4), new(10)), Err(Refusal::QueueFull { queued: 2, limit: 2 }));
    assert!(scheduler.retry_after_s() >= 1);
    assert_eq!(scheduler.admit(), [RequestId(2)], "the second would not leave room to grow");
}

#[test]
fn urgent_ones_first_and_late_ones_no_longer() {
    let mut scheduler = Scheduler::new(Limits { max_running: 1, ..limits() });
    scheduler.submit(RequestId(1), new(10)).expect("taken");
    scheduler.submit(RequestId(2), NewSequence { deadline_us: Some(5), ..new(9) }).expect("taken");
    let urgent = NewSequence { urgency: Urgency::High, deadline_us: Some(7), ..new(5000) };
    scheduler.submit(RequestId(3), urgent).expect("taken");
    assert_eq!(scheduler.admit(), [RequestId(3)]);
    assert_eq!(scheduler.expired(4), []);
    assert_eq!(scheduler.expired(5), [RequestId(2)]);
    // Whether it has started or not.
    assert_eq!(scheduler.expired(7), [RequestId(2), RequestId(3)]);
    assert!(scheduler.end(RequestId(3)));
    assert_eq!(scheduler.expired(7), [RequestId(2)]);
}

/// Never to a width between half a tile and a tile, nor to one and a half.
#[test]
fn steps_are_narrowed_by_whole_tiles_then_by_halves() {
    let narrowed = |tile, step| {
        let request = GeometryRequest { tile, step, honour_step: true, block: 128, cache: false, snapshot_spacing: 1 };
        let geometry = Geometry::resolve(&request, |_| true);
        [0, 1, 2, 3, 4, 40].map(|times| geometry.narrowed(times))
    };
    assert_eq!(narrowed(Some(256), 1280), [1280, 512, 256, 128, 64, 1]);
    assert_eq!(narrowed(Some(512), 1536), [1536, 512, 256, 128, 64, 1]);
    assert_eq!(narrowed(Some(512), 300), [300, 150, 75, 37, 18, 1], "out of reach");
    assert_eq!(narrowed(None, 1536), [1536, 768, 384, 192, 96, 1]);
}

#[test]
fn what_was_decoded_before_a_preemption_is_decoded_again() {
    // Both prompts fit, and the second block of one of them.
    let mut scheduler = Scheduler::new(Limits { two_classes: true, state_bytes: 2300, ..limits() });
    let [older, younger] = [RequestId(1), RequestId(2)];
    let step = |scheduler: &mut Scheduler, lane| {
        let plan = scheduler.plan(lane, 0);
        scheduler.check_invariants();
        let chunks: Vec<_> = plan.parts.iter().map(|p| (p.request, p.chunk.start, p.chunk.width)).collect();
        if !chunks.is_empty() {
            scheduler.complete(plan.number, 0, 1, 1);
        }
        (chunks, plan.preempted)
    };
    for id in [older, younger] {
        scheduler.submit(id, new(101)).expect("taken");
    }
    scheduler.admit().into_iter().for_each(|id| scheduler.attached(id, 0));
    assert_eq!(step(&mut scheduler, Lane::Prefill).0, [(older, 0, 100), (younger, 0, 100)]);
    let mut decoded = 100;
    loop {
        let (chunks, preempted) = step(&mut scheduler, Lane::Decode);
        chunks.iter().for_each(|(id, ..)| scheduler.push_token(*id));
        if preempted == [younger] {
            break;
        }
        assert_eq!(chunks, [(older, decoded, 1), (younger, decoded, 1)]);
        decoded += 1;
    }
    assert!(decoded > 110 && scheduler.end(older));
    assert_eq!(scheduler.admit(), [younger]);
    scheduler.attached(younger, 0);
    assert_eq!(step(&mut scheduler, Lane::Prefill).0, [(younger, 0, 100)]);
    assert_eq!(step(&mut scheduler, Lane::Prefill).0, []);
    // And the newest, which is computed for the first time.
    (100..=decoded).for_each(|at| assert_eq!(step(&mut scheduler, Lane::Decode).0, [(younger, at, 1)]));
    assert_eq!(step(&mut scheduler, Lane::Decode).0, []);
}

/// Those that hold are tokens like any other. Nobody gives anything up for a draft.
#[test]
fn drafts_have_the_memory_that_is_left() {
    // A block of each of the two, and one more.
    let mut scheduler = Scheduler::new(Limits { state_bytes: 2300, ..limits() });
    let both = [RequestId(1), RequestId(2)];
    for (id, tokens) in both.into_iter().zip([124, 125]) {
        scheduler.submit(id, new(tokens)).expect("taken");
        assert_eq!(scheduler.admit(), [id]);
        scheduler.attached(id, tokens - 1);
        scheduler.set_drafts(id, 5);
    }
    let mut step = |held: [usize; 2]| {
        let plan = scheduler.plan(Lane::Decode, 0);
        scheduler.check_invariants();
        let parts: Vec<_> = plan.parts.iter().map(|p| (p.chunk.start, p.chunk.width, p.drafts)).collect();
        let reserved = scheduler.reserved_bytes();
        for (part, held) in plan.parts.iter().zip(held) {
            scheduler.accept_drafts(part.request, held);
        }
        scheduler.complete(plan.number, 0, 1, 1);
        scheduler.check_invariants();
        plan.parts.iter().for_each(|part| scheduler.push_token(part.request));
        (parts, reserved, plan.preempted)
    };
    // The first one's drafts begin its second block, so those of the other end with its first.
    assert_eq!(step([0, 2]), (vec![(123, 1, 5), (124, 1, 2)], 2300, vec![]));
    // None of the first held; of the other the second block has begun.
    assert_eq!(step([2, 0]), (vec![(124, 1, 2), (127, 1, 5)], 2300, vec![]));
    // A token is worth what a draft is not.
    assert_eq!(step([5, 0]), (vec![(127, 1, 5)], 1200, vec![RequestId(2)]));
    assert_eq!(both.map(|id| scheduler.num_computed_tokens(id)), [133, 0]);
}

/// A sequence that is too large for the memory beside wide steps: first others give up what they can spare, then steps are
/// halved; when it is gone they are as wide as before.
#[test]
fn memory_is_taken_from_the_reserve_then_from_steps() {
    let request = GeometryRequest {
        tile: Some(256),
        step: 512,
        honour_step: false,
        block: 128,
        cache: false,
        snapshot_spacing: 1,
    };
    let limits = Limits {
        geometry: Geometry::resolve(&request, |_| true),
        state_bytes: 2000,
        reserve_bytes: 300,
        narrowing_frees: [400, 600, 700, 750],
        ..limits()
    };
    let mut scheduler = Scheduler::new(limits);
    let widths = |scheduler: &mut Scheduler| -> Vec<(usize, Vec<Rule>)> {
        let mut widths = Vec::new();
        loop {
            let plan = scheduler.plan(Lane::Prefill, 0);
            scheduler.check_invariants();
            assert!(plan.parts.len() <= 1 && plan.preempted.is_empty());
            let Some(part) = plan.parts.first() else { return widths };
            let rules = part.chunk.narrowed_by.iter().map(|narrowing| narrowing.rule).collect();
            widths.push((part.chunk.width, rules));
            scheduler.complete(plan.number, 0, 1, 1);
        }
    };
    let refused = scheduler.submit(RequestId(0), new(21 * 128 + 1));
    assert_eq!(refused, Err(Refusal::NeverFits { need_bytes: 3200, limit_bytes: 3050 }));
    // 1000 and 8 blocks fit.
    scheduler.submit(RequestId(1), new(1024)).expect("taken");
    assert_eq!((scheduler.bytes_short(), scheduler.admit()), (0, vec![RequestId(1)]));
    scheduler.attached(RequestId(1), 0);
    assert_eq!(widths(&mut scheduler), [(512, vec![]), (512, vec![])]);
    // 1000 and 16 blocks do not, but while the first one runs that is nobody's trouble.
    scheduler.submit(RequestId(2), new(2047)).expect("taken");
    assert_eq!((scheduler.bytes_short(), scheduler.admit()), (0, vec![]));
    assert!(scheduler.end(RequestId(1)));
    assert_eq!(scheduler.bytes_short(), 600);
    scheduler.take_bytes(300);
    assert_eq!((scheduler.bytes_short(), scheduler.throttle_in_force(), scheduler.state_limit()), (300, 1, 2700));
    assert_eq!(scheduler.admit(), [RequestId(2)]);
    scheduler.attached(RequestId(2), 0);
    let narrow = || (256, vec![Rule::Memory]);
    let last = (255, vec![Rule::Memory, Rule::Remaining]);
    assert_eq!(widths(&mut scheduler), [vec![narrow(); 7], vec![last]].concat());
    assert!(scheduler.end(RequestId(2)));
    scheduler.submit(RequestId(3), new(1025)).expect("taken");
    assert_eq!((scheduler.admit(), scheduler.state_limit()), (vec![RequestId(3)], 2300));
    scheduler.attached(RequestId(3), 0);
    assert_eq!(widths(&mut scheduler), [(512, vec![]), (512, vec![])]);
}

/// Steps in flight end as they are; then the state goes, and the sequence comes in again.
#[test]
fn what_is_not_trusted_is_computed_again() {
    let mut scheduler = Scheduler::new(Limits { wavefront: 2, two_classes: true, ..limits() });
    let [prompt, stream] = [RequestId(1), RequestId(2)];
    scheduler.submit(stream, new(1)).expect("taken");
    scheduler.submit(prompt, new(3 * STEP)).expect("taken");
    scheduler.admit().into_iter().for_each(|id| scheduler.attached(id, 0));
    let steps: Vec<u64> =
        [Lane::Prefill, Lane::Prefill, Lane::Decode].map(|lane| scheduler.plan(lane, 0).number).to_vec();
    scheduler.restart([prompt, stream]);
    assert_eq!(scheduler.take_restarted(), []);
    scheduler.complete(steps[2], 0, 1, 1);
    assert_eq!(scheduler.take_restarted(), [stream]);
    scheduler.complete(steps[0], 0, 1, 1);
    assert!(scheduler.plan(Lane::Prefill, 0).parts.is_empty(), "it gets no further");
    assert_eq!(scheduler.take_restarted(), []);
    scheduler.complete(steps[1], 0, 1, 1);
    assert_eq!(scheduler.take_restarted(), [prompt]);
    scheduler.check_invariants();
    assert_eq!(scheduler.admit(), [stream, prompt]);
    scheduler.attached(prompt, 0);
    let plan = scheduler.plan(Lane::Prefill, 0);
    assert_eq!((plan.parts[0].chunk.start, plan.parts[0].chunk.width), (0, STEP));
}

#[test]
fn geometry_widens_to_the_tile_and_says_what_limits_it() {
    let request = GeometryRequest {
        tile: Some(4096),
        step: 2048,
        honour_step: false,
        block: 128,
        cache: true,
        snapshot_spacing: 1024,
    };
    let widened = Geometry::resolve(&request, |_| true);
    assert_eq!((widened.step, widened.granule, widened.block), (4096, 4096, 128));
    assert!(widened.reachable && widened.limited_by.is_none());
    let kept = Geometry::resolve(&GeometryRequest { honour_step: true, ..request }, |_| true);
    assert_eq!((kept.step, kept.reachable, kept.limited_by), (2048, false, Some(Rule::UserLimit)));
    let small = Geometry::resolve(&GeometryRequest { step: 10_000, ..request }, |rows| rows <= 1000);
    assert_eq!((small.step, small.reachable, small.limited_by), (512, false, Some(Rule::Memory)));
    let text = small.to_string();
    assert!(text.contains("tile 4096, step 10000→512, block 128, granule 1024, reachable=no, limiting rule memory"));
    let uncached = Geometry::resolve(&GeometryRequest { tile: None, cache: false, step: 300, ..request }, |_| true);
    assert_eq!((uncached.step, uncached.granule), (300, 0));
}

proptest! {
    /// Whatever comes, whatever memory there is: every sequence gets its tokens, and the books add up at every step.
    #[test]
    fn everybody_gets_through(
        prompts in prop::collection::vec((1usize..3000, 1usize..300), 1..12),
        state_bytes in 4000u64..20_000,
        max_running in 1usize..6,
        cancel in 0usize..12,
        cancel_after in 0usize..60,
        wavefront in 1usize..=3,
        frees in 0u64..3000,
        two_classes: bool,
        drafts in 0usize..7,
        luck in prop::collection::vec(0usize..7, 1..5),
    ) {
        let narrowing_frees = [frees, frees * 3 / 2, frees * 7 / 4, frees * 15 / 8];
        let limits = Limits { state_bytes, max_running, wavefront, narrowing_frees, two_classes, ..limits() };
        let mut world = World { drafts, luck, ..World::new(limits) };
        let mut taken = 0;
        for (id, (tokens, wanted)) in prompts.iter().enumerate() {
            if world.scheduler.submit(RequestId(id as u64), new(*tokens)).is_ok() {
                world.wanted.insert(RequestId(id as u64), *wanted);
                world.known.insert(RequestId(id as u64), *tokens);
                taken += 1;
            }
        }
        let mut events = 0;
        while world.advance() {
            events += 1;
            if events == cancel_after && world.wanted.remove(&RequestId(cancel as u64)).is_some() {
                world.scheduler.end(RequestId(cancel as u64));
                world.scheduler.check_invariants();
            }
            prop_assert!(events < 100_000, "it goes round in circles");
        }
        prop_assert!(world.wanted.is_empty(), "{:?} of {taken} wait for ever", world.wanted);
        prop_assert_eq!(world.scheduler.num_running() + world.scheduler.num_queued(), 0);
        prop_assert_eq!(world.scheduler.reserved_bytes(), 0);
    }
}
