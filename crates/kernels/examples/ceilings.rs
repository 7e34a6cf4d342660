//! Ceilings of this machine with AVX2: memory read, f32 multiply-add, integer multiply-add. One JSON object on standard
//! output: `{"threads": N, "read_gbs": …, "f32_gflops": …, "int8_gops": …, "int8_narrow_gops": …}`, medians.
//!
//! `cargo run --release -p troika-kernels --example ceilings -- [THREADS] [REPETITIONS]`

#[cfg(target_arch = "x86_64")]
fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse().expect("a number"));
    let (threads, repetitions) = (args.next().unwrap_or(2), args.next().unwrap_or(5));
    x86::report(threads, repetitions);
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    eprintln!("only x86-64 is measured");
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;
    use std::sync::Barrier;
    use std::time::Instant;

    /// Numbers a thread reads: more than any cache holds.
    const NUMBERS: usize = 48 << 20;
    const LOOPS: usize = 15_000_000;

    pub(super) fn report(threads: usize, repetitions: usize) {
        assert!(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"), "AVX2 and FMA are needed");
        let memory: Vec<Vec<f32>> = (0..threads).map(|_| vec![1.0; NUMBERS]).collect();
        let rate = |work: fn(&[f32]), amount: f64| {
            let mut rates: Vec<f64> =
                (0..repetitions).map(|_| amount * threads as f64 / seconds(&memory, work)).collect();
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2] / 1e9
        };
        // SAFETY: the features that the functions need are there (asserted above).
        let read = rate(|x| unsafe { read(x) }, NUMBERS as f64 * 4.0);
        // SAFETY: the same.
        let fma = rate(|_| unsafe { fma() }, (LOOPS * 10 * 16) as f64);
        // SAFETY: the same.
        let int8 = rate(|_| unsafe { int8() }, (LOOPS * 8 * 64) as f64);
        // SAFETY: the same.
        let narrow = rate(|_| unsafe { int8_narrow() }, (LOOPS * 16 * 64) as f64);
        println!(
            "{{\"threads\": {threads}, \"read_gbs\": {read:.1}, \"f32_gflops\": {fma:.1}, \"int8_gops\": {int8:.1}, \
             \"int8_narrow_gops\": {narrow:.1}}}"
        );
    }

    /// Time of the slowest thread.
    fn seconds(memory: &[Vec<f32>], work: fn(&[f32])) -> f64 {
        let gate = Barrier::new(memory.len());
        let timed = |x: &[f32]| {
            gate.wait();
            let start = Instant::now();
            work(x);
            start.elapsed().as_secs_f64()
        };
        std::thread::scope(|scope| {
            let timed = &timed;
            let threads: Vec<_> = memory.iter().map(|x| scope.spawn(move || timed(x))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).fold(0.0, f64::max)
        })
    }

    #[target_feature(enable = "avx2,fma")]
    fn read(x: &[f32]) {
        let mut sums = [_mm256_setzero_ps(); 8];
        for x in x.as_chunks::<64>().0 {
            for (sum, x) in sums.iter_mut().zip(x.as_chunks::<8>().0) {
                // SAFETY: `x` is 32 readable bytes and `loadu` has no alignment requirement.
                *sum = _mm256_add_ps(*sum, unsafe { _mm256_loadu_ps(x.as_ptr()) });
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,fma")]
    fn fma() {
        let (a, b) = (_mm256_set1_ps(black_box(0.9999)), _mm256_set1_ps(black_box(1e-6)));
        let mut sums = [_mm256_set1_ps(1.0); 10];
        for _ in 0..LOOPS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }

    /// 32 products, sums of pairs to 16 bits, sums of pairs to 32 bits, add: the usual step.
    #[target_feature(enable = "avx2,fma")]
    fn int8() {
        let (w, x) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(7)));
        let ones = _mm256_set1_epi16(black_box(1));
        let mut sums = [_mm256_setzero_si256(); 8];
        for _ in 0..LOOPS {
            for sum in &mut sums {
                let pairs = _mm256_maddubs_epi16(w, _mm256_xor_si256(x, *sum));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
        }
        black_box(sums);
    }

    /// Four sums of pairs before one widening: allowed for 4-bit weights.
    #[target_feature(enable = "avx2,fma")]
    fn int8_narrow() {
        let (w, x) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(7)));
        let ones = _mm256_set1_epi16(black_box(1));
        let mut sums = [_mm256_setzero_si256(); 4];
        for _ in 0..LOOPS {
            for sum in &mut sums {
                let x = _mm256_xor_si256(x, *sum);
                let two = |x| _mm256_add_epi16(_mm256_maddubs_epi16(w, x), _mm256_maddubs_epi16(x, w));
                let four = _mm256_add_epi16(two(x), two(_mm256_xor_si256(x, w)));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(four, ones));
            }
        }
        black_box(sums);
    }
}
