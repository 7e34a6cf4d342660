//! Rounded rows that are kept give the bits that rows rounded anew give, whatever became of the rows in between.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;
use troika_graph::Scope;
use troika_kernels::{
    Ctx, Far, Index, KeyCodes, Keys, RowCodes, Rows as AttentionRows, Seen, attend_rounded, index_scores,
};

use super::{BlockRows, Boundary, LayerShape, LayerState, PoolShape, Rows, SequenceState, StateShape};

const DIM: usize = 20;
const KEY: usize = 6;
const WINDOW: usize = 45;
const BLOCK: usize = 128;

fn shape() -> StateShape {
    let pool = |ratio, dim, overlap| Some(PoolShape { ratio, dim, overlap });
    let plain = LayerShape { head_dim: DIM, window: WINDOW, compressed: None, index: None };
    let chosen = LayerShape { compressed: pool(4, DIM, true), index: pool(4, KEY, true), ..plain };
    let slow = LayerShape { compressed: pool(64, DIM, false), ..plain };
    let layers = [(Scope::Layer(0), plain), (Scope::Layer(1), chosen), (Scope::Layer(2), slow)];
    StateShape { layers: BTreeMap::from(layers), rounded: true }
}

/// A sequence with what it takes to go back to the end of a block.
struct World {
    state: SequenceState,
    boundaries: Vec<(Vec<Arc<BlockRows>>, Boundary)>,
    /// Rows are drawn, so that those of tokens staged again differ from those taken back.
    seed: u64,
}

impl World {
    fn number(&mut self) -> f32 {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn row(&mut self, dim: usize) -> Vec<f32> {
        (0..dim).map(|_| self.number()).collect()
    }

    fn below(&mut self, n: usize) -> usize {
        self.number();
        (self.seed >> 33) as usize % n
    }

    /// Appends tokens, as the nodes of one step do.
    fn stage(&mut self, positions: Range<usize>, keep: bool) {
        for scope in [0, 1, 2].map(Scope::Layer) {
            for p in positions.clone() {
                let (row, compressed, key) = (self.row(DIM), self.row(DIM), self.row(KEY));
                let layer = &mut *self.state.layer(scope);
                layer.window.append(p, &row);
                for (pool, row) in [(&mut layer.compressed, compressed), (&mut layer.index, key)] {
                    let Some(pool) = pool else { continue };
                    let width = pool.shape.width();
                    pool.append(&vec![0.5; width], &vec![0.5; width]);
                    if (p + 1) % pool.shape.ratio == 0 {
                        pool.rows.push(&row);
                    }
                }
            }
            let layer = &mut *self.state.layer(scope);
            for pool in [&mut layer.compressed, &mut layer.index].into_iter().flatten().filter(|_| !keep) {
                pool.trim(positions.end);
            }
        }
    }

    /// Keeps what a prefix cache would, and wants the next.
    fn commit(&mut self, rows: usize) {
        self.state.commit(rows);
        for boundary in self.state.take_boundaries() {
            let block = |i| Arc::new(self.state.block(i, BLOCK).expect("committed"));
            self.boundaries.push(((0..boundary.len / BLOCK).map(block).collect(), boundary));
        }
    }

    /// Attends and scores in some layer up to `end`, if it is so.
    fn look(&mut self, end: usize) {
        let (q, iw) = (self.row(3 * DIM), self.row(3));
        let (near, threads) = (1 + self.below(WINDOW), 1 + self.below(2));
        let scope = Scope::Layer(self.below(3) as u16);
        let par = Threads(threads);
        let ctx = Ctx { par: &par, ..Ctx::serial() };
        let LayerState { window, compressed, index } = &mut *self.state.layer(scope);

        let range = end.saturating_sub(near).max(window.first())..end;
        let (mut fresh, mut fresh_far) = (RowCodes::new(DIM), RowCodes::new(DIM));
        let rows = window.rows(range.clone());
        fresh.extend(ctx, rows.len() / DIM, |i| &rows[i * DIM..(i + 1) * DIM]);
        let mut none = Rows::new(DIM);
        let far = compressed.as_mut().map_or(&mut none, |pool| &mut pool.rows);
        fresh_far.extend(ctx, far.len(), |i| far.row(i));
        let attend = |rows: &AttentionRows| {
            let mut out = vec![f32::NAN; q.len()];
            let seen = |_| Seen { near: 0..rows.near.len(), far: Far::First(rows.far.len()) };
            attend_rounded(ctx, &q, &[0.1, -0.3, 0.0], rows, seen, &mut out);
            out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let want = attend(&AttentionRows { near: fresh.rows(0..range.len()), far: fresh_far.rows(0..far.len()) });
        let got = attend(&AttentionRows { near: window.codes(ctx, range), far: far.codes(ctx) });
        assert_eq!(got, want, "attention in {scope:?} up to {end}");

        let Some(keys) = index.as_mut().map(|pool| &mut pool.rows) else { return };
        let mut fresh = KeyCodes::new(KEY);
        fresh.extend(ctx, keys.len(), |i| keys.row(i));
        let scores = |keys: Keys, n: usize| {
            let mut out = vec![f32::NAN; n];
            let index = Index { heads: 3, top_k: 1, scale: 1.0, keys };
            index_scores(ctx.level, &index, &q[..3 * KEY], &iw, &mut out);
            out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let n = keys.len();
        let want = scores(Keys::Rounded(fresh.keys()), n);
        assert_eq!(scores(Keys::Rounded(keys.key_codes(ctx)), n), want, "scores in {scope:?} up to {end}");
    }

    /// What may become of a sequence.
    fn step(&mut self) {
        let len = self.state.len();
        let n = 1 + self.below(90);
        match self.below(8) {
            // Of a step of a prompt, every row is kept; the next one may be in flight.
            0..3 => {
                let more = self.below(40);
                let ends: Vec<usize> = (len / BLOCK + 1..=(len + n) / BLOCK).map(|block| block * BLOCK).collect();
                self.state.want_boundaries(&ends);
                self.stage(len..len + n, false);
                self.look(len + n);
                if more > 0 {
                    self.stage(len + n..len + n + more, false);
                    self.look(len + n + more);
                    self.commit(n);
                    self.look(len + n + more);
                    self.commit(more);
                } else {
                    self.commit(n);
                }
            }
            // Some drafts are taken, the others taken back.
            3..5 => {
                let n = 1 + n / 4;
                self.stage(len..len + n, true);
                if self.below(2) == 0 {
                    self.look(len + n);
                }
                let accepted = self.below(n + 1);
                self.commit(accepted);
                self.state.roll_back();
            }
            5 => self.state = SequenceState::restore(&shape(), &self.state.snapshot()),
            // From a prefix that was kept, be it in memory or in a file.
            6 if !self.boundaries.is_empty() => {
                let i = self.below(self.boundaries.len());
                let (blocks, boundary) = &self.boundaries[i];
                self.state = SequenceState::attach(&shape(), blocks, boundary).expect("fits");
                self.boundaries.retain(|(_, boundary)| boundary.len <= self.state.len());
            }
            // A window that does not go on where it was.
            7 if len > 0 => {
                let (gap, row) = (self.below(3), self.row(DIM));
                let layer = &mut *self.state.layer(Scope::Layer(0));
                let end = layer.window.end();
                layer.window.replace(end - 1, &row);
                layer.window.append(end + gap, &row);
                layer.window.append(len - 1, &row);
            }
            _ => {}
        }
        if !self.state.is_empty() {
            self.look(self.state.len());
        }
    }
}

struct Threads(usize);

impl troika_kernels::Parallel for Threads {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| {
            (1..self.0).for_each(|first| drop(scope.spawn(move || (first..tasks).step_by(self.0).for_each(body))));
            (0..tasks).step_by(self.0).for_each(body);
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn kept_codes_are_those_of_the_rows(seed: u64) {
        let mut world = World { state: SequenceState::new(&shape()), boundaries: Vec::new(), seed };
        (0..30).for_each(|_| world.step());
    }
}

/// What codes add to a sequence is what admission reckons with.
#[test]
fn codes_are_counted() {
    const STEP: usize = 32;
    let world = || World { state: SequenceState::new(&shape()), boundaries: Vec::new(), seed: 1 };
    let (mut world, mut plain) = (world(), world());
    let added = |bytes: fn(&StateShape) -> u64| bytes(&shape()) - bytes(&StateShape { rounded: false, ..shape() });
    // Half of a row and a scale for each 256 channels; a row of 20 numbers is filled up to 32.
    assert_eq!([RowCodes::row_bytes(512), RowCodes::row_bytes(DIM), KeyCodes::key_bytes(128)], [1032, 68, 132]);
    let (per_block, fixed) = (added(StateShape::bytes_per_block), added(StateShape::fixed_bytes));
    assert_eq!(per_block, 32 * 68 + 32 * 12 + 2 * 68);
    assert_eq!(shape().bytes_per_block() - per_block, shape().kept_bytes_per_block());
    for step in 0..40 {
        let (len, end) = (step * STEP, (step + 1) * STEP);
        [&mut world, &mut plain].into_iter().for_each(|world| world.stage(len..end, false));
        (0..9).for_each(|_| world.look(end));
        [&mut world, &mut plain].into_iter().for_each(|world| world.commit(STEP));
        let codes = world.state.bytes() - plain.state.bytes();
        let blocks = end.div_ceil(BLOCK) as u64;
        let in_flight = 3 * (STEP * RowCodes::row_bytes(DIM)) as u64;
        assert!(codes <= fixed + blocks * per_block + in_flight, "{codes} bytes after {end} tokens");
        assert!(step < 20 || codes > blocks * per_block / 2, "{codes} bytes after {end} tokens");
    }
}
