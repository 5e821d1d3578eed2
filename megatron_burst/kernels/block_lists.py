# SPDX-License-Identifier: Apache-2.0
"""Lists of visible blocks of a pair of shards, for FlashAttention 4.

Forward gets the visible blocks of each row block, and backward gets the visible blocks of each
column block. Fully visible and partly visible blocks are separate lists. For partly visible blocks,
a mask function reads the visible pairs from tensors (`PairMask`). There are two forms, which do not
depend on the sizes of blocks:

    intervals   every row sees one interval of columns: begin and end of each row
    tables      any mask: one bit per pair, in tables that equal 128 x 128 tiles share

All numbers are local rows and columns of the pair, so the layout does not matter. Masks of causal
sequences, windows and packed documents are intervals, because shards hold ascending positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..layout import Span
from ..layout.layouts import counted
from ..masks import Mask
from .tile_grid import TileGrid
from .triton_kernel import MaskedPairs, on_device

UNIT = 128  # rows and columns of a table
INTERVALS, TABLES = "intervals", "tables"


class BlockSize(NamedTuple):
    """Numbers of rows and columns of a block."""

    rows: int
    columns: int


class BlockLists(NamedTuple):
    """Visible blocks of a pair of shards, by row block or by column block.

    Attributes:
        partial_count: int32 [blocks], number of partly visible blocks.
        partial_index: int32 [blocks, n], their column blocks (or row blocks), ascending; entries
            after `partial_count` are 0.
        full_count: int32 [blocks], number of fully visible blocks.
        full_index: int32 [blocks, m], same as `partial_index`, of fully visible blocks.
    """

    partial_count: np.ndarray
    partial_index: np.ndarray
    full_count: np.ndarray
    full_index: np.ndarray


class PairMask(NamedTuple):
    """Visible pairs of partly visible blocks.

    Attributes:
        form: `INTERVALS` or `TABLES`.
        arrays: int32 arrays. `INTERVALS`: first visible column of each row, and the column after
            the last one; 0 and 0 if the row sees none. `TABLES`: bits as in `TileGrid.bits`, and
            the number of each tile's table, [row tiles, column tiles + 1]. Rows are padded to a
            multiple of two tiles.
    """

    form: str
    arrays: tuple[np.ndarray, np.ndarray]


class BlockArguments(NamedTuple):
    """Arguments of one operator call.

    Attributes:
        form: Same as in `PairMask`.
        mask_tensors: Arrays of `PairMask` on the device, one-dimensional.
        lists: Arrays of `BlockLists` on the device, with two first dimensions of size 1 for batch
            and heads.
        size: Size of the blocks in `lists`.
    """

    form: str
    mask_tensors: list[torch.Tensor]
    lists: tuple[torch.Tensor, ...]
    size: BlockSize


class BlockPairs(MaskedPairs):
    """All pairs of shards that were planned for one mask, and their arrays on devices."""

    def __init__(self, mask: Mask):
        super().__init__(mask)
        self.masks: dict[torch.device, list[tuple[str, list[torch.Tensor]]]] = {}

    def shape(self, pair: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of a pair."""
        rows, columns = (sum(span.length for span in spans) for spans in self.spans[pair])
        return rows, columns

    def mask_tensors(self, pair: int, device: torch.device) -> tuple[str, list[torch.Tensor]]:
        """Return form and tensors of the `PairMask` of a pair."""
        masks = self.masks.setdefault(device, [])
        if pair >= len(masks):
            grids = enumerate(self.tiles(UNIT, UNIT))
            made = [pair_mask(grid, *self.shape(n)) for n, grid in grids if n >= len(masks)]
            copies = on_device([[one.arrays] for one in made], device)
            masks += [
                (one.form, [x.flatten() for x in arrays])
                for one, (arrays,) in zip(made, copies, strict=True)
            ]
        return masks[pair]

    def lists_on(
        self, pair: int, size: BlockSize, by: str, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Return the `BlockLists` of a pair on a device, by="rows" or by="columns"."""
        lists = self.lists.setdefault((*size, by, device), [])
        if pair >= len(lists):
            grids = enumerate(self.tiles(*size))
            made = [
                [block_lists(grid, by, *self.shape(n), size)]
                for n, grid in grids
                if n >= len(lists)
            ]
            lists += on_device(made, device)
        return tuple(x[None, None] for x in lists[pair][0])


class PairBlocks(NamedTuple):
    """Plan of one pair of shards: `number` is its index in `pairs`."""

    pairs: BlockPairs
    number: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and number of columns."""
        return self.pairs.shape(self.number)

    def arguments(self, size: BlockSize, by: str, device: torch.device) -> BlockArguments:
        """Return the arguments of a call, with lists by="rows" or by="columns"."""
        form, tensors = self.pairs.mask_tensors(self.number, device)
        lists = self.pairs.lists_on(self.number, size, by, device)
        return BlockArguments(form, tensors, lists, size)


def block_lists(grid: TileGrid, by: str, rows: int, columns: int, size: BlockSize) -> BlockLists:
    """Return the lists of a pair of shards with `rows` x `columns` pairs.

    Args:
        grid: Tiles of the size `size`.
        by: "rows" for lists of each row block, "columns" for lists of each column block.
        rows: Number of rows.
        columns: Number of columns.
        size: Size of the blocks.
    """
    side = 0 if by == "rows" else 1
    blocks = -(-(rows, columns)[side] // size[side])
    return BlockLists(*_listed(grid.partial, side, blocks), *_listed(grid.full, side, blocks))


def _listed(tiles: np.ndarray, side: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return number and index of the tiles of each block; tiles are sorted by rows, then columns.

    The index has at least one column, because a tensor without elements has no address.
    """
    tiles = tiles[np.argsort(tiles[:, side], kind="stable")]
    count = np.bincount(tiles[:, side], minlength=blocks)
    index = np.zeros((blocks, max(count.max(initial=0), 1)), dtype=np.int32)
    index[tiles[:, side], counted(np.zeros_like(count), count)] = tiles[:, 1 - side]
    return count.astype(np.int32), index


def pair_mask(grid: TileGrid, rows: int, columns: int) -> PairMask:
    """Return the visible pairs of a grid of 128 x 128 tiles, as intervals if possible."""
    begin, end, seen = _row_extent(grid, rows, columns)
    if (end - begin == seen).all():
        return PairMask(INTERVALS, (begin.astype(np.int32), end.astype(np.int32)))
    height, width = _padded(rows) // UNIT, -(-columns // UNIT) + 1
    numbers = np.full((height, width), len(grid.bits), dtype=np.int32)  # the table without bits
    numbers[tuple(grid.full.T)] = 0  # the table with all bits
    numbers[tuple(grid.partial[:, :2].T)] = grid.partial[:, 2]
    return PairMask(TABLES, (np.concatenate([grid.bits, 0 * grid.bits[:1]]), numbers))


def _padded(rows: int) -> int:
    """Return `rows`, rounded up to a multiple of the largest block."""
    return -(-rows // (2 * UNIT)) * 2 * UNIT


def _row_extent(
    grid: TileGrid, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return first column, column after the last, and number of columns that each row sees.

    All are 0 for rows that see nothing, and for padding.
    """
    far = columns + UNIT
    begin = np.full((_padded(rows) // UNIT, UNIT), far, dtype=np.int64)
    end, seen = np.zeros_like(begin), np.zeros_like(begin)
    for tiles, first, last, count in (_full_extent(grid), _partial_extent(grid, far)):
        row, starts = np.unique(tiles[:, 0], return_index=True)
        if len(row):
            begin[row] = np.minimum(begin[row], np.minimum.reduceat(first, starts))
            end[row] = np.maximum(end[row], np.maximum.reduceat(last, starts))
            seen[row] += np.add.reduceat(count, starts)
    begin, end, seen = begin.ravel(), end.ravel(), seen.ravel()
    blind = (seen == 0) | (np.arange(len(seen)) >= rows)
    return tuple(np.where(blind, 0, x) for x in (begin, end, seen))  # pyright: ignore


def _full_extent(grid: TileGrid) -> tuple[np.ndarray, ...]:
    """Return the fully visible tiles, and the same as `_partial_extent` for all rows at once."""
    left = grid.full[:, 1:].astype(np.int64) * UNIT
    return grid.full, left, left + UNIT, np.full_like(left, UNIT)


def _partial_extent(grid: TileGrid, far: int) -> tuple[np.ndarray, ...]:
    """Return the partly visible tiles, and the extent of each of their rows.

    Arrays [tiles, 128]: first visible column, `far` if there is none; the column after the last
    one; number of visible columns.
    """
    table = np.unpackbits(grid.bits.view(np.uint8), axis=2, bitorder="little")
    some, count = table.any(axis=2), table.sum(axis=2, dtype=np.int64)
    first = np.where(some, table.argmax(axis=2), far)
    last = np.where(some, UNIT - table[:, :, ::-1].argmax(axis=2), -far)
    left, number = grid.partial[:, 1:2].astype(np.int64) * UNIT, grid.partial[:, 2]
    return grid.partial, left + first[number], left + last[number], count[number]


def planned(pairs: BlockPairs, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> PairBlocks:
    """Add a pair of shards to `pairs`, and return its plan."""
    pairs.spans.append((q_spans, k_spans))
    return PairBlocks(pairs, len(pairs.spans) - 1)
