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

from typing import NamedTuple

import numpy as np
import torch

from ..masks import Mask
from .flex_tables import BLOCK, BlockLists, intervals, listed
from .masked_pairs import MaskedPairs, copy_pairs
from .tile_grid import TileGrid

INTERVALS, TABLES = "intervals", "tables"


class BlockSize(NamedTuple):
    """Numbers of rows and columns of a block."""

    rows: int
    columns: int


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
        lists: Arrays of `flex_tables.BlockLists` on the device, with two first dimensions of size 1
            for batch and heads.
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
        self.lists: dict[tuple, list[tuple[torch.Tensor, ...]]] = {}
        self.masks: dict[torch.device, list[tuple[str, list[torch.Tensor]]]] = {}

    def mask_tensors(self, pair: int, device: torch.device) -> tuple[str, list[torch.Tensor]]:
        """Return the form of a pair's `PairMask`, and its arrays as one-dimensional tensors."""
        masks = self.masks.setdefault(device, [])
        if pair >= len(masks):
            missing = list(enumerate(self.tiles(BLOCK, BLOCK)))[len(masks) :]
            made = [pair_mask(grid, *self.shape(n)) for n, grid in missing]
            copies = copy_pairs((mask.arrays for mask in made), device)
            masks += [
                (mask.form, [x.flatten() for x in tensors])
                for mask, tensors in zip(made, copies, strict=True)
            ]
        return masks[pair]

    def lists_on(
        self, pair: int, size: BlockSize, by: str, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Return a pair's block lists on a device: per row block (by="rows") or column block."""
        lists = self.lists.setdefault((*size, by, device), [])
        if pair >= len(lists):
            missing = list(enumerate(self.tiles(*size)))[len(lists) :]
            made = [compact_lists(grid, by, *self.shape(n), size) for n, grid in missing]
            lists += [tuple(x[None, None] for x in tensors) for tensors in copy_pairs(made, device)]
        return lists[pair]


class PairBlocks(NamedTuple):
    """Plan of one pair of shards. `number` is the index of the pair of shards in `pairs`."""

    pairs: BlockPairs
    number: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of the pair of shards."""
        return self.pairs.shape(self.number)

    def arguments(self, size: BlockSize, by: str, device: torch.device) -> BlockArguments:
        """Return the arguments of a call with lists per row block (by="rows") or column block."""
        form, tensors = self.pairs.mask_tensors(self.number, device)
        lists = self.pairs.lists_on(self.number, size, by, device)
        return BlockArguments(form, tensors, lists, size)


def compact_lists(grid: TileGrid, by: str, rows: int, columns: int, size: BlockSize) -> BlockLists:
    """Return the block lists of a pair of shards, as arrays as wide as the longest list.

    Args:
        grid: Tiles of the size `size`.
        by: "rows" for one list per row block, "columns" for one list per column block.
        rows: Number of rows of the pair.
        columns: Number of columns of the pair.
        size: Size of the blocks.
    """
    side = 0 if by == "rows" else 1
    blocks = -(-(rows, columns)[side] // size[side])
    return BlockLists(*listed(grid.partial, side, blocks), *listed(grid.full, side, blocks))


def pair_mask(grid: TileGrid, rows: int, columns: int) -> PairMask:
    """Return the visible pairs of a grid of 128 x 128 tiles, as intervals if possible."""
    height, width = -(-rows // (2 * BLOCK)) * 2, -(-columns // BLOCK) + 1
    arrays = intervals(grid, 0, height)
    if arrays is not None:
        return PairMask(INTERVALS, arrays)
    numbers = np.full((height, width), len(grid.bits), dtype=np.int32)  # the table without bits
    numbers[tuple(grid.full.T)] = 0  # the table with all bits
    numbers[tuple(grid.partial[:, :2].T)] = grid.partial[:, 2]
    return PairMask(TABLES, (np.concatenate([grid.bits, 0 * grid.bits[:1]]), numbers))
