#!/usr/bin/env python3
"""Run troika and llama.cpp's llama-bench in turn on this machine and write a table.

    python compare.py --llama-bench PATH --gguf mini.gguf --troika PATH --model mini/ \\
        --ceilings PATH [--name mini] [--prompts 512,2048] [--generate 32] [--rounds 5] [--append FILE]

The two files must hold the same shapes: `make_gguf.py` and `troika synth` write presets of the same names. Each round
measures every row once with each engine, order reversed from round to round; a row is the median of the rounds with the
least and the most. Rates are those that each program reports about itself, loading excluded. `processor time` is what the
operating system charged for one more prompt on one thread (a run with two prompts more, minus a run with one), which
neighbours on the machine disturb less than the clock.
"""
import argparse
import json
import resource
import statistics
import subprocess
import sys

# Weights that a prompt token multiplies (millions) and megabytes that a decoded token reads, by preset.
SIZES = {"mini": (112.2, 110.0), "true2": (593.0, 535.0)}


def run(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return output, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def level_of(args):
    return ["--cpu-level", args.cpu_level] if args.cpu_level else []


class Troika:
    name = "troika"

    def __init__(self, args):
        self.args = args
        self.level = None

    def result(self, prompt, generate):
        report = json.loads(run(self.command(prompt, generate, 1, self.args.threads))[0])
        self.level = report["cpu_level"]
        return report["results"][0]

    def command(self, prompt, generate, rounds, threads):
        return [self.args.troika, "bench", "in-process", "--model", self.args.model, "--threads", str(threads), "--rounds", str(rounds),
                "--prompt-lengths", str(prompt), "--generate", str(generate), "--json", "-",
                *level_of(self.args)]

    def prefill(self, tokens):
        return self.result(tokens, 2)["prefill_tps"]

    def decode(self, tokens):
        return self.result(1, tokens + 1)["decode_tps"]

    def processor(self, tokens):
        cost = lambda rounds: run(self.command(tokens, 2, rounds, 1))[1]
        return 2 * tokens / (cost(3) - cost(1))


class Llama:
    name = "llama.cpp"

    def __init__(self, args):
        self.args = args

    def command(self, prompt, generate, rounds, threads):
        return [self.args.llama_bench, "-m", self.args.gguf, "-t", str(threads), "-p", str(prompt), "-n", str(generate),
                "-r", str(rounds), "-o", "json"]

    def rate(self, prompt, generate):
        rows = json.loads(run(self.command(prompt, generate, 1, self.args.threads))[0])
        return statistics.median(rows[0]["samples_ts"])

    def prefill(self, tokens):
        return self.rate(tokens, 0)

    def decode(self, tokens):
        return self.rate(0, tokens)

    def processor(self, tokens):
        cost = lambda rounds: run(self.command(tokens, 0, rounds, 1))[1]
        return 2 * tokens / (cost(3) - cost(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ["llama-bench", "gguf", "troika", "model", "ceilings"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--name", default="mini", choices=SIZES)
    parser.add_argument("--prompts", default="512,2048")
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-level", choices=["scalar", "avx2", "avx512", "avx512-vnni"],
                        help="instructions that troika uses; avx2 against a peer built for it. Without it, the best of the CPU")
    parser.add_argument("--skip-processor", action="store_true", help="leave the row of processor time out")
    parser.add_argument("--append", help="file that the table is appended to")
    args = parser.parse_args()

    rows = [(f"prefill {n}", "prefill", int(n)) for n in args.prompts.split(",")]
    rows.append((f"decode {args.generate}", "decode", args.generate))
    if not args.skip_processor:
        first = int(args.prompts.split(",")[0])
        rows.append((f"prefill {first}, processor time, 1 thread", "processor", first))
    engines = [Troika(args), Llama(args)]
    samples = {(row[0], engine.name): [] for row in rows for engine in engines}
    ceilings = []
    for round_ in range(args.rounds):
        ceilings.append(json.loads(run([args.ceilings, str(args.threads), "3"])[0]))
        for title, what, tokens in rows:
            for engine in engines if round_ % 2 == 0 else reversed(engines):
                rate = getattr(engine, what)(tokens)
                samples[title, engine.name].append(rate)
                print(f"round {round_}: {title}, {engine.name}: {rate:.1f} tok/s", file=sys.stderr)

    ceiling = {key: statistics.median(c[key] for c in ceilings) for key in ceilings[0]}
    macs, megabytes = SIZES[args.name]
    cell = lambda rates: f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"
    lines = [f"### `{args.name}`, {args.threads} threads, {args.rounds} rounds, troika at CPU level "
             f"{engines[0].level}", "",
             f"Ceilings measured in the same rounds: read {ceiling['read_gbs']:.1f} GB/s, f32 {ceiling['f32_gflops']:.0f} GFLOP/s, "
             f"int8 {ceiling['int8_gops']:.0f} GOP/s, 4-bit x int8 {ceiling['int8_narrow_gops']:.0f} GOP/s.", "",
             "| tok/s, median (least to most) | troika | llama.cpp | ratio of medians | ratios by round | troika's share of its ceiling |",
             "|---|---:|---:|---:|---:|---:|"]
    for title, what, _ in rows:
        ours, theirs = samples[title, "troika"], samples[title, "llama.cpp"]
        ratios = [a / b for a, b in zip(ours, theirs)]
        rate = statistics.median(ours)
        share = {"prefill": rate * macs * 2e-3 / ceiling["int8_gops"], "decode": rate * megabytes * 1e-3 / ceiling["read_gbs"]}
        lines.append(f"| {title} | {cell(ours)} | {cell(theirs)} | {rate / statistics.median(theirs):.2f} | "
                     f"{min(ratios):.2f} to {max(ratios):.2f} | " + (f"{share[what]:.0%} |" if what in share else "- |"))
    text = "\n".join(lines) + "\n"
    print(text)
    if args.append:
        with open(args.append, "a", encoding="utf-8") as file:
            file.write("\n" + text)


main()
