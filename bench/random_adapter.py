#!/usr/bin/env python3
"""Writes a GGUF LoRA adapter with random values for all matrices of attention and network of a dense model, and for its head.

usage: random_adapter.py BASE.gguf OUT.gguf [--rank 16] [--type F32] [--only attn_q,attn_k]

BASE.gguf gives the architecture and the shapes. Needs `pip install gguf numpy`.
"""
import argparse, sys

try:
    import gguf
    import numpy as np
except ImportError as missing:
    sys.exit(f"{__doc__}\nerror: {missing}; run `pip install gguf numpy`")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("base")
parser.add_argument("out")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--type", choices=["F32", "F16"], default="F32")
parser.add_argument("--only", help="names of matrices, without layers, separated by commas")
options = parser.parse_args()
base = gguf.GGUFReader(options.base)
architecture = base.fields["general.architecture"].contents()
rng = np.random.default_rng(1234)
dtype = {"F32": np.float32, "F16": np.float16}[options.type]

writer = gguf.GGUFWriter(options.out, architecture)
writer.add_type(gguf.GGUFType.ADAPTER)
writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(options.rank))
for tensor in base.tensors:
    parts = tensor.name.split(".")
    is_matrix = len(tensor.shape) == 2 and (parts[0] == "blk" and parts[2].startswith(("attn_", "ffn_")) or parts[0] == "output")
    if not is_matrix or parts[-1] != "weight" or options.only and parts[-2] not in options.only.split(","):
        continue
    inputs, outputs = (int(side) for side in tensor.shape)
    for name, shape in [("lora_a", (options.rank, inputs)), ("lora_b", (outputs, options.rank))]:
        writer.add_tensor(f"{tensor.name}.{name}", (0.001 * rng.standard_normal(shape, dtype=np.float32)).astype(dtype))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
