//! Medians, their intervals, and what counts as a difference between two arms. Pure; no clock.
//!
//! The rules are those of `docs/benchmarks.md`: unpaired bootstrap of medians, 95 %, of samples without what all arms of a round have
//! in common, expanded for few samples; a difference must be at least [`MIN_EFFECT`], and its interval must stay clear of "none" by
//! half of that.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};

/// Smaller differences are none, however sure.
pub const MIN_EFFECT: f64 = 0.01;
/// With fewer samples of either arm nothing is concluded.
pub const MIN_SAMPLES: usize = 3;
/// With fewer samples of either arm a conclusion is called weak.
pub const FIRM_SAMPLES: usize = 5;
/// Rounds go on, up to their limit, until intervals of ratios reach no farther than this to either side.
pub const WANTED_HALF_WIDTH: f64 = 0.02;
/// Resamples of a bootstrap.
const RESAMPLES: usize = 4000;
/// Share of the resamples that lies outside of a 95 % interval at either end, for 3, 4, ... samples; for more than the last, as for
/// that. Few samples spread less than what they are drawn from, so 2.5 % would promise too much: five equal pairs on a busy machine
/// would differ too often. This is the expanded percentile interval (Hesterberg, "What Teachers Should Know About the Bootstrap",
/// 2015, section 4.2), as wide as Student's: the normal distribution's share beyond `t(n - 1) * sqrt(n / (n - 1))`.
const OUTSIDE: [f64; 18] = [
    0.0, 0.000_12, 0.000_95, 0.002_43, 0.004_11, 0.005_74, 0.007_22, 0.008_55, 0.009_72, 0.010_76, 0.011_67, 0.012_48,
    0.013_21, 0.013_86, 0.014_44, 0.014_97, 0.015_44, 0.015_88,
];
/// How much farther than all resamples an interval of 3 or 4 samples reaches. Even the farthest of so few is near: in one of seven
/// comparisons of an arm with itself all three rounds were to the same side. With this it is one in twenty, for normal and for heavier
/// tails.
const STRETCHED: [f64; 2] = [2.5, 1.25];

/// A median and the 95 % bootstrap interval around it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

impl Interval {
    /// Half of its width.
    pub fn half_width(&self) -> f64 {
        (self.high - self.low) / 2.0
    }
}

/// What two arms' samples say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Faster,
    Slower,
    NoDifference,
    /// Fewer than [`MIN_SAMPLES`] of one of them.
    TooFewSamples,
}

/// One arm's rate over another's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Ratio of the medians; 1 = none.
    pub ratio: Interval,
    pub verdict: Verdict,
    /// Either arm has fewer than [`FIRM_SAMPLES`].
    pub is_weak: bool,
}

impl Difference {
    /// `rate` over `base`; `None` if either has no sample.
    pub fn of(rate: &[f64], base: &[f64]) -> Option<Self> {
        let median = median(rate)? / median(base)?;
        let (mut top, mut bottom) = (Resampler::new(rate, 1), Resampler::new(base, 2));
        let ratios = (0..RESAMPLES).map(|_| top.median() / bottom.median()).collect();
        let fewest = rate.len().min(base.len());
        let ratio = bracket(median, ratios, fewest);
        let clear = MIN_EFFECT / 2.0;
        let verdict = if fewest < MIN_SAMPLES {
            Verdict::TooFewSamples
        } else if median >= 1.0 + MIN_EFFECT && ratio.low > 1.0 + clear {
            Verdict::Faster
        } else if median <= 1.0 - MIN_EFFECT && ratio.high < 1.0 - clear {
            Verdict::Slower
        } else {
            Verdict::NoDifference
        };
        Some(Self { ratio, verdict, is_weak: fewest < FIRM_SAMPLES })
    }

    /// The same for samples of arms that took turns, by round: a machine that is a quarter faster for some seconds is so for both
    /// arms of a round, and that is no difference between them.
    pub fn of_rounds(rate: &[f64], base: &[f64]) -> Option<Self> {
        let [rate, base] = levelled([rate, base]);
        Self::of(&rate, &base)
    }

    /// No further samples are needed.
    pub fn is_precise(&self) -> bool {
        self.ratio.half_width() <= WANTED_HALF_WIDTH
    }
}

/// The samples of two arms, by round, without what both of a round have in common. Rounds that one lacks are left out.
///
/// The round's mean holds half of each arm's own noise, so what is left is too quiet and no longer independent from arm to arm. It
/// is scaled up to the spread that it had, so that an unpaired bootstrap of it is as wide as it must be.
fn levelled(arms: [&[f64]; 2]) -> [Vec<f64>; 2] {
    let rounds: Vec<[f64; 2]> = arms[0].iter().zip(arms[1]).map(|(a, b)| [a.ln(), b.ln()]).collect();
    let levels: Vec<f64> = rounds.iter().map(|[a, b]| (a + b) / 2.0).collect();
    let usual = median(&levels).unwrap_or(0.0);
    [0, 1].map(|arm| {
        let logs: Vec<f64> = rounds.iter().zip(&levels).map(|(round, level)| round[arm] - level + usual).collect();
        let middle = median(&logs).unwrap_or(0.0);
        logs.iter().map(|log| (middle + 2f64.sqrt() * (log - middle)).exp()).collect()
    })
}

/// Median of `values`; `None` of none.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The value that a share `q` of `values` lies below, between neighbours in proportion; `None` of none.
pub fn quantile(values: &[f64], q: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile_of_sorted(&sorted, q)
}

fn quantile_of_sorted(sorted: &[f64], q: f64) -> Option<f64> {
    let place = q * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    Some(below + (above - below) * place.fract())
}

/// Median with its interval; `None` of none.
pub fn interval(values: &[f64]) -> Option<Interval> {
    let median = median(values)?;
    let mut resampler = Resampler::new(values, 3);
    Some(bracket(median, (0..RESAMPLES).map(|_| resampler.median()).collect(), values.len()))
}

/// What of `resampled` is the 95 % interval of a median of so many samples.
fn bracket(median: f64, mut resampled: Vec<f64>, num_samples: usize) -> Interval {
    resampled.sort_by(f64::total_cmp);
    let outside = OUTSIDE[num_samples.saturating_sub(MIN_SAMPLES).min(OUTSIDE.len() - 1)];
    let end = |q| quantile_of_sorted(&resampled, q).expect("there are resamples");
    let (low, high) = (end(outside), end(1.0 - outside));
    let stretched = num_samples.checked_sub(MIN_SAMPLES).and_then(|more| STRETCHED.get(more)).filter(|_| low > 0.0);
    // Rates and their ratios have no end below but zero.
    let away = |end: f64| stretched.map_or(end, |stretch| median * (end / median).powf(*stretch));
    Interval { median, low: away(low), high: away(high) }
}

/// Draws as many samples as there are, with repetition. The same draws every time, so a report can be made again.
struct Resampler<'a> {
    values: &'a [f64],
    drawn: Vec<f64>,
    random: ChaCha8Rng,
}

impl<'a> Resampler<'a> {
    fn new(values: &'a [f64], stream: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(0x7472_6f69_6b61);
        random.set_stream(stream);
        Self { values, drawn: vec![0.0; values.len()], random }
    }

    fn median(&mut self) -> f64 {
        for drawn in &mut self.drawn {
            *drawn = self.values[(self.random.next_u64() % self.values.len() as u64) as usize];
        }
        self.drawn.sort_by(f64::total_cmp);
        quantile_of_sorted(&self.drawn, 0.5).expect("there are values")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates on a machine with neighbours: noise of `sd` to both sides, now and then a sample that is slowed down by much more,
    /// and spells in which everything is a quarter faster. A sample is the median of three repeats in one process, as in a
    /// real run.
    struct Machine {
        random: ChaCha8Rng,
        sd: f64,
        slow: f64,
        /// Chance that a spell begins or ends before a process.
        change: f64,
        in_spell: bool,
    }

    impl Machine {
        fn uniform(&mut self) -> f64 {
            (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
        }

        fn normal(&mut self) -> f64 {
            (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
        }

        fn sample(&mut self, rate: f64) -> f64 {
            if self.uniform() < self.change {
                self.in_spell = !self.in_spell;
            }
            let rate = if self.in_spell { rate * 1.25 } else { rate };
            let repeat = |machine: &mut Self| {
                let mut log_time = machine.sd * machine.normal();
                if machine.uniform() < 0.1 {
                    log_time += -machine.slow * (1.0 - machine.uniform()).ln();
                }
                rate * (-log_time).exp()
            };
            let repeats = [repeat(self), repeat(self), repeat(self)];
            median(&repeats).expect("three")
        }

        /// Rounds of three arms in turn until the last two are told apart precisely or there are eleven.
        fn compare(&mut self, rate: f64, other: f64) -> Verdict {
            let rates = [0.9 * rate, rate, other];
            let mut arms = vec![Vec::new(); 3];
            loop {
                for arm in crate::run::turns(arms[0].len(), 3) {
                    let sample = self.sample(rates[arm]);
                    arms[arm].push(sample);
                }
                let difference = Difference::of_rounds(&arms[2], &arms[1]).expect("samples");
                let rounds = arms[0].len();
                if rounds >= FIRM_SAMPLES && (difference.is_precise() || rounds == 11) {
                    return difference.verdict;
                }
            }
        }
    }

    /// On quiet, ordinary and bad machines, and on one that changes its speed by a quarter every ten processes or so: 20
    /// comparisons of an arm with itself report at most one difference, and a slow-down of 5 % is found in at least 18 of 20.
    #[test]
    fn equal_arms_are_equal_and_a_planted_slow_down_is_found() {
        let machines = [
            (1, 0.003, 0.02, 0.0),
            (2, 0.01, 0.05, 0.0),
            (3, 0.02, 0.05, 0.0),
            (4, 0.025, 0.08, 0.0),
            (5, 0.01, 0.05, 0.1),
            (6, 0.015, 0.05, 0.05),
        ];
        for (seed, sd, slow, change) in machines {
            let random = ChaCha8Rng::seed_from_u64(seed);
            let mut machine = Machine { random, sd, slow, change, in_spell: false };
            let wrong = (0..20).filter(|_| machine.compare(1000.0, 1000.0) != Verdict::NoDifference).count();
            assert!(wrong <= 1, "noise {sd}, spells {change}: {wrong} of 20 equal pairs reported as different");
            let found = (0..20).filter(|_| machine.compare(1000.0, 950.0) == Verdict::Slower).count();
            assert!(found >= 18, "noise {sd}, spells {change}: {found} of 20 slow-downs found");
        }
    }

    /// Where others work on the same cores, samples scatter by more than what is looked for; then nothing must be found by luck.
    #[test]
    fn equal_arms_are_equal_on_a_busy_machine() {
        let random = ChaCha8Rng::seed_from_u64(11);
        let mut machine = Machine { random, sd: 0.08, slow: 0.1, change: 0.1, in_spell: false };
        let wrong = (0..60).filter(|_| machine.compare(1000.0, 1000.0) != Verdict::NoDifference).count();
        assert!(wrong <= 3, "{wrong} of 60 equal pairs reported as different");
    }

    /// Three rounds are allowed and called weak, but what is called a 95 % interval must be one: of 400 comparisons of an arm with
    /// itself one in twenty may differ (six hundredths, for luck).
    #[test]
    fn few_rounds_do_not_promise_too_much() {
        for (rounds, most) in [(3, 24), (4, 24), (5, 24)] {
            let random = ChaCha8Rng::seed_from_u64(rounds as u64);
            let mut machine = Machine { random, sd: 0.08, slow: 0.1, change: 0.0, in_spell: false };
            let mut rates = || (0..rounds).map(|_| machine.sample(1000.0)).collect::<Vec<_>>();
            let differs = |_: &i32| {
                let difference = Difference::of_rounds(&rates(), &rates()).expect("samples");
                difference.verdict != Verdict::NoDifference
            };
            let wrong = (0..400).filter(differs).count();
            assert!(wrong <= most, "{rounds} rounds: {wrong} of 400 equal pairs reported as different");
        }
    }

    #[test]
    fn what_a_round_has_in_common_is_no_difference() {
        let level = levelled([&[100.0, 125.0, 100.0], &[81.0, 101.25, 81.0, 7.0]]);
        for round in 0..3 {
            assert!((level[0][round] - 100.0).abs() < 1e-9 && (level[1][round] - 81.0).abs() < 1e-9, "{level:?}");
        }
        assert_eq!(level[1].len(), 3, "the first arm has no fourth round");
        // Noise of one arm alone: half of it goes to the other, and both are spread to what they were.
        let [a, b] = levelled([&[100.0, 100.0, 121.0], &[100.0; 3]]);
        let spread = 1.1f64.powf(2f64.sqrt());
        assert!((a[2] / 100.0 - spread).abs() < 1e-9 && (b[2] * spread / 100.0 - 1.0).abs() < 1e-9, "{a:?} {b:?}");
        assert_eq!(Difference::of_rounds(&[], &[1.0]), None);
    }

    #[test]
    fn small_differences_are_none_and_few_samples_say_nothing() {
        let verdict = |samples: &[f64], base: &[f64]| Difference::of(samples, base).expect("samples").verdict;
        assert_eq!(verdict(&[100.8; 9], &[100.0; 9]), Verdict::NoDifference);
        assert_eq!(verdict(&[101.2; 9], &[100.0; 9]), Verdict::Faster);
        assert_eq!(verdict(&[98.0; 9], &[100.0; 9]), Verdict::Slower);
        assert_eq!(verdict(&[200.0; 2], &[100.0; 9]), Verdict::TooFewSamples);
        assert!(Difference::of(&[2.0; 3], &[1.0; 3]).expect("samples").is_weak);
        assert_eq!(Difference::of(&[], &[1.0]), None);
        // A median 2 % higher says nothing when the samples are spread all over.
        assert_eq!(
            verdict(&[80.0, 95.0, 102.0, 110.0, 130.0], &[75.0, 90.0, 100.0, 112.0, 128.0]),
            Verdict::NoDifference
        );
    }

    #[test]
    fn quantiles_lie_between_neighbours() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(median(&values), Some(2.5));
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(quantile(&values, 1.0), Some(4.0));
        assert_eq!(quantile(&[], 0.5), None);
        let around = interval(&[10.0, 11.0, 12.0, 13.0, 14.0]).expect("values");
        assert_eq!((around.median, around.low, around.high), (12.0, 10.0, 14.0));
    }
}
