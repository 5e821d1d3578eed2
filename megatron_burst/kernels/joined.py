# SPDX-License-Identifier: Apache-2.0
"""Joining of tiles: one operator call computes several tiles as sequences of different lengths.

FlashAttention computes many sequences of different lengths in one call, given by cumulative
lengths. Consecutive tiles become the sequences of one call. The rows and columns between tiles
become sequences without columns or rows. So a pair of shards needs only one or a few calls, for any
number of documents. `joined` decides which tiles share a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..masks.tiling import Tile
from .operators import Lengths

# Kinds of tiles of one call: triangles and bands along the diagonal; or fully visible tiles.
DIAGONAL, SQUARE = "diagonal", "square"
# Maximum number of rows or columns between two tiles of one call. Merging 4096 unused rows needs
# about as much time as a separate call (32 heads of width 128: 200 MB read and written).
GAP = 4096


class JoinedTiles(NamedTuple):
    """Tiles for one call; each starts at or after the last row and column of the previous tile.

    Attributes:
        tiles: The tiles.
        span: Rows and columns that enclose all tiles, and the visibility that the call applies to
            each tile. If `span` is a triangle, every tile is a triangle. If `span` has a band, it
            is the band of every tile, and ends at the tile's diagonal.
        lengths: Rows and columns of each tile, and of each gap between two tiles.
    """

    tiles: tuple[Tile, ...]
    span: Tile
    lengths: Lengths


def joined(tiles: Sequence[Tile]) -> list[Tile | JoinedTiles]:
    """Join tiles that can share a call, and return joined and single tiles sorted by first row."""
    # A tile of one row and one column is a triangle and a square: use the kind of other tiles.
    single_kind = DIAGONAL if any(tile.triangle or tile.band for tile in tiles) else SQUARE
    chains: dict[str | None, list[_Chain]] = {DIAGONAL: [], SQUARE: [], None: []}
    for tile in sorted(tiles, key=lambda tile: (tile.rows.start, tile.columns.start)):
        kind = _kind(tile, single_kind)
        for chain in chains[kind] if kind else ():
            if chain.extend(tile):
                break
        else:
            chains[kind].append(_Chain(tile))
    sorted_chains = sorted(chain for tile in chains.values() for chain in tile)
    return [chain.tiles[0] if len(chain.tiles) == 1 else chain.joined() for chain in sorted_chains]


def _kind(tile: Tile, single_kind: str) -> str | None:
    """Return `DIAGONAL` or `SQUARE`: only tiles of one kind can join a call. None: no joining.

    Args:
        tile: The tile.
        single_kind: Result for a tile with one row and one column, which fits both kinds.
    """
    if tile.table is not None or tile.rows.step not in (1, None):
        return None
    if tile.columns.step not in (1, None):
        return None
    (rows, columns), band = tile.shape, tile.band
    if band is None:
        return single_kind if rows == columns == 1 else DIAGONAL if tile.triangle else SQUARE
    return DIAGONAL if rows == columns and band.right == 0 else None


class _Chain:
    """Tiles that are joined in one call, collected one by one."""

    def __init__(self, first: Tile):
        self.tiles = [first]
        self._band = first.band
        self._longest = 0 if first.band else first.shape[0]  # largest rows of tiles without a band

    def __lt__(self, other_chain: _Chain) -> bool:
        a, b = self.tiles[0], other_chain.tiles[0]
        return (a.rows.start, a.columns.start) < (b.rows.start, b.columns.start)

    def extend(self, tile: Tile) -> bool:
        """Add a tile if it can join the call; return True if it was added."""
        last = self.tiles[-1]
        if not 0 <= tile.rows.start - last.rows.stop <= GAP:
            return False
        if not 0 <= tile.columns.start - last.columns.stop <= GAP:
            return False
        # A triangle is a band whose width is its number of rows.
        band = self._band or tile.band
        rows = tile.rows.stop - tile.rows.start
        longest = self._longest if tile.band else max(self._longest, rows)
        if tile.band not in (None, band) or (band is not None and longest > band.left + 1):
            return False
        self.tiles.append(tile)
        self._band, self._longest = band, longest
        return True

    def joined(self) -> JoinedTiles:
        first, last = self.tiles[0], self.tiles[-1]
        rows = slice(first.rows.start, last.rows.stop, 1)
        columns = slice(first.columns.start, last.columns.stop, 1)
        causal = self._band is None and any(tile.triangle for tile in self.tiles)
        ends = [(t.rows.start, t.columns.start, t.rows.stop, t.columns.stop) for t in self.tiles]
        at = np.array(ends, dtype=np.int64).reshape(-1, 2, 2)  # start and stop, rows and columns
        # Gaps of rows and of columns precede each tile; most are empty.
        between = at[:, 0] - np.concatenate([at[:1, 0], at[:-1, 1]])
        sizes = np.zeros((len(at), 3, 2), dtype=np.int64)
        sizes[:, 0, 0], sizes[:, 1, 1] = between.T
        sizes[:, 2] = at[:, 1] - at[:, 0]
        sizes = sizes.reshape(-1, 2)
        sizes = sizes[sizes.any(axis=1)]
        span = Tile(rows, columns, triangle=causal, band=self._band)
        return JoinedTiles(tuple(self.tiles), span, Lengths(sizes))
