#!/usr/bin/env python3
"""Serving under load: short prompts behind a long one, many at once, prefixes that are kept. Real processes, real HTTP.

    python measure.py --troika PATH --model mini/ [--llama-server PATH --gguf mini.gguf] \\
        [--parts behind,concurrency,four,warm] [--rounds 5] [--append FILE]

Prompts are random token ids, the same for every engine, so nothing is tokenized and nothing repeats by chance. Times are a
client's, by the clock. Engines run in turn, order reversed from round to round; every server is a process of its own.

behind       A stream decodes, a prompt of 50 chunks comes, then ten prompts of one chunk, one after another: time to first token of the short
             ones in chunk times, and the 99th percentile of the gap between tokens of the stream against --max-itl.
concurrency  Prompt tokens per second, all together, with 1, 2, 4 and 8 clients.
four         Four requests at once, 512 + 64 tokens each: tokens per second, all together; beside it one client alone.
warm         A prompt of 4096 tokens of which all but the last 100 are kept: time to first token against the cold one,
             from memory, and from disk after a restart.
"""
import argparse
import concurrent.futures
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

CHUNK = 512


class Server:
    """A server process; `ready` once it answers."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.port, self.log = None, []
        for line in self.process.stdout:
            self.log.append(line)
            if "http://" in line and ("listening on" in line or "serving http" in line):
                self.port = int(line.split("http://")[1].split()[0].strip("/").rsplit(":", 1)[1])
                break
        if self.port is None:
            raise RuntimeError("the server ended before it listened:\n" + "".join(self.log[-20:]))
        # A pipe that nobody empties would stop the server.
        threading.Thread(target=lambda: [self.log.append(line) for line in self.process.stdout], daemon=True).start()
        self.model = None
        while self.model is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models") as models:
                    self.model = json.load(models)["data"][0]["id"]
            except OSError:
                time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def stream(self, prompt, tokens, each=None):
        """Times of the tokens, in seconds after the request was sent."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        start, times = time.perf_counter(), []
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read()[:300]}")
        for line in answer:
            if line.startswith(b"data: {") and b'"finish_reason":null' in line:
                times.append(time.perf_counter() - start)
                if each:
                    each()
        connection.close()
        return times

    def generate(self, prompt, tokens):
        """Tokens generated and seconds taken."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {text[:300]}")
        connection.close()
        return json.loads(text)["usage"]["completion_tokens"], time.perf_counter() - start


def troika(args, *more):
    return Server([args.troika, "serve", "--model", args.model, "--threads", str(args.threads), "--port", "0", *more])


def llama(args, slots):
    port = random.randrange(20000, 50000)
    command = [args.llama_server, "-m", args.gguf, "-t", str(args.threads), "-np", str(slots), "-c", str(1024 * slots),
               "--port", str(port), "--no-webui", "--no-cache-prompt"]
    return Server(command)


def prompt(generator, tokens):
    return [generator.randrange(100, 8000) for _ in range(tokens)]


def spread(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def say(text):
    print(text, file=sys.stderr, flush=True)


def behind(args, generator):
    waits, gaps_99, chunk_times = [], [], []
    for round_ in range(args.rounds):
        with troika(args, "--no-cache", "--max-itl", str(args.max_itl)) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
            server.generate(prompt(generator, CHUNK), 2)
            times, started = [], threading.Event()
            stream = pool.submit(server.stream, prompt(generator, 64), 4000, lambda: (times.append(time.perf_counter()), started.set()))
            started.wait()
            begin = time.perf_counter()
            long = pool.submit(server.stream, prompt(generator, 50 * CHUNK), 1)
            time.sleep(1.0)
            # One after another: ten at once would wait for each other, five chunks in the middle, on any engine.
            waits.append(statistics.median(server.stream(prompt(generator, CHUNK), 1)[0] for _ in range(10)))
            long.result()
            end = time.perf_counter()
            during = [t for t in times if begin <= t <= end]
            gaps = sorted(b - a for a, b in zip(during, during[1:]))
            gaps_99.append(gaps[int(len(gaps) * 0.99)] * 1e3)
            # 50 chunks of the long prompt and ten of the short ones went through in that time.
            chunk_times.append((end - begin) / 60)
            del stream
        say(f"behind {round_}: short {waits[-1] * 1e3:.0f} ms, chunk {chunk_times[-1] * 1e3:.0f} ms, p99 gap {gaps_99[-1]:.0f} ms")
    ratios = [wait / chunk for wait, chunk in zip(waits, chunk_times)]
    return [f"| short prompts behind one of 50 chunks: median time to first token / chunk time | at most 3 | {spread(ratios)} |",
            f"| gap between tokens of the running stream, 99th percentile / --max-itl ({args.max_itl} ms) | at most 1.2 | "
            f"{spread([gap / args.max_itl for gap in gaps_99])} |"]


def concurrency(args, generator):
    rates = {clients: [] for clients in [1, 2, 4, 8]}
    with troika(args, "--no-cache") as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        server.generate(prompt(generator, CHUNK), 2)
        for round_ in range(args.rounds):
            order = sorted(rates, reverse=bool(round_ % 2))
            for clients in order:
                prompts = [prompt(generator, 1024) for _ in range(8)]
                start = time.perf_counter()
                shares = [prompts[client::clients] for client in range(clients)]
                list(pool.map(lambda share: [server.generate(p, 1) for p in share], shares))
                rates[clients].append(8 * 1024 / (time.perf_counter() - start))
            say(f"concurrency {round_}: " + ", ".join(f"{k}: {v[-1]:.0f}" for k, v in rates.items()))
    medians = {clients: statistics.median(values) for clients, values in rates.items()}
    worst = min(medians[c] / max(medians[d] for d in medians if d <= c) for c in medians)
    cells = "; ".join(f"{clients}: {spread(values, 0)}" for clients, values in rates.items())
    return [f"| prompt tokens per second with 1, 2, 4, 8 clients: the least against the best with fewer | at least 0.9 | {worst:.2f} ({cells}) |"]


def at_once(server, prompts):
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        made = list(pool.map(lambda p: server.generate(p, 64)[0], prompts))
        return (sum(map(len, prompts)) + sum(made)) / (time.perf_counter() - start)


def four(args, generator):
    rates = {"troika, four": [], "troika, one": [], "llama-server, four": []}
    for round_ in range(args.rounds):
        prompts = [prompt(generator, 512) for _ in range(4)]

        def ours():
            with troika(args, "--no-cache") as server:
                at_once(server, [prompt(generator, 64)])
                rates["troika, four"].append(at_once(server, prompts))
                rates["troika, one"].append(at_once(server, [prompt(generator, 512)]))

        def theirs():
            with llama(args, 4) as server:
                at_once(server, [prompt(generator, 64)])
                rates["llama-server, four"].append(at_once(server, prompts))

        engines = [ours, theirs] if args.llama_server else [ours]
        for engine in engines if round_ % 2 == 0 else reversed(engines):
            engine()
        say(f"four {round_}: " + ", ".join(f"{k} {v[-1]:.0f} tok/s" for k, v in rates.items() if v))
    own = [a / b for a, b in zip(rates["troika, four"], rates["troika, one"])]
    cells = "; ".join(f"{name} {spread(values, 0)} tok/s" for name, values in rates.items() if values)
    lines = [f"| four at once against one alone, tokens of prompts and answers per second | (1.6) | {spread(own)} ({cells}) |"]
    if args.llama_server:
        ratios = [a / b for a, b in zip(rates["troika, four"], rates["llama-server, four"])]
        lines.append(f"| four at once, troika / llama-server | at least 2 | {spread(ratios)} |")
    return lines


def drop_page_cache():
    """True if the system let us."""
    try:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
            file.write("1")
        return True
    except OSError:
        return False


def warm(args, generator):
    ram, disk, dropped = [], [], False
    for round_ in range(args.rounds):
        tokens = prompt(generator, 4096)
        with tempfile.TemporaryDirectory() as directory:
            with troika(args, "--cache-dir", directory) as server:
                server.generate(prompt(generator, CHUNK), 2)
                cold = server.stream(prompt(generator, 4096), 2)[0]
                server.stream(tokens[:-100], 1)
                ram.append(server.stream(tokens, 2)[0] / cold)
            dropped = drop_page_cache()
            with troika(args, "--cache-dir", directory) as server:
                # Brings the weights back, which were dropped as well.
                server.generate(prompt(generator, CHUNK), 2)
                disk.append(server.stream(tokens[:-50] + prompt(generator, 50), 2)[0] / cold)
        say(f"warm {round_}: memory {ram[-1]:.3f}, disk {disk[-1]:.3f} of {cold * 1e3:.0f} ms")
    note = "page cache dropped" if dropped else "page cache not dropped: not permitted"
    return [f"| 4096 tokens, all but the last 100 kept in memory: time to first token / cold | at most 0.08 | {spread(ram, 3)} |",
            f"| the same from disk after a restart ({note}) | at most 0.15 | {spread(disk, 3)} |"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--troika", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf")
    parser.add_argument("--parts", default="behind,concurrency,four,warm")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-itl", type=int, default=200, help="milliseconds")
    parser.add_argument("--append", help="file that the table is appended to")
    args = parser.parse_args()
    if args.llama_server and not args.gguf:
        parser.error("--llama-server needs --gguf, the same shapes in its format")
    parts = {"behind": behind, "concurrency": concurrency, "four": four, "warm": warm}
    chosen = args.parts.split(",")
    if unknown := set(chosen) - set(parts):
        parser.error(f"unknown parts {sorted(unknown)}: expected some of {sorted(parts)}")
    lines = [f"### Serving `{os.path.basename(os.path.abspath(args.model))}`, {args.threads} threads, {args.rounds} rounds", "",
             "| | goal | median of rounds (least to most) |", "|---|---|---|"]
    for name in chosen:
        lines += parts[name](args, random.Random(7))
    text = "\n".join(lines) + "\n"
    print(text)
    if args.append:
        with open(args.append, "a", encoding="utf-8") as file:
            file.write("\n" + text)


main()
