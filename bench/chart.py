#!/usr/bin/env python3
"""Draws docs/images/speed.svg and writes the tables of bench/README.md, both from bench/results.csv.

usage: chart.py            writes both files
       chart.py --check    fails if one of them differs from the results
"""
import argparse, csv, pathlib, re, sys
from html import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Columns of bench/results.csv.
COLUMNS = ["machine", "model", "format", "test", "paguro", "llama.cpp", "ratio", "ratio_min", "ratio_max", "ceiling_percent"]
PANELS = [
    ("CPU: two cores of an AMD EPYC (Zen 4), TinyLlama 1.1B, Q4_K_M", "AMD EPYC Zen 4", "TinyLlama 1.1B", "Q4_K_M",
     ["prompt of 512", "decode at depth 0", "decode at depth 8192", "decode, 8 sequences"]),
    ("GPU: NVIDIA H100, Llama 8B, Q4_K_M; Paguro through Vulkan, llama.cpp with CUDA", "NVIDIA H100", "Llama 8B",
     "Q4_K_M", ["prompt of 2048", "decode at depth 0", "decode at depth 8192", "decode, 64 sequences at depth 256"]),
]
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } .note { fill: #59636e }
  .paguro { fill: #d9573b } .peer { fill: #9aa4af }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .note { fill: #9198a1 } .peer { fill: #59636e } }
"""


def read():
    with open(ROOT / "bench/results.csv", newline="") as file:
        return list(csv.DictReader(file))


def find(rows, machine, model, format, test):
    keys = {"machine": machine, "model": model, "format": format, "test": test}
    return next(row for row in rows if all(row[key] == value for key, value in keys.items()))


def chart(rows):
    """One group of two bars for each test, as long as its speed relative to the faster engine."""
    parts, y, left, width = [], 24, 262, 370
    for title, machine, model, format, tests in PANELS:
        parts.append(f'<text class="title" x="16" y="{y}">{escape(title)}</text>')
        y += 16
        for test in tests:
            row = find(rows, machine, model, format, test)
            ours, theirs = float(row["paguro"]), float(row["llama.cpp"])
            parts.append(f'<text x="16" y="{y + 19}">{escape(test)}</text>')
            for name, kind, speed in (("Paguro", "paguro", ours), ("llama.cpp", "peer", theirs)):
                length = width * speed / max(ours, theirs)
                ratio = f", {float(row['ratio']):.1f}×" if kind == "paguro" else ""
                parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{length:.0f}" height="12" rx="2"/>')
                parts.append(f'<text class="note" x="{left + length + 6:.0f}" y="{y + 11}">'
                             f'{speed:,g} tokens/s{ratio}</text>')
                y += 14
            y += 8
        y += 24
    legend = (f'<rect class="paguro" x="16" y="{y - 18}" width="12" height="12" rx="2"/><text x="34" y="{y - 8}">Paguro</text>'
              f'<rect class="peer" x="100" y="{y - 18}" width="12" height="12" rx="2"/>'
              f'<text x="118" y="{y - 8}">llama.cpp 0.3.36</text>'
              f'<text class="note" x="262" y="{y - 8}">bar: speed relative to the faster engine in the same test</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 {y + 6}" width="830" height="{y + 6}" role="img" '
            f'aria-label="Tokens per second of Paguro and llama.cpp">\n<style>{STYLE}</style>\n'
            + "\n".join([*parts, legend]) + "\n</svg>\n")


def cell(row):
    text = f"{float(row['paguro']):,g} : {float(row['llama.cpp']):,g}, **{row['ratio']}**"
    if row["ratio_min"]:
        text += f" ({row['ratio_min']} to {row['ratio_max']})"
    return text + (f", {row['ceiling_percent']} %" if row["ceiling_percent"] else "")


def table(rows, machine):
    """Tests down, models and formats across."""
    rows = [row for row in rows if row["machine"] == machine]
    columns = list(dict.fromkeys((row["model"], row["format"]) for row in rows))
    cells = {(row["test"], row["model"], row["format"]): cell(row) for row in rows}
    tests = list(dict.fromkeys(row["test"] for row in rows))
    tests.sort(key=lambda test: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", test)])
    tests.sort(key=lambda test: (not test.startswith("prompt"), "sequences" in test))
    head = [", ".join(filter(None, column)) for column in columns]
    lines = ["| | " + " | ".join(head) + " |", "|-" * (len(head) + 1) + "|"]
    for test in tests:
        found = [cells.get((test, *column), "") for column in columns]
        lines.append(f"| {test} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def readme(rows):
    text = (ROOT / "bench/README.md").read_text()
    pattern = re.compile(r"(<!-- results: (.*?) -->\n).*?(<!-- end -->)", re.S)
    return pattern.sub(lambda found: f"{found[1]}{table(rows, found[2])}\n{found[3]}", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs from the results")
    check = parser.parse_args().check
    rows = read()
    files = {"docs/images/speed.svg": chart(rows), "bench/README.md": readme(rows)}
    for name, text in files.items():
        path = ROOT / name
        if check:
            if not path.exists() or path.read_text() != text:
                sys.exit(f"error: {name} differs from bench/results.csv; run bench/chart.py")
        else:
            path.write_text(text)


if __name__ == "__main__":
    main()
