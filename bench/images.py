#!/usr/bin/env python3
"""Time of a vision tower for one picture, interleaved with llama.cpp's mtmd.

    bench/images.py target/release/paguro target/llama.cpp/build/bin/llama-mtmd-cli model.gguf mmproj.gguf --side 448 --rounds 4

Draws a new picture for each round, whose size no rule changes, and lets both programs encode it in turn, with as many threads. Prints the
milliseconds of each round, their medians, and how often Paguro's fits into llama.cpp's. Paguro's time is that of its metric
`paguro_encoder_seconds`, which has the tower and what arranges its rows; llama.cpp's is the one that it logs. Needs nothing but Python.
"""

import argparse
import base64
import json
import os
import pathlib
import random
import re
import statistics
import struct
import subprocess
import tempfile
import urllib.request
import zlib


def png(side, seed):
    rng = random.Random(seed)
    rows = b"".join(b"\0" + bytes((x * 3 + y * 5 + rng.randrange(40)) % 256 for x in range(side) for _ in range(3)) for y in range(side))
    part = lambda name, body: struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows, 1)) + part(b"IEND", b"")


class Paguro:
    def __init__(self, options):
        self.home = tempfile.TemporaryDirectory()
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
        command = [options.paguro, "serve", options.model, "--mmproj", options.mmproj, "--port", "0", "--device", "cpu", "--log", "error",
                   "--threads", str(options.threads), "--ctx", "4096"]
        self.process = subprocess.Popen(command, env=keep | {"HOME": self.home.name}, stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().strip().rsplit(" ", 1)[1]
        self.model = pathlib.Path(options.model).stem

    def seconds(self):
        text = urllib.request.urlopen(self.address + "/metrics").read().decode()
        return sum(map(float, re.findall(r"^paguro_encoder_seconds_total\{[^}]*\} (\S+)", text, re.M)))

    def encode(self, picture):
        before = self.seconds()
        url = "data:image/png;base64," + base64.b64encode(picture).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is that?"}]
        body = {"model": self.model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        request = urllib.request.Request(self.address + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        usage = json.load(urllib.request.urlopen(request))["usage"]
        return 1000 * (self.seconds() - before), usage["prompt_tokens"]


def llama(options, picture, folder):
    path = pathlib.Path(folder, "picture.png")
    path.write_bytes(picture)
    command = [options.mtmd, "-m", options.model, "--mmproj", options.mmproj, "--image", str(path), "-p", "What is that?", "-n", "1", "-t",
               str(options.threads), "-c", "4096", "--temp", "0", "--no-warmup"] + options.more.split()
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    times = re.findall(r"(?:slice encoded|batch encoding done) in (\d+) ms", run.stdout)
    if not times:
        raise SystemExit(f"no time in the output of {options.mtmd}:\n{run.stdout[-2000:]}")
    return sum(map(float, times))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("paguro", "mtmd", "model", "mmproj"):
        parser.add_argument(name)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--more", default="", help="further arguments of llama-mtmd-cli")
    options = parser.parse_args()
    server = Paguro(options)
    try:
        server.encode(png(options.side, 0))  # loads everything
        ours, theirs = [], []
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1, options.rounds + 1):
                picture = png(options.side, number)
                theirs.append(llama(options, picture, folder))
                time, tokens = server.encode(picture)
                ours.append(time)
                print(json.dumps({"round": number, "paguro_ms": round(ours[-1]), "llama_ms": round(theirs[-1]), "prompt_tokens": tokens}), flush=True)
        median = statistics.median
        print(json.dumps({"paguro_ms": round(median(ours)), "llama_ms": round(median(theirs)), "times": round(median(theirs) / median(ours), 2)}))
    finally:
        server.process.terminate()
        server.process.wait(30)


if __name__ == "__main__":
    main()
