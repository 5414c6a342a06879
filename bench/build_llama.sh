#!/usr/bin/env bash
# Builds llama.cpp's programs for the CPU of this machine into DIR/bin (default: target/llama.cpp).
#
# usage: bench/build_llama.sh [DIR]
#
# The source is the copy of llama.cpp in llama-cpp-python 0.3.36, from PyPI. The build takes about six minutes on two cores and
# 100 MB. It needs python3 with pip, cmake, ninja and a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.3.36
checksum=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

case ${1:-} in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit ;;
  -*) sed -n '4s/^# //p' "$0" >&2; exit 2 ;;
esac
mkdir -p "${1:-target/llama.cpp}"
cd "${1:-target/llama.cpp}"
[ -e bin/complete ] && exit
for tool in python3 cmake ninja c++; do
  command -v "$tool" >/dev/null || { echo "error: $tool is missing (Debian: apt-get install python3-pip cmake ninja-build g++)" >&2; exit 1; }
done

source=llama_cpp_python-$version
python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python "llama-cpp-python==$version"
echo "$checksum  $source.tar.gz" | python3 -c '
import hashlib, sys
expected, name = sys.stdin.read().split()
found = hashlib.sha256(open(name, "rb").read()).hexdigest()
sys.exit(found != expected and f"error: {name} has the SHA-256 {found} instead of {expected}; delete it and try again")'
tar xzf "$source.tar.gz"
echo "building llama.cpp in $PWD (log: build.log)" >&2
{
  cmake -S "$source/vendor/llama.cpp" -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF
  ninja -C build llama-bench llama-batched-bench llama-perplexity llama-server
} >build.log 2>&1 || { tail -n 20 build.log >&2; echo "error: llama.cpp does not build; see $PWD/build.log" >&2; exit 1; }
mkdir -p bin
cp build/bin/llama-{bench,batched-bench,perplexity,server} bin/
touch bin/complete
