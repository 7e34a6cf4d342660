#!/usr/bin/env python3
"""How troika's speed depends on length, and what HTTP adds: ratios of troika to itself, measured in turn.

    python own.py --troika PATH --model mini/ [--rounds 5] [--long-rounds 3] [--append FILE]

Four figures: prefill of 4096 tokens against 512, decoding after 4096 tokens against decoding after one, time to first
token over HTTP against the time of the prompt itself, and the time per token of a prompt of 16,384 tokens against one of
4096, beside the growth of the floating-point operations that `troika explain` gives for both.
"""
import argparse
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request


def level_of(args):
    return ["--cpu-level", args.cpu_level] if args.cpu_level else []


def bench(args, lengths, generate, rounds):
    command = [args.troika, "bench", "in-process", "--model", args.model, "--threads", str(args.threads), "--rounds", str(rounds),
               "--prompt-lengths", ",".join(map(str, lengths)), "--generate", str(generate), "--json", "-",
               *level_of(args)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    report = json.loads(output)
    args.level = report["cpu_level"]
    return report["results"]


def flops(args, tokens, chunk):
    """Floating-point operations of a prompt, chunk by chunk."""
    total = 0.0
    for position in range(0, tokens, chunk):
        command = [args.troika, "explain", "--config", args.model, "--rows", str(min(chunk, tokens - position)),
                   "--position", str(position), "--json", "-"]
        total += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["total"]["gflop"]
    return total


class Server:
    """`troika serve` without a cache; its own process."""

    def __init__(self, args):
        command = [args.troika, "serve", "--model", args.model, "--threads", str(args.threads), "--port", "0", "--no-cache",
                   *level_of(args)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            if "http://" in line:
                self.port = int(line.split("http://")[1].split()[0].strip("/").rsplit(":", 1)[1])
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models") as models:
                    self.model = json.load(models)["data"][0]["id"]
                return
        raise RuntimeError("the server ended before it said where it listens")

    def first_token_ms(self, prompt):
        body = json.dumps({"model": self.model, "prompt": prompt, "max_tokens": 2, "stream": True, "temperature": 0})
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read()[:300]}")
        while not answer.readline().startswith(b"data:"):
            pass
        elapsed = time.perf_counter() - start
        answer.read()
        connection.close()
        return elapsed * 1e3

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def spread(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--troika", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long-rounds", type=int, default=3)
    parser.add_argument("--cpu-level", choices=["scalar", "avx2", "avx512", "avx512-vnni"], help="instructions to use; without it, the best of the CPU")
    parser.add_argument("--append", help="file that the table is appended to")
    args = parser.parse_args()

    generator = random.Random(1)
    samples = {name: [] for name in ["prefill", "decode", "http", "growth"]}
    rates = {name: [] for name in [512, 4096, 16384, "decode 0", "decode 4096"]}
    server = Server(args)
    try:
        # Once without counting: pages of the weights, threads.
        server.first_token_ms([generator.randrange(100, 8000) for _ in range(512)])
        for round_ in range(args.rounds):
            short, deep = bench(args, [1, 4096], 49, 1)
            rates["decode 0"].append(short["decode_tps"])
            rates["decode 4096"].append(deep["decode_tps"])
            samples["decode"].append(deep["decode_tps"] / short["decode_tps"])
            small, large = bench(args, [512, 4096], 2, 1)
            rates[512].append(small["prefill_tps"])
            rates[4096].append(large["prefill_tps"])
            samples["prefill"].append(large["prefill_tps"] / small["prefill_tps"])
            over_http = statistics.median(
                server.first_token_ms([generator.randrange(100, 8000) for _ in range(512)]) for _ in range(3))
            samples["http"].append(over_http / (512e3 / small["prefill_tps"]))
            print(f"round {round_}: " + ", ".join(f"{k} {v[-1]:.3f}" for k, v in samples.items() if v), file=sys.stderr)
    finally:
        server.stop()
    for round_ in range(args.long_rounds):
        large, long = bench(args, [4096, 16384], 2, 1)
        rates[16384].append(long["prefill_tps"])
        samples["growth"].append(large["prefill_tps"] / long["prefill_tps"])
        print(f"long round {round_}: {samples['growth'][-1]:.3f}", file=sys.stderr)
    lines = [f"### troika against itself, {args.threads} threads, {args.rounds} rounds, CPU level {args.level}", "",
             "| ratio, median of rounds (least to most) | | rates, tok/s |", "|---|---:|---|",
             f"| prefill 4096 / prefill 512 | {spread(samples['prefill'])} | {spread(rates[4096], 0)}; {spread(rates[512], 0)} |",
             f"| decode after 4096 tokens / decode at 0 | {spread(samples['decode'])} | {spread(rates['decode 4096'], 0)}; "
             f"{spread(rates['decode 0'], 0)} |",
             f"| time to first token over HTTP / own prefill time, 512 tokens | {spread(samples['http'])} | |"]
    if args.long_rounds:
        allowed = flops(args, 16384, 512) / 16384 / (flops(args, 4096, 512) / 4096)
        lines.append(f"| time per token, 16,384 tokens / 4096 tokens, {args.long_rounds} rounds | {spread(samples['growth'])} | "
                     f"{spread(rates[16384], 0)}; operations grow by {allowed:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.append:
        with open(args.append, "a", encoding="utf-8") as file:
            file.write("\n" + text)


main()
