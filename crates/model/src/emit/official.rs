//! How the official release stores each weight (model spec 3.1), for costing a model whose weights are not at hand.

use troika_base::{Format, storage::ScaleFormat};
use troika_graph::{Role, WeightRef};

/// The format of `role` in the official layout.
pub fn official_format(role: Role) -> Format {
    use Role as R;
    match role {
        R::ExpertW1(_) | R::ExpertW2(_) | R::ExpertW3(_) => Format::Mxfp4,
        R::WqA
        | R::WqB
        | R::Wkv
        | R::WoA
        | R::WoB
        | R::IndexerWqB
        | R::SharedW1
        | R::SharedW2
        | R::SharedW3
        | R::MainProj => Format::Fp8Tile { scale: ScaleFormat::E8m0 },
        R::Embed | R::Head | R::Norm | R::AttnNorm | R::FfnNorm | R::QNorm | R::KvNorm | R::Gate => Format::Bf16,
        R::CompressorWkv | R::CompressorWgate | R::CompressorNorm => Format::Bf16,
        R::IndexerWeightsProj | R::IndexerCompressorWkv | R::IndexerCompressorWgate | R::IndexerCompressorNorm => {
            Format::Bf16
        }
        R::MainNorm | R::MarkovW1 | R::MarkovW2 | R::ConfidenceProj => Format::Bf16,
        R::HcHeadFn | R::HcHeadBase | R::HcHeadScale | R::HcAttnFn | R::HcAttnBase | R::HcAttnScale => Format::F32,
        R::HcFfnFn | R::HcFfnBase | R::HcFfnScale | R::AttnSink | R::GateBias => Format::F32,
        R::CompressorApe | R::IndexerCompressorApe => Format::F32,
        R::GateTid2eid => Format::I64,
    }
}

/// Bytes of `weight` in the official layout, scales included. Where its format cannot hold the shape (expert widths that are
/// no multiple of 32), bf16 is counted.
pub fn official_bytes(weight: &WeightRef) -> u64 {
    let of = |format: Format| format.byte_lengths(weight.rows, weight.cols);
    let lengths = of(official_format(weight.key.role)).or_else(|| of(Format::Bf16)).unwrap_or_default();
    lengths.iter().map(|bytes| *bytes as u64).sum()
}
