//! Decoding in plain Rust.

use super::{E2M1, E4M3, RowCodes, bf16_to_f32, f16_to_f32};
use troika_base::storage::MX_GROUP;

pub(super) fn decode(codes: RowCodes, out: &mut [f32]) {
    match codes {
        RowCodes::F32(bytes) => plain_f32(bytes, out),
        RowCodes::Bf16(bytes) => plain_bf16(bytes, out),
        RowCodes::F16(bytes) => {
            for (out, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f16_to_f32(u16::from_le_bytes(b));
            }
        }
        RowCodes::E4m3 { codes, scales, group } => {
            for (g, (out, codes)) in out.chunks_mut(group).zip(codes.chunks(group)).enumerate() {
                e4m3_group(codes, scales.get(g), out);
            }
        }
        RowCodes::E2m1 { codes, scales } => {
            for (g, (out, codes)) in out.chunks_mut(MX_GROUP).zip(codes.chunks(MX_GROUP / 2)).enumerate() {
                let scale = scales.get(g);
                for (i, out) in out.iter_mut().enumerate() {
                    *out = E2M1[usize::from((codes[i / 2] >> (4 * (i % 2))) & 15)] * scale;
                }
            }
        }
        RowCodes::Affine { codes, bits, group, scales, biases } => {
            let bits = usize::from(bits);
            let groups = out.chunks_mut(group).zip(codes.chunks(group / 8 * bits));
            for (g, (out, codes)) in groups.enumerate() {
                let (scale, bias) = (scales.get(g), biases.get(g));
                // Eight codes fill `bits` whole bytes.
                for (out, codes) in out.chunks_mut(8).zip(codes.chunks_exact(bits)) {
                    let word = codes.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
                    for (i, out) in out.iter_mut().enumerate() {
                        let q = (word >> (i * bits)) & ((1 << bits) - 1);
                        *out = q as f32 * scale + bias;
                    }
                }
            }
        }
    }
}

#[inline(always)]
pub(super) fn plain_f32(bytes: &[u8], out: &mut [f32]) {
    for (out, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = f32::from_le_bytes(b);
    }
}

#[inline(always)]
pub(super) fn plain_bf16(bytes: &[u8], out: &mut [f32]) {
    for (out, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = bf16_to_f32(u16::from_le_bytes(b));
    }
}

pub(super) fn e4m3_group(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = E4M3[usize::from(code)] * scale;
    }
}
