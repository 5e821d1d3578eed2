"""A pair of shards as a grid of equal tiles: which are visible, wholly or in part.

What a kernel needs that works through tiles of one size: for every block of rows (or of columns)
the blocks of the other side that it meets, wholly visible ones and the rest apart, and for the
rest what is visible in them as bits. One table serves all tiles that look alike: the diagonal of
a causal mask has one, a window two, so nothing else (bands, strides, documents, bitmaps) has to
be known on the device. Decides what is a tile's kind; knows no torch and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..layout import Span
from ..masks import Cover, Mask

WORD = 32  # columns in one entry of a table


class Worklist(NamedTuple):
    """Programs and their tiles. int32 throughout.

    programs [n, 3]: a block, and where its tiles begin and end in `others`; most tiles first, so
    that what is dealt out last is short. others [tiles]: the block on the other side. tables
    [tiles]: where `Grid.bits` has what is visible; nothing for wholly visible tiles.
    """

    programs: np.ndarray
    others: np.ndarray
    tables: np.ndarray


@dataclass(frozen=True)
class Grid:
    """Tiles that see something: (row block, column block), and of partly visible ones a table.

    bits: int32 [tables, rows, columns / 32]; column c of a row is bit c % 32 of entry c // 32.
    Columns behind the shard's end are invisible; rows behind it may be anything.
    """

    full: np.ndarray  # [tiles, 2]
    partial: np.ndarray  # [tiles, 3]
    bits: np.ndarray

    def __bool__(self) -> bool:
        return bool(len(self.full) or len(self.partial))

    @cached_property
    def by_rows(self) -> tuple[Worklist, Worklist]:
        """Wholly and partly visible tiles of each block of rows."""
        return _worklist(self.full, 0), _worklist(self.partial, 0)

    @cached_property
    def by_columns(self) -> tuple[Worklist, Worklist]:
        """Wholly and partly visible tiles of each block of columns."""
        return _worklist(self.full, 1), _worklist(self.partial, 1)


def grid(
    mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span], rows: int, columns: int
) -> Grid:
    """The tiles of `rows` x `columns` (a multiple of 32) of a pair of shards."""
    q, k = _cut(q_spans, rows), _cut(k_spans, columns)
    covers = mask.covers(Span(*(x[:, None] for x in q.spans)), Span(*(x[None] for x in k.spans)))
    some, all_ = covers != Cover.EMPTY, covers == Cover.FULL
    for axis, cut in enumerate((q, k)):
        some = np.logical_or.reduceat(some, cut.first, axis=axis)
        all_ = np.logical_and.reduceat(all_, cut.first, axis=axis)
    if k.length % columns:
        all_[:, -1] = False
    tables = _Tables(mask, q, k, rows, columns)
    full, partial = [], []
    tiles = np.argwhere(some & ~all_)
    for (i, j), band in zip(tiles.tolist(), tables.bands_of(tiles), strict=True):
        found = tables.of(i, j, band)
        if found == tables.everything:
            full.append((i, j))
        elif found is not None:
            partial.append((i, j, found))
    whole = np.concatenate([np.argwhere(all_), _array(full, 2)]).astype(np.int32)
    return Grid(whole, _array(partial, 3), tables.bits())


class _Cut(NamedTuple):
    """Spans cut at every multiple of a block, so that no part lies in two blocks."""

    spans: Any  # a Span of arrays [parts]
    first: np.ndarray  # [blocks]: the first part of each block
    positions: np.ndarray  # int64 [length]
    length: int


def _cut(spans: Sequence[Span], size: int) -> _Cut:
    lengths = np.array([span.length for span in spans], dtype=np.int64)
    ends = np.cumsum(lengths)
    length = int(ends[-1])
    blocks = np.arange(0, length, size)
    begins = np.union1d(blocks, ends[:-1])
    which = np.searchsorted(ends, begins, side="right")
    start, stride, _ = np.array(spans, dtype=np.int64).T
    first = start[which] + (begins - (ends - lengths)[which]) * stride[which]
    parts = Span(*[first, stride[which], np.diff([*begins, length])])
    positions = np.concatenate([span.positions() for span in spans])
    return _Cut(parts, np.searchsorted(begins, blocks), positions, length)


class _Tables:
    """The different tables of a grid, each kept once."""

    def __init__(self, mask: Mask, q: _Cut, k: _Cut, rows: int, columns: int):
        self.mask, self.q, self.k, self.shape = mask, q, k, (rows, columns)
        self.index: dict[bytes, int] = {}
        self.bands: dict[tuple[int, int], int | None] = {}
        self.everything = self._add(np.ones(self.shape, dtype=bool))

    def of(self, i: int, j: int, band: tuple[int, int] | None) -> int | None:
        """The table of the tile at (i, j), by its band where that is known; None if it is empty."""
        if band is None:
            return self._add(self._visible(i, j))
        if band not in self.bands:
            ahead = np.arange(self.shape[1])[None, :] - np.arange(self.shape[0])[:, None]
            self.bands[band] = self._add((ahead >= -band[0]) & (ahead <= band[1]))
        return self.bands[band]

    def bits(self) -> np.ndarray:
        packed = np.frombuffer(b"".join(self.index), dtype=np.int32)
        return packed.reshape(-1, self.shape[0], self.shape[1] // WORD)

    def bands_of(self, tiles: np.ndarray) -> list[tuple[int, int] | None]:
        """Of each tile (i, j): (left, right) if it is whole and the mask is a band there."""
        (rows, columns), q, k = self.shape, self.q, self.k
        parts = [
            Span(*(x[cut.first[side]] for x in cut.spans))
            for cut, side in ((q, tiles[:, 0]), (k, tiles[:, 1]))
        ]
        left, right, known = self.mask.bands(*parts)
        known = known & (parts[0].length == rows) & (parts[1].length == columns)
        # farther than the tile is wide makes no difference
        both = np.stack([np.minimum(left, rows), np.minimum(right, columns)], axis=1).tolist()
        return [tuple(band) if sure else None for band, sure in zip(both, known, strict=True)]

    def _visible(self, i: int, j: int) -> np.ndarray:
        (rows, columns), table = self.shape, np.zeros(self.shape, dtype=bool)
        q = self.q.positions[i * rows : (i + 1) * rows]
        k = self.k.positions[j * columns : (j + 1) * columns]
        table[: len(q), : len(k)] = self.mask.visible(q[:, None], k[None, :])
        if len(k) == columns:  # rows behind the end: whatever lets a tile be wholly visible
            table[len(q) :] = table[: len(q)].all()
        return table

    def _add(self, table: np.ndarray) -> int | None:
        if not table.any():
            return None
        packed = np.packbits(table, axis=1, bitorder="little").tobytes()
        return self.index.setdefault(packed, len(self.index))


def _array(tiles: list[tuple[int, ...]], width: int) -> np.ndarray:
    return np.array(tiles, dtype=np.int32).reshape(-1, width)


def _worklist(tiles: np.ndarray, side: int) -> Worklist:
    """Tiles grouped by their block on one side (0: rows, 1: columns)."""
    tiles = tiles[np.lexsort((tiles[:, 1 - side], tiles[:, side]))]
    blocks, first, count = np.unique(tiles[:, side], return_index=True, return_counts=True)
    order = np.argsort(-count, kind="stable")
    programs = np.stack([blocks, first, first + count], axis=1)[order]
    return Worklist(
        programs.astype(np.int32),
        np.ascontiguousarray(tiles[:, 1 - side]),
        np.ascontiguousarray(tiles[:, 2] if tiles.shape[1] > 2 else tiles[:0, 0]),
    )
