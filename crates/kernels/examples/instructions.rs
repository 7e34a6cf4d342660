//! Two kernels of fixed size at a fixed level, for `cargo xtask instructions`, which runs this under callgrind and counts the
//! instructions inside of `counted`: `instructions fp4_gemv` or `instructions attention`.

use std::hint::black_box;

use troika_base::{Format, SharedBytes, StoredTensor};
use troika_kernels::int8::{self, Int8Matrix, Product};
use troika_kernels::{CpuLevel, Ctx, RowList, Serial, Visible, attend};

/// The level whose counts are compared, whatever this machine has besides.
const LEVEL: CpuLevel = CpuLevel::Avx2;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("fp4_gemv") => fp4_gemv(),
        Some("attention") => attention(),
        other => panic!("fp4_gemv or attention, not {other:?}"),
    }
}

/// What is counted: its name is what callgrind looks for.
#[inline(never)]
fn counted(work: impl FnOnce()) {
    work();
    // The call above is not the last thing done, so it is a call.
    black_box(());
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect()
}

/// One row by 512 outputs of 1024 columns.
fn fp4_gemv() {
    let (outputs, cols) = (512, 1024);
    let bytes = |n: usize, all: u8| SharedBytes::new(vec![all; n]);
    let [data, scales, _] = Format::Mxfp4.byte_lengths(outputs, cols).expect("the shape fits");
    let parts = [bytes(data, 0x5a), bytes(scales, 127), SharedBytes::empty()];
    let stored = StoredTensor::new(Format::Mxfp4, outputs, cols, parts).expect("the parts fit");
    let w = Int8Matrix::refer(&stored).expect("fp4 codes are integers");
    let (x, mut out) = (numbers(cols), vec![0.0f32; outputs]);
    counted(|| int8::matmul(Ctx { level: LEVEL, par: &Serial }, black_box(&x), &mut [Product::new(&w, &mut out)]));
    assert!(out.iter().all(|y| y.is_finite()));
}

/// One query of 16 heads of 512 against 256 rows.
fn attention() {
    let (heads, dim, rows) = (16, 512, 256);
    let (q, keys, sink) = (numbers(heads * dim), numbers(rows * dim), numbers(heads));
    let mut out = vec![0.0f32; heads * dim];
    let visible = |_| Visible { near: &keys, far: RowList::new(dim, &[]), chosen: None };
    let ctx = Ctx { level: LEVEL, par: &Serial };
    counted(|| attend(ctx, dim, black_box(&q), &sink, visible, &mut out));
    assert!(out.iter().all(|y| y.is_finite()));
}
