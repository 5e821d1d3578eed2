"""Tiles that lie end to end, as one call: documents that a rank holds whole are such tiles.

FlashAttention takes many sequences of different lengths in one call, given by where each begins.
The diagonal of a shard of packed documents is such a call, and not one for every document. Decides
which tiles make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..layout.sharding import to_device
from ..masks.base import Band
from ..masks.tiling import Tile

# What tiles of one call are: triangles, or bands down the diagonal; or wholly visible
DIAGONAL, SQUARE = "diagonal", "square"
FEWEST = 3  # of one call: zigzag's own pair, which every layer of other masks has, stays as it is


class Lengths:
    """Of each of many sequences its rows and its columns, brought to each device once."""

    def __init__(self, tiles: Sequence[Tile]):
        sizes = np.array([tile.shape for tile in tiles], dtype=np.int32)
        self.longest = tuple(sizes.max(axis=0).tolist())
        zero = np.zeros((1, 2), dtype=np.int32)
        self._ends = np.concatenate([zero, np.cumsum(sizes, axis=0, dtype=np.int32)])
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative rows and columns, int32 [sequences + 1]."""
        if device not in self._there:
            rows, columns = to_device(np.ascontiguousarray(self._ends.T), device)
            self._there[device] = rows, columns
        return self._there[device]


class Joined(NamedTuple):
    """Tiles of one kind, each beginning in the row and in the column where the one before ends.

    whole: what they lie in. Every tile is a lower triangle if `whole` is called one, and has the
    band of `whole` if that has one, with the right edge on its diagonal.
    """

    tiles: tuple[Tile, ...]
    whole: Tile
    lengths: Lengths


def joined(tiles: Sequence[Tile]) -> list[Tile | Joined]:
    """The tiles in their order, of which those end to end are joined."""
    # One row and one column are a triangle as well as a square: as what there is besides.
    one = DIAGONAL if any(tile.triangle or tile.band for tile in tiles) else SQUARE
    kinds = [_kind(tile, one) for tile in tiles]
    there = {(kind, *_start(tiles[n])): n for n, kind in enumerate(kinds) if kind}
    found: dict[int, Tile | Joined] = {n: tiles[n] for n, kind in enumerate(kinds) if not kind}
    for corner in sorted(there):
        if corner not in there:  # it came behind another
            continue
        kind, chain = corner[0], [there.pop(corner)]
        limits = _limits((None, 0), tiles[chain[0]])
        while (n := there.get((kind, *_stop(tiles[chain[-1]])))) is not None:
            limits = limits and _limits(limits, tiles[n])
            if limits is None:
                break
            chain.append(there.pop((kind, *_start(tiles[n]))))
        if len(chain) < FEWEST:
            found |= {n: tiles[n] for n in chain}
        else:
            found[chain[0]] = _join([tiles[n] for n in chain])
    return [found[n] for n in sorted(found)]


def _kind(tile: Tile, one: str) -> str | None:
    """What tiles of one call have in common; None: this one is computed alone. one: the kind of a
    tile of one row and one column."""
    (rows, columns), band = tile.shape, tile.band
    steps = {tile.rows.step or 1, tile.columns.step or 1}
    if tile.table is not None or steps != {1}:
        return None
    if band is None:
        return one if rows == columns == 1 else DIAGONAL if tile.triangle else SQUARE
    return DIAGONAL if rows == columns and band.right == 0 else None


def _start(tile: Tile) -> tuple[int, int]:
    return tile.rows.start, tile.columns.start


def _stop(tile: Tile) -> tuple[int, int]:
    return tile.rows.stop, tile.columns.stop


def _limits(limits: tuple[Band | None, int], tile: Tile) -> tuple[Band | None, int] | None:
    """The band of some tiles and the rows of the longest without one, with one tile more; None if
    that cannot be one call. A triangle is a band that is as wide as it has rows."""
    band, longest = limits
    if tile.band is None:
        longest = max(longest, tile.shape[0])
    elif band in (None, tile.band):
        band = tile.band
    else:
        return None
    return None if band and longest > band.left + 1 else (band, longest)


def _join(chain: Sequence[Tile]) -> Joined:
    first, last = chain[0], chain[-1]
    band = next((tile.band for tile in chain if tile.band is not None), None)
    rows = slice(first.rows.start, last.rows.stop, 1)
    columns = slice(first.columns.start, last.columns.stop, 1)
    causal = band is None and any(tile.triangle for tile in chain)
    whole = Tile(rows, columns, triangle=causal, band=band)
    return Joined(tuple(chain), whole, Lengths(chain))
