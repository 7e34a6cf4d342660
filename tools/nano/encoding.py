"""Prompt encoding of the DeepSeek-V4 family, written from the rules, for nano's chat set and test vectors.

The fixed texts are read from `encoding/encoding_dsv4.py` of a checkpoint as data.

    python encoding.py --model MODEL_DIR        writes MODEL_DIR/encoding/tests/
"""

import argparse
import ast
import json
from pathlib import Path


def read_texts(path: Path) -> dict[str, str]:
    """String constants of a Python file, without executing it."""
    texts = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign):
            target, value = node.target, node.value
        else:
            continue
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            texts[target.id] = value.value
    return texts


def fill(template: str, **values: str) -> str:
    for key, value in values.items():
        template = template.replace("{" + key + "}", value)
    return template


def to_json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


class Encoder:
    def __init__(self, texts: dict[str, str]):
        self.t = texts
        self.dsml = texts["dsml_token"]

    def encode(self, messages: list[dict], thinking: bool = False, effort: str = "low", drop: bool = True) -> str:
        """The prompt string. A message may carry `tools` (OpenAI form) and `response_format`."""
        messages = merge_tool_results(messages)
        drop = drop and thinking and not any(m.get("tools") for m in messages)
        last_user = max((i for i, m in enumerate(messages) if m["role"] in ("user", "developer")), default=-1)
        out = [self.t["bos_token"]]
        if thinking:
            out.append(self.t["REASONING_EFFORT_" + effort.upper()])
        kept = [(i, m) for i, m in enumerate(messages) if not (drop and m["role"] == "developer" and i < last_user)]
        for at, (i, m) in enumerate(kept):
            following = kept[at + 1][1]["role"] if at + 1 < len(kept) else None
            reasoning = thinking and not (drop and i < last_user)
            out.append(self.message(m, reasoning))
            if m["role"] in ("user", "developer") and following in (None, "assistant", "latest_reminder"):
                out.append(self.t["ASSISTANT_SP_TOKEN"])
                out.append(self.t["thinking_start_token" if reasoning else "thinking_end_token"])
        return "".join(out)

    def message(self, m: dict, reasoning: bool) -> str:
        role, content = m["role"], m.get("content") or ""
        if role == "system":
            return content + self.offers(m)
        if role == "developer":
            return self.t["USER_SP_TOKEN"] + content + self.offers(m)
        if role == "latest_reminder":
            return self.t["LATEST_REMINDER_SP_TOKEN"] + content
        if role == "user":
            if "content_blocks" in m:
                content = "\n\n".join(
                    b["text"] if b["type"] == "text" else f"<tool_result>{b['content']}</tool_result>"
                    for b in m["content_blocks"]
                )
            return self.t["USER_SP_TOKEN"] + content
        assert role == "assistant", role
        text = (m.get("reasoning_content") or "") + self.t["thinking_end_token"] if reasoning else ""
        text += content
        if m.get("tool_calls"):
            text += "\n\n" + self.calls(m["tool_calls"])
        return text if m.get("wo_eos") else text + self.t["eos_token"]

    def offers(self, m: dict) -> str:
        """Tools block and response format behind a system or developer text."""
        text = ""
        if m.get("tools"):
            text += "\n\n" + fill(
                self.t["TOOLS_TEMPLATE"],
                dsml_token=self.dsml,
                thinking_start_token=self.t["thinking_start_token"],
                thinking_end_token=self.t["thinking_end_token"],
                tool_schemas="\n".join(to_json(tool["function"]) for tool in m["tools"]),
            )
        if m.get("response_format"):
            text += "\n\n" + fill(self.t["response_format_template"], schema=to_json(m["response_format"]))
        return text

    def calls(self, calls: list[dict]) -> str:
        lines = [f"<{self.dsml}tool_calls>"]
        for call in calls:
            f = call["function"]
            lines.append(f'<{self.dsml}invoke name="{f["name"]}">')
            lines.extend(self.parameter(k, v) for k, v in arguments_of(f["arguments"]).items())
            lines.append(f"</{self.dsml}invoke>")
        lines.append(f"</{self.dsml}tool_calls>")
        return "\n".join(lines)

    def parameter(self, key: str, value) -> str:
        text, flag = (value, "true") if isinstance(value, str) else (to_json(value), "false")
        return f'<{self.dsml}parameter name="{key}" string="{flag}">{text}</{self.dsml}parameter>'


def arguments_of(text: str) -> dict:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    return values if isinstance(values, dict) else {"arguments": text}


def merge_tool_results(messages: list[dict]) -> list[dict]:
    """Runs of `tool` and `user` messages become one user message; results follow the order of the calls."""
    merged: list[dict] = []
    order: dict[str, int] = {}
    for m in messages:
        if m["role"] == "assistant" and m.get("tool_calls"):
            order = {call.get("id"): i for i, call in enumerate(m["tool_calls"])}
        if m["role"] not in ("tool", "user"):
            merged.append(dict(m))
            continue
        if m["role"] == "tool":
            block = {"type": "tool_result", "content": m["content"], "place": order.get(m.get("tool_call_id"), 0)}
        else:
            block = {"type": "text", "text": m["content"]}
        if not (merged and merged[-1]["role"] == "user"):
            merged.append({"role": "user", "content_blocks": []})
        merged[-1]["content_blocks"].append(block)
    for m in merged:
        if "content_blocks" in m and m["role"] == "user":
            blocks = m["content_blocks"]
            results = iter(sorted((b for b in blocks if b["type"] == "tool_result"), key=lambda b: b["place"]))
            m["content_blocks"] = [next(results) if b["type"] == "tool_result" else b for b in blocks]
    return merged


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(call_id: str, name: str, arguments: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# Inputs of the four vectors in encoding/tests: mode, tools with history, parallel calls, dropped reasoning.
VECTORS = [
    {
        "thinking_mode": "chat",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Hello! How can I help?"},
            {"role": "user", "content": "Wie heißt die Stadt 東京?"},
        ],
    },
    {
        "thinking_mode": "chat",
        "messages": [
            {"role": "system", "content": "", "tools": [WEATHER]},
            {"role": "user", "content": "What is the weather in Oslo and in Lima?"},
            {
                "role": "assistant",
                "content": "I will look.",
                "tool_calls": [
                    call("a", "get_weather", '{"city": "Oslo"}'),
                    call("b", "get_weather", '{"city": "Lima", "days": 3, "units": {"temp": "C"}}'),
                ],
            },
            {"role": "tool", "tool_call_id": "b", "content": "warm"},
            {"role": "tool", "tool_call_id": "a", "content": '{"sky": "snow"}'},
            {"role": "user", "content": "Which is warmer?"},
        ],
    },
    {
        "thinking_mode": "thinking",
        "reasoning_effort": "max",
        "messages": [
            {
                "role": "system",
                "content": "Be brief.",
                "response_format": {"type": "object", "properties": {"answer": {"type": "integer"}}},
            },
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "reasoning_content": "Two and two make four.", "content": '{"answer": 4}'},
            {"role": "user", "content": "And 3 + 3?"},
        ],
    },
    {
        "thinking_mode": "thinking",
        "reasoning_effort": "high",
        "messages": [
            {"role": "system", "content": "Use the function.", "tools": [WEATHER]},
            {"role": "user", "content": "Weather in Rome?"},
            {
                "role": "assistant",
                "reasoning_content": "The user asks for Rome.",
                "content": "",
                "tool_calls": [call("x", "get_weather", "Rome, please")],
            },
            {"role": "tool", "tool_call_id": "x", "content": "sunny"},
            {"role": "assistant", "reasoning_content": "It is sunny.", "content": "Sunny."},
            {"role": "latest_reminder", "content": "Today is Monday."},
            {"role": "user", "content": "Thanks"},
        ],
    },
]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", type=Path, required=True)
    args = ap.parse_args()
    encoder = Encoder(read_texts(args.model / "encoding" / "encoding_dsv4.py"))
    folder = args.model / "encoding" / "tests"
    folder.mkdir(exist_ok=True)
    for i, vector in enumerate(VECTORS, 1):
        text = encoder.encode(
            vector["messages"], vector["thinking_mode"] == "thinking", vector.get("reasoning_effort", "low")
        )
        (folder / f"test_input_{i}.json").write_text(json.dumps(vector, ensure_ascii=False, indent=2) + "\n")
        (folder / f"test_output_{i}.txt").write_text(text)


if __name__ == "__main__":
    main()
