//! How wide a chunk is, how large a cache block, how far apart snapshots: resolved once at load (hybrid spec 10.1).

use std::fmt;

use crate::Rule;

/// What the geometry is resolved from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeometryRequest {
    /// Row count that a neural engine's procedures are compiled for, if there is one.
    pub tile: Option<usize>,
    /// Configured step width, tokens.
    pub step: usize,
    /// The step may not be widened above the configured one.
    pub honour_step: bool,
    /// Tokens of a block in which every pending buffer of the model is empty.
    pub block: usize,
    /// Whether prefixes are kept.
    pub cache: bool,
    /// Least distance between regular snapshots, tokens.
    pub snapshot_spacing: usize,
}

/// The resolved geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub tile: Option<usize>,
    pub step_configured: usize,
    /// Chunks end at multiples of this, counted from position 0.
    pub step: usize,
    /// Tokens of a cache block.
    pub block: usize,
    /// Distance between regular snapshots; 0 without a cache.
    pub granule: usize,
    /// Whether a chunk can ever hold a whole tile; true if there is no tile to fill.
    pub reachable: bool,
    /// What keeps the step from being wider, if anything does.
    pub limited_by: Option<Rule>,
}

impl Geometry {
    /// Resolves `request`; `fits` says whether the activations of a step of so many rows fit the memory.
    ///
    /// # Panics
    ///
    /// If step or block is zero.
    pub fn resolve(request: &GeometryRequest, fits: impl Fn(usize) -> bool) -> Self {
        let GeometryRequest { tile, step: configured, honour_step, block, cache, snapshot_spacing } = *request;
        assert!(configured > 0 && block > 0, "widths are positive");
        let mut limited_by = None;
        let mut step = match tile {
            Some(tile) if configured >= tile => configured / tile * tile,
            Some(_) if honour_step => {
                limited_by = Some(Rule::UserLimit);
                configured
            }
            Some(tile) => tile,
            None => configured,
        };
        while step > 1 && !fits(step) {
            limited_by = Some(Rule::Memory);
            step = match tile {
                // Whole tiles as long as possible; below that there is nothing to keep whole.
                Some(tile) if step > tile => (step / 2 / tile).max(1) * tile,
                _ => step / 2,
            };
        }
        // A multiple of both, so that blocks never straddle a snapshot.
        let unit = lcm(step, block);
        let granule = if cache { unit * snapshot_spacing.div_ceil(unit).max(1) } else { 0 };
        let reachable = tile.is_none_or(|tile| step >= tile);
        Self { tile, step_configured: configured, step, block, granule, reachable, limited_by }
    }

    /// Pieces of a step whose edges are still absolute: the step halved `times` times, at least one token. With a tile they
    /// are whole tiles or, below that, halves of one: what is narrower than a tile by a little loses it for nothing.
    pub fn narrowed(&self, times: u32) -> usize {
        let piece = (self.step >> times.min(31)).max(1);
        match self.tile {
            Some(tile) if piece >= tile => piece / tile * tile,
            Some(tile) if self.reachable => {
                (0..usize::BITS).map(|halvings| tile >> halvings).find(|width| *width <= piece).unwrap_or(1)
            }
            _ => piece,
        }
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tile {
            Some(tile) => write!(f, "tile {tile}")?,
            None => f.write_str("tile none")?,
        }
        write!(f, ", step {}→{}, block {}, granule {}", self.step_configured, self.step, self.block, self.granule)?;
        write!(f, ", reachable={}", if self.reachable { "yes" } else { "no" })?;
        write!(f, ", limiting rule {}", self.limited_by.map_or("none", Rule::name))
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
