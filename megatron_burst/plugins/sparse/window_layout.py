# SPDX-License-Identifier: Apache-2.0
"""Layout of compressed keys: each key is on the rank that holds the last row of its window.

With this layout `mb.compress` sends only rows of windows that the layout of the rows splits.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...layout import Layout, Span
from ...layout.layouts import SpanArray, Spans
from ...masks.compressed import Compressed


class _KeyShards(NamedTuple):
    """Key positions of all ranks.

    Attributes:
        rows: Number of key rows of each rank.
        positions: Key positions of each rank, int64 [rows] each.
    """

    rows: int
    positions: tuple[np.ndarray, ...]


class WindowLayout(Layout):
    """Layout of compressed keys that puts a key on the rank with the last row of its window.

    Every rank has the same number of key rows. Ranks with fewer keys also hold padding positions.

    Args:
        queries: Layout of the rows, which are also the queries.
        mask: Mask with the window of rows of each key, and the documents of the rows.
        seq_len: Number of positions of the rows.

    Raises:
        ValueError: `queries` or `mask` does not support `seq_len` positions.

    Example:
        >>> from megatron_burst.plugins.sparse.window_layout import WindowLayout
        >>> rows = mb.layout.make("zigzag", cp_size=2)
        >>> keys = WindowLayout(rows, mb.masks.Compressed(2), seq_len=16)
        >>> keys.rows, keys.positions(0, keys.key_len)
        (4, array([0, 1, 6, 7]))
    """

    name = "windows"

    def __init__(self, queries: Layout, mask: Compressed, seq_len: int):
        super().__init__(queries.cp_size)
        queries.check(seq_len)
        windows = int(mask.key_bounds[-1] if mask.packed else mask.windows(seq_len))
        mask.check_lengths(seq_len, windows)
        self.queries, self.mask, self.seq_len, self.windows = queries, mask, seq_len, windows

    @property
    def rows(self) -> int:
        """Number of key rows of each rank."""
        return self._shards.rows

    @property
    def key_len(self) -> int:
        """Total number of key positions of all ranks, including padding."""
        return self.rows * self.cp_size

    def __repr__(self) -> str:
        return f"WindowLayout({self.queries!r}, {self.mask!r}, {self.seq_len})"

    def describe(self) -> str:
        return f"{self.name} of {self.queries.describe()}"

    def check(self, seq_len: int) -> None:
        if seq_len != self.key_len:
            raise ValueError(
                f"seq_len: this layout has {self.key_len} keys for {self.seq_len} rows, got "
                f"{seq_len}; pass {self.rows} key rows per rank"
            )

    @cached_property
    def _shards(self) -> _KeyShards:
        owner, _ = owners(self.queries, self.seq_len)
        keys = np.arange(self.windows)
        first = self.mask.first_rows(keys, self.seq_len)
        keys, first = keys[first >= 0], first[first >= 0]
        of_key = owner[first + self.mask.length - 1]
        counts = np.bincount(of_key, minlength=self.cp_size)
        rows = max(int(counts.max(initial=0)), -(-self.windows // self.cp_size))
        unused = np.setdiff1d(np.arange(rows * self.cp_size), keys, assume_unique=True)
        fillers = np.split(unused, np.cumsum(rows - counts)[:-1])
        positions = tuple(
            np.sort(np.concatenate([keys[of_key == rank], fillers[rank]]))
            for rank in range(self.cp_size)
        )
        return _KeyShards(rows, positions)

    def _spans(self, rank: int, seq_len: int) -> SpanArray:
        positions = self._shards.positions[rank]
        steps, spans, start = np.diff(positions), [], 0
        changes = np.flatnonzero(np.diff(steps)) + 1  # first step of each new run
        for last in (*changes.tolist(), len(positions) - 1):  # last position of a run
            if start < last or last == len(positions) - 1 == start:
                length = last + 1 - start
                stride = int(steps[start]) if length > 1 else 1
                spans.append(Span(int(positions[start]), stride, length))
                start = last + 1  # no span has the step to the next run
        return SpanArray(Spans.of(spans))


def owners(layout: Layout, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of each position, and the row of the position on this rank, int64 each."""
    owner, row = np.empty((2, seq_len), dtype=np.int64)
    for rank in range(layout.cp_size if seq_len else 0):
        positions = layout.positions(rank, seq_len)
        owner[positions], row[positions] = rank, np.arange(len(positions))
    return owner, row
