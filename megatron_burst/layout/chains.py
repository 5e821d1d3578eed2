"""Chains: the pieces of each document in the order of their positions, whoever holds them.

A state that is carried along a document passes from piece to piece. Decides what a piece is: as
many rows of one rank as hold consecutive positions of one document. Contiguous gives every rank one
piece of each document that it holds some of; zigzag two, and one at the turn, where both meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .layouts import Layout, document_bounds


class Piece(NamedTuple):
    """`length` rows of the shard of `rank` from row `first` on; they hold the positions from
    `position` on, of document `document`."""

    rank: int
    first: int
    length: int
    document: int
    position: int


@dataclass(frozen=True)
class Chains:
    """All pieces of a sequence, in the order of their positions.

    table: int64 [pieces, 5], the fields of `Piece`; documents: how many there are, empty ones
    (which have no piece) included; ranks: how many hold the sequence. `backward` turns the order
    around: what follows then comes first, as gradients travel.
    """

    table: np.ndarray
    documents: int
    ranks: int

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
        """bool [pieces]: is it the first of its document?"""
        return np.append(True, self.document[1:] != self.document[:-1])

    @cached_property
    def ends(self) -> np.ndarray:
        """bool [pieces]: is it the last of its document?"""
        return np.append(self.begins[1:], True)

    def of(self, rank: int) -> np.ndarray:
        """The numbers of the pieces that `rank` holds, in the order of its rows."""
        mine = np.flatnonzero(self.rank == rank)
        return mine[np.argsort(self.table[mine, 1], kind="stable")]

    def backward(self) -> Chains:
        """The same pieces in the opposite order: piece i becomes piece len - 1 - i."""
        return Chains(self.table[::-1], self.documents, self.ranks)


def chains(
    layout: Layout, seq_len: int, cu_seqlens: Sequence[int] | np.ndarray | None = None
) -> Chains:
    """The chains of a sequence of `seq_len` positions under `layout`.

    cu_seqlens: cumulative lengths of its documents; None: it is one. Raises ValueError for
    documents that do not end with the sequence, and for layouts that leave no two positions that
    follow each other on one rank.
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout: give one that mb.layout.make made, got {layout!r}")
    bounds = document_bounds([0, seq_len] if cu_seqlens is None else cu_seqlens)
    if bounds[-1] != seq_len:
        raise ValueError(
            f"cu_seqlens: the documents end at {bounds[-1]}, and the sequence has {seq_len} "
            "positions"
        )
    if layout.cp_size > 1 and "striped" in layout.name:
        raise ValueError(
            f"layout {layout.name}: every row's predecessor is on another rank, and a state would "
            "travel between any two rows; take zigzag, contiguous or balanced"
        )
    found = [_pieces(layout, rank, seq_len, bounds) for rank in range(layout.cp_size)]
    table = np.concatenate(found)
    return Chains(table[np.argsort(table[:, 4], kind="stable")], len(bounds) - 1, layout.cp_size)


def _pieces(layout: Layout, rank: int, seq_len: int, bounds: np.ndarray) -> np.ndarray:
    """int64 [pieces, 5] of one rank, in the order of its rows."""
    spans = np.array(layout.spans(rank, seq_len), dtype=np.int64).reshape(-1, 3)
    start, stop = spans[:, 0], spans[:, 0] + spans[:, 2]
    # Spans that continue the one before are one run with it; then cut where documents begin.
    opens = np.append(True, start[1:] != stop[:-1])
    start, stop = start[opens], stop[np.append(np.flatnonzero(opens)[1:] - 1, len(stop) - 1)]
    runs = [_cut(a, b, bounds) for a, b in zip(start, stop, strict=True)]
    position, length, document = np.concatenate(runs, axis=1)
    first = np.cumsum(length) - length
    return np.stack([np.full_like(first, rank), first, length, document, position], axis=1)


def _cut(start: int, stop: int, bounds: np.ndarray) -> np.ndarray:
    """(position, length, document) of the parts of a run of positions, one per document."""
    inner = bounds[(bounds > start) & (bounds < stop)]
    edges = np.unique(np.concatenate([[start], inner, [stop]]))
    document = np.searchsorted(bounds, edges[:-1], side="right") - 1
    return np.stack([edges[:-1], np.diff(edges), document])
