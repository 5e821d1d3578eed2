# SPDX-License-Identifier: Apache-2.0
"""Routes: the rows that a rank sends to each rank, and the rows that it receives.

`preceding` returns routes for a convolution, which needs the rows before each piece (run of
consecutive positions on one rank). `relayout` returns routes that change the layout of a tensor.
Sender and receiver compute the order of the rows of a message in the same way, so they agree
without communication. Routes are computed from runs of positions, not from single positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .layouts import (
    Layout,
    Pieces,
    Span,
    Spans,
    counted,
    document_bounds,
    integer,
    pieces_of,
)
from .pieces import Chains


class Route(NamedTuple):
    """The rows that one rank sends and receives in an exchange of rows.

    Attributes:
        sends: For each destination rank, including this rank: int64 indices of the rows of this
            rank's shard to send. A row is repeated if the destination needs it several times.
        receives: For each source rank, including this rank: int64 indices at which the received
            rows are stored in the result, in the order in which the source sends them.
        rows: Number of rows of the result on this rank. Rows that no rank sends are zero.
    """

    sends: tuple[np.ndarray, ...]
    receives: tuple[np.ndarray, ...]
    rows: int

    def leaving(self, rank: int, per_node: int) -> tuple[int, int]:
        """Return how many rows the rank sends to other ranks of its node, and to other nodes.

        Args:
            rank: Rank of this route.
            per_node: Number of consecutive ranks on each node.
        """
        counts = np.array([len(rows) for rows in self.sends])
        counts[rank] = 0
        within = np.arange(len(counts)) // per_node == rank // per_node
        return int(counts[within].sum()), int(counts[~within].sum())


def preceding(chains: Chains, width: int, rank: int) -> Route:
    """Return the route with which a rank receives the `width` - 1 rows before each of its pieces.

    A piece is a run of consecutive positions on one rank. The result has width - 1 rows for each
    piece, in the order of the pieces on the rank. The row directly before the piece is the last of
    them. Rows before the first row of a document are zero.

    Args:
        chains: Chains of the sequence.
        width: Width of the convolution: the number of rows on which an output row depends, at
            least 1.
        rank: The rank.

    Raises:
        ValueError: `width` or `rank` is invalid.

    Example:
        >>> chains = mb.layout.chains(mb.layout.make("zigzag", cp_size=2), 8)
        >>> mb.layout.preceding(chains, width=2, rank=0).rows
        2
    """
    return preceding_and_most(chains, width, rank)[0]


def preceding_and_most(chains: Chains, width: int, rank: int) -> tuple[Route, int]:
    """Return the route of `preceding`, and the number of rows of the longest message of all ranks.

    The arguments and errors are the same as in `preceding`.
    """
    moves = _preceding(chains, width)
    _check_rank(rank, chains.ranks)
    pairs = (moves.source * chains.ranks + moves.destination)[moves.source != moves.destination]
    most = int(np.unique(pairs, return_counts=True)[1].max(initial=0))
    rows = (width - 1) * int((chains.rank == rank).sum())
    return moves.route(rank, chains.ranks, rows), most


def _preceding(chains: Chains, width: int) -> RowMoves:
    """Return, for all ranks, the moves of the rows before each piece to the rank of the piece."""
    count = integer("width", width) - 1
    if count < 0:
        raise ValueError(f"width must be at least 1, got {width}")
    owner, first, length = chains.table[:, :3].T
    before, piece = chains.before, np.arange(len(chains))
    source, offset = piece, np.zeros_like(piece)  # current row before each piece
    moves = []
    for column in reversed(range(count)):
        begun = offset > 0
        source = np.where(begun, source, before[source])
        piece, begun, offset, source = (
            array[source >= 0] for array in (piece, begun, offset, source)
        )
        offset = np.where(begun, offset, length[source]) - 1
        landing = chains.order[piece] * count + column
        moves.append((owner[source], first[source] + offset, owner[piece], landing))
    empty = np.zeros((4, 0), dtype=np.int64)
    return RowMoves(*np.concatenate([empty, *(np.stack(move) for move in moves)], axis=1))


class Lineage(NamedTuple):
    """The pieces of one rank, and all earlier pieces that they continue, in a prefix tree.

    Attributes:
        pieces: int64, ascending indices of the rank's pieces (consecutive positions on one rank)
            and of all their ancestors.
        route: Route of tensors with one row per piece. Before the exchange, each rank has one row
            for each of its own pieces. After it, the rank has one row for each entry of `pieces`.
        parents: int64 [pieces], for each entry of `pieces`, the index in `pieces` of the piece that
            it continues; -1 if there is none.
        own: int64, indices in `pieces` of the rank's own pieces, in the order of the rank's rows.
        longest: Number of rows of the longest message between any two ranks.
    """

    pieces: np.ndarray
    route: Route
    parents: np.ndarray
    own: np.ndarray
    longest: int


def lineage(chains: Chains, rank: int) -> Lineage:
    """Return the pieces of `rank` and their ancestors, and the route that brings them to `rank`.

    Args:
        chains: Chains of the sequence.
        rank: The rank.

    Raises:
        ValueError: `rank` is invalid.
    """
    _check_rank(rank, chains.ranks)
    before, all_pieces = chains.before, np.arange(len(chains))
    needs = chains.rank[:, None] == np.arange(chains.ranks)
    for piece in reversed(all_pieces.tolist()):  # a piece is after the pieces that it continues
        if before[piece] >= 0:
            needs[before[piece]] |= needs[piece]
    piece, destination = np.nonzero(needs)
    landing = (np.cumsum(needs, axis=0) - 1)[piece, destination]
    source = chains.rank[piece]
    pairs = np.bincount((source * chains.ranks + destination)[source != destination], minlength=1)
    needed = needs[:, rank]
    pieces, place = all_pieces[needed], np.cumsum(needed) - 1
    return Lineage(
        pieces,
        RowMoves(source, chains.order[piece], destination, landing).route(
            rank, chains.ranks, len(pieces)
        ),
        np.where(before[pieces] < 0, -1, place[before[pieces]]),
        place[chains.of(rank)],
        int(pairs.max()),
    )


def relayout(source: Layout, target: Layout, seq_len: int, rank: int) -> Route:
    """Return the route with which a rank changes the layout of a tensor to `target`.

    Args:
        source: Current layout of the shards.
        target: Layout of the result.
        seq_len: Number of positions of the sequence.
        rank: The rank.

    Raises:
        ValueError: An argument is not a layout, the layouts have different numbers of ranks, a
            layout cannot split `seq_len`, or `rank` is invalid.

    Example:
        >>> source, target = (mb.layout.make(name, cp_size=2) for name in ("contiguous", "zigzag"))
        >>> [rows.tolist() for rows in mb.layout.relayout(source, target, 8, rank=0).sends]
        [[0, 1], [2, 3]]
    """
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise ValueError(f"{name} must be a layout made by mb.layout.make, got {layout!r}")
    if source.cp_size != target.cp_size:
        raise ValueError(
            f"target has {target.cp_size} ranks, but source has {source.cp_size}; use "
            "layouts with the same number of ranks"
        )
    _check_rank(rank, source.cp_size)
    before, after = _runs(source, seq_len), _runs(target, seq_len)
    strides = set(before.span.stride) != set(after.span.stride)
    if _strided(before) and _strided(after) and strides:
        before = _one_by_one(before)
    own = _of(after, rank)
    sends, receives = _overlaps(_of(before, rank), after), _overlaps(before, own)
    return Route(
        _grouped(sends.target_rank, sends.source_rows, source.cp_size),
        _grouped(receives.source_rank, receives.target_rows, source.cp_size),
        int(own.span.length.sum()),
    )


def _check_rank(rank: int, ranks: int) -> None:
    if not 0 <= integer("rank", rank) < ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, got {rank}")


class RowMoves(NamedTuple):
    """Rows that are sent from rank to rank, as int64 arrays with one entry per row.

    Row `row` of the shard of rank `source` becomes row `landing` of the result of rank
    `destination`.
    """

    source: np.ndarray
    row: np.ndarray
    destination: np.ndarray
    landing: np.ndarray

    def route(self, rank: int, ranks: int, rows: int) -> Route:
        """Return the route of one rank.

        Args:
            rank: The rank.
            ranks: Number of ranks.
            rows: Number of rows of the result on `rank`.
        """
        out, into = self.source == rank, self.destination == rank
        sends = _split(self.destination[out], self.landing[out], self.row[out], ranks)
        return Route(
            sends, _split(self.source[into], self.landing[into], self.landing[into], ranks), rows
        )


def _split(
    group: np.ndarray, key: np.ndarray, rows: np.ndarray, groups: int
) -> tuple[np.ndarray, ...]:
    """Group the entries of `rows`, sorted by `key` within each group.

    Args:
        group: Group of each entry, from 0 to `groups` - 1.
        key: Sort key of each entry.
        rows: The entries.
        groups: Number of groups.

    Returns:
        One array per group.
    """
    order = np.lexsort((key, group))
    cuts = np.searchsorted(group[order], np.arange(1, groups))
    return tuple(np.split(rows[order], cuts))


def _runs(layout: Layout, seq_len: int) -> Pieces:
    """Return the spans of all ranks, sorted by their first position."""
    runs = pieces_of([layout.spans(rank, seq_len) for rank in range(layout.cp_size)])
    start, stride, length = runs.span
    runs = runs._replace(span=Spans(start, np.where(length > 1, stride, 1), length))
    return runs.at(np.argsort(start, kind="stable"))


def _strided(runs: Pieces) -> bool:
    return bool((runs.span.stride > 1).any())


def _of(runs: Pieces, rank: int) -> Pieces:
    return runs.at(np.flatnonzero(runs.owner == rank))


def _one_by_one(runs: Pieces) -> Pieces:
    """Split spans into spans of one position each."""
    index = np.repeat(np.arange(len(runs.owner)), runs.span.length)
    owner, first, (start, stride, _) = runs.at(index)
    nth, ones = counted(0, runs.span.length), np.ones_like(index)
    return Pieces(owner, first + nth, Spans(start + nth * stride, ones, ones))


class _RunOverlaps(NamedTuple):
    """Common positions of a source layout and a target layout.

    There is one entry for each source span and target span that overlap.

    Attributes:
        source_rank: Rank of the source span.
        target_rank: Rank of the target span.
        source_rows: int64 [overlaps, 3], rows of the common positions in the source shard, as
            (first, step, count).
        target_rows: int64 [overlaps, 3], rows of the common positions in the target shard, as
            (first, step, count).
    """

    source_rank: np.ndarray
    target_rank: np.ndarray
    source_rows: np.ndarray
    target_rows: np.ndarray


def _overlaps(sources: Pieces, targets: Pieces) -> _RunOverlaps:
    """Return the positions that each source span and target span have in common.

    Args:
        sources: Spans of the first layout.
        targets: Spans of the second layout. All strides above 1 must be equal in both layouts.
    """
    i, j = _pairs(sources, targets)
    a, b = sources.span.at(i), targets.span.at(j)
    stride = np.maximum(a.stride, b.stride)
    anchor = np.where(a.stride >= b.stride, a.start, b.start)
    low, high = np.maximum(a.start, b.start), np.minimum(a.last, b.last)
    low = low + (anchor - low) % stride  # the first common position of the strided run
    count = (high - low) // stride + 1
    disjoint = (a.stride == b.stride) & ((a.start - b.start) % stride != 0)
    common = np.flatnonzero((count > 0) & ~disjoint)
    low, stride, count = low[common], stride[common], count[common]
    sides = sources.at(i[common]), targets.at(j[common])
    rows = (
        np.stack([x.first + (low - x.span.start) // x.span.stride, stride // x.span.stride, count])
        for x in sides
    )
    return _RunOverlaps(*(x.owner for x in sides), *(columns.T for columns in rows))


def _pairs(sources: Pieces, targets: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of source and target spans that may overlap, as two parallel arrays.

    If any span is strided, every source span is combined with every target span.
    """
    if _strided(sources) or _strided(targets):
        i, j = np.indices((len(sources.owner), len(targets.owner))).reshape(2, -1)
        return i, j
    # Runs are sorted by position, and runs of one layout do not overlap.
    low = np.searchsorted(targets.span.last, sources.span.start)
    count = np.searchsorted(targets.span.start, sources.span.last, side="right") - low
    count = np.maximum(count, 0)
    return np.repeat(np.arange(len(count)), count), counted(low, count)


def _grouped(rank: np.ndarray, rows: np.ndarray, ranks: int) -> tuple[np.ndarray, ...]:
    """Return the row numbers of overlaps, one array per rank.

    Args:
        rank: Rank of each overlap.
        rows: Rows of each overlap as (first, step, count), [overlaps, 3].
        ranks: Number of ranks.
    """
    order = np.argsort(rank, kind="stable")
    first, step, count = rows[order].T
    flat = np.repeat(first, count) + np.repeat(step, count) * counted(0, count)
    ends = np.cumsum(np.bincount(rank[order], weights=count, minlength=ranks).astype(np.int64))
    return tuple(np.split(flat, ends[:-1]))


def successors(
    layout: Layout, cu_seqlens: Sequence[int] | np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return indices with which each row of a rank gets the next token of its document.

    Every rank sends its rows `sent` to all ranks. A rank then concatenates its own s rows, the
    cp_size * n rows that ranks 0, 1, ... have sent, and one row of zeros. The last token of a
    document gets the row of zeros.

    Args:
        layout: The layout.
        cu_seqlens: Cumulative lengths of the documents; [0, length] for one sequence.
        rank: The rank.

    Returns:
        A tuple (sent, taken). `sent`, int64 [n], has the rows that `rank` sends. n is equal on all
        ranks; a shorter list is padded with its last entry. `taken`, int64 [s], has the index of
        each row's next token in the concatenation.

    Raises:
        ValueError: The lengths are invalid, the layout cannot split them, or `rank` is invalid.

    Example:
        >>> zigzag = mb.layout.make("zigzag", cp_size=2)
        >>> sent, taken = mb.layout.successors(zigzag, [0, 8], rank=0)
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be made by mb.layout.make, got {layout!r}")
    ends = document_bounds(cu_seqlens)[1:]
    total = int(ends[-1])
    positions = layout.positions(rank, total)
    firsts = [_firsts(layout.spans(source, total)) for source in range(layout.cp_size)]
    most = max(len(rows) for rows, _ in firsts)
    rows, _ = firsts[rank]
    sent = np.pad(rows, (0, most - len(rows)), mode="edge")

    taken = np.arange(1, len(positions) + 1)
    elsewhere = np.append(rows[1:], len(positions)) - 1  # next token not in the next row
    number = np.empty(total + 1, dtype=np.int64)  # index of each sent token
    for source, (row, position) in enumerate(firsts):
        number[position] = source * most + np.arange(len(row))
    number[total] = 0
    taken[elsewhere] = len(positions) + number[positions[elsewhere] + 1]
    taken[np.isin(positions + 1, ends)] = len(positions) + layout.cp_size * most
    return sent, taken


def _firsts(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Return row and position of each token whose preceding token may not be in the row before.

    These are the first token of each span, and all tokens of a span with a stride above 1.
    """
    start, stride, length = np.array(spans, dtype=np.int64).T
    count = np.where(stride == 1, 1, length)
    row = counted(np.cumsum(length) - length, count)
    return row, np.repeat(start, count) + np.repeat(stride, count) * counted(0, count)
