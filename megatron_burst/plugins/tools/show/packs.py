# SPDX-License-Identifier: Apache-2.0
"""Packed documents and who holds them: the pack cut by zigzag, by zigzag within each document, and
by layout balanced.

Counted from positions, so that packs of any length can be drawn. Shape letters: G ranks, S
positions of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ....layout import Layout, make
from ....masks import Full, Mask, Window
from ....schedule.tables import Grid

PADDING = -1  # in place of the number of a document


@dataclass(frozen=True)
class PackedDocuments:
    """Documents of `lengths` tokens, the last of them padding if `filled`.

    window: (left, right), how far a token sees inside its document, None for no limit.
    """

    lengths: tuple[int, ...]
    filled: bool
    mask_text: str
    window: tuple[int | None, int | None]

    @cached_property
    def bounds(self) -> np.ndarray:
        """int64 [documents + 1]: where the documents begin and end."""
        return np.cumsum([0, *self.lengths])

    @property
    def seq_len(self) -> int:
        return int(self.bounds[-1])

    @property
    def real(self) -> tuple[int, ...]:
        """Lengths of the documents that are no padding."""
        return self.lengths[:-1] if self.filled else self.lengths

    @cached_property
    def places(self) -> list[int]:
        """The place of each document among all, the longest first."""
        places = np.empty(len(self.real), dtype=np.int64)
        places[np.argsort(-np.array(self.real), kind="stable")] = np.arange(len(self.real))
        return places.tolist()

    @cached_property
    def documents(self) -> np.ndarray:
        """int64 [S]: the document of each position, or PADDING."""
        numbers = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.where(numbers < len(self.real), numbers, PADDING)

    @cached_property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [S] each: the first and the last position that each position sees."""
        every = np.arange(self.seq_len)
        begins, ends = (
            np.repeat(self.bounds[i:][: len(self.lengths)], self.lengths) for i in (0, 1)
        )
        left, right = self.window
        first = begins if left is None else np.maximum(begins, every - left)
        last = ends - 1 if right is None else np.minimum(ends - 1, every + right)
        return first, last


@dataclass(frozen=True)
class Holding:
    """A pack on ranks.

    rows: of each rank int64 [tokens], positions of the pack or PADDING.
    """

    pack: PackedDocuments
    grid: Grid
    name: str
    rows: tuple[np.ndarray, ...]

    @cached_property
    def work(self) -> list[int]:
        """Visible pairs of each rank's queries."""
        first, last = self.pack.seen
        pairs = np.where(self.pack.documents == PADDING, 0, last - first + 1)
        return [int(pairs[rows[rows != PADDING]].sum()) for rows in self.rows]

    @property
    def imbalance(self) -> float:
        return max(self.work) * len(self.work) / (sum(self.work) or 1) or 1.0

    @property
    def padding(self) -> int:
        """Tokens that are no document's."""
        return sum(map(len, self.rows)) - sum(self.pack.real)

    @cached_property
    def between(self) -> float:
        """Keys of other nodes that a node's queries see, each counted once, per rank of the node
        and in parts of what a rank holds."""
        first, last = self.pack.seen
        found = 0
        for node in range(self.grid.inter):
            own = np.concatenate(self.rows[node * self.grid.intra :][: self.grid.intra])
            own = own[own != PADDING]
            queries = own[self.pack.documents[own] != PADDING]
            change = np.zeros(self.pack.seq_len + 1, dtype=np.int64)
            np.add.at(change, first[queries], 1)
            np.add.at(change, last[queries] + 1, -1)
            seen = np.cumsum(change)[:-1] > 0
            seen[own] = False
            found += int(seen.sum())
        return found / self.pack.seq_len

    def runs(self, rank: int) -> list[tuple[int, int, int]]:
        """(first row, the one after the last, document or PADDING) of the runs of one document."""
        rows = self.rows[rank]
        return runs_of(np.where(rows == PADDING, PADDING, self.pack.documents[rows]))


def runs_of(values: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, stop, value) of each run of one value."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(a, b, int(values[a])) for a, b in pairwise(edges)]


@dataclass(frozen=True)
class PackScene:
    """One pack under several layouts."""

    pack: PackedDocuments
    grid: Grid
    held: tuple[Holding, ...]


def pack_scene(
    lengths: Sequence[int], seq_len: int, grid: Grid, mask: Mask, text: str
) -> PackScene:
    """The documents, filled up with padding to `seq_len` positions; ValueError for a mask that is
    not one window, since layout balanced has to know what a token costs."""
    if not isinstance(mask, (Full, Window)):
        raise ValueError(
            f"--mask {text}: documents are drawn with --mask causal, full or window only"
        )
    window = (mask.left, mask.right) if isinstance(mask, Window) else (None, None)
    fill = seq_len - sum(lengths)
    pack = PackedDocuments((*lengths, fill) if fill else tuple(lengths), fill > 0, text, window)
    padding = (len(lengths),) if fill else ()
    balanced = make(
        "balanced", cp_size=grid.size, cu_seqlens=pack.bounds, per_node=grid.intra,
        windows=(window,), padding=padding,
    )  # fmt: skip
    whole = make("zigzag", cp_size=grid.size)
    held = (
        Holding(pack, grid, "zigzag of the pack", _rows(whole, seq_len)),
        Holding(pack, grid, "zigzag within each document", _within(pack, grid.size)),
        Holding(pack, grid, "balanced", _rows(balanced, seq_len)),
    )
    return PackScene(pack, grid, held)


def _rows(layout: Layout, seq_len: int) -> tuple[np.ndarray, ...]:
    return tuple(layout.positions(rank, seq_len) for rank in range(layout.cp_size))


def _within(pack: PackedDocuments, ranks: int) -> tuple[np.ndarray, ...]:
    """Zigzag within documents, which are padded to multiples of 2G, as Megatron pads them."""
    lengths = np.array(pack.real)
    padded = -(-lengths // (2 * ranks)) * (2 * ranks)
    bounds = np.cumsum([0, *padded])
    positions = np.full(int(bounds[-1]), PADDING)
    for begin, start, length in zip(bounds, pack.bounds, lengths, strict=False):
        positions[begin : begin + length] = np.arange(start, start + length)
    layout = make("zigzag", cp_size=ranks, cu_seqlens=bounds)
    return tuple(positions[rows] for rows in _rows(layout, len(positions)))
