"""Peak memory and time of a step, by fraction of the attention store.

    python benchmarks/checkpoint.py          # 2 ranks, 4K to 16K tokens

The benchmark runs pre-norm attention and MLP layers (`store_layers`) on a sequence that is striped
over gloo ranks. Every cell runs in its own processes. It measures the highest resident set over the
ranks, minus the resident set before the first step, and the medians of wall time and processor time
of a step on the slowest rank. Ratios compare processor time, because other programs may share the
machine. "none" saves every activation, "full" recomputes everything, and a number is the fraction
of attention outputs in the store.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from typing import Any, NamedTuple

import report
import torch
import torch.distributed as dist
from ranks import on_ranks
from store_layers import MODES, Layer, step

import megatron_burst as mb


class CellResult(NamedTuple):
    """Results of a cell: extra peak in MiB, seconds, processor seconds, store bytes."""

    extra: float
    wall: float
    processor: float
    stored: int


def on_rank(cell: dict[str, Any]) -> tuple[float, ...]:
    """Return the extra peak in MiB, median seconds and processor seconds, and store bytes."""
    torch.manual_seed(dist.get_rank())
    rows, width, heads = cell["tokens"] // cell["ranks"], cell["width"], cell["heads"]
    q = torch.zeros(rows, 1, heads, width // heads)
    mode = cell["mode"]
    plan = mb.prepare(
        q, q, q, groups=mb.Groups.flat(dist.GroupMember.WORLD), layout="striped",
        needs_grad=(True,) * 3, store=float(mode) if mode[0].isdigit() else None,
    )  # fmt: skip
    layers = [Layer((heads, heads), width // heads, plan) for _ in range(cell["layers"])]
    x = torch.randn(rows, 1, width, requires_grad=True)
    mb.checkpoint(torch.sin, x[:1], keep=0.0).sum().backward()  # what torch imports for it
    before, wall, processor = _peak(), [], []
    for _ in range(1 + cell["repeats"]):
        dist.barrier()
        start, begun = time.perf_counter(), time.process_time()
        step(layers, x, mode)
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - begun)
        x.grad = None
    times = [statistics.median(seconds[1:]) for seconds in (wall, processor)]
    return _peak() - before, *times, plan.store_bytes


def _peak() -> float:
    """Return the highest resident set so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(cell: dict[str, Any]) -> CellResult:
    """Return the maximum over ranks of each result."""
    rank_results = on_ranks(cell["ranks"], on_rank, cell)
    return CellResult(*(max(field_values) for field_values in zip(*rank_results, strict=True)))


def table(cells: dict[tuple[int, str], CellResult], args: argparse.Namespace) -> str:
    """Return a table with ratios to "full" (full recomputation)."""
    rows = []
    for tokens in args.tokens:
        full = cells[tokens, "full"]
        for mode in args.modes:
            cell = cells[tokens, mode]
            rows.append([
                report.human(tokens), mode, f"{cell.extra:.0f}", f"{cell.extra / full.extra:.2f}",
                f"{cell.wall:.2f}", f"{cell.processor:.2f}",
                f"{cell.processor / full.processor:.2f}",
                f"{cell.stored * args.layers / 2**20:.1f}",
            ])  # fmt: skip
    heads = ["tokens", "kept", "extra peak, MiB", "over full", "step, wall s", "processor s",
             "over full", "store by formula, MiB"]  # fmt: skip
    return report.markdown(heads, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if "full" not in args.modes:
        raise ValueError(f"--modes {args.modes}: the others are compared with full; add it")
    cells = {}
    common = {name: getattr(args, name) for name in ("ranks", "layers", "width", "heads")}
    todo = [(tokens, mode) for tokens in args.tokens for mode in args.modes]
    with report.progress("checkpoint", len(todo)) as begin:
        for tokens, mode in todo:
            begin(f"{report.human(tokens)} tokens, {mode}")
            cell = common | {"tokens": tokens, "mode": mode, "repeats": args.repeats}
            cells[tokens, mode] = measure(cell)
    print(
        f"{args.layers} layers of width {args.width} with {args.heads} heads, striped over "
        f"{args.ranks} CPU ranks, fp32, causal.\n\n{table(cells, args)}\n\n"
        f"Measured with {report.provenance()}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
