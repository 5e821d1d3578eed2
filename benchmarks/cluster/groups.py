"""Rivals that give whole documents to groups of neighbouring ranks, in micro-batches.

Groups follow Megatron's rule (`benchmarks.packed`); this module assigns ranks. A rank holds at most
as many tokens as in our layouts. A plan that does not fit therefore has a second micro-batch. Its
ranks wait only for transfers of their own group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.packed import megatron
from benchmarks.packed.plans import MicroBatch

from .cells import Cell
from .problems import bounds_of


class Part(NamedTuple):
    """One group in one micro-batch: first rank, size, numbers of its documents."""

    first: int
    size: int
    documents: tuple[int, ...]


Planned = list[list[Part]]  # micro-batches
DYNAMIC = "dynamic"  # name of this layout


def planned(cell: Cell) -> Planned:
    """Return the micro-batches of the documents of a cell by Megatron's rule.

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
    return placed(megatron.dynamic(lengths, size, cell.tokens), lengths)


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
