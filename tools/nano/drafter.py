"""The three-stage DSpark drafter of nano: module, training, drafting.

    python drafter.py --run RUN_DIR --steps 2000

The trunk (`trunk.pt`) is frozen. Per training sequence the trunk runs once; then
blocks of five tokens are drafted at sampled anchors, all at once: the queries of a
block see the 128 context rows before the anchor and the whole block, and nothing
of other blocks. The target of every block position is the trunk's own
distribution there, the Markov head is fed the true tokens (teacher forcing).
Writes `drafter.pt`, resumes from it, appends to `drafter-log.jsonl`.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import model as nano
from layout import Tensor, block_tensors, stream_head_tensors
from model import NEG, Block, Model, StreamHead, before_experts, collapse, lin, load_config, merge, normal, rms, rope_table, wide
from train import SEED, Optimizer, Source, balance_experts, save

ANCHORS = 32  # blocks per training sequence
LIBRARY, CHAT = 0.6, 0.1
WARM_STEPS, DECAY = 40, 0.5
POSITION_WEIGHT = 0.9  # each block position counts this much less than the one before


class Drafter(nn.Module):
    def __init__(self, c, seed: int = 2):
        super().__init__()
        torch.manual_seed(seed)
        self.c = c
        D, V, rank = c.hidden_size, c.vocab_size, c.dspark_markov_rank
        self.block, self.noise = c.dspark_block_size, c.dspark_noise_token_id
        self.taps = list(c.dspark_target_layer_ids)
        self.stages = nn.ModuleList(Block(c, 0, hashed=False, seed=0) for _ in self.taps)
        self.main_proj = normal(D, D * len(self.taps), std=(D * len(self.taps)) ** -0.5)
        self.main_norm = nn.Parameter(torch.ones(D))
        self.norm = nn.Parameter(torch.ones(D))
        self.hc_head = StreamHead(c)
        self.markov_w1 = normal(V, rank, std=0.1)
        self.markov_w2 = normal(V, rank, std=0.01)
        self.confidence = nn.Parameter(torch.zeros(1, D + rank))
        self.freq = nano.inv_freq(c.qk_rope_head_dim, c.rope_theta)

    @torch.no_grad()
    def start_from(self, trunk: Model):
        """Stages begin as the tapped trunk layers without their compressors."""
        for stage, layer in zip(self.stages, self.taps):
            mine, theirs = stage.state_dict(), trunk.blocks[layer].state_dict()
            stage.load_state_dict({k: theirs[k] if k in theirs else v for k, v in mine.items()})
        self.norm.copy_(trunk.norm)
        self.hc_head.load_state_dict(trunk.hc_head.state_dict())

    def forward(self, trunk: Model, taps, first, anchors):
        """Hidden states `[B*K*block, D]` of K blocks per sequence.

        taps    `[B, T, taps*D]` mean streams of the trunk, positions 0..T-1
        anchors `[B, K]` position of each block's first token; rows before it are context
        first   `[B, K]` that first token
        """
        c, W, n = self.c, self.c.sliding_window, self.block
        B, K = anchors.shape
        T = taps.shape[1]
        m = rms(lin(taps, self.main_proj), self.main_norm)
        cos, sin = rope_table(torch.arange(T + n), self.freq, trunk.embed.dtype)
        ids = torch.full((B, K, n), self.noise)
        ids[..., 0] = first
        x = trunk.embed[ids.flatten()][:, None].expand(-1, 4, -1).contiguous()
        pos = (anchors[..., None] + torch.arange(n)).view(B * K, n)
        back = anchors[..., None] - W + torch.arange(W)  # [B, K, W]
        there = (back >= 0).view(B * K, W)
        at = (torch.arange(B)[:, None, None] * T + back.clamp(min=0)).view(B * K, W)
        for stage in self.stages:
            context = stage.attn.rows(m, cos[:T], sin[:T]).flatten(0, 1)[at]  # [B*K, W, d]
            x, h, post, comb, chosen, weight, shared = functions.stage_half(stage, x, context, there, cos[pos], sin[pos])
            y = stage.ffn.experts(h, chosen, weight)
            x = nano.functions.second_half(y, shared, x, post, comb)
        return self.hc_head(x)

    def base_logits(self, trunk: Model, h):
        return wide(lin(rms(h, self.norm), trunk.head))

    def markov(self, prev):
        """Low-rank embedding of the tokens before and the logits it adds."""
        e = self.markov_w1[prev]
        return e, wide(lin(e, self.markov_w2))

    def confidence_logit(self, h, e):
        return F.linear(torch.cat([h, e], -1), self.confidence)[..., 0]

    @torch.no_grad()
    def draft(self, trunk: Model, taps, anchors, first):
        """Greedy blocks `[B, K, block]` and confidence logits."""
        B, K = anchors.shape
        h = self(trunk, taps, first, anchors)
        base = self.base_logits(trunk, h).view(B * K, self.block, -1)
        h = h.view(B * K, self.block, -1)
        prev, out, conf = first.flatten(), [], []
        for b in range(self.block):
            e, bias = self.markov(prev)
            conf.append(self.confidence_logit(h[:, b], e))
            prev = (base[:, b] + bias).argmax(-1)
            out.append(prev)
        return torch.stack(out, 1).view(B, K, -1), torch.stack(conf, 1).view(B, K, -1)


def drafter_tensors(d: Drafter):
    last = len(d.stages) - 1
    for s, stage in enumerate(d.stages):
        yield from block_tensors(f"mtp.{s}.", stage)
    yield Tensor("mtp.0.main_proj.weight", d.main_proj.data, "fp8")
    yield Tensor("mtp.0.main_norm.weight", d.main_norm.data, "bf16")
    yield Tensor(f"mtp.{last}.norm.weight", d.norm.data, "bf16")
    yield from stream_head_tensors(f"mtp.{last}.", d.hc_head)
    yield Tensor(f"mtp.{last}.markov_head.markov_w1.weight", d.markov_w1.data, "bf16")
    yield Tensor(f"mtp.{last}.markov_head.markov_w2.weight", d.markov_w2.data, "bf16")
    yield Tensor(f"mtp.{last}.confidence_head.proj.weight", d.confidence.data, "bf16")


def _stage_half(stage, x, context, there, cos, sin):
    """One stage up to the routed experts; `x [M*n, 4, D]`, `context [M, W, d]`, `cos [M, n, rotary/2]`."""
    attn = stage.attn
    M, n = cos.shape[:2]
    pre, post, comb = stage.hc_attn(x)
    h = rms(collapse(x, pre), stage.attn_norm).view(M, n, -1)
    _, q = attn.queries(h, cos, sin)
    own = attn.rows(h, cos, sin)
    keys = torch.cat([context, own], 1).to(nano.compute.dtype)
    q = q.to(nano.compute.dtype).reshape(M, n * attn.H, attn.d)
    s = wide(torch.bmm(q, keys.transpose(1, 2))).view(M, n, attn.H, -1)
    ok = F.pad(there, (0, n), value=True)
    s = s.masked_fill(~ok[:, None, None], NEG)
    sink = attn.sink[None, None, :, None]
    top = torch.maximum(s.amax(-1, keepdim=True), sink).detach()
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True) + torch.exp(sink - top)
    o = wide(torch.bmm(e.to(keys.dtype).view(M, n * attn.H, -1), keys)).view(M, n, attn.H, attn.d) / total
    y = attn.output(o, cos, sin)
    x = merge(y.flatten(0, 1), x, post, comb)
    return before_experts(stage, x, None)


class functions:  # replaced by compiled ones
    stage_half = staticmethod(_stage_half)


# --------------------------------------------------------------------------
# training
# --------------------------------------------------------------------------
@torch.no_grad()
def trunk_pass(trunk: Model, ids, layers):
    """Streams at the output and the concatenated taps."""
    x, _, taps = trunk.streams(ids, mode="topk", taps=layers)
    B = len(ids)
    return rms(trunk.hc_head(x), trunk.norm).view(B, ids.shape[1], -1), torch.cat(taps, -1).view(B, ids.shape[1], -1)


def drafter_loss(drafter: Drafter, trunk: Model, ids, anchors):
    B, K = anchors.shape
    n = drafter.block
    hidden, taps = trunk_pass(trunk, ids, drafter.taps)
    at = anchors[..., None] + torch.arange(n)  # [B, K, n]
    tokens = ids.gather(1, at.view(B, -1)).view(B, K, n)
    with torch.no_grad():
        wanted = hidden.gather(1, at.view(B, -1, 1).expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
        wanted = wide(lin(wanted, trunk.head))
        target = wanted.softmax(-1)
    h = drafter(trunk, taps, tokens[..., 0], anchors)
    e, bias = drafter.markov(tokens.flatten())
    logits = drafter.base_logits(trunk, h) + bias
    weight = (POSITION_WEIGHT ** torch.arange(n)).repeat(B * K)
    loss = (-(target * logits.log_softmax(-1)).sum(-1) * weight).mean()
    agree = (logits.argmax(-1) == wanted.argmax(-1)).float()
    conf = drafter.confidence_logit(h.detach(), e.detach())
    return loss, F.binary_cross_entropy_with_logits(conf, agree), agree.view(-1, n).detach()


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--run", type=Path, required=True)
    ap.add_argument("--steps", type=int, required=True)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=200)
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    nano.compute.dtype = torch.bfloat16
    nano.enable_compile()
    functions.stage_half = torch.compile(_stage_half, dynamic=False)

    c = load_config()
    trunk = Model(c, SEED).eval()
    trunk.load_state_dict(torch.load(args.run / "trunk.pt", weights_only=True)["model"])
    trunk.requires_grad_(False)
    drafter = Drafter(c).train()
    drafter.start_from(trunk)
    opt = Optimizer(drafter.named_parameters(), c)
    sources = {n: Source(args.run / f"{n}.npy", 10 + i) for i, n in enumerate(("core", "tests", "chat"))}

    step, smooth = 0, None
    checkpoint = args.run / "drafter.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        drafter.load_state_dict(state["drafter"])
        opt.load(state["optimizer"])
        step = state["step"]
        for name, count in state["counts"].items():
            sources[name].count = count

    log = open(args.run / "drafter-log.jsonl", "a")
    B, T = 8, 512
    began = time.time()
    while step < args.steps:
        rng = np.random.default_rng([SEED + 1, step])
        rows = []
        for _ in range(B):
            u = rng.random()
            name = "chat" if u < CHAT else "core" if u < CHAT + (1 - CHAT) * LIBRARY else "tests"
            rows.append(sources[name].window(T))
        ids = torch.from_numpy(np.stack(rows))[:, :T].contiguous()
        anchors = np.stack([rng.choice(T - drafter.block - 4, ANCHORS, replace=False) + 4 for _ in range(B)])
        loss, conf, agree = drafter_loss(drafter, trunk, ids, torch.from_numpy(anchors))
        (loss + 0.1 * conf).backward()
        done = step / args.steps
        rate = min(1, (step + 1) / WARM_STEPS) * (1 if done < 1 - DECAY else max(0.02, (1 - done) / DECAY))
        opt.step(0.5 * rate)
        balance_experts(drafter.stages, rate)
        step += 1
        agree = agree.mean(0)
        smooth = agree if smooth is None else 0.97 * smooth + 0.03 * agree
        if step % 20 == 0:
            line = json.dumps({"step": step, "loss": round(loss.item(), 4), "confidence": round(conf.item(), 4),
                               "agree": [round(v, 3) for v in smooth.tolist()], "seconds": round(time.time() - began)})  # fmt: skip
            log.write(line + "\n")
            log.flush()
            print(line, flush=True)
        if step % args.save_every == 0 or step == args.steps:
            save(checkpoint, drafter=drafter.state_dict(), optimizer=opt.state(), step=step,
                 counts={n: s.count for n, s in sources.items()})  # fmt: skip


if __name__ == "__main__":
    main()
