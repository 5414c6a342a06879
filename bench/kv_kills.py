#!/usr/bin/env python3
"""Kills a server with SIGKILL at random moments under load, and compares its answers with those of an undisturbed server.

    bench/kv_kills.py target/release/paguro --kills 300

The server keeps prefixes on disk (`--kv-disk`) and has memory for a few of the conversations, so that it writes, loads and evicts all
the time. Before each kill it answers for up to `--seconds`. Fails if an answer differs from its reference, the server does not start
again, a record of the store is damaged (`paguro cache verify`), the store exceeds its bound, or its folder has unexpected files.
A record that the kill left incomplete does not count as damaged. Options after `--` are passed to `paguro serve`.
"""

import argparse
import collections
import http.client
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

BOUND = 48 << 20
FILES = re.compile(r"lock|leader|key|room-wanted|writing-[0-9a-f]{16}|digests\.json|segment-[0-9a-f]{16}\.kv|model-[0-9a-f]{64}\.json|remove-[0-9a-f]{64}")
# A kill may come between the creation of a small file and its rename; the next one of that name replaces it.
TEMPORARY = re.compile(r".*\.new")


def conversations(count):
    """Texts of about 250 to 600 tokens, some with a common beginning."""
    rng = random.Random(7)
    words = "fox owl key sea hat river stone moon night story brave shy little old friend door house winter".split()
    common = " ".join(rng.choice(words) for _ in range(220))
    texts = []
    for number in range(count):
        own = " ".join(rng.choice(words) for _ in range(rng.randrange(60, 260)))
        texts.append(f"{common} {own}" if number % 2 else f"{number} {own} {own}")
    return texts


class Run:
    def __init__(self, options):
        self.options = options
        self.home = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.home.name) / "kv"
        self.texts = conversations(options.conversations)
        self.problems = []
        self.counts = collections.Counter()

    def environment(self):
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
        return keep | {"HOME": self.home.name}

    def start(self, disk=True):
        cache = ["--kv-disk", str(BOUND), "--kv-disk-dir", str(self.folder)] if disk else ["--kv-disk", "off"]
        process = subprocess.Popen(
            [self.options.binary, "serve", "--port", "0", "--log", "error", "--kv-memory", self.options.kv_memory,
             *cache, *self.options.more],
            env=self.environment(), stdout=subprocess.PIPE, text=True,
        )
        line = process.stdout.readline()
        if "//" not in line:
            sys.exit(f"the server does not start: {line!r}")
        return process, int(line.strip().rsplit(":", 1)[1])

    def ask(self, port, number):
        """Text of an answer with its log-probabilities, and cached tokens by tier. `None` if the server has gone."""
        body = {"model": self.options.model, "prompt": self.texts[number], "max_tokens": 12, "temperature": 0, "logprobs": 1}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()
        if "choices" not in answer:
            self.problem(f"{answer}")
            return None
        choice, details = answer["choices"][0], answer["usage"]["prompt_tokens_details"]
        tiers = {name: details.get(f"cached_tokens{name}", 0) for name in ("", "_host", "_disk")}
        return [choice["text"], choice["logprobs"]["token_logprobs"]], tiers

    def problem(self, text):
        print("PROBLEM", text, file=sys.stderr, flush=True)
        self.problems.append(text)

    def references(self):
        process, port = self.start(disk=False)
        found = [self.ask(port, number) for number in range(len(self.texts))]
        process.kill()
        process.wait()
        if None in found:
            sys.exit("no references")
        return [answer for answer, _ in found]

    def client(self, port, seed):
        rng = random.Random(seed)
        while (found := self.ask(port, number := rng.randrange(len(self.texts)))) is not None:
            answer, tiers = found
            self.counts["answers"] += 1
            for name, tokens in tiers.items():
                self.counts[f"cached tokens{name}"] += tokens
            if answer != self.expected[number]:
                self.problem(f"conversation {number} is answered otherwise: {answer} instead of {self.expected[number]}")

    def check(self):
        """The store while nobody has it open."""
        files = [path.name for path in self.folder.iterdir()]
        strange = [name for name in files if not FILES.fullmatch(name) and not TEMPORARY.fullmatch(name)]
        if strange or sum(bool(TEMPORARY.fullmatch(name)) for name in files) > 2:
            self.problem(f"leaked files: {files}")
        size = sum(path.stat().st_size for path in self.folder.glob("*.kv"))
        if size > BOUND:
            self.problem(f"{size} bytes are more than {BOUND}")
        verify = subprocess.run(
            [self.options.binary, "cache", "--dir", str(self.folder), "verify", "--json"],
            env=self.environment(), capture_output=True, text=True, timeout=120,
        )
        found = json.loads(verify.stdout.splitlines()[0]) if verify.stdout else {}
        if found.get("damaged") != 0:
            self.problem(f"paguro cache verify: {verify.stdout} {verify.stderr}")
        self.counts["torn bytes"] += found.get("lost_bytes", 0)
        return size

    def run(self):
        self.expected = self.references()
        rng, begin = random.Random(self.options.seed), time.monotonic()
        for kill in range(self.options.kills):
            process, port = self.start()
            clients = [
                threading.Thread(target=self.client, args=(port, rng.random()), daemon=True)
                for _ in range(self.options.clients)
            ]
            for one in clients:
                one.start()
            time.sleep(rng.uniform(0.02, self.options.seconds))
            process.send_signal(signal.SIGKILL)
            process.wait()
            for one in clients:
                one.join()
            size = self.check()
            if (kill + 1) % 20 == 0:
                print(f"{kill + 1} kills, {time.monotonic() - begin:.0f} s, {size >> 20} MiB, {dict(self.counts)}", flush=True)
        # Written prefixes are found.
        process, port = self.start()
        for number in range(len(self.texts)):
            found = self.ask(port, number)
            if found is None or found[0] != self.expected[number]:
                self.problem(f"conversation {number} in the end: {found}")
        process.kill()
        process.wait()
        if not self.counts["cached tokens_disk"] and not self.problems:
            self.problem("nothing ever came from the disk")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=1.5, help="time before a kill, at most")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--kv-memory", default="6MiB")
    parser.add_argument("--model", default="tales")
    parser.add_argument("--seed", type=int, default=1)
    # Options after `--` are those of `paguro serve`; argparse would take them for positional arguments.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    options.more = sys.argv[end + 1 :]
    run = Run(options)
    run.run()
    print(f"{run.options.kills} kills: {dict(run.counts)}, {len(run.problems)} problems")
    sys.exit(bool(run.problems))


if __name__ == "__main__":
    main()
