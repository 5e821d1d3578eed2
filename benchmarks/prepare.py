"""How long `mb.prepare` takes: the exchange of headers, and the plan each rank makes for itself.

It runs once per micro-batch, so it must be small beside a layer. *Exchange*: real gloo
processes on this machine, wall time of the slowest rank, and of `consensus` alone. *Local*: one
process that stands for rank 0 of a large grid and answers the exchange itself; nothing is sent,
and the processor time of its one thread is taken, which other jobs disturb least. *Parts*: the
schedules of that local part step by step, for the burst algorithm with given side and route, and
what the choice of side and route and the digest of the tables cost beside; *works* is what the
kernels for GPUs plan for all pairs of the rank with most spans.
`--profile` also prints where the local part spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import on_ranks
from report import DOCS, markdown, milliseconds, progress, provenance, write_section

import megatron_burst as mb
from megatron_burst.kernels import registry
from megatron_burst.kernels.aten import AtenKernel
from megatron_burst.kernels.blocks import blocks
from megatron_burst.kernels.operators_cuda import CudaFlash
from megatron_burst.kernels.triton_kernel import TritonKernel
from megatron_burst.layout import Span
from megatron_burst.masks import Mask
from megatron_burst.planning.build import Works, make_pass
from megatron_burst.schedule.cost import Sizes, backward_schedule, forward_schedule
from megatron_burst.schedule.demand import wanted
from megatron_burst.schedule.rings import Schedule
from megatron_burst.schedule.tables import Grid

Shards = Sequence[Sequence[Span]]


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    if args.only_parts:
        print("\n\n".join([provenance(), parts(args)]))
        return 0
    local_table, profiled = local(args)
    text = "\n\n".join([provenance(), describe(args), exchange(args), local_table, parts(args)])
    print(text)
    if args.profile:
        profile(args, profiled)
    if not args.quick:
        write_section(DOCS / "performance.md", "prepare", text)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seconds, small, no file is written")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--grids", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--per-node", type=int, default=8, help="ranks of a node, local part")
    parser.add_argument("--local-tokens", type=int, default=16384)
    parser.add_argument("--layouts", nargs="+", default=["zigzag", "striped"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--parts", type=int, nargs="+", default=[64, 1024], help="grids of *Parts*")
    parser.add_argument("--only-parts", action="store_true", help="print *Parts*, nothing else")
    parser.add_argument("--profile", action="store_true", help="print a profile of every case")
    args = parser.parse_args()
    if args.quick:
        args.processes, args.grids, args.per_node = [2], [8], 4
        args.local_tokens, args.repeats, args.layouts, args.parts = 256, 3, ["zigzag"], [8]
    return args


def masks(seq_len: int) -> dict[str, Mask]:
    """What is planned for: 100 documents of lengths that nothing divides, and simple masks."""
    cuts = np.random.default_rng(0).choice(np.arange(1, seq_len), 99, replace=False)
    documents = mb.masks.Documents([0, *np.sort(cuts).tolist(), seq_len])
    return {
        "causal": mb.masks.Causal(),
        "window 4K": mb.masks.Window(4095, 0),
        "100 documents, causal": documents & mb.masks.Causal(),
    }


def tensors(local_tokens: int) -> list[torch.Tensor]:
    """q, k, v that hold no numbers' worth of memory: only their description is read."""
    return [torch.zeros(1, 1, 1, 1).expand(local_tokens, 1, heads, 128) for heads in (32, 8, 8)]


def planned(
    mask: Mask, groups: mb.Groups, layout: str, local_tokens: int, again: bool = False
) -> Callable[[], object]:
    """again: as in later micro-batches, where what was made for this mask is known."""
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
    """Time of each repeat after two that do not count."""
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
    """On a rank: seconds of every call."""
    world = dist.group.WORLD
    assert world is not None
    groups = mb.Groups.flat(world)
    header = torch.zeros(1216, dtype=torch.uint8)
    runs: dict[str, Callable[[], object]] = {
        "one all-gather of headers": lambda: groups.gather(header)
    }
    for name, mask in masks(groups.size * local_tokens).items():
        runs[f"prepare, {name}"] = planned(mask, groups, "zigzag", local_tokens)
        runs[f"prepare, {name}, again"] = planned(mask, groups, "zigzag", local_tokens, again=True)
    times = {}
    for name, run in runs.items():
        dist.barrier()
        times[name] = seconds(run, repeats)
    return times


# --- the local part --------------------------------------------------------------------------


def alone(size: int, per_node: int) -> mb.Groups:
    """Groups in which this process holds rank 0 only, and every rank answers as it does."""
    groups = mb.Groups.in_process(inter=size // per_node, intra=per_node).ranks[0]

    def gather(header: torch.Tensor) -> list[torch.Tensor]:
        return [header] * size

    groups.gather = gather  # type: ignore[method-assign]
    return groups


def local(args: argparse.Namespace) -> tuple[str, dict[str, Callable[[], object]]]:
    """The table, and each case to be profiled."""
    rows, cases = [], {}
    sizes = [size for size in args.grids if size % args.per_node == 0]
    with progress("local part", 3 * len(sizes) * len(args.layouts)) as step:
        for size in sizes:
            groups = alone(size, args.per_node)
            for layout in args.layouts:
                for name, mask in masks(size * args.local_tokens).items():
                    step(f"{size} ranks, {layout}, {name}")
                    run = planned(mask, groups, layout, args.local_tokens)
                    start = time.thread_time()
                    run()
                    slow = time.thread_time() - start > 1
                    times = seconds(run, 1 if slow else args.repeats, time.thread_time)
                    later = planned(mask, groups, layout, args.local_tokens, again=True)
                    later()
                    known = seconds(later, 1 if slow else args.repeats, time.thread_time)
                    rows.append([str(size), layout, name, str(len(times)), milliseconds(times),
                                 milliseconds(known)])  # fmt: skip
                    cases[f"{size} ranks, {layout}, {name}"] = run
    table = markdown(["ranks", "layout", "mask", "calls", "ms", "ms, again"], rows)
    return (
        f"**Local part**, rank 0 of a grid with {args.per_node} ranks per node:\n\n{table}",
        cases,
    )


# --- the schedules, part by part -------------------------------------------------------------


def pieces(size: int, seq_len: int, count: int = 80) -> list[list[Span]]:
    """A layout with many spans of every length on each rank, as documents in balance have them."""
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, seq_len), size * count - 1, replace=False)).tolist()
    owners = rng.permutation(np.repeat(np.arange(size), count)).tolist()
    shards: list[list[Span]] = [[] for _ in range(size)]
    for owner, (start, stop) in zip(owners, pairwise([0, *cuts, seq_len]), strict=True):
        shards[owner].append(Span(start, 1, stop - start))
    return shards


def planning_cases(args: argparse.Namespace) -> Iterator[tuple[int, str, str, Mask, Shards]]:
    for size in args.parts:
        seq_len = size * args.local_tokens
        masked = masks(seq_len)
        documents = masked["100 documents, causal"]
        step = 2 * size
        cuts = np.unique(np.linspace(0, seq_len // step, 101).astype(int)) * step
        whole = {name: mb.layout.make(name, cp_size=size) for name in ("zigzag", "striped")}
        spans = {n: [x.spans(r, seq_len) for r in range(size)] for n, x in whole.items()}
        for name, mask in masked.items():
            yield size, "zigzag", name, mask, spans["zigzag"]
        if size <= 64:
            yield size, "striped", "100 documents, causal", documents, spans["striped"]
            yield size, "80 spans", "100 documents, causal", documents, pieces(size, seq_len)
            zigzag = mb.layout.make("zigzag", cp_size=size, cu_seqlens=cuts)
            shards = [zigzag.spans(rank, seq_len) for rank in range(size)]
            mask = mb.masks.Documents(cuts) & mb.masks.Causal()
            yield size, "zigzag in each", "100 documents, causal", mask, shards
        for median, sigma, most in ((1024, 1.0, 1 << 15), (8192, 1.6, 1 << 20)):
            cuts = packed(seq_len, median, sigma, most)
            balanced = mb.layout.make("balanced", cp_size=size, cu_seqlens=cuts)
            shards = [balanced.spans(rank, seq_len) for rank in range(size)]
            mask = mb.masks.Documents(cuts) & mb.masks.Causal()
            name = f"{len(cuts) - 1} documents, causal, median {median}"
            yield size, f"balanced, {max(map(len, shards))} spans", name, mask, shards


def packed(seq_len: int, median: int, sigma: float, most: int) -> list[int]:
    """Cumulative lengths of documents, log-normal and at most so long; the last one is cut."""
    rng, cuts = np.random.default_rng(0), [0]
    while cuts[-1] < seq_len:
        length = int(np.clip(rng.lognormal(np.log(median), sigma), 16, most))
        cuts.append(min(cuts[-1] + length, seq_len))
    return cuts


def parts(args: argparse.Namespace) -> str:
    rows = []
    for size, layout, name, mask, shards in planning_cases(args):
        grid = Grid(size // args.per_node, args.per_node)
        sizes = Sizes(args.local_tokens, 1, heads=32, kv_heads=8, width=128, value_width=128,
                      itemsize=2, stat_itemsize=4, wire_itemsize=4,
                      needs_grad=(True, True, True))  # fmt: skip
        runs = planning_parts(mask, shards, grid, sizes)
        times = {
            part: np.array(seconds(run, args.repeats, time.thread_time))
            for part, run in runs.items()
        }
        total = sum(times[part] for part in ("wanted", "forward", "backward", "program"))
        rows.append([str(size), layout, name, *map(milliseconds, (total, *times.values()))])
    head = ["ranks", "layout", "mask", "first four", *runs]
    return f"**Parts**, ms, {args.per_node} ranks per node:\n\n{markdown(head, rows)}"


class Pairs(TritonKernel):
    """Stands for a kernel: remembers which pairs of spans a rank computes, each once."""

    def __init__(self):
        super().__init__()
        self.seen: dict[tuple, None] = {}

    def work_for(self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> Any:
        self.seen[tuple(q_spans), tuple(k_spans)] = None
        return self

    def tiles(self, kernel: AtenKernel, mask: Mask) -> None:
        """What torch's operator for GPUs plans for them."""
        for spans in self.seen:
            kernel.work_for(mask, *spans)

    def launches(self, kernel: TritonKernel, mask: Mask, device: torch.device) -> None:
        """What the Triton kernels plan for them, on Hopper, forward and backward."""
        works = [kernel.work_for(mask, *spans) for spans in self.seen]
        for way, by in (("forward", "rows"), ("backward", "columns")):
            for work in works:
                if work is not None:
                    work.launches(blocks(90, way, 128), by, device)


def planning_parts(
    mask: Mask, shards: Shards, grid: Grid, sizes: Sizes
) -> dict[str, Callable[[], object]]:
    """What `planning.prepare` does for a ring, one after another."""
    seen = wanted(mask, shards, shards)

    def forward(route: str = "ring") -> Schedule:
        return forward_schedule("burst", grid, seen, sizes, route=route)

    def backward(side: str = "kv", route: str = "ring") -> Schedule:
        return backward_schedule("burst", grid, seen, sizes, side=side, route=route)

    made = forward(), backward()
    for schedule in made:
        assert len(schedule.tables.pairs.rank)  # tables are cached: the parts below find them
    device, rank = torch.device("cpu"), int(np.argmax([len(spans) for spans in shards]))

    def works() -> list[object]:
        found = Works(registry.make("aten", *tensors(2)), mask, shards, shards)
        return [make_pass("pass", schedule, rank, found, device) for schedule in made]

    pairs = Pairs()
    for schedule in made:
        make_pass("pass", schedule, rank, Works(pairs, mask, shards, shards), device)

    return {
        "wanted": lambda: wanted(mask, shards, shards),
        "forward": lambda: forward().tables,
        "backward": lambda: backward().tables,
        "program": lambda: [schedule.program(rank) for schedule in made],
        "program and works": works,
        "works, CUDA": lambda: pairs.tiles(AtenKernel("aten", CudaFlash()), mask),
        "works, Triton": lambda: pairs.launches(TritonKernel(), mask, device),
        "choice of side and route": lambda: (forward("auto"), backward("auto", "auto")),
        "digest": lambda: [schedule.tables.digest for schedule in made],
    }


def profile(args: argparse.Namespace, cases: dict[str, Callable[[], object]]) -> None:
    for name, run in cases.items():
        profiler = cProfile.Profile()
        profiler.runcall(run)
        print(f"\n== {name}")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


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
