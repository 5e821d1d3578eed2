# SPDX-License-Identifier: Apache-2.0
"""Tiles: rectangles of a pair of shards that one operator call can compute, as objects and arrays.

`tiling` makes tiles, and kernels read them. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .base import Band


class Tile(NamedTuple):
    """Rectangle of query rows and key rows (columns), with the pairs that are visible in it.

    Attributes:
        rows: Query rows of the shard, possibly with a step.
        columns: Key rows of the shard, possibly with a step.
        triangle: True if only the lower triangle is visible. If `triangle`, `table` and `band` are
            not set, all pairs are visible.
        table: bool [rows, columns], true for visible pairs; or None.
        band: Band of visible pairs, in which every row sees some column; or None.
    """

    rows: slice
    columns: slice
    triangle: bool = False
    table: np.ndarray | None = None
    band: Band | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and number of columns."""
        return _length(self.rows), _length(self.columns)

    @property
    def computed(self) -> int:
        """Number of (query, key) pairs in the rectangle, visible or not."""
        return self.shape[0] * self.shape[1]

    @property
    def visible(self) -> int:
        """Number of visible (query, key) pairs in the tile."""
        rows, columns = self.shape
        if self.table is not None:
            return int(self.table.sum())
        if self.band is not None:
            row = np.arange(rows)
            stops = np.minimum(columns, row + self.band.right + 1)
            return int((stops - np.maximum(0, row - self.band.left)).sum())
        return rows * (rows + 1) // 2 if self.triangle else rows * columns


class Pattern(NamedTuple):
    """The visible pairs of a tile; fields as in `Tile`."""

    triangle: bool = False
    table: np.ndarray | None = None
    band: Band | None = None


ALL_VISIBLE, TRIANGLE = 0, 1  # indices of the first two patterns in `Tiles.patterns`


@dataclass
class Patterns:
    """The patterns of the tiles of a mask. Equal patterns are one, so kernels convert them once.

    Attributes:
        all: The patterns; the first two are `ALL_VISIBLE` and `TRIANGLE`.
    """

    all: list[Pattern] = field(default_factory=lambda: [Pattern(), Pattern(triangle=True)])
    _numbers: dict[tuple, int] = field(default_factory=dict)  # by kind and values

    def of_band(self, left: int, right: int) -> int:
        """Return the index of the pattern of a band."""
        key = "band", left, right
        return (
            self._numbers[key] if key in self._numbers else self._add(key, band=Band(left, right))
        )

    def of_edge(self, rows: int, columns: int, low: int, high: int) -> int:
        """Return the index of the pattern in which row m sees columns m + low to m + high."""
        key = "edge", rows, columns, low, high
        if key in self._numbers:
            return self._numbers[key]
        ahead = np.arange(columns)[None, :] - np.arange(rows)[:, None]
        return self._add(key, table=(ahead >= low) & (ahead <= high))

    def of_rows(self, begin: np.ndarray, end: np.ndarray) -> tuple[int, int, int, int, int] | None:
        """Return the visible part of a rectangle in which a range of rows sees each column.

        Tables of strided shards differ only at the bounds of documents, so many are equal.

        Args:
            begin: First row that sees each column.
            end: Row after the last row that sees the column; `begin` if no row does.

        Returns:
            First row and row after the last row of the part, first column and column after the
            last column, and index of the pattern. None if nothing is visible.
        """
        seen = begin < end
        (columns,) = np.nonzero(seen)
        if not len(columns):
            return None
        left, right = int(columns[0]), int(columns[-1]) + 1
        top, bottom = int(begin[columns].min()), int(end[columns].max())
        # Columns that no row sees may have any range, so they get the same empty one.
        begin, end = ((x[left:right] - top) * seen[left:right] for x in (begin, end))

        key = "rows", bottom - top, begin.tobytes(), end.tobytes()
        if key not in self._numbers:
            row = np.arange(bottom - top, dtype=begin.dtype)[:, None]
            self._add(key, table=(row >= begin) & (row < end))
        return top, bottom, left, right, self._numbers[key]

    def of_table(self, table: np.ndarray) -> tuple[int, int, int, int, int] | None:
        """Return the same as `of_rows` for a table of visible pairs, bool [rows, columns]."""
        table = np.asarray(table)
        (rows,), (columns,) = np.nonzero(table.any(axis=1)), np.nonzero(table.any(axis=0))
        # Remove hidden rows and columns at the ends: padding is there and may hold NaN, and a
        # probability of 0 times NaN is NaN.
        if not len(rows):
            return None
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        self.all.append(Pattern(table=np.array(table[top:bottom, left:right], order="C")))
        return top, bottom, left, right, len(self.all) - 1

    def _add(self, key: tuple, *, table: np.ndarray | None = None, band: Band | None = None) -> int:
        """Add a pattern with a new key; return its index."""
        self._numbers[key] = len(self.all)
        self.all.append(Pattern(table=table, band=band))
        return self._numbers[key]


class Tiles(Sequence[Tile]):
    """The tiles of a pair of shards, stored as arrays; a `Tile` is made when it is read.

    Packed documents have hundreds of tiles per pair of shards, so plans do not keep an object for
    each of them.

    Attributes:
        bounds: int64 [n, 6], start, stop and step of the rows, then of the columns.
        pattern: int [n], index of each tile's pattern.
        patterns: Patterns of the tiles. The first pattern is `Pattern()`: all pairs are visible.
    """

    def __init__(self, bounds: np.ndarray, pattern: np.ndarray, patterns: Sequence[Pattern]):
        self.bounds, self.pattern, self.patterns = bounds, pattern, patterns

    @classmethod
    def of(cls, tiles: Iterable[Tile]) -> Tiles:
        """Return these tiles as arrays."""
        bounds, pattern, patterns = [], [], [Pattern()]
        pattern_numbers: dict[tuple, int] = {}  # by content; tables by identity
        for rows, columns, triangle, table, band in tiles:
            ends = rows.start, rows.stop, rows.step or 1
            bounds.append((*ends, columns.start, columns.stop, columns.step or 1))
            key = triangle, None if table is None else id(table), band
            if key == (False, None, None):
                pattern.append(ALL_VISIBLE)
                continue
            if key not in pattern_numbers:
                pattern_numbers[key] = len(patterns)
                patterns.append(Pattern(triangle, table, band))
            pattern.append(pattern_numbers[key])
        indices = np.array(pattern, dtype=np.int64)
        return cls(np.array(bounds, dtype=np.int64).reshape(-1, 6), indices, patterns)

    @property
    def fully_visible(self) -> bool:
        """True if all pairs of all tiles are visible and no tile skips rows or columns."""
        steps = self.bounds[:, [2, 5]]
        return bool((self.pattern == ALL_VISIBLE).all() and (steps == 1).all())

    def __len__(self) -> int:
        return len(self.bounds)

    def __iter__(self) -> Iterator[Tile]:
        for bounds, pattern in zip(self.bounds.tolist(), self.pattern.tolist(), strict=True):
            yield Tile(slice(*bounds[:3]), slice(*bounds[3:]), *self.patterns[pattern])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.at(index)
        return next(iter(self.at(np.array([index]))))

    def at(self, index: slice | np.ndarray) -> Tiles:
        """Return the tiles at these indices."""
        return Tiles(self.bounds[index], self.pattern[index], self.patterns)


def _length(part: slice) -> int:
    return len(range(part.start, part.stop, part.step or 1))
