//! Faults on demand: what happens, what is said of it, and that it is the same each time.

use troika_hwsim::{Arm, Faults, Machine, Placement, PlanSpec, Prediction, Profile, Projection, Run};

fn machine() -> Machine {
    let profile = Profile::named("m3-ultra-512").expect("it comes along");
    Machine::new(profile, "v4-flash-0731", "fp8").expect("known")
}

/// Two tiles with query split and the shared expert whole.
fn run(faults: Faults) -> Run {
    let plan = PlanSpec::primary(4096)
        .with(Projection::Query, Placement::Split { engines: 0.5, cpu: 0.125 })
        .with(Projection::Shared, Placement::Whole);
    Run { faults, ..Run::new(8193, Arm::Hybrid, plan) }
}

fn simulate(faults: Faults) -> Prediction {
    machine().prefill(&run(faults)).expect("it runs")
}

fn ms(prediction: &Prediction) -> f64 {
    prediction.prefill_ms.predicted()
}

#[test]
fn a_compiler_that_refuses_large_procedures() {
    // A quarter of wq_b has 8.4 MB, the shared expert 25.
    let got = simulate(Faults { compile_limit_bytes: Some(20_000_000), ..Faults::default() });
    assert_eq!((got.planned, got.dispatched), (2 * 43, 2 * 43), "query alone");
    let [left] = &got.left_out[..] else { panic!("{:?}", got.left_out) };
    assert_eq!((left.projection, left.layers), (Projection::Shared, 43));
    assert!(left.reason.starts_with("compile: 25") && left.reason.ends_with("more than 20000000"), "{}", left.reason);
}

#[test]
fn banks_that_do_not_hold_everything() {
    let got = simulate(Faults { bank_limit_bytes: Some(500_000_000), ..Faults::default() });
    assert!(got.planned > 0 && got.planned < 4 * 43 && got.dispatched == got.planned, "{}", got.planned);
    assert!(got.left_out.iter().all(|left| left.reason.starts_with("bank_budget")), "{:?}", got.left_out);
}

#[test]
fn engines_that_load_nothing_leave_the_primary_device_as_it_is() {
    let got = simulate(Faults { load_error: Some(-7), ..Faults::default() });
    assert_eq!((got.planned, got.verdict.as_str()), (0, "unavailable(load: code -7)"));
    let matched = machine().prefill(&Run { arm: Arm::Matched, ..run(Faults::default()) }).expect("it runs");
    assert_eq!(ms(&got), ms(&matched));
}

#[test]
fn a_submission_that_fails_latches_its_projection() {
    let healthy = simulate(Faults::default());
    assert_eq!((healthy.planned, healthy.dispatched), (4 * 43, 4 * 43));
    // The first submission is of the first layer's query: in the second tile the primary device does all of it.
    let got = simulate(Faults { failing_dispatch: Some(0), ..Faults::default() });
    assert_eq!((got.planned, got.dispatched), (4 * 43, 4 * 43 - 1));
    assert!(ms(&got) > ms(&healthy), "{} and {}", ms(&got), ms(&healthy));
}

#[test]
fn a_slow_instance_is_waited_for() {
    let healthy = simulate(Faults::default());
    let got = simulate(Faults { slow_instance: Some((1, 3.0)), ..Faults::default() });
    let [_, fast, slow, _] = &got.devices[..] else { panic!("{:?}", got.devices) };
    assert!(slow.busy_ms.predicted() > 2.9 * fast.busy_ms.predicted());
    assert!(ms(&got) > ms(&healthy) * 1.02, "{} and {}", ms(&got), ms(&healthy));
}

#[test]
fn without_the_cpus_symbol_its_channels_are_the_primary_devices() {
    let got = simulate(Faults { missing_cpu_symbol: true, ..Faults::default() });
    let [left] = &got.left_out[..] else { panic!("{:?}", got.left_out) };
    assert_eq!((left.projection, left.layers), (Projection::Query, 43));
    assert!(left.reason.starts_with("missing_symbol"), "{}", left.reason);
    let mut without = run(Faults::default());
    without.plan.place.insert(Projection::Query, Placement::Split { engines: 0.5, cpu: 0.0 });
    assert_eq!(ms(&got), ms(&machine().prefill(&without).expect("it runs")));
}

#[test]
fn jitter_is_the_same_for_the_same_seed() {
    let jittered = |seed| ms(&simulate(Faults { jitter: 0.05, seed, ..Faults::default() }));
    assert_eq!(jittered(1), jittered(1));
    assert_ne!(jittered(1), jittered(2));
    let healthy = ms(&simulate(Faults::default()));
    assert!((jittered(1) / healthy - 1.0).abs() < 0.05);
}

#[test]
fn nothing_that_makes_no_sense_is_simulated() {
    let refused = |faults| machine().prefill(&run(faults)).expect_err("refused").to_string();
    assert!(refused(Faults { slow_instance: Some((2, 2.0)), ..Faults::default() }).contains("instance 2"));
    assert!(refused(Faults { jitter: 1.0, ..Faults::default() }).contains("not by 1"));
    assert!(refused(Faults { corrupt: true, ..Faults::default() }).contains("no weights"));
}
