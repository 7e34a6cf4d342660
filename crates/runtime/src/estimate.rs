//! How long prompts take, worked out in advance: the executor's rules on a clock of its own. The primary device does one node
//! after another and hears of engines in between; engines work off a queue; a chunk waits in each layer for the chunk before.
//!
//! Deterministic: the same costs always give the same times. Read [`crate::choose`] for what is decided by it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use troika_graph::StepGraph;

use crate::plan::DeviceId;
use crate::template::{Place, Template};

/// Who does a node and how long it takes, milliseconds for one tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeCost {
    /// On the primary device.
    pub primary_ms: f64,
    /// On the engines, all together; none if they have no part in it.
    pub engine_ms: Option<f64>,
}

/// A prompt of some whole tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Of a tile, on average: the whole prompt's time over its tiles.
    pub tile_ms: f64,
    /// What the primary device computes of it.
    pub primary_ms: f64,
    /// What engines compute of it.
    pub engine_ms: f64,
}

/// Works out a prompt of `tiles` tiles, each a step of `graph`, of which `depth` are in flight. `costs` has one entry per
/// node; `sync_ms` is what the primary device loses by each node that engines take part in.
///
/// # Panics
///
/// Without tiles, with nothing in flight, or if there is not one cost per node.
pub fn estimate(graph: &Arc<StepGraph>, costs: &[NodeCost], sync_ms: f64, depth: usize, tiles: usize) -> Estimate {
    assert!(tiles > 0 && depth > 0, "a prompt has tiles, and some are in flight");
    assert_eq!(costs.len(), graph.nodes().len(), "one cost per node");
    let place = |(index, cost): (usize, &NodeCost)| match cost.engine_ms {
        Some(_) => Place::Shared(index),
        None => Place::Device(DeviceId::PRIMARY),
    };
    let places: Vec<Place> = costs.iter().enumerate().map(place).collect();
    let template = Template::with_places(Arc::clone(graph), &places);
    let mut clock = Clock {
        template: &template,
        costs,
        sync_ms,
        now: 0.0,
        primary_ms: 0.0,
        engine_ms: 0.0,
        chunks: Vec::new(),
        engine: VecDeque::new(),
        engine_free: 0.0,
        finished: BinaryHeap::new(),
    };
    clock.run(depth, tiles);
    let each = |ms: f64| ms / tiles as f64;
    Estimate { tile_ms: each(clock.now), primary_ms: each(clock.primary_ms), engine_ms: each(clock.engine_ms) }
}

/// A chunk in flight or done.
struct Chunk {
    /// Per node: predecessors that are not done.
    waiting_for: Vec<u32>,
    /// Per node: parts that are not done.
    parts: Vec<u8>,
    /// Per layer: nodes touching its state that are not done.
    state_users: Vec<u32>,
    /// Nodes that wait for the chunk before to be done with their layer.
    held: Vec<usize>,
    /// Nodes for the primary device.
    ready: VecDeque<usize>,
    left: usize,
}

struct Clock<'a> {
    template: &'a Template,
    costs: &'a [NodeCost],
    sync_ms: f64,
    now: f64,
    primary_ms: f64,
    engine_ms: f64,
    chunks: Vec<Chunk>,
    /// When it was handed over, chunk, node.
    engine: VecDeque<(f64, usize, usize)>,
    engine_free: f64,
    /// Work that engines are done with: when, in picoseconds, which have an order; chunk, node.
    finished: BinaryHeap<Reverse<(u64, usize, usize)>>,
}

impl Clock<'_> {
    fn run(&mut self, depth: usize, tiles: usize) {
        loop {
            let in_flight = self.chunks.iter().filter(|chunk| chunk.left > 0).count();
            if in_flight < depth && self.chunks.len() < tiles {
                self.start_chunk();
                continue;
            }
            if in_flight == 0 {
                return;
            }
            self.run_engine();
            if let Some(Reverse((_, chunk, node))) = self.finished.peek().filter(|next| time(next.0.0) <= self.now) {
                let (chunk, node) = (*chunk, *node);
                self.finished.pop();
                self.now += self.sync_ms;
                self.part_done(chunk, node);
            } else if let Some((chunk, node)) = self.next_of_primary() {
                let cost = self.costs[node].primary_ms;
                self.now += cost;
                self.primary_ms += cost;
                self.part_done(chunk, node);
            } else {
                let Reverse((at, ..)) = self.finished.peek().expect("somebody has work while a chunk is in flight");
                self.now = self.now.max(time(*at));
            }
        }
    }

    fn start_chunk(&mut self) {
        let template = self.template;
        self.chunks.push(Chunk {
            waiting_for: template.nodes.iter().map(|place| place.num_predecessors).collect(),
            parts: self.costs.iter().map(|cost| 1 + u8::from(is_split(cost))).collect(),
            state_users: template.scopes.iter().map(|users| users.nodes).collect(),
            held: Vec::new(),
            ready: VecDeque::new(),
            left: template.nodes.len(),
        });
        let chunk = self.chunks.len() - 1;
        for node in (0..template.nodes.len()).filter(|node| template.nodes[*node].num_predecessors == 0) {
            self.hand_over(chunk, node);
        }
    }

    fn hand_over(&mut self, chunk: usize, node: usize) {
        let scope = self.template.nodes[node].scope;
        if let Some(scope) = scope.filter(|_| chunk > 0)
            && self.chunks[chunk - 1].state_users[scope] > 0
        {
            self.chunks[chunk].held.push(node);
            return;
        }
        let cost = &self.costs[node];
        if cost.engine_ms.is_some() {
            self.engine.push_back((self.now, chunk, node));
        }
        if cost.engine_ms.is_none() || is_split(cost) {
            self.chunks[chunk].ready.push_back(node);
        }
    }

    /// Lets engines begin what they can begin by now.
    fn run_engine(&mut self) {
        while let Some((since, chunk, node)) = self.engine.front().copied() {
            let start = since.max(self.engine_free);
            if start > self.now {
                return;
            }
            self.engine.pop_front();
            let ms = self.costs[node].engine_ms.unwrap_or(0.0);
            let end = ((start + ms) * 1e9) as u64;
            // The same number for both, or engines would be free a moment after they are done.
            self.engine_free = time(end);
            self.engine_ms += ms;
            self.finished.push(Reverse((end, chunk, node)));
        }
    }

    /// As the primary device picks work: what feeds engines, then the oldest chunk.
    fn next_of_primary(&mut self) -> Option<(usize, usize)> {
        let fronts = self.chunks.iter().enumerate().filter_map(|(chunk, c)| Some((chunk, *c.ready.front()?)));
        let (chunk, node) = fronts.min_by_key(|(chunk, node)| (!self.template.nodes[*node].feeds, *chunk))?;
        self.chunks[chunk].ready.pop_front();
        Some((chunk, node))
    }

    fn part_done(&mut self, chunk: usize, node: usize) {
        let template = self.template;
        let state = &mut self.chunks[chunk];
        state.parts[node] -= 1;
        if state.parts[node] > 0 {
            return;
        }
        state.left -= 1;
        let place = &template.nodes[node];
        for successor in template.successors(place) {
            let successor = successor.0 as usize;
            let waiting = &mut self.chunks[chunk].waiting_for[successor];
            *waiting -= 1;
            if *waiting == 0 {
                self.hand_over(chunk, successor);
            }
        }
        let Some(scope) = place.scope else { return };
        let users = &mut self.chunks[chunk].state_users[scope];
        *users -= 1;
        if *users == 0 && chunk + 1 < self.chunks.len() {
            let held = std::mem::take(&mut self.chunks[chunk + 1].held);
            held.into_iter().for_each(|node| self.hand_over(chunk + 1, node));
        }
    }
}

fn is_split(cost: &NodeCost) -> bool {
    cost.engine_ms.is_some() && cost.primary_ms > 0.0
}

fn time(picoseconds: u64) -> f64 {
    picoseconds as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use troika_graph::{Access, Element, GraphBuilder, Kind, Node, Op, Scope, StateEdge, StatePart};

    use super::*;

    /// `a -> b -> c -> d` of two layers; `b` and `d` touch state.
    fn chain() -> Arc<StepGraph> {
        let mut builder = GraphBuilder::new(1, 0);
        for index in 0..4u32 {
            let output = builder.value(1, Element::F32);
            builder.tap(Scope::Stage(index as u16), "kept", output);
            let inputs = index.checked_sub(1).map(troika_graph::ValueId).into_iter().collect();
            let scope = Scope::Layer((index / 2) as u16);
            let edge = StateEdge { scope, part: StatePart::Window, access: Access::Write };
            let state = if index % 2 == 1 { vec![edge] } else { Vec::new() };
            builder.push(Node { op: Op::Copy, inputs, outputs: vec![output], scope, kind: Kind::Gate, state });
        }
        Arc::new(builder.build())
    }

    fn cost(primary_ms: f64, engine_ms: Option<f64>) -> NodeCost {
        NodeCost { primary_ms, engine_ms }
    }

    #[test]
    fn without_engines_times_add_up() {
        let costs = [1.0, 2.0, 3.0, 4.0].map(|ms| cost(ms, None));
        for depth in [1, 3] {
            assert_eq!(estimate(&chain(), &costs, 5.0, depth, 6).tile_ms, 10.0);
        }
    }

    #[test]
    fn a_split_takes_as_long_as_its_slower_part() {
        let costs = [cost(1.0, None), cost(2.0, None), cost(1.5, Some(2.0)), cost(4.0, None)];
        let estimate = estimate(&chain(), &costs, 0.25, 1, 2);
        assert_eq!(estimate, Estimate { tile_ms: 9.25, primary_ms: 8.5, engine_ms: 2.0 });
    }

    /// Of two chunks in flight, one is on the engine while the other is on the primary device.
    #[test]
    fn chunks_in_flight_fill_each_others_waits() {
        let costs = [cost(0.0, Some(3.0)), cost(3.0, None), cost(0.0, Some(3.0)), cost(3.0, None)];
        assert_eq!(estimate(&chain(), &costs, 0.0, 1, 8).tile_ms, 12.0);
        // 3 ms until the first has something for the primary device, then it is never idle.
        assert_eq!(estimate(&chain(), &costs, 0.0, 2, 8).tile_ms, (3.0 + 8.0 * 6.0) / 8.0);
    }

    /// The later chunk's state comes after the earlier chunk's, layer by layer.
    #[test]
    fn chunks_keep_their_order_in_each_layer() {
        let costs = [cost(1.0, None), cost(0.0, Some(10.0)), cost(1.0, None), cost(1.0, None)];
        // The engine is the bound: each chunk's 10 ms wait for the ones before.
        assert_eq!(estimate(&chain(), &costs, 0.0, 2, 3).tile_ms, (1.0 + 30.0 + 2.0) / 3.0);
    }

    /// Times that no number has exactly.
    #[test]
    fn any_times_come_to_an_end() {
        for seed in 0..200u32 {
            let ms = |node: u32| f64::from((seed * 7 + node * 13) % 97) / 31.0;
            let costs = [0, 1, 2, 3].map(|node| cost(if node % 2 == 0 { 0.0 } else { ms(node) }, Some(ms(node + 4))));
            let estimate = estimate(&chain(), &costs, ms(9), 1 + seed as usize % 3, 5);
            let busiest = estimate.primary_ms.max(estimate.engine_ms);
            assert!(estimate.tile_ms > busiest - 1e-6 && estimate.tile_ms.is_finite(), "{estimate:?}");
        }
    }
}
