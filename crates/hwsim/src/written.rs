//! A profile written from what was observed of a model on a machine: times of single nodes become prices of operations, averaged over the
//! layers. Coarser than the observation itself, by which [`crate::Replay`] predicts, and usable for what was not observed: other
//! settings, other lengths, other placements.

use std::collections::BTreeMap;

use troika_base::{NumericClass, SequenceId};
use troika_device::npu::Limits;
use troika_graph::{Acceptance, Node, Op, Segment, StepGraph};
use troika_model::{Emitter, ModelConfig, ModelFacts, StepSignature};

use crate::SimError;
use crate::form::Projection;
use crate::observed::{Observed, ObservedNode};
use crate::plan::{Placement, PlanSpec};
use crate::price::{Totals, name_of, seen};
use crate::profile::{
    Basis, Calls, Checkpoint, Engines, Formats, Join, OperationCost, Origin, Primary, Profile, ProjectionCost,
    Slowdowns,
};

/// What a profile says besides prices.
pub struct About {
    pub name: String,
    pub title: String,
    pub origin: Origin,
    pub primary: String,
    pub engine: String,
    /// Of the engine.
    pub limits: Limits,
}

/// What one operation took in a step, all layers together.
#[derive(Clone, Copy, Debug)]
struct Sample {
    rows: f64,
    ms: f64,
    /// How much of the operation there is in such a step: without a selection, what belongs to it is missing.
    part: f64,
    /// What the visible rows would take at a rate of one teraflop per second, milliseconds.
    seen_ms: f64,
}

/// What an operation costs: all layers, milliseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    /// Of a tile.
    tile_ms: f64,
    /// Of each step, however narrow.
    call_ms: f64,
    tflops: Option<f64>,
}

impl Observed {
    /// The machine's profile, with prices of this model.
    ///
    /// # Errors
    ///
    /// If the model's operations are not those that were observed.
    pub fn profile(&self, config: &ModelConfig, facts: &ModelFacts, about: About) -> Result<Profile, SimError> {
        let emitter = Emitter::new(config.clone(), facts.clone());
        let whole = graph(&emitter, self.tile, true, 0);
        let totals = Totals::of(&whole);
        let nodes = self.by_name(&whole);
        let is_missing = |node: &&Node| !nodes.contains_key(name_of(node)) && !can_be_assumed(node);
        if let Some(node) = whole.nodes().iter().find(is_missing) {
            let profile = format!("what was observed of {}", self.model);
            return Err(SimError::Unpriced { profile, operation: name_of(node).to_owned() });
        }
        let cost = |(name, nodes): (&&'static str, &Vec<&ObservedNode>)| {
            let samples = self.samples(name, nodes, &emitter, &totals);
            let grows = samples.iter().any(|sample| sample.seen_ms > 0.0);
            (*name, if grows { growing(&samples, self.tile as f64) } else { steady(&samples, self.tile as f64) })
        };
        let costs: BTreeMap<&'static str, Cost> = nodes.iter().map(cost).collect();
        let projections = self.projections(&nodes, &costs, totals.layers());
        let planned = projections.iter().filter(|cost| cost.basis == Basis::Measured);
        let place = planned.map(|cost| (cost.name, Placement::Whole)).collect();
        let plan = PlanSpec { tail_threshold: Some(0), place, ..PlanSpec::primary(self.tile) };
        let decode = graph(&emitter, self.tile, true, 1);
        Ok(Profile {
            name: about.name,
            title: about.title,
            model: self.model.clone(),
            origin: Some(about.origin),
            chain: None,
            tile: self.tile,
            primary: Primary { name: about.primary },
            engines: Engines {
                name: about.engine,
                instances: about.limits.instances,
                // Not told apart from the parts' own times.
                launch_ms: 0.0,
                min_tile: about.limits.min_tile,
                tile_multiple: about.limits.tile_multiple,
                channel_alignment: about.limits.channel_alignment,
                input_alignment: about.limits.input_alignment,
                bank_bytes: Some(about.limits.bank_bytes).filter(|bytes| *bytes < u64::MAX),
                basis: Some(Basis::Assumed),
            },
            cpu: None,
            join: Join {
                handover_ms: short(self.handover_ms),
                sync_ms: short(self.sync_ms),
                basis: Some(Basis::Fitted),
            },
            slowdown: Some(self.slowdowns(&nodes)),
            plan: Some(plan),
            calls: Calls::default(),
            operations: self.operations(&whole, &decode, &totals, &costs),
            projections,
            checkpoints: vec![Checkpoint {
                name: self.model.clone(),
                formats: Formats::Official,
                extra_ms: BTreeMap::new(),
                basis: None,
            }],
        })
    }

    /// What engines may take part in.
    fn projections(
        &self,
        nodes: &BTreeMap<&'static str, Vec<&ObservedNode>>,
        costs: &BTreeMap<&'static str, Cost>,
        layers: f64,
    ) -> Vec<ProjectionCost> {
        let engine_rate = self.engine_rate(nodes);
        let price = |projection: Projection| {
            let cost = costs.get(projection.name())?;
            let primary_ms = cost.tile_ms + cost.call_ms;
            let (engine_ms, basis) = match engine_ms(&nodes[projection.name()]) {
                Some(ms) => (ms, Basis::Measured),
                None => (primary_ms * engine_rate, Basis::Assumed),
            };
            let [primary_ms, engine_ms] = [primary_ms, engine_ms].map(|ms| short(ms / layers));
            Some(ProjectionCost { name: projection, primary_ms, engine_ms, cpu_ms: None, merge_ms: 0.0, basis })
        };
        Projection::ALL.into_iter().filter_map(price).collect()
    }

    /// What was observed, by the names of prices.
    fn by_name(&self, whole: &StepGraph) -> BTreeMap<&'static str, Vec<&ObservedNode>> {
        let mut names: BTreeMap<(&str, &str), &'static str> = BTreeMap::new();
        names.extend(whole.nodes().iter().map(|node| ((node.kind.name(), node.op.name()), name_of(node))));
        let mut nodes: BTreeMap<&'static str, Vec<&ObservedNode>> = BTreeMap::new();
        for node in &self.nodes {
            if let Some(name) = names.get(&(&*node.key.kind, &*node.key.op)) {
                nodes.entry(name).or_default().push(node);
            }
        }
        nodes
    }

    /// One for each step that was observed with engines off.
    fn samples(&self, name: &str, nodes: &[&ObservedNode], emitter: &Emitter, totals: &Totals) -> Vec<Sample> {
        let mut sums: BTreeMap<(usize, usize), f64> = BTreeMap::new();
        for time in nodes.iter().flat_map(|node| &node.primary) {
            *sums.entry((time.rows, time.position)).or_default() += time.ms;
        }
        let sample = |((rows, position), ms): ((usize, usize), f64)| {
            let graph = graph(emitter, rows, emitter.needs_selection(position + rows), 0);
            let acceptance = Acceptance::Whole;
            let segment = Segment { sequence: SequenceId(0), row: 0, rows, position, acceptance };
            let visible = |node: &Node| seen(&graph, node, 1.0).map_or(0.0, |seen| seen.ms(&segment));
            let own = graph.nodes().iter().filter(|node| name_of(node) == name);
            Sample {
                rows: rows as f64,
                ms,
                part: Totals::of(&graph).weight(name) / totals.weight(name),
                seen_ms: own.map(visible).sum(),
            }
        };
        sums.into_iter().map(sample).filter(|sample| sample.part > 0.0).collect()
    }

    /// What the primary device alone does.
    fn operations(
        &self,
        whole: &StepGraph,
        decode: &StepGraph,
        totals: &Totals,
        costs: &BTreeMap<&'static str, Cost>,
    ) -> Vec<OperationCost> {
        let layers = totals.layers();
        let is_operation = |node: &&Node| Projection::of(node).is_none();
        let mut names: Vec<&'static str> = decode.nodes().iter().filter(is_operation).map(name_of).collect();
        names.sort_unstable();
        names.dedup();
        let assumed = |name: &str| match whole.nodes().iter().find(|node| name_of(node) == name) {
            // As fast as attention is.
            Some(node) if seen(whole, node, 1.0).is_some() => {
                Cost { tflops: costs.get("attend").and_then(|cost| cost.tflops), ..Cost::default() }
            }
            // As fast as the narrow product that was observed.
            Some(_) => {
                let gate = costs.get("gate").map_or(0.0, |cost| cost.tile_ms + cost.call_ms);
                Cost { tile_ms: gate * totals.weight(name) / totals.weight("gate"), ..Cost::default() }
            }
            // Of steps of decode, which nothing is predicted of.
            None => Cost::default(),
        };
        let operation = |name: &'static str| {
            let measured = costs.get(name).copied();
            let Cost { tile_ms, mut call_ms, tflops } = measured.unwrap_or_else(|| assumed(name));
            if name == "embed" {
                // The first node of a step is charged with what a step takes besides its nodes.
                call_ms += self.step_ms;
            }
            OperationCost {
                name: name.to_owned(),
                ms: short(tile_ms / layers),
                tflops: tflops.map(short),
                call_ms: short(call_ms / layers),
                resumed_ms: 0.0,
                basis: match measured {
                    Some(Cost { tflops: Some(_), .. }) => Basis::Fitted,
                    Some(_) => Basis::Measured,
                    None => Basis::Assumed,
                },
            }
        };
        names.into_iter().map(operation).collect()
    }

    /// How many times as long engines take as the primary device, for what they were not given.
    fn engine_rate(&self, nodes: &BTreeMap<&'static str, Vec<&ObservedNode>>) -> f64 {
        let placed = || nodes.values().flatten().filter(|node| node.engine_part_ms(1.0).is_some());
        let primary: f64 = placed().filter_map(|node| node.whole_ms(self.tile, self.tile)).sum();
        let engines: f64 = placed().filter_map(|node| node.engine_part_ms(1.0)).sum();
        if primary > 0.0 { engines / primary } else { 1.0 }
    }

    /// Beside each other's work, as it was fitted; side by side on one operation, by the parts of those that were observed.
    fn slowdowns(&self, nodes: &BTreeMap<&'static str, Vec<&ObservedNode>>) -> Slowdowns {
        let (mut took, mut alone) = ([0.0; 2], [0.0; 2]);
        for node in nodes.values().flatten() {
            let wholes = [node.whole_ms(self.tile, self.tile), node.engine_part_ms(1.0)];
            for (device, parts) in [&node.primary_parts, &node.engine_parts].into_iter().enumerate() {
                let Some(whole_ms) = wholes[device] else { continue };
                for part in parts.iter().filter(|part| part.share < 0.999) {
                    took[device] += part.ms;
                    alone[device] += part.share * whole_ms;
                }
            }
        }
        let factor = |device: usize| if alone[device] > 0.0 { (took[device] / alone[device]).max(1.0) } else { 1.0 };
        Slowdowns {
            primary: short(self.slowdown.primary),
            engines: short(self.slowdown.engines),
            split_primary: short(factor(0)),
            split_engines: short(factor(1)),
            basis: Basis::Fitted,
        }
    }
}

/// What belongs to a selection, which short prompts do not need.
fn can_be_assumed(node: &Node) -> bool {
    let is_narrow = matches!(node.op, Op::Linear { .. }) && Projection::of(node).is_none();
    is_narrow || matches!(node.op, Op::IndexTopk { .. })
}

/// All of an operation on the engine; none unless all its nodes were observed there.
fn engine_ms(nodes: &[&ObservedNode]) -> Option<f64> {
    nodes.iter().map(|node| node.engine_part_ms(1.0)).sum()
}

/// An operation whose time depends on the rows alone: a line through whole tiles and what is narrower.
fn steady(samples: &[Sample], tile: f64) -> Cost {
    let mean = |of: &dyn Fn(&&Sample) -> bool| {
        let (ms, part) = samples.iter().filter(of).fold((0.0, 0.0), |sum, s| (sum.0 + s.ms, sum.1 + s.part));
        (part > 0.0).then(|| ms / part)
    };
    let Some(whole_ms) = mean(&|sample| sample.rows == tile) else { return Cost::default() };
    let narrow = samples.iter().find(|sample| sample.rows < tile);
    let call_ms = narrow.map_or(0.0, |Sample { rows, ms, part, .. }| {
        ((ms / part * tile - whole_ms * rows) / (tile - rows)).clamp(0.0, whole_ms)
    });
    Cost { tile_ms: whole_ms - call_ms, call_ms, tflops: None }
}

/// An operation that also grows with the visible rows: least squares, neither of both negative.
fn growing(samples: &[Sample], tile: f64) -> Cost {
    let sum = |term: &dyn Fn(&Sample) -> f64| samples.iter().map(term).sum::<f64>();
    let rows = |sample: &Sample| sample.rows / tile * sample.part;
    let (aa, bb) = (sum(&|s| rows(s).powi(2)), sum(&|s| s.seen_ms.powi(2)));
    let (ab, ay, by) = (sum(&|s| rows(s) * s.seen_ms), sum(&|s| rows(s) * s.ms), sum(&|s| s.seen_ms * s.ms));
    let determinant = aa * bb - ab * ab;
    let (tile_ms, factor) = match determinant > 1e-9 * aa * bb {
        true => ((ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant),
        false => (ay / aa, 0.0),
    };
    let (tile_ms, factor) = match (tile_ms < 0.0, factor < 0.0) {
        (true, _) => (0.0, by / bb),
        (_, true) => (ay / aa, 0.0),
        _ => (tile_ms, factor),
    };
    Cost { tile_ms, call_ms: 0.0, tflops: (factor > 0.0).then(|| 1.0 / factor) }
}

fn graph(emitter: &Emitter, rows: usize, select: bool, logit_rows: usize) -> StepGraph {
    let class = NumericClass::Fast;
    emitter.trunk(&StepSignature { rows, logit_rows, select, class, draft_context: false, debug_blocks: None })
}

/// Four digits: more than any time is worth.
fn short(number: f64) -> f64 {
    format!("{number:.3e}").parse().expect("it was a number")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use troika_testkit::repo_root;

    use super::*;
    use crate::faults::Faults;
    use crate::machine::known_config;
    use crate::observed::Replay;
    use crate::plan::{Built, Shapes, build, pack_shapes};
    use crate::{Arm, Machine, Run};

    const MIXTURE: &str = "shared, wo_a whole, wq_b .25, wo_b .75";

    /// What engines did in the runs of `troika bench cross-check`, by its name there.
    fn placements(engines: &str) -> BTreeMap<Projection, Placement> {
        use Projection::{Compressor, Query, Shared, Wkv, WoA, WoB, WqA};
        let split = |engines| Placement::Split { engines, cpu: 0.0 };
        let of_all = |placement| [Query, WoA, WoB, WqA, Wkv, Compressor].map(|projection| (projection, placement));
        let mut place: BTreeMap<_, _> = match engines {
            "all whole" => of_all(Placement::Whole).into(),
            "halves" => of_all(split(0.5)).into(),
            MIXTURE => [(WoA, Placement::Whole), (Query, split(0.25)), (WoB, split(0.75))].into(),
            other => panic!("{other} is no placement of the cross-check"),
        };
        place.insert(Shared, Placement::Whole);
        place
    }

    /// A record of this machine: what was observed, and runs with engines as placed, tokens, wavefront and milliseconds.
    fn record(model: &str) -> (Observed, Vec<(String, usize, usize, f64)>) {
        let path = repo_root().join(format!("profiles/epyc-2vcpu/{model}.json"));
        let text = std::fs::read_to_string(path).expect("it comes along");
        let record: serde_json::Value = serde_json::from_str(&text).expect("a record");
        let observed = serde_json::from_value(record["observed"].clone()).expect("an observation");
        let number = |run: &serde_json::Value, key: &str| run[key].as_f64().expect("a number");
        let runs = record["measured"].as_array().expect("runs").iter().map(|run| {
            let engines = run["engines"].as_str().expect("a name").to_owned();
            (engines, number(run, "tokens") as usize, number(run, "wavefront") as usize, number(run, "ms"))
        });
        (observed, runs.collect())
    }

    fn about() -> About {
        let limits = Limits {
            min_tile: 64,
            tile_multiple: 1,
            channel_alignment: 8,
            input_alignment: 32,
            bank_bytes: u64::MAX,
            instances: 1,
            repeatable: true,
        };
        let unknown = || "unknown".to_owned();
        let origin = Origin { date: unknown(), machine: unknown(), build: unknown(), model_digest: unknown() };
        About {
            name: "here".to_owned(),
            title: unknown(),
            origin,
            primary: "cpu".to_owned(),
            engine: "soft".to_owned(),
            limits,
        }
    }

    /// `[by nodes, by the profile]`, relative to what was measured, of every run of a record.
    fn errors(model: &str) -> Vec<[f64; 2]> {
        let (observed, runs) = record(model);
        let config = known_config(model).expect("known");
        let facts = ModelFacts::expected(&config);
        let profile = observed.profile(&config, &facts, about()).expect("it was observed");
        let machine = Machine::new(profile.clone(), model, model).expect("known");
        let observed = Arc::new(observed);
        let tile = observed.tile;
        let whole = graph(&Emitter::new(config.clone(), facts.clone()), tile, true, 0);
        let source = Shapes::of(&whole, Formats::Official);
        let errors = runs.into_iter().map(|(engines, tokens, wavefront, ms)| {
            let plan = PlanSpec { tail_threshold: Some(0), place: placements(&engines), ..PlanSpec::primary(tile) };
            let none = Faults::default();
            let Built { plan: cut, left_out } =
                build(&whole, &plan, 0, &profile, &source, &none, false, &mut pack_shapes());
            assert_eq!(left_out, []);
            let replay = Replay { config: &config, facts: &facts, plan: &cut, tokens, wavefront };
            let by_nodes = replay.predict(&observed).expect("it was observed");
            // The last token of a prompt belongs to decode.
            let run = Run::new(tokens + 1, Arm::Hybrid, plan);
            let by_profile =
                machine.prefill(&Run { step: tile, honour_step: true, wavefront, ..run }).expect("it runs");
            assert_eq!((by_profile.planned, &*by_profile.verdict), (by_profile.dispatched, "engaged"));
            let errors = [by_nodes, by_profile.prefill_ms].map(|ms_of| ms_of.predicted() / ms - 1.0);
            println!("{model}, {engines}, {tokens} tokens, {wavefront} in flight: {errors:.3?}");
            errors
        });
        errors.collect()
    }

    /// Averages over layers, and one factor for all parts side by side, cost no more than the schedule itself: predictions by the
    /// profile are as near to what was measured as those by the nodes.
    #[test]
    fn a_profile_predicts_this_machine_as_its_nodes_do() {
        let all: Vec<[f64; 2]> = ["nano", "mini", "flash-slice"].into_iter().flat_map(errors).collect();
        let sorted = |of: &dyn Fn(&[f64; 2]) -> f64| {
            let mut values: Vec<f64> = all.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        // All but the greatest: one run has two outcomes (docs/simulator.md).
        let last = all.len() - 2;
        let apart = sorted(&|[by_nodes, by_profile]| (by_profile - by_nodes).abs());
        assert!(apart[last] < 0.03, "{apart:.3?}");
        let off = sorted(&|[_, by_profile]| by_profile.abs());
        assert!(off[off.len() / 2] < 0.05 && off[last] < 0.12, "{off:.3?}");
    }

    #[test]
    fn a_profile_says_where_each_number_comes_from() {
        let (observed, _) = record("flash-slice");
        let config = known_config("flash-slice").expect("known");
        let profile = observed.profile(&config, &ModelFacts::expected(&config), about()).expect("it was observed");
        let text = profile.to_toml("Of a run.").expect("numbers");
        assert!(text.starts_with("# Of a run.\nname = \"here\"\n"), "{text}");
        assert_eq!(Profile::parse(&text, "here").expect("it was written"), profile);
        // No prompt of 320 tokens chooses among its rows.
        assert_eq!(profile.basis("index_topk"), Some(Basis::Assumed));
        assert_eq!(profile.basis("attend"), Some(Basis::Fitted));
        assert_eq!(profile.basis("experts"), Some(Basis::Measured));
        assert_eq!(profile.slowdown.map(|slowdown| slowdown.basis), Some(Basis::Fitted));
        // Steps choose only where there is a choice, of more than 512 rows of four tokens each.
        let machine = Machine::new(profile.clone(), "flash-slice", "flash-slice").expect("known");
        let chooses = |prompt: usize| {
            let run = Run::new(prompt, Arm::Matched, PlanSpec::primary(128));
            let prediction = machine.prefill(&Run { step: 128, honour_step: true, ..run }).expect("it runs");
            prediction.operations.iter().any(|row| row.operation == "index_topk")
        };
        assert_eq!([1025, 2049, 2177].map(chooses), [false, false, true]);
        let none = Observed { nodes: Vec::new(), ..observed };
        let error = none.profile(&config, &ModelFacts::expected(&config), about()).expect_err("nothing was observed");
        assert_eq!(error.to_string(), "profile what was observed of flash-slice has no price of embed");
        // What engines were never given goes to the primary device.
        let plan = profile.plan.expect("it has one");
        assert_eq!(plan.of(Projection::IndexerCompressor), Placement::Off);
        assert_eq!(plan.of(Projection::Query), Placement::Whole);
    }

    /// Nobody has touched them by hand.
    #[test]
    fn the_profiles_of_this_machine_are_those_of_its_records() {
        for (name, model) in [("epyc-2vcpu", "flash-slice"), ("epyc-2vcpu-nano", "nano")] {
            let config = known_config(model).expect("known");
            let written = record(model).0.profile(&config, &ModelFacts::expected(&config), about());
            let written = written.expect("it was observed");
            let Profile { title, origin, primary, engines, .. } = Profile::named(name).expect("it comes along");
            let name = name.to_owned();
            let known = Profile { name: name.clone(), title, origin, primary, engines, ..written };
            assert_eq!(Profile::named(&name).expect("it comes along"), known, "write {name}.toml anew from its record");
        }
    }

    #[test]
    fn times_become_costs() {
        let sample = |rows, ms, part, seen_ms| Sample { rows, ms, part, seen_ms };
        // 2 ms a step and 6 ms a tile, half of it missing in the first.
        let cost =
            steady(&[sample(64.0, 4.0, 0.5, 0.0), sample(64.0, 8.0, 1.0, 0.0), sample(32.0, 5.0, 1.0, 0.0)], 64.0);
        assert_eq!((cost.tile_ms, cost.call_ms, cost.tflops), (6.0, 2.0, None));
        // 3 ms a tile, and visible rows at 2 TFLOP/s.
        let cost =
            growing(&[sample(64.0, 3.5, 1.0, 1.0), sample(64.0, 5.0, 1.0, 4.0), sample(32.0, 3.0, 1.0, 3.0)], 64.0);
        assert!((cost.tile_ms - 3.0).abs() < 1e-9 && (cost.tflops.expect("it grows") - 2.0).abs() < 1e-9, "{cost:?}");
        // It does not grow.
        let cost = growing(&[sample(64.0, 3.0, 1.0, 1.0), sample(64.0, 2.0, 1.0, 4.0)], 64.0);
        assert_eq!((cost.tile_ms, cost.tflops), (2.5, None));
    }
}
