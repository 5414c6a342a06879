#!/usr/bin/env python3
"""Writes a GGUF file in the shape of a hybrid model or of Gemma 4 with random quantized blocks. Speed does not depend on their values.

usage: random_hybrid.py OUT.gguf qwen35-1b|qwen35-4b-mtp|qwen35-1b-mtp|gemma4-e2b --vocab VOCAB.gguf

The mixture is Q4_K_M's. The tokenizer is copied from VOCAB.gguf, a file that has only one (such files are part of
llama.cpp's source: models/ggml-vocab-qwen2.gguf). The tensors are those of app/tests/architectures/make.py.
Needs `pip install gguf numpy`.
"""
import argparse
import pathlib
import sys

try:
    import gguf
    import numpy as np
except ImportError as missing:
    sys.exit(f"{__doc__}\nerror: {missing}; run `pip install gguf numpy`")

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "app/tests/architectures"))
import make
from make import Gemma4, Model, Type


SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0], "rope.freq_base": 1e7}
SHAPES = {
    "qwen35-4b-mtp": Model("qwen35-4b-mtp", head=True, arch="qwen35", hidden=2560, layers=33, heads=16, kv_heads=4, head_dim=256, ffn=9216, tied=True,
                              mixers="ddda" * 8 + "a", delta=(16, 32, 128), qk_norm="head", rotated=64, attention_gate=True, trained=32768,
                              ffn_norm="post_attention_norm", keys=SECTIONS),
    "qwen35-1b-mtp": Model("qwen35-1b-mtp", head=True, arch="qwen35", hidden=1280, layers=25, heads=8, kv_heads=2, head_dim=256, ffn=4096, tied=True,
                              mixers="ddda" * 6 + "a", delta=(16, 16, 128), qk_norm="head", rotated=64, attention_gate=True, trained=32768,
                              ffn_norm="post_attention_norm", keys=SECTIONS),
    # Qwen3.5-0.8B with a wider network.
    "qwen35-1b": Model("qwen35-1b", arch="qwen35", hidden=1280, layers=24, heads=8, kv_heads=2, head_dim=256, ffn=4096, tied=True,
                       mixers="ddda" * 6, delta=(16, 16, 128), qk_norm="head", rotated=64, attention_gate=True, trained=32768,
                       ffn_norm="post_attention_norm", keys=SECTIONS),
    "gemma4-e2b": Gemma4("gemma4-e2b", hidden=1536, heads=8, ffn=6144, pattern="llllf" * 7, local=(1, 256), full=(1, 512),
                         shared_kv=20, layer_embed=256, wide=True, trained=32768, keys={"attention.sliding_window": 512}),
}
# Bytes of a block, and where its scales are in half precision.
BLOCKS = {Type.Q4_K: (144, (0, 2)), Type.Q6_K: (210, (208,))}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out")
parser.add_argument("shape", choices=SHAPES)
parser.add_argument("--vocab", required=True)
options = parser.parse_args()
model = SHAPES[options.shape]
fields = [field for name, field in gguf.GGUFReader(options.vocab).fields.items() if name.startswith("tokenizer.")]
make.VOCAB = next(len(field.contents()) for field in fields if field.name == "tokenizer.ggml.tokens")
rng = np.random.default_rng(1234)


def pool(kind):
    """64 MB of random blocks, which larger matrices repeat."""
    size, scales = BLOCKS[kind]
    blocks = rng.integers(0, 256, ((64 << 20) // size, size), dtype=np.uint8)
    for at in scales:
        blocks[:, at:at + 2] = np.frombuffer(np.float16(0.0005).tobytes(), dtype=np.uint8)
    return blocks


POOLS = {kind: pool(kind) for kind in BLOCKS}


def kind_of(name, shape):
    """As the mixture Q4_K_M has it."""
    if len(shape) == 1 or "conv1d" in name or shape[-1] % 256:
        return Type.F32
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    outer = layer < model.layers // 8 or layer >= 7 * model.layers // 8 or (layer - model.layers // 8) % 3 == 2
    better = name == "token_embd.weight" or outer and ("attn_v." in name or "attn_qkv." in name or "ffn_down." in name)
    return Type.Q6_K if better else Type.Q4_K


writer = gguf.GGUFWriter(options.out, model.arch)
writer.add_name(f"random {options.shape}")
writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
ADD = {bool: writer.add_bool, str: writer.add_string, list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}
for key, value in model.metadata().items():
    ADD[type(value)](f"{model.arch}.{key}", value)
for field in fields:
    array = field.types[0] == gguf.GGUFValueType.ARRAY
    writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=field.types[1] if array else None)
for tensor in model.tensors():
    kind, count = kind_of(tensor.name, tensor.shape), int(np.prod(tensor.shape))
    if kind == Type.F32:
        data = (rng.random(tensor.shape, dtype=np.float32) - 0.5) * np.float32(tensor.spread) + np.float32(tensor.center)
    else:
        data = np.resize(POOLS[kind], (count // 256, BLOCKS[kind][0])).reshape(*tensor.shape[:-1], -1)
    writer.add_tensor(tensor.name, data, raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
