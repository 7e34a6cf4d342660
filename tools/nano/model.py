"""nano in PyTorch: the DeepSeek-V4 trunk, written for training on a few CPU cores.

What lives here: the configuration, the forward pass and the switch between
training arithmetic (bf16 products) and exact arithmetic (f32 or f64). The same
code computes any checkpoint of the architecture whose sizes are in its
`config.json`; `test_nano.py` compares it with the numpy reference.

Shape letters: B sequences, T tokens of each, N = B*T, D hidden size, H heads,
d head size, R compressed rows, E experts, C query chunk, W window.

Shapes are static and the element-wise parts are compiled, so use few different
(B, T). T is a multiple of 128, the sizes of the window and of the coarse blocks.
"""

import ctypes
import math
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    # six trunk layers, then the three drafter stages
    "compress_ratios": [0, 4, 128, 4, 128, 4, 0, 0, 0],
    "compress_rope_theta": 160000,
    "dspark_block_size": 5,
    "dspark_markov_rank": 64,
    "dspark_noise_token_id": 14,
    "dspark_target_layer_ids": [3, 4, 5],
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 96,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 4096,
}

CHUNK = 64  # queries that share one block of window keys
EPS = 1e-6
NEG = -1e30

# dtype of matrix products; everything else is computed in at least f32
compute = SimpleNamespace(dtype=torch.float32)


def load_config(values: dict = CONFIG) -> SimpleNamespace:
    return SimpleNamespace(**values)


# --------------------------------------------------------------------------
# small pieces
# --------------------------------------------------------------------------
def wide(x):
    """At least f32."""
    return x.float() if x.dtype == torch.bfloat16 else x


def lin(x, w):
    return F.linear(x.to(compute.dtype), w.to(compute.dtype))


def rms(x, w=None):
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return y if w is None else y * w


def inv_freq(dim: int, base: float, scaling: dict | None = None) -> torch.Tensor:
    f = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling:
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

        def channel(rotations):
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(channel(scaling["beta_fast"])), 0)
        high = min(math.ceil(channel(scaling["beta_slow"])), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / ((high - low) or 1e-3)).clamp(0, 1)
        f = f / factor * ramp + f * (1 - ramp)
    return f


def rope_table(pos: torch.Tensor, freq: torch.Tensor, dtype=torch.float32):
    """cos and sin `[T, rotary/2]` of positions `[T]`."""
    angle = pos.double()[:, None] * freq
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rope(x, cos, sin):
    """Rotates adjacent pairs of the last channels; cos and sin broadcast to `[..., rotary/2]`."""
    n = 2 * cos.shape[-1]
    pair = x[..., -n:].unflatten(-1, (-1, 2))
    a, b = pair[..., 0], pair[..., 1]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-n], turned], -1)


def swiglu(gate_up, limit: float):
    gate, up = wide(gate_up).chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


# --------------------------------------------------------------------------
# Sinkhorn: a C kernel for f32, plain torch otherwise
# --------------------------------------------------------------------------
_sink_library = None


def sink_library():
    global _sink_library
    if _sink_library is None:
        source = Path(__file__).with_name("sink.c")
        folder = tempfile.mkdtemp(prefix="nano-sink-")
        target = Path(folder) / "sink.so"
        flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(source), "-o", str(target), "-lm"], check=True)
        _sink_library = ctypes.CDLL(str(target))
    return _sink_library


def _pointer(t):
    return ctypes.c_void_p(t.data_ptr())


@torch.library.custom_op("nano::sinkhorn", mutates_args=())
def sinkhorn_kernel(k: torch.Tensor, iters: int) -> torch.Tensor:
    k = k.contiguous()
    out = torch.empty_like(k)
    sink_library().sink_fwd(_pointer(k), _pointer(out), ctypes.c_long(k.shape[-1]), iters)
    return out


@sinkhorn_kernel.register_fake
def _(k, iters):
    return torch.empty_like(k, memory_format=torch.contiguous_format)


@torch.library.custom_op("nano::sinkhorn_grad", mutates_args=())
def sinkhorn_grad_kernel(k: torch.Tensor, grad: torch.Tensor, iters: int) -> torch.Tensor:
    k, grad = k.contiguous(), grad.contiguous()
    out = torch.empty_like(k)
    sink_library().sink_bwd(_pointer(k), _pointer(grad), _pointer(out), ctypes.c_long(k.shape[-1]), iters)
    return out


@sinkhorn_grad_kernel.register_fake
def _(k, grad, iters):
    return torch.empty_like(k, memory_format=torch.contiguous_format)


def _sinkhorn_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.iters = inputs[1]


def _sinkhorn_backward(ctx, grad):
    return sinkhorn_grad_kernel(ctx.saved_tensors[0], grad, ctx.iters), None


sinkhorn_kernel.register_autograd(_sinkhorn_backward, setup_context=_sinkhorn_setup)


def sinkhorn(k, iters: int):
    """Doubly stochastic matrices of `k [4, 4, N]` (row, column, token)."""
    if k.dtype == torch.float32 and k.shape[-1] % 16 == 0:
        return sinkhorn_kernel(k, iters)
    k = torch.softmax(k, 1) + EPS
    k = k / (k.sum(0, keepdim=True) + EPS)
    for _ in range(iters - 1):
        k = k / (k.sum(1, keepdim=True) + EPS)
        k = k / (k.sum(0, keepdim=True) + EPS)
    return k


# --------------------------------------------------------------------------
# routed experts: tokens sorted by expert, one product per expert
# --------------------------------------------------------------------------
def _expert_hidden(gate_up, weight, limit: float):
    return (swiglu(gate_up, limit) * weight[:, None]).to(gate_up.dtype)


def _expert_hidden_grad(gate_up, weight, grad, limit: float):
    """Gradients of `_expert_hidden` by gate_up and by weight."""
    gate, up = wide(gate_up).chunk(2, -1)
    clamped, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    sig = torch.sigmoid(clamped)
    act = clamped * sig
    grad = wide(grad)
    grad_weight = (grad * act * u).sum(-1)
    grad = grad * weight[:, None]
    grad_gate = grad * u * (sig + act * (1 - sig)) * (gate <= limit)
    grad_up = grad * act * (up.abs() <= limit)
    return torch.cat([grad_gate, grad_up], -1).to(gate_up.dtype), grad_weight


class Experts(torch.autograd.Function):
    """`sum_j weight[n, j] * expert_{chosen[n, j]}(x[n])`, a product per expert and direction."""

    @staticmethod
    def forward(ctx, x, chosen, weight, w13, w2, limit):
        k, E = chosen.shape[1], w13.shape[0]
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=E).tolist()
        token = order // k
        xs, ws = x[token], weight.flatten()[order]
        gate_up = per_expert(xs, counts, w13.mT)
        hidden = functions.expert_hidden(gate_up, ws, limit)
        ys = per_expert(hidden, counts, w2.mT)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        back = back.view(-1, k)
        ctx.save_for_backward(xs, ws, gate_up, hidden, w13, w2, token, back)
        ctx.counts, ctx.limit = counts, limit
        return functions.sum_rows(ys, back)

    @staticmethod
    def backward(ctx, grad):
        xs, ws, gate_up, hidden, w13, w2, token, back = ctx.saved_tensors
        counts = ctx.counts
        grad_ys = grad.to(xs.dtype)[token]
        grad_hidden = per_expert(grad_ys, counts, w2)
        grad_w2 = torch.stack([g.t() @ h for g, h in zip(grad_ys.split(counts), hidden.split(counts))])
        grad_gate_up, grad_ws = functions.expert_hidden_grad(gate_up, ws, grad_hidden, ctx.limit)
        grad_w13 = torch.stack([g.t() @ p for g, p in zip(grad_gate_up.split(counts), xs.split(counts))])
        grad_x = functions.sum_rows(per_expert(grad_gate_up, counts, w13), back).to(xs.dtype)
        return grad_x, None, grad_ws[back], grad_w13, grad_w2, None


def per_expert(x, counts: list[int], w):
    """Rows of `x [M, in]`, sorted by expert, times `w [E, in, out]`."""
    out = x.new_empty(len(x), w.shape[-1])
    for e, (rows, target) in enumerate(zip(x.split(counts), out.split(counts))):
        torch.mm(rows, w[e], out=target)
    return out


def _sum_rows(x, rows):
    """`sum_j x[rows[:, j]]` in at least f32."""
    total = wide(x[rows[:, 0]])
    for j in range(1, rows.shape[1]):
        total = total + wide(x[rows[:, j]])
    return total


# --------------------------------------------------------------------------
# modules
# --------------------------------------------------------------------------
def normal(*shape, std):
    return nn.Parameter(torch.randn(*shape) * std)


class HyperConnection(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.iters = c.hc_sinkhorn_iters
        self.fn = normal(24, 4 * c.hidden_size, std=0.01)
        self.scale = nn.Parameter(torch.full((3,), 0.1))
        base = torch.zeros(24)
        base[:4] = -1.1  # sigmoid: about a quarter of every stream
        base[8:] = (torch.eye(4) * 4).flatten()  # streams keep to themselves at first
        self.base = nn.Parameter(base)

    def forward(self, x):
        """`x [N, 4, D]` -> pre `[N, 4]`, post `[N, 4]`, comb `[4, 4, N]`."""
        flat = x.flatten(1)
        m = (flat @ self.fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        pre = torch.sigmoid(m[:, :4] * self.scale[0] + self.base[:4]) + EPS
        post = 2 * torch.sigmoid(m[:, 4:8] * self.scale[1] + self.base[4:8])
        k = (m[:, 8:] * self.scale[2] + self.base[8:]).t().reshape(4, 4, -1)
        return pre, post, sinkhorn(k, self.iters)


def collapse(x, pre):
    return (x * pre[..., None]).sum(1)


def merge(y, x, post, comb):
    """New stream k: `post[k] * y + sum_j comb[j, k] * x[j]`."""
    c = comb.permute(2, 0, 1)
    streams = [
        post[:, k, None] * y
        + c[:, 0, k, None] * x[:, 0]
        + c[:, 1, k, None] * x[:, 1]
        + c[:, 2, k, None] * x[:, 2]
        + c[:, 3, k, None] * x[:, 3]
        for k in range(4)
    ]
    return torch.stack(streams, 1)


class Compressor(nn.Module):
    """Pools blocks of `ratio` tokens into rows; ratio 4 also reads the block before (lane A)."""

    def __init__(self, c, ratio, dim):
        super().__init__()
        self.ratio, self.dim = ratio, dim
        width = dim * (2 if ratio == 4 else 1)
        self.wkv = normal(width, c.hidden_size, std=c.hidden_size**-0.5)
        self.wgate = normal(width, c.hidden_size, std=0.3 * c.hidden_size**-0.5)
        self.ape = nn.Parameter(torch.zeros(ratio, width))
        self.norm = nn.Parameter(torch.ones(dim))

    def forward(self, x, cos, sin):
        """`x [B, T, D]` -> `[B, T/ratio, dim]`, rotated at the first position of each block."""
        B, T, _ = x.shape
        blocks = T // self.ratio
        kv = wide(lin(x, self.wkv)).view(B, blocks, self.ratio, -1)
        gate = wide(lin(x, self.wgate)).view(B, blocks, self.ratio, -1) + self.ape
        if self.ratio == 4:
            d = self.dim
            kv = torch.cat([F.pad(kv[:, :-1, :, :d], (0, 0, 0, 0, 1, 0)), kv[..., d:]], 2)
            gate = torch.cat([F.pad(gate[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=NEG), gate[..., d:]], 2)
        row = rms((kv * torch.softmax(gate, 2)).sum(2), self.norm)
        return rope(row, cos[:: self.ratio], sin[:: self.ratio])


class Attention(nn.Module):
    def __init__(self, c, ratio):
        super().__init__()
        D, H, d = c.hidden_size, c.num_attention_heads, c.head_dim
        self.H, self.d, self.G, self.W = H, d, c.o_groups, c.sliding_window
        self.ratio, self.topk = ratio, c.index_topk
        self.wq_a = normal(c.q_lora_rank, D, std=D**-0.5)
        self.q_norm = nn.Parameter(torch.ones(c.q_lora_rank))
        self.wq_b = normal(H * d, c.q_lora_rank, std=c.q_lora_rank**-0.5)
        self.wkv = normal(d, D, std=D**-0.5)
        self.kv_norm = nn.Parameter(torch.ones(d))
        group = H * d // c.o_groups
        self.wo_a = normal(c.o_groups, c.o_lora_rank, group, std=group**-0.5)
        self.wo_b = normal(D, c.o_groups * c.o_lora_rank, std=0.3 * (c.o_groups * c.o_lora_rank) ** -0.5)
        self.sink = nn.Parameter(torch.zeros(H))
        if ratio:
            self.compressor = Compressor(c, ratio, d)
        if ratio == 4:
            self.Hi, self.di = c.index_n_heads, c.index_head_dim
            self.index_wq_b = normal(self.Hi * self.di, c.q_lora_rank, std=c.q_lora_rank**-0.5)
            self.index_weights = normal(self.Hi, D, std=D**-0.5)
            self.index_compressor = Compressor(c, 4, self.di)

    def queries(self, x, cos, sin):
        """`x [..., D]` -> low-rank query and rotated queries `[..., H, d]`, scaled by 1/sqrt(d)."""
        low = rms(lin(x, self.wq_a), self.q_norm)
        q = rms(lin(low, self.wq_b).unflatten(-1, (self.H, self.d))) * self.d**-0.5
        return low, rope(q, cos[..., None, :], sin[..., None, :])

    def rows(self, x, cos, sin):
        return rope(rms(lin(x, self.wkv), self.kv_norm), cos, sin)

    def output(self, o, cos, sin):
        """`o [..., H, d]` rotated back and projected to `[..., D]`."""
        o = rope(o, cos[..., None, :], -sin[..., None, :]).to(compute.dtype)
        o = o.flatten(-2).unflatten(-1, (self.G, -1))
        wo_a = self.wo_a.to(compute.dtype)
        z = torch.cat([F.linear(o[..., g, :], wo_a[g]) for g in range(self.G)], -1)
        return wide(lin(z, self.wo_b))

    def index_scores(self, x, low, k, cos, sin):
        """`[B, T, R]` for the queries of `x` and the index rows `k [B, R, di]`; no row is masked."""
        B, T, _ = x.shape
        q = rope(wide(lin(low, self.index_wq_b)).view(B, T, self.Hi, self.di), cos[:, None], sin[:, None])
        w = wide(lin(x, self.index_weights)) * (self.Hi * self.di) ** -0.5
        q, k = q.to(compute.dtype), k.to(compute.dtype)
        s = wide(torch.bmm(q.reshape(B, T * self.Hi, self.di), k.transpose(1, 2))).view(B, T, self.Hi, -1)
        return (s.relu() * w[..., None]).sum(2)

    def forward(self, x, cos, sin, mode: str, sparse):
        """`x [B, T, D]` -> `[B, T, D]` and, in mode `learn`, the indexer's loss.

        mode: `dense` all visible compressed rows; `topk` those the indexer picks;
        `exact` the same with ties to the older row; `random` as many at random;
        `learn` like `topk` where the scalar tensor `sparse` is true, else like `dense`.
        """
        B, T, _ = x.shape
        r, W, C, H, d = self.ratio, self.W, CHUNK, self.H, self.d
        low, q = self.queries(x, cos, sin)
        kv = self.rows(x, cos, sin).to(compute.dtype)
        q = q.to(compute.dtype)
        keys = F.pad(kv, (0, 0, W, 0)).unfold(1, W + C, C).transpose(2, 3)  # [B, T/C, W+C, d]
        rows = index_rows = kl = None
        if r:
            rows = self.compressor(x, cos, sin).to(compute.dtype)
            if r == 4 and mode not in ("dense", "random"):
                index_rows = self.index_compressor(x.detach(), cos, sin)
        # long inputs are only evaluated, never trained on: bound the score memory
        step = T if T <= 8192 else 2048
        parts = []
        for a in range(0, T, step):
            b = min(a + step, T)
            scores = None
            if index_rows is not None:
                scores = self.index_scores(x[:, a:b].detach(), low[:, a:b].detach(), index_rows, cos[a:b], sin[a:b])
            part, kl = self.attend(q[:, a:b], keys[:, a // C : b // C], rows, scores, a, mode, sparse)
            parts.append(part)
        o = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return self.output(o, cos, sin), kl

    def attend(self, q, keys, rows, scores, start: int, mode: str, sparse):
        """Queries at index `start..` against their window keys and compressed rows."""
        B, T, H, d = q.shape
        r, W, C = self.ratio, self.W, CHUNK
        i, j = torch.arange(C)[:, None], torch.arange(W + C)[None]
        first = start + torch.arange(T // C)[:, None, None] * C
        ok = ((j > i) & (j <= i + W))[None] & (first - W + j >= 0)  # [T/C, C, W+C]
        n = B * (T // C)
        keys = keys.reshape(n, W + C, d)
        sw = wide(torch.bmm(q.reshape(n, C * H, d), keys.transpose(1, 2))).view(B, T // C, C, H, W + C)
        sw = sw.masked_fill(~ok[None, :, :, None], NEG).view(B, T, H, W + C)
        sink = self.sink[None, None, :, None]
        top = torch.maximum(sw.amax(-1, keepdim=True), sink)
        if r:
            R = rows.shape[1]
            seen = (torch.arange(R)[None] < ((start + torch.arange(T) + 1) // r)[:, None])[None].expand(B, -1, -1)
            used = seen
            if r == 4 and mode != "dense" and R > self.topk:
                picked = chosen_rows(scores, seen, self.topk, mode)
                used = seen & (picked | ~sparse if mode == "learn" else picked)
            all_scores = wide(torch.bmm(q.reshape(B, T * H, d), rows.transpose(1, 2))).view(B, T, H, R)
            sc = all_scores.masked_fill(~used[:, :, None], NEG)
            top = torch.maximum(top, sc.amax(-1, keepdim=True))
        top = top.detach()
        ew = torch.exp(sw - top)
        total = ew.sum(-1, keepdim=True) + torch.exp(sink - top)
        o = wide(torch.bmm(ew.to(compute.dtype).view(n, C * H, W + C), keys)).view(B, T, H, d)
        kl = None
        if r:
            if r == 4 and mode == "learn":
                kl = index_loss(scores, attention_mass(all_scores, seen, top, total), seen)
            ec = torch.exp(sc - top)
            total = total + ec.sum(-1, keepdim=True)
            o = o + wide(torch.bmm(ec.to(compute.dtype).view(B, T * H, R), rows)).view(B, T, H, d)
        return o / total, kl


def attention_mass(scores, seen, top, rest):
    """What every visible compressed row would get if all were attended to, summed over heads `[B, T, R]`.

    `rest` is the softmax denominator of window and sink, relative to the maximum `top`.
    """
    scores = scores.detach().masked_fill(~seen[:, :, None], NEG)
    higher = torch.maximum(top, scores.amax(-1, keepdim=True))
    mass = torch.exp(scores - higher)
    total = mass.sum(-1, keepdim=True) + rest.detach() * torch.exp(top - higher)
    return (mass / total).sum(2)


def chosen_rows(scores, seen, topk: int, mode: str):
    """Mask `[B, T, R]` of the rows a query keeps."""
    if mode == "random":
        scores = torch.rand(seen.shape)
    scores = scores.detach().masked_fill(~seen, NEG)
    if mode == "exact":  # among equal scores the oldest rows win
        last = scores.topk(topk, -1).values[..., -1:]
        above, equal = scores > last, scores == last
        free = topk - above.sum(-1, keepdim=True)
        return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= free))
    picked = scores.topk(topk, -1).indices
    return torch.zeros(seen.shape, dtype=torch.bool).scatter(-1, picked, True)


def index_loss(scores, mass, seen):
    """KL(attention mass over the rows seen || softmax of the index scores), mean over queries."""
    mass = mass * seen + 1e-9 * seen
    target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
    log_q = torch.log_softmax(scores.masked_fill(~seen, NEG), -1)
    kl = (target * (target.clamp_min(1e-9).log() - log_q)).sum(-1)
    weight = (seen.sum(-1) > 1).to(kl.dtype)
    return (kl * weight).sum() / weight.sum()


class MoE(nn.Module):
    def __init__(self, c, hashed: bool, seed: int):
        super().__init__()
        D, Fi, E = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
        self.k, self.E, self.limit, self.scaling = c.num_experts_per_tok, E, c.swiglu_limit, c.routed_scaling_factor
        self.hashed = hashed
        self.gate = normal(E, D, std=D**-0.5)
        if hashed:
            g = torch.Generator().manual_seed(seed)
            table = torch.stack([torch.randperm(E, generator=g)[: self.k] for _ in range(c.vocab_size)])
            self.register_buffer("tid2eid", table)
        else:
            self.register_buffer("bias", torch.zeros(E))
        self.load = None  # tokens per expert of the last forward pass
        self.w13 = normal(E, 2 * Fi, D, std=D**-0.5)
        self.w2 = normal(E, D, Fi, std=0.3 * Fi**-0.5)
        self.shared13 = normal(2 * Fi, D, std=D**-0.5)
        self.shared2 = normal(D, Fi, std=0.3 * Fi**-0.5)

    def route(self, x, ids):
        score = F.softplus(F.linear(x, self.gate)).sqrt()
        chosen = self.tid2eid[ids] if self.hashed else (score.detach() + self.bias).topk(self.k, -1).indices
        weight = score.gather(1, chosen)
        return chosen, weight / (weight.sum(1, keepdim=True) + 1e-20) * self.scaling

    def shared(self, x):
        return wide(lin(swiglu(lin(x, self.shared13), self.limit), self.shared2))

    def experts(self, x, chosen, weight):
        if not self.hashed and self.training:
            self.load = torch.bincount(chosen.flatten(), minlength=self.E).float()
        dt = compute.dtype
        return Experts.apply(x.to(dt), chosen, weight, self.w13.to(dt), self.w2.to(dt), self.limit)


class Block(nn.Module):
    def __init__(self, c, ratio: int, hashed: bool, seed: int):
        super().__init__()
        self.hc_attn, self.hc_ffn = HyperConnection(c), HyperConnection(c)
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(c.hidden_size)), nn.Parameter(torch.ones(c.hidden_size))
        self.attn, self.ffn = Attention(c, ratio), MoE(c, hashed, seed)

    def forward(self, x, ids, B: int, cos, sin, mode: str, sparse=None):
        """`x [N, 4, D]` -> the same, and the indexer's loss (None without one)."""
        if self.attn.ratio != 4:  # one compiled version for all modes
            mode, sparse = "dense", None
        x, h, post, comb, chosen, weight, shared, kl = functions.first_half(self, x, ids, B, cos, sin, mode, sparse)
        y = self.ffn.experts(h, chosen, weight)
        return functions.second_half(y, shared, x, post, comb), kl


def _first_half(block, x, ids, B: int, cos, sin, mode: str, sparse):
    """Attention, then everything of the feed-forward up to the routed experts."""
    pre, post, comb = block.hc_attn(x)
    h = rms(collapse(x, pre), block.attn_norm)
    y, kl = block.attn(h.view(B, -1, h.shape[-1]), cos, sin, mode, sparse)
    x = merge(y.flatten(0, 1), x, post, comb)
    return *before_experts(block, x, ids), kl


def before_experts(block, x, ids):
    pre, post, comb = block.hc_ffn(x)
    h = rms(collapse(x, pre), block.ffn_norm)
    chosen, weight = block.ffn.route(h, ids)
    return x, h, post, comb, chosen, weight, block.ffn.shared(h)


def _second_half(y, shared, x, post, comb):
    return merge(y + shared, x, post, comb)


class StreamHead(nn.Module):
    """Collapses the four streams in front of the output norm."""

    def __init__(self, c):
        super().__init__()
        self.fn = normal(4, 4 * c.hidden_size, std=0.01)
        self.base = nn.Parameter(torch.full((4,), -1.1))
        self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x):
        flat = x.flatten(1)
        m = (flat @ self.fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        return collapse(x, torch.sigmoid(m * self.scale + self.base) + EPS)


def _head_loss(model, x, targets):
    logits = wide(lin(rms(model.hc_head(x), model.norm), model.head))
    return F.cross_entropy(logits, targets)


class Model(nn.Module):
    def __init__(self, c, seed: int = 1):
        super().__init__()
        torch.manual_seed(seed)
        self.c = c
        L = c.num_hidden_layers
        self.embed = normal(c.vocab_size, c.hidden_size, std=0.16)
        self.head = normal(c.vocab_size, c.hidden_size, std=0.02)
        self.blocks = nn.ModuleList(
            Block(c, c.compress_ratios[i], i < c.num_hash_layers, 1000 * seed + i) for i in range(L)
        )
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.hc_head = StreamHead(c)
        self.freq_plain = inv_freq(c.qk_rope_head_dim, c.rope_theta)
        self.freq_compressed = inv_freq(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_scaling)

    def streams(self, ids, pos=None, mode="dense", sparse=None, taps=()):
        """`ids [B, T]` -> streams `[N, 4, D]`, indexer loss, mean streams after the layers in `taps`.

        `pos [T]` are the positions, 0.. by default; a gap starts at a multiple of 128.
        """
        B, T = ids.shape
        flat = ids.flatten()
        dtype = self.embed.dtype
        pos = torch.arange(T) if pos is None else pos
        plain, compressed = rope_table(pos, self.freq_plain, dtype), rope_table(pos, self.freq_compressed, dtype)
        x = self.embed[flat][:, None].expand(-1, 4, -1).contiguous()
        loss, kept = 0.0, []
        for i, block in enumerate(self.blocks):
            cos, sin = compressed if block.attn.ratio else plain
            x, kl = block(x, flat, B, cos, sin, mode, sparse)
            loss = loss if kl is None else loss + kl
            if i in taps:
                kept.append(x.mean(1))
        return x, loss, kept

    def forward(self, ids, pos=None, mode="exact"):
        """Logits `[N, V]`."""
        x, _, _ = self.streams(ids, pos, mode)
        return wide(lin(rms(self.hc_head(x), self.norm), self.head))

    def loss(self, ids, targets, pos=None, mode="dense", sparse=None):
        """Mean cross-entropy and indexer loss."""
        x, kl, _ = self.streams(ids, pos, mode, sparse)
        return functions.head_loss(self, x, targets.flatten()), kl


# The parts that `enable_compile` replaces by compiled ones.
functions = SimpleNamespace(
    first_half=_first_half,
    second_half=_second_half,
    head_loss=_head_loss,
    expert_hidden=_expert_hidden,
    expert_hidden_grad=_expert_hidden_grad,
    sum_rows=_sum_rows,
)


def enable_compile():
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 512
    for name in ("first_half", "second_half", "head_loss", "expert_hidden", "expert_hidden_grad", "sum_rows"):
        setattr(functions, name, torch.compile(globals()["_" + name], dynamic=False))
