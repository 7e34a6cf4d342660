//! Procedures through ONNX Runtime: its CPU provider checks our graphs, Qualcomm's compiler and emulator that a real engine's
//! fixed-shape compiler takes them. `cargo xtask ort` installs both and runs these tests.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use troika_base::{Format, SharedBytes, StoredTensor};
use troika_device::Output;
use troika_device::npu::ort::{Form, Ort, OrtOptions, Provider};
use troika_device::npu::{Bank, Body, ChannelWeights, NpuBackend, NpuError, Procedure, ProcedureId, Product, Program};
use troika_kernels::Ctx;

const TILE: usize = 32;

fn options(provider: Provider) -> OrtOptions {
    let place =
        std::env::var_os("TROIKA_TEST_ORT").expect("TROIKA_TEST_ORT names a Python environment with onnxruntime");
    OrtOptions { places: vec![PathBuf::from(place)], provider, ..OrtOptions::default() }
}

/// Roughly normal numbers.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| next() + next() + next() + next()).collect()
}

fn weights(seed: u64, rows: usize, cols: usize) -> Arc<ChannelWeights> {
    let bytes: Vec<u8> = noise(seed, rows * cols).iter().flat_map(|x| (x * 0.1).to_le_bytes()).collect();
    let parts = [SharedBytes::new(bytes), SharedBytes::empty(), SharedBytes::empty()];
    let tensor = StoredTensor::new(Format::F32, rows, cols, parts).expect("the parts fit");
    Arc::new(ChannelWeights::pack_channels(Ctx::serial(), &tensor))
}

fn procedure(id: u32, body: Body) -> Arc<Procedure> {
    Arc::new(Procedure { id: ProcedureId(id), name: format!("procedure {id}"), tile: TILE, body })
}

fn product(seed: u64, rows: usize, cols: usize, channels: Range<usize>) -> Product {
    Product { weights: weights(seed, rows, cols), channels }
}

/// A product of all channels, a stack of which some are cut, groups, and an expert with and without a limit.
fn procedures() -> Vec<Arc<Procedure>> {
    let (w1, w2, w3) = (weights(6, 96, 64), weights(7, 64, 96), weights(8, 96, 64));
    let expert = |limit| Body::SharedExpert { w1: Arc::clone(&w1), w2: Arc::clone(&w2), w3: Arc::clone(&w3), limit };
    let bodies = [
        Body::Products { groups: 1, products: vec![product(1, 48, 128, 0..48)] },
        Body::Products { groups: 1, products: vec![product(2, 64, 96, 8..40), product(3, 24, 96, 0..24)] },
        Body::Products { groups: 4, products: vec![product(4, 4 * 16, 32, 0..16)] },
        Body::Products { groups: 2, products: vec![product(5, 2 * 32, 64, 16..32)] },
        expert(None),
        expert(Some(1.0)),
    ];
    bodies.into_iter().enumerate().map(|(id, body)| procedure(id as u32, body)).collect()
}

fn programs(engine: &dyn NpuBackend, procedures: &[Arc<Procedure>]) -> Vec<Program> {
    let compile = |procedure: &Arc<Procedure>| engine.compile(procedure).expect("it is compiled");
    procedures.iter().map(|procedure| (Arc::clone(procedure), Arc::new(compile(procedure)))).collect()
}

/// Runs a procedure whose outputs lie one after another, whole rows as such and parts of them in pieces.
fn run(bank: &mut dyn Bank, index: usize, procedure: &Procedure, x: &[f32]) -> Vec<f32> {
    let mut numbers = vec![f32::NAN; TILE * procedure.output_cols()];
    let mut rest = &mut numbers[..];
    let mut outputs = Vec::new();
    for place in procedure.outputs(&(0..TILE)) {
        let (own, left) = rest.split_at_mut(TILE * place.groups * place.channels.len());
        rest = left;
        outputs.push(match place.channels.len() == place.per_group {
            true => Output::Rows(own),
            false => Output::Pieces(own.chunks_exact_mut(place.channels.len()).collect()),
        });
    }
    bank.run(index, x, &mut outputs).expect("it runs");
    numbers
}

/// Norm of the difference over the norm of what it should be.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    let sum = |term: &dyn Fn(f64, f64) -> f64| -> f64 {
        got.iter().zip(want).map(|(a, b)| term(f64::from(*a), f64::from(*b))).sum()
    };
    (sum(&|a, b| (a - b) * (a - b)) / sum(&|_, b| b * b)).sqrt()
}

/// Rows of which some have a number that is far from the others, and one that is all zeros.
fn rows(procedure: &Procedure) -> Vec<f32> {
    let cols = procedure.input_cols();
    let mut x = noise(99, TILE * cols);
    x.chunks_exact_mut(cols).step_by(5).for_each(|row| row[3] = 60.0);
    x[cols..2 * cols].fill(0.0);
    x[2 * cols..3 * cols].iter_mut().for_each(|x| *x *= 1e-6);
    x[3 * cols..4 * cols].iter_mut().for_each(|x| *x *= 1e6);
    x
}

/// `x · wᵀ` of some output channels, with activations that are not rounded.
fn exact_product(weights: &ChannelWeights, outputs: Range<usize>, x: &[f32]) -> Vec<f32> {
    let (numbers, cols) = (weights.to_f32(), weights.cols());
    let dot = |w: &[f32]| w.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
    outputs.map(|output| dot(&numbers[output * cols..(output + 1) * cols])).collect()
}

/// The outputs of one row, one after another, without any rounding of activations.
fn exact(procedure: &Procedure, x: &[f32]) -> Vec<f32> {
    match &procedure.body {
        Body::Products { groups, products } => {
            let of_group = |product: &Product, group: usize| {
                let (cols, first) = (product.weights.cols(), group * (product.weights.rows() / groups));
                let outputs = first + product.channels.start..first + product.channels.end;
                exact_product(&product.weights, outputs, &x[group * cols..(group + 1) * cols])
            };
            products.iter().flat_map(|product| (0..*groups).flat_map(move |group| of_group(product, group))).collect()
        }
        Body::SharedExpert { w1, w2, w3, limit } => {
            let [gate, up] = [w1, w3].map(|w| exact_product(w, 0..w.rows(), x));
            let limit = limit.unwrap_or(f32::INFINITY);
            let activate = |(gate, up): (&f32, &f32)| {
                let gate = gate.min(limit);
                gate / (1.0 + (-gate).exp()) * up.clamp(-limit, limit)
            };
            let hidden: Vec<f32> = gate.iter().zip(&up).map(activate).collect();
            exact_product(w2, 0..w2.rows(), &hidden)
        }
    }
}

/// The outputs of one row, of numbers as [`run`] returns them.
fn row_of(procedure: &Procedure, numbers: &[f32], row: usize) -> Vec<f32> {
    let mut rest = numbers;
    let mut found = Vec::new();
    for place in procedure.outputs(&(0..1)) {
        let width = place.groups * place.channels.len();
        found.extend(&rest[row * width..(row + 1) * width]);
        rest = &rest[TILE * width..];
    }
    found
}

fn check(options: &OrtOptions, tolerance: f64) {
    let engine = Ort::start(options).expect("the engine starts");
    assert!(!engine.limits().repeatable);
    let procedures = procedures();
    let mut bank = engine.load(0, &programs(&engine, &procedures)).expect("the bank is loaded");
    // In an order of their own, some twice: surfaces are shared.
    for index in [3, 0, 5, 2, 4, 1, 0, 3] {
        let (procedure, name) = (&procedures[index], &procedures[index].name);
        let (x, cols) = (rows(procedure), procedure.input_cols());
        let got = run(&mut *bank, index, procedure, &x);
        let mut worst = 0.0f64;
        for (row, x) in x.chunks_exact(cols).enumerate() {
            let (got, want) = (row_of(procedure, &got, row), exact(procedure, x));
            match row {
                1 => assert!(got.iter().all(|x| *x == 0.0), "{name}: zeros stay zeros"),
                _ => {
                    let distance = distance(&got, &want);
                    worst = worst.max(distance);
                    assert!(distance <= tolerance, "{name}, row {row}: {distance:.2e} from the exact result");
                }
            }
        }
        println!("{}, {name}: at most {worst:.2e} from the exact result", options.provider);
        // What is not finite stays in its row and group.
        let mut damaged = x.clone();
        damaged[5 * cols] = f32::INFINITY;
        let other = run(&mut *bank, index, procedure, &damaged);
        let groups = if let Body::Products { groups, .. } = &procedure.body { *groups } else { 1 };
        let width = procedure.output_cols() / groups;
        assert_eq!(other.iter().filter(|x| x.is_nan()).count(), width, "{name}");
        let same = got.iter().zip(&other).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
        assert_eq!(same, got.len() - width, "{name}: all else is as before");
        // The bound of the probe at load, on numbers as it takes them.
        let x = noise(7, TILE * cols);
        let (got, want) = (run(&mut *bank, index, procedure, &x), procedure.compute_alone(&x));
        assert!(distance(&got, &want) <= 0.02, "{name}: {:.2e} from the CPU's own", distance(&got, &want));
    }
}

#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn the_cpu_provider_computes_our_graphs() {
    check(&options(Provider::Cpu), 1e-3);
    check(&OrtOptions { form: Some(Form::Float), ..options(Provider::Cpu) }, 1e-5);
}

#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn programs_of_the_cpu_provider_are_not_worth_keeping() {
    let engine = Ort::start(&options(Provider::Cpu)).expect("the engine starts");
    assert!(!engine.compiles_ahead());
    let compiled = engine.compile(&procedures()[0]).expect("it is compiled");
    assert_eq!((compiled.blob.len(), compiled.resident_bytes), (0, 4 * 48 * 128));
}

#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn the_htp_emulator_computes_our_graphs() {
    check(&options(Provider::Qnn), 0.02);
}

/// What was compiled once is loaded again by another engine, as after a restart, and gives the same numbers.
#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn programs_of_the_htp_are_kept_and_loaded() {
    let engine = Ort::start(&options(Provider::Qnn)).expect("the engine starts");
    assert!(engine.compiles_ahead());
    let procedures = procedures();
    let programs = programs(&engine, &procedures);
    assert!(programs.iter().all(|(_, compiled)| compiled.blob.len() as u64 > compiled.resident_bytes));
    let mut first = engine.load(0, &programs).expect("the bank is loaded");
    let other = Ort::start(&options(Provider::Qnn)).expect("a second one starts");
    assert_eq!(other.version(), engine.version());
    let mut again = other.load(0, &programs).expect("the bank is loaded again");
    for (index, procedure) in procedures.iter().enumerate() {
        let x = rows(procedure);
        assert_eq!(run(&mut *first, index, procedure, &x), run(&mut *again, index, procedure, &x));
    }
    // Not one byte of a program is taken for another procedure's.
    let (procedure, mut compiled) = (Arc::clone(&programs[0].0), (*programs[0].1).clone());
    compiled.blob.truncate(compiled.blob.len() - 1);
    let error = engine.load(0, &[(procedure, Arc::new(compiled))]).err().expect("it is cut off");
    assert!(matches!(&error, NpuError::Load { reason, .. } if reason.contains("cut off")), "{error}");
}

/// What the engine's compiler does not take is refused; nothing runs on the CPU in its name.
#[test]
#[ignore = "needs ONNX Runtime: cargo xtask ort"]
fn nothing_falls_back_to_the_cpu() {
    let settings = BTreeMap::from([("backend_path".to_owned(), "/nowhere/libQnnHtp.so".to_owned())]);
    let broken = OrtOptions { settings, ..options(Provider::Qnn) };
    let Err(NpuError::Unavailable { reason, .. }) = Ort::start(&broken) else { panic!("there is no compiler") };
    for part in ["fallback to CPU EP has been explicitly disabled", "/nowhere/libQnnHtp.so"] {
        assert!(reason.contains(part), "{reason}");
    }
    for provider in [Provider::OpenVino, Provider::CoreMl, Provider::Vitis] {
        let Err(NpuError::Unavailable { reason, .. }) = Ort::start(&options(provider)) else {
            panic!("{provider} is in no wheel that the tests install")
        };
        assert!(reason.contains(provider.name()) && reason.contains("lib"), "{reason}");
    }
}
