# SPDX-License-Identifier: Apache-2.0
"""Chains: the pieces of each document in the order of their positions, on any ranks.

A state that is carried along a document passes from piece to piece; along a prefix tree, from the
end of a segment to all that continue it. Decides what a piece is: as many rows of one rank as hold
consecutive positions of one document, or of one segment of a tree. Contiguous gives every rank one
piece of each document that it holds some of; zigzag two, and one at the turn, where both meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .layouts import Layout, Span, counted, document_bounds, integer, tree_mask


class Piece(NamedTuple):
    """`length` rows of the shard of `rank` from row `first` on; they hold the positions from
    `position` on, of document `document`.
    """

    rank: int
    first: int
    length: int
    document: int
    position: int


@dataclass(frozen=True)
class Chains:
    """All pieces of a sequence, in the order of their positions.

    table: int64 [pieces, 5], the fields of `Piece`; documents: how many there are, empty ones
    (which have no piece) included; ranks: how many hold the sequence. parents: int64 [pieces], of
    a tree, whose segments count as documents: the piece that each continues, -1 for none; None: a
    document's pieces continue one another. `backward` turns the order around: what follows then
    comes first, as gradients travel.
    """

    table: np.ndarray
    documents: int
    ranks: int
    parents: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def rank(self) -> np.ndarray:
        """int64 [pieces]: who holds each."""
        return self.table[:, 0]

    @property
    def document(self) -> np.ndarray:
        """int64 [pieces]: of each."""
        return self.table[:, 3]

    @cached_property
    def begins(self) -> np.ndarray:
        """Bool [pieces]: is it the first of its document, or of a tree?"""
        if self.parents is not None:
            return self.parents < 0
        return np.append(True, self.document[1:] != self.document[:-1])

    @cached_property
    def ends(self) -> np.ndarray:
        """Bool [pieces]: is it the last of its document, or does no other continue it?"""
        if self.parents is not None:
            return ~np.isin(np.arange(len(self)), self.parents)
        return np.append(self.begins[1:], True)

    @property
    def before(self) -> np.ndarray:
        """int64 [pieces]: the piece that each continues, -1 for none."""
        if self.parents is not None:
            return self.parents
        return np.where(self.begins, -1, np.arange(-1, len(self) - 1))

    @cached_property
    def order(self) -> np.ndarray:
        """int64 [pieces]: the index of each among the pieces of its rank, by row."""
        by_row = np.lexsort((self.table[:, 1], self.rank))
        found = np.empty(len(self), dtype=np.int64)
        found[by_row] = rows_before(self.rank[by_row], np.ones_like(by_row))
        return found

    def of(self, rank: int) -> np.ndarray:
        """The numbers of the pieces that `rank` holds, in the order of its rows."""
        own = np.flatnonzero(self.rank == rank)
        return own[np.argsort(self.table[own, 1], kind="stable")]

    def backward(self) -> Chains:
        """The same pieces in the opposite order: piece i becomes piece len - 1 - i. ValueError for
        those of a tree.
        """
        if self.parents is not None:
            raise ValueError("backward: pieces of a tree have no opposite order, only parents")
        return Chains(self.table[::-1], self.documents, self.ranks)


def chains(
    layout: Layout,
    seq_len: int,
    cu_seqlens: Sequence[int] | np.ndarray | None = None,
    tree: Any = None,
) -> Chains:
    """The chains of a sequence of `seq_len` positions under `layout`.

    cu_seqlens: cumulative lengths of its documents; None: it is one. tree: in place of these, what
    `mb.trees.pack` returns, or a `masks.Tree`. Raises ValueError for documents that do not end with
    the sequence, and for layouts that leave no two positions that follow each other on one rank.
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout: give one that mb.layout.make made, got {layout!r}")
    seq_len = integer("seq_len", seq_len)
    spans = [layout.spans(rank, seq_len) for rank in range(layout.cp_size)]
    mask = None
    if tree is not None:
        if cu_seqlens is not None:
            raise ValueError("tree: goes without cu_seqlens, which it says itself")
        mask = tree_mask(tree)
        if mask.bounds[-1] != seq_len:
            raise ValueError(
                f"tree: it has {mask.bounds[-1]} rows, and the sequence {seq_len} positions"
            )
        cu_seqlens = mask.bounds
    bounds = document_bounds([0, seq_len] if cu_seqlens is None else cu_seqlens)
    if bounds[-1] != seq_len:
        raise ValueError(
            f"cu_seqlens: the documents end at {bounds[-1]}, and the sequence has {seq_len} "
            "positions"
        )
    apart = any(span.stride > 1 and span.length > 1 for each in spans for span in each)
    if apart or (layout.cp_size > 1 and "striped" in layout.name):
        raise ValueError(
            f"layout {layout.name}: every row's predecessor is on another rank, and a state would "
            "travel between any two rows; take zigzag, contiguous or balanced"
        )
    table = _table(spans, bounds)
    found = Chains(table[np.argsort(table[:, 4], kind="stable")], len(bounds) - 1, layout.cp_size)
    if mask is None:
        return found
    # The first piece of a segment continues the last one of the segment before it on the path.
    above = mask.parents[found.document]
    last = np.searchsorted(found.document, above, side="right") - 1
    return replace(
        found, parents=np.where(found.begins, np.where(above < 0, -1, last), found.before)
    )


def _table(held: Sequence[tuple[Span, ...]], bounds: np.ndarray) -> np.ndarray:
    """int64 [pieces, 5] of what each rank holds, rank by rank, in the order of rows."""
    spans = np.array([span for each in held for span in each], dtype=np.int64)
    rank = np.repeat(np.arange(len(held)), [len(each) for each in held])
    start, stop = spans[:, 0], spans[:, 0] + spans[:, 2]
    # Spans that continue the one before are one run with it; then cut where documents begin.
    opens = np.append(True, (start[1:] != stop[:-1]) | (rank[1:] != rank[:-1]))
    start, stop, rank = start[opens], stop[np.append(opens[1:], True)], rank[opens]
    inner = np.unique(bounds)
    low = np.searchsorted(inner, start, side="right")
    cuts = np.searchsorted(inner, stop) - low  # inside of each run
    run = np.repeat(np.arange(len(start)), cuts + 1)
    nth = counted(0, cuts + 1)
    position = np.where(nth == 0, start[run], inner[low[run] + nth - 1])
    end = np.where(nth == cuts[run], stop[run], inner[np.minimum(low[run] + nth, len(inner) - 1)])
    length, rank = end - position, rank[run]
    row = rows_before(rank, length)
    document = np.searchsorted(bounds, position, side="right") - 1
    return np.stack([rank, row, length, document, position], axis=1)


def rows_before(rank: np.ndarray, length: np.ndarray) -> np.ndarray:
    """int64 [runs]: rows of the same rank before each of these runs of rows, sorted by rank."""
    row = np.cumsum(length) - length
    opens = np.append(True, rank[1:] != rank[:-1])
    return row - row[opens][np.cumsum(opens) - 1]
