"""Trains nano's trunk.

    python train.py --run RUN_DIR --total-tokens 20e6

Stops at `--total-tokens` and can be stopped (SIGTERM) and started again at any time: the
checkpoint in RUN_DIR (`trunk.pt`) carries weights, optimizer, counters and
the step, and every random choice is a function of the seed and the step. The
schedule is warm up, hold, decay over the last 40 % of the tokens, counted in
tokens: restarting with another total moves the decay. To train a finished model
further, restart with a larger total; the rate goes back up and decays again.

Reads `core.npy`, `tests.npy`, `held.npy`, `data.json` and, if it is there, `chat.npy`.
Writes `trunk.pt` and one JSON object a line to `train-log.jsonl`.
"""

import argparse
import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch

import model as nano
from model import CONFIG, Model, load_config

SEED = 1
WARM_STEPS = 40
DECAY = 0.4  # share of the tokens over which the rate falls
LIBRARY = 0.5  # share of library text; the rest is tests
CHAT = 0.08  # share of chat text before the decay
LATE_FROM = 0.6  # when long sequences join and the indexer starts to learn
TOPK_FROM = 0.78  # when it starts to choose
GAP_SHARE = 0.35  # of the sequences after LATE_FROM: a jump in the positions (see `positions`)
MUON_LR, MUON_DECAY, ADAM_LR, BIAS_STEP = 0.02, 0.1, 3e-3, 0.005
TOKENS_PER_STEP = 4096
GOLDEN = (math.sqrt(5) - 1) / 2


# --------------------------------------------------------------------------
# batches
# --------------------------------------------------------------------------
class Source:
    """Windows of one token array, spread evenly over it by the golden ratio."""

    def __init__(self, path: Path, seed: int):
        self.tokens = np.load(path)
        self.phase = np.random.default_rng(seed).random()
        self.count = 0

    def window(self, length: int) -> np.ndarray:
        at = (self.phase + self.count * GOLDEN) % 1.0
        self.count += 1
        start = int(at * (len(self.tokens) - length - 1))
        return self.tokens[start : start + length + 1].astype(np.int64)


def shape_at(step: int, done: float) -> tuple[int, int]:
    """Sequences and their length in this step. Each shape is compiled, so there are only two."""
    return (2, 2048) if done >= LATE_FROM and step % 2 else (8, 512)


def positions(rng, length: int, done: float) -> torch.Tensor:
    """0..length-1, sometimes with a jump at a multiple of 128.

    A jump shows the distances of a long context to a short sequence: rotary angles up to
    64 K tokens are trained at the price of 512.
    """
    pos = np.arange(length)
    if done >= LATE_FROM and rng.random() < GAP_SHARE:
        at = 128 * int(rng.integers(1, length // 128))
        pos[at:] += 128 * int(2 ** rng.uniform(0, 9))
    return torch.from_numpy(pos)


def make_batch(sources: dict, step: int, done: float, late_chat: float):
    rng = np.random.default_rng([SEED, step])
    B, T = shape_at(step, done)
    chat = (late_chat if done >= 1 - DECAY else CHAT) if "chat" in sources else 0.0
    rows = []
    for _ in range(B):
        u = rng.random()
        name = "chat" if u < chat else "core" if u < chat + (1 - chat) * LIBRARY else "tests"
        row = sources[name].window(T)
        if name != "chat" and rng.random() < 0.2:
            row[0] = 0  # text may start anywhere behind a BOS
        rows.append(row)
    batch = torch.from_numpy(np.stack(rows))
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), positions(rng, T, done)


# --------------------------------------------------------------------------
# optimizer: Muon for matrices, AdamW for the rest
# --------------------------------------------------------------------------
ADAM_MARKS = ("embed", "head", "hc_", "ape", "gate", "index_", "markov", "confidence")


def uses_muon(name: str, p: torch.Tensor) -> bool:
    if name.endswith("compressor.wgate") and "index_" not in name:
        return True
    return p.ndim >= 2 and not any(mark in name for mark in ADAM_MARKS)


def as_matrices(name: str, p: torch.Tensor, c) -> torch.Tensor:
    """Independent matrices `[n, out, in]` inside a stacked parameter."""
    last = p.shape[-1]
    if name.endswith("w13"):
        return p.view(2 * p.shape[0], -1, last)
    if name.endswith("shared13"):
        return p.view(2, -1, last)
    if "compressor.w" in name:
        return p.view(-1, c.head_dim, last)
    if name.endswith("wq_b"):
        return p.view(c.num_attention_heads, c.head_dim, last)
    return p if p.ndim == 3 else p[None]


def orthogonalise(x: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices."""
    x = x.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.flatten(-2).norm(dim=-1)[..., None, None] + 1e-7)
    for a, b, c in (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ):
        g = x @ x.mT
        x = a * x + (b * g + c * (g @ g)) @ x
    return (x.mT if tall else x).float()


class Muon:
    def __init__(self, named, c, momentum=0.95):
        self.c, self.momentum = c, momentum
        self.named = list(named)
        self.buffers = {n: torch.zeros_like(p) for n, p in self.named}
        self.groups = {}
        for n, p in self.named:
            self.groups.setdefault(tuple(as_matrices(n, p.data, c).shape[1:]), []).append((n, p))

    @torch.no_grad()
    def step(self, lr: float):
        for (rows, cols), members in self.groups.items():
            updates = []
            for n, p in members:
                self.buffers[n].lerp_(p.grad, 1 - self.momentum)
                updates.append(as_matrices(n, torch.lerp(p.grad, self.buffers[n], self.momentum), self.c))
            updates = orthogonalise(torch.cat(updates)).split([len(u) for u in updates])
            scale = max(1, rows / cols) ** 0.5
            for (n, p), u in zip(members, updates):
                as_matrices(n, p.data, self.c).mul_(1 - lr * MUON_DECAY).add_(u, alpha=-lr * scale)
        for _, p in self.named:
            p.grad = None


class Optimizer:
    def __init__(self, named, c):
        named = list(named)
        self.muon = Muon([(n, p) for n, p in named if uses_muon(n, p)], c)
        self.plain = [p for n, p in named if not uses_muon(n, p)]
        self.adam = torch.optim.AdamW(self.plain, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10, fused=True)

    def step(self, rate: float):
        self.muon.step(MUON_LR * rate)
        torch.nn.utils.clip_grad_norm_([p for p in self.plain if p.grad is not None], 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_LR * rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state(self):
        return {"muon": self.muon.buffers, "adam": self.adam.state_dict()}

    def load(self, state):
        for n, buffer in self.muon.buffers.items():
            buffer.copy_(state["muon"][n])
        self.adam.load_state_dict(state["adam"])


def rate_at(step: int, done: float) -> float:
    warm = min(1.0, (step + 1) / WARM_STEPS)
    return warm * (1.0 if done < 1 - DECAY else max(0.02, (1 - done) / DECAY))


@torch.no_grad()
def balance_experts(blocks, rate: float):
    """Nudges the selection biases towards equal loads."""
    for block in blocks:
        if not block.ffn.hashed:
            load = block.ffn.load
            block.ffn.bias.add_(torch.sign(load.mean() - load), alpha=BIAS_STEP * rate)


# --------------------------------------------------------------------------
# the run
# --------------------------------------------------------------------------
@torch.no_grad()
def quick_bpb(model, held: np.ndarray, held_bytes: int, windows=64, T=512) -> float:
    """Bits per byte over the first windows of the held-out text, attending to every row; for the log only."""
    model.eval()
    total = 0.0
    for i in range(0, windows, 8):
        part = torch.from_numpy(np.stack([held[j * T : j * T + T + 1] for j in range(i, i + 8)]).astype(np.int64))
        total += model.loss(part[:, :-1].contiguous(), part[:, 1:].contiguous(), mode="dense")[0].item() * 8 * T
    model.train()
    return total / (windows * T) / math.log(2) * (len(held) - 1) / held_bytes


def save(path: Path, **state):
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--run", type=Path, required=True)
    ap.add_argument("--total-tokens", type=float, required=True)
    ap.add_argument("--late-chat", type=float, default=0.35, help="share of chat text during the decay")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=150, help="steps between checkpoints and evaluations")
    ap.add_argument("--max-steps", type=int, default=0, help="stop early, for measurements")
    ap.add_argument("--f32", action="store_true", help="f32 products instead of bf16")
    args = ap.parse_args()

    torch.set_num_threads(args.threads)
    nano.compute.dtype = torch.float32 if args.f32 else torch.bfloat16
    nano.enable_compile()
    c = load_config()
    model = Model(c, SEED).train()
    opt = Optimizer(model.named_parameters(), c)
    sources = {n: Source(args.run / f"{n}.npy", i) for i, n in enumerate(("core", "tests"))}
    if (args.run / "chat.npy").exists():
        sources["chat"] = Source(args.run / "chat.npy", 2)
    held = np.load(args.run / "held.npy")
    held_bytes = json.loads((args.run / "data.json").read_text())["held_out_bytes"]

    step, tokens, smooth, seconds = 0, 0, None, 0.0
    checkpoint = args.run / "trunk.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        opt.load(state["optimizer"])
        step, tokens, smooth, seconds = state["step"], state["tokens"], state["smooth"], state["seconds"]
        for name, count in state["counts"].items():
            if name in sources:
                sources[name].count = count
        print(f"resumed at step {step}, {tokens} tokens", flush=True)

    log = open(args.run / "train-log.jsonl", "a")

    def note(**values):
        line = json.dumps(values)
        log.write(line + "\n")
        log.flush()
        print(line, flush=True)

    def checkpoint_now():
        save(
            checkpoint,
            model=model.state_dict(),
            optimizer=opt.state(),
            step=step,
            tokens=tokens,
            smooth=smooth,
            seconds=seconds,
            counts={n: s.count for n, s in sources.items()},
            config=CONFIG,
        )

    params = sum(p.numel() for p in model.parameters())
    note(event="start", parameters=params, step=step, tokens=tokens, total_tokens=args.total_tokens)
    first_step = step
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    while not stopping and tokens < args.total_tokens and not (args.max_steps and step - first_step >= args.max_steps):
        began = time.time()
        done = tokens / args.total_tokens
        mode = "learn" if done >= LATE_FROM else "dense"
        sparse = torch.tensor(done >= TOPK_FROM)
        rate = rate_at(step, done)
        ids, targets, pos = make_batch(sources, step, done, args.late_chat)
        loss, kl = model.loss(ids, targets, pos, mode, sparse if mode == "learn" else None)
        (loss + kl).backward()
        opt.step(rate)
        balance_experts(model.blocks, rate)
        step += 1
        tokens += ids.numel()
        value, kl = loss.item(), float(kl)
        smooth = value if smooth is None else 0.97 * smooth + 0.03 * value
        took = time.time() - began
        seconds += took
        if step % 10 == 0 or step - first_step <= 5:
            note(step=step, tokens=tokens, loss=round(value, 4), smooth=round(smooth, 4), rate=round(rate, 4), kl=round(kl, 4),
                 mode="topk" if sparse else mode, shape=list(ids.shape), tok_s=round(ids.numel() / took), seconds=round(seconds))  # fmt: skip
        if step % args.save_every == 0:
            checkpoint_now()
            note(step=step, tokens=tokens, seconds=round(seconds),
                 held_bpb=round(quick_bpb(model, held, held_bytes), 4))  # fmt: skip
    checkpoint_now()
    note(event="end", step=step, tokens=tokens, seconds=round(seconds),
         held_bpb=round(quick_bpb(model, held, held_bytes), 4))  # fmt: skip


if __name__ == "__main__":
    main()
