//! A graph as the executor wants it: everything that is the same for each step of the graph, worked out once.

use std::collections::BTreeMap;
use std::sync::Arc;

use troika_graph::{Kind, NodeId, Op, Scope, StepGraph, WeightKey};

use crate::plan::{DeviceId, Lane, Plan, Shares};

/// A graph with its placement, order and counters.
#[derive(Debug)]
pub struct Template {
    pub(crate) graph: Arc<StepGraph>,
    pub(crate) nodes: Vec<NodePlace>,
    /// Successors of all nodes, one after another.
    successors: Vec<NodeId>,
    /// Layers whose state is touched, ascending.
    pub(crate) scopes: Vec<ScopeUsers>,
    /// What the ledger of a step counts, ascending.
    pub(crate) counters: Vec<(Kind, DeviceId)>,
    /// Nodes that engines take part in.
    pub(crate) shared: Vec<SharedNode>,
    /// Nodes by kind that engines would take part in if the step were a prefill step.
    pub(crate) bypassed: BTreeMap<Kind, u64>,
    pub(crate) lane: Lane,
    /// Some node feeds another device.
    pub(crate) feeds: bool,
}

/// Who does a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// One device, in its own arithmetic.
    Device(DeviceId),
    /// Several; an index into [`Template::shared`].
    Shared(usize),
}

/// A node that engines take part in.
#[derive(Debug)]
pub(crate) struct SharedNode {
    pub(crate) key: WeightKey,
    pub(crate) kind: Kind,
    pub(crate) shares: Shares,
}

/// What the executor knows about a node.
#[derive(Debug)]
pub(crate) struct NodePlace {
    pub(crate) at: Place,
    pub(crate) num_predecessors: u32,
    /// Where its successors are in [`Template::successors`].
    successors: (u32, u32),
    /// Somebody else waits for it.
    pub(crate) is_awaited: bool,
    /// It leads to work of somebody else, with no routed experts in between: they take long enough for others to go first.
    pub(crate) feeds: bool,
    /// Index into [`Template::scopes`], if it touches state.
    pub(crate) scope: Option<usize>,
    /// Index into [`Template::counters`]; none for shared nodes, whose parts are counted.
    pub(crate) counter: Option<usize>,
}

/// Nodes that touch a layer's state.
#[derive(Debug)]
pub(crate) struct ScopeUsers {
    pub(crate) scope: Scope,
    pub(crate) nodes: u32,
    /// Where all of them are done, if it is one place.
    pub(crate) at: Option<Place>,
}

impl Template {
    pub(crate) fn new(graph: StepGraph, plan: &Plan, lane: Lane) -> Self {
        let (mut shared, mut bypassed) = (Vec::new(), BTreeMap::new());
        let places = graph.nodes().iter().map(|node| match (plan.projection(node), lane) {
            (Some((key, projection)), Lane::Prefill) => {
                shared.push(SharedNode { key, kind: node.kind, shares: projection.shares.clone() });
                Place::Shared(shared.len() - 1)
            }
            (planned, _) => {
                if planned.is_some() {
                    *bypassed.entry(node.kind).or_default() += 1;
                }
                Place::Device(DeviceId::PRIMARY)
            }
        });
        let places: Vec<Place> = places.collect();
        Self { shared, bypassed, lane, ..Self::with_places(Arc::new(graph), &places) }
    }

    /// Each node on one device.
    #[cfg(test)]
    pub(crate) fn placed(graph: StepGraph, devices: &[DeviceId]) -> Self {
        let places: Vec<Place> = devices.iter().map(|device| Place::Device(*device)).collect();
        Self::with_places(Arc::new(graph), &places)
    }

    /// Each node at its place. What is shared, and how, is not known.
    pub(crate) fn with_places(graph: Arc<StepGraph>, places: &[Place]) -> Self {
        let key_of = |kind: Kind, at: Place| match at {
            Place::Device(device) => Some((kind, device)),
            Place::Shared(_) => None,
        };
        let mut counters: Vec<_> =
            graph.nodes().iter().zip(places).filter_map(|(node, at)| key_of(node.kind, *at)).collect();
        counters.sort_unstable();
        counters.dedup();
        let stateful = || graph.nodes().iter().zip(places).filter(|(node, _)| !node.state.is_empty());
        let mut scopes: Vec<ScopeUsers> = Vec::new();
        for (node, at) in stateful() {
            match scopes.iter_mut().find(|users| users.scope == node.scope) {
                Some(users) => {
                    users.nodes += 1;
                    users.at = users.at.filter(|other| other == at);
                }
                None => scopes.push(ScopeUsers { scope: node.scope, nodes: 1, at: Some(*at) }),
            }
        }
        scopes.sort_unstable_by_key(|users| users.scope);
        let mut followers = vec![Vec::new(); places.len()];
        for index in 0..places.len() {
            let node = NodeId(index as u32);
            graph.predecessors(node).iter().for_each(|before| followers[before.0 as usize].push(node));
        }
        let mut feeds = vec![false; places.len()];
        for (index, node) in graph.nodes().iter().enumerate().rev() {
            let leads = |other: &NodeId| {
                let other = other.0 as usize;
                places[other] != places[index] || feeds[other]
            };
            feeds[index] = !matches!(node.op, Op::Experts { .. }) && followers[index].iter().any(leads);
        }
        let mut successors = Vec::new();
        let nodes = graph.nodes().iter().enumerate().map(|(index, node)| {
            let first = successors.len() as u32;
            successors.extend_from_slice(&followers[index]);
            let at = places[index];
            NodePlace {
                at,
                num_predecessors: graph.predecessors(NodeId(index as u32)).len() as u32,
                successors: (first, successors.len() as u32),
                is_awaited: followers[index].iter().any(|other| places[other.0 as usize] != at),
                feeds: feeds[index],
                scope: (!node.state.is_empty()).then(|| position(&scopes, node.scope).expect("listed above")),
                counter: key_of(node.kind, at).map(|key| counters.binary_search(&key).expect("listed above")),
            }
        });
        let nodes = nodes.collect();
        let (shared, bypassed, lane) = (Vec::new(), BTreeMap::new(), Lane::Prefill);
        let feeds = feeds.contains(&true);
        Self { graph, nodes, successors, scopes, counters, shared, bypassed, lane, feeds }
    }

    /// The graph.
    pub fn graph(&self) -> &Arc<StepGraph> {
        &self.graph
    }

    pub(crate) fn place(&self, node: NodeId) -> &NodePlace {
        &self.nodes[node.0 as usize]
    }

    /// Nodes that have `place` as a predecessor.
    pub(crate) fn successors(&self, place: &NodePlace) -> &[NodeId] {
        &self.successors[place.successors.0 as usize..place.successors.1 as usize]
    }

    /// Index of a layer in [`Self::scopes`], if its state is touched.
    pub(crate) fn scope(&self, scope: Scope) -> Option<usize> {
        position(&self.scopes, scope)
    }
}

fn position(scopes: &[ScopeUsers], scope: Scope) -> Option<usize> {
    scopes.binary_search_by_key(&scope, |users| users.scope).ok()
}
