//! Section 12.1 of the hybrid spec, within 1 %. (Acceptance test 19.)

use troika_hwsim::{Arm, Machine, Placement, PlanSpec, Prediction, Profile, Projection, Run};

fn machine() -> Machine {
    let profile = Profile::named("m3-ultra-512").expect("it comes along");
    Machine::new(profile, "v4-flash-0731", "fp8").expect("known")
}

fn plan(name: &str) -> PlanSpec {
    PlanSpec::named(name).expect("known")
}

fn simulate(machine: &Machine, run: &Run) -> Prediction {
    machine.prefill(run).expect("it runs")
}

#[track_caller]
fn assert_near(got: &Prediction, want: f64, what: &str) {
    let got = got.prefill_tps.predicted();
    assert!((got / want - 1.0).abs() < 0.01, "{what}: {got:.1} tok/s, published {want}");
    println!("{what}: {got:.1} {want} {:+.2} %", (got / want - 1.0) * 100.0);
}

#[test]
fn acceptance_19_the_three_arms() {
    let machine = machine();
    let published = plan("published-2026-08");
    let split = |engines, cpu| Placement::Split { engines, cpu };
    let with_cpu = published.clone().with(Projection::Query, split(0.5, 0.125));
    let lengths = [4097, 16385, 32769];
    let rows = [
        (Arm::Stock, &published, [638.7, 615.2, 597.5]),
        (Arm::Matched, &published, [647.3, 628.8, 610.3]),
        (Arm::Hybrid, &published, [644.3, 629.5, 610.1]),
        (Arm::Hybrid, &with_cpu, [643.3, 627.3, 607.7]),
    ];
    for (arm, plan, rates) in rows {
        for (prompt, want) in lengths.into_iter().zip(rates) {
            let got = simulate(&machine, &Run::new(prompt, arm, plan.clone()));
            assert_near(&got, want, &format!("{arm:?} {prompt}"));
            assert_eq!(got.planned, got.dispatched);
            assert_eq!(got.planned > 0, arm == Arm::Hybrid);
        }
    }
}
