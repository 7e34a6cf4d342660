//! What engines hold in memory, and giving it up: a bank at a time, the one that saves least per byte first; and having it back,
//! the last one first.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use troika_device::npu::{Body, ChannelWeights, Procedure};
use troika_device::{Probe, Reloaded};
use troika_graph::WeightKey;

use super::Executor;
use crate::ledger::Fallback;
use crate::plan::{DeviceId, Plan, Shares};
use crate::prepare;

/// One loaded program of each instance, with the same projections in it.
#[derive(Clone, Debug)]
pub struct LoadedBank {
    /// Projections of the plan.
    pub keys: Vec<WeightKey>,
    /// What each engine has loaded as one.
    pub procedures: Vec<(DeviceId, Vec<Arc<Procedure>>)>,
    /// Bytes that this frees, on all instances.
    pub bytes: u64,
    /// What it saves, in any unit.
    pub benefit: f64,
}

/// What became of banks since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BankCounts {
    /// Given up for want of memory.
    pub given_up: u64,
    /// Of those, how many have come back.
    pub returned: u64,
    /// Of those, how many could not: the engine refused them, or their numbers were wrong.
    pub refused: u64,
}

/// A bank on its way back.
#[derive(Debug)]
pub(super) struct Returning {
    bank: LoadedBank,
    results: Receiver<Reloaded>,
    /// Engines that have it.
    loaded: usize,
    failure: Option<String>,
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
    /// primary device's until it comes back, in the same arithmetic. Returns the bytes that frees; `None` if no bank would free
    /// any.
    pub fn shed(&mut self) -> Option<u64> {
        let worth = |bank: &LoadedBank| bank.benefit / bank.bytes as f64;
        let candidates = (0..self.banks.len()).filter(|index| self.banks[*index].bytes > 0);
        let least = candidates.min_by(|a, b| worth(&self.banks[*a]).total_cmp(&worth(&self.banks[*b])))?;
        let bank = self.banks.remove(least);
        self.unload(&bank);
        self.shed.extend(&bank.keys);
        self.bank_counts.given_up += 1;
        let left = self.note_shed();
        let bytes = bank.bytes;
        tracing::warn!(bytes, left, projections = ?names(&bank), "memory is short: engines give up a bank; the primary device does it");
        self.shed_banks.push(bank);
        Some(bytes)
    }

    fn unload(&self, bank: &LoadedBank) {
        for (device, procedures) in &bank.procedures {
            let ids = procedures.iter().map(|procedure| procedure.id).collect();
            if let Err(error) = self.devices[usize::from(device.0)].shed(ids) {
                // One that has stopped holds nothing.
                tracing::debug!(%error, "an engine was not told to give up a bank");
            }
        }
    }

    /// Tells the feature what is given up, and returns how many projections are not.
    fn note_shed(&mut self) -> usize {
        let (left, all) = (self.plan.projections().len() - self.shed.len(), self.plan.projections().len());
        self.feature.shed(left as f64 / all as f64);
        left
    }

    /// Begins to bring back the bank that was given up last: engines load it between their parts, and try each of its procedures
    /// out as at the start. Returns the bytes that it takes from now on; `None` if there is none, or one is on its way.
    pub fn reload(&mut self) -> Option<u64> {
        if self.returning.is_some() || self.quarantine.is_some() {
            return None;
        }
        let bank = self.shed_banks.pop()?;
        let (bytes, repeatable) = (bank.bytes, self.plan.repeats_rows());
        let probe: Probe = Arc::new(move |procedure, run| prepare::probe(procedure, repeatable, run));
        let (done, results) = channel();
        for (device, procedures) in &bank.procedures {
            let device = &self.devices[usize::from(device.0)];
            if let Err(error) = device.reload(procedures.clone(), Arc::clone(&probe), done.clone()) {
                done.send(Err(error.to_string())).expect("the receiver is here");
            }
        }
        self.returning = Some(Returning { bank, results, loaded: 0, failure: None });
        Some(bytes)
    }

    /// What came of [`Self::reload`], once it is known: true if engines do what is in the bank again.
    pub fn take_reloaded(&mut self) -> Option<bool> {
        let returning = self.returning.as_mut()?;
        loop {
            match returning.results.try_recv() {
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => break,
                Ok(Ok(())) => returning.loaded += 1,
                Ok(Err(reason)) => returning.failure = Some(reason),
            }
        }
        // Every engine has answered, or is gone.
        let Returning { bank, loaded, failure, .. } = self.returning.take()?;
        if failure.is_none() && loaded == bank.procedures.len() {
            self.shed.retain(|key| !bank.keys.contains(key));
            self.bank_counts.returned += 1;
            let left = self.note_shed();
            tracing::info!(bytes = bank.bytes, left, projections = ?names(&bank), "memory: engines have a bank back");
            self.banks.push(bank);
            return Some(true);
        }
        self.unload(&bank);
        self.bank_counts.refused += 1;
        let reason = failure.unwrap_or_else(|| "an engine has stopped".to_owned());
        tracing::warn!(reason, projections = ?names(&bank), "a bank does not come back; the primary device goes on doing it");
        Some(false)
    }

    /// Projections whose banks were given up.
    pub fn shed_projections(&self) -> &BTreeSet<WeightKey> {
        &self.shed
    }

    /// What became of banks.
    pub fn bank_counts(&self) -> BankCounts {
        self.bank_counts
    }

    /// What engines hold now.
    pub fn engine_bytes(&self) -> EngineBytes {
        EngineBytes {
            weights: self.weight_bytes,
            banks: self.banks.iter().chain(self.returning.iter().map(|r| &r.bank)).map(|bank| bank.bytes).sum(),
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

fn names(bank: &LoadedBank) -> Vec<String> {
    bank.keys.iter().map(ToString::to_string).collect()
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
