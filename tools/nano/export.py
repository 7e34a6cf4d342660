"""Writes trained weights as checkpoints in the official layout.

    python export.py --run RUN_DIR --model MODEL_DIR --unrounded DIR

MODEL_DIR gets `config.json` and `model.safetensors` in the shipped formats (fp8
matrices, fp4 experts, bf16, f32). DIR gets the same tensors in plain f32 under the
same names: what the trainer computed with. The drafter is included when RUN_DIR
has a `drafter.pt`.
"""

import argparse
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from drafter import Drafter, drafter_tensors
from layout import Tensor, load, trunk_tensors
from model import CONFIG, Model, load_config

TILE, GROUP = 128, 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Limits between neighbouring e2m1 magnitudes; a tie goes to the even code.
E2M1_LIMITS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


# --------------------------------------------------------------------------
# number formats: encoders return raw storage, decoders f32
# --------------------------------------------------------------------------
def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """`2 ** exponent` from the bits of an f32, exact for -126..127."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def power_of_two_scale(peak: torch.Tensor, top: float) -> torch.Tensor:
    """Smallest power of two s with `peak / top <= s`, in f32."""
    mantissa, exponent = torch.frexp(peak.float() * torch.tensor(1.0 / top, dtype=torch.float32))
    return power_of_two(torch.where(mantissa == 0.5, exponent - 1, exponent))


def scale_byte(scale: torch.Tensor) -> np.ndarray:
    return (torch.log2(scale).round().int() + 127).to(torch.uint8).numpy()


def spread_tiles(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return scale.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :cols]


def encode_fp8(w: torch.Tensor):
    """`[out, in]` -> e4m3 bytes and E8M0 bytes, one per 128x128 tile (ragged at the edges)."""
    rows, cols = w.shape
    padded = F.pad(w.float(), (0, -cols % TILE, 0, -rows % TILE))
    tiles = padded.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    scale = power_of_two_scale(tiles.abs().amax((1, 3)).clamp(min=1e-4), 448.0)
    code = (w.float() / spread_tiles(scale, rows, cols)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return code.view(torch.uint8).numpy(), scale_byte(scale)


def decode_fp8(code: np.ndarray, scale: np.ndarray) -> torch.Tensor:
    s = power_of_two(torch.from_numpy(scale.astype(np.int32)) - 127)
    return torch.from_numpy(code.copy()).view(torch.float8_e4m3fn).float() * spread_tiles(s, *code.shape)


def encode_fp4(w: torch.Tensor):
    """`[out, in]` -> two e2m1 codes a byte (low nibble first) and one E8M0 byte per 32 columns."""
    groups = w.float().unflatten(1, (-1, GROUP))
    scale = power_of_two_scale(groups.abs().amax(-1).clamp(min=6 * 2.0**-126), 6.0)
    v = (groups / scale[..., None]).clamp(-6, 6)
    code = sum(((v.abs() >= lim) if ties_up else (v.abs() > lim)).int() for lim, ties_up in E2M1_LIMITS)
    code = (code + 8 * torch.signbit(v).int()).flatten(1).to(torch.uint8)
    return (code[:, 0::2] | (code[:, 1::2] << 4)).view(torch.int8).numpy(), scale_byte(scale)


def decode_fp4(packed: np.ndarray, scale: np.ndarray) -> torch.Tensor:
    b = torch.from_numpy(packed.copy()).view(torch.uint8).int()
    code = torch.stack([b & 15, b >> 4], -1).flatten(1)
    v = torch.where(code >= 8, -E2M1[code & 7], E2M1[code & 7])
    s = power_of_two(torch.from_numpy(scale.astype(np.int32)) - 127)
    return v * s.repeat_interleave(GROUP, 1)


def encode_bf16(w: torch.Tensor) -> np.ndarray:
    return w.bfloat16().view(torch.int16).numpy()


# --------------------------------------------------------------------------
# safetensors
# --------------------------------------------------------------------------
def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """`tensors`: name -> (safetensors dtype, raw storage). Widest items first keeps offsets aligned."""
    header: dict = {"__metadata__": {"format": "pt"}}
    order = sorted(tensors, key=lambda name: (-tensors[name][1].dtype.itemsize, name))
    offset = 0
    for name in order:
        dtype, array = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            out.write(np.ascontiguousarray(tensors[name][1]).tobytes())


STORAGE = {"F32": "<f4", "BF16": "<i2", "I64": "<i8", "I8": "i1", "F8_E4M3": "u1", "F8_E8M0": "u1"}


def read_safetensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    body = memoryview(data)[8 + length :]
    found = {}
    for name, t in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = t["data_offsets"]
            found[name] = (t["dtype"], np.frombuffer(body[start:end], STORAGE[t["dtype"]]).reshape(t["shape"]))
    return found


def decode(raw: dict[str, tuple[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Real values under the official names."""
    values = {}
    for name, (dtype, a) in raw.items():
        if name.endswith(".scale"):
            continue
        if dtype in ("F8_E4M3", "I8"):
            scale = raw[name.removesuffix("weight") + "scale"][1]
            values[name] = (decode_fp8 if dtype == "F8_E4M3" else decode_fp4)(a, scale)
        elif dtype == "BF16":
            values[name] = torch.from_numpy(a.copy()).view(torch.bfloat16).float()
        else:
            values[name] = torch.from_numpy(a.copy())
    return values


def encode(t: Tensor) -> dict[str, tuple[str, np.ndarray]]:
    """A tensor in its shipped format, with its scale."""
    if t.kind in ("fp8", "fp4"):
        code, scale = (encode_fp8 if t.kind == "fp8" else encode_fp4)(t.view)
        dtype = "F8_E4M3" if t.kind == "fp8" else "I8"
        return {t.name: (dtype, code), t.name.removesuffix("weight") + "scale": ("F8_E8M0", scale)}
    if t.kind == "bf16":
        return {t.name: ("BF16", encode_bf16(t.view))}
    return plain(t)


def plain(t: Tensor) -> dict[str, tuple[str, np.ndarray]]:
    if t.kind == "i64":
        return {t.name: ("I64", t.view.numpy())}
    return {t.name: ("F32", t.view.float().contiguous().numpy())}


def load_checkpoint(folder: Path):
    """Trunk and drafter (None if absent) with the weights of an official-layout folder."""
    c = load_config(json.loads((folder / "config.json").read_text()))
    values = decode(read_safetensors(folder / "model.safetensors"))
    trunk = Model(c).eval()
    load(trunk_tensors(trunk), values)
    drafter = None
    if "mtp.0.main_proj.weight" in values:
        drafter = Drafter(c).eval()
        load(drafter_tensors(drafter), values)
    return trunk, drafter


def write_checkpoint(folder: Path, tensors: list[Tensor], config: dict, rounded: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict = {}
    for t in tensors:
        stored.update(encode(t) if rounded else plain(t))
    write_safetensors(folder / "model.safetensors", stored)
    config = dict(config)
    if not rounded:
        del config["quantization_config"], config["expert_dtype"]
        config["torch_dtype"] = "float32"
    if not any(t.name.startswith("mtp.") for t in tensors):
        config = {k: v for k, v in config.items() if not k.startswith("dspark_")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--run", type=Path, required=True)
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--unrounded", type=Path)
    args = ap.parse_args()

    c = load_config()
    trunk = Model(c)
    trunk.load_state_dict(torch.load(args.run / "trunk.pt", weights_only=True)["model"])
    tensors = list(trunk_tensors(trunk))
    if (args.run / "drafter.pt").exists():
        drafter = Drafter(c)
        drafter.load_state_dict(torch.load(args.run / "drafter.pt", weights_only=True)["drafter"])
        tensors += list(drafter_tensors(drafter))
    write_checkpoint(args.model, tensors, CONFIG, rounded=True)
    if args.unrounded:
        write_checkpoint(args.unrounded, tensors, CONFIG, rounded=False)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(args.model / name, args.unrounded / name)
        shutil.copytree(args.model / "encoding", args.unrounded / "encoding", dirs_exist_ok=True)
    size = sum(f.stat().st_size for f in args.model.rglob("*") if f.is_file())
    print("model.safetensors", (args.model / "model.safetensors").stat().st_size, "bytes; folder", size, "bytes")


if __name__ == "__main__":
    main()
