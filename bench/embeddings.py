#!/usr/bin/env python3
"""Embeds 256 texts of mixed length alternately with Paguro, sentence-transformers, onnxruntime and llama.cpp.

    bench/embeddings.py target/release/paguro --folder all-MiniLM-L6-v2 --model minilm-q8_0.gguf [--llama-server llama-server --llama-embedding llama-embedding --gguf minilm-f16.gguf]

Every engine embeds the same texts of 8 to 400 tokens, and then one short text, in each round; the ratios are of neighbouring runs.
Paguro and llama-server are measured over HTTP. The others run in this process: sentence-transformers in F32 and with dynamic
quantization to eight bits, onnxruntime in F32 and eight bits, with batches sorted by length as sentence-transformers does it, of the
sizes that are fastest on two cores. llama-embedding is a new process for each run; the time of one with a single short text, which
mostly loads the model, is subtracted. An engine counts if each text's cosine to F32 is at least 0.999.

Needs torch, transformers, sentence-transformers, onnx and onnxruntime.
"""

import argparse
import atexit
import base64
import http.client
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import numpy as np
except ImportError as missing:
    sys.exit(f"{__doc__}\nerror: {missing}; run `pip install numpy torch transformers sentence-transformers onnx onnxruntime`")

WORDS = (
    "the a fox owl key sea hat river stone moon night story brave shy little old friend door house winter function value returns list "
    "index buffer thread page block token reads writes when before after under over between and or not with measurement international "
    "photosynthesis 1987 naïve Zürich don't e-mail (see below), however; question? answer! unbelievable reorganization"
).split()


def make_texts(tokenizer, count):
    rng = random.Random(7)
    texts = []
    for _ in range(count):
        length = rng.randint(8, 400)
        words = []
        while len(tokenizer(" ".join(words))["input_ids"]) < length:
            words += [rng.choice(WORDS) for _ in range(max(1, (length - len(words)) // 3))]
        ids = tokenizer(" ".join(words))["input_ids"]
        while len(ids) > length and len(words) > 1:
            words.pop()
            ids = tokenizer(" ".join(words))["input_ids"]
        texts.append(" ".join(words))
    return texts


class Http:
    """A server with OpenAI's `/v1/embeddings`."""

    def __init__(self, name, command, port, model):
        keep = {key: value for key, value in os.environ.items() if not key.startswith("PAGURO_")}
        self.home = tempfile.TemporaryDirectory()
        self.name, self.port, self.model, self.connection = name, port, model, None
        self.process = subprocess.Popen(command, env=keep | {"HOME": self.home.name}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self.process.kill)
        for _ in range(600):
            try:
                self(["ready?"])
                return
            except (OSError, KeyError, ValueError, http.client.HTTPException):
                self.connection = None
                time.sleep(0.1)
        sys.exit(f"{name} does not start: {command}")

    def __call__(self, texts):
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = json.dumps({"model": self.model, "input": texts, "encoding_format": "base64"})
        try:
            self.connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            answer = json.loads(self.connection.getresponse().read())
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):  # closed while idle
            self.connection = None
            return self(texts)
        if "data" not in answer and len(texts) > 1:
            sys.exit(f"{self.name}: {answer}")
        vectors = [base64.b64decode(item["embedding"]) for item in sorted(answer["data"], key=lambda item: item["index"])]
        return np.array([np.frombuffer(vector, dtype="<f4") for vector in vectors])

    def stop(self):
        self.process.terminate()
        self.process.wait()


class LlamaEmbedding:
    """llama.cpp's `llama-embedding`, which reads a file with a text per line."""

    def __init__(self, name, binary, gguf, threads, batch):
        self.name = name
        # It makes batches of the size of the context.
        self.command = [binary, "-m", gguf, "-t", str(threads), "-c", str(batch), "-b", str(batch), "--embd-output-format", "json"]
        self.seconds_to_load = 0.0
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            self(["ready?"])
            times.append(time.perf_counter() - begin)
        self.seconds_to_load = statistics.median(times)

    def __call__(self, texts):
        assert not any("\n" in text or "\\" in text for text in texts), "a text per line, without escapes"
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write("\n".join(texts))
            file.flush()
            ran = subprocess.run([*self.command, "-f", file.name], capture_output=True, check=False, text=True)
        if ran.returncode != 0:
            sys.exit(f"{self.name}: {ran.stderr[-2000:]}")
        answer = json.loads(ran.stdout[ran.stdout.index("{") : ran.stdout.rindex("}") + 1])
        return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)

    def stop(self):
        pass


class Torch:
    def __init__(self, name, folder, batch, quantized, device="cpu"):
        import torch
        from sentence_transformers import SentenceTransformer

        self.name, self.batch = name, batch
        self.model = SentenceTransformer(folder, device=device)
        if device != "cpu":
            self.model.half()
        self.model.max_seq_length = 512
        if quantized:
            self.model[0].auto_model = torch.ao.quantization.quantize_dynamic(self.model[0].auto_model, {torch.nn.Linear}, dtype=torch.qint8)

    def __call__(self, texts):
        return self.model.encode(texts, batch_size=self.batch, normalize_embeddings=True, show_progress_bar=False)

    def stop(self):
        pass


class Onnx:
    def __init__(self, name, folder, threads, batch, quantized):
        import onnxruntime
        from tokenizers import Tokenizer

        self.name, self.batch = name, batch
        path = export(folder)
        if quantized:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            small = path.replace(".onnx", "-int8.onnx")
            if not os.path.exists(small):
                quantize_dynamic(path, small, per_channel=True, reduce_range=True, weight_type=QuantType.QInt8,
                                 extra_options={"DefaultTensorType": 1})
            path = small
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.tokenizer.enable_truncation(512)
        self.tokenizer.enable_padding()

    def __call__(self, texts):
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        out = [None] * len(texts)
        for first in range(0, len(order), self.batch):
            batch = order[first : first + self.batch]
            encoded = self.tokenizer.encode_batch([texts[index] for index in batch])
            ids = np.array([e.ids for e in encoded], dtype=np.int64)
            mask = np.array([e.attention_mask for e in encoded], dtype=np.int64)
            rows = self.session.run(None, {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})[0]
            pooled = (rows * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
            for index, vector in zip(batch, pooled):
                out[index] = vector
        return np.array(out)

    def stop(self):
        pass


def export(folder):
    """Writes the model as an ONNX file with fused operations, as optimum and fastembed have them."""
    path = f"{tempfile.gettempdir()}/paguro-bench-minilm.onnx"
    if os.path.exists(path):
        return path
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask, token_type_ids):
            return self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    ones = torch.ones(2, 16, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "length"} for name in names + ["rows"]}
    torch.onnx.export(Rows(), (ones, ones, ones * 0), path, input_names=names, output_names=["rows"], dynamic_axes=axes,
                      opset_version=17, dynamo=False)
    try:
        from onnxruntime.transformers import optimizer

        optimizer.optimize_model(path, "bert", num_heads=12, hidden_size=384).save_model_to_file(path)
    except ImportError as error:
        print(f"without fused operations: {error}", file=sys.stderr)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--model", action="append", default=[], help="a file or folder for Paguro, also several times; the folder if absent")
    parser.add_argument("--llama-server")
    parser.add_argument("--llama-embedding")
    parser.add_argument("--llama-batch", type=int, default=2048, help="tokens of a batch of llama-embedding")
    parser.add_argument("--gguf", action="append", default=[], help="a file for llama.cpp, also several times")
    parser.add_argument("--without", default="", help="engines to leave out: torch-int8,onnx,...")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--torch-batch", type=int, default=8, help="texts of a batch; padding makes larger ones slower on few cores")
    parser.add_argument("--onnx-batch", type=int, default=1)
    parser.add_argument("--cuda", action="store_true", help="sentence-transformers in F16 on the GPU, in batches of 32 and 128, instead of engines on the CPU")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(options.threads)
    texts = make_texts(AutoTokenizer.from_pretrained(options.folder), options.texts)
    short = ["A fox lost its key in the wood"]
    engines = []
    for at, model in enumerate(options.model or [options.folder]):
        port = 18300 + at
        name = pathlib.Path(model).stem
        command = [options.binary, "serve", model, "--port", str(port), "--log", "error", "--threads", str(options.threads)]
        engines.append(Http(f"paguro {name}", command, port, name))
    for at, gguf in enumerate(options.gguf if options.llama_server else []):
        port = 18400 + at
        command = [options.llama_server, "-m", gguf, "--embedding", "--port", str(port), "-c", "8192", "-b", "2048", "-ub", "2048",
                   "-t", str(options.threads), "-np", "16"]
        engines.append(Http(f"llama.cpp {pathlib.Path(gguf).stem}", command, port, "x"))
    for gguf in options.gguf if options.llama_embedding else []:
        name = f"llama-embedding {pathlib.Path(gguf).stem}"
        engines.append(LlamaEmbedding(name, options.llama_embedding, gguf, options.threads, options.llama_batch))
    without = options.without.split(",")
    reference = None if options.cuda else Torch("torch", options.folder, options.torch_batch, False)
    makers = {
        "torch": lambda name: reference,
        "torch-int8": lambda name: Torch(name, options.folder, options.torch_batch, True),
        "onnx": lambda name: Onnx(name, options.folder, options.threads, options.onnx_batch, False),
        "onnx-int8": lambda name: Onnx(name, options.folder, options.threads, options.onnx_batch, True),
    }
    if options.cuda:
        reference = Torch("torch 32", options.folder, 32, False, "cuda")
        makers = {"torch-32": lambda name: reference, "torch-128": lambda name: Torch(name, options.folder, 128, False, "cuda")}
    engines += [make(name) for name, make in makers.items() if name not in without]

    expected = reference(texts)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    likeness = {}
    for engine in engines:
        vectors = engine(texts)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        likeness[engine.name] = float((vectors * expected).sum(1).min())
    many = {engine.name: [] for engine in engines}
    one = {engine.name: [] for engine in engines}
    for _ in range(options.rounds):
        for engine in engines:
            begin = time.perf_counter()
            engine(texts)
            many[engine.name].append(time.perf_counter() - begin - getattr(engine, "seconds_to_load", 0.0))
            for _ in range(0 if hasattr(engine, "seconds_to_load") else 20):
                begin = time.perf_counter()
                engine(short)
                one[engine.name].append(time.perf_counter() - begin)
    for engine in engines:
        engine.stop()
    print("| engine | least cosine | seconds for all texts | texts/s | Paguro's speed : this one | one short text, ms |")
    print("|-|-|-|-|-|-|")
    first = many[engines[0].name]
    for engine in engines:
        times = many[engine.name]
        ratios = [own / other for own, other in zip(times, first)]
        alone = f"{1e3 * statistics.median(one[engine.name]):.1f}" if one[engine.name] else "–"
        print(f"| {engine.name} | {likeness[engine.name]:.6f} | {statistics.median(times):.2f} | {options.texts / statistics.median(times):.0f} "
              f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {alone} |")


if __name__ == "__main__":
    main()
