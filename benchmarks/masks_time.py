"""How long masks take on the CPU kernel against no mask at all: same tensors, one rank.

Part of `masks.py`, which calls `measure`. Kernel calls and merging only, no ranks, no plan. Full,
causal and a window run in turns, and each ratio is taken within a round, so that other jobs on
the machine disturb all of them alike; processor time of the one thread is given besides wall
time, because it leaves out the turns of other jobs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from report import Runs, human, interleaved, markdown, milliseconds, progress, ratio

import megatron_burst as mb
from megatron_burst.kernels.base import Kernel, Rows, Scoring
from megatron_burst.kernels.online_softmax import empty_result
from megatron_burst.kernels.registry import make
from megatron_burst.layout import Span
from megatron_burst.masks import Mask

CLOCKS = ("wall", "CPU", "fastest")
PATIENCE = 120.0  # seconds per row of the table, after which three rounds are enough


def measure(args: argparse.Namespace) -> str:
    """A table: causal and a window over full, forward and backward, per width and dtype."""
    window = args.tokens // 4
    masks = {"full": mb.masks.Full(), "causal": mb.masks.Causal(),
             f"window {human(window)}": mb.masks.Window(window - 1, 0)}  # fmt: skip
    names = list(masks)[1:]
    rows = []
    kinds = [(w, getattr(torch, d)) for w in args.widths for d in args.dtypes]
    with progress("timing", 2 * len(kinds)) as step:
        for width, dtype in kinds:
            for title, runs in directions(args, masks, width, dtype):
                kind = [title, str(width), str(dtype).removeprefix("torch.")]
                step(", ".join(kind))
                wall, cpu = interleaved(runs, args.repeats, PATIENCE)
                cells = [str(len(cpu["full"])), milliseconds(cpu["full"])]
                for name in names:
                    fastest = min(cpu[name]) / min(cpu["full"])
                    cells += [ratio(wall, name, "full"), ratio(cpu, name, "full"), f"{fastest:.3f}"]
                rows.append([*kind, *cells])
    ratios = [f"{name} / full, {clock}" for name in names for clock in CLOCKS]
    columns = ["direction", "width", "dtype", "rounds", "full, ms", *ratios]
    shares = ", ".join(f"{name} {computed(args, masks[name]):.3f}" for name in names)
    head = (
        f"Kernel aten, one rank, {human(args.tokens)} tokens, {args.heads} heads, one thread, "
        f"merging included: medians over rounds of full, causal and window in turns, the ratios "
        f"within a round, quartiles in brackets; wall time and processor time of the thread. "
        f"*Fastest*: the least processor time of each over all rounds, which a crowded machine "
        f"(cold caches) changes least. "
        f"Pairs in the tiles over those of full: {shares}."
    )
    return f"{head}\n\n{markdown(columns, rows)}"


def whole(args: argparse.Namespace) -> tuple[Span, ...]:
    return (Span(0, 1, args.tokens),)


def computed(args: argparse.Namespace, mask: Mask) -> float:
    """The share of all pairs that lies in the tiles of a mask."""
    some = torch.zeros(1, 1, 1, 1)
    work = make("aten", some, some, some).work_for(mask, whole(args), whole(args))
    return sum(call.tile.computed for call in work) / args.tokens**2


def directions(
    args: argparse.Namespace, masks: dict[str, Mask], width: int, dtype: torch.dtype
) -> Iterator[tuple[str, Runs]]:
    """("forward", mask -> run), then the same backward."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(args.tokens, 1, args.heads, width).to(dtype) for _ in range(4))
    kernel = make("aten", q, k, v)
    runs = {}
    for name, mask in masks.items():
        runs[name] = both(kernel, kernel.work_for(mask, whole(args), whole(args)), q, k, v, dout)
    for i, title in enumerate(("forward", "backward")):
        yield title, {name: run[i] for name, run in runs.items()}


def both(kernel: Kernel, work, q, k, v, dout):
    """Forward and backward of one pair of shards, as the ring runs them."""
    scoring, totals = Scoring(q.shape[-1] ** -0.5), [torch.zeros(q.shape) for _ in range(3)]

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = empty_result(q, v.shape[-1])
        kernel.forward(q, k, v, work, scoring, out, lse)
        return out, lse

    out, lse = forward()
    rows = Rows(q, dout, lse, (dout.float() * out).sum(-1), out.to(q.dtype))
    return forward, lambda: kernel.backward(rows, k, v, work, scoring, *totals)
