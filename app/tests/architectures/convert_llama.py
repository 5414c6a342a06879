#!/usr/bin/env python3
"""Converts every folder of `hf/` with `paguro convert`, loads the files in llama.cpp, and compares its logits with those of
transformers.

usage: convert_llama.py LOGITS PAGURO [CASE...]

LOGITS is the program of logits.cpp, PAGURO the binary. Needs `pip install numpy`. Prints a table. It is an error if llama.cpp
refuses a file or computes other numbers without a note of `paguro convert` that says so, or agrees despite a note.
"""
import json, pathlib, struct, subprocess, sys, tempfile

import numpy as np

HERE = pathlib.Path(__file__).parent
CONTEXT = 256
# Root mean square of the differences, relative to the spread of transformers' numbers.
TOLERANCE = 5e-3  # llama.cpp has GELU in a table of f16
SAME = 1e-4

# Folders that `convert` refuses, with a part of its message.
REFUSED = {
    "mamba2-bounds": "no key for its mixers with a state",
    "falcon_h1-multipliers": "no key for its mixers with a state",
    "modernbert-rank": "a classifier of the mean",
    "mpnet": "folders of `mpnet` models",
}

def uniform(name, count):
    """In [-0.5, 0.5), with 24 bits: the same as in make.py."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    z = np.uint64(value) + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2**-24) - np.float32(0.5), z


def write_folder(case, tokenizer, folder):
    """Writes a folder as hf.rs does."""
    (folder / "config.json").write_text(json.dumps(case["config"]))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    header, data = {}, []
    at = 0
    for name, center, spread, shape in case["tensors"]:
        values = uniform(name, int(np.prod(shape)))[0] * np.float32(spread) + np.float32(center)
        data.append(values.astype("<f4").tobytes())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(data[-1])]}
        at += len(data[-1])
    header = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"".join(data))


def problem(text):
    """Returns the line of a program's messages that says the most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if "error loading model: " in line]
    return causes[0].split("error loading model: ")[1] if causes else lines[-1] if lines else "no message"


def check(case, shared, logits, paguro, folder):
    """Returns the difference, infinite without numbers, and the notes of `convert`, or a remark and no difference."""
    name = case["name"]
    write_folder(case, shared["tokenizer"], folder)
    gguf = folder / "model.gguf"
    converted = subprocess.run([paguro, "convert", folder, gguf, "--json"], capture_output=True, text=True)
    if name in REFUSED and converted.returncode and REFUSED[name] in converted.stderr:
        return None, [], f"refused: {problem(converted.stderr)}"
    if converted.returncode or name in REFUSED:
        return np.inf, [], problem(converted.stderr)
    notes = json.loads(converted.stdout)["differences_in_llama_cpp"]
    class_ = case["config"]["architectures"][0]
    positions = shared["positions"]
    tokens = [int(z) % shared["vocab"] for z in uniform("tokens", max(positions) + 1)[1]]
    kind = ["rank"] if class_.endswith("Classification") else ["rows"] if class_.endswith("Model") else []
    kind = [] if class_ == "GPT2LMHeadModel" else kind
    out = folder / "out.f32"
    ran = subprocess.run([logits, gguf, str(CONTEXT), out, ",".join(map(str, positions)), *kind, *map(str, tokens)],
                         capture_output=True, text=True)
    if ran.returncode:
        return np.inf, notes, f"llama.cpp: {problem(ran.stderr)}"
    expected = np.fromfile(HERE / "hf" / f"{name}.logits", "<f4")
    found = np.fromfile(out, "<f4")
    if case["config"].get("type_vocab_size", 1) > 1 and kind == ["rank"]:
        return None, notes, "loaded; llama.cpp has no token types"
    spread = expected.std() if expected.size > 1 else 1.0
    return float(np.sqrt(np.mean((found - expected)**2)) / spread), notes, ""


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    logits, paguro, *chosen = sys.argv[1:]
    shared = json.loads((HERE / "hf" / "cases.json").read_text())
    failures = []
    for case in shared["cases"]:
        name = case["name"]
        if chosen and name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            error, notes, remark = check(case, shared, logits, paguro, pathlib.Path(folder))
        failed = error is not None and (error <= SAME if notes else not error <= TOLERANCE)
        failures += [name] * failed
        number = "" if error is None else f"{error:.1e}"
        verdict = "FAILED" if failed else "noted" if notes else "ok"
        print(f"{name:24} {number:8} {verdict:7} {'; '.join(filter(None, [*notes, remark]))}", flush=True)
    if failures:
        sys.exit(f"{len(failures)} failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()
