#!/usr/bin/env bash
# Runs Paguro and llama.cpp alternately on the same files, on the CPU with the same threads, and prints a Markdown table.
#
# usage: bench/compare.sh [MODEL.gguf ...] [-- OPTIONS OF compare.py]
#
# Without models, it writes models in the shape of TinyLlama 1.1B with random weights in F16, Q8_0 and Q4_K_M to target/bench
# (FORMATS="Q4_0 Q6_K" for others); this needs `pip install gguf numpy`. It builds both engines. LLAMA_BIN names a folder that has
# llama-bench and llama-batched-bench already. Results are kept in target/bench/results.csv.
# `python3 bench/compare.py --help` lists the options.
set -euo pipefail
cd "$(dirname "$0")/.."

models=() options=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit ;;
    --) shift; options=("$@"); break ;;
    -*) echo "error: options of compare.py follow \`--\`: bench/compare.sh -- $*" >&2; exit 2 ;;
    *) models+=("$1"); shift ;;
  esac
done

if [ -z "${LLAMA_BIN:-}" ]; then
  bench/build_llama.sh
  LLAMA_BIN=target/llama.cpp/bin
fi
cargo build --release --locked
mkdir -p target/bench
if [ ${#models[@]} -eq 0 ]; then
  for format in ${FORMATS:-F16 Q8_0 Q4_K_M}; do
    file=target/bench/tinyllama-$format.gguf
    # The file gets its name when it is complete.
    [ -f "$file" ] || { python3 bench/random_model.py "$file.part" tinyllama --format "$format"; mv "$file.part" "$file"; }
    models+=("$file")
  done
fi
python3 bench/compare.py --llama "$LLAMA_BIN" --results target/bench/results.csv "${models[@]}" "${options[@]}"
