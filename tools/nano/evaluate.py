"""Measures a checkpoint folder. Every quoted number of nano comes from here.

    python evaluate.py bpb     --model DIR [--windows 512,2048] [--mode exact] [--bytes N]
    python evaluate.py indexer --model DIR [--window 2048]
    python evaluate.py drafter --model DIR [--prompts 128]
    python evaluate.py chat    --model DIR --checks RUN_DIR/chat-check.jsonl
    python evaluate.py generate --model DIR --prompt "def fibonacci(n):"
    python evaluate.py reference --model DIR --oracle ORACLE_DIR

Bits per byte: ids = BOS + the whole held-out text, encoded as one string. Window w
of length C reads ids[w*C .. w*C + C) and is scored on the ids one further, so each
token counts once and each window starts without context. The sum of the negative
log likelihoods in bits is divided by the bytes of the text. Arithmetic is f32.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import model as nano
from export import load_checkpoint
from model import lin, rms, wide

BLOCK = 128  # sequence lengths are multiples of this


def held_out_ids(folder: Path, text_file: Path, num_bytes: int = 0):
    """BOS and the ids of the text, or of its first `num_bytes`, and the number of bytes."""
    text = text_file.read_bytes()[: num_bytes or None]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.decode()).ids
    return np.array([0] + ids, np.int64), len(text)


def pad(rows: list[np.ndarray], length: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.pad(r, (0, length - len(r))) for r in rows]))


@torch.no_grad()
def bits_per_byte(trunk, ids: np.ndarray, num_bytes: int, window: int, mode: str) -> float:
    batch = max(1, 4096 // window)
    starts = list(range(0, len(ids) - 1, window))
    total = 0.0
    for i in range(0, len(starts), batch):
        inputs = [ids[s : s + window] for s in starts[i : i + batch]]
        targets = [ids[s + 1 : s + window + 1] for s in starts[i : i + batch]]
        inputs = [x[: len(y)] for x, y in zip(inputs, targets)]
        length = -(-max(map(len, inputs)) // BLOCK) * BLOCK
        hidden, _, _ = trunk.streams(pad(inputs, length), mode=mode)
        hidden = rms(trunk.hc_head(hidden), trunk.norm).view(len(inputs), length, -1)
        for h, y in zip(hidden, targets):
            for a in range(0, len(y), 2048):
                part = torch.from_numpy(y[a : a + 2048].copy())
                logits = wide(lin(h[a : a + len(part)], trunk.head))
                total += F.cross_entropy(logits, part, reduction="sum").item()
    return total / math.log(2) / num_bytes


def command_bpb(args):
    trunk, _ = load_checkpoint(args.model)
    ids, size = held_out_ids(args.model, args.text, args.bytes)
    for window in map(int, args.windows.split(",")):
        began = time.time()
        value = bits_per_byte(trunk, ids, size, window, args.mode)
        print(json.dumps({"window": window, "mode": args.mode, "bits_per_byte": round(value, 5), "tokens": len(ids) - 1,
                          "bytes": size, "seconds": round(time.time() - began)}), flush=True)  # fmt: skip


def command_indexer(args):
    trunk, _ = load_checkpoint(args.model)
    ids, size = held_out_ids(args.model, args.text)
    torch.manual_seed(0)
    for label, mode in (("chosen by the indexer", "exact"), ("chosen at random", "random"), ("every row", "dense")):
        value = bits_per_byte(trunk, ids, size, args.window, mode)
        print(json.dumps({"rows": label, "window": args.window, "bits_per_byte": round(value, 5)}), flush=True)


@torch.no_grad()
def greedy(trunk, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens after each prompt; every token costs a pass over the whole text."""
    rows = [list(p) for p in prompts]
    for _ in range(count):
        length = -(-max(map(len, rows)) // BLOCK) * BLOCK
        batch = pad([np.array(r) for r in rows], length)
        x, _, _ = trunk.streams(batch, mode="exact")
        last = torch.tensor([i * length + len(r) - 1 for i, r in enumerate(rows)])
        logits = wide(lin(rms(trunk.hc_head(x[last]), trunk.norm), trunk.head))
        for r, token in zip(rows, logits.argmax(-1).tolist()):
            r.append(token)
    return [r[len(p) :] for r, p in zip(rows, prompts)]


@torch.no_grad()
def command_drafter(args):
    """Drafts after greedy tokens of the trunk on held-out prompts, and how far the trunk agrees."""
    trunk, drafter = load_checkpoint(args.model)
    ids, _ = held_out_ids(args.model, args.text)
    n, context = drafter.block, args.context
    starts = np.linspace(0, len(ids) - context - 1, args.prompts).astype(int)
    accepted = np.zeros(n)
    trusted, lengths = [], []
    for i in range(0, len(starts), 8):
        prompts = [ids[s : s + context].tolist() for s in starts[i : i + 8]]
        continuation = torch.tensor(greedy(trunk, prompts, n + 1))  # the anchor, then what the trunk would say
        _, _, taps = trunk.streams(torch.tensor(prompts), mode="exact", taps=drafter.taps)
        taps = torch.cat(taps, -1).view(len(prompts), context, -1)
        anchors = torch.full((len(prompts), 1), context)
        drafts, confidence = drafter.draft(trunk, taps, anchors, continuation[:, :1])
        same = (drafts[:, 0] == continuation[:, 1:]).numpy()
        prefix = np.cumprod(same, 1)
        accepted += prefix.sum(0)
        lengths += prefix.sum(1).tolist()
        trusted.append(torch.sigmoid(confidence[:, 0]).mean(0).numpy())
    rate = accepted / len(starts)
    conditional = rate / np.concatenate([[1.0], rate[:-1]])
    print(json.dumps({"prompts": len(starts), "context": context, "accepted_to_position": rate.round(3).tolist(),
                      "accepted_given_before": conditional.round(3).tolist(), "tokens_per_step": round(1 + float(np.mean(lengths)), 3),
                      "mean_confidence": np.mean(trusted, 0).round(3).tolist()}))  # fmt: skip


@torch.no_grad()
def command_chat(args):
    """Share of the check prompts whose greedy completion is the expected one, by kind."""
    trunk, _ = load_checkpoint(args.model)
    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    right, asked = {}, {}
    for line in open(args.checks):
        check = json.loads(line)
        prompt, answer = tok.encode(check["prompt"]).ids, tok.encode(check["answer"]).ids
        row = np.array(prompt + answer)
        batch = pad([row], -(-len(row) // BLOCK) * BLOCK)
        x, _, _ = trunk.streams(batch, mode="exact")
        h = rms(trunk.hc_head(x), trunk.norm)[len(prompt) - 1 : len(row) - 1]
        guess = wide(lin(h, trunk.head)).argmax(-1).tolist()
        kind = check["kind"]
        asked[kind] = asked.get(kind, 0) + 1
        right[kind] = right.get(kind, 0) + (guess == answer)
        if args.verbose and guess != answer:
            print(kind, repr(check["prompt"][-80:]), "expected", repr(check["answer"]), "got", repr(tok.decode(guess, skip_special_tokens=False)))
    for kind in asked:
        print(json.dumps({"kind": kind, "asked": asked[kind], "right": right[kind]}))


def command_generate(args):
    trunk, _ = load_checkpoint(args.model)
    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    prompt = [0] + tok.encode(args.prompt).ids
    row = list(prompt)
    for _ in range(args.tokens):
        (token,) = greedy(trunk, [row], 1)[0]
        if token == 1:
            break
        row.append(token)
        sys.stdout.write(tok.decode([token], skip_special_tokens=False))
        sys.stdout.flush()
    print()


def command_reference(args):
    """Logits against the numpy reference, f64, on the start of the held-out text; drafts too."""
    sys.path.insert(0, str(args.oracle))
    sys.dont_write_bytecode = True
    from ref_model import RefModel

    trunk, drafter = load_checkpoint(args.model)
    trunk = trunk.double()
    nano.compute.dtype = torch.float64
    ids, _ = held_out_ids(args.model, args.text)
    ids = ids[: args.tokens]
    reference = RefModel(str(args.model))
    state = reference.new_state()
    taps = drafter is not None
    parts = [reference.forward(ids[a : a + 256], state, want_hidden=taps) for a in range(0, len(ids), 256)]
    want = np.concatenate([p[0] if taps else p for p in parts])
    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        got = trunk(torch.from_numpy(ids)[None]).numpy()
    report = {"tokens": len(ids), "max_difference": float(np.abs(got - want).max()), "logit_std": float(want.std())}
    if drafter is not None:
        drafter = drafter.double()
        reference.draft_context(state, np.concatenate([p[1] for p in parts]))
        anchor = int(want[-1].argmax())
        drafts, _, confidence = reference.draft(state, anchor)
        _, _, kept = trunk.streams(torch.from_numpy(ids)[None], mode="exact", taps=drafter.taps)
        mine, mine_confidence = drafter.draft(trunk, torch.cat(kept, -1)[None], torch.tensor([[len(ids)]]), torch.tensor([[anchor]]))
        report["same_drafts"] = mine[0, 0].tolist() == drafts.tolist()
        report["confidence_difference"] = float(np.abs(mine_confidence[0, 0].numpy() - confidence).max())
    print(json.dumps(report))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest="command", required=True)

    def command(name, **options):
        p = sub.add_parser(name)
        p.add_argument("--model", type=Path, required=True)
        p.add_argument("--text", type=Path, help="held-out text, MODEL/held-out.txt by default")
        p.add_argument("--threads", type=int, default=2)
        for option, default in options.items():
            kind = Path if option in ("checks", "oracle") else type(default)
            p.add_argument(f"--{option}", type=kind, default=default, required=default is None)

    command("bpb", windows="2048", mode="exact", bytes=0)
    command("indexer", window=2048)
    command("drafter", prompts=128, context=248)
    command("chat", checks=None, verbose=0)
    command("generate", prompt="def fibonacci(n):", tokens=64)
    command("reference", oracle=None, tokens=1024)
    args = ap.parse_args()
    args.text = args.text or args.model / "held-out.txt"
    torch.set_num_threads(args.threads)
    globals()[f"command_{args.command}"](args)


if __name__ == "__main__":
    main()
