#!/usr/bin/env python3
"""Writes vectors.txt: random valid blocks of every format, decoded by the Python package `gguf`.

One line a format: its name, the encoded bytes, the decoded elements as little-endian f32, both in hex. Run it in
this folder after `pip install gguf numpy`; the output is the same on every run.
"""

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

rng = np.random.default_rng(20240229)
# Byte offsets of the f16 fields in a block: the only bytes that are not valid with any content (they may hold
# infinities and NaNs).
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}
# Scales of a size that occurs, one that is negative, one that is subnormal.
SCALES = [0.0123, -0.37, 3.0e-6, 1.5]

with open("vectors.txt", "w") as file:
    for name in ["F32", "F16", "BF16", *HALVES]:
        kind = gguf.GGMLQuantizationType[name]
        length, size = gguf.GGML_QUANT_SIZES[kind]
        if name == "BF16":
            values = rng.standard_normal(16).astype(np.float32)
            data = quantize(values, kind).view(np.uint8).reshape(1, -1)
        elif name in ("F32", "F16"):
            data = rng.standard_normal(16).astype(np.float32 if name == "F32" else np.float16).view(np.uint8).reshape(1, -1)
        else:
            count = 4 if length == 32 else 2
            blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
            for i, block in enumerate(blocks):
                for j, at in enumerate(HALVES[name]):
                    scale = SCALES[(i + j) % len(SCALES)] * rng.uniform(0.5, 1.5)
                    block[at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
            if name == "MXFP4":
                blocks[:, 0] = [0, 1, 120, 252]  # both subnormal exponents, a common one, the largest that is finite
            data = blocks.reshape(1, -1)
        decoded = dequantize(data, kind).astype("<f4").reshape(-1)
        assert np.isfinite(decoded).all(), name
        file.write(f"{name} {data.tobytes().hex()} {decoded.tobytes().hex()}\n")
