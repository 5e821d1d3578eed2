"""A pair of shards as a grid of equal tiles, for kernels that work through tiles of one size.

Lists, for every block of rows (or of columns), the blocks of the other side that it sees: wholly
visible ones and partly visible ones apart, and for the latter a table of bits. Tiles that look
alike share a table: the diagonal of a causal mask needs one, a window two. Bands, strides and
documents therefore need no code on the device. This module decides which tiles are alike; it needs
no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..layout import Span, Spans
from ..masks import Cover, Mask

WORD = 32  # columns in one entry of a table
PARTS = 64  # in a tile, at most: with more, looking at them takes longer than at its elements
AT_ONCE = 1 << 20  # parts


class Worklist(NamedTuple):
    """Programs and their tiles. int32 throughout.

    programs [n, 3]: a block, and where its tiles begin and end in `others`; most tiles first, so
    that what is dealt out last is short. others [tiles]: the block on the other side. tables
    [tiles]: where `TileGrid.bits` has what is visible; nothing for wholly visible tiles.
    """

    programs: np.ndarray
    others: np.ndarray
    tables: np.ndarray


@dataclass(frozen=True)
class TileGrid:
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


def tile_grid(
    mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span], rows: int, columns: int
) -> TileGrid:
    """The tiles of `rows` x `columns` (a multiple of 32) of a pair of shards."""
    q, k = _cut(q_spans, rows), _cut(k_spans, columns)
    covers = mask.covers(Spans(*(x[:, None] for x in q.spans)), Spans(*(x[None] for x in k.spans)))
    some, all_ = covers != Cover.EMPTY, covers == Cover.FULL
    for axis, cut in enumerate((q, k)):
        some = np.logical_or.reduceat(some, cut.first, axis=axis)
        all_ = np.logical_and.reduceat(all_, cut.first, axis=axis)
    if k.length % columns:
        all_[:, -1] = False
    tables = _Tables(mask, q, k, rows, columns)
    full, partial = [], []
    tiles = np.argwhere(some & ~all_)
    alike = _alike(mask, _cut(q_spans, rows, mask), _cut(k_spans, columns, mask), tiles)
    for (i, j), look in zip(tiles.tolist(), alike, strict=True):
        found = tables.of(i, j, look)
        if found == tables.everything:
            full.append((i, j))
        elif found is not None:
            partial.append((i, j, found))
    whole = np.concatenate([np.argwhere(all_), _array(full, 2)]).astype(np.int32)
    return TileGrid(whole, _array(partial, 3), tables.bits())


class _Cut(NamedTuple):
    """Spans cut at every multiple of a block, so that no part lies in two blocks."""

    spans: Spans  # [parts]
    first: np.ndarray  # [blocks]: the first part of each block
    positions: np.ndarray  # int64 [length]
    length: int

    def parts(self, index: np.ndarray) -> Spans:
        return self.spans.at(index)

    def counts(self) -> np.ndarray:
        """[blocks]: how many parts each has."""
        return np.diff(self.first, append=len(self.spans.start))

    def kinds(self) -> np.ndarray:
        """[blocks]: a number, equal for blocks whose parts have equal lengths."""
        seen: dict[bytes, int] = {}
        ends = self.first + self.counts()
        parts = [self.spans.length[a:b] for a, b in zip(self.first, ends, strict=True)]
        return np.array([seen.setdefault(part.tobytes(), len(seen)) for part in parts])


def _cut(spans: Sequence[Span], size: int, mask: Mask | None = None) -> _Cut:
    """At every multiple of `size`, and where the description of the mask changes."""
    lengths = np.array([span.length for span in spans], dtype=np.int64)
    ends = np.cumsum(lengths)
    length = int(ends[-1])
    blocks = np.arange(0, length, size)
    begins = np.union1d(blocks, ends[:-1])
    if mask is not None:
        inner = [mask.cuts(span) + end - span.length for span, end in zip(spans, ends, strict=True)]
        begins = np.union1d(begins, np.concatenate(inner))
    which = np.searchsorted(ends, begins, side="right")
    start, stride, _ = np.array(spans, dtype=np.int64).T
    first = start[which] + (begins - (ends - lengths)[which]) * stride[which]
    parts = Spans(first, stride[which], np.diff([*begins, length]))
    positions = np.concatenate([span.positions() for span in spans])
    return _Cut(parts, np.searchsorted(begins, blocks), positions, length)


def _alike(mask: Mask, q: _Cut, k: _Cut, tiles: np.ndarray) -> list[tuple[int, int, bytes] | None]:
    """Of each tile (i, j) a key: tiles of equal keys look alike. None where that is not known.

    A tile is what its parts are, each a band (wholly visible and hidden parts are bands too):
    where they begin and how far they reach says all there is.
    """
    found: list[tuple[int, int, bytes] | None] = [None] * len(tiles)
    (i, j), sides = tiles.T, (q, k)
    counts = [cut.counts()[side] for cut, side in zip(sides, (i, j), strict=True)]
    kinds = [cut.kinds()[side].tolist() for cut, side in zip(sides, (i, j), strict=True)]
    far = max(int(cut.spans.length.max()) for cut in sides)  # than a part is long: no difference
    for high, wide in np.unique(np.stack(counts, axis=1), axis=0).tolist():
        if high * wide > PARTS:
            continue
        (which,) = np.nonzero((counts[0] == high) & (counts[1] == wide))
        for some in np.array_split(which, -(-len(which) * high * wide // AT_ONCE)):
            rows = q.first[i[some], None, None] + np.arange(high)[:, None]
            columns = k.first[j[some], None, None] + np.arange(wide)
            left, right, known = mask.bands(q.parts(rows), k.parts(columns))
            reach = np.clip(np.stack([left, right], axis=-1), -2 * far, 2 * far).astype(np.int32)
            sure = known.reshape(len(some), -1).all(axis=1)
            for n in np.nonzero(sure)[0].tolist():
                tile = some[n]
                found[tile] = kinds[0][tile], kinds[1][tile], reach[n].tobytes()
    return found


class _Tables:
    """The different tables of a grid, each kept once."""

    def __init__(self, mask: Mask, q: _Cut, k: _Cut, rows: int, columns: int):
        self.mask, self.q, self.k, self.shape = mask, q, k, (rows, columns)
        self.index: dict[bytes, int] = {}
        self.alike: dict[tuple[int, int, bytes], int | None] = {}
        self.everything = self._add(np.ones(self.shape, dtype=bool))

    def of(self, i: int, j: int, look: tuple[int, int, bytes] | None) -> int | None:
        """The table of the tile at (i, j), by its key in `_alike`; None if it is empty."""
        if look is None:
            return self._add(self._visible(i, j))
        if look not in self.alike:
            self.alike[look] = self._add(self._visible(i, j))
        return self.alike[look]

    def bits(self) -> np.ndarray:
        packed = np.frombuffer(b"".join(self.index), dtype=np.int32)
        return packed.reshape(-1, self.shape[0], self.shape[1] // WORD)

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
