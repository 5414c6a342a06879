#!/usr/bin/env python3
"""Many clients at once against a running server that speaks OpenAI's API: throughput, time to the first token, gaps.

    paguro serve --port 8081 &                        bench/serve_load.py http://127.0.0.1:8081 --clients 64
    llama-server -m M.gguf --parallel 64 -c 65536 &   bench/serve_load.py http://127.0.0.1:8080 --clients 64

Every request is sent twice: alone, one after the other, and together with all others. `--verify` fails if the two answers
differ or a stream is not complete. Needs nothing but Python. What comes is only noted down while it comes, and read when
all is over, so that the clients take little of the processor that the server runs on.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
import urllib.parse

ANIMALS = ["fox", "crab", "owl", "bear", "hen", "frog", "mole", "duck"]
THINGS = ["key", "hat", "kite", "boat", "lamp", "drum", "bell", "shoe"]


def question(salt, index):
    animal, thing = ANIMALS[index % 8], THINGS[index // 8 % 8]
    return f"Number {salt + index}: tell me a long story about a shy {animal} who lost a {thing}"


class Stream(asyncio.Protocol):
    """One request and the bytes of its answer, with their times."""

    def __init__(self, request):
        self.request = request
        self.parts = []
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data):
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, error):
        self.closed.set_result(error)


class Answer:
    """What a stream said."""

    def __init__(self, stream):
        self.sent, self.ended = stream.sent, stream.parts[-1][0] if stream.parts else stream.sent
        self.text, self.times, self.tokens, self.complete = "", [], None, False
        head, rest = True, b""
        for at, data in stream.parts:
            rest += data
            if head and b"\r\n\r\n" in rest:
                start, rest = rest.split(b"\r\n\r\n", 1)
                head = False
                if b" 200 " not in start.split(b"\r\n")[0]:
                    raise SystemExit(f"refused: {start!r} {rest!r}")
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    self.read(at, line[6:].strip())

    def read(self, at, data):
        if data == b"[DONE]":
            self.complete = True
            return
        event = json.loads(data)
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", []):
            text = choice.get("text") or choice.get("delta", {}).get("content")
            if text:
                self.text += text
                self.times.append(at)


def request(address, options, index):
    text = question(options.salt, index)
    asked = {"prompt": text} if options.complete else {"messages": [{"role": "user", "content": text}]}
    body = json.dumps({
        "model": options.model, **asked, "stream": True,
        "stream_options": {"include_usage": True}, "max_tokens": options.max_tokens, "seed": index,
        "temperature": options.temperature, "ignore_eos": True,
    })
    path = "/v1/completions" if options.complete else "/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    if options.key:
        head += f"Authorization: Bearer {options.key}\r\n"
    return (head + "\r\n" + body).encode()


async def ask(address, options, index):
    loop = asyncio.get_running_loop()
    stream = Stream(request(address, options, index))
    await loop.create_connection(lambda: stream, address.hostname, address.port)
    await asyncio.wait_for(stream.closed, options.timeout)
    return stream


def percentile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * part))]


def report(name, answers):
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    tokens = sum(answer.tokens or len(answer.times) for answer in answers)
    first = [(answer.times[0] - answer.sent) * 1e3 for answer in answers]
    gaps = [(b - a) * 1e3 for answer in answers for a, b in zip(answer.times, answer.times[1:])]
    result = {
        "run": name, "requests": len(answers), "tokens": tokens, "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "ttft_ms": {"p50": round(statistics.median(first), 1), "p95": round(percentile(first, 0.95), 1)},
        "gap_ms": {"p50": round(statistics.median(gaps), 2), "p99": round(percentile(gaps, 0.99), 2)},
    }
    print(json.dumps(result), flush=True)
    return result


async def run(options):
    address = urllib.parse.urlsplit(options.url)
    # The first request loads the model.
    await ask(address, argparse.Namespace(**{**vars(options), "max_tokens": 2}), 0)
    count = options.clients * options.rounds

    async def client(first):
        return [await ask(address, options, first + i * options.clients) for i in range(options.rounds)]

    together = await asyncio.gather(*(client(i) for i in range(options.clients)))
    together = [Answer(stream) for streams in zip(*together) for stream in streams]
    many = report(f"{options.clients} clients", together)
    alone = [await ask(address, options, i) for i in range(count if options.verify else options.alone)]
    alone = [Answer(stream) for stream in alone]
    one = report("1 client", alone)
    print(json.dumps({"ratio": round(many["tokens_per_second"] / one["tokens_per_second"], 2)}))
    cut = [answer for answer in together + alone if not answer.complete]
    different = sum(a.text != b.text for a, b in zip(together, alone))
    print(json.dumps({"incomplete": len(cut), "compared": len(alone), "different": different}))
    return 1 if cut or options.verify and different else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="tales")
    parser.add_argument("--complete", action="store_true", help="complete texts, for models that have no chat template")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="requests that each client sends one after the other")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--alone", type=int, default=8, help="requests that are sent alone, too")
    parser.add_argument("--verify", action="store_true", help="send all alone, too; fail where an answer differs")
    parser.add_argument("--key", help="API key")
    parser.add_argument("--salt", type=int, default=time.time_ns() // 1000 % 10**9, help="makes the prompts this run's own")
    parser.add_argument("--timeout", type=float, default=600)
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
