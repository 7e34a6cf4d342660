"""Makes the test vectors of MLX's affine formats, with MLX itself.

    python -m venv venv && venv/bin/pip install "mlx[cpu]==0.32.2" numpy
    venv/bin/python oracle/make_affine.py crates/model/tests/data/affine.safetensors

For each width of 2, 3, 4, 5, 6 and 8 bits, each group of 32, 64 and 128 columns and each scale type, one small matrix:
`b{bits}.g{group}.{type}.weight` (words), `.scales`, `.biases` as `mx.quantize` gives them, and `.values` (F32) as
`mx.dequantize` does from the scales and biases widened to float32: from narrow ones it would round each value to their
type. Widths other than powers of two pack codes across word edges. A SHA256SUMS beside the file notes command, versions
and seed.
"""

import hashlib
import os
import platform
import sys
from importlib.metadata import version

import mlx.core as mx
import numpy as np

from tiny_model import write_safetensors

SEED = 20260731
ROWS = 3
TYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32"}


def stored(a):
    """(dtype name, array of the same bytes that numpy can hold)"""
    name = NAMES[a.dtype]
    return name, np.array(a.view(mx.uint16) if name == "BF16" else a)


def main():
    out = sys.argv[1]
    rng = np.random.default_rng(SEED)
    tensors = {}
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            for kind, dtype in TYPES.items():
                cols = max(group, 64) + (group if group < 128 else 0)
                x = mx.array(rng.standard_normal((ROWS, cols)).astype(np.float32)).astype(dtype)
                weight, scales, biases = mx.quantize(x, group_size=group, bits=bits, mode="affine")
                spec = dict(group_size=group, bits=bits, mode="affine")
                values = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), **spec)
                p = f"b{bits}.g{group}.{kind}."
                for name, a in (("weight", weight), ("scales", scales), ("biases", biases), ("values", values)):
                    tensors[p + name] = stored(a)
    write_safetensors(out, tensors)
    data = open(out, "rb").read()
    versions = ", ".join(f"{package} {version(package)}" for package in ("mlx", "mlx-cpu", "numpy"))
    with open(os.path.join(os.path.dirname(out), "SHA256SUMS"), "w") as f:
        f.write(f"# Made by oracle/make_affine.py (seed {SEED}; Python {platform.python_version()}, {versions}):\n")
        f.write(f"#   python oracle/make_affine.py {out}\n")
        f.write(f"{hashlib.sha256(data).hexdigest()}  {os.path.basename(out)}\n")
    print(len(tensors), "tensors,", len(data), "bytes")


main()
