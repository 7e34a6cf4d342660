//! What a procedure is for an ONNX compiler: one or two *stages*, each a few products with constant weights on a fixed number
//! of rows, and the ONNX bytes of a stage.
//!
//! Integer engines want scales of activations that are known when a graph is compiled. So the host divides each row by its
//! Euclidean norm, and weights are divided by the norm of their channel: by Cauchy and Schwarz nothing then leaves -1..1,
//! before or after the product, and one scale of 1/32767 is right for every row of every layer. Outliers cost no accuracy,
//! as they would if rows were divided by their maximum; the error is about `√K / 80,000` of a typical result. The host
//! multiplies the result by both norms again.

use std::ops::Range;

use super::proto::Message;
use crate::npu::{Body, ChannelWeights, Procedure};

/// How numbers cross a graph's edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// 16-bit activations, 8-bit weights, quantize and dequantize nodes around each product.
    Quantized,
    /// The same products on 32-bit numbers, for engines whose compilers do not take 8-bit weights.
    Float,
}

/// Steps of an activation from 0 to 1.
pub(super) const STEPS: f32 = 32767.0;
/// The code of 0.
pub(super) const ZERO: u16 = 32768;
/// Protocol buffers end at 2 GiB.
const MAX_BYTES: usize = (2 << 30) - (1 << 20);

/// The weights of one product.
pub(super) struct Weights {
    /// `[N, K]`
    codes: Vec<i8>,
    /// Reciprocal norm of each channel's codes, 1 for a channel of zeros.
    steps: Vec<f32>,
    /// What a result of each channel is multiplied by.
    pub(super) factors: Vec<f32>,
}

/// Products that are run together; one per group, each with an input of its own.
pub(super) struct Stage {
    /// Rows of a tile.
    pub(super) rows: usize,
    /// Input channels of a group.
    pub(super) cols: usize,
    /// Output channels of a group.
    pub(super) outputs: usize,
    /// One per group.
    pub(super) groups: Vec<Weights>,
}

/// The stages of a procedure: one, or two with the activation between them for an expert, whose hidden values have no range
/// that is known beforehand. Fails, with the reason, for weights that have no single scale per channel.
pub(super) fn stages(procedure: &Procedure) -> Result<Vec<Stage>, String> {
    let rows = procedure.tile;
    match &procedure.body {
        Body::Products { groups, products } => {
            let cols = products.first().map_or(0, |product| product.weights.cols());
            let of_group = |group: usize| {
                let parts = products.iter().map(|product| {
                    let first = group * (product.weights.rows() / groups);
                    (&*product.weights, first + product.channels.start..first + product.channels.end)
                });
                Weights::new(cols, parts)
            };
            let outputs = products.iter().map(|product| product.channels.len()).sum();
            let groups = (0..*groups).map(of_group).collect::<Result<_, _>>()?;
            Ok(vec![Stage { rows, cols, outputs, groups }])
        }
        Body::SharedExpert { w1, w2, w3, .. } => {
            let up = Weights::new(w1.cols(), [(&**w1, 0..w1.rows()), (&**w3, 0..w3.rows())])?;
            let down = Weights::new(w2.cols(), [(&**w2, 0..w2.rows())])?;
            Ok(vec![
                Stage { rows, cols: w1.cols(), outputs: w1.rows() + w3.rows(), groups: vec![up] },
                Stage { rows, cols: w2.cols(), outputs: w2.rows(), groups: vec![down] },
            ])
        }
    }
}

impl Weights {
    /// Some channels of several weights, one after another.
    fn new<'a>(
        cols: usize,
        parts: impl IntoIterator<Item = (&'a ChannelWeights, Range<usize>)>,
    ) -> Result<Self, String> {
        let mut all = Self { codes: Vec::new(), steps: Vec::new(), factors: Vec::new() };
        for (weights, outputs) in parts {
            let (codes, scales) =
                weights.channel_codes(outputs).ok_or("its weights have several scales per channel")?;
            for (row, scale) in codes.chunks_exact(cols).zip(scales) {
                let squares: u64 = row.iter().map(|code| u64::from(code.unsigned_abs()).pow(2)).sum();
                let norm = (squares as f64).sqrt();
                all.steps.push(if squares == 0 { 1.0 } else { (1.0 / norm) as f32 });
                all.factors.push((norm * f64::from(scale)) as f32);
            }
            all.codes.extend(codes);
        }
        Ok(all)
    }

    /// `[K, N]`, as the second operand of a product.
    fn transposed(&self, cols: usize) -> Vec<i8> {
        let outputs = self.steps.len();
        let mut columns = vec![0; self.codes.len()];
        for (output, row) in self.codes.chunks_exact(cols).enumerate() {
            row.iter().enumerate().for_each(|(col, code)| columns[col * outputs + output] = *code);
        }
        columns
    }
}

/// What input `group` of a stage is called.
pub(super) fn input_name(group: usize) -> String {
    format!("x{group}")
}

/// What output `group` of a stage is called.
pub(super) fn output_name(group: usize) -> String {
    format!("y{group}")
}

/// Element types of ONNX.
const FLOAT: u64 = 1;
const INT8: u64 = 3;
const UINT16: u64 = 4;

impl Stage {
    /// A small product, to see whether a compiler works at all.
    pub(super) fn trial(rows: usize) -> Self {
        let (cols, outputs) = (32, 8);
        let codes = (0..cols * outputs).map(|i| (i % 5) as i8 - 2).collect();
        let weights = Weights { codes, steps: vec![0.125; outputs], factors: vec![1.0; outputs] };
        Self { rows, cols, outputs, groups: vec![weights] }
    }

    /// The stage as an ONNX model (IR 10, operator set 21); fails, with the reason, if it is too large for one.
    pub(super) fn to_onnx(&self, form: Form) -> Result<Vec<u8>, String> {
        let size = if form == Form::Quantized { 1 } else { 4 } * self.groups.len() * self.cols * self.outputs;
        if size > MAX_BYTES {
            return Err(format!("{size} bytes of weights do not fit an ONNX model: {MAX_BYTES} do"));
        }
        let (mut nodes, mut initializers, mut inputs, mut outputs) = (vec![], vec![], vec![], vec![]);
        if form == Form::Quantized {
            initializers.push(tensor("scale", FLOAT, &[], &STEPS.recip().to_le_bytes()));
            initializers.push(tensor("zero", UINT16, &[], &ZERO.to_le_bytes()));
        }
        for (group, weights) in self.groups.iter().enumerate() {
            let own = |name: &str| format!("{name}{group}");
            let (x, y) = (input_name(group), output_name(group));
            let codes = weights.transposed(self.cols);
            let shape = [self.cols, self.outputs];
            match form {
                Form::Quantized => {
                    let codes: Vec<u8> = codes.iter().map(|code| *code as u8).collect();
                    initializers.push(tensor(&own("w"), INT8, &shape, &codes));
                    let steps: Vec<u8> = weights.steps.iter().flat_map(|step| step.to_le_bytes()).collect();
                    initializers.push(tensor(&own("step"), FLOAT, &[self.outputs], &steps));
                    initializers.push(tensor(&own("offset"), INT8, &[self.outputs], &vec![0; self.outputs]));
                    let (wide, matrix, product) = (own("wide"), own("matrix"), own("product"));
                    nodes.push(node("DequantizeLinear", &[&x, "scale", "zero"], &wide));
                    let dequantize = node("DequantizeLinear", &[&own("w"), &own("step"), &own("offset")], &matrix);
                    nodes.push(dequantize.message(5, &attribute("axis", 1)));
                    nodes.push(node("MatMul", &[&wide, &matrix], &product));
                    nodes.push(node("QuantizeLinear", &[&product, "scale", "zero"], &y));
                }
                Form::Float => {
                    let rows = codes.chunks_exact(self.outputs.max(1));
                    let numbers = rows.flat_map(|row| row.iter().zip(&weights.steps).map(|(c, s)| f32::from(*c) * s));
                    let bytes: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
                    initializers.push(tensor(&own("w"), FLOAT, &shape, &bytes));
                    nodes.push(node("MatMul", &[&x, &own("w")], &y));
                }
            }
            let element = if form == Form::Quantized { UINT16 } else { FLOAT };
            inputs.push(value(&x, element, [self.rows, self.cols]));
            outputs.push(value(&y, element, [self.rows, self.outputs]));
        }
        let graph = Message::default().messages(1, nodes).text(2, "procedure").messages(5, initializers);
        let graph = graph.messages(11, inputs).messages(12, outputs);
        let operators = Message::default().text(1, "").int(2, 21);
        Ok(Message::default().int(1, 10).text(2, "troika").message(7, &graph).message(8, &operators).into_bytes())
    }
}

fn tensor(name: &str, element: u64, shape: &[usize], bytes: &[u8]) -> Message {
    let dims = shape.iter().fold(Message::default(), |message, dim| message.int(1, *dim as u64));
    dims.int(2, element).text(8, name).bytes(9, bytes)
}

fn node(operator: &str, inputs: &[&str], output: &str) -> Message {
    let inputs = inputs.iter().fold(Message::default(), |message, input| message.text(1, input));
    inputs.text(2, output).text(3, &format!("make {output}")).text(4, operator)
}

/// A whole number.
fn attribute(name: &str, value: u64) -> Message {
    const INT: u64 = 2;
    Message::default().text(1, name).int(3, value).int(20, INT)
}

fn value(name: &str, element: u64, shape: [usize; 2]) -> Message {
    let dims = shape.map(|dim| Message::default().int(1, dim as u64));
    let of_tensor = Message::default().int(1, element).message(2, &Message::default().messages(1, dims));
    Message::default().text(1, name).message(2, &Message::default().message(1, &of_tensor))
}
