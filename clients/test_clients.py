"""The real Python clients of OpenAI and Anthropic against a running server.

TROIKA_URL and TROIKA_KEY say where. What the model says does not matter: what is streamed must be what comes whole, calls
that are asked for must be made, and errors must arrive as the clients' own exceptions."""

import json
import os
import random
import socket
import time
import unittest
import urllib.parse
import urllib.request

import anthropic
import openai
from prometheus_client.openmetrics.parser import text_string_to_metric_families

URL = os.environ["TROIKA_URL"]
KEY = os.environ["TROIKA_KEY"]
OPENAI = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
ANTHROPIC = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
MODEL = OPENAI.models.list().data[0].id

MESSAGES = [{"role": "user", "content": "Write a function."}]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string", "enum": ["a.rs", "b.rs"]}}, "required": ["path"]}
SAMPLING = {"seed": 7, "temperature": 0.8}
ROUNDS = int(os.environ.get("TROIKA_ROUNDS", "200"))


def counted(usage):
    """The counts of a usage, without what differs from request to request: times, an id, and what is cached by now."""
    return usage.model_dump(exclude={"troika": True, "prompt_tokens_details": True})


def get(path):
    request = urllib.request.Request(URL + path, headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read().decode()


class Chat(unittest.TestCase):
    common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, **SAMPLING}

    def stream(self, **more):
        """A stream put together, and its usage."""
        text, reasoning, calls, finish, usage, ids = "", "", {}, None, None, set()
        for chunk in OPENAI.chat.completions.create(
            **{**self.common, **more}, stream=True, stream_options={"include_usage": True}
        ):
            ids.add(chunk.id)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or []:
                    name, arguments = calls.setdefault(call.index, ["", ""])
                    calls[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
        self.assertEqual(len(ids), 1)
        return text, reasoning, list(calls.values()), finish, counted(usage)

    def whole(self, **more):
        reply = OPENAI.chat.completions.create(**{**self.common, **more})
        message = reply.choices[0].message
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
        reasoning = getattr(message, "reasoning_content", None) or ""
        return message.content or "", reasoning, calls, reply.choices[0].finish_reason, counted(reply.usage)

    def test_streamed_equals_whole(self):
        for more in [{}, {"reasoning_effort": "low"}, {"stop": ["e"]}, {"logprobs": True, "top_logprobs": 2}]:
            with self.subTest(more):
                self.assertEqual(self.stream(**more), self.whole(**more))

    def test_several_answers(self):
        reply = OPENAI.chat.completions.create(**self.common, n=2)
        first = OPENAI.chat.completions.create(**self.common)
        self.assertEqual([choice.index for choice in reply.choices], [0, 1])
        self.assertEqual(reply.choices[0].message.content, first.choices[0].message.content)

    def test_a_required_call(self):
        tool = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": PARAMETERS}}
        for choice in ["required", {"type": "function", "function": {"name": "read"}}]:
            more = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300}
            whole = self.whole(**more)
            self.assertEqual(self.stream(**more), whole)
            self.assertEqual((whole[2][0][0], whole[3]), ("read", "tool_calls"))
            self.assertIn(json.loads(whole[2][0][1])["path"], ["a.rs", "b.rs"])

    def test_a_schema(self):
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**PARAMETERS, "additionalProperties": False}}}
        whole = self.whole(response_format=schema, max_tokens=300)
        self.assertEqual(self.stream(response_format=schema, max_tokens=300), whole)
        self.assertIn(json.loads(whole[0])["path"], ["a.rs", "b.rs"])

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            OPENAI.chat.completions.create(**self.common, extra_body={"nonsense": 1})
        self.assertEqual((caught.exception.param, caught.exception.code), ("nonsense", "unsupported_parameter"))
        with self.assertRaises(openai.NotFoundError):
            OPENAI.chat.completions.create(**{**self.common, "model": "gpt-4o"})
        with self.assertRaises(openai.AuthenticationError):
            OPENAI.with_options(api_key="wrong").models.list()

    def test_completions(self):
        common = {"model": MODEL, "prompt": "fn main", "max_tokens": 12, **SAMPLING}
        whole = OPENAI.completions.create(**common, echo=True).choices[0].text
        streamed = OPENAI.completions.create(**common, echo=True, stream=True)
        self.assertEqual("".join(chunk.choices[0].text for chunk in streamed), whole)
        self.assertTrue(whole.startswith("fn main"))


class Responses(unittest.TestCase):
    common = {"model": MODEL, "input": "Write a function.", "max_output_tokens": 300, "temperature": 0}

    @staticmethod
    def said(response):
        return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]

    def test_streamed_equals_whole(self):
        tool = {"type": "function", "name": "read", "parameters": PARAMETERS, "strict": True}
        for more in [
            {"max_output_tokens": 24},
            {"max_output_tokens": 24, "reasoning": {"effort": "low"}},
            {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        ]:
            with self.subTest(more):
                whole = OPENAI.responses.create(**{**self.common, **more})
                events = list(OPENAI.responses.create(**{**self.common, **more}, stream=True))
                streamed = events[-1].response
                self.assertIn(events[-1].type, ["response.completed", "response.incomplete"])
                self.assertEqual(self.said(streamed), self.said(whole))
                text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
                self.assertEqual(text, whole.output_text)

    def test_stored(self):
        first = OPENAI.responses.create(**{**self.common, "max_output_tokens": 8})
        self.assertEqual(OPENAI.responses.retrieve(first.id), first)
        second = OPENAI.responses.create(**{**self.common, "max_output_tokens": 8}, previous_response_id=first.id)
        self.assertGreater(second.usage.input_tokens, first.usage.input_tokens)
        OPENAI.responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            OPENAI.responses.retrieve(first.id)


class Messages(unittest.TestCase):
    common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "extra_body": {"temperature": 0}}

    def both(self, **more):
        whole = ANTHROPIC.messages.create(**{**self.common, **more})
        with ANTHROPIC.messages.stream(**{**self.common, **more}) as stream:
            streamed = stream.get_final_message()
        drop = lambda message: [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]
        strip = lambda blocks: [{k: v for k, v in block.items() if k != "parsed_output"} for block in blocks]
        self.assertEqual(strip(drop(streamed)), strip(drop(whole)))
        self.assertEqual((streamed.stop_reason, streamed.stop_sequence), (whole.stop_reason, whole.stop_sequence))
        self.assertEqual(streamed.usage.output_tokens, whole.usage.output_tokens)
        return whole

    def test_streamed_equals_whole(self):
        self.both(system="Be brief.")
        self.both(stop_sequences=["e"])
        thinking = self.both(thinking={"type": "enabled", "budget_tokens": 1024})
        self.assertEqual(thinking.content[0].type, "thinking")

    def test_a_tool_and_its_result(self):
        tool = {"name": "read", "description": "Reads.", "input_schema": PARAMETERS}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        reply = self.both(tools=[tool], tool_choice=choice, max_tokens=300)
        use = reply.content[-1]
        self.assertEqual((use.type, use.name, reply.stop_reason), ("tool_use", "read", "tool_use"))
        self.assertIn(use.input["path"], ["a.rs", "b.rs"])
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "fn f() {}"}]}
        messages = [*MESSAGES, {"role": "assistant", "content": reply.content}, result]
        self.both(messages=messages, tools=[tool])

    def test_counting(self):
        counted = ANTHROPIC.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
        self.assertEqual(counted, ANTHROPIC.messages.create(**self.common).usage.input_tokens)

    def test_errors(self):
        with self.assertRaises(anthropic.NotFoundError):
            ANTHROPIC.messages.create(**{**self.common, "model": "claude"})
        with self.assertRaises(anthropic.BadRequestError):
            ANTHROPIC.messages.create(**{**self.common, "extra_body": {"nonsense": 1}})
        with self.assertRaises(anthropic.AuthenticationError):
            ANTHROPIC.with_options(api_key="wrong").messages.create(**self.common)


class Diagnosis(unittest.TestCase):
    """What is said beyond the APIs does not disturb their clients, and Prometheus' own parser reads the metrics."""

    # Long enough for whole blocks, and ended by a stop string in one case.
    messages = [{"role": "user", "content": f"{random.random()} " + "fn f(x: u32) -> u32 { x + 1 }\n" * 40}]
    common = {"model": MODEL, "messages": messages, "max_tokens": 24}

    def test_cached_tokens(self):
        first = OPENAI.chat.completions.create(**self.common, temperature=0)
        self.assertEqual(first.usage.prompt_tokens_details.cached_tokens, 0)
        first_letter = first.choices[0].message.content[:1]
        for stop in [None, first_letter]:
            again = OPENAI.chat.completions.create(**self.common, temperature=0, stop=stop)
            cached = again.usage.prompt_tokens_details.cached_tokens
            self.assertGreaterEqual(cached, 128)
            extension = again.usage.model_extra["troika"]
            self.assertEqual((extension["cached_tokens"], extension["cached_tier"]), (cached, "ram"))
            record = json.loads(get(f"/troika/requests/{extension['request_id']}"))
            self.assertEqual((record["id"], record["prompt_tokens"]), (again.id, again.usage.prompt_tokens))
        # The same prompt by another API is the same prefix.
        message = ANTHROPIC.messages.create(**self.common)
        self.assertGreaterEqual(message.usage.cache_read_input_tokens, 128)
        total = message.usage.input_tokens + message.usage.cache_read_input_tokens
        self.assertEqual(total, first.usage.prompt_tokens)

    def test_metrics(self):
        families = {family.name: family for family in text_string_to_metric_families(get("/metrics"))}
        before = sum(sample.value for sample in families["troika_requests"].samples)
        OPENAI.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
        families = {family.name: family for family in text_string_to_metric_families(get("/metrics"))}
        after = sum(sample.value for sample in families["troika_requests"].samples)
        self.assertEqual(after - before, 1)
        self.assertEqual(families["troika_time_to_first_token_seconds"].type, "histogram")
        self.assertEqual(families["troika_cache_bytes"].type, "gauge")

    def test_deadline(self):
        with self.assertRaises(openai.APIStatusError) as caught:
            OPENAI.with_options(max_retries=3).chat.completions.create(
                **{**self.common, "max_tokens": 1000}, extra_body={"timeout": 0.01}
            )
        self.assertEqual((caught.exception.status_code, caught.exception.code), (408, "deadline_exceeded"))


class Leaving(unittest.TestCase):
    """Clients that leave at a random moment of a stream cost the next one nothing."""

    def leave(self, chance: random.Random) -> None:
        where = urllib.parse.urlsplit(URL)
        body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 400}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            until = time.monotonic() + chance.random() * 0.05
            while (left := until - time.monotonic()) > 0:
                connection.settimeout(left)
                try:
                    connection.recv(4096)
                except TimeoutError:
                    break

    def normal(self) -> float:
        start = time.monotonic()
        OPENAI.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0)
        return time.monotonic() - start

    def test_rounds(self):
        chance = random.Random(1)
        usual = sorted(self.normal() for _ in range(20))
        after = []
        for _ in range(ROUNDS):
            self.leave(chance)
            after.append(self.normal())
        after.sort()
        median = lambda times: times[len(times) // 2]
        print(f"usual {median(usual):.3f} s, after a client left {median(after):.3f} s, worst {after[-1]:.3f} s")
        self.assertLess(median(after), 2 * median(usual) + 0.05)


if __name__ == "__main__":
    unittest.main()
