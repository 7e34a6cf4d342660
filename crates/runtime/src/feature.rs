//! Whether engines really take part: a state computed from what was dispatched, never from settings (section 3 of the hybrid
//! spec).

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use crate::ledger::{Fallback, Operations};
use crate::plan::Plan;

/// Prefill steps that the state looks back on.
const WINDOW: usize = 64;
/// Engaged from this share of planned operations on.
const ENGAGED: f64 = 0.95;
/// Steps wider than half a tile without any dispatch before somebody is told.
const PATIENCE: usize = 16;

/// Why nothing was planned.
const NO_TILE: &str = "no step was as wide as a tile";

/// What engines do for the running model.
#[derive(Clone, Debug, PartialEq)]
pub enum FeatureState {
    /// Nobody asked for it.
    Off,
    /// Not possible on this host or with this model.
    Unavailable { reason: String },
    /// Compiled and warm; nothing was executed yet.
    Ready,
    /// At least 95 % of the planned operations were dispatched.
    Engaged,
    /// None was planned, or none dispatched.
    Idle { reason: String },
    /// Some of the planned ones were dispatched.
    Degraded { reason: String, ratio: f64 },
    /// The numbers were wrong; nothing more is dispatched.
    Quarantined { reason: String },
}

impl FeatureState {
    /// What engines did of `operations`.
    pub fn of(operations: &Operations) -> Self {
        let reason = operations.why_missing().or(operations.main_fallback());
        let reason = || reason.map_or(NO_TILE, Fallback::name).to_owned();
        Self::by(operations.planned, operations.dispatched(), reason)
    }

    fn by(planned: u64, dispatched: u64, reason: impl FnOnce() -> String) -> Self {
        let ratio = dispatched as f64 / planned.max(1) as f64;
        if planned > 0 && ratio >= ENGAGED {
            Self::Engaged
        } else if planned > 0 && dispatched > 0 {
            Self::Degraded { reason: reason(), ratio }
        } else {
            Self::Idle { reason: reason() }
        }
    }

    /// Its name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Unavailable { .. } => "unavailable",
            Self::Ready => "ready",
            Self::Engaged => "engaged",
            Self::Idle { .. } => "idle",
            Self::Degraded { .. } => "degraded",
            Self::Quarantined { .. } => "quarantined",
        }
    }
}

impl fmt::Display for FeatureState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off | Self::Ready | Self::Engaged => f.write_str(self.name()),
            Self::Unavailable { reason } | Self::Idle { reason } | Self::Quarantined { reason } => {
                write!(f, "{}({reason})", self.name())
            }
            Self::Degraded { reason, ratio } => write!(f, "degraded({reason}, {:.1} %)", ratio * 100.0),
        }
    }
}

#[derive(Clone, Debug)]
struct Chunk {
    planned: u64,
    dispatched: u64,
    reason: Option<Fallback>,
}

/// The state, and what it is computed from.
#[derive(Clone, Debug)]
pub struct Feature {
    tile: usize,
    /// Off, unavailable or quarantined: nothing is dispatched, whatever the chunks are.
    closed: Option<FeatureState>,
    window: VecDeque<Chunk>,
    any_latched: bool,
    /// Share of the plan's projections whose banks were not given up for want of memory.
    kept: f64,
    /// Steps wider than half a tile since the last dispatch, and their widths.
    waiting: usize,
    widths: BTreeMap<usize, usize>,
    /// What narrowed chunks since the last dispatch, and how many.
    narrowed_by: BTreeMap<&'static str, usize>,
    /// Why no step can ever hold a tile.
    pub(crate) idle: Option<&'static str>,
    /// The reason that somebody was told.
    told: Option<String>,
}

impl Feature {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            tile: plan.tile(),
            closed: plan.is_primary().then_some(FeatureState::Off),
            window: VecDeque::new(),
            any_latched: false,
            kept: 1.0,
            waiting: 0,
            widths: BTreeMap::new(),
            narrowed_by: BTreeMap::new(),
            idle: None,
            told: None,
        }
    }

    /// What engines do now.
    pub fn state(&self) -> FeatureState {
        if let Some(state) = &self.closed {
            return state.clone();
        }
        let memory = || Fallback::Memory.name().to_owned();
        if self.window.is_empty() {
            return match self.idle {
                Some(reason) => FeatureState::Idle { reason: reason.to_owned() },
                None if self.kept == 0.0 => FeatureState::Idle { reason: memory() },
                None if self.kept < 1.0 => FeatureState::Degraded { reason: memory(), ratio: self.kept },
                None => FeatureState::Ready,
            };
        }
        let (planned, dispatched) = self.window.iter().fold((0, 0), |(p, d), c| (p + c.planned, d + c.dispatched));
        match FeatureState::by(planned, dispatched, || self.reason()) {
            // Little was given up, or only just now.
            FeatureState::Engaged if self.kept < 1.0 => {
                let ratio = dispatched as f64 / planned.max(1) as f64;
                FeatureState::Degraded { reason: memory(), ratio }
            }
            state => state,
        }
    }

    /// Why the last step that was not dispatched as planned was not.
    fn reason(&self) -> String {
        if let Some(reason) = self.idle {
            return reason.to_owned();
        }
        // What was planned and not dispatched says more than what was not planned.
        let missing = self.window.iter().rev().find(|chunk| chunk.dispatched < chunk.planned);
        let last = missing.or_else(|| self.window.iter().rev().find(|chunk| chunk.planned == 0));
        match last.and_then(|chunk| chunk.reason) {
            Some(reason) => reason.name().to_owned(),
            None if self.any_latched => Fallback::Latched.name().to_owned(),
            None => NO_TILE.to_owned(),
        }
    }

    /// Banks were given up: this share of the plan's projections is left.
    pub(crate) fn shed(&mut self, kept: f64) {
        self.kept = kept;
    }

    /// Nothing is dispatched from now on.
    pub(crate) fn close(&mut self, state: FeatureState) {
        self.closed = Some(state);
    }

    pub(crate) fn latched(&mut self) {
        self.any_latched = true;
    }

    /// A rule has narrowed a chunk.
    pub(crate) fn narrowed(&mut self, rule: &'static str) {
        *self.narrowed_by.entry(rule).or_default() += 1;
    }

    /// The rule that narrowed most chunks since the last dispatch, and the setting that would cure it.
    fn cure(&self) -> (&'static str, &'static str) {
        if self.any_latched {
            return ("none", "see the warning of the engine's failure");
        }
        if self.kept == 0.0 {
            return ("memory", "more memory (--memory-limit): the engines' programs were given up");
        }
        match self.narrowed_by.iter().max_by_key(|(_, count)| **count).map(|(rule, _)| *rule) {
            Some(rule @ "max_itl") => (rule, "a longer gap between tokens (--max-itl), or a smaller tile (--tile)"),
            Some(rule @ "remaining") => (rule, "a tile that prompts fill (--tile)"),
            Some(rule @ "memory") => (rule, "more memory (--memory-limit), or a smaller tile (--tile)"),
            Some(rule) => (rule, "a smaller tile (--tile)"),
            None => ("none", "a tile at most as wide as the steps (--tile), or wider steps (--chunk)"),
        }
    }

    /// What somebody must be told, if nobody has told them: engines are ready, steps are wide, and none has reached them.
    fn warning(&mut self) -> Option<Warning> {
        // If no step can hold a tile, that was said at the start.
        if self.waiting <= PATIENCE || self.idle.is_some() {
            return None;
        }
        let reason = self.reason();
        if self.told.as_ref() == Some(&reason) {
            return None;
        }
        self.told = Some(reason.clone());
        let (rule, cure) = self.cure();
        Some(Warning { tile: self.tile, widths: self.widths.clone(), rule, reason, cure })
    }

    /// Takes note of a prefill step.
    pub(crate) fn observe(&mut self, rows: usize, operations: &Operations) {
        if self.closed.is_some() {
            return;
        }
        let (planned, dispatched) = (operations.planned, operations.dispatched());
        let reason = operations.why_missing().or(operations.main_fallback());
        self.window.push_back(Chunk { planned, dispatched, reason });
        if self.window.len() > WINDOW {
            self.window.pop_front();
        }
        if dispatched > 0 {
            (self.waiting, self.told) = (0, None);
            self.widths.clear();
            self.narrowed_by.clear();
        } else if rows > self.tile / 2 {
            self.waiting += 1;
            *self.widths.entry(rows).or_default() += 1;
        }
        if let Some(Warning { tile, widths, rule, reason, cure }) = self.warning() {
            tracing::warn!(tile, ?widths, rule, reason, cure, "engines are ready, but no step has reached them");
        }
    }
}

/// See [`Feature::warning`].
#[derive(Debug, PartialEq)]
struct Warning {
    tile: usize,
    /// Steps of each width since the last dispatch.
    widths: BTreeMap<usize, usize>,
    /// What narrowed most of their chunks.
    rule: &'static str,
    reason: String,
    /// The setting that would change it.
    cure: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feature() -> Feature {
        Feature { closed: None, tile: 512, ..Feature::new(&Plan::primary()) }
    }

    fn operations(planned: u64, dispatched: u64, reason: Option<Fallback>) -> Operations {
        let fallbacks = reason.into_iter().map(|reason| (reason, 1)).collect();
        Operations { planned, exact: dispatched, fallbacks, ..Operations::default() }
    }

    #[test]
    fn the_state_follows_what_was_dispatched() {
        let mut feature = feature();
        assert_eq!(feature.state(), FeatureState::Ready);
        feature.observe(512, &operations(10, 10, None));
        assert_eq!(feature.state(), FeatureState::Engaged);
        feature.observe(512, &operations(10, 5, Some(Fallback::Latched)));
        assert_eq!(feature.state(), FeatureState::Degraded { reason: "latched".to_owned(), ratio: 0.75 });
        for _ in 0..WINDOW {
            feature.observe(300, &operations(0, 0, Some(Fallback::RowsBelowTailThreshold)));
        }
        assert_eq!(feature.state(), FeatureState::Idle { reason: "rows_below_tail_threshold".to_owned() });
        for _ in 0..WINDOW {
            feature.observe(1024, &operations(20, 19, None));
        }
        assert_eq!(feature.state(), FeatureState::Engaged, "95 % are enough");
        feature.close(FeatureState::Quarantined { reason: "gate".to_owned() });
        feature.observe(512, &operations(10, 10, None));
        assert_eq!(feature.state().to_string(), "quarantined(gate)");
    }

    /// Little or much: what was given up is not passed over, and if nothing is left, nothing runs.
    #[test]
    fn banks_that_were_given_up_show() {
        let mut feature = feature();
        feature.shed(0.5);
        assert_eq!(feature.state().to_string(), "degraded(memory, 50.0 %)");
        feature.observe(512, &operations(100, 96, Some(Fallback::Memory)));
        assert_eq!(feature.state().to_string(), "degraded(memory, 96.0 %)");
        feature.shed(0.0);
        for _ in 0..WINDOW {
            feature.observe(512, &operations(100, 0, Some(Fallback::Memory)));
        }
        assert_eq!(feature.state().to_string(), "idle(memory)");
        let cure = "more memory (--memory-limit): the engines' programs were given up";
        assert_eq!(feature.cure(), ("memory", cure));
    }

    #[test]
    fn the_warning_names_widths_rule_and_cure() {
        let mut feature = feature();
        let narrow = operations(0, 0, Some(Fallback::Contention));
        for step in 0..PATIENCE {
            feature.narrowed("max_itl");
            feature.observe(if step % 2 == 0 { 300 } else { 400 }, &narrow);
        }
        assert_eq!(feature.warning(), None, "patience");
        feature.waiting += 1;
        let warning = feature.warning().expect("seventeen steps");
        assert_eq!((warning.tile, warning.rule, warning.reason.as_str()), (512, "max_itl", "contention"));
        assert_eq!(warning.widths, BTreeMap::from([(300, 8), (400, 8)]));
        assert!(warning.cure.contains("--max-itl"), "{warning:?}");
        assert_eq!(feature.warning(), None, "it was said");
        feature.observe(300, &operations(0, 0, Some(Fallback::Throttle)));
        assert_eq!(feature.told.as_deref(), Some("throttle"), "the reason has changed");
    }

    #[test]
    fn somebody_is_told_once_for_each_reason() {
        let mut feature = feature();
        let narrow = operations(0, 0, Some(Fallback::RowsBelowTailThreshold));
        (0..PATIENCE).for_each(|_| feature.observe(300, &narrow));
        (0..100).for_each(|_| feature.observe(200, &narrow));
        assert_eq!(feature.told, None, "too narrow ones do not count");
        feature.observe(300, &narrow);
        assert_eq!(feature.told.as_deref(), Some("rows_below_tail_threshold"));
        feature.latched();
        feature.observe(512, &operations(10, 0, Some(Fallback::Latched)));
        assert_eq!(feature.told.as_deref(), Some("latched"), "the reason has changed");
        feature.observe(512, &operations(10, 10, None));
        assert_eq!((feature.told, feature.waiting), (None, 0));
    }
}
