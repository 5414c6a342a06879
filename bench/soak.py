#!/usr/bin/env python3
"""Ten minutes of everything that can happen to a server at once, and whether it is as before in the end.

    bench/soak.py target/release/paguro --minutes 10

Starts `paguro serve` with two models and memory for one of them, and clients that stream, leave in the middle, are killed,
send prompts that are too long, half a request, nonsense, schemas, embeddings, and swap models. With `--attacks` the hostile
clients of `attacks.py` join them, one kind after the other. Fails if the server ends, an
answer is neither complete nor an error that belongs there, a request is stuck, pages are in use at the end, or the resident
memory has grown by more than `--growth` between the first half (everything is warm by then) and the end. Memory is compared
while no model is loaded: what K and V and the weights take depends on what was asked last, and leaks do not. glibc's caches of
threads keep up to five megabytes of pages, which grow for a while (docs/notebook/server-memory.md); `--no-thread-caches` runs the
server without them, so that the limit finds smaller leaks.
"""

import argparse
import asyncio
import collections
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

import attacks

SCHEMA = {
    "type": "object", "properties": {"age": {"enum": [3, 30]}, "name": {"type": "string", "maxLength": 9}},
    "required": ["age", "name"], "additionalProperties": False,
}


class Soak:
    def __init__(self, options):
        self.options = options
        self.home = tempfile.TemporaryDirectory()
        self.counts = collections.Counter()
        self.problems = []
        self.done = threading.Event()
        file = pathlib.Path(__file__).parent.parent / "models/tales/tales-Q8_0.gguf"
        self.models = ["tales", "second"]
        copy = pathlib.Path(self.home.name) / "second.gguf"
        shutil.copy(file, copy)
        # Weights, buffers and K and V of one of them, and not of both.
        memory = str(file.stat().st_size + (60 << 20))
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
        self.process = subprocess.Popen(
            [options.binary, "serve", str(copy), "--port", "0", "--log", "error", "--memory", memory,
             "--kv-memory", "24MiB", "--max-queue", "64", "--ctx", "512"],
            env=keep | {"HOME": self.home.name} | ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
                                                   if options.no_thread_caches else {}), stdout=subprocess.PIPE, text=True,
        )
        self.host, port = self.process.stdout.readline().split("//")[1].strip().rsplit(":", 1)
        self.port = int(port)
        self.idle_sockets = self.sockets()

    def problem(self, text):
        print("PROBLEM", text, file=sys.stderr, flush=True)
        self.problems.append(text)

    def body(self, rng, **more):
        # Models are swapped every few seconds, and not at every request.
        model = self.models[int(time.time() / self.options.swap) % 2 if rng.random() < 0.97 else rng.randrange(2)]
        words = " ".join(rng.choice(["fox", "owl", "key", "sea", "hat"]) for _ in range(rng.randrange(1, 60)))
        return {
            "model": model, "messages": [{"role": "user", "content": f"Tell me about {words}"}],
            "max_tokens": rng.randrange(1, 120), "seed": rng.randrange(1000), **more,
        }

    def post(self, path, body):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def expect(self, response, *statuses):
        self.counts[response.status] += 1
        # Busy is an answer, too: a full queue, a model that waits for another one's end.
        if response.status not in (*statuses, 429, 503):
            self.problem(f"status {response.status}: {response.read()[:300]!r}")

    def stream(self, rng):
        connection, response = self.post("/v1/chat/completions", self.body(rng, stream=True))
        self.expect(response, 200)
        text = response.read()
        if response.status == 200 and not text.rstrip().endswith(b"data: [DONE]"):
            self.problem(f"a stream was cut: {text[-200:]!r}")
        connection.close()

    def whole(self, rng):
        path = rng.choice(["/v1/chat/completions", "/v1/messages"])
        connection, response = self.post(path, self.body(rng) if "chat" in path else
                                         {key: value for key, value in self.body(rng).items() if key != "seed"})
        self.expect(response, 200)
        response.read()
        connection.close()

    def leave(self, rng):
        connection, response = self.post("/v1/chat/completions", self.body(rng, stream=True, n=rng.randrange(1, 4)))
        self.expect(response, 200)
        response.read(rng.randrange(1, 2000))
        connection.close()

    def kill(self, rng):
        """A client that is gone from one moment to the next: the connection is reset."""
        connection = socket.create_connection((self.host, self.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        body = json.dumps(self.body(rng, stream=True))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        text = (head + body).encode()
        connection.sendall(text[: rng.choice([len(text), rng.randrange(len(text))])])
        time.sleep(rng.random() * 0.2)
        connection.close()

    def too_long(self, rng):
        messages = [{"role": "user", "content": "word " * rng.randrange(600, 20_000)}]
        connection, response = self.post("/v1/chat/completions", self.body(rng, messages=messages))
        self.expect(response, 400)
        response.read()
        connection.close()

    def schema(self, rng):
        form = {"type": "json_schema", "json_schema": {"name": "hero", "schema": SCHEMA}}
        connection, response = self.post(
            "/v1/chat/completions", self.body(rng, response_format=form, max_tokens=200)
        )
        self.expect(response, 200)
        answer = json.loads(response.read())
        if response.status == 200 and answer["choices"][0]["finish_reason"] == "stop":
            if json.loads(answer["choices"][0]["message"]["content"])["age"] not in (3, 30):
                self.problem(f"not as the schema has it: {answer}")
        connection.close()

    def embed(self, rng):
        body = {"model": self.body(rng)["model"], "input": ["a fox " * rng.randrange(1, 50) for _ in range(rng.randrange(1, 20))]}
        connection, response = self.post("/v1/embeddings", body)
        self.expect(response, 200)
        response.read()
        connection.close()

    def nonsense(self, rng):
        connection, response = self.post("/v1/chat/completions", {"model": 7, "messages": rng.random()})
        self.expect(response, 400)
        response.read()
        connection.close()

    def client(self, number):
        rng = random.Random(self.options.seed * 1000 + number)
        ways = [self.stream] * 6 + [self.whole] * 3 + [self.leave] * 4 + [self.kill] * 3
        ways += [self.too_long, self.schema, self.embed, self.nonsense]
        while not self.done.is_set():
            way = rng.choice(ways)
            try:
                way(rng)
            except Exception as error:  # a client must not end the soak; what it met is a finding
                self.problem(f"{way.__name__}: {error!r}")
            self.counts[way.__name__] += 1

    def attack(self, number):
        """One kind of hostile client after the other, with a few of each."""
        kinds = [kind for kind in attacks.ATTACKS if kind is not attacks.connections]
        random.Random(self.options.seed + number).shuffle(kinds)
        for turn in range(1_000_000):
            if self.done.is_set():
                return
            client = attacks.Client(self.port, None, self.models[0], 10, turn)
            asyncio.run(client.run(kinds[turn % len(kinds)], 25))
            wrong = [status for status in client.statuses if status.startswith("5") and status not in ("503", "504")]
            if wrong:
                self.problem(f"{kinds[turn % len(kinds)].__name__}: {wrong}")
            self.counts["attack"] += 1

    def metrics(self):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        connection.request("GET", "/metrics")
        values = collections.Counter()
        for line in connection.getresponse().read().decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name.split("{")[0]] += float(value)
        connection.close()
        return values

    def unload(self):
        """Has all models unloaded, and waits until they are."""
        for model in self.models:
            connection, response = self.post("/api/generate", {"model": model, "keep_alive": 0})
            self.expect(response, 200)
            response.read()
            connection.close()
        for _ in range(600):
            if self.metrics()["paguro_model_bytes"] == 0:
                # Threads of requests end after ten idle seconds, and then free memory is returned to the system.
                return time.sleep(15)
            time.sleep(0.1)
        self.problem("a model is still loaded a minute after its last use")

    def sockets(self):
        """Number of the server's open sockets, of which each connection is one."""
        count = 0
        for link in pathlib.Path(f"/proc/{self.process.pid}/fd").glob("*"):
            try:
                count += os.readlink(link).startswith("socket:")
            except FileNotFoundError:
                pass
        return count

    def resident(self):
        """Bytes of the server's own memory. Pages of files, which the kernel evicts and reads again, do not count."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)[1])

    def settled(self):
        """Waits until nothing runs, and no body of a client that has gone is still read; the metrics then."""
        for _ in range(1200):
            if self.sockets() <= self.idle_sockets + 2:
                break
            time.sleep(0.1)
        else:
            self.problem(f"{self.sockets()} open sockets two minutes after the last client has gone")
        for _ in range(600):
            metrics = self.metrics()
            busy = {name: metrics[name] for name in
                    ("paguro_requests_running", "paguro_requests_waiting", "paguro_kv_pages_used") if metrics[name]}
            if not busy:
                return metrics
            time.sleep(0.1)
        self.problem(f"still busy a minute after the last client has gone: {busy}")
        return metrics

    def phase(self, seconds):
        """Clients for so long, and then what is left of them: resident bytes, pages in use."""
        self.done.clear()
        clients = [threading.Thread(target=self.client, args=(i,)) for i in range(self.options.clients)]
        if self.options.attacks:
            clients.append(threading.Thread(target=self.attack, args=(len(self.counts),)))
        [client.start() for client in clients]
        time.sleep(seconds)
        self.done.set()
        for client in clients:
            client.join(180)
            if client.is_alive():
                self.problem("a request is stuck")
        pages = self.settled()["paguro_kv_pages_used"]
        self.unload()
        metrics, resident = self.metrics(), self.resident()
        print(json.dumps({
            "resident": resident, "pages_used": pages, "loads": metrics["paguro_model_loads_total"],
            "requests": sum(value for name, value in self.counts.items() if isinstance(name, str)),
        }), flush=True)
        return resident, pages

    def run(self):
        seconds = self.options.minutes * 60 / 6
        resident, pages = zip(*(self.phase(seconds) for _ in range(6)))
        print(json.dumps({str(name): count for name, count in self.counts.items()}))
        before, after = max(resident[:3]), resident[-1]
        growth = after / before - 1
        print(json.dumps({"growth": round(growth, 4), "pages_used": max(pages)}))
        if growth > self.options.growth:
            self.problem(f"the resident memory has grown by {growth:.1%}")
        if self.process.poll() is not None:
            self.problem("the server has ended")
        self.process.terminate()
        if self.process.wait(30) != 0:
            self.problem(f"the server ended with {self.process.returncode}")
        self.home.cleanup()
        print("sound" if not self.problems else f"{len(self.problems)} problems")
        return 1 if self.problems else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--swap", type=float, default=8, help="seconds until the clients want the other model")
    parser.add_argument("--growth", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-thread-caches", action="store_true", help="without glibc's caches of small blocks")
    parser.add_argument("--attacks", action="store_true", help="hostile clients among the others")
    sys.exit(Soak(parser.parse_args()).run())


if __name__ == "__main__":
    main()
