#!/usr/bin/env python3
"""Compares models.json with the hub: each repository and file exists, is open, and has the size that the table says.

Needs a network and Python 3.9; HF_ENDPOINT names another hub than https://huggingface.co. `--write` corrects sizes.

    python3 crates/library/src/known/check.py [--write]
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

TABLE = Path(__file__).with_name("models.json")
ENDPOINT = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
TIMEOUT = 30


def sizes(repository):
    """Returns the sizes of the files in a repository."""
    url = f"{ENDPOINT}/api/models/{repository}/revision/main?blobs=true"
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        info = json.load(answer)
    if info.get("gated"):
        raise ValueError("the repository is gated")
    return {file["rfilename"]: file.get("size") or file.get("lfs", {}).get("size") for file in info["siblings"]}


def check(model, files):
    """Returns what is wrong with an entry; corrects its size."""
    if model["name"].startswith("gemma4:") and not any(Path(name).name.startswith("mtp-") for name in files):
        return "there is no assistant, a file mtp-*.gguf"
    size = files.get(model["file"])
    if size is None:
        ggufs = [name for name in files if name.endswith(".gguf")]
        return f"there is no file {model['file']}; there are {', '.join(ggufs) or 'no GGUF files'}"
    megabytes = round(size / 1e6)
    if megabytes == model["megabytes"]:
        return None
    problem = f"{model['file']} has {megabytes} MB, not {model['megabytes']}"
    model["megabytes"] = megabytes
    return problem


def main():
    models = json.loads(TABLE.read_text(encoding="utf-8"))
    problems = 0
    for model in models:
        try:
            problem = check(model, sizes(model["repository"]))
        except (urllib.error.URLError, ValueError, KeyError, TimeoutError) as error:
            problem = f"{model['repository']}: {error}"
        if problem:
            problems += 1
        print(f"{'wrong' if problem else 'ok   '} {model['name']:20} {problem or ''}")
    if "--write" in sys.argv[1:]:
        rows = ",\n".join("  " + json.dumps(model, ensure_ascii=False) for model in models)
        TABLE.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
