#!/usr/bin/env bash
# Runs Paguro and llama.cpp alternately on a GPU, on the same files, and prints one JSON line for each result.
#
# usage: bench/gpu.sh LLAMA_BIN MODEL.gguf...
#
# LLAMA_BIN is a folder with llama-bench and llama-batched-bench, built for the GPU. Each engine runs prompts, decode at three
# depths, and up to 256 sequences. Paguro computes prompts in steps of 2048 tokens (`--batch-tokens`); its default is 512.
# PAGURO is the binary (target/release/paguro), DEVICE the device (gpu).
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit ;;
esac
if [ $# -lt 2 ]; then
  sed -n '4s/^# //p' "$0" >&2
  exit 2
fi
llama=$1
shift
paguro=${PAGURO:-target/release/paguro}
device=${DEVICE:-gpu}
layers=99
curve=1,2,4,8,12,16,32,64,128,256
[ "$device" = cpu ] && layers=0

for model in "$@"; do
  name=$(basename "$model" .gguf)
  echo "measuring $name" >&2
  tag() { while IFS= read -r line; do printf '{"engine":"%s","model":"%s","result":%s}\n' "$1" "$name" "$line"; done; }
  "$llama/llama-bench" -ngl "$layers" -fa 1 -o jsonl -m "$model" -p 512,2048 -n 0 -r 3 | tag llama.cpp
  "$paguro" bench --json --device "$device" -m "$model" -p 512,2048 -n 0 -r 3 --batch-tokens 2048 | tag paguro
  "$llama/llama-bench" -ngl "$layers" -fa 1 -o jsonl -m "$model" -p 0 -n 128 -d 0,1024,8192 -r 3 | tag llama.cpp
  "$paguro" bench --json --device "$device" -m "$model" -p 0 -n 128 -d 0,1024,8192 -r 3 | tag paguro
  "$llama/llama-batched-bench" -ngl "$layers" -fa on --output-format jsonl -m "$model" -c 75000 -npp 1024 -ntg 32 -npl 8,64 \
    | grep '^{' | tag llama.cpp
  "$paguro" bench --json --device "$device" -m "$model" -p 0 -n 32 -d 1024 -b 8,64 -r 1 | tag paguro
  "$llama/llama-batched-bench" -ngl "$layers" -fa on --output-format jsonl -m "$model" -c 75000 -npp 256 -ntg 32 -npl "$curve" \
    | grep '^{' | tag llama.cpp
  "$paguro" bench --json --device "$device" -m "$model" -p 0 -n 32 -d 256 -b "$curve" -r 1 | tag paguro
done
