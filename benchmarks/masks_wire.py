"""What travels for a mask under each layout, from the schedule; and counted while it runs.

Part of `masks.py`, which calls `measure`. A full-size plan says which route is taken, ring or
straight from owner to user, and what every rank sends. Then the same grid, mask and layout run
in this process with every length divided by the same number, and narrower heads; what its counters
counted must be the bytes of that run's own schedules, rank by rank.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch
from prepare import alone
from report import human, markdown, progress

import megatron_burst as mb
from megatron_burst.schedule import cost
from megatron_burst.schedule.rings import Schedule
from megatron_burst.schedule.tables import ROUTES

KV_HEADS, WIDTH = 8, 128  # bf16; 8 query heads too: with side kv they do not travel
SMALL_HEADS, SMALL_WIDTH = 1, 16  # of the run
LAYOUTS = ("contiguous", "zigzag", "striped")


def measure(args: argparse.Namespace) -> str:
    """The table of layouts, and whether the counters agree."""
    window, shrunk = args.local_tokens // 4, args.local_tokens // args.small
    rows, wrong = [], []
    with progress("bytes", 2 * len(LAYOUTS)) as step:
        for layout in LAYOUTS:
            step(f"plan of {layout}")
            plan = full_size(args, layout, window)
            step(f"run of {layout}")
            agreed = run(args, layout, window // shrunk)
            for name, passes, agree in zip(("forward", "backward"), plan.schedules, agreed,
                                           strict=True):  # fmt: skip
                planned = traffic(passes, plan.sizes)
                other, = (r for r in ROUTES if r != passes.route)  # fmt: skip
                rows.append([layout, name, passes.route, *cells(planned),
                             cells(traffic(routed(passes, other), plan.sizes))[0],
                             "equal" if agree else "DIFFERENT"])  # fmt: skip
                wrong += [] if agree else [f"{layout}, {name}"]
    if wrong:
        raise AssertionError(f"the counters differ from the schedule: {wrong}")
    columns = ["layout", "pass", "route", "MiB a rank sends: mean (most)", "between nodes",
               "by the other route", "counters"]  # fmt: skip
    head = (
        f"Window of {human(window)} over {args.ranks} ranks ({args.ranks // args.per_node} nodes "
        f"of {args.per_node}) x {human(args.local_tokens)} tokens, algorithm burst, bf16, "
        f"{KV_HEADS} key/value heads of width {WIDTH}, side kv, gradients travelling in fp32. "
        f"*Counters*: the same grid run in one process with every length divided by {shrunk} and "
        f"{SMALL_HEADS} head of width {SMALL_WIDTH}; what each rank sent against the bytes of that "
        "run's schedules."
    )
    return f"{head}\n\n{markdown(columns, rows)}"


def full_size(args: argparse.Namespace, layout: str, window: int) -> mb.Plan:
    """The plan of rank 0 of the whole grid; only the shapes of its tensors exist."""
    groups = alone(args.ranks, args.per_node)
    some = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    tensors = [some.expand(args.local_tokens, 1, KV_HEADS, WIDTH)] * 3
    return mb.prepare(
        *tensors, groups=groups, mask=mb.masks.Window(window - 1, 0), layout=layout, side="kv",
        kernel="aten", needs_grad=(True, True, True),
    )  # fmt: skip


def run(args: argparse.Namespace, layout: str, window: int) -> list[bool]:
    """Did every rank send what its plan says, in forward and in backward?"""
    groups = mb.Groups.in_process(inter=args.ranks // args.per_node, intra=args.per_node)
    shape = (args.small, 1, SMALL_HEADS, SMALL_WIDTH)
    shards = [[torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
               for _ in range(args.ranks)] for _ in range(3)]  # fmt: skip
    mask = mb.masks.Window(window - 1, 0)
    plan = mb.prepare(*shards, groups=groups, mask=mask, layout=layout, side="kv", kernel="aten")
    planned = [
        [(sent.intra, sent.inter) for sent in each]
        for each in zip(*(one.traffic() for one in plan.ranks), strict=True)
    ]
    outs = mb.attention(*shards, plan=plan)
    sent = [drained(groups)]
    torch.autograd.backward(outs, [torch.zeros_like(out) for out in outs])
    return [a == b for a, b in zip([*sent, drained(groups)], planned, strict=True)]


def drained(groups: mb.Groups) -> list[tuple[int, int]]:
    """What the counters hold, which then begin again."""
    sent = [(member.counters.intra, member.counters.inter) for member in groups.ranks]
    for member in groups.ranks:
        member.counters.reset()
    return sent


def routed(plan: Schedule, route: str) -> Schedule:
    """The same pass by another route."""
    return replace(plan, route=route)


def traffic(plan: Schedule, sizes: cost.Sizes) -> list[cost.Traffic]:
    return [cost.traffic(plan, rank, sizes) for rank in range(plan.grid.size)]


def cells(sent: list[cost.Traffic]) -> tuple[str, str]:
    """Mean and largest MiB of a rank, and how much of all crosses nodes."""
    total = [each.total / 2**20 for each in sent]
    across = sum(each.inter for each in sent) / sum(each.total for each in sent)
    return f"{statistics.mean(total):.1f} ({max(total):.0f})", f"{across:.0%}"
