//! What each operation does on the CPU: takes its values, calls its kernel.

use std::sync::MutexGuard;

use troika_graph::op::{
    Attention, AttentionPattern, Compressor, HcWeights, HyperConnection, Indexer, RowRounding, Scoring,
};
use troika_graph::{Acceptance, Node, NodeId, Op, Segment, StatePart, StepRows, ValueId, WeightRef};
use troika_kernels as kernels;
use troika_kernels::int8::{self, Int8Expert, Product};
use troika_kernels::{
    CodedRows, Ctx, ExpertWeights, Far, HcParams, Keys, RouteParams, RowCodes, RowList, Rows, Seen, Visible,
};

use super::weights::{CpuWeights, Experts, Weight};
use crate::run::StepRun;
use crate::state::{LayerState, Pool};

/// A node with everything it may touch.
struct Call<'a> {
    ctx: Ctx<'a>,
    weights: &'a CpuWeights,
    run: &'a StepRun,
    node: &'a Node,
}

/// Does one node.
///
/// # Panics
///
/// If graph, weights and state do not belong together: all of them are made from one configuration.
pub(super) fn execute(ctx: Ctx<'_>, weights: &CpuWeights, run: &StepRun, node: NodeId) {
    let call = Call { ctx, weights, run, node: run.graph().node(node) };
    match &call.node.op {
        Op::Embed { table, streams } => call.embed(table, *streams),
        Op::HcPre { hc, weights } => call.hc_pre(hc, weights),
        Op::HcPost { hc } => call.hc_post(hc),
        Op::HcHead { hc, weights } => call.hc_head(hc, weights),
        Op::RmsNorm { weight, eps } => call.rms_norm(weight, *eps),
        Op::Linear { weights } => call.linear(weights),
        Op::GroupedLinear { weight, groups } => call.grouped_linear(weight, *groups),
        Op::Rope { heads, rope, head_norm_eps, rounding } => {
            call.rope(*heads, &rope.freqs, rope.inverse, *head_norm_eps, *rounding);
        }
        Op::AppendWindow => call.append_window(),
        Op::Compress { compressor } => call.compress(compressor),
        Op::IndexTopk { indexer } => call.index_topk(indexer),
        Op::Attend { attention } => call.attend(attention),
        Op::Route { router } => call.route(router),
        Op::Experts { first, w1, top_k, limit, .. } => call.experts(*first, w1.len(), *top_k, *limit),
        Op::SharedExpert { w1, w2, w3, limit } => call.shared_expert([w1, w2, w3], *limit),
        Op::Add => call.add(),
        Op::GatherRows => call.gather_rows(),
        Op::StreamMean { streams } => call.stream_mean(*streams),
        Op::ConcatColumns => call.concat_columns(),
        Op::Copy => call.copy(),
        Op::MarkovDraft { w1, w2, confidence } => call.markov_draft(w1, w2, confidence),
    }
}

impl Call<'_> {
    fn input(&self, index: usize) -> ValueId {
        self.node.inputs[index]
    }

    fn output(&self, index: usize) -> ValueId {
        self.node.outputs[index]
    }

    fn cols(&self, value: ValueId) -> usize {
        self.run.graph().value(value).cols
    }

    /// Runs `body` on the inputs' floats and the first output's, which share no memory.
    fn map<const N: usize>(&self, body: impl FnOnce([&[f32]; N], &mut [f32])) {
        let guards: [_; N] = std::array::from_fn(|index| self.run.read_f32(self.input(index)));
        let inputs = std::array::from_fn(|index| &guards[index][..self.run.len(self.input(index))]);
        let mut output = self.run.write_f32(self.output(0));
        body(inputs, &mut output[..self.run.len(self.output(0))]);
    }

    /// Runs `body` on the first output, which overwrites an input.
    fn update(&self, body: impl FnOnce(&mut [f32])) {
        let mut output = self.run.write_f32(self.output(0));
        body(&mut output[..self.run.len(self.output(0))]);
    }

    /// Runs `body` on the state of every segment's sequence in this node's layer.
    fn each_segment(&self, mut body: impl FnMut(&Segment, MutexGuard<'_, LayerState>)) {
        for (segment, state) in self.run.rows().segments.iter().zip(self.run.states()) {
            body(segment, state.layer(self.node.scope));
        }
    }

    fn embed(&self, table: &WeightRef, streams: usize) {
        let table = self.weights.table_of_rows(table);
        self.map(|[], out| kernels::embed(self.ctx, table, &self.run.rows().tokens, streams, out));
    }

    fn hc_params(&self, hc: &HyperConnection, weights: &HcWeights) -> HcParams<'_> {
        HcParams {
            streams: hc.streams,
            dim: hc.dim,
            sinkhorn_iters: hc.sinkhorn_iters,
            hc_eps: hc.hc_eps,
            norm_eps: hc.norm_eps,
            fn_: self.weights.vector(&weights.fn_),
            base: self.weights.vector(&weights.base),
            scale: self.weights.vector(&weights.scale),
        }
    }

    fn hc_pre(&self, hc: &HyperConnection, weights: &HcWeights) {
        let params = self.hc_params(hc, weights);
        let mut mix = self.run.write_f32(self.output(1));
        let mix = &mut mix[..self.run.len(self.output(1))];
        self.map(|[streams], collapsed| kernels::hc_pre(self.ctx, &params, streams, collapsed, mix));
        if let Some(pre) = self.node.outputs.get(2) {
            let streams = self.run.read_f32(self.input(0));
            let mut pre_out = self.run.write_f32(*pre);
            let streams = &streams[..self.run.len(self.input(0))];
            kernels::hc_mix(self.ctx, &params, streams, &mut pre_out[..self.run.len(*pre)], mix);
        }
    }

    fn hc_post(&self, hc: &HyperConnection) {
        let (y, mix) = (self.run.read_f32(self.input(1)), self.run.read_f32(self.input(2)));
        let (y, mix) = (&y[..self.run.len(self.input(1))], &mix[..self.run.len(self.input(2))]);
        self.update(|streams| kernels::hc_post(self.ctx, hc.streams, hc.dim, y, mix, streams));
    }

    fn hc_head(&self, hc: &HyperConnection, weights: &HcWeights) {
        let params = self.hc_params(hc, weights);
        self.map(|[streams], out| kernels::hc_head(self.ctx, &params, streams, out));
    }

    fn rms_norm(&self, weight: &WeightRef, eps: f32) {
        let weight = self.weights.vector(weight);
        self.map(|[x], out| kernels::rms_norm(self.ctx, x, weight.len(), Some(weight), eps, out));
    }

    fn linear(&self, weights: &[WeightRef]) {
        let x = self.run.read_f32(self.input(0));
        let x = &x[..self.run.len(self.input(0))];
        let mut outputs: Vec<_> = self.node.outputs.iter().map(|output| self.run.write_f32(*output)).collect();
        let mut integer = Vec::with_capacity(weights.len());
        for ((weight, output), out) in weights.iter().zip(&self.node.outputs).zip(&mut outputs) {
            let out = &mut out[..self.run.len(*output)];
            match self.weights.matrix(weight) {
                Weight::Float(w) => kernels::matmul(self.ctx, x, w, out),
                Weight::Int8(w) => integer.push(Product::new(w, out)),
            }
        }
        int8::matmul(self.ctx, x, &mut integer);
    }

    fn grouped_linear(&self, weight: &WeightRef, groups: usize) {
        let weight = self.weights.matrix(weight);
        self.map(|[x], out| match weight {
            Weight::Float(w) => kernels::grouped_matmul(self.ctx, x, groups, w, out),
            Weight::Int8(w) => int8::grouped_matmul(self.ctx, x, groups, w, out),
        });
    }

    fn rope(&self, heads: usize, freqs: &[f64], inverse: bool, head_norm_eps: Option<f32>, rounding: RowRounding) {
        let dim = self.cols(self.output(0)) / heads;
        let positions = self.run.positions();
        self.update(|x| {
            if let Some(eps) = head_norm_eps {
                kernels::rms_norm_in_place(self.ctx, x, dim, None, eps);
            }
            kernels::rope(self.ctx, x, heads, positions, freqs, inverse);
            if rounding != RowRounding::None {
                kernels::for_each_row(self.ctx, x, dim, |_, row| round_row(row, freqs.len() * 2, rounding));
            }
        });
    }

    fn append_window(&self) {
        let rows = self.run.read_f32(self.input(0));
        let dim = self.cols(self.input(0));
        self.each_segment(|segment, mut layer| {
            let range = segment.row * dim..(segment.row + segment.rows) * dim;
            layer.window.append(segment.position, &rows[range]);
        });
    }

    fn compress(&self, compressor: &Compressor) {
        let (kv, gate) = (self.run.read_f32(self.input(0)), self.run.read_f32(self.input(1)));
        let width = self.cols(self.input(0));
        let ape = self.weights.vector(&compressor.ape);
        let part = self.node.state[0].part;
        self.each_segment(|segment, mut layer| {
            let range = segment.row * width..(segment.row + segment.rows) * width;
            let mut gate = gate[range.clone()].to_vec();
            for (row, gate) in gate.chunks_exact_mut(width).enumerate() {
                let bias = (segment.position + row) % compressor.ratio * width;
                gate.iter_mut().zip(&ape[bias..bias + width]).for_each(|(gate, bias)| *gate += bias);
            }
            let pool = match part {
                StatePart::Index => layer.index.as_mut(),
                _ => layer.compressed.as_mut(),
            };
            let pool = pool.expect("the layer has this compressor");
            assert_eq!(pool.end(), segment.position, "tokens must be compressed in order");
            pool.append(&kv[range], &gate);
            self.finish_rows(compressor, pool);
            if segment.acceptance == Acceptance::Whole {
                pool.trim(segment.position + segment.rows);
            }
        });
    }

    /// Pools every block whose tokens are all there.
    fn finish_rows(&self, compressor: &Compressor, pool: &mut Pool) {
        let (ratio, dim) = (compressor.ratio, compressor.dim);
        let first = pool.rows.len();
        let count = pool.end() / ratio - first;
        let norm = self.weights.vector(&compressor.norm);
        let rotary = compressor.freqs.len() * 2;
        let mut rows = vec![0.0; count * dim];
        kernels::for_each_row(self.ctx, &mut rows, dim, |index, row| {
            let block = (first + index) * ratio;
            let mut entries: Vec<(&[f32], &[f32])> = Vec::with_capacity(2 * ratio);
            if compressor.overlap {
                // Lane A of the block before; absent for the first block.
                for position in block.saturating_sub(ratio)..block {
                    let (kv, gate) = pool.token(position).expect("the block before is kept");
                    entries.push((&kv[..dim], &gate[..dim]));
                }
            }
            let lane = if compressor.overlap { dim } else { 0 };
            for position in block..block + ratio {
                let (kv, gate) = pool.token(position).expect("the block's tokens are kept");
                entries.push((&kv[lane..], &gate[lane..]));
            }
            kernels::pool(self.ctx.level, &entries, row);
            let serial = Ctx { level: self.ctx.level, par: &kernels::Serial };
            kernels::rms_norm_in_place(serial, row, dim, Some(norm), compressor.norm_eps);
            kernels::rope_row(row, block as i64, &compressor.freqs, false);
            round_row(row, rotary, compressor.rounding);
        });
        for row in rows.chunks_exact(dim) {
            pool.rows.push(row);
        }
    }

    fn index_topk(&self, indexer: &Indexer) {
        let (queries, head_weights) = (self.run.read_f32(self.input(0)), self.run.read_f32(self.input(1)));
        let mut ids = self.run.write_i32(self.output(0));
        let mut kept_scores = self.node.outputs.get(1).map(|scores| (self.run.write_f32(*scores), self.cols(*scores)));
        let (heads, width, top_k) = (indexer.heads, indexer.heads * indexer.dim, indexer.top_k);
        let scale = (width as f32).sqrt().recip();
        self.each_segment(|segment, mut layer| {
            let rows = &mut layer.index.as_mut().expect("the layer has an indexer").rows;
            let keys = match self.weights.rounds_rows() {
                true => Keys::Rounded(rows.key_codes(self.ctx)),
                false => Keys::Plain(rows.list()),
            };
            let index = kernels::Index { heads, top_k, scale, keys };
            let visible = |row: usize| (segment.position + row + 1) / indexer.ratio;
            let range = |width: usize| segment.row * width..(segment.row + segment.rows) * width;
            let (iq, iw) = (&queries[range(width)], &head_weights[range(heads)]);
            kernels::index_topk(self.ctx, &index, iq, iw, visible, &mut ids[range(top_k)]);
            if let Some((scores, cols)) = &mut kept_scores {
                for row in 0..segment.rows {
                    let out = &mut scores[(segment.row + row) * *cols..][..*cols];
                    out.fill(f32::NEG_INFINITY);
                    let (iq, iw) = (&iq[row * width..(row + 1) * width], &iw[row * heads..(row + 1) * heads]);
                    kernels::index_scores(self.ctx.level, &index, iq, iw, &mut out[..visible(row)]);
                }
            }
        });
    }

    fn attend(&self, attention: &Attention) {
        let q = self.run.read_f32(self.input(0));
        let sink = self.weights.vector(&attention.sink);
        let width = attention.heads * attention.head_dim;
        let second = self.node.inputs.get(1).copied();
        let ids = second
            .filter(|_| attention.pattern == AttentionPattern::Causal)
            .map(|v| (self.run.read_i32(v), self.cols(v)));
        let block = second.filter(|_| attention.pattern == AttentionPattern::Block).map(|v| self.run.read_f32(v));
        let mut out = self.run.write_f32(self.output(0));
        self.each_segment(|segment, mut layer| {
            let range = segment.row * width..(segment.row + segment.rows) * width;
            let own = block.as_ref().map(|block| {
                &block[segment.row * attention.head_dim..(segment.row + segment.rows) * attention.head_dim]
            });
            let own = own.as_slice();
            if self.weights.rounds_rows() {
                let own = coded(self.ctx, attention.head_dim, own);
                let rows = all_rows(self.ctx, attention, segment, &mut layer, &own);
                let seen = |row: usize| {
                    let at = segment.row + row;
                    let chosen = ids.as_ref().map(|(ids, k)| &ids[at * k..(at + 1) * k]);
                    seen_rows(attention, segment, row, &rows, chosen)
                };
                return kernels::attend_rounded(self.ctx, &q[range.clone()], sink, &rows, seen, &mut out[range]);
            }
            let visible = |row: usize| match own {
                [] => {
                    let at = segment.row + row;
                    let chosen = ids.as_ref().map(|(ids, k)| &ids[at * k..(at + 1) * k]);
                    causal_rows(attention, segment.position + row, &layer, chosen)
                }
                own => block_rows(attention, segment.position, &layer, own),
            };
            kernels::attend(self.ctx, attention.head_dim, &q[range.clone()], sink, visible, &mut out[range]);
        });
    }

    fn route(&self, router: &troika_graph::op::Router) {
        let params = RouteParams {
            scoring: match router.scoring {
                Scoring::SqrtSoftplus => kernels::Scoring::SqrtSoftplus,
                Scoring::Sigmoid => kernels::Scoring::Sigmoid,
                Scoring::Softmax => kernels::Scoring::Softmax,
            },
            experts: router.experts,
            top_k: router.top_k,
            bias: router.bias.as_ref().map(|bias| self.weights.vector(bias)),
            table: router.table.as_ref().map(|table| self.weights.table(table)),
            normalise: router.normalise,
            scaling: router.scaling,
        };
        let logits = self.run.read_f32(self.input(0));
        let logits = &logits[..self.run.len(self.input(0))];
        let mut ids = self.run.write_i32(self.output(0));
        let ids = &mut ids[..self.run.len(self.output(0))];
        let mut weights = self.run.write_f32(self.output(1));
        let weights = &mut weights[..self.run.len(self.output(1))];
        let tokens = &self.run.rows().tokens;
        match self.node.outputs.get(2) {
            None => kernels::route(self.ctx, &params, logits, tokens, ids, weights),
            Some(kept) => {
                let mut scores = self.run.write_f32(*kept);
                let scores = &mut scores[..self.run.len(*kept)];
                kernels::route_with_scores(self.ctx, &params, logits, tokens, ids, weights, scores);
            }
        }
    }

    fn experts(&self, first: usize, count: usize, top_k: usize, limit: Option<f32>) {
        let x = self.run.read_f32(self.input(0));
        let (ids, weights) = (self.run.read_i32(self.input(1)), self.run.read_f32(self.input(2)));
        let experts = self.weights.experts(self.node.scope, first, count);
        let x = &x[..self.run.len(self.input(0))];
        let ids = &ids[..self.run.len(self.input(1))];
        let weights = &weights[..self.run.len(self.input(2))];
        self.update(|acc| {
            if first == 0 {
                acc.fill(0.0);
            }
            match &experts {
                Experts::Float(experts) => {
                    kernels::routed_experts(self.ctx, x, ids, weights, top_k, first, experts, limit, acc);
                }
                Experts::Int8(experts) => {
                    int8::routed_experts(self.ctx, x, ids, weights, top_k, first, experts, limit, acc);
                }
            }
        });
    }

    fn shared_expert(&self, [w1, w2, w3]: [&WeightRef; 3], limit: Option<f32>) {
        let weights = [w1, w2, w3].map(|weight| self.weights.matrix(weight));
        self.map(|[x], out| match weights {
            [Weight::Float(w1), Weight::Float(w2), Weight::Float(w3)] => {
                kernels::shared_expert(self.ctx, x, &ExpertWeights { w1, w2, w3 }, limit, out);
            }
            [Weight::Int8(w1), Weight::Int8(w2), Weight::Int8(w3)] => {
                int8::shared_expert(self.ctx, x, &Int8Expert { w1, w2, w3 }, limit, out);
            }
            _ => panic!("the three weights of a shared expert have one form"),
        });
    }

    fn add(&self) {
        let b = self.run.read_f32(self.input(1));
        let b = &b[..self.run.len(self.input(1))];
        self.update(|a| kernels::add(self.ctx, a, b));
    }

    fn gather_rows(&self) {
        let width = self.cols(self.input(0));
        self.map(|[x], out| {
            for (row, out) in self.run.rows().logit_rows.iter().zip(out.chunks_exact_mut(width)) {
                out.copy_from_slice(&x[row * width..(row + 1) * width]);
            }
        });
    }

    fn stream_mean(&self, streams: usize) {
        let dim = self.cols(self.output(0));
        self.map(|[x], out| kernels::stream_mean(self.ctx, streams, dim, x, out));
    }

    fn concat_columns(&self) {
        let mut out = self.run.write_f32(self.output(0));
        let total = self.cols(self.output(0));
        let mut first = 0;
        for input in &self.node.inputs {
            let (x, cols) = (self.run.read_f32(*input), self.cols(*input));
            for (row, x) in x[..self.run.len(*input)].chunks_exact(cols).enumerate() {
                out[row * total + first..][..cols].copy_from_slice(x);
            }
            first += cols;
        }
    }

    fn copy(&self) {
        self.map(|[x], out| out.copy_from_slice(x));
    }

    fn markov_draft(&self, w1: &WeightRef, w2: &WeightRef, confidence: &WeightRef) {
        let (vocab, rank) = (w2.rows, w2.cols);
        let (w1, w2) = (self.weights.table_of_rows(w1), self.weights.table_of_rows(w2));
        let mut confidence_weight = vec![0.0; confidence.cols];
        kernels::row_to_f32(self.weights.table_of_rows(confidence), 0, &mut confidence_weight);
        let hidden = self.run.read_f32(self.input(1));
        let dim = self.cols(self.input(1));
        let mut ids = self.run.write_i32(self.output(1));
        let mut confidences = self.run.write_f32(self.output(2));
        let StepRows { tokens, segments, .. } = self.run.rows();
        // One row of each sequence at a time, since the weights are read as often.
        let mut previous: Vec<usize> = segments.iter().map(|segment| tokens[segment.row] as usize).collect();
        let (mut embeddings, mut bias) = (vec![0.0; segments.len() * rank], vec![0.0; segments.len() * vocab]);
        self.update(|logits| {
            for b in 0..segments[0].rows {
                for (previous, embedding) in previous.iter().zip(embeddings.chunks_exact_mut(rank)) {
                    kernels::row_to_f32(w1, *previous, embedding);
                }
                kernels::matmul(self.ctx, &embeddings, w2, &mut bias);
                let of_each = embeddings.chunks_exact(rank).zip(bias.chunks_exact(vocab));
                for ((segment, previous), (embedding, bias)) in segments.iter().zip(&mut previous).zip(of_each) {
                    let row = segment.row + b;
                    let logits = &mut logits[row * vocab..(row + 1) * vocab];
                    logits.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias);
                    let features = hidden[row * dim..(row + 1) * dim].iter().chain(embedding);
                    confidences[row] = features.zip(&confidence_weight).map(|(x, w)| x * w).sum();
                    *previous = kernels::argmax(logits);
                    ids[row] = *previous as i32;
                }
            }
        });
    }
}

/// Rows the token at `t` sees, oldest first: the window, then the chosen (or all visible) compressed rows (6.2).
fn causal_rows<'a>(attention: &Attention, t: usize, layer: &'a LayerState, chosen: Option<&'a [i32]>) -> Visible<'a> {
    let near = layer.window.rows((t + 1).saturating_sub(attention.window)..t + 1);
    if attention.ratio == 0 {
        return Visible { near, far: RowList::new(attention.head_dim, &[]), chosen: None };
    }
    let compressed = layer.compressed.as_ref().expect("the layer has a compressor").rows.list();
    let far = if chosen.is_some() { compressed } else { compressed.first((t + 1) / attention.ratio) };
    Visible { near, far, chosen }
}

/// Rows a query of the drafter's block sees: the stage's context, then the whole block, `own` (10.2).
fn block_rows<'a>(attention: &Attention, position: usize, layer: &'a LayerState, own: &'a [&'a [f32]]) -> Visible<'a> {
    let end = position.min(layer.window.end());
    let first = position.saturating_sub(attention.window).max(layer.window.first());
    let near = layer.window.rows(first..end);
    Visible { near, far: RowList::new(attention.head_dim, own), chosen: None }
}

/// The rows of the drafter's block, rounded.
fn coded(ctx: Ctx, dim: usize, own: &[&[f32]]) -> RowCodes {
    let (rows, mut codes) = (RowList::new(dim, own), RowCodes::new(dim));
    codes.extend(ctx, rows.len(), |i| rows.row(i));
    codes
}

/// Every row that a query of the segment may see, as [`causal_rows`] and [`block_rows`] choose from them, rounded.
fn all_rows<'a>(
    ctx: Ctx,
    attention: &Attention,
    segment: &Segment,
    layer: &'a mut LayerState,
    own: &'a RowCodes,
) -> Rows<'a> {
    let (position, window) = (segment.position, attention.window);
    if attention.pattern == AttentionPattern::Block {
        let end = position.min(layer.window.end());
        let first = position.saturating_sub(window).max(layer.window.first());
        return Rows { near: layer.window.codes(ctx, first..end), far: own.rows(0..own.len()) };
    }
    let end = position + segment.rows;
    let near = layer.window.codes(ctx, (position + 1).saturating_sub(window)..end);
    let far = match attention.ratio {
        0 => CodedRows::none(attention.head_dim),
        ratio => layer.compressed.as_mut().expect("the layer has a compressor").rows.codes(ctx).first(end / ratio),
    };
    Rows { near, far }
}

/// Which of [`all_rows`] query `row` of the segment sees.
fn seen_rows<'a>(
    attention: &Attention,
    segment: &Segment,
    row: usize,
    rows: &Rows,
    chosen: Option<&'a [i32]>,
) -> Seen<'a> {
    if attention.pattern == AttentionPattern::Block {
        return Seen { near: 0..rows.near.len(), far: Far::First(rows.far.len()) };
    }
    let (t, window) = (segment.position + row, attention.window);
    let first = (segment.position + 1).saturating_sub(window);
    let far = chosen.map_or(Far::First((t + 1).checked_div(attention.ratio).unwrap_or(0)), Far::Chosen);
    Seen { near: (t + 1).saturating_sub(window) - first..t + 1 - first, far }
}

fn round_row(row: &mut [f32], rotary: usize, rounding: RowRounding) {
    match rounding {
        RowRounding::None => {}
        RowRounding::Fp8NonRotary => {
            let plain = row.len() - rotary;
            kernels::fake_fp8(&mut row[..plain], 64);
        }
        RowRounding::HadamardFp4 => {
            kernels::hadamard(row);
            kernels::fake_fp4(row, 32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Powers of two as scales make the size of a group visible only where a number is too small for its group.
    #[test]
    fn fp8_groups_have_64_channels_and_leave_the_rotary_ones() {
        const TOO_SMALL: f32 = 5e-4;
        let mut row = [0.0; 192];
        row[0] = 448.0;
        // The last of the first group, the first of the second, the first two rotary ones.
        [row[63], row[64], row[128], row[129]] = [TOO_SMALL, TOO_SMALL, 448.1, TOO_SMALL];
        round_row(&mut row, 64, RowRounding::Fp8NonRotary);
        assert_eq!(row[0], 448.0);
        assert_eq!(row[63], 0.0);
        assert!((row[64] - TOO_SMALL).abs() < TOO_SMALL / 16.0, "{}", row[64]);
        assert_eq!(row[128..130], [448.1, TOO_SMALL]);
    }
}
