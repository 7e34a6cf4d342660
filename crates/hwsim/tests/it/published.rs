//! Section 12.1 of the hybrid spec, within 1 % where its numbers allow it. The tables are in docs/simulator.md.

use troika_hwsim::{Arm, Machine, Placement, PlanSpec, Prediction, Profile, Projection, Run};

fn machine(checkpoint: &str) -> Machine {
    let profile = Profile::named("m3-ultra-512").expect("it comes along");
    Machine::new(profile, "v4-flash-0731", checkpoint).expect("known")
}

fn published() -> PlanSpec {
    PlanSpec::named("published-2026-08").expect("known")
}

fn simulate(machine: &Machine, run: &Run) -> Prediction {
    let prediction = machine.prefill(run).expect("it runs");
    assert_eq!(prediction.planned, prediction.dispatched, "a healthy machine does what is planned");
    prediction
}

#[track_caller]
fn assert_near(got: &Prediction, want: f64, percent: f64, what: &str) {
    let got = got.prefill_tps.predicted();
    let off = (got / want - 1.0) * 100.0;
    assert!(off.abs() < percent, "{what}: predicted {got:.1} tok/s, published {want}: {off:+.2} %");
    println!("{what}: predicted {got:.1}, published {want}: {off:+.2} %");
}

const LENGTHS: [usize; 3] = [4097, 16385, 32769];

#[test]
fn acceptance_19_three_arms_at_three_lengths() {
    let machine = machine("fp8");
    let with_cpu = published().with(Projection::Query, Placement::Split { engines: 0.5, cpu: 0.125 });
    let rows = [
        (Arm::Stock, published(), [638.7, 615.2, 597.5]),
        (Arm::Matched, published(), [647.3, 628.8, 610.3]),
        (Arm::Hybrid, published(), [644.3, 629.5, 610.1]),
        (Arm::Hybrid, with_cpu, [643.3, 627.3, 607.7]),
    ];
    for (arm, plan, rates) in rows {
        for (prompt, want) in LENGTHS.into_iter().zip(rates) {
            let got = simulate(&machine, &Run::new(prompt, arm, plan.clone()));
            assert_near(&got, want, 1.0, &format!("{arm:?}, {prompt} tokens"));
            // Four kinds in 43 layers, and the inputs of the two layers whose stacks are stored alike.
            let tiles = (prompt - 1) as u64 / 4096;
            let planned = if arm == Arm::Hybrid { tiles * (4 * 43 + 2) } else { 0 };
            assert_eq!(got.planned, planned, "{arm:?}, {prompt} tokens");
            let step = if arm == Arm::Stock { 2048 } else { 4096 };
            assert_eq!(got.widths.keys().copied().collect::<Vec<_>>(), [step]);
        }
    }
}

#[test]
fn acceptance_19_wo_a_and_down_switched_off() {
    let plan = published().with(Projection::WoA, Placement::Off).with(Projection::MlpDown, Placement::Off);
    assert_near(&simulate(&machine("fp8"), &Run::new(16385, Arm::Hybrid, plan)), 648.2, 1.0, "wo_a and down off");
}

/// Steps narrower than the tile: compiled, ready, and nothing ever runs.
#[test]
fn acceptance_19_a_step_below_the_tile_is_a_no_op() {
    let machine = machine("fp8");
    let run = |arm| Run { honour_step: true, ..Run::new(16384, arm, published()) };
    let (stock, hybrid) = (simulate(&machine, &run(Arm::Stock)), simulate(&machine, &run(Arm::Hybrid)));
    assert_eq!((hybrid.planned, hybrid.dispatched), (0, 0));
    assert_eq!(hybrid.verdict, "idle(step_limit)");
    let gain = hybrid.prefill_tps.predicted() / stock.prefill_tps.predicted() - 1.0;
    assert!(gain.abs() < 1e-6, "{:+.4} %", gain * 100.0);
    assert_near(&hybrid, 614.3, 1.0, "published as not engaged");
}

/// Two-arm runs of another plan and natural lengths: rows without engines were fitted, and for oQ2.5e the first with them. The
/// others are predictions, and what they are off by is known: fp8 gained less than the three-arm runs let one expect.
#[test]
fn two_arm_rows_as_far_as_their_data_allow() {
    let mut plan = published().with(Projection::Query, Placement::Split { engines: 0.5, cpu: 0.125 });
    for off in [Projection::WoA, Projection::MlpDown, Projection::AttentionInput, Projection::AttentionInputSparse] {
        plan = plan.with(off, Placement::Off);
    }
    let rows = [
        ("fp8", Arm::Stock, [612.9, 595.0], 1.0),
        ("fp8", Arm::Hybrid, [631.0, 616.8], 2.0),
        ("fp8-mtp", Arm::Stock, [595.3, 578.0], 1.0),
        ("fp8-mtp", Arm::Hybrid, [615.6, 596.7], 1.5),
        ("oq2.5e", Arm::Stock, [598.7, 581.9], 1.0),
        ("oq2.5e", Arm::Hybrid, [637.3, 625.3], 1.0),
    ];
    for (checkpoint, arm, rates, percent) in rows {
        let machine = machine(checkpoint);
        for (prompt, want) in [16384, 32768].into_iter().zip(rates) {
            let got = simulate(&machine, &Run::new(prompt, arm, plan.clone()));
            assert_near(&got, want, percent, &format!("{checkpoint}, {arm:?}, {prompt} tokens"));
        }
    }
}

/// Everything but the four kinds, per layer and tile: 113.2 + 0.62 ms per 1,000 tokens of mean context.
#[test]
fn the_decomposition_adds_up() {
    let machine = machine("fp8");
    for (prompt, want) in LENGTHS.into_iter().zip([114.5, 118.3, 123.4]) {
        let prediction = simulate(&machine, &Run::new(prompt, Arm::Matched, published()));
        let four = [Projection::Query, Projection::WoA, Projection::Mlp, Projection::MlpDown, Projection::Shared];
        let is_other = |name: &str| four.iter().all(|projection| projection.name() != name);
        let others = prediction.operations.iter().filter(|row| is_other(row.operation));
        let ms: f64 = others.map(|row| row.primary_ms.predicted()).sum();
        let per_layer = ms / 43.0 / ((prompt - 1) / 4096) as f64;
        assert!((per_layer - want).abs() < 0.8, "{prompt} tokens: {per_layer:.2} ms instead of {want}");
    }
}

/// Section 12.4: the primary device was fitted (a line, where the numbers are none), the engines' gain was not. At 4K it is far
/// above what was seen, so that something there is not in the numbers.
#[test]
fn the_second_profile_as_far_as_its_data_allow() {
    let profile = Profile::named("m3-ultra-27b").expect("it comes along");
    let machine = Machine::new(profile, "qwen3.5-27b-chain", "oq4e").expect("known");
    let plan = PlanSpec::named("published-27b").expect("known");
    assert_eq!(machine.profile().plan.as_ref(), Some(&plan));
    for (prompt, alone, with_engines) in [(4096, 445.2, None), (16384, 439.1, Some(517.0)), (32768, 408.9, Some(486.0))]
    {
        let run = |arm| Run::new(prompt, arm, plan.clone());
        assert_near(&simulate(&machine, &run(Arm::Matched)), alone, 2.5, &format!("27B alone, {prompt} tokens"));
        if let Some(want) = with_engines {
            assert_near(&simulate(&machine, &run(Arm::Hybrid)), want, 3.0, &format!("27B, {prompt} tokens"));
        }
    }
}
