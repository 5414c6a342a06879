#!/usr/bin/env python3
"""Gaps between the tokens of running streams without and with loads of an adapter beside them.

    bench/random_model.py tiny.gguf tinyllama && bench/random_adapter.py tiny.gguf lora.gguf --rank 64
    bench/adapter_load.py target/release/paguro tiny.gguf lora.gguf -- --threads 2

Starts `paguro serve` and some streams. After a while without loads, it loads the adapter under several names, one after the other,
each with one request, and removes it again. Prints the largest gaps in milliseconds, and the seconds of a load. Arguments behind `--`
are those of the server. Needs nothing but Python.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time


def post(port, path, body, timeout=600):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def stream(port, seed, times, done):
    """Keeps one stream running, and appends the time of each token."""
    while not done.is_set():
        answer = post(port, "/v1/completions", {
            "model": "base", "prompt": f"Story number {seed}:", "max_tokens": 4000, "stream": True, "ignore_eos": True, "seed": seed,
        })
        if answer.status != 200:
            raise SystemExit(answer.read().decode())
        own = []
        times.append(own)
        for line in answer:
            if line.startswith(b"data: {"):
                own.append(time.monotonic())
            if done.is_set():
                return


def gaps(times, begin, end):
    """Returns all gaps between neighbouring tokens of a stream that touch a span of time, in milliseconds."""
    pairs = [pair for own in times for pair in zip(own, own[1:])]
    return [1000 * (b - a) for a, b in pairs if b > begin and a < end]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10, help="seconds without loads")
    parser.add_argument("--loads", type=int, default=5)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [options.binary, "serve", options.model, "--alias", "base", "--lora", f"given={options.adapter}", "--port", "0",
             "--log", "error", *sys.argv[end + 1:]],
            env=keep | {"HOME": home}, stdout=subprocess.PIPE, text=True,
        )
        try:
            port = int(process.stdout.readline().split("//")[1].strip().rsplit(":", 1)[1])
            times, done = [], threading.Event()
            threads = [threading.Thread(target=stream, args=(port, seed, times, done), daemon=True) for seed in range(options.streams)]
            for thread in threads:
                thread.start()
            while len(times) < options.streams or any(len(own) < 20 for own in times):
                time.sleep(0.1)
            begin = time.monotonic()
            time.sleep(options.seconds)
            alone, loads, beside = gaps(times, begin, time.monotonic()), [], []
            for number in range(options.loads):
                begin = time.monotonic()
                answer = post(port, "/v1/load_lora_adapter", {"lora_name": f"lora-{number}", "lora_path": os.path.abspath(options.adapter)})
                text = answer.read().decode()
                if answer.status != 200:
                    raise SystemExit(text)
                loads.append(time.monotonic() - begin)
                # One answer with it, which may make what the first step with it needs.
                post(port, "/v1/completions", {"model": f"lora-{number}", "prompt": "Hello", "max_tokens": 4}).read()
                end = time.monotonic()
                time.sleep(0.5)
                beside += gaps(times, begin, end)
                post(port, "/v1/unload_lora_adapter", {"lora_name": f"lora-{number}"}).read()
                time.sleep(0.5)
            done.set()
            print(json.dumps({
                "streams": options.streams, "tokens_alone": len(alone), "tokens_beside": len(beside),
                "median_ms": [round(statistics.median(some), 1) for some in (alone, beside)],
                "largest_ms": [round(max(some), 1) for some in (alone, beside)],
                "load_s": [round(seconds, 2) for seconds in loads], "adapter_mb": round(os.path.getsize(options.adapter) / 1e6),
            }))
        finally:
            process.kill()
            process.wait()


main()
