# SPDX-License-Identifier: Apache-2.0
"""The blocks into which a state is cut, so that a scan sends them one after another.

A state is first cut into equal shares of heads, then of columns (of values), then of rows (of
keys). Rows are not cut if the transition is a matrix, because a matrix mixes rows.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple


class StateBlocks(NamedTuple):
    """The division of a state [heads, rows, columns] into equal blocks.

    Attributes:
        sizes: Heads, rows and columns of the state.
        shares: Number of equal shares of the heads, of the rows and of the columns.
    """

    sizes: tuple[int, int, int]
    shares: tuple[int, int, int]

    @property
    def number(self) -> int:
        """Number of blocks."""
        return self.shares[0] * self.shares[1] * self.shares[2]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows and columns of each block."""
        heads, rows, columns = (s // n for s, n in zip(self.sizes, self.shares, strict=True))
        return heads, rows, columns

    def slices(self, block: int) -> tuple[slice, slice, slice]:
        """Return the slices of heads, rows and columns of block number `block`.

        Consecutive blocks differ first in rows, then in columns, then in heads.
        """
        heads, remainder = divmod(block, self.shares[1] * self.shares[2])
        columns, rows = divmod(remainder, self.shares[1])
        parts = zip((heads, rows, columns), self.shape, strict=True)
        h, d, w = (slice(i * size, (i + 1) * size) for i, size in parts)
        return h, d, w


def cut(blocks: int, heads: int, rows: int, columns: int, mixes: bool) -> StateBlocks:
    """Divide a state into `blocks` equal blocks.

    Args:
        blocks: Number of blocks.
        heads: Heads of the state.
        rows: Rows of the state.
        columns: Columns of the state.
        mixes: True if the transition is a matrix, which mixes rows.

    Raises:
        ValueError: A state of this size cannot be divided into `blocks` equal blocks.
    """
    shares = _shares(blocks, heads, rows, columns, mixes)
    if shares is None:
        raise ValueError(
            f"blocks: {heads} heads of {rows} x {columns} cannot be cut into {blocks} equal blocks"
            f"{' of whole columns' * mixes}; these numbers up to 64 work: "
            f"{able(64, heads, rows, columns, mixes)}"
        )
    return StateBlocks((heads, rows, columns), shares)


def able(most: int, heads: int, rows: int, columns: int, mixes: bool) -> list[int]:
    """Return all numbers of blocks up to `most` into which `cut` can divide a state."""
    return [n for n in range(1, most + 1) if _shares(n, heads, rows, columns, mixes)]


def _shares(
    blocks: int, heads: int, rows: int, columns: int, mixes: bool
) -> tuple[int, int, int] | None:
    """Return the numbers of shares of heads, rows and columns; None if `blocks` is impossible."""
    if blocks < 1:
        return None
    of_heads = gcd(blocks, heads)
    of_columns = gcd(blocks // of_heads, columns)
    of_rows = blocks // of_heads // of_columns
    return None if rows % of_rows or (mixes and of_rows > 1) else (of_heads, of_rows, of_columns)
