# SPDX-License-Identifier: Apache-2.0
"""Selection of the rows that the attention store keeps, by the cost of their recomputation.

The store keeps the positions that are most expensive to recompute under the mask. Of equally
expensive positions, it keeps the later ones. With a causal mask, this is the end of the sequence
(BurstEngine section 3.2). The other positions are recomputed by a ring that sends only the keys
that their queries see. This module selects positions, without torch. `checkpoint` manages the
lifetime of a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..layout import Span
from ..masks import Mask
from ..schedule.cost import visible_pairs

BLOCKS = 64  # number of equally long blocks whose costs are compared


class Interval(NamedTuple):
    """Interval of consecutive positions: start, start + 1, ..., stop - 1."""

    start: int
    stop: int


class ShardRows(NamedTuple):
    """Some rows of a shard.

    Attributes:
        rows: Indices into the shard, int64.
        spans: Positions of these rows in the sequence.
    """

    rows: np.ndarray
    spans: tuple[Span, ...]


def split_positions(
    mask: Mask, seq_len: int, key_len: int, keep: float, cp_size: int
) -> tuple[list[Interval], list[Interval]]:
    """Split the positions of a sequence into stored and recomputed positions.

    Args:
        mask: Mask of the sequence.
        seq_len: Number of positions of the queries.
        key_len: Number of positions of the keys.
        keep: Fraction of the positions to store, rounded to a multiple of `cp_size` positions.
        cp_size: Number of context-parallel ranks.

    Returns:
        The intervals of stored positions, and the intervals of recomputed positions, each in
        ascending order.
    """
    target = round(keep * seq_len / cp_size) * cp_size
    edges = np.unique(np.linspace(0, seq_len, min(BLOCKS, seq_len) + 1).astype(int))
    blocks = [Interval(int(a), int(b)) for a, b in pairwise(edges)]

    def cost_per_row(block: Interval) -> tuple[float, int]:
        length = block.stop - block.start
        queries, keys = (Span(block.start, 1, length),), (Span(0, 1, key_len),)
        pairs = visible_pairs(mask, queries, keys) if key_len else 0
        return pairs / length, block.start

    stored: list[Interval] = []
    for block in sorted(blocks, key=cost_per_row, reverse=True):
        start = max(block.start, block.stop - target)
        if start < block.stop:
            stored.append(Interval(start, block.stop))
            target -= block.stop - start
    stored = _merged(stored)
    return stored, _complement(stored, seq_len)


def rows_in(spans: Sequence[Span], intervals: Sequence[Interval]) -> ShardRows:
    """Return the rows of a shard whose positions are in the intervals.

    Args:
        spans: Positions of the shard's rows.
        intervals: Positions to select.
    """
    rows, selected, first = [], [], 0
    for span in spans:
        for low, high in intervals:
            begin, end = (-((span.start - edge) // span.stride) for edge in (low, high))
            begin, end = max(0, begin), min(span.length, end)
            if begin < end:
                rows.append(np.arange(first + begin, first + end))
                selected.append(Span(span.start + begin * span.stride, span.stride, end - begin))
        first += span.length
    indices = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    return ShardRows(indices, tuple(selected))


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and merged[-1].stop == start:
            start = merged.pop().start
        merged.append(Interval(start, stop))
    return merged


def _complement(intervals: Sequence[Interval], seq_len: int) -> list[Interval]:
    edges = [0, *(edge for interval in intervals for edge in interval), seq_len]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [Interval(start, stop) for start, stop in pairs if start < stop]
