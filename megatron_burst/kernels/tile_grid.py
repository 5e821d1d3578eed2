"""A pair of shards as a grid of equal tiles, for kernels that work through tiles of one size.

Lists, for every block of rows (or of columns), the blocks of the other side that it sees: wholly
visible ones and partly visible ones apart, and for the latter a table of bits. Tiles that look
alike share a table: the diagonal of a causal mask needs one, a window two. Bands, strides and
documents therefore need no code on the device. This module decides which tiles are alike;
`tile_parts` and `tile_tables`
say what they show. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..layout import Span
from ..masks import Mask
from ..masks.seen import counted
from .tile_parts import Frame, Pairs, Runs, candidates, tile_parts
from .tile_tables import tables_of


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
    """Tiles that see something, by rows and then columns: (row block, column block), and of partly
    visible ones a table.

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
    (grid,) = tile_grids(mask, [(q_spans, k_spans)], rows, columns)
    return grid


def tile_grids(mask: Mask, pairs: Pairs, rows: int, columns: int) -> list[TileGrid]:
    """`tile_grid` of many pairs of shards in one go."""
    if not pairs:
        return []
    frame = Frame(pairs, rows, columns)
    found = candidates(mask, pairs, frame)
    if found.many and len(pairs) > 1:
        half = len(pairs) // 2
        both = (tile_grids(mask, some, rows, columns) for some in (pairs[:half], pairs[half:]))
        return [grid for grids in both for grid in grids]
    runs, parts, asked = tile_parts(mask, found, frame)
    tile, table, tables = tables_of(mask, pairs, frame, parts, asked)
    pair, row, column = frame.place(tile)
    visible = tables.visible[table]
    whole = visible == frame.high(pair, row) * columns
    full = _full(frame, runs, tile[whole])
    (some,) = np.nonzero(~whole & (visible > 0))
    pair = pair[some]
    number, bits = _numbered(pair, table[some], tables.bits, len(pairs))
    partial = np.stack([row[some], column[some], number], axis=1).astype(np.int32)
    partial = np.split(partial, np.searchsorted(pair, np.arange(1, len(pairs))))
    return [TileGrid(*each) for each in zip(full, partial, bits, strict=True)]


def _full(frame: Frame, runs: Runs, tiles: np.ndarray) -> list[np.ndarray]:
    """Of each pair the wholly visible tiles: those in runs, and others."""
    first = np.concatenate([runs.first, tiles])
    count = np.concatenate([runs.wide, np.ones_like(tiles)])
    order = np.argsort(first, kind="stable")
    first, count = first[order], count[order]
    pair, row, column = frame.place(first)
    found = np.empty((int(count.sum()), 2), dtype=np.int32)
    found[:, 0], found[:, 1] = np.repeat(row, count), counted(column, count)
    before = np.concatenate([[0], np.cumsum(count)])
    ends = before[np.searchsorted(pair, np.arange(1, len(frame.base) - 1))]
    return np.split(found, ends)


def _numbered(
    pair: np.ndarray, table: np.ndarray, bits: np.ndarray, pairs: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Numbers of the tables within each pair, in the order in which its tiles have them, and the
    bits of each pair. Number 0 shows everything."""
    index: dict[bytes, int] = {}
    equal = np.array([index.setdefault(x.tobytes(), len(index)) for x in bits], dtype=np.int64)
    example = np.zeros(len(index), dtype=np.int64)
    example[equal[::-1]] = np.arange(len(bits))[::-1]
    key = pair * len(index) + equal[table]
    keys, first, which = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)  # pairs one after another, as the tiles are
    owner, bit = np.divmod(keys[order], max(len(index), 1))
    ends = np.searchsorted(owner, np.arange(pairs + 1))
    number = np.empty_like(order)
    number[order] = np.arange(len(order)) - ends[owner] + 1
    everything = np.full((1, *bits.shape[1:]), -1, dtype=np.int32)
    found = bits[example[bit]]
    each = [np.concatenate([everything, found[a:b]]) for a, b in pairwise(ends.tolist())]
    return number[which], each


def _worklist(tiles: np.ndarray, side: int) -> Worklist:
    """Tiles grouped by their block on one side (0: rows, 1: columns)."""
    if side:  # they are in the order of rows: of columns, one stable sort of small numbers
        key = tiles[:, 1].astype(np.uint16 if tiles[:, 1].max(initial=0) < 1 << 16 else np.int32)
        tiles = tiles[np.argsort(key, kind="stable")]
    count = np.bincount(tiles[:, side])
    blocks = np.flatnonzero(count)
    count = count[blocks]
    stop = np.cumsum(count)
    order = np.argsort(-count, kind="stable")
    programs = np.stack([blocks, stop - count, stop], axis=1)[order]
    return Worklist(
        programs.astype(np.int32),
        np.ascontiguousarray(tiles[:, 1 - side]),
        np.ascontiguousarray(tiles[:, 2] if tiles.shape[1] > 2 else tiles[:0, 0]),
    )
