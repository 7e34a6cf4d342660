//! Emitted graphs: costs against section 12 of the model spec, shape of the step, memory known ahead.

use troika_base::{NumericClass, SequenceId};
use troika_graph::cost::{Costs, costs};
use troika_graph::{Acceptance, Kind, Op, Segment, StepGraph};
use troika_model::emit::official_bytes;
use troika_model::{Emitter, ModelConfig, ModelFacts, StepSignature};
use troika_testkit::repo_root;

fn emitter(name: &str) -> Emitter {
    let path = repo_root().join("models/configs").join(format!("{name}.json"));
    let config = ModelConfig::read(&path).expect("the configuration is sound");
    let facts = ModelFacts::expected(&config);
    Emitter::new(config, facts)
}

fn trunk(emitter: &Emitter, rows: usize, position: usize) -> StepGraph {
    emitter.trunk(&StepSignature {
        rows,
        logit_rows: 1,
        select: emitter.needs_selection(position + rows),
        class: NumericClass::Exact,
        draft_context: false,
        debug_blocks: None,
    })
}

fn cost(graph: &StepGraph, rows: usize, position: usize) -> Costs {
    let segment = Segment { sequence: SequenceId(0), row: 0, rows, position, acceptance: Acceptance::Whole };
    costs(graph, &[segment], &official_bytes)
}

/// The stacks of section 4.5 of the hybrid spec: the same work in fewer operations.
#[test]
fn inputs_of_v4_flash_are_stacked_as_the_spec_says() {
    const ROWS: usize = 512;
    let plain = trunk(&emitter("deepseek-v4-flash"), ROWS, 4096);
    let stacked = trunk(&emitter("deepseek-v4-flash").stacking_inputs(true), ROWS, 4096);
    let widths = stacked.nodes().iter().filter(|node| node.kind == Kind::AttentionInput).map(|node| {
        let Op::Linear { weights } = &node.op else { panic!("{:?}", node.op) };
        assert_eq!(weights.len(), node.outputs.len());
        weights.iter().map(|weight| weight.rows).sum::<usize>()
    });
    let mut counts = std::collections::BTreeMap::<usize, usize>::new();
    widths.for_each(|width| *counts.entry(width).or_default() += 1);
    assert_eq!(counts.into_iter().collect::<Vec<_>>(), [(1536, 2), (2560, 20), (4160, 21)]);
    // Of two, three and five products there is one.
    assert_eq!(plain.nodes().len() - stacked.nodes().len(), 2 + 2 * 20 + 4 * 21);
    let flops = |graph: &StepGraph| cost(graph, ROWS, 4096).total.flops;
    assert!((flops(&plain) - flops(&stacked)).abs() < 1e-6 * flops(&plain));
    assert_eq!(plain.taps().len(), stacked.taps().len());
}

/// The cost table of V4-Flash: GFLOP per token over all layers, and MB of weights over all layers.
#[test]
fn costs_of_v4_flash_agree_with_the_spec() {
    const ROWS: usize = 4096;
    let graph = trunk(&emitter("deepseek-v4-flash"), ROWS, 0);
    let costs = cost(&graph, ROWS, 0);
    let gflop = |kind: Kind| costs.by_kind[&kind].flops / 1e9 / ROWS as f64;
    let megabytes = |kind: Kind| costs.by_kind[&kind].weight_bytes / 1e6;
    let table = [
        (Kind::WqA, 0.361, 43.0 * 4.19),
        (Kind::WqB, 2.885, 43.0 * 33.56),
        (Kind::Wkv, 0.180, 43.0 * 2.10),
        (Kind::WoA, 2.885, 43.0 * 33.56),
        (Kind::WoB, 2.885, 43.0 * 33.56),
        (Kind::CsaCompressor, 0.352, 21.0 * 16.78),
        (Kind::HcaCompressor, 0.168, 20.0 * 8.39),
        (Kind::IndexerWqB, 0.352, 21.0 * 8.39),
        (Kind::IndexerCompressor, 0.088, 21.0 * 4.19),
        (Kind::IndexerWeights, 0.011, 21.0 * 0.52),
        (Kind::Gate, 0.090, 43.0 * 2.10),
        (Kind::SharedExpert, 2.164, 43.0 * 25.17),
        (Kind::RoutedExperts, 12.986, 43.0 * 256.0 * 13.37),
        (Kind::HyperConnection, 0.068, 43.0 * 3.15),
    ];
    let mut linear = 0.0;
    for (kind, want_gflop, want_mb) in table {
        // The spec prints three decimals; its products of rounded sizes are within 2 % of ours.
        assert!((gflop(kind) - want_gflop).abs() < 1e-3, "{}: {} GFLOP per token", kind.name(), gflop(kind));
        let (got, bias_and_tables) = (megabytes(kind), if kind == Kind::Gate { 19.0 } else { 3.0 });
        assert!((got - want_mb).abs() < want_mb * 0.02 + bias_and_tables, "{}: {got} MB, not {want_mb}", kind.name());
        linear += gflop(kind);
    }
    assert!((linear - 25.5).abs() < 0.05, "linear total {linear} GFLOP per token");
    let total: f64 = costs.by_kind.values().map(|cost| cost.flops).sum();
    assert!((total - costs.total.flops).abs() < total * 1e-12, "the total is the sum of its kinds");
    let head = costs.by_kind[&Kind::Head].flops / 1e9;
    assert!((head - 1.059).abs() < 1e-3, "head of the last token only: {head} GFLOP");
}

/// At the last token of a context: attention core and index scores, GFLOP.
#[test]
fn attention_costs_grow_as_the_spec_says() {
    let emitter = emitter("deepseek-v4-flash");
    for (context, core, scores) in
        [(4096, 2.2, 0.35), (32_768, 2.8, 2.8), (131_072, 4.8, 11.3), (1_048_576, 23.6, 90.2)]
    {
        let costs = cost(&trunk(&emitter, 1, context - 1), 1, context - 1);
        let gflop = |kind: Kind| costs.by_kind[&kind].flops / 1e9;
        assert!((gflop(Kind::Attention) - core).abs() < 0.06, "{context}: core {}", gflop(Kind::Attention));
        assert!((gflop(Kind::IndexScores) - scores).abs() < 0.06, "{context}: scores {}", gflop(Kind::IndexScores));
    }
}

#[test]
fn a_step_is_about_a_thousand_coarse_nodes() {
    for (name, layers) in [("deepseek-v4-flash", 43), ("deepseek-v4-pro", 61)] {
        let graph = trunk(&emitter(name), 4096, 0);
        let count = |wanted: fn(&Op) -> bool| graph.nodes().iter().filter(|node| wanted(&node.op)).count();
        assert!((25 * layers..40 * layers).contains(&graph.nodes().len()), "{name}: {} nodes", graph.nodes().len());
        assert_eq!(count(|op| matches!(op, Op::Experts { .. })), 8 * layers, "routed experts are several nodes");
        assert_eq!(count(|op| matches!(op, Op::SharedExpert { .. })), layers, "the shared expert is one");
        assert_eq!(count(|op| matches!(op, Op::Attend { .. })), layers);
        let decode = trunk(&emitter(name), 1, 4096);
        assert!(decode.nodes().len() < graph.nodes().len());
    }
}

/// While every visible row is kept anyway, scores are skipped, but the indexer's compressor runs: later queries need its rows.
#[test]
fn the_indexer_scores_only_where_there_is_a_choice() {
    let emitter = emitter("deepseek-v4-flash");
    for (context, scores) in [(2048, 0), (2051, 0), (2052, 21)] {
        let graph = trunk(&emitter, 1, context - 1);
        let count = |kind: Kind| graph.nodes().iter().filter(|node| node.kind == kind).count();
        assert_eq!(count(Kind::IndexScores), scores, "{context} tokens");
        assert_eq!(count(Kind::IndexerCompressor), 42, "{context} tokens: a product and a compression per layer");
    }
}

#[test]
fn memory_of_a_step_is_known_and_grows_with_its_rows() {
    let emitter = emitter("deepseek-v4-flash");
    let peak = |rows| trunk(&emitter, rows, 0).memory().peak_bytes();
    // Streams, queries and attention output alone are 16,384 + 2 x 32,768 floats per token.
    assert!((4096 * 81_920 * 4..4096 * 81_920 * 4 * 2).contains(&peak(4096)), "{}", peak(4096));
    assert!(peak(512) < peak(1024) && peak(1024) < peak(4096));
}

#[test]
fn the_drafter_is_emitted_without_weights_too() {
    let graph = emitter("deepseek-v4-flash").draft(NumericClass::Exact, 1, false);
    let count = |wanted: fn(&Op) -> bool| graph.nodes().iter().filter(|node| wanted(&node.op)).count();
    assert_eq!(count(|op| matches!(op, Op::Attend { .. })), 3, "three stages");
    assert_eq!(count(|op| matches!(op, Op::MarkovDraft { .. })), 1);
    assert_eq!(count(|op| matches!(op, Op::AppendWindow)), 0, "a block leaves no state");
}
