#!/usr/bin/env python3
"""Writes a first corpus for the fuzz targets: tiny models, chat templates and tokenizers of the tests.

usage: seeds.py [CORPUS]

CORPUS is the folder with a folder for each target (corpus, beside this file, where `cargo fuzz` looks for it). Models have weights of
zeros and at most 520 kB; of larger ones there are only the headers. Needs `pip install gguf`.
"""
import json
import math
import pathlib
import struct
import sys
import tempfile

try:
    import gguf
except ImportError as missing:
    sys.exit(f"{__doc__}\nerror: {missing}; run `pip install gguf`")

if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
    sys.exit(__doc__)
HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
CASES = ROOT / "app/tests/architectures"
LARGEST = 520_000


def put(target, name, data):
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "corpus") / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def gguf_size(header):
    """Bytes of a file of which only the header is kept."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(header)
        file.truncate(64 << 20)
        file.flush()
        return max(tensor.data_offset + tensor.n_bytes for tensor in gguf.GGUFReader(file.name).tensors)


for path in sorted((CASES / "cases").glob("*.header")):
    header = path.read_bytes()
    put("gguf", f"{path.stem}-header", header)
    try:
        size = gguf_size(header)
    except ValueError:
        continue  # a format that the package does not know
    if size <= LARGEST:
        put("gguf", path.stem, header.ljust(size, b"\0"))

folders = json.loads((CASES / "hf/cases.json").read_text())
for case in folders["cases"]:
    tensors, end = {}, 0
    for name, *_, shape in case["tensors"]:
        begin, end = end, end + 2 * math.prod(shape)
        tensors[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    if end <= LARGEST:
        header = json.dumps(tensors).encode()
        weights = struct.pack("<Q", len(header)) + header + bytes(end)
        put("hf_folder", case["name"], json.dumps(case["config"]).encode() + b"\0" + weights)

templates = json.loads((HERE.parent / "tests/it/templates/expected.json").read_text())
for number, template in enumerate(templates["synthetic"]):
    put("template", f"synthetic-{number}", template["source"].encode())

put("tokenizer", "bpe.json", json.dumps(folders["tokenizer"]).encode())
VOCABULARY = "1a\n1b\n1ab\n3<s>\n3</s>\n6<0x41>\n1▁\n1Ġ\n1Ċ\n1c\n1abc\n\na b\nab c\n"
for kind in range(12):
    put("tokenizer", f"gguf-{kind}", bytes([kind]) + VOCABULARY.encode())
