//! A graph as the executor wants it: everything that is the same for each step of the graph, worked out once.

use std::sync::Arc;

use troika_graph::{Kind, NodeId, Scope, StepGraph};

use crate::plan::{DeviceId, Plan};

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
}

/// What the executor knows about a node.
#[derive(Debug)]
pub(crate) struct NodePlace {
    pub(crate) device: DeviceId,
    pub(crate) num_predecessors: u32,
    /// Where its successors are in [`Template::successors`].
    successors: (u32, u32),
    /// Another device waits for it.
    pub(crate) is_awaited: bool,
    /// Index into [`Template::scopes`], if it touches state.
    pub(crate) scope: Option<usize>,
    /// Index into [`Template::counters`].
    pub(crate) counter: usize,
}

/// Nodes that touch a layer's state.
#[derive(Debug)]
pub(crate) struct ScopeUsers {
    pub(crate) scope: Scope,
    pub(crate) nodes: u32,
    /// The device of all of them, if it is one.
    pub(crate) device: Option<DeviceId>,
}

impl Template {
    pub(crate) fn new(graph: StepGraph, plan: &Plan) -> Self {
        let devices = plan.place(&graph);
        Self::placed(graph, &devices)
    }

    pub(crate) fn placed(graph: StepGraph, devices: &[DeviceId]) -> Self {
        let mut counters: Vec<_> = graph.nodes().iter().zip(devices).map(|(node, d)| (node.kind, *d)).collect();
        counters.sort_unstable();
        counters.dedup();
        let stateful = || graph.nodes().iter().zip(devices).filter(|(node, _)| !node.state.is_empty());
        let mut scopes: Vec<ScopeUsers> = Vec::new();
        for (node, device) in stateful() {
            match scopes.iter_mut().find(|users| users.scope == node.scope) {
                Some(users) => {
                    users.nodes += 1;
                    users.device = users.device.filter(|other| other == device);
                }
                None => scopes.push(ScopeUsers { scope: node.scope, nodes: 1, device: Some(*device) }),
            }
        }
        scopes.sort_unstable_by_key(|users| users.scope);
        let mut followers = vec![Vec::new(); devices.len()];
        for index in 0..devices.len() {
            let node = NodeId(index as u32);
            graph.predecessors(node).iter().for_each(|before| followers[before.0 as usize].push(node));
        }
        let mut successors = Vec::new();
        let nodes = graph.nodes().iter().enumerate().map(|(index, node)| {
            let first = successors.len() as u32;
            successors.extend_from_slice(&followers[index]);
            let device = devices[index];
            NodePlace {
                device,
                num_predecessors: graph.predecessors(NodeId(index as u32)).len() as u32,
                successors: (first, successors.len() as u32),
                is_awaited: followers[index].iter().any(|other| devices[other.0 as usize] != device),
                scope: (!node.state.is_empty()).then(|| position(&scopes, node.scope).expect("listed above")),
                counter: counters.binary_search(&(node.kind, device)).expect("listed above"),
            }
        });
        let nodes = nodes.collect();
        Self { graph: Arc::new(graph), nodes, successors, scopes, counters }
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
