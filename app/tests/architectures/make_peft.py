#!/usr/bin/env python3
"""Writes the adapters of `hf/peft/`, as PEFT saves them, and the logits that PEFT computes with them for the models of
`hf/cases.json` in float32.

usage: make_peft.py

Needs `pip install torch transformers peft safetensors numpy`. Run it after make_hf.py has changed one of these models.
"""
import json, pathlib, shutil, tempfile

import numpy as np
import peft, torch, transformers
from safetensors.numpy import save_file

from make import HERE, VOCAB, bits, uniform
from make_hf import POSITIONS

# Ranks and scales that differ between modules, LoRA and rsLoRA; fused matrices.
ADAPTERS = {
    "llama": dict(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True,
                  rank_pattern={"down_proj": 2}, alpha_pattern={"v_proj": 3}),
    "phi3": dict(r=2, lora_alpha=4, target_modules=["qkv_proj", "o_proj", "gate_up_proj"]),
}


def main():
    cases = json.loads((HERE / "hf" / "cases.json").read_text())["cases"]
    tokens = torch.tensor([[int(bit) % VOCAB for bit in bits("tokens", max(POSITIONS) + 1)]])
    for name, options in ADAPTERS.items():
        case = next(case for case in cases if case["name"] == name)
        to = HERE / "hf" / "peft" / name
        shutil.rmtree(to, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "config.json").write_text(json.dumps(case["config"]))
            tensors = {key: (uniform(key, int(np.prod(shape))) * np.float32(spread) + np.float32(center)).reshape(shape)
                       for key, center, spread, shape in case["tensors"]}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            model = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
            with torch.no_grad():
                base = model.get_base_model()(tokens).logits[0, POSITIONS]
                recorded = np.fromfile(HERE / "hf" / f"{name}.logits", "<f4").reshape(base.shape)
                assert abs(base.numpy() - recorded).max() < 1e-4, name
                for key, value in model.named_parameters():
                    if "lora_" in key:
                        noise = uniform(key, value.numel()).reshape(value.shape)
                        value.copy_(torch.from_numpy(noise * np.float32(2 * value.shape[1] ** -0.5)))
                logits = model(tokens).logits[0, POSITIONS]
            model.save_pretrained(folder / "adapter")
            to.mkdir(parents=True)
            for file in ["adapter_config.json", "adapter_model.safetensors"]:
                (to / file).write_bytes((folder / "adapter" / file).read_bytes())
        config = json.loads((to / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = name
        (to / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        (to / "logits").write_bytes(logits.numpy().astype("<f4").tobytes())
        print(f"{name:16} changed by {(logits - base).std() / base.std():.3f} of the spread")


if __name__ == "__main__":
    main()
