#!/usr/bin/env bash
# Paguro and llama.cpp side by side, on the same files with the same threads: one command for everything.
#
# usage: bench/compare.sh [MODEL.gguf ...] [-- OPTIONS OF compare.py]
#
# Without models, takes the shape of TinyLlama 1.1B with random weights in F16, Q8_0 and Q4_K_M (speed does not depend
# on the weights' values). Builds both engines, runs them in turn, and prints one Markdown table. The
# results are also kept in target/bench/, one JSON object per line.
#
# llama.cpp's set-up, the model's shape and the interleaving are scripts of the shared data beside the checkout
# (../shared, or $PAGURO_SHARED). Needs cmake, ninja, g++ and python3, there with `pip install gguf numpy`.
set -euo pipefail
cd "$(dirname "$0")/.."

shared=${PAGURO_SHARED:-../shared}
peer=${PAGURO_PEER:-target/peer}
out=target/bench
if [ ! -d "$shared/peer" ]; then
  echo "error: $shared/peer is not present; set PAGURO_SHARED to the folder of the shared data" >&2
  exit 1
fi
mkdir -p "$out"

models=() options=()
while [ $# -gt 0 ]; do
  case $1 in
    --) shift; options=("$@"); break ;;
    *) models+=("$1"); shift ;;
  esac
done

"$shared/peer/setup.sh" "$peer" >&2
cargo build --release --locked >&2

if [ ${#models[@]} -eq 0 ]; then
  f16=$out/tinyllama-f16.gguf
  # Written under another name first: a broken off run must not leave half a model behind.
  [ -f "$f16" ] || { python3 "$shared/peer/mkmodel.py" "$f16.part" tinyllama >&2; mv "$f16.part" "$f16"; }
  models=("$f16")
  for format in Q8_0 Q4_K_M; do
    file=$out/tinyllama-$format.gguf
    [ -f "$file" ] || { "$peer/bin/llama-quantize" "$f16" "$file.part" "$format" >&2; mv "$file.part" "$file"; }
    models+=("$file")
  done
fi

results=$out/results.jsonl
: > "$results"
for model in "${models[@]}"; do
  echo "measuring $model" >&2
  python3 "$shared/peer/compare.py" --paguro target/release/paguro --peer "$peer" --model "$model" "${options[@]}" \
    | python3 bench/table.py --tag "$(basename "$model" .gguf)" | tee -a "$results" >&2
done
python3 bench/table.py --render "$results"
