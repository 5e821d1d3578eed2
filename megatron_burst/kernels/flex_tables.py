# SPDX-License-Identifier: Apache-2.0
"""Block lists and mask arrays of FlexAttention, made from a tile grid.

FlexAttention computes the listed blocks of columns of each block of rows. It evaluates a mask
function in partly visible blocks only. The mask functions (`flex_programs`) read two arrays:

- "rows": the first visible column and the end column of each row, if every row sees consecutive
  columns (causal masks, windows and packed documents over shards in the order of positions),
- "columns": the first row and the end row that see each column, if these rows are consecutive
  (prefix trees), or
- "tables": the number of each block's bit table, and the bit tables.

The shapes of block lists and of intervals depend on the lengths of the shards only. So new
documents and trees need no compilation. This module does not import torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from ..layout.layouts import counted
from .tile_grid import TileGrid

BLOCK = 128  # rows and columns of a block
LENGTH_BITS = 3  # lengths are rounded up to numbers with this many binary digits after the first
AT_ONCE = 1024  # bit tables that are read together
OCTETS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BITS = OCTETS.sum(axis=1)  # number of bits of each octet
FIRST_BIT = OCTETS.argmax(axis=1)  # lowest bit of each octet
END_BIT = (np.arange(256)[:, None] >> np.arange(8) > 0).sum(axis=1)  # end of its highest bit
NOTHING = np.iinfo(np.int32).max  # begin of an empty interval

Kind = Literal["rows", "columns", "tables"]
INTERVALS: tuple[Kind, Kind] = "rows", "columns"  # intervals per row, and per column


class BlockLists(NamedTuple):
    """Visible blocks of columns for each block of rows, or the reverse; int32 arrays.

    Each array has one entry (or one list) per block of rows. In the reverse case it has one per
    block of columns, and lists contain blocks of rows.

    Attributes:
        partial_count: [blocks], number of partly visible blocks in each list.
        partial: [blocks, list length], indices of partly visible blocks, followed by zeros.
        full_count: [blocks], number of fully visible blocks in each list.
        full: [blocks, list length], indices of fully visible blocks, followed by zeros.
    """

    partial_count: np.ndarray
    partial: np.ndarray
    full_count: np.ndarray
    full: np.ndarray


class MaskArrays(NamedTuple):
    """Arrays of a mask function; int32.

    Attributes:
        kind: Kind of the mask function.
        first: First visible column of each row [rows]; or first row of each column [columns]; or
            the table number of each block [row blocks, column blocks].
        second: End of these intervals; or the bit tables [tables, 128, 4] as in `TileGrid.bits`.
    """

    kind: Kind
    first: np.ndarray
    second: np.ndarray

    @property
    def tables(self) -> int:
        """Number of bit tables; 0 for intervals."""
        return len(self.second) if self.kind == "tables" else 0


def rounded(length: int) -> int:
    """Round a number of rows up, so that few different lengths occur.

    The result is a multiple of `BLOCK`. Above 8 blocks, at most 1/8 is added.
    """
    unit = max(BLOCK, 1 << max((length - 1).bit_length() - 1 - LENGTH_BITS, 0))
    return -(-length // unit) * unit


def block_lists(grid: TileGrid, lengths: tuple[int, int], side: int) -> BlockLists:
    """Return the visible blocks of a pair of shards as lists.

    Args:
        grid: Tiles of `BLOCK` rows and columns.
        lengths: Rounded numbers of rows and columns.
        side: 0 for one list per block of rows, 1 for one list per block of columns.
    """
    blocks, others = lengths[side] // BLOCK, lengths[1 - side] // BLOCK
    partial, full = (listed(tiles, side, blocks, others) for tiles in (grid.partial, grid.full))
    return BlockLists(*partial, *full)


def listed(
    tiles: np.ndarray, side: int, blocks: int, others: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tiles of each block of rows (or columns) as a list, and the lengths of the lists.

    Args:
        tiles: Tiles as in `TileGrid`, sorted by rows and then by columns.
        side: 0 for lists of column blocks, one per row block; 1 for lists of row blocks, one per
            column block.
        blocks: Number of lists.
        others: Size to which lists are padded with zeros. Default: the length of the longest list,
            at least 1, because a tensor without elements has no address.

    Returns:
        Lengths of the lists without padding, int32 [blocks], and the lists, int32 [blocks, others].
    """
    tiles = tiles[np.argsort(tiles[:, side], kind="stable")]
    block, other = tiles[:, side], tiles[:, 1 - side]
    count = np.bincount(block, minlength=blocks)
    width = max(count.max(initial=0), 1) if others is None else others
    lists = np.zeros((blocks, width), dtype=np.int32)
    lists[block, counted(np.zeros_like(count), count)] = other
    return count.astype(np.int32), lists


def mask_arrays(grid: TileGrid, lengths: tuple[int, int]) -> MaskArrays:
    """Return intervals of columns or of rows if they describe the mask; otherwise bit tables.

    Args:
        grid: Tiles of `BLOCK` rows and columns.
        lengths: Rounded numbers of rows and columns.
    """
    for side, kind in enumerate(INTERVALS):
        arrays = intervals(grid, side, lengths[side] // BLOCK)
        if arrays is not None:
            return MaskArrays(kind, *arrays)
    nothing = len(grid.bits)  # number of the table of invisible blocks
    number = np.full([n // BLOCK for n in lengths], nothing, dtype=np.int32)
    number[grid.full[:, 0], grid.full[:, 1]] = 0
    number[grid.partial[:, 0], grid.partial[:, 1]] = grid.partial[:, 2]
    tables = 1 << nothing.bit_length()  # a power of two, so that shapes repeat
    bits = np.zeros((tables, *grid.bits.shape[1:]), dtype=np.int32)
    bits[:nothing] = grid.bits
    return MaskArrays("tables", number, bits)


def intervals(grid: TileGrid, side: int, blocks: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the begin and the end of the visible interval of each row, or of each column.

    The result is None if the visible columns of a row (or rows of a column) are not consecutive.

    Args:
        grid: Tiles of `BLOCK` rows and columns.
        side: 0 for intervals of columns, one per row; 1 for intervals of rows, one per column.
        blocks: Number of blocks of rows (or of columns) of the result.
    """
    tables = _table_intervals(grid.bits, side)
    if tables is None:
        return None
    first = np.full((blocks, BLOCK), NOTHING, dtype=np.int32)
    end, count = (np.zeros((blocks, BLOCK), dtype=np.int32) for _ in range(2))
    if len(grid.full):
        tiles, block, start, number = _grouped(grid.full, side)
        other = tiles[:, 1 - side, None]
        first[block] = other[start] * BLOCK
        end[block] = (other[start + number - 1] + 1) * BLOCK
        count[block] = number[:, None] * BLOCK
    if len(grid.partial):
        tiles, block, start, _ = _grouped(grid.partial, side)
        begin, length = (x[tiles[:, 2]] for x in tables)
        begin = begin + tiles[:, 1 - side, None] * BLOCK
        stop = np.where(length > 0, begin + length, 0)
        begin = np.where(length > 0, begin, NOTHING)
        first[block] = np.minimum(first[block], np.minimum.reduceat(begin, start))
        end[block] = np.maximum(end[block], np.maximum.reduceat(stop, start))
        count[block] += np.add.reduceat(length, start)
    if (np.where(count > 0, end - first, 0) != count).any():
        return None
    return np.where(count > 0, first, 0).ravel(), end.ravel()


def _grouped(tiles: np.ndarray, side: int) -> tuple[np.ndarray, ...]:
    """Group tiles by row block (`side` 0) or column block (1).

    Returns:
        A tuple: the tiles in the order of groups, the block of each group, the index of each
        group's first tile, and the number of tiles in each group. Within a group, tiles are sorted
        by their other block.
    """
    tiles = tiles[np.argsort(tiles[:, side], kind="stable")]
    return tiles, *np.unique(tiles[:, side], return_index=True, return_counts=True)


def _table_intervals(bits: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return begin and length of the visible interval of each row (or column) of each table.

    Args:
        bits: Bit tables.
        side: 0 for intervals of columns, one per row; 1 for intervals of rows, one per column.

    Returns:
        Two int32 arrays [tables, 128]. None if visible columns (or rows) are not consecutive.
    """
    begin, length = (np.zeros(bits.shape[:2], dtype=np.int32) for _ in range(2))
    for low in range(0, len(bits), AT_ONCE):
        octets = np.ascontiguousarray(bits[low : low + AT_ONCE]).view(np.uint8)
        if side:
            visible = np.unpackbits(octets, axis=-1, bitorder="little")
            octets = np.packbits(visible, axis=1, bitorder="little").transpose(0, 2, 1)
        nonzero, last = octets != 0, octets.shape[-1] - 1
        low_octet = nonzero.argmax(axis=-1)[..., None]
        high_octet = last - nonzero[..., ::-1].argmax(axis=-1)[..., None]
        first = 8 * low_octet + FIRST_BIT[np.take_along_axis(octets, low_octet, axis=-1)]
        end = 8 * high_octet + END_BIT[np.take_along_axis(octets, high_octet, axis=-1)]
        count = BITS[octets].sum(axis=-1)
        if (np.where(count > 0, (end - first)[..., 0], 0) != count).any():
            return None
        begin[low : low + AT_ONCE], length[low : low + AT_ONCE] = first[..., 0], count
    return begin, length
