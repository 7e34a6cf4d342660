"""Self-checks of the tools: `python -m pytest tools/nano`. Needs no trained weights.

The numpy reference is `oracle/ref_model.py` at the root of the repository; the
comparisons with it are skipped where it is missing.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent
ORACLE = HERE.parents[1] / "oracle"
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(ORACLE))

import drafter as drafting  # noqa: E402
import export  # noqa: E402
import model as nano  # noqa: E402
from encoding import VECTORS, Encoder, read_texts  # noqa: E402
from layout import trunk_tensors  # noqa: E402

TINY = nano.CONFIG | {
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "dspark_markov_rank": 16,
    "dspark_noise_token_id": 9,
    "dspark_target_layer_ids": [1, 2, 3],
    "hidden_size": 128,
    "index_n_heads": 2,
    "index_topk": 8,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "o_lora_rank": 32,
    "q_lora_rank": 64,
    "swiglu_limit": 2.5,
    "vocab_size": 256,
}

reference = pytest.mark.skipif(not (ORACLE / "ref_model.py").exists(), reason="oracle/ref_model.py is missing")


@pytest.fixture
def double():
    nano.compute.dtype = torch.float64
    torch.set_default_dtype(torch.float64)
    yield
    nano.compute.dtype = torch.float32
    torch.set_default_dtype(torch.float32)


def lively(module):
    """Random norms, biases and gates, so that no part of the arithmetic is trivial."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in [*module.named_parameters(), *module.named_buffers()]:
            if p.is_floating_point() and (p.ndim == 1 or "ape" in name):
                p.add_(torch.randn(p.shape, generator=g) * 0.3)
    return module


@reference
def test_exported_checkpoint_matches_the_reference(tmp_path):
    from ref_model import RefModel

    c = nano.load_config(TINY)
    trunk, drafter = lively(nano.Model(c)), lively(drafting.Drafter(c))
    tensors = [*trunk_tensors(trunk), *drafting.drafter_tensors(drafter)]
    for rounded in (True, False):
        folder = tmp_path / str(rounded)
        export.write_checkpoint(folder, tensors, TINY, rounded)
        ids = np.random.default_rng(0).integers(16, c.vocab_size, 384)
        ref = RefModel(str(folder))
        state = ref.new_state()
        want, hidden = ref.forward(ids, state, want_hidden=True)
        ref.draft_context(state, hidden)
        drafts, _, confidence = ref.draft(state, 77)

        trunk2, drafter2 = export.load_checkpoint(folder)
        nano.compute.dtype = torch.float64
        torch.set_default_dtype(torch.float64)
        try:
            trunk2, drafter2 = trunk2.double(), drafter2.double()
            with torch.no_grad():
                batch = torch.from_numpy(ids)[None]
                got = trunk2(batch).numpy()
                _, _, taps = trunk2.streams(batch, mode="exact", taps=drafter2.taps)
                mine, conf = drafter2.draft(trunk2, torch.cat(taps, -1)[None], torch.tensor([[384]]), torch.tensor([[77]]))
        finally:
            nano.compute.dtype = torch.float32
            torch.set_default_dtype(torch.float32)
        assert np.abs(got - want).max() < 1e-9
        assert mine[0, 0].tolist() == drafts.tolist()
        assert np.abs(conf[0, 0].numpy() - confidence).max() < 1e-9


@reference
def test_number_formats_match_the_reference():
    import ref_model as R

    w = torch.randn(200, 160) * torch.logspace(-3, 1, 200)[:, None]
    w[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # ties
    assert np.array_equal(export.decode_fp4(*export.encode_fp4(w)).numpy(), R.fake_fp4(w.numpy()))
    code, scale = export.encode_fp8(w)
    raw = {"x.weight": ("F8_E4M3", code), "x.scale": ("F8_E8M0", scale)}
    values, _ = R.dequantise(raw)
    assert np.array_equal(export.decode_fp8(code, scale).numpy(), values["x.weight"])
    assert np.abs(values["x.weight"] - w.numpy()).max() <= w.abs().max() / 16


def test_sinkhorn_kernel_matches_torch(double):
    k = torch.randn(4, 4, 32)
    weight = torch.randn(4, 4, 32)
    slow = k.clone().requires_grad_()
    fast = k.float().requires_grad_()
    (nano.sinkhorn(slow, 20) * weight).sum().backward()
    (nano.sinkhorn(fast, 20) * weight.float()).sum().backward()
    assert torch.allclose(nano.sinkhorn(k, 20), nano.sinkhorn(k.float(), 20).double(), atol=1e-5)
    assert torch.allclose(slow.grad, fast.grad.double(), atol=1e-4)


def test_expert_gradients_match_autograd(double):
    c = nano.load_config(TINY)
    moe = nano.MoE(c, hashed=False, seed=0).double()
    x = torch.randn(40, c.hidden_size)
    chosen, weight = moe.route(x, None)
    weight = weight.detach()

    def plain(x, weight):
        out = torch.zeros_like(x)
        for e in range(moe.E):
            h = nano.swiglu(x @ moe.w13[e].t(), moe.limit) @ moe.w2[e].t()
            out = out + h * (weight * (chosen == e)).sum(1, keepdim=True)
        return out

    grads = []
    for f in (plain, lambda x, w: nano.Experts.apply(x, chosen, w, moe.w13, moe.w2, moe.limit)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        moe.zero_grad()
        (f(a, b) * torch.arange(c.hidden_size)).sum().backward()
        grads.append([a.grad, b.grad, moe.w13.grad.clone(), moe.w2.grad.clone()])
    for g, h in zip(*grads):
        assert torch.allclose(g, h, rtol=1e-9, atol=1e-9)


def test_prompt_vectors_are_those_in_the_repository():
    folder = HERE.parents[1] / "models" / "nano" / "encoding"
    encoder = Encoder(read_texts(folder / "encoding_dsv4.py"))
    for i, vector in enumerate(VECTORS, 1):
        assert json.loads((folder / f"tests/test_input_{i}.json").read_text()) == vector
        text = encoder.encode(vector["messages"], vector["thinking_mode"] == "thinking", vector.get("reasoning_effort", "low"))
        assert (folder / f"tests/test_output_{i}.txt").read_text() == text


def test_learning_mode_attends_like_the_mode_it_stands_for(double):
    c = nano.load_config(TINY)
    trunk = lively(nano.Model(c)).double()
    ids = torch.randint(16, c.vocab_size, (2, 256))
    with torch.no_grad():
        for mode, sparse in (("dense", False), ("topk", True)):
            want, _, _ = trunk.streams(ids, mode=mode)
            got, loss, _ = trunk.streams(ids, mode="learn", sparse=torch.tensor(sparse))
            assert torch.allclose(got, want, atol=1e-12)
            assert loss > 0


def test_the_indexer_learns_what_attention_looks_at():
    """The distillation loss has its minimum, zero, where the scores are the log of the attention mass."""
    seen = torch.ones(1, 5, 7, dtype=torch.bool).tril()
    mass = torch.rand(1, 5, 7)
    assert nano.index_loss(mass.log(), mass, seen) < 1e-6
    assert nano.index_loss(torch.zeros(1, 5, 7), mass, seen) > 0.01
