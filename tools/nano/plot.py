"""Draws the loss curve of a run.

    python plot.py --run RUN_DIR --out loss.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--run", type=Path, required=True)
    ap.add_argument("--out", type=Path, required=True)
    args = ap.parse_args()
    # A run that was stopped repeats the steps after its last checkpoint: the later line counts.
    steps, held = {}, {}
    for line in open(args.run / "train-log.jsonl"):
        entry = json.loads(line)
        if "loss" in entry:
            steps[entry["tokens"]] = entry
        elif "held_bpb" in entry:
            held[entry["tokens"]] = entry["held_bpb"]
    report = json.loads((args.run / "data.json").read_text())

    fig, left = plt.subplots(figsize=(7, 4), dpi=100)
    tokens = sorted(steps)
    left.plot([t / 1e6 for t in tokens], [steps[t]["smooth"] for t in tokens], color="0.6", lw=1)
    left.set_xlabel("million tokens")
    left.set_ylabel("training loss, nats a token (grey)")
    left.set_ylim(1, 6)
    right = left.twinx()
    at = sorted(held)
    right.plot([t / 1e6 for t in at], [held[t] for t in at], color="C0", marker=".", lw=1)
    right.set_ylabel("held-out bits a byte (blue)", color="C0")
    right.set_ylim(1.0, 2.2)
    for label, value in (("xz -9e", report["xz_bpb"]), ("xz primed with the training text", report["xz_primed_all_bpb"])):
        right.axhline(value, color="C3", lw=0.8, ls="--")
        right.text(0.3, value + 0.01, label, color="C3", fontsize=8)
    modes = [(t, steps[t]["mode"]) for t in tokens]
    for (_, before), (t, after) in zip(modes, modes[1:]):
        if before == "dense" and after == "topk":
            left.axvline(t / 1e6, color="C2", lw=0.8, ls=":")
            left.text(t / 1e6, 5.7, " top-k on", color="C2", fontsize=8)
    fig.tight_layout()
    fig.savefig(args.out)


if __name__ == "__main__":
    main()
