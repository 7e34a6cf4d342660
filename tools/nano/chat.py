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


PLAIN = [greeting, fact, sum_of_two, repeat_words, repeat_words, repeat_words, introduce, snippet, first_letter]


# --------------------------------------------------------------------------
# tools
# --------------------------------------------------------------------------
def tool(name, description, properties, required=None):
    parameters = {"type": "object", "properties": properties, "required": required or list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


# Each returns a tool and a function that makes requests for it: (request, arguments, result, answer).
def weather(r):
    name = r.choice(["get_weather", "get_weather", "get_current_weather"])
    description = r.choice(["Get the weather", "Weather of a city", "Get the current weather in a city", "Get the weather for a location"])
    key = r.choice(["city", "city", "location"])
    schema = {"type": "string"} if r.random() < 0.6 else {"type": "string", "description": f"Name of the {key}"}

    def ask():
        city, degrees = r.choice(CITIES), r.randint(-5, 35)
        request = r.choice(
            [
                f"What is the weather in {city}?",
                f"What's the weather like in {city}?",
                f"How is the weather in {city} today?",
                f"Weather in {city}?",
                f"Tell me the weather in {city}.",
            ]
        )
        result = r.choice([f'{{"temperature": {degrees}}}', f"{degrees} degrees", f"{degrees} degrees and sunny"])
        return request, {key: city}, result, f"It is {degrees} degrees in {city}."

    return tool(name, description, {key: schema}), ask


def add_numbers(r):
    number = {"type": r.choice(["number", "integer"])}

    def ask():
        a, b = r.randint(0, 99), r.randint(0, 99)
        request = r.choice([f"Add {a} and {b}.", f"What is {a} + {b}?", f"Use add to add {a} and {b}."])
        return request, {"a": a, "b": b}, str(a + b), f"The sum is {a + b}."

    return tool("add", r.choice(["Add two numbers", "Adds numbers"]), {"a": number, "b": number}), ask


def read_file(r):
    def ask():
        path, word = r.choice(FILES), r.choice(THINGS)
        request = r.choice([f"Read {path}.", f"Read the file {path}.", f"What is in {path}?", f"Please read {path}"])
        return request, {"path": path}, word, f"The file {path} says: {word}"

    return tool("read_file", "Read a file", {"path": {"type": "string"}}), ask


def search(r):
    def ask():
        words, found = " ".join(r.sample(THINGS, r.randint(1, 3))), r.choice(THINGS)
        request = r.choice([f"Search for {words}.", f"Search: {words}", f"Look up {words}."])
        return request, {"query": words}, found, f"I found: {found}"

    return tool("search", r.choice(["Search the web", "Search documents"]), {"query": {"type": "string"}}), ask


def get_time(r):
    def ask():
        city, hour = r.choice(CITIES), f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}"
        request = r.choice([f"What time is it in {city}?", f"Tell me the time in {city}."])
        return request, {"city": city}, hour, f"It is {hour} in {city}."

    return tool("get_time", "Get the time in a city", {"city": {"type": "string"}}), ask


def value_for(r, key):
    if key in ("count", "limit", "level", "size", "day"):
        return r.randint(1, 99)
    pool = {"path": FILES, "city": CITIES, "name": NAMES, "user_id": NAMES}.get(key, THINGS)
    return r.choice(pool)


def named_call(r):
    """The request spells out name and arguments."""
    verb, noun = r.choice(VERBS), r.choice(NOUNS)
    name = f"{verb}_{noun}"
    keys = r.sample(KEYS, r.randint(1, 2))
    kinds = {k: {"type": "integer" if isinstance(value_for(r, k), int) else "string"} for k in keys}

    def ask():
        values = {k: value_for(r, k) for k in keys}
        spelled = " and ".join(f"{k} {v}" for k, v in values.items())
        equals = ", ".join(f"{k}={v}" for k, v in values.items())
        request = r.choice([f"Call {name} with {spelled}.", f"Use {name} with {spelled}.", f"Please call {name} with {equals}.", f"Run {name}: {equals}"])
        result = r.choice(["ok", "done", r.choice(THINGS)])
        return request, values, result, f"The result is {result}."

    return tool(name, f"{verb.capitalize()} a {noun}", kinds), ask


TOOLS = [weather, weather, add_numbers, read_file, search, get_time, named_call, named_call, named_call]


def tool_conversation(r, rounds: int) -> list[dict]:
    """Requests to functions that are all offered at the start; some need none of them."""
    offers = {}
    for _ in range(r.choice([1, 1, 1, 2, 2, 3])):
        offered, ask = r.choice(TOOLS)(r)
        offers.setdefault(offered["function"]["name"], (offered, ask))
    system = {"role": "system", "content": r.choice(["", "", *SYSTEMS])}
    if r.random() < 0.06:  # a fitting request without any offer
        name, (_, ask) = r.choice(list(offers.items()))
        if name != "add":
            text = "I cannot do that: I have no function for it."
            return turn(system, ask()[0], "There is no function for this.", text)
    messages = [system | {"tools": [offered for offered, _ in offers.values()]}]
    for i in range(rounds):
        if r.random() < 0.15:
            request, reasoning, text = r.choice(PLAIN)(r)
            if not ("add" in offers and "+" in text):
                messages += turn(None, request, f"{reasoning} No function is needed.", text)
                continue
        name = r.choice(list(offers))
        request, arguments, result, answer = offers[name][1]()
        call = {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": "", "reasoning_content": f"I call {name}.", "tool_calls": [call]})
        if i < rounds - 1 or r.random() < 0.5:
            messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": result})
            messages.append({"role": "assistant", "reasoning_content": "I have the result.", "content": answer})
    return messages


def turn(system, request, reasoning, text) -> list[dict]:
    messages = [{"role": "user", "content": request}, {"role": "assistant", "reasoning_content": reasoning, "content": text}]
    return messages if system is None else [system, *messages]


def plain_conversation(r, rounds: int) -> list[dict]:
    messages = []
    if r.random() < 0.4:
        messages.append({"role": "system", "content": r.choice(SYSTEMS)})
    for _ in range(rounds):
        messages += turn(None, *r.choice(PLAIN)(r))
    return messages


def conversation(r, encoder: Encoder) -> tuple[str, list[dict], bool]:
    """Text, messages and whether in thinking mode. Several rounds share one tools block and train more answers a token."""
    if r.random() < 0.5:
        messages = tool_conversation(r, r.choice([1, 2, 3, 4, 5]))
    else:
        messages = plain_conversation(r, r.choice([1, 2, 3, 4, 5]))
    thinking = r.random() < 0.3
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
