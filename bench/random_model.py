#!/usr/bin/env python3
"""Writes a GGUF file in the shape of a known model with random weights. Speed does not depend on the weights' values.

usage: random_model.py OUT.gguf tinyllama|llama-8b [--format Q4_K_M] [--vocab VOCAB.gguf]
       random_model.py OUT.gguf qwen3-30b-a3b|gpt-oss-20b|gpt-oss-120b [--layers 12] [--popular 1] [--vocab VOCAB.gguf]

qwen3-30b-a3b is written in the mixture Q4_K_M; gpt-oss-20b has experts in MXFP4 and all other matrices in Q8_0. The tokenizer is
copied from VOCAB.gguf; llama.cpp's source has such files (models/ggml-vocab-qwen2.gguf). Without one, the model has the
vocabulary size of the shape, and tokens without meaning. Needs `pip install gguf numpy`.

With --popular S, experts differ in popularity: the scores of one expert have a mean from a Gumbel distribution of standard deviation S
over experts, and a part of standard deviation 1 that depends on the token. With S = 1, an LRU of a third of 128 experts has 92 % of the
chosen ones, as reported for Qwen3 30B-A3B; with 0, 34 %. For this, attention and experts add next to nothing to the residual stream,
so that each layer's router sees the embedding of the token; one part of it is the same for all tokens. Measure with sampled tokens.
"""
import argparse, sys

try:
    import gguf
    import numpy as np
    from gguf import GGMLQuantizationType as Q
except ImportError as missing:
    sys.exit(f"{__doc__}\nerror: {missing}; run `pip install gguf numpy`")

SHAPES = {
    "tinyllama": dict(arch="llama", layers=22, hidden=2048, heads=32, kv_heads=4, head_dim=64, experts=0, ffn=5632, vocab=32000),
    "llama-8b": dict(arch="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, experts=0, ffn=14336, vocab=128256),
    "qwen3-30b-a3b": dict(arch="qwen3moe", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, used=8, ffn=768,
                          vocab=151936),
    "gpt-oss-120b": dict(arch="gpt-oss", layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, experts=128, used=4, ffn=2880,
                         vocab=201088),
    "gpt-oss-20b": dict(arch="gpt-oss", layers=24, hidden=2880, heads=64, kv_heads=8, head_dim=64, experts=32, used=4, ffn=2880,
                        vocab=201088),
}
# Formats of most matrices, and of the head and some others.
FORMATS = {"F16": (Q.F16, Q.F16), "Q8_0": (Q.Q8_0, Q.Q8_0), "Q4_K_M": (Q.Q4_K, Q.Q6_K)}
FORMATS |= {kind.name: (kind, Q.Q6_K) for kind in (Q.Q4_0, Q.Q6_K, Q.IQ2_XS, Q.IQ3_S, Q.IQ4_XS)}
# Scales with which weights have a standard deviation of about 0.025. With larger weights, or with a mean, activations grow so much
# that roundings change which position a row attends to.
TAME = {Q.Q4_K: 0.0001, Q.Q6_K: 0.00002, Q.Q8_0: 0.00035}
# Offsets of scales in half precision in a block, where they are not at its start alone.
SCALES = {Q.Q4_K: (0, 2), Q.Q6_K: (208,), Q.MXFP4: (), Q.F16: ()}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out")
parser.add_argument("shape", choices=SHAPES)
parser.add_argument("--format", choices=FORMATS, default="Q4_K_M", help="format of a model without experts")
parser.add_argument("--layers", type=int, help="fewer layers than the model has")
parser.add_argument("--popular", type=float, help="spread of the experts' popularity")
parser.add_argument("--vocab", help="a GGUF file with a tokenizer")
options = parser.parse_args()
shape = SHAPES[options.shape]
layers = options.layers or shape["layers"]
oss, dense = shape["arch"] == "gpt-oss", shape["experts"] == 0
rng = np.random.default_rng(1234)
pools = {}


def blocks(kind, *dims, scale=0.0005):
    """Random blocks of a matrix with these dimensions, the inputs last. Beyond 64 MB they repeat."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(dims)) // elements
    if (kind, scale) not in pools:
        if kind == Q.F16:
            pool = (0.02 * rng.standard_normal((32 << 20, 1), dtype=np.float32)).astype(np.float16).view(np.uint8)
        else:
            pool = rng.integers(0, 256, (64 << 20) // size * size, dtype=np.uint8).reshape(-1, size)
        for at in SCALES.get(kind, (0,)):
            # The second scale of Q4_K is that of the minimum, 7.5 quants below zero.
            factor = 7.5 if at and kind == Q.Q4_K and options.popular is None else 1
            pool[:, at : at + 2] = np.frombuffer(np.float16(factor * scale).tobytes(), dtype=np.uint8)
        if kind == Q.MXFP4:
            pool[:, 0] = 121 if scale == 0.0005 else 121 + int(np.log2(scale / 0.0005))  # 2^-6 at 0.0005
        pools[kind, scale] = pool
    rows = dims[:-1] + (dims[-1] // elements * size,)
    pool = pools[kind, scale]
    if count >= len(pool) or options.popular is not None:
        return np.resize(pool, (count, size)).reshape(rows)
    first = int(rng.integers(len(pool) - count))
    return pool[first : first + count].reshape(rows)


w = gguf.GGUFWriter(options.out, shape["arch"])
w.add_name(f"random-{options.shape}")
w.add_context_length(32768)
w.add_embedding_length(shape["hidden"])
w.add_block_count(layers)
w.add_feed_forward_length(shape["ffn"])
if not dense:
    w.add_expert_feed_forward_length(shape["ffn"])
    w.add_expert_count(shape["experts"])
    w.add_expert_used_count(shape["used"])
w.add_head_count(shape["heads"])
w.add_head_count_kv(shape["kv_heads"])
w.add_key_length(shape["head_dim"])
w.add_value_length(shape["head_dim"])
w.add_rope_dimension_count(shape["head_dim"])
w.add_rope_freq_base(1e6)
w.add_layer_norm_rms_eps(1e-6)
w.add_file_type(gguf.LlamaFileType["MOSTLY_MXFP4_MOE" if oss else f"MOSTLY_{options.format}"])
if oss:
    w.add_sliding_window(128)
tokens = shape["vocab"]
if options.vocab is None:
    # Control tokens, bytes, and letters in base 26.
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["".join(chr(97 + number // 26**digit % 26) for digit in range(4)) for number in range(tokens - len(words))]
    w.add_tokenizer_model("llama")
    w.add_token_list(words)
    w.add_token_scores([-float(number) for number in range(tokens)])
    w.add_token_types([2, 3, 3] + [6] * 256 + [1] * (tokens - 259))
for name, field in gguf.GGUFReader(options.vocab).fields.items() if options.vocab else ():
    if name.startswith("tokenizer."):
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        tokens = len(field.contents()) if name == "tokenizer.ggml.tokens" else tokens
        w.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[1] if array else None)

hidden, ffn, experts = shape["hidden"], shape["ffn"], shape["experts"]
q, kv = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
base, better = FORMATS["Q8_0"] if oss else FORMATS[options.format]


def matrix(name, kind, *dims):
    adds = name.endswith(("attn_output.weight", "ffn_down_exps.weight"))
    tame = TAME.get(kind, 0.0005)
    scale = tame if options.popular is None else 1e-7 if adds else 0.005 if name == "token_embd.weight" else 0.0005
    data = blocks(kind, *dims, scale=scale)
    if scale == 0.005:
        common = gguf.GGML_QUANT_SIZES[kind][1] * (256 // gguf.GGML_QUANT_SIZES[kind][0])
        data = np.array(data)
        data[:, :common] = data[0, :common]
        global embeddings
        embeddings = gguf.quants.dequantize(data[:512], kind)
    w.add_tensor(name, data, raw_dtype=kind)


def router():
    """Weights of a router. The first 256 elements of its input are the same for all tokens, up to their scale."""
    if options.popular is None:
        return 0.02 * rng.standard_normal((experts, hidden))
    of_expert = rng.gumbel(size=(experts, 1))
    of_expert = options.popular * (of_expert - of_expert.mean()) / of_expert.std()
    rows = embeddings / np.sqrt((embeddings**2).mean(axis=1, keepdims=True))
    common, rest = rows[:, :256].mean(axis=0), rows[:, 256:]
    of_token, mean = rng.standard_normal((experts, rest.shape[1])), rest.mean(axis=0)
    of_token -= np.outer(of_token @ mean, mean) / (mean @ mean)
    of_token /= (rest @ of_token.T).std()
    return np.hstack([of_expert * common / (common @ common), of_token])


def floats(name, *dims, one=0.0):
    w.add_tensor(name, (one + 0.02 * rng.standard_normal(dims)).astype(np.float32))


matrix("token_embd.weight", base, tokens, hidden)
for layer in range(layers):
    p = f"blk.{layer}."
    outer = layer < layers // 8 or layer >= 7 * layers // 8
    more = better if base == Q.Q4_K and (outer or (layer - layers // 8) % 3 == 2) else base
    floats(p + "attn_norm.weight", hidden, one=1.0)
    matrix(p + "attn_q.weight", base, q, hidden)
    matrix(p + "attn_k.weight", base, kv, hidden)
    matrix(p + "attn_v.weight", more, kv, hidden)
    matrix(p + "attn_output.weight", base, hidden, q)
    floats(p + ("post_attention_norm" if oss else "ffn_norm") + ".weight", hidden, one=1.0)
    if dense:
        matrix(p + "ffn_gate.weight", base, ffn, hidden)
        matrix(p + "ffn_up.weight", base, ffn, hidden)
        matrix(p + "ffn_down.weight", more, hidden, ffn)
        continue
    w.add_tensor(p + "ffn_gate_inp.weight", router().astype(np.float32))
    kinds = [Q.MXFP4] * 3 if oss else [base, base, more]
    for part, kind, dims in zip(("gate", "up", "down"), kinds, ((ffn, hidden), (ffn, hidden), (hidden, ffn))):
        matrix(p + f"ffn_{part}_exps.weight", kind, experts, *dims)
        if oss:
            floats(p + f"ffn_{part}_exps.bias", experts, dims[0])
    if oss:
        floats(p + "attn_sinks.weight", shape["heads"])
        floats(p + "ffn_gate_inp.bias", experts)
        for part, size in (("attn_q", q), ("attn_k", kv), ("attn_v", kv), ("attn_output", hidden)):
            floats(p + part + ".bias", size)
    else:
        floats(p + "attn_q_norm.weight", shape["head_dim"], one=1.0)
        floats(p + "attn_k_norm.weight", shape["head_dim"], one=1.0)
floats("output_norm.weight", hidden, one=1.0)
matrix("output.weight", better, tokens, hidden)
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
