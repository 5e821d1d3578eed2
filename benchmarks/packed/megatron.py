"""Groups that Megatron forms: its scheduler of dynamic context parallelism, and fixed groups.

This module follows Megatron-LM's dev branch, `--sequence-packing-scheduler default_dynamic_cp` and
`dp_balanced` (megatron/core/datasets/data_schedule_utils.py, 2026-08-21).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .plans import Group, MicroBatch

SLACK = 1.05  # factor of the bound on the work of a rank


def needed(length: int, most: int) -> int:
    """Return the ranks that a document needs, a power of two, at `most` tokens each."""
    return 1 << max(0, math.ceil(math.log2(length / most)))


@dataclass
class _Open:
    """A group that documents are added to; its work is lengths squared over its ranks."""

    size: int
    lengths: list[int] = field(default_factory=list)
    work: float = 0.0
    tokens: float = 0.0

    def add(self, length: int) -> None:
        self.lengths.append(length)
        self.work += length * length / self.size
        self.tokens += length / self.size


def dynamic(lengths: Sequence[int], ranks: int, most: int) -> list[MicroBatch]:
    """Return micro-batches of groups by the default scheduler; `most` tokens per rank."""
    left, plan = sorted(map(int, lengths), reverse=True), []
    while left:
        groups, left = _micro_batch(left, ranks, most)
        plan.append(groups)
    return plan


def _micro_batch(lengths: list[int], ranks: int, most: int) -> tuple[list[Group], list[int]]:
    """Return the groups of one micro-batch, and the remaining documents.

    A document is added to the group for which the work of the busiest rank stays smallest. Ties go
    to the fewest ranks, then to the oldest group, and last to free ranks. No rank's work may exceed
    the work of the longest document on the fewest ranks that hold it.
    """
    bound = SLACK * lengths[0] * most
    groups: list[_Open] = []
    by_size: dict[int, list[_Open]] = {}
    left, free, busiest = [], ranks, 0.0
    for length in lengths:
        best, least, size = None, math.inf, needed(length, most)
        most_ranks = ranks if groups else size  # the longest gets only the ranks that it needs
        while size <= most_ranks:
            work = length * length / size
            for group in by_size.get(size, ()):
                if group.tokens + length / size <= most:
                    then = max(busiest, group.work + work)
                    if then <= bound and then < least:
                        best, least = group, then
                        if then == busiest:
                            break
            if free >= size and max(busiest, work) <= bound and max(busiest, work) < least:
                best, least = _Open(size), max(busiest, work)
            if best is not None and least == busiest:
                break
            size *= 2
        if best is None:
            left.append(length)
            continue
        if not best.lengths:
            groups.append(best)
            by_size.setdefault(best.size, []).append(best)
            free -= best.size
        best.add(length)
        busiest = max(busiest, best.work)
    _fill(groups, free, ranks)
    return [Group(group.size, tuple(group.lengths)) for group in groups], left


def _fill(groups: list[_Open], free: int, ranks: int) -> None:
    """Double the oldest of the smallest groups repeatedly, so that no rank stays idle."""
    while free:
        smallest = min(groups, key=lambda group: group.size)
        free -= min(smallest.size, ranks - smallest.size)
        smallest.size = min(2 * smallest.size, ranks)


def fixed(lengths: Sequence[int], ranks: int, size: int, most: int) -> list[MicroBatch]:
    """Return groups of `size` ranks: packs in document order, distributed in turn.

    If some groups would be empty in the last turn, documents of the last packs are moved to new
    packs.
    """
    packs: list[list[int]] = [[]]
    for length in map(int, lengths):
        if packs[-1] and sum(packs[-1]) + length > size * most:
            packs.append([])
        packs[-1].append(length)
    groups = ranks // size
    at = len(packs) - 1
    while len(packs) % groups and at >= 0:
        if len(packs[at]) > 1:
            packs.append([packs[at].pop()])
        else:
            at -= 1
    packs += [[] for _ in range(-len(packs) % groups)]
    return [
        [Group(size, tuple(pack)) for pack in packs[i : i + groups]]
        for i in range(0, len(packs), groups)
    ]
