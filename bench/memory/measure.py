#!/usr/bin/env python3
"""Compares what `troika inspect --memory` foresees with what a server takes up.

    python3 bench/memory/measure.py target/release/troika MODEL [--class CLASS] [--tokens N]

Starts `troika serve --no-cache` on MODEL, sends one prompt of N tokens (enough for every expert to be read), and
prints both, in MiB, for the pages of files and for the memory of its own. Linux only: it reads /proc.
"""

import argparse
import json
import pathlib
import re
import subprocess
import time
import urllib.request


def memory(pid):
    """Resident bytes of a process now, in MiB."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return {key: int(value) / 1024 for key, value in re.findall(r"^(RssAnon|RssFile|VmRSS|VmHWM):\s+(\d+) kB", status, re.M)}


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("troika")
    parser.add_argument("model")
    parser.add_argument("--class", dest="numeric_class", default="fast")
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()

    command = [args.troika, "serve", "--model", args.model, "--port", "0", "--no-cache", "--class", args.numeric_class]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://[0-9.:]+", line)))
        name = json.load(urllib.request.urlopen(url + "/v1/models"))["data"][0]["id"]
        # Ids spread over the vocabulary, so that every expert and every part of the embedding is read.
        vocab_size = json.loads((pathlib.Path(args.model) / "config.json").read_text())["vocab_size"]
        prompt = [i * 7919 % vocab_size for i in range(args.tokens)]
        post(url + "/v1/completions", {"model": name, "prompt": prompt, "max_tokens": 2})
        # What the answer itself needed is given back a moment later.
        time.sleep(1)
        measured = memory(server.pid)
    finally:
        server.terminate()
        server.wait()

    foresee = [args.troika, "inspect", args.model, "--memory", "--json", "-", "--class", args.numeric_class, "--tokens", str(args.tokens)]
    foreseen = json.loads(subprocess.run(foresee, check=True, capture_output=True, text=True).stdout)
    rows = [
        ("pages of files", "file_bytes", "RssFile"),
        ("memory of its own", "anonymous_bytes", "RssAnon"),
        ("resident", "resident_bytes", "VmRSS"),
    ]
    print(f"{name}, {args.numeric_class}, {args.tokens} tokens; most ever resident {measured['VmHWM']:.1f} MiB")
    for title, key, field in rows:
        want, got = foreseen[key] / 2**20, measured[field]
        print(f"{title:<20} foreseen {want:8.1f}  measured {got:8.1f}  {(want / got - 1) * 100:+.1f} %")


if __name__ == "__main__":
    main()
