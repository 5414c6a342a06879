#!/usr/bin/env python3
"""Writes the layers of tokens of a tiny model like BAAI/bge-m3, and the vectors that PyTorch and transformers compute with
them, as FlagEmbedding defines them.

The model is the case `xlm_roberta` of ../../architectures/hf. Needs `pip install torch transformers safetensors numpy gguf`.
"""
import json, pathlib, sys

import numpy as np
import torch, transformers

HERE = pathlib.Path(__file__).parent
ARCHITECTURES = HERE.parent.parent / "architectures"
sys.path.insert(0, str(ARCHITECTURES))
from make import uniform

# Ids of the tokenizer of ../retrieval.rs: <pad>, <unk>, <s>, </s>, <mask> are 0 to 4.
UNUSED = {0, 1, 2, 3}
TEXTS = [[2, 20, 31, 20, 3], [2, 7, 1, 4, 9, 11, 13, 7, 200, 7, 60, 4, 3], [2, 3], [2, *range(5, 155), 3]]

cases = json.load(open(ARCHITECTURES / "hf/cases.json"))["cases"]
case = next(case for case in cases if case["name"] == "xlm_roberta")
model = transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**case["config"], attn_implementation="eager"))
weights = {name: torch.from_numpy(uniform(name, int(np.prod(shape))) * np.float32(spread) + np.float32(center)).reshape(shape)
           for name, center, spread, shape in case["tensors"]}
missing, unexpected = model.load_state_dict(weights, strict=False)
assert not unexpected and all("position_ids" in name for name in missing), (missing, unexpected)
model.eval()

hidden = case["config"]["hidden_size"]
layers = {}
for name, outputs, dtype in [("sparse", 1, torch.float16), ("colbert", hidden, torch.float32)]:
    layer = torch.nn.Linear(hidden, outputs)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(uniform(f"{name}.weight", hidden * outputs)).reshape(outputs, hidden))
        layer.bias.copy_(torch.from_numpy(uniform(f"{name}.bias", outputs)))
    torch.save(layer.to(dtype).state_dict(), HERE / f"{name}_linear.pt")
    layers[name] = layer.float()

expected = []
with torch.no_grad():
    for ids in TEXTS:
        # The configuration's padding is this tokenizer's <unk>, which would have no position of its own.
        positions = torch.arange(len(ids)) + case["config"]["pad_token_id"] + 1
        rows = model(torch.tensor([ids]), position_ids=positions[None]).last_hidden_state[0]
        sparse = {}
        for token, weight in zip(ids, torch.relu(layers["sparse"](rows))[:, 0].tolist()):
            if token not in UNUSED and weight > 0:
                sparse[token] = max(sparse.get(token, 0), weight)
        multi = torch.nn.functional.normalize(layers["colbert"](rows[1:]), dim=-1)
        dense = torch.nn.functional.normalize(rows[0], dim=-1)
        kept = multi if len(ids) < 20 else multi[[0, 70, -1]]
        rounded = lambda values: [round(value, 5) for value in values]
        expected.append({"ids": ids, "dense": rounded(dense.tolist()), "sparse": {k: round(v, 5) for k, v in sorted(sparse.items())},
                         "vectors": len(multi), "multi": [rounded(row) for row in kept.tolist()]})
lines = ",\n".join(json.dumps(text) for text in expected)
(HERE / "expected.json").write_text(f"[\n{lines}\n]\n")
