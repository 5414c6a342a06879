#!/usr/bin/env python3
"""train.py - trains a head for multi-token prediction onto a small model of Qwen 3.5's architecture, whose weights are frozen.

    pip install torch transformers safetensors
    gen.py shards --out DATA --tokens 3e6 --tokenizer FOLDER/tokenizer.json       (models/tales/recipe/gen.py)
    train.py --model FOLDER --data DATA --out head.safetensors --minutes 20

The head has Qwen's own names (`mtp.*`) and one block with full attention. It is Qwen3NextMTP of vLLM: the embedding of a token
and the row of the model after its last norm for the token before, each with a norm of its own, are joined by `mtp.fc`, pass the
block and `mtp.norm`, and the model's last matrix gives logits of the next token. The loss is the cross entropy with the model's
own distribution. A second pass feeds the head's rows in place of the model's, as drafts of more than one token do.

    train.py --model FOLDER --head head.safetensors --reference reference.json    logits of the trained head
"""
import argparse
import glob
import json
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


class Norm(nn.Module):
    """Weights are differences from one."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        rope = c.rope_parameters
        self.rotated = int(self.dim * rope.get("partial_rotary_factor", 1.0))
        self.theta = rope["rope_theta"]
        width = c.hidden_size
        # Q and the gate, head by head.
        self.q_proj = nn.Linear(width, 2 * self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, width, bias=False)
        self.q_norm, self.k_norm = Norm(self.dim, c.rms_norm_eps), Norm(self.dim, c.rms_norm_eps)

    def rope(self, x):
        half = self.rotated // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def forward(self, x):
        batch, length, _ = x.shape
        q, gate = self.q_proj(x).view(batch, length, self.heads, 2 * self.dim).chunk(2, -1)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.dim)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        q = self.rope(self.q_norm(q).transpose(1, 2))
        k = self.rope(self.k_norm(k).transpose(1, 2))
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, length, -1) * torch.sigmoid(gate.reshape(batch, length, -1))
        return self.o_proj(y)


class Network(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Network(c)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.pre_fc_norm_embedding = Norm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(c.hidden_size, c.rms_norm_eps)
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([Block(c)])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, embeddings, rows):
        """Position i has the embedding of token i + 1 and the row of token i; its output predicts token i + 2."""
        joined = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(rows)]
        return self.norm(self.layers[0](self.fc(torch.cat(joined, -1))))


def rows_of(model, tokens):
    """The rows after the last norm, and the logits."""
    with torch.no_grad():
        rows = model.model(input_ids=tokens).last_hidden_state
        return rows, model.lm_head(rows)


def batches(folder, length, batch):
    shards = [np.load(path) if path.endswith(".npy") else np.fromfile(path, dtype=np.uint16) for path in sorted(glob.glob(folder + "/*")) if path.endswith((".npy", ".bin"))]
    tokens = np.concatenate(shards).astype(np.int64)
    random = np.random.default_rng(1)
    while True:
        starts = random.integers(0, len(tokens) - length, batch)
        yield torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]))


def train(args, model, head):
    data = batches(args.data, args.length, args.batch)
    embed, to_logits = model.get_input_embeddings(), model.lm_head
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    start, step, log = time.time(), 0, []
    while (done := (time.time() - start) / (60 * args.minutes)) < 1:
        rate = args.rate * min(1, (step + 1) / 50) * (1 - 0.95 * done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = next(data)
        rows, logits = rows_of(model, tokens)
        embeddings = embed(tokens).detach()
        out = head(embeddings[:, 1:], rows[:, :-1])
        target = logits[:, 1:].softmax(-1)
        loss = F.cross_entropy(to_logits(out).flatten(0, 1), target.flatten(0, 1))
        # The second draft: the head's own rows in place of the model's.
        again = head(embeddings[:, 2:], out[:, :-1])
        second = F.cross_entropy(to_logits(again).flatten(0, 1), logits[:, 2:].softmax(-1).flatten(0, 1))
        (loss + 0.5 * second).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            with torch.no_grad():
                right = [
                    (to_logits(out).argmax(-1) == logits[:, 1:].argmax(-1)).float().mean().item(),
                    (to_logits(again).argmax(-1) == logits[:, 2:].argmax(-1)).float().mean().item(),
                ]
            log.append({"step": step, "loss": loss.item(), "same": right})
            print(f"{done:.2f} step {step} loss {loss.item():.3f} {second.item():.3f} same {right[0]:.3f} {right[1]:.3f}", flush=True)
    return log


def reference(args, model, head, tokenizer):
    """Logits of the head over texts: after each token, the five largest."""
    texts = json.load(open(args.model + "/reference.json"))
    prompts = ["Once upon a time there was a little fox who", "The miller's daughter walked to the river and"]
    out = []
    for prompt in prompts:
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            tokens = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=48, do_sample=False)
            rows, logits = rows_of(model, tokens)
            own = head(model.get_input_embeddings()(tokens)[:, 1:], rows[:, :-1])
            top = model.lm_head(own).topk(5, -1)
        out.append(
            {
                "tokens": tokens[0].tolist(),
                "ids": top.indices[0].tolist(),
                "logits": [[round(x, 4) for x in row] for row in top.values[0].tolist()],
            }
        )
    del texts
    json.dump(out, open(args.reference, "w"), separators=(",", ":"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the frozen model")
    parser.add_argument("--data", help="folder of shards of tokens (uint16)")
    parser.add_argument("--out", help="the head")
    parser.add_argument("--head", help="a trained head")
    parser.add_argument("--reference", help="where to write logits of the trained head")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval().requires_grad_(False)
    head = Head(model.config)
    if args.reference:
        from transformers import AutoTokenizer

        head.load_state_dict({name.removeprefix("mtp."): value.float() for name, value in load_file(args.head).items()})
        return reference(args, model, head.eval(), AutoTokenizer.from_pretrained(args.model))
    log = train(args, model, head)
    save_file({f"mtp.{name}": value.half().contiguous() for name, value in head.state_dict().items()}, args.out)
    json.dump(log, open(os.path.splitext(args.out)[0] + ".log.json", "w"))


if __name__ == "__main__":
    main()
