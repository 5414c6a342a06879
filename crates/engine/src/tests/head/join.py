#!/usr/bin/env python3
"""Writes a folder with a model and its head for multi-token prediction: join.py MODEL_FOLDER head.safetensors OUT"""
import json
import pathlib
import shutil
import struct
import sys


def tensors(path):
    """Returns name, entry and bytes of each tensor of a file of safetensors."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for name, entry in json.loads(data[8:end]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, entry, data[end + first : end + last]


def main():
    model, head, out = map(pathlib.Path, sys.argv[1:])
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}, indent=2))
    header, parts, at = {}, [], 0
    for path in sorted(model.glob("*.safetensors")) + [head]:
        for name, entry, data in tensors(path):
            header[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [at, at + len(data)]}
            parts.append(data)
            at += len(data)
    text = json.dumps(header).encode()
    (out / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


if __name__ == "__main__":
    main()
