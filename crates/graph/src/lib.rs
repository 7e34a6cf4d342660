//! The step as data: operations, values, state edges, costs and the memory plan.
//!
//! Pure: must not know devices, bytes of weights, threads or clocks. A [`StepGraph`] is a template for one row
//! signature; token ids, positions and row ranges are bound when it runs ([`StepRows`]). Read [`op`] for what a node
//! can do, [`step`] for how nodes hang together, [`memory`] for where values live, [`cost`] for what they cost.

pub mod cost;
pub mod memory;
pub mod op;
pub mod stack;
pub mod step;
pub mod weights;

pub use cost::{Cost, Costs};
pub use memory::{MemoryPlan, Slot, SlotId};
pub use op::{Kind, Op};
pub use step::{
    Acceptance, Access, Element, GraphBuilder, Node, NodeId, Segment, StateEdge, StatePart, StepGraph, StepRows, Tap,
    Value, ValueId,
};
pub use weights::{Role, Scope, WeightKey, WeightRef, WeightSource};
