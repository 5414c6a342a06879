#!/usr/bin/env python3
"""The table of bench/compare.sh.

usage: table.py --tag MODEL < LINES      adds the model's name to each JSON line of the comparison
       table.py --render RESULTS.jsonl   prints them as a Markdown table, with the machine above it
"""
import json, os, pathlib, platform, sys


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def case(row):
    if row["test"] == "prefill":
        return f"prefill of {row['tokens']}"
    if row["batch"] > 1:
        return f"decode, {row['batch']} sequences"
    return f"decode at depth {row['depth']}"


def main():
    if sys.argv[1:2] == ["--tag"]:
        for line in sys.stdin:
            print(json.dumps({"model": sys.argv[2]} | json.loads(line)), flush=True)
        return
    rows = [json.loads(line) for line in pathlib.Path(sys.argv[2]).read_text().splitlines()]
    print(f"{processor()}, {os.cpu_count()} cores, {platform.system()}; tokens/s, medians\n")
    print("| model | test | Paguro | llama.cpp | ratio | lowest and highest |\n|-|-|-:|-:|-:|-:|")
    for row in rows:
        print(f"| {row['model']} | {case(row)} | {row['paguro']:.1f} | {row['llama.cpp']:.1f} | **{row['ratio']:.2f}** "
              f"| {row['ratio_min']:.2f} to {row['ratio_max']:.2f} |")


if __name__ == "__main__":
    main()
