"""The official tensor names of a model, each with a view of the parameter that holds it.

One list serves both directions: an exporter reads the views, a loader copies
into them. `kind` is the storage class of the official layout:

  fp8   e4m3 with one power-of-two scale per 128x128 tile
  fp4   e2m1, two a byte, one scale per row and 32 columns
  bf16, f32, i64
"""

from typing import Iterator, NamedTuple

import torch


class Tensor(NamedTuple):
    name: str
    view: torch.Tensor
    kind: str


def trunk_tensors(model) -> Iterator[Tensor]:
    yield Tensor("embed.weight", model.embed.data, "bf16")
    yield Tensor("head.weight", model.head.data, "bf16")
    yield Tensor("norm.weight", model.norm.data, "bf16")
    yield from stream_head_tensors("", model.hc_head)
    for i, block in enumerate(model.blocks):
        yield from block_tensors(f"layers.{i}.", block)


def stream_head_tensors(prefix: str, head) -> Iterator[Tensor]:
    for part in ("fn", "base", "scale"):
        yield Tensor(f"{prefix}hc_head_{part}", getattr(head, part).data, "f32")


def block_tensors(prefix: str, block) -> Iterator[Tensor]:
    yield Tensor(prefix + "attn_norm.weight", block.attn_norm.data, "bf16")
    yield Tensor(prefix + "ffn_norm.weight", block.ffn_norm.data, "bf16")
    for name, hc in (("hc_attn", block.hc_attn), ("hc_ffn", block.hc_ffn)):
        for part in ("fn", "base", "scale"):
            yield Tensor(f"{prefix}{name}_{part}", getattr(hc, part).data, "f32")
    yield from attention_tensors(prefix + "attn.", block.attn)
    yield from moe_tensors(prefix + "ffn.", block.ffn)


def attention_tensors(p: str, attn) -> Iterator[Tensor]:
    yield Tensor(p + "attn_sink", attn.sink.data, "f32")
    yield Tensor(p + "wq_a.weight", attn.wq_a.data, "fp8")
    yield Tensor(p + "q_norm.weight", attn.q_norm.data, "bf16")
    yield Tensor(p + "wq_b.weight", attn.wq_b.data, "fp8")
    yield Tensor(p + "wkv.weight", attn.wkv.data, "fp8")
    yield Tensor(p + "kv_norm.weight", attn.kv_norm.data, "bf16")
    yield Tensor(p + "wo_a.weight", attn.wo_a.data.flatten(0, 1), "fp8")
    yield Tensor(p + "wo_b.weight", attn.wo_b.data, "fp8")
    if attn.ratio:
        yield from compressor_tensors(p + "compressor.", attn.compressor)
    if attn.ratio == 4:
        yield Tensor(p + "indexer.wq_b.weight", attn.index_wq_b.data, "fp8")
        yield Tensor(p + "indexer.weights_proj.weight", attn.index_weights.data, "bf16")
        yield from compressor_tensors(p + "indexer.compressor.", attn.index_compressor)


def compressor_tensors(p: str, comp) -> Iterator[Tensor]:
    yield Tensor(p + "ape", comp.ape.data, "f32")
    yield Tensor(p + "wkv.weight", comp.wkv.data, "bf16")
    yield Tensor(p + "wgate.weight", comp.wgate.data, "bf16")
    yield Tensor(p + "norm.weight", comp.norm.data, "bf16")


def moe_tensors(p: str, moe) -> Iterator[Tensor]:
    width = moe.w2.shape[-1]
    yield Tensor(p + "gate.weight", moe.gate.data, "bf16")
    if moe.hashed:
        yield Tensor(p + "gate.tid2eid", moe.tid2eid, "i64")
    else:
        yield Tensor(p + "gate.bias", moe.bias, "f32")
    for e in range(moe.E):
        yield Tensor(f"{p}experts.{e}.w1.weight", moe.w13.data[e, :width], "fp4")
        yield Tensor(f"{p}experts.{e}.w2.weight", moe.w2.data[e], "fp4")
        yield Tensor(f"{p}experts.{e}.w3.weight", moe.w13.data[e, width:], "fp4")
    yield Tensor(p + "shared_experts.w1.weight", moe.shared13.data[:width], "fp8")
    yield Tensor(p + "shared_experts.w2.weight", moe.shared2.data, "fp8")
    yield Tensor(p + "shared_experts.w3.weight", moe.shared13.data[width:], "fp8")


def load(tensors: Iterator[Tensor], values: dict) -> None:
    """Copies `values` (official name -> array) into the views; every name must be there."""
    for t in tensors:
        t.view.copy_(torch.as_tensor(values[t.name]))
