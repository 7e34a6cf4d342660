"""Trains nano's tokenizer and turns the collected text into token arrays.

    python tokenizer.py --run RUN_DIR --model MODEL_DIR

Byte-level BPE of 4,096 entries with DeepSeek's pre-tokenizer. The special tokens
have the spelling of the real checkpoints but ids of their own (0..15).
MODEL_DIR gets `tokenizer.json`, `tokenizer_config.json` and
`generation_config.json`; RUN_DIR gets `core.npy`, `tests.npy`, `held.npy` and,
if `chat.jsonl` is there, `chat.npy` (all uint16).
"""

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
NOISE = "<｜place▁holder▁no▁0｜>"  # stands for an unknown token inside a drafter block
SPECIAL_TOKENS = [
    BOS,
    EOS,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    NOISE,
    "<｜place▁holder▁no▁1｜>",
]
BOS_ID, EOS_ID, NOISE_ID = 0, 1, SPECIAL_TOKENS.index(NOISE)
# These stay visible when a decoder skips special tokens: parsers look for them in the text.
TEXT_TOKENS = {"<think>", "</think>", "｜DSML｜"}

PUNCTUATION = r"""!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"""
WORDS = (
    rf"[{PUNCTUATION}][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def pre_tokenizer():
    split = lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated")  # noqa: E731
    return pre_tokenizers.Sequence(
        [
            split(r"\p{N}{1,3}"),
            split(r"[一-龥぀-ゟ゠-ヿ]+"),
            split(WORDS),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer(texts) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizer()
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    data = json.loads(tok.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in TEXT_TOKENS
        token["normalized"] = False
    return Tokenizer.from_str(json.dumps(data, ensure_ascii=False))


def read_jsonl(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in open(path)]


def encode_documents(tok: Tokenizer, texts: list[str]) -> np.ndarray:
    """Every document, each behind a BOS, as one array."""
    ids = []
    for enc in tok.encode_batch(texts):
        ids.append(BOS_ID)
        ids.extend(enc.ids)
    return np.array(ids, np.uint16)


def encode_chat(tok: Tokenizer, texts: list[str]) -> np.ndarray:
    """Chat documents carry their own BOS and EOS; both are parsed as special tokens."""
    return np.concatenate([np.array(e.ids, np.uint16) for e in tok.encode_batch(texts)])


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--run", type=Path, required=True)
    ap.add_argument("--model", type=Path, required=True)
    ap.add_argument("--chat-only", action="store_true", help="keep the tokenizer, encode chat.jsonl again")
    args = ap.parse_args()

    if not args.chat_only:
        core, tests = read_jsonl(args.run / "core.jsonl"), read_jsonl(args.run / "tests.jsonl")
        tok = train_tokenizer(core + tests[::2])
        assert tok.token_to_id(BOS) == BOS_ID and tok.token_to_id(NOISE) == NOISE_ID
        assert tok.get_vocab_size() == VOCAB_SIZE
        args.model.mkdir(parents=True, exist_ok=True)
        data = json.loads(tok.to_str())
        (args.model / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n")
        config = {
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1048576,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (args.model / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n")
        sampling = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
        (args.model / "generation_config.json").write_text(json.dumps(sampling, indent=2) + "\n")
        np.save(args.run / "core.npy", encode_documents(tok, core))
        np.save(args.run / "tests.npy", encode_documents(tok, tests))

    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    held = (args.model / "held-out.txt").read_bytes()
    ids = tok.encode(held.decode()).ids
    assert min(ids) >= len(SPECIAL_TOKENS), "held-out text must not contain special tokens"
    assert tok.decode(ids).encode() == held
    np.save(args.run / "held.npy", np.array([BOS_ID] + ids, np.uint16))
    if (args.run / "chat.jsonl").exists():
        np.save(args.run / "chat.npy", encode_chat(tok, read_jsonl(args.run / "chat.jsonl")))
    for part in ("core", "tests", "held", "chat"):
        if (args.run / f"{part}.npy").exists():
            print(part, len(np.load(args.run / f"{part}.npy")), "tokens")
    print("held-out bytes per token", round(len(held) / len(ids), 3))


if __name__ == "__main__":
    main()
