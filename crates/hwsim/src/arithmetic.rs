//! What simulated devices compute, if the model is small enough to be computed at all: every node and part in the arithmetic
//! of the CPU device, at the moment when its time is up.

use std::sync::Arc;
use std::sync::mpsc::channel;

use troika_device::cpu::CpuDevice;
use troika_device::{Device, Output, Work};
use troika_graph::NodeId;

use crate::faults::noise;

/// See the module.
pub(crate) struct Arithmetic(pub(crate) Arc<CpuDevice>);

impl Arithmetic {
    /// Computes one node of `work`, or its part; with a seed, wrongly. Says what failed.
    pub(crate) fn compute(&self, work: &Work, node: NodeId, corrupt: Option<u64>) -> Option<String> {
        let (done, reports) = channel();
        let (run, part, priority) = (Arc::clone(&work.run), work.part.clone(), work.priority);
        if let Err(error) = self.0.submit(Work { run, nodes: vec![node], part, priority, feeds: false, done }) {
            return Some(error.to_string());
        }
        while self.0.drive(&mut |_| false) {}
        let report = reports.recv().expect("the device reports before it drops the sender");
        if let (None, Some(seed), Some(part)) = (&report.failure, corrupt, &work.part) {
            let outputs = part.procedure.outputs(&part.rows).into_iter().zip(&work.run.graph().node(node).outputs);
            for (columns, value) in outputs {
                let mut guard = work.run.write_columns(*value, columns);
                let spoil = |(at, x): (usize, &mut f32)| *x += noise(seed, at as u64) as f32;
                match guard.output() {
                    Output::Rows(rows) => rows.iter_mut().enumerate().for_each(spoil),
                    Output::Pieces(pieces) => {
                        pieces.into_iter().flat_map(|piece| piece.iter_mut()).enumerate().for_each(spoil);
                    }
                }
            }
        }
        report.failure
    }
}
