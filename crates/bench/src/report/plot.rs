//! Plots as SVG: rates with intervals, time by operation and device, phases of requests.

use std::collections::BTreeMap;

use plotters::prelude::*;

use crate::BenchError;
use crate::arm::ArmName;
use crate::record::{ArmRecord, Experiment};

const WIDTH: u32 = 960;
/// How far arms stand apart, as a share of the longest prompt.
const ASIDE: f64 = 0.006;
/// Kinds of operations that have a colour of their own; the rest is one.
const MAX_KINDS: usize = 11;

fn color(arm: ArmName) -> RGBColor {
    match arm {
        ArmName::A => RGBColor(120, 120, 120),
        ArmName::B => RGBColor(31, 119, 180),
        ArmName::C => RGBColor(214, 96, 20),
        ArmName::P => RGBColor(60, 140, 70),
    }
}

fn fault(error: impl std::fmt::Display) -> BenchError {
    BenchError::Plot(error.to_string())
}

/// Rate over the length of the prompt, a line for each arm, with 95 % intervals.
///
/// # Errors
///
/// If it cannot be drawn.
pub fn rates(experiment: &Experiment) -> Result<Option<String>, BenchError> {
    let lengths = experiment.cells.iter().map(|cell| cell.length.tokens as f64);
    let longest = lengths.fold(0.0, f64::max);
    let rates = experiment.cells.iter().flat_map(|cell| &cell.arms).filter_map(|arm| arm.prefill_tps);
    let highest = rates.map(|rate| rate.high).fold(0.0, f64::max);
    if highest == 0.0 {
        return Ok(None);
    }
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, 380)).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .x_label_area_size(45)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..longest * 1.05, 0.0..highest * 1.1)
            .map_err(fault)?;
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc("tokens of the prompt").y_desc("prompt tokens per second").light_line_style(WHITE);
        mesh.x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.0}"))
            .draw()
            .map_err(fault)?;
        for (place, arm) in experiment.arms.iter().enumerate() {
            let name = arm.arm.name;
            // Side by side, or intervals of one length hide each other.
            let aside = (place as f64 - (experiment.arms.len() - 1) as f64 / 2.0) * longest * ASIDE;
            let points: Vec<(f64, crate::stats::Interval)> = experiment
                .cells
                .iter()
                .filter_map(|cell| Some((cell.length.tokens as f64 + aside, cell.arm(name)?.prefill_tps?)))
                .collect();
            let line = points.iter().map(|(x, rate)| (*x, rate.median));
            let series = chart.draw_series(LineSeries::new(line, color(name).stroke_width(2))).map_err(fault)?;
            series
                .label(format!("{}  {}", name.letter(), arm.arm.label))
                .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], color(name).stroke_width(2)));
            let bars = points.iter().map(|(x, rate)| {
                ErrorBar::new_vertical(*x, rate.low, rate.median, rate.high, color(name).filled(), 10)
            });
            chart.draw_series(bars).map_err(fault)?;
        }
        let labels = &mut chart.configure_series_labels();
        labels.position(SeriesLabelPosition::LowerRight).background_style(WHITE.mix(0.8)).border_style(BLACK.mix(0.3));
        labels.draw().map_err(fault)?;
        root.present().map_err(fault)?;
    }
    Ok(Some(svg))
}

/// A bar for each arm and device, made of the kinds of operations.
///
/// # Errors
///
/// If it cannot be drawn.
pub fn profile(experiment: &Experiment) -> Result<Option<String>, BenchError> {
    let mut bars: Vec<(String, BTreeMap<&str, f64>)> = Vec::new();
    for arm in &experiment.arms {
        let mut devices: BTreeMap<&str, BTreeMap<&str, f64>> = BTreeMap::new();
        for entry in arm.profile.iter().flat_map(|profile| &profile.entries) {
            *devices.entry(&entry.device).or_default().entry(&entry.kind).or_default() += entry.ms;
        }
        let name = |device: &str| format!("{} {}", arm.arm.name.letter(), device_name(device.parse().ok()));
        bars.extend(devices.into_iter().map(|(device, kinds)| (name(device), kinds)));
    }
    let kinds = kinds_with_colors(experiment);
    let parts = bars.into_iter().map(|(name, times)| {
        let mut parts: Vec<Part> = Vec::new();
        let mut start = 0.0;
        for (place, kind) in kinds.iter().enumerate() {
            let ms = times.get(kind).copied().unwrap_or(0.0);
            parts.push(Part { label: (*kind).to_owned(), color: place, start, end: start + ms });
            start += ms;
        }
        let rest: f64 = times.iter().filter(|(kind, _)| !kinds.contains(kind)).map(|(_, ms)| ms).sum();
        parts.push(Part { label: "others".to_owned(), color: MAX_KINDS, start, end: start + rest });
        (name, parts)
    });
    rows(&parts.collect::<Vec<_>>(), "milliseconds of device time")
}

/// What a device is, by its number.
pub(crate) fn device_name(number: Option<u16>) -> String {
    match number {
        Some(0) => "primary".to_owned(),
        Some(number) => format!("engine {number}"),
        None => "unknown".to_owned(),
    }
}

/// One prefill step of each arm: what ran when, device by device.
///
/// # Errors
///
/// If it cannot be drawn.
pub fn steps(experiment: &Experiment) -> Result<Option<String>, BenchError> {
    let kinds = kinds_with_colors(experiment);
    let color = |kind: &str| kinds.iter().position(|other| *other == kind).unwrap_or(MAX_KINDS);
    let mut bars: BTreeMap<(usize, u16), (String, Vec<Part>)> = BTreeMap::new();
    for (place, arm) in experiment.arms.iter().enumerate() {
        for span in arm.step.iter().flat_map(|step| &step.spans) {
            let name = format!("{} {}", arm.arm.name.letter(), device_name(Some(span.device)));
            let color = color(&span.kind);
            let label = if color == MAX_KINDS { "others".to_owned() } else { span.kind.clone() };
            let part = Part { label, color, start: span.start_us / 1e3, end: span.end_us / 1e3 };
            bars.entry((place, span.device)).or_insert_with(|| (name, Vec::new())).1.push(part);
        }
    }
    rows(&bars.into_values().collect::<Vec<_>>(), "milliseconds after the step was submitted")
}

/// The kinds that take longest, as many as have colours of their own, which are the same in all plots.
fn kinds_with_colors(experiment: &Experiment) -> Vec<&str> {
    let mut by_kind: BTreeMap<&str, f64> = BTreeMap::new();
    for entry in experiment.arms.iter().flat_map(|arm| &arm.profile).flat_map(|profile| &profile.entries) {
        *by_kind.entry(&entry.kind).or_default() += entry.ms;
    }
    for span in experiment.arms.iter().flat_map(|arm| &arm.step).flat_map(|step| &step.spans) {
        *by_kind.entry(&span.kind).or_default() += (span.end_us - span.start_us) / 1e3;
    }
    let mut kinds: Vec<(&str, f64)> = by_kind.into_iter().collect();
    kinds.sort_by(|a, b| b.1.total_cmp(&a.1));
    kinds.into_iter().take(MAX_KINDS).map(|(kind, _)| kind).collect()
}

/// Phases of the median request of the longest prompt, by arm.
///
/// # Errors
///
/// If it cannot be drawn.
pub fn timeline(experiment: &Experiment) -> Result<Option<String>, BenchError> {
    let row = |arm: &ArmRecord| {
        let phases = phases(experiment, arm.arm.name)?;
        let part = |(place, (label, start, end)): (usize, (&str, f64, f64))| Part {
            label: label.to_owned(),
            color: place,
            start,
            end,
        };
        Some((arm.arm.name.letter().to_owned(), phases.into_iter().enumerate().map(part).collect()))
    };
    rows(&experiment.arms.iter().filter_map(row).collect::<Vec<_>>(), "milliseconds after the request was sent")
}

/// Phases of the sample in the middle of the longest prompt: name, start and end in milliseconds.
pub(crate) fn phases(experiment: &Experiment, arm: ArmName) -> Option<[(&'static str, f64, f64); 4]> {
    let cell = experiment.cells.iter().max_by_key(|cell| cell.length.tokens)?;
    let mut samples: Vec<_> = cell.arm(arm)?.samples.iter().collect();
    samples.sort_by(|a, b| a.ttft_ms.total_cmp(&b.ttft_ms));
    let sample = samples.get(samples.len() / 2)?;
    let queued = sample.other_ms + sample.queue_ms;
    let first = queued + sample.prefill_ms;
    Some([
        ("HTTP and JSON", 0.0, sample.other_ms),
        ("queue", sample.other_ms, queued),
        ("prompt", queued, first),
        ("answer", first, first + sample.answer_ms),
    ])
}

struct Part {
    label: String,
    /// Place in the palette.
    color: usize,
    start: f64,
    end: f64,
}

/// Horizontal bars made of parts, with a legend.
fn rows(rows: &[(String, Vec<Part>)], what: &str) -> Result<Option<String>, BenchError> {
    let end = rows.iter().flat_map(|(_, parts)| parts).map(|part| part.end).fold(0.0, f64::max);
    if end == 0.0 {
        return Ok(None);
    }
    let mut legend: BTreeMap<usize, &str> = BTreeMap::new();
    for part in rows.iter().flat_map(|(_, parts)| parts).filter(|part| part.end > part.start) {
        legend.insert(part.color, &part.label);
    }
    let height = 70 + 34 * rows.len() as u32 + 22 * (legend.len() as u32).div_ceil(4);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let (bars, names) = root.split_vertically(height - 22 * (legend.len() as u32).div_ceil(4));
        let mut chart = ChartBuilder::on(&bars)
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(90)
            .build_cartesian_2d(0.0..end * 1.02, 0.0..rows.len() as f64)
            .map_err(fault)?;
        let name = |y: &f64| {
            let place = rows.len().checked_sub(1 + y.floor() as usize);
            let is_middle = (y.fract() - 0.5).abs() < 1e-6;
            place.filter(|_| is_middle).and_then(|place| rows.get(place)).map_or_else(String::new, |row| row.0.clone())
        };
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc(what).disable_y_mesh().y_labels(2 * rows.len() + 1).y_label_formatter(&name);
        mesh.light_line_style(WHITE).x_label_formatter(&|x| format!("{x:.0}")).draw().map_err(fault)?;
        for (place, (_, parts)) in rows.iter().enumerate() {
            let y = (rows.len() - 1 - place) as f64;
            let boxes = parts.iter().filter(|part| part.end > part.start).map(|part| {
                Rectangle::new([(part.start, y + 0.15), (part.end, y + 0.85)], Palette99::pick(part.color).filled())
            });
            chart.draw_series(boxes).map_err(fault)?;
        }
        for (idx, (place, label)) in legend.iter().enumerate() {
            let (x, y) = (100 + 210 * (idx as i32 % 4), 4 + 22 * (idx as i32 / 4));
            let square = Rectangle::new([(x, y), (x + 12, y + 12)], Palette99::pick(*place).filled());
            names.draw(&square).map_err(fault)?;
            names.draw(&Text::new((*label).to_owned(), (x + 18, y), ("sans-serif", 13))).map_err(fault)?;
        }
        root.present().map_err(fault)?;
    }
    Ok(Some(svg))
}
