//! The variants that are compared, and how each is started.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// One variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ArmName {
    /// The primary device in stock geometry.
    A,
    /// The primary device with the chunks that the feature needs.
    B,
    /// The feature, with the same chunks.
    C,
    /// As B, with every core: where an engine is made of cores, they could have computed without it too.
    P,
}

impl ArmName {
    pub fn letter(self) -> &'static str {
        match self {
            Self::A => "A",
            Self::B => "B",
            Self::C => "C",
            Self::P => "P",
        }
    }
}

/// What arm C has that B has not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Feature {
    /// Nothing: two arms.
    None,
    /// Neural engines beside the primary device.
    Hybrid {
        npu: String,
        mode: String,
        /// The file that says how, as `troika serve --tuning` takes it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tuning: Option<String>,
    },
    /// For self-tests: it has the wide chunks and nothing else, so all it gains is geometry.
    WidenOnly,
    /// For self-tests: it is planned and compiled, and no operation is ever dispatched.
    NeverRuns,
    /// For self-tests: it takes so much more time (0.05 = 5 %) than the clock says.
    Slower { share: f64 },
}

impl Feature {
    pub fn label(&self) -> String {
        match self {
            Self::None => "none".to_owned(),
            Self::Hybrid { npu, tuning: None, .. } => format!("hybrid, {npu}"),
            Self::Hybrid { npu, tuning: Some(_), .. } => format!("hybrid as tuned, {npu}"),
            Self::WidenOnly => "self-test: wide chunks alone".to_owned(),
            Self::NeverRuns => "self-test: planned, never run".to_owned(),
            Self::Slower { share } => format!("self-test: {} % slower", share * 100.0),
        }
    }

    /// Flags of `serve`.
    fn args(&self, tile: usize) -> Vec<String> {
        match self {
            Self::Hybrid { tuning: Some(file), .. } => vec!["--tuning".to_owned(), file.clone()],
            Self::Hybrid { npu, mode, tuning: None } => {
                ["--npu", npu, "--hybrid", mode, "--tile", &tile.to_string()].map(str::to_owned).to_vec()
            }
            _ => Vec::new(),
        }
    }

    /// How much longer everything takes than the clock says; 1 unless it is a self-test.
    pub(crate) fn time_factor(&self) -> f64 {
        if let Self::Slower { share } = self { 1.0 / (1.0 - share) } else { 1.0 }
    }

    /// What a made-up feature claims to have planned for a prompt, in the form of the server's record.
    pub(crate) fn made_up_plan(&self, rows: usize, tile: usize) -> Option<Value> {
        let tiles = rows.saturating_sub(1) / tile.max(1);
        (*self == Self::NeverRuns).then(|| json!({"kinds": {"query": {"planned_ops": tiles}}}))
    }
}

/// Widths that decide which chunks a prompt is cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Rows that engines are compiled for.
    pub tile: usize,
    /// Prompt tokens of one step, as served without the feature.
    pub stock_step: usize,
    /// The same with it: whole tiles, one at least.
    pub plan_step: usize,
}

impl Geometry {
    pub fn new(tile: usize, stock_step: usize) -> Self {
        Self { tile, stock_step, plan_step: tile.max(stock_step / tile.max(1) * tile) }
    }
}

/// One variant and how its server is started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    pub name: ArmName,
    /// What it is, in a few words.
    pub label: String,
    /// Flags of `serve` that only this arm has.
    pub args: Vec<String>,
}

impl Arm {
    /// The arms for `feature`. `primary_threads` of the primary device, 0 = all cores; if the engines take cores away,
    /// there is a fourth arm that computes with all of them.
    pub fn of(feature: &Feature, geometry: Geometry, primary_threads: usize) -> Vec<Self> {
        let threads = |count: usize| vec!["--threads".to_owned(), count.to_string()];
        let step = |step: usize| vec!["--chunk".to_owned(), step.to_string()];
        let on = if primary_threads == 0 { "every core".to_owned() } else { format!("{primary_threads} of the cores") };
        let (stock, plan) = (geometry.stock_step, geometry.plan_step);
        let mut arms = vec![
            Self {
                name: ArmName::A,
                label: format!("primary on {on}, stock chunks of {stock}"),
                args: [threads(primary_threads), step(stock)].concat(),
            },
            Self {
                name: ArmName::B,
                label: format!("primary on {on}, the plan's chunks of {plan}"),
                args: [threads(primary_threads), step(plan)].concat(),
            },
        ];
        if *feature != Feature::None {
            let args = [threads(primary_threads), step(plan), feature.args(geometry.tile)].concat();
            arms.push(Self { name: ArmName::C, label: format!("{}, chunks of {plan}", feature.label()), args });
        }
        if matches!(feature, Feature::Hybrid { .. }) && primary_threads != 0 {
            let args = [threads(0), step(plan)].concat();
            arms.push(Self { name: ArmName::P, label: format!("primary on every core, chunks of {plan}"), args });
        }
        arms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plans_steps_are_whole_tiles() {
        assert_eq!(Geometry::new(1024, 512).plan_step, 1024);
        assert_eq!(Geometry::new(128, 512).plan_step, 512);
        assert_eq!(Geometry::new(384, 1000).plan_step, 768);
    }

    #[test]
    fn arms_differ_in_one_thing_each() {
        let feature = Feature::Hybrid { npu: "soft:cores=1".into(), mode: "on".into(), tuning: None };
        let arms = Arm::of(&feature, Geometry::new(1024, 512), 1);
        let args: Vec<String> =
            arms.iter().map(|arm| format!("{} {}", arm.name.letter(), arm.args.join(" "))).collect();
        assert_eq!(
            args,
            [
                "A --threads 1 --chunk 512",
                "B --threads 1 --chunk 1024",
                "C --threads 1 --chunk 1024 --npu soft:cores=1 --hybrid on --tile 1024",
                "P --threads 0 --chunk 1024",
            ]
        );
        assert_eq!(Arm::of(&Feature::None, Geometry::new(1024, 512), 0).len(), 2);
        let tuned = Feature::Hybrid { npu: "soft".into(), mode: "on".into(), tuning: Some("t.json".into()) };
        let arms = Arm::of(&tuned, Geometry::new(1024, 512), 1);
        assert_eq!(arms[2].args.join(" "), "--threads 1 --chunk 1024 --tuning t.json");
        // What only widens chunks is started exactly as B is.
        let arms = Arm::of(&Feature::WidenOnly, Geometry::new(1024, 512), 0);
        assert_eq!(arms[1].args, arms[2].args);
    }
}
