# SPDX-License-Identifier: Apache-2.0
"""What attention keeps between forward and recompute, and what recomputing the rest needs.

Decides which positions are kept: those most expensive to recompute under the mask, the later
ones where several are equal; for a causal mask that is the end of the sequence (BurstEngine
section 3.2). The others are recomputed by a smaller ring: only their queries, only the keys that
these see. Arithmetic on positions: no torch, and nothing about when frames live, which is
`checkpoint`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..layout import Span
from ..masks import Mask
from ..schedule.cost import visible_pairs

BLOCKS = 64  # of equal length, in which the choice is made


class Interval(NamedTuple):
    """The positions start, ..., stop - 1."""

    start: int
    stop: int


class Part(NamedTuple):
    """Some rows of a shard: int64 indices into it, and their positions as spans."""

    rows: np.ndarray
    spans: tuple[Span, ...]


def split(
    mask: Mask, seq_len: int, keep: float, cp_size: int
) -> tuple[list[Interval], list[Interval]]:
    """Positions whose results are kept, and positions to recompute.

    `keep` of all positions is kept, rounded to a multiple of `cp_size`.
    """
    target = round(keep * seq_len / cp_size) * cp_size
    edges = np.unique(np.linspace(0, seq_len, min(BLOCKS, seq_len) + 1).astype(int))
    blocks = [Interval(int(a), int(b)) for a, b in pairwise(edges)]
    whole = (Span(0, 1, seq_len),)

    def cost_per_row(block: Interval) -> tuple[float, int]:
        length = block.stop - block.start
        pairs = visible_pairs(mask, (Span(block.start, 1, length),), whole)
        return pairs / length, block.start

    kept: list[Interval] = []
    for block in sorted(blocks, key=cost_per_row, reverse=True):
        start = max(block.start, block.stop - target)
        if start < block.stop:
            kept.append(Interval(start, block.stop))
            target -= block.stop - start
    kept = _merged(kept)
    return kept, _others(kept, seq_len)


def part(spans: Sequence[Span], intervals: Sequence[Interval]) -> Part:
    """The rows of a shard, given by its spans, whose positions are in the intervals."""
    rows, found, first = [], [], 0
    for span in spans:
        for low, high in intervals:
            begin, end = (-((span.start - edge) // span.stride) for edge in (low, high))
            begin, end = max(0, begin), min(span.length, end)
            if begin < end:
                rows.append(np.arange(first + begin, first + end))
                found.append(Span(span.start + begin * span.stride, span.stride, end - begin))
        first += span.length
    return Part(np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64), tuple(found))


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(Interval(start, stop))
    return found


def _others(intervals: Sequence[Interval], seq_len: int) -> list[Interval]:
    edges = [0, *(edge for interval in intervals for edge in interval), seq_len]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [Interval(start, stop) for start, stop in pairs if start < stop]
