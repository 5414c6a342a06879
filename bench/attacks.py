#!/usr/bin/env python3
"""A polite client's stream beside hostile ones: the largest gap, the first token, and the server's memory.

    bench/attacks.py target/release/paguro
    bench/attacks.py target/release/paguro --model SmolLM2-135M-Instruct.gguf --keys --only long_prompts many_answers
    bench/attacks.py target/release/paguro --model qwen3-vl --image-urls '*' --only bombs polyglots hundred_pictures

Starts `paguro serve`, and for each attack a process of lower priority that runs it for some seconds, while a victim asks for
one stream after the other. Fails if the server ends, a victim's stream is not complete, a gap between its tokens or the time
to its first token is over the limit, or an attack gets an answer of 5xx other than 503. With `--keys` attackers and victim have keys of
their own. Other options go to `paguro serve`. Needs nothing but Python.
"""

import argparse
import asyncio
import base64
import collections
import json
import multiprocessing
import os
import pathlib
import random
import re
import resource
import subprocess
import struct
import sys
import tempfile
import time
import zlib

CHAT = "/v1/chat/completions"


def head(path, length, key=None, method="POST", more=""):
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{auth}{more}Content-Length: {length}\r\n\r\n"
    ).encode()


class Client:
    """Connections of one attacker."""

    def __init__(self, port, key, model, seconds, seed):
        self.port, self.key, self.model = port, key, model
        self.until = time.monotonic() + seconds
        self.rng = random.Random(seed)
        self.statuses = collections.Counter()
        self.writers = []

    @property
    def over(self):
        return time.monotonic() > self.until

    async def open(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def run(self, which, seconds):
        """Runs an attack for at most so long, and leaves no connection open."""
        try:
            await asyncio.wait_for(which(self), seconds)
        except (OSError, asyncio.TimeoutError, TimeoutError):
            pass
        finally:
            for writer in self.writers:
                if not writer.is_closing():
                    writer.transport.abort()
            # Transports close in the loop's next round.
            await asyncio.sleep(0.1)

    async def post(self, path, body, wait=True):
        """Sends a request and reads the whole answer. Counts its status."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        writer = None
        try:
            reader, writer = await asyncio.wait_for(self.open(), 10)
            writer.write(head(path, len(data), self.key, more="Connection: close\r\n") + data)
            if not wait:
                return
            left = max(0.1, self.until - time.monotonic())
            answer = await asyncio.wait_for(reader.read(-1), left)
            status = answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"
            self.statuses[status] += 1
        except (asyncio.TimeoutError, TimeoutError):
            self.statuses["left"] += 1
        except OSError:
            self.statuses["closed"] += 1
        finally:
            if writer:
                writer.close()

    async def repeat(self, count, make):
        """`count` clients that call `make` until the time is over."""

        async def one():
            while not self.over:
                started = time.monotonic()
                await make()
                await asyncio.sleep(max(0, 0.02 - (time.monotonic() - started)))

        await asyncio.gather(*(one() for _ in range(count)))

    def chat(self, **more):
        text = "Tell me a story about " + self.rng.choice(["a fox", "an owl", "the sea", "a key"])
        return {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": 100} | more


def schema_bodies(client, schema):
    """A schema through every way in."""
    messages = [{"role": "user", "content": "Hi"}]
    tool = {"name": "f", "description": "f", "parameters": schema}
    return [
        (CHAT, client.chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})),
        (CHAT, client.chat(tools=[{"type": "function", "function": tool}], tool_choice="required")),
        ("/api/generate", {"model": client.model, "prompt": "Hi", "format": schema, "stream": False}),
        ("/v1/messages", {"model": client.model, "max_tokens": 9, "messages": messages,
                          "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("/v1/responses", {"model": client.model, "input": "Hi", "max_output_tokens": 20,
                           "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}}}),
    ]


async def deep_schemas(client):
    """Chains of references, deep nesting, wide objects."""
    chain = lambda n: {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n)} | {f"a{n}": {"type": "null"}},
                       "$ref": "#/$defs/a0"}

    def nested(n, wrap):
        schema = {"type": "null"}
        for _ in range(n):
            schema = wrap(schema)
        return schema

    wide = lambda n, required: {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)},
                                "required": [f"p{i}" for i in range(n)] if required else []}
    shapes = [chain(643), chain(20_000), wide(10_000, False), wide(10_000, True),
              nested(120, lambda s: {"type": "array", "items": s}), nested(120, lambda s: {"anyOf": [s, {"type": "null"}]}),
              nested(120, lambda s: {"type": "object", "properties": {"a": s}, "required": ["a"]}),
              {"type": "string", "pattern": "(a?){2000}a{2000}"}, {"allOf": [chain(500)] * 3}]

    async def one():
        path, body = client.rng.choice(schema_bodies(client, client.rng.choice(shapes)))
        await client.post(path, body)

    await client.repeat(8, one)


async def large_enums(client):
    """Lists of 100,000 values to compile, twenty at a time."""

    async def one():
        schema = {"enum": [f"v{client.rng.random()}{i}" for i in range(100_000)]}
        await client.post(*schema_bodies(client, schema)[0])

    await client.repeat(20, one)


async def huge_numbers(client):
    """Numbers for which a careless server allocates."""
    names = ["n", "best_of", "logprobs", "top_logprobs", "top_k", "max_tokens", "max_completion_tokens", "min_tokens", "seed"]

    async def one():
        value = client.rng.choice([10**7, 10**9, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -1, -(2**63), 1e300])
        body = client.chat(stream=client.rng.random() < 0.5, **{client.rng.choice(names): value})
        path = CHAT
        if client.rng.random() < 0.4:
            body["prompt"] = body.pop("messages")[0]["content"]
            path = "/v1/completions"
        await client.post(path, body)

    await client.repeat(4, one)


async def many_answers(client):
    """Requests for 64 long answers each."""
    await client.repeat(3, lambda: client.post(CHAT, client.chat(n=64, max_tokens=900, ignore_eos=True, stream=True)))


async def long_prompts(client):
    """Prompts that fill the context, each of its own."""

    async def one():
        words = " ".join(client.rng.choice(["fox", "owl", "key", "sea", "hat"]) for _ in range(5000))
        await client.post("/v1/completions", {"model": client.model, "prompt": words[: client.rng.randrange(800, 24_000)], "max_tokens": 2})

    await client.repeat(3, one)


async def endless_prompts(client):
    """Prompts of megabytes."""
    texts = [" " * 5_000_000, "a" * 5_000_000, "word " * 1_000_000, "\U0001f98a" * 1_000_000, "<|end|>" * 600_000]
    await client.repeat(4, lambda: client.post("/v1/completions", {"model": client.model, "prompt": client.rng.choice(texts)}))


async def stalled(client, path, count, length, more=""):
    connections = []
    for _ in range(count):
        try:
            reader, writer = await client.open()
            writer.write(head(path, length, client.key, more=more) + b"{")
            connections.append(writer)
        except OSError:
            client.statuses["closed"] += 1
    while not client.over:
        await asyncio.sleep(0.5)
    for writer in connections:
        writer.close()


async def stalled_uploads(client):
    """Blob uploads that stop after a byte."""
    await stalled(client, "/api/blobs/sha256:" + "0" * 64, 560, 1000)


async def stalled_bodies(client):
    """Requests whose bodies stop after a byte."""
    await stalled(client, CHAT, 1000, 1000)


async def large_bodies(client):
    """150 bodies of 31 MB, all of them but the last byte."""
    chunk = b" " * (1 << 20)

    async def one():
        try:
            _, writer = await client.open()
            writer.write(head(CHAT, 31 * len(chunk) + 1, client.key))
            for _ in range(31):
                writer.write(chunk)
                await asyncio.wait_for(writer.drain(), max(0.1, client.until - time.monotonic()))
            await asyncio.sleep(max(0, client.until - time.monotonic()))
            writer.close()
        except (OSError, asyncio.TimeoutError, TimeoutError):
            client.statuses["closed"] += 1

    await asyncio.gather(*(one() for _ in range(150)))


async def unread_streams(client):
    """Streams that nobody reads."""
    body = json.dumps(client.chat(n=16, logprobs=True, top_logprobs=5, max_tokens=1900, ignore_eos=True, stream=True)).encode()
    connections = []
    for _ in range(20):
        reader, writer = await client.open()
        reader._transport.pause_reading()
        writer.write(head(CHAT, len(body), client.key) + body)
        connections.append(writer)
    while not client.over:
        await asyncio.sleep(0.5)
    for writer in connections:
        writer.close()


async def connections(client):
    """More connections than the server has room for, each with a request now and then."""
    request = head("/health", 0, method="GET")

    async def one():
        writer = None
        while not client.over:
            try:
                if writer is None:
                    reader, writer = await client.open()
                writer.write(request)
                await asyncio.wait_for(reader.read(4096), 5)
            except (OSError, asyncio.TimeoutError, TimeoutError):
                writer = None
            await asyncio.sleep(3)
        if writer:
            writer.close()

    await asyncio.gather(*(one() for _ in range(4500)))


async def leavers(client):
    """Clients that go away in the middle of their streams."""

    async def one():
        body = json.dumps(client.chat(stream=True, n=client.rng.randrange(1, 5), max_tokens=200)).encode()
        try:
            reader, writer = await client.open()
            writer.write(head(CHAT, len(body), client.key) + body)
            await asyncio.wait_for(reader.read(client.rng.randrange(1, 3000)), 5)
            writer.transport.abort()
        except (OSError, asyncio.TimeoutError, TimeoutError):
            client.statuses["closed"] += 1

    await client.repeat(50, one)


async def constrained_streams(client):
    """Thirty streams with a grammar each."""
    schema = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                                         "required": ["name", "age"]}, "minItems": 5}
    await client.repeat(30, lambda: client.post(*schema_bodies(client, schema)[0]))


async def long_lists(client):
    """Stop strings, biases and batches by the thousand."""
    bodies = [
        (CHAT, client.chat(stop=[f"s{i}" for i in range(10_000)])),
        (CHAT, client.chat(stop="x" * 1_000_000)),
        (CHAT, client.chat(logit_bias={str(i): 1 for i in range(49_000)})),
        ("/v1/embeddings", {"model": client.model, "input": ["a"] * 100_000}),
        ("/v1/completions", {"model": client.model, "prompt": ["a"] * 100_000, "max_tokens": 1}),
        ("/v1/completions", {"model": client.model, "prompt": [1] * 1_000_000, "max_tokens": 1}),
    ]
    await client.repeat(4, lambda: client.post(*client.rng.choice(bodies)))


def png(width, height, bits=8, kind=2, data=None):
    """A PNG file; of one colour unless there are other compressed data."""
    part = lambda name, body: struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    if data is None:
        row = bytes(1 + (width * bits * (3 if kind == 2 else 1) + 7) // 8)
        packer = zlib.compressobj(9)
        data = b"".join([packer.compress(row) for _ in range(height)] + [packer.flush()])
    return (b"\x89PNG\r\n\x1a\n" + part(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
            + part(b"IDAT", data) + part(b"IEND", b""))


def noise(client, side=256):
    """A picture that no cache has."""
    rows = b"".join(b"\0" + client.rng.randbytes(3 * side) for _ in range(side))
    return png(side, side, data=zlib.compress(rows, 1))


def seen(client, pictures):
    """Bodies with these pictures in every API."""
    texts = [picture if isinstance(picture, str) else base64.b64encode(picture).decode() for picture in pictures]
    urls = [text if ":" in text[:8] else "data:image/png;base64," + text for text in texts]
    words = {"type": "text", "text": "What is that?"}
    blocks = [{"type": "image", "source": {"type": "url", "url": url} if url[:4] == "http" else
               {"type": "base64", "media_type": "image/png", "data": url.split(",")[-1]}} for url in urls]
    return [
        (CHAT, {"model": client.model, "max_tokens": 5, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}} for url in urls] + [words]}]}),
        ("/v1/responses", {"model": client.model, "max_output_tokens": 5, "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": url} for url in urls] + [words | {"type": "input_text"}]}]}),
        ("/v1/messages", {"model": client.model, "max_tokens": 5, "messages": [{"role": "user", "content": blocks + [words]}]}),
        ("/api/chat", {"model": client.model, "stream": False, "options": {"num_predict": 5},
                       "messages": [{"role": "user", "content": "What is that?", "images": [url.split(",")[-1] for url in urls]}]}),
    ]


async def bombs(client):
    """Small files of many pixels."""
    files = [png(8000, 8000, 1, 0), png(8000, 8000), png(16_000, 4000), png(4000, 16_000), png(60_000, 60_000, data=b""),
             png(2**31 - 1, 2**31 - 1, data=b""), png(1, 16_384), png(5000, 5000, 16),
             b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0x80, 0, 0) + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x02" + bytes(100),
             b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 30_000, -30_000, 1, 32, 0, 0, 0, 0, 0, 0),
             png(7000, 7000, data=zlib.compress(bytes(200_000_000), 9))]
    await client.repeat(8, lambda: client.post(*client.rng.choice(seen(client, [client.rng.choice(files)]))))


async def polyglots(client):
    """Files that begin as one format and go on as another, are cut, or have changed bytes."""
    fine = noise(client, 512)
    heads = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"RIFF\xff\xff\xff\xffWEBPVP8X", b"<svg", b"%PDF-", b"\0\0\0 ftypheic", b"II*\0"]

    def one():
        kind = client.rng.randrange(4)
        if kind == 0:
            return client.rng.choice(heads) + client.rng.choice([fine, client.rng.randbytes(100_000), bytes(1000)])
        if kind == 1:
            return fine[: client.rng.randrange(len(fine))]
        if kind == 2:
            changed = bytearray(fine)
            for _ in range(5):
                changed[client.rng.randrange(200)] = client.rng.randrange(256)
            return bytes(changed)
        return fine + client.rng.choice(heads) + client.rng.randbytes(10_000)

    await client.repeat(8, lambda: client.post(*client.rng.choice(seen(client, [one()]))))


async def hundred_pictures(client):
    """Requests with 100 pictures, and with as many as are read, all of them new."""
    await client.repeat(4, lambda: client.post(*client.rng.choice(
        seen(client, [noise(client, 64) for _ in range(client.rng.choice([100, 32, 8]))]))))


async def new_pictures(client):
    """One picture after the other that no cache has, some of them large."""
    await client.repeat(6, lambda: client.post(*client.rng.choice(seen(client, [noise(client, client.rng.choice([128, 448, 1024]))]))))


async def picture_urls(client):
    """Pictures at private addresses, at this server, at names without an address, and of other schemes."""
    urls = [f"http://127.0.0.1:{client.port}/v1/models", f"http://[::1]:{client.port}/", f"http://2130706433:{client.port}/", "http://0x7f.1/",
            "http://10.0.0.1/a.png", "http://169.254.169.254/latest/meta-data", "http://[::ffff:10.0.0.1]/", "http://localhost/", "http://metadata.internal/",
            "file:///etc/passwd", "ftp://example.com/a.png", "http://user@127.0.0.1/", "https://127.0.0.1/", "gopher://127.0.0.1:25/", "http://"]
    await client.repeat(16, lambda: client.post(*client.rng.choice(seen(client, [client.rng.choice(urls)])[:3])))


async def large_data_urls(client):
    """Data URLs of 50 MB, of as much as a body may have, and of as much as a picture may have."""
    texts = ["data:image/png;base64," + "A" * length for length in (50_000_000, 33_000_000, 28_000_000, 27_000_000)]
    whole = "data:image/png;base64," + base64.b64encode(noise(client, 2400)).decode()
    bodies = [json.dumps(body).encode() for text in (*texts, whole) for _, body in seen(client, [text])[:1]]
    await client.repeat(4, lambda: client.post(CHAT, client.rng.choice(bodies)))


ATTACKS = [deep_schemas, large_enums, huge_numbers, many_answers, long_prompts, endless_prompts, stalled_uploads, stalled_bodies,
           large_bodies, unread_streams, connections, leavers, constrained_streams, long_lists,
           bombs, polyglots, hundred_pictures, new_pictures, picture_urls, large_data_urls]


def attack(which, port, key, model, seconds, seed, answers):
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    client = Client(port, key, model, seconds, seed)
    asyncio.run(client.run(which, seconds + 15))
    answers.put(dict(client.statuses))


async def victim_stream(port, key, model):
    """One stream of forty tokens. Returns the time to its first token, the largest gap after it, and whether it was complete."""
    text = f"Tell me a story about number {time.monotonic_ns()}"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 40, "ignore_eos": True, "stream": True}).encode()
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(CHAT, len(body), key, more="Connection: close\r\n") + body)
    times, answer = [], b""
    while data := await asyncio.wait_for(reader.read(65536), 60):
        answer += data
        # The head and a chunk with an empty text come at once.
        if re.search(rb'"content":"[^"]', data):
            times.append(time.perf_counter())
    writer.close()
    gaps = [after - before for before, after in zip(times, times[1:])]
    return times[0] - started if times else None, max(gaps, default=0), answer.rstrip().endswith((b"[DONE]", b"0")) and b"[DONE]" in answer


def resident(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


class Server:
    def __init__(self, options):
        self.home = tempfile.TemporaryDirectory()
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
        self.environment = keep | {"HOME": self.home.name}
        self.keys = {}
        for name in ("victim", "attacker") if options.keys else ():
            command = [options.binary, "keys", "add", name, "--scope", "inference,models"]
            self.keys[name] = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        model = [options.model] if options.model else []
        self.model = pathlib.Path(options.model).stem if options.model else "tales"
        self.process = subprocess.Popen(
            [options.binary, "serve", *model, "--port", "0", "--log", "error", *options.serve],
            env=self.environment, stdout=subprocess.PIPE, text=True,
        )
        self.port = int(self.process.stdout.readline().strip().rsplit(":", 1)[1])

    def stream(self):
        return asyncio.run(victim_stream(self.port, self.keys.get("victim"), self.model))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--model", help="a file to serve; the embedded model without it")
    parser.add_argument("--keys", action="store_true", help="attackers and victim have keys of their own")
    parser.add_argument("--seconds", type=float, default=15, help="time of each attack")
    parser.add_argument("--gap", type=float, default=0.25, help="largest gap of the victim in seconds")
    parser.add_argument("--first", type=float, default=2.0, help="largest time to the victim's first token in seconds")
    parser.add_argument("--only", nargs="*", choices=[which.__name__ for which in ATTACKS])
    parser.add_argument("--seed", type=int, default=1)
    options, options.serve = parser.parse_known_args()
    server = Server(options)
    server.stream()
    quiet = [server.stream() for _ in range(5)]
    print(json.dumps({"attack": "none", "first": round(max(first for first, _, _ in quiet), 3),
                      "gap": round(max(gap for _, gap, _ in quiet), 3), "resident": resident(server.process.pid)}), flush=True)
    problems = 0
    for which in [which for which in ATTACKS if not options.only or which.__name__ in options.only]:
        answers = multiprocessing.Queue()
        arguments = (which, server.port, server.keys.get("attacker"), server.model, options.seconds, options.seed, answers)
        attacker = multiprocessing.Process(target=attack, args=arguments)
        attacker.start()
        time.sleep(1.5)
        begin, firsts, gaps, faults, peak = time.monotonic(), [], [], [], 0
        while time.monotonic() - begin < options.seconds - 3:
            try:
                first, gap, complete = server.stream()
                firsts += [first] if first is not None else []
                gaps.append(gap)
                if not complete or first is None:
                    faults.append("a victim's stream is not complete")
            except (OSError, asyncio.TimeoutError, TimeoutError) as error:
                faults.append(f"victim: {error!r}")
                if server.process.poll() is not None:
                    break
                time.sleep(0.2)
            peak = max(peak, resident(server.process.pid) if server.process.poll() is None else 0)
        attacker.join(40)
        attacker.kill()
        statuses = answers.get() if not answers.empty() else {}
        if server.process.poll() is not None:
            faults.append(f"the server has ended with {server.process.returncode}")
        wrong = [status for status in statuses if status.startswith("5") and status not in ("503", "504")]
        faults += [f"answers of {status}" for status in wrong]
        if max(gaps, default=0) > options.gap:
            faults.append("gap")
        if max(firsts, default=99) > options.first:
            faults.append("first token")
        problems += len(faults)
        rounded = lambda values: round(max(values), 3) if values else None
        print(json.dumps({"attack": which.__name__, "streams": len(firsts), "first": rounded(firsts), "gap": rounded(gaps), "peak": peak,
                          "answers": statuses, "faults": sorted(set(faults))}), flush=True)
        if server.process.poll() is not None:
            server = Server(options)
            server.stream()
        time.sleep(1)
    time.sleep(5)
    print(json.dumps({"resident_after": resident(server.process.pid)}))
    server.process.terminate()
    if server.process.wait(40) != 0:
        problems += 1
    print("sound" if not problems else f"{problems} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
