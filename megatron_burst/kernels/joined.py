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

from ..masks.base import Band
from ..masks.tiles import Tile, Tiles
from .operators import Lengths

# Kinds of tiles: fully visible; triangles and bands along the diagonal; others.
SQUARE, DIAGONAL, ALONE = 0, 1, 2
# Maximum number of rows or columns between two tiles of one call. Merging 4096 unused rows needs
# about as much time as a separate call (32 heads of width 128: 200 MB read and written).
GAP = 4096


class JoinedTiles(NamedTuple):
    """Tiles for one call. The rows and columns of a tile follow those of the previous tile.

    Attributes:
        tiles: The tiles, sorted by first row.
        span: Tile that encloses all tiles. The call applies its triangle or band to each of `tiles`
            separately. A band ends at the diagonal, and `tiles` may include triangles that are not
            higher than the band is wide.
        lengths: Numbers of rows and columns of each tile, and of each gap between two tiles.
    """

    tiles: Tiles
    span: Tile
    lengths: Lengths


def joined(tiles: Tiles) -> list[Tile | JoinedTiles]:
    """Join tiles that can share a call, and return joined and single tiles sorted by first row."""
    tiles = tiles.at(np.lexsort((tiles.bounds[:, 3], tiles.bounds[:, 0])))
    if tiles.fully_visible:
        chains_of_columns = _chains_of_columns(tiles)
        if len(chains_of_columns) <= 2:  # fewer calls are impossible
            return [_joined_tiles(tiles, numbers) for numbers in chains_of_columns]
    chains: dict[int, list[_Chain]] = {SQUARE: [], DIAGONAL: [], ALONE: []}
    bounds, kinds = tiles.bounds[:, [0, 1, 3, 4]].tolist(), _kinds(tiles).tolist()
    patterns = [tiles.patterns[index] for index in tiles.pattern.tolist()]
    for number, (kind, ends, pattern) in enumerate(zip(kinds, bounds, patterns, strict=True)):
        for chain in chains[kind] if kind != ALONE else ():
            if chain.extend(number, ends, pattern.band):
                break
        else:
            chains[kind].append(_Chain(number, ends, pattern.band))
    # A chain's first number is the position of its first tile in the order of rows and columns.
    ordered = sorted((chain for group in chains.values() for chain in group), key=_Chain.first)
    return [_joined_tiles(tiles, np.array(chain.numbers), chain.band) for chain in ordered]


def _chains_of_columns(tiles: Tiles) -> list[np.ndarray]:
    """Group tiles that can share a call; return the indices of each group's tiles.

    A group is a run of tiles in the order of columns. Groups are sorted by first row. Packed
    documents have one group, or two if a rank holds two pieces of each document.

    Args:
        tiles: Fully visible tiles, sorted by first row.
    """
    top, bottom, _, left, right, _ = tiles.bounds.T
    order = np.argsort(left, kind="stable")
    rows, columns = (
        start[order][1:] - stop[order][:-1] for start, stop in ((top, bottom), (left, right))
    )
    breaks = (rows < 0) | (rows > GAP) | (columns < 0) | (columns > GAP)
    runs = np.split(order, np.flatnonzero(breaks) + 1) if len(order) else []
    return sorted(runs, key=lambda run: run[0])


def _joined_tiles(
    tiles: Tiles, numbers: np.ndarray, band: Band | None = None
) -> Tile | JoinedTiles:
    """Return the tiles with these indices as one call. `band` is the band of the call, or None."""
    members = tiles.at(numbers)
    if len(numbers) == 1:
        return members[0]
    ends = members.bounds[:, [0, 1, 3, 4]].reshape(-1, 2, 2)  # start and stop, of rows and columns
    # Gaps of rows and of columns precede each tile; most are empty.
    between = ends[:, :, 0] - np.concatenate([ends[:1, :, 0], ends[:-1, :, 1]])
    sizes = np.zeros((len(ends), 3, 2), dtype=np.int64)
    sizes[:, 0, 0], sizes[:, 1, 1] = between.T
    sizes[:, 2] = ends[:, :, 1] - ends[:, :, 0]
    sizes = sizes.reshape(-1, 2)
    sizes = sizes[sizes.any(axis=1)]
    first, last = ends[0, :, 0].tolist(), ends[-1, :, 1].tolist()
    rows, columns = (slice(a, b, 1) for a, b in zip(first, last, strict=True))
    triangles = np.array([pattern.triangle for pattern in members.patterns])
    triangle = band is None and bool(triangles[members.pattern].any())
    span = Tile(rows, columns, triangle=triangle, band=band)
    return JoinedTiles(members, span, Lengths(sizes))


def _kinds(tiles: Tiles) -> np.ndarray:
    """Return `DIAGONAL`, `SQUARE` or `ALONE` for each tile. Tiles in a call must be of one kind.

    A tile of one row and one column is both a triangle and fully visible. It is `DIAGONAL` if any
    tile is a triangle or has a band, otherwise `SQUARE`. `ALONE` tiles cannot be joined.
    """
    rows, columns = (tiles.bounds[:, part + 1] - tiles.bounds[:, part] for part in (0, 3))
    regular = (tiles.bounds[:, [2, 5]] == 1).all(axis=1)
    patterns = tiles.patterns
    triangle = np.array([pattern.triangle for pattern in patterns])[tiles.pattern]
    table = np.array([pattern.table is not None for pattern in patterns])[tiles.pattern]
    banded = np.array([pattern.band is not None for pattern in patterns])[tiles.pattern]
    last = np.array([pattern.band.right if pattern.band else 0 for pattern in patterns])
    diagonal = (last[tiles.pattern] == 0) & (rows == columns)  # of tiles with a band
    single = ~banded & (rows == 1) & (columns == 1) & (triangle.any() | banded.any())
    kinds = np.where(triangle | single, DIAGONAL, SQUARE)
    kinds[banded] = np.where(diagonal, DIAGONAL, ALONE)[banded]
    kinds[table | ~regular] = ALONE
    return kinds


class _Chain:
    """Tiles that are joined in one call, collected one by one.

    Attributes:
        numbers: Indices of the tiles.
        band: Band that the call applies to each tile, or None.
    """

    def __init__(self, number: int, ends: Sequence[int], band: Band | None):
        self.numbers, self.band = [number], band
        top, self._bottom, _, self._right = ends  # stops of the last tile's rows and columns
        self._longest = 0 if band else self._bottom - top  # largest rows of tiles without a band

    def first(self) -> int:
        """Return the index of the first tile."""
        return self.numbers[0]

    def extend(self, number: int, ends: Sequence[int], band: Band | None) -> bool:
        """Add a tile if it can join the call; return True if it was added.

        Args:
            number: Index of the tile.
            ends: Start and stop of the tile's rows, then of its columns.
            band: Band of the tile, or None.
        """
        top, bottom, left, right = ends
        if not 0 <= top - self._bottom <= GAP or not 0 <= left - self._right <= GAP:
            return False
        # A triangle is a band whose width is its number of rows.
        joined_band = self.band or band
        longest = self._longest if band else max(self._longest, bottom - top)
        if band not in (None, joined_band) or (joined_band and longest > joined_band.left + 1):
            return False
        self.numbers.append(number)
        self.band, self._longest, self._bottom, self._right = joined_band, longest, bottom, right
        return True
