#!/usr/bin/env python3
"""Three figures of the cache outside of the device's pages: a restart, conversations that take turns, and its cost.

    bench/kv_tiers.py restart target/release/paguro --model qwen2.5-coder-1.5b.gguf
    bench/kv_tiers.py turns target/release/paguro --model qwen2.5-coder-1.5b.gguf
    bench/kv_tiers.py cost target/release/paguro

`restart`: a prompt of 8,000 tokens, `kill -9` when `/status` says that everything is written, and the same prompt after a restart. The
time to the first token must be at most 1/20 of the first one, and the answer equal, with the bits of its log-probabilities.
`turns`: 20 conversations of 4,000 tokens take turns in memory for 3, with answers of 64 tokens, with `--kv-disk` and without: at
least 5 times the throughput, and equal answers (on a GPU, answers are equal with `-- --numerics exact` only).
`cost`: processor time of the engine's threads for 64 clients with `--kv-disk` and without, in turns: within 2 %.

Exits with 1 if a figure is missed. Options after `--` go to `paguro serve`. Needs nothing but Python.
"""

import argparse
import atexit
import concurrent.futures
import http.client
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

WORDS = (
    "the a fox owl key sea hat river stone moon night story brave shy little old friend door house winter function value "
    "returns list index buffer thread page block token reads writes when before after under over between and or not with"
).split()


def text(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


def new_folder():
    """An empty folder, which is removed at the end."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return pathlib.Path(folder.name)


class Server:
    def __init__(self, options, *args, folder=None):
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
        self.home = tempfile.TemporaryDirectory()
        disk = ["--kv-disk", "16GB", "--kv-disk-dir", str(folder)] if folder else ["--kv-disk", "off", "--kv-host", "off"]
        models = [options.model] if options.model else []
        self.process = subprocess.Popen(
            [options.binary, "serve", *models, "--port", "0", "--log", "error", *disk, *args, *options.more],
            env=keep | {"HOME": self.home.name}, stdout=subprocess.PIPE, text=True,
        )
        atexit.register(self.process.kill)
        line = self.process.stdout.readline()
        if "//" not in line:
            sys.exit(f"the server does not start: {line!r}")
        self.port = int(line.strip().rsplit(":", 1)[1])
        self.name = pathlib.Path(options.model).stem if options.model else "tales"

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def load(self):
        """Loads the model, so that it is no part of a time."""
        self.complete([1, 2, 3], 1)

    def complete(self, tokens, length):
        """Seconds to the first token and to the end, the answer with its log-probabilities, and usage."""
        body = {"model": self.name, "prompt": tokens, "max_tokens": length, "temperature": 0, "logprobs": 1, "stream": True,
                "stream_options": {"include_usage": True}, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        begin, first, answer, usage = time.monotonic(), None, [], None
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            sys.exit(f"{response.status}: {response.read()[:500]}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                if choice.get("text") or choice.get("logprobs"):
                    first = first or time.monotonic()
                    answer.append([choice["text"], (choice["logprobs"] or {}).get("token_logprobs")])
        connection.close()
        return (first or time.monotonic()) - begin, time.monotonic() - begin, answer, usage

    def tokens(self, words, count):
        """Token ids of a text."""
        found = self.call("POST", "/tokenize", {"model": self.name, "prompt": words})["tokens"]
        if len(found) < count:
            sys.exit(f"{len(found)} tokens are fewer than {count}")
        return found[:count]

    def status(self):
        return self.call("GET", "/status")["models"][0]

    def wait_until_written(self):
        begin = time.monotonic()
        while not (disk := self.status()["disk"]) or not disk["caught_up"]:
            time.sleep(0.05)
        return time.monotonic() - begin

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def engine_seconds(self):
        """Processor time of the engine's threads and of the threads that compute."""
        ticks = 0
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            name = (task / "comm").read_text().strip()
            if name.startswith(("paguro-engine", "paguro-cpu", "paguro-kv", "paguro-digest")):
                fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def restart(options):
    rng = random.Random(3)
    folder = new_folder()
    server = Server(options, "--ctx", str(options.tokens + 256), folder=folder)
    server.load()
    prompt = server.tokens(text(rng, options.tokens), options.tokens)
    before = server.complete(prompt, 64)
    written = server.wait_until_written()
    server.kill()
    server = Server(options, "--ctx", str(options.tokens + 256), folder=folder)
    server.load()
    after = server.complete(prompt, 64)
    status = server.status()["disk"]
    server.kill()
    ratio = before[0] / after[0]
    equal = before[2] == after[2]
    print(f"first token: {before[0]:.2f} s, after a restart {after[0]:.3f} s (1/{ratio:.0f}); written after {written:.1f} s more")
    print(f"usage {after[3]['prompt_tokens_details']}, answers equal: {equal}, disk {status}")
    return ratio >= 20 and equal


def turns(options):
    rng = random.Random(4)
    probe = Server(options, "--ctx", str(options.tokens + 256))
    probe.load()
    status = probe.status()
    per_token = status["kv"] / (status["pages"] * 32)
    prompts = [probe.tokens(text(rng, options.tokens), options.tokens) for _ in range(options.conversations)]
    probe.kill()
    memory = str(int(per_token * (options.tokens + 128) * 3))
    speeds, answers = {}, {}
    for name in ("tiers", "none"):
        folder = new_folder() if name == "tiers" else None
        server = Server(options, "--ctx", str(options.tokens + 256), "--kv-memory", memory, "--parallel", "3", folder=folder)
        server.load()
        # The first round is the same for both: everything is new. Without tiers, so is every other round.
        if folder:
            first = [server.complete(prompt, 64) for prompt in prompts]
            server.wait_until_written()
        begin, rounds = time.monotonic(), options.rounds if name == "tiers" else 1
        got = [server.complete(prompt, 64) for _ in range(rounds) for prompt in prompts]
        seconds = (time.monotonic() - begin) / rounds
        speeds[name] = len(prompts) * 64 / seconds
        answers[name] = [one[2] for one in got]
        hits = sum(one[3]["prompt_tokens_details"]["cached_tokens"] for one in got) / rounds
        begun = statistics.median(one[0] for one in got)
        status = server.status()
        print(f"{name}: {speeds[name]:.1f} tokens/s, first token after {begun:.2f} s, {hits:.0f} cached tokens a round, "
              f"host {status['host']}, disk {status['disk']}", flush=True)
        server.kill()
    equal = [one[2] for one in first] == answers["tiers"][: len(prompts)] == answers["none"]
    ratio = speeds["tiers"] / speeds["none"]
    print(f"throughput {ratio:.1f} times, answers equal: {equal}")
    return ratio >= 5 and equal


def cost(options):
    def run(folder):
        server = Server(options, "--parallel", "64", folder=folder)
        server.load()
        rng = random.Random(5)
        prompts = [[rng.randrange(5, 400) for _ in range(300)] for _ in range(options.requests)]
        begin = server.engine_seconds()
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            list(pool.map(lambda prompt: server.complete(prompt, 96), prompts))
        seconds = server.engine_seconds() - begin
        server.kill()
        return seconds

    pairs = []
    for number in range(options.rounds):
        on, off = run(new_folder()), run(None)
        pairs.append(on / off)
        print(f"with the tier {on:.2f} s, without {off:.2f} s: {on / off - 1:+.1%}", flush=True)
    middle = statistics.median(pairs) - 1
    print(f"median {middle:+.1%} in {len(pairs)} pairs")
    return middle <= 0.02


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["restart", "turns", "cost"])
    parser.add_argument("binary")
    parser.add_argument("--model", help="a model file [default: the embedded one]")
    parser.add_argument("--tokens", type=int, help="tokens of a prompt [default: 8000, or 4000 for turns]")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=384)
    # Options after `--` are those of `paguro serve`; argparse would take them for positional arguments.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    options.more = sys.argv[end + 1 :]
    options.tokens = options.tokens or (4000 if options.figure == "turns" else 8000)
    sys.exit(not {"restart": restart, "turns": turns, "cost": cost}[options.figure](options))


if __name__ == "__main__":
    main()
