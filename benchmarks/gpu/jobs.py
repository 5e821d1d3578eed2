"""Stages of tests and cells, the most important first.

The order is: some tests of every kernel, the main figures of the documentation, then cells that
compile long or repeat at other sizes. This module decides the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from . import attention, lm_head, packs, ring, rivals, store, tuning
from .attention import Cell
from .cases import Case, cases
from .clock import Clock
from .sizes import Sizes
from .supervise import Budget

Record = dict[str, Any]


class Job(NamedTuple):
    """One cell. `run(results so far, budget)` returns its record."""

    name: str
    run: Callable[[Record, Budget], Record]


class Stage(NamedTuple):
    """Work of one child process: tests that carry these marks, or jobs."""

    name: str
    jobs: list[Job] = []  # noqa: RUF012  never modified
    marks: str = ""
    share: float = 1.0  # maximum fraction of the whole time


def stages(args: Any, sizes: Sizes, device: torch.device) -> list[Stage]:
    """Return the requested stages in order of importance."""
    clock = Clock(device)
    which = "gpu" if args.device == "cuda" else "not gpu"
    grid = list(_attention(args, sizes, clock))
    compiled = list(_attention(args, sizes, clock, True)) if rivals.compiled(device) else []
    head = [Job("LM head", lambda results, budget: lm_head.measure(sizes, clock))]
    kept = [Job("attention store", lambda results, budget: store.measure(sizes, clock))]
    rings = list(_rings(sizes, clock))
    packed = [Job(kind, lambda results, budget, kind=kind: packs.measure(kind, sizes, clock))
              for kind in packs.KINDS]  # fmt: skip
    # The first size and ratio of heads: two masks, then one cell of every other table, then the
    # rest.
    first, lead = len(_masks(args, sizes, sizes.tokens[0])), sizes.lead
    chosen = {
        "attention": [*grid, *compiled, *packed],
        "ring": rings,
        "lm_head": head,
        "store": kept,
    }
    requested = {job.name for part, jobs in chosen.items() if part in args.parts for job in jobs}
    early = [
        *grid[:lead], *head, *rings[:1], *grid[lead:first], *compiled[:first], *packed, *kept,
        *rings[1:],
    ]  # fmt: skip
    late = [*grid[first:], *compiled[first:]]
    early, late = ([job for job in jobs if job.name in requested] for jobs in (early, late))
    tested, tuned = "tests" in args.parts, "blocks" in args.parts
    every = [
        *([Stage("tests of a few cases", marks=f"{which} and first", share=0.3)] * tested),
        Stage("cells", early),
        *([Stage("all other tests", marks=f"{which} and not first")] * tested),
        Stage("other cells", late),
        Stage("blocks", list(_blocks(sizes, clock)) * tuned),
    ]
    return [stage for stage in every if stage.jobs or stage.marks]


def _attention(args: Any, sizes: Sizes, clock: Clock, compiled: bool = False) -> Iterator[Job]:
    """Yield every mask at the first size, then at the next."""
    cells = [
        Cell(case, heads, tokens, compiled)
        for tokens, heads in _by_importance(sizes)
        for case in _masks(args, sizes, tokens)
    ]
    for cell in cells:
        yield Job(
            cell.name, lambda results, budget, cell=cell: attention.measure(cell, sizes, clock)
        )


def _blocks(sizes: Sizes, clock: Clock) -> Iterator[Job]:
    """Yield each width in both directions, over a causal pair with tiles of both kinds."""
    tokens = sizes.tokens[0]
    case = next(c for c in cases(tokens, sizes.window, sizes.block) if "own keys" in c.name)
    cell = Cell(case, sizes.heads[0], tokens)
    for width in tuning.WIDTHS:
        for direction in tuning.DIRECTIONS:
            yield Job(
                f"blocks, {direction}, width {width}",
                lambda results, budget, direction=direction, width=width: tuning.measure(
                    direction, width, cell, sizes, clock
                ),
            )


def _masks(args: Any, sizes: Sizes, tokens: int) -> list[Case]:
    every = cases(tokens, sizes.window, sizes.block)
    wanted = args.masks or [""]
    chosen = [case for case in every if any(word in case.name for word in wanted)]
    if not chosen:
        raise ValueError(f"--masks {wanted}: there are {[case.name for case in every]}")
    return chosen


def _by_importance(sizes: Sizes) -> list[tuple[int, tuple[int, int]]]:
    """Sort pairs (tokens, heads) by the sum of their indices, then by the index of tokens."""
    every = [
        (i + j, i, tokens, heads)
        for i, tokens in enumerate(sizes.tokens)
        for j, heads in enumerate(sizes.heads)
    ]
    return [(tokens, heads) for _, _, tokens, heads in sorted(every, key=lambda x: x[:2])]


def _rings(sizes: Sizes, clock: Clock) -> Iterator[Job]:
    names = [f"ring of {nodes} x {per_node} ranks" for nodes, per_node in sizes.rings]

    def measured(index: int, results: Record, budget: Budget) -> Record:
        earlier = results["jobs"].get(names[index - 1]) if index else None
        if earlier is not None and earlier["kind"] != "ring":
            earlier = None
        grid = sizes.rings[index]
        tokens, fastest = ring.next_size(grid, earlier, sizes, budget.left)
        return ring.measure(grid, fastest or ring.kernels(clock.device), tokens, sizes, clock)

    for index, name in enumerate(names):
        yield Job(name, lambda results, budget, index=index: measured(index, results, budget))
