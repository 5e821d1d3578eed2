"""Duration of `mb.prepare`: the exchange of headers, and the plan that each rank makes.

It runs once per micro-batch, so it must be short compared with a layer. *Exchange*: real gloo
processes on this machine, wall time of the slowest rank, and of `consensus` alone. *Local*: one
process that acts as rank 0 of a large grid and answers the exchange itself. It measures the
processor time of its thread, which other jobs disturb least.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from ranks import on_ranks
from report import markdown, milliseconds, progress, provenance

import megatron_burst as mb
from megatron_burst.masks import Mask
from megatron_burst.plugins.testing import in_process


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    print("\n\n".join([provenance(), describe(args), exchange(args), local(args)]))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seconds, small")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--grids", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--per-node", type=int, default=8, help="ranks of a node, local part")
    parser.add_argument("--local-tokens", type=int, default=16384)
    parser.add_argument("--layouts", nargs="+", default=["zigzag", PADDED, "striped", "balanced"])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if args.quick:
        args.processes, args.grids, args.per_node = [2], [8], 4
        args.local_tokens, args.repeats, args.layouts = 256, 3, ["zigzag", PADDED]
    return args


PADDED = "padded"  # zigzag within each document, whose length is a multiple of 2 x ranks
OF_DOCUMENTS = (PADDED, "balanced")  # layouts that need documents


def cases(seq_len: int, ranks: int, layout: str) -> dict[str, tuple[Mask, mb.layout.Layout | str]]:
    """Return masks with their layouts: 100 documents, and simple masks.

    Document lengths have no common divisor, except with Megatron's padding. Layouts that depend on
    documents have no simple masks.
    """
    multiple = 2 * ranks if layout == PADDED else 1
    cuts = np.random.default_rng(0).choice(np.arange(1, seq_len // multiple), 99, replace=False)
    bounds = [0, *(np.sort(cuts) * multiple).tolist(), seq_len]
    documents = mb.masks.Documents(bounds) & mb.masks.Causal()
    if layout in OF_DOCUMENTS:
        name = "zigzag" if layout == PADDED else layout
        cut = mb.layout.make(name, cp_size=ranks, cu_seqlens=bounds)
        return {"100 documents, causal": (documents, cut)}
    return {
        "causal": (mb.masks.Causal(), layout),
        "window 4K": (mb.masks.Window(4095, 0), layout),
        "100 documents, causal": (documents, layout),
    }


def tensors(local_tokens: int) -> list[torch.Tensor]:
    """Return q, k, v without memory; only their shapes are read."""
    return [torch.zeros(1, 1, 1, 1).expand(local_tokens, 1, heads, 128) for heads in (32, 8, 8)]


def planned(
    mask: Mask,
    groups: mb.Groups,
    layout: mb.layout.Layout | str,
    local_tokens: int,
    again: bool = False,
) -> Callable[[], object]:
    """Make a plan; `again` as in later micro-batches with the same mask."""
    q, k, v = tensors(local_tokens)
    needs = (True, True, True)

    def run() -> object:
        if not again:
            groups.cache.pop("works", None)
        return mb.prepare(
            q, k, v, groups=groups, mask=mask, layout=layout, kernel="aten", needs_grad=needs
        )

    return run


def seconds(
    run: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return seconds of each repeat, after two warm-up repeats."""
    times = []
    for _ in range(repeats + 2):
        start = clock()
        run()
        times.append(clock() - start)
    return times[2:]


# --- the exchange ----------------------------------------------------------------------------


def exchange(args: argparse.Namespace) -> str:
    rows = []
    with progress("exchange", len(args.processes)) as step:
        for size in args.processes:
            step(f"{size} processes")
            got = on_ranks(size, exchanged, args.local_tokens, args.repeats)
            names = got[0]
            for name in names:
                slowest = [max(times) for times in zip(*(g[name] for g in got), strict=True)]
                rows.append([str(size), name, milliseconds(slowest)])
    table = markdown(["processes", "what", "ms, slowest rank"], rows)
    return f"**Exchange**, gloo on loopback:\n\n{table}"


def exchanged(local_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Return seconds of every call on a rank."""
    world = dist.group.WORLD
    assert world is not None
    groups = mb.Groups.flat(world)
    header = torch.zeros(1216, dtype=torch.uint8)
    runs: dict[str, Callable[[], object]] = {
        "one all-gather of headers": lambda: groups.gather(header)
    }
    for name, (mask, layout) in cases(groups.size * local_tokens, groups.size, "zigzag").items():
        runs[f"prepare, {name}"] = planned(mask, groups, layout, local_tokens)
        runs[f"prepare, {name}, again"] = planned(mask, groups, layout, local_tokens, again=True)
    times = {}
    for name, run in runs.items():
        dist.barrier()
        times[name] = seconds(run, repeats)
    return times


# --- the local part --------------------------------------------------------------------------


def alone(size: int, per_node: int) -> mb.Groups:
    """Return groups in which this process is rank 0, and all ranks send the header of rank 0."""
    groups = in_process.groups(inter=size // per_node, intra=per_node).ranks[0]

    def gather(header: torch.Tensor) -> list[torch.Tensor]:
        return [header] * size

    groups.gather = gather  # type: ignore[method-assign]
    return groups


def local(args: argparse.Namespace) -> str:
    """Return the table."""
    rows = []
    sizes = [size for size in args.grids if size % args.per_node == 0]
    masks = sum(1 if layout in OF_DOCUMENTS else 3 for layout in args.layouts)
    with progress("local part", masks * len(sizes)) as step:
        for size in sizes:
            groups = alone(size, args.per_node)
            for layout in args.layouts:
                for name, (mask, cut) in cases(size * args.local_tokens, size, layout).items():
                    step(f"{size} ranks, {layout}, {name}")
                    run = planned(mask, groups, cut, args.local_tokens)
                    start = time.thread_time()
                    run()
                    slow = time.thread_time() - start > 1
                    times = seconds(run, 1 if slow else args.repeats, time.thread_time)
                    later = planned(mask, groups, cut, args.local_tokens, again=True)
                    later()
                    again_seconds = seconds(later, 1 if slow else args.repeats, time.thread_time)
                    rows.append([str(size), layout, name, str(len(times)), milliseconds(times),
                                 milliseconds(again_seconds)])  # fmt: skip
    table = markdown(["ranks", "layout", "mask", "calls", "ms", "ms, again"], rows)
    return f"**Local part**, rank 0 of a grid with {args.per_node} ranks per node:\n\n{table}"


# --- what is written -------------------------------------------------------------------------


def describe(args: argparse.Namespace) -> str:
    return (
        f"{args.local_tokens} tokens per rank, 32:8 heads of width 128, kernel aten, algorithm "
        f"burst; medians (quartiles in brackets) of {args.repeats} calls, of one where a call "
        f"takes over a second; wall time of the exchange, which other jobs of this machine "
        f"lengthen; processor time of the local part. *Again*: as in every later micro-batch; "
        f"documents are others in each, so that nothing is kept of them."
    )


if __name__ == "__main__":
    sys.exit(main())
