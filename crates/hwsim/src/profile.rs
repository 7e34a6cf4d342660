//! A machine as data: what each operation costs on each of its engines, and where a number comes from. The format is
//! described in docs/simulator.md.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use troika_device::npu::Limits;

use crate::SimError;
use crate::form::Projection;
use crate::plan::PlanSpec;

/// The profiles that come along, by name.
const EMBEDDED: [(&str, &str); 4] = [
    ("m3-ultra-512", include_str!("../../../profiles/m3-ultra-512.toml")),
    ("m3-ultra-27b", include_str!("../../../profiles/m3-ultra-27b.toml")),
    ("epyc-2vcpu", include_str!("../../../profiles/epyc-2vcpu.toml")),
    ("epyc-2vcpu-nano", include_str!("../../../profiles/epyc-2vcpu-nano.toml")),
];

/// A machine.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub name: String,
    /// For people.
    pub title: String,
    /// The model whose operations are priced.
    pub model: String,
    /// Of one that was written from a run.
    pub origin: Option<Origin>,
    /// Of a model that Troika does not run: what its layers are made of.
    pub chain: Option<Chain>,
    /// Rows of a tile that all times are for.
    pub tile: usize,
    pub primary: Primary,
    pub engines: Engines,
    pub cpu: Option<Cpu>,
    pub join: Join,
    pub slowdown: Option<Slowdowns>,
    /// What engines do unless somebody says otherwise; without it, the plan of the hybrid spec.
    pub plan: Option<PlanSpec>,
    #[serde(rename = "projection")]
    pub projections: Vec<ProjectionCost>,
    pub calls: Calls,
    #[serde(rename = "operation")]
    pub operations: Vec<OperationCost>,
    #[serde(rename = "checkpoint")]
    pub checkpoints: Vec<Checkpoint>,
}

/// The run that a profile was written from.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// Of the run, UTC.
    pub date: String,
    pub machine: String,
    /// Of the program.
    pub build: String,
    /// Of weights and configuration.
    pub model_digest: String,
}

/// A model that Troika has no graph of: what is known is the time of two operations in each layer, and of everything else.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Chain {
    pub layers: usize,
    /// Input channels of both.
    pub hidden: usize,
    /// Output channels of `attention_input`.
    pub inputs: usize,
    /// Output channels of `mlp`: gate and up; down belongs to the same operation.
    pub mlp: usize,
    /// Of the attention that grows with the context, on average over the layers.
    pub heads: usize,
    pub head_dim: usize,
    /// Of the longest prompt.
    pub max_tokens: usize,
}

/// The device that runs everything nobody else does.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Primary {
    pub name: String,
}

/// Neural engines, all alike.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Engines {
    /// Instances are called by it and their number.
    pub name: String,
    pub instances: usize,
    /// Of each submission.
    pub launch_ms: f64,
    pub min_tile: usize,
    pub tile_multiple: usize,
    pub channel_alignment: usize,
    pub input_alignment: usize,
    /// Most bytes of programs that an instance maps; as many as there are without it.
    pub bank_bytes: Option<u64>,
    /// Of `launch_ms`.
    pub basis: Option<Basis>,
}

/// Ordinary cores beside them, for shares of split projections.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    pub name: String,
    pub channel_alignment: usize,
}

/// What joining the parts of an operation costs the primary device, besides its merge.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// Until it is known that all parts are done.
    pub handover_ms: f64,
    /// Until the primary device runs at full speed again.
    pub sync_ms: f64,
    pub basis: Option<Basis>,
}

/// How many times as long devices take that work side by side, 1 = as long as alone.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Slowdowns {
    /// The primary device while any engine works, and an engine while the primary device does.
    pub primary: f64,
    pub engines: f64,
    /// The same of the parts of one split operation.
    pub split_primary: f64,
    pub split_engines: f64,
    pub basis: Basis,
}

/// Where a number comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// By itself.
    Measured,
    /// So that whole runs come out.
    Fitted,
    /// Plausible; only sums are known.
    Assumed,
}

/// Milliseconds of one tile, averaged over the layers of the model.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ProjectionCost {
    pub name: Projection,
    /// All channels on the primary device.
    pub primary_ms: f64,
    /// All channels, each instance its share.
    pub engine_ms: f64,
    /// All channels on the CPU; none if it cannot take any.
    pub cpu_ms: Option<f64>,
    /// Joining the results in the order of the channels.
    pub merge_ms: f64,
    pub basis: Basis,
}

/// Fixed costs of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Calls {
    /// Steps that go on with a sequence of more tokens pay `resumed_ms`.
    #[serde(default)]
    pub resumed_after: usize,
    /// Steps choose the rows that attention sees even where they are no more than would be chosen.
    #[serde(default)]
    pub always_selects: bool,
}

/// An operation that the primary device alone does, by the name of [`troika_graph::Op::name`]; products that are no
/// projection, by their kind.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OperationCost {
    pub name: String,
    /// Of a tile, averaged over the layers.
    #[serde(default)]
    pub ms: f64,
    /// Speed of what grows with the visible context.
    pub tflops: Option<f64>,
    /// Once per step, averaged over the layers.
    #[serde(default)]
    pub call_ms: f64,
    /// Besides, for steps that go on with a long sequence.
    #[serde(default, skip_serializing_if = "is_nought")]
    pub resumed_ms: f64,
    pub basis: Basis,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_nought(ms: &f64) -> bool {
    *ms == 0.0
}

/// One way to store the model.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    pub name: String,
    pub formats: Formats,
    /// Milliseconds of a tile and layer on top, by operation or projection, on the primary device.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub extra_ms: BTreeMap<String, f64>,
    pub basis: Option<Basis>,
}

/// Formats of the projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Formats {
    /// Those of the official release.
    Official,
    /// Four bits in groups of 64, all of them.
    Affine4,
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Measured => "measured",
            Self::Fitted => "fitted",
            Self::Assumed => "assumed",
        })
    }
}

impl Profile {
    /// Names of the profiles that come along.
    pub fn names() -> Vec<&'static str> {
        EMBEDDED.iter().map(|(name, _)| *name).collect()
    }

    /// A profile that comes along.
    ///
    /// # Errors
    ///
    /// If there is none of that name.
    pub fn named(name: &str) -> Result<Self, SimError> {
        let found = EMBEDDED.iter().find(|(other, _)| *other == name);
        let (_, text) = found.ok_or_else(|| SimError::UnknownName {
            what: "profile",
            name: name.to_owned(),
            known: Self::names().join(", "),
        })?;
        Self::parse(text, name)
    }

    /// Reads a profile; `origin` is where the text comes from, for messages.
    ///
    /// # Errors
    ///
    /// If it is malformed, or a number makes no sense.
    pub fn parse(text: &str, origin: &str) -> Result<Self, SimError> {
        let profile: Self = toml::from_str(text)
            .map_err(|error| SimError::Malformed { origin: origin.to_owned(), reason: error.to_string() })?;
        profile.check().map_err(|reason| SimError::Malformed { origin: origin.to_owned(), reason })?;
        Ok(profile)
    }

    fn check(&self) -> Result<(), String> {
        let whole = [
            ("tile", self.tile),
            ("engines.instances", self.engines.instances),
            ("engines.min_tile", self.engines.min_tile),
            ("engines.tile_multiple", self.engines.tile_multiple),
            ("engines.channel_alignment", self.engines.channel_alignment),
            ("engines.input_alignment", self.engines.input_alignment),
            ("chain.layers", self.chain.map_or(1, |chain| chain.layers)),
            ("chain.hidden", self.chain.map_or(1, |chain| chain.hidden)),
            ("chain.inputs", self.chain.map_or(1, |chain| chain.inputs)),
            ("chain.heads", self.chain.map_or(1, |chain| chain.heads)),
            ("chain.head_dim", self.chain.map_or(1, |chain| chain.head_dim)),
            ("chain.mlp", self.chain.map_or(1, |chain| chain.mlp)),
            ("cpu.channel_alignment", self.cpu.as_ref().map_or(1, |cpu| cpu.channel_alignment)),
        ];
        if let Some((key, _)) = whole.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{key} = 0: it must be at least 1"));
        }
        if let Some(chain) = self.chain.filter(|chain| chain.layers > MAX_LAYERS) {
            return Err(format!("chain.layers = {}: at most {MAX_LAYERS}", chain.layers));
        }
        if self.tile > MAX_TILE {
            return Err(format!("tile = {}: at most {MAX_TILE}", self.tile));
        }
        if self.engines.instances > MAX_INSTANCES {
            return Err(format!("engines.instances = {}: at most {MAX_INSTANCES}", self.engines.instances));
        }
        let mut times = vec![
            ("engines.launch_ms".to_owned(), self.engines.launch_ms),
            ("join.handover_ms".to_owned(), self.join.handover_ms),
            ("join.sync_ms".to_owned(), self.join.sync_ms),
        ];
        for cost in &self.projections {
            let name = cost.name.name();
            times.push((format!("primary_ms of {name}"), cost.primary_ms));
            times.push((format!("engine_ms of {name}"), cost.engine_ms));
            times.push((format!("merge_ms of {name}"), cost.merge_ms));
            times.push((format!("cpu_ms of {name}"), cost.cpu_ms.unwrap_or_default()));
        }
        for cost in &self.operations {
            let parts = [("ms", cost.ms), ("call_ms", cost.call_ms), ("resumed_ms", cost.resumed_ms)];
            times.extend(parts.map(|(key, value)| (format!("{key} of {}", cost.name), value)));
            if cost.tflops.is_some_and(|rate| !(rate > 0.0 && rate.is_finite())) {
                return Err(format!("tflops of {} is not a positive number", cost.name));
            }
        }
        for checkpoint in &self.checkpoints {
            let of = |name: &String| format!("extra_ms.{name} of checkpoint {}", checkpoint.name);
            times.extend(checkpoint.extra_ms.iter().map(|(name, value)| (of(name), *value)));
        }
        if let Some((key, value)) = times.iter().find(|(_, value)| !(*value >= 0.0 && value.is_finite())) {
            return Err(format!("{key} = {value}: a time is a number, 0 at least"));
        }
        if let Some(Slowdowns { primary, engines, split_primary, split_engines, .. }) = self.slowdown {
            let beside = [("primary", primary), ("engines", engines)];
            let factors =
                beside.into_iter().chain([("split_primary", split_primary), ("split_engines", split_engines)]);
            if let Some((key, value)) = factors.into_iter().find(|(_, factor)| !(*factor >= 1.0 && factor.is_finite()))
            {
                return Err(format!("slowdown.{key} = {value}: nobody is faster beside others, 1 at least"));
            }
        }
        let names = self.projections.iter().map(|cost| cost.name.name());
        let mut names: Vec<&str> = names.chain(self.operations.iter().map(|cost| cost.name.as_str())).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("{} is there twice", pair[0]));
        }
        let priced = |name: &String| names.contains(&name.as_str());
        let extra = self.checkpoints.iter().flat_map(|checkpoint| checkpoint.extra_ms.keys());
        match extra.into_iter().find(|name| !priced(name)) {
            Some(name) => Err(format!("a checkpoint has extra_ms for {name}, which has no price")),
            None => Ok(()),
        }
    }

    /// The price of a projection.
    ///
    /// # Errors
    ///
    /// If the profile has none.
    pub fn projection(&self, projection: Projection) -> Result<&ProjectionCost, SimError> {
        let found = self.projections.iter().find(|cost| cost.name == projection);
        found.ok_or_else(|| self.unpriced(projection.name()))
    }

    pub(crate) fn operation(&self, name: &str) -> Result<&OperationCost, SimError> {
        self.operations.iter().find(|cost| cost.name == name).ok_or_else(|| self.unpriced(name))
    }

    /// Where the price of an operation comes from, by its name in records.
    pub(crate) fn basis(&self, name: &str) -> Option<Basis> {
        let projection = self.projections.iter().find(|cost| cost.name.name() == name).map(|cost| cost.basis);
        projection.or_else(|| self.operations.iter().find(|cost| cost.name == name).map(|cost| cost.basis))
    }

    /// Whether what a layer's attention is given is one operation.
    pub(crate) fn stacks_inputs(&self) -> bool {
        self.projections.iter().all(|cost| cost.name != Projection::WqA)
    }

    fn unpriced(&self, operation: &str) -> SimError {
        SimError::Unpriced { profile: self.name.clone(), operation: operation.to_owned() }
    }

    /// A checkpoint that the profile knows.
    ///
    /// # Errors
    ///
    /// If it knows none of that name.
    pub fn checkpoint(&self, name: &str) -> Result<&Checkpoint, SimError> {
        let known =
            || self.checkpoints.iter().map(|checkpoint| checkpoint.name.as_str()).collect::<Vec<_>>().join(", ");
        self.checkpoints.iter().find(|checkpoint| checkpoint.name == name).ok_or_else(|| SimError::UnknownName {
            what: "checkpoint",
            name: name.to_owned(),
            known: known(),
        })
    }

    /// As a file, behind these lines of comment.
    ///
    /// # Errors
    ///
    /// If a number makes no sense.
    pub fn to_toml(&self, comment: &str) -> Result<String, SimError> {
        let malformed = |reason: String| SimError::Malformed { origin: self.name.clone(), reason };
        self.check().map_err(malformed)?;
        let text = toml::to_string(self).map_err(|error| malformed(error.to_string()))?;
        Ok(comment.lines().map(|line| format!("# {line}\n")).collect::<String>() + &text)
    }

    /// What a back end would say of these engines.
    pub fn limits(&self) -> Limits {
        let engines = &self.engines;
        Limits {
            min_tile: engines.min_tile,
            tile_multiple: engines.tile_multiple,
            channel_alignment: engines.channel_alignment,
            input_alignment: engines.input_alignment,
            bank_bytes: engines.bank_bytes.unwrap_or(u64::MAX),
            instances: engines.instances,
            repeatable: true,
        }
    }
}

/// More than any machine has; keeps numbers of devices small.
const MAX_INSTANCES: usize = 64;
const MAX_LAYERS: usize = 1000;
/// Rows of a tile: as many as the longest prompt of the models we know.
const MAX_TILE: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_makes_no_sense_is_named() {
        let text = EMBEDDED[0].1;
        let cases = [
            ("launch_ms = 0.033", "launch_ms = -1.0", "engines.launch_ms = -1"),
            ("instances = 2", "instances = 0", "engines.instances = 0"),
            ("tile = 4096", "tile = 40960000", "tile = 40960000: at most"),
            (
                "[calls]",
                "[slowdown]\nprimary = 0.5\nengines = 1.0\nsplit_primary = 1.0\nsplit_engines = 1.0\nbasis = \"fitted\"\n[calls]",
                "slowdown.primary = 0.5",
            ),
            ("ms = 56.0", "ms = nan", "ms of experts = NaN"),
            ("name = \"wo_b\"", "name = \"wo_a\"", "wo_a is there twice"),
            ("tflops = 19.5", "tflops = 0.0", "tflops of attend"),
            ("experts = 0.35", "experty = 0.35", "extra_ms for experty"),
            ("handover_ms = 0.22", "handover_s = 0.22", "unknown field `handover_s`"),
        ];
        for (from, to, want) in cases {
            let error = Profile::parse(&text.replacen(from, to, 1), "here").expect_err(to).to_string();
            assert!(error.starts_with("here: ") && error.contains(want), "{to}: {error}");
        }
    }
}
