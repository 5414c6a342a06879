#!/usr/bin/env python3
"""Replicas behind routers of other projects: what they need from the server, and what they gain.

    python3 -m venv routers && routers/bin/pip install vllm-router==0.1.17 smg==1.13.0 pyzmq msgpack
    routers/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    routers/bin/python bench/replicas.py target/release/paguro [trace|policies|kill|roll|router|tiers|events|disk|smg ...]

Run with the Python of the environment that has the routers. Without names, all parts run. Each part prints figures, and fails if

- trace: `kv_aware` has fewer than 1.5 times the prefix hits of round robin, on a trace of 20 tenants in three replicas that have pages
  for 7 of their prefixes each, with 64 streams;
- policies: a policy of vllm-router or an API behind it fails;
- kill: a replica that is killed in the middle of streams touches another stream, or is not found again;
- roll: a rolling restart under load loses a request;
- router: a restarted router does not know the prefixes of before;
- events: a reader of the events and `dynamo.indexer` disagree with `/status` after random requests, one of them after a pause;
- tiers: `kv_aware` does not find prefixes that are on disks alone, or `dynamo.select_service` does not pick the holder of a prefix;
- disk: two replicas with one `--kv-disk-dir` do not serve each other's prefixes bit for bit, also while one is killed;
- smg: SMG does not detect the replicas or their load, or fails to route an API.
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
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

WORDS = "fox owl key sea hat river stone moon night story brave shy little old friend door house winter".split()
BIN = pathlib.Path(sys.executable).parent
BLOCK = 32
RETRIES = 400


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def request(port, path, body=None, timeout=120, headers=None):
    """Returns the status and the body of an answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **(headers or {})}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def get(port, path):
    status, body = request(port, path)
    assert status == 200, (path, status, body)
    return json.loads(body)


def wait_for(what, is_so, seconds=60):
    end = time.time() + seconds
    while time.time() < end:
        try:
            found = is_so()
        except (OSError, AssertionError, ValueError, KeyError, IndexError):
            found = None
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds} s")


class Replica:
    """A `paguro serve` on ports of its own, which stay the same over restarts."""

    def __init__(self, run, *arguments, home=None):
        self.run, self.arguments = run, arguments
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self.home = home or tempfile.mkdtemp(dir=run.folder)
        self.start()

    def start(self):
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
        command = [self.run.binary, "serve", "--port", self.port, "--log", "warn", "--threads", self.run.options.threads]
        command += ["--kv-events", f"tcp://127.0.0.1:{self.events}"]
        command += ["--kv-events-replay", f"tcp://127.0.0.1:{self.replay}", "--kv-events-topic", self.run.topic]
        if "--kv-disk" not in self.arguments:
            command += ["--kv-disk", "off"]
        command += ["--keep-alive", "forever", *self.arguments]
        log = open(pathlib.Path(self.home) / "log", "a")
        self.process = subprocess.Popen(list(map(str, command)), env=keep | {"HOME": self.home}, stdout=log, stderr=log)
        self.run.processes.append(self.process)
        wait_for("a replica", lambda: request(self.port, "/health")[0] == 200)
        # Loads the model.
        assert request(self.port, "/v1/completions", {"model": "tales", "prompt": "a", "max_tokens": 1})[0] == 200

    def model(self):
        return get(self.port, "/status")["models"][0]

    def metric(self, name):
        text = request(self.port, "/metrics")[1].decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.M))

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(60)


class Router:
    """vllm-router in front of replicas."""

    def __init__(self, run, replicas, policy, *arguments):
        self.run, self.port = run, free_port()
        urls = [f"http://127.0.0.1:{replica.port}" for replica in replicas]
        command = [BIN / "vllm-router", "--port", self.port, "--prometheus-port", free_port(), "--policy", policy]
        command += ["--worker-urls", *urls, "--health-check-interval-secs", 1, "--health-failure-threshold", 1]
        # The breaker would keep a restarted replica out for a minute; the checks of health find it at once.
        command += ["--health-success-threshold", 1, "--health-check-endpoint", "/ready", "--disable-circuit-breaker"]
        if policy == "kv_aware":
            for url, replica in zip(urls, replicas):
                command += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{replica.events}"]
                command += ["--kv-event-replay-source", f"{url}=tcp://127.0.0.1:{replica.replay}"]
            command += ["--kv-event-block-size", BLOCK, "--kv-event-model", "tales"]
        self.command = list(map(str, [*command, *arguments]))
        self.start()

    def start(self):
        self.log = open(pathlib.Path(self.run.folder) / f"router-{self.port}.log", "a")
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
        self.run.processes.append(self.process)
        wait_for("the router", lambda: request(self.port, "/health")[0] == 200)

    def stop(self):
        self.process.kill()
        self.process.wait()


def words(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


class Run:
    def __init__(self, options):
        self.options, self.binary = options, pathlib.Path(options.binary).resolve()
        self.folder = tempfile.mkdtemp(prefix="paguro-replicas-")
        self.processes, self.tokens = [], options.tokens
        # vllm-router's static sources have the empty topic.
        self.topic = ""

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.processes.clear()

    def page_bytes(self):
        replica = Replica(self)
        model = replica.model()
        replica.stop()
        return model["kv"] // (model["pages"] + 1)

    # A trace of tenants.

    def tenants(self, seed):
        rng = random.Random(seed)
        return [words(rng, self.options.prefix) for _ in range(20)]

    def trace(self, port, tenants, count, seed, streams=64):
        """Sends requests of random tenants, in `streams` streams. Returns the answers by status, and the cached tokens."""
        rng = random.Random(seed)
        asks = [f"{rng.choice(tenants)} {words(rng, 8)} {number}" for number in range(count)]
        statuses, cached, prompt = collections.Counter(), 0, 0
        lock = threading.Lock()

        def work():
            nonlocal cached, prompt
            while True:
                with lock:
                    if not asks:
                        return
                    text = asks.pop()
                body = {"model": "tales", "messages": [{"role": "user", "content": text}], "max_tokens": self.tokens, "ignore_eos": True,
                        "stream": True, "stream_options": {"include_usage": True}}
                status, answer = request(port, "/v1/chat/completions", body)
                with lock:
                    statuses[status] += 1
                    if status == 200:
                        last = [line for line in answer.split(b"\n") if line.startswith(b"data: {")][-1]
                        usage = json.loads(last[6:])["usage"]
                        prompt += usage["prompt_tokens"]
                        cached += usage["prompt_tokens_details"]["cached_tokens"]
                    elif statuses[status] < 3:
                        print("  ", status, answer[:200])

        threads = [threading.Thread(target=work) for _ in range(streams)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return statuses, cached, prompt

    def part_trace(self):
        bytes_of_page = self.page_bytes()
        seeds = self.options.seeds
        tenants = self.tenants(1)
        replica = Replica(self)
        chat = {"model": "tales", "messages": [{"role": "user", "content": tenants[0]}]}
        tokens = len(json.loads(request(replica.port, "/v1/chat/completions/render", chat)[1])["token_ids"])
        replica.stop()
        blocks = -(-tokens // BLOCK)
        pages = 7 * blocks + self.options.spare
        print(f"  {tokens} tokens in a prefix, {pages} pages in each replica")
        for seed in range(seeds):
            hits = {}
            for policy in ["round_robin", "kv_aware"]:
                replicas = [Replica(self, "--kv-memory", pages * bytes_of_page, "--parallel", 64) for _ in range(3)]
                router = Router(self, replicas, policy)
                tenants = self.tenants(100 + seed)
                begin = time.time()
                statuses, cached, prompt = self.trace(router.port, tenants, self.options.requests, seed)
                seconds = time.time() - begin
                hits[policy] = sum(replica.metric("vllm:prefix_cache_hits_total") for replica in replicas)
                print(f"  seed {seed} {policy:12} {cached / max(prompt, 1):6.1%} of tokens cached, hits {hits[policy]:.0f}, "
                      f"{seconds:.1f} s, {dict(statuses)}")
                assert set(statuses) == {200}, statuses
                router.stop()
                [replica.stop() for replica in replicas]
            ratio = hits["kv_aware"] / max(hits["round_robin"], 1)
            print(f"  seed {seed}: kv_aware has {ratio:.2f} times the hits of round robin")
            assert ratio >= 1.5, ratio

    def part_policies(self):
        policies = ["random", "round_robin", "cache_aware", "kv_aware", "power_of_two", "consistent_hash", "sticky_least_loaded"]
        chat = {"model": "tales", "messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 6}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        asks = {
            "/v1/chat/completions": [chat, chat | {"stream": True}, chat | {"tools": [tool], "tool_choice": "auto"},
                                     chat | {"n": 2, "logprobs": True, "top_logprobs": 2},
                                     chat | {"response_format": {"type": "json_object"}}],
            "/v1/completions": [{"model": "tales", "prompt": "Once", "max_tokens": 4},
                                {"model": "tales", "prompt": [1, 2, 3], "max_tokens": 4, "stream": True}],
            "/v1/messages": [chat, chat | {"stream": True}],
            "/v1/messages/count_tokens": [{key: chat[key] for key in ["model", "messages"]}],
            "/v1/responses": [{"model": "tales", "input": "Once", "max_output_tokens": 4}],
            "/inference/v1/generate": [{"model": "tales", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}}],
            "/v1/embeddings": [{"model": "tales", "input": "a"}],
            "/tokenize": [{"model": "tales", "prompt": "a"}],
            "/v1/chat/completions/render": [chat],
            "/v1/completions/render": [{"model": "tales", "prompt": ["a", "b"]}],
            "/api/chat": [{key: chat[key] for key in ["model", "messages"]} | {"options": {"num_predict": 4}, "stream": False}],
        }
        for count in [2, 3]:
            replicas = [Replica(self) for _ in range(count)]
            for policy in policies:
                router = Router(self, replicas, policy)
                before = [replica.metric("paguro_http_requests_total") for replica in replicas]
                failed = []
                for path, bodies in asks.items():
                    for body in bodies * 2:
                        status, answer = request(router.port, path, body)
                        if status != 200:
                            failed.append((path, status, answer[:200]))
                served = [int(replica.metric("paguro_http_requests_total") - old) for replica, old in zip(replicas, before)]
                print(f"  {count} replicas, {policy:20} {served}", "ok" if not failed else failed)
                assert not failed, failed
                router.stop()
            [replica.stop() for replica in replicas]

    # Deaths and restarts.

    def stream(self, port, text, tokens, seen):
        """Reads a stream to its end. Appends its last event."""
        body = {"model": "tales", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            end = "cut"
            for line in answer:
                if line.strip() == b"data: [DONE]":
                    end = "done"
            seen.append((answer.status, end if answer.status == 200 else "refused"))
        except (OSError, http.client.HTTPException) as error:
            seen.append((0, type(error).__name__))
        finally:
            connection.close()

    def part_kill(self):
        replicas = [Replica(self, "--ctx", 4096) for _ in range(3)]
        router = Router(self, replicas, "round_robin")
        seen = []
        threads = [threading.Thread(target=self.stream, args=(router.port, f"{n} fox", 600, seen)) for n in range(24)]
        [thread.start() for thread in threads]
        wait_for("streams", lambda: sum(replica.model()["running"] for replica in replicas) >= 20)
        on_victim = replicas[1].model()["running"]
        replicas[1].stop(signal.SIGKILL)
        [thread.join() for thread in threads]
        counts = collections.Counter(seen)
        print(f"  {on_victim} streams on the killed replica: {dict(counts)}")
        assert counts[(200, "done")] >= 24 - on_victim, counts
        statuses, *_ = self.trace(router.port, ["fox"], 60, 1, streams=8)
        print(f"  after it: {dict(statuses)}")
        assert set(statuses) == {200}
        replicas[1].start()
        before = replicas[1].metric("paguro_http_requests_total")

        def is_found():
            self.trace(router.port, ["owl"], 6, 2, streams=3)
            return replicas[1].metric("paguro_http_requests_total") > before + 8

        wait_for("the replica is found again", is_found)
        print("  found again")

    def part_roll(self):
        replicas = [Replica(self, "--shutdown-timeout", 60, "--drain-time", 3) for _ in range(3)]
        for policy in ["round_robin", "kv_aware"]:
            router = Router(self, replicas, policy)
            stop, statuses, streams = threading.Event(), collections.Counter(), []

            def load(seed):
                rng = random.Random(seed)
                while not stop.is_set():
                    body = {"model": "tales", "messages": [{"role": "user", "content": words(rng, 30)}], "max_tokens": 12, "ignore_eos": True}
                    try:
                        statuses[request(router.port, "/v1/chat/completions", body)[0]] += 1
                    except OSError as error:
                        statuses[type(error).__name__] += 1
                    self.stream(router.port, words(rng, 30), 60, streams)

            threads = [threading.Thread(target=load, args=(seed,)) for seed in range(12)]
            [thread.start() for thread in threads]
            for replica in replicas:
                time.sleep(2)
                replica.stop()
                replica.start()
                time.sleep(2)
            stop.set()
            [thread.join() for thread in threads]
            print(f"  {policy}: {dict(statuses)}, streams {dict(collections.Counter(streams))}")
            assert set(statuses) == {200} and set(streams) == {(200, "done")}
            router.stop()

    def part_router(self):
        replicas = [Replica(self) for _ in range(3)]
        router = Router(self, replicas, "kv_aware")
        tenants = self.tenants(5)
        self.trace(router.port, tenants, 60, 1, streams=8)
        router.stop()
        router.start()
        before = [replica.metric("vllm:prefix_cache_hits_total") for replica in replicas]
        _, cached, prompt = self.trace(router.port, tenants, 60, 2, streams=8)
        print(f"  after the restart of the router {cached / prompt:.1%} of the tokens are cached")
        assert cached / prompt > 0.8 and before

    def part_tiers(self):
        """Prefixes of tenants, each computed by one replica and gone from its device: the router finds them on disks."""
        pages = 5 * -(-self.options.prefix // BLOCK)
        folder = pathlib.Path(self.folder)
        disk = ["--kv-memory", pages * self.page_bytes(), "--kv-disk", "64MB", "--kv-disk-dir"]
        replicas = [Replica(self, *disk, folder / f"kv-{number}") for number in range(3)]
        router = Router(self, replicas, "kv_aware")
        tenants = self.tenants(7)

        def ask(port, text):
            body = {"model": "tales", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
            status, answer = request(port, "/v1/chat/completions", body)
            assert status == 200, answer
            usage = json.loads(answer)["usage"]
            return usage["prompt_tokens"], usage["prompt_tokens_details"].get("cached_tokens_disk", 0)

        for number, text in enumerate(tenants):
            ask(replicas[number % 3].port, text)
        for replica in replicas:
            wait_for("the disk", lambda: replica.model()["disk"]["caught_up"])
        time.sleep(1)
        # The two newest of each replica are still on its device.
        prompt, loaded = map(sum, zip(*[ask(router.port, text + " fox") for text in tenants[:-6]]))
        print(f"  {loaded / prompt:.1%} of the tokens came from the disk of the replica that has them")
        assert loaded / prompt > 0.8
        # The selection service of Dynamo reads the same events.
        try:
            import dynamo  # noqa: F401
        except ImportError:
            return print("  no dynamo.select_service")
        port = free_port()
        log = open(folder / "select.log", "w")
        command = [sys.executable, "-m", "dynamo.select_service", "--port", str(port)]
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        wait_for("dynamo.select_service", lambda: request(port, "/workers")[0] == 200)
        for number, replica in enumerate(replicas):
            worker = {"worker_id": number, "model_name": "tales", "block_size": BLOCK, "endpoint": f"http://127.0.0.1:{replica.port}",
                      "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{replica.events}"},
                      "replay_endpoints": {"0": f"tcp://127.0.0.1:{replica.replay}"}}
            status, body = request(port, "/workers", worker)
            assert status in (200, 201), (status, body)
        time.sleep(1)
        right = 0
        for number in range(15):
            replica, text = number % 3, words(random.Random(number), 200)
            ask(replicas[replica].port, text)
            time.sleep(0.3)
            chat = {"model": "tales", "messages": [{"role": "user", "content": text}]}
            tokens = json.loads(request(replicas[replica].port, "/v1/chat/completions/render", chat)[1])["token_ids"]
            status, body = request(port, "/select", {"model_name": "tales", "token_ids": tokens, "selection_id": str(number)})
            assert status == 200, body
            right += json.loads(body)["worker_id"] == replica
        print(f"  dynamo.select_service picks the holder {right} of 15 times")
        assert right == 15

    # Events.

    def part_events(self):
        import msgpack
        import zmq

        bytes_of_page = self.page_bytes()
        folder = pathlib.Path(self.folder) / "kv-events"
        replica = Replica(self, "--kv-memory", 160 * bytes_of_page, "--kv-disk", "24MB", "--kv-disk-dir", folder)
        indexer, port = None, free_port()
        try:
            import dynamo  # noqa: F401
            command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--block-size", str(BLOCK)]
            log = open(pathlib.Path(self.folder) / "indexer.log", "w")
            indexer = subprocess.Popen(command, stdout=log, stderr=log)
            self.processes.append(indexer)
            wait_for("dynamo.indexer", lambda: request(port, "/workers")[0] == 200)
            worker = {"instance_id": 1, "endpoint": f"tcp://127.0.0.1:{replica.events}", "model_name": "tales", "block_size": BLOCK,
                      "dp_rank": 0, "replay_endpoint": f"tcp://127.0.0.1:{replica.replay}"}
            status, body = request(port, "/register", worker)
            assert status in (200, 201), (status, body)
        except ImportError:
            print("  no dynamo.indexer")
        context = zmq.Context()
        reader = Reader(context, zmq, msgpack, replica)
        rng = random.Random(3)
        prefixes = [words(rng, rng.randrange(20, 400)) for _ in range(60)]
        count, done = self.options.random, 0
        lock = threading.Lock()

        def work(seed):
            nonlocal done
            rng = random.Random(seed)
            while True:
                with lock:
                    if done >= count:
                        return
                    done += 1
                text = rng.choice(prefixes)[: rng.randrange(10, 3000)] + words(rng, rng.randrange(0, 30))
                body = {"model": "tales", "prompt": text, "max_tokens": rng.randrange(1, 4)}
                if not indexer and rng.random() < 0.1:
                    # dynamo.indexer takes texts with different salts for one text.
                    body["cache_salt"] = rng.choice("abc")
                request(replica.port, "/v1/completions", body)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        [thread.start() for thread in threads]
        while any(thread.is_alive() for thread in threads):
            reader.read()
            if indexer and done > count // 3 and not reader.paused:
                # Readers that do not read for a while.
                indexer.send_signal(signal.SIGSTOP)
                reader.pause(5)
                indexer.send_signal(signal.SIGCONT)
        wait_for("the disk", lambda: replica.model()["disk"]["caught_up"], 120)
        time.sleep(1)
        reader.read()

        def agrees():
            reader.read()
            blocks = replica.model()["blocks"]
            own = {place: reader.summary(medium) for place, medium in [("device", "GPU"), ("host", "CPU"), ("disk", "DISK")]}
            return own if own == blocks else None

        try:
            print(f"  {count} requests, {reader.batches} batches, {reader.gaps} gaps replayed:", wait_for("the reader agrees", agrees, 10))
        except AssertionError:
            print("   /status", replica.model()["blocks"], "reader", {m: reader.summary(m) for m in ("GPU", "CPU", "DISK")})
            raise
        assert reader.paused
        if indexer:
            time.sleep(2)
            status, dump = request(port, "/dump")
            found = dynamo_blocks(json.loads(dump))
            device = {number for number, medium in reader.blocks if medium == "GPU"}
            print(f"  dynamo.indexer has {len(found)} blocks of the device, /status {replica.model()['blocks']['device']['count']}")
            assert found == device, (len(found - device), len(device - found))

    # One disk.

    def part_disk(self):
        folder = pathlib.Path(self.folder) / "kv-shared"
        disk = ["--kv-disk", "64MB", "--kv-disk-dir", folder, "--parallel", 4]
        replicas = [Replica(self, *disk) for _ in range(2)]
        alone = Replica(self)
        rng = random.Random(9)
        hits = 0

        def answer(replica, text):
            body = {"model": "tales", "prompt": text, "max_tokens": 12, "temperature": 0, "logprobs": 2}
            status, answer = request(replica.port, "/v1/completions", body)
            assert status == 200, answer
            answer = json.loads(answer)
            details = answer["usage"]["prompt_tokens_details"]
            return json.dumps(answer["choices"][0]["logprobs"]), details.get("cached_tokens_disk", 0)

        for round in range(self.options.rounds):
            text = words(rng, 330)
            first, second = replicas if round % 2 else replicas[::-1]
            right, _ = answer(alone, text)
            assert answer(first, text)[0] == right
            wait_for("the disk", lambda: first.model()["disk"]["caught_up"])
            if round % 3 == 2:
                # A killed writer takes nothing with it, and is not missed.
                first.stop(signal.SIGKILL)
            time.sleep(1.5)
            bits, from_disk = answer(second, text)
            assert bits == right, f"round {round}: other bits"
            hits += from_disk > 0
            if round % 3 == 2:
                first.start()
        check = subprocess.run([self.binary, "cache", "--dir", folder, "verify"], capture_output=True, text=True)
        print(f"  {hits} of {self.options.rounds} prefixes came from the disk of the other replica, bit for bit; {check.stdout.strip()}")
        assert check.returncode == 0 and hits >= self.options.rounds * 0.8, (hits, check)

    def part_smg(self):
        replicas = [Replica(self, "--owned-by", "vllm") for _ in range(2)]
        port = free_port()
        urls = [f"http://127.0.0.1:{replica.port}" for replica in replicas]
        log = pathlib.Path(self.folder) / "smg.log"
        command = [BIN / "smg", "launch", "--host", "127.0.0.1", "--port", port, "--worker-urls", *urls, "--policy", "least_load",
                   "--load-monitor-interval", 1, "--prometheus-port", free_port()]
        process = subprocess.Popen(list(map(str, command)), stdout=open(log, "w"), stderr=subprocess.STDOUT)
        self.processes.append(process)
        chat = {"model": "tales", "messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 6}
        wait_for("SMG", lambda: request(port, "/v1/chat/completions", chat)[0] == 200, 90)
        workers = get(port, "/workers")
        print("  workers", [(worker["url"], worker.get("runtime_type") or worker.get("runtime"), worker.get("is_healthy")) for worker in workers["workers"]])
        failed = []
        for path, body in [
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", chat | {"stream": True}),
            ("/v1/completions", {"model": "tales", "prompt": "Once", "max_tokens": 4}),
            ("/v1/messages", chat),
            ("/v1/messages", chat | {"stream": True}),
            ("/v1/responses", {"model": "tales", "input": "Once", "max_output_tokens": 4}),
            ("/v1/embeddings", {"model": "tales", "input": "a"}),
        ]:
            status, answer = request(port, path, body)
            print(f"  {path} {status}", "" if status == 200 else answer[:300])
            if status != 200:
                failed.append(path)
        assert not failed, failed
        # The load of a replica that others keep busy is seen, and avoided.
        threads = [threading.Thread(target=self.stream, args=(replicas[0].port, f"{n} fox", 1500, [])) for n in range(12)]
        [thread.start() for thread in threads]

        def loads():
            found = {load["worker"]: load["num_running_reqs"] for load in get(port, "/get_loads")["loads"]}
            return found if found.get(urls[0], 0) >= 10 else None

        print("  running requests", list(wait_for("the load", loads, 20).values()), end="")
        before = [replica.metric("paguro_http_requests_total") for replica in replicas]
        [request(port, "/v1/chat/completions", chat) for _ in range(20)]
        served = [replica.metric('paguro_http_requests_total') - old for replica, old in zip(replicas, before)]
        print(f"; of 20 more, {served} with those of health")
        [thread.join() for thread in threads]
        assert served[1] > served[0], served


class Reader:
    """Rebuilds the blocks from events, as vLLM's example of a subscriber does, with replay after gaps."""

    def __init__(self, context, zmq, msgpack, replica):
        self.zmq, self.msgpack, self.context, self.replica = zmq, msgpack, context, replica
        self.blocks, self.next, self.batches, self.gaps, self.paused = set(), 0, 0, 0, False
        self.connect()

    def connect(self):
        self.socket = self.context.socket(self.zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(f"tcp://127.0.0.1:{self.replica.events}")

    def pause(self, seconds):
        """Misses events."""
        self.paused = True
        self.socket.close(0)
        time.sleep(seconds)
        self.connect()

    def read(self):
        while self.socket.poll(50):
            _, number, batch = self.socket.recv_multipart()
            self.take(int.from_bytes(number, "big"), batch)

    def take(self, number, batch):
        if number > self.next:
            self.gaps += 1
            for missed, payload in self.replayed():
                if missed < number:
                    self.apply(missed, payload)
        self.apply(number, batch)

    def replayed(self):
        dealer = self.context.socket(self.zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{self.replica.replay}")
        dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            _, _, number, batch = dealer.recv_multipart()
            if number == b"\xff" * 8:
                return dealer.close(0)
            yield int.from_bytes(number, "big"), batch

    def apply(self, number, batch):
        if number < self.next:
            return
        self.next, self.batches = number + 1, self.batches + 1
        for event in self.msgpack.unpackb(batch)[1]:
            match event["type"]:
                case "BlockStored":
                    self.blocks |= {(block, event["medium"]) for block in event["block_hashes"]}
                case "BlockRemoved":
                    self.blocks -= {(block, event["medium"]) for block in event["block_hashes"]}
                case "AllBlocksCleared":
                    self.blocks.clear()

    def summary(self, medium):
        hashes = [number for number, of in self.blocks if of == medium]
        digest = 0
        for number in hashes:
            digest ^= number
        return {"count": len(hashes), "digest": f"{digest:016x}"}


def dynamo_blocks(dump):
    """Returns the hashes of the device's blocks in a dump of `dynamo.indexer`."""
    found = set()

    def walk(value, tier):
        if isinstance(value, dict):
            tier = value.get("storage_tier", tier)
            stored = value.get("stored") or value.get("Stored")
            if stored and str(tier or "Device").lower().startswith(("device", "gpu")):
                found.update(block["block_hash"] for block in stored["blocks"])
            for inner in value.values():
                walk(inner, tier)
        elif isinstance(value, list):
            for inner in value:
                walk(inner, tier)

    walk(dump, None)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--threads", default="1", help="CPU threads of a replica")
    parser.add_argument("--prefix", type=int, default=420, help="words of a tenant's prefix")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--spare", type=int, default=32, help="pages of a replica besides those of 7 prefixes")
    parser.add_argument("--requests", type=int, default=600, help="requests of the trace")
    parser.add_argument("--seeds", type=int, default=1, help="traces")
    parser.add_argument("--random", type=int, default=10_000, help="random requests of `events`")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of `disk`")
    options = parser.parse_args()
    parts = options.parts or ["policies", "trace", "kill", "roll", "router", "tiers", "events", "disk", "smg"]
    failed = []
    for name in parts:
        print(name, flush=True)
        run = Run(options)
        try:
            getattr(run, f"part_{name}")()
        except AssertionError as error:
            failed.append(name)
            print(f"  FAILED: {error}", flush=True)
        finally:
            run.end()
            print(f"  files in {run.folder}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
