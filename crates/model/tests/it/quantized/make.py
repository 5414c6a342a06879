#!/usr/bin/env python3
"""Writes cases.json: small matrices as quantized folders of Hugging Face have them, and the SHA-256 of their weights in
f32 by the definition of each scheme.

Packing and unpacking here are independent of crates/model/src/hf/quantized: numbers are drawn first, packed as the
writers of each scheme do (AutoAWQ, AutoGPTQ, compressed-tensors, MLX, ModelOpt), and the weights follow from the numbers.
Needs `pip install numpy ml_dtypes`. The output is the same on every run.
"""
import hashlib, json

import ml_dtypes
import numpy as np

rng = np.random.default_rng(20261127)
ROWS, COLS = 16, 128
F16, BF16, F8 = np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
NAMES = {"float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float32": "F32", "int32": "I32", "uint32": "U32",
         "uint8": "U8", "int8": "I8", "int64": "I64"}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
cases = []


def pack(numbers, bits, order=None):
    """Words of the last axis, the first number lowest."""
    per = 32 // bits
    groups = numbers.astype(np.uint64).reshape(*numbers.shape[:-1], -1, per)
    if order:
        groups = groups[..., order]
    return (groups << (np.arange(per, dtype=np.uint64) * np.uint64(bits))).sum(-1).astype(np.uint32)


def stream(numbers, bits):
    """Words of a stream of bits, lowest first."""
    flat = (numbers[..., None] >> np.arange(bits)) & 1
    return np.packbits(flat.reshape(len(numbers), -1).astype(np.uint8), axis=1, bitorder="little").view(np.uint32)


def scales(groups, dtype, rows=ROWS):
    return (rng.uniform(0.001, 0.02, (rows, groups)) * rng.choice([-1, 1], (rows, groups))).astype(dtype)


def add(name, config, tensors, weights, rounded=None):
    weights = np.asarray(weights, np.float32)
    if rounded is not None:
        weights = weights.astype(rounded).astype(np.float32)
    listed = [[key, NAMES[value.dtype.name], list(value.shape), np.ascontiguousarray(value).tobytes().hex()]
              for key, value in tensors.items()]
    weights = weights.astype("<f4") + np.float32(0)  # no negative zeros
    cases.append({"name": name, "config": config, "tensors": listed, "shape": weights.shape,
                  "first": [float(x) for x in weights.flat[:4]], "sha256": hashlib.sha256(weights.tobytes()).hexdigest()})


def spread(per_group, group):
    return np.repeat(per_group, group, axis=1)


# AWQ: [in, out / 8] words whose nibble i is column [0, 2, 4, 6, 1, 3, 5, 7][i]; zero points alike.
for group in (32, 64, 128):
    q, z = rng.integers(0, 16, (ROWS, COLS)), rng.integers(0, 16, (ROWS, COLS // group))
    z[0], q[0] = 15, 0  # the edges
    z[1], q[1] = 0, 15
    s = scales(COLS // group, F16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    add(f"awq-{group}", {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        {"m.qweight": pack(q.T, 4, order).view(np.int32), "m.qzeros": pack(z.T, 4, order).view(np.int32), "m.scales": s.T},
        spread(s.astype(np.float32), group) * (q - spread(z, group)))

# GPTQ: [in / 8, out] words; zero points less one in the first format.
for name, bits, group, symmetric, order, version in [
    ("sym", 4, 128, True, False, "gptq"), ("sym-32", 4, 32, True, False, "gptq_v2"), ("asym", 4, 64, False, False, "gptq"),
    ("act-order", 4, 32, True, True, "gptq"), ("plain-g_idx", 4, 32, True, None, "gptq"), ("8-bit", 8, 64, True, False, "gptq"),
    ("8-bit-asym", 8, 64, False, False, "gptq_v2"), ("2-bit", 2, 32, True, False, "gptq"),
]:
    top, middle = 1 << bits, 1 << bits - 1
    q = rng.integers(0, top, (ROWS, COLS))
    z = np.full((ROWS, COLS // group), middle)
    if not symmetric:
        z = rng.integers(1, top, z.shape)
    index = np.arange(COLS) // group
    if order:
        rng.shuffle(index)
    s = scales(COLS // group, F16)
    stored = z - 1 if version == "gptq" else z
    tensors = {"m.qweight": np.ascontiguousarray(pack(q, bits).T).view(np.int32),
               "m.qzeros": pack(stored.T, bits).view(np.int32), "m.scales": s.T}
    if order is not False:
        tensors["m.g_idx"] = index.astype(np.int32)
    weights = s.astype(np.float32)[:, index] * (q - z[:, index])
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": bool(order),
              "checkpoint_format": version}
    add(f"gptq-{name}", config, tensors, weights, F16 if order or name == "8-bit-asym" else None)


# compressed-tensors.
def compressed(format, kind, bits, symmetric=True):
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": "group"}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}}


for bits, group, symmetric, dtype in [(4, 128, True, BF16), (4, 32, False, F16), (8, 128, True, BF16)]:
    q = rng.integers(0, 1 << bits, (ROWS, COLS))
    z = np.full((ROWS, COLS // group), 1 << bits - 1) if symmetric else rng.integers(0, 16, (ROWS, COLS // group))
    s = scales(COLS // group, dtype)
    tensors = {"m.weight_packed": pack(q, bits).view(np.int32), "m.weight_scale": s,
               "m.weight_shape": np.array([ROWS, COLS], np.int64)}
    if not symmetric:
        tensors["m.weight_zero_point"] = np.ascontiguousarray(pack(z.T, bits).T).view(np.int32)
    add(f"packed-{bits}{'' if symmetric else '-asym'}", compressed("pack-quantized", "int", bits, symmetric), tensors,
        spread(s.astype(np.float32), group) * (q - spread(z, group)))

q, s = rng.integers(-128, 128, (ROWS, COLS)).astype(np.int8), scales(1, BF16)
add("int8", compressed("int-quantized", "int", 8), {"m.weight": q, "m.weight_scale": s}, s.astype(np.float32) * q)

every = np.arange(256, dtype=np.uint8)
every = np.where(every & 0x7F == 0x7F, 0, every).astype(np.uint8)  # without NaN
q = np.concatenate([every, rng.permutation(every), rng.choice(every, ROWS * COLS - 512)]).reshape(ROWS, COLS).view(F8)
s = scales(1, np.float32)
add("fp8-rows", compressed("float-quantized", "float", 8), {"m.weight": q, "m.weight_scale": s},
    q.astype(np.float32) * s, BF16)
s = scales(1, np.float32, 1)[0]
add("fp8-whole", {"quant_method": "modelopt", "quant_algo": "FP8"}, {"m.weight": q, "m.weight_scale": s, "m.input_scale": s},
    q.astype(np.float32) * s, BF16)

# FP8 in blocks of 128, the last ones smaller, as Qwen and DeepSeek have it.
q = rng.choice(every, (136, 160)).astype(np.uint8).view(F8)
for dtype in (np.float32, BF16):
    s = scales(2, dtype, 2)
    whole = np.repeat(np.repeat(s.astype(np.float32), 128, 0), 128, 1)[:136, :160]
    add(f"fp8-blocks-{NAMES[s.dtype.name]}", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        {"m.weight": q, "m.weight_scale_inv": s}, q.astype(np.float32) * whole, BF16)

# NVFP4: the first number of a byte in its low half.
q = rng.integers(0, 16, (ROWS, COLS))
scale = rng.choice(every[1:0x7F], (ROWS, COLS // 16)).astype(np.uint8).view(F8)
packed = (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8)
whole = np.array([1234.5], np.float32)
per = spread(scale.astype(np.float32), 16)
add("nvfp4-compressed", compressed("nvfp4-pack-quantized", "float", 4),
    {"m.weight_packed": packed, "m.weight_scale": scale, "m.weight_global_scale": whole,
     "m.input_global_scale": whole}, E2M1[q] * (per * (np.float32(1) / whole)))
whole = np.array(0.000321, np.float32)
add("nvfp4-modelopt", {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"m.weight": packed, "m.weight_scale": scale, "m.weight_scale_2": whole, "m.input_scale": whole},
    E2M1[q] * (per * whole))

# MLX: streams of bits.
for bits, group, dtype in [(2, 64, F16), (3, 32, F16), (4, 32, F16), (4, 64, BF16), (4, 128, F16), (5, 64, F16), (6, 64, BF16), (6, 128, F16), (8, 64, BF16)]:
    q = rng.integers(0, 1 << bits, (ROWS, COLS))
    s, b = scales(COLS // group, dtype), scales(COLS // group, dtype)
    weights = spread(s.astype(np.float32), group) * q.astype(np.float32) + spread(b.astype(np.float32), group)
    add(f"mlx-{bits}-{group}", {"group_size": group, "bits": bits}, {"m.weight": stream(q, bits), "m.scales": s, "m.biases": b},
        weights, dtype if bits in (6, 8) else None)

# bitsandbytes: flattened matrices in blocks of 64, the first number of a byte in its high half; scales as floats, or again as bytes.
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
                -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
                0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)
for nested, dtype in [(False, BF16), (True, F16)]:
    rows, cols, block = 24, 160, 64
    q = rng.integers(0, 16, rows * cols)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": dtype.__name__, "shape": [rows, cols]}
    tensors = {"m.weight": (q[::2] << 4 | q[1::2]).astype(np.uint8)[:, None], "m.weight.quant_map": NF4}
    if nested:
        values, offset = np.linspace(-1, 1, 256).astype(np.float32), 0.0625
        byte = rng.integers(0, 256, rows * cols // block).astype(np.uint8)
        factors = rng.uniform(0.01, 0.05, (len(byte) + 31) // 32).astype(np.float32)
        absmax = values[byte] * np.repeat(factors, 32)[:len(byte)] + np.float32(offset)
        state |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"m.weight.absmax": byte, "m.weight.nested_quant_map": values, "m.weight.nested_absmax": factors}
    else:
        absmax = rng.uniform(0.01, 0.1, rows * cols // block).astype(np.float32)
        tensors["m.weight.absmax"] = absmax
    tensors["m.weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    add(f"bitsandbytes-nf4{'-nested' if nested else ''}",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}, tensors,
        (NF4[q] * np.repeat(absmax, block)).reshape(rows, cols), dtype)
q, largest = rng.integers(-127, 128, (ROWS, COLS)).astype(np.int8), rng.uniform(0.1, 2, ROWS).astype(np.float32)
add("bitsandbytes-int8", {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True},
    {"m.weight": q, "m.SCB": largest, "m.weight_format": np.array(0, np.uint8)},
    (largest * np.float32(1 / 127)).astype(F16).astype(np.float32)[:, None] * q)

with open("cases.json", "w") as file:
    file.write("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")
