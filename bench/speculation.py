#!/usr/bin/env python3
"""Speculation: answers with and without drafts are equal, and drafts make them faster.

    bench/speculation.py equal target/release/paguro MODEL.gguf [--count 500] [-- OPTIONS OF THE SERVER]
    bench/speculation.py speed target/release/paguro MODEL.gguf [--llama LLAMA_SERVER] [-- OPTIONS OF THE SERVER]
    bench/speculation.py acceptance target/release/paguro MODEL.gguf --llama LLAMA_SERVER [--texts FILE ...] [-- OPTIONS OF THE SERVER]

`equal` sends changes of code, chats, tools, repetitions, random tokens and long prompts, greedy and with seeds, with penalties, DRY, biases,
stop strings, log-probabilities, several choices, schemas, grammars and streams. A server with `--speculate off` answers them one by
one. Another one, with the options after `--`, answers them one by one, 16 at once in another order, and again after a restart. It fails
unless texts, calls, log-probabilities, ends and numbers of tokens are equal, and unless enough drafts were accepted and rejected.

`speed` measures the decoding of a file that is written again with a small change, of a chat, of a random text, and of several sequences,
alternately with drafts (the server's, and the best of llama.cpp's n-gram modes) and without.

`acceptance` compares the share of drafted tokens that are accepted with llama.cpp's, for a model with a head for multi-token prediction and each
fixed number of drafted tokens. Both continue the same passages greedily. It fails if a share differs by more than a point. A head that reads wrong
rows changes no text, so only this shows it.
"""

import argparse
import atexit
import concurrent.futures
import http.client
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 9},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
LARK = 'start: line+\nline: "- " WORD ": " NUMBER "\\n"\nWORD: /[a-z]{2,8}/\nNUMBER: /[0-9]{1,4}/\n'
GBNF = 'root ::= ("fox" | "owl") (", " ("fox" | "owl")){3,12} "."\n'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_light",
            "description": "Sets a light of a room.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"room": {"enum": ["kitchen", "hall", "garden"]}, "level": {"type": "integer"}},
                "required": ["room", "level"],
                "additionalProperties": False,
            },
        },
    }
]
QUESTIONS = [
    "Why is the sky blue? Answer in three sentences.",
    "Write a short poem about a fox and an owl.",
    "List ten fruits, one per line, with their colours.",
    "Explain recursion to a child.",
    "Give me the capital cities of ten countries as a table in Markdown.",
    "Write a letter to a friend about the sea.",
    "What is the difference between a list and a tuple in Python?",
]


def code(rng, functions):
    """Returns a Python file with so many functions."""
    names = ["total", "mean", "largest", "smallest", "spread", "middle", "count", "product", "first", "last"]
    lines = ["import math", "", ""]
    for number in range(functions):
        name, key = rng.choice(names), rng.randrange(100)
        lines += [
            f"def {name}_{number}(values, weight={key}):",
            f'    """Returns the {name} of the values."""',
            "    result = 0",
            "    for index, value in enumerate(values):",
            f"        if value > {rng.randrange(50)}:",
            "            result += value * weight",
            f"        elif index % {rng.randrange(2, 9)} == 0:",
            "            result -= math.sqrt(abs(value))",
            "    return result",
            "",
            "",
        ]
    return "\n".join(lines)


def bodies(count, context, seed):
    """Returns paths and bodies of requests."""
    rng = random.Random(seed)
    kinds = ["edit", "chat", "repetition", "random", "long", "tool", "grammar"]
    found = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        body = {"max_tokens": rng.choice([24, 48, 80]), "temperature": 0}
        path = "/v1/chat/completions"
        if kind == "edit":
            file = code(rng, 3 if context < 4000 else rng.choice([3, 6]))
            ask = f"Write this file again with `result` renamed to `answer`:\n```python\n{file}```"
            body |= {"messages": [{"role": "user", "content": ask}], "max_tokens": 120}
        elif kind == "chat":
            body |= {"messages": [{"role": "user", "content": rng.choice(QUESTIONS)}]}
        elif kind == "repetition":
            words = rng.sample(["fox", "owl", "hat", "sea", "key", "moon", "door", "one", "two", "three"], rng.randrange(1, 7))
            path, body = "/v1/completions", body | {"prompt": (", ".join(words) + ". ") * rng.randrange(2, 20)}
        elif kind == "random":
            tokens = [rng.randrange(300, 3000) for _ in range(rng.randrange(1, 200))]
            path, body = "/v1/completions", body | {"prompt": tokens + tokens[: rng.randrange(len(tokens) + 1)]}
        elif kind == "long":
            parts = [f"Part {part}. {rng.choice(QUESTIONS)} The fox of house {rng.randrange(99)} knows." for part in range(min(context // 60, 60))]
            path, body = "/v1/completions", body | {"prompt": " ".join(parts) + " Part 1."}
        elif kind == "tool":
            lights = "Set the light of the kitchen to 10, of the hall to 20 and of the garden to 30."
            choice = rng.choice(["auto", "required", {"type": "function", "function": {"name": "set_light"}}])
            body |= {"messages": [{"role": "user", "content": lights}], "tools": TOOLS, "tool_choice": choice}
        else:
            body |= {"messages": [{"role": "user", "content": rng.choice(QUESTIONS) + " Use the format."}], "max_tokens": 120}
            schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}
            body |= rng.choice([schema, {"structured_outputs": {"grammar": LARK}}, {"grammar": GBNF}])
        body |= rng.choice(
            [
                {},
                {},
                {"temperature": 0.8, "top_p": 0.9},
                {"temperature": 1.2, "min_p": 0.05, "top_k": 40},
                {"temperature": 0.3},
                {"repetition_penalty": 1.15},
                {"temperature": 0.6, "frequency_penalty": 0.5, "presence_penalty": 0.3},
                {"dry_multiplier": 0.8, "temperature": 0.5},
                {"logit_bias": {"300": 4, "301": -100, "400": 2}},
                {"min_tokens": 20, "temperature": 0.4},
            ]
        )
        body["seed"] = rng.randrange(1000)
        if rng.random() < 0.25:
            body |= {"logprobs": 3} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 3}
        if rng.random() < 0.2 and kind != "grammar":
            body["stop"] = rng.choice([["fox"], ["\n\n", "return"], [". "]])
        if rng.random() < 0.15:
            body |= {"n": 3, "temperature": 0.7}
        found.append((path, body))
    return found


class Server:
    """A `paguro serve` with one model, on a port of its own."""

    def __init__(self, binary, model, *arguments, home=None):
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
        self.folder = None if home else tempfile.TemporaryDirectory()
        command = [binary, "serve", model, "--port", "0", "--log", "error", "--keep-alive", "forever", *arguments]
        if "--kv-disk" not in arguments:
            command += ["--kv-disk", "off"]
        home = home or self.folder.name
        self.process = subprocess.Popen(command, env=keep | {"HOME": home}, stdout=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)
        line = self.process.stdout.readline()
        if "//" not in line:
            sys.exit(f"the server does not start: {line!r}")
        self.port = int(line.strip().rsplit(":", 1)[1])
        self.model = pathlib.Path(model).stem if model.endswith(".gguf") else pathlib.Path(model).name

    def send(self, path, body=None):
        """Returns the status and the text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        data = None if body is None else json.dumps({"model": self.model} | body)
        connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def metric(self, name):
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.send("/metrics")[1], re.M)
        return sum(map(float, found))

    def drafts(self):
        return [int(self.metric(f"vllm:spec_decode_num_{name}_total")) for name in ("draft_tokens", "accepted_tokens")]

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


def answer(server, path, body):
    """Returns what a client gets, without ids and times."""
    status, text = server.send(path, body)
    if status != 200:
        return {"status": status, "error": json.loads(text)["error"]["message"]}
    if body.get("stream"):
        return joined([json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")])
    found = json.loads(text)
    choices = []
    for choice in found["choices"]:
        message = choice.get("message") or {"content": choice["text"]}
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
        choices.append([message.get("content") or "", calls, logprobs(choice), choice["finish_reason"]])
    return {"choices": choices, "tokens": found["usage"]["completion_tokens"]}


def logprobs(choice):
    """Returns the log-probabilities of a choice as a list."""
    found = choice.get("logprobs") or {}
    if "content" in found:
        return found["content"] or []
    return [list(each) for each in zip(*(found.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs")))]


def joined(chunks):
    """Joins the chunks of a stream."""
    choices, tokens = {}, None
    for chunk in chunks:
        if "error" in chunk:
            return {"error": chunk["error"]["message"]}
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            whole = choices.setdefault(choice["index"], ["", [], [], None])
            whole[0] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                function = call["function"]
                if "name" in function and function["name"]:
                    whole[1].append([function["name"], ""])
                whole[1][call["index"]][1] += function.get("arguments") or ""
            whole[2] += logprobs(choice)
            whole[3] = choice.get("finish_reason") or whole[3]
    return {"choices": [choices[index] for index in sorted(choices)], "tokens": tokens}


def predicted(rng, body, expected):
    """Returns the body with a prediction of the expected answer that has errors."""
    text = expected["choices"][0][0] if expected.get("choices") else ""
    words = re.split(r"(?<=\s)", text)
    words = [word if rng.random() < 0.9 else rng.choice(["", "quite ", word + word]) for word in words]
    return body | {"prediction": {"type": "content", "content": "".join(words)}}


def equal(options):
    rng = random.Random(3)
    requests = bodies(options.count, options.context, options.seed)
    context = ["--ctx", str(options.context)]
    plain = Server(options.binary, options.model, *context, "--speculate", "off", *pages(options.more))
    begin = time.time()
    # A call that is cut off is a part of a call in a stream, and text in a whole answer.
    in_parts = {"stream": True, "stream_options": {"include_usage": True}}
    requests = [(path, body | in_parts if index % 3 == 0 else body) for index, (path, body) in enumerate(requests)]
    expected = [answer(plain, path, body) for path, body in requests]
    if plain.drafts() != [0, 0]:
        sys.exit("a server without drafts has checked some")
    plain.stop()
    refused = [each for each in expected if "error" in each]
    print(f"{len(requests)} answers without drafts in {time.time() - begin:.0f} s, {len(refused)} refused", flush=True)
    if len(refused) > len(requests) / 20:
        sys.exit(f"requests are refused: {refused[0]}")
    home = tempfile.TemporaryDirectory()
    failed, sums = 0, [0, 0]
    for way, at_once in [("alone", 1), ("16 at once", 16), ("16 at once after a restart", 16)]:
        server = Server(options.binary, options.model, *context, *options.more, home=home.name)

        def one(index):
            path, body = requests[index]
            if path.endswith("chat/completions") and index % 2 == 0:
                body = predicted(rng, body, expected[index])
            return index, answer(server, path, body)

        order = list(range(len(requests)))
        if at_once > 1:
            rng.shuffle(order)
        begin = time.time()
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            for index, got in pool.map(one, order):
                if got != expected[index]:
                    failed += 1
                    if failed <= 5:
                        print(f"DIFFERENT {way}: {json.dumps(requests[index])[:1500]}\n  {json.dumps(got)[:1500]}\n  instead of\n  {json.dumps(expected[index])[:1500]}")
        drafted, accepted = server.drafts()
        preempted = server.metric("vllm:num_preemptions_total")
        cached = server.metric("vllm:prefix_cache_hits_total")
        print(
            f"{way}: {time.time() - begin:.0f} s, {accepted} of {drafted} drafted tokens accepted, {preempted:.0f} preemptions, "
            f"{cached:.0f} cached tokens",
            flush=True,
        )
        sums = [sums[0] + drafted, sums[1] + accepted]
        server.stop()
    print(f"{failed} of {3 * len(requests)} answers differ; {sums[1]} of {sums[0]} drafted tokens accepted")
    if failed or sums[1] < len(requests) / 5 or sums[0] - sums[1] < len(requests) / 5:
        sys.exit(1)


def pages(arguments):
    """Returns the options that change the numbers of answers: the format of K and V."""
    pairs = list(zip(arguments, arguments[1:]))
    return [text for name, value in pairs if name in ("--kv-dtype", "--device", "--numerics") for text in (name, value)]


def streamed(port, body):
    """Returns the number of tokens of a chat's answer, the seconds until its first one, and the seconds from then on."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}} | body
    begin = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    first = last = tokens = None
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if any(choice["delta"].get("content") for choice in chunk.get("choices", [])):
            last = time.perf_counter()
            first = first or last
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    connection.close()
    return tokens, first - begin, last - first


def rate(port, asked, at_once):
    """Returns the tokens per second of requests one by one, without their prompts, or of as many at once."""
    if at_once == 1:
        runs = [streamed(port, body) for body in asked]
        return sum(tokens - 1 for tokens, *_ in runs) / max(sum(seconds for *_, seconds in runs), 1e-9)
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        every = [asked[index % len(asked)] | {"seed": index} for index in range(at_once)]
        tokens = sum(found[0] for found in pool.map(lambda body: streamed(port, body), every))
    return tokens / (time.perf_counter() - begin)


MODES = ["none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"]


def llama(options, mode):
    """Starts a llama-server with a mode of speculation. Returns its port."""
    flags = [] if mode == "none" else ["--spec-type", mode]
    return llama_server(options, 4190 + MODES.index(mode), "-c", str(options.context), *flags)[0]


def llama_server(options, port, *flags):
    """Starts a llama-server. Returns its port and its process."""
    command = [options.llama, "-m", options.model, "--port", str(port), "-np", "1", "--no-webui", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    for _ in range(600):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return port, process
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"llama-server does not start: {' '.join(command)}")


def speed(options):
    rng = random.Random(5)
    chat = lambda text: [{"role": "user", "content": text}]
    file = "\n".join(code(rng, 20).splitlines()[:200])
    name = re.search("def (.*?)[(]", file)[1]
    edit = f"Write this file again, complete, with the function `{name}` renamed to `renamed`. Answer with the file only.\n```python\n{file}\n```"
    chats = [{"messages": chat(question), "max_tokens": 96} for question in QUESTIONS]
    cases = {
        "edit": (1, [{"messages": chat(edit), "max_tokens": 800}]),
        "chat": (1, chats),
        "random": (1, [{"messages": chat("Write."), "max_tokens": 160, "temperature": 2, "ignore_eos": True, "seed": seed} for seed in (1, 2)]),
        "chat x 8": (8, [body | {"temperature": 0.8} for body in chats]),
        "chat x 32": (32, [body | {"temperature": 0.8, "max_tokens": 48} for body in chats]),
    }
    server = Server(options.binary, options.model, "--ctx", str(options.context), "--parallel", "32", *options.more)
    ports = {mode: llama(options, mode) for mode in MODES} if options.llama else {}
    for name in options.cases.split(","):
        at_once, asked = cases[name]
        found = {}
        # The first round reads prompts into prefix caches.
        for turn in range(options.rounds + 1):
            runs = [("off", server.port, {"speculate": "off"}), ("auto", server.port, {})]
            runs += [(mode, port, {}) for mode, port in ports.items() if at_once == 1]
            for run, port, more in runs[::-1] if turn % 2 else runs:
                more = {"model": server.model} | more | ({"max_tokens": 2} if turn == 0 and at_once == 1 else {})
                value = rate(port, [body | more for body in asked], at_once)
                if turn:
                    found.setdefault(run, []).append(value)
        ratios = [auto / off for auto, off in zip(found["auto"], found["off"])]
        texts = [f"{run} {statistics.median(values):.1f} ({min(values):.1f} .. {max(values):.1f})" for run, values in found.items()]
        print(f"{server.model}, {name}: auto/off {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f}); tokens/s: " + ", ".join(texts), flush=True)


def passages(paths, seed):
    """Yields passages of texts."""
    rng = random.Random(seed)
    words = [word for path in paths for word in re.findall(r"\S+\s*", pathlib.Path(path).read_text())]
    while True:
        first = rng.randrange(len(words))
        yield "".join(words[first : first + rng.randrange(8, 160)]).strip()


def drafted_by_paguro(server, prompt, tokens):
    """Returns the text of an answer, and its numbers of drafted and accepted tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    found = json.loads(server.send("/v1/completions", body)[1])
    details = found["usage"].get("completion_tokens_details") or {}
    accepted, rejected = (details.get(f"{name}_prediction_tokens") or 0 for name in ("accepted", "rejected"))
    return found["choices"][0]["text"], accepted + rejected, accepted


def drafted_by_llama(port, prompt, tokens):
    """Returns the same of llama.cpp."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    found = json.loads(connection.getresponse().read())
    connection.close()
    timings = found["timings"]
    return found["content"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)


def acceptance(options):
    failed = False
    for depth in options.depths:
        server = Server(options.binary, options.model, "--ctx", "1024", "--parallel", "1", "--threads", str(options.threads), "--speculate", f"model:{depth}", *options.more)
        flags = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(depth), "--spec-draft-n-min", "0", "--spec-draft-p-min", "0"]
        port, peer = llama_server(options, 4200 + depth, "-c", "1024", "-t", str(options.threads), *flags)
        rows, same = [], 0
        for prompt in passages(options.texts, options.seed):
            text, *own = drafted_by_paguro(server, prompt, options.tokens)
            other, *theirs = drafted_by_llama(port, prompt, options.tokens)
            rows.append(own + theirs)
            same += text == other
            drafted = [sum(row[column] for row in rows) for column in (0, 2)]
            if min(drafted) >= options.drafted or len(rows) >= options.drafted:
                break
        server.stop()
        peer.terminate()
        peer.wait(60)

        def difference(rows):
            """Returns the difference of the shares, in points."""
            sums = [sum(column) for column in zip(*rows)]
            return 100 * (sums[1] / max(sums[0], 1) - sums[3] / max(sums[2], 1))

        rng = random.Random(1)
        spread = statistics.stdev(difference(rng.choices(rows, k=len(rows))) for _ in range(200))
        sums = [sum(column) for column in zip(*rows)]
        shares = [100 * sums[at + 1] / max(sums[at], 1) for at in (0, 2)]
        failed |= min(sums) == 0 or abs(difference(rows)) > 1
        print(
            f"depth {depth}: {sums[1]} of {sums[0]} drafted tokens accepted ({shares[0]:.2f} %), by llama.cpp {sums[3]} of {sums[2]} "
            f"({shares[1]:.2f} %): {difference(rows):+.2f} points, standard error {spread:.2f}; {same} of {len(rows)} texts are the same",
            flush=True,
        )
    if failed:
        sys.exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equal", "speed", "acceptance"])
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=500, help="requests of `equal`")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--llama", help="llama-server, for `speed` and `acceptance`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="edit,chat,random,chat x 8,chat x 32")
    parser.add_argument("--seed", type=int, default=7, help="of the requests of `equal`, and of the passages")
    docs = sorted(map(str, pathlib.Path(__file__).resolve().parent.parent.glob("docs/*.md")))
    parser.add_argument("--texts", nargs="+", default=docs, help="of the passages of `acceptance`")
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 3], help="numbers of drafted tokens of a step")
    parser.add_argument("--drafted", type=int, default=20000, help="tokens that each engine drafts in all, of each depth")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer of `acceptance`")
    parser.add_argument("--threads", type=int, default=1, help="of both engines, for `acceptance`")
    own, more = (sys.argv[1:], []) if "--" not in sys.argv else (sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :])
    options = parser.parse_args(own)
    options.more = more
    {"equal": equal, "speed": speed, "acceptance": acceptance}[options.what](options)


if __name__ == "__main__":
    main()
