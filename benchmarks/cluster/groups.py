"""Rivals that give whole documents to groups of neighbouring ranks, in micro-batches: by Megatron's
rule and of FlexSP's kind. `benchmarks.packed` plans who gets what; here documents get ranks.

A rank holds at most as many tokens as with ours. So a plan that does not fit has a second
micro-batch, whose ranks wait for nothing but the transfers of their own group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.packed import megatron, search
from benchmarks.packed.plans import MicroBatch, Rings
from benchmarks.packed.rings import MULTICAST
from benchmarks.packed.setting import Setting
from megatron_burst.autotune.rates import Rates

from .cells import Cell
from .problems import bounds_of

MOVES = 1000  # of each annealing


class Part(NamedTuple):
    """What one group does in one micro-batch: its first rank, its size, numbers of documents."""

    first: int
    size: int
    documents: tuple[int, ...]


Planned = list[list[Part]]  # micro-batches


def planned(name: str, cell: Cell, rates: Rates) -> Planned:
    """Micro-batches of the documents of a cell. name: a key of `PLANNERS`; rates: with `compute`.

    Raises ValueError where ranks, or those of a node, are no power of two.
    """
    size = cell.nodes * cell.per_node
    for what, number in (("ranks", size), ("ranks of a node", cell.per_node)):
        if number & (number - 1):
            raise ValueError(f"--grids: groups need a power of two of {what}, got {cell.grid}")
    bounds = bounds_of(cell.mask, cell.tokens * size)
    if bounds is None:
        raise ValueError(f"--masks: groups need packed documents, got {cell.mask!r}")
    lengths = np.diff(bounds).tolist()
    return placed(PLANNERS[name](lengths, cell, rates), lengths)


def placed(plan: Sequence[MicroBatch], lengths: Sequence[int]) -> Planned:
    """The groups of a plan on ranks, large ones first, so that none lies across a node that could
    hold it; documents of one length are taken in their order."""
    left: dict[int, list[int]] = {}
    for number in reversed(range(len(lengths))):
        left.setdefault(lengths[number], []).append(number)
    found: Planned = []
    for groups in plan:
        first, parts = 0, []
        for group in sorted(groups, key=lambda each: -each.size):
            if group.lengths:
                documents = tuple(left[length].pop() for length in group.lengths)
                parts.append(Part(first, group.size, documents))
            first += group.size
        found.append(parts)
    return found


def words(plan: Planned) -> str:
    """ "groups of 4, 2, 1, 1 ranks, then 8": micro-batch after micro-batch."""
    each = [", ".join(str(part.size) for part in parts) for parts in plan]
    return f"groups of {', then '.join(each)} ranks"


def _dynamic(lengths: Sequence[int], cell: Cell, rates: Rates) -> list[MicroBatch]:
    return megatron.dynamic(lengths, cell.nodes * cell.per_node, cell.tokens)


def _flexsp(lengths: Sequence[int], cell: Cell, rates: Rates) -> list[MicroBatch]:
    problem, ranks = cell.problem(), cell.nodes * cell.per_node
    assert rates.compute is not None
    setting = Setting(
        rates, backward=rates.compute, linear=1.0, parameters=0, layers=1, tokens=cell.tokens,
        per_node=cell.per_node, heads=problem.heads, kv_heads=problem.kv_heads,
        width=problem.width,
    )  # fmt: skip
    return search.best(lengths, ranks, Rings(setting, MULTICAST), moves=MOVES, largest=ranks)


PLANNERS: dict[str, Callable[[Sequence[int], Cell, Rates], list[MicroBatch]]] = {
    "dynamic": _dynamic,
    "flexsp": _flexsp,
}
