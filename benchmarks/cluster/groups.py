"""Rivals that give whole documents to groups of neighbouring ranks, in micro-batches.

Groups follow Megatron's rule or FlexSP's search. `benchmarks.packed` plans them; this module
assigns ranks. A rank holds at most as many tokens as in our layouts. A plan that does not fit
therefore has a second micro-batch. Its ranks wait only for transfers of their own group.
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

MOVES = 1000  # moves of each annealing run


class Part(NamedTuple):
    """One group in one micro-batch: first rank, size, numbers of its documents."""

    first: int
    size: int
    documents: tuple[int, ...]


Planned = list[list[Part]]  # micro-batches


def planned(name: str, cell: Cell, rates: Rates) -> Planned:
    """Return the micro-batches of the documents of a cell.

    Args:
        name: Key of `PLANNERS`.
        rates: Rates with `compute`.

    Raises:
        ValueError: The number of ranks, or of ranks per node, is no power of two.
    """
    size = cell.nodes * cell.per_node
    for noun, number in (("ranks", size), ("ranks of a node", cell.per_node)):
        if number & (number - 1):
            raise ValueError(f"--grids: groups need a power of two of {noun}, got {cell.grid}")
    bounds = bounds_of(cell.mask, cell.tokens * size)
    if bounds is None:
        raise ValueError(f"--masks: groups need packed documents, got {cell.mask!r}")
    lengths = np.diff(bounds).tolist()
    return placed(PLANNERS[name](lengths, cell, rates), lengths)


def placed(plan: Sequence[MicroBatch], lengths: Sequence[int]) -> Planned:
    """Assign ranks to the groups of a plan, large groups first.

    So no group that fits on a node is spread over several nodes. Documents of one length keep their
    order.
    """
    unplaced: dict[int, list[int]] = {}
    for number in reversed(range(len(lengths))):
        unplaced.setdefault(lengths[number], []).append(number)
    micro_batches: Planned = []
    for groups in plan:
        first, parts = 0, []
        for group in sorted(groups, key=lambda group: -group.size):
            if group.lengths:
                documents = tuple(unplaced[length].pop() for length in group.lengths)
                parts.append(Part(first, group.size, documents))
            first += group.size
        micro_batches.append(parts)
    return micro_batches


def words(plan: Planned) -> str:
    """Return for example "groups of 4, 2, 1, 1 ranks, then 8", one part per micro-batch."""
    group_sizes = [", ".join(str(part.size) for part in parts) for parts in plan]
    return f"groups of {', then '.join(group_sizes)} ranks"


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
