"""Command line of the GPU benchmark: `benchmarks/gpu.sh --help`.

It imports only the standard library at first, so a missing module or GPU is reported in one line.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from .supervise import Budget

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("tests", "attention", "ring", "lm_head", "store")
MORE = ("blocks",)  # only on request
NEEDED = ("torch", "numpy", "rich", "matplotlib", "pytest", "hypothesis")


def main() -> int:
    args = _parser().parse_args()
    budget = Budget(args.seconds)  # imports of torch count, too
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if "torch" not in missing and args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print(f"no CUDA device here (torch {torch.__version__}): nothing was run or measured")
            return 0
    if missing:
        print(
            f"missing: the Python module{'s' * (len(missing) > 1)} {', '.join(missing)}, for "
            f"{sys.executable}; install them, or name another interpreter: "
            "PYTHON=... benchmarks/gpu.sh",
            file=sys.stderr,
        )
        return 1
    from . import everything

    try:
        return everything.main(args, budget)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh",
        description="Correctness and speed on one GPU, the most important first, in one call of "
        "under ten minutes; called again it goes on with what is left.",
    )
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny, to test the script")
    add("--seconds", type=float, default=570.0, help="after which the call has ended")
    add("--limit", type=float, default=90.0, help="seconds for one test or cell")
    add("--parts", nargs="+", choices=PARTS + MORE, default=list(PARTS))
    add("--tests", nargs="+", default=["tests/gpu"], help="paths that pytest is given")
    add("--tokens", type=int, nargs="+", help="rows of a shard, in order of importance")
    add("--heads", nargs="+", help="such as 32:8, in order of importance")
    add("--masks", nargs="+", help="only masks whose name contains one of these")
    add("--ring-tokens", type=int, help="per rank")
    add("--out", type=Path, default=ROOT / "runs" / "gpu", metavar="FOLDER",
        help="results.jsonl and tables.md, kept up to date, and log.txt")  # fmt: skip
    add("--fresh", action="store_true", help="forget what FOLDER has, instead of going on with it")
    # arguments of a child: its stage, and its seconds
    add("--stage", help=argparse.SUPPRESS)
    add("--left", type=float, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
