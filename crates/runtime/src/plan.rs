//! Which device runs which node, or which part of it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use troika_device::Part;
use troika_device::npu::{Body, Procedure};
use troika_graph::{Kind, Node, Op, Scope, WeightKey};

/// A device of the executor; an index into its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u16);

impl DeviceId {
    /// The device that runs everything nobody else does.
    pub const PRIMARY: Self = Self(0);
}

/// What a step is for. Plans give nodes of prefill steps to engines, and no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Tokens of prompts.
    Prefill,
    /// The next token of each sequence.
    Decode,
    /// Drafts, which may be rejected.
    Verify,
}

/// Who gets which rows and channels of an operation.
#[derive(Clone, Debug)]
pub enum Shares {
    /// Each device has some channels of all rows, in the order of the channels.
    Channels(Vec<(DeviceId, Arc<Procedure>)>),
    /// Tiles go to the devices in turn; each can do the whole operation.
    Turns { devices: Vec<DeviceId>, procedure: Arc<Procedure> },
}

impl Shares {
    /// Tiles of the projection `key` go to `instances` engines in turn. Each layer begins with another one, or a step of one
    /// tile would leave all but the first idle.
    pub fn turns(key: WeightKey, instances: usize, procedure: Arc<Procedure>) -> Self {
        let first = match key.scope {
            Scope::Layer(layer) => usize::from(layer),
            Scope::Model | Scope::Stage(_) => 0,
        };
        let devices = (0..instances).map(|turn| DeviceId(1 + ((first + turn) % instances) as u16)).collect();
        Self::Turns { devices, procedure }
    }
}

/// A projection that engines take part in.
#[derive(Clone, Debug)]
pub struct PlannedProjection {
    pub kind: Kind,
    pub shares: Shares,
}

/// What engines and primary device do of one node of a prefill step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schedule {
    /// Full tiles.
    pub(crate) exact: usize,
    /// Whether a padded tile follows.
    pub(crate) padded: bool,
    /// Rows of the tiles; those after them are the primary device's.
    pub(crate) tiled_rows: usize,
    /// Device, part, and which tile it belongs to if an engine does it.
    pub(crate) parts: Vec<(DeviceId, Part, Option<usize>)>,
}

/// Placement of the nodes of prefill steps; nodes that it does not name, and all nodes of other steps, are the primary
/// device's. Every prefill row of a planned projection is computed in the arithmetic of its procedures, whoever does it: what
/// a chunk's width or a failed engine changes is the time, not the result. With engines that cannot be repeated it changes
/// the rounding as well ([`Self::repeats_rows`]).
#[derive(Clone, Debug, Default)]
pub struct Plan {
    tile: usize,
    /// Least rows that are worth a padded tile; 0 = none are.
    tail_threshold: usize,
    projections: BTreeMap<WeightKey, PlannedProjection>,
    digest: String,
    /// See [`Self::unrepeatable`].
    unrepeatable: bool,
}

impl Plan {
    /// Everything on the primary device.
    pub fn primary() -> Self {
        Self::default()
    }

    /// Engines take part in `projections`, named by their first weight, on tiles of `tile` rows. `arithmetic` names what the
    /// digest does not see: the back end's way to round.
    ///
    /// # Panics
    ///
    /// Without rows in a tile.
    pub fn new(
        tile: usize,
        tail_threshold: usize,
        projections: BTreeMap<WeightKey, PlannedProjection>,
        arithmetic: &str,
    ) -> Self {
        assert!(tile > 0, "a tile has rows");
        let mut plan = Self { tile, tail_threshold, projections, digest: String::new(), unrepeatable: false };
        plan.digest = plan.digest_of(arithmetic);
        plan
    }

    /// The primary device cannot repeat what engines compute.
    #[must_use]
    pub fn unrepeatable(self) -> Self {
        Self { unrepeatable: true, ..self }
    }

    /// True if a row has the same bits whoever computes it, so that rows of one prompt may serve another.
    pub fn repeats_rows(&self) -> bool {
        !self.unrepeatable
    }

    /// Rows of a tile.
    pub fn tile(&self) -> usize {
        self.tile
    }

    /// Least rows of a padded tile, 0 if none is ever padded.
    pub fn tail_threshold(&self) -> usize {
        self.tail_threshold
    }

    /// True if the primary device does everything.
    pub fn is_primary(&self) -> bool {
        self.projections.is_empty()
    }

    /// What engines take part in.
    pub fn projections(&self) -> &BTreeMap<WeightKey, PlannedProjection> {
        &self.projections
    }

    /// Names tile, tail threshold and partition; part of the numeric class. Empty if the primary device does everything.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Operations that a prefill step of `rows` rows has of each planned projection.
    pub fn num_operations(&self, rows: usize) -> usize {
        let tiles = rows.checked_div(self.tile);
        tiles.map_or(0, |tiles| tiles + usize::from(self.pads(rows - tiles * self.tile)))
    }

    /// The projection of `node`, if engines take part in it.
    pub(crate) fn projection(&self, node: &Node) -> Option<(WeightKey, &PlannedProjection)> {
        let key = projection_key(&node.op)?;
        self.projections.get(&key).map(|projection| (key, projection))
    }

    fn pads(&self, rows: usize) -> bool {
        self.tail_threshold > 0 && rows >= self.tail_threshold
    }

    /// Cuts `rows` rows of a node into tiles, and these into parts. With `primary_only` the primary device does all of it.
    pub(crate) fn schedule(&self, shares: &Shares, rows: usize, primary_only: bool) -> Schedule {
        let (exact, padded) = match primary_only {
            true => (0, false),
            false => (rows / self.tile, self.pads(rows % self.tile)),
        };
        let tiles = exact + usize::from(padded);
        let tiled_rows = if padded { rows } else { exact * self.tile };
        let mut schedule = Schedule { exact, padded, tiled_rows, parts: Vec::new() };
        let tile_rows = |tile: usize| tile * self.tile..((tile + 1) * self.tile).min(rows);
        let mut push = |device, procedure: &Arc<Procedure>, rows: Range<usize>, tile| {
            if !rows.is_empty() {
                let id = schedule.parts.len() as u32;
                schedule.parts.push((device, Part { id, procedure: Arc::clone(procedure), rows }, tile));
            }
        };
        match shares {
            Shares::Channels(shares) => {
                for (device, procedure) in shares {
                    if *device == DeviceId::PRIMARY {
                        push(DeviceId::PRIMARY, procedure, 0..rows, None);
                        continue;
                    }
                    (0..tiles).for_each(|tile| push(*device, procedure, tile_rows(tile), Some(tile)));
                    push(DeviceId::PRIMARY, procedure, tiled_rows..rows, None);
                }
            }
            Shares::Turns { devices, procedure } => {
                (0..tiles).for_each(|tile| push(devices[tile % devices.len()], procedure, tile_rows(tile), Some(tile)));
                push(DeviceId::PRIMARY, procedure, tiled_rows..rows, None);
            }
        }
        schedule
    }

    fn digest_of(&self, arithmetic: &str) -> String {
        if self.projections.is_empty() {
            return String::new();
        }
        let mut hasher = Sha256::new();
        hasher.update(format!("{arithmetic}\ntile {} tail {}\n", self.tile, self.tail_threshold));
        let channels = |procedure: &Procedure| match &procedure.body {
            Body::Products { groups, products } => {
                let ranges = products.iter().map(|p| format!("{}..{}", p.channels.start, p.channels.end));
                format!("{groups} x {}", ranges.collect::<Vec<_>>().join(","))
            }
            Body::SharedExpert { .. } => "expert".to_owned(),
        };
        for (key, projection) in &self.projections {
            let shares = match &projection.shares {
                Shares::Channels(shares) => shares
                    .iter()
                    .map(|(device, p)| format!("{}:{}", device.0, channels(p)))
                    .collect::<Vec<_>>()
                    .join(" "),
                Shares::Turns { devices, procedure } => format!("turns {} {}", devices.len(), channels(procedure)),
            };
            hasher.update(format!("{key} {shares}\n"));
        }
        hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// What a projection is called in plans: its first weight. `None` for operations that no engine does.
pub fn projection_key(op: &Op) -> Option<WeightKey> {
    match op {
        Op::Linear { weights } => weights.first().map(|weight| weight.key),
        Op::GroupedLinear { weight, .. } => Some(weight.key),
        Op::SharedExpert { w1, .. } => Some(w1.key),
        _ => None,
    }
}
