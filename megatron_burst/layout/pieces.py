# SPDX-License-Identifier: Apache-2.0
"""Chains: the pieces of each document over all ranks, in the order of their positions.

A piece is a run of rows on one rank with consecutive positions of one document, or of one segment
of a prefix tree. A piece is as long as possible. The state of linear attention is passed from piece
to piece of a document. In a tree, it is passed from the end of a segment to all segments that
continue the segment. With layout contiguous, a rank has one piece of each of its documents. With
layout zigzag, a rank has two pieces of each of its documents. The last rank has one piece, because
its two runs are adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .layouts import Layout, Span, counted, document_bounds, integer, tree_mask


class Piece(NamedTuple):
    """A run of rows of a shard with consecutive positions of one document.

    Attributes:
        rank: Rank of the shard.
        first: First row of the run in the shard.
        length: Number of rows.
        document: Index of the document.
        position: Position of the first row in the whole sequence.
    """

    rank: int
    first: int
    length: int
    document: int
    position: int


@dataclass(frozen=True)
class Chains:
    """All pieces (see `Piece`) of a sequence on all ranks, in the order of their positions.

    `backward` reverses the order, because gradients are passed from the last piece to the first.

    Attributes:
        table: int64 [pieces, 5]; the columns are the fields of `Piece`, in order.
        documents: Number of documents, including empty ones, which have no piece.
        ranks: Number of ranks that hold the sequence.
        parents: For a tree, int64 [pieces]: for each piece, the index of the piece whose state it
            continues; -1 if there is none. Each segment of a tree counts as a document. Without a
            tree, None: each piece continues the previous piece of its document.
    """

    table: np.ndarray
    documents: int
    ranks: int
    parents: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def rank(self) -> np.ndarray:
        """Rank of each piece, int64 [pieces]."""
        return self.table[:, 0]

    @property
    def document(self) -> np.ndarray:
        """Document of each piece, int64 [pieces]."""
        return self.table[:, 3]

    @cached_property
    def begins(self) -> np.ndarray:
        """Bool [pieces], true for the first piece of each document or of each tree."""
        if self.parents is not None:
            return self.parents < 0
        return np.append(True, self.document[1:] != self.document[:-1])

    @cached_property
    def ends(self) -> np.ndarray:
        """Bool [pieces], true for pieces that no other piece continues."""
        if self.parents is not None:
            return ~np.isin(np.arange(len(self)), self.parents)
        return np.append(self.begins[1:], True)

    @property
    def before(self) -> np.ndarray:
        """For each piece, the index of the piece whose state it continues; -1 if there is none.

        int64 [pieces].
        """
        if self.parents is not None:
            return self.parents
        return np.where(self.begins, -1, np.arange(-1, len(self) - 1))

    @cached_property
    def order(self) -> np.ndarray:
        """Index of each piece among the pieces of its rank, sorted by row; int64 [pieces]."""
        by_row = np.lexsort((self.table[:, 1], self.rank))
        order = np.empty(len(self), dtype=np.int64)
        order[by_row] = rows_before(self.rank[by_row], np.ones_like(by_row))
        return order

    def of(self, rank: int) -> np.ndarray:
        """Return the indices of the pieces on `rank`, in the order of the rank's rows."""
        own = np.flatnonzero(self.rank == rank)
        return own[np.argsort(self.table[own, 1], kind="stable")]

    def backward(self) -> Chains:
        """Return the same pieces in reverse order: piece i becomes piece len(self) - 1 - i.

        Raises:
            ValueError: The pieces are pieces of a tree.
        """
        if self.parents is not None:
            raise ValueError(
                "backward is not supported for the pieces of a tree; use documents (cu_seqlens)"
            )
        return Chains(self.table[::-1], self.documents, self.ranks)

    def reversed_rows(self) -> Chains:
        """Return the pieces after every rank has reversed the order of its rows.

        On a rank with s rows, row r becomes row s - 1 - r. In a sequence of n positions, position p
        becomes position n - 1 - p. Trees are not supported.
        """
        rank, first, length, document, position = self.backward().table.T
        rows = self._rows()
        first, position = rows[rank] - first - length, rows.sum() - position - length
        table = np.stack([rank, first, length, document, position], axis=1)
        return replace(self, table=table)

    def followed_by(self, other: Chains) -> Chains:
        """Return the pieces of two sequences as the pieces of one sequence.

        On each rank, the rows of `other` follow the rows of this sequence. The documents of `other`
        follow the documents of this sequence. Trees are not supported.
        """
        assert self.parents is None
        assert other.parents is None
        rows, later = self._rows(), other.table.copy()
        later[:, 1] += rows[later[:, 0]]
        later[:, 3] += self.documents
        later[:, 4] += rows.sum()
        table = np.concatenate([self.table, later])
        return Chains(table, self.documents + other.documents, self.ranks)

    def _rows(self) -> np.ndarray:
        """Return the number of rows of each rank, int64 [ranks]."""
        return np.bincount(self.rank, self.table[:, 2], self.ranks).astype(np.int64)


def chains(
    layout: Layout,
    seq_len: int,
    cu_seqlens: Sequence[int] | np.ndarray | None = None,
    tree: Any = None,
) -> Chains:
    """Return the pieces of all documents of a sequence that a layout distributes over ranks.

    Args:
        layout: The layout.
        seq_len: Number of positions of the sequence.
        cu_seqlens: Cumulative lengths of the documents; None for one document.
        tree: Prefix tree in place of documents: the result of `mb.trees.pack`, or a `masks.Tree`.

    Raises:
        ValueError: An argument is invalid, the documents do not end at `seq_len`, or the layout is
            striped, so that consecutive positions are on different ranks.

    Example:
        >>> zigzag = mb.layout.make("zigzag", cp_size=2)
        >>> mb.layout.chains(zigzag, 8).rank
        array([0, 1, 0])
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be made by mb.layout.make, got {layout!r}")
    seq_len = integer("seq_len", seq_len)
    spans = [layout.spans(rank, seq_len) for rank in range(layout.cp_size)]
    mask = None
    if tree is not None:
        if cu_seqlens is not None:
            raise ValueError("tree: mutually exclusive with cu_seqlens; use only one of them")
        mask = tree_mask(tree)
        if mask.bounds[-1] != seq_len:
            raise ValueError(
                f"tree has {mask.bounds[-1]} rows, but seq_len is {seq_len}; use equal numbers"
            )
        cu_seqlens = mask.bounds
    bounds = document_bounds([0, seq_len] if cu_seqlens is None else cu_seqlens)
    if bounds[-1] != seq_len:
        raise ValueError(
            f"cu_seqlens ends at {bounds[-1]}, but seq_len is {seq_len}; end cu_seqlens with "
            "seq_len"
        )
    strided = any(span.stride > 1 and span.length > 1 for shard in spans for span in shard)
    if strided or (layout.cp_size > 1 and "striped" in layout.name):
        raise ValueError(
            f"layout {layout.name}: every row's predecessor is on another rank, so linear "
            "attention would send a state after every row; use layout zigzag, contiguous or "
            "balanced"
        )
    table = _table(spans, bounds)
    pieces = Chains(table[np.argsort(table[:, 4], kind="stable")], len(bounds) - 1, layout.cp_size)
    if mask is None:
        return pieces
    # The first piece of a segment continues the last piece of its parent segment.
    parents = mask.parents[pieces.document]
    last = np.searchsorted(pieces.document, parents, side="right") - 1
    return replace(
        pieces, parents=np.where(pieces.begins, np.where(parents < 0, -1, last), pieces.before)
    )


def _table(shards: Sequence[tuple[Span, ...]], bounds: np.ndarray) -> np.ndarray:
    """Return the table of all pieces, with the columns of `Chains.table`, sorted by rank and row.

    Args:
        shards: Spans of each rank.
        bounds: First position of each document, and the end of the last document.
    """
    spans = np.array([span for shard in shards for span in shard], dtype=np.int64)
    rank = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    start, stop = spans[:, 0], spans[:, 0] + spans[:, 2]
    # Join each span with the previous span if it continues that span. Then cut the runs at the
    # beginnings of documents.
    opens = np.append(True, (start[1:] != stop[:-1]) | (rank[1:] != rank[:-1]))
    start, stop, rank = start[opens], stop[np.append(opens[1:], True)], rank[opens]
    inner = np.unique(bounds)
    low = np.searchsorted(inner, start, side="right")
    cuts = np.searchsorted(inner, stop) - low  # number of cuts inside each run
    run = np.repeat(np.arange(len(start)), cuts + 1)
    nth = counted(0, cuts + 1)
    position = np.where(nth == 0, start[run], inner[low[run] + nth - 1])
    end = np.where(nth == cuts[run], stop[run], inner[np.minimum(low[run] + nth, len(inner) - 1)])
    length, rank = end - position, rank[run]
    row = rows_before(rank, length)
    document = np.searchsorted(bounds, position, side="right") - 1
    return np.stack([rank, row, length, document, position], axis=1)


def rows_before(rank: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return, for each run of rows, the number of rows in earlier runs of the same rank.

    Args:
        rank: Rank of each run, sorted.
        length: Number of rows of each run.
    """
    row = np.cumsum(length) - length
    opens = np.append(True, rank[1:] != rank[:-1])
    return row - row[opens][np.cumsum(opens) - 1]
