//! Nodes that engines take part in: their parts, from hand-over to the last report. A part that fails on an engine is done
//! again by the primary device within the same operation, and its projection stays with the primary device from then on; so is
//! one with wrong numbers, and then engines are given nothing more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use troika_base::StepId;
use troika_device::{Part, Report, Work};
use troika_graph::{Kind, NodeId, WeightKey};

use super::{Executor, ExecutorError, FinishedStep, InFlight, check};
use crate::feature::FeatureState;
use crate::ledger::Fallback;
use crate::plan::DeviceId;
use crate::span::Span;

/// A shared node whose parts are not all in.
#[derive(Debug)]
pub(super) struct SharedRun {
    pub(super) kind: Kind,
    key: WeightKey,
    parts: Vec<RunningPart>,
    /// Parts that are not in.
    left: usize,
    /// Per tile the engines' parts that are not in.
    tiles: Vec<u32>,
    /// Time of each device, nanoseconds.
    busy: BTreeMap<DeviceId, u64>,
    start: Instant,
}

#[derive(Debug)]
struct RunningPart {
    device: DeviceId,
    part: Part,
    tile: Option<usize>,
}

impl SharedRun {
    /// Operations that were handed over and are not merged.
    pub(super) fn tiles_left(&self) -> u64 {
        self.tiles.iter().filter(|left| **left > 0).count() as u64
    }
}

impl Executor {
    /// Cuts a node whose predecessors are done into parts and hands them over.
    pub(super) fn queue_shared(&self, step: &mut InFlight, node: NodeId, shared: usize) -> Result<(), ExecutorError> {
        let template = Arc::clone(&step.template);
        let shared = &template.shared[shared];
        let rows = step.run.rows().num_rows();
        let aside = self.kept_from_engines(shared.key);
        let schedule = self.plan.schedule(&shared.shares, rows, aside.is_some());
        let start = (self.clock)();
        let operations = step.operations.entry(shared.kind).or_default();
        operations.exact += schedule.exact as u64;
        operations.padded += u64::from(schedule.padded);
        operations.logical_rows += schedule.tiled_rows as u64;
        let tiles = schedule.exact + usize::from(schedule.padded);
        operations.padded_rows += (tiles * self.plan.tile() - schedule.tiled_rows) as u64;
        operations.input_ready_ns += start.saturating_duration_since(step.last_shared).as_nanos() as u64;
        if schedule.tiled_rows < rows {
            // What is narrower than a tile was perhaps made so; what is left over after tiles is left over.
            let short = step.short_because.filter(|_| rows < self.plan.tile());
            let reason = aside.or(short).unwrap_or(Fallback::RowsBelowTailThreshold);
            *operations.fallbacks.entry(reason).or_default() += 1;
        }
        step.tiled_rows = step.tiled_rows.max(tiles * self.plan.tile());
        let mut tiles = vec![0; tiles];
        schedule.parts.iter().filter_map(|(_, _, tile)| *tile).for_each(|tile| tiles[tile] += 1);
        let parts: Vec<RunningPart> =
            schedule.parts.into_iter().map(|(device, part, tile)| RunningPart { device, part, tile }).collect();
        let work: Vec<(DeviceId, Part)> = parts.iter().map(|running| (running.device, running.part.clone())).collect();
        let (kind, key, left, busy) = (shared.kind, shared.key, parts.len(), BTreeMap::new());
        step.shared.insert(node, SharedRun { kind, key, parts, left, tiles, busy, start });
        work.into_iter().try_for_each(|(device, part)| self.hand_over_part(step, node, kind, device, part))
    }

    fn hand_over_part(
        &self,
        step: &mut InFlight,
        node: NodeId,
        kind: Kind,
        device: DeviceId,
        part: Part,
    ) -> Result<(), ExecutorError> {
        step.part_entries.entry((kind, device)).or_default().submitted += 1;
        let (run, done) = (Arc::clone(&step.run), self.done.0.clone());
        let id = part.id;
        let work = Work { run, nodes: vec![node], part: Some(part), priority: step.priority, feeds: false, done };
        match self.devices[usize::from(device.0)].submit(work) {
            // An engine that is gone has failed like one that says so.
            Err(error) if device != DeviceId::PRIMARY => {
                let (step, failure) = (step.run.id(), Some(error.to_string()));
                let report = Report { step, nodes: vec![node], part: Some(id), elapsed_ns: Vec::new(), failure };
                self.done.0.send(report).expect("the executor holds the receiver itself");
                Ok(())
            }
            result => Ok(result?),
        }
    }

    pub(super) fn take_part(&mut self, report: Report) -> Result<Option<FinishedStep>, ExecutorError> {
        let Report { step: id, nodes, part, elapsed_ns, failure } = report;
        let (node, index) = (nodes[0], part.expect("the caller has looked") as usize);
        // A step that failed has been dropped; its last reports may still come in.
        if !self.steps.contains_key(&id) {
            return Ok(None);
        }
        match failure {
            Some(reason) => self.part_failed(id, node, index, reason),
            None if self.is_wrong(id, node, index) => self.redo(id, node, index).map(|()| None),
            None => self.part_done(id, node, index, elapsed_ns[0]),
        }
    }

    /// Whether an engine's part that is done must not be believed.
    fn is_wrong(&mut self, id: StepId, node: NodeId, index: usize) -> bool {
        let step = self.steps.get_mut(&id).expect("the caller has looked");
        let shared = step.shared.get(&node).expect("a part of it is out");
        let RunningPart { device, part, .. } = &shared.parts[index];
        if *device == DeviceId::PRIMARY || self.quarantine.is_some() {
            return *device != DeviceId::PRIMARY;
        }
        let Some(rows) = self.checks.next(part) else { return false };
        let start = (self.clock)();
        let difference = check::check(&step.run, node, part, rows, self.checks.repeatable);
        let operations = step.operations.entry(shared.kind).or_default();
        operations.checks += 1;
        operations.check_ns += ((self.clock)() - start).as_nanos() as u64;
        let Some(difference) = difference else {
            self.checks.since = 0;
            return false;
        };
        operations.failed_checks += 1;
        let reason = format!("{}: {difference}", self.devices[usize::from(device.0)].capabilities().name);
        let parts = self.checks.since;
        tracing::error!(
            reason,
            parts,
            "wrong numbers: engines are in quarantine, with all they did since the last check"
        );
        self.feature.close(FeatureState::Quarantined { reason: reason.clone() });
        (self.quarantine, self.quarantine_is_news) = (Some(reason), true);
        true
    }

    fn part_failed(
        &mut self,
        id: StepId,
        node: NodeId,
        index: usize,
        reason: String,
    ) -> Result<Option<FinishedStep>, ExecutorError> {
        let step = self.steps.get_mut(&id).expect("the caller has looked");
        let shared = step.shared.get(&node).expect("a part of it is out");
        let (kind, key, device) = (shared.kind, shared.key, shared.parts[index].device);
        if device == DeviceId::PRIMARY {
            step.part_entries.entry((kind, device)).or_default().failed += 1;
            self.give_up(id);
            self.queue_ready()?;
            return Err(ExecutorError::Node { step: id, reason });
        }
        step.operations.entry(kind).or_default().runtime_failures += 1;
        if !self.latched.contains_key(&key) {
            let engine = &self.devices[usize::from(device.0)].capabilities().name;
            tracing::warn!(projection = %key, engine, reason, "failed on an engine; the primary device does it from now on");
            self.latched.insert(key, reason);
            self.feature.latched();
        }
        self.redo(id, node, index).map(|()| None)
    }

    /// Has the primary device do what an engine did not do, or not well.
    fn redo(&mut self, id: StepId, node: NodeId, index: usize) -> Result<(), ExecutorError> {
        let mut step = self.steps.remove(&id).expect("the caller has looked");
        let shared = step.shared.get_mut(&node).expect("a part of it is out");
        let (kind, running) = (shared.kind, &mut shared.parts[index]);
        let device = std::mem::replace(&mut running.device, DeviceId::PRIMARY);
        let part = running.part.clone();
        step.part_entries.entry((kind, device)).or_default().failed += 1;
        let result = self.hand_over_part(&mut step, node, kind, DeviceId::PRIMARY, part);
        self.steps.insert(id, step);
        result
    }

    fn part_done(
        &mut self,
        id: StepId,
        node: NodeId,
        index: usize,
        elapsed_ns: u64,
    ) -> Result<Option<FinishedStep>, ExecutorError> {
        let step = self.steps.get_mut(&id).expect("the caller has looked");
        let shared = step.shared.get_mut(&node).expect("a part of it is out");
        let (kind, RunningPart { device, part, tile }) = (shared.kind, &shared.parts[index]);
        let entry = step.part_entries.entry((kind, *device)).or_default();
        entry.completed += 1;
        entry.rows += part.rows.len() as u64;
        entry.busy_ns += elapsed_ns;
        entry.longest_ns = entry.longest_ns.max(elapsed_ns);
        if self.keeps_spans {
            let scope = step.template.graph().node(node).scope;
            let end_ns = ((self.clock)() - step.start).as_nanos() as u64;
            let start_ns = end_ns.saturating_sub(elapsed_ns);
            step.spans.push(Span { node, kind, scope, device: *device, start_ns, end_ns });
        }
        *shared.busy.entry(*device).or_default() += elapsed_ns;
        let operations = step.operations.entry(kind).or_default();
        if let Some(tile) = *tile {
            shared.tiles[tile] -= 1;
            operations.merged += u64::from(shared.tiles[tile] == 0);
        }
        shared.left -= 1;
        if shared.left > 0 {
            return Ok(None);
        }
        let region_ns = ((self.clock)() - shared.start).as_nanos() as u64;
        let longest_ns = shared.busy.values().copied().max().unwrap_or(0);
        operations.region_ns += region_ns;
        operations.gap_ns += region_ns.saturating_sub(longest_ns);
        step.last_shared = (self.clock)();
        *operations.last.entry(*device).or_default() += 1;
        step.shared.remove(&node);
        step.left -= 1;
        let template = Arc::clone(&step.template);
        step.release_successors(template.place(node), |_| true);
        self.go_on()
    }
}
