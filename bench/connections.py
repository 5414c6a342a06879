#!/usr/bin/env python3
"""Ten thousand connections and 200 streams whose clients leave when they like, three times: what memory remains.

    ulimit -n 40000; bench/connections.py target/release/paguro --rounds 3

Starts `paguro serve`. In each round connections are opened and left idle after one request each, while streams begin and most
of their clients leave in the middle. When all are gone, the server's resident memory is read. Fails if the server ends, a
stream that nobody left is not complete, something runs or waits at the end, or the memory after the last round is more than
`--growth` above that after the first. Needs nothing but Python.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def chat(seed):
    body = json.dumps({
        "model": "tales", "stream": True, "max_tokens": 120, "seed": seed, "ignore_eos": True,
        "messages": [{"role": "user", "content": f"Tell me story number {seed}"}],
    }).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return (head + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body


async def idle(port, gone):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        await gone.wait()
    finally:
        writer.close()


async def stream(port, seed, rng):
    """One stream. Returns whether it was complete, or None if it was left."""
    stays = rng.random() < 0.3
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(chat(seed))
        if stays:
            return b"data: [DONE]" in (await reader.read(-1))[-40:] or "cut"
        await asyncio.wait_for(reader.read(-1), rng.uniform(0.01, 5))
    except (asyncio.TimeoutError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return None


async def one_round(port, options, rng):
    gone = asyncio.Event()
    idles = []
    for count in range(options.connections):
        idles.append(asyncio.create_task(idle(port, gone)))
        if count % 200 == 0:
            await asyncio.sleep(0.01)
    seeds = [rng.randrange(1 << 30) for _ in range(options.streams)]
    results = await asyncio.gather(*(stream(port, seed, rng) for seed in seeds), return_exceptions=True)
    gone.set()
    opened = await asyncio.gather(*idles, return_exceptions=True)
    failed = [result for result in results if result not in (None, True)]
    return sum(result is None for result in opened), sum(result is True for result in results), failed


def resident(process):
    lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) >> 10


async def status(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read(-1)
    writer.close()
    return json.loads(answer[answer.index(b"{"):answer.rindex(b"}") + 1])


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    files = options.connections + options.streams + 100
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), hard))
    rng = random.Random(options.seed)
    problems, after = [], []
    with tempfile.TemporaryDirectory() as home:
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
        process = subprocess.Popen(
            [options.binary, "serve", "--port", "0", "--log", "error", "--max-connections", str(files),
             # Little enough that the first round fills it: the cache of prefixes is no leak.
             "--kv-memory", "48MiB", "--max-queue", str(options.streams)],
            env=keep | {"HOME": home}, stdout=subprocess.PIPE, text=True,
        )
        port = int(process.stdout.readline().split("//")[1].strip().rsplit(":", 1)[1])
        print("before", resident(process), "MB", flush=True)
        for number in range(options.rounds):
            start = time.monotonic()
            opened, complete, failed = await one_round(port, options, rng)
            peak = resident(process)
            await asyncio.sleep(10)
            after.append(resident(process))
            print(f"round {number + 1}: {opened} connections, {complete} streams complete, {len(failed)} failed, "
                  f"{time.monotonic() - start:.0f} s; {peak} MB at its end, {after[-1]} MB later", flush=True)
            problems += [f"a stream failed: {failed[0]!r}"] if failed else []
            problems += [f"only {opened} connections"] if opened < options.connections else []
        engines = [model["engine"] for model in (await status(port)).get("models", []) if "engine" in model]
        if any(engine.get("running") or engine.get("waiting") for engine in engines):
            problems.append(f"something still runs: {engines}")
        if process.poll() is not None:
            problems.append("the server ended")
        process.terminate()
        process.wait(20)
    if after[-1] > after[0] * (1 + options.growth):
        problems.append(f"memory grew from {after[0]} to {after[-1]} MB")
    print("\n".join(problems) or "passed")
    sys.exit(bool(problems))


asyncio.run(main())
