//! Ceilings of this machine with AVX2: memory read, f32 multiply-add, integer multiply-add.

use std::arch::x86_64::*;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Numbers a thread reads: more than any cache holds.
const NUMBERS: usize = 48 << 20;

/// What bounds a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ceiling {
    /// Bytes from memory.
    Read,
    /// f32 operations, two for a fused multiply-add.
    F32,
    /// Operations of the usual integer step, two for a multiply-add.
    Int8,
    /// The same where weights have four bits.
    Int8Narrow,
}

/// Threads that measure together, and what they read.
pub(crate) struct Meter {
    memory: Vec<Vec<f32>>,
}

impl Meter {
    /// # Panics
    ///
    /// Without AVX2 and FMA.
    pub(crate) fn new(threads: usize) -> Self {
        assert!(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"), "AVX2 and FMA are needed");
        Self { memory: (0..threads).map(|_| vec![1.0; NUMBERS]).collect() }
    }

    /// Billions of bytes or operations per second, all threads together; `loops` is for the arithmetic ones.
    pub(crate) fn measure(&self, ceiling: Ceiling, loops: usize) -> f64 {
        let (work, amount): (fn(&[f32], usize), usize) = match ceiling {
            // SAFETY: the features that the functions need are there (asserted when this was made); also below.
            Ceiling::Read => (|x, _| unsafe { read(x) }, NUMBERS * 4),
            // SAFETY: the same.
            Ceiling::F32 => (|_, loops| unsafe { fma(loops) }, loops * 10 * 16),
            // SAFETY: the same.
            Ceiling::Int8 => (|_, loops| unsafe { int8(loops) }, loops * 8 * 64),
            // SAFETY: the same.
            Ceiling::Int8Narrow => (|_, loops| unsafe { int8_narrow(loops) }, loops * 16 * 64),
        };
        (amount * self.memory.len()) as f64 / self.seconds(work, loops) / 1e9
    }

    /// Time of the slowest thread.
    fn seconds(&self, work: fn(&[f32], usize), loops: usize) -> f64 {
        let gate = Barrier::new(self.memory.len());
        let timed = |x: &[f32]| {
            gate.wait();
            let start = Instant::now();
            work(x, loops);
            start.elapsed().as_secs_f64()
        };
        std::thread::scope(|scope| {
            let timed = &timed;
            let threads: Vec<_> = self.memory.iter().map(|x| scope.spawn(move || timed(x))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).fold(0.0, f64::max)
        })
    }
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
fn fma(loops: usize) {
    let (a, b) = (_mm256_set1_ps(black_box(0.9999)), _mm256_set1_ps(black_box(1e-6)));
    let mut sums = [_mm256_set1_ps(1.0); 10];
    for _ in 0..loops {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
}

/// 32 products, sums of pairs to 16 bits, sums of pairs to 32 bits, add: the usual step.
#[target_feature(enable = "avx2,fma")]
fn int8(loops: usize) {
    let (w, x) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(7)));
    let ones = _mm256_set1_epi16(black_box(1));
    let mut sums = [_mm256_setzero_si256(); 8];
    for _ in 0..loops {
        for sum in &mut sums {
            let pairs = _mm256_maddubs_epi16(w, _mm256_xor_si256(x, *sum));
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    black_box(sums);
}

/// Four sums of pairs before one widening: allowed for 4-bit weights.
#[target_feature(enable = "avx2,fma")]
fn int8_narrow(loops: usize) {
    let (w, x) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(7)));
    let ones = _mm256_set1_epi16(black_box(1));
    let mut sums = [_mm256_setzero_si256(); 4];
    for _ in 0..loops {
        for sum in &mut sums {
            let x = _mm256_xor_si256(x, *sum);
            let two = |x| _mm256_add_epi16(_mm256_maddubs_epi16(w, x), _mm256_maddubs_epi16(x, w));
            let four = _mm256_add_epi16(two(x), two(_mm256_xor_si256(x, w)));
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(four, ones));
        }
    }
    black_box(sums);
}
