//! What if: a setting, or two, over a range.

use std::fmt;
use std::str::FromStr;

use plotters::prelude::*;
use serde::Serialize;

use crate::SimError;
use crate::form::Projection;
use crate::machine::{Machine, Run};
use crate::plan::Placement;
use crate::prediction::{Predicted, RecordKind};

/// What is varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knob {
    /// Configured width of a step; the user insists on it.
    Step,
    /// Rows of a tile.
    Tile,
    /// Tokens of a cache block.
    Block,
    Wavefront,
    Concurrency,
    /// How many times as fast the engines are.
    EngineRate,
    /// Synchronization when parts are joined, milliseconds.
    SyncMs,
    /// Fraction of an operation on the engines; 0 is off, 1 is whole.
    Fraction(Projection),
    /// Fraction of an operation on the CPU, of one that is split.
    Cpu(Projection),
}

/// A range.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    pub knob: Knob,
    pub values: Vec<f64>,
}

/// Most points of a sweep: some seconds.
const MAX_POINTS: usize = 2000;

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step => f.write_str("step"),
            Self::Tile => f.write_str("tile"),
            Self::Block => f.write_str("block"),
            Self::Wavefront => f.write_str("wavefront"),
            Self::Concurrency => f.write_str("concurrency"),
            Self::EngineRate => f.write_str("engine-rate"),
            Self::SyncMs => f.write_str("sync-ms"),
            Self::Fraction(projection) => write!(f, "{projection}"),
            Self::Cpu(projection) => write!(f, "{projection}.cpu"),
        }
    }
}

impl FromStr for Knob {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let knobs =
            [Self::Step, Self::Tile, Self::Block, Self::Wavefront, Self::Concurrency, Self::EngineRate, Self::SyncMs];
        if let Some(knob) = knobs.into_iter().find(|knob| knob.to_string() == text) {
            return Ok(knob);
        }
        let (name, cpu) = text.strip_suffix(".cpu").map_or((text, false), |name| (name, true));
        let projection = name.parse::<Projection>().map_err(|reason| {
            let known: Vec<String> = knobs.iter().map(Self::to_string).collect();
            format!("{text} cannot be varied: {} can, and the fraction of an operation; {reason}", known.join(", "))
        })?;
        Ok(if cpu { Self::Cpu(projection) } else { Self::Fraction(projection) })
    }
}

impl FromStr for Axis {
    type Err = String;

    /// `KNOB=VALUE,VALUE,...` or `KNOB=FIRST..LAST/STEPS`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (knob, values) = text.split_once('=').ok_or_else(|| format!("{text} is not KNOB=VALUES"))?;
        let number = |text: &str| {
            text.parse::<f64>().ok().filter(|x| x.is_finite()).ok_or_else(|| format!("{text} is not a number"))
        };
        let values = match values.split_once("..") {
            Some((first, rest)) => {
                let (last, steps) = rest.split_once('/').ok_or_else(|| format!("{values} is not FIRST..LAST/STEPS"))?;
                let (first, last) = (number(first)?, number(last)?);
                let steps = steps.parse::<usize>().ok().filter(|n| (1..=MAX_POINTS).contains(n));
                let steps = steps.ok_or_else(|| format!("{rest}: 1 to {MAX_POINTS} steps"))?;
                (0..=steps).map(|i| first + (last - first) * i as f64 / steps as f64).collect()
            }
            None => values.split(',').map(number).collect::<Result<Vec<_>, _>>()?,
        };
        Ok(Self { knob: knob.parse()?, values })
    }
}

/// A simulated run of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    pub x: f64,
    /// The value of the second knob.
    pub series: Option<f64>,
    pub prefill_tps: Predicted<f64>,
    pub dispatched: u64,
    /// Part of the time that each device is busy.
    pub duty: Vec<Predicted<f64>>,
    pub verdict: String,
}

/// All of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sweep {
    pub kind: RecordKind,
    pub profile: String,
    pub model: String,
    pub x: String,
    pub series: Option<String>,
    pub points: Vec<Point>,
    /// Combinations that cannot be, and why.
    pub refused: Vec<String>,
}

impl Knob {
    fn apply(self, value: f64, machine: &Machine, run: &mut Run) -> Result<Option<Machine>, SimError> {
        let whole = || match value {
            _ if value >= 0.0 && value.fract() == 0.0 && value < 1e9 => Ok(value as usize),
            _ => Err(SimError::Run(format!("{self} is a whole number, not {value}"))),
        };
        match self {
            Self::Step => (run.step, run.honour_step) = (whole()?, true),
            Self::Tile => run.plan.tile = whole()?,
            Self::Block => run.block = whole()?,
            Self::Wavefront => run.wavefront = whole()?,
            Self::Concurrency => run.concurrency = whole()?,
            Self::EngineRate => return machine.with_engine_rate(value).map(Some),
            Self::SyncMs => return machine.with_sync_ms(value).map(Some),
            Self::Fraction(projection) => {
                let cpu = match run.plan.of(projection) {
                    Placement::Split { cpu, .. } => cpu,
                    _ => 0.0,
                };
                let placement = match value {
                    0.0 => Placement::Off,
                    1.0 => Placement::Whole,
                    engines => Placement::Split { engines, cpu },
                };
                run.plan.place.insert(projection, placement);
            }
            Self::Cpu(projection) => match run.plan.of(projection) {
                Placement::Split { engines, .. } => {
                    run.plan.place.insert(projection, Placement::Split { engines, cpu: value });
                }
                _ => return Err(SimError::Run(format!("{projection} is not split, so the CPU has no share"))),
            },
        }
        Ok(None)
    }
}

impl Sweep {
    /// Simulates `run` with every value of `x`, and of `series` if there is one.
    ///
    /// # Errors
    ///
    /// If nothing of it can be simulated.
    pub fn of(machine: &Machine, run: &Run, x: &Axis, series: Option<&Axis>) -> Result<Self, SimError> {
        let lines: Vec<Option<f64>> = series.map_or(vec![None], |axis| axis.values.iter().copied().map(Some).collect());
        if x.values.len() * lines.len() > MAX_POINTS {
            return Err(SimError::Run(format!("{} points; at most {MAX_POINTS}", x.values.len() * lines.len())));
        }
        let mut sweep = Self {
            kind: RecordKind::Prediction,
            profile: machine.profile().name.clone(),
            model: machine.model().to_owned(),
            x: x.knob.to_string(),
            series: series.map(|axis| axis.knob.to_string()),
            points: Vec::new(),
            refused: Vec::new(),
        };
        let simulate = |value: f64, line: Option<f64>| {
            let mut run = run.clone();
            let mut other = None;
            for (axis, value) in series.zip(line).into_iter().chain([(x, value)]) {
                other = axis.knob.apply(value, other.as_ref().unwrap_or(machine), &mut run)?.or(other);
            }
            other.as_ref().unwrap_or(machine).prefill(&run)
        };
        for line in lines {
            for value in &x.values {
                match simulate(*value, line) {
                    Ok(prediction) => sweep.points.push(Point {
                        x: *value,
                        series: line,
                        prefill_tps: prediction.prefill_tps,
                        dispatched: prediction.dispatched,
                        duty: prediction.devices.iter().map(|device| device.duty).collect(),
                        verdict: prediction.verdict,
                    }),
                    Err(error) => {
                        let of_line = line.map_or_else(String::new, |value| {
                            format!(", {} {value}", sweep.series.as_deref().unwrap_or_default())
                        });
                        sweep.refused.push(format!("{} {value}{of_line}: {error}", sweep.x));
                    }
                }
            }
        }
        match (sweep.points.is_empty(), sweep.refused.first()) {
            (true, Some(reason)) => Err(SimError::Run(reason.clone())),
            _ => Ok(sweep),
        }
    }

    /// The rate over the first knob as SVG, a line for each value of the second.
    ///
    /// # Errors
    ///
    /// If it cannot be drawn.
    pub fn plot(&self) -> Result<String, SimError> {
        let fault = |error: &dyn fmt::Display| SimError::Plot(error.to_string());
        let bounds = |of: &dyn Fn(&Point) -> f64| {
            let numbers = self.points.iter().map(of);
            numbers.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)))
        };
        let (left, right) = bounds(&|point| point.x);
        let (low, high) = bounds(&|point| point.prefill_tps.predicted());
        // A single value still has a width.
        let (pad_x, pad_y) = (((right - left) * 0.03).max(0.01), ((high - low) * 0.08).max(0.01 * high));
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, (960, 420)).into_drawing_area();
            let title = format!("PREDICTED prefill of {} on {} (simulated)", self.model, self.profile);
            let mut chart = ChartBuilder::on(&root)
                .caption(title, ("sans-serif", 18))
                .margin(10)
                .x_label_area_size(45)
                .y_label_area_size(70)
                .build_cartesian_2d(left - pad_x..right + pad_x, low - pad_y..high + pad_y)
                .map_err(|error| fault(&error))?;
            let mesh = &mut chart.configure_mesh();
            mesh.x_desc(&self.x).y_desc("predicted tokens per second").light_line_style(WHITE);
            mesh.draw().map_err(|error| fault(&error))?;
            let mut lines: Vec<Option<f64>> = self.points.iter().map(|point| point.series).collect();
            lines.dedup();
            for (number, line) in lines.iter().enumerate() {
                let color = Palette99::pick(number).to_rgba();
                let points = || {
                    let own = self.points.iter().filter(|point| point.series == *line);
                    own.map(|point| (point.x, point.prefill_tps.predicted()))
                };
                let series = chart
                    .draw_series(LineSeries::new(points(), color.stroke_width(2)))
                    .map_err(|error| fault(&error))?;
                if let (Some(name), Some(value)) = (&self.series, line) {
                    series
                        .label(format!("{name} {value}"))
                        .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(2)));
                }
                let dots = points().map(|at| Circle::new(at, 3, color.filled()));
                chart.draw_series(dots).map_err(|error| fault(&error))?;
            }
            if self.series.is_some() {
                let labels = &mut chart.configure_series_labels();
                labels.position(SeriesLabelPosition::LowerRight).background_style(WHITE.mix(0.8));
                labels.border_style(BLACK.mix(0.3)).draw().map_err(|error| fault(&error))?;
            }
            root.present().map_err(|error| fault(&error))?;
        }
        Ok(svg)
    }
}
