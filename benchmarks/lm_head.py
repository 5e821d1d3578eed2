"""Fused LM head compared with others: time and memory of forward and backward.

It measures the loss and, with `--parts logprobs`, log-probabilities and entropies with gradients.
Every figure is measured in its own process (`lm_head_case`), in alternating order. Times are wall
time and processor time, because other programs may share the machine. Ratios compare with ours in
the same round: median, lowest and highest. Extra memory is what a call needs beyond its inputs,
their gradients and a float32 gradient of the weight. Implementations that cannot run are listed
with the reason. `--device cuda` measures on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lm_head_case import IMPLEMENTATIONS
from report import human, markdown, progress, provenance

OURS = "single_pass"
LOSSES = ("single_pass", "recompute", "eager", "megatron", "megatron_native", "torch_chunked",
          "torch_chunked_1024", "cut_cross_entropy", "liger", "three_products")  # fmt: skip
LOGPROBS = ("linear_logprobs", "logprobs_eager", "logprobs_checkpointed", "verl_torch",
            "liger_scaled", "four_products")  # fmt: skip
PARTS = {"time": LOSSES, "logprobs": LOGPROBS}
MIB = 2**20


def main() -> int:
    args = arguments()
    for part in args.parts:
        for dtype in args.dtypes:
            text = times(args, dtype, PARTS[part])
            print(f"{text}\n\nMeasured with {provenance()}", end="\n\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="seconds, small")
    add("--parts", nargs="+", default=PARTS, choices=PARTS)
    add("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--tokens", type=int, default=8192)
    add("--width", type=int, default=1024)
    add("--vocabulary", type=int, default=32768)
    add("--threads", type=int, default=1)
    add("--rounds", type=int, default=5)
    add("--limit", type=float, default=3600, help="seconds for one process")
    add("--only", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS),
        help="and ours, with which they are compared")  # fmt: skip
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.width, args.vocabulary, args.rounds = 256, 64, 512, 1
        args.dtypes = ["float32"]
        args.only = ["eager", "torch_chunked", "logprobs_eager", "logprobs_checkpointed"]
    return args


def ask(args: argparse.Namespace, name: str, dtype: str) -> dict:
    """Run one measurement in its own process: {"wall", "cpu", "extra", ...} or {"failed"}."""
    case = {
        "name": name, "device": args.device, "tokens": args.tokens, "width": args.width,
        "vocabulary": args.vocabulary, "dtype": dtype, "threads": args.threads,
        "tile": None,
    }  # fmt: skip
    script = Path(__file__).with_name("lm_head_case.py")
    command = [sys.executable, str(script), json.dumps(case)]
    quiet = os.environ | {"OMP_NUM_THREADS": str(args.threads), "TORCHDYNAMO_DISABLE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.limit, env=quiet
        )
    except subprocess.TimeoutExpired:
        return case | {"failed": f"took more than {args.limit:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        missing = lines[-1].startswith("ModuleNotFoundError")
        return case | {"failed": "not installed" if missing else lines[-1][:120]}
    return case | json.loads(done.stdout.splitlines()[-1])


def times(args: argparse.Namespace, dtype: str, every: Sequence[str]) -> str:
    """Return a table of times; `every` are all implementations, ours first."""
    ours, *others = every
    names = [ours, *(name for name in others if name in args.only)]
    results: dict[str, dict[int, dict]] = {name: {} for name in names}
    failed: dict[str, str] = {}
    with progress(f"time, {dtype}", args.rounds * len(names)) as step:
        for number in range(args.rounds):
            for name in names if number % 2 else reversed(names):
                step(name)
                if name in failed:  # it would fail again
                    continue
                result = ask(args, name, dtype)
                if "failed" in result:
                    failed[name] = result["failed"]
                else:
                    results[name][number] = result
    rows = [[name, reason, "", "", "", ""] for name, reason in failed.items()]
    rows = [row(name, results[name], results[ours]) for name in names if name not in failed] + rows
    title = (
        f"{human(args.tokens)} tokens x width {args.width} x vocabulary {human(args.vocabulary)}, "
        f"{dtype}, {args.threads} thread, {args.rounds} rounds."
    )
    columns = ["", "wall s", "over ours", "processor s", "over ours", "extra MiB"]
    return f"{title}\n\n{markdown(columns, rows)}"


def row(name: str, results: dict[int, dict], ours: dict[int, dict]) -> list[str]:
    cells = [name]
    for key in ("wall", "cpu"):
        ratios = [results[r][key] / ours[r][key] for r in results if r in ours]
        cells.append(f"{statistics.median(result[key] for result in results.values()):.2f}")
        spread = f"[{min(ratios):.3f}, {max(ratios):.3f}]"
        cells.append(f"{statistics.median(ratios):.3f} {spread}")
    extra = statistics.median(result["extra"] for result in results.values())
    return [*cells, f"{extra / MIB:.0f}"]


if __name__ == "__main__":
    sys.exit(main())
