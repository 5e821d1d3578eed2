#!/usr/bin/env bash
# Correctness and speed of the aten kernels on one GPU, in one call. PYTHON names the interpreter.
# Without a GPU it says so and exits 0. Arguments go to gpu.py (see `gpu.py --help`).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
