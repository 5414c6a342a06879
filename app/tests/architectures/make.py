#!/usr/bin/env python3
"""Writes the files that app/tests/architectures/mod.rs reads: tiny random models, and llama.cpp's logits for them.

usage: make.py LOGITS_PROGRAM [CASE...]

LOGITS_PROGRAM is logits.cpp, compiled and linked with llama.cpp. Needs `pip install gguf numpy`.

A model's weights are a function of its tensors' names (`uniform` below), so of each GGUF file only the header is kept
here: metadata and the list of tensors. The test computes the same weights again, appends them, and has the file that
llama.cpp has read; a checksum says so.

The expected logits of a model with quantized weights are those of the same model with its weights decoded to f32,
where llama.cpp computes in f32 throughout. What quantizing the activations costs llama.cpp on the same file is kept as
`peer_error`: the measure of what it may cost us.
"""
import dataclasses, json, pathlib, subprocess, sys, tempfile, zlib

import gguf
import numpy as np

HERE = pathlib.Path(__file__).parent
VOCAB = 301  # not a multiple of anything
# Of the logits that are kept: around the edges of pages and of the window.
NEAR = (0, 1, 15, 16, 31, 32, 33, 47, 64, 95, 96)
FAR = (0, 299, 300, 301, 511, 512, 513, 700, 1023, 1024, 1099)
Type = gguf.GGMLQuantizationType


# --- Random numbers: SplitMix64, counted; app/tests/architectures/weights.rs has the same.

def hash_name(name):
    value = 0xCBF29CE484222325  # FNV-1a
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def bits(name, count):
    z = np.uint64(hash_name(name)) + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(name, count):
    """In [-0.5, 0.5), with 24 bits."""
    return (bits(name, count) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24) - np.float32(0.5)


# --- Blocks of quantized weights: random bytes, with scales of a sensible size put in.
# Offset of each f16 scale in a block, and its size as a multiple of the block's: a minimum is such that the block's
# mean is near zero. Formats without a minimum have scales of both signs.

BLOCKS = {
    "Q4_0": [(0, 1.0)], "Q4_1": [(0, 1.0), (2, -7.5)], "Q5_0": [(0, 1.0)], "Q5_1": [(0, 1.0), (2, -15.5)],
    "Q8_0": [(0, 1.0)], "Q2_K": [(80, 1.0), (82, 1.5)], "Q3_K": [(108, 1.0)], "Q4_K": [(0, 1.0), (2, 7.5)],
    "Q5_K": [(0, 1.0), (2, 15.5)], "Q6_K": [(208, 1.0)], "IQ4_NL": [(0, 1.0)], "IQ4_XS": [(0, 1.0)],
    "IQ1_S": [(0, 1.0)], "IQ2_XXS": [(0, 1.0)], "IQ2_XS": [(0, 1.0)], "IQ2_S": [(0, 1.0)], "IQ3_XXS": [(0, 1.0)],
    "IQ3_S": [(0, 1.0)], "TQ1_0": [(52, 1.0)], "TQ2_0": [(64, 1.0)],
    "IQ1_M": [],  # the four bits of its scale are the upper ones of four words
    "MXFP4": [], "NVFP4": [],  # their scales are bytes
}
BYTES = {Type.MXFP4: 1, Type.NVFP4: 4}  # bytes of scales in front of a block


def blocks(name, kind, count, scale):
    bytes_per_block = gguf.GGML_QUANT_SIZES[kind][1]
    size = count * bytes_per_block
    data = bits(name, -(-size // 8)).view(np.uint8)[:size].reshape(count, bytes_per_block).copy()
    noise = uniform(name + ".scales", count)
    for offset, multiple in BLOCKS[kind.name]:
        value = np.float32(scale) * (np.float32(1) + noise)
        if len(BLOCKS[kind.name]) == 1:
            value = np.where(bits(name + ".signs", count) & np.uint64(1) == 1, -value, value)
        value = value * np.float32(multiple)
        data[:, offset:offset + 2] = value.astype(np.float16)[:, None].view(np.uint8)
    if kind in BYTES:
        scales = data[:, :BYTES[kind]]
        scales[:] = int(scale) + (scales & 3)
    if kind == Type.IQ1_M:
        value = (np.float32(scale) * (np.float32(1) + noise)).astype(np.float16).view(np.uint16)
        for i in range(4):
            data[:, 49 + 2 * i] = data[:, 49 + 2 * i] & 15 | (value >> 4 * i & 15) << 4
    return data


def scale_of(kind, std):
    """The scale that gives weights of this standard deviation; for MXFP4 an exponent, for NVFP4 an E4M3 number."""
    if kind in BYTES:
        return min(range(100, 130) if kind == Type.MXFP4 else range(124), key=lambda e: abs(np.log(gguf.dequantize(blocks("x", kind, 512, e), kind).std() / std)))
    unit = gguf.dequantize(blocks("x", kind, 512, 2**-6), kind).std() * 2**6
    return float(np.float32(std / unit))


# --- Models

@dataclasses.dataclass
class Tensor:
    name: str
    shape: tuple  # [out, in], or [width]
    kind: Type
    center: float  # of vectors and float matrices
    spread: float  # their range, or the scale of the blocks

    def data(self):
        count = int(np.prod(self.shape))
        if self.kind.name in BLOCKS:
            length = gguf.GGML_QUANT_SIZES[self.kind][0]
            return blocks(self.name, self.kind, count // length, self.spread).reshape(*self.shape[:-1], -1)
        values = uniform(self.name, count) * np.float32(self.spread) + np.float32(self.center)
        values = values.reshape(self.shape)
        if self.kind == Type.F16:
            return values.astype(np.float16)
        if self.kind == Type.BF16:
            return gguf.quantize(values, Type.BF16)
        return values


@dataclasses.dataclass
class Model:
    name: str
    arch: str = "llama"
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 96
    layers: int = 2
    tied: bool = False
    bias: tuple = ()  # which of q, k, v, o have one
    kind: Type = Type.F32  # of matrices
    kinds: tuple = ()  # if given, taken in turn
    keys: dict = dataclasses.field(default_factory=dict)  # "rope.freq_base": 1e6
    rotated: int | None = None
    factors: dict = dataclasses.field(default_factory=dict)  # tensor of RoPE factors: (center, spread)
    vocab: str = "spm"
    positions: tuple = NEAR
    norm_bias: bool = False  # of all norms of the residual stream
    before: bool = True  # norms before the branches
    after: bool = False  # and after them
    ffn_norm: str | None = "ffn_norm"  # the name of the second one, if there is one
    qk_norm: str = ""  # "head" or "row"
    gated: bool = True
    fused_ffn: bool = False
    fused_qkv: bool = False
    ffn_bias: bool = False
    head_bias: bool = False
    learned: bool = False  # positions
    sinks: bool = False
    experts: int = 0
    expert_ffn: int = 0
    dense: int = 0  # layers without experts
    shared: int = 0
    expert_bias: bool = False
    selection_bias: bool = False
    output_gate: bool = False
    mixers: str = ""  # of the layers: "a" is attention, "c" a short convolution, "d" a delta rule; empty is attention
    taps: int = 4  # of convolutions
    delta: tuple = ()  # key heads, value heads, and the size of both
    fused_ba: bool = False  # strengths and decays of delta rules in one matrix
    attention_gate: bool = False  # in one matrix with Q
    latent: tuple = ()  # of latent attention: rank of queries, latent vector, plain and rotated elements, values
    final_norm: str = "output_norm"
    context: int = 256  # of the run
    trained: int = 4096
    kind_of_rows: str = ""  # of encoders: "rows", or "mean" after their dense layers; of heads: "head"
    head: bool = False  # the last layer is a head for multi-token prediction
    dense_out: int = 0  # elements between the two dense layers after pooling
    peer_arch: str | None = None  # llama.cpp reads the same weights as this architecture, with these extras
    peer_keys: dict = dataclasses.field(default_factory=dict)
    peer_tensors: tuple = ()

    def tensors(self):
        gemma = self.arch.startswith("gemma")
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        turn = iter(range(10**6))
        out = []

        def matrix(name, rows, cols, std):
            kind = self.kinds[next(turn) % len(self.kinds)] if self.kinds else self.kind
            if kind.name in BLOCKS:
                out.append(Tensor(f"{name}.weight", (rows, cols), kind, 0.0, scale_of(kind, std)))
            else:
                out.append(Tensor(f"{name}.weight", (rows, cols), kind, 0.0, float(np.float32(std * 12**0.5))))

        def vector(name, width, center, spread):
            out.append(Tensor(name, (width,), Type.F32, center, spread))

        def norm(name, width, center=1.0):
            vector(f"{name}.weight", width, center, 0.5)
            if self.norm_bias:
                vector(f"{name}.bias", width, 0.0, 0.5)

        def stack(name, rows, cols, std):
            kind = self.kinds[next(turn) % len(self.kinds)] if self.kinds else self.kind
            scale = scale_of(kind, std) if kind.name in BLOCKS else float(np.float32(std * 12**0.5))
            out.append(Tensor(f"{name}.weight", (self.experts, rows, cols), kind, 0.0, scale))
            if self.expert_bias:
                out.append(Tensor(f"{name}.bias", (self.experts, rows), Type.F32, 0.1, 0.6))

        before = self.before
        matrix("token_embd", VOCAB, self.hidden, self.hidden**-0.5 if gemma else 0.3)
        if self.learned:
            out.append(Tensor("position_embd.weight", (self.trained, self.hidden), Type.F32, 0.0, 0.5))
        for name, (center, spread) in self.factors.items():
            vector(f"{name}.weight", (self.rotated or self.head_dim) // 2, center, spread)
        for layer in range(self.layers):
            p = f"blk.{layer}."
            if before:
                norm(p + "attn_norm", self.hidden)
            # Scores with a standard deviation of about two: attention that looks somewhere.
            sharp = 1.4 * self.hidden**-0.5
            mixer = self.mixers[layer] if self.mixers else "a"
            if mixer == "c":
                matrix(p + "shortconv.in_proj", 3 * self.hidden, self.hidden, sharp)
                out.append(Tensor(p + "shortconv.conv.weight", (self.hidden, self.taps), Type.F32, 0.0, 2.0))
                matrix(p + "shortconv.out_proj", self.hidden, self.hidden, self.hidden**-0.5)
            elif mixer == "d":
                key_heads, value_heads, size = self.delta
                channels, width = (2 * key_heads + value_heads) * size, value_heads * size
                matrix(p + "attn_qkv", channels, self.hidden, sharp)
                matrix(p + "attn_gate", width, self.hidden, sharp)
                out.append(Tensor(p + "ssm_conv1d.weight", (channels, self.taps), Type.F32, 0.0, 2.0))
                vector(p + "ssm_dt.bias", value_heads, 0.0, 3.0)
                # Some heads forget within a few tokens, others remember more than a hundred.
                vector(p + "ssm_a", value_heads, -0.13, 0.25)
                if self.fused_ba:
                    matrix(p + "ssm_ba", 2 * value_heads, self.hidden, sharp)
                else:
                    matrix(p + "ssm_beta", value_heads, self.hidden, sharp)
                    matrix(p + "ssm_alpha", value_heads, self.hidden, sharp)
                vector(p + "ssm_norm.weight", size, 1.0, 0.5)
                matrix(p + "ssm_out", self.hidden, width, width**-0.5)
            elif self.latent:
                rank, latent, plain, rotated, value = self.latent
                query = self.heads * (plain + rotated)
                if rank:
                    matrix(p + "attn_q_a", rank, self.hidden, self.hidden**-0.5)
                    vector(p + "attn_q_a_norm.weight", rank, 1.0, 0.5)
                    matrix(p + "attn_q_b", query, rank, 1.4 * rank**-0.5)
                else:
                    matrix(p + "attn_q", query, self.hidden, sharp)
                matrix(p + "attn_kv_a_mqa", latent + rotated, self.hidden, sharp)
                vector(p + "attn_kv_a_norm.weight", latent, 1.4, 0.5)
                for name, rows, cols in ("attn_k_b", latent, plain), ("attn_v_b", value, latent):
                    scale = scale_of(self.kind, latent**-0.5) if self.kind.name in BLOCKS else float(np.float32((12 / latent)**0.5))
                    out.append(Tensor(f"{p}{name}.weight", (self.heads, rows, cols), self.kind, 0.0, scale))
                matrix(p + "attn_output", self.hidden, self.heads * value, (self.heads * value)**-0.5)
            elif self.arch == "phi3" or self.fused_qkv:
                matrix(p + "attn_qkv", q + 2 * kv, self.hidden, sharp)
                if self.fused_qkv:
                    vector(p + "attn_qkv.bias", q + 2 * kv, 0.1, 1.0)
            else:
                q_rows = 2 * q if self.attention_gate else q
                for which, rows, std in ("q", q_rows, sharp), ("k", kv, sharp), ("v", kv, self.hidden**-0.5):
                    matrix(p + f"attn_{which}", rows, self.hidden, std)
                    if which in self.bias:
                        vector(p + f"attn_{which}.bias", rows, 0.1, 1.0)
            if mixer != "a":
                pass
            elif self.arch in ("qwen3", "gemma3") or self.qk_norm == "head":
                vector(p + "attn_q_norm.weight", self.head_dim, 1.4, 0.5)
                vector(p + "attn_k_norm.weight", self.head_dim, 1.4, 0.5)
            elif self.qk_norm == "row":
                vector(p + "attn_q_norm.weight", q, 1.4, 0.5)
                vector(p + "attn_k_norm.weight", kv, 1.4, 0.5)
            if self.sinks:
                vector(p + "attn_sinks.weight", self.heads, 1.0, 4.0)
            if mixer == "a" and not self.latent:
                matrix(p + "attn_output", self.hidden, q, q**-0.5)
            if "o" in self.bias:
                vector(p + "attn_output.bias", self.hidden, 0.1, 1.0)
            if gemma or self.after:
                norm(p + "post_attention_norm", self.hidden)
            if before and self.ffn_norm:
                norm(p + self.ffn_norm, self.hidden)
            if self.experts and layer >= self.dense:
                # A gap between experts that rounding does not close: a few large weights.
                out.append(Tensor(p + "ffn_gate_inp.weight", (self.experts, self.hidden), Type.F32, 0.0, 1.5))
                if self.expert_bias:
                    vector(p + "ffn_gate_inp.bias", self.experts, 0.0, 0.5)
                if self.selection_bias:
                    vector(p + "exp_probs_b.bias", self.experts, 0.0, 0.5)
                stack(p + "ffn_gate_exps", self.expert_ffn, self.hidden, self.hidden**-0.5)
                stack(p + "ffn_up_exps", self.expert_ffn, self.hidden, self.hidden**-0.5)
                stack(p + "ffn_down_exps", self.hidden, self.expert_ffn, 2 * self.expert_ffn**-0.5)
                if self.shared:
                    matrix(p + "ffn_gate_shexp", self.shared, self.hidden, self.hidden**-0.5)
                    matrix(p + "ffn_up_shexp", self.shared, self.hidden, self.hidden**-0.5)
                    matrix(p + "ffn_down_shexp", self.hidden, self.shared, 2 * self.shared**-0.5)
                if self.output_gate:
                    vector(p + "ffn_gate_inp_shexp.weight", self.hidden, 0.0, 1.0)
            else:
                if self.arch == "phi3" or self.fused_ffn:
                    matrix(p + "ffn_up", 2 * self.ffn, self.hidden, self.hidden**-0.5)
                else:
                    if self.gated:
                        matrix(p + "ffn_gate", self.ffn, self.hidden, self.hidden**-0.5)
                    matrix(p + "ffn_up", self.ffn, self.hidden, self.hidden**-0.5)
                    if self.ffn_bias:
                        vector(p + "ffn_up.bias", self.ffn, 0.1, 1.0)
                matrix(p + "ffn_down", self.hidden, self.ffn, 2 * self.ffn**-0.5)
                if self.ffn_bias:
                    vector(p + "ffn_down.bias", self.hidden, 0.1, 1.0)
            if gemma or self.after:
                norm(p + "post_ffw_norm", self.hidden)
        if self.head:
            matrix(p + "nextn.eh_proj", self.hidden, 2 * self.hidden, (2 * self.hidden)**-0.5)
            for name in "enorm", "hnorm", "shared_head_norm":
                norm(p + f"nextn.{name}", self.hidden)
        norm(self.final_norm, self.hidden)
        if self.dense_out:
            matrix("dense_2", self.dense_out, self.hidden, self.hidden**-0.5)
            matrix("dense_3", self.hidden, self.dense_out, self.dense_out**-0.5)
        if not self.tied:
            matrix("output", VOCAB, self.hidden, 3 * self.hidden**-0.5)
            if self.head_bias:
                vector("output.bias", VOCAB, 0.0, 1.0)
        return out

    def metadata(self):
        keys = {
            "context_length": self.trained, "embedding_length": self.hidden, "block_count": self.layers,
            "feed_forward_length": self.ffn, "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads, "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim, "rope.dimension_count": self.rotated or self.head_dim,
            "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5,
        }
        if self.norm_bias or self.arch == "cohere2":
            keys["attention.layer_norm_epsilon"] = 1e-5
            del keys["attention.layer_norm_rms_epsilon"]
        if self.learned:
            del keys["rope.dimension_count"], keys["rope.freq_base"]
        if self.experts:
            keys |= {"expert_count": self.experts, "expert_feed_forward_length": self.expert_ffn}
        if "c" in self.mixers:
            keys["attention.head_count_kv"] = [self.kv_heads if mixer == "a" else 0 for mixer in self.mixers]
            keys["shortconv.l_cache"] = self.taps
        if self.delta:
            key_heads, value_heads, size = self.delta
            keys |= {"ssm.conv_kernel": self.taps, "ssm.state_size": size, "ssm.group_count": key_heads,
                     "ssm.time_step_rank": value_heads, "ssm.inner_size": value_heads * size,
                     "attention.recurrent_layers": [mixer == "d" for mixer in self.mixers]}
        if self.latent:
            rank, latent, plain, rotated, value = self.latent
            keys |= {"attention.head_count_kv": 1, "attention.key_length": latent + rotated, "attention.value_length": latent,
                     "attention.key_length_mla": plain + rotated, "attention.value_length_mla": value,
                     "attention.kv_lora_rank": latent, "rope.dimension_count": rotated,
                     "attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": VOCAB}
            if rank:
                keys["attention.q_lora_rank"] = rank
        if self.dense_out:
            keys |= {"dense_2_feat_in": self.hidden, "dense_2_feat_out": self.dense_out,
                     "dense_3_feat_in": self.dense_out, "dense_3_feat_out": self.hidden}
        if self.dense:
            keys["leading_dense_block_count"] = self.dense
        if self.head:
            keys["nextn_predict_layers"] = 1
        return keys | self.keys

    def write(self, path, decoded=False, peer=False):
        arch = self.peer_arch if peer and self.peer_arch else self.arch
        writer = gguf.GGUFWriter(path, arch)
        writer.add_name("random weights")  # a name with phi-3 in it makes llama.cpp look for its tokens
        for key, value in (self.metadata() | (self.peer_keys if peer else {})).items():
            key = f"{arch}.{key}"
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        VOCABS[self.vocab](writer)
        if isinstance(self, Encoder):
            writer.add_token_type_count(self.types)
        for tensor in [*self.tensors(), *(self.peer_tensors if peer else ())]:
            data, kind = tensor.data(), tensor.kind
            if decoded and kind not in (Type.F32, Type.F16):
                data, kind = gguf.dequantize(data, kind), Type.F32
            elif decoded:
                data, kind = data.astype(np.float32), Type.F32
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@dataclasses.dataclass
class Mamba(Model):
    """Layers with scans: `s` is a scan, `a` attention, `h` both side by side, `-` neither."""
    scan: tuple = (1, 4, 16, 16)  # groups, heads, and elements of a head of B and x
    conv_bias: bool = True
    grouped_norm: bool = True
    networks: str = ""  # `-` for layers without a feed-forward network
    latent_experts: int = 0
    network_norm: str = "ffn_norm"

    def has_network(self, layer):
        return (self.networks or "x" * self.layers)[layer] != "-"

    def tensors(self):
        out = []

        def matrix(name, rows, cols, std, stack=()):
            spread = scale_of(self.kind, std) if self.kind.name in BLOCKS else float(np.float32(std * 12**0.5))
            out.append(Tensor(f"{name}.weight", (*stack, rows, cols), self.kind, 0.0, spread))

        def vector(name, shape, center=1.0, spread=0.5):
            out.append(Tensor(name, shape if isinstance(shape, tuple) else (shape,), Type.F32, center, spread))

        groups, heads, state, size = self.scan
        width, keys, hidden = heads * size, groups * state, self.hidden
        q, kv, sharp = self.heads * self.head_dim, self.kv_heads * self.head_dim, 1.4 * hidden**-0.5
        matrix("token_embd", VOCAB, hidden, 0.3)
        for layer, mixer in enumerate(self.mixers):
            p = f"blk.{layer}."
            if mixer != "-" or self.network_norm == "attn_norm":
                vector(p + "attn_norm.weight", hidden)
            if mixer in "sh":
                matrix(p + "ssm_in", 2 * (width + keys) + heads, hidden, sharp)
                vector(p + "ssm_conv1d.weight", (width + 2 * keys, self.taps), 0.0, 2.0)
                if self.conv_bias or self.arch in ("mamba2", "nemotron_h", "nemotron_h_moe"):
                    vector(p + "ssm_conv1d.bias", width + 2 * keys, 0.1, 0.6)
                vector(p + "ssm_dt.bias", heads, 0.0, 3.0)
                # Some heads forget within a few tokens, others remember more than a hundred.
                vector(p + "ssm_a", (heads, 1), -0.13, 0.25)
                vector(p + "ssm_d", (heads, 1), 0.8, 0.6)
                if self.grouped_norm:
                    vector(p + "ssm_norm.weight", (groups, width // groups))
                matrix(p + "ssm_out", hidden, width, width**-0.5)
            if mixer in "ah":
                for which, rows, std in ("q", q, sharp), ("k", kv, sharp), ("v", kv, hidden**-0.5):
                    matrix(p + f"attn_{which}", rows, hidden, std)
                matrix(p + "attn_output", hidden, q, q**-0.5)
            if not self.has_network(layer):
                continue
            if self.network_norm == "ffn_norm":
                # llama.cpp reads this one without a suffix in Falcon-H1.
                vector(p + ("ffn_norm" if self.arch == "falcon-h1" else "ffn_norm.weight"), hidden)
            gates = ("ffn_gate", "ffn_up") if self.gated else ("ffn_up",)
            if self.experts:
                row = self.latent_experts or hidden
                out.append(Tensor(p + "ffn_gate_inp.weight", (self.experts, hidden), Type.F32, 0.0, 1.5))
                if self.selection_bias:
                    vector(p + "exp_probs_b.bias", self.experts, 0.0, 0.5)
                if self.latent_experts:
                    matrix(p + "ffn_latent_down", row, hidden, hidden**-0.5)
                    matrix(p + "ffn_latent_up", hidden, row, row**-0.5)
                for name in gates:
                    matrix(p + name + "_exps", self.expert_ffn, row, row**-0.5, (self.experts,))
                matrix(p + "ffn_down_exps", row, self.expert_ffn, 2 * self.expert_ffn**-0.5, (self.experts,))
                if self.shared:
                    for name in gates:
                        matrix(p + name + "_shexp", self.shared, hidden, hidden**-0.5)
                    matrix(p + "ffn_down_shexp", hidden, self.shared, 2 * self.shared**-0.5)
            else:
                for name in gates:
                    matrix(p + name, self.ffn, hidden, hidden**-0.5)
                matrix(p + "ffn_down", hidden, self.ffn, 2 * self.ffn**-0.5)
        vector("output_norm.weight", hidden)
        if not self.tied:
            matrix("output", VOCAB, hidden, hidden**-0.5)
        return out

    def metadata(self):
        groups, heads, state, size = self.scan
        width = self.expert_ffn if self.experts else self.ffn
        attends = any(mixer in "ah" for mixer in self.mixers)
        keys = {
            "block_count": len(self.mixers), "context_length": self.trained, "embedding_length": self.hidden,
            "ssm.conv_kernel": self.taps, "ssm.inner_size": heads * size, "ssm.state_size": state,
            "ssm.time_step_rank": heads, "ssm.group_count": groups,
            "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": VOCAB,
            "attention.head_count": self.heads if attends else 0, "feed_forward_length": width if attends else 0,
        }
        if attends:
            keys |= {"attention.key_length": self.head_dim, "attention.value_length": self.head_dim,
                     "attention.head_count_kv": self.kv_heads, "rope.dimension_count": self.head_dim,
                     "rope.freq_base": 10000.0}
        if self.arch != "falcon-h1" and attends:
            keys["attention.head_count_kv"] = [self.kv_heads if mixer == "a" else 0 for mixer in self.mixers]
        if self.arch.startswith("nemotron"):
            keys |= {"feed_forward_length": [width if self.has_network(layer) else 0 for layer in range(len(self.mixers))],
                     "attention.layer_norm_epsilon": 1e-5}
        if self.experts:
            keys |= {"expert_count": self.experts}
            if self.shared:
                keys |= {"expert_shared_feed_forward_length": self.shared}
        return keys | self.keys


def nemotron(name, **more):
    return Mamba(name, arch=more.pop("arch", "nemotron_h"), gated=False, network_norm="attn_norm", vocab="llama3", **more)


@dataclasses.dataclass
class Encoder(Model):
    """BERT's kind."""
    layers: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    types: int = 2
    moe_every: int = 0
    kind_of_rows: str = "rows"

    def tensors(self):
        out, hidden, ffn = [], self.hidden, self.ffn

        def matrix(name, rows, cols, std, *stack):
            out.append(Tensor(f"{name}.weight", (*stack, rows, cols), Type.F32, 0.0, float(np.float32(std * 12**0.5))))

        def vector(name, width, center, spread):
            out.append(Tensor(name, (width,), Type.F32, center, spread))

        def norm(name):
            vector(f"{name}.weight", hidden, 1.0, 0.5)
            vector(f"{name}.bias", hidden, 0.0, 0.5)

        matrix("token_embd", VOCAB, hidden, 0.3)
        matrix("token_types", self.types, hidden, 0.3)
        norm("token_embd_norm")
        for layer in range(self.layers):
            p = f"blk.{layer}."
            for which, std in ("q", 1.4), ("k", 1.4), ("v", 1.0):
                matrix(p + f"attn_{which}", hidden, hidden, std * hidden**-0.5)
                vector(p + f"attn_{which}.bias", hidden, 0.1, 1.0)
            matrix(p + "attn_output", hidden, hidden, hidden**-0.5)
            vector(p + "attn_output.bias", hidden, 0.1, 1.0)
            norm(p + "attn_output_norm")
            if self.moe_every and layer % self.moe_every == 1:
                out.append(Tensor(p + "ffn_gate_inp.weight", (self.experts, hidden), Type.F32, 0.0, 1.5))
                matrix(p + "ffn_up_exps", ffn, hidden, hidden**-0.5, self.experts)
                matrix(p + "ffn_down_exps", hidden, ffn, 2 * ffn**-0.5, self.experts)
            else:
                matrix(p + "ffn_up", 2 * ffn if self.fused_ffn else ffn, hidden, hidden**-0.5)
                if not self.fused_ffn:
                    vector(p + "ffn_up.bias", ffn, 0.1, 1.0)
                matrix(p + "ffn_down", hidden, ffn, 2 * ffn**-0.5)
                vector(p + "ffn_down.bias", hidden, 0.1, 1.0)
            norm(p + "layer_output_norm")
        return out

    def metadata(self):
        keys = {
            "context_length": self.trained, "embedding_length": self.hidden, "block_count": self.layers,
            "feed_forward_length": self.ffn, "attention.head_count": self.heads, "attention.layer_norm_epsilon": 1e-12,
            "attention.causal": False,
        }
        if self.experts:
            keys |= {"expert_count": self.experts, "moe_every_n_layers": self.moe_every}
        return keys | self.keys


GRANITE = {"logit_scale": 4.0, "residual_scale": 0.4, "embedding_scale": 3.0, "attention.scale": 0.11}


@dataclasses.dataclass
class Gemma4(Model):
    """Layers of two kinds: `l` has a window, `f` has none."""
    arch: str = "gemma4"
    tied: bool = True
    pattern: str = "llflfllf"
    local: tuple = (2, 32)  # K/V heads, and elements of one
    full: tuple = (1, 64)
    shared_kv: int = 0
    layer_embed: int = 0
    keys_as_values: bool = False
    wide: bool = False  # feed-forward networks of layers that share K and V

    def ffn_of(self, layer):
        return 2 * self.ffn if self.wide and layer >= len(self.pattern) - self.shared_kv else self.ffn

    def tensors(self):
        out = []

        def matrix(name, rows, cols, std, stack=()):
            spread = scale_of(self.kind, std) if self.kind.name in BLOCKS else float(np.float32(std * 12**0.5))
            out.append(Tensor(f"{name}.weight", (*stack, rows, cols), self.kind, 0.0, spread))

        def vector(name, width, center=1.0, spread=0.5):
            out.append(Tensor(name, (width,), Type.F32, center, spread))

        hidden, layers = self.hidden, len(self.pattern)
        matrix("token_embd", VOCAB, hidden, hidden**-0.5)
        vector("rope_freqs.weight", self.full[1] // 2, 4.5, 7.0)
        vector("output_norm.weight", hidden)
        if self.layer_embed:
            matrix("per_layer_token_embd", VOCAB, layers * self.layer_embed, self.layer_embed**-0.5)
            matrix("per_layer_model_proj", layers * self.layer_embed, hidden, hidden**-0.5)
            vector("per_layer_proj_norm.weight", self.layer_embed)
        for layer, kind in enumerate(self.pattern):
            p, ffn = f"blk.{layer}.", self.ffn_of(layer)
            kv_heads, head_dim = self.local if kind == "l" else self.full
            for name in "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm":
                vector(f"{p}{name}.weight", hidden)
            # Scores are not divided by anything.
            vector(p + "attn_q_norm.weight", head_dim, 0.5, 0.3)
            matrix(p + "attn_q", self.heads * head_dim, hidden, hidden**-0.5)
            if layer < layers - self.shared_kv:
                vector(p + "attn_k_norm.weight", head_dim, 0.5, 0.3)
                matrix(p + "attn_k", kv_heads * head_dim, hidden, hidden**-0.5)
                if kind == "l" or not self.keys_as_values:
                    matrix(p + "attn_v", kv_heads * head_dim, hidden, hidden**-0.5)
            matrix(p + "attn_output", hidden, self.heads * head_dim, (self.heads * head_dim)**-0.5)
            matrix(p + "ffn_gate", ffn, hidden, hidden**-0.5)
            matrix(p + "ffn_up", ffn, hidden, hidden**-0.5)
            matrix(p + "ffn_down", hidden, ffn, 2 * ffn**-0.5)
            if self.experts:
                for name in "post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2":
                    vector(f"{p}{name}.weight", hidden)
                # A gap between experts that rounding does not close.
                out.append(Tensor(p + "ffn_gate_inp.weight", (self.experts, hidden), Type.F32, 0.0, 1.5))
                vector(p + "ffn_gate_inp.scale", hidden, 8.0, 4.0)
                vector(p + "ffn_down_exps.scale", self.experts)
                matrix(p + "ffn_gate_up_exps", 2 * self.expert_ffn, hidden, hidden**-0.5, (self.experts,))
                matrix(p + "ffn_down_exps", hidden, self.expert_ffn, 2 * self.expert_ffn**-0.5, (self.experts,))
            if self.layer_embed:
                matrix(p + "inp_gate", self.layer_embed, hidden, hidden**-0.5)
                matrix(p + "proj", hidden, self.layer_embed, self.layer_embed**-0.5)
                vector(p + "post_norm.weight", hidden)
            vector(p + "layer_output_scale.weight", 1, 0.9, 0.2)
        return out

    def metadata(self):
        self.layers, self.head_dim = len(self.pattern), self.full[1]
        keys = super().metadata() | {
            "attention.sliding_window": LOCAL_WINDOW, "attention.sliding_window_pattern": [k == "l" for k in self.pattern],
            "attention.head_count_kv": [(self.local if k == "l" else self.full)[0] for k in self.pattern],
            "attention.key_length_swa": self.local[1], "attention.value_length_swa": self.local[1],
            "rope.dimension_count_swa": self.local[1], "rope.freq_base": 1000000.0, "rope.freq_base_swa": 10000.0,
            "attention.shared_kv_layers": self.shared_kv, "embedding_length_per_layer_input": self.layer_embed,
            "final_logit_softcapping": 5.0,
        }
        if self.wide:
            keys["feed_forward_length"] = [self.ffn_of(layer) for layer in range(self.layers)]
        return keys | self.keys


@dataclasses.dataclass
class Assistant(Gemma4):
    """An assistant of the model `of`: layers without K and V, between two projections."""
    arch: str = "gemma4-assistant"
    pattern: str = "lllf"
    hidden: int = 32
    of: str = ""
    positions: tuple = NEAR[1:]

    def target(self):
        return next(model for model in CASES if model.name == self.of)

    def tensors(self):
        width = self.target().hidden
        self.local, self.full, self.shared_kv = self.target().local, self.target().full, len(self.pattern)
        spread = scale_of(self.kind, 1) if self.kind.name in BLOCKS else float(np.float32(12**0.5))
        return super().tensors() + [
            Tensor("nextn.pre_projection.weight", (self.hidden, 2 * width), self.kind, 0.0, spread * (2 * width)**-0.5),
            Tensor("nextn.post_projection.weight", (width, self.hidden), self.kind, 0.0, spread * self.hidden**-0.5),
        ]

    def metadata(self):
        self.tensors()
        return super().metadata() | {"embedding_length_out": self.target().hidden, "nextn_predict_layers": len(self.pattern)}


# --- Vocabularies, made up: the smallest that tokenizers accept.

def spm(writer):
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [2, 3, 3] + [6] * 256  # unknown, control, byte
    letters = ["▁", *"etaoinshrdlu", "th", "▁t", "he", "▁th", "in", "er", "an", "▁the", "re", "on", "▁a", "nd", "at",
               "en", "▁s", "▁i", "or", "es", "is", "▁o", "it", "ou", "ed", "ing", "▁w", "▁h", "al", "ar", "st"]
    pieces, types = (pieces + letters)[:VOCAB], (types + [1] * len(letters))[:VOCAB]
    assert len(pieces) == VOCAB == len(set(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0 if t != 1 else -float(i) for i, t in enumerate(types)])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def bpe(pre):
    def write(writer):
        # GPT-2's letters for bytes.
        plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        extra = iter(range(256, 512))
        letter = {byte: chr(byte if byte in plain else next(extra)) for byte in range(256)}
        tokens, merges = [letter[byte] for byte in range(256)], []
        words = ["Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c",
                 "i t", "i s", "a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r",
                 "Ġt o", "Ġ m", "Ġo f", "Ġ in", "Ġ d", "Ġ h", "Ġan d", "i c", "a s", "l e", "Ġt h", "i on", "o m", "l l", "en t"]
        for word in words[:VOCAB - 256 - 2]:
            merges.append(word)
            tokens.append(word.replace(" ", ""))
        specials = ["<|endoftext|>", "<|im_end|>"]
        types = [1] * len(tokens) + [3] * len(specials)
        tokens += specials
        assert len(tokens) == VOCAB == len(set(tokens))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(VOCAB - 2)
        writer.add_eos_token_id(VOCAB - 1)
    return write


VOCABS = {"spm": spm, "llama3": bpe("llama-bpe"), "qwen2": bpe("qwen2")}

# --- Cases

LOCAL_WINDOW = 32
SINKS = tuple(Tensor(f"blk.{layer}.attn_sinks.weight", (4,), Type.F32, -1e30, 0.0) for layer in range(2))
LONGROPE = {"rope_factors_long": (5.0, 8.0), "rope_factors_short": (1.2, 0.4)}
GEMMA2 = {"attention.sliding_window": LOCAL_WINDOW, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
QUANT = dict(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512)

CASES = [
    Model("llama"),
    Model("llama-tied-mqa", tied=True, kv_heads=1, head_dim=64),
    Model("llama-bias", bias=("q", "k", "v", "o")),
    Model("llama-freqs", factors={"rope_freqs": (4.5, 7.0)}, vocab="llama3", keys={"rope.freq_base": 500000.0}),
    Model("llama-linear", keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    Model("llama-yarn", keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                              "rope.scaling.original_context_length": 64}),
    Model("llama-ragged", hidden=72, heads=6, kv_heads=3, head_dim=48, ffn=100),
    # llama.cpp ignores the window of a file of this architecture, although Mistral has one. Its Granite with windows
    # is a Llama with sinks that take part in the softmax, unless they are as low as these.
    Model("mistral", keys={"attention.sliding_window": LOCAL_WINDOW}, peer_arch="granite_swa", peer_tensors=SINKS,
          peer_keys={"attention.sliding_window_pattern": [True, True], "logit_scale": 1.0}),
    Model("qwen2", arch="qwen2", hidden=128, bias=("q", "k", "v"), tied=True, vocab="qwen2",
          keys={"rope.freq_base": 1000000.0}),
    Model("qwen2-yarn", arch="qwen2", hidden=128, bias=("q", "k", "v"), vocab="qwen2",
          keys={"rope.freq_base": 1000000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128}),
    Model("qwen3", arch="qwen3", head_dim=128, tied=True, vocab="qwen2", keys={"rope.freq_base": 1000000.0}),
    Model("gemma2", arch="gemma2", head_dim=64, layers=4, tied=True, keys=GEMMA2),
    Model("gemma2-wide", arch="gemma2", head_dim=256, heads=2, kv_heads=1, tied=True, keys=GEMMA2),
    Model("gemma3", arch="gemma3", head_dim=64, kv_heads=1, layers=7, tied=True,
          keys={"attention.sliding_window": LOCAL_WINDOW, "rope.freq_base": 1000000.0,
                "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    Model("phi3", arch="phi3", hidden=192, heads=2, kv_heads=2, head_dim=96),
    Model("phi3-long", arch="phi3", hidden=192, heads=6, kv_heads=2, rotated=24, factors=LONGROPE, context=512,
          keys={"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.19}),
    Model("phi3-short", arch="phi3", hidden=192, heads=6, kv_heads=2, rotated=24, factors=LONGROPE, context=256,
          keys={"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.19}),
    *(Model(kind.name.lower(), kind=kind, **QUANT) for kind in [
        Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K,
        Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4,
        Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.TQ1_0, Type.TQ2_0,
        Type.NVFP4]),
    Model("q8_0-ragged", kind=Type.Q8_0, hidden=160, heads=5, kv_heads=1, head_dim=32, ffn=352),
    Model("q4_0-tied", kind=Type.Q4_0, hidden=96, heads=3, kv_heads=1, head_dim=32, ffn=224, tied=True),
    Model("mixed", kinds=(Type.Q4_K, Type.Q6_K, Type.Q8_0, Type.F16, Type.Q5_0, Type.F32, Type.IQ4_XS, Type.Q3_K), **QUANT),
    Model("gemma3-q4_k", arch="gemma3", kind=Type.Q4_K, layers=7, tied=True,
          keys={"attention.sliding_window": LOCAL_WINDOW}, **(QUANT | dict(ffn=256))),
    Model("phi3-q5_k", arch="phi3", kind=Type.Q5_K, **QUANT),
    Model("llama-far", positions=FAR, context=1280),
    Model("mixtral", experts=8, expert_ffn=96, keys={"expert_used_count": 2}),
    Model("mixtral-q4_k", experts=4, expert_ffn=256, kind=Type.Q4_K, keys={"expert_used_count": 1}, **(QUANT | dict(ffn=256))),
    Model("qwen2moe", arch="qwen2moe", bias=("q", "k", "v"), hidden=128, experts=6, expert_ffn=40, shared=72,
          output_gate=True, vocab="qwen2",
          keys={"expert_used_count": 3, "expert_shared_feed_forward_length": 72}),
    Model("qwen3moe", arch="qwen3moe", qk_norm="head", vocab="qwen2", experts=16, expert_ffn=48,
          keys={"expert_used_count": 4}),
    Model("qwen3moe-q8_0", arch="qwen3moe", qk_norm="head", vocab="qwen2", experts=32, expert_ffn=64, kind=Type.Q8_0,
          keys={"expert_used_count": 8}),
    Model("gpt-oss", arch="gpt-oss", bias=("q", "k", "v", "o"), sinks=True, ffn_norm="post_attention_norm", layers=4,
          vocab="llama3", experts=6, expert_ffn=64, expert_bias=True,
          keys={"expert_used_count": 2, "attention.sliding_window": LOCAL_WINDOW}),
    Model("gpt-oss-mxfp4", arch="gpt-oss", bias=("q", "k", "v", "o"), sinks=True, ffn_norm="post_attention_norm",
          vocab="llama3", experts=5, expert_ffn=96, expert_bias=True, kind=Type.MXFP4,
          keys={"expert_used_count": 4, "attention.sliding_window": LOCAL_WINDOW}),
    Model("olmoe", arch="olmoe", hidden=128, kv_heads=4, qk_norm="row", experts=8, expert_ffn=96, vocab="llama3",
          keys={"expert_used_count": 3}),
    Model("granite", arch="granite", tied=True, vocab="llama3",
          keys={"logit_scale": 4.0, "residual_scale": 0.4, "embedding_scale": 3.0, "attention.scale": 0.11}),
    Model("granitemoe", arch="granitemoe", experts=5, expert_ffn=96, vocab="llama3",
          keys={"expert_used_count": 2, "logit_scale": 4.0, "residual_scale": 0.4, "embedding_scale": 3.0,
                "attention.scale": 0.11}),
    Model("glm4moe", arch="glm4moe", bias=("q", "k", "v"), rotated=16, layers=3, dense=1, experts=8, expert_ffn=48,
          shared=48, selection_bias=True, ffn_norm="post_attention_norm", vocab="llama3",
          keys={"expert_used_count": 3, "expert_shared_count": 1, "expert_weights_norm": True,
                "expert_weights_scale": 1.5, "expert_gating_func": 2}),
    Model("minimax-m2", arch="minimax-m2", qk_norm="row", rotated=16, experts=8, expert_ffn=96, selection_bias=True,
          vocab="llama3", keys={"expert_used_count": 2, "expert_gating_func": 2}),
    Model("ernie4_5-moe", arch="ernie4_5-moe", layers=3, dense=1, experts=6, expert_ffn=40, shared=80,
          selection_bias=True, tied=True,
          keys={"expert_used_count": 2, "interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 80}),
    Model("hunyuan-moe", arch="hunyuan-moe", qk_norm="head", experts=8, expert_ffn=96, shared=96, vocab="llama3",
          keys={"expert_used_count": 3, "expert_shared_feed_forward_length": 96}),
    Model("deepseek", arch="deepseek", hidden=128, layers=3, dense=1, experts=8, expert_ffn=40, shared=80, vocab="llama3",
          keys={"expert_used_count": 3, "expert_shared_count": 2, "expert_weights_scale": 1.0}),
    Model("mistral3", arch="mistral3",
          keys={"attention.temperature_scale": 0.3, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 24, "rope.scaling.yarn_log_multiplier": 1.0}),
    Model("smollm3", arch="smollm3", layers=5, tied=True, vocab="llama3"),
    Model("olmo2", arch="olmo2", hidden=128, before=False, after=True, qk_norm="row", vocab="llama3"),
    Model("olmo3", arch="olmo2", hidden=128, before=False, after=True, qk_norm="row", layers=5, vocab="llama3",
          keys={"attention.sliding_window": LOCAL_WINDOW, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64}),
    Model("seed_oss", arch="seed_oss", bias=("q", "k", "v"), head_dim=64, ffn_norm="post_attention_norm", vocab="llama3"),
    Model("exaone4", arch="exaone4", hidden=128, before=False, after=True, qk_norm="head", vocab="llama3"),
    Model("hunyuan-dense", arch="hunyuan-dense", qk_norm="head", tied=True, vocab="llama3"),
    Model("ernie4_5", arch="ernie4_5", tied=True),
    Model("glm4", arch="glm4", bias=("q", "k", "v"), after=True, fused_ffn=True, rotated=16, vocab="llama3"),
    Model("cohere2", arch="cohere2", hidden=128, layers=5, ffn_norm=None, tied=True, vocab="llama3",
          keys={"attention.sliding_window": LOCAL_WINDOW, "logit_scale": 0.25}),
    # llama.cpp does not read the epsilon of this architecture.
    Model("qwen2vl", arch="qwen2vl", hidden=128, bias=("q", "k", "v"), vocab="qwen2",
          keys={"rope.dimension_sections": [4, 6, 6, 0], "attention.layer_norm_rms_epsilon": 1e-20}),
    Model("qwen3vl", arch="qwen3vl", qk_norm="head", vocab="qwen2", keys={"rope.dimension_sections": [6, 5, 5, 0]}),
    Model("qwen3vlmoe", arch="qwen3vlmoe", qk_norm="head", vocab="qwen2", experts=8, expert_ffn=48,
          keys={"expert_used_count": 2, "rope.dimension_sections": [6, 5, 5, 0]}),
    Model("nemotron", arch="nemotron", hidden=128, norm_bias=True, gated=False, rotated=16, vocab="llama3"),
    Model("starcoder2", arch="starcoder2", hidden=128, norm_bias=True, gated=False, bias=("q", "k", "v", "o"),
          ffn_bias=True, tied=True, vocab="llama3"),
    Model("stablelm", arch="stablelm", hidden=128, norm_bias=True, rotated=8, vocab="llama3"),
    Model("gpt2", arch="gpt2", hidden=128, kv_heads=4, norm_bias=True, gated=False, fused_qkv=True, bias=("o",),
          ffn_bias=True, learned=True, trained=256, tied=True, vocab="llama3"),
    Model("gptneox", arch="gptneox", hidden=128, kv_heads=4, norm_bias=True, gated=False, fused_qkv=True, bias=("o",),
          ffn_bias=True, rotated=8, vocab="llama3", keys={"use_parallel_residual": True}),
    Model("phi2", arch="phi2", hidden=128, kv_heads=4, norm_bias=True, gated=False, bias=("q", "k", "v", "o"),
          ffn_bias=True, ffn_norm=None, head_bias=True, rotated=16, vocab="llama3"),
    Model("lfm2", arch="lfm2", layers=4, mixers="cacc", taps=3, qk_norm="head", head_dim=16, final_norm="token_embd_norm",
          tied=True, vocab="llama3"),
    Model("lfm2moe", arch="lfm2moe", layers=4, mixers="ccac", taps=3, qk_norm="head", head_dim=16, dense=1, experts=8,
          expert_ffn=48, selection_bias=True, final_norm="token_embd_norm", tied=True, vocab="llama3",
          keys={"expert_used_count": 3, "expert_gating_func": 2}),
    Model("qwen35", arch="qwen35", layers=4, mixers="ddda", delta=(2, 6, 32), qk_norm="head", rotated=16,
          attention_gate=True, ffn_norm="post_attention_norm", tied=True, vocab="qwen2",
          keys={"rope.dimension_sections": [3, 3, 2, 0]}),
    Model("qwen35-far", arch="qwen35", layers=4, mixers="dada", delta=(1, 2, 64), qk_norm="head", rotated=16,
          attention_gate=True, ffn_norm="post_attention_norm", tied=True, vocab="qwen2", positions=FAR, context=1280,
          keys={"rope.dimension_sections": [3, 3, 2, 0]}),
    Model("qwen35-q4_k", arch="qwen35", layers=4, mixers="ddda", delta=(2, 4, 64), qk_norm="head", rotated=16,
          attention_gate=True, ffn_norm="post_attention_norm", tied=True, vocab="qwen2", kind=Type.Q4_K,
          keys={"rope.dimension_sections": [3, 3, 2, 0]}, **QUANT),
    Model("qwen35moe", arch="qwen35moe", layers=4, mixers="ddda", delta=(2, 4, 32), qk_norm="head", rotated=16,
          attention_gate=True, ffn_norm="post_attention_norm", vocab="qwen2", experts=8, expert_ffn=48, shared=40,
          output_gate=True, keys={"expert_used_count": 3, "expert_shared_feed_forward_length": 40,
                                  "rope.dimension_sections": [3, 3, 2, 0]}),
    Model("qwen3next", arch="qwen3next", layers=4, mixers="ddda", delta=(2, 6, 32), fused_ba=True, qk_norm="head",
          rotated=16, attention_gate=True, ffn_norm="post_attention_norm", vocab="qwen2", experts=8, expert_ffn=48,
          shared=40, output_gate=True,
          keys={"expert_used_count": 3, "expert_shared_feed_forward_length": 40}),
    Model("deepseek2-v3", arch="deepseek2", layers=3, dense=1, latent=(48, 64, 32, 16, 24), experts=8, expert_ffn=48,
          shared=48, selection_bias=True, vocab="llama3",
          keys={"expert_used_count": 2, "expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 2.5,
                "expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2}),
    Model("deepseek2-v2", arch="deepseek2", layers=3, dense=1, latent=(32, 48, 16, 32, 40), experts=6, expert_ffn=40,
          shared=80, vocab="llama3",
          keys={"expert_used_count": 3, "expert_shared_count": 2, "expert_weights_scale": 1.5,
                "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_log_multiplier": 0.0707}),
    Model("deepseek2-q8_0", arch="deepseek2", layers=2, dense=1, latent=(64, 128, 64, 32, 64), hidden=128, experts=4,
          expert_ffn=64, shared=64, ffn=96, selection_bias=True, vocab="llama3", kind=Type.Q8_0,
          keys={"expert_used_count": 1, "expert_shared_count": 1, "expert_gating_func": 2}),
    Model("mistral4", arch="mistral4", latent=(48, 64, 32, 16, 24), experts=8, expert_ffn=48, shared=48, vocab="llama3",
          keys={"expert_used_count": 2, "expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.0,
                "attention.temperature_scale": 0.3, "attention.temperature_length": 24,
                "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24,
                "rope.scaling.yarn_log_multiplier": 0.1}),
    Mamba("mamba2", arch="mamba2", mixers="sss", networks="---", scan=(2, 8, 24, 16), vocab="llama3"),
    Mamba("mamba2-q8_0", arch="mamba2", mixers="ss", networks="--", scan=(1, 4, 32, 64), taps=3, kind=Type.Q8_0, hidden=128,
          tied=True, vocab="llama3"),
    Mamba("mamba2-far", arch="mamba2", mixers="ss", networks="--", scan=(1, 2, 64, 64), vocab="llama3", positions=FAR, context=1280),
    nemotron("nemotron_h", mixers="s-sa-s-", networks="-x--x-x", layers=7, scan=(2, 6, 32, 16), taps=3),
    nemotron("nemotron_h_moe", arch="nemotron_h_moe", mixers="s-a-s-", networks="-x-x-x", layers=6, scan=(4, 8, 16, 24),
             experts=8, expert_ffn=48, shared=72, selection_bias=True,
             keys={"expert_used_count": 3, "expert_feed_forward_length": 48, "expert_shared_count": 1,
                   "expert_weights_norm": True, "expert_weights_scale": 2.5}),
    nemotron("nemotron_h_moe-latent", arch="nemotron_h_moe", mixers="s-a-", networks="-x-x", layers=4, scan=(1, 4, 32, 32),
             experts=6, expert_ffn=40, shared=56, selection_bias=True, latent_experts=48,
             keys={"expert_used_count": 2, "expert_feed_forward_length": 40, "expert_shared_count": 1,
                   "expert_weights_norm": True, "expert_weights_scale": 1.5, "moe_latent_size": 48}),
    Mamba("granitehybrid", arch="granitehybrid", mixers="ssas", layers=4, scan=(1, 8, 32, 16), tied=True, vocab="llama3",
          keys=GRANITE | {"rope.scaling.finetuned": False}),
    Mamba("granitehybrid-moe", arch="granitehybrid", mixers="sas", layers=3, scan=(2, 4, 24, 32), experts=6, expert_ffn=48,
          shared=40, vocab="llama3", keys=GRANITE | {"expert_used_count": 3}),
    Mamba("granitehybrid-q4_k", arch="granitehybrid", mixers="sas", layers=3, scan=(1, 8, 64, 64), kind=Type.Q4_K,
          vocab="llama3", tied=True, keys=GRANITE, **QUANT),
    Mamba("falcon-h1", arch="falcon-h1", mixers="hhh", layers=3, scan=(1, 4, 32, 24), grouped_norm=False, vocab="llama3"),
    Mamba("falcon-h1-norm", arch="falcon-h1", mixers="hh", scan=(2, 6, 16, 32), tied=True, vocab="llama3"),
    Gemma4("gemma4-e2b", shared_kv=3, layer_embed=16, wide=True, local=(1, 32)),
    Gemma4("gemma4-31b", pattern="llfllf", keys_as_values=True, local=(4, 32), full=(2, 48)),
    Gemma4("gemma4-moe", pattern="llflf", keys_as_values=True, experts=8, expert_ffn=40, keys={"expert_used_count": 3}),
    Gemma4("gemma4-q8_0", shared_kv=3, layer_embed=32, kind=Type.Q8_0, hidden=128, ffn=96),
    Assistant("gemma4-e2b-assistant", of="gemma4-e2b"),
    Assistant("gemma4-31b-assistant", of="gemma4-31b", pattern="llf", hidden=48, positions=(1, 33, 96)),
    Assistant("gemma4-q8_0-assistant", of="gemma4-q8_0", kind=Type.Q8_0, hidden=64),
    Gemma4("gemma4-far", pattern="lflflf", shared_kv=2, layer_embed=16, positions=FAR, context=1280,
           keys={"attention.sliding_window": 300}),
    Encoder("jina-bert-v2", arch="jina-bert-v2", fused_ffn=True),
    # Slopes of heads whose number is no power of two.
    Encoder("jina-bert-v2-six", arch="jina-bert-v2", fused_ffn=True, hidden=96, heads=6, kv_heads=6),
    Encoder("nomic-bert-moe", arch="nomic-bert-moe", experts=6, moe_every=2,
            keys={"expert_used_count": 2, "rope.freq_base": 10000.0}),
    Model("gemma-embedding", arch="gemma-embedding", qk_norm="head", kv_heads=1, layers=7, tied=True, kind_of_rows="rows",
          keys={"attention.sliding_window": LOCAL_WINDOW, "rope.freq_base": 1000000.0}),
    Model("gemma-embedding-dense", arch="gemma-embedding", qk_norm="head", kv_heads=1, layers=7, tied=True, dense_out=80,
          kind_of_rows="mean", keys={"attention.sliding_window": LOCAL_WINDOW}),
    Model("gemma3-far", arch="gemma3", head_dim=64, layers=3, tied=True, positions=FAR, context=1280,
          keys={"attention.sliding_window": 300, "attention.sliding_window_pattern": 2}),
]
WITH_HEAD = ("qwen35", "qwen35-q4_k", "qwen35moe", "qwen3next", "glm4moe", "deepseek2-v3")
CASES += [dataclasses.replace(model, name=f"{model.name}-head", head=True, kind_of_rows="head", layers=model.layers + 1,
                              mixers=model.mixers and model.mixers + "a", positions=NEAR[1:])
          for model in CASES if model.name in WITH_HEAD]


def distance(a, b):
    """Root of the mean square error, as a part of the spread of `b`."""
    return float(np.sqrt(np.mean((a - b) ** 2) / np.var(b)))


def main():
    program, *chosen = sys.argv[1:]
    folder_of_cases = HERE / "cases"
    folder_of_cases.mkdir(exist_ok=True)
    known, entries = {}, []
    path = folder_of_cases / "cases.json"
    old = {entry["name"]: entry for entry in json.loads(path.read_text())["cases"]} if chosen else {}
    for model in CASES:
        if chosen and model.name not in chosen:
            entries += [old[model.name]] if model.name in old else []
            continue
        tokens = [int(bit) % VOCAB for bit in bits("tokens", max(model.positions) + 1)]
        with tempfile.TemporaryDirectory() as folder:
            def run(path):
                out = pathlib.Path(folder) / "out.f32"
                positions = ",".join(map(str, model.positions))
                kind = [model.kind_of_rows] if model.kind_of_rows else []
                if isinstance(model, Assistant):
                    kind, path = ["assistant", path], path.with_name(f"target-{path.name}")
                    model.target().write(path, decoded=path.name == "target-decoded.gguf")
                subprocess.run([program, path, str(model.context), out, positions, *kind, *map(str, tokens)], check=True)
                return np.fromfile(out, dtype=np.float32)

            ours, decoded, peer = (pathlib.Path(folder) / f"{which}.gguf" for which in ("ours", "decoded", "peer"))
            model.write(ours)
            model.write(decoded, decoded=True, peer=True)
            model.write(peer, peer=True)
            exact, native = run(decoded), run(peer)
            assert np.isfinite(exact).all() and np.isfinite(native).all(), model.name
            data = ours.read_bytes()
            header = gguf.GGUFReader(ours).data_offset
            (folder_of_cases / f"{model.name}.header").write_bytes(data[:header])
            (folder_of_cases / f"{model.name}.logits").write_bytes(exact.astype("<f4").tobytes())
        plain = known.get((model.arch, exact.size), exact)
        known.setdefault((model.arch, exact.size), exact)
        error = distance(native, exact)
        print(f"{model.name:16} spread {exact.std():.3f}, peer error {error:.2e}, "
              f"from the first {model.arch} {distance(exact, plain):.2f}, file {len(data)} bytes", flush=True)
        entries.append({
            "name": model.name, "context": model.context, "positions": model.positions,
            "peer_error": float(f"{error:.2e}"), **({"head": True} if model.head else {}), **({"assistant_of": model.of} if isinstance(model, Assistant) else {}),
            "adler32": zlib.adler32(data), "tensors": [[t.name, t.center, t.spread, t.kind.name, int(np.prod(t.shape))] for t in model.tensors()],
        })
    lines = [json.dumps(entry, separators=(",", ":")).replace(',"tensors"', ',\n"tensors"') for entry in entries]
    shared = {"vocab": VOCAB, "blocks": BLOCKS}
    text = json.dumps(shared)[:-1] + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n"
    path.write_text(text)


if __name__ == "__main__":
    main()
