//! When nodes ran, for timelines. Kept only for those who ask: nothing is decided by it.

use troika_graph::{Kind, NodeId, Scope};

use crate::plan::DeviceId;
use crate::template::Template;

/// One node on its device. Nanoseconds since its step was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Of the step's graph.
    pub node: NodeId,
    pub kind: Kind,
    pub scope: Scope,
    pub device: DeviceId,
    pub start_ns: u64,
    pub end_ns: u64,
}

/// Spans of nodes that one device did one after the other and reported at `end_ns`. Devices say how long each took; when is
/// reckoned back from the report, so pauses between nodes come to lie before the first of them.
pub(crate) fn before(template: &Template, nodes: &[NodeId], elapsed_ns: &[u64], end_ns: u64) -> Vec<Span> {
    let mut end_ns = end_ns;
    let mut spans: Vec<Span> = Vec::with_capacity(elapsed_ns.len());
    for (node, elapsed_ns) in nodes.iter().zip(elapsed_ns).rev() {
        let start_ns = end_ns.saturating_sub(*elapsed_ns);
        // Parts of a shared node are reported apart.
        let Some(counter) = template.place(*node).counter else { continue };
        let (kind, device) = template.counters[counter];
        let (node, scope) = (*node, template.graph().node(*node).scope);
        spans.push(Span { node, kind, scope, device, start_ns, end_ns });
        end_ns = start_ns;
    }
    spans.reverse();
    spans
}
