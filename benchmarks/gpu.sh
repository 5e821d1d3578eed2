#!/usr/bin/env bash
# Correctness and speed on one GPU, the most important first, in one call of under ten minutes; the
# same call again goes on. Runs tests/gpu and prints tables, also kept in runs/gpu/tables.md.
# PYTHON names the interpreter (default python3); see `benchmarks/gpu.sh --help`.
# Without a GPU it says so and exits 0.
set -euo pipefail
python=${PYTHON:-python3}
command -v "$python" > /dev/null || {
  echo "benchmarks/gpu.sh: there is no $python here; name an interpreter: PYTHON=/path/to/python3" >&2
  exit 1
}
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.gpu "$@"
