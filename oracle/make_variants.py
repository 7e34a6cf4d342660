"""Random DeepSeek-V4 checkpoints of other shapes and storages than the tiny one, and their logits (our own code).

    python make_variants.py --root FOLDER                    the kept ones: checkpoints and golden_variants.safetensors
    python make_variants.py --root FOLDER --troika BINARY    every shape, through `troika logits`; prints differences

Numpy only, seeded. The reference is ref_model.py in float64; `VariantRef` adds what the tiny model does not need: other
scoring functions, routing weights that are not normalised, no clamp. It takes the builder's numbers, not the file, so it
shares no reader with anybody. Token sequences are chosen such that no expert or index choice is close to a tie; exact ties
(index scores that ReLU makes zero) are allowed, since the rule for them is part of what is compared.
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
import tempfile

import numpy as np

import ref_model as R
import tiny_model as TM

SEED = 20260801
MIN_GAP = 2e-4
BOUND = 2e-4


# --------------------------------------------------------------------------
# reference
# --------------------------------------------------------------------------
class VariantRef(R.RefModel):
    """ref_model on given numbers, with the options of the configuration that the tiny model leaves out."""

    def __init__(self, config, values, dtype=np.float64, kv_fp8=False, index_fp4=False):
        c = self.c = config
        self.dt, self.quantised = dtype, set()
        self.t = {k: (v if v.dtype.kind == "i" else v.astype(dtype)) for k, v in values.items()}
        self.kv_fp8, self.index_fp4, self.act_fp8 = kv_fp8, index_fp4, False
        self.eps, self.rd = c["rms_norm_eps"], c["qk_rope_head_dim"]
        self.f_plain = R.inv_freq(self.rd, c["rope_theta"])
        yarn = c.get("rope_scaling")
        self.f_comp = R.inv_freq(self.rd, c["compress_rope_theta"], yarn and {"beta_fast": 32, "beta_slow": 1, **yarn})
        self.gap = np.inf  # distance from a tie of the closest choice made so far

    def choice(self, scores, k):
        """Notes how close the k-th best of each row is to the next; exact ties follow the rule and do not count."""
        if scores.shape[1] > k:
            best = -np.sort(-scores, 1)
            best = best[np.isfinite(best[:, k])]
            gap = best[:, k - 1] - best[:, k]
            self.gap = min(self.gap, gap[gap > 0].min(initial=np.inf))

    def select(self, x, qr, ls, p, pos, vis, tap):
        def noting(name, v):
            if name == "index_scores":
                self.choice(v, self.c["index_topk"])
            tap(name, v)

        return super().select(x, qr, ls, p, pos, vis, noting)

    def swiglu(self, x, p):
        if self.c.get("swiglu_limit"):
            return super().swiglu(x, p)
        g = self.lin(x, p + "w1.weight")
        return g * R.sigmoid(g) * self.lin(x, p + "w3.weight")

    def moe(self, x, ids, p, tap):
        c, k = self.c, self.c["num_experts_per_tok"]
        z = x @ self.t[p + "gate.weight"].T
        kind = c.get("scoring_func", "sqrtsoftplus")
        if kind == "sqrtsoftplus":
            score = np.sqrt(np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))))
        else:
            score = {"sigmoid": R.sigmoid, "softmax": R.softmax}[kind](z)
        if p + "gate.tid2eid" in self.t:
            sel = self.t[p + "gate.tid2eid"][ids]
        else:
            biased = score + self.t[p + "gate.bias"]
            self.choice(biased, k)
            sel = np.argsort(-biased, axis=1, kind="stable")[:, :k]
        w = np.take_along_axis(score, sel, 1)
        if c.get("norm_topk_prob", True):
            w = w / w.sum(1, keepdims=True)
        w = w * c["routed_scaling_factor"]
        y = np.zeros_like(x)
        for e in np.unique(sel):
            t, j = np.nonzero(sel == e)
            q = p + f"experts.{e}."
            np.add.at(y, t, self.lin(self.swiglu(x[t], q) * w[t, j][:, None], q + "w2.weight"))
        q = p + "shared_experts."
        return y + self.lin(self.swiglu(x, q), q + "w2.weight")


# --------------------------------------------------------------------------
# checkpoints
# --------------------------------------------------------------------------
class VariantBuilder(TM.Builder):
    """tiny_model's builder with a choice of formats. `storage` maps what the tiny model stores as dense (fp8), expert (fp4),
    plain (bf16) and f32 to fp8, fp8-f32, fp8-bf16 (scales of that type), fp4, bf16, f16 or f32; `ragged` is the format of
    expert matrices whose width is no multiple of 32."""

    def __init__(self, seed, storage):
        super().__init__(seed)
        self.storage, self.values = storage, {}

    def put(self, name, v, fmt):
        v = v.astype(np.float32)
        fmt = "bf16" if v.ndim == 1 and fmt.startswith("fp") else fmt
        if fmt.startswith("fp8"):
            code, s = TM.quant_fp8_block(v)
            if fmt == "fp8":
                scale = ("F8_E8M0", TM.scale_byte(s))
            else:  # any positive number will do as a scale
                s = (s * self.rng.uniform(0.7, 1.4, s.shape)).astype(np.float32)
                s = R.bf16_to_f32(R.f32_to_bf16(s)) if fmt == "fp8-bf16" else s
                scale = ("BF16", R.f32_to_bf16(s)) if fmt == "fp8-bf16" else ("F32", s)
            self.q[name] = ("F8_E4M3", code)
            self.q[name.removesuffix("weight") + self.storage.get("scale", "scale")] = scale
            full = np.repeat(np.repeat(s.astype(np.float64), 128, 0), 128, 1)[: v.shape[0], : v.shape[1]]
            self.values[name] = R.E4M3[code] * full
        elif fmt == "fp4":
            packed, s = TM.quant_fp4_rows(v)
            self.q[name] = ("I8", packed)
            self.q[name.removesuffix("weight") + self.storage.get("scale", "scale")] = ("F8_E8M0", TM.scale_byte(s))
            u = packed.view(np.uint8)
            code = np.stack([u & 15, u >> 4], -1).reshape(v.shape)
            self.values[name] = np.where(code & 8, -R.E2M1[code & 7], R.E2M1[code & 7]) * np.repeat(s, 32, 1)
        elif fmt == "bf16":
            self.q[name] = ("BF16", R.f32_to_bf16(v))
            self.values[name] = R.bf16_to_f32(self.q[name][1])
        else:
            kind, dtype = {"f16": ("F16", np.float16), "f32": ("F32", np.float32)}[fmt]
            self.q[name] = (kind, v.astype(dtype))
            self.values[name] = v.astype(dtype).astype(np.float32)

    def f32(self, name, v):
        self.put(name, v, self.storage.get("f32", "f32"))

    def bf16(self, name, v):
        self.put(name, v, self.storage.get("plain", "bf16"))

    def fp8(self, name, o, i, gain=1.0):
        self.put(name + ".weight", self.n(o, i, std=gain * i**-0.5), self.storage.get("dense", "fp8"))

    def fp4(self, name, o, i, gain=1.0):
        fmt = self.storage.get("expert", "fp4")
        if fmt == "fp4" and i % 32:
            fmt = self.storage.get("ragged", "fp8")
        self.put(name + ".weight", self.n(o, i, std=gain * i**-0.5), fmt)

    def build(self, c):
        super().build({"dspark_target_layer_ids": [], **c})
        for name in [n for n in self.q if n.endswith("tid2eid")]:
            table = self.q[name][1]
            self.values[name] = table
            if self.storage.get("table") == "i32":
                self.q[name] = ("I32", table.astype(np.int32))
        return self


def write_checkpoint(folder, config, tensors, shards=1, index=True):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=2)
        f.write("\n")
    if shards == 1:
        TM.write_safetensors(os.path.join(folder, "model.safetensors"), tensors, {"format": "pt"})
        return
    names, where = sorted(tensors), {}
    for s in range(shards):  # dealt out like cards, so scales lie in other files than their weights
        part = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        where.update({n: part for n in names[s::shards]})
        TM.write_safetensors(os.path.join(folder, part), {n: tensors[n] for n in names[s::shards]}, {"format": "pt"})
    if index:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {}, "weight_map": dict(sorted(where.items()))}, f, indent=0)
            f.write("\n")


# --------------------------------------------------------------------------
# shapes
# --------------------------------------------------------------------------
DSPARK = [k for k in TM.CONFIG if k.startswith("dspark_")]
FULL = {k: "f32" for k in ("dense", "expert", "plain", "f32")}
HALF = {k: "f16" for k in ("dense", "expert", "plain")}
BRAIN = {k: "bf16" for k in ("dense", "expert", "plain", "f32")}
SMALL = {
    "hidden_size": 96, "head_dim": 64, "qk_rope_head_dim": 32, "index_head_dim": 64, "index_n_heads": 4, "q_lora_rank": 48,
    "o_lora_rank": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "num_hash_layers": 0, "vocab_size": 250,
    "index_topk": 4, "sliding_window": 64,
}
PRO = {
    **SMALL, "hidden_size": 160, "compress_ratios": [128, 128, 4], "num_attention_heads": 6, "o_groups": 3, "q_lora_rank": 96,
    "moe_intermediate_size": 24, "routed_scaling_factor": 2.5, "n_routed_experts": 5,
}
NARROW = {"head_dim": 48, "index_head_dim": 48, "vocab_size": 150}

# name: (changes of the tiny configuration; None drops a key, "null" writes null), storage, number of tokens
KEPT = {
    # V4-Pro's pattern: leading HCA layers, three output groups, no hash layers; ragged 128-tiles, experts too narrow for fp4
    "pro": ({**PRO, **NARROW}, {"f32": "bf16"}, 400),
    # everything the configuration leaves open, the other way round
    "mixed": ({**SMALL, "compress_ratios": [4, 0, 16], "hc_mult": 2, "num_hash_layers": 1, "scoring_func": "sigmoid",
               "norm_topk_prob": False, "rope_scaling": "null", "swiglu_limit": None, "num_attention_heads": 3, "o_groups": 1,
               "head_dim": 48, "qk_rope_head_dim": 48, "index_head_dim": 80, "index_n_heads": 2, "index_topk": 5,
               "moe_intermediate_size": 20, "rms_norm_eps": 1e-3, "hc_eps": 1e-3, "hc_sinkhorn_iters": 3,
               "eos_token_id": [1, 2], "vocab_size": 131, "n_routed_experts": 5, "expert_dtype": None},
              {"dense": "fp8-f32", "scale": "weight_scale_inv", "expert": "f16", "plain": "f16", "table": "i32", "shards": 2,
               "no_index": True},
              400),
}
OTHERS = {
    "pro-five": ({**PRO, "hidden_size": 192, "compress_ratios": [128, 128, 4, 128, 4], "n_routed_experts": 12,
                  "moe_intermediate_size": 40}, {"dense": "fp8-f32", "scale": "weight_scale_inv", "shards": 3}, 700),
    "pro-full-rope": ({**PRO, "qk_rope_head_dim": 64}, {}, 300),
    "drafter": ({"num_hash_layers": 1, "sliding_window": 64}, {}, 300),
    "swa-only": ({**SMALL, "compress_ratios": [0]}, {}, 300),
    "csa-only": ({**SMALL, "compress_ratios": [4]}, {}, 300),
    "hca-only": ({**SMALL, "compress_ratios": [128]}, {}, 300),
    "two-streams": ({**SMALL, "compress_ratios": [0, 4, 128], "hc_mult": 2}, BRAIN, 300),
    "three-streams-softmax": ({**SMALL, "compress_ratios": [128, 4], "hc_mult": 3, "scoring_func": "softmax"}, FULL, 300),
    "one-stream": ({**SMALL, "compress_ratios": [4, 128], "hc_mult": 1}, HALF, 300),
    "eight-streams": ({**SMALL, "compress_ratios": [4, 128], "hc_mult": 8}, {}, 150),
    "softmax-unnormalised": ({**SMALL, "compress_ratios": [4, 128], "scoring_func": "softmax", "norm_topk_prob": False}, {}, 300),
    "sigmoid": ({**SMALL, "compress_ratios": [4, 128], "scoring_func": "sigmoid"}, {}, 300),
    "softplus-unnormalised": ({**SMALL, "compress_ratios": [4, 0], "norm_topk_prob": False, "num_hash_layers": 1}, {}, 300),
    "no-yarn-no-clamp": ({**SMALL, "compress_ratios": [0, 4, 128], "rope_scaling": "null", "swiglu_limit": "null"}, {}, 300),
    "no-rope-scaling-key": ({**SMALL, "compress_ratios": [4, 128], "rope_scaling": None, "swiglu_limit": None}, {}, 300),
    "zero-clamp": ({**SMALL, "compress_ratios": [4], "swiglu_limit": 0}, {}, 100),
    "tight-clamp": ({**SMALL, "compress_ratios": [4], "swiglu_limit": 0.3}, {}, 300),
    "yarn-other": ({**SMALL, "compress_ratios": [4, 8], "rope_theta": 500, "compress_rope_theta": 40000, "rope_scaling":
                    {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2}},
                   {}, 300),
    "yarn-narrow": ({**SMALL, "compress_ratios": [4, 8], "qk_rope_head_dim": 4, "rope_scaling":
                     {"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}}, {}, 300),
    "ratios-2-3-64": ({**SMALL, "compress_ratios": [2, 3, 64, 7]}, {}, 300),
    "window-1": ({**SMALL, "compress_ratios": [0, 4, 16], "sliding_window": 1}, {}, 200),
    "window-100": ({**SMALL, "compress_ratios": [0, 4, 128], "sliding_window": 100}, {}, 300),
    "window-300": ({**SMALL, "compress_ratios": [0, 4, 128], "sliding_window": 300}, {}, 400),
    "groups-as-heads": ({**SMALL, "compress_ratios": [4, 0], "o_groups": 4, "o_lora_rank": 9}, {}, 300),
    "groups-twice-heads": ({**SMALL, "compress_ratios": [4], "o_groups": 8}, {}, 200),
    "one-group-five-heads": ({**SMALL, "compress_ratios": [0, 4], "num_attention_heads": 5, "o_groups": 1}, {}, 200),
    "one-head": ({**SMALL, "compress_ratios": [4, 8], "num_attention_heads": 1, "o_groups": 1, "index_n_heads": 1}, {}, 200),
    "all-experts": ({**SMALL, "compress_ratios": [4], "num_experts_per_tok": 6}, {}, 200),
    "one-expert": ({**SMALL, "compress_ratios": [4, 0], "n_routed_experts": 1, "num_experts_per_tok": 1}, {}, 200),
    "three-experts": ({**SMALL, "compress_ratios": [4, 0], "n_routed_experts": 3, "num_experts_per_tok": 1}, {}, 200),
    "many-experts": ({**SMALL, "compress_ratios": [4, 0], "n_routed_experts": 37, "num_experts_per_tok": 7}, {}, 200),
    "all-hash": ({**SMALL, "compress_ratios": [0, 4, 128], "num_hash_layers": 3}, {"table": "i32"}, 300),
    "topk-1": ({**SMALL, "compress_ratios": [4, 4], "index_topk": 1}, {}, 300),
    "topk-large": ({**SMALL, "compress_ratios": [4, 4], "index_topk": 1024}, {}, 300),
    "topk-as-blocks": ({**SMALL, "compress_ratios": [4, 4], "index_topk": 75}, {}, 304),
    "index-two-heads": ({**SMALL, "compress_ratios": [4, 4], "index_n_heads": 2, "index_topk": 3}, {}, 300),
    "odd-widths": ({**SMALL, "hidden_size": 100, "head_dim": 36, "qk_rope_head_dim": 10, "index_head_dim": 22, "index_n_heads": 3,
                    "q_lora_rank": 33, "o_lora_rank": 7, "moe_intermediate_size": 13, "num_attention_heads": 3, "o_groups": 3,
                    "vocab_size": 37, "compress_ratios": [0, 4, 5]}, {}, 300),
    "odd-widths-f16": ({**SMALL, "hidden_size": 101, "head_dim": 37, "qk_rope_head_dim": 2, "index_head_dim": 3, "index_n_heads": 3,
                        "q_lora_rank": 31, "o_lora_rank": 5, "moe_intermediate_size": 11, "num_attention_heads": 3, "o_groups": 3,
                        "vocab_size": 41, "compress_ratios": [128, 4, 5]}, {**HALF, "shards": 2, "no_index": True}, 300),
    "odd-widths-f32": ({**SMALL, "hidden_size": 99, "head_dim": 65, "qk_rope_head_dim": 64, "index_head_dim": 66,
                        "q_lora_rank": 65, "moe_intermediate_size": 33, "vocab_size": 129, "compress_ratios": [128, 4, 0]}, FULL, 300),
    "tiles-129": ({**SMALL, "hidden_size": 129, "q_lora_rank": 130, "moe_intermediate_size": 131, "o_lora_rank": 67,
                   "compress_ratios": [4, 0]}, {"dense": "fp8", "plain": "fp8", "expert": "fp8"}, 200),
    "bf16-scales": ({**SMALL, "hidden_size": 288, "compress_ratios": [4, 0]}, {"dense": "fp8-bf16", "expert": "fp8-f32"}, 200),
    "wide-experts": ({**SMALL, "hidden_size": 160, "moe_intermediate_size": 288, "compress_ratios": [4, 0]}, {}, 200),
    "fp4-everywhere": ({**SMALL, "q_lora_rank": 64, "o_lora_rank": 32, "compress_ratios": [4, 0]}, {"dense": "fp4"}, 200),
    "scaling-1": ({**SMALL, "compress_ratios": [4, 0], "routed_scaling_factor": 1.0, "hc_sinkhorn_iters": 1, "hc_eps": 0.0,
                   "rms_norm_eps": 1e-3}, {}, 200),
    "long": ({**SMALL, "compress_ratios": [4, 128, 4], "index_topk": 16}, {}, 1500),
}


def config_of(changes):
    c = {k: v for k, v in TM.CONFIG.items() if k not in DSPARK or "num_hash_layers" in changes and len(changes) == 2}
    if "compress_ratios" in changes:
        c["num_hidden_layers"] = len(changes["compress_ratios"])
    c.update(changes)
    c = {k: v for k, v in c.items() if v is not None}
    return {k: None if v == "null" else v for k, v in copy.deepcopy(c).items()}


def make(name, spec, seed):
    """(configuration, builder with tensors and numbers) of a variant."""
    changes, storage, _ = spec
    config = config_of(changes)
    return config, VariantBuilder([SEED, seed, *name.encode()], storage).build(config)


def write(folder, config, builder):
    s = builder.storage
    write_checkpoint(folder, config, builder.q, s.get("shards", 1), not s.get("no_index"))


def tokens(config, n, seed):
    return np.random.default_rng([n, seed]).integers(0, config["vocab_size"], n)


def clear_sequence(config, builder, n, tries, greedy=False):
    """The first sequence of n tokens without a near tie, or the best of `tries`: (tokens, logits, gap). With `greedy` the
    choice of the next token counts too."""
    best = None
    for seed in range(tries):
        t = tokens(config, n, seed)
        ref = VariantRef(config, builder.values)
        logits = ref.forward(t)
        if greedy:
            ref.choice(logits, 1)
        if best is None or ref.gap > best[2]:
            best = (t, logits, ref.gap)
        if ref.gap >= MIN_GAP:
            break
    return best


# --------------------------------------------------------------------------
# the kept ones, and all through a program
# --------------------------------------------------------------------------
def golden_rows(n, window):
    """Rows worth keeping: the start, the edges of the window and of 128 tokens, the end."""
    edges = (*range(8), *range(window - 2, window + 2), *range(126, 130), *range(254, 258), *range(n - 12, n))
    return np.array(sorted({r for r in edges if 0 <= r < n}))


def write_kept(root):
    out = {}
    for i, (name, spec) in enumerate(KEPT.items()):
        config, builder = make(name, spec, i)
        write(os.path.join(root, f"variant-{name}"), config, builder)
        t, logits, gap = clear_sequence(config, builder, spec[2], 60, greedy=True)
        assert gap >= MIN_GAP, f"{name}: no sequence without a near tie, the best has {gap}"
        rows = golden_rows(len(t), config["sliding_window"])
        out[f"{name}.tokens"] = ("I64", t.astype(np.int64))
        out[f"{name}.rows"] = ("I64", rows.astype(np.int64))
        out[f"{name}.argmax"] = ("I64", logits.argmax(-1).astype(np.int64))
        out[f"{name}.logits"] = ("F32", logits[rows].astype(np.float32))
    TM.write_safetensors(os.path.join(root, "golden_variants.safetensors"), out, {"source": "VariantRef float64"})


def troika_logits(binary, model, ids, work, *more):
    given, out = os.path.join(work, "tokens.json"), os.path.join(work, "logits.safetensors")
    with open(given, "w") as f:
        json.dump([int(i) for i in ids], f)
    done = subprocess.run([binary, "logits", "--model", model, "--tokens", given, "--out", out, *more],
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}")
    return R.read_safetensors(out)["logits"][1]


def compare_all(binary, root, wanted):
    """Every variant through `binary`; True if all agree, whole and in pieces."""
    good = True
    for i, (name, spec) in enumerate({**KEPT, **OTHERS}.items()):
        if wanted and name not in wanted:
            continue
        config, builder = make(name, spec, i)
        folder = os.path.join(root, f"variant-{name}")
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, config, builder)
        t, logits, gap = clear_sequence(config, builder, spec[2], 8)
        with tempfile.TemporaryDirectory() as work:
            try:
                got = troika_logits(binary, folder, t, work)
                pieces = troika_logits(binary, folder, t, work, "--chunks", "1,7,128")
            except RuntimeError as error:
                print(f"{name:24} FAILED: {error}", flush=True)
                good = False
                continue
        d = np.abs(got - logits).max(1)
        same = np.array_equal(got.view(np.uint32), pieces.view(np.uint32))
        far = np.flatnonzero(~(d <= BOUND))
        verdict = "ok" if same and not len(far) else f"OFF in {len(far)} rows, first {far[:1]}" if len(far) else "CHUNKS DIFFER"
        print(f"{name:24} {len(t):5} tokens  worst {d.max():.1e}  std {logits.std():.2f}  gap {gap:.1e}  {verdict}", flush=True)
        good &= same and not len(far)
    return good


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default=os.path.dirname(os.path.abspath(__file__)))
    ap.add_argument("--troika", help="compare every variant with this program instead")
    ap.add_argument("names", nargs="*", help="with --troika: only these")
    a = ap.parse_args()
    if a.troika:
        raise SystemExit(not compare_all(a.troika, a.root, a.names))
    write_kept(a.root)


if __name__ == "__main__":
    main()
