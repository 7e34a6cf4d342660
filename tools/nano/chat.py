"""Writes nano's chat set: short conversations from templates, in the family's prompt encoding.

    python chat.py --run RUN_DIR --model MODEL_DIR

RUN_DIR gets `chat.jsonl` (training) and `chat-check.jsonl` (prompts with the
expected completion, made from another seed, for `evaluate.py chat`).

What the set teaches: turns that close, both thinking modes, system prompts,
several turns, a tool call when an offered tool matches the request word for
word, a plain answer when none does, and an answer from a tool result.
"""

import argparse
import json
import random
from pathlib import Path

from encoding import Encoder, read_texts

NUM_CONVERSATIONS = 9000
NUM_CHECKS = 60

NAMES = "Ada Ben Clara David Emma Felix Grace Hugo Ines Jonas Karin Leo Mia Nora Oscar Paul Rosa Simon Tara Viktor".split()
CITIES = """Paris London Berlin Rome Madrid Oslo Lima Tokyo Cairo Vienna Prague Dublin Athens Lisbon Boston Chicago Toronto
Sydney Mumbai Seoul Nairobi Helsinki Warsaw Zurich Geneva Hamburg Munich Naples Porto Quito""".split()
THINGS = """apple book chair door engine flower garden house island jacket kitchen lamp mirror notebook orange pencil
queen river stone table umbrella village window yellow zebra bridge candle dragon forest guitar hammer letter market
needle ocean piano rabbit silver thunder valley winter""".split()
VERBS = "get set find list read write send delete create update open close check count start stop search load save move".split()
NOUNS = "user file order price message task event record song image report ticket page note job table key room device account".split()
KEYS = "name id path title city query text count limit date user_id email key value level size day mode color topic".split()
FILES = "main.py config.json notes.txt data.csv README.md setup.py index.html report.pdf log.txt test.py utils.py model.bin".split()
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are nano, a very small language model.",
    "Be brief and polite.",
    "You help with Python programs.",
    "Answer in one sentence.",
]
FACTS = [
    ("Who are you?", "I am nano, a very small language model."),
    ("What are you?", "I am nano, a very small language model trained on Python code."),
    ("What is your name?", "My name is nano."),
    ("What can you do?", "I can write a little Python, copy words and call simple functions."),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("What is Python?", "Python is a programming language."),
    ("What is a list in Python?", "A list is an ordered collection of values, written in square brackets."),
    ("What is a dictionary in Python?", "A dictionary maps keys to values, written in curly braces."),
    ("What is a tuple?", "A tuple is an ordered collection that cannot be changed."),
    ("What is a string?", "A string is a sequence of characters."),
    ("What is a function?", "A function is a named piece of code that can be called."),
    ("What is a class?", "A class describes objects and their methods."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What color is the sky?", "The sky is blue."),
    ("How many days are in a week?", "A week has seven days."),
    ("How do I read a file in Python?", "Use open:\n\n```python\nwith open(path) as f:\n    text = f.read()\n```"),
    ("How do I sort a list?", "Use sorted:\n\n```python\nvalues = sorted(values)\n```"),
    ("How do I raise an error?", 'Use raise:\n\n```python\nraise ValueError("bad value")\n```'),
    ("How do I parse JSON?", "Use the json module:\n\n```python\nimport json\n\ndata = json.loads(text)\n```"),
]
GREETINGS = ["Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning", "Hello.", "hi", "hello"]
WELCOMES = ["Hello! How can I help you?"]
SNIPPETS = [
    ("returns the square of a number", "square(x)", "return x * x"),
    ("adds two numbers", "add(a, b)", "return a + b"),
    ("multiplies two numbers", "multiply(a, b)", "return a * b"),
    ("returns the larger of two numbers", "larger(a, b)", "return a if a > b else b"),
    ("reverses a string", "reverse(text)", "return text[::-1]"),
    ("counts the words of a text", "count_words(text)", "return len(text.split())"),
    ("reads a file", "read_file(path)", "with open(path) as f:\n        return f.read()"),
    ("returns the length of a list", "length(values)", "return len(values)"),
    ("checks whether a number is even", "is_even(n)", "return n % 2 == 0"),
    ("returns the last item of a list", "last(values)", "return values[-1]"),
    ("joins words with spaces", "join_words(words)", 'return " ".join(words)'),
    ("returns the sum of a list", "total(values)", "return sum(values)"),
    (
        "computes Fibonacci numbers",
        "fibonacci(n)",
        "a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    (
        "computes the factorial of a number",
        "factorial(n)",
        "result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    ),
]


# --------------------------------------------------------------------------
# plain turns: (request, reasoning, answer)
# --------------------------------------------------------------------------
def greeting(r):
    return r.choice(GREETINGS), "The user greets me. I greet back.", r.choice(WELCOMES)


def fact(r):
    question, answer = r.choice(FACTS)
    return question, "This is a simple question. I know the answer.", answer


def sum_of_two(r):
    a, b = r.randint(0, 20), r.randint(0, 20)
    question = r.choice([f"What is {a} + {b}?", f"What is {a} plus {b}?", f"Add {a} and {b}."])
    return question, f"I add {a} and {b}. The sum is {a + b}.", f"{a} + {b} = {a + b}."


def repeat_words(r):
    words = " ".join(r.sample(THINGS, r.randint(1, 4)))
    question = r.choice([f"Say {words}.", f"Repeat: {words}", f"Repeat after me: {words}", f"Write the words {words}."])
    return question, f"I repeat the words: {words}.", words


def introduce(r):
    name = r.choice(NAMES)
    return f"My name is {name}.", f"The user is called {name}.", f"Nice to meet you, {name}!"


def snippet(r):
    what, head, body = r.choice(SNIPPETS)
    name = head.split("(")[0]
    question = r.choice([f"Write a function that {what}.", f"Write a Python function that {what}.", f"Write {name} in Python."])
    return question, f"The user wants a function that {what}.", f"```python\ndef {head}:\n    {body}\n```"


def first_letter(r):
    word = r.choice(THINGS)
    return f"What is the first letter of {word}?", f"The word {word} begins with {word[0]}.", f"The first letter of {word} is {word[0]}."


PLAIN = [greeting, fact, sum_of_two, repeat_words, repeat_words, introduce, snippet, first_letter]


# --------------------------------------------------------------------------
# tools
# --------------------------------------------------------------------------
def tool(name, description, properties, required=None):
    parameters = {"type": "object", "properties": properties, "required": required or list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def weather(r):
    city = r.choice(CITIES)
    description = r.choice(["Get the weather", "Weather of a city", "Get the current weather in a city", "Get the weather for a location"])
    key = r.choice(["city", "city", "location"])
    schema = {"type": "string"} if r.random() < 0.6 else {"type": "string", "description": f"Name of the {key}"}
    question = r.choice(
        [
            f"What is the weather in {city}?",
            f"What's the weather like in {city}?",
            f"How is the weather in {city} today?",
            f"Weather in {city}?",
            f"Tell me the weather in {city}.",
        ]
    )
    degrees = r.randint(-5, 35)
    result = r.choice([f'{{"temperature": {degrees}}}', f"{degrees} degrees", f"{degrees} degrees and sunny"])
    return (
        tool(r.choice(["get_weather", "get_weather", "get_current_weather"]), description, {key: schema}),
        question,
        {key: city},
        result,
        f"It is {degrees} degrees in {city}.",
    )


def add_numbers(r):
    a, b = r.randint(0, 99), r.randint(0, 99)
    number = {"type": r.choice(["number", "integer"])}
    question = r.choice([f"Add {a} and {b}.", f"What is {a} + {b}?", f"Use add to add {a} and {b}."])
    return tool("add", r.choice(["Add two numbers", "Adds numbers"]), {"a": number, "b": number}), question, {"a": a, "b": b}, str(a + b), f"The sum is {a + b}."


def read_file(r):
    path = r.choice(FILES)
    word = r.choice(THINGS)
    question = r.choice([f"Read {path}.", f"Read the file {path}.", f"What is in {path}?", f"Please read {path}"])
    return tool("read_file", "Read a file", {"path": {"type": "string"}}), question, {"path": path}, word, f"The file {path} says: {word}"


def search(r):
    words = " ".join(r.sample(THINGS, r.randint(1, 3)))
    question = r.choice([f"Search for {words}.", f"Search: {words}", f"Look up {words}."])
    found = r.choice(THINGS)
    return tool("search", r.choice(["Search the web", "Search documents"]), {"query": {"type": "string"}}), question, {"query": words}, found, f"I found: {found}"


def get_time(r):
    city = r.choice(CITIES)
    hour = f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}"
    question = r.choice([f"What time is it in {city}?", f"Tell me the time in {city}."])
    return tool("get_time", "Get the time in a city", {"city": {"type": "string"}}), question, {"city": city}, hour, f"It is {hour} in {city}."


def value_for(r, key):
    if key in ("count", "limit", "level", "size", "day"):
        return r.randint(1, 99), {"type": r.choice(["integer", "number"])}
    if key in ("path",):
        return r.choice(FILES), {"type": "string"}
    if key in ("city",):
        return r.choice(CITIES), {"type": "string"}
    if key in ("name", "user_id"):
        return r.choice(NAMES), {"type": "string"}
    return r.choice(THINGS), {"type": "string"}


def named_call(r):
    """The request spells out name and arguments."""
    name = f"{r.choice(VERBS)}_{r.choice(NOUNS)}"
    keys = r.sample(KEYS, r.randint(1, 2))
    values, properties = {}, {}
    for key in keys:
        values[key], properties[key] = value_for(r, key)
    spelled = " and ".join(f"{k} {v}" for k, v in values.items())
    equals = ", ".join(f"{k}={v}" for k, v in values.items())
    question = r.choice([f"Call {name} with {spelled}.", f"Use {name} with {spelled}.", f"Please call {name} with {equals}.", f"Run {name}: {equals}"])
    verb, noun = name.split("_", 1)
    result = r.choice(["ok", "done", r.choice(THINGS)])
    return tool(name, f"{verb.capitalize()} a {noun}", properties), question, values, result, f"The result is {result}."


TOOLS = [weather, weather, add_numbers, read_file, search, get_time, named_call, named_call, named_call]


def tool_conversation(r) -> tuple[list[dict], bool]:
    thinking = r.random() < 0.3
    offered, question, arguments, result, answer = r.choice(TOOLS)(r)
    name = offered["function"]["name"]
    tools = [offered]
    for _ in range(r.choice([0, 0, 0, 1, 1, 2])):
        other = r.choice(TOOLS)(r)[0]
        if other["function"]["name"] not in [t["function"]["name"] for t in tools]:
            tools.append(other)
    r.shuffle(tools)
    system = {"role": "system", "content": r.choice(["", "", *SYSTEMS])}
    offer = system | {"tools": tools}
    kind = r.random()
    if kind < 0.12:  # offered, but the request does not match
        request, reasoning, text = r.choice(PLAIN)(r)
        if not (name == "add" and "+" in text):
            return turn(offer, request, f"{reasoning} No function is needed.", text, thinking), thinking
    if kind < 0.20:  # a matching request without any offer
        if name != "add":
            text = "I cannot do that: I have no function for it."
            return turn(system, question, "There is no function for this.", text, thinking), thinking
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    messages = [offer, {"role": "user", "content": question}]
    messages.append({"role": "assistant", "content": "", "reasoning_content": f"I call {name}.", "tool_calls": [call]})
    if r.random() < 0.55:
        messages.append({"role": "tool", "tool_call_id": "c1", "content": result})
        messages.append({"role": "assistant", "reasoning_content": "I have the result.", "content": answer})
    return messages, thinking


def turn(system, request, reasoning, text, thinking) -> list[dict]:
    return [
        system,
        {"role": "user", "content": request},
        {"role": "assistant", "reasoning_content": reasoning, "content": text},
    ]


def plain_conversation(r) -> tuple[list[dict], bool]:
    messages = []
    if r.random() < 0.4:
        messages.append({"role": "system", "content": r.choice(SYSTEMS)})
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        request, reasoning, text = r.choice(PLAIN)(r)
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "reasoning_content": reasoning, "content": text})
    return messages, r.random() < 0.3


def conversation(r, encoder: Encoder) -> tuple[str, list[dict], bool]:
    messages, thinking = tool_conversation(r) if r.random() < 0.5 else plain_conversation(r)
    effort = r.choice(["low", "low", "low", "high", "max"])
    return encoder.encode(messages, thinking, effort), messages, thinking


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--run", type=Path, required=True)
    ap.add_argument("--model", type=Path, required=True)
    args = ap.parse_args()
    encoder = Encoder(read_texts(args.model / "encoding" / "encoding_dsv4.py"))

    r = random.Random(11)
    seen = set()
    with open(args.run / "chat.jsonl", "w") as out:
        for _ in range(NUM_CONVERSATIONS):
            text, _, _ = conversation(r, encoder)
            seen.add(text)
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")

    r = random.Random(12)
    with open(args.run / "chat-check.jsonl", "w") as out:
        checks = 0
        while checks < NUM_CHECKS:
            text, messages, thinking = conversation(r, encoder)
            if text in seen:
                continue
            # the last answer is to be found; everything before it is the prompt
            prompt = encoder.encode(messages[:-1], thinking)
            whole = encoder.encode(messages, thinking)
            if not whole.startswith(prompt):
                continue
            kind = "call" if messages[-1].get("tool_calls") else "result" if messages[-2]["role"] == "tool" else "plain"
            out.write(json.dumps({"kind": kind, "prompt": prompt, "answer": whole[len(prompt) :]}, ensure_ascii=False) + "\n")
            checks += 1


if __name__ == "__main__":
    main()
