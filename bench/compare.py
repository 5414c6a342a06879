#!/usr/bin/env python3
"""Runs Paguro and llama.cpp alternately on the same models, on the CPU, and prints a Markdown table of tokens/s.

usage: compare.py --llama LLAMA_BIN MODEL.gguf... [--threads 2] [--rounds 3]

A round runs one engine after the other, and a ratio is of one round. Speeds and ratios are medians over rounds. llama.cpp
runs with and without flash attention; the faster result counts. LLAMA_BIN is a folder with llama-bench and llama-batched-bench.
"""
import argparse, csv, json, os, pathlib, platform, re, statistics, subprocess, sys

from chart import COLUMNS, table


def run(*command):
    """Objects that a program prints, one a line."""
    command = [str(part) for part in command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}error: `{' '.join(command)}` exits with {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def paguro(options, model, prompt, decode, depth, batch):
    """Speed in tokens/s, and the share of the read bandwidth in percent for decode."""
    [row] = run(options.paguro, "bench", "--json", "--device", "cpu", "-m", model, "-t", options.threads, "-r", 1,
                "-p", prompt, "-n", decode, "-d", depth, "-b", batch)
    return row["tokens_per_second"][0], 100 * row["ceiling_fraction"] if decode else None


def llama(options, model, prompt, decode, depth, batch):
    """Speed in tokens/s, the better one with and without flash attention."""
    speeds = []
    for flash in ("on", "off"):
        common = ["-m", model, "-t", options.threads, "-fa", flash]
        if batch == 1:
            rows = run(f"{options.llama}/llama-bench", *common, "-r", 1, "-p", prompt, "-n", decode, "-d", depth, "-o", "jsonl")
            speeds.append(rows[0]["avg_ts"])
        else:
            rows = run(f"{options.llama}/llama-batched-bench", *common, "-tb", options.threads, "-c", batch * (depth + decode),
                       "-npp", depth, "-ntg", decode, "-npl", batch, "--output-format", "jsonl")
            speeds.append(rows[0]["speed_tg"])
    return max(speeds)


def cases(options):
    """Name, tokens of the prompt, decoded tokens, depth and sequences of each test."""
    for prompt in options.prompts:
        yield f"prompt of {prompt}", prompt, 0, 0, 1
    for depth in options.depths:
        yield f"decode at depth {depth}", 0, options.decode, depth, 1
    for batch in options.batches:
        yield f"decode, {batch} sequences", 0, options.decode, 64, batch


def measure(options, machine, model):
    """Rows of bench/results.csv for one model. If a file's name ends with a weight format, it is in a column of its own."""
    found = re.fullmatch(r"(.+)[-.]((?:I?Q|TQ|BF|F|MXFP)\d\w*)", model.stem)
    name, weights = found.groups() if found else (model.stem, "")
    for test, *case in cases(options):
        rounds = [(*paguro(options, model, *case), llama(options, model, *case)) for _ in range(options.rounds)]
        ours, shares, theirs = zip(*rounds)
        ratios = [our / their for our, their in zip(ours, theirs)]
        spread = [f"{min(ratios):.2f}", f"{max(ratios):.2f}"] if options.rounds > 1 else ["", ""]
        share = f"{statistics.median(shares):.0f}" if shares[0] else ""
        yield [machine, name, weights, test, f"{statistics.median(ours):.4g}",
               f"{statistics.median(theirs):.4g}", f"{statistics.median(ratios):.2f}", *spread, share]


def processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def numbers(text):
    return [int(part) for part in text.split(",") if part]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=pathlib.Path, metavar="MODEL.gguf")
    parser.add_argument("--llama", required=True, metavar="LLAMA_BIN", help="folder of llama.cpp's programs")
    parser.add_argument("--paguro", default="target/release/paguro")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=numbers, default="5,512", help="lengths of prompts [5,512]")
    parser.add_argument("--depths", type=numbers, default="0,2048,8192", help="contexts of decode with one sequence [0,2048,8192]")
    parser.add_argument("--batches", type=numbers, default="4,8,16", help="numbers of sequences at depth 64 [4,8,16]")
    parser.add_argument("--decode", type=int, default=64, help="tokens that each sequence decodes [64]")
    parser.add_argument("--results", type=pathlib.Path, help="write the rows to this CSV file, in the columns of bench/results.csv")
    options = parser.parse_args()

    machine, rows = f"{processor()}, {options.threads} threads", []
    for model in options.models:
        print(f"measuring {model}", file=sys.stderr)
        for row in measure(options, machine, model):
            print("  ", *row[3:], file=sys.stderr, flush=True)
            rows.append(dict(zip(COLUMNS, row)))
            if options.results:
                with options.results.open("w", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
    print(f"{machine}; Paguro : llama.cpp in tokens/s, ratio, lowest and highest ratio, share of the read bandwidth\n")
    print(table(rows, machine))


if __name__ == "__main__":
    main()
