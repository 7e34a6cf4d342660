//! How nodes hang together: values, state edges, row ranges, and the finished template.

use std::collections::BTreeMap;

use crate::memory::MemoryPlan;
use crate::op::{Kind, Op};
use crate::weights::Scope;
use troika_base::SequenceId;

/// A value of a step; an index into [`StepGraph::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// A node of a step; an index into [`StepGraph::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// Type of the elements of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    F32,
    I32,
}

/// A `[rows, cols]` array between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    pub rows: usize,
    pub cols: usize,
    pub element: Element,
}

impl Value {
    /// Elements.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// True if it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A part of a sequence's state in one layer (section 11.1 of the model spec).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatePart {
    /// Rotated K=V rows of the last tokens.
    Window,
    /// Finished compressed rows, pending tokens and the overlap lane.
    Compressed,
    /// The same of the indexer.
    Index,
}

/// How a node touches state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Staged: visible to later nodes at once, kept only up to the row count that is committed.
    Write,
}

/// A node's touch of the state of every sequence in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateEdge {
    pub scope: Scope,
    pub part: StatePart,
    pub access: Access,
}

/// One operation with its place in the step.
#[derive(Clone, Debug)]
pub struct Node {
    pub op: Op,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
    pub scope: Scope,
    pub kind: Kind,
    pub state: Vec<StateEdge>,
}

/// A named value that survives the step: logits, hidden rows for the drafter, or anything when debugging.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tap {
    pub scope: Scope,
    pub name: &'static str,
}

/// Whether the rows of a segment may be accepted in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    /// All rows are kept, or the whole sequence is given up.
    Whole,
    /// Any prefix may be kept (verification of drafts), so what a roll-back needs stays until the commit.
    Partial,
}

/// Rows of one sequence in a step. Bound at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub sequence: SequenceId,
    /// First row of the step.
    pub row: usize,
    /// Rows, at least one.
    pub rows: usize,
    /// Absolute position of the first row's token.
    pub position: usize,
    pub acceptance: Acceptance,
}

/// What a template is run on: tokens, their places, and the rows whose logits are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepRows {
    /// One per row.
    pub tokens: Vec<i32>,
    /// In row order, covering all rows.
    pub segments: Vec<Segment>,
    /// Ascending row numbers.
    pub logit_rows: Vec<usize>,
}

impl StepRows {
    /// Rows of the step.
    pub fn num_rows(&self) -> usize {
        self.tokens.len()
    }

    /// Absolute position of every row.
    pub fn positions(&self) -> Vec<i64> {
        self.segments.iter().flat_map(|s| (0..s.rows).map(move |i| (s.position + i) as i64)).collect()
    }

    /// The largest number of tokens any row of the step sees, itself included.
    pub fn max_context(&self) -> usize {
        self.segments.iter().map(|s| s.position + s.rows).max().unwrap_or(0)
    }

    /// # Panics
    ///
    /// If segments do not cover the rows in order, or a logit row is out of range or out of order.
    pub fn check_invariants(&self) {
        let mut next = 0;
        for segment in &self.segments {
            assert_eq!(segment.row, next, "segments must cover the rows in order");
            assert!(segment.rows > 0, "a segment has at least one row");
            next += segment.rows;
        }
        assert_eq!(next, self.tokens.len(), "segments must cover all rows");
        assert!(self.logit_rows.windows(2).all(|w| w[0] < w[1]), "logit rows must ascend");
        assert!(self.logit_rows.last().is_none_or(|row| *row < next), "logit row out of range");
    }
}

/// A step's template: nodes in an order that respects every dependency, values, and where they live.
#[derive(Clone, Debug)]
pub struct StepGraph {
    nodes: Vec<Node>,
    values: Vec<Value>,
    taps: BTreeMap<Tap, ValueId>,
    memory: MemoryPlan,
    /// Nodes that must be done before a node may start: producers of its inputs, users of memory it overwrites, earlier
    /// users of state it touches.
    predecessors: Vec<Vec<NodeId>>,
    rows: usize,
    logit_rows: usize,
}

impl StepGraph {
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    pub fn values(&self) -> &[Value] {
        &self.values
    }

    pub fn value(&self, id: ValueId) -> Value {
        self.values[id.0 as usize]
    }

    /// The value kept under `name`, if this template keeps it.
    pub fn tap(&self, scope: Scope, name: &'static str) -> Option<ValueId> {
        self.taps.get(&Tap { scope, name }).copied()
    }

    /// Every kept value.
    pub fn taps(&self) -> &BTreeMap<Tap, ValueId> {
        &self.taps
    }

    pub fn memory(&self) -> &MemoryPlan {
        &self.memory
    }

    /// What must be done before `node` may start, ascending.
    pub fn predecessors(&self, node: NodeId) -> &[NodeId] {
        &self.predecessors[node.0 as usize]
    }

    /// `T`.
    pub fn num_rows(&self) -> usize {
        self.rows
    }

    /// `R`.
    pub fn num_logit_rows(&self) -> usize {
        self.logit_rows
    }
}

/// Collects nodes in execution order and turns them into a [`StepGraph`].
#[derive(Debug)]
pub struct GraphBuilder {
    nodes: Vec<Node>,
    values: Vec<Value>,
    taps: BTreeMap<Tap, ValueId>,
    rows: usize,
    logit_rows: usize,
}

impl GraphBuilder {
    /// A step of `rows` rows, `logit_rows` of which want logits.
    pub fn new(rows: usize, logit_rows: usize) -> Self {
        Self { nodes: Vec::new(), values: Vec::new(), taps: BTreeMap::new(), rows, logit_rows }
    }

    pub fn num_rows(&self) -> usize {
        self.rows
    }

    pub fn num_logit_rows(&self) -> usize {
        self.logit_rows
    }

    /// A new value of the step's rows.
    pub fn value(&mut self, cols: usize, element: Element) -> ValueId {
        self.value_of(self.rows, cols, element)
    }

    /// A new value of any row count.
    pub fn value_of(&mut self, rows: usize, cols: usize, element: Element) -> ValueId {
        self.values.push(Value { rows, cols, element });
        ValueId(self.values.len() as u32 - 1)
    }

    /// Columns of a value.
    pub fn cols(&self, value: ValueId) -> usize {
        self.values[value.0 as usize].cols
    }

    /// Appends a node; its inputs must have been produced already.
    pub fn push(&mut self, node: Node) {
        self.nodes.push(node);
    }

    /// Keeps `value` readable after the step.
    pub fn tap(&mut self, scope: Scope, name: &'static str, value: ValueId) {
        self.taps.insert(Tap { scope, name }, value);
    }

    /// Plans memory and dependencies.
    ///
    /// # Panics
    ///
    /// If a node reads a value nobody produced, a value has two producers, or an in-place operation overwrites a value
    /// that is used later or tapped.
    pub fn build(self) -> StepGraph {
        let (memory, mut predecessors) = crate::memory::plan(&self.nodes, &self.values, self.taps.values().copied());
        add_state_order(&self.nodes, &mut predecessors);
        for (node, before) in predecessors.iter_mut().enumerate() {
            before.sort_unstable();
            before.dedup();
            debug_assert!(before.iter().all(|p| (p.0 as usize) < node));
        }
        StepGraph {
            nodes: self.nodes,
            values: self.values,
            taps: self.taps,
            memory,
            predecessors,
            rows: self.rows,
            logit_rows: self.logit_rows,
        }
    }
}

/// Reads come after the last write of the same state, writes after everything before them.
fn add_state_order(nodes: &[Node], predecessors: &mut [Vec<NodeId>]) {
    #[derive(Default)]
    struct Users {
        last_write: Option<NodeId>,
        reads_since: Vec<NodeId>,
    }
    let mut users: BTreeMap<(Scope, StatePart), Users> = BTreeMap::new();
    for (index, node) in nodes.iter().enumerate() {
        let id = NodeId(index as u32);
        for edge in &node.state {
            let users = users.entry((edge.scope, edge.part)).or_default();
            predecessors[index].extend(users.last_write.filter(|last| *last != id));
            match edge.access {
                Access::Read => users.reads_since.push(id),
                Access::Write => {
                    predecessors[index].extend(users.reads_since.drain(..).filter(|read| *read != id));
                    users.last_write = Some(id);
                }
            }
        }
    }
}
