#!/usr/bin/env python3
"""Writes a folder of sentence-transformers with a BERT of random weights in F16, to measure speed.

    bench/random_encoder.py encoder --layers 30 --hidden 1280                             # 0.63 billion parameters
    bench/embeddings.py target/release/paguro --folder encoder --cuda --texts 1000        # beside sentence-transformers on the same GPU
    target/release/paguro embed encoder encoder/texts.txt -o vectors.npy --kernels        # the time of each kernel

`texts.txt` in the folder has 1,000 texts of 10 to 500 tokens. Needs torch and transformers.
"""

import argparse
import json
import pathlib
import random
import string

from embeddings import WORDS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--layers", type=int, default=30)
parser.add_argument("--hidden", type=int, default=1280)
parser.add_argument("--texts", type=int, default=1000)


def main():
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    options = parser.parse_args()
    folder = options.folder
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    letters = sorted(set(string.printable.lower()) - set(string.whitespace))
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({word.lower() for word in WORDS if word.isalpha()})]
    vocab += [token for token in letters + [f"##{letter}" for letter in letters] if token not in vocab]
    vocab += [f"[unused{index}]" for index in range(30522 - len(vocab))]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = BertConfig(vocab_size=len(vocab), hidden_size=options.hidden, num_hidden_layers=options.layers,
                        num_attention_heads=options.hidden // 64, intermediate_size=4 * options.hidden)
    BertModel(config, add_pooling_layer=False).half().save_pretrained(folder)
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [{"idx": index, "name": str(index), "path": "" if index == 0 else f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
               for index, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": options.hidden, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "2_Normalize").mkdir(exist_ok=True)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    rng = random.Random(7)
    # Two tokens are around each text. Words with accents are several tokens.
    words = [word for word in vocab[5:40] if word.isascii()]
    texts = [" ".join(rng.choices(words, k=rng.randint(8, 498))) for _ in range(options.texts)]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")


main()
