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
    "IQ1_S": [0], "IQ1_M": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0],
    "TQ1_0": [52], "TQ2_0": [64], "NVFP4": [], "Q1_0": [0], "Q2_0": [0],
}
# Of formats that the package lists without a decoder: the C code of llama.cpp (ggml-quants.c), in Python.
SIZES = {"NVFP4": (64, 36), "Q1_0": (128, 18), "Q2_0": (64, 18)}


def decode_bits(data, length, bits):
    blocks = data.reshape(-1, 18)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    q = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(len(blocks), length, bits)
    q = (q * (1 << np.arange(bits))).sum(axis=2).astype(np.float32)
    return d * (2 * q - 1) if bits == 1 else d * (q - 1)



# Scales of a size that occurs, one that is negative, one that is subnormal.
SCALES = [0.0123, -0.37, 3.0e-6, 1.5]

with open("vectors.txt", "w") as file:
    for name in ["F32", "F16", "BF16", *HALVES]:
        kind = getattr(gguf.GGMLQuantizationType, name, None)
        length, size = SIZES[name] if name in SIZES else gguf.GGML_QUANT_SIZES[kind]
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
            if name == "NVFP4":
                # Subnormal and normal scales, the largest that is finite, and one with the bit that is no sign.
                blocks[0, :4], blocks[1, :4] = [0, 1, 7, 8], [56, 126, 128 + 40, 119]
            if name == "IQ1_M":
                for i, block in enumerate(blocks):
                    d = int(np.frombuffer(np.float16(SCALES[i]).tobytes(), np.uint16)[0])
                    for j in range(4):
                        block[49 + 2 * j] = block[49 + 2 * j] & 15 | (d >> 4 * j & 15) << 4
            data = blocks.reshape(1, -1)
        if name in ("Q1_0", "Q2_0"):
            decoded = decode_bits(data, length, int(name[1])).astype("<f4").reshape(-1)
        else:
            decoded = dequantize(data, kind).astype("<f4").reshape(-1)
        assert np.isfinite(decoded).all(), name
        if name == "NVFP4":
            # The same with a scale of the whole matrix in front of each block.
            whole = np.float32(0.0123)
            scaled = np.concatenate([np.tile(whole.reshape(1, 1).view(np.uint8), (len(blocks), 1)), blocks], axis=1)
            scales = gguf.quants.NVFP4.ue4m3_to_fp32(blocks[:, :4]).astype(np.float32)
            with np.errstate(divide="ignore", invalid="ignore"):
                numbers = np.where(scales[:, :, None] == 0, 0, decoded.reshape(-1, 4, 16) / scales[:, :, None])
            values = ((whole * scales)[:, :, None] * numbers.astype(np.float32)).astype("<f4")
            last = f"NVFP4_SCALED {scaled.tobytes().hex()} {values.tobytes().hex()}\n"
        file.write(f"{name} {data.tobytes().hex()} {decoded.tobytes().hex()}\n")
    file.write(last)
