//! What a part of an operation costs by its width, and which widths make its branches end together (spec 9.3). Pure.

use serde::{Deserialize, Serialize};

use super::{KindFacts, Placement, Probe};

/// A part of an operation and how long it takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Of the output channels.
    pub fraction: f64,
    pub ms: f64,
}

/// `a + m x`: milliseconds of a fraction `x` of the output channels.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    pub launch_ms: f64,
    pub all_ms: f64,
}

impl Line {
    fn at(&self, fraction: f64) -> f64 {
        if fraction > 0.0 { self.launch_ms + self.all_ms * fraction } else { 0.0 }
    }

    /// Through points, by least squares. One point is a line without a launch, several of the same width are none.
    fn through(points: &[Point]) -> Option<Self> {
        let n = points.len() as f64;
        let mean = |of: fn(&Point) -> f64| points.iter().map(of).sum::<f64>() / n;
        if let [point] = points {
            return (point.fraction > 0.0).then(|| Self { launch_ms: 0.0, all_ms: point.ms / point.fraction });
        }
        let (x, y) = (mean(|p| p.fraction), mean(|p| p.ms));
        let spread: f64 = points.iter().map(|p| (p.fraction - x).powi(2)).sum();
        if points.is_empty() || spread <= 0.0 {
            return None;
        }
        let all_ms = points.iter().map(|p| (p.fraction - x) * (p.ms - y)).sum::<f64>() / spread;
        // Noise may tilt a line so far that it costs less than nothing to start.
        Some(Self { launch_ms: (y - all_ms * x).max(0.0), all_ms })
    }
}

/// The branches of a split operation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    pub engine: Line,
    pub primary: Line,
    pub cpu: Option<Line>,
}

impl Model {
    /// From what was measured; `None` if the operation cannot be split.
    pub fn of(probe: &Probe) -> Option<Self> {
        let part = probe.primary_part.unwrap_or(Point { fraction: 1.0, ms: probe.primary_ms });
        Some(Self {
            engine: Line::through(&probe.engine).filter(|line| line.all_ms > 0.0)?,
            primary: Line::through(&[part])?,
            cpu: Line::through(&probe.cpu).filter(|line| line.all_ms > 0.0),
        })
    }

    /// The slowest branch.
    pub fn region_ms(&self, engine: f64, cpu: f64) -> f64 {
        let helper = self.cpu.map_or(0.0, |line| line.at(cpu));
        self.engine.at(engine).max(self.primary.at(1.0 - engine - cpu)).max(helper)
    }

    /// Fractions of engines and CPU with which all branches take the same time.
    pub fn balanced(&self, with_cpu: bool) -> Option<(f64, f64)> {
        let helpers = [Some(self.engine), self.cpu.filter(|_| with_cpu)];
        // t = P (1 - sum x), x = (t - a) / m: so t (1 / P + sum 1 / m) = 1 + sum a / m.
        let each = || helpers.iter().flatten();
        let weight = 1.0 / self.primary.all_ms + each().map(|line| 1.0 / line.all_ms).sum::<f64>();
        let t = (1.0 + each().map(|line| line.launch_ms / line.all_ms).sum::<f64>()) / weight;
        let fraction = |line: Option<Line>| line.map_or(0.0, |line| (t - line.launch_ms) / line.all_ms);
        let (engine, cpu) = (fraction(helpers[0]), fraction(helpers[1]));
        let valid = engine > 0.0 && cpu >= 0.0 && engine + cpu < 1.0 && (!with_cpu || cpu > 0.0);
        valid.then_some((engine, cpu))
    }

    /// The balanced split in the steps that alignment allows, whichever neighbour is faster.
    pub fn snapped(&self, facts: &KindFacts, with_cpu: bool) -> Option<Placement> {
        let (engine, cpu) = self.balanced(with_cpu)?;
        let cpus = facts.cpu_step.filter(|_| with_cpu).map_or(vec![0.0], |step| around(cpu, step).to_vec());
        let engines = around(engine, facts.step?);
        let pairs = engines.iter().flat_map(|engine| cpus.iter().map(move |cpu| (*engine, *cpu)));
        let valid = pairs.filter(|(engine, cpu)| *engine > 0.0 && engine + cpu < 1.0 - 1e-9);
        let best = valid.min_by(|a, b| self.region_ms(a.0, a.1).total_cmp(&self.region_ms(b.0, b.1)));
        best.map(|(engine, cpu)| Placement::Split { engine, cpu })
    }
}

/// The multiples of `step` below and above.
fn around(x: f64, step: f64) -> [f64; 2] {
    let below = (x / step + 1e-9).floor();
    [below * step, (below + 1.0) * step]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `query` of the spec's table 12.3: an engine pair, a primary device, a CPU.
    fn query() -> Model {
        let engine = Line { launch_ms: 0.033, all_ms: 12.5 };
        let primary = Line { launch_ms: 0.0, all_ms: 12.6 };
        Model { engine, primary, cpu: Some(Line { launch_ms: 0.0, all_ms: 53.9 }) }
    }

    #[test]
    fn branches_end_together() {
        let (engine, cpu) = query().balanced(false).expect("they can");
        assert!((engine - 0.5007).abs() < 1e-3 && cpu == 0.0, "{engine}");
        assert!((query().region_ms(engine, 0.0) - 12.6 * (1.0 - engine)).abs() < 1e-9);
        let (engine, cpu) = query().balanced(true).expect("they can");
        let (region, cpu_ms) = (query().region_ms(engine, cpu), 53.9 * cpu);
        assert!((region - cpu_ms).abs() < 1e-9 && (region - 12.6 * (1.0 - engine - cpu)).abs() < 1e-9);
        // An engine that takes longer to start than the primary device for everything.
        let slow = Model { engine: Line { launch_ms: 13.0, all_ms: 1.0 }, ..query() };
        assert_eq!(slow.balanced(false), None);
    }

    #[test]
    fn widths_are_measured_and_snapped() {
        let point = |fraction, ms| Point { fraction, ms };
        let probe = Probe {
            primary_ms: 10.0,
            primary_part: Some(point(0.5, 5.0)),
            engine: vec![point(0.25, 4.0), point(0.5, 6.0), point(0.75, 8.0)],
            cpu: Vec::new(),
            merge_ms: 0.0,
            whole_ms: None,
            refused: None,
        };
        let model = Model::of(&probe).expect("it can be split");
        assert_eq!(model.engine, Line { launch_ms: 2.0, all_ms: 8.0 });
        let facts = |step| KindFacts {
            name: "query".to_owned(),
            layers: 1,
            step,
            cpu_step: None,
            can_be_whole: false,
            parts: Vec::new(),
        };
        // 8 / 18 = 0.444: a half is nearer than a quarter by what it costs, 6 against 7.5 ms.
        assert_eq!(model.snapped(&facts(Some(0.25)), false), Some(Placement::split(0.5)));
        assert_eq!(model.snapped(&facts(Some(1.0)), false), None, "all or nothing is no split");
        assert_eq!(model.snapped(&facts(None), false), None);
        assert_eq!(Model::of(&Probe { engine: vec![point(0.5, 6.0); 2], ..probe }), None);
    }
}
