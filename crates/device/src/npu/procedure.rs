//! What an engine computes: products with weights of eight bits, one scale per output channel, on tiles of a fixed number of
//! rows. A procedure holds its weights once for every device that computes it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use troika_kernels::Ctx;
use troika_kernels::int8::{Int8Expert, Int8Matrix, channels_matmul, shared_expert};

use crate::slot::{Columns, Output};

/// A procedure of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcedureId(pub u32);

/// Some output channels of a weight; in a grouped product, of each group.
#[derive(Clone)]
pub struct Product {
    /// All channels, `[groups·r, K]`, one scale each.
    pub weights: Arc<Int8Matrix>,
    /// Which of the `r`.
    pub channels: Range<usize>,
}

/// The arithmetic of a procedure.
#[derive(Clone)]
pub enum Body {
    /// One product per weight, all with the same input `[T, groups·K]`; group `g` of the outputs sees its own `K` inputs.
    Products {
        /// 1 for ordinary products.
        groups: usize,
        /// One per output of the node.
        products: Vec<Product>,
    },
    /// `w2 · swiglu(w1 · x, w3 · x)`.
    SharedExpert {
        /// Gate, `[I, D]`.
        w1: Arc<Int8Matrix>,
        /// Down, `[D, I]`.
        w2: Arc<Int8Matrix>,
        /// Up, `[I, D]`.
        w3: Arc<Int8Matrix>,
        /// Clamp of gate and up.
        limit: Option<f32>,
    },
}

/// One compiled entry of an engine, before it is compiled.
pub struct Procedure {
    /// Unique in its plan.
    pub id: ProcedureId,
    /// For people: the projection and its channels.
    pub name: String,
    /// Rows of a tile.
    pub tile: usize,
    /// What it computes.
    pub body: Body,
}

impl fmt::Debug for Procedure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Procedure({}: {} x {} rows)", self.id.0, self.name, self.tile)
    }
}

impl Procedure {
    /// Input channels.
    pub fn input_cols(&self) -> usize {
        match &self.body {
            Body::Products { groups, products } => products.first().map_or(0, |p| groups * p.weights.cols()),
            Body::SharedExpert { w1, .. } => w1.cols(),
        }
    }

    /// Where `rows` of its results belong in the node's outputs.
    pub fn outputs(&self, rows: &Range<usize>) -> Vec<Columns> {
        match &self.body {
            Body::Products { groups, products } => products
                .iter()
                .map(|product| Columns {
                    rows: rows.clone(),
                    groups: *groups,
                    per_group: product.weights.rows() / groups,
                    channels: product.channels.clone(),
                })
                .collect(),
            Body::SharedExpert { w2, .. } => {
                vec![Columns { rows: rows.clone(), groups: 1, per_group: w2.rows(), channels: 0..w2.rows() }]
            }
        }
    }

    /// Numbers of all outputs of one row.
    pub fn output_cols(&self) -> usize {
        self.outputs(&(0..0)).iter().map(|columns| columns.groups * columns.channels.len()).sum()
    }

    /// Bytes of its weights as an engine keeps them: one per number, four per channel.
    pub fn weight_bytes(&self) -> u64 {
        let bytes = |rows: usize, cols: usize| (rows * (cols + 4)) as u64;
        match &self.body {
            Body::Products { groups, products } => {
                products.iter().map(|p| bytes(groups * p.channels.len(), p.weights.cols())).sum()
            }
            Body::SharedExpert { w1, w2, w3, .. } => [w1, w2, w3].iter().map(|w| bytes(w.rows(), w.cols())).sum(),
        }
    }

    /// Multiply-adds per row.
    pub fn work(&self) -> u64 {
        let work = |rows: usize, cols: usize| (rows * cols) as u64;
        match &self.body {
            Body::Products { groups, products } => {
                products.iter().map(|p| work(groups * p.channels.len(), p.weights.cols())).sum()
            }
            Body::SharedExpert { w1, w2, w3, .. } => [w1, w2, w3].iter().map(|w| work(w.rows(), w.cols())).sum(),
        }
    }

    /// Computes any number of rows on ordinary cores: activations rounded as in class `fast`, exact sums of integers, one
    /// chain in `f32` over groups of 32 columns. A row has the same bits alone and among others.
    ///
    /// - `x`   `[T, input_cols]`
    /// - `out` one per product, `[T, channels]`, overwritten; only the first products if there are fewer
    ///
    /// # Panics
    ///
    /// If the lengths disagree with the shapes above.
    pub fn compute(&self, ctx: Ctx<'_>, x: &[f32], out: &mut [Output<'_>]) {
        match &self.body {
            Body::Products { groups, products } => {
                assert!(out.len() <= products.len(), "a product for each output");
                for (Product { weights, channels }, out) in products.iter().zip(out) {
                    match out {
                        Output::Pieces(pieces) => {
                            channels_matmul(ctx, x, *groups, weights, channels.clone(), pieces);
                        }
                        Output::Rows(rows) => {
                            let mut pieces: Vec<&mut [f32]> = rows.chunks_exact_mut(channels.len()).collect();
                            channels_matmul(ctx, x, *groups, weights, channels.clone(), &mut pieces);
                        }
                    }
                }
            }
            Body::SharedExpert { w1, w2, w3, limit } => {
                let [Output::Rows(rows)] = out else { panic!("a shared expert fills whole rows of one output") };
                shared_expert(ctx, x, &Int8Expert { w1, w2, w3 }, *limit, rows);
            }
        }
    }

    /// [`Self::compute`] on the caller's thread, outputs one after another.
    ///
    /// # Panics
    ///
    /// If `x` does not hold whole rows.
    pub fn compute_alone(&self, x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.input_cols();
        let mut numbers = vec![0.0; rows * self.output_cols()];
        self.compute(Ctx::serial(), x, &mut self.surfaces(rows, &mut numbers));
        numbers
    }

    /// Cuts `numbers` into the outputs of `rows` rows, one after another.
    pub(super) fn surfaces<'a>(&self, rows: usize, numbers: &'a mut [f32]) -> Vec<Output<'a>> {
        let mut rest = &mut numbers[..rows * self.output_cols()];
        let mut outputs = Vec::new();
        for place in self.outputs(&(0..rows)) {
            let (own, left) = rest.split_at_mut(rows * place.groups * place.channels.len());
            rest = left;
            outputs.push(match place.groups {
                1 => Output::Rows(own),
                _ => Output::Pieces(own.chunks_exact_mut(place.channels.len()).collect()),
            });
        }
        outputs
    }
}
