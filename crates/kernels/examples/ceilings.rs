//! Ceilings of this machine with AVX2: memory read, f32 multiply-add, integer multiply-add. One JSON object on standard
//! output: `{"threads": N, "read_gbs": …, "f32_gflops": …, "int8_gops": …, "int8_narrow_gops": …}`, medians.
//!
//! `cargo run --release -p troika-kernels --example ceilings -- [THREADS] [REPETITIONS]`

#[cfg(target_arch = "x86_64")]
#[path = "../benches/kernels/ceilings.rs"]
mod ceilings;

#[cfg(target_arch = "x86_64")]
fn main() {
    use ceilings::{Ceiling, Meter};

    const LOOPS: usize = 15_000_000;
    let mut args = std::env::args().skip(1).map(|arg| arg.parse().expect("a number"));
    let (threads, repetitions) = (args.next().unwrap_or(2), args.next().unwrap_or(5));
    let meter = Meter::new(threads);
    let rate = |ceiling| {
        let mut rates: Vec<f64> = (0..repetitions).map(|_| meter.measure(ceiling, LOOPS)).collect();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let [read, f32, int8, narrow] = [Ceiling::Read, Ceiling::F32, Ceiling::Int8, Ceiling::Int8Narrow].map(rate);
    println!(
        "{{\"threads\": {threads}, \"read_gbs\": {read:.1}, \"f32_gflops\": {f32:.1}, \"int8_gops\": {int8:.1}, \
         \"int8_narrow_gops\": {narrow:.1}}}"
    );
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    eprintln!("only x86-64 is measured");
}
