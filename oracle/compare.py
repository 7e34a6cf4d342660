"""Compares two sets of the oracle's files.

    python compare.py COMMITTED NEW

Checkpoints must be equal byte for byte, integers exactly, floats within TOLERANCE. Prints one line for each file
that is not equal byte for byte; exit status 1 if any difference is larger than allowed.
"""

import os
import sys

import numpy as np

import ref_model as R

CHECKPOINTS = [f"{d}/{f}" for d in ("tiny", "tiny-bf16", "tiny-mlx", "variant-pro") for f in ("config.json", "model.safetensors")]
CHECKPOINTS += [f"variant-mixed/{f}" for f in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")]
# max abs difference. Another BLAS moves the last digits; logits may also come from the other source (4.4e-5 apart).
TOLERANCE = {
    "golden_logits.safetensors": 1e-4,
    "golden_debug.safetensors": 1e-5,
    "golden_state.safetensors": 1e-5,
    "golden_draft.safetensors": 1e-5,
    "golden_units.safetensors": 1e-12,
    "golden_variants.safetensors": 1e-5,
}


def read(path):
    with open(path, "rb") as f:
        return f.read()


def largest_difference(old, new):
    """(tensor name, max abs difference); infinite where shapes, types or integers differ."""
    if old.keys() != new.keys():
        return ", ".join(sorted(old.keys() ^ new.keys())), float("inf")
    worst = ("", 0.0)
    for name, (dtype, a) in old.items():
        new_dtype, b = new[name]
        if dtype != new_dtype or a.shape != b.shape:
            return name, float("inf")
        if a.dtype.kind != "f":
            d = 0.0 if np.array_equal(a, b) else float("inf")
        else:
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            with np.errstate(invalid="ignore"):
                gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
            # NaN or infinity against a number stays a difference
            gap = np.where(same, 0.0, np.where(np.isnan(gap), np.inf, gap))
            d = float(gap.max(initial=0.0))
        if d > worst[1]:
            worst = (name, d)
    return worst


def main():
    committed, new = sys.argv[1:]
    bad, equal = [], 0
    for name in CHECKPOINTS + sorted(TOLERANCE):
        a, b = os.path.join(committed, name), os.path.join(new, name)
        if read(a) == read(b):
            equal += 1
            continue
        if name in CHECKPOINTS:
            print(f"{name}: DIFFERENT (checkpoints must be equal byte for byte)")
            bad.append(name)
            continue
        tensor, d = largest_difference(R.read_safetensors(a), R.read_safetensors(b))
        verdict = "within" if d <= TOLERANCE[name] else "DIFFERENT, beyond"
        print(f"{name}: {verdict} {TOLERANCE[name]:g}: largest difference {d:.3g} in {tensor}")
        if d > TOLERANCE[name]:
            bad.append(name)
    print(f"{equal} of {len(CHECKPOINTS) + len(TOLERANCE)} files are equal byte for byte, {len(bad)} differ beyond the tolerance")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
