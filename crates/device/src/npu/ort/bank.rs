//! Loaded sessions, the surfaces between them and the host, and what the host does to rows before and after.

use std::sync::Arc;

use ort::memory::Allocator;
use ort::session::{IoBinding, Session};
use ort::value::Tensor;
use troika_kernels::{Ctx, swiglu};

use super::graph::{Form, STEPS, Stage, ZERO, input_name, output_name};
use crate::npu::{Bank, Body, NpuError, Procedure};
use crate::slot::Output;

/// Memory that the host and a session share. Those of one shape serve all procedures of a bank, which run one at a time.
enum Surface {
    Codes(Tensor<u16>),
    Numbers(Tensor<f32>),
}

/// What tells surfaces apart: `true` for inputs, group, rows, columns.
type SurfaceKey = (bool, usize, usize, usize);

#[derive(Default)]
struct Surfaces(Vec<(SurfaceKey, Surface)>);

impl Surfaces {
    fn get_or_make(&mut self, key: SurfaceKey, form: Form) -> ort::Result<usize> {
        if let Some(found) = self.0.iter().position(|(other, _)| *other == key) {
            return Ok(found);
        }
        let (_, _, rows, cols) = key;
        let surface = match form {
            Form::Quantized => Surface::Codes(Tensor::new(&Allocator::default(), [rows, cols])?),
            Form::Float => Surface::Numbers(Tensor::new(&Allocator::default(), [rows, cols])?),
        };
        self.0.push((key, surface));
        Ok(self.0.len() - 1)
    }
}

/// A stage on the engine.
struct Loaded {
    session: Session,
    binding: IoBinding,
    rows: usize,
    cols: usize,
    outputs: usize,
    /// Per group and channel what results are multiplied by.
    factors: Vec<Vec<f32>>,
    /// Per group its surfaces.
    surfaces: Vec<[usize; 2]>,
}

/// See the module.
pub(super) struct OrtBank {
    procedures: Vec<(Arc<Procedure>, Vec<Loaded>)>,
    form: Form,
    surfaces: Surfaces,
    /// Norm of each row and group.
    norms: Vec<f32>,
    /// Gate and up of an expert's rows, and what becomes of them.
    halves: [Vec<f32>; 2],
    hidden: Vec<f32>,
}

impl OrtBank {
    pub(super) fn new(form: Form) -> Self {
        let (surfaces, halves) = (Surfaces::default(), [Vec::new(), Vec::new()]);
        Self { procedures: Vec::new(), form, surfaces, norms: Vec::new(), halves, hidden: Vec::new() }
    }

    /// Adds a procedure with a session for each of its stages.
    pub(super) fn push(&mut self, procedure: &Arc<Procedure>, stages: Vec<(Stage, Session)>) -> ort::Result<()> {
        let loaded =
            stages.into_iter().map(|(stage, session)| self.load(stage, session)).collect::<ort::Result<_>>()?;
        self.procedures.push((Arc::clone(procedure), loaded));
        Ok(())
    }

    fn load(&mut self, stage: Stage, session: Session) -> ort::Result<Loaded> {
        let Stage { rows, cols, outputs, groups } = stage;
        let mut binding = session.create_binding()?;
        let mut surfaces = Vec::with_capacity(groups.len());
        for group in 0..groups.len() {
            let input = self.surfaces.get_or_make((true, group, rows, cols), self.form)?;
            let output = self.surfaces.get_or_make((false, group, rows, outputs), self.form)?;
            match &mut self.surfaces.0[output].1 {
                Surface::Codes(tensor) => binding.bind_output(output_name(group), tensor)?,
                Surface::Numbers(tensor) => binding.bind_output(output_name(group), tensor)?,
            }
            surfaces.push([input, output]);
        }
        let factors = groups.into_iter().map(|weights| weights.factors).collect();
        Ok(Loaded { session, binding, rows, cols, outputs, factors, surfaces })
    }
}

impl Bank for OrtBank {
    fn run(&mut self, index: usize, x: &[f32], out: &mut [Output<'_>]) -> Result<(), NpuError> {
        let Self { procedures, surfaces, norms, halves, hidden, .. } = self;
        let (procedure, stages) = &mut procedures[index];
        let failed = |error: ort::Error| NpuError::Run { procedure: procedure.name.clone(), reason: error.to_string() };
        match &procedure.body {
            Body::Products { products, .. } => {
                let stage = &mut stages[0];
                stage.run(surfaces, x, norms).map_err(failed)?;
                let mut first = 0;
                for (product, out) in products.iter().zip(out) {
                    let width = product.channels.len();
                    match out {
                        Output::Rows(rows) => stage.take(surfaces, norms, first, rows.chunks_exact_mut(width)),
                        Output::Pieces(pieces) => {
                            stage.take(surfaces, norms, first, pieces.iter_mut().map(|piece| &mut **piece));
                        }
                    }
                    first += width;
                }
            }
            Body::SharedExpert { w1, limit, .. } => {
                let [Output::Rows(out)] = out else { panic!("a shared expert fills whole rows of one output") };
                let [up, down] = &mut stages[..] else { unreachable!("an expert has two stages") };
                let (inner, dim) = (w1.rows(), down.outputs);
                up.run(surfaces, x, norms).map_err(failed)?;
                for (half, first) in halves.iter_mut().zip([0, inner]) {
                    half.resize(up.rows * inner, 0.0);
                    up.take(surfaces, norms, first, half.chunks_exact_mut(inner));
                }
                hidden.resize(up.rows * inner, 0.0);
                swiglu(Ctx::serial(), &halves[0], &halves[1], *limit, hidden);
                down.run(surfaces, hidden, norms).map_err(failed)?;
                down.take(surfaces, norms, 0, out.chunks_exact_mut(dim));
            }
        }
        Ok(())
    }
}

impl Loaded {
    /// Runs the session on `x` `[rows, groups·cols]`; `norms` gets those of the rows of each group.
    fn run(&mut self, surfaces: &mut Surfaces, x: &[f32], norms: &mut Vec<f32>) -> ort::Result<()> {
        let groups = self.factors.len();
        norms.clear();
        norms.extend(x.chunks_exact(self.cols).map(norm));
        assert_eq!(norms.len(), self.rows * groups, "x must be [{}, {groups} x {}]", self.rows, self.cols);
        for (group, [input, _]) in self.surfaces.iter().enumerate() {
            let rows = x.chunks_exact(self.cols).zip(&*norms).skip(group).step_by(groups);
            // Bound anew for each run: a provider with memory of its own copies when an input is bound.
            match &mut surfaces.0[*input].1 {
                Surface::Codes(tensor) => {
                    let codes = tensor.extract_tensor_mut().1;
                    rows.zip(codes.chunks_exact_mut(self.cols)).for_each(|((x, norm), codes)| {
                        let steps = reciprocal(*norm) * STEPS;
                        codes.iter_mut().zip(x).for_each(|(code, x)| *code = round(x * steps));
                    });
                    self.binding.bind_input(input_name(group), tensor)?;
                }
                Surface::Numbers(tensor) => {
                    let numbers = tensor.extract_tensor_mut().1;
                    rows.zip(numbers.chunks_exact_mut(self.cols)).for_each(|((x, norm), numbers)| {
                        let factor = reciprocal(*norm);
                        numbers.iter_mut().zip(x).for_each(|(number, x)| *number = x * factor);
                    });
                    self.binding.bind_input(input_name(group), tensor)?;
                }
            }
        }
        self.session.run_binding(&self.binding)?;
        Ok(())
    }

    /// Writes channels from `first` on of every row and group, as many as each of `out` holds.
    fn take<'a>(&self, surfaces: &Surfaces, norms: &[f32], first: usize, out: impl Iterator<Item = &'a mut [f32]>) {
        let groups = self.factors.len();
        for ((i, out), norm) in out.enumerate().zip(norms) {
            let (row, group) = (i / groups, i % groups);
            let at = row * self.outputs + first;
            let factors = &self.factors[group][first..first + out.len()];
            match &surfaces.0[self.surfaces[group][1]].1 {
                Surface::Codes(tensor) => {
                    let (codes, norm) = (&tensor.extract_tensor().1[at..at + out.len()], norm / STEPS);
                    out.iter_mut().zip(codes).zip(factors).for_each(|((out, code), factor)| {
                        *out = (i32::from(*code) - i32::from(ZERO)) as f32 * (norm * factor);
                    });
                }
                Surface::Numbers(tensor) => {
                    let numbers = &tensor.extract_tensor().1[at..at + out.len()];
                    out.iter_mut().zip(numbers).zip(factors).for_each(|((out, number), factor)| {
                        *out = number * (norm * factor);
                    });
                }
            }
        }
    }
}

/// Euclidean norm; NaN if a number, or the norm itself, is not finite, which makes the row's results NaN.
fn norm(x: &[f32]) -> f32 {
    let (lanes, rest) = x.as_chunks::<8>();
    let mut sums = [0.0f64; 8];
    for lane in lanes {
        sums.iter_mut().zip(lane).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
    }
    let rest: f64 = rest.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let norm = (sums.iter().sum::<f64>() + rest).sqrt() as f32;
    if norm.is_finite() { norm } else { f32::NAN }
}

/// What a row is multiplied by; 0 where its results are 0 or not a number whatever the engine says, since they are
/// multiplied by the norm again.
fn reciprocal(norm: f32) -> f32 {
    if norm.is_normal() { norm.recip() } else { 0.0 }
}

/// The code of a number of at most [`STEPS`] steps, rounded to the nearest.
fn round(steps: f32) -> u16 {
    /// 1.5 · 2^23: leaves a whole number in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    (steps + ROUND).to_bits() as u16 ^ ZERO
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_nearest_ones() {
        let steps = [0.0f32, 0.4, 0.6, -0.6, 1.5, 32767.0, -32767.0, 1234.49, -0.0];
        let codes = steps.map(|steps| i32::from(round(steps)) - i32::from(ZERO));
        assert_eq!(codes, [0, 0, 1, -1, 2, 32767, -32767, 1234, 0]);
    }

    #[test]
    fn norms_are_of_whole_rows() {
        assert_eq!(norm(&[3.0, 4.0]), 5.0);
        assert_eq!(norm(&[2.0; 25]), 10.0, "three lanes and one more");
        assert_eq!(norm(&[3e30; 16]), 1.2e31, "squares leave the range of f32");
        assert!([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].iter().all(|x| norm(&[1.0, *x]).is_nan()));
        assert_eq!([0.0, 1e-40, f32::NAN].map(reciprocal), [0.0; 3]);
    }
}
