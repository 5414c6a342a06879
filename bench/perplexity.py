#!/usr/bin/env python3
"""Prints the perplexity of one text with Paguro and with llama.cpp, and the difference.

usage: perplexity.py --text TEXT --model M.gguf [--model ...] [--paguro target/release/paguro] [--llama target/llama.cpp/bin]
                     [--context 512] [--chunks N]

`bench/build_llama.sh` builds llama.cpp. Both engines have K and V in f16.
"""
import argparse, json, re, subprocess


def run(command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", required=True)
    p.add_argument("--model", required=True, action="append")
    p.add_argument("--paguro", default="target/release/paguro")
    p.add_argument("--llama", default="target/llama.cpp/bin", help="folder of llama.cpp's programs")
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--chunks", type=int)
    a = p.parse_args()
    print("| model | Paguro | llama.cpp | difference |\n|-|-:|-:|-:|")
    for model in a.model:
        chunks = ["--chunks", a.chunks] if a.chunks else []
        ours = json.loads(run([a.paguro, "eval", "--json", "-m", model, "-f", a.text, "-c", a.context, *chunks]).stdout)
        ours = ours["perplexity"]
        peer = run([f"{a.llama}/llama-perplexity", "-m", model, "-f", a.text, "-c", a.context, *chunks])
        theirs = float(re.search(r"Final estimate: PPL = ([0-9.]+)", peer.stdout + peer.stderr).group(1))
        print(f"| {model.rsplit('/', 1)[-1]} | {ours:.4f} | {theirs:.4f} | {100 * (ours / theirs - 1):+.3f} % |", flush=True)


if __name__ == "__main__":
    main()
