//! What engines hold in memory, and giving it up: a bank at a time, the one that saves least per byte first.

use std::collections::BTreeSet;
use std::sync::Arc;

use troika_device::npu::{Body, ChannelWeights, Procedure, ProcedureId};
use troika_graph::WeightKey;

use super::Executor;
use crate::ledger::Fallback;
use crate::plan::{DeviceId, Plan, Shares};

/// One loaded program of each instance, with the same projections in it.
#[derive(Clone, Debug)]
pub struct LoadedBank {
    /// Projections of the plan.
    pub keys: Vec<WeightKey>,
    /// What to tell each engine if it is given up.
    pub procedures: Vec<(DeviceId, Vec<ProcedureId>)>,
    /// Bytes that this frees, on all instances.
    pub bytes: u64,
    /// What it saves, in any unit.
    pub benefit: f64,
}

/// Bytes that engines hold beside the model's own weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineBytes {
    /// Weights in the engines' form. The primary device computes with them too what engines do not, so they stay.
    pub weights: u64,
    /// Loaded programs, as far as they are not those weights.
    pub banks: u64,
    /// Memory that engines read tiles from and write them to.
    pub surfaces: u64,
}

impl EngineBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.banks + self.surfaces
    }
}

impl Executor {
    /// What can be given up if memory is short.
    pub fn set_banks(&mut self, banks: Vec<LoadedBank>) {
        self.banks = banks;
    }

    /// Gives up the bank that saves least per byte, once the engines are done with what is queued. Its projections are the
    /// primary device's from now on, in the same arithmetic. Returns the bytes that frees; `None` if no bank would free any.
    pub fn shed(&mut self) -> Option<u64> {
        let worth = |bank: &LoadedBank| bank.benefit / bank.bytes as f64;
        let candidates = (0..self.banks.len()).filter(|index| self.banks[*index].bytes > 0);
        let least = candidates.min_by(|a, b| worth(&self.banks[*a]).total_cmp(&worth(&self.banks[*b])))?;
        let LoadedBank { keys, procedures, bytes, .. } = self.banks.remove(least);
        for (device, procedures) in procedures {
            if let Err(error) = self.devices[usize::from(device.0)].shed(procedures) {
                // One that has stopped holds nothing.
                tracing::debug!(%error, "an engine was not told to give up a bank");
            }
        }
        self.shed.extend(&keys);
        let (left, all) = (self.plan.projections().len() - self.shed.len(), self.plan.projections().len());
        self.feature.shed(left as f64 / all as f64);
        let names: Vec<String> = keys.iter().map(ToString::to_string).collect();
        tracing::warn!(bytes, left, projections = ?names, "memory is short: engines give up a bank; the primary device does it");
        Some(bytes)
    }

    /// Projections whose banks were given up.
    pub fn shed_projections(&self) -> &BTreeSet<WeightKey> {
        &self.shed
    }

    /// What engines hold now.
    pub fn engine_bytes(&self) -> EngineBytes {
        EngineBytes {
            weights: self.weight_bytes,
            banks: self.banks.iter().map(|bank| bank.bytes).sum(),
            surfaces: self.devices.iter().map(|device| device.surface_bytes()).sum(),
        }
    }

    /// Why the primary device does a projection that the plan gives to engines, if it does.
    pub(super) fn kept_from_engines(&self, key: WeightKey) -> Option<Fallback> {
        if self.quarantine.is_some() {
            Some(Fallback::Quarantined)
        } else if self.latched.contains_key(&key) {
            Some(Fallback::Latched)
        } else {
            self.shed.contains(&key).then_some(Fallback::Memory)
        }
    }
}

/// Bytes of the weights in the procedures of a plan, each counted once.
pub(super) fn weight_bytes(plan: &Plan) -> u64 {
    let mut seen: BTreeSet<*const ChannelWeights> = BTreeSet::new();
    let mut weights = 0;
    let mut count = |matrix: &Arc<ChannelWeights>| {
        if seen.insert(Arc::as_ptr(matrix)) {
            weights += ChannelWeights::packed_bytes(matrix.rows(), matrix.cols());
        }
    };
    let mut count_all = |procedure: &Procedure| match &procedure.body {
        Body::Products { products, .. } => products.iter().for_each(|product| count(&product.weights)),
        Body::SharedExpert { w1, w2, w3, .. } => [w1, w2, w3].into_iter().for_each(&mut count),
    };
    for projection in plan.projections().values() {
        match &projection.shares {
            Shares::Channels(shares) => shares.iter().for_each(|(_, procedure)| count_all(procedure)),
            Shares::Turns { procedure, .. } => count_all(procedure),
        }
    }
    weights
}
