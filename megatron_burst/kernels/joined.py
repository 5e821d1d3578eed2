# SPDX-License-Identifier: Apache-2.0
"""Tiles that one call of an operator computes, as sequences of different lengths.

FlashAttention takes many sequences of different lengths in one call, given by where each begins.
Tiles that follow each other in rows and in columns become the sequences of one such call, whatever
lies between them: rows that see no column and columns that no row sees are sequences too. So a pair
of shards takes one call, or a few, however many documents it holds; `joined` decides which tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..masks.tiling import Tile
from .operators import Lengths

# What tiles of one call are: triangles, or bands down the diagonal; or wholly visible
DIAGONAL, SQUARE = "diagonal", "square"
# Rows, or columns, between two tiles of one call, at most: to merge these takes about as long as
# a call of its own (4096 rows of 32 heads of width 128: 200 MB read and written).
GAP = 4096


class Joined(NamedTuple):
    """Tiles of one kind, each beginning in a row and a column behind those of the one before.

    whole: what they lie in. Every tile is a lower triangle if `whole` is called one, and has the
    band of `whole` if that has one, with the right edge on its diagonal. lengths: of the tiles, and
    of the rows and columns between them.
    """

    tiles: tuple[Tile, ...]
    whole: Tile
    lengths: Lengths


def joined(tiles: Sequence[Tile]) -> list[Tile | Joined]:
    """The tiles, of which those that follow each other are joined."""
    # One row and one column are a triangle as well as a square: as what there is besides.
    one = DIAGONAL if any(tile.triangle or tile.band for tile in tiles) else SQUARE
    chains: dict[str | None, list[_Chain]] = {DIAGONAL: [], SQUARE: [], None: []}
    for tile in sorted(tiles, key=lambda each: (each.rows.start, each.columns.start)):
        kind = _kind(tile, one)
        for chain in chains[kind] if kind else ():
            if chain.extend(tile):
                break
        else:
            chains[kind].append(_Chain(tile))
    found = sorted(chain for each in chains.values() for chain in each)
    return [chain.tiles[0] if len(chain.tiles) == 1 else chain.joined() for chain in found]


def _kind(tile: Tile, one: str) -> str | None:
    """What tiles of one call have in common; None: this one is computed alone. one: the kind of a
    tile of one row and one column.
    """
    if tile.table is not None or tile.rows.step not in (1, None):
        return None
    if tile.columns.step not in (1, None):
        return None
    (rows, columns), band = tile.shape, tile.band
    if band is None:
        return one if rows == columns == 1 else DIAGONAL if tile.triangle else SQUARE
    return DIAGONAL if rows == columns and band.right == 0 else None


class _Chain:
    """Tiles of one kind, for one call."""

    def __init__(self, first: Tile):
        self.tiles = [first]
        self._band = first.band
        self._longest = 0 if first.band else first.shape[0]  # rows of those without a band

    def __lt__(self, other: _Chain) -> bool:
        a, b = self.tiles[0], other.tiles[0]
        return (a.rows.start, a.columns.start) < (b.rows.start, b.columns.start)

    def extend(self, tile: Tile) -> bool:
        """Add a tile, if it follows closely and can be computed by the same call."""
        last = self.tiles[-1]
        if not 0 <= tile.rows.start - last.rows.stop <= GAP:
            return False
        if not 0 <= tile.columns.start - last.columns.stop <= GAP:
            return False
        # A triangle is a band that is as wide as it has rows.
        band = self._band or tile.band
        rows = tile.rows.stop - tile.rows.start
        longest = self._longest if tile.band else max(self._longest, rows)
        if tile.band not in (None, band) or (band is not None and longest > band.left + 1):
            return False
        self.tiles.append(tile)
        self._band, self._longest = band, longest
        return True

    def joined(self) -> Joined:
        first, last = self.tiles[0], self.tiles[-1]
        rows = slice(first.rows.start, last.rows.stop, 1)
        columns = slice(first.columns.start, last.columns.stop, 1)
        causal = self._band is None and any(tile.triangle for tile in self.tiles)
        ends = [(t.rows.start, t.columns.start, t.rows.stop, t.columns.stop) for t in self.tiles]
        at = np.array(ends, dtype=np.int64).reshape(-1, 2, 2)  # start and stop, rows and columns
        # Before each tile the rows between, and then the columns between: most are none.
        between = at[:, 0] - np.concatenate([at[:1, 0], at[:-1, 1]])
        sizes = np.zeros((len(at), 3, 2), dtype=np.int64)
        sizes[:, 0, 0], sizes[:, 1, 1] = between.T
        sizes[:, 2] = at[:, 1] - at[:, 0]
        sizes = sizes.reshape(-1, 2)
        sizes = sizes[sizes.any(axis=1)]
        whole = Tile(rows, columns, triangle=causal, band=self._band)
        return Joined(tuple(self.tiles), whole, Lengths(sizes))
