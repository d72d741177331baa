#!/usr/bin/env bash
# Everything that the tests on a GPU need, made where there is none: bash tests/gpu/pack.sh FOLDER [HELDOUT.jsonl]
#
# The runtime library and the example program, compiled kernels of the operator tests, engines with what they must
# answer, and the slice of the benchmark. Folder and repository are then carried to the machine with the GPU, where
# tests/gpu/on_card.sh takes over. PARTS names what to make again: runtime operators engines slice.
set -euo pipefail
folder=$(realpath -m "$1")
heldout=${2:+$(realpath "$2")}
python=${PYTHON:-python3}
jobs=${JOBS:-2}
parts=" ${PARTS:-runtime operators engines slice} "
cd "$(dirname "$0")/../.."
mkdir -p "$folder"
export DSV4C_CACHE_DIR=$folder/cubins PYTHONPATH=$PWD

# The build folders stay behind.
build=${TMPDIR:-/tmp}/dsv4c-gpu-pack
if [[ $parts == *" runtime "* ]]; then
  cmake -S dsv4c/runtime -B "$build/runtime" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$build/prefix"
  cmake --build "$build/runtime" --parallel "$jobs"
  cmake --install "$build/runtime"
  cmake -S dsv4c/runtime/examples/generate -B "$build/generate" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_PREFIX_PATH="$build/prefix"
  cmake --build "$build/generate"
  cp "$build"/prefix/lib/libdsv4c.so* "$build/generate/generate" "$folder"
fi
if [[ $parts == *" operators "* ]]; then
  "$python" -m pytest tests/kernels --compile-kernels --quiet --numprocesses "$jobs"
fi
export DSV4C_LIBRARY=$folder/libdsv4c.so
if [[ $parts == *" engines "* ]]; then
  DSV4C_CACHE_DIR=$build/cubins "$python" -m tests.gpu.prepare "$folder" ${heldout:+"$heldout"}
fi
if [[ $parts == *" slice "* ]]; then
  mkdir -p "$folder/slice"
  DSV4C_CACHE_DIR=$build/cubins "$python" -m tests.benchmarks.h100_slice compile "$folder/slice"
fi
