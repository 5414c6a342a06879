#!/usr/bin/env python3
"""Writes the files of PyTorch that the tests of this crate read. Needs `pip install torch numpy`."""
import collections, pathlib

import torch

HERE = pathlib.Path(__file__).parent


def save(name, value, **more):
    torch.save(value, HERE / f"{name}.pt", **more)


def linear(inputs, outputs, dtype):
    layer = torch.nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_((torch.arange(inputs * outputs).float() * 0.25 - 1).reshape(outputs, inputs))
        layer.bias.copy_(torch.arange(outputs).float() - 0.5)
    return layer.to(dtype)


for name, dtype in dict(f32=torch.float32, f16=torch.float16, bf16=torch.bfloat16, f64=torch.float64).items():
    save(f"linear-{name}", linear(4, 3, dtype).state_dict())
shared = torch.arange(12).float()
save("plain", {"first": shared[2:8].view(2, 3), "second": shared[4:5], "scalar": torch.tensor(7.0), "none": torch.zeros(0, 5),
               "positions": torch.arange(4)})
# Refused.
matrix = torch.arange(6).float().view(2, 3)
save("transposed", {"weight": matrix.t()})
save("nested", {"state_dict": {"weight": matrix}})
save("number", {"weight": matrix, "epoch": 3})
save("module", linear(4, 3, torch.float32))
save("tensor", matrix)
save("protocol4", {"weight": matrix}, pickle_protocol=4)
save("legacy", {"weight": matrix}, _use_new_zipfile_serialization=False)
save("complex", {"weight": torch.zeros(2, dtype=torch.complex64)})
save("parameter", collections.OrderedDict(weight=torch.nn.Parameter(matrix)))
