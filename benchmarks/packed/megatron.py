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


def needed(length: int, max_tokens: int) -> int:
    """Return the ranks that a document needs, a power of two, at `max_tokens` tokens each."""
    return 1 << max(0, math.ceil(math.log2(length / max_tokens)))


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


def dynamic(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[MicroBatch]:
    """Return micro-batches of groups by the default scheduler; `max_tokens` per rank."""
    remaining, plan = sorted(map(int, lengths), reverse=True), []
    while remaining:
        groups, remaining = _micro_batch(remaining, ranks, max_tokens)
        plan.append(groups)
    return plan


def _micro_batch(lengths: list[int], ranks: int, max_tokens: int) -> tuple[list[Group], list[int]]:
    """Return the groups of one micro-batch, and the remaining documents.

    A document is added to the group for which the work of the busiest rank stays smallest. Ties go
    to the fewest ranks, then to the oldest group, and last to free ranks. No rank's work may exceed
    the work of the longest document on the fewest ranks that hold it.
    """
    bound = SLACK * lengths[0] * max_tokens
    groups: list[_Open] = []
    by_size: dict[int, list[_Open]] = {}
    remaining, free, busiest = [], ranks, 0.0
    for length in lengths:
        best, best_work, size = None, math.inf, needed(length, max_tokens)
        most_ranks = ranks if groups else size  # the longest gets only the ranks that it needs
        while size <= most_ranks:
            work = length * length / size
            for group in by_size.get(size, ()):
                if group.tokens + length / size <= max_tokens:
                    new_busiest = max(busiest, group.work + work)
                    if new_busiest <= bound and new_busiest < best_work:
                        best, best_work = group, new_busiest
                        if new_busiest == busiest:
                            break
            if free >= size and max(busiest, work) <= bound and max(busiest, work) < best_work:
                best, best_work = _Open(size), max(busiest, work)
            if best is not None and best_work == busiest:
                break
            size *= 2
        if best is None:
            remaining.append(length)
            continue
        if not best.lengths:
            groups.append(best)
            by_size.setdefault(best.size, []).append(best)
            free -= best.size
        best.add(length)
        busiest = max(busiest, best.work)
    _fill(groups, free, ranks)
    return [Group(group.size, tuple(group.lengths)) for group in groups], remaining


def _fill(groups: list[_Open], free: int, ranks: int) -> None:
    """Double the oldest of the smallest groups repeatedly, so that no rank stays idle."""
    while free:
        smallest = min(groups, key=lambda group: group.size)
        free -= min(smallest.size, ranks - smallest.size)
        smallest.size = min(2 * smallest.size, ranks)


def fixed(lengths: Sequence[int], ranks: int, size: int, max_tokens: int) -> list[MicroBatch]:
    """Return groups of `size` ranks: packs in document order, distributed in turn.

    If some groups would be empty in the last turn, documents of the last packs are moved to new
    packs.
    """
    packs: list[list[int]] = [[]]
    for length in map(int, lengths):
        if packs[-1] and sum(packs[-1]) + length > size * max_tokens:
            packs.append([])
        packs[-1].append(length)
    groups = ranks // size
    pack_index = len(packs) - 1
    while len(packs) % groups and pack_index >= 0:
        if len(packs[pack_index]) > 1:
            packs.append([packs[pack_index].pop()])
        else:
            pack_index -= 1
    packs += [[] for _ in range(-len(packs) % groups)]
    return [
        [Group(size, tuple(pack)) for pack in packs[i : i + groups]]
        for i in range(0, len(packs), groups)
    ]
