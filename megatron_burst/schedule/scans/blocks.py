# SPDX-License-Identifier: Apache-2.0
"""The parts that a state is cut into, so that a scan can send them one behind the other.

Decides the order of the cuts: equal shares of heads, then of columns (of values), then of rows (of
keys), which a matrix transition mixes: under it rows stay together.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple


class Blocks(NamedTuple):
    """How many equal shares a state [heads, rows, columns] is cut into along each dimension."""

    sizes: tuple[int, int, int]
    shares: tuple[int, int, int]

    @property
    def number(self) -> int:
        """How many blocks there are."""
        return self.shares[0] * self.shares[1] * self.shares[2]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows and columns of each block."""
        heads, rows, columns = (s // n for s, n in zip(self.sizes, self.shares, strict=True))
        return heads, rows, columns

    def slices(self, block: int) -> tuple[slice, slice, slice]:
        """The heads, rows and columns of one; heads vary slowest, rows fastest."""
        heads, rest = divmod(block, self.shares[1] * self.shares[2])
        columns, rows = divmod(rest, self.shares[1])
        found = zip((heads, rows, columns), self.shape, strict=True)
        h, d, w = (slice(i * each, (i + 1) * each) for i, each in found)
        return h, d, w


def cut(blocks: int, heads: int, rows: int, columns: int, mixes: bool) -> Blocks:
    """A state in so many blocks; mixes: does the transition mix its rows?

    Raises ValueError where heads, columns and rows have no such shares.
    """
    shares = _shares(blocks, heads, rows, columns, mixes)
    if shares is None:
        raise ValueError(
            f"blocks: {heads} heads of {rows} x {columns} cannot be cut into {blocks} equal blocks"
            f"{' of whole columns' * mixes}; of the numbers up to 64 these work: "
            f"{able(64, heads, rows, columns, mixes)}"
        )
    return Blocks((heads, rows, columns), shares)


def able(most: int, heads: int, rows: int, columns: int, mixes: bool) -> list[int]:
    """All numbers of blocks, up to `most`, into which `cut` cuts such a state."""
    return [n for n in range(1, most + 1) if _shares(n, heads, rows, columns, mixes)]


def _shares(
    blocks: int, heads: int, rows: int, columns: int, mixes: bool
) -> tuple[int, int, int] | None:
    """Shares of heads, rows and columns, or None."""
    if blocks < 1:
        return None
    of_heads = gcd(blocks, heads)
    of_columns = gcd(blocks // of_heads, columns)
    of_rows = blocks // of_heads // of_columns
    return None if rows % of_rows or (mixes and of_rows > 1) else (of_heads, of_rows, of_columns)
