"""A checkpoint for tests: the oracle's tiny weights, a byte-level tokenizer, and short texts for tools.

Usage: tiny_model.py OUT. The model says nothing sensible, but what it says is the same each time."""

import json
import shutil
import sys
from pathlib import Path

MARKERS = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜",
    "<｜latest_reminder｜>",
]
TEXTS = '''TOOLS_TEMPLATE = """Tools: {tool_schemas} {dsml_token} {thinking_start_token} {thinking_end_token}"""
response_format_template = """Form: {schema}"""
REASONING_EFFORT_LOW = ""
REASONING_EFFORT_HIGH = "Think."
REASONING_EFFORT_MAX = "Think hard."
'''


def byte_alphabet() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def tokenizer() -> dict:
    texts = MARKERS + byte_alphabet()
    added = [
        {"id": idx, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for idx, text in enumerate(MARKERS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {text: idx for idx, text in enumerate(texts)}, "merges": [],
        },
    }


def main() -> None:
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(Path(__file__).resolve().parent.parent / "oracle" / "tiny", out)
    (out / "tokenizer.json").write_text(json.dumps(tokenizer(), ensure_ascii=False), encoding="utf-8")
    (out / "encoding").mkdir()
    (out / "encoding" / "encoding_dsv4.py").write_text(TEXTS, encoding="utf-8")


main()
