//! Packing and products in plain Rust.

use std::ops::Range;

pub(super) fn pack(q: &[f32], d: usize, lanes: usize, panel: &mut [f32]) {
    for (k, column) in panel.chunks_exact_mut(lanes).enumerate() {
        for (h, place) in column.iter_mut().enumerate() {
            *place = q.get(h * d + k).copied().unwrap_or(0.0);
        }
    }
}

pub(super) fn products(panel: &[f32], lanes: usize, channels: Range<usize>, rows: &[&[f32]], out: &mut [f32]) {
    for (row, out) in rows.iter().zip(out.chunks_exact_mut(lanes)) {
        let mut sum = [0.0f32; super::LANES];
        let columns = panel[channels.start * lanes..channels.end * lanes].chunks_exact(lanes);
        for (&x, column) in row[channels.clone()].iter().zip(columns) {
            for (sum, q) in sum.iter_mut().zip(column) {
                *sum += x * q;
            }
        }
        for (out, sum) in out.iter_mut().zip(sum) {
            *out = if channels.start == 0 { sum } else { *out + sum };
        }
    }
}
