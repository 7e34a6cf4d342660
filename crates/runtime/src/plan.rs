//! Which device runs which node.

use troika_graph::{Node, StepGraph};

/// A device of the executor; an index into its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u16);

impl DeviceId {
    /// The device that runs everything nobody else does.
    pub const PRIMARY: Self = Self(0);
}

/// Placement of the nodes of every step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Everything on the primary device.
    Primary,
}

impl Plan {
    /// Where `node` runs.
    pub fn device_of(&self, _node: &Node) -> DeviceId {
        match self {
            Self::Primary => DeviceId::PRIMARY,
        }
    }

    /// Where each node of `graph` runs.
    pub fn place(&self, graph: &StepGraph) -> Vec<DeviceId> {
        graph.nodes().iter().map(|node| self.device_of(node)).collect()
    }
}
