"""What the attention store costs and saves: peak memory and time of a step, by fraction kept.

    python benchmarks/checkpoint.py          # 2 ranks, 4K to 16K tokens, into docs/performance.md

A stack of pre-norm attention and MLP layers, its sequence striped over gloo ranks. Every cell is
measured in processes of its own: the highest resident set over the ranks, less what it was before
the first step, and the median of a step's wall time and, because other programs may share the
machine, of its processor time on the slowest rank, of which the ratios are. "none" saves every
activation, "full" recomputes everything, a number is the fraction of attention results in the
store. Decides what is compared; the layers are the benchmark's own, the checkpoint is
`mb.checkpoint`.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import report
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

import megatron_burst as mb

MODES = ("none", "full", "0.25", "0.5", "1.0")
# BurstEngine, table 2: (kept, tokens per second and GPU, peak GB per GPU).
PUBLISHED = (("full", 94.81, 41.45), ("0.5", 108.82, 45.93), ("1.0", 117.83, 53.91))


class Found(NamedTuple):
    """What a cell measured: extra peak in MiB, seconds and processor seconds of a step, bytes."""

    extra: float
    wall: float
    processor: float
    stored: int


class Layer(nn.Module):
    """Attention and an MLP four times as wide, each behind a norm and with a residual."""

    def __init__(self, width: int, heads: int, plan: mb.Plan):
        super().__init__()
        self.plan, self.heads = plan, heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, 1, width] -> the same"""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3 * self.heads, -1)).chunk(3, dim=2)
        x = x + self.out(mb.attention(q, k, v, plan=self.plan).flatten(2))
        return x + self.mlp(self.norms[1](x))


def step(layers: list[Layer], x: torch.Tensor, mode: str) -> None:
    """Forward and backward of all layers."""
    for layer in layers:
        keep = 0.0 if mode == "full" else None if mode == "none" else float(mode)
        x = layer(x) if keep is None else mb.checkpoint(layer, x, keep=keep)
    x.square().mean().backward()


def on_rank(cell: dict[str, Any]) -> tuple[float, ...]:
    """Of one rank of a cell: extra peak in MiB, median seconds and processor seconds of a step,
    bytes of the store."""
    torch.manual_seed(dist.get_rank())
    rows, width, heads = cell["tokens"] // cell["ranks"], cell["width"], cell["heads"]
    q = torch.zeros(rows, 1, heads, width // heads)
    mode = cell["mode"]
    plan = mb.prepare(
        q, q, q, groups=mb.Groups.flat(dist.GroupMember.WORLD), layout="striped",
        needs_grad=(True,) * 3, store=float(mode) if mode[0].isdigit() else None,
    )  # fmt: skip
    layers = [Layer(width, heads, plan) for _ in range(cell["layers"])]
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
    times = [statistics.median(each[1:]) for each in (wall, processor)]
    return _peak() - before, *times, plan.store_bytes


def _peak() -> float:
    """MiB; the highest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(cell: dict[str, Any]) -> Found:
    """The highest of the ranks in each of what they measured."""
    found = on_ranks(cell["ranks"], on_rank, cell)
    return Found(*(max(each) for each in zip(*found, strict=True)))


def table(cells: dict[tuple[int, str], Found], args: argparse.Namespace) -> str:
    """Ratios to "full", which is what a store is added to."""
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


def draw(cells: dict[tuple[int, str], Found], path: Path, args: Any) -> None:
    """Memory against time: what is lower and further left is better."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for tokens in args.tokens:
        full = cells[tokens, "full"]
        points = [
            (cells[tokens, mode].processor / full.processor, cells[tokens, mode].extra / full.extra)
            for mode in args.modes
        ]
        left.plot(*zip(*sorted(points), strict=True), ".-", lw=0.6, label=report.human(tokens))
        for mode, point in zip(args.modes, points, strict=True):
            left.annotate(mode, point, fontsize=8)
    left.set(xlabel="processor time of a step / that of full recompute",
             ylabel="extra peak / that of full recompute",
             title=f"Measured, {args.ranks} CPU ranks")  # fmt: skip
    left.legend(title="tokens")
    for kept, speed, memory in PUBLISHED:
        right.plot(1e3 / speed, memory, "k.")
        right.annotate(kept, (1e3 / speed, memory), fontsize=8)
    right.set(xlabel="ms per token and GPU", ylabel="peak per GPU, GB",
              title="BurstEngine's table 2: 14B, 1M tokens, 32 x A800")  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=report.DOCS)
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
    draw(cells, args.output / "checkpoint.png", args)
    report.write_section(
        args.output / "performance.md",
        "checkpoint",
        f"{args.layers} layers of width {args.width} with {args.heads} heads, striped over "
        f"{args.ranks} CPU ranks, fp32, causal.\n\n{table(cells, args)}\n\n"
        f"![Memory against time](checkpoint.png)\n\nMeasured with {report.provenance()}",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
