"""Collects the training and held-out text of nano from the running Python's standard library.

What lives here: which files are used, which whole modules are held out, the
near-copy filter, and the two compressor baselines. Tokens are made in
`tokenizer.py`.

    python data.py --run RUN_DIR --model MODEL_DIR

RUN_DIR gets `core.jsonl`, `tests.jsonl` (training text) and `held.jsonl`.
MODEL_DIR gets `held-out.txt` (the exact bytes that every quoted number is
measured on), `held-out-files.txt` and `train-files.txt` (SHA-256, bytes, path).
"""

import argparse
import hashlib
import json
import lzma
import platform
import random
import sysconfig
from pathlib import Path

SEED = 7
HELD_OUT_BYTES = 600_000
# Tables, generated text and the unused converter: nothing to learn, or copies of other files.
EXCLUDED_PACKAGES = {"encodings", "pydoc_data", "lib2to3", "site-packages", "__pycache__"}
EXCLUDED_FILES = {"html/entities.py"}
TEST_FOLDERS = {"test", "tests", "idle_test"}
# A training file is a near-copy of held-out text if this share of its line triples occurs there.
NEAR_COPY_SHARE = 0.10


def library_files(root: Path):
    """Yields (relative path, text) of every usable `.py` file, sorted by path."""
    for path in sorted(root.rglob("*.py")):
        rel = path.relative_to(root)
        name = rel.as_posix()
        if EXCLUDED_PACKAGES & set(rel.parts) or name in EXCLUDED_FILES:
            continue
        if rel.parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if 200 <= len(text) <= 600_000:
            yield name, text


def unit_of(name: str) -> str:
    """The top-level package or module a file belongs to: `json/decoder.py` and `json.py` are `json`."""
    return name.split("/")[0].removesuffix(".py")


def is_test(name: str) -> bool:
    return bool(TEST_FOLDERS & set(name.split("/")))


def tests_unit(test_name: str, unit: str) -> bool:
    """Whether a file under `test/` belongs to the tests of `unit`."""
    parts = test_name.split("/")
    if unit in parts[:-1]:
        return True
    bare = unit.strip("_")
    return any(
        stem == f"test_{bare}" or stem.startswith(f"test_{bare}_") or stem in (bare, f"{bare}_tests", f"{bare}tester")
        for stem in (p.removesuffix(".py").lower() for p in parts)
    )


def choose_held_out(core: dict[str, str]) -> list[str]:
    """Whole packages and modules of 2 to 120 KB, drawn until about 600 KB are held out."""
    sizes: dict[str, int] = {}
    for name, text in core.items():
        sizes[unit_of(name)] = sizes.get(unit_of(name), 0) + len(text.encode())
    candidates = sorted(u for u, n in sizes.items() if 2_000 <= n <= 120_000)
    random.Random(SEED).shuffle(candidates)
    chosen, total = [], 0
    for unit in candidates:
        if total + sizes[unit] > HELD_OUT_BYTES + 20_000:
            continue
        chosen.append(unit)
        total += sizes[unit]
        if total >= HELD_OUT_BYTES:
            break
    return sorted(chosen)


def line_triples(text: str) -> set[str]:
    lines = [s for s in (line.strip() for line in text.splitlines()) if len(s) >= 12 and not s.startswith("import ")]
    return {"\n".join(lines[i : i + 3]) for i in range(len(lines) - 2)}


def near_copies(train: dict[str, str], held: dict[str, str]) -> dict[str, float]:
    seen = set().union(*(line_triples(t) for t in held.values()))
    found = {}
    for name, text in train.items():
        own = line_triples(text)
        share = len(own & seen) / max(1, len(own))
        if share > NEAR_COPY_SHARE:
            found[name] = share
    return found


def file_line(name: str, text: str, role: str) -> str:
    data = text.encode()
    return f"{hashlib.sha256(data).hexdigest()} {len(data)} {role} {name}\n"


def xz_bytes(data: bytes) -> int:
    """Size under `xz -9e`, with a dictionary large enough for the primed measurement."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--run", type=Path, required=True)
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    ap.add_argument("--skip-xz", action="store_true")
    args = ap.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    args.model.mkdir(parents=True, exist_ok=True)

    files = dict(library_files(args.stdlib))
    core = {n: t for n, t in files.items() if not is_test(n)}
    tests = {n: t for n, t in files.items() if is_test(n)}
    units = choose_held_out(core)
    held = {n: t for n, t in core.items() if unit_of(n) in units}
    withheld = {n: t for n, t in tests.items() if any(tests_unit(n, u) for u in units)}
    core = {n: t for n, t in core.items() if n not in held}
    tests = {n: t for n, t in tests.items() if n not in withheld}
    copies = near_copies(core | tests, held)
    core = {n: t for n, t in core.items() if n not in copies}
    tests = {n: t for n, t in tests.items() if n not in copies}

    for label, docs in (("core", core), ("tests", tests), ("held", held)):
        with open(args.run / f"{label}.jsonl", "w") as out:
            for name, text in docs.items():
                out.write(json.dumps({"name": name, "text": text}) + "\n")

    held_bytes = "".join(held.values()).encode()
    (args.model / "held-out.txt").write_bytes(held_bytes)
    head = "# sha256 bytes role path (relative to the standard library)\n"
    with open(args.model / "held-out-files.txt", "w") as out:
        out.write(head + "# scored: concatenated in this order into held-out.txt; withheld: in neither set\n")
        out.writelines(file_line(n, t, "scored") for n, t in held.items())
        out.writelines(file_line(n, t, "withheld") for n, t in withheld.items())
        out.writelines(file_line(n, files[n], "near-copy") for n in sorted(copies))
    with open(args.model / "train-files.txt", "w") as out:
        out.write(head)
        out.writelines(file_line(n, t, "library") for n, t in core.items())
        out.writelines(file_line(n, t, "test") for n, t in tests.items())

    size = lambda docs: sum(len(t.encode()) for t in docs.values())  # noqa: E731
    report = {
        "python": platform.python_version(),
        "held_out_units": units,
        "held_out_bytes": len(held_bytes),
        "core": [len(core), size(core)],
        "tests": [len(tests), size(tests)],
        "withheld_tests": [len(withheld), size(withheld)],
        "near_copies": {n: round(s, 3) for n, s in sorted(copies.items())},
    }
    if not args.skip_xz:
        train = "".join((core | tests).values()).encode()
        library = "".join(core.values()).encode()
        bpb = lambda n: round(8 * n / len(held_bytes), 4)  # noqa: E731
        report["xz_bpb"] = bpb(xz_bytes(held_bytes))
        report["xz_primed_library_bpb"] = bpb(xz_bytes(library + held_bytes) - xz_bytes(library))
        report["xz_primed_all_bpb"] = bpb(xz_bytes(train + held_bytes) - xz_bytes(train))
    (args.run / "data.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
