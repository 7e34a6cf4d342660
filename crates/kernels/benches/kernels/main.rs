//! Speed of every kernel on one thread, beside the ceiling that bounds it: `cargo bench -p troika-kernels`, and then
//! `-- --filter attention` or `-- --quick`.
//!
//! A sample of a kernel follows a sample of its ceiling, so that a busy neighbour slows both; a row is the median of the
//! rounds. With few rows a product reads weights and its ceiling is memory; so that they do come from there, each call
//! takes other weights. `cases.rs` says what is measured, `ceilings.rs` against what.

mod cases;
#[cfg(target_arch = "x86_64")]
mod ceilings;
/// Elsewhere there is nothing to compare with, only the names.
#[cfg(not(target_arch = "x86_64"))]
mod ceilings {
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(crate) enum Ceiling {
        Read,
        F32,
        Int8,
        Int8Narrow,
    }
}

use std::time::Instant;

use clap::Parser;
use troika_kernels::CpuLevel;

use cases::Case;
use ceilings::Ceiling;

/// Measure the speed of the kernels and their share of what this machine can do.
#[derive(Debug, Parser)]
struct Args {
    /// Only kernels whose name contains this.
    #[arg(long, value_name = "NAME", default_value = "")]
    filter: String,
    /// Three short rounds: rough figures, and that everything runs.
    #[arg(long)]
    quick: bool,
    /// Instructions to use; the ceilings are those of AVX2 in any case, so at AVX-512 a share may exceed 100 %.
    #[arg(long, value_name = "LEVEL", default_value = "avx2")]
    cpu_level: CpuLevel,
    /// What `cargo bench` says to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

/// How long to measure.
struct Effort {
    rounds: usize,
    /// Of a sample of a kernel.
    sample_s: f64,
    /// Of a sample of an arithmetic ceiling.
    loops: usize,
}

/// A kernel's rate and its share of the ceiling, per round.
struct Measured {
    calls: usize,
    call_us: Vec<f64>,
    shares: Vec<f64>,
}

fn main() {
    let args = Args::parse();
    assert!(args.cpu_level.is_available(), "this CPU lacks level {}", args.cpu_level.name());
    let effort = match args.quick {
        true => Effort { rounds: 3, sample_s: 0.002, loops: 400_000 },
        false => Effort { rounds: 9, sample_s: 0.01, loops: 2_000_000 },
    };
    #[cfg(target_arch = "x86_64")]
    let meter = ceilings::Meter::new(1);
    let ceiling_rate = |ceiling: Ceiling| {
        #[cfg(target_arch = "x86_64")]
        return meter.measure(ceiling, effort.loops);
        #[cfg(not(target_arch = "x86_64"))]
        return (f64::NAN, ceiling, effort.loops).0;
    };
    println!("one thread, level {}, median of {} rounds (least to most)\n", args.cpu_level.name(), effort.rounds);
    println!("{:<40}{:>12}{:>16}{:>40}", "", "a call, us", "rate", "share of the ceiling");
    let mut ceilings = Vec::new();
    for group in cases::GROUPS {
        // A group at a time, for its operands fill much memory.
        let mut cases = group(args.cpu_level, &args.filter);
        let mut measured: Vec<Measured> = cases.iter_mut().map(|case| warm_up(case, &effort)).collect();
        for _ in 0..effort.rounds {
            for (case, measured) in cases.iter_mut().zip(&mut measured) {
                let ceiling = ceiling_rate(case.ceiling);
                ceilings.push((case.ceiling, ceiling));
                let seconds = time(case, measured.calls);
                measured.call_us.push(seconds * 1e6);
                measured.shares.push(case.amount / seconds / 1e9 / ceiling);
            }
        }
        cases.iter().zip(measured).for_each(|(case, measured)| print(case, measured));
    }
    println!("\nceilings, median (least to most):");
    for (ceiling, unit) in
        [(Ceiling::Read, "GB/s"), (Ceiling::F32, "GFLOP/s"), (Ceiling::Int8, "GOP/s"), (Ceiling::Int8Narrow, "GOP/s")]
    {
        let rates: Vec<f64> = ceilings.iter().filter(|(c, _)| *c == ceiling).map(|(_, rate)| *rate).collect();
        if let Some((median, least, most)) = spread(rates) {
            println!("  {:<24}{median:.1} ({least:.1} to {most:.1}) {unit}", name(ceiling));
        }
    }
}

/// One call that does not count, and how many make a sample.
fn warm_up(case: &mut Case, effort: &Effort) -> Measured {
    let seconds = time(case, 1);
    let calls = (effort.sample_s / seconds).ceil().clamp(1.0, 1e6) as usize;
    Measured { calls, call_us: Vec::new(), shares: Vec::new() }
}

/// Seconds of a call, the mean of `calls`.
fn time(case: &mut Case, calls: usize) -> f64 {
    let start = Instant::now();
    (0..calls).for_each(|_| (case.run)());
    start.elapsed().as_secs_f64() / calls as f64
}

fn print(case: &Case, Measured { call_us, shares, .. }: Measured) {
    let unit = if case.ceiling == Ceiling::Read { "GB/s" } else { "GOP/s" };
    let (call_us, ..) = spread(call_us).expect("at least one round");
    let (share, least, most) = spread(shares).expect("at least one round");
    println!(
        "{:<40}{call_us:>12.1}{:>16}{:>40}",
        case.name,
        format!("{:.1} {unit}", case.amount / call_us / 1e3),
        format!("{:.0} % ({:.0} to {:.0}) of {}", share * 100.0, least * 100.0, most * 100.0, name(case.ceiling)),
    );
}

fn name(ceiling: Ceiling) -> &'static str {
    match ceiling {
        Ceiling::Read => "read",
        Ceiling::F32 => "f32",
        Ceiling::Int8 => "int8",
        Ceiling::Int8Narrow => "4-bit x int8",
    }
}

/// Median, least, most.
fn spread(mut values: Vec<f64>) -> Option<(f64, f64, f64)> {
    values.sort_by(f64::total_cmp);
    Some((*values.get(values.len() / 2)?, *values.first()?, *values.last()?))
}
